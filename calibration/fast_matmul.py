"""This file multiplies float32 matrices faster in five ways that lose no digits that matter.

**oneDNN instead of MKL.** PyTorch multiplies with MKL, which leaves AVX-512 unused on CPUs that are not Intel's, and
with it half of their speed. It asks oneDNN only where products may round their inputs to bfloat16, and oneDNN rounds
them only on CPUs with bfloat16 units. So `fast_matmul` tries one product first: where it loses digits, nothing changes.
Small products are slower in oneDNN, so this is for forward passes and second moments, not for searches.

**BF16 for differences.** Sensitivity and allocation measure the effect of small changes: of a weight that is quantized,
of an activation that follows from it. A linear layer passes a change on by itself,

    y' = y + (x' − x) Wᵀ            with x and y kept from a run before

and so does the gradient of a changed weight, g (W_q − W). Differences are formed in FP32 and then rounded to BF16: a
relative error of 2⁻⁹ in each element of the *change*, random and averaged over thousands of them. The same rounding of
x' and x themselves would be as large as the error of eight-bit formats.

**Pairs of BF16 for second moments.** A float32 is the sum of two BF16 up to 2⁻¹⁷ of it: x = h + l. A GPU multiplies
BF16 on its tensor cores and adds up in float32, so that

    xᵀ y ≈ hᵀ h' + hᵀ l' + lᵀ h'

takes a fifth of the time of float32 products. The rest, lᵀ l', is below float32's own error over thousands of tokens.

**Pairs of BF16 for forward passes.** Blocks run in float32 while their layers are rounded. On a GPU `paired_linears`
takes x Wᵀ ≈ h Hᵀ + l Hᵀ + h Lᵀ with W = H + L; weights that a checkpoint stores in BF16 have L = 0, and so have codes
times block scales of NVFP4, less the scale of the whole weight. A block of Llama-3-8B's shape spends more than half of
its float32 operations there.

**BF16 for long attention.** A GPU has no fused attention in float32 on tensor cores. Where every token attends to
thousands, as in a denoiser, that would be most of a block's time: there q, k and v are rounded to BF16, as the released
model rounds them, in the original pass and in the quantized ones alike.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from quant.recipes.blocks import replaced

_PAIRED_TOKENS = 256  # with fewer, splitting a weight takes as long as its product
_LONG = 1024  # keys of an attention without a mask, from which on it runs in BF16
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # of PyTorch, in order


def fast_matmul() -> Any:
    """Returns a context in which float32 products on a CPU are oneDNN's, where these are exact."""
    return _precision("bf16" if _has_exact_products() else None)


def default_matmul() -> Any:
    """Returns a context in which products are PyTorch's own, within `fast_matmul` too."""
    return _precision("none")


@contextmanager
def _precision(precision: str | None) -> Iterator[None]:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None or precision is None or not _has_exact_products():
        yield
        return
    with replaced([(matmul, "fp32_precision", precision)]):
        yield


@cache
def _has_exact_products() -> bool:
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is None or not torch.backends.mkldnn.is_available() or matmul.fp32_precision != "none":
        return False
    x = torch.linspace(1, 2, 256 * 256, dtype=torch.float32, device="cpu").view(256, 256)
    # "bf16" permits oneDNN to round; a CPU without bfloat16 units still multiplies in float32.
    matmul.fp32_precision = "bf16"
    try:
        product = x @ x
    finally:
        matmul.fp32_precision = "none"
    exact = x.double() @ x.double()
    return float((product - exact).norm() / exact.norm()) < 1e-6


def difference_dtype(tensor: Tensor) -> torch.dtype | None:
    """Returns BF16 where the device of `tensor` multiplies it faster than the tensor's own dtype; else None."""
    return torch.bfloat16 if tensor.dtype is torch.float32 and _multiplies_bf16(tensor.device.type) else None


@cache
def _multiplies_bf16(device_type: str) -> bool:
    if device_type == "cuda":
        return torch.cuda.get_device_capability() >= (8, 0)
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return device_type == "cpu" and any(getattr(torch.cpu, probe, bool)() for probe in probes)


def columns_product(x: Tensor, y: Tensor) -> Tensor:
    """Returns `xᵀ y`, float32 `[in, in']`, of x `[tokens, in]` and y `[tokens, in']`.

    In pairs of BF16 where a GPU has them.
    """
    if not has_pairs(x):
        return x.t() @ y
    # One product of three times the tokens: the result, which may be far larger than x, is written once.
    return _of_columns(left_operand(x.t()).t(), RightOperand(y).stacked)


