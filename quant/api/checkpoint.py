"""Saving a quantized model and loading it back: `QuantLinear` in memory, and on disk compressed-tensors.

ModelOpt's layout is read too, and `convert` turns a checkpoint of one layout into one of the other: tensor by tensor,
without a model in memory.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.api.export import LAYOUTS
from quant.api.quantize import install_kv_scales, install_weight, protect, use_expert_modules
from quant.calibration.blocks import stored_dtype
from quant.errors import UserError, counted
from quant.export import checkpoint as files
from quant.export import compressed_tensors as layout
from quant.export import modelopt
from quant.export.names import RenamedTensors, StoredNames, expert_names, stored_names
from quant.extras import require
from quant.formats.tensor import BlockScaledTensor
from quant.models import huggingface
from quant.planning import check_plan_fits, fusion_warnings
from quant.recipes.layers import find_layers
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


def is_checkpoint(path: str | Path) -> bool:
    """Whether `path` is a directory that holds a quantized checkpoint of a known layout."""
    return _quantization_config(Path(path)) is not None or (Path(path) / PLAN_FILE).is_file()


def load(directory: str | Path, model: nn.Module | None = None) -> nn.Module:
    """Reads a quantized checkpoint: one that `save` wrote, or any of compressed-tensors or ModelOpt in a known format.

    The codes and scales in the files become buffers as they are; nothing is dequantized or rounded again.

    Args:
        directory: the checkpoint.
        model: the unquantized module, for a checkpoint without config.json; it is changed in place.

    Raises:
        UserError: not a quantized checkpoint, or its tensors do not fit the model; the message names them.
    """
    directory = Path(directory)
    if not is_checkpoint(directory):
        raise UserError(f"{directory}: no quantized checkpoint (no {PLAN_FILE}, no quantization_config)")
    built = model is None
    if model is None:
        model = outline(directory)
    tensors = open_tensors(directory, model)
    plan = plan_of(directory, model)
    owned: set[str] = set()
    for layer in plan.quantized:
        weight, input_scale = files.read_layer(tensors, layer)
        if weight.shape != layer.shape:
            raise UserError(f"{layer.name}: the checkpoint holds {list(weight.shape)}, the plan {list(layer.shape)}")
        install_weight(model, layer, weight, input_scale, files.read_parts(tensors, layer))
        owned.update(files.layer_tensor_names(tensors, layer))
    if plan.kv_cache is not None:
        install_kv_scales(model, {n: tensors[n] for n in tensors if n.endswith(_KV_SCALES)})
    _assign(model, {n: tensors[n] for n in tensors if n not in owned}, directory, assign=built)
    use_expert_modules(model, plan)
    protect(model)
    return model.eval()


def open_tensors(directory: Path, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The tensors of a checkpoint of `model`, read when asked for, under the names that its modules have."""
    names = stored_names(model)
    return RenamedTensors(files.TensorFiles(directory), replace(names, back=(modelopt.kv_name_of_module, *names.back)))


def outline(directory: Path) -> nn.Module:
    """The model that config.json describes: parameters on the meta device, computed buffers real."""
    transformers = require("transformers", "hf")
    accelerate = require("accelerate", "hf")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: no config.json; build the module and pass it: quant.load(directory, model)")
    with huggingface.quiet():
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        cls = huggingface.model_class(config, str(directory))
        with accelerate.init_empty_weights(include_buffers=False):
            model: nn.Module = cls._from_config(config, dtype=config.dtype)
        if (directory / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model


def plan_of(directory: Path, model: nn.Module) -> Plan:
    """The plan that a checkpoint of `model` came with, or else the one that its config describes."""
    layers = find_layers(model)
    file = directory / PLAN_FILE
    if file.is_file():
        plan = Plan.load(file)
        check_plan_fits(plan, layers)
        return plan
    config = _quantization_config(directory)
    assert config is not None
    if config.get("quant_method") != "compressed-tensors":
        tensors = open_tensors(directory, model)
        return modelopt.plan_of_checkpoint(directory, layers, config, tensors, stored_names(model))
    return files.plan_of_checkpoint(directory, layers, config, stored_names(model))


def _quantization_config(directory: Path) -> dict[str, Any] | None:
    """What config.json says of a known layout. ModelOpt's older exports say it in `hf_quant_config.json` alone."""
    for name, key in (("config.json", "quantization_config"), (modelopt.CONFIG_FILE, "quantization")):
        file = directory / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8")).get(key)
        except (ValueError, AttributeError) as error:
            raise UserError(f"{file}: not a valid config ({error}); write or download it again") from None
        if isinstance(found, dict):
            return found if key == "quantization" or found.get("quant_method") in LAYOUTS else None
    return None


def convert(
    directory: str | Path, out: str | Path, to: str, *, overwrite: bool = False, model: nn.Module | None = None
) -> dict[str, Any]:
    """Writes the checkpoint `directory` in the layout `to`: the same codes and scales, bit for bit, and its plan.

    The tensors are mapped from the files, so that what is in memory is the shard that is being written.

    Args:
        directory: a checkpoint of either layout, with a config.json.
        out: appears when everything in it is written, and not before.
        to: "modelopt" or "compressed-tensors".
        overwrite: replaces what is in `out`.
        model: the checkpoint's `outline`, of a caller that has it.

    Returns:
        `files`, sizes by name; `rounded_scales`, how many second-level scales float32 does not hold in this layout.
        What runs the files reads the nearest one, at most 6e-8 of it away; the files' metadata keeps the exact one,
        which `load` and a conversion back take.

    Raises:
        UserError: an unknown layout, or `out` holds `directory`.
        ValueError: the layout has no name for something in the plan; the message names the layer and the way out.
    """
    directory, out = Path(directory), Path(out)
    if to not in LAYOUTS:
        raise UserError(f"no layout {to!r}; known: {', '.join(LAYOUTS)}")
    if out.resolve() in (directory.resolve(), *directory.resolve().parents):
        raise UserError(f"--out {out} holds {directory}, which it would replace; name another directory")
    if model is None:
        model = outline(directory)
    plan = plan_of(directory, model)
    (modelopt if to == "modelopt" else layout).check_plan(plan)
    tensors = dict(_converted(directory, model, plan, to))
    rounded = sum(t.dtype is torch.float64 and n.endswith(files.SECOND_LEVEL) for n, t in tensors.items())
    for message in [*fusion_warnings(plan), *([] if to == "modelopt" else _of_runtimes(model, plan, tensors))]:
        warnings.warn(message, stacklevel=2)
    with files.new_directory(out, overwrite=overwrite) as temporary:
        files.write_tensors(temporary, tensors)
        for source in directory.iterdir():
            if source.name.startswith(".") or source.suffix == ".safetensors" or source.name in _OF_THE_LAYOUT:
                continue
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, temporary / source.name)
        plan.save(temporary / PLAN_FILE)
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        if to == "modelopt":
            fields["quantization_config"], whole = modelopt.configs(plan, stored_names(model))
            (temporary / modelopt.CONFIG_FILE).write_text(json.dumps(whole, indent=4) + "\n", encoding="utf-8")
        else:
            fields["quantization_config"] = layout.quantization_config(plan, stored_names(model))
        text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False)
        (temporary / "config.json").write_text(text + "\n", encoding="utf-8")
        sizes = {file.name: file.stat().st_size for file in sorted(temporary.iterdir()) if file.is_file()}
    return {"files": sizes, "rounded_scales": rounded}


