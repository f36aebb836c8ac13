"""KL agrees with float64 whatever shifts all logits, classifiers are compared by classes, and no NaN goes unnoticed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.calibration.sensitivity.divergence import (
    Classes,
    Embeddings,
    NextToken,
    NotFinite,
    _kl,
    divergence_of,
    start_sum,
)
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.sensitivity.switchable_model import FormatChoice
from quant.calibration.sensitivity.table import Candidate, parse_candidates
from quant.calibration.session import Session
from quant.calibration.texts.rows import trial_rows
from quant.recipes.plan import groups_of
from quant.recipes.plan_make import make_plan


def vectors() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    return nn.Sequential(*layers).eval(), torch.randn(24, 64)


def images() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    front = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten())
    return nn.Sequential(*front, nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)).eval(), torch.randn(24, 3, 12, 12)


def texts() -> tuple[nn.Module, torch.Tensor]:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "num_labels": 5}
    model = tiny_models.bert_classifier(**sizes, gain=4)
    return model, torch.randint(0, 50, (24, 12))


def rewards() -> tuple[nn.Module, torch.Tensor]:
    """One logit a text."""
    model = tiny_models.bert_classifier(num_hidden_layers=1, num_attention_heads=2, vocab_size=50, num_labels=1, gain=4)
    return model, torch.randint(0, 50, (24, 12))


def labels() -> tuple[nn.Module, torch.Tensor]:
    """Five logits a text, each of a label that it has or has not."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "num_labels": 5}
    model = tiny_models.bert_classifier(**sizes, problem_type="multi_label_classification", gain=4)
    return model, torch.randint(0, 50, (24, 12))


