"""Options that contradict each other are refused once, in the words of the command or of Python."""

from __future__ import annotations

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quant
from quant.base.errors import UserError, in_command
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe, Rule
from quant.run.request import AllocationRequest, Request

GPU = torch.device("cuda", 0)
BUDGET = AllocationRequest(bits=5.0)
MODELS = {"--{}": "model", "{}=": nn.Linear(2, 2)}


@pytest.mark.parametrize("spelling", MODELS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8", "kv_cache": "fp9"}, "<kv_cache fp9>: checkpoints hold a KV cache in fp8"),
        ({"recipe": "fp8", "attention": "nvfp4"}, "<attention nvfp4>: attention runs in fp8, or in 16bit"),
        ({"budget": BUDGET, "attention": "fp8"}, "<attention>: a budget leaves attention in 16 bit"),
        (
            {"recipe": Plan(()), "solver": "gptq", "exclude": ("*",)},
            "says everything already: edit it instead of using <solver>, <exclude>",
        ),
        ({"recipe": Plan(()), "effort": 0}, "says everything already"),
        ({"budget": BUDGET, "lm_head": "fp8"}, "<lm_head fp8>: a budget counts the layers inside the model"),
        ({"budget": BUDGET, "guard": "0.1 keep"}, "<guard> would change what the allocation has measured"),
        ({"budget": BUDGET, "observer": "mse"}, "<observer> would change what the allocation has measured"),
        ({"budget": BUDGET, "recipe": "fp8"}, "fixes the formats that a budget would choose; name those that it may"),
        (
            {"budget": AllocationRequest(formats="fp8")},
            "<formats> needs a budget to choose formats for, such as <bits>",
        ),
        ({"budget": AllocationRequest(bits=5.0, ctx="8k")}, "<ctx> means something to <fit> only"),
        ({"recipe": "fp8", "memory": "many"}, "<memory> 'many' is not a size"),
        ({"recipe": "fp8", "seqlen": 0}, "<seqlen 0>: give a whole number from 1"),
        ({"recipe": "fp8", "calib_samples": -1}, "<calib_samples -1>: give a whole number from 1"),
    ],
)
def test_a_refusal_names_the_option_as_the_user_wrote_it(spelling: str, options: dict[str, Any], message: str) -> None:
    def spelled(part: str) -> str:
        option, bracket, text = part.partition(">")
        name, _, value = option.partition(" ")
        if not bracket:
            return part
        if spelling.startswith("--"):
            name = {"formats": "format"}.get(name, name)
            return " ".join(["--" + name.replace("_", "-"), *filter(None, [value])]) + text
        return f'{name}="{value}"{text}' if value.isalnum() and not value.isdigit() else f"{name}={value}{text}"

    expected = "".join(spelled(part) for part in message.split("<"))
    with in_command() if spelling.startswith("--") else nullcontext(), pytest.raises(UserError) as refusal:
        Request(MODELS[spelling], **options).check()
    assert expected in str(refusal.value)


@pytest.mark.parametrize(("spelling", "shown"), [("--{}", "--calib absent.txt"), ("{}=", 'data="absent.txt"')])
def test_a_file_of_rows_that_is_missing_is_named(spelling: str, shown: str) -> None:
    context = in_command() if spelling.startswith("--") else nullcontext()
    with context, pytest.raises(UserError, match=f"^{shown}: no such file or directory"):
        Request(MODELS[spelling], recipe="fp8", calib=("mix+absent.txt",)).check()


def test_a_recipe_is_named_exactly_once() -> None:
    for options in ({}, {"recipe": "fp8", "plan_file": "plan.json"}):
        with pytest.raises(UserError, match="exactly one of --format and --plan"):
            Request("model", **options).check()


def test_a_module_needs_a_recipe_in_the_words_of_python() -> None:
    with pytest.raises(UserError, match=r"name a recipe, such as 'nvfp4', .* a budget: bits= or max_kl="):
        Request(nn.Linear(2, 2)).check()


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "device gpu is not a device; expected auto, cpu, cuda or cuda:N"),
        ({"calib": ("absent.parquet",), "solver": "rtn"}, "--calib absent.parquet: no such file"),
        ({"calib": ("absent.jsonl#text",)}, "--calib absent.jsonl#text: no such file"),
        ({"eval_texts": ("absent.safetensors:ids",)}, "--eval absent.safetensors:ids: no such file"),
        ({"recipe": "absent.toml"}, "recipe absent.toml: cannot be read: No such file"),
        ({"recipe": "NVFP4"}, "did you mean nvfp4?"),
    ],
)
def test_every_value_is_checked_before_the_model_is_opened(
    dry_run: bool, options: dict[str, Any], message: str
) -> None:
    with in_command(), pytest.raises(ValueError, match=re.escape(message)):
        Request("no model", **{"recipe": "fp8", "dry_run": dry_run, **options}).check()


