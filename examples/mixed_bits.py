"""Mixed precision for a budget: the formats of all layers are chosen so that they take 6 bits per weight on average.

    python examples/mixed_bits.py mine.txt --model MODEL --bits 5

Every layer is measured in every format, which takes minutes for SmolLM2 on a CPU.
"""

import argparse
from collections import Counter

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--bits", type=float, default=6.0, help="per weight, every scale counted")
options.add_argument("--out", default="out/mixed_bits")
parsed = options.parse_args()

source, original = quant.open_model(parsed.model), quant.open_model(parsed.model).model
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=16, seqlen=64)

# The choice and its measurement use different rows: the formats fit the rows that chose them a little too well.
result = quant.quantize(source.model, data=rows[:8], bits=parsed.bits, formats="nvfp4a16,fp8a16", effort=1)
for formats, layers in Counter(layer.formats for layer in result.plan.layers).most_common():
    print(f"{layers:4} layers in {formats}")
print(f"{result.plan.effective_bits:.2f} bits per quantized weight")
print("KL to the original:", quant.evaluate(result.model, rows[8:], original).kl)
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
