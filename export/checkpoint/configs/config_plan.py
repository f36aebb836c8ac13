"""Makes the plan of a checkpoint that came without one: a config, the model's layers and the tensors determine it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quant.export.checkpoint.files.layouts import layout_of_config
from quant.export.checkpoint.files.names import StoredNames, matrix_names
from quant.recipes.fusion_groups import group_unseen
from quant.recipes.layer_kind import LayerKind
from quant.recipes.layers import Layer
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.recipes.groups import group_experts


def plan_of_checkpoint(
    directory: Path,
    model_layers: Sequence[Layer],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    names: StoredNames | None = None,
) -> Plan:
    """Returns the plan of a checkpoint of any layout that came without one, as its config describes it.

    Layers that runtimes merge are in a fusion group if the checkpoint has one tensor scale for them.

    Args:
        directory: the directory that error messages name.
        model_layers: all layers; linear ones, the head and experts may be quantized.
        config: the `quantization_config`, or `quantization` of ModelOpt's `hf_quant_config.json`.
        tensors: the tensors of the checkpoint, under the model's names.
        names: the names of the model's tensors on disk, which the config may use.

    Raises:
        ValueError: the config has a scheme that is not supported, or does not fit the tensors.
    """
    names = names or StoredNames()
    layers = []
    try:
        layout = layout_of_config(config)
        formats_of, kv_cache = layout.read_config(config, names, tensors)
        rotation_of = layout.read_rotations(config, names)
        for layer in group_unseen(group_experts(model_layers)):
            # A config names the matrices of single experts; all of a projection are in one format.
            matrix = matrix_names(layer.name, 0)[0] if layer.kind == LayerKind.EXPERTS else layer.name
            # A target such as "Linear" may match any module, and other tools leave convolutions as they are.
            may_be_quantized = layer.kind in (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.EXPERTS) or (
                layer.kind == LayerKind.CONV and f"{layer.name}.weight_scale" in tensors
            )
            formats = formats_of(matrix) if may_be_quantized else None
            weight, activation = formats or (None, None)
            parts = Parts() if weight is None else Parts(hadamard=rotation_of(matrix))
            layers.append(
                LayerPlan(
                    layer.name,
                    layer.kind,
                    layer.shape,
                    weight,
                    activation,
                    reason=f"as {directory.name} was written",
                    group=layer.group if weight is not None else None,
                    tied_to=layer.tied_to if weight is None else None,
                    parts=parts,
                    transposed=layer.transposed,
                )
            )
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    # `group_unseen` guesses groups by names; the tensors show which members really share their scales.
    plan = Plan(tuple(layers), kv_cache=kv_cache, provenance={"checkpoint": str(directory)})
    return plan.replace_layers(_ungrouped(plan, tensors))


def _ungrouped(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> list[LayerPlan]:
    """Returns, without their group, the layers that runtimes cannot merge: formats or per-tensor scales differ."""
    return [
        replace(member, group=None)
        for members in plan.groups().values()
        if len(members) == 1
        or len({(member.formats, member.parts) for member in members}) > 1
        or (members[0].kind == LayerKind.LINEAR and len({_tensor_scales(tensors, member) for member in members}) > 1)
        for member in members
    ]


def _tensor_scales(tensors: Mapping[str, torch.Tensor], layer: LayerPlan) -> tuple[float, ...]:
    """Returns the scales that a layer of any layout has for its whole weight and for its input."""
    names = ["weight_scale_2", "weight_global_scale", "input_global_scale", "input_scale"]
    if layer.weight is not None and layer.weight.per_tensor:
        names.append("weight_scale")
    scales = [tensors[f"{layer.name}.{name}"] for name in names if f"{layer.name}.{name}" in tensors]
    return tuple(float(scale) for scale in scales if scale.numel() == 1)
