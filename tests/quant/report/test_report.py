"""The report's errors equal float64, its JSON round trip is exact, and the terminal shows its summary."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from quant.base.errors import loss_text, megabytes
from quant.base.processor import peak_rss
from quant.calibration import layer_result as result_module
from quant.calibration.layer_result import LayerResult, layer_result
from quant.evaluation.evaluation import Evaluation
from quant.formats.format import FORMATS, get_format
from quant.formats.tensor import quantize
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan
from quant.report.render import render_html
from quant.report.report import KVCache, Receipt, Report, kv_cache_of
from quant.report.summary import print_summary, summary

Rich = tuple[Report, Plan]
Make = Callable[..., Rich]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(130, 96), (3, 40, 128), (2, 16)])
@pytest.mark.parametrize("chunk", [1, 128 * 100, 1 << 20])
def test_errors_match_float64(name: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any length, partial blocks and experts: the same as on whole tensors in float64."""
    monkeypatch.setattr(result_module, "_CHUNK_ELEMENTS", chunk)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantized = quantize(weight, get_format(name))
    plan_layer = LayerPlan("layer", LayerKind.LINEAR, shape, get_format(name), get_format("fp8_token"), "mse", "why")
    w, rounded = weight.double(), quantized.dequantize().double()
    noise = (w - rounded).square().sum().item()
    result = layer_result(plan_layer, weight, quantized)
    assert noise > 0
    assert result.snr_db == pytest.approx(10 * math.log10(w.square().sum().item() / noise), abs=1e-9)
    assert result.relative_error == pytest.approx((w - rounded).norm().item() / w.norm().item(), rel=1e-9)
    assert result.relative_error == pytest.approx(10 ** (-(result.snr_db or 0) / 20), rel=1e-9)
    assert (result.format, result.activation, result.solver, result.reason) == (name, "fp8_token", "mse", "why")
    assert result.nbytes == quantized.nbytes
    assert result.bits == 8 * quantized.nbytes / math.prod(shape)


def test_no_error_to_speak_of() -> None:
    exact = torch.tensor([[6.0, -3.0, 0.5, 0.0] * 4])
    layer = LayerPlan("layer", LayerKind.LINEAR, (1, 16), get_format("nvfp4"))
    result = layer_result(layer, exact, quantize(exact, get_format("nvfp4")))
    assert (result.snr_db, result.relative_error) == (None, 0.0)
    zero = torch.zeros(1, 16)
    result = layer_result(layer, zero, quantize(zero, get_format("nvfp4")))
    assert (result.snr_db, result.relative_error) == (None, 0.0)
    kept = layer_result(LayerPlan("norm", LayerKind.NORM, (64,), reason="why"), torch.ones(64), None)
    assert kept == LayerResult("norm", None, None, (64,), 16.0, 128, None, None, None, "why")
    with pytest.raises(ValueError, match=r"layer: weight \[2, 8\] and its quantized form \[1, 16\] differ"):
        layer_result(layer, torch.zeros(2, 8), quantize(zero, get_format("nvfp4")))


def test_round_trip(make_report: Make, tmp_path: Path) -> None:
    for report in (make_report()[0], replace(make_report()[0], evaluation=None, peak_rss_bytes=None)):
        report.save(tmp_path / "report.json")
        text = (tmp_path / "report.json").read_text(encoding="utf-8")
        assert Report.load(tmp_path / "report.json") == report
        assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["schema_version"] == 1


def test_a_perplexity_beyond_all_numbers_is_null(make_report: Make, tmp_path: Path) -> None:
    report = replace(make_report()[0], evaluation=Evaluation(math.inf, 0.5, 0.7, 8176, 61.3, 18.683))
    report.save(tmp_path / "report.json")
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    fields = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert fields["evaluation"]["perplexity"] is None and fields["evaluation"]["kl"] == 0.5
    assert Report.load(tmp_path / "report.json").evaluation == Evaluation(None, 0.5, 0.7, 8176, 61.3, 18.683)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(value: float) -> None:
    weight = torch.randn(32, 64)
    quantized = quantize(weight, FORMATS["nvfp4"])
    weight[3, 5] = value
    with pytest.raises(ValueError, match=r"^a\.b: NaN or infinity in the weight"):
        layer_result(LayerPlan("a.b", LayerKind.LINEAR, (32, 64), FORMATS["nvfp4"]), weight, quantized)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "report schema_version is 2; this release reads 1"),
        ({"extra": 1}, "unknown field.*extra"),
        ({"layers": [{"name": "x"}]}, "shape"),
        ({"evaluation": {"perplexity": 1}}, "Evaluation: .*missing"),
    ],
)
def test_bad_reports_are_refused(make_report: Make, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**make_report()[0].to_dict(), **change}), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"report\.json: not a valid report: .*{message}"):
        Report.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="not a valid report"):
        Report.load(path)


