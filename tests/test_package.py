"""A user's wheel holds every room under `quant`, imports without the repository, and loads lazily."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from samples import ROOT

ROOMS = ("formats", "kernels", "recipes", "calibration", "export")
LICENSES = ("LICENSE", "quant/report/vendor/LICENSES.txt")


def source_files() -> set[str]:
    """The files of the rooms and of quant, as the wheel names them; the links quant/<room> lead to the rooms."""
    files = {room: (f for f in (ROOT / room).rglob("*") if f.is_file()) for room in (*ROOMS, "quant")}
    found = {f"quant/{f.relative_to(ROOT).as_posix()}" for room in ROOMS for f in files[room]}
    own = [f.relative_to(ROOT / "quant") for f in files["quant"]]
    found |= {f"quant/{f.as_posix()}" for f in own if f.parts[0] not in ROOMS}
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that building leaves nothing in the repository."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("quant", *ROOMS):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "PYPI.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def build_wheel(source: Path, out: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--no-build-isolation", "--wheel-dir", out, source], check=True)
    (wheel,) = out.glob("blockscale-*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run_installed(installed: Path, code: str) -> str:
    """Output of `code` where the wheel is on the path and the repository is not, however it was installed.

    `-S` keeps site from running, and with it the .pth file of an editable install; the packages that the wheel
    depends on are put back by hand.
    """
    packages = [str(installed)] + [p for p in sys.path if p.endswith("-packages")]
    code = f"import sys; sys.path[:] = {packages[:1]!r} + sys.path + {packages[1:]!r}\n{code}"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=installed).stdout


def test_wheel_holds_every_room_and_nothing_else(wheel: Path) -> None:
    names = [n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n]
    assert len(names) == len(set(names))
    assert set(names) == source_files()
    assert {"quant/py.typed", "quant/__init__.pyi", "quant/kernels/linear/tuned/h200.json"} <= set(names)
    assert {n.split("/")[0] for n in names} == {"quant"}


def test_every_room_has_modules_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {r for r in ROOMS if any(n.startswith(f"quant/{r}/") and n.endswith(".py") for n in names)} == set(ROOMS)


def test_wheel_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        (folder,) = {n.split("/")[0] for n in z.namelist() if ".dist-info/" in n}
        metadata = Parser().parsestr(z.read(f"{folder}/METADATA").decode())
        scripts = z.read(f"{folder}/entry_points.txt").decode().split("\n")
        licenses = [z.read(f"{folder}/licenses/{name}").decode() for name in LICENSES]
    core = {r.split(">")[0] for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    assert core == {"torch", "numpy", "safetensors", "click", "rich", "jinja2"}
    assert metadata["License-Expression"] == "Apache-2.0 AND ISC AND BSD-3-Clause AND MIT"
    assert licenses == [(ROOT / name).read_text() for name in LICENSES]
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)", metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata.get_payload().startswith("# Blockscale")
    assert all("".join(link).startswith("https://") for link in links), "an index has no files beside its page"
    assert {"quantize = quant.__main__:quantize", "quant = quant.__main__:quant"} <= set(scripts)


def test_sdist_builds_the_same_wheel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True, cwd=tree)
    (sdist,) = tmp_path.glob("blockscale-*.tar.gz")
    with tarfile.open(sdist) as tar:
        tar.extractall(tmp_path, filter="data")
    (source,) = (p for p in tmp_path.iterdir() if p.is_dir())
    rebuilt = build_wheel(source, tmp_path)
    assert contents(rebuilt) == contents(wheel)


def contents(wheel: Path) -> dict[str, int]:
    return {i.filename: i.CRC for i in zipfile.ZipFile(wheel).infolist() if not i.filename.endswith("/RECORD")}


def test_the_wheel_works_without_the_repository(installed: Path) -> None:
    code = """
import json, torch
from quant.formats import format, rounding
values = torch.tensor([0.25, 0.75, 2.5, 5.0, -9.0])
print(json.dumps([format.__file__, rounding.round_to(values, format.E2M1).tolist()]))
"""
    file, rounded = json.loads(run_installed(installed, code))
    assert Path(file) == installed / "quant/formats/format.py"
    assert rounded == [0.0, 1.0, 2.0, 4.0, -6.0]


def test_the_page_is_made_without_the_repository(installed: Path) -> None:
    code = """
import tempfile
from quant.report.report import Report
with tempfile.TemporaryDirectory() as folder:
    Report("a <model>", [], 0, 0, 16.0).to_html(f"{folder}/page.html")
    print(open(f"{folder}/page.html", encoding="utf-8").read())
"""
    html = run_installed(installed, code)
    assert "<h1>a &lt;model&gt;</h1>" in html
    for name in ("report.css", "report.js", "vendor/d3.min.js", "vendor/plot.umd.min.js"):
        assert (ROOT / "quant/report" / name).read_text() in html


@pytest.mark.parametrize("link", ["a text file", "nothing"])
def test_a_checkout_without_links_says_what_to_do(link: str, tree: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(tree, checkout, symlinks=True)
    path = checkout / "quant" / "formats"
    path.unlink()
    if link == "a text file":
        path.write_text("../formats")
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(checkout)!r}); import quant"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("ImportError: ")]
    assert f"{path} is not the link to ../formats" in line
    assert "git config core.symlinks true" in line and "pip install ." in line


def test_import_quant_loads_nothing_heavy(installed: Path) -> None:
    code = "import json, quant; print(json.dumps([quant.__file__, quant.__version__, sorted(sys.modules)]))"
    file, version, modules = json.loads(run_installed(installed, code))
    assert Path(file) == installed / "quant/__init__.py"
    (metadata,) = installed.glob("blockscale-*.dist-info/METADATA")
    assert version == Parser().parsestr(metadata.read_text())["Version"]
    heavy = {"torch", "numpy", "transformers", "safetensors", "click", "rich", "jinja2", "triton", "onnx"}
    assert heavy.isdisjoint(modules)
