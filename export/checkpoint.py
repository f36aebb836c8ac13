"""Checkpoint directories: written whole or not at all, sharded, hashed, read back.

A directory is built under a temporary name beside its destination and renamed when everything is in it, so that a
full disk, a crash or Ctrl-C never leaves half a checkpoint under the name a server loads.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from quant.export import compressed_tensors as layout
from quant.export import modelopt
from quant.export.names import EXPERT_PARTS, StoredNames, cut_experts, expert_names, stored_names
from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.modules import QuantExperts, QuantLinear, RunTimeParts
from quant.recipes.layers import Layer
from quant.recipes.plan import PLAN_FILE, LayerPlan, Plan

SHARD_BYTES = 5 * 1000**3
OURS = (PLAN_FILE, "receipt.json")
"""Files that mark a directory as one that Blockscale wrote, and may replace."""
SECOND_LEVEL = ("weight_scale_2", "weight_global_scale", "input_global_scale", "input_scale")
"""Suffixes of the scales that one layout stores as the reciprocal of the other's."""
_EXACT = "blockscale.float64"  # key in a file's metadata


@contextmanager
def new_directory(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Gives a temporary directory that becomes `path` when the block ends without an error.

    Raises:
        OSError: `path` is not to be replaced, as `check_destination` says.
    """
    check_destination(path, overwrite=overwrite)
    path = path.resolve()  # what a link points to is replaced, not the link
    made = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        _put_in_place(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in made:
            with suppress(OSError):  # somebody else has written there meanwhile
                parent.rmdir()
        raise


def _put_in_place(new: Path, path: Path) -> None:
    """Renames `new` to `path`; what was there goes only when the new one stands, and comes back if it does not."""
    if not path.exists():
        new.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(old)
    try:
        new.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_destination(path: Path, *, overwrite: bool) -> None:
    """Checks, before anything slow, that a directory can be put at `path`.

    Raises:
        FileExistsError: it is a file, or below one; it holds files and `overwrite` is False, or they are not what
            Blockscale writes.
        OSError: it is a mount point or holds the current directory, neither of which can be replaced whole; or
            nothing can be written there.
    """
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise FileExistsError(f"{place} is a file; name a directory for the checkpoint")
    if os.path.ismount(path):
        raise OSError(f"{path} is a mount point, which cannot be replaced whole; name a directory in it")
    whole = path.resolve()
    if whole in (Path.cwd(), *Path.cwd().parents):
        raise OSError(f"{path} is the current directory or above it; name a directory in it")
    _check_files(path, overwrite)
    parent = next(place for place in whole.parents if place.is_dir())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OSError(f"{path}: {parent} cannot be written to ({error.strerror}); choose another directory") from None


def _check_files(path: Path, overwrite: bool) -> None:
    files = sorted(place.name for place in path.iterdir()) if path.is_dir() else []
    if not files:
        return
    if not overwrite:
        raise FileExistsError(f"{path} is not empty; pass --overwrite to replace it, or choose another directory")
    if not any(name in files for name in OURS):
        raise FileExistsError(
            f"{path} holds {files[0]} and no {' or '.join(OURS)}, so it is not ours to delete: --overwrite replaces "
            "only what Blockscale wrote; choose another directory"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def checkpoint_tensors(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every tensor of a quantized model under its name in the checkpoint; tied weights once.

    Args:
        model: with `QuantLinear` and `QuantExperts` in place.
        dtype: the model's dtype, for float scales.
    """
    names = stored_names(model)
    quantized = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear | QuantExperts | QuantEmbedding)}
    own = tuple(f"{name}." for name in quantized)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[object, ...]] = set()
    for name, tensor in model.state_dict().items():
        if name.startswith(own) and not name.endswith(".bias"):
            continue
        view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if view in seen and tensor.numel() and tensor.data_ptr():
            continue
        seen.add(view)
        cut = tensor.dim() == 3 and name.rpartition(".")[2] in names.cut
        for part, matrix in (cut_experts(name, tensor) if cut else {name: tensor}).items():
            tensors[part] = matrix.contiguous()
    for name, module in quantized.items():
        for part, weight in layer_weights(name, module.quantized_weight).items():
            for suffix, tensor in layout.compress(weight, module.input_scale, dtype, module.activation_format).items():
                tensors[f"{part}.{suffix}"] = tensor.contiguous()
        for suffix in _BESIDE:
            beside = getattr(module, suffix, None)
            if beside is not None:
                tensors[f"{name}.{suffix}"] = beside.contiguous()
    return {names.stored(name): tensor for name, tensor in tensors.items()}