def test_summary_in_the_terminal(make_report: Make) -> None:
    report, _ = make_report()
    stream = StringIO()
    print_summary(replace(report, model="[red]model"), Console(file=stream, width=100))
    text = stream.getvalue()
    for part in ("[red]model", "23.15, 18.68 before (+23.9%)", "0.2206 nats", "76.2%", "quantize 3.2 s", "1.47 GB"):
        assert part in text
    assert "warning: <u>mind</u> the gap" in text
    assert f"{report.effective_bits:.3f} per quantized weight" in text
    assert "nvfp4" in text
    assert "8 layers" in text


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (86_540_000, "86.5 MB"), (123e9, "123 GB")]
)
def test_megabytes(nbytes: float, text: str) -> None:
    assert megabytes(nbytes) == text


def test_peak_memory_of_this_process() -> None:
    status = Path("/proc/self/status")
    if status.exists():
        high_water = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
        assert peak_rss() == pytest.approx(high_water, rel=0.05)


def test_the_cache_is_that_of_the_goal() -> None:
    from transformers import BertConfig, LlamaConfig

    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"])
    goal = {"allocation": {"goal": {"context": 1000, "batch": 4}}}
    found = kv_cache_of(config, Plan((), provenance=goal))
    # layers × (K and V) × heads × width × bytes × tokens; our cache holds no heads of 8
    assert found == KVCache(3 * 2 * (2 * 8) * 2 * 4000, 1000, 4, width=8)
    wide = LlamaConfig(**sizes, head_dim=64, architectures=["LlamaForCausalLM"])
    assert kv_cache_of(wide, Plan(())) == KVCache(3 * 2 * (2 * 64) * 2 * 4096, 4096, 1)
    halved = kv_cache_of(config, Plan((), kv_cache=get_format("fp8")))
    assert halved is not None and (halved.context, halved.batch) == (4096, 1)
    assert halved.nbytes == pytest.approx(found.nbytes * 4096 / 4000 / 2, rel=1e-3)
    assert kv_cache_of(BertConfig(), Plan(())) is None and kv_cache_of(None, Plan(())) is None


def test_parts_survive_the_file(rich_report: Rich, tmp_path: Path) -> None:
    report = rich_report[0]
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    fields = json.loads((tmp_path / "report.json").read_text())
    assert fields["allocation"]["chosen"]["bits"] == report.allocation.chosen.bits
    assert len(fields["sensitivity"]["groups"]) == 120
    assert fields["receipt"]["layers"][5]["passed"] is False
    plain = replace(report, sensitivity=None, allocation=None, receipt=None, kv_cache=None).to_dict()
    assert {"sensitivity", "allocation", "receipt", "kv_cache"}.isdisjoint(plain)
    for change in (
        {"allocation": {"bits": 3}},
        {"receipt": {"layers": [{"name": "x"}], "passed": True}},
        {"kv_cache": {"x": 1}},
    ):
        (tmp_path / "bad.json").write_text(json.dumps({**fields, **change}))
        with pytest.raises(ValueError, match=r"bad\.json: not a valid report"):
            Report.load(tmp_path / "bad.json")


def test_the_terminal_says_the_same(rich_report: Rich) -> None:
    report = rich_report[0]
    assert report.allocation is not None and report.receipt is not None
    rows = dict(summary(report))
    chosen = report.allocation.chosen
    assert rows["allocation"].startswith(f"{chosen.bits:.3f} bits")
    assert f"after 2 rounds; KL {loss_text(chosen.kl_measured)} on the text of the choice" in rows["allocation"]
    assert "predicted" not in rows["allocation"]  # a sum of scores, which would stand beside measured losses
    assert rows["export receipt"] == f"FAILED, 2 of {2 * len(report.receipt.layers)} checks failed"
    passed = replace(report, receipt=Receipt((report.receipt.layers[0],), (), True))
    assert dict(summary(passed))["export receipt"] == "passed, 1 check"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (1.25, "1.2500"),
        (0.058312, "0.0583"),
        (0.0023468, "0.00235"),
        (3.2e-5, "3.2e-05"),
        (-2e-3, "-0.002"),
    ],
)
def test_a_small_loss_keeps_its_digits(value: float, text: str) -> None:
    assert loss_text(value) == text


def test_a_change_that_rounds_to_zero_has_no_minus(make_report: Make) -> None:
    report, plan = make_report()
    assert report.evaluation is not None and report.evaluation.baseline_perplexity is not None
    near = replace(report.evaluation, perplexity=report.evaluation.baseline_perplexity * 0.99999)
    report = replace(report, evaluation=near)
    assert "(+0.0%)" in str(dict(summary(report)))
    html = render_html(report, plan)
    assert "+0.0%" in html and "-0.0%" not in html
