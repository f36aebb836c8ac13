"""Targets: which GPU an engine is for, and which TensorRT can build it here.

    TensorRT-RTX  `tensorrt_rtx`  builds ahead of time, on any machine, for the GPUs it lists; never for Hopper or B200
    TensorRT      `tensorrt`      times kernels while it builds, so it builds for the GPU in this machine and no other

One API with two libraries under it. Code that must tell them apart asks whether the module has
`ComputeCapability`: only TensorRT-RTX takes its target as a setting.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from quant.kernels.hardware import CAPABILITIES

_GENERATIONS = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
TARGETS = {f"sm{major}{minor}": (major, minor) for major, minor in _GENERATIONS} | CAPABILITIES
# What `tensorrt_rtx.ComputeCapability` lists; the worker asks the installed one, which may know fewer or more.
RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
EXTRAS = {"tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}


@dataclass(frozen=True)
class Target:
    """A GPU generation: its name as the user wrote it, and its CUDA compute capability."""

    name: str
    capability: tuple[int, int]

    @property
    def sm(self) -> str:
        """`sm120`, however the user named it."""
        return f"sm{self.capability[0]}{self.capability[1]}"

    @property
    def has_fp8(self) -> bool:
        """Whether its tensor cores multiply FP8."""
        return self.capability >= (8, 9)

    @property
    def has_fp4(self) -> bool:
        """Whether its tensor cores multiply FP4."""
        return self.capability >= (10, 0)

    def __str__(self) -> str:
        return self.sm if self.name == self.sm else f"{self.name} ({self.sm})"


@dataclass(frozen=True)
class Backend:
    """The library that builds the engine, and one sentence for the user and the receipt why that one."""

    module: str
    reason: str


def resolve_target(name: str) -> Target:
    """The target of that name; `local` is the GPU in this machine.

    Raises:
        ValueError: an unknown name, or `local` without a GPU.
    """
    if name == "local":
        capability = local_capability()
        if capability is None:
            raise ValueError(f"target local: this machine has no CUDA GPU; name the target: {', '.join(TARGETS)}")
        return Target("local", capability)
    if name.lower() not in TARGETS:
        raise ValueError(f"unknown target {name!r}; known targets: {', '.join(TARGETS)}, local")
    return Target(name.lower(), TARGETS[name.lower()])


def local_capability() -> tuple[int, int] | None:
    """Compute capability of this machine's first GPU, or None."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def choose_backend(target: Target, backend: str | None = None) -> Backend:
    """The library that builds for `target` on this machine.

    Where both can, TensorRT is taken: it times the kernels on the very GPU. `backend` insists on one.

    Raises:
        ValueError: none can, or none that can is installed; the message names the extra and what each can build for.
    """
    if backend is not None and backend not in EXTRAS:
        raise ValueError(f"unknown backend {backend!r}; known backends: {', '.join(EXTRAS)}")
    able = {
        "tensorrt": local_capability() == target.capability,
        "tensorrt_rtx": target.sm in RTX_TARGETS,
    }
    wanted = [name for name in able if backend in (None, name)]
    for name in wanted:
        if able[name] and importlib.util.find_spec(name):
            return Backend(name, f"{name} builds for {target}: {_why(name)}")
    raise ValueError(_explain(target, wanted, able))


def _why(module: str) -> str:
    if module == "tensorrt":
        return "it times kernels on this machine's GPU"
    return "it builds ahead of time and needs no GPU"


def _explain(target: Target, wanted: list[str], able: dict[str, bool]) -> str:
    """Why nothing here builds for `target`, and what would."""
    words = [f"no engine for {target}"]
    if "tensorrt_rtx" in wanted:
        if able["tensorrt_rtx"]:
            words.append("TensorRT-RTX can build it on any machine: pip install 'blockscale[tensorrt-rtx]'")
        else:
            words.append(f"TensorRT-RTX builds for {', '.join(RTX_TARGETS)} alone")
    if "tensorrt" in wanted:
        if not able["tensorrt"]:
            words.append(
                f"TensorRT builds for the GPU it runs on, so run it on a machine with {target} "
                "(pip install 'blockscale[tensorrt]')"
            )
        else:
            words.append("TensorRT can build it on this machine's GPU: pip install 'blockscale[tensorrt]'")
    return "; ".join(words)
