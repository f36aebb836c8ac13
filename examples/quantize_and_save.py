"""Quantize a model of the Hugging Face hub or of a directory, measure the loss, save it, and load it again.

    python examples/quantize_and_save.py --model Qwen/Qwen3-0.6B --format nvfp4a16 --out out/qwen3

The command `quantize` does the same and writes a report; this is the way for a program of yours.
"""

import argparse

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/evaluation.txt", help="a text to measure the loss on")
options.add_argument("--model", default="smollm2-135m", help="a name on the hub, a directory, or a file")
options.add_argument("--format", default="nvfp4a16", help="a preset; `quant formats` lists them")
options.add_argument(
    "--effort", type=int, default=1, help="0 rounds to nearest; 2 is GPTQ on text that the model writes"
)
options.add_argument("--out", default="out/quantize_and_save")
parsed = options.parse_args()

source, original = quant.open_model(parsed.model), quant.open_model(parsed.model).model
tokenizer = source.load_tokenizer()
result = quant.quantize(source.model, parsed.format, effort=parsed.effort, tokenizer=tokenizer)
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)

rows = quant.token_rows(parsed.text, tokenizer, samples=8, seqlen=64)
evaluation = quant.evaluate(quant.load(parsed.out), rows, original)
print(
    f"{result.plan.nbytes / 1e6:.1f} MB, KL to the original {evaluation.kl:.4f}, perplexity {evaluation.perplexity:.2f}"
)
print(f"written to {parsed.out}; serve it: vllm serve {parsed.out}")
