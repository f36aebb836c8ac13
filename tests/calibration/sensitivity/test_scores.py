"""Scores are compared with quantizing one group for real, with plain autograd, and with float64."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from children import free_port
from samples import ROOT
from slow_cases import quick_cases
from torch import nn

from quant.base.listener import Progress
from quant.calibration.evaluating import prepared
from quant.calibration.inputs import Inputs
from quant.calibration.sensitivity.divergence import divergence_of
from quant.calibration.sensitivity.group_solutions import solve_each_group
from quant.calibration.sensitivity.scores import Scoring, _key, run_units, score_groups, total
from quant.calibration.sensitivity.switchable_model import CachedRun, SwitchableModel, measure_amax
from quant.calibration.sensitivity.table import Sensitivity, parse_candidates
from quant.calibration.session import Session
from quant.calibration.texts.sources import digest_of
from quant.evaluation.evaluate import evaluate
from quant.formats.tensor import fake_quantize
from quant.recipes.plan import LayerPlan, groups_of
from quant.recipes.plan_make import make_plan
from quant.run.api import quantize

ROWS, SEQLEN, VOCABULARY = 6, 24, 61


def _llama(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    model: nn.Module = tiny_models.llama(vocab_size=VOCABULARY, gain=5)
    return model.to(dtype)


def _experts() -> nn.Module:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model: nn.Module = tiny_models.qwen3_moe(**heads, vocab_size=VOCABULARY, intermediate_size=64, gain=5)
    return model


def _bert() -> nn.Module:
    model: nn.Module = tiny_models.bert(num_attention_heads=2, vocab_size=VOCABULARY, gain=4)
    return model


def _rows(count: int = ROWS) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count, SEQLEN), generator=torch.Generator().manual_seed(3))


def _groups(model: nn.Module) -> dict[str, list[LayerPlan]]:
    return groups_of(make_plan(model, "fp8").quantized)


def _score(
    model: nn.Module,
    formats: str,
    method: str,
    rows: torch.Tensor | None = None,
    *,
    progress: Progress | None = None,
    seed: int = 0,
    path: Path | None = None,
    **options: Any,
) -> Sensitivity:
    groups = _groups(model)
    allowed = dict.fromkeys(groups, parse_candidates(formats))
    rows = _rows() if rows is None else rows
    session = Session(progress=progress, seed=seed)
    return score_groups(model, groups, allowed, rows, Scoring(method, **options), session, path=path)


def _really_quantized(model: nn.Module, members: list[LayerPlan], preset: str, rows: torch.Tensor) -> nn.Module:
    """A copy with one group quantized through the public way."""
    model = copy.deepcopy(model)
    candidate = parse_candidates(preset)[0]
    plan = make_plan(model, "fp8")
    only = {layer.name for layer in members}
    layers = [
        candidate.applied(m) if m.name in only else parse_candidates("fp8")[-1].applied(m) for m in plan.quantized
    ]
    quantize(model, plan.replace_layers(layers), rows)
    return model


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("make", [_llama, _experts])
def test_kl_is_that_of_quantizing_one_group_for_real(make: Any) -> None:
    model = make()
    rows = _rows(2)
    table = _score(model, "nvfp4,fp8a16", "kl", rows)
    groups = _groups(model)
    for name in list(groups)[1::3]:
        for preset in ("nvfp4", "fp8a16"):
            real = evaluate(_really_quantized(model, groups[name], preset, rows), rows, model).kl
            # Where the processor multiplies BF16, changes are rounded to it: 2⁻⁹ each, and 1e-3 is left in the mean.
            assert table.by_name[name].scores[preset] == pytest.approx(real, rel=2e-3, abs=1e-7)


@pytest.mark.parametrize("formats", ["nvfp4,fp8a16", "nvfp4+lowrank:8,nvfp4a16+lowrank:8"])
def test_fisher_is_what_plain_autograd_gives(formats: str) -> None:
    model = _llama(torch.float32)
    rows = _rows(2)
    groups = _groups(model)
    candidates = parse_candidates(formats)[:-1]
    solutions = solve_each_group(
        model, groups, dict.fromkeys(groups, candidates), rows, "rtn", torch.float32, Session()
    )
    table = _score(model, formats, "fisher", rows, seed=5, solutions=solutions)
    layers = {m.name: model.get_submodule(m.name) for members in groups.values() for m in members}
    amax = measure_amax(model, groups, {c.name: c for c in candidates}, rows, Session())
    switchable = SwitchableModel(model, groups, {c.name: c for c in candidates}, amax, solutions=solutions)
    sums = {(g, c.name): 0.0 for g in groups for c in candidates}
    with switchable:
        quantized = {
            (m.name, c.name): switchable.formats.solved(g, c)[m.name].dequantize()
            for g, members in groups.items() for m in members for c in candidates
        }  # fmt: skip
        scales = {(g, c.name): switchable.formats.input_scale(g, c) for g in groups for c in candidates}
    for index in range(2):
        seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

        handles = [layer.register_forward_hook(_keeper(name, seen)) for name, layer in layers.items()]
        logp = model(rows[index : index + 1]).logits[0, :-1].log_softmax(-1)
        chances = torch.rand(SEQLEN - 1, 1, generator=torch.Generator().manual_seed(5 * 1_000_003 + index))
        upto = logp.detach().exp().double().cumsum(-1)
        drawn = (upto / upto[:, -1:] < chances).sum(-1, keepdim=True)
        (-logp.gather(1, drawn).sum()).backward()
        for handle in handles:
            handle.remove()
        for group, members in groups.items():
            for c in candidates:
                product: Any = 0.0
                for m in members:
                    x, out = seen[m.name]
                    scale = scales[group, c.name]
                    x_q = fake_quantize(x, c.activation, global_scale=scale) if c.activation else x
                    error = (x_q @ quantized[m.name, c.name].T - out.detach()).double()
                    if c.rank:
                        down, up = solutions[group, c.name].branches[m.name]
                        error += x.double() @ down.double().T @ up.double().T
                    product = product + (error * out.grad.double()).sum(-1)
                sums[group, c.name] += float(product.square().sum())
    for (group, name), value in sums.items():
        expected = 0.5 * value / (2 * (SEQLEN - 1))
        # Products with changes of weights run in BF16 where that is fast.
        assert table.by_name[group].scores[name] == pytest.approx(expected, rel=4e-3)


def _keeper(name: str, seen: dict[str, Any]) -> Any:
    def hook(module: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.retain_grad()
        seen[name] = (args[0].detach(), out)

    return hook


# A gradient does not see a router change its mind, which is a jump; the order of the groups survives it.
@pytest.mark.parametrize(
    ("make", "least", "products"),
    quick_cases(
        ((*case, way) for case in ((_llama, 0.8), (_bert, 0.8), (_experts, 0.3)) for way in ("fast", "plain")),
        lambda make, least, way: make is _llama or way == "fast",
    ),
    indirect=["products"],
)
def test_fisher_estimates_kl(make: Any, least: float, products: None) -> None:
    """Errors of eight bits are small enough for the second order; what is left is the noise of what is drawn."""
    model, rows = make(), _rows(24)
    fisher, kl = (_score(model, "fp8_channel,mxfp8", method, rows) for method in ("fisher", "kl"))
    for name in ("fp8_channel", "mxfp8"):
        guess, found = (sum(g.scores[name] for g in table.groups) for table in (fisher, kl))
        assert least < guess / found < 1.2
        pairs = torch.tensor([[a.scores[name], b.scores[name]] for a, b in zip(fisher.groups, kl.groups, strict=True)])
        assert torch.corrcoef(pairs.T)[0, 1] > 0.9


def test_output_is_the_relative_error_in_float64() -> None:
    model, rows = _llama(torch.float32), _rows(2)
    table = _score(model, "mxfp8", "output", rows)
    groups = _groups(model)
    name, members = next((g, m) for g, m in groups.items() if len(m) == 2)
    inputs: list[torch.Tensor] = []
    handle = model.get_submodule(members[0].name).register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    model(rows)
    handle.remove()
    (candidate, _) = parse_candidates("mxfp8")
    error = signal = 0.0
    switchable = SwitchableModel(model, groups, {"mxfp8": candidate}, {})
    with switchable:
        solved = switchable.formats.solved(name, candidate)
    x = inputs[0].detach().double()
    x_q = fake_quantize(inputs[0].detach(), candidate.activation).double()
    for m in members:
        weight = model.get_submodule(m.name).weight.detach().double()
        out = x @ weight.T
        error += float((x_q @ solved[m.name].dequantize().double().T - out).square().sum())
        signal += float(out.square().sum())
    assert table.by_name[name].scores["mxfp8"] == pytest.approx(error / signal, rel=1e-4)


def test_bits_and_bytes_of_the_table() -> None:
    table = _score(_llama(), "nvfp4", "output", _rows(1))
    group = next(g for g in table.groups if "gate_proj" in g.name)
    assert group.numel == 2 * 96 * 64 and len(group.layers) == 2
    assert group.bytes == {"nvfp4": 2 * (96 * 32 + 96 * 4 + 4), "keep": 2 * group.numel}
    assert group.bits["nvfp4"] == 8 * group.bytes["nvfp4"] / group.numel
    assert group.scores["keep"] == 0.0


@pytest.mark.parametrize("make", [_llama, _experts])
def test_the_model_is_as_before(make: Any) -> None:
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [type(module) for module in model.modules()]
    model.train()
    for method in ("fisher", "kl", "output"):
        _score(model, "nvfp4", method, _rows(1))
    with pytest.raises(RuntimeError, match="planted"):
        _score(model, "nvfp4", "kl", _rows(1), progress=_failing)
    assert [type(module) for module in model.modules()] == modules
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    after = model.state_dict()
    assert list(after) == list(before) or set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all("forward" not in vars(module) for module in model.modules())


def _failing(stage: str, done: int, total_: int) -> None:
    if stage == "score":
        raise RuntimeError("planted")


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    model, path = _llama(), tmp_path / "scores.json"
    whole = _score(model, "nvfp4,fp8", "fisher")
    done = 0

    def stop_after_three(stage: str, at: int, of: int) -> None:
        nonlocal done
        if stage == "score":
            done = at
            if at == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _score(model, "nvfp4,fp8", "fisher", path=path, progress=stop_after_three)
    assert done == 3 and not path.exists()
    seen: list[int] = []
    resumed = _score(
        model, "nvfp4,fp8", "fisher", path=path, progress=lambda s, d, t: seen.append(d) if s == "score" else None
    )
    assert seen == [4, 5, 6]
    assert [g.scores for g in resumed.groups] == [g.scores for g in whole.groups]
    assert [p.name for p in tmp_path.iterdir()] == ["scores.json"]
    # A third call reads the table and measures nothing.
    seen.clear()
    again = _score(model, "nvfp4,fp8", "fisher", path=path, progress=lambda s, d, t: seen.append(d))
    assert seen == [] and again == resumed


def test_scores_of_another_text_are_not_used(tmp_path: Path) -> None:
    model, path = _llama(), tmp_path / "scores.json"
    first = _score(model, "nvfp4", "output", _rows(1), path=path)
    other = _score(model, "nvfp4", "output", _rows(2)[1:], path=path)
    assert first.key != other.key
    assert [g.scores for g in first.groups] != [g.scores for g in other.groups]
    assert Sensitivity.load(path) == other


def test_a_broken_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_text('{"method": "kl"}')
    with pytest.raises(ValueError, match=r"scores\.json: not a sensitivity table"):
        Sensitivity.load(path)


def test_unknown_method() -> None:
    with pytest.raises(ValueError, match="unknown method 'magic'; known methods: fisher, kl, output"):
        _score(_llama(), "nvfp4", "magic")


def test_layers_that_nothing_depends_on_score_zero() -> None:
    table = _score(_bert(), "nvfp4", "fisher", _rows(1))
    assert table.unit.endswith("cosine similarity of the embeddings")
    assert table.by_name["pooler.dense"].scores == {"nvfp4": 0.0, "keep": 0.0}
    assert all(g.scores["nvfp4"] > 0 for g in table.groups if g.name != "pooler.dense")


def test_a_model_that_scales_its_logits_is_taken_whole() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _llama(torch.float32)
            self.config = self.inner.config

        def get_output_embeddings(self) -> nn.Module:
            return self.inner.lm_head

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return 30 * torch.tanh(self.inner(rows).logits / 3)

    model, rows = Scaled(), _rows(2)
    plain = divergence_of(model.inner, rows)
    other = divergence_of(model, rows)
    reference = other.reference(rows)
    with torch.no_grad():
        base = model(rows)[:, :-1].log_softmax(-1)
        changed = copy.deepcopy(model)
        changed.inner.lm_head.weight.mul_(1.1)
        expected = (base.exp() * (base - changed(rows)[:, :-1].log_softmax(-1))).sum()
        model.inner.lm_head.weight.mul_(1.1)
    assert other.measure(rows, reference)() == pytest.approx(float(expected), rel=1e-4)
    plain.reference(rows)
    assert plain.split is True and other.split is False


@pytest.mark.parametrize("make", [_llama, _bert])
def test_recomputing_blocks_changes_no_score(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = make(), _rows(2)
    plain = _score(model, "nvfp4,fp8", "fisher", rows)
    monkeypatch.setattr("quant.calibration.sensitivity.scores._ACTIVATION_BYTES", 0)
    bounded = _score(model, "nvfp4,fp8", "fisher", rows)
    for a, b in zip(plain.groups, bounded.groups, strict=True):
        assert b.scores == pytest.approx(a.scores, rel=1e-5)
    assert all("forward" not in vars(module) for module in model.modules())


def test_units_add_up_in_one_order() -> None:
    values = {str(i): 10.0 ** ((-1) ** i * i) for i in range(12)}
    results = run_units(list(values), lambda name: {"g": {"f": values[name]}}, Session())
    expected = 0.0
    for value in values.values():
        expected += value
    assert total(results) == {"g": {"f": expected}}


_RANK = """
import json, sys, time, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from quant.calibration.sensitivity.table import parse_candidates
from quant.calibration.sensitivity.scores import Scoring, score_groups
from quant.calibration.session import Session
from quant.recipes.plan import groups_of
from quant.recipes.plan_make import make_plan
import os
if "WORLD_SIZE" in os.environ:
    from quant.calibration.ranks import join
    join()
