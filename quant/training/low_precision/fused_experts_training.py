"""Fused experts in low-precision training: parameters that stack the matrices of all experts of a block.

transformers runs such a module through a registry of functions. Ours, `quant_low_precision`, multiplies by each
expert's matrix with rounded operands: on a GPU all experts in one product (`grouped_experts.py`), where the recipe and
the kind of experts allow that, elsewhere one expert after another. The parameters stay in the module, under their own
names. A module in eval mode computes as the packed one will.

Each expert's tokens are an operand of their own: blocks along the tokens, in dw, hold tokens of one expert. A short
last block counts zeros. The static input scale of the deployed experts belongs to the largest input of any expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import autocast_dtype, is_in_backward
from quant.kernels.linear.experts import ExpertStack, QuantExperts, can_run_experts_one_by_one, experts_forward
from quant.recipes.layers import stacking_of, stacking_of_experts
from quant.training.low_precision.grouped_products import GroupedProducts, grouped_experts, takes
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear, RoundedProducts, ValueOf
from quant.training.low_precision.state import deployed_input, fingerprint, input_scale, packed_weight, stored_format
from quant.training.low_precision.state import LowPrecision
from quant.training.low_precision.training_recipe import TrainingRecipe

IMPLEMENTATION = "quant_low_precision"
_STACKS = "low_precision_experts"  # attribute of an experts module: its stacks by the names of the parameters
_BEFORE = "_implementation_before_training"  # of the module by which the config was changed; a config would save it


class LowPrecisionStack(ExpertStack):
    """One projection of all experts: products with rounded operands of the matrices in the owner's parameter.

    It is no submodule of the owner, whose state dict keeps the keys that it has.

    Args:
        name: of the layer in the model, for messages.
        owner: the experts module.
        parameter: its name in the owner.
        recipe: how products are rounded.
        in_fp8: whether FP8 tensor cores multiply groups, where the recipe and the GPU have such a product.
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
        self._weight_amax: torch.Tensor | None = None
        self._largest_input: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Views and results of one pass are no part of a copy.
        return {**vars(self), "_matrices": None, "_weight_amax": None, "_largest_input": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register()  # in a process that has not converted a model itself

    @property
    def held(self) -> torch.Tensor:
        """The parameter in the owner; with an adapter of PEFT, while the owner runs, their sum."""
        held: torch.Tensor = getattr(self.owner, self.parameter_name)
        return held

    @property
    def _trains(self) -> bool:
        owner: Any = self.owner
        return bool(owner.training)

    @property
    def weight(self) -> torch.Tensor:
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
            if self._trains and self._largest_input is not None and not is_in_backward():
                state.amax["x"].record(self._largest_input)
        finally:
            self._matrices = self._weight_amax = self._largest_input = None

    def product(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]` through expert `index`."""
        state = self.low_precision
        x = x.to(autocast_dtype(x) or x.dtype)
        if not x.numel():  # no scale can be measured, and the gradient of the matrix is zero
            return functional.linear(x, self._matrices[index].to(x.dtype))
        of_x = of_w = None
        assert state.recipe.input is not None
        # The largest of one expert's tokens scales them; the largest of all experts is recorded for deployment.
        if state.recipe.input.is_static:
            of_x = x.detach().abs().amax().float()
            largest = self._largest_input
            self._largest_input = of_x if largest is None else torch.maximum(largest, of_x)
        if self._weight_amax is not None:
            of_w = self._weight_amax[index]
        if self._trains:
            state.note_weight(self.held)
            if state.products is not None and state.rounds_forward:
                return state.products(x, self._matrices[index], state, x)
        y: torch.Tensor = RoundedProducts.apply(x, self._matrices[index], of_x, of_w, state)  # type: ignore[no-untyped-call]
        return y

    def grouped(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Maps `[rows, in]`, sorted by expert, to `[rows, out]`, its outputs in the order of the parameter's rows."""
        # Read once: with an adapter on it, each reading adds the two.
        state, matrices = self.low_precision, self.weight
        if self._trains:
            state.note_weight(matrices)
        x = x.to(autocast_dtype(x) or x.dtype)
        y = GroupedProducts.apply(x, matrices, offsets, state, self.in_fp8)  # type: ignore[no-untyped-call]
        return self.stacking.outputs(y)

    def dense(self, index: int) -> torch.Tensor:
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
        key = fingerprint(self.weight, state), id(history)
        if state.deployed is not None and state.deployed[0] == key:
            return state.deployed[1]  # type: ignore[no-any-return]
        activation = deployed_input(state.recipe)
        if activation is not None and activation.is_static and state.amax["x"].is_empty:
            return None
        scale = input_scale(state, held.dtype)
        scale = None if scale is None else scale.to(held.device)
        experts = QuantExperts(self.packed(), activation, scale, held.dtype, self.stacking)
        state.deployed = key, experts, history  # held, so that no other tensor gets its id
        return experts


class _Projections:
    """An experts module as `experts_forward` reads it, with other projections in the place of its parameters."""

    def __init__(self, module: nn.Module, projections: dict[str, Any]) -> None:
        self.module, self.projections = module, projections

    def __getattr__(self, name: str) -> Any:
        return self.projections[name] if name in self.projections else getattr(self.module, name)


def low_precision_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
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
            return ValueOf.apply(trained, y)  # type: ignore[no-any-return, no-untyped-call]
    return _trained_forward(self, stacks, *inputs)


def _trained_forward(
    self: Any,
    stacks: dict[str, LowPrecisionStack],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Runs an experts module with the recipe's products: in groups where they can be, else one expert at a time."""
    inputs = hidden_states, top_k_index, top_k_weights
    first, down = (stacks.get(name) for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"))
    # Where one projection stays in 16 bit, experts run one by one.
    if first is not None and down is not None and takes(self, hidden_states, first.low_precision.recipe):
        return grouped_experts(self, first, down, *inputs)
    return experts_forward(_Projections(self, stacks), *inputs)


def register() -> None:
    """Makes our forward function known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, low_precision_experts_forward)


def experts_refusal(model: nn.Module, name: str, recipe: TrainingRecipe) -> str | None:
    """Returns why the experts of a parameter stay in 16 bit; None where they can be converted."""
    owner = model.get_submodule(name.rpartition(".")[0])
    stacking = stacking_of(owner, name.rpartition(".")[2])
    if stacking is None or not can_run_experts_one_by_one(owner) or not hasattr(model, "config"):
        return f"experts of {type(owner).__name__}, which multiplies in a way of its own"
    if recipe.history:
        return f"experts: {recipe.name} would need a history for each of them"
    size = next((size for size in stacking.weight_shape[1:] if size % recipe.multiple), None)
    if size is not None:
        return f"{list(stacking.weight_shape)}: {recipe.name} needs sizes that are multiples of {recipe.multiple}"
    return None


def convert_experts(
    model: Any, names: list[str], recipe: TrainingRecipe, products: Any = None, in_fp8: bool = False
) -> None:
    """Has the experts of these parameters train in low precision, by the products of a backend where one is given.

    With `in_fp8`, grouped products use FP8 tensor cores where they can.
    """
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
