"""A `Divergence` measures how far a changed model is from the original.

    next token   KL(base‖model) over the vocabulary, at every position of a row but the last
    class        KL(base‖model) over the classes, one figure a row
    embedding    1 − cosine of the mean last hidden state, one figure a row

All are zero and flat at the original, so near it they are quadratic forms: ½ δᵀ F δ, with F the Fisher information.
`probe` draws a random function of the output whose gradient g has E[g gᵀ] = F: for the next token or class the
negative log-likelihood of one that the model itself proposes; for an embedding its product with a random direction.
Then ½ E[(g · δ)²] is the divergence that a change δ causes, and one backward pass gives g at every layer.

A model that is changed a little has logits z + d with d = (h' − h) Wᵀ, and in these terms

    KL(base‖model) = ln Σ p exp(d) − Σ p d        p the base's distribution; logarithm and exponential by log1p, expm1

which loses nothing to cancellation, as a difference of two log-probabilities does. It also lets the product run in
BF16: its relative error is one of d and not of z (see `fast_matmul`).

What all logits of a position gain together changes no distribution, and it can be far larger than what does: −33 where
the logits differ by tenths. So d is taken from its mean Σ p d before the exponential, and the rows of W from their mean
before they are rounded to BF16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.linalg import vecdot

from quant.calibration.blocks import output_of
from quant.calibration.fast_matmul import difference_dtype
from quant.calibration.sensitivity.logits import Logits, logits_of
from quant.calibration.texts.rows import few_of
from quant.recipes.layers import output_head


class NotFinite(ValueError):  # noqa: N818 -- what it says of a measured value
    """A measured value is NaN or infinite; the message names the row and token, or the group and format."""


def finite(value: float, place: str, what: str) -> float:
    """`value`, unless it is NaN or infinite: then the error NotFinite says so of `what` at `place`."""
    if not math.isfinite(value):
        raise NotFinite(f"{place}: NaN or infinity in {what}; find the layer that makes it, or keep it in 16 bit")
    return value


def finite_sum(values: torch.Tensor, place: Callable[[int], str], what: str) -> float:
    """The sum in float64.

    Args:
        values: one for each position, `[positions]`.
        place: what a position is called.
        what: what the values are.

    Raises:
        NotFinite: a value is NaN or infinite; the first place is named.
    """
    total = float(values.detach().double().sum())
    if not math.isfinite(total):
        finite(total, place(int((~values.isfinite()).nonzero()[0])), what)
    return total


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

    def measure(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        """Summed divergence of the model as it is now.

        Args:
            rows: the text.
            reference: what `reference` gave for it.
            first_row: number of its first row, for errors.

        Raises:
            NotFinite: NaN or infinity at a position.
        """
        ...

    def probe(self, rows: torch.Tensor, generator: torch.Generator, first_row: int = 0) -> None:
        """One backward pass from a random probe at the model as it is now; raises as `measure` does."""
        ...

    def descend(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        """One backward pass from the summed divergence, which is returned; raises as `measure` does."""
        ...


def divergence_of(model: nn.Module, rows: torch.Tensor) -> Divergence:
    """The one that fits `model`: next tokens if it has an output head, classes if it gives one vector for each row."""
    head = output_head(model)
    if head is not None:
        return NextToken(model, head)
    with torch.no_grad():
        found = last_hidden(model(few_of(rows)))
    return Classes(model) if found.dim() == 2 else Embeddings(model)


class NextToken(Logits):
    """KL of next-token distributions."""

    unit = "nats: KL(base‖model) of the next token"
    probes = 1
    by_token = True

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        super().__init__(model, head)
        self.narrow: torch.Tensor | None = None  # weight of the head for products of small differences

    def count(self, rows: torch.Tensor) -> int:
        return rows.shape[0] * (rows.shape[1] - 1)

    def reference(self, rows: torch.Tensor, *, keep: bool = False) -> Any:
        with torch.no_grad():
            hidden = self.hidden(rows)
            return hidden, [self._p(hidden[part]) for part in self.parts(hidden)] if keep else None

    def measure(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        total = 0.0
        with torch.no_grad():
            hidden = self.hidden(rows)
            for place, part in enumerate(self.parts(hidden)):
                p = self._base(reference, place, part)
                found = _kl(p, self._difference(hidden[part], reference[0][part], p))
                total += self._sum(found, rows, part, "the divergence from the original model", first_row)
        return total

    def _sum(self, values: torch.Tensor, rows: torch.Tensor, part: slice, what: str, first_row: int) -> float:
        return finite_sum(values, lambda i: self._place(rows, part.start + i, first_row), what)

    def _place(self, rows: torch.Tensor, position: int, first_row: int) -> str:
        """What errors call a position."""
        row, token = divmod(position, rows.shape[1] - 1)
        return f"row {first_row + row}, token {token}"

    def _difference(self, hidden: torch.Tensor, base: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Logits of the model less those of the base; 0 where the base rules a token out."""
        if self.split and self.cap is None and type(self.head) is nn.Linear:
            if self.narrow is None:
                self.narrow = _narrowed(self.head.weight.detach().to(hidden.dtype), difference_dtype(hidden))
            return torch.nn.functional.linear((hidden - base).to(self.narrow.dtype), self.narrow).float()
        difference = self.logits(hidden).float() - self.logits(base).float()
        return difference if self.split else difference.masked_fill(p == 0, 0)

    def nll(self, rows: torch.Tensor, first_row: int = 0) -> float:
        """Summed negative log-likelihood of the next tokens, in nats; raises as `measure` does."""
        targets = rows[:, 1:].flatten()
        total = 0.0
        with torch.no_grad():
            hidden = self.hidden(rows)
            for part in self.parts(hidden):
                found = -self.logp(hidden[part]).gather(1, targets[part, None])[:, 0]
                total += self._sum(found, rows, part, "the likelihood of the next token", first_row)
        return total

    def probe(self, rows: torch.Tensor, generator: torch.Generator, first_row: int = 0) -> None:
        def loss(place: int, part: slice, logp: torch.Tensor) -> torch.Tensor:
            return -logp.gather(1, _drawn(logp.detach().exp(), generator))[:, 0]

        self._backward(rows, loss, first_row)

    def descend(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        def loss(place: int, part: slice, logp: torch.Tensor) -> torch.Tensor:
            p = self._base(reference, place, part)
            return (torch.xlogy(p, p) - p * logp.masked_fill(p == 0, 0)).sum(dim=-1)

        return self._backward(rows, loss, first_row)

    def _backward(
        self, rows: torch.Tensor, loss: Callable[[int, slice, torch.Tensor], torch.Tensor], first_row: int
    ) -> float:
        """Backward from the sum of a loss of each position, the head's share slice by slice."""
        with torch.enable_grad():
            hidden = self.hidden(rows)
            gradient = torch.empty_like(hidden)
            total = 0.0
            for place, part in enumerate(self.parts(hidden)):
                leaf = hidden[part].detach().requires_grad_(True)
                values = loss(place, part, self.logp(leaf))
                total += self._sum(values, rows, part, "the loss", first_row)
                (gradient[part],) = torch.autograd.grad(values.sum(), leaf)
            hidden.backward(gradient)
        return total

    def _base(self, reference: Any, place: int, part: slice) -> torch.Tensor:
        hidden, kept = reference
        if kept is not None:
            return kept[place]  # type: ignore[no-any-return]
        with torch.no_grad():
            return self._p(hidden[part])

    def _p(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits(hidden).float().softmax(dim=-1)


class Classes(NextToken):
    """KL of the classes that a model tells rows into: what it gives for a row is one vector of logits."""

    unit = "nats: KL(base‖model) of the class"
    probes = 8
    by_token = False

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, None)

    def count(self, rows: torch.Tensor) -> int:
        return rows.shape[0]

    def hidden(self, rows: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, rows)

    def _place(self, rows: torch.Tensor, position: int, first_row: int) -> str:
        return f"row {first_row + position}"


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

    def measure(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        with torch.no_grad():
            return self._sum(1 - (self._embed(rows) * reference).sum(dim=-1).double(), first_row)

    def _sum(self, values: torch.Tensor, first_row: int) -> float:
        return finite_sum(values, lambda i: f"row {first_row + i}", "the embedding")

    def probe(self, rows: torch.Tensor, generator: torch.Generator, first_row: int = 0) -> None:
        with torch.enable_grad():
            embedding = self._embed(rows)
            direction = torch.randn(embedding.shape, generator=generator).to(embedding)
            values = (embedding * direction).sum(dim=-1)
            self._sum(values, first_row)
            values.sum().backward()

    def descend(self, rows: torch.Tensor, reference: Any, first_row: int = 0) -> float:
        with torch.enable_grad():
            values = 1 - (self._embed(rows) * reference).sum(dim=-1)
            total = self._sum(values, first_row)
            values.sum().backward()
        return total

    def _embed(self, rows: torch.Tensor) -> torch.Tensor:
        """Mean of the last hidden states, normalized: `[rows, hidden]`."""
        return torch.nn.functional.normalize(last_hidden(self.model(rows)).float().mean(dim=1), dim=-1)


def last_hidden(result: Any) -> torch.Tensor:
    """The last hidden states in what an encoder returns, `[rows, tokens, hidden]`."""
    return result.last_hidden_state if hasattr(result, "last_hidden_state") else output_of(result)


def _kl(p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """KL of distributions to those whose logits are larger by `d`, float32 `[positions]`.

    Args:
        p: float32 `[positions, vocabulary]`; its sums, which a softmax over a large vocabulary gives to 2⁻¹⁵ only, are
            divided out.
        d: float32 of the same shape; what is added to a whole row of it does not matter.
    """
    total = p.sum(dim=-1)
    # By Jensen's inequality Σ p exp(d) is at least 1 once Σ p d is 0, so no digits of log1p's argument cancel. What
    # rounding leaves of that mean is taken out at the end.
    d = d - (vecdot(p, d) / total)[:, None]
    found: torch.Tensor = torch.log1p(vecdot(p, d.expm1()) / total) - vecdot(p, d) / total
    # The exponential overflows where a logit rises by more than 88 above the mean.
    far = ~found.isfinite()
    if bool(far.any()):
        p64, d64 = p[far].double(), d[far].double()
        weight = p64 / p64.sum(dim=-1, keepdim=True)
        found[far] = (torch.logsumexp(weight.log() + d64, dim=-1) - vecdot(weight, d64)).to(found.dtype)
    return found


def _narrowed(weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The head's weight `[vocabulary, hidden]` in `dtype`, less the mean of its rows; None leaves it as it is.

    The mean moves all logits together, and so far that rounding to `dtype` would hide what moves them apart.
    """
    return weight if dtype is None else (weight - weight.mean(dim=0)).to(dtype)


def _drawn(p: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token for each position of `p` `[positions, vocabulary]`, int64 `[positions, 1]`, by its distribution."""
    # The chances come from the CPU, so that the same seed draws the same tokens on every device.
    chance = torch.rand(len(p), 1, generator=generator).to(p.device)
    upto = p.cumsum(dim=-1)
    return torch.searchsorted(upto, chance * upto[:, -1:], right=True).clamp_(max=p.shape[-1] - 1)
