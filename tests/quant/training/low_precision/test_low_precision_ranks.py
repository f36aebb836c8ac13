"""DDP and FSDP2 on two processes (gloo) train in low precision as one process does."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from children import run_ranks

import quant
from quant.training.low_precision.training_recipe import RECIPES

# 32 tokens a rank: a block of MXFP8 along the tokens, by which dw is rounded, lies on one rank.
ROWS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(7))


def _converted(name: str) -> Any:
    model = tiny_models.llama(gain=2.0).train()
    quant.to_low_precision_training(model, replace(RECIPES[name], stochastic_gradients=False))
    return model


def _step(model: Any, rows: torch.Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _joined(rank: int, folder: str) -> None:
    """One of two processes; its rows are its half, and the first writes losses and weights."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    own = ROWS[2 * rank : 2 * rank + 2]
    for name in ("mxfp8", "nvfp4"):
        ddp = torch.nn.parallel.DistributedDataParallel(_converted(name))
        sharded = _converted(name)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        losses = torch.tensor([[_step(each, own) for _ in range(2)] for each in (ddp, sharded)])
        dist.all_reduce(losses)
        with pytest.raises(quant.UserError, match=r"its weight is sharded \(FSDP\); gather the state"):
            quant.pack(sharded)
        whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
        dcp.save(get_model_state_dict(sharded), checkpoint_id=f"{folder}/{name}.dcp")
        if rank == 0:
            states = {"ddp": ddp.module.state_dict(), "fsdp": whole}
            torch.save({"losses": losses / 2, **states}, f"{folder}/{name}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    run_ranks(_joined, (str(tmp_path),), 2)
    for name in ("mxfp8", "nvfp4"):
        trained = torch.load(tmp_path / name, weights_only=True)
        # FSDP2 shows each layer the whole weight, so both ways round alike.
        assert torch.allclose(trained["losses"][0], trained["losses"][1], rtol=1e-5)
        for key, value in trained["ddp"].items():
            assert torch.allclose(trained["fsdp"][key], value, atol=1e-4), (name, key)
        plain = tiny_models.llama(gain=2.0)
        assert list(trained["fsdp"]) == list(plain.state_dict())
        import torch.distributed.checkpoint as dcp

        state = plain.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / f"{name}.dcp", no_dist=True)
        assert all(torch.equal(state[key], value) for key, value in trained["fsdp"].items())
    trained = torch.load(tmp_path / "mxfp8", weights_only=True)
    model = _converted("mxfp8")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses = [_step(model, ROWS) for _ in range(2)]
    assert torch.allclose(trained["losses"][0], torch.tensor(losses), rtol=1e-5)
    for key, value in model.state_dict().items():
        moved = float((value - before[key]).norm())
        assert float((trained["ddp"][key] - value).norm()) <= 0.02 * moved, key
