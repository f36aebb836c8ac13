"""What other runtimes do with a checkpoint: a table of known failures, the warnings about a plan, and one trial load.

The layout of compressed-tensors has no tensors for input scales and low-rank branches. vLLM, which the layout is for,
stops at some formats, and TensorRT-LLM takes INT8 for FP8. transformers has limits of its own: it fills missing tensors
with random numbers and drops unexpected ones; its log says so, and the model runs. So a checkpoint is loaded on the
meta device while it is still a temporary directory, in transformers (`trial_load`) and here (`check_read_back`), from
the headers of its files and single numbers. transformers quantizes only linear layers. Convolutions and GPT-2's
`Conv1D` are stored as matrices `[out, in]`, and transformers 5.24 does one of three things with them:

    codes under the name of the weight, in another shape      it stops
    packed codes, which have another name                     the weight is missing, and becomes random numbers
    codes of a square matrix                                  it takes the codes for the weight
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import math
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quant.base.errors import UserError, counted, listed, option, require, unlogged
from quant.base.json_files import text_as_in_source
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, MODELOPT
from quant.export.checkpoint.files.names import StoredNames
from quant.export.checkpoint.files.tensor_file import DeferredTensor
from quant.export.checkpoint.files.tensors import RUN_TIME_PARTS
from quant.export.checkpoint.open_checkpoint import KV_SCALES, Checkpoint, fill, outline
from quant.formats.format import FP8_HEAD, INT4
from quant.models import huggingface
from quant.models.files import one_line
from quant.recipes.blocks import replaced, stored_dtype
from quant.recipes.gpus import read_table
from quant.recipes.layers import COMPUTED, PERMANENT, LayerKind, is_computed_from
from quant.recipes.plan import ODD_INPUTS, LayerPlan, Plan
from quant.recipes.plan_check import first_problem
from quant.recipes.targets import TARGETS

_PEER = "compressed_tensors"
_UNPACKS = "transformers unpacks"
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a decoder block, the first in a name; blocks of the other towers of a model count with it."""
_DROPPED = (*(f".{part}" for part in RUN_TIME_PARTS), ".input_scale", ".input_global_scale")
"""Suffixes of a layer's tensors that transformers ignores; `runtime_warnings` has the warning for users."""


@dataclass(frozen=True)
class Failure:
    """One fault of a runtime, measured on a GPU or read in its source; a release beyond `until` was not looked at."""

    runtime: str
    since: str  # first and last release that have it
    until: str
    subject: str  # formats and kinds of layer, or a feature of the checkpoint
    effect: str  # the consequence for a user
    gpus: str = "all"  # those on which it appears
    source: str = ""  # how it is known

    def row(self) -> str:
        """Returns the row of docs/vllm.md."""
        return f"| {self.subject} | {self.releases} | {self.gpus} | {self.effect} | {self.source} |"

    @property
    def releases(self) -> str:
        """In words: "vLLM 0.26" or "vLLM 0.26 to 0.33"."""
        return f"{self.runtime} {self.since}" + (f" to {self.until}" if self.until != self.since else "")


FAILURES = {name: Failure(**fields) for name, fields in read_table("failures").items()}


def runtime_warnings(
    plan: Plan,
    dtype: torch.dtype = torch.bfloat16,
    names: StoredNames | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    layout: str = COMPRESSED_TENSORS,
) -> list[str]:
    """Returns one sentence for each feature of a checkpoint that a runtime of its `layout` does not support."""
    names = names or StoredNames()
    if layout == MODELOPT:
        return list(_modelopt_warnings(plan, names))
    of_transformers = [*unpacking_warnings(plan, dtype), *_transformers_warnings(plan, names, tensors or {}, dtype)]
    return [*_run_time_warnings(plan), *_format_warnings(plan), *of_transformers, *_vllm_warnings(plan)]


