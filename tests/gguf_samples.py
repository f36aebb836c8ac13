"""`write_gguf` writes a small model as a GGUF file, `write_vocabulary` a tokenizer, with the gguf package's writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of q and k: the two halves of each head interleaved."""
    out, inside = weight.shape
    return weight.view(heads, 2, out // heads // 2, inside).transpose(1, 2).reshape(out, inside)


def write_gguf(
    file: Path,
    model: nn.Module,
    metadata: Callable[[Any], object] = lambda writer: None,
    divisors: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """`model`, a Llama with tied embeddings, as a GGUF file: MLPs in Q4_1, embeddings in Q8_0, the rest in FP16.

    Args:
        file: to write.
        model: of transformers.
        metadata: called with the writer, adds to the metadata.
        divisors: of the rotary frequencies, by the tensor's name.

    Returns what gguf itself says the quantized blocks stand for, by the names that transformers gives them.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("Some Model")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(config.vocab_size - 5)), "t0t1", "t2t3"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t0 t1", "t2 t3"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    dequantized = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        last = name.split(".")[-2]
        stored = permute(tensor, heads[last]) if last in heads else tensor
        values = stored.float().numpy()
        kind = gguf.GGMLQuantizationType.F16 if tensor.dim() > 1 else gguf.GGMLQuantizationType.F32
        if "mlp" in name or "embed" in name:
            kind = gguf.GGMLQuantizationType.Q4_1 if "mlp" in name else gguf.GGMLQuantizationType.Q8_0
        blocks = gguf.quants.quantize(values, kind)
        if "mlp" in name or "embed" in name:
            dequantized[name] = gguf.quants.dequantize(blocks, kind)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", blocks, raw_dtype=kind)
    metadata(writer)
    for name, values in (divisors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    _write(writer)
    return dequantized


def write_vocabulary(file: Path, architecture: str, metadata: Callable[[Any], object]) -> None:
    """A GGUF file without weights, of which only config and tokenizer can be read; `metadata` adds the vocabulary."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("Some Model")
    writer.add_block_count(6)  # of Gemma 3 the sixth has full attention
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    metadata(writer)
    _write(writer)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
