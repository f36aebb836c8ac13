"""Ring attention on two and four processes over gloo agrees with one process over the same quantized keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from children import run_ranks
from interpreter import interpreted

from quant.formats.format import FORMATS
from quant.kernels.attention.kv_pages import round_kv
from quant.kernels.attention.reference import reference
from quant.kernels.attention.ring import (
    _append,
    _Message,
    _work,
    message_bytes,
    quantize_blocks,
    ring_attention,
    shard,
    unshard,
)

WORLDS = (2, 3, 4)
FORMAT_NAMES = (None, "fp8", "nvfp4")
# Pieces of 24 tokens over four ranks, of 48 over two; one of 150, longer than a block of scales.
SHAPES = ((2, 4, 2, 192, 32), (1, 2, 1, 600, 64))


def operands(shape: tuple[int, ...]) -> list[torch.Tensor]:
    """q, k and v of the whole sequence, one head much larger than the others."""
    batch, heads, kv_heads, tokens, dim = shape
    made = torch.Generator().manual_seed(sum(shape))
    found = [torch.randn(batch, n, tokens, dim, generator=made) for n in (heads, kv_heads, kv_heads)]
    found[1][:, 0] *= 3
    return found


def cases(world: int) -> list[tuple[tuple[int, ...], str | None, bool]]:
    return [
        (shape, name, causal)
        for shape in SHAPES
        if shape[3] % (2 * world) == 0
        for name in FORMAT_NAMES
        for causal in (True, False)
    ]


def of_a_rank(rank: int, folder: str) -> None:
    """What each of four processes does: all cases in each group that it is in; then a mistake."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=max(WORLDS))
    results: dict[Any, torch.Tensor] = {}
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if rank >= world:
            continue
        for shape, name, causal in cases(world):
            mine = [shard(x, rank, world) for x in operands(shape)]
            results[world, shape, name, causal] = ring_attention(
                *mine, format=FORMATS[name] if name else None, causal=causal, group=group, softmax_scale=0.2
            )
    torch.save(results, f"{folder}/rank{rank}.pt")
    try:
        ring_attention(*torch.zeros(3, 1, 2, 8 + 2 * (rank == 2), 16))
    except ValueError as error:
        Path(folder, f"error{rank}").write_text(str(error), encoding="utf-8")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[Any, torch.Tensor]], list[str]]:
    folder = tmp_path_factory.mktemp("ring")
    run_ranks(of_a_rank, (str(folder),), max(WORLDS))
    ranks = range(max(WORLDS))
    return [torch.load(folder / f"rank{r}.pt") for r in ranks], [(folder / f"error{r}").read_text() for r in ranks]


def rounded(x: torch.Tensor, name: str | None, world: int) -> torch.Tensor:
    """K or V of the whole sequence as its pieces are quantized, each piece for itself; float64."""
    if name is None:
        return x.double()
    pieces = []
    for piece in x.chunk(2 * world, 2):
        if name == "fp8":
            codes, scale = quantize_blocks(piece)
            pieces.append(codes.double() * scale.double().repeat_interleave(128, 2)[:, :, : piece.shape[2], None])
        else:
            amax = piece.abs().amax((2, 3))
            power = torch.exp2(torch.ceil(torch.log2(amax / (6 * 448))))
            rows = [round_kv(x, FORMATS["nvfp4"], scale) for x, scale in zip(piece, power, strict=True)]
            pieces.append(torch.stack(rows).double())
    return torch.cat(pieces, 2)


