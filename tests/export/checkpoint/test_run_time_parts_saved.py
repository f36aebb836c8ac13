"""The run-time parts of linears are saved, loaded, counted, warned of and applied elsewhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quant
from quant.export.checkpoint.files.compressed_tensors import quantization_config
from quant.export.checkpoint.files.tensors import plan_of_model
from quant.export.checkpoint.other_runtimes import runtime_warnings
from quant.formats.format import FORMATS, get_format
from quant.formats.tensor import quantize
from quant.kernels.linear.install import install_weight
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.kernels.rounding.hadamard import hadamard_transform
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan

IN, OUT, RANK, BLOCK = 64, 48, 4, 32
NVFP4 = get_format("nvfp4")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, OUT)
        self.second = nn.Linear(OUT, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def _parts(chosen: str) -> RunTimeParts:
    every: dict[str, Any] = {
        "pre_scale": (torch.rand(IN) + 0.5).bfloat16(),
        "hadamard": BLOCK,
        "lowrank": (torch.randn(RANK, IN).bfloat16(), torch.randn(OUT, RANK).bfloat16()),
    }
    return RunTimeParts(**{name: part for name, part in every.items() if chosen in (name, "all")})


def _quantized(parts: RunTimeParts) -> tuple[Net, Plan]:
    model = Net().bfloat16()
    first = LayerPlan("first", LayerKind.LINEAR, (OUT, IN), NVFP4)
    weight = quantize(hadamard_transform(model.first.weight.detach(), parts.hadamard or 1), NVFP4)
    install_weight(model, first, weight, None, parts)
    return model, Plan((first, LayerPlan("second", LayerKind.LINEAR, (16, OUT))))


@pytest.mark.parametrize("chosen", ["pre_scale", "hadamard", "lowrank", "all"])
def test_saved_and_loaded_bit_for_bit(chosen: str, tmp_path: Path) -> None:
    parts = _parts(chosen)
    model, plan = _quantized(parts)
    quant.save(model, plan, tmp_path / "out")
    loaded = quant.load(tmp_path / "out", Net().bfloat16())
    x = torch.randn(5, IN, dtype=torch.bfloat16)
    assert torch.equal(loaded(x), model(x))
    again = loaded.get_submodule("first").parts
    assert again.hadamard == parts.hadamard and again.rank == parts.rank
    for ours, theirs in zip(_tensors(parts), _tensors(again), strict=True):
        assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
    assert Plan.load(tmp_path / "out" / "plan.json") == plan_of_model(model, plan)


def _tensors(parts: RunTimeParts) -> list[torch.Tensor]:
    return [t for t in (parts.pre_scale, *(parts.lowrank or ())) if t is not None]


def test_a_promised_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    model, plan = _quantized(_parts("pre_scale"))
    quant.save(model, plan, tmp_path / "out")
    saved = Plan.load(tmp_path / "out" / "plan.json")
    saved.replace_layers([replace(saved.layers[0], parts=Parts(pre_scale=True, rank=RANK))]).save(
        tmp_path / "out" / "plan.json"
    )
    with pytest.raises(ValueError, match=r"no tensor first\.lowrank_down"):
        quant.load(tmp_path / "out", Net().bfloat16())


def test_their_bytes_are_counted() -> None:
    model, plan = _quantized(_parts("all"))
    layer = plan_of_model(model, plan).layers[0]
    module = model.get_submodule("first")
    stored = sum(module.get_buffer(n).nbytes for n in ("codes", "scale", "pre_scale", "lowrank_down", "lowrank_up"))
    assert layer.nbytes == stored + 4  # the global scale
    assert layer.bits_per_weight == pytest.approx(8 * layer.nbytes / (IN * OUT))
    assert LayerPlan.from_dict(layer.to_dict()) == layer
    assert set(plan.layers[0].to_dict()).isdisjoint({"pre_scale", "hadamard", "rank"})


def test_members_of_a_group_rotate_alike() -> None:
    parts = {"a": Parts(hadamard=32), "b": Parts()}
    layers = tuple(LayerPlan(n, LayerKind.LINEAR, (OUT, IN), NVFP4, group="g", parts=p) for n, p in parts.items())
    with pytest.raises(ValueError, match=r"mixes Hadamard blocks \(a=32, b=0\)"):
        Plan(layers).check_groups()


def test_other_runtimes_are_warned_of() -> None:
    plans = {chosen: plan_of_model(*_quantized(_parts(chosen))) for chosen in ("pre_scale", "hadamard", "lowrank")}
    for chosen, word in (("pre_scale", "input scale"), ("hadamard", "Hadamard"), ("lowrank", "low-rank")):
        (warning,) = runtime_warnings(plans[chosen])
        assert warning.startswith(f"{plans[chosen].quantized[0].name} needs {'an' if word[0] == 'i' else 'a'}")
        assert word in warning and "quant.load" in warning
        assert ("vLLM 0.26 decodes wrongly" in warning and "rotation:merge" in warning) == (chosen == "hadamard")
    assert runtime_warnings(plan_of_model(*_quantized(RunTimeParts()))) == []


def test_saving_a_rotated_model_warns_of_vllm(tmp_path: Path) -> None:
    model, plan = _quantized(_parts("hadamard"))
    with pytest.warns(UserWarning, match="vLLM 0.26 decodes wrongly.*rotation:merge"):
        quant.save(model, plan_of_model(model, plan), tmp_path / "out")


@pytest.mark.parametrize(
    ("weight", "activation", "said"),
    [
        ("mxfp6", None, "vLLM 0.26 to 0.33 does not load mxfp6: Only num_bits in (8)"),
        ("int8", "int8_token", "for FP8"),
        ("nvfp4", None, ""),
    ],
)
def test_what_servers_refuse_or_misread_is_warned_of(weight: str, activation: str | None, said: str) -> None:
    inputs = FORMATS[activation] if activation else None
    layers = tuple(LayerPlan(name, LayerKind.LINEAR, (OUT, IN), FORMATS[weight], inputs) for name in "ab")
    warnings = runtime_warnings(Plan(layers))
    assert len(warnings) == bool(said) and all(said in line and "2 layers, a first" in line for line in warnings)


def test_what_transformers_makes_of_fused_experts_is_warned_of() -> None:
    experts = tuple(LayerPlan(f"layers.{i}.experts.up", LayerKind.EXPERTS, (4, OUT, IN), NVFP4) for i in range(2))
    (warning,) = runtime_warnings(Plan(experts))
    assert warning.startswith("2 layers, layers.0.experts.up first, need") and "global scale" in warning


@pytest.mark.parametrize(
    ("width", "format", "told"), [(128, "int4", True), (256, "int4", False), (128, "nvfp4", False)]
)
def test_int4_experts_of_one_group_are_warned_of(width: int, format: str, told: bool) -> None:
    """vLLM 0.26 on an H200: perplexity 7.35 of a Qwen3-MoE of width 128 that has 6.65 in int4a16, and 6.61 in BF16."""
    shapes = {"gate_up_proj": (4, 2 * width, 256), "down_proj": (4, 256, width)}
    plan = Plan(
        tuple(LayerPlan(f"mlp.experts.{n}", LayerKind.EXPERTS, shape, FORMATS[format]) for n, shape in shapes.items())
    )
    lines = [line for line in runtime_warnings(plan) if "another runtime than vLLM 0.26 to 0.33" in line]
    assert [line.partition(" needs")[0] for line in lines] == ["mlp.experts.down_proj"] * told


def test_compressed_tensors_applies_the_rotation() -> None:
    transform = pytest.importorskip("compressed_tensors.transform")
    model, plan = _quantized(_parts("hadamard"))
    config = quantization_config(plan_of_model(model, plan))["transform_config"]
    model.float()
    theirs = Net()
    theirs.load_state_dict(model.state_dict(), strict=False)
    ours = model.get_submodule("first")
    assert isinstance(ours, QuantLinear)
    with torch.no_grad():
        theirs.first.weight.copy_(ours.dequantize())
    x = torch.randn(6, IN)
    unrotated = theirs(x)
    transform.apply_transform_config(theirs, transform.TransformConfig.model_validate(config))
    torch.testing.assert_close(theirs(x), model(x), rtol=1e-5, atol=1e-6)
    assert (unrotated - model(x)).abs().max() > 0.1
