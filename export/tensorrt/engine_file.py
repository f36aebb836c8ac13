"""Reads a serialized engine as data: its compiled programs, the constants that they read, and its inputs.

TensorRT-RTX 1 and TensorRT 10 write an engine as a stream of tagged records. Three kinds of them are of use here:

    bindings     names of the engine's inputs and outputs, and the network's name, as length and bytes
    programs     one text for each optimization profile, and one for the body of each `runtime_fusion`
    constants    one table for all programs; each constant begins at a multiple of 128 bytes after the table's start

The text of a program declares tensors, then lists kernels with the ONNX nodes that were fused into each:

    tensor={ … const_payload_size=2048 dims={ 1 64 64 } name="w1" offset=32 … strides={ 4096 1 64 } type=fp4_e2m1 }
    fully_connected={ name="a/MatMul+b/MatMul" output={"y" } input={"x4" "w1" …} … alpha=33A76CAC … layers="…" }
    function={ name=__myl_Dyna fqn=__myl_Dyna_0x8718… args={ "x" … } … layers="[ONNX Layer: a/Quantize]" }

`offset` of a constant is its index in the table. Small kernels are stored as CUDA source and compiled on the GPU that
runs them. None of it is documented: it was read from engines of TensorRT-RTX 1.5.0 to 1.7.1, and an engine of another
layout has no kernels, or no table, and the audit says so.
"""

import contextlib
import hashlib
import json
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quant.base.json_files import json_text

RECORD = "blockscale engine "
"""What the network's name begins with; the audit's record follows, a JSON object."""
NAME_LIMIT = 3900
"""Characters of a record: TensorRT drops a longer name than 4,096, and the worker adds the builder's."""
# TensorRT's kernels for several queries, and for a single one as in decoding.
FUSED_ATTENTION = ("_gemm_mha_v", "_gemv_mha_v")
PRODUCTS = ("/MatMul", "/Gemm", "/Conv")
MULTIPLYING = ("fully_connected", "convolution", "corrltn", "deconvolution")
BITS = {"fp4": 4, "int4": 4, "fp8": 8, "int8": 8, "half": 16, "float": 32}
# The compiler's types, by the names used here; all others keep the compiler's word.
_TYPES = {"fp4_e2m1": "fp4", "fp8_e4m3": "fp8", "bf16": "half", "bfloat16": "half"}
_TENSOR = re.compile(r"^ +(?:sub_)?tensor=\{(.*)$", re.M)
_FIELD = re.compile(r' (\w+)=("[^"]*"|\{[^}]*\}|\S+)')
_LINE = re.compile(r'^  (\w+)=\{ name=("[^"]*"|\S+) (.*)$', re.M)
# Of `layers`: [ONNX Layer: a/matmul]\x1f[ONNX Layer: b/matmul]; a node's own name may hold brackets.
_NODE = re.compile(r"\[ONNX Layer: (.*?)\](?=\x1f?\[ONNX Layer: |$)")
_NAMES = {
    "input": re.compile(r'\b(?:input_args|input)=\{((?:\s*"[^"]*")*)\s*\}'),
    "output": re.compile(r'\b(?:output_args|output)=\{((?:\s*"[^"]*")*)\s*\}'),
    "layers": re.compile(r'\blayers="([^"]*)"'),
}
# Names that the compiler gives to tensors and blocks; numbers in quotes are literals.
_GIVEN = re.compile(r'"(?!-?\d)[^"]*"|\bbb\d+\b')
_ALIGNMENT = 128
# An engine of TensorRT-RTX begins with this word, and has its length in bytes at this position.
_MAGIC, _LENGTH_AT = b"vtrt", 16
# The table of constants ends before this mark, and a few kilobytes of records lie between it and the table's end.
_TABLE_END, _SLACK = b"\x99\x8b\x8d\x8b", 1 << 16
_HEADER = re.compile(rb"header \{\n  version = ")  # of a program, which ends with a zero byte
_PROFILE = re.compile(r"\[profile (\d+)\]")
_SOURCE = re.compile(rb"__global__ void ")  # in the CUDA source of a kernel, which ends with a zero byte
# A string in the tagged stream is its length twice, between tags, and its bytes; 0x43 opens a binding's record.
_STRING = rb"\x13\x80\x01\x00(.{8})\x01\x80\x0c\x80\x01\x00\1"
_OPENING = rb"C\x80\x01\x00\x16\x80\x01\x00\x07\x80\x01\x00.{4}A\x80\x01\x00"
_WORD, _BINDING = re.compile(_STRING, re.S), re.compile(_OPENING + _STRING, re.S)
# Further on in a binding's record: 0 for an input, 1 for an output; then the binding's index.
_DIRECTION = re.compile(rb"\(\x80\x01\x00\x07\x80\x01\x00(.)\0\0\0(?:\x06\x80\x01\x00(.{4}))?", re.S)
# The inputs of a whole program, in the order of the engine's bindings, each with a counter: "lengths.1".
_INPUTS = re.compile(r"^  inputs=\{(.*)$", re.M)
_NAMED = re.compile(r'"([^"]*?)(?: \[profile \d+\])?\.\d+"')


