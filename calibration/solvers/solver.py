"""Solvers: from a weight, and what is known of its inputs, to codes and scales.

A solver is any callable of the `Solver` shape; `SOLVERS` maps the names that recipes and `--solver` use to them.
The first ones need no data: they round to nearest and differ in the scale rule alone. `local_hessian` and `gptq`
work from the second moment of the layer's inputs.

`TRANSFORMS` change the problem before it is rounded, by scaling input channels; `STEPS` are a rotation and a branch of
low rank before rounding, and block-wise reconstruction after it. Names compose with "+", in this order:

    scaling + rotation + lowrank + rounding + autoround        awq+gptq, rotation:64+gptq, awq+lowrank:16+gptq

`rotation:64` turns the inputs in blocks of up to 64 at run time; `rotation:merge` turns what the modules around can
take over for nothing, see `calibration.rotation_merge`, and leaves out the rest. Every part may be left out. A
transform with no rounding solver behind it is followed by `mse`, a step by `gptq`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from quant.calibration.solvers.autoround import Reconstruction
from quant.calibration.solvers.awq import channel_scale, search_scale
from quant.calibration.solvers.gptq import corrected_weight, factorize, gptq
from quant.calibration.solvers.local_hessian import local_hessian
from quant.calibration.solvers.peers import quantize_like_compressed_tensors, quantize_like_modelopt
from quant.calibration.statistics import LayerStats, round_activation
from quant.formats.format import Format
from quant.formats.number import BF16, E4M3, E8M0, FP16
from quant.formats.scaling import global_scale_of
from quant.formats.tensor import BlockScaledTensor, checked_amax, quantize
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.solver_names import SolverSpec, parse_solver


class Solver(Protocol):
    """Quantizes one weight.

    Attributes:
        rule: the scale rule whose headroom a shared global scale needs.
    """

    @property
    def rule(self) -> str: ...

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        """Codes and scales for `weight`.

        Args:
            weight: `[..., out, in]`.
            stats: statistics of the layer's inputs, or None.
            format: the target.
            global_scale: second-level scale that the layer's fusion group shares; None for formats without one.
            name: how errors call the layer.
        """
        ...


@dataclass(frozen=True)
class Rounding:
    """Round to nearest, with block scales by one rule."""

    rule: str

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        return quantize(weight, format, rule=self.rule, global_scale=global_scale, name=name)


@dataclass(frozen=True)
class Peer:
    """What another toolkit writes for the same weight, byte for byte."""

    quantize: Any
    rule: str = "max"

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        checked_amax(weight, name)
        return self.quantize(weight, format, global_scale)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LocalHessian:
    """Block scales by the output error of their own block; see `calibration.local_hessian`.

    Attributes:
        feedback: whether errors are fed back within a block.
    """

    feedback: bool = True
    rule: str = "mse"

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        moments = _required(stats, name, "local_hessian").blocks(_block_width(format, name, "local_hessian"))
        return local_hessian(weight.float(), moments, format, global_scale, feedback=self.feedback)


@dataclass(frozen=True)
class Gptq:
    """Second-order rounding; see `calibration.gptq`.

    Attributes:
        damping: added to the diagonal of the second moment, as a fraction of its mean.
        correction: how much of the input error that earlier layers left is made up for, where inputs stay in 16 bit;
            0 for none, 1 for all.
        sweeps: rounds of coordinate descent.
        shortlist: scales of a block that are tried with feedback.
    """

    damping: float = 0.01
    correction: float = 0.5
    sweeps: int = 1
    shortlist: int = 4
    rule: str = "mse"

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        stats = _required(stats, name, "gptq")
        try:
            factor = factorize(stats.second_moment, self.damping)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if factor.damping > self.damping:
            warnings.warn(f"{name}: singular second moment, damped by {factor.damping:g} of its mean", stacklevel=2)
        target = corrected_weight(weight.float(), stats.drift, factor)
        return gptq(target, factor, format, global_scale, sweeps=self.sweeps, shortlist=self.shortlist)


def _required(stats: LayerStats | None, name: str, solver: str) -> LayerStats:
    if stats is None:
        raise ValueError(
            f"{name}: solver {solver!r} needs calibration data; pass a text, or use 'mse', which needs none"
        )
    return stats


def _block_width(format: Format, name: str, solver: str) -> int:
    rows, columns = format.block
    if rows != 1 or columns == 0:
        raise ValueError(
            f"{name}: solver {solver!r} chooses the scales of blocks within a row, and {format.name} has none; "
            "use 'gptq' or 'mse'"
        )
    return columns


# About so many tokens are sampled of what a group reads.
SAMPLED_TOKENS = 1024


@dataclass(frozen=True)
class GroupInputs:
    """What transforms look at: the original inputs of a fusion group.

    Attributes:
        sample: some tokens, `[tokens, in]`, float32.
        mean_abs: mean magnitude of each channel over all tokens, `[in]`.
        amax: largest magnitude of each channel, `[in]`.
    """

    sample: torch.Tensor
    mean_abs: torch.Tensor
    amax: torch.Tensor

    def divided(self, divisor: torch.Tensor) -> GroupInputs:
        """The same inputs divided by `divisor` `[in]`."""
        return GroupInputs(self.sample / divisor, self.mean_abs / divisor, self.amax / divisor)


class Transform(Protocol):
    """Chooses an input scale s for a fusion group: its weights become W diag(s) and its inputs x / s."""

    def __call__(
        self,
        weight: torch.Tensor,
        inputs: GroupInputs,
        format: Format,
        activation: Format | None,
        owner: torch.Tensor | None,
    ) -> torch.Tensor:
        """The scale `[in]`.

        Args:
            weight: of the whole group, `[out, in]`, float32.
            inputs: what the group reads.
            format, activation: of weights and inputs.
            owner: see `awq.channel_scale`.
        """
        ...


@dataclass(frozen=True)
class Awq:
    """Activation-aware scaling: the power of the channel magnitudes that leaves the smallest output error.

    Attributes:
        inputs_alone: where inputs are rounded too, their rounding decides and that of weights does not count: before
            GPTQ, which makes up for most of it. Chosen on held-out rows of the first blocks of SmolLM2-135M.
        rows: at most so many output rows take part in the search.
    """

    inputs_alone: bool = False
    rows: int = 512

    def __call__(
        self,
        weight: torch.Tensor,
        inputs: GroupInputs,
        format: Format,
        activation: Format | None,
        owner: torch.Tensor | None,
    ) -> torch.Tensor:
        def round_weight(scaled: torch.Tensor) -> torch.Tensor:
            if self.inputs_alone and activation:
                return scaled
            second = shared_global_scale(scaled.abs().amax(), format, "max") if format.global_scale else None
            return round_activation(scaled, format, second)  # the same values, without codes in between

        part = weight[:: -(-len(weight) // self.rows)]
        round_input = (lambda x: round_activation(x, activation, None)) if activation else None
        return search_scale(part, inputs.sample, inputs.mean_abs, round_weight, round_input, owner)


@dataclass(frozen=True)
class SmoothQuant:
    """Half of each channel's range moves from the activations to the weights (Xiao et al., 2022)."""

    power: float = 0.5

    def __call__(
        self,
        weight: torch.Tensor,
        inputs: GroupInputs,
        format: Format,
        activation: Format | None,
        owner: torch.Tensor | None,
    ) -> torch.Tensor:
        return channel_scale(inputs.amax, weight, self.power, 1 - self.power, owner)


