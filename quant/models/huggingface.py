"""transformers loads Hugging Face directories; this file checks them first and picks the model's class.

A bad directory is refused in one line before anything heavy starts. The class is the one that `architectures` names,
because `AutoModel` would drop the head of a model that is not a causal language model. Missing weights are an error
here; transformers would fill them with random numbers. Python files of the directory (`auto_map`) run only under
`remote_code(True)`, which `--trust-remote-code` sets.
"""

import contextlib
import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, counted, importing, listed, option, quoted, require, warn
from quant.export.checkpoint.files.names import stored_names
from quant.export.checkpoint.files.tensors import TensorFiles
from quant.models.files import (
    SUFFIXES,
    check_elements,
    check_links,
    check_numbers,
    check_processor,
    check_sizes,
    checked_fields,
    explained,
    is_export,
    one_line,
    read_fields,
    read_generation_config,
    safetensors_file,
    shard_names,
)
from quant.models.quantized_tensors import Quantization, QuantizedTensors, Renamed, quantization_of, refuse_packed
from quant.models.state_dict import open_safetensors
from quant.models.stored_weights import open_stored

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
        make = f"`quantize {quoted(path)} --format nvfp4 --out DIR` quantizes one for quant.load_pipeline"
        how = f"{make}, and quant.quantize a module of it, such as pipeline.transformer"
        how = "quantized already, which quant.load_pipeline loads" if (path / "denoising.json").is_file() else how
        return UserError(f"{path}: a pipeline of diffusers (model_index.json): {how}")
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not _OF_TRAINERS.match(file.name))
    configs = (file for file in path.glob("*/config.json") if file.is_file())
    models = sorted(file.parent for file in configs if b'"model_type"' in file.read_bytes())
    hint = "it is an export; name the model" if is_export(path) else "pass the directory that has one"
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


def refuse_part(path: Path, names: Iterable[str]) -> None:
    """Raises UserError for one file of a model that has several, which would pass for the whole of it."""
    part = re.search(r"-\d{5}-of-(\d{5})\.\w+$", path.name)
    maps = (read_fields(index).get("weight_map") for index in path.parent.glob("*.index.json"))
    indexed = {name for stored in maps if isinstance(stored, dict) and path.name in stored.values() for name in stored}
    if (part is not None and int(part[1]) > 1) or indexed - set(names):
        raise UserError(f"{path}: one of several files of a model; give their directory, {path.parent}")


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


TRUSTED = ContextVar("TRUSTED", default=False)
"""Whether Python files of a model may run, which `remote_code` sets."""
_EXPERT = re.compile(r"\.experts\.\d+\.")
_FULL_MODELS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
"""Classes of transformers with every part of a model; each by its config."""
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_POINTER = b"version https://git-lfs"


