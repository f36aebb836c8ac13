"""Reads a serialized engine as data: its compiled programs, the constants that they read, and its inputs.

TensorRT-RTX 1 and TensorRT 10 write an engine as a stream of tagged records. Three kinds of them are of use here:

    bindings     names of the engine's inputs and outputs, and the network's name, as length and bytes
    programs     one text for each optimization profile, and one for the body of each `runtime_fusion` (`program`)
    constants    one table for all programs; each constant begins at a multiple of 128 bytes after the table's start

Small kernels are stored as CUDA source and compiled on the GPU that runs them, so a scale that became an immediate can
be read too: `float __v13 = 0x1.1dc138p-10f`.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

# Reads the text of a compiled program: its kernels, their operands, and the ONNX nodes that were fused into them.
#
#     tensor={ … const_payload_size=2048 dims={ 1 64 64 } name="w1" offset=32 … strides={ 4096 1 64 } type=fp4_e2m1 }
#     fully_connected={ name="a/MatMul+b/MatMul" output={"y" } input={"x4" "w1" …} … alpha=33A76CAC … layers="…" }
#     function={ name=__myl_Dyna fqn=__myl_Dyna_0x8718… args={ "x" … } … layers="[ONNX Layer: a/Quantize]" }
#
# `offset` of a constant is its index in the engine's table (`engine_file`), and dims and strides say how its elements
# lie there, swizzled block scales included.


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


RECORD = "blockscale engine "
"""What the network's name begins with; the audit's record follows, a JSON object."""

# Bits of an element of a constant, by the compiler's word.
_STORED_BITS = {"fp4_e2m1": 4, "int4": 4, "half": 16, "bf16": 16, "bfloat16": 16, "float": 32, "int32": 32, "int64": 64}
_ALIGNMENT = 128
# An engine of TensorRT-RTX begins with this word, and has its length in bytes at this position.
_MAGIC, _LENGTH_AT = b"vtrt", 16
# The table of constants ends before this mark, and a few kilobytes of records lie between it and the table's end.
_TABLE_END = b"\x99\x8b\x8d\x8b"
_SLACK = 1 << 16
# A program begins with its header and ends with a zero byte.
_HEADER = re.compile(rb"header \{\n  version = ")
_PROFILE = re.compile(r"\[profile (\d+)\]")
_SOURCE = re.compile(rb"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(")
# TensorRT-RTX 1.7 writes 0x1.1dc138p-10f, and 1.5 (1.090123456e-03).
_IMMEDIATE = re.compile(rb"\b0x[0-9a-f]\.?[0-9a-f]*p[+-]?\d+f?\b|\b\d\.\d{6,}e[+-]\d+\b")
# A string in the tagged stream is its length twice, between tags, and its bytes; 0x43 opens a binding's record.
_STRING = rb"\x13\x80\x01\x00(.{8})\x01\x80\x0c\x80\x01\x00\1"
_OPENING = rb"C\x80\x01\x00\x16\x80\x01\x00\x07\x80\x01\x00.{4}A\x80\x01\x00"
_WORD = re.compile(_STRING, re.S)
_BINDING = re.compile(_OPENING + _STRING, re.S)
# Further on in a binding's record: 0 for an input, 1 for an output; then the binding's index.
_DIRECTION = re.compile(rb"\(\x80\x01\x00\x07\x80\x01\x00(.)\0\0\0(?:\x06\x80\x01\x00(.{4}))?", re.S)
# The inputs of a whole program, in the order of the engine's bindings, each with a counter: "lengths.1".
_INPUTS = re.compile(r"^  inputs=\{(.*)$", re.M)
_NAMED = re.compile(r'"([^"]*?)(?: \[profile \d+\])?\.\d+"')


@dataclass(eq=False)
class Engine:
    """A serialized engine, read as far as an audit needs it.

    Attributes:
        path: the file.
        kernels: of all programs, in order.
        sizes: bytes of each constant by its index.
        unread: names of the inputs that no layer of the engine takes.
        updated: of each input that is updated in place, the output that it becomes.
        record: the JSON object that our builder put into the network's name; empty for other engines.
    """

    path: Path
    kernels: list[Kernel]
    sizes: dict[int, int]
    unread: list[str]
    updated: dict[str, str]
    record: dict[str, Any]
    _immediates: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """Where in the file the table of constants may begin: one position as a rule, and none if it was not found."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            return _locate(blob, self.sizes)

    @cached_property
    def _offsets(self) -> dict[int, int]:
        return _offsets(self.sizes)

    def constant(self, operand: KernelOperand) -> np.ndarray:
        """Returns the elements of a constant, in the order of its dims: codes as uint8, numbers as float32 or int."""
        assert operand.index is not None
        size, bits = self.sizes[operand.index], _STORED_BITS.get(operand.stored, 8)
        data = np.fromfile(self.path, np.uint8, size, offset=self.starts[0] + self._offsets[operand.index])
        if bits == 4:
            # Two codes a byte, the even index in the low nibble.
            data = np.stack([data & 15, data >> 4], axis=1).reshape(-1)
        else:
            data = _numbers(data, operand.stored)
        dims = tuple(dim or 1 for dim in operand.dims)
        strides = tuple(step if dim > 1 else 0 for dim, step in zip(dims, operand.strides, strict=True))
        span = 1 + sum((dim - 1) * step for dim, step in zip(dims, strides, strict=True))
        if span > len(data):
            raise ValueError(f"{self.path}: the constant {operand.name} has {len(data)} elements, and its dims {span}")
        steps = tuple(step * data.itemsize for step in strides)
        return np.lib.stride_tricks.as_strided(data, dims, steps)

    def scalars(self, kernel: Kernel) -> tuple[float, ...]:
        """Returns every single number that a kernel multiplies by: alpha, constants of one value, and immediates."""
        numbers = [] if kernel.alpha is None else [kernel.alpha]
        for operand in kernel.inputs:
            # A convolution has its scale once for each channel.
            is_vector = sum(dim != 1 for dim in operand.dims) <= 1
            if operand.index is not None and self.starts and is_vector and operand.type in BITS:
                values = self.constant(operand).reshape(-1)
                numbers += [float(values[0])] if (values == values[0]).all() else []
        return (*numbers, *self._immediates.get(kernel.source, ()))


