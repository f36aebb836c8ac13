"""Fused experts in low-precision training: parameters that stack the matrices of all experts of a block.

transformers runs such a module through a registry of functions. Ours, `quant_low_precision`, multiplies by each
expert's matrix with rounded operands: on a GPU all experts in one product, where the recipe and the kind of experts
allow that, elsewhere one expert after another. The parameters stay in the module, under their own names. A module in
eval mode computes as the packed one will.

Each expert's tokens are an operand of their own: blocks along the tokens, in dw, hold tokens of one expert. A short
last block counts zeros. The static input scale of the deployed experts belongs to the largest input of any expert.

One product multiplies the tokens of all experts so:

    hidden [tokens, in]  ─▶  x [rows, in]      a row for each token and slot, sorted by expert
    x                    ─▶  y [rows, out]     rows of expert e multiply its matrix (`backends.py`)
    y                    ─▶  [tokens, out]     sum over the slots of a token, by the router's weights

    rows    0       45      128        256       295         capacity
            ├ expert 0 ┤ zeros ┤ expert 1 ┤ expert 2 ┤ zeros ┤

Zeros fill the rows of each expert to a multiple of the recipe's block along the tokens. So one rounding of the whole
matrix gives the operands that each expert has by itself, for blocks along the rows (y, dx) and along the tokens (dw):
no block holds tokens of two experts, and zeros change no largest magnitude and no sum. The capacity follows from shapes
alone, and offsets stay on the device: the host does not wait for the router.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import autocast_dtype, is_in_backward
from quant.kernels.linear.experts import (
    ExpertStack,
    QuantExperts,
    can_run_experts_one_by_one,
    experts_forward,
    sort_by_expert,
)
from quant.recipes.layers import stacking_of, stacking_of_experts
from quant.training.low_precision.backends import (
    LEAST_WIDTH,
    GroupedProducts,
    block_of_tokens,
    square_width,
    takes_recipe,
)
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear, RoundedProducts, ValueOf
from quant.training.low_precision.state import (
    LowPrecision,
    MadeFrom,
    deployed_input,
    input_scale,
    packed_weight,
    stored_format,
)
from quant.training.low_precision.training_recipe import TrainingRecipe

IMPLEMENTATION = "quant_low_precision"
_STACKS = "low_precision_experts"  # attribute of an experts module: its stacks by the names of the parameters
_BEFORE = "_implementation_before_training"  # of the module by which the config was changed; a config would save it
_DEVICES = {"cuda"}  # kinds of device with grouped products; on a CPU they save nothing, and tests add it
_TIMED = {"cuda"}  # kinds of device on which small experts stay in 16 bit


class LowPrecisionStack(ExpertStack):
    """One projection of all experts: products with rounded operands of the matrices in the owner's parameter.

    It is no submodule of the owner, the experts module, whose state dict keeps the keys that it has. With `in_fp8`, FP8
    tensor cores multiply groups, where the recipe and the GPU have such a product.
    """

    def __init__(
        self, name: str, owner: nn.Module, parameter: str, recipe: TrainingRecipe, in_fp8: bool = False
    ) -> None:
        super().__init__()
        self.in_fp8 = in_fp8
        self.__dict__["owner"] = owner  # past nn.Module, which would take it for a submodule
        self.parameter_name = parameter
        self.stacking = stacking_of_experts(owner, parameter)
        self.low_precision = LowPrecision(name, recipe, [self])
        self._matrices: Any = None
        self._weight_amax: Tensor | None = None
        self._largest_input: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Views and results of one pass are no part of a copy.
        return {**vars(self), "_matrices": None, "_weight_amax": None, "_largest_input": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # in a process that has not converted a model itself

    @property
    def held(self) -> Tensor:
        """The parameter in the owner; with an adapter of PEFT, while the owner runs, their sum."""
        return getattr(self.owner, self.parameter_name)

    @property
    def trains(self) -> bool:
        return bool(self.owner.training)  # type: ignore[union-attr]

    @property
    def weight(self) -> Tensor:
        """The matrices `[experts, out, in]`."""
        return self.stacking.matrices(self.held)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Opens a forward pass: the experts are taken apart once, and the largest input is recorded at the end."""
        state = self.low_precision
        # Indexing the parameter for each expert would make a gradient of its whole size for each of them.
        self._matrices, self._largest_input = self.weight.unbind(0), None
        assert state.recipe.weight is not None
        self._weight_amax = state.weight_amax() if state.recipe.weight.is_static else None
        try:
            yield
            # Checkpointing runs the forward pass again inside the backward pass: that is no step of its own.
            if self.trains and self._largest_input is not None and not is_in_backward():
                state.amax["x"].record(self._largest_input)
        finally:
            self._matrices = self._weight_amax = self._largest_input = None

    def product(self, x: Tensor, index: int) -> Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`."""
        state = self.low_precision
        x = x.to(autocast_dtype(x) or x.dtype)
        if not x.numel():  # no scale can be measured, and the gradient of the matrix is zero
            return functional.linear(x, self._matrices[index].to(x.dtype))
        x_amax = w_amax = None
        assert state.recipe.input is not None
        # The largest of one expert's tokens scales them; the largest of all experts is recorded for deployment.
        if state.recipe.input.is_static:
            x_amax = x.detach().abs().amax().float()
            largest = self._largest_input
            self._largest_input = x_amax if largest is None else torch.maximum(largest, x_amax)
        if self._weight_amax is not None:
            w_amax = self._weight_amax[index]
        if self.trains:
            state.note_weight(self.held)
            if state.products is not None and state.rounds_forward:
                return state.products(x, self._matrices[index], state, x)
        return RoundedProducts.apply(x, self._matrices[index], x_amax, w_amax, state)  # type: ignore[no-untyped-call]

    def grouped(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Maps `[rows, in]`, sorted by expert, to `[rows, out]`, its outputs in the order of the parameter's rows."""
        # Read once: with an adapter on it, each reading adds the two.
        state, matrices = self.low_precision, self.weight
        if self.trains:
            state.note_weight(matrices)
        x = x.to(autocast_dtype(x) or x.dtype)
        y = GroupedProducts.apply(x, matrices, offsets, state, self.in_fp8)  # type: ignore[no-untyped-call]
        return self.stacking.outputs(y)

    def dense(self, index: int) -> Tensor:
        """Returns the matrix `[out, in]` of one expert, not rounded."""
        return self.weight[index]

    def packed(self) -> BlockScaledTensor:
        """Returns the codes and scales that products multiply by, `[experts, out, in]`."""
        state = self.low_precision
        assert state.recipe.weight is not None
        # Each expert has a second-level scale of its own, as runtimes load them.
        amax = state.weight_amax() if state.recipe.weight.is_static else [None] * len(self)
        each = [packed_weight(m, state, a) for m, a in zip(self.weight.detach(), amax, strict=True)]
        second = None if each[0].global_scale is None else torch.stack([e.global_scale for e in each])  # type: ignore[misc]
        codes, scale = torch.stack([e.codes for e in each]), torch.stack([e.scale for e in each])
        return BlockScaledTensor(codes, scale, stored_format(state.recipe), tuple(self.weight.shape), second)

    def deployed(self) -> QuantExperts | None:
        """Returns the experts as deployed; None before a training step has recorded an input that they need."""
        state, held = self.low_precision, self.held
        history = state.amax["x"].values
        made_from = MadeFrom(held, state, id(history))
        if state.deployed is not None and state.deployed[0] == made_from:
            return state.deployed[1]
        activation = deployed_input(state.recipe)
        if activation is not None and activation.is_static and state.amax["x"].is_empty:
            return None
        scale = input_scale(state, held.dtype)
        scale = None if scale is None else scale.to(held.device)
        experts = QuantExperts(self.packed(), activation, scale, held.dtype, self.stacking)
        state.deployed = made_from, experts, history  # held, so that no other tensor gets its id
        return experts


class _Projections:
    """An experts module as `experts_forward` reads it, with other projections in the place of its parameters."""

    def __init__(self, module: nn.Module, projections: dict[str, Any]) -> None:
        self.module, self.projections = module, projections

    def __getattr__(self, name: str) -> Any:
        return self.projections[name] if name in self.projections else getattr(self.module, name)


def low_precision_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Runs a transformers experts module, `[tokens, hidden]` to the same; without stacks it runs plainly."""
    stacks: dict[str, LowPrecisionStack] = getattr(self, _STACKS, {})
    inputs = hidden_states, top_k_index, top_k_weights
    if not self.training and stacks:
        # The value is the packed experts', on a GPU from their grouped kernel; the gradient is the recipe's.
        with torch.no_grad():
            deployed = {name: stack.deployed() for name, stack in stacks.items()}
            if all(deployed.values()):
                y = experts_forward(_Projections(self, deployed), *inputs)
        if all(deployed.values()):
            if not torch.is_grad_enabled():
                return y
            trained = _trained_forward(self, stacks, *inputs)
            return ValueOf.apply(trained, y)  # type: ignore[no-untyped-call]
    return _trained_forward(self, stacks, *inputs)


def _trained_forward(
    self: Any, stacks: dict[str, LowPrecisionStack], hidden: Tensor, index: Tensor, weights: Tensor
) -> Tensor:
    """Runs an experts module with the recipe's products: in groups where they can be, else one expert at a time."""
    first, down = (stacks.get(name) for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"))
    # Where one projection stays in 16 bit, experts run one by one.
    if first is not None and down is not None and takes(self, hidden, first.low_precision.recipe):
        return grouped_experts(self, first, down, hidden, index, weights)
    return experts_forward(_Projections(self, stacks), hidden, index, weights)


def takes_experts(module: Any, recipe: TrainingRecipe) -> bool:
    """Returns whether a GPU multiplies the experts of a transformers module in groups, by a recipe."""
    # Other kinds of experts add a bias or a norm for each token, which the zeros between experts must not get.
    is_plain = not getattr(module, "has_bias", False) and not getattr(module, "has_post_expert_norm", False)
    return is_plain and takes_recipe(recipe)


def takes(module: Any, x: Tensor, recipe: TrainingRecipe) -> bool:
    """Returns whether the experts of a transformers module are multiplied in groups where `x` `[tokens, in]` is."""
    dtype = autocast_dtype(x) or x.dtype
    # FP16 does not hold the operands, and PyTorch multiplies groups in FP32 one after another.
    has_products = dtype is torch.bfloat16 or (dtype is torch.float32 and not x.is_cuda)
    if not (has_products and x.device.type in _DEVICES and len(x) > 0 and takes_experts(module, recipe)):
        return False
    # Parallelism that leaves parameters as DTensors in the forward pass divides experts or their products.
    return not any(hasattr(parameter, "full_tensor") for parameter in module.parameters())


@dataclass(frozen=True, eq=False)
class Groups:
    """The rows of a grouped product."""

    positions: Tensor  # the row of each token and slot, int64 `[tokens · k]`; zeros for slots of no expert
    slots: Tensor  # the token and slot of each row, int64 `[rows]`; tokens · k for a row of zeros
    offsets: Tensor  # the row after the last of each expert, int32 `[experts]`; the last one's are all others
    is_empty: Tensor  # whether a row is one of zeros, `[rows, 1]`


def group_by_expert(index: Tensor, experts: int, block: int) -> Groups:
    """Returns the rows for a router's choice `[tokens, k]`; each expert has a multiple of `block`, and at least one.

    An expert without tokens has a block of zeros, whose product writes the zeros of its weight gradient.
    """
    order, starts = sort_by_expert(index, experts)
    count = len(order)
    blocks = (starts.diff() + (block - 1)).div(block, rounding_mode="floor").clamp(min=1)
    ends = (blocks * block).cumsum(0)
    # From the position of a slot in the sorted order to its row; experts that are not on this rank come last of all.
    begins = torch.cat([ends - blocks * block, ends[-1:]])
    sorted_index = index.flatten()[order].clamp(max=experts)
    rows = torch.arange(count, device=index.device) + (begins - starts)[sorted_index]
    # Σ of blocks is at most count / block + experts, so the host needs no number from the device.
    capacity = -(-count // block) * block + experts * block
    positions = torch.empty_like(order)
    positions[order] = rows
    slots = torch.full((capacity,), count, device=index.device)
    slots[rows] = torch.where(sorted_index < experts, order, count)
    # A product then writes every row, and zeros where no token is.
    ends[-1] = capacity
    return Groups(positions, slots, ends.int(), (slots == count)[:, None])


class SpreadRows(torch.autograd.Function):
    """Copies tokens `[tokens, columns]` to the rows of their experts, `[rows, columns]`, among zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.tokens = len(x)
        # A row of zeros follows the tokens, and rows without a token read that.
        return functional.pad(x, (0, 0, 0, 1)).index_select(0, slots // (len(positions) // len(x)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        # Each slot reads its own row, so the sum has the same order at every call, unlike a sum by `index_add_`.
        return torch.ops.quant.weigh_rows(dy, *ctx.saved_tensors, None, ctx.tokens, dy.dtype), None, None


class WeighRows(torch.autograd.Function):
    """Sums the rows of each token's experts by the router's weights: `[rows, columns]` to `[tokens, columns]`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, positions: Any, slots: Any, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rows, positions, slots, weights)
        return torch.ops.quant.weigh_rows(rows, positions, weights, len(weights), dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *torch.ops.quant.weigh_rows_backward(dy, *ctx.saved_tensors), None, None, None


def grouped_experts(module: Any, first: Any, down: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Runs a transformers experts module by grouped products, `[tokens, hidden]` to the same.

    Between the products, PyTorch's operations would take as long as these: SwiGLU and the weighted sum are one kernel
    for each direction.

    `index` has the expert of each token and slot, `[tokens, k]`; indices beyond the last expert count nothing.
    `weights` are the router's, `[tokens, k]`.
    """
    groups = group_by_expert(index, module.num_experts, block_of_tokens(first.low_precision.recipe))
    x = hidden.to(autocast_dtype(hidden) or hidden.dtype)
    up = first.grouped(SpreadRows.apply(x, groups.positions, groups.slots), groups.offsets)  # type: ignore[no-untyped-call]
    if has_swiglu(module):
        up = SwiGLU.apply(up)  # type: ignore[no-untyped-call]
    else:
        # Not every activation maps zeros to zeros.
        up = (module._apply_gate(up) if module.has_gate else module.act_fn(up)).masked_fill(groups.is_empty, 0)
    y = down.grouped(up, groups.offsets)
    return WeighRows.apply(y, weights, groups.positions, groups.slots, hidden.dtype)  # type: ignore[no-untyped-call]


def has_swiglu(module: Any) -> bool:
    """Returns whether a transformers experts module computes silu(gate) · up between its products."""
    from transformers.integrations.moe import _default_apply_gate

    is_silu = isinstance(module.act_fn, torch.nn.SiLU) or type(module.act_fn).__name__ == "SiLUActivation"
    return is_silu and module.has_gate and type(module)._apply_gate is _default_apply_gate


class SwiGLU(torch.autograd.Function):
    """silu(gate) · up of `[rows, 2 · columns]`; nothing but the argument is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor) -> Tensor:
        ctx.save_for_backward(both)
        return torch.ops.quant.swiglu(both)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.quant.swiglu_backward(dy, *ctx.saved_tensors)


def register() -> None:
    """Makes our forward function known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, low_precision_experts_forward)


def experts_refusal(model: nn.Module, name: str, recipe: TrainingRecipe, *, small: bool) -> str | None:
    """Returns why the experts of a parameter stay in 16 bit; None where they are converted, `small` ones too if asked.

    In a compiled model on an H200, 16,384 tokens, all projections of an expert together (`square_width`): of width 1474
    (768 of 2048) they train slower than in BF16, and in `fp8_rowwise` 1.1 times as fast of width 2079 (1408 of 2048).
    """
    owner = model.get_submodule(name.rpartition(".")[0])
    stacking = stacking_of(owner, name.rpartition(".")[2])
    if stacking is None or not can_run_experts_one_by_one(owner) or not hasattr(model, "config"):
        return f"experts of {type(owner).__name__}, which multiplies in a way of its own"
    if recipe.history:
        return f"experts: {recipe.name} would need a history for each of them"
    size = next((size for size in stacking.weight_shape[1:] if size % recipe.multiple), None)
    if size is not None:
        return f"{list(stacking.weight_shape)}: {recipe.name} needs sizes that are multiples of {recipe.multiple}"
    if not small and owner.get_parameter(name.rpartition(".")[2]).device.type in _TIMED:
        stacks = [stacking_of(owner, parameter) for parameter, _ in owner.named_parameters(recurse=False)]
        width = square_width(*(stack.weight_shape[1:] for stack in stacks if stack is not None))
        if width < LEAST_WIDTH:
            return (
                f"{list(stacking.weight_shape)}: experts so small train slower than in BF16 once the model is compiled "
                "(128 of [768, 2048] at 0.74 to 0.83 of its speed on an H100); name them in include to convert them"
            )
    return None


def convert_experts(
    model: Any, names: list[str], recipe: TrainingRecipe, products: Any = None, in_fp8: bool = False
) -> None:
    """Has the experts of these parameters train in low precision, by the products of a backend where one is given."""
    if not names:
        return
    register()
    for name in names:
        path, _, parameter = name.rpartition(".")
        owner = model.get_submodule(path)
        stacks = vars(owner).setdefault(_STACKS, {})
        stacks[parameter] = LowPrecisionStack(name, owner, parameter, recipe, in_fp8)
        stacks[parameter].low_precision.products = products
        # The choice is in the config, which all experts modules of the model share.
        if owner.config._experts_implementation != IMPLEMENTATION:
            vars(owner)[_BEFORE] = owner.config._experts_implementation
            owner.config._experts_implementation = IMPLEMENTATION


def restore_experts(model: nn.Module) -> None:
    """Undoes `convert_experts`."""
    for module in model.modules():
        if _STACKS in vars(module):
            del vars(module)[_STACKS]
            if _BEFORE in vars(module):
                config: Any = module.config
                config._experts_implementation = vars(module).pop(_BEFORE)


def trained_layers(model: nn.Module) -> dict[str, LowPrecisionLinear | LowPrecisionStack]:
    """Returns the linears and the experts of a model that train in low precision, by name."""
    layers: dict[str, LowPrecisionLinear | LowPrecisionStack] = {}
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            layers[name] = module
        for parameter, stack in vars(module).get(_STACKS, {}).items():
            layers[f"{name}.{parameter}"] = stack
    return layers
