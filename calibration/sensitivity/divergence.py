"""A `Divergence` measures how far a changed model is from the original.

    next token   KL(base‖model) over the vocabulary, at every position of a row but the last
    class        KL(base‖model) over the classes, one figure a row
    embedding    1 − cosine of the mean last hidden state, one figure a row
    prediction   |y' − y|² / |y|² of a denoiser, one figure a call; without a probe

All are zero and flat at the original, so near it they are quadratic forms: ½ δᵀ F δ, with F the Fisher information.
`probe` draws a random function of the output whose gradient g has E[g gᵀ] = F: for next tokens or classes the negative
log-likelihood of one drawn from the model's own distribution; for an embedding its product with a random direction.
Then ½ E[(g · δ)²] is the divergence that a change δ causes, and one backward pass gives g at every layer.

A model that is changed a little has logits z + d with d = (h' − h) Wᵀ, and in these terms

    KL(base‖model) = ln Σ p exp(d) − Σ p d        p the base's distribution; logarithm and exponential by log1p, expm1

which avoids the cancellation in a difference of two log-probabilities. The product can then run in BF16: its relative
error is one of d and not of z (see `fast_matmul`).

A shift that all logits of a position share changes no distribution, and it can be far larger than the differences that
do: −33 where the logits differ by tenths. So the mean Σ p d is subtracted from d before the exponential, and the mean
row from the rows of W before they are rounded to BF16.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vecdot

from quant.calibration.fast_matmul import PairedWeight, difference_dtype, has_pairs
from quant.calibration.outputs.logits import Logits, class_logits, drawn, has_many_labels, logits_of
from quant.calibration.texts.rows import trial_rows
from quant.recipes.blocks import is_denoiser, output_of
from quant.recipes.layers import output_head


class NotFinite(ValueError):  # noqa: N818 -- a statement about the measured value
    """A measured value is NaN or infinite; the message names the row and token, or the group and format."""


def finite(value: float, position: str, quantity: str) -> float:
    """Returns `value`; raises NotFinite if it is NaN or infinite, with its position and quantity in the message."""
    if not math.isfinite(value):
        raise NotFinite(
            f"{position}: NaN or infinity in {quantity}; find the layer that makes it, or keep it in 16 bit"
        )
    return value


Later = Callable[[], float]
"""Waits for the device, and returns a value whose computation was started."""


def finite_sum(values: Tensor, name_of: Callable[[int], str], quantity: str) -> float:
    """Returns the float64 sum of values `[positions]`; NotFinite names the first bad position."""
    return start_sum(values, name_of, quantity)()


def start_sum(values: Tensor, name_of: Callable[[int], str], quantity: str) -> Later:
    """Returns `finite_sum` without waiting for a GPU, which can be given its next work meanwhile."""
    total, arrival = values.detach().double().sum(), None
    if total.is_cuda:
        # Reading `total` itself would wait for all work that was queued since.
        stream = torch.cuda.current_stream(total.device)
        total = torch.empty((), dtype=total.dtype, pin_memory=True, device="cpu").copy_(total, non_blocking=True)
        arrival = stream.record_event()

    def wait() -> float:
        if arrival is not None:
            arrival.synchronize()
        number = float(total)
        if not math.isfinite(number):
            finite(number, name_of(int((~values.isfinite()).nonzero()[0])), quantity)
        return number

    return wait


def divergence_of(model: nn.Module, rows: Tensor) -> "Divergence":
    """Returns the divergence for `model`: of next tokens with an output head, of classes for one vector a row."""
    if is_denoiser(model):
        return Prediction(model)
    head = output_head(model)
    if head is not None:
        return NextToken(model, head)
    with torch.no_grad():
        output = last_hidden(model(trial_rows(rows)))
    if output.dim() == 2:
        return Classes(model, labels=output.shape[1] if has_many_labels(model) else 1)
    return Embeddings(model)


class NextToken(Logits):
    """KL of next-token distributions."""

    unit = "nats: KL(base‖model) of the next token"
    probes = 1  # random probes for each row
    # Errors of different tokens of a row count as independent, as each token is compared by itself; an average over
    # tokens keeps only their common part.
    by_token = True

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        super().__init__(model, head)
        self.narrow: Tensor | None = None  # weight of the head for products of small differences
        self.paired: PairedWeight | None = None  # the same for the base's logits, on a GPU

    def count(self, rows: Tensor) -> int:
        """Returns the number of values that a sum over `rows` adds up."""
        return rows.shape[0] * (rows.shape[1] - 1)

    def reference(self, rows: Tensor, *, keep: bool = False) -> Any:
        """Returns the original model's output as `measure` compares with it; `keep` includes whole distributions."""
        with torch.no_grad():
            hidden = self.hidden(rows)
            parts = self.parts(hidden, with_gradient=False) if keep else []
            # A GPU's kernel takes logits, and turns them into probabilities itself.
            output = self._fast_logits if self._has_fast_logits(hidden) else self._p
            return hidden, [output(hidden[part]) for part in parts] or None

    def measure(self, rows: Tensor, reference: Any, first_row: int = 0) -> Later:
        """Starts to compute the summed divergence of the model as it is now; NotFinite names its row and token."""
        with torch.no_grad():
            hidden = self.hidden(rows)
            parts = self.parts(hidden, with_gradient=False)
            kl = [self._kl_of(hidden, reference, index, part) for index, part in enumerate(parts)]
            # One sum for all slices: a GPU is waited for once.
            quantity = "the divergence from the original model"
            return start_sum(torch.cat(kl), lambda i: self._position_name(rows, i, first_row), quantity)

    def _kl_of(self, hidden: Tensor, reference: Any, index: int, part: slice) -> Tensor:
        """Returns the divergence at the positions of slice `index`, float32 `[positions]`."""
        base, slices = reference
        if self._has_fast_logits(hidden):
            from quant.kernels.base.portable_divergence import kl_of_logits

            logits = self._fast_logits(base[part]) if slices is None else slices[index]
            return kl_of_logits(logits, self._difference(hidden[part], base[part], None))
        p = self._p(base[part]) if slices is None else slices[index]
        return _kl(p, self._difference(hidden[part], base[part], p).float())

    def _sum(self, values: Tensor, rows: Tensor, part: slice, quantity: str, first_row: int) -> float:
        return finite_sum(values, lambda i: self._position_name(rows, part.start + i, first_row), quantity)

    def _position_name(self, rows: Tensor, position: int, first_row: int) -> str:
        row, token = divmod(position, rows.shape[1] - 1)
        return f"row {first_row + row}, token {token}"

    def _difference(self, hidden: Tensor, base: Tensor, p: Tensor | None) -> Tensor:
        """Returns the logits of the model minus the base's logits; 0 for tokens that the base rules out by `p`."""
        # d = (h' − h) Wᵀ; a bias of the head would cancel, and a soft cap is not linear.
        if self.split and self.cap is None and type(self.head) is nn.Linear:
            if self.narrow is None:
                self.narrow, dtype = self.head.weight.detach().to(hidden.dtype), difference_dtype(hidden)
                if dtype is not None:
                    # The mean of its rows moves all logits together, so far that rounding to `dtype` would hide the
                    # differences between them.
                    self.narrow = (self.narrow - self.narrow.mean(dim=0)).to(dtype)
            return torch.nn.functional.linear((hidden - base).to(self.narrow.dtype), self.narrow)
        # A whole model may return −∞ for tokens that it rules out, and −∞ − (−∞) is NaN.
        difference = self.logits(hidden).float() - self.logits(base).float()
        return difference if self.split or p is None else difference.masked_fill(p == 0, 0)

    def nll(self, rows: Tensor, first_row: int = 0) -> float:
        """Returns the summed negative log-likelihood of the next tokens, in nats; raises as `measure` does."""
        targets = rows[:, 1:].flatten()
        total = 0.0
        with torch.no_grad():
            hidden = self.hidden(rows)
            for part in self.parts(hidden):
                nll = -self.logp(hidden[part]).gather(1, targets[part, None])[:, 0]
                total += self._sum(nll, rows, part, "the likelihood of the next token", first_row)
        return total

    def probe(self, rows: Tensor, generator: torch.Generator, first_row: int = 0) -> None:
        """Runs one backward pass from a random probe through the model as it is now; raises as `measure` does."""
        with torch.enable_grad():
            hidden = self.hidden(rows)
            # The head's backward pass runs slice by slice into `gradient`, and the body's once for the whole row: the
            # logits of a row never exist together.
            gradient = torch.empty_like(hidden)
            for part in self.parts(hidden):
                leaf = hidden[part].detach().requires_grad_(True)
                logp = self.logp(leaf)
                nll = -logp.gather(1, drawn(logp.detach().exp(), generator))[:, 0]
                self._sum(nll, rows, part, "the loss", first_row)
                (gradient[part],) = torch.autograd.grad(nll.sum(), leaf)
            hidden.backward(gradient)

    def _p(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden).float().softmax(dim=-1)

    def _has_fast_logits(self, hidden: Tensor) -> bool:
        return bool(self.split) and type(self.head) is nn.Linear and has_pairs(hidden)

    def _fast_logits(self, hidden: Tensor) -> Tensor:
        """Returns `logits` without a gradient, in pairs of BF16, where `_has_fast_logits` holds."""
        assert isinstance(self.head, nn.Linear)
        # Where they do not fit in memory, logits are computed again in every measurement.
        self.paired = self.paired or PairedWeight(self.head.weight)
        return self.capped(self.paired.linear(hidden, self.head.bias))


