"""vLLM calls `register` in every process that it starts (entry point `vllm.general_plugins`), perhaps more than once.

It puts our kernel classes at the head of vLLM's lists, where they take quantized layers with inputs in 16 bit. vLLM is
left as it is, with one line in its log that says why, where the environment has `BLOCKSCALE_VLLM=0`, where vLLM is a
release that was never tried, where Triton is missing, and where the GPU is not a Hopper GPU. It also replaces the norms
and SwiGLU between our layers (`quant/vllm_plugin/overlap.py`), unless the environment has `BLOCKSCALE_VLLM=layers`.

vLLM keeps compiled graphs on disk under a hash of its settings, which does not cover the choice of kernels. A graph
that was compiled with our ops must not be found without them, nor the reverse: `install` adds itself to that hash.

`--linear-backend` and `--moe-backend` still have the last word: our classes take layers only where they are "auto".
"""

from __future__ import annotations

import logging
import os

from quant import __version__
from quant.kernels.hardware import has_triton

TRIED = ("0.26",)
"""Releases of vLLM whose lists of kernels this file knows."""

_log = logging.getLogger("vllm.blockscale")


def register() -> None:
    """Offers our kernels to vLLM, or says in its log why not."""
    if os.environ.get("BLOCKSCALE_VLLM", "1") == "0":
        _log.info("Blockscale: BLOCKSCALE_VLLM=0 leaves vLLM as it is")
    elif reason := plugin_refusal():
        _log.warning("Blockscale leaves vLLM as it is: %s", reason)
    else:
        try:
            offered = install()
        except (AttributeError, ImportError, KeyError) as error:  # before it changes anything
            _log.warning("Blockscale leaves vLLM as it is: this build of it has other names (%s)", error)
        else:
            _log.info("Blockscale: %s", offered)


def plugin_refusal() -> str:
    """The reason why vLLM is left as it is, empty if it is not."""
    import vllm
    from vllm.platforms import current_platform

    # The lists that `install` changes are private to vLLM, and may change with any minor release.
    release = ".".join(vllm.__version__.split(".")[:2])
    if release not in TRIED:
        return f"vLLM {vllm.__version__} was never tried with this blockscale, only {', '.join(TRIED)}"
    if not has_triton():
        return "Triton is not installed, and our kernels are written in it"
    if not current_platform.is_cuda():
        return f"our kernels for vLLM are for Hopper GPUs, and this platform is {current_platform.device_name}"
    capability = current_platform.get_device_capability()
    if capability is None or tuple(capability) != (9, 0):
        return f"our kernels for vLLM are for Hopper GPUs (9.0), and this one has compute capability {capability}"
    return ""


def install() -> str:
    """Puts our classes into vLLM's lists, once however often it is called; returns a sentence that says which."""
    from vllm import envs
    from vllm.model_executor.kernels import linear as lists
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.platforms import PlatformEnum

    from quant.vllm_plugin import attention, experts, linear, overlap

    # Every import above may fail in an unknown build of vLLM, so nothing is changed before this line.
    places = (
        (lists._POSSIBLE_NVFP4_KERNELS, linear.BlockscaleNvFp4LinearKernel),
        (lists._POSSIBLE_MXFP4_KERNELS, linear.BlockscaleMxFp4LinearKernel),
        (lists._POSSIBLE_MXFP8_KERNELS, linear.BlockscaleMxfp8LinearKernel),
        (lists._POSSIBLE_WFP8A16_KERNELS, linear.BlockscaleFp8LinearKernel),
    )
    for by_platform, ours in places:
        classes = by_platform[PlatformEnum.CUDA]
        if ours not in classes:
            # vLLM asks the classes in the order of the list, and takes the first that can run a layer.
            classes.insert(0, ours)
    # After Machete, which vLLM prefers to Marlin on Hopper: our INT4 kernel was never measured against it.
    classes = lists._POSSIBLE_KERNELS[PlatformEnum.CUDA]
    if linear.BlockscaleInt4LinearKernel not in classes:
        classes.insert(classes.index(lists.MarlinLinearKernel), linear.BlockscaleInt4LinearKernel)
    # For NVFP4 without activation scales two modules go by this name and ask no list.
    lists.MarlinNvFp4LinearKernel = linear.BlockscaleNvFp4LinearKernel
    modelopt.MarlinNvFp4LinearKernel = linear.weight_only_nvfp4
    experts.install()
    attention.install()
    if os.environ.get("BLOCKSCALE_VLLM") != "layers":
        overlap.install()
    # vLLM hashes the values of this table into the key of its compile cache: graphs with our ops have a key of their
    # own.
    envs.environment_variables["BLOCKSCALE"] = lambda: f"kernels of blockscale {__version__}"
    return (
        "linear layers in NVFP4, MXFP4, MXFP8, INT4 and weight-only FP8, experts in NVFP4 and NVFP4 KV caches may take "
        "our kernels"
    )
