"""A `Plan` gives every layer its formats and its solver, with the reason.

Everything before the plan decides, everything after it executes; the file between them is JSON that people can
read, diff and edit. A layer that stays in 16 bit is in the plan too, with its reason, so that nothing is silent.

    {"schema_version": 2,
     "layers": [{"name": "model.layers.0.mlp.down_proj", "kind": "linear", "shape": [576, 1536],
                 "weight": "nvfp4", "activation": null, "solver": "rtn", "group": "…", "reason": "…"}, …],
     "kv_cache": null, "attention": null, "guard": null, "observer": "absmax", "target": null, "provenance": {…}}

Whatever is executed is a field, and a part of `Plan.digest`; the provenance is for readers, and nothing in it is
executed. Unknown fields are refused, so that a typing error in an edited plan is found when it is read and not when a
deployed model misbehaves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, get_type_hints

from quant.base.atomic import write_atomically
from quant.base.errors import UserError, counted, html_table, known_names, listed, option
from quant.base.json_files import check_fields, json_text, read_json, typed
from quant.formats.format import (
    FORMATS,
    FP8_HEAD,
    GGUF_FORMATS,
    INPUT_FORMATS,
    WEIGHT_FORMATS,
    Format,
    cache_format,
    get_format,
    is_16bit,
    parse_format,
)
from quant.recipes.layers import QUANTIZABLE, Layer, LayerKind, obstacle
from quant.recipes.recipe import KEEP, find_preset, matched, near_glob, presets
from quant.recipes.solver_names import DEFAULT_OBSERVER, check_observer, parse_solver

SCHEMA_VERSION = 2
PLAN_FILE = "plan.json"  # in a checkpoint
ODD_INPUTS = "inputs_without_batch_and_tokens"
"""Key of the provenance: layers with a scale for each token whose inputs are not `[batch, tokens, in]`."""


@dataclass(frozen=True)
class Parts:
    """Operations and data that a layer has at run time besides its matmul; by default none."""

    pre_scale: bool = False  # the input is scaled, by a vector that no neighbour could take up
    hadamard: int = 0  # block of the Hadamard rotation that the input goes through; 0 for none
    rank: int = 0  # rank of the 16-bit branch next to the quantized weight; 0 for none
    residual: int = 0  # channels whose rounding error is an input too; the weight has as many columns more

    @classmethod
    def of(cls, parts: Any) -> Parts:
        """Returns the parts of a quantized linear's `RunTimeParts`."""
        return cls(parts.pre_scale is not None, parts.hadamard, parts.rank, parts.residual)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        return {name: value for name, value in vars(self).items() if value}

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of the tensors that go with a weight of `shape`, but for the weight's own columns."""
        # The branch is B · A with A [rank, in] and B [out, rank]; the scale of the input is a vector [in]. A Hadamard
        # matrix is not stored.
        rows, columns = shape[-2:] if self.rank or self.pre_scale else (0, 0)
        return 2 * (self.rank * (rows + columns) + self.pre_scale * columns) + 4 * self.residual


