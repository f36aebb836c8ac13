"""`expected_time` says how long a plan will take before it begins, from the model's shapes and one table of rates.

*Writing text* runs the model once a token. *Solving* runs the calibration tokens through each block a few times, adds
up second moments of its inputs, and rounds. The CPU's rates are those of one core of an AMD EPYC, the GPU's those of an
H100, where `gptq` took 6.0 s for SmolLM2-135M with 32 rows of 512 tokens. Another device may be twice as fast or slow:
from the first block on, the progress bar shows the time that is left by the blocks that are solved.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from quant.calibration.outputs.gradients import labels_drawn
from quant.calibration.session import Session, device_of
from quant.calibration.solvers.registry import Pipeline, get_pipeline
from quant.calibration.texts.mixture import PIECE
from quant.calibration.texts.self_written import ROWS_AT_ONCE
from quant.calibration.walk.learned_rotation import LEARNING_ROWS, STEPS
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan, groups_of


class _Rates(NamedTuple):
    products: float  # operations a second of matrix products, of one core of a CPU
    rounding: float  # elementwise operations a second of solvers, of one core of a CPU
    layer: float  # seconds that a layer takes whatever its size, where its solver needs data


_RATES = {"cpu": _Rates(8e10, 6e9, 0.01), "cuda": _Rates(1e14, 3e12, 0.02)}
_ROUNDING = {"rtn": 120, "gptq": 5000, "gptq_plain": 5000, "kfac": 8000, "local_hessian": 600}  # operations a weight
_SEARCH = 550  # of other solvers, which search scales
_SCALING, _LEARNING = 1400, 700  # of a transform's trials, and of a step of reconstruction
_ROUNDED = 1000  # elementwise operations a weight of a training step: rounding, its gradient, the optimizer
_PASSES = 4  # of all tokens through each block
# Writing: seconds that a linear layer adds to a step, and how much longer than its products the rest of a step takes.
_A_STEP, _BESIDE = 0.0001, 8


class ExpectedTime(NamedTuple):
    """Seconds that a plan will take, without opening the model and writing the checkpoint."""

    writing: float  # of calibration text by the model
    solving: float


def expected_time(
    model: nn.Module, plan: Plan, session: Session | None = None, *, rows: int, seqlen: int, written: int = 0
) -> ExpectedTime:
    """Returns how long `solve_plan` on `rows` rows of `seqlen` tokens takes, of which the model writes `written`."""
    device = (session and session.device) or device_of(model)
    rates, tokens = _rates_of(device), rows * seqlen
    layers = [layer for layer in plan.quantized if layer.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)]
    writing = 0.0
    if written:
        length = min(PIECE, seqlen)
        steps = math.ceil(math.ceil(written / length) / ROWS_AT_ONCE) * length
        writing = 2 * written * _weights(plan) * _BESIDE / rates.products + steps * len(layers) * _A_STEP
    solving = 0.0
    for members in groups_of(layers).values():
        pipeline = get_pipeline(members[0].solver)
        size, width = sum(member.numel for member in members), members[0].shape[-1]
        solving += size * operations(pipeline) / rates.rounding
        if not pipeline.needs_data:
            continue
        # Each of a number of experts has its share of the tokens, which visit several of them.
        matrices = members[0].shape[0] if len(members[0].shape) == 3 else 1
        visits = getattr(getattr(model, "config", None), "num_experts_per_tok", None) or 1
        share = visits / matrices if matrices > 1 else 1.0
        # Second moment and drift: xᵀ x and (r - x)ᵀ x. A solver multiplies the weight by [in, in] some seven times.
        of_passes: float = passes(pipeline, rows, on_gpu=device.type == "cuda") * size + 2 * matrices * width**2
        if pipeline.reconstruction:  # three passes of a batch, of four rows, a step
            of_passes += 12 * pipeline.reconstruction.steps / rows * size
        of_solver = 7 * size * width + 4 * matrices * width**3 if not pipeline.at_once else 0
        solving += (2 * tokens * share * of_passes + of_solver) / rates.products + len(members) * rates.layer
    return ExpectedTime(writing, solving + _learning(plan, min(rows, LEARNING_ROWS) * seqlen) / rates.products)


def _learning(plan: Plan, tokens: int) -> float:
    """Returns the operations in which a rotation of the residual stream is learned."""
    learned = [layer for layer in plan.quantized if get_pipeline(layer.solver).spec.learns_rotation]
    width = next((layer.shape[-1] for layer in plan.layers if layer.kind == LayerKind.EMBEDDING), 0)
    # Most groups as wide as the stream read it; of attention's output projection that is an overestimate.
    inputs = sum(members[0].shape[-1] == width for members in groups_of(learned).values())
    # Two passes forward and one backward, and a second moment; each step multiplies two matrices by the rotation.
    return 2 * tokens * (4 * sum(x.numel for x in learned) + 3 * inputs * width**2) + STEPS * inputs * 4 * width**3


def time_of_rows(model: nn.Module, plan: Plan, session: Session, rows: int, seqlen: int) -> float:
    """Returns the seconds in which `rows` rows of `seqlen` tokens run through a model, its output head included."""
    rates = _rates_of(session.device or device_of(model))
    layers = sum(layer.kind == LayerKind.LINEAR for layer in plan.layers)
    return 2 * rows * seqlen * _weights(plan) / rates.products + rows * layers * _A_STEP


def time_of_training(model: nn.Module, plan: Plan, session: Session, steps: int, tokens: int) -> float:
    """Returns the seconds of `steps` steps of distillation on `tokens` tokens each, the teacher's passes included."""
    rates = _rates_of(session.device or device_of(model))
    # A product with each weight: one of the teacher, three of the student, whose weights are rounded anew in each step.
    return steps * (2 * tokens * 4 * _weights(plan) / rates.products + _weights(plan) * _ROUNDED / rates.rounding)


def operations(pipeline: Pipeline) -> int:
    """Estimates the elementwise operations that a solver takes for each weight."""
    learning = _LEARNING * pipeline.reconstruction.steps if pipeline.reconstruction else 0
    return _ROUNDING.get(pipeline.spec.rounding, _SEARCH) + _SCALING * len(pipeline.transforms) + learning


def passes(pipeline: Pipeline, rows: int, *, on_gpu: bool) -> int:
    """Returns how often all tokens of `rows` rows go through each block, reconstruction not counted; 0 without data."""
    if not pipeline.needs_data:
        return 0
    # Gradients of outputs take one pass forward, then for each label drawn one forward and one backward.
    return _PASSES + (1 + 2 * labels_drawn(rows, on_gpu=on_gpu) if pipeline.rounding.two_sided else 0)


def _rates_of(device: torch.device) -> _Rates:
    rates = _RATES["cuda" if device.type == "cuda" else "cpu"]
    threads = 1 if device.type == "cuda" else torch.get_num_threads()
    return rates._replace(products=rates.products * threads, rounding=rates.rounding * threads)


def _weights(plan: Plan) -> int:
    return sum(layer.numel for layer in plan.layers if layer.kind != LayerKind.EMBEDDING)
