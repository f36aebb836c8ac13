"""A `TrainingRecipe` says how the operands of the three matrix products of a linear layer are rounded.

    product    y  = Q(x) Q(w)ᵀ        blocks along the inputs
    dx         dx = Q(dy) Q(wᵀ)ᵀ      blocks along the outputs
    dw         dw = Q(H dyᵀ) Q(H xᵀ)ᵀ blocks along the tokens

Every operand is rounded along the axis that its product sums over, because a block scale must be a factor of a partial
sum. So x, w and dy are each rounded twice, unless a format has square blocks (weights of `nvfp4` and `fp8_block`) or
one scale for all (tensorwise): these formats give the same values in both directions.

| recipe | x, w, dy | scales | of the field |
|---|---|---|---|
| `fp8_delayed` | E4M3, E4M3, E5M2 | one a tensor, from the largest magnitude of earlier steps | TE `DelayedScaling` |
| `fp8_tensorwise` | E4M3, E4M3, E5M2 | one a tensor | TE `Float8CurrentScaling`, torchao `tensorwise` |
| `fp8_rowwise` | E4M3 | one a row, powers of two | torchao `rowwise` |
| `fp8_rowwise_wgrad_bf16` | E4M3, dw in BF16 | one a row; w in dx one a tensor | torchao `rowwise_with_gw_hp` |
| `fp8_block` | E4M3 | 1×128, weights 128×128, powers of two | TE `Float8BlockScaling`, DeepSeek-V3 |
| `mxfp8` | E4M3 | 1×32, E8M0 rounded up | TE `MXFP8BlockScaling`, torchao RCEIL |
| `nvfp4` | E2M1 | 1×16, weights 16×16, E4M3 and one FP32 | TE `NVFP4BlockScaling` (arXiv 2509.25149) |

NVFP4 needs two remedies for its coarse grid. A random Hadamard transform H of 16 tokens spreads outliers of both
operands of dw; it cancels in the product, since HᵀH = 1. Gradients are rounded stochastically, up with a probability
that makes the mean exact: round-to-nearest has a bias that adds up over the steps, noise averages out.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from quant.base.errors import known_names
from quant.formats.format import E2M1, E4M3, E5M2, FORMATS, FP32, Format

NVFP4_SQUARE = Format("nvfp4_16x16", E2M1, E4M3, (16, 16), global_scale=True)
FP8_E5M2 = Format("fp8_e5m2", E5M2, FP32, (0, 0))


class Arithmetic(StrEnum):
    """The order of operations by which scales are computed; values differ in some 0.1 % of places."""

    BLOCKSCALE = "blockscale"
    """As `quant.formats` does, so that a plain `quantize` gives the same codes."""
    TRANSFORMER_ENGINE = "transformer_engine"
    """As Transformer Engine's kernels do."""


@dataclass(frozen=True)
class Schedule:
    """When the forward product runs in BF16."""

    # Share of the steps after which x and w are no longer rounded in the forward product, such as 0.9; 1 never. Most of
    # the gap between NVFP4 and BF16 closes in the last tenth (arXiv 2509.25149, section 4).
    bf16_forward_from: float = 1.0


@dataclass(frozen=True)
class TrainingRecipe:
    """How a linear layer's products are rounded; a format that is None leaves its operand in BF16.

    Attributes:
        name: key in `RECIPES`.
        input, weight, gradient: formats of x, w and dy.
        weight_in_dx: the format of w in dx; None takes `weight`.
        rounds_dx, rounds_dw: whether the operands of these products are rounded.
        power_of_two_scales: FP32 scales are powers of two, rounded up so that no value saturates.
        history: steps whose largest magnitudes give the scale of a tensor; 0 measures the tensor itself.
        hadamard: tokens of a block of the random Hadamard transform in dw; 0 is none.
        stochastic_gradients: whether dy is rounded stochastically.
        four_over_six: NVFP4 blocks of x and w map their largest magnitude to 6 or to 4, by squared error.
        arithmetic: the order of operations of NVFP4 scales, and of FP32 scales that are no powers of two.
        first_layers, last_layers: decoder blocks that stay in BF16.
        schedule: when the forward product leaves the format.
    """

    name: str
    input: Format | None = None
    weight: Format | None = None
    gradient: Format | None = None
    weight_in_dx: Format | None = None
    rounds_dx: bool = True
    rounds_dw: bool = True
    power_of_two_scales: bool = False
    history: int = 0
    hadamard: int = 0
    stochastic_gradients: bool = False
    four_over_six: bool = False
    arithmetic: Arithmetic = Arithmetic.BLOCKSCALE
    first_layers: int = 0
    last_layers: int = 0
    schedule: Schedule = Schedule()

    @property
    def multiple(self) -> int:
        """Sizes of a weight must be multiples of this: FP8 and FP4 tensor cores load 16 elements at once."""
        # A short last block of 128 is allowed, shorter blocks must be whole.
        blocks = [size for f in (self.input, self.weight, self.gradient) if f is not None for size in f.block if size]
        return max([16, *(size for size in blocks if size < 128)])

    @property
    def of_gradients(self) -> "TrainingRecipe":
        """The recipe as it rounds dy: mapping a block to 4 would cost gradients range, and a bias with it."""
        return replace(self, four_over_six=False) if self.four_over_six else self

    @property
    def weight_for_dx(self) -> Format | None:
        """The format of w in the product that gives dx."""
        return self.weight_in_dx or self.weight


# E5M2 has the range that gradients under one scale need, E4M3 the precision; shorter blocks need no range.
_TENSOR, _ROW, _GROUP, _SQUARE = (FORMATS[name] for name in ("fp8", "fp8_token", "fp8_group", "fp8_block"))

RECIPES: dict[str, TrainingRecipe] = {
    recipe.name: recipe
    for recipe in (
        TrainingRecipe(
            "fp8_delayed", _TENSOR, _TENSOR, FP8_E5M2, history=1024, arithmetic=Arithmetic.TRANSFORMER_ENGINE
        ),
        TrainingRecipe("fp8_tensorwise", _TENSOR, _TENSOR, FP8_E5M2, arithmetic=Arithmetic.TRANSFORMER_ENGINE),
        TrainingRecipe("fp8_rowwise", _ROW, _ROW, _ROW, power_of_two_scales=True),
        TrainingRecipe(
            "fp8_rowwise_wgrad_bf16", _ROW, _ROW, _ROW, weight_in_dx=_TENSOR, rounds_dw=False, power_of_two_scales=True
        ),
        TrainingRecipe(
            "fp8_block", _GROUP, _SQUARE, _GROUP, power_of_two_scales=True, arithmetic=Arithmetic.TRANSFORMER_ENGINE
        ),
        # x, w and dy are rounded twice each: along the sum of either product that they are in.
        TrainingRecipe("mxfp8", FORMATS["mxfp8"], FORMATS["mxfp8"], FORMATS["mxfp8"]),
        TrainingRecipe(
            "nvfp4", FORMATS["nvfp4"], NVFP4_SQUARE, FORMATS["nvfp4"], hadamard=16, stochastic_gradients=True,
            arithmetic=Arithmetic.TRANSFORMER_ENGINE,
        ),
    )
}  # fmt: skip


def get_training_recipe(recipe: str | TrainingRecipe) -> TrainingRecipe:
    """Returns a recipe as it is, or the one of a name; ValueError lists the known ones."""
    if isinstance(recipe, TrainingRecipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"unknown training recipe {recipe!r}; {known_names(recipe, RECIPES)}")
    return RECIPES[recipe]
