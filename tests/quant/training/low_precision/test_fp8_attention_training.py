"""Attention in FP8 in training: gradients against float64, and transformers models that train by it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny_models
import torch

import quant
from quant.kernels.attention.attention_operands import scale_of_rows
from quant.kernels.training.fp8_attention import fp8_training_attention

CASES = [
    # causal, window, queries, keys, dim of q and k, dim of v
    (True, None, 130, 130, 64, 64),
    (True, 40, 140, 140, 32, 32),
    (False, None, 20, 50, 48, 24),
    (True, None, 30, 75, 64, 64),
]


def _operands(queries: int, keys: int, dim: int, value_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, queries, dim), (2, 2, keys, dim), (2, 2, keys, value_dim), (2, 4, queries, value_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int | None, scale: float
) -> torch.Tensor:
    """softmax(q kᵀ · scale) v, written as a formula."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    seen = seen.tril(k.shape[2] - q.shape[2]) if causal else seen
    if window is not None:
        seen = seen.triu(k.shape[2] - q.shape[2] - window + 1)
    return (q @ k.mT * scale).masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    exact = exact.detach()
    return float((value.detach().double() - exact).norm() / exact.norm())


def check(device: str, dtype: torch.dtype, case: tuple[Any, ...], of_operands: float, of_p: float) -> None:
    """Compares with float64: at the rounded operands, where only P and 16 bit are rounded, and at the given ones."""
    causal, window, queries, keys, dim, value_dim = case
    q, k, v, dout = (x.to(device) for x in _operands(queries, keys, dim, value_dim, dtype))
    leaves = [x.clone().requires_grad_(True) for x in (q, k, v)]
    scale = dim**-0.5
    out = fp8_training_attention(*leaves, causal=causal, window=window, softmax_scale=scale)
    assert out.dtype == dtype and out.shape == dout.shape
    out.backward(dout)
    assert all(leaf.grad is not None and leaf.grad.dtype == dtype for leaf in leaves)
    _, _, *codes, q_scale, k_scale, v_scale = torch.ops.quant.fp8_attention_training(
        *(torch.nn.functional.pad(x, (0, -x.shape[-1] % 64)) for x in (q, k, v)), causal, window, scale
    )
    values = [
        (c.double() * scale_of_rows(s.double(), c.shape, None))[..., : x.shape[3]]
        for c, s, x in zip(codes, (q_scale, k_scale, v_scale), (q, k, v), strict=True)
    ]
    for operands, bound in ((values, of_p), ([x.double() for x in (q, k, v)], of_operands)):
        exact = [x.detach().requires_grad_(True) for x in operands]
        y = _attention(*exact, causal, window, scale)
        y.backward(dout.double())
        assert _relative(out, y) < bound
        for leaf, other in zip(leaves, exact, strict=True):
            assert leaf.grad is not None and other.grad is not None
            assert _relative(leaf.grad, other.grad) < bound


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_rounded_operands(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    # E4M3 rounds by at most 2⁻⁴, at random 2⁻⁵·⁸: three operands in a gradient. P is rounded in the output alone.
    check("cpu", dtype, case, of_operands=0.06, of_p=0.025)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_computes_the_same_gradients(case: tuple[Any, ...], dtype: torch.dtype) -> None:
    check("cuda", dtype, case, of_operands=0.06, of_p=0.03)


def test_ops_are_what_compilers_are_told() -> None:
    q, k, v, _ = _operands(130, 130, 64, 64, torch.bfloat16)
    torch.library.opcheck(torch.ops.quant.fp8_attention_training.default, (q, k, v, True, None, 0.1), test_utils=FAKE)
    out, *saved = torch.ops.quant.fp8_attention_training(q, k, v, True, None, 0.1)
    arguments = (torch.randn_like(out), out, *saved, True, None, 0.1)
    torch.library.opcheck(torch.ops.quant.fp8_attention_gradients.default, arguments, test_utils=FAKE)


def test_the_kernel_decodes_blocks_as_written() -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted

    from quant.kernels.attention.portable_fp8_operands import decode_blocks

    codes, scale = torch.randn(2, 2, 130, 48).mul(50).to(torch.float8_e4m3fn), torch.rand(2, 2, 2)
    expected = codes.float() * scale_of_rows(scale, codes.shape, None)
    for dtype in (torch.bfloat16, torch.float16):
        with interpreted():
            values = decode_blocks(codes, scale, dtype)
        assert torch.equal(values, expected.to(dtype))


FAKE = ("test_faketensor",)
ROWS = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(7))


