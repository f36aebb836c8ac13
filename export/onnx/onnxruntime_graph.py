"""`for_onnxruntime` rewrites an exported graph into operators for which onnxruntime has fast kernels on a processor.

TensorRT takes codes as `[out, in]` behind DequantizeLinear and Transpose. onnxruntime 1.32 fuses nothing of that: it
dequantizes each weight at each token. A file for onnxruntime has the same codes and scales in other nodes:

    int4, int8      DequantizeLinear over `[in, out]`, MatMul: fused into MatMulNBits, which reads 4 or 8 bits
    int8 by int8    QuantizeLinear to uint8, 128 for zero; MatMulIntegerToFloat, onnxruntime's own
    other weights   Mul(Cast(codes), scale): constants, which are folded once, at load, into FP32 or FP16
    FP8 inputs      rounded by sums with a power of two: QuantizeLinear takes as long as the product
    experts         QMoE over their codes, or MoE (`expert_nodes`)
    RMS norm, RoPE  RMSNormalization, SkipSimplifiedLayerNormalization and RotaryEmbedding
    KV cache        GroupQueryAttention, which reads the tokens that the cache holds; for heads that it does not take,
                    keys, values and mask are sliced to the longest row before Attention

MatMulNBits rounds its inputs to INT8, a scale for each group of weights, unless the session's option
`session.qdq_matmulnbits_accuracy_level` is 1. Integer products have both operands in uint8: with int8 weights,
processors without VNNI add two products in 16 bit, which saturate.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from quant.export.onnx.expert_nodes import EXPERTS, experts_node
from quant.export.onnx.opsets import FLOAT, GROUPED_ATTENTION, INT32, INTEGER_PRODUCT, ORT_DOMAIN, PLUGIN_DOMAIN
from quant.formats.format import E4M3

_ZERO = 128  # of uint8 codes


def for_onnxruntime(model: Any) -> None:
    """Rewrites an `onnx_ir.Model` in place; its numbers are the same up to the order of sums."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    model.graph.opset_imports[ORT_DOMAIN] = 1
    rewriter = _Rewriter(model.graph)
    rewrites: dict[str, Callable[[Any], None]] = {
        "DequantizeLinear": rewriter.weight,
        "Where": rewriter.positive,
        "Reciprocal": rewriter.norm,
        "Neg": rewriter.rope,
        EXPERTS: partial(experts_node, rewriter),
    }
    attentions = {"Attention": rewriter.attention, GROUPED_ATTENTION: rewriter.grouped_attention}
    # Attention takes the turned keys that RoPE leaves.
    for table in (rewrites, attentions):
        for node in list(model.graph):
            table.get(node.op_type, lambda _: None)(node)
    model.graph.opset_imports.pop(PLUGIN_DOMAIN, None)  # of the nodes that were replaced
    RemoveUnusedNodesPass()(model)


