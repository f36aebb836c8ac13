"""This harness takes tiny models of many architectures from their plan to a reload, and writes what became of each.

A model is built from the default config of its architecture, every size in it replaced by a small one, and its weights
are drawn at random. Each cell of the table is one model in one format:

    model -> directory -> quantize -> checkpoint -> quant.load           -> logits, weights
                                                 -> transformers' loader -> tokens, logits, weights
                                                 -> ModelOpt's layout    -> quant.load without the plan -> logits

    equal     both loaders give the same logits, and every weight is the original one as its format rounds it; the
              card recommends transformers, whose first call is a plain `generate`, or that of a tower
    warned    the loaders differ, or transformers stops, and report and card name transformers
    refused   `quantize` stopped before it wrote anything, with one line that says why
    DIFFERENT the loaders differ, and no warning says so
    TRACEBACK something else was raised

`PYTHONPATH=. python tests/architectures.py` runs all of them and writes docs/architectures.md; names after it run those
alone. `--minutes 9` stops after nine minutes, and the next call goes on from there; `--jobs 16` takes 16 processes.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quant.export.checkpoint.convert import convert
from quant.export.checkpoint.files.names import cut_experts, expert_names
from quant.export.checkpoint.load import load
from quant.kernels.linear.experts import ExpertStack
from quant.models.huggingface import patch_forward
from quant.recipes.layers import LayerKind, expert_matrices
from quant.recipes.plan import PLAN_FILE, Plan
from quant.run.request import Request
from quant.run.run import run

FORMATS = ("nvfp4a16", "fp8_channel")
COMPRESSED, MODELOPT = LAYOUTS = ("compressed-tensors", "ModelOpt")
FOUND = Path(tempfile.gettempdir()) / "blockscale-architectures.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "architectures.md"

# Fields of configs by the small value that they get.
_SIZES = {
    1: "first_k_dense_replace moe_num_shared_experts n_group n_shared_experts num_shared_experts topk_group",
    2: "decoder_layers depth encoder_layers moe_topk n_head_kv n_layer n_layers num_decoder_layers num_encoder_layers "
    "num_experts_per_tok num_experts_per_token num_hidden_layers num_key_value_heads num_kv_heads num_layers "
    "num_local_experts_per_tok top_k_experts",
    4: "decoder_attention_heads encoder_attention_heads moe_num_experts n_head n_heads n_routed_experts "
    "num_attention_heads num_experts num_heads num_linear_key_heads num_local_experts",
    8: "patch_size qk_rope_head_dim rotary_dim",
    16: "d_head d_kv head_dim kv_channels linear_key_head_dim linear_value_head_dim qk_nope_head_dim v_head_dim",
    32: "expert_intermediate_size image_size intermediate_size_mlp kv_lora_rank moe_intermediate_size q_lora_rank",
    64: "attention_hidden_size d_model dim embed_dim embedding_size hidden_dim hidden_size lru_width model_dim n_embd "
    "n_embed projection_dim word_embed_proj_dim",
    128: "d_ff decoder_ffn_dim dim_feedforward encoder_ffn_dim encoder_vocab_size ffn_dim ffn_hidden_size ffn_size "
    "inner_dim intermediate_size max_position_embeddings max_sequence_length mlp_dim n_ctx n_inner n_positions "
    "shared_expert_intermediate_size vocab_size",
}  # fmt: skip
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}

# What default configs of an architecture need beside that, by its model_type.
STAGES = {"hidden_sizes": [32, 64], "depths": [1, 1]}
SPEECH = {"conv_dim": [32, 64], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "vocab_size": 32}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
VISION = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
_QWEN_VL = {
    "text_config": {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                    "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "vision_config": {**VISION, "intermediate_size": 128, "deepstack_visual_indexes": [0],
                      "num_position_embeddings": 16},
    "image_token_id": 101, "video_token_id": 102, "vision_start_token_id": 103, "vision_end_token_id": 104,
}  # fmt: skip
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "convnext": {**STAGES, "num_stages": 2},
    "convnextv2": {**STAGES, "num_stages": 2},
    "data2vec-audio": SPEECH,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 8},
    "detr": {
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
        "backbone_config": {"model_type": "resnet", **STAGES, "embedding_size": 32},
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "num_experts_per_tok": 2},
    "esm": {"vocab_size": 128, "pad_token_id": 1, "position_embedding_type": "rotary"},
    "gemma3": {"mm_tokens_per_image": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "hubert": SPEECH,
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {
        "text_config": {
            "vocab_size": 128, "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "num_local_experts": 4, "layer_types": ["chunked_attention", "full_attention"], "pad_token_id": 0,
        },
        "vision_config": {
            "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8, "vision_output_dim": 64, "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        "pad_token_id": 0,
    },
    "longcat_flash": {
        "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": 1, "num_hidden_layers": 2, "moe_topk": 2,
        "n_routed_experts": 4, "qk_head_dim": 24, "head_dim": 8,
    },
    "mamba2": {"num_heads": 8},
    "mobilebert": {"embedding_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "layer_types": ["mamba", "full_attention"]},
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen3_vl_moe": _QWEN_VL,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "regnet": {**STAGES, "groups_width": 16, "embedding_size": 32},
    "resnet": {**STAGES, "embedding_size": 32, "layer_type": "basic"},
    "segformer": {
        "num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [32, 64], "num_attention_heads": [1, 2],
        "sr_ratios": [2, 1], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 64,
    },
    "swin": {"embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4},
    "siglip_text_model": {"projection_size": 64},
    "unispeech": SPEECH,
    "wav2vec2": SPEECH,
    "wavlm": SPEECH,
    "youtu": {"num_key_value_heads": 4, "head_dim": 8},
}  # fmt: skip
DROPPED = {"model_type", "transformers_version", "architectures", "dtype", "per_layer_config"} | {
    "out_features", "out_indices"
}  # fmt: skip

_QUICK = """
LlamaForCausalLM Qwen2MoeForCausalLM HunYuanMoEV1ForCausalLM Llama4ForCausalLM GptOssForCausalLM GraniteMoeForCausalLM
FalconForCausalLM MambaForCausalLM Mamba2ForCausalLM JambaForCausalLM T5ForConditionalGeneration
BertForSequenceClassification GPT2ForSequenceClassification ResNetForImageClassification ViTForImageClassification
Wav2Vec2ForCTC DetrForObjectDetection CamembertForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM
WhisperForConditionalGeneration CLIPModel SiglipModel DbrxForCausalLM Qwen3VLMoeForConditionalGeneration
"""
_ALL = """
AfmoeForCausalLM AlbertForMaskedLM ApertusForCausalLM ArceeForCausalLM AriaForConditionalGeneration
AriaTextForCausalLM AudioFlamingo3ForConditionalGeneration BambaForCausalLM BartForCausalLM
BartForConditionalGeneration BeamForCausalLM BeitForImageClassification BertForSequenceClassification
BertGenerationDecoder BertLMHeadModel BertModel BigBirdForCausalLM BigBirdPegasusForCausalLM BioGptForCausalLM
BitNetForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM BlipForConditionalGeneration BloomForCausalLM
CamembertForCausalLM CanaryForConditionalGeneration CLIPForImageClassification CLIPModel CodeGenForCausalLM
Cohere2ForCausalLM Cohere2MoeForCausalLM CohereAsrForConditionalGeneration CohereForCausalLM ConvBertForMaskedLM
ConvNextForImageClassification ConvNextV2ForImageClassification CwmForCausalLM Data2VecAudioForCTC
Data2VecTextForCausalLM Data2VecVisionForImageClassification DbrxForCausalLM DebertaV2ForMaskedLM
DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM DeiTForImageClassification DetrForObjectDetection
DiffLlamaForCausalLM Dinov2ForImageClassification Dinov2Model DistilBertForMaskedLM DistilBertForQuestionAnswering
DogeForCausalLM Dots1ForCausalLM ElectraForCausalLM Ernie4_5_MoeForCausalLM Ernie4_5ForCausalLM ErnieForCausalLM
EsmForMaskedLM EuroBertForMaskedLM Exaone4ForCausalLM ExaoneMoeForCausalLM FalconForCausalLM FalconH1ForCausalLM
FalconMambaForCausalLM FlexOlmoForCausalLM FlintForCausalLM FuyuForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
Gemma3ForConditionalGeneration GemmaForCausalLM GitForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
Glm4MoeLiteForCausalLM GlmAsrForConditionalGeneration GlmForCausalLM GlmMoeDsaForCausalLM
GotOcr2ForConditionalGeneration GPT2ForSequenceClassification GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
GPTNeoForCausalLM GPTNeoXForCausalLM GPTNeoXJapaneseForCausalLM GptOssForCausalLM GraniteForCausalLM
GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GraniteMoeSWAForCausalLM
GraniteSpeechForConditionalGeneration GraniteSpeechPlusForConditionalGeneration GraniteSWAForCausalLM GteForMaskedLM
HeliumForCausalLM HubertForCTC HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM
HYV3ForCausalLM HYV4ForCausalLM IBertForMaskedLM Idefics3ForConditionalGeneration IJepaForImageClassification
ImageGPTForImageClassification InklingForCausalLM InternVLForConditionalGeneration
Jais2ForCausalLM JambaForCausalLM JetMoeForCausalLM JinaEmbeddingsV3ForMaskedLM KimiLinearForCausalLM
Kolibri1ForCausalLM LasrForCTC LayoutLMForMaskedLM LEDForConditionalGeneration Lfm2ForCausalLM Lfm2MoeForCausalLM
Lfm3ForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration LlamaForCausalLM LlamaForSequenceClassification
LlavaForConditionalGeneration LongcatFlashForCausalLM LongformerForMaskedLM LongT5ForConditionalGeneration
M2M100ForConditionalGeneration Mamba2ForCausalLM MambaForCausalLM MarianMTModel MBartForCausalLM
MegatronBertForCausalLM MellumForCausalLM MetaClip2ForImageClassification MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
MiniMaxForCausalLM MiniMaxM2ForCausalLM MiniMaxM3VLForCausalLM Ministral3ForCausalLM MinistralForCausalLM
Mistral3ForConditionalGeneration MistralForCausalLM MixtralForCausalLM MllamaForCausalLM MobileBertForMaskedLM
MobileNetV2ForImageClassification ModernBertDecoderForCausalLM ModernBertForMaskedLM ModernVBertForMaskedLM
MoonshineForConditionalGeneration MoshiForCausalLM MossTranscribeDiarizeForConditionalGeneration MPNetForMaskedLM
MptForCausalLM MT5ForConditionalGeneration MusicFlamingoForConditionalGeneration MvpForCausalLM NanoChatForCausalLM
NemotronForCausalLM NemotronHForCausalLM NllbMoeForConditionalGeneration NomicBertForMaskedLM NystromformerForMaskedLM
Olmo2ForCausalLM Olmo3ForCausalLM OlmoeForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OpenAIGPTLMHeadModel
OPTForCausalLM PaliGemmaForConditionalGeneration PegasusForCausalLM PegasusXForConditionalGeneration
PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM PLBartForCausalLM
Pop2PianoForConditionalGeneration PPLCNetForImageClassification ProphetNetForCausalLM
Qwen2_5_VLForConditionalGeneration Qwen2AudioForConditionalGeneration Qwen2ForCausalLM Qwen2MoeForCausalLM
Qwen2VLForConditionalGeneration Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM Qwen3ForCausalLM
Qwen3ForSequenceClassification Qwen3MoeForCausalLM Qwen3NextForCausalLM Qwen3VLForConditionalGeneration
Qwen3VLMoeForConditionalGeneration RegNetForImageClassification RemBertForCausalLM ResNetForImageClassification
RobertaForCausalLM RobertaForSequenceClassification RobertaPreLayerNormForCausalLM RoFormerForCausalLM RwkvForCausalLM
SeamlessM4TForTextToText SeamlessM4Tv2ForTextToText SeedOssForCausalLM SegformerForSemanticSegmentation SEWDForCTC
SEWForCTC SiglipForImageClassification SiglipModel SmolLM3ForCausalLM SmolVLMForConditionalGeneration
SolarOpenForCausalLM SqueezeBertForMaskedLM StableLmForCausalLM Starcoder2ForCausalLM SwinForImageClassification
SwitchTransformersForConditionalGeneration T5ForConditionalGeneration TapasForMaskedLM TrOCRForCausalLM
UltrabertForMaskedLM UltraVBertForMaskedLM UMT5ForConditionalGeneration UniSpeechForCTC VaultGemmaForCausalLM
ViTForImageClassification ViTMSNForImageClassification VoxtralForConditionalGeneration Wav2Vec2ForCTC WavLMForCTC
WhisperForCausalLM WhisperForConditionalGeneration XGLMForCausalLM XLMRobertaForCausalLM XLMRobertaXLForCausalLM
YolosForObjectDetection YosoForMaskedLM YoutuForCausalLM
"""
QUICK = tuple(_QUICK.split())  # for `make test`: the kinds that once went wrong, each in a second or two
ARCHITECTURES = tuple(_ALL.split())


@dataclass(frozen=True)
class Cell:
    """What became of one architecture in one format, in one layout.

    `difference` is that of the logits of the two loaders, where both gave some.
    """

    architecture: str
    format: str
    layout: str
    verdict: str
    detail: str = ""
    difference: float | None = None


def config_of(name: str) -> Any:
    """The small config of a model class of transformers."""
    import transformers

    cls = getattr(transformers, name).config_class
    fields = small(cls().to_dict()) | OVERRIDES.get(cls.model_type, {})
    return cls(**{key: value for key, value in fields.items() if key not in DROPPED}, architectures=[name])


def small(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a default config with small sizes, those of parts included."""
    found = {}
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("config"):
            value = small(value)
            value = {k: v for k, v in value.items() if k not in DROPPED or k == "model_type"}
            value |= OVERRIDES.get(value.get("model_type", ""), {})
        elif (key in SIZES and type(value) is int) or key == "head_dim":
            value = SIZES[key]
        elif key in ("layer_types", "layers_block_type", "mlp_layer_types") and value:
            value = (list(dict.fromkeys(value)) * 2)[:2]
        elif key.endswith("_token_id") and type(value) is int and value >= SIZES["vocab_size"]:
            value = 100 + sum(key.encode()) % 28
        elif key.endswith("_token_id") and isinstance(value, list):
            value = [1]
        found[key] = value
    if found.get("kv_lora_rank"):
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def build(name: str, dtype: torch.dtype) -> Any:
    """A model of random weights that all matter to the result: each matrix keeps the size of what it multiplies."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config_of(name), dtype=dtype).eval()
    assert sum(p.numel() for p in model.parameters()) < 4_000_000, f"{name} is not tiny"
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:  # others are computed, and stored nowhere
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
    model.tie_weights()
    return patch_forward(model)


def _offered(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of all kinds for a model, by the names of arguments."""
    config, generator = model.config, torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (1, 8), generator=generator)
    size = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 32)
    size = (size, size) if isinstance(size, int) else tuple(size)
    images = torch.randn(1, getattr(config, "num_channels", 3), *size, generator=generator, dtype=torch.float32)
    mels = (getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 64))
    vision = getattr(config, "vision_config", None)
    if hasattr(vision, "temporal_patch_size"):  # Qwen's: patches, and their number in time, height and width
        images = torch.randn(16, 3 * vision.temporal_patch_size * vision.patch_size**2, generator=generator)
    return {
        "input_ids": ids,
        "pixel_values": images,
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "input_values": torch.randn(1, 1600, generator=generator),
        "input_features": torch.randn(1, *mels, generator=generator),
    }


