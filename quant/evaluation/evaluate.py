"""`evaluate` measures the loss by quantization: perplexity, KL divergence from the original, and top-1 agreement.

Every row of n tokens gives n − 1 next-token predictions, and all figures are means over them:

    perplexity = exp(mean −ln p(token))
    KL         = mean Σ p_base · ln(p_base / p), the sum over the vocabulary
    top-1      = mean [argmax p = argmax p_base]

A mean over rows is an estimate: the interval of 95 % around KL, or the cosine, is Student's over rows
(`quant.calibration.evaluating`). Text of another kind is another question, and `evaluate_texts` measures several.

Perplexity looks at one token of each distribution and is blind to changes in the other 49,151; KL compares whole
distributions, needs no right answer, and separates two quantizations from far fewer positions.

A model without an output head, such as an encoder, has no predictions. Its embeddings are compared with the baseline's:

    cosine     = mean [1 − cosine similarity of the mean last hidden states of a row]
    error      = ‖outputs − base outputs‖ / ‖base outputs‖

A model of images, sounds or two texts is measured call by call in the same terms: KL and top-1 of its next tokens or of
its classes, or the embeddings of each side. Where rows have labels, the share of right classes is measured, too.

The logits of both models are computed for one slice of positions at a time, compared and dropped. Tokens that stand for
pieces of an image or a sound are not predicted, so they are not counted. If an output has a position for each token of
the mask, padding on either side is not counted, neither as a prediction nor as a target. Sums are kept in float64, so
that batches and ranks add up.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from quant.base.errors import UserError, option
from quant.base.torch_modes import in_own_modes
from quant.calibration.evaluating import mean_interval, prepared
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.inputs import Inputs, cast_for, taking_inputs
from quant.calibration.outputs.logits import Logits, check_evaluable, class_logits, has_many_labels, predicts_tokens
from quant.calibration.ranks import gathered, own_batches
from quant.calibration.sensitivity.divergence import finite_sum, last_hidden
from quant.calibration.session import (
    Device,
    DeviceCopies,
    Prefetcher,
    Session,
    device_of,
    home_of_states,
    is_visited,
    tensors_of,
)
from quant.calibration.texts.media_inputs import DECODER
from quant.calibration.texts.rows import trial_rows
from quant.calibration.walk.walk import handed_on
from quant.evaluation.evaluation import Evaluation, OutputDistance, WorstPredictions
from quant.formats.tensor import moved
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.recipes.blocks import (
    block_names,
    calls_of_chain,
    find_chains,
    forwarding,
    output_of,
    removing,
    without_hidden,
)
from quant.recipes.callers_model import unwrapped
from quant.recipes.layers import output_head

_SOURCES = ("the model's logits", "the baseline's logits", "KL")
"""The tensor that a NaN in one of the first three sums comes from."""


def prediction_sums(
    logits: Sequence[Logits], batch: Tensor, first_row: int, worst: WorstPredictions | None = None
) -> Tensor:
    """Returns the sums of each row of token ids over its next-token predictions, float64 `[rows, 4]`.

    Columns are `NLL` and `BASE_NLL` (negative log-likelihood in nats), `KL` (nats) and `SAME` (positions at which both
    models' likeliest token is the same). Without a baseline all but the first are zero.
    """
    # Position i predicts token i + 1, so the last position has no target.
    targets = batch[:, 1:].flatten()
    positions_per_row = batch.shape[1] - 1
    by_position = torch.zeros(4, len(targets), dtype=torch.float64, device="cpu")
    hidden = [each.hidden(batch.to(device_of(each.model))) for each in logits]
    # Slices of positions: the logits of 512 positions take 300 MB in FP32 at a vocabulary of 150k, for each model.
    for part in logits[0].parts(hidden[0]):
        logp = [each.logp(h[part]) for each, h in zip(logits, hidden, strict=True)]
        if len({x.shape[-1] for x in logp}) > 1:
            raise ValueError(f"model and baseline have different vocabularies: {[x.shape[-1] for x in logp]} tokens")
        # The two models may be on different devices: sums are taken on the model's.
        target = targets[part, None].to(logp[0].device)
        values = torch.zeros(4, len(target), dtype=torch.float64, device=target.device)
        for i, of_model in enumerate(logp):
            values[i] = -of_model.gather(1, target.to(of_model.device))[:, 0]
        if len(logp) == 2:
            # `_kl_` destroys the baseline's log-probabilities, so it comes last.
            values[SAME] = logp[0].argmax(dim=-1) == logp[1].argmax(dim=-1).to(target.device)
            values[KL] = _kl_(logp[1].to(target.device), logp[0])
        bad = ~values.isfinite()
        if bool(bad.any()):
            first = first_row * positions_per_row + part.start + int(bad.any(dim=0).nonzero()[0])
            row, position = divmod(first, positions_per_row)
            raise ValueError(
                f"row {row}, position {position}: NaN or infinity in {_SOURCES[int(bad.any(dim=1).nonzero()[0])]}; "
                "find the layer that makes it, or keep it in 16 bit"
            )
        by_position[:, part] = values.cpu()
    if worst is not None and len(logits) == 2:
        worst.look(logits, hidden, batch, by_position[KL])
    return by_position.view(4, len(batch), positions_per_row).sum(dim=2).T


def _kl_(logp_base: Tensor, logp: Tensor) -> Tensor:
    """Returns KL(base‖model) at each position, float32 `[positions]`, from log-probabilities `[positions, vocabulary]`.

    Overwrites `logp_base`: at this size, memory that the system must first hand out costs more than the arithmetic.
    """
    p = logp_base.exp()
    # A token that the baseline rules out (p = 0) adds zero, though its logarithms may differ by infinity.
    return logp_base.sub_(logp).masked_fill_(p == 0, 0).mul_(p).sum(dim=-1)


@contextmanager
def blocks_first(model: nn.Module, batches: Sequence[Tensor], dtype: torch.dtype | None) -> Iterator[None]:
    """Runs a model that a device cannot hold block by block over all rows, not row by row over all blocks, while open.

    Row by row, every block is copied to the device for every row, or read from the disk where memory does not hold the
    model either. Here each block is copied once: it runs on the hidden states that the one before it gave, of all
    batches. The norm and the head behind the last block then run batch by batch in the model itself, whose blocks
    return the hidden states that they gave before. So the model must be called with `batches`, each once and in this
    order. One whose blocks do not form a single chain is not changed, and neither is one with few batches.
    """
    names, device = block_names(model), device_of(model)
    run = [partial(model, batch.to(device)) for batch in batches]
    # Finding the chain and its arguments takes two passes of their own.
    if len(batches) < 3 or find_chains(model, names, partial(model, trial_rows(batches[0]).to(device))) != [names]:
        yield
        return
    blocks = {name: model.get_submodule(name) for name in names}
    # The first block is on the device while all batches run up to it, and again for its own turn.
    prefetcher = Prefetcher(device, whole=False)
    steps = prefetcher.in_turn([names[0], *names], lambda name: tensors_of(blocks[name].modules()))
    borrowed = DeviceCopies(list(blocks[names[0]].modules()), next(steps)[1], device, dtype)
    calls = calls_of_chain(model, names, run)
    borrowed.restore()
    first = [by_block[names[0]].hidden for by_block in calls]
    home = home_of_states(sum(hidden.nbytes for hidden in first), device)
    states = [hidden.to(home) for hidden in first]
    slots = {name: call.slot for name, call in calls[0].items()}
    own = [moved(handed_on(by_block), device) for by_block in calls]
    calls = [without_hidden(by_block) for by_block in calls]
    del first
    results: dict[str, Any] = {}
    for name, copies in steps:
        borrowed = DeviceCopies(list(blocks[name].modules()), copies, device, dtype)
        for index, by_block in enumerate(calls):
            call = moved(by_block[name].with_arguments(own[index]).with_hidden(states[index]), device)
            results[name] = blocks[name](*call.args, **call.kwargs)
            states[index] = output_of(results[name]).to(home)
        # Only the other results of a block are kept, such as attention weights.
        results[name] = _replaced(results[name], torch.empty(0))
        borrowed.restore()
    last_states = iter(states)

    def pass_on(name: str, *args: Any, **kwargs: Any) -> Any:
        slot = slots[name]
        hidden = args[slot] if isinstance(slot, int) else kwargs[slot]
        return _replaced(results[name], next(last_states).to(device) if name == names[-1] else hidden)

    with ExitStack() as stack:
        for name, block in blocks.items():
            stack.enter_context(forwarding(block, partial(pass_on, name)))
        yield


def _replaced(result: Any, hidden: Tensor) -> Any:
    if isinstance(result, Tensor):
        return hidden
    if isinstance(result, tuple | list):
        return type(result)((hidden, *result[1:]))
    return type(result)({**result, next(iter(result)): hidden})


T = TypeVar("T")
Reporter = Callable[[int, int], None]
"""Called with (rows done, rows in all) after each batch."""


def evaluate_texts(model: nn.Module, texts: Mapping[str, Tensor | Inputs], *args: Any, **options: Any) -> Evaluation:
    """Measures a model on each of several texts or kinds of inputs, by name; further arguments as in `evaluate`."""
    evaluations, worst = [], options.get("worst")
    for name, rows in texts.items():
        if worst is not None:
            worst.text = name
        evaluations.append(replace(evaluate(model, rows, *args, **options), text=name))
    # One evaluation holds the further ones, so that code for a single text needs no case for several.
    return replace(evaluations[0], others=tuple(evaluations[1:]))


@in_own_modes
def evaluate(
    model: nn.Module, rows: Tensor | Inputs, baseline: nn.Module | None = None, *, batch_size: int = 1,
    dtype: torch.dtype | None = torch.float32, device: Device = None, progress: Reporter | None = None,
    worst: WorstPredictions | None = None,
) -> Evaluation:  # fmt: skip
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
        dtype: dtype to which 16-bit parameters of both models are widened for the measurement; None evaluates them as
            they are.
        device: the device where the models run, one block at a time if they do not fit; by default where they are.
        progress: a function that is called with (rows done, rows in all) after each batch.
        worst: the collector of the predictions that differ most from the baseline's.

    Raises:
        ValueError: rows of the wrong shape, longer than the model's context or with ids outside its vocabulary;
            models of different vocabularies; NaN or infinity in the results, with the row named; an encoder without
            a baseline.
    """
    model = unwrapped(model, "evaluate")
    models = [model] if baseline is None else [model, unwrapped(baseline, "evaluate")]
    # A batch of images or other features: each row is a call of its own.
    if isinstance(rows, Tensor) and rows.is_floating_point() and rows.dim() > 2:
        rows = Inputs([((row[None],), {}) for row in rows])
    for each in models:
        check_evaluable(each, rows)
    if isinstance(rows, Tensor) and _predicts_in_place(model):
        rows = Inputs([((), {"input_ids": row[None]}) for row in rows])
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; expected 1 or more rows that run together")
    started = time.perf_counter()
    report = progress or (lambda done, total: None)
    session = Session.on(device)
    # Models that do not fit on the device, whose blocks visit it one by one.
    visited = [each for each in models if is_visited(each, session.device, dtype)]
    if isinstance(rows, Inputs):
        with torch.no_grad(), prepared(models, dtype, session):
            evaluation = _evaluate_calls(models, rows, batch_size, report)
    else:
        with torch.no_grad(), fast_matmul(), prepared(models, dtype, session):
            if predicts_tokens(model, rows[:1, :2]):
                logits = [Logits(each, output_head(each)) for each in models]
                batches = [batch for _, batch in _batches(rows, batch_size)]
                with ExitStack() as stack:
                    for of_model in (of_model for of_model in logits if of_model.model in visited and batches):
                        of_model.decide(batches[0].to(device_of(of_model.model)))
                        stack.enter_context(blocks_first(of_model.model, batches, dtype))
                    evaluation = _evaluate_predictions(logits, rows, batch_size, report, worst)
            else:
                evaluation = _evaluate_embeddings(models, rows, batch_size, report)
    return replace(evaluation, seconds=time.perf_counter() - started)


def _evaluate_predictions(
    logits: Sequence[Logits], rows: Tensor, size: int, report: Reporter, worst: WorstPredictions | None
) -> Evaluation:
    """Returns the figures over next tokens of rows; `logits` are of the model, then of the baseline if any."""
    batches = _batches(rows, size, report)
    sums = torch.cat(_in_order((start, prediction_sums(logits, batch, start, worst)) for start, batch in batches))
    # n tokens give n − 1 predictions.
    compared, tokens = len(logits) > 1, len(rows) * (rows.shape[1] - 1)
    nll, baseline_nll, kl, same = (sums.sum(dim=0) / tokens).tolist()
    return Evaluation(
        perplexity=_exp(nll), kl=kl if compared else None, top1=same if compared else None, tokens=tokens, seconds=0.0,
        baseline_perplexity=_exp(baseline_nll) if compared else None, rows=len(rows),
        interval=mean_interval((sums[:, KL] / (rows.shape[1] - 1)).tolist(), least=0.0) if compared else None,
    )  # fmt: skip


def _evaluate_embeddings(models: Sequence[nn.Module], rows: Tensor, size: int, report: Reporter) -> Evaluation:
    if len(models) < 2:
        raise UserError(
            f"{type(models[0]).__name__} predicts no tokens: its embeddings can only be compared; name a "
            f"{option('baseline')}"
        )
    parts = []
    for start, batch in _batches(rows, size, report):
        hidden, base = (last_hidden(each(batch.to(device_of(each)))) for each in models)
        parts.append((start, embedded(hidden, base, f"row {start}")))
        finite_sum(parts[-1][1][:, DISTANCE], lambda index: f"row {start + index}", "an embedding")  # noqa: B023
    # One output without a name.
    return _of_embeddings({"": torch.cat(_in_order(parts))}, rows.numel(), "tokens")


def _evaluate_calls(models: Sequence[nn.Module], inputs: Inputs, size: int, report: Reporter) -> Evaluation:
    batches, starts = inputs.split(size), [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch))
    sums_of_batches = []
    with ExitStack() as stack:
        for each in models:
            stack.enter_context(taking_inputs(each))
        for number in own_batches(len(batches)):
            batch = batches[number]
            # Model and baseline may have different dtypes and be on different devices.
            results = [each(cast_for(each, batch).to(device_of(each))) for each in models]
            base_result = results[1] if len(results) > 1 else None
            call = batch.named_arguments(models[0])
            if inputs.labels is not None:
                call["labels"] = inputs.labels[starts[number] : starts[number + 1]]
            sums = compare(models[0], call, results[0], base_result, f"input {starts[number]}")
            sums_of_batches.append((number, sums))
            report(starts[number + 1], len(inputs))
    parts = _in_order(sums_of_batches)
    by_output = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if "logits" not in by_output:
        return _of_embeddings(by_output, len(next(iter(by_output.values()))), "inputs")
    return _of_logits(by_output["logits"], compared=len(models) > 1, own_text=inputs.own_text)


