"""The environment variable `BLOCKSCALE_VLLM`: words, separated by commas, that select parts of the plug-in.

0             vLLM's own kernels
1             ours (the default)
layers        our layers between vLLM's own norms and activations
fp8-prefill   NVFP4 layers multiply prompts and large batches in FP8, from 192 tokens on where the layer is large enough
              to gain. Inputs and decoded weights are rounded to E4M3, inputs with a scale a token: faster, less precise
"""

import hashlib
import os

from quant import __version__
from quant.base.errors import known_names

VARIABLE = "BLOCKSCALE_VLLM"
KNOWN = ("0", "1", "layers", "fp8-prefill")


def switches() -> frozenset[str]:
    """Returns the words that are set."""
    return frozenset(word.strip() for word in os.environ.get(VARIABLE, "1").split(",") if word.strip())


def unknown_switches() -> str:
    """Returns a sentence about words that mean nothing; empty if there are none."""
    unknown = sorted(switches() - set(KNOWN))
    return f"{VARIABLE}: no switch {unknown[0]!r}; {known_names(unknown[0], KNOWN)}" if unknown else ""


# vLLM's key of compiled graphs on disk covers its settings, and not which class has taken a layer, which depends on
# self-tests and on the weights. A graph that calls our op for a layer would read Marlin's parameters as ours, or the
# reverse. So the key has the plug-in's version and switches, and a digest of what each linear layer got.
#
# vLLM asks for the key at the first forward pass, when the weights are loaded. It hashes what the functions of a table
# of environment variables return, and copies the variables that the table names to workers on other machines (Ray). So
# the entry is called as the plug-in's variable, and is made even where the plug-in leaves vLLM alone: a worker without
# the variable would take our kernels, although `BLOCKSCALE_VLLM=0` was said.

_kernels: dict[str, str] = {}
"""By layer, what runs it; both are names."""


def record(layer: str, kernel: str) -> None:
    """Notes what runs a layer."""
    _kernels[layer] = kernel


def key() -> str:
    """Returns the plug-in's part of the key."""
    digest = hashlib.sha256(repr(sorted(_kernels.items())).encode()).hexdigest()[:16]
    return f"kernels of blockscale {__version__}, {','.join(sorted(switches()))}, {digest}"


def install_graph_key() -> None:
    """Adds the part to vLLM's key."""
    from vllm import envs

    envs.environment_variables[VARIABLE] = key
