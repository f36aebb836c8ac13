"""A kernel is compared with the oracle before a layer of the model takes it: one small product, once a process.

A driver, a Triton or a PyTorch that compiles a kernel wrongly, or not at all, then costs the speed of that kernel and
not the answers of the model: vLLM keeps its own kernels, and a line of its log says what failed. A test takes a few
milliseconds and the time that Triton needs for the kernels, which the model's layers would need anyway.

    format of linear layers   1 and 80 tokens by a matrix of 128 × 256       the kernels for few and for many tokens
                              192 and 1,025 tokens, where prompts are multiplied in FP8
    experts                   the same matrix four times, rows for each
    norm and SwiGLU           three rows of 256 columns
    rotation, cache write     the same rows as two heads
    attention                 24 keys written to three pages, one query; the same over pages in 16 bit
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from quant.formats.format import FORMATS
from quant.formats.tensor import moved, quantize
from quant.kernels.attention.attention_operands import AttentionOptions, decode_tiles_for
from quant.kernels.attention.kv_pages import KVPages, write_reference
from quant.kernels.attention.paged_attention import cell_bytes, paged_reference, pages_of
from quant.kernels.linear.experts import grouped_linear
from quant.vllm_plugin import loaded_weights

TOLERANCE = 2.0**-7
"""Largest relative error of a product with inputs in bfloat16; the kernels' own is near 2^-9."""
OUT, IN, TOKENS, EXPERTS = 128, 256, (1, 80), 4
# Of attention: the keys and values of 24 tokens in two of three pages.
_KV_HEADS, _DIM, _PAGE, _LENGTH, _TABLE = 2, 64, 16, 24, torch.tensor([[2, 0]], dtype=torch.int32, device="cpu")

_results: dict[tuple[str, str], str] = {}


@cache
def _sample(rows: int, columns: int, seed: int) -> Tensor:
    """Draws the same normal values on every machine, by the CPU's generator."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cpu", dtype=torch.float32)


def _relative(y: Tensor, expected: Tensor) -> float:
    return float((y.cpu().double() - expected).norm() / expected.norm())


def _largest(errors: list[float]) -> float:
    """Returns the largest error, or NaN if there is one, which Python's `max` would pass over."""
    return float(torch.tensor(errors).amax())


