"""`score_groups` scores every fusion group in every format, by one of three methods, the cheapest first.

    output   Σ ‖Y_q − Y‖² / Σ ‖Y‖²                one forward pass; the relative error of the layer's own output
    fisher   ½ Σ_tokens (∂L/∂Y · (Y_q − Y))²      one forward and one backward pass for all groups and formats
    kl       KL(base‖model with only this group quantized), measured: a forward pass for each group and format

`fisher` is the second-order expansion of the KL that `kl` measures, where L is the likelihood of a token that the model
itself proposes (see `divergence`) and errors of different tokens are taken to be independent; for embeddings, which
average tokens, the sum over a row is squared. With Y = x Wᵀ and, in a format, Y_q = x_q W_qᵀ, a token's product is

    ∂L/∂Y · (Y_q − Y) = (∂L/∂Y · (W_q − W)) · x_q + (∂L/∂Y · W) · (x_q − x)

and for a branch (see `switchable_model`) ∂L/∂Y · ((x − x_q) (B A)ᵀ) besides, so neither output is ever formed: a format
costs one more product with the output gradient, while the backward pass is at that layer anyway. Members of a group are
added up before any square, because their errors reach the loss together.

`kl` runs the model from the group's block on, and multiplies only the changes; see `cached_run`.

Ranks share the work by units: rows, or blocks for `kl`. The result of a unit depends only on its name. Rank r of n does
the units r, r + n, r + 2n, …; then every rank gets all results and adds them up in the order of the names, so that sums
of floating-point numbers are the same, to the bit, on any number of ranks. After each unit a rank writes its results to
a file of its own; a run that is started again, on any number of ranks, reads all files and does the remaining units.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot

from quant.base.atomic import write_atomically
from quant.base.errors import known_names
from quant.base.json_files import read_json, typed
from quant.calibration.inputs import Inputs
from quant.calibration.ranks import gathered, rank_and_world, wait_for_all
from quant.calibration.sensitivity.divergence import (
    Divergence,
    Embeddings,
    NextToken,
    NotFinite,
    divergence_of,
    finite,
    finite_sum,
)
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key, digest_of
from quant.calibration.sensitivity.switchable_model import (
    CachedRun,
    FormatChoice,
    LayerGradient,
    SwitchableLayer,
    SwitchableModel,
    measure_amax,
    recomputed,
    same_tensor,
)
from quant.calibration.sensitivity.table import KEPT, UNITS, Candidate, GroupScores, Sensitivity
from quant.calibration.session import Session
from quant.recipes.blocks import all_arguments, removing, replaced, stored_dtype
from quant.recipes.plan import LayerPlan

Result = dict[str, dict[str, float]]
"""Sums by group and format."""


def run_units(
    names: Sequence[str], work: Callable[[str], Result], session: Session, *, key: str = "", path: Path | None = None
) -> dict[str, Result]:
    """Returns the results of all units by name; partial ones are written to files named after `path`, if given."""
    rank, world = session.rank, session.world
    # All ranks must start from the same results, or they would divide the other units differently: one rank may have
    # read the files before another wrote its first result.
    earlier = [_units_in(file, key) for file in _files_of_ranks(path)] if path else []
    done = _from_all({name: result for units in earlier for name, result in units.items()})
    names_of_rank = [name for name in names if name not in done][rank::world]
    own: dict[str, Result] = {}
    for count, name in enumerate(names_of_rank, 1):
        own[name] = work(name)
        # After each unit, with the results of earlier runs: a file of a rank is only ever written by that rank.
        if path is not None:
            file = path.with_name(f"{path.name}.part{rank}")
            write_atomically(file, json.dumps({"key": key, "units": {**_units_in(file, key), **own}}, allow_nan=False))
        session.report("score", len(names) - len(names_of_rank) + count, len(names))
    done = _from_all({**done, **own})
    return {name: done[name] for name in names}


def _from_all(own: dict[str, Result]) -> dict[str, Result]:
    return {name: result for part in gathered(own) for name, result in part.items()}


def total(results: dict[str, Result]) -> Result:
    """Returns the sum over units, in their order."""
    sums: Result = {}
    for result in results.values():
        for group, scores in result.items():
            group_sums = sums.setdefault(group, {})
            for name, value in scores.items():
                group_sums[name] = group_sums.get(name, 0.0) + value
    return sums


def remove_parts(path: Path) -> None:
    """Deletes, on the first rank, the files of partial results of `path`, once the whole table is written."""
    wait_for_all()
    if rank_and_world()[0] == 0:
        for file in _files_of_ranks(path):
            file.unlink(missing_ok=True)


def _files_of_ranks(path: Path) -> list[Path]:
    return sorted(path.parent.glob(f"{path.name}.part*")) if path.parent.is_dir() else []


def _units_in(file: Path, key: str) -> dict[str, Result]:
    try:
        held = read_json(file, "partial scores", lambda fields: typed(dict[str, Any], fields, "scores"))
        own: dict[str, Result] = typed(dict[str, Result], held.get("units"), "units")
    except (OSError, ValueError):  # a damaged file costs its units, not the run
        return {}
    return own if held.get("key") == key else {}


# Inputs of all layers of a batch that autograd may hold; above this, blocks are recomputed in the backward pass.
_ACTIVATION_BYTES = 2 << 30

Allowed = Mapping[str, Sequence[Candidate]]
"""The formats that each fusion group may take."""


class TokenProducts:
    """∂L/∂Y · (Y_q − Y) of each token, by group and format, summed over the members of the group.

    Members of a group share their input and follow each other in a backward pass. So a layer with another input begins
    a new call, and the sums over tokens of the call before are complete.
    """

    def __init__(self, formats: FormatChoice, allowed: Allowed, *, by_token: bool) -> None:
        self.formats, self.allowed, self.by_token = formats, allowed, by_token
        self.group = ""
        self.input: Tensor | None = None
        self.products: dict[str, Tensor] = {}
        self.sums: Result = {}

    def observe(self, layer: SwitchableLayer, call: LayerGradient) -> None:
        """Adds one call of a layer, which is in 16 bit."""
        group, formats = layer.group, self.formats
        if self.group != group or not same_tensor(self.input, call.x):
            self._flush()
            self.group, self.input = group, call.x
        for candidate in (c for c in self.allowed[group] if c.name != KEPT.name):
            x = formats.round_input(group, call.x, candidate)
            change = formats.difference(layer, candidate, call.index)
            product = vecdot(call.back, x - call.x) + vecdot((call.gradient.to(change.dtype) @ change).to(x.dtype), x)
            unrounded = formats.branch_output(layer, candidate, call.x, x)
            if unrounded is not None:
                product = product + vecdot(call.gradient, unrounded)
            self.products[candidate.name] = self.products.get(candidate.name, 0.0) + product.flatten()

    def squares(self) -> Result:
        """Returns the sum over tokens of the squared products, or the square of their sum, as errors of tokens do."""
        self._flush()
        if self.by_token:
            return self.sums
        return {group: {name: v * v for name, v in by_format.items()} for group, by_format in self.sums.items()}

    def _flush(self) -> None:
        for name, product in self.products.items():
            name_token = partial("{}, token {}".format, f"{self.group} in {name}")
            value = finite_sum(product.square() if self.by_token else product, name_token, "its score")
            by_format = self.sums.setdefault(self.group, {})
            by_format[name] = by_format.get(name, 0.0) + value
        self.products, self.input = {}, None
        self.formats.forget_inputs()


@contextmanager
def observed(switchable: SwitchableModel, observe: Callable[..., None], tokens: int) -> Iterator[None]:
    """Shows layers' inputs and gradients to `observe` in backward passes; blocks that are too large run again."""
    # Bytes of one token's inputs and outputs in all layers.
    features = sum(sum(layer.plan.shape[-2:]) * layer.original.dtype.itemsize for layer in switchable.layers.values())
    names = switchable.blocks if 2 * tokens * features > _ACTIVATION_BYTES else []
    with replaced([(switchable.formats, "observe", observe)]), recomputed(switchable.model, names):
        yield


