"""Train a small model from scratch with the products of NVFP4 hardware, emulated, and generate from its checkpoint.

    python examples/nvfp4_pretraining.py mine.txt --steps 1000 --out out/nvfp4

Nothing is calibrated or quantized afterwards: the checkpoint holds the codes and scales of training.
"""

import argparse
import subprocess
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
options.add_argument("--steps", type=int, default=20, help="20 are a look; training takes thousands")
options.add_argument("--out", default="out/nvfp4")
parsed = options.parse_args()

tokenizer = quant.open_model(parsed.model).load_tokenizer()
config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=1,
                     num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)  # fmt: skip
model = LlamaForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu").train()
rows = quant.token_rows(parsed.text, tokenizer, samples=None, seqlen=64).to(model.device)
print(quant.to_low_precision_training(model, "nvfp4"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(parsed.steps):
    batch = rows[torch.randint(0, len(rows), (8,), device=rows.device)]
    loss = model(batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1}: loss {loss.item():.3f}")
quant.save(model, quant.pack(model.eval()), parsed.out, tokenizer=tokenizer, overwrite=True)
subprocess.run([sys.executable, "-m", "quant", "generate", parsed.out, "--prompt", "The"], check=True)
print(f"written to {parsed.out}")
