"""The comparison of two plans gives changes and totals that are counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_samples import ATTENTION, block, plan_of

from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, edit, parse_setting
from quant.recipes.plan_check import diff, totals


def test_diff_counts_decisions_and_not_words() -> None:
    old = plan_of(*block(0), *block(1))
    words = old.replace_layers(replace(m, reason="other words", score=1.0, cost=5) for m in old.layers)
    assert diff(old, words) == []
    new = edit(old, [parse_setting("*down_proj=fp8_channel"), parse_setting("*.0.self_attn.*=nvfp4:mse")])
    kinds = [(change.name, change.kind) for change in diff(old, new)]
    assert kinds == [
        *((ATTENTION.format(0, p), "nvfp4, solver rtn → mse") for p in "qkv"),
        ("model.layers.0.mlp.down_proj", "nvfp4 → fp8_channel"),
        ("model.layers.1.mlp.down_proj", "nvfp4 → fp8_channel"),
    ]
    fewer = replace(old, layers=old.layers[:-1])
    assert [(c.name, c.kind) for c in diff(old, fewer)] == [("lm_head", "removed")]
    assert [(c.name, c.kind) for c in diff(fewer, old)] == [("lm_head", "added")]


def test_totals_count_by_hand() -> None:
    plan = plan_of(*block(0), LayerPlan("kept", LayerKind.LINEAR, (128, 256)), kv_cache=FORMATS["fp8"])
    quantized = 3 * (64 * 128 * 9 // 16 + 4) + 128 * 256 * 9 // 16 + 4
    weights = 3 * 64 * 128 + 128 * 256
    kept = 2 * 128 * 256
    found = totals(replace(plan, guard="0.1 keep", observer="mse"))
    assert (found["guard"], found["observer"]) == ("0.1 keep", "mse")
    assert found["bytes"] == quantized + kept + 2 * 512 * 128 + 2 * 128
    assert found["effective_bits"] == pytest.approx(8 * quantized / weights)
    assert found["bits_linear"] == pytest.approx(8 * (quantized + kept) / (weights + 128 * 256))
    assert (found["quantized"], found["kv_cache"], found["attention"]) == (4, "fp8", None)
