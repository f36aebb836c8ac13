"""The functions of Gluon whose names differ between Triton 3.6 and 3.9, under one name each."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Until Triton 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Until 3.7; in 3.9 the old names only raise an error.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Methods, which kernels call as functions; until 3.8 this one had an underscore.
_Memory = gl.shared_memory_descriptor
reinterpret = getattr(_Memory, "reinterpret", None) or _Memory._reinterpret
