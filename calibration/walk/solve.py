"""`solve_plan` executes a plan: it calibrates, solves every planned weight and installs the quantized modules.

Plans whose solvers look only at weights are executed by `solve_weights`, all others by `solve_blocks`: there each layer
is solved on the inputs that the quantized layers before it give, block by block (`walk`), and each solution is
measured, installed and, where the run has a store, kept. The peak of memory is one decoder block and its inputs.

Solvers that look only at the weight replace weights group by group, and each original is freed at once, so the peak
beyond the model is one fusion group. Ranks that keep finished layers in one directory solve a share of the
groups each, and read the other layers from there.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, megabytes, option
from quant.base.listener import Progress
from quant.base.processor import in_memory, short_turns
from quant.base.torch_modes import in_own_modes
from quant.calibration.attention_scales import collect_attention_scales, kv_scale_tensors, latent_norms
from quant.calibration.evaluating import evaluating
from quant.calibration.inputs import Inputs, inputs_of, taking_inputs
from quant.calibration.layer_result import LayerResult, Quantized, layer_result
from quant.calibration.ranks import Exchange, dealt, from_first, wait_for_all
from quant.calibration.session import Device, Prefetcher, Session, device_of
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.registry import check_solvers, get_pipeline, get_solver
from quant.calibration.solvers.rotation import rotate_weight
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats
from quant.calibration.texts.mixture import lacks_data, mixed_text, solver_needs_data, with_calibration
from quant.calibration.walk.block import Settings, Solved, stacked
from quant.calibration.walk.block_memory import Scratch, block_bytes
from quant.calibration.walk.collect import input_scales_of, observer_of, window_stats
from quant.calibration.walk.finished_layers import BlockKeeper, keep_layers, put_back
from quant.calibration.walk.transform import widened_weight
from quant.calibration.walk.undo import restored_on_error
from quant.calibration.walk.walk import BlockStore, solve_sequentially
from quant.export.checkpoint.files.layouts import value_problem
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.files.tensors import plan_of_model
from quant.formats.format import FP8_HEAD
from quant.formats.tensor import BlockScaledTensor, moved
from quant.kernels.linear.conv import weight_of_conv
from quant.kernels.linear.experts import run_experts_one_by_one
from quant.kernels.linear.install import (
    call_encoder_layers,
    install_kv_scales,
    install_weight,
    mark_quantized,
    use_expert_modules,
)
from quant.models.prediction_heads import head_layers, scale_donors, split_heads
from quant.models.stored_weights import read_stored, stored_in
from quant.recipes.blocks import as_linears, block_names, stored_dtype
from quant.recipes.layers import LayerKind, expert_matrices, find_layers
from quant.recipes.plan import Guard, LayerPlan, Parts, Plan, groups_by_input
from quant.recipes.plan_check import check_plan_fits

_TOKENS_GPU = 4096  # of a batch of short rows
_MOMENTS = 1 << 32  # bytes of the second moments of convolutions that are summed up together

Rounded = Callable[[str, Tensor], None]
"""Takes a layer's name and the weight that was rounded, `[..., out, in]`."""


