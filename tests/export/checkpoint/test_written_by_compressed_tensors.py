"""Checkpoints that compressed-tensors writes itself: the same weights and logits here, or a refusal that opens them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.base.errors import UserError
from quant.export.checkpoint.load import can_run, open_runnable
from quant.models.open_model import open_model

schemes = pytest.importorskip("compressed_tensors.quantization")
Scheme = dict[str, Any]

FP8: Scheme = {"num_bits": 8, "type": "float", "strategy": "channel"}
FP8_TENSOR: Scheme = {**FP8, "strategy": "tensor"}
FP8_TOKEN: Scheme = {**FP8, "strategy": "token", "dynamic": True}
INT8: Scheme = {"num_bits": 8, "type": "int", "strategy": "channel"}
INT4: Scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def group(weights: Scheme | None, inputs: Scheme | None = None, *targets: str, **fields: Any) -> Scheme:
    return {"weights": weights, "input_activations": inputs, "targets": list(targets or ["Linear"]), **fields}


def written(folder: Path, *groups: Scheme, model: nn.Module | None = None, **sizes: Any) -> nn.Module:
    """Writes a model as llm-compressor does, and returns it as compressed-tensors decompresses and runs it."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    model = model or tiny_models.llama(gain=3.0, intermediate_size=128, **sizes)
    assert model is not None
    config = {"config_groups": {f"group_{index}": each for index, each in enumerate(groups)}, "ignore": ["lm_head"]}
    schemes.apply_quantization_config(model, schemes.QuantizationConfig(**config))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is None:
            continue
        rows, columns = scheme.weights.block_structure or (1, scheme.weights.group_size or module.weight.shape[1])
        tall = module.weight.shape[0] if scheme.weights.strategy == "tensor" else rows
        cut = [part.split(columns, 1) for part in module.weight.detach().split(tall)]
        low, high = (torch.tensor([[float(f(b)) for b in row] for row in cut]) for f in (torch.amin, torch.amax))
        scale, zero = helpers.calculate_qparams(low, high, scheme.weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    compressor.decompress_model(model)
    return model


def equal_weights(folder: Path, peer: nn.Module) -> None:
    opened = open_model(folder).model
    assert opened is not None
    expected = peer.state_dict()
    for name, tensor in opened.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=2**-20, atol=0)


