"""Loads a checkpoint on the meta device before it appears: in transformers (`trial_load`) and here (`check_read_back`).

transformers fills missing tensors with random numbers and drops unexpected ones; its log says so, and the model runs.
The names of a checkpoint's tensors are therefore checked by loading it: missing or unexpected ones are an error while
the checkpoint is still a temporary directory. Where transformers stops with an error of its own, the user gets that
error with a way that works. Only the headers of the files and single numbers are read.

transformers quantizes only linear layers. Convolutions and GPT-2's `Conv1D` are stored as matrices `[out, in]`, and
transformers 5.24 does one of three things with them:

    codes under the name of the weight, in another shape      it stops
    packed codes, which have another name                     the weight is missing, and becomes random numbers
    codes of a square matrix                                  it takes the codes for the weight
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import logging
import math
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quant.base.errors import UserError, counted, listed, option
from quant.base.extras import require
from quant.export.checkpoint.files.names import StoredNames
from quant.export.checkpoint.files.read_tensors import RUN_TIME_PARTS
from quant.export.checkpoint.files.tensor_file import DeferredTensor
from quant.export.checkpoint.open_checkpoint import KV_SCALES, Checkpoint, fill, outline
from quant.models import huggingface
from quant.models.configs import one_line
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

_PEER = "compressed_tensors"
_DROPPED = (*(f".{part}" for part in RUN_TIME_PARTS), ".input_scale", ".input_global_scale")
"""Suffixes of a layer's tensors that transformers ignores; `runtime_warnings` has the warning for users."""


def check_experts(plan: Plan, names: StoredNames) -> None:
    """Refuses a plan whose experts transformers would miss, before anything is quantized.

    Raises:
        UserError: the message names them.
    """
    unread = [layer.name for layer in plan.quantized if layer.name in names.unread]
    if unread:
        version = require("transformers", "hf").__version__
        raise UserError(
            f"{counted(len(unread), 'layer')}, {unread[0]} first: transformers {version} has the experts of this model "
            "as one tensor in 16 bit, no rule of it joins quantized ones, and it would run with random numbers; keep "
            f"them in 16 bit with {option('exclude', repr('*.experts.*'))}, or pass "
            f"{option('allow_missing', True)} to write a checkpoint for only "
            "quant.load and servers"
        )


def import_for_trial() -> None:
    """Imports the package that `trial_load` needs, in a thread.

    With PyTorch 2.11, compressed-tensors imports torch.compile's backend, which takes 4 s. Weights are solved in
    parallel; without the thread, the end of a run would wait for it.
    """

    def run() -> None:
        with contextlib.suppress(Exception):  # the trial imports it again, and reports the error
            require(_PEER, "hf")

    if importlib.util.find_spec(_PEER) is not None:
        Thread(target=run, name="import").start()


def hold_device_guard() -> None:
    """Has this thread, and not that of the trial, own PyTorch's stand-in for CUDA on a machine without a GPU.

    A CUDA build makes the stand-in when a thread first enters `FakeTensorMode`, as torch.compile and torch.export do;
    compressed-tensors 0.17 compiles while it loads. All threads use it from then on, but PyTorch 2.11 frees it when
    that thread ends: later, a backward pass or another compilation would end in a segmentation fault (pytorch#178950).
    """
    if torch.backends.cuda.is_built() and not torch.cuda.is_available():
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode():
            pass


def trial_load(
    directory: Path,
    model: Any,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor | DeferredTensor],
    *,
    allow_missing: bool = False,
) -> list[str]:
    """Loads a checkpoint in transformers; returns warnings for users who will do the same.

    Inside a process group of a training script nothing is tried: compressed-tensors would wait for all of its ranks.

    Args:
        directory: the directory with config.json.
        model: a model of transformers, quantized; its class loads the checkpoint.
        plan: the plan of the checkpoint.
        tensors: the tensors of the checkpoint, perhaps not yet written; only their names, shapes and dtypes matter.
        allow_missing: missing and unexpected tensors are a warning, and no error.

    Raises:
        UserError: tensors would be missing, or some would have no place; the message names them.
    """
    not_linear = {layer.name: layer for layer in plan.quantized if layer.kind == LayerKind.CONV or layer.transposed}
    loadable = hasattr(type(model), "from_pretrained") and importlib.util.find_spec(_PEER) is not None
    if not loadable or (dist.is_available() and dist.is_initialized()):
        return []
    version = require("transformers", "hf").__version__
    # The layout's tensors without their data; an empty tensor stays empty.
    names = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    try:
        info = _load(directory, type(model), names)
    except Exception as error:  # transformers' own code, which may fail in any way
        if not_linear:
            return [_unread_layers(not_linear.values(), version, "does not load this checkpoint")]
        if any(layer.activation and layer.activation.input_rule != "max" for layer in plan.quantized):
            return []  # it stops at `scale_rule`; `runtime_warnings` says so
        if any(not tensor.numel() for tensor in names.values()):
            return []  # it stops at the empty tensors of `StoredNames.stopped`; `runtime_warnings` says so
        return [_failure(error, version, _loads_dequantized(directory, type(model), names))]
    # Tensors of layers that transformers never loads quantized are left out here; their warning comes below.
    problems = _misfits(info, plan, tensors, not_linear)
    notes = [_kv_cache_note(version)] if any(name.endswith(KV_SCALES) for name in info["unexpected_keys"]) else []
    if not problems:
        missing = any(name.rpartition(".")[0] in not_linear for name in info["missing_keys"])
        loads = f"loads this checkpoint with {'random numbers' if missing else 'codes'} in the place of their weights"
        return [*notes, *([_unread_layers(not_linear.values(), version, loads)] if not_linear else [])]
    finding = f"transformers {version} {' and '.join(problems)}, and would run with random numbers"
    if allow_missing:
        return [*notes, f"{finding}: load this checkpoint with quant.load, or a server that knows the layers"]
    raise UserError(
        f"{finding}; keep those layers in 16 bit with {option('exclude')}, or pass "
        f"{option('allow_missing', True)} to write a checkpoint for "
        "only quant.load and servers"
    )


