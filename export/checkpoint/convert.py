"""`convert` writes a checkpoint in another layout, tensor by tensor, without a model in memory."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, known_names
from quant.base.json_files import text_as_in_source
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.directory import check_apart, new_directory
from quant.export.checkpoint.files.layout import COMPRESSED_TENSORS, Layout
from quant.export.checkpoint.files.layouts import LAYOUTS
from quant.export.checkpoint.files.read_tensors import layer_tensor_names, read_layer, read_parts
from quant.export.checkpoint.files.tensor_file import CHECKSUMS, write_checksums
from quant.export.checkpoint.files.write_tensors import SECOND_LEVEL, clear_flag, layer_weights, write_tensors
from quant.export.checkpoint.model_card import CARD, is_own_card, write_card
from quant.export.checkpoint.open_checkpoint import (
    KV_SCALES,
    Checkpoint,
    dtype_problems,
    kv_scale_problems,
    outline,
    refuse,
    suspect_problems,
    untied_in,
)
from quant.export.checkpoint.other_runtimes import runtime_warnings, trial_load
from quant.models.files import copy_along
from quant.models.huggingface import remote_code
from quant.recipes.blocks import stored_dtype
from quant.recipes.plan import PLAN_FILE
from quant.recipes.plan_check import fusion_warnings

# Not copied: config files are written anew, and a report and checksums are of the old files.
_NOT_COPIED = (
    "config.json",
    "model.safetensors.index.json",
    CHECKSUMS,
    PLAN_FILE,
    "receipt.json",
    "report.html",
    "report.json",
    modelopt.CONFIG_FILE,
)


def convert(
    directory: str | Path,
    out: str | Path,
    to: str,
    *,
    overwrite: bool = False,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Writes the checkpoint `directory` in the layout `to`: the same codes and scales, bit for bit, and its plan.

    The tensors are mapped from the files, so that only the shard that is being written is in memory.

    Args:
        directory: a checkpoint of either layout, with a config.json.
        out: appears when everything in it is written, and not before.
        to: "modelopt" or "compressed-tensors".
        overwrite: replaces a checkpoint at `out`.
        model: the checkpoint's `outline`, of a caller that has it.
        trust_remote_code: lets transformers run the Python files that config.json names in `auto_map`.

    Returns:
        `files`, sizes by name; `rounded_scales`, how many global scales float32 does not hold in this layout.
        Runtimes read the nearest float32, at most 6e-8 of the scale away. The files' metadata keeps the exact scale for
        `load` and for a conversion back.

    Raises:
        UserError: an unknown layout.
        FileExistsError: `out` is, holds or lies in `directory`.
        ValueError: the layout has no name for something in the plan; the message names the layer and the way out.
    """
    directory, out = Path(directory), Path(out)
    if to not in LAYOUTS:
        raise UserError(f"no layout {to!r}; {known_names(to, LAYOUTS)}")
    # The source stays mapped while `out` is written; a directory inside the other would be read and replaced at once.
    check_apart(out, directory)
    with remote_code(trust_remote_code):
        opened = Checkpoint(directory, model or outline(directory))
    plan, names, dtype = opened.plan, opened.names, stored_dtype(opened.model)
    layout = LAYOUTS[to]
    # Before any tensor is read: a plan that the layout cannot express is refused at once, not after most shards.
    layout.check_plan(plan)
    tensors = dict(_converted(opened, dtype, layout))
    # A float64 scale is one that float32 does not hold (`write_tensors`).
    rounded = sum(t.dtype is torch.float64 and n.endswith(SECOND_LEVEL) for n, t in tensors.items())
    messages = [*fusion_warnings(plan), *runtime_warnings(plan, dtype, names, tensors, to)]
    with new_directory(out, overwrite=overwrite) as temporary:
        hashes = write_tensors(temporary, tensors, carried=names.carried, heads=opened.heads)
        for source in directory.iterdir():
            # Tokenizer, processor, remote code and licence go along.
            if source.name.startswith(".") or source.suffix == ".safetensors" or source.name in _NOT_COPIED:
                continue
            copy_along(source, temporary / source.name, directory)
        plan.save(temporary / PLAN_FILE)
        _write_configs(temporary, directory, opened, layout)
        trial = None
        if to == COMPRESSED_TENSORS:
            # As in `save`, tensors that transformers ignores are not compared.
            heads, carried = opened.heads, names.carried
            own = {n: t for n, t in tensors.items() if n not in carried and n.rpartition(".")[0] not in heads}
            trial = trial_load(temporary, opened.model, plan, own, names, allow_missing=True)
            messages = messages if trial is None else trial.heeded(temporary, messages)
        write_checksums(temporary, hashes, PLAN_FILE)
        # The card of another tool goes along as it is.
        if is_own_card(temporary / CARD):
            write_card(temporary, plan, opened.model, source=None, layout=to, measured=directory, trial=trial)
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir()) if file.is_file()}
    for message in messages:
        warnings.warn(message, stacklevel=2)
    return {"files": sizes, "rounded_scales": rounded}


def _write_configs(temporary: Path, directory: Path, opened: Checkpoint, layout: Layout) -> None:
    """Writes config.json as the checkpoint has it, with the quantization of `layout`, and the layout's own files."""
    # The bare word Infinity, which is not JSON, stays where a config has it: its readers know it.
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    clear_flag(fields, opened.model, untied_in(opened, opened.plan).values())
    fields["quantization_config"] = layout.quantization_config(opened.plan, opened.names)
    for file, contents in layout.own_files(opened.plan, opened.names).items():
        text = json.dumps(contents, indent=4, allow_nan=False)
        (temporary / file).write_text(text + "\n", encoding="utf-8")
    text = text_as_in_source(fields, indent=2, ensure_ascii=False)
    (temporary / "config.json").write_text(text + "\n", encoding="utf-8")


def _converted(opened: Checkpoint, dtype: torch.dtype, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    tensors, names = opened.tensors, opened.names
    owned: set[str] = set()
    # Codes and scales go through our own form, `BlockScaledTensor`, which both layouts read and write without rounding.
    for layer in opened.plan.quantized:
        owned.update(layer_tensor_names(tensors, layer))
        weight, input_scale = read_layer(tensors, layer)
        read_parts(tensors, layer)
        for matrix_name, matrix in layer_weights(layer.name, weight).items():
            for suffix, tensor in layout.compress(matrix, input_scale, dtype, layer.activation).items():
                yield names.stored(f"{matrix_name}.{suffix}"), tensor.contiguous()
    unquantized = {name: tensors[name] for name in tensors if name not in owned}
    refuse(kv_scale_problems(tensors))
    refuse(dtype_problems(opened.model, unquantized, tensors))
    refuse(suspect_problems(opened.model, tensors))
    for name in unquantized:
        # Only scales of the KV cache differ between layouts in both name and form: ModelOpt has `k_proj.k_scale` and
        # one number, compressed-tensors `k_scale` and one number or one for each head.
        if name.endswith(KV_SCALES):
            try:
                stored = layout.stored_kv_scale(names.stored(name), tensors[name], dtype)
            except ValueError as error:
                raise UserError(str(error)) from None
            yield stored
        else:
            yield names.stored(name), tensors[name]
