"""A kernel that computes wrongly, or not at all, is found before a layer takes it. No vLLM is needed here."""

from functools import partial
from typing import Any

import pytest
import torch

from quant.vllm_plugin import loaded_weights, self_test

ON_CPU = self_test.SelfTest(torch.device("cpu"))


@pytest.fixture(autouse=True)
def fresh_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_results", {})


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "int4", "fp8_channel", "fp8_block"])
def test_the_products_of_every_format_pass(format: str) -> None:
    assert ON_CPU.product_failure(format) == ""


def test_the_kernels_of_norms_experts_and_attention_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    from quant.kernels.attention import portable_paged_attention

    monkeypatch.setattr(
        portable_paged_attention, "attend_pages", partial(portable_paged_attention.attend_pages, asm=False)
    )
    with interpreted():
        assert ON_CPU.norm_failure() == ""
        assert ON_CPU.experts_failure("nvfp4") == ""
        assert ON_CPU.attention_failure() == ""
        assert ON_CPU.decoding_failure() == ""


@pytest.mark.parametrize(("factor", "fails"), [(1.0, False), (1.2, True)])
def test_prompts_in_fp8_are_compared_with_a_tolerance_of_their_own(
    factor: float, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = loaded_weights.multiply_in_fp8
    monkeypatch.setenv("BLOCKSCALE_VLLM", "fp8-prefill")
    monkeypatch.setattr(loaded_weights, "multiply_in_fp8", lambda *arguments: right(*arguments) * factor)
    assert bool(ON_CPU.product_failure("nvfp4")) is fails


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda y: y * 1.02, "failed its self-test: relative error 0.02"),
        (lambda y: y * float("nan"), "failed its self-test: relative error nan"),
        (lambda y: y.no_such_instruction, "does not run here: AttributeError: 'Tensor' object"),
    ],
)
def test_a_wrong_kernel_is_told_once(kernel: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, right = [], loaded_weights.multiply

    def multiply(layer: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(x.shape[0])
        y = right(layer, x, *rest)
        # Wrong for many tokens only: both kernels are asked.
        return y if len(x) == 1 else kernel(y)

    monkeypatch.setattr(loaded_weights, "multiply", multiply)
    failures = [ON_CPU.product_failure("nvfp4") for _ in range(3)]
    assert all(failure.startswith(f"our kernel for linear layers in nvfp4 {reason}") for failure in failures)
    assert calls == [1, 80]
