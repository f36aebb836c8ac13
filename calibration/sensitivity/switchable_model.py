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
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from quant.calibration.evaluating import prepared
from quant.calibration.fast_matmul import difference_dtype
from quant.calibration.placement import NARROW, free_memory
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.table import KEPT, Candidate
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline, get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import round_activation, static_input_scale
from quant.calibration.walk.collect import collect_input_amax
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.experts import ExpertStack, can_run_experts_one_by_one, experts_forward
from quant.recipes.blocks import block_names
from quant.recipes.layers import LayerKind, Stacking, expert_matrices, stacking_of_experts
from quant.recipes.module_replacement import Substitute, forwarding, take_hooks
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


# `SwitchableLayer` computes a layer in the format that its `SwitchableModel` is set to.
#
# Calls of a run may be kept in a `CallCache`: inputs and outputs of all layers, exactly. Later runs on the same tokens
# then multiply only the differences, in BF16, which is several times as fast (see `fast_matmul`).
#
# For gradients, a layer is one node of autograd that saves only its input. In the backward pass it shows
# input and output gradient to `observe`, so that scores need neither the output nor the graph afterwards.


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """Input and output gradient of one call of a layer, from a backward pass."""

    x: torch.Tensor  # the input of the layer, `[..., in]`
    gradient: torch.Tensor  # ∂L/∂Y, `[..., out]`
    back: torch.Tensor  # gradient · W with the weight as it is now, `[..., in]`
    index: int | None  # the expert, or None


Observe = Callable[["SwitchableLayer", LayerGradient], None]


@dataclass(frozen=True, eq=False)
class CachedCall:
    """One call of a layer in a cached run."""

    candidate: str
    x: torch.Tensor
    y: torch.Tensor


class CallCache:
    """Calls of all layers in one run, as far as they fit into `budget`.

    Attributes:
        budget: bytes that may still be added.
        writing: whether calls are added; otherwise they are looked up.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.calls: dict[str, CachedCall] = {}
        self.held: set[int] = set()
        self.writing = True

    def keep(self, name: str, call: CachedCall) -> None:
        """Adds a call unless the budget is used up; layers with the same input share its memory."""
        new = {t.data_ptr(): t.nbytes for t in (call.x, call.y) if t.data_ptr() not in self.held}
        if sum(new.values()) <= self.budget:
            self.budget -= sum(new.values())
            self.held |= new.keys()
            self.calls[name] = call


class SwitchableLayer(Substitute):
    """A linear, or one projection of a fused-experts module, in the format that its model is set to."""

    owner: SwitchableModel
    original: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, owner: SwitchableModel, plan: LayerPlan, group: str, weight: torch.Tensor, bias: Any) -> None:
        nn.Module.__init__(self)
        self.plan, self.group = plan, group
        # Past nn.Module.__setattr__: as a submodule or parameter each would appear in the state of the model.
        object.__setattr__(self, "owner", owner)
        object.__setattr__(self, "original", weight)
        object.__setattr__(self, "bias", bias)

    def forward(self, input: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """Maps `[..., in]` to `[..., out]`; `index` is the expert's."""
        if torch.is_grad_enabled():
            return _Probe.apply(input, self.owner.anchor, self, index)  # type: ignore[no-any-return, no-untyped-call]
        return self.compute(input, index)

    def compute(self, x: torch.Tensor, index: int | None) -> torch.Tensor:
        """Returns the output in the present format."""
        owner = self.owner
        candidate = owner.current(self.group)
        unrounded, x = x, owner.round_input(self.group, x, candidate)
        branch = owner.weights.branch_output(self, candidate, unrounded, x)
        # The number of tokens of an expert differs from run to run, and a branch needs the unrounded input, which a
        # cached call does not hold.
        cache = owner.cache if index is None and branch is None else None
        if cache is not None and not cache.writing:
            cached = cache.calls.get(self.plan.name)
            if cached is not None and cached.candidate == candidate.name and cached.x.shape == x.shape:
                # y' = y + (x' − x) Wᵀ: rounding to BF16 is relative to the difference, not to the output.
                weight = owner.weights.narrow(self, candidate)
                return cached.y + linear((x - cached.x).to(weight.dtype), weight).to(x.dtype)
        y = linear(x, owner.weights.dense(self, candidate, index).to(x.dtype), self.bias)
        y = y if branch is None else y + branch
        if cache is not None and cache.writing:
            cache.keep(self.plan.name, CachedCall(candidate.name, x, y))
        return y


