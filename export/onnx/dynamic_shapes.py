"""Optimization profiles are the ranges of shapes that an engine takes, written as text.

An engine is compiled for a range of every dynamic dimension, and tuned for one value of it:

    input_ids=1x1:1x128:4x512            min:opt:max of one input, all its dimensions
    batch=1:1:4,sequence=1:128:512       min:opt:max of a named dimension, in every input that has it

Several profiles make one engine of several programs, for example for prefill and for decoding. Missing dimensions take
a default. TensorRT's fused FP8 attention has no kernel for 2 to 31 tokens, so such a dimension starts at 32.

A graph is traced for the sizes of all its profiles together (`dimension_ranges`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quant.base.errors import option
from quant.export.onnx.decoder_graph import GraphInput

FP8_ATTENTION_MINIMUM = 32
# By the first letters of a dimension's name; `""` is for all other dimensions.
DEFAULT_RANGES = {"batch": (1, 1, 4), "past": (0, 128, 1024), "": (1, 128, 1024)}
SEQUENCE = "sequence"
"""The dimension of tokens in the graphs of transformers models."""

Range = tuple[int, int, int]
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class Input:
    """A graph input; a dynamic dimension is its name, a fixed one a number."""

    name: str
    dims: tuple[int | str, ...]

    @property
    def is_dynamic(self) -> bool:
        """Whether a profile must give its shape."""
        return any(isinstance(dim, str) for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.name} [{', '.join(map(str, self.dims))}]"


def graph_inputs(model: Any) -> list[Input]:
    """Returns the inputs of an ONNX model; a dynamic dimension without a name gets one of its own."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = []
    for value in model.graph.input:
        if value.name in constants:
            continue
        dims = value.type.tensor_type.shape.dim
        named = [d.dim_value if d.HasField("dim_value") else d.dim_param for d in dims]
        inputs.append(Input(value.name, tuple(f"{value.name}.{i}" if d == "" else d for i, d in enumerate(named))))
    return inputs


def as_profiles(shapes: str | Sequence[str] | None) -> list[str]:
    """Returns the profiles that `--shapes` gives: none, one, or several."""
    if shapes is None:
        return []
    return [shapes] if isinstance(shapes, str) else list(shapes)


def dimension_ranges(
    inputs: Mapping[str, GraphInput], shapes: str | Sequence[str] | None, longest: int | None = None
) -> dict[str, tuple[int, int]]:
    """Returns the smallest and largest size of the dynamic dimensions that are limited, over all profiles."""
    items = [Input(name, x.dims) for name, x in inputs.items()]
    texts = as_profiles(shapes)
    if not texts and longest is not None and any(SEQUENCE in item.dims for item in items):
        return {SEQUENCE: (1, longest)}
    ranges: dict[str, tuple[int, int]] = {}
    for text in texts:
        for dim, (low, _, high) in _profile_ranges(text, items, {}, longest).items():
            before = ranges.get(dim, (low, high))
            ranges[dim] = min(before[0], low), max(before[1], high)
    return ranges


def parse_profile(text: str, inputs: Sequence[Input], floors: Mapping[str, int], longest: int | None = None) -> Shapes:
    """Parses a profile: min, opt and max shape of every dynamic input.

    `floors` are the smallest values that a kernel allows for a named dimension, and `longest` is where the default of a
    sequence ends: the tokens of the KV cache, or the positions of the model. Raises ValueError for a range that is not
    ascending, contradicts another or is below a floor, and for anything else than the forms above.
    """
    ranges = _profile_ranges(text, inputs, floors, longest)

    def shape(item: Input, index: int) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else ranges[dim][index] for dim in item.dims)

    return {item.name: (shape(item, 0), shape(item, 1), shape(item, 2)) for item in inputs if item.is_dynamic}


