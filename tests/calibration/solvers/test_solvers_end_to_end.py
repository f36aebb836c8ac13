"""Every solver runs from the command line and from Python, and comes back from the checkpoint bit for bit."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from samples import BASE
from torch import nn

from quant.calibration.observers import get_observer
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats, MomentSum, pooled_stats, round_activation
from quant.calibration.walk.block import Settings
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.formats.format import FORMATS
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.open_model import open_model
from quant.recipes.blocks import capture, output_of
from quant.recipes.plan import Plan
from quant.run.api import quantize

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 256, (6, 24), generator=torch.Generator().manual_seed(0))
NVFP4 = FORMATS["nvfp4"]

CASES = [
    ("nvfp4a16", "rtn"),
    ("nvfp4a16", "four_over_six"),
    ("nvfp4a16", "local_hessian"),
    ("nvfp4", "awq+rotation:16+mse"),
    ("nvfp4a16", "rotation:32+lowrank:2+gptq+autoround:2"),
    ("fp8", "gptq"),
    ("int8", "smoothquant+gptq"),
    ("int4a16", "awq+gptq"),
]
# Parts of the pipelines above, alone or in other formats.
SLOW_CASES = [
    ("nvfp4", "awq+lowrank:4+gptq"),
    ("nvfp4a16", "mse"),
    ("nvfp4", "awq+gptq"),
    ("mxfp8", "gptq+autoround:2"),
    ("nvfp4a16", "gptq"),
    ("nvfp4", "smoothquant"),
    ("nvfp4a16", "smoothquant+gptq"),
    ("nvfp4a16", "rotation:32+gptq"),
    ("nvfp4a16", "lowrank:4+mse"),
    ("nvfp4a16", "autoround:2"),
    ("nvfp4", "awq+autoround:2"),
    ("fp8_channel", "awq+gptq"),
    ("mxfp4", "local_hessian"),
    ("fp8_block", "gptq"),
]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "ids.safetensors"
    save_file({"ids": IDS}, path)
    return path


def _buffers(model: nn.Module) -> dict[str, tuple[int, dict[str, torch.Tensor]]]:
    return {
        name: (module.hadamard, {k: v for k, v in module.named_buffers() if v is not None})
        for name, module in model.named_modules()
        if isinstance(module, QuantLinear)
    }


@pytest.mark.parametrize(
    ("preset", "solver"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_command_python_and_reload_agree(preset: str, solver: str, tokens: Path, tmp_path: Path) -> None:
    model = open_model(BASE).model
    done = quantize(model, preset, IDS, solver=solver)
    arguments = [BASE, "--format", preset, "--solver", solver, "--calib", tokens, "--calib-samples", 6, "--seqlen", 24]
    told = CliRunner().invoke(quantize_command, [str(a) for a in [*arguments, "--out", tmp_path / "out", "--quiet"]])
    assert told.exit_code == 0, told.output
    loaded = load(tmp_path / "out")
    ours, theirs = _buffers(model), _buffers(loaded)
    assert set(ours) == set(theirs) == {layer.name for layer in done.plan.quantized}
    for name, (hadamard, buffers) in ours.items():
        assert hadamard == theirs[name][0], name
        assert set(buffers) == set(theirs[name][1]), name
        for key, buffer in buffers.items():
            other = theirs[name][1][key]
            assert torch.equal(buffer.float(), other.float()), (name, key)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    assert Plan.load(tmp_path / "out" / "plan.json").layers == done.plan.layers


@pytest.mark.parametrize(
    "solver",
    [
        "gptq",
        pytest.param("awq+gptq", marks=pytest.mark.slow),
        pytest.param("rotation:32+gptq", marks=pytest.mark.slow),
        "lowrank:8+gptq",
        "local_hessian",
    ],
)
def test_second_order_solvers_lose_less_than_rounding(solver: str) -> None:
    """On the text they were calibrated on, in the logits of a model of random weights."""
    base = open_model(BASE).model.float()
    losses = {}
    for name in ("rtn", solver):
        model = copy.deepcopy(base)
        quantize(model, "nvfp4a16", IDS, solver=name)
        with torch.no_grad():
            losses[name] = float((model(IDS).logits - base(IDS).logits).double().square().sum())
    assert losses[solver] < losses["rtn"]


def _biased(name: str) -> nn.Module:
    """A tiny model whose linears have biases as large as their outputs; transformers begins with zeros."""
    qwen2 = {"family": "Qwen2", "head": "ForCausalLM", "sizes": tiny_models.DECODER}
    makers = {"opt": tiny_models.opt, "gpt2": tiny_models.gpt2, "qwen2": partial(tiny_models.build, **qwen2)}
    model: nn.Module = makers[name](gain=3)
    for path, parameter in model.named_parameters():
        if path.endswith("bias") and not re.search(r"norm|ln_", path):
            parameter.data.normal_(0, 0.5)
    return model


def _kl(model: nn.Module, base: nn.Module) -> float:
    with torch.no_grad():
        found, wanted = (each(IDS % 64).logits.double().log_softmax(-1) for each in (model, base))
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "block"),
    [
        pytest.param("qwen2", "model.layers.0", marks=pytest.mark.slow),
        ("opt", "model.decoder.layers.0"),
        ("gpt2", "transformer.h.0"),
    ],
)
def test_learned_rounding_keeps_biases(name: str, block: str) -> None:
    """It starts from the error of the block that GPTQ gave, biases included, and loses no more in the end."""
    base = _biased(name)
    gptq = quantize(copy.deepcopy(base), "nvfp4a16", IDS % 64, solver="gptq").model
    learned = quantize(copy.deepcopy(base), "nvfp4a16", IDS % 64, solver="gptq+autoround:20")
    batch = Settings().batch
    held_out = [capture(each, [block], lambda each=each: each(IDS[batch:] % 64))[block] for each in (base, gptq)]
    with torch.no_grad():
        wanted, found = (
            output_of(each.get_submodule(block)(*call.args, **call.kwargs))
            for each, call in zip((base, gptq), held_out, strict=True)
        )
    error = ((found - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1)).square().mean()
    reason = next(layer.reason for layer in learned.plan.quantized if layer.name.startswith(f"{block}."))
    (before,) = re.findall(r"block error (\S+) before autoround", reason)
    assert float(before) == pytest.approx(float(error), rel=0.01)  # it is printed with three digits
    assert _kl(learned.model, base) < 1.2 * _kl(gptq, base)


def test_branches_are_counted_in_the_plan() -> None:
    done = quantize(open_model(BASE).model, "nvfp4a16", IDS, solver="lowrank:4+gptq")
    layer = done.plan.quantized[0]
    rows, columns = layer.shape
    assert layer.parts.rank == 4
    assert layer.bits_per_weight == pytest.approx(
        NVFP4.bits_per_weight(layer.shape) + 16 * 4 * (rows + columns) / (rows * columns)
    )


def test_unsupported_formats_name_layer_solver_and_way_out() -> None:
    model = open_model(BASE).model
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"q_proj: solver 'local_hessian' does not support fp8; solvers that do: .*gptq"
    ):
        quantize(model, "fp8", IDS, solver="local_hessian")
    with pytest.raises(ValueError, match=r"q_proj: solver 'awq\+four_over_six' does not support mxfp4"):
        quantize(model, "mxfp4", IDS, solver="awq+four_over_six")
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        ("gptq+awq", "'awq' comes too late"),
        ("lowrank+rotation", "'rotation' comes too late"),
        ("autoround:0", "whole one from 1"),
        ("gptq:3", "only rotation, lowrank, residual, autoround take a number"),
        ("gptq+gptq", "'gptq' comes too late"),
        ("magic", "unknown solver 'magic'"),
    ],
)
def test_names_that_make_no_sense(solver: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_pipeline(solver)


def _held_out_error(model: nn.Module, base: nn.Module, name: str, ids: torch.Tensor) -> float:
    """Relative error of one layer on the inputs that the quantized model gives it."""
    caught: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    x = caught[0].double().flatten(0, -2)
    wanted = x @ base.get_submodule(name).weight.detach().double().t()
    found = x @ model.get_submodule(name).dequantize(torch.float64).t()
    return float((found - wanted).norm() / wanted.norm())


def test_the_guard_measures_held_out_rows_and_promotes_beyond_the_limit() -> None:
    base = open_model(BASE).model.float()
    plain = copy.deepcopy(base)
    quantize(plain, "nvfp4a16", IDS, solver="rtn")
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    # Six rows are two batches, of four and of two; the second is held out.
    error = max(_held_out_error(plain, base, name, IDS[4:]) for name in names)
    for limit, expected in ((error * 1.001, "nvfp4"), (error * 0.999, "mxfp8")):
        done = quantize(copy.deepcopy(base), "nvfp4a16", IDS, solver="rtn", guard=f"{limit} mxfp8 keep")
        layers = [done.plan.by_name[name] for name in names]
        assert [str(layer.weight) for layer in layers] == [expected] * 3
        assert all(("exceeds the limit" in layer.reason) == (expected == "mxfp8") for layer in layers)


def test_the_guard_goes_down_its_list_to_16_bit() -> None:
    base = open_model(BASE).model.float()
    model = copy.deepcopy(base)
    done = quantize(model, "nvfp4", IDS, solver="awq+gptq", guard="1e-9 mxfp8 keep")
    assert not done.plan.quantized and not any(isinstance(m, QuantLinear) for m in model.modules())
    reason = done.plan.by_name["model.layers.0.mlp.down_proj"].reason
    assert "so mxfp8 instead" in reason and "so 16 bit instead" in reason
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, base(IDS).logits, rtol=1e-4, atol=1e-4)


def test_the_guard_changes_a_solver_that_does_not_know_the_new_format() -> None:
    done = quantize(open_model(BASE).model, "nvfp4a16", IDS, solver="local_hessian", guard="1e-9 fp8_channel")
    layer = done.plan.quantized[0]
    assert str(layer.weight) == "fp8_channel" and layer.solver == "mse"
    assert "local_hessian does not support fp8_channel" in layer.reason
    assert "last format in its list" in layer.reason


def test_a_promoted_layer_forgets_the_static_scale_of_its_old_inputs() -> None:
    plan = quantize(open_model(BASE).model, "nvfp4", IDS, guard="1e-6 fp8_channel keep").plan
    reasons = [layer.reason for layer in plan.layers if "in fp8_channel exceeds" in layer.reason]
    assert reasons
    for reason in reasons:
        four, eight = (float(found) for found in re.findall(r"relative error ([\d.e-]+) in", reason))
        assert eight < four / 2, reason


@pytest.mark.parametrize("text", ["", "x fp8", "-1 keep", "0.1 fp9"])
def test_a_guard_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"guard '.*'"):
        quantize(open_model(BASE).model, "nvfp4a16", IDS, guard=text or " ")


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_observers_set_static_scales(solver: str) -> None:
    base = open_model(BASE).model.float()
    name = "model.layers.0.self_attn.o_proj"
    watching = get_observer("percentile")(FORMATS["fp8"], name=name)
    hook = base.get_submodule(name).register_forward_pre_hook(lambda _, args: watching.update(args[0]))
    with torch.no_grad():
        base(IDS)
    hook.remove()
    model = copy.deepcopy(base)
    quantize(model, "fp8", IDS, solver=solver, observer="percentile")
    wanted = float(watching.amax()) / 448
    assert float(model.get_submodule(name).input_scale) == pytest.approx(wanted, rel=1e-3)
    plain = copy.deepcopy(base)
    quantize(plain, "fp8", IDS, solver=solver)
    assert float(plain.get_submodule(name).input_scale) > wanted
    with pytest.raises(ValueError, match="unknown observer 'median'"):
        quantize(copy.deepcopy(base), "fp8", IDS, observer="median")


def _moe(silence: int | None = None) -> nn.Module:
    """Four experts, two a token; `silence` names one that the router never picks."""
    model: nn.Module = tiny_models.qwen3_moe(vocab_size=256, intermediate_size=64, seed=1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.1)
    if silence is not None:
        for layer in model.model.layers:
            gate = layer.mlp.gate
            gate.register_forward_pre_hook(lambda module, args: (args[0].abs(),))
            gate.weight.data.abs_()
            gate.weight.data[silence] = -100
    return model


def _expert_inputs(model: nn.Module, path: str) -> list[list[torch.Tensor]]:
    """What reaches each expert's first projection in block 0, batch by batch, from the router's own choice."""
    caught: list[tuple[torch.Tensor, torch.Tensor]] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: caught.append(args[:2]))
    with torch.no_grad():
        for batch in IDS.split(Settings.batch):
            model(batch)
    hook.remove()
    return [[x.flatten(0, -2)[(chosen == expert).any(-1)] for x, chosen in caught] for expert in range(4)]


def _moment(batches: Sequence[torch.Tensor]) -> LayerStats | None:
    moment = MomentSum()
    for x in batches:
        if len(x):
            moment.add(x)
    return moment.stats()


@pytest.mark.parametrize("solver", ["awq+gptq", "smoothquant+gptq", "rotation:merge+gptq"])
def test_attention_beside_fused_experts_is_transformed(solver: str) -> None:
    """The search for where a scale goes runs in float64, which grouped matmuls refuse; it still beats rounding."""
    base = _moe()
    with torch.no_grad():
        wanted = base(IDS).logits
    errors = {}
    for name in ("rtn", solver):
        model = copy.deepcopy(base)
        quantize(model, "nvfp4a16", IDS, solver=name, include=["*.self_attn.*"])
        with torch.no_grad():
            errors[name] = float((model(IDS).logits - wanted).norm())
    assert errors[solver] < errors["rtn"]


def test_scales_that_are_merged_or_left_out_leave_nothing_to_run_time() -> None:
    """In GPT-2 norms absorb the scales of what they feed; GELU lets none through, nor does a fused q, k, v."""
    base, ids = tiny_models.gpt2(), IDS % 64
    done = {s: quantize(copy.deepcopy(base), "nvfp4", ids, solver=s) for s in ("awq+gptq", "awq:merge+gptq")}
    kept = {solver: {m.name for m in each.plan.quantized if m.parts.pre_scale} for solver, each in done.items()}
    assert {name.rpartition(".h.")[2][2:] for name in kept["awq+gptq"]} == {"attn.c_proj", "mlp.c_proj"}
    assert not kept["awq:merge+gptq"]
    left = {m.name for m in done["awq:merge+gptq"].plan.quantized if "without awq" in m.reason}
    assert left == kept["awq+gptq"]
    norms = [each.model.get_submodule("transformer.h.0.ln_2").weight for each in (*done.values(),)]
    assert torch.equal(*norms) and not torch.equal(norms[0], base.transformer.h[0].ln_2.weight)


def test_fused_experts_are_solved_on_the_tokens_that_reach_them() -> None:
    base = _moe()
    model = copy.deepcopy(base)
    # Attention stays in 16 bit, so that the first block's experts get their original inputs.
    done = quantize(model, "nvfp4a16", IDS, solver="awq+gptq", include=["*.experts.*"])
    path = "model.layers.0.mlp.experts"
    layer = done.plan.by_name[f"{path}.gate_up_proj"]
    assert "only gptq" in layer.reason and "no calibration token" not in layer.reason
    found = model.get_submodule(path).gate_up_proj
    assert isinstance(found, QuantExperts)
    for expert, batches in enumerate(_expert_inputs(base, path)):
        x = torch.cat(batches)
        weight = base.get_submodule(path).gate_up_proj[expert].detach()
        rounding = get_pipeline("gptq").rounding
        wanted = solve_group({"w": weight}, {"w": _moment(batches)}, NVFP4, rounding)["w"].dequantize()
        given = found.quantized_weight.matrix(expert).dequantize()
        assert float((given != wanted).float().mean()) < 0.02  # moments are summed in another order
        plain = solve_group({"w": weight}, {}, NVFP4, get_pipeline("mse").rounding)["w"].dequantize()
        loss = [float(((q - weight) @ x.t()).square().sum()) for q in (given, plain)]
        assert loss[0] < loss[1]


def test_an_expert_that_no_token_reached_gets_pooled_statistics_and_a_note() -> None:
    base = _moe(silence=2)
    assert not any(len(x) for x in _expert_inputs(base, "model.layers.0.mlp.experts")[2])
    model = copy.deepcopy(base)
    done = quantize(model, "nvfp4a16", IDS, solver="gptq", include=["*.experts.*"])
    path = "model.layers.0.mlp.experts"
    assert "reached 1 of 4 experts" in done.plan.by_name[f"{path}.gate_up_proj"].reason
    reached = [stats for batches in _expert_inputs(base, path) if (stats := _moment(batches)) is not None]
    weight = base.get_submodule(path).gate_up_proj[2].detach()
    wanted = solve_group({"w": weight}, {"w": pooled_stats(reached)}, NVFP4, get_pipeline("gptq").rounding)["w"]
    given = model.get_submodule(path).gate_up_proj.quantized_weight.matrix(2).dequantize()
    assert float((given != wanted.dequantize()).float().mean()) < 0.02


def _with_tower() -> nn.Module:
    model = tiny_models.llama(seed=0)
    model.tower = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    return model


@pytest.mark.parametrize(
    "solver",
    [
        "gptq",
        pytest.param("local_hessian", marks=pytest.mark.slow),
        pytest.param("awq+gptq", marks=pytest.mark.slow),
        "rotation:16+lowrank:2+gptq",
        "autoround:2",
    ],
)
def test_a_tower_that_text_does_not_reach_is_solved_without_data(solver: str) -> None:
    model = _with_tower()
    weight = model.tower[0].weight.detach().clone()
    done = quantize(model, "nvfp4a16", IDS % 64, solver=solver)
    layer = done.plan.by_name["tower.0"]
    assert layer.reason.endswith("no calibration token reached it: solved with mse, which looks at none")
    assert layer.solver == "mse" and done.plan.by_name["model.layers.0.mlp.up_proj"].solver == solver
    wanted = solve_group({"w": weight}, {}, NVFP4, get_pipeline("mse").rounding)["w"].dequantize()
    if solver in ("gptq", "local_hessian"):
        assert torch.equal(model.tower[0].dequantize(), wanted)
    error = (model.tower[0].weight.detach() - weight).norm() / weight.norm()
    assert float(error) < 0.12
    with pytest.raises(ValueError, match=r"tower\.0: never called on the calibration data"):
        quantize(_with_tower(), "fp8", IDS % 64, solver="gptq")


class _Projected(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.projection = norm, nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projection(self.norm(x))  # type: ignore[no-any-return]


class _Masked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, torch.full((), torch.finfo(x.dtype).min))  # refused in float64, as in XGLM's attention


def test_a_layer_behind_solved_experts_is_solved_on_their_outputs() -> None:
    model = tiny_models.qwen3_moe(seed=0)
    model.model.norm = _Projected(model.model.norm)
    model.config._experts_implementation = "grouped_mm"  # as from_pretrained chooses
    quantize(model, "nvfp4", IDS % 64, solver="gptq", include=["*.experts.*", "*.projection"])
    layer = model.model.norm.projection
    seen: list[torch.Tensor] = []
    with layer.register_forward_pre_hook(lambda module, args: seen.append(args[0])):
        model(IDS % 64)
    assert torch.allclose(layer.input_scale, seen[0].abs().max() / (6 * 448), rtol=1e-3)


def test_a_block_that_does_not_run_in_float64_takes_no_scales_into_its_modules() -> None:
    model = tiny_models.llama(seed=0, num_hidden_layers=1)
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, _Masked())
    done = quantize(model, "nvfp4a16", IDS % 64, solver="awq+rtn")
    assert "does not run in float64" in done.plan.by_name["model.layers.0.self_attn.q_proj"].reason
    assert model(IDS % 64).logits.isfinite().all()


def test_activations_of_experts_are_rounded_while_they_are_solved() -> None:
    """W4A4 experts: the static scale is that of the original inputs, and the second moment that of rounded ones."""
    base = _moe()
    model = copy.deepcopy(base)
    quantize(model, "nvfp4", IDS, solver="gptq", include=["*.experts.*"])
    path = "model.layers.0.mlp.experts"
    found = model.get_submodule(path).gate_up_proj
    rounded = [round_activation(x, NVFP4, found.input_scale) for x in _expert_inputs(base, path)[1]]
    weight = base.get_submodule(path).gate_up_proj[1].detach()
    wanted = solve_group({"w": weight}, {"w": _moment(rounded)}, NVFP4, get_pipeline("gptq").rounding)["w"].dequantize()
    assert float((found.quantized_weight.matrix(1).dequantize() != wanted).float().mean()) < 0.02
