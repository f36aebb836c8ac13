"""Checkpoints that are released quantized open with the values that their own libraries, or numpy, decode."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from click.testing import CliRunner
from plan_samples import planned
from safetensors.torch import load_file, save_file
from samples import GOLDENS
from slow_cases import quick_cases
from torch import nn

import quant
from quant.base.errors import UserError
from quant.cli.main import main
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import open_runnable
from quant.models.open_model import open_model
from quant.models.quantized_tensors import QuantizedTensors
from quant.models.stored_weights import read_stored, stored_in
from quant.recipes.plan_make import make_plan

transformers = pytest.importorskip("transformers", reason="the extra hf")

Tensors = dict[str, torch.Tensor]


def released(model: nn.Module, folder: Path, pack: Callable[[str, torch.Tensor], Tensors], config: Any) -> Path:
    """Saves a model whose linear layers `pack` turns into parts, as its config says."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: Tensors = {}
    for name, tensor in load_file(file).items():
        is_linear = name.endswith("proj.weight") or name.endswith("fc1.weight")
        tensors |= pack(name.removesuffix(".weight"), tensor) if is_linear else {name: tensor}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return folder


def weights(folder: Path, **options: Any) -> Tensors:
    model = open_model(folder, **options).model
    assert model is not None
    return model.state_dict()


# --- FP8


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def fp8_blocks(name: str, weight: torch.Tensor) -> Tensors:
    """128 x 128 blocks, written out block by block; blocks at the edges are short."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = weight[place].float().abs().max() / 448
            codes[place] = (weight[place].float() / scale[i, j]).to(torch.float8_e4m3fn)
    return {f"{name}.weight": codes, f"{name}.weight_scale_inv": scale}


def from_blocks(parts: Tensors, name: str) -> torch.Tensor:
    codes, scale = parts[f"{name}.weight"].float().numpy(), parts[f"{name}.weight_scale_inv"].numpy()
    out = np.empty_like(codes)
    for i, j in np.ndindex(*scale.shape):
        place = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        out[place] = codes[place] * scale[i, j]
    return torch.from_numpy(out).bfloat16()


def test_fp8_blocks_with_ragged_edges(tmp_path: Path) -> None:
    model = tiny_models.qwen3(dtype=torch.bfloat16, hidden_size=160, intermediate_size=328, gain=3.0)
    released(model, tmp_path, fp8_blocks, FP8)
    stored = load_file(tmp_path / "model.safetensors")
    found = weights(tmp_path)
    packed = [name.removesuffix(".weight_scale_inv") for name in stored if name.endswith("_scale_inv")]
    assert len(packed) == 14
    for name in packed:
        assert torch.equal(found[f"{name}.weight"], from_blocks(stored, name))
    kept = [name for name in stored if name.removesuffix("_scale_inv").removesuffix(".weight") not in packed]
    assert len(kept) == len(found) - 14
    assert all(torch.equal(found[name], stored[name]) for name in kept)
    once = weights(tmp_path, dtype="float32")
    assert not torch.equal(once[f"{packed[0]}.weight"].bfloat16().float(), once[f"{packed[0]}.weight"])
    assert torch.equal(once[f"{packed[0]}.weight"].bfloat16(), found[f"{packed[0]}.weight"])


def test_fp8_is_what_transformers_dequantizes(tmp_path: Path) -> None:
    """DeepSeek's layout, its experts stored one by one."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 128, "kv_lora_rank": 128}
    dims = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "vocab_size": 64}
    router = {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    fields = {**sizes, **heads, **dims, **router, "num_hidden_layers": 2, "n_shared_experts": 1}
    model = tiny_models.build("DeepseekV3", "ForCausalLM", fields, dtype=torch.bfloat16, gain=2.0)

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        whole = weight.shape[0] % 128 == 0 and "kv_a" not in name  # the peer has no short blocks
        return fp8_blocks(name, weight) if whole else {f"{name}.weight": weight}

    kept = ["lm_head", "kv_a_proj_with_mqa", "gate"]
    released(model, tmp_path, pack, {**FP8, "modules_to_not_convert": kept})
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype="auto"
    )
    ours = open_model(tmp_path)
    assert ours.quantization == "FP8 in blocks of 128x128" and ours.model is not None
    expected, found = peer.state_dict(), ours.model.state_dict()
    assert set(found) == set(expected) and not hasattr(ours.config, "quantization_config")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert ours.model.generation_config.to_dict() == peer.generation_config.to_dict()


