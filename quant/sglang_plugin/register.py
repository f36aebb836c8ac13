"""SGLang calls `register` in every process that it starts (entry point `sglang.srt.plugins`).

With `BLOCKSCALE_SGLANG=1` in the environment, NVFP4 linear layers of compressed-tensors checkpoints take our kernels on
Hopper GPUs, where SGLang has Marlin. It must be asked for, since nobody has run it inside SGLang on a GPU yet: it was
written from SGLang's source, and its classes were tested on a CPU.

SGLang has no lists of kernels, as vLLM has. Its plug-ins put functions of their own around methods
(`sglang/srt/plugins/hook_registry.py`). They do not replace its classes, which its loader knows by name
(`WEIGHT_LOADER_V2_SUPPORTED` in `sglang/srt/layers/linear.py`). SGLang is left as it is, with one line in the log that
says why, in a release whose scheme was not read, and where Triton is missing. Layers on another GPU stay with SGLang
(`linear.py`).
"""

from __future__ import annotations

import logging
import os
from importlib import metadata

from quant.kernels.hardware import has_triton
from quant.sglang_plugin import linear

READ = ("0.5.23",)
"""Releases of SGLang whose scheme this package knows."""

SCHEME = (
    "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a16_nvfp4.CompressedTensorsW4A16Fp4"
)

_log = logging.getLogger("sglang.blockscale")


def register() -> None:
    """Offers our kernels to SGLang where that was asked for, or says in its log why not."""
    if os.environ.get("BLOCKSCALE_SGLANG", "0") != "1":
        _log.info("Blockscale leaves SGLang as it is: BLOCKSCALE_SGLANG=1 gives NVFP4 linear layers its kernels")
    elif reason := why_not():
        _log.warning("Blockscale leaves SGLang as it is: %s", reason)
    else:
        install()
        _log.info("Blockscale: linear layers in NVFP4 of compressed-tensors checkpoints may take our kernels")


def why_not() -> str:
    """The reason why SGLang is left as it is, empty if it is not."""
    version = metadata.version("sglang")
    if version not in READ:
        return f"SGLang {version} was never looked at by this blockscale, only {', '.join(READ)}"
    return "" if has_triton() else "Triton is not installed, and our kernels are written in it"


def install() -> None:
    """Puts our functions around the scheme's; SGLang applies them when all plug-ins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{SCHEME}.process_weights_after_loading", linear.process_weights, HookType.AROUND)
    HookRegistry.register(f"{SCHEME}.apply_weights", linear.apply_weights, HookType.AROUND)
