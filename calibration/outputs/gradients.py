"""`output_moments` measures A = mean of g gᵀ, the second moment of gradients at the outputs of layers.

g is the gradient of ln p(label) of a token's prediction, its label drawn from the model's own prediction. The mean
over tokens and draws is then the Fisher matrix of the model's KL divergence: no true label is needed, and text that
the model finds unlikely does not dominate. A model without logits gets gradients of a random direction of its output
instead, whose second moment belongs to the squared error.

Every batch runs forward once and backward once. A block's activations are dropped after its forward pass and computed
again in the backward pass (checkpointing), so that memory holds the hidden states between blocks and the activations of
one block. Blocks of a model that the device cannot hold are copied there for as long as they run; on a CPU, 16-bit
weights of a block are widened for the pass, because 16-bit products are slow on most.

Experts of one projection share one A, over all their tokens: the gradient behind an expert is the gradient of the
stream, times the token's routing weight, whichever expert it is, and few tokens reach each. Of thousands of experts, A
of their own would not fit either.

Gradients of few tokens are far larger than all others, and would dominate A: gradients beyond `CLIP` medians are
scaled down to that. A is shrunk towards its diagonal by the spread between rows, as second moments of inputs are.

As a factor of the loss, A takes gradients to be independent of inputs, which they are not: tokens before one that the
model is sure of have next to no gradient, and errors at them cost nothing, however large their inputs are. In the
Kronecker product that comes nearest to the Fisher matrix, the second moment of inputs counts a token by gᵀ A g (YAQA,
Tseng et al., arXiv 2505.22988). So tokens get weights: inputs are multiplied by √|g| before their second moment is
taken, which then counts a token by |g|. By |g|², few tokens would do most of the counting.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from quant.base.processor import value_of
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.outputs.logits import Logits, class_logits, drawn, logits_of
from quant.calibration.ranks import Exchange, gathered, number_of, rank_and_world
from quant.calibration.session import NARROW, Session, device_of, free_memory, placed
from quant.calibration.statistics import LayerStats, MomentSpread, MomentSum, add_up, rows_of
from quant.kernels.linear.experts import can_run_experts_one_by_one, experts_forward
from quant.recipes.blocks import block_names, forwarding, other_tensors, removing, replaced, run_with
from quant.recipes.layers import LayerKind, output_head, stacking_of_experts
from quant.recipes.plan import LayerPlan

CLIP = 3.0
# Outputs that one diagonal block of A spans at most: as many as memory allows; fewer on a CPU, for speed. SmolLM2 in
# NVFP4 loses as little with blocks of 256 as with whole matrices.
_WIDTHS = {"cuda": (1024, 512, 256), "cpu": (256,)}
# Rows on a CPU, where the passes would otherwise take longer than GPTQ.
_ROWS_ON_CPU = 16
# Labels drawn for each token on a GPU, and the number of rows with which one is enough. With 32 rows, four instead of
# one gain 2% on SmolLM2, at the cost of three more backward passes.
_DRAWS, _ROWS_OF_ONE_DRAW = 4, 512
# Tokens that run together on a GPU, where more would only take memory.
_TOGETHER = 8192
# Share of the memory that all A may take together.
_SHARE = 0.25


@dataclass(eq=False)
class OutputMoments:
    """A of fusion groups by the name of their first layer; for the others the reason why there is none."""

    moments: dict[str, LayerStats] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    # by group the weights of the tokens of each batch of this rank, float32 `[tokens]`, on average 1 over all ranks.
    # None of groups that see a token never or twice, and none where some batch had no gradient
    token_weights: dict[str, list[Tensor]] = field(default_factory=dict)


def output_moments(
    model: nn.Module, groups: Sequence[list[LayerPlan]], batches: list[Any], session: Session, draws: int | None = None
) -> OutputMoments:
    """Returns A of the outputs of fusion groups, from this and the other ranks' batches."""
    width, reason = _width(groups, session), "too little memory for the gradients' second moment"
    if any(hasattr(parameter, "stored") for parameter in model.parameters()):
        width, reason = None, "weights that stay in their files would be read anew for every batch"
    if width is None:
        return OutputMoments(missing={members[0].name: reason for members in groups})
    # Modules of experts that cannot run so that each expert's output is seen.
    unseen = [
        members
        for members in groups
        if members[0].kind == LayerKind.EXPERTS
        and not can_run_experts_one_by_one(model.get_submodule(members[0].name.rpartition(".")[0]))
    ]
    result = OutputMoments(missing={m[0].name: "its module does not show outputs of experts" for m in unseen})
    groups = [members for members in groups if members not in unseen]
    sums = {}
    for members in groups:
        size = sum(member.shape[-2] for member in members)
        # Even blocks of at most `width` outputs; None for one block.
        count = -(-size // width)
        sums[members[0].name] = MomentSum(None if count <= 1 else -(-size // count // 16) * 16)
    device = session.device or device_of(model)
    if draws is None:
        rows = sum(gathered(sum(len(batch) if isinstance(batch, Tensor) else 1 for batch in batches)))
        draws = labels_drawn(rows, on_gpu=device.type == "cuda")
    failure, powers = "", {}
    try:
        # Only gradients of outputs are computed.
        frozen = replaced((p, "requires_grad", False) for p in model.parameters() if p.requires_grad)
        with placed(model, session.device), frozen, fast_matmul(), torch.enable_grad():
            powers = _Pass(model, groups, sums, session).run(batches, draws)
    except torch.OutOfMemoryError:
        failure = "too little memory on the GPU for the gradients"
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        # Whatever a model's code does that autograd cannot follow; its message is the reason that users read.
        failure = f"no gradient ({str(error).splitlines()[0][:120] if str(error) else type(error).__name__})"
    failure = next(filter(None, gathered(failure)), "")
    exchange = Exchange(device)
    for name, total in sums.items():
        stats = None if failure else _over_ranks(total, exchange)
        reason = failure or _fault(stats)
        if reason or stats is None:
            result.missing[name] = reason
        else:
            result.moments[name] = stats
    weights = _token_weights({} if failure else powers, exchange)
    result.token_weights = {name: own for name, own in weights.items() if name in result.moments}
    return result


def labels_drawn(rows: int, *, on_gpu: bool) -> int:
    """Returns how many labels are drawn for each token of `rows` rows."""
    return max(min(_ROWS_OF_ONE_DRAW // max(rows, 1), _DRAWS), 1) if on_gpu else 1


def _token_weights(powers: Mapping[str, list[Tensor]], exchange: Exchange) -> dict[str, list[Tensor]]:
    """Returns √|g| of tokens by group and batch, on average 1, from the mean |g|² of each."""
    everywhere = gathered(list(powers))
    names = [name for name in everywhere[0] if all(name in of_rank for of_rank in everywhere)]
    roots = {name: [power.sqrt().sqrt() for power in powers[name]] for name in names}
    if not names:
        return {}
    # Added up in the order of the batches, so that any number of ranks gets the same bits.
    sums = [
        (number_of(index), [torch.stack([root.sum() for root in of_batch])])
        for index, of_batch in enumerate(zip(*roots.values(), strict=True))
    ]
    total = torch.stack([part for _, (part,) in exchange.in_order(sums)]).sum(0)
    tokens = sum(gathered(sum(map(len, roots[names[0]]))))
    means = dict(zip(names, (total / tokens).clamp(min=torch.finfo(total.dtype).tiny), strict=True))
    return {name: [root / means[name] for root in of_group] for name, of_group in roots.items()}


def _width(groups: Sequence[Sequence[LayerPlan]], session: Session) -> int | None:
    """Returns how many outputs a block of A spans; None where not even the least fits."""
    device = session.device
    on_gpu = device is not None and device.type == "cuda"
    memory = free_memory(device) if on_gpu and device is not None else session.usable_memory()
    sizes = [sum(member.shape[-2] for member in members) for members in groups]
    for width in _WIDTHS["cuda" if on_gpu else "cpu"]:
        if memory is None or sum(4 * size * min(size, width) for size in sizes) <= _SHARE * memory:
            return width
    return None


def _fault(stats: LayerStats | None) -> str:
    """Returns why an A is of no use; empty where it is."""
    if stats is None:
        return "no gradient reached it"
    moment = stats.matrix if stats.block_moments is None else stats.block_moments
    power = moment.diagonal(dim1=-2, dim2=-1).sum()
    if not bool(torch.isfinite(power)):
        return "its gradients hold NaN or infinity"
    return "" if bool(power > 0) else "its gradients are zero"


def _over_ranks(total: MomentSum, exchange: Exchange) -> LayerStats | None:
    if rank_and_world()[1] == 1:
        return total.stats()
    everywhere = MomentSum(total.width)
    spread = total.spread
    counts = gathered((total.tokens, 0 if spread is None else spread.squared_tokens))
    own = [] if spread is None else [(rank_and_world()[0], [total.second, total.first, spread.sums])]
    for _, (second, first, sums) in exchange.in_order(own):
        assert second is not None and first is not None and sums is not None
        everywhere.second, everywhere.first = add_up(everywhere.second, second), add_up(everywhere.first, first)
        everywhere.spread = everywhere.spread or MomentSpread(first)
        everywhere.spread.sums += sums
    everywhere.tokens = sum(tokens for tokens, _ in counts)
    if everywhere.spread is not None:
        everywhere.spread.tokens = everywhere.tokens
        everywhere.spread.squared_tokens = sum(squared for _, squared in counts)
    return everywhere.stats()


class _Pass:
    """Forward and backward passes, with hooks at the outputs of layers; fills `sums`, by a group's first layer."""

    def __init__(
        self, model: nn.Module, groups: Sequence[Sequence[LayerPlan]], sums: Mapping[str, MomentSum], session: Session
    ) -> None:
        self.model, self.groups, self.sums, self.session = model, groups, sums, session
        self.device = session.device or device_of(model)
        self.logits = Logits(model, output_head(model))
        self.leaves: list[Tensor] = []
        self.forward_runs = False
        self.pending: dict[str, dict[str, Tensor]] = {}
        self.drawn: dict[str, list[Tensor]] = {}

    def run(self, batches: Sequence[Any], draws: int) -> dict[str, list[Tensor]]:
        """Adds the gradients of all batches to the sums; for each token `draws` labels are drawn.

        Returns by group, for each batch, the mean of |g|² over the draws, clipped as for A, `[tokens]`: none of
        experts, of groups that are not called once a pass, and none where not all batches ran.
        """
        powers: dict[str, list[Tensor]] = {}
        linear = [members for members in self.groups if members[0].kind != LayerKind.EXPERTS]
        watched = [(member.name, partial(self._add, members, member.name)) for members in linear for member in members]
        handles = [
            self.model.get_submodule(name).register_forward_hook(lambda *of, add=add: self._with_gradient(of[2], add))
            for name, add in watched
        ]
        with removing(handles), self._watched_experts(), self._checkpointed():
            joined = self._joined(batches)
            for index, batch in enumerate(joined):
                # Each batch has labels of its own, other ranks' batches too.
                generator = torch.Generator(self.device).manual_seed(self.session.seed * 1_000_003 + number_of(index))
                self.forward_runs = True
                output, gradient_of = self._forward(batch.to(self.device))
                self.forward_runs = False
                if not self.leaves or not output.requires_grad:
                    raise ValueError("its output does not depend on its layers")
                for draw in range(draws):
                    gradient = gradient_of(generator)
                    # Only hooks read the gradients; to reach the first layers, all layers after them run.
                    torch.autograd.grad(output, self.leaves, gradient, retain_graph=draw + 1 < draws, allow_unused=True)
                    self.pending.clear()
                self.leaves.clear()
                for name, drawn in self.drawn.items():
                    if len(drawn) == draws:
                        powers.setdefault(name, []).append(torch.stack(drawn).mean(0))
                self.drawn.clear()
                self.session.report("gradients", index + 1, len(joined))
        by_batch = {name: _by_batch(parts, batches) for name, parts in powers.items()}
        return {name: parts for name, parts in by_batch.items() if parts}

    def _joined(self, batches: Sequence[Any]) -> Sequence[Any]:
        """Returns the batches of token rows put together on a GPU, where small ones wait for launches most of the time.

        On a CPU some of the batches, evenly from all of them.
        """
        if self.device.type != "cuda":
            rows = sum(map(len, batches))
            return list(batches)[:: max(-(-rows // _ROWS_ON_CPU), 1)]
        if not batches or not all(isinstance(b, Tensor) for b in batches):
            return batches
        if batches[0].dim() != 2 or batches[0].is_floating_point():
            return batches
        return list(torch.cat(list(batches)).split(max(_TOGETHER // batches[0].shape[1], 1)))

    def _forward(self, batch: Any) -> tuple[Tensor, Callable[[torch.Generator], Tensor]]:
        """Returns the last tensor with a graph, and a function that draws a gradient for it."""
        if isinstance(batch, Tensor) and not batch.is_floating_point() and self.logits.head is not None:
            with torch.no_grad():
                self.logits.decide(batch)
            if self.logits.split:
                hidden = self.logits.hidden(batch)
                return hidden, partial(self._head_gradient, hidden.detach())
        result = self.model(batch)
        if hasattr(result, "logits") and result.logits.shape[-1] > 1:
            classes = class_logits(result.logits.detach(), self.model)
            # The gradient of log-odds is that of the second class.
            own = (..., 1) if classes.dim() > result.logits.dim() else ...
            return result.logits, lambda generator: _label_gradient(classes, generator)[own]
        output = logits_of(lambda _: result, batch)  # type: ignore[arg-type]
        if isinstance(output, list):  # Z-Image gives an image of its own size for each row
            output = torch.cat([each.flatten() for each in output])
        draw = partial(torch.randn, output.shape, device=output.device, dtype=output.dtype)
        return output, lambda generator: draw(generator=generator)

    def _head_gradient(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Returns the gradient for the head's inputs; slice by slice, because logits of all positions would not fit."""
        gradient, head = torch.empty_like(hidden), self.logits.head
        assert head is not None
        tensors = self._elsewhere(head)
        with forwarding(head, partial(self._run_with, head, tensors, head.forward)) if tensors else nullcontext():
            for part in self.logits.parts(hidden):
                leaf = hidden[part].clone().requires_grad_()
                logits = self.logits.logits(leaf)
                (gradient[part],) = torch.autograd.grad(logits, leaf, _label_gradient(logits.detach(), generator))
        return gradient

    def _with_gradient(self, out: Tensor, add: Callable[[Tensor], None]) -> Tensor:
        if not torch.is_grad_enabled():
            return out
        if not out.requires_grad:
            # The first layers that tokens meet: the graph begins here, also where a block is computed again.
            out = out.detach().requires_grad_()
            if self.forward_runs:
                self.leaves.append(out)
        if self.forward_runs:
            out.register_hook(add)
        return out

    @contextmanager
    def _watched_experts(self) -> Iterator[None]:
        """Runs fused experts one by one while open, and takes the gradients at their outputs."""
        projections: dict[str, dict[str, Sequence[LayerPlan]]] = {}
        for members in self.groups:
            if members[0].kind == LayerKind.EXPERTS:
                path, _, projection = members[0].name.rpartition(".")
                projections.setdefault(path, {})[projection] = members
        with ExitStack() as stack:
            for path, planned in projections.items():
                module = self.model.get_submodule(path)
                after = partial(self._after_expert, module, planned)
                stack.enter_context(forwarding(module, partial(experts_forward, module, after=after)))
            yield

    def _after_expert(
        self, module: nn.Module, planned: Mapping[str, Sequence[LayerPlan]], name: str, expert: int, y: Tensor
    ) -> Tensor:
        if name not in planned:
            return y
        members, rows = planned[name], torch.arange(y.shape[-1], device="cpu")
        # The positions among the outputs y `[tokens, out]` of a module of the rows of an expert's matrix.
        order = stacking_of_experts(module, name).outputs(rows).argsort().to(y.device)
        return self._with_gradient(y, lambda gradient: self._add(members, members[0].name, gradient[:, order]))

    def _add(self, members: Sequence[LayerPlan], name: str, gradient: Tensor) -> None:
        key = members[0].name
        pending = self.pending.setdefault(key, {})
        pending[name] = gradient.detach()
        if len(pending) < len(members):
            return
        together = torch.cat([pending[m.name] for m in members], dim=-1) if len(members) > 1 else gradient.detach()
        del self.pending[key]
        rows = rows_of(together)
        flat = together.reshape(-1, together.shape[-1]).float()
        if len(flat):
            with torch.no_grad():
                size = flat.norm(dim=1, keepdim=True)  # of which none may exceed `CLIP` times the median
                clipped = flat * (CLIP * size.median() / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1)
                self.sums[key].add(clipped, rows=rows)
                if members[0].kind != LayerKind.EXPERTS:
                    self.drawn.setdefault(key, []).append(clipped.square().sum(1))

    @contextmanager
    def _checkpointed(self) -> Iterator[None]:
        """Makes activations of blocks be computed again when they are needed, while open."""
        with ExitStack() as stack:
            for name in block_names(self.model):
                block = self.model.get_submodule(name)
                run = partial(checkpoint, partial(self._run_block, block, block.forward), use_reentrant=False)
                stack.enter_context(forwarding(block, run))
            yield

    def _run_block(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a block on the device, with 16-bit weights widened on a CPU."""
        tensors = self._elsewhere(block)
        return self._run_with(block, tensors, forward, *args, **kwargs) if tensors else forward(*args, **kwargs)

    def _elsewhere(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns the tensors of a module that it has to be called with instead of its own: on the device, or wider."""

        def elsewhere(tensor: Tensor) -> Tensor | None:
            if tensor.is_meta:
                return None  # experts that are still in their files, which read themselves
            dtype = torch.float32 if self.device.type == "cpu" and tensor.dtype in NARROW else tensor.dtype
            is_there = tensor.device == self.device and tensor.dtype == dtype
            return None if is_there else value_of(tensor).to(self.device, dtype)

        return other_tensors(module, elsewhere)

    def _run_with(
        self, module: nn.Module, tensors: dict[str, Tensor], forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs `forward` of a module with other tensors; its result is as narrow as its inputs."""
        narrow = next((v.dtype for v in (*args, *kwargs.values()) if _is_narrow(v)), None)
        wide = torch.float32 if self.device.type == "cpu" else narrow

        def moved(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(self.device, wide if _is_narrow(value) else None)

        args, kwargs = tree_map(moved, args), tree_map(moved, kwargs)
        with forwarding(module, forward):
            result = run_with(module, tensors, *args, **kwargs)
        if narrow is None or wide is narrow:
            return result
        return tree_map(lambda v: v.to(narrow) if isinstance(v, Tensor) and v.dtype is wide else v, result)


def _by_batch(parts: list[Tensor], batches: Sequence[Any]) -> list[Tensor]:
    """Returns values of tokens, which came in other parts, batch by batch; none if some tokens have none."""
    if all(isinstance(batch, Tensor) and not batch.is_floating_point() for batch in batches):
        counts = [batch.numel() for batch in batches]
        values = torch.cat(parts)
        return list(values.split(counts)) if len(values) == sum(counts) else []
    return parts if len(parts) == len(batches) else []


def _is_narrow(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in NARROW


def _label_gradient(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Returns the gradient of ln p(label) with labels drawn from p, for logits `[..., classes]`: one-hot less p."""
    probabilities = logits.float().softmax(-1).flatten(0, -2)
    if not bool(torch.isfinite(probabilities.sum())):
        raise ValueError("its logits hold NaN or infinity")
    labels = drawn(probabilities, generator)
    gradient: Tensor = probabilities.neg_().scatter_add_(1, labels, torch.ones_like(labels, dtype=torch.float32))
    return gradient.view(logits.shape).to(logits.dtype)
