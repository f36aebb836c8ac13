"""Writes checkpoints in the layout of compressed-tensors: the tensors of a quantized model, in hashed shards.

The flag `tie_word_embeddings` of a config promises readers that the output head *is* the embedding, and vLLM then skips
the head in the files. transformers 5 compares the two and keeps both where they differ: so a model can be in memory
with a head of its own and a config that denies it, as a fine-tune, or a model of which only the head is quantized.
`_tied_weights_keys` of each transformers class lists the tensors that the flag ties, {"lm_head.weight":
"model.embed_tokens.weight"}. The flag stands in the config of that class; servers read the one of the language model
inside a model of images, so it is cleared in both.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.atomic import not_written
from quant.export.checkpoint.files import compressed_tensors
from quant.export.checkpoint.files.names import StoredNames, cut_experts, in_files, matrix_names
from quant.export.checkpoint.files.read_tensors import CARRIED, EXACT, HEADS, RUN_TIME_PARTS
from quant.export.checkpoint.files.tensor_file import DeferredTensor, FileLog, write_tensor_file
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import LayerKind, expert_matrices
from quant.recipes.plan import LayerPlan, Parts, Plan

FLAG = "tie_word_embeddings"


def untied_pairs(model: nn.Module, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Returns, for the tensors that a tied model would share and that differ here, the config whose flag ties them.

    `state` has the tensors that are not quantized, by name; None takes the model's own.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False)) if state is None else state
    quantized = tuple(f"{name}." for name, each in model.named_modules() if hasattr(type(each), "quantized_weight"))
    untied = {}
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        # Names may be patterns; those are of heads for boxes (D-FINE), which no flag of words concerns.
        for tied in keys.items() if isinstance(keys, Mapping) else ():
            target, source = (f"{prefix}.{name}".lstrip(".") for name in tied)
            if _differ(target, source, tensors, quantized):
                untied[target] = getattr(module, "config", None)
    return untied


def _differ(target: str, source: str, tensors: Mapping[str, torch.Tensor], quantized: tuple[str, ...]) -> bool:
    """Returns whether two tensors are stored apart; codes of a quantized layer are nobody else's."""
    owned = [name.startswith(quantized) for name in (target, source)]
    if any(owned):
        return all(own or name in tensors for own, name in zip(owned, (target, source), strict=True))
    if target not in tensors or source not in tensors:
        return False
    return not hold_same_values(tensors[target], tensors[source])


def hold_same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors hold the same values; without data (on the meta device), whether they are one."""
    if a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and not a.is_meta):
        return True
    if a.is_meta or b.is_meta:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b.to(a.device))


def clear_flag(fields: dict[str, Any], model: Any, untied: Collection[Any]) -> bool:
    """Writes into the fields of config.json that heads are no embeddings, by `untied_pairs`; returns whether it did."""
    if not untied:
        return False
    changed, outer = False, model.config
    configs = {id(config) for config in untied}
    # The language model inside a larger one, and the larger one around it, speak of the same head.
    same_head = {id(outer), id(outer.get_text_config())}
    if configs & same_head:
        configs |= same_head
    for config, table in _tables(outer, fields):
        # T5's flag says whether its outputs are scaled; its readers compare the two tensors.
        # A solver has cleared it in memory where it gave the head a weight of its own; the file is the source's.
        stated = getattr(config, FLAG, False) or table.get(FLAG, getattr(type(config), FLAG, False))
        if id(config) in configs and stated and not hasattr(config, "scale_decoder_outputs"):
            changed, table[FLAG] = True, False
    return changed


def _tables(config: Any, fields: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields each config of transformers with its table of config.json, the outermost first."""
    yield config, fields
    for name in getattr(config, "sub_configs", ()):
        if isinstance(fields.get(name), dict):
            yield from _tables(getattr(config, name, None), fields[name])


