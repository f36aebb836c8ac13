"""`verify` finds the files, tensors and tables of a checkpoint that have changed or do not fit together.

    files       SHA-256 of weights, config, tokenizer, …       against report.json or SHA256SUMS, if listed there
    plan        the plan's digest, and the config's formats    against report.json, config.json, hf_quant_config.json
    tensors     presence, dtypes, shapes, scales, NaN          against the plan
    groups      tensor scales of layers that runtimes merge    against each other
    forward     logits of a few tokens are finite              against the fingerprint in report.json, if it holds one
    source      tensors, config and files outside the plan     against the original model, if it is named
    runtime     layers, log-probabilities, greedy tokens       of vLLM or transformers against `load`, if it is named

`load` makes the checks that cost little and stops at the first finding; `verify` reports all findings.

A checkpoint is compared with the model that it was made from: tensors that no plan touches must be in it unchanged.

    tensors   every tensor of the source is quantized, with its signs, or is there with its dtype and bytes
    config    every key of the source's config.json is there with its value
    files     every file besides the weights is there with its bytes: tokenizers, templates, licences, code

Each deviation is a `Difference`. One that a rule explains carries the reason (a tied head is stored once, a solver
folded its input scale into a norm); one without a reason is an error of the program that wrote the checkpoint.
"""

import filecmp
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, option
from quant.base.json_files import JsonData, read_json, text_as_in_source, typed
from quant.evaluation.evaluation import Fingerprint, fingerprint_problem
from quant.export.checkpoint import open_checkpoint
from quant.export.checkpoint.carry_over import CODES, main_dtype, source_tensors, unused_tensors
from quant.export.checkpoint.convert import CARD, SOURCE_CARD
from quant.export.checkpoint.files.layouts import dtype_name, plan_problems
from quant.export.checkpoint.files.names import StoredNames, cut_experts, stored_names
from quant.export.checkpoint.files.tensor_file import CHECKSUMS, read_checksums, sha256_of
from quant.export.checkpoint.files.tensors import TensorFiles, layer_tensor_names, read_layer, read_parts, weight_files
from quant.export.checkpoint.load import check_checkpoint, load, quantization_configs
from quant.export.checkpoint.runtime_check import RuntimeCheck, check_runtime
from quant.generate.quantized_attention import quantized_attention
from quant.models.files import companion_files, find_checkpoint, find_model, has_weights, read_fields
from quant.models.huggingface import remote_code
from quant.models.quantized_tensors import QuantizedTensors
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import LayerKind, expert_matrices, find_layers, layers_of_state_dict
from quant.recipes.plan import PLAN_FILE, LayerPlan, Plan
from quant.recipes.plan_check import check_plan_fits
from quant.recipes.solver_names import parse_solver
from quant.recipes.targets import TARGETS

REPORT_FILE = "report.json"


@dataclass(frozen=True)
class Finding(JsonData):
    """One thing that is wrong: the check that found it, and one line, which names the file or tensor."""

    check: str
    what: str


@dataclass(frozen=True)
class Verification(JsonData):
    """The result of `verify`."""

    findings: tuple[Finding, ...]
    checked: tuple[str, ...]  # the names of the checks that were made
    skipped: dict[str, str]  # why each other check could not be made, by its name
    explained: tuple[str, ...] = ()  # differences from the source that are right, with their reasons
    runtime: RuntimeCheck | None = None  # the checkpoint in a runtime, if one was named and ran it