def load(
    path: Path, dtype: torch.dtype | None, meta: bool, stream: bool = False
) -> tuple[nn.Module, Quantization | None]:
    """Returns the model in a directory, in evaluation mode, and how its files were quantized if they were.

    Without `dtype` weights have the config's, or else the first shard's. `meta` reads no weights, and `stream` leaves
    those in the files whose parameters have no tensor of their own there; see `stored_weights`.
    """
    if not (path / "config.json").is_file():
        raise refuse_directory(path)
    _check_types(fields := read_fields(path / "config.json"), path / "config.json")
    quantization = quantization_of(path, fields)
    shards = find_shards(path)
    readable = [shard for shard in shards if shard.suffix == ".safetensors"]
    if quantization is None:
        for shard in readable:
            file = safetensors_file(shard)
            dtypes = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
            refuse_packed(shard, dtypes, clause=", and no quantization_config says how; download its config.json again")
    if (path / "generation_config.json").is_file():
        checked_fields(path / "generation_config.json")
    with quiet():
        config = read_config(path)
        # Before the model is built: with a size out of range that would not end, even on the meta device.
        check_sizes(config, shards, path / "config.json")
        # With the table in the config transformers would replace modules by quantized ones, and the weights come
        # dequantized.
        for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
            for name in ("quantization_config", "compression_config"):
                if hasattr(part, name):
                    delattr(part, name)
        cls = model_class(config, str(path))
        if quantization is not None:
            tensors = QuantizedTensors(shards, quantization, dtype or config.dtype or torch.bfloat16)
            if tensors.packed:
                if stream and (model := _open_streamed(cls, config, tensors.dtype, path, tensors)) is not None:
                    return model, quantization
                return build(cls, config, tensors.dtype, meta, path, tensors), quantization
            warn(f"{path}: the config says {quantization}, and no tensor is quantized")
        if (dtype := dtype or config.dtype) is None:  # that of the first floating-point tensor
            stored = open_safetensors(shards[0], None, meta=True) if shards[0].suffix == ".safetensors" else {}
            dtype = next((each.dtype for each in stored.values() if each.dtype.is_floating_point), torch.float32)
        if stream:
            # Experts that have matrices of their own in the files, judging by their names, stay there.
            names = (name for shard in readable for name in safetensors_file(shard).keys())  # noqa: SIM118
            if any(map(_EXPERT.search, names)) and (model := _open_streamed(cls, config, dtype, path)) is not None:
                return model, None
        return build(cls, config, dtype, meta, path), None


def _check_types(fields: Mapping[str, Any], where: Path) -> None:
    """Raises UserError for fields that end in an error of transformers' code, which does not name them."""
    for key in {"dtype", "torch_dtype"} & fields.keys():
        dtype = getattr(torch, str(value := fields[key]).removeprefix("torch."), None)
        if isinstance(value, str) and value != "auto" and not getattr(dtype, "is_floating_point", False):
            raise UserError(f"{where}: {key} {value!r} is no floating-point dtype; write one there, such as bfloat16")
    if not isinstance(table := fields.get("quantization_config"), dict | None):
        raise UserError(f"{where}: quantization_config is a {type(table).__name__}, not a table; download it again")


def _open_streamed(
    cls: Any, config: Any, dtype: torch.dtype, path: Path, tensors: QuantizedTensors | None = None
) -> nn.Module | None:
    """Returns the model with weights where they are stored; None where only transformers can read it."""
    # Buffers such as rotary frequencies are computed and in no file, so they must not be on the meta device.
    with explained(path), require("accelerate", "hf").init_empty_weights(include_buffers=False):
        model: Any = cls._from_config(config, dtype=dtype)
    check_elements(model, find_shards(path), path / "config.json")
    read_generation_config(model, path)
    if tensors is not None:  # as transformers does
        model.name_or_path = model.config._name_or_path = str(path)
    of_model = stored_names(model).of_model
    files = TensorFiles(path, of_model) if tensors is None else Renamed(tensors, of_model)
    return patch_forward(model).eval() if open_stored(model, files) else None


def read_config(path: Path) -> Any:
    """Returns the transformers config of a directory; UserError if that would have to run code, or is unknown."""
    check_links(path)
    file = path / "config.json"
    checked_fields(file)
    if file.read_bytes().startswith(b"\xef\xbb\xbf"):  # of which transformers says that it is no JSON
        raise UserError(f"{file}: begins with a byte order mark (EF BB BF); save it as UTF-8 without one")
    with explained(file):
        return require("transformers", "hf").AutoConfig.from_pretrained(path, **local_options())


def build(
    cls: Any, config: Any, dtype: torch.dtype, meta: bool, path: Path, tensors: QuantizedTensors | None = None
) -> nn.Module:
    """Makes the model, on the meta device or with its weights: `tensors`, which are dequantized, or the directory's."""
    if meta:
        return outline(cls, config, dtype, path)
    model, unexpected = read_model(cls, config, dtype, path, tensors)
    if unexpected:
        _refuse_guessed_class(cls, config, path, unexpected)
        warn(f"{path}: {cls.__name__} has no use for {listed(unexpected, 3)}, which do not run")
    if tensors is not None:  # what transformers would have found in the directory
        read_generation_config(model, path)
        model.name_or_path = model.config._name_or_path = str(path)
    return patch_forward(model)


