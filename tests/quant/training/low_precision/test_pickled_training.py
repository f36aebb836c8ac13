"""A whole model in low-precision training is pickled, and trains on in another process: `torch.save(model)`."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.training.low_precision.conversion import to_plain_layers

ROWS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(7))

# Nothing of the project is imported but what reading the file imports.
READER = """
import sys, torch
model, rows = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for _ in range(2):
    torch.manual_seed(0)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
loss = model(input_ids=rows, labels=rows).loss * float("nan")
loss.backward()
try:
    optimizer.step()
except Exception as error:
    losses.append(str(error))
from quant.training.low_precision.conversion import to_plain_layers
to_plain_layers(model)
losses += [type(model.model.layers[0].self_attn.q_proj).__name__, model.config._attn_implementation]
import json
print(json.dumps(losses))
"""


def _trained(model: Any, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for _ in range(steps):
        torch.manual_seed(0)  # of stochastic rounding
        loss = model(input_ids=ROWS, labels=ROWS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "recipe"), [("llama", "nvfp4"), ("llama", "fp8_delayed"), ("mixtral", "mxfp8")], ids=str
)
def test_a_fresh_process_trains_on(make: str, recipe: str, tmp_path: Path) -> None:
    model = getattr(tiny_models, make)(num_hidden_layers=1).train()
    quant.to_low_precision_training(model, recipe, attention="fp8")
    _trained(model, 1)
    torch.save((model, ROWS), tmp_path / "model.pt")
    script = tmp_path / "reader.py"
    script.write_text(READER)
    run = subprocess.run([sys.executable, script, tmp_path / "model.pt"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    *losses, line, layer, attention = json.loads(run.stdout.splitlines()[-1])
    assert losses == _trained(model, 2)
    assert "NaN or infinity" in line and recipe in line
    assert (layer, attention) == ("Linear", "sdpa")


def test_the_attention_is_registered_again_where_a_model_is_read() -> None:
    from transformers.modeling_utils import AttentionInterface

    model = tiny_models.llama(num_hidden_layers=1).train()
    quant.to_low_precision_training(model, "mxfp8", attention="fp8")
    registered = AttentionInterface._global_mapping.pop("quant_fp8_training")
    try:
        copy.deepcopy(model)
        assert AttentionInterface._global_mapping["quant_fp8_training"] is registered
    finally:
        AttentionInterface.register("quant_fp8_training", registered)


def test_a_copys_gradients_are_watched_until_it_is_plain_again() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32)).train()
    quant.to_low_precision_training(model, "mxfp8", on_nonfinite="skip")
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 1.0)
    before = twin[0].weight.detach().clone()
    (twin(torch.ones(4, 32)).sum() * float("nan")).backward()
    with pytest.warns(UserWarning, match=r"^0: its gradient holds NaN or infinity in mxfp8; this step is skipped"):
        optimizer.step()
    assert torch.equal(twin[0].weight, before)
    for each in (model, twin):
        to_plain_layers(each)
        assert not any("watch" in name for name in vars(each))


def test_a_wrapper_gives_back_the_model_in_it() -> None:
    model = tiny_models.llama(num_hidden_layers=1).train()
    quant.to_low_precision_training(model, "mxfp8", attention="fp8")
    to_plain_layers(torch.nn.Sequential(model))
    assert model.config._attn_implementation == "sdpa"
    assert not any("watch" in name or "training" in name for name in vars(model) if name != "training")


def test_a_saved_config_has_no_word_of_training(tmp_path: Path) -> None:
    plain, model = tiny_models.mixtral(num_hidden_layers=1), tiny_models.mixtral(num_hidden_layers=1)
    quant.to_low_precision_training(model, "mxfp8", attention="fp8")
    model.save_pretrained(tmp_path / "training")
    plain.save_pretrained(tmp_path / "plain")
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("training", "plain")]
    assert configs[0] == configs[1]