def verify(
    directory: str | Path, model: nn.Module | None = None, *, source: str | Path | None = None,
    runtime: str | None = None, engine: Mapping[str, Any] | None = None, trust_remote_code: bool = False,
) -> Verification:  # fmt: skip
    """Checks a quantized checkpoint, of either layout.

    Args:
        directory: the checkpoint, or its name on the Hugging Face hub.
        model: the unquantized module, for a checkpoint without config.json; it is changed in place. Without either,
            no forward pass is made.
        source: the directory of the original model, or its name on the Hugging Face hub: whatever of it the plan does
            not touch must be in the checkpoint as it is.
        runtime: "vllm" or "transformers", as installed here: it loads the checkpoint in a process of its own, and each
            layer, the log-probabilities and greedy tokens are compared with `load`.
        engine: further arguments of `vllm.LLM`, such as `{"kv_cache_dtype": "nvfp4"}`.
        trust_remote_code: lets transformers run the Python files that config.json names in `auto_map`.

    Raises:
        UserError: not a quantized checkpoint, or `source` is not a directory of a model.
    """
    with remote_code(trust_remote_code):
        path = find_checkpoint(directory)
        result = _verify(path, model, source)
        if runtime is None:
            return result
        check = check_runtime(path, runtime, engine=dict(engine or {}), trust_remote_code=trust_remote_code)
    problems = tuple(Finding(runtime, problem) for problem in check.problems)
    return replace(result, findings=result.findings + problems, checked=(*result.checked, check.runtime), runtime=check)


def _verify(directory: Path, model: nn.Module | None, source: str | Path | None) -> Verification:
    check_checkpoint(directory)
    # The checks share the subject, so that the model is built and each tensor read once.
    subject = _Subject(directory, model)
    findings: list[Finding] = []
    checked, skipped = [], {}
    for name, check in CHECKS.items():
        try:
            findings += [Finding(name, what) for what in check(subject, bool(findings))]
            checked.append(name)
        # A damaged file stops one check only; the others still report their findings.
        except _NotCheckedError as error:
            skipped[name] = str(error)
        except (ValueError, OSError) as error:
            findings.append(Finding(name, " ".join(str(error).split())))
    explained: list[str] = []
    if source is not None:
        differences = compare_with_source(directory, source)
        findings += [Finding("source", str(each)) for each in differences if each.reason is None]
        explained = [str(each) for each in differences if each.reason is not None]
        checked.append("source")
    # A damaged tensor may show in several checks under the same words, and is reported once.
    return Verification(tuple(dict.fromkeys(findings)), tuple(checked), skipped, tuple(explained))


class _NotCheckedError(Exception):
    """A check cannot be made; the message says why."""


@dataclass(eq=False)
class _Subject:
    """A checkpoint under test, and the scales that `_tensors` reads for `_groups`."""

    directory: Path
    module: nn.Module | None
    scales: dict[str, dict[str, Tensor | None]] = field(default_factory=dict)

    @cached_property
    def report(self) -> Mapping[str, Any]:
        file = self.directory / REPORT_FILE
        if not file.is_file():
            raise _NotCheckedError(f"there is no {REPORT_FILE}")
        return read_json(file, "a valid report", _report)

    @cached_property
    def hashes(self) -> tuple[str, Mapping[str, str]]:
        """The name of the file that has the SHA-256 of each weight file, and these by the names of the files."""
        # A checkpoint with checksums was written after any report beside them.
        if (self.directory / CHECKSUMS).is_file():
            return CHECKSUMS, read_checksums(self.directory / CHECKSUMS)
        return REPORT_FILE, self.report["files"]

    @cached_property
    def opened(self) -> open_checkpoint.Checkpoint:
        if self.is_bare:
            return open_checkpoint.Checkpoint(self.directory, _skeleton(self.directory))
        return open_checkpoint.Checkpoint(self.directory, self.module or open_checkpoint.outline(self.directory))

    @property
    def is_bare(self) -> bool:
        """Whether neither a module nor a config says how the model multiplies."""
        return self.module is None and not (self.directory / "config.json").is_file()

    @cached_property
    def plan(self) -> Plan:
        """The plan as its file has it, though it may not agree with the config."""
        file = self.directory / PLAN_FILE
        if not file.is_file():
            return self.opened.plan
        plan = Plan.load(file)
        check_plan_fits(plan, find_layers(self.opened.model))
        return plan


