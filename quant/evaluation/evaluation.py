"""An `Evaluation` holds the measured figures of one model, on one text or several."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from quant.base.errors import html_table
from quant.base.json_files import JsonData

# How a loss is written on the screen, in reports and in model cards.


def loss_text(value: float) -> str:
    """Returns a loss in nats with four decimals, or with three significant digits where these would hide it."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


@dataclass(frozen=True)
class OutputDistance(JsonData):
    """The distance of one output of a model from the baseline's."""

    name: str
    cosine: float
    error: float


@dataclass(frozen=True)
class Evaluation(JsonData):
    """The figures of one model, compared with its baseline where there is one.

    Attributes:
        perplexity: exp of the mean negative log-likelihood; None for a model that predicts no tokens.
        kl: mean KL(baseline‖model) in nats; None without a baseline.
        top1: share of positions at which both models' likeliest token is the same; None without a baseline.
        tokens: number of predictions that the means are over, or of tokens of the embeddings, or of inputs.
        seconds: time taken, baseline included.
        baseline_perplexity: the baseline's own perplexity; None without one.
        cosine: mean 1 − cosine similarity of the embeddings of model and baseline; None for a model with logits.
        error: relative error of the outputs of such a model; of several, the largest.
        outputs: both figures of each output, where the model has several.
        unit: the things that `tokens` counts.
        rows: number of rows of text, or of inputs, that the means are over.
        interval: low and high end of the interval of 95 % around `kl`, or `cosine`; None without one, or for one row.
        text: name of the text, as the user gave it.
        others: figures on further texts.
    """

    perplexity: float | None
    kl: float | None
    top1: float | None
    tokens: int
    seconds: float
    baseline_perplexity: float | None = None
    cosine: float | None = None
    error: float | None = None
    outputs: tuple[OutputDistance, ...] = ()
    unit: str = "predictions"
    rows: int | None = None
    interval: tuple[float, ...] | None = None
    text: str | None = None
    others: tuple[Evaluation, ...] = ()

    def __repr__(self) -> str:
        """Returns the figures of every text in one line."""
        return f"Evaluation({'; '.join(each._in_words() for each in self.texts)})"

    def _repr_html_(self) -> str:
        """Returns a table with a row for each text, for notebooks."""
        columns = [each._figures() for each in self.texts]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        rows = [
            (each.text or "", *(c.get(label, "–") for label in labels))
            for each, c in zip(self.texts, columns, strict=True)
        ]
        return html_table(("text", *labels), rows)

    def _in_words(self) -> str:
        name = "" if self.text is None else f"{PurePath(self.text).name}: "
        return name + ", ".join(f"{label} {value}" for label, value in self._figures().items())

    def _figures(self) -> dict[str, str]:
        """Returns the figures that were measured, by label."""
        interval = "" if self.interval is None else f" (95%: {self.interval[0]:.4g} to {self.interval[1]:.4g})"
        figures = {}
        if self.kl is not None:
            figures["KL"] = f"{self.kl:.4g} nats{interval}"
        if self.cosine is not None:
            figures["1 − cosine"] = f"{self.cosine:.4g}{interval}"
        if self.error is not None:
            figures["relative error"] = f"{self.error:.2%}"
        if self.perplexity is not None:
            before = "" if self.baseline_perplexity is None else f" (before: {self.baseline_perplexity:.4g})"
            figures["perplexity"] = f"{self.perplexity:.4g}{before}"
        if self.top1 is not None:
            figures["top-1 agreement"] = f"{self.top1:.1%}"
        return {**figures, self.unit: f"{self.tokens:,}"}

    @property
    def texts(self) -> tuple[Evaluation, ...]:
        """The figures on every text."""
        return self, *self.others

    @property
    def loss(self) -> float | None:
        """KL, or the cosine of an encoder; None without a baseline."""
        return self.cosine if self.kl is None else self.kl

    @property
    def worst(self) -> Evaluation:
        """The figures on the text on which the model is furthest from its baseline."""
        # Without a baseline all losses are None, and the first text is returned.
        return max(self.texts, key=lambda each: each.loss or 0.0)
