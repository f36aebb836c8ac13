"""llama.cpp's formats are solved on their own grid: GPTQ loses much less than a search, and `kfac` less than GPTQ."""

from __future__ import annotations

import pytest
import torch

from quant.calibration.solvers.gptq import Gptq
from quant.calibration.solvers.kfac import Kfac
from quant.calibration.solvers.registry import SOLVERS
from quant.calibration.statistics import LayerStats
from quant.formats.format import GGUF_FORMATS
from quant.formats.superblocks import choose_scales, decode_scales, levels
from quant.formats.tensor import quantize, quantize_with_scale, round_with_scale


def _moment(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, size, generator=generator) * torch.rand(size, generator=generator).exp() ** 2
    x[:, 1:] += 0.7 * x[:, :-1]
    return x.t() @ x / len(x)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_gptq_and_kfac_solve_on_the_grid_of_the_file(name: str) -> None:
    format, rows, columns = GGUF_FORMATS[name], 48, 512
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 0.02
    H, A = _moment(columns, 2), _moment(rows, 3)
    stats = LayerStats(1024, H, outputs=LayerStats(1024, A))

    def losses(solved: torch.Tensor) -> tuple[float, float]:
        error = (solved - weight).double()
        one_sided = error @ H.double() @ error.t()
        outer = A.double() + 0.1 * A.double().diagonal().mean() * torch.eye(rows)
        return float(one_sided.trace()), float((outer * one_sided).sum())

    one = Gptq()(weight, stats, format, global_scale=None, name="layer")
    two = Kfac()(weight, stats, format, global_scale=None, name="layer")
    searched = quantize(weight, format, rule="mse").dequantize()
    assert losses(one.dequantize())[0] < 0.6 * losses(searched)[0]
    assert losses(two.dequantize())[1] < 0.9 * losses(one.dequantize())[1]
    for solved in (one, two):
        again = quantize_with_scale(solved.dequantize(), format, solved.scale)
        torch.testing.assert_close(again.dequantize(), solved.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_search_of_scales_follows_the_importance_of_inputs(name: str) -> None:
    format = GGUF_FORMATS[name]
    weight = torch.randn(32, 512, generator=torch.Generator().manual_seed(1))
    importance = torch.rand(512, generator=torch.Generator().manual_seed(2)) ** 8 + 1e-3

    def error(scale: torch.Tensor) -> float:
        return float((importance * (quantize_with_scale(weight, format, scale).dequantize() - weight) ** 2).sum())

    plain, weighted = choose_scales(weight, format), choose_scales(weight, format, importance)
    unsearched = choose_scales(weight, format, search=False)
    assert error(weighted) < 0.95 * error(plain)
    assert error(plain) < error(unsearched)
    step, minimum = decode_scales(weighted, format)
    assert (step >= 0).all() and (minimum is None or ((minimum >= 0).all() and levels(format) > 0))


def test_solvers_without_a_second_level_of_scales_say_so() -> None:
    supporting = {name for name, solver in SOLVERS.items() if solver.supports(GGUF_FORMATS["q4_k"])}
    assert supporting == {"rtn", "mse", "gptq", "gptq_plain", "kfac"}


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_rounding_under_given_scales_is_quantizing_and_reading(name: str) -> None:
    weight = torch.randn(4, 256, generator=torch.Generator().manual_seed(1))
    solved = quantize(weight, GGUF_FORMATS[name], rule="mse")
    rounded = round_with_scale(weight, GGUF_FORMATS[name], solved.scale, None)
    assert torch.equal(rounded, solved.dequantize())
