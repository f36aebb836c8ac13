"""Layers read from headers are those of the model that is built."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from samples import BASE

from quant.base.errors import UserError
from quant.models.open_model import open_model
from quant.models.startup import stored_layers
from quant.recipes.layers import find_layers
from quant.recipes.plan import Plan
from quant.recipes.plan_check import validate
from quant.recipes.targets import get_target

gguf = pytest.importorskip("gguf", reason="comes with the extra [dev]")


def test_headers_settle_a_plan_in_no_time(golden: Plan) -> None:
    started = time.perf_counter()
    layers = stored_layers(str(BASE), golden)
    assert validate(golden, layers, get_target("vllm")) == []
    assert time.perf_counter() - started < 1


def test_headers_and_the_built_model_agree(golden: Plan) -> None:
    fast = stored_layers(str(BASE), golden)
    built = find_layers(open_model(BASE, meta=True).model)
    assert [(m.name, m.shape) for m in fast] == [(m.name, m.shape) for m in built]


def test_headers_do_not_settle_a_plan_of_another_model(golden: Plan) -> None:
    renamed = replace(golden, layers=tuple(replace(m, name=f"x.{m.name}", tied_to=None) for m in golden.layers))
    assert stored_layers(str(BASE), renamed) is None
    found = validate(renamed, open_model(BASE, meta=True).layers)
    assert {p.where for p in found if p.what == "is not in the model"} == set(renamed.by_name)
    assert {p.where for p in found if "not in the plan" in p.what} == set(golden.by_name)


def gguf_of(golden: Plan, path: Path, blocks: int = 2) -> None:
    """A GGUF file as another library writes it: metadata of every kind, and the golden model's shapes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(blocks)
    writer.add_context_length(64)
    writer.add_bool("some.flag", True)
    writer.add_float32("some.float", 0.5)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "ä" * 40])
    writer.add_array("tokenizer.ggml.scores", [0.0, 1.0, 2.0])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks)
    for layer in golden.layers:
        if layer.tied_to is None:
            writer.add_tensor(f"{names.get_name(layer.name)}.weight", np.zeros(layer.shape, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_header_gives_shapes_by_the_models_names(golden: Plan, tmp_path: Path) -> None:
    gguf_of(golden, tmp_path / "m.gguf")
    layers = stored_layers(str(tmp_path / "m.gguf"), golden)
    assert [(m.name, m.shape) for m in layers] == [(m.name, m.shape) for m in golden.layers]


def test_damaged_gguf_headers_go_to_the_loader(golden: Plan, tmp_path: Path) -> None:
    gguf_of(golden, tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:200])
    assert stored_layers(str(tmp_path / "m.gguf"), golden) is None
    with pytest.raises(UserError, match=r"m\.gguf: a truncated or damaged GGUF file"):
        open_model(tmp_path / "m.gguf", meta=True)
