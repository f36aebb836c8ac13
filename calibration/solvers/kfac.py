"""`kfac` rounds a weight for the loss of the whole model, not only for the output error of its own layer.

To second order, the KL divergence that errors E = W − Q of a layer cause is E's square under the Fisher matrix of the
model. Its Kronecker factors (K-FAC: Martens and Grosse, 2015; for rounding: YAQA, Tseng et al., arXiv 2505.22988) are

    H = mean of x xᵀ   over the layer's inputs,        A = mean of g gᵀ   over the gradients at its outputs,

and the loss is tr(A E H Eᵀ). With A = 1 it is GPTQ's, whose rows are independent. A couples them: an error of one
output can be made up for by others, and outputs that hardly affect the model may err more.

The solution of GPTQ is the start, and descent follows. Rows are revisited in `pieces`, each of rows far apart and with
the others fixed. Their errors shift the target of piece r to W_r + A_rr⁻¹ A_r,rest E_rest, and one sweep of GPTQ's
descent lowers its loss under H. Feeding errors forward to the rows of later pieces first, as GPTQ does over columns,
gained nothing on top of that (SmolLM2 in NVFP4, five texts) and took as long again.

Within a piece the rows are taken as independent though A couples them a little, so that a step of descent could raise
the loss. So the two solutions are compared by their loss in the end, and the better one stays.

A of many outputs would not fit in memory, nor be estimated well, so it consists of diagonal blocks of neighbouring
outputs (`outputs` of `LayerStats`): blocks of 256 do as well as whole matrices. Every piece has rows of all blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from quant.base.parallel import in_parts
from quant.calibration.solvers import gptq
from quant.calibration.solvers.interfaces import required_stats
from quant.calibration.solvers.row_parallel import search_threads
from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.scaling import nonzero
from quant.formats.tensor import BlockScaledTensor


@dataclass(frozen=True)
class Kfac(gptq.Gptq):
    """Second-order rounding on both sides of a weight. See the module docstring."""

    pieces: int = 6  # that rows are divided into
    output_damping: float = 0.1  # added to the diagonal of A, as a fraction of its mean

    two_sided = True

    def batches_small(self, weight: Tensor, format: Format) -> bool:
        return False

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = required_stats(stats, name, "kfac")
        blocks = [] if stats.outputs is None else stats.outputs.blocks_of(len(weight))
        if not blocks:
            return super().__call__(weight, stats, format, global_scale=global_scale, name=name)
        factor = self.factor(stats, format, name)
        weight = gptq.corrected_weight(weight.float(), stats.drift, factor, stats.residual)
        fixed = gptq.fixed_scales(weight, format, global_scale, factor)
        supers = gptq.superblocks(weight, format, factor)
        rows = _Rows(blocks, self.pieces, self.output_damping, weight.device)
        target = gptq.by_input(weight, factor) if fixed is None else gptq.by_input(weight, factor) + fixed.shift
        target = target[:, rows.order]

        def rounding_of(target: Tensor, piece: slice) -> gptq.Rounding:
            own = rows.order[piece]
            step = None if fixed is None else fixed.step[:, own]
            own_supers = None if supers is None else supers.of_rows(own)
            return gptq.Rounding(target, factor, format, global_scale, self.shortlist, step, supers=own_supers)

        start = rounding_of(target, slice(None))
        _in_threads(start, start.feed_back)
        for _ in range(self.sweeps):
            _in_threads(start, start.descend)
        values, scales = _descended(start, rows, rounding_of)
        # NaN compares false, so that GPTQ's solution stays there too.
        if not rows.loss(target - values, factor) <= rows.loss(target - start.values, factor):
            values, scales = start.values, start.scales
        values, scales = values[:, rows.own_order], None if scales is None else scales[:, rows.own_order]
        return gptq.encoded(values, scales, fixed, factor, format, global_scale, supers)


class _OutputBlock(NamedTuple):
    """One diagonal block of A while rows are solved, its rows sorted by piece."""

    columns: Tensor  # the positions of its rows among the outputs, which are sorted by piece first, [k]
    A: Tensor  # damped, [k, k]
    # The columns of each piece r, and A_:r A_rr⁻¹ [k, r]: the equivalent in its rows of an error in any row.
    pieces: list[tuple[Tensor, Tensor]]


class _Rows:
    """The rows of a weight, sorted by piece, then by diagonal block `[k, k]` of A."""

    def __init__(self, blocks: Sequence[Tensor], pieces: int, damping: float, device: torch.device) -> None:
        pieces = min(pieces, *map(len, blocks))
        bounds = _bounds([len(block) for block in blocks])
        # Piece p of a block has its rows p, p + pieces, p + 2 pieces and so on.
        parts = [
            [torch.arange(start + piece, stop, pieces, device="cpu") for start, stop in pairwise(bounds)]
            for piece in range(pieces)
        ]
        order = torch.cat([rows for piece in parts for rows in piece])
        # The rows by piece, and the positions of the weight's own rows there, int64 [out].
        self.order, self.own_order = order.to(device), order.argsort().to(device)
        self.bounds = _bounds([sum(map(len, piece)) for piece in parts])  # where pieces begin, and the end of the last
        self.blocks = []
        for index, (start, block) in enumerate(zip(bounds[:-1], blocks, strict=True)):
            rows = torch.cat([piece[index] for piece in parts])
            within = (rows - start).to(block.device)
            A = block[within][:, within]
            A.diagonal().add_(damping * nonzero(A.diagonal().mean()))
            columns = self.own_order[rows.to(device)]
            spans = [slice(*span) for span in pairwise(_bounds([len(piece[index]) for piece in parts]))]
            shifts = zip((columns[span] for span in spans), _shifts(A, spans), strict=True)
            self.blocks.append(_OutputBlock(columns, A, list(shifts)))

    def loss(self, errors: Tensor, factor: gptq.Factor) -> float:
        """Returns tr(A E H Eᵀ) of errors `[in, out]`."""
        weighted = factor.H @ errors
        total = errors.new_zeros(())
        for block in self.blocks:
            total += torch.sum((weighted[:, block.columns] @ block.A) * errors[:, block.columns])
        return float(total)


def _descended(
    start: gptq.Rounding, rows: _Rows, rounding_of: Callable[[Tensor, slice], gptq.Rounding]
) -> tuple[Tensor, Tensor | None]:
    """Returns values and scales after every piece of `start` was revisited with the others fixed."""
    errors = start.target - start.values
    pieces = []
    for index, (first, last) in enumerate(pairwise(rows.bounds)):
        own_rows = slice(first, last)
        # The goal of each row: the values at which its error under A would be least without rounding.
        goal = start.values[:, own_rows].clone()
        for block in rows.blocks:
            own, shift = block.pieces[index]
            goal[:, own - first] += errors[:, block.columns] @ shift
        piece = rounding_of(goal, own_rows)
        piece.values.copy_(start.values[:, own_rows])
        if piece.scales is not None and start.scales is not None:
            piece.scales.copy_(start.scales[:, own_rows])
        _in_threads(piece, piece.descend)
        errors[:, own_rows] = start.target[:, own_rows] - piece.values
        pieces.append(piece)
    scales = [piece.scales for piece in pieces if piece.scales is not None]
    return torch.cat([piece.values for piece in pieces], dim=1), torch.cat(scales, dim=1) if scales else None


def _in_threads(rounding: gptq.Rounding, work: Callable[[slice], None]) -> None:
    """Calls `work` with rows of `rounding`, which threads of a CPU share."""
    inputs, rows = rounding.target.shape
    in_parts(lambda start, stop: work(slice(start, stop)), rounding.target, rows, search_threads(rows, inputs))


def _shifts(A: Tensor, spans: Sequence[slice]) -> list[Tensor]:
    """Returns A_:r A_rr⁻¹ `[k, r]` for every piece r of a block A `[k, k]`, whose sizes differ by one at most."""
    size = max(span.stop - span.start for span in spans)
    # One factorization of all pieces, because a GPU takes as long for one of them; shorter ones end in an identity.
    own = torch.eye(size, device=A.device, dtype=torch.float32).repeat(len(spans), 1, 1)
    rows = A.new_zeros(len(spans), size, len(A))
    for index, span in enumerate(spans):
        length = span.stop - span.start
        own[index, :length, :length] = A[span, span]
        rows[index, :length] = A[span]
    lower, _ = torch.linalg.cholesky_ex(own)
    # A is symmetric, so that A_:r A_rr⁻¹ is the transpose of A_rr⁻¹ A_r:.
    solved = torch.cholesky_solve(rows, lower).mT
    return [solved[index, :, : span.stop - span.start] for index, span in enumerate(spans)]


def _bounds(sizes: Sequence[int]) -> list[int]:
    """Returns the starts of consecutive parts of these sizes, and the end of the last one."""
    return [0, *accumulate(sizes)]
