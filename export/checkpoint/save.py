"""`save` writes a quantized model or state dict as a compressed-tensors checkpoint with its plan.

transformers 5 reads the configs of older releases and writes its own form: `rope_theta` and `rope_scaling` become
`rope_parameters`, `torch_dtype` becomes `dtype`, Infinity becomes `{"__float__": "Infinity"}`. Readers that know the
older form would then silently use default values. So the source's own JSON is the base of config.json, and only fields
whose values changed since it was read are set in it:

    source's config.json ─── read and written by transformers ──▶ form of transformers, before
    model.config         ─── written by transformers ───────────▶ form of transformers, now
                                                                  differences ──▶ set in the source's JSON

A quantized model of transformers saves itself: its `save_pretrained` writes the files of `quant.save`.

`push_to_hub` and the checkpoints of a Trainer go through `save_pretrained`, which `attach` gives to a model with its
plan. `load_state_dict` of such a model takes the tensors of a checkpoint too, so that a Trainer resumes from its own.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quant.base.errors import UserError, counted, listed, require, warn
from quant.base.json_files import read_json, text_as_in_source, typed
from quant.base.torch_modes import in_own_modes
from quant.calibration.session import Store
from quant.export.checkpoint import other_runtimes
from quant.export.checkpoint.carry_over import carried_note, carry_over, source_names
from quant.export.checkpoint.convert import CARD, is_own_card, write_card
from quant.export.checkpoint.files import compressed_tensors
from quant.export.checkpoint.files.compressed_tensors import check_plan, compress
from quant.export.checkpoint.files.directory import new_directory
from quant.export.checkpoint.files.names import StoredNames, stored_names
from quant.export.checkpoint.files.tensor_file import write_checksums
from quant.export.checkpoint.files.tensors import (
    SHARD_BYTES,
    checkpoint_tensors,
    clear_flag,
    layer_tensor_names,
    layer_weights,
    plan_of_model,
    read_buffers,
    untied_pairs,
    write_tensors,
)
from quant.export.checkpoint.open_checkpoint import as_in_modules
from quant.formats.tensor import BlockScaledTensor
from quant.models import huggingface, pipelines
from quant.models.files import companion_files, copy_companions, source_directory
from quant.models.prediction_heads import head_layers
from quant.models.quantized_tensors import IN_TRAINING
from quant.recipes.blocks import is_denoiser, stored_dtype
from quant.recipes.callers_model import refuse_adapters, unwrapped
from quant.recipes.plan import PLAN_FILE, Plan
from quant.recipes.plan_check import coverage_warnings, fusion_warnings

# Fields that say how a config was written, or how the source was quantized; they are not carried over as changes.
_FORM = {"_name_or_path", "architectures", "compression_config", "quantization_config", "transformers_version"}


def write_config(
    directory: Path, model: Any, plan: Plan, names: StoredNames, source: Path | None, state: Mapping[str, Tensor] | None
) -> None:
    """Writes config.json with the model's class and dtype, and the `quantization_config`.

    It has the form of the file in `source`; without one, the form of transformers.
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
    fields = {name: _dequantized(part) for name, part in fields.items() if name != "compression_config"}
    return _with_changes(fields, now, before)


def _dequantized(part: Any) -> Any:
    """Returns a part's config without how the source was quantized: its weights were dequantized."""
    if not isinstance(part, dict):
        return part
    form = ("quantization_config", "compression_config")
    return {name: _dequantized(inner) for name, inner in part.items() if name not in form}


