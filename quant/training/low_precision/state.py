"""Each layer in low-precision training has a `LowPrecision`: its recipe, and the largest magnitudes of recent steps.

The histories serve two purposes. Delayed scaling rounds a tensor by the largest magnitude of earlier steps, so that it
need not be read twice. And a deployed layer with a static input scale takes that scale from the inputs of training,
which makes calibration unnecessary.

The state gives the packed form of its layer without another measurement: a weight gets the codes that its forward
product multiplies by, and a static input scale fits the largest input of the last steps. A 16×16 scale of NVFP4
training is stored once for each of its 16 rows, and is then an ordinary NVFP4 tensor.

Ranks that train copies or shards of one model agree on its histories before each step of an optimizer (`reduce_amax`).
Each rank records the largest magnitudes of its own data, but the deployed model has one static scale for all, so the
largest of all ranks becomes the record of the step, as in Transformer Engine, and ranks evaluate, pack and save the
same model, alone or together. A step is where all ranks of DDP and FSDP2 meet anyway; evaluation and saving need no
communication. Ranks are those of the DDP that holds a layer, and of the mesh over which FSDP2 or tensor parallelism has
placed its weight. Whoever averages gradients in another way calls `report.reduce_amax(group)` on all ranks.
"""

import gc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from quant.base.errors import UserError, warn
from quant.calibration.statistics import static_input_scale
from quant.formats.format import FORMATS, Format
from quant.formats.rounding import encode, pack
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.custom_ops import is_in_backward
from quant.kernels.linear.oracle import memory_summary
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.training.fake_rounding import group_amax
from quant.recipes.recipe import get_recipe
from quant.training.low_precision.operands import round_operand
from quant.training.low_precision.training_recipe import TrainingRecipe
from quant.training.qat_layers import RoundedWeight

INPUT_HISTORY = 1024
"""Training steps whose largest input magnitude becomes the static input scale of the deployed layer."""


class AmaxHistory:
    """The largest magnitudes of a tensor in the last `steps` steps."""

    def __init__(self, steps: int) -> None:
        # float32 `[steps]`, newest first; -1 where no step has been recorded.
        self.start(torch.full((steps,), -1.0, dtype=torch.float32))

    def start(self, values: Tensor) -> None:
        """Goes on from values that all ranks have."""
        self.values = self.agreed = values
        self.latest = torch.full((), -1.0, dtype=torch.float32)  # the largest magnitude that this rank recorded since

    def record(self, amax: Tensor) -> None:
        """Takes in the largest magnitude of a step; NaN and infinity count as zero, or they would stay for good."""
        amax = torch.nan_to_num(amax.detach().float(), 0.0, 0.0).reshape(1)
        if is_distributed():
            self.latest = torch.maximum(self.latest.to(amax.device), amax[0])
        # A new tensor and no index that moves: torch.compile would record a graph for each value of a Python number.
        self.values = torch.cat([amax, self.values.to(amax.device)[:-1]])

    def largest(self, otherwise: Tensor) -> Tensor:
        """Returns the largest remembered magnitude, float32 scalar, or `otherwise` if there is none but zeros."""
        amax = self.values.to(otherwise.device).amax()
        return torch.where(amax <= 0, otherwise.float(), amax)

    @property
    def is_empty(self) -> bool:
        """Whether no step has been recorded."""
        return bool(self.values[0] < 0)


