"""Who computes the rounded products of a model.

    emulated   any recipe on any device: BF16 or FP32 products of rounded operands
    native     FP8 in blocks or rows on Hopper: our kernels make the operands, cuBLASLt multiplies (`native.py`)
    torchao    FP8 with one scale a tensor or row, on an H100 or newer
    te         Transformer Engine: delayed, current and block scaling; on Blackwell MXFP8, NVFP4

All round as the recipe says, so a layer is evaluated and packed in the same way whoever trains it. torchao gains where
`torch.compile` fuses the rounding into the operations before it.

A `te.Linear` multiplies, by the layer's own weight: the layer keeps its class, its parameters and its keys, and no
`_extra_state` comes into a state dict. Transformer Engine scales each weight by itself, whereas other backends scale
weights that a runtime merges by their common largest magnitude where a format has a scale of the whole tensor.

Products of operands that have a scale for each row, or in blocks, over the tokens of one expert or of several.

    x [rows, in], sorted by expert    rows of expert e multiply its matrix    y [rows, out]

Operands in blocks are elements times a power of two, which BF16 holds exactly. A grouped product in BF16, which sums in
FP32, therefore gives the products of the recipe but for the order of sums, on any GPU. Where each row of an operand has
one scale, Hopper's FP8 tensor cores multiply (`quant/kernels/training/grouped_fp8.py`). Recipes with one scale for all
tokens of an expert have no grouped products: `takes_recipe`.

`RowProducts` trains a linear layer so: it is one expert that gets all tokens. That needs no package, and in eager mode
is as fast as torchao's compiled.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import pad

from quant.base.errors import UserError, install_command, known_names, require
from quant.formats.format import E4M3, E5M2, FORMATS, Format
from quant.kernels.base.custom_ops import is_in_backward
from quant.kernels.base.hardware import has_triton
from quant.kernels.training import fp8_block
from quant.kernels.training import grouped_fp8 as grouped_fp8
from quant.kernels.training.grouped_fp8 import has_grouped_fp8
from quant.training.low_precision.native import NativeProducts
from quant.training.low_precision.state import AmaxHistory, LowPrecision
from quant.training.low_precision.training_recipe import RECIPES, TrainingRecipe

BACKENDS = ("auto", "emulated", "native", "torchao", "te")

TORCHAO = {"fp8_tensorwise": "tensorwise", "fp8_rowwise": "rowwise", "fp8_rowwise_wgrad_bf16": "rowwise_with_gw_hp"}
"""torchao's names of our recipes."""
TRANSFORMER_ENGINE = {
    "fp8_delayed": "DelayedScaling",
    "fp8_tensorwise": "Float8CurrentScaling",
    "fp8_block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Transformer Engine's names of our recipes."""
_PACKAGES = {"torchao": ("torchao", "torchao"), "te": ("Transformer Engine", "te")}
_OF_BLACKWELL = ("mxfp8", "nvfp4")
_TOKENS = 32  # a multiple of which Transformer Engine multiplies in every recipe
LEAST_WIDTH = 2048
"""The width of square layers from which `native` gains time, by `benchmarks/training_lowprecision.py sizes` (H100)."""


@dataclass(frozen=True)
class Backend:
    """Who computes the products of a model."""

    name: str  # one of `BACKENDS`, but "auto"
    note: str  # how this machine runs the recipe, for the log
    products: Callable[[], Any] | None = None  # makes the products of a layer; None emulates them


def choose_backend(backend: str, recipe: TrainingRecipe, parameter: Tensor) -> Backend:
    """Returns the backend that runs a recipe where a parameter of the model is; "auto" takes the fastest installed one.

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


def is_too_small(backend: str, weights: Sequence[Tensor]) -> bool:
    """Returns whether a layer is known to take no less time in a backend than in 16 bit; only `native` was measured.

    `weights` `[out, in]` are those of all layers that share its input, its own included: they are one layer here.
    """
    return backend == "native" and square_width((sum(map(len, weights)), weights[0].shape[1])) < LEAST_WIDTH


def square_width(*shapes: tuple[int, int]) -> float:
    """Returns the width of square matrices that gain as much time by low precision as these `(out, in)` together.

    Products save time in proportion to out · in, and rounding their operands costs it in proportion to out + in.
    """
    return 2 * sum(rows * columns for rows, columns in shapes) / sum(map(sum, shapes))


def _knows(name: str, recipe: TrainingRecipe) -> bool:
    if name != "native":
        # A changed recipe keeps the name; peers know their own ones only.
        names = TORCHAO if name == "torchao" else TRANSFORMER_ENGINE
        return recipe == RECIPES.get(recipe.name) and recipe.name in names
    # `fp8_block`, except for its scales' arithmetic, its schedule and its first layers.
    formats = (recipe.input, recipe.weight, recipe.gradient, recipe.weight_for_dx)
    group, square = FORMATS["fp8_group"], FORMATS["fp8_block"]
    plain = recipe.rounds_dx and recipe.rounds_dw and not (recipe.hadamard or recipe.stochastic_gradients)
    return (formats == (group, square, group, square) and plain) or is_rowwise(recipe)


# Each returns why a backend does not run a recipe where a parameter is; None where it does.


def _native_refusal(recipe: TrainingRecipe, parameter: Tensor) -> str | None:
    if not _knows("native", recipe):
        return "it has fp8_block and fp8_rowwise alone"
    if is_rowwise(recipe):
        runs, needs = has_grouped_fp8(parameter) and has_triton(), "rows need a Hopper GPU and Triton"
    else:
        runs, needs = fp8_block.runs_on(parameter), "blocks need a Hopper GPU, CUDA 12.9 and Triton"
    return None if runs else _no_fp8(parameter) or f"products of FP8 {needs}"


def _torchao_refusal(recipe: TrainingRecipe, parameter: Tensor) -> str | None:
    if not _knows("torchao", recipe):
        return _needs_blackwell(recipe) or f"torchao has no recipe like it; it has {', '.join(TORCHAO)}"
    if (refusal := _no_fp8(parameter)) is not None:
        return refusal
    if torch.cuda.get_device_capability(parameter.device) < (9, 0):
        gpu = torch.cuda.get_device_name(parameter.device)
        return f"{gpu} has no FP8 products with a scale for each row; an H100 has"
    return None


def _te_refusal(recipe: TrainingRecipe, parameter: Tensor) -> str | None:
    # The GPU decides here, before anything of Transformer Engine is called: its quantizer of MXFP8 gives unwritten
    # memory on a GPU that has no MXFP8, and no error.
    if not _knows("te", recipe):
        return f"Transformer Engine has no recipe like it; it has {', '.join(TRANSFORMER_ENGINE)}"
    capability = torch.cuda.get_device_capability
    if recipe.name in _OF_BLACKWELL and (not parameter.is_cuda or capability(parameter.device) < (10, 0)):
        return _needs_blackwell(recipe)
    if (refusal := _no_fp8(parameter)) is not None:
        return refusal
    if capability(parameter.device) < ((9, 0) if recipe.name == "fp8_block" else (8, 9)):
        return f"{torch.cuda.get_device_name(parameter.device)} has no such FP8 products; an H100 has"
    return None


def _needs_blackwell(recipe: TrainingRecipe) -> str | None:
    if recipe.name not in _OF_BLACKWELL:
        return None
    return f"no GPU before Blackwell (compute capability 10.0) has the products of {recipe.name}"


def _no_fp8(parameter: Tensor) -> str | None:
    return None if parameter.is_cuda else f"a {parameter.device.type} has no FP8 products; an H100 or newer has"


_REFUSALS = {"torchao": _torchao_refusal, "native": _native_refusal, "te": _te_refusal}
"""Fastest first, by `benchmarks/training_lowprecision.py linears` on an H100; torchao's rows compile, ours do not."""


class TorchaoProducts:
    """The three products of a linear layer by torchao: `[..., in]` to `[..., out]`, with gradients.

    `recipe` is a key of `TORCHAO`; `emulate` multiplies decoded operands, on a device without FP8 products.
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

    def __call__(self, x: Tensor, weight: Tensor, state: LowPrecision, whole: Tensor) -> Tensor:
        """Computes the product of a layer in training, and records the largest magnitude of `whole`.

        Under tensor parallelism `x` and `weight` are shards. One scale of a whole tensor is common to all of them, but
        torchao measures gradients, and rows of which each rank has a part, by the shard.
        """
        x_amax, w_amax = state.scaled_by(whole)
        from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        operands: list[Any] = [x, weight.t()]
        if self.is_tensorwise and x_amax is not None and w_amax is not None:
            # The input's largest magnitude has been measured, and torchao would read the input for it once more. It
            # would scale each weight by its own, and merged layers share one. Gradients pass through.
            e4m3, roles = torch.float8_e4m3fn, (GemmInputRole.INPUT, GemmInputRole.WEIGHT)
            operands = [
                hp_tensor_and_scale_to_float8(operand, amax_to_scale(amax, e4m3), e4m3, self.settings, role)
                for operand, amax, role in zip(operands, (x_amax, w_amax), roles, strict=True)
            ]
        return matmul_with_hp_or_float8_args.apply(*operands, self.settings, self.config)


class TEProducts:
    """The three products of a linear layer by Transformer Engine: `[..., in]` to `[..., out]`, with gradients."""

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.recipe = recipe
        self._linear: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "_linear": None}  # a copy makes its own

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, state: LowPrecision, whole: Tensor) -> Tensor:
        """Computes the product of a layer in training; the largest magnitude of x is recorded if deployment needs it.

        `x` is `whole`, or this rank's shard of it, which Transformer Engine scales by itself.

        Raises:
            UserError: gradient checkpointing runs a layer with delayed scaling again, whose histories have moved on.
        """
        if self.recipe.history and is_in_backward():
            raise UserError(
                f"{state.name}: gradient checkpointing runs it again, and {self.recipe.name} by Transformer Engine "
                'would take other scales then; use fp8_tensorwise, or backend="emulated"'
            )
        rows = x.reshape(-1, x.shape[-1])
        missing = -len(rows) % _TOKENS
        with context(self.recipe):
            module = self._module(weight, state)
            # Rows of zeros change no sum and no largest magnitude.
            y: Tensor = module(pad(rows, (0, 0, 0, missing)))[: len(rows)] if missing else module(rows)
        if self.recipe.input is not None and self.recipe.input.is_static and not self.recipe.history:
            # Current scaling measures the input in a kernel that keeps its result to itself.
            state.record_input(whole)
        return y.reshape(*x.shape[:-1], -1)

    def _module(self, weight: Tensor, state: LowPrecision) -> Any:
        if self._linear is None:
            engine = require("transformer_engine.pytorch", "te")
            rows, columns = weight.shape
            self._linear = engine.Linear(columns, rows, bias=False, params_dtype=weight.dtype, device=weight.device)
            if self.recipe.history:
                self._linear.init_fp8_metadata(num_gemms=1)
                for name, history in state.amax.items():
                    state.amax[name] = _EngineHistory(self._linear, name, history)
        # FSDP2 shows the layer another tensor at each pass.
        self._linear._parameters["weight"] = weight
        return self._linear


class _EngineHistory(AmaxHistory):
    """The history of "x", "w" or "dy" in Transformer Engine's delayed scaling, which goes on with ours."""

    def __init__(self, module: Any, name: str, history: AmaxHistory) -> None:
        self._module = module
        self._direction, self._index, self._largest = _POSITIONS[name]
        if not history.is_empty:
            self.values = history.values

    @property
    def values(self) -> Tensor:
        """As `AmaxHistory` has it. The engine has its newest step last, zeros for none, and the step at work first."""
        history = self._state.amax_history[:, self._index]
        recorded = torch.cat([history[1:].flip(0), history[:1]])
        return torch.where(recorded > 0, recorded, -1.0)

    @values.setter
    def values(self, values: Tensor) -> None:
        state = self._state
        values = values.clamp(min=0.0).to(state.amax_history.device)
        state.amax_history[:, self._index] = torch.cat([values[-1:], values[:-1].flip(0)])
        if bool(values.amax() > 0):
            state.scale[self._index] = self._largest / values.amax()

    @property
    def _state(self) -> Any:
        return self._module.fp8_meta[self._direction]


_POSITIONS = {"x": ("scaling_fwd", 0, E4M3.max), "w": ("scaling_fwd", 1, E4M3.max), "dy": ("scaling_bwd", 0, E5M2.max)}
"""Where Transformer Engine holds the history of a tensor, and the largest number of its format."""


def context(recipe: TrainingRecipe) -> Any:
    """Returns Transformer Engine's context for a recipe; one that does nothing if another is open."""
    manager = require("transformer_engine.pytorch.quantization", "te").FP8GlobalStateManager
    if manager.is_fp8_enabled():
        return nullcontext()
    return require("transformer_engine.pytorch", "te").autocast(enabled=True, recipe=_engines_recipe(recipe.name))


@lru_cache
def _engines_recipe(name: str) -> Any:
    return getattr(require("transformer_engine.common.recipe", "te"), TRANSFORMER_ENGINE[name])()


class ForwardContext:
    """Hooks that run a model's forward pass, in training, in one context of Transformer Engine.

    Delayed scaling moves its histories at the end of the outermost `te.autocast`, once for all layers that ran in it. A
    layer that is called alone opens a context for itself.
    """

    def __init__(self, recipe: TrainingRecipe) -> None:
        self.recipe = recipe
        self._open: list[Any] = []

    def start(self, model: nn.Module) -> None:
        """Hooks the model."""
        model.register_forward_pre_hook(self._enter)
        # The pass may end by an error, after which the context must not stay open.
        model.register_forward_hook(self._leave, always_call=True)

    @staticmethod
    def end(model: nn.Module) -> None:
        """Undoes `start`, also for a copy of the model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), ForwardContext):
                    del hooks[key]
                    model._forward_hooks_always_called.pop(key, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, model: nn.Module, args: Any) -> None:
        if model.training:
            self._open.append(context(self.recipe))
            self._open[-1].__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)


def takes_recipe(recipe: TrainingRecipe) -> bool:
    """Returns whether grouped products follow a recipe: E4M3 in blocks or rows, whose scales are powers of two.

    The scale of a tensor would have to be measured for each expert, as NVFP4's second-level scale would.
    """
    if recipe.history or recipe.hadamard or recipe.stochastic_gradients:
        return False
    formats = (recipe.input, recipe.weight, recipe.gradient, recipe.weight_for_dx)
    in_blocks = all(format is None or (all(format.block) and _has_exact_values(format, recipe)) for format in formats)
    return in_blocks or has_rows(recipe)


def has_rows(recipe: TrainingRecipe) -> bool:
    """Returns whether x, w and dy have a scale for each row; w may have one for each matrix in the product of dx."""
    formats, in_dx = (recipe.input, recipe.weight, recipe.gradient), recipe.weight_for_dx
    return all(format is not None and format.per_row and _has_exact_values(format, recipe) for format in formats) and (
        in_dx is not None and (in_dx.per_row or in_dx.per_tensor) and _has_exact_values(in_dx, recipe)
    )


def _has_exact_values(format: Format, recipe: TrainingRecipe) -> bool:
    has_powers_of_two = format.has_power_of_two_scales or recipe.power_of_two_scales
    return format.element is E4M3 and not format.global_scale and has_powers_of_two


def is_rowwise(recipe: TrainingRecipe) -> bool:
    """Returns whether `RowProducts` follow a recipe: `fp8_rowwise`, `fp8_rowwise_wgrad_bf16`, or one like them."""
    return has_rows(recipe) and takes_recipe(recipe)


def block_of_tokens(recipe: TrainingRecipe) -> int:
    """Returns the number of rows of which each expert has a multiple: a grouped product needs 16."""
    formats = (recipe.input, recipe.gradient)
    return math.lcm(16, *(size for format in formats if format is not None for size in format.block if size))


class GroupedProducts(torch.autograd.Function):
    """The three products of one projection of all experts, each on rounded operands.

    x: `[rows, in]`, weight: `[experts, out, in]`, y: `[rows, out]`. Rows of zeros stay zeros, in y and in dx.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, state: LowPrecision, in_fp8: bool) -> Tensor:
        recipe = state.recipe
        in_rows = has_rows(recipe)
        products = _RowProducts(offsets, in_fp8) if in_rows else _BlockProducts(offsets)
        ctx.state, ctx.products = state, products
        # Codes in FP8 take half of the memory until the backward pass. Values of blocks are BF16, and made there.
        if in_rows and recipe.input is not None and recipe.rounds_dw and ctx.needs_input_grad[1]:
            ctx.save_for_backward(weight, *products.columns(x, recipe.input))
        else:
            ctx.save_for_backward(weight, x)
        if recipe.input is None or recipe.weight is None or not state.rounds_forward:
            state.note_input(x)
            return functional.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=offsets)
        rows = products.rows(x, recipe.input)
        state.note_input(rows[1])  # scales are NaN where a value is not finite
        return products.y(rows, weight, recipe.weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, *x = ctx.saved_tensors
        state, products, recipe, dx, dw = ctx.state, ctx.products, ctx.state.recipe, None, None
        dy = dy.contiguous()  # as a grouped product that is not rounded takes it
        rounds_dx = recipe.gradient is not None and recipe.weight_for_dx is not None and recipe.rounds_dx
        if ctx.needs_input_grad[0] and rounds_dx:
            rows = products.rows(dy, recipe.gradient)
            state.note_gradient(rows[1])
            dx = products.dx(rows, weight, recipe.weight_for_dx, dy.dtype)
        else:
            state.note_gradient(dy)
            if ctx.needs_input_grad[0]:
                dx = functional.grouped_mm(dy, weight.to(dy.dtype), offs=products.offsets)
        if ctx.needs_input_grad[1]:
            # Summed in FP32 and rounded to BF16, as the gradient of a 16-bit product is, also for a wider weight.
            if recipe.gradient is not None and recipe.input is not None and recipe.rounds_dw:
                columns = x if len(x) > 1 else products.columns(x[0], recipe.input)
                dw = products.dw(products.columns(dy, recipe.gradient), columns, dy.dtype).to(weight.dtype)
            else:
                dw = functional.grouped_mm(dy.t(), *x, offs=products.offsets).to(weight.dtype)
        return dx, dw, None, None, None


_Rounded = Sequence[Tensor]  # codes, or values, and their scales


@dataclass(frozen=True, eq=False)
class _RowProducts:
    """Products of operands with a scale for each row."""

    offsets: Tensor  # the row after the last of each expert
    in_fp8: bool  # whether FP8 tensor cores multiply

    def rows(self, x: Tensor, format: Format) -> _Rounded:
        """Rounds each row of `x` `[rows, columns]`."""
        return torch.ops.quant.e4m3_rows(x)

    def columns(self, x: Tensor, format: Format) -> _Rounded:
        """Rounds each column of `x` `[rows, columns]` within the rows of an expert; codes are transposed."""
        return torch.ops.quant.e4m3_columns(x, self.offsets, False, None)

    def y(self, x: _Rounded, weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        codes, scale = torch.ops.quant.e4m3_rows(weight.flatten(0, 1))
        return self._product(x, (codes.view(weight.shape), scale.view(weight.shape[:2])), dtype, is_forward=True)

    def dx(self, dy: _Rounded, weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        experts, outputs, inputs = weight.shape
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=weight.device) * outputs
        scale = None
        if format.per_tensor:
            # A larger magnitude has no smaller scale, so the largest scale belongs to the largest magnitude.
            _, of_rows = torch.ops.quant.e4m3_rows(weight.flatten(0, 1))
            scale = of_rows.view(experts, outputs).amax(1, keepdim=True).expand(-1, inputs).contiguous()
        return self._product(dy, torch.ops.quant.e4m3_columns(weight.flatten(0, 1), ends, True, scale), dtype)

    def dw(self, dy: _Rounded, x: _Rounded, dtype: torch.dtype) -> Tensor:
        return self._product(dy, x, dtype)

    def _product(self, a: _Rounded, b: _Rounded, dtype: torch.dtype, is_forward: bool = False) -> Tensor:
        ops = torch.ops.quant
        y: Tensor
        if self.in_fp8 and len(self.offsets) == 1:
            # A product of its own, whose sums have all bits in the backward pass at no cost.
            (codes, scale), (other, other_scale) = a, b
            matrix = other.view(-1, other.shape[-1])
            y = ops.e4m3_product(codes, scale.view(-1), matrix, other_scale.view(-1), is_forward, dtype)
            return y if other.dim() == 3 else y[None]
        return ops.e4m3_grouped_product(*a, *b, self.offsets, not self.in_fp8, dtype)


@dataclass(frozen=True, eq=False)
class _BlockProducts:
    """Products of operands in blocks, by BF16 tensor cores."""

    offsets: Tensor  # the row after the last of each expert

    def rows(self, x: Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the columns."""
        return torch.ops.quant.e4m3_blocks(x, *format.block, x.dtype)

    def columns(self, x: Tensor, format: Format) -> _Rounded:
        """Rounds `x` `[rows, columns]` in blocks along the rows."""
        return torch.ops.quant.e4m3_blocks(x, *format.block[::-1], x.dtype)

    def y(self, x: _Rounded, weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        matrices = _rounded_stack(weight, *format.block, dtype)
        return functional.grouped_mm(x[0], matrices.transpose(1, 2), offs=self.offsets)

    def dx(self, dy: _Rounded, weight: Tensor, format: Format, dtype: torch.dtype) -> Tensor:
        # The sum is over the outputs.
        return functional.grouped_mm(dy[0], _rounded_stack(weight, *format.block[::-1], dtype), offs=self.offsets)

    def dw(self, dy: _Rounded, x: _Rounded, dtype: torch.dtype) -> Tensor:
        return functional.grouped_mm(dy[0].t(), x[0], offs=self.offsets)


def _rounded_stack(weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rounds matrices `[experts, out, in]` in blocks."""
    rows = weight.shape[1]
    # Zeros keep a block from reaching into the next expert.
    missing = -rows % height
    filled = functional.pad(weight, (0, 0, 0, missing)) if missing else weight
    values: Tensor = torch.ops.quant.e4m3_blocks(filled.flatten(0, 1), height, width, dtype)[0]
    values = values.view(filled.shape)
    # A grouped product takes matrices that lie one after another.
    return values[:, :rows].contiguous() if missing else values


class RowProducts:
    """The three products of a linear layer: `[..., in]` to `[..., out]`, with gradients."""

    # On an H100, torch.compile of torch 2.11 gave zeros as gradients of x and w in one graph, on a CPU the right ones.
    @torch.compiler.disable(reason="FP8 rows by native run as they are; torchao has them in one graph")  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor, weight: Tensor, state: LowPrecision, whole: Tensor) -> Tensor:
        """Computes the product; each row has a scale of its own, so that shards of `whole` need nothing of it."""
        rows = x.reshape(-1, x.shape[-1])
        # Tensor cores sum over multiples of 16, in dw over tokens. Zeros change no largest magnitude and no sum.
        missing = -len(rows) % block_of_tokens(state.recipe)
        filled = pad(rows, (0, 0, 0, missing)) if missing else rows
        end = torch.full((1,), len(filled), dtype=torch.int32, device=x.device)
        y: Tensor = GroupedProducts.apply(filled, weight[None], end, state, True)  # type: ignore[no-untyped-call]
        return (y[: len(rows)] if missing else y).reshape(*x.shape[:-1], -1)
