"""Tiny random transformers and UNets of diffusers, with calls as a pipeline makes them.

Random weights of one scale leave the modulation near zero, and a block near the identity; these are drawn so that every
block changes its hidden state about as much as in trained models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

Kwargs = dict[str, Any]
_TEXT, _SIDE = 6, 4  # tokens of the prompt; side of the latents in patches


def _flux() -> tuple[Kwargs, Kwargs]:
    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 32, "pooled_projection_dim": 32, "guidance_embeds": True,
        "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, _SIDE**2, 16), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "pooled_projections": torch.randn(1, 32), "img_ids": _ids(3), "txt_ids": torch.zeros(_TEXT, 3),
        "guidance": torch.full((1,), 3.5),
    }  # fmt: skip
    return config, call


def _flux2() -> tuple[Kwargs, Kwargs]:
    config = {
        "patch_size": 1, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 32, "timestep_guidance_channels": 32,
        "axes_dims_rope": (4, 4, 4, 4),
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, _SIDE**2, 16), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "img_ids": _ids(4), "txt_ids": torch.zeros(_TEXT, 4), "guidance": torch.full((1,), 3.5),
    }  # fmt: skip
    return config, call


def _sd3() -> tuple[Kwargs, Kwargs]:
    config = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 3, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 64, "pooled_projection_dim": 64,
        "out_channels": 4, "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "pooled_projections": torch.randn(1, 64),
    }  # fmt: skip
    return config, call


def _pixart() -> tuple[Kwargs, Kwargs]:
    config = {
        "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8, "num_layers": 2,
        "cross_attention_dim": 64, "sample_size": 8, "caption_channels": 32, "norm_num_groups": 4,
        "use_additional_conditions": False,
    }  # fmt: skip
    mask = torch.tensor([[1] * (_TEXT - 2) + [0] * 2])
    call = {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "encoder_attention_mask": mask, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip
    return config, call


def _sana() -> tuple[Kwargs, Kwargs]:
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2,
        "num_cross_attention_heads": 4, "cross_attention_head_dim": 16, "cross_attention_dim": 64,
        "caption_channels": 32, "sample_size": 8,
    }  # fmt: skip
    call = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32)}
    return config, {**call, "encoder_attention_mask": torch.ones(1, _TEXT)}


def _qwen_image() -> tuple[Kwargs, Kwargs]:
    config = {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16,
        "num_attention_heads": 4, "joint_attention_dim": 32, "axes_dims_rope": (4, 6, 6),
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, _SIDE**2, 16), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "encoder_hidden_states_mask": torch.ones(1, _TEXT, dtype=torch.long), "img_shapes": [[(1, _SIDE, _SIDE)]],
    }  # fmt: skip
    return config, call


def _z_image() -> tuple[Kwargs, Kwargs]:
    config = {
        "in_channels": 4, "dim": 64, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 4, "n_kv_heads": 4,
        "cap_feat_dim": 32, "axes_dims": [4, 6, 6], "axes_lens": [64, 16, 16],
    }  # fmt: skip
    return config, {"x": [torch.randn(4, 1, 8, 8)], "cap_feats": [torch.randn(_TEXT, 32)]}


def _wan() -> tuple[Kwargs, Kwargs]:
    config = {
        "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": 32,
        "freq_dim": 32, "ffn_dim": 128, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
    }  # fmt: skip
    return config, {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32)}


def _hunyuan_video() -> tuple[Kwargs, Kwargs]:
    config = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2,
        "num_single_layers": 2, "num_refiner_layers": 1, "text_embed_dim": 32, "pooled_projection_dim": 32,
        "rope_axes_dim": (4, 6, 6), "guidance_embeds": True,
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "encoder_attention_mask": torch.ones(1, _TEXT, dtype=torch.long), "pooled_projections": torch.randn(1, 32),
        "guidance": torch.full((1,), 6000.0),
    }  # fmt: skip
    return config, call


def _ltx() -> tuple[Kwargs, Kwargs]:
    config = {
        "in_channels": 16, "out_channels": 16, "num_attention_heads": 4, "attention_head_dim": 16,
        "cross_attention_dim": 64, "num_layers": 2, "caption_channels": 32,
    }  # fmt: skip
    call = {
        "hidden_states": torch.randn(1, 2 * _SIDE**2, 16), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "encoder_attention_mask": torch.ones(1, _TEXT, dtype=torch.long), "num_frames": 2, "height": _SIDE,
        "width": _SIDE,
    }  # fmt: skip
    return config, call


def _sdxl() -> tuple[Kwargs, Kwargs]:
    config = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (32, 64), "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "attention_head_dim": (2, 4),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "transformer_layers_per_block": (1, 1),
        "use_linear_projection": True, "cross_attention_dim": 32, "norm_num_groups": 8,
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
    }  # fmt: skip
    conditions = {"text_embeds": torch.randn(1, 32), "time_ids": torch.tensor([[8.0, 8, 0, 0, 8, 8]])}
    call = {
        "sample": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, _TEXT, 32),
        "added_cond_kwargs": conditions,
    }  # fmt: skip
    return config, call


def _ids(axes: int) -> torch.Tensor:
    """Returns the positions of image tokens; the last two axes are the row and the column."""
    ids = torch.zeros(_SIDE, _SIDE, axes)
    ids[..., -2 if axes == 3 else 1] += torch.arange(_SIDE)[:, None]
    ids[..., -1 if axes == 3 else 2] += torch.arange(_SIDE)[None]
    return ids.view(-1, axes)


FAMILIES: dict[str, tuple[str, Callable[[], tuple[Kwargs, Kwargs]], tuple[float, ...]]] = {
    "Flux.1": ("FluxTransformer2DModel", _flux, (1.0, 0.6, 0.2)),
    "Flux.2": ("Flux2Transformer2DModel", _flux2, (1.0, 0.6, 0.2)),
    "Stable Diffusion 3.5": ("SD3Transformer2DModel", _sd3, (1000.0, 600.0, 200.0)),
    "PixArt": ("PixArtTransformer2DModel", _pixart, (999.0, 600.0, 200.0)),
    "Sana": ("SanaTransformer2DModel", _sana, (999.0, 600.0, 200.0)),
    "Qwen-Image": ("QwenImageTransformer2DModel", _qwen_image, (1.0, 0.6, 0.2)),
    "Z-Image": ("ZImageTransformer2DModel", _z_image, (0.0, 0.4, 0.8)),
    "Wan": ("WanTransformer3DModel", _wan, (999.0, 600.0, 200.0)),
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", _hunyuan_video, (999.0, 600.0, 200.0)),
    "LTX-Video": ("LTXVideoTransformer3DModel", _ltx, (999.0, 600.0, 200.0)),
    "SDXL": ("UNet2DConditionModel", _sdxl, (999.0, 600.0, 200.0)),
}  # fmt: skip
"""Class, config and call, and timesteps as its pipeline counts them, of each family."""


def tiny_denoiser(family: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> nn.Module:
    """Returns the family's transformer or UNet with random weights, in the dtypes of `from_pretrained`.

    `.to(dtype)` would round buffers and parameters that diffusers keeps in float32.
    """
    import diffusers

    name, build, _ = FAMILIES[family]
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = getattr(diffusers, name)(**{**build()[0], **config}).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(torch.float32)
    for key, parameter in model.named_parameters():
        if set(key.split(".")) & set(model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.float()
        if parameter.dim() >= 2 and "scale_shift_table" not in key:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        elif not key.endswith("weight"):
            nn.init.normal_(parameter, std=0.1)
    return model  # type: ignore[no-any-return]


def tiny_calls(family: str, samples: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> list[Kwargs]:
    """Returns calls of a family's model, `samples` at each of three timesteps."""
    _, build, timesteps = FAMILIES[family]
    calls = []
    for sample in range(samples):
        torch.manual_seed(seed * 1000 + sample)
        _, call = build()
        for time in timesteps:
            noisy = {name: _noisy(name, value, dtype) for name, value in call.items()}
            noisy["t" if family == "Z-Image" else "timestep"] = torch.full((1,), time)
            calls.append({**noisy, "return_dict": False})
    return calls


