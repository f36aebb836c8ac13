"""FSDP2 gathers FP8 codes with half the bytes of BF16, and trains the same bits (two processes, gloo)."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed as dist
from children import run_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import quant
from quant.training.low_precision.all_gather import ShardInFP8
from quant.training.low_precision.conversion import to_plain_layers

ROWS = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(7))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4, "num_hidden_layers": 1}


def _gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that this rank sends to each gather."""
    sent: list[int] = []
    # PyTorch 2.13 has renamed the collective.
    for name in ("all_gather_single", "all_gather_into_tensor"):
        gather = getattr(dist, name, None)

        def counted(*args: Any, gather: Any = gather, **kwargs: Any) -> Any:
            tensor = kwargs.get("input_tensor", kwargs.get("input", args[1] if len(args) > 1 else None))
            sent.append(tensor.numel() * tensor.element_size())
            return gather(*args, **kwargs)

        if gather is not None:
            monkeypatch.setattr(dist, name, counted)
    return sent


def _trained(rank: int, folder: str, fp8: bool, sent: list[int]) -> dict[str, Any]:
    """Two steps of AdamW on FP32 masters, weights seen in BF16."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    sent.clear()
    model = tiny_models.llama(gain=2.0, **SIZES).train()
    quant.to_low_precision_training(model, "fp8_block", all_gather_fp8=fp8)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (*model.model.layers[0].mlp.children(), *model.model.layers):
        if list(layer.parameters()):
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), mp_policy=policy)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, own = [], ROWS[2 * rank : 2 * rank + 2]
    for _ in range(2):
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=f"{folder}/{fp8}.dcp")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return {"losses": losses, "sent": list(sent), "weights": whole}


def _joined(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    with pytest.MonkeyPatch.context() as patched:
        sent = _gathers(patched)
        both = [_trained(rank, folder, fp8, sent) for fp8 in (False, True)]
    if rank == 0:
        torch.save(both, f"{folder}/both")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_gather_half_the_bytes_and_train_the_same_bits(tmp_path: Path) -> None:
    run_ranks(_joined, (str(tmp_path),), 2)
    plain, fp8 = torch.load(tmp_path / "both", weights_only=True)
    assert fp8["losses"] == plain["losses"]
    assert fp8["weights"].keys() == plain["weights"].keys()
    assert all(torch.equal(value, plain["weights"][key]) for key, value in fp8["weights"].items())
    # The layers of the MLP are gathered each by itself.
    of_layers = [(a, b) for a, b in zip(plain["sent"], fp8["sent"], strict=True) if a == 256 * 512]
    assert len(of_layers) >= 6 and all(b <= 0.55 * a for a, b in of_layers)
    import torch.distributed.checkpoint as dcp

    read = {key: torch.empty_like(value) for key, value in plain["weights"].items()}
    dcp.load(read, checkpoint_id=f"{tmp_path}/True.dcp")
    assert all(torch.equal(value, plain["weights"][key]) for key, value in read.items())


def test_on_one_process_it_is_the_tensor_that_it_holds(tmp_path: Path) -> None:
    nets = [nn.Sequential(nn.Linear(128, 256)).train() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, fp8 in zip(nets, (False, True), strict=True):
        quant.to_low_precision_training(net, "fp8_block", all_gather_fp8=fp8)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        net(torch.ones(4, 128)).square().sum().backward()
        optimizer.step()
    assert isinstance(nets[1][0].weight.data, ShardInFP8)
    torch.save(nets[1].state_dict(), tmp_path / "state")
    read = torch.load(tmp_path / "state", weights_only=True)
    assert type(read["0.weight"]) is torch.Tensor and torch.equal(read["0.weight"], nets[0][0].weight)
    quant.pack(nets[1])
    quant.pack(nets[0])
    assert torch.equal(nets[1][0].codes.view(torch.uint8), nets[0][0].codes.view(torch.uint8))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_tensorwise", "nvfp4"])
def test_weights_that_codes_do_not_determine_are_refused(recipe: str) -> None:
    net = nn.Sequential(nn.Linear(128, 256))
    with pytest.raises(quant.UserError, match=f"{recipe}: weights can be gathered in FP8 where square blocks"):
        quant.to_low_precision_training(net, recipe, all_gather_fp8=True)
    assert type(net[0]) is nn.Linear  # not converted in part


def test_afterwards_weights_are_plain_again() -> None:
    net = nn.Sequential(nn.Linear(128, 128))
    before = net[0].weight.detach().clone()
    quant.to_low_precision_training(net, "fp8_block", all_gather_fp8=True)
    assert isinstance(net[0].weight.data, ShardInFP8)
    to_plain_layers(net)
    assert type(net[0].weight.data) is torch.Tensor and torch.equal(net[0].weight, before)


def test_one_rank_trains_the_same_bits_and_gathers_nothing(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        losses = []
        for fp8 in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(128, 128, bias=False))
            quant.to_low_precision_training(model, "fp8_block", backend="emulated", all_gather_fp8=fp8)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)), mp_policy=policy)
            optimizer = torch.optim.SGD(model.parameters(), 1.0)
            for _ in range(2):
                loss = model(torch.ones(128, 128)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    finally:
        dist.destroy_process_group()
    assert losses[:2] == losses[2:]
    assert losses[1] < losses[0]
