"""The attention plugin is tested without a GPU: its shapes, types, fields and launch, and a real engine of it.

Full TensorRT is replaced by a stand-in that records what is registered and evaluates dimensions on numbers. Against
TensorRT-RTX, which builds engines without a GPU, a graph with the plugin becomes an engine that holds our PTX.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from quant.export.tensorrt import plugin
from quant.export.tensorrt.plugin import (
    Attributes,
    check_shapes,
    compile_attention,
    integer_arguments,
    launch_grid,
)
from quant.kernels.attention.attention_operands import HEAD_DIMS, tiles_for

pytest.importorskip("triton", reason="the [dev] extra installs triton on Linux")

Q, KV, SCALES = (2, 8, 300, 128), (2, 2, 500, 128), (3,)


def test_grid_covers_every_query_once() -> None:
    """By brute force over the blocks of every head dimension and length."""
    for dim in HEAD_DIMS:
        for arch in (89, 90, 100, 120):
            tiles = tiles_for(dim, arch)
            for seq in (1, tiles.block_q - 1, tiles.block_q, tiles.block_q + 1, 1000):
                x, y, z = launch_grid((2, 8, seq, dim), tiles, lambda a, b: math.ceil(a / b))
                rows = [row for block in range(x) for row in range(block * tiles.block_q, (block + 1) * tiles.block_q)]
                assert [row for row in rows if row < seq] == list(range(seq))
                assert (x - 1) * tiles.block_q < seq and (y, z) == (8, 2)


def test_integers_are_what_the_kernel_calls_them() -> None:
    names = [name for name, kind in compile_attention(128, Attributes(), 90).arguments if kind == "i32"]
    assert dict(zip(names, integer_arguments(Q, KV), strict=True)) == {
        "heads": 8,
        "kv_heads": 2,
        "seq_q": 300,
        "seq_kv": 500,
    }


def test_shapes_that_fit() -> None:
    assert check_shapes([Q, KV, KV, SCALES]) == 128
    unknown = (None, 8, -1, 64)
    assert check_shapes([unknown, (None, 2, None, 64), (None, 2, None, 64), SCALES]) == 64
    assert check_shapes([(1, 4, None, None), (1, 4, None, 256), (1, 4, None, 256), (None,)]) == 256


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([Q, (2, 3, 500, 128), (2, 3, 500, 128), SCALES], "3 KV heads do not divide 8 heads"),
        ([Q, KV, (2, 2, 400, 128), SCALES], "k and v in everything"),
        ([Q, (3, 2, 500, 128), (3, 2, 500, 128), SCALES], "batch and dim must agree"),
        (
            [(2, 8, 300, 96), (2, 2, 5, 96), (2, 2, 5, 96), SCALES],
            "must be known, one of 64, 128, 256. Use attention=",
        ),
        ([(2, 8, 300, None), (2, 2, 5, -1), (2, 2, 5, None), SCALES], r"q \[2, 8, 300, '\?'\]"),
        ([Q, KV, KV, (1,)], r"scales \[3\]"),
        ([(8, 300, 128), KV, KV, SCALES], r"expected q, k, v \[batch, heads, seq, dim\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes: list[tuple[int | None, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=f"layer.3.attention: .*{message}"):
        check_shapes(shapes, "layer.3.attention")


@pytest.mark.parametrize("attributes", [Attributes(), Attributes(1, 0.0721, 10)])
def test_fields_round_trip(attributes: Attributes) -> None:
    """As one-element arrays, as scalars, and as the doubles and longs that full TensorRT makes of them."""
    given = attributes.to_fields()
    assert {name: array.dtype.name for name, array in given.items()} == {
        "causal": "int32",
        "softmax_scale": "float32",
        "output_type": "int32",
    }
    for found in (given, {n: a.astype(np.float64) for n, a in given.items()}, {n: a[0] for n, a in given.items()}):
        again = Attributes.from_fields(found | {"ptx_90": np.zeros(3)})
        assert (again.causal, again.output_type) == (attributes.causal, attributes.output_type)
        assert again.softmax_scale == pytest.approx(attributes.softmax_scale, rel=1e-7)
    assert Attributes.from_fields({}) == Attributes()


def test_the_scale_is_in_the_kernel() -> None:
    """softmax_scale 0 stands for 1/√dim; another scale is another kernel."""
    default, same = compile_attention(64, Attributes(), 90), compile_attention(64, Attributes(softmax_scale=0.125), 90)
    assert default.ptx == same.ptx
    assert compile_attention(64, Attributes(softmax_scale=0.25), 90).ptx != default.ptx
    bits = np.float32(math.log2(math.e) / 8).view(np.uint32)
    assert f"0f{bits:08X}" in default.ptx.upper().replace("0F", "0f")


def test_full_tensorrt_builds_for_one_gpu() -> None:
    with pytest.raises(ValueError, match=r"full TensorRT builds for the GPU it runs on, not for \[90, 100\]"):
        plugin.register(SimpleNamespace(__name__="tensorrt"), [90, 100])


BUILD = """
import json, sys
import onnx
import tensorrt_rtx as trt
from onnx import TensorProto as T, helper as h
from quant.export.tensorrt import plugin