@pytest.mark.parametrize(
    "groups",
    [
        # Names come before patterns, patterns before classes, whatever the order of the groups.
        (group(FP8, FP8_TOKEN), group(FP8, None, "re:.*down_proj$")),
        (group(FP8, FP8_TOKEN, "re:.*proj$"), group(FP8, None, "model.layers.0.mlp.down_proj")),
        (group(FP8, FP8_TOKEN, "re:.*proj$"), group(FP8, None, "re:.*down_proj$")),
        (group(INT4, None, "Linear", "Embedding"),),
        (group(FP8, FP8_TOKEN), group(FP8_TENSOR, None, "Embedding")),
    ],
    ids=["class", "name", "patterns", "embedding", "embedding apart"],
)
def test_logits_are_those_of_compressed_tensors(groups: tuple[Scheme, ...], tmp_path: Path) -> None:
    peer, ids = written(tmp_path, *groups), torch.arange(12)[None]
    equal_weights(tmp_path, peer)
    with torch.no_grad():
        torch.testing.assert_close(quant.load(tmp_path)(ids).logits, peer(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((group(FP8, {**FP8_TOKEN, "symmetric": False}),), r"inputs .*'symmetric': False"),
        ((group(FP8_TENSOR, {**FP8_TENSOR, "dynamic": True}),), r"inputs .*'dynamic': True"),
        ((group(INT8),), "group_0 of quantization_config has int8 in the layout pack-quantized"),
        ((group({**INT8, "strategy": "tensor"}),), "weights .*'strategy': 'tensor'"),
        ((group({**INT8, "num_bits": 4, "strategy": "tensor", "symmetric": False}),), "weights .*'num_bits': 4"),
        ((group(INT4, {**FP8_TOKEN, "type": "int"}),), "has int4_g32 in the layout int-quantized"),
        ((group({**FP8, "strategy": "block", "block_structure": [96, 96]}),), r"weights .*\[96, 96\]"),
        ((group({**FP8, "strategy": "group", "group_size": 32}),), "has mxfp8 in the layout naive-quantized"),
        ((group(FP8, None, output_activations=FP8_TOKEN),), "group_0 .* rounds inputs without weights, or outputs"),
    ],
    ids=["asymmetric", "dynamic", "w8a16", "tensor", "asymmetric tensor", "w4a8", "block", "group", "outputs"],
)
def test_what_no_layer_here_computes_is_refused_and_opens(groups: Any, said: str, tmp_path: Path) -> None:
    peer = written(tmp_path, *groups, hidden_size=160)
    with pytest.raises(ValueError, match=said + r".*: not supported as it is; quant\.open_model dequantizes") as error:
        quant.load(tmp_path)
    assert "\n" not in str(error.value) and not can_run(tmp_path)
    equal_weights(tmp_path, peer)
    assert not hasattr(open_runnable(str(tmp_path))[1].model.layers[0].mlp.up_proj, "quantized_weight")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"type": "int"}, "'type': 'int'"),
        ({"num_bits": 4}, "'num_bits': 4"),
        ({"strategy": "token", "dynamic": True}, "'dynamic': True"),
        ({"symmetric": False}, "'symmetric': False"),
    ],
)
def test_a_kv_cache_that_is_not_in_fp8_is_not_taken_for_it(changes: Scheme, said: str, tmp_path: Path) -> None:
    written(tmp_path, group(FP8, FP8_TOKEN))
    config = json.loads((tmp_path / "config.json").read_text())
    for scheme, kv_cache in (({**FP8_TENSOR, **changes}, None), (FP8_TENSOR, "fp8")):
        config["quantization_config"]["kv_cache_scheme"] = scheme
        (tmp_path / "config.json").write_text(json.dumps(config))
        if kv_cache is None:
            with pytest.raises(ValueError, match=rf"quantization_config has a KV cache .*{said}.*open_model"):
                quant.load(tmp_path)
        else:
            assert str(quant.load(tmp_path).quantization_plan.kv_cache) == kv_cache


@pytest.mark.parametrize("weights", [INT4, {**INT4, "num_bits": 8}, {**INT8, "strategy": "group", "group_size": 32}])
def test_the_order_of_inputs_that_a_checkpoint_states_is_kept(weights: Scheme, tmp_path: Path) -> None:
    """Older releases wrote `weight_g_idx`, all of it -1 where no order had been found."""
    in_bytes = FP8_TOKEN | {"type": "int"} if weights["num_bits"] == 8 and weights is not INT4 else None
    peer = written(tmp_path, group(weights, in_bytes))
    file, order = tmp_path / "model.safetensors", torch.randperm(128)
    name = "model.layers.1.mlp.down_proj"
    plain, stored = peer.state_dict()[f"{name}.weight"], load_file(file)
    for index in (torch.full((128,), -1), order // 32):
        save_file({**stored, f"{name}.weight_g_idx": index.int()}, file, {"format": "pt"})
        opened = open_model(file.parent).model
        assert opened is not None
        scale = stored[f"{name}.weight_scale"]
        codes = plain / scale.repeat_interleave(32, 1)
        expected = plain if index[0] == -1 else codes * scale[:, index]
        torch.testing.assert_close(opened.state_dict()[f"{name}.weight"], expected, rtol=1e-5, atol=1e-7)


def test_experts_that_another_tool_left_in_16_bit_stay_so(tmp_path: Path) -> None:
    """compressed-tensors does not see the stacked experts of transformers, though its config targets all linears."""
    peer, ids = written(tmp_path, group(FP8, FP8_TOKEN), model=tiny_models.qwen3_moe(gain=3.0)), torch.arange(12)[None]
    loaded = quant.load(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, peer(ids).logits, rtol=1e-5, atol=1e-5)


def test_sparse_weights_are_named_as_such(tmp_path: Path) -> None:
    written(tmp_path, group(FP8, FP8_TOKEN))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["sparsity_config"] = {"format": "sparse-24-bitmask"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="in the compressed-tensors layout sparse-24-bitmask, which cannot be read"):
        open_model(tmp_path)