def outline(cls: Any, config: Any, dtype: torch.dtype, path: Path) -> nn.Module:
    """Returns a model on the meta device; `path` is its directory or GGUF file, whose size bounds the model's."""
    with explained(path), torch.device("meta"):
        model: nn.Module = cls._from_config(config, dtype=dtype).eval()
    files, named = (find_shards(path), path / "config.json") if path.is_dir() else ([path], path)
    check_elements(model, files, named)
    return model


def read_model(
    cls: Any, config: Any, dtype: torch.dtype, path: Path, tensors: QuantizedTensors | None = None, **options: Any
) -> tuple[Any, list[str]]:
    """Builds a model with its weights; also returns the names of tensors that its class has no use for."""
    outline(cls, config, dtype, file := path / options.get("gguf_file", ""))
    source, options = (path, options) if tensors is None else (None, {**options, "state_dict": tensors.deferred()})
    # Of other shapes transformers prints a table, and raises an error that only refers to it.
    options["ignore_mismatched_sizes"] = True
    with explained(f"{file}: transformers cannot load it"):
        try:
            model, info = cls.from_pretrained(
                source, config=config, dtype=dtype, output_loading_info=True, **local_options(), **options
            )
        except pickle.UnpicklingError as error:
            raise UserError(
                f"{path}: its weights are a damaged pickle, or hold more than tensors and would run code; get the "
                "model as safetensors"
            ) from error
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    if mismatched := sorted(info["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise UserError(
            f"{path / options.get('gguf_file', 'config.json')}: {name} is {list(stored)} in the files, and "
            f"{cls.__name__} makes it {list(expected)} ({counted(len(mismatched), 'such tensor')}); is a size missing, "
            "or the config another's?"
        )
    if missing:
        guessed = not config.architectures and "gguf_file" not in options
        whose = (
            f"its config has no `architectures`, and {cls.__name__} is a guess: write the class there"
            if guessed
            else ("is a shard missing, or the config another's?")
        )
        raise UserError(f"{file}: the checkpoint lacks {listed(missing, 3)}; {whose}")
    return model, unexpected


def _refuse_guessed_class(cls: Any, config: Any, path: Path, unexpected: list[str]) -> None:
    """Refuses a class that was guessed from the config and that leaves tensors of the files out."""
    if config.architectures or _class_of_directory(config) is not None:
        return
    # For a Whisper that names no class, transformers has only a decoder; for a LLaVA, a model without its head.
    transformers = require("transformers", "hf")
    names = {getattr(transformers, kind).get(type(config), cls).__name__ for kind in _FULL_MODELS} - {cls.__name__}
    hint = f', such as "architectures": ["{sorted(names)[0]}"]' if names else ""
    raise UserError(
        f"{path / 'config.json'}: names no class in `architectures`, and {cls.__name__}, which it would be, has no use "
        f"for {listed(unexpected, 2)}; write the model's class there{hint}, or build the module in Python and pass it "
        "to quant.quantize"
    )


_OF_TOKENIZER = re.compile(r"token|vocab|merges|tekken|spiece|\.model$")


def has_tokenizer(path: Path) -> bool:
    """Returns whether a directory has a file of a tokenizer."""
    return path.is_dir() and any(_OF_TOKENIZER.search(file.name) for file in path.iterdir())


def load_tokenizer(path: Path, gguf_file: str | None = None, reads: str = "input_ids") -> Any:
    """Returns the tokenizer in a directory, or in a GGUF file in it; UserError if there is none that can be read.

    `reads` is the main input of the model.
    """
    transformers = require("transformers", "hf")
    options = {"gguf_file": gguf_file} if gguf_file else {}
    check_links(path)
    if (path / "tokenizer_config.json").is_file():
        check_numbers(path / "tokenizer_config.json")
    remedy = "put the model's tokenizer.json and tokenizer_config.json there"
    if reads != "input_ids":
        remedy = f"the model reads {reads}: give images or sounds, or a .safetensors of its inputs by name"
    remedy = "convert the file again, with its vocabulary" if gguf_file else remedy
    # Of GPT-2 and others transformers makes an empty tokenizer where there is no file of one.
    if gguf_file is None and not has_tokenizer(path):
        raise UserError(f"{path}: no usable tokenizer (no file of one); {remedy}")
    with quiet():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **local_options(), **options)
        except Exception as error:  # the tokenizers library raises nothing more specific
            raise UserError(f"{path / (gguf_file or '')}: no usable tokenizer ({one_line(error)}); {remedy}") from error
    # How it was read is not a property of the tokenizer, which may be saved again.
    for key in ("local_files_only", "trust_remote_code", "is_local"):
        tokenizer.init_kwargs.pop(key, None)
    length = tokenizer.model_max_length
    if not isinstance(length, int | float):
        raise UserError(
            f"{path / 'tokenizer_config.json'}: model_max_length is not a number but a {type(length).__name__}; "
            "download it again"
        )
    return tokenizer


