"""Mixture-of-Experts layers run without waiting for the GPU: tokens are sorted by expert, a projection is one op.

    quant::grouped_linear(x, codes, scale, global_scale?, input_scale?, offsets, weight_format, activation, bias?) -> y

    order    slots (token, choice) sorted by expert            x = hidden[order // k]
    offsets  where each expert's rows begin                    y = grouped(act(grouped(x, up)), down)
    out[token] = Σ over its k slots of weight · y              always summed in the same order

The offsets stay on the GPU, so the host does not wait for the router, and a decoding step can be captured in a graph.
On a GPU the kernels of `portable_grouped_gemm.py` run the op; on a CPU each expert runs through the oracle. Gradients
are computed as in `quant::linear`, expert by expert; the backward pass does wait for the offsets.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from quant.formats.format import INPUT_FORMATS, WEIGHT_FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import below_autograd, first_order, register
from quant.kernels.base.hardware import current, has_triton
from quant.kernels.base.weight_layout import is_prepacked, restore
from quant.kernels.linear.oracle import as_stored
from quant.kernels.linear.quant_linear import input_gradient, quantized_linear
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.kernels.linear.rounded_products import aligned_rows, round_rows
from quant.recipes.layers import Stacking

GROUPED_LINEAR = "quant::grouped_linear"
STORED_ROWS = 8
"""Rows an expert, on average, from which Hopper's kernel is the faster one for codes in the order of a checkpoint.

On an H100 it takes 0.95 to 1.05 of the portable kernel's time for 8 rows an expert in FP8, and 0.71 to 0.87 for 32 or
more; with 4 rows it takes up to 1.17."""


def grouped_linear(
    x: Tensor, weight: BlockScaledTensor, offsets: Tensor, input_scale: Tensor | None = None,
    activation: Format | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns `y[i] = x[i] · W[expert of i]ᵀ + bias[expert of i]`; rows beyond the last offset are undefined.

    Args:
        x: `[T, in]`, sorted by expert.
        weight: `[experts, out, in]`, in the layout of a checkpoint.
        offsets: int32 `[experts + 1]`: the first row of each expert, and the row after the last.
        input_scale: static scale of the activation format, float32 scalar; None measures each expert's rows.
        bias: `[experts, out]`, which gets no gradient, or None.
    """
    if x.dim() != 2 or len(weight.shape) != 3 or x.shape[1] != weight.shape[2]:
        raise ValueError(f"grouped linear: x {list(x.shape)} does not fit experts of {list(weight.shape)}")
    if offsets.shape != (weight.shape[0] + 1,) or offsets.dtype != torch.int32:
        raise ValueError(
            f"grouped linear: offsets is {list(offsets.shape)} {offsets.dtype}, expected [{weight.shape[0] + 1}] int32"
        )
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"grouped linear: bias is {list(bias.shape)}, expected {list(weight.shape[:2])}, contiguous")
    rounding = activation.name if activation else ""
    return torch.ops.quant.grouped_linear(
        x, weight.codes, weight.scale, weight.global_scale, input_scale, offsets, weight.format.name, rounding, bias
    )


