"""A `Block` is one block of the model while it is quantized: its calls, its groups, and the layers solved so far.

The stages of the walk read and fill it; `walk` says in which order. Until the block is finished, a `StandIn`
takes the place of each solved layer, so that the groups after it get the inputs that the quantized layers before them
give.

A `Group` is a fusion group while its block is worked on: its inputs, and how they are scaled and rounded.

All members of a group read one input, so statistics, input scale, rotation and static scale belong to the group, and
the members' weights are solved as one tall matrix where the format allows it.

`FusedExperts` solves fused experts, one after the other, each on the tokens that reach it. A projection is one
parameter for all experts. A router sends each expert different tokens, so each has a second moment of its own. One pass
over the block keeps the inputs of the experts module; an expert's inputs are computed from them when it is its turn,
with its quantized projections before in place. So besides the codes, which `Scratch` may take, a few second moments and
one expert are in memory, whatever the number of experts, which may be in their files until then. Where only the
modeling code knows the inputs of experts, the block runs once for each projection with `WatchedExperts`.

An expert that no calibration token reached gets the pooled statistics of the others, and the plan says so.

Scaling, rotation and branches belong to linear layers, because no runtime applies them expert by expert. Where a
solver's name has such parts, experts get only its rounding, and the plan says that too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibration.fast_matmul import PairedWeight, fast_matmul, multiplies_pairs, paired_linears
from quant.calibration.outputs.gradients import OutputMoments
from quant.calibration.outputs.stream import Stream
from quant.calibration.ranks import Exchange, gathered, number_of, rank_and_world
from quant.calibration.session import DeviceCopies
from quant.calibration.solvers.interfaces import sampled
from quant.calibration.solvers.registry import Pipeline, get_pipeline
from quant.calibration.solvers.rotation import matrix_of
from quant.calibration.solvers.solve_group import all_solved, solve_matrices
from quant.calibration.statistics import LayerStats, round_activation
from quant.calibration.walk.block_memory import IN_MEMORY, Scratch
from quant.calibration.walk.collect import InputNotFiniteError, put_back, watch_experts
from quant.calibration.walk.shared_moments import Moments, pooled, slices_that_fit, stats_of
from quant.formats.format import Format
from quant.formats.scaling import nonzero
from quant.formats.tensor import BlockScaledTensor, moved
from quant.kernels.linear.experts import QuantExperts, can_run_experts_one_by_one, experts_forward, tokens_by_expert
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.blocks import Call, Stop, Substitute, all_arguments, forwarding, has_hooks, removing, take_hooks
from quant.recipes.layers import expert_matrices, stacking_of
from quant.recipes.plan import Guard, LayerPlan, groups_of


@dataclass(frozen=True, eq=False)
class Solved:
    """The solution of one layer."""

    weight: BlockScaledTensor  # codes and scales of [out, in], or of [experts, out, in]
    parts: RunTimeParts  # the operations of the layer at run time besides its matmul; `weight` is rotated already
    input_scale: Tensor | None  # static scale of the activation format, float32 scalar, where it has one
    tokens: int  # how many calibration tokens reached the layer; 0 where its siblings' pooled statistics were used
    notes: tuple[str, ...] = ()  # sentences for the report


@dataclass(frozen=True)
class Settings:
    """Settings of the walk."""

    batch: int = 4  # calibration rows in one forward pass
    row_bounds: tuple[tuple[int, int], ...] = ()  # of each batch of all ranks, which the walk fills in
    # The dtype of the forward passes; None takes the model's, or float32 where that is narrower: rounding of hidden
    # states to 16 bit, block after block, would look like an error of the weights.
    dtype: torch.dtype | None = None
    observer: str = "absmax"  # key of `OBSERVERS`: how static input scales are chosen
    guard: Guard | None = None  # when a layer gets another format; None for never
    # Makes the model run solved experts, for layers outside of blocks that follow them.
    run_experts: Callable[[nn.Module], Any] = lambda model: None

    def dtype_for(self, stored: torch.dtype) -> torch.dtype:
        """Returns the dtype of the forward passes of a model that is stored in `stored`."""
        return self.dtype or (torch.float32 if stored.itemsize < 4 else stored)


@dataclass(eq=False)
class Group:
    """A fusion group within one block, and the statistics of its input."""

    members: list[LayerPlan]  # the planned layers; the guard may change their formats
    names: list[str]  # the names of the members within the block
    pipeline: Pipeline  # their solver
    inputs: list[Tensor] = field(default_factory=list)  # original inputs by batch of this rank, [tokens, in]
    batch_numbers: list[int] = field(default_factory=list)  # the numbers of `inputs`, among the batches of all ranks
    # The number, largest magnitudes and sums of magnitudes of each batch, until they are pooled.
    magnitudes: list[tuple[int, list[Tensor]]] = field(default_factory=list)
    calls: int = 0  # how often the group is called in one pass of the block
    tokens: int = 0  # how many reached it in the original model
    total: Tensor | None = None  # sum of magnitudes by channel, [in]
    amax: Tensor | None = None  # largest magnitude by channel, [in]
    # The scale that the input is divided by, [in], at run time or by the module before.
    divisor: Tensor | None = None
    parts: RunTimeParts = field(default_factory=RunTimeParts)  # see `Solved`; branches are the members' own
    input_scale: Tensor | None = None
    # Second moment of the gradients at the members' outputs, one after the other, where it was measured.
    outputs: LayerStats | None = None
    # Weights of the tokens of each batch of this rank, [tokens], where gradients were measured.
    token_weights: list[Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # notes for the plan

    @property
    def weight_format(self) -> Format:
        """Of all members."""
        return self.members[0].weight_format

    @property
    def activation(self) -> Format | None:
        """Of the input."""
        return self.members[0].activation

    @property
    def pattern(self) -> str:
        """The same for the same layer of sibling experts: names with their numbers left out, and the input size."""
        # experts.3.up_proj and experts.7.up_proj are siblings: experts.#.up_proj.
        return re.sub(r"\d+", "#", "|".join(self.names)) + f":{self.members[0].shape[-1]}"

    def inputs_of_all_ranks(self, every: int = 1) -> Iterator[Tensor]:
        """Yields every `every`-th token of the inputs that all ranks have kept, batch by batch; see `sampled`."""
        assert self.amax is not None
        own = [(n, [sampled(x, every, n)]) for n, x in zip(self.batch_numbers, self.inputs, strict=True)]
        for _, (x,) in Exchange(self.amax.device).in_order(own):
            yield x

    def scaled(self, x: Tensor) -> Tensor:
        """Returns an input of the original model, `[tokens, in]`, scaled and rotated as the quantized one is."""
        x = x if self.divisor is None else x / self.divisor.to(x)
        return RunTimeParts(hadamard=self.parts.hadamard).input(x)

    def round_input(self, x: Tensor) -> Tensor:
        """Returns the input as the quantized layer sees it, `[tokens, in]`, or wider by its residual channels."""
        x = self.parts.widened(self.parts.input(x), self.activation, self.input_scale)
        return round_activation(x, self.activation, self.input_scale)


def gather(members: Sequence[LayerPlan], prefix: str) -> list[Group]:
    """Returns linear layers by fusion group; names within the block leave `prefix` out."""
    return [
        Group(group, [layer.name.removeprefix(prefix) for layer in group], get_pipeline(group[0].solver))
        for group in groups_of(members).values()
    ]


@dataclass(eq=False)
class CurrentBatch:
    """The batch of calibration rows that runs through the block, for hooks and modules that it calls."""

    index: int = 0  # among the batches of this rank

    @property
    def number(self) -> int:
        """Its number among the batches of all ranks."""
        return number_of(self.index)


class StandIn(Substitute):
    """A solved layer while its block is being worked on: dense weights, and a memory of its outputs by batch.

    The passes over a block repeat each other's beginnings, so that it need not compute them again.
    """

    def __init__(
        self, original: nn.Module, dense: Tensor, group: Group, batch: CurrentBatch, parts: RunTimeParts
    ) -> None:
        super().__init__()
        self.original, self.dense, self.group = original, dense, group
        self.paired: PairedWeight | None = None  # the same values for products on a GPU
        self.batch, self.parts = batch, parts
        take_hooks(self, original)
        # One that is called several times in a pass would have to remember all of its outputs, and a hook may change
        # an output in place.
        self.keeps = group.calls == 1 and not has_hooks(original)
        self.outputs: dict[int, Tensor] = {}
        self.read_from(original)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the layer, `[out]`, corrected for rounding where that was done; None where it has none."""
        return getattr(self.original, "bias", None)

    @property
    def weight(self) -> Tensor:
        """The matrix `[out, in]` that the input is multiplied by, for modeling code that reads it or its dtype."""
        return matrix_of(self.dense, self.parts)

    def product(self, x: Tensor) -> Tensor:
        """Returns the output without its bias."""
        # The low-rank branch below reads the input unrounded, as kernels do at run time.
        rounded = self.group.round_input(x)
        if self.paired is not None and multiplies_pairs(rounded):
            out = self.paired.linear(rounded, unit=self.group.input_scale)
        else:
            out = nn.functional.linear(rounded, self.dense)
        branch = self.parts.branch(self.parts.input(x)) if self.parts.lowrank else None
        return out if branch is None else out + branch

    def forward(self, input: Tensor) -> Tensor:
        index = self.batch.index
        if index in self.outputs:
            return self.outputs[index] if self.keeps else self.outputs.pop(index)
        out = self.product(input)
        out = out if self.bias is None else out + self.bias
        if self.keeps:
            self.outputs[index] = out
        return out


