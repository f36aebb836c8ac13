"""`NativeProducts` trains a linear layer in FP8 blocks on Hopper: our kernel makes operands, cuBLASLt multiplies them.

    forward   x  ─▶ codes, codes_t       y  = codes(x) · codes(w)ᵀ
              w  ─▶ codes, codes_t
    backward  dy ─▶ codes, codes_t       dx = codes(dy) · codes_t(w)ᵀ       dw = codes_t(dy) · codes_t(x)ᵀ

Each matrix is read once, for both products that it is in. The transposed codes of x are kept for the backward pass, one
byte an element where 16-bit training keeps two. The transposed codes of w are kept where they take no more memory than
that saves, and are made again elsewhere. Layers that read the same input (q, k and v) share its operands; more is
shared between layers by `native_fusions.py`.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quant.training.low_precision.state import LowPrecision, is_distributed
from quant.training.low_precision.training_recipe import Arithmetic, TrainingRecipe

_Operands = tuple[Tensor, Tensor, Tensor, Tensor]
ORIGIN = "_quant_rms_norm"  # attribute of a norm's output: its `NormInput`


def scale_rule(recipe: TrainingRecipe) -> str:
    """Returns how the kernel computes scales."""
    if recipe.power_of_two_scales:
        return "power_of_two"
    return "transformer_engine" if recipe.arithmetic is Arithmetic.TRANSFORMER_ENGINE else "divided"


class NormInput(NamedTuple):
    """The tensors that an RMSNorm's output was computed from, and the dtypes that it was rounded to."""

    x: Tensor  # `[..., columns]`, the input of the norm
    factor: Tensor  # `[columns]`, by which normalized values are multiplied
    eps: float  # added to the mean of squares
    normalized: torch.dtype  # of the normalized values before they are multiplied; float32 rounds nothing
    dtype: torch.dtype  # of the output

    def operands(self, rule: str, columns: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the output in FP8 blocks, for sums over its columns and, with `columns`, over its rows."""
        rows = self.x.reshape(-1, self.x.shape[-1])
        # As models write it: the compiler then finds that the gradient needs the same numbers.
        rstd = torch.rsqrt(self.x.float().pow(2).mean(-1, keepdim=True) + self.eps).reshape(-1)
        options = self.factor, self.normalized, self.dtype, rule, columns
        return torch.ops.quant.fp8_block_rms_norm(rows, rstd, *options)


def origin_of(x: Tensor) -> NormInput | None:
    """Returns the origin of a tensor that is the output of an RMSNorm in a compiled graph; None of another tensor."""
    return getattr(x, ORIGIN, None) if torch.compiler.is_compiling() else None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts a tensor, as autocast does before a linear layer; the output of an RMSNorm keeps its origin."""
    if x.dtype is dtype:
        return x
    y, origin = x.to(dtype), origin_of(x)
    # An output that is not float32 would be rounded twice here: it is quantized from its values.
    if origin is not None and origin.dtype is torch.float32:
        setattr(y, ORIGIN, origin._replace(dtype=dtype))
    return y


class NativeProducts:
    """The three products of a linear layer: `[..., in]` to `[..., out]`, with gradients.

    One object serves all layers of a model, so that they find the operands of an input that another has rounded. The
    recipe is `fp8_block`, or one that differs in its scales.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.rule = scale_rule(recipe)
        self._latest: tuple[Any, int, bool, _Operands] | None = None
        self.pending: Any = None  # outputs of merged layers that have not been called yet

    def __getstate__(self) -> dict[str, Any]:
        return {"rule": self.rule, "_latest": None, "pending": None}

    def __call__(self, x: Tensor, weight: Tensor, state: LowPrecision, whole: Tensor) -> Tensor:
        """Computes the product; blocks have scales of their own, so that shards of `whole` need nothing of it."""
        return _BlockProducts.apply(x, weight, self, state, origin_of(x))  # type: ignore[no-untyped-call]

    def operands(self, x: Tensor, is_trained: bool, origin: NormInput | None) -> _Operands:
        """Returns the operands of an input `[..., columns]`, with the transposed ones if its weight is trained.

        An input that is the output of an RMSNorm is quantized from its origin; nothing then reads its own values.
        """
        if origin is not None:
            return origin.operands(self.rule, is_trained)
        rows = x.reshape(-1, x.shape[-1])
        # A compiler merges equal operations itself, and must not see a tensor of an earlier call.
        if torch.compiler.is_compiling():
            return self.quantize(rows, columns=is_trained)
        latest = self._latest
        if latest is not None and latest[0]() is x and latest[1] == x._version and (latest[2] or not is_trained):
            return latest[3]
        operands = self.quantize(rows, columns=is_trained)

        def forget(reference: Any) -> None:
            if self._latest is not None and self._latest[0] is reference:
                self._latest = None

        # Only as long as the input itself: its codes must not outlive it in memory.
        self._latest = weakref.ref(x, forget), x._version, is_trained, operands
        return operands

    def quantize(self, x: Tensor, square: bool = False, rows: bool = True, columns: bool = True) -> _Operands:
        """Quantizes `x` `[R, C]` in blocks of 1×128, or squares, for sums over its columns, its rows, or both."""
        return torch.ops.quant.fp8_block_operands(x, self.rule, square, rows, columns)

    def quantize_stacked(self, weights: Sequence[Tensor], rows: bool = True, columns: bool = True) -> list[Tensor]:
        """Quantizes weights `[out, in]` with the same inputs, for y of each and for the sum of their dx.

        Returns codes and scale of each, and the transposed ones of all outputs, one weight after another.
        """
        return torch.ops.quant.fp8_block_stacked(weights, self.rule, rows, columns)

    def transposed(self, weight: Tensor, codes_t: Tensor, scale_t: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the transposed operand of a weight, which is made unless the forward pass has kept it."""
        return (codes_t, scale_t) if codes_t.numel() else self.quantize(weight, square=True, rows=False)[2:]

    def weight_gradient(self, dy: _Operands, codes_t: Tensor, scale_t: Tensor, weight: Tensor) -> Tensor:
        """Computes dw = dyᵀ x in the shape and dtype of `weight`, from operands of dy and transposed ones of x."""
        # The sum over the tokens is in FP32 either way; a BF16 weight's gradient is rounded once at its end.
        dtype = weight.dtype if weight.dtype is torch.bfloat16 else torch.float32
        dw = torch.ops.quant.fp8_block_product(dy[2], dy[3], codes_t, scale_t, False, dtype)
        return unpadded(dw, *weight.shape).to(weight.dtype)


class _BlockProducts(torch.autograd.Function):
    """The products of a layer, on operands in FP8 blocks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, native: NativeProducts, state: LowPrecision, origin: NormInput | None
    ) -> Tensor:
        ctx.native, ctx.state, ctx.shape, ctx.dtype = native, state, x.shape, x.dtype
        codes, scale, codes_t, scale_t = native.operands(x, weight.requires_grad, origin)
        state.note_input(scale)
        tokens = x.numel() // x.shape[-1]
        for_backward = keeps_codes(len(weight), tokens) and ctx.needs_input_grad[0]
        w_codes, w_scale, *w_transposed = native.quantize(weight, square=True, columns=for_backward)
        ctx.save_for_backward(codes_t, scale_t, weight, *w_transposed)
        y = torch.ops.quant.fp8_block_product(codes, scale, w_codes, w_scale, True, x.dtype)
        return unpadded(y, tokens, weight.shape[0]).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, scale_t, weight, *w_transposed = ctx.saved_tensors
        native, product = ctx.native, torch.ops.quant.fp8_block_product
        for_x, for_w = ctx.needs_input_grad[:2]
        flat = dy.reshape(-1, dy.shape[-1])
        codes, scale, d_codes_t, d_scale_t = native.quantize(flat, rows=for_x, columns=for_w)
        ctx.state.note_gradient(scale if for_x else d_scale_t)
        dx = dw = None
        if for_x:
            w_codes, w_scale = native.transposed(weight, *w_transposed)
            dx = product(codes, scale, w_codes, w_scale, True, ctx.dtype)
            dx = unpadded(dx, len(flat), weight.shape[1]).reshape(ctx.shape)
        if for_w:
            dw = native.weight_gradient((codes, scale, d_codes_t, d_scale_t), codes_t, scale_t, weight)
        return dx, dw, None, None, None


def keeps_codes(outputs: int, tokens: int) -> bool:
    """Returns whether transposed codes of weights with so many outputs stay in memory until the backward pass.

    They take out · in bytes, and the codes of x save tokens · in. In a distributed run none stay: FSDP2 shows a whole
    weight for the time of its layer, and codes of all layers would undo that.
    """
    return outputs <= tokens and not is_distributed()


def unpadded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Returns the matrix without the rows and columns that fill blocks."""
    return matrix if matrix.shape == (rows, columns) else matrix[:rows, :columns]
