"""The kinds of export are listed here without importing torch, for help texts and for checks of options."""

from __future__ import annotations

# Options of everything that traces the module.
_GRAPH = {"shapes", "inputs", "attention", "dtype", "calib", "calib_samples", "seqlen"}
# Options of everything that builds an engine of such a graph.
_ENGINE = {*_GRAPH, "target", "backend", "allow_fallback", "features"}
KINDS: dict[str, tuple[str, set[str]]] = {
    "onnx": ("-onnx", {*_GRAPH, "capacity", "genai", "kv_cache"}),
    "tensorrt": (".engine", {*_ENGINE, "capacity", "kv_cache"}),
    "aoti": (".pt2", {*_GRAPH, "capacity"}),
    "torch-tensorrt": (".pt2", {"inputs", "attention", "dtype", "target", "allow_fallback"}),
    "triton-server": ("-triton", {*_ENGINE, "capacity"}),
    "edge-llm": ("-edge-llm", set()),
    "modelopt": ("-modelopt", set()),
    "compressed-tensors": ("-compressed-tensors", set()),
}
"""Every kind of export: the ending of its default destination, and the options that only some kinds take."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Values of --dtype, and torch's names for them."""
CHOICES = {
    "attention": ("native", "plugin", "none"),
    "kv_cache": ("fp8", "nvfp4", "16bit"),
    "features": ("refit", "weight-streaming", "version-compatible"),
    "dtype": tuple(DTYPES),
}
"""Values of the options that take one of a few words."""
CALIB_SAMPLES, SEQLEN = 32, 512
"""Rows of calibration data by default, and tokens of a row."""
