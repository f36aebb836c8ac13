"""Who computes the rounded products of a model.

    emulated   any recipe on any device: BF16 or FP32 products of rounded operands
    native     FP8 in blocks or rows on Hopper: our kernels make the operands, cuBLASLt multiplies (`native.py`)
    torchao    FP8 with one scale a tensor or row, on an H100 or newer
    te         Transformer Engine: delayed, current and block scaling; on Blackwell MXFP8, NVFP4 (`te_products.py`)

All round as the recipe says, so a layer is evaluated and packed in the same way whoever trains it. torchao gains where
`torch.compile` fuses the rounding into the operations before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quant.base.errors import UserError, known_names
from quant.base.extras import install_command, require
from quant.formats.format import FORMATS
from quant.kernels.base.hardware import has_triton
from quant.kernels.training import fp8_block
from quant.kernels.training.grouped_fp8 import has_grouped_fp8
from quant.training.low_precision.native import NativeProducts, RowProducts, is_rowwise
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.te_products import TRANSFORMER_ENGINE, TEProducts
from quant.training.low_precision.training_recipe import RECIPES, TrainingRecipe

BACKENDS = ("auto", "emulated", "native", "torchao", "te")

TORCHAO = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_wgrad_bf16": "rowwise_with_gw_hp",
}
"""torchao's names of our recipes."""


@dataclass(frozen=True)
class Backend:
    """Who computes the products of a model.

    Attributes:
        name: one of `BACKENDS`, but "auto".
        note: how this machine runs the recipe, for the log.
        products: makes the products of a layer from its recipe, its name and its weight's shape; None emulates them.
    """

    name: str
    note: str
    products: Callable[[], Any] | None = None


def choose_backend(backend: str, recipe: TrainingRecipe, parameter: torch.Tensor) -> Backend:
    """Returns the backend that runs a recipe on the device of a model.

    Args:
        backend: one of `BACKENDS`; "auto" takes the fastest that is installed and runs the recipe.
        recipe: to run.
        parameter: a parameter of the model.

    Raises:
        UserError: an unknown name, or a backend that does not run the recipe here; the message says which machine does.
    """
    if backend not in BACKENDS:
        raise UserError(f"unknown backend {backend!r}; {known_names(backend, BACKENDS)}")
    products = "BF16 products" if parameter.is_cuda else "FP32 products"
    emulated = f"emulated by {products} of rounded operands, which is slower than 16 bit"
    if backend == "emulated":
        return Backend("emulated", emulated)
    if backend != "auto":
        refusal = _REFUSALS[backend](recipe, parameter)
        if refusal is not None:
            raise UserError(f'backend "{backend}" does not run {recipe.name} here: {refusal}; backend="emulated" does')
        return _backend(backend, recipe)
    reasons, hint = [], None
    for name, refuses in _REFUSALS.items():
        refusal = refuses(recipe, parameter)
        try:
            if refusal is None:
                return _backend(name, recipe)
        except UserError:
            package, extra = _PACKAGES[name]
            refusal = f"{package} would run it on the FP8 tensor cores of this GPU: {install_command(extra)}"
            hint = hint or refusal
        reasons.append((name, refusal))
    # The reason is told even if no backend was requested: it says which machine, or package, would be faster.
    reason = hint or next((reason for name, reason in reasons if _knows(name, recipe)), reasons[-1][1])
    return Backend("emulated", f"{emulated} ({reason})")


def _backend(name: str, recipe: TrainingRecipe) -> Backend:
    """Raises UserError where its package is not installed."""
    if name == "native":
        if is_rowwise(recipe):
            note = "FP8 tensor cores, operands by our kernels; torch.compile breaks its graph at each layer"
            return Backend(name, note, RowProducts)
        native = NativeProducts(recipe)
        return Backend(name, "FP8 tensor cores, operands by one kernel for both directions", lambda: native)
    if name == "torchao":
        require("torchao.float8", "torchao")
        note = "FP8 tensor cores by torchao; torch.compile the model, for eager rounding takes longer than it gains"
        return Backend(name, note, lambda: TorchaoProducts(recipe.name))
    require("transformer_engine.pytorch", "te")
    note = "FP8 tensor cores by Transformer Engine, which scales each layer by itself, also those that are merged"
    return Backend(name, note, lambda: TEProducts(recipe))


_LEAST_WIDTH = 2048
"""The width of square layers from which `native` gains time, by `benchmarks/training_lowprecision.py sizes` (H100)."""


def is_too_small(backend: str, weights: Sequence[torch.Tensor]) -> bool:
    """Returns whether a layer is known to take no less time in a backend than in 16 bit.

    Products save time in proportion to out · in, and rounding their operands costs it in proportion to out + in. So a
    layer is as good as a square one whose width is the harmonic mean of the two. Only `native` was measured.

    Args:
        backend: of the layer.
        weights: `[out, in]` of the layers that share its input, its own included: they are one layer here.
    """
    rows, columns = sum(map(len, weights)), weights[0].shape[1]
    return backend == "native" and 2 * rows * columns < _LEAST_WIDTH * (rows + columns)


_PACKAGES = {"torchao": ("torchao", "torchao"), "te": ("Transformer Engine", "te")}


def _knows(name: str, recipe: TrainingRecipe) -> bool:
    """Returns whether a backend has the recipe on some machine."""
    if name == "native":
        return _is_fp8_block(recipe) or is_rowwise(recipe)
    # A changed recipe keeps the name; peers know their own ones only.
    return recipe == RECIPES.get(recipe.name) and recipe.name in (TORCHAO if name == "torchao" else TRANSFORMER_ENGINE)


