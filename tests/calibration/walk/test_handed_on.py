"""Blocks that attend to keys of an earlier block: hidden states of the walk are those of whole models."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import tiny_models
import torch
from slow_cases import quick_cases

import quant
from quant.calibration.walk import block as block_module
from quant.calibration.walk.walk import ModelWalk, States
from quant.recipes.blocks import output_of

transformers = pytest.importorskip("transformers")

ROWS = torch.randint(3, 64, (6, 16), generator=torch.Generator().manual_seed(0))
SIZES = {
    **tiny_models.DECODER, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 8, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16, "pad_token_id": 0,
}  # fmt: skip
OWN = {
    "Gemma3n": {"laurel_rank": 16, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "Gemma4": {"global_head_dim": 32},
}


def sharing_model(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}TextConfig")(**{**SIZES, **OWN[name], **sizes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(2.0)
            elif not parameter.any():
                parameter.fill_(1.0)  # the scale of AltUp's correction
    return model.to(dtype)


def outputs_of(model: Any) -> list[torch.Tensor]:
    """The hidden states behind each block, all rows at once, from one pass of the whole model."""
    states: list[torch.Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, out: states.append(output_of(out))) for b in model.model.layers]
    with torch.no_grad():
        model(ROWS)
    for handle in handles:
        handle.remove()
    return states


@pytest.mark.parametrize("solver", ["gptq", pytest.param("autoround", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["Gemma3n", "Gemma4"])
def test_states_are_those_of_whole_models(name: str, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = sharing_model(name)
    seen: dict[str, States | None] = {}
    close = ModelWalk.close_block

    def recording(walk: ModelWalk, block_name: str, block: Any, outputs: States | None) -> States | None:
        seen[block_name] = outputs
        return close(walk, block_name, block, outputs)

    monkeypatch.setattr(ModelWalk, "close_block", recording)
    monkeypatch.setattr(block_module, "fast_matmul", nullcontext)  # rounds products, which a whole model does not
    # Layers outside the blocks are rounded after the walk, and change the inputs of all blocks.
    done = quant.quantize(copy.deepcopy(original), "nvfp4a16", ROWS, solver=solver, include=["*.layers.*"])
    rounded, reference = outputs_of(done.model), outputs_of(original)
    compared = 0
    for index, block_name in enumerate(f"model.layers.{number}" for number in range(4)):
        states = seen[block_name]
        if states is None:
            # Gemma 4 cuts its hidden states where sharing begins: another chain, behind blocks that are quantized.
            for before in range(index + 1):
                original.model.layers[before] = done.model.model.layers[before]
            reference = outputs_of(original)
            continue
        batch = 1 if name == "Gemma3n" else 0  # [inputs of AltUp, batch, tokens, features]
        size = reference[index].norm()
        apart = float((reference[index] - rounded[index]).norm() / size)
        # The walk's quantized states of a Gemma 3n are not those of the whole model, with sharing or without.
        limits = {"original": 1e-4, "quantized": 1e-4 if name == "Gemma4" else 0.5 * apart}
        assert apart > 1e-2
        for kind, expected in (("original", reference[index]), ("quantized", rounded[index])):
            found = torch.cat([part.float() for part in getattr(states, kind)], dim=batch)
            error = float((found - expected).norm() / size)
            assert error < limits[kind], (block_name, kind, error)
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("name", [pytest.param("Gemma3n", marks=pytest.mark.slow), "Gemma4"])
def test_codes_before_the_shared_layers_do_not_depend_on_them(name: str) -> None:
    """The first two blocks run before anything is shared: without sharing their codes are the same."""
    shared = sharing_model(name)
    alone = sharing_model(name, num_kv_shared_layers=0)
    missing, _ = alone.load_state_dict(shared.state_dict(), strict=False)
    assert all(".layers.2." in key or ".layers.3." in key for key in missing)
    ours, theirs = (quant.quantize(model, "nvfp4", ROWS, solver="gptq").model for model in (shared, alone))
    for index in (0, 1):
        for layer in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
            path = f"model.layers.{index}.{layer}"
            one, other = (model.get_submodule(path).quantized_weight for model in (ours, theirs))
            assert torch.equal(one.codes, other.codes), path


@pytest.mark.parametrize(
    ("name", "dtype", "format", "limit"),
    quick_cases(
        [
            (name, dtype, *limit)
            for name in OWN
            for dtype in (torch.bfloat16, torch.float32)
            for limit in (("nvfp4", 1.0), ("int8", 0.15))
        ],
        lambda name, dtype, format, limit: dtype is torch.bfloat16 and (format == "nvfp4") == (name == "Gemma3n"),
    ),
)
def test_every_dtype_and_format_ends(name: str, dtype: torch.dtype, format: str, limit: float) -> None:
    model = sharing_model(name, dtype)
    reference = model(ROWS).logits.detach().float()
    done = quant.quantize(model, format, ROWS, effort=2)
    with torch.no_grad():
        found = done.model(ROWS).logits.float()
    assert (found - reference).norm() / reference.norm() < limit