def load_processor(path: Path) -> Any:
    """Returns the processor in a directory, of images, sounds or texts; UserError if there is none that can be read."""
    transformers = require("transformers", "hf")
    check_links(path)
    for name in ("tokenizer_config.json", "preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            check_processor(path / name)
    reasons = []
    with quiet():
        for loader in ("AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor", "AutoTokenizer"):
            try:
                return getattr(transformers, loader).from_pretrained(path, **local_options())
            except Exception as error:  # processors are programs of many authors, and fail as they like
                reasons.append(one_line(error))
    raise UserError(
        f"{path}: no usable processor ({reasons[0]}); put its preprocessor_config.json and tokenizer files there"
    )


def model_class(config: Any, where: str) -> Any:
    """Returns the class that `config.architectures` names; without any, the fullest that fits the config."""
    transformers, auto = require("transformers", "hf"), require("transformers.models.auto.modeling_auto", "hf")
    if (reference := _class_of_directory(config)) is not None:
        dynamic = require("transformers.dynamic_module_utils", "hf")
        with explained(where):
            cls = dynamic.get_class_from_dynamic_module(reference[1], where, local_files_only=True)
        # As transformers does: the class then knows that its Python files are saved with a model of it.
        cls.register_for_auto_class(reference[0])
        return cls
    for name in config.architectures or ():
        with importing():  # transformers imports the file of a class when it is first named
            cls = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel):
            # Types may borrow the class of another, as InternLM3 does Llama's; a table holds one name or several.
            own = [table.get(config.model_type) for key, table in vars(auto).items() if key.endswith("MAPPING_NAMES")]
            is_own = any(name == each or (isinstance(each, tuple) and name in each) for each in own)
            if not is_own and not isinstance(config, getattr(cls, "config_class", None) or object):
                named = f"architectures names {name}, no class of model_type {config.model_type}"
                raise UserError(f"{where}: {named}; correct one of them in config.json")
            return cls
    if not config.architectures:
        for kind in ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_MAPPING"):
            if type(config) in (mapping := getattr(transformers, kind)):
                return mapping[type(config)]
    name_or_type = config.architectures or config.model_type
    raise UserError(
        f"{where}: transformers {transformers.__version__} has no class for {name_or_type}; "
        "upgrade it, or build the module yourself and pass it to quant.quantize"
    )


