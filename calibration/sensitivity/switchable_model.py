"""A `SwitchableModel` switches its layers between formats at run time, for scores and measured losses.

While it is entered, each linear of a fusion group is replaced by a `SwitchableLayer`, which holds the original and,
from its first use on, its quantized weight in each candidate format. `set` chooses; the next forward pass computes with
exactly the codes, scales and rounded inputs of real quantization, because the same solver makes them.

`candidate_weights` holds the quantized weights, and dense ones as far as they fit. Layers of one group share their
input, so it is rounded once for all.

If the inputs of all layers are too large to keep for the backward pass, `recomputed` keeps only the inputs of blocks
and runs each block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quant.recipes.blocks import block_names
from quant.calibration.evaluating import prepared
from quant.calibration.placement import free_memory
from quant.calibration.sensitivity.candidate_weights import CandidateWeights
from quant.calibration.sensitivity.candidates import KEPT, Candidate
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.switchable_layer import (
    CallCache,
    Observe,
    SwitchableExperts,
    SwitchableLayer,
    same_tensor,
)
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.statistics import round_activation, static_input_scale
from quant.calibration.walk.collect import collect_input_amax
from quant.kernels.linear.expert_modules import can_run_experts_one_by_one, experts_forward
from quant.recipes.expert_stacks import expert_matrices, stacking_of_experts
from quant.recipes.layer_kind import LayerKind
from quant.recipes.module_hooks import forwarding, take_hooks
from quant.recipes.plan import LayerPlan

# Bytes of a GPU that stay free for activations and logits; dense weights may take half of the memory above that.
_RESERVE = 16 << 30


@dataclass(eq=False)
class SwitchableModel:
    """A model whose layers can be switched between formats at run time; see the module docstring.

    Attributes:
        model: changed while this is entered, and restored afterwards.
        groups: fusion groups by name, quantizable layers only.
        candidates: formats by name; `keep` is always included.
        amax: largest input magnitude of each layer, for static scales; see `measure_amax`.
        solver: rounds the weights; one that needs no data.
        solutions: groups in a format that another solver has solved, as `solve_each_group` gives them.
        stored: dtype that scales are rounded to, the model's own; None takes the dtype of the weights.
        budget: bytes of dense weights that may be cached; a GPU with more free memory raises it.
        session: the session, whose device runs the model; weights are copied to it as layers need them.
        dtype: dtype to which 16-bit weights are widened while `ready`; None leaves them.
        blocks: the names of the model's repeated blocks, found while their linear layers are still in place.
        layers: the switchable layers by name, while this is entered.
        observe: a function that is called with every layer's gradients in backward passes, see `observed`.
        cache: calls of one run, see `caching`.
        choice: candidate by group; groups left out are in 16 bit.
        weights: the weights of all layers in all candidates.
    """

    model: nn.Module
    groups: Mapping[str, Sequence[LayerPlan]]
    candidates: Mapping[str, Candidate]
    amax: Mapping[str, torch.Tensor]
    solver: str = "rtn"
    stored: torch.dtype | None = None
    solutions: Mapping[Key, GroupSolution] = field(default_factory=dict)
    budget: int = 2 << 30
    session: Session = field(default_factory=Session)
    dtype: torch.dtype | None = None
    blocks: list[str] = field(default_factory=list)
    layers: dict[str, SwitchableLayer] = field(default_factory=dict)
    observe: Observe | None = None
    cache: CallCache | None = None
    choice: dict[str, str] = field(default_factory=dict)
    _rounded: tuple[str, torch.Tensor | None, dict[str, torch.Tensor]] = ("", None, {})
    _input_scales: dict[Key, torch.Tensor | None] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if get_pipeline(self.solver).needs_data:
            raise ValueError(
                f"solver {self.solver!r} needs data; a switchable model takes one that does not, such as 'mse'"
            )
        self.candidates = {**self.candidates, KEPT.name: KEPT}
        self.weights = CandidateWeights(
            self.groups,
            self.layers,
            self.solver,
            self.stored,
            self.solutions,
            self.session.device,
            self.dtype,
            self.budget,
        )
        # Autograd only visits nodes with an input that needs a gradient. Weights and token ids need none, so every
        # layer takes this empty tensor as a second input.
        self.anchor = torch.empty(0, requires_grad=True, dtype=torch.float32)

    def __enter__(self) -> SwitchableModel:
        self.blocks = block_names(self.model)
        if self.session.device is not None and self.session.device.type == "cuda":
            self.weights.budget = max(self.weights.budget, (free_memory(self.session.device) - _RESERVE) // 2)
        experts: set[nn.Module] = set()
        # Every replacement leaves its inverse in `_undo`; `__exit__` runs them last first.
        for group, members in self.groups.items():
            for layer in members:
                parent_name, _, last = layer.name.rpartition(".")
                parent = self.model.get_submodule(parent_name)
                original = getattr(parent, last)
                if layer.kind == LayerKind.EXPERTS:
                    stacking = stacking_of_experts(parent, last)
                    weight = expert_matrices(self.model, layer.name)
                    self._replace_parameter(parent, last, SwitchableExperts(self, layer, group, weight, stacking))
                    experts.add(parent)
                else:
                    new = SwitchableLayer(
                        self,
                        layer,
                        group,
                        original.weight.detach(),
                        None if original.bias is None else self.weights.moved(original.bias.detach()),
                    )
                    new.read_from(original)
                    take_hooks(new, original)
                    new.train(original.training)
                    self._undo.append(partial(setattr, parent, last, original))
                    setattr(parent, last, new)
                self.layers[layer.name] = self.model.get_submodule(layer.name)  # type: ignore[assignment]
        # transformers may run fused experts by one batched product over the parameter, which a module cannot stand in
        # for: such modules get a loop over experts that calls the projections.
        for module in filter(can_run_experts_one_by_one, experts):
            replaced = ExitStack()
            replaced.enter_context(forwarding(module, partial(experts_forward, module)))
            self._undo.append(replaced.close)
        return self

    def _replace_parameter(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        parameter = parent.get_parameter(name)

        def undo() -> None:
            delattr(parent, name)
            parent.register_parameter(name, parameter)

        delattr(parent, name)
        setattr(parent, name, module)
        self._undo.append(undo)

    def __exit__(self, *exc: object) -> None:
        while self._undo:
            self._undo.pop()()
        self.layers.clear()
        self.forget_inputs()
        self.weights.clear_dense()

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Enters this and prepares the model for measuring, by `prepared` with `dtype`, while open."""
        # With a device, weights stay where they are and layers copy them: layers are replaced before the model is
        # placed, so that only its other tensors move. Without one, weights are widened before layers take them.
        if self.session.device is None:
            with prepared(self.model, self.dtype), self:
                yield
            return
        with self, prepared(self.model, self.dtype, self.session):
            yield

    def set(self, choice: Mapping[str, str]) -> None:
        """Chooses a candidate by name for each group that is named; groups left out are in 16 bit."""
        self.choice = dict(choice)

    def current(self, group: str) -> Candidate:
        """Returns the candidate that is chosen for a group."""
        return self.candidates[self.choice.get(group, KEPT.name)]

    @contextmanager
    def solved_by(self, solutions: Mapping[Key, GroupSolution]) -> Iterator[None]:
        """Takes some groups from other solutions while open."""
        before = self.solutions
        self._take({**before, **solutions})
        try:
            yield
        finally:
            self._take(before)

    def _take(self, solutions: Mapping[Key, GroupSolution]) -> None:
        self.solutions = self.weights.solutions = solutions
        self._input_scales.clear()
        self.weights.clear_dense()
        self.forget_inputs()

    @contextmanager
    def caching(self, cache: CallCache) -> Iterator[None]:
        """Writes calls of layers to `cache`, or takes them from it, while open."""
        self.cache = cache
        try:
            yield
        finally:
            self.cache = None

    def round_input(self, group: str, x: torch.Tensor, candidate: Candidate) -> torch.Tensor:
        """Returns the input `x` rounded as a group sees it in a format.

        The results are kept until another input comes.
        """
        if candidate.activation is None:
            return x
        if self._rounded[0] != group or not same_tensor(self._rounded[1], x):
            self._rounded = (group, x, {})
        by_name = self._rounded[2]
        if candidate.name not in by_name:
            solution = self.solutions.get((group, candidate.name))
            divisor = None if solution is None or solution.divisor is None else solution.divisor.to(x)
            # Q(x / s) s: a transform's divisor is applied before rounding and taken back after it.
            divided = x.detach() if divisor is None else x.detach() / divisor
            rounded = round_activation(divided, candidate.activation, self.input_scale(group, candidate))
            by_name[candidate.name] = rounded if divisor is None else rounded * divisor
        return by_name[candidate.name]

    def forget_inputs(self) -> None:
        """Drops the rounded input of the last call."""
        self._rounded = ("", None, {})

    def input_scale(self, group: str, candidate: Candidate) -> torch.Tensor | None:
        """Returns the static scale of a group's inputs; None for formats that measure theirs."""
        key = (group, candidate.name)
        if key not in self._input_scales:
            self._input_scales[key] = self._static_scale(group, candidate)
        return self._input_scales[key]

    def _static_scale(self, group: str, candidate: Candidate) -> torch.Tensor | None:
        if not candidate.has_static_scale:
            return None
        if (group, candidate.name) in self.solutions:
            scale = self.solutions[group, candidate.name].input_scale
            return None if scale is None else scale.to(self.session.device)
        assert candidate.activation is not None
        # Members of a group share their input, so a serving engine gives them one scale: the largest.
        members = self.groups[group]
        amax = torch.stack([self.amax[member.name] for member in members]).amax().to(self.session.device)
        weight = self.layers[members[0].name].original
        return static_input_scale(amax, candidate.activation, self.stored or weight.dtype)


@contextmanager
def recomputed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Makes backward passes run the blocks `names` again instead of keeping their inner activations, while open."""
    blocks = [model.get_submodule(name) for name in names]
    for block in blocks:
        # Reentrant checkpoints would need an input that requires a gradient, which hidden states here do not.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def measure_amax(
    model: nn.Module,
    groups: Mapping[str, Sequence[LayerPlan]],
    candidates: Mapping[str, Candidate],
    rows: torch.Tensor,
    session: Session,
) -> dict[str, torch.Tensor]:
    """Returns the largest input magnitude of each layer, as `SwitchableModel.amax` takes it.

    Empty if no candidate needs it.
    """
    if not any(candidate.has_static_scale for candidate in candidates.values()):
        return {}
    names = [layer.name for members in groups.values() for layer in members]
    with prepared(model, None):
        return collect_input_amax(model, names, rows, session)