torch.manual_seed(0)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40, bias=False)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
    def get_output_embeddings(self):
        return self.head
    def forward(self, rows):
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model().eval()
rows = torch.randint(0, 40, (5, 12))
groups = groups_of(make_plan(model, "fp8").quantized)
allowed = dict.fromkeys(groups, parse_candidates("nvfp4,fp8"))
found = {}
for method in ("fisher", "kl", "output"):
    if os.environ.get("RANK") == "1":
        time.sleep(0.5)  # the other rank would have written its first results
    path = Path(sys.argv[2]) / f"{method}.json"
    table = score_groups(model, groups, allowed, rows, Scoring(method), Session(), path=path)
    found[method] = [g.scores for g in table.groups]
if os.environ.get("RANK", "0") == "0":
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_one_rank_and_two_give_the_same_bits(tmp_path: Path) -> None:
    root = str(ROOT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = [sys.executable, "-c", _RANK, root]
    one, two = [*script, str(tmp_path / "one")], [*script, str(tmp_path / "two")]
    alone = subprocess.run(one, capture_output=True, text=True, check=True, env=environment)
    ranks = [
        subprocess.Popen(
            two, stdout=subprocess.PIPE, text=True, env={**environment, "RANK": str(rank), "WORLD_SIZE": "2"}
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert json.loads(outputs[0]) == json.loads(alone.stdout)


def test_a_switchable_model_in_16_bit_is_the_model() -> None:
    model, rows = _experts(), _rows(1)
    groups = _groups(model)
    with torch.no_grad(), prepared(model, None):
        expected = model(rows).logits
        with SwitchableModel(model, groups, {}, {}):
            assert torch.allclose(model(rows).logits, expected, atol=1e-5)


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize("make", [_llama, _experts, _bert])
@pytest.mark.parametrize("budget", [1 << 30, 20_000])
def test_a_remembered_run_changes_no_loss(make: Any, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole runs, which tests above compare with quantizing for real, against runs that begin halfway."""
    monkeypatch.setattr("quant.calibration.sensitivity.switchable_model._ACTIVATIONS", {"cpu": budget})
    monkeypatch.setattr("quant.calibration.sensitivity.switchable_model._BATCH_TOKENS", 2 * SEQLEN)
    model, rows = make(), _rows(5)
    groups = _groups(model)
    candidates = parse_candidates("nvfp4,fp8a16")
    by_name = {c.name: c for c in candidates}
    names = list(groups)
    base = dict(zip(names, ["nvfp4", "fp8a16", "keep"] * len(names), strict=False))
    near = [{**base, names[-1]: "nvfp4"}, {**base, names[0]: "keep", names[3]: "fp8a16"}, base]
    with prepared(model, torch.float32):
        amax = measure_amax(model, groups, by_name, rows, Session())
        with SwitchableModel(model, groups, by_name, amax, stored=torch.bfloat16) as switchable:
            whole, resumed = (CachedRun(switchable, divergence_of(model, rows), rows) for _ in range(2))
            assert len(resumed.batches) == 3 and len(resumed.chain) == 2
            assert resumed.start(base) == pytest.approx(whole.loss(base), rel=1e-6)
            # A changed bit of an input is rounded the other way now and then, as an expert is routed.
            for choice in near:
                assert resumed.loss(choice) == pytest.approx(whole.loss(choice), rel=1e-2)
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("score", ["NaN", "Infinity"])
def test_a_table_that_holds_no_number_is_refused_by_group_and_format(tmp_path: Path, score: str) -> None:
    """An earlier release wrote such files."""
    table = _score(_llama(), "nvfp4,fp8", "output", _rows(1))
    table.save(tmp_path / "table.json")
    fields = json.loads((tmp_path / "table.json").read_text())
    fields["groups"][2]["scores"]["fp8"] = float(score)
    (tmp_path / "table.json").write_text(json.dumps(fields))
    name = re.escape(fields["groups"][2]["name"])
    message = rf"table\.json: not a sensitivity table: groups\[2\]: {name}: its score in fp8 is"
    with pytest.raises(ValueError, match=message):
        Sensitivity.load(tmp_path / "table.json")


def test_errors_count_rows_through_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of measuring hands every batch over with the number of its first row."""
    monkeypatch.setattr("quant.calibration.sensitivity.switchable_model._BATCH_TOKENS", 4 * SEQLEN)
    model, rows = _llama(torch.float32), _rows()
    found = divergence_of(model, rows)
    seen: list[tuple[torch.Tensor, int]] = []
    measure = found.measure
    monkeypatch.setattr(found, "measure", lambda part, kept, first: seen.append((part, first)) or measure(part, kept))
    with SwitchableModel(model, {}, {}, {}) as switchable, torch.no_grad():
        baseline = CachedRun(switchable, found, rows)
        for run in (lambda: baseline.loss({}), lambda: baseline.start({}), lambda: baseline.loss_of(found)):
            seen.clear()
            assert run() == 0.0
            assert [(first, len(part)) for part, first in seen] == [(0, 4), (4, 2)]
            assert all(torch.equal(part, rows[first : first + len(part)]) for part, first in seen)


@pytest.mark.parametrize("digest", [digest_of, lambda rows: _key(nn.Module(), {}, {}, rows)])
def test_a_timestep_expanded_to_a_batch_of_one_has_the_digest_of_its_values(digest: Any) -> None:
    """diffusers hands Wan's denoiser such a tensor: contiguous, with a stride of 0."""
    calls = [Inputs([((), {"timestep": t})]) for t in (torch.tensor(3.0).expand(1), torch.tensor([3.0]))]
    assert digest(calls[0]) == digest(calls[1]) != digest(Inputs([((), {"timestep": torch.tensor([4.0])})]))
