"""Under tensor parallelism (two processes, gloo) layers train in low precision as on one process."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from children import run_ranks
from torch import nn

import quant
from quant.base.errors import UserError

RECIPES = ("fp8_block", "mxfp8", "fp8_tensorwise", "fp8_delayed")
X = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(7))


def _net(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128)).train()
    quant.to_low_precision_training(net, recipe, backend="emulated")
    return net


def _step(net: nn.Module) -> list[torch.Tensor]:
    """Output and gradients, whole, of the second of two steps."""
    for _ in range(2):
        net.zero_grad()
        x = X.clone().requires_grad_()
        y = net(x)
        y.square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    return [y.detach(), x.grad, *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients)]


def _joined(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for recipe in RECIPES:
        net = parallelize_module(_net(recipe), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        results = _step(net)
        if rank == 0:
            torch.save(results, f"{folder}/{recipe}")
    replicated = torch.distributed.tensor.distribute_module(_net("mxfp8"), mesh)
    with pytest.raises(UserError, match=r"0: its weight is a DTensor placed as \(Replicate\(\),\)"):
        replicated(X)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    run_ranks(_joined, (str(tmp_path),), 2)
    for recipe in RECIPES:
        for sharded, whole in zip(torch.load(tmp_path / recipe, weights_only=True), _step(_net(recipe)), strict=True):
            # A gradient that has one scale is scaled by each rank's own shard.
            bound = 2.0**-4 if recipe in ("fp8_tensorwise", "fp8_delayed") else 1e-5
            assert float((sharded - whole).norm() / whole.norm()) < bound, recipe