@dataclass
class Method:
    """The model, the groups and formats to score, and the text; units of work are rows unless a method overrides it."""

    switchable: SwitchableModel
    allowed: Allowed
    rows: Tensor
    divergence: Divergence
    seed: int

    def __post_init__(self) -> None:
        self.names = [f"row {i}" for i in range(len(self.rows))]

    def work(self, name: str) -> Result:
        """Returns the sums of one unit, by group and format."""
        raise NotImplementedError

    def finish(self, sums: Result) -> Result:
        """Returns the scores from the sums over all units."""
        return sums


class FisherMethod(Method):
    """One unit is one row: a forward and a backward pass for each probe."""

    divergence: NextToken | Embeddings  # those that have one

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        # One generator a row: its draws do not depend on which rank scores which rows.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        row = self.rows[index : index + 1]
        self.switchable.formats.set({})
        squares: dict[str, Result] = {}
        for probe in range(self.divergence.probes):
            products = TokenProducts(self.switchable.formats, self.allowed, by_token=self.divergence.by_token)
            with observed(self.switchable, products.observe, row.numel()):
                self.divergence.probe(row, generator, index)
            squares[str(probe)] = products.squares()
        return total(squares)

    def finish(self, sums: Result) -> Result:
        # The mean over positions and probes of ½ (g · δ)².
        count = self.divergence.count(self.rows) * self.divergence.probes
        return {group: {c: 0.5 * v / count for c, v in scores.items()} for group, scores in sums.items()}