def _of_logits(of_rows: Tensor, *, compared: bool, own_text: bool) -> Evaluation:
    nll, baseline_nll, kl, same, predictions, targets, labelled, right, base_right = of_rows.sum(dim=0).tolist()
    if not predictions:
        raise UserError("the inputs hold no token that follows another one; give longer texts, to a decoder too")
    if not compared and not labelled and (own_text or not targets):
        why = "it wrote the decoder's text itself" if own_text else "the inputs hold neither text nor labels"
        raise UserError(f"nothing to measure the model by alone: {why}; name a {option('baseline')}")
    is_text = bool(targets) and not own_text
    # A row with more predictions than others weighs more in the mean over all of them. With k and n the KL and the
    # predictions of a row, K and N those of all R rows, these values k/N · R + K/N · (1 − n · R/N) have the mean K/N.
    losses = (
        kl / predictions + (of_rows[:, KL] - kl / predictions * of_rows[:, PREDICTIONS]) * len(of_rows) / predictions
    )
    return Evaluation(
        perplexity=_exp(nll / targets) if is_text else None, kl=kl / predictions if compared else None,
        top1=same / predictions if compared else None, tokens=int(predictions), seconds=0.0,
        baseline_perplexity=_exp(baseline_nll / targets) if is_text and compared else None, rows=len(of_rows),
        interval=mean_interval(losses.tolist(), least=0.0) if compared else None,
        accuracy=right / labelled if labelled else None,
        baseline_accuracy=base_right / labelled if labelled and compared else None,
    )  # fmt: skip


