"""Every call of the build process fits the declarations of TensorRT 10.16, 11.0 and 11.4.

The declarations were read from NVIDIA's Python bindings (`tests/data/make_tensorrt_signatures.py`). Here they become a
module whose classes know exactly the declared members and take exactly the declared arguments, and `worker.build` runs
on it: what it calls, sets or overrides and what no release has raises.
"""

from __future__ import annotations

import enum
import inspect
import io
import json
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest

from quant.export.tensorrt import worker

DECLARED = json.loads((Path(__file__).parents[2] / "data" / "tensorrt_signatures.json").read_text())
SIMPLE = {"bool": True, "int": 1, "str": "text", "None": None}


def signature_of(text: str) -> tuple[inspect.Signature, str]:
    """A signature that pybind11 wrote, `parse(self: OnnxParser, model: Buffer, path: str = None) -> bool`."""
    inside, _, returned = text[text.index("(") + 1 :].rpartition(") -> ")
    parameters = []
    # Commas inside of brackets belong to a type.
    for part in re.split(r", (?![^\[]*\])", inside):
        name, _, rest = part.partition(":")
        # A default with commas of its own ends in pieces without a name.
        if name.strip().isidentifier():
            default = None if " = " in rest else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name.strip(), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters), returned


def declared_class(trt: Any, name: str, members: dict[str, str], calls: list[str]) -> type:
    """A class with these members, whose methods check their arguments and return what is declared."""

    def method(key: str, text: str) -> Any:
        signature, returned = signature_of(text)

        def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
            signature.bind(self, *arguments, **keywords)
            calls.append(f"{name}.{key}")
            if key == "build_serialized_network_to_stream":
                return arguments[2].write(b"engine") == len(b"engine")
            if returned in SIMPLE:
                return SIMPLE[returned]
            made = getattr(trt, returned, None)
            # Host memory is read as a buffer.
            return made.__new__(made) if isinstance(made, type) and returned != "IHostMemory" else b"data"

        return call

    def set_member(self: Any, key: str, value: Any) -> None:
        assert type(self).__name__ != name or members.get(key) == "property", f"{name}.{key} cannot be set"
        calls.append(f"{name}.{key} =")
        object.__setattr__(self, key, value)

    def get_member(self: Any, key: str) -> Any:
        assert "property" in members.get(key, ""), f"{name} has no member {key}"
        return 1

    def check_overrides(cls: type, **options: Any) -> None:
        for key, value in vars(cls).items():
            if callable(value) and key in members and not key.startswith("_"):
                given = len(inspect.signature(value).parameters)
                expected = len(signature_of(members[key])[0].parameters)
                # `IStreamWriter.write` gets one bytes object, whatever its docstring declares.
                assert given == (2 if (name, key) == ("IStreamWriter", "write") else expected), f"{name}.{key}"

    methods = {key: method(key, text) for key, text in members.items() if "(" in text and key != "__init__"}
    if members.get("__init__"):
        check = method("__init__", members["__init__"])
        methods["__init__"] = lambda self, *arguments: check(self, *arguments) and None
    special = {"__setattr__": set_member, "__getattr__": get_member, "__init_subclass__": classmethod(check_overrides)}
    return type(name, (), {**methods, **special})


@pytest.fixture(params=DECLARED)
def release(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """A module `tensorrt` with the declarations of a release; the calls that it gets."""
    trt, calls = types.ModuleType("tensorrt"), []
    trt.__version__ = request.param
    for name, members in DECLARED[request.param]["enums"].items():
        setattr(trt, name, enum.IntEnum(name, {member: index for index, member in enumerate(members)}))
    for name, members in DECLARED[request.param]["classes"].items():
        setattr(trt, name, declared_class(trt, name, members, calls))
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    return request.param, calls


def test_the_build_process_calls_what_tensorrt_declares(tmp_path: Path, release: tuple[str, list[str]]) -> None:
    version, calls = release
    (tmp_path / "graph.onnx").touch()
    request = {
        "backend": "tensorrt", "graph": str(tmp_path / "graph.onnx"), "model": str(tmp_path / "graph.onnx"),
        "engine": str(tmp_path / "engine"), "compute_capabilities": ["SM90"], "plugins": [], "record": "{}",
        "flags": ["REFIT", "WEIGHT_STREAMING", "VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME"],
        "profiles": [{"x": ((1, 8), (2, 8), (4, 8))}],
    }  # fmt: skip
    assert worker.build(request, io.StringIO())["version"] == version
    assert (tmp_path / "engine").read_bytes() == b"engine"
    assert set(calls) >= {
        "Builder.create_network", "Builder.build_serialized_network_to_stream", "OnnxParser.parse",
        "IOptimizationProfile.set_shape", "IBuilderConfig.set_flag",
        "IBuilderConfig.progress_monitor =", "INetworkDefinition.name =",
    }  # fmt: skip


def test_the_documented_refit_calls_what_tensorrt_declares(
    tmp_path: Path, release: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trt, calls = sys.modules["tensorrt"], release[1]
    page = (Path(__file__).parents[3] / "docs" / "engine-audit.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"\n\n((?:    .*\n)*    refitter = .*\n(?:    .*\n)*)", page)
    monkeypatch.chdir(tmp_path)
    engine, logger = (trt.__dict__[name].__new__(trt.__dict__[name]) for name in ("ICudaEngine", "ILogger"))
    exec(textwrap.dedent(lines), {"trt": trt, "Path": Path, "engine": engine, "logger": logger})
    assert (tmp_path / "new.engine").read_bytes() == b"data"
    assert set(calls) >= {"OnnxParserRefitter.refit_from_file", "Refitter.refit_cuda_engine", "ICudaEngine.serialize"}


def test_a_call_that_no_release_has_is_found(release: tuple[str, list[str]]) -> None:
    """The stand-in is as strict as the bindings."""
    builder = sys.modules["tensorrt"].Builder.__new__(sys.modules["tensorrt"].Builder)
    with pytest.raises(TypeError, match="too many positional arguments"):
        builder.create_network(0, 1)
    with pytest.raises(AssertionError, match="Builder has no member fp16"):
        _ = builder.fp16
    with pytest.raises(AssertionError, match="logger cannot be set"):
        builder.logger = None
