"""Experts that stay in their files are those that transformers loads, in a forward pass and one at a time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

import quant
from quant.calibration.walk.walk import ModelWalk
from quant.kernels.linear.experts import run_experts_one_by_one
from quant.models.open_model import open_model
from quant.models.stored_weights import StoredExperts, stored_in


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("shards", ["1GB", "60KB"])
def test_stored_experts_are_those_that_transformers_joins(kind: str, shards: str, tmp_path: Path) -> None:
    getattr(tiny_models, kind)(dtype=torch.bfloat16, gain=2.0).save_pretrained(tmp_path, max_shard_size=shards)
    whole, streamed = open_model(tmp_path).model, open_model(tmp_path, stream=True).model
    assert whole is not None and streamed is not None
    experts = stored_in(streamed)
    assert sorted(experts) == [n for n, p in sorted(whole.named_parameters()) if p.dim() == 3]
    expected = {**whole.state_dict(), **dict(whole.named_buffers())}
    found = {**streamed.state_dict(), **dict(streamed.named_buffers())}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        if name not in experts:
            assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
            continue
        assert found[name].is_meta
        assert torch.equal(experts[name].tensor(), tensor)
        assert all(torch.equal(experts[name][i], tensor[i]) for i in (1, 0, 3))
    run_experts_one_by_one(whole)
    ids = torch.randint(0, 60, (2, 9))
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, whole(ids).logits)
    assert {n for n, p in streamed.named_parameters() if p.is_meta} == set(experts)


@pytest.mark.parametrize("defect", ["an extra tensor", "another dtype", "a missing expert"])
def test_what_does_not_fit_is_left_to_transformers(defect: str, tmp_path: Path) -> None:
    tiny_models.qwen3_moe(dtype=torch.bfloat16).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    if defect == "an extra tensor":
        tensors["model.layers.0.mlp.experts.0.scale"] = torch.ones(1)
    elif defect == "another dtype":
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    else:
        del tensors["model.layers.0.mlp.experts.3.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    if defect == "a missing expert":
        with pytest.raises(ValueError, match=str(tmp_path)):
            open_model(tmp_path, stream=True)
        return
    with pytest.warns(match="has no use for") if defect == "an extra tensor" else torch.no_grad():
        model = open_model(tmp_path, stream=True).model
    assert model is not None and stored_in(model) == {}
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_bias_that_stays_in_float32_is_no_obstacle(stored: torch.dtype, tmp_path: Path) -> None:
    """DeepSeek-V3 is in BF16, but for what its routers add to the scores of experts."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    fields = {**sizes, **heads, **routing, "first_k_dense_replace": 0, "vocab_size": 64}
    tiny_models.build("DeepseekV3", "ForCausalLM", fields, dtype=torch.bfloat16, gain=2.0).save_pretrained(tmp_path)
    file, bias = tmp_path / "model.safetensors", "model.layers.0.mlp.gate.e_score_correction_bias"
    tensors = load_file(file)
    tensors[bias] = torch.linspace(0, 0.5, 8).to(stored)
    save_file(tensors, file, metadata={"format": "pt"})
    whole, streamed = open_model(tmp_path).model, open_model(tmp_path, stream=True).model
    assert whole is not None and streamed is not None
    assert len(stored_in(streamed)) == 2
    found, expected = streamed.state_dict()[bias], whole.state_dict()[bias]
    assert found.dtype == expected.dtype == torch.float32 and torch.equal(found, expected)


def test_input_scales_are_not_folded_by_a_forward_pass_without_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a block whose experts are in their files gives unwritten memory, which now and then passed the test."""
    tiny_models.qwen3_moe().save_pretrained(tmp_path, max_shard_size="60KB")
    model = open_model(tmp_path, stream=True).model
    assert model is not None and any(parameter.is_meta for parameter in model.parameters())
    monkeypatch.setattr("quant.calibration.walk.transform.find_fold", lambda *call: pytest.fail("was run"))
    rows = torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(1))
    plan = quant.quantize(model, "nvfp4a16", rows, solver="awq:merge+gptq").plan
    reasons = [layer.reason for layer in plan.quantized if "self_attn" in layer.name]
    assert reasons and all("no module around can absorb an input scale" in reason for reason in reasons)


def test_calls_of_blocks_are_found_without_reading_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.qwen3_moe(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    rows = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    read: list[bool] = []
    finding = False

    def matrix(self: StoredExperts, expert: int) -> torch.Tensor:
        read.append(finding)
        return plain_matrix(self, expert)

    def find_chains(self: ModelWalk) -> Any:
        nonlocal finding
        finding = True
        found = plain_find(self)
        finding = False
        return found

    plain_matrix, plain_find = StoredExperts._matrix, ModelWalk.find_chains
    monkeypatch.setattr(StoredExperts, "_matrix", matrix)
    monkeypatch.setattr(ModelWalk, "find_chains", find_chains)
    streamed, whole = open_model(tmp_path, stream=True).model, open_model(tmp_path).model
    solved = [quant.quantize(model, "nvfp4a16", rows, solver="gptq").model for model in (streamed, whole)]
    assert read and not any(read)
    ours, theirs = (dict(model.named_buffers()) for model in solved)
    for name in (name for name in ours if name.endswith(".codes")):
        assert torch.equal(ours[name], theirs[name])


def test_a_plan_reads_no_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layers share an input does not depend on them; of a large model, two tokens would read gigabytes."""
    tiny_models.qwen3_moe(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    monkeypatch.setattr(StoredExperts, "_matrix", lambda *of_expert: pytest.fail("an expert was read"))
    plans = [quant.make_plan(open_model(tmp_path, stream=stream).model, "nvfp4a16") for stream in (True, False)]
    streamed, whole = ([(layer.name, layer.group) for layer in plan.layers] for plan in plans)
    assert streamed == whole and any(group is not None for _, group in whole)


@pytest.mark.gpu
def test_a_gpu_reads_each_expert_of_a_block_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.qwen3_moe(dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    rows = torch.randint(0, 50, (8, 16), generator=torch.Generator().manual_seed(1))
    plain, read = StoredExperts._matrix, Counter[tuple[str, int]]()

    def matrix(self: StoredExperts, expert: int) -> torch.Tensor:
        read[self.name, expert] += 1
        return plain(self, expert)

    monkeypatch.setattr(StoredExperts, "_matrix", matrix)
    model = open_model(tmp_path, stream=True).model
    quant.quantize(model, "nvfp4a16", rows, solver="gptq", device="cuda")
    assert set(read.values()) == {1}