def _skeleton(directory: Path) -> nn.Module:
    """Returns modules with the names and shapes of a bare state dict, whose own module is not known."""
    plan, tensors = Plan.load(directory / PLAN_FILE), TensorFiles(directory, meta=True)
    root, owned = nn.Module(), set[str]()

    def module_at(path: str) -> nn.Module:
        module = root
        for part in path.split(".") if path else ():
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        return module

    for layer in plan.quantized:
        owned.update((layer.name, *layer_tensor_names(tensors, layer)))
        parent, _, last = layer.name.rpartition(".")
        if layer.kind == LayerKind.EXPERTS:
            module_at(parent)._parameters[last] = nn.Parameter(torch.empty(layer.shape, device="meta"))
        else:
            linear = nn.Linear(layer.shape[1], layer.shape[0], bias=False, device="meta")
            if layer.transposed:
                linear.stands_for = "Conv1D"  # type: ignore[assignment]
            module_at(parent)._modules[last] = linear
    for name in tensors.keys() - owned:
        parent, _, last = name.rpartition(".")
        tensor = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="cpu")
        module_at(parent)._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    return root


def _report(document: Any) -> Mapping[str, Any]:
    # A report that a user has edited must give a finding and not a TypeError; other fields are compared by `.get`.
    fields = typed(dict[str, Any], document, "report")
    return {**fields, "files": typed(dict[str, str], fields.get("files"), "files")}


def _files(subject: _Subject, failed: bool) -> Iterator[str]:
    record, hashes = subject.hashes
    for name, expected in hashes.items():
        file = subject.directory / name
        # A report that was edited may list a path outside the directory.
        if Path(name).name != name or not file.is_file():
            yield f"{file}: is missing, and {record} lists it"
        elif sha256_of(file) != expected:
            own = "" if has_weights(name) else "; restore it, or put its new SHA-256 there if the change is yours"
            yield f"{file}: is not what was written: its SHA-256 is not that in {record}{own}"
    for file in weight_files(subject.directory):
        if file.name not in hashes:
            yield f"{file}: is not in {record}"


def _plan(subject: _Subject, failed: bool) -> Iterator[str]:
    plan, file = subject.plan, subject.directory / PLAN_FILE
    if not file.is_file():
        raise _NotCheckedError(f"there is no {PLAN_FILE}; the plan is what the config says")
    # Without a readable report the plan is still compared with the config; `_files` reports a damaged one.
    try:
        digest = subject.report.get("plan_digest")
    except (_NotCheckedError, ValueError):
        digest = None
    if digest and digest != plan.digest():
        yield f"{file}: is not the plan that was executed: its digest is not that in {REPORT_FILE}"
    if subject.is_bare:
        # As when it was quantized; names show of some modules that they multiply by a weight themselves.
        shapes = {name: tuple(tensor.shape) for name, tensor in subject.opened.tensors.items()}
        shapes |= {f"{layer.name}.weight": layer.shape for layer in plan.quantized}
        for layer in layers_of_state_dict(shapes):
            if layer.obstacle and (planned := plan.by_name.get(layer.name)) and planned.weight:
                yield f"{file}: {layer.name}: {layer.obstacle}; quantize the original again, which leaves it in 16 bit"
    for source, config in quantization_configs(subject.directory).items():
        for problem in plan_problems(plan, config, subject.opened.names, subject.opened.tensors):
            yield f"{file}: {problem} ({source})"


