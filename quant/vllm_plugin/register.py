"""vLLM calls `register` in every process that it starts (entry point `vllm.general_plugins`), perhaps more than once.

It offers our kernels in nine parts (`_PARTS`), each of which vLLM may keep for itself, with one line in its log that
says why. A part puts our classes at the head of vLLM's lists, or our functions in the places of vLLM's
(`releases.py`), and does so once however often it is called.

Releases are admitted by the names, arguments and fields that they have (`releases.py`), and kernels by a product that
they compute before a layer takes them (`self_test.py`); no version is compared. All of vLLM is left as it is where the
environment has `BLOCKSCALE_VLLM=0`, where Triton is missing, and where the GPU is not a Hopper GPU. Other words of that
variable are listed in `switches.py`.

vLLM keeps compiled graphs on disk under a hash of its settings, which does not cover the choice of kernels. A graph
that was compiled with our ops must not be found without them, nor the reverse: `switches.py` adds to that hash.

`--linear-backend` and `--moe-backend` still decide: our classes take layers only where they are "auto".
"""

import importlib
import logging

from quant.kernels.base.hardware import has_triton
from quant.vllm_plugin.switches import install_graph_key, switches, unknown_switches

_PARTS = {
    "linear": ("linear_kernels", "install_linear_kernels"),
    "experts": ("fused_experts", "install_nvfp4_experts"),
    "mxfp4_experts": ("mxfp4_experts", "install_mxfp4_experts"),
    "fp8_experts": ("fp8_experts", "install_fp8_experts"),
    "attention": ("nvfp4_attention", "install_attention_backend"),
    "warm_up": ("warm_up", "install_warm_up"),
    "overlap": ("between_layers", "install_norms"),
    "rotation": ("between_layers", "install_rotations"),
    "decode_attention": ("between_layers", "install_decode_attention"),
}
"""By part, its module here, and the function that offers it."""

RAN = ("0.26", "0.29", "0.33")
"""Releases of vLLM in which the plug-in ran on a GPU; for others the log says that they are untested."""

_log = logging.getLogger("vllm.blockscale")


def register() -> None:
    """Offers our kernels to vLLM, or says in its log why not."""
    install_graph_key()
    if reason := unknown_switches():
        _log.warning("Blockscale: %s", reason)
    if "0" in switches():
        _log.info("Blockscale: BLOCKSCALE_VLLM=0 leaves vLLM as it is")
    elif reason := plugin_refusal():
        _log.warning("Blockscale leaves vLLM as it is: %s", reason)
    else:
        offered, refused = install()
        if offered:
            _log.info("Blockscale: %s may take our kernels", ", ".join(offered))
        for part, reason in refused.items():
            _log.warning("Blockscale: vLLM %s keeps its own %s: %s", vllm_version(), part.replace("_", " "), reason)
        if offered and ".".join(vllm_version().split(".")[:2]) not in RAN:
            _log.info("Blockscale: not yet run in vLLM %s on a GPU, only in %s", vllm_version(), ", ".join(RAN))


def vllm_version() -> str:
    """Returns the version of vLLM, "0.29.0"."""
    import vllm

    return str(vllm.__version__)


def plugin_refusal() -> str:
    """Returns the reason why vLLM is left as it is, empty if it is not."""
    from vllm.platforms import current_platform

    if not has_triton():
        return "Triton is not installed, and our kernels are written in it"
    if not current_platform.is_cuda():
        return f"our kernels for vLLM are for Hopper GPUs, and this platform is {current_platform.device_name}"
    capability = current_platform.get_device_capability()
    if capability is None or tuple(capability) != (9, 0):
        found = "unknown" if capability is None else ".".join(map(str, capability))
        return f"our kernels for vLLM are for Hopper GPUs (9.0), and the compute capability of this one is {found}"
    return ""


def install() -> tuple[list[str], dict[str, str]]:
    """Offers each part; returns what was offered, in words, and by part the reason why one was not."""
    offered, refused = [], {}
    for part, (module, function) in _PARTS.items():
        if module == "between_layers" and "layers" in switches():
            continue
        try:
            # A part imports the names of vLLM that it needs, before it changes anything.
            offered.append(getattr(importlib.import_module(f"quant.vllm_plugin.{module}"), function)())
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
            refused[part] = " ".join(str(error).split())[:200]
    return offered, refused