@dataclass(frozen=True)
class SelfTest:
    """Tests of kernels on one device; `…_failure` says why layers cannot take our kernels here, empty if they can."""

    device: torch.device

    @classmethod
    def on_current_gpu(cls) -> SelfTest:
        """Returns the tests on the GPU of this process."""
        return cls(torch.device("cuda", torch.cuda.current_device()))

    def product_failure(self, format: str) -> str:
        return self._failure_of(f"linear layers in {format}", lambda: self._linear_error(format))

    def experts_failure(self, format: str) -> str:
        return self._failure_of(f"experts in {format}", lambda: self._experts_error(format))

    def norm_failure(self) -> str:
        part = "norms, SwiGLU, rotations and cache writes"
        return self._failure_of(part, lambda: _largest([self._norm_error(), self._rotation_error()]))

    def attention_failure(self) -> str:
        return self._failure_of("attention over an NVFP4 cache", self._attention_error)

    def decoding_failure(self) -> str:
        return self._failure_of("attention over a cache in 16 bit", self._decoding_error)

    def _failure_of(self, part: str, error_of: Callable[[], float]) -> str:
        key = part, str(self.device)
        if key not in _results:
            # vLLM sets a default dtype and device around the construction of a model; samples are made on the CPU.
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            try:
                with torch.no_grad(), torch.device("cpu"):
                    error = error_of()
                failure = f"our kernel for {part} failed its self-test: relative error {error:.3g}"
                _results[key] = "" if error <= TOLERANCE else failure  # a NaN is wrong too
            # Triton, its assembler and the driver raise errors of many classes; each means "not on this machine".
            except Exception as error:
                reason = " ".join(str(error).split())[:120]
                _results[key] = f"our kernel for {part} does not run here: {type(error).__name__}: {reason}"
            finally:
                torch.set_default_dtype(before)
        return _results[key]

    def _linear_error(self, format: str) -> float:
        weight = quantize(_sample(OUT, IN, 0) / 16, FORMATS[format])
        held, layer, errors = loaded_weights.arranged(moved(weight, self.device))[0], torch.nn.Module(), []
        loaded_weights.hold(layer, held)
        in_fp8 = (
            (loaded_weights.FP8_FROM, loaded_weights.FP8_DECODED_UP_TO + 1)
            if loaded_weights.multiplies_prompts_in_fp8(format)
            else ()
        )
        for tokens in (*TOKENS, *in_fp8):
            x = _sample(tokens, IN, tokens).bfloat16()
            expected = x.double() @ weight.dequantize(torch.float64).T
            if tokens in in_fp8:
                # Two operands in E4M3 have an error of about 2^-5, against 2^-9 in bfloat16. So small a layer would not
                # be multiplied in FP8 by itself.
                errors.append(_relative(loaded_weights.multiply_in_fp8(x.to(self.device), held, None), expected) / 8)
            else:
                y = loaded_weights.multiply(layer, x.to(self.device), None, layer.get_parameter("weight"))
                errors.append(_relative(y, expected))
        return _largest(errors)

    def _experts_error(self, format: str) -> float:
        values = torch.stack([_sample(OUT, IN, expert) / 16 for expert in range(EXPERTS)])
        weight = quantize(values, FORMATS[format])
        held, _ = loaded_weights.arranged(moved(weight, self.device))
        dense, errors = weight.dequantize(torch.float64), []
        for tokens in TOKENS:
            x = _sample(tokens * EXPERTS, IN, tokens).bfloat16()
            offsets = torch.arange(0, EXPERTS * tokens + 1, tokens, dtype=torch.int32, device=self.device)
            expected = torch.cat([x[i * tokens : (i + 1) * tokens].double() @ dense[i].T for i in range(EXPERTS)])
            errors.append(_relative(grouped_linear(x.to(self.device), held, offsets), expected))
        return _largest(errors)

    def _norm_error(self) -> float:
        from quant.kernels.attention.portable_decoder_step import add_rmsnorm, swiglu

        x, residual = _sample(3, IN, 0).bfloat16(), _sample(3, IN, 1).bfloat16()
        weight = _sample(1, IN, 2)[0].bfloat16()
        h = (x + residual).double()
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        gate, up = x.double().chunk(2, -1)
        x, residual, weight = moved((x, residual, weight), self.device)
        gated = torch.nn.functional.silu(gate) * up
        return _largest([_relative(add_rmsnorm(x, residual, weight, 1e-6)[0], normed), _relative(swiglu(x), gated)])

    def _rotation_error(self) -> float:
        """Returns the larger error of rotated keys in their slots, one at a time and of values there."""
        from quant.kernels.attention.portable_decoder_step import rotate, store_rows

        heads, dim = 2, IN // 2
        both = _sample(3, 2 * IN, 3).bfloat16()
        k, v = both[:, :IN], both[:, IN:]
        angles = _sample(8, dim // 2, 4)
        cache = torch.cat((angles.cos(), angles.sin()), 1).bfloat16()
        positions, slots = torch.tensor([5, 0, 7]), torch.tensor([4, -1, 1])
        c, s = cache.double()[positions, None].chunk(2, -1)
        low, high = k.double().view(3, heads, dim).chunk(2, -1)
        turned = torch.cat((low * c - high * s, high * c + low * s), -1)
        expected = torch.zeros(2, 6, heads, dim, dtype=torch.float64)
        expected[0, [4, 1]], expected[1, [4, 1]] = turned[[0, 2]], v.double().view(3, heads, dim)[[0, 2]]
        both, cache, positions, slots = moved((both, cache, positions, slots), self.device)
        rows, pages = rotate(positions, both[:, :IN], both[:, :IN], cache, dim), both.new_zeros(2, 3, 2, heads, dim)
        store_rows(rows[1].view(3, heads, dim), both[:, IN:].view(3, heads, dim), pages[0], pages[1], slots)
        return _largest(
            [_relative(rows[0].view(turned.shape), turned), _relative(pages.view(expected.shape), expected)]
        )

    def _attention_error(self) -> float:
        """Returns the error of one query over an NVFP4 cache that our kernel has written."""
        from quant.kernels.attention.portable_paged_kv_cache import write_kv_slots

        scales = torch.full((2, _KV_HEADS), 1 / 600, dtype=torch.float32)
        k, v = (_sample(_LENGTH * _KV_HEADS, _DIM, i).view(_LENGTH, _KV_HEADS, _DIM).bfloat16() for i in (0, 1))
        cache = torch.zeros(3, _KV_HEADS, _PAGE, cell_bytes(_DIM), dtype=torch.uint8)
        oracle = pages_of(cache, _KV_HEADS, _PAGE, _DIM, (scales[0], scales[1]))
        write_reference(
            oracle, _TABLE, torch.zeros(1, dtype=torch.float32), k.transpose(0, 1)[None], v.transpose(0, 1)[None]
        )
        scales = scales.to(self.device)
        pages = pages_of(torch.zeros_like(cache, device=self.device), _KV_HEADS, _PAGE, _DIM, (scales[0], scales[1]))
        slots = [int(_TABLE[0, i // _PAGE]) * _PAGE + i % _PAGE for i in range(_LENGTH)]
        write_kv_slots(pages, torch.tensor(slots, device=self.device), k.to(self.device), v.to(self.device))
        return self._paged_error(oracle, pages)

    def _decoding_error(self) -> float:
        # As in vLLM's blocks: tokens, then heads, and the key of a head beside its value.
        block = _sample(3 * _PAGE * _KV_HEADS, 2 * _DIM, 0).view(3, _PAGE, _KV_HEADS, 2 * _DIM)
        oracle, pages = (
            KVPages(each[..., :_DIM], each[..., _DIM:], None, _DIM)
            for each in (block.bfloat16().transpose(1, 2), block.bfloat16().transpose(1, 2).to(self.device))
        )
        return self._paged_error(oracle, pages)

    def _paged_error(self, oracle: KVPages, pages: KVPages) -> float:
        from quant.kernels.attention.portable_paged_attention import attend_pages

        q = _sample(2 * _KV_HEADS, _DIM, 2).view(1, 2 * _KV_HEADS, 1, _DIM).bfloat16()
        lengths = torch.tensor([_LENGTH], dtype=torch.int32)
        expected = paged_reference(q, oracle, _TABLE, lengths)
        tiles = decode_tiles_for(pages, 2, _KV_HEADS, _LENGTH, 132)
        q, table, lengths = moved((q, _TABLE, lengths), self.device)
        return _relative(
            attend_pages(q, pages, table, lengths, AttentionOptions(causal=True), tiles), expected.double()
        )
