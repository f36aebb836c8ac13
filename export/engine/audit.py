"""Reads from a built engine in which precision each GEMM and each attention runs, without a GPU.

A serialized engine of TensorRT 10 and TensorRT-RTX 1 holds its compiled program as plain text next to the machine code,
one program for each optimization profile. A line names the kernel, its operands, and the ONNX nodes that were fused
into it:

    tensor={ … dims={ 256 512 } name="w1" … type=fp4_e2m1 }
    fully_connected={ name="a/matmul+b/matmul" output={"y" } input={"x4" "w1" …} … layers="[ONNX Layer: a/matmul]…" }
    runtime_fusion={ name=__myl_CastMulFc input_args={ "w2" "x" … } output_args={…} … layers="…" backbone=gemm }
    function={ name=_gemm_mha_v2 args={ "q" "k" "v" … } … layers="[ONNX Layer: attention]" }

A convolution is a `corrltn` or `convolution`, a transposed one a `deconvolution`; its node is a Conv or ConvTranspose.
TensorRT-RTX 1.7 runs the first kind in INT8 and FP8, pads channels where it has to, and runs the second in half.

A `runtime_fusion` is compiled on the GPU that runs it; its parts follow as a small program of their own, whose GEMM
shows the types that are multiplied. TensorRT silently runs a layer in half precision if the graph misses one of its
patterns. The precision is read from types, not from kernel names:

    fp4 · fp8 · int8        both operands of the GEMM are codes
    half, fp4 weights       weights are stored as codes and multiplied in 16 bit, as in a weight-only format
    half                    no trace of the quantization is left

The layer's GEMM is the kernel that holds its MatMul or Conv node, `model.layers.0.mlp.up_proj/MatMul`. The graph names
the nodes of layers in 16 bit in the same way, so that a layer which was planned in fewer bits and never quantized is
found in half precision; only a layer that the graph lacks may be missing.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.recipes.layer_kind import LayerKind
from quant.recipes.plan import LayerPlan, Plan

UNPLANNED = "–"
"""The planned precision where there is no plan."""

_AUDITED = (LayerKind.LINEAR, LayerKind.HEAD, LayerKind.CONV)
NOT_EXPORTED = "not in the exported graph"
_PRODUCTS = ("/MatMul", "/Gemm", "/Conv")
_MULTIPLYING = ("fully_connected", "convolution", "corrltn", "deconvolution")
_BACKBONES = ("gemm", "corrltn", "conv", "deconv")

# TensorRT's kernels for several queries, and for a single one as in decoding.
FUSED_ATTENTION = ("_gemm_mha_v", "_gemv_mha_v")
# The compiler's types, by the names used here.
_TYPES = {
    "fp4_e2m1": "fp4",
    "fp8_e4m3": "fp8",
    "int8": "int8",
    "int4": "int4",
    "half": "half",
    "bf16": "half",
    "bfloat16": "half",
    "float": "float",
}
_BITS = {"fp4": 4, "int4": 4, "fp8": 8, "int8": 8, "half": 16, "float": 32}
_ELEMENTS = {"e2m1": "fp4", "e4m3": "fp8", "int8": "int8", "int4": "int4"}
# A program begins with its header and ends with a zero byte.
_HEADER = re.compile(rb"header \{\n  version = ")
#   tensor={ … dims={ 256 512 } … name="w1" … type=fp4_e2m1 … const_payload_size=65536 … }
_TENSOR = re.compile(r"^ +(?:sub_)?tensor=\{(.*)$", re.M)
#   fully_connected={ name="a/matmul+b/matmul" output={"y" } input={"x4" "w1" } … layers="…" }
_LINE = re.compile(r'^  (\w+)=\{ name=("[^"]*"|\S+) (.*)$', re.M)
# Of `layers`: [ONNX Layer: a/matmul]\x1f[ONNX Layer: b/matmul]; a node's own name may hold brackets.
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f?\[ONNX Layer: |$)")
_NAMES = {
    "input": re.compile(r'\b(?:input_args|input)=\{((?:\s*"[^"]*")*)\s*\}'),
    "output": re.compile(r'\b(?:output_args|output)=\{((?:\s*"[^"]*")*)\s*\}'),
    "layers": re.compile(r'\blayers="([^"]*)"'),
}


@dataclass(frozen=True)
class Operand:
    """A tensor that a kernel reads or writes; views of one tensor share its `name`.

    `type` is a key of `_BITS` or the compiler's word; a dynamic dimension is None; `constant` says it is in the engine.
    """

    name: str
    type: str
    dims: tuple[int | None, ...]
    constant: bool

    @property
    def is_matrix(self) -> bool:
        """Whether it can be an operand of a GEMM, and is no scale, bias or shape."""
        return self.type in _BITS and sum(dim != 1 for dim in self.dims) > 1


@dataclass(frozen=True)
class Kernel:
    """One line of a compiled program.

    `kind` is the compiler's word, such as `fully_connected`, whose inputs are activation and weight, or
    `runtime_fusion`, whose `backbone` may be `gemm`; `nodes` are the ONNX nodes fused into it; `is_body` marks a part
    of a `runtime_fusion`; `program` is an index.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    backbone: str
    is_body: bool
    program: int

    @property
    def is_gemm(self) -> bool:
        """Whether it multiplies matrices, or convolves."""
        if self.kind == "runtime_fusion":
            return self.backbone in _BACKBONES
        return self.kind in _MULTIPLYING and not self.is_body

    @property
    def matmuls(self) -> set[str]:
        """Names of the MatMul and Conv nodes in it. A linear layer in 16 bit may be a Gemm."""
        return {node for node in self.nodes if any(kind in node for kind in _PRODUCTS)}

    @property
    def is_attention(self) -> bool:
        """Whether it is TensorRT's fused attention, or our plugin, the only custom layer of exported graphs."""
        return self.name.startswith(FUSED_ATTENTION) or self.kind == "custom_layer"


