"""The layers of a model from the headers of its files, in a fraction of a second.

A plan is checked against a model by names and shapes, and those are in the header of a safetensors or a GGUF file. If
the tensors there are just those that the plan names, that settles it, and not even torch is imported. Otherwise the
model is built on the meta device, for its modules may be called, split or fused differently from what is stored. Either
way no weight is read.

A GGUF header is a magic, three counts, then key-value pairs and the tensors' names and dimensions, innermost first:

    "GGUF"  version u32  tensors u64  pairs u64
    pair    key, type u32, value                        string: length u64, bytes; array: type u32, length u64, values
    tensor  name, axes u32, dimensions u64…, type u32, offset u64

Its tensors have names of their own; the gguf package knows which is which.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quant.errors import UserError
from quant.models.files import find_model, read_header
from quant.recipes.layers import Layer, find_layers, layers_of_state_dict
from quant.recipes.plan import Plan

Shapes = dict[str, tuple[int, ...]]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def model_layers(
    model: str, plan: Plan | None = None, *, model_factory: str | None = None, unsafe_load: bool = False
) -> list[Layer]:
    """The layers of a model.

    Args:
        model: as for `quantize`.
        plan: what to look for in the headers; None builds the model.
        model_factory, unsafe_load: as for `open_model`.

    Raises:
        UserError: there is no such model, or it cannot be opened.
    """
    if plan is not None and model_factory is None:
        path = find_model(model)
        shapes = _of_directory(path) if path.is_dir() else _of_gguf(path, plan)
        if shapes is not None and (layers := _settled(plan, shapes)) is not None:
            return layers
    from quant.models.open import open_model

    source = open_model(model, model_factory=model_factory, unsafe_load=unsafe_load, meta=True)
    if source.model is not None:
        return find_layers(source.model)
    assert source.state_dict is not None
    return layers_of_state_dict({name: tuple(tensor.shape) for name, tensor in source.state_dict.items()})


def _of_directory(path: Path) -> Shapes | None:
    """Shapes by tensor name from safetensors headers; None where the directory is not one of a plain model."""
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        shards = [path / "model.safetensors"]
        if not shards[0].is_file():
            index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
            shards = [path / name for name in sorted(set(index["weight_map"].values()))]
        if "quantization_config" in config:
            return None
        return {name: tuple(entry["shape"]) for shard in shards for name, entry in read_header(shard).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the loader says what is wrong


def _of_gguf(path: Path, plan: Plan) -> Shapes | None:
    """Shapes of a GGUF file under the names that `plan` has for its layers; None where it cannot be read so."""
    try:
        import gguf

        fields, shapes = gguf_header(path)
        architecture = fields["general.architecture"]
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, fields[f"{architecture}.block_count"])
    except (ImportError, OSError, UserError, KeyError, StopIteration):
        return None
    ours = {f"{names.get_name(layer.name)}.weight": f"{layer.name}.weight" for layer in plan.layers}
    return {ours.get(name, name): shape for name, shape in shapes.items()}


def gguf_header(path: Path) -> tuple[dict[str, Any], Shapes]:
    """Scalar and string fields of a GGUF file, and the shapes of its tensors by their names there.

    Raises:
        UserError: not a GGUF file, or a truncated one.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UserError(f"{path}: not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(_Reader(data, 4))
            except (struct.error, KeyError, UnicodeDecodeError) as error:
                raise UserError(f"{path}: a truncated or damaged GGUF header ({error})") from None


class _Reader:
    """Values one after the other, little-endian."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def skip_string(self) -> slice:
        length = self.scalar("Q")
        self.at += length
        return slice(self.at - length, self.at)

    def string(self) -> str:
        return self.data[self.skip_string()].decode()

    def value(self, kind: int) -> Any:
        """A value; arrays, which hold vocabularies, are passed over."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        of, length = self.scalar("I"), self.scalar("Q")
        if of in _SCALARS:
            self.at += length * struct.calcsize(f"<{_SCALARS[of]}")
        else:
            for _ in range(length):
                self.value(of)
        return None


def _parse(reader: _Reader) -> tuple[dict[str, Any], Shapes]:
    reader.scalar("I")
    tensors, pairs = reader.scalar("Q"), reader.scalar("Q")
    fields: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.string()
        fields[key] = reader.value(reader.scalar("I"))
    shapes: Shapes = {}
    for _ in range(tensors):
        name = reader.string()
        shape = [reader.scalar("Q") for _ in range(reader.scalar("I"))]
        reader.scalar("I")
        reader.scalar("Q")
        shapes[name] = tuple(reversed(shape))
    return fields, shapes


def _settled(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> list[Layer] | None:
    """The plan's layers as `shapes` has them, if the two name the same weights; None if that takes a closer look."""
    stored = {}
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if last == "weight":
            stored[stem] = shape
        elif len(shape) > 2:
            stored[name] = shape
    tied = {layer.name for layer in plan.layers if layer.tied_to in stored}
    if set(plan.by_name) - tied != set(stored) - tied:
        return None
    return [
        Layer(layer.name, layer.kind, stored.get(layer.name, layer.shape), layer.group, layer.tied_to)
        for layer in plan.layers
    ]
