"""An effort names a solver; what it cannot do it leaves, and says so; the time it takes is told before."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import quant
from quant.base.errors import UserError, in_words
from quant.calibration.allocation.measure_choices import Counts, rows_of_choice
from quant.calibration.session import Session
from quant.calibration.texts.mixture import mixture_rows
from quant.calibration.texts.sources import sources_of, written_share
from quant.calibration.walk import expected_time as expected_times
from quant.calibration.walk.expected_time import expected_time, time_of_rows
from quant.cli.main import main
from quant.recipes.solver_names import solver_of


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default of users, which `conftest.py` lowers."""
    monkeypatch.setattr("quant.recipes.solver_names.DEFAULT_EFFORT", 2)


def solvers(plan: quant.Plan) -> set[str]:
    return {layer.solver for layer in plan.quantized}


def test_solvers_of_efforts() -> None:
    assert [solver_of(level, "keep") for level in (0, 1, 2)] == ["rtn", "mse", "gptq"]
    assert [solver_of(2, inputs) for inputs in ("fp8_token", "mxfp8")] == ["gptq"] * 2
    assert [solver_of(2, inputs) for inputs in ("nvfp4", "mxfp4")] == ["awq:merge+gptq"] * 2
    assert solver_of(3, "keep") == "kfac"
    assert {solver_of(3, inputs) for inputs in ("nvfp4", "fp8")} == {"awq:merge+kfac"}
    denoisers = [solver_of(level, inputs, denoiser=True) for level in (2, 3) for inputs in ("nvfp4", "fp8_token")]
    assert denoisers == ["lowrank:32+gptq", "gptq", "lowrank:32+kfac", "lowrank:32+kfac"]
    assert [solver_of(level, "nvfp4", experts=True) for level in (2, 3)] == ["gptq", "kfac"]
    with pytest.raises(ValueError, match="effort 4: expected a whole number from 0 to 3"):
        solver_of(4, "keep")


def test_what_is_named_goes_before_the_effort() -> None:
    model = tiny_models.llama()
    named = quant.Recipe("mine", weight="nvfp4", solver="four_over_six")
    assert solvers(quant.make_plan(model, "nvfp4a16", effort=2)) == {"gptq"}
    assert solvers(quant.make_plan(model, "nvfp4a16", effort=2, solver="mse")) == {"mse"}
    assert solvers(quant.make_plan(model, named, effort=2)) == {"four_over_six"}
    assert solvers(quant.make_plan(model, "nvfp4a16")) == {"rtn"}
    with pytest.raises(UserError, match="a plan says everything"):
        quant.quantize(model, quant.make_plan(model, "nvfp4a16"), effort=1)


