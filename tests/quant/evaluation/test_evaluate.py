"""Evaluation equals a plain computation in float64, and keeps its promises about memory and the caller's model."""

from __future__ import annotations

import copy
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
import tiny_models
import torch
from samples import BASE
from torch import nn
from torch.nn import functional as F

from quant.base.errors import UserError
from quant.calibration.inputs import Inputs
from quant.calibration.outputs import logits
from quant.evaluation.evaluate import evaluate, evaluate_texts
from quant.evaluation.evaluation import Evaluation, fingerprint, fingerprint_problem
from quant.formats.format import get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def base() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def quantized(base: Any) -> Any:
    model = copy.deepcopy(base)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            model.set_submodule(name, QuantLinear(quantize(module.weight.data, get_format("nvfp4"))))
    return model


@pytest.fixture(scope="module")
def rows() -> torch.Tensor:
    return torch.randint(3, 256, (3, 40), generator=torch.Generator().manual_seed(1))


def plain(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Logits at the predicting positions, `[positions, vocabulary]`, by transformers' own forward in float32."""
    with torch.no_grad():
        return copy.deepcopy(model).float().eval()(rows).logits[:, :-1].flatten(0, 1)


@pytest.mark.usefixtures("products")
def test_matches_a_plain_computation(base: Any, quantized: Any, rows: torch.Tensor) -> None:
    found = evaluate(quantized, rows, base)
    before, after = plain(base, rows).double(), plain(quantized, rows).double()
    targets = rows[:, 1:].flatten()
    assert found.perplexity == pytest.approx(F.cross_entropy(after, targets).exp().item(), rel=1e-6)
    assert found.baseline_perplexity == pytest.approx(F.cross_entropy(before, targets).exp().item(), rel=1e-6)
    kl = F.kl_div(after.log_softmax(-1), before.log_softmax(-1), log_target=True, reduction="batchmean").item()
    assert kl > 1e-4
    assert found.kl == pytest.approx(kl, rel=1e-4)
    assert found.top1 == (after.argmax(-1) == before.argmax(-1)).double().mean().item()
    assert found.tokens == 3 * 39
    alone = evaluate(quantized, rows)
    assert (alone.perplexity, alone.kl, alone.top1) == (found.perplexity, None, None)


def test_the_interval_is_student_s_over_the_rows(base: Any, quantized: Any, rows: torch.Tensor) -> None:
    found = evaluate(quantized, rows, base, batch_size=2)
    alone = [evaluate(quantized, row[None], base) for row in rows]
    losses = [each.kl for each in alone]
    expected = scipy.stats.t.interval(0.95, 2, loc=np.mean(losses), scale=scipy.stats.sem(losses))
    assert found.interval == pytest.approx((max(expected[0], 0), expected[1]), rel=1e-5)
    assert (found.rows, alone[0].rows, alone[0].interval) == (3, 1, None)
    assert evaluate(quantized, rows).interval is None


def test_a_text_is_no_rows_and_the_message_says_how_to_cut_it(base: Any) -> None:
    with pytest.raises(ValueError, match=r"evaluate takes token ids .* a str: cut .* quant\.token_rows\(FILE"):
        evaluate(base, "own.txt")  # type: ignore[arg-type]


def test_several_texts_stand_side_by_side(base: Any, quantized: Any, rows: torch.Tensor) -> None:
    other = torch.randint(3, 256, (2, 30), generator=torch.Generator().manual_seed(2))
    found = evaluate_texts(quantized, {"first": rows, "second": other}, base)
    alone = [evaluate(quantized, ids, base) for ids in (rows, other)]
    assert [each.text for each in found.texts] == ["first", "second"]
    assert [each.kl for each in found.texts] == [each.kl for each in alone]
    assert [each.tokens for each in found.texts] == [3 * 39, 2 * 29]
    assert found.worst.kl == max(each.kl for each in alone)
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_model_against_itself(base: Any, rows: torch.Tensor) -> None:
    found = evaluate(base, rows, copy.deepcopy(base))
    assert (found.kl, found.top1, found.perplexity) == (0.0, 1.0, found.baseline_perplexity)
    again = evaluate(base, rows, base)
    assert (again.kl, again.top1, again.perplexity) == (0.0, 1.0, found.perplexity)


@pytest.mark.parametrize("positions", [1, 7, 39, 1000])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_slices_and_batches_do_not_matter(
    base: Any, quantized: Any, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch, positions: int, batch_size: int
) -> None:
    reference = evaluate(quantized, rows, base)
    monkeypatch.setitem(logits._SLICE_ELEMENTS, "cpu", positions * 256)
    found = evaluate(quantized, rows, base, batch_size=batch_size)
    assert found.perplexity == pytest.approx(reference.perplexity, rel=1e-6)
    assert found.kl == pytest.approx(reference.kl, rel=1e-4)
    assert found.top1 == reference.top1


def test_large_vocabulary_meets_the_head_in_slices() -> None:
    """No more logits at a time than `_SLICE_ELEMENTS`, whatever the vocabulary."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny_models.llama(**sizes, vocab_size=150_000, num_hidden_layers=1, max_position_embeddings=256)
    seen: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.numel()))
    ids = torch.randint(0, 150_000, (1, 200), generator=torch.Generator().manual_seed(0))
    found = evaluate(model, ids, model)
    handle.remove()
    assert max(seen) <= logits._SLICE_ELEMENTS["cpu"]
    expected = F.cross_entropy(plain(model, ids).double(), ids[0, 1:]).exp().item()
    assert found.perplexity == pytest.approx(expected, rel=1e-6)


def test_soft_capped_logits() -> None:
    model = tiny_models.gemma2(num_hidden_layers=1, final_logit_softcapping=0.5)
    model.lm_head.weight.data.mul_(30)
    ids = torch.randint(0, 64, (2, 24))
    seen: list[torch.Size] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    found = evaluate(model, ids).perplexity
    handle.remove()
    # Of whole rows the head sees nothing: it is tried on a few tokens, left out, and applied to slices of positions.
    assert all(len(shape) == 2 or shape[-1] == 1 or shape[1] < 24 for shape in seen)
    assert sum(len(shape) == 2 for shape in seen) >= 2
    expected = F.cross_entropy(plain(model, ids).double(), ids[:, 1:].flatten()).exp().item()
    assert found == pytest.approx(expected, rel=1e-6)
    model.config.final_logit_softcapping = None
    assert evaluate(model, ids).perplexity != pytest.approx(found, rel=1e-2)


class Scaled(transformers.LlamaForCausalLM):
    """A model that does with its logits what no config key tells."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output


def test_unknown_treatment_of_logits_falls_back_to_the_whole_forward(rows: torch.Tensor) -> None:
    model = Scaled.from_pretrained(BASE, dtype=torch.float32)
    expected = F.cross_entropy(plain(model, rows).double(), rows[:, 1:].flatten()).exp().item()
    assert evaluate(model, rows).perplexity == pytest.approx(expected, rel=1e-6)


class Bigram(nn.Module):
    """A plain module from ids to logits, whose distribution is known."""

    def __init__(self, table: torch.Tensor, output: str = "tensor") -> None:
        super().__init__()
        self.table = nn.Parameter(table)
        self.output = output

    def forward(self, ids: torch.Tensor) -> Any:
        logits = self.table[ids]
        return (logits,) if self.output == "tuple" else logits


@pytest.mark.parametrize("output", ["tensor", "tuple"])
def test_any_module_with_known_figures(output: str) -> None:
    """Uniform against (1/2, 1/4, 1/4): perplexities 3 and 2^1.5, KL = ln 3 − 1.5 ln 2 … in closed form."""
    p = torch.tensor([0.5, 0.25, 0.25]).log()
    model, base = Bigram(p.repeat(3, 1), output), Bigram(torch.zeros(3, 3), output)
    rows = torch.tensor([[0, 0, 0, 1, 2]])
    found = evaluate(model, rows, base)
    assert found.perplexity == pytest.approx(2**1.5, rel=1e-6)
    assert found.baseline_perplexity == pytest.approx(3, rel=1e-6)
    assert found.kl == pytest.approx(torch.tensor(2 ** (5 / 3) / 3).log().item(), rel=1e-5)
    assert found.top1 == 1.0


def test_tokens_that_the_baseline_rules_out() -> None:
    """p = 0 in the baseline, and −inf in the logits of both, are legitimate; p = 0 in the model alone is not."""
    masked = torch.tensor([0.0, 0.0, -torch.inf]).repeat(3, 1)
    rows = torch.tensor([[0, 1, 0]])
    assert evaluate(Bigram(masked), rows, Bigram(masked)).kl == 0.0
    found = evaluate(Bigram(torch.zeros(3, 3)), rows, Bigram(masked))
    assert found.kl == pytest.approx(torch.tensor(1.5).log().item(), rel=1e-6)
    with pytest.raises(ValueError, match="row 0, position 0: NaN or infinity in KL"):
        evaluate(Bigram(masked), rows, Bigram(torch.zeros(3, 3)))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_nan_names_the_row(batch_size: int) -> None:
    table = torch.zeros(4, 4)
    table[3] = torch.nan
    rows = torch.tensor([[0, 1, 2, 0], [1, 2, 1, 3], [0, 0, 3, 0], [3, 0, 0, 0]])
    with pytest.raises(ValueError, match="row 2, position 2: NaN or infinity in the model's logits"):
        evaluate(Bigram(table), rows, batch_size=batch_size)
    with pytest.raises(ValueError, match="row 2, position 2: NaN or infinity in the baseline's logits"):
        evaluate(Bigram(torch.zeros(4, 4)), rows, Bigram(table), batch_size=batch_size)


def test_the_callers_model_comes_back_as_it_was(base: Any, quantized: Any, rows: torch.Tensor) -> None:
    model = copy.deepcopy(quantized)
    model.lm_head.weight = base.lm_head.weight  # one parameter in both models
    model.model.embed_tokens.weight = nn.Parameter(base.model.embed_tokens.weight.data)  # the same memory
    model.train()
    model.model.layers[0].eval()
    before = {name: (t.dtype, t.clone()) for name, t in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    widths: set[torch.dtype] = set()
    handle = model.lm_head.register_forward_hook(lambda module, args, output: widths.add(output.dtype))
    evaluate(model, rows, base)
    evaluate(model, rows, dtype=None)
    handle.remove()
    assert widths == {torch.float32, torch.bfloat16}
    for name, t in model.state_dict().items():
        assert t.dtype == before[name][0]
        assert torch.equal(t.flatten().view(torch.uint8), before[name][1].flatten().view(torch.uint8)), name
    assert model.lm_head.weight is base.lm_head.weight
    assert model.model.embed_tokens.weight.data_ptr() == base.model.embed_tokens.weight.data_ptr()
    assert [module.training for module in model.modules()] == modes


def test_own_dtype(base: Any, rows: torch.Tensor) -> None:
    with torch.no_grad():
        logits = base(rows).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits.double(), rows[:, 1:].flatten()).exp().item()
    assert evaluate(base, rows, dtype=None).perplexity == pytest.approx(expected, rel=2e-3)
    assert evaluate(base, rows).perplexity != evaluate(base, rows, dtype=None).perplexity


def test_restored_after_an_error(base: Any) -> None:
    class Broken(Bigram):
        def forward(self, ids: torch.Tensor) -> Any:
            if ids.shape[1] > 2:  # not yet on the two tokens that it is tried on
                raise RuntimeError("broken")
            return super().forward(ids)

    model = Broken(torch.zeros(3, 3, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, torch.zeros(1, 3, dtype=torch.int64))
    assert model.table.dtype is torch.float16
    assert model.training


def test_progress(base: Any, rows: torch.Tensor) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(base, rows, batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, 3), r"rows \[2, 3\] torch.float32: expected int64"),
        (torch.zeros(2, 1, dtype=torch.int64), r"rows \[2, 1\] .* seqlen at least 2"),
        (torch.full((1, 4), 256), "token id 256 is outside the vocabulary of LlamaForCausalLM"),
        (torch.full((1, 4), -1), "token id -1 is outside"),
        (torch.zeros(1, 129, dtype=torch.int64), "rows of 129 tokens are longer than the 128 positions"),
    ],
)
def test_bad_rows(base: Any, rows: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(base, rows)


def test_different_vocabularies() -> None:
    with pytest.raises(ValueError, match=r"different vocabularies: \[3, 4\]"):
        evaluate(Bigram(torch.zeros(3, 3)), torch.zeros(1, 3, dtype=torch.int64), Bigram(torch.zeros(4, 4)))


def test_round_trip() -> None:
    evaluation = Evaluation(18.5, 0.25, 0.75, 8176, 1.5, 18.0)
    assert Evaluation.from_dict(evaluation.to_dict()) == evaluation
    with pytest.raises(ValueError, match=r"Evaluation: unknown field\(s\) extra"):
        Evaluation.from_dict({**evaluation.to_dict(), "extra": 1})


def test_an_encoder_is_compared_by_its_embeddings() -> None:
    base = tiny_models.bert(num_attention_heads=2, vocab_size=61)
    model = copy.deepcopy(base)
    for name, parameter in model.named_parameters():
        if "query" in name:
            parameter.data.mul_(40)
    rows = torch.randint(0, 61, (5, 16), generator=torch.Generator().manual_seed(1))
    found = evaluate(model, rows, base, batch_size=2)
    with torch.no_grad():
        a, b = (m(rows).last_hidden_state.double().numpy().mean(axis=1) for m in (base, model))
    expected = 1 - (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))
    assert found.cosine == pytest.approx(float(expected.mean()), rel=1e-4) and found.cosine > 1e-6
    assert (found.perplexity, found.kl, found.top1, found.tokens) == (None, None, None, 80)
    assert Evaluation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    with pytest.raises(UserError, match=r"BertModel predicts no tokens: .* name a baseline="):
        evaluate(model, rows)
    model.encoder.layer[0].output.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="row 0: NaN or infinity in an embedding"):
        evaluate(model, rows, base)


