"""This benchmark times the grouped matmuls of experts in NVFP4 with inputs in 16 bit, tokens routed at random.

    python benchmarks/grouped_experts.py
    python benchmarks/grouped_experts.py --tokens 1 16 64 128 512

Three copies of the weights take turns in a CUDA graph, so that each call reads them from memory; with more than a few
tokens their experts do not fit in the L2 cache. Bytes are those of the experts that a token reached.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from _copy_rate import copy_rate
from _table import machine, show, versions
from gemm import random_weight

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.weight_layout import prepack
from quant.kernels.linear.experts import grouped_linear
from quant.kernels.linear.tuning import graph_microseconds, warm_up

SHAPES = {
    "Qwen3-30B-A3B, gate and up": (128, 8, (1536, 2048)),
    "Qwen3-30B-A3B, down": (128, 8, (2048, 768)),
    "gpt-oss-20b, gate and up": (32, 4, (5760, 2880)),
    "gpt-oss-20b, down": (32, 4, (2880, 2880)),
}
"""By name: experts, experts of a token, and out × in of one."""


def stacked(experts: int, shape: tuple[int, int]) -> BlockScaledTensor:
    """Random experts in the layout of Hopper's kernels."""
    rows, columns = shape
    flat = random_weight(FORMATS["nvfp4"], (experts * rows, columns))
    codes, scale = flat.codes.view(experts, rows, -1), flat.scale.view(experts, rows, -1)
    return prepack(
        replace(flat, codes=codes, scale=scale, shape=(experts, *shape), global_scale=torch.ones(experts).cuda())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 128])
    args = parser.parse_args()
    torch.manual_seed(0)
    warm_up()
    rows, most = [], copy_rate()
    for name, (experts, chosen, shape) in SHAPES.items():
        weight = stacked(experts, shape)
        copies = [weight, *(replace(weight, codes=weight.codes.clone(), scale=weight.scale.clone()) for _ in range(2))]
        for tokens in args.tokens:
            index = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)]).flatten()
            counts = torch.bincount(index, minlength=experts)
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int().cuda()
            x = torch.randn(tokens * chosen, shape[1], device="cuda", dtype=torch.bfloat16)
            calls = [lambda w=w, x=x, offsets=offsets: grouped_linear(x, w, offsets) for w in copies]
            microseconds = graph_microseconds(calls)
            rate = int((counts > 0).sum()) * weight.nbytes / experts / microseconds * 1e6
            rows.append({"experts": name, "tokens": tokens, "µs": f"{microseconds:.1f}", "TB/s": f"{rate / 1e12:.2f}",
                         "of a copy": f"{rate / most:.0%}"})  # fmt: skip
    show("Grouped matmuls of experts in NVFP4", {**machine(), **versions("triton")}, rows)


if __name__ == "__main__":
    main()
