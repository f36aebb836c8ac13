"""Checks how the kernels of an engine are connected: blocks follow each other in the order of the model.

A graph in which two blocks were exchanged has all the right weights at all the right names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from quant.export.engine.contents.engine_file import Engine
from quant.export.engine.contents.program import Kernel

# Lists of modules that run one after the other; other lists may run side by side, or backwards.
_BLOCKS = re.compile(r"^(.*?\b(?:layers?|blocks?|h))\.(\d+)\.")


def order_problems(engine: Engine) -> list[str]:
    """One clause for each block that does not follow the block before it, in any of the engine's programs."""
    problems: dict[str, None] = {}
    for program in sorted({kernel.program for kernel in engine.kernels if not kernel.is_body}):
        kernels = [kernel for kernel in engine.kernels if kernel.program == program]
        problems.update(dict.fromkeys(_program_problems(kernels)))
    return list(problems)


def _program_problems(kernels: list[Kernel]) -> Iterator[str]:
    # Blocks whose GEMMs a tensor depends on, by its name; kernels stand in an order in which they can run.
    behind: dict[str, set[tuple[str, int]]] = {}
    blocks = {block for kernel in kernels for block in _blocks(kernel)}
    for kernel in kernels:
        earlier = set().union(*(behind.get(operand.name, set()) for operand in kernel.inputs))
        own = _blocks(kernel) if kernel.is_gemm else set()
        for path, index in own:
            later = max((i for other, i in earlier if other == path), default=index)
            if later > index:
                yield f"{path}.{index} runs after {path}.{later}"
            if (path, index - 1) in blocks and (path, index - 1) not in earlier:
                yield f"{path}.{index} does not read {path}.{index - 1}"
        for name in kernel.outputs:
            behind[name] = earlier | own | behind.get(name, set())


def _blocks(kernel: Kernel) -> set[tuple[str, int]]:
    """The outermost block of each layer that a GEMM multiplies: `model.layers` and 3."""
    matches = (_BLOCKS.match(node) for node in kernel.matmuls)
    return {(match[1], int(match[2])) for match in matches if match}