@dataclass(frozen=True)
class LayerPlan:
    """The formats and the solver of one weight.

    Attributes:
        name: module path; of fused experts and of parameters that no module is made for, the parameter's path.
        kind: purpose of the weight.
        shape: the shape of the weight, `[..., out, in]`, or `[out, in / groups, kernel...]` of a convolution.
        weight: weight format; None keeps 16 bit.
        activation: format of the input; None keeps 16 bit.
        solver: key of `SOLVERS`, or several joined by "+".
        reason: one sentence: why this format, or why none.
        group: name of the fusion group whose members must share a format and global scales; None without one.
        tied_to: name of the layer whose weight this one shares; a tied weight is stored once.
        score: sensitivity score of the chosen format, where it was measured.
        cost: bytes the weight takes as planned, where an allocator counted them.
        parts: operations at run time besides the matmul; JSON has their fields among the layer's.
        transposed: whether the original parameter is stored with its input axis first.

    Raises:
        ValueError: an unknown kind or format, or a score that is NaN or infinite.
    """

    name: str
    kind: LayerKind
    shape: tuple[int, ...]
    weight: Format | None = None
    activation: Format | None = None
    solver: str = "rtn"
    reason: str = ""
    group: str | None = None
    tied_to: str | None = None
    score: float | None = None
    cost: int | None = None
    parts: Parts = Parts()
    transposed: bool = False

    def __post_init__(self) -> None:
        # Users write names, such as "linear" and "nvfp4", and a list where a tuple is meant.
        object.__setattr__(self, "kind", LayerKind(self.kind))
        object.__setattr__(self, "shape", tuple(self.shape))
        for field_name in ("weight", "activation"):
            try:
                object.__setattr__(self, field_name, _format_of(getattr(self, field_name)))
            except ValueError as error:
                raise ValueError(f"plan layer {self.name!r}: {field_name}: {error}") from None
        # A head that is quantized has codes of its own, beside the embedding that it shared.
        if self.kind == LayerKind.HEAD and self.weight is not None:
            object.__setattr__(self, "tied_to", None)
        if self.activation is not None and self.activation.gguf:
            raise ValueError(f"plan layer {self.name!r}: activation: {self.activation} is a format of weights alone")
        if self.weight is not None and self.weight.name not in WEIGHT_FORMATS:
            raise ValueError(
                f"plan layer {self.name!r}: weight: {self.weight} is a format of inputs, whose scales are chosen when "
                "the model runs; weights have nvfp4, whose scales a solver chooses"
            )
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"plan layer {self.name!r}: its score is {self.score}; leave it out, or measure it again")

    @property
    def tensor_name(self) -> str:
        """The path of the parameter itself."""
        return self.name if self.kind.is_named_by_parameter else f"{self.name}.weight"

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape `[..., out, in + residual channels]` that formats divide into blocks, see `LayerKind.matrix`."""
        *rows, columns = self.kind.matrix(self.shape)
        return (*rows, columns + self.parts.residual)

    @property
    def numel(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def weight_format(self) -> Format:
        """The weight format of a layer that is quantized; ValueError for one that stays in 16 bit."""
        if self.weight is None:
            raise ValueError(f"{self.name}: stays in 16 bit and has no weight format")
        return self.weight

    @property
    def has_static_scale(self) -> bool:
        """Whether the input has a scale that calibration measures."""
        return self.activation is not None and self.activation.is_static

    def __repr__(self) -> str:
        """Returns one line: the fields of a format alone would fill a screen."""
        solver = f", {self.solver}" if self.weight is not None else ""
        return f"LayerPlan({self.name}: {self.formats}{solver}; {self.reason or 'no reason given'})"

    @property
    def formats(self) -> str:
        """Formats of weight and input, such as `nvfp4@nvfp4`, `fp8_channel` or `16bit`."""
        if self.weight is None:
            return "16bit"
        return f"{self.weight}@{self.activation}" if self.activation else f"{self.weight}"

    @property
    def nbytes(self) -> int:
        """Bytes as planned: weight, scales, pads, branch and input scale; 0 where tied to another layer's."""
        if self.tied_to is not None:
            return 0
        return self.weight.nbytes(self.matrix) + self.parts.nbytes(self.shape) if self.weight else 2 * self.numel

    @property
    def bits_per_weight(self) -> float:
        """Exact bits per weight as planned, run-time parts included; 16 for a layer kept in 16 bit."""
        if self.weight is None:
            return 16.0
        bits = self.weight.bits_per_weight(self.matrix)
        if self.parts.residual:  # stored columns that are no weights of the layer
            bits *= math.prod(self.matrix) / self.numel
        return bits + 8 * self.parts.nbytes(self.shape) / self.numel

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready fields; formats by name, unset optional fields left out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        # Plans are read by people: formats by name, and no field that is at its default and says nothing.
        fields["shape"] = list(self.shape)
        for key in ("weight", "activation"):
            fields[key] = None if fields[key] is None else fields[key].name
        fields |= fields.pop("parts").to_dict()
        if not self.transposed:
            del fields["transposed"]
        return {k: v for k, v in fields.items() if v is not None or k in ("weight", "activation")}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> LayerPlan:
        """Undoes `to_dict`; ValueError, which names the layer, for an unknown or missing field, kind or format."""
        name = fields.get("name", "(no name)") if isinstance(fields, Mapping) else "(no name)"
        where = f"plan layer {name!r}"
        check_fields(fields, cls, where, more=_PARTS)
        kind = fields.get("kind")
        if kind not in list(LayerKind):
            raise ValueError(f"{where}: unknown kind {kind!r}; {known_names(kind, LayerKind, 'kinds')}")
        try:
            own = {key: typed(_LAYER_FIELDS[key], value, key) for key, value in fields.items()}
            formats = {k: None if own.get(k) is None else get_format(own[k]) for k in ("weight", "activation")}
            shape = own["shape"]
            if len(shape) > _DIMENSIONS or any(size < 1 for size in shape) or math.prod(shape) >= _ELEMENTS:
                raise ValueError(f"shape: {reprlib.repr(list(shape))} is not the shape of a weight")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        parts = Parts(**{key: own.pop(key) for key in _PARTS.keys() & fields.keys()})
        return cls(**{**own, **formats, "parts": parts})


