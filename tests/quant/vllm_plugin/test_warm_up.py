"""What is compiled before vLLM is ready: the kernels of the layers that were noted, and nothing where it is off."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.base import hardware
from quant.kernels.base.weight_layout import prepack
from quant.recipes.gpus import GPUS
from quant.vllm_plugin import warm_up
from quant.vllm_plugin import warm_up as variants


@pytest.fixture(autouse=True)
def nothing_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU is taken for an H100, in a process whose layers have not arrived yet."""
    monkeypatch.setattr(warm_up, "_linear", {})
    monkeypatch.setattr(warm_up, "_experts", {})
    for name in ("quant.kernels.linear.sm90_codes_gemm_many", "quant.kernels.linear.sm90_e4m3_rows"):
        monkeypatch.setattr(f"{name}.current", lambda index=0: GPUS["h100"])
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])


def settings(**kernels: Any) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(world_size=1),
        kernel_config=SimpleNamespace(**{"enable_jit_warmup": True, **kernels}),
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


class Attention:
    """An attention implementation of ours, which counts how often it runs its kernels."""

    num_heads, num_kv_heads, head_size = 4, 2, 64

    def __init__(self, options: str) -> None:
        self.options, self.runs = options, 0

    def compile_steps(self, layer: Any, dtype: torch.dtype) -> None:
        assert dtype is torch.bfloat16 and layer.impl is self
        self.runs += 1


def test_attention_runs_its_kernels_once_for_layers_that_are_alike() -> None:
    config, impls = settings(), [Attention("all"), Attention("all"), Attention("window")]
    layers = {str(i): SimpleNamespace(impl=impl, kv_cache=torch.zeros(3, 8)) for i, impl in enumerate(impls)}
    config.compilation_config.static_forward_context = {"experts": torch.nn.Module(), **layers}
    warm_up.compile_attention(config)
    assert [impl.runs for impl in impls] == [1, 0, 1]


def needed() -> set[Any]:
    return set(warm_up.needed_variants(2048, torch.device("cpu")))


def test_layers_that_are_alike_need_the_same_kernels() -> None:
    weight = prepack(quantize(torch.randn(256, 512), FORMATS["nvfp4"]))
    warm_up.note_linear(weight, None)
    once = needed()
    lengths = variants.distinct_lengths(2048)
    assert once == set(variants.linear_variants(weight, None, lengths)) and len(once) == 5
    warm_up.note_linear(prepack(quantize(torch.randn(256, 512), FORMATS["nvfp4"])), None)
    assert len(warm_up._linear) == 1
    # With tensor parallelism only one GPU adds the bias.
    bias = torch.zeros(256, dtype=torch.bfloat16)
    warm_up.note_linear(weight, bias)
    assert needed() == once | set(variants.linear_variants(weight, bias, lengths)) != once
    assert all(noted.codes.is_meta for noted, _ in warm_up._linear.values())  # none keeps a weight's memory


def test_experts_get_a_row_for_each_slot() -> None:
    stack = prepack(quantize(torch.randn(4, 128, 128), FORMATS["nvfp4"]))
    warm_up.note_experts(stack, None, 8)
    # 2,048 tokens give 512 rows to an expert, where one row a token would give 128.
    assert needed() == set(variants.experts_variants(stack, None, range(1, 4 * 512)))


def test_few_rows_of_stored_experts_take_another_kernel() -> None:
    stack = quantize(torch.randn(4, 128, 128), FORMATS["fp8_channel"])
    warm_up.note_experts(stack, None, 1)
    assert needed() == set(variants.experts_variants(stack, None, range(32, 2049)))


def test_prompts_in_fp8_have_kernels_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = prepack(quantize(torch.ones(64, 128), FORMATS["nvfp4"]))
    warm_up.note_linear(weight, None)
    in_16_bit = needed()
    monkeypatch.setenv("BLOCKSCALE_VLLM", "fp8-prefill")
    assert needed() == in_16_bit  # too small to gain
    monkeypatch.setattr("quant.vllm_plugin.loaded_weights.FP8_PRODUCTS", 0)
    found = needed()
    fp8 = variants.e4m3_variants(weight, None, range(192, 1025), torch.device("cpu"))
    assert found == set(fp8) | set(variants.linear_variants(weight, None, range(1, 192)))
    assert {"rows_to_e4m3_kernel", "sm90_codes_gemm_many"} == {
        compiler.func.__self__.fn.__name__ for compiler in fp8.values()
    }


def test_a_kernel_that_cannot_be_compiled_is_met_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stop(*arguments: Any) -> None:
        raise RuntimeError("no assembler")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(variants, "compile_variants", stop)
    with caplog.at_level(logging.INFO):
        warm_up.warm_up(settings())
    assert "compiled when they are first needed: RuntimeError: no assembler" in caplog.text
    monkeypatch.setattr(variants, "compile_variants", lambda needed, device, threads: None)
    with caplog.at_level(logging.INFO):
        warm_up.warm_up(settings())
    assert "compiled 0 kernels for 1 to 2048 tokens" in caplog.text
    caplog.clear()
    warm_up.warm_up(settings(enable_jit_warmup=False))
    assert caplog.text == ""


def test_vllm_warms_up_our_kernels_and_then_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="make vllm-test unpacks the Python files of vLLM's releases")
    from vllm.model_executor.warmup import kernel_warmup as module

    calls: list[Any] = []

    def kernel_warmup(worker: Any, **named: Any) -> None:
        calls.append((worker, named))

    monkeypatch.setattr(module, "kernel_warmup", kernel_warmup)
    monkeypatch.setattr(warm_up, "warm_up", lambda config: calls.append(config))
    for _ in range(2):
        assert warm_up.install_warm_up() == "compilation before the first prompt"
    worker = SimpleNamespace(vllm_config=settings())
    module.kernel_warmup(worker, process_local_only=True)
    assert calls == [worker.vllm_config, (worker, {"process_local_only": True})]
    monkeypatch.setattr(module, "kernel_warmup", lambda: None)
    with pytest.raises(TypeError, match="takes  instead of worker"):
        warm_up.install_warm_up()
