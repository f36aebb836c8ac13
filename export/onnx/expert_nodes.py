"""Fused experts as one op while a model is traced, and as one node of onnxruntime.

    int4 in groups, int8    QMoE over the codes, which stay in 4 or 8 bits
    fp8, fp8_channel        MoE over Mul(Cast(codes), scale), folded at load
    16 bit                  MoE

Both nodes compute `Σ weight · down(gate · σ(α gate) · (up + β))` over the experts of a token, of a gate and up that are
clamped to a limit: silu has an α of 1 and a β of 0, gpt-oss 1.702 and 1. QMoE takes these weights as they are.
MoE makes them by a softmax over the chosen experts, which gives numbers of sum 1 back from their logarithms; the output
is multiplied by their sum. Rows of gate and up alternate in a file. Codes of QMoE are unsigned around 8 or 128.

TensorRT has no such operators, and inputs of the second projection are never seen outside the node, so that nothing
can round them: experts whose inputs are rounded are refused.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import option
from quant.export.onnx.opsets import ORT_DOMAIN, PLUGIN_DOMAIN, opset
from quant.formats.format import FORMATS, Format
from quant.kernels.linear.experts import QuantExperts, experts_forward
from quant.recipes.blocks import replaced

EXPERTS = "Experts"
"""Op type of the node that `onnxruntime_graph` replaces, in the domain of our plug-ins."""
PROJECTIONS = ("gate_up_proj", "down_proj")
_IMPLEMENTATION = "quant_onnx"
_INTEGERS = ("int4", "int4_g64", "int4_g32", "int8")
_FORMATS = "int4a16_g32, int8@16bit or fp8@16bit"  # that a user may choose, as `--format` spells them


def is_fused(module: nn.Module) -> bool:
    """Returns whether a module is one that transformers runs by an experts implementation."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def check_experts(model: nn.Module, runtime: str, *, in_16_bit: bool = True) -> None:
    """Raises ValueError for a model with fused experts, quantized or `in_16_bit`, that no graph for a runtime holds."""
    owners = {id(part): module for module in model.modules() if is_fused(module) for part in module.children()}
    for name, module in model.named_modules():
        shape, problem = None, None
        if isinstance(module, QuantExperts):
            owner, shape = owners.get(id(module)), module.weight_shape
            problem = "are in code of their own" if owner is None else _problem(owner) or _format_problem(owner)
        elif in_16_bit and is_fused(module):
            shape = next((x.shape for x in module.parameters(recurse=False) if x.dim() == 3), None)
            problem = _problem(module)
        if shape is None:
            continue
        served = "serve this model from its checkpoint (vLLM, TensorRT-LLM)"
        if runtime != "onnxruntime":
            raise ValueError(
                f"{name} {list(shape)}: fused experts choose their tokens at run time, which a static graph cannot; "
                f"{served}, or quantize its experts to {_FORMATS} for onnxruntime ({option('to', 'onnx')})"
            )
        if problem is not None:
            raise ValueError(f"{name} {list(shape)}: fused experts {problem}, or {served}")


def _problem(experts: Any) -> str | None:
    """Returns why onnxruntime's nodes do not compute these experts."""
    # transformers 5.17 has no experts with norms, and no attribute that says so.
    extra = "a norm" if getattr(experts, "has_post_expert_norm", False) else None if experts.has_gate else "no gate"
    if extra is None and _gate(experts) is None:
        extra = "another gate than those of silu and gpt-oss"
    kind = type(experts).__name__
    return extra and f"({kind}) have {extra}, which no node of onnxruntime computes; keep the model in PyTorch"


def apply_gate(experts: Any, gate: Tensor, up: Tensor) -> Tensor:
    """Returns the inputs of the second projection."""
    is_concatenated = getattr(experts, "is_concatenated", True)
    y: Tensor = experts._apply_gate(
        torch.cat([gate, up], -1) if is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    )
    return y


def _gate(experts: Any) -> list[float] | None:
    """Returns α, β and the limit of a gate that onnxruntime's nodes compute; None for another."""
    values = torch.linspace(-9, 9, 19, dtype=torch.float32)
    gate, up = torch.cartesian_prod(values, values).T
    expected = apply_gate(experts, gate, up)
    own = getattr(experts, "alpha", 1.0), 1.0, getattr(experts, "limit", math.inf)
    for alpha, beta, limit in ((1.0, 0.0, math.inf), own):
        g = gate.clamp(max=limit)
        if torch.allclose(expected, g * torch.sigmoid(alpha * g) * (up.clamp(-limit, limit) + beta)):
            return [alpha, beta, limit]
    return None