def test_sources_that_are_there_pass(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    for name in ("a.txt", "ids.safetensors", "rows.jsonl", "odd#name.txt"):
        (tmp_path / name).write_text("a")
    sources = ("a.txt", "ids.safetensors:rows", "rows.jsonl#text", "odd#name.txt", "")
    names = ("mix", "self", "hf:org/name:config#column", *(str(tmp_path / name) for name in sources))
    Request("no model", "fp8", calib=names, eval_texts=names[3:], dry_run=True).check()


@pytest.mark.parametrize("spelling", MODELS)
def test_a_budget_is_checked_before_the_model_is_scored(spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = AllocationRequest(bits=5.0, formats="nvfp")
    with pytest.raises(ValueError, match=r"unknown format 'nvfp'.*did you mean nvfp4\?"):
        Request(MODELS[spelling], budget=bad).check()
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match=r"this run needs the package `scipy`, which is not installed: pip install"):
        Request(MODELS[spelling], budget=BUDGET).check()


def test_one_message_names_all_packages_that_a_run_will_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("scipy", "gguf", "transformers", "datasets"):
        monkeypatch.setitem(sys.modules, package, None)
    request = Request("smollm2-135m", budget=BUDGET, calib=("mix", "hf:some/name"), dry_run=False)
    with pytest.raises(UserError) as refused:
        request.check()
    message = str(refused.value)
    assert "needs the packages `transformers` and `gguf` and `scipy` and `datasets`, which are not" in message
    assert message.endswith("[hf,allocate,data]'")
    # What is wrong with the options comes first: nobody installs a package for a run that is refused anyway.
    with pytest.raises(UserError, match="fixes the formats"):
        replace(request, recipe="nvfp4").check()


def test_a_recipe_may_be_named_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('weight = "mxfp8"\nactivation = "mxfp8"\n')
    request = Request(nn.Sequential(nn.Linear(32, 32)), str(file))
    request.check()
    assert request.chosen_recipe.weight == "mxfp8"  # type: ignore[union-attr]


def test_data_that_are_no_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"data is \[4\] in torch.int64; expected int64 ids \[rows, seqlen\]"):
        Request(nn.Linear(2, 2), "fp8", data=torch.zeros(4, dtype=torch.int64)).check()


def test_attention_and_kv_cache_replace_the_recipes() -> None:
    recipe = Request("model", recipe="fp8", attention="fp8", kv_cache="fp8").chosen_recipe
    assert (recipe.attention, recipe.kv_cache) == ("fp8", "fp8")  # type: ignore[union-attr]
    recipe = Request("model", recipe=recipe, attention="16bit").chosen_recipe  # type: ignore[arg-type]
    assert (recipe.attention, recipe.kv_cache) == ("keep", "fp8")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"effort": 3, "device": GPU}, 128),
        ({"effort": 3, "device": "cpu"}, 32),
        ({"effort": 2, "device": GPU}, 32),
        ({"device": GPU}, 32),
        ({"effort": 3, "device": GPU, "calib_samples": 8}, 8),
        ({"device": GPU, "solver": "awq:merge+kfac"}, 128),
        ({"effort": 3, "device": GPU, "solver": "gptq"}, 32),
        # Text that the user names may hold fewer rows.
        ({"effort": 3, "device": GPU, "calib": ("text.txt",)}, 32),
    ],
)
def test_kfac_takes_more_text_on_a_gpu(options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.run.request.find_device", torch.device)
    request = Request("model", "nvfp4", **options)
    assert request.calibration_rows.samples == request.calibration_samples == rows
    with torch.device("meta"):
        large = nn.Linear(1 << 15, 1 << 15, bias=False)  # 2**30 weights
    assert request.for_model(large).calibration_rows.samples == rows


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ({"effort": 3, "device": GPU}, 512),
        ({"effort": 3, "device": "cpu"}, 32),
        ({"effort": 2, "device": GPU}, 128),
        ({"effort": 0, "device": GPU}, 32),
        ({"effort": 1, "device": GPU}, 32),
        ({"device": GPU, "solver": "local_hessian"}, 32),
        ({"effort": 3, "device": GPU, "calib_samples": 8}, 8),
        ({"effort": 3, "device": GPU, "calib": ("text.txt",)}, 32),
    ],
)
def test_small_models_take_four_times_as_much_text_on_a_gpu(
    options: dict[str, Any], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quant.run.request.find_device", torch.device)
    request = Request("model", "nvfp4", **options).for_model(nn.Linear(4, 4))
    assert request.calibration_rows.samples == request.calibration_samples == rows


@pytest.mark.parametrize(("solver", "rows"), [("kfac", 128), ("gptq", 32)])
def test_a_plan_or_recipe_that_names_kfac_takes_more_text_on_a_gpu(
    solver: str, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("quant.run.request.find_device", torch.device)
    plan = quant.make_plan(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "nvfp4a16", solver="rtn")
    first, second = plan.layers
    plan = plan.replace_layers([first, replace(second, solver=solver)])
    file = tmp_path / "plan.json"
    plan.save(file)
    recipe = Recipe("mine", "nvfp4", rules=(Rule("*.1", solver=solver),))
    for options in (
        {"plan_file": file},
        {"recipe": plan},
        {"recipe": recipe},
        {"recipe": replace(recipe, solver=solver)},
    ):
        assert Request("model", device=GPU, **options).calibration_samples == rows
    assert Request("model", recipe, device=GPU, solver="gptq").calibration_samples == 32
    assert Request("model", plan_file=file, device="cpu").calibration_samples == 32