plugin.register(trt, [89, 120])
bf16, dim = T.BFLOAT16, 64
nodes = [h.make_node("QuantizeLinear", [n, "one", "zero"], [n + "8"]) for n in "qkv"]
known = dict(domain="quant", plugin_version="1", plugin_namespace="quant", name="attention")
nodes.append(h.make_node("QuantFp8Attention", ["q8", "k8", "v8", "scales"], ["y"], **known, causal=1, output_type=16))
constants = [
    h.make_tensor("one", bf16, [], [1.0]),
    h.make_tensor("zero", T.FLOAT8E4M3FN, [], b"\\0", raw=True),
    h.make_tensor("scales", T.FLOAT, [3], [1.0, 1.0, 1.0]),
]
heads = {"q": 4, "k": 2, "v": 2}
inputs = [h.make_tensor_value_info(n, bf16, ["batch", count, "seq", dim]) for n, count in heads.items()]
output = h.make_tensor_value_info("y", bf16, ["batch", 4, "seq", dim])
graph = h.make_graph(nodes, "g", inputs, [output], constants)
model = h.make_model(graph, opset_imports=[h.make_opsetid("", 23), h.make_opsetid("quant", 1)], ir_version=11)
builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
network = builder.create_network(0)
parser = trt.OnnxParser(network, trt.Logger(trt.Logger.ERROR))
assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
config, profile = builder.create_builder_config(), builder.create_optimization_profile()
for name, count in heads.items():
    profile.set_shape(name, (1, count, 1, dim), (1, count, 128, dim), (2, count, 512, dim))
config.add_optimization_profile(profile)
config.num_compute_capabilities = 2
config.set_compute_capability(trt.ComputeCapability.SM89, 0)
config.set_compute_capability(trt.ComputeCapability.SM120, 1)
engine = bytes(builder.build_serialized_network(network, config))
embedded = {a: plugin.compile_attention(dim, plugin.Attributes(causal=1), a).ptx.encode() in engine for a in (89, 120)}
print(json.dumps([str(network.get_output(0).shape), embedded, sys.argv[0]]))
"""


def test_rtx_engine_holds_the_ptx(tmp_path: Path) -> None:
    """The parser finds the plugin, TensorRT-RTX asks it everything it wants to know, and serializes its fields."""
    pytest.importorskip("onnx", reason="the [onnx] extra")
    libraries = pytest.importorskip("tensorrt_rtx_libs", reason="the [tensorrt-rtx] extra")
    # The ONNX parser looks for the library under a name that the wheel does not have.
    folder = Path(next(iter(libraries.__path__)))
    (tmp_path / "libtensorrt_rtx.so").symlink_to(folder / "libtensorrt_rtx.so.1")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", BUILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    shape, embedded, _ = json.loads(done.stdout.splitlines()[-1])
    assert shape == "(-1, 4, -1, 64)"
    assert embedded == {"89": True, "120": True}
