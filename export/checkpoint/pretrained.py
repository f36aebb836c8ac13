"""A quantized model of transformers saves itself: its `save_pretrained` writes the files of `quant.save`.

`push_to_hub` and the checkpoints of a Trainer go through `save_pretrained`, which `attach` gives to a model with its
plan. `load_state_dict` of such a model takes the tensors of a checkpoint too, so that a Trainer resumes from its own.
"""

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, warn
from quant.base.extras import require
from quant.export.checkpoint.files.compressed_tensors import check_plan
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.files.read_tensors import layer_tensor_names, read_buffers
from quant.export.checkpoint.files.write_tensors import SHARD_BYTES
from quant.export.checkpoint.model_card import CARD, is_own_card
from quant.export.checkpoint.open_checkpoint import as_in_modules
from quant.export.checkpoint.save import Destination, write_model
from quant.models.configs import source_directory
from quant.models.files import companion_files
from quant.models.quantized_config import IN_TRAINING
from quant.recipes.plan import Plan

# Files of weights that transformers may have written here before.
_WEIGHTS = (
    "model*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*",
    "diffusion_pytorch_model*.safetensors*",
)  # fmt: skip


def attach(model: nn.Module, plan: Plan) -> None:
    """Gives a quantized model of transformers its plan, as `quantization_plan`, and the methods that save by it.

    On any model the attribute is set that names the buffers that DDP need not send to all ranks at each step.
    """
    # Buffers of quantized layers never change, and gloo knows no FP8. DDP looks for them under the names that they have
    # in the model that it gets, which may be a `PeftModel`.
    model._ddp_params_and_buffers_to_ignore = [  # type: ignore[assignment]
        f"{outer}{name}{inner}.{buffer}"
        for name, module in model.named_modules()
        if hasattr(type(module), "quantized_weight")
        for buffer, _ in module.named_buffers(recurse=False)
        for outer in ("", "base_model.model.")
        for inner in ("", ".base_layer")
    ]
    if not hasattr(model, "save_pretrained"):
        return
    # A model that is quantized again has the hook already.
    if not hasattr(model, "quantization_plan"):
        model.register_load_state_dict_pre_hook(_from_checkpoint)
    model.quantization_plan = plan  # type: ignore[assignment]
    # A partial and not a bound method: pickle looks a method up in the class.
    model.save_pretrained = partial(save_pretrained, model)  # type: ignore[assignment]


def detach(model: nn.Module) -> None:
    """Undoes `attach` for a model that goes on in training: transformers saves its weights, and a Trainer takes it.

    A Trainer refuses a model that `from_pretrained` marked as quantized. It resumes by the names of the model's own
    tensors, which transformers would otherwise change back to the names of the files.
    """
    for name in ("quantization_method", "hf_quantizer"):
        model.__dict__.pop(name, None)
    if getattr(model, "is_quantized", False):
        model.is_quantized = False  # type: ignore[assignment]
    config: Any = getattr(model, "config", None)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if hasattr(model, "save_pretrained"):
        model.save_pretrained = partial(_save_in_training, model)  # type: ignore[assignment]


def _save_in_training(model: Any, *args: Any, **options: Any) -> None:
    """Saves as transformers does, by the model's own names; the config says that the weights are in training."""
    model.config.quantization_config = dict(IN_TRAINING)
    try:
        type(model).save_pretrained(model, *args, **{"save_original_format": False, **options})
    finally:
        del model.config.quantization_config


