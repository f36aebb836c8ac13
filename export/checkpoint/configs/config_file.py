"""`write_config` writes config.json: the fields of the source, unchanged, with the quantization added.

transformers 5 reads the configs of older releases and writes its own form: `rope_theta` and `rope_scaling` become
`rope_parameters`, `torch_dtype` becomes `dtype`, Infinity becomes `{"__float__": "Infinity"}`. Readers that know the
older form would then silently use default values. So the source's own JSON is the base, and only fields whose values
changed since it was read are set in it:

    source's config.json ─── read and written by transformers ──▶ form of transformers, before
    model.config         ─── written by transformers ───────────▶ form of transformers, now
                                                                  differences ──▶ set in the source's JSON
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from quant.export.checkpoint.files import compressed_tensors
from quant.export.checkpoint.files.names import StoredNames
from quant.export.checkpoint.files.tied import clear_flag, untied_pairs
from quant.base.json_files import read_json
from quant.base.json_data import typed
from quant.recipes.json_text import text_as_in_source
from quant.recipes.plan import Plan

# Fields about the form of a config; of its quantization there is a new one.
_FORM = {"_name_or_path", "architectures", "compression_config", "quantization_config", "transformers_version"}
_Path = tuple[str, ...]


def write_config(
    directory: Path,
    model: Any,
    plan: Plan,
    names: StoredNames,
    source: Path | None = None,
    state: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Writes config.json with the model's class and dtype, and the `quantization_config`.

    Args:
        directory: the directory of the checkpoint.
        model: a model of transformers.
        plan: the plan that it is quantized by.
        names: the names of its tensors on disk.
        source: directory of the original model, whose config is kept; None writes only the form of transformers.
        state: the tensors that are not quantized, as for `checkpoint_tensors`.
    """
    # A class with Python files of its own knows the auto class that it stands for; the files go along.
    if getattr(model, "_auto_class", None) is not None:
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, directory, config=model.config)
    model.config.save_pretrained(directory)
    path = directory / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    if source is not None:
        fields = _as_in_source(fields, source / "config.json", type(model.config))
    # Both may be stale: a model built from a config has no architectures there, and .to(dtype) leaves the dtype.
    if type(model).__name__ not in (fields.get("architectures") or ()):
        fields["architectures"] = [type(model).__name__]
    dtype = str(next((p.dtype for p in model.parameters()), torch.float32)).removeprefix("torch.")
    fields["torch_dtype" if "torch_dtype" in fields and "dtype" not in fields else "dtype"] = dtype
    clear_flag(fields, model, untied_pairs(model, state).values())
    # In the place of the source's, where that was quantized.
    fields["quantization_config"] = compressed_tensors.quantization_config(plan, names)
    if source is None:
        text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    else:
        text = text_as_in_source(fields, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _as_in_source(now: Mapping[str, Any], file: Path, cls: Any) -> dict[str, Any]:
    """Returns the fields of the source's config, and the values that `now` has changed in them."""
    fields: dict[str, Any] = read_json(file, "a config", lambda document: typed(dict[str, Any], document, "the file"))
    before = json.loads(cls.from_pretrained(file.parent, local_files_only=True).to_json_string())
    fields.pop("compression_config", None)
    for part in fields.values():
        _drop_quantization(part)
    for path, value in list(_changes(now, before, fields)):
        _set(fields, path, value)
    return fields


def _drop_quantization(part: Any) -> None:
    """Removes from a part's config how the source was quantized: its weights were dequantized."""
    if isinstance(part, dict):
        for name in ("quantization_config", "compression_config"):
            part.pop(name, None)
        for inner in part.values():
            _drop_quantization(inner)


def _changes(
    now: Mapping[str, Any], before: Mapping[str, Any], source: Mapping[str, Any], above: _Path = ()
) -> Iterator[tuple[_Path, Any]]:
    """Yields the fields that `before` has with another value or lacks, by path; whole where `source` lacks them."""
    for name, value in now.items():
        if name in _FORM:
            continue
        if all(isinstance(fields, dict) for fields in (value, before.get(name), source.get(name))):
            yield from _changes(value, before[name], source[name], (*above, name))
        elif name not in before or before[name] != value:
            yield (*above, name), value


def _set(fields: dict[str, Any], path: _Path, value: Any) -> None:
    """Sets a changed field; where the source has it in the form of an older transformers, that form goes."""
    *parents, name = path
    for parent in parents:
        fields = fields[parent]
    if name == "dtype":
        # transformers notes the dtype of a part where it loads it, also where the source does not name one.
        field = next((key for key in ("dtype", "torch_dtype") if key in fields), None)
        if field is not None:
            fields[field] = value
        return
    if name == "rope_parameters":
        fields.pop("rope_scaling", None)
        fields.pop("rope_theta", None)
    fields[name] = value
