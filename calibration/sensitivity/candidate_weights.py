"""`CandidateWeights` holds the weights of layers in all candidate formats: packed, and dense while a budget lasts.

Packed weights of all candidates together take less than the 16-bit model. They are dequantized when used; dense ones
stay while they fit into the budget.

For a solver that needs data the weights are solved beforehand (`group_solutions`). If it divides the input by s, the
weight is Q(W s) / s and the input Q(x / s) s, which have the same product, so that all candidates of a weight can be
compared. A branch, which sees the input x unrounded, is used as x_q (W_q + B A)ᵀ + (x − x_q) (B A)ᵀ, likewise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quant.calibration.fast_matmul import difference_dtype
from quant.calibration.placement import NARROW
from quant.calibration.sensitivity.candidates import Candidate
from quant.calibration.sensitivity.group_solutions import GroupSolution, Key
from quant.calibration.sensitivity.switchable_layer import SwitchableLayer
from quant.calibration.solvers.solve_group import solve_group
from quant.calibration.solvers.registry import get_solver
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import LayerPlan


@dataclass(eq=False)
class CandidateWeights:
    """The weights of a `SwitchableModel`; see the module docstring.

    Attributes:
        groups: fusion groups by name.
        layers: the switchable layers by name, with the original weights.
        solver: rounds the weights; one that needs no data.
        stored: dtype that scales are rounded to; None takes the dtype of the weights.
        solutions: groups in a format that another solver has solved, as `solve_each_group` gives them.
        device: the device where weights are used; None leaves them where they are.
        dtype: dtype to which 16-bit weights are widened; None leaves them.
        budget: bytes of dense weights that may be cached.
    """

    groups: Mapping[str, Sequence[LayerPlan]]
    layers: Mapping[str, SwitchableLayer]
    solver: str
    stored: torch.dtype | None
    solutions: Mapping[Key, GroupSolution]
    device: torch.device | None
    dtype: torch.dtype | None
    budget: int
    _solved: dict[Key, dict[str, BlockScaledTensor]] = field(default_factory=dict)
    _dense: dict[tuple[str, ...], torch.Tensor] = field(default_factory=dict)

    def clear_dense(self) -> None:
        """Frees the dense weights; packed ones stay for the next time that the model is entered."""
        self._dense.clear()

    def moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a weight where the model runs and as it is used there."""
        return tensor.to(self.device, self._dtype_of(tensor))

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.dtype in NARROW else tensor.dtype

    def solved(self, group: str, candidate: Candidate) -> dict[str, BlockScaledTensor]:
        """Returns the codes and scales of a group in a format, solved on first use."""
        key = (group, candidate.name)
        if key in self.solutions:
            return dict(self.solutions[key].weights)
        if key not in self._solved:
            weights = {m.name: self.layers[m.name].original for m in self.groups[group]}
            # Solved on the device of the run in the dtype of the checkpoint, as `quantize` does; kept packed where the
            # original weight is.
            home = next(iter(weights.values())).device
            weights = {name: w.to(self.device, self.stored or w.dtype) for name, w in weights.items()}
            self._solved[key] = {}
            for part in self._parts(weights):
                solved = solve_group(part, {}, candidate.weight_format, get_solver(self.solver))
                self._solved[key] |= {name: weight.to(home) for name, weight in solved.items()}
        return self._solved[key]

    def _parts(self, weights: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Returns the weights that are solved together: a whole group, but each fused-experts projection apart."""
        stacked = [name for name, weight in weights.items() if weight.dim() == 3]
        return [{name: weights[name]} for name in stacked] if stacked else [weights]

    def dense(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor:
        """Returns the weight `[out, in]` in a format, of expert `index` if it is given."""
        key = (layer.plan.name, candidate.name)
        if key in self._dense:
            return self._dense[key] if index is None else self._dense[key][index]
        # The original in 16 bit needs no room in the cache, unless it is on another device.
        if candidate.weight is None and layer.original.device == (self.device or layer.original.device):
            return layer.original if index is None else layer.original[index]
        if self._fits(layer, self._dtype_of(layer.original)):
            self._dense[key] = self._values(layer, candidate)
            return self.dense(layer, candidate, index)
        return self._values(layer, candidate, index)

    def _restored(self, layer: SwitchableLayer, candidate: Candidate, quantized: BlockScaledTensor) -> torch.Tensor:
        """Returns dense values for the input as the model gives it, a branch included."""
        dense = quantized.to(self.device or quantized.codes.device).dequantize(self._dtype_of(layer.original))
        solution = self.solutions.get((layer.group, candidate.name))
        if solution is not None and layer.plan.name in solution.branches:
            down, up = solution.branches[layer.plan.name]
            dense = torch.addmm(dense, up.to(dense), down.to(dense))
        return dense if solution is None or solution.divisor is None else dense / solution.divisor.to(dense)

    def branch_output(
        self, layer: SwitchableLayer, candidate: Candidate, x: torch.Tensor, rounded: torch.Tensor
    ) -> torch.Tensor | None:
        """Returns the branch's output for the rounding error x − x_q, `[..., out]`.

        None without a branch or rounded input.

        `dense` includes B A and is multiplied by x_q, so only (x − x_q) (B A)ᵀ is missing.
        """
        solution = self.solutions.get((layer.group, candidate.name))
        if candidate.activation is None or solution is None or layer.plan.name not in solution.branches:
            return None
        down, up = (part.to(x) for part in solution.branches[layer.plan.name])
        error = x - rounded
        # x and x_q come in the model's units here; A and B were fitted to the input divided by s.
        error = error if solution.divisor is None else error / solution.divisor.to(error)
        return error @ down.t() @ up.t()

    def narrow(self, layer: SwitchableLayer, candidate: Candidate) -> torch.Tensor:
        """Returns the weight for products with small differences: BF16 where that is fast."""
        return self._narrowed(layer, (candidate.name, "narrow"), lambda: self._values(layer, candidate))

    def difference(
        self, layer: SwitchableLayer, candidate: Candidate, present: Candidate, index: int | None = None
    ) -> torch.Tensor | None:
        """Returns the weight in `candidate` minus the weight in `present`, `[out, in]`, as `narrow`.

        None if they are equal.
        """
        # Two candidates with one weight format have equal weights, unless a solver from data fitted each to its inputs.
        solved = {(layer.group, candidate.name), (layer.group, present.name)} & self.solutions.keys()
        if candidate.weight == present.weight and not solved:
            return None
        if index is not None:  # of experts, single matrices are not cached
            return self.dense(layer, candidate, index) - self.dense(layer, present, index)
        return self._narrowed(
            layer,
            (candidate.name, present.name, "difference"),
            lambda: self._values(layer, candidate) - self.dense(layer, present),
        )

    def _values(self, layer: SwitchableLayer, candidate: Candidate, index: int | None = None) -> torch.Tensor:
        """Returns the values of `dense` without adding them to the cache."""
        dense = self._dense.get((layer.plan.name, candidate.name))
        if dense is not None:
            return dense if index is None else dense[index]
        if candidate.weight is None:
            return self.moved(layer.original if index is None else layer.original[index])
        quantized = self.solved(layer.group, candidate)[layer.plan.name]
        return self._restored(layer, candidate, quantized if index is None else quantized.matrix(index))

    def _narrowed(
        self, layer: SwitchableLayer, form: tuple[str, ...], make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        # `form` is a candidate and "narrow", or two candidates and "difference"; both use the budget of dense weights.
        key = (layer.plan.name, *form)
        if key in self._dense:
            return self._dense[key]
        weight = make()
        weight = weight.to(difference_dtype(weight) or weight.dtype)
        if self._fits(layer, weight.dtype):
            self._dense[key] = weight
        return weight

    def _fits(self, layer: SwitchableLayer, dtype: torch.dtype) -> bool:
        """Returns whether the cache has room for one more weight."""
        cached = sum(weight.nbytes for weight in self._dense.values())
        return cached + layer.plan.numel * dtype.itemsize <= self.budget
