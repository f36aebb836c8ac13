"""The smallest model whose measured loss stays below a limit: KL to the original of at most 0.05 nats.

    python examples/loss_limit.py mine.txt --model MODEL --max-kl 0.02

A quarter of the rows chooses the formats and another quarter verifies them. This takes minutes for SmolLM2 on a CPU.
"""

import argparse

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--max-kl", type=float, default=0.05, help="in nats")
options.add_argument("--out", default="out/loss_limit")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=16, seqlen=64)
before = source.model.get_memory_footprint()

result = quant.quantize(source.model, data=rows, max_kl=parsed.max_kl, formats="nvfp4a16,fp8a16")
print(f"{before / 1e6:.1f} MB before, {result.plan.nbytes / 1e6:.1f} MB after")
print(result.plan)
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