def _noisy(name: str, value: Any, dtype: torch.dtype) -> Any:
    """Returns an argument in the model's dtype; the latents of each timestep are of their own."""
    if isinstance(value, list) and isinstance(value[0], torch.Tensor):
        return [_noisy(name, each, dtype) for each in value]
    if isinstance(value, dict):
        return {key: _noisy(key, each, dtype) for key, each in value.items()}
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or name.endswith("_ids"):
        return value
    drawn = torch.randn_like(value) if name in ("hidden_states", "sample", "x") else value
    return drawn.to(dtype)


def noise_of(model: nn.Module, call: Kwargs) -> torch.Tensor:
    """Returns what the model predicts on a call, in float32."""
    with torch.no_grad():
        result = model(**call)[0]
    return (result[0] if isinstance(result, list) else result).float()


PIPELINES = {
    "Flux": "FluxPipeline", "Flux.2": "Flux2Pipeline", "SD3": "StableDiffusion3Pipeline",
    "PixArt": "PixArtSigmaPipeline", "Sana": "SanaPipeline", "Qwen-Image": "QwenImagePipeline",
    "Z-Image": "ZImagePipeline", "Wan": "WanPipeline", "HunyuanVideo": "HunyuanVideoPipeline", "LTX": "LTXPipeline",
    "SDXL": "StableDiffusionXLPipeline",
}  # fmt: skip
"""Class of the pipeline of each kind."""
SMALL: dict[str, Kwargs] = {
    "Flux": {"height": 16, "width": 16},
    "Flux.2": {"height": 32, "width": 32},
    "PixArt": {"height": 16, "width": 16, "use_resolution_binning": False},
    "Sana": {"height": 32, "width": 32, "use_resolution_binning": False},
    "Qwen-Image": {"height": 32, "width": 32},
    "Z-Image": {"height": 32, "width": 32},
    "Wan": {"height": 32, "width": 32, "num_frames": 5},
    "HunyuanVideo": {
        "height": 32, "width": 32, "num_frames": 5, "prompt_template": {"template": "{}", "crop_start": 0},
        "max_sequence_length": 12,
    },
    "LTX": {"height": 32, "width": 32, "num_frames": 9},
}  # fmt: skip
"""Arguments of a call, where the defaults are those of large images."""


