"""Solvers that look only at the weight replace weights group by group, and each original is freed at once.

So the peak beyond the model is one fusion group. Ranks that keep finished layers in one directory solve a share of the
groups each, and read the other layers from there.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from quant.base.errors import UserError
from quant.base.listener import Progress
from quant.calibration.layer_result import LayerResult, layer_result
from quant.calibration.ranks import dealt, from_first, wait_for_all
from quant.calibration.session import Device, Prefetcher, Session, device_of
from quant.calibration.solvers.registry import get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.walk.block_memory import Scratch
from quant.calibration.walk.finished_layers import keep_layers, put_back
from quant.calibration.walk.stacked_experts import stacked
from quant.calibration.walk.undo import restored_on_error
from quant.export.checkpoint.files.layouts import value_problem
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import weight_of_conv
from quant.kernels.linear.install import install_weight, use_expert_modules
from quant.recipes.layers import LayerKind, expert_matrices
from quant.recipes.plan import LayerPlan, Plan, groups_by_input


def apply_plan(
    model: nn.Module,
    plan: Plan,
    input_scales: Mapping[str, torch.Tensor] | None = None,
    *,
    device: Device = None,
    progress: Progress | None = None,
) -> list[LayerResult]:
    """Quantizes the planned weights and puts `QuantLinear` and `QuantExperts` in their place.

    Args:
        model: changed in place; after an exception it is as it was, see `quant.calibration.walk.undo`.
        plan: the plan as `make_plan` gives it, perhaps edited.
        input_scales: the scales as `calibrate` gives them.
        device: the device where weights are rounded, a fusion group at a time; by default where the model is.
        progress: a function that is called as `progress("solve", layers done, layers in all)`.

    Returns:
        One result per layer of the plan, kept layers included, in plan order.
    """
    with restored_on_error(model):
        return solve_weights(model, plan, input_scales or {}, Session.on(device, progress=progress))


def solve_weights(
    model: nn.Module, plan: Plan, input_scales: Mapping[str, torch.Tensor], session: Session
) -> list[LayerResult]:
    """Quantizes as `apply_plan` does, in a session: its ranks share the groups, and its store keeps finished ones."""
    store, results, done = session.store, dict[str, LayerResult](), 0
    # A fusion group is solved at once: its members share one tensor scale.
    own = groups = groups_by_input(plan.quantized)
    if session.store.keeps and session.world > 1:
        # Ranks share the groups that are not in the store, by elements: the time of a solver without data is theirs.
        names = from_first(lambda: {m[0].name for m in groups if store.get(_step(m)) is None})
        unfinished = [members for members in groups if members[0].name in names]
        owners = dealt([sum(member.numel for member in members) for members in unfinished])
        own = [members for members, owner in zip(unfinished, owners, strict=True) if owner == session.rank]

    def weights_of(members: Sequence[LayerPlan]) -> list[torch.Tensor]:
        if _step(members) in store:
            return []
        weights = [(member, _parameter_of(model, member)) for member in members]
        # Stacked experts in their files are gigabytes, so they are read expert by expert and not prefetched whole.
        return [w for member, w in weights if member.kind != LayerKind.EXPERTS or not hasattr(w, "stored")]

    with torch.no_grad():
        for members, weights in Prefetcher(session.device).in_turn(own, weights_of):
            finished = put_back(store, _step(members), model)
            if finished is not None:
                results |= finished[1]
            else:
                results |= _solve_and_install(model, members, weights, input_scales, session)
                # Each rank has groups of its own, so each writes them: no rank waits for the first one's disk.
                keep_layers(store, _step(members), model, members, results, alone=True)
            done += len(members)
            session.report("solve", done, sum(map(len, own)))
    if own is not groups:
        # Every rank's groups must be on disk before another rank reads them.
        store.flush()
        wait_for_all()
        store.refresh()
        for members in groups:
            if members[0].name not in results:
                finished = put_back(store, _step(members), model)
                assert finished is not None, members[0].name
                results |= finished[1]
    use_expert_modules(model, plan)
    for layer in plan.layers:
        if layer.name not in results:
            results[layer.name] = layer_result(layer, _weight_of(model, layer), None)
    return [results[layer.name] for layer in plan.layers]


def _step(members: Sequence[LayerPlan]) -> str:
    return f"group {members[0].name}"


def _solve_and_install(
    model: nn.Module,
    members: Sequence[LayerPlan],
    copies: Sequence[torch.Tensor],
    input_scales: Mapping[str, torch.Tensor],
    session: Session,
) -> dict[str, LayerResult]:
    """Quantizes the members of a fusion group on the session's device, and gives their results by name.

    A store takes solutions from that device; without one they go where the model is.
    """
    tensors: Sequence[torch.Tensor | None] = copies or [None] * len(members)
    weights = {member.name: _weight_of(model, member, tensor) for member, tensor in zip(members, tensors, strict=True)}
    solved = _solved_weights(members, weights, session)
    results = {member.name: layer_result(member, weights[member.name], solved[member.name]) for member in members}
    home = device_of(model)
    for member in members:
        weight = solved[member.name] if session.store.keeps else solved[member.name].to(home)
        install_weight(model, member, weight, input_scales.get(member.name))
    return results


def solve_state_dict(
    tensors: Mapping[str, torch.Tensor], plan: Plan, session: Session | None = None
) -> tuple[dict[str, BlockScaledTensor], list[LayerResult]]:
    """Quantizes a bare state dict weight-only; returns the solved weights by layer name, and the results."""
    session = session or Session()
    solved: dict[str, BlockScaledTensor] = {}
    results: dict[str, LayerResult] = {}
    read_later = {layer.tensor_name for layer in plan.quantized}
    for name in tensors.keys() - read_later:
        # Without a module, masks and weights cannot be distinguished.
        check_values(name, tensors[name], is_buffer=True)
    own = {members[0].name: members for members in groups_by_input(plan.quantized)}
    for done, layer in enumerate(plan.layers, 1):
        weight = _stored_weight(tensors, layer)
        if layer.weight is None:
            results[layer.name] = layer_result(layer, weight, None)
        # The first member of a group solves all of it; later members find their results and only count.
        elif layer.name in own:
            members = own[layer.name]
            moved = {member.name: _stored_weight(tensors, member).to(session.device) for member in members}
            group = _solved_weights(members, moved, session)
            results |= {m.name: layer_result(m, moved[m.name], group[m.name]) for m in members}
            # Where the original tensor is, so that a state dict on the CPU does not collect its codes on the GPU.
            solved |= {name: each.to(weight.device) for name, each in group.items()}
        session.report("solve", done, len(plan.layers))
    return solved, [results[layer.name] for layer in plan.layers]


def _stored_weight(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> torch.Tensor:
    """Returns the weight of a layer in a bare state dict, `[..., out, in]`."""
    weight = tensors[layer.tensor_name]
    return weight.t() if layer.transposed else weight


def _solved_weights(
    members: Sequence[LayerPlan], weights: Mapping[str, torch.Tensor], session: Session
) -> dict[str, BlockScaledTensor]:
    """Returns codes and scales by name. Experts that are read one by one are solved so on the session's device."""
    first = members[0]
    if not isinstance(whole := weights[first.name], torch.Tensor):
        format, solver = first.weight_format, get_solver(first.solver)
        # A generator: one expert is dequantized, solved and stacked before the next is read.
        matrices = (
            solve_group({first.name: whole[index].to(session.device)}, {}, format, solver)[first.name]
            for index in range(len(whole))
        )
        return {first.name: stacked(matrices, len(whole), Scratch.of(session))}
    return solve_group(weights, {}, first.weight_format, get_solver(first.solver))


def _weight_of(model: nn.Module, layer: LayerPlan, copy: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the weight of a layer, or its copy on another device.

    For one that is still in its files, a lazy reader.
    """
    if layer.kind == LayerKind.EXPERTS:
        return expert_matrices(model, layer.name, copy)  # type: ignore[no-any-return]
    if copy is not None:
        return copy
    weight = _parameter_of(model, layer)
    return getattr(weight, "stored", None) or weight.detach()


def _parameter_of(model: nn.Module, layer: LayerPlan) -> torch.Tensor:
    """Returns the parameter of a layer; of a convolution that is quantized, the matrix that formats see."""
    if layer.kind == LayerKind.CONV and layer.weight is not None:
        return weight_of_conv(model.get_submodule(layer.name))
    return model.get_parameter(layer.tensor_name)


def check_values(name: str, tensor: torch.Tensor, *, is_buffer: bool) -> None:
    """Raises UserError where a tensor holds NaN or infinity."""
    if problem := value_problem(tensor, is_buffer=is_buffer):
        raise UserError(f"{name} {list(tensor.shape)} {problem}; repair the model, or download it again")
