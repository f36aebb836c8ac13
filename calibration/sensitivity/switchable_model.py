"""A `SwitchableModel` switches its layers between formats at run time, for scores and measured losses.

While it is entered, each linear of a fusion group is replaced by a `SwitchableLayer`, which holds the original. All of
them share a `FormatChoice`: the choice, and from their first use on the quantized weights in each candidate format. The
next forward pass computes with exactly the codes, scales and rounded inputs of real quantization, because the same
solver makes them. Layers of one group share their input, so it is rounded once for all.

Packed weights of all candidates together take less than the 16-bit model. They are dequantized when used; dense ones
stay while they fit into the budget. For a solver that needs data the weights are solved beforehand
(`group_solutions`). If it divides the input by s, the weight is Q(W s) / s and the input Q(x / s) s, which have the
same product, so that all candidates of a weight can be compared. A branch, which sees the input x unrounded, is used as
x_q (W_q + B A)ᵀ + (x − x_q) (B A)ᵀ, likewise.

Calls of a run may be kept in a `CallCache`: inputs and outputs of all layers, exactly. Later runs on the same tokens
then multiply only the differences, in BF16, which is several times as fast (see `fast_matmul`).

For gradients, a layer is one node of autograd that saves only its input. In the backward pass it shows input and output
gradient to `observe`, so that scores need neither the output nor the graph afterwards. If the inputs of all layers are
too large to keep for it, `recomputed` keeps only the inputs of blocks and runs each block again.

`CachedRun` caches a run in one choice of formats, so that similar choices are cheap to measure. The loss of one group
runs the model once for every format, and all these runs share two things with the first:

    the blocks before the group that differs      they are skipped; the last of them returns its cached output
    most of every activation after it             only the differences are multiplied (`fast_matmul`)

The only approximation is the rounding of *differences* to BF16. A choice that differs everywhere is measured as well,
but no faster than without a baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from quant.calibration.evaluating import prepared
from quant.calibration.fast_matmul import difference_dtype
from quant.calibration.sensitivity.divergence import Divergence, Later
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.table import KEPT, Candidate
from quant.calibration.session import NARROW, Session, free_memory
from quant.calibration.solvers.registry import get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import round_activation, static_input_scale
from quant.calibration.texts.rows import trial_rows
from quant.calibration.walk.collect import collect_input_amax
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.experts import ExpertStack, can_run_experts_one_by_one, experts_forward
from quant.recipes.blocks import Substitute, block_names, find_chains, forwarding, removing, replaced, take_hooks
from quant.recipes.layers import LayerKind, Stacking, expert_matrices, stacking_of_experts
from quant.recipes.plan import LayerPlan

# Bytes of a GPU that stay free for activations and logits; dense weights may take half of the memory above that.
_RESERVE = 16 << 30


@dataclass(frozen=True, eq=False)
class LayerGradient:
    """Input and output gradient of one call of a layer, from a backward pass."""

    x: Tensor  # the input of the layer, `[..., in]`
    gradient: Tensor  # ∂L/∂Y, `[..., out]`
    back: Tensor  # gradient · W with the weight as it is now, `[..., in]`
    index: int | None  # the expert, or None


Observe = Callable[["SwitchableLayer", LayerGradient], None]


@dataclass(frozen=True, eq=False)
class CachedCall:
    """One call of a layer in a cached run."""

    candidate: str
    x: Tensor
    y: Tensor


class CallCache:
    """Calls of all layers in one run, as far as they fit into `budget` bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget  # bytes that may still be added
        self.calls: dict[str, CachedCall] = {}
        self.held: set[int] = set()
        self.writing = True  # whether calls are added; otherwise they are looked up

    def keep(self, name: str, call: CachedCall) -> None:
        """Adds a call unless the budget is used up; layers with the same input share its memory."""
        new = {t.data_ptr(): t.nbytes for t in (call.x, call.y) if t.data_ptr() not in self.held}
        if sum(new.values()) <= self.budget:
            self.budget -= sum(new.values())
            self.held |= new.keys()
            self.calls[name] = call


