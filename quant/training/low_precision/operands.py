"""`operand_of` rounds an operand of a matrix product to a recipe's format, and keeps it as values and a factor.

    operand ≈ values · factor        values = element · block scale,  [rows, columns]

With NVFP4 and MX block scales the values are exact in BF16: E2M1 · E4M3 takes 6 significant bits, E4M3 · 2ᵏ takes 4. So
a BF16 matrix product of the values, accumulated in FP32 and multiplied by both factors, gives the numbers of a
Blackwell GPU on any device. The same holds for FP8 with a scale for each row or tensor, whose FP32 scales are the
factors. FP8 scales of blocks multiply partial sums; where they are powers of two they are exact in the values too.

Toolkits compute NVFP4's scales in orders of their own, and round differently where a quotient lies near a tie. With
a = largest magnitude of the tensor, b = the block's, g = a / 2688 (2688 = 6 · 448):

    blockscale            s = E4M3(max(b / (6 g), 2⁻⁹))             x / (s g)
    transformer_engine    e = 2688 / a,  s = E4M3(b · (e · ⅙))      x · (1 / (s · (1 / e)))      s may be 0

With FP32 scales Transformer Engine multiplies by 448 / b and stores the reciprocal of that; `blockscale` divides by
b / 448. Where scales are powers of two, both give the same.

`round_operand` computes them in PyTorch and keeps elements and scales, too, as packing needs them. In training, NVFP4
in Transformer Engine's order is one op, `quant::nvfp4_operand`, and one kernel on a GPU: compilers see none of its
steps, which they would compile anew for each size.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from quant.formats.format import E4M3, Format, Number
from quant.formats.rounding import decode_power_of_two, encode_power_of_two, round_to
from quant.formats.scaling import SCALE_RULES, divided, nonzero
from quant.kernels.base.custom_ops import autocast_dtype, register, without_autocast
from quant.kernels.base.hardware import has_triton
from quant.kernels.rounding.hadamard import on_each_device
from quant.training.low_precision.training_recipe import NVFP4_SQUARE, RECIPES, Arithmetic, TrainingRecipe

# Stochastic rounding: a value goes to one of its two neighbours on the grid, by chance, so that the mean is the value.
#
#     p(up) = (u − low) / (high − low)
#
# The draws come from PyTorch's default generator of the device, whose state training scripts save with their
# checkpoints; a resumed run draws on. Ranks often have the same seed. So that they do not round alike, each shifts its
# draws by a multiple of the golden ratio, modulo 1, which leaves them uniform.

_GOLDEN = 0.6180339887498949


def round_stochastically(steps: Tensor, number: Number, draws: Tensor | None = None) -> Tensor:
    """Rounds `steps`, float32, to neighbours on the grid of `number`, saturating.

    `draws` are uniform in [0, 1), of the shape of `steps`; None draws them.
    """
    magnitude = steps.abs()
    exponent = torch.frexp(magnitude).exponent - 1  # floor(log2 |u|)
    gap = torch.ldexp(torch.ones_like(steps), exponent - number.mantissa).clamp(min=number.min_subnormal)
    # floor(v + u) is v rounded up with probability v − floor(v), in units of the gap.
    draws = draws_of(steps) if draws is None else draws
    return (torch.floor(magnitude / gap + draws) * gap).clamp(max=number.max).copysign(steps)


def draws_of(like: Tensor) -> Tensor:
    """Returns draws, uniform in [0, 1), of the shape of a tensor and on its device."""
    draws = torch.rand(like.shape, device=like.device, dtype=torch.float32)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return draws if not rank else (draws + rank * _GOLDEN) % 1.0


_LARGEST_FLOAT = torch.finfo(torch.float32).max
_NVFP4_RANGE = 2688.0  # 6 · 448: the largest element times the largest block scale


@dataclass(frozen=True, eq=False)
class Operand:
    """A rounded operand of a matrix product."""

    # element · block scale, `[rows, columns]`, float32 or BF16; the elements alone where `factor` holds the scales.
    values: Tensor
    factor: Tensor  # FP32, a scalar or `[rows, 1]`: multiplies the product
    # Whether BF16 holds the values. With FP32 scales of blocks it does not, unless these are powers of two.
    is_exact_in_bf16: bool

    @property
    def transposed(self) -> "Operand":
        """The same values for the product that sums over the rows; square blocks and tensor scales allow that."""
        return Operand(self.values.t(), self.factor, self.is_exact_in_bf16)


@dataclass(frozen=True, eq=False)
class RoundedOperand(Operand):
    """An operand with its parts."""

    elements: Tensor  # before any scale, float32 `[rows, columns]`
    scale: Tensor  # decoded block scales, float32, as `Format.scale_shape` has them
    format: Format


def operand_of(
    x: Tensor, format: Format, recipe: TrainingRecipe, *, stochastic: bool = False, amax: Tensor | None = None
) -> Operand:
    """Rounds `x` along its columns for a product.

    `stochastic` rounds up or down by chance, so that the mean is `x`; the other arguments are as in `round_operand`.
    """
    draws = draws_of(x) if stochastic else None
    of_engine = recipe.arithmetic is Arithmetic.TRANSFORMER_ENGINE and not recipe.four_over_six
    if format not in (RECIPES["nvfp4"].input, NVFP4_SQUARE) or not of_engine:
        return round_operand(x, format, recipe, draws=draws, amax=amax)
    amax = x.abs().amax().float() if amax is None else amax
    values, factor = torch.ops.quant.nvfp4_operand(x, amax, format.has_square_blocks, draws)
    return Operand(values, factor, is_exact_in_bf16=True)


def round_operand(
    x: Tensor, format: Format, recipe: TrainingRecipe, *, draws: Tensor | None = None, amax: Tensor | None = None
) -> RoundedOperand:
    """Rounds `x` `[rows, columns]` along its columns, over which the product sums.

    `draws`, uniform in [0, 1) and of the shape of `x`, round stochastically; None rounds to nearest. `amax`, a float32
    scalar, is what a format with a tensor scale scales the whole tensor by; None measures it. Values beyond saturate.
    """
    rows, columns = x.shape
    block_rows, block_columns = format.block_shape(x.shape)
    x = x.float()
    blocks = _blocked(x, block_rows, block_columns)
    block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if format.global_scale:
        whole = x.abs().amax() if amax is None else amax.float()
        scale, steps, second = _two_level(blocks, block_amax, whole, format, recipe)
    else:
        if amax is not None and format.per_tensor:
            block_amax = amax.float().reshape(1, 1, 1, 1)
        scale, steps = _one_level(blocks, block_amax, format, recipe)
        second = x.new_ones(())
    # Scales that are rounded to E4M3 may be too small for the largest of their block, which then saturates.
    steps = steps.clamp(-format.element.max, format.element.max)
    elements = (
        round_to(steps, format.element)
        if draws is None
        else round_stochastically(steps, format.element, _blocked(draws, block_rows, block_columns))
    )
    # One scale for all that a product sums over can wait until after the sum.
    scaled_outside = format.per_row or format.per_tensor
    values = elements if scaled_outside else elements * scale
    factor = scale.reshape(-1, 1) if format.per_row else scale.reshape(()) if format.per_tensor else second
    return RoundedOperand(
        _unblocked(values, rows, columns), factor,
        scaled_outside or format.global_scale or format.has_power_of_two_scales or recipe.power_of_two_scales,
        _unblocked(elements, rows, columns), scale[:, 0, :, 0], format,
    )  # fmt: skip


def _blocked(x: Tensor, rows: int, columns: int) -> Tensor:
    """Returns a matrix in blocks, `[R, rows, C, columns]`; zeros fill the last ones, and change no amax and no sum."""
    padded = pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _unblocked(blocks: Tensor, rows: int, columns: int) -> Tensor:
    return blocks.flatten(2).flatten(0, 1)[:rows, :columns]


def _one_level(blocks: Tensor, amax: Tensor, format: Format, recipe: TrainingRecipe) -> tuple[Tensor, Tensor]:
    """Returns block scales for magnitudes `amax` in a format without a second level, and the blocks divided by them."""
    scale = divided(amax, format.element.max)
    if format.has_power_of_two_scales:
        scale = decode_power_of_two(encode_power_of_two(scale))
        return scale, blocks / scale
    if recipe.power_of_two_scales:
        # The power of two at or above; log2 in float64, where logarithms of powers of two are exact.
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    elif recipe.arithmetic is Arithmetic.TRANSFORMER_ENGINE:
        # Multiplying by a rounded 448 / b and dividing by a rounded b / 448 differ where a quotient is near a tie.
        steps_per_unit = torch.where(amax == 0, 1.0, torch.div(amax.new_full((), format.element.max), amax))
        return torch.div(amax.new_ones(()), steps_per_unit), blocks * steps_per_unit
    scale = nonzero(scale)
    return scale, blocks / scale


def _two_level(
    blocks: Tensor, amax: Tensor, whole: Tensor, format: Format, recipe: TrainingRecipe
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns block scales, the blocks divided by them, and the tensor's scale; see the module docstring."""
    if recipe.arithmetic is Arithmetic.BLOCKSCALE or recipe.four_over_six:
        rule = "four_over_six" if recipe.four_over_six else "max"
        bound = 256.0 if recipe.four_over_six else E4M3.max
        second = nonzero(divided(whole, format.element.max * bound))
        scale = SCALE_RULES[rule](blocks, format, second)
        return scale, blocks / (scale * second), second
    # Divisions of tensors: `2688 / whole` would be 2688 times a rounded reciprocal.
    encode = torch.minimum(whole.new_full((), _NVFP4_RANGE) / whole, whole.new_full((), _LARGEST_FLOAT))
    encode = torch.where(whole == 0, torch.ones_like(whole), encode)
    second = torch.div(encode.new_ones(()), encode)
    scale = round_to((amax * (encode * torch.reciprocal(encode.new_full((), 6.0)))).clamp(max=E4M3.max), E4M3)
    inverse = torch.div(encode.new_ones(()), scale * second)
    return scale, blocks * torch.minimum(inverse, inverse.new_full((), _LARGEST_FLOAT)), second