def _is_fp8_block(recipe: TrainingRecipe) -> bool:
    """Returns whether a recipe is `fp8_block` except for its scales' arithmetic, its schedule and its first layers."""
    formats = (recipe.input, recipe.weight, recipe.gradient, recipe.weight_for_dx)
    group, square = FORMATS["fp8_group"], FORMATS["fp8_block"]
    plain = recipe.rounds_dx and recipe.rounds_dw and not (recipe.hadamard or recipe.stochastic_gradients)
    return formats == (group, square, group, square) and plain


def _native_refusal(recipe: TrainingRecipe, parameter: torch.Tensor) -> str | None:
    """Returns why our kernels do not run a recipe where a parameter is; None where they do."""
    if not _knows("native", recipe):
        return "it has fp8_block and fp8_rowwise alone"
    if is_rowwise(recipe):
        runs, needs = has_grouped_fp8(parameter) and has_triton(), "rows need a Hopper GPU and Triton"
    else:
        runs, needs = fp8_block.runs_on(parameter), "blocks need a Hopper GPU, CUDA 12.9 and Triton"
    return None if runs else _no_fp8(parameter) or f"products of FP8 {needs}"


def _torchao_refusal(recipe: TrainingRecipe, parameter: torch.Tensor) -> str | None:
    """Returns why torchao does not run a recipe where a parameter is; None where it does."""
    if not _knows("torchao", recipe):
        return _needs_blackwell(recipe) or f"torchao has no recipe like it; it has {', '.join(TORCHAO)}"
    if (refusal := _no_fp8(parameter)) is not None:
        return refusal
    if _capability(parameter) < (9, 0):
        gpu = torch.cuda.get_device_name(parameter.device)
        return f"{gpu} has no FP8 products with a scale for each row; an H100 has"
    return None


def _te_refusal(recipe: TrainingRecipe, parameter: torch.Tensor) -> str | None:
    """Returns why Transformer Engine does not run a recipe where a parameter is; None where it does.

    The GPU decides here, before anything of Transformer Engine is called: its quantizer of MXFP8 gives unwritten memory
    on a GPU that has no MXFP8, and no error.
    """
    if not _knows("te", recipe):
        return f"Transformer Engine has no recipe like it; it has {', '.join(TRANSFORMER_ENGINE)}"
    if recipe.name in _OF_BLACKWELL and (not parameter.is_cuda or _capability(parameter) < (10, 0)):
        return _needs_blackwell(recipe)
    if (refusal := _no_fp8(parameter)) is not None:
        return refusal
    least = (9, 0) if recipe.name == "fp8_block" else (8, 9)
    if _capability(parameter) < least:
        return f"{torch.cuda.get_device_name(parameter.device)} has no such FP8 products; an H100 has"
    return None


_OF_BLACKWELL = ("mxfp8", "nvfp4")


def _needs_blackwell(recipe: TrainingRecipe) -> str | None:
    if recipe.name not in _OF_BLACKWELL:
        return None
    return f"no GPU before Blackwell (compute capability 10.0) has the products of {recipe.name}"


def _capability(parameter: torch.Tensor) -> tuple[int, int]:
    return torch.cuda.get_device_capability(parameter.device)


def _no_fp8(parameter: torch.Tensor) -> str | None:
    return None if parameter.is_cuda else f"a {parameter.device.type} has no FP8 products; an H100 or newer has"


_REFUSALS = {"torchao": _torchao_refusal, "native": _native_refusal, "te": _te_refusal}
"""Fastest first, by `benchmarks/training_lowprecision.py linears` on an H100; torchao's rows compile, ours do not."""


class TorchaoProducts:
    """The three products of a linear layer by torchao: `[..., in]` to `[..., out]`, with gradients.

    Args:
        recipe: a key of `TORCHAO`.
        emulate: multiplies decoded operands, on a device without FP8 products.
    """

    def __init__(self, recipe: str, emulate: bool = False) -> None:
        float8 = require("torchao.float8.float8_linear", "torchao")
        config = require("torchao.float8.config", "torchao").Float8LinearConfig.from_recipe_name(TORCHAO[recipe])
        # The module makes its settings from the config; it holds no parameter and is not kept.
        with torch.device("meta"):
            settings = float8.Float8Linear(16, 16, bias=False, config=config).linear_mm_config
        if emulate:
            settings = type(settings)(*(each._replace(emulate=True) for each in settings))
        self.config, self.settings = config, settings
        self.is_tensorwise = TORCHAO[recipe] == "tensorwise"

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, state: LowPrecision, whole: torch.Tensor) -> torch.Tensor:
        """Computes the product of a layer in training, and records the largest magnitude of `whole`.

        Under tensor parallelism `x` and `weight` are shards. One scale of a whole tensor is common to all of them, but
        torchao measures gradients, and rows of which each rank has a part, by the shard.
        """
        input_amax, weight_amax = state.scaled_by(whole)
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import GemmInputRole

        operands: list[Any] = [x, weight.t()]
        if self.is_tensorwise and input_amax is not None and weight_amax is not None:
            # The input's largest magnitude has been measured, and torchao would read the input for it once more. It
            # would scale each weight by its own, and merged layers share one.
            operands[0] = _with_scale_of(x, input_amax, self.settings, GemmInputRole.INPUT)
            operands[1] = _with_scale_of(operands[1], weight_amax, self.settings, GemmInputRole.WEIGHT)
        y: torch.Tensor = matmul_with_hp_or_float8_args.apply(*operands, self.settings, self.config)
        return y


def _with_scale_of(x: torch.Tensor, amax: torch.Tensor, settings: Any, role: Any) -> Any:
    """Returns an operand in E4M3 under the scale of a largest magnitude; its gradient passes through."""
    from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

    scale = amax_to_scale(amax, torch.float8_e4m3fn)
    return hp_tensor_and_scale_to_float8(x, scale, torch.float8_e4m3fn, settings, role)
