"""A plain training loop for models that `prepare_qat` prepared: AdamW, a warm-up, a cosine to zero, clipped gradients.

`quant distill` and the benchmark run this loop. A Trainer of any library can do the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from quant.calibration.placement import device_of
from quant.base.errors import UserError
from quant.recipes.plan import Plan
from quant.training.cuda_graph import Passes
from quant.training.qat_layers import Packed
from quant.training.rounding.rounded_weight import RoundedWeight

# The share of steps in which the rate rises, the largest norm of the gradients, and AdamW's decay rates. These forget
# squared gradients sooner than torch's 0.999, whose average would span more steps than a whole run has.
_WARM_UP, _CLIP, _BETAS = 0.05, 1.0, (0.9, 0.95)


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a training run.

    Attributes:
        steps: the number of steps of the optimizer.
        batch: rows a step.
        rate: peak learning rate of AdamW.
        seed: the seed of the order of the rows.
    """

    steps: int
    batch: int
    rate: float
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The losses and times of a training loop.

    Attributes:
        losses: the losses of each step.
        seconds: the seconds of each step.
        replayed: whether steps were recorded and replayed on a GPU.
    """

    losses: list[float]
    seconds: list[float]
    replayed: bool = False


def train(
    model: nn.Module,
    loss: Callable[[torch.Tensor], torch.Tensor],
    rows: torch.Tensor,
    hyperparameters: Hyperparameters,
    *,
    record: bool = True,
    progress: Callable[[int, int, float], None] | None = None,
) -> Trained:
    """Trains the parameters of `model` that need gradients.

    Args:
        model: changed in place; on a GPU it computes in BF16 by autocast.
        loss: the loss of a batch, token ids int64 `[batch, seqlen]` on the model's device.
        rows: token ids, int64 `[rows, seqlen]`, in a new random order each time they are used up.
        hyperparameters: steps, rows a step and learning rate.
        record: whether steps on a GPU may be recorded and replayed, as `Passes` says.
        progress: a function that is called with (steps done, steps in all, loss).

    Raises:
        UserError: fewer than one step or row, or a loss that is not finite.
    """
    steps, batch, rate = hyperparameters.steps, hyperparameters.batch, hyperparameters.rate
    if steps < 1 or not 1 <= batch <= len(rows):
        raise UserError(f"{steps} steps of {batch} rows out of {len(rows)}: expected a step, and the rows of a batch")
    device = device_of(model)
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(learned, rate, betas=_BETAS, weight_decay=0.0, fused=on_gpu)
    warm = max(round(steps * _WARM_UP), 1)
    # Linear to the peak, then half a cosine from there to zero.
    decay = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (1 + math.cos(math.pi * max(step + 1 - warm, 0) / steps)) / 2)
    )
    passes = Passes(loss, learned, record=record)
    losses, seconds = [], []
    for step, ids in zip(range(1, steps + 1), _batches(rows, batch, hyperparameters.seed), strict=False):
        started = time.perf_counter()
        losses.append(passes(ids))
        if not math.isfinite(losses[-1]):
            raise UserError(f"step {step}: the loss is {losses[-1]}; lower the learning rate, which is {rate:g}")
        nn.utils.clip_grad_norm_(learned, _CLIP)
        optimizer.step()
        decay.step()
        if on_gpu:
            torch.cuda.synchronize(device)  # so that the seconds are the step's own
        seconds.append(time.perf_counter() - started)
        if progress is not None:
            progress(step, steps, losses[-1])
    replayed = passes.replays
    passes.close()
    return Trained(losses, seconds, replayed)


def default_rate(plan: Plan, train: str = "weights") -> float:
    """Returns a peak learning rate that did well.

    Weights were measured by benchmarks/training.py (smaller for weight-only rounding), norms in docs/solvers.md.
    """
    if train == "norms":
        return 1e-3
    return 1e-4 if any(layer.activation is not None for layer in plan.layers) else 6e-5


def train_only_norms(model: nn.Module) -> None:
    """Trains only the weights and biases of norms, in float32: of every module whose weight is a vector.

    Raises:
        UserError: the model has none.
    """
    norms = [module for module in model.modules() if getattr(getattr(module, "weight", None), "ndim", 0) == 1]
    if not norms:
        raise UserError(f"{type(model).__name__}: no norm has a weight to train; train the quantized weights instead")
    model.requires_grad_(False)
    for norm in norms:
        # Steps of a thousandth would be lost between two numbers of BF16.
        norm.float().requires_grad_(True)


def train_only_rounded(model: nn.Module) -> None:
    """Trains only the quantized weights and their scales: no other parameter gets gradients."""
    rounded = {id(p) for module in model.modules() if isinstance(module, RoundedWeight) for p in module.trained()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in rounded)


class StoredDtypes:
    """The dtypes of a model's tensors.

    Args:
        model: the model before `prepare_qat`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._compute = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        # Codes and scales keep their dtype, and a GPU may hold them as integers of another layout than afterwards.
        self._by_name = {
            name: tensor.dtype
            for name, tensor in _tensors(model)
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1
        }

    def restore(self, model: nn.Module) -> None:
        """Casts the model's tensors back; its quantized layers compute in the dtype that the first parameter had."""
        # `.to` casts every tensor of a layer; tensors that were wider, such as routers' biases, are put back from here.
        wide = {name: tensor.detach() for name, tensor in _tensors(model)}
        for module in model.modules():
            if isinstance(module, Packed):
                module.to(self._compute)
        for name, tensor in _tensors(model):
            if tensor.dtype != self._by_name.get(name, tensor.dtype):
                tensor.data = wide[name].to(self._by_name[name])


def _batches(rows: torch.Tensor, size: int, seed: int) -> Iterator[torch.Tensor]:
    """Yields batches endlessly; each row comes once before any repeats."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator, device="cpu")
        for start in range(0, len(order) - size + 1, size):
            yield rows[order[start : start + size]]


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
