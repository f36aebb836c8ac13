"""Quantize a model while transformers loads it, and let transformers save, load and run the checkpoint.

python examples/from_pretrained.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
options.add_argument("--recipe", default="nvfp4a16")
options.add_argument("--prompt", default="The sky is")
options.add_argument("--out", default="out/from_pretrained")
parsed = options.parse_args()

tokenizer = AutoTokenizer.from_pretrained(parsed.model)
config = quant.QuantConfig(parsed.recipe, solver="mse", tokenizer=tokenizer)
model = AutoModelForCausalLM.from_pretrained(parsed.model, quantization_config=config)
model.save_pretrained(parsed.out)
tokenizer.save_pretrained(parsed.out)

# An empty QuantConfig runs the checkpoint on our modules and kernels; without one, transformers dequantizes it.
loaded = AutoModelForCausalLM.from_pretrained(parsed.out, quantization_config=quant.QuantConfig())
tokens = tokenizer(parsed.prompt, return_tensors="pt")["input_ids"]
with torch.inference_mode():
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
print(f"{model.get_memory_footprint() / 1e6:.1f} MB in memory, written to {parsed.out}")
print(tokenizer.decode(loaded.generate(tokens, max_new_tokens=16)[0], skip_special_tokens=True))