def plan_of_model(model: nn.Module, plan: Plan) -> Plan:
    """`plan` with what the model's quantized linears really do at run time: input scale, rotation, branch."""
    found = []
    for layer in plan.quantized:
        if layer.kind not in ("experts", "embedding"):
            try:
                module: nn.Module | None = model.get_submodule(layer.name)
            except AttributeError:
                module = None
            if not isinstance(module, QuantLinear):
                raise ValueError(
                    f"{layer.name}: the plan has it in {layer.weight}, and the model holds no quantized layer there; "
                    "give the model and the plan that one call of quantize returned"
                )
            parts = module.parts
            found.append(
                replace(layer, pre_scale=parts.pre_scale is not None, hadamard=parts.hadamard, rank=parts.rank)
            )
    return plan.replace_layers(found)


def layer_weights(name: str, weight: BlockScaledTensor) -> dict[str, BlockScaledTensor]:
    """A layer's matrices by their names in the checkpoint.

    A linear is itself. A fused-expert projection `experts.gate_up_proj` becomes one matrix per expert, gate and up
    apart (`experts.3.gate_proj`, `experts.3.up_proj`): the names that runtimes look for, or that `stored_names` turns
    into them.
    """
    if len(weight.shape) == 2:
        return {name: weight}
    stem, _, last = name.rpartition(".")
    names = EXPERT_PARTS.get(last, (last,))
    found = {}
    for index in range(weight.shape[0]):
        for part, matrix in zip(names, split_rows(weight.matrix(index), len(names)), strict=True):
            found[f"{stem}.{index}.{part}"] = matrix
    return found


def layer_tensor_names(names: Iterable[str], layer: LayerPlan) -> list[str]:
    """Those of `names` that belong to a quantized layer, its bias not among them."""
    if layer.kind != "experts":
        own = re.compile(rf"{re.escape(layer.name)}\.(?!bias$)[a-z_0-9]+")
    else:
        stem, _, last = layer.name.rpartition(".")
        own = re.compile(rf"{re.escape(stem)}\.\d+\.({'|'.join(EXPERT_PARTS.get(last, (last,)))})\..+")
    return [name for name in names if own.fullmatch(name)]


