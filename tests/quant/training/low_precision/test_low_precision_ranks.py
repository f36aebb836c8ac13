"""DDP and FSDP2 on two processes (gloo) train in low precision as one process does."""

from __future__ import annotations

import copy
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


class Expert(torch.nn.Module):
    """A layer, and a second one that only large inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return y + self.large(x) if float(x.abs().max()) > 4 else y + 0 * self.large(x[:0]).sum()


def _deployed_alike(model: Any, report: Any) -> list[torch.Tensor]:
    """Returns outputs in eval mode, packed weights' input scales and the report's state, of this rank alone."""
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(3)) * 4
    state = report.state_dict()
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    packed = copy.deepcopy(model)
    quant.pack(packed)
    scales = [module.input_scale for module in packed.modules() if getattr(module, "input_scale", None) is not None]
    assert scales
    with torch.no_grad():
        assert torch.equal(packed(x), outputs)
    model.train()
    return [outputs, *scales, *state.values()]


def _agreeing(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for recipe, wrap in (
        ("fp8_delayed", "ddp"), ("nvfp4", "ddp"), ("nvfp4", "fsdp"), ("fp8_tensorwise", "by hand")
    ):  # fmt: skip
        torch.manual_seed(0)
        model = Expert()
        report = quant.to_low_precision_training(model, recipe, on_nonfinite="skip")
        call, largest = model, []
        if wrap == "ddp":
            call = torch.nn.parallel.DistributedDataParallel(model)
        elif wrap == "fsdp":
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for step in range(4):
            for micro in range(2):  # the outlier comes to one rank alone, in one micro-batch
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
                x = x.clamp(-3, 3) * (1 if rank == 0 or (step, micro) != (2, 0) else 20)
                largest.append(float(x.abs().max()))
                call(x).square().mean().backward()
            if wrap == "by hand":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
        if wrap == "by hand":
            report.reduce_amax()
        plain, again = model, report
        if wrap == "fsdp":
            import torch.distributed.checkpoint as dcp
            from torch.distributed.checkpoint.state_dict import (
                StateDictOptions,
                get_model_state_dict,
                set_model_state_dict,
            )

            # As in docs/training.md: a distributed checkpoint, into a model that was converted and sharded alike.
            dcp.save(
                {"model": get_model_state_dict(model), "report": report.state_dict()}, checkpoint_id=f"{folder}/dcp"
            )
            resumed = Expert()
            resumed_report = quant.to_low_precision_training(resumed, recipe)
            fully_shard(resumed, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))
            saved = {"model": get_model_state_dict(resumed), "report": resumed_report.state_dict()}
            dcp.load(saved, checkpoint_id=f"{folder}/dcp")
            set_model_state_dict(resumed, saved["model"])
            resumed_report.load_state_dict(saved["report"])
            mine, theirs = (
                {**each.state_dict(), **{n: p.full_tensor() for n, p in net.named_parameters()}}
                for each, net in ((report, model), (resumed_report, resumed))
            )
            assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            sent = [whole]
            dist.broadcast_object_list(sent)
            plain = Expert()
            again = quant.to_low_precision_training(plain, recipe)
            plain.load_state_dict(sent[0])
            again.load_state_dict(report.state_dict())
            assert plain.first.low_precision.weight_dtype is torch.bfloat16
        if rank == 0:
            _deployed_alike(plain, again)  # one rank evaluates and packs alone: nothing waits for the other
        mine = _deployed_alike(plain, again)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, mine)
        assert all(map(torch.equal, *both)), (recipe, wrap)
        dist.all_gather_object(both, max(largest))
        recorded = [float(h.low_precision.amax["x"].values.max()) for h in (model.first, model.large)]
        assert recorded == [max(both)] * 2, (recipe, wrap, recorded, both)
    dist.destroy_process_group()


def test_ranks_evaluate_and_pack_the_same_model(tmp_path: Path) -> None:
    """The largest input of all ranks scales the deployed one, also of a layer that only one rank has reached."""
    run_ranks(_agreeing, (str(tmp_path),), 2)


def _net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128))


def _is_common(value: torch.Tensor) -> bool:
    every = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(every, value.detach().contiguous())
    return all(torch.equal(each, value) for each in every)


def _sharded_unevenly(rank: int) -> None:
    """pytorch/ao#3982: 128 rows on three ranks; each step gathers again into the memory of the gather before."""
    from torch.distributed.fsdp import fully_shard

    weights = []
    for fp8 in (False, True):
        model = _net()
        quant.to_low_precision_training(model, "fp8_block", all_gather_fp8=fp8)
        fully_shard(model[0])
        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(2):
            model(torch.randn(16, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model[2].weight.full_tensor())
    assert torch.equal(*weights)


def _with_shards_of_optimizers(rank: int) -> None:
    """ZeRO: each rank's own optimizer holds other parameters, and infinity skips the whole step."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _net()
    quant.to_low_precision_training(model, "nvfp4", on_nonfinite="skip")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.01)
    for step in range(3):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + rank)
        replica(x).square().mean().backward()
        if step == 1:
            model[2].weight.grad[0] = torch.inf
        optimizer.step()
        optimizer.zero_grad()
        moved = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
        assert moved == [step != 1] * 4
    assert _is_common(model[0].low_precision.amax["x"].values) and _is_common(model[0].weight)


def _with_uneven_inputs(rank: int) -> None:
    """Under DDP's `join` ranks stop early: no rank waits for another one at a step."""
    model = _net()
    report = quant.to_low_precision_training(model, "nvfp4")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with replica.join():
        for step in range(2 + rank):
            replica(torch.randn(16, 128, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    report.reduce_amax()
    assert _is_common(model[0].low_precision.amax["x"].values)


def _with_followed_inputs(rank: int) -> None:
    """QAT's static input scales follow the inputs of all ranks, not those of rank 0."""
    model = _net()
    quant.prepare_qat(model, "nvfp4", torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), track_inputs=4)
    replica = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    largest = []
    for step in range(2):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step)) * (1 + 9 * (rank == 2))
        largest.append(x.abs().max())
        replica(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    reached = torch.stack(largest).max()
    dist.all_reduce(reached, dist.ReduceOp.MAX)
    assert _is_common(model[0].input_scale) and _is_common(model[2].input_scale)
    assert torch.allclose(model[0].input_scale * 6 * 448, reached)


def _further(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=3, timeout=datetime.timedelta(seconds=60)
    )
    for case in (_sharded_unevenly, _with_shards_of_optimizers, _with_uneven_inputs, _with_followed_inputs):
        case(rank)
    dist.destroy_process_group()


@pytest.mark.slow
def test_three_ranks_shard_unevenly_skip_stop_early_and_follow_inputs(tmp_path: Path) -> None:
    run_ranks(_further, (str(tmp_path),), 3)


def _in_shards_of_plain_tensors(rank: int, folder: str) -> None:
    """One of two processes under the first version of FSDP, whose shards are no DTensors."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    report = quant.to_low_precision_training(net.train(), "nvfp4")
    hidden = copy.deepcopy(net)
    model = FullyShardedDataParallel(net, use_orig_params=True, device_id=cpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.randn(16, 32) * (1 + 9 * rank)).square().mean().backward()  # the second rank's inputs are larger
    optimizer.step()
    optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        output = model(torch.ones(4, 32).cumsum(0))
    outputs = [torch.empty_like(output) for _ in range(2)]
    dist.all_gather(outputs, output)
    assert torch.equal(*outputs)

    net.train()
    model(torch.randn(16, 32)).square().mean().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if rank == 1:  # where the last layer's gradient lies, and not on the first rank
        gradient = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()][-1]
        gradient[-1] = float("nan")
    with pytest.raises(quant.UserError, match=r"gradient holds NaN or infinity.*no weight was changed"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))

    with pytest.raises(quant.UserError, match=r"^0: its weight is sharded \(FSDP\); gather the state"):
        quant.pack(net)
    options = StateDictOptions(full_state_dict=True)  # as the message says
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    quant.to_low_precision_training(plain, "nvfp4").load_state_dict(report.state_dict())
    plain.load_state_dict(get_model_state_dict(model, options=options))
    assert len(quant.pack(plain).quantized) == 2 and plain[0].weight.shape == (32, 32)

    model = FullyShardedDataParallel(hidden, use_orig_params=False, device_id=cpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(torch.randn(16, 32)).square().mean().backward()
    with pytest.raises(quant.UserError, match=r"^0: FullyShardedDataParallel hides .* pass it use_orig_params=True$"):
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def test_fsdp_of_the_first_version_agrees_too(tmp_path: Path) -> None:
    """Each rank evaluated a model of its own, and one rank alone saw the NaN in its shard.

    github.com/facebookresearch/fairscale/issues/754: ranks that skip a step by their own
    shard leave the others waiting.
    """
    run_ranks(_in_shards_of_plain_tensors, (str(tmp_path),), 2)


def _in_copies_of_shards(rank: int, folder: str) -> None:
    """One of four processes, of which two have the shards of one copy."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=4, timeout=datetime.timedelta(seconds=120)
    )
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    own = tuple(group for ranks, group in groups.items() if rank in ranks)
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    quant.to_low_precision_training(net.train(), "nvfp4")
    model = FullyShardedDataParallel(
        net, own, ShardingStrategy.HYBRID_SHARD, use_orig_params=True, device_id=torch.device("cpu")
    )
    model(torch.randn(16, 32) * (1 + 9 * (rank == 3))).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    with torch.no_grad():
        output = model.eval()(torch.ones(4, 32).cumsum(0))
    outputs = [torch.empty_like(output) for _ in range(4)]
    dist.all_gather(outputs, output)
    assert all(torch.equal(output, other) for other in outputs)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_copies_of_shards_agree_too(tmp_path: Path) -> None:
    run_ranks(_in_copies_of_shards, (str(tmp_path),), 4)