class Classes(NextToken):
    """KL for classifiers: the output for a row is one vector of logits, or of `labels` each a choice by itself."""

    unit = "nats: KL(base‖model) of the class"
    probes = 8
    by_token = False

    def __init__(self, model: nn.Module, labels: int = 1) -> None:
        super().__init__(model, None)
        self.labels = labels

    def count(self, rows: Tensor) -> int:
        return rows.shape[0] * self.labels

    def hidden(self, rows: Tensor) -> Tensor:
        return class_logits(logits_of(self.model, rows), self.model).flatten(0, -2)

    def _position_name(self, rows: Tensor, position: int, first_row: int) -> str:
        return f"row {first_row + position // self.labels}"


class Embeddings:
    """1 − cosine of mean-pooled embeddings."""

    unit = "1 − cosine similarity of the embeddings"
    probes = 8
    by_token = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def count(self, rows: Tensor) -> int:
        return rows.shape[0]

    def reference(self, rows: Tensor, *, keep: bool = False) -> Any:
        with torch.no_grad():
            return self._embed(rows)

    def measure(self, rows: Tensor, reference: Any, first_row: int = 0) -> Later:
        with torch.no_grad():
            return self._sum(1 - (self._embed(rows) * reference).sum(dim=-1).double(), first_row)

    def _sum(self, values: Tensor, first_row: int) -> Later:
        return start_sum(values, lambda i: f"row {first_row + i}", "the embedding")

    def probe(self, rows: Tensor, generator: torch.Generator, first_row: int = 0) -> None:
        with torch.enable_grad():
            embedding = self._embed(rows)
            # Standard normal, drawn on the CPU: E[g gᵀ] is then the identity on embeddings, as 1 − cosine needs.
            axis = torch.randn(embedding.shape, generator=generator, dtype=torch.float32, device="cpu").to(embedding)
            values = (embedding * axis).sum(dim=-1)
            self._sum(values, first_row)()
            values.sum().backward()

    def _embed(self, rows: Tensor) -> Tensor:
        """Returns the mean of the last hidden states, normalized: `[rows, hidden]`."""
        return torch.nn.functional.normalize(last_hidden(self.model(rows)).float().mean(dim=1), dim=-1)


