"""Saves a quantized model, or a quantized state dict, as a compressed-tensors checkpoint with its plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.export import checkpoint as files
from quant.export import compressed_tensors as layout
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import PLAN_FILE, Plan


def save(
    model: nn.Module,
    plan: Plan,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    finish: Callable[[Path, dict[str, str]], None] | None = None,
) -> dict[str, str]:
    """Writes a checkpoint that vLLM and transformers load as it is, with its `plan.json`.

    Args:
        model: quantized by `plan`. Without a transformers config, config.json is left out.
        plan: what was applied.
        directory: appears when everything in it is written, and not before.
        tokenizer: saved beside the model, if given.
        overwrite: replaces what is in `directory`.
        finish: called with the unfinished directory and the SHA-256 of each weight file, to add files to it.

    Returns:
        SHA-256 of each weight file, by name.

    Raises:
        ValueError: the layout cannot store a format of the plan.
        FileExistsError: `directory` is not empty and `overwrite` is False.
    """
    layout.check_plan(plan)
    plan = files.plan_of_model(model, plan)
    tensors = files.checkpoint_tensors(model, stored_dtype(model))
    return _write(Path(directory), tensors, plan, getattr(model, "config", None), model, tokenizer, overwrite, finish)


def save_state_dict(
    tensors: Mapping[str, torch.Tensor],
    solved: Mapping[str, BlockScaledTensor],
    plan: Plan,
    directory: str | Path,
    *,
    overwrite: bool = False,
    finish: Callable[[Path, dict[str, str]], None] | None = None,
) -> dict[str, str]:
    """As `save`, for a bare state dict quantized weight-only.

    Args:
        tensors: the original state dict.
        solved: quantized weights by layer name.
        plan, directory, overwrite, finish: as in `save`.
    """
    layout.check_plan(plan)
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = name if name in solved else name.removesuffix(".weight")
        if layer not in solved:
            out[name] = tensor
            continue
        for part, weight in files.layer_weights(layer, solved[layer]).items():
            for suffix, stored in layout.compress(weight, None, tensor.dtype).items():
                out[f"{part}.{suffix}"] = stored
    return _write(Path(directory), out, plan, None, None, None, overwrite, finish)


def _write(
    directory: Path,
    tensors: Mapping[str, torch.Tensor],
    plan: Plan,
    config: Any,
    model: Any,
    tokenizer: Any,
    overwrite: bool,
    finish: Callable[[Path, dict[str, str]], None] | None,
) -> dict[str, str]:
    with files.new_directory(directory, overwrite=overwrite) as temporary:
        hashes = files.write_tensors(temporary, tensors)
        plan.save(temporary / PLAN_FILE)
        if hasattr(config, "save_pretrained"):
            files.write_config(temporary, model, plan)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if finish is not None:
            finish(temporary, hashes)
    return hashes
