"""Imports point only down the table of rooms, and no two files import each other in a circle.

Optional packages are imported where they are used. Every Python file of every room is parsed, not imported, so the
check sees imports inside functions, under `if TYPE_CHECKING` and in files that this machine could not run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from samples import ROOT

# Each room, and the rooms it may import beside itself. `quant` is the folder of the public API.
ROOMS = {
    "formats": set(),
    "kernels": {"formats"},
    "recipes": {"formats"},
    "calibration": {"formats", "kernels", "recipes"},
    "export": {"formats", "kernels", "recipes", "calibration"},
    "quant": {"formats", "kernels", "recipes", "calibration", "export"},
}

# The parts of a room, lowest first: a part imports itself and those before it. "." is the room's own files.
PARTS = {
    "formats": (".",),
    "kernels": (".", "portable", "hopper", "attention", "linear", "training"),
    "recipes": (".",),
    "calibration": (".", "texts", "outputs", "solvers", "walk", "sensitivity"),
    "export": ("checkpoint", "onnx_graph", "engine", "packages"),
    "quant": (
        ".",
        "vllm_plugin",
        "models",
        "plan",
        "evaluation",
        "execution",
        "allocation",
        "runtime",
        "report",
        "checkpoints",
        "training",
        "run",
        "api",
        "engines",
        "adapters",
        "cli",
    ),
}

# The oracle stays pure: nothing but these, at any level.
FORMATS_MAY_IMPORT = {"torch", "numpy", "quant"} | sys.stdlib_module_names

# What may be imported while a module loads: the core dependencies. Everything else belongs inside a function.
CORE = {"torch", "numpy", "safetensors", "click", "rich", "quant"} | sys.stdlib_module_names

# Where an optional package may be imported while a module loads; such a file is itself imported inside functions.
MAY_LOAD = {
    "kernels/portable": "triton",
    "kernels/hopper": "triton",
    "quant/adapters/from_pretrained.py": "transformers",
    "quant/adapters/lm_eval_model.py": "lm_eval",
    "quant/adapters/lora_layers.py": "peft",
    "quant/generate/quantized_kv_cache.py": "transformers",
    "quant/training/trainer.py": "transformers",
    "quant/vllm_plugin/nvfp4_attention.py": "vllm",
    "quant/vllm_plugin/between_layers.py": "vllm",
    "quant/vllm_plugin/linear_kernels.py": "vllm",
    "quant/vllm_plugin/fused_experts.py": "vllm",
}


@dataclass(frozen=True)
class Import:
    module: str
    names: tuple[str, ...]
    line: int
    on_load: bool  # runs when the file is imported: neither inside a function nor under TYPE_CHECKING
    typing: bool = False

    @property
    def candidates(self) -> Iterator[str]:
        """Modules that this may load: `from quant.kernels import layout` names a module as well as a package."""
        yield self.module
        yield from (f"{self.module}.{name}" for name in self.names)


@cache
def imports(source: str) -> tuple[Import, ...]:
    """Every import of `source`."""

    def walk(node: ast.AST, on_load: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, (), child.lineno, on_load, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                yield Import(module, tuple(alias.name for alias in child.names), child.lineno, on_load, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, False, True)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, on_load and not is_function, typing)

    return tuple(walk(ast.parse(source), True, False))


def file_of(module: str) -> str:
    """The file of a module of ours, relative to the root, if there is one."""
    parts = module.split(".")[1:]
    return "/".join(parts if parts and parts[0] in ROOMS else ["quant", *parts]) + ".py"


def part_of(path: str) -> tuple[str, str]:
    """A file's room and its part of it. `quant/__main__.py` starts the command line and counts as part of it."""
    if path == "quant/__main__.py":
        return "quant", "cli"
    room, *folders, _ = path.split("/")
    return room, folders[0] if folders else "."


