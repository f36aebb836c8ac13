"""Calibration and evaluation data: the sources that a user names are read here, as rows of token ids or as inputs.

A source is a text, token ids in safetensors, a data set, a folder of images or sounds, named inputs, `self` (text that
the model writes) or `mix` (half of it such text, half samples that come with this package).
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from quant.base.atomic import write_atomically
from quant.base.errors import UserError, near_file, option, versions
from quant.base.json_files import json_text
from quant.base.listener import SILENT, Listener
from quant.calibration.attention_names import text_config
from quant.calibration.inputs import Inputs, joined
from quant.calibration.outputs.logits import run_probe
from quant.calibration.ranks import from_first
from quant.calibration.session import Session, placed
from quant.calibration.texts.media_inputs import PICKLES, lacks_decoder_text, read_inputs, write_decoder_text
from quant.calibration.texts.mixture import OWN, SHARES, Record, mixed_text, rows_hash
from quant.calibration.texts.rows import calibration_rows, check_corpus, packages_of, parse_corpus
from quant.models.files import SourceKind, spot_hash
from quant.models.open_model import Source
from quant.recipes.plan import Plan
from quant.recipes.plan_make import make_plan, run_on_meta

# Text that a model wrote is cached for later runs, whatever their `--out`: writing takes minutes on a CPU, and the same
# model, tokenizer, shape, seed, versions and kind of device give the same rows. A SHA-256 of these is the cache's key.
# Files lie in `$BLOCKSCALE_CACHE`, by default `$XDG_CACHE_HOME/blockscale` or `~/.cache/blockscale`.
VARIABLE = "BLOCKSCALE_CACHE"
_MOST_FILES = 64  # of about 130 kB each; the oldest go first
_TOKENIZER_FILES = (".json", ".jinja", ".model", ".txt")


@dataclass(frozen=True)
class TextCache:
    """The place of one text in the cache."""

    path: Path

    @classmethod
    def of(cls, source: Source, session: Session, shape: dict[str, Any]) -> Self | None:
        """Returns the place of the text that a model writes; None where such a text is not cached.

        Only models that transformers builds from files are cached: a module in memory may have been trained, and the
        code of a `--model-factory` may have changed.
        """
        directory, files = _directory(), source.files.files
        is_built_from_files = source.kind in (SourceKind.HUGGINGFACE, SourceKind.GGUF) and bool(files)
        # Other classes come from a factory or from the model's own Python files.
        is_known_class = type(source.model).__module__.startswith("transformers.")
        if directory is None or not (is_built_from_files and is_known_class):
            return None
        folder = source.path  # the tokenizer of a GGUF, which is no folder, is in its header
        small = sorted(folder.iterdir()) if folder is not None and folder.is_dir() else ()
        tokenizer = [file for file in small if file.suffix in _TOKENIZER_FILES and file.is_file()]
        # On another kind of device sums round differently, and then another token is drawn. Several machines may share
        # a home: the vector instructions decide in which order a CPU adds.
        kind = f"cpu, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        if session.device is not None and session.device.type == "cuda":
            kind = torch.cuda.get_device_name(session.device)
        depends = {
            "files": source.files.fingerprints(),
            "weights": {file.name: spot_hash(file) for file in files},
            "tokenizer": {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in tokenizer},
            "dtype": str(source.dtype),
            "shape": shape,
            "seed": session.seed,
            "versions": versions(),
            "device": kind,
        }
        return cls(directory / "texts" / f"{hashlib.sha256(json_text(depends).encode()).hexdigest()}.safetensors")

    def read(self) -> tuple[Tensor, Record] | None:
        """Returns the rows, int64 `[samples, seqlen]`, and their record; None where there are none, or damaged ones."""
        try:
            with safe_open(self.path, "pt") as file:
                rows, record = file.get_tensor("rows"), json.loads(file.metadata()["record"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None
        is_whole = isinstance(record, dict) and record.get("sha256") == rows_hash(rows)
        return (rows, record) if is_whole else None

    def write(self, rows: Tensor, record: Record) -> None:
        """Keeps rows and their record. A directory that cannot be written to costs later runs time, and no result."""
        try:
            write_atomically(self.path, save({"rows": rows.contiguous()}, metadata={"record": json_text(record)}))
            by_age = sorted(self.path.parent.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
            for file in by_age[:-_MOST_FILES]:
                file.unlink(missing_ok=True)
        except OSError:
            return


def _directory() -> Path | None:
    """Returns the directory of the cache; None where it is turned off, or where the user has no home."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return None if chosen.lower() in ("", "0", "off") else Path(chosen).expanduser()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"
    except RuntimeError:
        return None


MIX, SELF = "mix", "self"
WRITTEN = (MIX, SELF)
"""Sources without a file: the mixture of samples and the model's own text, and its own text alone."""