class Prediction:
    """The relative squared error of what a denoiser predicts, noise or velocity."""

    unit = "relative squared error of the prediction"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def count(self, rows: Tensor) -> int:
        return len(rows)

    def reference(self, rows: Tensor, *, keep: bool = False) -> Any:
        with torch.no_grad():
            return prediction_of(self.model(rows))

    def measure(self, rows: Tensor, reference: Any, first_row: int = 0) -> Later:
        with torch.no_grad():
            error = (prediction_of(self.model(rows)) - reference).square().sum() / reference.square().sum()
        return start_sum(error[None], lambda _: f"call {first_row}", "the prediction")


def prediction_of(result: Any) -> Tensor:
    """Returns what a denoiser predicts, flat and in float32; Z-Image gives a list of images."""
    first = result[0] if isinstance(result, tuple | list | Mapping) else result
    parts = first if isinstance(first, list) else [first]
    return torch.cat([part.float().flatten() for part in parts])


Divergence = NextToken | Embeddings | Prediction
"""A distance to the original model, over rows of token ids, or calls of a denoiser."""


def last_hidden(result: Any) -> Tensor:
    """Returns the last hidden states in an encoder's output, `[rows, tokens, hidden]`."""
    return result.last_hidden_state if hasattr(result, "last_hidden_state") else output_of(result)


def _kl(p: Tensor, d: Tensor) -> Tensor:
    """Returns KL from each distribution to the one whose logits are larger by `d`, float32 `[positions]`.

    Both are float32 `[positions, vocabulary]`. Sums of `p`, which a softmax over a large vocabulary gives to 2⁻¹⁵ only,
    are divided out, and a constant added to a whole row of `d` does not matter.
    """
    total = p.sum(dim=-1)
    # By Jensen's inequality Σ p exp(d) is at least 1 once Σ p d is 0, so no digits of log1p's argument cancel. The
    # rounding error of that mean is subtracted at the end.
    d = d - (vecdot(p, d) / total)[:, None]
    kl: Tensor = torch.log1p(vecdot(p, d.expm1()) / total) - vecdot(p, d) / total
    # The exponential overflows where a logit rises by more than 88 above the mean.
    far = ~kl.isfinite()
    if bool(far.any()):
        p64, d64 = p[far].double(), d[far].double()
        weight = p64 / p64.sum(dim=-1, keepdim=True)
        kl[far] = (torch.logsumexp(weight.log() + d64, dim=-1) - vecdot(weight, d64)).to(kl.dtype)
    return kl