def _misfits(
    info: Mapping[str, Any],
    plan: Plan,
    tensors: Mapping[str, torch.Tensor | DeferredTensor],
    not_linear: Collection[str],
) -> list[str]:
    """Returns the parts of a sentence about missing and unexpected tensors, except those of the layers `not_linear`."""
    unexpected = [
        name
        for name in info["unexpected_keys"]
        if not name.endswith((*_DROPPED, *KV_SCALES)) and not _is_reported_already(name, plan, tensors)
    ]
    problems = []
    for verb, keys in (("finds no tensor for", info["missing_keys"]), ("has no use for", unexpected)):
        if keys := [key for key in keys if key.rpartition(".")[0] not in not_linear]:
            problems.append(f"{verb} {listed(sorted(keys), 3)}")
    return problems


def _is_reported_already(name: str, plan: Plan, tensors: Mapping[str, torch.Tensor | DeferredTensor]) -> bool:
    """Returns whether transformers reports a tensor of fused experts that `runtime_warnings` has already reported.

    transformers 5.17 counts tensors as unexpected that 5.24 skips or stops at: the global scale of experts in NVFP4,
    and the matrices of experts whose stack is an empty tensor in the checkpoint.
    """
    for layer in plan.quantized:
        module, _, last = layer.name.rpartition(".")
        if layer.kind == LayerKind.EXPERTS and name.startswith(f"{module}."):
            stack = tensors.get(f"{module}.{last}")
            if name.endswith(".weight_global_scale") or (stack is not None and not math.prod(stack.shape)):
                return True
    return False


def _failure(error: Exception, version: str, loads_dequantized: bool) -> str:
    """Returns the warning for a checkpoint at which transformers stops, with the way to load it nevertheless."""
    way_out = "load it with quant.load"
    if loads_dequantized:
        way_out = "pass it quantization_config=CompressedTensorsConfig(dequantize=True), or load it with quant.load"
    return f"transformers {version} does not load this checkpoint ({one_line(error)}): {way_out}"


def _kv_cache_note(version: str) -> str:
    """Returns the warning for scales of the KV cache that transformers drops."""
    # compressed-tensors 0.20 finds attention by its argument `past_key_values`, which transformers 5.24 renamed.
    peer = importlib.metadata.version("compressed-tensors")
    return (
        f"transformers {version} keeps the KV cache of this checkpoint in 16 bit, for compressed-tensors {peer} "
        "does not find its attention; quant.load and servers use the scales of the cache"
    )


def _unread_layers(layers: Collection[LayerPlan], version: str, outcome: str) -> str:
    """Returns the warning for layers that transformers cannot load quantized; `outcome` says how loading them ends."""
    first = next(iter(layers))
    noun = "convolution" if first.kind == LayerKind.CONV else "Conv1D"
    need = f"{first.name} needs" if len(layers) == 1 else f"{len(layers)} layers, {first.name} first, need"
    return f"{need} quant.load: transformers {version} takes a {noun} in 16 bit only, and {outcome}"


def check_read_back(directory: Path, model: nn.Module) -> None:
    """Reads a checkpoint's names and single numbers as `quant.load` does.

    Args:
        directory: the directory with config.json, the plan and the weight files.
        model: the model in the checkpoint.

    Raises:
        UserError: it cannot be read.
    """
    cls: Any = type(model)
    # The Python files of a model that has its own would run from the directory only if the user trusted them again.
    has_own_code = not cls.__module__.startswith("transformers.") and getattr(cls, "config_class", None) is not None
    built = outline(directory, cls if has_own_code else None)
    try:
        fill(Checkpoint(directory, built, meta=True), built=True)
    except ValueError as error:
        if shared := _shared_here_only(model, built):
            raise UserError(
                f"{shared[0]} and {shared[1]} are one object in this model, and two where {cls.__name__} builds it "
                "again, so that the checkpoint cannot be read back: give each place a copy of its own (copy.deepcopy) "
                "before you quantize"
            ) from error
        raise UserError(
            f"{cls.__name__}: the checkpoint could not be read back, because transformers names or joins its tensors "
            f"in an unknown way ({one_line(error)}); keep those layers in 16 bit with {option('exclude')}"
        ) from error


