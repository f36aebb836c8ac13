"""`choose_transform` tries the transforms that cost nothing at run time on a model, and keeps the one that loses least.

Which transform suits inputs in four bits differs from model to model, so efforts 2 and 3 compare, on calibration rows:

    gptq                   no transform
    awq:merge+gptq         input scales, where the module before takes them up: the default
    rotation:merge+gptq    Hadamard blocks on the residual stream and within heads, where the model lets them pass

Each is tried on the first `BLOCKS` blocks alone: with the embedding before them, and the norm and head behind, they
are a small language model. Its blocks are solved on some rows, and its loss is KL(original‖quantized) at the logits, on
rows that the solver has not seen. The later blocks are taken out of the model meanwhile, so that a trial neither reads
nor copies them; everything is put back after it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.calibration.evaluating import prepared, without_cache
from quant.calibration.outputs.logits import Logits
from quant.calibration.ranks import from_first
from quant.calibration.session import Session, Store, device_of
from quant.calibration.texts.rows import trial_rows
from quant.calibration.walk.expected_time import expected_time, time_of_rows
from quant.calibration.walk.solve import solve_plan
from quant.calibration.walk.undo import restored
from quant.recipes.blocks import block_names
from quant.recipes.layers import LayerKind, find_layers, output_head
from quant.recipes.plan import LayerPlan, Plan

BLOCKS = 2  # that a trial solves
ROWS, HELD_OUT = 8, 4  # calibration rows that a trial solves on and is judged by
MARGIN = 0.01  # share of the default's loss by which another must be better: less is a difference between rows
CHOICE = "transform"
"""Key of the provenance: the solver that was taken, and what each one lost, or why none was compared."""
DEFAULT, TRIED, _ROUNDING = "awq:merge+", ("", "awq:merge+", "rotation:merge+"), "gptq"


def open_layers(plan: Plan) -> list[LayerPlan]:
    """Returns the layers whose transform is to be chosen: inputs in four bits, and a solver with the default one."""
    linears = [each for each in plan.quantized if each.kind == LayerKind.LINEAR and each.solver.startswith(DEFAULT)]
    return [layer for layer in linears if layer.activation is not None and layer.activation.element.bits == 4]


def choose_transform(model: nn.Module, plan: Plan, data: Any, session: Session) -> Plan:
    """Returns `plan` with the transform that loses least on `model`, and the trials in its provenance.

    A plan without `open_layers` comes back as it is. Where nothing can be compared, the default stays, and the
    provenance says why. A run that is resumed takes the losses that it had.
    """
    layers = open_layers(plan)
    if not layers:
        return plan
    why_not, stored = _why_not(model, plan, data), session.store.get(CHOICE)
    losses: dict[str, float] = {} if stored is None else stored.record
    if why_not is None and stored is None:
        with restored(model):
            why_not = _cut_behind_first_blocks(model, plan, data)
            if why_not is None:
                measured = _losses(model, plan, data, session)
                losses = from_first(lambda: measured)
                session.store.put(CHOICE, {}, losses)
    rounding = layers[0].solver.removeprefix(DEFAULT)
    if why_not is not None:
        record: dict[str, Any] = {"solver": DEFAULT + rounding, "why": why_not}
        return replace(plan, provenance={**plan.provenance, CHOICE: record})
    best = min(TRIED, key=losses.__getitem__)
    # Where no module takes a scale up, the default is the same as none, and is not worth its name.
    keeps = losses[best] > (1 - MARGIN) * losses[DEFAULT] and losses[""] != losses[DEFAULT]
    taken = DEFAULT if keeps else best
    record = {
        "solver": taken + rounding,
        "lost": {prefix + _ROUNDING: float(f"{loss:.3g}") for prefix, loss in losses.items()},
        "on": f"{HELD_OUT} held-out rows behind the first {len(_first_blocks(model, plan))} blocks, KL in nats",
    }
    provenance = {**plan.provenance, CHOICE: record}
    if isinstance(effort := provenance.get("effort"), dict) and effort.get("solver") == DEFAULT + rounding:
        provenance["effort"] = {**effort, "solver": taken + rounding}
    plan = plan.replace_layers(replace(layer, solver=taken + layer.solver.removeprefix(DEFAULT)) for layer in layers)
    return replace(plan, provenance=provenance)


def expected_choice(model: nn.Module, plan: Plan, session: Session, rows: int, seqlen: int) -> float:
    """Returns the seconds in which `choose_transform` tries all transforms on some of `rows` calibration rows."""
    if not open_layers(plan) or rows < ROWS + HELD_OUT or output_head(model) is None:
        return 0.0
    first = tuple(f"{block}." for block in _first_blocks(model, plan))
    trial = trial_plan(model, plan)
    solving = expected_time(model, trial, session, rows=ROWS, seqlen=seqlen).solving
    inside = replace(plan, layers=tuple(x for x in plan.layers if x.name.startswith(first) or x.kind == LayerKind.HEAD))
    return len(TRIED) * solving + time_of_rows(model, inside, session, HELD_OUT * (len(TRIED) + 1), seqlen)


def trial_plan(model: nn.Module, plan: Plan, prefix: str = DEFAULT) -> Plan:
    """Returns the plan of a trial: the first blocks of `model` as planned, under another transform and `gptq`.

    `kfac` would need gradients of the whole model.
    """
    first = tuple(f"{block}." for block in _first_blocks(model, plan))
    names = {layer.name for layer in open_layers(plan)}

    def tried(layer: LayerPlan) -> LayerPlan:
        if not layer.name.startswith(first):
            return replace(layer, weight=None, activation=None)
        return replace(layer, solver=prefix + _ROUNDING) if layer.name in names else layer

    return Plan(tuple(map(tried, plan.layers)), observer=plan.observer)


def _first_blocks(model: nn.Module, plan: Plan) -> list[str]:
    """Returns the first blocks with layers whose transform is to be chosen; a tower in front of them has none."""
    names = [layer.name for layer in open_layers(plan)]
    return [block for block in block_names(model) if any(name.startswith(f"{block}.") for name in names)][:BLOCKS]


def _why_not(model: nn.Module, plan: Plan, data: Any) -> str | None:
    """Returns why transforms cannot be compared on a model and its data; None if they can."""
    if output_head(model) is None or not _first_blocks(model, plan):
        return "the model has no blocks with a language model's head behind them"
    if not isinstance(data, Tensor) or data.is_floating_point():
        return "its calibration inputs are not rows of tokens"
    needed = ROWS + HELD_OUT
    return f"{len(data)} calibration rows, and it takes {needed} or more" if len(data) < needed else None


def _cut_behind_first_blocks(model: nn.Module, plan: Plan, data: Tensor) -> str | None:
    """Takes the other blocks out of their list, as `restored` undoes; returns why the rest does not run, or None."""
    *_, last = _first_blocks(model, plan)
    path, _, key = last.rpartition(".")
    children = [name for name, _ in model.get_submodule(path).named_children()]
    kept = children[: children.index(key) + 1]
    model.set_submodule(path, nn.ModuleList(model.get_submodule(f"{path}.{name}") for name in kept))
    model.eval()
    try:
        with torch.no_grad(), without_cache([getattr(model, "config", None)]):
            model(trial_rows(data).to(device_of(model)))
    except Exception as error:  # the model's own code, which may count on all of its blocks
        return f"its first blocks do not run alone ({' '.join(str(error).split())})"
    return None


def _losses(model: nn.Module, plan: Plan, data: Tensor, session: Session) -> dict[str, float]:
    """Returns what each transform loses on the first blocks, by its prefix."""
    # Rows of a mixture follow each other by kind of text. The seed is fixed: the same rows judge every run.
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0), device="cpu")
    held_out, rows = data[order[:HELD_OUT]], data[order[HELD_OUT : HELD_OUT + ROWS].sort()[0]]
    names = {layer.name for layer in find_layers(model)}
    session = replace(session, store=Store())  # the steps of a trial are not those of the run
    session.report("choose", 0, len(TRIED))
    original, losses = _Original(model, held_out, session), {}
    for number, prefix in enumerate(TRIED, 1):
        trial = trial_plan(model, plan, prefix)
        trial = replace(trial, layers=tuple(layer for layer in trial.layers if layer.name in names))
        with restored(model):
            solve_plan(model, trial, rows, replace(session, progress=None))
            losses[prefix] = original.divergence(model)
        session.report("choose", number, len(TRIED))
    return losses


class _Original:
    """The original model's predictions on held-out rows, kept as the inputs of its head.

    A merged rotation changes the head and its inputs together, so the weight of both is needed.
    """

    def __init__(self, model: nn.Module, rows: Tensor, session: Session) -> None:
        self.rows, self.session = rows, session
        head = output_head(model)
        assert head is not None
        # As stored, in 16 bit as a rule: it is widened slice by slice.
        self.weight, self.bias = head.get_parameter("weight").detach(), getattr(head, "bias", None)
        with torch.no_grad(), prepared(model, torch.float32, session):
            logits = Logits(model, output_head(model))
            self.hidden = [logits.hidden(row[None].to(self.device(model))) for row in rows]

    def device(self, model: nn.Module) -> torch.device:
        """Returns where a model runs that is prepared for the session."""
        return self.session.device or device_of(model)

    def divergence(self, model: nn.Module) -> float:
        """Returns KL(original‖model) of the next token, the mean over positions in nats."""
        total, positions = 0.0, 0
        with torch.no_grad(), prepared(model, torch.float32, self.session):
            logits = Logits(model, output_head(model))
            for row, before in zip(self.rows, self.hidden, strict=True):
                after = logits.hidden(row[None].to(self.device(model)))
                for part in logits.parts(after, with_gradient=False):
                    base = before[part]
                    if logits.split:
                        bias = None if self.bias is None else self.bias.to(base)
                        base = logits.capped(functional.linear(base, self.weight.to(base), bias))
                    logp = base.float().log_softmax(-1)
                    # 0 · ln 0 is 0, for tokens that a model rules out.
                    kl = (logp.exp() * (logp - logits.logp(after[part]))).masked_fill(logp == -torch.inf, 0.0)
                    total += float(kl.sum(dtype=torch.float64))
                positions += len(before)
        return total / positions
