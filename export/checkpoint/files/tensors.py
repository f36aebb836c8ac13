"""Reads the tensors of checkpoints in any layout, and writes those of compressed-tensors, in hashed shards.

The flag `tie_word_embeddings` of a config promises readers that the output head *is* the embedding, and vLLM then skips
the head in the files. transformers 5 compares the two and keeps both where they differ: so a model can be in memory
with a head of its own and a config that denies it, as a fine-tune, or a model of which only the head is quantized.
`_tied_weights_keys` of each transformers class lists the tensors that the flag ties, {"lm_head.weight":
"model.embed_tokens.weight"}. The flag stands in the config of that class; servers read the one of the language model
inside a model of images, so it is cleared in both.
"""

import json
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from quant.base.atomic import not_written
from quant.base.json_files import parse_json, typed
from quant.export.checkpoint.files import compressed_tensors
from quant.export.checkpoint.files.layouts import layout_of_tensors, matrix_problems, value_problem
from quant.export.checkpoint.files.names import Rename, StoredNames, cut_experts, in_files, matrix_names
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES, DeferredTensor, FileLog, write_tensor_file
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv, conv_parameter
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.recipes.layers import LayerKind, expert_matrices
from quant.recipes.plan import LayerPlan, Parts, Plan

FLAG = "tie_word_embeddings"


