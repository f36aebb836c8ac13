"""Writes tensorrt_signatures.json: what the Python bindings of full TensorRT declare of the classes that we call.

    pip download --no-deps -d WHEELS tensorrt_cu13_bindings==10.16.* tensorrt_cu13_bindings==11.0.* …
    python tests/data/make_tensorrt_signatures.py WHEELS

The bindings' wheels come without TensorRT's libraries, which are gigabytes. Empty libraries of their names let the
bindings be imported, and pybind11 writes every signature into a docstring. Nothing can be built with that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

OUT = Path(__file__).with_name("tensorrt_signatures.json")
CLASSES = (
    "Builder", "IBuilderConfig", "INetworkDefinition", "IOptimizationProfile", "ITimingCache", "IHostMemory", "ILogger",
    "IProgressMonitor", "IStreamWriter", "OnnxParser", "ParserError", "ICudaEngine", "Refitter",
    "OnnxParserRefitter",
)  # fmt: skip
ENUMS = ("BuilderFlag", "NetworkDefinitionCreationFlag", "ProfilingVerbosity", "TensorIOMode")
# What tensorrt.so asks of each library; all return null.
FUNCTIONS = {
    "nvinfer": (
        "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL",
        "getBuilderPluginRegistry", "getPluginRegistry",
    ),
    "nvonnxparser": ("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL"),
    "nvinfer_plugin": ("initLibNvInferPlugins",),
}  # fmt: skip
VERSIONS = {"nvinfer": "getInferLibVersion", "nvonnxparser": "getNvOnnxParserVersion"}
DUMP = """
import json, sys
import tensorrt_bindings.tensorrt as trt
classes = {}
for name in json.loads(sys.argv[1]):
    members = {}
    for key, value in vars(getattr(trt, name)).items():
        if isinstance(value, property):
            members[key] = "property" if value.fset else "read-only property"
        elif key.startswith("add_") and name == "INetworkDefinition":
            continue  # one method for each kind of layer: the parser calls them
        elif callable(value) and value.__doc__ and (not key.startswith("_") or key == "__init__"):
            lines = [line.strip() for line in value.__doc__.splitlines()]
            members[key] = next((line for line in lines if line.startswith(f"{key}(self") and "->" in line), "")
    classes[name] = members
enums = {name: sorted(getattr(trt, name).__members__) for name in json.loads(sys.argv[2])}
print(json.dumps({"classes": classes, "enums": enums}))
"""


def stubs(folder: Path, major: str) -> None:
    """Compiles the libraries that the bindings of a major version load."""
    for library, functions in FUNCTIONS.items():
        text = "".join(f"void* {name}() {{ return 0; }}\n" for name in functions)
        if library in VERSIONS:
            text += f"int {VERSIONS[library]}() {{ return {major}0000; }}\n"
        command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(folder / f"lib{library}.so.{major}")]
        subprocess.run(command, input=text, text=True, check=True)


def dump(wheel: Path) -> dict[str, object]:
    """The declarations in one wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        stubs(folder, wheel.name.split("-")[1].split(".")[0])
        environment = {**os.environ, "PYTHONPATH": name, "LD_LIBRARY_PATH": name}
        # The module alone: its package asks for the libraries' wheels.
        (folder / "tensorrt_bindings" / "__init__.py").write_text("")
        arguments = [json.dumps(CLASSES), json.dumps(ENUMS)]
        done = subprocess.run(
            [sys.executable, "-c", DUMP, *arguments], env=environment, capture_output=True, text=True, check=True
        )
    return json.loads(done.stdout.replace("tensorrt_bindings.tensorrt.", ""))


def main() -> None:
    """Reads the wheels in a folder."""
    wheels = {re.split("-", path.name)[1]: path for path in sorted(Path(sys.argv[1]).glob("*.whl"))}
    OUT.write_text(json.dumps({version: dump(path) for version, path in wheels.items()}, indent=1) + "\n")
    print(f"{OUT}: {', '.join(wheels)}")


if __name__ == "__main__":
    main()
