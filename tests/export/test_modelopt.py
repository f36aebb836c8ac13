"""ModelOpt's layout: the peer's own files to the bit, both ways, and what it cannot say refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

import quant
from quant.checkpoint import convert
from quant.cli import main
from quant.export import modelopt

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
BASE = GOLDENS / "base"
# The golden NVFP4 has an NVFP4 KV cache too, which compressed-tensors cannot say; W4A8 has blocks of 32.
MODELOPT = ["fp8", "fp8blk", "fp8pcpt", "mixed", "mxfp4", "mxfp8", "w4a16"]
COMPRESSED = ["FP8", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4", "MXFP8", "NVFP4", "NVFP4A16"]
PRESETS = {"nvfp4": "nvfp4", "w4a16": "nvfp4a16", "fp8": "fp8", "fp8pcpt": "fp8_channel", "mxfp8": "mxfp8"}
IDS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def differing(one: Path, other: Path) -> list[str]:
    ours, theirs = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    return [n for n in ours.keys() | theirs.keys() if n not in ours or n not in theirs or not same(ours[n], theirs[n])]


def fields(directory: Path, file: str = "config.json") -> Any:
    return json.loads((directory / file).read_text())


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


@pytest.fixture
def quantized(tmp_path: Path) -> Callable[..., Path]:
    """The golden model quantized, in our own layout."""

    def make(recipe: Any, **options: Any) -> Path:
        model = quant.open_model(BASE).model
        plan = quant.make_plan(model, recipe, **options)
        done = quant.quantize(model, plan, IDS)
        quant.save(done.model, done.plan, tmp_path / "ours")
        return tmp_path / "ours"

    return make


# The goldens


@pytest.mark.parametrize(("golden", "preset"), PRESETS.items())
def test_the_whole_path_reproduces_the_golden_checkpoint(
    golden: str, preset: str, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    """Quantized here, saved as compressed-tensors, converted: the peer's bytes but for what its text calibrated."""
    convert(quantized(preset, solver="modelopt"), tmp_path / "out", "modelopt")
    theirs = load_file(GOLDENS / "modelopt" / golden / "model.safetensors")
    ours = load_file(tmp_path / "out" / "model.safetensors")
    caches = (".k_scale", ".v_scale")  # the presets have no KV cache
    assert ours.keys() == {name for name in theirs if not name.endswith(caches)}
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert name.endswith(".input_scale") or same(tensor, theirs[name]), name
    config, whole = fields(GOLDENS / "modelopt" / golden), fields(GOLDENS / "modelopt" / golden, modelopt.CONFIG_FILE)
    config["quantization_config"].pop("kv_cache_scheme", None)
    whole["quantization"]["kv_cache_quant_algo"] = None
    assert fields(tmp_path / "out", modelopt.CONFIG_FILE) == whole
    found = fields(tmp_path / "out")
    del found["transformers_version"], config["transformers_version"]  # of the library that wrote it
    assert found == config


@pytest.mark.parametrize(
    ("layout", "golden"),
    [*(("modelopt", name) for name in MODELOPT), *(("compressed_tensors", name) for name in COMPRESSED)],
)
def test_a_peers_checkpoint_comes_back_to_the_bit(layout: str, golden: str, tmp_path: Path) -> None:
    source = GOLDENS / layout / golden
    kinds = [layout.replace("_", "-"), "modelopt" if layout == "compressed_tensors" else "compressed-tensors"]
    assert export(source, "--to", kinds[1], "--out", tmp_path / "other", "--quiet").exit_code == 0
    assert fields(tmp_path / "other")["quantization_config"]["quant_method"] == kinds[1]
    assert export(tmp_path / "other", "--to", kinds[0], "--out", tmp_path / "back", "--quiet").exit_code == 0
    assert differing(source, tmp_path / "back") == []
    assert fields(tmp_path / "back") == fields(source)
    if layout == "modelopt":
        assert fields(tmp_path / "back", modelopt.CONFIG_FILE) == fields(source, modelopt.CONFIG_FILE)
    for file in (tmp_path / "other", tmp_path / "back"):
        wide = [n for n, t in load_file(file / "model.safetensors").items() if t.dtype is torch.float64]
        assert not wide  # runtimes read float32


def test_an_nvfp4_kv_cache_is_read_and_written_in_its_own_layout_only(tmp_path: Path) -> None:
    source = GOLDENS / "modelopt" / "nvfp4"
    convert(source, tmp_path / "again", "modelopt")
    assert differing(source, tmp_path / "again") == []
    assert fields(tmp_path / "again", modelopt.CONFIG_FILE) == fields(source, modelopt.CONFIG_FILE)
    with pytest.raises(ValueError, match="compressed-tensors layout cannot store a KV cache in nvfp4"):
        convert(source, tmp_path / "other", "compressed-tensors")
    assert [place.name for place in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize("golden", [*MODELOPT, "nvfp4"])
def test_loading_gives_the_values_of_the_peers_tensors(golden: str) -> None:
    """Dequantized here in float64 from the file's tensors as ModelOpt defines them."""
    tensors = load_file(GOLDENS / "modelopt" / golden / "model.safetensors")
    fp4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    model = quant.load(GOLDENS / "modelopt" / golden)
    layers = [(n, m) for n, m in model.named_modules() if hasattr(m, "quantized_weight")]
    assert len(layers) == 14
    for name, module in layers:
        codes, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        if codes.dtype is torch.uint8:
            values = fp4[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).int()]
        else:
            values = codes.double()
        step = torch.exp2(scale.double() - 127) if scale.dtype is torch.uint8 else scale.double()
        if f"{name}.weight_scale_2" in tensors:
            step = step * tensors[f"{name}.weight_scale_2"].double()
        if step.dim() == 1:
            step = step[:, None]
        elif step.dim() == 4:
            step = step[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
        elif step.dim() == 2:
            step = step.repeat_interleave(values.shape[1] // step.shape[1], 1)
        expected = values * step.float().double()
        assert torch.equal(module.dequantize(torch.float32), expected.float()), name
        if f"{name}.input_scale" in tensors:
            assert torch.equal(module.input_scale, tensors[f"{name}.input_scale"])
    with torch.no_grad():
        assert bool(torch.isfinite(model(IDS).logits).all())
    if golden in ("fp8", "nvfp4"):
        k_scale = tensors["model.layers.1.self_attn.k_proj.k_scale"]
        assert torch.equal(model.model.layers[1].self_attn.k_scale, k_scale)
