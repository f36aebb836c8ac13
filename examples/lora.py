"""LoRA adapters are trained on a model in NVFP4, merged back, and the result is saved as a quantized checkpoint.

python examples/lora.py [MODEL [TEXT [STEPS [OUT]]]]
"""

import sys

import torch
from peft import LoraConfig, get_peft_model

import quant

DEFAULTS = ["smollm2-135m", "benchmarks/data/calibration.txt", "20", "out/lora"]
name, text, steps, out = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 1 :]]

source = quant.open_model(name)
tokenizer = source.load_tokenizer()
rows = quant.token_rows(text, tokenizer, samples=16, seqlen=128)
base = quant.quantize(source.model, "nvfp4a16", rows)
print("before:", quant.evaluate(base.model, rows).perplexity)

config = quant.lora(LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"), base.model)
model = get_peft_model(base.model, config).train()
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
for step in range(int(steps)):
    batch = rows[step % len(rows)][None]
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

model.save_pretrained(f"{out}-adapters")
merged = quant.merge_lora(model.eval(), rows)
print("merged:", quant.evaluate(merged.model, rows).perplexity)
print("largest relative error of a merged layer:", max(layer.relative_error or 0 for layer in merged.layers))
quant.save(merged.model, merged.plan, out, tokenizer=tokenizer, overwrite=True)
