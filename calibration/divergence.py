"""How far a changed model is from the original: next-token distributions, or embeddings where there are none.

    next token   KL(base‖model) over the vocabulary, at every position of a row but the last
    embedding    1 − cosine of the mean last hidden state, one figure a row

Both are zero and flat at the original, so near it they are quadratic forms: ½ δᵀ F δ, with F the Fisher information.
`probe` draws a random function of the output whose gradient g has E[g gᵀ] = F: for the next token the negative
log-likelihood of a token that the model itself proposes; for an embedding its product with a random direction. Then
½ E[(g · δ)²] is the divergence that a change δ causes, and one backward pass gives g at every layer.

Logits are what does not fit, so the output head is left out of the forward pass and applied to slices of positions.
A model that does more than its head to the hidden states (soft caps, scales) is taken whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from quant.calibration.blocks import output_of

_SLICE_ELEMENTS = 1 << 23


class Divergence(Protocol):
    """A distance to the original model, over rows of token ids.

    Attributes:
        unit: what a value means.
        probes: random probes that a row needs.
        by_token: whether errors of different tokens of a row may be taken for independent. They may where each
            token is compared for itself; where tokens are averaged, it is what they have in common that is left.
    """

    @property
    def unit(self) -> str: ...

    @property
    def probes(self) -> int: ...

    @property
    def by_token(self) -> bool: ...

    def count(self, rows: torch.Tensor) -> int:
        """How many values a sum over `rows` is a sum of."""
        ...

    def reference(self, rows: torch.Tensor, *, keep: bool = False) -> Any:
        """What must be remembered of the original model's output, to be called with it as it is now.

        Args:
            rows: the text.
            keep: remember whole distributions, which are large, where they would have to be worked out every time.
        """
        ...

    def measure(self, rows: torch.Tensor, reference: Any) -> float:
        """Summed divergence of the model as it is now."""
        ...

    def probe(self, rows: torch.Tensor, generator: torch.Generator) -> None:
        """One backward pass from a random probe at the model as it is now."""
        ...

    def descend(self, rows: torch.Tensor, reference: Any) -> float:
        """One backward pass from the summed divergence, which is returned."""
        ...


def divergence_of(model: nn.Module) -> Divergence:
    """The one that fits `model`: next tokens if it has an output head."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    return Embeddings(model) if head is None else NextToken(model, head)


