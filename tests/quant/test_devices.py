"""Everything runs on another device than the model's: on a GPU, and on one that is made of the CPU (`second_device`).

The latter changes PyTorch for good, so `test_second_device` runs this file in a process of its own.

Other devices add in another order. What is rounded without data is equal to the bit all the same, what is solved from
data is as good as on the CPU, and the model is back home afterwards.
"""

from __future__ import annotations

import copy
import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from samples import BASE
from second_device import ON_SECOND_DEVICE, second_device
from slow_cases import quick_cases
from torch import nn

import quant
from quant.calibration import session
from quant.calibration.allocation.allocate import score
from quant.calibration.evaluating import without_cache
from quant.calibration.outputs.gradients import OutputMoments
from quant.calibration.session import Session, find_device, placed
from quant.calibration.texts.mixture import mixed_text
from quant.calibration.walk import learned_rotation
from quant.calibration.walk.block import Settings
from quant.calibration.walk.walk import BlockStore, ModelWalk
from quant.evaluation.evaluate import evaluate
from quant.export.gguf import export_gguf
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.models.open_model import open_model
from quant.recipes.blocks import block_names, capture, equal_but_hidden
from quant.recipes.plan import Plan, bits_per_weight
from quant.recipes.plan_make import make_plan
from quant.recipes.recipe import get_recipe

pytest.importorskip("transformers")

ROWS = torch.randint(3, 256, (8, 32), generator=torch.Generator().manual_seed(0))
# Every operation of the second device goes through Python, so that solvers of many steps take ten seconds there. GPTQ
# has a quick test on it in `test_layers_outside_of_blocks`.
QUICK_SOLVERS = ["rtn", "mse", "smoothquant", "awq+rotation:16+mse"]
SLOW_SOLVERS = [
    "local_hessian", "awq+lowrank:8+mse", "gptq", "awq", "awq+gptq", "rotation:32+gptq", "rotation:merge+gptq",
    "lowrank:8+gptq", "awq+lowrank:32+gptq", "autoround:4", "awq+lowrank:2+gptq+autoround:4",
]  # fmt: skip
DATA_FREE = ("rtn", "mse", "four_over_six", "modelopt", "compressed_tensors")
FORMATS = ("nvfp4", "nvfp4a16", "fp8", "mxfp8", "mxfp4", "fp8_block", "int4a16")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
SECOND = ["second"] if ON_SECOND_DEVICE in os.environ else []


@pytest.fixture(params=[*SECOND, CUDA])
def device(request: pytest.FixtureRequest) -> torch.device:
    return device_called(request.param)


def device_called(name: str) -> torch.device:
    return second_device() if name == "second" else torch.device("cuda", 0)


PLACES = ("whole", "streamed")


@pytest.fixture(params=PLACES)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether models fit on the device."""
    monkeypatch.setattr(session, "fits", lambda *model: request.param == "whole")


def base() -> Any:
    return open_model(BASE).model


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    shared = {"remove_duplicate": False}
    return {**dict(model.named_parameters(**shared)), **dict(model.named_buffers(**shared))}


def check_home(model: nn.Module) -> None:
    """Every tensor is the CPU's, and no hook is left."""
    assert {t.device.type for t in tensors_of(model).values()} == {"cpu"}
    assert {type(t) for t in tensors_of(model).values()} <= {torch.Tensor, nn.Parameter}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def check_same(found: nn.Module, wanted: nn.Module) -> None:
    """Codes, scales, norms and what else there is, to the bit."""
    found_, wanted_ = tensors_of(found), tensors_of(wanted)
    assert found_.keys() == wanted_.keys()
    different = [n for n, t in wanted_.items() if t.dtype != found_[n].dtype or not torch.equal(t, found_[n])]
    assert not different, different


def error(model: nn.Module, reference: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(ROWS).logits.float() - reference).norm() / reference.norm())


def check_as_good(found: nn.Module, wanted: nn.Module, original: nn.Module) -> None:
    with torch.no_grad():
        reference = original(ROWS).logits.float()
    assert error(found, reference) < 1.15 * error(wanted, reference) + 1e-3


