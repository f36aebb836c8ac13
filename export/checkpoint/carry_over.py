"""Tensors of the source that the quantized model lacks, or holds in another dtype, go into its checkpoint unchanged.

transformers drops tensors that a model's class has no use for, such as the multi-token-prediction heads of Qwen3-Next
and DeepSeek-V3, which servers run. It also casts tensors to the config's dtype as it loads them: float32 biases of
routers, or `A_log` of a state-space layer, in a BF16 model. A checkpoint has them as the source does:

    not in the model                           carried under its name; its module is in the config's `ignore`
    cast, and not changed since                the source's dtype and bytes
    the whole model cast to another dtype      the model's dtype, which the user chose
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import listed
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.names import EXPERT_PARTS, StoredNames, cut_experts, stored_names
from quant.export.checkpoint.files.tensor_file import DeferredTensor
from quant.export.checkpoint.files.tensors import TensorFiles
from quant.formats.finite import is_wide_float
from quant.models import huggingface
from quant.models.files import explained, read_fields
from quant.models.quantized_tensors import QuantizedTensors, quantization_of
from quant.models.state_dict import load_pickle as load_pickle
from quant.recipes.blocks import stored_dtype
from quant.recipes.plan import PLAN_FILE

Tensors = dict[str, Tensor | DeferredTensor]
CODES = ("weight_packed", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale")
"""Suffixes under which layouts store a quantized weight; one of them below a module says that it is quantized."""
_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(\w+)\.weight")
_STACKS = {*EXPERT_PARTS, "down_proj"}
# transformers says of no model that it ignores these buffers, which it computes.
_COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def carry_over(model: Any, tensors: Tensors, names: StoredNames, source: Path) -> tuple[Tensors, StoredNames]:
    """Returns the tensors, by their names on disk, completed by tensors of the source, and the names with these."""
    original = source_tensors(source, stored_dtype(model))
    carried = unused_tensors(model, original, tensors, names, original)
    completed = dict(tensors)
    # A user who cast the whole model expects its dtype on disk; only casts that transformers made on loading are
    # undone.
    if main_dtype(original) == stored_dtype(model):
        completed = {name: _as_in_source(name, tensor, original) for name, tensor in tensors.items()}
    completed |= {name: _deferred(name, original) for name in carried}
    # A server may make a linear layer of such a matrix, and would look for its codes: the config's `ignore` names it.
    return completed, names.with_carried({name: completed[name].shape for name in carried}, tensors)


def carried_note(model: Any, names: StoredNames, source: Path | None) -> list[str]:
    """Returns a sentence on the tensors that were carried over; empty for none, or for a checkpoint of ours."""
    if not names.carried or source is None or (source / PLAN_FILE).is_file():
        return []
    return [
        f"{type(model).__name__} of transformers does not run {listed(names.carried, 3)}; the checkpoint has "
        f"{'this tensor' if len(names.carried) == 1 else 'these tensors'} as the source does, for servers that do"
    ]


def _deferred(name: str, original: Mapping[str, Tensor]) -> Tensor | DeferredTensor:
    """Returns a tensor of the source; a dequantized one is computed when it is written."""
    if isinstance(original, QuantizedTensors) and name in original.packed:
        return DeferredTensor(torch.Size(original.shape(name)), original.dtype, partial(original.__getitem__, name))
    return original[name].contiguous()


def source_tensors(source: Path, dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Returns the tensors of a model's directory, read on access.

    Of a quantized one of others, dequantized to `dtype`.
    """
    shards = huggingface.find_shards(source)
    if not (source / PLAN_FILE).is_file():
        # `quantization_of` raises for a checkpoint of this toolkit, so it is called only for other sources.
        quantization = quantization_of(source, read_fields(source / "config.json"))
        if quantization is not None and (packed := QuantizedTensors(shards, quantization, dtype)).packed:
            return packed
    if all(shard.suffix == ".safetensors" for shard in shards):
        return TensorFiles(source, files=shards)
    pickles: dict[str, Tensor] = {}
    for shard in shards:
        _, state = load_pickle(shard, None, unsafe=False, meta=False)
        pickles |= dict(state or {})
    return pickles


def source_names(source: Path) -> Collection[str]:
    """Returns the names of the tensors in a model's safetensors files; none for pickles."""
    shards = [shard for shard in huggingface.find_shards(source) if shard.suffix == ".safetensors"]
    return set(TensorFiles(source, files=shards)) if shards else ()


def is_quantized(name: str, written: Collection[str]) -> bool:
    """Returns whether a checkpoint holds codes in the place of the tensor `name` of the source.

    A stack of experts `….experts.gate_up_proj` may be stored matrix by matrix: `….experts.0.gate_proj.weight_packed`.
    """
    module, _, last = name.rpartition(".")
    stems = [module if last == "weight" else name]
    if module.endswith(".experts"):
        stems += [f"{module}.0.{part}" for part in ("gate_proj", "up_proj", last)]
    return any(f"{stem}.{suffix}" in written for stem in stems for suffix in CODES)


