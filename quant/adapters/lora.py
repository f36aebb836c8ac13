"""Adapters of PEFT train on quantized layers, and are merged back into them.

    config = quant.lora(LoraConfig(r=16, target_modules="all-linear"), model)
    model = get_peft_model(model, config)          # or SFTTrainer(model, peft_config=config, …)
    …
    merged = quant.merge_lora(model, rows)         # quantized again by the plan's solvers
    quant.save(merged.model, merged.plan, DIR)

PEFT looks up the adapter class of an unknown layer among the custom modules of a `LoraConfig`, where `lora` registers
ours. The base stays packed: a gradient passes through it to its input, and the adapters train in 16 or 32 bit. Other
adapters (`dense_layers.py`) are PEFT's own. On a model that `prepare_qat` prepared, LoRA is inside of the rounding
(`lora_qat_layers.py`), and `convert_qat` packs the weights that PEFT has merged.

Merging changes the weight by less than a step of its format in most places, so rounding again could lose much of the
training. `merge_lora` therefore dequantizes the layers, has PEFT merge (DoRA and rsLoRA too), solves them by the plan's
solver with calibration data if it takes any, and measures the loss. Layers that share a global scale with an adapted
one are solved again together with it, because a runtime fuses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.adapters.dense_layers import CONFIGS, DenseExperts, dense_linear, make_adaptable
from quant.base.errors import UserError, listed
from quant.base.extras import require
from quant.base.listener import Progress
from quant.calibration.layer_result import Quantized
from quant.calibration.placement import Device
from quant.calibration.session import Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.solve import solve_plan
from quant.export.checkpoint.pretrained import attach
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Parts, Plan
from quant.training.qat_layers import QATLinear
from quant.training.rounded_weight import RoundedWeight

_INTO_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica")
"""Beginnings of the initializations of PEFT that change the weights of the base."""


def lora(config: Any, model: nn.Module) -> Any:
    """Prepares a config of PEFT for a quantized model, or for one in QAT; the config is changed and returned.

    Args:
        config: a `LoraConfig`, or for linears an `IA3Config`, `VeraConfig`, `OFTConfig` or `AdaLoraConfig`. Its
            `target_modules` may name quantized linears and, for LoRA, expert projections (`gate_up_proj`, `down_proj`
            of fused experts); "all-linear" means all linears, quantized or not, but the head. Adapters that were saved
            are loaded by `PeftModel.from_pretrained(model, DIR, config=quant.lora(LoraConfig.from_pretrained(DIR),
            model))`.
        model: the quantized model that the adapters are for, or one that `prepare_qat` prepared. There the adapters'
            product is added to each weight before it is rounded, and the result is packed by
            `quant.convert_qat(model.merge_and_unload())`.

    Raises:
        UserError: a config of other adapters, a model without quantized layers, an initialization that would change
            their weights, or an option that LoRA inside of the rounding cannot have.
    """
    peft = require("peft", "training")
    from quant.adapters.lora_layers import LAYERS

    kind = type(config).__name__
    if not isinstance(config, peft.LoraConfig) and kind not in CONFIGS:
        raise UserError(f"quant.lora takes a LoraConfig, {', '.join(CONFIGS)} of PEFT, not a {kind}")
    if any(isinstance(module, RoundedWeight) for module in model.modules()):
        _adapt_inside_rounding(config)
    elif not any(isinstance(module, tuple(LAYERS)) for module in model.modules()):
        raise UserError("the model has no quantized linears or experts; quantize it first, or use PEFT as it is")
    elif kind in CONFIGS:
        make_adaptable(model)
    else:
        _adapt_quantized_layers(config, LAYERS)
    # PEFT resolves "all-linear" to classes of torch and of quantizers that it knows, and would pass ours over.
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        find_head: Any = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        config.target_modules = {
            name
            for name, module in model.named_modules()
            if isinstance(module, QuantLinear | nn.Linear) and module is not head
        }
    return config


def _adapt_inside_rounding(config: Any) -> None:
    """Makes PEFT put LoRA inside the rounding of layers in training."""
    from quant.adapters.lora_layers import LoraQATLinear, check_inside

    if type(config).__name__ in CONFIGS:
        raise UserError(
            f"the model is prepared for QAT, and a {type(config).__name__} cannot go inside of its rounding: take a "
            "LoraConfig, or use PEFT without quant.lora, which puts adapters beside the rounded layers"
        )
    check_inside(config)
    config._register_custom_module({QATLinear: LoraQATLinear})


def _adapt_quantized_layers(config: Any, layers: Any) -> None:
    """Makes PEFT put our LoRA layers over quantized ones."""
    kind = config.init_lora_weights
    if isinstance(kind, str) and kind.lower().startswith(_INTO_THE_BASE):
        raise UserError(
            f"init_lora_weights={kind!r} subtracts the adapter from the weights, and quantized ones stay as they are; "
            "leave it True, or take 'gaussian', 'orthogonal' or 'eva'"
        )
    # PEFT's experimental hook (`LoraConfig._register_custom_module`) for classes of layers that it does not know.
    # Without it `get_peft_model` refuses a QuantLinear as an unsupported target.
    config._register_custom_module(layers)


def merge_lora(
    model: Any,
    data: Any = None,
    plan: Plan | None = None,
    *,
    device: Device = None,
    progress: Progress | None = None,
) -> Quantized:
    """Merges the active adapters into the quantized layers, which are quantized again as the plan says.

    Args:
        model: a `PeftModel` over a quantized model.
        data: calibration inputs as in `quant.quantize`, for solvers that look at inputs. None lets a causal language
            model write its own where the plan needs any.
        plan: the plan of the quantized model; by default the model carries it.
        device, progress: as in `quant.quantize`.

    Returns:
        The model without adapters, its plan, and a result for each layer that was solved again: the errors are those
        against the merged weights in 16 bit.

    Raises:
        UserError: no adapters on quantized layers, or no plan.
    """
    from quant.adapters.lora_layers import make_dense

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted, plan = _adapted_layers(inner, plan)
    # A shared scale is chosen for all members of its group, so one adapter has the whole group solved again.
    again = [layer for members in _together(plan) for layer in members if any(m.name in adapted for m in members)]
    # PEFT merges into `base_layer.weight`, which only a dense layer has as a parameter: layers with adapters become
    # dense before the merge. The others of their groups follow after it, when PEFT's wrappers are gone.
    with torch.no_grad():
        for module in adapted.values():
            make_dense(module)
        merged = model.merge_and_unload()
        for layer in again:
            _make_dense(merged, layer)
    solved_again = {layer.name: _solved_again(layer, adapted) for layer in again}
    # Layers that are still quantized cannot be in a plan.
    layers = (solved_again.get(layer.name) or plan.by_name[layer.name] for layer in find_layers(merged))
    # Without the KV cache: its scales are on the model already, and adapters do not justify measuring them again.
    part = replace(plan, layers=tuple(layers), kv_cache=None)
    done = solve_plan(merged, part, data, Session.on(device, progress=progress))
    old = plan.by_name
    # Transforms were left out only of this run (`_solved_again`): each layer keeps the solver and the orientation of
    # the first plan.
    solved = (
        replace(layer, solver=old[layer.name].solver, transposed=old[layer.name].transposed)
        for layer in done.plan.quantized
    )
    plan = plan.replace_layers(solved)
    attach(merged, plan)
    return replace(done, plan=plan, layers=[result for result in done.layers if result.name in solved_again])


def _adapted_layers(model: nn.Module, plan: Plan | None) -> tuple[dict[str, nn.Module], Plan]:
    """Returns PEFT's wrappers of quantized layers by name, and the plan by which these layers were quantized.

    Raises:
        UserError: there are none, or no plan, or the plan is of another model.
    """
    adapted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), QuantLinear | QuantExperts)
    }
    if not adapted:
        raise UserError("no quantized layer of the model has an adapter; give merge_lora the PeftModel")
    plan = plan or getattr(model, "quantization_plan", None)
    if plan is None:
        raise UserError(
            "the model carries no plan; pass the one that it was quantized by: merge_lora(model, data, plan)"
        )
    unknown = adapted.keys() - {layer.name for layer in plan.quantized}
    if unknown:
        raise UserError(f"the plan does not quantize {listed(sorted(unknown), 3)}; pass the plan of this model")
    return adapted, plan


def _together(plan: Plan) -> list[list[LayerPlan]]:
    """Returns the quantized layers that are solved together: fusion groups that share a scale, or one layer."""
    shared = {name: members for name, members in plan.groups().items() if _shares_scale(members)}
    alone = [[layer] for layer in plan.quantized if layer.group not in shared]
    return [*shared.values(), *alone]


def _shares_scale(members: Sequence[LayerPlan]) -> bool:
    """Returns whether the layers of a group have scales in common, of their weights or of their input."""
    first = members[0]
    return first.weight is not None and (first.weight.global_scale or first.weight.per_tensor or first.has_static_scale)


def _solved_again(layer: LayerPlan, adapted: Any) -> LayerPlan:
    """Returns the plan of a layer that is solved again: transforms that its neighbours absorbed are not repeated.

    The dequantized layer holds its weight `[out, in]`, also where the original model has it transposed.
    """
    spec = get_pipeline(layer.solver).spec
    solver = spec.rounding if spec.transforms or spec.merges_rotations else layer.solver
    cause = "LoRA merged" if layer.name in adapted else "a fused layer got a LoRA"
    reason = f"{layer.reason}; {cause}, quantized again by {solver}"
    return replace(layer, solver=solver, parts=Parts(), reason=reason, transposed=False)


def _make_dense(model: nn.Module, layer: LayerPlan) -> None:
    """Puts the dequantized weight in the place of a quantized layer, if it is still there."""
    parent_name, _, last = layer.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    module = getattr(parent, last)
    if isinstance(module, QuantLinear):
        setattr(parent, last, dense_linear(module))
    elif isinstance(module, QuantExperts | DenseExperts):
        weight = module.dequantize(module.dtype) if isinstance(module, QuantExperts) else module.weight
        delattr(parent, last)
        parent.register_parameter(last, nn.Parameter(module.stacking.parameter(weight), requires_grad=False))
