"""Evaluation measures what quantization cost: perplexity, KL divergence from the original, and top-1 agreement.

Every row of n tokens gives n − 1 next-token predictions, and all figures are means over them:

    perplexity = exp(mean −ln p(token))
    KL         = mean Σ p_base · ln(p_base / p), the sum over the vocabulary
    top-1      = mean [argmax p = argmax p_base]

A mean over rows is an estimate: the interval of 95 % around KL, or the cosine, is Student's over rows
(`quant.calibration.sensitivity.interval`). Text of another kind is another question, and `evaluate_texts` measures
several.

Perplexity asks one token a position and is blind to what happens to the other 49,151; KL compares whole
distributions, needs no right answer, and separates two quantizations from far fewer positions.

A model without an output head, such as an encoder, has no predictions. Its embeddings are compared with the baseline's:

    cosine     = mean [1 − cosine similarity of the mean last hidden states of a row]
    error      = ‖outputs − base outputs‖ / ‖base outputs‖

A model of images, sounds or two texts is measured call by call in the same terms: KL and top-1 of its next tokens or of
its classes, or the embeddings of each side; see `calibration.sensitivity.outputs`.

The logits of both models are computed for one slice of positions at a time, compared and dropped. Sums over positions
are kept in float64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from quant.calibration.attention_names import text_config
from quant.calibration.evaluating import prepared
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.inputs import Inputs, cast_for, understood
from quant.calibration.placement import Device, device_of, find_device, is_visited
from quant.calibration.ranks import gathered, own_batches
from quant.calibration.sensitivity.divergence import finite_sum, last_hidden
from quant.calibration.sensitivity.interval import mean_interval
from quant.calibration.sensitivity.logits import Logits, logits_of
from quant.calibration.sensitivity.outputs import DISTANCE, ERROR, KL, PREDICTIONS, SQUARE, compare, embedded
from quant.calibration.walk.block_major import blocks_first
from quant.errors import UserError
from quant.recipes.json_data import JsonData
from quant.recipes.layers import output_head

T = TypeVar("T")
# Tokens of a fingerprint, the logits that it keeps, and the share of their deviation that they may be apart.
_PROMPT, _KEPT, _SAME = 16, 8, 0.25


@dataclass(frozen=True)
class OutputDistance(JsonData):
    """How far one output of a model is from the baseline's.

    Attributes:
        name: as the model calls it.
        cosine: mean over the inputs of 1 − cosine similarity.
        error: norm of the difference over that of the baseline's output, all inputs together.
    """

    name: str
    cosine: float
    error: float


@dataclass(frozen=True)
class Evaluation(JsonData):
    """The figures of one model, beside its baseline where there is one.

    Attributes:
        perplexity: exp of the mean negative log-likelihood; None for a model that predicts no tokens.
        kl: mean KL(baseline‖model) in nats; None without a baseline.
        top1: share of positions at which both models' likeliest token is the same; None without a baseline.
        tokens: predictions that the means are over, or tokens of the embeddings, or inputs.
        seconds: time taken, baseline included.
        baseline_perplexity: the baseline's own perplexity; None without one.
        cosine: mean 1 − cosine similarity of the embeddings of model and baseline; None for a model with logits.
        error: relative error of the outputs of such a model; of several, the largest.
        outputs: both figures of each output, where the model has several.
        unit: what `tokens` counts.
        rows: of text, or inputs, that the means are over.
        interval: low and high end of the interval of 95 % around `kl`, or `cosine`; None without one, or for one row.
        text: what was evaluated on, as the user named it.
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
        return max(self.texts, key=lambda each: each.loss or 0.0)


def evaluate_texts(
    model: nn.Module, texts: Mapping[str, torch.Tensor | Inputs], *rest: Any, **options: Any
) -> Evaluation:
    """Measures a model on each of several texts or kinds of inputs, by name; further arguments as in `evaluate`."""
    first, *others = (replace(evaluate(model, rows, *rest, **options), text=name) for name, rows in texts.items())
    return replace(first, others=tuple(others))


