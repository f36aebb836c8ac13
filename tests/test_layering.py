"""Rooms import downwards, no two files import each other in a circle, and modules load with the core alone.

The order of the rooms is data of pyproject.toml, which import-linter checks (`make lint`); imports inside functions
count there and here. Imports for type checkers alone count there.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from samples import ROOT

ROOMS = ("formats", "recipes", "kernels", "calibration", "export")
LINKS = {ROOT / "quant" / room for room in ROOMS}
FILES = sorted(
    file.relative_to(ROOT)
    for folder in ("quant", *ROOMS)
    for file in (ROOT / folder).rglob("*.py")
    if not LINKS & {file, *file.parents}
)

# The oracle stays pure: nothing but these, at any level.
FORMATS_MAY_IMPORT = {"torch", "numpy", "quant", *sys.stdlib_module_names}

# Files that load an optional package when they are imported, which happens inside functions. Kernels load triton.
MAY_LOAD = {
    "quant/adapters/from_diffusers.py": "diffusers",
    "quant/adapters/from_pretrained.py": "transformers",
    "quant/adapters/lightning_callback.py": "lightning",
    "quant/adapters/lm_eval_model.py": "lm_eval",
    "quant/adapters/lora_layers.py": "peft",
    "quant/generate/quantized_kv_cache.py": "transformers",
    "quant/training/trainer.py": "transformers",
}
MAY_LOAD_VLLM = "quant/vllm_plugin/"


def module_of(file: Path) -> str:
    """The name by which a file is imported."""
    parts = file.with_suffix("").parts
    return ".".join(parts if parts[0] == "quant" else ("quant", *parts)).removesuffix(".__init__")


def loads_an_optional_package(file: Path) -> bool:
    return file.name.startswith(("portable_", "sm90_")) or file.as_posix() in MAY_LOAD


def imports(file: Path) -> set[str]:
    """Modules that a file imports anywhere, of ours and of others."""
    names: set[str] = set()
    tree = ast.parse((ROOT / file).read_text())
    for_types = {
        node
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno} is relative; rooms are imported by their full name"
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, if there is any."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_between_files() -> None:
    ours = {module_of(file): file for file in FILES}
    assert circle({name: (imports(file) & ours.keys()) - {name} for name, file in ours.items()}) == []


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []


@pytest.mark.parametrize("file", [file for file in FILES if file.parts[0] == "formats"], ids=str)
def test_formats_import_torch_and_numpy_alone(file: Path) -> None:
    assert {name.partition(".")[0] for name in imports(file)} <= FORMATS_MAY_IMPORT


def test_modules_load_with_the_core_alone() -> None:
    """Every module is imported in a process in which an optional package cannot be imported."""
    modules = [
        module_of(file)
        for file in FILES
        if not loads_an_optional_package(file) and MAY_LOAD_VLLM not in file.as_posix() and file.stem != "__main__"
    ]
    program = f"""
import importlib, sys
import torch, numpy, safetensors.torch, click, rich.console, rich.table, rich.progress
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # importing one of them is an error
for name in {modules!r}:
    importlib.import_module(name)
print(len({modules!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stderr == ""
    assert int(done.stdout) == len(modules)


OPTIONAL = (
    "accelerate", "compressed_tensors", "datasets", "diffusers", "gguf", "lightning", "lm_eval", "modelopt", "onnx",
    "onnx_ir", "onnxruntime", "onnxruntime_genai", "onnxscript", "optuna", "peft", "PIL", "pydantic", "scipy",
    "soundfile", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "torchao", "torchaudio", "transformer_engine",
    "transformers", "triton", "vllm",
)  # fmt: skip


def test_rooms_are_namespace_packages() -> None:
    assert [file.as_posix() for file in FILES if file.name == "__init__.py"] == ["quant/__init__.py"]


def test_links_lead_to_the_rooms() -> None:
    for room in ROOMS:
        assert (ROOT / "quant" / room).readlink() == Path("..") / room


def test_every_folder_is_packaged() -> None:
    """A folder that pyproject.toml does not list is missing in the wheel."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = text.partition("\npackages = [")[2].partition("]")[0]
    assert {f'"{module_of(file.parent / "__init__.py")}"' for file in FILES} == set(listed.replace(",", "").split())
