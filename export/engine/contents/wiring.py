"""Checks how the kernels of an engine are connected: all blocks are there, and follow each other in the model's order.

A graph in which two blocks were exchanged has all the right weights at all the right names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from quant.export.tensorrt.engine_file import Engine
from quant.export.engine.contents.program import Kernel

# Lists of modules that run one after the other; other lists may run side by side, or backwards.
_BLOCKS = re.compile(r"^(.*?\b(?:layers?|blocks?|h))\.(\d+)\.")


def order_problems(engine: Engine) -> list[str]:
    """Returns one clause for each block that does not follow the block before it, in any of the engine's programs."""
    problems: dict[str, None] = {}
    for program in sorted({kernel.program for kernel in engine.kernels if not kernel.is_body}):
        kernels = [kernel for kernel in engine.kernels if kernel.program == program]
        problems.update(dict.fromkeys(_program_problems(kernels)))
    return list(problems)


def absent_blocks(engine: Engine, model: nn.Module) -> list[str]:
    """Returns a clause for each block of a transformers model that the engine lacks, where it has others of its list.

    An engine of a model that was cut short has all the tensors that its kernels read.
    """
    if not hasattr(model, "main_input_name"):
        return []
    modules = {path for kernel in engine.kernels for path in kernel.modules}
    present = {(match[1], int(match[2])) for path in modules if (match := _BLOCKS.match(f"{path}."))}
    return [
        f"{name}.{index} is not in the engine"
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList) and any(path == name for path, _ in present)
        for index in range(len(blocks))
        if (name, index) not in present
    ]


def _program_problems(kernels: list[Kernel]) -> Iterator[str]:
    # Blocks whose GEMMs a tensor depends on, by its name; kernels are in an order in which they can run.
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
    """Returns the outermost block of each layer that a GEMM multiplies: `model.layers` and 3."""
    matches = (_BLOCKS.match(node) for node in kernel.matmuls)
    return {(match[1], int(match[2])) for match in matches if match}
