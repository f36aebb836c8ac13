"""`from_modelopt` takes over a live model that ModelOpt has quantized (`mtq.quantize`).

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop)
    plan = quant.from_modelopt(model)          QuantLinear, with the codes that ModelOpt's export would write
    quant.save(model, plan, "out")             and every other exporter

Codes and scales equal the output of `export_hf_checkpoint`, byte for byte. As in that export, layers that a runtime
fuses share the largest magnitude of their weights in NVFP4, and of their inputs. ModelOpt's own simulation differs
from its export in two points: it divides by other intermediate results, which moves the few weights that lie between
two codes, and it simulates each of the fused layers with its own largest magnitude.

The run-time parts of AWQ, SmoothQuant and SVDQuant are kept: a scale of the inputs, a branch in 16 bit. ModelOpt's
export averages the scales of fused layers, moves them into norms and quantizes again; here each layer keeps its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted, listed
from quant.calibration.placement import device_of
from quant.calibration.walk.fused_experts import stacked
from quant.export.checkpoint.files.tensor_checks import value_problem
from quant.formats.format import Format, get_format
from quant.integrations.modelopt_quantizers import (
    check_compressed,
    compressed_weight,
    format_of,
    input_scale_of,
    is_compressed,
    is_enabled,
    is_quantizer,
    tensor_amax,
    weight_of,
)
from quant.integrations.takeover import LayerFormats, Solved, install_takeover, plan_takeover, stand_in, ungrouped
from quant.kernels.linear.conv import weight_of_conv
from quant.kernels.linear.install import install_kv_scales
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.layers import expert_matrices
from quant.recipes.layers import LayerKind
from quant.recipes.module_replacement import is_conv1d
from quant.recipes.plan import LayerPlan, Plan

_TOOLKIT = "ModelOpt"
# Of the KV cache's scale, for each of its formats: ModelOpt's export divides by FP8's largest value for both.
_KV_MAX = 448.0
_REMOVED = (
    "_dm_attribute_manager", "_modelopt_state", "_forward_pre_dm", "_enable_weight_quantization", "_parallel_state",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Quantizers:
    """The quantizers of one weight: one, or one for each expert; `input` rounds the layer's input.

    `packed` is the parameter, where it holds codes already.
    """

    weight: tuple[Any, ...]
    input: Any
    packed: Any = None

    def tensor_amax(self) -> torch.Tensor | None:
        """Returns the largest magnitude of the weight; None where its quantizers hold none of the whole tensor."""
        amaxes = [tensor_amax(quantizer) for quantizer in self.weight]
        return amaxes[0] if len(amaxes) == 1 else None

    def pre_scale(self) -> torch.Tensor | None:
        """Returns the factor of the inputs, `[in]`."""
        scale = getattr(self.input, "pre_quant_scale", None)
        return None if scale is None else scale.detach().reshape(-1)

    def lowrank(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns SVDQuant's branch: `[rank, in]` and `[out, rank]`."""
        down, up = (getattr(self.weight[0], f"svdquant_lora_{side}", None) for side in "ab")
        return None if down is None or up is None else (down.detach(), up.detach())


def from_modelopt(model: nn.Module, *, run: Callable[[nn.Module], Any] | None = None) -> Plan:
    """Turns a model that ModelOpt simulates into a quantized one; changes it in place.

    Args:
        model: the model as `mtq.quantize` left it, calibrated, or `mtq.compress`. Its 16-bit weights go, layer by
            layer.
        run: calls the model on any valid input, which is how fused layers are found; needed where the model does not
            run on token ids.

    Returns:
        The plan, for `quant.save`, every exporter and `quant.modelopt_config`.

    Raises:
        UserError: nothing is quantized; a layer is in a format that there is none of here, or lacks its calibration;
            quantizers of outputs, attention or else. The model is then as it was.
    """
    quantizers_of, caches = _read(model)
    formats = {name: _formats(name, quantizers) for name, quantizers in quantizers_of.items()}
    kv_cache, kv_scales = _kv_cache(caches)
    for name, quantizers in quantizers_of.items():
        if quantizers.packed is not None:
            check_compressed(quantizers.weight[0], formats[name].weight, name)
    with _original(model) as stack:
        for name, quantizers in quantizers_of.items():
            if quantizers.packed is not None:
                # mtq.compress leaves packed codes in the parameter; planning needs shape and dtype of the matrix.
                of = quantizers.packed.metadata
                stand_in(model, f"{name}.weight", of["shape"], of["dtype"], stack)
        plan = plan_takeover(model, formats, toolkit=_TOOLKIT, solver="modelopt", run=run)
        # A fusion group of the plan states that its members share their scales. Where ModelOpt's do not, the group
        # goes.
        plan = ungrouped(plan, lambda members: _differ([quantizers_of[member.name] for member in members], members[0]))
        amaxes = {layer.name: _amaxes(plan, layer, quantizers_of) for layer in plan.quantized}
        for layer in plan.quantized:
            _check_parts(layer, quantizers_of[layer.name])
            weight = model.get_parameter(layer.tensor_name).detach()
            if quantizers_of[layer.name].packed is None and (problem := value_problem(weight)):
                raise UserError(f"{layer.name} {list(layer.shape)} {problem}; repair the model, or calibrate it again")
        stack.pop_all()  # every check has passed: nothing of ModelOpt's comes back
    _remove_quantizers(model)
    plan = replace(plan, kv_cache=kv_cache)
    home = device_of(model)
    install_kv_scales(model, {name: scale.to(home) for name, scale in kv_scales.items()})

    def solved(layer: LayerPlan) -> Solved:
        return _solved(model, layer, quantizers_of[layer.name], *amaxes[layer.name])

    return install_takeover(model, plan, solved)


