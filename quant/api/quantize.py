"""`quantize`, and the steps it consists of: calibrate and apply a plan.

Each step is a function a training script can call alone, on any `nn.Module`. Where no solver looks at data, weights
are replaced group by group, and an original is freed as soon as its quantized form stands in its place, so the peak
beyond the model is one fusion group. Solvers that do look at data see each layer's inputs as the quantized layers
before it give them, one decoder block at a time; the peak is then that block and its inputs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.kv_cache import collect_attention_scales, kv_scale_tensors
from quant.calibration.observers import get_observer
from quant.calibration.solvers.lowrank import residual_weight
from quant.calibration.solvers.rotation import rotate_weight
from quant.calibration.solvers.solver import check_solvers, get_pipeline, get_solver, solve_group
from quant.calibration.statistics import static_input_scale
from quant.calibration.texts.generate import generate_rows
from quant.calibration.walk.collect import collect_input_amax
from quant.calibration.walk.group import Settings, Solved
from quant.calibration.walk.guard import Guard
from quant.calibration.walk.sequential import solve_sequentially
from quant.errors import UserError
from quant.export.checkpoint import plan_of_model
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.embedding import takes as why_not_embedding
from quant.kernels.linear.modules import QuantExperts, QuantLinear, RunTimeParts, experts_forward
from quant.planning import check_plan_fits, make_plan
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.recipe import Recipe
from quant.report import LayerResult, layer_result

Progress = Callable[[str, int, int], None]
_DYNAMIC = "a format whose inputs are scaled as they come, such as fp8_channel or mxfp8"


@dataclass(frozen=True, eq=False)
class Quantized:
    """What `quantize` gives: the model, the plan it follows, and what became of every layer."""

    model: nn.Module
    plan: Plan
    layers: list[LayerResult]
    seconds: dict[str, float]


def quantize(
    model: nn.Module,
    recipe: str | Recipe | Plan = "nvfp4",
    data: torch.Tensor | None = None,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    solver: str | None = None,
    run: Callable[[nn.Module], Any] | None = None,
    guard: str | None = None,
    observer: str | None = None,
    bits: float | None = None,
    max_kl: float | None = None,
    formats: str | Sequence[str] | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Quantizes `model` in place.

    Args:
        model: any module; a transformers model needs nothing else.
        recipe: a preset's name, a recipe, or a finished plan.
        data: calibration token ids, int64 `[rows, seqlen]`, for static activation scales and for solvers that look
            at inputs; for a model of anything else its inputs, such as images `[rows, 3, height, width]`. None lets a
            causal language model write its own where the plan needs any; see `own_text`.
        include: globs; if given, only layers that match one are quantized.
        exclude: globs of layers that stay in 16 bit.
        solver: replaces the recipe's.
        run: calls the model on any valid input, which is how fusion groups are found; needed where the model does not
            run on token ids and `data` is not given.
        guard: "LIMIT FORMAT …", such as "0.1 fp8_channel keep": a layer whose output on held-out calibration rows is
            off by more than the limit, relatively, gets the next format; replaces the recipe's.
        observer: key of `OBSERVERS`, how static activation scales are chosen; replaces the recipe's, which is absmax.
        bits: per weight, every scale counted; formats are then chosen layer by layer and `recipe` is not used. For
            other budgets and limits see `quant.allocation.allocate.allocate`, whose plan is a `recipe` for here.
        max_kl: the same, for the smallest model whose measured KL to the original stays below.
        formats: what may be chosen, such as "nvfp4,fp8"; 16 bit always may.
        device: where solvers that look at data work, one block at a time; by default where the model is.
        progress: called as `progress(stage, done, total)`.

    Raises:
        ValueError: bad recipe, plan, glob, weight or data; the message names it and the way out.
    """
    _check_data(data)
    if run is None and data is not None and data.is_floating_point():
        run = _on_first(data)
    if bits is not None or max_kl is not None or formats is not None:
        from quant.allocation.allocate import allocate_for_api

        if data is None:
            data = own_text(
                model, make_plan(model, "fp8", include=include, exclude=exclude, run=run), progress=progress
            )
        where = {"include": include, "exclude": exclude, "run": run, "progress": progress}
        changed = guard is not None or observer is not None
        recipe = allocate_for_api(model, data, recipe, bits, max_kl, formats, solver, changed, where)
        include, exclude, solver = (), (), None
    if isinstance(recipe, Plan):
        if include or exclude or solver:
            raise UserError("a plan says everything already: edit it instead of passing include, exclude or solver")
        plan = recipe
        check_plan_fits(plan, find_layers(model))
    else:
        plan = make_plan(model, recipe, include=include, exclude=exclude, solver=solver, run=run)
    plan = with_options(plan, guard, observer)
    check_solvers(plan)
    _refuse_meta(model, plan)
    settings = _settings(plan, device)
    if data is None and lacks_data(plan):
        data = own_text(model, plan, progress=progress)
    if settings.guard is not None or any(solver_needs_data(layer) for layer in plan.quantized):
        assert data is not None
        quantized = _quantize_block_by_block(model, plan, data, settings, progress)
    else:
        quantized = _quantize_at_once(model, plan, data, progress)
    if plan.kv_cache is not None:
        assert data is not None
        scales = collect_attention_scales(model, data, kv_format=plan.kv_cache, attention_format=None)
        install_kv_scales(model, kv_scale_tensors(scales, "compressed_tensors", stored_dtype(model)))
    protect(model)
    return quantized


