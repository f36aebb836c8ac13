"""Folding is proved on tiny models, transforms are exact before rounding, and the walk is compared with a plain one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from plan_samples import watched_layers
from torch import nn

import quant
from quant.calibration import session
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.outputs.gradients import OutputMoments
from quant.calibration.session import Session, placed
from quant.calibration.solvers.awq import channel_scale, search_scale
from quant.calibration.solvers.fold import apply_fold, find_fold, modules_in_order
from quant.calibration.solvers.interfaces import GroupInputs, sampled
from quant.calibration.solvers.registry import TRANSFORMS, get_pipeline
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.statistics import LayerStats, MomentSpread, shrink, static_input_scale
from quant.calibration.walk.block import Settings, Solved
from quant.calibration.walk.walk import solve_sequentially
from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize, round_activation
from quant.recipes.blocks import Call, block_names, calls_of_chain, capture, find_chains, output_of
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan

NVFP4 = FORMATS["nvfp4"]


def _llama(layers: int = 2, seed: int = 0) -> nn.Module:
    model: nn.Module = tiny_models.llama(num_hidden_layers=layers, vocab_size=50, seed=seed, gain=3)
    return model


def _bert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
    model: nn.Module = tiny_models.bert(**sizes)
    return model


def _plan(model: nn.Module, solver: str, activation: str | None = None) -> Plan:
    ids = torch.zeros(1, 4, dtype=torch.long)
    layers = watched_layers(model, lambda m: m(ids))
    planned = []
    for layer in layers:
        fits = layer.kind == LayerKind.LINEAR
        planned.append(
            LayerPlan(
                layer.name,
                layer.kind,
                layer.shape,
                NVFP4 if fits else None,
                FORMATS[activation] if fits and activation else None,
                solver,
                group=layer.group,
            )
        )
    return Plan(tuple(planned))


def _solve(
    model: nn.Module, plan: Plan, rows: torch.Tensor, device: torch.device | None = None, **settings: Any
) -> dict[str, Solved]:
    solved: dict[str, Solved] = {}
    solve_sequentially(
        model,
        plan,
        rows,
        apply=lambda layer, s, weight: solved.__setitem__(layer.name, s),
        session=Session(device),
        settings=Settings(**settings),
    )
    return solved


ROWS = torch.randint(0, 50, (6, 24), generator=torch.Generator().manual_seed(1))


def test_tokens_without_weight_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the rows with weights of zero gives the codes that the other rows give alone."""
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)  # it is found from the spread between all rows
    solved = []
    for rows, weights in ((ROWS, (1.0, 1.0, 0.0)), (ROWS[:4], (1.0, 1.0)), (ROWS, ())):

        def moments(
            model: nn.Module, groups: Any, batches: Any, session: Any, weights: tuple[float, ...] = weights
        ) -> OutputMoments:
            random = torch.Generator().manual_seed(2)
            found = OutputMoments()
            for members in groups:
                size = sum(member.shape[0] for member in members)
                gradients = torch.randn(4 * size, size, generator=random)
                found.moments[members[0].name] = LayerStats(4 * size, gradients.t() @ gradients / len(gradients))
                found.token_weights[members[0].name] = [torch.full((48,), weight) for weight in weights]
            return found

        monkeypatch.setattr("quant.calibration.walk.walk.output_moments", moments)
        solved.append(_solve(model := _llama(), _plan(model, "kfac"), rows, batch=2))
    # Of the first block: a code that rounding flips there changes the inputs of the second one.
    weighted, alone, all_rows = ([s.weight.codes for n, s in each.items() if ".0." in n] for each in solved)
    same = [float((a == b).float().mean()) for a, b in zip(weighted, alone, strict=True)]
    assert min(same) > 0.97
    assert max(float((a == b).float().mean()) for a, b in zip(all_rows, alone, strict=True)) < 0.95


