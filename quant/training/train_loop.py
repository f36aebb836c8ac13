"""A plain training loop for models that `prepare_qat` prepared: AdamW, a warm-up, a cosine to zero, clipped gradients.

`quant distill` and the benchmark run this loop. A Trainer of any library can do the same.

A step of a small model is thousands of kernels that the host launches one by one, and it takes longer to launch most
of them than they run. On a GPU a CUDA graph holds them all, and one launch replays it:

    step 1     op by op: kernels are compiled and caches filled; random numbers that are drawn are noticed
    step 2     op by op, timed
    step 3     recorded, and replayed for the first time, which takes longer
    step 4..6  replayed, and so is every later step if the fastest of them was faster than step 2

A step that a graph cannot hold runs op by op: one with random numbers, or with experts or a teacher for which the
host looks at the values of a batch. A replay repeats the recorded kernels, so the loss must depend on nothing that
changes except the batch and the parameters.
"""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, loss_text
from quant.calibration.session import device_of
from quant.training.qat_layers import Packed, RoundedWeight

_JUDGED = 6  # steps whose seconds are compared before the recording is kept for good
# The share of steps in which the rate rises, the largest norm of the gradients, and AdamW's decay rates. These forget
# squared gradients sooner than torch's 0.999, whose average would span more steps than a whole run has.
_WARM_UP, _CLIP, _BETAS = 0.05, 1.0, (0.9, 0.95)
_RISEN = 1.25  # times the loss of held-out rows before training: no later step makes up for that
NOISE = 1e-3  # nats: a held-out loss below it, as of near-lossless formats, tells no rate from another

Loss = Callable[[Tensor], Tensor]