def read_engine(engine: str | Path) -> Engine:
    """Reads a serialized engine.

    Raises ValueError if the file holds no compiled program as text: it is no engine, or one of another TensorRT.
    """
    path = Path(engine)
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    kernels: list[Kernel] = []
    sizes: dict[int, int] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        _check_length(path, blob)
        profile = 0
        positions = [match.start() for match in _HEADER.finditer(blob)]
        for index, position in enumerate(positions):
            end = blob.find(b"\0", position)
            text = blob[position : end if end >= 0 else len(blob)].decode("latin-1")
            # Bodies of runtime fusions are programs of their own, and are told by these marks.
            is_body = "region=runtime-fusion-consts" in text or "accelerators={*}" in text
            if not is_body:
                marked = _PROFILE.search(text)
                profile = int(marked[1]) if marked else 0
            try:
                kernels += read_program(text, (index, profile, is_body), sizes)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{path}: program {index} in it cannot be read ({error!r}): the file is damaged, or of another "
                    "TensorRT; export it again"
                ) from error
        if not kernels:
            raise ValueError(
                f"{path}: no compiled program found in it; `quant audit` reads engines of TensorRT-RTX and TensorRT "
                "that were built with detailed profiling, as `quant export --to tensorrt` does"
            )
        immediates = _read_immediates(blob, {kernel.source for kernel in kernels if kernel.source})
        head = blob[: positions[0]]
        bindings = _bindings(head)
        first = blob[positions[0] : max(blob.find(b"\0", positions[0]), positions[0])].decode("latin-1")
        updated = _updated_inputs(bindings, first)
    return Engine(path, kernels, sizes, _unread_inputs(head, bindings), updated, _read_record(head), immediates)


def _check_length(path: Path, blob: mmap.mmap) -> None:
    """Raises ValueError for an engine of TensorRT-RTX that was cut short: its constants come last."""
    if blob[: len(_MAGIC)] == _MAGIC and len(blob) >= _LENGTH_AT + 8:
        (length,) = struct.unpack_from("<Q", blob, _LENGTH_AT)
        if length > len(blob):
            raise ValueError(
                f"{path}: the engine has {length} bytes, and this file {len(blob)}: it was cut short; export it again"
            )


def _offsets(sizes: dict[int, int]) -> dict[int, int]:
    """Returns where each constant begins in the table: they follow each other by index, at multiples of 128 bytes."""
    offsets, position = {}, 0
    for index in sorted(sizes):
        offsets[index] = position
        position += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
    return offsets


