"""One engine of `vllm_speed.py`, in a process of its own: it measures the tasks that lines of stdin ask for.

decode 16 960       ms of a step of 16 sequences, each behind 960 tokens
prefill 1 4096      ms to the first token of a new prompt
profile 16 960      ms of a step in which any kernel ran, and the kernels that took most of it
tokens 64 960       the first tokens behind 64 prompts, which are the same for every engine
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from quant.base.json_files import json_text

SETTLED = 4
"""Decoding steps, after those in which sequences start, before the timed ones."""
PROFILED = 9
"""Steps of a profile, the prompts' own step among them."""
FIRST = 16
"""Tokens of each prompt that engines are compared by."""


def engine(args: argparse.Namespace) -> None:
    """Builds one engine, says so, and measures until stdin ends."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    if os.environ.get("BLOCKSCALE_VLLM") != "0":
        from quant.vllm_plugin.register import register

        register()  # by hand, for a checkout that is not installed has no entry points
    if args.alone:
        wait_before_cache()
    start = time.time()
    measured = Measured(build(args), args.steps, args.passes)
    say({"ready_s": round(time.time() - start, 1), "gpu": torch.cuda.get_device_name()})
    for line in sys.stdin:
        task, count, length = line.split()
        try:
            say(getattr(measured, task)(int(count), int(length)))
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"[:200]})
    os._exit(0)


def build(args: argparse.Namespace) -> Any:
    """Returns vLLM's engine, with a cache for the largest batch."""
    from vllm import LLM

    settings = {
        "load_format": random_loader(), "skip_tokenizer_init": True, "max_model_len": 4608, "seed": 0,
        "max_num_seqs": max(args.batch), "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30), "enable_prefix_caching": True, "disable_log_stats": True,
        "compilation_config": {},
    }  # fmt: skip
    settings |= args.engine
    settings["compilation_config"] = {"cudagraph_capture_sizes": sorted(args.batch), **settings["compilation_config"]}
    llm = LLM(model=args.folder, **settings)
    cache, needed = llm.llm_engine.vllm_config.cache_config, max(args.batch) * (args.context + args.steps + SETTLED + 2)
    capacity = (cache.num_gpu_blocks or 0) * cache.block_size
    if 0 < capacity < needed:
        raise SystemExit(f"the cache holds {capacity:,} tokens, and the largest batch has {needed:,}: raise --kv-gib")
    return llm


def wait_before_cache() -> None:
    """Lets this engine load and compile, and wait for a line of stdin before it takes the memory of its cache."""
    from vllm.v1.worker.gpu_worker import Worker

    allocate, start = Worker.initialize_from_config, time.time()

    def patched(self: Any, *arguments: Any) -> Any:
        say({"compiled_s": round(time.time() - start, 1)})
        sys.stdin.readline()
        return allocate(self, *arguments)

    Worker.initialize_from_config = patched


