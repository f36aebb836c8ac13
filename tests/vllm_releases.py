"""Runs the tests of the vLLM plug-in against the Python files of vLLM's releases; no GPU is needed.

    python tests/vllm_releases.py                     the releases below
    python tests/vllm_releases.py 0.33.0 -- -k cache  another one, and arguments of pytest

A wheel is downloaded once and only its Python files are kept, in `.vllm/VERSION`. vLLM imports further packages at its
start; those that it really uses are installed without their dependencies into `.vllm/packages`, and the others, which
serve structured output and tool servers, are empty modules.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".vllm"
RELEASES = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.33.0")
PACKAGES = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-doc", "annotated-types", "anyio", "attrs", "blake3",
    "cachetools", "cbor2", "cloudpickle", "compressed-tensors==0.17.0", "distro", "einops", "fastapi==0.136.3",
    "frozenlist", "h11", "httpcore", "httpx", "jiter", "loguru", "msgspec", "multidict", "openai==2.54.0",
    "openai-harmony==0.0.8", "partial-json-parser",
    "prometheus-client", "propcache", "py-cpuinfo", "pybase64", "pydantic==2.14.3",
    "pydantic-core==2.50.4", "pyzmq", "sniffio", "starlette==1.10.0", "tabulate", "typing-inspection", "yarl",
)  # fmt: skip
# At the end of the path, so that a package that is installed goes first.
STUBS = """
import importlib.abc, importlib.machinery, sys, types

class Stub(types.ModuleType):
    __path__ = []
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **named: None})

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("anthropic", "llguidance", "mcp", "uvloop", "xgrammar"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return Stub(spec.name)
    def exec_module(self, module):
        pass

sys.meta_path.append(Finder())
"""


def unpack(version: str) -> Path:
    """The folder with vLLM's Python files."""
    target = FOLDER / version
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        pip("download", "--no-deps", "--only-binary=:all:", "-d", folder, f"vllm=={version}")
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.endswith((".py", "METADATA"))]
            # Renamed when it is complete: an interrupted run leaves no half release.
            files.extractall(FOLDER / f"{version}.part", names)
    (FOLDER / f"{version}.part").rename(target)
    return target


def packages() -> tuple[Path, Path]:
    """The folders with the packages that vLLM imports, and with the stand-ins for others."""
    target, stubs = FOLDER / "packages", FOLDER / "stubs"
    if not target.exists():
        pip("install", "--no-deps", "--no-compile", "--target", str(FOLDER / "packages.part"), *PACKAGES)
        (FOLDER / "packages.part").rename(target)
    stubs.mkdir(exist_ok=True)
    (stubs / "sitecustomize.py").write_text(STUBS)
    return target, stubs


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet"], check=True)


def main() -> None:
    words = sys.argv[1:]
    options = words[words.index("--") + 1 :] if "--" in words else []
    versions = words[: words.index("--")] if "--" in words else words
    FOLDER.mkdir(exist_ok=True)
    failed = []
    for version in versions or RELEASES:
        print(f"vLLM {version}", flush=True)
        paths = [ROOT, unpack(version), *packages()]
        environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "VLLM_NO_USAGE_STATS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests/quant/vllm_plugin"), *options]
        if subprocess.run(command, env=environment, cwd=ROOT).returncode:
            failed.append(version)
    if failed:
        raise SystemExit(f"failed against vLLM {', '.join(failed)}")


if __name__ == "__main__":
    main()
