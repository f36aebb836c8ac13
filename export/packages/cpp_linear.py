"""`quant::linear` in packages for CPUs is one C++ function, `cpp/linear.h`, that Inductor calls as it is.

Replaced by PyTorch ops, a linear is some dozens of nodes, and tracing, fusing and compiling them anew for every layer
takes minutes for a model of 30 layers. As one op it is one node, and the function is compiled once a package. It rounds
inputs and decodes weights as the oracle does, and multiplies by PyTorch's own matrix product, so that a package has the
results of eager PyTorch.

The numbers and formats become tables of the C++ source: a format is data there, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quant.formats.format import FORMATS, Format
from quant.formats.number import Number
from quant.kernels.linear.ops import LINEAR

SOURCE = Path(__file__).with_name("cpp") / "linear.h"
# Packages of different versions may be loaded together, so the name is none that another library can see.
_DECLARATION = (
    '__attribute__((visibility("hidden"))) '
    "AOTITorchError aoti_torch_cpu_linear(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, AtenTensorHandle*, "
    "AtenTensorHandle*, AtenTensorHandle*, char const*, char const*, AtenTensorHandle*)"
)


def linear_settings() -> dict[str, Any]:
    """Returns the settings by which Inductor calls the function for `quant::linear`, and has its source."""
    # Inductor writes `extern "C" { extern DECLARATION; }` before its own code. The text closes this block after the
    # declaration and opens another, so that the definition stands between the two.
    shim = f'{_DECLARATION};\n}}\n{linear_source()}\nextern "C" {{\nextern {_DECLARATION}'
    namespace, name = LINEAR.split("::")
    return {"aot_inductor.custom_ops_to_c_shims": {getattr(getattr(torch.ops, namespace), name).default: [shim]}}


def has_cpp_linears(program: torch.export.ExportedProgram) -> bool:
    """Returns whether the function computes all linears of a graph; it has no input format with a rule of its own."""
    activations = {node.args[-1] for node in program.graph.nodes if str(node.target).startswith("quant.linear")}
    return all(not name or name in FORMATS for name in activations)


def linear_source() -> str:
    """Returns the C++ source, with the tables of all numbers and formats in it."""
    numbers = {number.name: number for format in FORMATS.values() for number in (format.element, format.scale)}
    lines = [_number(number) for number in numbers.values()]
    rows = ",\n".join(f"    {_format(format)}" for format in FORMATS.values())
    lines.append(f"constexpr Format kFormats[] = {{\n{rows}}};")
    return SOURCE.read_text(encoding="utf-8").replace("// @tables@", "\n".join(lines))


def _number(number: Number) -> str:
    values, lines = "nullptr", []
    if not number.is_wide:
        values = f"k{number.name.upper()}Values"
        listed = ", ".join(map(_literal, number.values().tolist()))
        lines.append(f"constexpr float {values}[] = {{{listed}}};")
    limits = (2.0**-number.mantissa, number.min_normal, 2.0**number.max_exponent, number.min, number.max)
    fields = [str(number.bits), str(number.is_integer).lower(), *map(_literal, limits), values]
    lines.append(f"constexpr Number k{number.name.upper()} = {{{', '.join(fields)}}};")
    return "\n".join(lines)


def _format(format: Format) -> str:
    rows, columns = format.block
    numbers = f"&k{format.element.name.upper()}, &k{format.scale.name.upper()}"
    return f'{{"{format.name}", {numbers}, {rows}, {columns}, {str(format.global_scale).lower()}}}'


def _literal(value: float) -> str:
    """Returns a float32 as C++ writes it: hexadecimal, and so exact."""
    if value != value:
        return "NAN"
    return ("-" if value < 0 else "") + "INFINITY" if abs(value) == float("inf") else f"{value.hex()}f"
