"""Attention and the KV cache as ops that PyTorch runs while a model is traced, and their translation to ONNX nodes.

quant::onnx_attention      Attention, or its parts in FP32; in FP8 trt::TRT_QuantizedAttention over QuantizeLinear
                           and DequantizeLinear of q, k and v, or the node of our own plugin over their codes
quant::onnx_scatter        TensorScatter: keys or values of new tokens at each row's position in the cache
quant::onnx_grouped_attention
                           both of these in one node, which `onnxruntime_graph` makes GroupQueryAttention
quant::onnx_delta_rule     Scan: the state of a gated delta rule, token by token
quant::onnx_fp8_cache, quant::onnx_nvfp4_cache
                           QuantCacheAttention, a node of our plugin: attention over a KV cache in FP8 or NVFP4
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quant.export.onnx.opsets import (
    BOOL,
    FLOAT,
    FLOAT8E4M3FN,
    INT32,
    PLUGIN_DOMAIN,
    PLUGIN_VERSION,
    SERVING_OPSET,
    TRT_DOMAIN,
    narrowed,
    opset,
    round_trip,
    widened,
)
from quant.formats.format import E4M3, FORMATS, Format
from quant.formats.tensor import fake_quantize
from quant.kernels.attention.kv_pages import KVPages, decode_kv, write_reference
from quant.kernels.attention.reference import fp8_attention_reference

_PLUGIN = {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_DOMAIN}


def _attention_body(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, scales: list[float], kind: str
) -> Tensor:
    """Computes in PyTorch the attention that an exported graph holds as one op.

    Args:
        q: `[batch, heads, seq_q, dim]`.
        k, v: `[batch, kv_heads, seq_kv, dim]`.
        mask: bool `[batch, 1, seq_q, seq_kv]`, True where a query sees a key; or numbers `[batch, heads, seq_q,
            seq_kv]`, added to the scores; None for all.
    """
    if scales and kind == "plugin":
        q8, k8, v8 = (
            (x.float() / s).clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)
            for x, s in zip((q, k, v), scales, strict=False)
        )
        operands = torch.tensor(scales[:3], dtype=torch.float32)
        return fp8_attention_reference(q8, k8, v8, operands, causal=causal, softmax_scale=scale, dtype=q.dtype)
    dtype = q.dtype
    if scales:
        fp8 = FORMATS["fp8"]
        q, k, v = (
            fake_quantize(x, fp8, scale=torch.tensor(s, dtype=torch.float32))
            for x, s in zip((q, k, v), scales, strict=False)
        )
    # Grouped-query attention: each key head serves several query heads.
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1).float(), v.repeat_interleave(repeat, 1).float()
    scores = q.float() @ k.mT * scale
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    p = scores.softmax(-1)
    # TensorRT rounds the probabilities too, with the fourth scale.
    if scales:
        p = fake_quantize(p, FORMATS["fp8"], scale=torch.tensor(scales[3], dtype=torch.float32))
    return (p @ v).to(dtype)


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool, *_: Any
) -> Tensor:
    """Computes the op in 16 bit by PyTorch's own attention, in graphs that stay in PyTorch."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _attention(
    q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool, scales: Sequence[float], kind: str, *, runtime: str
) -> Any:
    op = opset()
    # TensorRT has fused kernels in half precision, and with a mask for four heads or more.
    if not scales and runtime == "tensorrt" and (int(q.dtype) == FLOAT or (mask is not None and q.shape[1] < 4)):
        return narrowed(_spelled_attention(q, k, v, mask, scale, causal), q.dtype)
    if not scales:
        y, *_ = op.Attention(q, k, v, mask, scale=scale, is_causal=int(causal))
        return y
    if kind == "plugin":
        codes = [
            op.QuantizeLinear(x, op.Constant(value_float=s), output_dtype=FLOAT8E4M3FN)
            for x, s in zip((q, k, v), scales, strict=False)
        ]
        steps = op.Constant(value_floats=list(scales[:3]))
        return opset(PLUGIN_DOMAIN).QuantFp8Attention(
            *codes, steps, causal=int(causal), softmax_scale=scale, output_type=int(q.dtype), **_PLUGIN
        )
    # TensorRT fuses QuantizeLinear, DequantizeLinear and this op into one FP8 kernel.
    rounded = [
        round_trip(FORMATS["fp8"], widened(x), op.Constant(value_float=s), x.dtype)
        for x, s in zip((q, k, v), scales, strict=False)
    ]
    step = op.Constant(value_float=scales[3])
    return opset(TRT_DOMAIN).TRT_QuantizedAttention(
        *rounded, mask, step, scale=scale, is_causal=int(causal), normalization_quantize_to_type=FLOAT8E4M3FN
    )