def _shared_here_only(model: nn.Module, built: nn.Module) -> tuple[str, str] | None:
    """Returns two names of a module or parameter that `model` has in two places, and `built` does not; None if none."""
    objects, others = (
        {**dict(each.named_modules(remove_duplicate=False)), **dict(each.named_parameters(remove_duplicate=False))}
        for each in (model, built)
    )
    first: dict[int, str] = {}
    for name, each in objects.items():
        other = first.setdefault(id(each), name)
        # Activation functions are often one object, and nothing of them is stored.
        is_stored = isinstance(each, nn.Parameter) or bool([*each.parameters(), *each.buffers()])
        if other != name and is_stored and others.get(name) is not others.get(other):
            return other, name
    return None


def _load(directory: Path, cls: Any, tensors: Mapping[str, torch.Tensor], **options: Any) -> dict[str, Any]:
    with huggingface.quiet(), _silence(), _without_compiling(), _decompressing_once(), _copying_little():
        config = cls.config_class.from_pretrained(directory, local_files_only=True)
        # On the meta device transformers builds the model and matches names and shapes, and copies no data.
        _, info = cls.from_pretrained(
            None,
            config=config,
            state_dict=dict(tensors),
            device_map="meta",
            dtype=config.dtype,
            output_loading_info=True,
            **options,
        )
    return info  # type: ignore[no-any-return]


def _without_compiling() -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which functions that compressed-tensors gives to torch.compile run as they are.

    It packs tensors of the meta device by them, which hold nothing: compiling them took 4 s of the end of a run.
    """
    # Whoever has called torch.compile has imported its front end; to import it for nothing takes a second.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _decompressing_once() -> Iterator[None]:
    """Has compressed-tensors decompress tensors of one form once while open.

    transformers decompresses every expert before it joins them: 18,000 matrices of Qwen3-30B-A3B, at 1.3 s a layer. On
    the meta device the result depends only on shapes, dtypes and the scheme.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
    except ImportError:  # a version that is arranged otherwise
        yield
        return
    compressors = [cls for cls in _subclasses(BaseCompressor) if isinstance(vars(cls).get("decompress"), classmethod)]
    originals = {cls: vars(cls)["decompress"] for cls in compressors}
    results: dict[Any, dict[str, Any]] = {}

    def remembering(original: Any) -> Any:
        def decompress(cls: Any, state_dict: Mapping[str, torch.Tensor], scheme: Any) -> dict[str, Any]:
            # The scheme is an object of the config, which lives as long as the trial.
            key = cls, id(scheme), tuple((name, *_form_of(tensor)) for name, tensor in state_dict.items())
            if key not in results:
                results[key] = original.__func__(cls, state_dict, scheme)
            return dict(results[key])

        return classmethod(decompress)

    for cls, original in originals.items():
        cls.decompress = remembering(original)
    try:
        yield
    finally:
        for cls, original in originals.items():
            cls.decompress = original


@contextlib.contextmanager
def _copying_little() -> Iterator[None]:
    """Has transformers copy of a checkpoint's converters only what collects tensors, while open.

    It copies a converter for each tensor, and with it its patterns, the quantizer and its config: two thirds of the
    trial of a model with many experts.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    if getattr(loading, "deepcopy", None) is not copy.deepcopy:
        yield  # a version that copies otherwise
        return

    def copied(converter: Any) -> Any:
        new = copy.copy(converter)
        slots = {name for cls in type(new).__mro__ for name in getattr(cls, "__slots__", ())}
        for name in slots | getattr(new, "__dict__", {}).keys():
            # Dictionaries collect tensors and names. Patterns and operations are the same for all.
            if isinstance(value := getattr(new, name, None), dict):
                setattr(new, name, copy.deepcopy(value) if value else value.copy())
        return new

    loading.deepcopy = copied  # type: ignore[union-attr]
    try:
        yield
    finally:
        loading.deepcopy = copy.deepcopy  # type: ignore[union-attr]


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    """Yields the classes below a class, at any depth."""
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns shape and dtype of a tensor, and the values of one that has any, such as a stored shape."""
    values = () if tensor.is_meta else tuple(tensor.flatten().tolist())
    return tensor.shape, tensor.dtype, values


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps the progress bars, warnings and log lines of a trial from the user's terminal."""
    logger = logging.getLogger("compressed_tensors")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _loads_dequantized(directory: Path, cls: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether transformers loads the checkpoint when it dequantizes the weights on the way."""
    try:
        config = require("transformers", "hf").CompressedTensorsConfig(dequantize=True)
        info = _load(directory, cls, tensors, quantization_config=config)
    except Exception:  # as above
        return False
    return not info["missing_keys"] and not info["unexpected_keys"]