@pytest.mark.parametrize("every", [16, 64, 256])
def test_a_sample_of_tokens_holds_first_tokens_like_any_others(every: int) -> None:
    batches = every // 2  # of 4 rows of 512 tokens: 1,024 tokens are sampled
    places = torch.cat([sampled(torch.arange(2048) % 512, every, number) for number in range(batches)])
    assert abs(len(places) - 1024) <= batches
    # Every part of a row of 32 tokens has its share of 64, and first tokens are among the first of these.
    counts = torch.bincount(places // 32, minlength=16)
    assert int(counts.min()) >= 32 and int(counts.max()) <= 96
    assert int((places == 0).sum()) <= 16
    assert len(sampled(torch.arange(3), every, 5)) == 1


def test_folds_of_a_llama_block_are_found_by_running_it() -> None:
    model = _llama().double()
    with torch.no_grad():
        call = capture(model, ["model.layers.1"], lambda: model(ROWS[:1, :8]))["model.layers.1"]
    block = model.model.layers[1]
    order = modules_in_order(block, call)

    def fold(*readers: str) -> Any:
        return find_fold(block, call, readers, list(reversed(order[: order.index(readers[0])])))

    assert fold("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj").producer == "input_layernorm"
    assert fold("mlp.gate_proj", "mlp.up_proj").producer == "post_attention_layernorm"
    down = fold("mlp.down_proj")
    assert down.producer == "mlp.up_proj" and torch.equal(down.owner, torch.arange(96))
    out = fold("self_attn.o_proj")
    assert out.producer == "self_attn.v_proj"
    # Heads of 16: query heads 0 and 1 read key-value head 0, heads 2 and 3 read head 1.
    heads = torch.arange(32).view(2, 1, 16).expand(2, 2, 16).reshape(-1)
    assert torch.equal(out.owner, heads)
    # A norm whose output someone else reads too must not be touched.
    assert fold("mlp.gate_proj") is None


def test_folding_leaves_the_block_as_it_was() -> None:
    model = _llama().double()
    call = capture(model, ["model.layers.0"], lambda: model(ROWS[:2]))["model.layers.0"]
    block = model.model.layers[0]
    with torch.no_grad():
        before = output_of(block(*call.args, **call.kwargs))
        small = capture(model, ["model.layers.0"], lambda: model(ROWS[:1, :8]))["model.layers.0"]
        order = modules_in_order(block, small)
        for reader in ("mlp.down_proj", "self_attn.o_proj"):
            found = find_fold(block, small, [reader], list(reversed(order[: order.index(reader)])))
            assert found is not None
            producer = block.get_submodule(found.producer)
            by = torch.rand(len(producer.weight), dtype=torch.float64) + 0.5
            became = apply_fold(producer, by, found.offset)
            block.get_submodule(reader).weight.mul_(became[found.owner])
        after = output_of(block(*call.args, **call.kwargs))
    assert float((after - before).norm() / before.norm()) < 1e-6


def test_a_norm_of_one_plus_weight_is_folded_as_such() -> None:
    class OnePlus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8).double() * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / x.square().mean(-1, keepdim=True).sqrt() * (1 + self.weight)

    block = nn.Sequential(OnePlus(), nn.Linear(8, 4).double())
    call = Call((torch.randn(1, 5, 8).double(),), {}, 0)
    found = find_fold(block, call, ["1"], ["0"])
    assert found is not None and found.offset == 1
    x = call.args[0]
    with torch.no_grad():
        before = block(x)
        by = apply_fold(block[0], torch.rand(8) + 0.5, found.offset)
        block[1].weight.mul_(by)
        torch.testing.assert_close(block(x), before, rtol=1e-6, atol=1e-7)


def test_a_folded_norm_is_compensated_for_its_own_rounding() -> None:
    norm = nn.LayerNorm(64).to(torch.bfloat16)
    norm.weight.data.uniform_(0.5, 2)
    old = norm.weight.detach().double().clone()
    by = apply_fold(norm, torch.rand(64) + 0.5, 0)
    torch.testing.assert_close(norm.weight.detach().double() * by.double(), old, rtol=1e-7, atol=0)


def test_the_chains_of_an_encoder_and_of_a_plain_mlp() -> None:
    bert = _bert()
    names = block_names(bert)
    assert names == ["encoder.layer.0", "encoder.layer.1"]
    assert find_chains(bert, names, lambda: bert(ROWS[:1])) == [names]
    assert block_names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []


def test_a_model_whose_layers_are_all_quantized_has_the_blocks_that_it_had() -> None:
    model = _llama()
    names = block_names(model)
    quantized = quant.quantize(model, "nvfp4a16").model
    assert not any(isinstance(module, nn.Linear) for module in quantized.get_submodule("model.layers").modules())
    assert block_names(quantized) == names == ["model.layers.0", "model.layers.1"]
    layers = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    assert block_names(quant.quantize(layers, "nvfp4a16").model) == []