def _spelled_attention(q: Any, k: Any, v: Any, mask: Any, scale: float, causal: bool) -> Any:
    """Returns attention in FP32 from single nodes, where TensorRT has no fused kernel and refuses the op."""
    op = opset()
    heads, kv_heads, dim, v_dim = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    q, k, v = widened(q), widened(k), widened(v)
    # [batch, kv_heads, query heads of each, tokens, dim]: keys and values are broadcast and not repeated.
    grouped = op.Reshape(q, op.Constant(value_ints=[0, kv_heads, heads // kv_heads, -1, dim]))
    two = op.Constant(value_ints=[2])
    scores = op.MatMul(grouped, op.Transpose(op.Unsqueeze(k, two), perm=[0, 1, 2, 4, 3]))
    scores = op.Mul(scores, op.Constant(value_float=scale))
    lowest = op.Constant(value_float=-math.inf)
    # A query sees its own position and earlier ones: row >= column.
    if causal:
        zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
        rows, columns = (op.Range(zero, op.Squeeze(op.Shape(x, start=2, end=3)), one) for x in (q, k))
        seen = op.GreaterOrEqual(op.Unsqueeze(rows, op.Constant(value_ints=[1])), columns)
        scores = op.Where(seen, scores, lowest)
    if mask is not None:
        if int(mask.dtype) == BOOL:
            scores = op.Where(op.Unsqueeze(mask, two), scores, lowest)
        else:  # [1 or batch, heads, queries, tokens], heads are grouped as in q
            shape = op.Concat(op.Constant(value_ints=[0, kv_heads, -1]), op.Shape(mask, start=2), axis=0)
            scores = op.Add(scores, op.Reshape(widened(mask), shape))
    out = op.MatMul(op.Softmax(scores, axis=-1), op.Unsqueeze(v, two))
    return op.Reshape(out, op.Constant(value_ints=[0, heads, -1, v_dim]))


def scatter(cache: Tensor, x: Tensor, index: Tensor) -> Tensor:
    """Returns the cache `[batch, kv_heads, capacity, dim]` with `x` in each row from position `index` `[batch]` on."""
    rows = torch.arange(cache.shape[0], device=cache.device)[:, None]
    positions = index[:, None] + torch.arange(x.shape[2], device=cache.device)
    # Indices with a slice between them come first in the result: [batch, sequence, kv_heads, dim].
    return torch.ops.aten.index_put(cache, [rows, None, positions], x.transpose(1, 2))


def _cache_translation(format: str) -> Callable[..., Any]:
    def translate(
        q: Any, k: Any, v: Any, caches: Sequence[Any], k_scale: Sequence[float], v_scale: Sequence[float], lengths: Any,
        scale: float,
    ) -> Any:  # fmt: skip
        op = opset()
        past = op.Cast(lengths, to=INT32)
        after = op.Add(past, op.Cast(op.Shape(q, start=2, end=3), to=INT32))
        scales = [op.Constant(value_floats=list(values)) for values in (k_scale, v_scale)]
        outputs = opset(PLUGIN_DOMAIN).QuantCacheAttention(
            *(q, k, v, *caches, *scales, past, after), softmax_scale=scale, format=format, **_PLUGIN
        )
        # The exporter gives a node every output that its schema lists, and TensorRT takes those of the format alone.
        node = outputs[0].producer()
        node.resize_outputs(1 + len(caches))
        return node.outputs

    return translate


def _cache_body(format: Format) -> Callable[..., tuple[Tensor, ...]]:
    def attend_to_cache(
        q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], k_scale: list[float], v_scale: list[float],
        lengths: Tensor, scale: float,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Computes the node in PyTorch, by the oracle of our paged cache: each sequence is one page."""
        new = [cache.clone() for cache in caches]
        scales = [torch.tensor(values, dtype=torch.float32) for values in (k_scale, v_scale)]
        # The graph calls bytes of two E2M1 codes FP8.
        codes = [part.view(torch.uint8) for part in new[:2]] + new[2:] if format.global_scale else new
        blocks: list[Tensor | None] = [*codes[2:]] or [None, None]
        pages = KVPages(codes[0], codes[1], format, q.shape[3], *scales, *blocks)
        write_reference(pages, torch.arange(len(q))[:, None], lengths, k, v)
        position = lengths[:, None] + torch.arange(q.shape[2])
        column = torch.arange(codes[0].shape[2])
        # Codes behind the last key may be of anything, NaN too.
        unwritten = (column > position[:, -1:])[:, None, :, None]
        keys, values = (
            decode_kv(part, format, one, block).masked_fill(unwritten, 0.0).to(q.dtype)
            for part, one, block in zip(codes[:2], scales, blocks, strict=True)
        )
        seen = column <= position[:, :, None]
        return (_attention_body(q, keys, values, seen[:, None], scale, False, [], "native"), *new)

    return attend_to_cache


def _scatter(cache: Any, x: Any, index: Any) -> Any:
    # Runtimes whose cache input and output are one buffer write only the new tokens.
    return opset("", SERVING_OPSET).TensorScatter(cache, x, index, axis=2, mode="linear")


def _grouped(*operands: Any) -> Any:
    *tensors, scale, window = operands
    return opset(PLUGIN_DOMAIN).GroupedAttention(*tensors, softmax_scale=scale, window=window, _outputs=3)


def _delta_rule(S: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
    """Computes y `[tokens, batch, heads, 1, dim]` and the last S `[batch, heads, key_dim, value_dim]`.

    `operands` are q, k and v like y, and exp(g) and beta `[tokens, batch, heads, 1, 1]`.
    """
    outputs = []
    for q, k, v, decay, beta in zip(*operands, strict=True):
        S = S * decay
        S = S + k.mT @ ((v - k @ S) * beta)
        outputs.append(q @ S)
    return torch.stack(outputs), S


def _delta_rule_scan(S: Any, *operands: Any) -> tuple[Any, Any]:
    import onnx_ir as ir

    def value(name: str) -> Any:
        return ir.val(f"delta.{name}", ir.DataType.FLOAT)

    inputs = {name: value(name) for name in ("past", "q", "k", "v", "decay", "beta")}
    past, q, k, v, decay, beta = inputs.values()
    nodes: list[Any] = []

    def add(op: str, *operands: Any, **attributes: Any) -> Any:
        nodes.append(ir.node(op, operands, attributes, outputs=[value(f"{op}.{len(nodes)}")]))
        return nodes[-1].outputs[0]

    kept = add("Mul", past, decay)
    wrong = add("Mul", add("Sub", v, add("MatMul", k, kept)), beta)
    state = add("Add", kept, add("MatMul", add("Transpose", k, perm=[0, 1, 3, 2]), wrong))
    body = ir.Graph(list(inputs.values()), [state, add("MatMul", q, state)], nodes=nodes, name="delta_rule")
    node = opset("", SERVING_OPSET).Scan(S, *operands, body=body, num_scan_inputs=len(operands)).producer()
    node.resize_outputs(2)
    return node.outputs[1], node.outputs[0]


def attention_translations(runtime: str) -> dict[Any, Callable[..., Any]]:
    """Returns ONNX translations by PyTorch op, for a runtime of `RUNTIMES`."""
    ops = torch.ops.quant
    return {
        ops.onnx_attention.default: partial(_attention, runtime=runtime),
        ops.onnx_scatter.default: _scatter,
        ops.onnx_grouped_attention.default: _grouped,
        ops.onnx_delta_rule.default: _delta_rule_scan,
        ops.onnx_fp8_cache.default: _cache_translation("fp8"),
        ops.onnx_nvfp4_cache.default: _cache_translation("nvfp4"),
    }


def _define(name: str, schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(f"quant::{name}", schema)
    torch.library.impl(f"quant::{name}", "default", body)
    torch.library.register_fake(f"quant::{name}", fake)


_define(
    "onnx_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, float[] scales, str kind) -> Tensor",
    _attention_body,
    lambda q, k, v, *_: q.new_empty((*q.shape[:-1], v.shape[-1])),
)
_define(
    "onnx_scatter",
    "(Tensor cache, Tensor x, Tensor index) -> Tensor",
    scatter,
    lambda cache, x, index: torch.empty_like(cache),
)
torch.library.define(
    "quant::onnx_grouped_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor past_key, Tensor past_value, Tensor lengths, Tensor? sinks, float scale, "
    "int window) -> (Tensor, Tensor, Tensor)",
)
torch.library.register_fake(
    "quant::onnx_grouped_attention",
    lambda q, k, v, past_key, past_value, *_: (
        q.new_empty(q.transpose(1, 2).shape),
        *map(torch.empty_like, (past_key, past_value)),
    ),
)
_define(
    "onnx_delta_rule",
    "(Tensor S, Tensor q, Tensor k, Tensor v, Tensor decay, Tensor beta) -> (Tensor, Tensor)",
    _delta_rule,
    lambda S, q, k, v, *_: (torch.empty_like(v), torch.empty_like(S)),
)
for _name, _outputs in (("fp8", 3), ("nvfp4", 5)):
    _define(
        f"onnx_{_name}_cache",
        "(Tensor q, Tensor k, Tensor v, Tensor[] caches, float[] k_scale, float[] v_scale, Tensor lengths, float scale)"
        f" -> ({', '.join(['Tensor'] * _outputs)})",
        _cache_body(FORMATS[_name]),
        lambda q, k, v, caches, *_: (torch.empty_like(q), *map(torch.empty_like, caches)),
    )
attend = torch.ops.quant.onnx_attention
"""The op, with the arguments of `_attention_body`."""
