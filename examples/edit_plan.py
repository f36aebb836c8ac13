"""Edit a plan: give one kind of layer another format, and compare both plans by their size and measured loss.

python examples/edit_plan.py mine.txt --model MODEL --set '*.v_proj=keep'
"""

import argparse

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--set", default="*.down_proj=fp8_channel", help="GLOB=FORMAT[:SOLVER][@INPUT]")
options.add_argument("--out", default="out/edit_plan")
parsed = options.parse_args()

original = quant.open_model(parsed.model)
tokenizer = original.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=8, seqlen=64)

# A plan is made from shapes alone. With `whole_groups` a setting for v_proj also changes q_proj and k_proj, which
# runtimes merge with it into one product.
plan = quant.make_plan(original.model, "nvfp4a16", solver="mse")
edited = plan.set(*parsed.set.split("=", 1), whole_groups=True)
for each in (plan, edited):
    result = quant.quantize(quant.open_model(parsed.model).model, each, rows)
    loss = quant.evaluate(result.model, rows, original.model).kl
    print(f"{each.nbytes / 1e6:.2f} MB, KL to the original {loss:.4f}")
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"the edited plan and its checkpoint are in {parsed.out}")