def _locate(blob: mmap.mmap, sizes: dict[int, int]) -> list[int]:
    """Returns where the table of constants may begin.

    The position is not written anywhere. Constants are padded with zeros to 128 bytes, so it is one at which every
    padding is zero; with a few paddings of up to 126 bytes no other position passes. A table without any paddings ends
    where the next record begins, at a multiple of eight bytes.
    """
    offsets, last = _offsets(sizes), max(sizes, default=-1)
    end = blob.rfind(_TABLE_END)
    used = offsets[last] + sizes[last] if sizes else 0
    if not sizes or end < used:
        return []
    paddings = [
        (offsets[index] + size, -size % _ALIGNMENT)
        for index, size in sizes.items()
        if index != last and size % _ALIGNMENT
    ]
    if not paddings:
        return [end - used, end - used - 4]
    # The longest paddings first: they rule out most positions.
    paddings.sort(key=lambda padding: -padding[1])
    for start in range(end - used, max(end - used - _SLACK, -1), -1):
        if all(blob[start + begin : start + begin + length].count(0) == length for begin, length in paddings):
            # A longer run of zeros before the table passes as well; the table is the position nearest to its end.
            return [start]
    return []


def _read_immediates(blob: mmap.mmap, sources: set[str]) -> dict[str, tuple[float, ...]]:
    """Returns the floating-point numbers in the CUDA source of each of these functions."""
    numbers: dict[str, tuple[float, ...]] = {}
    for match in _SOURCE.finditer(blob):
        name = match[1].decode()
        if name in sources and name not in numbers:
            end = blob.find(b"\0", match.start())
            text = blob[match.start() : end if end >= 0 else len(blob)]
            words = [word.decode() for word in _IMMEDIATE.findall(text)]
            numbers[name] = tuple(float.fromhex(w.rstrip("f")) if w.startswith("0x") else float(w) for w in words)
    return numbers


def _bindings(head: bytes) -> dict[str, tuple[bool, int]]:
    """Returns of each input and output of the first profile whether it is an input, and its index."""
    bindings, matches = {}, list(_BINDING.finditer(head))
    for match, following in zip(matches, [*matches[1:], None], strict=True):
        name = _text(head, match)
        direction = _DIRECTION.search(head, match.end() + len(name), following.start() if following else len(head))
        # Further profiles have bindings of their own, `input_ids [profile 1]`, for the same tensor.
        if direction is not None and not _PROFILE.search(name):
            index = struct.unpack("<i", direction[2])[0] if direction[2] else -1
            bindings[name] = direction[1] == b"\0", index
    return bindings


def _unread_inputs(head: bytes, bindings: Mapping[str, tuple[bool, int]]) -> list[str]:
    """Returns the engine's inputs that no layer takes: their names occur in the record of the binding only."""
    words = Counter(_text(head, match) for match in _WORD.finditer(head))
    return [name for name, (is_input, _) in bindings.items() if is_input and words[name] < 2]


def _updated_inputs(bindings: Mapping[str, tuple[bool, int]], program: str) -> dict[str, str]:
    """Returns of each input that the engine updates in place the output that it becomes.

    A program has the inputs in the order of the bindings, and an updated one by the name of its output. Where this is
    not so, nothing is known.
    """
    names = sorted((name for name, (is_input, _) in bindings.items() if is_input), key=lambda name: bindings[name][1])
    line = _INPUTS.search(program)
    read = _NAMED.findall(line[1])[: len(names)] if line else []
    updated = {name: output for name, output in zip(names, read, strict=False) if name != output}
    is_known = all(index >= 0 for _, index in bindings.values()) and len(set(updated.values())) == len(updated)
    are_outputs = all(output in bindings and not bindings[output][0] for output in updated.values())
    return updated if is_known and are_outputs else {}


def _text(head: bytes, match: re.Match[bytes]) -> str:
    """Returns the string whose lengths a match ends with."""
    return head[match.end() : match.end() + struct.unpack("<Q", match[1])[0]].decode("utf-8", "replace")


def _read_record(head: bytes) -> dict[str, Any]:
    start = head.find(RECORD.encode())
    if start < 0:
        return {}
    try:
        document, _ = json.JSONDecoder().raw_decode(head[start + len(RECORD) :].decode("utf-8", "replace"))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _numbers(data: np.ndarray, stored: str) -> np.ndarray:
    """Returns bytes as numbers of the compiler's type; types of 8 bit stay codes."""
    if stored == "half":
        return data.view(np.float16).astype(np.float32)
    if stored in ("bf16", "bfloat16"):
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    views = {"float": np.float32, "int32": np.int32, "int64": np.int64}
    return data.view(views[stored]) if stored in views else data
