"""`score_groups` scores every fusion group in every format, in one of three ways, the cheapest first.

    output   Σ ‖Y_q − Y‖² / Σ ‖Y‖²                one forward pass; how wrong the layer's own output gets
    fisher   ½ Σ_tokens (∂L/∂Y · (Y_q − Y))²      one forward and one backward pass for all groups and formats
    kl       KL(base‖model with this group alone quantized), measured: a forward pass for each group and format

`fisher` is the second-order expansion of what `kl` measures, where L is the likelihood of a token that the model
itself proposes (see `divergence`) and errors of different tokens are taken to be independent; for
embeddings, which average tokens, the square is that of the sum over a row. With Y = x Wᵀ and Y_q = x_q W_qᵀ, a
token's term is

    ∂L/∂Y · (Y_q − Y) = (∂L/∂Y · (W_q − W)) · x_q + (∂L/∂Y · W) · (x_q − x)

and for a branch (see `switchable_model`) ∂L/∂Y · ((x − x_q) (B A)ᵀ) besides, so neither output is ever formed: a format
costs one more product with the output gradient, while the backward pass is at that layer anyway. Members of a group are
added up before the square, for they err together.

`kl` runs the model from the group's block on, and multiplies only what changed; see `baseline`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.linalg import vecdot

from quant.calibration.blocks import removing, stored_dtype
from quant.calibration.progress import Progress, reporter
from quant.calibration.ranks import rank_and_world
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.candidates import KEPT, Candidate
from quant.calibration.sensitivity.divergence import Divergence, NotFinite, divergence_of, finite, finite_sum
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key, digest_of
from quant.calibration.sensitivity.switchable_layer import LayerGradient, SwitchableLayer, same_tensor
from quant.calibration.sensitivity.switchable_model import SwitchableModel, measure_amax, recomputed
from quant.calibration.sensitivity.table import METHODS, UNITS, GroupScores, Sensitivity
from quant.calibration.sensitivity.work_units import Result, remove_parts, run_units, total
from quant.recipes.plan import LayerPlan

_ACTIVATION_BYTES = 2 << 30

Allowed = Mapping[str, Sequence[Candidate]]


def score_groups(
    model: nn.Module,
    groups: Mapping[str, Sequence[LayerPlan]],
    allowed: Allowed,
    rows: torch.Tensor,
    *,
    method: str = "fisher",
    solver: str = "rtn",
    solutions: Mapping[Key, GroupSolution] | None = None,
    dtype: torch.dtype | None = torch.float32,
    seed: int = 0,
    amax: Mapping[str, torch.Tensor] | None = None,
    path: Path | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Scores of every group in every format that is allowed for it.

    Args:
        model: called as `model(rows)`; restored afterwards.
        groups: layers by fusion group.
        allowed: formats by group; `keep` needs no mention.
        rows: token ids, int64 `[rows, seqlen]`.
        method: "kl", "fisher" or "output".
        solver: rounds the weights meanwhile; one that needs no data.
        solutions: weights that another solver has rounded; see `group_solutions`.
        dtype: what 16-bit tensors are widened to meanwhile; None leaves them.
        seed: of the tokens and directions that `fisher` draws.
        amax: largest input magnitude of each layer, as `measure_amax` gives it; None measures it on `rows`.
        path: where the table is kept: read if it is there and was made from the same, and resumed after an
            interruption. None keeps nothing.
        device: where the model runs, see `SwitchableModel`; None is where it is.
        progress: called as `progress(stage, done, total)`.

    Raises:
        ValueError: unknown method, or a group that no token reached.
        NotFinite: a score is NaN or infinite; the group and its format, or the row and token are named.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; known methods: {', '.join(METHODS)}")
    started = time.perf_counter()
    ranges = None if amax is None else {name: float(value) for name, value in amax.items()}
    made = digest_of(solutions) if solutions else None
    key = _key(model, groups, allowed, rows, method, solver, dtype, seed, ranges, *([made] if made else []))
    if path is not None and path.exists() and (found := Sensitivity.load(path)).key == key:
        remove_parts(path)  # of a run that was stopped when its table was written
        return found
    candidates = {c.name: c for choices in allowed.values() for c in choices if c.name != KEPT.name}
    report = reporter(progress, "calibrate")
    stored = stored_dtype(model)
    divergence = divergence_of(model, rows)
    if amax is None:
        amax = measure_amax(model, groups, candidates, rows, report, device)
    switchable = SwitchableModel(
        model, groups, candidates, amax, solver, stored, solutions or {}, device=device, dtype=dtype
    )
    with switchable.ready():
        units = _UNITS[method](switchable, allowed, rows.to(device), divergence, seed)
        results = run_units(units.names, units.work, key=key, path=path, progress=reporter(progress, "score"))
    sums = units.finish(total(results))
    silent = [name for name in groups if name not in sums and allowed[name]]
    if method == "fisher":
        # Called, for ranges were measured, but nothing that is compared depends on it, as on a classifier's pooler.
        sums |= {name: {c.name: 0.0 for c in allowed[name]} for name in silent}
    elif silent:
        raise ValueError(f"{silent[0]}: never called on the calibration text ({len(silent)} such groups)")
    table = Sensitivity(
        method=method,
        formats=(*candidates, KEPT.name),
        unit=_unit(method, divergence),
        rows=rows.shape[0],
        seqlen=rows.shape[1],
        groups=tuple(_entry(name, members, allowed[name], sums.get(name, {})) for name, members in groups.items()),
        key=key,
        seconds=time.perf_counter() - started,
    )
    if path is not None:
        if rank_and_world()[0] == 0:
            table.save(path)
        remove_parts(path)
    return table


@dataclass
class _Method:
    """What methods share: the model, what is scored, and one unit of work for each row."""

    switchable: SwitchableModel
    allowed: Allowed
    rows: torch.Tensor
    divergence: Divergence
    seed: int

    def __post_init__(self) -> None:
        self.names = [f"row {i}" for i in range(len(self.rows))]

    def work(self, name: str) -> Result:
        """Sums of one unit, by group and format."""
        raise NotImplementedError

    def finish(self, sums: Result) -> Result:
        """Scores from the sums over all units."""
        return sums


class _Fisher(_Method):
    """One unit is one row: a forward and a backward pass for each probe."""

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        row = self.rows[index : index + 1]
        self.switchable.set({})
        found: dict[str, Result] = {}
        for probe in range(self.divergence.probes):
            products = TokenProducts(self.switchable, self.allowed)
            with observed(self.switchable, products.observe, row.numel()):
                self.divergence.probe(row, generator, index)
            if self.divergence.by_token:
                found[str(probe)] = products.squares()
            else:
                sums = products.sums()
                found[str(probe)] = {g: {c: v * v for c, v in scores.items()} for g, scores in sums.items()}
        return total(found)

    def finish(self, sums: Result) -> Result:
        count = self.divergence.count(self.rows) * self.divergence.probes
        return {group: {c: 0.5 * v / count for c, v in scores.items()} for group, scores in sums.items()}


class TokenProducts:
    """∂L/∂Y · (Y_q − Y) of each token, by group and format, summed over the members of the group.

    Members share their input, and one follows the other in a backward pass; another input is another call.
    """

    def __init__(self, switchable: SwitchableModel, allowed: Allowed) -> None:
        self.switchable, self.allowed = switchable, allowed
        self.group = ""
        self.input: torch.Tensor | None = None
        self.products: dict[str, torch.Tensor] = {}
        self.square: Result = {}
        self.linear: Result = {}

    def observe(self, layer: SwitchableLayer, seen: LayerGradient) -> None:
        """Adds one call of a layer."""
        group, switchable = layer.group, self.switchable
        if self.group != group or not same_tensor(self.input, seen.x):
            self._flush()
            self.group, self.input = group, seen.x
        now = switchable.current(group)
        x_now = switchable.round_input(group, seen.x, now)
        for candidate in {c.name: c for c in (*self.allowed[group], KEPT)}.values():
            if candidate.name == now.name:
                continue
            x = switchable.round_input(group, seen.x, candidate)
            product = vecdot(seen.back, x - x_now)
            change = switchable.change(layer, candidate, seen.index)
            if change is not None:
                product = product + vecdot((seen.gradient.to(change.dtype) @ change).to(x.dtype), x)
            for each, rounded, sign in ((candidate, x, 1), (now, x_now, -1)):
                beside = switchable.beside(layer, each, seen.x, rounded)
                if beside is not None:
                    product = product + sign * vecdot(seen.gradient, beside)
            self.products[candidate.name] = self.products.get(candidate.name, 0.0) + product.flatten()

    def squares(self) -> Result:
        """Σ over tokens of the squared products."""
        self._flush()
        return self.square

    def sums(self) -> Result:
        """Σ over tokens of the products: what a change adds to the loss, to first order."""
        self._flush()
        return self.linear

    def _flush(self) -> None:
        for name, product in self.products.items():
            place = partial("{}, token {}".format, f"{self.group} in {name}")
            for sums, value in ((self.square, product.square()), (self.linear, product)):
                into = sums.setdefault(self.group, {})
                into[name] = into.get(name, 0.0) + finite_sum(value, place, "its score")
        self.products, self.input = {}, None
        self.switchable.forget_inputs()


class _Output(_Method):
    """One unit is one row: a forward pass in which every layer also computes its output in each format."""

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        sums: Result = {}

        def hook(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> None:
            assert isinstance(module, SwitchableLayer)
            into = sums.setdefault(module.group, {"": 0.0})
            layer = module.plan.name
            into[""] += finite(float(out.double().square().sum()), f"{layer} in 16 bit", "its output")
            which = args[1] if len(args) > 1 else None
            for candidate in self.allowed[module.group]:
                if candidate.weight is None:
                    continue
                weight = self.switchable.dense(module, candidate, which).to(out.dtype)
                x = self.switchable.round_input(module.group, args[0], candidate)
                error = torch.nn.functional.linear(x, weight, module.bias) - out
                beside = self.switchable.beside(module, candidate, args[0], x)
                error = error if beside is None else error + beside
                square = finite(float(error.double().square().sum()), f"{layer} in {candidate.name}", "its output")
                into[candidate.name] = into.get(candidate.name, 0.0) + square

        self.switchable.set({})
        hooks = (layer.register_forward_hook(hook) for layer in self.switchable.layers.values())
        try:
            with torch.no_grad(), removing(hooks):
                self.switchable.model(self.rows[index : index + 1])
        finally:
            self.switchable.forget_inputs()
        return sums

    def finish(self, sums: Result) -> Result:
        return {
            group: {name: value / scores[""] if scores[""] else 0.0 for name, value in scores.items() if name}
            for group, scores in sums.items()
        }


class _Kl(_Method):
    """One unit is one block: each of its groups in each format, from the block to the end of the model."""

    def __post_init__(self) -> None:
        self.baseline = Baseline(self.switchable, self.divergence, self.rows)
        self.groups: dict[str, list[str]] = {}
        for group in self.switchable.groups:
            block = next((block for block in self.baseline.chain if group.startswith(f"{block}.")), "")
            self.groups.setdefault(f"block {block}" if block else "rest", []).append(group)
        self.names = list(self.groups)

    def work(self, name: str) -> Result:
        if self.baseline.choice is None:
            self.baseline.start({})
        return {
            group: {c.name: self._loss(group, c.name) for c in self.allowed[group] if c.weight is not None}
            for group in self.groups[name]
        }

    def _loss(self, group: str, format: str) -> float:
        try:
            return self.baseline.loss({group: format})
        except NotFinite as error:
            raise NotFinite(f"{group} in {format}: {error}") from None


@contextmanager
def observed(switchable: SwitchableModel, observe: Callable[..., None], tokens: int) -> Iterator[None]:
    """While open, backward passes over `tokens` tokens show every layer's input and output gradient.

    Where what autograd would remember of all blocks is much, it remembers their inputs and runs each block again.
    """
    features = sum(sum(layer.plan.shape[-2:]) * layer.original.dtype.itemsize for layer in switchable.layers.values())
    names = switchable.blocks if 2 * tokens * features > _ACTIVATION_BYTES else []
    switchable.observe = observe
    try:
        with recomputed(switchable.model, names):
            yield
    finally:
        switchable.observe = None


_UNITS: dict[str, type[_Method]] = {"fisher": _Fisher, "kl": _Kl, "output": _Output}


def _unit(method: str, divergence: Divergence) -> str:
    if method == "output":
        return UNITS["output"]
    return divergence.unit if method == "kl" else f"second-order estimate; {divergence.unit}"


def _entry(
    name: str, members: Sequence[LayerPlan], allowed: Sequence[Candidate], scores: Mapping[str, float]
) -> GroupScores:
    numel = sum(layer.numel for layer in members)
    choices = [*(c for c in allowed if c.weight is not None), KEPT]
    nbytes = {c.name: sum(c.applied(layer).nbytes for layer in members) for c in choices}
    return GroupScores(
        name=name,
        layers=tuple(layer.name for layer in members),
        numel=numel,
        scores={c.name: scores[c.name] for c in choices if c.weight is not None} | {KEPT.name: 0.0},
        bits={c: 8 * n / numel for c, n in nbytes.items()},
        bytes=nbytes,
    )


def _key(
    model: nn.Module,
    groups: Mapping[str, Sequence[LayerPlan]],
    allowed: Allowed,
    rows: torch.Tensor,
    *settings: Any,
) -> str:
    """SHA-256 over all that the scores depend on; of each weight, its shape and a few of its values."""
    digest = hashlib.sha256(repr(settings).encode())
    for name, members in groups.items():
        digest.update(repr((name, [(c.name, c.weight, c.activation) for c in allowed[name]])).encode())
        for layer in members:
            owner: Any = attrgetter(layer.name)(model)
            weight: Any = owner.weight if isinstance(owner, nn.Module) else owner
            flat = weight.detach().flatten()
            some = flat[:: max(flat.numel() // 256, 1)].float().cpu().contiguous()
            digest.update(repr((layer.name, tuple(weight.shape))).encode() + some.numpy().tobytes())
    digest.update(rows.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
