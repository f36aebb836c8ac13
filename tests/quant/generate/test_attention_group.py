"""A model on shares of a text in two processes gives the logits of float64 attention over the whole text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

pytest.importorskip("transformers")

import tiny_models

from quant.base.errors import UserError
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.attention.ring import shard, unshard

WORLD, TOKENS = 2, 64
IDS = torch.randint(3, 64, (2, TOKENS), generator=torch.Generator().manual_seed(0))
# By attention and KV cache: the relative error of the logits, at least and at most.
CASES = {
    (None, None): (0.0, 1e-5),
    ("fp8", None): (1e-3, 0.1),
    ("fp8", "fp8"): (1e-3, 0.1),
    (None, "nvfp4"): (1e-3, 0.2),
}


def tiny(**fields: Any) -> Any:
    return tiny_models.build("Llama", "ForCausalLM", {**tiny_models.DECODER, "head_dim": 16}, **fields)


def of_a_rank(rank: int, model: Any, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    given = {"position_ids": shard(torch.arange(TOKENS)[None], rank, WORLD, dim=1), "use_cache": False}
    found = {}
    for attention, kv_cache in CASES:
        with torch.no_grad(), quantized_attention(model, attention=attention, kv_cache=kv_cache, group=group):
            found[attention, kv_cache] = model(shard(IDS, rank, WORLD, dim=1), **given).logits
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_logits_are_those_of_the_whole_text(tmp_path: Any) -> None:
    model = tiny()
    torch.multiprocessing.start_processes(of_a_rank, (model, str(tmp_path)), nprocs=WORLD, start_method="fork")
    parts = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(WORLD)]
    model.double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS).logits
    for case, (least, most) in CASES.items():
        got = unshard([part[case] for part in parts], dim=1).double()
        error = float((got - expected).norm() / expected.norm())
        assert least <= error <= most, (case, error)


@pytest.fixture
def group(tmp_path: Any) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_what_a_group_does_not_compute_is_one_line(group: Any) -> None:
    model = tiny()
    before = model.config._attn_implementation
    for attention, kv_cache in (("fp8", "nvfp4"), ("16bit", "fp8")):
        with (
            pytest.raises(UserError, match=f"in {attention} over a group takes no KV cache in {kv_cache}"),
            quantized_attention(model, attention=attention, kv_cache=kv_cache, group=group),
        ):
            pass
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with pytest.raises(UserError, match="over a group takes no padding"), quantized_attention(model, group=group):
        model(IDS, attention_mask=mask)
    windows = tiny_models.build("Mistral", "ForCausalLM", {**tiny_models.DECODER, "head_dim": 16}, sliding_window=16)
    with pytest.raises(UserError, match="has a sliding window, which"), quantized_attention(windows, group=group):
        windows(IDS)
    with quantized_attention(windows, group=group), torch.no_grad():
        near = windows(IDS[:, :16]).logits  # every token is in the window
    torch.testing.assert_close(near, windows(IDS[:, :16]).logits, rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == before