@dataclass(frozen=True)
class Finding:
    """A layer, attention or other GEMM as planned and as found, the worst of the engine's programs."""

    name: str
    planned: str
    found: str
    passed: bool


def read_kernels(engine: str | Path) -> list[Kernel]:
    """Every kernel of every program in a serialized engine, in order.

    Raises ValueError if the file holds no compiled program as text: it is no engine, or one of another TensorRT.
    """
    path = Path(engine)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    kernels: list[Kernel] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        for index, text in enumerate(_programs(blob)):
            kernels += _read_program(text, index)
    if not kernels:
        raise ValueError(
            f"{path}: no compiled program found in it; `quant audit` reads engines of TensorRT-RTX and TensorRT that "
            "were built with detailed profiling, as `quant export --to tensorrt` does"
        )
    return kernels


def audit(
    engine: str | Path,
    plan: Plan | None = None,
    *,
    attention: str | None = None,
    attention_nodes: Sequence[str] = (),
    exported: Collection[str] | None = None,
) -> list[Finding]:
    """Compares an engine with a plan: one finding per planned layer, then other GEMMs, then attentions.

    Args:
        engine: a serialized engine.
        plan: without one, every GEMM is listed with its precision, and passes.
        attention: required precision of attention, `fp8` or `half`; by default the plan's, if it has one.
        attention_nodes: names of the attention nodes of the graph; one that is not fused in the engine is a finding.
        exported: the linear layers in the graph. Others, such as a pooler with an unused output, may be missing.

    Raises:
        ValueError: the file is no engine that can be read.
    """
    kernels = read_kernels(engine)
    planned = {layer.name: layer for layer in plan.quantized if layer.kind in _AUDITED} if plan else {}
    if attention is None and plan is not None and plan.attention is not None:
        attention = _ELEMENTS.get(plan.attention.element.name.lower(), "half")
    findings = [
        _audit_layer(layer, kernels)
        if exported is None or name in exported
        else Finding(name, planned_precision(layer), NOT_EXPORTED, True)
        for name, layer in planned.items()
    ]
    return [*findings, *_audit_unplanned(kernels, planned), *_audit_attention(kernels, attention, attention_nodes)]


