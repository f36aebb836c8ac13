"""A compiled kernel is launched through the CUDA driver, without Triton, as a TensorRT plugin launches its PTX."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from quant.kernels.base.launch import check_status, cuda_driver
from quant.kernels.base.ptx import CompiledKernel

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_JIT_ERROR_LOG = (5, 6)  # CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
_LOG_BYTES = 8192


class LoadedKernel:
    """A compiled kernel on the current device; ValueError where the driver refuses the PTX."""

    def __init__(self, compiled: CompiledKernel) -> None:
        self.compiled = compiled
        torch.cuda.synchronize()  # the driver loads into the current context, and the first call of PyTorch makes it
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(_LOG_BYTES)
        options = (ctypes.c_int * 2)(*_JIT_ERROR_LOG)
        # Option values are passed as pointers; a size is stored in the pointer itself.
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), _LOG_BYTES)
        image = ctypes.c_char_p(compiled.ptx.encode())
        status = cuda_driver().cuModuleLoadDataEx(ctypes.byref(self._module), image, 2, options, values)
        check_status(
            status, f"{compiled.name} for compute capability {compiled.arch}", log.value.decode(errors="replace")
        )
        name = ctypes.c_char_p(compiled.name.encode())
        check_status(cuda_driver().cuModuleGetFunction(ctypes.byref(self._function), self._module, name), compiled.name)
        # More than 48 KiB of dynamic shared memory must be requested explicitly.
        status = cuda_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, compiled.shared)
        check_status(status, f"{compiled.name}: {compiled.shared} bytes of shared memory")

    def launch(self, grid: Sequence[int], arguments: Sequence[int], stream: int = 0) -> None:
        """Starts the kernel on a grid of blocks in x, y and z."""
        # An argument is one integer per parameter: an address for a pointer, the value for an i32.
        types = self.compiled.arguments
        if len(arguments) != len(types):
            raise ValueError(f"{self.compiled.name}: {len(arguments)} arguments, expected {len(types)}: {types}")
        cells = [
            (ctypes.c_void_p if type_.startswith("*") else ctypes.c_int32)(value)
            for value, (_, type_) in zip(arguments, types, strict=True)
        ]
        # cuLaunchKernel takes an array of pointers to the arguments, which must live until it returns.
        pointers = (ctypes.c_void_p * len(cells))(*(ctypes.addressof(cell) for cell in cells))
        block, shared = (self.compiled.threads, 1, 1), self.compiled.shared
        status = cuda_driver().cuLaunchKernel(
            self._function, *grid, *block, shared, ctypes.c_void_p(stream), pointers, ctypes.c_void_p()
        )
        check_status(status, f"{self.compiled.name}: grid {tuple(grid)}")