def logits(model: Any, rows: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(rows)
    found: torch.Tensor = (result.logits if hasattr(result, "logits") else result).double()
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return found[..., None] if problem == "multi_label_classification" else found


def kl(base: torch.Tensor, found: torch.Tensor) -> float:
    """Mean over rows, straight from the definition."""
    if base.shape[-1] == 1:
        of_base, of_found = (torch.distributions.Bernoulli(logits=each) for each in (base, found))
        return float(torch.distributions.kl_divergence(of_base, of_found).mean())
    p, q = base.softmax(-1), found.softmax(-1)
    return float((p * (p / q).log()).sum(-1).mean())


def scores(model: nn.Module, rows: torch.Tensor, method: str) -> dict[str, float]:
    groups = groups_of(make_plan(model, "fp8_channel", run=lambda m: m(rows[:1])).quantized)
    candidates = parse_candidates("fp8_channel")
    table = score_groups(model, groups, dict.fromkeys(groups, candidates), rows, Scoring(method), Session())
    assert "class" in table.unit
    return {group.name: group.scores["fp8_channel"] for group in table.groups}


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("make", [vectors, images, texts, rewards, labels])
def test_kl_of_the_classes_is_that_of_quantizing_for_real(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    model, rows = make()
    base = logits(model, rows)
    for name, score in scores(model, rows, "kl").items():
        only = copy.deepcopy(model)
        quant.quantize(only, "fp8_channel", include=_members(name))
        # Some are as small as 1e-6, where logits in FP32 have a few digits left.
        assert score == pytest.approx(kl(base, logits(only, rows)), rel=1e-2, abs=1e-8)


def _members(group: str) -> list[str]:
    """`a.(k|q)` -> `a.k`, `a.q`."""
    stem, bracket, tails = group.partition("(")
    return [f"{stem}{tail}" for tail in tails.rstrip(")").split("|")] if bracket else [group]


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("make", [vectors, images, texts, rewards, labels])
def test_fisher_estimates_it(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model, rows = make()
    guessed, found = scores(model, rows, "fisher"), scores(model, rows, "kl")
    assert 0.6 < sum(guessed.values()) / sum(found.values()) < 1.6
    assert min(found.values()) > 0


def test_formats_for_a_budget_spend_bits_where_the_classes_need_them() -> None:
    """The allocation's measured loss is the KL of the classes of what it made."""
    model, rows = vectors()
    base = logits(model, rows)
    found = quant.allocate(model, rows, quant.Goal(max_kl=2e-4), formats="nvfp4a16,fp8_channel")
    quant.quantize(model, found.plan, rows)
    assert kl(base, logits(model, rows)) < 3e-4
    assert found.record.unit == Classes.unit


def test_a_shift_of_all_labels_is_a_change() -> None:
    """It changes each sigmoid and no softmax, and a text that gives NaN is named whatever the number of labels."""
    model, rows = labels()
    found = divergence_of(model, rows)
    base, reference = logits(model, rows), found.reference(rows)
    model.classifier.bias.data.add_(2.0)
    expected = kl(base, logits(model, rows))
    assert expected > 0.1
    assert found.measure(rows, reference)() / found.count(rows) == pytest.approx(expected, rel=1e-3)
    model.bert.encoder.layer[0].output.dense = Broken(model.bert.encoder.layer[0].output.dense, 17, 0, torch.nan)
    with pytest.raises(NotFinite, match=r"^row 117: NaN or infinity in"):
        found.measure(rows, reference, 100)()


def test_which_divergence() -> None:
    model, rows = texts()
    assert isinstance(divergence_of(model, rows), Classes)
    assert isinstance(divergence_of(model.bert, rows), Embeddings)
    assert type(divergence_of(tiny_models.llama(), rows)) is NextToken


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((5, 40), torch.int64, list(range(16))),  # token ids: the first of the first row
        ((50, 3), torch.float32, list(range(48))),  # vectors: whole ones
        ((5, 2, 2, 3), torch.float32, list(range(12))),  # images: the first
    ],
)
def test_few_are_tokens_or_whole_inputs(shape: tuple[int, ...], dtype: torch.dtype, expected: list[int]) -> None:
    rows = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    assert trial_rows(rows).flatten().tolist() == expected


@pytest.mark.parametrize("solver", ["awq+gptq", "smoothquant+rtn", "local_hessian"])
@pytest.mark.parametrize("make", [vectors, images])
def test_solvers_work_on_inputs_of_any_kind(make: Callable[[], tuple[nn.Module, torch.Tensor]], solver: str) -> None:
    """No worse than rounding to nearest, on the model's own output for its inputs."""
    model, rows = make()
    base = logits(model, rows)
    errors = {}
    for name in ("rtn", solver):
        copied = copy.deepcopy(model)
        quant.quantize(copied, "nvfp4a16", rows, solver=name)
        errors[name] = float((logits(copied, rows) - base).norm())
    assert errors[solver] < 1.1 * errors["rtn"]


SHIFTS = (-60.0, -33.0, -10.0, 0.0, 10.0, 33.0, 60.0)
# The spread of the original's logits, and how far its likeliest token is ahead.
SHARPNESS = {"flat": (0.05, 0.0), "language": (3.0, 0.0), "sharp": (3.0, 20.0)}


def kl_in_float64(p: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """KL of what is given, p normalized, straight from the definition; nothing is shifted or expanded."""
    logp = (p.double() / p.double().sum(-1, keepdim=True)).log()
    return torch.where(p > 0, logp.exp() * (logp - (logp + d.double()).log_softmax(-1)), 0.0).sum(-1)


def distribution(spread: float, lead: float, total: float, vocabulary: int = 5000) -> torch.Tensor:
    """Eight of them, float32, with that sum, as a softmax over a large vocabulary may give it."""
    logits = spread * torch.randn(8, vocabulary, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits[:, 7] += lead
    return (total * logits.softmax(-1)).float()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("total", [1.0, 1.0000251, 0.99998])
@pytest.mark.parametrize("product", [torch.float32, torch.bfloat16])
def test_a_shift_of_all_logits_costs_no_digits(
    shift: float, sharpness: str, total: float, product: torch.dtype
) -> None:
    p = distribution(*SHARPNESS[sharpness], total)
    change = torch.randn(p.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    change[:, 7] -= 2.0
    d = (0.4 * change + shift).to(product).float()
    torch.testing.assert_close(_kl(p, d).double(), kl_in_float64(p, d), rtol=4e-6, atol=1e-8)


@pytest.mark.parametrize("size", [1e-3, 1e-2, 1e-1])
def test_small_divergences_keep_their_digits(size: float) -> None:
    """Rounding d itself costs its digits of the shift, so there is none here; the smallest of these is 5e-7 nats."""
    p = distribution(*SHARPNESS["language"], 1.0000251)
    d = (size * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))).float()
    torch.testing.assert_close(_kl(p, d).double(), kl_in_float64(p, d), rtol=1e-6 + 4e-7 / size, atol=0.0)


def test_logits_that_rise_beyond_the_range_of_the_exponential() -> None:
    """A token that the original gives 1e-30 becomes the likeliest; one that it rules out may rise by anything."""
    p = distribution(*SHARPNESS["language"], 1.0)
    p[:, 3], p[:, 4] = 1e-30, 0.0
    d = 0.4 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    d[:, 3] += torch.tensor([0.0, 60.0, 80.0, 90.0, 120.0, 200.0, 1000.0, 1e4])
    d[:, 4] += torch.tensor([0.0, 1e4, 1e4, 0.0, 1e4, 1e4, 1e4, 1e4])
    expected = kl_in_float64(p, d)
    assert expected[-1] > 9900
    torch.testing.assert_close(_kl(p, d).double(), expected, rtol=4e-6, atol=0.0)


class Words(nn.Module):
    """Next-token logits of an embedding, whose head has a row that all of its rows share: as trained ones do."""

    def __init__(self, spread: float, lead: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 64), nn.Linear(64, 3000, bias=False)
        self.change = nn.Parameter(torch.zeros(64))
        own, self.shared = torch.randn(3000, 64), 2 * torch.randn(64)
        own -= own @ self.shared[:, None] * self.shared / self.shared.square().sum()
        self.head.weight.data = (own / 8 + self.shared).requires_grad_(False)
        self.embedding.weight.data.mul_(spread)
        self.embedding.weight.data += lead * own[7] / own[7].square().sum() * 8

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(rows) + self.change)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("sharpness", SHARPNESS)
@pytest.mark.parametrize("fast", [False, True])
def test_measured_kl_is_that_of_float64_for_any_shift(
    shift: float, sharpness: str, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product in BF16 has the precision of what moves the logits apart; one in FP32 ends at 2⁻²⁴ of the shift."""
    monkeypatch.setattr("quant.calibration.fast_matmul._multiplies_bf16", lambda device: fast)
    model = Words(*SHARPNESS[sharpness])
    rows = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))
    found = divergence_of(model, rows)
    reference = found.reference(rows)
    change = 0.4 * torch.randn(64, generator=torch.Generator().manual_seed(4))
    exact = copy.deepcopy(model).double()
    base = logits(exact, rows)[:, :-1]
    for each in (model, exact):
        each.change.data = (change + shift * model.shared / model.shared.square().sum()).to(each.change)
    expected = kl(base.flatten(0, 1), logits(exact, rows)[:, :-1].flatten(0, 1))
    assert expected > 1e-4
    measured = found.measure(rows, reference)() / found.count(rows)
    assert measured == pytest.approx(expected, rel=2e-2 if fast else 2e-4)


class Broken(nn.Module):
    """A module whose output is not finite for one token of one row."""

    def __init__(self, inner: nn.Module, row: int, token: int, value: float) -> None:
        super().__init__()
        self.inner, self.row, self.token, self.value = inner, row, token, value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x).clone()
        out[self.row, self.token] = self.value
        return out


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("when", ["measure", "nll", "probe"])
def test_a_loss_that_is_not_finite_is_an_error_that_names_the_token(value: float, when: str) -> None:
    model = Words(*SHARPNESS["language"])
    rows = torch.randint(0, 50, (4, 9))
    found = divergence_of(model, rows)
    assert isinstance(found, NextToken)
    reference = found.reference(rows)
    model.embedding = Broken(model.embedding, 2, 5, value)
    calls: dict[str, Callable[[], Any]] = {
        "measure": lambda: found.measure(rows, reference, 10)(),
        "nll": lambda: found.nll(rows, 10),
        "probe": lambda: found.probe(rows, torch.Generator(), 10),
    }
    with pytest.raises(NotFinite, match=r"^row 12, token 5: NaN or infinity in the .*; find the layer"):
        calls[when]()


@pytest.mark.parametrize("when", ["measure", "probe"])
def test_so_is_one_of_a_class_or_of_an_embedding(when: str) -> None:
    model, rows = texts()
    for measured, inner in ((model, model), (model.bert, model.bert)):
        found = divergence_of(measured, rows)
        reference = found.reference(rows)
        layer = inner.bert.encoder.layer[0] if measured is model else inner.encoder.layer[0]
        kept, layer.output.dense = layer.output.dense, Broken(layer.output.dense, 17, 0, torch.nan)
        calls: dict[str, Callable[[], Any]] = {
            "measure": lambda f=found, r=reference: f.measure(rows, r, 100)(),
            "probe": lambda f=found: f.probe(rows, torch.Generator(), 100),
        }
        with pytest.raises(NotFinite, match=r"^row 117: NaN or infinity in"):
            calls[when]()
        layer.output.dense = kept


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("kl", r"^2 in fp8_channel: row 5: NaN or infinity in the divergence"),
        ("output", r"^2 in fp8_channel: NaN or infinity in its output"),
        ("fisher", r"^2 in fp8_channel, token 0: NaN or infinity in its score"),
    ],
)
def test_a_format_that_breaks_a_group_is_named(method: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's input rounds to NaN in the sixth row of a batch, or in the only one."""
    rounded = FormatChoice.round_input

    def broken(self: FormatChoice, group: str, x: torch.Tensor, candidate: Candidate) -> torch.Tensor:
        out = rounded(self, group, x, candidate)
        if group != "2" or candidate.activation is None:
            return out
        return out.index_fill(0, torch.tensor(min(5, len(out) - 1)), torch.nan)

    monkeypatch.setattr(FormatChoice, "round_input", broken)
    model, rows = vectors()
    with pytest.raises(NotFinite, match=message):
        scores(model, rows, method)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter computes both sides of `where`
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_gpu_measures_in_one_launch_what_a_cpu_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the base in pairs of BF16, and one kernel for the divergence; Gemma 2 has a soft cap."""
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    sizes: dict[str, Any] = {"vocab_size": 61, "num_hidden_layers": 1, "gain": 3}
    model = getattr(tiny_models, family)(**sizes).to(torch.bfloat16).float()
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[0].mlp.down_proj.weight += 0.02 * torch.randn_like(
            model.model.layers[0].mlp.down_proj.weight
        )
    rows = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(0))
    reference = NextToken(model, model.lm_head).reference(rows)
    expected = NextToken(changed, changed.lm_head).measure(rows, reference)()
    monkeypatch.setattr("quant.calibration.sensitivity.divergence.has_pairs", lambda x: True)
    monkeypatch.setattr(
        "quant.calibration.fast_matmul._of_columns", lambda x, y, total=0: x.float().t() @ y.float() + total
    )
    with interpreted():
        found = NextToken(changed, changed.lm_head)
        again = found.measure(rows, reference)()
        assert again == pytest.approx(expected, rel=2e-3)
        # Logits that are kept change nothing.
        base = NextToken(model, model.lm_head)
        kept = base.reference(rows, keep=True)
        assert kept[1] is not None and found.measure(rows, (reference[0], kept[1]))() == again
    assert found.paired is not None and found.paired.low is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_sum_that_is_waited_for_later_is_its_own(device: str) -> None:
    values = torch.arange(50.0, device=device)[:, None].expand(50, 1000).contiguous()
    waits = [start_sum(row, str, "the rows") for row in values]
    values.zero_()  # later work on the same device
    assert [wait() for wait in waits] == [1000.0 * i for i in range(50)]
    broken = torch.tensor([1.0, math.nan], device=device)
    wait = start_sum(broken, lambda i: f"position {i}", "the values")
    with pytest.raises(NotFinite, match="position 1: NaN or infinity in the values"):
        wait()
