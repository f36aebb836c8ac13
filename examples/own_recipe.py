"""A recipe of your own: NVFP4 for most layers, FP8 for the sensitive ones, and 16 bit for the first block.

python examples/own_recipe.py mine.txt --model MODEL --out out/own_recipe
"""

import argparse
from pathlib import Path

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", type=Path, help="a TOML file, in place of the recipe below")
options.add_argument("--out", default="out/own_recipe")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=8, seqlen=64)

# The last rule that matches a layer wins. Each reason is written into the plan, next to the layers that it decides.
recipe = quant.Recipe(
    "mine",
    weight="nvfp4",
    solver="mse",
    rules=(
        quant.Rule("*.down_proj", "fp8_channel", "fp8_token", reason="its inputs have outliers"),
        quant.Rule("*.layers.0.*", "keep", reason="the first block stays in 16 bit"),
    ),
)
if parsed.recipe:
    recipe = quant.Recipe.load(parsed.recipe)
result = quant.quantize(source.model, recipe, rows)
print(result.plan)
print("perplexity:", quant.evaluate(result.model, rows).perplexity)
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