def _of_runtimes(model: nn.Module, plan: Plan, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What other runtimes do not do with these tensors in the compressed-tensors layout."""
    dtype = stored_dtype(model)
    messages = layout.runtime_warnings(plan, dtype, stored_names(model))
    wide = [n for n, t in tensors.items() if n.endswith(".weight_scale") and t.dtype is torch.float32]
    if wide and dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        messages.append(
            f"{counted(len(wide), 'weight scale')}, {wide[0]} first, in float32, for {name} would round them: "
            "transformers does that unless it loads the checkpoint with dtype=torch.float32; vLLM does not"
        )
    return messages


_KV_SCALES = (".k_scale", ".v_scale")
# Written anew, or said of the other files: a report has their hashes and sizes.
_OF_THE_LAYOUT = (
    "config.json",
    "model.safetensors.index.json",
    PLAN_FILE,
    "receipt.json",
    "report.html",
    "report.json",
    modelopt.CONFIG_FILE,
)


def _converted(directory: Path, model: nn.Module, plan: Plan, to: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint by their names and in their form in the layout `to`."""
    tensors, names, dtype = open_tensors(directory, model), stored_names(model), stored_dtype(model)
    compress = modelopt.compress if to == "modelopt" else layout.compress
    owned: set[str] = set()
    for layer in plan.quantized:
        owned.update(files.layer_tensor_names(tensors, layer))
        weight, input_scale = files.read_layer(tensors, layer)
        files.read_parts(tensors, layer)
        for part, matrix in files.layer_weights(layer.name, weight).items():
            for suffix, tensor in compress(matrix, input_scale, dtype, layer.activation).items():
                yield names.stored(f"{part}.{suffix}"), tensor.contiguous()
    for name in tensors:
        if name in owned:
            continue
        if name.endswith(_KV_SCALES):
            yield _kv_scale(name, tensors[name], names, dtype, to)
        else:
            yield names.stored(name), tensors[name]


def _kv_scale(
    name: str, scale: torch.Tensor, names: StoredNames, dtype: torch.dtype, to: str
) -> tuple[str, torch.Tensor]:
    if to != "modelopt":
        return names.stored(name), layout.stored_scale(scale if scale.dim() else scale.reshape(1), dtype)
    if scale.numel() != 1:
        raise UserError(
            f"{name}: {scale.numel()} scales of the KV cache, one a head, and ModelOpt's layout has one a tensor; "
            "quantize the model again with one"
        )
    return modelopt.kv_name(names.stored(name)), scale.float().reshape(())


def _assign(model: nn.Module, tensors: Mapping[str, torch.Tensor], directory: Path, *, assign: bool) -> None:
    tensors = _with_fused_experts(model, tensors)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=assign)
    if callable(tie := getattr(model, "tie_weights", None)):
        tie()
    quantized = {f"{name}." for name, module in model.named_modules() if hasattr(module, "quantized_weight")}
    held = {id(p) for n, p in model.named_parameters() if n in tensors}
    lost = [n for n in missing if not n.startswith(tuple(quantized)) and id(_tensor(model, n)) not in held]
    if lost or unexpected:
        what, names = ("lacks", lost) if lost else ("has, and the model has no use for,", unexpected)
        raise UserError(f"{directory}: the checkpoint {what} {', '.join(names[:3])} ({len(names)} tensors)")


def _with_fused_experts(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` with the experts that stayed in 16 bit, which files hold one by one, as the model has them."""
    found = dict(tensors)
    for name, parameter in model.named_parameters():
        one_by_one = expert_names(name, len(parameter)) if parameter.dim() == 3 and name not in found else []
        if one_by_one and all(each in found for each in one_by_one):
            found[name] = torch.cat([found.pop(each) for each in one_by_one]).view(parameter.shape)
    return found


def _tensor(model: nn.Module, name: str) -> Any:
    parent, _, last = name.rpartition(".")
    return getattr(model.get_submodule(parent), last)
