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
    try:
        said = messages(compiled.ptx, compiled.arch)
    except ValueError as error:
        raise ValueError(f"{compiled.name}: {error}") from None
    registers = re.findall(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    return Resources(max(map(int, registers)), sum(map(int, spilled)))


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
