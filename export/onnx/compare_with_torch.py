"""Verifies an exported ONNX file: the checker, shape inference, and a comparison of every layer's numbers.

    fake_quant    the `quant::` op in PyTorch, with the textbook in float64: round the input, multiply, add
    checkpoint    the weight in the checkpoint's files, with the module's
    onnx          the layer's nodes, cut out of the file and run by the reference evaluator, with the op; and its
                  weight, dequantized in float32 from the initializers, with the module's

Layers are compared on random inputs; where inputs have a static scale, once on numbers within the calibrated range and
once on numbers of which half lie beyond it, because saturating is part of the format. Errors are relative, in the
Frobenius norm. Layers are compared one at a time: in a whole model one flipped rounding in FP4 changes everything after
it. Wide layers are compared some rows at a time, so that memory does not grow with them.

The result is the export receipt: {"layers": [{"name", "fake_quant", "checkpoint", "onnx", "engine", "passed"}],
"unreached", "passed"}; `unreached` are the layers on which no output depends, which are not in the file.
"""

import copy
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from quant.base.errors import option
from quant.export.onnx.expert_nodes import PROJECTIONS, apply_gate, is_fused
from quant.export.onnx.opsets import INTEGER_PRODUCT, ORT_DOMAIN, TRT_DOMAIN, register_schemas
from quant.export.onnx.translate import UNREACHED_KEY, layer_of
from quant.formats.format import Format
from quant.formats.tensor import BlockScaledTensor, round_activation
from quant.kernels.linear.conv import QuantConv, round_samples
from quant.kernels.linear.experts import QuantExperts, experts_forward
from quant.kernels.linear.quant_linear import QuantLinear, quantized_linear
from quant.recipes.blocks import stored_dtype
from quant.recipes.layers import stacking_of_experts

# TensorRT's operators are written in numpy from the definition of each, and share no code with the PyTorch ops that
# they are compared with; `ml_dtypes` rounds. Block scales follow our `max` rule (see `quant.formats.scaling`): TensorRT
# does not document how it rounds ties of amax / 6. MatMul and convolutions are redefined too: half-precision products
# are summed in float32 and rounded once, as in PyTorch and on tensor cores; numpy would do the same for FP16, but
# slowly.
_E4M3_MAX, _E2M1_MAX = np.float32(448), np.float32(6)


def evaluator(model: Any, more: Sequence[type] = ()) -> Any:
    """Returns an `onnx.reference.ReferenceEvaluator` of a model that knows these operators, and `more`."""
    from onnx.reference import ReferenceEvaluator

    register_schemas()
    return ReferenceEvaluator(model, new_ops=[*operators(), *more])