def protect(model: nn.Module) -> None:
    """Keeps a quantized model of transformers from being saved as if it were none."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = refuse_save_pretrained  # type: ignore[assignment]


def _check_data(data: Any) -> None:
    if data is None:
        return
    if not isinstance(data, torch.Tensor):
        raise UserError(
            f"data is a {type(data).__name__}; make rows of token ids of it: quant.calibration_rows(data, tokenizer, "
            "samples=32, seqlen=512)"
        )
    if not len(data) or not (data.is_floating_point() or data.dim() == 2):
        raise UserError(
            f"data is {list(data.shape)}; expected token ids [rows, seqlen], or inputs of the model [rows, …]"
        )


def refuse_save_pretrained(*args: Any, **options: Any) -> None:
    """Stands in for a quantized model's method, which would write what nothing can load."""
    raise UserError("save_pretrained knows nothing of quantized layers; use quant.save(model, plan, directory)")


def _on_first(data: torch.Tensor) -> Callable[[nn.Module], Any]:
    """Calls a model on the first of its inputs."""
    return lambda model: model(data[:1])


def _refuse_meta(model: nn.Module, plan: Plan) -> None:
    for layer in plan.quantized:
        if _weight_of(model, layer).is_meta:
            raise UserError(
                f"{layer.name}: its weight is on the meta device, where there are no values; load the model first. "
                "quant.make_plan plans without"
            )


def _quantize_at_once(model: nn.Module, plan: Plan, data: torch.Tensor | None, progress: Progress | None) -> Quantized:
    """Solvers that look at nothing but the weight."""
    started = time.perf_counter()
    input_scales = calibrate(model, plan, data, progress=progress)
    calibrated = time.perf_counter()
    layers = apply_plan(model, plan, input_scales, progress=progress)
    done = time.perf_counter()
    seconds = {"calibrate": calibrated - started, "solve": done - calibrated}
    return Quantized(model, plan_of_model(model, plan), layers, seconds)


