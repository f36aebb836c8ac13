"""The module that a Python user passes: wrappers are looked through, and one that cannot be quantized is refused.

A wrapper of torch.compile, DDP or `nn.DataParallel` changes the names of all weights, and wrappers of adapters hide
the layers that they belong to. A model that holds quantized layers already cannot be quantized by a new plan: the plan
would not say how they were made, and no checkpoint could be saved by it. All of this is checked before any work.
"""

import gc
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from quant.base.errors import UserError, counted
from quant.recipes.blocks import replaced

_TOOLKITS = {
    "bitsandbytes": "bitsandbytes", "torchao": "torchao", "modelopt": "ModelOpt", "hqq": "HQQ", "eetq": "EETQ",
    "compressed_tensors": "compressed-tensors", "awq": "AutoAWQ", "auto_gptq": "AutoGPTQ", "gptqmodel": "GPTQModel",
    "quanto": "quanto", "auto_round": "AutoRound",
}  # fmt: skip
_PACKED = ("qweight", "weight_packed", "weight_scale", "weight_scale_inv")


def unwrapped(model: Any, taker: str) -> nn.Module:
    """Returns the module inside the wrappers of `inner_model`; UserError, which names `taker`, for anything else."""
    if isinstance(model, nn.Module):
        return inner_model(model)
    if isinstance(model, str | os.PathLike):
        raise UserError(f"{model}: {taker} takes a module; open it with quant.open_model({str(model)!r}).model")
    parts = (name for name in ("model", "transformer", "unet") if isinstance(getattr(model, name, None), nn.Module))
    hint = next((f"its .{name}" for name in parts), "a torch.nn.Module")
    raise UserError(f"{taker} takes a module, and this is a {type(model).__name__}: pass {hint}")


def inner_model(model: nn.Module) -> nn.Module:
    """Returns the model inside of DDP, DataParallel, EMA or SWA, torch.compile, DeepSpeed or Lightning's Fabric."""
    while True:
        # Wrappers nest: DDP around torch.compile and the other way round are both in use.
        others = {cls.__name__ for cls in type(model).__mro__} & {"DeepSpeedEngine", "_FabricModule"}
        if others or isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel | AveragedModel):
            model = model.module  # type: ignore[assignment]
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def check_original(model: nn.Module, taker: str) -> None:
    """Raises UserError where a model is not in 16 or 32 bit throughout, or its layers are hidden from `taker`."""
    for name, module in model.named_modules():
        where = name or "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise UserError(
                f"{where}: torch.jit has compiled it, so that none of its layers can be replaced; {taker} takes the "
                "module that was scripted or traced"
            )
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            raise UserError(
                f"{where}: a {type(module).__name__}, whose weight has no shape before its first input; call the "
                f"model once, then {taker}"
            )
    refuse_adapters(model, taker, adapters_after(model))
    for name, module in model.named_modules():
        if isinstance(getattr(module, "_orig_mod", None), nn.Module):
            raise UserError(
                f"{name}: torch.compile has wrapped it, which renames its weights: put its ._orig_mod there before "
                f"{taker}, and compile afterwards, or in place with .compile()"
            )
        if (toolkit := _quantized_by(module)) is not None:
            raise UserError(
                f"{name or 'the model'}: {taker} takes the original model, and this layer is quantized already, by "
                f"{toolkit}; start from the original one, with one plan for all layers"
            )
    # DTensor of FSDP2 and tensor parallelism has `full_tensor`; FSDP1 flattens parameters and is known by its class.
    sharded = next((name for name, p in model.named_parameters() if hasattr(p, "full_tensor")), None)
    if sharded is not None or type(model).__name__ == "FullyShardedDataParallel":
        raise UserError(
            f"{sharded or 'the model'}: its weights are sharded (FSDP or tensor parallelism), and {taker} takes whole "
            "ones: call it before you shard them, or load the gathered state into an unsharded model"
        )


def optimizers_of(identities: Collection[int]) -> list[torch.optim.Optimizer]:
    """Returns the optimizers of this process that hold a parameter with one of these ids."""
    # Nothing leads from a parameter to its optimizers, so the garbage collector's list of all objects is searched.
    # `isinstance` would ask objects that only pretend to have a class.
    optimizers = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [o for o in optimizers if any(id(p) in identities for group in o.param_groups for p in group["params"])]