_SHARED = 0.99  # of the smaller vocabulary; a fine-tuned model adds a token or two
# Bytes of a token that hardly any text exceeds: English has four to five.
_BYTES = 16


@dataclass(frozen=True)
class Rows:
    """How much data is read, and from where."""

    sources: tuple[str, ...] = ()
    samples: int = 32
    seqlen: int = 512
    seed: int = 0
    at_most: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The sources one by one: `mix+text.txt` is `mix` and `text.txt`."""
        return sources_of(self.sources)

    @property
    def label(self) -> str:
        """All sources in one name."""
        return "+".join(self.names)

    @property
    def is_written(self) -> bool:
        """Whether the model writes some of the text."""
        return any(name in WRITTEN for name in self.names)

    def by_source(self) -> dict[str, Self]:
        """Returns each source's rows, an even share, in the order of reading: later ones have written text's length."""
        names = sorted(self.names, key=lambda name: name not in WRITTEN)
        share, more = divmod(self.samples, len(names))
        return {name: replace(self, sources=(name,), samples=share + (i < more)) for i, name in enumerate(names)}


def sources_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the sources one by one: `mix+text.txt` is `mix` and `text.txt`; no name stands for the mixture."""
    sources: list[str] = []
    for name in names or (MIX,):
        while name.startswith((f"{MIX}+", f"{SELF}+")):
            first, _, name = name.partition("+")
            sources.append(first)
        sources.append(os.path.expanduser(name))
    # A source that is named twice counts once, or its rows would be in the data twice.
    return tuple(dict.fromkeys(sources))


def check_sources(names: Sequence[str], named: str, *, measured: bool = False) -> None:
    """Raises UserError for a file that is missing or empty, before anything slow is done.

    `measured` sources are of an evaluation, which takes no text that the model writes itself.
    """
    for name in sources_of(names) if names else ():
        if name in WRITTEN:
            if measured:
                raise UserError(f"{named} {name}: text of the model itself, for calibration alone; name a file of text")
            continue
        # A column may follow a file's name after #, and a tensor's after a colon.
        stem = re.sub(r"(\.safetensors):[^/]*$", r"\1", name)
        if not name.startswith("hf:") and not any(Path(path).exists() for path in (name, stem, name.partition("#")[0])):
            shown = f'{named}"{name}"' if named.endswith("=") else f"{named} {name}"  # a parameter, or an option
            parts = re.split(r"[,;\s]+", name)
            if len(parts) > 1 and all(Path(part).exists() for part in parts):
                each = f"a list of the {len(parts)}" if named.endswith("=") else " ".join(f"{named} {p}" for p in parts)
                raise UserError(f"{shown}: names {len(parts)} files at once; give {each}")
            why = "standard input is not read; write it to a file" if name == "-" else "no such file or directory"
            raise UserError(f"{shown}: {why}{near_file(name, () if measured else WRITTEN)}")
        if (path := Path(name)).exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{named} {name}: a pipe or a device, and data is read more than once; write it to a file")
        if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
            raise UserError(f"{named} {name}: the directory of a model, where a text or other data belongs")
        try:
            check_corpus(name)
        except ValueError as error:
            raise UserError(f"{named} {error}") from error


def packages_of_sources(names: Sequence[str]) -> list[str]:
    """Returns the optional packages that read these sources."""
    return [package for name in names for source in sources_of((name,)) for package in packages_of(source)]


def short_files(rows: Rows) -> list[str]:
    """Returns the files of plain text that may hold fewer tokens than their rows need, by their size alone."""
    return [
        name
        for name, each in rows.by_source().items()
        if Path(name).is_file()
        and parse_corpus(name) is None
        and not _holds_tensors(name)
        and Path(name).stat().st_size < _BYTES * each.samples * rows.seqlen
    ]


def _holds_tensors(name: str) -> bool:
    return name.endswith((".safetensors", *PICKLES)) or ".safetensors:" in name


def check_lengths(source: Source, rows: Rows) -> None:
    """Raises ValueError where one of `short_files` is too short for a language model, whose weights are not read."""
    if not source.is_causal_lm:
        return  # rows of other models may be sentences
    by_source, seqlen = rows.by_source(), within_context(source, rows.seqlen)
    for name in short_files(rows):
        calibration_rows(name, _tokenizer_for(source, name), samples=by_source[name].samples, seqlen=seqlen)


def written_share(names: Sequence[str], *, has_tokenizer: bool) -> float:
    """Returns the share of the calibration text that the model writes."""
    sources = sources_of(names)
    mixed = SHARES[OWN] if has_tokenizer else 1.0
    return sum({MIX: mixed, SELF: 1.0}.get(source, 0.0) for source in sources) / len(sources)


def tokenizer_if_any(source: Source) -> Any:
    """Returns the model's tokenizer, or None."""
    try:
        return source.load_tokenizer()
    except UserError:
        return None