@dataclass(eq=False)
class LowPrecision:
    """Everything that a layer in low-precision training has in addition to its parameters."""

    name: str  # of the layer in its model, for messages
    recipe: TrainingRecipe
    # The layers that a runtime merges with this one, itself included: they share the scale of a whole weight.
    group: Sequence[Any] = ()  # LowPrecisionLinear
    merges: bool = True  # whether native products compute the group as one
    # The same layer of every expert of a mixture that is a list of modules. A router may send an expert no token in
    # training; its input is then scaled as theirs.
    siblings: Sequence[Any] = ()
    rounds_forward: bool = True  # a recipe's schedule turns it off in the end
    # Histories of x, w and dy, by those names. Only histories that the recipe or the deployed layer needs grow.
    amax: dict[str, AmaxHistory] = field(default_factory=dict)
    # Of the weight in the last forward pass. FSDP2 with `param_dtype=bfloat16` shows the layer a rounded copy of the
    # parameter, and the deployed codes must come from that copy.
    weight_dtype: torch.dtype | None = None
    # Scalars, the largest magnitude of x and dy, or of their scales, in the passes since the last step of an optimizer:
    # NaN or infinity if one of their numbers was; None where nobody looked.
    largest_input: Tensor | None = None
    largest_gradient: Tensor | None = None
    # Of another backend in place of the emulated ones: x, weight, this object, and x of all ranks, to y.
    products: "Callable[[Tensor, Tensor, LowPrecision, Tensor], Tensor] | None" = None
    is_copy: bool = False  # of another model's layer, perhaps one that never trains
    deployed: Any = None  # the layer for evaluation, with the tensors that it was made from; see `deployed_layer`

    def __post_init__(self) -> None:
        steps = self.recipe.history or INPUT_HISTORY
        self.amax = {name: AmaxHistory(steps) for name in ("x", "w", "dy")}
        self._scaled_by: tuple[Tensor | None, Tensor | None] = None, None

    def __getstate__(self) -> dict[str, Any]:
        # The deployed layer is made again when it is needed; its weight is not ours to copy or write.
        return {**vars(self), "deployed": None, "largest_input": None, "largest_gradient": None, "is_copy": True}

    def scaled_by(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the largest magnitudes that x `[..., in]` and the weight are scaled by in this forward pass.

        None where a format has no scale of a whole tensor. The histories take in this step's magnitudes, except while
        gradient checkpointing runs the forward pass again: that must round as the first run did.
        """
        recipe = self.recipe
        # The histories have moved on since the first run, whose scales must come out again.
        if recipe.history and is_in_backward():
            return self._scaled_by
        x_amax = w_amax = None
        if recipe.input is not None and recipe.input.is_static:
            current = _amax(x.detach()).float()
            # Of earlier steps, before this one is recorded.
            x_amax = self.amax["x"].largest(current) if recipe.history else current
            self.record_input(current)
        if recipe.weight is not None and recipe.weight.is_static:
            w_amax = self.weight_amax()
            if recipe.history:
                current, w_amax = w_amax, self.amax["w"].largest(w_amax)
                self.amax["w"].record(current)
        if recipe.history:
            self._scaled_by = x_amax, w_amax
        return x_amax, w_amax

    def record_input(self, x: Tensor) -> None:
        """Takes in the largest magnitude of an input, except while gradient checkpointing runs the forward again."""
        if not is_in_backward():
            self.amax["x"].record(_amax(x.detach()))

    def weight_amax(self) -> Tensor:
        """Returns the largest magnitude of the weights of the group, as they train, float32 scalar."""
        device = self.group[0].weight.device
        amax = group_amax([each.weight.detach().to(device) for each in self.group])
        # Rounding keeps the order: the largest of rounded weights is the largest weight, rounded.
        return amax if self.weight_dtype is None else amax.to(self.weight_dtype).float()

    def recorded_inputs(self) -> list[Tensor]:
        """Returns the largest recorded input of each layer that shares the deployed input scale; of siblings if none.

        Merged layers read one input, but one of them may have been skipped in the last steps.
        """
        for layers in (self.group, self.siblings):
            histories = [layer.low_precision.amax["x"] for layer in layers]
            if recorded := [history.values.amax() for history in histories if not history.is_empty]:
                return recorded
        return []

    def note_weight(self, weight: Tensor) -> None:
        """Notes the dtype that a weight trains in, and drops the layer deployed from earlier values."""
        self.deployed, self.weight_dtype = None, weight.dtype

    def note_input(self, x: Tensor) -> None:
        """Notes whether x, or the scales of its blocks, are finite; compiled graphs leave no note.

        Nothing is read here, where it would stop the GPU at each layer: an optimizer's step reads all layers' together.
        """
        if not torch.compiler.is_compiling():
            self.largest_input = _larger(self.largest_input, x)

    def note_gradient(self, dy: Tensor) -> None:
        """Notes whether dy, or the scales of its blocks, are finite, as `note_input` does.

        Raises:
            UserError: the backward pass is recorded for another one, for which rounded products have no gradients.
        """
        if not torch.compiler.is_compiling():
            if torch.is_grad_enabled():
                raise UserError(
                    f"{self.name}: create_graph=True asks for gradients of gradients, which products in "
                    f"{self.recipe.name} do not have; train without it, or give the layer to exclude="
                )
            self.largest_gradient = _larger(self.largest_gradient, dy)

    def forget_notes(self) -> None:
        """Begins to take notes anew, after an optimizer's step."""
        self.largest_input = self.largest_gradient = None

    def gradient_scaled_by(self, dy: Tensor) -> Tensor | None:
        """Returns the largest magnitude that a recipe with a history scales dy by; records this step's."""
        if not self.recipe.history:
            return None
        current = dy.abs().amax().float()
        earlier = self.amax["dy"].largest(current)
        self.amax["dy"].record(current)
        return earlier


def is_distributed() -> bool:
    """Returns whether this process is one of a distributed run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _larger(earlier: Tensor | None, x: Tensor) -> Tensor:
    """Returns the largest magnitude so far; NaN stays, so that a middle micro-batch counts as the last does."""
    # Asking for finite numbers takes five kernels.
    largest = _amax(x.detach())
    return largest if earlier is None else torch.maximum(largest, earlier.to(largest.device))


def _amax(x: Tensor) -> Tensor:
    """Returns the largest magnitude of a tensor, over all shards of a DTensor, by one kernel that reads it once."""
    amax: Any = torch.linalg.vector_norm(x, torch.inf)
    return amax.full_tensor() if hasattr(amax, "full_tensor") else amax


def stored_format(recipe: TrainingRecipe) -> Format:
    """Returns the format, and preset, that deploys a recipe; UserError where one leaves an operand of y in 16 bit."""
    weight = recipe.weight
    if weight is None or recipe.input is None:
        raise UserError(
            f"recipe {recipe.name!r} leaves an operand of y in 16 bit, and so trains for no deployed format"
        )
    if weight.global_scale:
        return FORMATS["nvfp4"]
    return FORMATS["fp8_channel"] if weight.per_row else FORMATS[weight.name]


def deployed_input(recipe: TrainingRecipe) -> Format | None:
    """Returns the format to which the deployed layer rounds its input."""
    name = get_recipe(stored_format(recipe).name).activation
    return None if name is None else FORMATS[name]


@torch.no_grad()
def packed_weight(weight: Tensor, state: LowPrecision, amax: Tensor | None = None) -> BlockScaledTensor:
    """Returns the codes and scales of a layer's forward product; UserError for NaN or infinity in the weight.

    `amax` is the largest magnitude that the whole weight `[out, in]` is scaled by; None takes the layer's.
    """
    recipe = state.recipe
    stored = stored_format(recipe)
    assert recipe.weight is not None
    if not bool(weight.isfinite().all()):
        raise UserError(f"{state.name}: training made NaN or infinity of its weight; lower the learning rate")
    if recipe.weight.is_static and amax is None:
        amax = state.weight_amax()
        if recipe.history:
            # Transformer Engine scales merged layers each by itself; deployed, they share a scale.
            recorded = [each.low_precision.amax["w"].largest(amax) for each in state.group]
            amax = torch.stack(recorded).amax()
    # FSDP2 may have shown the layer a BF16 copy: its values are the ones that were rounded in training.
    seen = weight.detach().to(state.weight_dtype or weight.dtype)
    operand = round_operand(seen, recipe.weight, recipe, amax=amax)
    # `elements` are on the grid already: encoding rounds nothing.
    codes = encode(operand.elements.contiguous(), stored.element)
    codes = pack(codes, stored.element.bits) if stored.element.bits in (4, 6) else codes
    height, scale = operand.format.block[0], operand.scale
    if height > 1 and stored.block[0] == 1:  # a square's scale, once for each of its rows
        scale = scale.repeat_interleave(height, 0)[: len(weight)]
    scale = encode(scale.contiguous(), stored.scale) if not stored.scale.is_wide else scale.contiguous()
    second = operand.factor if stored.global_scale else None
    return BlockScaledTensor(codes, scale, stored, tuple(weight.shape), second)


def input_scale(state: LowPrecision, dtype: torch.dtype) -> Tensor | None:
    """Returns the static scale of the deployed layer's input; layers that are merged share the largest of theirs.

    An expert that no token has reached takes its siblings'. Some scales are stored in `dtype`, the weight's. UserError:
    no training step has recorded an input.
    """
    activation = deployed_input(state.recipe)
    if activation is None or not activation.is_static:
        return None
    recorded = state.recorded_inputs()
    if not recorded:
        raise UserError(
            f"{state.name}: no training step has recorded its input, whose static scale {activation} needs; run a few "
            "steps in training mode first, or load the weights of a copy that holds averages (EMA) into the model that "
            "trained, and pack that"
        )
    return static_input_scale(torch.stack(recorded).amax(), activation, dtype)


def deployed_layer(layer: Any, state: LowPrecision, x: Tensor) -> nn.Module:
    """Returns the layer as it will be deployed, made again where its weight or the recorded inputs have changed.

    Before the first step there is no static input scale. The input `x` then gives its own.
    """
    histories = [each.low_precision.amax["x"].values for each in state.group]
    # The deployed layer shares the bias's memory, so that only another tensor in its place matters.
    bias = None if layer.bias is None else (layer.bias.data_ptr(), layer.bias.dtype)
    made_from = MadeFrom(layer.weight, state, bias, *map(id, histories))
    if state.deployed is not None and state.deployed[0] == made_from:
        return state.deployed[1]
    activation = deployed_input(state.recipe)
    is_recorded = not all(each.low_precision.amax["x"].is_empty for each in state.group)
    if activation is None or not activation.is_static or state.recorded_inputs():
        scale = input_scale(state, layer.weight.dtype)
    else:
        if state.is_copy:
            state.is_copy = False
            warn(
                "a copy of a model in training (EMA) has recorded no input, and evaluates by scales of its own, other "
                "than the packed model's; load its weights into the model that trained"
            )
        scale = static_input_scale(x.abs().amax().float(), activation, layer.weight.dtype)
    weight = packed_weight(layer.weight, state)
    scale = None if scale is None else scale.to(layer.weight.device)
    packed = QuantLinear(weight, layer.bias, activation, scale, dtype=layer.weight.dtype)
    if is_recorded or scale is None:
        # The histories are held, so that no other tensor gets the id by which the next call compares them.
        state.deployed = made_from, packed, histories
    return packed


class MadeFrom:
    """The values that a deployed layer was made from, to be compared with the present ones.

    Version counters miss changes through `.data`, by which averaged weights are often put in and taken out, and
    changes by FSDP2, which gathers other values into the same memory.
    """

    def __init__(self, weight: Tensor, state: LowPrecision, *facts: object) -> None:
        self.facts = (weight.dtype, weight.shape, weight.device, state.weight_dtype, *facts)
        if state.recipe.weight is not None and state.recipe.weight.is_static:  # shared with other layers
            self.facts += (*state.weight_amax().flatten().tolist(),)
        self.values = memory_summary(weight)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MadeFrom) or self.facts != other.facts:
            return False
        return all(map(torch.equal, self.values, other.values))

    __hash__ = None  # type: ignore[assignment]


def find_replicas(model: nn.Module) -> list[Any]:
    """Returns the wrappers of this process, by DDP, FSDP's first version or DeepSpeed, with parameters of `model`."""
    if not is_distributed():
        return []
    from torch.distributed.fsdp import FullyShardedDataParallel  # which takes a while to import

    own = {id(parameter) for parameter in model.parameters()}
    # Nothing leads from a module to its wrapper; `isinstance` would ask objects that only pretend to have a class.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", DistributedDataParallel)
    kinds = (DistributedDataParallel, FullyShardedDataParallel, engine)
    wrappers = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    return [each for each in wrappers if any(id(parameter) in own for parameter in each.parameters())]


def agree_on_histories(layers: Iterable[Any], replicas: Iterable[Any]) -> None:
    """Gives all ranks the largest magnitudes of this step; each layer's own ranks take part."""
    for groups, own in _by_ranks([(layer.held, layer.low_precision) for layer in layers], replicas):
        _reduce([history for state in own for history in _needed(state)], groups)


@torch.no_grad()
def agree_on_input_scales(model: nn.Module, replicas: Iterable[Any]) -> None:
    """Gives all ranks the largest of the static input scales that follow the inputs of QAT (`track_inputs`)."""
    layers = [module for module in model.modules() if isinstance(module, RoundedWeight)]
    followers = [(m.weight, m) for m in layers if m.inputs.follows and m.input_scale is not None]
    for groups, own in _by_ranks(followers, replicas):
        scales = torch.stack([layer.input_scale.to(own[0].input_scale.device) for layer in own])
        for group in groups:
            dist.all_reduce(scales, dist.ReduceOp.MAX, group=group)
        for layer, scale in zip(own, scales.unbind(), strict=True):
            layer.input_scale.copy_(scale)


def _by_ranks(owners: Iterable[tuple[Tensor, Any]], replicas: Iterable[Any]) -> list[tuple[list[Any], list[Any]]]:
    """Returns the process groups over which the owners of parameters agree, with these owners."""
    if not is_distributed():
        return []
    groups_of_parameter: dict[int, Any] = {}
    for wrapper in replicas:
        # Ranks that have run out of inputs make no step, so the others cannot meet them here.
        if not (isinstance(wrapper, DistributedDataParallel) and wrapper._join_config.enable):
            ranks = getattr(wrapper, "seq_data_parallel_group", None) or wrapper.process_group
            groups = ranks, getattr(wrapper, "_inter_node_pg", None)  # of shards, and of their copies
            groups_of_parameter |= {id(parameter): groups for parameter in wrapper.parameters()}
    by_ranks: dict[Any, list[Any]] = {}
    for parameter, owner in owners:
        if (ranks := getattr(parameter, "device_mesh", None) or groups_of_parameter.get(id(parameter))) is not None:
            by_ranks.setdefault(ranks, []).append(owner)
    groups_of = {ranks: ranks if isinstance(ranks, tuple) else ranks.get_all_groups() for ranks in by_ranks}
    return [([group for group in groups_of[ranks] if group is not None], own) for ranks, own in by_ranks.items()]


def shard_groups(model: nn.Module, replicas: Iterable[Any]) -> list[Any]:
    """Returns the process groups over which FSDP's first version shards a model's gradients, as plain tensors."""
    shards = [wrapper for wrapper in replicas if not isinstance(wrapper, DistributedDataParallel)]
    return [one for groups, _ in _by_ranks([(p, None) for p in model.parameters() if shards], shards) for one in groups]


def reduce_amax(layers: Iterable[Any], group: Any = None) -> None:
    """Takes the largest magnitudes of all ranks of `group`, None for all; every one of them has to call it."""
    _reduce([history for layer in layers for history in _needed(layer.low_precision)], [group])


def unagreed(layers: Mapping[str, Any]) -> str | None:
    """Returns a layer of a model that several ranks train, which has recorded inputs that only this rank knows."""
    if not is_distributed() or dist.get_world_size() == 1:
        return None
    names = (n for n, layer in layers.items() if any(h.latest >= 0 for h in _needed(layer.low_precision)))
    return next(names, None)


def _needed(state: LowPrecision) -> list[AmaxHistory]:
    """Returns the histories that a layer's recipe or its deployed form reads; Transformer Engine keeps its own."""
    activation = deployed_input(state.recipe) if state.recipe.weight is not None and state.recipe.input else None
    needed = ["x"] if activation is not None and activation.is_static else []
    needed = ["x", "w", "dy"] if state.recipe.history else needed
    return [state.amax[name] for name in needed if type(state.amax[name]) is AmaxHistory]


@torch.no_grad()
def _reduce(histories: list[AmaxHistory], groups: list[Any]) -> None:
    # Without a forward pass since the last time there is none on the other ranks either.
    if all(history.values is history.agreed for history in histories):
        return
    device = next(history.values.device for history in histories if history.values is not history.agreed)
    latest = torch.stack([history.latest.to(device) for history in histories])
    for group in groups:
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    # One record a step, whatever the number of micro-batches; none where no rank has one, as of an idle expert.
    before = torch.stack([history.agreed.to(device) for history in histories])
    after = torch.where((latest >= 0)[:, None], torch.cat([latest[:, None], before[:, :-1]], 1), before)
    for history, values in zip(histories, after.unbind(), strict=True):
        history.start(values)