def weight_of(block: nn.Module, name: str) -> Tensor:
    """Returns the weight of the module called `name`."""
    weight = block.get_submodule(name).weight
    assert isinstance(weight, Tensor)
    return weight


Run = Callable[[], Any]
StreamError = Callable[[str, int], Tensor | None]
"""Gives the error of the residual stream at a module in a batch that runs, `[tokens, hidden]`; see `Stream.error`."""
See = Callable[[int, int, Tensor], None]
"""Called with the index of a batch of this rank, the number of an expert, and its input `[tokens, in]`."""


class FusedExperts:
    """The projections of one experts module, in the order in which tokens pass them, from original to quantized.

    Second moments of gradients at the projections' outputs are removed from `outputs`.
    """

    def __init__(
        self, block: nn.Module, path: str, members: Sequence[LayerPlan], batch: CurrentBatch,
        input_scales: Mapping[str, Tensor], scratch: Scratch, stored: torch.dtype, outputs: OutputMoments | None = None,
    ) -> None:  # fmt: skip
        self.module, self.members, self.batch = block.get_submodule(path), members, batch
        self.path = path
        self.device = next(p.device for p in block.parameters() if not p.is_meta)
        self.exchange = Exchange(self.device)
        self.input_scales, self.scratch, self.stored = input_scales, scratch, stored
        outputs = outputs or OutputMoments()
        self.outputs = {member.name: outputs.moments.pop(member.name, None) for member in members}
        self.missing = {name: outputs.missing.get(name, "") for name in self.outputs}
        self.inputs: list[tuple[Tensor, Tensor, Tensor]] = []
        self.errors: list[Tensor | None] = []
        self.one_by_one = can_run_experts_one_by_one(self.module)
        self.originals: dict[str, nn.Parameter] = {}
        self.replaced = ExitStack()  # while the solved projections are in the block
        self.solved: list[tuple[LayerPlan, Solved | None]] = []

    def solve(self, run: Run, error: StreamError = lambda name, batch: None) -> None:
        """Solves the projections, whose output is to make up for an `error`."""
        if self.one_by_one:
            with forwarding(self.module, partial(self._keep_inputs, error)):
                run()
        for member in self.members:
            projection = member.name.rpartition(".")[2]
            weight, stacking = self.module.get_parameter(projection), stacking_of(self.module, projection)
            solved = self._solve(member, projection, expert_matrices(self.module, projection), run)
            self.originals[projection] = weight
            delattr(self.module, projection)
            new = QuantExperts(solved.weight, member.activation, solved.input_scale, weight.dtype, stacking)
            setattr(self.module, projection, new)
            self.solved.append((member, solved))
        self.inputs.clear()
        self.errors.clear()
        if self.one_by_one:
            self.replaced.enter_context(forwarding(self.module, partial(experts_forward, self.module)))

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """Returns the solved projections. The original parameters are back in the module."""
        put_back(self.module, self.originals)
        self.replaced.close()
        return self.solved

    def _keep_inputs(
        self, error: StreamError, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> None:
        self.inputs.append((hidden_states, top_k_index, top_k_weights))
        off = error(self.path, self.batch.index)
        # Σ w Δ over a token's experts should be the error: with Δ the same for all of them, that is the error / Σ w.
        total = top_k_weights.sum(-1, keepdim=True)
        fits = off is not None and len(off) == len(total) and not getattr(self.module, "has_post_expert_norm", False)
        self.errors.append(off / nonzero(total.to(off)) if fits and off is not None else None)
        # The module's inputs are all that is needed from this pass.
        raise Stop

    def _watch(self, projection: str, experts: range, see: See, run: Run) -> None:
        """Calls `see(batch, expert, input)` for the inputs of some experts."""
        if not self.one_by_one:

            def shown(expert: int, x: Tensor) -> None:
                if expert in experts:
                    see(self.batch.index, expert, x)

            parameter = watch_experts(self.module, projection, shown)
            try:
                run()
            finally:
                put_back(self.module, {projection: parameter})
            return

        def observe(batch: int, name: str, expert: int, x: Tensor) -> None:
            if name == projection:
                see(batch, expert, x)

        for batch, (hidden, index, weights) in enumerate(self.inputs):
            # Tokens of other experts are routed to one beyond the last, which the module skips.
            beyond = index.new_tensor(self.module.num_experts)
            routed = torch.where((index >= experts.start) & (index < experts.stop), index, beyond)
            experts_forward(self.module, hidden, routed, weights, partial(observe, batch), until=projection)

    def _statistics(self, member: LayerPlan, projection: str, experts: range, run: Run) -> list[LayerStats | None]:
        width = _moment_width(member)
        sums = {expert: Moments(width) for expert in experts}
        share = get_pipeline(member.solver).rounding.shares_where(member.activation is not None).residual
        # Only the last projection writes to the stream.
        errors = self.errors if projection == "down_proj" and share else []
        tokens = self._tokens(projection, experts.stop, run) if errors else []
        routes = [tokens_by_expert(index) for _, index, _ in self.inputs] if errors else []
        largest: list[tuple[int, Tensor]] = []

        def see(batch: int, expert: int, x: Tensor) -> None:
            if len(x) == 0:
                return
            largest.append((expert, x.abs().amax()))
            residual = errors[batch] if errors else None
            if residual is not None:
                # Few tokens fit by chance: a fit of as many coefficients as inputs is worth making only in part.
                fitted = share * max(1 - 2 * x.shape[1] / max(tokens[expert], 1), 0.0)
                residual = fitted * residual[routes[batch][expert][0]]
            rounded = round_activation(x, member.activation, self.input_scales.get(member.name))
            sums[expert].add(batch, rounded, residual=residual)

        with fast_matmul():
            self._watch(projection, experts, see, run)
        # A GPU is waited for once. NaN is larger than any number here.
        finite = torch.stack([amax for _, amax in largest]).isfinite().tolist() if largest else []
        for (expert, _), is_finite in zip(largest, finite, strict=True):
            if not is_finite:
                raise InputNotFiniteError(member.name, f"at expert {expert}")
        return stats_of(list(sums.values()), self.exchange, list(map(_owner, experts)))

    def _tokens(self, projection: str, count: int, run: Run) -> list[int]:
        """Returns how many tokens of all ranks reach each expert."""
        total = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        if not self.one_by_one:

            def see(batch: int, expert: int, x: Tensor) -> None:
                total[expert] += len(x)

            self._watch(projection, range(count), see, run)
        for _, index, _ in self.inputs:
            total += torch.bincount(index.flatten().clamp(max=count).cpu(), minlength=count + 1)
        return [sum(of_ranks) for of_ranks in zip(*gathered(total[:count].tolist()), strict=True)]

    def _solve(self, member: LayerPlan, projection: str, weight: Sequence[Tensor], run: Run) -> Solved:
        pipeline = get_pipeline(member.solver)
        count, format = len(weight), member.weight_format
        notes = []
        if pipeline.transforms or pipeline.reshapes:
            notes.append(f"experts take no scaling, rotation, branch or reconstruction: only {pipeline.spec.rounding}")
        if self.missing[member.name]:
            notes.append(f"rounded for its own output's error, as by gptq: {self.missing[member.name]}")
        # A branch needs a moment too, and experts take none, so only the rounding decides.
        needs_moment = pipeline.rounding.needs_moment
        tokens = self._tokens(projection, count, run) if needs_moment else [0] * count
        parts = [range(count)[part] for part in slices_that_fit(count, member.shape[-1], _moment_width(member))]
        silent = tokens.count(0) if needs_moment else 0
        if silent == count:
            raise ValueError(f"{member.name}: no calibration token reached any expert; give more text, or exclude it")
        average = None
        if silent:
            notes.append(
                f"no calibration token reached {silent} of {count} experts: solved on the pooled statistics of "
                "the others"
            )
            for part in parts:
                stats = self._statistics(member, projection, part, run)
                average = pooled(stats, self.exchange, list(map(_owner, part)), sum(tokens), average)
                del stats  # as large as the part's moments, and the next part needs room

        def solve_part(part: range) -> list[dict[str, BlockScaledTensor]]:
            stats = self._statistics(member, projection, part, run) if needs_moment else [None] * len(part)
            outputs = self.outputs[member.name]
            ours = [index for index, expert in enumerate(part) if _owner(expert) == rank_and_world()[0]]
            seen = [stats[index] or average for index in ours]
            seen = [None if each is None else replace(each, outputs=outputs) for each in seen]
            # A few experts at a time are read from their file, widened and dropped.
            matrices = (weight[part[index]].to(self.device).float() for index in ours)
            rounding = pipeline.rounding
            solutions = solve_matrices(matrices, seen, format, rounding, self.stored, member.name)
            own = {index: {member.name: solved} for index, solved in zip(ours, solutions, strict=True)}
            return all_solved(own, [({member.name: tuple(member.shape[1:])}, format)] * len(part), self.exchange)

        solved = (each[member.name] for part in parts for each in solve_part(part))
        whole = stacked(solved, count, self.scratch)
        return Solved(whole, RunTimeParts(), self.input_scales.get(member.name), sum(tokens), tuple(notes))


def _moment_width(member: LayerPlan) -> int | None:
    """Returns the width of the diagonal blocks of the second moment that a solver looks at; None for all of it."""
    return member.weight_format.block[1] if get_pipeline(member.solver).rounding.looks_in_blocks else None


def _owner(expert: int) -> int:
    return expert % rank_and_world()[1]


def stacked(matrices: Iterable[BlockScaledTensor], count: int, scratch: Scratch = IN_MEMORY) -> BlockScaledTensor:
    """Returns all experts as one weight `[experts, out, in]`, perhaps in a file; each is dropped before the next."""
    whole: list[Tensor | None] = []
    for index, matrix in enumerate(matrices):
        tensors = (matrix.codes, matrix.scale, matrix.global_scale)
        if not whole:
            format, shape = matrix.format, (count, *matrix.shape)
            in_file = scratch.takes(count * sum(t.nbytes for t in tensors if t is not None))
            empty = scratch.empty if in_file else Tensor.new_empty
            whole = [None if t is None else empty(t, (count, *t.shape)) for t in tensors]
        for target, tensor in zip(whole, tensors, strict=True):
            if target is not None and tensor is not None:
                target[index] = tensor
    codes, scale, second = whole
    assert codes is not None and scale is not None
    return BlockScaledTensor(codes, scale, format, shape, second)


@dataclass(frozen=True, eq=False)
class BlockCalls:
    """The calls of a block, with their hidden states."""

    # Calls with the hidden states that the quantized blocks before give, one for each of this rank's batches.
    quantized: Sequence[Call]
    original: Sequence[Call]  # the same with the original hidden states
    few: Call  # a call on a few tokens
    # The number of the batch that runs, which the experts of the block read, too.
    batch: CurrentBatch = field(default_factory=CurrentBatch)


class Block:
    """One block from original to quantized."""

    def __init__(
        self, module: nn.Module, copies: DeviceCopies, groups: list[Group], experts: list[FusedExperts],
        calls: BlockCalls, settings: Settings, stored: torch.dtype,
    ) -> None:  # fmt: skip
        self.module, self.copies, self.groups, self.experts = module, copies, groups, experts
        self.calls, self.batch, self.settings, self.stored = calls, calls.batch, settings, stored
        # Fused experts may still be in their files, on the meta device.
        self.device = next(p.device for p in module.parameters() if not p.is_meta)
        self.exchange = Exchange(self.device)  # with the other ranks that work on the block
        # Hidden states are [..., tokens, features], token ids [..., tokens].
        hidden = [call.hidden for call in calls.original]
        own = len(hidden), sum(h.numel() // (h.shape[-1] if h.is_floating_point() else 1) for h in hidden)
        self.batches, self.tokens = (sum(counts) for counts in zip(*gathered(own), strict=True))  # of all ranks
        # Float32 weights [out, in] still to be rounded, by name within the block; transforms change them.
        self.targets = {n: weight_of(module, n).detach().float() for g in groups for n in g.names}
        self.stand_ins: dict[str, StandIn] = {}
        # Each solved layer as planned, or as the guard promoted it; None for one kept in 16 bit.
        self.solutions: dict[str, tuple[LayerPlan, Solved | None]] = {}
        self.learned: dict[str, Tensor] = {}  # [out, in] before rounding, of layers that reconstruction refines
        self.original_biases: dict[str, Tensor] = {}  # of layers whose bias was corrected
        self.module_calls: Counter[str] = Counter()  # of the parents of layers, in the reference pass
        self.remembered: list[nn.Module] = []
        self.stream = Stream()

    def run(self, calls: Sequence[Call]) -> list[Tensor]:
        """Runs the block on some calls; returns the hidden states after it, each where the state before it is."""
        outputs = []
        with fast_matmul(), paired_linears(self.device):
            for self.batch.index, call in enumerate(calls):
                on_device = moved(call, self.device)
                result = self.module(*on_device.args, **on_device.kwargs)
                outputs.append(call.output(result).to(call.hidden.device))
        return outputs

    def run_until_stopped(self, calls: Sequence[Call]) -> None:
        """Runs the block on some calls, each until a hook raises `Stop`."""
        with fast_matmul(), paired_linears(self.device):
            for self.batch.index, call in enumerate(calls):
                on_device = moved(call, self.device)
                with suppress(Stop):
                    self.module(*on_device.args, **on_device.kwargs)

    @contextmanager
    def hooked(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Calls `hooks` with the arguments of the modules of these names, before they run, while open."""

        def before(hook: Callable[..., None]) -> Callable[..., None]:
            return lambda module, args, kwargs: hook(module, all_arguments(args, kwargs))

        modules = {name: self.module.get_submodule(name) for name in hooks}
        handles = (
            module.register_forward_pre_hook(before(hooks[name]), with_kwargs=True) for name, module in modules.items()
        )
        with removing(handles):
            yield

    def remember_finished(self) -> None:
        """Lets modules whose layers are all solved return their outputs of the next pass from then on."""
        unfinished = [experts.module for experts in self.experts if not experts.solved]
        for name, calls in self.module_calls.items():
            module = self.module.get_submodule(name)
            inside = [group for group in self.groups if any(n.startswith(f"{name}.") for n in group.names)]
            solved = not any(target.startswith(f"{name}.") for target in self.targets)
            once = calls == self.batches and all(group.calls == 1 for group in inside)
            # A module that is called twice a pass would need two memories; one with a forward of its own is watched.
            if not solved or not once or "forward" in vars(module) or any(m in unfinished for m in module.modules()):
                continue
            module.forward = self._once_a_batch(module.forward)
            self.remembered.append(module)
            for member in (member for group in inside for member in group.names):
                if member in self.stand_ins:
                    # The module remembers from here on, so its layers need not.
                    self.stand_ins[member].keeps = False

    def _once_a_batch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        outputs: dict[int, Any] = {}

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if self.batch.index not in outputs:
                outputs[self.batch.index] = forward(*args, **kwargs)
            return outputs[self.batch.index]

        return remembered

    def forget(self) -> None:
        """Restores the original `forward` methods of modules that return their remembered outputs."""
        for module in self.remembered:
            del module.forward
        self.remembered.clear()

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """Returns each layer as planned, or as the guard promoted it, with its solution; None for a 16-bit layer.

        Puts the original modules back into the block.
        """
        self.forget()
        for name, stand_in in self.stand_ins.items():
            self.module.set_submodule(name, stand_in.original)
        linear = [self.solutions[name] for group in self.groups for name in group.names]
        return linear + [result for experts in self.experts for result in experts.results()]
