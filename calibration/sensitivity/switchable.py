"""A model whose layers change format at a word: what scores and the closed loop measure with.

Within a `Trial`, each linear of a fusion group is replaced by one that holds the original and, once asked for, its
quantized form in every candidate format. `set` chooses; the next forward pass computes with exactly the codes,
scales and rounded inputs that quantizing for real would give, because the same solver makes them.

Quantized forms are kept packed (all candidates together take less than the 16-bit model) and dequantized when used;
dense ones stay while they fit in a budget. Layers of one group share their input, so it is rounded once for all.
For a solver that works from data the forms are made beforehand (`calibration.alone`); one whose input is divided by s
is used as Q(x / s) s and Q(W s) / s, which is the same product, so that all forms of a weight can be compared.

A run may be remembered (`remembering`): inputs and outputs of all layers, exactly. Later runs on the same tokens then
multiply only what has changed since, in BF16, which is several times as fast (see `calibration.fast_products`).

For gradients, a layer is one node of autograd that saves its input and nothing else. In the backward pass it shows
input and output gradient to `observe`, so that scores need neither the output nor the graph afterwards. Where even
the inputs of all layers are too much, `recomputed` keeps those of blocks and runs each block again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from quant.calibration.blocks import block_names
from quant.calibration.cpu_bf16 import fast_dtype
from quant.calibration.sensitivity.candidates import KEPT, Candidate
from quant.calibration.sensitivity.solved_groups import Form, Key
from quant.calibration.solvers.group import solve_group
from quant.calibration.solvers.solver import get_pipeline, get_solver
from quant.calibration.statistics import static_input_scale
from quant.calibration.walk.collect import collect_input_amax
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.linear.modules import QuantExperts, experts_forward
from quant.recipes.plan import LayerPlan


@dataclass(frozen=True, eq=False)
class Seen:
    """What a backward pass shows of one call of a layer.

    Attributes:
        x: its input, `[..., in]`.
        gradient: ∂L/∂Y, `[..., out]`.
        back: gradient · W with the weight as it is now, `[..., in]`.
        index: the expert, or None.
    """

    x: torch.Tensor
    gradient: torch.Tensor
    back: torch.Tensor
    index: int | None


Observe = Callable[["TrialLayer", Seen], None]


@dataclass(frozen=True, eq=False)
class Known:
    """One call of a layer in a run that is remembered.

    Attributes:
        candidate: the layer's format then.
        x: its input, rounded.
        y: its output.
    """

    candidate: str
    x: torch.Tensor
    y: torch.Tensor


class Memory:
    """Calls of all layers in one run, as far as they fit.

    Attributes:
        budget: bytes that may still be kept.
        writing: whether calls are kept; otherwise they are looked up.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.calls: dict[str, Known] = {}
        self.held: set[int] = set()
        self.writing = True

    def keep(self, name: str, call: Known) -> None:
        """Remembers a call unless the budget is used up; layers with one input share it."""
        new = {t.data_ptr(): t.nbytes for t in (call.x, call.y) if t.data_ptr() not in self.held}
        if sum(new.values()) <= self.budget:
            self.budget -= sum(new.values())
            self.held |= new.keys()
            self.calls[name] = call


class TrialLayer(nn.Module):
    """A linear, or one projection of a fused-experts module, in whatever format its trial says."""

    trial: Trial
    original: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, trial: Trial, plan: LayerPlan, group: str, weight: torch.Tensor, bias: Any) -> None:
        nn.Module.__init__(self)
        self.plan, self.group = plan, group
        object.__setattr__(self, "trial", trial)  # no submodule
        object.__setattr__(self, "original", weight)
        object.__setattr__(self, "bias", bias)

    def forward(self, x: torch.Tensor, index: int | None = None) -> torch.Tensor:
        """`[..., in]` to `[..., out]`; `index` is the expert's."""
        if torch.is_grad_enabled():
            return _Probe.apply(x, self.trial.anchor, self, index)  # type: ignore[no-any-return, no-untyped-call]
        return self.compute(x, index)

    def compute(self, x: torch.Tensor, index: int | None) -> torch.Tensor:
        """The output in the present format."""
        trial = self.trial
        candidate = trial.current(self.group)
        x = trial.round_input(self.group, x, candidate)
        memory = trial.memory if index is None else None  # how many tokens an expert gets differs from run to run
        if memory is not None and not memory.writing:
            known = memory.calls.get(self.plan.name)
            if known is not None and known.candidate == candidate.name and known.x.shape == x.shape:
                weight = trial.narrow(self, candidate)
                return known.y + linear((x - known.x).to(weight.dtype), weight).to(x.dtype)
        y = linear(x, trial.dense(self, candidate, index).to(x.dtype), self.bias)
        if memory is not None and memory.writing:
            memory.keep(self.plan.name, Known(candidate.name, x, y))
        return y