def _class_of_directory(config: Any) -> tuple[str, str] | None:
    """Returns the auto class of the model in the directory's own Python files, and its name there; None without."""
    references = getattr(config, "auto_map", None)
    # A config of transformers goes with a model of transformers, even where the directory has code for an older one.
    if not TRUSTED.get() or not isinstance(references, dict) or type(config).__module__.startswith("transformers."):
        return None
    models = {kind: each for kind, each in references.items() if kind.startswith("AutoModel") and isinstance(each, str)}
    # The one that `architectures` names, or else the fullest: a causal language model before a bare `AutoModel`.
    named = [kind for kind, each in models.items() if each.rpartition(".")[2] in (config.architectures or ())]
    kinds = [*named, *("AutoModelForCausalLM", "AutoModel"), *models]
    return next(((kind, models[kind]) for kind in kinds if kind in models), None)


@contextlib.contextmanager
def remote_code(trusted: bool) -> Iterator[None]:
    """Lets transformers run the Python files that a model's directory names in `auto_map`, while open, if trusted."""
    before = TRUSTED.set(trusted or TRUSTED.get())
    try:
        yield
    finally:
        TRUSTED.reset(before)


def local_options() -> dict[str, bool]:
    """Returns arguments for every `from_pretrained`: no downloads, and no code of the directory without consent."""
    return {"local_files_only": True, "trust_remote_code": TRUSTED.get()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' warnings and progress bars, unless its verbosity was set to info or debug."""
    logging = require("transformers.utils.logging", "hf")
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    if verbosity <= logging.INFO:
        yield
        return
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def find_shards(path: Path) -> list[Path]:
    """Returns the weight files, each there, none empty, and safetensors files complete."""
    for name in _WEIGHTS:
        index = path / f"{name}.index.json"
        if os.path.lexists(path / name):  # a link that leads nowhere is missing
            shards = [path / name]
        elif index.is_file():
            weights = read_fields(index).get("weight_map")
            if not isinstance(weights, dict) or not weights or not all(isinstance(v, str) for v in weights.values()):
                raise UserError(f"{index}: has no weight_map of names of files; download it again")
            shards = [path / shard for shard in shard_names(weights, index)]
        else:
            continue
        for shard in shards:
            if not shard.is_file() or not shard.stat().st_size:
                raise UserError(f"{shard}: this weight file is missing or empty; download it again")
            with shard.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    raise UserError(f"{shard}: a pointer of Git LFS; `git lfs pull` in {path} fetches the weights")
            if shard.suffix == ".safetensors":
                safetensors_file(shard)
        return shards
    if (path / ADAPTER_CONFIG).is_file():
        raise refuse_directory(path)
    if "_class_name" in read_fields(path / "config.json"):
        raise UserError(
            f"{path}: a model of diffusers; give the directory of its pipeline, with model_index.json, or open it with "
            "diffusers and pass the module to quant.quantize"
        )
    parts = sorted(part.name for part in path.glob("*-of-*") if part.suffix in (".safetensors", ".bin"))
    missing = f", {parts[0].rsplit('-', 3)[0]}{Path(parts[0]).suffix}.index.json; download it" if parts else ""
    wanted = f"{' or '.join(_WEIGHTS)}, or an index of shards{missing}"
    raise UserError(f"{path}: has a config.json and {listed(parts) or 'no weights'}; expected {wanted}")


def patch_forward(model: nn.Module) -> nn.Module:
    """Patches the forward pass of a model that transformers cannot run, and returns the model.

    Llama 4 with images (`Llama4ForConditionalGeneration`, transformers 5.24): its forward reads `image_outputs` from
    the output of its language model, which has no such field, and ends in an AttributeError.
    """
    part: Any = getattr(model, "language_model", None)
    is_llama_4 = type(model).__name__ == "Llama4ForConditionalGeneration" and part is not None
    if is_llama_4 and not is_patched(model):
        part.register_forward_hook(_without_image_outputs)
    return model


def is_patched(model: nn.Module) -> bool:
    """Returns whether `patch_forward` has changed a model."""
    part: Any = getattr(model, "language_model", None)
    return part is not None and _without_image_outputs in getattr(part, "_forward_hooks", {}).values()


def _without_image_outputs(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    # A model output, unless a tuple was requested.
    if hasattr(output, "keys") and not hasattr(output, "image_outputs"):
        output.image_outputs = None