KINDS = {
    "next tokens": partial(tiny_models.llama, gain=3),
    "classes of tokens": partial(
        tiny_models.build, "Bert", "ForTokenClassification", {**tiny_models.WIDTHS, **tiny_models.BLOCKS}, gain=3
    ),
    "embeddings": partial(tiny_models.bert, gain=3),
    "the decoder's tokens": partial(tiny_models.t5, gain=3),
}


def _texts(kind: str, width: int | None, side: str) -> Inputs:
    """Two texts of 12 and 7 tokens, a call each; padded to `width` tokens, and positions begin at the first token."""
    calls = []
    for length in (12, 7):
        ids = torch.randint(3, 60, (1, length), generator=torch.Generator().manual_seed(length))
        padding = 0 if width is None else width - length
        by = (padding, 0) if side == "left" else (0, padding)
        ids, mask = F.pad(ids, by, value=1), F.pad(torch.ones_like(ids), by)
        call = {"input_ids": ids, "attention_mask": mask}
        if "decoder" in kind:
            call |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        else:
            call["position_ids"] = F.pad(torch.arange(length)[None], by)
        calls.append(((), call))
    return Inputs(calls)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_not_counted(kind: str, side: str) -> None:
    """Against the same texts without it."""
    base = KINDS[kind]()
    model = copy.deepcopy(base)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    whole = evaluate(model, _texts(kind, 15, side), base, batch_size=2)
    alone = evaluate(model, _texts(kind, None, side), base)
    assert (whole.tokens, whole.rows) == (alone.tokens, alone.rows)
    for name in ("perplexity", "baseline_perplexity", "kl", "top1", "cosine", "error", "interval"):
        figure, other = getattr(whole, name), getattr(alone, name)
        assert figure is None if other is None else figure == pytest.approx(other, rel=1e-4), name
    assert alone.loss > 1e-4


