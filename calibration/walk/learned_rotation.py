"""`merge_learned_rotation` rotates the residual stream so that rounding in FP8 costs least behind it.

FP8 rounds every value with an error that is a share of the value. So the error behind a layer that reads the stream,
in the metric A of its outputs, is to first order the same share of

    Σ_i M_ii H_ii        M = mean of x xᵀ of its inputs x,   H = Wᵀ A W

whether inputs or weights are rounded: it is large where loud channels meet large weights. A rotation R changes x to
R x and W to W Rᵀ, which leaves W x as it is, and the sum over all layers that read the stream becomes

    L(R) = Σ_layers Σ_i (R M Rᵀ)_ii (R H Rᵀ)_ii.

L is minimized over the orthonormal matrices, as SpinQuant (Liu et al., arXiv 2405.16406) minimizes the loss of the
model, here by Adam in the tangent space. The gradient with respect to a skew-symmetric Ω, which takes R to exp(Ω) R,
is the skew part of G Rᵀ with

    G = dL/dR = 2 Σ_layers [diag(h) R M + diag(m) R H],   m_i = (R M Rᵀ)_ii,   h_i = (R H Rᵀ)_ii.

The start is the identity: Hadamard matrices, which spread loud channels over small weights, make L larger.

M is measured on the norm's output without its weights, and W has those of the norm. Two passes over the original model
measure both before anything is solved: a backward pass gives A, and a weight for each token, as `kfac` has them,
whatever solver follows; a forward pass adds up M. Where some group has no gradients, A is 1 for all, and a group counts
by the share of its outputs' energy that rounding costs. Everything else that solvers measure is measured in the rotated
model. A run that is resumed takes the rotation from its store, because the blocks that it has solved belong to it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.processor import value_of
from quant.calibration.fast_matmul import columns_product, fast_matmul
from quant.calibration.outputs.gradients import OutputMoments, output_moments
from quant.calibration.ranks import Exchange, from_first, gathered
from quant.calibration.session import Session, device_of, free_memory, placed
from quant.calibration.solvers.rotation import find_residual, gain_of, merge_residual_rotation
from quant.recipes.blocks import all_arguments, removing
from quant.recipes.plan import LayerPlan, groups_of

# Rows that the moments are measured on; more change the rotation little.
LEARNING_ROWS = 128
# Share of the memory that M and H of all groups may take together.
_SHARE = 0.5
_STEP = "learned rotation"
STEPS = 250
_RATE = 0.006  # radians by which the first steps turn each pair of channels; they fall to 0 along half a cosine
_DECAYS = (0.9, 0.999)  # of Adam's averages of the gradient and of its square
_PRODUCTS = 1 << 28  # bytes of the products R M that exist at once


@dataclass(frozen=True)
class _Reader:
    """A group of layers that read a norm of the residual stream."""

    members: list[LayerPlan]
    norm: str
    gain: Tensor  # the norm's factors, float64 [width]

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.members[0].name


def merge_learned_rotation(
    model: nn.Module,
    few: Tensor,
    batches: list[Tensor],
    layers: Sequence[LayerPlan],
    device: torch.device,
    session: Session,
) -> dict[str, str]:
    """Rotates the residual stream for `layers` in place; returns a sentence on each of them."""

    def left_out(error: ValueError) -> dict[str, str]:
        note = f"rotation left out: the residual stream stays as it is, for {error}"
        return {layer.name: note for layer in layers}

    home = device_of(model)
    try:
        with placed(model, session.device) as there:
            readers = _readers(model, lambda m: m(few.to(there)), layers)
    except ValueError as error:
        return left_out(error)
    finished = session.store.get(_STEP)
    if finished is None:
        _check_memory(readers, session)
    try:
        if finished is not None:
            rotation = finished.tensors["rotation"]
        else:
            rows = sum(len(batch) if isinstance(batch, Tensor) else 1 for batch in batches)
            every = max(sum(gathered(rows)) // LEARNING_ROWS, 1)
            # GPUs of several kinds may round differently.
            rotation = from_first(learned_rotation(*_measure(model, readers, batches[::every], session)).cpu)
        rotation = rotation.to(session.device or home)
        residual = merge_residual_rotation(model.to(device), lambda m: m(few.to(device)), rotation)
    except ValueError as error:
        return left_out(error)
    finally:
        model.to(home)
    if finished is None:
        session.store.put(_STEP, {"rotation": rotation.cpu()}, None)
    in_stream = {*residual.writers, *(name for names in residual.readers.values() for name in names)}
    note = "rotated with the residual stream, as learned, at no cost at run time"
    return {layer.name: note for layer in layers if layer.name in in_stream}


def _readers(model: nn.Module, run: Callable[[nn.Module], Any], layers: Sequence[LayerPlan]) -> list[_Reader]:
    residual = find_residual(model, run)
    norm_of = {name: norm for norm, names in residual.readers.items() for name in names}
    gains = {norm: gain_of(model.get_submodule(norm), norm)[0] for norm in residual.readers}
    groups = [members for members in groups_of(layers).values() if members[0].name in norm_of]
    if not groups:
        raise ValueError("no layer with this solver reads it")
    return [_Reader(members, norm_of[members[0].name], gains[norm_of[members[0].name]]) for members in groups]


def _check_memory(readers: Sequence[_Reader], session: Session) -> None:
    """Raises ValueError where M and H of all groups do not fit."""
    device, width = readers[0].gain.device, len(readers[0].gain)
    on_gpu = device.type == "cuda"
    memory = free_memory(device) if on_gpu else session.usable_memory()
    needed = 2 * len(readers) * 4 * width**2
    if memory is not None and needed > _SHARE * memory:
        raise ValueError(
            f"{readers[0].name}: rotation:learned keeps two second moments [{width}, {width}] of each of "
            f"{len(readers)} inputs, {needed / 1e9:.1f} GB, and {_SHARE * memory / 1e9:.1f} GB may be used: "
            f"{'take a larger GPU' if on_gpu else 'give more memory'}, or a solver without it for all or some blocks"
        )


def _measure(
    model: nn.Module, readers: Sequence[_Reader], batches: list[Tensor], session: Session
) -> tuple[Tensor, Tensor]:
    """Returns M and H of each group, float32 `[groups, width, width]`."""
    outputs = output_moments(model, [reader.members for reader in readers], batches, session, draws=1)
    if outputs.missing:
        outputs = OutputMoments()
    device = session.device or device_of(model)
    width = len(readers[0].gain)
    moments = torch.zeros(len(readers), width, width, dtype=torch.float32, device=device)
    sums = [
        _InputMoment(moment, outputs.token_weights.get(reader.name, []))
        for moment, reader in zip(moments, readers, strict=True)
    ]
    hooks = [
        model.get_submodule(reader.norm).register_forward_hook(each, with_kwargs=True)
        for each, reader in zip(sums, readers, strict=True)
    ]
    with removing(hooks), placed(model, session.device) as there, fast_matmul():
        for batch in batches:
            model(batch.to(there))
    exchange, weights = Exchange(device), torch.empty_like(moments)
    for each, moment, weight, reader in zip(sums, moments, weights, readers, strict=True):
        own = moment.clone()
        moment.zero_()
        for _, (part,) in exchange.in_order([(session.rank, [own])]):
            moment += part
        moment /= sum(gathered(each.tokens))
        weight.copy_(_weights_moment(model, reader, outputs, device))
    if not outputs.moments:
        # The energy of outputs is tr(M H).
        weights /= (moments * weights).sum((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return moments, weights


class _InputMoment:
    """A forward hook of a norm, which adds the second moment of its output without its weights to `total`."""

    def __init__(self, total: Tensor, token_weights: Sequence[Tensor]) -> None:
        self.total, self.token_weights, self.batches, self.tokens = total, token_weights, 0, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        x = all_arguments(args, kwargs)[0].float().flatten(0, -2)
        x = x * x.square().mean(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny).rsqrt()
        if self.token_weights:
            x = x * self.token_weights[self.batches].to(x)[:, None]
        self.total += columns_product(x, x)
        self.batches, self.tokens = self.batches + 1, self.tokens + len(x)


def _weights_moment(model: nn.Module, reader: _Reader, outputs: OutputMoments, device: torch.device) -> Tensor:
    """Returns H = Wᵀ A W of a group, float32 `[width, width]`."""
    own = [value_of(model.get_parameter(f"{member.name}.weight")).to(device).float() for member in reader.members]
    weight = torch.cat(own) * reader.gain.to(device).float()
    stats = outputs.moments.get(reader.name)
    if stats is None:
        return weight.mT @ weight
    blocks = stats.blocks_of(len(weight))
    parts = zip(blocks, weight.split([len(block) for block in blocks]), strict=True)
    return sum((part.mT @ block.to(part) @ part for block, part in parts), weight.new_zeros(()))


def learned_rotation(inputs: Tensor, readers: Tensor, steps: int = STEPS) -> Tensor:
    """Returns the rotation R `[width, width]`, float64, with which the stream x becomes R x.

    M and H of each layer, or of each group of layers with one input, are float32 `[layers, width, width]`.
    """
    rotation = torch.eye(inputs.shape[-1], dtype=torch.float32, device=inputs.device)
    start, gradient = loss_and_gradient(rotation, inputs, readers)
    if not 0 < start < math.inf:
        raise ValueError(f"the second moments of its inputs and gradients give a loss of {start}")
    first, second = torch.zeros_like(rotation), torch.zeros_like(rotation)
    best, least = rotation, start
    for step in range(1, steps + 1):
        skew = (gradient @ rotation.mT) / start
        skew = skew - skew.mT
        first.lerp_(skew, 1 - _DECAYS[0])
        second.lerp_(skew.square(), 1 - _DECAYS[1])
        mean, power = first / (1 - _DECAYS[0] ** step), second / (1 - _DECAYS[1] ** step)
        rate = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        turn = mean / power.sqrt().clamp(min=torch.finfo(power.dtype).tiny)
        rotation = torch.linalg.matrix_exp(-rate * turn) @ rotation
        loss, gradient = loss_and_gradient(rotation, inputs, readers)
        if loss < least:
            best, least = rotation, loss
    rotation = best.double()
    for _ in range(3):  # to the orthonormal matrix next to it, by the iteration of Newton and Schulz
        rotation = 1.5 * rotation - 0.5 * rotation @ rotation.mT @ rotation
    return rotation


def loss_and_gradient(rotation: Tensor, inputs: Tensor, readers: Tensor) -> tuple[float, Tensor]:
    """Returns L(R) and G = dL/dR `[width, width]`; see the module docstring."""
    loss, gradient = rotation.new_zeros(()), torch.zeros_like(rotation)
    together = max(_PRODUCTS // rotation.nbytes, 1)
    for moment, reader in zip(inputs.split(together), readers.split(together), strict=True):
        turned_moment, turned_reader = rotation @ moment, rotation @ reader
        m, h = (turned_moment * rotation).sum(-1), (turned_reader * rotation).sum(-1)
        loss += (m * h).sum()
        gradient += 2 * torch.einsum("ni,nij->ij", h, turned_moment)
        gradient += 2 * torch.einsum("ni,nij->ij", m, turned_reader)
    return float(loss), gradient
