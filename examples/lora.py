"""LoRA adapters are trained on a model in NVFP4, merged back, and the result is saved as a quantized checkpoint.

python examples/lora.py mine.txt --steps 200 --out out/lora
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--steps", type=int, default=20)
options.add_argument("--out", default="out/lora")
parsed = options.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
source = quant.open_model(parsed.model)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=16, seqlen=128).to(device)
base = quant.quantize(source.model.to(device), "nvfp4a16", effort=1)  # 2 is GPTQ, which takes minutes on a CPU
print("perplexity before:", quant.evaluate(base.model, rows).perplexity)

config = quant.lora(LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), base.model)
model = get_peft_model(base.model, config).train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
for step in range(parsed.steps):
    batch = rows[step % len(rows)][None]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")

model.save_pretrained(f"{parsed.out}-adapters")
merged = quant.merge_lora(model.eval())
print("perplexity merged and quantized again:", quant.evaluate(merged.model, rows).perplexity)
quant.save(merged.model, merged.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}, the adapters alone to {parsed.out}-adapters")
