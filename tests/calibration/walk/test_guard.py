"""The guard's errors are compared with numpy, and what it writes into a plan is checked."""

import math

import numpy as np
import pytest
import tiny_models
import torch

from quant.calibration.walk.round import promote, relative_error
from quant.formats.format import FORMATS
from quant.recipes.plan import Guard, LayerPlan
from quant.run.api import quantize

NVFP4, MXFP8, FP8 = FORMATS["nvfp4"], FORMATS["mxfp8"], FORMATS["fp8"]
LADDER = [NVFP4, MXFP8, None]


def layer(name: str = "a", **fields: object) -> LayerPlan:
    return LayerPlan(
        **{"name": name, "kind": "linear", "shape": (32, 64), "weight": NVFP4, "reason": "rule 1"} | fields
    )


@pytest.mark.parametrize(
    ("text", "limit", "formats"),
    [("0.1", 0.1, (None,)), ("1e-6 fp8", 1e-6, (FP8,)), (" 2  mxfp8 keep ", 2.0, (MXFP8, None))],
)
def test_a_guard_is_a_limit_and_formats(text: str, limit: float, formats: tuple[object, ...]) -> None:
    assert Guard.parse(text) == Guard(limit, formats)


@pytest.mark.parametrize("text", ["", "fp8", "0 fp8", "-0.1", "inf keep", "nan"])
def test_a_guard_without_a_positive_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write a positive limit and the formats to try, as in '0\.1 fp8 keep'"):
        Guard.parse(text)


def test_a_guard_names_the_format_that_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"guard '0\.1 fp5': .*fp5.*known formats"):
        Guard.parse("0.1 fp5")


def test_a_layers_own_format_comes_first() -> None:
    guard = Guard.parse("0.1 mxfp8 keep")
    assert guard.formats_for(layer()) == (NVFP4, MXFP8, None)
    assert guard.formats_for(layer(weight=MXFP8)) == (MXFP8, None)


def test_error_is_the_ratio_of_frobenius_norms() -> None:
    reference, output = torch.randn(2, 3, 4, 5)
    expected = np.linalg.norm((output - reference).double().ravel()) / np.linalg.norm(reference.double().ravel())
    assert relative_error(reference, output) == pytest.approx(expected, rel=1e-6)


def test_error_does_not_overflow_in_half_precision() -> None:
    reference = torch.full((100,), 60000.0, dtype=torch.float16)
    assert relative_error(reference, reference * 0.5) == 0.5


def test_error_at_the_edges() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero, one) == math.inf
    assert relative_error(one, torch.tensor([1, torch.nan, 1])) == math.inf
    assert relative_error(one, torch.tensor([1, torch.inf, 1])) == math.inf
    with pytest.raises(ValueError, match="reference output holds NaN"):
        relative_error(torch.tensor([torch.nan]), torch.ones(1))


def test_within_the_limit_nothing_changes() -> None:
    entry = layer()
    assert promote(entry, 0.1, 0.1, LADDER) is entry
    kept = layer(weight=None)
    assert promote(kept, 9.0, 0.1, LADDER) is kept


def test_above_the_limit_the_next_format_is_taken_and_explained() -> None:
    promoted = promote(layer(activation=NVFP4, score=1.0, cost=5), 0.25, 0.1, LADDER)
    assert (promoted.weight, promoted.activation, promoted.score, promoted.cost) == (MXFP8, MXFP8, None, None)
    assert promoted.reason == "rule 1; relative error 0.25 in nvfp4 exceeds the limit 0.1, so mxfp8 instead"


def test_activations_in_another_format_or_none_stay() -> None:
    assert promote(layer(), 1, 0.1, LADDER).activation is None
    assert promote(layer(activation=FP8), 1, 0.1, LADDER).activation is FP8


def test_activations_move_to_the_format_that_goes_with_the_weights() -> None:
    channel, token = FORMATS["fp8_channel"], FORMATS["fp8_token"]
    ladder = [NVFP4, channel, FORMATS["int4"], None]
    promoted = promote(layer(activation=NVFP4), 1, 0.1, ladder)
    assert (promoted.weight, promoted.activation) == (channel, token)
    assert promote(layer(weight=FP8, activation=FP8), 1, 0.1, [FP8, MXFP8]).activation is MXFP8
    assert promote(layer(weight=channel, activation=token), 1, 0.1, [channel, MXFP8]).activation is MXFP8


def test_to_16_bit_and_the_end_of_the_list() -> None:
    promoted = promote(layer(weight=MXFP8, activation=FP8, reason=""), math.nan, 0.1, LADDER)
    assert (promoted.weight, promoted.activation) == (None, None)
    assert promoted.reason == "relative error nan in mxfp8 exceeds the limit 0.1, so 16 bit instead"
    last = promote(layer(weight=MXFP8), 0.5, 0.1, [NVFP4, MXFP8])
    assert last.weight is MXFP8
    assert last.reason.endswith("exceeds the limit 0.1, but it is the last format in its list")


def test_layers_that_a_guard_does_not_compare_are_named() -> None:
    rows = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match=r"linear layers alone: 4 layers of another kind, .*\.0\.mlp\.experts") as seen:
        done = quantize(tiny_models.mixtral(gain=3), "nvfp4", rows, solver="rtn", guard="0.0001")
    assert {layer.name.rpartition(".")[2] for layer in done.plan.quantized} == {"gate_up_proj", "down_proj"}
    assert sum("of another kind" in str(each.message) for each in seen) == 1
