"""`InputScaling` scales the inputs of a block: transforms choose the scales, and the modules before take them up.

A scale that no module can take up stays with the group as `pre_scale`, for run time (see `solvers.fold`), or there is
none, where the solver's name says so (`awq:merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from quant.calibration.blocks import Call, in_float64
from quant.calibration.solvers.base import SAMPLED_TOKENS, GroupInputs
from quant.calibration.solvers.fold import Fold, apply_fold, find_fold, modules_in_order
from quant.calibration.walk.group import Group
from quant.calibration.walk.stand_in import weight_of


class InputScaling:
    """Scales the inputs of a block's groups.

    Args:
        block: its weights are changed.
        groups: in the order in which the block calls them; their original inputs were kept.
        targets: float32 weights `[out, in]` that are to be rounded, by name within the block; scaled here.
        stored: dtype of the model, in which norms that take up a scale are stored.
    """

    def __init__(
        self, block: nn.Module, groups: Sequence[Group], targets: dict[str, torch.Tensor], stored: torch.dtype
    ) -> None:
        self.block, self.groups, self.targets, self.stored = block, groups, targets, stored

    def choose(self, small: Call) -> None:
        """Scales every group that asks for it, last group first: a scale may go into a linear layer solved before.

        Args:
            small: a call of the block on a few tokens.
        """
        if not any(group.pipeline.transforms for group in self.groups):
            return
        folds = self._find_folds(small)
        for group, found in zip(reversed(self.groups), reversed(folds), strict=True):
            if not group.tokens or not group.pipeline.transforms:
                continue
            assert group.total is not None and group.amax is not None
            every = max(group.tokens // SAMPLED_TOKENS, 1)
            sample = torch.cat([x.float() for x in group.kept_everywhere(every)])
            spec = group.pipeline.spec
            for key, transform in zip(spec.transforms, group.pipeline.transforms, strict=True):
                if found is None and key in spec.merged:
                    group.notes.append(f"no module around can absorb an input scale: without {key}")
                    continue
                weight = torch.cat([self.targets[name] for name in group.names])
                divisor = torch.ones_like(group.total) if group.divisor is None else group.divisor
                inputs = GroupInputs(sample, group.total / group.tokens, group.amax).divided(divisor)
                owner = None if found is None else found.owner
                scale = transform(weight, inputs, group.weight_format, group.activation, owner)
                if found is not None:
                    scale = self._fold(found, scale)
                else:
                    before = group.parts.pre_scale
                    group.parts = replace(group.parts, pre_scale=1 / scale if before is None else before / scale)
                group.divisor = divisor * scale
                for name in group.names:
                    self._set_target(name, self.targets[name] * scale)

    def _find_folds(self, small: Call) -> list[Fold | None]:
        """Where each group's input scale can go, tried in float64 on a few tokens."""
        block = in_float64(self.block)
        call = small.to(dtype=torch.float64)
        order = modules_in_order(block, call)
        folds = []
        for group in self.groups:
            first = min((order.index(name) for name in group.names if name in order), default=0)
            producers = [n for n in reversed(order[:first]) if n in self.targets or _is_vector(block.get_submodule(n))]
            folds.append(find_fold(block, call, group.names, producers) if group.pipeline.transforms else None)
        return folds

    def _fold(self, fold: Fold, scale: torch.Tensor) -> torch.Tensor:
        """Puts `scale` into the producer; gives the scale `[in]` that the group's inputs were really divided by."""
        module = self.block.get_submodule(fold.producer)
        rows = len(module.weight)  # type: ignore[arg-type]
        by = torch.ones(rows, device=scale.device).index_copy_(0, fold.owner, scale)
        if fold.producer in self.targets:
            self.targets[fold.producer] = self.targets[fold.producer] / by[:, None]
            apply_fold(module, by, fold.style)
            return scale
        return apply_fold(module, by, fold.style, self.stored)[fold.owner]

    def _set_target(self, name: str, target: torch.Tensor) -> None:
        self.targets[name] = target
        weight = weight_of(self.block, name)
        weight.data = target.to(weight.dtype)


def _is_vector(module: nn.Module) -> bool:
    return module.weight.dim() == 1  # type: ignore[operator]