def _tensors(subject: _Subject, failed: bool) -> Iterator[str]:
    opened, owned = subject.opened, set()
    for layer in subject.plan.quantized:
        owned.update(layer_tensor_names(opened.tensors, layer))
        try:
            weight, input_scale = read_layer(opened.tensors, layer)
            read_parts(opened.tensors, layer)
        except ValueError as error:
            yield str(error)
        else:
            # The one scale of the whole matrix: runtimes that merge q, k and v keep a single one.
            shared = weight.scale if weight.format.per_tensor else weight.global_scale
            subject.scales[layer.name] = {"weight": shared, "input": input_scale}
    yield from open_checkpoint.kv_scale_problems(opened.tensors)
    unquantized = {name: opened.tensors[name] for name in opened.tensors if name not in owned}
    yield from open_checkpoint.dtype_problems(opened.model, unquantized, opened.tensors)
    yield from open_checkpoint.flag_problems(opened, subject.plan)
    yield from open_checkpoint.suspect_problems(opened.model, opened.tensors)


def _groups(subject: _Subject, failed: bool) -> Iterator[str]:
    """Yields a finding where our plan fused FP8 siblings whose scales differ, which vLLM would requantize."""
    _ = subject.opened  # without it `_tensors` read no scales
    groups = {name: members for name, members in subject.plan.groups().items() if members[0].kind != LayerKind.EXPERTS}
    for members in groups.values() or _siblings(subject.plan.quantized):
        for part in ("weight", "input"):
            read = {m.name: subject.scales.get(m.name, {}).get(part) for m in members}
            scales = {name: scale for name, scale in read.items() if scale is not None}
            first = next(iter(scales), None)
            for name, scale in scales.items():
                # Some scales are float64, where float32 does not hold them.
                if first is not None and not torch.equal(scale.double(), scales[first].double()):
                    yield (
                        f"{name}: the tensor scale of its {part} is {float(scale):g}, and that of {first} is "
                        f"{float(scales[first]):g}; runtimes merge them and take one"
                    )


