"""A state dict is names and tensors without a module; a factory may build the module for it."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from quant.base.errors import UserError, listed
from quant.models.files import SourceKind, safetensors_file
from quant.models.quantized_config import refuse_packed

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of names that DDP, torch.compile, FSDP and activation checkpointing add."""
_KNOWN = "a Hugging Face directory, .gguf, .safetensors, .pt/.pth/.bin (torch.save) or .pt2 (torch.export.save)"


class LazyStateDict(Mapping[str, torch.Tensor]):
    """A state dict whose tensors are read, and cast if requested, on access.

    Args:
        names: the names of the tensors, in the order of the file.
        read: a function that returns a tensor by name.
        dtype: the dtype that floating-point tensors are cast to; None keeps theirs.
    """

    def __init__(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        self._names = dict.fromkeys(names)
        self._read = read
        self._dtype = dtype

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor = self._read(name)
        return tensor.to(self._dtype) if self._dtype is not None and tensor.dtype.is_floating_point else tensor

    def renamed(self, names: Mapping[str, str]) -> LazyStateDict:
        """Returns the same tensors under other names; `names` has one for each."""
        original = {new: name for name, new in names.items()}
        return LazyStateDict(original, lambda name: self[original[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def sniff(path: Path) -> SourceKind:
    """Returns the kind of a file, by its first bytes.

    Raises:
        UserError: empty, unreadable, a TorchScript archive, or nothing that is known.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if not size:
        raise UserError(f"{path}: the file is empty; expected {_KNOWN}")
    if head[:4] == b"GGUF":
        return SourceKind.GGUF
    if head[:4] == b"PK\x03\x04":
        return _sniff_zip(path)
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # pickle protocols
        return SourceKind.TORCH
    # A safetensors file begins with the length of its header (8 bytes, little-endian) and JSON. The suffix counts, too:
    # a damaged header is then reported as one, and not as an unknown file type.
    if head[8:9] == b"{" or path.suffix == ".safetensors":
        return SourceKind.SAFETENSORS
    raise UserError(f"{path}: unknown file type (it starts with {head[:8]!r}); expected {_KNOWN}")


def _sniff_zip(path: Path) -> SourceKind:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
            packed = next((each.filename for each in archive.infolist() if each.compress_type), None)
    except zipfile.BadZipFile:
        raise UserError(f"{path}: a truncated or damaged archive; copy or download it again") from None
    # torch.save puts all members into one folder, which is named after the file.
    tails = {member.partition("/")[2] or member for member in members}
    if "archive_format" in tails or "serialized_exported_program.json" in members:
        return SourceKind.EXPORTED
    if "constants.pkl" in tails:
        raise UserError(
            f"{path}: a TorchScript archive, which has no modules to quantize; save the original model's "
            "state_dict() with torch.save, or the model with torch.export.save"
        )
    if "data.pkl" in tails:
        if packed is not None:
            raise UserError(
                f"{path}: {packed} is compressed, which torch.save never does and which may fill the memory; save the "
                "state_dict() again with torch.save"
            )
        return SourceKind.TORCH
    raise UserError(f"{path}: a zip archive, but not one that torch wrote; expected {_KNOWN}")


def open_safetensors(path: Path, dtype: torch.dtype | None, meta: bool) -> LazyStateDict:
    """Returns the tensors of one file, mapped and read on access; with `meta` on the meta device, from the header.

    Raises:
        UserError: not a safetensors file, or one with codes or scales of quantized weights.
    """
    file = safetensors_file(path, "pt")
    refuse_packed(path, {name: str(file.get_slice(name).get_dtype()) for name in file.keys()})  # noqa: SIM118

    def read(name: str) -> torch.Tensor:
        part = file.get_slice(name)
        if part.get_dtype().startswith(("F4", "F6")):
            raise UserError(f"{path}: {name} has dtype {part.get_dtype()}, packed already; give the original model")
        if not meta:
            whole: torch.Tensor = file.get_tensor(name)
            return whole
        shape = part.get_shape()
        like = part[:0] if shape else file.get_tensor(name)  # for its dtype
        return torch.empty(shape, dtype=like.dtype, device="meta")

    return LazyStateDict(file.keys(), read, dtype)


def build(factory: str, tensors: Mapping[str, torch.Tensor], where: str, meta: bool) -> nn.Module:
    """Returns the module that `factory` makes, holding `tensors`: their memory and dtype, not the factory's.

    Parameters that the factory ties stay tied; the file needs only one of their names. Names may have the parts that
    wrappers of PyTorch add: `module.` of DDP, `_orig_mod.` of torch.compile.

    Args:
        factory: "package.module:function".
        tensors: state dict.
        where: how errors call the state dict.
        meta: builds on the meta device.

    Raises:
        UserError: no such function, it fails, or its module does not fit the state dict.
    """
    model = call_factory(factory, meta=meta)
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    # By each name all names of the same parameter: a file with one of them fills them all.
    ties = {name: names for names in shared.values() for name in names}
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tensors = LazyStateDict(tensors, tensors.__getitem__).renamed({n: _without_wrappers(n, expected) for n in tensors})
    stored = {name: next((n for n in ties.get(name, [name]) if n in tensors), None) for name in expected}
    _refuse(f"{where} lacks", [name for name, stored_name in stored.items() if stored_name is None], factory)
    _refuse(f"{where} has, and the module has not:", [name for name in tensors if name not in expected], factory)
    values = {name: tensors[stored_name] for name, stored_name in stored.items() if stored_name is not None}
    for name, shape in expected.items():
        if values[name].shape != shape:
            raise UserError(f"{where}: {name} is {list(values[name].shape)}, and {factory} makes it {list(shape)}")
        if name in tensors and stored[name] != name and not meta and not torch.equal(tensors[name], values[name]):
            raise UserError(f"{where}: {factory} ties {name} to {stored[name]}, but the file's tensors differ")
    # `assign` keeps the file's mapped memory and dtype. It makes a parameter of each name, so ties are made again
    # below.
    model.load_state_dict(values, assign=True)
    for first, *other_names in shared.values():
        for name in other_names:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, model.get_parameter(first))
    return model.eval()


def _without_wrappers(name: str, expected: Container[str]) -> str:
    """Returns the name of a tensor without the parts of wrappers, if the module has such a tensor; else `name`."""
    plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    return plain if name not in expected and plain in expected else name


def call_factory(factory: str, *, meta: bool = False) -> nn.Module:
    """Returns the module that "package.module:function" builds, on the meta device if asked.

    Raises:
        UserError: it cannot be imported, or gives no module.
    """
    module_name, _, function = factory.partition(":")
    if not module_name or not function:
        raise UserError(f"--model-factory {factory!r}: expected package.module:function")
    try:
        make = getattr(importlib.import_module(module_name), function)
    except ImportError as error:
        raise UserError(
            f"--model-factory {factory}: cannot import {module_name} ({error}); is it on PYTHONPATH?"
        ) from error
    except AttributeError:
        raise UserError(f"--model-factory {factory}: {module_name} has no function {function}") from None
    with torch.device("meta" if meta else "cpu"):
        model = make()
    if not isinstance(model, nn.Module):
        raise UserError(f"--model-factory {factory} returned a {type(model).__name__}; expected an nn.Module")
    return model


def _refuse(problem: str, names: list[str], factory: str) -> None:
    if names:
        raise UserError(
            f"{problem} {listed(names, 5)} (module from {factory}); make the factory's module match the file"
        )
