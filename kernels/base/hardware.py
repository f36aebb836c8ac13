"""`Hardware` describes a GPU, the one of this machine or a target by name: its sizes, rates and units.

Rates are the vendor's for dense matrices at boost clock; programs reach less (`quant bench` measures it). Capabilities
follow from the compute capability: FP8 tensor cores from 8.9 on, block-scaled FP4 and FP8 from 10.0 on, wgmma on 9.0
only.

Sources: NVIDIA data sheets and architecture white papers of A100, L40S, H100 SXM, H200 SXM, B200 and B300 (HGX, per
GPU), GeForce RTX 5090 and RTX PRO 6000 Blackwell. A B200 of an HGX board has 180 GB at 7.7 TB/s; the 8 TB/s that are
often quoted are a GB200's. SM counts and L2 sizes of GPUs on the machine are read from the driver.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hardware:
    """Facts about a GPU."""

    name: str  # key in `GPUS`, or the driver's name of a GPU that is not in it
    capability: tuple[int, int]  # compute capability
    sms: int  # streaming multiprocessors
    l2: int  # bytes of the L2 cache
    memory: int  # bytes of device memory
    bandwidth: float  # bytes per second of device memory
    # Dense tensor-core rate by dtype, TFLOP/s; a dtype that is absent has no tensor-core instruction.
    tflops: dict[str, float]
    # Whether `bandwidth` and `tflops` are known for this part and not taken from one that is like it.
    known: bool = True

    @property
    def arch(self) -> int:
        """Compute capability as one number, such as 90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def has_fp8(self) -> bool:
        """FP8 tensor cores."""
        return self.capability >= (8, 9)

    @property
    def has_block_scales(self) -> bool:
        """Tensor cores that take block scales: NVFP4, MXFP4, MXFP6 and MXFP8 without dequantizing."""
        return self.capability >= (10, 0)

    @property
    def has_wgmma(self) -> bool:
        """Hopper's matrix instructions, whose left operand may be in registers."""
        return self.capability == (9, 0)

    @property
    def multiplies_fp8_blocks(self) -> bool:
        """Whether cuBLASLt multiplies blocks of FP8, and Triton makes them: on Hopper, with CUDA 12.9 or later."""
        version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
        return version >= (12, 9) and self.has_wgmma and has_triton()

    @property
    def native_formats(self) -> tuple[str, ...]:
        """Formats that a tensor core multiplies as they are."""
        plain = ("int8",) + (("fp8",) if self.has_fp8 else ())
        return plain + (("mxfp8", "mxfp6", "mxfp4", "nvfp4") if self.has_block_scales else ())


_GB, _MIB, _GIB = 10**9, 1 << 20, 1 << 30


def _gpu(
    name: str, capability: tuple[int, int], sms: int, l2: int, memory: int, bandwidth: float, *rates: float
) -> Hardware:
    names = ("bf16", "int8", "fp8", "fp4")[: len(rates)]
    return Hardware(
        name, capability, sms, l2 * _MIB, memory * _GIB, bandwidth * _GB, dict(zip(names, rates, strict=True))
    )


GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        _gpu("a100", (8, 0), 108, 40, 80, 2039, 312, 624),
        _gpu("l40s", (8, 9), 142, 96, 48, 864, 362, 733, 733),
        _gpu("h100", (9, 0), 132, 50, 80, 3350, 989, 1979, 1979),
        _gpu("h200", (9, 0), 132, 60, 141, 4800, 989, 1979, 1979),
        _gpu("b200", (10, 0), 148, 126, 180, 7700, 2250, 4500, 4500, 9000),
        # B300 gave its INT8 units to FP4.
        _gpu("b300", (10, 3), 148, 126, 270, 7700, 2250, 150, 4500, 13500),
        _gpu("rtx5090", (12, 0), 170, 96, 32, 1792, 210, 838, 419, 1676),
        _gpu("rtxpro6000", (12, 0), 188, 128, 96, 1792, 252, 1008, 503, 2015),
    )
}
"""GPUs that a plan or a table of measured times may name."""

CAPABILITIES: dict[str, tuple[int, int]] = {
    "t4": (7, 5),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "rtx4090": (8, 9),
    "dgx-spark": (12, 1),
    **{name: gpu.capability for name, gpu in GPUS.items()},
}
"""Compute capability of every GPU that is known by name, with or without its data sheet: enough to build an engine."""


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed; it comes with a CUDA build of PyTorch."""
    return find_spec("triton") is not None


@cache
def current(index: int = 0) -> Hardware:
    """Returns the GPU that PyTorch calls `cuda:index`, by the driver's own numbers where the driver has them."""
    if index >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU cuda:{index} on this machine; PyTorch sees {torch.cuda.device_count()}")
    seen = torch.cuda.get_device_properties(index)
    like = _recognise(seen.name, (seen.major, seen.minor))
    # Sizes come from the driver, rates from the data sheet of the target that it resembles.
    return replace(
        like,
        name=like.name if like.known else seen.name,
        capability=(seen.major, seen.minor),
        sms=seen.multi_processor_count,
        l2=seen.L2_cache_size,
        memory=seen.total_memory,
    )


def capability_of(x: Tensor) -> tuple[int, int]:
    """Returns the compute capability of the NVIDIA GPU that holds `x`; (0, 0) for a tensor on any other device."""
    nvidia = x.is_cuda and torch.version.hip is None
    return torch.cuda.get_device_capability(x.device) if nvidia else (0, 0)


def is_on_hopper(x: Tensor) -> bool:
    """Returns whether the kernels for Hopper run where `x` is."""
    return capability_of(x)[0] == 9


def has_fp8_tensor_cores(x: Tensor) -> bool:
    """Returns whether FP8 is multiplied where `x` is: on an NVIDIA GPU from Ada (8.9) on."""
    return capability_of(x) >= (8, 9)


def lacks_e4m3(x: Tensor) -> bool:
    """Returns whether Triton has no E4M3 where `x` is: on an NVIDIA GPU before Ada. Kernels then take it as bytes."""
    # PyTorch converts E4M3 on every GPU.
    return x.is_cuda and torch.version.hip is None and not current(x.device.index or 0).has_fp8


def _recognise(name: str, capability: tuple[int, int]) -> Hardware:
    """Returns the GPU of `GPUS` whose name the driver's name holds."""
    # Else the nearest one that is not newer, marked as a likeness.
    for gpu in GPUS.values():
        # "rtxpro6000" is "NVIDIA RTX PRO 6000 Blackwell" to the driver: spaces may stand between letters and digits.
        spaced = re.sub(r"(?<=rtx)(?=pro)|(?<=[a-z])(?=[0-9])", r"\\s*", gpu.name)
        if re.search(rf"\b{spaced}\b", name.lower()) and gpu.capability == capability:
            return gpu
    older = [gpu for gpu in GPUS.values() if gpu.capability <= capability] or [GPUS["a100"]]
    return replace(max(older, key=lambda gpu: gpu.capability), known=False)
