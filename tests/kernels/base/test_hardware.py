"""These tests check facts about GPUs and the launches that are chosen from them."""

import json
from types import SimpleNamespace

import pytest
import torch

from quant.base.errors import UserError
from quant.formats.format import FORMATS
from quant.kernels.base import hardware
from quant.kernels.linear import tiles
from quant.kernels.linear import tiles as launch_table
from quant.kernels.linear.tiles import MeasuredChoice, key
from quant.recipes.gpus import GPUS

# Compute capability, and the formats that tensor cores take, from NVIDIA's CUDA documentation.
CAPABILITIES = {
    (7, 5): "t4", (8, 0): "a100", (8, 6): "a10 rtx3090", (8, 7): "orin", (8, 9): "l40s l4 rtx4090", (9, 0): "h100 h200",
    (10, 0): "b200 gb200", (10, 3): "b300 gb300", (10, 7): "rubin", (11, 0): "thor",
    (12, 0): "rtx5090 rtx5080 rtx5070 rtxpro6000", (12, 1): "dgx-spark",
}  # fmt: skip
# Boost clock in MHz, and 16-bit operations of a multiprocessor in a cycle, from the white papers.
CLOCKS = {
    "t4": (1590, 1024), "a100": (1410, 2048), "a10": (1695, 1024), "rtx3090": (1695, 512), "orin": (1300, 2048),
    "l40s": (2520, 1024), "l4": (2040, 1024), "rtx4090": (2520, 512), "h100": (1830, 4096), "h200": (1830, 4096),
    "b200": (1850, 8192), "thor": (1575, 8192), "rtx5090": (2407, 512), "rtx5080": (2617, 512), "rtx5070": (2512, 512),
    "rtxpro6000": (2617, 1024),
}  # fmt: skip


def test_targets_and_their_formats() -> None:
    assert {name: gpu.capability for name, gpu in GPUS.items()} == {
        name: capability for capability, names in CAPABILITIES.items() for name in names.split()
    }
    for gpu in GPUS.values():
        fp8 = {"fp8"} if gpu.capability >= (8, 9) else set()
        assert set(gpu.native_formats) == {"int8"} | fp8 | (
            {"mxfp8", "mxfp6", "mxfp4", "nvfp4"} if gpu.capability >= (10, 0) else set()
        )
    for name, (clock, operations) in CLOCKS.items():
        assert GPUS[name].tflops["bf16"] == pytest.approx(GPUS[name].sms * clock * operations / 1e6, rel=0.02), name
    assert [name for name, gpu in GPUS.items() if gpu.has_wgmma] == ["h100", "h200"]
    for gpu in GPUS.values():
        assert ("fp8" in gpu.tflops) == gpu.has_fp8 and ("fp4" in gpu.tflops) == gpu.has_block_scales


@pytest.mark.parametrize(
    ("driver_name", "capability", "name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100", True),
        ("NVIDIA H200", (9, 0), "h200", True),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx5090", True),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "rtxpro6000", True),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "a100", True),
        ("NVIDIA L4", (8, 9), "l4", True),
        ("NVIDIA GB10", (12, 1), "dgx-spark", True),
        ("NVIDIA GeForce RTX 5070 Ti", (12, 0), "NVIDIA GeForce RTX 5070 Ti", False),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), "NVIDIA GeForce RTX 5090 Laptop GPU", False),
        ("Orin", (8, 7), "Orin", False),  # of 77 multiprocessors, which no AGX Orin has
        ("NVIDIA GH200 480GB", (9, 0), "NVIDIA GH200 480GB", False),
    ],
)
def test_the_gpu_at_hand_is_recognised(
    monkeypatch: pytest.MonkeyPatch, driver_name: str, capability: tuple[int, int], name: str, known: bool
) -> None:
    seen = SimpleNamespace(
        name=driver_name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=77,
        L2_cache_size=5 << 20,
        total_memory=7 << 30,
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    hardware.current.cache_clear()
    gpu = hardware.current()
    hardware.current.cache_clear()
    assert (gpu.name, gpu.known, gpu.capability) == (name, known, capability)
    assert (gpu.sms, gpu.l2, gpu.memory) == (77, 5 << 20, 7 << 30)


def test_without_a_gpu_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    hardware.current.cache_clear()
    with pytest.raises(ValueError, match=r"there is no GPU cuda:0 on this machine; PyTorch sees 0"):
        hardware.current()


def test_launches_are_what_json_says_they_are() -> None:
    few, many = tiles.GluonTiles(8, 4), tiles.PrefillTiles(128, 2, 132)
    for choice in (tiles.Tiles(16, 64, 128, 4, True, 8, 2), few, many, tiles.DENSE):
        assert tiles.from_dict(tiles.to_dict(choice)) == choice


@pytest.mark.parametrize(("tokens", "stands_for"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (9999, 4096)])
def test_buckets_of_tokens(tokens: int, stands_for: int) -> None:
    assert tiles.bucket(tokens) == stands_for


def test_a_measured_launch_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))
    launch_table._table.cache_clear()
    gpu, form, shape = GPUS["l40s"], FORMATS["mxfp8"], (1234, 512)
    assert launch_table.look_up(gpu, form, 5, shape, prepacked=False) is None
    best = tiles.Tiles(16, 32, 128, 2)
    path = launch_table.store(gpu, {key(form, 8, shape, prepacked=False): MeasuredChoice(best, 12.5, 0.001)})
    assert path.parent == tmp_path
    assert launch_table.look_up(gpu, form, 5, shape, prepacked=False) == best
    assert launch_table.look_up(gpu, form, 1, shape, prepacked=False) == best
    assert launch_table.look_up(gpu, form, 9, shape, prepacked=False) is None
    assert launch_table.look_up(gpu, form, 5, shape, prepacked=True) is None
    launch_table.store(gpu, {key(form, 128, shape, prepacked=False): MeasuredChoice(tiles.DENSE, 9.0, 0.0)})
    assert launch_table.look_up(gpu, form, 65, shape, prepacked=False) == tiles.DENSE
    assert launch_table.look_up(gpu, form, 64, shape, prepacked=False) is None  # few tokens are another case
    launch_table.store(gpu, {key(form, 16, shape, prepacked=False): MeasuredChoice(tiles.DENSE, 3.0, 0.0)})
    assert launch_table.look_up(gpu, form, 9, shape, prepacked=False) == tiles.DENSE
    assert launch_table.look_up(gpu, form, 5, shape, prepacked=False) == best
    launch_table._table.cache_clear()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 16, 17, 32])