@pytest.mark.parametrize("scale", ["tensor", "channel"])
def test_fp8_with_one_scale_or_one_a_row(scale: str, tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Tensors:
        found = weight.float().abs().amax(1, keepdim=True) / 448
        found = found.max() if scale == "tensor" else found
        suffix = "scale_inv" if scale == "tensor" else "scale"
        extra = {f"{name}.activation_scale": torch.tensor(0.5)} if scale == "tensor" else {}
        return {
            f"{name}.weight": (weight / found).to(torch.float8_e4m3fn),
            f"{name}.weight_{suffix}": found,
            **extra,
        }

    config = {"quant_method": "fp8" if scale == "tensor" else "fbgemm_fp8", "weight_block_size": None}
    released(tiny_models.llama(dtype=torch.bfloat16, gain=2.0), tmp_path, pack, config)
    stored, found = load_file(tmp_path / "model.safetensors"), weights(tmp_path)
    for name in (n for n in stored if stored[n].dtype == torch.float8_e4m3fn):
        scales = stored.get(f"{name}_scale_inv", stored.get(f"{name}_scale"))
        assert torch.equal(found[name], (stored[name].double() * scales.double()).float().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
@pytest.mark.parametrize("block", [(999, 999), (1, 999), (128, 128)])
def test_fp8_without_negative_zero(dtype: torch.dtype, block: tuple[int, int], tmp_path: Path) -> None:
    """AMD's FP8, whose codes are other numbers, with a scale for each tensor, row or block."""
    expected: Tensors = {}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        grid = [-(-size // min(step, size)) for size, step in zip(weight.shape, block, strict=True)]
        scale = torch.rand(*grid) / 64 + 2**-8
        wide = scale
        for axis, (size, step) in enumerate(zip(weight.shape, block, strict=True)):
            wide = wide.repeat_interleave(min(step, size), axis).narrow(axis, 0, size)
        codes = (weight.float() / wide).to(dtype)
        expected[f"{name}.weight"] = (codes.double() * wide.double()).float().bfloat16()
        return {f"{name}.weight": codes, f"{name}.weight_scale": scale}

    model = tiny_models.qwen3(dtype=torch.bfloat16, hidden_size=160, intermediate_size=328, gain=3.0)
    released(model, tmp_path, pack, {"quant_method": "fp8"})
    found = weights(tmp_path)
    assert len(expected) == 14 and all(torch.equal(found[name], expected[name]) for name in expected)
    file = tmp_path / "model.safetensors"
    save_file({n: t for n, t in load_file(file).items() if not n.endswith("_scale")}, file, {"format": "pt"})
    torch.save(load_file(file), tmp_path / "m.pt")
    for source in (tmp_path, tmp_path / "m.pt"):
        with pytest.raises(UserError, match=r"\.weight is in FP8 and has no scale"):
            open_model(source)


# --- MXFP4


def gpt_oss(folder: Path) -> tuple[nn.Module, Tensors]:
    """Saves a model with experts in MXFP4; gives it, and what transformers makes of its experts."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 2}
    fields = {**sizes, **heads, "vocab_size": 64, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny_models.build("GptOss", "ForCausalLM", fields, dtype=torch.bfloat16, gain=2.0)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors, expected = load_file(file), {}
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, expected


def test_mxfp4_experts_are_what_transformers_converts(tmp_path: Path) -> None:
    _, expected = gpt_oss(tmp_path)
    source = open_model(tmp_path)
    assert source.quantization == "MXFP4" and source.model is not None and len(expected) == 4
    found, tensors = source.model.state_dict(), load_file(tmp_path / "model.safetensors")
    for name, tensor in {**expected, **{n: t for n, t in tensors.items() if n in found}}.items():
        assert torch.equal(found[name], tensor), name


# --- integers in words of 32 bits, packed and unpacked by numpy


def words(codes: np.ndarray, bits: int, axis: int, order: list[int] | None = None) -> torch.Tensor:
    """`codes` packed along an axis, one shift at a time; `order` says which of eight columns is at which place."""
    codes = np.moveaxis(codes, axis, -1).astype(np.uint32)
    per_word = 32 // bits
    grouped = codes.reshape(*codes.shape[:-1], -1, per_word)
    packed = np.zeros(grouped.shape[:-1], dtype=np.uint32)
    for place in range(per_word):
        packed |= grouped[..., order[place] if order else place] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(packed, -1, axis)).view(np.int32))


def rounded(weight: torch.Tensor, bits: int, group: int, of_input: np.ndarray) -> tuple[np.ndarray, ...]:
    """Codes `[out, in]`, zeros and FP16 scales `[out, groups]` of asymmetric rounding."""
    values = weight.float().numpy()
    count = values.shape[1] // group
    low = np.stack([values[:, of_input == g].min(1) for g in range(count)], 1)
    high = np.stack([values[:, of_input == g].max(1) for g in range(count)], 1)
    scale = ((high - low) / (2**bits - 1)).astype(np.float16)
    zero = np.clip(np.round(-low / scale), 1, 2**bits - 1)
    codes = np.clip(np.round(values / scale[:, of_input]) + zero[:, of_input], 0, 2**bits - 1)
    return codes.astype(np.int64), zero.astype(np.int64), scale


def value(codes: np.ndarray, zero: np.ndarray, scale: np.ndarray, of_input: np.ndarray) -> torch.Tensor:
    product = (codes - zero[:, of_input]).astype(np.float64) * scale[:, of_input].astype(np.float64)
    return torch.from_numpy(product)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "GPTQ_V2"])
@pytest.mark.parametrize(("bits", "order"), [(4, "act"), (4, "plain"), (8, "none"), (2, "plain")])
def test_gptq_equals_numpy(layout: str, bits: int, order: str, tmp_path: Path) -> None:
    draw, expected = np.random.default_rng(0), {}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        of_input = np.arange(weight.shape[1]) // 32
        if order == "act":
            draw.shuffle(of_input)
        codes, zero, scale = rounded(weight, bits, 32, of_input)
        expected[f"{name}.weight"] = value(codes, zero, scale, of_input)
        parts = {
            f"{name}.qweight": words(codes.T, bits, 0),
            f"{name}.qzeros": words(zero.T - (layout == "gptq"), bits, 1),
            f"{name}.scales": torch.from_numpy(scale.T.copy()),
        }
        return parts if order == "none" else {**parts, f"{name}.g_idx": torch.from_numpy(of_input.astype(np.int32))}

    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order == "act"}
    config |= {"checkpoint_format": layout} if layout != "gptq" else {}
    released(tiny_models.llama(dtype=torch.float16, gain=2.0), tmp_path, pack, config)
    source = open_model(tmp_path)
    assert source.dtype == torch.float16 and source.quantization == f"GPTQ INT{bits} in groups of 32"
    assert source.model is not None and len(expected) == 14
    found = source.model.state_dict()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float().half()), name


def test_words_of_16_bits_are_refused(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Tensors:
        out, inputs = weight.shape
        parts = {"qweight": torch.zeros(inputs // 4, out), "qzeros": torch.zeros(1, out // 4)}
        return {f"{name}.{part}": t.short() for part, t in parts.items()} | {f"{name}.scales": weight[:, 0][None]}

    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "pack_dtype": "int16"}
    released(tiny_models.llama(dtype=torch.float16), tmp_path, pack, config)
    with pytest.raises(
        UserError, match=r"_proj\.qweight has words in I16; those in I32 can be read: quantize the orig"
    ):
        open_model(tmp_path)


def test_awq_equals_numpy(tmp_path: Path) -> None:
    expected = {}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        of_input = np.arange(weight.shape[1]) // 32
        codes, zero, scale = rounded(weight, 4, 32, of_input)
        expected[f"{name}.weight"] = value(codes, zero, scale, of_input)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        return {
            f"{name}.qweight": words(codes.T, 4, 1, order),
            f"{name}.qzeros": words(zero.T, 4, 1, order),
            f"{name}.scales": torch.from_numpy(scale.T.copy()),
        }

    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    released(tiny_models.llama(dtype=torch.float16, gain=2.0), tmp_path, pack, config)
    found = weights(tmp_path)
    assert len(expected) == 14
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor.float().half()), name


# --- compressed-tensors and ModelOpt


@pytest.mark.parametrize("golden", ["FP8", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4", "MXFP8", "NVFP4", "NVFP4A16"])
def test_compressed_tensors_goldens_equal_their_package(golden: str) -> None:
    base = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    schemes = pytest.importorskip("compressed_tensors.quantization")
    folder = GOLDENS / "compressed_tensors" / golden
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    fields = config["config_groups"]["group_0"]
    scheme = schemes.QuantizationScheme.model_validate(fields)
    stored, found = load_file(folder / "model.safetensors"), weights(folder)
    names = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert len(names) == 14
    for name in names:
        parts = {key.removeprefix(f"{name}."): t for key, t in stored.items() if key.startswith(f"{name}.")}
        decoded = base.get_value_from_registry(fields["format"]).decompress(parts, scheme)["weight"]
        torch.testing.assert_close(found[f"{name}.weight"], decoded.bfloat16(), rtol=2**-8, atol=0)  # one rounding
        assert torch.equal(found[f"{name}.weight"].isfinite(), decoded.isfinite())


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 32, True), (4, 128, True), (4, 32, False), (8, None, True), (8, None, False)]
)
def test_pack_quantized_equals_its_package(bits: int, group: int | None, symmetric: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    strategy = "group" if group else "channel"
    arguments = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": group}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    expected = {}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        groups = weight.float().unflatten(1, (-1, group or weight.shape[1]))
        low, high = groups.amin(-1), groups.amax(-1)
        top = 2 ** (bits - 1)
        if symmetric:
            scale, zero = groups.abs().amax(-1) / top, torch.zeros_like(low)
        else:
            scale = (high - low) / (2**bits - 1)
            zero = (-low / scale - top).round().clamp(-top, top - 1)
        parts = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_zero_point": zero.to(torch.int8)}
        packed = compressor.compress(parts, scheme)
        expected[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"]
        return {f"{name}.{key}": tensor for key, tensor in packed.items()}

    group_config = {"targets": ["Linear"], "weights": arguments, "format": "pack-quantized"}
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group_config},
        "version": "0.19.0", "ignore": ["lm_head"], "sparsity_config": {}, "transform_config": {},
    }  # fmt: skip
    model = tiny_models.llama(dtype=torch.bfloat16, gain=2.0, hidden_size=128, intermediate_size=256)
    released(model, tmp_path, pack, config)
    found = weights(tmp_path)
    assert len(expected) == 14
    for name, tensor in expected.items():
        # The package subtracts and multiplies in bfloat16; both are exact before the one rounding of four-bit codes.
        torch.testing.assert_close(found[name], tensor, rtol=2**-8, atol=0)
        assert bits == 8 or torch.equal(found[name], tensor), name


def test_codes_across_words_are_refused(tmp_path: Path) -> None:
    def pack(name: str, weight: torch.Tensor) -> Tensors:
        words = torch.zeros(weight.shape[0], weight.shape[1] * 3 // 32, dtype=torch.int32)
        parts = {"packed": words, "scale": weight[:, :1], "shape": torch.tensor(weight.shape)}
        return {f"{name}.weight_{part}": tensor for part, tensor in parts.items()}

    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    released(tiny_models.llama(dtype=torch.bfloat16), tmp_path, pack, config)
    with pytest.raises(UserError, match=r"_proj\.weight has codes of 3 bits; 2, 4 and 8 can be read: quant"):
        open_model(tmp_path)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized_equals_its_package(symmetric: bool, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": symmetric}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry("int-quantized")
    expected = {}

    def pack(name: str, weight: torch.Tensor) -> Tensors:
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = weight.abs().amax(1, keepdim=True) / 127 if symmetric else (high - low) / 255
        zero = torch.zeros_like(scale) if symmetric else (-low / scale - 128).round().clamp(-128, 127)
        parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        packed = compressor.compress(parts, scheme)
        expected[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"]
        return {f"{name}.{key}": tensor for key, tensor in packed.items()}

    groups = {"group_0": {"targets": ["Linear"], "weights": arguments, "format": "int-quantized"}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    released(tiny_models.llama(gain=2.0), tmp_path, pack, config)  # float32: the package rounds to the model's dtype
    stored, found = load_file(tmp_path / "model.safetensors"), weights(tmp_path)
    assert any(name.endswith("zero_point") for name in stored) != symmetric
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=2**-22, atol=0)


@pytest.mark.parametrize("golden", ["fp8", "fp8blk", "fp8pcpt", "mixed", "mxfp4", "mxfp8", "nvfp4", "w4a16"])
def test_modelopt_goldens_equal_their_definition(golden: str) -> None:
    """The formula of ModelOpt's layout in float64, with e2m1 and e8m0 decoded by hand."""
    folder = GOLDENS / "modelopt" / golden
    stored, found = load_file(folder / "model.safetensors"), weights(folder)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    table = torch.cat([table, -table]).double()
    names = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert names
    for name in names:
        codes, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        if codes.dtype == torch.uint8:
            codes = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        scale = (2.0 ** (scale.double() - 127)) if scale.dtype == torch.uint8 else scale.double()
        scale = scale * stored.get(f"{name}.weight_scale_2", torch.tensor(1.0)).double()
        grid = scale[:, 0, :, 0] if scale.dim() == 4 else scale.reshape(-1, 1) if scale.dim() < 2 else scale
        rows, columns = codes.shape[0] // grid.shape[0], codes.shape[1] // grid.shape[1]
        wide = grid.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        expected = (codes.double() * wide).bfloat16()
        torch.testing.assert_close(found[f"{name}.weight"], expected, rtol=2**-7, atol=0)
        assert (found[f"{name}.weight"] != expected).float().mean() < 1e-3  # ties of the float32 product


# --- what is refused


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            r"bitsandbytes.*model\.dequantize\(\).*save_pretrained",
        ),
        ({"quant_method": "hqq"}, r"already quantized, by hqq.*quantize the original model.*fp8, .*gptq, awq"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin", "bits": 4}, "layout 'marlin'"),
        ({"quant_method": "awq", "version": "gemv", "bits": 4}, "layout 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "layout marlin-24"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
    ],
)
def test_what_cannot_be_read_names_a_way_out(config: dict[str, Any], match: str, tmp_path: Path) -> None:
    released(tiny_models.llama(), tmp_path, lambda name, weight: {f"{name}.weight": weight}, config)
    with pytest.raises(UserError, match=match) as error:
        open_model(tmp_path)
    assert "\n" not in str(error.value) and "quant.load" not in str(error.value)


@pytest.mark.parametrize("meta", [False, True])
def test_scales_without_a_config_are_an_error(meta: bool, tmp_path: Path) -> None:
    released(tiny_models.qwen3(dtype=torch.bfloat16), tmp_path, fp8_blocks, None)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "model.safetensors"
    for source in (tmp_path, file):
        with pytest.raises(
            UserError,
            match=rf"{file}: model\.layers\.0\.\S+\.weight_scale_inv belongs to .* no quantization_config says how",
        ):
            open_model(source, meta=meta)
    tensors = load_file(file)
    torch.save(tensors, tmp_path / "m.pt")
    with pytest.raises(UserError, match=r"m\.pt: model\.layers\.0\.\S+\.weight_scale_inv belongs to"):
        open_model(tmp_path / "m.pt", meta=meta)
    save_file({n: t for n, t in tensors.items() if "scale" not in n}, file, {"format": "pt"})
    torch.save(load_file(file), tmp_path / "m.pt")
    for source in (tmp_path, file, tmp_path / "m.pt"):
        with pytest.raises(UserError, match=r"\.weight is in FP8 and has no scale, and no quantization_config"):
            open_model(source, meta=meta)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ("no scale", r"q_proj\.weight is in FP8 and has no scale, though the config says FP8 in blocks"),
        ("no codes", r"q_proj\.weight_scale_inv belongs to a quantized weight"),
        ("other blocks", r"q_proj\.weight cannot be dequantized: \[3, 1\] scales for \[64, 64\] weights"),
        ("one row", r"q_proj\.weight \[64\] with \S+q_proj\.weight_scale_inv \[1, 1\] is not a quantized weight"),
    ],
)
def test_codes_and_scales_that_do_not_fit(changed: str, match: str, tmp_path: Path) -> None:
    released(tiny_models.llama(dtype=torch.bfloat16), tmp_path, fp8_blocks, FP8)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.self_attn.q_proj.weight"
    if changed == "other blocks":
        tensors[f"{name}_scale_inv"] = torch.ones(3, 1)
    elif changed == "one row":
        tensors[name] = tensors[name][0].clone()
    else:
        del tensors[f"{name}_scale_inv" if changed == "no scale" else name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=match) as error:
        open_model(tmp_path)
    assert str(file) in str(error.value)


def test_a_config_that_is_left_over_is_told(tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.bfloat16)
    released(model, tmp_path, lambda name, weight: {f"{name}.weight": weight}, FP8)
    with pytest.warns(UserWarning, match="the config says FP8 in blocks of 128x128, and no tensor is quantized"):
        source = open_model(tmp_path)
    assert source.quantization is None and source.model is not None
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in source.model.state_dict().items())
    assert not hasattr(source.config, "quantization_config")


