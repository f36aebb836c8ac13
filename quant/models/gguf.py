"""A GGUF file holds config, vocabulary and block-quantized weights; transformers loads it, dequantized.

The loader parses the file anew for the config, the weights and the tokenizer, which takes three to five seconds each
time for a vocabulary of 49,152 tokens, and builds the table of tensor names once per submodule, which is hundreds of
times the same. It has no argument for a parsed file, so `shared_parsing` replaces the two functions of the gguf package
within a `with` block by versions that do the same work once.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError, listed
from quant.base.extras import require
from quant.models import huggingface
from quant.models.configs import one_line
from quant.models.gguf_metadata.rope import set_rope
from quant.models.gguf_metadata.tokens import check_tokens
from quant.models.huggingface import quiet
from quant.models.stored_layers import gguf_reader

_LOADER = "transformers.modeling_gguf_pytorch_utils"
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Frequencies of rotary embeddings: `set_rope` reads the first kinds, and transformers computes the last.
_COMPUTED = re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$|\.attn_rot_embd\.")


def load(path: Path, dtype: torch.dtype, meta: bool) -> nn.Module:
    """Returns the model in a GGUF file, dequantized, in evaluation mode, with a config like any other model's.

    Args:
        path: the file.
        dtype: the dtype of the dequantized weights.
        meta: builds on the meta device from the file's header, reading no weights.

    Raises:
        UserError: damaged, or of an architecture that transformers' loader does not know.
    """
    transformers = require("transformers", "hf")
    require("accelerate", "hf")
    options: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(transformers, "GgufConfig"):  # transformers that can keep the blocks do it by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quiet(), shared_parsing():
        config = read_config(path)
        cls = huggingface.model_class(config, str(path))
        if meta:
            model = huggingface.build(cls, config, dtype, meta, path.parent)
        else:
            with _dropped_tensors() as dropped:
                model, unused = huggingface.read_model(cls, config, dtype, path.parent, **options)
            _refuse_dropped(model, path, sorted({*dropped, *unused}))
            huggingface.patch_forward(model)
    _clean(model)
    return model


@contextlib.contextmanager
def _dropped_tensors() -> Iterator[list[str]]:
    """Collects, while open, the tensors of a GGUF file that transformers has no name for and silently drops."""
    dropped: list[str] = []
    with contextlib.ExitStack() as stack:
        # Releases of transformers without this module report such tensors as they do for safetensors.
        if find_spec(_LOADER):
            loader = require(_LOADER, "hf")
            for processor in {loader.TensorProcessor, *loader.TENSOR_PROCESSORS.values()}:
                stack.enter_context(_replaced(processor, "process", _recording(processor.process, dropped)))
        yield dropped


def _recording(process: Any, dropped: list[str]) -> Any:
    """Returns a processor's method that also notes tensors without a name in the model.

    The loader calls it for each tensor of the file. The result's name is None where the method put the tensor into the
    model itself.
    """

    def process_and_record(self: Any, weights: Any, name: str, **options: Any) -> Any:
        result = process(self, weights=weights, name=name, **options)
        if result.name is not None and result.name not in options["tensor_key_mapping"]:
            dropped.append(name)
        return result

    return process_and_record


def _refuse_dropped(model: Any, path: Path, names: list[str]) -> None:
    """Raises UserError for tensors that change the result; prediction heads, which do not, are a warning.

    A head for multi-token prediction is a block after the last one of the config, or named `nextn`.
    """
    gguf = require("gguf", "hf")
    blocks = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    heads, dropped = [], []
    for name in names:
        block = _BLOCK.match(name)
        is_head = ".nextn." in name or (block is not None and blocks is not None and int(block[1]) >= blocks)
        if is_head:
            heads.append(name)
        # Tied embeddings may be in the file twice.
        elif not _COMPUTED.search(name) and not (name == "output.weight" and _repeats_embedding(gguf.GGUFReader(path))):
            dropped.append(name)
    version = require("transformers", "hf").__version__
    if dropped:
        raise UserError(
            f"{path}: transformers {version} leaves out {listed(dropped, 3)}, and {type(model).__name__} would compute "
            "something else without them; open the Hugging Face directory of the model, or try another version"
        )
    if heads:
        warnings.warn(
            f"{path}: transformers {version} leaves out {listed(heads, 3)}, a head for multi-token prediction, which "
            "the result lacks",
            stacklevel=2,
        )


def _repeats_embedding(file: Any) -> bool:
    """Returns whether a file holds the same bytes as output head and as embedding."""
    stored = {tensor.name: tensor for tensor in file.tensors}
    head, embedding = stored["output.weight"], stored.get("token_embd.weight")
    return embedding is not None and head.data.tobytes() == embedding.data.tobytes()


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer whose vocabulary a GGUF file holds.

    Raises:
        UserError: the file has none that transformers can use, or this version of transformers reads it wrongly.
    """
    gguf, transformers = require("gguf", "hf"), require("transformers", "hf")
    with shared_parsing():
        tokenizer = huggingface.load_tokenizer(path.parent, gguf_file=path.name)
        try:
            check_tokens(tokenizer, gguf.GGUFReader(path).fields)
        except UserError as problem:
            raise UserError(
                f"{path}: transformers {transformers.__version__} reads its tokenizer wrongly: {problem}; install "
                "another version of transformers, or open the Hugging Face directory of the model"
            ) from None
    return tokenizer


@contextlib.contextmanager
def shared_parsing() -> Iterator[None]:
    """Makes `gguf.GGUFReader` parse a file only once while open.

    The results are the same, and the memory of the parsed file is released at the end. transformers' GGUF progress
    bar, which ignores transformers' own switch for progress bars, obeys it inside.
    """
    gguf = require("gguf", "hf")
    logging = require("transformers.utils.logging", "hf")
    read = cache(gguf_reader())

    def reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
        # One key for all spellings of a path: config, weights and tokenizer share the parsed file.
        return read(os.path.realpath(path), mode)

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(gguf, "GGUFReader", reader))
        stack.enter_context(_replaced(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)))
        # Releases of transformers without this module keep their progress bar.
        if find_spec(_LOADER):
            stack.enter_context(_replaced(require(_LOADER, "hf"), "tqdm", logging.tqdm))
        yield


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def read_config(path: Path) -> Any:
    """Returns the transformers config that the file's metadata describe; the first parse, so damage shows here."""
    gguf, transformers = require("gguf", "hf"), require("transformers", "hf")
    try:
        file = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise UserError(f"{path}: a truncated or damaged GGUF file ({one_line(error)}); download it again") from error
    try:
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, **huggingface.local_options()
        )
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(f"{path}: transformers cannot load this GGUF file: {one_line(error)}") from error
    try:
        set_rope(config, file)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def _clean(model: Any) -> None:
    """Gives the config the original model's architecture, and removes every trace of the file it was in."""
    config = model.config
    config.architectures = [type(model).__name__]
    config._name_or_path = ""
    if hasattr(config, "_model_name_or_path"):  # the file's `general.name`, which the loader files under this name
        del config._model_name_or_path
