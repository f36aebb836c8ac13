"""`choose_kv_layers` gives the KV cache of each layer a format by its measured loss.

Each layer's keys and values are rounded to each format while all others stay in 16 bit, and KL(base‖model) is measured
on calibration rows. A knapsack finds the formats with the least sum of these losses within the bytes. Losses add up
only roughly: the same is done once more around this mix, both mixes are measured as a whole, and so is every single
format that fits. The best of them is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.base.errors import UserError, option
from quant.calibration.evaluating import prepared
from quant.calibration.placement import device_of
from quant.calibration.sensitivity.costs import kv_layer_bytes
from quant.calibration.sensitivity.divergence import NextToken, divergence_of
from quant.calibration.sensitivity.knapsack import KnapsackProblem, solve
from quant.calibration.session import Session
from quant.formats.format import FORMATS
from quant.generate.quantized_attention import quantized_attention
from quant.recipes.plan import KV_LAYERS

_ROWS = 2
_TURNS = 2


@dataclass(frozen=True)
class KVChoice:
    """The format of each layer's cache, and the measurements that led to it."""

    layers: tuple[str, ...]
    record: dict[str, Any]  # for the plan's provenance


def choose_kv_layers(model: nn.Module, rows: torch.Tensor, bits: float, session: Session) -> KVChoice:
    """Returns the cache's formats within `bits` a value on average, scales counted, by losses on token ids `rows`.

    UserError: a model without next tokens or without a cache that can be quantized, or too few bits.
    """
    config, rows = getattr(model, "config", None), rows[:_ROWS].to(device_of(model))
    sizes = np.array([kv_layer_bytes(config, 4096, 1, FORMATS.get(name)) for name in KV_LAYERS], dtype=float).T
    if not len(sizes) or not sizes.all():
        raise UserError(f"{type(model).__name__}: {option('kv_bits')} needs attention with a KV cache in every layer")
    layers, limit = [f"layer {index}" for index in range(len(sizes))], sizes[:, 2].sum() * bits / 16 * (1 + 1e-4)
    if limit < sizes[:, 0].sum():
        least = 16 * sizes[:, 0].sum() / sizes[:, 2].sum()
        raise UserError(f"{option('kv_bits', f'{bits:g}')}: the smallest feasible value is {least:.3g}")
    divergence = divergence_of(model, rows)
    if not isinstance(divergence, NextToken):
        raise UserError(f"{type(model).__name__}: {option('kv_bits')} needs a causal language model")
    with prepared(model, torch.float32, session):
        references = [divergence.reference(row) for row in rows.split(1)]

        def loss(names: Sequence[str]) -> float:
            with quantized_attention(model, kv_cache=",".join(names)):
                sums = [divergence.measure(row, base)() for row, base in zip(rows.split(1), references, strict=True)]
            return sum(sums) / divergence.count(rows)

        # First around 16 bit; then around the mix, where errors of several layers meet.
        mix, measured = ("16bit",) * len(layers), dict[tuple[str, ...], float]()
        for turn in range(_TURNS):
            scores = _scores(loss, mix, session, turn)
            problem = KnapsackProblem(tuple(layers), KV_LAYERS, scores, {"bytes": sizes})
            mix = tuple(KV_LAYERS[j] for j in solve(problem, {"bytes": limit}))
            measured[mix] = loss(mix)
        fitting = [name for j, name in enumerate(KV_LAYERS) if sizes[:, j].sum() <= limit]
        measured |= {names: loss(names) for names in ((name,) * len(layers) for name in fitting)}
    best = min(measured, key=measured.__getitem__)
    counts = ", ".join(f"{name} in {count} layers" for name, count in Counter(best).most_common())
    single = {names[0]: each for names, each in measured.items() if len(set(names)) == 1}
    record = {
        "bits": bits, "loss": measured[best], "single_formats": single, "losses": scores.tolist(),
        "reason": f"{counts}: KL {measured[best]:.3g} within {bits:g} bits a value; "
        + ", ".join(f"{name} for all {each:.3g}" for name, each in sorted(single.items(), key=lambda item: item[1])),
    }  # fmt: skip
    return KVChoice(best, record)


def _scores(loss: Callable[[Sequence[str]], float], present: Sequence[str], session: Session, turn: int) -> np.ndarray:
    """Returns the change of the loss by each layer in each format, all others as at present, `[layers, formats]`."""
    scores, base = np.zeros((len(present), len(KV_LAYERS))), loss(present)
    for index in range(len(present)):
        for j, name in enumerate(KV_LAYERS):
            if name != present[index]:
                scores[index, j] = loss([*present[:index], name, *present[index + 1 :]]) - base
        session.report("cache", turn * len(present) + index + 1, _TURNS * len(present))
    return scores