def left_operand(x: Tensor) -> Tensor:
    """Returns a left factor `[…, n, k]` of `add_product`, where a GPU multiplies pairs `[…, n, 3 k]`: h | h | l."""
    if not has_pairs(x):
        return x
    # Parts stand beside each other, or below each other where `x` is stored by columns.
    if x.stride(-1) != 1:
        parts = x.new_empty(*x.shape[:-2], 3, x.shape[-1], x.shape[-2], dtype=torch.bfloat16)
        _split(x.mT, parts[..., 0, :, :], parts[..., 2, :, :], again=parts[..., 1, :, :])
        return parts.flatten(-3, -2).mT
    columns = x.shape[-1]
    beside = x.new_empty(*x.shape[:-1], 3 * columns, dtype=torch.bfloat16)
    _split(x, beside[..., :columns], beside[..., 2 * columns :], again=beside[..., columns : 2 * columns])
    return beside


class RightOperand:
    """A right factor `[…, k, n]` of `add_product` whose rows may change; pairs are stored as h, l and h.

    Where there are no pairs it is `matrix` itself, which `set` changes.
    """

    def __init__(self, matrix: Tensor) -> None:
        if not has_pairs(matrix):
            self.parts = matrix.unsqueeze(-3)
            return
        self.parts = matrix.new_empty(*matrix.shape[:-2], 3, *matrix.shape[-2:], dtype=torch.bfloat16)
        self.set(slice(None), matrix)

    @property
    def stacked(self) -> Tensor:
        """The parts, one below the other."""
        return self.parts.flatten(-3, -2)

    def set(self, rows: slice, matrix: Tensor, minus: Tensor | None = None) -> None:
        """Replaces some rows by `matrix`, or by `matrix - minus`."""
        first, *others = (self.parts[..., part, rows, :] for part in range(self.parts.shape[-3]))
        if others:
            _split(matrix, first, others[0], again=others[1], minus=minus)
        elif minus is None:
            first.copy_(matrix)
        else:
            torch.sub(matrix, minus, out=first)


def exact_operands(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x `[n, k]` and y `[m, k]` of `x yᵀ` as float32 multiplies them: left and right `[…, 6 k]` in BF16.

    A float32 is the sum of three BF16, x = h + m + l, and l m, m l and l l are below its rounding.
    """
    high = x.bfloat16()
    rest = x - high
    middle = rest.bfloat16()
    low = (rest - middle).bfloat16()
    return torch.cat([low, middle, high, middle, high, high], 1), torch.cat([high, middle, low, high, middle, high], 1)


def add_product(total: Tensor, left: Tensor, right: Tensor, factor: float = 1.0) -> None:
    """Computes `total += factor · left @ right` for a `left_operand`, and columns of a `RightOperand`'s `stacked`."""
    if left.dtype is torch.bfloat16:
        _of_columns(left.mT, right, total, factor)
    else:
        (total.addmm_ if total.dim() == 2 else total.baddbmm_)(left, right, alpha=factor)


class SplitMatrix:
    """A float32 matrix `[n, k]` for many products, split into two BF16 parts once where a GPU multiplies pairs."""

    def __init__(self, matrix: Tensor | tuple[Tensor, ...]) -> None:
        if isinstance(matrix, Tensor):
            matrix = _pair(matrix) if has_pairs(matrix) else (matrix,)
        self.parts = matrix

    def __getitem__(self, index: Any) -> "SplitMatrix":
        return SplitMatrix(tuple(part[index] for part in self.parts))

    def t(self) -> "SplitMatrix":
        """Returns the transposed matrix, as a view."""
        return SplitMatrix(tuple(part.t() for part in self.parts))

    def __matmul__(self, other: "SplitMatrix") -> Tensor:
        """Returns the product, float32."""
        if len(self.parts) == 1:
            return self.parts[0] @ other.parts[0]
        (high, low), (other_high, other_low) = self.parts, other.parts
        total = _of_columns(high.t(), other_low, _of_columns(high.t(), other_high))
        return _of_columns(low.t(), other_high, total)


def paired_linears(device: torch.device) -> Any:
    """Returns a context in which float32 linear layers on a GPU multiply in pairs of BF16, without gradients."""
    return _PairedLinears() if device.type == "cuda" else nullcontext()


class PairedWeight:
    """A weight `[out, in]`, split into two BF16 parts once for many products; see the module docstring.

    A weight in BF16 is one part already, by which `factor`, a number on its device, is multiplied.
    """

    def __init__(self, weight: Tensor, factor: Tensor | None = None) -> None:
        self.factor = factor
        self.low: Tensor | None = None
        if weight.dtype is torch.bfloat16:
            self.high = weight.t()
            return
        self.high, self.low = _pair(weight.detach().t())
        low = self.low
        # Checkpoints in BF16 have no low part, whose product adds zeros until the GPU has said so.
        self._some = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=low.is_cuda)
        self._some.copy_(low.any(), non_blocking=True)
        self._said = torch.cuda.Event() if low.is_cuda else None
        if self._said is not None:
            self._said.record()

    def linear(self, x: Tensor, bias: Tensor | None = None, unit: Tensor | None = None) -> Tensor:
        """Returns `x Wᵀ + bias`, float32 `[..., out]`, of x `[..., in]`; BF16 holds its multiples of a `unit`."""
        if self.low is not None and (self._said is None or self._said.query()) and not self._some:
            self.low = None
        rows = x.reshape(-1, x.shape[-1])
        high, *low = _pair(rows.t()) if unit is None else ((rows / unit).bfloat16().t(),)
        out = _of_columns(high, self.high)
        for part in low:
            out = _of_columns(part, self.high, out)
        if self.low is not None:
            out = _of_columns(high, self.low, out)
        for factor in (self.factor, unit):
            out = out if factor is None else out.mul_(factor)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


