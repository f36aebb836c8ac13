"""A checkpoint directory is whole or absent, sharded and hashed, with experts under the names of runtimes."""

import errno
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from quant.base import atomic
from quant.calibration.solvers.registry import get_solver
from quant.calibration.solvers.solve_group import solve_group
from quant.export.checkpoint.files.compressed_tensors import compress, quantization_config
from quant.export.checkpoint.files.directory import check_destination, new_directory
from quant.export.checkpoint.files.names import StoredNames
from quant.export.checkpoint.files.tensors import (
    TensorFiles,
    checkpoint_tensors,
    join_rows,
    layer_tensor_names,
    layer_weights,
    read_layer,
    split_rows,
    write_tensors,
)
from quant.export.checkpoint.open_checkpoint import plan_of_checkpoint
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import LayerPlan, Plan


def tensors() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.randn(10, 10) for i in range(5)}  # 400 bytes each


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
    )


# The directory


def test_the_directory_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    with new_directory(target, overwrite=False) as directory:
        (directory / "a.txt").write_text("a")
        assert directory.parent == target.parent and not target.exists()
    assert [p.name for p in target.iterdir()] == ["a.txt"]
    assert [p.name for p in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), RuntimeError()]
)
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_everything_as_it_was(tmp_path: Path, error: BaseException, existing: bool) -> None:
    target = tmp_path / "out" if existing else tmp_path / "new" / "parents" / "out"
    if existing:
        target.mkdir()
        (target / "plan.json").write_text("old")
    with pytest.raises(type(error)), new_directory(target, overwrite=True) as directory:  # noqa: PT012
        (directory / "half").write_text("h")
        raise error
    assert [p.name for p in tmp_path.rglob("*")] == (["out", "plan.json"] if existing else [])


def test_overwriting_replaces_the_whole_directory(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "old-00001-of-00002.safetensors").write_text("old")
    (target / "plan.json").write_text("old")
    with (
        pytest.raises(FileExistsError, match=r"out is not empty; pass overwrite=True"),
        new_directory(target, overwrite=False),
    ):
        raise AssertionError
    assert (target / "old-00001-of-00002.safetensors").read_text() == "old"
    with new_directory(target, overwrite=True) as directory:
        (directory / "new").write_text("new")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_what_was_there_comes_back_if_the_new_cannot_be_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "plan.json").write_text("old")
    rename = Path.rename

    def refuse(self: Path, to: Path) -> Path:
        if Path(self, "new").exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(atomic, "_exchange", lambda new, path: False)
    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output"), new_directory(target, overwrite=True) as directory:
        (directory / "new").write_text("new")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/plan.json"]


