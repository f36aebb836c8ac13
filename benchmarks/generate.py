"""This benchmark times a token of `quant generate`: our graph, transformers' modules, and the bare step of `decode.py`.

    python benchmarks/generate.py                          Llama 3 8B's shape, NVFP4 weights, a 16-bit head
    python benchmarks/generate.py --layers 4 --format fp8_channel

Weights are random, the prompt too. `bare step` is that of `decode.py` at the context in the middle of the run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from _llama import VOCABULARY, random_llama
from _table import machine, show, versions
from decode import measure

import quant
from quant.generate import generate as generation
from quant.generate.fused_decoder import Decoder
from quant.recipes.blocks import cache_of


def model_of(layers: int, format: str) -> Any:
    """A Llama of `layers` layers on the GPU, quantized by rounding."""
    model = random_llama(layers).eval()
    model.generation_config.eos_token_id = None
    return quant.quantize(model, format).model


def main() -> None:
    """Parses the options, runs the rows, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", default="nvfp4a16", help="a preset")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=256, help="that are added")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    model = model_of(options.layers, options.format)
    ids = torch.randint(0, VOCABULARY, (1, options.context), device="cuda")
    count, added = options.context, options.tokens
    rows: list[dict[str, Any]] = []
    with torch.no_grad(), generation._wide_logits(model):
        tokens: list[int] = []
        reason = generation._decode(model, ids, added, tokens.extend)
        assert not reason, reason
        decoder = Decoder(model, count + added)
        seen = model(ids, use_cache=True, logits_to_keep=1)
        decoder.begin(cache_of(seen), int(seen.logits.argmax()))
        decoder.step()
        decoder.capture()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in decoder.run(count, count + added, (), taken=1):
            pass
        rows.append({"what": "quant generate", "ms a token": (time.perf_counter() - start) / (added - 2) * 1e3})
        few = min(added, 32)
        for _ in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            seen = model(ids, use_cache=True, logits_to_keep=1)
            torch.cuda.synchronize()
            prompt = time.perf_counter() - start
            out = model.generate(ids, max_new_tokens=few, do_sample=False, pad_token_id=0)
            torch.cuda.synchronize()
            each = (time.perf_counter() - start - 2 * prompt) / (few - 1) * 1e3
        rows.append({"what": "transformers' generate", "ms a token": each})
        same = sum(a == b for a, b in zip(out[0, count:].tolist(), tokens, strict=False))
    del decoder, model, seen
    torch.cuda.empty_cache()
    weight = {"nvfp4a16": "nvfp4", "mxfp4a16": "mxfp4"}.get(options.format, options.format)
    bare = measure(weight, options.layers, 1, count + added // 2, 1.0, None)
    rows.append({"what": "bare step", "ms a token": bare["ms a step"]})
    for row in rows:
        row["x bare step"] = bare["ms a step"] / row["ms a token"]
    header = {**machine(), **versions("triton", "transformers"), "layers": str(options.layers), "context": str(count)}
    show("quant generate, batch 1", header, rows, [f"{same} of the first {few} tokens are those of transformers"])


if __name__ == "__main__":
    main()
