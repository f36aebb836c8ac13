"""`save` writes a quantized model or state dict as a compressed-tensors checkpoint with its plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import stored_dtype
from quant.calibration.session import Store
from quant.checkpoints.trial_load import check_experts, check_read_back, trial
from quant.errors import UserError
from quant.export.checkpoint.compressed_tensors import check_plan, compress
from quant.export.checkpoint.compressed_tensors_warnings import rotation_warnings, stopped_warnings
from quant.export.checkpoint.directory import new_directory
from quant.export.checkpoint.names import StoredNames, stored_names
from quant.export.checkpoint.write import (
    checkpoint_tensors,
    layer_weights,
    plan_of_model,
    write_config,
    write_tensors,
)
from quant.formats.tensor import BlockScaledTensor
from quant.recipes.plan import PLAN_FILE, Plan

Finish = Callable[[Path, dict[str, str], list[str]], None]


def save(
    model: nn.Module,
    plan: Plan | None,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    allow_missing: bool = False,
    finish: Finish | None = None,
) -> dict[str, str]:
    """Writes a checkpoint that vLLM and transformers load as it is, with its `plan.json`.

    Args:
        model: quantized by `plan`. Without a transformers config, config.json is left out.
        plan: what was applied; None for the plan that a model of transformers carries once it is quantized.
        directory: appears when everything in it is written, and not before.
        tokenizer: saved beside the model, if given.
        overwrite: replaces what is in `directory`.
        allow_missing: writes the checkpoint even if transformers would miss some of its tensors, or ignore some.
        finish: called with the unfinished directory, the SHA-256 of each weight file, and what transformers does not
            load, to add files to it.

    Returns:
        SHA-256 of each weight file, by name.

    Raises:
        ValueError: there is no plan, the layout cannot store a format of it, a tensor holds NaN or infinity, or
            transformers would load other tensors than these.
        FileExistsError: `directory` is not empty and `overwrite` is False.
    """
    plan = _own_plan(model) if plan is None else plan
    check_plan(plan)
    names = stored_names(model)
    for message in [*rotation_warnings(plan), *stopped_warnings(plan, names)]:
        warnings.warn(message, stacklevel=2)

    def told(temporary: Path, hashes: dict[str, str], messages: list[str]) -> None:
        for message in messages:
            warnings.warn(message, stacklevel=4)
        if finish is not None:
            finish(temporary, hashes, messages)

    return write_model(
        model, plan, directory, names, tokenizer=tokenizer, overwrite=overwrite,
        allow_missing=allow_missing, finish=told,
    )  # fmt: skip


def _own_plan(model: nn.Module) -> Plan:
    """The plan that a quantized model carries."""
    plan = getattr(model, "quantization_plan", None)
    if not isinstance(plan, Plan):
        raise UserError(
            f"{type(model).__name__} carries no plan: pass the .plan of what quant.quantize gave, or "
            "quant.Plan.load(FILE)"
        )
    return plan


def write_model(
    model: nn.Module,
    plan: Plan,
    directory: str | Path,
    names: StoredNames,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    allow_missing: bool = False,
    finish: Finish | None = None,
    store: Store | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
    shard_bytes: int | None = None,
) -> dict[str, str]:
    """As `save`, for a plan that `check_plan` has passed and with the names of the model's tensors on disk.

    The checkpoint is built in the directory of `store`, and the steps that it keeps move into its files. `state` has
    the tensors that are not quantized, in the place of the model's. `shard_bytes` is as of `write_tensors`.
    """
    if not allow_missing:
        check_experts(plan, names)
    plan = plan_of_model(model, plan)
    origins: dict[str, str] = {}
    tensors = checkpoint_tensors(model, stored_dtype(model), names, state, origins)
    masks = {names.stored(name) for name, _ in model.named_buffers()}
    store = store or Store()
    log = store.moving(origins)
    with new_directory(Path(directory), overwrite=overwrite, work=store.directory, resumable=store.shards) as temporary:
        plan.save(temporary / PLAN_FILE)
        messages = []
        known = hasattr(getattr(model, "config", None), "save_pretrained")
        if known:
            write_config(temporary, model, plan, names)
        with ThreadPoolExecutor(1, thread_name_prefix="trial") as thread:
            tried = (
                thread.submit(trial, temporary, model, plan, tensors, allow_missing=allow_missing) if known else None
            )
            hashes = write_tensors(temporary, tensors, shard_bytes, masks=masks, log=log)
        if tried is not None:
            check_read_back(temporary, type(model))  # both replace functions of PyTorch meanwhile
            messages = tried.result()
        if getattr(model, "generation_config", None) is not None and model.can_generate():  # type: ignore[operator]
            model.generation_config.save_pretrained(temporary)  # type: ignore[union-attr, operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        if finish is not None:
            finish(temporary, hashes, messages)
    return hashes


def save_state_dict(
    tensors: Mapping[str, torch.Tensor],
    solved: Mapping[str, BlockScaledTensor],
    plan: Plan,
    directory: str | Path,
    *,
    overwrite: bool = False,
    finish: Finish | None = None,
) -> dict[str, str]:
    """As `save`, for a bare state dict quantized weight-only.

    Args:
        tensors: the original state dict.
        solved: quantized weights by layer name.
        plan: `check_plan` has passed it.
        directory, overwrite, finish: as in `save`.
    """
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        layer = name if name in solved else name.removesuffix(".weight")
        if layer not in solved:
            out[name] = tensor
            continue
        for part, weight in layer_weights(layer, solved[layer]).items():
            for suffix, stored in compress(weight, None, tensor.dtype).items():
                out[f"{part}.{suffix}"] = stored
    # Without a module, masks cannot be told from other tensors that no plan names.
    masks = tensors.keys() - {f"{layer.name}.weight" for layer in plan.layers}
    with new_directory(Path(directory), overwrite=overwrite) as temporary:
        hashes = write_tensors(temporary, out, masks=masks)
        plan.save(temporary / PLAN_FILE)
        if finish is not None:
            finish(temporary, hashes, [])
    return hashes
