"""`quant.quantize` makes a plan from a recipe, or lets an allocation choose formats for a budget, and executes it.

Each of these steps is a public function that a training script can call alone, on any `nn.Module`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.allocation.allocate import FORMATS, allocate, check_feasible
from quant.allocation.goal import Goal
from quant.allocation.held_out import HeldOut
from quant.calibration.inputs import Inputs, inputs_of, on_first, recorded
from quant.calibration.placement import Device
from quant.calibration.progress import Progress
from quant.checkpoints.pretrained import attach
from quant.errors import UserError
from quant.execution.data import mixed_text
from quant.execution.solve import Quantized, solve_plan, with_calibration
from quant.plan.edit import set_guard_and_observer
from quant.plan.make import check_module, kv_cache_name, make_plan
from quant.recipes import effort as efforts
from quant.recipes.plan import Plan
from quant.recipes.recipe import KEEP, Recipe, get_recipe


def quantize(
    model: nn.Module,
    recipe: str | Recipe | Plan = "nvfp4",
    data: Any = None,
    *,
    forward_loop: Callable[[nn.Module], Any] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    lm_head: str | None = None,
    kv_cache: str | None = None,
    solver: str | None = None,
    effort: int | None = None,
    run: Callable[[nn.Module], Any] | None = None,
    guard: str | None = None,
    observer: str | None = None,
    bits: float | None = None,
    max_kl: float | None = None,
    formats: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    device: Device = None,
    progress: Progress | None = None,
) -> Quantized:
    """Quantizes `model` in place.

    Args:
        model: any module; a transformers model needs nothing else.
        recipe: a preset's name, a recipe, or a finished plan.
        data: calibration token ids, int64 `[rows, seqlen]`, for static activation scales and for solvers that look
            at inputs; for a model of anything else its inputs, such as images `[rows, 3, height, width]`, named tensors
            `{"input_features": …, "decoder_input_ids": …}` with a row for each call, or any iterable of calls, such as
            a DataLoader: each a tensor, a tuple of positional or a dict of keyword arguments; or a `forward_loop`.
            None takes 32 rows of 512 tokens where the plan needs any: text that a causal language model writes itself,
            and the samples that come with this package where there is a `tokenizer`.
        forward_loop: in the place of `data`: `forward_loop(model)` calls the model on calibration inputs, without a KV
            cache.
        include: globs; if given, only layers that match one are quantized.
        exclude: globs of layers that stay in 16 bit.
        lm_head: format of the output head, whose inputs stay in 16 bit; replaces the recipe's.
        kv_cache: format of the KV cache, "fp8", or "16bit"; replaces the recipe's.
        solver: replaces the recipe's.
        effort: 0 to 3, chooses a solver where neither `solver` nor the recipe names one; see `quant.recipes.effort`.
            None is 2 where there is data or the model writes some, 1 where there is none, and 0 for a budget.
        run: calls the model on any valid input, which is how fusion groups are found; needed where the model does not
            run on token ids and `data` is not given.
        guard: "LIMIT FORMAT …", such as "0.1 fp8_channel keep": a layer whose output on held-out calibration rows is
            off by more than the limit, relatively, gets the next format; replaces the recipe's.
        observer: key of `OBSERVERS`, how static activation scales are chosen; replaces the recipe's, which is absmax.
        bits: per weight, every scale counted; formats are then chosen layer by layer and `recipe` is not used. For
            other budgets and limits see `quant.allocation.allocate.allocate`, whose plan is a `recipe` for here.
        max_kl: the same, for the smallest model whose measured KL to the original stays below. A quarter of the data
            chooses the formats, and a quarter verifies them; what it measures is in the plan's provenance.
        formats: what may be chosen, such as "nvfp4,fp8"; 16 bit always may.
        tokenizer: of the model, for calibration text where `data` is None.
        device: where everything is computed, "auto", "cpu", "cuda" or "cuda:N"; the model stays where it is, and its
            blocks are copied there one at a time, or all together where they fit. By default where the model is.
        progress: called as `progress(stage, done, total)`.

    Raises:
        ValueError: bad recipe, plan, glob, weight or data; the message names it and the way out.
    """
    check_module(model, "quantize")
    if forward_loop is not None:
        if data is not None:
            raise UserError("data= and forward_loop= both give calibration inputs; pass one of them")
        data = recorded(model, forward_loop)
    elif data is not None and not isinstance(data, torch.Tensor | Inputs):
        data = inputs_of(data, model)
    _check_data(data)
    if run is None and data is not None and data.is_floating_point():
        run = on_first(data)
    cache = None if kv_cache is None else kv_cache_name(kv_cache, "kv_cache=")
    if bits is not None or max_kl is not None or formats is not None:
        if recipe != "nvfp4":
            raise UserError(f"recipe {recipe!r} fixes the formats that a budget would choose; name those with formats=")
        if guard is not None or observer is not None:
            raise UserError("guard= and observer= would change what a budget is measured with; pass them with the plan")
        if lm_head is not None:
            raise UserError("a budget counts the layers inside the model: leave lm_head= out, and set it in the plan")
        if isinstance(data, Inputs):
            raise UserError("a budget measures on one tensor, token ids or images; pass one, or a recipe and this data")
        goal = Goal(bits=bits, max_kl=max_kl)
        records = None
        choices: dict[str, Any] = {
            "formats": formats or FORMATS, "include": include, "exclude": exclude, "kv_cache": cache, "run": run
        }  # fmt: skip
        if data is None:
            check_feasible(model, goal, **choices)  # before text is written, which takes long
            made_for = make_plan(model, "fp8", include=include, exclude=exclude, run=run)
            data, record = mixed_text(model, made_for, tokenizer, device=device, progress=progress)
            records = [{"source": "mix", **record}]
        held_out = None
        if goal.has_limit:
            data, held_out = HeldOut.from_calibration(data)
        plan = allocate(
            model, data, goal, solver=solver or efforts.solver_of(effort or 0, KEEP), held_out=held_out, device=device,
            progress=progress, **choices,
        ).plan  # fmt: skip
        plan = plan if records is None else with_calibration(plan, records)
    elif isinstance(recipe, Plan):
        if include or exclude or solver or effort is not None or lm_head is not None or kv_cache is not None:
            raise UserError(
                "a plan says everything: edit it instead of passing include, exclude, lm_head, kv_cache, solver or "
                "effort"
            )
        plan = recipe
    else:
        level = efforts.DEFAULT if effort is None else effort
        if cache is not None:
            recipe = replace(get_recipe(recipe) if isinstance(recipe, str) else recipe, kv_cache=cache)
        plan = make_plan(
            model, recipe, include=include, exclude=exclude, lm_head=lm_head, solver=solver, effort=level, run=run
        )
    plan = set_guard_and_observer(plan, guard, observer)
    quantized = solve_plan(model, plan, data, tokenizer=tokenizer, device=device, progress=progress)
    attach(model, quantized.plan)
    return quantized


def _check_data(data: torch.Tensor | Inputs | None) -> None:
    if data is None or isinstance(data, Inputs):
        return
    if not len(data) or not (data.is_floating_point() or data.dim() == 2):
        raise UserError(
            f"data is {list(data.shape)}; expected token ids [rows, seqlen], or inputs of the model [rows, …]"
        )
