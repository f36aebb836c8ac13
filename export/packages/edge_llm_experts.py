"""The experts of a block in the ONNX file of TensorRT Edge-LLM: three tensors hold the codes and scales of all of them.

    fc1    rows of up and gate in turns of 64, [experts, 2 · intermediate, hidden]; for SM12x all of up, then of gate
    fc2    rows of down, [experts, hidden, intermediate]
    alpha  the global scale of each expert; where gate and up have two, the exporter rescales both, so that their
           scales cannot be compared

Block scales lie in tiles of 128 rows and 4 blocks, as the tensor cores read them. The intermediate size is padded with
zeros to a multiple of 64, for SM12x of 16. Only NVFP4 experts are laid out so; `int4` experts become Marlin's codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn.functional import pad

from quant.export.checkpoint.files.read_tensors import weight_files
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan

TURN = 64
"""Rows of up, then of gate, that lie together in fc1."""
_FIRST = "gate and up"
_PARTS = {"weight": "codes", "weight_scale": "block scales", "weight_scale_2": "global scales"}


def expert_problems(checkpoint: Path, plan: Plan, holds: Callable[[bytes], bool]) -> tuple[int, list[str]]:
    """Compares the NVFP4 experts of a checkpoint with a graph: how many matrices are in it, and which are not.

    Args:
        checkpoint: in ModelOpt's layout.
        plan: of the checkpoint.
        holds: whether a payload is an initializer of the graph.
    """
    stacks = nvfp4_stacks(plan)
    tensors = _tensors(checkpoint, tuple(f"{stack}." for stack in stacks))
    matrices, problems = 0, []
    for stack in stacks:
        count = sum(name.startswith(f"{stack}.") and name.endswith(".down_proj.weight") for name in tensors)
        shares_scales = all(
            torch.equal(*(tensors[f"{stack}.{index}.{matrix}_proj.weight_scale_2"] for matrix in ("gate", "up")))
            for index in range(count)
        )
        for part, description in _PARTS.items():
            by_matrix = {
                matrix: [tensors[f"{stack}.{index}.{matrix}_proj.{part}"] for index in range(count)]
                for matrix in ("gate", "up", "down")
            }
            for name, layouts in _stacked(by_matrix, part).items():
                if name == _FIRST and part != "weight" and not shares_scales:
                    continue
                if not any(holds(layout.contiguous().view(torch.uint8).numpy().tobytes()) for layout in layouts):
                    problems.append(f"{stack}: the {description} of {name}")
        matrices += 3 * count
    return matrices, problems


def nvfp4_stacks(plan: Plan) -> list[str]:
    """Returns the names of the modules whose experts are in NVFP4."""
    experts = [layer for layer in plan.quantized if layer.kind == LayerKind.EXPERTS]
    stacks = [layer.name.rpartition(".")[0] for layer in experts if layer.weight and layer.weight.is_nvfp4]
    return list(dict.fromkeys(stacks))


def _stacked(matrices: dict[str, list[torch.Tensor]], part: str) -> dict[str, Iterator[torch.Tensor]]:
    """Yields the layouts that the graph may have, for each of its two tensors, from the matrices of all experts."""
    gate, up, down = (torch.stack(matrices[name]) for name in ("gate", "up", "down"))
    if part == "weight_scale_2":
        return {_FIRST: iter([gate.float()]), "down": iter([down.float()])}

    def first() -> Iterator[torch.Tensor]:
        for turn in (TURN, 16):
            up_rows, gate_rows = (pad(x.view(torch.uint8), (0, 0, 0, -x.shape[1] % turn)) for x in (up, gate))
            # Turns of all rows are the layout of SM12x.
            rows = turn if turn == TURN else up_rows.shape[1]
            both = torch.stack([x.unflatten(1, (-1, rows)) for x in (up_rows, gate_rows)], 2)
            yield tiled(both.flatten(1, 3)) if part == "weight_scale" else both.flatten(1, 3)

    def second() -> Iterator[torch.Tensor]:
        for turn in (TURN, 16):
            # Columns: two codes a byte, or one scale for 16 codes.
            unit = turn // 2 if part == "weight" else turn // 16
            columns = pad(down.view(torch.uint8), (0, -down.shape[2] % unit))
            yield tiled(columns) if part == "weight_scale" else columns

    return {_FIRST: first(), "down": second()}


def tiled(scales: torch.Tensor) -> torch.Tensor:
    """Returns block scales `[experts, rows, blocks]` in tiles `[experts, rows / 128, blocks / 4, 32, 4, 4]`."""
    scales = pad(scales, (0, -scales.shape[2] % 4, 0, -scales.shape[1] % 128))
    tiles: torch.Tensor = scales.unflatten(2, (-1, 4)).unflatten(1, (-1, 4, 32)).permute(0, 1, 4, 3, 2, 5)
    return tiles


def _tensors(checkpoint: Path, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint whose names begin with one of `prefixes`."""
    tensors = {}
    for file in weight_files(checkpoint) if prefixes else ():
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 -- no dict
                if name.startswith(prefixes):
                    tensors[name] = stored.get_tensor(name)
    return tensors