def _read(model: nn.Module) -> tuple[dict[str, _Quantizers], dict[str, dict[str, Any]]]:
    """Returns the enabled quantizers: of weights by layer, of keys and values by attention module."""
    layers: dict[str, _Quantizers] = {}
    caches: dict[str, dict[str, Any]] = {}
    unsupported: list[str] = []
    dropped: list[str] = []
    seen = False
    for name, module in model.named_modules():
        # named_modules visits quantizers too. Only the modules that own them are of interest.
        if _members(module):
            continue
        quantizers = {child: _members(part) for child, part in module.named_children() if _members(part)}
        seen |= bool(quantizers)
        enabled = {child: members for child, members in quantizers.items() if any(map(is_enabled, members))}
        # A child `gate_up_proj_weight_quantizer` is for the parameter `gate_up_proj` of stacked experts; a plain
        # `weight_quantizer` is for the module's own weight.
        for child, members in enabled.items():
            layer, role = _role(child)
            path, before = f"{name}.{layer}".strip("."), f"{layer}_".lstrip("_")
            weights = {f"{before}weight_quantizer", f"{before}weight_quantizers"} & enabled.keys()
            if role == "weight":
                packed = _compressed_weight(path, module._parameters.get(layer or "weight"), members, of_experts=layer)
                layers[path] = _Quantizers(members, quantizers.get(f"{before}input_quantizer", (None,))[0], packed)
            elif child in ("k_bmm_quantizer", "v_bmm_quantizer"):
                caches.setdefault(name, {})[child[0]] = members[0]
            elif role == "other":
                unsupported.append(f"{name}.{child}".strip("."))
            # An input quantizer whose weight quantizer is off, or missing: ModelOpt simulates it and exports nothing of
            # it.
            elif not weights:
                dropped.append(f"{name}.{child}".strip("."))
    if unsupported:
        raise UserError(
            f"{listed(unsupported, 3)}: enabled in ModelOpt, and here weights, their inputs and the KV cache are "
            f"quantized; turn them off: mtq.disable_quantizer(model, {unsupported[0]!r})"
        )
    if not layers:
        reason = "all its weight quantizers are disabled" if seen else "it has no quantizers"
        raise UserError(f"the model is not quantized by ModelOpt: {reason}; call mtq.quantize(model, config) first")
    if dropped:
        warnings.warn(
            f"ModelOpt also simulates rounded inputs of {counted(len(dropped), 'module')} without a quantized weight "
            f"({listed(dropped, 2)}), which its export leaves out, and so is done here",
            stacklevel=3,
        )
    return layers, caches


def _compressed_weight(path: str, parameter: Any, quantizers: tuple[nn.Module, ...], *, of_experts: str) -> Any:
    """Returns a weight that ModelOpt has compressed, None for one in 16 bit; `of_experts` names a stack of experts.

    Raises:
        UserError: only some experts are quantized, or they are compressed.
    """
    if not all(map(is_enabled, quantizers)):
        raise UserError(f"{path}: ModelOpt quantizes some of its experts; here all are, or none")
    if not is_compressed(parameter):
        return None
    if of_experts:
        raise UserError(f"{path}: experts that ModelOpt has compressed; take the model over before mtq.compress")
    return parameter


def _members(part: nn.Module) -> tuple[nn.Module, ...]:
    """Returns the quantizers that a child of a module is, or holds one for each expert.

    Empty where it is something else.
    """
    if is_quantizer(part):
        return (part,)
    inside = tuple(part.children()) if isinstance(part, nn.ModuleList) else ()
    return inside if inside and all(is_quantizer(each) for each in inside) else ()