class _Rewriter:
    """Puts nodes before the one that they stand for, with its metadata."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.constants: dict[bytes, Any] = {}
        self.sliced: dict[tuple[Any, int], Any] = {}  # by value and axis
        self.rounded: dict[tuple[Any, Any], Any] = {}  # codes of inputs, by input and scale
        self.transposed: set[Any] = set()  # codes and scales, which small layers with equal numbers share
        self.total: Any = None  # cached and new tokens of the longest row, `[1]`
        self.counts: list[Any] = []  # operands of GroupQueryAttention: last keys of rows, the total, new tokens of rows

    def add(self, before: Any, op: str, *inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
        """Returns the output of a new node, or its outputs."""
        import onnx_ir as ir

        made = ir.convenience.convert_attributes(attributes)
        node = ir.Node(domain, op, inputs, made, num_outputs=outputs, metadata_props=dict(before.metadata_props))
        self.graph.insert_before(before, node)
        return node.outputs[0] if outputs == 1 else node.outputs

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
            if codes.dtype is not None and codes.dtype.name == "FLOAT8E4M3FN":
                self._round_to_fp8(node)
            return
        if "block_size" in node.attributes and node.attributes["block_size"].as_int():
            return self._grouped(node, [reader for reader, _ in node.outputs[0].uses()])
        products = list(_readers(node.outputs[0], through=("Cast", "Transpose")))
        inputs = [_made(product.inputs[0], "DequantizeLinear", through="Cast") for product in products]
        if codes.dtype.name == "INT8" and {product.op_type for product in products} == {"MatMul"}:
            matrix = np.ascontiguousarray(codes.const_value.numpy().T)
            # Two's complement plus 128 where inputs are codes too.
            _set(codes, matrix.view(np.uint8) ^ np.uint8(_ZERO) if any(inputs) else matrix)
            wide = None if any(inputs) else self.add(node, "DequantizeLinear", codes, scale, axis=1)
            for product, rounded in zip(products, inputs, strict=True):
                if rounded is None:
                    x, dtype = product.inputs[0], int(product.outputs[0].dtype)
                    x = x if dtype == FLOAT else self.add(product, "Cast", x, to=FLOAT)
                    y = self.add(product, "MatMul", x, wide)
                    self.replace(product.outputs[0], y if dtype == FLOAT else self.add(product, "Cast", y, to=dtype))
                else:
                    self._multiply(product, rounded, codes, scale)
            return
        if scale.shape is not None and len(scale.shape):
            axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
            sizes = [-1 if index == axis else 1 for index in range(len(codes.shape))]
            scale = self.add(node, "Reshape", scale, self.constant(*sizes))
        wide = self.add(node, "Cast", codes, to=FLOAT)
        self.replace(node.outputs[0], self.add(node, "Mul", wide, scale))

    def _grouped(self, node: Any, transposes: Sequence[Any]) -> None:
        """Makes codes `[out, in]` and scales `[out, in / block]` `[in, out]` and `[in / block, out]`."""
        import onnx_ir as ir

        codes, scale = node.inputs
        dtype = scale.dtype
        stored = _made(scale, "Cast").inputs[0] if scale.producer() is not None else scale
        unseen = {codes, stored} - self.transposed
        self.transposed |= unseen
        if codes in unseen and codes.dtype is ir.DataType.INT4:  # two codes share a byte, in the order of the tensor
            out, columns = codes.shape.numpy()
            flat = codes.const_value.numpy().view(np.uint8).T.reshape(-1) & 15
            packed, number = flat[0::2] | flat[1::2] << 4, ir.DataType.INT4
            codes.const_value = ir.PackedTensor(packed, number, shape=(columns, out), name=codes.name)
            codes.shape = ir.Shape((columns, out))
        elif codes in unseen:
            _set(codes, np.ascontiguousarray(codes.const_value.numpy().T))
        if stored in unseen:
            _set(stored, np.ascontiguousarray(stored.const_value.numpy().astype(dtype.numpy()).T))
        block = node.attributes["block_size"].as_int()
        for transpose in transposes:
            wide = self.add(node, "DequantizeLinear", codes, stored, axis=0, block_size=block)
            self.replace(transpose.outputs[0], wide)

    def _multiply(self, matmul: Any, rounded: Any, codes: Any, scale: Any) -> None:
        """Makes a product of codes, `[in, out]` in uint8, in place of one of dequantized numbers."""
        x, one = self._unscaled(rounded, [matmul])
        zero = self.constant(_ZERO, dtype=np.uint8, scalar=True)
        if (x, one) not in self.rounded:
            self.rounded[x, one] = self.add(matmul, "QuantizeLinear", x, one, zero)
        operands = self.rounded[x, one], codes, one, scale, zero, zero
        y = self.add(matmul, INTEGER_PRODUCT, *operands, domain=ORT_DOMAIN)
        dtype = matmul.outputs[0].dtype
        self.replace(matmul.outputs[0], y if int(dtype) == FLOAT else self.add(matmul, "Cast", y, to=int(dtype)))

    def _unscaled(self, rounded: Any, products: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the numbers that are divided by a scale and rounded, and the scale.

        Inputs with a scale for each token are divided by it, and rounded with a power of two as their static scale, by
        which the outputs of `products` are divided afterwards. They need no such step, and get a scale of 1.
        """
        x, step = rounded.inputs[0].producer().inputs[0], rounded.inputs[1]
        small = _made(x, "Mul")
        if small is None or small.inputs[1] is not step:
            return x, step
        for product in products:
            for reader in _readers(product.outputs[0], through=("Cast",)):
                factor = _made(reader.inputs[1], "Div")
                if factor is not None and factor.inputs[1] is step:
                    reader.replace_input_with(1, factor.inputs[0])
        return small.inputs[0], self.constant(1.0, dtype=np.float32, scalar=True)

    def _round_to_fp8(self, node: Any) -> None:
        """Makes sums and differences in FP32 of the rounding of inputs to E4M3: the same numbers.

        With u the largest power of two up to |x|, x + 1.5 · 2²⁰ u has a last bit of u / 8, which is the step of E4M3.
        """

        def number(value: float) -> Any:
            return self.constant(value, dtype=np.float32, scalar=True)

        products = list(_readers(node.outputs[0], through=("Cast",)))
        x, scale = self._unscaled(node, products)
        if scale is node.inputs[1]:
            x = self.add(node, "Clip", self.add(node, "Div", x, scale), number(-E4M3.max), number(E4M3.max))
        # Rump's ufp(x) in rounded arithmetic: φx − (1 − 2⁻²⁴)φx for φ = 2²³ + 1.
        turned = self.add(node, "Mul", x, number(2.0**23 + 1))
        power = self.add(
            node, "Abs", self.add(node, "Sub", turned, self.add(node, "Mul", turned, number(1 - 2.0**-24)))
        )
        # Below 2⁻⁶ the step is that of 2⁻⁶.
        shift = self.add(node, "Max", self.add(node, "Mul", power, number(1.5 * 2**20)), number(1.5 * 2**14))
        y = self.add(node, "Sub", self.add(node, "Add", x, shift), shift)
        self.replace(node.outputs[0], self.add(node, "Mul", y, scale) if scale is node.inputs[1] else y)

    def positive(self, where: Any) -> None:
        """Rewrites the scale of a token of zeros, 1, as the smallest number: their product is zero with either."""
        greater, scale = _made(where.inputs[0], "Greater"), where.inputs[1]
        if greater is None or greater.inputs[0] is not scale or int(scale.dtype or 0) != FLOAT:
            return
        if _number(greater.inputs[1]) == 0 and _number(where.inputs[2]) == 1:
            least = self.constant(2.0**-126, dtype=np.float32, scalar=True)
            self.replace(where.outputs[0], self.add(where, "Max", scale, least))

    def norm(self, reciprocal: Any) -> None:
        """Rewrites `weight · x / sqrt(mean(x²) + epsilon)` over the last axis, of FP32, or of FP16 computed in FP32."""
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
        is_last = _number(mean.inputs[1]) in (-1, len(x.shape) - 1)
        if scaled.op_type != "Mul" or x not in scaled.inputs or epsilon is None or not is_last:
            return
        narrow, wide = _only_reader(scaled, "Cast"), _made(x, "Cast")
        if narrow is not None and wide is not None and narrow.outputs[0].dtype == wide.inputs[0].dtype:
            x, scaled = wide.inputs[0], narrow  # in FP16 the weight is multiplied after rounding
        product = _only_reader(scaled, "Mul")
        weight = None if product is None else next(y for y in product.inputs if y is not scaled.outputs[0])
        if weight is None or weight.shape is None or len(weight.shape) != 1:
            return
        total = _made(x, "Add")
        is_sum = total is not None and len(x.shape) == 3 and all(value.shape == x.shape for value in total.inputs)
        # The norm moves before the sum, so its weight must be there.
        if is_sum and weight.producer() is None:
            operands, op = (*total.inputs, weight), "SkipSimplifiedLayerNormalization"
            y, _, _, added = self.add(total, op, *operands, domain=ORT_DOMAIN, outputs=4, epsilon=epsilon)
            self.replace(x, added)
        else:
            y = self.add(product, "RMSNormalization", x, weight, axis=-1, epsilon=epsilon)
        self.replace(product.outputs[0], y)

    def rope(self, neg: Any) -> None:
        """Rewrites `x · cos + concat(−x[half:], x[:half]) · sin` for angles of each row."""
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
        if direct is None or x not in direct.inputs or x.shape is None:
            return
        starts = _number(low.inputs[1]), _number(high.inputs[1])
        if half is None or starts != (0, half) or len(x.shape) != 4 or x.shape[3] != 2 * half:
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

    def joined(self, before: Any, value: Any) -> Any:
        """Returns `[batch, heads, tokens, dim]` as `[batch, tokens, heads · dim]`, as projections give it."""
        node, sizes = value.producer(), self.constant(0, 0, value.shape[1] * value.shape[3])
        if node.op_type == "RotaryEmbedding" and "num_heads" not in node.attributes:
            x = self.joined(node, node.inputs[0])
            return self.add(node, "RotaryEmbedding", x, *node.inputs[1:], num_heads=value.shape[1])
        if node.op_type != "Transpose" or list(node.attributes["perm"].as_ints()) != [0, 2, 1, 3]:
            return self.add(before, "Reshape", self.add(before, "Transpose", value, perm=[0, 2, 1, 3]), sizes)
        split = _made(node.inputs[0], "Reshape")
        if split is not None and split.inputs[0].shape is not None and len(split.inputs[0].shape) == 3:
            return split.inputs[0]
        return self.add(node, "Reshape", node.inputs[0], sizes)

    def grouped_attention(self, node: Any) -> None:
        """Rewrites attention over a KV cache, with queries, keys, values and outputs as projections have them."""
        q, k, v, *past, lengths, sinks = (*node.inputs, None)[:7]
        heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[3]
        operands = [self.joined(node, value) for value in (q, k, v)]
        if not self.counts:
            # All tokens of a step are new, padding too: they lie behind a row's last real one.
            new = self.add(node, "Shape", operands[0], start=1, end=2)
            # The CUDA provider (1.31) reads a total that it has made before the copy arrives. Sums with a shape stay on
            # the processor, and so does what is made of them.
            after = self.add(node, "Add", lengths, new)
            last = self.add(node, "Sub", after, self.constant(1))
            total = self.add(node, "ReduceMax", after, keepdims=1)
            rows = self.add(node, "Expand", new, self.add(node, "Shape", lengths))
            self.counts = [self.add(node, "Cast", value, to=INT32) for value in (last, total, rows)]
        last, total, rows = self.counts
        y, *new_past = self.add(
            node, "GroupQueryAttention", *operands, *past, last, total, *[None] * 4, sinks, *[None] * 4, rows,
            domain=ORT_DOMAIN, outputs=3, num_heads=heads, kv_num_heads=kv_heads,
            scale=node.attributes["softmax_scale"].as_float(), local_window_size=node.attributes["window"].as_int(),
        )  # fmt: skip
        for old, value in zip(node.outputs[1:], new_past, strict=True):
            self.replace(old, value)
        for reader in list(_readers(node.outputs[0], through=())):
            shape = reader.outputs[0].shape
            if reader.op_type == "Reshape" and shape is not None and len(shape) == 3 and shape[2] == heads * dim:
                self.replace(reader.outputs[0], y)
        if list(node.outputs[0].uses()):
            self.replace(node.outputs[0], self.add(node, "Reshape", y, self.constant(0, 0, heads, dim)))

    def attention(self, node: Any) -> None:
        """Slices the keys, values and mask of an attention over a KV cache of fixed size."""
        scatter = _made(node.inputs[1], "TensorScatter")
        if scatter is None:
            return
        if self.total is None:
            _, keys, lengths = scatter.inputs
            after = self.add(node, "Add", lengths, self.add(node, "Shape", keys, start=2, end=3))
            self.total = self.add(node, "ReduceMax", after, keepdims=1)  # as in `grouped_attention`
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
    readers = list(node.outputs[0].uses())
    return readers[0][0] if len(readers) == 1 and readers[0][0].op_type == op else None


def _number(value: Any) -> float | None:
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().reshape(()))


def _set(value: Any, array: np.ndarray) -> None:
    import onnx_ir as ir

    value.const_value = ir.tensor(array, name=value.name)
    value.dtype, value.shape = value.const_value.dtype, value.const_value.shape
