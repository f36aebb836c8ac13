"""Tensor maps for Gluon kernels, and the functions whose names differ between Triton 3.6 and 3.9, under one name each.

Gluon has no interpreter: tests read the PTX and run the index arithmetic in PyTorch; values are tested on a GPU.
"""

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quant.formats.tensor import BlockScaledTensor

# A tensor map tells TMA, the Hopper GPU's copy engine, which tile of which matrix it fetches or writes. The constructor
# checks everything, and takes as long as a launch. So the fields are checked once for arguments of one shape, and each
# call puts its tensors into `object.__new__(TensorDescriptor)` with these fields (`vars(map).update(fields, base=x)`).
Fields = dict[str, object]  # a tensor map without its tensor


def fields_of(descriptor: TensorDescriptor) -> Fields:
    """Returns the fields of a descriptor that has checked them, without its tensor."""
    return {name: value for name, value in vars(descriptor).items() if name != "base"}


def matrix_fields(matrix: Tensor, rows: int, columns: int) -> Fields:
    """Returns the fields for a BF16 or E4M3 matrix of which tiles `[rows, columns]` are copied, swizzled for wgmma."""
    dtype = gl.bfloat16 if matrix.dtype is torch.bfloat16 else gl.float8e4nv
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return fields_of(TensorDescriptor(matrix, list(matrix.shape), [matrix.stride(0), 1], [rows, columns], layout))


def prepacked_fields(weight: BlockScaledTensor, depth: int) -> tuple[Fields, Fields]:
    """Returns the fields for words and scales of a prepacked weight with `depth` tiles of 64 × 64 at a time."""
    # A tile is 512 words and 64 scales, one after another. TMA takes boxes of at most 256 elements a side.
    # Words need no swizzle: a thread reads the 16 bytes that belong to it.
    linear = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    words, scales = weight.codes, weight.scale
    return (
        fields_of(TensorDescriptor(words, [words.numel() // 256, 256], [256, 1], [2 * depth, 256], linear)),
        fields_of(TensorDescriptor(scales, [scales.numel() // 64, 64], [64, 1], [depth, 64], linear)),
    )


# Until Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Until 3.7; in 3.9 the old names only raise an error.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Methods, which kernels call as functions; until 3.8 this one had an underscore.
_Memory = gl.shared_memory_descriptor
reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret
