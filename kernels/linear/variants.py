"""Which kernels a layer needs for every number of tokens is found here without launching one, and they are compiled.

Triton compiles a kernel for a set of compile-time constants when it first meets them, which takes one of Hopper's
kernels two seconds. The sizes of its tiles are among them, and whether tiles are cut, and both depend on the number of
tokens. A server compiles all of them before it is ready, or the first prompt of a new length would wait:

    numbers of tokens ─▶ launches of empty tensors, noted and not made ─▶ each kernel once ─▶ compiled, by threads

The 8B Llama's four matmuls in NVFP4 have 26 kernels between them for 1 to 8,192 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.launch_cache import Variants, recorded
from quant.kernels.linear import dispatch
from quant.kernels.linear.tiles import DENSE, FEW


def distinct_lengths(most: int) -> list[int]:
    """Returns numbers of tokens up to `most` among which every launch occurs that one of them has.

    Beyond `FEW` tokens a launch depends on how many tiles there are, and tiles are multiples of 16 tokens.
    """
    return [*range(1, min(most, FEW) + 1), *range(FEW + 16, most, 16), *([most] if most > FEW else [])]


def distinct_rows(most: int, experts: int) -> list[int]:
    """Returns numbers of rows up to `most`, likewise for a stack of experts.

    With 128 rows an expert, tiles have their largest size, which more rows keep.
    """
    return distinct_lengths(min(most, 128 * experts))


def linear_variants(weight: BlockScaledTensor, bias: torch.Tensor | None, lengths: Iterable[int]) -> Variants:
    """Returns the kernels by which these numbers of tokens in BF16 are multiplied by a weight `[out, in]`.

    Weight and bias may be on the device "meta". Left out are kernels that write the weight in 16 bit for the library:
    the largest step of a server, which it tries at its start, needs them if any does.
    """
    with recorded() as variants:
        for tokens in lengths:
            x = torch.empty(tokens, weight.shape[1], dtype=torch.bfloat16, device="meta")
            choice = dispatch.choose_for_numbers(weight, x)
            if choice != DENSE:
                dispatch.multiply_with(x, weight, bias, choice)
    return variants


def experts_variants(weight: BlockScaledTensor, bias: torch.Tensor | None, lengths: Iterable[int]) -> Variants:
    """Returns the kernels of Hopper by which these numbers of rows in BF16 are multiplied by a stack of experts.

    Weight and bias may be on the device "meta"; see `sm90_codes_gemm_many.takes_experts`.
    """
    from quant.kernels.linear.sm90_codes_gemm_many import grouped_gemm_many

    offsets = torch.empty(weight.shape[0] + 1, dtype=torch.int32, device="meta")
    with recorded() as variants:
        for rows in lengths:
            x = torch.empty(rows, weight.shape[2], dtype=torch.bfloat16, device="meta")
            grouped_gemm_many(x, weight, offsets, bias)
    return variants


def e4m3_variants(
    weight: BlockScaledTensor, bias: torch.Tensor | None, lengths: Iterable[int], device: torch.device
) -> Variants:
    """Returns the kernels by which these numbers of tokens are rounded to E4M3 and multiplied by a prepacked weight.

    Weight and bias may be on the device "meta". How tokens are rounded depends on the `device` that they are on.
    """
    from quant.kernels.linear.sm90_e4m3_rows import multiply_in_e4m3

    with recorded() as variants:
        for tokens in lengths:
            x = torch.empty(tokens, weight.shape[1], dtype=torch.bfloat16, device=device)
            multiply_in_e4m3(x, weight, bias)
    return variants


def compile_variants(variants: Variants, device: torch.device, threads: int) -> None:
    """Compiles kernels for a GPU, several at a time; Triton's compiler runs outside of Python for most of its time."""

    def compile_here(variant: object) -> None:
        with torch.cuda.device(device):
            variants[variant]()

    with ThreadPoolExecutor(threads) as pool:
        # The results are read because an error of a thread is raised with its result.
        list(pool.map(compile_here, variants))