def test_only_what_we_wrote_is_replaced(tmp_path: Path) -> None:
    """`--out MODEL --overwrite` would delete the model that is being quantized, `--out ~` everything."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_text("weights")
    with pytest.raises(FileExistsError, match=r"model holds config.json and no plan.json or receipt.json, so it is"):
        check_destination(model, overwrite=True)
    (model / "plan.json").write_text("{}")
    check_destination(model, overwrite=True)


def test_what_cannot_be_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "..", str(tmp_path)):
        with pytest.raises(OSError, match="is the current directory or above it; name a directory in it"):
            check_destination(Path(place), overwrite=False)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(OSError, match="volume is a mount point"):
        check_destination(tmp_path / "volume", overwrite=False)
    check_destination(tmp_path / "volume" / "below", overwrite=False)


def test_a_place_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    check_destination(tmp_path / ("n" * 241), overwrite=False)
    for name in ("n" * 242, "é" * 121):  # of 255 bytes a temporary name needs 14
        with pytest.raises(OSError, match=rf"{tmp_path} takes no name that is as long .*; give a shorter one"):
            check_destination(tmp_path / name, overwrite=False)
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(OSError, match=rf"a/b: {tmp_path} cannot be written to \(Read-only file system\); choose"):
        check_destination(tmp_path / "a" / "b", overwrite=False)


def test_a_link_to_a_directory_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "plan.json").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with new_directory(tmp_path / "link", overwrite=True) as directory:
        (directory / "new").write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert [p.name for p in (tmp_path / "real").iterdir()] == ["new"]


def test_what_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "receipt.json").write_text("x")
    check_destination(tmp_path / "absent", overwrite=False)
    check_destination(tmp_path / "empty", overwrite=False)
    check_destination(tmp_path / "full", overwrite=True)
    with pytest.raises(FileExistsError, match="full is not empty"):
        check_destination(tmp_path / "full", overwrite=False)
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="file is a file; name a directory"):
            check_destination(tmp_path / "file", overwrite=overwrite)
        with pytest.raises(FileExistsError, match="file is a file; name a directory"):
            check_destination(tmp_path / "file" / "below" / "it", overwrite=overwrite)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_what_the_umask_lets_them(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with new_directory(tmp_path / "out", overwrite=False) as directory:
            write_tensors(directory, tensors())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o666 & ~mask


# The weight files


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    expected = tensors()
    hashes = write_tensors(tmp_path, expected)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"] == list(hashes)
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == expected.keys() and all(same(loaded[k], expected[k]) for k in expected)
    assert hashes["model.safetensors"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("limit", "shards"), [(2000, [5]), (1999, [4, 1]), (800, [2, 2, 1]), (1, [1] * 5)])
def test_shards_stay_below_the_limit_and_the_index_finds_all(tmp_path: Path, limit: int, shards: list[int]) -> None:
    expected = tensors()
    hashes = write_tensors(tmp_path, expected, shard_bytes=limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [len(load_file(f)) for f in files] == shards
    assert hashes == {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    read = TensorFiles(tmp_path)
    assert set(read) == set(expected) and len(read) == 5
    assert all(same(read[k], expected[k]) for k in expected)
    if len(shards) > 1:
        count = len(shards)
        assert [f.name for f in files] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 2000
        assert {k: set(load_file(tmp_path / f)) >= {k} for k, f in index["weight_map"].items()} == dict.fromkeys(
            expected, True
        )


@pytest.mark.parametrize(
    ("least", "most", "shards"), [(0, 9000, [2] * 8), (0, 400, [1] * 16), (2000, 9000, [5, 5, 5, 1])]
)
def test_by_default_a_shard_has_an_eighth_of_the_bytes_within_limits(
    tmp_path: Path, least: int, most: int, shards: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quant.export.checkpoint.files.tensors._LEAST_SHARD_BYTES", least)
    monkeypatch.setattr("quant.export.checkpoint.files.tensors.SHARD_BYTES", most)
    write_tensors(tmp_path, {f"layer.{i:02}.weight": torch.randn(10, 10) for i in range(16)})
    assert [len(load_file(file)) for file in sorted(tmp_path.glob("*.safetensors"))] == shards


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from quant.export.checkpoint.files.tensors import write_tensors
from quant.export.checkpoint.files.directory import new_directory
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with new_directory(Path(sys.argv[1]), overwrite=False) as directory:
        write_tensors(directory, {"a": torch.zeros(10000)})
except OSError as error:
    print(type(error).__name__, error)
"""