def warn_of_shared_weights(model: nn.Module) -> None:
    """Warns of weights that two layers of a transformers model share, which its class does not share when it is built.

    Such a model trains, and its checkpoint could not be read back: `quant.save` refuses it, days later.
    """
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is None:
        return
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name and name not in tied and other not in tied:
            warnings.warn(
                f"{other} and {name} are one object in this model, and two where {type(model).__name__} builds it "
                "again: quant.save will refuse to write a checkpoint that could not be read back; give each place a "
                "copy of its own (copy.deepcopy) before you train",
                stacklevel=3,
            )
            return


def adapters_after(model: nn.Module) -> str:
    """Returns the way out for a model with adapters of PEFT: models of diffusers merge them by methods of their own."""
    own = hasattr(model, "fuse_lora")
    merge, off = (
        ("model.fuse_lora(); model.unload_lora()", "unload_lora")
        if own
        else ("model = model.merge_and_unload()", "unload")
    )
    return f"merge them first ({merge}), or take them off (.{off}()) and put new ones on afterwards"


def refuse_adapters(model: nn.Module, taker: str, way_out: str) -> None:
    """Raises UserError where PEFT has put adapters on layers of a model, or wraps it for a prompt."""
    modules = model.named_modules()
    adapted = [name for name, m in modules if isinstance(m._modules.get("base_layer"), nn.Module)]
    if adapted:
        raise UserError(
            f"{adapted[0]}: has an adapter of PEFT, as {counted(len(adapted), 'layer')} of the model in all; {taker} "
            f"would take them for weights of the model: {way_out}"
        )
    if any(cls.__module__.startswith("peft.") for cls in type(model).__mro__):
        raise UserError(f"{taker} takes the model inside of a {type(model).__name__}: pass model.get_base_model()")


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Makes modules that were compiled in place run as written while open: each new hook would compile them again."""
    # torch 2: Module.compile() stores the compiled call here, and __call__ prefers it over forward.
    name = "_compiled_call_impl"
    with replaced((module, name, None) for module in model.modules() if vars(module).get(name)):
        yield


def _quantized_by(module: nn.Module) -> str | None:
    """Returns the toolkit that has quantized a module, its own submodules apart; None where it is in 16 or 32 bit."""
    # On the class: a property, which on the object would decode the weight to answer.
    if hasattr(type(module), "quantized_weight"):
        return "Blockscale"
    rooms = {cls.__module__ for cls in type(module).__mro__}
    if "quant.training.qat_layers" in rooms:
        return "quant.prepare_qat; pack it with quant.pack(model)"
    if "quant.training.low_precision.low_precision_linear" in rooms or "low_precision_experts" in vars(module):
        return "quant.to_low_precision_training; pack it with quant.pack(model)"
    own = {**module._parameters, **module._buffers}
    classes = [type(module), *(type(tensor) for tensor in own.values() if tensor is not None)]
    # By the package of a module's or tensor's class, without importing it: bitsandbytes has both, torchao tensor
    # subclasses only.
    for cls in classes:
        package = cls.__module__.partition(".")[0]
        if package in _TOOLKITS and any(tensor is not None for tensor in own.values()):
            return _TOOLKITS[package]
    # ModelOpt converts modules in place: it adds quantizers, and swaps the class for one that it makes at run time.
    if hasattr(module, "weight_quantizer") and hasattr(module, "input_quantizer"):
        return _TOOLKITS["modelopt"]
    if hasattr(module, "quantization_scheme"):
        return _TOOLKITS["compressed_tensors"]
    weight = own.get("weight")
    # Matrices of bytes hold packed codes; a vector of integers, such as a table of positions, may be the model's own.
    is_packed = isinstance(weight, Tensor) and weight.dim() > 1 and weight.dtype in (torch.int8, torch.uint8)
    if is_packed or any(own.get(name) is not None for name in _PACKED):
        return f"another toolkit (it is a {type(module).__name__})"
    return None
