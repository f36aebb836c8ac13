"""Reads the text of a compiled program: its kernels, their operands, and the ONNX nodes that were fused into them.

    tensor={ … const_payload_size=2048 dims={ 1 64 64 } name="w1" offset=32 … strides={ 4096 1 64 } type=fp4_e2m1 }
    fully_connected={ name="a/MatMul+b/MatMul" output={"y" } input={"x4" "w1" …} … alpha=33A76CAC … layers="…" }
    function={ name=__myl_Dyna fqn=__myl_Dyna_0x8718… args={ "x" … } … layers="[ONNX Layer: a/Quantize]" }

`offset` of a constant is its index in the engine's table (`engine_file`), and dims and strides say how its elements lie
there, swizzled block scales included.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass

# TensorRT's kernels for several queries, and for a single one as in decoding.
FUSED_ATTENTION = ("_gemm_mha_v", "_gemv_mha_v")
PRODUCTS = ("/MatMul", "/Gemm", "/Conv")
MULTIPLYING = ("fully_connected", "convolution", "corrltn", "deconvolution")
_BACKBONES = ("gemm", "corrltn", "conv", "deconv")
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
BITS = {"fp4": 4, "int4": 4, "fp8": 8, "int8": 8, "half": 16, "float": 32}
#   tensor={ … dims={ 256 512 } … name="w1" … type=fp4_e2m1 … const_payload_size=65536 … }
_TENSOR = re.compile(r"^ +(?:sub_)?tensor=\{(.*)$", re.M)
_FIELD = re.compile(r' (\w+)=("[^"]*"|\{[^}]*\}|\S+)')
#   fully_connected={ name="a/matmul+b/matmul" output={"y" } input={"x4" "w1" } … layers="…" }
_LINE = re.compile(r'^  (\w+)=\{ name=("[^"]*"|\S+) (.*)$', re.M)
# Of `layers`: [ONNX Layer: a/matmul]\x1f[ONNX Layer: b/matmul]; a node's own name may hold brackets.
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f?\[ONNX Layer: |$)")
_NAMES = {
    "input": re.compile(r'\b(?:input_args|input)=\{((?:\s*"[^"]*")*)\s*\}'),
    "output": re.compile(r'\b(?:output_args|output)=\{((?:\s*"[^"]*")*)\s*\}'),
    "layers": re.compile(r'\blayers="([^"]*)"'),
}
_ALPHA = re.compile(r"\balpha=([0-9A-F]{8})(?:f32)?\b")


@dataclass(frozen=True)
class KernelOperand:
    """A tensor that a kernel reads or writes; views of one tensor share its `name`.

    Attributes:
        name: of the tensor.
        type: a key of `BITS`, or the compiler's word.
        dims: sizes; a dynamic one is None.
        constant: whether it is in the engine.
        index: of a constant in the engine's table; None for other tensors, and inside a `runtime_fusion`.
        strides: of a constant, in elements.
        stored: the compiler's word for the type.
    """

    name: str
    type: str
    dims: tuple[int | None, ...]
    constant: bool
    index: int | None = None
    strides: tuple[int, ...] = ()
    stored: str = ""

    @property
    def size(self) -> int:
        """Number of elements; a dynamic dim counts as one."""
        return math.prod(dim or 1 for dim in self.dims)

    @property
    def is_matrix(self) -> bool:
        """Whether it can be an operand of a GEMM, and is no scale, bias or shape."""
        return self.type in BITS and sum(dim != 1 for dim in self.dims) > 1


@dataclass(frozen=True)
class Kernel:
    """One line of a compiled program.

    `kind` is the compiler's word, such as `fully_connected`, whose inputs are activation and weight, or
    `runtime_fusion`, whose `backbone` may be `gemm`; `nodes` are the ONNX nodes fused into it; `is_body` marks a part
    of a `runtime_fusion`; `program` and `profile` are indices; `alpha` multiplies the product, and `source` names
    the CUDA function.
    """

    kind: str
    name: str
    nodes: tuple[str, ...]
    inputs: tuple[KernelOperand, ...]
    outputs: tuple[str, ...]
    backbone: str
    is_body: bool
    program: int
    profile: int = 0
    alpha: float | None = None
    source: str = ""

    @property
    def is_gemm(self) -> bool:
        """Whether it multiplies matrices, or convolves."""
        if self.kind == "runtime_fusion":
            return self.backbone in _BACKBONES
        return self.kind in MULTIPLYING and not self.is_body

    @property
    def matmuls(self) -> set[str]:
        """Names of the MatMul and Conv nodes in it. A linear layer in 16 bit may be a Gemm."""
        return {node for node in self.nodes if any(kind in node for kind in PRODUCTS)}

    @property
    def is_attention(self) -> bool:
        """Whether it is TensorRT's fused attention, or our plugin, the only custom layer of exported graphs."""
        return self.name.startswith(FUSED_ATTENTION) or self.kind == "custom_layer"

    @property
    def modules(self) -> set[str]:
        """The modules whose nodes were fused into it: `model.norm` of `model.norm/Mul_3 [profile 1]`."""
        return {node.rpartition("/")[0] for node in self.nodes if "/" in node}


