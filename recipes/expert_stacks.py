"""`stacking_of` says how a parameter of a model holds the matrices of all experts, and `expert_matrices` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quant.formats.stacking import Stacking

if TYPE_CHECKING:
    from torch import nn

EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3")


def stacking_of_experts(module: nn.Module, name: str) -> Stacking:
    """Returns how the parameter `name` holds the matrices of experts; ValueError where it holds something else."""
    stacking = stacking_of(module, name)
    if stacking is None:
        raise ValueError(f"{type(module).__name__}.{name}: holds no matrices of experts")
    return stacking


def stacking_of(module: nn.Module, name: str) -> Stacking | None:
    """Returns how the parameter `name` of a module holds the matrices of experts; None where it holds something else.

    Two parameters together show whether matrices are transposed:

        gate_up_proj [experts, 2 * width, in], down_proj [experts, in, width]     plain
        gate_up_proj [experts, in, 2 * width], down_proj [experts, width, in]     transposed

    Where one is missing, an attribute that transformers sets on the module shows it. JetMoE calls each parameter
    `weight`; DBRX has its matrices in two dimensions, and multiplies by `w2` without transposing it.
    """
    parameter: Any = getattr(module, name)
    shape = tuple(parameter.shape)
    count = getattr(module, "moe_num_experts", None)
    # DBRX: [experts · ffn, hidden] in two dimensions. `v1` is its name for the up projection.
    if len(shape) == 2 and name in ("w1", "v1", "w2") and count and shape[0] == count * module.ffn_hidden_size:
        return Stacking(shape, count, transposed=name == "w2")
    # JetMoE: only sizes that the module repeats distinguish its experts from any other three-dimensional parameter.
    if name == "weight" and len(shape) == 3:
        sizes = tuple(getattr(module, size, None) for size in ("num_experts", "output_size", "input_size"))
        return Stacking(shape, shape[0]) if shape == sizes else None
    if len(shape) != 3 or name not in EXPERT_NAMES:
        return None
    pair = [
        tuple(getattr(module, part).shape) if hasattr(module, part) else () for part in ("gate_up_proj", "down_proj")
    ]
    transposed = are_transposed(*pair) if all(pair) else bool(getattr(module, "is_transposed", False))
    # GPT-OSS has the rows of gate and up alternate; elsewhere all of gate come before all of up.
    interleaved = name == "gate_up_proj" and not getattr(module, "is_concatenated", True)
    return Stacking(shape, shape[0], transposed, interleaved)


def expert_matrices(model: nn.Module, name: str, held: Any = None) -> Any:
    """Returns the matrices `[experts, out, in]` of a parameter, or a sequence that reads them one by one from its file.

    Args:
        model: the model that holds it.
        name: the name of the parameter.
        held: the parameter's values where they are elsewhere, on another device for example.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    stacking = stacking_of_experts(module, last)
    if held is None:
        parameter = module.get_parameter(last)
        stored = getattr(parameter, "stored", None)
        if stored is not None:
            return stacking.read(stored)
        held = parameter.detach()
    return stacking.matrices(held)


def are_transposed(fused: Sequence[int], down: Sequence[int]) -> bool:
    """Returns whether `gate_up_proj` and `down_proj` of these shapes are `[experts, in, out]`."""
    # gate_up [experts, a, b] and down [experts, c, d]: transposed where a = d (hidden) and b = 2 c (twice the width).
    return len(fused) == len(down) == 3 and tuple(fused[1:]) == (down[2], 2 * down[1])
