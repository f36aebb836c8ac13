"""A checkpoint is compared with the model that it was made from: tensors that no plan touches must be in it unchanged.

    tensors   every tensor of the source is quantized, or is there with its dtype and bytes
    config    every key of the source's config.json is there with its value
    files     every file besides the weights is there with its bytes: tokenizers, templates, licences, code

Each deviation is a `Difference`. One that a rule explains carries the reason (a tied head is stored once, a solver
folded its input scale into a norm); one without a reason is an error of the program that wrote the checkpoint.
"""

import filecmp
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, option
from quant.base.json_files import JsonData, text_as_in_source
from quant.export.checkpoint.carry_over import CODES, main_dtype, source_tensors, unused_tensors
from quant.export.checkpoint.files.names import StoredNames, cut_experts, stored_names
from quant.export.checkpoint.files.read_tensors import TensorFiles
from quant.export.checkpoint.model_card import CARD, SOURCE_CARD
from quant.export.checkpoint.open_checkpoint import outline
from quant.models.configs import read_fields
from quant.models.files import companion_files, find_model
from quant.models.quantized_tensors import QuantizedTensors
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import expert_matrices
from quant.recipes.plan import PLAN_FILE, Plan
from quant.recipes.solver_names import parse_solver

# Keys by which a config describes its own form, and keys about the quantization of the source.
_FORM = {"transformers_version", "_name_or_path", "quantization_config", "compression_config"}
# transformers 5 has another name for this key, and reads both.
_RENAMED = {"torch_dtype": "dtype"}
_BLOCK = re.compile(r"(.*?\.\d+)\.")  # model.layers.3 of model.layers.3.mlp.up_proj
_EXPERT = re.compile(r"(.+)\.\d+(\.\w+)?")
_OTHER_VALUES = "has other values than in the source"
_MISSING: Any = object()


@dataclass(frozen=True)
class Difference(JsonData):
    """Something of the source that the checkpoint does not have as it was."""

    part: str  # "tensors", "config" or "files"
    name: str  # of the tensor, the key of config.json, or the file
    problem: str
    reason: str | None = None  # why that is right; None where nothing explains it

    def __str__(self) -> str:
        """One line for the terminal and the report."""
        return f"{self.name} {self.problem}" + (f": {self.reason}" if self.reason else "")


def compare_with_source(directory: str | Path, source: str | Path, model: nn.Module | None = None) -> list[Difference]:
    """Returns every difference between a checkpoint of any tool and the model that it was made from.

    Without `model`, it is built on the meta device if the comparison needs it. UserError: `source` is not a directory
    with config.json and weights, whose names a checkpoint keeps.
    """
    home = find_model(str(source))
    if not (home / "config.json").is_file():
        kind = (
            "a directory without config.json" if home.is_dir() else f"a single {home.suffix.lstrip('.').upper()} file"
        )
        raise UserError(
            f"{option('source', home)} is {kind}: a checkpoint is compared with a directory of config.json and "
            f"weights, whose names, keys and files it keeps; leave out {option('source')}, which checks the checkpoint "
            "alone"
        )
    pair = _Pair(Path(directory), home, model)
    return [*_tensor_differences(pair), *_config_differences(pair), *_file_differences(pair)]