def test_a_guess_for_few_tokens_covers_the_shape(format: str, tokens: int) -> None:
    for shape in ((28672, 4096), (77, 203), (64, 64)):
        found = tiles.guess(FORMATS[format], tokens, shape, GPUS["h100"], prepacked=False)
        assert isinstance(found, tiles.Tiles) and found.block_m >= tokens
        assert found.splits == 1 or -(-shape[1] // found.block_k) >= 2 * found.splits
        # A tile of scales must be whole: the step holds whole blocks, or a block whole steps.
        columns = FORMATS[format].block[1]
        assert columns == 0 or found.block_k % columns == 0 or columns % found.block_k == 0


def test_the_shipped_tables_can_be_launched() -> None:
    """Every entry names a format and a shape, and a launch that the kernels take for it."""
    files = sorted(launch_table._SHIPPED.glob("*.json"))
    assert [path.stem for path in files] == ["h100", "h200"]
    for path in files:
        gpu = GPUS[path.stem]
        entries = json.loads(path.read_text())["entries"]
        assert len(entries) >= 20
        for name, entry in entries.items():
            format, layout, tokens, rows, columns = name.split("|")
            choice, shape = tiles.from_dict(entry["choice"]), (int(rows), int(columns))
            assert isinstance(choice, tiles.Tiles | tiles.GluonTiles | tiles.PrefillTiles | tiles.Dense)
            assert isinstance(choice, tiles.GluonTiles | tiles.PrefillTiles) <= (layout == "prepacked")
            assert choice in tiles.candidates(FORMATS[format], int(tokens), shape, gpu, layout == "prepacked")
            # No peer of the entry reads more than the memory delivers.
            assert FORMATS[format].nbytes(shape) / entry["microseconds"] * 1e6 < gpu.bandwidth


def test_the_guess_is_what_was_fastest_when_measured_on_an_h100() -> None:
    """The kernel and the tokens of its tile, for every shape of the shipped table; only the rest is left to tuning."""
    entries = json.loads((launch_table._SHIPPED / "h100.json").read_text())["entries"]
    for name, entry in entries.items():
        format, layout, tokens, rows, columns = name.split("|")
        shape, fastest = (int(rows), int(columns)), tiles.from_dict(entry["choice"])
        found = tiles.guess(FORMATS[format], int(tokens), shape, GPUS["h100"], layout == "prepacked")
        assert type(found) is type(fastest), name
        assert getattr(found, "block_m", None) == getattr(fastest, "block_m", None), name


def test_a_power_mode_slows_tensor_cores_and_memory() -> None:
    orin = GPUS["orin"]
    slow = orin.at_power(30)
    assert slow.tflops["int8"] == pytest.approx(85 * (8 * 612) / (16 * 1300))
    assert slow.bandwidth == orin.bandwidth and orin.at_power(15).bandwidth == pytest.approx(
        204.8e9 * 2133 / 3200, rel=1e-3
    )
    for name in ("h100", "thor"):
        with pytest.raises(
            UserError, match=f'^power="300W": no power mode of {name} is known here, but of orin; leave it out$'
        ):
            GPUS[name].at_power(300)
    with pytest.raises(UserError, match="orin has modes of 15 W, 30 W, 50 W"):
        orin.at_power(40)
