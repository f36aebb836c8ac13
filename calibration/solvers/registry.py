"""The dicts `SOLVERS` and `TRANSFORMS` hold the parts of solvers; a `Pipeline` has the parts of a whole name.

`SOLVERS` are the roundings, each in a file of its own; `TRANSFORMS` scale input channels before. Names compose with
"+", in this order:

    scaling + rotation + lowrank + residual + rounding + autoround

    awq+gptq, rotation:64+gptq, awq+lowrank:16+gptq, awq:merge+residual:32+gptq

`rotation:64` rotates the inputs in blocks of up to 64 at run time; `rotation:merge` rotates only where the modules
around can absorb the rotation (see `rotation`), `rotation:learned` rotates the residual stream by a matrix that
is learned for FP8 (see `learned_rotation`), and `awq:merge` scales only where they can absorb the scale (see `fold`).
Every part may be left out: a transform without a rounding is followed by `mse`, a rotation, branch or reconstruction by
`gptq`.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from quant.calibration.solvers.autoround import Reconstruction
from quant.calibration.solvers.awq import Awq, SmoothQuant
from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.interfaces import Shares, Solver, Transform, required_stats
from quant.calibration.solvers.kfac import Kfac
from quant.calibration.solvers.local_hessian import LocalHessian
from quant.calibration.solvers.peers import Peer, quantize_like_compressed_tensors, quantize_like_modelopt
from quant.calibration.statistics import LayerStats
from quant.formats.format import E4M3, E8M0, Format
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.recipes import solver_names
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.solver_names import STEPS, SolverSpec, parse_solver, without_residual


@dataclass(frozen=True)
class RoundToNearest(Solver):
    """Round to nearest, with block scales by one rule."""

    rule: str

    def supports(self, format: Format) -> bool:
        # Rules that are defined for one kind of scale: NVFP4's 4/6 choice, and the MX specification's exponents.
        needed = {"four_over_six": E4M3, "ocp": E8M0, "even": E8M0}.get(self.rule)
        return needed is None or format.scale is needed

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        return quantize(weight, format, rule=self.rule, global_scale=global_scale, name=name)


SOLVERS: dict[str, Solver] = {
    "rtn": RoundToNearest("max"),
    "mse": RoundToNearest("mse"),
    "four_over_six": RoundToNearest("four_over_six"),
    "ocp": RoundToNearest("ocp"),
    "even": RoundToNearest("even"),
    "modelopt": Peer(quantize_like_modelopt),
    "compressed_tensors": Peer(quantize_like_compressed_tensors),
    "local_hessian": LocalHessian(),
    "gptq": Gptq(),
    "kfac": Kfac(),
    "gptq_plain": Gptq(shares=Shares(drift=0.5), rounded_shares=Shares()),
}

TRANSFORMS: dict[str, Transform] = {"awq": Awq(), "smoothquant": SmoothQuant()}


@dataclass(frozen=True)
class Pipeline(Solver):
    """Transforms, then rounding: the meaning of a name such as `awq+gptq`."""

    spec: SolverSpec  # the name's parts
    transforms: tuple[Transform, ...]  # choose input scales, in this order
    rounding: Solver  # gives codes and scales
    reconstruction: Reconstruction | None = None  # how the finished block is refined, if it is

    @property
    def rule(self) -> str:  # type: ignore[override]
        return self.rounding.rule

    @property
    def needs_moment(self) -> bool:  # type: ignore[override]
        """Whether rounding or branch look at the second moment of the inputs."""
        return self.spec.rank > 0 or self.rounding.needs_moment

    @property
    def needs_data(self) -> bool:
        """Whether it works from calibration inputs."""
        return self.transforms != () or self.reshapes or self.needs_moment

    @property
    def reshapes(self) -> bool:
        """Whether more is done to a block than scaling and rounding its layers."""
        spec = self.spec
        return bool(spec.rotation or spec.rank or spec.residual or spec.merges_rotations or self.reconstruction)

    @property
    def at_once(self) -> bool:
        """Whether all layers of a block can be solved from one pass over the original inputs."""
        return not self.transforms and not self.reshapes and self.rounding.looks_in_blocks

    def __call__(
        self, weight: Tensor, stats: LayerStats | None, format: Format, *, global_scale: Tensor | None, name: str
    ) -> BlockScaledTensor:
        if self.transforms:
            required_stats(stats, name, self.spec.name)
        return self.rounding(weight, stats, format, global_scale=global_scale, name=name)


def get_solver(name: str) -> Solver:
    """Returns the solver called `name`: a key of `SOLVERS`, or transforms and one such key joined by "+"."""
    return SOLVERS[name] if name in SOLVERS else get_pipeline(name)


def get_pipeline(name: str) -> Pipeline:
    """Returns the parts of the solver called `name`; ValueError for a part that is unknown or out of order."""
    spec = parse_solver(name)
    rounding = SOLVERS[spec.rounding]
    transforms = tuple(TRANSFORMS[key].followed_by(rounding, spec.rank) for key in spec.transforms)
    return Pipeline(spec, transforms, rounding, Reconstruction(steps=spec.autoround) if spec.autoround else None)


# The names are data of `recipes.solver_names`, so that plans are checked without importing a solver.
assert (tuple(SOLVERS), tuple(TRANSFORMS)) == (solver_names.ROUNDINGS, solver_names.TRANSFORMS)
assert all(get_pipeline(name).needs_data == parse_solver(name).needs_data for name in (*SOLVERS, *TRANSFORMS, *STEPS))


def check_solvers(plan: Plan) -> None:
    """Raises ValueError, with the layer's name and the way out, where a planned solver does not know its format."""
    _check_learned_rotations(plan)
    for layer in plan.quantized:
        pipeline = get_pipeline(layer.solver)
        if pipeline.reconstruction is not None and layer.weight_format.has_packed_scales:
            raise ValueError(
                f"{layer.name}: solver {layer.solver!r} trains roundings, and not those of {layer.weight_format}; take "
                f"{pipeline.spec.rounding}"
            )
        if not pipeline.rounding.supports(layer.weight_format):
            supporting = [name for name, solver in SOLVERS.items() if solver.supports(layer.weight_format)]
            raise ValueError(
                f"{layer.name}: solver {layer.solver!r} does not support {layer.weight_format}; solvers that do: "
                f"{', '.join(supporting)}"
            )
        if pipeline.spec.residual and not takes_residual(layer):
            raise ValueError(
                f"{layer.name}: solver {layer.solver!r} is for weights and inputs in nvfp4, and this layer has "
                f"{layer.formats}; take {without_residual(layer.solver)!r} for it"
            )


