"""`load` reads a quantized checkpoint of `save`, or one of compressed-tensors or ModelOpt that another tool wrote."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, near_file, option, quoted
from quant.base.torch_modes import in_own_modes
from quant.calibration.session import Device, find_device
from quant.export.checkpoint import open_checkpoint
from quant.export.checkpoint.files.directory import saved_report
from quant.export.checkpoint.files.layouts import LAYOUTS, layout_of_config
from quant.export.checkpoint.files.names import StoredNames
from quant.export.checkpoint.save import attach
from quant.models.files import SourceKind, find_checkpoint, find_model, is_export
from quant.models.huggingface import ADAPTER_CONFIG, refuse_directory, remote_code
from quant.models.open_model import Source, open_model
from quant.models.pipelines import is_pipeline
from quant.models.quantized_tensors import AFTER_TRAINING, QuantMethod, is_in_training
from quant.models.state_dict import call_factory
from quant.recipes.plan import PLAN_FILE, Plan


def is_checkpoint(path: str | Path) -> bool:
    """Returns whether `path` is a directory that holds a quantized checkpoint of a known layout."""
    if is_export(Path(path)):
        return False  # its plan is that of the checkpoint
    return open_checkpoint.quantization_config(Path(path)) is not None or (Path(path) / PLAN_FILE).is_file()


def can_run(path: str | Path) -> bool:
    """Returns whether `load` knows the formats of a quantized checkpoint, judging by its config."""
    config = open_checkpoint.quantization_config(Path(path))
    # A plan names only formats of this toolkit, so a checkpoint with a plan can always run.
    if config is None or (Path(path) / PLAN_FILE).is_file():
        return is_checkpoint(path)
    try:
        # Empty names do: formats and schemes are read here, and no module is matched with its entry.
        layout_of_config(config).read_config(config, StoredNames())
    except ValueError:
        return False
    return True


@in_own_modes
def load(
    directory: str | Path, model: nn.Module | None = None, *, device: Device = None, trust_remote_code: bool = False
) -> nn.Module:
    """Reads a quantized checkpoint: one that `save` wrote, or any of compressed-tensors or ModelOpt in a known format.

    The codes and scales in the files become buffers as they are; nothing is dequantized or rounded again. Every tensor
    is checked as it is read: its dtype, its shape, and that it is finite. FP8 codes, which are most of a checkpoint,
    are read when their layer first needs them, on a GPU or in its first forward, and that raises ValueError for NaN.

    Args:
        directory: the checkpoint, or its name on the Hugging Face hub: "org/name" or "org/name@revision".
        model: the unquantized module, for a checkpoint without config.json; it is changed in place.
        device: the device of the returned model, such as "cuda"; None is the CPU. On a Hopper GPU weights take the
            layout of its kernels, as after `.to("cuda")`; `state_dict` has the layout of the checkpoint.
        trust_remote_code: lets transformers run the Python files that config.json names in `auto_map`.

    Raises:
        UserError: not a quantized checkpoint, a plan that does not agree with config.json, or tensors that are damaged
            or do not fit the model; the message names them.
    """
    if "cuda" in str(device):
        find_device(device)  # a GPU that is not there is refused before weights are read
    with remote_code(trust_remote_code):
        path = find_checkpoint(directory)
        check_checkpoint(path)
        opened = open_checkpoint.Checkpoint(path, model or open_checkpoint.outline(path))
        loaded = open_checkpoint.fill(opened, built=model is None)
        # FP8 codes are most of a checkpoint, and are checked when their layer first runs.
        open_checkpoint.refuse(open_checkpoint.suspect_problems(loaded, opened.tensors, fp8=False))
        # The model's `save_pretrained` writes codes from here on, and `quantization_plan` is its plan.
        attach(loaded, opened.plan)
        return loaded.eval().to(device)


def check_checkpoint(directory: Path) -> None:
    """Raises UserError for a directory that `load` cannot read."""
    if is_checkpoint(directory):
        return
    if not directory.exists():
        raise UserError(f"{directory}: no such file or directory{near_file(directory)}")
    if is_export(directory):
        raise UserError(f"{directory} is an export; name the checkpoint that it was made from")
    if directory.suffix == ".gguf":
        raise UserError(f"{directory}: a GGUF file is for llama.cpp; `quant evaluate` measures it")
    if directory.suffix == ".json" and not any(directory.parent.glob("model*.safetensors")):
        raise UserError(f"{directory}: no directory of a checkpoint; `quant plan show` shows a plan")
    if directory.is_file() and is_checkpoint(directory.parent):
        raise UserError(f"{directory} is a file of a checkpoint; name its directory, {directory.parent}")
    file = directory / "config.json"
    # From the most to the least certain: no checkpoint, a checkpoint of our training, one of another method.
    config = open_checkpoint.config_in(file, "quantization_config") if file.is_file() else None
    if config is None:
        if parts := [str(file.parent) for file in sorted(directory.glob(f"*/{PLAN_FILE}"))]:
            pipeline = "pipeline with some, which quant.load_pipeline loads; give one of its components"
            kind = pipeline if is_pipeline(directory) else "folder with some; give one of them"
            raise UserError(f"{directory}: not a checkpoint but a {kind}: {', '.join(parts)}")
        if (directory / ADAPTER_CONFIG).is_file():
            quantized = "`quantize merged --format nvfp4 --out DIR`"
            raise UserError(f"{refuse_directory(directory)}, quantized, which {quantized} writes to DIR")
        model = quoted(directory if file.is_file() or directory.suffix == ".gguf" else "MODEL")
        if is_pipeline(directory.parent):
            model = f"{quoted(directory.parent)} --components {quoted(directory.name)}"
        raise UserError(
            f"{directory}: no quantized checkpoint (no {PLAN_FILE}, no quantization_config); make one with `quantize "
            f"{model} --format nvfp4 --out DIR`"
        )
    if is_in_training(config):
        raise UserError(f"{directory}: {AFTER_TRAINING}")
    method, way_out = config.get("quant_method"), "; quantize the original model with quant.quantize instead"
    if method in list(QuantMethod):
        way_out = ", and quant.open_model and `quantize` dequantize others"
    raise UserError(f"{directory}: quantized by {method}; only {' and '.join(LAYOUTS)} run as they are{way_out}")


def quantization_configs(directory: Path) -> dict[str, dict[str, Any] | None]:
    """Returns the table about quantization, or None, in each config file that a checkpoint has, by file name."""
    files = {name: directory / name for name in open_checkpoint.CONFIG_TABLES if (directory / name).is_file()}
    tables = {key: open_checkpoint.config_in(file, open_checkpoint.CONFIG_TABLES[key]) for key, file in files.items()}
    return tables if any(tables.values()) else dict.fromkeys(tables)


def describe(directory: str | Path) -> tuple[Plan, dict[str, Any] | None]:
    """Returns plan and saved report (None without one) of a checkpoint, read without building the model.

    The plan of another tool's checkpoint is made from its config, with the model on the meta device.
    """
    directory = find_checkpoint(directory)
    if not (directory / PLAN_FILE).is_file():
        check_checkpoint(directory)
        return open_checkpoint.Checkpoint(directory, open_checkpoint.outline(directory)).plan, None
    return Plan.load(directory / PLAN_FILE), saved_report(directory)


def open_runnable(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False, has_factory: bool = True
) -> tuple[Source, nn.Module]:
    """Opens a quantized checkpoint as it is, or any other model; UserError for a bare state dict.

    `has_factory` is whether the caller takes a model factory, which the error then names.
    """
    path = find_model(name)
    # A checkpoint in codes that no kernel here runs, such as GPTQ's or AWQ's, is dequantized by `open_original`.
    if can_run(path):
        model = load(path, call_factory(model_factory) if model_factory else None)
        # Codes are buffers. The first parameter, an embedding or a norm, has the dtype that the model runs in.
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return Source(
            name=name, kind=SourceKind.HUGGINGFACE, model=model, state_dict=None, path=path, dtype=dtype
        ), model
    return open_original(name, model_factory=model_factory, unsafe_load=unsafe_load, has_factory=has_factory)


def open_original(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False, has_factory: bool = True
) -> tuple[Source, nn.Module]:
    """Opens a model that can run; a quantized one is dequantized. UserError for a bare state dict."""
    source = open_model(name, model_factory=model_factory, unsafe_load=unsafe_load)
    if source.model is None:
        build = f"pass {option('model_factory')} to build its module"
        way_out = build if has_factory else "give the directory of its model"
        raise UserError(f"{name}: a bare state dict cannot be run; {way_out}")
    return source, source.model