CACHES = ("fp8", "fp8_head")  # of checkpoints, which hold the scales
KV_LAYERS = ("nvfp4", "fp8", "16bit")
"""Formats that a plan may give the KV cache of single layers, by rising bits."""


class RunTimeFormats(TypedDict):
    """Names of the formats of the KV cache and of attention's operands; None is 16 bit."""

    kv_cache: str | None
    attention: str | None


@dataclass(frozen=True)
class Plan:
    """Everything that a run executes: layer plans, the formats of the KV cache and of attention, guard and observer.

    A plan is not modified: `plan.set("*.down_proj", "fp8_channel")` returns another with these formats.

    Attributes:
        layers: every layer that owns a weight, in model order.
        kv_cache: format of the KV cache; None keeps 16 bit. `FP8_HEAD` is FP8 with a scale for each KV head.
        attention: format of attention's operands; None keeps 16 bit.
        guard: "LIMIT FORMAT …": a layer whose relative output error on held-out calibration rows exceeds the limit gets
            the next format, see `Guard`; None leaves the formats as they are.
        observer: name of the method that sets static activation scales, a key of `OBSERVERS`.
        target: name of the hardware the plan was made for, if any.
        provenance: recipe, command line, versions, seed and data, for readers; nothing in it is executed.
        kv_layers: where they differ, the format of the KV cache of each layer by name, in place of `kv_cache`.
    """

    layers: tuple[LayerPlan, ...]
    kv_cache: Format | None = None
    attention: Format | None = None
    guard: str | None = None
    observer: str = DEFAULT_OBSERVER
    target: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    kv_layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "kv_layers", tuple(self.kv_layers))
        if self.kv_layers and self.kv_cache is not None:
            raise ValueError("a plan has kv_cache, or kv_layers for each layer, not both")
        if unknown := sorted({*self.kv_layers} - {*KV_LAYERS}):
            raise ValueError(f"kv_layers: {unknown[0]!r}; {known_names(unknown[0], KV_LAYERS, 'formats')}")
        cache = self.kv_cache.name if isinstance(self.kv_cache, Format) else self.kv_cache
        object.__setattr__(self, "kv_cache", _format_of(cache, cache_format))
        object.__setattr__(self, "attention", _format_of(self.attention))
        counts = Counter(layer.name for layer in self.layers)
        if len(counts) != len(self.layers):
            raise ValueError(f"plan names a layer twice: {sorted(name for name, count in counts.items() if count > 1)}")

    def __repr__(self) -> str:
        """One line; `by_name` and `quant inspect` have the layers."""
        counts = Counter(layer.formats for layer in self.layers)
        formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
        run_time = [f"KV cache {self.kv_text}"] if self.kv_text else []
        run_time += [f"attention {self.attention.name}"] if self.attention else []
        size = f"{self.effective_bits:.3f} bits per quantized weight, {self.nbytes / 1e6:.1f} MB"
        return f"Plan({'; '.join([f'{len(self.layers)} layers: {formats}', *run_time, size])})"

    def _repr_html_(self) -> str:
        cells = (
            (layer.name, "×".join(map(str, layer.shape)), layer.formats, layer.solver or "", layer.reason)
            for layer in self.layers
        )
        return f"<p>{html.escape(repr(self))}</p>{html_table(('layer', 'shape', 'formats', 'solver', 'why'), cells)}"

    @cached_property
    def by_name(self) -> dict[str, LayerPlan]:
        """Layers by name."""
        return {layer.name: layer for layer in self.layers}

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """The layers that get a format."""
        return tuple(layer for layer in self.layers if layer.weight is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as planned, tied weights once."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def effective_bits(self) -> float:
        """Bits per weight over the quantized layers, scales and pads counted exactly; 16 if there are none."""
        return bits_per_weight(self.quantized)

    def groups(self) -> dict[str, list[LayerPlan]]:
        """Returns the members of each fusion group, in model order."""
        return {name: members for name, members in groups_of(self.layers).items() if members[0].group is not None}

    def set(self, glob: str, format: str | Format, *, whole_groups: bool = False) -> Plan:
        """Returns a plan with another format for the layers whose names match `glob`.

        `plan.set("*.mlp.*", "fp8").set("*.layers.0.*", "16bit")` makes two changes.

        Args:
            glob: over layer names, as in `quant.recipes.recipe.matched`.
            format: `FORMAT[:SOLVER][@INPUT]`, such as "fp8_channel:gptq@fp8_token"; "16bit" for no format.
            whole_groups: extends the change to the fusion groups of the layers that match.

        Raises:
            UserError: a glob that matches no layer, an unknown format or solver, a format that does not fit a layer,
                or a fusion group that would be split; the layers are named.
        """
        setting = f"{glob}={format.name if isinstance(format, Format) else format}"
        return edit(self, [parse_setting(setting)], whole_groups=whole_groups)

    def replace_layers(self, layers: Iterable[LayerPlan]) -> Plan:
        """Returns a plan in which the layers of the same names are replaced by `layers`."""
        new = {layer.name: layer for layer in layers}
        return dataclasses.replace(self, layers=tuple(new.get(layer.name, layer) for layer in self.layers))

    @property
    def has_kv_mix(self) -> bool:
        """Whether layers keep the KV cache in different formats."""
        return len({*self.kv_layers}) > 1

    @property
    def kv_of_all(self) -> Format | None:
        """The format in which all layers keep the KV cache; None for 16 bit, and where they differ."""
        return cache_format(self.kv_layers[0]) if self.kv_layers and not self.has_kv_mix else self.kv_cache

    @property
    def kv_text(self) -> str:
        """The format of the KV cache, or how many layers have which; empty for 16 bit."""
        if self.has_kv_mix:
            counts = Counter(self.kv_layers).most_common()
            return ", ".join(f"{name} in {counted(count, 'layer')}" for name, count in counts)
        return self.kv_of_all.name if self.kv_of_all else ""

    @property
    def run_time(self) -> RunTimeFormats:
        """Arguments of `quant.quantized_attention` that run the model as planned."""
        # The scales that the model holds are one a tensor or one a head; the codes are the same.
        cache = FORMATS["fp8"] if self.kv_cache is FP8_HEAD else self.kv_cache
        name = ",".join(self.kv_layers) or (cache.name if cache else None)
        return {"kv_cache": name, "attention": self.attention.name if self.attention else None}

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready form, as in the module docstring."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields |= {key: fields[key].name if fields[key] else None for key in ("kv_cache", "attention")}
        if not self.kv_layers:  # earlier releases read the plan then
            del fields["kv_layers"]
        return {"schema_version": SCHEMA_VERSION, **fields, "layers": [layer.to_dict() for layer in self.layers]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Undoes `to_dict`; ValueError for a field that cannot be read, or a fusion group whose members disagree."""
        fields = dict(typed(dict[str, Any], fields, "plan"))
        version = fields.pop("schema_version", None)
        if "layers" not in fields or "plan_digest" in fields:  # a config, or a report
            raise ValueError("it is another document")
        if version != SCHEMA_VERSION:
            raise ValueError(f"plan schema_version is {version!r}; this release reads {SCHEMA_VERSION}")
        check_fields(fields, cls, "plan")
        fields = {key: typed(_PLAN_FIELDS[key], value, key) for key, value in fields.items()}
        for key, value in fields.get("provenance", {}).items():
            typed(_PROVENANCE.get(key, Any), value, f"provenance {key}")
        # Plans hold names, and everything that a format is comes from the table of formats.
        named = {"kv_cache": cache_format, "attention": get_format}
        formats = {key: read(fields[key]) if fields.get(key) else None for key, read in named.items()}
        layers = tuple(LayerPlan.from_dict(layer) for layer in fields["layers"])
        plan = cls(**{**fields, **formats, "layers": layers})
        plan.check_groups()
        return plan

    def check_groups(self) -> None:
        """Raises ValueError where members of a fusion group differ."""
        for name, what in self.mixed_groups():
            raise ValueError(f"fusion group {name!r} {what}; give its members one: they are fused")

    def mixed_groups(self) -> Iterator[tuple[str, str]]:
        """Yields fusion groups whose members, which are fused at run time and solved as one, differ, and how."""
        for name, members in self.groups().items():
            for what, values in (
                ("formats", [m.formats for m in members]),
                ("solvers", [m.solver if m.weight else "" for m in members]),
                ("Hadamard blocks", [str(m.parts.hadamard) for m in members]),
                ("residual channels", [str(m.parts.residual) for m in members]),
            ):
                if len(set(values)) > 1:
                    listed = ", ".join(f"{m.name}={value}" for m, value in zip(members, values, strict=True))
                    yield name, f"mixes {what} ({listed})"
                    break

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, one layer a line."""
        fields = self.to_dict()
        # By hand, since no JSON writer puts one layer on a line, which makes plans readable and their diffs short.
        layers = ",\n  ".join(json_text(layer, ensure_ascii=False) for layer in fields.pop("layers"))
        other_fields = json_text(fields, indent=1, ensure_ascii=False)
        write_atomically(path, f'{other_fields[:-2]},\n "layers": [\n  {layers}\n ]\n}}\n')

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan file, or that of a checkpoint; ValueError, which names it, for what is not a valid plan."""
        return read_json(cls.file(path), "a valid plan", cls.from_dict)

    @staticmethod
    def file(path: str | Path) -> Path:
        """Returns a plan file as it is; of a checkpoint's directory, the plan in it."""
        file = Path(path) / PLAN_FILE if Path(path).is_dir() else Path(path)
        if file.is_file() or not Path(path).is_dir():
            return file
        named = "a file of `quant plan make`, or a directory of `quantize --out`, of a pipeline a part"
        raise UserError(f"{path}: no {PLAN_FILE}; name {named}")

    def digest(self) -> str:
        """Returns SHA-256 over every field but the provenance: the plan's identity for exporters, ranks and resume."""
        # Sorted keys, so that the digest does not depend on the order of fields in a file.
        executed = {key: value for key, value in self.to_dict().items() if key != "provenance"}
        return hashlib.sha256(json_text(executed, sort_keys=True).encode()).hexdigest()


def _format_of(value: Any, parse: Callable[[str], Format | None] = parse_format) -> Format | None:
    """Returns a format by its name, which `parse` reads, or as it is; None, and names of 16 bit, stand for none."""
    if value is None or isinstance(value, Format):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{reprlib.repr(value)} is no format; give one by name, such as 'nvfp4', or None for 16 bit")
    return parse(value)


_PARTS = get_type_hints(Parts)
_LAYER_FIELDS = {**get_type_hints(LayerPlan), **_PARTS, "kind": str, "weight": str | None, "activation": str | None}
_PLAN_FIELDS = {
    **get_type_hints(Plan),
    "layers": list[Any],
    "kv_layers": list[str],
    "kv_cache": str | None,
    "attention": str | None,
}
_PROVENANCE: dict[str, Any] = {
    "edits": list[str], "allocation": dict[str, Any],
    "fusion_groups": str, "fusion_groups_by_name": list[str], "layers_not_called": list[str],
}  # fmt: skip
# Limits for shapes in files: products of sizes within them fit 64 bits, and no reader allocates by an absurd shape.
_DIMENSIONS, _ELEMENTS = 8, 2**60


def groups_of(layers: Iterable[LayerPlan]) -> dict[str, list[LayerPlan]]:
    """Returns layers by fusion group in order of first appearance; a layer without a group is its own."""
    groups: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        groups.setdefault(layer.group or layer.name, []).append(layer)
    return groups


def groups_by_input(layers: Iterable[LayerPlan]) -> list[list[LayerPlan]]:
    """Returns layers gathered by the input they read: fusion groups, but each fused-expert projection apart."""
    return [
        part
        for members in groups_of(list(layers)).values()
        for part in ([[m] for m in members] if members[0].kind == LayerKind.EXPERTS else [members])
    ]


def bits_per_weight(layers: Iterable[LayerPlan]) -> float:
    """Returns the exact bits per weight over `layers`, tied weights once; 16 for none."""
    own = [layer for layer in layers if layer.tied_to is None]
    weights = sum(layer.numel for layer in own)
    return 8 * sum(layer.nbytes for layer in own) / weights if weights else 16.0


class Guard(NamedTuple):
    """A layer whose output strays too far from the original gets the next format: `0.1 fp8_channel keep`."""

    limit: float  # largest relative error of a layer's output on held-out calibration rows
    formats: tuple[Format | None, ...] = (None,)  # formats that follow the planned one, in this order; None is 16 bit

    @classmethod
    def parse(cls, text: str) -> Guard:
        """Returns a guard from `LIMIT [FORMAT …]`; without formats, a layer beyond the limit stays in 16 bit."""
        first, *names = text.split() or [""]
        try:
            limit = float(first)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ValueError(f"guard {text!r}: write a positive limit and the formats to try, as in '0.1 fp8 keep'")
        try:
            formats = tuple(map(parse_format, names))
        except ValueError as error:
            raise ValueError(f"guard {text!r}: {error}") from None
        return cls(limit, formats or (None,))

    def formats_for(self, layer: LayerPlan) -> tuple[Format | None, ...]:
        """Returns the list for one layer, its present format first where it is not in it."""
        # A layer may have been given a format further along the list, from which it is promoted.
        return self.formats if layer.weight in self.formats else (layer.weight, *self.formats)


@dataclass(frozen=True)
class Setting:
    """One change of formats: `Plan.set`, or `--set` of a command."""

    text: str  # as the user wrote it
    glob: str  # over layer names, as in `quant.recipes.recipe.matched`
    weight: Format | None  # None for 16 bit
    solver: str | None = None  # None leaves the layer's
    activation: Format | None = None
    input_given: bool = False  # whether the user named `activation`; otherwise it follows from the layer and the plan


def parse_setting(text: str) -> Setting:
    """Reads `GLOB=FORMAT[:SOLVER][@INPUT]`; a preset that is no format, such as fp8a16, is weight and input."""
    # From the right: a glob may hold "=", a format and a solver may not.
    glob, equals, value = text.rpartition("=")
    named = option("set", repr(text))
    if not equals or not glob or not value:
        raise UserError(f"{named}: expected GLOB=FORMAT[:SOLVER][@INPUT], such as '*.down_proj=fp8_channel'")
    value, at, input_name = value.partition("@")
    name, colon, solver = value.partition(":")
    try:
        if name not in INPUT_FORMATS | GGUF_FORMATS and (preset := find_preset(name)):
            if at:
                raise ValueError(f"{name} has an input format already; write {preset.weight}@{input_name}")
            name, at, input_name = preset.weight, "@", preset.activation
        weight = parse_format(name)
        activation = parse_format(input_name) if at else None
        if colon:
            parse_solver(solver)
    except ValueError as error:
        raise UserError(f"{named}: {error}") from None
    if weight is None and (activation is not None or solver):
        raise UserError(f"{named}: a layer in 16 bit has neither a solver nor an input format")
    return Setting(text, glob, weight, solver or None, activation, bool(at))


def edit(plan: Plan, settings: Sequence[Setting], *, whole_groups: bool = False) -> Plan:
    """Returns the plan with `settings` applied in order; the last one that matches a layer wins.

    Members of a fusion group are one matmul at run time: settings that would split one are refused.
    Norms, embeddings and the like, and convolutions in 16 bit, are passed over where a glob also matches linear layers.
    A layer that changes loses its score, which was another format's, and the run-time parts of its old solver.
    """
    changes: dict[str, Setting] = {}
    for setting in settings:
        chosen = _chosen(plan, setting)
        if whole_groups:
            names = {layer.name for layer in chosen}
            groups = {layer.group for layer in chosen if layer.group is not None}
            chosen = [m for m in plan.layers if m.name in names or m.group in groups]
        # A later setting replaces an earlier one for the same layer, as rules of a recipe do.
        changes.update(dict.fromkeys((layer.name for layer in chosen), setting))
    # A plan that quantizes no inputs is weight-only by intent, and an edit does not change that.
    inputs_too = any(layer.activation is not None for layer in plan.quantized)
    edited = plan.replace_layers(_set(plan.by_name[name], setting, inputs_too) for name, setting in changes.items())
    blocked: dict[str, list[str]] = {}
    sharers = sharers_of(edited.layers)
    for name in changes:
        if problem := layer_problem(edited.by_name[name], sharers.get(name)):
            blocked.setdefault(problem, []).append(name)
    if blocked:
        problems = "; ".join(f"{listed(names)}: {problem}" for problem, names in blocked.items())
        raise UserError(f"the edit does not fit {counted(sum(map(len, blocked.values())), 'layer')}: {problems}")
    _refuse_split_groups(edited, changes)
    if edited.layers == plan.layers:
        return plan
    edits = [*plan.provenance.get("edits", []), *(setting.text for setting in settings)]
    return replace(edited, provenance={**plan.provenance, "edits": edits})


def _chosen(plan: Plan, setting: Setting) -> list[LayerPlan]:
    layers = [plan.by_name[name] for name in matched(setting.glob, plan.by_name)]
    if not layers:
        names = ", ".join(layer.name for layer in plan.layers[:3])
        names += ", …" if len(plan.layers) > 3 else ""
        have = f"this plan's are called {names}" if names else "this plan has none"
        near = near_glob(setting.glob, plan.by_name)
        raise UserError(f"{option('set', repr(setting.text))}: the glob matches no layer; {have}{near}")
    chosen = [layer for layer in layers if layer.kind in QUANTIZABLE]
    # `*` over a model with both is meant for its linear layers, unless convolutions are quantized already.
    if any(layer.kind != LayerKind.CONV for layer in chosen):
        chosen = [layer for layer in chosen if layer.kind != LayerKind.CONV or layer.weight is not None]
    if not chosen:
        # A head or an embedding is quantized only by its own name, never as one of many that a glob happens to match.
        by_name = (LayerKind.HEAD, LayerKind.EMBEDDING)
        chosen = [layer for layer in layers if layer.kind in by_name or setting.weight is None]
    if not chosen:
        kinds = ", ".join(sorted({layer.kind for layer in layers}))
        raise UserError(
            f"{option('set', repr(setting.text))}: matches only layers of kind {kinds} "
            f"({listed(layer.name for layer in layers)}); formats are for linear layers, fused experts, convolutions, "
            "output heads and embeddings"
        )
    return chosen


def _set(layer: LayerPlan, setting: Setting, inputs_too: bool) -> LayerPlan:
    activation = setting.activation
    # The input of an embedding is the number of a row: it has no format, and one that is requested is refused.
    if not setting.input_given and setting.weight is not None and layer.kind != LayerKind.EMBEDDING:
        # The same weight format again, for another solver: the input stays, even one that the user has set.
        if setting.weight == layer.weight:
            activation = layer.activation
        elif layer.activation is not None or (layer.weight is None and inputs_too):
            activation = input_of(setting.weight)
    solver = setting.solver or layer.solver
    if (layer.weight, layer.activation, layer.solver) == (setting.weight, activation, solver):
        return layer
    reason = f"set by hand: {setting.text}"
    new = replace(layer, weight=setting.weight, activation=activation, solver=solver, reason=reason, parts=Parts())
    # An allocator's plan counts bytes; the count follows the format, the score cannot.
    return replace(new, score=None, cost=None if layer.cost is None else new.nbytes)


@cache
def input_of(weight: Format) -> Format | None:
    """Returns the input format that belongs to a weight format, as a preset combines them; None where none does."""
    for recipe in presets().values():
        if recipe.weight == weight.name and (activation := parse_format(recipe.activation)):
            return activation
    return None


def _refuse_split_groups(plan: Plan, changes: Mapping[str, Setting]) -> None:
    """Raises UserError for an edit that splits fusion groups, and names the layers that it left out."""
    split, left_out = [], []
    for name, members in plan.groups().items():
        decided = {(m.weight, m.activation, m.solver if m.weight else "") for m in members}
        # A group that was split before, in a plan that was read, is reported by `check`, not by this edit.
        if len(decided) > 1 and any(m.name in changes for m in members):
            split.append(name)
            left_out += [m.name for m in members if m.name not in changes] or [m.name for m in members]
    if not split:
        return
    # Blocks of a model repeat: of many names, one for each place in a block is enough.
    places = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in left_out))
    include = ", ".join(left_out if len(left_out) <= len(places) + 4 else places)
    groups = f"fusion group {split[0]}" if len(split) == 1 else f"{len(split)} fusion groups, {split[0]} first"
    raise UserError(
        f"the edit splits {groups}: a runtime merges its members into one matmul. Include {include} too, or pass "
        f"{option('whole_groups', True)}"
    )