class Passes:
    """Computes a loss, a scalar of a batch on the parameters' device, and its gradients, batch after batch.

    On a GPU the loss runs in BF16 by autocast, and passes may be recorded. Each call writes the gradients anew.
    """

    def __init__(self, loss: Loss, learned: Sequence[nn.Parameter], *, record: bool = True) -> None:
        self._loss, self._learned, self._device = loss, learned, learned[0].device
        self._may_record = record and all(p.is_cuda and p.device == self._device for p in learned)
        self._seconds: list[float] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch = self._loss_value = torch.empty(0)
        self.replays = False  # whether the last call was a replay

    def __call__(self, batch: Tensor) -> float:
        """Returns the loss of a batch, token ids int64 `[batch, seqlen]`; parameters have its gradients."""
        if self._may_record and self._graph is None and len(self._seconds) == 2:
            self._record(batch)
        started = time.perf_counter()
        self.replays = self._graph is not None and batch.shape == self._batch.shape
        if self._graph is not None and self.replays:
            self._batch.copy_(batch)
            self._graph.replay()
            value = self._loss_value.item()
        else:
            # A graph would replay the same random numbers; a step that draws any changes the state of a generator.
            before = self._generators() if self._may_record and not self._seconds else None
            for parameter in self._learned:
                parameter.grad = None
            loss = self.of(batch.to(self._device))
            loss.backward()
            value = loss.item()
            self._may_record &= before is None or before == self._generators()
        if len(self._seconds) < _JUDGED:
            self._seconds.append(time.perf_counter() - started)
            # The fastest of three: a single replay may have waited for another process on the same GPU.
            if len(self._seconds) == _JUDGED and self.replays and min(self._seconds[3:]) > self._seconds[1]:
                self._forget({p: p.grad.clone() for p in self._learned if p.grad is not None})
        return value

    def close(self) -> None:
        """Frees the recording, and the gradients, whose memory is a part of it."""
        self._forget({})

    def _forget(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        self._graph, self._may_record = None, False
        self._batch = self._loss_value = torch.empty(0)
        for parameter in self._learned:
            parameter.grad = gradients.get(parameter)

    def of(self, batch: Tensor) -> Tensor:
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._loss(batch)

    def _record(self, batch: Tensor) -> None:
        stream, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._batch = batch.to(self._device, copy=True)  # replays read this memory; each batch is copied into it
        for parameter in self._learned:
            parameter.grad = None  # so that gradients are written to memory of the graph
        try:
            with torch.cuda.graph(graph):
                self._loss_value = self.of(self._batch)
                self._loss_value.backward()
        except RuntimeError:  # of CUDA, at whatever cannot be recorded; the batch has its turn op by op
            torch.cuda.set_stream(stream)  # which a failed recording does not leave
            torch.cuda.synchronize(self._device)
            self.close()
            return
        self._graph = graph

    def _generators(self) -> tuple[object, ...]:
        states = torch.get_rng_state(), torch.cuda.get_rng_state(self._device)
        return (random.getstate(), *(state.numpy().tobytes() for state in states))


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters of a training run."""

    steps: int  # of the optimizer
    batch: int  # rows a step
    rate: float  # peak learning rate of AdamW
    seed: int = 0  # of the order of the rows


@dataclass(frozen=True)
class Trained:
    """The losses and seconds of each step of a training loop, and whether steps were recorded and replayed."""

    losses: list[float]
    seconds: list[float]
    before: float  # the loss of the held-out rows, else of the first step's, before the first step and after the last
    after: float  # infinity where a loss or gradient was not finite, which ends training
    outcome: str  # what training did to the loss, for messages
    replayed: bool = False


def train(
    model: nn.Module, loss: Callable[[Tensor], Tensor], rows: Tensor, hyperparameters: Hyperparameters, *,
    record: bool = True, progress: Callable[[int, int, float], None] | None = None, held_out: Tensor | None = None,
) -> Trained:  # fmt: skip
    """Trains the parameters of `model` that need gradients; on a GPU it computes in BF16 by autocast.

    `loss` is of a batch, token ids int64 `[batch, seqlen]` on the model's device. The rows, `[rows, seqlen]`, come in a
    new random order each time they are used up. `progress` is called with (steps done, steps in all, loss). The loss of
    `held_out`, a batch, is computed after each tenth of the steps; training ends where it has risen by a quarter.
    UserError: the loss or its gradient is not finite before any weight was changed.
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
    judged = (next(_batches(rows, batch, hyperparameters.seed)) if held_out is None else held_out).to(device)
    with torch.no_grad():
        before = after = value = passes.of(judged).item()
    outcome = ""
    for step, ids in zip(range(1, steps + 1), _batches(rows, batch, hyperparameters.seed), strict=False):
        started = time.perf_counter()
        losses.append(passes(ids))
        norm = float(nn.utils.clip_grad_norm_(learned, _CLIP))
        if not all(map(math.isfinite, (before, losses[-1], norm))):
            if step == 1:
                raise UserError(
                    f"losses of {before:g} and {losses[-1]:g}, and a gradient of norm {norm:g}, before any weight was "
                    "changed: the model or its teacher gives NaN or infinity on these rows; leave such rows out"
                )
            after, outcome = (
                math.inf,
                f"came to a loss of {losses[-1]:g} with a gradient of norm {norm:g} at step {step}",
            )
            break
        optimizer.step()
        decay.step()
        if on_gpu:
            torch.cuda.synchronize(device)  # so that the seconds are the step's own
        seconds.append(time.perf_counter() - started)
        if progress is not None:
            progress(step, steps, losses[-1])
        if step == steps or (held_out is not None and step % -(-steps // 10) == 0):
            with torch.no_grad():
                value = passes.of(judged).item()
            after = value if math.isfinite(value) else math.inf
            if after > max(_RISEN * before, NOISE):
                break
    replayed = passes.replays
    passes.close()
    rows_judged = "its first rows" if held_out is None else "held-out rows"
    outcome = outcome or f"raised the loss of {rows_judged} from {loss_text(before)} to {loss_text(value)}"
    return Trained(losses, seconds, before, after, outcome, replayed)


def train_only_norms(model: nn.Module) -> None:
    """Trains only the weights and biases of norms, in float32; UserError for a model without norms."""
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


def usual_rate(model: nn.Module, rounds_inputs: bool) -> float:
    """Returns the peak learning rate that suits the weights that are trained, a share of their root mean square.

    AdamW moves a weight by about the rate a step, whatever its gradient, and the weights of models differ tenfold.
    """
    trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
    squares = sum(float(weight.float().square().sum()) for weight in trained)
    return (1.5e-4 if rounds_inputs else 1e-4) * (squares / sum(weight.numel() for weight in trained)) ** 0.5


class StoredDtypes:
    """The dtypes of a model's tensors, before `prepare_qat`."""

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


def _batches(rows: Tensor, size: int, seed: int) -> Iterator[Tensor]:
    """Yields batches endlessly; each row comes once before any repeats."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator, device="cpu")
        for start in range(0, len(order) - size + 1, size):
            yield rows[order[start : start + size]]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
