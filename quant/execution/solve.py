"""`solve_plan` executes a plan: it calibrates, solves every planned weight and installs the quantized modules.

Solvers that need no data replace weights group by group, and each original is freed at once: the peak beyond the model
is one fusion group. Solvers that need data see each layer's inputs as the quantized layers before it give them, one
decoder block at a time: the peak is that block and its inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from quant.calibration.blocks import block_names, stored_dtype
from quant.calibration.conv1d import as_linears
from quant.calibration.inputs import Inputs, inputs_of, understood
from quant.calibration.kv_cache import collect_attention_scales, kv_scale_tensors
from quant.calibration.placement import Device, device_of, elsewhere, find_device
from quant.calibration.prefetch import brought
from quant.calibration.progress import Progress, reporter
from quant.calibration.ranks import dealt, from_first, meet, rank_and_world, wait_for_all
from quant.calibration.solvers.group import solve_group
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.calibration.solvers.solver import check_solvers, get_pipeline, get_solver
from quant.calibration.texts.mixture import Record
from quant.calibration.walk.experts import stacked
from quant.calibration.walk.group import Settings, Solved
from quant.calibration.walk.memory import block_bytes, usable_bytes
from quant.calibration.walk.scratch import Scratch
from quant.calibration.walk.sequential import solve_sequentially
from quant.errors import UserError, megabytes
from quant.execution.data import (
    NoTextError,
    by_input,
    calibrate,
    lacks_data,
    mixed_text,
    observer_of,
    solver_needs_data,
)
from quant.execution.finished_layers import BlockKeeper, keep_layers, put_back
from quant.execution.install import install_kv_scales, install_weight, mark_quantized, use_expert_modules
from quant.execution.layer_result import LayerResult, layer_result
from quant.execution.store import Partial
from quant.export.checkpoint.check import value_problem
from quant.export.checkpoint.write import plan_of_model
from quant.formats.mapped import in_memory
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import weight_of_conv
from quant.kernels.linear.modules import RunTimeParts
from quant.models.stored_weights import read_stored, stored_in
from quant.plan.check import check_plan_fits
from quant.plan.make import without_data
from quant.recipes.expert_stacks import expert_matrices
from quant.recipes.guard import Guard
from quant.recipes.layer_kind import LayerKind
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Parts, Plan

T = TypeVar("T")
Rounded = Callable[[str, torch.Tensor], None]
"""Takes a layer's name and the weight that was rounded, `[..., out, in]`."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """What `quantize` gives: the model, the plan it follows, and what became of every layer."""

    model: nn.Module
    plan: Plan
    layers: list[LayerResult]
    seconds: dict[str, float]