def check_tokenizers(name: str, other: str, of_name: Any, of_other: Any) -> None:
    """Checks that token ids mean the same words to two models; None is no tokenizer.

    Raises:
        UserError: more than a hundredth of the smaller vocabulary differs.
    """
    if not hasattr(of_name, "get_vocab") or not hasattr(of_other, "get_vocab"):
        return
    smaller, larger = sorted((of_name.get_vocab(), of_other.get_vocab()), key=len)
    if sum(larger.get(token) == token_id for token, token_id in smaller.items()) < _SHARED * len(smaller):
        raise UserError(
            f"{name}: its tokenizer is another than that of {other}, so token ids mean other words to it; take a model "
            "of the same family"
        )


def within_context(source: Source, seqlen: int) -> int:
    """Returns the number of tokens in a row of calibration text: at most the model's context."""
    context = getattr(text_config(source.config), "max_position_embeddings", None)
    return min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen


def named_inputs(source: Source, rows: Rows) -> Inputs | None:
    """Returns inputs by name, images, sounds or pairs of texts; None where the sources are rows of tokens."""
    if source.model is None or rows.is_written:
        return None
    inputs: dict[str, Inputs] = {}
    texts = []
    for name, each in rows.by_source().items():
        # One call at least, which shows whether the source holds inputs; the number of rows is checked by the caller.
        samples = max(each.samples, 1)
        calls = read_inputs(name, source.model, source.load_processor, samples=samples, seqlen=rows.seqlen)
        if calls is None:
            texts.append(name)
        else:
            inputs[name] = calls
    if inputs and texts:
        raise UserError(
            f"{option('calib', next(iter(inputs)))} holds inputs of the model, and {texts[0]} a text; give one of them"
        )
    return joined(list(inputs.values())) if inputs else None


def read_calibration(
    source: Source, rows: Rows, session: Session, *, listener: Listener = SILENT, plan: Plan | None = None
) -> tuple[Tensor | Inputs, list[Record]]:
    """Returns the calibration data, int64 `[samples, seqlen]` or inputs of the model, and a record of each source.

    The plan, if there is one yet, names a layer that needs the data in the error message.
    """
    if rows.samples < len(rows.names):
        raise UserError(
            f"{option('calib_samples', rows.samples)}: {option('calib')} names {len(rows.names)} sources, and each "
            "gives a row"
        )
    inputs = named_inputs(source, rows)
    if inputs is not None:
        inputs = with_decoder_text(source.module, inputs, session)
        _announce_inputs(listener, "calibrating on", rows.label, inputs)
        about = {"about": inputs.about} if inputs.about else {}
        return inputs, [{"source": rows.label, "rows": len(inputs), "sha256": digest_of(inputs), **about}]
    fits = within_context(source, rows.seqlen)
    if fits < rows.seqlen:
        listener.message(f"rows have {fits} tokens, the context of this model, and not {option('seqlen', rows.seqlen)}")
        rows = replace(rows, seqlen=fits)
    placed_rows: list[tuple[float, Tensor]] = []
    records: list[Record] = []
    seqlen = rows.seqlen
    for name, each in rows.by_source().items():
        each = replace(each, seqlen=seqlen)
        if name in WRITTEN:
            text, record = _written_rows(source, name, each, session, listener, plan)
            # Rows are stacked in the end, so later sources follow the length of the written text.
            seqlen = text.shape[1]
        else:
            text, record = _file_rows(source, name, each)
        # The middle of the i-th of n equal intervals of [0, 1]: sorting by it spreads every source over the whole.
        placed_rows += [((i + 0.5) / len(text), row) for i, row in enumerate(text)]
        records.append({"source": name, **record})
    # Rows of all sources are interleaved evenly, each source in its own order.
    return torch.stack([row for _, row in sorted(placed_rows, key=lambda pair: pair[0])]), records


def _written_rows(
    source: Source, name: str, rows: Rows, session: Session, listener: Listener, plan: Plan | None
) -> tuple[Tensor, Record]:
    """Returns the rows of `mix` or `self`, and their record; from the cache if an earlier run wrote them."""
    session = replace(session, seed=rows.seed)
    cache = _cache_of(source, name, rows, session)
    # The first rank's cache decides for all: the model would write on all ranks or on none.
    cached = from_first(lambda: None if cache is None else cache.read())
    if cached is not None:
        where = "" if cache is None else f" ({cache.path}; {VARIABLE}=off has it written again)"
        listener.message(f"calibration text that this model wrote in an earlier run is read again{where}")
        return cached
    text, record = mixed_text(
        source.module, plan or make_plan(source.module, "fp8"), tokenizer_if_any(source), session,
        samples=rows.samples, seqlen=rows.seqlen, own_only=name == SELF,
    )  # fmt: skip
    # Where the model wrote nothing, another run may have the memory that this one lacked.
    if cache is not None and session.rank == 0 and "no_own_text" not in record:
        cache.write(text, record)
    return text, record


