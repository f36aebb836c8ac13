"""The native backend computes layers together where that saves reading or writing a tensor.

Layers that a runtime merges (q, k and v) sum their dx in one product:

    forward    codes(x) · codes(q)ᵀ    codes(x) · codes(k)ᵀ    codes(x) · codes(v)ᵀ
    backward   dx = codes([dq dk dv]) · codes_t([q; k; v])ᵀ

Three products would write dx three times in 16 bit, and two additions would read them again. One product sums over the
outputs of all three in FP32 and rounds once. The other products stay apart: together they have as many tiles, so that
nothing is gained, and results in tensors of their own can be freed and viewed as ever.

A gated MLP runs as one function, y = down(silu(gate(x)) · up(x)): its kernels read the result of one product and write
operands of the next, so silu(gate) · up and the gradients of gate and up are never written in 16 bit. Kept for the
backward pass are gate and up in 16 bit, and the transposed codes of x and of some weights. Products and roundings are
those of the layers one by one, except that dx, a sum of two products, is rounded once.

A compiled model quantizes the output of an RMSNorm from the input of the norm:

    x ─▶ rstd = 1 / √(mean of squares + eps) ─▶ y = x · rstd · weight ─▶ q, k, v
    x, rstd, weight ────────────────────────────────────────────────▶ codes of y, both directions

In a compiled graph y carries the tensors that it was computed from. A linear layer that trains natively makes its
operands from these, so that nothing reads the values of y, and the compiler leaves them out. The gradient goes through
y as before. Where something else reads y too, a router or a layer in 16 bit, the compiler writes it. Between norm and
layer y may be replaced (`y = 2 * y`, `y *= 2`), and then is quantized as any other input; a method that changes its
values in place (`y.mul_(2)`) would not be seen. Without a compiler y is quantized as any other input.

Norms and MLPs keep their class, their parameters and their hooks; only their `forward` is ours.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.kernels.base.custom_ops import autocast_dtype
from quant.kernels.training.fp8_block_layout import BLOCK
from quant.training.low_precision.native import (
    ORIGIN,
    NativeProducts,
    NormInput,
    cast,
    keeps_codes,
    origin_of,
    unpadded,
)
from quant.training.low_precision.state import LowPrecision, is_distributed

# The layers of a group are called one by one. The first computes the outputs of all, and leaves them with the products
# that the model's layers share; the others fetch theirs, provided that they are called with the same input in the same
# mode and have the same weights. A group whose outputs were not fetched is not computed as one again.


@dataclass(eq=False)
class _Pending:
    """Outputs of a group's layers that have not been called yet."""

    x: Tensor  # the input, before autocast
    mode: tuple[Any, ...]  # of the call: see `_mode`
    # By the position of a layer in its group: its weight, the weight's version, and the output.
    outputs: dict[int, tuple[Tensor, int, Tensor]]
    state: LowPrecision  # of the layer that computed them


def merged_product(layer: Any, x: Tensor) -> Tensor | None:
    """Returns x wᵀ of a layer in training, computed with the layers that are merged with it; None where none is.

    x is `[..., in]`, before autocast.
    """
    state = layer.low_precision
    native, group = state.products, state.group
    if len(group) < 2 or not isinstance(native, NativeProducts):
        return None
    if group[0] is not layer:
        positions = [position for position, member in enumerate(group) if member is layer]
        # A replica of `nn.DataParallel` is in no group.
        return _fetched(native, positions[0], layer.weight, x) if positions else None
    if native.pending is not None:
        # Some layer of that group got another input: computing it as one would be in vain again.
        native.pending.state.merges, native.pending = False, None
    if not (state.merges and torch.is_grad_enabled() and x.requires_grad):
        return None  # without a gradient of x there is nothing to sum
    if not all(_is_alike(layer, member, x) for member in group):
        return None
    weights = [member.weight for member in group]
    rounded_x = cast(x, autocast_dtype(x) or x.dtype)
    states = [member.low_precision for member in group]
    y, *siblings = _MergedProducts.apply(rounded_x, states, origin_of(rounded_x), *weights)  # type: ignore[no-untyped-call]
    outputs = {i + 1: (weights[i + 1], _version(weights[i + 1]), sibling) for i, sibling in enumerate(siblings)}
    native.pending = _Pending(x, _mode(x), outputs, state)
    return y


def _fetched(native: NativeProducts, position: int, weight: Tensor, x: Tensor) -> Tensor | None:
    """Returns the output that the first layer of the group has computed for another one; None for another product."""
    pending: _Pending | None = native.pending
    if pending is None or pending.x is not x or pending.mode != _mode(x) or position not in pending.outputs:
        return None
    expected, version, y = pending.outputs[position]
    if expected is not weight or version != _version(weight):
        return None
    del pending.outputs[position]
    if not pending.outputs:
        native.pending = None
    return y


