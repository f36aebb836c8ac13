"""The assembler that Triton's wheel ships proves PTX valid, and counts its registers and spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quant.kernels.base.ptx import ARCHITECTURES, CompiledKernel


@dataclass(frozen=True)
class Resources:
    """The assembler's count of registers per thread, and of bytes per thread that spill out of them."""

    registers: int
    spilled: int


def assemble(compiled: CompiledKernel) -> Resources:
    """Registers and spills of a kernel.

    Raises:
        ValueError: the assembler refuses it; the message is the assembler's.
    """
    if missing := registers_without_values(compiled.ptx):
        raise ValueError(f"{compiled.name}: reads {', '.join(missing)}, which nothing writes")
    try:
        said = messages(compiled.ptx, compiled.arch)
    except ValueError as error:
        raise ValueError(f"{compiled.name}: {error}") from None
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    return Resources(max(map(int, registers)), sum(map(int, spilled)))


def registers_without_values(ptx: str) -> list[str]:
    """The registers that are read and nowhere written: LLVM leaves them where a value is undefined."""
    read: set[str] = set()
    written: set[str] = set()
    for line in ptx.splitlines():
        for statement in re.sub(r"//.*|^\s*@\S+", "", line).split(";"):
            # The first operand is the result, a vector where it stands in braces; `p|q` are two.
            operands = re.fullmatch(r"[\s{]*([a-z][\w.:]*)\s+(\{[^}]*\}|[^,]+)(.*?)[\s}]*", statement)
            if operands is None or operands[1].startswith("."):
                read.update(re.findall(r"%r[sd]?\d+\b", statement))
                continue
            name, first, others = operands.groups()
            writes = not name.startswith(
                ("st.", "bra", "bar", "red.", "mbarrier.init", "cp.", "fence", "prefetch", "call")
            )
            (written if writes else read).update(re.findall(r"%r[sd]?\d+\b", first))
            # Instructions that put values together may get halves that nobody reads afterwards.
            if not re.match(r"prmt|mov\.b64|cvt\.\S*x2\.", name):
                read.update(re.findall(r"%r[sd]?\d+\b", others))
    return sorted(read - written)


def messages(ptx: str, arch: int) -> str:
    """The messages of `ptxas` for a target of `ARCHITECTURES`."""
    from triton.backends.nvidia.compiler import get_ptxas

    target, ptxas = ARCHITECTURES[arch], get_ptxas(arch).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={target}", str(source), "-o", str(Path(folder, "cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"ptxas refuses the PTX for {target}: {' '.join(done.stderr.split())}")
    return done.stderr


def sums_of_values(ptx: str) -> set[str]:
    """What P V of a tile of 128 keys does to Hopper's sum so far: "adds" to it, "begins" another, or "both"."""
    # P lies in registers, in braces; then come V, and a predicate: whether the product is added to its accumulator.
    predicates = re.findall(r"wgmma\.mma_async[^{]*\{[^}]*\}, \{[^}]*\}, %rd\d+, (\S+),", ptx)
    constants = dict(re.findall(r"mov\.pred\s+(%p\d+), (\S+);", ptx))
    # A tile is four products of 32 keys, and the first decides.
    first = {constants.get(name, name) for name in predicates[::4]}
    return {"both" if name.startswith("%") else "begins" if name == "0" else "adds" for name in first}