def inputs(model: Any) -> dict[str, torch.Tensor]:
    """Something that the model runs on."""
    given, ids = _offered(model), _offered(model)["input_ids"]
    found = {model.main_input_name: given[model.main_input_name]}
    if type(model).__name__ in ("CLIPModel", "SiglipModel", "AlignModel", "BlipForConditionalGeneration"):
        found = {key: given[key] for key in ("input_ids", "pixel_values")}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = ids[:, :4]
    return found


@torch.no_grad()
def result(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The first tensor that the model returns, in float32."""
    torch.manual_seed(0)
    out = model(**given)
    while not isinstance(out, torch.Tensor):
        out = next(iter(out.values() if isinstance(out, dict) else out))
    return out.float()


@torch.no_grad()
def first_calls(model: Any, given: dict[str, torch.Tensor]) -> list[tuple[str, dict[str, Any]]]:
    """The methods that users call before the model itself, with arguments on which `model`, in 16 bit, runs them."""
    dtype = next(model.parameters()).dtype
    all_kinds = {k: v.to(dtype) if v.is_floating_point() else v for k, v in _offered(model).items()}
    calls: list[tuple[str, dict[str, Any]]] = [
        (name, {key: all_kinds[key] for key in inspect.signature(getattr(model, name)).parameters if key in all_kinds})
        for name in ("get_image_features", "get_text_features", "get_audio_features")
        if hasattr(model, name)
    ]
    if model.can_generate():
        prompt = {key: value for key, value in given.items() if key != "decoder_input_ids"}
        start = {"decoder_start_token_id": 1} if model.config.is_encoder_decoder else {}
        calls.append(("generate", {**prompt, **start, "max_new_tokens": 2, "do_sample": False}))
    run = []
    for name, arguments in calls:
        with contextlib.suppress(Exception):  # transformers cannot, or our inputs are not what it needs
            getattr(model, name)(**arguments)
            run.append((name, arguments))
    return run


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the Frobenius norm; infinite where one is NaN."""
    if torch.equal(found, wanted):
        return 0.0
    return float(((found - wanted).norm() / wanted.norm()).nan_to_num(float("inf")))


# transformers unpacks FP4 to bfloat16 alone, where sums depend on their order; it rounds inputs as we do in float32.
DTYPES = {"nvfp4a16": torch.bfloat16, "fp8_channel": torch.float32}
LOGIT_LIMIT = {"nvfp4a16": 0.05, "fp8_channel": 0.01}
WEIGHT_LIMIT = {"nvfp4a16": 0.2, "fp8_channel": 0.06}


def check(name: str, format: str, folder: Path) -> list[Cell]:
    """The cells of one architecture in one format, a layout each; `folder` is an empty directory."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        return [Cell(name, format, *found) for found in _verdicts(name, format, folder)]


def _verdicts(name: str, format: str, folder: Path) -> Iterator[tuple[Any, ...]]:
    dtype = DTYPES[format]
    model = build(name, dtype)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(model).items()}
    model.save_pretrained(folder / "model")
    result(model, given)  # the harness itself is wrong where this fails
    calls = first_calls(model, given)
    try:
        report = run(Request(str(folder / "model"), format, solver="rtn", out=folder / "out")).report
    except ValueError as error:
        yield COMPRESSED, "refused", " ".join(str(error).replace(str(folder), "").split())
        return
    except Exception as error:
        yield COMPRESSED, "TRACEBACK", _where(error)
        return
    try:
        loaded = load(folder / "out")
        ours = result(loaded, given)
    except Exception as error:
        yield COMPRESSED, "TRACEBACK", f"quant.load: {_where(error)}"
        return
    for call, arguments in calls:
        getattr(loaded, call)(**arguments)
    found, off = _of_transformers(model, folder / "out", given, calls, ours, format)
    assert report is not None
    recommended = ".from_pretrained(" in (folder / "out" / "README.md").read_text()
    # What the plan keeps in 16 bit is told too, and names transformers as a reason.
    told = [line for line in report.warnings if "transformers" in line and "stay in 16 bit (" not in line]
    wrong = _of_ours(model, loaded, given, ours, format, Plan.load(folder / "out" / PLAN_FILE))
    if wrong is not None:
        yield COMPRESSED, "DIFFERENT", f"quant.load: {wrong}", off
    elif found is not None and recommended:
        yield COMPRESSED, "DIFFERENT", f"the card recommends it: {found}", off
    elif found is None and (recommended or not told):
        yield COMPRESSED, "equal", "", off
    else:
        yield (COMPRESSED, "warned", told[0]) if told else (COMPRESSED, "DIFFERENT", str(found), off)
    yield MODELOPT, *_of_modelopt(folder, loaded, given, ours, format)


def _of_transformers(
    model: Any, path: Path, given: Any, calls: Any, ours: torch.Tensor, format: str
) -> tuple[str | None, float | None]:
    """How transformers' own reload differs from the original weights and from our logits, and the latter's measure."""
    try:
        theirs, info = type(model).from_pretrained(path, dtype=DTYPES[format], output_loading_info=True)
        theirs = patch_forward(theirs).eval()
        for call, arguments in calls:
            getattr(theirs, call)(**arguments)
        logits = result(theirs, given)
    except Exception as error:
        return f"transformers: {_where(error)}", None
    for kind in ("missing_keys", "unexpected_keys"):
        if info[kind]:
            return f"{kind}: {', '.join(sorted(info[kind])[:3])}", None
    loaded = dict(theirs.named_parameters())
    for key, parameter in _stored_apart(model, loaded):
        if key not in loaded or loaded[key].shape != parameter.shape:
            return f"{key} {list(parameter.shape)} is not there", None
        off = difference(loaded[key].float(), parameter.float())
        if off > WEIGHT_LIMIT[format]:
            return f"{key} is off by {off:.2f}", None
    off = difference(logits, ours)
    return (f"logits are off by {off:.2g}" if off > LOGIT_LIMIT[format] else None), off


def _stored_apart(model: Any, loaded: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a model, with experts in their parts where transformers has loaded those."""
    for key, parameter in model.named_parameters():
        names = expert_names(key, len(parameter)) if parameter.dim() == 3 and key not in loaded else []
        if names and names[0] in loaded:
            yield from cut_experts(key, expert_matrices(model, key)).items()
        else:
            yield key, parameter


@torch.no_grad()
def _of_ours(model: Any, loaded: Any, given: Any, ours: torch.Tensor, format: str, plan: Plan) -> str | None:
    """How a checkpoint that `quant.load` read differs from the original model, whose weights become the rounded ones.

    With inputs in 16 bit, the original's own code with those weights has to give the same logits.
    """
    parameters = dict(model.named_parameters())
    for key, module in loaded.named_modules():
        if not hasattr(module, "quantized_weight"):
            continue
        is_stack = isinstance(module, ExpertStack)
        weight = module.tensor() if is_stack else module.weight
        weight = weight.t() if plan.by_name[key].kind == LayerKind.LINEAR and plan.by_name[key].transposed else weight
        original = parameters[key if is_stack else f"{key}.weight"]
        off = difference(weight.float(), original.float()) if weight.shape == original.shape else float("inf")
        if off > WEIGHT_LIMIT[format]:
            return f"{key} is off by {off:.2f}"
        original.copy_(weight)
    if any(getattr(module, "activation_format", None) is not None for module in loaded.modules()):
        return None
    off = difference(ours, result(model, given))
    return f"logits are off by {off:.2g} from the original code's" if off > LOGIT_LIMIT[format] else None


def _of_modelopt(folder: Path, first: Any, given: Any, ours: torch.Tensor, format: str) -> tuple[Any, ...]:
    """The same checkpoint in ModelOpt's layout, read without its plan, as if another tool had written it.

    `first` is the checkpoint as it was loaded before. Where weights lie in a file may change sums of float32 products.
    """
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            convert(folder / "out", folder / "modelopt", "modelopt")
    except ValueError as error:
        return "refused", " ".join(str(error).replace(str(folder), "").split())
    except Exception as error:
        return "TRACEBACK", _where(error)
    (folder / "modelopt" / PLAN_FILE).unlink()
    try:
        again = load(folder / "modelopt")
        off = difference(result(again, given), ours)
    except Exception as error:
        return "TRACEBACK", f"quant.load: {_where(error)}"
    problem = f"logits are off by {off:.2g}" if off > LOGIT_LIMIT[format] else modelopt_problem(folder / "modelopt")
    state = again.state_dict()
    for name, tensor in first.state_dict().items():
        if name not in state or not torch.equal(_bytes(tensor), _bytes(state[name])):
            return "DIFFERENT", f"{name} differs", off
    told = [str(each.message) for each in caught if "which is excluded" in str(each.message)]
    if problem and told:
        return "warned", told[0], off
    return ("DIFFERENT", problem, off) if problem else ("equal", "", off)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


# The dtypes of a quantized matrix in ModelOpt 0.47's own checkpoints, by algorithm.
_MODELOPT = {
    "W4A16_NVFP4": {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32"},
    "FP8_PER_CHANNEL_PER_TOKEN": {"weight": "F8_E4M3", "weight_scale": "F32"},
}


def modelopt_problem(directory: Path) -> str | None:
    """What breaks the rules of ModelOpt's own checkpoints: tensors of a matrix, and which modules are excluded.

    vLLM leaves a module in 16 bit if an excluded name is a part of its own, or matches it.
    """
    said = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    if (config["quant_method"], config["quant_algo"], config["ignore"]) != (
        "modelopt", said["quant_algo"], said["exclude_modules"]
    ):  # fmt: skip
        return "config.json and hf_quant_config.json differ"
    excluded = [name.strip("*") for name in said["exclude_modules"]]
    with safe_open(directory / "model.safetensors", "pt") as file:
        dtypes = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
        sizes = {name: len(file.get_slice(name).get_shape()) for name in dtypes}
    for name in dtypes:
        stem = name.removesuffix(".weight")
        parts = {suffix: dtypes.get(f"{stem}.{suffix}") for suffix in _MODELOPT[said["quant_algo"]]}
        if f"{stem}.weight_scale" in dtypes and stem != name:
            if parts != _MODELOPT[said["quant_algo"]]:
                return f"{stem} has {parts}"
            if any(part in stem for part in excluded):
                return f"{stem} is quantized and excluded"
        elif stem != name and sizes[name] > 1 and not any(part in stem for part in excluded):
            return f"{stem} is neither quantized nor excluded"
    return None


def _where(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(last.filename).name}:{last.lineno})"


def cells(name: str) -> Iterator[Cell]:
    """The cells of an architecture, one after the other."""
    for format in FORMATS:
        folder = Path(tempfile.mkdtemp())
        try:
            yield from check(name, format, folder)
        finally:
            shutil.rmtree(folder)


def table(found: Sequence[Cell]) -> str:
    """The page of the docs: a row for each architecture, a number for each reason."""
    import transformers

    rows: dict[str, dict[tuple[str, str], str]] = {}
    reasons: dict[str, int] = {}
    counts: dict[str, Counter[str]] = {layout: Counter() for layout in LAYOUTS}
    for cell in sorted(found, key=lambda cell: ARCHITECTURES.index(cell.architecture)):
        counts[cell.layout][cell.verdict] += 1
        number = reasons.setdefault(_general(cell.detail), len(reasons) + 1) if cell.detail else None
        text = cell.verdict + (f" [{number}]" if number else "")
        rows.setdefault(cell.architecture, {})[cell.layout, cell.format] = text
    columns = [(layout, format) for layout in LAYOUTS for format in FORMATS]
    titles = [format if layout == COMPRESSED else f"{format}, {layout}" for layout, format in columns]
    lines = [
        "# Architectures",
        "",
        f"`PYTHONPATH=. python tests/architectures.py` built {len(rows)} tiny models of random weights from the "
        f"configs of transformers {transformers.__version__}, took each from its plan to a checkpoint, and loaded that "
        "with `quant.load` and with transformers, whose first call was a plain `generate` or that of a tower "
        "(`get_image_features`), where the model has one. Then it converted the checkpoint to ModelOpt's layout and "
        "loaded that without its plan. It wrote this page.",
        "",
        "- **equal**: every weight is the original one as its format rounds it, and both loaders give the same logits "
        "(to the precision described below). In ModelOpt's layout, `quant.load` reads every tensor bit-equal, and the "
        "files follow the rules of ModelOpt's own files.",
        "- **warned**: transformers stops or gives other logits. `quantize` warns of it, and the model card has the "
        "reason instead of the lines for transformers.",
        "- **refused**: `quantize` or `quant.convert` stops with the reason before it writes anything.",
        "",
        "In every cell that was not refused, each weight that `quant.load` read is the original one as its format "
        "rounds it. With inputs in 16 bit, transformers' own code with these weights gives the logits of `quant.load`.",
        "",
        *(f"- {layout}: {_counted(counts[layout])}" for layout in LAYOUTS),
        "",
        *(_measured(format, [c for c in found if c.format == format]) for format in FORMATS),
        "",
        "Where logits are not bit-equal, their last digits differ. compressed-tensors divides scales by the stored "
        "reciprocal of the global scale, and `quant.load` multiplies by its inverse, so a weight half-way between "
        "two BF16 numbers may become the other one: 288 of the 4,096 weights of a layer of DETR. In float32, sums "
        "depend on how a library splits a product.",
        "",
        "Experts are written one by one (`experts.3.gate_proj`), as servers read them, whether the model stacks "
        "them `[experts, out, in]`, transposed (Llama 4, gpt-oss, Aria) or in two dimensions (DBRX). transformers "
        "loads them in this form for models whose own files have it, and for Llama 4. For other models it cannot hold "
        "quantized experts. Then an empty tensor under the name of the stack makes it stop, because it would run with "
        "random numbers. If that would stop servers too, `quantize` refuses before any work, and `--allow-missing` "
        "writes the checkpoint.",
        "",
        f"| architecture | {' | '.join(titles)} |",
        f"|---|{'---|' * len(titles)}",
        *(f"| {name} | {' | '.join(row.get(column, '') for column in columns)} |" for name, row in rows.items()),
        "",
        *(f"{number}. {reason}" for reason, number in reasons.items()),
    ]
    return "\n".join(lines) + "\n"


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())


