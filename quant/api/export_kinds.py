"""The kinds of export and the options that each of them takes, for help texts and checks."""

from __future__ import annotations

LAYOUTS = ("modelopt", "compressed-tensors")
"""Layouts of checkpoints that are read, and that `quant.convert` writes."""
SUFFIXES = {
    "onnx": "-onnx",
    "tensorrt": ".engine",
    "triton-server": "-triton",
    "aoti": ".pt2",
    "torch-tensorrt": ".pt2",
    "modelopt": "-modelopt",
    "compressed-tensors": "-compressed-tensors",
}
"""What the default destination ends in, by kind."""

_GRAPH = {"shapes", "inputs", "attention", "calib", "calib_samples", "seqlen"}
_ENGINE = {"decode", "target", "backend", "allow_fallback"}
OPTIONS: dict[str, set[str]] = {
    "onnx": {*_GRAPH, "decode"},
    "tensorrt": {*_GRAPH, *_ENGINE},
    "triton-server": {*_GRAPH, *_ENGINE},
    "aoti": _GRAPH,
    "torch-tensorrt": {"inputs", "attention"},
    "modelopt": set(),
    "compressed-tensors": set(),
}
"""Names of the options that a kind of export looks at, beside those that all do."""