def _gradients(model: Any, rows: torch.Tensor = ROWS, **inputs: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(input_ids=rows, labels=rows, **inputs).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_model_trains_in_it_and_comes_back() -> None:
    model = tiny_models.llama(gain=2.0).train()
    plain_loss, plain = _gradients(model)
    keys = list(model.state_dict())
    report = quant.to_low_precision_training(model, "fp8_rowwise", include="*.down_proj", attention="fp8")
    assert "attention: forward in FP8" in str(report)
    assert list(model.state_dict()) == keys
    without = tiny_models.llama(gain=2.0).train()
    quant.to_low_precision_training(without, "fp8_rowwise", include="*.down_proj")
    (loss, rounded), (other_loss, others) = _gradients(model), _gradients(without)
    assert loss != other_loss and abs(loss - plain_loss) < 0.02 * plain_loss
    name = "model.layers.0.self_attn.q_proj.weight"
    assert 1e-3 < _relative(rounded[name], others[name].double()) < 0.2
    assert _relative(rounded[name], plain[name].double()) < 0.2
    # In eval mode attention is in 16 bit, as in the packed model.
    with torch.no_grad():
        logits = model.eval()(ROWS).logits
        assert torch.equal(logits, without.eval()(ROWS).logits)
        quant.pack(model)
        assert torch.equal(logits, model(ROWS).logits)
    assert model.config._attn_implementation == "sdpa" and "_fp8_attention_in_training" not in vars(model)


def test_windows_are_those_of_the_model() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=64, sliding_window=5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).train()
    _, plain = _gradients(model)
    without = copy.deepcopy(model)
    for each, attention in ((model, "fp8"), (without, "16bit")):
        quant.to_low_precision_training(each, "fp8_rowwise", include="*.1.mlp.down_proj", attention=attention)
    _, rounded = _gradients(model)
    _gradients(without)
    for name in ("q", "k", "v"):
        name = f"model.layers.0.self_attn.{name}_proj.weight"
        assert 1e-3 < _relative(rounded[name], plain[name].double()) < 0.2
    # In eval mode our function makes the mask that transformers would have made, also behind a cache.
    for each in (model, without):
        each.eval()
    with torch.no_grad():
        assert torch.allclose(model(ROWS).logits, without(ROWS).logits, atol=1e-5)
        answers = [each.generate(ROWS[:1, :9], max_new_tokens=6, do_sample=False) for each in (model, without)]
    assert torch.equal(*answers)


def test_padding_and_graphs_give_the_same_gradients() -> None:
    model = tiny_models.llama(gain=2.0, num_hidden_layers=1).train()
    quant.to_low_precision_training(model, "mxfp8", include="*.down_proj", attention="fp8")
    loss, gradients = _gradients(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    of_graph, in_graph = _gradients(compiled)
    assert of_graph == pytest.approx(loss, rel=1e-6)
    for name, gradient in in_graph.items():
        assert torch.allclose(gradient, gradients[name.removeprefix("_orig_mod.")], rtol=1e-4, atol=1e-7)
    # Rows of ones are no mask; padding is one, and leaves the other tokens what they were but for P's rounding.
    assert _gradients(model, attention_mask=torch.ones_like(ROWS))[0] == loss
    mask = torch.ones_like(ROWS)
    mask[:, :4] = 0
    with torch.no_grad():
        padded = model(ROWS, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[:, 4:]
        short = model(ROWS[:, 4:]).logits
    assert 0 < _relative(padded, short.double()) < 0.03


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_that_it_does_not_take_is_refused(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    cause = {"gemma2": "attn_logit_softcapping 50.0", "gpt_oss": "it has attention sinks"}[family]
    with pytest.raises(quant.UserError, match=f"{cause}.*leave out attention"):
        quant.to_low_precision_training(model, "fp8_rowwise", attention="fp8")
    assert not any(hasattr(module, "low_precision") for module in model.modules())
    with pytest.raises(quant.UserError, match="is not a transformers model"):
        quant.to_low_precision_training(torch.nn.Sequential(torch.nn.Linear(32, 32)), "fp8_rowwise", attention="fp8")
    with pytest.raises(quant.UserError, match="unknown attention 'fp4'"):
        quant.to_low_precision_training(model, "fp8_rowwise", attention="fp4")