@dataclass(frozen=True)
class KernelOperand:
    """A tensor that a kernel reads or writes; views of one tensor share its `name`."""

    name: str
    type: str  # a key of `BITS`, or the compiler's word
    dims: tuple[int | None, ...]  # a dynamic one is None
    constant: bool
    index: int | None = None  # of a constant in the engine's table; None inside a `runtime_fusion`
    stored: str = ""  # the compiler's word for the type
    layout: str = ""  # strides and, of a view, where it begins

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
    """One line of a compiled program."""

    kind: str  # `fully_connected`, whose inputs are activation and weight; `runtime_fusion`, of a `backbone`; …
    name: str
    nodes: tuple[str, ...]  # the ONNX nodes fused into it
    inputs: tuple[KernelOperand, ...]
    outputs: tuple[str, ...]
    backbone: str
    is_body: bool  # a part of a `runtime_fusion`
    program: int
    profile: int
    text: str  # the line without the names that the compiler gives

    @property
    def is_gemm(self) -> bool:
        """Whether it multiplies matrices, or convolves."""
        if self.kind == "runtime_fusion":
            return self.backbone in ("gemm", "corrltn", "conv", "deconv")
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


@dataclass(frozen=True, eq=False)
class Engine:
    """A serialized engine, read as far as an audit needs it."""

    path: Path
    kernels: list[Kernel]  # of all programs, in order
    sizes: dict[int, int]  # bytes of each constant by its index
    offsets: dict[int, int]  # where each constant begins in the table
    sources: list[bytes]  # the CUDA sources of kernels, sorted
    table: int | None  # where in the file the table of constants begins; None if it was not found
    bindings: dict[str, tuple[bool, int]]  # of each input and output, whether it is an input, and its index
    unread: list[str]  # inputs that no layer of the engine takes
    updated: dict[str, str]  # of each input that is updated in place, the output that it becomes
    # The JSON object that our builder put into the network's name, empty for other engines. Where its "contents" are
    # too long for a name, they are read from the receipt, and are a digest if that is missing or another engine's.
    record: dict[str, Any]

    def constant(self, operand: KernelOperand) -> bytes:
        """Returns the bytes of a constant, in the layout that its kernels read; none if it is not in the table."""
        if operand.index is None or self.table is None:
            return b""
        with self.path.open("rb") as file:
            file.seek(self.table + self.offsets[operand.index])
            return file.read(self.sizes[operand.index])


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
        if blob[: len(_MAGIC)] == _MAGIC and len(blob) >= _LENGTH_AT + 8:
            # Its constants come last.
            (length,) = struct.unpack_from("<Q", blob, _LENGTH_AT)
            if length > len(blob):
                raise ValueError(
                    f"{path}: the engine has {length} bytes, and this file {len(blob)}: it was cut short; export it "
                    "again"
                )
        positions, profile, texts = [match.start() for match in _HEADER.finditer(blob)], 0, []
        for index, position in enumerate(positions):
            texts.append(_terminated(blob, position).decode("latin-1"))
            # Bodies of runtime fusions are programs of their own, and are told by these marks.
            is_body = "region=runtime-fusion-consts" in texts[-1] or "accelerators={*}" in texts[-1]
            if not is_body:
                marked = _PROFILE.search(texts[-1])
                profile = int(marked[1]) if marked else 0
            try:
                of_program, of_constants = _read_program(texts[-1], index, profile, is_body)
            except (KeyError, ValueError) as error:
                raise ValueError(
                    f"{path}: program {index} in it cannot be read ({error!r}): the file is damaged, or of another "
                    "TensorRT; export it again"
                ) from error
            kernels, sizes = kernels + of_program, sizes | of_constants
        if not kernels:
            raise ValueError(
                f"{path}: no compiled program found in it; `quant check` reads engines of TensorRT-RTX and TensorRT "
                "that were built with detailed profiling, as `quant export --to tensorrt` does"
            )
        offsets, position = {}, 0
        for index in sorted(sizes):  # constants follow each other by index, at multiples of 128 bytes
            offsets[index] = position
            position += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        head = blob[: positions[0]]
        bindings = _bindings(head)
        words = Counter(_text(head, match) for match in _WORD.finditer(head))
        return Engine(
            path=path, kernels=kernels, sizes=sizes, offsets=offsets, table=_table_start(blob, sizes, offsets),
            sources=sorted(_terminated(blob, match.start()) for match in _SOURCE.finditer(blob)), bindings=bindings,
            # The name of an input that no layer takes occurs in the record of its binding only.
            unread=[name for name, (is_input, _) in bindings.items() if is_input and words[name] < 2],
            updated=_updated_inputs(bindings, texts[0]), record=_record(head, path),
        )  # fmt: skip


