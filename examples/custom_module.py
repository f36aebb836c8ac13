"""A module of your own, without transformers: any nn.Module is calibrated on your inputs, saved and loaded again.

python examples/custom_module.py --model weights.pt --out out/custom_module
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import quant

options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
options.add_argument("--model", type=Path, help="a state dict by torch.save; random weights without one")
options.add_argument("--out", default="out/custom_module")
parsed = options.parse_args()


class Ranker(nn.Module):
    """Scores pairs of a query and a document, each a vector of 128 features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document = nn.Linear(128, 256), nn.Linear(128, 256)
        self.mix = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU())
        self.grade = nn.Linear(256, 16)

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        return self.grade(self.mix(self.query(query) * self.document(document)))


model = Ranker().eval()
if parsed.model:
    model.load_state_dict(torch.load(parsed.model, weights_only=True))
# A batch is a tuple of positional arguments or a dict of keyword arguments; a DataLoader of such batches will do too.
batches = [(torch.randn(32, 128), torch.randn(32, 128)) for _ in range(8)]
expected = model(*batches[0])

result = quant.quantize(model, "nvfp4", batches, solver="gptq", exclude=["grade"])
print(f"relative error of the scores: {(result.model(*batches[0]) - expected).norm() / expected.norm():.3f}")
quant.save(result.model, result.plan, parsed.out, overwrite=True)

# Such a checkpoint has no config.json, so `load` fills a new instance of the class.
loaded = quant.load(parsed.out, Ranker())
assert torch.equal(loaded(*batches[0]), result.model(*batches[0]))
print(f"written to {parsed.out}, and loaded again with the same scores")