def _run_time_warnings(plan: Plan) -> Iterator[str]:
    layers_with = {
        "an input scale (pre_scale)": [layer.name for layer in plan.quantized if layer.parts.pre_scale],
        "a 16-bit low-rank branch": [layer.name for layer in plan.quantized if layer.parts.rank],
        "residual channels": [layer.name for layer in plan.quantized if layer.parts.residual],
    }
    for part, layers in layers_with.items():
        if layers:
            yield (
                f"{_counted(layers)} {part} at run time: load the checkpoint with quant.load; other runtimes have no "
                "place for it, and would give wrong output"
            )
    if rotated := [layer.name for layer in plan.quantized if layer.parts.hadamard]:
        yield (
            f"{_counted(rotated)} a Hadamard rotation of the input at run time: load the checkpoint with quant.load; "
            f"transformers ignores transform_config, and {FAILURES['rotation'].releases} decodes wrongly with it (the "
            "first token is right, then one token repeats). The solver rotation:merge leaves nothing to do at run "
            "time: it rotates where the modules around absorb the rotation"
        )
    if ruled := [layer for layer in plan.quantized if layer.activation and layer.activation.input_rule != "max"]:
        yield (
            f"inputs of {len(ruled)} layers are in {ruled[0].activation}, whose scales only Blockscale's kernels "
            "choose: load the checkpoint with quant.load; others stop at scale_rule in its config"
        )


def _format_warnings(plan: Plan) -> Iterator[str]:
    """Yields a sentence on pairs of formats that vLLM stops at or TensorRT-LLM misreads."""
    vllm, trtllm = TARGETS["vllm"], TARGETS["tensorrt-llm-compressed-tensors"]
    by_formats: dict[str, list[LayerPlan]] = {}
    for layer in plan.quantized:
        # No runtime has quantized convolutions; `trial_load` says so.
        if layer.kind != LayerKind.CONV:
            by_formats.setdefault(layer.formats, []).append(layer)
    for formats, layers in by_formats.items():
        subject = _counted([layer.name for layer in layers])
        if refusal := vllm.why_not(layers[0]):
            # Targets are read in the oldest release; the table of failures knows how long one lasts.
            failure = FAILURES.get(str(layers[0].weight))
            releases = failure.releases if failure is not None else "vLLM 0.26"
            yield f"{subject} quant.load or transformers: {releases} does not load {formats}: {refusal}"
        if formats in trtllm.misread:
            yield (
                f"{subject} another runtime than TensorRT-LLM, which would give wrong output for {formats}: "
                f"{trtllm.misread[formats]}"
            )


def unpacking_warnings(plan: Plan, dtype: torch.dtype) -> Iterator[str]:
    """Yields a sentence on formats that transformers unpacks to BF16, whatever the model's dtype."""
    unpacked = [layer.weight for layer in plan.quantized if layer.weight is not None and not layer.weight.scale.is_wide]
    if unpacked and dtype != torch.bfloat16:
        yield (
            f"{_UNPACKS} {unpacked[0]} to bfloat16 and then fails on a model in "
            f"{str(dtype).removeprefix('torch.')}: load it there with dtype=torch.bfloat16"
        )


