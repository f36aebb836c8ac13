"""An `Evaluation` holds the measured figures of one model, on one text or several, and `Examples` show what they mean.

A mean over thousands of tokens says how much was lost, and not where. While `evaluate` compares two models,
`WorstPredictions` keeps the positions with the largest KL(base‖model); `continuations` has both models continue a
prompt by their likeliest tokens, and `output_errors` compares the outputs of their layers on one row.

A `Fingerprint` recognises a model by its logits for fixed token ids: `quantize` writes one into the report, and `quant
check` loads the checkpoint, runs the same ids and compares the logits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import counted, html_table, loss_text
from quant.base.json_files import JsonData
from quant.calibration.outputs.logits import Logits, logits_of, run_probe
from quant.calibration.ranks import gathered
from quant.calibration.session import device_of
from quant.recipes.blocks import output_of, removing

Decode = Callable[[Sequence[int]], str]
"""A function from token ids to text."""
_CONTEXT = 24  # tokens that are shown before a prediction
_POSITIONS = 64  # of a row, whose layer outputs are compared


@dataclass(frozen=True)
class Prediction(JsonData):
    """One prediction of the next token, by the original model and by the quantized one."""

    text: str | None
    context: str
    token: str
    kl: float  # KL(base‖model) in nats
    before: float
    after: float
    likeliest_before: str
    likeliest_after: str


@dataclass(frozen=True)
class Continuation(JsonData):
    """A prompt and the likeliest tokens that the original and the quantized model continue it with."""

    prompt: str
    before: str
    after: str


@dataclass(frozen=True)
class Examples(JsonData):
    """Examples of a loss, for readers."""

    predictions: tuple[Prediction, ...] = ()
    # one text before and after; None for a model that is too large to write one in seconds
    continuation: Continuation | None = None


class WorstPredictions:
    """Keeps the predictions with the largest KL while `evaluate` runs."""

    def __init__(self, count: int, decode: Decode) -> None:
        self.count, self.decode = count, decode
        self.text: str | None = None  # name of the text that is evaluated now
        self._kept: list[Prediction] = []

    def look(self, logits: Sequence[Logits], hidden: Sequence[Tensor], batch: Tensor, kl: Tensor) -> None:
        """Adds the worst predictions of a batch of ids `[rows, seqlen]`, with `kl` of each, row after row."""
        per_row = batch.shape[1] - 1
        values, positions = kl.topk(min(self.count, len(kl)))
        # Probabilities of these few positions, from hidden states that are at hand: no model runs again.
        after, before = (
            each.logp(states[positions.to(states.device)]).exp().cpu()
            for each, states in zip(logits, hidden, strict=True)
        )
        for index, position in enumerate(positions.tolist()):
            row, column = divmod(position, per_row)
            ids, target = batch[row].tolist(), int(batch[row, column + 1])
            context, token = self.decode(ids[max(0, column + 1 - _CONTEXT) : column + 1]), self.decode([target])
            figures = float(values[index]), float(before[index, target]), float(after[index, target])
            likeliest = self.decode([int(before[index].argmax())]), self.decode([int(after[index].argmax())])
            self._kept.append(Prediction(self.text, context, token, *figures, *likeliest))
        self._kept = self._largest(self._kept)

    def of_all_ranks(self) -> tuple[Prediction, ...]:
        """Returns the worst predictions of all ranks, which have to call this together; the largest KL first."""
        return tuple(self._largest(each for part in gathered(self._kept) for each in part))

    def _largest(self, predictions: Iterable[Prediction]) -> list[Prediction]:
        return sorted(predictions, key=lambda each: -each.kl)[: self.count]


def continuations(
    model: nn.Module, baseline: nn.Module, prompt: Sequence[int], decode: Decode, *, tokens: int
) -> Continuation:
    """Returns `prompt` and its continuations by both models with their likeliest tokens."""
    texts = []
    for each in (baseline, model):
        # Without a KV cache, which models that are prepared for measuring do not have: texts are short.
        ids = list(prompt)
        for _ in range(tokens):
            ids.append(int(logits_of(each, torch.tensor([ids], device=device_of(each)))[0, -1].argmax()))
        texts.append(decode(ids[len(prompt) :]))
    return Continuation(decode(prompt), *texts)


def output_errors(model: nn.Module, baseline: nn.Module, row: Tensor, names: Iterable[str]) -> dict[str, float]:
    """Returns the relative error ‖y_q − y‖ / ‖y‖ of the outputs of layers on one row of token ids `[seqlen]`, by name.

    The inputs of a quantized layer differ already by the layers before it. A solver such as gptq moves weights away
    from their originals to bring these outputs closer, so the error of the weights alone would call it worse than
    rounding to nearest. Layers that are no module of both models, such as experts that are fused in one of them, and
    outputs of zeros have no entry. Of each output 64 positions are compared, so that large ones fit into memory.
    """
    modules = [dict(each.named_modules()) for each in (model, baseline)]
    names = [name for name in names if all(name in each for each in modules)]
    after, before = (_outputs(each, row, names) for each in (model, baseline))
    errors = {}
    for name in names:
        if name in after and name in before and after[name].shape == before[name].shape:
            norm = float(before[name].double().norm())
            if norm:
                errors[name] = float((after[name].double() - before[name].double()).norm()) / norm
    return errors


def _outputs(model: nn.Module, row: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            values = output_of(output)
            flat = values.reshape(-1, values.shape[-1])
            outputs[name] = flat[:: max(len(flat) // _POSITIONS, 1)].float().cpu()

        return hook

    with removing(model.get_submodule(name).register_forward_hook(keep(name)) for name in names):
        model(row[None].to(device_of(model)))
    return outputs


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
        accuracy: share of the labelled rows whose likeliest class is the label; None without labels.
        baseline_accuracy: the baseline's own accuracy; None without one.
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
    accuracy: float | None = None
    baseline_accuracy: float | None = None
    text: str | None = None
    others: "tuple[Evaluation, ...]" = ()

    def __repr__(self) -> str:
        """Returns the figures of every text in one line."""
        names = ["" if each.text is None else f"{PurePath(each.text).name}: " for each in self.texts]
        figures = [", ".join(map(" ".join, each._counted_figures.items())) for each in self.texts]
        return f"Evaluation({'; '.join(map(''.join, zip(names, figures, strict=True)))})"

    def _repr_html_(self) -> str:
        columns = [each._counted_figures for each in self.texts]
        labels = list(dict.fromkeys(label for column in columns for label in column))
        rows = [
            (each.text or "", *(c.get(label, "–") for label in labels))
            for each, c in zip(self.texts, columns, strict=True)
        ]
        return html_table(("text", *labels), rows)

    @property
    def figures(self) -> dict[str, str]:
        """The figures that were measured, by label; the loss comes first."""
        figures = {}
        if self.kl is not None:
            figures["KL"] = f"{loss_text(self.kl)} nats{self.interval_text}"
        if self.cosine is not None:
            error = "" if self.error is None else f"; relative error {self.error:.2%}"
            figures["embeddings"] = f"{loss_text(self.cosine)}{self.interval_text}, 1 − cosine to those before{error}"
        if self.perplexity is not None:
            base = self.baseline_perplexity
            change = "" if base is None else f", {base:.2f} before ({100 * (self.perplexity / base - 1):+z.1f}%)"
            figures["perplexity"] = f"{self.perplexity:.2f}{change}"
        if self.top1 is not None:
            figures["top-1 agreement"] = f"{100 * self.top1:.1f}%"
        if self.accuracy is not None:
            before = "" if self.baseline_accuracy is None else f", {self.baseline_accuracy:.1%} before"
            figures["accuracy"] = f"{self.accuracy:.1%}{before}"
        return figures

    @property
    def _counted_figures(self) -> dict[str, str]:
        return {**self.figures, self.unit: f"{self.tokens:,}"}

    @property
    def interval_text(self) -> str:
        """The interval over rows (Student's t) in parentheses, after a blank; empty without one."""
        if self.interval is None:
            return ""
        low, high = map(loss_text, self.interval)
        return f" (95% over {counted(self.rows or 0, 'row')}: {low}–{high})"

    @property
    def texts(self) -> "tuple[Evaluation, ...]":
        """The figures on every text."""
        return self, *self.others

    @property
    def loss(self) -> float | None:
        """KL, or the cosine of an encoder; None without a baseline."""
        return self.cosine if self.kl is None else self.kl

    @property
    def worst(self) -> "Evaluation":
        """The figures on the text on which the model is furthest from its baseline."""
        # Without a baseline all losses are None, and the first text is returned.
        return max(self.texts, key=lambda each: each.loss or 0.0)


_PROMPT_TOKENS = 16
_KEPT_LOGITS = 8
# Logits agree if they differ by at most this share of their standard deviation.
_TOLERANCE = 0.25


@dataclass(frozen=True)
class Fingerprint(JsonData):
    """The largest logits of a model after fixed token ids."""

    columns: tuple[int, ...]
    logits: tuple[float, ...]
    deviation: float


def fingerprint(model: nn.Module) -> Fingerprint:
    """Returns the fingerprint of a model."""
    logits = _last_logits(model)
    values, columns = logits.topk(min(_KEPT_LOGITS, len(logits)))
    deviation = float(logits.std(correction=0) if len(logits) > 1 else logits.abs())  # a single logit has none
    return Fingerprint(tuple(columns.tolist()), tuple(values.tolist()), deviation)


def fingerprint_problem(model: nn.Module, expected: Fingerprint | None) -> str | None:
    """Returns why a model is not the one of `expected`, or that its logits hold NaN. None if neither.

    Machines sum in different orders, and rounding of inputs amplifies the differences. So logits count as the same
    within a quarter of their standard deviation. Without a fingerprint only NaN and infinity are looked for.
    """
    try:
        logits = _last_logits(model)
    except ValueError as error:
        return str(error)
    if expected is None:
        return None
    if max(expected.columns, default=0) >= len(logits):
        return f"the model has {len(logits):,} logits, and the fingerprint is of more"
    largest_difference = float(
        (logits[list(expected.columns)] - torch.tensor(expected.logits, dtype=torch.float32, device="cpu")).abs().max()
    )
    if largest_difference <= _TOLERANCE * expected.deviation:
        return None
    return (
        f"the logits of a forward pass are up to {largest_difference:.3g} away from those of the model that was "
        f"written, and their standard deviation is {expected.deviation:.3g}"
    )


def _last_logits(model: nn.Module) -> Tensor:
    """Returns the logits at the last of the fixed token ids, float32 `[vocabulary]`."""
    try:
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # transformers' answer for a model that looks up no tokens
        embeddings = None
    vocabulary = getattr(embeddings, "num_embeddings", 0) or 16
    # Ids at even distances over the vocabulary, so that the prompt needs no tokenizer.
    ids = (torch.arange(_PROMPT_TOKENS, device="cpu") * vocabulary // _PROMPT_TOKENS)[None]
    try:
        logits = run_probe(model, ids)
    except ValueError as error:
        raise TypeError(str(error).removeprefix("it ")) from None
    # A classifier gives one row of logits for the whole prompt.
    last = logits[0, -1].float().cpu() if logits.dim() == 3 else logits.float().cpu().flatten()
    if not bool(last.isfinite().all()):
        raise ValueError("a forward pass gives NaN or infinity")
    return last
