"""Quantization-aware training: fine-tune SmolLM2 on a text of your own, under the rounding that it is deployed with.

    python examples/qat.py mine.txt --steps 300 --out out/qat

The start is the model in NVFP4 by GPTQ; what is written is what was trained, bit for bit.
"""

import argparse

import torch

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--steps", type=int, default=20, help="20 are a look; training takes a few hundred")
options.add_argument("--seqlen", type=int, default=256)
options.add_argument("--out", default="out/qat")
parsed = options.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
source = quant.open_model(parsed.model)
model, tokenizer = source.model.to(device).requires_grad_(True), source.load_tokenizer()
rows = quant.calibration_rows(parsed.text, tokenizer, samples=64, seqlen=parsed.seqlen).to(device)

print("quantizing by GPTQ, which takes minutes on a CPU")
quant.prepare_qat(model, "nvfp4", rows[:8], solver="gptq")
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-5)
for step in range(parsed.steps):
    batch = rows[torch.randint(0, len(rows), (2,))]
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")

plan = quant.pack(model)
quant.save(model, plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