def check_solvable(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError where a plan cannot be executed on a model, as far as names, shapes and devices tell."""
    check_plan_fits(plan, find_layers(model))
    check_solvers(plan)
    for layer in plan.quantized:
        weight = model.get_parameter(layer.tensor_name)
        if weight.is_meta and not hasattr(weight, "stored"):
            raise UserError(
                f"{layer.name}: its weight is on the meta device, where there are no values; load the model first. "
                "quant.make_plan plans without"
            )


def solve_plan(
    model: nn.Module,
    plan: Plan,
    data: Any = None,
    *,
    tokenizer: Any = None,
    device: Device = None,
    progress: Progress | None = None,
    partial: Partial | None = None,
    memory: int | None = None,
    rounded: Rounded | None = None,
) -> Quantized:
    """Quantizes `model` in place, as `plan` says.

    Args:
        model: any module.
        plan: made for it.
        data, tokenizer, device, progress: as in `quant.quantize`.
        partial: keeps what is finished, and has what an earlier run finished; finished layers become maps of its files.
        memory: bytes that may be used beside the page cache; None for what there is. Hidden states that would take
            much of it go to a file of `partial`.
        rounded: is told what was rounded where a solver changes a weight before: scaled, rotated, less its branch.

    Raises:
        ValueError: the plan does not fit the model, or it needs data and there is none, or a tensor holds NaN or
            infinity; the message names it.
    """
    check_solvable(model, plan)
    there = find_device(device)
    if _looks_at_data(plan):
        meet(there)
    read_stored(model, _needed_throughout(model, plan))
    if rank_and_world()[0] == 0:  # which ends the other ranks where it raises; each would read all of it
        _check_finite(model, plan)
    settings = _settings(plan, there if elsewhere(model, there) else None)
    if partial is not None:
        settings = replace(settings, scratch=Scratch(partial.path, usable_bytes(memory)))
    if data is None and lacks_data(plan):

        def write() -> tuple[torch.Tensor, list[Record]]:
            rows, record = mixed_text(model, plan, tokenizer, device=there, progress=progress)
            return rows, [{"source": "mix", **record}]

        plan, data = with_data(plan, write)
    elif data is not None and not isinstance(data, torch.Tensor | Inputs):
        data = inputs_of(data, model)
    with understood(model), as_linears(model):
        return _solve_and_scale(model, plan, data, settings, progress, partial, memory, rounded)


def _solve_and_scale(
    model: nn.Module,
    plan: Plan,
    data: Any,
    settings: Settings,
    progress: Progress | None,
    partial: Partial | None,
    memory: int | None,
    rounded: Rounded | None,
) -> Quantized:
    if _looks_at_data(plan):
        assert data is not None
        quantized = _solve_block_by_block(model, plan, data, settings, progress, partial, memory, rounded)
    else:
        quantized = _solve_at_once(model, plan, data, settings, progress, partial)
    if partial is not None:
        partial.drop("states")
    if plan.kv_cache is not None:
        install_kv_scales(model, _kv_scales(model, plan, data, settings.device, partial))
    mark_quantized(model)
    return quantized


def _looks_at_data(plan: Plan) -> bool:
    """Whether weights are solved on the inputs that they get, block by block."""
    return plan.guard is not None or any(solver_needs_data(layer) for layer in plan.quantized)


def _kv_scales(
    model: nn.Module, plan: Plan, data: Any, device: torch.device | None, partial: Partial | None
) -> dict[str, torch.Tensor]:
    """Scales of the KV cache of the quantized model, measured once."""
    found = None if partial is None else partial.get("scales of the KV cache")
    if found is not None:
        return {name: scale.clone() for name, scale in found.tensors.items()}
    assert data is not None and plan.kv_cache is not None
    scales = collect_attention_scales(model, data, kv_format=plan.kv_cache, attention_format=None, device=device)
    tensors = kv_scale_tensors(scales, stored_dtype(model))
    if partial is not None:
        partial.put("scales of the KV cache", tensors, None)
    return tensors


def _needed_throughout(model: nn.Module, plan: Plan) -> list[str]:
    """Parameters in their files that are not read for their own layer alone: those that may stay, or be changed."""
    unread = stored_in(model)
    rotates = any(get_pipeline(layer.solver).spec.merges_rotations for layer in plan.quantized)
    if rotates or plan.guard is not None:
        return list(unread)
    quantized = {layer.tensor_name for layer in plan.quantized if layer.kind != LayerKind.CONV}
    return [name for name in unread if name not in quantized]


def _check_finite(model: nn.Module, plan: Plan) -> None:
    """Raises UserError where what is not quantized holds NaN or infinity; weights that are, are checked then."""
    read_later = {layer.tensor_name for layer in plan.quantized}
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            if name not in read_later:
                _check_values(name, in_memory(tensor.detach()), is_buffer=is_buffer)


def _check_values(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> None:
    """Raises UserError where a tensor holds NaN or infinity."""
    if problem := value_problem(tensor, is_buffer=is_buffer):
        raise UserError(f"{name} {list(tensor.shape)} {problem}; repair the model, or download it again")


def with_data(plan: Plan, find: Callable[[], tuple[T, list[Record]]]) -> tuple[Plan, T | None]:
    """The data that `find` gives for a plan, and the plan with their records.

    Where it finds none, and an effort chose the solver that needs some, the plan of effort 1 and no data.

    Raises:
        UserError: there is no data, and the plan needs it; at effort 1 too, if its effort chose a solver: then the
            message names what that needs.
    """
    try:
        data, records = find()
    except UserError as error:
        lower = without_data(plan, str(error))
        if lower is not None and lacks_data(lower) and isinstance(error, NoTextError):
            raise NoTextError(lower, error.why) from error
        if lower is None or lacks_data(lower):
            raise
        return lower, None
    return with_calibration(plan, records), data


def with_calibration(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Plan:
    """`plan` with a record of the calibration text in its provenance, one for each source."""
    return replace(plan, provenance={**plan.provenance, "calibration": list(records)})


def _settings(plan: Plan, device: torch.device | None) -> Settings:
    """How the walk is done, as far as the plan and the caller say."""
    return Settings(
        device=device,
        observer=observer_of(plan),
        guard=Guard.parse(plan.guard) if plan.guard is not None else None,
    )


def apply_plan(
    model: nn.Module,
    plan: Plan,
    input_scales: Mapping[str, torch.Tensor] | None = None,
    *,
    device: Device = None,
    progress: Progress | None = None,
    partial: Partial | None = None,
    scratch: Scratch | None = None,
) -> list[LayerResult]:
    """Quantizes the planned weights and puts `QuantLinear` and `QuantExperts` in their place.

    Args:
        model: changed in place.
        plan: as `make_plan` gives it, perhaps edited.
        input_scales: as `calibrate` gives them.
        device: where weights are rounded, a fusion group at a time; by default where the model is.
        progress: called as `progress("solve", layers done, layers in all)`.
        partial: as in `solve_plan`.
        scratch: takes the codes of many experts; None keeps them in memory.

    Returns:
        One result per layer of the plan, kept layers included, in plan order.
    """
    input_scales = input_scales or {}
    there = find_device(device)
    results: dict[str, LayerResult] = {}
    done = 0
    groups = by_input(plan.quantized)
    own = _own_groups(groups, partial)

    def weights_of(members: Sequence[LayerPlan]) -> list[torch.Tensor]:
        if partial is not None and _step(members) in partial:
            return []
        found = [(member, _parameter_of(model, member)) for member in members]
        return [weight for member, weight in found if member.kind != LayerKind.EXPERTS or not hasattr(weight, "stored")]

    with torch.no_grad():
        for members, weights in brought(own, weights_of, there):
            if partial is not None and (found := put_back(partial, _step(members), model)) is not None:
                results |= found[1]
            else:
                home = None if partial is not None else device_of(model)
                results |= _solve_group(model, members, weights, input_scales, there, home, scratch)
                if partial is not None:
                    keep_layers(partial, _step(members), model, members, results, alone=True)
            done += len(members)
            if progress:
                progress("solve", done, sum(map(len, own)))
    if partial is not None and own is not groups:
        partial.flush()
        wait_for_all()
        partial.refresh()
        for members in groups:
            if members[0].name not in results:
                others = put_back(partial, _step(members), model)
                assert others is not None, members[0].name
                results |= others[1]
    use_expert_modules(model, plan)
    for layer in plan.layers:
        if layer.name not in results:
            results[layer.name] = layer_result(layer, _weight_of(model, layer), None)
    return [results[layer.name] for layer in plan.layers]


def _step(members: Sequence[LayerPlan]) -> str:
    return f"group {members[0].name}"


def _own_groups(groups: list[list[LayerPlan]], partial: Partial | None) -> list[list[LayerPlan]]:
    """The groups that this rank solves: all of them, or its share of those that are not in the partial directory."""
    rank, world = rank_and_world()
    if partial is None or world == 1:
        return groups
    names = from_first(lambda: {m[0].name for m in groups if partial.get(_step(m)) is None})
    left = [members for members in groups if members[0].name in names]
    owners = dealt([sum(member.numel for member in members) for members in left])
    return [members for members, owner in zip(left, owners, strict=True) if owner == rank]


def _solve_group(
    model: nn.Module,
    members: Sequence[LayerPlan],
    brought: Sequence[torch.Tensor],
    input_scales: Mapping[str, torch.Tensor],
    device: torch.device | None,
    home: torch.device | None,
    scratch: Scratch | None,
) -> dict[str, LayerResult]:
    """Quantizes the members of a fusion group on `device`, and gives their results by name.

    Args:
        model: holds the members.
        members: of the group.
        brought: their weights on `device`; of experts that are read one by one, none.
        input_scales: static scales by layer name.
        device: where weights are rounded.
        home: where what is found is kept; None leaves it on `device`.
        scratch: takes the codes of many experts.
    """
    held: Sequence[torch.Tensor | None] = brought or [None] * len(members)
    weights = {member.name: _weight_of(model, member, tensor) for member, tensor in zip(members, held, strict=True)}
    solved = _solve(members, weights, device, scratch)
    results = {member.name: layer_result(member, weights[member.name], solved[member.name]) for member in members}
    for member in members:
        weight = solved[member.name] if home is None else solved[member.name].to(home)
        install_weight(model, member, weight, input_scales.get(member.name))
    return results


def solve_state_dict(
    tensors: Mapping[str, torch.Tensor], plan: Plan, *, device: Device = None, progress: Progress | None = None
) -> tuple[dict[str, BlockScaledTensor], list[LayerResult]]:
    """Weight-only quantization of a bare state dict: the solved weights by layer name, and the results."""
    there = find_device(device)
    solved: dict[str, BlockScaledTensor] = {}
    results: dict[str, LayerResult] = {}
    read_later = {layer.tensor_name for layer in plan.quantized}
    for name in tensors.keys() - read_later:
        # Without a module, masks cannot be told from weights.
        _check_values(name, tensors[name], is_buffer=True)
    own = {members[0].name: members for members in by_input(plan.quantized)}
    for done, layer in enumerate(plan.layers, 1):
        weight = _stored_weight(tensors, layer)
        if layer.weight is None:
            results[layer.name] = layer_result(layer, weight, None)
        elif layer.name in own:
            members = own[layer.name]
            moved = {member.name: _stored_weight(tensors, member).to(there) for member in members}
            found = _solve(members, moved, there)
            results |= {m.name: layer_result(m, moved[m.name], found[m.name]) for m in members}
            solved |= {name: each.to(weight.device) for name, each in found.items()}
        if progress:
            progress("solve", done, len(plan.layers))
    return solved, [results[layer.name] for layer in plan.layers]


def _stored_weight(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> torch.Tensor:
    """The weight of a layer in a bare state dict, `[..., out, in]`."""
    weight = tensors[layer.tensor_name]
    return weight.t() if layer.transposed else weight


def _solve(
    members: Sequence[LayerPlan],
    weights: Mapping[str, torch.Tensor],
    device: torch.device | None,
    scratch: Scratch | None = None,
) -> dict[str, BlockScaledTensor]:
    """Codes and scales by name. Experts that are read one by one are solved so on `device`."""
    first = members[0]
    assert first.weight is not None
    if not isinstance(whole := weights[first.name], torch.Tensor):
        format, solver = first.weight, get_solver(first.solver)
        matrices = (
            solve_group({first.name: whole[index].to(device)}, {}, format, solver)[first.name]
            for index in range(len(whole))
        )
        return {first.name: stacked(matrices, len(whole), scratch)}
    return solve_group(weights, {}, first.weight, get_solver(first.solver))


def _weight_of(model: nn.Module, layer: LayerPlan, held: torch.Tensor | None = None) -> torch.Tensor:
    """The weight of a layer, perhaps `held` elsewhere; for one that is still in its files, what reads it."""
    if layer.kind == LayerKind.EXPERTS:
        return expert_matrices(model, layer.name, held)  # type: ignore[no-any-return]
    if held is not None:
        return held
    weight = _parameter_of(model, layer)
    return getattr(weight, "stored", None) or weight.detach()


def _parameter_of(model: nn.Module, layer: LayerPlan) -> torch.Tensor:
    """The parameter of a layer; of a convolution that is quantized, the matrix that formats see."""
    if layer.kind == LayerKind.CONV and layer.weight is not None:
        return weight_of_conv(model.get_submodule(layer.name))
    return model.get_parameter(layer.tensor_name)


def _solve_at_once(
    model: nn.Module,
    plan: Plan,
    data: torch.Tensor | None,
    settings: Settings,
    progress: Progress | None,
    partial: Partial | None,
) -> Quantized:
    """Solvers that look at nothing but the weight."""
    started = time.perf_counter()
    input_scales = _input_scales(model, plan, data, settings.device, progress, partial)
    calibrated = time.perf_counter()
    layers = apply_plan(
        model, plan, input_scales, device=settings.device, progress=progress, partial=partial, scratch=settings.scratch
    )
    done = time.perf_counter()
    seconds = {"calibrate": calibrated - started, "solve": done - calibrated}
    return Quantized(model, plan_of_model(model, plan), layers, seconds)


def _input_scales(
    model: nn.Module,
    plan: Plan,
    data: torch.Tensor | None,
    device: torch.device | None,
    progress: Progress | None,
    partial: Partial | None,
) -> Mapping[str, torch.Tensor]:
    """Static scales of inputs by layer name, measured once."""
    found = None if partial is None else partial.get("input scales")
    if found is not None:
        return {name: scale.clone() for name, scale in found.tensors.items()}
    scales = calibrate(model, plan, data, device=device, progress=progress)
    if partial is not None and scales:
        partial.put("input scales", scales, None)
    return scales


def _solve_block_by_block(
    model: nn.Module,
    plan: Plan,
    data: torch.Tensor,
    settings: Settings,
    progress: Progress | None,
    partial: Partial | None,
    memory: int | None,
    rounded: Rounded | None,
) -> Quantized:
    """Linear layers and fused experts by the sequential walk; then heads, which it does not take."""
    walked = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    plan = plan.replace_layers(_without_data(layer) for layer in plan.quantized if layer not in walked)
    rest = replace(plan, layers=tuple(layer for layer in plan.layers if layer not in walked))
    measured = replace(plan, layers=tuple(layer for layer in plan.layers if layer.kind != LayerKind.LINEAR))
    started = time.perf_counter()
    # Before the walk, while every layer still gets its original inputs.
    input_scales = _input_scales(model, measured, data, settings.device, progress, partial)
    results: dict[str, LayerResult] = {}
    noted: list[LayerPlan] = []

    home = device_of(model)

    def apply(layer: LayerPlan, solved: Solved | None, weight: torch.Tensor) -> None:
        notes = solved.notes if solved else ()
        layer = replace(layer, reason="; ".join((layer.reason, *notes)))
        noted.append(layer)
        if solved is None:
            results[layer.name] = layer_result(layer, weight, None)
            return
        before = _before_rounding(layer, weight, solved.parts)
        results[layer.name] = _result(layer, weight, before, solved)
        if rounded is not None:
            rounded(layer.name, before.to(home))
        # What a partial directory takes goes there from where it is.
        solved = solved.to(home) if partial is None else solved
        install_weight(model, layer, solved.weight, solved.input_scale, solved.parts)

    if settings.device is None or settings.device.type == "cpu":
        _check_memory(model, walked, data, settings, memory)
    keeper = BlockKeeper(partial, model, results, noted, usable_bytes(memory)) if partial is not None else None
    solve_sequentially(
        model, plan, data, apply=apply, settings=settings, input_scales=input_scales,
        progress=reporter(progress, "solve"), keeper=keeper,
    )  # fmt: skip
    others = apply_plan(model, rest, input_scales, device=settings.device, partial=partial, scratch=settings.scratch)
    results |= {result.name: result for result in others}
    plan = plan.replace_layers(noted)
    use_expert_modules(model, plan)
    layers = [results[layer.name] for layer in plan.layers]
    return Quantized(model, plan_of_model(model, plan), layers, {"solve": time.perf_counter() - started})


def _check_memory(
    model: nn.Module, layers: Sequence[LayerPlan], data: torch.Tensor, settings: Settings, memory: int | None
) -> None:
    """Raises UserError where a block would take more memory than may be used, before anything is solved."""
    given = usable_bytes(memory)
    blocks = block_names(model)
    if given is None or not blocks:
        return
    dtype = settings.dtype_for(stored_dtype(model))
    for name in blocks:
        inside = [layer for layer in layers if layer.name.startswith(f"{name}.")]
        block = model.get_submodule(name)
        needed = block_bytes(block, inside, data.shape[:2].numel(), dtype, settings.scratch) if inside else 0
        if needed > given:
            more = "more with --memory" if memory is None or given == memory else "more to this container"
            raise UserError(
                f"{name}: solving this block takes about {megabytes(needed)} of memory, and {megabytes(given)} may be "
                f"used: give fewer or shorter calibration rows, a solver that looks at no data, such as rtn, or {more}"
            )


def _before_rounding(layer: LayerPlan, weight: torch.Tensor, parts: RunTimeParts) -> torch.Tensor:
    """What was rounded of a weight that may be rotated and have a branch."""
    if layer.kind == LayerKind.EXPERTS or (not parts.hadamard and parts.lowrank is None):
        return weight
    turned = rotate_weight(weight.float(), parts.hadamard)
    return turned if parts.lowrank is None else residual_weight(turned, parts.lowrank)


def _result(layer: LayerPlan, weight: torch.Tensor, before: torch.Tensor, solved: Solved) -> LayerResult:
    """The result of a layer that may be rotated and have a branch: its error is that of both together."""
    if layer.kind == LayerKind.EXPERTS:
        return layer_result(layer, weight, solved.weight)
    result = layer_result(replace(layer, parts=Parts.of(solved.parts)), before, solved.weight)
    if solved.parts.lowrank is None or not result.relative_error:
        return result
    share = float(before.norm() / weight.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not share:
        return result
    error = result.relative_error * share
    return replace(result, relative_error=error, snr_db=-20 * math.log10(error))


def _without_data(layer: LayerPlan) -> LayerPlan:
    if not solver_needs_data(layer):
        return layer
    reason = f"{layer.reason}; solved with mse: {layer.solver} takes what stands in blocks, not a {layer.kind}"
    return replace(layer, solver="mse", reason=reason)