def _mode(x: Tensor) -> tuple[Any, ...]:
    return torch.is_grad_enabled(), autocast_dtype(x), _version(x)


def _version(x: Tensor) -> int:
    """Returns a number that changes when a tensor is changed in place; a compiler sees such changes itself."""
    return 0 if torch.compiler.is_compiling() else x._version


def _is_alike(first: Any, member: Any, x: Tensor) -> bool:
    weight, state = member.weight, member.low_precision
    return (
        member.training
        and state.products is first.low_precision.products
        and state.rounds_forward
        and weight.requires_grad == first.weight.requires_grad
        and weight.device == x.device
        and not hasattr(weight, "full_tensor")  # a DTensor, of tensor parallelism or of FSDP2 for single layers
        and weight.shape[0] % BLOCK == 0
    )


class _MergedProducts(torch.autograd.Function):
    """The products of layers with the same input, on operands in FP8 blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, states: Any, origin: NormInput | None, *weights: Tensor) -> tuple[Tensor, ...]:
        native: NativeProducts = states[0].products
        ctx.native, ctx.states, ctx.shape, ctx.dtype = native, states, x.shape, x.dtype
        tokens = x.numel() // x.shape[-1]
        codes, scale, codes_t, scale_t = native.operands(x, weights[0].requires_grad, origin)
        keeps = keeps_codes(sum(map(len, weights)), tokens)
        *operands, w_codes_t, w_scale_t = native.quantize_stacked(weights, columns=keeps)
        ctx.save_for_backward(codes_t, scale_t, w_codes_t, w_scale_t, *weights)
        outputs = []
        for state, weight, w in zip(states, weights, zip(operands[::2], operands[1::2], strict=True), strict=True):
            state.note_input(scale)
            y = torch.ops.quant.fp8_block_product(codes, scale, *w, True, x.dtype)
            outputs.append(unpadded(y, tokens, len(weight)).reshape(*x.shape[:-1], -1))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, scale_t, w_codes_t, w_scale_t, *weights = ctx.saved_tensors
        native, ops = ctx.native, torch.ops.quant
        for_x, for_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3:])
        rows = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]
        codes, scale, *transposed = ops.fp8_block_side_by_side(rows, native.rule, for_x, for_w)
        d = [(codes, scale, *t) for t in zip(transposed[::2], transposed[1::2], strict=True)]
        # Further scales belong to padding.
        blocks = [len(weight) // BLOCK for weight in weights]
        own_scales = scale[: sum(blocks)].split(blocks) if for_x else [operands[3] for operands in d]
        for state, each in zip(ctx.states, own_scales, strict=True):
            state.note_gradient(each)
        dx = None
        if for_x:
            if not w_codes_t.numel():
                w_codes_t, w_scale_t = native.quantize_stacked(weights, rows=False)[-2:]
            dx = ops.fp8_block_product(codes, scale, w_codes_t, w_scale_t, True, ctx.dtype)
            dx = unpadded(dx, len(rows[0]), weights[0].shape[1]).reshape(ctx.shape)
        dw = [
            native.weight_gradient(operands, codes_t, scale_t, weight) if is_needed else None
            for operands, weight, is_needed in zip(d, weights, ctx.needs_input_grad[3:], strict=True)
        ]
        return dx, None, None, *dw


def replace_forward(module: nn.Module, function: Callable[..., Any], *arguments: Any) -> None:
    """Has a module compute `function(module, *arguments, ...)` when it is called."""
    # An entry of the instance, which copies and pickles of the module keep.
    vars(module)["forward"] = partial(function, module, *arguments)


def restore_forwards(model: nn.Module) -> None:
    """Undoes `fuse_gated_mlps` and `trace_rms_norms`."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func in (_norm_forward, _gated_mlp_forward):
            del vars(module)["forward"]


class _Formula(NamedTuple):
    """How a class computes its norm: (offset + weight) · x / √(mean of squares + eps)."""

    offset: float
    eps: float | None  # None is the epsilon of the input's dtype
    rounds_normalized: bool


def trace_rms_norms(model: nn.Module) -> None:
    """Has the outputs of a model's RMSNorms carry their origin in compiled graphs."""
    for module in model.modules():
        # Something may have replaced the forward of this module alone.
        formula = None if "forward" in vars(module) else _formula(module)
        if formula is not None:
            replace_forward(module, _norm_forward, formula)