LABELLED = {
    "next tokens": partial(tiny_models.llama, gain=3),
    "masked tokens": partial(
        tiny_models.build, "Bert", "ForMaskedLM", {**tiny_models.WIDTHS, **tiny_models.BLOCKS}, gain=3
    ),
    "classes of tokens": KINDS["classes of tokens"],
    "the decoder's tokens": partial(tiny_models.t5, gain=3, decoder_start_token_id=0, pad_token_id=0),
}


@pytest.mark.parametrize("kind", LABELLED)
def test_positions_without_a_label_are_not_counted(kind: str) -> None:
    """Against sums over the logits that the model itself gives for these labels: one of -100 is no label."""
    base = LABELLED[kind]().eval()
    model = copy.deepcopy(base)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (3, 12), generator=generator)
    # A decoder's text may be as long as the encoder's.
    labels = ids.flip(1).contiguous() if "decoder" in kind else ids % 2 if "classes" in kind else ids.clone()
    labels[:, 4:9] = labels[0, 2] = -100
    with torch.no_grad():
        logp, of_base = (each(input_ids=ids, labels=labels).logits.double().log_softmax(-1) for each in (model, base))
    targets = labels
    if kind == "next tokens":
        logp, of_base, targets = logp[:, :-1], of_base[:, :-1], labels[:, 1:]
    shown = targets != -100
    kl = (of_base.exp() * (of_base - logp)).sum(-1)[shown].mean()
    nll = -logp[shown].gather(1, targets[shown][:, None]).mean()
    calls = Inputs([((), {"input_ids": a[None], "labels": b[None]}) for a, b in zip(ids, labels, strict=True)])
    found = evaluate(model, calls, base, batch_size=2)
    assert found.tokens == shown.sum() and found.kl == pytest.approx(float(kl), rel=1e-4)
    if "classes" in kind:
        right = (logp.argmax(-1) == targets)[shown].double().mean()
        assert found.perplexity is None and found.accuracy == pytest.approx(float(right))
    else:
        assert found.perplexity == pytest.approx(math.exp(nll), rel=1e-4)