class _PairedLinears(TorchFunctionMode):
    """The context; each weight is split once, and its parts are kept as long as this is."""

    def __init__(self) -> None:
        super().__init__()
        # With the weight itself, so that no other tensor takes its memory, by which it is recognized.
        self.weights: dict[tuple[Any, ...], tuple[Tensor, PairedWeight]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            return _attend(dict(zip(_ATTENTION, args, strict=False)) | (kwargs or {}))
        if func is not linear or kwargs:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        if not (weight.dim() == 2 and weight.dtype is torch.float32 and multiplies_pairs(x)):
            return func(*args)
        key = (weight.data_ptr(), weight._version, weight.shape, weight.stride())
        if key not in self.weights:
            self.weights[key] = (weight, PairedWeight(weight))
        return self.weights[key][1].linear(x, *bias)


def _attend(call: dict[str, Any]) -> Tensor:
    """Returns PyTorch's attention, `[…, heads, tokens, dim]`, where a GPU computes float32 by the fastest way."""
    q, k, v = (call[name] for name in _ATTENTION[:3])
    if not has_pairs(q):
        return scaled_dot_product_attention(**call)
    if call.pop("enable_gqa", False):
        # PyTorch has no fused attention in float32 with fewer heads of keys than of queries.
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if call.get("attn_mask") is None and not call.get("is_causal") and k.shape[-2] >= _LONG:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    return scaled_dot_product_attention(**call | {"query": q, "key": k, "value": v}).to(call["query"].dtype)


def multiplies_pairs(x: Tensor) -> bool:
    """Returns whether inputs of a linear layer, `[..., in]`, are enough that its weight is worth splitting."""
    return has_pairs(x) and not torch.is_grad_enabled() and x.numel() >= _PAIRED_TOKENS * x.shape[-1]


def has_pairs(x: Tensor) -> bool:
    """Returns whether products of `x` with float32 matrices are taken in pairs of BF16."""
    return x.is_cuda and x.dtype is torch.float32 and _multiplies_bf16("cuda")


def _pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the parts of a matrix, which are stored by columns where it is."""
    if x.stride(-1) != 1:
        high, low = _pair(x.mT)
        return high.mT, low.mT
    high, low = x.new_empty(2, *x.shape, dtype=torch.bfloat16)
    _split(x, high, low)
    return high, low


def _of_columns(x: Tensor, y: Tensor, total: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Returns `xᵀ y` of BF16 matrices, in float32, or adds `factor` times that to `total` in the same kernel."""
    if total is None:
        return torch.mm(x.t(), y, out_dtype=torch.float32)
    multiply = torch.addmm if x.dim() == 2 else torch.baddbmm
    return multiply(total, x.mT, y, out_dtype=torch.float32, alpha=factor, out=total)


def _split(x: Tensor, high: Tensor, low: Tensor, again: Tensor | None = None, minus: Tensor | None = None) -> None:
    """Writes `x`, or `x - minus`, as `high` and `low`, BF16; `again` is a second place for `high`."""
    if x.is_cuda:
        from quant.kernels.rounding.portable_solvers import split_pairs

        split_pairs(x if x.stride(-1) == 1 else x.contiguous(), high, low, again, minus)
        return
    value = x if minus is None else x - minus
    high.copy_(value)
    low.copy_(value - high)
    if again is not None:
        again.copy_(high)