@dataclass(eq=False)
class _Pair:
    """A checkpoint and its source; each part is read once."""

    directory: Path
    home: Path
    module: nn.Module | None

    @cached_property
    def model(self) -> nn.Module:
        return self.module or outline(self.directory)

    @cached_property
    def names(self) -> StoredNames:
        return stored_names(self.model)

    @cached_property
    def written(self) -> TensorFiles:
        return TensorFiles(self.directory)

    @cached_property
    def original(self) -> Mapping[str, torch.Tensor]:
        return source_tensors(self.home, stored_dtype(self.model))

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that the checkpoint was made by, where it is there."""
        return Plan.load(self.directory / PLAN_FILE) if (self.directory / PLAN_FILE).is_file() else None

    @cached_property
    def quantized(self) -> set[str]:
        """Modules below which the checkpoint has codes; of experts that are stored one by one, their common module."""
        modules = {name.rpartition(".")[0] for name in self.written if name.endswith(CODES)}
        experts = {match[1] for name in modules if (match := _EXPERT.fullmatch(name))}
        return modules | experts

    def is_quantized(self, name: str) -> bool:
        """Returns whether there are codes in the place of a tensor of the source."""
        if name in self.written and self.written.shape(name) == (0,):
            return True  # an empty tensor at which transformers stops, in the place of quantized experts
        module, _, last = name.rpartition(".")
        if last == "bias" or (name in self.written and last != "weight"):
            return False
        return module in self.quantized if last == "weight" else bool({module, name} & self.quantized)


def _tensor_differences(pair: _Pair) -> Iterator[Difference]:
    missing = []
    for name in pair.original:
        if pair.is_quantized(name):
            continue
        if name not in pair.written:
            experts = _cut_experts(pair, name)
            missing += [] if experts else [name]
            yield from _expert_differences(pair, name, experts)
        elif problem := _tensor_problem(pair, name):
            yield Difference("tensors", name, problem, _why_changed(pair, name, problem))
    if not missing:
        return
    unused = set(unused_tensors(pair.model, pair.original, pair.written, pair.names))
    for name in missing:
        yield Difference("tensors", name, "is missing", None if name in unused else _why_missing(pair, name))


def _cut_experts(pair: _Pair, name: str) -> dict[str, torch.Tensor]:
    """Returns the matrices of a stack of experts in 16 bit by their names in the checkpoint; none of other tensors."""
    ours, original = pair.names.of_model(name), pair.original[name]
    if original.dim() != 3 or ours.rpartition(".")[2] not in pair.names.cut:
        return {}
    matrices = cut_experts(ours, expert_matrices(pair.model, ours, original))
    return {pair.names.stored(each): matrix for each, matrix in matrices.items()}


def _expert_differences(pair: _Pair, name: str, experts: Mapping[str, torch.Tensor]) -> Iterator[Difference]:
    """Yields how the matrices of a stack of the source deviate, which the checkpoint has one by one."""
    faults = []
    for each, matrix in experts.items():
        if each not in pair.written:
            faults.append(Difference("tensors", each, "is missing"))
        elif not torch.equal(_bytes(pair.written[each]), _bytes(matrix)):
            faults.append(Difference("tensors", each, _OTHER_VALUES))
    if experts and not faults:
        yield Difference("tensors", name, "is missing", "experts are stored one by one, as servers read them")
    yield from faults


def _tensor_problem(pair: _Pair, name: str) -> str | None:
    """Returns how a tensor deviates; None where dtype, shape and bytes are the same."""
    if isinstance(pair.original, QuantizedTensors) and name in pair.original.packed:
        return None  # dequantized, and no bytes of the source
    written, original = pair.written[name], pair.original[name]
    if written.shape != original.shape:
        return f"is {list(written.shape)}, and {list(original.shape)} in the source"
    if written.dtype != original.dtype:
        return f"is {_short(written.dtype)}, and {_short(original.dtype)} in the source"
    return None if torch.equal(_bytes(written), _bytes(original)) else _OTHER_VALUES


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a tensor, uint8 `[n]`: NaN equals itself there, and -0.0 differs from 0.0."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _why_missing(pair: _Pair, name: str) -> str | None:
    """Returns why a tensor that the model uses has not its own name in the checkpoint."""
    tied = getattr(pair.model, "all_tied_weights_keys", {})
    ours = pair.names.of_model(name)
    twins = [*(source for target, source in tied.items() if target == ours), *(t for t, s in tied.items() if s == ours)]
    twin = next((n for n in twins if pair.names.stored(n) in pair.written or pair.is_quantized(f"{n}")), None)
    if twin is not None or any(pair.is_quantized(pair.names.stored(n)) for n in twins):
        return "it is tied to another tensor, which is stored once"
    state = pair.model.state_dict(keep_vars=True)
    if ours in state and pair.names.stored(ours) == name:
        return None  # the model has it under this very name
    return (
        "transformers has it under another name, or as part of another tensor; a server that reads the source's names "
        "does not find it"
    )


def _why_changed(pair: _Pair, name: str, problem: str) -> str | None:
    """Returns the step that may have changed a tensor outside the weights that the plan quantizes."""
    if problem != _OTHER_VALUES:
        cast = main_dtype(pair.original) != stored_dtype(pair.model) and problem.startswith(("is float", "is bfloat"))
        return f"the whole model was cast to {_short(stored_dtype(pair.model))}" if cast else None
    layers = pair.plan.quantized if pair.plan is not None else ()
    ours = pair.names.of_model(name)
    for layer in layers:
        if parse_solver(layer.solver).merges_rotations:
            return f"{layer.solver} merges its rotation into the tensors around the layers"
        if ours == f"{layer.name}.bias" and layer.solver != "rtn":
            return f"{layer.solver} corrects the mean errors of layers in their biases"
        # The input scale of the layer, if it has any, is in the weights of another module of the block.
        folds = parse_solver(layer.solver).transforms and not layer.parts.pre_scale
        if folds and _block(layer.name) == _block(ours) is not None:
            return f"{layer.solver} folds the input scales of layers into the modules before them"
    return None


def _block(name: str) -> str | None:
    match = _BLOCK.match(name)
    return match[1] if match else None


def _config_differences(pair: _Pair) -> Iterator[Difference]:
    if not (pair.directory / "config.json").is_file():
        yield Difference("config", "config.json", "is missing")
        return
    written = read_fields(pair.directory / "config.json")
    for key, value in _leaves(read_fields(pair.home / "config.json")):
        # A checkpoint names its class, also where the source names none.
        if _FORM & set(key) or (key == ("architectures",) and not value):
            continue
        fields: Any = written
        for part in key[:-1]:
            fields = fields.get(part) if isinstance(fields, dict) else None
        fields = fields if isinstance(fields, dict) else {}
        new = fields.get(key[-1], fields.get(_RENAMED.get(key[-1], key[-1]), _MISSING))
        if new is _MISSING:
            yield Difference("config", ".".join(key), "is missing from config.json")
        elif text_as_in_source(new, sort_keys=True) != text_as_in_source(value, sort_keys=True):
            reason = "the head is stored apart, and differs" if key[-1] == "tie_word_embeddings" else None
            problem = f"is {new!r} in config.json, and {value!r} in the source"
            yield Difference("config", ".".join(key), problem, reason)


def _leaves(fields: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every value of nested fields by its path; an empty mapping is a value."""
    for key, value in fields.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _file_differences(pair: _Pair) -> Iterator[Difference]:
    for file in companion_files(pair.home):
        name = file.relative_to(pair.home).as_posix()
        written = pair.directory / name
        reason = "a text about the model" if file.suffix == ".md" else None
        stays = pair.directory / SOURCE_CARD
        if name == CARD and stays.is_file() and filecmp.cmp(file, stays, shallow=False):
            reason = f"the checkpoint has a model card of its own, and the source's as {SOURCE_CARD}"
        if not written.is_file():
            yield Difference("files", name, "is missing", reason)
        elif not filecmp.cmp(file, written, shallow=False):
            yield Difference("files", name, "is not the file of the source", reason)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
