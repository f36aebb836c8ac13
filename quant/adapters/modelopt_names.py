"""`modelopt_config` says in ModelOpt's terms which layers a plan quantizes, and in which formats.

    mtq.quantize(model, modelopt_config(plan), forward_loop)     ModelOpt rounds the plan's layers
    export_hf_checkpoint(model, export_dir=DIR)                  its checkpoint, which `quant.load` reads

The config names layers, formats and the algorithm "max". Solvers have no names in it: ModelOpt rounds to nearest.
"""

import re
from fnmatch import fnmatchcase
from typing import Any

from quant.base.errors import UserError
from quant.formats.format import Format
from quant.recipes.plan import LayerPlan, Plan


def modelopt_config(plan: Plan) -> dict[str, Any]:
    """Returns the config with which `mtq.quantize` quantizes the layers of `plan` to its formats, by "max".

    Layers that differ only by numbers share an entry where all that match it have the same formats. UserError: ModelOpt
    has no such format, or a layer has a rotation, a branch or a factor of its inputs.
    """
    # ModelOpt applies the entries in order, and the last that matches wins: all quantizers off, then the plan's layers
    # on.
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    done: set[str] = set()
    for layer in plan.quantized:
        if layer.name in done:
            continue
        if parts := layer.parts.to_dict():
            raise UserError(
                f"{layer.name}: has {', '.join(f'{name}={value}' for name, value in parts.items())} in the plan, which "
                "a config of ModelOpt cannot name; plan it with a solver that leaves nothing for run time, such as gptq"
            )
        pattern, members = _pattern(plan, layer)
        done |= members
        # Stacked experts are a parameter of their module; their quantizer is called `gate_up_proj_weight_quantizer`.
        before = f"{pattern}_" if layer.kind.is_named_by_parameter else f"{pattern}."
        per_row = {"num_bits": _bits(layer.weight_format), "axis": 0} if layer.weight_format.per_row else None
        weight = per_row or _attributes(layer.name, layer.weight_format)
        entries.append({"quantizer_name": f"{before}weight_quantizer", "cfg": weight})
        if layer.activation is not None:
            entries.append({"quantizer_name": f"{before}input_quantizer", "cfg": _input(layer.name, layer.activation)})
    if plan.attention is not None:
        raise UserError(f"attention in {plan.attention}: has no entry here; make the plan without (attention=None)")
    if plan.kv_cache is not None:
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": _input("the KV cache", plan.kv_cache)})
    return {"quant_cfg": entries, "algorithm": "max"}


def _pattern(plan: Plan, layer: LayerPlan) -> tuple[str, set[str]]:
    """Returns a pattern for `layer` and all layers like it, and the names that match the pattern."""
    literal = re.sub(r"([*?[])", r"[\1]", layer.name)  # matches nothing else
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", literal)
    matching = [other for other in plan.layers if fnmatchcase(other.name, pattern)]
    if all(
        (other.kind, other.weight, other.activation) == (layer.kind, layer.weight, layer.activation)
        for other in matching
    ):
        return pattern, {other.name for other in matching}
    return literal, {layer.name}


def _input(name: str, format: Format) -> dict[str, Any]:
    if format.per_row:
        # A block of None on the last axis is the whole row: a scale for each token, found at run time.
        return {"num_bits": _bits(format), "type": "dynamic", "block_sizes": {-1: None}}
    if format.scale.is_wide and not format.per_tensor:
        raise UserError(
            f"{name}: ModelOpt has no inputs in {format}; plan it in fp8_block with inputs in 16 bit, or in another "
            "format"
        )
    return _attributes(name, format)


def _attributes(name: str, format: Format) -> dict[str, Any]:
    if format.per_tensor:
        return {"num_bits": _bits(format), "axis": None}
    rows, columns = format.block
    sizes: dict[Any, Any] = {-1: columns} if rows == 1 else {-1: columns, -2: rows}
    # Coded scales (E4M3, E8M0) are found for each tensor that comes, "dynamic" in ModelOpt's terms; float32 ones by
    # calibration.
    if not format.scale.is_wide:
        sizes |= {"type": "dynamic", "scale_bits": (format.scale.exponent, format.scale.mantissa)}
    return {"num_bits": _bits(format), "block_sizes": sizes}


def _bits(format: Format) -> int | tuple[int, int]:
    element = format.element
    return element.bits if element.is_integer else (element.exponent, element.mantissa)
