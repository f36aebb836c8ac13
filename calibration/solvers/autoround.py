"""`reconstruct_block` learns rounding and scales of a whole decoder block, so that its output is right.

GPTQ solves each layer for its own output. Here all layers of a block are learned together, for the output that the
next block reads, attention and nonlinearities included (SignRound, Cheng et al., 2023; BRECQ, Li et al., 2021). Each
weight has a latent value z, each block scale a factor exp(d), and the block runs with

    values = step · round(z / step),    step = global_scale · round_E4M3(scale · exp(d))

Rounding is straight-through, so the gradient of d is LSQ's: round(z / step) - z / step, and ±max where z saturates.
z starts at the unrounded weight where that rounds to the given codes, and at the codes' values elsewhere: learning
starts from exactly the given solution, such as GPTQ's. Distances are counted in steps, so that one learning rate
serves all layers; it falls to zero, and z can move by about half the sum of all rates.

The error of each token is relative to the token's size: a norm follows, and otherwise the few tokens with enormous
hidden states (the first of a text) would outweigh all others. Held-out rows choose the state that is returned, which
may be the given one.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from quant.calibration.solvers.rotation import matrix_of
from quant.calibration.statistics import round_activation
from quant.formats.format import E4M3, Format
from quant.formats.rounding import decode, round_to
from quant.formats.tensor import BlockScaledTensor, quantize_with_scale
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.blocks import Call, Substitute, replaced, take_hooks


@dataclass(frozen=True, eq=False)
class BlockLayer:
    """A linear layer of the block as it was solved."""

    weight: Tensor  # the matrix that was rounded, [out, in]: after scaling, rotation and branch
    quantized: BlockScaledTensor  # codes and scales to start from
    activation: Format | None = None  # format of the input, or None
    input_scale: Tensor | None = None  # static scale of that format, where it has one
    # The operations of the layer at run time besides its matmul.
    parts: RunTimeParts = field(default_factory=RunTimeParts)


@dataclass(frozen=True)
class Reconstruction:
    """Settings of the optimizer."""

    steps: int = 200  # optimizer steps, each on one call of the block
    rate: float = 0.01  # learning rate of latent values at the start, in grid steps
    scale_rate: float = 0.002  # the same for the logarithms of block scales; 0 leaves scales as they are
    held_out: float = 0.125  # share of the calls that only judge; at least one where there are two
    checks: int = 8  # how many times the held-out calls are evaluated


@dataclass(frozen=True, eq=False)
class Reconstructed:
    """The block as it is now."""

    weights: dict[str, BlockScaledTensor]  # the weights by layer name
    before: float  # error on the held-out calls, as `reconstruction_error` counts it
    after: float


def reconstruct_block(
    block: nn.Module,
    calls: Sequence[Call],
    targets: Sequence[Tensor],
    layers: Mapping[str, BlockLayer],
    settings: Reconstruction = Reconstruction(),
) -> Reconstructed:
    """Refines the codes and scales of a block's layers so that its outputs `[..., hidden]` come closer to `targets`.

    Global scales stay. The error on the held-out calls is never larger than before; a single call serves for both
    learning and judging. The calls are on the hidden states that the quantized blocks before give, and the block, which
    may have any modules under the names of `layers`, runs in their dtype.
    """
    learned = {name: _Learned(layer, block.get_submodule(name)) for name, layer in layers.items()}
    # The last calls are held out, and the first ones are learned from.
    judges = max(round(settings.held_out * len(calls)), 1) if len(calls) > 1 else 0
    pairs = list(zip(calls, targets, strict=True))
    training, held_out = (pairs[:-judges], pairs[-judges:]) if judges else (pairs, pairs)
    own = {id(p) for layer in learned.values() for p in (layer.latent, layer.factor)}
    # Only learned parameters take gradients.
    frozen = replaced((p, "requires_grad", False) for p in block.parameters() if p.requires_grad and id(p) not in own)
    with _in_place(block, learned), frozen:
        before = after = _error(block, held_out)
        # The start counts as a candidate, so that the error never grows.
        best = {name: layer.state() for name, layer in learned.items()}
        groups: list[dict[str, Any]] = [{"params": [each.latent for each in learned.values()], "first": settings.rate}]
        scales = [each.factor for each in learned.values() if each.learns_scale]
        if scales and settings.scale_rate > 0:
            groups.append({"params": scales, "first": settings.scale_rate})
        optimizer = torch.optim.Adam(groups, lr=settings.rate, betas=(0.9, 0.99))
        every = max(settings.steps // settings.checks, 1)
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                # Linear decay to zero, as in AutoRound (Cheng et al., 2023).
                group["lr"] = group["first"] * (1 - step / settings.steps)
            call, target = training[step % len(training)]
            with torch.enable_grad():
                reconstruction_error(call.output(block(*call.args, **call.kwargs)), target).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % every == 0 and (error := _error(block, held_out)) < after:
                after, best = error, {name: layer.state() for name, layer in learned.items()}
    weights = {name: layers[name].quantized if after == before else best[name] for name in layers}
    return Reconstructed(weights, before, after)


def reconstruction_error(output: Tensor, target: Tensor) -> Tensor:
    """Returns the mean over tokens of ‖output - target‖² / ‖target‖², float32 scalar."""
    size = target.float().square().sum(-1)
    wrong = (output.float() - target.float()).square().sum(-1)
    return (wrong / size.clamp(min=torch.finfo(torch.float32).tiny)).mean()


def _error(block: nn.Module, pairs: Sequence[tuple[Call, Tensor]]) -> float:
    with torch.no_grad():
        errors = [reconstruction_error(call.output(block(*call.args, **call.kwargs)), target) for call, target in pairs]
    return float(torch.stack(errors).mean())


class _Rounded(torch.autograd.Function):
    """values = step · round(latent · first_step / step); rounding lets gradients pass, saturation stops them.

    Steps are `[block rows, block columns]` of blocks, the rest is `[out, in]`.
    """

    @staticmethod
    def forward(ctx: Any, latent: Tensor, step: Tensor, first_step: Tensor, format: Format) -> Tensor:
        ctx.save_for_backward(latent, step, first_step)
        ctx.format = format
        if _is_fused(latent, format):
            from quant.kernels.rounding.portable_solvers import learned_values

            return learned_values(latent, first_step, step)
        spread = _spread(step, latent.shape, format)
        in_steps = latent * _spread(first_step, latent.shape, format) / spread
        return round_to(in_steps, format.element) * spread

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        latent, step, first_step = ctx.saved_tensors
        (gradient,) = gradients
        if _is_fused(latent, ctx.format):
            from quant.kernels.rounding.portable_solvers import learned_gradient

            return *learned_gradient(latent, first_step, step, gradient), None, None
        element = ctx.format.element
        first = _spread(first_step, latent.shape, ctx.format)
        in_steps = latent * first / _spread(step, latent.shape, ctx.format)
        free = (in_steps >= element.min) & (in_steps <= element.max)
        nearest = round_to(in_steps, element)
        # d values / d step = round(v) - v inside the range, and the largest value beyond it (LSQ, Esser et al., 2019).
        rows, columns = ctx.format.block_shape(latent.shape)
        of_step = gradient * (nearest - in_steps * free)
        of_step = pad(of_step, (0, -latent.shape[1] % columns, 0, -latent.shape[0] % rows))
        of_step = of_step.unflatten(1, (-1, columns)).sum(-1).unflatten(0, (-1, rows)).sum(1)
        return gradient * first * free, of_step, None, None


def _is_fused(x: Tensor, format: Format) -> bool:
    return x.is_cuda and format.is_nvfp4 and x.shape[-1] % format.block[1] == 0


def _spread(scale: Tensor, shape: tuple[int, ...], format: Format) -> Tensor:
    rows, columns = shape
    block_rows, block_columns = format.block_shape((rows, columns))
    return scale.repeat_interleave(block_rows, 0)[:rows].repeat_interleave(block_columns, 1)[:, :columns]


class _Learned(Substitute):
    """A layer while it is learned: latent values in grid steps, and logarithms of scale factors."""

    first_scale: Tensor
    first_step: Tensor
    second: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    def __init__(self, layer: BlockLayer, original: Any) -> None:
        super().__init__()
        self.layer = layer
        self.bias, self.dtype = original.bias, original.weight.dtype
        quantized = layer.quantized
        self.format = quantized.format
        self.register_buffer("first_scale", decode(quantized.scale, quantized.format.scale), persistent=False)
        second = quantized.global_scale
        second = quantized.codes.new_ones((), dtype=torch.float32) if second is None else second.float()
        self.register_buffer("second", second, persistent=False)
        self.register_buffer("first_step", self.first_scale * self.second, persistent=False)
        self.learns_scale = quantized.format.scale is E4M3
        values, weight = quantized.dequantize(), layer.weight.float()
        step = _spread(self.first_step, weight.shape, self.format)
        same_code = round_to(weight / step, quantized.format.element).mul_(step) == values
        # From the original weight where that rounds to the code that was chosen, else from the code itself.
        self.latent = nn.Parameter(torch.where(same_code, weight, values).div_(step))
        self.factor = nn.Parameter(torch.zeros_like(self.first_scale), requires_grad=self.learns_scale)
        self.read_from(original)

    def _scale(self) -> Tensor:
        """Returns block scales on their grid; the gradient sees no grid."""
        if not self.learns_scale:
            return self.first_scale
        free = self.first_scale * self.factor.exp()
        nearest = round_to(free.detach(), E4M3).clamp_(min=E4M3.min_subnormal)
        return free + (nearest - free).detach()

    @property
    def weight(self) -> Tensor:
        return matrix_of(self.values(), self.layer.parts).to(self.dtype)

    def values(self) -> Tensor:
        step = self._scale() * self.second if self.learns_scale else self.first_step
        return _Rounded.apply(self.latent, step, self.first_step, self.format)  # type: ignore[no-untyped-call]

    def forward(self, input: Tensor) -> Tensor:
        x = self.layer.parts.input(input)
        rounded = x
        if self.layer.activation is not None:
            rounded = _RoundedInput.apply(x, self.layer.activation, self.layer.input_scale)  # type: ignore[no-untyped-call]
        y = nn.functional.linear(rounded, self.values().to(x.dtype), self.bias)
        branch = self.layer.parts.branch(x)
        return y if branch is None else y + branch

    def state(self) -> BlockScaledTensor:
        with torch.no_grad():
            # Straight-through sums may miss the grid by a last place, which must not reach the codes.
            scale = round_to(self._scale(), E4M3) if self.learns_scale else self.first_scale
            return quantize_with_scale(self.values(), self.format, scale, self.layer.quantized.global_scale)


class _RoundedInput(torch.autograd.Function):
    """An input as the quantized layer sees it; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Format, input_scale: Tensor | None) -> Tensor:
        return round_activation(x, activation, input_scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


@contextmanager
def _in_place(block: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Puts `modules` in the places of the block's modules of these names while open."""
    before = {name: block.get_submodule(name) for name in modules}
    for name, module in modules.items():
        take_hooks(module, before[name])
        block.set_submodule(name, module)
    try:
        yield
    finally:
        for name, module in before.items():
            block.set_submodule(name, module)