def _check_learned_rotations(plan: Plan) -> None:
    """Raises ValueError where a rotation is learned for another format than FP8, or beside one that is merged."""
    merging = {layer.name: get_pipeline(layer.solver).spec for layer in plan.quantized}
    merging = {name: spec for name, spec in merging.items() if spec.merges_rotations}
    first = next((name for name, spec in merging.items() if spec.learns_rotation), None)
    if first is None:
        return
    for name, spec in merging.items():
        format = plan.by_name[name].weight_format
        if not spec.learns_rotation:
            raise ValueError(
                f"{name}: {spec.name} would rotate the residual stream again, which {first} has rotated as learned; "
                "take one of the two for all layers"
            )
        if format.element.is_integer or format.element.bits != 8:
            raise ValueError(
                f"{name}: a rotation is learned for FP8, whose errors are a share of each value, and makes "
                f"{format} worse; take rotation:merge, or none"
            )


def takes_residual(layer: LayerPlan) -> bool:
    """Returns whether one NVFP4 product can take both copies of a residual channel's column."""
    return all(format is not None and format.is_nvfp4 for format in (layer.weight, layer.activation))


def with_supported_solver(layer: LayerPlan) -> LayerPlan:
    """Returns `layer` with "mse" in place of a rounding solver that does not support the layer's new format.

    Residual channels that do not suit it are left out.
    """
    if not takes_residual(layer):
        layer = replace(layer, solver=without_residual(layer.solver))
    pipeline = get_pipeline(layer.solver)
    if layer.weight is None or pipeline.rounding.supports(layer.weight):
        return layer
    # The parts before the rounding stay; `mse` supports every format.
    name = layer.solver.replace(pipeline.spec.rounding, "mse")
    reason = f"{layer.reason}; solver {name}, because {pipeline.spec.rounding} does not support {layer.weight}"
    return replace(layer, solver=name, reason=reason)
