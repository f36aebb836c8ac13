"""vLLM's Python files are enough for these tests: its compiled library, if missing, is an empty module here."""

import sys
from importlib.util import find_spec
from types import ModuleType

import pytest


@pytest.fixture(autouse=True)
def without_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm._C_stable_libtorch"
    if find_spec("vllm") is not None and find_spec(name) is None:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
