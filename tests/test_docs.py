"""The documents for people name files, functions and rooms that exist."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest
from samples import ROOT
from test_layering import FILES, ROOMS

import quant
from quant.formats.format import FORMATS

DOCUMENTS = [*(ROOT / name for name in ("README.md", "PYPI.md", "CONTRIBUTING.md", "examples/README.md"))]
DOCUMENTS += sorted((ROOT / "docs").glob("*.md"))
# A path with a folder, and perhaps a function or method of it: `kernels/base/weight_layout.py:prepack`.
PLACE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.\w+)(?::([\w.]+))?`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
# Names of files and modules in comments and docstrings: `kernels/base/weight_layout.py`,
# `calibration.sensitivity.scores`.
FOLDERS = "|".join((*ROOMS, "quant", "tests", "benchmarks", "docs"))
FILE = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w/]*\w\.(?:py|toml|md))\b")
MODULE = re.compile(rf"`(?:quant\.)?((?:{'|'.join(ROOMS)})(?:\.\w+)+)`")


def definitions(file: Path) -> set[str]:
    """Functions, classes and `Class.method` of a file, methods of base classes in the same file included."""
    tree = ast.parse(file.read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def methods(name: str) -> set[str]:
        own = {node.name for node in classes[name].body if isinstance(node, functions)}
        bases = [base.id for base in classes[name].bases if isinstance(base, ast.Name) and base.id in classes]
        return own.union(*(methods(base) for base in bases))

    found = {node.name for node in tree.body if isinstance(node, functions)} | classes.keys()
    return found | {f"{name}.{method}" for name in classes for method in methods(name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_place_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    for path, name in PLACE.findall(text):
        file = ROOT / path
        # Results of commands, and names with a word to fill in.
        if path.startswith("out/") or re.search(r"\b[A-Z]{3,}\b", Path(path).stem):
            continue
        if not file.is_file() or (name and name not in definitions(file)):
            missing.append(f"{path}:{name}" if name else path)
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_releases_of_vllm_are_named_on_its_own_pages(document: Path) -> None:
    """Elsewhere a reader meets one release, the newest that was run, or a link to the sentence that has them all."""
    newest = re.findall(r"The plug-in runs in vLLM 0\.\d+ to (0\.\d+)", (ROOT / "docs" / "vllm.md").read_text())
    assert len(newest) == 1
    if not document.name.startswith("vllm"):
        assert set(re.findall(r"(?:vLLM|Version) (0\.\d\d)\b", document.read_text())) <= set(newest)


def test_the_way_of_a_weight_has_at_most_twelve_stops() -> None:
    text = (ROOT / "docs" / "way-of-a-weight.md").read_text()
    stops = re.findall(r"^(\d+)\. `([\w/]+\.py):", text, re.MULTILINE)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1)) and 8 <= len(stops) <= 12


def test_the_map_of_rooms_names_every_folder() -> None:
    """A row names one or more folders; the folders below them are part of the room."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Rooms")[2].partition("## Where")[0]
    rooms = {
        name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`([\w/]+)`", row)
    }
    folders = {file.parent for file in FILES} - {Path("quant"), Path("export")}
    assert [room for room in rooms if Path(room) not in folders and not (ROOT / room).is_dir()] == []
    assert [folder for folder in folders if not rooms & {folder.as_posix(), *map(Path.as_posix, folder.parents)}] == []


@pytest.mark.parametrize("room", [*ROOMS, "quant", "tests", "benchmarks"])
def test_every_file_and_module_that_the_code_names_is_there(room: str) -> None:
    """Names in comments and docstrings outlive the files that they name; test_layering.py invents some."""
    missing = []
    for source in (ROOT / room).rglob("*.py"):
        if any(part.is_symlink() for part in source.parents) or source.name == "test_layering.py":
            continue
        text = source.read_text()
        gone = {name for name in FILE.findall(text) if not (ROOT / name).exists()}
        gone |= {name for name in MODULE.findall(text) if not is_there(name)}
        missing += [f"{source.relative_to(ROOT)}: {name}" for name in sorted(gone)]
    assert missing == []


def is_there(name: str) -> bool:
    """Whether `calibration.sensitivity.scores`, or a definition of a file as its last part, exists."""
    *parents, last = name.split(".")
    path, parent = ROOT.joinpath(*parents, last), ROOT.joinpath(*parents).with_suffix(".py")
    return path.is_dir() or path.with_suffix(".py").is_file() or (parent.is_file() and last in parent.read_text())


def test_the_api_reference_has_every_public_name_at_its_module() -> None:
    listed = re.findall(r"^::: ([\w.]+)\.(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted((name, f"quant.{module}") for module, name in listed) == sorted(quant._HOME.items())


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_tables_and_figures_are_those_of_the_measured_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import format_figures
    import result_tables

    generated = ["README.md", "docs/benchmarks.md", "docs/benchmarks-training.md", "docs/figures/results.svg"]
    for name in generated:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    result_tables.main(tmp_path)
    format_figures.main(tmp_path / "docs/figures/formats")
    generated += [f"docs/figures/formats/{name}.svg" for name in FORMATS]
    assert [name for name in generated if (tmp_path / name).read_bytes() != (ROOT / name).read_bytes()] == []
    numerics = (ROOT / "docs/numerics.md").read_text()
    assert [name for name in FORMATS if f"figures/formats/{name}.svg" not in numerics] == []


def test_no_page_is_longer_than_a_reader_scrolls() -> None:
    lengths = {page.name: len(page.read_text().splitlines()) for page in (ROOT / "docs").glob("*.md")}
    assert {name: lines for name, lines in lengths.items() if lines > 420} == {}


def test_pages_of_the_site_link_inside_of_it() -> None:
    outside = [(page.name, link) for page in (ROOT / "docs").glob("*.md") for link in LINK.findall(page.read_text())
               if link.startswith("..")]  # fmt: skip
    assert outside == []
