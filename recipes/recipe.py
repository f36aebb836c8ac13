"""A `Recipe` is an ordered list of rules that `quant.recipes.plan_make` turns into a plan for every layer.

It gives the defaults of all layers (`weight`, `activation`, `solver`), and then lists exceptions. Rules are globs over
layer names, tried in order, and the last one that matches wins. The recipes that ship with the package are presets, a
TOML file each.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Any, Self

from quant.base.errors import known_names
from quant.base.json_files import check_depth
from quant.formats.format import (
    FORMATS,
    GGUF_FORMATS,
    INPUT_FORMATS,
    Format,
    cache_format,
    get_format,
    is_16bit,
    parse_format,
)
from quant.recipes.solver_names import DEFAULT_OBSERVER

KEEP = "keep"
MIXES = {
    **{"q4_k_s": "q4_k", "q4_k_m": "q4_k", "q5_k_s": "q5_k", "q5_k_m": "q5_k"},
    **{name: name for name in GGUF_FORMATS},
}
"""llama.cpp's names of mixes, and the format that most layers have in each; `gguf_mixes` has the exceptions."""
_DOTS = 1000  # most dots in a line of a TOML file


@dataclass(frozen=True)
class Rule:
    """One exception.

    Attributes:
        match: glob over layer names, as in `matched`.
        weight: format name, or "keep" for 16 bit (or "16bit", "bf16", "fp16"); None leaves the format of earlier rules.
        activation: the same for the input.
        solver: the same for the solver.
        reason: goes into the plan; by default it names the rule.
    """

    match: str
    weight: str | None = None
    activation: str | None = None
    solver: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Defaults for all layers, and ordered exceptions.

    Attributes:
        name: the name as the plan's reasons spell it.
        weight: weight format name, or "keep".
        activation: activation format name, or "keep".
        solver: key of `SOLVERS`, or several joined by "+"; None leaves it to the effort.
        kv_cache: KV-cache format name, or "keep".
        attention: attention format name, or "keep".
        guard: "LIMIT FORMAT …": a layer whose relative output error exceeds the limit gets the next format.
        observer: key of `OBSERVERS`: how static input scales are chosen.
        description: one line for `quant formats` and reports.
        rules: exceptions, last match wins.
    """

    name: str
    weight: str = KEEP
    activation: str = KEEP
    solver: str | None = None
    kv_cache: str = KEEP
    attention: str = KEEP
    guard: str = ""
    observer: str = DEFAULT_OBSERVER
    description: str = ""
    rules: tuple[Rule, ...] = ()

    def with_rules(self, *rules: Rule) -> Self:
        """Returns the recipe with more rules at its end."""
        return dataclasses.replace(self, rules=self.rules + rules)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], where: str = "recipe") -> Self:
        """Returns a recipe from parsed TOML; ValueError for an unknown key or format, or a value that is no string."""
        _check_keys(fields, cls, where)
        rules = []
        if not isinstance(fields.get("rules", []), list):
            raise ValueError(f"{where}: `rules` is a list of tables, each headed [[rules]]")
        for index, rule in enumerate(fields.get("rules", []), 1):
            _check_keys(rule, Rule, f"{where}, rule {index}")
            if "match" not in rule:
                raise ValueError(f"{where}, rule {index}: no `match` glob")
            rules.append(Rule(**rule))
        recipe = cls(**{"name": where, **fields, "rules": tuple(rules)})
        for holder in (recipe, *rules):
            for key in ("weight", "activation", "attention"):
                named_format(getattr(holder, key, None), where)
        named_format(recipe.kv_cache, where, cache_format)
        return recipe

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a TOML recipe.

        Raises:
            ValueError: not TOML, or an unknown key or format; the message names the file.
        """
        path = Path(path)
        try:
            text = path.read_bytes().decode("utf-8-sig")
            if any(line.count(".") > _DOTS for line in text.splitlines()):
                raise ValueError("nested too deeply")  # a.a.a… = 1; tomllib takes memory with the square of the dots
            fields = tomllib.loads(text)
            # Nesting that tomllib survives may still exceed the recursion limit of code that walks the fields.
            check_depth(fields)
        except OSError as error:
            raise ValueError(f"recipe {path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            fault = "nested too deeply" if isinstance(error, RecursionError) else error
            raise ValueError(f"{path}: not a TOML recipe: {fault}") from None
        return cls.from_dict({"name": path.stem, **fields}, str(path))


def matched(globs: str | Iterable[str], names: Collection[str]) -> dict[str, None]:
    """Returns the names that one of the globs matches, in their order and without values: a set that keeps the order.

    This is the one meaning of globs: in recipes, plans, budgets, low-precision training and prediction heads. A glob is
    over whole names and case-sensitive, and `*` crosses dots. One that is the exact name of a layer means that layer
    alone: as a glob, `heads[0]` would match `heads0`, and not the layer of that name.
    """
    globs = [globs] if isinstance(globs, str) else list(globs)
    ordered = dict.fromkeys(names)
    exact = {glob for glob in globs if glob in ordered}
    patterns = [glob for glob in globs if glob not in exact]
    return dict.fromkeys(n for n in ordered if n in exact or any(fnmatchcase(n, pattern) for pattern in patterns))


def no_match(glob: str, names: Iterable[str]) -> str:
    """Returns what to say of a glob that matches no layer; `names` are those of the model's layers."""
    names = list(names)
    return (
        f"glob {glob!r} matches no layer; this model's layers are called {', '.join(names[:3])}, …"
        f"{near_glob(glob, names)}"
    )


def near_glob(glob: str, names: Iterable[str]) -> str:
    """Returns the end of a message that suggests a glob which matches some of `names`: the words next to its own."""
    names = list(names)
    words = {word for name in names for word in name.split(".")}

    def nearest(word: re.Match[str]) -> str:
        near = [] if word[0].isdigit() else difflib.get_close_matches(word[0], words, 1)
        return near[0] if near else word[0]

    meant = re.sub(r"[^.*?[\]]+", nearest, glob)
    meant = meant if matched(meant, names) else f"*.{meant}"
    return f"; did you mean {meant}?" if meant != glob and matched(meant, names) else ""


def presets() -> dict[str, Recipe]:
    """Returns the recipes that ship with the package, by name."""
    files = [f for f in resources.files("quant.recipes").iterdir() if f.name.endswith(".toml")]
    tables = {f.name.removesuffix(".toml"): tomllib.loads(f.read_text(encoding="utf-8")) for f in files}
    return {name: Recipe.from_dict({"name": name, **tables[name]}, name) for name in sorted(tables)}


def get_recipe(name: str) -> Recipe:
    """Returns the recipe of a name as in `find_preset`, or of a `.toml` file; ValueError for an unknown name."""
    if name.endswith(".toml"):
        return Recipe.load(name)
    stem, plus, branch = name.partition("+")
    if plus and branch and find_preset(stem):
        raise ValueError(f"format {name!r}: give the format {stem}, and the solver {branch}")
    if is_16bit(name):
        raise ValueError(f"format {name!r} leaves all layers in 16 bit; it is for single layers, in plans and recipes")
    if (recipe := find_preset(name)) is not None:
        return recipe
    if name in INPUT_FORMATS:
        weights = [preset.weight for preset in presets().values() if preset.activation == name]
        example = f"{name}@16bit" if name in FORMATS and not weights else f"{(weights or ['nvfp4'])[0]}@{name}"
        raise ValueError(f"format {name!r} is for weights or inputs alone; write WEIGHT@INPUT, such as {example}")
    known = known_names(name, [*presets(), *MIXES], "formats", more=FURTHER_NAMES)
    raise ValueError(f"unknown format {name!r}; {known}")


FURTHER_NAMES = ", any of them with a16 at its end, or WEIGHT@INPUT such as nvfp4@fp8"
"""The names of formats beside those of presets, for messages."""


def find_preset(name: str) -> Recipe | None:
    """Returns the formats that a name stands for: a preset, `PRESETa16` with inputs in 16 bit, or `WEIGHT@INPUT`."""
    weight, at, activation = name.partition("@")
    if at:
        inputs = parse_format(activation)
        return Recipe(name, get_format(weight).name, KEEP if inputs is None else inputs.name)
    if (name := name.lower() if name.lower() in MIXES else name) in MIXES:  # llama.cpp writes Q4_K_M
        return Recipe(name, MIXES[name], description=f"llama.cpp's {name.upper()}, for --out NAME.gguf")
    recipes = presets()
    # Some presets end in a16 themselves (nvfp4a16), so whole names go first.
    before = recipes.get(name.removesuffix("a16"))
    if name not in recipes and before is not None and before.activation != KEEP:
        return dataclasses.replace(before, name=name, activation=KEEP, description="")
    return recipes.get(name)


def named_format(
    name: str | None, where: str, parse: Callable[[str | None], Format | None] = parse_format
) -> Format | None:
    """Returns the format of a name in the recipe `where`, which the ValueError for an unknown name begins with."""
    try:
        return parse(name)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_keys(fields: Any, cls: type, where: str) -> None:
    if not isinstance(fields, Mapping):
        raise ValueError(f"{where}: expected a table of keys and values, not {fields!r}")
    keys = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(fields) - set(keys))
    if unknown:
        raise ValueError(f"{where}: unknown key(s) {', '.join(unknown)}; {known_names(unknown[0], keys, 'keys')}")
    for key, value in fields.items():
        if key != "rules" and not isinstance(value, str):
            raise ValueError(f"{where}: {key} is {value!r}; expected a string in quotes")