def formats_for(solver: str) -> tuple[str, ...]:
    if solver == "local_hessian":
        return ("nvfp4", "mxfp8")
    return ("nvfp4", "mxfp8") if "awq+lowrank" in solver else ("nvfp4", "fp8", "mxfp8")


CASES = [(name, solver, "nvfp4") for name in SECOND for solver in QUICK_SOLVERS]
CASES += [pytest.param(name, solver, "nvfp4", marks=pytest.mark.slow) for name in SECOND for solver in SLOW_SOLVERS]
CASES += [
    pytest.param("cuda", solver, format, marks=pytest.mark.gpu)
    for solver in (*QUICK_SOLVERS, *SLOW_SOLVERS)
    for format in formats_for(solver)
]
CASES += [pytest.param("cuda", "awq:merge+rotation:learned+kfac", "fp8", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("name", "solver", "format"), CASES)
def test_every_solver(name: str, solver: str, format: str) -> None:
    wanted = quant.quantize(base(), format, ROWS, solver=solver)
    found = quant.quantize(base(), format, ROWS, solver=solver, device=device_called(name))
    check_home(found.model)
    check_as_good(found.model, wanted.model, base())
    assert [m.weight for m in found.plan.layers] == [m.weight for m in wanted.plan.layers]
    for here, there in zip(wanted.layers, found.layers, strict=True):
        assert (there.relative_error or 0.0) == pytest.approx(here.relative_error or 0.0, rel=0.2, abs=1e-3), here.name


@pytest.mark.slow
def test_a_learned_rotation(where: None, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is learned on the device, and multiplies there what the device has no room for."""
    solver, no_gradients = "rotation:learned+rtn", OutputMoments(missing={"all": "the second device has none"})
    monkeypatch.setattr(learned_rotation, "output_moments", lambda *args, **options: no_gradients)
    wanted, found = (quant.quantize(base(), "fp8", ROWS, solver=solver, device=each) for each in (None, device))
    check_home(found.model)
    check_as_good(found.model, wanted.model, base())
    assert all("as learned" in layer.reason for layer in found.plan.quantized if "q_proj" in layer.name)


@pytest.mark.parametrize(
    ("solver", "format"),
    # Every solver in NVFP4, and every format with one of them; searching scales takes seconds on the second device.
    quick_cases(
        product(DATA_FREE, FORMATS),
        lambda solver, format: (
            solver == "rtn" or format in {"mse": ("nvfp4", "mxfp8")}.get(solver, ("nvfp4", "fp8_block"))
        ),
    ),
)
def test_weights_rounded_without_data_are_equal_to_the_bit(solver: str, format: str, device: torch.device) -> None:
    if format not in ("nvfp4", "nvfp4a16") and solver == "four_over_six":
        pytest.skip("four_over_six is for scales in E4M3")
    model = base()
    plan = make_plan(model, format, solver=solver)
    plan = plan.replace_layers(m.__class__(**{**vars(m), "activation": None}) for m in plan.quantized)
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    quant.apply_plan(wanted, plan)
    quant.apply_plan(found, plan, device=device)
    check_home(found)
    check_same(found, wanted)


@pytest.mark.parametrize(
    ("name", "solver"),
    [
        *((name, "rtn") for name in SECOND),
        *(pytest.param("cuda", s, marks=pytest.mark.gpu) for s in ("rtn", "gptq", "local_hessian")),
    ],
)
def test_fused_experts(name: str, solver: str) -> None:
    model = tiny_models.mixtral().to(torch.bfloat16)
    rows = ROWS % model.config.vocab_size
    wanted = quant.quantize(copy.deepcopy(model), "nvfp4", rows, solver=solver)
    found = quant.quantize(copy.deepcopy(model), "nvfp4", rows, solver=solver, device=device_called(name))
    check_home(found.model)
    assert {m.dtype for m in found.model.modules() if isinstance(m, QuantExperts)} == {torch.bfloat16}
    for here, there in zip(wanted.layers, found.layers, strict=True):
        assert (there.relative_error or 0.0) == pytest.approx(here.relative_error or 0.0, rel=0.2, abs=1e-3), here.name


@pytest.mark.parametrize(
    ("solver", "observer", "where"),
    quick_cases(
        ((*case, where) for case in (("rtn", "mse"), ("rtn", "entropy"), ("gptq", "percentile")) for where in PLACES),
        lambda solver, observer, where: (observer, where) == ("mse", "streamed"),
    ),
    indirect=["where"],
)
def test_observers_and_scales_of_the_kv_cache(solver: str, observer: str, where: None, device: torch.device) -> None:
    recipe = get_recipe("fp8").__class__(**{**vars(get_recipe("fp8")), "kv_cache": "fp8"})
    wanted = quant.quantize(base(), recipe, ROWS, solver=solver, observer=observer)
    found = quant.quantize(base(), recipe, ROWS, solver=solver, observer=observer, device=device)
    check_home(found.model)
    wanted_ = tensors_of(wanted.model)
    close = {"gptq": 0.2, "rtn": 0.05}[solver] if observer != "entropy" else 0.5  # whose minimum is flat
    scales = {n: t for n, t in tensors_of(found.model).items() if n.endswith(("input_scale", "k_scale", "v_scale"))}
    assert len(scales) == 14 + 4
    for name, scale in scales.items():
        assert torch.allclose(scale.float(), wanted_[name].float(), rtol=close), name


@pytest.mark.parametrize("solver", ["rtn", pytest.param("gptq", marks=pytest.mark.slow)])
def test_a_guard(solver: str, device: torch.device) -> None:
    wanted = quant.quantize(base(), "nvfp4", ROWS, solver=solver, guard="0.08 fp8_channel keep")
    found = quant.quantize(base(), "nvfp4", ROWS, solver=solver, guard="0.08 fp8_channel keep", device=device)
    check_home(found.model)
    assert len({m.weight for m in found.plan.layers}) > 1
    check_as_good(found.model, wanted.model, base())


def test_layers_outside_of_blocks(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32)).eval()
    data = torch.randn(16, 64)
    wanted = quant.quantize(copy.deepcopy(model), "nvfp4", data, solver="awq+gptq")
    found = quant.quantize(copy.deepcopy(model), "nvfp4", data, solver="awq+gptq", device=device)
    check_home(found.model)
    assert sum(isinstance(m, QuantLinear) for m in found.model.modules()) == 2
    if device.type != "cuda":
        check_same(found.model, wanted.model)


@pytest.mark.parametrize(
    ("format", "where"),
    quick_cases(
        product((None, "nvfp4", "fp8_block"), PLACES),
        lambda format, where: (format, where) in ((None, "streamed"), ("nvfp4", "streamed"), ("nvfp4", "whole")),
    ),
    indirect=["where"],
)
def test_evaluation(format: str | None, where: None, device: torch.device) -> None:
    original, model = base(), base()
    if format is not None:
        model = quant.quantize(model, format, ROWS).model
    before = {name: t.clone() for name, t in tensors_of(model).items()}
    wanted = evaluate(model, ROWS, original, batch_size=3)
    found = evaluate(model, ROWS, original, batch_size=3, device=device)
    check_home(model)
    check_home(original)
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(model).items())
    assert found.perplexity == pytest.approx(wanted.perplexity, rel=2e-3)
    assert found.kl == pytest.approx(wanted.kl, rel=2e-2, abs=1e-6)


def test_evaluation_copies_each_block_once_for_all_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "fits", lambda *model: False)
    model, copies = base(), 0
    heads = [model.get_submodule(name) for name in block_names(model)]
    made = session.DeviceCopies.__init__

    def counted(self: Any, modules: Any, *rest: Any) -> None:
        nonlocal copies
        copies += modules[0] in heads
        made(self, modules, *rest)

    monkeypatch.setattr(session.DeviceCopies, "__init__", counted)
    counts = []
    for rows in (ROWS[:4], ROWS):
        copies = 0
        evaluate(model, rows, device=device)
        counts.append(copies)
    check_home(model)
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("where")
def test_text_of_its_own() -> None:
    model = base()
    rows, _ = mixed_text(model, Plan(()), session=Session.on("cuda"), samples=4, seqlen=12)
    check_home(model)
    assert rows.shape == (4, 12) and rows.device.type == "cpu"
    same = rows == mixed_text(model, Plan(()), samples=4, seqlen=12)[0]
    # Where rounding turns one token of a row, those behind it differ too.
    assert float(same.float().mean()) > 0.5


def mixtral() -> Any:
    return tiny_models.mixtral().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "method"),
    quick_cases(
        product((base, mixtral), ("fisher", "kl", "output")), lambda make, method: (make is mixtral) == (method == "kl")
    ),
)
def test_sensitivity(make: Any, method: str, device: torch.device) -> None:
    model = make()
    rows = ROWS[:2] % model.config.vocab_size
    before = {name: t.clone() for name, t in tensors_of(model).items()}
    wanted = score(model, rows, formats="nvfp4,fp8", method=method)
    found = score(model, rows, formats="nvfp4,fp8", method=method, device=device)
    check_home(model)
    assert all(torch.equal(t, before[name]) for name, t in tensors_of(model).items())
    # Rounding of p may draw another of the 62 tokens whose gradients the Fisher scores average.
    tolerance = 0.25 if method == "fisher" else 0.1
    for group in wanted.groups:
        for name, value in group.scores.items():
            score_there = found.by_name[group.name].scores[name]
            assert score_there == pytest.approx(value, rel=tolerance, abs=1e-6), (group.name, name)


@pytest.mark.usefixtures("where")
def test_passes_that_end_within_a_block_leave_it_at_home(device: torch.device) -> None:
    """Each of them moves the block to the device and ends before it is moved back."""
    model = base()
    names = block_names(model)
    before = {name: (t.device, t.data_ptr()) for name, t in tensors_of(model).items()}
    with torch.no_grad(), placed(model, device):
        for row in ROWS[:3].to(device):
            capture(model, names[:1], lambda row=row: model(row[None]))
    assert {name: (t.device, t.data_ptr()) for name, t in tensors_of(model).items()} == before


class HandsOnBlock(nn.Module):
    """Returns its hidden state, and a number for each token that it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.b(self.a(x) + other), self.a(x).mean(-1, keepdim=True)


class HandsOn(nn.Module):
    """Two blocks, of which the second also gets a tensor that the first has computed, or the model before both."""

    def __init__(self, by_block: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.by_block = nn.Embedding(256, 32), by_block
        self.layers = nn.ModuleList(HandsOnBlock() for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        other = x.tanh().mean(-1, keepdim=True)
        for layer in self.layers:
            x, computed = layer(x, other)
            other = computed if self.by_block else other
        return x


@pytest.mark.parametrize("by_block", [None, False, True])
@pytest.mark.usefixtures("where")
def test_calls_of_blocks_are_found_without_their_weights(
    by_block: bool | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the model with its own weights, which is needed only where a block's output is an argument."""
    model = base() if by_block is None else HandsOn(by_block)
    plan = make_plan(model, "nvfp4a16", solver="gptq")
    walk = ModelWalk(model, plan, ROWS, lambda *_: None, Session(device), Settings(batch=4), {}, BlockStore())
    copied: list[torch.Tensor] = []

    class Recording(session.DeviceCopies):
        def __init__(self, modules: Any, copies: Any, *args: Any) -> None:
            copied.extend(t for t in copies if t.dim() == 2 and 0 not in t.stride())
            super().__init__(modules, copies, *args)

    monkeypatch.setattr(session, "DeviceCopies", Recording)
    with torch.no_grad(), without_cache([getattr(model, "config", None)]):
        chains, (chain,) = walk.find_chains()
        matrices = {tuple(t.shape) for t in copied} - {(256, 128)}  # the embedding of `base`
        with walk._placed() as run:
            wanted_chains, (wanted,) = walk._find_chains(block_names(model), run)
    inside = {tuple(m.weight.shape) for m in model.get_submodule(chains[0][0]).modules() if isinstance(m, nn.Linear)}
    assert bool(matrices & inside) == bool(by_block)
    assert chains == wanted_chains
    both = zip([chain.few_calls, *chain.calls], [wanted.few_calls, *wanted.calls], strict=True)
    for found_calls, wanted_calls in both:
        assert found_calls.keys() == wanted_calls.keys()
        for name, call in wanted_calls.items():
            found = found_calls[name]
            assert equal_but_hidden(found, call) and torch.equal(found.hidden, call.hidden)
    check_home(model)


@pytest.mark.parametrize(
    "solver", ["rtn", *(pytest.param(solver, marks=pytest.mark.slow) for solver in ("gptq", "awq+gptq"))]
)
def test_an_allocation(solver: str, device: torch.device) -> None:
    found = quant.quantize(base(), data=ROWS, bits=6.0, formats="nvfp4,fp8", solver=solver, device=device)
    check_home(found.model)
    wanted = quant.quantize(base(), data=ROWS, bits=6.0, formats="nvfp4,fp8", solver=solver)
    assert bits_per_weight(found.plan.quantized) <= 6.0
    assert len({m.weight for m in found.plan.quantized}) == 2
    check_as_good(found.model, wanted.model, base())


def test_the_embedding_of_a_gguf_file(device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf", reason="comes with the extra hf")
    monkeypatch.setattr(export_gguf, "_EMBEDDING_ROWS", 100)  # which does not divide its rows
    rounded_on, quantize = list[str](), export_gguf.quantize

    def seen(weight: torch.Tensor, *args: Any, **options: Any) -> Any:
        rounded_on.append(weight.device.type)
        return quantize(weight, *args, **options)

    monkeypatch.setattr(export_gguf, "quantize", seen)
    result = quant.quantize(base(), "q4_0", solver="rtn")
    for name, place in (("here", None), ("there", device)):
        export_gguf.write_gguf(result.model, tmp_path / name / "model.gguf", result.plan, device=place)
    assert (tmp_path / "there/model.gguf").read_bytes() == (tmp_path / "here/model.gguf").read_bytes()
    assert rounded_on == ["cpu"] * 3 + [device.type] * 3


@pytest.mark.skipif(not SECOND, reason="test_second_device registers the device, in a process of its own")
def test_the_second_device_leaves_the_choice_of_a_device_to_contexts() -> None:
    """A model of transformers is built on the meta device, and its buffers are computed when it has left that."""
    second_device()
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == "meta"
    assert torch.tensor([1.0]).device.type == "cpu"
    frequencies = dict(base().named_buffers())["model.rotary_emb.inv_freq"]
    assert torch.equal(frequencies, 1 / 10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))


def test_names_of_devices() -> None:
    assert find_device(None) is None
    assert find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device teapot is not a device; expected auto, cpu, cuda or cuda:N"):
        find_device("teapot")
    if not torch.cuda.is_available():
        assert find_device("auto") is None
        with pytest.raises(ValueError, match="device cuda:1: PyTorch sees no GPU here; leave it out, or pass cpu"):
            find_device("cuda:1")


@pytest.mark.gpu
def test_names_of_gpus() -> None:
    assert find_device("auto") == find_device("cuda") == torch.device("cuda", torch.cuda.current_device())
    with pytest.raises(ValueError, match=r"device cuda:63: PyTorch sees cuda:0 \(.*\) here; pass one of these"):
        find_device("cuda:63")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "nvfp4", "solver": "awq:merge+gptq", "data": ROWS},
        {"recipe": "nvfp4a16", "solver": "kfac", "data": ROWS},
        {"recipe": "fp8", "observer": "entropy", "data": ROWS},
        {"bits": 6.0, "data": ROWS},
        {"recipe": "nvfp4a16"},  # on text that the model writes
    ],
    ids=["gptq", "kfac", "entropy", "budget", "own text"],
)
def test_the_default_device_changes_nothing(options: dict[str, Any]) -> None:
    """A script with `torch.set_default_device("cuda")` gets the codes of one without; its generators are the CPU's."""
    states = []
    for default in (None, "cuda"):
        model = tiny_models.llama(vocab_size=256, gain=3.0).cuda()
        torch.set_default_device(default)
        try:
            states.append(quant.quantize(model, **options).model.state_dict())
        finally:
            torch.set_default_device(None)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor.double(), states[1][name].double()) for name, tensor in states[0].items())
