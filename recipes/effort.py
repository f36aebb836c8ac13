"""An effort is a number from 0 to 3 that selects a solver, for users who do not want to choose one.

    0   rounds to nearest: seconds
    1   searches the scales of blocks by their squared error: no data
    2   solves each layer on calibration text by second-order rounding, and scales 4-bit inputs before
    3   rounds for the loss of the whole model instead, by the gradients at the outputs of layers, and scales inputs
        wherever they are rounded; on a GPU by four times as much text

A solver that a recipe, a plan or `--solver` names goes before it.
"""

from __future__ import annotations

from quant.formats.format import get_format, is_16bit

EFFORTS = (0, 1, 2, 3)
DEFAULT = 2
"""The effort of `quantize` where nothing names a solver or an effort, and no budget chooses formats."""

_ROWS, _MORE_ROWS = 32, 128


def rows_of(solver: str, *, on_gpu: bool) -> int:
    """Returns how many rows of the default text a solver gets.

    SmolLM2's weights in NVFP4 lose 3 to 13 % less by `kfac` on 128 rows than on 32. On a CPU, where each row takes
    seconds, that is not worth the time.
    """
    return _MORE_ROWS if on_gpu and "kfac" in solver.split("+") else _ROWS


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
