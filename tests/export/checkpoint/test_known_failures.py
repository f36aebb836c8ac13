"""The table of known failures is the one that the documentation shows."""

import pytest
from samples import ROOT

from quant.export.checkpoint.other_runtimes import FAILURES, runtime_warnings
from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan


def test_the_documentation_shows_every_failure() -> None:
    lines = (ROOT / "docs" / "vllm.md").read_text().splitlines()
    start = lines.index("## Known failures")
    shown = [line for line in lines[start : lines.index("", start + 5)] if line.startswith("| ")][1:]
    assert shown == [failure.row() for failure in FAILURES.values()]


def test_releases_are_a_span_or_one() -> None:
    assert FAILURES["rotation"].releases == "vLLM 0.26" and FAILURES["mxfp6"].releases == "vLLM 0.26 to 0.33"


@pytest.mark.parametrize(
    ("weight", "activation", "warned"),
    [
        ("fp8_channel", None, True),
        ("fp8_block", None, True),
        ("fp8_channel", "fp8_token", False),
        ("mxfp8", None, False),
    ],
)
def test_weight_only_fp8_experts_need_the_plug_in(weight: str, activation: str | None, warned: bool) -> None:
    name, shape = "model.layers.0.mlp.experts.down_proj", (4, 256, 256)
    rounded = FORMATS[activation] if activation else None
    layer = LayerPlan(name, LayerKind.EXPERTS, shape, FORMATS[weight], activation=rounded)
    found = [line for line in runtime_warnings(Plan((layer,))) if "Blockscale's plug-in" in line]
    assert [f"{name} needs quant.load" in line for line in found] == [True] * warned