def save_pretrained(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    distributed_checkpoint: bool = False,
    **options: Any,
) -> None:
    """Writes a quantized model as `quant.save` does, into a directory that may hold other files.

    Arguments that are not named below mean to transformers how 16-bit weights are written, and change nothing.

    Args:
        model: quantized, of transformers; with adapters that transformers holds, only these are written.
        save_directory: keeps its other files, such as the optimizer's state; weights of an earlier save are deleted.
        is_main_process: only that process writes.
        state_dict: tensors in the place of the model's, such as those gathered from all ranks.
        push_to_hub: uploads the written files to `repo_id`, by default the directory's name.
        max_shard_size: bytes of the largest file, such as "2GB"; never more than 5 GB.
        variant, distributed_checkpoint: refused, because no quantized checkpoint is written so.
        token: the token for the hub; `repo_id`, `private`, `commit_message`, `create_pr` and `revision` among `options`
            too.

    Raises:
        UserError: adapters are on quantized layers, or parts of the model are not in memory; the message says the way
            out. Otherwise as `quant.save`.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        type(model).save_pretrained(
            model, save_directory, is_main_process, state_dict, push_to_hub, token=token, **options
        )
        return
    for name, value in (("variant", variant), ("distributed_checkpoint", distributed_checkpoint)):
        if value:
            raise UserError(f"save_pretrained({name}={value!r}): a quantized model has one form on disk; leave it out")
    plan: Plan = model.quantization_plan
    for name, module in model.named_modules():
        if hasattr(module, "base_layer"):
            raise UserError(
                f"{name}: has an adapter: save the adapters with the PeftModel's save_pretrained, or merge them first "
                "with its merge_and_unload()"
            )
    state = {name: _whole(name, tensor) for name, tensor in (state_dict or model.state_dict()).items()}
    if not is_main_process:
        return
    check_plan(plan)
    directory = Path(save_directory)
    directory.mkdir(parents=True, exist_ok=True)
    messages: list[str] = []
    # Other files stay, such as the optimizer's state, so the directory cannot be replaced whole. Each file is: the new
    # ones are complete on the same file system before the first is renamed.
    source = source_directory(model)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as work:
        destination = Destination(Path(work) / "checkpoint", shard_bytes=_shard_bytes(max_shard_size), source=source)
        write_model(
            model, plan, destination, stored_names(model), state=state,
            finish=lambda _directory, _hashes, warned: messages.extend(warned),
        )  # fmt: skip
        files = _move_files(destination.directory, directory, source)
    for message in messages:
        warn(message)
    if push_to_hub:
        hub = require("huggingface_hub", "hf")
        repository = hub.create_repo(
            options.get("repo_id") or directory.name, token=token, private=options.get("private"), exist_ok=True
        )
        asked = {name: options[name] for name in ("commit_message", "create_pr", "revision") if options.get(name)}
        hub.upload_folder(
            repo_id=repository.repo_id, folder_path=directory, allow_patterns=files, token=token,
            **{"commit_message": "Upload model", **asked},
        )  # fmt: skip


def _move_files(written: Path, directory: Path, source: Path | None) -> list[str]:
    """Moves a new checkpoint into `directory`, over an earlier one; returns the names of its files.

    Files that came along from `source`, and a card by another author, do not replace files of `directory`.
    """
    files = sorted(file.relative_to(written).as_posix() for file in written.rglob("*") if file.is_file())
    # A save in fewer shards would leave files of an earlier one, and loading would find tensors twice.
    for old in (file for pattern in _WEIGHTS for file in directory.glob(pattern) if file.name not in files):
        old.unlink()
    copied = set() if source is None else {file.relative_to(source) for file in companion_files(source)}
    # A card that a user or a Trainer wrote stays; our own is replaced.
    if not is_own_card(directory / CARD):
        copied.add(Path(CARD))
    for name in files:
        # The tokenizer, say, may have been saved there already, and may be another one than the source's.
        if Path(name) not in copied or not (directory / name).exists():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (written / name).replace(directory / name)
    return files


def _shard_bytes(size: int | str | None) -> int | None:
    if isinstance(size, str):
        units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
        number, unit = size[:-2], size[-2:].upper()
        if unit not in units or not number.strip().isdigit():
            raise UserError(f"max_shard_size={size!r} is not a size: give a number of bytes, or one such as '2GB'")
        size = int(number) * units[unit]
    return None if size is None else min(size, SHARD_BYTES)


def _whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, if it is whole and in memory; UserError otherwise."""
    # A DTensor, of FSDP or tensor parallelism.
    if hasattr(tensor, "full_tensor"):
        raise UserError(
            f"{name}: is sharded (FSDP); gather the state with get_model_state_dict(…, full_state_dict=True), load it "
            "into a model that was quantized or loaded in the same way, and save that"
        )
    if tensor.is_meta:
        raise UserError(f"{name}: is not in memory, where it could be saved from; load the model without offloading")
    return tensor


def _from_checkpoint(model: nn.Module, state: dict[str, torch.Tensor], prefix: str, *_: Any) -> None:
    """Gives the tensors of a checkpoint the names and forms of modules, as a hook of `load_state_dict`."""
    # Our own state dict has buffers `codes` and `scale`; only a checkpoint's files have `weight_scale`.
    if not any(name.endswith(".weight_scale") for name in state):
        return
    names = stored_names(model)
    tensors = {names.of_model(name.removeprefix(prefix)): state.pop(name) for name in list(state)}
    for layer in model.quantization_plan.quantized:  # type: ignore[union-attr]
        owned = layer_tensor_names(tensors, layer)
        if not owned:
            continue
        buffers = read_buffers(tensors, layer, model)
        for name in owned:
            tensors.pop(name)
        tensors |= buffers
    state |= {f"{prefix}{name}": tensor for name, tensor in as_in_modules(model, tensors).items()}