SHARD_BYTES = 5 * 1000**3
# One thread writes a file and one hashes it, and SHA-256 is slower than the disk: several files are hashed in parallel.
_LEAST_SHARD_BYTES = 1000**3
_SHARDS_AT_ONCE = 8
_QUANTIZED = QuantLinear | QuantConv | QuantExperts | QuantEmbedding
_DEFERRED_BYTES = 1 << 20  # from this size on a tensor is computed when it is written
SECOND_LEVEL = ("weight_scale_2", "weight_global_scale", "input_global_scale", "input_scale")
"""Suffixes of the scales that one layout stores as the reciprocal of the other's."""


def checkpoint_tensors(
    model: nn.Module,
    dtype: torch.dtype,
    names: StoredNames,
    state: Mapping[str, torch.Tensor] | None = None,
    source: Collection[str] = (),
) -> tuple[dict[str, torch.Tensor | DeferredTensor], dict[str, str]]:
    """Returns every tensor of a quantized model, and the model's layer or tensor that it comes from; tied weights once.

    Both are by names on disk. Float scales are in `dtype`, and tensors in 16 bit in the form that `source`, the names
    in the source's files, has. `state` has the tensors that are not quantized; None takes the model's. A large tensor
    that the layout has in another form than the module is computed when it is written, so that memory does not grow
    with layers.
    """
    origin_of: dict[str, str] = {}
    quantized = {n: m for n, m in model.named_modules() if isinstance(m, _QUANTIZED)}
    tensors: dict[str, torch.Tensor | DeferredTensor] = {}
    for name, tensor in _unquantized_tensors(model, quantized, state):
        cut = tensor.dim() == 3 and name.rpartition(".")[2] in names.cut
        for matrix_name, matrix in (cut_experts(name, expert_matrices(model, name)) if cut else {name: tensor}).items():
            tensors[matrix_name], origin_of[matrix_name] = matrix.contiguous(), name
    # The bias of a quantized layer stays next to its codes, which cannot be joined.
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and name.rpartition(".")[0] not in quantized
    }
    joined, made_of = in_files(model, plain, source, names.stored) if source else ({}, {})
    for name in {each for joined_names in made_of.values() for each in joined_names}:
        del tensors[name], origin_of[name]
    for name, module in quantized.items():
        if name in names.stopped:
            # transformers finds a tensor of another shape under the name of its parameter, and stops.
            tensors[name] = torch.empty(0, dtype=dtype)
        for matrix_name, weight in layer_weights(name, module.quantized_weight).items():
            # `compress` returns some tensors as they are, and computes others: those need memory of their own.
            held = {t.data_ptr() for t in (weight.codes, weight.scale)}
            compress = partial(compressed_tensors.compress, weight, module.input_scale, dtype, module.activation_format)
            for suffix, tensor in compress().items():
                if tensor.nbytes > _DEFERRED_BYTES and tensor.data_ptr() not in held:
                    of_layer = partial(lambda compress, suffix: compress()[suffix], compress, suffix)
                    tensors[f"{matrix_name}.{suffix}"] = DeferredTensor(tensor.shape, tensor.dtype, of_layer)
                else:
                    tensors[f"{matrix_name}.{suffix}"] = tensor.contiguous()
                origin_of[f"{matrix_name}.{suffix}"] = name
        for suffix in RUN_TIME_PARTS:
            run_time_part = getattr(module, suffix, None)
            if run_time_part is not None:
                tensors[f"{name}.{suffix}"], origin_of[f"{name}.{suffix}"] = run_time_part.contiguous(), name
    origins = {names.stored(name): origin for name, origin in origin_of.items()}
    origins |= {name: joined_names[0] for name, joined_names in made_of.items()}
    return {names.stored(name): tensor for name, tensor in tensors.items()} | joined, origins


