"""DDP and FSDP2 on two processes train adapters, and norms, on a packed base as one process does; so does compile."""

from __future__ import annotations

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from children import run_ranks

import quant

peft = pytest.importorskip("peft", reason="the extra training")

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
RATE = 0.05


def quantized(format: str, **sizes: Any) -> Any:
    return quant.quantize(tiny_models.llama(gain=2.0, **sizes), format, effort=0).model


def adapted(format: str, **sizes: Any) -> Any:
    base = quantized(format, **sizes)
    torch.manual_seed(1)
    model = peft.get_peft_model(base, quant.lora(peft.LoraConfig(r=4, target_modules="all-linear"), base))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def step(model: Any, rows: torch.Tensor) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), RATE)
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()


def joined(rank: int, folder: str, format: str) -> None:
    """One of two processes; its rows are its half, and the first writes what was trained."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300)
    )
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    own = ROWS[2 * rank : 2 * rank + 2]
    ddp = torch.nn.parallel.DistributedDataParallel(adapted(format))
    step(ddp, own)
    sharded = adapted(format)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in sharded.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    step(sharded, own)
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    plain = quantized(format)
    fully_shard(plain, mesh=mesh)
    with pytest.raises(quant.UserError, match=r"is sharded \(FSDP\); gather the state"):
        plain.save_pretrained(f"{folder}/plain", is_main_process=rank == 0)
    if rank == 0:  # alone: nothing here may wait for the other
        done = quant.quantize(tiny_models.llama(gain=2.0), format, effort=0)
        done.model.save_pretrained(f"{folder}/by_model")
        quant.save(done.model, done.plan, f"{folder}/by_us")
        torch.save({"ddp": ddp.module.state_dict(), "fsdp": whole}, f"{folder}/trained")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("format", ["nvfp4a16", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_two_processes_train_adapters_as_one_does(format: str, tmp_path: Path) -> None:
    run_ranks(joined, (str(tmp_path), format), 2)
    ids = ROWS[:1]
    by_model, by_us = (quant.load(tmp_path / name)(ids).logits for name in ("by_model", "by_us"))
    assert torch.equal(by_model, by_us)
    model = adapted(format)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    step(model, ROWS)
    trained = torch.load(tmp_path / "trained", weights_only=True)
    after = model.state_dict()
    for way in ("ddp", "fsdp"):
        for name, tensor in after.items():
            if name not in before:
                assert torch.equal(trained[way][name], tensor), (way, name)
                continue
            error, moved = trained[way][name] - tensor, tensor - before[name]
            assert float(error.norm()) < 1e-4 * float(moved.norm()), (way, name)


def test_gradient_checkpointing_and_compile_change_nothing() -> None:
    model = adapted("nvfp4a16", num_hidden_layers=1).train()
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable()
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager")
    for each in (model, twin, compiled):
        step(each, ROWS)
    expected = model.state_dict()
    for other in (twin, compiled):
        for name, tensor in other.state_dict().items():
            torch.testing.assert_close(tensor.float(), expected[name].float(), rtol=1e-4, atol=1e-5)