@pytest.mark.parametrize("world", WORLDS)
def test_the_ring_gives_what_one_process_gives(world: int, results: Any) -> None:
    """To the rounding of float32: the keys and values are the same, and so is everything done with them."""
    for shape, name, causal in cases(world):
        q, k, v = operands(shape)
        got = unshard([results[0][rank][world, shape, name, causal] for rank in range(world)])
        # Under FP8 the queries are E4M3, too, piece by piece like the keys.
        query = rounded(q, "fp8" if name == "fp8" else None, world)
        expected = reference(
            query, rounded(k, name, world), rounded(v, name, world), causal=causal, softmax_scale=0.2,
            dtype=torch.float64, compute=torch.float64, round_p=False,
        )[0]  # fmt: skip
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_shards_go_together_again(world: int) -> None:
    x = torch.arange(2 * 48 * 3).view(2, 1, 48, 3)
    parts = [shard(x, rank, world) for rank in range(world)]
    assert torch.equal(unshard(parts), x)
    assert torch.equal(parts[0][:, :, : 24 // world], x[:, :, : 24 // world])
    assert torch.equal(parts[0][:, :, 24 // world :], x[:, :, 48 - 24 // world :])


@pytest.mark.parametrize("world", [2, 4, 7])
def test_every_rank_has_the_same_work_at_every_step(world: int) -> None:
    """In products of pieces, half a one under the mask; and together they cover every pair once."""
    covered = torch.zeros(2 * world, 2 * world)
    for rank in range(world):
        mine = (rank, 2 * world - 1 - rank)
        for step in range(world):
            owner = (rank - step) % world
            work = 0.0
            for rows, piece, masked in _work(rank, owner, causal=True):
                for row in mine if rows == 2 else mine[rows : rows + 1]:
                    covered[row, (owner, 2 * world - 1 - owner)[piece]] += 0.5 if masked else 1
                    work += 0.5 if masked else 1
            assert work == 2
    expected = torch.ones(2 * world, 2 * world).tril() - torch.eye(2 * world) / 2
    assert torch.equal(covered, expected)


def test_quantized_messages_are_small() -> None:
    k = torch.empty(1, 8, 4096, 128, dtype=torch.bfloat16, device="meta")
    whole = message_bytes(k, None)
    assert whole == 2 * 2 * k.numel()
    assert message_bytes(k, FORMATS["fp8"]) == 2 * (k.numel() + 8 * 32 * 4)
    assert message_bytes(k, FORMATS["fp8"]) < 0.51 * whole
    assert message_bytes(k, FORMATS["nvfp4"]) < 0.282 * whole


@pytest.mark.parametrize("dim", [32, 96])
def test_what_a_gpu_passes_on_is_what_a_cpu_does(dim: int) -> None:
    """NVFP4 by the kernels, interpreted: the same bytes, and the same values back."""
    from quant.kernels.attention.portable_paged_kv_cache import read_nvfp4_kv

    nvfp4 = FORMATS["nvfp4"]
    k, v = (torch.randn(2, 3, 40, dim) * torch.logspace(-3, 1, 40)[:, None] for _ in "kv")
    k[:, 0] *= 30
    k, v = k.bfloat16(), v.bfloat16()
    message = _Message.of(k, nvfp4)
    expected, got = torch.zeros(2, message.nbytes, dtype=torch.uint8)
    message.write(expected, k, v)
    with interpreted():
        for piece, pair in enumerate(zip(k.chunk(2, 2), v.chunk(2, 2), strict=True)):
            _append([view[piece] for view in message.views(got)], pair, nvfp4)
        assert torch.equal(got, expected)
        for piece in range(2):
            keys, values, _, _ = message.read(expected, piece, torch.bfloat16)
            k_codes, k_blocks, k_scale, v_codes, v_blocks, v_scale = (view[piece] for view in message.views(got))
            assert torch.equal(read_nvfp4_kv(k_codes, k_blocks, k_scale, torch.bfloat16), keys)
            assert torch.equal(read_nvfp4_kv(v_codes, v_blocks, v_scale, torch.bfloat16), values)


def test_ranks_that_differ_are_named(results: Any) -> None:
    for rank, message in enumerate(results[1]):
        assert f"rank {rank} of 4" in message and "all ranks need the same" in message
        assert f"rank {0 if rank == 2 else 2} has" in message


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_rank_and_bad_input() -> None:
    q, k, v = operands(SHAPES[0])
    expected = reference(q, k, v, causal=True, dtype=torch.float32, round_p=False)[0]
    torch.testing.assert_close(ring_attention(q, k, v), expected, rtol=1e-4, atol=1e-5)
    for given, options, message in (
        ((q, k[:, :, :-2], v[:, :, :-2]), {}, "expected q .batch, heads, tokens, dim"),
        ((q[:, :, 1:], k[:, :, 1:], v[:, :, 1:]), {}, "191 tokens; each rank has an early and a late piece"),
        ((q[:, :3], k, v), {}, "2 KV heads do not divide 3 heads"),
        ((q, k, v.half()), {}, "expected one dtype on one device"),
        ((q, k, v), {"format": FORMATS["mxfp8"]}, "mxfp8 is not passed on; known: fp8, nvfp4"),
        (
            (q[..., :24], k[..., :24], v[..., :24]),
            {"format": FORMATS["nvfp4"]},
            "24 is not a multiple of NVFP4's block",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ring_attention(*given, **options)
    with pytest.raises(ValueError, match="90 tokens over 4 ranks; pad them to a multiple of 8"):
        shard(q[:, :, :90], 0, 4)
    with pytest.raises(ValueError, match="rank 4 of 4"):
        shard(q, 4, 4)


def of_a_gpu(rank: int, world: int, folder: str) -> None:
    """The same cases on one GPU of several, in BF16, at head dimensions that the kernels take."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    results = {}
    for name in FORMAT_NAMES:
        for causal in (True, False):
            mine = [shard(x.cuda().bfloat16(), rank, world) for x in operands((1, 8, 2, 256 * world + 8 * world, 64))]
            results[name, causal] = ring_attention(
                *mine, format=FORMATS[name] if name else None, causal=causal, softmax_scale=0.1
            ).cpu()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_gpus_give_what_float64_gives(tmp_path: Path) -> None:
    """BF16 outputs of the parts; under FP8 the probabilities are E4M3, too (2.6e-2 for independent values)."""
    world = min(torch.cuda.device_count(), 4)
    run_ranks(of_a_gpu, (world, str(tmp_path)), world)
    found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(world)]
    q, k, v = (x.bfloat16().float() for x in operands((1, 8, 2, 256 * world + 8 * world, 64)))
    for name, causal in found[0]:
        got = unshard([each[name, causal] for each in found]).double()
        expected = reference(
            rounded(q, "fp8" if name == "fp8" else None, world), rounded(k, name, world), rounded(v, name, world),
            causal=causal, softmax_scale=0.1, dtype=torch.float64, compute=torch.float64, round_p=False,
        )[0]  # fmt: skip
        assert float((got - expected).norm() / expected.norm()) < (0.04 if name == "fp8" else 2.0**-7)