def test_calls_of_equal_batches_share_their_arguments() -> None:
    model = _llama()
    names = block_names(model)
    calls = calls_of_chain(model, names, [lambda r=rows: model(r) for rows in ROWS.split(2)])
    first, last = calls[0][names[1]], calls[2][names[1]]
    assert first is last
    assert not torch.equal(calls[0][names[0]].hidden, calls[2][names[0]].hidden)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("solver", ["awq+gptq", "smoothquant+gptq"])
def test_transforms_change_nothing_before_rounding(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding replaced by the identity, the scaled and folded model is the old one."""
    import quant.calibration.walk.round as round_step

    model = _llama().double()
    with torch.no_grad():
        before = model(ROWS).logits
    kept: dict[str, torch.Tensor] = {}
    real = round_step.solve_group

    def keep(weights: Any, stats: Any, format: Any, pipeline: Any, stored: Any, *, stack: bool) -> Any:
        kept.update({name: weight.clone() for name, weight in weights.items()})
        return real(weights, stats, format, pipeline, stack=stack)

    monkeypatch.setattr(round_step, "solve_group", keep)
    solved = _solve(model, _plan(model, solver), ROWS, batch=2)
    assert all(s.parts.pre_scale is None for s in solved.values())
    changed = [name for name, weight in kept.items() if not torch.allclose(weight, _weight(model, name), rtol=0.01)]
    for name, weight in kept.items():
        _set(model, name, weight)
    with torch.no_grad():
        after = model(ROWS).logits
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert changed == [] or len(changed) == len(kept)


def _weight(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(name).weight.detach().float()


def _set(model: nn.Module, name: str, weight: torch.Tensor) -> None:
    model.get_submodule(name).weight.data = weight.to(model.get_submodule(name).weight.dtype)


def test_channels_that_share_a_row_share_their_scale() -> None:
    owner = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3])
    scale = channel_scale(torch.rand(8) + 0.1, torch.randn(5, 8), 0.5, 0.5, owner)
    torch.testing.assert_close(scale[[0, 1, 4, 5]], scale[[2, 3, 6, 7]])
    assert len(scale.unique()) == 4


def test_the_search_takes_the_power_with_the_smallest_error() -> None:
    weight, x = torch.randn(12, 32) * 0.1, torch.randn(100, 32) * torch.logspace(-1, 1, 32)
    magnitude = x.abs().mean(0)

    def round_weight(w: torch.Tensor) -> torch.Tensor:
        return solve_group({"w": w}, {}, NVFP4, get_pipeline("rtn"))["w"].dequantize()

    scale = search_scale(weight, x, magnitude, round_weight, None)
    errors = {}
    for power in (k / 10 for k in range(10)):
        s = channel_scale(magnitude, weight, power, 0.0, None)
        errors[power] = float((x @ (round_weight(weight * s) / s).t() - x @ weight.t()).double().square().sum())
    best = min(errors, key=errors.__getitem__)
    assert 0 < best < 0.9
    torch.testing.assert_close(scale, channel_scale(magnitude, weight, best, 0.0, None))


@pytest.mark.usefixtures("products")
def test_the_walk_gives_what_solving_by_hand_gives() -> None:
    """Weight-only GPTQ, first block, first group: the second moment of the embedded rows behind the first norm."""
    model = _llama(seed=3)
    plan = _plan(model, "gptq")
    with torch.no_grad():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ROWS)).reshape(-1, 64)
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkv"]
    tall = torch.cat([_weight(model, name) for name in names])
    exact, spread = x.double().t().mm(x.double()).div(len(x)).float(), MomentSpread(x)
    spread.add(x, len(ROWS))
    stats = LayerStats(len(x), shrink(exact, spread.shrinkage()))
    expected = solve_group({"w": tall}, {"w": stats}, NVFP4, get_pipeline("gptq"))["w"].dequantize()
    solved = _solve(model, plan, ROWS, batch=3)
    found = torch.cat([solved[name].weight.dequantize() for name in names])
    assert float((found != expected).float().mean()) < 0.02  # the sums are in another order


@pytest.mark.usefixtures("products")
def test_later_layers_see_earlier_ones_quantized() -> None:
    """The second block's statistics come from the quantized first block: with it kept, the result is another."""
    model = _llama(seed=4)
    plan = _plan(model, "gptq")
    whole = _solve(copy.deepcopy(model), plan, ROWS)
    layers = [replace(layer, weight=None) if ".0." in layer.name else layer for layer in plan.layers]
    second = _solve(copy.deepcopy(model), replace(plan, layers=tuple(layers)), ROWS)
    name = "model.layers.1.mlp.down_proj"
    assert not torch.equal(whole[name].weight.codes, second[name].weight.codes)


@pytest.mark.parametrize("activation", [None, "nvfp4", "fp8_token"])
def test_the_walk_leaves_no_hooks_and_its_model_in_one_piece(activation: str | None) -> None:
    model = _llama()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    classes = {name: type(m) for name, m in model.named_modules()}
    solved = _solve(model, _plan(model, "gptq", activation), ROWS, batch=2)
    assert len(solved) == 14
    assert {name: type(m) for name, m in model.named_modules()} == classes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    static = activation == "nvfp4"
    assert all((s.input_scale is not None) == static for s in solved.values())


@pytest.mark.parametrize(("dtype", "least"), [(torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133)])
def test_a_static_input_scale_is_never_zero(dtype: torch.dtype, least: float) -> None:
    """Down to the smallest number of the dtype that it is stored in, from inputs that are smaller still."""
    for amax, wanted in ((448 * least, least), (least, least), (448.0, 1.0), (0.0, 1.0)):
        scale = static_input_scale(torch.tensor(amax), FORMATS["fp8"], dtype)
        assert scale is not None and float(scale) == wanted and float(scale.to(dtype)) == wanted


def test_static_input_scales_are_those_of_the_original_inputs() -> None:
    model = _llama()
    seen: dict[str, float] = {}
    name = "model.layers.1.mlp.down_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda m, args: seen.__setitem__("amax", max(seen.get("amax", 0.0), float(args[0].abs().max())))
    )
    with torch.no_grad():
        model(ROWS)
    handle.remove()
    solved = _solve(model, _plan(model, "gptq", "nvfp4"), ROWS, batch=2)
    assert float(solved[name].input_scale) == pytest.approx(seen["amax"] / (6 * 448), rel=1e-5)


