"""The environment variable `BLOCKSCALE_VLLM`: words, separated by commas, that select parts of the plug-in.

0             vLLM's own kernels
1             ours (the default)
layers        our layers between vLLM's own norms and activations
fp8-prefill   NVFP4 layers multiply prompts and large batches in FP8, from 192 tokens on where the layer is large enough
              to gain. Inputs and decoded weights are rounded to E4M3, inputs with a scale a token: faster, less precise
"""

from __future__ import annotations

import os

from quant.formats.known_names import known_names

VARIABLE = "BLOCKSCALE_VLLM"
KNOWN = ("0", "1", "layers", "fp8-prefill")


def switches() -> frozenset[str]:
    """Returns the words that are set."""
    return frozenset(word.strip() for word in os.environ.get(VARIABLE, "1").split(",") if word.strip())


def unknown_switches() -> str:
    """Returns a sentence about words that mean nothing; empty if there are none."""
    unknown = sorted(switches() - set(KNOWN))
    return f"{VARIABLE}: no switch {unknown[0]!r}; {known_names(unknown[0], KNOWN)}" if unknown else ""
