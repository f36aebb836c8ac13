"""Write a checkpoint in ModelOpt's layout and convert it back: the same codes and scales, bit for bit.

python examples/convert_layout.py --model MODEL --out out/layouts
"""

import argparse

from safetensors.torch import load_file

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="nvfp4")
options.add_argument("--text", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--out", default="out/layouts")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=8, seqlen=64)
result = quant.quantize(source.model, parsed.recipe, rows, effort=1)
ours, theirs, back = (f"{parsed.out}/{name}" for name in ("compressed-tensors", "modelopt", "back"))
quant.save(result.model, result.plan, ours, tokenizer=tokenizer, overwrite=True)

# TensorRT-LLM and TensorRT Edge-LLM read ModelOpt's layout; vLLM reads both, and SGLang in FP8 and NVFP4.
quant.convert(ours, theirs, "modelopt", overwrite=True)
quant.convert(theirs, back, "compressed-tensors", overwrite=True)
first, second = (load_file(f"{directory}/model.safetensors") for directory in (ours, back))
assert first.keys() == second.keys()
assert all(first[name].equal(second[name]) for name in first)
print(f"{len(first)} tensors are equal in {ours} and {back}")
print("perplexity in ModelOpt's layout:", quant.evaluate(quant.load(theirs), rows).perplexity)