def violations(path: str, source: str) -> list[str]:
    """What the file `path` (relative to the root, its first part the room) may not import, one line each."""
    room, part = part_of(path)
    found = []
    for item in imports(source):
        top, _, rest = item.module.partition(".")
        rooms = {name.split(".")[1] for name in item.candidates if name.startswith("quant.")} & ROOMS.keys()
        problem = ""
        if not top:
            problem = "is relative; rooms are imported by their full name"
        elif top in ROOMS and top != "quant":
            problem = f"is another distribution's name; the room is quant.{top}"
        elif top == "quant" and not rooms <= ROOMS[room] | {room}:
            problem = f"points up: {room} may import {', '.join(sorted(ROOMS[room])) or 'no other room'}"
        elif top == "quant" and room != "quant" and rest.split(".")[0] not in ROOMS and not rooms:
            problem = "points up: only quant's own files import its top level"
        elif room == "formats" and top not in FORMATS_MAY_IMPORT:
            problem = "is neither torch, numpy nor the standard library"
        elif item.on_load and top not in CORE and top not in may_load(path):
            problem = "is no core dependency; import it inside the function that needs it"
        for name in item.candidates if top == "quant" and not problem else ():
            target = file_of(name)
            known = target in sources()
            if known and part_of(target)[0] == room and later(room, part, part_of(target)[1]):
                problem = f"points up: {room}/{part} stands below {part_of(target)[1]}"
            elif known and item.on_load and not packages_loaded(target) <= CORE | may_load(path):
                problem = (
                    f"loads {', '.join(packages_loaded(target) - CORE)}; import it inside the function that needs it"
                )
            elif known and not item.on_load and not item.typing and not is_late(path, target):
                problem = "loads no optional package; import it at the top of the file"
        if problem:
            found.append(f"{path}:{item.line}: {item.module} {problem}")
    return found


def may_load(path: str) -> set[str]:
    """Optional packages that a file may import while it loads."""
    return {package for place, package in MAY_LOAD.items() if path == place or path.startswith(f"{place}/")}


def later(room: str, part: str, other: str) -> bool:
    """Whether `part` of a room may not import `other`."""
    order = PARTS[room]
    return order.index(other) > order.index(part)


def is_late(path: str, target: str) -> bool:
    """Whether a file of ours is imported inside functions for a reason: it loads an optional package.

    Commands also import late what loads torch, which takes seconds: `--help` does not wait for it.
    """
    loaded = packages_loaded(target)
    return not loaded <= CORE or (path.startswith("quant/cli/") and "torch" in loaded)


@cache
def sources() -> Mapping[str, str]:
    """The text of every file. The links quant/<room> are left out: their files are seen in the rooms themselves."""
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    relative = {f.relative_to(ROOT).as_posix(): f for f in files}
    return {
        name: file.read_text()
        for name, file in sorted(relative.items())
        if not (name.startswith("quant/") and name.split("/")[1] in ROOMS)
    }


@cache
def targets(path: str) -> tuple[tuple[str, bool], ...]:
    """Files of ours that a file imports, each with whether it does so while it loads."""
    return tuple(
        (file_of(name), item.on_load)
        for item in imports(sources()[path])
        if not item.typing
        for name in item.candidates
        if name.startswith("quant") and file_of(name) in sources() and file_of(name) != path
    )