def evaluate(
    model: nn.Module,
    rows: torch.Tensor | Inputs,
    baseline: nn.Module | None = None,
    *,
    batch_size: int = 1,
    dtype: torch.dtype | None = torch.float32,
    device: Device = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Measures `model` on `rows`, and against `baseline` where given.

    Ranks share the rows; their sums are added up in the order of the rows, so the figures do not depend on the ranks.

    Memory beyond the models in `dtype`: the hidden states of `batch_size` rows and a few slices of logits. A
    model without a separate output head computes the logits of a whole batch at once.

    Args:
        model: a causal language model: a Hugging Face one, or any module that maps token ids `[n, seqlen]` to
            logits `[n, seqlen, vocabulary]` (or to an output with `.logits`). Or a Hugging Face encoder, which takes
            a baseline.
        rows: token ids, int64 `[n, seqlen]`, as `quant.calibration.texts.rows.token_rows` cuts them; or inputs of any
            other model, one tensor `[n, …]` of three dimensions or more among them.
        baseline: the model before quantization, with the same vocabulary.
        batch_size: rows that run together.
        dtype: what 16-bit parameters of both models are widened to meanwhile; None evaluates them as they are.
        device: where the models run, one block at a time if they do not fit; by default where they are.
        progress: called with (rows done, rows in all) after each batch.

    Raises:
        ValueError: rows of the wrong shape, longer than the model's context or with ids outside its vocabulary;
            models of different vocabularies; NaN or infinity in the results, with the row named; an encoder without
            a baseline.
    """
    models = [model] if baseline is None else [model, baseline]
    if isinstance(rows, torch.Tensor) and rows.is_floating_point() and rows.dim() > 2:
        rows = Inputs([((row[None],), {}) for row in rows])
    for each in models:
        check_evaluable(each, rows)
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; expected 1 or more rows that run together")
    started = time.perf_counter()
    there = find_device(device)
    away = [each for each in models if is_visited(each, there, dtype)]
    if isinstance(rows, Inputs):
        with torch.no_grad(), prepared(models, dtype, there):
            return _evaluate_calls(models, rows, batch_size, progress, started)
    with torch.no_grad(), fast_matmul(), prepared(models, dtype, there):
        if _has_no_predictions(model, rows[:1, :2]):
            return _of_embeddings(
                {"": _embedding_distances(models, rows, batch_size, progress)}, rows.numel(), "tokens", started
            )
        logits = [Logits(each, output_head(each)) for each in models]
        with _blocks_first(logits, away, rows, batch_size, dtype):
            found = ((start, _measure(logits, batch, start)) for start, batch in _batches(rows, batch_size, progress))
            sums = torch.cat(_in_order(found))
    tokens = len(rows) * (rows.shape[1] - 1)
    nll, baseline_nll, kl, same = (sums.sum(dim=0) / tokens).tolist()
    return Evaluation(
        perplexity=_exp(nll),
        kl=None if baseline is None else kl,
        top1=None if baseline is None else same,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        baseline_perplexity=None if baseline is None else _exp(baseline_nll),
        rows=len(rows),
        interval=None if baseline is None else _interval(sums[:, 2] / (rows.shape[1] - 1)),
    )


def _interval(of_rows: torch.Tensor) -> tuple[float, ...] | None:
    return mean_interval(of_rows.tolist(), least=0.0)


def _evaluate_calls(
    models: Sequence[nn.Module],
    inputs: Inputs,
    batch_size: int,
    progress: Callable[[int, int], None] | None,
    started: float,
) -> Evaluation:
    """Measures a model, and its baseline if there is one, on inputs of any kind."""
    batches, starts = inputs.split(batch_size), [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch))
    found = []
    with ExitStack() as stack:
        for each in models:
            stack.enter_context(understood(each))
        for number in own_batches(len(batches)):
            batch = batches[number]
            results = [each(cast_for(each, batch).to(device_of(each))) for each in models]
            other = results[1] if len(results) > 1 else None
            call = batch.named_arguments(models[0])
            found.append((number, compare(models[0], call, results[0], other, f"input {starts[number]}")))
            if progress is not None:
                progress(starts[number + 1], len(inputs))
    parts = _in_order(found)
    sums = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if "logits" not in sums:
        return _of_embeddings(sums, len(next(iter(sums.values()))), "inputs", started)
    of_rows = sums["logits"]
    nll, baseline_nll, kl, same, predictions, targets = of_rows.sum(dim=0).tolist()
    if not predictions:
        raise UserError("the inputs hold no token that follows another one; give texts for the decoder")
    compared, is_text = len(models) > 1, bool(targets) and not inputs.own_text
    # What a row adds to the mean over all predictions, of which it may have more or fewer than others.
    losses = (
        kl / predictions + (of_rows[:, KL] - kl / predictions * of_rows[:, PREDICTIONS]) * len(of_rows) / predictions
    )
    return Evaluation(
        perplexity=_exp(nll / targets) if is_text else None,
        kl=kl / predictions if compared else None,
        top1=same / predictions if compared else None,
        tokens=int(predictions),
        seconds=time.perf_counter() - started,
        baseline_perplexity=_exp(baseline_nll / targets) if is_text and compared else None,
        rows=len(of_rows),
        interval=_interval(losses) if compared else None,
    )


def _of_embeddings(sums: Mapping[str, torch.Tensor], count: int, unit: str, started: float) -> Evaluation:
    """The figures of a model that is compared by its outputs, from the sums of each row as `compare` gives them."""
    distances = tuple(
        OutputDistance(name, float(v[:, DISTANCE].mean()), math.sqrt(float(v[:, ERROR].sum() / v[:, SQUARE].sum())))
        for name, v in sums.items()
    )
    of_rows = torch.stack([values[:, DISTANCE] for values in sums.values()]).mean(dim=0)
    return Evaluation(
        perplexity=None,
        kl=None,
        top1=None,
        tokens=count,
        seconds=time.perf_counter() - started,
        cosine=float(of_rows.mean()),
        error=max(distance.error for distance in distances),
        outputs=distances if len(distances) > 1 else (),
        unit=unit,
        rows=len(of_rows),
        interval=_interval(of_rows),
    )


@contextmanager
def _blocks_first(
    logits: Sequence[Logits], away: Sequence[nn.Module], rows: torch.Tensor, size: int, dtype: torch.dtype | None
) -> Iterator[None]:
    """While open, the blocks of models that the device cannot hold have been run on all batches; see `blocks_first`."""
    batches = [batch for _, batch in _batches(rows, size, None)]
    with ExitStack() as stack:
        for each in logits:
            if each.model in away and batches:
                each.decide(batches[0].to(device_of(each.model)))
                stack.enter_context(blocks_first(each.model, batches, device_of(each.model), dtype))
        yield


def check_evaluable(model: nn.Module, rows: torch.Tensor | Inputs) -> None:
    """Checks on two tokens that `evaluate` can measure a model, for those who would otherwise learn it late.

    Inputs of other kinds are left to the measurement itself: one call of them may take long.

    Raises:
        ValueError: the rows do not suit the model, it does not run on token ids, or it gives something else than
            logits or hidden states for each.
    """
    if isinstance(rows, Inputs):
        return
    _check_rows(model, rows)
    name, probe = type(model).__name__, rows[:1, :2]
    try:
        found = run_probe(model, probe)
    except ValueError as error:
        raise UserError(f"{name} cannot be evaluated on text: {error}") from error
    if found.dim() != 3 or found.shape[:2] != probe.shape:
        raise UserError(
            f"{name} cannot be evaluated on text: for 1 row of 2 tokens it gives {list(found.shape)}, and perplexity "
            "takes one prediction for each token"
        )


def run_probe(model: nn.Module, probe: torch.Tensor) -> torch.Tensor:
    """What a model gives for token ids, int64 `[rows, tokens]`: logits where it has any.

    Raises:
        ValueError: it does not run on them.
    """
    try:
        with torch.no_grad():
            return logits_of(model, probe.to(device_of(model)))
    except Exception as error:  # the model's own code, which may fail in any way on what it is not made for
        raise ValueError(f"it does not run on token ids ({' '.join(str(error).split())})") from error


@dataclass(frozen=True)
class Fingerprint(JsonData):
    """What a model says to fixed token ids, to know it again: its largest logits behind the last of them.

    Attributes:
        columns: of those logits, the largest first.
        logits: their values.
        deviation: standard deviation of all logits there.
    """

    columns: tuple[int, ...]
    logits: tuple[float, ...]
    deviation: float


def fingerprint(model: nn.Module) -> Fingerprint:
    """The fingerprint of a model.

    Raises:
        TypeError: it does not run on token ids.
        ValueError: its logits hold NaN or infinity.
    """
    logits = _last_logits(model)
    values, columns = logits.topk(min(_KEPT, len(logits)))
    return Fingerprint(tuple(columns.tolist()), tuple(values.tolist()), float(logits.std(correction=0)))


def fingerprint_problem(model: nn.Module, expected: Fingerprint | None) -> str | None:
    """Whether a model is not the one of a fingerprint, or gives NaN; None is none to compare with.

    Machines sum in another order, and quantized inputs widen that: the same logits are those within a quarter of the
    standard deviation.

    Raises:
        TypeError: it does not run on token ids.
    """
    try:
        logits = _last_logits(model)
    except ValueError as error:
        return str(error)
    if expected is None:
        return None
    if max(expected.columns, default=0) >= len(logits):
        return f"the model has {len(logits):,} logits, and the fingerprint is of more"
    apart = (logits[list(expected.columns)] - torch.tensor(expected.logits)).abs().max()
    if float(apart) <= _SAME * expected.deviation:
        return None
    return (
        f"the logits of a forward pass are up to {float(apart):.3g} away from those of the model that was written, and "
        f"their standard deviation is {expected.deviation:.3g}"
    )


def _last_logits(model: nn.Module) -> torch.Tensor:
    """Logits behind fixed token ids, float32 `[vocabulary]`."""
    try:
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    except (NotImplementedError, AttributeError):  # transformers' answer for a model that looks up no tokens
        embeddings = None
    vocabulary = getattr(embeddings, "num_embeddings", 0) or 16
    ids = (torch.arange(_PROMPT) * vocabulary // _PROMPT)[None]
    try:
        logits = run_probe(model, ids)
    except ValueError as error:
        raise TypeError(str(error).removeprefix("it ")) from None
    last = logits[0, -1].float().cpu() if logits.dim() == 3 else logits.float().cpu().flatten()
    if not bool(last.isfinite().all()):
        raise ValueError("a forward pass gives NaN or infinity")
    return last


def _has_no_predictions(model: nn.Module, probe: torch.Tensor) -> bool:
    """Whether a Hugging Face model ends in hidden states."""
    find_head = getattr(model, "get_output_embeddings", None)
    if not callable(find_head) or find_head() is not None:
        return False
    return not hasattr(model(probe.to(device_of(model))), "logits")


def _embedding_distances(
    models: Sequence[nn.Module], rows: torch.Tensor, batch_size: int, progress: Callable[[int, int], None] | None
) -> torch.Tensor:
    """Sums of each row `[rows, 3]`, as `compare` gives them for embeddings."""
    if len(models) < 2:
        raise UserError(
            f"{type(models[0]).__name__} predicts no tokens: its embeddings can only be compared; name a --baseline"
        )

    def distance(start: int, batch: torch.Tensor) -> torch.Tensor:
        first, second = (_embed(model, batch).cpu() for model in models)
        sums = embedded(first, second, _row(start, 0))
        finite_sum(sums[:, DISTANCE], partial(_row, start), "an embedding")
        return sums

    found = ((start, distance(start, batch)) for start, batch in _batches(rows, batch_size, progress))
    return torch.cat(_in_order(found))


def _row(first: int, index: int) -> str:
    return f"row {first + index}"


def _batches(
    rows: torch.Tensor, size: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """This rank's batches of rows and their first row; progress is reported after each."""
    starts = range(0, len(rows), size)
    for start in (starts[number] for number in own_batches(len(starts))):
        batch = rows[start : start + size]
        yield start, batch
        if progress is not None:
            progress(start + len(batch), len(rows))


def _in_order(found: Iterable[tuple[int, T]]) -> list[T]:
    """What all ranks found, by first row."""
    everything = [entry for part in gathered(list(found)) for entry in part]
    return [value for _, value in sorted(everything, key=lambda entry: entry[0])]


def _embed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The last hidden states, float64 `[rows, tokens, hidden]`."""
    return last_hidden(model(batch.to(device_of(model)))).double()


def _measure(logits: Sequence[Logits], batch: torch.Tensor, first_row: int) -> torch.Tensor:
    """Sums over each row: NLL of the model, NLL of the baseline, KL, agreements; float64 `[rows, 4]`."""
    targets = batch[:, 1:].flatten()
    per_row = batch.shape[1] - 1
    everything = torch.zeros(4, len(targets), dtype=torch.float64)
    hidden = [each.hidden(batch.to(device_of(each.model))) for each in logits]
    for part in logits[0].parts(hidden[0]):
        logp = [each.logp(h[part]) for each, h in zip(logits, hidden, strict=True)]
        if len({x.shape[-1] for x in logp}) > 1:
            raise ValueError(f"model and baseline have different vocabularies: {[x.shape[-1] for x in logp]} tokens")
        target = targets[part, None].to(logp[0].device)
        found = torch.zeros(4, len(target), dtype=torch.float64, device=target.device)
        for i, values in enumerate(logp):
            found[i] = -values.gather(1, target.to(values.device))[:, 0]
        if len(logp) == 2:
            found[3] = logp[0].argmax(dim=-1) == logp[1].argmax(dim=-1).to(target.device)
            found[2] = _kl_(logp[1].to(target.device), logp[0])
        if not bool(found.isfinite().all()):
            bad = ~found.isfinite()
            position = part.start + int(bad.any(dim=0).nonzero()[0])
            where = ("the model's logits", "the baseline's logits", "KL")[int(bad.any(dim=1).nonzero()[0])]
            raise ValueError(
                f"row {first_row + position // per_row}, position {position % per_row}: NaN or infinity in {where}; "
                "find the layer that makes it, or keep it in 16 bit"
            )
        everything[:, part] = found.cpu()
    return everything.view(4, len(batch), per_row).sum(dim=2).T


def _kl_(logp_base: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    """KL(base‖model) at each position, float32 `[positions]`, from log-probabilities `[positions, vocabulary]`.

    Overwrites `logp_base`: at this size, memory that the system must first hand out costs more than the arithmetic.
    """
    p = logp_base.exp()
    # A token that the baseline rules out (p = 0) counts nothing, though its logarithms may differ by infinity.
    return logp_base.sub_(logp).masked_fill_(p == 0, 0).mul_(p).sum(dim=-1)


def _check_rows(model: nn.Module, rows: torch.Tensor) -> None:
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2 or rows.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} {rows.dtype}: expected int64 [rows, seqlen], seqlen at least 2")
    config = text_config(getattr(model, "config", None))
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; perplexity here is for causal language models")
    context = getattr(config, "max_position_embeddings", None)
    if isinstance(context, int) and rows.shape[1] > context:
        raise ValueError(
            f"rows of {rows.shape[1]} tokens are longer than the {context} positions of {type(model).__name__}; "
            f"use a seqlen of at most {context}"
        )
    vocabulary = getattr(config, "vocab_size", None)
    low, high = (int(n) for n in torch.aminmax(rows))
    if low < 0 or (isinstance(vocabulary, int) and high >= vocabulary):
        raise ValueError(
            f"rows: token id {low if low < 0 else high} is outside the vocabulary of {type(model).__name__} "
            f"({vocabulary} tokens); the rows were made with another tokenizer"
        )


def _exp(nll: float) -> float:
    """exp, infinite where a double overflows: a broken model's perplexity is still a number."""
    return math.exp(nll) if nll < 700 else math.inf
