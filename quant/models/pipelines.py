"""Pipelines of diffusers: a directory with model_index.json, and one directory for each component.

    model_index.json      the class of the pipeline and of each component
    transformer/ | unet/  the denoiser: its config, and its weights as diffusion_pytorch_model*.safetensors
    text_encoder*/        models of transformers
    vae/ scheduler/ tokenizer*/ …

diffusers builds pipeline and components; of a denoiser that is quantized its class builds the outline.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, listed, option, require
from quant.export.checkpoint.files.directory import DENOISING
from quant.models.files import explained, read_fields, safetensors_file
from quant.recipes.plan import PLAN_FILE

INDEX = "model_index.json"
DENOISERS = ("transformer", "transformer_2", "unet", "prior")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def is_pipeline(path: str | Path) -> bool:
    """Returns whether `path` is a directory of a diffusers pipeline."""
    return (Path(path) / INDEX).is_file()


def quantized_by(path: Path) -> Path | None:
    """Returns the file which says that this toolkit has quantized a pipeline, some component or all; None without."""
    return next((file for file in (path / DENOISING, *path.glob(f"*/{PLAN_FILE}")) if file.is_file()), None)


def components_of(path: Path) -> list[str]:
    """Returns the names of the components of a pipeline that are there, in the order of its index."""
    index = read_fields(path / INDEX)
    return [name for name, value in index.items() if isinstance(value, list) and len(value) == 2 and all(value)]


def models_to_quantize(path: Path, asked: str | None) -> list[str]:
    """Returns the components to quantize: those of a list such as "transformer,text_encoder", or the denoisers.

    UserError: there is no such component, or it is no model, is quantized, or has adapters beside it.
    """
    present = components_of(path)
    for name, files in ((name, sorted((path / name).glob("*.safetensors"))) for name in present):
        if not (path / name).is_dir():
            raise UserError(f"{path / name}: is not there, though {INDEX} names it; give the whole pipeline")
        if files and all("." in file.stem for file in files):
            variant = files[0].stem.split(".")[1].split("-")[0]
            raise UserError(
                f"{files[0]}: has the weights of the variant {variant}, and there are no plain ones; write the "
                f"pipeline without it: diffusers.DiffusionPipeline.from_pretrained({str(path)!r}, variant={variant!r}, "
                f"dtype={_dtype_of(path / name)}).save_pretrained('plain')"
            )
    # A pipeline calls the parts of an autoencoder and not the whole, so that it would be calibrated on nothing.
    models = [name for name in present if any((path / name).glob("*.safetensors")) and not name.startswith("vae")]
    named = asked.split(",") if asked else [name for name in present if name in DENOISERS]
    names = [*dict.fromkeys(name.strip() for name in named)]
    if not names:
        raise UserError(
            f"{path / INDEX}: has no transformer and no unet, only {listed(present, 6)}; name the model that is to be "
            f"quantized, {option('components', models[0] if models else 'NAME')}"
        )
    for name in names:
        if name not in present:
            raise UserError(f"{path / INDEX}: has no component {name or repr(name)}; it has {listed(present, 12)}")
        if name not in models:
            pickled = any((path / name).glob("*.bin"))
            why = "its weights are pickled: save the pipeline again with diffusers, pipe.save_pretrained(DIR)"
            if not pickled and name in DENOISERS:
                why = f"has no weights (*.safetensors), though {INDEX} names it; give the whole pipeline"
            elif not pickled:
                why = f"no model that is quantized; name one of {listed(models, 12)}"
            raise UserError(f"{path / name}: {why}")
        config = read_fields(path / name / "config.json").get("quantization_config")
        if isinstance(config, dict):
            raise UserError(
                f"{path / name}: is quantized already ({config.get('quant_method', 'unknown method')}); give the "
                f"pipeline in 16 bit, or name other components with {option('components', 'NAME')}"
            )
    for file in sorted(file for directory in (path, *(path / name for name in names)) for file in _loras(directory)):
        load = f"pipe.load_lora_weights({str(file.parent)!r}, weight_name={file.name!r})"
        if any(".base_layer." in name for name in safetensors_file(file).keys()):  # noqa: SIM118
            raise UserError(
                f"{file}: weights that were saved with a LoRA that was not merged; before pipe.save_pretrained, call "
                "pipe.fuse_lora() and pipe.unload_lora_weights()"
            )
        raise UserError(
            f"{file}: a LoRA that is not merged; merge it before, or move it away: pipe = diffusers.DiffusionPipeline."
            f"from_pretrained({str(path)!r}, dtype=torch.bfloat16); {load}; pipe.fuse_lora(); "
            "pipe.unload_lora_weights(); pipe.save_pretrained('merged')"
        )
    return names


def _loras(directory: Path) -> list[Path]:
    """Returns the files of a directory that hold a LoRA, as diffusers and as other trainers name its tensors."""
    marks = (".lora_A", ".lora_down", "lora.down", "lora1.down", "lora2.down")
    return [
        file
        for file in directory.glob("*.safetensors")
        if any(mark in name for name in safetensors_file(file).keys() for mark in marks)  # noqa: SIM118
    ]


def open_pipeline(path: Path, **components: Any) -> Any:
    """Returns the pipeline of diffusers in a directory, each component in the dtype of its files.

    `components` take the places of those in the directory. Nothing is unpickled or downloaded, and no code is run.
    """
    diffusers: Any = require("diffusers", "diffusion")
    dtypes = {name: dtype for name in components_of(path) if (dtype := _dtype_of(path / name)) is not None}
    dtypes["default"] = torch.float32
    name = read_fields(path / INDEX).get("_class_name")
    if isinstance(name, str) and not hasattr(diffusers, name):
        has = f"diffusers {diffusers.__version__} has no pipeline {name}; a newer one may have"
        raise UserError(f"{path / INDEX}: {has}: pip install -U diffusers")
    logging = diffusers.utils.logging
    logging.disable_progress_bar()
    with explained(path):
        return diffusers.DiffusionPipeline.from_pretrained(
            str(path), dtype=dtypes, use_safetensors=True, local_files_only=True, **components
        )


def _dtype_of(directory: Path) -> torch.dtype | None:
    """Returns the dtype of most numbers in the files of a component, scales left out; None for one without weights."""
    counts: dict[str, int] = {}
    files = list(directory.glob("*.safetensors"))
    for file in [each for each in files if "." not in each.stem] or files:  # no variants such as model.fp16.safetensors
        opened = safetensors_file(file)
        for part in (opened.get_slice(name) for name in opened.keys() if not name.endswith("_scale")):  # noqa: SIM118
            counts[part.get_dtype()] = counts.get(part.get_dtype(), 0) + math.prod(part.get_shape())
    known = {dtype: count for dtype, count in counts.items() if dtype in _DTYPES}
    return _DTYPES[max(known, key=known.__getitem__)] if known else None


def denoiser_class(directory: Path) -> Any:
    """Returns the class of diffusers that config.json of a component names; None for a config of another library."""
    file = directory / "config.json"
    name = read_fields(file).get("_class_name") if file.is_file() else None
    if not isinstance(name, str):
        return None
    diffusers: Any = require("diffusers", "diffusion")
    cls = getattr(diffusers, name, None)
    if cls is None or not issubclass(cls, diffusers.ModelMixin):
        raise UserError(f"{file}: diffusers {diffusers.__version__} has no model {name}; a newer one may have")
    return cls


def outline_of_denoiser(cls: Any, directory: Path) -> nn.Module:
    """Returns the model of a component's config: parameters on the meta device, computed buffers real.

    Buffers that no file has are computed as in diffusers, where the default dtype is the model's.
    """
    accelerate: Any = require("accelerate", "diffusion")
    fields = {k: v for k, v in read_fields(directory / "config.json").items() if k != "quantization_config"}
    before = torch.get_default_dtype()
    with explained(directory / "config.json"), accelerate.init_empty_weights(include_buffers=False):
        try:
            torch.set_default_dtype(_dtype_of(directory) or before)
            return cls.from_config(fields)
        finally:
            torch.set_default_dtype(before)


def write_config(directory: Path, model: Any, quantization: dict[str, Any]) -> None:
    """Writes config.json of a quantized denoiser, as diffusers has it, with its `quantization_config`."""
    fields = json.loads(model.to_json_string())
    fields = {name: value for name, value in fields.items() if name not in ("_name_or_path", "_pre_quantization_dtype")}
    fields["quantization_config"] = quantization
    text = json.dumps(fields, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")