def tiny_image(pipe: Any, **options: Any) -> Any:
    """Returns the pixels that a tiny pipeline makes of a prompt in three steps."""
    pipe.set_progress_bar_config(disable=True)
    kind = next(kind for kind, name in PIPELINES.items() if name == type(pipe).__name__)
    call = {"num_inference_steps": 3, "generator": torch.Generator().manual_seed(3), **SMALL.get(kind, {}), **options}
    return np.asarray(pipe(prompt="a red cat", output_type="np", return_dict=False, **call)[0])


def tiny_pipeline(kind: str, directory: Path) -> Path:
    """Writes a pipeline in BF16 with random weights, of a kind of `PIPELINES`, and a tokenizer of words."""
    import diffusers
    import transformers

    torch.manual_seed(0)
    flow = diffusers.FlowMatchEulerDiscreteScheduler()
    tokenizer = _tokenizer()
    image_vae = {
        "block_out_channels": (8, 8), "norm_num_groups": 4, "latent_channels": 4, "sample_size": 16,
        "shift_factor": 0.0, "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }  # fmt: skip
    frame_vae = {
        "base_dim": 8, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }  # fmt: skip
    parts: Kwargs = {"tokenizer": tokenizer, "scheduler": flow}
    # Hidden states of the text have 32 features in all families but Flux.2, which takes those of three layers.
    sizes = {
        "vocab_size": 16, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    }  # fmt: skip
    t5 = transformers.T5Config(vocab_size=16, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
    clip = transformers.CLIPTextConfig(
        vocab_size=16, hidden_size=16 if kind == "SDXL" else 32, intermediate_size=64, num_hidden_layers=2,
        projection_dim=32, num_attention_heads=4, max_position_embeddings=77, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    if kind == "Flux":
        parts |= {
            "vae": diffusers.AutoencoderKL(**image_vae), "text_encoder": transformers.CLIPTextModel(clip),
            "text_encoder_2": transformers.T5EncoderModel(t5), "tokenizer_2": tokenizer,
        }  # fmt: skip
    elif kind == "Flux.2":
        text = {**sizes, "hidden_size": 16, "head_dim": 4, "num_hidden_layers": 31}
        vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Mistral3Config(
            text_config=transformers.MistralConfig(**text), vision_config=transformers.PixtralVisionConfig(**vision)
        )
        parts |= {
            "vae": diffusers.AutoencoderKLFlux2(
                block_out_channels=(8,) * 4, norm_num_groups=4, latent_channels=4, layers_per_block=1
            ),
            "text_encoder": transformers.Mistral3ForConditionalGeneration(config),
        }  # fmt: skip
    elif kind == "SD3":
        towers = [transformers.CLIPTextModelWithProjection(clip) for _ in range(2)]
        parts |= {
            "vae": diffusers.AutoencoderKL(**image_vae), "text_encoder": towers[0], "text_encoder_2": towers[1],
            "text_encoder_3": transformers.T5EncoderModel(t5), "tokenizer_2": tokenizer, "tokenizer_3": tokenizer,
        }  # fmt: skip
    elif kind == "PixArt":
        parts |= {
            "vae": diffusers.AutoencoderKL(**image_vae), "text_encoder": transformers.T5EncoderModel(t5),
            "scheduler": diffusers.DPMSolverMultistepScheduler(),
        }  # fmt: skip
    elif kind == "Sana":
        parts |= {
            "vae": diffusers.AutoencoderDC(
                latent_channels=4, attention_head_dim=2, encoder_block_types=("ResBlock", "EfficientViTBlock"),
                decoder_block_types=("ResBlock", "EfficientViTBlock"), encoder_block_out_channels=(8, 8),
                decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=((), (5,)),
                decoder_qkv_multiscales=((), (5,)), encoder_layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
                upsample_block_type="interpolate", downsample_block_type="stride_conv",
            ),
            "text_encoder": transformers.Gemma2Model(transformers.Gemma2Config(**sizes)),
        }  # fmt: skip
    elif kind == "Qwen-Image":
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        text = {**sizes, "rope_parameters": rope}
        vision = {
            "depth": 1, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
            "fullatt_block_indexes": [0],
        }  # fmt: skip
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
        parts |= {
            "vae": diffusers.AutoencoderKLQwenImage(**frame_vae),
            "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        }  # fmt: skip
    elif kind == "Z-Image":
        parts |= {
            "vae": diffusers.AutoencoderKL(**image_vae),
            "text_encoder": transformers.Qwen3Model(transformers.Qwen3Config(**sizes)),
        }  # fmt: skip
    elif kind == "Wan":
        umt5 = transformers.UMT5Config(vocab_size=16, d_model=32, d_ff=64, num_layers=1, num_heads=4, d_kv=8)
        parts |= {
            "vae": diffusers.AutoencoderKLWan(**frame_vae),
            "text_encoder": transformers.UMT5EncoderModel(umt5),
        }  # fmt: skip
    elif kind == "HunyuanVideo":
        parts |= {
            "vae": diffusers.AutoencoderKLHunyuanVideo(
                latent_channels=4, block_out_channels=(8,) * 4, layers_per_block=1, norm_num_groups=4
            ),
            "text_encoder": transformers.LlamaModel(transformers.LlamaConfig(**sizes)),
            "text_encoder_2": transformers.CLIPTextModel(clip), "tokenizer_2": tokenizer,
        }  # fmt: skip
    elif kind == "LTX":
        parts |= {
            "vae": diffusers.AutoencoderKLLTXVideo(
                latent_channels=16, block_out_channels=(8,) * 4, decoder_block_out_channels=(8,) * 4,
                layers_per_block=(1,) * 5, decoder_layers_per_block=(1,) * 5,
            ),
            "text_encoder": transformers.T5EncoderModel(t5),
        }  # fmt: skip
    else:
        parts |= {
            "vae": diffusers.AutoencoderKL(**image_vae), "text_encoder": transformers.CLIPTextModel(clip),
            "text_encoder_2": transformers.CLIPTextModelWithProjection(clip), "tokenizer_2": tokenizer,
            "scheduler": diffusers.EulerDiscreteScheduler(),
        }  # fmt: skip
    family = {"Flux": "Flux.1", "SD3": "Stable Diffusion 3.5", "LTX": "LTX-Video"}.get(kind, kind)
    config = {"Flux.2": {"joint_attention_dim": 48}}.get(kind, {})
    parts["unet" if kind == "SDXL" else "transformer"] = tiny_denoiser(family, torch.float32, **config)
    pipe = getattr(diffusers, PIPELINES[kind])(**parts)
    pipe.to(torch.bfloat16).save_pretrained(directory)
    return directory


def _tokenizer() -> Any:
    import transformers

    tokenizers = pytest.importorskip("tokenizers", reason="the extra hf")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "red": 4, "fox": 5, "cat": 6, "two": 7, "in": 8}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=encoder, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=12
    )
    made.chat_template = (
        "{% for m in messages %}{{ m['content'] if m['content'] is string else m['content'][0]['text'] }} {% endfor %}"
    )
    return made