def failures(findings: Iterable[Finding]) -> list[str]:
    """One clause for each finding that did not pass."""
    return [f"{f.name}: planned {f.planned}, found {f.found}" for f in findings if not f.passed]


def fallback_message(problems: Sequence[str]) -> str:
    """The error for layers that do not run as planned."""
    shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
    return (
        f"not run as planned in the engine: {shown}. Change the formats in the plan, or "
        "pass --allow-fallback to take the engine as it is"
    )


def receipt_path(engine: str | Path) -> Path:
    """The file of an engine's receipt."""
    return Path(f"{engine}.json")


def planned_precision(layer: LayerPlan) -> str:
    """The precision in which a planned layer should run."""
    assert layer.weight is not None
    weight = _ELEMENTS.get(layer.weight.element.name.lower(), layer.weight.element.name.lower())
    if layer.activation is None:
        return f"half, {weight} weights"
    activation = _ELEMENTS.get(layer.activation.element.name.lower(), layer.activation.element.name.lower())
    return weight if weight == activation else f"{activation}, {weight} weights"


def _programs(blob: mmap.mmap) -> Iterator[str]:
    """The compiled programs in an engine, each a text that ends with a zero byte."""
    for match in _HEADER.finditer(blob):
        end = blob.find(b"\0", match.start())
        yield blob[match.start() : end if end >= 0 else len(blob)].decode("latin-1")


def _read_program(text: str, index: int) -> list[Kernel]:
    # Tensors are declared first; then follow the kernels of `main`, and a program that computes shapes.
    operands = dict(filter(None, (_operand(match[1]) for match in _TENSOR.finditer(text))))
    start = text.find("\nmain {")
    stop = text.find("\nshape_main {", start)
    # Bodies of runtime fusions are programs of their own, and are told by these marks.
    is_body = "region=runtime-fusion-consts" in text or "accelerators={*}" in text
    kernels = []
    for match in _LINE.finditer(text, max(start, 0), stop if stop > 0 else len(text)):
        inputs, outputs, layers = (_NAMES[key].search(match[3]) for key in ("input", "output", "layers"))
        if inputs is None or outputs is None or layers is None:
            continue
        read, written = (
            tuple(
                operands.get(name, Operand(name, "unknown", (), False)) for name in re.findall(r'"([^"]*)"', names[1])
            )
            for names in (inputs, outputs)
        )
        nodes = tuple(_NODE.findall(layers[1]))
        backbone = re.search(r"\bbackbone=(\w+)", match[3])
        kernels.append(
            Kernel(
                kind=match[1],
                name=match[2].strip('"'),
                nodes=nodes,
                inputs=read,
                outputs=tuple(o.name for o in written),
                backbone=backbone[1] if backbone else "",
                is_body=is_body,
                program=index,
            )
        )
    return kernels


def _operand(line: str) -> tuple[str, Operand] | None:
    name, kind = re.search(r' name="([^"]*)"', line), re.search(r" type=(\w+)", line)
    if name is None or kind is None:
        return None
    dims = re.search(r" dims=\{([^}]*)\}", line)
    sizes = re.findall(r'"[^"]*"|\d+', dims[1]) if dims else []
    shape = tuple(int(size) if size.isdigit() else None for size in sizes)
    base = re.search(r' base="([^"]*)"', line)
    stored = "const_payload_size=" in line
    return name[1], Operand(base[1] if base else name[1], _TYPES.get(kind[1], kind[1]), shape, stored)


def _is_gemm_of(kernel: Kernel, layer: str) -> bool:
    """Whether a kernel is the GEMM of a layer."""
    return kernel.is_gemm and any(node.startswith(f"{layer}{kind}") for node in kernel.nodes for kind in _PRODUCTS)


