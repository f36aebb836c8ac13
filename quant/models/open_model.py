"""`open_model` opens a model, whatever it is stored in.

    source = open_model("smollm2-135m")          # or a directory, a file, an nn.Module
    source.model, source.load_tokenizer()

The kind of a file is decided by its first bytes, not by its suffix:

    directory             config.json and weights              -> huggingface   model, dequantized if needed
    "GGUF"                one file: config, vocabulary, blocks -> gguf          model, dequantized
    length + "{"          names, dtypes, offsets, then bytes   -> safetensors   state dict, read tensor by tensor
    zip of pickle+bytes   torch.save                           -> torch         state dict, mapped
    zip with a graph      torch.export.save                    -> exported      model

A bare state dict becomes a model when `model_factory` builds the module for it; so does a directory whose class
transformers does not have. With `meta=True` only configs and headers are read, and every tensor is on the meta device.

A name such as org/name or org/name@revision, for which no file exists, is a model on the Hugging Face hub (`files.py`).
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, option
from quant.base.torch_modes import in_own_modes
from quant.models import gguf, huggingface, state_dict
from quant.models.files import SourceKind, WatchedFiles, commit_of, find_model, origin_of, with_revision
from quant.models.huggingface import refuse_adapter, refuse_part
from quant.recipes.layers import Layer, find_layers, layers_of_state_dict


@dataclass(eq=False, kw_only=True)
class Source:
    """An opened model.

    Attributes:
        name: the name as the user typed it; for a module, the name of its class.
        kind: the form in which it is stored.
        model: the module; None for a bare state dict without a factory.
        state_dict: the bare state dict, whose tensors are read on access; None where there is a model.
        path: directory or file it came from, where that is known.
        dtype: the dtype that most of the weights have.
        files: the files that it is read from, as they were before.
        quantization: the format in which the files hold weights that were dequantized; None for others.
        trusts_code: Python files of the model's directory may run, for its tokenizer and processor too.
    """

    name: str
    kind: SourceKind
    model: nn.Module | None
    state_dict: Mapping[str, Tensor] | None
    path: Path | None = None
    dtype: torch.dtype
    files: WatchedFiles = field(default_factory=lambda: WatchedFiles(None))
    quantization: str | None = None
    trusts_code: bool = False
    _tokenizer: Any = field(default=None, init=False, repr=False)

    @property
    def module(self) -> nn.Module:
        """The module; ValueError for a bare state dict, which has none."""
        if self.model is None:
            raise ValueError(f"{self.name}: a bare state dict has no module")
        return self.model

    @property
    def config(self) -> Any:
        """The model's transformers config, or None."""
        return getattr(self.model, "config", None)

    @property
    def directory(self) -> Path | None:
        """The directory with the model's config.json and other files, where it came from one."""
        return self.path if self.path is not None and (self.path / "config.json").is_file() else None

    @property
    def revision(self) -> str | None:
        """The commit of a model that came from the Hugging Face hub's cache, or None."""
        return commit_of(self.path)

    @property
    def layers(self) -> list[Layer]:
        """Its layers; for a bare state dict, judging by names and shapes."""
        return layers_of_state_dict(self.shapes) if self.model is None else find_layers(self.model)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of a bare state dict, by name."""
        return {name: tuple(tensor.shape) for name, tensor in (self.state_dict or {}).items()}

    @property
    def is_causal_lm(self) -> bool:
        """Whether the model predicts the next token: its class is one that transformers lists as such."""
        # A model of transformers cannot exist while its library is not loaded.
        if self.model is None or "transformers" not in sys.modules:
            return False
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        return any(c.__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for c in type(self.model).__mro__)

    def load_tokenizer(self) -> Any:
        """Returns the transformers tokenizer, which is read once; UserError, with the way out, where there is none."""
        # Calibration, evaluation, the report and the checkpoint each ask for it, and a GGUF's takes seconds.
        if self._tokenizer is not None:
            return self._tokenizer
        if self.path is not None and self.kind == SourceKind.GGUF:
            self._tokenizer = gguf.load_tokenizer(self.path)
        elif self.path is not None and self.kind in (SourceKind.HUGGINGFACE, SourceKind.MODULE):
            with huggingface.remote_code(self.trusts_code):
                reads = getattr(self.model, "main_input_name", "input_ids")
                self._tokenizer = huggingface.load_tokenizer(self.path, reads=reads)
        else:
            raise UserError(
                f"{self.path or self.name}: no tokenizer comes with it; pass token ids, or open the Hugging Face "
                "directory of the model"
            )
        return self._tokenizer

    def load_processor(self) -> Any:
        """Returns the processor of images, sounds and texts; UserError, with the way out, where there is none."""
        if self.path is not None and self.path.is_dir():
            with huggingface.remote_code(self.trusts_code):
                return huggingface.load_processor(self.path)
        raise UserError(
            f"{self.path or self.name}: no processor comes with it; give prepared inputs as .safetensors, or open the "
            "Hugging Face directory of the model"
        )


@in_own_modes
def open_model(
    source: str | Path | nn.Module,
    *,
    revision: str | None = None,
    model_factory: str | None = None,
    unsafe_load: bool = False,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str = "auto",
    meta: bool = False,
    stream: bool = False,
) -> Source:
    """Opens a model.

    Args:
        source: directory or file, an alias such as "smollm2-135m", a model on the Hugging Face hub such as
            "Qwen/Qwen3-8B", or a module, which is taken as it is.
        revision: branch, tag or commit of a model on the hub; the same as "Qwen/Qwen3-8B@REVISION".
        model_factory: "package.module:function" or "file.py:function", called without arguments to build the module of
            a bare state dict, or of a directory, which then gives only weights and tokenizer.
        unsafe_load: also opens whole pickled modules and exported programs, which runs whatever code they hold.
        trust_remote_code: lets transformers run the Python files that the directory names in `auto_map`.
        dtype: the dtype of the weights; "auto" keeps the checkpoint's, and is bfloat16 for a GGUF, unless it is in FP16
            or FP32 with numbers that bfloat16 does not have.
        stream: leaves experts that are stored one by one in their files until they are needed; the model runs, and
            `solve_plan` takes it for solvers that look only at weights.
        meta: builds the model on the meta device from configs and headers, reading no weights. A pickle of the old
            layout and an exported program are read anyway, and a module stays as it is.

    Raises:
        UserError: `source` cannot be used: one line that names the file and the way out.
    """
    given_dtype = _parse_dtype(dtype)
    if isinstance(source, nn.Module):
        kind_of, own = type(source).__name__, _main_dtype(source.parameters())
        if revision is not None:
            raise UserError(f"revision {revision!r} is for a model on the Hugging Face hub, not for a module")
        _refuse_factory(model_factory, f"a module ({kind_of})")
        # The module belongs to the caller, and casting it in place would change it everywhere else in the program.
        if given_dtype not in (None, own):
            raise UserError(f"{kind_of} is in {own}; cast it with model.to({given_dtype}) before opening it")
        huggingface.patch_forward(source)
        origin = origin_of(source)
        return Source(name=kind_of, kind=SourceKind.MODULE, model=source, state_dict=None, path=origin, dtype=own)
    name = str(source) if revision is None else with_revision(str(source), revision)
    path = find_model(name)
    # Before anything is read: a file that changes while it is loaded must differ from its stamp.
    files = WatchedFiles(path)
    kind = SourceKind.HUGGINGFACE if path.is_dir() else state_dict.sniff(path)
    # The other kinds bring their module. An option that cannot act is refused before the weights are read.
    if kind not in (SourceKind.SAFETENSORS, SourceKind.TORCH, SourceKind.HUGGINGFACE):
        _refuse_factory(model_factory, f"{path} ({kind})")
    model: nn.Module | None = None
    tensors: Mapping[str, Tensor] | None = None
    quantization: object = None
    if kind == SourceKind.HUGGINGFACE and model_factory is not None:
        tensors = _open_directory(path, given_dtype, meta)
    elif kind == SourceKind.HUGGINGFACE:
        with huggingface.remote_code(trust_remote_code):
            model, quantization = huggingface.load(path, given_dtype, meta, stream)
    elif kind == SourceKind.GGUF:
        model, quantization = gguf.load(path, given_dtype, meta)
    elif kind == SourceKind.EXPORTED:
        model = state_dict.load_exported(path, given_dtype, unsafe_load)
    elif kind == SourceKind.SAFETENSORS:
        tensors = state_dict.open_safetensors(path, given_dtype, meta)
    else:
        model, tensors = state_dict.load_pickle(path, given_dtype, unsafe_load, meta)
    if tensors is not None and path.is_file():
        refuse_part(path, tensors)
    if tensors is not None and model_factory is None:
        refuse_adapter(path, tensors)
    if tensors is not None and model_factory is not None:
        model, tensors = state_dict.build(model_factory, tensors, str(path), meta), None
    # With a dtype to cast to, asking the tensors of a state dict would read them all.
    if model is not None:
        main_dtype = _main_dtype(model.parameters())
    else:
        main_dtype = given_dtype or _main_dtype((tensors or {}).values())
    return Source(
        name=name, kind=kind, model=model, state_dict=tensors, path=path, dtype=main_dtype, files=files,
        quantization=None if quantization is None else str(quantization), trusts_code=trust_remote_code,
    )  # fmt: skip


def _open_directory(path: Path, dtype: torch.dtype | None, meta: bool) -> Mapping[str, Tensor]:
    files: dict[str, Mapping[str, Tensor]] = {}
    for shard in huggingface.find_shards(path):
        if shard.suffix == ".safetensors":
            tensors: Mapping[str, Tensor] = state_dict.open_safetensors(shard, None, meta)
        else:
            _, state = state_dict.load_pickle(shard, None, unsafe=False, meta=meta)
            tensors = dict(state or {})
        files |= dict.fromkeys(tensors, tensors)
    return state_dict.LazyStateDict(files, lambda name: files[name][name], dtype)


def _refuse_factory(model_factory: str | None, what: str) -> None:
    if model_factory is not None:
        raise UserError(
            f"{option('model_factory', model_factory)} is for a bare state dict; {what} brings its own module"
        )


def _parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """Returns the requested dtype; None for "auto"."""
    if dtype == "auto":
        return None
    parsed = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    # One byte is FP8: a storage format, in which weights without scales would be other numbers.
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point or parsed.itemsize == 1:
        raise UserError(f"unknown dtype {dtype!r}; known dtypes: auto, bfloat16, float16, float32, float64")
    return parsed


def _main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Returns the floating-point dtype that most elements have; float32 where there are none."""
    elements: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            elements[tensor.dtype] += tensor.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32