class SwitchableExperts(SwitchableLayer, ExpertStack):
    """One projection of all experts; `stacking` describes its layout in the parameter."""

    def __init__(
        self, owner: SwitchableModel, plan: LayerPlan, group: str, weight: torch.Tensor, stacking: Stacking
    ) -> None:
        super().__init__(owner, plan, group, weight, None)
        self.stacking = stacking

    def dense(self, index: int) -> torch.Tensor:
        """Returns the values `[out, in]` of one expert in the present format."""
        return self.owner.weights.dense(self, self.owner.current(self.group), index)

    def forward(self, input: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """Maps `[tokens, in]` to `[tokens, out]`, in the order of the parameter's rows."""
        return self.stacking.outputs(super().forward(input, index))


class _Probe(torch.autograd.Function):
    """y = layer(x), with a backward that shows x and dL/dy to the model's observer."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: SwitchableLayer, index: int | None
    ) -> torch.Tensor:
        # Only x: the weight is dequantized again in the backward pass, or comes from the cache of dense weights.
        ctx.save_for_backward(x)
        ctx.layer, ctx.index = layer, index
        return layer.compute(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        (gradient,) = gradients
        weight = layer.owner.weights.dense(layer, layer.owner.current(layer.group), ctx.index)
        # ∂L/∂x = ∂L/∂Y · W. No gradient of a weight is computed: nothing is trained.
        back = gradient @ weight.to(gradient.dtype)
        if layer.owner.observe is not None:
            layer.owner.observe(layer, LayerGradient(x, gradient, back, ctx.index))
        return back if ctx.needs_input_grad[0] else None, None, None, None


def same_tensor(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Returns whether two tensors share memory and shape.

    In a recomputed block every use of a tensor is another object.
    """
    return a is b or (a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape)


# `CandidateWeights` holds the weights of layers in all candidate formats: packed, and dense while a budget lasts.
#
# Packed weights of all candidates together take less than the 16-bit model. They are dequantized when used; dense ones
# stay while they fit into the budget.
#
# For a solver that needs data the weights are solved beforehand (`group_solutions`). If it divides the input by s, the
# weight is Q(W s) / s and the input Q(x / s) s, which have the same product, so that all candidates of a weight can be
# compared. A branch, which sees the input x unrounded, is used as x_q (W_q + B A)ᵀ + (x − x_q) (B A)ᵀ, likewise.


@dataclass(eq=False)
class CandidateWeights:
    """The weights of a `SwitchableModel`; see the module docstring."""

    groups: Mapping[str, Sequence[LayerPlan]]  # fusion groups by name
    layers: Mapping[str, SwitchableLayer]  # the switchable layers by name, with the original weights
    solver: str
    stored: torch.dtype | None  # dtype that scales are rounded to; None takes the dtype of the weights
    solutions: Mapping[Key, GroupSolution]
    device: torch.device | None  # the device where weights are used; None leaves them where they are
    dtype: torch.dtype | None  # dtype to which 16-bit weights are widened; None leaves them
    budget: int  # bytes of dense weights that may be cached
    _solved: dict[Key, dict[str, BlockScaledTensor]] = field(default_factory=dict)
    _dense: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)

    def clear_dense(self) -> None:
        """Frees the dense weights; packed ones stay for the next time that the model is entered."""
        self._dense.clear()

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a weight where the model runs and as it is used there."""
        return tensor.to(self.device, self._dtype_of(tensor))

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype in NARROW else tensor.dtype

    def solved(self, group: str, candidate: Candidate) -> dict[str, BlockScaledTensor]:
        """Returns the codes and scales of a group in a format, solved on first use."""
        key = (group, candidate.name)
        if key in self.solutions:
            return dict(self.solutions[key].weights)
        if key not in self._solved:
            weights = {m.name: self.layers[m.name].original for m in self.groups[group]}
            # Solved on the device of the run in the dtype of the checkpoint, as `quantize` does; kept packed where the
            # original weight is.
            home = next(iter(weights.values())).device
            weights = {name: w.to(self.device, self.stored or w.dtype) for name, w in weights.items()}
            self._solved[key] = {}
            for part in self._parts(weights):
                solved = solve_group(part, {}, candidate.weight_format, get_solver(self.solver))
                self._solved[key] |= {name: weight.to(home) for name, weight in solved.items()}
        return self._solved[key]

    def _parts(self, weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Returns the weights that are solved together: a whole group, but each fused-experts projection apart."""
        stacked = [name for name, weight in weights.items() if weight.dim() == 3]
        return [{name: weights[name]} for name in stacked] if stacked else [weights]

    def dense(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor:
        """Returns the weight `[out, in]` in a format, of expert `index` if it is given."""
        key = (layer.plan.name, candidate.name)
        if key in self._dense:
            return self._dense[key] if index is None else self._dense[key][index]
        # The original in 16 bit needs no room in the cache, unless it is on another device.
        if candidate.weight is None and layer.original.device == (self.device or layer.original.device):
            return layer.original if index is None else layer.original[index]
        if self._fits(layer, self._dtype_of(layer.original)):
            self._dense[key] = self._values(layer, candidate)
            return self.dense(layer, candidate, index)
        return self._values(layer, candidate, index)

    def _restored(self, layer: SwitchableLayer, candidate: Candidate, quantized: BlockScaledTensor) -> torch.Tensor:
        """Returns dense values for the input as the model gives it, a branch included."""
        dense = quantized.to(self.device or quantized.codes.device).dequantize(self._dtype_of(layer.original))
        solution = self.solutions.get((layer.group, candidate.name))
        if solution is not None and layer.plan.name in solution.branches:
            down, up = solution.branches[layer.plan.name]
            dense = torch.addmm(dense, up.to(dense), down.to(dense))
        return dense if solution is None or solution.divisor is None else dense / solution.divisor.to(dense)

    def branch_output(
        self, layer: SwitchableLayer, candidate: Candidate, x: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the branch's output for the rounding error x − x_q, `[..., out]`.

        None without a branch or rounded input.

        `dense` includes B A and is multiplied by x_q, so only (x − x_q) (B A)ᵀ is missing.
        """
        solution = self.solutions.get((layer.group, candidate.name))
        if candidate.activation is None or solution is None or layer.plan.name not in solution.branches:
            return None
        down, up = (part.to(x) for part in solution.branches[layer.plan.name])
        error = x - rounded
        # x and x_q come in the model's units here; A and B were fitted to the input divided by s.
        error = error if solution.divisor is None else error / solution.divisor.to(error)
        return error @ down.t() @ up.t()

    def narrow(self, layer: SwitchableLayer, candidate: Candidate) -> torch.Tensor:
        """Returns the weight for products with small differences: BF16 where that is fast."""
        return self._narrowed(layer, (candidate.name, "narrow"), lambda: self._values(layer, candidate))

    def difference(
        self, layer: SwitchableLayer, candidate: Candidate, present: Candidate, index: int | None = None
    ) -> torch.Tensor | None:
        """Returns the weight in `candidate` minus the weight in `present`, `[out, in]`, as `narrow`.

        None if they are equal.
        """
        # Two candidates with one weight format have equal weights, unless a solver from data fitted each to its inputs.
        solved = {(layer.group, candidate.name), (layer.group, present.name)} & self.solutions.keys()
        if candidate.weight == present.weight and not solved:
            return None
        if index is not None:  # of experts, single matrices are not cached
            return self.dense(layer, candidate, index) - self.dense(layer, present, index)
        return self._narrowed(
            layer,
            (candidate.name, present.name, "difference"),
            lambda: self._values(layer, candidate) - self.dense(layer, present),
        )

    def _values(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor:
        """Returns the values of `dense` without adding them to the cache."""
        dense = self._dense.get((layer.plan.name, candidate.name))
        if dense is not None:
            return dense if index is None else dense[index]
        if candidate.weight is None:
            return self.moved(layer.original if index is None else layer.original[index])
        quantized = self.solved(layer.group, candidate)[layer.plan.name]
        return self._restored(layer, candidate, quantized if index is None else quantized.matrix(index))

    def _narrowed(
        self, layer: SwitchableLayer, form: tuple[str, ...], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        # `form` is a candidate and "narrow", or two candidates and "difference"; both use the budget of dense weights.
        key = (layer.plan.name, *form)
        if key in self._dense:
            return self._dense[key]
        weight = make()
        weight = weight.to(difference_dtype(weight) or weight.dtype)
        if self._fits(layer, weight.dtype):
            self._dense[key] = weight
        return weight

    def _fits(self, layer: SwitchableLayer, dtype: torch.dtype) -> bool:
        """Returns whether the cache has room for one more weight."""
        cached = sum(weight.nbytes for weight in self._dense.values())
        return cached + layer.plan.numel * dtype.itemsize <= self.budget