def _terminated(blob: mmap.mmap, position: int) -> bytes:
    end = blob.find(b"\0", position)
    return blob[position : end if end >= 0 else len(blob)]


def _read_program(text: str, index: int, profile: int, is_body: bool) -> tuple[list[Kernel], dict[int, int]]:
    """Returns the kernels of a program, and the sizes of its constants in bytes by their index."""
    # Tensors are declared first; then follow the kernels of `main`, and a program that computes shapes.
    operands: dict[str, KernelOperand] = {}
    sizes: dict[int, int] = {}
    for match in _TENSOR.finditer(text):
        fields = dict(_FIELD.findall(match[1]))
        if "name" in fields and "type" in fields:
            operand = operands[fields["name"].strip('"')] = _operand(fields)
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
        kernels.append(
            Kernel(
                kind=match[1], name=match[2].strip('"'), nodes=tuple(_NODE.findall(layers[1])), inputs=read,
                outputs=tuple(o.name for o in written), backbone=fields.get("backbone", ""), is_body=is_body,
                program=index, profile=profile, text=_GIVEN.sub("", match[0]),
            )
        )  # fmt: skip
    return kernels, sizes


def _operand(fields: dict[str, str]) -> KernelOperand:
    sizes = re.findall(r'"[^"]*"|\d+', fields.get("dims", ""))
    is_stored = "const_payload_size" in fields
    layout = ("strides", "offset", "const_offset") if "base" in fields else ("strides",)
    # In a runtime fusion's body `offset` counts bytes of constants of its own.
    in_table = is_stored and fields.get("region") != "runtime-fusion-consts"
    return KernelOperand(
        name=fields.get("base", fields["name"]).strip('"'),
        type=_TYPES.get(fields["type"], fields["type"]),
        dims=tuple(int(size) if size.isdigit() else None for size in sizes),
        constant=is_stored,
        index=int(fields["offset"]) if in_table else None,
        stored=fields["type"],
        layout=_GIVEN.sub("", " ".join(fields.get(key, "") for key in layout)),
    )


def _table_start(blob: mmap.mmap, sizes: dict[int, int], offsets: dict[int, int]) -> int | None:
    """Returns where the table of constants begins.

    The position is not written anywhere. Constants are padded with zeros to 128 bytes, so it is one at which every
    padding is zero; with a few paddings of up to 126 bytes no other position passes. A table without any paddings ends
    up to four bytes before the next record, at a multiple of eight bytes.
    """
    last, end = max(sizes, default=-1), blob.rfind(_TABLE_END)
    used = offsets[last] + sizes[last] if sizes else 0
    if not sizes or end < used:
        return None
    paddings = [(offsets[i] + size, -size % _ALIGNMENT) for i, size in sizes.items() if i != last and size % _ALIGNMENT]
    if not paddings:
        return end - used - 4
    # The longest paddings first: they rule out most positions.
    paddings.sort(key=lambda padding: -padding[1])
    # A longer run of zeros before the table passes as well; the table is the position nearest to its end.
    for start in range(end - used, max(end - used - _SLACK, -1), -1):
        if all(blob[start + begin : start + begin + length].count(0) == length for begin, length in paddings):
            return start
    return None


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


def receipt_path(engine: str | Path) -> Path:
    """Returns the file of an engine's receipt."""
    return Path(f"{engine}.json")


def digest_of(contents: Mapping[str, Any]) -> str:
    """Returns the digest that stands in a record for contents that its engine's receipt holds."""
    return hashlib.sha256(json_text(contents).encode()).hexdigest()


def _record(head: bytes, path: Path) -> dict[str, Any]:
    start = head.find(RECORD.encode())
    if start < 0:
        return {}
    try:
        document, _ = json.JSONDecoder().raw_decode(head[start + len(RECORD) :].decode("utf-8", "replace"))
    except ValueError:
        return {}
    if not isinstance(document, dict):
        return {}
    if isinstance(document.get("contents"), str):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            contents = json.loads(receipt_path(path).read_text(encoding="utf-8"))["engine"]["contents"]
            if digest_of(contents) == document["contents"]:
                document["contents"] = contents
    return document
