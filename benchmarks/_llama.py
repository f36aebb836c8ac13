"""A Llama with random weights, in the proportions of Llama-3-8B: what benchmarks take where only the shape counts."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 128256


def random_llama(layers: int, *, hidden: int = 4096, vocabulary: int | None = None, positions: int = 8192) -> Any:
    """The model in BF16, made on the GPU where there is one; its weights are the same each time.

    Args:
        layers: decoder layers; 32 are the 8B.
        hidden: width, a multiple of 512; other sizes follow, the vocabulary's too unless it is given.
        positions: tokens of the longest text.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=max(hidden // 512, 1), head_dim=128,
        vocab_size=vocabulary or VOCABULARY * hidden // 4096, max_position_embeddings=positions, dtype=torch.bfloat16,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        return LlamaForCausalLM(config).bfloat16()
