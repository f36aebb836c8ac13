"""An `Evaluation` holds the measured figures of one model, on one text or several."""

from __future__ import annotations

from dataclasses import dataclass

from quant.recipes.json_data import JsonData


@dataclass(frozen=True)
class OutputDistance(JsonData):
    """How far one output of a model is from the baseline's.

    Attributes:
        name: the name as the model calls it.
        cosine: mean over the inputs of 1 − cosine similarity.
        error: norm of the difference over the norm of the baseline's output, all inputs together.
    """

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
