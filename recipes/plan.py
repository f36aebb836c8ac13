"""A `Plan` gives every layer its formats and its solver, with the reason.

Everything before the plan decides, everything after it executes; the file between them is JSON that people can
read, diff and edit. A layer that stays in 16 bit is in the plan too, with its reason, so that nothing is silent.

    {"schema_version": 2,
     "layers": [{"name": "model.layers.0.mlp.down_proj", "kind": "linear", "shape": [576, 1536],
                 "weight": "nvfp4", "activation": null, "solver": "rtn", "group": "…", "reason": "…"}, …],
     "kv_cache": null, "attention": null, "guard": null, "observer": "absmax", "target": null, "provenance": {…}}

Whatever is executed is a field, and a part of `Plan.digest`; the provenance is for readers, and nothing in it is
executed. Fields that a later stage measures (`score`, `cost`) are optional. Unknown fields are refused, so that a
typing error in an edited plan is found when it is read and not when a deployed model misbehaves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import math
import reprlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from quant.base.atomic import write_atomically
from quant.base.errors import html_table, known_names
from quant.base.json_files import check_fields, json_text, read_json, typed
from quant.formats.format import FORMATS, FP8_HEAD, Format, cache_format, get_format, parse_format
from quant.recipes.layers import LayerKind
from quant.recipes.solver_names import DEFAULT_OBSERVER

SCHEMA_VERSION = 2
PLAN_FILE = "plan.json"  # in a checkpoint
ODD_INPUTS = "inputs_without_batch_and_tokens"
"""Key of the provenance: layers with a scale for each token whose inputs are not `[batch, tokens, in]`."""


@dataclass(frozen=True)
class Parts:
    """Operations and data that a layer has at run time besides its matmul; by default none.

    Attributes:
        pre_scale: whether the input is scaled, by a vector that no neighbour could take up.
        hadamard: block of the Hadamard rotation that the input goes through; 0 for none.
        rank: the rank of the 16-bit branch next to the quantized weight; 0 for none.
    """

    pre_scale: bool = False
    hadamard: int = 0
    rank: int = 0

    @classmethod
    def of(cls, parts: Any) -> Parts:
        """Returns the parts of a quantized linear's `RunTimeParts`."""
        return cls(parts.pre_scale is not None, parts.hadamard, parts.rank)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields that are set."""
        return {name: value for name, value in vars(self).items() if value}

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of the 16-bit tensors that go with a weight of `shape`."""
        # The branch is B · A with A [rank, in] and B [out, rank]; the scale of the input is a vector [in]. A Hadamard
        # matrix is not stored.
        rows, columns = shape[-2:] if self.rank or self.pre_scale else (0, 0)
        return 2 * (self.rank * (rows + columns) + self.pre_scale * columns)


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
        if self.weight is not None and self.weight.name not in FORMATS:
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
        """Shape `[..., out, in]` that formats divide into blocks, see `LayerKind.matrix`."""
        return self.kind.matrix(self.shape)

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
        return self.weight.bits_per_weight(self.matrix) + 8 * self.parts.nbytes(self.shape) / self.numel

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
        """Undoes `to_dict`.

        Raises:
            ValueError: an unknown or missing field, kind or format; the message names the layer.
        """
        name = fields.get("name", "(no name)") if isinstance(fields, Mapping) else "(no name)"
        where = f"plan layer {name!r}"
        check_fields(fields, cls, where, more=_PARTS)
        kind = fields.get("kind")
        if kind not in list(LayerKind):
            raise ValueError(f"{where}: unknown kind {kind!r}; {known_names(kind, LayerKind, 'kinds')}")
        try:
            own = {key: typed(_LAYER_FIELDS[key], value, key) for key, value in fields.items()}
            formats = {k: None if own.get(k) is None else get_format(own[k]) for k in ("weight", "activation")}
            _check_shape(own["shape"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        parts = Parts(**{key: own.pop(key) for key in _PARTS.keys() & fields.keys()})
        return cls(**{**own, **formats, "parts": parts})


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
            the next format, see `quant.recipes.plan`; None leaves the formats as they are.
        observer: name of the method that sets static activation scales, a key of `OBSERVERS`.
        target: name of the hardware the plan was made for, if any.
        provenance: recipe, command line, versions, seed and data, for readers; nothing in it is executed.
    """

    layers: tuple[LayerPlan, ...]
    kv_cache: Format | None = None
    attention: Format | None = None
    guard: str | None = None
    observer: str = DEFAULT_OBSERVER
    target: str | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
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
        run_time = [
            f"{name} {value.name}"
            for name, value in (("KV cache", self.kv_cache), ("attention", self.attention))
            if value
        ]
        size = f"{self.effective_bits:.3f} bits per quantized weight, {self.nbytes / 1e6:.1f} MB"
        return f"Plan({'; '.join([f'{len(self.layers)} layers: {formats}', *run_time, size])})"

    def _repr_html_(self) -> str:
        """Returns a table of the layers, for notebooks."""
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

        `plan.set("*.mlp.*", "fp8").set("*.layers.0.*", "16bit")` makes two changes; `quant.edit_plan` takes many.

        Args:
            glob: over layer names, as in `quant.recipes.recipe.matched`.
            format: `FORMAT[:SOLVER][@INPUT]`, such as "fp8_channel:gptq@fp8_token"; "16bit" for no format.
            whole_groups: extends the change to the fusion groups of the layers that match.

        Raises:
            UserError: a glob that matches no layer, an unknown format or solver, a format that does not fit a layer,
                or a fusion group that would be split; the layers are named.
        """
        setting = f"{glob}={format.name if isinstance(format, Format) else format}"
        # Edits are checked against runtimes and solvers, which this room may not import; the package that holds it may.
        edited: Plan = sys.modules["quant"]._edit_plan(self, setting, whole_groups)
        return edited

    def replace_layers(self, layers: Iterable[LayerPlan]) -> Plan:
        """Returns a plan in which the layers of the same names are replaced by `layers`."""
        new = {layer.name: layer for layer in layers}
        return dataclasses.replace(self, layers=tuple(new.get(layer.name, layer) for layer in self.layers))

    @property
    def run_time(self) -> RunTimeFormats:
        """Arguments of `quant.quantized_attention` that run the model as planned."""
        # The scales that the model holds are one a tensor or one a head; the codes are the same.
        cache = FORMATS["fp8"] if self.kv_cache is FP8_HEAD else self.kv_cache
        return {
            "kv_cache": cache.name if cache else None,
            "attention": self.attention.name if self.attention else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON-ready form, as in the module docstring."""
        return {
            "schema_version": SCHEMA_VERSION,
            "layers": [layer.to_dict() for layer in self.layers],
            "kv_cache": self.kv_cache.name if self.kv_cache else None,
            "attention": self.attention.name if self.attention else None,
            "guard": self.guard,
            "observer": self.observer,
            "target": self.target,
            "provenance": self.provenance,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Plan:
        """Undoes `to_dict`; also reads schema version 1, whose guard and observer are in the provenance.

        Raises:
            ValueError: a wrong schema version, an unknown field, kind or format, a layer named twice, or a
                fusion group whose members disagree on a format or a solver.
        """
        fields = dict(typed(dict[str, Any], fields, "plan"))
        version = fields.pop("schema_version", None)
        if version not in (1, SCHEMA_VERSION) or isinstance(version, bool):
            raise ValueError(f"plan schema_version is {version!r}; this release reads 1 and {SCHEMA_VERSION}")
        check_fields(fields, cls, "plan")
        if version == 1:
            fields = _from_version_1(fields)
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
        """Yields fusion groups whose members differ, with the difference.

        Members are fused at run time and solved as one.
        """
        for name, members in self.groups().items():
            for what, values in (
                ("formats", [m.formats for m in members]),
                ("solvers", [m.solver if m.weight else "" for m in members]),
                ("Hadamard blocks", [str(m.parts.hadamard) for m in members]),
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
        """Reads a plan file.

        Raises:
            ValueError: not JSON, or not a valid plan; the message names the file.
        """
        return read_json(path, "a valid plan", cls.from_dict)

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
_PLAN_FIELDS = {**get_type_hints(Plan), "layers": list[Any], "kv_cache": str | None, "attention": str | None}
_PROVENANCE: dict[str, Any] = {
    "edits": list[str], "allocation": dict[str, Any],
    "fusion_groups": str, "fusion_groups_by_name": list[str], "layers_not_called": list[str],
}  # fmt: skip
_VERSION_2 = {"guard", "observer"}  # fields that schema version 1 held in the provenance
# Limits for shapes in files: products of sizes within them fit 64 bits, and no reader allocates by an absurd shape.
_DIMENSIONS, _ELEMENTS = 8, 2**60


def _from_version_1(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts fields of schema version 1 to version 2: a guard and an observer leave the provenance.

    Raises:
        ValueError: they are fields already, which version 1 did not know.
    """
    if unknown := sorted(_VERSION_2 & fields.keys()):
        raise ValueError(f"plan: unknown field(s) {', '.join(unknown)} in schema version 1")
    provenance = typed(dict[str, Any], fields.get("provenance", {}), "provenance")
    executed = {key: provenance.pop(key) for key in sorted(_VERSION_2 & provenance.keys())}
    return {**fields, **{key: value for key, value in executed.items() if value}, "provenance": provenance}


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


def _check_shape(shape: tuple[int, ...]) -> None:
    if len(shape) > _DIMENSIONS or any(size < 1 for size in shape) or math.prod(shape) >= _ELEMENTS:
        raise ValueError(f"shape: {reprlib.repr(list(shape))} is not the shape of a weight")


# A `Guard` gives a layer whose quantized output strays too far from the original the next format in its list.
#
# Recipes, plans and the command line write it as its limit and the formats to try: `0.1 fp8_channel keep`.


@dataclass(frozen=True)
class Guard:
    """When a layer is promoted, and to which format.

    Attributes:
        limit: largest relative error of a layer's output on held-out calibration rows.
        formats: formats that follow the planned one, in this order; None is 16 bit.
    """

    limit: float
    formats: tuple[Format | None, ...] = (None,)

    @classmethod
    def parse(cls, text: str) -> Guard:
        """Returns a guard from `LIMIT [FORMAT …]`; without formats, a layer beyond the limit stays in 16 bit.

        Raises:
            ValueError: the limit is not a positive number, or a format is unknown.
        """
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
