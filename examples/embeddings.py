"""An embeddings model in INT8: how far its vectors turn, and whether the nearest sentences stay the same.

python examples/embeddings.py sentences.txt --model sentence-transformers/all-MiniLM-L6-v2
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("text", nargs="?", default="benchmarks/data/calibration.txt", help="one sentence a line")
options.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2")
options.add_argument("--out", default="out/embeddings")
parsed = options.parse_args()

tokenizer = AutoTokenizer.from_pretrained(parsed.model)
sentences = [line for line in Path(parsed.text).read_text().splitlines() if len(line) > 20][:64]
batch = dict(tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt"))


def embed(model: torch.nn.Module) -> torch.Tensor:
    """Unit vectors `[sentences, width]`: the mean over the tokens of each sentence, without padding."""
    with torch.inference_mode():
        states, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def nearest(vectors: torch.Tensor) -> torch.Tensor:
    """The index of the sentence that is nearest to each, itself apart."""
    return (vectors @ vectors.T).fill_diagonal_(-1).argmax(-1)


model = AutoModel.from_pretrained(parsed.model).eval()
before = embed(model)
result = quant.quantize(model, "int8", [batch], effort=1)
after = embed(result.model)
print(f"mean cosine to the original vectors: {(before * after).sum(-1).mean():.5f}")
print(f"the nearest sentence is the same for {(nearest(before) == nearest(after)).float().mean():.1%}")
quant.save(result.model, result.plan, parsed.out, tokenizer=tokenizer, overwrite=True)
print(f"written to {parsed.out}")
