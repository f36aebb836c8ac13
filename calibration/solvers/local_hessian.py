"""`local_hessian` chooses block scales by the output error of their own block, all others taken as exact.

A block's error passes through the 16 × 16 block of the input second moment that belongs to it (for NVFP4; k × k in
general). Choosing the scale by this error instead of the plain squared error is worth more than any other choice of
scales, and the statistics are small: one k × k matrix for k inputs. The values of a block are rounded in turn and make
up for each other's errors as in GPTQ, only within the block, so that blocks stay independent.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quant.base.parallel import in_parts
from quant.calibration.solvers.gptq import block_factors, search_block
from quant.calibration.solvers.interfaces import Solver, required_stats
from quant.calibration.solvers.row_parallel import solve_by_rows
from quant.calibration.statistics import LayerStats
from quant.formats.format import Format
from quant.formats.scaling import nonzero
from quant.formats.tensor import BlockScaledTensor, quantize_with_scale

_DAMPING = 0.01
# Scales of a block that are tried with feedback.
_SHORTLIST = 4


@dataclass(frozen=True)
class LocalHessian(Solver):
    """Block scales by the output error of their own block. See the module docstring."""

    rule: str = "mse"

    needs_moment = True
    looks_in_blocks = True

    def supports(self, format: Format) -> bool:
        # Its sums are over blocks [1, k] of one row; tiles of several rows and whole rows have none.
        rows, columns = format.block
        return rows == 1 and columns > 0 and not format.has_packed_scales

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        moments = required_stats(stats, name, "local_hessian").blocks(format.block[1])
        return solve_by_rows(
            lambda rows, **_: local_hessian(rows.float(), moments, format, global_scale), weight, format
        )


def local_hessian(weight: Tensor, moments: Tensor, format: Format, global_scale: Tensor | None) -> BlockScaledTensor:
    """Rounds a float32 weight `[out, in]` by the diagonal blocks of the second moment, `[in / k, k, k]`."""
    width = format.block[1]
    second = weight.new_ones(()) if global_scale is None else global_scale
    mean = nonzero(moments.diagonal(dim1=1, dim2=2).mean())
    # (H_bb + λ mean(diag H) I)⁻¹ = Uᵀ U for every block b.
    _, U = block_factors(moments + _DAMPING * mean * torch.eye(width, device=moments.device, dtype=torch.float32))
    target = weight.t().contiguous()
    if weight.is_cuda and format.is_nvfp4 and len(target) % width == 0:
        from quant.kernels.rounding.portable_solvers import search_nvfp4_blocks

        values, chosen = search_nvfp4_blocks(target, U, second)
        return quantize_with_scale(values.t().contiguous(), format, chosen.t().contiguous(), global_scale)
    scales = torch.empty(len(U), len(weight), device=weight.device, dtype=torch.float32)

    def search_rows(first: int, last: int) -> None:
        rows = slice(first, last)
        for index, start in enumerate(range(0, len(target), width)):
            block = target[start : start + width, rows]
            block_U = U[index, : len(block), : len(block)]
            block[:], _, scales[index, rows] = search_block(block, block_U, format, second, _SHORTLIST)

    in_parts(search_rows, weight, len(weight), 1)
    return quantize_with_scale(target.t().contiguous(), format, scales.t().contiguous(), global_scale)
