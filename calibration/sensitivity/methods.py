"""The three methods that score formats. Each divides its work into units, which ranks share.

FisherMethod   a unit is a row: one forward and one backward pass for each probe
OutputMethod   a unit is a row: one forward pass
KlMethod       a unit is a block: each of its groups in each format, from the block to the end of the model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quant.recipes.blocks import all_arguments, removing
from quant.calibration.sensitivity.baseline import Baseline
from quant.calibration.sensitivity.divergence import Divergence, NotFinite, finite
from quant.calibration.sensitivity.switchable_layer import SwitchableLayer
from quant.calibration.sensitivity.switchable_model import SwitchableModel
from quant.calibration.sensitivity.token_products import Allowed, TokenProducts, observed
from quant.calibration.sensitivity.work_units import Result, total


@dataclass
class Method:
    """The model, the groups and formats to score, and the text; units of work are rows unless a method overrides it."""

    switchable: SwitchableModel
    allowed: Allowed
    rows: torch.Tensor
    divergence: Divergence
    seed: int

    def __post_init__(self) -> None:
        self.names = [f"row {i}" for i in range(len(self.rows))]

    def work(self, name: str) -> Result:
        """Returns the sums of one unit, by group and format."""
        raise NotImplementedError

    def finish(self, sums: Result) -> Result:
        """Returns the scores from the sums over all units."""
        return sums


class FisherMethod(Method):
    """One unit is one row: a forward and a backward pass for each probe."""

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        # One generator a row: its draws do not depend on which rank scores which rows.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        row = self.rows[index : index + 1]
        self.switchable.set({})
        squares: dict[str, Result] = {}
        for probe in range(self.divergence.probes):
            products = TokenProducts(self.switchable, self.allowed)
            with observed(self.switchable, products.observe, row.numel()):
                self.divergence.probe(row, generator, index)
            if self.divergence.by_token:
                # Errors of tokens are independent: Σ over tokens of (g · δ)².
                squares[str(probe)] = products.squares()
            else:
                # Tokens are averaged before they are compared: (Σ over tokens of g · δ)².
                sums = products.sums()
                squares[str(probe)] = {g: {c: v * v for c, v in scores.items()} for g, scores in sums.items()}
        return total(squares)

    def finish(self, sums: Result) -> Result:
        # The mean over positions and probes of ½ (g · δ)².
        count = self.divergence.count(self.rows) * self.divergence.probes
        return {group: {c: 0.5 * v / count for c, v in scores.items()} for group, scores in sums.items()}


class OutputMethod(Method):
    """One unit is one row: a forward pass in which every layer also computes its output in each format."""

    def work(self, name: str) -> Result:
        index = int(name.split()[1])
        sums: Result = {}

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> None:
            assert isinstance(module, SwitchableLayer)
            args = all_arguments(args, kwargs)
            # The empty name holds Σ ‖Y‖², the denominator of every format's score.
            group_sums = sums.setdefault(module.group, {"": 0.0})
            layer = module.plan.name
            group_sums[""] += finite(float(out.double().square().sum()), f"{layer} in 16 bit", "its output")
            expert = args[1] if len(args) > 1 else None
            for candidate in self.allowed[module.group]:
                if candidate.weight is None:
                    continue
                weight = self.switchable.weights.dense(module, candidate, expert).to(out.dtype)
                x = self.switchable.round_input(module.group, args[0], candidate)
                error = torch.nn.functional.linear(x, weight, module.bias) - out
                unrounded = self.switchable.weights.branch_output(module, candidate, args[0], x)
                error = error if unrounded is None else error + unrounded
                square = finite(float(error.double().square().sum()), f"{layer} in {candidate.name}", "its output")
                group_sums[candidate.name] = group_sums.get(candidate.name, 0.0) + square

        self.switchable.set({})
        hooks = (layer.register_forward_hook(hook, with_kwargs=True) for layer in self.switchable.layers.values())
        try:
            with torch.no_grad(), removing(hooks):
                self.switchable.model(self.rows[index : index + 1])
        finally:
            self.switchable.forget_inputs()
        return sums

    def finish(self, sums: Result) -> Result:
        return {
            group: {name: value / scores[""] if scores[""] else 0.0 for name, value in scores.items() if name}
            for group, scores in sums.items()
        }


class KlMethod(Method):
    """One unit is one block: each of its groups in each format, from the block to the end of the model."""

    def __post_init__(self) -> None:
        self.baseline = Baseline(self.switchable, self.divergence, self.rows)
        self.groups: dict[str, list[str]] = {}
        for group in self.switchable.groups:
            block = next((block for block in self.baseline.chain if group.startswith(f"{block}.")), "")
            self.groups.setdefault(f"block {block}" if block else "rest", []).append(group)
        self.names = list(self.groups)

    def work(self, name: str) -> Result:
        if self.baseline.choice is None:  # the run in 16 bit, once for all units of this rank
            self.baseline.start({})
        return {
            group: {c.name: self._loss(group, c.name) for c in self.allowed[group] if c.weight is not None}
            for group in self.groups[name]
        }

    def _loss(self, group: str, format: str) -> float:
        try:
            return self.baseline.loss({group: format})
        except NotFinite as error:
            raise NotFinite(f"{group} in {format}: {error}") from None


METHOD_CLASSES: dict[str, type[Method]] = {"fisher": FisherMethod, "kl": KlMethod, "output": OutputMethod}