def _role(child: str) -> tuple[str, str]:
    """Returns a quantizer's parameter, empty for the module's weight, and its role: weight, input or other."""
    for role in ("weight", "input"):
        for end in (f"{role}_quantizer", f"{role}_quantizers"):
            if child == end or child.endswith(f"_{end}"):
                return child.removesuffix(end).rstrip("_"), role
    return "", "other"


def _formats(name: str, quantizers: _Quantizers) -> LayerFormats:
    formats = {format_of(quantizer, name) for quantizer in quantizers.weight}
    if len(formats) > 1:
        raise UserError(f"{name}: ModelOpt has its experts in {listed(sorted(map(str, formats)))}; here all have one")
    format = formats.pop()
    uncalibrated = any(tensor_amax(quantizer) is None for quantizer in quantizers.weight)
    if format.global_scale and quantizers.packed is None and uncalibrated:
        raise UserError(
            f"{name}: the ModelOpt quantizer of its weight has no amax of the whole weight; calibrate it: "
            "mtq.calibrate(model, 'max')"
        )
    activation = None
    if quantizers.input is not None and is_enabled(quantizers.input):
        activation = format_of(quantizers.input, name, inputs=True)
    return LayerFormats(format, activation, f"as {_TOOLKIT} quantized it")


def _kv_cache(caches: Mapping[str, Mapping[str, Any]]) -> tuple[Format | None, dict[str, torch.Tensor]]:
    """Returns the format of the KV cache, and its scales by name."""
    scales, formats = {}, set()
    for name, pair in caches.items():
        # `pair` has the quantizers of k and v.
        if len(pair) == 1:
            raise UserError(f"{name}: ModelOpt quantizes its keys or its values; here both are, or none")
        for operand, quantizer in pair.items():
            formats.add(format_of(quantizer, f"{name}, {operand} of the KV cache", inputs=True).name)
            if (amax := tensor_amax(quantizer)) is not None:
                scales[f"{name}.{operand}_scale"] = (amax / _KV_MAX).view(1)
    if not formats:
        return None, {}
    if len(formats) > 1 or not formats <= {"fp8", "nvfp4"}:
        raise UserError(f"the KV cache is in {listed(sorted(formats))} in ModelOpt; here all of it is in fp8 or nvfp4")
    return get_format(formats.pop()), scales


@contextmanager
def _original(model: nn.Module) -> Iterator[ExitStack]:
    """Gives the model its original classes and parameters; on leaving, the stack's callbacks restore ModelOpt's.

    ModelOpt changes the class of a module, and of GPT-2's `Conv1D` the weight too, which it transposes.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if not hasattr(type(module), "get_original_cls_by_level"):
                continue
            # ModelOpt gives a module a class that it derives from the original class. Its conversions may be stacked,
            # and level 0 is the class before the first of them.
            theirs: Any = type(module)
            stack.callback(setattr, module, "__class__", theirs)
            module.__class__ = module.get_original_cls_by_level(0)  # type: ignore[operator]
            _unbind(module, theirs, stack)
            if is_conv1d(module):
                weight: Any = module.weight
                stack.callback(setattr, module, "weight", weight)
                module.weight = nn.Parameter(weight.detach().t(), requires_grad=weight.requires_grad)
        yield stack


def _unbind(module: Any, theirs: type[nn.Module], stack: ExitStack) -> None:
    """Gives a module the forward of its class where ModelOpt has bound one of its own to it, as its AWQ does.

    accelerate keeps that which it wraps as `_old_forward`.
    """
    own = vars(module)
    # The derived class inherits from the original one: a bound forward of either counts, and is bound anew from the
    # original.
    functions = [vars(kind).get("forward") for kind in theirs.__mro__]

    def is_theirs(forward: Any) -> bool:
        return getattr(forward, "__func__", None) in functions

    # What was bound before ModelOpt came, if that was another's.
    before = own.get("_forward_pre_dm")
    before = None if before is None or is_theirs(before) else before
    for name in ("forward", "_old_forward"):
        if name not in own or not is_theirs(own[name]):
            continue
        stack.callback(setattr, module, name, own[name])
        if name == "forward" and before is None:
            delattr(module, name)
        else:
            setattr(module, name, before or MethodType(type(module).forward, module))


def _remove_quantizers(model: nn.Module) -> None:
    for module in list(model.modules()):
        for child, part in list(module.named_children()):
            if _members(part):
                delattr(module, child)
        for name in _REMOVED:
            vars(module).pop(name, None)


def _differ(members: list[_Quantizers], layer: LayerPlan) -> bool:
    """Returns whether fused layers keep scales of their own, as they do in ModelOpt's export.

    The export gives fused layers one global scale in NVFP4, and leaves each its own in FP8. Layers with a factor
    of their inputs share no input here, and packed codes keep the scales that they were rounded under.
    """
    if any(member.pre_scale() is not None for member in members):
        return True
    if layer.weight is not None and layer.weight.is_static and any(member.packed is not None for member in members):
        return True
    if layer.weight is None or not layer.weight.per_tensor:
        return False
    scales = {_number(member.tensor_amax()) for member in members}
    inputs = {_number(tensor_amax(member.input)) for member in members if layer.has_static_scale}
    return len(scales) > 1 or len(inputs) > 1


def _number(amax: torch.Tensor | None) -> float | None:
    return None if amax is None else float(amax)


def _amaxes(
    plan: Plan, layer: LayerPlan, quantizers_of: Mapping[str, _Quantizers]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns the largest magnitudes of the weight and of the input of a layer, or of the layers fused with it."""
    # Runtimes merge q, k and v, or gate and up, under one global scale, so the largest member decides for all.
    members = [layer.name]
    if layer.group is not None and layer.kind == LayerKind.LINEAR:
        members = [member.name for member in plan.groups()[layer.group]]
    weight_amax = _largest([quantizers_of[name].tensor_amax() for name in members])
    if not layer.has_static_scale:
        return weight_amax, None
    return weight_amax, _largest([tensor_amax(quantizers_of[name].input) for name in members])


