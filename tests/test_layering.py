"""Imports point only down the table of rooms, and heavy optional packages are imported where they are used.

Every Python file of every room is parsed, not imported, so the check sees imports inside functions, under
`if TYPE_CHECKING` and in files that this machine could not run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each room, and the rooms it may import beside itself. `quant` is the folder of the public API.
ROOMS = {
    "formats": set(),
    "kernels": {"formats"},
    "recipes": {"formats"},
    "calibration": {"formats", "kernels", "recipes"},
    "export": {"formats", "kernels", "recipes", "calibration"},
    "quant": {"formats", "kernels", "recipes", "calibration", "export"},
}

# The oracle stays pure: nothing but these, at any level.
FORMATS_MAY_IMPORT = {"torch", "numpy", "quant"} | sys.stdlib_module_names

# What may be imported while a module loads: the core dependencies. Everything else belongs inside a function.
CORE = {"torch", "numpy", "safetensors", "click", "rich", "quant"} | sys.stdlib_module_names

# Files of Triton kernels, which load triton with themselves; whoever calls them imports them inside a function.
TRITON_FILES: set[str] = {
    "calibration/gptq_triton.py",
    "calibration/rounding_triton.py",
    "kernels/attention_gluon.py",
    "kernels/attention_quantize_triton.py",
    "kernels/attention_triton.py",
    "kernels/codes_gluon.py",
    "kernels/decode_attention_triton.py",
    "kernels/kv_cache_triton.py",
    "kernels/matmul.py",
    "kernels/matmul_fp8_block.py",
    "kernels/matmul_gluon.py",
    "kernels/matmul_gluon_prefill.py",
    "kernels/matmul_scaled.py",
    "kernels/nvfp4_gluon.py",
    "kernels/cast.py",
    "kernels/decoder_step.py",
    "kernels/overlap.py",
    "kernels/embedding_triton.py",
    "kernels/hadamard_triton.py",
    "kernels/e2m1_triton.py",
    "kernels/fused.py",
    "kernels/matmul_grouped.py",
}

# Files of subclasses of transformers' classes, under the same rule.
TRANSFORMERS_FILES: set[str] = {"quant/kv_generation.py"}
MAY_LOAD = {"triton": TRITON_FILES, "transformers": TRANSFORMERS_FILES}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    on_load: bool  # runs when the file is imported: neither inside a function nor under TYPE_CHECKING


def imports(source: str) -> Iterator[Import]:
    """Every import of `source`. `from quant import kernels` counts as `quant.kernels`, for that is what it loads."""

    def walk(node: ast.AST, on_load: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, on_load) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                module = "." * child.level + (child.module or "")
                if module == "quant":
                    yield from (Import(f"quant.{alias.name}", child.lineno, on_load) for alias in child.names)
                else:
                    yield Import(module, child.lineno, on_load)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, on_load=False)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(child, on_load and not is_function)

    return walk(ast.parse(source), on_load=True)


def violations(path: str, source: str) -> list[str]:
    """What the file `path` (relative to the root, its first part the room) may not import, one line each."""
    room = path.split("/", 1)[0]
    found = []
    for item in imports(source):
        top, _, rest = item.module.partition(".")
        target = rest.split(".", 1)[0]
        if not top:
            problem = "is relative; rooms are imported by their full name"
        elif top in ROOMS and top != "quant":
            problem = f"is another distribution's name; the room is quant.{top}"
        elif top == "quant" and target in ROOMS and target not in ROOMS[room] | {room}:
            problem = f"points up: {room} may import {', '.join(sorted(ROOMS[room])) or 'no other room'}"
        elif top == "quant" and target not in ROOMS and room != "quant":
            problem = "points up: only quant's own files import its top level"
        elif room == "formats" and top not in FORMATS_MAY_IMPORT:
            problem = "is neither torch, numpy nor the standard library"
        elif item.on_load and top not in CORE and path not in MAY_LOAD.get(top, ()):
            problem = "is no core dependency; import it inside the function that needs it"
        elif item.on_load and f"{target}/{rest.partition('.')[2]}.py" in TRITON_FILES and path not in TRITON_FILES:
            problem = "loads triton; import it inside the function that needs it"
        elif item.on_load and f"{item.module.replace('.', '/')}.py" in TRANSFORMERS_FILES:
            problem = "loads transformers; import it inside the function that needs it"
        else:
            continue
        found.append(f"{path}:{item.line}: {item.module} {problem}")
    return found


def room_files() -> list[str]:
    # The links quant/<room> are left out: their files are seen in the rooms themselves.
    files = [f for room in ROOMS for f in (ROOT / room).rglob("*.py")]
    relative = [f.relative_to(ROOT).as_posix() for f in files]
    return sorted(f for f in relative if not (f.startswith("quant/") and f.split("/")[1] in ROOMS))


@pytest.mark.parametrize("path", room_files())
def test_imports_point_down(path: str) -> None:
    assert violations(path, (ROOT / path).read_text()) == []


def test_every_room_is_read() -> None:
    assert {path.split("/")[0] for path in room_files()} == set(ROOMS)


def test_rooms_are_namespace_packages() -> None:
    barrels = [path for path in room_files() if path.endswith("__init__.py")]
    assert barrels == ["quant/__init__.py"]


def test_links_lead_to_the_rooms() -> None:
    for room in ROOMS.keys() - {"quant"}:
        assert (ROOT / "quant" / room).readlink() == Path("..") / room


def test_triton_files_exist() -> None:
    assert sorted(TRITON_FILES & set(room_files())) == sorted(TRITON_FILES)


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("formats/a.py", "import quant.kernels.ops", "points up: formats may import no other room"),
        ("formats/a.py", "from quant import kernels", "points up"),
        ("formats/a.py", "def f():\n    from quant.recipes.plan import Plan", "points up"),
        ("formats/a.py", "def f():\n    import safetensors", "neither torch, numpy nor"),
        ("kernels/a.py", "from quant.recipes.plan import Plan", "points up: kernels may import formats"),
        ("recipes/a.py", "class A:\n    from quant.kernels import ops", "points up: recipes may import formats"),
        ("calibration/a.py", "from quant.export.onnx import export", "points up"),
        ("export/a.py", "from quant.api import quantize", "only quant's own files"),
        ("export/a.py", "from quant import quantize", "only quant's own files"),
        ("export/a.py", "import quant", "only quant's own files"),
        ("export/a.py", "if TYPE_CHECKING:\n    from quant.api import quantize", "only quant's own files"),
        ("kernels/a.py", "from formats.number import E2M1", "the room is quant.formats"),
        ("kernels/a.py", "from . import ops", "is relative"),
        ("quant/load.py", "import transformers", "inside the function"),
        ("quant/load.py", "try:\n    import onnx.helper\nexcept ImportError:\n    pass", "inside the function"),
        ("quant/load.py", "from scipy.optimize import milp", "inside the function"),
        ("kernels/a.py", "import triton.language as tl", "inside the function"),
    ],
)
def test_a_planted_violation_is_caught(path: str, source: str, problem: str) -> None:
    (found,) = violations(path, source)
    assert problem in found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("formats/a.py", "import math\nimport torch\nfrom quant.formats.number import E2M1"),
        ("calibration/a.py", "from quant.kernels.linear import QuantLinear\nfrom quant.recipes.plan import Plan"),
        ("export/a.py", "def f():\n    import onnx\n    from quant.calibration.collect import collect"),
        ("export/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import onnx"),
        ("quant/cli.py", "import click\nfrom quant.api import quantize\nfrom quant import __version__"),
    ],
)
def test_a_lawful_import_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_a_file_of_kernels_is_imported_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TRITON_FILES", {"kernels/cast.py"})
    assert violations("kernels/cast.py", "import triton") == []
    assert violations("kernels/ops.py", "def f():\n    from quant.kernels.cast import cast") == []
    for source in ("from quant.kernels.cast import cast", "import quant.kernels.cast"):
        (found,) = violations("kernels/ops.py", source)
        assert "loads triton" in found
