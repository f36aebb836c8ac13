"""A is compared with closed forms and with plain autograd; models without a gradient are named with the reason."""

from __future__ import annotations

import types
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

from quant.calibration.outputs import gradients as module
from quant.calibration.outputs.gradients import output_moments
from quant.calibration.session import Session
from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind, Stacking
from quant.recipes.plan import LayerPlan


def _groups(model: nn.Module, *names: tuple[str, ...]) -> list[list[LayerPlan]]:
    def plan(name: str) -> LayerPlan:
        shape = tuple(model.get_submodule(name).weight.shape)  # type: ignore[arg-type]
        return LayerPlan(name, LayerKind.LINEAR, shape, FORMATS["nvfp4"], None, "kfac", "", name)

    return [[plan(name) for name in members] for members in names]


class _Classifier(nn.Module):
    """Tokens to logits through one hidden layer, with a step between that a test may spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(10, 8), nn.Linear(8, 6), nn.Linear(6, 5)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, ids: torch.Tensor) -> Any:
        out = type("Output", (), {})()
        out.logits = self.head(self.step(self.hidden(self.embed(ids))))
        return out


def _second(found: Any, name: str) -> torch.Tensor:
    stats = found.moments[name]
    assert stats.second_moment is not None
    return stats.second_moment


def test_it_is_the_fisher_matrix_of_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head alone behind the layer, A = W (diag p − p pᵀ) Wᵀ, the mean over tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CLIP", 1e9)
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)
    model = _Classifier()
    rows = torch.randint(0, 10, (4, 16))
    with torch.no_grad():
        p = model(rows).logits.softmax(-1).flatten(0, 1).double()
    head = model.head.weight.detach().double()
    expected = sum(head.t() @ (torch.diag(q) - torch.outer(q, q)) @ head for q in p) / len(p)
    found = output_moments(model, _groups(model, ("hidden",)), rows.split(2), Session(), draws=4000)
    torch.testing.assert_close(_second(found, "hidden").double(), expected, rtol=0.05, atol=0.002)


def test_labels_of_a_text_are_drawn_each_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a head alone behind the layer, A = Wᵀ diag(p (1 − p)) W with p of the sigmoid, the mean over tokens."""
    torch.manual_seed(0)
    monkeypatch.setattr(module, "CLIP", 1e9)
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)
    model = _Classifier()
    model.config = types.SimpleNamespace(problem_type="multi_label_classification")  # type: ignore[assignment]
    rows = torch.randint(0, 10, (4, 16))
    with torch.no_grad():
        p = model(rows).logits.sigmoid().flatten(0, 1).double()
    head = model.head.weight.detach().double()
    expected = head.t() @ torch.diag((p * (1 - p)).mean(0)) @ head
    found = output_moments(model, _groups(model, ("hidden",)), rows.split(2), Session(), draws=4000)
    torch.testing.assert_close(_second(found, "hidden").double(), expected, rtol=0.05, atol=0.002)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_streamed_gradients_are_those_of_plain_autograd(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_label_gradient", lambda logits, _: _to_the_first(logits))
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)
    model = tiny_models.llama(gain=3, dtype=dtype)
    names = [("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"), ("model.layers.1.mlp.down_proj",)]
    rows = torch.randint(0, 60, (4, 16))
    counts: list[tuple[str, int, int]] = []
    session = Session(progress=lambda *count: counts.append(count))
    found = output_moments(model, _groups(model, *names), rows.split(2), session)
    assert counts == [("gradients", 1, 2), ("gradients", 2, 2)]
    assert not found.missing and all(parameter.requires_grad for parameter in model.parameters())
    model = model.float()
    outputs: dict[str, torch.Tensor] = {}
    for members in names:
        gradients = []
        for batch in rows.split(2):
            handles = [
                model.get_submodule(name).register_forward_hook(
                    lambda m, a, out, name=name: outputs.update({name: out})
                )
                for name in members
            ]
            logits = model(batch).logits[:, :-1]
            for handle in handles:
                handle.remove()
            parts = torch.autograd.grad(logits, [outputs[n] for n in members], _to_the_first(logits.detach()))
            gradient = torch.cat(parts, -1).flatten(0, 1)
            size = gradient.norm(dim=1, keepdim=True)
            gradients.append(gradient * (module.CLIP * size.median() / size.clamp(min=1e-30)).clamp(max=1))
        tolerance = 1e-4 if dtype == torch.float32 else 0.05
        roots = [gradient.norm(dim=1).sqrt() for gradient in gradients]
        for weights, root in zip(found.token_weights[members[0]], roots, strict=True):
            torch.testing.assert_close(weights, root / torch.cat(roots).mean(), rtol=5 * tolerance, atol=tolerance)
        expected = torch.cat(gradients).double()
        expected = expected.t() @ expected / len(expected)
        error = _second(found, members[0]).double() - expected
        assert error.norm() <= tolerance * expected.norm()


