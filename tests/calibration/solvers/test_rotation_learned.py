"""The learned rotation is orthonormal, lowers its loss as autograd has it, and leaves the model's output as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn

from quant.calibration.session import Session, Step, Store
from quant.calibration.solvers.registry import check_solvers
from quant.calibration.solvers.rotation import merge_residual_rotation
from quant.calibration.walk import learned_rotation as merging
from quant.calibration.walk.learned_rotation import learned_rotation, loss_and_gradient
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import Recipe
from quant.run.api import quantize

IDS = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(3))
SOLVER = "awq:merge+rotation:learned+kfac"
FP8 = Recipe("mine", "fp8", "fp8")


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def _run(model: nn.Module) -> Any:
    return model(IDS, use_cache=False).logits


def _turn(width: int) -> torch.Tensor:
    random = torch.randn(width, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return torch.linalg.qr(random)[0]


def _moments(layers: int, width: int) -> torch.Tensor:
    """Second moments with loud channels, each in other ones."""
    x = torch.randn(layers, 200, width, generator=torch.Generator().manual_seed(layers))
    x *= torch.exp(torch.randn(layers, 1, width, generator=torch.Generator().manual_seed(width)))
    return x.mT @ x / 200


def _loss(rotation: torch.Tensor, inputs: torch.Tensor, readers: torch.Tensor) -> torch.Tensor:
    """The docstring's formula, layer by layer."""
    turned = [(rotation @ m @ rotation.T, rotation @ h @ rotation.T) for m, h in zip(inputs, readers, strict=True)]
    return torch.stack([(m.diagonal() * h.diagonal()).sum() for m, h in turned]).sum()


def test_loss_and_gradient_are_those_of_autograd() -> None:
    inputs, readers = _moments(3, 16).double(), _moments(4, 16)[:3].double()
    rotation = _turn(16).requires_grad_()
    expected = _loss(rotation, inputs, readers)
    (gradient,) = torch.autograd.grad(expected, rotation)
    loss, ours = loss_and_gradient(rotation.detach(), inputs, readers)
    assert loss == pytest.approx(expected.item())
    torch.testing.assert_close(ours, gradient)


def test_one_layer_reaches_the_least_loss_that_there_is() -> None:
    """H = 1: the loss is the trace of M for every rotation. H = M: it is least where both are even, trace² / width."""
    moment = _moments(1, 8)
    rotation = learned_rotation(moment, moment)
    identity = torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, identity, rtol=0, atol=1e-12)
    least = float(moment.double()[0].trace()) ** 2 / 8
    start, reached = (float(_loss(r, moment.double(), moment.double())) for r in (identity, rotation))
    assert least <= reached < 1.001 * least < 0.7 * start


def test_several_layers_share_one_rotation() -> None:
    inputs, readers = _moments(5, 32), _moments(6, 32)[:5].flip(0)
    rotation = learned_rotation(inputs, readers)
    identity = torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(rotation.T @ rotation, identity, rtol=0, atol=1e-12)
    assert float(_loss(rotation, inputs.double(), readers.double())) < 0.9 * float(
        _loss(identity, inputs.double(), readers.double())
    )
    assert torch.equal(rotation, learned_rotation(inputs, readers))


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_moments_without_a_loss_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="give a loss of"):
        learned_rotation(torch.full((1, 4, 4), value), _moments(1, 4))


@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
def test_a_model_in_float64_computes_what_it_did(kind: str) -> None:
    options = {"hidden_activation": "gelu"} if kind == "Gemma" else {"attention_bias": True, "mlp_bias": True}
    sizes = {**tiny_models.DECODER, "head_dim": 16}
    model = tiny_models.build(kind, "ForCausalLM", sizes, gain=2.0, tie_word_embeddings=True, **options).double()
    before, embedding = _logits(model), model.get_input_embeddings().weight.detach().clone()
    reader = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    norm = model.model.layers[1].post_attention_layernorm.weight.detach().clone()
    writer = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    turn = _turn(64)
    assert merge_residual_rotation(model, _run, turn).tied == ("lm_head",)
    after = _logits(model)
    assert float((after - before).norm() / before.norm()) < 1e-6  # norms and rotary embeddings work in float32
    gain = norm + (kind == "Gemma")
    torch.testing.assert_close(model.get_input_embeddings().weight, embedding @ turn.T)
    torch.testing.assert_close(model.model.layers[1].mlp.up_proj.weight, (reader * gain) @ turn.T)
    torch.testing.assert_close(model.model.layers[0].mlp.down_proj.weight, turn @ writer)
    # transformers would tie the head again: when tokens are added, for one.
    model.tie_weights()
    torch.testing.assert_close(_logits(model), after, rtol=0, atol=0)