def read_program(text: str, origin: tuple[int, int, bool], sizes: dict[int, int]) -> list[Kernel]:
    """Reads the kernels of a program; `origin` is its index, its profile, and whether it is a body.

    `sizes` gets the sizes of its constants.
    """
    index, profile, is_body = origin
    # Tensors are declared first; then follow the kernels of `main`, and a program that computes shapes.
    operands: dict[str, KernelOperand] = {}
    for match in _TENSOR.finditer(text):
        fields = dict(_FIELD.findall(match[1]))
        if "name" in fields and "type" in fields:
            operand = _operand(fields)
            operands[fields["name"].strip('"')] = operand
            if operand.index is not None:
                sizes[operand.index] = int(fields["const_payload_size"])
    start = text.find("\nmain {")
    stop = text.find("\nshape_main {", start)
    kernels = []
    for match in _LINE.finditer(text, max(start, 0), stop if stop > 0 else len(text)):
        inputs, outputs, layers = (_NAMES[key].search(match[3]) for key in ("input", "output", "layers"))
        if inputs is None or outputs is None or layers is None:
            continue
        read, written = (
            tuple(
                operands.get(name, KernelOperand(name, "unknown", (), False))
                for name in re.findall(r'"([^"]*)"', names[1])
            )
            for names in (inputs, outputs)
        )
        fields = dict(_FIELD.findall(" " + match[3]))
        alpha = _ALPHA.search(match[3])
        kernels.append(
            Kernel(
                kind=match[1],
                name=match[2].strip('"'),
                nodes=tuple(_NODE.findall(layers[1])),
                inputs=read,
                outputs=tuple(o.name for o in written),
                backbone=fields.get("backbone", ""),
                is_body=is_body,
                program=index,
                profile=profile,
                alpha=struct.unpack(">f", bytes.fromhex(alpha[1]))[0] if alpha else None,
                source=fields.get("fqn", ""),
            )
        )
    return kernels


def _operand(fields: dict[str, str]) -> KernelOperand:
    """Returns the tensor that a line declares."""
    sizes = re.findall(r'"[^"]*"|\d+', fields.get("dims", ""))
    steps = re.findall(r'"[^"]*"|\d+', fields.get("strides", ""))
    is_stored = "const_payload_size" in fields
    # In a runtime fusion's body `offset` counts bytes of constants of its own.
    in_table = is_stored and fields.get("region") != "runtime-fusion-consts"
    return KernelOperand(
        name=fields.get("base", fields["name"]).strip('"'),
        type=_TYPES.get(fields["type"], fields["type"]),
        dims=tuple(int(size) if size.isdigit() else None for size in sizes),
        constant=is_stored,
        index=int(fields["offset"]) if in_table else None,
        strides=tuple(int(step) if step.isdigit() else 0 for step in steps),
        stored=fields["type"],
    )