def _siblings(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Returns layers with a global scale that vLLM merges, for a checkpoint of another tool."""
    siblings: dict[tuple[str, tuple[str, ...]], list[LayerPlan]] = {}
    for layer in layers:
        parent, _, last = layer.name.rpartition(".")
        # ("q_proj", "k_proj", "v_proj") and the like
        for names in TARGETS["vllm"].fused:
            if last in names and layer.weight is not None and layer.weight.global_scale:
                siblings.setdefault((parent, names), []).append(layer)
    return list(siblings.values())


def _forward(subject: _Subject, failed: bool) -> Iterator[str]:
    if failed:
        raise _NotCheckedError("the findings above come first")
    # Loaded as a user would load it: the checks before read tensors, and filled no model.
    model = load(subject.directory, subject.opened.model if subject.is_bare else subject.module)
    if subject.is_bare:
        raise _NotCheckedError(
            "there is no config.json that says how to build the model: name its module with --model-factory, or pass "
            "it: quant.verify(directory, model); its tensors load"
        )
    held = subject.report.get("fingerprint") if (subject.directory / REPORT_FILE).is_file() else None
    expected = None if held is None else Fingerprint.from_dict(held)
    with quantized_attention(model, **subject.plan.run_time):
        try:
            problem = fingerprint_problem(model, expected)
        except TypeError as error:
            # What follows is for commands with options of attention and its cache.
            raise _NotCheckedError(f"{type(model).__name__} {str(error).partition('; take ')[0]}") from None
    if problem:
        yield f"{subject.directory}: {problem}"


CHECKS: dict[str, Callable[[_Subject, bool], Iterator[str]]] = {
    "files": _files,
    "plan": _plan,
    "tensors": _tensors,
    "fusion groups": _groups,
    "forward pass": _forward,
}
"""Each gives its findings; the flag says whether a check before it had any."""


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
        kind = "a directory without config.json" if home.is_dir() else f"a single {home.suffix[1:].upper()} file"
        raise UserError(
            f"{option('source', home)} is {kind}: a checkpoint is compared with a directory of config.json and "
            f"weights, whose names, keys and files it keeps; leave out {option('source')}, which checks the checkpoint "
            "alone"
        )
    pair = _Pair(Path(directory), home, model)
    return [*_tensor_differences(pair), *_code_differences(pair), *_config_differences(pair), *_file_differences(pair)]


@dataclass(eq=False)
class _Pair:
    """A checkpoint and its source; each part is read once."""

    directory: Path
    home: Path
    module: nn.Module | None

    @cached_property
    def model(self) -> nn.Module:
        return self.module or open_checkpoint.outline(self.directory)

    @cached_property
    def names(self) -> StoredNames:
        return stored_names(self.model)

    @cached_property
    def written(self) -> TensorFiles:
        return TensorFiles(self.directory)

    @cached_property
    def original(self) -> Mapping[str, Tensor]:
        return source_tensors(self.home, stored_dtype(self.model))

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that the checkpoint was made by, where it is there."""
        return Plan.load(self.directory / PLAN_FILE) if (self.directory / PLAN_FILE).is_file() else None

    @cached_property
    def quantized(self) -> set[str]:
        """Modules below which the checkpoint has codes; of experts that are stored one by one, their common module."""
        modules = {name.rpartition(".")[0] for name in self.written if name.endswith(CODES)}
        return modules | {match[1] for name in modules if (match := _EXPERT.fullmatch(name))}

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
    unused = set(unused_tensors(pair.model, pair.original, pair.written, pair.names, pair.original))
    for name in missing:
        yield Difference("tensors", name, "is missing", None if name in unused else _why_missing(pair, name))


def _code_differences(pair: _Pair) -> Iterator[Difference]:
    """Yields the layers whose codes are of another weight, by the signs in their first rows: no scale changes these."""
    tensors = open_checkpoint.Checkpoint(pair.directory, pair.model).tensors
    for layer in () if pair.plan is None else pair.plan.quantized:
        name, solver = pair.names.stored(f"{layer.name}.weight"), parse_solver(layer.solver)
        if name not in pair.original or solver.rotation or solver.merges_rotations or solver.rank:
            continue
        # GPT-2's matrices are [in, out].
        weights = [w[:128].float() for w in (pair.original[name], pair.original[name].mT) if w.shape == layer.matrix]
        if weights:
            rows, columns = weights[0].shape
            signs = read_layer(tensors, layer)[0].rows(0, rows).dequantize()[:, :columns].sign()
            # Codes of zero, of values that the format lost, say nothing.
            if all((w * signs).sum() < 0.5 * (w * signs).abs().sum() for w in weights):
                yield Difference("tensors", name, "has the codes of another weight: few signs are those of the source")


def _cut_experts(pair: _Pair, name: str) -> dict[str, Tensor]:
    """Returns the matrices of a stack of experts in 16 bit by their names in the checkpoint; none of other tensors."""
    ours, original = pair.names.of_model(name), pair.original[name]
    if original.dim() != 3 or ours.rpartition(".")[2] not in pair.names.cut:
        return {}
    matrices = cut_experts(ours, expert_matrices(pair.model, ours, original))
    return {pair.names.stored(each): matrix for each, matrix in matrices.items()}


def _expert_differences(pair: _Pair, name: str, experts: Mapping[str, Tensor]) -> Iterator[Difference]:
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
        return f"is {dtype_name(written.dtype)}, and {dtype_name(original.dtype)} in the source"
    return None if torch.equal(_bytes(written), _bytes(original)) else _OTHER_VALUES


def _bytes(tensor: Tensor) -> Tensor:
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
        return f"the whole model was cast to {dtype_name(stored_dtype(pair.model))}" if cast else None
    # A layer that a guard left in 16 bit was solved before, and what its solver folded into others stays there.
    layers = () if pair.plan is None else pair.plan.quantized if pair.plan.guard is None else pair.plan.layers
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
        # A checkpoint names its class and its dtype, also where the source has null.
        if _FORM & set(key) or (key[-1] in ("architectures", "dtype", "torch_dtype") and not value):
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
