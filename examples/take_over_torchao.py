"""Take over a model that torchao has quantized: its codes and scales as they are, in a checkpoint for vLLM.

pip install torchao
python examples/take_over_torchao.py --model MODEL
"""

import argparse

import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="a text file")
options.add_argument("--model", default="smollm2-135m")
options.add_argument("--out", default="out/torchao")
parsed = options.parse_args()

source = quant.open_model(parsed.model)
model, tokenizer = source.model.bfloat16(), source.load_tokenizer()
rows = quant.token_rows(parsed.text, tokenizer, samples=8, seqlen=64)


def quantized_by_torchao(module: torch.nn.Module, name: str) -> bool:
    """All linear layers but the output head, which may share its weight with the embedding."""
    return isinstance(module, torch.nn.Linear) and name != "lm_head"


quantize_(model, Int8DynamicActivationInt8WeightConfig(), quantized_by_torchao)
expected = model(rows).logits

# The model is changed in place: `QuantLinear` modules over torchao's own codes take the place of its layers.
plan = quant.from_torchao(model)
print(plan)
print(f"relative difference of the logits: {(model(rows).logits - expected).norm() / expected.norm():.1e}")
quant.save(model, plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