def multiply(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """Computes `a bᵀ`, `[rows of a, rows of b]`: exact products of the values, summed in FP32, times both factors.

    On a GPU the values go through BF16 tensor cores, which hold them exactly; on a CPU through FP32.
    """
    left, right = a.values, b.values
    if left.is_cuda and a.is_exact_in_bf16 and b.is_exact_in_bf16:
        product = torch.mm(left.bfloat16(), right.bfloat16().t(), out_dtype=torch.float32)
    else:
        # NVFP4's kernel gives BF16, and the other operand may need float32.
        product = float32_product(left.float(), right.float().t())
    return (product * (a.factor * b.factor.t())).to(dtype)


def float32_product(a: Tensor, b: Tensor) -> Tensor:
    """Computes `a @ b` of float32 tensors, also where autocast would round them to BF16."""
    with nullcontext() if autocast_dtype(a) is None else torch.autocast(a.device.type, enabled=False):
        return a @ b


def _nvfp4_reference(x: Tensor, amax: Tensor, square: bool, draws: Tensor | None) -> tuple[Tensor, Tensor]:
    recipe = RECIPES["nvfp4"]
    format = NVFP4_SQUARE if square else recipe.input
    assert format is not None
    operand = round_operand(x, format, recipe, draws=draws, amax=amax)
    return operand.values.to(_dtype_of_values(x)).contiguous(), operand.factor


def _nvfp4_on_gpu(*arguments: Any) -> tuple[Tensor, Tensor]:
    from quant.kernels.training.portable_fake_rounding import round_nvfp4_operand

    return round_nvfp4_operand(*arguments)


def _dtype_of_values(x: Tensor) -> torch.dtype:
    # As `multiply` takes them.
    return torch.bfloat16 if x.is_cuda else torch.float32


register(
    "quant::nvfp4_operand", "(Tensor x, Tensor amax, bool square, Tensor? draws) -> (Tensor, Tensor)",
    lambda x, *_: (x.new_empty(x.shape, dtype=_dtype_of_values(x)), x.new_empty((), dtype=torch.float32)),
    default=_nvfp4_reference, cuda=_nvfp4_on_gpu, where=lambda x: has_triton(),
)  # fmt: skip

# The random Hadamard transform of 16 consecutive tokens that precedes the rounding of dw's operands.
#
#     H = diag(signs) H₁₆ / 4        orthogonal, so (H dyᵀᵀ)ᵀ (H x) = dyᵀ x
#
# An outlier of one token is spread over 16, which an E2M1 grid with a largest value of 6 rounds far better. Both
# operands need the same signs. Transformer Engine has one vector of signs for all layers and ranks, never drawn again;
# the same vector serves here, so nothing has to be saved or kept equal among ranks.

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""Transformer Engine 2.20's `get_wgrad_sign_vector`."""


@on_each_device
def hadamard_matrix(size: int) -> Tensor:
    """Returns `diag(signs) H / sqrt(size)`, float32 `[size, size]`."""
    matrix = torch.ones(1, 1, device="cpu", dtype=torch.float32)
    while len(matrix) < size:  # Sylvester's construction
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return torch.tensor(SIGNS[:size], dtype=torch.float32, device="cpu")[:, None] * matrix / size**0.5


def transform_tokens(x: Tensor, size: int) -> Tensor:
    """Transforms each `size` consecutive tokens of `x` `[rows, tokens]`; a short last block counts zeros.

    The result is BF16, as in Transformer Engine's kernels: the transform happens in registers between the load of a
    BF16 tensor and the rounding to E2M1. Its width is a multiple of `size`, which changes no sum over tokens.
    """
    return torch.ops.quant.transform_tokens(x, size) if size else x


def _transformed(x: Tensor, size: int) -> Tensor:
    # Both operands get the same zeros, which add nothing to a sum over tokens.
    blocks = pad(x, (0, -x.shape[1] % size)).bfloat16().unflatten(1, (-1, size))
    matrix = hadamard_matrix(x, size)
    if x.is_cuda:  # tensor cores sum in FP32, and BF16 holds the matrix
        with without_autocast(x):
            turned = blocks @ matrix.bfloat16()
    else:
        turned = float32_product(blocks.float(), matrix).bfloat16()
    return turned.flatten(1)


# An op, because compilers would make the matrix anew in each graph, on the host.
register(
    "quant::transform_tokens",
    "(Tensor x, int size) -> Tensor",
    lambda x, size: x.new_empty((x.shape[0], -(-x.shape[1] // size) * size), dtype=torch.bfloat16),
    default=_transformed,
)