@dataclass(eq=False)
class FormatChoice:
    """What the layers of a `SwitchableModel` share: the format of each group, and the weights in all formats."""

    groups: Mapping[str, Sequence[LayerPlan]]  # fusion groups by name, quantizable layers only
    candidates: Mapping[str, Candidate]  # formats by name, `keep` among them
    amax: Mapping[str, Tensor]  # largest input magnitude of each layer, for static scales; see `measure_amax`
    solver: str  # rounds the weights; one that needs no data
    stored: torch.dtype | None  # dtype that scales are rounded to, the model's own; None takes the dtype of the weights
    solutions: Mapping[Key, GroupSolution]  # groups in a format that another solver has solved
    device: torch.device | None  # where weights are used; None leaves them where they are
    dtype: torch.dtype | None  # to which 16-bit weights are widened; None leaves them
    budget: int = 2 << 30  # bytes of dense weights that may be cached; a GPU with more free memory raises it
    layers: dict[str, SwitchableLayer] = field(default_factory=dict)  # by name, with the original weights
    choice: dict[str, str] = field(default_factory=dict)  # candidate by group; groups left out are in 16 bit
    observe: Observe | None = None  # called with every layer's gradients in backward passes, see `observed`
    cache: CallCache | None = None  # calls of one run, see `caching`
    # Autograd only visits nodes with an input that needs a gradient. Weights and token ids need none, so every layer
    # takes this empty tensor as a second input.
    anchor: Tensor = field(default_factory=lambda: torch.empty(0, requires_grad=True, dtype=torch.float32))
    _solved: dict[Key, dict[str, BlockScaledTensor]] = field(default_factory=dict)
    _dense: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _rounded: tuple[str, Tensor | None, dict[str, Tensor]] = ("", None, {})
    _input_scales: dict[Key, Tensor | None] = field(default_factory=dict)

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
        self.solutions = {**before, **solutions}
        self._input_scales.clear()
        self.free()
        try:
            yield
        finally:
            self.solutions = before
            self._input_scales.clear()
            self.free()

    def free(self) -> None:
        """Drops dense weights and the rounded input; packed weights stay for the next time."""
        self._dense.clear()
        self.forget_inputs()

    @contextmanager
    def caching(self, cache: CallCache) -> Iterator[None]:
        """Writes calls of layers to `cache`, or takes them from it, while open."""
        with replaced([(self, "cache", cache)]):
            yield

    def round_input(self, group: str, x: Tensor, candidate: Candidate) -> Tensor:
        """Returns the input `x` rounded as a group sees it in a format; kept until another input comes."""
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

    def input_scale(self, group: str, candidate: Candidate) -> Tensor | None:
        """Returns the static scale of a group's inputs; None for formats that measure theirs."""
        key = (group, candidate.name)
        if key in self._input_scales:
            return self._input_scales[key]
        scale = None
        if candidate.activation is not None and candidate.has_static_scale and key in self.solutions:
            scale = self.solutions[key].input_scale
            scale = None if scale is None else scale.to(self.device)
        elif candidate.activation is not None and candidate.has_static_scale:
            # Members of a group share their input, so a serving engine gives them one scale: the largest.
            members = self.groups[group]
            amax = torch.stack([self.amax[member.name] for member in members]).amax().to(self.device)
            stored = self.stored or self.layers[members[0].name].original.dtype
            scale = static_input_scale(amax, candidate.activation, stored)
        self._input_scales[key] = scale
        return scale

    def moved(self, tensor: Tensor) -> Tensor:
        """Returns a weight where the model runs and as it is used there."""
        return tensor.to(self.device, self._dtype_of(tensor))

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
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
            # Together, but each projection of fused experts apart.
            stacked = [name for name, weight in weights.items() if weight.dim() == 3]
            for part in [{name: weights[name]} for name in stacked] if stacked else [weights]:
                format = candidate.format_for(next(iter(part.values())).shape[-1])
                solved = solve_group(part, {}, format, get_solver(self.solver))
                self._solved[key] |= {name: weight.to(home) for name, weight in solved.items()}
        return self._solved[key]

    def dense(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> Tensor:
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

    def branch_output(self, layer: SwitchableLayer, candidate: Candidate, x: Tensor, rounded: Tensor) -> Tensor | None:
        """Returns the branch's output for the rounding error x − x_q, `[..., out]`; None without either.

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

    def narrow(self, layer: SwitchableLayer, candidate: Candidate) -> Tensor:
        """Returns the weight for products with small differences: BF16 where that is fast."""
        return self._narrowed(layer, (candidate.name, "narrow"), lambda: self._values(layer, candidate))

    def difference(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> Tensor:
        """Returns the weight in a format minus the weight in 16 bit, `[out, in]`, as `narrow`."""
        if index is not None:  # of experts, single matrices are not cached
            return self.dense(layer, candidate, index) - self.dense(layer, KEPT, index)
        form = (candidate.name, "difference")
        return self._narrowed(layer, form, lambda: self._values(layer, candidate) - self.dense(layer, KEPT))

    def _values(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> Tensor:
        dense = self._dense.get((layer.plan.name, candidate.name))
        if dense is not None:
            return dense if index is None else dense[index]
        if candidate.weight is None:
            return self.moved(layer.original if index is None else layer.original[index])
        quantized = self.solved(layer.group, candidate)[layer.plan.name]
        quantized = quantized if index is None else quantized.matrix(index)
        # For the input as the model gives it, a branch included.
        dense = quantized.to(self.device or quantized.codes.device).dequantize(self._dtype_of(layer.original))
        solution = self.solutions.get((layer.group, candidate.name))
        if solution is not None and layer.plan.name in solution.branches:
            down, up = solution.branches[layer.plan.name]
            dense = torch.addmm(dense, up.to(dense), down.to(dense))
        return dense if solution is None or solution.divisor is None else dense / solution.divisor.to(dense)

    def _narrowed(self, layer: SwitchableLayer, form: tuple[str, ...], make: Callable[[], Tensor]) -> Tensor:
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
        cached = sum(weight.nbytes for weight in self._dense.values())
        return cached + layer.plan.numel * dtype.itemsize <= self.budget


class SwitchableLayer(Substitute):
    """A linear, or one projection of a fused-experts module, in the format that its model is set to."""

    def __init__(self, formats: FormatChoice, plan: LayerPlan, group: str, weight: Tensor, bias: Any) -> None:
        nn.Module.__init__(self)
        self.formats, self.plan, self.group = formats, plan, group
        # Plain tensors: as parameters they would appear in the state of the model.
        self.original, self.bias = weight.detach(), None if bias is None else bias.detach()

    def forward(self, input: Tensor, index: int | None = None) -> Tensor:
        """Maps `[..., in]` to `[..., out]`; `index` is the expert's."""
        if torch.is_grad_enabled():
            return _Probe.apply(input, self.formats.anchor, self, index)  # type: ignore[no-untyped-call]
        return self.compute(input, index)

    def compute(self, x: Tensor, index: int | None) -> Tensor:
        """Returns the output in the present format."""
        formats = self.formats
        candidate = formats.current(self.group)
        unrounded, x = x, formats.round_input(self.group, x, candidate)
        branch = formats.branch_output(self, candidate, unrounded, x)
        # The number of tokens of an expert differs from run to run, and a branch needs the unrounded input, which a
        # cached call does not hold.
        cache = formats.cache if index is None and branch is None else None
        if cache is not None and not cache.writing:
            cached = cache.calls.get(self.plan.name)
            if cached is not None and cached.candidate == candidate.name and cached.x.shape == x.shape:
                # y' = y + (x' − x) Wᵀ: rounding to BF16 is relative to the difference, not to the output.
                weight = formats.narrow(self, candidate)
                return cached.y + linear((x - cached.x).to(weight.dtype), weight).to(x.dtype)
        y = linear(x, formats.dense(self, candidate, index).to(x.dtype), self.bias)
        y = y if branch is None else y + branch
        if cache is not None and cache.writing:
            cache.keep(self.plan.name, CachedCall(candidate.name, x, y))
        return y


class SwitchableExperts(SwitchableLayer, ExpertStack):
    """One projection of all experts; `stacking` describes its layout in the parameter."""

    def __init__(self, formats: FormatChoice, plan: LayerPlan, group: str, weight: Tensor, stacking: Stacking) -> None:
        super().__init__(formats, plan, group, weight, None)
        self.stacking = stacking

    def dense(self, index: int) -> Tensor:
        """Returns the values `[out, in]` of one expert in the present format."""
        return self.formats.dense(self, self.formats.current(self.group), index)

    def forward(self, input: Tensor, index: int | None = None) -> Tensor:
        """Maps `[tokens, in]` to `[tokens, out]`, in the order of the parameter's rows."""
        return self.stacking.outputs(super().forward(input, index))


class _Probe(torch.autograd.Function):
    """y = layer(x), with a backward that shows x and dL/dy to the model's observer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: SwitchableLayer, index: int | None) -> Tensor:
        # Only x: the weight is dequantized again in the backward pass, or comes from the cache of dense weights.
        ctx.save_for_backward(x)
        ctx.layer, ctx.index = layer, index
        return layer.compute(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,), layer = ctx.saved_tensors, ctx.layer
        (gradient,) = gradients
        weight = layer.formats.dense(layer, layer.formats.current(layer.group), ctx.index)
        # ∂L/∂x = ∂L/∂Y · W. No gradient of a weight is computed: nothing is trained.
        back = gradient @ weight.to(gradient.dtype)
        if layer.formats.observe is not None:
            layer.formats.observe(layer, LayerGradient(x, gradient, back, ctx.index))
        return back if ctx.needs_input_grad[0] else None, None, None, None


def same_tensor(a: Tensor | None, b: Tensor) -> bool:
    """Returns whether two tensors share memory and shape: in a recomputed block every use of one is another object."""
    return a is b or (a is not None and a.data_ptr() == b.data_ptr() and a.shape == b.shape)


class SwitchableModel:
    """A model whose layers can be switched between formats at run time; see the module docstring.

    It is changed while this is entered, and restored afterwards.
    """

    def __init__(
        self, model: nn.Module, groups: Mapping[str, Sequence[LayerPlan]], candidates: Mapping[str, Candidate],
        amax: Mapping[str, Tensor], solver: str = "rtn", stored: torch.dtype | None = None,
        solutions: Mapping[Key, GroupSolution] | None = None, session: Session | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.model, self.groups, self.session, self.dtype = model, groups, session or Session(), dtype
        self.formats = FormatChoice(
            groups, {**candidates, KEPT.name: KEPT}, amax, solver, stored, solutions or {}, self.session.device, dtype
        )
        self.blocks: list[str] = []  # repeated blocks, found while their linear layers are still in place
        self._undo: list[Callable[[], None]] = []

    @property
    def layers(self) -> dict[str, SwitchableLayer]:
        """The switchable layers by name, while this is entered."""
        return self.formats.layers

    def __enter__(self) -> SwitchableModel:
        self.blocks = block_names(self.model)
        device, formats = self.session.device, self.formats
        if device is not None and device.type == "cuda":
            formats.budget = max(formats.budget, (free_memory(device) - _RESERVE) // 2)
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
                    self._replace_parameter(parent, last, SwitchableExperts(formats, layer, group, weight, stacking))
                    experts.add(parent)
                else:
                    bias = None if original.bias is None else formats.moved(original.bias)
                    new = SwitchableLayer(formats, layer, group, original.weight, bias)
                    new.read_from(original)
                    take_hooks(new, original)
                    new.train(original.training)
                    self._undo.append(partial(setattr, parent, last, original))
                    setattr(parent, last, new)
                formats.layers[layer.name] = self.model.get_submodule(layer.name)  # type: ignore[assignment]
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
        self.formats.layers.clear()
        self.formats.free()

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


@contextmanager
def recomputed(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Makes backward passes run the blocks `names` again instead of keeping their inner activations, while open."""
    with ExitStack() as stack:
        for block in map(model.get_submodule, names):
            # Reentrant checkpoints would need an input that requires a gradient, which hidden states here do not.
            stack.enter_context(forwarding(block, partial(checkpoint, block.forward, use_reentrant=False)))
        yield


def measure_amax(
    model: nn.Module,
    groups: Mapping[str, Sequence[LayerPlan]],
    candidates: Mapping[str, Candidate],
    rows: Tensor,
    session: Session,
) -> dict[str, Tensor]:
    """Returns the largest input magnitude of each layer; empty if no candidate needs it."""
    if not any(candidate.has_static_scale for candidate in candidates.values()):
        return {}
    names = [layer.name for members in groups.values() for layer in members]
    with prepared(model, None):
        return collect_input_amax(model, names, rows, session)


# Rows run together up to this many tokens.
_BATCH_TOKENS = 4096
# Bytes of activations and of distributions that are cached, by type of device. Logits of a GPU take another share of
# the memory above a reserve: 4.3 GB for 4096 tokens of a vocabulary of 262,144, in which a search measures 500 times.
_ACTIVATIONS = {"cpu": 2 << 30, "cuda": 2 << 30}
_DISTRIBUTIONS = {"cpu": 1 << 30}
_LOGITS_SHARE, _RESERVE = 0.25, 16 << 30


class CachedRun:
    """Measures the mean divergence of choices on one text, int64 `[rows, seqlen]`; `by_row` runs rows one by one."""

    def __init__(
        self, switchable: SwitchableModel, divergence: Divergence, rows: Tensor, *, by_row: bool = False
    ) -> None:
        self.switchable, self.divergence, self.rows = switchable, divergence, rows
        self.by_row = by_row
        self.batch_rows = 1 if by_row else max(_BATCH_TOKENS // rows.shape[1], 1)
        self.batches = rows.split(self.batch_rows)
        # The names of the model's blocks if they form a single chain, else none.
        self.chain: list[str] = []
        if switchable.blocks:
            few = trial_rows(rows)
            chains = find_chains(switchable.model, switchable.blocks, lambda: switchable.model(few))
            self.chain = chains[0] if len(chains) == 1 else []
        # Number of the block of each group; groups outside the chain count as the first block, so no block is skipped.
        self.block_index = {
            group: next((i for i, block in enumerate(self.chain) if group.startswith(f"{block}.")), 0)
            for group in switchable.groups
        }
        self.choice: dict[str, str] | None = None
        self.outputs: list[list[Any]] = []  # of each block of the chain, by batch
        self.caches: list[CallCache] = []
        self.references: list[Any] = []

    def start(self, choice: Mapping[str, str]) -> float:
        """Measures `choice` with a whole run, and caches that run."""
        self._remember_references()
        self.choice, self.outputs, self.caches = dict(choice), [], []
        self.switchable.formats.set(choice)
        budget = _ACTIVATIONS.get(self.rows.device.type, _ACTIVATIONS["cpu"])
        total = 0.0
        for i in range(len(self.batches)):
            # An equal share for each batch, so that the first ones do not use up the budget.
            cache = CallCache(budget // len(self.batches))
            with self.switchable.formats.caching(cache), self._collected() as outputs:
                total += self._start(i)()
            cache.writing = False
            self.outputs.append(outputs)
            self.caches.append(cache)
        return self._mean(total)

    @property
    def is_queued(self) -> bool:
        """Whether the device works on its own, so that `start_loss` returns before the loss is known."""
        return self.rows.device.type == "cuda"

    def loss(self, choice: Mapping[str, str]) -> float:
        """Measures `choice` from the first block that differs from the cached run; without one, with a whole run."""
        return self.start_loss(choice)()

    def start_loss(self, choice: Mapping[str, str]) -> Later:
        """Starts `loss`; the function that is returned waits for it. Another choice can be started before."""
        self._remember_references()
        self.switchable.formats.set(choice)
        if self.choice is None:
            return self._start_mean([self._start(i) for i in range(len(self.batches))])
        changed = [g for g in self.block_index if choice.get(g) != self.choice.get(g)]
        # Everything before the first changed block is exactly as in the cached run.
        first = min((self.block_index[g] for g in changed), default=0)
        sums = []
        for i in range(len(self.batches)):
            with self.switchable.formats.caching(self.caches[i]), self._skipped(first, self.outputs[i]):
                sums.append(self._start(i))
        return self._start_mean(sums)

    def loss_of(self, divergence: Divergence) -> float:
        """Returns the mean divergence of another model, which `divergence` runs, from the original of this one."""
        return self._mean(sum(self._start(i, divergence)() for i in range(len(self.batches))))

    def losses(self, choice: Mapping[str, str]) -> list[float]:
        """Returns the mean divergence of each batch in `choice`, with a whole run."""
        self._remember_references()
        self.switchable.formats.set(choice)
        losses = self.losses_of(self.divergence)
        self.switchable.formats.forget_inputs()
        return losses

    def losses_of(self, divergence: Divergence) -> list[float]:
        """Returns the mean divergence on each batch of another model, which `divergence` runs."""
        sums = [self._start(i, divergence)() for i in range(len(self.batches))]
        return [max(s, 0.0) / self.divergence.count(batch) for s, batch in zip(sums, self.batches, strict=True)]

    def _start(self, i: int, divergence: Divergence | None = None) -> Later:
        return (divergence or self.divergence).measure(self.batches[i], self.references[i], i * self.batch_rows)

    def _mean(self, total: float) -> float:
        self.switchable.formats.forget_inputs()
        # Rounding may make a distance of zero slightly negative.
        return max(total, 0.0) / self.divergence.count(self.rows)

    def _start_mean(self, sums: Sequence[Later]) -> Later:
        """Returns a function that waits for the sums of all batches, and returns their mean."""
        self.switchable.formats.forget_inputs()
        return lambda: self._mean(sum(wait() for wait in sums))

    def _remember_references(self) -> None:
        if self.references:
            return
        # Distributions of all positions in FP32, computed once if they fit, else again in every measurement.
        vocabulary = getattr(getattr(self.switchable.model, "config", None), "vocab_size", 0)
        room = _DISTRIBUTIONS.get(self.rows.device.type, _DISTRIBUTIONS["cpu"])
        if self.is_queued:
            # Rows that run one by one are measured once or twice.
            room = 0 if self.by_row else int(_LOGITS_SHARE * (free_memory(self.rows.device) - _RESERVE))
        keep = 4 * self.rows.numel() * vocabulary <= room
        self.switchable.formats.set({})
        self.references = [self.divergence.reference(batch, keep=keep) for batch in self.batches]

    @contextmanager
    def _collected(self) -> Iterator[list[Any]]:
        """Collects the outputs of the chain's blocks, in their order."""
        outputs: list[Any] = []
        blocks = [self.switchable.model.get_submodule(name) for name in self.chain]
        with removing(block.register_forward_hook(lambda module, args, out: outputs.append(out)) for block in blocks):
            yield outputs

    @contextmanager
    def _skipped(self, first: int, outputs: list[Any]) -> Iterator[None]:
        """Makes blocks of the chain before number `first` return `outputs` instead of computing them, while open."""
        with ExitStack() as stack:
            for name, output in zip(self.chain[:first], outputs, strict=False):
                constant = partial(lambda result, *args, **kwargs: result, output)
                stack.enter_context(forwarding(self.switchable.model.get_submodule(name), constant))
            yield
