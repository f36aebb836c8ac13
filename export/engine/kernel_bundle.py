"""Compiled kernels as one text, which a plugin carries in an engine and C++ reads without a library.

    blockscale-kernels 1
    attend 90 fp8_dense_attention 8 165888 128 q:*fp8e4nv,…,heads:i32,out:*bf16 41234
    .version 8.7 …                                                    41,234 bytes of PTX, then a newline
    …

The header of a kernel gives its role in the plugin, the compute capability, the entry's name, warps, bytes of shared
memory, rows of its tile, its parameters in order, and the length of its PTX.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quant.kernels.base.ptx import CompiledKernel

_FIRST = "blockscale-kernels 1\n"


@dataclass(frozen=True)
class BundledKernel:
    """A kernel for one role in a plugin; `rows` of its tile decide how many programs a launch has."""

    role: str
    rows: int
    compiled: CompiledKernel


def pack(kernels: Iterable[BundledKernel]) -> bytes:
    """Writes kernels as the text of a bundle."""
    parts = [_FIRST]
    for kernel in kernels:
        one = kernel.compiled
        arguments = ",".join(f"{name}:{kind}" for name, kind in one.arguments)
        facts = (kernel.role, one.arch, one.name, one.num_warps, one.shared, kernel.rows, arguments, len(one.ptx))
        parts.append(f"{' '.join(map(str, facts))}\n{one.ptx}\n")
    return "".join(parts).encode("ascii")


def unpack(text: bytes) -> list[BundledKernel]:
    """Reads the kernels of a bundle; ValueError if it is none, or is cut off."""
    if not text.startswith(_FIRST.encode()):
        raise ValueError("not a bundle of kernels: it does not begin with " + _FIRST.strip())
    kernels: list[BundledKernel] = []
    position = len(_FIRST)
    while position < len(text):
        end = text.find(b"\n", position)
        words = text[position:end].decode().split(" ")
        if end < 0 or len(words) != 8 or len(text) < end + 2 + int(words[7]):
            raise ValueError(f"a bundle of kernels is cut off after {len(kernels)} of them")
        role, arch, name, warps, shared, rows, arguments, length = words
        pairs = (pair.partition(":") for pair in arguments.split(","))
        ptx = text[end + 1 : end + 1 + int(length)].decode()
        listed = tuple((parameter, kind) for parameter, _, kind in pairs)
        compiled = CompiledKernel(name, ptx, int(arch), listed, int(warps), int(shared))
        kernels.append(BundledKernel(role, int(rows), compiled))
        position = end + 2 + int(length)
    return kernels