def unused_tensors(
    model: Any, original: Mapping[str, Tensor], written: Collection[str], names: StoredNames, candidates: Iterable[str]
) -> list[str]:
    """Returns the source's tensors, among `candidates`, that the model's class has no use for and no file has."""
    # The metadata of our checkpoints lists the tensors that were carried over, so transformers need not be asked again.
    if isinstance(original, TensorFiles) and original.carried:
        return [name for name in candidates if name in original.carried and name not in written]
    own = {names.stored(name) for name in model.state_dict(keep_vars=True)}
    lacking = [
        name
        for name in candidates
        if not (name in written or name in own or names.of_model(name) in own or is_quantized(name, written))
        and modelopt.kv_name_of_module(name) not in written
    ]
    ignored = (*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), *_COMPUTED)
    carried = {name for name in lacking if any(re.search(pattern, name) for pattern in ignored)}
    # The other ones may be in the model nevertheless: transformers renames and joins tensors as it loads them.
    carried |= set(_unexpected(model, original, [name for name in lacking if name not in carried], names))
    return [name for name in lacking if name in carried]


def _unexpected(
    model: Any, original: Mapping[str, Tensor], candidates: list[str], names: StoredNames
) -> Collection[str]:
    """Returns the tensors among `candidates` that transformers finds no parameter for; no data is read."""
    if not candidates:
        return ()
    config = copy.deepcopy(model.config)
    # With this table transformers would build quantized modules, and all tensors would count as unexpected.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    outlines = {name: _deferred(name, original) for name in candidates}
    # Loading meta tensors into a meta model runs transformers' renaming and joining of tensors, and reads no data.
    shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in outlines.items()}
    with huggingface.quiet(), explained("transformers cannot list the tensors that it ignores"):
        _, info = type(model).from_pretrained(
            None, config=config, state_dict=shapes, device_map="meta", dtype=config.dtype, output_loading_info=True
        )
    unexpected = set(info["unexpected_keys"])
    if len(unexpected) == len(candidates):  # under whichever names
        return candidates
    return {name for name in candidates if unexpected.intersection((name, *_in_model(names.of_model(name))))}


def _in_model(name: str) -> list[str]:
    """Returns the names that a tensor may have once transformers has joined experts: its own, or a stack's.

    `….experts.3.up_proj.weight` is a part of `….experts.gate_up_proj`.
    """
    match = _EXPERT.fullmatch(name)
    if match is None:
        return [name]
    stacks = [last for last, parts in EXPERT_PARTS.items() if match[2] in parts]
    return [name, *(f"{match[1]}.{last}" for last in (*stacks, match[2]))]


def main_dtype(original: Mapping[str, Tensor]) -> torch.dtype | None:
    """Returns the floating-point dtype that most elements have, after dequantization."""
    if isinstance(original, QuantizedTensors):
        return original.dtype
    elements: Counter[torch.dtype] = Counter()
    for tensor in original.values():
        if is_wide_float(tensor):  # FP8 holds the codes or scales of a checkpoint that is quantized already
            elements[tensor.dtype] += tensor.numel()
    return elements.most_common(1)[0][0] if elements else None


def _as_in_source(
    name: str, tensor: Tensor | DeferredTensor, original: Mapping[str, Tensor]
) -> Tensor | DeferredTensor:
    """Returns the source's tensor, if `tensor` is that one cast to another floating-point dtype; else `tensor`."""
    if isinstance(tensor, DeferredTensor) or name not in original or not is_wide_float(tensor):
        return tensor
    if isinstance(original, QuantizedTensors) and name in original.packed:
        return tensor
    stored = original[name]
    if stored.dtype == tensor.dtype or stored.shape != tensor.shape or not is_wide_float(stored):
        return tensor
    # Values that were changed after loading, by a transform or by training, must not be undone by the source's.
    return stored if torch.equal(stored.to(tensor.dtype), tensor.cpu()) else tensor


def head_weights(model: nn.Module, source: Path, is_asked: Callable[[str], bool]) -> dict[str, Tensor]:
    """Returns the source's matrices that the model's class has no use for, by the names that their layers would have.

    Experts that are stored as one stack `[experts, out, in]` come matrix by matrix, as servers read quantized ones.
    `is_asked` says whether a layer of a name is requested.
    """
    original, names = source_tensors(source, stored_dtype(model)), stored_names(model)
    # transformers is asked about all experts of a block or about none, because it joins their matrices.
    stems = {name.partition(".experts.")[0] for name in original if is_asked(name.removesuffix(".weight"))}
    candidates = [name for name in original if name.partition(".experts.")[0] in stems]
    weights: dict[str, Tensor] = {}
    for name in unused_tensors(model, original, (), names, candidates):
        tensor = original[name]
        if not is_wide_float(tensor):
            continue
        if tensor.dim() == 2 and name.endswith(".weight"):
            weights[name.removesuffix(".weight")] = tensor
        elif tensor.dim() == 3 and name.rpartition(".")[2] in _STACKS and ".experts." in name:
            weights |= {each.removesuffix(".weight"): part for each, part in cut_experts(name, tensor).items()}
    # Names that transformers would change on the way to the disk could not be read back.
    return {
        name: weight
        for name, weight in weights.items()
        if is_asked(name) and names.stored(f"{name}.weight") == f"{name}.weight"
    }