def _format_problem(experts: Any) -> str | None:
    """Returns why onnxruntime's nodes do not take the formats of these experts."""
    modules = [getattr(experts, name) for name in PROJECTIONS]
    kinds = [(x.weight_format, x.activation_format) if isinstance(x, QuantExperts) else (None, None) for x in modules]
    way_out = f"quantize them to {_FORMATS}"
    for format, activation in kinds:
        if activation is not None:
            return f"with inputs in {activation}: onnxruntime leaves inputs of experts in 16 bit; {way_out}"
        if format is not None and not (_in_integers(format) or format.name in ("fp8", "fp8_channel")):
            return f"in {format}: onnxruntime has no node for them; {way_out}"
    (first, _), (second, _) = kinds
    if first is not second and (_in_integers(first) or _in_integers(second)):
        return f"in {first or '16 bit'} and {second or '16 bit'}: onnxruntime takes both projections alike; {way_out}"
    return None


def _in_integers(format: Format | None) -> bool:
    return format is not None and format.name in _INTEGERS


@contextmanager
def experts_as_ops(model: nn.Module) -> Iterator[None]:
    """Makes the fused experts of a transformers model one op each while open."""
    fused: Any = [module for module in model.modules() if is_fused(module)]
    configs: dict[int, Any] = {id(module.config): module.config for module in fused}
    if configs:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        gates = {module: _gate(module) for module in fused}  # a graph that is being traced has no numbers
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, partial(_op, gates))
    with replaced((config, "_experts_implementation", _IMPLEMENTATION) for config in configs.values()):
        yield