class _TrialExperts(TrialLayer, QuantExperts):
    """`experts_forward` calls modules of this class by expert; nothing else of `QuantExperts` is used."""


class _Probe(torch.autograd.Function):
    """y = layer(x), with a backward that shows x and dL/dy to the trial's observer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, layer: TrialLayer, index: int | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.index = layer, index
        return layer.compute(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        (gradient,) = gradients
        weight = layer.trial.dense(layer, layer.trial.current(layer.group), ctx.index)
        back = gradient @ weight.to(gradient.dtype)
        if layer.trial.observe is not None:
            layer.trial.observe(layer, Seen(x, gradient, back, ctx.index))
        return back if ctx.needs_input_grad[0] else None, None, None, None


@dataclass(eq=False)
class Trial:
    """See the module docstring.

    Attributes:
        model: changed while the trial is entered, as before afterwards.
        groups: fusion groups by name, quantizable layers only.
        candidates: formats by name; `keep` is always there.
        amax: largest input magnitude of each layer, for static scales; see `measure_amax`.
        solver: rounds the weights; one that needs no data.
        forms: what groups are in a format where another solver has made them, as `solve_alone` gives it.
        stored: dtype that scales are rounded to, the model's own; None takes that of the weights.
        budget: bytes of dense weights that are kept.
        blocks: names of the model's repeated blocks, found while their linears can still be seen.
    """

    model: nn.Module
    groups: Mapping[str, Sequence[LayerPlan]]
    candidates: Mapping[str, Candidate]
    amax: Mapping[str, torch.Tensor]
    solver: str = "rtn"
    stored: torch.dtype | None = None
    forms: Mapping[Key, Form] = field(default_factory=dict)
    budget: int = 2 << 30
    blocks: list[str] = field(default_factory=list)
    layers: dict[str, TrialLayer] = field(default_factory=dict)
    observe: Observe | None = None
    memory: Memory | None = None
    choice: dict[str, str] = field(default_factory=dict)
    _solved: dict[tuple[str, str], dict[str, BlockScaledTensor]] = field(default_factory=dict)
    _dense: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)
    _rounded: tuple[str, torch.Tensor | None, dict[str, torch.Tensor]] = ("", None, {})
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if get_pipeline(self.solver).needs_data:
            raise ValueError(f"solver {self.solver!r} needs data; a trial takes one that does not, such as 'mse'")
        self.candidates = {**self.candidates, KEPT.name: KEPT}
        self.anchor = torch.empty(0, requires_grad=True)

    def __enter__(self) -> Trial:
        self.blocks = block_names(self.model)
        experts: set[nn.Module] = set()
        for group, members in self.groups.items():
            for layer in members:
                parent_name, _, last = layer.name.rpartition(".")
                parent = self.model.get_submodule(parent_name)
                original = getattr(parent, last)
                if layer.kind == "experts":
                    self._replace_parameter(parent, last, _TrialExperts(self, layer, group, original.detach(), None))
                    experts.add(parent)
                else:
                    trial = TrialLayer(self, layer, group, original.weight.detach(), _detached(original.bias))
                    trial.train(original.training)
                    self._undo.append(partial(setattr, parent, last, original))
                    setattr(parent, last, trial)
                self.layers[layer.name] = self.model.get_submodule(layer.name)  # type: ignore[assignment]
        for module in experts:
            module.forward = partial(experts_forward, module)
            self._undo.append(partial(delattr, module, "forward"))
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
        self._dense.clear()

    def set(self, choice: Mapping[str, str]) -> None:
        """Chooses a candidate by name for each group that is named; groups left out are in 16 bit."""
        self.choice = dict(choice)

    def current(self, group: str) -> Candidate:
        """The candidate that is chosen for a group."""
        return self.candidates[self.choice.get(group, KEPT.name)]

    def solved(self, group: str, candidate: Candidate) -> dict[str, BlockScaledTensor]:
        """Codes and scales of a group in a format, solved when first asked for."""
        key = (group, candidate.name)
        if key in self.forms:
            return dict(self.forms[key].weights)
        if key not in self._solved:
            assert candidate.weight is not None
            weights = {m.name: self.layers[m.name].original for m in self.groups[group]}
            weights = {name: w.to(self.stored or w.dtype) for name, w in weights.items()}
            self._solved[key] = {}
            for part in self._parts(weights):
                self._solved[key] |= solve_group(part, {}, candidate.weight, get_solver(self.solver))
        return self._solved[key]

    def _parts(self, weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """What is solved together: a group, but each fused-experts projection apart."""
        stacked = [name for name, weight in weights.items() if weight.dim() == 3]
        return [{name: weights[name]} for name in stacked] if stacked else [weights]

    def dense(self, layer: TrialLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor:
        """The weight `[out, in]` in a format, of one expert where `index` says."""
        if candidate.weight is None:
            return layer.original if index is None else layer.original[index]
        key = (layer.plan.name, candidate.name)
        if key in self._dense:
            return self._dense[key] if index is None else self._dense[key][index]
        quantized = self.solved(layer.group, candidate)[layer.plan.name]
        if self._fits(layer, layer.original.dtype):
            self._dense[key] = self._restored(layer, candidate, quantized)
            return self.dense(layer, candidate, index)
        return self._restored(layer, candidate, quantized if index is None else quantized.matrix(index))

    def _restored(self, layer: TrialLayer, candidate: Candidate, quantized: BlockScaledTensor) -> torch.Tensor:
        """Dense values for the input as the model gives it."""
        dense = quantized.dequantize(layer.original.dtype)
        form = self.forms.get((layer.group, candidate.name))
        return dense if form is None or form.divisor is None else dense / form.divisor.to(dense.dtype)

    def narrow(self, layer: TrialLayer, candidate: Candidate) -> torch.Tensor:
        """The weight for products with small differences: BF16 where that is fast."""
        return self._narrowed(layer, (candidate.name, "narrow"), lambda: self._values(layer, candidate))

    def change(self, layer: TrialLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor | None:
        """What `candidate` would add to the weight as it is now, `[out, in]`, as `narrow`; None for nothing."""
        now = self.current(layer.group)
        if candidate.weight == now.weight:
            return None
        if index is not None:
            return self.dense(layer, candidate, index) - self.dense(layer, now, index)
        return self._narrowed(
            layer, (candidate.name, now.name, "change"), lambda: self._values(layer, candidate) - self.dense(layer, now)
        )

    def _values(self, layer: TrialLayer, candidate: Candidate) -> torch.Tensor:
        """As `dense`, not kept."""
        if candidate.weight is None:
            return layer.original
        kept = self._dense.get((layer.plan.name, candidate.name))
        if kept is not None:
            return kept
        return self._restored(layer, candidate, self.solved(layer.group, candidate)[layer.plan.name])

    def _narrowed(self, layer: TrialLayer, what: tuple[str, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        key = (layer.plan.name, *what)
        if key in self._dense:
            return self._dense[key]
        weight = make()
        weight = weight.to(fast_dtype(weight) or weight.dtype)
        if self._fits(layer, weight.dtype):
            self._dense[key] = weight
        return weight

    def _fits(self, layer: TrialLayer, dtype: torch.dtype) -> bool:
        """Whether one more weight may be kept."""
        held = sum(weight.nbytes for weight in self._dense.values())
        return held + layer.plan.numel * dtype.itemsize <= self.budget

    @contextmanager
    def remembering(self, memory: Memory) -> Iterator[None]:
        """Within it, calls of layers are written to `memory`, or taken from it."""
        self.memory = memory
        try:
            yield
        finally:
            self.memory = None

    def round_input(self, group: str, x: torch.Tensor, candidate: Candidate) -> torch.Tensor:
        """`x` as a group sees it in a format; kept until another input comes."""
        if candidate.activation is None:
            return x
        if self._rounded[0] != group or not same_tensor(self._rounded[1], x):
            self._rounded = (group, x, {})
        by_name = self._rounded[2]
        if candidate.name not in by_name:
            form = self.forms.get((group, candidate.name))
            divisor = None if form is None or form.divisor is None else form.divisor.to(x.dtype)
            divided = x.detach() if divisor is None else x.detach() / divisor
            rounded = round_activation(divided, candidate.activation, self.input_scale(group, candidate))
            by_name[candidate.name] = rounded if divisor is None else rounded * divisor
        return by_name[candidate.name]

    def forget_inputs(self) -> None:
        """Drops the rounded input of the call before."""
        self._rounded = ("", None, {})

    def input_scale(self, group: str, candidate: Candidate) -> torch.Tensor | None:
        """Static scale of a group's inputs; None for formats that measure theirs."""
        if not candidate.has_static_scale:
            return None
        if (group, candidate.name) in self.forms:
            return self.forms[group, candidate.name].input_scale
        assert candidate.activation is not None
        members = self.groups[group]
        amax = torch.stack([self.amax[member.name] for member in members]).amax()
        weight = self.layers[members[0].name].original
        return static_input_scale(amax, candidate.activation, self.stored or weight.dtype)


def same_tensor(a: torch.Tensor | None, b: torch.Tensor) -> bool:
    """Whether two tensors are the same memory: recomputing a block hands out one object for each use of a tensor."""
    return a is b or (a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape)


@contextmanager
def recomputed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Within it, backward passes run the blocks `names` again instead of remembering what happened inside them."""
    blocks = [model.get_submodule(name) for name in names]
    for block in blocks:
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
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """What `Trial.amax` takes: nothing where no candidate has static scales."""
    if not any(candidate.has_static_scale for candidate in candidates.values()):
        return {}
    names = [layer.name for members in groups.values() for layer in members]
    return collect_input_amax(model, names, rows, progress)


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()