def quantize_nvfp4(x: np.ndarray, global_scale: np.ndarray, block: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Returns E2M1 codes `[..., n]` and E4M3 block scales `[..., n / block]`; `global_scale` is a static float32."""
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    amax = np.abs(blocks).max(-1)
    smallest = np.float32(2.0**-9)  # E4M3's smallest number: a scale of zero would lose the block
    # Two rounding steps: the block scale to E4M3, then each element with that scale.
    scale = np.clip(amax / (_E2M1_MAX * global_scale), smallest, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * global_scale
    codes: np.ndarray = np.clip(blocks / step[..., None], -_E2M1_MAX, _E2M1_MAX).astype(ml_dtypes.float4_e2m1fn)
    return codes.reshape(x.shape), scale


def quantize_mxfp8(x: np.ndarray, block: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Returns E4M3 codes and E8M0 block scales (exponents, uint8, rounded up) along the last axis."""
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    # frexp gives m · 2^e with m in [0.5, 1). The next power of two is 2^e, or the number itself where m is 0.5.
    mantissa, exponent = np.frexp(np.abs(blocks).max(-1) / _E4M3_MAX)
    exponent = np.where(mantissa == 0, -127, exponent - (mantissa == 0.5))
    exponent = np.clip(exponent, -127, 127)
    codes = np.clip(blocks / np.ldexp(np.float32(1), exponent)[..., None], -_E4M3_MAX, _E4M3_MAX)
    return codes.reshape(x.shape).astype(ml_dtypes.float8_e4m3fn), (exponent + 127).astype(np.uint8)


def dequantize_blocks(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns `codes` times its scales, one a block of the last two axes; float32."""
    rows, columns = codes.shape[-2:]
    wide = np.repeat(np.repeat(scale.astype(np.float32), block[0], -2), block[1], -1)
    return codes.astype(np.float32) * wide[..., :rows, :columns]


@functools.cache
def operators() -> tuple[type, ...]:
    """Returns the operators as classes that `onnx.reference` takes."""
    from onnx.helper import tensor_dtype_to_np_dtype
    from onnx.reference.ops.op_conv import Conv
    from onnx.reference.ops.op_conv_transpose import ConvTranspose

    def integer_product(a: Any, b: Any, a_scale: Any, b_scale: Any, a_zero: Any, b_zero: Any) -> tuple[np.ndarray]:
        # Float64 holds sums of codes without rounding, and numpy multiplies in it by BLAS.
        sums = (a.astype(np.float64) - a_zero) @ (b.astype(np.float64) - b_zero)
        return ((sums.astype(np.float32) * (a_scale * b_scale)).astype(np.float32),)

    def expand(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], dtype: int) -> tuple[np.ndarray]:
        return (dequantize_blocks(codes, scale, block).astype(tensor_dtype_to_np_dtype(dtype)),)

    def expand_mxfp8(codes: Any, scale: Any, *, block_size: int, output_dtype: int, **_: Any) -> tuple[np.ndarray]:
        return expand(codes, np.ldexp(np.float32(1), scale.astype(np.int32) - 127), (1, block_size), output_dtype)

    return (
        operator("TRT_FP4DynamicQuantize", lambda x, s, *, block_size, **_: quantize_nvfp4(x, s, block_size)),
        operator("TRT_MXFP8DynamicQuantize", lambda x, *, block_size, **_: quantize_mxfp8(x, block_size)),
        operator("TRT_MXFP8DequantizeLinear", expand_mxfp8),
        operator(
            "TRT_BlockDequantize",
            lambda codes, scale, *, block_shape, output_dtype: expand(codes, scale, tuple(block_shape), output_dtype),
        ),
        operator(
            "MatMul", lambda a, b: (np.matmul(a.astype(np.float32), b.astype(np.float32)).astype(a.dtype),), domain=""
        ),
        operator(INTEGER_PRODUCT, integer_product, ORT_DOMAIN),
        _wide(Conv),
        _wide(ConvTranspose),
    )


def _wide(base: Any) -> type:
    """Returns an operator of `onnx.reference` that computes in float32 and rounds once to its input's dtype."""

    def run(self: Any, *inputs: Any, **attributes: Any) -> tuple[np.ndarray, ...]:
        wide = [None if x is None else x.astype(np.float32) for x in inputs]
        return tuple(y.astype(inputs[0].dtype) for y in base._run(self, *wide, **attributes))

    return type(base.__name__, (base,), {"op_domain": "", "_run": run})


def operator(name: str, run: Callable[..., tuple[np.ndarray, ...]], domain: str = TRT_DOMAIN) -> type:
    """Returns an operator for `onnx.reference`: inputs are positional arguments of `run`, attributes keywords."""
    from onnx.reference.op_run import OpRun

    return type(name, (OpRun,), {"op_domain": domain, "_run": staticmethod(run)})


Saved = Callable[[str], BlockScaledTensor | None]
"""Reads a layer's weight, by its name, from the checkpoint; None where it is not there."""
TOKENS = 8
_WEIGHTS_AT_ONCE = 1 << 22
_LARGE = 1 << 12  # bytes of a constant that shape inference does not need
# In half precision, sums that were added up in another order may round to the neighbouring value. Inputs in INT8 or
# scaled by token are twice as far: the op rounds them to half precision after scaling, the graph the output. Of a layer
# with a bias the graph rounds the product and the sum, the op the sum alone.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
WEIGHT_TOLERANCE = 1e-6
_TEXTBOOK = {torch.float32: 1e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def verify(
    model: nn.Module, path: Path, *, checkpoint: Saved | None = None, progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Returns the receipt of an exported file; `checkpoint` reads a layer's weight from the checkpoint, if it is there.

    Raises ValueError for a file that lacks a layer's nodes.
    """
    graph = LayerGraphs(path)
    quantized = [(n, module) for n, module in model.named_modules() if isinstance(module, QuantLinear | QuantConv)]
    layers = [(name, module) for name, module in quantized if name not in graph.unreached]
    if quantized and not layers:
        raise ValueError(
            f"the graph's outputs depend on none of the {len(quantized)} quantized layers, {quantized[0][0]} first; "
            f"name inputs that reach them ({option('input')})"
        )
    dtype = stored_dtype(model)
    entries = []
    for name, module in model.named_modules():
        if is_fused(module) and any(isinstance(x, QuantExperts) for x in module.children()):
            entries += _experts_entries(name, module, graph, checkpoint, dtype)
    for done, (name, module) in enumerate(layers, 1):
        stored = checkpoint(name) if checkpoint else None
        compared: Any = _compare_conv if isinstance(module, QuantConv) else _compare_linear
        errors = _relative_errors(compared(name, module, graph, stored, dtype), dtype)
        format = module.activation_format
        scaled_after = format is not None and (format.element.is_integer or (format.per_row and not format.is_static))
        passed = (
            errors["fake_quant"] <= _TEXTBOOK[dtype]
            and max(errors["output"], errors.get("saturated", 0.0))
            <= TOLERANCE[dtype] * (1 + scaled_after + (module.bias is not None))
            and max(errors["weight"], errors.get("checkpoint", 0.0)) <= WEIGHT_TOLERANCE
        )
        entries.append(_entry(name, errors, passed=passed))
        if progress:
            progress(done, len(layers))
    return {"layers": entries, "unreached": graph.unreached, "passed": all(entry["passed"] for entry in entries)}


def _entry(name: str, errors: Mapping[str, float], *, passed: bool) -> dict[str, Any]:
    return {
        "name": name,
        "fake_quant": errors["fake_quant"],
        "checkpoint": errors.get("checkpoint"),
        "onnx": max(errors["output"], errors.get("saturated", 0.0), errors["weight"]),
        "engine": None,
        "passed": passed,
    }


def worst_layer(receipt: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the layer that fails by most, or else the one that comes nearest to it; None without layers."""

    def badness(layer: dict[str, Any]) -> tuple[bool, float]:
        return not layer["passed"], max(layer["onnx"] or 0.0, layer["checkpoint"] or 0.0)

    return max(receipt["layers"], key=badness, default=None)


def check_file(path: str | Path) -> None:
    """Runs the ONNX checker and strict shape inference; ValueError with their message if they refuse the file."""
    import onnx

    register_schemas()
    path = Path(path)
    try:
        onnx.checker.check_model(str(path))
        model = onnx.load(path, load_external_data=False)
        # Shape inference copies the bytes of large constants, and needs their shapes alone.
        for tensor in model.graph.initializer:
            if len(tensor.raw_data) > _LARGE:
                tensor.ClearField("raw_data")
                tensor.data_location = onnx.TensorProto.EXTERNAL
                tensor.external_data.add(key="location", value=path.name)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        text = f"{path}: not a valid ONNX file: {' '.join(str(error).split())[:500]}"
        if "inconsistent type" in text:
            text += f"; a model and inputs of several dtypes are put in one by {option('dtype', 'fp16')}"
        raise ValueError(text) from error


class LayerGraphs:
    """The nodes of each quantized linear in a file of `write_onnx`, as models that read weights on demand."""

    def __init__(self, path: Path) -> None:
        import onnx

        self.path = path
        self.model = onnx.load(path, load_external_data=False)
        graph = self.model.graph
        metadata = {entry.key: entry.value for entry in self.model.metadata_props}
        self.unreached: list[str] = json.loads(metadata.get(UNREACHED_KEY, "[]"))
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self.maker = {name: node for node in graph.node for name in node.output}
        self.layer = {name: layer_of(node) for name, node in self.maker.items()}
        # Nodes are in topological order, so the last tagged node of a layer gives its output.
        self.outputs = {layer_of(node): node.output[0] for node in graph.node if layer_of(node)}
        self.folded: set[str] = set()  # values that nodes compute from constants alone
        for node in graph.node:
            if all(value in self.constants or value in self.folded for value in node.input if value):
                self.folded.update(node.output)

    def linear(self, name: str) -> tuple[Any, str]:
        """Returns the layer's nodes as a model, and the name of its input; ValueError if they are not a linear's."""
        if name not in self.outputs:
            raise ValueError(
                f"{self.path}: no nodes of layer {name}, on which the outputs depend; the file is of another model, or "
                "this is a defect of the export"
            )
        output, outputs = self.outputs[name], set(self.outputs.values())

        def own(value: str) -> bool:
            return value == output or (bool(self.layer.get(value)) and value not in outputs) or value in self.folded

        return self._cut(output, own, name)

    def loaded(self, name: str) -> Any:
        """Returns an initializer with its numbers, which may lie in a file of their own."""
        from onnx.external_data_helper import load_external_data_for_tensor

        tensor = copy.deepcopy(self.constants[name])
        if tensor.data_location == tensor.EXTERNAL:
            load_external_data_for_tensor(tensor, str(self.path.parent))
        return tensor

    def array(self, name: str) -> np.ndarray:
        """Returns the numbers of an initializer."""
        from onnx import numpy_helper

        return numpy_helper.to_array(self.loaded(name))

    def weight(self, name: str) -> Any:
        """Returns a model that computes the layer's weight `[out, in]`, float32, before any cast to half."""
        from onnx import TensorProto, helper

        nodes = [node for node in self.model.graph.node if f"{name}.codes" in node.input]
        if not nodes or (len(nodes) != 1 and nodes[0].op_type != INTEGER_PRODUCT):
            raise ValueError(f"{self.path}: {len(nodes)} nodes read {name}.codes, expected one")
        node = nodes[0]
        if node.op_type == "Cast":  # times its scale
            (node,) = (reader for reader in self.model.graph.node if node.output[0] in reader.input)
        if node.op_type == INTEGER_PRODUCT:
            return self._integer_weight(name, node)
        output = node.output[0]
        model, _ = self._cut(output, lambda value: value == output or value in self.folded, name, inputs=0)
        last = model.graph.node[-1]
        if last.op_type in ("DequantizeLinear", "TRT_BlockDequantize"):
            attributes = [attribute for attribute in last.attribute if attribute.name != "output_dtype"]
            del last.attribute[:]
            last.attribute.extend([*attributes, helper.make_attribute("output_dtype", TensorProto.FLOAT)])
            if self.is_transposed(name):
                self._transpose(model)
        return model

    def is_transposed(self, name: str) -> bool:
        """Returns whether the codes of a linear are `[in, out]`, as onnxruntime multiplies by them."""
        from onnx import TensorProto

        node = next(node for node in self.model.graph.node if f"{name}.codes" in node.input)
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
        blocked = any(attribute.name == "block_size" and attribute.i for attribute in node.attribute)
        codes = self.constants[f"{name}.codes"]
        by_output = codes.data_type == TensorProto.INT8 and len(codes.dims) == 2  # INT8 has one scale for each output
        return node.op_type == INTEGER_PRODUCT or axis == (0 if blocked else 1 if by_output else None)

    def _integer_weight(self, name: str, product: Any) -> Any:
        """Returns the weight of a product of codes: less its zero point, times its scale."""
        from onnx import helper

        _, codes, _, scale, _, zero = product.input
        names = [codes, scale, zero]
        node = helper.make_node("DequantizeLinear", names, [f"{name}.weight"], axis=1)
        made = [self.maker[scale]] if scale in self.maker else []
        used = {x for x in (*names, *(x for node in made for x in node.input)) if x in self.constants}
        model = self._model([*made, node], name, [f"{name}.weight"], used)
        self._transpose(model)
        return model

    def _transpose(self, model: Any) -> None:
        from onnx import helper

        (output,) = model.graph.output
        model.graph.node.append(helper.make_node("Transpose", [output.name], [f"{output.name}.out_in"], perm=[1, 0]))
        output.name = f"{output.name}.out_in"

    def _cut(self, output: str, own: Callable[[str], bool], name: str, inputs: int = 1) -> tuple[Any, str]:
        """Returns the nodes that compute `output`, as far back as `own` says, as a model."""
        # Nodes are visited from the last to the first: one that computes a value in `waiting` belongs to the layer, and
        # its inputs are constants (`used`), values of the layer, or the layer's inputs (`free`).
        nodes: list[Any] = []
        used: set[str] = set()
        free: list[str] = []
        waiting = [output]
        for node in reversed(self.model.graph.node):
            if not any(value in waiting for value in node.output):
                continue
            nodes.insert(0, node)
            for value in filter(None, node.input):
                if value in self.constants:
                    used.add(value)
                elif own(value):
                    waiting.append(value)
                elif value not in free:
                    free.append(value)
        if len(free) != inputs:
            raise ValueError(f"{self.path}: the nodes of {name} read {free or 'nothing'}, expected {inputs} input(s)")
        return self._model(nodes, name, [*free, output], used), free[0] if free else ""

    def _model(self, nodes: Sequence[Any], name: str, values: Sequence[str], used: set[str]) -> Any:
        """Returns a model of nodes; `values` are its inputs and its output, `used` its constants."""
        from onnx import helper

        constants = [self.loaded(value) for value in sorted(used)]
        # The evaluator ignores the declared type, FLOAT of any shape.
        declared = [helper.make_value_info(value, helper.make_tensor_type_proto(1, None)) for value in values]
        graph = helper.make_graph(nodes, name, declared[:-1], declared[-1:], constants)
        return helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)


def _experts_entries(
    name: str, module: Any, graph: LayerGraphs, checkpoint: Saved | None, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """Returns the entries of the quantized projections of fused experts, which are one node of the file.

    Its numbers are computed from the codes in the file, in float64, for two experts of each token.
    """
    if name not in graph.outputs:
        raise ValueError(f"{graph.path}: no nodes of {name}; the file is of another model")
    weights: dict[str, Any] = {projection: getattr(module, projection) for projection in PROJECTIONS}
    quantized = [key for key, weight in weights.items() if isinstance(weight, QuantExperts)]
    stackings = {key: stacking_of_experts(module, key) for key in weights}
    (node,) = (node for node in graph.model.graph.node if layer_of(node) == name and node.op_type in ("MoE", "QMoE"))
    # By position: layers with equal biases share them.
    operands = dict(zip(PROJECTIONS, node.input[4:8:3] if node.op_type == "QMoE" else node.input[3:6:2], strict=False))
    files = {
        key: [graph.array(f"{name}.{key}{part}") for part in ((".codes", ".scale") if key in quantized else ("",))]
        for key in weights
    }

    def exported(key: str, expert: int) -> Tensor:
        parts = (part[expert] for part in files[key])
        weight = torch.from_numpy(_expert_weight(*parts, columns=stackings[key].weight_shape[2]))
        return weight.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if key == PROJECTIONS[0] else weight

    def held(key: str, expert: int) -> Tensor:
        weight = weights[key].dense(expert) if key in quantized else stackings[key].matrix(weights[key][expert])
        return weight.float()

    def biases(source: str, key: str) -> Tensor:
        if not module.has_bias:
            return torch.zeros(experts, 1)
        in_file = source == "file"
        bias = torch.tensor(graph.array(operands[key]) if in_file else getattr(module, f"{key}_bias").tolist()).double()
        alternate = key == PROJECTIONS[0] and (in_file or stackings[key].interleaved)
        return bias.unflatten(1, (-1, 2)).mT.flatten(1) if alternate else bias

    generator, experts, slots = torch.Generator().manual_seed(0), module.num_experts, min(2, module.num_experts)
    x = torch.randn(TOKENS, stackings["down_proj"].weight_shape[1], generator=generator, dtype=torch.float32).to(dtype)
    shares, index = torch.randn(TOKENS, experts, generator=generator, dtype=torch.float32).softmax(-1).topk(slots)
    sums = {}
    for key, matrix in {"file": exported, "textbook": held}.items():
        sums[key] = torch.zeros(x.shape, dtype=torch.float64)
        up_bias, down_bias = (biases(key, projection) for projection in PROJECTIONS)
        for token, slot in np.ndindex(TOKENS, slots):
            expert = int(index[token, slot])
            up, down = (matrix(projection, expert).double() for projection in PROJECTIONS)
            y = apply_gate(module, *(up @ x[token].double() + up_bias[expert]).chunk(2))
            sums[key][token] += shares[token, slot] * (down @ y + down_bias[expert])
    with torch.no_grad():
        op = experts_forward(module, x, index, shares.to(dtype))
    entries = []
    for projection in quantized:
        stored = checkpoint(f"{name}.{projection}") if checkpoint else None

        def pairs(key: str = projection, stored: BlockScaledTensor | None = stored) -> _Pairs:
            yield from (("fake_quant", op, sums["textbook"]), ("output", sums["file"], op))
            for expert in range(experts):
                weight = weights[key].stored_weight.matrix(expert).dequantize()
                yield "weight", exported(key, expert), weight
                if stored is not None:
                    yield "checkpoint", stored.matrix(expert).dequantize(), weight

        errors = _relative_errors(pairs(), dtype)
        # In half precision the op rounds both projections, the gate, and each sum.
        passed = max(errors["output"], errors["fake_quant"]) <= 4 * max(TOLERANCE[dtype], 1e-6)
        passed = passed and max(errors["weight"], errors.get("checkpoint", 0.0)) <= WEIGHT_TOLERANCE
        entries.append(_entry(f"{name}.{projection}", errors, passed=passed))
    return entries


def _expert_weight(codes: np.ndarray, scale: np.ndarray | None = None, *, columns: int) -> np.ndarray:
    """Returns a weight `[out, in]` from the file; unsigned codes are around 8, two to a byte, or around 128."""
    zero = 0
    if codes.dtype == np.uint8:
        zero = 128 if codes.shape[1] == columns else 8
        codes = codes if zero == 128 else np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    wide: np.ndarray = codes.astype(np.float32) - np.float32(zero)
    if scale is not None:
        blocks = scale.reshape(len(scale), -1)
        wide *= np.repeat(blocks, columns // blocks.shape[1], 1)
    return wide


_Pairs = Iterator[tuple[str, Tensor, Tensor]]


def _relative_errors(pairs: _Pairs, dtype: torch.dtype) -> dict[str, float]:
    """Returns the norm of the difference over the norm of the expected numbers, by key, over all slices of a key.

    Numbers beyond the dtype are its largest: in FP16 products of inputs that saturate may overflow.
    """
    sums: dict[str, tuple[float, float]] = {}
    largest = torch.finfo(dtype).max
    for key, *compared in pairs:
        computed, expected = (x.clamp(-largest, largest) for x in compared)
        difference, reference = sums.get(key, (0.0, 0.0))
        if not torch.equal(computed, expected):
            difference += float((computed.double() - expected.double()).square().sum())
        reference += float(torch.linalg.vector_norm(expected, dtype=torch.float64)) ** 2
        sums[key] = difference, reference
    return {key: math.sqrt(a) / max(math.sqrt(b), 1e-30) for key, (a, b) in sums.items()}


def _compare_linear(
    name: str, module: QuantLinear, graph: LayerGraphs, stored: BlockScaledTensor | None, dtype: torch.dtype
) -> _Pairs:
    """Yields what is compared, computed and expected numbers, for some rows of the weight after the other."""
    generator, format = torch.Generator().manual_seed(0), module.activation_format
    x = torch.randn(TOKENS, module.in_features, generator=generator, dtype=torch.float32)
    probes = _probes(x, format, module.input_scale, dtype)
    whole, (layer, input_name), constants = module.quantized_weight, graph.linear(name), graph.weight(name)
    transposed = graph.is_transposed(name)
    for rows, part in whole.row_chunks(_WEIGHTS_AT_ONCE):
        start, stop = rows.start, rows.stop
        bias = None if module.bias is None else module.bias[start:stop]
        weight, nodes = part.dequantize(), evaluator(_model_rows(layer, whole, start, stop, transposed=transposed))
        for key, x in probes.items():
            rounded = x if format is None else round_activation(x, format, module.input_scale)
            with torch.no_grad():
                op = quantized_linear(x, part, bias, module.input_scale, format).float()
            yield "fake_quant", op, linear(rounded.double(), weight.double(), None if bias is None else bias.double())
            with np.errstate(over="ignore"):
                computed = _as_float(nodes.run(None, {input_name: to_numpy(x)})[0])
            yield key, computed, op
        sliced = _model_rows(constants, whole, start, stop, transposed=transposed)
        yield "weight", _as_float(evaluator(sliced).run(None, {})[0]), weight
        if stored is not None:
            yield "checkpoint", stored.rows(start, stop).dequantize(), weight


def _probes(x: Tensor, format: Format | None, input_scale: Tensor | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the inputs that a layer is compared on, by the key of their errors, from random normal ones `x`."""
    if format is None or input_scale is None:
        return {"output": x.to(dtype)}
    # The largest value that does not saturate.
    reach = format.element.max * (format.scale.max if format.global_scale else 1.0) * input_scale.float()
    within = (x * (reach / x.abs().max())).to(dtype)
    # The median magnitude of normal numbers is 0.67.
    return {"output": within, "saturated": (x * (reach / 0.67)).to(dtype)}


def _compare_conv(
    name: str, module: QuantConv, graph: LayerGraphs, stored: BlockScaledTensor | None, dtype: torch.dtype
) -> _Pairs:
    # The smallest input with two outputs along each axis.
    size = [d * (k - 1) + 1 + s for k, s, d in zip(module.kernel_size, module.stride, module.dilation, strict=True)]
    generator, format = torch.Generator().manual_seed(0), module.activation_format
    x = torch.randn(2, module.in_channels, *size, generator=generator, dtype=torch.float32)
    (layer, input_name), constants = graph.linear(name), graph.weight(name)
    (pads,) = (a.ints for node in layer.graph.node for a in node.attribute if a.name == "pads")
    # ONNX's optimizer moves a Pad of zeros before the Conv into it, that of the module or of the model's own code; its
    # nodes then take what was padded, and not the input of the op. ONNX lists the begins of all axes, then the ends.
    axes = len(module.op_padding)
    more = [pad - own for pad, own in zip(pads, module.op_padding * 2, strict=True)]
    paddings = [more[i] for axis in reversed(range(axes)) for i in (axis, axis + axes)]
    geometry = (module.stride, module.op_padding, module.dilation, module.transposed, module.output_padding)
    bias = None if module.bias is None else module.bias.double()
    nodes, weight = evaluator(layer), module.weight_in(torch.float64)
    for key, probe in _probes(x, format, module.input_scale, dtype).items():
        padded = nn.functional.pad(probe, paddings)
        rounded = padded if format is None else round_samples(padded, format, module.input_scale)
        with torch.no_grad():
            op = module.convolve(padded, module.output_padding).float()
            yield "fake_quant", op, torch.convolution(rounded.double(), weight, bias, *geometry, module.groups)
        yield key, _as_float(nodes.run(None, {input_name: to_numpy(probe)})[0]), op
    yield "weight", _as_float(evaluator(constants).run(None, {})[0]), module.weight_in(torch.float32)
    if stored is not None:
        yield "checkpoint", stored.dequantize(), module.dequantize()


def _model_rows(model: Any, weight: BlockScaledTensor, start: int, stop: int, *, transposed: bool) -> Any:
    """Returns the model that `LayerGraphs` cut out, for some rows of the weight.

    Constants with an entry for each row, or for each block of rows, are sliced by their bytes; `transposed` ones have
    rows of the weight as columns.
    """
    from onnx import TensorProto, helper, numpy_helper

    out, height = weight.shape[0], weight.format.block_shape(weight.shape)[0]
    if stop - start == out:
        return model
    constants = []
    for tensor in model.graph.initializer:
        if transposed and len(tensor.dims) == 2 and tensor.dims[1] == out:
            part = np.ascontiguousarray(numpy_helper.to_array(tensor)[:, start:stop])
            constants.append(numpy_helper.from_array(part, tensor.name))
            continue
        step = next((step for step in (1, height) if tensor.dims and tensor.dims[0] == -(-out // step)), None)
        if step is None or not tensor.raw_data:
            constants.append(tensor)
            continue
        first, last, row = start // step, -(-stop // step), len(tensor.raw_data) // tensor.dims[0]
        dims = [last - first, *tensor.dims[1:]]
        data = tensor.raw_data[first * row : last * row]
        constants.append(TensorProto(name=tensor.name, data_type=tensor.data_type, dims=dims, raw_data=data))
    graph = helper.make_graph(model.graph.node, "rows", model.graph.input, model.graph.output, constants)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _as_float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32))


def to_numpy(x: Tensor) -> np.ndarray:
    """Returns a tensor as numpy, BF16 and FP8 as `ml_dtypes` have them."""
    import ml_dtypes

    kinds: dict[torch.dtype, tuple[torch.dtype, Any]] = {
        torch.bfloat16: (torch.uint16, ml_dtypes.bfloat16),
        torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    }
    x = x.detach().cpu().contiguous()
    if x.dtype in kinds:
        plain, dtype = kinds[x.dtype]
        return x.view(plain).numpy().view(dtype)
    return x.numpy()
