"""This file holds small plans, written by hand, for the tests of what works on plans."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from torch import nn

from quant.cli.main import main
from quant.formats.format import get_format
from quant.recipes.groups import watching
from quant.recipes.layers import Layer, LayerKind, find_layers
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_check import Problem

NVFP4, FP8C, TOKEN = get_format("nvfp4"), get_format("fp8_channel"), get_format("fp8_token")
ATTENTION = "model.layers.{}.self_attn.{}_proj"


def block(i: int, weight: str | None = "nvfp4", activation: str | None = None, group: bool = True) -> list[LayerPlan]:
    """q, k, v in one group, and down, of one block."""
    formats = (get_format(weight) if weight else None, get_format(activation) if activation else None)
    name = f"model.layers.{i}.self_attn.(q_proj|k_proj|v_proj)" if group else None
    qkv = [LayerPlan(ATTENTION.format(i, p), LayerKind.LINEAR, (64, 128), *formats, group=name) for p in "qkv"]
    return [*qkv, LayerPlan(f"model.layers.{i}.mlp.down_proj", LayerKind.LINEAR, (128, 256), *formats)]


def planned(model: object, plan: Path, *options: object) -> Path:
    """A file with the plan that `quant plan make` makes."""
    done = CliRunner().invoke(main, ["plan", "make", *map(str, (model, *options)), "--out", str(plan), "--quiet"])
    assert done.exit_code == 0, done.output
    return plan


def plan_of(*layers: LayerPlan, **fields: Any) -> Plan:
    embedding = LayerPlan("model.embed_tokens", LayerKind.EMBEDDING, (512, 128), reason="looked up")
    head = LayerPlan("lm_head", LayerKind.HEAD, (512, 128), tied_to="model.embed_tokens", reason="head")
    norm = LayerPlan("model.norm", LayerKind.NORM, (128,), reason="norm")
    return Plan((embedding, *layers, norm, head), **fields)


def layers_of(plan: Plan) -> list[Layer]:
    return [Layer(m.name, m.kind, m.shape, m.group, m.tied_to) for m in plan.layers]


def watched_layers(model: nn.Module, run: Callable[[nn.Module], Any]) -> list[Layer]:
    """The layers of a model with the fusion groups and input dimensions that one forward pass shows."""
    layers = find_layers(model)
    with watching(model, layers) as watched:
        run(model)
    return watched.of(layers)


def where(problems: list[Problem]) -> list[str]:
    return [problem.where for problem in problems]
