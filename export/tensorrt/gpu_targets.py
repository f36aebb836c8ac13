"""The target of an engine is the kind of GPU that it runs on; here is chosen which TensorRT can build for it.

    TensorRT-RTX  `tensorrt_rtx`  builds ahead of time, on any machine, for the GPUs it lists; never for Hopper or B200
    TensorRT      `tensorrt`      times kernels while it builds, so it builds for the GPU in this machine and no other

Both have one API. Code that must tell them apart asks whether the module has `ComputeCapability`: only TensorRT-RTX
takes its target as a setting.
"""

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from quant.base.errors import install_command, known_names, option
from quant.recipes.gpus import GENERATIONS, Hardware, like
from quant.recipes.targets import get_gpu

# What `tensorrt_rtx.ComputeCapability` lists; the worker asks the installed one, which may know fewer or more.
RTX_TARGETS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
FEATURES = {
    "refit": ("REFIT",),
    "weight-streaming": ("WEIGHT_STREAMING",),
    "version-compatible": ("VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"),
}
"""What an engine can be built for in addition, and TensorRT's flags: weights that are replaced without a build, weights
that stay in the host's memory, and a lean runtime of other versions that loads it."""
# The extra of this package that installs each library.
EXTRAS = {"tensorrt_rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}


@dataclass(frozen=True)
class Library:
    """The library that builds the engine, and one sentence for the user and the receipt why that one."""

    module: str
    reason: str


_REASONS = {
    "tensorrt": "it times kernels on this machine's GPU",
    "tensorrt_rtx": "it builds ahead of time and needs no GPU",
}


def resolve_target(name: str) -> Hardware:
    """Returns the GPU of a name; `local` is this machine's. ValueError for an unknown name, or without a GPU."""
    if name != "local":
        return get_gpu(name)
    capability = local_capability()
    if capability is None:
        raise ValueError(f"target local: this machine has no CUDA GPU; name the target: {', '.join(GENERATIONS)}")
    return like("local", capability)


def resolve_targets(names: str) -> list[Hardware]:
    """Returns the targets in a list such as `sm89,sm120`, each once; ValueError as `resolve_target`."""
    targets = {target.sm: target for target in map(resolve_target, names.replace(" ", "").split(","))}
    return list(targets.values())


def choose_common_library(targets: Sequence[Hardware], backend: str | None, features: Collection[str]) -> Library:
    """Returns the library that builds one engine for all targets, with these features; ValueError if none does."""
    # Full TensorRT builds for the one GPU that it times kernels on.
    several = "tensorrt_rtx" if len(targets) > 1 and backend is None else backend
    if several == "tensorrt" and len(targets) > 1:
        raise ValueError(
            f"TensorRT builds for one GPU; {option('backend', 'tensorrt_rtx')} builds one engine for several"
        )
    chosen, *_ = [choose_library(target, several) for target in targets]
    if len(targets) > 1:
        reason = f"{chosen.module} builds one engine for {', '.join(map(str, targets))}: {_REASONS[chosen.module]}"
        chosen = Library(chosen.module, reason)
    if chosen.module == "tensorrt_rtx" and "refit" in features and local_capability() is None:
        raise ValueError("TensorRT-RTX builds engines for refit on machines with a GPU alone; leave refit out")
    return chosen


def packages_of_engine(targets: Sequence[Hardware], backend: str | None) -> list[str]:
    """Returns the library to install where none that builds for these targets on this machine is; else nothing."""
    able = [name for name in EXTRAS if backend in (None, name) and all(_is_able(name, target) for target in targets)]
    return [] if not able or any(importlib.util.find_spec(name) for name in able) else able[:1]


def _is_able(library: str, target: Hardware) -> bool:
    """Returns whether a library builds for a target on this machine, installed or not."""
    return target.sm in RTX_TARGETS if library == "tensorrt_rtx" else local_capability() == target.capability


def local_capability() -> tuple[int, int] | None:
    """Returns the compute capability of this machine's first GPU, or None."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


def choose_library(target: Hardware, backend: str | None = None) -> Library:
    """Returns the library that builds for `target` on this machine; `backend` insists on one.

    If both can, TensorRT is chosen, since it times the kernels on the GPU itself. Raises ValueError if none can, or if
    none that can is installed; the message names the extra and the targets of each library.
    """
    if backend is not None and backend not in EXTRAS:
        raise ValueError(f"unknown backend {backend!r}; {known_names(backend, EXTRAS, 'backends')}")
    able = {name: _is_able(name, target) for name in ("tensorrt", "tensorrt_rtx")}  # in order of preference
    for name in able:
        if backend in (None, name) and able[name] and importlib.util.find_spec(name):
            return Library(name, f"{name} builds for {target}: {_REASONS[name]}")
    ways_out = {
        ("tensorrt_rtx", True): f"TensorRT-RTX can build it on any machine: {install_command('tensorrt-rtx')}",
        ("tensorrt_rtx", False): f"TensorRT-RTX builds for {', '.join(RTX_TARGETS)} alone",
        ("tensorrt", True): f"TensorRT can build it on this machine's GPU: {install_command('tensorrt')}",
        ("tensorrt", False): f"TensorRT builds for the GPU it runs on, so run it on a machine with {target} "
        f"({install_command('tensorrt')})",
    }
    advice = [ways_out[name, able[name]] for name in EXTRAS if backend in (None, name)]
    raise ValueError("; ".join([f"no engine for {target}", *advice]))