def _profile_ranges(
    text: str, inputs: Sequence[Input], floors: Mapping[str, int], longest: int | None
) -> dict[str, Range]:
    ranges = _named_ranges(text, inputs)
    for dim in (dim for item in inputs for dim in item.dims if isinstance(dim, str) and dim not in ranges):
        low, best, high = next(value for key, value in DEFAULT_RANGES.items() if dim.startswith(key))
        if longest is not None and dim == SEQUENCE:
            best, high = min(best, longest), min(high, longest)
        floor = floors.get(dim, 0)
        ranges[dim] = max(low, floor), max(best, floor), max(high, floor)
    # Checked last, so that defaults are checked too.
    for dim, (low, best, high) in ranges.items():
        if not low <= best <= high:
            raise ValueError(f"{option('shapes')}: {dim} is {low}:{best}:{high}; write it as MIN:OPT:MAX, ascending")
        if high < 1:
            raise ValueError(
                f"{option('shapes')}: {dim} is {low}:{best}:{high}, which leaves nothing to compute; end it at 1 or "
                "more"
            )
        if low < floors.get(dim, 0):
            raise ValueError(
                f"{option('shapes')}: {dim} starts at {low}, and TensorRT's fused FP8 attention needs at least "
                f"{floors[dim]}: start it there, or export with {option('attention', 'none')}"
            )
    return ranges


def _named_ranges(text: str, inputs: Sequence[Input]) -> dict[str, Range]:
    """Returns the ranges of the dimensions that a profile names, by itself or as part of an input's shape."""
    # Ranges are kept by dimension: two inputs that share a dimension share its range.
    ranges: dict[str, Range] = {}
    by_name: dict[str, Any] = {item.name: item for item in inputs}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, values = entry.rpartition("=")
        if not name or not values:
            dynamic = next((item for item in inputs if item.is_dynamic), None)
            example = "input_ids=1x1:1x128:4x512"
            if dynamic is not None:
                example = format_profile(parse_profile("", [dynamic], {}))
            raise ValueError(f"{option('shapes')}: {entry!r} is not NAME=MIN:OPT:MAX, such as {example}")
        if name not in by_name and not any(name in item.dims for item in inputs):
            listed = "; ".join(map(str, inputs))
            raise ValueError(f"{option('shapes')}: no input or dimension {name!r}; the model's inputs are {listed}")
        if not re.fullmatch(r"\d+(x\d+)*(:\d+(x\d+)*)*", values):
            raise ValueError(f"{option('shapes')}: {entry!r}: a shape is numbers joined by x, such as 1x128")
        shapes = [tuple(map(int, part.split("x"))) for part in values.split(":")]
        if len(shapes) not in (1, 3):
            raise ValueError(f"{option('shapes')}: {entry!r} has {len(shapes)} shapes; write MIN:OPT:MAX, or one")
        shapes = shapes if len(shapes) == 3 else shapes * 3
        if name in by_name:
            item = by_name[name]
            dims = item.dims
            if any(len(shape) != len(dims) for shape in shapes):
                raise ValueError(f"{option('shapes')}: {entry!r}: {item} has {len(dims)} dimension(s)")
        else:
            item, dims = name, (name,)
            if any(len(shape) != 1 for shape in shapes):
                raise ValueError(f"{option('shapes')}: {entry!r}: {name} is one dimension; write {name}=1:128:512")
        for dim, low, best, high in zip(dims, *shapes, strict=True):
            if isinstance(dim, int) and {low, best, high} != {dim}:
                raise ValueError(f"{option('shapes')}: {entry!r}: {item} is fixed at {dim}, not {low}:{best}:{high}")
            if isinstance(dim, str) and ranges.setdefault(dim, (low, best, high)) != (low, best, high):
                raise ValueError(
                    f"{option('shapes')}: {dim} is {':'.join(map(str, ranges[dim]))} in one place and "
                    f"{low}:{best}:{high} in another; it is one dimension"
                )
    return ranges


def check_sequence(longest: int, capacity: int) -> None:
    """Raises ValueError for steps of more tokens than a KV cache holds."""
    if longest > capacity:
        raise ValueError(
            f"{option('shapes')}: a sequence of {longest} does not fit into a KV cache of {capacity} "
            f"({option('capacity')})"
        )


def format_profile(shapes: Shapes) -> str:
    """Returns the text that `parse_profile` reads."""
    return ",".join(f"{name}=" + ":".join("x".join(map(str, s)) for s in three) for name, three in shapes.items())