class NextToken:
    """KL of next-token distributions."""

    unit = "nats: KL(base‖model) of the next token"
    probes = 1
    by_token = True

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.model, self.head = model, head
        self.split: bool | None = None

    def count(self, rows: torch.Tensor) -> int:
        return rows.shape[0] * (rows.shape[1] - 1)

    def reference(self, rows: torch.Tensor, *, keep: bool = False) -> Any:
        with torch.no_grad():
            hidden = self._hidden(rows)
            return [self._logp(hidden[part]) for part in self._parts(hidden)] if keep else hidden

    def measure(self, rows: torch.Tensor, reference: Any) -> float:
        total = 0.0
        with torch.no_grad():
            hidden = self._hidden(rows)
            for place, part in enumerate(self._parts(hidden)):
                total += float(_kl(self._base(reference, place, part), self._logp(hidden[part])).double().sum())
        return total

    def nll(self, rows: torch.Tensor) -> float:
        """Summed negative log-likelihood of the next tokens, in nats."""
        targets = rows[:, 1:].flatten()
        total = 0.0
        with torch.no_grad():
            hidden = self._hidden(rows)
            for part in self._parts(hidden):
                total -= float(self._logp(hidden[part]).gather(1, targets[part, None]).double().sum())
        return total

    def probe(self, rows: torch.Tensor, generator: torch.Generator) -> None:
        def loss(place: int, part: slice, logp: torch.Tensor) -> torch.Tensor:
            # On the CPU, so that the same seed draws the same tokens on every device.
            likely = logp.detach().exp().cpu()
            drawn = torch.multinomial(likely, 1, generator=generator).to(logp.device)
            return -logp.gather(1, drawn).sum()

        self._backward(rows, loss)

    def descend(self, rows: torch.Tensor, reference: Any) -> float:
        return self._backward(rows, lambda place, part, logp: _kl(self._base(reference, place, part), logp).sum())

    def _backward(self, rows: torch.Tensor, loss: Callable[[int, slice, torch.Tensor], torch.Tensor]) -> float:
        """Backward from a sum over positions, the head's share slice by slice."""
        with torch.enable_grad():
            hidden = self._hidden(rows)
            gradient = torch.empty_like(hidden)
            total = 0.0
            for place, part in enumerate(self._parts(hidden)):
                leaf = hidden[part].detach().requires_grad_(True)
                value = loss(place, part, self._logp(leaf))
                (gradient[part],) = torch.autograd.grad(value, leaf)
                total += float(value.detach())
            hidden.backward(gradient)
        return total

    def _base(self, reference: Any, place: int, part: slice) -> torch.Tensor:
        if isinstance(reference, list):
            return reference[place]  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._logp(reference[part])

    def _parts(self, hidden: torch.Tensor) -> list[slice]:
        with torch.no_grad():
            return _slices(len(hidden), self._logits(hidden[:1]).shape[-1])

    def _logp(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits(hidden).float().log_softmax(dim=-1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden) if self.split else hidden  # type: ignore[no-any-return]

    def _hidden(self, rows: torch.Tensor) -> torch.Tensor:
        """Inputs of the head `[positions, hidden]`, or logits `[positions, vocabulary]` of a model taken whole."""
        if self.split is None:
            self.split = self._can_split(rows[:1, :16])
        if not self.split:
            return self._forward(rows)[:, :-1].flatten(0, 1)
        return self._before_head(rows)[:, :-1].flatten(0, 1)

    def _forward(self, rows: torch.Tensor) -> torch.Tensor:
        result = self.model(rows)
        return result.logits if hasattr(result, "logits") else output_of(result)  # type: ignore[no-any-return]

    def _before_head(self, rows: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def stand_in(hidden: torch.Tensor) -> torch.Tensor:
            seen.append(hidden)
            return hidden[..., :1].detach()

        with _replaced_forward(self.head, stand_in):
            self.model(rows)
        return seen[-1]

    def _can_split(self, rows: torch.Tensor) -> bool:
        with torch.no_grad():
            expected = self._forward(rows).float()
            found = self.head(self._before_head(rows)).float()
        # Rounding differs by far less than this even in BF16, a forgotten factor by more.
        same = expected.shape == found.shape
        return same and bool((expected - found).abs().max() <= 0.01 * expected.abs().max())


class Embeddings:
    """1 − cosine of mean-pooled embeddings."""

    unit = "1 − cosine similarity of the embeddings"
    probes = 8
    by_token = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def count(self, rows: torch.Tensor) -> int:
        return rows.shape[0]

    def reference(self, rows: torch.Tensor, *, keep: bool = False) -> Any:
        with torch.no_grad():
            return self._embed(rows)

    def measure(self, rows: torch.Tensor, reference: Any) -> float:
        with torch.no_grad():
            return float((1 - (self._embed(rows) * reference).sum(dim=-1).double()).sum())

    def probe(self, rows: torch.Tensor, generator: torch.Generator) -> None:
        with torch.enable_grad():
            embedding = self._embed(rows)
            direction = torch.randn(embedding.shape, generator=generator).to(embedding)
            (embedding * direction).sum().backward()

    def descend(self, rows: torch.Tensor, reference: Any) -> float:
        with torch.enable_grad():
            loss = (1 - (self._embed(rows) * reference).sum(dim=-1)).sum()
            loss.backward()
        return float(loss.detach())

    def _embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean of the last hidden states, normalized: `[rows, hidden]`."""
        result = self.model(rows)
        hidden = result.last_hidden_state if hasattr(result, "last_hidden_state") else output_of(result)
        return torch.nn.functional.normalize(hidden.float().mean(dim=1), dim=-1)


def _kl(base: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """KL(base‖model) at each position, from log-probabilities `[positions, vocabulary]`."""
    p = base.exp()
    return ((base - logp).masked_fill(p == 0, 0) * p).sum(dim=-1)


def _slices(positions: int, vocabulary: int) -> list[slice]:
    step = max(_SLICE_ELEMENTS // vocabulary, 1)
    return [slice(start, min(start + step, positions)) for start in range(0, positions, step)]


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    module.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.forward
