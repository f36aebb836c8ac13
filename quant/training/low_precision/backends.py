"""Who computes the rounded products: `emulated` runs everywhere, `torchao` on the FP8 tensor cores of a GPU.

torchao's float8 linear rounds as `fp8_tensorwise`, `fp8_rowwise` and `fp8_rowwise_wgrad_bf16` say, to the bit, so that
a layer is evaluated and packed in the same way whoever trains it. Only its three products are used: layers keep their
class and parameters. It gains where `torch.compile` fuses the rounding into the operations before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quant.errors import UserError
from quant.extras import require
from quant.formats.install_command import install_command
from quant.training.low_precision.recipe import RECIPES, TrainingRecipe

BACKENDS = ("auto", "emulated", "torchao")
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
        name: "emulated" or "torchao".
        note: how this machine runs the recipe, for the log.
    """

    name: str
    note: str


def choose_backend(asked: str, recipe: TrainingRecipe, device: torch.device) -> Backend:
    """The backend that runs a recipe on a device.

    Args:
        asked: one of `BACKENDS`; "auto" takes torchao where it is installed and runs the recipe faster.
        recipe: to run.
        device: of the model.

    Raises:
        UserError: an unknown name, or a backend that does not run the recipe here; the message says which machine does.
    """
    if asked not in BACKENDS:
        raise UserError(f"unknown backend {asked!r}; known: {', '.join(BACKENDS)}")
    products = "BF16 products" if device.type == "cuda" else "FP32 products"
    emulated = f"emulated by {products} of rounded operands, which is slower than 16 bit"
    if asked == "emulated":
        return Backend("emulated", emulated)
    # The reason is told even where nobody asked for torchao: it says which machine would be faster.
    refusal = _torchao_refusal(recipe, device)
    if asked == "torchao" and refusal is not None:
        raise UserError(f'backend "torchao" does not run {recipe.name} here: {refusal}; backend="emulated" does')
    if refusal is None and asked == "auto":
        try:
            require("torchao.float8", "torchao")
        except UserError:
            refusal = f"torchao would run it on the FP8 tensor cores of this GPU: {install_command('torchao')}"
    if refusal is not None:
        return Backend("emulated", f"{emulated} ({refusal})")
    require("torchao.float8", "torchao")
    return Backend(
        "torchao", "FP8 tensor cores; torch.compile the model, for eager rounding takes longer than it gains"
    )


def _torchao_refusal(recipe: TrainingRecipe, device: torch.device) -> str | None:
    """Why torchao does not run a recipe on a device; None where it does."""
    # A changed recipe keeps the name; torchao knows its own three only.
    if recipe.name not in TORCHAO or recipe != RECIPES.get(recipe.name):
        if recipe.name in ("mxfp8", "nvfp4"):
            return f"no GPU before Blackwell (compute capability 10.0) has the products of {recipe.name}"
        return f"torchao has no recipe like it; it has {', '.join(TORCHAO)}"
    if device.type != "cuda":
        return f"a {device.type} has no FP8 products; an H100 or newer has"
    if torch.cuda.get_device_capability(device) < (9, 0):
        return f"{torch.cuda.get_device_name(device)} has no FP8 products with a scale for each row; an H100 has"
    return None


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

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, weight_amax: torch.Tensor | None) -> torch.Tensor:
        """`weight_amax`: largest magnitude that a weight with one scale is scaled by, for layers that share it."""
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

        operand: Any = weight.t()
        # torchao would scale each weight by its own largest magnitude, and merged layers share one.
        if self.is_tensorwise and weight_amax is not None:
            operand = _with_scale_of(operand, weight_amax, self.settings)
        y: torch.Tensor = matmul_with_hp_or_float8_args.apply(x, operand, self.settings, self.config)
        return y


def _with_scale_of(weight: torch.Tensor, amax: torch.Tensor, settings: Any) -> Any:
    """The weight in E4M3 under the scale of a group of layers; its gradient passes through."""
    from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
    from torchao.float8.float8_utils import amax_to_scale

    scale = amax_to_scale(amax, torch.float8_e4m3fn)
    return hp_tensor_and_scale_to_float8(weight, scale, torch.float8_e4m3fn, settings, GemmInputRole.WEIGHT)
