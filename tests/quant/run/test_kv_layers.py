"""The format of each layer's KV cache, chosen by measured losses."""

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

from quant.base.errors import UserError
from quant.calibration.allocation.allocate import allocate
from quant.calibration.allocation.goal import Goal
from quant.calibration.sensitivity.costs import kv_cache_bytes, mixed_cache_bytes
from quant.calibration.sensitivity.knapsack import Infeasible
from quant.calibration.session import Session
from quant.cli.main import main
from quant.evaluation.evaluate import evaluate
from quant.formats.format import FORMATS
from quant.generate.generate import cache_argument
from quant.generate.quantized_attention import quantized_attention
from quant.generate.quantized_kv_cache import QuantizedKVCache
from quant.recipes.plan import Plan, set_kv_cache
from quant.recipes.plan_check import validate
from quant.recipes.plan_make import make_plan
from quant.recipes.targets import TARGETS
from quant.run.decide import choose_kv_layers

LAYERS = 4


def _model() -> Any:
    return tiny_models.llama(gain=4, num_hidden_layers=LAYERS, vocab_size=61).eval()


def _rows(count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (count, 32), generator=torch.Generator().manual_seed(seed))


@cache
def _loss(names: tuple[str, ...]) -> float:
    """KL of the model over a cache in these formats to itself, by `evaluate`."""
    model, original = _model(), _model()
    with quantized_attention(model, kv_cache=",".join(names)):
        kl = evaluate(model, _rows(), original).kl  # row by row, as scales of a batch are shared
    assert kl is not None
    return kl


def test_the_choice_is_near_the_best_of_all_and_better_than_one_format() -> None:
    model, sizes = _model(), {"nvfp4": 4.5, "fp8": 8.0, "16bit": 16.0}
    (choice,) = choose_kv_layers(model, _rows(), 8.0, Session())
    cached = mixed_cache_bytes(model.config, 4096, 1, Plan((), kv_layers=choice.layers))
    assert cached <= kv_cache_bytes(model.config, 4096, 1, FORMATS["fp8"])
    measured = _loss(choice.layers)
    assert choice.record["loss"] == pytest.approx(measured, rel=0.02)
    assert choice.record["single_formats"]["fp8"] == pytest.approx(_loss(("fp8",) * LAYERS), rel=0.02)
    # Every assignment that uses the bits, measured.
    losses = [
        _loss(names)
        for names in itertools.product(sizes, repeat=LAYERS)
        if 6.5 * LAYERS <= sum(sizes[name] for name in names) <= 8.0 * LAYERS
    ]
    assert min(losses) <= measured <= 1.2 * min(losses)
    assert measured <= _loss(("fp8",) * LAYERS)
    assert "within 8 bits a value" in choice.record["reason"] and "fp8 for all" in choice.record["reason"]
    with pytest.raises(UserError, match=r"kv_bits=4: the smallest feasible value is 4\.5"):
        choose_kv_layers(model, _rows(), 4, Session())


def test_weights_and_cache_share_a_budget() -> None:
    """The cache that is chosen beside the weights loses less with them than any other, each with its own weights."""
    model, rows = _model(), _rows(24)
    choices = choose_kv_layers(model, rows, None, Session())
    tokens = {"context": 512, "batch": 4}
    used = [mixed_cache_bytes(model.config, 512, 4, Plan((), kv_layers=choice.layers)) for choice in choices]
    assert used == sorted(set(used)) and len(used) > 3
    assert [choice.loss for choice in choices] == sorted((choice.loss for choice in choices), reverse=True)
    mixes = {choice.layers: choice.loss for choice in choices[:4]}
    goal = Goal(fit=600_000, **tokens)
    options: Any = {"formats": "nvfp4a16,fp8a16"}
    found = allocate(model, rows, goal, kv_mixes=mixes, **options)
    totals = {}
    for layers, loss in mixes.items():
        try:
            alone = allocate(model, rows, goal, kv_mixes={layers: loss}, **options)
        except Infeasible:
            continue
        assert alone.plan.kv_layers == layers
        totals[layers] = alone.record.chosen.kl_measured + loss
    assert len(totals) > 2 and max(totals.values()) > 1.05 * min(totals.values())
    assert found.plan.kv_layers == min(totals, key=totals.__getitem__)
    assert found.record.chosen.memory is not None and found.record.chosen.memory <= 600_000
    assert found.plan.provenance["allocation"]["memory"]["kv_cache"] == used[list(mixes).index(found.plan.kv_layers)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "5", "--kv-bits", "auto"], "--kv-bits auto divides --fit or --latency between weights and cache"),
        (["--fit", "1MB", "--max-kl", "1", "--kv-bits", "auto"], "--kv-bits auto divides --fit or --latency"),
        (["--fit", "1MB", "--kv-bits", "few"], "--kv-bits few: give bits per cached value, such as 6, or auto"),
        (["--fit", "1MB", "--kv-bits", "-1"], "--kv-bits -1: give bits per cached value"),
    ],
)
def test_bits_of_the_cache_that_nobody_can_keep(options: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["plan", "make", "model", "--out", "plan.json", *options])
    assert result.exit_code == 2 and message in result.stderr