@cache
def packages_loaded(path: str) -> frozenset[str]:
    """The packages that are imported when a file is, by itself or by what it imports."""
    seen, todo, packages = {path}, [path], set()
    while todo:
        current = todo.pop()
        packages |= {item.module.partition(".")[0] for item in imports(sources()[current]) if item.on_load}
        following = {target for target, on_load in targets(current) if on_load} - seen
        seen |= following
        todo += following
    return frozenset(packages)


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The circles of a directed graph: its strongly connected components of more than one node (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


@pytest.mark.parametrize("path", sources())
def test_imports_point_down(path: str) -> None:
    assert violations(path, sources()[path]) == []


def test_no_circle_between_files() -> None:
    """Imports inside functions count: a circle that they hide is one."""
    assert circles({path: {target for target, _ in targets(path)} for path in sources()}) == []


def test_circles_are_found() -> None:
    assert circles({"a": "b", "b": "ca", "c": "d", "d": "e", "e": "c", "f": "a"}) == [["c", "d", "e"], ["a", "b"]]
    assert circles({"a": "bc", "b": "c", "c": ""}) == []


def test_every_part_is_known() -> None:
    assert {part_of(path) for path in sources()} == {(room, part) for room, parts in PARTS.items() for part in parts}


def test_rooms_are_namespace_packages() -> None:
    assert [path for path in sources() if path.endswith("__init__.py")] == ["quant/__init__.py"]


def test_links_lead_to_the_rooms() -> None:
    for room in ROOMS.keys() - {"quant"}:
        assert (ROOT / "quant" / room).readlink() == Path("..") / room


def test_no_folder_is_crowded() -> None:
    """Sixteen files of one folder are about what a reader takes in at a look."""
    folders = [path.rpartition("/")[0] for path in sources()]
    assert {folder: folders.count(folder) for folder in folders if folders.count(folder) > 16} == {}


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("formats/a.py", "import quant.kernels.linear.quant_linear", "points up: formats may import no other room"),
        ("formats/a.py", "from quant import kernels", "points up"),
        ("formats/a.py", "def f():\n    from quant.recipes.plan import Plan", "points up"),
        ("formats/a.py", "def f():\n    import safetensors", "neither torch, numpy nor"),
        ("kernels/a.py", "from quant.recipes.plan import Plan", "points up: kernels may import formats"),
        ("kernels/a.py", "from quant.kernels.linear.quant_linear import quantized_linear", "kernels/. stands below linear"),
        ("kernels/hopper/a.py", "def f():\n    from quant.kernels.linear import ops", "kernels/hopper stands below"),
        ("recipes/a.py", "class A:\n    from quant.kernels import layout", "points up: recipes may import formats"),
        ("calibration/a.py", "from quant.export.onnx.export_onnx import export", "points up"),
        ("export/a.py", "from quant.base.errors import UserError", "only quant's own files"),
        ("export/a.py", "from quant import quantize", "only quant's own files"),
        ("export/a.py", "import quant", "only quant's own files"),
        ("export/a.py", "if TYPE_CHECKING:\n    from quant.base.errors import UserError", "only quant's own files"),
        ("kernels/a.py", "from formats.number import E2M1", "the room is quant.formats"),
        ("kernels/a.py", "from . import ops", "is relative"),
        ("quant/load.py", "import transformers", "inside the function"),
        ("quant/load.py", "try:\n    import onnx.helper\nexcept ImportError:\n    pass", "inside the function"),
        ("quant/load.py", "from scipy.optimize import milp", "inside the function"),
        ("kernels/a.py", "import triton.language as tl", "inside the function"),
        ("kernels/linear/a.py", "from quant.kernels.rounding.portable_casts import quantize", "loads triton"),
        ("kernels/linear/a.py", "import quant.kernels.rounding.portable_casts", "loads triton"),
        ("quant/api/a.py", "def f():\n    from quant.base.errors import UserError", "at the top of the file"),
        ("quant/cli/a.py", "def f():\n    from quant.base.errors import UserError", "at the top of the file"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, problem: str) -> None:
    (found,) = violations(path, source)
    assert problem in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("formats/a.py", "import math\nimport torch\nfrom quant.formats.format import E2M1"),
        ("calibration/a.py", "from quant.kernels.base.hardware import GPUS\nfrom quant.recipes.plan import Plan"),
        ("export/a.py", "import torch\n\ndef f():\n    import onnx"),
        ("export/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import onnx"),
        ("kernels/portable/a.py", "import triton\nfrom quant.kernels.rounding.portable_casts import quantize"),
        ("kernels/linear/a.py", "def f():\n    from quant.kernels.rounding.portable_casts import quantize"),
        ("quant/cli/a.py", "import click\nfrom quant import __version__\nfrom quant.base.errors import UserError"),
        ("quant/cli/a.py", "def f():\n    from quant.evaluation.evaluate import evaluate"),
    ],
)
def test_a_lawful_import_passes(path: str, source: str) -> None:
    assert violations(path, source) == []