def must_write(source: Source, rows: Rows, session: Session) -> bool:
    """Returns whether the model has to write calibration text: there is some in `rows` that is not in the cache."""
    session = replace(session, seed=rows.seed)
    caches = [_cache_of(source, name, each, session) for name, each in rows.by_source().items() if name in WRITTEN]
    return any(cache is None or cache.read() is None for cache in caches)


def _cache_of(source: Source, name: str, rows: Rows, session: Session) -> TextCache | None:
    """Returns the place in the cache of the text `name`, `mix` or `self`; None where it is not cached."""
    # Rows are cut to the context, so longer ones are the same text.
    seqlen = within_context(source, rows.seqlen)
    return TextCache.of(source, session, {"name": name, "samples": rows.samples, "seqlen": seqlen})


def _file_rows(source: Source, name: str, rows: Rows) -> tuple[Tensor, Record]:
    samples = None if rows.at_most else rows.samples
    text = calibration_rows(name, _tokenizer_for(source, name), samples=samples, seqlen=rows.seqlen, seed=rows.seed)
    text = text[: rows.samples]
    record = {"rows": len(text), "seqlen": text.shape[1], "sha256": rows_hash(text)}
    if source.model is None:
        return text, record
    if source.is_causal_lm:
        # Shapes suffice for these: on a CPU, two tokens would read every weight of the model.
        with suppress(Exception):
            run_on_meta(source.model)
            return text, record
    try:
        run_probe(source.model, text[:1, :2])
    except ValueError as error:
        raise UserError(
            f"{option('calib', name)}: {type(source.model).__name__} cannot be calibrated on text: {error}; give a "
            "folder of images or sounds, hf:NAME with a column of them, a .safetensors file of its inputs by name, "
            "or in Python data=, or choose a format that needs none, such as fp8_channel or mxfp8"
        ) from error
    return text, record


def read_texts(source: Source, rows: Rows) -> dict[str, Tensor]:
    """Returns the first token rows `[samples, seqlen]` of each source; files of token ids need no tokenizer."""
    texts = {}
    for name in rows.sources:
        tokenizer = _tokenizer_for(source, name)
        texts[name] = calibration_rows(name, tokenizer, samples=rows.samples, seqlen=rows.seqlen, shuffle=False)
    return texts


def read_evaluation(
    source: Source, rows: Rows, session: Session, *, writer: nn.Module | None = None, listener: Listener = SILENT
) -> dict[str, Tensor | Inputs]:
    """Returns evaluation data by the name of its source: inputs of the model, or rows of a text."""
    data: dict[str, Tensor | Inputs] = {}
    for name in rows.sources:
        each = replace(rows, sources=(name,))
        inputs = named_inputs(source, each)
        if inputs is None:
            data |= read_texts(source, each)
            continue
        data[name] = inputs = with_decoder_text(writer or source.module, inputs, session)
        _announce_inputs(listener, "evaluating on", name, inputs)
    return data


def with_decoder_text(model: nn.Module, inputs: Inputs, session: Session) -> Inputs:
    """Returns the inputs; where a decoder has no text, the model writes it."""
    if not lacks_decoder_text(inputs):
        return inputs
    with placed(model, session.device):
        return from_first(lambda: write_decoder_text(model, inputs, session))


def as_rows(model: nn.Module, data: Tensor | Inputs, taker: str) -> Tensor:
    """Returns calibration data as one tensor, for measurements that work on nothing else."""
    rows = data.as_tensor(model) if isinstance(data, Inputs) else data
    if rows is None or getattr(text_config(getattr(model, "config", None)), "is_encoder_decoder", False):
        raise UserError(
            f"{taker} measures on one tensor, token ids or images of one size, and {type(model).__name__} takes "
            f"several; quantize with {option('format')}, and measure with quant evaluate {option('data')}"
        )
    return rows


def digest_of(rows: Tensor | Inputs) -> str:
    """Returns SHA-256 of the values of rows or calls."""
    tensors = [rows] if isinstance(rows, Tensor) else rows.tensors()
    values = [x.detach().cpu().contiguous().unsqueeze(-1).view(torch.uint8).numpy().tobytes() for x in tensors]
    hashes = [hashlib.sha256(each).hexdigest() for each in values]
    return hashes[0] if isinstance(rows, Tensor) else hashlib.sha256("".join(hashes).encode()).hexdigest()


def _announce_inputs(listener: Listener, verb: str, name: str, inputs: Inputs) -> None:
    if inputs.about:
        listener.message(f"{verb} {name}: {inputs.about}")


def _tokenizer_for(source: Source, text: str) -> Any:
    return None if _holds_tensors(text) else source.load_tokenizer()
