"""Verify a checkpoint: against its own record, and against the model that it was made from.

python examples/verify_source.py --model MODEL --checkpoint DIR
"""

import argparse
from pathlib import Path

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M", help="directory or hub name of the original")
options.add_argument("--checkpoint", type=Path, help="made of it; without one, it is made here in NVFP4")
options.add_argument("--out", default="out/verify_source")
parsed = options.parse_args()

checkpoint = parsed.checkpoint or Path(parsed.out)
if parsed.checkpoint is None:
    source = quant.open_model(parsed.model)
    result = quant.quantize(source.model, "nvfp4a16", effort=1)
    quant.save(result.model, result.plan, checkpoint, tokenizer=source.load_tokenizer(), overwrite=True)
verification = quant.verify(checkpoint, source=parsed.model)
print("checked:", ", ".join(verification.checked))
for check, reason in verification.skipped.items():
    print(f"not checked: {check}: {reason}")
for finding in verification.findings:
    print(f"wrong: {finding.check}: {finding.what}")
if verification.findings:
    raise SystemExit(2)
print(f"{checkpoint} is whole, and everything that its plan leaves alone is as in {parsed.model}")
