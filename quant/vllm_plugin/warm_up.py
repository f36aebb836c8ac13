"""Before vLLM is ready, the kernels that steps of any number of tokens need are compiled.

vLLM's start runs its largest step, and the decoding steps that it captures in CUDA graphs. Prompts have other lengths,
for which our matmuls have other tiles: the first prompt of such a length would wait two seconds for the compiler. So
each layer that takes our kernels is noted here when its weights arrive, as shapes and dtypes without memory, and where
vLLM warms up its own kernels, all of theirs are compiled:

    numbers of tokens ─▶ launches of empty tensors, noted and not made ─▶ each kernel once ─▶ compiled, by threads

The 8B Llama's four matmuls in NVFP4 have 26 kernels between them for 1 to 8,192 tokens. Attention over a cache in NVFP4
runs there in each of its ways. Triton keeps kernels on disk, so a later start only loads them.

`install_warm_up` imports vLLM; the other functions do not.
"""

import logging
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from quant.formats.tensor import BlockScaledTensor, moved
from quant.kernels.base.launch import Variants, recorded
from quant.kernels.base.weight_layout import is_prepacked
from quant.kernels.linear import dispatch
from quant.kernels.linear.experts import STORED_ROWS
from quant.kernels.linear.tiles import DENSE, FEW
from quant.vllm_plugin import loaded_weights
from quant.vllm_plugin.releases import check_arguments, replace_function

MOST_THREADS = 8

_log = logging.getLogger("vllm.blockscale")
_linear: dict[Any, tuple[BlockScaledTensor, Tensor | None]] = {}
_experts: dict[Any, tuple[BlockScaledTensor, Tensor | None, int]] = {}


def distinct_lengths(most: int) -> list[int]:
    """Returns numbers of tokens up to `most` among which every launch occurs that one of them has.

    Beyond `FEW` tokens a launch depends on how many tiles there are, and tiles are multiples of 16 tokens.
    """
    return [*range(1, min(most, FEW) + 1), *range(FEW + 16, most, 16), *([most] if most > FEW else [])]


def linear_variants(weight: BlockScaledTensor, bias: Tensor | None, lengths: Iterable[int]) -> Variants:
    """Returns the kernels by which these numbers of tokens in BF16 are multiplied by a weight `[out, in]`.

    Weight and bias may be on the device "meta". Left out are kernels that write the weight in 16 bit for the library:
    the largest step of a server, which it tries at its start, needs them if any does.
    """
    with recorded() as variants:
        for tokens in lengths:
            x = torch.empty(tokens, weight.shape[1], dtype=torch.bfloat16, device="meta")
            choice = dispatch.choose_launch(weight, x)
            if choice != DENSE:
                dispatch.multiply_with(x, weight, bias, choice)
    return variants


def experts_variants(weight: BlockScaledTensor, bias: Tensor | None, lengths: Iterable[int]) -> Variants:
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
    weight: BlockScaledTensor, bias: Tensor | None, lengths: Iterable[int], device: torch.device
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


def note_linear(weight: BlockScaledTensor, bias: Tensor | None) -> None:
    """Notes a weight `[out, in]` as a layer holds it, with its bias; layers that are alike count once."""
    # With tensor parallelism one GPU adds the bias, and the others multiply without it.
    for added in (None,) if bias is None else (None, bias):
        kind, without_memory = _noted(weight, added)
        _linear[kind] = without_memory


def note_experts(weight: BlockScaledTensor, bias: Tensor | None, slots: int) -> None:
    """Notes a stack of experts that Hopper's kernel takes; a token of a step gives them `slots` rows."""
    kind, without_memory = _noted(weight, bias)
    _experts[kind, slots] = *without_memory, slots


def _noted(weight: BlockScaledTensor, bias: Tensor | None) -> tuple[Any, tuple[BlockScaledTensor, Tensor | None]]:
    """Returns what makes layers alike, and weight and bias without memory."""
    kind = weight.format.name, weight.codes.dtype, weight.shape, None if bias is None else bias.dtype
    return kind, (moved(weight, "meta"), None if bias is None else bias.detach().to("meta"))


def needed_variants(tokens: int, device: torch.device) -> Variants:
    """Returns the kernels of all layers for steps of up to so many tokens; `device` is the layers' own."""
    found: Variants = {}
    lengths = distinct_lengths(tokens)
    for weight, bias in _linear.values():
        in_fp8: list[int] = []
        if loaded_weights.multiplies_prompts_in_fp8(weight.format.name):
            in_fp8 = [length for length in lengths if loaded_weights.is_faster_in_fp8(length, weight.shape)]
            decoded = [length for length in in_fp8 if length <= loaded_weights.FP8_DECODED_UP_TO]
            found |= e4m3_variants(weight, bias, decoded, device) if is_prepacked(weight) else {}
        found |= linear_variants(weight, bias, [length for length in lengths if length not in set(in_fp8)])
    for weight, bias, slots in _experts.values():
        # With 128 rows an expert, tiles have their largest size, which more rows keep.
        rows = distinct_lengths(min(tokens * slots, 128 * weight.shape[0]))
        if not is_prepacked(weight):  # fewer take the portable kernel
            rows = [count for count in rows if count >= STORED_ROWS * weight.shape[0]]
        found |= experts_variants(weight, bias, rows)
    return found


def warm_up(config: Any) -> None:
    """Compiles the kernels of all layers, for a server with vLLM's settings; the log has the time."""
    if not getattr(getattr(config, "kernel_config", None), "enable_jit_warmup", True):
        return
    tokens, started = config.scheduler_config.max_num_batched_tokens, time.perf_counter()
    cores = len(os.sched_getaffinity(0)) // max(config.parallel_config.world_size, 1)
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        needed = needed_variants(tokens, device)
        compile_variants(needed, device, max(min(cores, MOST_THREADS), 1))
        compile_attention(config)
    # As in a self-test: whatever goes wrong in a compiler is met again, and told, where a layer needs the kernel.
    except Exception as error:
        _log.warning("Blockscale: kernels are compiled when they are first needed: %s: %s", type(error).__name__, error)
    else:
        seconds = time.perf_counter() - started
        _log.info("Blockscale: compiled %d kernels for 1 to %d tokens in %.1f s", len(needed), tokens, seconds)


def compile_attention(config: Any) -> None:
    """Lets our attention backend run its kernels, once for layers that are alike."""
    seen = set()
    for layer in (getattr(config.compilation_config, "static_forward_context", None) or {}).values():
        impl: Any = getattr(layer, "impl", None)
        if hasattr(impl, "compile_steps"):
            kind = impl.num_heads, impl.num_kv_heads, impl.head_size, repr(impl.options), layer.kv_cache[0].shape
            if kind not in seen:
                impl.compile_steps(layer, config.model_config.dtype)
            seen.add(kind)


def install_warm_up() -> str:
    """Wraps vLLM's warm-up of its kernels."""
    from vllm.model_executor.warmup import kernel_warmup as module

    check_arguments(module.kernel_warmup, "worker")

    def wrap(theirs: Any) -> Any:
        def kernel_warmup(worker: Any, *arguments: Any, **named: Any) -> Any:
            warm_up(worker.vllm_config)
            return theirs(worker, *arguments, **named)

        return kernel_warmup

    replace_function(module, "kernel_warmup", wrap, in_importers=True)
    return "compilation before the first prompt"