def _of_embeddings(sums: Mapping[str, Tensor], count: int, unit: str) -> Evaluation:
    distances = tuple(
        OutputDistance(name, float(v[:, DISTANCE].mean()), math.sqrt(float(v[:, ERROR].sum() / v[:, SQUARE].sum())))
        for name, v in sums.items()
    )
    # With several outputs, as CLIP has, a row counts by the mean of their distances.
    of_rows = torch.stack([values[:, DISTANCE] for values in sums.values()]).mean(dim=0)
    return Evaluation(
        perplexity=None, kl=None, top1=None, tokens=count, seconds=0.0, cosine=float(of_rows.mean()),
        error=max(distance.error for distance in distances), outputs=distances if len(distances) > 1 else (), unit=unit,
        rows=len(of_rows), interval=mean_interval(of_rows.tolist(), least=0.0),
    )  # fmt: skip


def _batches(rows: Tensor, size: int, report: Reporter = lambda done, total: None) -> Iterator[tuple[int, Tensor]]:
    """Yields this rank's batches of rows and the number of their first row; each is reported when it is done."""
    for number in own_batches(-(-len(rows) // size)):
        start, batch = number * size, rows[number * size : (number + 1) * size]
        # The caller works on the batch before the generator goes on, so the report comes after the work.
        yield start, batch
        report(start + len(batch), len(rows))


def _in_order(own: Iterable[tuple[int, T]]) -> list[T]:
    results = (entry for part in gathered(list(own)) for entry in part)
    return [value for _, value in sorted(results, key=itemgetter(0))]


def _exp(nll: float) -> float:
    """Returns exp, infinite where a double overflows: a broken model's perplexity is still a number."""
    return math.exp(nll) if nll < 700 else math.inf


@contextmanager
def inputs_moved(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Moves the inputs of linear layers by at most one rounding of the dtype, at random, while the block runs.

    The sums of other kernels end in such differences: each result is as right as the other. Where inputs are rounded to
    few bits, the last bit of a sum can turn one code into another.
    """
    epsilon, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(0)

    def move(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *further = args
        uniform = torch.rand(x.shape, generator=generator, dtype=torch.float64, device="cpu").to(x.device)
        return ((x * (1 + epsilon * (2 * uniform - 1))).to(x.dtype), *further)

    layers = [module for module in model.modules() if isinstance(module, nn.Linear | QuantizedModule)]
    with removing([layer.register_forward_pre_hook(move) for layer in layers]):
        yield


# Names in a config of the ids of tokens that stand for pieces of images and sounds.
_MEDIA_TOKENS = re.compile(r"(image|video|vision|audio)\w*_token_(id|index)$")
# Columns of the sums over predictions, and of those over embeddings.
NLL, BASE_NLL, KL, SAME, PREDICTIONS, TARGETS, LABELLED, RIGHT, BASE_RIGHT = range(9)
DISTANCE, ERROR, SQUARE = range(3)
_SLICE_ELEMENTS = 1 << 23  # of logits that are widened at once

Sums = dict[str, Tensor]
"""Float64 sums of each row by output: `[rows, 9]` of `logits`, as `NLL` … name them, `[rows, 3]` of embeddings."""


def compare(model: nn.Module, call: Mapping[str, Any], result: Any, base: Any | None, call_name: str) -> Sums:
    """Returns the sums of the rows of one call; without the original model's output, only the likelihood of texts."""
    with torch.no_grad():
        logits, base_logits = (None if x is None else _logits(x) for x in (result, base))
        if logits is not None:
            if has_many_labels(model):
                # Each label is a choice by itself: single logits, of positions that have no mask and no class.
                call, logits = {}, logits[..., None]
                base_logits = None if base_logits is None else base_logits[..., None]
            return {"logits": _predictions(model, call, logits, base_logits, call_name)}
        mask = call.get("decoder_attention_mask" if DECODER in call else "attention_mask")
        if base is None:
            raise ValueError(
                f"{type(model).__name__} gives no logits: its outputs can only be compared; name a {option('baseline')}"
            )
        of_base = _embeddings(base)
        return {
            name: _finite(
                embedded(x, of_base[name], f"{call_name}, {name}", mask), f"{call_name}: NaN or infinity in {name}"
            )
            for name, x in _embeddings(result).items()
        }


def _logits(result: Any) -> Tensor | None:
    """Returns logits `[rows, classes]`, perhaps the result itself, or `[rows, positions, classes]`; None without."""
    logits = getattr(result, "logits", result if isinstance(result, Tensor) and result.dim() == 2 else None)
    return logits if isinstance(logits, Tensor) and logits.dim() in (2, 3) else None


def _embeddings(result: Any) -> dict[str, Tensor]:
    """Returns the embeddings of a model, `[rows, …]`: outputs named `…_embeds`, or its last hidden state."""
    if isinstance(result, Mapping):
        named = {k: v for k, v in result.items() if k.endswith("_embeds") and isinstance(v, Tensor)}
        if named:
            return named
        if isinstance(result.get("last_hidden_state"), Tensor):
            return {"last_hidden_state": result["last_hidden_state"]}
    return {"output": output_of(result)}


def _predictions(
    model: nn.Module, call: Mapping[str, Any], logits: Tensor, base: Tensor | None, call_name: str
) -> Tensor:
    targets, counted = _targets(model, call, logits)
    if targets is not None:
        logits, base = logits[:, : targets.shape[1]], None if base is None else base[:, : targets.shape[1]]
    flat = class_logits(logits[counted] if counted is not None else logits.flatten(0, -2))
    # The row of each position, in the shape of the positions.
    numbers = torch.arange(len(logits), device="cpu").view(-1, *[1] * (logits.dim() - 2)).expand(logits.shape[:-1])
    row_of = numbers[counted.cpu()] if counted is not None else numbers.flatten()
    flat_base = None
    if base is not None:
        flat_base = class_logits(base[counted.to(base.device)] if counted is not None else base.flatten(0, -2))
        if flat_base.shape != flat.shape:
            raise ValueError(f"{call_name}: the models give logits {list(flat.shape)} and {list(flat_base.shape)}")
    # One label for each row, or token, of logits over classes; labels of texts are tokens, which `targets` has.
    labels, classes = call.get("labels"), None
    if isinstance(labels, Tensor) and targets is None and labels.numel() == numbers.numel() < logits.numel():
        labels = labels.cpu().reshape(numbers.shape)  # from [rows, 1], too
        classes = None if labels.is_floating_point() else labels[counted.cpu() if counted is not None else ...]
    target_ids = None if targets is None or counted is None else targets[counted].cpu()[:, None]
    step = max(_SLICE_ELEMENTS // flat.shape[-1], 1)
    row_sums = torch.zeros(len(logits), 9, dtype=torch.float64, device="cpu")
    for part in (slice(start, start + step) for start in range(0, len(flat), step)):
        logp = flat[part].double().cpu().log_softmax(dim=-1)
        sums = torch.zeros(len(logp), 9, dtype=torch.float64, device="cpu")
        sums[:, PREDICTIONS] = 1
        if target_ids is not None:
            sums[:, TARGETS] = 1
            sums[:, NLL] = -logp.gather(1, target_ids[part])[:, 0]
        if flat_base is not None:
            base_logp = flat_base[part].double().cpu().log_softmax(dim=-1)
            p = base_logp.exp()
            sums[:, KL] = (p * (base_logp - logp)).masked_fill(p == 0, 0).sum(dim=-1)
            sums[:, SAME] = (base_logp.argmax(dim=-1) == logp.argmax(dim=-1)).double()
            if target_ids is not None:
                sums[:, BASE_NLL] = -base_logp.gather(1, target_ids[part])[:, 0]
        if classes is not None:
            sums[:, LABELLED] = (classes[part] != -100).double()
            sums[:, RIGHT] = (logp.argmax(dim=-1) == classes[part]).double()
            if flat_base is not None:
                sums[:, BASE_RIGHT] = (base_logp.argmax(dim=-1) == classes[part]).double()
        # Positions of one slice may belong to several rows.
        row_sums.index_add_(0, row_of[part], sums)
    return _finite(row_sums, f"{call_name}: NaN or infinity in the logits")


def _targets(model: nn.Module, call: Mapping[str, Any], logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Returns the token that each position predicts, and which of them count, bool: both `[rows, predictions]`.

    The first is None for logits that are not over tokens, the second where all positions count; labels of -100 do not.
    """
    config, labels = getattr(model, "config", None), call.get("labels")
    is_decoder = DECODER in call or bool(getattr(config, "is_encoder_decoder", False))
    ids = call.get(DECODER if is_decoder else "input_ids")
    mask = call.get("decoder_attention_mask" if is_decoder else "attention_mask")
    counted = mask.bool().to(logits.device) if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1] else None
    is_for_tokens = isinstance(labels, Tensor) and labels.shape == logits.shape[:2] != logits.shape
    labels = labels.to(logits.device) if is_for_tokens else None  # type: ignore[union-attr]
    # Only a head over the vocabulary is the model's output embeddings; heads of classifiers and of spans are not.
    is_text = logits.dim() == 3 and output_head(model) is not None
    is_masked = _predicts_in_place(model)
    if (is_decoder or is_masked or not is_text) and labels is not None:
        # These labels belong to the position where they are; an encoder-decoder shifts its decoder's ids instead.
        return labels if is_text else None, (labels != -100) & (True if counted is None else counted)
    if not is_text or is_masked or ids is None or logits.shape[1] != ids.shape[1]:
        return None, counted
    targets = ids[:, 1:].to(logits.device)
    # Padding on the left is not context, so its prediction of the first token measures nothing about the model.
    counted = torch.ones_like(targets, dtype=torch.bool) if counted is None else counted[:, 1:] & counted[:, :-1]
    if labels is not None:
        counted &= labels[:, 1:] != -100
    for name in filter(_MEDIA_TOKENS.match, () if config is None else dir(config)):
        if isinstance(token := getattr(config, name, None), int):
            counted &= targets != token
    return targets, counted


def _predicts_in_place(model: nn.Module) -> bool:
    return type(model).__name__.endswith("MaskedLM")  # BERT's predictions are of tokens where they are, not of the next


def embedded(values: Tensor, base: Tensor, name: str, mask: Any = None) -> Tensor:
    """Returns the sums `[rows, 3]` of embeddings of two models, float64: columns `DISTANCE`, `ERROR` and `SQUARE`.

    Embeddings are `[rows, …]`; of `[rows, tokens, hidden]` tokens count that a `mask` `[rows, tokens]` does not hide.
    """
    values, base = values.double().cpu(), base.double().cpu()
    if values.shape != base.shape:
        raise ValueError(f"{name}: the models give {list(values.shape)} and {list(base.shape)}")
    if isinstance(mask, Tensor) and mask.shape == values.shape[:-1]:
        # Zeros shorten the mean over all tokens but do not turn it, and the cosine is blind to length.
        values, base = (x.masked_fill(~mask.bool().cpu()[..., None], 0) for x in (values, base))
    # The mean over tokens stands for a row; an image's features [rows, channels, height, width] are one vector.
    first, second = (x.mean(dim=1) if x.dim() == 3 else x.flatten(1) for x in (values, base))
    distance = 1 - cosine_similarity(first, second, dim=-1)
    error, square = (x.square().flatten(1).sum(dim=1) for x in (values - base, base))
    return torch.stack([distance, error, square], dim=1)


def _finite(sums: Tensor, problem: str) -> Tensor:
    if not bool(sums.isfinite().all()):
        raise ValueError(f"{problem}; find the layer that makes it, or keep it in 16 bit")
    return sums
