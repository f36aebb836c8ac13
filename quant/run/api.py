"""`quant.quantize` builds the request of a run for a module in memory, and returns the quantized module.

Each step of a run is a public function too, which a training script can call by itself on any `nn.Module`.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from quant.base.errors import UserError
from quant.base.listener import Listener, Progress
from quant.base.torch_modes import in_own_modes
from quant.calibration.inputs import Inputs, inputs_of, recorded
from quant.calibration.layer_result import Quantized
from quant.calibration.session import Device
from quant.calibration.walk.undo import restored_on_error
from quant.recipes.callers_model import check_original, uncompiled, unwrapped
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.run.request import AllocationRequest, Request
from quant.run.run import run as start

_RECIPE = "nvfp4"


@in_own_modes
def quantize(
    model: nn.Module,
    recipe: str | Recipe | Plan = _RECIPE,
    data: Any = None,
    *,
    forward_loop: Callable[[nn.Module], Any] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    lm_head: str | None = None,
    kv_cache: str | None = None,
    attention: str | None = None,
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
    """Quantizes `model` in place, in evaluation mode; each module has its own mode back afterwards.

    After any exception, Ctrl-C included, the model is as it was: its original weights stay in memory until the end,
    next to the quantized ones. The command `quantize` reads them from files, and frees each block when it is solved.

    Args:
        model: any module; a transformers model needs nothing else. Wrappers of torch.compile, DDP and DataParallel are
            looked through: the result has the model inside. Adapters are to be merged before.
        recipe: a preset's name, which may end in `a16` for inputs in 16 bit (fp8a16); `WEIGHT@INPUT` such as nvfp4@fp8;
            a recipe, or a finished plan.
        data: calibration token ids, int64 `[rows, seqlen]`, for static activation scales and for solvers that look at
            inputs; for other models their inputs, such as images `[rows, 3, height, width]`, named tensors
            `{"input_features": …, "decoder_input_ids": …}` with a row for each call, or any iterable of calls, such as
            a DataLoader: each a tensor, a tuple of positional or a dict of keyword arguments; or a `forward_loop`. None
            takes 32 rows of 512 tokens, up to 512 rows on a GPU, where the plan needs any: text that a causal language
            model writes itself, and the samples that come with this package where there is a `tokenizer`.
        forward_loop: instead of `data`: `forward_loop(model)` calls the model on calibration inputs, without a KV
            cache.
        include: globs; if given, only layers that match one are quantized.
        exclude: globs of layers that stay in 16 bit.
        lm_head: format of the output head, whose inputs stay in 16 bit; replaces the recipe's.
        kv_cache: format of the KV cache, "fp8", "fp8_head" with a scale for each KV head, or "16bit"; replaces the
            recipe's.
        attention: format of attention's operands, "fp8", or "16bit"; replaces the recipe's.
        solver: replaces the recipe's.
        effort: 0 to 3, chooses a solver where neither `solver` nor the recipe names one; see
            `quant.recipes.solver_names`. None is 2 where there is data or the model writes some, and 1 where there is
            none. A budget chooses formats by rounding to nearest then, and solves the choice; a limit on the loss means
            effort 0.
        run: calls the model on any valid input, which is how fusion groups are found; needed where the model does not
            run on token ids and `data` is not given.
        guard: "LIMIT FORMAT …", such as "0.1 fp8_channel keep": a linear layer whose output on held-out calibration
            rows is off by more than the limit, relatively, gets the next format; replaces the recipe's.
        observer: key of `OBSERVERS`, how static activation scales are chosen; replaces the recipe's, which is absmax.
        bits: per weight, every scale counted; formats are then chosen layer by layer and `recipe` is not used. For
            other budgets and limits see `quant.calibration.allocation.allocate.allocate`, whose plan can be passed as
            `recipe`.
        max_kl: the same, for the smallest model whose measured KL to the original stays below; with `bits`, both hold,
            and it is an error if no choice of formats keeps both. A quarter of the data chooses the formats, and a
            quarter verifies them; its measurements are in the plan's provenance.
        formats: the formats to choose from, such as "nvfp4,fp8"; 16 bit always may.
        tokenizer: the tokenizer of the model, for calibration text where `data` is None.
        device: the device where everything is computed, "auto", "cpu", "cuda" or "cuda:N"; the model stays where it is,
            and its blocks are copied there one at a time, or all together where they fit. By default where the model
            is.
        progress: a function that is called as `progress(stage, done, total)`.

    Raises:
        ValueError: bad recipe, plan, glob, weight or data; the message names it and the way out.
    """
    # Names inside of DDP and torch.compile have prefixes, which would go into plan and checkpoint.
    model = unwrapped(model, "quantize")
    check_original(model, "quantize")  # before a forward loop runs
    if forward_loop is not None:
        if data is not None:
            raise UserError("data= and forward_loop= both give calibration inputs; pass one of them")
        data = recorded(model, forward_loop)
    elif data is not None and not isinstance(data, Tensor | Inputs):
        data = inputs_of(data, model)  # an iterable of calls, which is read once and kept
    budget = AllocationRequest(bits=bits, max_kl=max_kl, formats=formats)
    # Nobody named the default recipe, so it does not contradict a budget; another one does, and is refused.
    is_unnamed = budget != AllocationRequest() and recipe == _RECIPE
    request = Request(
        model, recipe=None if is_unnamed else recipe, data=data, budget=budget,
        include=include, exclude=exclude, lm_head=lm_head, kv_cache=kv_cache, attention=attention, solver=solver,
        effort=effort, run=run, guard=guard, observer=observer, tokenizer=tokenizer, device=device,
    )  # fmt: skip
    # Modules are replaced and hooked during the run; compiled code would be rebuilt at each of them.
    with restored_on_error(model), uncompiled(model):
        quantized = start(request, Listener(progress)).quantized
    # A run in memory always ends with a module; only runs of files end with a report.
    assert quantized is not None
    return quantized
