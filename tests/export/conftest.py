"""The fixtures write small ONNX graphs, node by node as the exporter does; TensorRT builds one in 0.1 s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WIDTH = 256


class Graphs:
    """Writes chains of linears, and one attention, with weights that need no model."""

    def __init__(self, folder: Path) -> None:
        import onnx
        from onnx import helper

        self.folder = folder
        self.onnx = onnx
        self.helper = helper
        self.types = onnx.TensorProto
        self.random = np.random.default_rng(0)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def chain(self, *kinds: str, dims: tuple[int | str, ...] = ("tokens",), name: str = "chain.onnx") -> Path:
        """Linears one after the other, with a ReLU between them: layer `i` is `layers.<i>`, of one of `kinds`."""
        self.nodes, self.constants = [], []
        x = "x"
        for index, kind in enumerate(kinds):
            x = self.linear(kind, f"layers.{index}", x)
            x = self.node("Relu", [x], f"relu{index}")
        self.nodes[-1].output[0] = "y"
        return self.save(name, {"x": (*dims, WIDTH)}, {"y": (*dims, WIDTH)})

    def attention(
        self,
        sequence: int | str = "sequence",
        *,
        keys: int | str | None = None,
        quantized: bool = True,
        plugin: bool = False,
        name: str = "att.onnx",
    ) -> Path:
        """Attention of 4 heads over 2 KV heads of 64, causal where keys and queries are of one sequence."""
        self.nodes, self.constants = [], []
        operands = ["q", "k", "v"]
        if plugin:
            for index, operand in enumerate(operands):
                codes = [operand, self.scalar(0.02)]
                operands[index] = self.node("QuantizeLinear", codes, f"{operand}/quantize", output_dtype=17)
            operands.append(self.raw(self.types.FLOAT, (3,), np.full(3, 0.02, np.float32)))
            known = {"domain": "quant", "plugin_version": "1", "plugin_namespace": "quant", "name": "attention"}
            attributes = {"causal": 1, "softmax_scale": 0.0, "output_type": self.types.FLOAT16}
            self.nodes.append(self.helper.make_node("QuantFp8Attention", operands, ["y"], **known, **attributes))
        elif quantized:
            for index, operand in enumerate(operands):
                scale = self.scalar(0.02)
                codes = self.node("QuantizeLinear", [operand, scale], f"{operand}/quantize", output_dtype=17)
                operands[index] = self.node("DequantizeLinear", [codes, scale], f"{operand}/dequantize")
            operands += ["", self.scalar(1 / 448)]
            options = {"domain": "trt", "normalization_quantize_to_type": 17}
        if not plugin:
            kind = "TRT_QuantizedAttention" if quantized else "Attention"
            self.node(kind, operands, "attention", is_causal=int(keys is None), **(options if quantized else {}))
            self.nodes[-1].output[0] = "y"
        shapes = {n: ("batch", 4 if n == "q" else 2, sequence if n == "q" else keys or sequence, 64) for n in "qkv"}
        return self.save(name, shapes, {"y": shapes["q"]})

    def linear(self, kind: str, layer: str, x: str) -> str:
        """One linear without a bias; its output."""
        half = self.types.FLOAT16
        shape = (WIDTH, WIDTH)
        if kind == "half":
            weight = self.raw(half, shape, self.random.normal(size=shape).astype(np.float16))
            return self.matmul(layer, x, weight)
        codes = self.random.integers(0, 100, shape).astype(np.uint8)
        if kind.startswith("nvfp4"):
            weight = self.fp4(layer, self.raw(self.types.FLOAT4E2M1, shape, codes[:, : WIDTH // 2]))
            if kind == "nvfp4":
                amax = self.scalar(0.02, self.types.FLOAT)
                quantize = {"domain": "trt", "axis": -1, "block_size": 16, "scale_type": 17}
                x4 = self.node("TRT_FP4DynamicQuantize", [x, amax], f"{layer}/quantize", outputs=2, **quantize)
                scales = self.node("DequantizeLinear", [f"{x4}.1", amax], f"{layer}/scales")
                wide = self.node("DequantizeLinear", [x4, scales], f"{layer}/input", axis=-1, block_size=16)
                x = self.node("Cast", [wide], f"{layer}/cast", to=half)
        else:
            element = {"fp8": self.types.FLOAT8E4M3FN, "int8": self.types.INT8, "int4": self.types.INT4}
            number = element[kind.partition("_")[0]]
            bits = 4 if number == self.types.INT4 else 8
            stored = self.raw(number, shape, codes[:, : WIDTH * bits // 8])
            if "block" in kind or bits == 4:
                scales = self.raw(half, (WIDTH, WIDTH // 64), np.full((WIDTH, WIDTH // 64), 0.01, np.float16))
                options: dict[str, int] = {"axis": 1, "block_size": 64}
            else:
                scales, options = self.scalar(0.01), {}
            weight = self.node("DequantizeLinear", [stored, scales], f"{layer}/weight", **options)
            if not kind.endswith("a16"):
                scale = self.scalar(0.02)
                x8 = self.node("QuantizeLinear", [x, scale], f"{layer}/quantize", output_dtype=number)
                x = self.node("DequantizeLinear", [x8, scale], f"{layer}/input")
        return self.matmul(layer, x, self.node("Transpose", [weight], f"{layer}/transpose", perm=[1, 0]))

    def fp4(self, layer: str, codes: str) -> str:
        """FP4 codes with E4M3 block scales and a global scale, dequantized to half."""
        scales = self.raw(self.types.FLOAT8E4M3FN, (WIDTH, WIDTH // 16), np.full((WIDTH, WIDTH // 16), 0x38, np.uint8))
        step = self.node("DequantizeLinear", [scales, self.scalar(0.01, self.types.FLOAT)], f"{layer}/step")
        wide = self.node("DequantizeLinear", [codes, step], f"{layer}/weight", axis=1, block_size=16)
        return self.node("Cast", [wide], f"{layer}/weight_cast", to=self.types.FLOAT16)

    def matmul(self, layer: str, x: str, weight: str) -> str:
        return self.node("MatMul", [x, weight], f"{layer}/MatMul")

    def node(self, kind: str, inputs: list[str], name: str, outputs: int = 1, **attributes: Any) -> str:
        names = [f"{name}.out", *(f"{name}.out.{i}" for i in range(1, outputs))]
        self.nodes.append(self.helper.make_node(kind, inputs, names, name=name, **attributes))
        return names[0]

    def raw(self, kind: int, shape: tuple[int, ...], data: np.ndarray) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(self.helper.make_tensor(name, kind, shape, data.tobytes(), raw=True))
        return name

    def scalar(self, value: float, kind: int | None = None) -> str:
        name = f"constant{len(self.constants)}"
        self.constants.append(self.helper.make_tensor(name, kind or self.types.FLOAT16, [], [value]))
        return name

    def save(self, name: str, inputs: dict[str, tuple[int | str, ...]], outputs: dict[str, Any]) -> Path:
        def values(shapes: dict[str, Any]) -> list[Any]:
            info = self.helper.make_tensor_value_info
            return [info(key, self.types.FLOAT16, shape) for key, shape in shapes.items()]

        graph = self.helper.make_graph(self.nodes, "graph", values(inputs), values(outputs), self.constants)
        opsets = [self.helper.make_opsetid(domain, version) for domain, version in (("", 23), ("trt", 1), ("quant", 1))]
        path = self.folder / name
        self.onnx.save(self.helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
        return path


@pytest.fixture
def graphs(tmp_path: Path) -> Graphs:
    pytest.importorskip("onnx", reason="needs the extra [onnx]")
    return Graphs(tmp_path)


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Any]:
    """Builds an engine of a small graph; skipped where nothing builds without a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="needs the extra [tensorrt-rtx]")
    from quant.export.tensorrt.build import BuildOptions, build_engine

    def run(path: Path, target: str = "sm120", shapes: Any = None, **options: Any) -> Any:
        return build_engine(path, tmp_path / f"{path.stem}.engine", BuildOptions(target, shapes, **options))

    return run


@contextmanager
def compiled_here() -> Iterator[None]:
    """Skips a test where the default compiler makes libraries that torch cannot load."""
    try:
        yield
    except ValueError as error:
        if "links libstdc++ statically" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture
def package() -> Callable[..., Path]:
    """`export_aoti`; see `compiled_here`."""
    from quant.export.aoti.package import export_aoti

    return compiled_here()(export_aoti)


@pytest.fixture
def decoder_package() -> Callable[..., Path]:
    """`export_aoti_decoder`; see `compiled_here`."""
    from quant.export.aoti.package import export_aoti_decoder

    return compiled_here()(export_aoti_decoder)
