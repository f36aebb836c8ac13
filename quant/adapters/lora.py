"""Adapters of PEFT train on quantized layers, and are merged back into them.

    config = quant.lora(LoraConfig(r=16, target_modules="all-linear"), model)
    model = get_peft_model(model, config)          # or SFTTrainer(model, peft_config=config, …)
    …
    merged = quant.merge_lora(model, rows)         # quantized again by the plan's solvers
    quant.save(merged.model, merged.plan, DIR)

The base stays packed: a gradient passes through it to its input, and the adapters train in 16 or 32 bit. On a model
that `prepare_qat` prepared, LoRA is inside of the rounding, and `pack` packs the weights that PEFT has merged. Merging
changes the weight by less than a step of its format in most places, so rounding again could lose much of the training:
`merge_lora` dequantizes the layers, has PEFT merge (DoRA and rsLoRA too), solves them by the plan's solver with
calibration data if it takes any, and measures the loss.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, listed, require
from quant.base.listener import Progress
from quant.base.torch_modes import in_own_modes
from quant.calibration.layer_result import Quantized
from quant.calibration.session import Device, Session
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.walk.solve import solve_plan
from quant.export.checkpoint.save import attach
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.layers import find_layers
from quant.recipes.plan import LayerPlan, Parts, Plan


@in_own_modes
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
            `quant.pack(model.merge_and_unload())`.

    Raises:
        UserError: a config of other adapters, a model without quantized layers, an initialization that would change
            their weights, or an option that LoRA inside of the rounding cannot have.
    """
    require("peft", "training")
    from quant.adapters.lora_layers import prepare

    prepare(config, model)
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


@in_own_modes
def merge_lora(
    model: Any, data: Any = None, plan: Plan | None = None, *, device: Device = None, progress: Progress | None = None
) -> Quantized:
    """Merges the active adapters in place into the quantized layers, which are quantized again as the plan says.

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
    from quant.adapters.lora_layers import DenseExperts, make_dense

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    adapted, plan = _adapted_layers(inner, plan)
    # A shared scale is chosen for all members of its group, which a runtime fuses: one adapter has all solved again.
    again = [layer for members in _together(plan) for layer in members if any(m.name in adapted for m in members)]
    # PEFT merges into `base_layer.weight`, which only a dense layer has as a parameter: layers with adapters become
    # dense before the merge. The others of their groups follow after it, when PEFT's wrappers are gone.
    with torch.no_grad():
        for module in adapted.values():
            make_dense(module, "base_layer")
        merged = model.merge_and_unload()
        for layer in again:
            path, _, last = layer.name.rpartition(".")
            parent = merged.get_submodule(path)
            make_dense(parent, last)
            if isinstance(stack := getattr(parent, last), DenseExperts):
                delattr(parent, last)
                weight = stack.stacking.parameter(stack.weight)
                parent.register_parameter(last, nn.Parameter(weight, requires_grad=False))
    solved_again = {layer.name: _solved_again(layer, adapted) for layer in again}
    # Layers that are still quantized cannot be in a plan.
    layers = (solved_again.get(layer.name) or plan.by_name[layer.name] for layer in find_layers(merged))
    # Without the KV cache: its scales are on the model already, and adapters do not justify measuring them again.
    part = replace(plan, layers=tuple(layers), kv_cache=None)
    done = solve_plan(merged, part, data, Session.on(device, progress=progress))
    old = plan.by_name
    # Transforms were left out only of this run (`_solved_again`): each layer keeps the solver and the orientation of
    # the first plan.
    plan = plan.replace_layers(
        replace(layer, solver=old[layer.name].solver, transposed=old[layer.name].transposed)
        for layer in done.plan.quantized
    )
    attach(merged, plan)
    return replace(done, plan=plan, layers=[result for result in done.layers if result.name in solved_again])


def _adapted_layers(model: nn.Module, plan: Plan | None) -> tuple[dict[str, nn.Module], Plan]:
    """Returns PEFT's wrappers of quantized layers by name, and the plan of these layers; UserError without."""
    adapted = {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), QuantLinear | QuantExperts)
    }
    if not adapted:
        way_out = "merge_lora takes a PeftModel and merges it in place, a copy.deepcopy(model) if training goes on"
        raise UserError(f"no quantized layer of the model has an adapter: {way_out}")
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
    shared = {}
    for name, members in plan.groups().items():
        weight = members[0].weight
        if weight is not None and (weight.global_scale or weight.per_tensor or members[0].has_static_scale):
            shared[name] = members
    return [*shared.values(), *([layer] for layer in plan.quantized if layer.group not in shared)]


def _solved_again(layer: LayerPlan, adapted: Any) -> LayerPlan:
    """Returns the plan of a layer that is solved again, without transforms that its neighbours absorbed."""
    spec = get_pipeline(layer.solver).spec
    solver = spec.rounding if spec.transforms or spec.merges_rotations else layer.solver
    cause = "LoRA merged" if layer.name in adapted else "a fused layer got a LoRA"
    reason = f"{layer.reason}; {cause}, quantized again by {solver}"
    # The dequantized layer holds its weight `[out, in]`, also where the original model has it transposed.
    return replace(layer, solver=solver, parts=Parts(), reason=reason, transposed=False)