def _transformers_warnings(
    plan: Plan, names: StoredNames, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[str]:
    """Yields a sentence on each feature for which transformers stops, or gives other logits than `quant.load`."""
    if embeddings := [layer.name for layer in plan.quantized if layer.kind == LayerKind.EMBEDDING]:
        yield f"{_counted(embeddings)} quant.load: other runtimes take embeddings in 16 bit only"
    if stopped := [layer.name for layer in plan.quantized if layer.name in names.stopped]:
        yield (
            f"{_counted(stopped)} quant.load or a server that reads experts one by one: transformers up to 5.24 takes "
            "the experts of this model only in 16 bit, and stops"
        )
    experts = [layer for layer in plan.quantized if layer.kind == LayerKind.EXPERTS]
    fused = [] if names.apart else [layer for layer in experts if layer.name not in names.stopped]
    if misread := [layer.name for layer in fused if f"{layer.weight}" in ("nvfp4", "mxfp8", "int8")]:
        yield (
            f"{_counted(misread)} quant.load or a server such as vLLM: transformers up to 5.24 loads fused experts in "
            "NVFP4 without their global scale, and would give wrong output; in MXFP8 and INT8 it stops"
        )
    if rounded := [layer.name for layer in fused if layer.activation is not None]:
        yield (
            f"{_counted(rounded)} quant.load or a server such as vLLM for their inputs to be rounded: "
            "transformers up to 5.24 multiplies experts in 16 bit, and gives slightly other logits"
        )
    # Inputs that are not `[batch, tokens, in]`.
    if layers := plan.provenance.get(ODD_INPUTS):
        yield (
            f"{_counted(layers)} quant.load or a server such as vLLM for a scale for each token: transformers with "
            "compressed-tensors up to 0.20 shares scales otherwise where an input is no [batch, tokens, in], and gives "
            "slightly other logits"
        )
    yield from _kept_expert_warnings(plan, names)
    # Scales of another toolkit.
    wide = [name for name, t in tensors.items() if name.endswith(".weight_scale") and t.dtype is torch.float32]
    if wide and dtype in (torch.bfloat16, torch.float16):
        count = f"{len(wide):,} weight scale{'' if len(wide) == 1 else 's'}"
        yield (
            f"{count}, {wide[0]} first, in float32, for {str(dtype).removeprefix('torch.')} would round them: "
            "transformers does that unless it loads the checkpoint with dtype=torch.float32; vLLM does not"
        )


def _vllm_warnings(plan: Plan) -> Iterator[str]:
    experts = [layer for layer in plan.quantized if layer.kind == LayerKind.EXPERTS]
    # vLLM's `_process_weights_marlin` orders the scales of gate and up by `intermediate_size_per_partition`, which is
    # the width of the other projection (vllm 0.26.0, fused_moe/oracle/int_wna16.py): wrong where a down projection has
    # one INT4 group a row.
    narrow = [
        layer.name
        for layer in experts
        if layer.weight_format.element is INT4
        and layer.name.endswith(("down_proj", "w2"))
        and layer.shape[-1] <= layer.weight_format.block[1]
    ]
    if narrow:
        yield (
            f"{_counted(narrow)} another runtime than {FAILURES['narrow int4 experts'].releases}: where experts are no "
            "wider than a group of INT4, it puts the scales of their gate and up projections in a wrong order, and "
            "gives wrong output; keep the experts in another format"
        )
    if weight_only := [layer.name for layer in experts if layer.activation is None and layer.weight_format.is_fp8]:
        yield (
            f"{_counted(weight_only)} quant.load, or vLLM with Blockscale's plug-in on Hopper: "
            f"{FAILURES['fp8 weights of experts'].releases} stops at experts in FP8 whose inputs stay in 16 bit"
        )
    if plan.kv_cache is FP8_HEAD:
        yield (
            "the KV cache has a scale for each KV head: vLLM reads these with FlashAttention 3 (on Hopper) and in our "
            f"NVFP4 cache, and stops elsewhere; {option('kv_cache', 'fp8')} writes one a tensor"
        )


def _kept_expert_warnings(plan: Plan, names: StoredNames) -> Iterator[str]:
    # transformers takes experts in 16 bit next to packed layers for quantized ones.
    cut = () if names.apart else names.cut
    in_16_bit = [
        layer.name
        for layer in plan.layers
        if layer.kind == LayerKind.EXPERTS and layer.weight is None and layer.name.rpartition(".")[2] in cut
    ]
    formats = [layer.weight_format for layer in plan.quantized]
    packed = [format for format in formats if format.element.bits < 8 or format.element.is_integer]
    if in_16_bit and packed:
        yield (
            f"{_counted(in_16_bit)} quant.load or a server such as vLLM: transformers up to 5.24 takes experts in 16 "
            f"bit for quantized ones where other layers are in {packed[0]}, and stops"
        )


def _modelopt_warnings(plan: Plan, names: StoredNames) -> Iterator[str]:
    vllm, mixed = TARGETS["vllm-modelopt"], len({layer.formats for layer in plan.quantized}) > 1
    # It compares excluded names as substrings: a head called `output` excludes each `….output.dense`.
    excluded = [] if mixed else [name.rstrip("*") for name in modelopt.excluded_modules(plan, names)]
    layers_by_problem: dict[str, list[str]] = {}
    for layer in plan.quantized:
        for problem in vllm.problems(layer, mixed=mixed) if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS) else ():
            layers_by_problem.setdefault(problem, []).append(layer.name)
    for layer in plan.quantized:
        for name in (name for name in excluded if name in layer.name):
            problem = f"vLLM takes {name!r}, which is excluded, for a part of this name"
            layers_by_problem.setdefault(problem, []).append(layer.name)
    for problem, layers in layers_by_problem.items():
        yield (
            f"{layers[0]}{f' and {len(layers) - 1} more' if layers[1:] else ''}: {problem}; deploy the "
            "compressed-tensors checkpoint in vLLM"
        )