def test_tokens_have_no_weights_where_some_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU some of the rows run; tokens of several batches that run as one keep their places."""
    model, rows = tiny_models.llama(gain=3), torch.randint(0, 60, (4, 16))
    groups = _groups(model, ("model.layers.1.mlp.down_proj",))
    monkeypatch.setattr(module, "_ROWS_ON_CPU", 2)
    found = output_moments(model, groups, rows.split(1), Session())
    assert found.moments and not found.token_weights
    parts = list(torch.arange(64).split(40))
    assert [part.tolist() for part in module._by_batch(parts, rows.split(2))] == [[*range(32)], [*range(32, 64)]]


def test_rows_of_a_gpu_have_as_many_labels_together() -> None:
    drawn = [module.labels_drawn(rows, on_gpu=True) for rows in (8, 32, 128, 256, 512, 4096)]
    assert drawn == [4, 4, 4, 2, 1, 1]
    assert module.labels_drawn(8, on_gpu=False) == 1


def test_experts_share_the_gradients_behind_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with plain autograd through a loop of its own over tokens and experts."""
    monkeypatch.setattr(module, "_label_gradient", lambda logits, _: _to_the_first(logits))
    monkeypatch.setattr(module, "CLIP", 1e9)
    monkeypatch.setattr("quant.calibration.statistics.STRENGTH", 0.0)
    model, rows = tiny_models.qwen3_moe(gain=3), torch.randint(0, 60, (4, 16))
    path = "model.layers.0.mlp.experts"
    experts = model.get_submodule(path)
    shapes = {name: tuple(experts.get_parameter(name).shape) for name in ("gate_up_proj", "down_proj")}
    groups = [
        [LayerPlan(f"{path}.{name}", LayerKind.EXPERTS, shape, FORMATS["nvfp4"], None, "kfac")]
        for name, shape in shapes.items()
    ]
    found = output_moments(model, groups, rows.split(2), Session())
    assert not found.missing
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name in shapes}

    def loop(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = [torch.zeros_like(hidden[0]) for _ in hidden]
        for token, slot in [(t, s) for t in range(len(hidden)) for s in range(index.shape[1])]:
            expert = int(index[token, slot])
            outputs["gate_up_proj"].append(experts.gate_up_proj[expert] @ hidden[token])
            gate, up = outputs["gate_up_proj"][-1].chunk(2)
            outputs["down_proj"].append(experts.down_proj[expert] @ (experts.act_fn(gate) * up))
            total[token] = total[token] + weights[token, slot] * outputs["down_proj"][-1]
        return torch.stack(total)

    monkeypatch.setattr(experts, "forward", loop)
    logits = model(rows).logits[:, :-1]  # no label follows the last token
    for name, seen in outputs.items():
        gradients = torch.stack(torch.autograd.grad(logits, seen, _to_the_first(logits.detach()), retain_graph=True))
        expected = gradients.double().t() @ gradients.double() / len(gradients)
        error = _second(found, f"{path}.{name}").double() - expected
        assert error.norm() <= 1e-4 * expected.norm(), name


def test_rows_of_interleaved_experts_stand_in_the_order_of_their_matrices() -> None:
    stacking = Stacking((2, 6, 4), 2, interleaved=True)
    gradient = torch.randn(5, 6)  # in the order of the matrix's rows
    outputs = stacking.outputs(gradient)
    assert torch.equal(outputs[:, stacking.outputs(torch.arange(6)).argsort()], gradient)


def _to_the_first(logits: torch.Tensor) -> torch.Tensor:
    gradient = -logits.float().softmax(-1)
    gradient[..., 0] += 1
    return gradient.to(logits.dtype)


def test_large_groups_keep_diagonal_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.llama(gain=3)
    groups = _groups(model, ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"))
    rows = torch.randint(0, 60, (4, 16))
    whole = _second(output_moments(model, groups, rows.split(2), Session()), groups[0][0].name)
    monkeypatch.setattr(module, "_WIDTHS", {"cpu": (64,), "cuda": (64,)})
    stats = output_moments(model, groups, rows.split(2), Session()).moments[groups[0][0].name]
    assert stats.block_moments is not None and stats.block_moments.shape == (3, 64, 64)
    for index, block in enumerate(stats.block_moments):
        part = slice(64 * index, 64 * index + 64)
        torch.testing.assert_close(block.diagonal(), whole.diagonal()[part])
        torch.testing.assert_close(block, whole[part, part])


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda x: x.detach(), "its output does not depend on its layers"),
        (lambda x: x * float("nan"), "its logits hold NaN or infinity"),
        (lambda x: _NanBackward.apply(x), "its gradients hold NaN or infinity"),
        (lambda x: x * 0, "its gradients are zero"),
        (lambda x: _NoBackward.apply(x), "no backward here"),
        (lambda x: x.round().to(torch.int32).float(), "its output does not depend on its layers"),
        (lambda x: _OutOfMemory.apply(x), "too little memory on the GPU for the gradients"),
    ],
)
def test_a_model_without_gradients_says_why(step: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _Classifier()
    monkeypatch.setattr(model, "step", step)
    found = output_moments(model, _groups(model, ("hidden",)), [torch.randint(0, 10, (2, 8))], Session())
    assert not found.moments and reason in found.missing["hidden"]


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * float("nan")


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no backward here")


class _OutOfMemory(_NoBackward):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_only_the_layers_without_a_gradient_are_named() -> None:
    """One layer behind a `detach`, one whose gradients are zero, and one that is never called, beside a sound one."""
    model = tiny_models.llama(gain=3)
    names = [f"model.layers.{index}.mlp.down_proj" for index in (0, 1)]
    first = model.model.layers[0]
    first.mlp.register_forward_hook(lambda module, args, out: out * 0)
    first.self_attn.register_forward_hook(lambda module, args, out: (out[0].detach(), *out[1:]))
    model.idle = nn.Linear(64, 64)
    groups = _groups(model, *((name,) for name in (*names, "model.layers.0.self_attn.o_proj", "idle")))
    found = output_moments(model, groups, [torch.randint(0, 60, (2, 8))], Session())
    assert list(found.moments) == [names[1]]
    assert found.missing == {
        names[0]: "its gradients are zero",
        "model.layers.0.self_attn.o_proj": "no gradient reached it",
        "idle": "no gradient reached it",
    }


def test_a_head_in_its_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.llama()
    monkeypatch.setattr(model.lm_head.weight, "stored", object(), raising=False)
    groups = _groups(model, ("model.layers.0.mlp.down_proj",))
    found = output_moments(model, groups, [torch.randint(0, 60, (2, 8))], Session())
    assert found.missing == {groups[0][0].name: "weights that stay in their files would be read anew for every batch"}


def test_without_memory_for_it_there_is_none() -> None:
    model = tiny_models.llama()
    groups = _groups(model, ("model.layers.0.mlp.down_proj",))
    found = output_moments(model, groups, [torch.randint(0, 60, (2, 8))], Session(memory=1000))
    assert found.missing == {groups[0][0].name: "too little memory for the gradients' second moment"}


@pytest.mark.parametrize("make", [tiny_models.bert, lambda: tiny_models.bert_classifier(num_labels=1)])
def test_encoders_without_logits_have_a_random_direction(make: Any) -> None:
    """A single logit has one, too: its softmax is 1, and has no gradient."""
    model = make()
    groups = _groups(model, (f"{'' if model.base_model is model else 'bert.'}encoder.layer.0.output.dense",))
    found = output_moments(model, groups, list(torch.randint(0, 60, (4, 16)).split(2)), Session())
    assert float(_second(found, groups[0][0].name).diagonal().min()) > 0
