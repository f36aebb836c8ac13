"""`write_gguf` writes a quantized model as a GGUF file, which llama.cpp, Ollama and LM Studio run.

Codes and scales are written as they are, in the blocks of ggml (`blocks.py`); what is in 16 bit stays so, and norms,
biases and routers are in FP32, as llama.cpp's own converter has them. Tensors are written one after the other, so that
one of them is in memory next to the model.

    blk.0.attn_q.weight         blocks, or 16 bit; rows of q and k interleaved where llama.cpp turns neighbours
    blk.0.attn_q.scale          NVFP4's global scale: FP32, one number, or one for each expert
    blk.0.ffn_gate_exps.weight  the matrices of all experts, gate and up apart
    rope_freqs.weight           divisors of rotary frequencies (Llama 3.1 and later)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import UserError
from quant.base.extras import require
from quant.export.gguf.architectures import Architecture, architecture_of, metadata_of
from quant.export.gguf.blocks import block_type, block_width, to_blocks
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.recipes.gguf_mixes import embedding_format
from quant.recipes.layers import stacking_of
from quant.recipes.plan import Plan

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# 16-bit tensors that llama.cpp wants in FP32: norms and biases, which have one dimension, and routers.
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    kind: str  # ggml's type
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray[Any, Any]]  # its values, or the bytes of its blocks


@dataclass(frozen=True)
class Rows:
    """A weight of the model, quantized or not, of which rows can be taken in another order."""

    weight: BlockScaledTensor | Tensor

    def take(self, rows: Tensor | slice) -> Rows:
        """Returns rows `[..., out, in]` of the last but one dimension; of a vector, its elements."""
        weight = self.weight
        if isinstance(weight, Tensor):
            return Rows(weight[rows] if weight.dim() == 1 else weight[..., rows, :])
        scale = weight.scale[..., rows, :]
        codes = weight.codes[..., rows, :]
        return Rows(
            replace(weight, codes=codes, scale=scale, shape=(*weight.shape[:-2], *codes.shape[-2:-1], weight.shape[-1]))
        )


def write_gguf(
    model: nn.Module,
    path: Path,
    plan: Plan | None = None,
    *,
    words: Mapping[str, Any] | None = None,
    name: str | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Writes a model of transformers, with quantized layers, as the GGUF file `path`.

    Args:
        model: as `quant.load` returns it.
        path: appears when the whole file is written; one that is there is replaced.
        plan: what is refused in it: work for run time that llama.cpp does not have.
        words: the metadata of the tokenizer, as `vocabulary` makes them; None writes a file for token ids.
        name: `general.name`.

    Returns:
        `files`: the size by name; `types`: how many tensors have each type of ggml.

    Raises:
        UserError: an architecture, tokenizer or format that llama.cpp does not have; the message names it.
    """
    gguf = require("gguf", "hf")
    config: Any = getattr(model, "config", None)
    architecture = check_gguf(model, plan)
    fields, factors = metadata_of(config, architecture)
    entries = [*tensors_of(model, architecture), *(_dense(key, value) for key, value in factors.items())]
    types = [entry.kind for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory(path) as folder:
        file = folder / path.name
        writer = gguf.GGUFWriter(file, architecture.name)
        _add(writer, {"general.name": name or path.stem, "general.quantization_version": 2})
        _add(writer, {f"{architecture.name}.{key}": value for key, value in fields.items()})
        _add(writer, words or {"tokenizer.ggml.model": "no_vocab"})
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            width, size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = math.prod(entry.shape) // width * size
            # Of the dtype it only looks whether the shape counts bytes, which that of uint8 would.
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, entry in enumerate(entries):
            progress("write", done, len(entries))
            try:
                writer.write_tensor_data(entry.make())
            except ValueError as error:
                raise UserError(f"{entry.name}: {error}") from None
        writer.close()
        put_file(file, path)
    return {
        "files": {path.name: path.stat().st_size},
        "types": {kind: types.count(kind) for kind in dict.fromkeys(types)},
    }


def _add(writer: Any, fields: Mapping[str, Any]) -> None:
    """Adds metadata, of which Python's types give those of GGUF."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        add.get(type(value), writer.add_array)(key, value)


def check_gguf(model: nn.Module, plan: Plan | None) -> Architecture:
    """Returns how llama.cpp computes a model; UserError where it has no such model, format, or work for run time."""
    architecture = architecture_of(getattr(model, "config", None))
    for layer in plan.quantized if plan is not None else ():
        if parts := layer.parts.to_dict():
            raise UserError(
                f"{layer.name}: its input goes through {', '.join(parts)} at run time, which llama.cpp does not have; "
                "quantize with a solver that leaves nothing for run time, such as gptq"
            )
        _check_format(layer.name, layer.weight_format, layer.matrix[-1], architecture)
    return architecture


def _check_format(name: str, format: Format, columns: int, architecture: Architecture) -> None:
    kind = block_type(format)
    if kind is None:
        raise UserError(
            f"{name}: llama.cpp has no {format}; it has nvfp4, mxfp4, int4, int8, its own such as q4_k, and 16 bit, so "
            "quantize again with one of --format nvfp4a16, mxfp4a16, int4a16_g32 and q4_k_m"
        )
    if columns % block_width(kind):
        raise UserError(
            f"{name}: in = {columns} is no multiple of {block_width(kind)}, the weights of a block of {kind}; "
            f"keep it in 16 bit with --exclude {name.removesuffix('.weight')}, or quantize with --format q8_0"
        )
    if format.global_scale and not architecture.scales:
        raise UserError(
            f"{name}: llama.cpp's {architecture.name} ignores the global scale that {format} has, and would compute "
            "something else; quantize again with --format mxfp4a16, int4a16_g32 or q4_k_m"
        )


def gguf_notes(model: nn.Module, plan: Plan | None) -> list[str]:
    """Returns sentences on what llama.cpp does otherwise than a model or its plan says."""
    config: Any = model.config
    notes = list[str]()
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3") and window and window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has full attention in place of the sliding window of {window}: longer texts are computed "
            "otherwise"
        )
    if inputs := sorted({str(layer.activation) for layer in plan.quantized if layer.activation} if plan else ()):
        notes.append(
            f"the plan rounds inputs to {', '.join(inputs)}, and llama.cpp rounds them in its own way, to eight "
            "bits on a CPU"
        )
    if plan is not None and (plan.kv_cache is not None or plan.attention is not None):
        notes.append("the plan has a KV cache or attention in low precision, which llama.cpp chooses when it starts")
    return notes


def tensors_of(model: nn.Module, architecture: Architecture) -> Iterator[Entry]:
    """Yields the tensors of the file; UserError for one that llama.cpp has no name or no type for."""
    gguf = require("gguf", "hf")
    config: Any = model.config
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    formats = [module.weight_format for module in model.modules() if isinstance(module, QuantizedModule)]
    weights = list(_weights(model))
    is_tied = all(names.get_name(name, try_suffixes=(".weight",)) != "output.weight" for name, _ in weights)
    for name, weight in weights:
        if isinstance(weight, Tensor) and weight.dim() == 2 and name.endswith("embed_tokens.weight"):
            format = embedding_format(formats, is_tied=is_tied, width=weight.shape[1])
            if format is not None:
                stored = names.get_name(name, try_suffixes=(".weight",))
                make = partial(_rounded_blocks, weight, format)
                yield Entry(stored, format.gguf, tuple(weight.shape), make)
                continue
        if isinstance(weight, BlockScaledTensor):
            _check_format(name, weight.format, weight.shape[-1], architecture)
        for part, rows in _parts(name, weight, architecture, config):
            for own, mapped in architecture.renamed.items():
                part = part.replace(own, mapped)
            stored = names.get_name(part, try_suffixes=(".weight", ".bias"))
            if stored is None:
                raise UserError(f"{name}: llama.cpp's {architecture.name} has no tensor for it")
            yield from _entries(stored, rows.weight)


def _weights(model: nn.Module) -> Iterator[tuple[str, BlockScaledTensor | Tensor]]:
    """Yields the weights of a model by the names of their tensors; matrices of experts are `[experts, out, in]`."""
    tied, seen = (
        getattr(model, "all_tied_weights_keys", None) or {},
        dict(model.named_parameters(remove_duplicate=False)),
    )
    for path, module in model.named_modules():
        quantized = module.quantized_weight if isinstance(module, QuantizedModule) else None
        if quantized is not None:
            # Experts are a parameter of their module, and have no suffix.
            yield path if len(quantized.shape) == 3 else f"{path}.weight", quantized
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{last}"
            # A tied head is its embedding, unless that was quantized and it was not.
            if name in tied and seen.get(tied[name]) is parameter:
                continue
            stacking = stacking_of(module, last) if parameter.dim() == 3 else None
            yield name, parameter.detach() if stacking is None else stacking.matrices(parameter.detach())


def _parts(
    name: str, weight: BlockScaledTensor | Tensor, architecture: Architecture, config: Any
) -> Iterator[tuple[str, Rows]]:
    """Yields the tensors that llama.cpp has of one weight, by names that gguf maps, with its order of rows."""
    rows = Rows(weight)
    if architecture.shifted and name.endswith("norm.weight"):
        assert isinstance(weight, Tensor)
        rows = Rows(weight.float() + 1)
    if architecture.permuted and (match := re.search(r"\.(q|k)_proj\.(?:weight|bias)$", name)):
        heads = config.num_attention_heads
        if match[1] == "k":
            heads = config.num_key_value_heads or heads
        order = torch.arange(weight.shape[0], device="cpu").view(heads, 2, -1).transpose(1, 2).flatten()
        rows = rows.take(order)
    if ".experts." not in name:
        yield name, rows
        return
    experts, _, last = name.rpartition(".")
    projection, suffix = (last.removesuffix("_bias"), ".bias") if last.endswith("_bias") else (last, ".weight")
    if projection != "gate_up_proj":
        yield f"{experts}.{projection}{suffix}", rows
        return
    # Matrices have gate above up here; gpt-oss keeps its biases alternating.
    size = weight.shape[1 if suffix == ".bias" else -2]
    alternates = suffix == ".bias" and architecture.name == "gpt-oss"
    for index, half in enumerate(("gate_proj", "up_proj")):
        part = slice(index, None, 2) if alternates else slice(index * size // 2, (index + 1) * size // 2)
        own = Rows(weight[:, part]) if suffix == ".bias" and isinstance(weight, Tensor) else rows.take(part)
        yield f"{experts}.{half}{suffix}", own


def _entries(stored: str, weight: BlockScaledTensor | Tensor) -> Iterator[Entry]:
    """Yields the tensors of a weight that is called `stored` in the file."""
    if isinstance(weight, Tensor):
        yield _dense(stored, weight)
        return
    kind = block_type(weight.format)
    assert kind is not None
    yield Entry(stored, kind, weight.shape, lambda: to_blocks(weight))
    if weight.global_scale is not None:
        scale = weight.global_scale.float().reshape(-1)
        yield Entry(stored.replace(".weight", ".scale"), "F32", tuple(scale.shape), scale.numpy)


def _rounded_blocks(weight: Tensor, format: Format) -> np.ndarray[Any, Any]:
    """Returns the blocks of an embedding, which stays in 16 bit in the model."""
    return to_blocks(quantize(weight, format, rule="mse"))


def _dense(name: str, weight: Tensor) -> Entry:
    is_wide = weight.dim() < 2 or name.endswith((*_ROUTERS, ".bias"))
    # A gate of one row is a vector in llama.cpp.
    tensor = weight.reshape(-1) if name.endswith("_shexp.weight") and weight.shape[0] == 1 else weight
    kind = "F32" if is_wide else _TYPES[tensor.dtype]

    def make() -> np.ndarray[Any, Any]:
        if kind == "BF16":
            return tensor.contiguous().view(torch.uint8).numpy()
        return tensor.to(torch.float32 if kind == "F32" else torch.float16).contiguous().numpy()

    return Entry(name, kind, tuple(tensor.shape), make)