def _measured(format: str, found: Sequence[Cell]) -> str:
    """How far apart the logits of the two loaders are where they count as the same."""
    equal = [c for c in found if c.layout == COMPRESSED and c.verdict == "equal" and c.difference is not None]
    exact = [c for c in equal if c.difference == 0]
    most = max(equal, key=lambda c: c.difference or 0)
    close = sum((c.difference or 0) <= 1e-3 for c in equal)
    return (
        f"- {format}, {str(DTYPES[format]).removeprefix('torch.')}: of {len(equal)} equal cells {len(exact)} are "
        f"bit-equal, {close} differ by at most 0.1 %, and the largest difference is {most.difference:.2g} "
        f"({most.architecture}), in the Frobenius norm relative to our logits"
    )


def _general(detail: str) -> str:
    """A reason without the names of layers and their number, so that models share it."""
    detail = re.sub(r"\b(?!\d+(?:\.\d+)+\b)[\w*]+(?:\.[\w*]+)+\b(?<!quant\.load)", "…", detail)  # versions stay
    detail = re.sub(r"\b\d+ (layers?|more)\b", r"N \1", detail)
    return re.sub(r"\d+ matrices|'\w+' object", "…", detail)


def _cells_until(name: str, stop: float) -> list[Cell]:
    """The cells of an architecture; none after the time `stop`, or where the harness itself fails."""
    if time.monotonic() > stop:
        return []
    try:
        return list(cells(name))
    except Exception as error:
        print(name, "HARNESS", _where(error), flush=True)
        return []


def main(arguments: Sequence[str]) -> None:
    """Prints a line a cell, and a count.

    Without names it runs all architectures, keeps each in `FOUND` as it goes, goes on where it was stopped, and writes
    the page when the last one is there. `--minutes N` stops after that time.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args(arguments)
    stop = time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    found = [] if options.names or not FOUND.is_file() else [Cell(**json.loads(line)) for line in FOUND.open()]
    done = {cell.architecture for cell in found}
    names = [name for name in options.names or ARCHITECTURES if name not in done]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as pool:
        for new in pool.map(_cells_until, names, repeat(stop)):
            for cell in new:
                print(*asdict(cell).values(), flush=True)
            found += new
            if not options.names:
                with FOUND.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(asdict(cell)) + "\n" for cell in new)
    if time.monotonic() > stop:
        print(f"{len({cell.architecture for cell in found})} of {len(ARCHITECTURES)}: run it again to go on")
        return
    print({layout: _counted(Counter(c.verdict for c in found if c.layout == layout)) for layout in LAYOUTS})
    if not options.names:
        DOCS.write_text(table(found), encoding="utf-8")
        FOUND.unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
