"""`for_onnxruntime` rewrites an exported graph into operators for which onnxruntime has fast kernels on a processor.

TensorRT takes codes as `[out, in]` behind DequantizeLinear and Transpose. onnxruntime 1.32 fuses nothing of that: it
dequantizes each weight at each token. A file for onnxruntime has the same codes and scales in other nodes:

    int4            DequantizeLinear over `[in, out]` along axis 0, MatMul: fused into MatMulNBits, which reads 4 bits
    int8 by int8    QuantizeLinear to uint8, 128 for zero; MatMulIntegerToFloat, onnxruntime's own
    other weights   Mul(Cast(codes), scale): constants, which are folded once, at load, into FP32 or FP16
    experts         QMoE over their codes, or MoE (`expert_nodes`)
    RMS norm, RoPE  RMSNormalization and RotaryEmbedding, in FP32
    KV cache        keys, values and mask are sliced to the longest row before Attention, so that a step costs what the
                    cache holds and not what it could hold

MatMulNBits rounds its inputs to INT8, a scale for each group of weights, unless the session's option
`session.qdq_matmulnbits_accuracy_level` is 1. Integer products have both operands in uint8: with int8 weights,
processors without VNNI add two products in 16 bit, which saturate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from quant.export.onnx.expert_nodes import EXPERTS, experts_node
from quant.export.onnx.opsets import FLOAT, INTEGER_PRODUCT, ORT_DOMAIN

_ZERO = 128  # of uint8 codes


def for_onnxruntime(model: Any) -> None:
    """Rewrites an `onnx_ir.Model` in place; its numbers are the same up to the order of sums."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model.graph.opset_imports[ORT_DOMAIN] = 1
    rewriter = _Rewriter(model.graph)
    rewrites: dict[str, Callable[[Any], None]] = {
        "DequantizeLinear": rewriter.weight, "Where": rewriter.positive, "Reciprocal": rewriter.norm,
        "Neg": rewriter.rope, EXPERTS: partial(experts_node, rewriter),
    }  # fmt: skip
    for node in list(model.graph):
        rewrites.get(node.op_type, lambda _: None)(node)
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        rewriter.attention(node)
    RemoveUnusedNodesPass()(model)