def _largest(amaxes: list[torch.Tensor | None]) -> torch.Tensor | None:
    measured = [amax for amax in amaxes if amax is not None]
    return torch.stack(measured).amax() if measured else None


def _check_parts(layer: LayerPlan, quantizers: _Quantizers) -> None:
    name, format = layer.name, layer.weight_format
    # Scales of rows or blocks would have to be `[experts, …]`, and one quantizer holds a set for the first two axes
    # alone.
    if layer.kind == LayerKind.EXPERTS and len(quantizers.weight) == 1:
        searched = getattr(quantizers.weight[0], "_global_amax", None) is not None
        if searched or (format.scale.is_wide and not format.per_tensor):
            raise UserError(
                f"{name}: ModelOpt has one quantizer for all of its experts, with scales of rows or blocks; quantize "
                "it in FP8 with one scale, in NVFP4 with the algorithm 'max', or in MX"
            )
    if layer.kind != LayerKind.LINEAR and (quantizers.pre_scale() is not None or quantizers.lowrank() is not None):
        raise UserError(
            f"{name}: ModelOpt scales the inputs of this layer of kind '{layer.kind}', or has a branch next to it "
            "(AWQ, SmoothQuant, SVDQuant), which only linear layers have here; quantize it with the algorithm 'max'"
        )


def _solved(
    model: nn.Module,
    layer: LayerPlan,
    quantizers: _Quantizers,
    amax: torch.Tensor | None,
    input_amax: torch.Tensor | None,
) -> Solved:
    if layer.kind == LayerKind.EXPERTS:
        matrices = expert_matrices(model, layer.name)
        # One quantizer for a whole stack `[experts, out, in]` holds one amax, under which each matrix is rounded.
        each = quantizers.weight if len(quantizers.weight) > 1 else quantizers.weight * len(matrices)
        solved = (
            weight_of(quantizer, matrix, layer.weight_format, tensor_amax(quantizer))
            for quantizer, matrix in zip(each, matrices, strict=True)
        )
        weight = stacked(solved, len(matrices))
    elif quantizers.packed is not None:
        weight = compressed_weight(quantizers.weight[0], quantizers.packed, layer.weight_format)
    else:
        weight = weight_of(quantizers.weight[0], _matrix(model, layer), layer.weight_format, amax)
    input_scale = None
    if layer.has_static_scale:
        assert layer.activation is not None and input_amax is not None
        input_scale = input_scale_of(input_amax, layer.activation).to(weight.codes.device)
    return weight, input_scale, RunTimeParts(quantizers.pre_scale(), lowrank=quantizers.lowrank())


def _matrix(model: nn.Module, layer: LayerPlan) -> torch.Tensor:
    module = model.get_submodule(layer.name)
    if layer.kind == LayerKind.CONV:
        return weight_of_conv(module)
    weight = model.get_parameter(layer.tensor_name).detach()
    return weight.t() if layer.transposed else weight
