"""This file builds tiny transformers models with random weights, one function for each architecture.

Each function takes the fields of the architecture's config, in place of the small ones that it has by itself, and:

    seed    of the weights (0); None draws them from the generator as it stands
    gain    multiplies all matrices, and draws the weights of `norm` modules from [0.5, 2]: with the weights of an
            initialization, logits hardly depend on what is rounded
    dtype   of the weights (float32); they are drawn in float32

A test that needs no transformers model builds its own module, next to what it checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

WIDTHS = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
BLOCKS = {"num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**WIDTHS, **BLOCKS, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
IMAGES = {**BLOCKS, "hidden_size": 64, "intermediate_size": 96, "image_size": 32, "patch_size": 8}


def llama(**options: Any) -> Any:
    """Two blocks: four query heads over two key-value heads, a gated MLP."""
    return build("Llama", "ForCausalLM", DECODER, **options)


def mistral(**options: Any) -> Any:
    """A llama that has a sliding window."""
    return build("Mistral", "ForCausalLM", DECODER, **options)


def gemma2(**options: Any) -> Any:
    """A llama with four norms in a block, and caps on its scores and logits."""
    return build("Gemma2", "ForCausalLM", {**DECODER, "head_dim": 16}, **options)


def mixtral(**options: Any) -> Any:
    """Four experts in each block, two to a token, and names on disk that are not those of the modules."""
    sizes = {**DECODER, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    return build("Mixtral", "ForCausalLM", sizes, **options)


def qwen3_moe(**options: Any) -> Any:
    """Four experts in each block, two to a token, and norms of queries and keys."""
    return build("Qwen3Moe", "ForCausalLM", EXPERTS, **options)


def gpt_oss(**options: Any) -> Any:
    """Four experts in each block, two to a token, attention sinks, and a window in every other block."""
    sizes = {**DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return build("GptOss", "ForCausalLM", sizes, **options)


def opt(**options: Any) -> Any:
    """A decoder with LayerNorms, biases and an MLP without a gate."""
    sizes = {k: v for k, v in DECODER.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return build("OPT", "ForCausalLM", {**sizes, "ffn_dim": 96, "word_embed_proj_dim": 64}, **options)


def qwen3(**options: Any) -> Any:
    """A llama with norms of queries and keys."""
    return build("Qwen3", "ForCausalLM", {**DECODER, "head_dim": 16}, **options)


def gpt2(**options: Any) -> Any:
    """A decoder whose linears are transposed `Conv1D` modules."""
    return build("GPT2", "LMHeadModel", {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}, **options)


def t5(**options: Any) -> Any:
    """An encoder and a decoder of one block each."""
    sizes = {"vocab_size": 64, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16}
    return build("T5", "ForConditionalGeneration", sizes, **options)


def bert(**options: Any) -> Any:
    """An encoder, whose embeddings are its result."""
    return build("Bert", "Model", {**WIDTHS, **BLOCKS}, **options)


def bert_classifier(**options: Any) -> Any:
    """An encoder that tells texts of two classes apart."""
    return build("Bert", "ForSequenceClassification", {**WIDTHS, **BLOCKS}, **options)


def vit(**options: Any) -> Any:
    """A classifier of images of 32 × 32."""
    return build("ViT", "ForImageClassification", IMAGES, **options)


def resnet(**options: Any) -> Any:
    """A stem of three input channels, and two stages of two convolutions with a convolution beside them."""
    sizes = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic", "num_labels": 5}
    return build("ResNet", "ForImageClassification", sizes, **options)


def llava(**options: Any) -> Any:
    """A llama that sees images through a CLIP encoder."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    text, vision = transformers.LlamaConfig(**DECODER), transformers.CLIPVisionConfig(**IMAGES)
    sizes = {"text_config": text, "vision_config": vision, "image_token_index": 5}
    return build("Llava", "ForConditionalGeneration", sizes, **options)


def build(
    family: str,
    head: str,
    sizes: dict[str, Any],
    *,
    seed: int | None = 0,
    gain: float | None = None,
    dtype: torch.dtype = torch.float32,
    config_family: str | None = None,
    **fields: Any,
) -> Any:
    """The model `family` + `head` of a config with `fields` in place of those of `sizes`, in eval mode."""
    transformers = pytest.importorskip("transformers", reason="the extra hf")
    if seed is not None:
        torch.manual_seed(seed)
    config_class = getattr(transformers, f"{config_family or family}Config")
    config = config_class(**{**sizes, **fields}, architectures=[family + head])
    model: nn.Module = getattr(transformers, family + head)(config).eval()
    for name, parameter in model.named_parameters() if gain is not None else ():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2)
        elif parameter.dim() > 1:
            parameter.data.mul_(gain)
    # Not model.to(dtype), which would round the frequencies of rotary embeddings too.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model
