"""`QuantFp8Attention`: our FP8 attention kernel inside a TensorRT engine.

In an ONNX file the kernel is one node, which TensorRT's parser matches with a plugin by three of its attributes:

    domain "quant", op type "QuantFp8Attention"
    inputs     q       FLOAT8E4M3FN [batch, heads, seq_q, dim]        outputs of QuantizeLinear
               k       FLOAT8E4M3FN [batch, kv_heads, seq_kv, dim]    kv_heads divides heads (GQA)
               v       FLOAT8E4M3FN [batch, kv_heads, seq_kv, dim]
               scales  FLOAT [3]                                      of q, k and v: value = code · scale
    output     out     BFLOAT16 or FLOAT16 [batch, heads, seq_q, dim]
    attributes causal            INT    0 or 1; the last query sees every key (right-aligned when seq_q < seq_kv)
               softmax_scale     FLOAT  multiplies q·k; 0 stands for 1/√dim
               output_type       INT    ONNX's number of the output's type: 16 (BFLOAT16) or 10 (FLOAT16)
               plugin_version    STRING "1"
               plugin_namespace  STRING "quant"

`dim` is 64, 128 or 256 and is known when the engine is built; the other sizes may be dynamic. All tensors are dense
in row-major order. `onnx_node` makes the node.

One kernel serves both runtimes. Full TensorRT takes a *quick-deployable* plugin: its kernel is compiled to PTX when
the engine is built, the PTX lies inside the engine, and TensorRT launches it with the grid and arguments declared
here; no Python is there at run time. TensorRT-RTX has no such plugins and takes an `IPluginV3`, whose `enqueue`
launches the same PTX through the CUDA driver. What both need to know about shapes, types, fields and the launch are
plain functions on numbers, or on TensorRT's symbolic dimensions, so that they can be tested without TensorRT.
"""

from __future__ import annotations

NAME = "QuantFp8Attention"
NAMESPACE = "quant"
VERSION = "1"
DOMAIN = "quant"
HEAD_DIMS = (64, 128, 256)

OUTPUT_TYPES = {16: "BF16", 10: "FP16"}
"""Names of the output types in TensorRT, by their number in ONNX."""