def _counted(names: Sequence[str]) -> str:
    return f"{names[0]} needs" if len(names) == 1 else f"{len(names)} layers, {names[0]} first, need"


def check_experts(plan: Plan, names: StoredNames) -> None:
    """Raises UserError for a plan whose experts transformers would miss, before anything is quantized."""
    unread = [layer.name for layer in plan.quantized if layer.name in names.unread]
    if unread:
        version = require("transformers", "hf").__version__
        raise UserError(
            f"{counted(len(unread), 'layer')}, {unread[0]} first: transformers {version} has the experts of this model "
            "as one tensor in 16 bit, no rule of it joins quantized ones, and it would run with random numbers; keep "
            f"them in 16 bit with {option('exclude', repr('*.experts.*'))}, or pass {option('allow_missing', True)} to "
            "write a checkpoint for only quant.load and servers"
        )


@dataclass(frozen=True)
class Trial:
    """What `from_pretrained` without options, and `generate` after it, do with a checkpoint in transformers."""

    warnings: tuple[str, ...] = ()  # for users who will do the same
    problem: str | None = None  # why that is not the model of `quant.load`; None if it is
    dequantize: bool = False  # it is, once config.json has weights unpacked as they are read

    def heeded(self, directory: Path, messages: Sequence[str]) -> list[str]:
        """Returns `messages` with the trial's, and sets in config.json what has transformers unpack the weights.

        `dequantize` is an argument of transformers' `CompressedTensorsConfig`, and other readers do not ask for it.
        """
        if self.dequantize:
            file = directory / "config.json"
            fields = json.loads(file.read_text(encoding="utf-8"))
            fields["quantization_config"]["dequantize"] = True
            file.write_text(text_as_in_source(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            messages = [message for message in messages if not message.startswith(_UNPACKS)]
        return [*messages, *self.warnings]


def trial_load(
    directory: Path, model: Any, plan: Plan, tensors: Mapping[str, Tensor | DeferredTensor],
    names: StoredNames | None = None, *, allow_missing: bool = False,
) -> Trial | None:  # fmt: skip
    """Loads a checkpoint on trial in transformers, or returns None where that cannot be tried.

    Of `tensors`, perhaps not yet written, only names, shapes and dtypes matter. Missing ones, and those without a
    place, are a UserError, or with `allow_missing` a warning. Inside a process group of a training script nothing is
    tried: compressed-tensors would wait for all of its ranks.
    """
    not_linear = {layer.name: layer for layer in plan.quantized if layer.kind == LayerKind.CONV or layer.transposed}
    loadable = hasattr(type(model), "from_pretrained") and importlib.util.find_spec(_PEER) is not None
    if not loadable or (dist.is_available() and dist.is_initialized()):
        return None
    library = require("transformers", "hf")
    runtime = f"transformers {library.__version__}"
    # The layout's tensors without their data; an empty tensor stays empty.
    outlines = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    dtype = stored_dtype(model)
    known = [*_run_time_warnings(plan), *_transformers_warnings(plan, names or StoredNames(), outlines, dtype)]
    notes = []
    if huggingface.is_patched(model):
        notes.append(f"{runtime} fails in the forward pass of {type(model).__name__}, which quant.load mends")
    problem, stop = next(iter([*known, *notes]), None), None
    try:
        info = _load(directory, type(model), outlines)
    except Exception as error:  # transformers' own code, which may fail in any way
        if not_linear:
            problem = _unread_layers(not_linear.values(), runtime, "does not load this checkpoint")
            return Trial((problem,), problem)
        # It stops at `scale_rule`, and at the empty tensors of `StoredNames.stopped`: `runtime_warnings` says so.
        has_rule = any(layer.activation and layer.activation.input_rule != "max" for layer in plan.quantized)
        if has_rule or any(not tensor.numel() for tensor in outlines.values()):
            return Trial((), problem)
        stop = f"{runtime} does not load this checkpoint ({one_line(error)})"
    else:
        # Tensors of layers that transformers never loads quantized are left out here; their warning comes below.
        if misfits := _misfits(info, plan, tensors, not_linear):
            finding = f"{runtime} {' and '.join(misfits)}, and would run with random numbers"
            if not allow_missing:
                raise UserError(
                    f"{finding}; keep those layers in 16 bit with {option('exclude')}, or pass "
                    f"{option('allow_missing', True)} to write a checkpoint for only quant.load and servers"
                )
            finding = f"{finding}: load this checkpoint with quant.load, or a server that knows the layers"
            return Trial((finding,), finding)
        if any(name.endswith(KV_SCALES) for name in info["unexpected_keys"]):
            # compressed-tensors 0.20 finds attention by `past_key_values`, which transformers 5.24 renamed.
            notes.append(
                f"{runtime} keeps the KV cache of this checkpoint in 16 bit, for compressed-tensors "
                f"{importlib.metadata.version('compressed-tensors')} does not find its attention; quant.load and "
                "servers use the scales of the cache"
            )
        if not_linear:
            missing = any(name.rpartition(".")[0] in not_linear for name in info["missing_keys"])
            loads = (
                f"loads this checkpoint with {'random numbers' if missing else 'codes'} in the place of their weights"
            )
            problem = _unread_layers(not_linear.values(), runtime, loads)
            return Trial((*notes, problem), problem)
        if (call := _call_before_the_model(model, plan)) is not None:
            stop = f"{runtime} does not load this checkpoint unpacked: it unpacks when the model is called, and {call}"
    cast = next(unpacking_warnings(plan, dtype), None)
    dequantizes = (stop or cast) is not None and _dequantizes(directory, type(model), plan, outlines)
    if dequantizes and problem is None and not any(layer.activation for layer in plan.quantized):
        return Trial(tuple(notes), None, dequantize=True)
    if stop is not None:
        way_out = ", or pass it quantization_config=CompressedTensorsConfig(dequantize=True), with inputs in 16 bit"
        stop += f": load it with quant.load{way_out if dequantizes else ''}"
        notes.append(stop)
    return Trial(tuple(notes), problem or stop or cast)


def _dequantizes(directory: Path, cls: Any, plan: Plan, tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether transformers can unpack a checkpoint while it reads it, which needs one format for all."""
    if len({layer.weight for layer in plan.quantized}) > 1 or any(e.kind == LayerKind.EXPERTS for e in plan.quantized):
        return False
    with contextlib.suppress(Exception):  # as in `trial_load`
        config = require("transformers", "hf").CompressedTensorsConfig(dequantize=True)
        info = _load(directory, cls, tensors, quantization_config=config)
        unexpected = [name for name in info["unexpected_keys"] if not name.endswith(KV_SCALES)]
        return not info["missing_keys"] and not unexpected
    return False


def _call_before_the_model(model: Any, plan: Plan) -> str | None:
    """Returns the end of a sentence on a call that runs packed layers before the model as a whole is called, or None.

    compressed-tensors up to 0.20 unpacks in a hook of the root module.
    """
    generation = require("transformers", "hf").GenerationMixin
    generates = isinstance(model, generation) and model.can_generate()
    if generates and model.config.is_encoder_decoder and _holds(plan, model, model.get_encoder()):
        return "generate() calls the encoder before"
    if generates and type(model).generate is not generation.generate:
        return "generate() of this class calls its parts"
    features = next((name for name in dir(type(model)) if re.fullmatch(r"get_\w+_features", name)), None)
    if features is not None:
        decoder = model.get_decoder() if generates else None
        if len(plan.quantized) > _holds(plan, model, decoder) + sum(e.kind == LayerKind.HEAD for e in plan.quantized):
            return f"{features}(){', which generate() calls,' if generates else ''} runs a part before"
    return None


def _holds(plan: Plan, model: nn.Module, part: nn.Module | None) -> int:
    """Returns how many quantized layers lie in a part of the model, of which None holds none."""
    paths = [name for name, module in model.named_modules() if module is part]
    return sum(layer.name.startswith(f"{paths[0]}.") for layer in plan.quantized) if paths and paths[0] else 0


_SERVED = read_table("vllm_models")["without_backend"]


def vllm_problem(plan: Plan, model: Any, layout: str) -> str | None:
    """Returns a sentence on why vLLM does not serve a generative model's checkpoint; None if nothing is known."""
    name = type(model).__name__
    if not type(model).__module__.startswith("transformers."):
        return f"Whether vLLM has {name}, whose code comes with the model, was not looked at"
    has_backend = getattr(type(model), "_supports_attention_backend", False) and not model.config.is_encoder_decoder
    if not has_backend and name.partition("For")[0] not in _SERVED:
        return (
            f"vLLM does not serve it: 0.29 and 0.33 have no {name}, and their backend for transformers does not take it"
        )
    if transposed := next((layer.name for layer in plan.quantized if layer.transposed), None):
        return f"vLLM does not serve it: {transposed} is a Conv1D, whose weight vLLM transposes as it reads it"
    if problem := first_problem(plan, "vllm-modelopt" if layout == MODELOPT else "vllm"):
        return f"vLLM does not serve it: {problem}"
    known = _modelopt_warnings(plan, StoredNames()) if layout == MODELOPT else _vllm_warnings(plan)
    return next((f"vLLM does not serve it everywhere: {warning}" for warning in known), None)


def _misfits(
    info: Mapping[str, Any], plan: Plan, tensors: Mapping[str, Tensor | DeferredTensor], not_linear: Collection[str]
) -> list[str]:
    """Returns the parts of a sentence about missing and unexpected tensors, except those of the layers `not_linear`."""

    def is_warned_of(name: str) -> bool:
        """Says whether `runtime_warnings` has a sentence on an unexpected tensor.

        transformers 5.17 counts tensors as unexpected that 5.24 skips or stops at: the global scale of experts in
        NVFP4, and the matrices of experts whose stack is an empty tensor in the checkpoint.
        """
        for layer in plan.quantized:
            if layer.kind == LayerKind.EXPERTS and name.startswith(f"{layer.name.rpartition('.')[0]}."):
                stack = tensors.get(layer.name)
                if name.endswith(".weight_global_scale") or (stack is not None and not math.prod(stack.shape)):
                    return True
        return name.endswith((*_DROPPED, *KV_SCALES))

    unexpected = [name for name in info["unexpected_keys"] if not is_warned_of(name)]
    problems = []
    for verb, keys in (("finds no tensor for", info["missing_keys"]), ("has no use for", unexpected)):
        if keys := [key for key in keys if key.rpartition(".")[0] not in not_linear]:
            problems.append(f"{verb} {listed(sorted(keys), 3)}")
    return problems


def _unread_layers(layers: Collection[LayerPlan], runtime: str, outcome: str) -> str:
    """Returns the warning for layers that transformers cannot load quantized; `outcome` says how loading them ends."""
    first = next(iter(layers))
    noun = "convolution" if first.kind == LayerKind.CONV else "Conv1D"
    subject = _counted([layer.name for layer in layers])
    return f"{subject} quant.load: {runtime} takes a {noun} in 16 bit only, and {outcome}"


def check_read_back(directory: Path, model: nn.Module) -> list[str]:
    """Reads a checkpoint's names and single numbers as `quant.load` does, and returns warnings; UserError if it fails.

    `model.bfloat16()` casts buffers that no checkpoint stores (RoPE's frequencies); a loaded model has them in float32.
    """
    cls: Any = type(model)
    # The Python files of a model that has its own would run from the directory only if the user trusted them again.
    has_own_code = not cls.__module__.startswith("transformers.") and getattr(cls, "config_class", None) is not None
    built = outline(directory, cls if has_own_code else None)
    try:
        fill(Checkpoint(directory, built, meta=True), built=True)
    except ValueError as error:
        if reason := _not_as_built(model, built):
            raise UserError(f"{reason}, so that the checkpoint cannot be read back") from error
        raise UserError(
            f"{cls.__name__}: the checkpoint could not be read back, because transformers names or joins its tensors "
            f"in an unknown way ({one_line(error)}); keep those layers in 16 bit with {option('exclude')}"
        ) from error
    own, stored = dict(model.named_buffers()), built.state_dict().keys()
    for name, buffer in built.named_buffers():
        if name in own and name not in stored and (now := own[name].dtype).itemsize < buffer.dtype.itemsize:
            return [
                f"{name} is {now} in this model and {buffer.dtype} in the loaded one, whose outputs will differ: .to() "
                f'or .bfloat16(), or "bf16-true" of Lightning, has cast it; build the model with from_pretrained(…, '
                f"dtype={now}) or from_config(…, dtype={now}), and cast nothing"
            ]
    return []


def _not_as_built(model: nn.Module, built: nn.Module) -> str | None:
    """Returns what `model` has in two places, or in another size, and the model that its config builds has not."""
    objects, others = (
        {**dict(each.named_modules(remove_duplicate=False)), **dict(each.named_parameters(remove_duplicate=False))}
        for each in (model, built)
    )
    if name := next((n for n, _ in model.named_parameters() if is_computed_from(n) and n not in others), None):
        return (
            f"{name}: {COMPUTED}, and does not where {type(model).__name__} builds it again (make the weight permanent "
            f"before you quantize, {PERMANENT})"
        )
    first: dict[int, str] = {}
    for name, each in objects.items():
        other = first.setdefault(id(each), name)
        # Activation functions are often one object, and nothing of them is stored.
        is_stored = isinstance(each, nn.Parameter) or bool([*each.parameters(), *each.buffers()])
        if other != name and is_stored and others.get(name) is not others.get(other):
            return (
                f"{other} and {name} are one object in this model, and two where {type(model).__name__} builds it "
                "again (give each place a copy of its own before you quantize, copy.deepcopy)"
            )
        own, as_built = (getattr(x, "shape", ()) for x in (each, others.get(name)))
        if own and as_built and own != as_built:
            return (
                f"{name} is {list(own)} in this model, and {list(as_built)} where its config builds it again (change "
                "sizes before you quantize, with the config, as model.resize_token_embeddings does)"
            )
    return None


def _load(directory: Path, cls: Any, tensors: Mapping[str, Tensor], **options: Any) -> dict[str, Any]:
    """Loads tensors of the meta device; of decoder blocks that are alike the first stands for all.

    transformers decompresses every expert before it joins them: 18,000 matrices of Qwen3-30B-A3B, at 1.3 s a block.
    """
    forms: dict[str, set[Any]] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.search(name):
            part = name[: match.start()], name[match.end() :], tuple(tensor.shape), tensor.dtype
            forms.setdefault(match[0], set()).add(part)
    alike: dict[frozenset[Any], list[str]] = {}
    for block, form in forms.items():
        alike.setdefault(frozenset(form), []).append(block)
    twins = {first: others for first, *others in alike.values()}

    def is_tried(name: str) -> bool:
        match = _BLOCK.search(name)
        return match is None or match[0] in twins or match[0] not in forms

    def of_all_blocks(names: Collection[str]) -> set[str]:
        tried = {name for name in names if is_tried(name)}
        matches = ((name, match) for name in tried if (match := _BLOCK.search(name)))
        others = {_BLOCK.sub(other, name, count=1) for name, match in matches for other in twins.get(match[0], ())}
        return tried | others

    whole = require("transformers", "hf").PreTrainedModel
    initialize = whole.initialize_weights

    def initialized(model: Any) -> None:
        # Of twins nothing is loaded. transformers draws random numbers for them, which codes in INT8 do not take.
        with contextlib.suppress(RuntimeError):
            initialize(model)

    # Progress bars, warnings and log lines of the trial are kept from the user's terminal.
    silent, quiet = contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore")
    trying = replaced([(whole, "initialize_weights", initialized)])
    with huggingface.quiet(), unlogged("compressed_tensors"), silent, quiet, trying:
        config = cls.config_class.from_pretrained(directory, local_files_only=True)
        # On the meta device transformers builds the model and matches names and shapes, and copies no data.
        _, info = cls.from_pretrained(
            None, config=config, state_dict={name: tensor for name, tensor in tensors.items() if is_tried(name)},
            device_map="meta", dtype=config.dtype, output_loading_info=True, **options,
        )  # fmt: skip
    return {**info, **{kind: of_all_blocks(info[kind]) for kind in ("missing_keys", "unexpected_keys")}}