@pytest.mark.usefixtures("default")
def test_the_default_is_gptq_on_text_that_the_model_writes() -> None:
    model = tiny_models.llama(max_position_embeddings=32)
    given, alone = copy.deepcopy(model), copy.deepcopy(model)
    done = quant.quantize(alone, "nvfp4a16")
    assert solvers(done.plan) == {"gptq"} and done.plan.provenance["effort"] == {"level": 2, "solver": "gptq"}
    (record,) = done.plan.provenance["calibration"]
    assert record["source"] == "mix" and record["rows"] == 32 and record["seqlen"] == 32

    rows, _ = mixture_rows(model, None, Session(), samples=32, seqlen=32)
    quant.quantize(given, "nvfp4a16", rows, solver="gptq")
    for ours, theirs in zip(alone.parameters(), given.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("default")
def test_a_model_without_text_gets_what_needs_none() -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    same = copy.deepcopy(net)
    done = quant.quantize(net, "nvfp4a16", run=lambda m: m(torch.zeros(2, 64)))
    assert solvers(done.plan) == {"mse"}
    effort = done.plan.provenance["effort"]
    assert (effort["level"], effort["asked"]) == (1, 2) and "0: solver gptq looks at inputs" in effort["why"]
    quant.quantize(same, "nvfp4a16", solver="mse", run=lambda m: m(torch.zeros(2, 64)))
    x = torch.randn(4, 64)
    assert torch.equal(net(x), same(x))
    with pytest.raises(UserError, match=r"^0: fp8 inputs have a static scale; pass"):  # nothing but data gives one
        quant.quantize(nn.Sequential(nn.Linear(64, 64)), "fp8", run=lambda m: m(torch.zeros(2, 64)))


@pytest.mark.usefixtures("default")
def test_a_bare_state_dict_gets_effort_1_and_a_line(tmp_path: Path) -> None:
    save_file({"up.weight": torch.randn(64, 64), "down.weight": torch.randn(64, 64)}, tmp_path / "bare.safetensors")
    out = tmp_path / "out"
    found = CliRunner().invoke(
        main, ["quantize", str(tmp_path / "bare.safetensors"), "--format", "nvfp4", f"--out={out}"]
    )
    assert found.exit_code == 0, found.output
    assert "effort 1 (mse) instead of 2: a bare state dict cannot be run" in " ".join(found.output.split())
    plan = quant.Plan.load(out / "plan.json")
    assert solvers(plan) == {"mse"} and plan.provenance["effort"]["asked"] == 2


@pytest.mark.usefixtures("default")
def test_the_command_tells_the_time_and_what_the_text_was(tmp_path: Path) -> None:
    tiny_models.llama(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    save_file({"rows": torch.randint(0, 64, (4, 64))}, tmp_path / "rows.safetensors")
    out = tmp_path / "out"
    options = [
        "--format",
        "nvfp4a16",
        f"--calib=mix+{tmp_path / 'rows.safetensors'}",
        "--calib-samples=7",
        "--seqlen=32",
    ]
    found = CliRunner().invoke(main, ["quantize", str(tmp_path / "model"), f"--out={out}", *options])
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert "gptq on 7 rows of 32 tokens will take about" in said and "--effort 0 is much faster" in said
    plan = quant.Plan.load(out / "plan.json")
    mixed, given = plan.provenance["calibration"]
    assert (mixed["source"], mixed["rows"]) == ("mix", 4)
    assert (given["source"], given["rows"]) == (str(tmp_path / "rows.safetensors"), 3)
    assert list(mixed["tokens"]) == ["own text"]  # this model has no tokenizer
    report = json.loads((out / "report.json").read_text())
    assert report["plan_digest"] == plan.digest()


@pytest.mark.usefixtures("default")
def test_a_budget_tells_its_time_before_anything_slow(tmp_path: Path) -> None:
    tiny_models.llama(max_position_embeddings=64, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    save_file({"rows": torch.randint(0, 64, (4, 64))}, tmp_path / "rows.safetensors")
    options = ["--bits=6", f"--calib=mix+{tmp_path / 'rows.safetensors'}", "--calib-samples=7", "--seqlen=32"]
    found = CliRunner().invoke(main, ["quantize", str(tmp_path / "model"), f"--out={tmp_path / 'out'}", *options])
    assert found.exit_code == 0, found.output
    said = " ".join(found.output.split())
    assert said.index("this budget will take about") < said.index("to choose among 2 formats") < said.index("scoring")
    assert said.count("to write text") == 1  # not once more when it is solved
    told = (
        "formats are chosen for weights rounded to nearest, and then solved by awq:merge+gptq; --solver awq:merge+gptq"
    )
    assert said.index("this budget will take about") < said.index(told) < said.index("scoring")


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("options", [["--solver=gptq"], ["--effort=0"], ["--solver=rtn"]])
def test_a_budget_says_nothing_of_its_rounding_where_the_plan_has_the_same(tmp_path: Path, options: list[str]) -> None:
    tiny_models.llama(max_position_embeddings=64, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    save_file({"rows": torch.randint(0, 64, (4, 32))}, tmp_path / "rows.safetensors")
    arguments = [f"--out={tmp_path / 'out'}", "--bits=16", f"--calib={tmp_path / 'rows.safetensors'}", "--seqlen=32"]
    arguments += ["--calib-samples=4", "--format=nvfp4a16,fp8a16", *options]
    found = CliRunner().invoke(main, ["quantize", str(tmp_path / "model"), *arguments])
    assert found.exit_code == 0, found.output
    assert "this budget will take about" in " ".join(found.output.split())
    assert "formats are chosen for" not in found.output


@pytest.mark.usefixtures("default")
def test_an_evaluation_text_that_is_too_short_is_refused_before_formats_are_chosen(tmp_path: Path) -> None:
    tiny_models.llama(max_position_embeddings=64, num_hidden_layers=1).save_pretrained(tmp_path / "model")
    save_file({"rows": torch.randint(0, 64, (4, 32))}, tmp_path / "rows.safetensors")
    rows = tmp_path / "rows.safetensors"
    options = ["--bits=6", f"--calib={rows}", "--calib-samples=4", "--seqlen=32", f"--eval={rows}", "--eval-samples=5"]
    found = CliRunner().invoke(main, ["quantize", str(tmp_path / "model"), f"--out={tmp_path / 'out'}", *options])
    assert found.exit_code == 2 and "too short" in found.output and "scoring" not in found.output


def test_the_time_of_a_budget_follows_the_work() -> None:
    counts, cpu = Counts(), torch.device("cpu")
    assert rows_of_choice(32, 2, counts, cpu) == 32 + 8 * (1 + 1 + 2) + 8 * (1 + 2)
    assert rows_of_choice(32, 4, counts, cpu) > rows_of_choice(32, 2, counts, cpu)
    assert rows_of_choice(32, 2, Counts(measurements=100), cpu) == rows_of_choice(32, 2, counts, cpu) + 400
    # In a solved model each of 30 changes is measured on 16 rows, or as many as there are measurements.
    for count, measured in ((100, 30), (10, 10)):
        found = rows_of_choice(64, 2, Counts(measurements=count), cpu, changes=30, rows_solved=16)
        assert found == rows_of_choice(64, 2, counts, cpu) + 16 * measured // 2
    model = tiny_models.llama()
    plan = quant.make_plan(model, "nvfp4a16")
    assert time_of_rows(model, plan, Session(), 100, 32) > 5 * time_of_rows(model, plan, Session(), 10, 32)


def test_sources_of_calibration() -> None:
    assert sources_of(()) == ("mix",) and sources_of(("mix+a+b.txt",)) == ("mix", "a+b.txt")
    assert sources_of(("a.txt", "self+mix", "a.txt")) == ("a.txt", "self", "mix")
    assert written_share((), has_tokenizer=True) == 0.5 and written_share(("mix", "a"), has_tokenizer=False) == 0.5
    assert written_share(("self",), has_tokenizer=True) == 1.0 and written_share(("a",), has_tokenizer=True) == 0.0


def test_the_expected_time_follows_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = expected_times._RATES["cpu"]._replace(products=1e9 / torch.get_num_threads())
    monkeypatch.setitem(expected_times._RATES, "cpu", slow)
    model = tiny_models.llama()

    def seconds(solver: str, **work: Any) -> float:
        found = expected_time(
            model, quant.make_plan(model, "nvfp4a16", solver=solver), **{"rows": 4, "seqlen": 32} | work
        )
        return found.writing + found.solving

    order = [seconds(s) for s in ("rtn", "mse", "gptq", "awq+gptq", "awq+gptq+autoround")]
    assert order == sorted(order) and order[0] < order[1] < order[2]
    assert seconds("gptq", rows=400) > 1.5 * seconds("gptq", rows=40)
    assert seconds("gptq", written=64) > seconds("gptq")
    assert seconds("mse", rows=400) == seconds("mse")  # reads no text
    assert [in_words(s) for s in (0.2, 7.4, 34, 100, 3000, 9000)] == ["1 s", "7 s", "30 s", "2 min", "50 min", "2.5 h"]


def test_the_effort_in_the_provenance_of_a_given_plan_is_not_executed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    plan = quant.make_plan(model, "nvfp4a16", effort=2, run=lambda m: m(torch.zeros(1, 64)))
    assert solvers(plan) == {"gptq"} and plan.provenance["effort"]["level"] == 2
    with pytest.raises(quant.UserError, match="0: solver gptq looks at inputs"):  # a recipe would fall back to mse
        quant.quantize(model, plan)


def test_a_plan_that_is_edited_keeps_its_effort() -> None:
    plan = quant.make_plan(tiny_models.llama(), "nvfp4a16", effort=2)
    again = quant.Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again.provenance["effort"] == {"level": 2, "solver": "gptq"} and replace(again) == plan
