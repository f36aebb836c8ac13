"""This benchmark counts the drafts that a right engine accepts, beside those that engines of `vllm_greedy.py` accepted.

    python benchmarks/vllm_greedy.py --only GLM --out vllm-greedy
    python benchmarks/mtp_drafts.py vllm-greedy

`quant.load` reads the checkpoint, on a CPU, and follows the tokens of each engine with drafts: the head, whose weights
are the 16 bit of the unquantized checkpoint, drafts a token behind each step, and the engine's next token accepts it or
not. The last columns are the share of steps at which the engine's token is also the likeliest one of `quant.load`, and
the nats by which the token was behind that one, at most, where it is another. Engines with the head in NVFP4 are left
out.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from _mtp_model import LAYERS, Head
from _table import machine, show, versions
from safetensors.torch import load_file

import quant


def opened(out: Path) -> tuple[Any, Head]:
    """Returns the model in NVFP4 and its head, both computing in FP32."""
    model = quant.load(out / "glm").float().eval()
    head = Head(model).float().eval()
    head.fill(load_file(out / "glm-source" / "model.safetensors"))
    return model, head


@torch.no_grad()
def followed(model: Any, head: Head, prompts: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """Returns how many drafts there are and how many the tokens accept, and how the model chooses at each step."""
    rows, length = torch.cat((prompts, tokens), 1), prompts.shape[1]
    logits = model.lm_head(model.model(rows).last_hidden_state)[:, length - 1 : -1].log_softmax(-1)
    drafted = head(model, rows).argmax(-1)  # [:, t] drafts token t + 2
    drafts = accepted = 0
    for row, draft in zip(rows.tolist(), drafted.tolist(), strict=True):
        newest = length  # the prompt's own step gave this token
        while newest + 1 < len(row):
            is_right = draft[newest - 1] == row[newest + 1]
            drafts, accepted, newest = drafts + 1, accepted + is_right, newest + 1 + is_right
    behind = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
    counts = {"drafts, followed": drafts, "accepted, followed": accepted}
    return {**counts, "likeliest here too": f"{(behind == 0).float().mean():.2%}", "else behind": f"{behind.max():.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="of vllm_greedy.py")
    args = parser.parse_args()
    model, head = opened(args.out)
    prompts = torch.tensor(json.loads((args.out / "prompts.json").read_text()))
    rows = []
    for path in sorted(args.out.glob("GLM*drafts*.json")):
        result = json.loads(path.read_text())
        if "head in NVFP4" in path.stem:
            continue
        own = {"drafts": result["counters"]["spec_decode_num_drafts"],
               "accepted": result["counters"]["spec_decode_num_accepted_tokens"]}  # fmt: skip
        rows.append({"engine": path.stem, **own, **followed(model, head, prompts, torch.tensor(result["tokens"]))})
    show(f"Drafts of the head behind {LAYERS} layers", {**machine(), **versions("transformers")}, rows)


if __name__ == "__main__":
    main()