def set_kv_cache(plan: Plan, name: str) -> Plan:
    """Returns the plan with another format of the KV cache; `keep` or `16bit` for none, UserError for an unknown."""
    return replace(plan, kv_cache=cache_format(kv_cache_name(name)), kv_layers=())


def kv_cache_name(name: str) -> str:
    """Returns a format of the KV cache as recipes spell it; UserError for one that no layout of checkpoints holds."""
    if not is_16bit(name) and name not in CACHES:
        raise UserError(f"{option('kv_cache', name)}: checkpoints hold a KV cache in {', '.join(CACHES)} or 16bit")
    return KEEP if is_16bit(name) else name


def set_guard_and_observer(plan: Plan, guard: str | None = None, observer: str | None = None) -> Plan:
    """Returns `plan` with another guard and observer; None leaves the plan's, an empty guard takes it away."""
    guard = plan.guard if guard is None else guard or None
    plan = replace(plan, guard=guard, observer=plan.observer if observer is None else observer)
    check_settings(plan)
    return plan


def check_settings(plan: Plan) -> None:
    """Raises ValueError for a guard, an observer, or a format of the KV cache or attention, that a run cannot take."""
    for key, format, takes in (("kv_cache", plan.kv_cache, CACHES), ("attention", plan.attention, ("fp8",))):
        if format is not None and format.name not in takes:
            raise ValueError(f"{key} is {format}, and checkpoints have it in {' or '.join(takes)}, or 16 bit (null)")
    if plan.guard is not None:
        Guard.parse(plan.guard)
    check_observer(plan.observer)


def sharers_of(layers: Iterable[LayerPlan | Layer]) -> dict[str, str]:
    """Returns, by the names of layers that own a shared weight, another layer that has it too."""
    return {layer.tied_to: layer.name for layer in layers if layer.tied_to is not None}


def layer_problem(layer: LayerPlan, sharer: str | None) -> str | None:
    """Returns why no runtime could store the layer as planned; `sharer` is another layer with the same weight."""
    if layer.weight is None:
        return None
    if len(layer.shape) < 2:
        return f"{layer.weight} is for matrices; this is {list(layer.shape)}"
    if sharer is not None:
        return f"its weight is also that of {sharer}, and is stored once and in 16 bit"
    as_layer = Layer(layer.name, layer.kind, layer.shape, tied_to=layer.tied_to)
    return obstacle(as_layer, layer.weight, layer.activation)
