"""Watching a model run: the statistics of every layer's input."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn


def collect_input_amax(
    model: nn.Module,
    names: Collection[str],
    rows: torch.Tensor,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Largest magnitude of the input of each named layer over `rows`, one forward pass a row.

    Args:
        model: called as `model(row)`.
        names: module names; each must be called with its input as the first argument.
        rows: token ids, int64 `[rows, seqlen]`.
        progress: called as `progress(rows done, rows in all)`.

    Returns:
        Float32 scalars by name.

    Raises:
        ValueError: an input holds NaN or infinity (the layer and the row are named), or a layer was never called.
    """
    amax: dict[str, torch.Tensor] = {}
    row_index = 0

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            largest = args[0].detach().abs().amax().float()
            if not bool(torch.isfinite(largest)):
                raise ValueError(f"{name}: the input holds NaN or infinity on calibration row {row_index}")
            amax[name] = torch.maximum(amax.get(name, largest), largest)

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watch(name)) for name in names]
    try:
        with torch.no_grad():
            for row_index, row in enumerate(rows):
                model(row[None])
                if progress:
                    progress(row_index + 1, len(rows))
    finally:
        for handle in handles:
            handle.remove()
    silent = sorted(set(names) - set(amax))
    if silent:
        raise ValueError(f"{silent[0]}: never called on the calibration text ({len(silent)} such layers)")
    return amax