def _norm_forward(module: Any, formula: _Formula, *arguments: Any, **keywords: Any) -> Any:
    """Computes the norm as its class does, and notes its origin in a compiled graph."""
    y = type(module).forward(module, *arguments, **keywords)
    is_alone = len(arguments) == 1 and not keywords
    # A hook may change y in place, and shards of a DTensor are not rows.
    if torch.compiler.is_compiling() and is_alone and not module._forward_hooks and not hasattr(y, "full_tensor"):
        (x,), weight = arguments, module.weight
        factor = weight if not formula.offset else formula.offset + weight.float()
        eps = torch.finfo(x.dtype).eps if formula.eps is None else formula.eps
        normalized = x.dtype if formula.rounds_normalized else torch.float32
        setattr(y, ORIGIN, NormInput(x, factor, eps, normalized, y.dtype))
    return y


def _formula(module: nn.Module) -> _Formula | None:
    """Returns the formula of an RMSNorm, tried on a small copy of the module; None for another module."""
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1 or sum(p is not None for p in module._parameters.values()) > 1:
        return None
    if module._modules or module._buffers:
        return None
    # On the CPU, whichever device is the default.
    columns, generator = 64, torch.Generator("cpu").manual_seed(0)
    twin = copy.copy(module)
    vars(twin).update(normalized_shape=(columns,), _parameters={})

    def values(dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
        # Small rows, in which eps counts.
        size = torch.tensor([[1.0], [1e-3], [30.0], [0.0]], device="cpu")
        x, w = (torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32) for rows in (4, 1))
        x, w = (x * size).to(dtype), w[0].to(dtype)
        vars(twin)["_parameters"] = {"weight": nn.Parameter(w, requires_grad=False)}
        try:
            y = type(module).forward(twin, x)
        except Exception:  # a forward pass that needs more than these is another one
            return x, w, None
        return x, w, y

    x, w, y = values(torch.float32)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    own = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if own is not None and not isinstance(own, float):
        return None
    for offset in (0.0, 1.0):
        expected = _normalized(x, own) * (offset + w)
        if torch.allclose(y, expected, rtol=1e-5, atol=1e-7):
            x, w, y = values(torch.bfloat16)
            twice = (_normalized(x, own).bfloat16() * (offset + w.float())).bfloat16()
            return _Formula(offset, own, torch.equal(y, twice)) if isinstance(y, Tensor) else None
    return None


def _normalized(x: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)


_LAYERS = ("gate_proj", "up_proj", "down_proj")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def fuse_gated_mlps(model: nn.Module) -> None:
    """Has the gated MLPs of a model, whose linear layers train natively, run as one function each."""
    for module in model.modules():
        layers: list[Any] = [getattr(module, name, None) for name in _LAYERS]
        if not all(_trains_natively(layer) for layer in layers) or "forward" in vars(module):
            continue
        # Blocks of their gradients, which lie side by side, must not hold columns of both.
        if layers[0].out_features % BLOCK == 0 and _is_swiglu(module):
            replace_forward(module, _gated_mlp_forward)


def _is_swiglu(module: nn.Module) -> bool:
    """Returns whether a class computes just down(silu(gate(x)) · up(x)), tried on three stand-ins for layers."""
    stand_ins = {
        "gate_proj": lambda x: 3 * x + 1,
        "up_proj": lambda x: x - 2,
        "down_proj": lambda x: 5 * x + x.roll(1, -1),
    }
    x = torch.linspace(-2, 2, 12, dtype=torch.float64, device="cpu").view(1, 3, 4)
    expected = stand_ins["down_proj"](functional.silu(3 * x + 1) * (x - 2))
    try:
        y = type(module).forward(SimpleNamespace(**{**vars(module), **module._modules, **stand_ins}), x)
    except Exception:  # a forward pass that needs more than these is another one
        return False
    return isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=1e-12)


def _trains_natively(layer: Any) -> bool:
    products = getattr(getattr(layer, "low_precision", None), "products", None)
    return isinstance(products, NativeProducts) and layer.bias is None


def _gated_mlp_forward(module: Any, x: Tensor) -> Tensor:
    """Maps `[..., hidden]` to `[..., hidden]`."""
    layers = [getattr(module, name) for name in _LAYERS]
    x_dtype = autocast_dtype(x) or x.dtype
    is_plain = all(
        _trains_natively(layer)
        and layer.training
        and layer.low_precision.rounds_forward
        and not any(getattr(layer, hooks) for hooks in _HOOKS)
        for layer in layers
    )
    if not is_plain or not x.numel():
        return type(module).forward(module, x)
    for layer in layers:
        layer.low_precision.note_weight(layer.weight)
    weights, states = [layer.weight for layer in layers], [layer.low_precision for layer in layers]
    x = cast(x, x_dtype)
    return _GatedMLP.apply(x, *weights, states, origin_of(x))  # type: ignore[no-untyped-call]


