"""Compares two engines kernel by kernel: the same nodes, from the same sources, with the same constants, wired alike.

The names of tensors in an engine are counted, and one kernel more shifts all that follow. So a kernel is known by the
ONNX nodes that were fused into it, and a tensor by the kernel that writes it:

    kernel     kind, CUDA function (its name ends with a hash of its source), alpha
    operands   of a constant its bytes, of another tensor the nodes of its writer; its type and dimensions
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import Any

from quant.export.tensorrt.engine_file import Engine
from quant.export.engine.contents.program import Kernel, KernelOperand

_COUNTED = re.compile(r"\d+")
_OF_GRAPH = ("past_", "new_")
_Key = tuple[bool, int, tuple[str, ...], str]


def differing_kernels(engine: Engine, other: Engine) -> dict[str, str]:
    """Returns the kernels in which `engine` and `other` differ, by the nodes that they compute."""
    first, second = _described(engine), _described(other)
    differences = {} if engine.updated == other.updated else {"inputs": "updated in place as other outputs"}
    for key in {**second, **first}:
        mine, theirs = first.get(key, []), second.get(key, [])
        if mine == theirs:
            continue
        nodes = ", ".join(key[2][:3]) + (", …" if len(key[2]) > 3 else "")
        if len(mine) != len(theirs):
            differences[nodes] = "another kernel" if mine else "no such kernel"
        elif [kernel[0] for kernel in mine] != [kernel[0] for kernel in theirs]:
            differences[nodes] = "another kernel"
        elif [kernel[1] for kernel in mine] != [kernel[1] for kernel in theirs]:
            differences[nodes] = "other inputs"
        else:
            differences[nodes] = "other constants"
    return differences


def _described(engine: Engine) -> dict[_Key, list[tuple[Any, ...]]]:
    """Describes each kernel by its function, its inputs and its constants."""
    writers: dict[tuple[int, str], _Key] = {}
    kernels: dict[_Key, list[tuple[Any, ...]]] = defaultdict(list)
    for kernel in engine.kernels:
        key = _key(kernel)
        inputs = tuple(_source(kernel, operand, writers) for operand in kernel.inputs)
        constants = tuple(_digest(engine, operand) for operand in kernel.inputs if operand.index is not None)
        kernels[key].append(((kernel.kind, kernel.source, kernel.alpha, kernel.backbone), inputs, constants))
        writers.update({(kernel.program, name): key for name in kernel.outputs})
    return kernels


def _key(kernel: Kernel) -> _Key:
    # Parts of a runtime fusion may have no nodes of their own.
    return kernel.is_body, kernel.profile, tuple(sorted(kernel.nodes)) or (_COUNTED.sub("#", kernel.name),), kernel.kind


def _source(kernel: Kernel, operand: KernelOperand, writers: dict[tuple[int, str], _Key]) -> tuple[Any, ...]:
    """Describes an operand: its type and dimensions, and the kernel that writes it or its name without counters."""
    # A KV cache has a number in its name, `new_key.0.1`: only the compiler's own names are counted.
    name = operand.name if operand.name.startswith(_OF_GRAPH) else _COUNTED.sub("#", operand.name)
    writer = writers.get((kernel.program, operand.name), name)
    return operand.stored, operand.dims, "constant" if operand.constant else writer


def _digest(engine: Engine, operand: KernelOperand) -> bytes:
    # Without the table's position constants cannot be read; the file is of another TensorRT then.
    if not engine.starts:
        return b""
    return hashlib.sha256(engine.constant(operand).tobytes()).digest()
