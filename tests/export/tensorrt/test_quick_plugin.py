"""The quick-deployable plugin of full TensorRT, registered with NVIDIA's own package `tensorrt.plugin`.

The Python bindings are a small wheel (`tensorrt_cu13_bindings`); empty libraries stand in for TensorRT's gigabytes. The
package reads our functions as it does where TensorRT is installed: names, order, types and return annotations. Only the
registry, which is in the libraries, and expressions of dimensions have to be stood in for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "data"))
from make_tensorrt_signatures import stubs

REGISTER = """
import json
import tensorrt as trt
import tensorrt.plugin as trtp
from tensorrt.plugin._lib import QDP_REGISTRY
from tensorrt.plugin._tensor import SymIntExpr
from quant.export.tensorrt import plugin
from quant.export.tensorrt.plugin import Attributes, compile_attention
from quant.kernels.attention.attention_operands import tiles_for

class Registry:
    def __init__(self):
        self.creators = {}
    def register_creator(self, creator, namespace):
        self.creators[creator.name] = creator
        return True
    def get_creator(self, name, version, namespace):
        return self.creators[name]

class Number:
    def __init__(self, value):
        self.value = value
    def is_constant(self):
        return True
    def get_constant_value(self):
        return self.value

class Expressions:
    def constant(self, value):
        return Number(value)
    def operation(self, op, a, b):
        assert op == trt.DimensionOperation.CEIL_DIV
        return Number(-(-a.value // b.value))

class Desc:
    def __init__(self, shape, dtype):
        self.shape_expr, self.dtype = [trtp.ShapeExpr(size) for size in shape], dtype
    def like(self):
        return Desc((), self.dtype)

registry = Registry()
trt.get_plugin_registry = lambda: registry
SymIntExpr._exprBuilder, trt.IDimensionExpr = Expressions(), Number
plugin.register_quick(trt, trtp, 90)
(name, definition), = QDP_REGISTRY.items()
shapes = ((2, 8, 300, 128), (2, 2, 500, 128), (2, 2, 500, 128))
inputs = [*(Desc(shape, trt.fp8) for shape in shapes), Desc((3,), trt.float32)]
output = definition.register_func(*inputs, 1, 0.0, 10)
combination, = definition.autotune_func(*inputs, 1, 0.0, 16, (output,))
entry, ptx, params, extra = definition.aot_impl_func(*inputs, 1, 0.0, 10, (output,), 0)
number = lambda symbol: symbol if isinstance(symbol, int) else symbol._int_expr.value
compiled = compile_attention(128, Attributes(1, 0.0, 10), 90)
print(json.dumps({
    "name": name,
    "inputs": definition.input_tensor_names,
    "attributes": definition.aot_impl_attr_names,
    "output": str(output.dtype),
    "types": combination.io_types,
    "layouts": combination.layouts,
    "same": (entry, ptx) == (compiled.name, compiled.ptx),
    "tiles": -(-300 // tiles_for(128, 90).block_q),
    "grid": [number(x) for x in (params.grid_x, params.grid_y, params.grid_z)],
    "block": [number(params.block_x) == 32 * compiled.num_warps, number(params.shared_mem) == compiled.shared],
    "extra": len(extra),
}))
"""


def test_tensorrts_own_package_takes_the_plugin(tmp_path: Path) -> None:
    spec = find_spec("tensorrt_bindings")
    if spec is None or shutil.which("cc") is None:
        pytest.skip("needs the package tensorrt_cu13_bindings and a C compiler")
    pytest.importorskip("triton", reason="compiles the plugin's kernel")
    folder = Path(str(next(iter(spec.submodule_search_locations or ()))))
    # The bindings' package calls itself `tensorrt`; a link of that name is all that the full package adds.
    (tmp_path / "tensorrt").symlink_to(folder)
    stubs(tmp_path, "11")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", REGISTER], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    registered = json.loads(done.stdout.splitlines()[-1])
    assert registered.pop("grid") == [registered.pop("tiles"), 8, 2]
    assert registered == {
        "name": "quant::QuantFp8Attention",
        "inputs": ["q", "k", "v", "scales"],
        "attributes": ["causal", "softmax_scale", "output_type"],
        "output": "DataType.HALF",
        "types": ["FP8", "FP8", "FP8", "FP32", "BF16"],
        "layouts": ["LINEAR"] * 5,
        "same": True,
        "block": [True, True],
        "extra": 4,
    }
