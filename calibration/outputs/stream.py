"""`find_writers` finds the layers of a block whose output is added to the residual stream, from one pass of the block.

Such a layer can make up for an error that others have left in the stream: with h the stream before the addition as it
is and h° as it was in the original model, its output may err by h° − h in the other direction. The part that its input
predicts goes into its weight (LoaQ, Lin and Wan 2025, arXiv 2509.06297).

No name says which layers write. While the original block runs on a few tokens, the hidden states that go into and out
of its modules are noted. Output y of a layer is written where two of them, a from before the layer ran and b from
after, satisfy

    b = a + m y                 one after the other: Llama, T5, BERT, whose b goes through a norm; m of Granite
    b = a + m y + m' y'         attention and MLP side by side: Falcon, GPT-J, GPT-NeoX, Cohere
    b = a + m norm(y)           a norm or a scale stands between: Gemma 2, OLMo 2, DINOv2

up to the rounding of the addition. Experts write where the output of a module around them does.

Between, RMSNorm gives norm(y) = u v ⊙ y with one u for a token and one v for a channel, so that an error s of the
stream needs s / (u v) of y; v is known from the same pass, and u of every token follows from y and norm(y).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quant.recipes.blocks import all_arguments, output_of, removing

# Errors of an addition in units of its rounding, and how far above it an output must be to be distinguished from it.
_ROUNDINGS, _ABOVE = 8, 32
# Elements of a hidden state that are compared.
_SAMPLE = 2048
# A gain below this share of the usual one is taken for a channel that the norm has switched off.
_LEAST_GAIN = 0.05


@dataclass(frozen=True)
class Point:
    """A hidden state within a block: the input or the output of a module; "" is the block itself."""

    module: str
    is_output: bool = False


@dataclass(frozen=True, eq=False)
class Writer:
    """How a layer writes to the stream."""

    terms: tuple[tuple[Point, float], ...]
    factor: float
    norm: str = ""
    # v of that module by channel, `[out]`, 0 where it lets nothing through; None without such a module
    gain: Tensor | None = None


@dataclass(eq=False)
class Stream:
    """The residual stream of a block while it is solved."""

    # writers by the name of the layer, or of the module of experts
    writers: dict[str, Writer] = field(default_factory=dict)
    # hidden states of the original model by point, `[..., hidden]` for each of this rank's batches
    original: dict[Point, list[Tensor]] = field(default_factory=dict)
    # 1 / u by norm, `[tokens, 1]` for each batch
    token_gains: dict[str, list[Tensor]] = field(default_factory=dict)
    current: dict[Point, Tensor] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        """All hidden states that some writer is added to."""
        return list(dict.fromkeys(point for writer in self.writers.values() for point, _ in writer.terms))

    def begin(self, hidden: Sequence[Tensor]) -> None:
        """Takes the hidden states in front of the block, in the original model."""
        self.original[Point("")] = list(hidden)

    @contextmanager
    def following(self, block: nn.Module) -> Iterator[None]:
        """Fills `current` with the hidden states of the pass that runs, while open."""

        def keep(point: Point, hidden: Tensor) -> None:
            self.current[point] = hidden.reshape(-1, hidden.shape[-1])

        with removing(_hooks(block, self.points, keep)):
            yield
        self.current.clear()

    @contextmanager
    def recording(self, block: nn.Module) -> Iterator[None]:
        """Fills `original` and `token_gains` from passes of the original model, batch by batch, while open."""

        def keep(point: Point, hidden: Tensor) -> None:
            # A clone: later additions in place would change it.
            self.original.setdefault(point, []).append(hidden.clone())

        def gain_of(norm: str, gain: Tensor) -> Callable[..., None]:
            inverse = _inverse(gain)

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
                x = all_arguments(args, kwargs)[0]
                y, out = (t.reshape(-1, t.shape[-1]) for t in (x, output_of(result)))
                # |y| / |norm(y) / v| of the channels that pass is 1 / u.
                passing = (inverse != 0).to(y)
                size = (out * inverse.to(y)).norm(dim=1, keepdim=True)
                inverses = (y * passing).norm(dim=1, keepdim=True) / size.clamp(min=torch.finfo(size.dtype).tiny)
                self.token_gains.setdefault(norm, []).append(inverses)

            return hook

        normed = [(writer.norm, writer.gain) for writer in self.writers.values() if writer.gain is not None]
        handles = [
            block.get_submodule(norm).register_forward_hook(gain_of(norm, gain), with_kwargs=True)
            for norm, gain in normed
        ]
        inside = [point for point in self.points if point != Point("")]
        with removing([*_hooks(block, inside, keep), *handles]):
            yield

    def error(self, name: str, batch: int) -> Tensor | None:
        """Returns the change of a layer's output that would make up for the stream's error, `[tokens, out]`.

        None where the layer does not write, or a hidden state was not seen in this pass.
        """
        writer = self.writers.get(name)
        if writer is None or any(point not in self.current for point, _ in writer.terms):
            return None
        terms = [(self.current[point], self.original[point][batch], factor) for point, factor in writer.terms]
        # A reshape, not a view: Whisper's encoder transposes its convolutions' outputs, so rows are not contiguous.
        errors = [factor * (original.to(now).reshape_as(now) - now) for now, original, factor in terms]
        error = torch.stack(errors).sum(0) / writer.factor
        if writer.gain is None:
            return error
        return error * self.token_gains[writer.norm][batch] * _inverse(writer.gain).to(error)


def _inverse(gain: Tensor) -> Tensor:
    return torch.where(gain != 0, 1 / gain, 0.0)


def _hooks(
    block: nn.Module, points: Sequence[Point], keep: Callable[[Point, Tensor], None]
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    def before(point: Point) -> Callable[..., None]:
        return lambda module, args, kwargs: keep(point, _first_float(args, kwargs))

    def after(point: Point) -> Callable[..., None]:
        return lambda module, args, result: keep(point, output_of(result))

    for point in points:
        module = block.get_submodule(point.module)
        if point.is_output:
            yield module.register_forward_hook(after(point))
        else:
            yield module.register_forward_pre_hook(before(point), with_kwargs=True)


def _first_float(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    values = all_arguments(args, kwargs)
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


@dataclass(frozen=True, eq=False)
class _State:
    """A hidden state of the few tokens, and when it came by."""

    point: Point
    value: Tensor  # `[tokens, hidden]`
    sample: np.ndarray  # some of its elements, float64: sums of states are looked for among these
    time: int

    @cached_property
    def key(self) -> bytes:
        """The same for states of one value."""
        return self.sample.tobytes()


def find_writers(
    block: nn.Module, run: Callable[[], Any], layers: Sequence[str], experts: Sequence[str] = ()
) -> tuple[dict[str, Writer], Any]:
    """Returns the layers of a block that write to the residual stream, by name, and the result of `run`."""
    values: list[tuple[Point, Tensor, int]] = []
    began: dict[str, int] = {}
    shape: list[torch.Size] = []
    chosen: list[Tensor] = []
    clock = 0

    def note(point: Point, value: Any) -> None:
        nonlocal clock
        clock += 1
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            return
        flat = value.detach().reshape(-1, value.shape[-1])
        if not chosen:  # the block's own input
            shape.append(flat.shape)
            order = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(0), device="cpu")
            chosen.append(order[:_SAMPLE].to(flat.device))
        if flat.shape == shape[0]:
            # Clones: later additions in place would change them.
            values.append((point, flat.clone(), clock))

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            note(Point(name), _first_float(args, kwargs))
            began.setdefault(name, clock)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            with suppress(IndexError, StopIteration):  # a module without outputs
                note(Point(name, True), output_of(result))

        return hook

    modules = dict(block.named_modules())
    handles = [m.register_forward_pre_hook(before(n), with_kwargs=True) for n, m in modules.items()]
    handles += [m.register_forward_hook(after(n)) for n, m in modules.items()]
    with removing(handles):
        result = run()
    eps = torch.finfo(next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)).eps
    # All samples at once: a GPU is waited for once.
    samples: list[np.ndarray] = []
    if values:
        samples = list(torch.stack([value.flatten()[chosen[0]].double() for _, value, _ in values]).cpu().numpy())
    states = [_State(point, value, sample, time) for (point, value, time), sample in zip(values, samples, strict=True)]
    # A module that is called twice in the pass names no state.
    counts = Counter(state.point for state in states)
    search = _Search([state for state in states if counts[state.point] == 1], began, eps, modules)
    reached = [[name for name in names if name in began] for names in (layers, experts)]
    return search.writers(*reached), result


def _distinct(states: Iterable[_State]) -> list[_State]:
    distinct: list[_State] = []
    for state in states:
        if not any(state.key == other.key for other in distinct):
            distinct.append(state)
    return distinct


@dataclass(frozen=True, eq=False)
class _Search:
    """The hidden states of one pass, among which sums are looked for."""

    states: list[_State]
    began: dict[str, int]
    eps: float
    modules: dict[str, nn.Module]

    def writers(self, layers: Sequence[str], experts: Sequence[str]) -> dict[str, Writer]:
        """Returns the writers by name."""
        outputs = {state.point.module: state for state in self.states if state.point.is_output}
        written = {name: outputs[name] for name in (*layers, *experts) if name in outputs}
        writers = {}
        for name in (name for name in written if name not in experts):
            writer = self._direct(name, written) or self._behind_norm(name, written)
            if writer is not None:
                writers[name] = writer
        for name in experts:
            # The innermost module around the experts whose output is written: their own module, or the one that also
            # holds shared experts.
            parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
            candidates = (
                self._direct(parent, {**written, parent: outputs[parent]}) for parent in parents if parent in outputs
            )
            writer = next((writer for writer in candidates if writer is not None), None)
            if writer is not None:
                writers[name] = writer
        return writers

    def _direct(self, name: str, outputs: dict[str, _State]) -> Writer | None:
        """Finds a sum of `y` by itself, or of `y` with one other of `outputs`."""
        own = outputs[name]
        beside = [state for other, state in outputs.items() if other != name]
        alone = self._sum(name, own, None, [])
        # A sum of just two outputs, such as shared and routed experts, is added to the stream afterwards.
        if alone is not None and alone[0] not in [self._outermost(state, name) for state in beside]:
            return Writer(((alone[0], 1.0),), alone[1])
        for state in beside:
            terms = self._sum(name, own, state, beside)
            if terms is None:
                continue
            stream, factor, share = terms
            # An output that comes later is not there yet, and counts as equal to the original model's.
            if state.time < self.began[name]:
                return Writer(((stream, 1.0), (self._outermost(state, name), share)), factor)
            return Writer(((stream, 1.0),), factor)
        return None if alone is None else Writer(((alone[0], 1.0),), alone[1])

    def _behind_norm(self, name: str, outputs: dict[str, _State]) -> Writer | None:
        """Finds a state behind a module that multiplies tokens and channels, such as RMSNorm."""
        own = outputs[name]
        for state in self.states:
            module = state.point.module
            if state.point.is_output or state.time < own.time or state.key != own.key:
                continue
            normed = next((s for s in self.states if s.point == Point(module, True)), None)
            gain = None if normed is None else _channel_gain(own.value.double(), normed.value.double(), self.eps)
            if normed is None or gain is None:
                continue
            terms = self._sum(name, normed, None, [])
            if terms is not None:
                return Writer(((terms[0], 1.0),), terms[1], module, gain.float())
        return None

    @np.errstate(over="ignore", invalid="ignore")  # states that hold infinity fit no sum
    def _sum(self, name: str, own: _State, beside: _State | None, not_the_stream: Sequence[_State]) -> Any:
        """Returns the point a with a + m y (+ m' y') = b for some b, and m and m'; None where there is none."""
        outputs = np.stack([s.sample for s in (own, beside) if s is not None])
        if not np.isfinite(outputs).all():
            return None  # the walk names the weight or the row that holds NaN
        last = max(s.time for s in (own, beside) if s is not None)
        later = _distinct(s for s in self.states if s.time > last)
        if not later:
            return None
        ends = np.stack([state.sample for state in later])
        # Least squares for one or two outputs. In NumPy, on this thread: for arrays of this size PyTorch and BLAS wake
        # all their threads, which takes longer than the block's own pass where others are writing and hashing files.
        solve = np.linalg.pinv(np.einsum("is,js->ij", outputs, outputs)) @ outputs
        for a in _distinct(s for s in self.states if s.time < self.began[name]):
            if any(a.key == other.key for other in not_the_stream):
                continue
            # All sums at once, `[later, sample]`: one by one, tiny operations take longer than the block's own pass.
            differences = ends - a.sample
            factors = np.einsum("is,bs->bi", solve, differences)
            parts = factors[:, :, None] * outputs
            contributions = np.abs(parts)
            rounding = self.eps * (contributions.sum(1) + np.abs(a.sample) + np.abs(ends))
            errors = np.abs(differences - parts.sum(1))
            fits = (errors <= _ROUNDINGS * rounding).all(1)
            # An output that is as small as the rounding of the sum proves nothing.
            seen = (contributions > _ABOVE * rounding[:, None]).mean(2).min(1) >= 0.5
            for b in np.flatnonzero(fits & seen)[:1].tolist():
                return (self._outermost(a, name), *factors[b].tolist())
        return None

    def _outermost(self, state: _State, name: str) -> Point:
        """Returns the point with the same value, before the module `name`, whose own module is the outermost.

        Modules inside others do not run in every pass.
        """
        before = [s for s in self.states if s.time < self.began[name] or s is state]
        same = [s for s in before if s is state or s.key == state.key]
        return min(same, key=lambda s: (s.point.module.count(".") + bool(s.point.module), s.time)).point


def _channel_gain(y: Tensor, out: Tensor, eps: float) -> Tensor | None:
    """Returns v `[channels]` where out = u v ⊙ y with one u for a token; None otherwise, as after a bias."""
    ratio = out / torch.where(y == 0, torch.ones_like(y), y)
    reference = ratio.abs().median(1).values[:, None]
    # A padding token may be zero throughout, and carries no information.
    telling = reference[:, 0] > 0
    if not bool(telling.any()):
        return None
    y, out, ratio, reference = y[telling], out[telling], ratio[telling], reference[telling]
    # Tokens differ only by u: divided by it, all are v.
    by_token = ratio / reference
    gain = by_token.median(0).values
    off = (by_token - gain).abs() * reference * y.abs()
    if bool((off > 64 * eps * out.abs().amax()).any()):
        return None
    return torch.where(gain.abs() >= _LEAST_GAIN * gain.abs().median(), gain, 0.0)