class OutputMethod(Method):
    """One unit is one row: a forward pass in which every layer also computes its output in each format."""

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        sums: Result = {}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
            assert isinstance(module, SwitchableLayer)
            args = all_arguments(args, kwargs)
            # The empty name holds Σ ‖Y‖², the denominator of every format's score.
            group_sums = sums.setdefault(module.group, {"": 0.0})
            layer = module.plan.name
            group_sums[""] += finite(float(out.double().square().sum()), f"{layer} in 16 bit", "its output")
            expert = args[1] if len(args) > 1 else None
            for candidate in self.allowed[module.group]:
                if candidate.weight is None:
                    continue
                weight = self.switchable.formats.dense(module, candidate, expert).to(out.dtype)
                x = self.switchable.formats.round_input(module.group, args[0], candidate)
                error = torch.nn.functional.linear(x, weight, module.bias) - out
                unrounded = self.switchable.formats.branch_output(module, candidate, args[0], x)
                error = error if unrounded is None else error + unrounded
                square = finite(float(error.double().square().sum()), f"{layer} in {candidate.name}", "its output")
                group_sums[candidate.name] = group_sums.get(candidate.name, 0.0) + square

        self.switchable.formats.set({})
        hooks = (layer.register_forward_hook(hook, with_kwargs=True) for layer in self.switchable.layers.values())
        try:
            with torch.no_grad(), removing(hooks):
                self.switchable.model(self.rows[index : index + 1])
        finally:
            self.switchable.formats.forget_inputs()
        return sums

    def finish(self, sums: Result) -> Result:
        return {
            group: {name: value / scores[""] if scores[""] else 0.0 for name, value in scores.items() if name}
            for group, scores in sums.items()
        }


class KlMethod(Method):
    """One unit is one block: each of its groups in each format, from the block to the end of the model."""

    def __post_init__(self) -> None:
        self.cached_run = CachedRun(self.switchable, self.divergence, self.rows)
        self.groups: dict[str, list[str]] = {}
        for group in self.switchable.groups:
            block = next((block for block in self.cached_run.chain if group.startswith(f"{block}.")), "")
            self.groups.setdefault(f"block {block}" if block else "rest", []).append(group)
        self.names = list(self.groups)

    def work(self, name: str) -> Result:
        if self.cached_run.choice is None:  # the run in 16 bit, once for all units of this rank
            self.cached_run.start({})
        sums: Result = {}
        for group in self.groups[name]:
            sums[group] = {}
            for candidate in (c for c in self.allowed[group] if c.weight is not None):
                try:
                    sums[group][candidate.name] = self.cached_run.loss({group: candidate.name})
                except NotFinite as error:
                    raise NotFinite(f"{group} in {candidate.name}: {error}") from None
        return sums


METHOD_CLASSES: dict[str, type[Method]] = {"fisher": FisherMethod, "kl": KlMethod, "output": OutputMethod}


