"""`choose_kv_layers` gives the KV cache of each layer a format by its measured loss.

Each layer's keys and values are rounded to each format while all others stay in 16 bit, and KL(base‖model) is measured
on calibration rows. A knapsack finds the formats with the least sum of these losses within the bytes. Losses add up
only roughly: the mix is measured as a whole, and so is every single format that fits. The best of them is returned.

Where weights and cache share one budget (`auto`), knapsacks of several sizes give mixes, and those that lose less than
every smaller one are returned: the allocation measures the weights beside each.
"""

from collections import Counter
from collections.abc import Sequence
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
_SIZES = (4.5, 5, 5.5, 6.25, 7, 8, 10, 12, 16)  # bits a value of the mixes beside which weights are measured


@dataclass(frozen=True)
class KVChoice:
    """The format of each layer's cache, its loss, and the measurements that led to it."""

    layers: tuple[str, ...]
    loss: float
    record: dict[str, Any]  # for the plan's provenance


def choose_kv_layers(model: nn.Module, rows: torch.Tensor, bits: float | None, session: Session) -> list[KVChoice]:
    """Returns the cache's formats within `bits` a value on average, scales counted, by losses on token ids `rows`.

    Without `bits`, choices of rising bytes and falling loss. UserError: a model without next tokens or without a cache
    that can be quantized, or too few bits.
    """
    config, rows = getattr(model, "config", None), rows[:_ROWS].to(device_of(model))
    sizes = np.array([kv_layer_bytes(config, 4096, 1, FORMATS.get(name)) for name in KV_LAYERS], dtype=float).T
    if not len(sizes) or not sizes.all():
        raise UserError(f"{type(model).__name__}: {option('kv_bits')} needs attention with a KV cache in every layer")
    layers, total = [f"layer {index}" for index in range(len(sizes))], sizes.sum(axis=0)

    def limit(bits: float) -> float:
        return float(total[2] * bits / 16 * (1 + 1e-4))

    if bits is not None and limit(bits) < total[0]:
        least = 16 * total[0] / total[2]
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

        scores, plain = np.zeros(sizes.shape), ["16bit"] * len(layers)
        for index in range(len(layers)):
            for j, name in enumerate(KV_LAYERS[:-1]):
                scores[index, j] = loss([*plain[:index], name, *plain[index + 1 :]])
            session.report("cache", index + 1, len(layers))
        problem = KnapsackProblem(tuple(layers), KV_LAYERS, scores, {"bytes": sizes})
        limits = [limit(size) for size in (_SIZES if bits is None else (bits,)) if limit(size) >= total[0]]
        mixes = [tuple(KV_LAYERS[j] for j in solve(problem, {"bytes": most})) for most in limits]
        single_mixes = {name: (name,) * len(layers) for j, name in enumerate(KV_LAYERS)
                        if bits is None or total[j] <= limit(bits)}  # fmt: skip
        # Each once, and in one order in every process: the first of equal losses is taken.
        measured = {mix: loss(mix) for mix in dict.fromkeys((*mixes, *single_mixes.values()))}
        single = {name: measured[mix] for name, mix in single_mixes.items()}
    order = {name: j for j, name in enumerate(KV_LAYERS)}
    used = {mix: sizes[range(len(mix)), [order[name] for name in mix]].sum() for mix in measured}
    best = [min(measured, key=measured.__getitem__)] if bits is not None else [
        mix for mix in sorted(measured, key=used.__getitem__)
        if all(measured[mix] < measured[other] for other in measured if used[other] < used[mix])
    ]  # fmt: skip
    choices = []
    for mix in best:
        counts = ", ".join(f"{name} in {count} layers" for name, count in Counter(mix).most_common())
        within = "beside the weights of this budget" if bits is None else f"within {bits:g} bits a value"
        record = {
            "bits": 16 * used[mix] / total[2] if bits is None else bits, "loss": measured[mix],
            "single_formats": single, "losses": scores.tolist(),
            "reason": f"{counts}: KL {measured[mix]:.3g} {within}; "
            + ", ".join(f"{name} for all {each:.3g}" for name, each in sorted(single.items(), key=lambda one: one[1])),
        }  # fmt: skip
        choices.append(KVChoice(mix, measured[mix], record))
    return choices
