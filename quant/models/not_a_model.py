"""Recognizes directories and files that hold no model by themselves, and says what to do with them.

They are adapters of PEFT (adapter_config.json, or tensors called lora_A and the like), single shards of a model, the
output of a trainer (checkpoint-500/) or of sentence-transformers, and pipelines of diffusers (model_index.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from quant.base.errors import UserError, listed, option
from quant.models.files import SUFFIXES

ADAPTER_CONFIG = "adapter_config.json"
# Tensors of adapters, as PEFT, diffusers and LyCORIS call them.
_ADAPTER = re.compile(
    r"[._](lora_([AB]|up|down|embedding_[AB]|magnitude_vector)|lora\.(up|down)|hada_w[12]|lokr_w[12]|ia3_l|b?oft_[Rrs]"
    r"|vera_lambda_[bd]|vblora_vector_bank|randlora_\w+|road_\w+|shira_\w+)([._]|$)|^prompt_embeddings$"
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.(safetensors|bin|gguf)$")
# What a trainer keeps beside the weights.
_OF_TRAINERS = re.compile(r"^(optimizer|scheduler|scaler|training_args|rng_state.*|trainer_state)\.")


def refuse_directory(path: Path) -> UserError:
    """Returns the error for a directory without config.json: what it is, and a way out."""
    if (path / ADAPTER_CONFIG).is_file():
        return UserError(f"{path}: {_adapter_of(path)}")
    if (path / "model_index.json").is_file():
        return UserError(
            f"{path}: a pipeline of diffusers (model_index.json); open it with diffusers, and pass the module to be "
            "quantized, such as pipeline.transformer, to quant.quantize"
        )
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not _OF_TRAINERS.match(file.name))
    models = sorted(file.parent for file in path.glob("*/config.json") if _is_transformers(file))
    hint = "pass the directory that has one"
    if models:
        # The last of a trainer's: checkpoint-1000 comes after checkpoint-500.
        models.sort(key=lambda folder: [int(digits) for digits in re.findall(r"\d+", folder.name)])
        hint = f"pass one of the directories in it that have one, such as {models[-1]}"
    elif (shards := [file for file in files if _SHARD.search(file.name)]) and shards[0].suffix != ".gguf":
        hint = (
            f"{listed([file.name for file in shards], 1)} hold parts of a model: put its config.json and the index of "
            f"its shards there, or pass {option('model_factory')}, which needs the index alone"
        )
    elif len(files) == 1 or shards:
        hint = f"to open a file in it, pass {files[0]}"
    elif files:
        hint = f"to open a file in it, pass one of {listed(map(str, files), 3)}"
    return UserError(f"{path}: no config.json, so not a Hugging Face directory; {hint}")


def refuse_adapter(path: Path, names: Iterable[str]) -> None:
    """Raises UserError for a bare state dict that is an adapter, or has adapters that are not merged.

    Its matrices are factors of a difference of weights. Quantized as layers, they would be of no use to any program.
    """
    names = list(names)
    adapters = [name for name in names if _ADAPTER.search(name)]
    if not adapters:
        return
    folder = path if path.is_dir() else path.parent
    if any(".base_layer." in name for name in names):
        raise UserError(
            f"{path}: {adapters[0]} is of an adapter that is not merged into its layer; merge it where the model was "
            "made, and save that: model.merge_and_unload().state_dict()"
        )
    if (folder / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path}: {_adapter_of(folder)}")
    raise UserError(
        f"{path}: {adapters[0]} is of an adapter (LoRA or the like), which is no model by itself; merge it into the "
        "model that it was trained on (merge_and_unload of PEFT), save that by save_pretrained, and pass its directory"
    )


def _adapter_of(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    base = base if isinstance(base, str) else "BASE"
    return (
        f"an adapter of PEFT, which is no model by itself; merge it into its base: peft.PeftModel.from_pretrained("
        f"quant.open_model({base!r}).model, {str(folder)!r}).merge_and_unload().save_pretrained('merged'), copy the "
        "tokenizer of the base there, and pass merged"
    )


def _is_transformers(file: Path) -> bool:
    try:
        return "model_type" in json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
