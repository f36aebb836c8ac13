"""`solve_each_group` solves every group in every format, on the inputs of the original model.

Rounding to nearest does not predict a solver such as GPTQ, which removes nine tenths of the error in some groups and a
third in others. So where formats are chosen for such a solver, scores and measurements use weights that it has solved.
The formats of the layers before a group are not decided yet, so each group gets the original model's inputs here;
quantization later solves it again, on the inputs that it really gets.

    y = Q(x / s) · Q(W diag(s))ᵀ        s from the solver's transforms, such as AWQ's; each format has its own

Only scaling, rounding and the low-rank branch of a candidate are applied:
y = Q(x / s) · Q(W diag(s) − B A)ᵀ + (x / s) · (B A)ᵀ. A rotation, a reconstruction or a branch in the solver's own name
lowers the error of every format and is left out.

All second moments at once would be larger than the model, so groups are solved in parts that fit, each with a forward
pass over the text that ends behind the last group of the part.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.sensitivity.table import Candidate
from quant.calibration.session import Session
from quant.calibration.solvers.interfaces import SAMPLED_TOKENS, GroupInputs, sampled
from quant.calibration.solvers.lowrank import Branch, take_branches
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats, MomentSum, round_activation, rows_of, static_input_scale
from quant.calibration.walk.collect import watch_inputs
from quant.formats.tensor import BlockScaledTensor, moved
from quant.recipes.blocks import Stop
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan
from quant.recipes.solver_names import with_branch

_BATCH_TOKENS = 2048
# Bytes of second moments that are held at a time, by type of device.
_MOMENTS = {"cpu": 1 << 30, "cuda": 8 << 30}

Key = tuple[str, str]
"""Names of a group and of a candidate."""


@dataclass(frozen=True, eq=False)
class GroupSolution:
    """A group solved in one format."""

    weights: Mapping[str, BlockScaledTensor]  # codes and scales by layer, of the weight times `divisor`
    divisor: Tensor | None = None  # s, by which the input is divided, `[in]`; None if it is not
    input_scale: Tensor | None = None
    # the branches by layer, A `[rank, in]` and B `[out, rank]`, which take the divided input unrounded
    branches: Mapping[str, Branch] = field(default_factory=dict)


def solve_each_group(
    model: nn.Module, groups: Mapping[str, Sequence[LayerPlan]], allowed: Mapping[str, Sequence[Candidate]],
    rows: Tensor, solver: str, stored: torch.dtype, session: Session, home: torch.device | None = None,
) -> dict[Key, GroupSolution]:  # fmt: skip
    """Solves every group in every format that is allowed for it; without a solver from data, only with branches.

    Fused experts, formats that the solver's rounding does not know, and groups that no token reaches are left out.
    `rows` are where the model runs; solutions are kept at `home`, or where they are solved.
    """
    pipeline = get_pipeline(solver)
    batches = rows.split(max(_BATCH_TOKENS // rows.shape[1], 1))
    needed = {
        group: [
            c
            for c in allowed[group]
            if c.weight is not None and pipeline.rounding.supports(c.weight) and (c.rank or pipeline.needs_data)
        ]
        for group, members in groups.items()
        if all(layer.kind == LayerKind.LINEAR for layer in members)
    }
    needed = {group: choices for group, choices in needed.items() if choices}
    solutions: dict[Key, GroupSolution] = {}
    done = 0
    for part in _parts(groups, needed, rows.device.type):
        # Members of a group share their input, so the first one is watched for all.
        watched = {groups[group][0].name: group for group in part}
        inputs = _Inputs(keep=bool(pipeline.transforms), every=max(rows.numel() // SAMPLED_TOKENS, 1))
        if pipeline.transforms or any(c.activation is not None for choices in part.values() for c in choices):
            _watch(model, watched, batches, inputs.add)
        works = {}
        for group, choices in part.items():
            weights = {m.name: model.get_parameter(m.tensor_name).detach() for m in groups[group]}
            works[group] = [_Work(c, weights, solver, stored, rows.device, inputs, group) for c in choices]
        if any(work.pipeline.needs_moment for choices in works.values() for work in choices):
            _watch(model, watched, batches, partial(_add, works))
        for group, of_group in works.items():
            for work in of_group:
                solution = work.solve()
                if solution is not None:
                    solutions[group, work.candidate.name] = solution if home is None else moved(solution, home)
            of_group.clear()  # frees the second moments
            done += 1
            session.report("alone", done, len(needed))
    return solutions


def digest_of(solutions: Mapping[Key, GroupSolution]) -> str:
    """Returns SHA-256 of some scales of each solution, a part of the key of sensitivity tables."""
    digest = hashlib.sha256()
    for key, solution in sorted(solutions.items(), key=lambda item: item[0]):
        digest.update(repr(key).encode())
        for weight in solution.weights.values():
            # 64 scales of each weight distinguish solutions.
            scale = weight.scale.flatten()
            digest.update(scale[:: max(len(scale) // 64, 1)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _parts(
    groups: Mapping[str, Sequence[LayerPlan]], needed: Mapping[str, Sequence[Candidate]], device_type: str
) -> list[dict[str, Sequence[Candidate]]]:
    """Returns groups whose second moments fit together, in model order."""
    parts: list[dict[str, Sequence[Candidate]]] = [{}]
    part_bytes = 0
    for group, choices in needed.items():
        nbytes = 4 * groups[group][0].shape[-1] ** 2 * len(choices)  # FP32 [in, in] for each format
        if parts[-1] and part_bytes + nbytes > _MOMENTS.get(device_type, _MOMENTS["cpu"]):
            parts.append({})
            part_bytes = 0
        parts[-1][group] = choices
        part_bytes += nbytes
    return parts


def _watch(
    model: nn.Module, names: Mapping[str, str], batches: Sequence[Tensor], add: Callable[[str, Tensor, int], None]
) -> None:
    """Calls `add(group, input [tokens, in], rows)` for the inputs of layers; passes end at the last layer."""
    calls: Counter[str] = Counter()
    last: str | None = None

    def observe(name: str, x: Tensor) -> None:
        calls[name] += 1
        add(names[name], x.detach().reshape(-1, x.shape[-1]).float(), rows_of(x))
        if name == last:
            raise Stop

    for i, batch in enumerate(batches):
        with torch.no_grad(), fast_matmul(), watch_inputs(model, list(names), observe), suppress(Stop):
            model(batch)
        # The order of layers is known after one whole pass, if each layer is called once.
        if i == 0 and len(calls) == len(names) and set(calls.values()) == {1}:
            last = next(reversed(calls))


class _Inputs:
    """Input statistics of groups, from which transforms and static scales are chosen."""

    def __init__(self, keep: bool, every: int) -> None:
        self.keep, self.every = keep, every
        self.sample: dict[str, list[Tensor]] = {}
        self.total: dict[str, Tensor] = {}
        self.amax: dict[str, Tensor] = {}
        self.tokens: Counter[str] = Counter()

    def add(self, group: str, x: Tensor, rows: int) -> None:
        """Adds one call of a group; the memory does not grow with the number of rows."""
        if not len(x):
            return
        magnitude = x.abs()
        amax, total = magnitude.amax(0), magnitude.sum(0)
        self.amax[group] = torch.maximum(self.amax[group], amax) if group in self.amax else amax
        self.total[group] = self.total[group] + total if group in self.total else total
        self.tokens[group] += len(x)
        if self.keep:
            # A copy: a view would keep every token of every layer alive.
            sample = self.sample.setdefault(group, [])
            sample.append(sampled(x, self.every, len(sample)).clone())


class _Work:
    """One group in one format: its input scale, and the second moment of the scaled and rounded input."""

    def __init__(
        self, candidate: Candidate, weights: Mapping[str, Tensor], solver: str, stored: torch.dtype,
        device: torch.device, inputs: _Inputs, group: str,
    ) -> None:  # fmt: skip
        self.candidate, self.weights, self.stored, self.device = candidate, weights, stored, device
        self.pipeline = get_pipeline(with_branch(solver, candidate.rank) if candidate.rank else solver)
        self.divisor = self.input_scale = None
        self.moment = MomentSum()
        # A solver that works from one pass over the original inputs sees them unrounded.
        self.activation = None if self.pipeline.at_once else candidate.activation
        if self.pipeline.transforms and group in inputs.tokens:
            mean = inputs.total[group] / inputs.tokens[group]
            statistics = GroupInputs(torch.cat(inputs.sample[group]), mean, inputs.amax[group])
            weight = torch.cat([w.to(device).float() for w in weights.values()])
            divisor = torch.ones_like(statistics.amax)
            # Transforms follow each other: each sees the weight and the input that earlier transforms have scaled.
            for transform in self.pipeline.transforms:
                formats = candidate.format_for(weight.shape[-1]), candidate.activation
                divisor = divisor * transform(weight * divisor, statistics.divided(divisor), *formats, None)
            self.divisor = divisor
        if candidate.activation is not None and group in inputs.amax:
            amax = inputs.amax[group] if self.divisor is None else inputs.amax[group] / self.divisor
            self.input_scale = static_input_scale(amax.amax(), candidate.activation, stored)

    def solve(self) -> GroupSolution | None:
        """Returns the group solved in the format; None without statistics of its input."""
        stats: LayerStats | None = self.moment.stats()
        # AWQ with plain rounding needs the divisor and no second moment.
        if stats is None and (self.pipeline.needs_moment or self.divisor is None):
            return None
        weights = {name: w.to(self.device) for name, w in self.weights.items()}
        weights = {name: w.float() if self.divisor is None else w * self.divisor for name, w in weights.items()}
        branches: dict[str, Branch] = {}
        if self.candidate.rank:
            assert stats is not None
            weights, branches, stats = take_branches(weights, stats, self.candidate.rank, self.stored)
        format = self.candidate.format_for(next(iter(weights.values())).shape[-1])
        solved = solve_group(weights, dict.fromkeys(weights, stats), format, self.pipeline.rounding, self.stored)
        return GroupSolution(solved, self.divisor, self.input_scale, branches)


def _add(works: Mapping[str, Sequence[_Work]], group: str, x: Tensor, rows: int) -> None:
    """Adds one call of a group to its second moments; formats that leave the input unchanged share one."""
    unchanged: MomentSum | None = None
    for work in works[group]:
        if work.activation is None and work.divisor is None:
            if unchanged is None:
                unchanged = work.moment
                unchanged.add(x, rows=rows)
            work.moment = unchanged
            continue
        divided = x if work.divisor is None else x / work.divisor
        rounded = round_activation(divided, work.activation, work.input_scale)
        # Σ (x_q − x)² by channel: a branch takes the input unrounded and so also corrects the input's rounding.
        noise = (rounded - divided).float().square().sum(0) if work.candidate.rank and work.activation else None
        work.moment.add(rounded, rows=rows, noise=noise)