def test_a_tied_head_is_tied_again_after_an_error() -> None:
    model = tiny_models.llama(gain=2.0, tie_word_embeddings=True)
    before, config = {n: p.clone() for n, p in model.state_dict().items()}, str(model.config)
    with pytest.raises(ValueError, match="changes the output"):
        merge_residual_rotation(model, _run, 1.1 * torch.eye(64, dtype=torch.float64))
    assert model.lm_head.weight is model.model.embed_tokens.weight and str(model.config) == config
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def _noise_loss(model: nn.Module, plain: torch.Tensor) -> float:
    """The squared change of the logits where every input of a layer that reads the stream errs by a random share."""
    generator, total = torch.Generator().manual_seed(0), 0.0
    names = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")

    def err(module: nn.Module, args: tuple[torch.Tensor]) -> torch.Tensor:
        return args[0] * (1 + 1e-3 * torch.randn(args[0].shape, generator=generator, dtype=args[0].dtype))

    hooks = [m.register_forward_pre_hook(err) for n, m in model.named_modules() if n.endswith(names)]
    for _ in range(20):
        total += float((_logits(model) - plain).square().sum())
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("solver", ["rotation:learned+rtn", SOLVER])
def test_errors_that_are_a_share_of_inputs_cost_less(solver: str) -> None:
    model = tiny_models.llama(gain=2.0, tie_word_embeddings=False)
    with torch.no_grad():
        # Loud channels, as trained models have them.
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.copy_(torch.exp(torch.randn(64, generator=torch.Generator().manual_seed(len(name)))))
    model = model.double()
    plain = _logits(model)
    before = _noise_loss(model, plain)
    layers = make_plan(model, FP8, solver=solver).quantized
    with torch.no_grad():
        notes = merging.merge_learned_rotation(
            model, IDS[:1], list(IDS.split(4)), layers, torch.device("cpu"), Session()
        )
    assert _noise_loss(model, plain) < 0.9 * before
    assert all("rotated with the residual stream, as learned" in note for note in notes.values())
    assert "model.layers.0.mlp.down_proj" in notes  # it writes into the stream


class _Kept(Store):
    """A store that remembers steps."""

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}

    def get(self, step: str) -> Step | None:
        return self.steps.get(step)

    def put(self, step: str, tensors: Any, record: Any, then: Any = None, *, alone: bool = False) -> None:
        self.steps[step] = Step(tensors, record)


def test_a_run_that_is_resumed_takes_the_same_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [tiny_models.llama(gain=2.0) for _ in range(2)]
    layers, session = make_plan(models[0], FP8, solver="rotation:learned+gptq").quantized, Session(store=_Kept())
    for model in models:
        with torch.no_grad():
            merging.merge_learned_rotation(model, IDS[:1], [IDS], layers, torch.device("cpu"), session)
        monkeypatch.setattr(merging, "learned_rotation", lambda *moments: 1 // 0)
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_too_little_memory_is_an_error_with_the_way_out() -> None:
    model = tiny_models.llama(gain=2.0)
    plan = make_plan(model, FP8, solver="rotation:learned+gptq")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"two second moments \[64, 64\] of each of 4 inputs.*give more memory"),
    ):
        merging.merge_learned_rotation(
            model, IDS[:1], [IDS], plan.quantized, torch.device("cpu"), Session(memory=200_000)
        )


@pytest.mark.parametrize("build", [tiny_models.gemma2, tiny_models.qwen3_moe, tiny_models.opt])
def test_what_a_rotation_cannot_pass_is_left_alone(build: Any) -> None:
    model = build(gain=2.0)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    layers = [
        layer for layer in make_plan(model, FP8, solver="rotation:learned+gptq").quantized if layer.kind == "linear"
    ]
    with torch.no_grad():
        notes = merging.merge_learned_rotation(model, IDS[:1], [IDS], layers, torch.device("cpu"), Session())
    assert notes.keys() == {layer.name for layer in layers}
    assert all("rotation left out: the residual stream stays as it is, for " in note for note in notes.values())
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())


def test_other_formats_and_other_rotations_are_refused() -> None:
    model = tiny_models.llama()
    with pytest.raises(ValueError, match=r"q_proj: a rotation is learned for FP8.* makes nvfp4 worse"):
        check_solvers(make_plan(model, "nvfp4", solver="rotation:learned+gptq"))
    plan = make_plan(model, FP8, solver="rotation:learned+gptq")
    mixed = plan.replace_layers(
        [plan.quantized[-1].__class__(**{**vars(plan.quantized[-1]), "solver": "rotation:merge"})]
    )
    with pytest.raises(ValueError, match="would rotate the residual stream again"):
        check_solvers(mixed)


@pytest.mark.parametrize("solver", ["rotation:learned+gptq", SOLVER])
def test_a_tied_model_comes_back_from_files_with_a_head_of_its_own(tmp_path: Path, solver: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = tmp_path / "model"
    tiny_models.llama(gain=2.0, dtype=torch.bfloat16, tie_word_embeddings=True).save_pretrained(model)
    save_file({"input_ids": IDS}, tmp_path / "ids.safetensors")
    out, arguments = tmp_path / "out", ["--calib-samples", 8, "--seqlen", 24]
    result = CliRunner().invoke(
        quantize_command,
        list(map(str, [model, "--format", "fp8", "--solver", solver, "--calib", tmp_path / "ids.safetensors",
                       *arguments, "--out", out])),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (
        "lm_head shares the weight of model.embed_tokens; a learned rotation gives it one of its own" in result.stderr
    )
    source, tensors = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    assert "lm_head.weight" not in source and not tensors["lm_head.weight"].equal(tensors["model.embed_tokens.weight"])
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    head = next(layer for layer in json.loads((out / "plan.json").read_text())["layers"] if layer["name"] == "lm_head")
    assert head.get("tied_to") is None and "no longer shares the weight of model.embed_tokens" in head["reason"]
    original = transformers.AutoModelForCausalLM.from_pretrained(model)
    loaded = load(out)
    expected, ours = _logits(original).float(), _logits(loaded).float()
    assert float((ours - expected).norm() / expected.norm()) < 0.1
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight


def test_a_callers_model_gets_a_head_of_its_own() -> None:
    model = tiny_models.llama(gain=2.0, tie_word_embeddings=True)
    before = _logits(model)
    plan = quantize(model, FP8, IDS, solver="rotation:learned+gptq").plan
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert plan.by_name["lm_head"].tied_to is None and plan.by_name["lm_head"].nbytes == 64 * 64 * 2
    assert float((_logits(model) - before).norm() / before.norm()) < 0.1
