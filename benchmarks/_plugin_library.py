"""Builds the C++ library of the plugins' launches and calls it without TensorRT.

The library in `cpp/` serves engines where no Python runs. Its launches are also C functions, so that tests and
benchmarks run exactly the code of a served engine on tensors of PyTorch.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parents[1] / "export" / "tensorrt" / "cpp"
_LAUNCHES = ("bundle.cpp", "driver_kernel.cpp", "launch.cpp", "c_api.cpp")


_SIZES = ("batch", "heads", "kv_heads", "fresh", "dim", "capacity")
_OPERANDS = (
    *("q", "k", "v", "k_cache", "v_cache", "k_blocks", "v_blocks", "k_scale", "v_scale"),
    *("past", "lengths", "out", "workspace"),
)


class CacheCall(ctypes.Structure):
    """`CacheAttention` of `cpp/launch.h`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in _SIZES),
        ("is_nvfp4", ctypes.c_bool),
        *((name, ctypes.c_void_p) for name in _OPERANDS),
    ]


class DenseCall(ctypes.Structure):
    """`DenseAttention` of `cpp/launch.h`."""

    _fields_ = [(name, ctypes.c_int) for name in ("batch", "heads", "kv_heads", "queries", "keys")] + [
        (name, ctypes.c_void_p) for name in ("q", "k", "v", "scales", "out")
    ]


def cuda_include() -> Path | None:
    """Returns a folder with `cuda.h`: the toolkit's, or else Triton's; None without either."""
    folders = [Path("/usr/local/cuda/include")]
    try:
        import triton

        folders.append(Path(triton.__file__).parent / "backends" / "nvidia" / "include")
    except ImportError:
        pass
    return next((folder for folder in folders if (folder / "cuda.h").is_file()), None)


def build_launches(out: Path) -> Path:
    """Compiles the launches, without the plugin classes, to a shared library; ValueError where that fails."""
    compiler, include = shutil.which("g++"), cuda_include()
    if compiler is None or include is None:
        raise ValueError("the plugins' library needs g++ and cuda.h (of CUDA, or of Triton)")
    options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-isystem", str(include)]
    sources = [str(SOURCES / name) for name in _LAUNCHES]
    done = subprocess.run(
        [compiler, *options, *sources, "-ldl", "-o", str(out)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"{compiler} cannot compile {SOURCES}: {done.stderr[-1000:]}")
    return out


class PluginKernels:
    """The kernels of a bundle, launched by the C++ library; ValueError with the library's message."""

    def __init__(self, library: Path, bundle: bytes) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("open", "attend_dense", "attend_cache"):
            getattr(self._library, f"blockscale_{name}").restype = ctypes.c_char_p
        self._library.blockscale_cache_workspace.restype = ctypes.c_size_t
        self._handle = ctypes.c_void_p()
        self._check(self._library.blockscale_open(bundle, ctypes.c_size_t(len(bundle)), ctypes.byref(self._handle)))

    def close(self) -> None:
        """Unloads the kernels."""
        self._library.blockscale_close(self._handle)

    def attend_dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Computes FP8 attention of dense q, k and v; operands as the node `QuantFp8Attention` has them."""
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
        call = DenseCall(*sizes, *map(_address, (q, k, v, scales, out)))
        self._check(self._library.blockscale_attend_dense(self._handle, ctypes.byref(call), _stream()))

    def cache_call(self, tensors: dict[str, torch.Tensor | None], capacity: int) -> CacheCall:
        """Returns the call of `QuantCacheAttention` on these tensors, by `CacheCall`'s names; `workspace` is added."""
        q, k = tensors["q"], tensors["k"]
        assert q is not None and k is not None
        sizes = (q.shape[0], q.shape[1], k.shape[1], q.shape[2], q.shape[3], capacity, tensors["k_blocks"] is not None)
        call = CacheCall(*sizes)
        tensors["workspace"] = torch.empty(
            self._library.blockscale_cache_workspace(ctypes.byref(call)), dtype=torch.uint8, device=q.device
        )
        for name, tensor in tensors.items():
            setattr(call, name, _address(tensor))
        return call

    def attend_cache(self, call: CacheCall) -> None:
        """Rounds the new tokens into the caches and attends."""
        self._check(self._library.blockscale_attend_cache(self._handle, ctypes.byref(call), _stream()))

    def _check(self, error: bytes | None) -> None:
        if error is not None:
            raise ValueError(error.decode())


def _address(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