def _with_changes(fields: dict[str, Any], now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a source's fields with the values that transformers has changed from `before` to `now`."""
    changed = dict(fields)
    for name, value in now.items():
        if name in _FORM:
            continue
        if all(isinstance(each, dict) for each in (value, before.get(name), fields.get(name))):
            changed[name] = _with_changes(fields[name], value, before[name])
        elif name in before and before[name] == value:
            continue
        elif name == "dtype":
            # transformers notes the dtype of a part where it loads it, also where the source does not name one.
            if "dtype" in fields or "torch_dtype" in fields:
                changed["dtype" if "dtype" in fields else "torch_dtype"] = value
        else:
            if name == "rope_parameters":  # the form of an older transformers goes
                changed.pop("rope_scaling", None)
                changed.pop("rope_theta", None)
            changed[name] = value
    return changed


def checkpoint_warnings(plan: Plan, dtype: torch.dtype, names: StoredNames) -> list[str]:
    """Returns warnings on features that other runtimes lack, fusion groups, and weights that stay in 16 bit.

    `dtype` is bfloat16 where transformers does not load the model: only transformers has trouble with other dtypes.
    """
    return [*other_runtimes.runtime_warnings(plan, dtype, names), *fusion_warnings(plan), *coverage_warnings(plan)]


# transformers writes these fields on each save. They depend on how an object was loaded, and not on its contents.
_HOW_READ = {"is_local", "local_files_only", "name_or_path", "transformers_version", "trust_remote_code"}
Finish = Callable[[Path, dict[str, str], list[str]], None]
"""Called with the unfinished directory, the SHA-256 of each weight file, and warnings about the checkpoint."""


@dataclass(frozen=True)
class Destination:
    """The directory of a checkpoint, and how its files are written."""

    directory: Path  # appears when everything in it is written, and not before
    overwrite: bool = False
    # The finished steps of the run: the checkpoint is built in their directory, and their tensors move into its files.
    store: Store = field(default_factory=Store)
    shard_bytes: int | None = None
    source: Path | None = None  # directory of the original model, whose config and files the checkpoint gets


@in_own_modes
def save(
    model: nn.Module, plan: Plan | None, directory: str | Path, *, tokenizer: Any = None, overwrite: bool = False,
    allow_missing: bool = False, source: str | Path | None = None, finish: Finish | None = None,
) -> dict[str, str]:  # fmt: skip
    """Writes a checkpoint that vLLM and transformers load as it is, with its `plan.json` and a model card.

    Config, tokenizer, templates, code and other files of the original model go along as they are; its README.md as
    README.source.md.

    Args:
        model: quantized by `plan`. Without a transformers config, config.json is left out.
        plan: the plan that was executed on the model; None for the plan that a model of transformers carries once it is
            quantized.
        directory: appears when everything in it is written, and not before.
        tokenizer: saved with the model, if given, unless it is the one of `source`, whose files are copied.
        overwrite: replaces a checkpoint at `directory`.
        allow_missing: writes the checkpoint even if transformers would miss some of its tensors, or ignore some.
        source: directory of the original model, or its name on the Hugging Face hub; None takes the one that
            transformers loaded the model from.
        finish: adds files to the unfinished directory; called with it, the SHA-256 of each weight file, and the
            warnings of `checkpoint_warnings` and of loading it in transformers on trial. Each is a Python warning too.

    Returns:
        SHA-256 of each weight file, by name.

    Raises:
        ValueError: the plan is missing, the layout cannot store one of its formats, a tensor holds NaN or infinity, or
            transformers would load other tensors than these.
        FileExistsError: `directory` is not empty and `overwrite` is False.
    """
    model = unwrapped(model, "save")
    refuse_adapters(model, "save", "merge them first with quant.merge_lora, or save them with save_pretrained")
    plan = getattr(model, "quantization_plan", None) if plan is None else plan
    if not isinstance(plan, Plan):
        raise UserError(
            f"{type(model).__name__} carries no plan: pass the .plan of what quant.quantize gave, or "
            "quant.Plan.load(FILE); one in training is packed first, by quant.pack"
        )
    check_plan(plan)
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(
            f"tokenizer: a {type(tokenizer).__name__} has no save_pretrained; leave it out, and copy its files into "
            "the checkpoint"
        )
    names = stored_names(model)

    def warn_and_finish(temporary: Path, hashes: dict[str, str], messages: list[str]) -> None:
        for message in messages:
            warn(message)
        if finish is not None:
            finish(temporary, hashes, messages)

    destination = Destination(Path(directory).expanduser(), overwrite, source=source_directory(model, source))
    return write_model(
        model, plan, destination, names, tokenizer=tokenizer, allow_missing=allow_missing, finish=warn_and_finish
    )


def write_model(
    model: nn.Module, plan: Plan, destination: Destination, names: StoredNames, *, tokenizer: Any = None,
    allow_missing: bool = False, finish: Finish | None = None, state: Mapping[str, Tensor] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Saves as `save`, for a plan that `check_plan` has passed.

    `state` has the tensors that are not quantized, by the model's names; None takes them from the model.
    """
    in_source = () if destination.source is None else source_names(destination.source)
    names = names.as_in(in_source)
    if not allow_missing:
        other_runtimes.check_experts(plan, names)
    # Solvers may have given layers rotations, branches or factors of their inputs, which the caller's plan does not
    # list.
    plan = plan_of_model(model, plan)
    tensors, origins = checkpoint_tensors(model, stored_dtype(model), names, state, in_source)
    of_heads = head_layers(model)
    heads = {layer.name: layer.shape for layer in plan.layers if layer.name in of_heads}
    own = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in heads}
    if destination.source is not None:
        tensors, names = carry_over(model, tensors, names, destination.source)
        names = names.with_joined(tensors, model.state_dict(keep_vars=True))
    # Buffers may be masks with -infinity; any other tensor with NaN or infinity stops the writing.
    masks = {names.stored(name) for name, _ in model.named_buffers()}
    directory, overwrite, store = destination.directory, destination.overwrite, destination.store
    log = store.moving(origins)
    with new_directory(directory, overwrite=overwrite, work=store.directory, resumable=store.shards) as temporary:
        plan.save(temporary / PLAN_FILE)
        of_transformers = hasattr(getattr(model, "config", None), "save_pretrained")
        dtype = stored_dtype(model) if of_transformers else torch.bfloat16
        messages = checkpoint_warnings(plan, dtype, names)
        if of_transformers:
            write_config(temporary, model, plan, names, destination.source, state)
        elif is_denoiser(model):
            pipelines.write_config(temporary, model, compressed_tensors.quantization_config(plan, names))
        # The trial needs names and shapes only, and so runs while the weights are written. Tensors that were carried
        # over, and prediction heads, are not compared: transformers ignores them.
        with ThreadPoolExecutor(1, thread_name_prefix="trial") as thread:
            loading = None
            if of_transformers:
                trial_load = partial(other_runtimes.trial_load, allow_missing=allow_missing)
                # In the context of this thread: its messages name options as a command takes them.
                loading = thread.submit(copy_context().run, trial_load, temporary, model, plan, own, names)
            hashes = write_tensors(
                temporary, tensors, destination.shard_bytes, masks=masks, log=log, carried=names.carried, heads=heads,
                stem="diffusion_pytorch_model" if is_denoiser(model) else "model",
            )  # fmt: skip
        trial = None
        if loading is not None:
            # After the trial, not during it: building a model on the meta device replaces functions of PyTorch.
            cast = other_runtimes.check_read_back(temporary, model)
            if (trial := loading.result()) is not None:
                messages = trial.heeded(temporary, messages)
            messages += cast + carried_note(model, names, destination.source)
        _write_companions(model, tokenizer, temporary, destination.source)
        if finish is not None:
            finish(temporary, hashes, messages)
        _write_missing_checksums(temporary, hashes)
        # After the comparison with the source and the report, whose loss it shows.
        if of_transformers:
            write_card(temporary, plan, model, source=destination.source, trial=trial)
    return hashes


def _write_missing_checksums(directory: Path, hashes: dict[str, str]) -> None:
    """Writes the hashes of a checkpoint whose `finish` wrote no report with them, so that `verify` has them."""
    if not (directory / "report.json").is_file():
        write_checksums(directory, hashes, PLAN_FILE, "config.json")


def _write_companions(model: Any, tokenizer: Any, directory: Path, source: Path | None) -> None:
    """Writes the files besides weights and config: the source's files unchanged, and the objects that differ."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate() and not _is_of_source(generation, source):
        _write_object(generation, directory)
    if tokenizer is not None and not _is_of_source(tokenizer, source):
        tokenizer.save_pretrained(directory)
    # Last, because `copy_companions` skips files that are there: objects that the caller changed win over the source's
    # files.
    if source is not None:
        copy_companions(source, directory)


def _write_object(saved: Any, directory: Path) -> None:
    try:
        saved.save_pretrained(directory)
    except ValueError:
        # transformers loads a temperature without do_sample with a warning, and does not save it. The config is the
        # model's own, so it goes along as it is.
        if not hasattr(saved, "to_json_file"):
            raise
        directory.mkdir(exist_ok=True)
        saved.to_json_file(directory / "generation_config.json")


def _is_of_source(saved: Any, source: Path | None) -> bool:
    if source is None:
        return False
    with tempfile.TemporaryDirectory() as folder, huggingface.quiet():
        try:
            original = type(saved).from_pretrained(source, **huggingface.local_options())
        except Exception:  # there is none, or one of another class; tokenizers raises anything
            return False
        # transformers' objects have no equality, and a save adds defaults that the source's files lack. So both are
        # saved, and the saved files compared.
        contents = []
        for number, each in enumerate((saved, original)):
            _write_object(each, Path(folder) / str(number))
            files = sorted((Path(folder) / str(number)).iterdir())
            contents.append({file.name: _comparable(file) for file in files})
        return contents[0] == contents[1]


def _comparable(file: Path) -> Any:
    """Returns the content of a file, without the fields that say how it was read."""
    if file.name not in ("tokenizer_config.json", "generation_config.json"):
        return file.read_bytes()
    fields = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in fields.items() if name not in _HOW_READ}


def save_state_dict(
    tensors: Mapping[str, Tensor], solved: Mapping[str, BlockScaledTensor], plan: Plan, out: Destination, finish: Finish
) -> dict[str, str]:
    """Saves as `save`, for a bare state dict whose weights `solved`, by layer, were quantized by `plan`."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer = name if name in solved else name.removesuffix(".weight")
        if layer not in solved:
            stored[name] = tensor
            continue
        for matrix_name, weight in layer_weights(layer, solved[layer]).items():
            # Weight-only: without a module no inputs were seen, so no input scale exists.
            for suffix, part in compress(weight, None, tensor.dtype).items():
                stored[f"{matrix_name}.{suffix}"] = part
    # A mask is a buffer, and a state dict does not distinguish buffers from parameters: only planned weights must be
    # finite.
    masks = tensors.keys() - {f"{layer.name}.weight" for layer in plan.layers}
    with new_directory(out.directory, overwrite=out.overwrite) as temporary:
        hashes = write_tensors(temporary, stored, masks=masks)
        plan.save(temporary / PLAN_FILE)
        finish(temporary, hashes, checkpoint_warnings(plan, torch.bfloat16, StoredNames()))
        _write_missing_checksums(temporary, hashes)
    return hashes


# Files of weights that transformers may have written here before.
_WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin*",
    "diffusion_pytorch_model*.safetensors*",
)


_packed: "WeakKeyDictionary[nn.Module, Plan]" = WeakKeyDictionary()


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
    _watch_optimizers()
    _packed[model] = plan
    if not hasattr(model, "save_pretrained"):
        return
    # A model that is quantized again has the hook already.
    if not hasattr(model, "quantization_plan"):
        model.register_load_state_dict_pre_hook(_from_checkpoint)
    model.quantization_plan = plan  # type: ignore[assignment]
    # A partial and not a bound method: pickle looks a method up in the class.
    model.save_pretrained = partial(save_pretrained, model)  # type: ignore[assignment]


@cache
def _watch_optimizers() -> None:
    # Once: PyTorch keeps each registration, and would call the function as often at every step.
    register_optimizer_step_pre_hook(_warn_of_packed_layers)


def _warn_of_packed_layers(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _packed:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, plan in list(_packed.items()):
        if names := [name for name, p in model.named_parameters() if p.requires_grad and id(p) in held]:
            del _packed[model]
            # Adapters are what trains over packed weights.
            if not any(hasattr(module, "base_layer") for module in model.modules()):
                warn(
                    f"this optimizer trains {listed(names, 2)}, and not the {counted(len(plan.quantized), 'layer')} in "
                    "codes, which have no gradient: to train them, call quant.prepare_qat(model, plan) before the "
                    "optimizer is made and quant.pack(model) at the end; or train an adapter, see quant.lora"
                )


def detach(model: nn.Module) -> None:
    """Undoes `attach` for a model that goes on in training: transformers saves its weights, and a Trainer takes it.

    A Trainer refuses a model that `from_pretrained` marked as quantized. It resumes by the names of the model's own
    tensors, which transformers would otherwise change back to the names of the files.
    """
    _packed.pop(model, None)
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
    model: Any, save_directory: str | Path, is_main_process: bool = True,
    state_dict: Mapping[str, Tensor] | None = None, push_to_hub: bool = False, max_shard_size: int | str | None = None,
    variant: str | None = None, token: str | bool | None = None, distributed_checkpoint: bool = False, **options: Any,
) -> None:  # fmt: skip
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
                "with quant.merge_lora"
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
        asked = {"commit_message": "Upload model", **asked}
        hub.upload_folder(repo_id=repository.repo_id, folder_path=directory, allow_patterns=files, token=token, **asked)


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


def _whole(name: str, tensor: Tensor) -> Tensor:
    # A DTensor, of FSDP or tensor parallelism.
    if hasattr(tensor, "full_tensor"):
        raise UserError(
            f"{name}: is sharded (FSDP); gather the state with get_model_state_dict(model, options=StateDictOptions("
            "full_state_dict=True)), load it into a model that was quantized or loaded in the same way, and save that"
        )
    if tensor.is_meta:
        raise UserError(f"{name}: is not in memory, where it could be saved from; load the model without offloading")
    return tensor


def _from_checkpoint(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
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