@pytest.mark.parametrize("solver", ["gptq", "local_hessian"])
def test_static_scales_of_fp8_inputs_fit_the_weights_behind_them(solver: str) -> None:
    """Of sixteen scales an octave the one whose rounding hurts outputs least; nothing saturates."""
    model, fp8 = _llama(), FORMATS["fp8"]
    names = ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"]
    inputs: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        # A loud output of v that hardly changes from token to token, as LLMs have them.
        model.model.layers[0].self_attn.v_proj.weight[3] *= 30
    hooks = [
        model.get_submodule(n).register_forward_pre_hook(
            lambda m, args, name=n: inputs.__setitem__(name, args[0].flatten(0, 1))
        )
        for n in names
    ]
    with torch.no_grad():
        model(ROWS)
    [hook.remove() for hook in hooks]
    weights = {name: model.get_submodule(name).weight.detach().double() for name in names}
    results = {key: _solve(copy.deepcopy(model), _plan(model, key, "fp8"), ROWS) for key in ("rtn", solver)}
    for name, x in inputs.items():

        def loss(scale: torch.Tensor, name: str = name, x: torch.Tensor = x) -> float:
            error = (round_activation(x, fp8, scale) - x).double() @ weights[name].t()
            return float(error.square().sum())

        first, chosen = results["rtn"][name].input_scale, results[solver][name].input_scale
        assert float(first) == pytest.approx(float(x.abs().max()) / 448, rel=0.01)
        assert float(first) <= float(chosen) < 2.01 * float(first)
        assert loss(chosen) <= 1.001 * min(loss(first * 2 ** (k / 16)) for k in range(16))
    assert any(results[solver][name].input_scale > results["rtn"][name].input_scale for name in names)