class _Rewriter:
    """Puts nodes before the one that they stand for, with its metadata."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.constants: dict[bytes, Any] = {}
        self.sliced: dict[tuple[Any, int], Any] = {}  # by value and axis
        self.rounded: dict[tuple[Any, Any], Any] = {}  # codes of inputs, by input and scale
        self.total: Any = None  # cached and new tokens of the longest row, `[1]`

    def add(self, before: Any, op: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
        """Returns the output of a new node."""
        import onnx_ir as ir

        made = ir.convenience.convert_attributes(attributes)
        node = ir.Node(domain, op, inputs, made, metadata_props=dict(before.metadata_props))
        self.graph.insert_before(before, node)
        return node.outputs[0]

    def replace(self, old: Any, value: Any) -> None:
        """Gives the readers of a value another one, with its name, type and shape."""
        import onnx_ir as ir

        name, old.name = old.name, None
        value.name, value.type, value.shape = name, old.type, old.shape
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)

    def constant(self, *values: int | float, dtype: Any = np.int64, scalar: bool = False) -> Any:
        """Returns an initializer of a few numbers, which equal ones share."""
        import onnx_ir as ir

        array = np.array(values[0] if scalar else values, dtype)
        key = array.tobytes() + str((array.dtype, array.shape)).encode()
        if key not in self.constants:
            name = f"blockscale.constant.{len(self.constants)}"
            tensor = ir.tensor(array, name=name)
            self.constants[key] = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
            self.graph.register_initializer(self.constants[key])
        return self.constants[key]

    def weight(self, node: Any) -> None:
        """Rewrites the DequantizeLinear of a weight, and what multiplies by it."""
        codes, scale = node.inputs[:2]
        if codes.name not in self.graph.initializers:
            return
        if codes.dtype.name == "INT4":
            return self._int4(node, [reader for reader, _ in node.outputs[0].uses()])
        products = list(_readers(node.outputs[0], through=("Cast", "Transpose")))
        inputs = [_made(product.inputs[0], "DequantizeLinear", through="Cast") for product in products]
        if codes.dtype.name == "INT8" and all(inputs) and {product.op_type for product in products} == {"MatMul"}:
            flipped = codes.const_value.numpy().view(np.uint8) ^ np.uint8(_ZERO)  # two's complement plus 128
            _set(codes, np.ascontiguousarray(flipped.T))
            for product, rounded in zip(products, inputs, strict=True):
                self._multiply(product, rounded, codes, scale)
            return
        if scale.shape is not None and len(scale.shape):
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
            sizes = [-1 if index == axis else 1 for index in range(len(codes.shape))]
            scale = self.add(node, "Reshape", scale, self.constant(*sizes))
        wide = self.add(node, "Cast", codes, to=FLOAT)
        self.replace(node.outputs[0], self.add(node, "Mul", wide, scale))

    def _int4(self, node: Any, transposes: Sequence[Any]) -> None:
        """Makes codes `[out, in]` and scales `[out, in / block]` `[in, out]` and `[in / block, out]`."""
        import onnx_ir as ir

        codes, scale = node.inputs
        dtype = scale.dtype
        stored = _made(scale, "Cast").inputs[0] if scale.producer() is not None else scale
        out, columns = codes.shape.numpy()
        # Two codes share a byte, in the order of the tensor.
        flat = codes.const_value.numpy().view(np.uint8).T.reshape(-1) & 15
        packed, number = flat[0::2] | flat[1::2] << 4, ir.DataType.INT4
        codes.const_value = ir.PackedTensor(packed, number, shape=(columns, out), name=codes.name)
        codes.shape = ir.Shape((columns, out))
        _set(stored, np.ascontiguousarray(stored.const_value.numpy().astype(dtype.numpy()).T))
        block = node.attributes["block_size"].as_int()
        for transpose in transposes:
            wide = self.add(node, "DequantizeLinear", codes, stored, axis=0, block_size=block)
            self.replace(transpose.outputs[0], wide)

    def _multiply(self, matmul: Any, rounded: Any, codes: Any, scale: Any) -> None:
        """Makes a product of codes, `[in, out]` in uint8, in place of one of dequantized numbers."""
        quantize, step = rounded.inputs[0].producer(), rounded.inputs[1]
        x, one = quantize.inputs[0], step
        small = _made(x, "Mul")
        # Inputs with a scale for each token are divided by it, and rounded with a power of two as their static scale,
        # by which the outputs are multiplied afterwards. Codes need no such step.
        if small is not None and small.inputs[1] is step:
            x, one = small.inputs[0], self.constant(1.0, dtype=np.float32, scalar=True)
            for reader in _readers(matmul.outputs[0], through=("Cast",)):
                factor = _made(reader.inputs[1], "Div")
                if factor is not None and factor.inputs[1] is step:
                    reader.replace_input_with(1, factor.inputs[0])
        zero = self.constant(_ZERO, dtype=np.uint8, scalar=True)
        if (x, one) not in self.rounded:
            self.rounded[x, one] = self.add(matmul, "QuantizeLinear", x, one, zero)
        operands = self.rounded[x, one], codes, one, scale, zero, zero
        y = self.add(matmul, INTEGER_PRODUCT, *operands, domain=ORT_DOMAIN)
        dtype = matmul.outputs[0].dtype
        self.replace(matmul.outputs[0], y if int(dtype) == FLOAT else self.add(matmul, "Cast", y, to=int(dtype)))

    def positive(self, where: Any) -> None:
        """Rewrites the scale of a token of zeros, 1, as the smallest number: their product is zero with either."""
        greater, scale = _made(where.inputs[0], "Greater"), where.inputs[1]
        if greater is None or greater.inputs[0] is not scale or int(scale.dtype or 0) != FLOAT:
            return
        if _number(greater.inputs[1]) == 0 and _number(where.inputs[2]) == 1:
            least = self.constant(2.0**-126, dtype=np.float32, scalar=True)
            self.replace(where.outputs[0], self.add(where, "Max", scale, least))

    def norm(self, reciprocal: Any) -> None:
        """Rewrites `weight · x / sqrt(mean(x²) + epsilon)` over the last axis, in FP32."""
        chain = [reciprocal]
        for op in ("Sqrt", "Add", "ReduceMean", "Pow"):
            made = _made(chain[-1].inputs[0], op)
            if made is None:
                return
            chain.append(made)
        _, _, add, mean, power = chain
        x, users = power.inputs[0], list(reciprocal.outputs[0].uses())
        if int(x.dtype or 0) != FLOAT or len(users) != 1 or x.shape is None or _number(power.inputs[1]) != 2:
            return
        scaled, epsilon = users[0][0], _number(add.inputs[1])
        products = list(scaled.outputs[0].uses())
        is_last = _number(mean.inputs[1]) in (-1, len(x.shape) - 1)
        if scaled.op_type != "Mul" or x not in scaled.inputs or epsilon is None or not is_last or len(products) != 1:
            return
        product, index = products[0]
        weight = product.inputs[1 - index] if product.op_type == "Mul" else None
        if weight is not None and weight.shape is not None and len(weight.shape) == 1:
            y = self.add(product, "RMSNormalization", x, weight, axis=-1, epsilon=epsilon)
            self.replace(product.outputs[0], y)

    def rope(self, neg: Any) -> None:
        """Rewrites `x · cos + concat(−x[half:], x[:half]) · sin`, in FP32, for angles of each row."""
        concat = _only_reader(neg, "Concat")
        turned = None if concat is None else _only_reader(concat, "Mul")
        total = None if turned is None else _only_reader(turned, "Add")
        if concat is None or turned is None or total is None:
            return
        high, low = _made(neg.inputs[0], "Slice"), _made(concat.inputs[1], "Slice")
        if low is None or high is None or low.inputs[0] is not high.inputs[0]:
            return
        x, half = high.inputs[0], _number(low.inputs[2])
        direct = next((_made(value, "Mul") for value in total.inputs if value is not turned.outputs[0]), None)
        if direct is None or x not in direct.inputs or int(x.dtype or 0) != FLOAT or x.shape is None:
            return
        if (
            half is None
            or _number(low.inputs[1]) != 0
            or _number(high.inputs[1]) != half
            or len(x.shape) != 4
            or x.shape[3] != 2 * half
        ):
            return
        angles = []
        for product, other in ((direct, x), (turned, concat.outputs[0])):
            wide = _made(next(value for value in product.inputs if value is not other), "Unsqueeze")
            # `[batch, sequence, dim]`, each angle twice
            if wide is None or wide.inputs[0].shape is None or wide.inputs[0].shape[0] != x.shape[0]:
                return
            ends = (self.constant(0), self.constant(int(half)), self.constant(-1))
            key = (wide.inputs[0], -1)
            if key not in self.sliced:
                self.sliced[key] = self.add(wide, "Slice", wide.inputs[0], *ends)
            angles.append(self.sliced[key])
        self.replace(total.outputs[0], self.add(total, "RotaryEmbedding", x, *angles))

    def attention(self, node: Any) -> None:
        """Slices the keys, values and mask of an attention over a KV cache of fixed size."""
        scatter = _made(node.inputs[1], "TensorScatter")
        if scatter is None:
            return
        if self.total is None:
            _, keys, lengths = scatter.inputs
            tokens = self.add(node, "Shape", keys, start=2, end=3)
            longest = self.add(node, "ReduceMax", lengths, keepdims=1)
            self.total = self.add(node, "Add", tokens, longest)
        for index, axis in ((1, 2), (2, 2), (3, 3)):
            value = node.inputs[index]
            if (value, axis) not in self.sliced:
                ends = (self.constant(0), self.total, self.constant(axis))
                self.sliced[value, axis] = self.add(node, "Slice", value, *ends)
            node.replace_input_with(index, self.sliced[value, axis])


def _made(value: Any, op: str, through: str = "") -> Any:
    """Returns the node of this type that makes a value, behind one node of the type `through`; None if another does."""
    node = value.producer()
    if node is not None and node.op_type == through:
        node = node.inputs[0].producer()
    return node if node is not None and node.op_type == op else None


def _readers(value: Any, through: Sequence[str]) -> Iterator[Any]:
    """Yields the nodes that read a value, also behind nodes of the types `through`."""
    for node, _ in value.uses():
        if node.op_type in through:
            yield from _readers(node.outputs[0], through)
        else:
            yield node


def _only_reader(node: Any, op: str) -> Any:
    """Returns the one node that reads a node's output, if it is of this type."""
    readers = list(node.outputs[0].uses())
    return readers[0][0] if len(readers) == 1 and readers[0][0].op_type == op else None


def _number(value: Any) -> float | None:
    """Returns the number in a constant of one element."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().reshape(()))


def _set(value: Any, array: np.ndarray) -> None:
    """Gives an initializer other numbers."""
    import onnx_ir as ir

    value.const_value = ir.tensor(array, name=value.name)
    value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