def split_rows(weight: BlockScaledTensor, parts: int) -> list[BlockScaledTensor]:
    """`weight` cut into `parts` equal runs of rows. Per-tensor scales are shared by all of them.

    Raises:
        ValueError: the cut would go through a block.
    """
    rows, columns = weight.shape
    if parts == 1:
        return [weight]
    block_rows = weight.format.block[0]
    if rows % parts or (block_rows and rows // parts % block_rows):
        raise ValueError(f"cannot split {rows} rows of {weight.format} into {parts}: a block would be cut")
    scales = [weight.scale] * parts if block_rows == 0 else weight.scale.chunk(parts)
    return [
        BlockScaledTensor(codes, scale, weight.format, (rows // parts, columns), weight.global_scale)
        for codes, scale in zip(weight.codes.chunk(parts), scales, strict=True)
    ]


def join_rows(weights: list[BlockScaledTensor]) -> BlockScaledTensor:
    """The inverse of `split_rows`."""
    first = weights[0]
    if len(weights) == 1:
        return first
    shared = [w.scale if w.format.per_tensor else w.global_scale for w in weights]
    if shared[0] is not None and not all(s is not None and torch.equal(s, shared[0]) for s in shared):
        raise ValueError(f"cannot join {len(weights)} matrices of {first.format}: their per-matrix scales differ")
    scale = first.scale if first.format.per_tensor else torch.cat([w.scale for w in weights])
    rows = sum(w.shape[0] for w in weights)
    codes = torch.cat([w.codes for w in weights])
    return BlockScaledTensor(codes, scale, first.format, (rows, first.shape[1]), first.global_scale)


def write_tensors(
    directory: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int = SHARD_BYTES
) -> dict[str, str]:
    """Writes safetensors shards of at most `shard_bytes` and, if there are several, their index.

    A scale in float64 is one that float32, which is all that runtimes read, does not hold: the nearest float32 goes
    into the file, and the exact value into the file's metadata, for `TensorFiles`.

    Returns:
        SHA-256 of each file, by file name.
    """
    shards: list[dict[str, torch.Tensor]] = [{}]
    exact: dict[str, str] = {}
    size = 0
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float64 and tensor.numel() == 1 and name.endswith(SECOND_LEVEL):
            exact[name] = float(tensor).hex()
            tensor = tensor.float()
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = ["model.safetensors"]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        index = {
            "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
            "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
        }
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    hashes = {}
    for name, shard in zip(names, shards, strict=True):
        metadata = {"format": "pt"}
        if kept := {key: value for key, value in exact.items() if key in shard}:
            metadata[_EXACT] = json.dumps(kept)
        try:
            save_file(shard, directory / name, metadata=metadata)
        except SafetensorError as error:
            raise OSError(f"{directory / name} cannot be written: {error}") from error
        (directory / name).chmod(0o666 & ~_umask())
        hashes[name] = sha256_of(directory / name)
    return hashes


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_config(directory: Path, model: Any, plan: Plan) -> None:
    """Writes config.json: the transformers config with the model's class and dtype, and the `quantization_config`."""
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    # Both may be stale: a model built from a config has no architectures there, and .to(dtype) leaves the dtype.
    fields["architectures"] = [type(model).__name__]
    fields["dtype"] = str(next((p.dtype for p in model.parameters()), torch.float32)).removeprefix("torch.")
    fields["quantization_config"] = layout.quantization_config(plan, stored_names(model))
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")


class TensorFiles(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint directory, read from the memory-mapped shards when asked for.

    Scales that `write_tensors` found no float32 for are float64, as they were.

    Raises:
        FileNotFoundError: the directory has no safetensors file.
        ValueError: one of them is damaged; the message names it.
    """

    def __init__(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{directory}: no .safetensors file")
        self._where: dict[str, Any] = {}
        self._exact: dict[str, str] = {}
        for file in files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot map an empty file
                raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from error
            self._where.update(dict.fromkeys(handle.keys(), handle))
            self._exact |= json.loads((handle.metadata() or {}).get(_EXACT, "{}"))

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        if name not in self._exact:
            return tensor
        return torch.full(tensor.shape, float.fromhex(self._exact[name]), dtype=torch.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def read_layer(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    """One planned layer's weight and static input scale from a checkpoint's tensors, of either layout.

    Raises:
        ValueError: a tensor of the layer is missing; the message names both.
    """
    if plan.kind != "experts":
        return _read_linear(tensors, plan.name, plan.weight)
    stem, _, last = plan.name.rpartition(".")
    experts, input_scale = [], None
    for index in range(plan.shape[0]):
        parts = []
        for part in EXPERT_PARTS.get(last, (last,)):
            name = f"{stem}.{index}.{part}"
            weight, own = _read_linear(tensors, name, plan.weight)
            if own is not None and input_scale is not None and not torch.equal(own, input_scale):
                raise ValueError(
                    f"{name}: its input scale is {float(own):g} and another expert's {float(input_scale):g}; "
                    "experts run in one matmul here, and share one"
                )
            input_scale = own
            parts.append(weight)
        experts.append(join_rows(parts))
    global_scale = None
    if experts[0].global_scale is not None:
        global_scale = torch.stack([e.global_scale for e in experts if e.global_scale is not None])
    codes, scale = torch.stack([e.codes for e in experts]), torch.stack([e.scale for e in experts])
    return BlockScaledTensor(codes, scale, experts[0].format, tuple(plan.shape), global_scale), input_scale


def _read_linear(
    tensors: Mapping[str, torch.Tensor], name: str, format: Any
) -> tuple[BlockScaledTensor, torch.Tensor | None]:
    local = {key: tensors[f"{name}.{key}"] for key in _NAMES if f"{name}.{key}" in tensors}
    try:
        return (modelopt if modelopt.holds(local) else layout).decompress(local, format)
    except KeyError as error:
        raise ValueError(f"{name}: the checkpoint has no tensor {name}.{error.args[0]} for format {format}") from None


def read_parts(tensors: Mapping[str, torch.Tensor], plan: LayerPlan) -> RunTimeParts:
    """What a planned layer does at run time beside its matmul.

    Raises:
        ValueError: a tensor that the plan promises is missing, or has another rank; the message names it.
    """
    needed = [name for name, wanted in zip(_BESIDE, (plan.pre_scale, plan.rank, plan.rank), strict=True) if wanted]
    for suffix in needed:
        if f"{plan.name}.{suffix}" not in tensors:
            raise ValueError(f"{plan.name}: the checkpoint has no tensor {plan.name}.{suffix}, which the plan names")
    pre_scale, down, up = (tensors[f"{plan.name}.{s}"] if s in needed else None for s in _BESIDE)
    parts = RunTimeParts(pre_scale, plan.hadamard, None if down is None or up is None else (down, up))
    if plan.kind != "experts":
        parts.check(plan.name, plan.shape)
    if parts.rank != plan.rank:
        raise ValueError(f"{plan.name}: the checkpoint's branch has rank {parts.rank}, the plan's {plan.rank}")
    return parts


_BESIDE = ("pre_scale", "lowrank_down", "lowrank_up")

_NAMES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "input_scale",
)


def plan_of_checkpoint(
    directory: Path, found: Iterable[Layer], config: Mapping[str, Any], names: StoredNames | None = None
) -> Plan:
    """The plan of a compressed-tensors checkpoint that came without one, read from its `quantization_config`.

    Args:
        directory: for error messages.
        found: the model's layers; linear ones, the head and experts may be quantized.
        config: the `quantization_config`.
        names: of the model's tensors on disk, which the config may list too.
    """
    names = names or StoredNames()
    groups = [
        (
            group["targets"],
            layout.weight_format_of(group["weights"]),
            layout.activation_format_of(group.get("input_activations")),
        )
        for group in config["config_groups"].values()
    ]
    layers = []
    reason = f"as {directory.name} was written"
    for layer in found:
        if layer.kind not in ("linear", "head", "experts"):
            layers.append(LayerPlan(layer.name, layer.kind, layer.shape, reason=reason))
            continue
        called = names.both(layer.name)
        if layer.kind == "experts":
            # A config speaks of the matrices of one expert.
            called = names.both(expert_names(layer.name, 1)[0].removesuffix(".weight"))
        chosen = None
        if not any(_matches(name, pattern) for pattern in config.get("ignore") or () for name in called):
            chosen = next(
                ((w, a) for targets, w, a in groups if any(_matches(name, t) for t in targets for name in called)), None
            )
        weight, activation = chosen or (None, None)
        layers.append(LayerPlan(layer.name, layer.kind, layer.shape, weight, activation, reason=reason))
    kv_cache = FORMATS["fp8"] if config.get("kv_cache_scheme") else None
    return Plan(tuple(layers), kv_cache=kv_cache, provenance={"checkpoint": str(directory)})


def _matches(name: str, target: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target in ("Linear", name)