@dataclass(frozen=True)
class Pipeline:
    """Transforms, then rounding: what a name such as `awq+gptq` stands for.

    Attributes:
        spec: the name's parts.
        transforms: choose input scales, in this order.
        rounding: gives codes and scales.
        reconstruction: how the finished block is refined, if it is.
    """

    spec: SolverSpec
    transforms: tuple[Transform, ...]
    rounding: Solver
    reconstruction: Reconstruction | None = None

    @property
    def rule(self) -> str:
        return self.rounding.rule

    @property
    def needs_moment(self) -> bool:
        """Whether rounding or branch look at the second moment of the inputs."""
        return self.spec.rank > 0 or isinstance(self.rounding, Gptq | LocalHessian)

    @property
    def needs_data(self) -> bool:
        """Whether it works from calibration inputs."""
        return self.transforms != () or self.reshapes or self.needs_moment

    @property
    def reshapes(self) -> bool:
        """Whether more is done to a block than scaling and rounding its layers."""
        return bool(self.spec.rotation or self.spec.rank or self.spec.merge or self.reconstruction)

    @property
    def correction(self) -> float:
        """How much of the error of earlier layers this one makes up for."""
        return self.rounding.correction if isinstance(self.rounding, Gptq) else 0.0

    @property
    def at_once(self) -> bool:
        """Whether all layers of a block can be solved from one pass over the original inputs."""
        return not self.transforms and not self.reshapes and isinstance(self.rounding, LocalHessian)

    def __call__(
        self, weight: torch.Tensor, stats: Any, format: Format, *, global_scale: torch.Tensor | None, name: str
    ) -> BlockScaledTensor:
        if self.transforms:
            _required(stats, name, self.spec.name)
        return self.rounding(weight, stats, format, global_scale=global_scale, name=name)


SOLVERS: dict[str, Solver] = {
    "rtn": Rounding("max"),
    "mse": Rounding("mse"),
    "four_over_six": Rounding("four_over_six"),
    "ocp": Rounding("ocp"),
    "even": Rounding("even"),
    "modelopt": Peer(quantize_like_modelopt),
    "compressed_tensors": Peer(quantize_like_compressed_tensors),
    "local_hessian": LocalHessian(),
    "gptq": Gptq(),
}

