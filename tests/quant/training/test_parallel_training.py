"""DDP and FSDP2 on two processes (gloo, NCCL) give the gradients of one, and train what then packs to the same."""

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
from quant.training.qat_layers import RoundedWeight

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))
RATE = 0.05


def prepared() -> Any:
    model = tiny_models.llama(gain=2.0).requires_grad_(True)
    quant.prepare_qat(model, "nvfp4a16")
    return model


def step(model: Any, teacher: Any, rows: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    quant.distill(model, teacher, rows).backward()
    optimizer.step()


def joined(rank: int, folder: str, device: str) -> None:
    """One of two processes; its rows are its half, and the first writes what was trained."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=300),
    )  # fmt: skip
    teacher, own = tiny_models.llama(seed=1, gain=2.0).to(device), ROWS[2 * rank : 2 * rank + 2].to(device)
    model = prepared().to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    step(ddp, teacher, own)
    # As a Trainer wraps it: DDP then looks from the outputs for the parameters that they come from.
    asking = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    step(asking, teacher, own)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    sharded = copy.deepcopy(model)
    mesh = dist.device_mesh.init_device_mesh(device, (2,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    step(sharded, teacher, own)
    with pytest.raises(quant.UserError, match=r"its weight is sharded \(FSDP\); gather the state"):
        quant.pack(sharded)
    whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        again = prepared()
        again.load_state_dict({name: tensor.cpu() for name, tensor in whole.items()})
        states = {"ddp": ddp.module.state_dict(), "asking": asking.module.state_dict(), "fsdp": again.state_dict()}
        torch.save(
            {way: {name: tensor.cpu() for name, tensor in state.items()} for way, state in states.items()},
            f"{folder}/trained",
        )
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_train_as_one_does(device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(joined, (str(tmp_path), device), 2)
    model, teacher = prepared(), tiny_models.llama(seed=1, gain=2.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    step(model, teacher, ROWS)
    trained = torch.load(tmp_path / "trained", weights_only=True)
    for way in ("ddp", "asking", "fsdp"):
        for name, parameter in model.named_parameters():
            moved = parameter.detach() - before[name]
            assert float((trained[way][name] - parameter.detach()).norm()) < 1e-4 * float(moved.norm()), (way, name)
    packed = prepared()
    packed.load_state_dict(trained["fsdp"])
    with torch.no_grad():
        expected = packed(ROWS).logits
    quant.pack(packed)
    with torch.no_grad():
        assert torch.equal(packed(ROWS).logits, expected)


def apart(rank: int, folder: str) -> None:
    """One of two processes under FSDP2: BF16 copies of weights, and each linear sharded by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh, own = dist.device_mesh.init_device_mesh("cpu", (2,)), ROWS[2 * rank : 2 * rank + 2]
    states: dict[str, Any] = {}
    for name, recipe, dtype in (("narrow", "nvfp4a16", torch.bfloat16), ("each", "fp8", None)):
        model = learning(recipe)
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        for module in (*(linears if name == "each" else model.model.layers), model):
            fully_shard(module, mesh=mesh, **policy)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        model(own, labels=own).loss.backward()
        optimizer.step()
        # FSDP2 shows a layer whole, and cast, in its forward pass alone.
        packed: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, RoundedWeight):
                module.register_forward_pre_hook(
                    lambda layer, _, path=path, packed=packed: packed.update({path: layer.packed_weight().dequantize()})
                )
        with torch.no_grad():
            states[f"{name} logits"] = model(ROWS).logits
        states[f"{name} packed"] = packed
        states[name] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(states, f"{folder}/trained")
    dist.barrier()
    dist.destroy_process_group()


def learning(recipe: str) -> Any:
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True)
    quant.prepare_qat(model, recipe, ROWS, solver="mse", scales="learned")
    return model


@pytest.mark.slow
def test_under_fsdp_the_copies_that_train_are_packed_and_each_linear_may_be_sharded_alone(tmp_path: Path) -> None:
    run_ranks(apart, (str(tmp_path),), 2)
    trained = torch.load(tmp_path / "trained", weights_only=True)
    for name, recipe in (("narrow", "nvfp4a16"), ("each", "fp8")):
        model = learning(recipe)
        model.load_state_dict(trained[name])
        quant.pack(model)
        for path, values in trained[f"{name} packed"].items():
            assert torch.equal(model.get_submodule(path).dequantize(), values), path

    single = learning("fp8")
    optimizer = torch.optim.SGD(single.parameters(), RATE)
    before = {name: parameter.detach().clone() for name, parameter in single.named_parameters()}
    single(ROWS, labels=ROWS).loss.backward()
    optimizer.step()
    for name, parameter in single.named_parameters():
        moved = parameter.detach() - before[name]
        assert float((trained["each"][name] - parameter.detach()).norm()) < 1e-4 * float(moved.norm()), name
    torch.testing.assert_close(single(ROWS).logits.detach(), trained["each logits"], rtol=1e-4, atol=1e-4)
