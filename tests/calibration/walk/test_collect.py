"""Statistics of inputs equal those of hooks that the tests set themselves."""

import re
import warnings

import pytest
import tiny_models
import torch
from torch import nn

import quant
from quant.calibration.session import Session
from quant.calibration.walk.collect import collect_input_amax, watch_inputs

transformers = pytest.importorskip("transformers")


class Chain(nn.Module):
    """An embedding and two linears; the second is called for even rows only where `fork` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.a, self.b, self.idle = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.embed(ids))))


def rows(count: int, vocabulary: int = 10, length: int = 6) -> torch.Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(5))


def moe() -> nn.Module:
    model: nn.Module = tiny_models.qwen3_moe(vocab_size=32, num_hidden_layers=1)
    return model


def test_the_largest_input_over_all_rows() -> None:
    model, data = Chain(), rows(5)
    calls: list[tuple[object, ...]] = []
    amax = collect_input_amax(model, ["a", "b"], data, Session(progress=lambda *call: calls.append(call)))
    with torch.no_grad():
        embedded = model.embed(data)
        hidden = torch.relu(model.a(embedded))
    assert set(amax) == {"a", "b"}
    assert torch.equal(amax["a"], embedded.abs().max())
    torch.testing.assert_close(amax["b"], hidden.abs().max(), rtol=1e-6, atol=0)
    assert amax["a"].dtype is torch.float32 and amax["a"].shape == ()
    assert calls == [("calibrate", i, 5) for i in range(1, 6)]


def test_16_bit_inputs_are_measured_in_their_own_dtype() -> None:
    model, data = Chain().bfloat16(), rows(3)
    with torch.no_grad():
        expected = model.embed(data).abs().max().float()
    assert torch.equal(collect_input_amax(model, ["a"], data)["a"], expected)


def test_the_model_is_left_as_it_was() -> None:
    model = moe()
    names = ["model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj"]
    before = model(rows(1, 32)).logits
    with pytest.raises(RuntimeError, match="stop"), watch_inputs(model, names, lambda name, x: None):
        raise RuntimeError("stop")
    collect_input_amax(model, names[1:], rows(1, 32))
    assert all(not m._forward_pre_hooks and "forward" not in vars(m) for m in model.modules())
    assert torch.equal(model(rows(1, 32)).logits, before)


def test_a_layer_that_is_never_called_is_named() -> None:
    with pytest.raises(ValueError, match=re.escape("idle: never called on the calibration data (1 such layers)")):
        collect_input_amax(Chain(), ["a", "idle"], rows(1))


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_an_expert_that_no_token_reached_has_the_scale_of_its_siblings(solver: str) -> None:
    """As ModelOpt gives it; the checkpoint could not be read without one. The first scale that holds all inputs."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.SwitchTransformersForConditionalGeneration(config).eval()
    ids = torch.randint(0, 128, (1, 8), generator=torch.Generator().manual_seed(0))
    call = {"input_ids": ids, "decoder_input_ids": ids}
    seen: dict[str, torch.Tensor] = {}
    names = [name for name, layer in model.named_modules() if ".experts." in name and name.endswith(".wi")]
    with watch_inputs(model, names, lambda name, x: seen.update({name: x.abs().max()})), torch.no_grad():
        model(**call)
    silent = [name for name in names if name not in seen]
    assert silent and seen
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = quant.quantize(model, "fp8", [call], solver=solver).model
    for name in silent:
        place = name.rpartition(".experts.")[0]
        largest = max(value for other, value in seen.items() if other.startswith(f"{place}.experts."))
        scale = quantized.get_submodule(name).input_scale
        assert largest / 448 <= scale * (1 + 1e-6) and (solver == "gptq" or scale == largest / 448)


class Routed(nn.Module):
    """Four experts of which each gets the tokens of its number, and so an empty input where there are none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.experts = nn.Embedding(64, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = ids.flatten() % 4 == number
            y[own] = expert(x[own])
        return y


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_experts_that_are_called_without_tokens(solver: str) -> None:
    """Each has a scale that covers its own tokens, and the one without any the largest of the others."""
    ids = torch.tensor([[0, 4, 8, 12], [1, 5, 2, 2]])
    model = Routed()
    rows = [model.embed.weight[ids[ids % 4 == number]] for number in range(3)]
    amax = torch.stack([x.detach().abs().amax() for x in rows])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = quant.quantize(model, "fp8", ids, solver=solver).model
    scales = torch.stack([quantized.get_submodule(f"experts.{number}").input_scale for number in range(4)])
    assert bool((scales[:3] * (1 + 1e-6) >= amax / 448).all()) and scales[3] == scales[:3].amax()
    assert solver == "gptq" or torch.allclose(scales[:3], amax / 448, rtol=1e-6)


def test_nan_is_named_with_layer_and_row() -> None:
    """Or with the weight that holds it, which here makes the input of the layer behind it NaN."""
    model = Chain()
    model.embed.forward = lambda ids: model.embed.weight[ids].masked_fill((ids == 7)[..., None], torch.nan)
    data = torch.tensor([[1, 2], [3, 4], [5, 7]])
    with pytest.raises(ValueError, match=r"^a: the input holds NaN .* on calibration row 2, and no weight does"):
        collect_input_amax(model, ["a", "b"], data)
    model.a.weight.data[1, 1] = torch.nan
    with pytest.raises(ValueError, match=re.escape("a.weight [8, 8] holds 1 value(s) that are NaN")):
        collect_input_amax(model, ["a", "b"], data[:2])


def test_experts_see_the_tokens_routed_to_them() -> None:
    """Against float64 arithmetic on the layer's own input, router and weights."""
    model, data = moe(), rows(3, 32)
    block = model.model.layers[0].mlp
    caught: list[torch.Tensor] = []
    handle = block.register_forward_pre_hook(lambda module, args: caught.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for row in data:
            model(row[None])
    handle.remove()
    x = torch.cat(caught)
    path = "model.layers.0.mlp.experts"
    amax = collect_input_amax(model, [f"{path}.gate_up_proj", f"{path}.down_proj"], data)
    # Every token reaches some expert, so the largest input of gate_up_proj is the largest of all.
    assert torch.equal(amax[f"{path}.gate_up_proj"], x.abs().max())
    chosen = (x @ block.gate.weight.T).softmax(-1).topk(2).indices
    inner = torch.tensor(0.0, dtype=torch.float64)
    for token, experts in enumerate(chosen.tolist()):
        for expert in experts:
            gate, up = (x[token].double() @ block.experts.gate_up_proj[expert].double().T).chunk(2)
            inner = torch.maximum(inner, (nn.functional.silu(gate) * up).abs().max())
    torch.testing.assert_close(amax[f"{path}.down_proj"].double(), inner, rtol=1e-5, atol=0)


def test_a_token_outside_the_vocabulary_is_named() -> None:
    model = tiny_models.llama(vocab_size=50, num_hidden_layers=1)
    with pytest.raises(ValueError, match="token id 50 is outside the model's vocabulary of 50"):
        collect_input_amax(model, ["model.layers.0.mlp.up_proj"], torch.tensor([[1, 50, 3]]))
