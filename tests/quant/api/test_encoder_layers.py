"""torch's encoder layers call quantized layers, and layers in training, in eval mode without gradients too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import quant
from quant.calibration.allocation.allocate import score

ROWS = torch.randint(0, 64, (6, 20), generator=torch.Generator().manual_seed(5))
PADDED = torch.zeros(6, 20, dtype=torch.bool)
PADDED[:, 16:] = True


class Encoder(nn.Module):
    """Embedding, two encoder layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 64)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True), 2)
        self.head = nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids), src_key_padding_mask=padding))  # type: ignore[no-any-return]

    def by_hand(self, ids: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """The same function without the forward of torch's encoder."""
        x = self.embed(ids)
        layer: Any
        for layer in self.encoder.layers:
            x = layer.norm1(x + layer.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)[0])
            x = layer.norm2(x + layer.linear2(functional.relu(layer.linear1(x))))
        return self.head(x)  # type: ignore[no-any-return]


def _difference(model: Any, padding: torch.Tensor | None) -> float:
    model.eval()
    with torch.no_grad():
        difference: torch.Tensor = model(ROWS, padding) - model.by_hand(ROWS, padding)
    return float((difference if padding is None else difference[:, :16]).abs().max())


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.train()
    functional.cross_entropy(model(ROWS).flatten(0, 1), ROWS.flatten()).backward()
    optimizer.step()


@pytest.mark.parametrize("padding", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("way", ["quantize", "prepare_qat", "low_precision"])
def test_every_input_is_rounded(way: str, padding: torch.Tensor | None) -> None:
    model = Encoder()
    if way == "quantize":
        quant.quantize(model, "nvfp4", ROWS, effort=0)
    elif way == "prepare_qat":
        quant.prepare_qat(model, "nvfp4", ROWS)
        _train(model)
    else:
        quant.to_low_precision_training(model, "mxfp8")
        _train(model)
    assert _difference(model, padding) < 1e-5
    if way != "quantize":
        with torch.no_grad():
            trained = model(ROWS)
        quant.pack(model)
        with torch.no_grad():
            assert torch.allclose(model(ROWS), trained, atol=1e-5)
        assert _difference(model, padding) < 1e-5


def test_a_budget_measures_them_and_a_score_leaves_the_model_as_it_was() -> None:
    model = Encoder()
    before = copy.deepcopy([vars(module) for module in model.modules()])
    scores = score(model, ROWS, formats="nvfp4,fp8")
    assert {layer for group in scores.groups for layer in group.layers} == {
        f"encoder.layers.{i}.linear{j}" for i in (0, 1) for j in (1, 2)
    }
    attributes = ("activation_relu_or_gelu", "use_nested_tensor")
    for module, old in zip(model.modules(), before, strict=True):
        assert {a: vars(module).get(a) for a in attributes} == {a: old.get(a) for a in attributes}
    found = quant.quantize(model, data=ROWS, bits=6.0, formats="nvfp4,fp8")
    assert found.plan.provenance["allocation"]["bits"] <= 6.0
    assert _difference(model, None) < 1e-5
