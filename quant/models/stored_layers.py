"""`stored_layers` reads the layers of a model from the headers of its files, in about a second and without torch.

A plan is checked by names and shapes, which safetensors and GGUF files have in their headers. Where the tensors are
exactly those that the plan names, that is enough. Otherwise the caller builds the model on the meta device, because its
modules may be named, split or fused differently from the stored tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from quant.base.json_data import typed
from quant.base.json_files import read_json
from quant.models.files import find_model, safetensors_file, shard_names
from quant.recipes.layers import Layer
from quant.recipes.plan import LayerPlan, Plan

Shapes = dict[str, tuple[int, ...]]


def stored_layers(model: str, plan: Plan) -> list[Layer] | None:
    """Returns the layers of a model from the headers of its files; None where that takes the model itself.

    Args:
        model: as for `quantize`.
        plan: the plan that names the layers to look for in the headers.

    Raises:
        UserError: the model does not exist.
    """
    path = find_model(model)
    shapes = _of_directory(path) if path.is_dir() else _of_gguf(path, plan)
    return None if shapes is None else _layers_if_matching(plan, shapes)


def _of_directory(path: Path) -> Shapes | None:
    """Returns shapes by tensor name from safetensors headers; None where the directory is not one of a plain model."""
    try:
        config = _fields(path / "config.json")
        shards = [path / "model.safetensors"]
        if not shards[0].is_file():
            index = _fields(path / "model.safetensors.index.json")
            names = typed(dict[str, str], index.get("weight_map"), "weight_map")
            shards = [path / name for name in shard_names(names, path)]
        if "quantization_config" in config or (path / "hf_quant_config.json").is_file():
            return None
        files = [safetensors_file(shard) for shard in shards]
        stored = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
        if any(part.get_dtype().startswith(("F8", "U8")) for part in stored.values()):  # codes of quantized weights
            return None
        return {name: tuple(part.get_shape()) for name, part in stored.items()}
    except (OSError, ValueError):
        return None  # the loader reports the error


def _fields(file: Path) -> dict[str, Any]:
    return read_json(file, "valid JSON", lambda document: typed(dict[str, Any], document, "the document"))


def _of_gguf(path: Path, plan: Plan) -> Shapes | None:
    """Returns the shapes of a GGUF file under the names that `plan` has for its layers.

    None where it cannot be read so.
    """
    try:
        import gguf

        file = gguf_reader()(path)
        architecture = file.fields["general.architecture"].contents()
        kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
        names = gguf.get_tensor_name_map(kind, file.fields[f"{architecture}.block_count"].contents())
    except (ImportError, OSError, ValueError, IndexError, KeyError, StopIteration):
        return None  # the loader reports the error
    ours = {f"{names.get_name(layer.name)}.weight": f"{layer.name}.weight" for layer in plan.layers}
    return {ours.get(t.name, t.name): tuple(map(int, reversed(t.shape))) for t in file.tensors}


@cache
def gguf_reader() -> type[Any]:
    """Returns `gguf.GGUFReader` over a plain array: the same mapped bytes, without the cost of `np.memmap`'s slices.

    It makes about 300,000 slices of a vocabulary of 49,152 tokens, and slicing `np.memmap` takes three times as long.
    """
    import numpy as np  # takes 0.1 s, and most commands on plans read no GGUF file
    from gguf import GGUFReader

    class PlainReader(GGUFReader):  # type: ignore[misc]
        @property
        def data(self) -> np.ndarray[Any, Any]:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray[Any, Any]) -> None:
            self._data = mapped.view(np.ndarray)

    return PlainReader


def _layers_if_matching(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> list[Layer] | None:
    """Returns the plan's layers as `shapes` has them, if the two name the same weights.

    None if that takes a closer look.
    """
    stored = {}
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if last == "weight":
            stored[stem] = shape
        elif len(shape) > 1:
            stored[name] = shape
    tied = {layer.name for layer in plan.layers if layer.tied_to in stored}
    if set(plan.by_name) - tied != set(stored) - tied:
        return None

    def shape_of(layer: LayerPlan) -> tuple[int, ...]:
        shape = stored.get(layer.name, layer.shape)
        # The other axes of a transposed convolution depend on its groups, which no file names.
        return layer.shape if layer.transposed and sorted(shape) == sorted(layer.shape) else shape

    return [
        Layer(layer.name, layer.kind, shape_of(layer), layer.group, layer.tied_to, transposed=layer.transposed)
        for layer in plan.layers
    ]