def test_decoding_over_a_mixed_cache_is_the_forward_pass() -> None:
    model, row, names = _model(), _rows(1), "nvfp4,fp8,16bit,nvfp4"
    with torch.no_grad(), quantized_attention(model, kv_cache=names):
        held = QuantizedKVCache(model, names)
        # The prompt sets the scales, and both ways have seen the same one.
        expected = model(row[:, :24], use_cache=False).logits
        found = model(row[:, :24], use_cache=True, **cache_argument(model, held)).logits
        assert torch.equal(found, expected) and held.is_mixed
        model(row[:, 24:25], use_cache=True, **cache_argument(model, held))
    assert [getattr(layer, "format", None) for layer in held.layers] == [
        FORMATS["nvfp4"], FORMATS["fp8"], None, FORMATS["nvfp4"],
    ]  # fmt: skip
    assert held.get_seq_length() == 25 and held.nbytes > 0
    for wrong, message in (
        ({"kv_cache": "fp8,fp8"}, "2 formats for 4 layers; give one for each"),
        ({"kv_cache": names, "attention": "fp8"}, "formats by layer are for attention in 16 bit"),
    ):
        with pytest.raises(UserError, match=message), quantized_attention(model, **wrong):
            pass


def test_plans_hold_the_layers_and_targets_refuse_them() -> None:
    plan = make_plan(_model(), "nvfp4a16")
    assert "kv_layers" not in plan.to_dict()
    mixed = Plan.from_dict({**plan.to_dict(), "kv_layers": ["fp8", "nvfp4", "16bit", "fp8"]})
    assert Plan.from_dict(json.loads(json.dumps(mixed.to_dict()))) == mixed
    assert mixed.run_time["kv_cache"] == "fp8,nvfp4,16bit,fp8" and "KV cache fp8 in 2 layers" in repr(mixed)
    (problem,) = validate(mixed, target=TARGETS["vllm"])
    assert problem.what.startswith("vllm keeps the KV cache of all layers in one format; the plan has fp8 in 2 layers")
    assert validate(set_kv_cache(mixed, "keep"), target=TARGETS["vllm"]) == []
    with pytest.raises(ValueError, match="a plan has kv_cache, or kv_layers"):
        Plan((), kv_cache=FORMATS["fp8"], kv_layers=("fp8",))
    with pytest.raises(ValueError, match="kv_layers: 'int3'; known formats: nvfp4"):
        Plan((), kv_layers=("fp8", "int3"))


def test_the_command_line(tmp_path: Path) -> None:
    _model().save_pretrained(tmp_path / "model")
    save_file({"input_ids": _rows(16)}, tmp_path / "rows.safetensors")
    out = tmp_path / "plan.json"
    arguments = [
        "plan", "make", tmp_path / "model", "--fit", "1MB", "--ctx", "64", "--kv-bits", "7", "--format",
        "nvfp4a16,fp8a16", "--calib", tmp_path / "rows.safetensors", "--calib-samples", "16", "--seqlen", "32",
        "--search", "0", "--out", out,
    ]  # fmt: skip
    made = CliRunner().invoke(main, list(map(str, arguments)))
    assert made.exit_code == 0, made.output
    plan = Plan.load(out)
    assert len(plan.kv_layers) == LAYERS and len(set(plan.kv_layers)) > 1
    assert "within 7 bits a value" in plan.provenance["kv_layers"]["reason"]
    assert plan.provenance["allocation"]["memory"]["kv_cache"] == mixed_cache_bytes(_model().config, 64, 1, plan)
    edited = {**json.loads(out.read_text()), "kv_layers": ["fp8"] * (LAYERS + 1)}
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    arguments = ["quantize", tmp_path / "model", "--plan", tmp_path / "edited.json", "--out", tmp_path / "out"]
    wrong = CliRunner().invoke(main, list(map(str, arguments)))
    words = f"{LAYERS + 1} formats in kv_layers, and the model has {LAYERS} layers; give one for each"
    assert wrong.exit_code == 2 and wrong.stderr.strip().endswith(f"edited.json: {words}")
    arguments = ["plan", "validate", tmp_path / "edited.json", "--model", tmp_path / "model", "--json"]
    counted = CliRunner().invoke(main, list(map(str, arguments)))
    (problem,) = json.loads(counted.stdout)
    assert counted.exit_code == 1 and f"{problem['what']}; {problem['remedy']}" == words
    arguments = ["plan", "validate", out, "--model", tmp_path / "model", "--target", "vllm"]
    refused = CliRunner().invoke(main, list(map(str, arguments)))
    assert refused.exit_code == 1 and "vllm keeps the KV cache of all layers in one format; the plan has" in (
        " ".join(refused.output.split())
    )
    arguments = ["plan", "make", str(tmp_path / "model"), "--format", "fp8", "--kv-bits", "7", "--out", "x"]
    alone = CliRunner().invoke(main, list(map(str, arguments)))
    assert alone.exit_code == 2 and "--kv-bits goes with a budget or a limit" in alone.stderr


def test_one_format_in_all_layers_is_no_mix() -> None:
    """A choice that gives every layer the same format is told, and checked for a target, as that format."""
    alike, mixed = Plan((), kv_layers=("nvfp4", "nvfp4")), Plan((), kv_layers=("nvfp4", "fp8"))
    assert (alike.kv_text, mixed.kv_text) == ("nvfp4", "nvfp4 in 1 layer, fp8 in 1 layer")
    (problem,) = validate(alike, target=TARGETS["vllm"])
    assert problem.what == "vllm cannot keep the KV cache in nvfp4; it has fp8, fp8_head, 16bit"
    assert validate(alike, target=TARGETS["tensorrt-rtx-sm120"]) == []
    assert alike.run_time["kv_cache"] == "nvfp4,nvfp4"