class Measured:
    """An engine under measurement; its methods are the tasks."""

    def __init__(self, llm: Any, steps: int, passes: int) -> None:
        import torch

        self.llm, self.steps, self.passes = llm, steps, passes
        self.decoded: dict[tuple[int, int], list[list[int]]] = {}
        self.vocabulary = llm.llm_engine.model_config.get_vocab_size()
        self.generator = torch.Generator().manual_seed(0)

    def prefill(self, count: int, length: int) -> dict[str, Any]:
        return {"ms": min(self._seconds(self._prompts(count, length), 1) for _ in range(3)) * 1e3}

    def decode(self, count: int, length: int) -> dict[str, Any]:
        rows = self._decoded(count, length)
        first = self._seconds(rows, 1)
        passes = [self._step_milliseconds(rows) for _ in range(self.passes)]
        return {"ms": min(passes), "passes": passes, "first_s": first}

    def profile(self, count: int, length: int) -> dict[str, Any]:
        import torch

        rows = self._decoded(count, length)
        self._seconds(rows, 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self._seconds(rows, PROFILED)
        steps = PROFILED * 1e3
        averages = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)[:40]
        # Names are whole: the arguments of a template, behind its first 60 characters, tell kernels apart.
        kernels = {e.key: {"ms": e.self_device_time_total / steps, "calls": e.count / PROFILED} for e in averages}
        ranges = [event.time_range for event in profiler.events() if event.device_type.name == "CUDA"]
        return {"ms": busy(ranges) / steps, "kernels": kernels}

    def tokens(self, count: int, length: int) -> dict[str, Any]:
        import torch
        from vllm import SamplingParams

        ask = SamplingParams(temperature=0, max_tokens=FIRST, ignore_eos=True, detokenize=False)
        rows = self._prompts(count, length, torch.Generator().manual_seed(1))
        answers = self.llm.generate([{"prompt_token_ids": row} for row in rows], ask, use_tqdm=False)
        return {"tokens": [list(each.outputs[0].token_ids) for each in answers]}

    def _decoded(self, batch: int, length: int) -> list[list[int]]:
        """Prompts that stay the same from round to round, so that the prefix cache may still have them."""
        if (batch, length) not in self.decoded:
            self.decoded[batch, length] = self._prompts(batch, length)
        return self.decoded[batch, length]

    def _prompts(self, batch: int, length: int, generator: Any = None) -> list[list[int]]:
        import torch

        generator = generator or self.generator
        rows: list[list[int]] = torch.randint(3, self.vocabulary, (batch, length), generator=generator).tolist()
        return rows

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        import torch
        from vllm import SamplingParams

        ask = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": row} for row in prompts], ask, use_tqdm=False)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def _step_milliseconds(self, rows: list[list[int]]) -> float:
        """Returns the mean time of a step in which every sequence gains a token."""
        from vllm import SamplingParams

        ask = SamplingParams(temperature=0, max_tokens=self.steps + SETTLED + 2, ignore_eos=True, detokenize=False)
        requests, lengths, times = self.llm.llm_engine, dict.fromkeys(map(str, range(len(rows))), 0), []
        for name, row in zip(lengths, rows, strict=True):
            requests.add_request(f"{name}-{time.perf_counter()}", {"prompt_token_ids": row}, ask)
        while requests.has_unfinished_requests():
            for output in requests.step():
                lengths[output.request_id.partition("-")[0]] = len(output.outputs[0].token_ids)
            if min(lengths.values()):
                times.append(time.perf_counter())
        settled = times[SETTLED : SETTLED + self.steps]
        return (settled[-1] - settled[0]) / (len(settled) - 1) * 1e3


def random_loader() -> str:
    """Registers a loader that makes up weights of the size that trained ones have; returns its name."""
    import torch
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    @register_model_loader("random_nvfp4")
    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        @torch.no_grad()
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                data = parameter.data
                if data.dtype is torch.uint8 and name.endswith("scale"):
                    data.random_(119, 123)  # powers of two, stored as exponent + 127
                elif data.dtype is torch.uint8:
                    data.random_(0, 256)
                elif data.dtype is torch.float8_e4m3fn:
                    data.copy_(torch.rand(data.shape, device=data.device).add_(0.5))
                elif "global_scale" in name:
                    data.fill_(160.0)  # stored as the reciprocal
                elif "norm" in name:
                    data.fill_(1.0)
                else:
                    data.normal_(0, 0.02)

    return "random_nvfp4"


def busy(ranges: list[Any]) -> float:
    """Microseconds in which any of the ranges is under way: kernels that overlap count once."""
    total, end = 0.0, float("-inf")
    for each in sorted(ranges, key=lambda r: r.start):
        total += max(each.end - max(each.start, end), 0.0)
        end = max(end, each.end)
    return total


def say(result: dict[str, Any]) -> None:
    print("RESULT " + json_text(result), flush=True)
