"""Loops that hold a model's parameters in their own ways: averages, compiled steps, DeepSpeed, ranks without DDP."""

from __future__ import annotations

import copy
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from children import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import quant
from quant.base.errors import UserError
from quant.recipes.callers_model import inner_model

ROWS = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(7))


def trained(recipe: str = "fp8_delayed") -> tuple[Any, Any]:
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True).train()
    return model, quant.to_low_precision_training(model, recipe)


def backward(model: Any, rows: torch.Tensor = ROWS) -> None:
    model(rows, labels=rows).loss.backward()


def test_a_copy_that_never_trained_says_that_it_evaluates_by_its_own_scales() -> None:
    model, _ = trained()
    average = copy.deepcopy(model).eval()
    backward(model)
    with pytest.warns(UserWarning, match=r"a copy of a model in training \(EMA\) has recorded no input"):
        average(ROWS)
    average.load_state_dict(model.state_dict())
    model.load_state_dict(average.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.eval()(ROWS)


def test_transforms_of_functions_are_refused_by_the_layer() -> None:
    model, _ = trained()
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (ROWS,), {"labels": ROWS}).loss

    assert loss(weights).isfinite()
    with pytest.raises(
        UserError, match=r"q_proj: trains in fp8_delayed, which takes no part in transforms of torch\.func"
    ):
        torch.func.grad(loss)(weights)


class Double(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_layer_that_packs_in_sixteen_bits_is_told() -> None:
    """Servers fuse gate and up: the gate is packed as up is, whose weight was computed at the conversion."""
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True).train()
    up = model.model.layers[0].mlp.up_proj
    parametrize.register_parametrization(up, "weight", Double())
    quant.to_low_precision_training(model, "nvfp4")
    backward(model)
    parametrize.remove_parametrizations(up, "weight")
    with pytest.warns(UserWarning, match=r"gate_proj: trained in nvfp4, and the packed model has it in 16 bit: \S"):
        quant.pack(model)


def test_a_compiled_step_is_watched() -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    step = torch.compile(optimizer.step, backend="eager")
    backward(model)
    model.model.layers[0].mlp.up_proj.weight.grad[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"up_proj"):
        step()


class Flat(torch.optim.SGD):
    """As the optimizers of ZeRO do, it steps a flat copy of all parameters."""

    def __init__(self, model: nn.Module) -> None:
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        super().__init__([flat.requires_grad_()], 0.01)


class DeepSpeedEngine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.basic_optimizer = module, Flat(module)
        self.seq_data_parallel_group = torch.distributed.group.WORLD


def joined(rank: int, file: str, count: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=count)


def without_a_wrapper(rank: int, file: str) -> None:
    joined(rank, file, 2)
    rows = ROWS[2 * rank : 2 * rank + 2]
    sys.modules["deepspeed"] = types.SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine)  # type: ignore[assignment]
    wraps: list[Any] = [lambda model: model, DistributedDataParallel, DeepSpeedEngine]
    for wrap, says in zip(wraps, (True, False, False), strict=True):
        model, report = trained()
        wrapped = wrap(model)
        assert inner_model(wrapped) is model
        backward(wrapped if wrap is DistributedDataParallel else model, rows)
        getattr(wrapped, "basic_optimizer", torch.optim.SGD(model.parameters(), 0.01)).step()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            quant.pack(copy.deepcopy(model))
        assert any("since ranks last agreed on the largest" in str(w.message) for w in told) is says, (wrap, told)
        if says:
            report.reduce_amax()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                quant.pack(model)
    torch.distributed.destroy_process_group()


def test_ranks_that_did_not_agree_are_told_when_they_pack(tmp_path: Path) -> None:
    """DDP's and DeepSpeed's (a stand-in) agree at each step; the latter's optimizer holds flat copies."""
    run_ranks(without_a_wrapper, (str(tmp_path / "group"),), 2)


def in_parts(rank: int, file: str) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    joined(rank, file, 1)
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).requires_grad_(True).train()
    quant.prepare_qat(model, "nvfp4", ROWS, solver="rtn")
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(model.model.layers[0].mlp, mesh, plan)
    with pytest.raises(UserError, match=r"QAT layers take no DTensor \(tensor parallelism\); wrap the"):
        model(ROWS)
    torch.distributed.destroy_process_group()


def test_qat_refuses_tensor_parallelism(tmp_path: Path) -> None:
    run_ranks(in_parts, (str(tmp_path / "group"),))