def _quantize_block_by_block(
    model: nn.Module, plan: Plan, data: torch.Tensor, settings: Settings, progress: Progress | None
) -> Quantized:
    """Linear layers and fused experts by the sequential walk; then heads, which it does not take."""
    walked = [layer for layer in plan.quantized if layer.kind in ("linear", "experts")]
    plan = plan.replace_layers(_without_data(layer) for layer in plan.quantized if layer not in walked)
    rest = replace(plan, layers=tuple(layer for layer in plan.layers if layer not in walked))
    measured = replace(plan, layers=tuple(layer for layer in plan.layers if layer.kind != "linear"))
    started = time.perf_counter()
    # Before the walk, while every layer still gets its original inputs.
    input_scales = calibrate(model, measured, data, progress=progress)
    results: dict[str, LayerResult] = {}
    noted: list[LayerPlan] = []

    def apply(layer: LayerPlan, solved: Solved | None) -> None:
        notes = solved.notes if solved else ()
        layer = replace(layer, reason="; ".join((layer.reason, *notes)))
        noted.append(layer)
        if solved is None:
            results[layer.name] = layer_result(layer, _weight_of(model, layer), None)
            return
        results[layer.name] = _result(layer, _weight_of(model, layer), solved.weight, solved.parts)
        install_weight(model, layer, solved.weight, solved.input_scale, solved.parts)

    report = (lambda done, total: progress("solve", done, total)) if progress else None
    solve_sequentially(model, plan, data, apply=apply, settings=settings, input_scales=input_scales, progress=report)
    results |= {result.name: result for result in apply_plan(model, rest, input_scales)}
    plan = plan.replace_layers(noted)
    use_expert_modules(model, plan)
    layers = [results[layer.name] for layer in plan.layers]
    return Quantized(model, plan_of_model(model, plan), layers, {"solve": time.perf_counter() - started})


def _result(layer: LayerPlan, weight: torch.Tensor, solved: BlockScaledTensor, parts: RunTimeParts) -> LayerResult:
    """The result of a layer that may be rotated and have a branch: its error is that of both together."""
    if layer.kind == "experts":
        return layer_result(layer, weight, solved)
    counted = replace(layer, pre_scale=parts.pre_scale is not None, hadamard=parts.hadamard, rank=parts.rank)
    turned = rotate_weight(weight.float(), parts.hadamard)
    left = turned if parts.lowrank is None else residual_weight(turned, parts.lowrank)
    result = layer_result(counted, left, solved)
    share = float(left.norm() / turned.norm().clamp(min=torch.finfo(torch.float32).tiny))
    if parts.lowrank is None or not result.relative_error or not share:
        return result
    error = result.relative_error * share
    return replace(result, relative_error=error, snr_db=-20 * math.log10(error))


def _without_data(layer: LayerPlan) -> LayerPlan:
    if not solver_needs_data(layer):
        return layer
    reason = f"{layer.reason}; solved with mse: {layer.solver} takes what stands in blocks, not a {layer.kind}"
    return replace(layer, solver="mse", reason=reason)


def with_options(plan: Plan, guard: str | None = None, observer: str | None = None) -> Plan:
    """`plan` with a guard and an observer, as `quantize` describes them; None leaves what the plan says.

    Raises:
        ValueError: they cannot be read.
    """
    how = {"guard": guard, "observer": observer}
    plan = replace(plan, provenance={**plan.provenance, **{k: v for k, v in how.items() if v is not None}})
    _settings(plan, None)
    return plan


def _settings(plan: Plan, device: torch.device | str | None) -> Settings:
    """How the walk is done, as far as the plan and the caller say."""
    guard = plan.provenance.get("guard")
    if device is not None and torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device}: PyTorch sees no GPU here; leave it out, or pass cpu")
    return Settings(
        device=torch.device(device) if device else None,
        observer=_observer(plan),
        guard=Guard.parse(guard) if guard else None,
    )


def _observer(plan: Plan) -> str:
    """The plan's observer, checked."""
    name = plan.provenance.get("observer", "absmax")
    get_observer(name)
    return str(name)


def solver_needs_data(layer: LayerPlan) -> bool:
    """Whether the layer's solver looks at its inputs."""
    return get_pipeline(layer.solver).needs_data


