"""Warnings that follow from a plan by itself: unknown fusion groups, and weights or inputs that stay in 16 bit.

They are separate from `make`, because reading and writing a checkpoint must not import code that decides.
"""

from __future__ import annotations

from quant.base.errors import counted
from quant.recipes.fusion_groups import patterns
from quant.recipes.plan import LayerPlan, Plan

NOT_RUN = "a bare state dict cannot be run"
BY_NAME = "fusion_groups_by_name"
"""Key of the provenance: fusion groups that come from names, because no run called their layers; `*` is a number."""
NOT_SEEN = "layers_not_called"
"""Key of the provenance: layers that no run has called, and that are in no group though they might be merged."""


def fusion_warnings(plan: Plan) -> list[str]:
    """Returns a warning, in one sentence, where it is unknown whether a runtime fuses layers with static scales."""
    # Only formats with a tensor scale (NVFP4, FP8) suffer: block scales do not change when rows are concatenated.
    static = [layer for layer in plan.quantized if layer.weight is not None and layer.weight.is_static]
    unknown, unseen = plan.provenance.get("fusion_groups"), plan.provenance.get(NOT_SEEN)
    if unseen is not None:
        static = [layer for layer in static if layer.group is None and patterns([layer.name])[0] in unseen]
    if not static or (unknown is None and unseen is None):
        return []
    reason = f"fusion groups {unknown}" if unknown else "no run has called them, so their fusion groups are unknown"
    return [
        f"{counted(len(static), 'layer')}, {static[0].name} first: {reason}. Each has a tensor scale of its own, and a "
        "runtime that merges layers with one input (q/k/v, gate/up) expects them to share one"
    ]


def coverage_warnings(plan: Plan) -> list[str]:
    """Returns warnings where over half of all weights stay in 16 bit, or inputs do because no run measured them."""
    return [*_kept_weights(plan), *_kept_inputs(plan)]


def _kept_weights(plan: Plan) -> list[str]:
    # A tied weight counts once, as it is stored.
    own = [layer for layer in plan.layers if layer.tied_to is None]
    by_reason: dict[str, list[LayerPlan]] = {}
    for layer in own:
        if layer.weight is None:
            by_reason.setdefault(layer.reason, []).append(layer)
    counts = {reason: sum(layer.numel for layer in layers) for reason, layers in by_reason.items()}
    total, left = sum(layer.numel for layer in own), sum(counts.values())
    # Less than half in 16 bit is normal: embeddings and heads of small models.
    if 2 * left <= total:
        return []
    most = sorted(by_reason.items(), key=lambda item: -counts[item[0]])[:3]
    listed = "; ".join(
        f"{counted(len(layers), 'layer')}, {layers[0].name} first, {counts[reason] / total:.0%}: {reason}"
        for reason, layers in most
    )
    return [f"{left / total:.0%} of the weights stay in 16 bit ({listed})"]


def _kept_inputs(plan: Plan) -> list[str]:
    weight_only = [layer for layer in plan.quantized if layer.activation is None and layer.reason.endswith(NOT_RUN)]
    if not weight_only:
        return []
    return [
        f"the inputs of {counted(len(weight_only), 'layer')}, {weight_only[0].name} first, stay in 16 bit, and only "
        f"weights are quantized: {NOT_RUN}; pass a model's directory or --model-factory to quantize inputs too"
    ]