def solve_blocks(
    model: nn.Module, plan: Plan, data: Tensor, settings: Settings, session: Session, rounded: Rounded | None
) -> tuple[Plan, list[LayerResult]]:
    """Solves linear layers and fused experts by the sequential walk, and then the layers outside of decoder blocks.

    Returns the plan with the formats and notes of the walk, and the results in its order.
    """
    walked = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    names = {layer.name for layer in walked}
    # Heads, embeddings and convolutions stand outside of decoder blocks, where the walk holds no inputs of them.
    for layer in plan.quantized:
        if layer.name not in names and solver_needs_data(layer):
            solver = _rounding_of_windows(model, layer) or "mse"
            kind = f"solved with {solver}: {layer.solver} takes what stands in blocks, not a {layer.kind}"
            reason = layer.reason if solver == layer.solver else f"{layer.reason}; {kind}"
            plan = plan.replace_layers([replace(layer, solver=solver, reason=reason)])
    outside = replace(plan, layers=tuple(layer for layer in plan.layers if layer.name not in names))
    measured = replace(plan, layers=tuple(layer for layer in plan.layers if layer.kind != LayerKind.LINEAR))
    # Before the walk, while every layer still gets its original inputs.
    input_scales = input_scales_of(model, measured, data, session)
    results: dict[str, LayerResult] = {}
    solved_layers: list[LayerPlan] = []
    # Where the model lives when it is not being solved: a GPU holds one block, and solutions go back.
    home = device_of(model)

    def apply(layer: LayerPlan, solved: Solved | None, weight: Tensor) -> None:
        notes = solved.notes if solved else ()
        layer = replace(layer, reason="; ".join((layer.reason, *notes)))
        solved_layers.append(layer)
        if solved is None:
            results[layer.name] = layer_result(layer, weight, None)
            return
        # The codes approximate the rotated matrix without its low-rank branch, so the error refers to that matrix.
        before, parts = weight, solved.parts
        if layer.kind != LayerKind.EXPERTS and (parts.hadamard or parts.rank or parts.residual):
            before = widened_weight(rotate_weight(weight.float(), parts.hadamard), parts.channels)
            before = before if parts.lowrank is None else residual_weight(before, parts.lowrank)
        results[layer.name] = _result(layer, weight, before, solved)
        if rounded is not None:
            rounded(layer.name, before.to(home))
        # A store takes solutions from the device where they are.
        solved = solved if session.store.keeps else moved(solved, home)
        install_weight(model, layer, solved.weight, solved.input_scale, solved.parts)

    if session.device is None or session.device.type == "cpu":
        # A GPU reports its own lack of memory and the walk reacts; a CPU process would be killed without a message.
        _check_memory(model, walked, data, settings, session)
    keeper = BlockKeeper(session, model, results, solved_layers) if session.store.keeps else BlockStore()
    settings = replace(settings, run_experts=run_experts_one_by_one)
    solve_sequentially(
        model, plan, data, apply=apply, session=session, settings=settings, input_scales=input_scales, store=keeper
    )
    session = replace(session, progress=None)
    convs = [layer for layer in outside.quantized if solver_needs_data(layer) and _step([layer]) not in session.store]
    others = replace(outside, layers=tuple(layer for layer in outside.layers if layer not in convs))
    outside_results = solve_weights(model, others, input_scales, session, {})
    while convs:
        # As many as their second moments leave room for; each pass has the ones before in place.
        sizes = accumulate(4 * math.prod(layer.shape[1:]) ** 2 for layer in convs)
        count = max(sum(size <= _MOMENTS for size in sizes), 1)
        part, convs = convs[:count], convs[count:]
        stats = window_stats(model, part, data, session, input_scales)
        outside_results += solve_weights(model, replace(outside, layers=tuple(part)), input_scales, session, stats)
    results |= {result.name: result for result in outside_results}
    plan = plan.replace_layers(solved_layers)
    use_expert_modules(model, plan)
    return plan, [results[layer.name] for layer in plan.layers]


def _rounding_of_windows(model: nn.Module, layer: LayerPlan) -> str | None:
    """Returns the solver of a convolution by the second moment of its windows; None of one that is solved without."""
    conv, pipeline = model.get_submodule(layer.name), get_pipeline(layer.solver)
    if not isinstance(conv, nn.Conv2d) or conv.groups > 1 or not pipeline.rounding.feeds_back:
        return None
    return "gptq" if pipeline.rounding.two_sided else pipeline.spec.rounding


def _check_memory(
    model: nn.Module, layers: Sequence[LayerPlan], data: Tensor, settings: Settings, session: Session
) -> None:
    """Raises UserError where a block would take more memory than may be used, before anything is solved."""
    usable = session.usable_memory()
    blocks = block_names(model)
    if usable is None or not blocks:
        return
    dtype, scratch = settings.dtype_for(stored_dtype(model)), Scratch.of(session)
    for name in blocks:
        # With the dot: "layers.1" is a prefix of "layers.10" too.
        inside = [layer for layer in layers if layer.name.startswith(f"{name}.")]
        block = model.get_submodule(name)
        needed = block_bytes(block, inside, data.shape[:2].numel(), dtype, scratch) if inside else 0
        if needed > usable:
            # The tighter limit decides the advice: --memory of the user, or the container's cgroup.
            allowed = session.memory is None or usable == session.memory
            more = "more with --memory" if allowed else "more to this container"
            raise UserError(
                f"{name}: solving this block takes about {megabytes(needed)} of memory, and {megabytes(usable)} may be "
                f"used: give fewer or shorter calibration rows, a solver that looks at no data, such as rtn, or {more}"
            )


