"""The choice of kernels becomes a part of the key under which vLLM keeps compiled graphs on disk.

vLLM's key covers its settings, and not which class has taken a layer. That depends on more than settings: on whether a
kernel passed its self-test here, and on the weights themselves, of which the layout of Hopper's kernels holds not all.
A graph that calls our op for a layer would read Marlin's parameters as ours, or the reverse. So the key has the
plug-in's version and switches, and a digest of what each linear layer got.

vLLM asks for the key at the first forward pass, when the weights are loaded.
"""

from __future__ import annotations

import hashlib

from vllm import envs

from quant import __version__
from quant.vllm_plugin.switches import switches

_kernels: dict[str, str] = {}
"""By layer, what runs it; both are names."""


def record(layer: str, kernel: str) -> None:
    """Notes what runs a layer."""
    _kernels[layer] = kernel


def key() -> str:
    """Returns the plug-in's part of the key."""
    digest = hashlib.sha256(repr(sorted(_kernels.items())).encode()).hexdigest()[:16]
    return f"kernels of blockscale {__version__}, {','.join(sorted(switches()))}, {digest}"


def install() -> None:
    """Adds the part to vLLM's key, once however often it is called."""
    # vLLM calls the functions of this table and hashes what they return.
    envs.environment_variables["BLOCKSCALE"] = key