def lacks_data(plan: Plan) -> str | None:
    """What to tell a user who gave no calibration text for a plan that needs one; None where it needs none."""
    way_out = "pass a text: --calib FILE, or data= in Python"
    for layer in plan.quantized:
        if solver_needs_data(layer):
            return f"{layer.name}: solver {layer.solver} looks at inputs; {way_out}"
        if layer.has_static_scale:
            return f"{layer.name}: {layer.activation} inputs have a static scale; {way_out}, or choose {_DYNAMIC}"
    if plan.provenance.get("guard"):
        return f"a guard compares layers on held-out text; {way_out}"
    return f"a KV cache in {plan.kv_cache} has static scales; {way_out}" if plan.kv_cache else None


def own_text(
    model: nn.Module,
    plan: Plan,
    tokenizer: Any = None,
    *,
    samples: int = 32,
    seqlen: int = 128,
    seed: int = 0,
    progress: Progress | None = None,
) -> torch.Tensor:
    """Calibration rows that the model writes itself, for a plan that needs data where there is none.

    Args:
        model: a causal language model.
        plan: for the error message.
        tokenizer: names the special tokens, which are never drawn; None takes those of the config.
        samples: rows.
        seqlen: tokens a row; cut to the model's context.
        seed: of what is drawn.
        progress: called as `progress("generate", tokens done, tokens in all)`.

    Returns:
        int64 `[samples, seqlen]`.

    Raises:
        UserError: the model cannot write text; the message names the layer that needs some.
    """
    context = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    seqlen = min(seqlen, context) if isinstance(context, int) else seqlen
    report = (lambda done, total: progress("generate", done, total)) if progress else None
    try:
        return generate_rows(model, tokenizer, samples=samples, seqlen=seqlen, seed=seed, progress=report)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise UserError(f"{lacks_data(plan)} ({error})") from error


def calibrate(
    model: nn.Module, plan: Plan, data: torch.Tensor | None, *, progress: Progress | None = None
) -> dict[str, torch.Tensor]:
    """Static activation scales by layer name, float32 scalars; one for all members of a fusion group.

    Raises:
        UserError: the plan needs data and there is none.
    """
    static = [layer for layer in plan.quantized if layer.has_static_scale]
    if not static:
        return {}
    if data is None:
        raise UserError(lacks_data(plan) or "no calibration data")
    report = (lambda done, total: progress("calibrate", done, total)) if progress else None
    observers = None
    if _observer(plan) != "absmax":
        watch = get_observer(_observer(plan))
        observers = {layer.name: watch(layer.activation, name=layer.name) for layer in static if layer.activation}
    amax = collect_input_amax(model, [layer.name for layer in static], data, report, observers)
    scales = {}
    for members in _by_input(static):
        shared = torch.stack([amax[member.name] for member in members]).amax()
        for member in members:
            assert member.activation is not None
            warned = member.name if member is members[0] else None
            scale = static_input_scale(shared, member.activation, stored_dtype(model), warned)
            assert scale is not None
            scales[member.name] = scale
    return scales


def apply_plan(
    model: nn.Module,
    plan: Plan,
    input_scales: Mapping[str, torch.Tensor] | None = None,
    *,
    progress: Progress | None = None,
) -> list[LayerResult]:
    """Quantizes the planned weights and puts `QuantLinear` and `QuantExperts` in their place.

    Args:
        model: changed in place.
        plan: as `make_plan` gives it, perhaps edited.
        input_scales: as `calibrate` gives them.
        progress: called as `progress("solve", layers done, layers in all)`.

    Returns:
        One result per layer of the plan, kept layers included, in plan order.
    """
    input_scales = input_scales or {}
    results: dict[str, LayerResult] = {}
    done = 0
    with torch.no_grad():
        for members in _by_input(plan.quantized):
            weights = {member.name: _weight_of(model, member) for member in members}
            solved = _solve(members, weights)
            for member in members:
                results[member.name] = layer_result(member, weights[member.name], solved[member.name])
                install_weight(model, member, solved[member.name], input_scales.get(member.name))
                done += 1
                if progress:
                    progress("solve", done, len(plan.quantized))
            del weights
    use_expert_modules(model, plan)
    for layer in plan.layers:
        if layer.name not in results:
            results[layer.name] = layer_result(layer, _weight_of(model, layer), None)
    return [results[layer.name] for layer in plan.layers]


