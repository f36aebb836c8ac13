"""`kfac` rounds a weight for the loss of the whole model, not only for the output error of its own layer.

To second order, the KL divergence that errors E = W − Q of a layer cause is E's square under the Fisher matrix of the
model. Its Kronecker factors (K-FAC: Martens and Grosse, 2015; for rounding: YAQA, Tseng et al., arXiv 2505.22988) are

    M = mean of x xᵀ   over the layer's inputs,        A = mean of g gᵀ   over the gradients at its outputs,

and the loss is tr(A E M Eᵀ). With A = 1 it is GPTQ's, whose rows are independent. A couples them: an error of one
output can be made up for by others, and outputs that hardly affect the model may err more.

The solution of GPTQ is the start, and descent follows. Rows are revisited in `pieces`, each of rows far apart and with
the others fixed. Their errors shift the target of piece r to W_r + A_rr⁻¹ A_r,rest E_rest, and one sweep of GPTQ's
descent lowers its loss under M. Feeding errors forward to the rows of later pieces first, as GPTQ does over columns,
gained nothing on top of that (SmolLM2 in NVFP4, five texts) and took as long again.

Within a piece the rows are taken as independent though A couples them a little, so that a step of descent could raise
the loss. So the two solutions are compared by their loss in the end, and the better one stays.

A of many outputs would not fit in memory, nor be estimated well, so it consists of diagonal blocks of neighbouring
outputs (`outputs` of `LayerStats`): blocks of 256 do as well as whole matrices. Every piece has rows of all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from quant.base.parallel import in_parts
from quant.calibration.solvers.gptq import (
    Factor,
    FixedScales,
    Gptq,
    Rounding,
    by_input,
    corrected_weight,
    encoded,
    fixed_scales,
)
from quant.calibration.solvers.interfaces import required_stats
from quant.calibration.solvers.row_parallel import search_threads
from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.scaling import nonzero
from quant.formats.tensor import BlockScaledTensor


@dataclass(frozen=True)
class Kfac(Gptq):
    """Second-order rounding on both sides of a weight. See the module docstring.

    Attributes:
        pieces: the number of pieces that rows are divided into.
        output_damping: added to the diagonal of A, as a fraction of its mean.
    """

    pieces: int = 6
    output_damping: float = 0.1

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = required_stats(stats, name, "kfac")
        blocks = output_blocks(stats, len(weight))
        if not blocks:
            return super().__call__(weight, stats, format, global_scale=global_scale, name=name)
        factor = self.factor(stats, format, name)
        weight = corrected_weight(weight.float(), stats.drift, factor, stats.residual)
        fixed = fixed_scales(weight, format, global_scale, factor)
        return _TwoSided(self, weight, factor, blocks, format, global_scale, fixed).solve()


def output_blocks(stats: LayerStats, rows: int) -> list[Tensor]:
    """Returns the diagonal blocks of A, `[k, k]` each, whose sizes add up to the `rows` of the weight.

    The list is empty if there are no statistics of outputs.
    """
    return [] if stats.outputs is None else stats.outputs.blocks_of(rows)


@dataclass(frozen=True)
class _OutputBlock:
    """One diagonal block of A while rows are solved, its rows sorted by piece.

    Attributes:
        columns: the positions of its rows among the outputs, which are sorted by piece first, `[k]`.
        moment: A, damped, `[k, k]`.
        pieces: the columns of each piece r, and A_:r A_rr⁻¹ `[k, r]`: the equivalent in its rows of an error in any
            row.
    """

    columns: Tensor
    moment: Tensor
    pieces: list[tuple[Tensor, Tensor]]


class _TwoSided:
    """A weight while it is solved. Matrices are laid out `[in, out]`, outputs sorted by piece, then by block of A."""

    def __init__(
        self,
        solver: Kfac,
        weight: Tensor,
        factor: Factor,
        blocks: Sequence[Tensor],
        format: Format,
        global_scale: Tensor | None,
        fixed: FixedScales | None,
    ) -> None:
        self.solver, self.factor, self.format, self.global_scale, self.fixed = (
            solver, factor, format, global_scale, fixed,
        )  # fmt: skip
        pieces = min(solver.pieces, *map(len, blocks))
        starts = [sum(map(len, blocks[:index])) for index in range(len(blocks))]
        # Piece p of a block has its rows p, p + pieces, p + 2 pieces and so on.
        ends = [(start, start + len(block)) for start, block in zip(starts, blocks, strict=True)]
        parts = [
            [torch.arange(start + piece, stop, pieces, device="cpu") for start, stop in ends] for piece in range(pieces)
        ]
        order = torch.cat([rows for piece in parts for rows in piece])
        self.order, self.own_order = order.to(weight.device), order.argsort().to(weight.device)
        self.bounds = _bounds([sum(map(len, piece)) for piece in parts])
        self.outputs = []
        for index, (start, block) in enumerate(zip(starts, blocks, strict=True)):
            rows = torch.cat([piece[index] for piece in parts])
            within = (rows - start).to(block.device)
            moment = block[within][:, within]
            moment.diagonal().add_(solver.output_damping * nonzero(moment.diagonal().mean()))
            columns = self.own_order[rows.to(weight.device)]
            spans = [slice(*span) for span in pairwise(_bounds([len(piece[index]) for piece in parts]))]
            shifts = zip((columns[span] for span in spans), _shifts(moment, spans), strict=True)
            self.outputs.append(_OutputBlock(columns, moment, list(shifts)))
        self.target = by_input(weight, factor)[:, self.order]

    def solve(self) -> BlockScaledTensor:
        """Returns codes and scales."""
        start = self._rounding(slice(0, len(self.order)), self.target)
        self._run(start, lambda rows: start.feed_back(rows))
        for _ in range(self.solver.sweeps):
            self._run(start, lambda rows: start.descend(rows))
        values, scales = self._descended(start)
        # NaN compares false, so that GPTQ's solution stays there too.
        if not self._loss(self.target - values) <= self._loss(self.target - start.values):
            values, scales = start.values, start.scales
        values, scales = values[:, self.own_order], None if scales is None else scales[:, self.own_order]
        return encoded(values, scales, self.fixed, self.factor, self.format, self.global_scale)

    def _rounding(self, rows: slice, target: Tensor) -> Rounding:
        step = None if self.fixed is None else self.fixed.step[:, self.order[rows]]
        return Rounding(target, self.factor, self.format, self.global_scale, self.solver.shortlist, step)

    def _run(self, rounding: Rounding, work: Callable[[slice], None]) -> None:
        """Calls `work` with rows of `rounding`, which threads of a CPU share."""
        inputs, rows = rounding.target.shape
        in_parts(lambda start, stop: work(slice(start, stop)), rounding.target, rows, search_threads(rows, inputs))

    def _descended(self, start: Rounding) -> tuple[Tensor, Tensor | None]:
        """Returns values and scales after every piece of `start` was revisited with the others fixed."""
        errors = self.target - start.values
        pieces = []
        for index, (first, last) in enumerate(pairwise(self.bounds)):
            rows = slice(first, last)
            # The goal of each row: the values at which its error under A would be least without rounding.
            goal = start.values[:, rows].clone()
            for output in self.outputs:
                own, shift = output.pieces[index]
                goal[:, own - first] += errors[:, output.columns] @ shift
            piece = self._rounding(rows, goal)
            piece.values.copy_(start.values[:, rows])
            if piece.scales is not None and start.scales is not None:
                piece.scales.copy_(start.scales[:, rows])
            self._run(piece, piece.descend)
            errors[:, rows] = self.target[:, rows] - piece.values
            pieces.append(piece)
        scales = [piece.scales for piece in pieces if piece.scales is not None]
        return torch.cat([piece.values for piece in pieces], dim=1), torch.cat(scales, dim=1) if scales else None

    def _loss(self, errors: Tensor) -> float:
        """Returns tr(A E M Eᵀ) of errors `[in, out]`."""
        weighted = self.factor.moment @ errors
        total = errors.new_zeros(())
        for output in self.outputs:
            total += torch.sum((weighted[:, output.columns] @ output.moment) * errors[:, output.columns])
        return float(total)


def _shifts(moment: Tensor, spans: Sequence[slice]) -> list[Tensor]:
    """Returns A_:r A_rr⁻¹ `[k, r]` for every piece r of a block A `[k, k]`, whose sizes differ by one at most."""
    size = max(span.stop - span.start for span in spans)
    # One factorization of all pieces, because a GPU takes as long for one of them; shorter ones end in an identity.
    own = torch.eye(size, device=moment.device, dtype=torch.float32).repeat(len(spans), 1, 1)
    rows = moment.new_zeros(len(spans), size, len(moment))
    for index, span in enumerate(spans):
        length = span.stop - span.start
        own[index, :length, :length] = moment[span, span]
        rows[index, :length] = moment[span]
    lower, _ = torch.linalg.cholesky_ex(own)
    # A is symmetric, so that A_:r A_rr⁻¹ is the transpose of A_rr⁻¹ A_r:.
    solved = torch.cholesky_solve(rows, lower).mT
    return [solved[index, :, : span.stop - span.start] for index, span in enumerate(spans)]


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Returns the starts of consecutive parts of these sizes, and the end of the last one."""
    return [0, *accumulate(sizes)]