def test_gptq_on_a_bert_beats_rounding_in_the_output() -> None:
    model = _bert()
    rows = torch.randint(0, 50, (32, 24), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = model(rows).last_hidden_state
    errors = {}
    for solver in ("rtn", "gptq", "awq+gptq", "local_hessian"):
        copied = copy.deepcopy(model)
        plan = _plan(copied, solver)

        def apply(layer: LayerPlan, solved: Solved, weight: torch.Tensor, copied: nn.Module = copied) -> None:
            scale = 1 if solved.parts.pre_scale is None else solved.parts.pre_scale
            _set(copied, layer.name, solved.weight.dequantize() * scale)

        solve_sequentially(copied, plan, rows, apply=apply, settings=Settings(batch=8))
        with torch.no_grad():
            errors[solver] = float((copied(rows).last_hidden_state - wanted).square().mean())
    assert errors["gptq"] < 0.6 * errors["rtn"]
    assert errors["local_hessian"] < errors["rtn"]
    assert errors["awq+gptq"] < 0.6 * errors["rtn"]


def test_the_mean_output_error_goes_into_the_bias() -> None:
    """First block of an encoder: its query projection is right on average, on the text it was calibrated on."""
    model = _bert()
    name = "encoder.layer.0.attention.self.query"
    caught: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        model(ROWS)
    handle.remove()
    x = caught[0].double().flatten(0, -2)
    layer = model.get_submodule(name)
    wanted = (x @ layer.weight.detach().double().t() + layer.bias.detach().double()).mean(0)
    solved = _solve(model, _plan(model, "gptq"), ROWS, batch=2)[name]
    found = (x @ solved.weight.dequantize().double().t() + layer.bias.detach().double()).mean(0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert solved.notes == ("bias corrected",)


def test_a_model_without_blocks_is_one_block() -> None:
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).eval()
    solved = _solve(model, _plan(model, "awq+gptq"), ROWS, batch=2)
    assert sorted(solved) == ["1", "3"]


def test_nan_names_the_layer_and_the_row() -> None:
    model = _llama()
    embed = model.model.embed_tokens
    embed.forward = lambda ids: embed.weight[ids].masked_fill((ids == 49)[..., None], torch.nan)
    rows = ROWS.clamp(max=48)
    rows[4, 3] = 49
    with pytest.raises(
        ValueError,
        match=r"model\.layers\.0\.self_attn\.q_proj: .*NaN .* on calibration row 4, and no weight does",
    ):
        _solve(model, _plan(model, "awq+gptq"), rows, batch=2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_the_same_twice() -> None:
    a, b = (_solve(_llama(), _plan(_llama(), "awq+gptq", "nvfp4"), ROWS) for _ in range(2))
    assert all(torch.equal(a[name].weight.codes, b[name].weight.codes) for name in a)


@pytest.mark.gpu
def test_a_block_at_a_time_on_the_gpu() -> None:
    """GPTQ on a GPU gives other codes than on a CPU, and no worse ones.

    It turns the last bit of a sum, or a tie of two scales, into other codes a few columns on. So does a CPU with
    weights moved by 1e-6: half of the second block's codes change.
    """
    model = _llama()
    on_cpu = _solve(copy.deepcopy(model), _plan(model, "gptq"), ROWS)
    on_gpu = _solve(copy.deepcopy(model), _plan(model, "gptq"), ROWS, device=torch.device("cuda"))
    nearest = _solve(copy.deepcopy(model), _plan(model, "rtn"), ROWS)
    with torch.no_grad():
        wanted = model(ROWS).logits
        cpu, gpu, plain = (
            float((_with(model, solved)(ROWS).logits - wanted).norm()) for solved in (on_cpu, on_gpu, nearest)
        )
    assert gpu < 1.15 * cpu < plain


def _with(model: nn.Module, solved: dict[str, Solved]) -> nn.Module:
    model = copy.deepcopy(model)
    for name, layer in solved.items():
        model.get_submodule(name).weight.data = layer.weight.dequantize(torch.float32).cpu()
    return model


def test_quick_products_are_exact_and_put_back() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    x = torch.randn(512, 600)
    wanted = x.double().t() @ x.double()
    with fast_matmul():
        found = x.t() @ x
    assert float((found - wanted).norm() / wanted.norm()) < 2e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.usefixtures("products")
def test_parts_that_are_solved_are_not_run_again_and_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    from quant.calibration.walk.block import Block

    rows = torch.randint(0, 50, (8, 16))
    calls = [0]
    attend = LlamaAttention.forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return attend(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", counted)
    quick = _solve(_llama(), _plan(_llama(), "gptq"), rows, batch=2)
    fewer, calls[0] = calls[0], 0
    monkeypatch.setattr(Block, "remember_finished", lambda self: None)
    plain = _solve(_llama(), _plan(_llama(), "gptq"), rows, batch=2)
    assert fewer < calls[0]
    for name, solved in plain.items():
        assert torch.equal(solved.weight.codes, quick[name].weight.codes), name
        assert torch.equal(solved.weight.scale.float(), quick[name].weight.scale.float()), name


def test_before_gptq_the_error_of_inputs_decides_the_scale() -> None:
    assert get_pipeline("awq+gptq").transforms[0].inputs_alone and not get_pipeline("awq").transforms[0].inputs_alone
    x, weight = torch.randn(200, 64) * torch.logspace(-1, 1, 64), torch.randn(96, 64)
    inputs = GroupInputs(x, x.abs().mean(0), x.abs().amax(0))
    found = replace(TRANSFORMS["awq"], inputs_alone=True)(weight, inputs, NVFP4, NVFP4, None)
    errors = {}
    for power in range(10):
        scale = channel_scale(inputs.mean_abs, weight, power / 10, 0.0, None)
        off = fake_quantize(x / scale, NVFP4).double() - (x / scale).double()
        errors[power] = (off @ (weight * scale).double().t()).square().mean()
    best = min(errors, key=lambda power: float(errors[power]))
    torch.testing.assert_close(found, channel_scale(inputs.mean_abs, weight, best / 10, 0.0, None))


def test_before_a_branch_the_error_of_what_it_leaves_decides_the_scale() -> None:
    assert get_pipeline("awq+lowrank:5+gptq").transforms[0].rank == 5
    x, weight = torch.randn(200, 64) * torch.logspace(-1, 1, 64), torch.randn(96, 64)
    inputs = GroupInputs(x, x.abs().mean(0), x.abs().amax(0))
    errors = []
    for power in range(10):
        scale = channel_scale(inputs.mean_abs, weight, power / 10, 0.0, None)
        off = (fake_quantize(x / scale, NVFP4) - x / scale).double().numpy()
        size = np.sqrt((off**2).mean(0))
        scaled = (weight * scale).double().numpy()
        u, s, vt = np.linalg.svd(scaled * size, full_matrices=False)
        errors.append(((off @ (scaled - (u[:, :5] * s[:5]) @ vt[:5] / size).T) ** 2).mean())
    found = replace(TRANSFORMS["awq"], inputs_alone=True, rank=5)(weight, inputs, NVFP4, NVFP4, None)
    torch.testing.assert_close(found, channel_scale(inputs.mean_abs, weight, np.argmin(errors) / 10, 0.0, None))
    without = replace(TRANSFORMS["awq"], inputs_alone=True)(weight, inputs, NVFP4, NVFP4, None)
    assert not torch.equal(found, without)


def test_a_branch_takes_what_lets_most_noise_through() -> None:
    """First block, first group: the noise is what rounding changes in the embedded rows behind the first norm."""
    model = _llama(seed=3)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(torch.logspace(-1, 1, 64))
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ROWS)).reshape(-1, 64)
    weights = {name: _weight(model, f"model.layers.0.self_attn.{name}_proj").double().numpy() for name in "qkv"}
    solved = _solve(model, _plan(model, "lowrank:4+gptq", "nvfp4"), ROWS, batch=4)
    for name, weight in weights.items():
        layer = solved[f"model.layers.0.self_attn.{name}_proj"]
        off = (round_activation(x, NVFP4, layer.input_scale) - x).double().numpy()
        size = np.sqrt((off**2).mean(0))
        u, s, vt = np.linalg.svd(weight * size, full_matrices=False)
        best = (u[:, :4] * s[:4]) @ vt[:4] / size
        down, up = layer.parts.lowrank
        np.testing.assert_allclose((up.double() @ down.double()).numpy(), best, atol=1e-4 * np.abs(best).max())


def test_streamed_blocks_have_their_own_tensors_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very memory, so that what is mapped from a file is not copied; also where a pass is broken off."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))).eval()
    before = {name: (t, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}

    def stop(*args: Any) -> None:
        assert model[1][0].weight.is_meta
        raise ValueError("broken off")

    monkeypatch.setattr(session, "fits", lambda *model: False)
    with placed(model, torch.device("meta")):
        assert model(torch.ones(2, 4)).is_meta
        assert not model[0][0].weight.is_meta
        model[1][1].register_forward_pre_hook(stop)
        with pytest.raises(ValueError, match="broken off"):
            model(torch.ones(2, 4))
    after = model.state_dict(keep_vars=True)
    assert {name: (id(t), t.data_ptr()) for name, t in after.items()} == {n: (id(t), p) for n, (t, p) in before.items()}