def _result(layer: LayerPlan, weight: Tensor, before: Tensor, solved: Solved) -> LayerResult:
    """Returns the result of a layer that may be rotated and have a branch: its error counts both together."""
    if layer.kind == LayerKind.EXPERTS:
        return layer_result(layer, weight, solved.weight)
    result = layer_result(replace(layer, parts=Parts.of(solved.parts)), before, solved.weight)
    if solved.parts.lowrank is None or not result.relative_error:
        return result
    # ‖residual − its rounding‖ / ‖weight‖: the branch is exact, so the error is the residual's.
    share = float(before.norm() / weight.float().norm().clamp(min=torch.finfo(torch.float32).tiny))
    if not share:
        return result
    error = result.relative_error * share
    # SNR of an amplitude ratio: −20 · log10(error), equal to 10 · log10 of the ratio of energies.
    return replace(result, relative_error=error, snr_db=-20 * math.log10(error))


def check_solvable(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError where a plan cannot be executed on a model, judging by names, shapes and devices."""
    check_plan_fits(plan, find_layers(model))
    check_solvers(plan)
    for layer in plan.quantized:
        weight = model.get_parameter(layer.tensor_name)
        # A parameter that is read from its file later is on the meta device too, and carries its reader as `stored`.
        if weight.is_meta and not hasattr(weight, "stored"):
            raise UserError(
                f"{layer.name}: its weight is on the meta device, without values; load the model first. "
                "quant.make_plan plans without"
            )


def check_in_memory(model: nn.Module) -> None:
    """Raises UserError for the first tensor of a model, planned or not, that has no values where the model is.

    accelerate leaves offloaded tensors on the meta device and has a hook fetch them in each forward. Norms, embeddings
    and heads are read and changed together with the layers, block by block, where no hook runs.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and not hasattr(tensor, "stored"):
            owner, _, last = name.rpartition(".")
            module = model.get_submodule(owner)
            is_offloaded = any(hasattr(each, "_hf_hook") for each in (module, *module.children(), model))
            way_out = "load the model first. quant.make_plan plans without"
            if is_offloaded:
                way_out = (
                    "it is offloaded: load the model without offloading (no disk in its device_map), or give its "
                    "directory to the command `quantize`"
                )
            raise UserError(f"{owner}: its {last} is on the meta device, without values; {way_out}")


def check_unquantized(model: nn.Module, plan: Plan) -> None:
    """Raises UserError where a tensor that stays as it is holds NaN or infinity; solvers check the others."""
    read_later = {layer.tensor_name for layer in plan.quantized}
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            if name not in read_later:
                check_values(name, in_memory(tensor.detach()), is_buffer=is_buffer)


def solve_plan(
    model: nn.Module, plan: Plan, data: Any = None, session: Session | None = None, *, rounded: Rounded | None = None
) -> Quantized:
    """Quantizes `model` in place, as `plan` says; data are as in `quant.quantize`, or None for text that it writes.

    The session's store has the steps that an earlier run finished, and keeps the steps of this one; finished layers
    become maps of its files. Hidden states that would take much of its memory go to a file there. `rounded` is called
    with the matrix that was rounded where a solver changes a weight before: scaled, rotated, less its branch.
    """
    session = session or Session()
    check_solvable(model, plan)
    by_block = plan.guard is not None or any(solver_needs_data(layer) for layer in plan.quantized)
    if by_block:
        # Solvers with data sum their moments over ranks; solvers without data share groups through the store's files.
        Exchange(session.device).begin_connecting()
    # Before checks and statistics: a parameter on the meta device has a reader, but no values to compute with.
    read_stored(model, _needed_throughout(model, plan))
    if session.rank == 0:  # an error there ends the other ranks; each of them would read all of the model
        check_unquantized(model, plan)
    settings = Settings(observer=observer_of(plan), guard=Guard.parse(plan.guard) if plan.guard is not None else None)
    if data is None and lacks_data(plan):
        data, record = mixed_text(model, plan, session=session)
        plan = with_calibration(plan, [{"source": "mix", **record}])
    # Positional and keyword arguments become one list of calls, each bound to the forward signature.
    elif data is not None and not isinstance(data, Tensor | Inputs):
        data = inputs_of(data, model)
    pipelines = [get_pipeline(layer.solver) for layer in plan.quantized]
    steps = plan.guard or any(p.reconstruction or p.spec.learns_rotation or p.rounding.two_sided for p in pipelines)
    on_gpu = (session.device or device_of(model)).type == "cuda"
    if on_gpu and not steps and isinstance(data, Tensor) and data.dim() == 2:
        # Python takes as long for a batch of few tokens as for one of many. Guards and learning look at single batches.
        batch = min(_TOKENS_GPU // data.shape[1], len(data) // 4)
        settings = replace(settings, batch=max(batch, settings.batch))
    session = session.for_model(model)
    started = time.perf_counter()
    seconds: dict[str, float] = {}
    # Dropout would be noise in the statistics, and BatchNorm would move with every calibration row.
    plan, heads = split_heads(plan, head_layers(model))
    with evaluating(model), taking_inputs(model), as_linears(model), short_turns():
        call_encoder_layers(model)
        # Before the walk, so that heads see the hidden states of the original blocks.
        heads, scales_of_heads = _with_scales(model, plan, heads, data, session)
        if by_block:
            assert data is not None
            plan, layers = solve_blocks(model, plan, data, settings, session, rounded)
        else:
            input_scales = input_scales_of(model, plan, data, session)
            seconds["calibrate"] = time.perf_counter() - started
            layers = solve_weights(model, plan, input_scales, session, {})
        if heads.layers:
            layers += solve_weights(model, heads, scales_of_heads, replace(session, progress=None), {})
            plan = replace(plan, layers=(*plan.layers, *heads.layers))
        # Stages are disjoint: calibration that was timed by itself does not count twice.
        seconds["solve"] = time.perf_counter() - started - sum(seconds.values())
        # Solvers have added run-time parts (input scale, rotation, branch), which count in the size of the plan.
        plan = plan_of_model(model, plan)
        # Hidden states between blocks: no later step reads them.
        session.store.drop("states")
        if plan.kv_cache is not None:
            install_kv_scales(model, _kv_scales(model, plan, data, session))
        mark_quantized(model)
    return Quantized(model, plan, layers, seconds)


def _with_scales(
    model: nn.Module, plan: Plan, heads: Plan, data: Any, session: Session
) -> tuple[Plan, dict[str, Tensor]]:
    """Returns the plan of the prediction heads and their static input scales, measured on layers of the model."""
    heads, donors = scale_donors(plan, heads, stored_names(model))
    if not donors:
        return heads, {}
    measured = replace(plan, layers=tuple({donor.name: donor for donor in donors.values()}.values()))
    scales = input_scales_of(model, measured, data, session, "input scales of prediction heads")
    return heads, {name: scales[donor.name] for name, donor in donors.items()}


def _kv_scales(model: nn.Module, plan: Plan, data: Any, session: Session) -> dict[str, Tensor]:
    step = "scales of the KV cache"
    finished = session.store.get(step)
    if finished is not None:
        return {name: scale.clone() for name, scale in finished.tensors.items()}
    assert data is not None and plan.kv_cache is not None
    granularity = "head" if plan.kv_cache is FP8_HEAD else "tensor"
    if granularity == "head" and (latent := next(iter(latent_norms(model)), None)):
        raise UserError(
            f"{latent}: latent attention caches one vector for all heads, so it has no scale for each (fp8_head); use "
            f"{option('kv_cache', 'fp8')}"
        )
    # The listener has seen all layers by now; a second count of the same rows would look like a restart.
    silent = replace(session, progress=None)
    scales = collect_attention_scales(
        model, data, kv_format=plan.kv_cache, attention_format=None, granularity=granularity, session=silent
    )
    tensors = kv_scale_tensors(scales, stored_dtype(model))
    session.store.put(step, tensors, None)
    return tensors


def _needed_throughout(model: nn.Module, plan: Plan) -> list[str]:
    """Returns the parameters in files that other steps than solving their own layer read or change."""
    unread = stored_in(model)
    rotates = any(get_pipeline(layer.solver).spec.merges_rotations for layer in plan.quantized)
    # Merged rotations change other layers too; a weight that a guard keeps in 16 bit must be in memory.
    if rotates or plan.guard is not None:
        return list(unread)
    quantized = {layer.tensor_name for layer in plan.quantized if layer.kind != LayerKind.CONV}
    return [name for name in unread if name not in quantized]


@in_own_modes
def apply_plan(
    model: nn.Module,
    plan: Plan,
    input_scales: Mapping[str, Tensor] | None = None,
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
    check_solvable(model, plan)
    with restored_on_error(model):
        return solve_weights(model, plan, input_scales or {}, Session.on(device, progress=progress), {})


def solve_weights(
    model: nn.Module, plan: Plan, input_scales: Mapping[str, Tensor], session: Session, stats: Mapping[str, LayerStats]
) -> list[LayerResult]:
    """Quantizes as `apply_plan` does, in a session: its ranks share the groups, and its store keeps finished ones.

    `stats` are statistics of inputs, by layer, for solvers that look at them.
    """
    store, results, done = session.store, dict[str, LayerResult](), 0
    # A fusion group is solved at once: its members share one tensor scale.
    own = groups = groups_by_input(plan.quantized)
    if session.store.keeps and session.world > 1:
        # Ranks share the groups that are not in the store, by elements: the time of a solver without data is theirs.
        names = from_first(lambda: {m[0].name for m in groups if store.get(_step(m)) is None})
        unfinished = [members for members in groups if members[0].name in names]
        owners = dealt([sum(member.numel for member in members) for members in unfinished])
        own = [members for members, owner in zip(unfinished, owners, strict=True) if owner == session.rank]

    def weights_of(members: Sequence[LayerPlan]) -> list[Tensor]:
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
                results |= _solve_and_install(model, members, weights, input_scales, session, stats)
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
    model: nn.Module, members: Sequence[LayerPlan], copies: Sequence[Tensor], input_scales: Mapping[str, Tensor],
    session: Session, stats: Mapping[str, LayerStats],
) -> dict[str, LayerResult]:  # fmt: skip
    """Quantizes the members of a fusion group on the session's device, and gives their results by name.

    A store takes solutions from that device; without one they go where the model is.
    """
    tensors: Sequence[Tensor | None] = copies or [None] * len(members)
    weights = {member.name: _weight_of(model, member, tensor) for member, tensor in zip(members, tensors, strict=True)}
    solved = _solved_weights(members, weights, session, stats)
    results = {member.name: layer_result(member, weights[member.name], solved[member.name]) for member in members}
    home = device_of(model)
    for member in members:
        weight = solved[member.name] if session.store.keeps else solved[member.name].to(home)
        install_weight(model, member, weight, input_scales.get(member.name))
    return results


def solve_state_dict(
    tensors: Mapping[str, Tensor], plan: Plan, session: Session | None = None
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
            group = _solved_weights(members, moved, session, {})
            results |= {m.name: layer_result(m, moved[m.name], group[m.name]) for m in members}
            # Where the original tensor is, so that a state dict on the CPU does not collect its codes on the GPU.
            solved |= {name: each.to(weight.device) for name, each in group.items()}
        session.report("solve", done, len(plan.layers))
    return solved, [results[layer.name] for layer in plan.layers]


def _stored_weight(tensors: Mapping[str, Tensor], layer: LayerPlan) -> Tensor:
    weight = tensors[layer.tensor_name]
    return weight.t() if layer.transposed else weight


def _solved_weights(
    members: Sequence[LayerPlan], weights: Mapping[str, Tensor], session: Session, stats: Mapping[str, LayerStats]
) -> dict[str, BlockScaledTensor]:
    """Returns codes and scales by name. Experts that are read one by one are solved so on the session's device."""
    first = members[0]
    if not isinstance(whole := weights[first.name], Tensor):
        format, solver = first.weight_format, get_solver(first.solver)
        # A generator: one expert is dequantized, solved and stacked before the next is read.
        matrices = (
            solve_group({first.name: whole[index].to(session.device)}, {}, format, solver)[first.name]
            for index in range(len(whole))
        )
        return {first.name: stacked(matrices, len(whole), Scratch.of(session))}
    return solve_group(weights, stats, first.weight_format, get_solver(first.solver))


def _weight_of(model: nn.Module, layer: LayerPlan, copy: Tensor | None = None) -> Tensor:
    """Returns the weight of a layer, or its copy on another device.

    For one that is still in its files, a lazy reader.
    """
    if layer.kind == LayerKind.EXPERTS:
        return expert_matrices(model, layer.name, copy)
    if copy is not None:
        return copy
    weight = _parameter_of(model, layer)
    return getattr(weight, "stored", None) or weight.detach()


def _parameter_of(model: nn.Module, layer: LayerPlan) -> Tensor:
    """Returns the parameter of a layer; of a convolution that is quantized, the matrix that formats see."""
    if layer.kind == LayerKind.CONV and layer.weight is not None:
        return weight_of_conv(model.get_submodule(layer.name))
    return model.get_parameter(layer.tensor_name)


def check_values(name: str, tensor: Tensor, *, is_buffer: bool) -> None:
    """Raises UserError where a tensor holds NaN or infinity."""
    if problem := value_problem(tensor, is_buffer=is_buffer):
        raise UserError(f"{name} {list(tensor.shape)} {problem}; repair the model, or download it again")
