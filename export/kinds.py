"""The kinds of export, by the word after `--to`, with the options that each takes.

    onnx              model.onnx: checked, every layer compared with PyTorch, and opened in onnxruntime
    tensorrt          an engine, built and audited; its intermediate ONNX file is checked in the same way
    aoti              a .pt2 package of AOTInductor; of a decoder, one that reads prompts and decodes over a KV cache
    torch-tensorrt    an engine of one pass, compiled by torch-tensorrt and audited
    gguf              one file for llama.cpp, Ollama and LM Studio, with the same codes and scales
    modelopt, compressed-tensors
                      the same checkpoint in the other layout, which other servers load

This file does not import torch, so that `quant export --help` need not wait for it.
"""

# Options of everything that traces the module.
_GRAPH = {"shapes", "inputs", "attention", "dtype", "calib", "calib_samples", "seqlen"}
KINDS: dict[str, tuple[str, set[str]]] = {
    "onnx": ("-onnx", {*_GRAPH, "capacity", "genai", "kv_cache", "lm_head", "target"}),
    "tensorrt": (".engine", {*_GRAPH, "target", "backend", "allow_fallback", "features", "capacity", "kv_cache"}),
    "aoti": (".pt2", {*_GRAPH, "capacity"}),
    "torch-tensorrt": (".engine", {"inputs", "attention", "dtype", "target", "allow_fallback"}),
    "gguf": (".gguf", set()),
    "modelopt": ("-modelopt", set()),
    "compressed-tensors": ("-compressed-tensors", set()),
}
"""Every kind of export: the ending of its default destination, and the options that only some kinds take."""
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Values of --dtype, and torch's names for them."""
CHOICES = {
    "attention": ("native", "plugin", "none"),
    "kv_cache": ("fp8", "nvfp4", "16bit"),
    "lm_head": ("int8", "16bit"),
    "features": ("refit", "weight-streaming", "version-compatible"),
    "dtype": tuple(DTYPES),
}
"""Values of the options that take one of a few words."""
CALIB_SAMPLES, SEQLEN = 32, 512
"""Rows of calibration data by default, and tokens of a row."""
