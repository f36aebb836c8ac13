"""`current` finds the GPU of this machine in the data sheets of `recipes/gpus.py`; the rest says what it multiplies."""

import re
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from quant.recipes.gpus import GPUS, Hardware, like


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
    gpu = _recognise(seen.name, (seen.major, seen.minor), seen.multi_processor_count)
    # Sizes come from the driver, rates from the data sheet of the target that it resembles.
    return replace(gpu, sms=seen.multi_processor_count, l2=seen.L2_cache_size, memory=seen.total_memory)


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


def multiplies_fp8_blocks(gpu: Hardware) -> bool:
    """Returns whether cuBLASLt multiplies blocks of FP8, and Triton makes them: on Hopper, with CUDA 12.9 or later."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return version >= (12, 9) and gpu.has_wgmma and has_triton()


def _recognise(name: str, capability: tuple[int, int], sms: int) -> Hardware:
    """Returns the GPU of `GPUS` whose name the driver's name holds, else a likeness."""
    for gpu in GPUS.values():
        # "rtxpro6000" is "NVIDIA RTX PRO 6000 Blackwell" to the driver: spaces may stand between letters and digits.
        spaced = re.sub(r"(?<=rtx)(?=pro)|(?<=[a-z])(?=[0-9])", r"\\s*", {"dgx-spark": "gb10"}.get(gpu.name, gpu.name))
        # Other parts have a word more; all Jetson modules of a generation have one name.
        is_same = re.search(rf"\b{spaced}\b(?!\s*(ti|super|laptop|d)\b)", name.lower()) and gpu.capability == capability
        if is_same and (gpu.name not in ("orin", "thor") or sms == gpu.sms):
            return gpu
    return like(name, capability)