def solve_state_dict(
    tensors: Mapping[str, torch.Tensor], plan: Plan, *, progress: Progress | None = None
) -> tuple[dict[str, BlockScaledTensor], list[LayerResult]]:
    """Weight-only quantization of a bare state dict: the solved weights by layer name, and the results."""
    solved, results = {}, []
    for done, layer in enumerate(plan.layers, 1):
        key = layer.name if layer.kind == "experts" else f"{layer.name}.weight"
        weight = tensors[key]
        if layer.weight is not None:
            solved.update(_solve([layer], {layer.name: weight}))
        results.append(layer_result(layer, weight, solved.get(layer.name)))
        if progress:
            progress("solve", done, len(plan.layers))
    return solved, results


def _solve(members: Sequence[LayerPlan], weights: Mapping[str, torch.Tensor]) -> dict[str, BlockScaledTensor]:
    first = members[0]
    assert first.weight is not None
    return solve_group(weights, {}, first.weight, get_solver(first.solver))


def _by_input(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Layers gathered by the input they read: fusion groups, but each fused-expert projection apart."""
    return [
        part
        for members in _by_group(layers)
        for part in ([[m] for m in members] if members[0].kind == "experts" else [members])
    ]


def _by_group(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Layers gathered by fusion group, in order of first appearance; a layer alone is its own group."""
    groups: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        groups.setdefault(layer.group or layer.name, []).append(layer)
    return list(groups.values())


def _weight_of(model: nn.Module, layer: LayerPlan) -> torch.Tensor:
    if layer.kind == "experts":
        return model.get_parameter(layer.name).detach()
    weight = model.get_submodule(layer.name).weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def install_weight(
    model: nn.Module,
    layer: LayerPlan,
    weight: BlockScaledTensor,
    input_scale: torch.Tensor | None,
    parts: RunTimeParts | None = None,
) -> None:
    """Puts a quantized module in the place of the layer's weight. A bias stays as it is.

    Raises:
        UserError: an embedding that does more than look up.
    """
    parent_name, _, last = layer.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    parts = parts or RunTimeParts()
    # Members of a fusion group were given one tensor; a checkpoint holds one for each of them.
    input_scale = None if input_scale is None else input_scale.clone()
    parts = replace(parts, pre_scale=None if parts.pre_scale is None else parts.pre_scale.clone())
    new: nn.Module
    if layer.kind == "experts":
        new = QuantExperts(weight, layer.activation, input_scale, dtype=parent.get_parameter(last).dtype)
        delattr(parent, last)
    elif layer.kind == "embedding":
        table = parent.get_submodule(last)
        if why := why_not_embedding(table):
            raise UserError(f"{layer.name}: cannot be in {layer.weight}: {why}; keep it in 16 bit")
        new = QuantEmbedding(weight, next(table.parameters()).dtype)
    else:
        bias = getattr(parent.get_submodule(last), "bias", None)
        new = QuantLinear(weight, bias, layer.activation, input_scale, **vars(parts))
    new.train(parent.training)
    setattr(parent, last, new)


def install_kv_scales(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Registers KV-cache scales as buffers of their attention modules, under the names of the checkpoint layout."""
    for name, tensor in tensors.items():
        attention, _, operand = name.rpartition(".")
        model.get_submodule(attention).register_buffer(operand, tensor)


def use_expert_modules(model: nn.Module, plan: Plan) -> None:
    """Tells a transformers model to call its experts as modules, so that activation formats apply to them too."""
    if not any(layer.kind == "experts" for layer in plan.quantized):
        return
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register("quant", experts_forward)
        config._experts_implementation = "quant"