def test_a_masked_language_model_predicts_no_next_token() -> None:
    """Its logits stand for the tokens where they are: a perplexity of the tokens behind them means nothing."""
    base = LABELLED["masked tokens"]().eval()
    model = copy.deepcopy(base)
    model.bert.encoder.layer[0].output.dense.weight.data.mul_(1.2)
    rows = torch.randint(3, 60, (3, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logp, of_base = (each(rows).logits.double().log_softmax(-1) for each in (model, base))
    found = evaluate(model, rows, base)
    assert (found.perplexity, found.tokens) == (None, 36)
    assert found.kl == pytest.approx(float((of_base.exp() * (of_base - logp)).sum(-1).mean()), rel=1e-4)
    with pytest.raises(UserError, match=r"nothing to measure the model by alone: .* name a baseline="):
        evaluate(model, rows)


def test_a_row_without_a_label_is_not_wrong() -> None:
    model = tiny_models.bert_classifier(gain=2).eval()
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        labels = model(ids).logits.argmax(-1)
    labels[0], labels[1] = 1 - labels[0], -100
    for each in (labels[:, None], labels[:, None, None]):  # `[rows]` and `[rows, 1]`, as collators write them
        calls = Inputs([((), {"input_ids": a[None], "labels": b}) for a, b in zip(ids, each, strict=True)])
        found = evaluate(model, calls)
        assert (found.accuracy, found.tokens) == (pytest.approx(2 / 3), 4)


def test_each_of_several_labels_is_a_choice() -> None:
    """A shift of all logits changes each sigmoid and no softmax, whose KL was 0."""
    base = tiny_models.bert_classifier(num_labels=12, problem_type="multi_label_classification", gain=4).eval()
    model = copy.deepcopy(base)
    model.classifier.bias.data.add_(2.0)
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(1))
    # As many tokens as labels: the mask is not one of labels.
    named = {"attention_mask": torch.tensor([[1] * 9 + [0] * 3]), "labels": torch.ones(1, 12)}
    with torch.no_grad():
        q, p = (
            torch.distributions.Bernoulli(logits=each(ids, named["attention_mask"].expand(6, -1)).logits.double())
            for each in (model, base)
        )
    found = evaluate(model, Inputs([((), {"input_ids": row[None], **named}) for row in ids]), base)
    assert found.kl == pytest.approx(float(torch.distributions.kl_divergence(p, q).mean()), rel=1e-3)
    assert found.kl > 0.1 and found.tokens == 72
    same = ((q.logits > 0) == (p.logits > 0)).double().mean()
    assert found.top1 == pytest.approx(float(same)) and found.accuracy is None


def test_a_single_logit_is_the_log_odds_of_a_class() -> None:
    """A reward model or reranker: the softmax of one logit is 1, so its KL was 0 whatever was lost."""
    base = tiny_models.bert_classifier(num_labels=1, gain=4).eval()
    model = copy.deepcopy(base)
    model.bert.encoder.layer[0].output.dense.weight.data.mul_(1.2)
    ids = torch.randint(3, 60, (6, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        q, p = (torch.distributions.Bernoulli(logits=each(ids).logits.double()[:, 0]) for each in (model, base))
    # Labels of a regression are no classes.
    calls = Inputs([((), {"input_ids": row[None], "labels": torch.tensor([1])}) for row in ids])
    found = evaluate(model, calls, base)
    assert found.kl == pytest.approx(float(torch.distributions.kl_divergence(p, q).mean()), rel=1e-3)
    assert found.kl > 1e-6 and found.accuracy is None
    moved = fingerprint(model)
    model.classifier.bias.data.add_(1e-6)  # as the sums of another machine
    assert fingerprint_problem(model, moved) is None
    model.classifier.bias.data.add_(2 * model(ids).logits.abs().max().item())
    assert "away from those of the model that was written" in (fingerprint_problem(model, moved) or "")