def _unquantized_tensors(
    model: nn.Module, quantized: Collection[str], state: Mapping[str, torch.Tensor] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a model outside its `quantized` modules, and the biases of these; tied tensors once."""
    modules = {id(model.get_submodule(name)) for name in quantized}
    # A module in a block that the model holds twice has two names.
    own = tuple(f"{name}." for name, each in model.named_modules(remove_duplicate=False) if id(each) in modules)
    unquantized = model.state_dict() if state is None else state
    # Where one tensor is untied, the flag that would tie the others too is cleared (`clear_flag`).
    all_apart = any(getattr(config, FLAG, False) for config in untied_pairs(model, state).values())
    # transformers writes a tied tensor once, under the name of its source: {"lm_head.weight": "….embed_tokens.weight"}.
    tied_to = getattr(model, "all_tied_weights_keys", {})
    seen: set[tuple[object, ...]] = set()
    for name, tensor in unquantized.items():
        if name.startswith(own) and not name.endswith(".bias"):
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name}: a {type(tensor).__name__}, and files of weights hold tensors alone; return a tensor from "
                "get_extra_state, or leave the method out"
            )
        source = unquantized.get(tied_to.get(name, ""))
        if source is not None and all_apart:
            yield name, tensor
            continue
        if source is not None and hold_same_values(tensor, source):
            continue
        # Other views of the same memory are tied too; empty and meta tensors have no address.
        view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if view in seen and tensor.numel() and tensor.data_ptr():
            continue
        seen.add(view)
        yield name, tensor


def plan_of_model(model: nn.Module, plan: Plan) -> Plan:
    """Returns `plan` with the present parts, shapes and ties of the model's layers.

    These are the run-time parts of quantized linears (input scale, rotation, branch); of embeddings and heads in 16 bit
    the sizes, which change where tokens are added, and whether they still share a weight, which a learned rotation
    ends.
    """
    layers = []
    for layer in plan.layers:
        if layer.weight is None and layer.kind in (LayerKind.EMBEDDING, LayerKind.HEAD) and not layer.transposed:
            with suppress(AttributeError):  # the module is gone, or is another one
                layers.append(_as_in(model, plan, layer))
    for layer in plan.quantized:
        if layer.kind not in (LayerKind.EXPERTS, LayerKind.EMBEDDING):
            try:
                module: nn.Module | None = model.get_submodule(layer.name)
            except AttributeError:
                module = None
            if not isinstance(module, QuantConv if layer.kind == LayerKind.CONV else QuantLinear):
                raise ValueError(
                    f"{layer.name}: the plan has it in {layer.weight}, and the model holds no quantized layer there; "
                    "give the model and the plan that one call of quantize returned, a model in training after "
                    "quant.pack(model)"
                )
            if isinstance(module, QuantLinear):
                layers.append(replace(layer, parts=Parts.of(module.parts)))
    return plan.replace_layers(layers)


def _as_in(model: nn.Module, plan: Plan, layer: LayerPlan) -> LayerPlan:
    """Returns an embedding or a head in 16 bit as the model has it; AttributeError if it has none."""
    parameter = model.get_parameter(layer.tensor_name)
    layer = replace(layer, shape=tuple(parameter.shape))
    owner = plan.by_name.get(layer.tied_to or "")
    if owner is None or owner.weight is not None or hold_same_values(parameter, model.get_parameter(owner.tensor_name)):
        return layer
    return replace(layer, tied_to=None, reason=f"{layer.reason}; no longer shares the weight of {layer.tied_to}")


def layer_weights(name: str, weight: BlockScaledTensor) -> dict[str, BlockScaledTensor]:
    """Returns a layer's matrices by their names in the checkpoint: of fused experts `experts.3.gate_proj` and so on."""
    if len(weight.shape) == 2:
        return {name: weight}
    matrices: dict[str, BlockScaledTensor] = {}
    for index in range(weight.shape[0]):
        names = matrix_names(name, index)
        matrices.update(zip(names, split_rows(weight.matrix(index), len(names)), strict=True))
    return matrices


def split_rows(weight: BlockScaledTensor, count: int) -> list[BlockScaledTensor]:
    """Returns `weight` cut into `count` equal runs of rows, which share its per-tensor scales.

    ValueError within a block.
    """
    rows, block_rows = weight.shape[0], weight.format.block[0]
    if count > 1 and (rows % count or (block_rows and rows // count % block_rows)):
        raise ValueError(f"cannot split {rows} rows of {weight.format} into {count}: a block would be cut")
    return [weight.rows(start, start + rows // count) for start in range(0, rows, rows // count)]


def write_tensors(
    directory: Path,
    tensors: Mapping[str, torch.Tensor | DeferredTensor],
    shard_bytes: int | None = None,
    *,
    masks: Collection[str] | None = None,
    log: FileLog | None = None,
    carried: Collection[str] = (),
    heads: Mapping[str, Sequence[int]] | None = None,
    stem: str = "model",
) -> dict[str, str]:
    """Writes safetensors shards of at most `shard_bytes` with their index; returns the SHA-256 of each by file name.

    By default shards have an eighth of all bytes, but one gigabyte at least and five at most. A global scale in float64
    has no equal in float32, the only dtype that runtimes read: the nearest float32 goes into the file, and the exact
    value into the file's metadata. So do the names of tensors `carried` over from the source, and the shapes of the
    quantized layers of prediction `heads`. File names begin with `stem`. `masks`, `log`: see `write_tensor_file`.
    """
    tensors, exact = _without_float64_scales(tensors)
    if shard_bytes is None:
        share = sum(tensor.nbytes for tensor in tensors.values()) // _SHARDS_AT_ONCE
        shard_bytes = min(max(share, _LEAST_SHARD_BYTES), SHARD_BYTES)
    shards = _shards(tensors, shard_bytes)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        text = json.dumps(index, indent=2, allow_nan=False) + "\n"
        (directory / f"{stem}.safetensors.index.json").write_text(text, encoding="utf-8")

    def write(name: str, shard: Mapping[str, torch.Tensor | DeferredTensor]) -> str:
        metadata = {"format": "pt"}
        if exact_in_shard := {key: value for key, value in exact.items() if key in shard}:
            metadata[EXACT] = json.dumps(exact_in_shard, allow_nan=False)
        if carried_in_shard := [key for key in carried if key in shard]:
            metadata[CARRIED] = json.dumps(carried_in_shard, allow_nan=False)
        if heads and name == names[0]:
            metadata[HEADS] = json.dumps({layer: list(shape) for layer, shape in heads.items()}, allow_nan=False)
        try:
            return write_tensor_file(directory / name, shard, metadata, durable=True, masks=masks, log=log)
        except OSError as error:
            raise not_written(directory / name, error) from error

    threads = min(_SHARDS_AT_ONCE, max(torch.get_num_threads(), 4))
    with ThreadPoolExecutor(threads, thread_name_prefix="shard") as writing:
        return dict(zip(names, writing.map(write, names, shards), strict=True))


def _without_float64_scales(
    tensors: Mapping[str, torch.Tensor | DeferredTensor],
) -> tuple[dict[str, torch.Tensor | DeferredTensor], dict[str, str]]:
    """Returns the tensors with global scales of float64 rounded to float32, and the exact ones as hexadecimal text."""
    stored, exact = dict(tensors), {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not name.endswith(SECOND_LEVEL):
            continue
        if tensor.dtype is torch.float64 and tensor.numel() == 1:
            exact[name] = float(tensor).hex()
            stored[name] = tensor.float()
    return stored, exact


def _shards(
    tensors: Mapping[str, torch.Tensor | DeferredTensor], shard_bytes: int
) -> list[dict[str, torch.Tensor | DeferredTensor]]:
    """Returns the tensors in runs of at most `shard_bytes`, in their order; a larger tensor has a shard of its own."""
    shards: list[dict[str, torch.Tensor | DeferredTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
