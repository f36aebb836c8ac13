"""An effort is a number from 0 to 3 that selects a solver, for users who do not want to choose one.

    0   rounds to nearest: seconds
    1   searches the scales of blocks by their squared error: no data
    2   solves each layer on calibration text by second-order rounding, and scales 4-bit inputs before
    3   rounds for the loss of the whole model instead, by the gradients at the outputs of layers, and scales inputs
        wherever they are rounded

A solver that a recipe, a plan or `--solver` names goes before it.
"""

from __future__ import annotations

from quant.formats.format import get_format, is_16bit

EFFORTS = (0, 1, 2, 3)
DEFAULT = 2
"""The effort of `quantize` where nothing names a solver or an effort, and no budget chooses formats."""

_ROWS = 32
# Parameters of a model below which rows cost so little time and memory that it gets four times as many.
_SMALL = 1_000_000_000


def rows_of(solver: str, *, on_gpu: bool, parameters: int | None = None) -> int:
    """Returns how many rows of the default text a solver gets: 32; on a GPU up to 128 for `gptq`, 512 for `kfac`.

    In NVFP4, SmolLM2's weights lose 10 % less by `gptq` on 128 rows than on 32. By `kfac` they lose 8 % less on 128
    rows than on 32, and 6 % less on 512 than on 128. On a CPU, where each row takes seconds, that is not worth the
    time. Inputs of a block are kept for all rows, which takes gigabytes with large models.

    Args:
        solver: the solver; empty for none.
        on_gpu: whether a GPU does the work.
        parameters: the size of the model; None counts as large.
    """
    parts = solver.split("+")
    if not on_gpu or not {"gptq", "kfac"} & set(parts):
        return _ROWS
    rows = 4 * _ROWS if "kfac" in parts else _ROWS
    return 4 * rows if parameters is not None and parameters < _SMALL else rows


def solver_of(effort: int, activation: str, *, experts: bool = False) -> str:
    """Returns the solver that an effort stands for.

    Args:
        effort: a number from 0 to 3.
        activation: format of inputs, "keep" for 16 bit.
        experts: whether the model has experts. To find where scales can go, a block is copied in float64, which is too
            large with hundreds of them.

    Raises:
        ValueError: the effort is unknown.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort {effort!r}: expected a whole number from 0 to 3")
    if effort < 2:
        return ("rtn", "mse")[effort]
    scaling = "" if experts else "awq:merge+"
    if effort == 2:
        # Scaling moves magnitude from inputs to weights, which pays where inputs have the coarser grid; 8-bit inputs
        # lose little.
        four_bits = not is_16bit(activation) and get_format(activation).element.bits == 4
        return f"{scaling if four_bits else ''}gptq"
    # Neither merged rotations nor learned rounding of finished blocks (AutoRound) gained as much, at minutes on a GPU.
    return f"{'' if is_16bit(activation) else scaling}kfac"
