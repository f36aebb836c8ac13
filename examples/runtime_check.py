"""Hold every layer of a checkpoint in an installed runtime, transformers or vLLM, against our own product of it.

python examples/runtime_check.py --model MODEL --runtime vllm
"""

import argparse

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--recipe", default="nvfp4a16")
options.add_argument("--runtime", default="transformers", choices=["transformers", "vllm"])
options.add_argument("--out", default="out/runtime_check")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
result = quant.quantize(source.model, parsed.recipe, effort=1)
quant.save(result.model, result.plan, parsed.out, tokenizer=source.load_tokenizer(), overwrite=True)

# The runtime loads the checkpoint in a process of its own, and gives inputs and outputs of each layer.
verification = quant.verify(parsed.out, runtime=parsed.runtime)
check = verification.runtime
if check is None:
    raise SystemExit("\n".join(finding.what for finding in verification.findings))
worst = max(check.layers, key=lambda layer: layer.error or 0)
print(f"{check.runtime}: {len(check.layers)} layers, at most {worst.error:.1e} off, in {worst.name}")
print(f"log-probabilities differ by {check.logprob_difference:.1e}; {check.greedy:.0%} of the greedy tokens are equal")
for finding in verification.findings:
    print(f"wrong: {finding.what}")
raise SystemExit(2 if verification.findings else 0)