def sort_by_expert(index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns the order of the flattened slots of `index` by expert, and int32 offsets `[experts + 1]`."""
    # `index` `[tokens, k]` has the expert of each token and slot; numbers from `experts` on come last, beyond all
    # offsets. The host does not wait.
    # Stable: the slots of an expert stay in the order of tokens, so sums have the same order at every call.
    sorted_index, order = index.flatten().sort(stable=True)
    bounds = torch.arange(experts + 1, device=index.device, dtype=sorted_index.dtype)
    return order, torch.searchsorted(sorted_index, bounds).int()


def grouped_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Returns `experts_forward` of `kernels/linear/experts.py`, with one grouped matmul for each projection."""
    tokens, slots = top_k_index.shape
    order, offsets = sort_by_expert(top_k_index, self.num_experts)
    expert = top_k_index.flatten()[order].clamp(max=self.num_experts - 1)

    def project(name: str, x: Tensor) -> Tensor:
        y: Tensor = getattr(self, name).grouped(x, offsets)
        return y + getattr(self, f"{name}_bias")[expert].to(x.dtype) if getattr(self, "has_bias", False) else y

    up = project("gate_up_proj" if self.has_gate else "up_proj", hidden_states[order // slots])
    down = project("down_proj", self._apply_gate(up) if self.has_gate else self.act_fn(up))
    if getattr(self, "has_post_expert_norm", False):
        down = self.post_expert_norm(down)
    # Slots of no expert are beyond the last offset, where a row holds whatever was in memory.
    is_routed = (torch.arange(len(order), device=offsets.device) < offsets[-1])[:, None]
    weighted = torch.where(is_routed, down * top_k_weights.flatten()[order, None], 0).to(hidden_states.dtype)
    # A scatter by a permutation writes every row once, unlike `index_add_`, whose order of sums is not fixed on a GPU.
    out = torch.empty_like(weighted)
    out[order] = weighted
    return out.view(tokens, slots, -1).sum(1)


def _grouped(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, input_scale: Tensor | None, offsets: Tensor,
    weight_format: str, activation: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    shape = (*codes.shape[:2], x.shape[1])
    weight = BlockScaledTensor(codes, scale, WEIGHT_FORMATS[weight_format], shape, global_scale)
    rounding = INPUT_FORMATS[activation] if activation else None
    in_16_bit = x.dtype in (torch.float16, torch.bfloat16)
    # No kernel measures a scale over several rows, which belong to several experts.
    by_rows = rounding is None or (rounding.block[0] == 1 and not rounding.global_scale)
    if x.is_cuda and in_16_bit and has_triton() and not weight.format.gguf and (by_rows or input_scale is not None):
        return _on_gpu(x, weight, offsets, input_scale, rounding, bias)
    y = x.new_zeros(len(x), codes.shape[1])
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop > start:
            own_bias = None if bias is None else bias[expert].to(x.dtype)
            y[start:stop] = quantized_linear(x[start:stop], weight.matrix(expert), own_bias, input_scale, rounding)
    return y


def _on_gpu(
    x: Tensor, weight: BlockScaledTensor, offsets: Tensor, input_scale: Tensor | None, activation: Format | None,
    bias: Tensor | None,
) -> Tensor:  # fmt: skip
    from quant.kernels.linear import portable_block_scaled_gemm, portable_grouped_gemm, sm90_codes_gemm_many
    from quant.kernels.rounding import portable_casts

    portable_grouped_gemm.check(x, weight, offsets)
    gpu, columns = current(x.device.index or 0), x.shape[1]
    if x.dtype is torch.bfloat16 and (is_prepacked(weight) or activation is None):
        rounded = x if activation is None else round_rows(x, activation, input_scale)
        is_many = is_prepacked(weight) or len(x) >= STORED_ROWS * weight.shape[0]
        if is_many and sm90_codes_gemm_many.takes_experts(weight, gpu):
            return sm90_codes_gemm_many.grouped_gemm_many(aligned_rows(rounded), weight, offsets, bias)
    if is_prepacked(weight):
        weight = restore(weight)
    if activation is None:
        return portable_grouped_gemm.grouped_codes_gemm(x, weight, offsets, bias)
    if bias is not None:
        # Kernels that multiply codes by codes have no bias of experts.
        row = torch.arange(len(x), device=offsets.device)
        expert = torch.searchsorted(offsets[1:], row, right=True).clamp_(max=len(bias) - 1)
        return _on_gpu(x, weight, offsets, input_scale, activation, None) + bias[expert].to(x.dtype)
    whole = columns % max(activation.block[1], 2) == 0 and columns <= portable_casts.MAX_COLUMNS
    scale = None if activation.global_scale else input_scale
    second = input_scale if activation.global_scale else None
    # Codes by codes where tensor cores can; otherwise x is rounded and W decoded to 16 bit.
    if whole and gpu.has_fp8 and portable_grouped_gemm.takes_fp8(weight.format, activation):
        rows = portable_casts.quantize(x, activation, scale=scale)
        return portable_grouped_gemm.grouped_fp8_gemm(rows, weight, offsets, x.dtype)
    if whole and gpu.has_block_scales and portable_block_scaled_gemm.takes(weight.format, activation):
        rows = portable_casts.quantize(x, activation, global_scale=second)
        return portable_block_scaled_gemm.block_scaled_gemm(rows, weight, None, x.dtype, offsets=offsets)
    return portable_grouped_gemm.grouped_codes_gemm(round_rows(x, activation, input_scale), weight, offsets)


def _gradient(
    gradient: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, offsets: Tensor, weight_format: str,
    columns: int,
) -> Tensor:  # fmt: skip
    weight = BlockScaledTensor(codes, scale, WEIGHT_FORMATS[weight_format], (*codes.shape[:2], columns), global_scale)
    x = gradient.new_zeros(len(gradient), columns)
    for expert, (start, stop) in enumerate(pairwise(offsets.tolist())):
        if stop > start:
            x[start:stop] = input_gradient(gradient[start:stop], weight.matrix(expert))
    return x


class _Grouped(torch.autograd.Function):
    """`quant::grouped_linear` where the input needs a gradient."""

    @staticmethod
    def forward(ctx: Any, keyset: Any, *args: Any) -> Tensor:
        x, codes, scale, global_scale, _, offsets, ctx.weight_format, *_ = args
        ctx.columns = x.shape[1]
        ctx.save_for_backward(codes, scale, global_scale, offsets)
        return below_autograd(torch.ops.quant.grouped_linear.default, keyset, *args)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x = torch.ops.quant.grouped_linear_input_gradient(gradient, *ctx.saved_tensors, ctx.weight_format, ctx.columns)
        return None, x, *(None,) * 8


register(
    GROUPED_LINEAR,
    "(Tensor x, Tensor codes, Tensor scale, Tensor? global_scale, Tensor? input_scale, Tensor offsets, "
    "str weight_format, str activation, Tensor? bias) -> Tensor",
    lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[1]),
    default=_grouped,
    autograd=_Grouped,
)
register(
    f"{GROUPED_LINEAR}_input_gradient",
    "(Tensor gradient, Tensor codes, Tensor scale, Tensor? global_scale, Tensor offsets, str weight_format, "
    "int columns) -> Tensor",
    lambda gradient, *arguments: gradient.new_empty(gradient.shape[0], arguments[-1]),
    default=_gradient,
)


_PRODUCTS = ("matmul", "mm")


class ExpertStack(nn.Module):
    """The matrices of all experts in the place of their parameter; a subclass computes the products."""

    # It takes part in the products of the modeling code as the parameter would (`linear(x, P[e])`, `x @ P[e]`,
    # `bmm(x, P)`, and `x @ P.view(…)[e].T`), through `__torch_function__`: each runs through `product`, which may round
    # its input. Anything else that is computed with a stack sees dequantized values.
    stacking: Stacking  # how the parameter holds them

    def product(self, x: Tensor, index: int) -> Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through the matrix of one expert."""
        raise NotImplementedError

    def dense(self, index: int) -> Tensor:
        """Returns the values `[out, in]` of one expert."""
        raise NotImplementedError

    @property
    def multiplies_values(self) -> bool:
        """Whether `product` is a plain matmul by the values of `dense`."""
        return False

    def opened(self) -> AbstractContextManager[object]:
        """Lets a subclass keep the matrices of one forward pass while open."""
        return nullcontext()

    def forward(self, x: Tensor, index: int) -> Tensor:
        """Returns `product`, its outputs in the order of the parameter's rows."""
        return self.stacking.outputs(self.product(x, index))

    def every(self, x: Tensor) -> Tensor:
        """Maps `[experts, tokens, in]` to `[experts, tokens, out]`, each expert with its own tokens."""
        return torch.stack([self(rows, index) for index, rows in enumerate(x)])

    @property
    def shape(self) -> torch.Size:
        """Shape of the parameter."""
        return torch.Size(self.stacking.shape)

    def tensor(self) -> Tensor:
        """Returns the parameter with dequantized values."""
        return self.stacking.parameter(torch.stack([self.dense(index) for index in range(self.stacking.experts)]))

    def view(self, *shape: Any) -> "ExpertStack":
        """Returns the stack itself: modeling code views a parameter of two dimensions as one of three to index it."""
        return self

    def transpose(self, first: int, second: int) -> "TransposedStack":
        """Returns the stack for a `bmm`, which multiplies by the transpose of each matrix `[out, in]`."""
        if {first % 3, second % 3} != {1, 2} or self.stacking.transposed:
            raise TypeError(f"quantized experts are no tensor that can be transposed by ({first}, {second})")
        return TransposedStack(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | Tensor) -> Any:
        """Returns one expert, or the values of several, as the parameter holds them."""
        # One expert is an `ExpertMatrix` if products with it have to run through `product`, and else its values.
        if isinstance(index, Tensor) and index.dim():
            return torch.stack([self.stacking.hold(self.dense(int(i))) for i in index])
        if self.multiplies_values:
            return self.stacking.hold(self.dense(int(index)))
        return ExpertMatrix(self, int(index), self.stacking.transposed)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Llama 4 multiplies all experts in one `bmm`, by a parameter `[experts, in, out]`.
        if func is torch.bmm and isinstance(args[1], ExpertStack) and args[1].stacking.transposed:
            return args[1].every(args[0])
        return func(*(a.tensor() if isinstance(a, ExpertStack) else a for a in args), **(kwargs or {}))


class TransposedStack:
    """The transposes `[experts, in, out]` of a stack in modeling code, for `bmm` and no other function."""

    def __init__(self, stack: ExpertStack) -> None:
        self.stack = stack

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Inkling's shared experts. Dequantized values would leave inputs unrounded in any other function.
        if func is torch.bmm and isinstance(args[1], cls):
            return args[1].stack.every(args[0])
        raise TypeError(f"quantized experts take no part in {getattr(func, '__name__', func)}")


class ExpertMatrix:
    """The matrix of one expert in modeling code, which multiplies by it or, if `[in, out]`, by its transpose."""

    def __init__(self, stack: ExpertStack, index: int, transposed: bool) -> None:
        self.stack, self.index, self.transposed = stack, index, transposed

    @property
    def T(self) -> "ExpertMatrix":  # noqa: N802 -- as of a tensor
        """The transpose."""
        return ExpertMatrix(self.stack, self.index, not self.transposed)

    def tensor(self) -> Tensor:
        """Returns dequantized values."""
        held = self.stack.stacking.hold(self.stack.dense(self.index))
        return held if self.transposed == self.stack.stacking.transposed else held.t()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        matrix = args[1] if len(args) > 1 else None
        if isinstance(matrix, cls) and isinstance(args[0], Tensor):
            # `linear` by `[out, in]` and `matmul` by `[in, out]` are both x Wᵀ of the stored matrix.
            is_linear = func is nn.functional.linear and not matrix.transposed
            if is_linear or (getattr(func, "__name__", "") in _PRODUCTS and matrix.transposed):
                y = matrix.stack(args[0], matrix.index)
                bias = (kwargs or {}).get("bias", args[2] if len(args) > 2 else None)
                return y if bias is None else y + bias
        return func(*(a.tensor() if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class QuantExperts(QuantizedModule, ExpertStack):
    """The quantized weights of all experts of one projection, in place of the parameter that stacks them.

    Args:
        weight: `[experts, out, in]`.
        activation: format the input is rounded to; None leaves it in 16 bit.
        input_scale: static scale of the activation format, float32 scalar, where the format has one.
        dtype: the dtype of dequantized values; `.to(dtype)` changes it.
        stacking: how the parameter holds the matrices; by default `[experts, out, in]`.
    """

    runs_grouped = True

    def __init__(
        self,
        weight: BlockScaledTensor,
        activation: Format | None = None,
        input_scale: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        stacking: Stacking | None = None,
    ) -> None:
        super().__init__(weight, activation, input_scale, dtype)
        self.stacking = stacking or Stacking(tuple(weight.shape), weight.shape[0])

    def _settle(self, x: Tensor) -> None:
        if (self.codes.device, self.codes.dtype, x.dtype) != self._arranged:
            self.arrange(x.dtype)

    @property
    def multiplies_values(self) -> bool:
        """Whether inputs stay in 16 bit."""
        return self.activation_format is None

    def dense(self, index: int) -> Tensor:
        return as_stored(self.stored_weight.matrix(index)).dequantize(self.dtype)

    def product(self, x: Tensor, index: int) -> Tensor:
        self._settle(x)
        return quantized_linear(x, self.stored_weight.matrix(index), None, self.input_scale, self.activation_format)

    def every(self, x: Tensor) -> Tensor:
        # Every expert has the same number of tokens, so offsets are its multiples.
        offsets = torch.arange(len(x) + 1, device=x.device, dtype=torch.int32) * x.shape[1]
        return self.grouped(x.flatten(0, 1), offsets).unflatten(0, x.shape[:2])

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps `[tokens, in]`, sorted by expert, to `[tokens, out]`. Rows of expert e begin at `offsets[e]`."""
        self._settle(x)
        y = grouped_linear(x, self.stored_weight, offsets, self.input_scale, self.activation_format)
        return self.stacking.outputs(y)


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
    observe: Callable[[str, int, Tensor], None] | None = None, until: str | None = None,
    after: Callable[[str, int, Tensor], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Computes the forward pass of a transformers experts module whose projections are `QuantExperts`, or parameters.

    On a GPU all experts run in one grouped matmul a projection, elsewhere one at a time. Registered with transformers
    as the experts implementation "quant".

    Args:
        hidden_states: `[tokens, hidden]`.
        top_k_index, top_k_weights: expert and weight of each token and slot, `[tokens, k]`; indices beyond the last
            expert are skipped.
        observe: called with (projection, expert, its input `[tokens, in]`) before each matmul, for calibration.
        until: the last projection to be observed; it is not run, nor are later ones, and the result is meaningless.
        after: called with (projection, expert, its output `[tokens, out]`) after each matmul; returns the output.
    """
    first = "gate_up_proj" if self.has_gate else "up_proj"
    projections = (getattr(self, first), self.down_proj)
    grouped = all(getattr(projection, "runs_grouped", False) for projection in projections)
    if hidden_states.is_cuda and grouped and observe is None and after is None:
        return grouped_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    out = torch.zeros_like(hidden_states)

    def project(name: str, x: Tensor, expert: int) -> Tensor:
        if observe is not None:
            observe(name, expert, x)
        # A projection in 16 bit is a plain parameter, whose experts may still be in their files.
        projection = getattr(self, name)
        if isinstance(projection, ExpertStack):
            y: Tensor = projection(x, expert)
        else:
            weight = getattr(projection, "stored", projection)[expert].to(x.device, x.dtype)
            y = nn.functional.linear(x, weight.t() if getattr(self, "is_transposed", False) else weight)
        if getattr(self, "has_bias", False):
            y = y + getattr(self, f"{name}_bias")[expert].to(x.dtype)
        return y if after is None else after(name, expert, y)

    # Stacks of plain parameters may keep the matrices of one forward pass; this is where the pass begins and ends.
    with ExitStack() as stack:
        for projection in projections:
            if isinstance(projection, ExpertStack):
                stack.enter_context(projection.opened())
        for expert, (token, slot) in tokens_by_expert(top_k_index).items():
            if expert >= self.num_experts:
                continue
            # Calibration of the first projection needs no products at all.
            if until == first and observe is not None:
                observe(first, expert, hidden_states[token])
                continue
            up = project(first, hidden_states[token], expert)
            up = self._apply_gate(up) if self.has_gate else self.act_fn(up)
            if until is not None and observe is not None:
                observe("down_proj", expert, up)
                continue
            down = project("down_proj", up, expert)
            if getattr(self, "has_post_expert_norm", False):
                down = self.post_expert_norm(down)
            out.index_add_(0, token, (down * top_k_weights[token, slot, None]).to(out.dtype))
    return out


def tokens_by_expert(top_k_index: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns the tokens that a router sent to each expert, in their order, and the slots in which they name it."""
    # One sort, so that a GPU is waited for once and not for each expert.
    experts, counts = top_k_index.unique(return_counts=True)
    order = top_k_index.flatten().argsort(stable=True)
    tokens, slots = (
        part.split(counts.tolist()) for part in (order // top_k_index.shape[1], order % top_k_index.shape[1])
    )
    return dict(zip(experts.tolist(), zip(tokens, slots, strict=True), strict=True))


def can_run_experts_one_by_one(module: nn.Module) -> bool:
    """Returns whether `experts_forward` can replace the forward of a transformers experts module."""
    return hasattr(module, "has_gate")


def run_experts_one_by_one(model: nn.Module) -> None:
    """Makes a transformers model run its experts with `experts_forward`."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        # transformers looks the function up by the config's string at each forward pass; registering again is harmless.
        ALL_EXPERTS_FUNCTIONS.register("quant", experts_forward)
        config._experts_implementation = "quant"