def untied_pairs(model: nn.Module, state: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
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


def _differ(target: str, source: str, tensors: Mapping[str, Tensor], quantized: tuple[str, ...]) -> bool:
    """Returns whether two tensors are stored apart; codes of a quantized layer are nobody else's."""
    owned = [name.startswith(quantized) for name in (target, source)]
    if any(owned):
        return all(own or name in tensors for own, name in zip(owned, (target, source), strict=True))
    if target not in tensors or source not in tensors:
        return False
    return not hold_same_values(tensors[target], tensors[source])


def hold_same_values(a: Tensor, b: Tensor) -> bool:
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
    model: nn.Module, dtype: torch.dtype, names: StoredNames, state: Mapping[str, Tensor] | None, source: Container[str]
) -> tuple[dict[str, Tensor | DeferredTensor], dict[str, str]]:
    """Returns every tensor of a quantized model, and the model's layer or tensor that it comes from; tied weights once.

    Both are by names on disk. Float scales are in `dtype`, and tensors in 16 bit in the form that `source`, the names
    in the source's files, has. `state` has the tensors that are not quantized; None takes the model's. A large tensor
    that the layout has in another form than the module is computed when it is written, so that memory does not grow
    with layers.
    """
    origin_of: dict[str, str] = {}
    quantized = {n: m for n, m in model.named_modules() if isinstance(m, _QUANTIZED)}
    tensors: dict[str, Tensor | DeferredTensor] = {}
    for name, tensor in _unquantized_tensors(model, quantized, state):
        cut = tensor.dim() == 3 and name.rpartition(".")[2] in names.cut
        for matrix_name, matrix in (cut_experts(name, expert_matrices(model, name)) if cut else {name: tensor}).items():
            tensors[matrix_name], origin_of[matrix_name] = matrix.contiguous(), name
    # The bias of a quantized layer stays next to its codes, which cannot be joined.
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, Tensor) and name.rpartition(".")[0] not in quantized
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
    model: nn.Module, quantized: Collection[str], state: Mapping[str, Tensor] | None
) -> Iterator[tuple[str, Tensor]]:
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
        if not isinstance(tensor, Tensor):
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
    directory: Path, tensors: Mapping[str, Tensor | DeferredTensor], shard_bytes: int | None = None, *,
    masks: Collection[str] | None = None, log: FileLog | None = None, carried: Collection[str] = (),
    heads: Mapping[str, Sequence[int]] | None = None, stem: str = "model",
) -> dict[str, str]:  # fmt: skip
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

    def write(name: str, shard: Mapping[str, Tensor | DeferredTensor]) -> str:
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
    tensors: Mapping[str, Tensor | DeferredTensor],
) -> tuple[dict[str, Tensor | DeferredTensor], dict[str, str]]:
    """Returns the tensors with global scales of float64 rounded to float32, and the exact ones as hexadecimal text."""
    stored, exact = dict(tensors), {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or not name.endswith(SECOND_LEVEL):
            continue
        if tensor.dtype is torch.float64 and tensor.numel() == 1:
            exact[name] = float(tensor).hex()
            stored[name] = tensor.float()
    return stored, exact


def _shards(
    tensors: Mapping[str, Tensor | DeferredTensor], shard_bytes: int
) -> list[dict[str, Tensor | DeferredTensor]]:
    """Returns the tensors in runs of at most `shard_bytes`, in their order; a larger tensor has a shard of its own."""
    shards: list[dict[str, Tensor | DeferredTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


EXACT = "blockscale.float64"
"""Key in the metadata of a file: scales that float32 does not hold, in hexadecimal."""
CARRIED = "blockscale.carried"
"""Key in the metadata of a file: names of the tensors that the source has and the model's class ignores."""
HEADS = "blockscale.prediction_heads"
"""Key in the metadata of the first file: shapes of the quantized layers of prediction heads, by their names."""
RUN_TIME_PARTS = ("pre_scale", "lowrank_down", "lowrank_up", "channels")
"""Suffixes of the tensors of a layer's run-time parts: scale of its input, low-rank branch, residual channels."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def weight_files(directory: Path) -> list[Path]:
    """Returns the files that hold the tensors of a checkpoint."""
    return sorted(directory.glob("*.safetensors"))


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of a checkpoint directory, read from the memory-mapped shards on access.

    A scale that float32 does not hold comes back in float64, from the metadata that `write_tensors` gave its file.
    `rename` turns a name on disk into the name here. With `meta`, tensors are on the meta device, read from the
    headers; single numbers, such as a scale, have values. FileNotFoundError and ValueError name a missing or damaged
    file.
    """

    def __init__(
        self, directory: Path, rename: Rename = str, *, meta: bool = False, files: Sequence[Path] | None = None
    ) -> None:
        self._meta = meta
        self.carried: set[str] = set()
        """Names of the tensors that the model's class ignores."""
        files = weight_files(directory) if files is None else files
        if not files:
            raise FileNotFoundError(f"{directory}: no .safetensors file")
        self._where: dict[str, tuple[Any, str, Path]] = {}
        self._exact: dict[str, float] = {}
        self._directory = directory
        for file in files:
            handle = _opened(file)
            for stored in handle.keys():  # noqa: SIM118
                name = rename(stored)
                if name in self._where:
                    other = self._where[name][2].name
                    raise ValueError(f"{file}: {stored} is in {other} too; remove the file that is not used")
                self._where[name] = (handle, stored, file)
            self._exact |= _exact_scales(handle, file)
            carried = _metadata(handle, file, CARRIED, list[str], "names")
            self.carried |= {rename(name) for name in carried if name in handle.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        handle, stored, _ = self._where[name]
        if self._meta and math.prod(shape := (part := handle.get_slice(stored)).get_shape()) > 1:
            # A dtype that this PyTorch does not have ends in safetensors' own error.
            dtype = _DTYPES.get(part.get_dtype()) or part[:0].dtype
            return torch.empty(shape, dtype=dtype, device="meta")
        tensor: Tensor = handle.get_tensor(stored)
        if stored not in self._exact:
            return tensor
        return torch.full(tensor.shape, self._exact[stored], dtype=torch.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    @cached_property
    def below(self) -> dict[str, list[str]]:
        """The tensors below each module: `weight` and `bias` of `model.norm`, for example."""
        return _by_module(self)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        handle, stored, _ = self._where[name]
        return tuple(handle.get_slice(stored).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor."""
        return self[name].dtype

    def is_mapped(self, name: str) -> bool:
        """Returns whether reading a tensor takes no memory."""
        return name in self._where

    def matrix(self, name: str, index: int) -> Tensor:
        """Returns one matrix of a stack."""
        return self[name][index]

    def stored_name(self, name: str) -> str:
        """Returns the name that a tensor has in its file."""
        return self._where[name][1]

    def in_file(self, name: str) -> str:
        """Returns the file that a tensor is in and its name there, for messages; the directory where there is none."""
        if name not in self._where:
            return f"{self._directory}: {name}"
        _, stored, file = self._where[name]
        return f"{file}: {stored}"


def head_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Returns the shapes `[out, in]` of quantized layers that the model's class ignores."""
    shapes: dict[str, tuple[int, int]] = {}
    for file in weight_files(directory):
        fields = _metadata(_opened(file), file, HEADS, dict[str, list[int]], "shapes")
        with _naming(file, HEADS):
            if any(size < 1 for shape in fields.values() for size in shape):
                raise ValueError("sizes are whole numbers from 1")
            shapes |= {name: (rows, columns) for name, (rows, columns) in fields.items()}
    return shapes


def _opened(file: Path) -> Any:
    file.open("rb").close()  # safetensors says of a file without permission that there is none
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, RuntimeError) as error:
        # torch raises RuntimeError where it cannot map an empty file.
        raise ValueError(f"{file}: truncated or damaged ({error}); write or download it again") from error


@contextmanager
def _naming(file: Path, key: str) -> Iterator[None]:
    """Raises ValueError with the name of a file whose metadata `key` is damaged."""
    try:
        yield
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{file}: damaged metadata {key} ({error}); write or download it again") from None


def _metadata(handle: Any, file: Path, key: str, kind: Any, noun: str) -> Any:
    """Returns a value of our own in the metadata of a file, of type `kind`, which is empty where there is none."""
    text = (handle.metadata() or {}).get(key)
    with _naming(file, key):
        return kind() if text is None else typed(kind, parse_json(text), noun)


def _exact_scales(handle: Any, file: Path) -> dict[str, float]:
    texts = _metadata(handle, file, EXACT, dict[str, str], "scales")
    names = set(handle.keys())
    with _naming(file, EXACT):
        scales = {name: float.fromhex(text) for name, text in texts.items()}
        for name, value in scales.items():
            # The tensor itself holds the nearest float32.
            if name not in names or not math.isclose(float(handle.get_tensor(name)), value, rel_tol=2**-23):
                raise ValueError(f"{name} has another value")
    return scales


def _by_module(names: Iterable[str]) -> dict[str, list[str]]:
    by_module: dict[str, list[str]] = {}
    for name in names:
        module, _, last = name.rpartition(".")
        by_module.setdefault(module, []).append(last)
    return by_module


def layer_tensor_names(tensors: Mapping[str, Tensor], layer: LayerPlan) -> list[str]:
    """Returns the names of the tensors that belong to a quantized layer, other than its bias."""
    below = tensors.below if isinstance(tensors, TensorFiles) else _by_module(tensors)
    matrices = [layer.name]
    if layer.kind == LayerKind.EXPERTS:
        matrices = [name for expert in range(layer.shape[0]) for name in matrix_names(layer.name, expert)]
    return [f"{name}.{own}" for name in matrices for own in below.get(name, ()) if own != "bias"]


def read_layer(tensors: Mapping[str, Tensor], plan: LayerPlan) -> tuple[BlockScaledTensor, Tensor | None]:
    """Reads a planned layer's weight and static input scale, in any layout.

    ValueError names a wrong tensor and its file.
    """
    below = tensors.below if isinstance(tensors, TensorFiles) else _by_module(tensors)
    outside = ("bias", *planned_parts(plan))

    def read(name: str, shape: tuple[int, ...]) -> tuple[BlockScaledTensor, Tensor | None]:
        own = {key: tensors[f"{name}.{key}"] for key in below.get(name, ()) if key not in outside}
        for key, problem in matrix_problems(own, plan.weight_format, plan.activation, shape):
            raise ValueError(
                f"{in_file(tensors, f'{name}.{key}')} {problem}; quantize the model again, or download it again"
            )
        return layout_of_tensors(own).decompress(own, plan.weight_format)

    if plan.kind != LayerKind.EXPERTS:
        return read(plan.name, plan.matrix)
    experts, input_scale = [], None
    for index in range(plan.shape[0]):
        names, matrices = matrix_names(plan.name, index), []
        for name in names:
            weight, scale = read(name, (plan.shape[1] // len(names), plan.shape[2]))
            if scale is not None and input_scale is not None and not torch.equal(scale, input_scale):
                raise ValueError(
                    f"{name}: its input scale is {float(scale):g} and another expert's {float(input_scale):g}; "
                    "experts run in one matmul here, and share one"
                )
            input_scale = scale
            matrices.append(weight)
        experts.append(join_rows(matrices))
    global_scale = None
    if experts[0].global_scale is not None:
        global_scale = torch.stack([e.global_scale for e in experts if e.global_scale is not None])
    # [experts] of [out, in]  ->  [experts, out, in]
    codes, scales = torch.stack([e.codes for e in experts]), torch.stack([e.scale for e in experts])
    return BlockScaledTensor(codes, scales, experts[0].format, tuple(plan.shape), global_scale), input_scale


def join_rows(weights: list[BlockScaledTensor]) -> BlockScaledTensor:
    """Undoes `split_rows`."""
    # Gate and up become the rows of one matrix, which has one global scale.
    first = weights[0]
    if len(weights) == 1:
        return first
    shared = [w.scale if w.format.per_tensor else w.global_scale for w in weights]
    if shared[0] is not None and not all(s is not None and torch.equal(s, shared[0]) for s in shared):
        raise ValueError(f"cannot join {len(weights)} matrices of {first.format}: their per-matrix scales differ")
    scale = first.scale if first.format.per_tensor else _joined([w.scale for w in weights])
    rows = sum(w.shape[0] for w in weights)
    codes = _joined([w.codes for w in weights])
    return BlockScaledTensor(codes, scale, first.format, (rows, first.shape[1]), first.global_scale)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates rows; of tensors on the meta device the shape alone, because PyTorch computes it in Python."""
    if not parts[0].is_meta:
        return torch.cat(parts)
    return parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])


def in_file(tensors: Mapping[str, Tensor], name: str) -> str:
    """Returns how messages call a tensor: by its file and its name there, where it is in one."""
    return tensors.in_file(name) if isinstance(tensors, TensorFiles) else name


def planned_parts(plan: LayerPlan) -> list[str]:
    """Returns the names in `RUN_TIME_PARTS` that a layer has by its plan."""
    sizes = (plan.parts.pre_scale, plan.parts.rank, plan.parts.rank, plan.parts.residual)
    return [name for name, size in zip(RUN_TIME_PARTS, sizes, strict=True) if size]


def read_parts(tensors: Mapping[str, Tensor], plan: LayerPlan) -> RunTimeParts:
    """Reads the run-time parts of a planned layer; ValueError names a tensor that is missing or wrong."""
    planned, suffixes = plan.parts, planned_parts(plan)
    for suffix in suffixes:
        name = f"{plan.name}.{suffix}"
        if name not in tensors:
            raise ValueError(f"{plan.name}: the checkpoint has no tensor {name}, which the plan names")
        if suffix != "channels" and (problem := value_problem(tensors[name])):
            raise ValueError(f"{in_file(tensors, name)} {problem}; quantize the model again, or download it again")
    pre_scale, down, up, channels = (tensors[f"{plan.name}.{s}"] if s in suffixes else None for s in RUN_TIME_PARTS)
    parts = RunTimeParts(pre_scale, planned.hadamard, None if down is None or up is None else (down, up), channels)
    if parts.residual != planned.residual:
        raise ValueError(
            f"{plan.name}: the checkpoint has {parts.residual} residual channels, and the plan says {planned.residual}"
        )
    if plan.kind != LayerKind.EXPERTS:
        parts.check(plan.name, plan.matrix)
    if parts.rank != planned.rank:
        raise ValueError(f"{plan.name}: the checkpoint's branch has rank {parts.rank}, the plan's {planned.rank}")
    return parts


def read_buffers(tensors: Mapping[str, Tensor], plan: LayerPlan, model: nn.Module) -> dict[str, Tensor]:
    """Reads the buffers of a planned layer's module, by their full names; raises as `read_layer` and `read_parts`.

    `model` has that module already: of a convolution it says the shape of the codes, which files hold as a matrix.
    """
    (weight, input_scale), parts = read_layer(tensors, plan), read_parts(tensors, plan)
    down, up = parts.lowrank or (None, None)
    codes, module = weight.codes, model.get_submodule(plan.name)
    if isinstance(module, QuantConv):
        codes = conv_parameter(codes, module.codes.shape, module.groups, module.transposed).contiguous()
    buffers = {
        "codes": codes, "scale": weight.scale, "global_scale": weight.global_scale,
        "input_scale": input_scale, "pre_scale": parts.pre_scale, "lowrank_down": down, "lowrank_up": up,
        "channels": parts.channels,
    }  # fmt: skip
    return {f"{plan.name}.{name}": tensor for name, tensor in buffers.items() if tensor is not None}
