"""On two GPUs, FSDP2 and tensor parallelism train on FP8 tensor cores as one GPU does."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from children import run_ranks
from torch import nn

import quant
from quant.training.low_precision import native_fusions

pytestmark = pytest.mark.gpu
# Each rank's tokens are whole blocks of 128, by which dw is rounded.
ROWS = torch.randint(0, 64, (4, 128), generator=torch.Generator().manual_seed(7))
X = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(7))


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def _join(rank: int, folder: str) -> Any:
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("nccl", f"file://{folder}/meet", rank=rank, world_size=2, timeout=limit)
    return dist.device_mesh.init_device_mesh("cuda", (2,))


def _llama() -> Any:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    model = tiny_models.llama(**sizes, gain=2.0).cuda().train()
    quant.to_low_precision_training(model, "fp8_block", backend="native")
    return model


def _experts(recipe: str) -> Any:
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "moe_intermediate_size": 128}
    model = tiny_models.qwen3_moe(gain=2.0, **sizes).cuda().train()
    quant.to_low_precision_training(model, recipe, include=["*.experts.*"])
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "merged": _llama,
    "fp8_block experts": lambda: _experts("fp8_block"),
    "fp8_rowwise experts": lambda: _experts("fp8_rowwise"),
}


def _gradients(model: Any, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(input_ids=rows.cuda(), labels=rows.cuda()).loss
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items() if g is not None}
    return {"loss": loss.detach()} | whole


def _sharded(rank: int, folder: str) -> None:
    """One of two processes: gradients of its half of the rows under FSDP2; then the first takes all rows alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, calls = _join(rank, folder), []
    apply = native_fusions._MergedProducts.apply
    native_fusions._MergedProducts.apply = lambda *a: calls.append(len(a)) or apply(*a)  # type: ignore[assignment]
    for name, make in MODELS.items():
        model, policy = make(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        calls.clear()
        sharded = _gradients(model, ROWS[2 * rank : 2 * rank + 2])
        dist.all_reduce(sharded["loss"], dist.ReduceOp.AVG)
        merged = len(calls)
        whole = make()
        for parameter in whole.parameters():  # and no buffer, of which FSDP2 makes no copies either
            parameter.data = parameter.data.bfloat16()
        alone = _gradients(whole, ROWS)
        if rank == 0:
            torch.save({"sharded": sharded, "alone": alone, "merged": merged}, f"{folder}/{name}")
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp2_trains_merged_layers_and_experts_as_one_gpu_does(tmp_path: Path) -> None:
    run_ranks(_sharded, (str(tmp_path),), 2)
    off: dict[str, float] = {}
    for name in MODELS:
        results = torch.load(tmp_path / name, weights_only=True)
        assert results["merged"] == (2 if name == "merged" else 0)  # q, k and v of each layer
        assert results["sharded"].keys() == results["alone"].keys()
        # Sums in BF16 of other orders move values over ties of the rounding; in rows, each rank's tokens of an expert
        # have scales of their own.
        bound = 0.1 if name == "fp8_rowwise experts" else 0.03
        errors = {f"{name}: {k}": _relative(results["sharded"][k], w) for k, w in results["alone"].items()}
        off |= {key: error for key, error in errors.items() if not error < bound}
    assert not off


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.float() - expected.float()).norm() / expected.float().norm())


def _net(recipe: str, backend: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).bfloat16().cuda().train()
    quant.to_low_precision_training(net, recipe, backend=backend)
    return net


def _step(net: nn.Module) -> list[torch.Tensor]:
    x = X.bfloat16().cuda().requires_grad_()
    y = net(x)
    y.square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]  # type: ignore[union-attr]
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    return [y.detach(), x.grad, *whole]  # type: ignore[list-item]


WAYS = (
    ("fp8_block", "native"),
    ("fp8_rowwise", "native"),
    ("fp8_tensorwise", "torchao"),
    ("fp8_rowwise", "torchao"),
)


def _parallel(rank: int, folder: str, ways: tuple[tuple[str, str], ...]) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = _join(rank, folder)
    for recipe, backend in ways:
        net = parallelize_module(_net(recipe, backend), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sharded = _step(net)
        alone = _step(_net(recipe, backend))
        if rank == 0:
            torch.save([sharded, alone], f"{folder}/{recipe}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(("recipe", "backend"), WAYS)
def test_tensor_parallelism_multiplies_as_one_gpu_does(recipe: str, backend: str, tmp_path: Path) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao", reason="the extra torchao")
    run_ranks(_parallel, (str(tmp_path), ((recipe, backend),)), 2)
    sharded, alone = torch.load(tmp_path / recipe, weights_only=True)
    errors = [_relative(part, expected) for part, expected in zip(sharded, alone, strict=True)]
    # Rows and gradients that are divided are scaled by each rank's own shard.
    assert max(errors) < (0.03 if recipe == "fp8_block" else 2.0**-4), errors
    if recipe == "fp8_tensorwise":
        # One scale of x and of w for both ranks: only the sum of the two halves of y is rounded once more.
        assert errors[0] < 0.01