class _GatedMLP(torch.autograd.Function):
    """The three products and the operations between them, on operands in FP8 blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, states: Sequence[Any], origin: NormInput | None
    ) -> Tensor:
        native: NativeProducts = states[0].products
        ctx.native, ctx.states, ctx.shape = native, states, x.shape
        ops = torch.ops.quant
        tokens = x.numel() // x.shape[-1]
        codes, scale, codes_t, scale_t = native.operands(x, gate.requires_grad or up.requires_grad, origin)
        for_x, for_gate, for_up, _ = ctx.needs_input_grad[:4]
        keeps, keeps_down = _keeps_weights(gate, up, down, tokens)
        # Rows of padding stay: their zeros are rounded to zeros, and all sizes of products are multiples of 128.
        *both, w_codes_t, w_scale_t = native.quantize_stacked((gate, up), columns=keeps and for_x)
        for_h = for_x or for_gate or for_up
        down_codes, down_scale, *down_t = native.quantize(down, square=True, columns=keeps_down and for_h)
        of_gate, of_up = (ops.fp8_block_product(codes, scale, *w, True, x.dtype) for w in (both[:2], both[2:]))
        # The backward pass reads gate and up again, and makes the transposed codes of their product there.
        h_codes, h_scale, *_ = ops.fp8_block_swiglu(of_gate, of_up, native.rule, True, False)
        for state, each in zip(states, (scale, scale, h_scale), strict=True):
            state.note_input(each)
        y = ops.fp8_block_product(h_codes, h_scale, down_codes, down_scale, True, x.dtype)
        ctx.save_for_backward(codes_t, scale_t, of_gate, of_up, gate, up, down, w_codes_t, w_scale_t, *down_t)
        return unpadded(y, tokens, down.shape[0]).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, scale_t, of_gate, of_up, gate, up, down, w_codes_t, w_scale_t, *down_t = ctx.saved_tensors
        native, ops = ctx.native, torch.ops.quant
        for_x, for_gate, for_up, for_down = ctx.needs_input_grad[:4]
        for_h = for_x or for_gate or for_up
        d = native.quantize(dy.reshape(-1, dy.shape[-1]), rows=for_h, columns=for_down)
        ctx.states[2].note_gradient(d[1] if for_h else d[3])
        if not for_h:
            h = ops.fp8_block_swiglu(of_gate, of_up, native.rule, False, True)[2:]
            return None, None, None, native.weight_gradient(d, *h, down), None, None
        dh = ops.fp8_block_product(d[0], d[1], *native.transposed(down, *down_t), True, of_gate.dtype)
        both, both_scale, *transposed = ops.fp8_block_swiglu_gradients(
            dh, of_gate, of_up, native.rule, for_gate or for_up, for_down
        )
        d_down = native.weight_gradient(d, *transposed[4:], down) if for_down else None
        # Further scales belong to padding.
        for state, scale in zip(ctx.states[:2], both_scale.split(len(gate) // BLOCK), strict=False):
            state.note_gradient(scale)
        gradients = [
            native.weight_gradient((both, both_scale, *operand), codes_t, scale_t, weight) if is_trained else None
            for operand, weight, is_trained in ((transposed[:2], gate, for_gate), (transposed[2:4], up, for_up))
        ]
        dx = None
        if for_x:
            if not w_codes_t.numel():
                w_codes_t, w_scale_t = native.quantize_stacked((gate, up), rows=False)[-2:]
            # One product for both: the sum of d gate · gate and d up · up is rounded once.
            dx = ops.fp8_block_product(both, both_scale, w_codes_t, w_scale_t, True, dy.dtype)
            dx = unpadded(dx, dy.numel() // dy.shape[-1], gate.shape[1]).reshape(ctx.shape)
        return dx, *gradients, d_down, None, None


def _keeps_weights(gate: Tensor, up: Tensor, down: Tensor, tokens: int) -> tuple[bool, bool]:
    """Returns whether transposed codes of gate and up, and of down, stay in memory until the backward pass.

    16-bit training keeps silu(gate) · up, two bytes an element, which here is made again. The codes of the three
    weights stay if they take no more than that.
    """
    size = gate.numel() + up.numel() + down.numel()
    if size <= 2 * tokens * len(gate) and not is_distributed():
        return True, True
    return keeps_codes(len(gate), tokens), keeps_codes(len(down), tokens)
