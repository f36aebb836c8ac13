"""What the files beside the weights say: configs are read and checked, and errors that they cause become one line.

transformers trusts a config: it checks some fields, and wrong values of others raise any exception in its models.
"""

from __future__ import annotations

import json
import re
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quant.base.errors import UserError, megabytes, option
from quant.base.extras import require
from quant.base.json_files import read_json, typed
from quant.models.files import cached_snapshot, find_model, safetensors_file

if TYPE_CHECKING:
    from torch import nn

_FLAGS = {
    "do_sample", "output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict",
    "return_dict_in_generate", "use_cache",
}  # fmt: skip
_TOKENS = {"bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"}
_BLOCKS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth")
_SIZE = re.compile(r"(size|dims?|heads?|layers?|experts?|embd|embed|inner|channels?|blocks?|width|depth|rank|groups?)$")
_USUAL = {True: 1000, False: 1 << 20}  # of blocks, and of other sizes: no reason to look into the files
# Upper limits of a processor's sizes, far above those of any model that we know. Beyond them the preparation of one
# image or sound takes minutes, or all memory.
_OF_PROCESSORS = {
    "n_fft": 1 << 16, "fft_length": 1 << 16, "hop_length": 1 << 16, "win_length": 1 << 16, "feature_size": 1 << 14,
    "num_mel_bins": 1 << 14, "chunk_length": 3600, "sampling_rate": 1 << 20, "n_samples": 1 << 26,
    "nb_max_frames": 1 << 20, "height": 1 << 14, "width": 1 << 14, "shortest_edge": 1 << 14,
}  # fmt: skip
_LONGEST = 500  # characters of a message that is not ours


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file that came with a model; UserError if it cannot be read, or has no fields."""
    try:
        return read_json(file, "valid JSON", lambda document: typed(dict[str, Any], document, "the document"))
    except (ValueError, OSError) as error:
        raise UserError(f"{one_line(error)}; download it again") from None


def checked_fields(file: Path) -> dict[str, Any]:
    """Reads a config by `read_fields`, and checks the types of classes and of fields that forward passes use."""
    fields = read_fields(file)
    try:
        typed(list[str] | None, fields.get("architectures"), "architectures")
        for name in _FLAGS & fields.keys():
            typed(bool | None, fields[name], name)
        for name in _TOKENS & fields.keys():
            ids = fields[name]
            typed(list[int] if isinstance(ids, list) else int | None, ids, name)
    except ValueError as error:
        raise UserError(f"{file}: {error}; correct it, or download it again") from None
    return fields


def check_numbers(file: Path) -> None:
    """Raises UserError for a JSON file with NaN or infinity, which would be written again next to a result."""
    try:
        json.dumps(read_fields(file), allow_nan=False)
    except ValueError as error:
        raise UserError(f"{file}: {one_line(error)}; correct it, or download it again") from None


def check_processor(file: Path) -> None:
    """Raises UserError for the config of a processor with NaN, infinity, or a size far beyond any processor's."""
    check_numbers(file)
    for name, value in _leaves(read_fields(file)):
        most = _OF_PROCESSORS.get(name)
        if most is not None and isinstance(value, int | float) and value > most:
            raise UserError(f"{file}: {name} is {reprlib.repr(value)}; more than {most} is assumed to be a mistake")


def read_generation_config(model: Any, path: Path) -> None:
    """Gives a model the generation config of its directory, if there is one; UserError if it cannot be read."""
    file = path / "generation_config.json"
    if file.is_file():
        checked_fields(file)
        with explained(file):
            generation = require("transformers", "hf").GenerationConfig
            model.generation_config = generation.from_pretrained(path, local_files_only=True)