def _audit_layer(layer: LayerPlan, kernels: Sequence[Kernel]) -> Finding:
    planned = planned_precision(layer)
    precisions = [_precision(kernel, kernels) for kernel in kernels if _is_gemm_of(kernel, layer.name)]
    if not precisions:
        return Finding(layer.name, planned, "no GEMM of its name in the engine", False)
    wrong = [precision for precision in precisions if precision != planned]
    return Finding(layer.name, planned, (wrong or precisions)[0], not wrong)


def _audit_unplanned(kernels: Sequence[Kernel], planned: Mapping[str, Any]) -> Iterator[Finding]:
    """GEMMs that no planned layer owns: layers kept in 16 bit or, without a plan, all of them."""
    seen = set()
    for kernel in kernels:
        names = [node.rpartition("/")[0] for node in kernel.nodes if node in kernel.matmuls] or kernel.nodes
        name = "+".join(names) or kernel.name
        if kernel.is_gemm and name not in seen and not any(_is_gemm_of(kernel, layer) for layer in planned):
            seen.add(name)
            yield Finding(name, "16 bit" if planned else UNPLANNED, _precision(kernel, kernels), True)


def _audit_attention(kernels: Sequence[Kernel], required: str | None, nodes: Sequence[str]) -> Iterator[Finding]:
    """Fused attentions, and attention nodes of the graph that were not fused."""
    precisions: dict[str, str] = {}
    for kernel in kernels:
        if kernel.is_attention and not kernel.is_body:
            name = next((node for node in kernel.nodes if node in nodes), "+".join(kernel.nodes) or kernel.name)
            # The first three are q, k and v; shapes, scales and masks follow.
            types = [operand.type for operand in kernel.inputs if operand.is_matrix][:3]
            precision = types[0] if len(set(types)) == 1 else "/".join(types)
            # The worst of the engine's programs counts: only a precision that passes is replaced.
            if precisions.get(name) in (None, required):
                precisions[name] = precision
    for name in dict.fromkeys((*precisions, *nodes)):
        precision = precisions.get(name, "not fused")
        layer = name.rpartition("/")[0] or name
        yield Finding(layer, required or UNPLANNED, precision, required in (None, precision))


def _precision(gemm: Kernel, kernels: Sequence[Kernel]) -> str:
    """The types of a GEMM's operands and, for a weight in 16 bit, of the codes that it came from."""
    matrices = [operand for operand in gemm.inputs if operand.is_matrix]
    if gemm.kind == "runtime_fusion":
        # The fusion's operands are those of all its parts; the GEMM among the parts has the types that are multiplied.
        inside = [k for k in kernels if k.is_body and k.kind in _MULTIPLYING and k.matmuls & gemm.matmuls]
        multiplied = inside[0] if inside else None
    else:
        multiplied = gemm
    if multiplied is None or len(multiplied.inputs) < 2:
        return "unknown"
    activation, weight = (operand.type for operand in multiplied.inputs[:2])
    if _BITS.get(weight, 16) >= 16:
        # The weight was unpacked to 16 bit inside this kernel, or by another kernel that writes this one's operand.
        read = {(gemm.program, operand.name) for operand in matrices}
        unpackers = [k for k in kernels if not k.is_gemm and any((k.program, name) in read for name in k.outputs)]
        near = [*matrices, *(operand for kernel in unpackers for operand in kernel.inputs)]
        weight = _stored_type(near, multiplied.inputs[1]) or weight
    if weight == activation or _BITS.get(weight, 16) >= 16:
        return activation
    return f"{activation}, {weight} weights"


def _stored_type(operands: Iterable[Operand], weight: Operand) -> str | None:
    """The type that a weight is stored in: the narrowest among constants of about its size.

    Block scales are far smaller than the weight. The builder expands MXFP8's scales to the weight's size, in a wider
    type.
    """
    constants = [o for o in operands if o.constant and o.is_matrix and 8 * _numel(o.dims) >= _numel(weight.dims)]
    return min(constants, key=lambda o: _BITS[o.type]).type if constants else None


def _numel(dims: tuple[int | None, ...]) -> int:
    count = 1
    for dim in dims:
        count *= dim or 1
    return count