TRANSFORMS: dict[str, Transform] = {
    "awq": Awq(),
    "smoothquant": SmoothQuant(),
}


def get_solver(name: str) -> Solver:
    """The solver called `name`: a key of `SOLVERS`, or transforms and one such key joined by "+".

    Raises:
        ValueError: an unknown part, or parts in an order that makes no sense; the message lists the known ones.
    """
    return SOLVERS[name] if name in SOLVERS else get_pipeline(name)


def get_pipeline(name: str) -> Pipeline:
    """The solver called `name`, taken apart: scaling, rotation, branch, rounding, reconstruction, in this order.

    Raises:
        ValueError: an unknown part, a part out of order, or a number that a part does not take.
    """
    spec = parse_solver(name, tuple(SOLVERS), tuple(TRANSFORMS))
    rounding = SOLVERS[spec.rounding]
    transforms = [TRANSFORMS[key] for key in spec.transforms]
    if isinstance(rounding, Gptq):
        transforms = [replace(t, inputs_alone=True) if isinstance(t, Awq) else t for t in transforms]
    reconstruction = Reconstruction(steps=spec.autoround) if spec.autoround else None
    return Pipeline(spec, tuple(transforms), rounding, reconstruction)


_STORED_NUMBER = {torch.float16: FP16, torch.bfloat16: BF16}


def supports(solver: Solver, format: Format) -> bool:
    """Whether a rounding solver can give weights in `format`."""
    rows, columns = format.block
    if isinstance(solver, LocalHessian):
        return rows == 1 and columns > 0
    needed = {"four_over_six": E4M3, "ocp": E8M0, "even": E8M0}.get(solver.rule)
    return needed is None or format.scale is needed


def check_solvers(plan: Plan) -> None:
    """Raises ValueError, with the layer's name and the way out, where a planned solver does not know its format."""
    for layer in plan.quantized:
        assert layer.weight is not None
        pipeline = get_pipeline(layer.solver)
        if not supports(pipeline.rounding, layer.weight):
            known = [name for name, solver in SOLVERS.items() if supports(solver, layer.weight)]
            raise ValueError(
                f"{layer.name}: solver {layer.solver!r} does not support {layer.weight}; those that do: "
                f"{', '.join(known)}"
            )


def with_supported_solver(layer: LayerPlan) -> LayerPlan:
    """`layer`, which has a new format, with "mse" in place of a rounding solver that does not know that format."""
    pipeline = get_pipeline(layer.solver)
    if layer.weight is None or supports(pipeline.rounding, layer.weight):
        return layer
    name = layer.solver.replace(pipeline.spec.rounding, "mse")
    reason = f"{layer.reason}; solver {name}, because {pipeline.spec.rounding} does not support {layer.weight}"
    return replace(layer, solver=name, reason=reason)


def shared_global_scale(amax: torch.Tensor, format: Format, rule: str) -> torch.Tensor:
    """Second-level scale of a fusion group whose largest magnitude is `amax`, float32 of the shape of `amax`.

    One checkpoint layout stores this scale and the other its reciprocal. Rounding through the reciprocal once
    (at most one unit in the last place) gives a value that survives both, so what is solved is what is loaded.
    """
    scale = global_scale_of(amax, format, rule)
    return 1 / (1 / scale)


def solve_group(
    weights: Mapping[str, torch.Tensor],
    stats: Mapping[str, Any],
    format: Format,
    solver: Solver,
    stored: torch.dtype | None = None,
) -> dict[str, BlockScaledTensor]:
    """Quantizes the weights of one fusion group, with one global scale where the format has one.

    Args:
        weights: `[out, in]` by layer name; or a single `[experts, out, in]`.
        stats: input statistics by layer name.
        format: shared by the group.
        solver: from `SOLVERS`.
        stored: dtype of the model, where the weights come in a wider one. Wide scales (FP8, INT8) are stored in it,
            so they are chosen among its values, and elements are rounded against what a checkpoint can hold.
    """
    if stored in _STORED_NUMBER and format.scale.is_wide:
        solved = solve_group(weights, stats, replace(format, scale=_STORED_NUMBER[stored]), solver)
        return {name: replace(weight, format=format) for name, weight in solved.items()}
    global_scale = None
    if format.global_scale:
        amax = torch.stack([checked_amax(weight, name) for name, weight in weights.items()]).amax(dim=0)
        if isinstance(solver, Peer):
            global_scale = amax  # a peer derives its own scale, in its own arithmetic
        else:
            global_scale = shared_global_scale(amax, format, solver.rule)
    return {
        name: solver(weight, stats.get(name), format, global_scale=global_scale, name=name)
        for name, weight in weights.items()
    }
