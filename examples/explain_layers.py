"""See why each layer has its format and what it lost: one row for each layer, in a table for a spreadsheet.

    python examples/explain_layers.py mine.txt --model MODEL --out layers.csv

The terminal shows the layers with the largest errors, and each reason for 16 bit.
"""

import argparse
import csv
from collections import Counter
from pathlib import Path

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="nvfp4a16")
options.add_argument("--out", type=Path, default=Path("out/layers.csv"))
parsed = options.parse_args()

source = quant.open_model(parsed.model)
rows = quant.token_rows(parsed.text, source.load_tokenizer(), samples=8, seqlen=64)
result = quant.quantize(source.model, parsed.recipe, rows, effort=1)

parsed.out.parent.mkdir(parents=True, exist_ok=True)
with parsed.out.open("w", newline="") as file:
    table = csv.DictWriter(file, ["name", "format", "activation", "bits", "relative_error", "reason"], "", "ignore")
    table.writeheader()
    table.writerows(vars(layer) for layer in result.layers)

quantized = [layer for layer in result.layers if layer.format is not None]
for layer in sorted(quantized, key=lambda layer: layer.relative_error or 0, reverse=True)[:5]:
    print(f"{layer.name}: {layer.format}, relative error {layer.relative_error:.3f}; {layer.reason}")
for reason, layers in Counter(layer.reason for layer in result.layers if layer.format is None).items():
    print(f"{layers} in 16 bit: {reason}")
print(f"written to {parsed.out}")