def check_sizes(config: Any, files: Iterable[Path], where: Path) -> None:
    """Raises UserError for more blocks than tensors in the files, or a size beyond the weights: listing never ends."""
    # The whole numbers that sizes follow from; Aria has a table by numbers.
    sizes = ((n, v) for n, v in _leaves(config.to_dict()) if isinstance(v, int) and _SIZE.search(str(n)))
    wide = {name: value for name, value in sizes if value > _USUAL[name in _BLOCKS]}
    if not wide:
        return
    files = list(files)
    nbytes = sum(file.stat().st_size for file in files)
    counts = (len(safetensors_file(f).keys()) if f.suffix == ".safetensors" else _USUAL[True] for f in files)
    tensors = sum(counts)
    for name, value in wide.items():
        # A block has at least one tensor, and no single dimension comes near twice the bytes of all weights.
        if value > (tensors if name in _BLOCKS else 2 * nbytes):
            raise UserError(f"{where}: {name} is {reprlib.repr(value)}, far beyond the weights in the files")


def check_elements(model: nn.Module, files: Iterable[Path], where: Path) -> None:
    """Raises UserError for a model, on the meta device, with far more parameters than the weights in its files.

    transformers takes a default for each size that a config or header does not name: those of a Llama are of 7B.
    """
    files = list(files)
    numel, nbytes = sum(p.numel() for p in model.parameters()), sum(file.stat().st_size for file in files)
    if nbytes and numel > 8 * nbytes:  # no format has less than a bit a weight
        for file in files:  # a damaged file says so itself
            if file.suffix == ".safetensors":
                safetensors_file(file).keys()
        raise UserError(
            f"{where}: {type(model).__name__} would have {numel:,} parameters, and its weights are "
            f"{megabytes(nbytes)}: the sizes of its layers are missing there, or another model's; download it again"
        )


def _leaves(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        yield from _leaves(value) if isinstance(value, dict) else [(name, value)]


@contextmanager
def explained(where: str | Path) -> Iterator[None]:
    """Turns what transformers or a model's own code raises while open into a UserError of one line, after `where`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise UserError(f"{where}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Returns an error's message on one line, its class first where the message says little, as for a KeyError."""
    message = " ".join(str(error).split())
    if not message or not isinstance(error, ValueError | OSError | RuntimeError):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    if len(message) > _LONGEST:
        message = f"{message[:_LONGEST]} …"
    if "trust_remote_code" in message:
        return (
            "it needs Python files of its directory (auto_map), which would run; if you trust their author, pass "
            f"{option('trust_remote_code', True)}"
        )
    return message


def origin_of(model: Any) -> Path | None:
    """Returns the directory with the config.json from which transformers loaded a model, if it is still there."""
    config = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    # transformers notes the name or path here. Configs of other libraries may use the attribute for anything, and a
    # model of transformers cannot exist while the library is not loaded.
    of_transformers = "transformers" in sys.modules and hasattr(config, "save_pretrained")
    if not isinstance(name, str) or not name or not of_transformers:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name)
    # At the commit that was loaded: the branch may have moved since, and have other files.
    return cached_snapshot(name, getattr(config, "_commit_hash", None))


def source_directory(model: Any, source: str | Path | None = None) -> Path | None:
    """Returns the directory of the model that a checkpoint is made from; None for a module that is not transformers'.

    Without `source`, a directory or its name on the Hugging Face hub, it is the one that the model came from, if it is
    there and describes this very class. A `source` that does not is a UserError.
    """
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return None
    if source is None:
        return described_by(model, origin_of(model))
    directory = find_model(str(source))
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory}: no config.json; give the directory of the original model as source")
    if (difference := difference_of_class(model, directory)) is not None:
        raise UserError(f"{directory}: {difference}; give the directory that the model was loaded from as source")
    return directory


def described_by(model: Any, directory: Path | None) -> Path | None:
    """Returns `directory`, if its config.json describes the model."""
    return directory if directory is not None and difference_of_class(model, directory) is None else None


def difference_of_class(model: Any, directory: Path) -> str | None:
    """Returns why config.json of a directory does not describe a model, such as the text part of one with images."""
    fields = read_fields(directory / "config.json")
    names, own = fields.get("architectures") or [type(model).__name__], type(model).__name__
    if fields.get("model_type") != getattr(model.config, "model_type", None):
        return f"its config.json is of a {fields.get('model_type')}, and the model a {model.config.model_type}"
    return None if own in names else f"its config.json is of a {names[0]}, and the model a {own}"