@pytest.mark.parametrize(
    "names",
    [["a.qweight", "a.qzeros"], ["a.weight_packed"], ["x_blocks", "x_scales"], ["w", "w_scale"], ["a.weight_scale"]],
)
def test_parts_of_quantized_weights_in_a_bare_state_dict(names: list[str], tmp_path: Path) -> None:
    save_file({"b.weight": torch.ones(4, 4), **{name: torch.ones(4, 4) for name in names}}, tmp_path / "m.safetensors")
    with pytest.raises(
        UserError, match=r"m\.safetensors: \S+ belongs to a quantized weight, and no quantization_config"
    ):
        open_model(tmp_path / "m.safetensors")


def test_scales_that_are_parameters_of_a_model_pass(tmp_path: Path) -> None:
    tensors = {"logit_scale": torch.ones(1), "layer_scale": torch.ones(4), "blocks.0.scale": torch.ones(4)}
    save_file({"b.weight": torch.ones(4, 4), **tensors}, tmp_path / "m.safetensors")
    assert set(open_model(tmp_path / "m.safetensors").state_dict or ()) == {"b.weight", *tensors}


# --- commands


def quantized(model: Path, out: Path, *options: str) -> tuple[Tensors, dict[str, Any], str]:
    """What `quantize` writes: tensors, plan, and what the terminal says."""
    arguments = [str(model), *options, "--out", str(out), "--device", "cpu"]
    done = CliRunner().invoke(quantize_command, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    said = " ".join(done.stderr.split())
    return load_file(out / "model.safetensors"), json.loads((out / "plan.json").read_text()), said


SOLVED = {
    "rtn": ("nvfp4a16",),
    "kept layers": ("nvfp4a16", "--exclude", "*.down_proj"),
    "static scales": ("nvfp4", "--calib", "IDS"),
    "own text": ("fp8",),
    "gptq": ("nvfp4a16", "--solver", "awq+gptq", "--calib", "IDS", "--exclude", "*.0.*.v_proj"),
    "merged": ("nvfp4a16", "--solver", "rotation:merge", "--calib", "IDS"),
    "guard": ("nvfp4", "--guard", "0.08 fp8_channel keep", "--calib", "IDS"),
}


@pytest.mark.parametrize("how", quick_cases(SOLVED, lambda how: how not in ("rtn", "own text", "merged")))
def test_a_quantized_source_is_quantized_like_its_dequantized_form(how: str, tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.bfloat16, gain=2.0, hidden_size=128, intermediate_size=256)
    released(model, tmp_path / "fp8", fp8_blocks, FP8)
    opened = open_model(tmp_path / "fp8").model
    assert opened is not None
    opened.save_pretrained(tmp_path / "bf16")
    ids = tmp_path / "ids.safetensors"
    save_file({"ids": torch.randint(0, 60, (8, 16))}, ids)
    options = ["--format", *(str(ids) if option == "IDS" else option for option in SOLVED[how])]
    options += ["--calib-samples", "8", "--seqlen", "16"]
    if how == "guard":
        plans = planned(tmp_path / "bf16", tmp_path / "guarded.json", *options)
        options = ["--plan", str(plans), "--calib", str(ids), *options[-4:]]
    made, plan, said = quantized(tmp_path / "fp8", tmp_path / "fp8.out", *options)
    expected, plain, silent = quantized(tmp_path / "bf16", tmp_path / "bf16.out", *options)
    assert set(made) == set(expected) and all(torch.equal(made[name], expected[name]) for name in made)
    note = "the source is quantized (FP8 in blocks of 128x128); its weights are dequantized to bfloat16"
    assert note in said and note not in silent
    config = json.loads((tmp_path / "fp8.out" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    formats = [found["provenance"].get("source_format") for found in (plan, plain)]
    assert formats == ["FP8 in blocks of 128x128", None]


def test_a_plan_file_does_not_hide_what_the_source_was(tmp_path: Path) -> None:
    released(tiny_models.llama(dtype=torch.bfloat16), tmp_path / "fp8", fp8_blocks, FP8)
    make_plan(open_model(tmp_path / "fp8", meta=True).model, "fp8_channel").save(tmp_path / "plan.json")
    _, plan, _ = quantized(tmp_path / "fp8", tmp_path / "out", "--plan", str(tmp_path / "plan.json"))
    assert plan["provenance"]["source_format"] == "FP8 in blocks of 128x128"


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_no_more_is_dequantized_than_is_worked_on(solver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two fusion groups, or two blocks, are alive at a time, however many layers there are."""
    model = tiny_models.llama(dtype=torch.bfloat16, num_hidden_layers=6)
    released(model, tmp_path / "fp8", fp8_blocks, FP8)
    ids = tmp_path / "ids.safetensors"
    save_file({"ids": torch.randint(0, 60, (4, 16))}, ids)
    alive: dict[int, int] = {}
    peaks = []
    read = QuantizedTensors.matrix

    def counted(self: QuantizedTensors, name: str, index: int | None = None) -> torch.Tensor:
        found = read(self, name, index)
        alive[id(found)] = found.nbytes
        weakref.finalize(found.untyped_storage(), alive.pop, id(found))
        peaks.append(sum(alive.values()))
        return found

    monkeypatch.setattr(QuantizedTensors, "matrix", counted)
    options = ["--format", "nvfp4a16", "--solver", solver, "--seqlen", "16", "--calib-samples", "4"]
    options += ["--calib", str(ids)] if solver == "gptq" else []
    quantized(tmp_path / "fp8", tmp_path / "out", *options)
    block = sum(p.nbytes for p in model.model.layers[0].parameters() if p.dim() == 2)
    largest = sum(p.nbytes for name, p in model.model.layers[0].named_parameters() if "gate" in name or "up_" in name)
    assert len(peaks) >= 6 * 7 and 0 < max(peaks) <= 2 * (block if solver == "gptq" else largest)


@pytest.mark.parametrize("kind", ["fp8 experts", "gpt-oss"])
def test_experts_are_read_one_by_one_and_in_a_forward_pass(kind: str, tmp_path: Path) -> None:
    if kind == "gpt-oss":
        model, _ = gpt_oss(tmp_path)
    else:
        model = tiny_models.qwen3_moe(dtype=torch.bfloat16, gain=2.0, hidden_size=192)
        released(model, tmp_path, fp8_blocks, FP8)
    whole, streamed = open_model(tmp_path).model, open_model(tmp_path, stream=True).model
    assert whole is not None and streamed is not None
    unread, expected = stored_in(streamed), whole.state_dict()
    experts = [name for name, stored in unread.items() if stored.dim() == 3]
    assert len(experts) == 4
    for name, stored in unread.items():
        assert torch.equal(stored.tensor(), expected[name]) and stored.shape == expected[name].shape
        assert name not in experts or all(torch.equal(stored[i], expected[name][i]) for i in (1, 0, 3))
    ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, whole(ids).logits)
    assert {name for name, p in streamed.named_parameters() if p.is_meta} == set(unread)
    read_stored(streamed, list(unread))
    assert not stored_in(streamed) and all(torch.equal(t, expected[n]) for n, t in streamed.state_dict().items())


def test_a_source_that_does_not_run_as_it_is_runs_dequantized(tmp_path: Path) -> None:
    released(tiny_models.llama(dtype=torch.bfloat16, gain=2.0), tmp_path, fp8_blocks, FP8)
    with pytest.raises(UserError, match="quantized by fp8; only modelopt and compressed-tensors run as they are, and"):
        quant.load(tmp_path)
    _, model = open_runnable(str(tmp_path))
    ids = torch.arange(8)[None]
    opened = open_model(tmp_path).model
    assert opened is not None and torch.equal(model(ids).logits, opened(ids).logits)
    golden = GOLDENS / "compressed_tensors" / "NVFP4A16"
    assert any(hasattr(module, "quantized_weight") for module in open_runnable(str(golden))[1].modules())
    config = json.loads((golden / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    shutil.copytree(golden, tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text(json.dumps(config))
    _, model = open_runnable(str(tmp_path / "odd"))
    assert not any(hasattr(module, "quantized_weight") for module in model.modules())


def test_a_plan_is_validated_against_a_quantized_source(tmp_path: Path) -> None:
    released(tiny_models.llama(dtype=torch.bfloat16), tmp_path / "fp8", fp8_blocks, FP8)
    make_plan(open_model(tmp_path / "fp8", meta=True).model, "fp8_channel").save(tmp_path / "plan.json")
    arguments = ["plan", "validate", str(tmp_path / "plan.json"), "--model", str(tmp_path / "fp8")]
    assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    fields = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(fields))
    refused = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert refused.exit_code == 2 and "weight_scale_inv belongs to a quantized weight" in refused.stderr