@dataclass(frozen=True, eq=False)
class Scoring:
    """How groups are scored."""

    method: str = "fisher"
    solver: str = "rtn"
    solutions: Mapping[Key, GroupSolution] = field(default_factory=dict)
    dtype: torch.dtype | None = torch.float32  # dtype to which 16-bit tensors are widened for scoring; None leaves them

    def __post_init__(self) -> None:
        if self.method not in METHOD_CLASSES:
            raise ValueError(f"unknown method {self.method!r}; {known_names(self.method, METHOD_CLASSES, 'methods')}")


def score_groups(
    model: nn.Module, groups: Mapping[str, Sequence[LayerPlan]], allowed: Allowed, rows: Tensor, scoring: Scoring,
    session: Session, *, amax: Mapping[str, Tensor] | None = None, path: Path | None = None,
) -> Sensitivity:  # fmt: skip
    """Scores every group in every format that is allowed for it, on the ranges `amax` of inputs, or measured on `rows`.

    The file at `path`, if given, holds the table: it is read if it was made from the same model, text and settings, and
    resumed after an interruption.
    """
    started = time.perf_counter()
    # The settings that scores depend on; their order is part of the key in files of earlier runs.
    ranges = None if amax is None else {name: float(value) for name, value in amax.items()}
    settings = [scoring.method, scoring.solver, scoring.dtype, session.seed, ranges]
    key = _key(model, groups, allowed, rows, *settings, *([digest_of(scoring.solutions)] if scoring.solutions else []))
    if path is not None and path.exists() and (table := Sensitivity.load(path)).key == key:
        remove_parts(path)  # of a run that was stopped when its table was written
        return table
    candidates = {c.name: c for choices in allowed.values() for c in choices if c.name != KEPT.name}
    divergence, stored = divergence_of(model, rows), stored_dtype(model)
    # Static input scales come from these ranges, and every score depends on them.
    amax = measure_amax(model, groups, candidates, rows, session) if amax is None else amax
    switchable = SwitchableModel(
        model, groups, candidates, amax, scoring.solver, stored, scoring.solutions, session=session, dtype=scoring.dtype
    )
    with switchable.ready():
        method_class = METHOD_CLASSES[scoring.method]
        method = method_class(switchable, allowed, rows.to(session.device), divergence, session.seed)
        results = run_units(method.names, method.work, session, key=key, path=path)
    scores = method.finish(total(results))
    silent = [name for name in groups if name not in scores and allowed[name]]
    if scoring.method == "fisher":
        # They were called, because ranges were measured, but the output that is compared does not depend on them: the
        # pooler of a classifier that does not use it.
        scores |= {name: {c.name: 0.0 for c in allowed[name]} for name in silent}
    elif silent:
        raise ValueError(f"{silent[0]}: never called on the calibration text ({len(silent)} such groups)")
    entries = tuple(_entry(name, members, allowed[name], scores.get(name, {})) for name, members in groups.items())
    unit = UNITS["output"] if scoring.method == "output" else divergence.unit
    unit = f"second-order estimate; {unit}" if scoring.method == "fisher" else unit
    seconds = time.perf_counter() - started
    table = Sensitivity(scoring.method, (*candidates, KEPT.name), unit, len(rows), rows.shape[1], entries, key, seconds)
    if path is not None:
        if session.rank == 0:
            table.save(path)
        remove_parts(path)
    return table


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
    model: nn.Module, groups: Mapping[str, Sequence[LayerPlan]], allowed: Allowed, rows: Tensor, *settings: Any
) -> str:
    """Returns SHA-256 over everything that the scores depend on; of each weight, its shape and a few of its values."""
    # 256 values of each weight distinguish models, and hashing all would read 16 GB for an 8B model.
    digest = hashlib.sha256(repr(settings).encode())
    for name, members in groups.items():
        digest.update(repr((name, [(c.name, c.weight, c.activation) for c in allowed[name]])).encode())
        for layer in members:
            owner: Any = attrgetter(layer.name)(model)
            weight: Any = owner.weight if isinstance(owner, nn.Module) else owner
            flat = weight.detach().flatten()
            sample = flat[:: max(flat.numel() // 256, 1)].float().cpu().contiguous()
            digest.update(repr((layer.name, tuple(weight.shape))).encode() + sample.numpy().tobytes())
    for tensor in rows.tensors() if isinstance(rows, Inputs) else [rows]:
        # A timestep that diffusers expands to a batch of one is contiguous with a stride of 0, which no view takes.
        digest.update(tensor.cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