def test_a_file_that_cannot_be_written_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A real failed write, by a limit on file sizes: the safetensors library has an exception of its own."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert re.match(rf"OSError {tmp_path}/out cannot be written: .*File too large", done.stdout), done
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_weights_or_with_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.safetensors file"):
        TensorFiles(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    for damaged in (b"", whole[:-8], whole[:20], b"x" * 100):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors: truncated or damaged"):
            TensorFiles(tmp_path)


# The tensors of a model


def test_tied_weights_are_stored_once_and_views_apart() -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(20, 32), nn.Linear(32, 20, bias=False)
    model.head.weight = model.embed.weight
    model.linear = QuantLinear(quantize(torch.randn(16, 32), FORMATS["nvfp4"]), torch.randn(16))
    whole = torch.randn(8, 4)
    model.register_buffer("whole", whole)
    model.register_buffer("front", whole[:2])
    found, _ = checkpoint_tensors(model, torch.float32, StoredNames(), None, ())
    assert set(found) == {
        "embed.weight",
        "linear.bias",
        "linear.weight_packed",
        "linear.weight_scale",
        "linear.weight_global_scale",
        "whole",
        "front",
    }
    assert torch.equal(found["front"], whole[:2]) and torch.equal(found["embed.weight"], model.embed.weight)
    assert torch.equal(found["linear.bias"], model.linear.bias)


@pytest.mark.parametrize(
    "format", ["nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8", "int4"]
)
def test_experts_are_stored_one_by_one_and_read_back(format: str) -> None:
    stack = torch.randn(3, 256, 128)
    names = ("block.experts.gate_up_proj", "block.experts.down_proj")
    model, layers = nn.Module(), []
    model.block = nn.Module()
    model.block.experts = nn.Module()
    for name in names:
        weight = solve_group({name: stack}, {}, FORMATS[format], get_solver("rtn"))[name]
        setattr(model.block.experts, name.rpartition(".")[2], QuantExperts(weight))
        layers.append(LayerPlan(name, LayerKind.EXPERTS, (3, 256, 128), FORMATS[format]))
    stored, _ = checkpoint_tensors(model, torch.float32, StoredNames(), None, ())
    packed = "weight_packed" if FORMATS[format].element.bits < 8 else "weight"
    assert {n for n in stored if n.endswith(f".{packed}")} == {
        f"block.experts.{i}.{part}.{packed}" for i in range(3) for part in ("gate_proj", "up_proj", "down_proj")
    }
    assert stored[f"block.experts.1.up_proj.{packed}"].shape[0] == 128
    for layer in layers:
        original = getattr(model.block.experts, layer.name.rpartition(".")[2]).quantized_weight
        back, input_scale = read_layer(stored, layer)
        assert input_scale is None and back.shape == original.shape
        assert same(back.codes, original.codes) and same(back.scale, original.scale)
        assert torch.equal(back.dequantize(torch.float64), original.dequantize(torch.float64))
        assert len(layer_tensor_names(stored, layer)) * 3 in (len(stored), 2 * len(stored))
    up = layer_weights(names[0], original)["block.experts.2.up_proj"]
    assert torch.equal(up.dequantize(), original.dequantize()[2, 128:])


def test_a_cut_through_a_block_is_refused() -> None:
    weight = quantize(torch.randn(128, 128), FORMATS["fp8_block"])
    with pytest.raises(ValueError, match="cannot split 128 rows of fp8_block into 2: a block would be cut"):
        split_rows(weight, 2)


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_halves_of_different_scale_are_not_joined(format: str) -> None:
    """As another toolkit may write gate and up: one scale cannot stand for both."""
    halves = [quantize(torch.randn(16, 32) * s, FORMATS[format]) for s in (1, 5)]
    with pytest.raises(ValueError, match=f"cannot join 2 matrices of {format}: their per-matrix scales differ"):
        join_rows(halves)
    assert torch.equal(join_rows([halves[0]] * 2).dequantize(), torch.cat([halves[0].dequantize()] * 2))


def test_tensor_names_of_a_layer() -> None:
    names = dict.fromkeys(["a.b.weight_packed", "a.b.weight_scale", "a.b.bias", "a.bc.weight", "axb.weight", "a.b.c.w"])
    assert layer_tensor_names(names, LayerPlan("a.b", LayerKind.LINEAR, (1, 1))) == list(names)[:2]
    parts = ["e.0.gate_proj.weight", "e.10.up_proj.weight_scale", "e.0.down_proj.weight", "e.x.up_proj.weight"]
    experts = dict.fromkeys(parts)
    assert layer_tensor_names(experts, LayerPlan("e.gate_up_proj", LayerKind.EXPERTS, (11, 2, 1))) == parts[:2]
    assert layer_tensor_names(experts, LayerPlan("e.down_proj", LayerKind.EXPERTS, (11, 1, 1))) == parts[2:3]


def test_a_missing_tensor_names_layer_and_format() -> None:
    stored = {
        f"a.{k}": v for k, v in compress(quantize(torch.randn(16, 32), FORMATS["nvfp4"]), None, torch.float32).items()
    }
    del stored["a.weight_scale"]
    with pytest.raises(ValueError, match=r"a\.weight_scale is missing; nvfp4 with inputs in 16 bit has it"):
        read_layer(stored, LayerPlan("a", LayerKind.LINEAR, (16, 32), FORMATS["nvfp4"]))


# Foreign configs


def test_the_plan_of_a_config_is_the_plan_behind_it() -> None:
    pairs = {"m.0.up": ("nvfp4", None), "m.1.up": ("fp8_channel", "fp8_token"), "m.2.up": (None, None)}
    layers = [
        LayerPlan(n, LayerKind.LINEAR, (64, 64), FORMATS[w] if w else None, FORMATS[a] if a else None)
        for n, (w, a) in pairs.items()
    ]
    config = quantization_config(Plan(tuple(layers)))
    found = plan_of_checkpoint(Path("out"), [Layer(name, LayerKind.LINEAR, (64, 64)) for name in pairs], config, {})
    assert [(x.name, x.weight, x.activation) for x in found.layers] == [
        (x.name, x.weight, x.activation) for x in layers
    ]
    assert all(layer.reason == "as out was written" for layer in found.layers)


def test_patterns_in_targets_and_ignore() -> None:
    group = quantization_config(Plan((LayerPlan("x", LayerKind.LINEAR, (64, 64), FORMATS["mxfp8"]),)))["config_groups"][
        "group_0"
    ]
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {**group, "targets": ["re:.*proj$"]}},
        "ignore": ["re:.*\\.1\\..*", "m.2.a_proj"],
    }
    names = ["m.0.a_proj", "m.1.a_proj", "m.2.a_proj", "m.2.b_proj", "m.0.other", "lm_head"]
    found = plan_of_checkpoint(Path("out"), [Layer(name, LayerKind.LINEAR, (64, 64)) for name in names], config, {})
    assert [layer.name for layer in found.quantized] == ["m.0.a_proj", "m.2.b_proj"]
