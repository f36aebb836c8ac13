"""Draws every format of `FORMATS`: the block that shares a scale, and the bits of a code and of a scale.

    python benchmarks/format_figures.py [DIRECTORY]

The pictures of docs/numerics.md follow from the data of the formats alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from _svg import GREY, INK, rectangle, text, write

from quant.formats.format import FORMATS, Format, Number

SIGN, EXPONENT, MANTISSA, INTEGER, WIDE = "#d1495b", "#edae49", "#7fc8a9", "#8ab6d6", "#d8dee4"
WIDTH, HEIGHT, CELL = 740, 176, 22
MATRIX = 128  # of the drawing; a weight is drawn as a square whatever its shape


def bit_boxes(x: float, y: float, number: Number) -> list[str]:
    """One box for each bit, coloured by its field; numbers wider than a byte are one box."""
    if number.is_wide:
        words = f"{number.name.upper()}, {number.bits} bits"
        return [rectangle(x, y, 4 * CELL, CELL, WIDE, INK), text(x + 2 * CELL, y + 15, words, size=11, anchor="middle")]
    if number.is_integer:
        fields = [(INTEGER, "±")] + [(INTEGER, str(bit)) for bit in reversed(range(number.bits - 1))]
    else:
        fields = [(SIGN, "S")] * number.signed
        fields += [(EXPONENT, "E")] * number.exponent + [(MANTISSA, "M")] * number.mantissa
    parts = []
    for index, (colour, letter) in enumerate(fields):
        parts.append(rectangle(x + index * CELL, y, CELL, CELL, colour, INK))
        parts.append(text(x + (index + 0.5) * CELL, y + 15, letter, size=12, anchor="middle"))
    return parts


def block_in_matrix(x: float, y: float, format: Format) -> list[str]:
    """The matrix with its first block filled, not to scale, and four blocks outlined where they are small."""
    rows, columns = format.block
    height = MATRIX if rows == 0 else (MATRIX / 4 if rows > 1 else MATRIX / 8)
    width = MATRIX if columns == 0 else MATRIX / 4
    parts = [rectangle(x, y, MATRIX, MATRIX, "#f3f6f8", INK), rectangle(x, y, width, height, EXPONENT, INK)]
    parts += [rectangle(x, y + n * height, MATRIX, height, "none", "#b8c4ce") for n in range(1, int(MATRIX / height))]
    parts += [rectangle(x + n * width, y, width, MATRIX, "none", "#b8c4ce") for n in range(1, int(MATRIX / width))]
    return [*parts, rectangle(x, y, width, height, "none", INK)]


def block_words(format: Format) -> str:
    """The block in words: `1 × 16 inputs`."""
    rows, columns = format.block
    if format.per_tensor:
        return "the whole matrix shares a scale"
    return "each row has a scale" if columns == 0 else f"{rows} × {columns} values share a scale"


def draw(format: Format, path: Path) -> None:
    """Writes the picture of one format."""
    element, scale = format.element, format.scale
    x = 196
    span = f"{element.min:g} to {element.max:g}" if element.is_integer else f"up to ±{element.max:g}"
    parts = [
        *block_in_matrix(24, 32, format),
        text(24, 22, "matrix [out, in]", size=12, fill=GREY),
        text(x, 22, f"{format.name}: {block_words(format)}", bold=True, size=14),
        text(x, 48, f"code: {element.name.upper()}, {span}", size=12, fill=GREY),
        *bit_boxes(x, 56, element),
        text(x, 104, f"scale: {scale.name.upper()}, one for each block", size=12, fill=GREY),
        *bit_boxes(x, 112, scale),
        text(x, 162, "value = code × scale" + (" × global scale" if format.global_scale else ""), size=13),
    ]
    if format.global_scale:
        parts += [text(x + 280, 104, "global scale, one for each matrix", size=12, fill=GREY),
                  rectangle(x + 280, 112, 4 * CELL, CELL, WIDE, INK),
                  text(x + 280 + 2 * CELL, 127, "FP32, 32 bits", size=11, anchor="middle")]  # fmt: skip
    legend = [(SIGN, "sign"), (EXPONENT, "exponent"), (MANTISSA, "mantissa")]
    for index, (colour, name) in enumerate([(INTEGER, "two's complement")] if element.is_integer else legend):
        parts += [rectangle(x + 280 + 84 * index, 60, 12, 12, colour, INK),
                  text(x + 298 + 84 * index, 71, name, size=12, fill=GREY)]  # fmt: skip
    write(
        path, WIDTH, HEIGHT, f"{format.name}: {block_words(format)}; {element.name} codes, {scale.name} scales", parts
    )


def main(directory: Path) -> None:
    """Draws all formats into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, format in FORMATS.items():
        draw(format, directory / f"{name}.svg")
    print(f"{len(FORMATS)} formats are drawn in {directory}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs" / "figures" / "formats")