def _op(gates: Any, self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if type(hidden_states) is Tensor:  # a pass with numbers, of which no graph is made
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    operands: list[Tensor | None] = []
    formats = []
    for name in PROJECTIONS:
        projection = getattr(self, name)
        is_quantized = isinstance(projection, QuantExperts)
        operands += [projection.codes, projection.scale] if is_quantized else [projection, None]
        operands.append(getattr(self, f"{name}_bias") if self.has_bias else None)
        formats.append(projection.weight_format.name if is_quantized else "")
    options = gates[self], not getattr(self, "is_concatenated", True), self.is_transposed
    return torch.ops.quant.onnx_experts(hidden_states, top_k_index, top_k_weights, *operands, *formats, *options)


torch.library.define(
    "quant::onnx_experts",
    "(Tensor x, Tensor index, Tensor weight, Tensor up, Tensor? up_scale, Tensor? up_bias, Tensor down, "
    "Tensor? down_scale, Tensor? down_bias, str up_format, str down_format, float[] gate, bool alternate, "
    "bool transposed) -> Tensor",
)
torch.library.register_fake("quant::onnx_experts", lambda x, *_: torch.empty_like(x))


def translated(*operands: Any) -> Any:
    """Returns the op as a node that `onnxruntime_graph` replaces."""
    *tensors, up_format, down_format, gate, alternate, transposed = operands
    options = {"gate": list(gate), "alternate": int(alternate), "transposed": int(transposed)}
    return opset(PLUGIN_DOMAIN).Experts(*tensors, up_format=up_format, down_format=down_format, **options)


def experts_node(rewriter: Any, node: Any) -> None:
    """Replaces a node of `translated` by those of onnxruntime; `rewriter` is that of `onnxruntime_graph`."""
    import onnx_ir as ir

    # The last may be left out.
    x, index, weight, up, up_scale, up_bias, down, down_scale, down_bias = (*node.inputs, None, None)[:9]
    formats = [FORMATS.get(node.attributes[f"{name}_format"].as_string()) for name in ("up", "down")]
    experts, dtype = up.shape[0], x.dtype

    def add(op: str, *inputs: Any, **attributes: Any) -> Any:
        return rewriter.add(node, op, *inputs, **attributes)

    # The weight of each expert, 0 for those that were not chosen: [tokens, experts], in FP32.
    wide = add("Cast", weight, to=ir.DataType.FLOAT)
    count, ends = rewriter.constant(experts, scalar=True), rewriter.constant(0.0, 1.0, dtype=np.float32)
    chosen = add("OneHot", index, count, ends, axis=-1)
    last, slots = rewriter.constant(-1), rewriter.constant(-2)
    shares = add("ReduceSum", add("Mul", chosen, add("Unsqueeze", wide, last)), slots, keepdims=0)
    alpha, beta, limit = node.attributes["gate"].as_floats()
    alternate, transposed = (bool(node.attributes[name].as_int()) for name in ("alternate", "transposed"))
    options = {
        "k": index.shape[1], "activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": alpha,
        "activation_beta": beta, "domain": ORT_DOMAIN, **({"swiglu_limit": limit} if limit < math.inf else {}),
    }  # fmt: skip
    if up_bias is not None and not alternate:
        _change(up_bias, partial(_arranged, is_up=True))
    first = formats[0]
    if first is not None and _in_integers(first):
        bits = first.element.bits
        zero = 0x88 if bits == 4 else 0x80  # added to two's complement
        # CUDA's provider takes scales of x's dtype alone, a processor's FP32 as well; the node's are of one dtype.
        stored = [scale.const_value.numpy() for scale in (up_scale, down_scale)]
        is_exact = dtype == ir.DataType.FLOAT16 and all(np.array_equal(s, s.astype(np.float16)) for s in stored)
        for codes, scale, is_up in ((up, up_scale, True), (down, down_scale, False)):
            _change(codes, partial(_arranged, is_up=is_up, zero=zero), ir.DataType.UINT8)
            _change(scale, partial(_arranged, is_up=is_up, flat=bits == 8), dtype if is_exact else None)
        shares = add("Cast", shares, to=dtype)
        block = {"block_size": first.block[1]} if bits == 4 else {}
        options |= {"expert_weight_bits": bits, "weights_prepacked": 0, "normalize_routing_weights": 0, **block}
        operands = [x, shares, up, up_scale, up_bias, down, down_scale, down_bias, *[None] * 6, shares]
        rewriter.replace(node.outputs[0], add("QMoE", *operands, **options))
        return
    matrices = []
    for weight, scale, bias, is_up in ((up, up_scale, up_bias, True), (down, down_scale, down_bias, False)):
        # A parameter is in the order of its model, codes are as everywhere here.
        is_up, turned = (is_up, False) if scale is not None else (is_up and not alternate, transposed)
        _change(weight, partial(_arranged, is_up=is_up, turned=turned))
        matrices += [weight, bias]
        if scale is not None:
            _change(scale, partial(_arranged, is_up=is_up))
            wide_weight = add("Mul", add("Cast", weight, to=ir.DataType.FLOAT), scale)
            matrices[-2] = add("Cast", wide_weight, to=dtype)
    least = rewriter.constant(2.0**-126, dtype=np.float32, scalar=True)
    total = add("Max", add("ReduceSum", wide, last, keepdims=1), least)
    logits = add("Cast", add("Log", add("Max", add("Div", shares, total), least)), to=dtype)
    y = add("MoE", x, logits, *matrices, normalize_routing_weights=1, **options)
    rewriter.replace(node.outputs[0], add("Mul", y, add("Cast", total, to=dtype)))


def _arranged(matrices: np.ndarray, is_up: bool, zero: int = 0, flat: bool = False, turned: bool = False) -> np.ndarray:
    """Returns `[experts, out, …]` with rows of gate and up in turns, which lie one above the other.

    `zero` makes codes in two's complement unsigned; `flat` removes the last axis, of one scale for each row; `turned`
    ones are `[experts, in, out]`.
    """
    matrices = matrices.swapaxes(1, 2) if turned else matrices
    if zero:
        matrices = matrices.view(np.uint8) ^ np.uint8(zero)
    if is_up and matrices.shape[1] > 1:
        half = matrices.shape[1] // 2
        matrices = np.stack([matrices[:, :half], matrices[:, half:]], 2).reshape(matrices.shape)
    return matrices[..., 0] if flat else matrices


def _change(value: Any, change: Callable[[np.ndarray], np.ndarray], dtype: Any = None) -> None:
    """Gives an initializer other numbers, computed when the file is written: experts are most of a model."""
    import onnx_ir as ir

    if value.meta.setdefault("arranged", change) is not change:
        return  # small layers with equal numbers share them
    stored = value.const_value
    shape = change(np.broadcast_to(np.zeros((), stored.dtype.numpy()), stored.shape.numpy())).shape
    value.dtype, value.shape = dtype or stored.dtype, ir.Shape(shape)
    value.const_value = ir.LazyTensor(
        lambda: ir.tensor(change(stored.numpy()).astype(value.dtype.numpy(), order="C"), value.dtype, name=value.name),
        value.dtype,
        value.shape,
        name=value.name,
    )
