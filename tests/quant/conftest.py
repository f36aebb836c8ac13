"""The fixtures give reports, one with every section and one with hostile names, and the golden model's plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from samples import BASE

from quant.calibration.allocation.goal import AllocationRecord, Budget, BudgetKind, Chosen, CurvePoint, Round, Uniform
from quant.calibration.layer_result import LayerResult, layer_result
from quant.calibration.sensitivity.table import UNITS, GroupScores, Sensitivity
from quant.evaluation.evaluation import Evaluation
from quant.formats.format import Format, get_format
from quant.formats.tensor import quantize
from quant.models.open_model import open_model
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan, bits_per_weight
from quant.recipes.plan_make import make_plan
from quant.report.report import Audit, KVCache, LayerReceipt, Receipt, Report

FORMATS = ("nvfp4", "fp8", "keep")
EVIL = 'model.layers.0.<script>alert("x")</script>&amp;'


def allocated(blocks: int = 30, width: int = 576) -> tuple[Report, Plan]:
    """A small Llama's layers, allocated over NVFP4, FP8 and 16 bit, each with a reason of its own."""
    layers = [LayerPlan("model.embed_tokens", LayerKind.EMBEDDING, (49152, width), reason="embedding: looked up")]
    groups = []
    for block in range(blocks):
        at = f"model.layers.{block}"
        for tails, rows, columns in (
            (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), width, width),
            (("self_attn.o_proj",), width, width),
            (("mlp.gate_proj", "mlp.up_proj"), 4 * width, width),
            (("mlp.down_proj",), width, 4 * width),
        ):
            names = tuple(f"{at}.{tail}" for tail in tails)
            group = names[0]
            if len(names) > 1:
                parent = names[0].rpartition(".")[0]
                group = f"{parent}.({'|'.join(n.rpartition('.')[2] for n in names)})"
            # The ends of the model and down projections matter more: a plausible shape, no measurement.
            nvfp4 = 1e-3 * len(names) * (1 + 20 * math.exp(-block / 2) + 6 * ("down" in group) + (block * 7 % 5))
            scores = {"nvfp4": nvfp4, "fp8": nvfp4 / 40, "keep": 0.0}
            chosen = "nvfp4" if nvfp4 < 0.011 else "fp8" if nvfp4 < 0.03 else "keep"
            format = None if chosen == "keep" else get_format(chosen)
            members = [
                LayerPlan(
                    name,
                    LayerKind.LINEAR,
                    (rows if i == 0 or "mlp" in name else rows // 3, columns),
                    format,
                    format,
                    "mse",
                    f"{chosen}: {scores[chosen]:.5f} nats at {16 if format is None else format.bits_per_weight():.2f} "
                    "bits; no other format of the budget loses less",
                    group if len(names) > 1 else None,
                    score=scores[chosen],
                )
                for i, name in enumerate(names)
            ]
            layers += members
            options: dict[str, Format | None] = {"nvfp4": get_format("nvfp4"), "fp8": get_format("fp8"), "keep": None}
            sizes = {
                f: sum(replace(m, weight=format, activation=None).nbytes for m in members)
                for f, format in options.items()
            }
            numel = sum(m.numel for m in members)
            bits = {f: 8 * size / numel for f, size in sizes.items()}
            groups.append(GroupScores(group, names, numel, scores, bits, sizes))
        layers.append(LayerPlan(f"{at}.input_layernorm", LayerKind.NORM, (width,), reason="norm: negligible"))
    layers.append(LayerPlan("lm_head", LayerKind.HEAD, (49152, width), reason="tied", tied_to="model.embed_tokens"))
    plan = Plan(tuple(layers), kv_cache=get_format("fp8"), provenance={"model": "synthetic", "seed": 0})
    return _report(plan, Sensitivity("kl", FORMATS, UNITS["kl"], 8, 512, tuple(groups), "00", 210.0)), plan


def _report(plan: Plan, table: Sensitivity) -> Report:
    linear = [layer for layer in plan.layers if layer.kind == LayerKind.LINEAR]
    bits = bits_per_weight(linear)
    predicted = sum(layer.score or 0.0 for layer in plan.layers if layer.group is None)
    predicted += sum(members[0].score or 0.0 for members in plan.groups().values())
    curve = tuple(
        CurvePoint(4.5 + 0.5 * i, predicted * 2.0 ** (1 - i), predicted * 2.0 ** (1.1 - i) if i % 3 == 0 else None)
        for i in range(9)
    )
    record = AllocationRecord(
        Budget(BudgetKind.BITS, 6.0),
        Chosen(bits, predicted, 1.12 * predicted, sum(layer.nbytes for layer in linear)),
        curve,
        (Uniform("nvfp4", 4.5, 3 * predicted), Uniform("fp8", 8.0, 0.25 * predicted)),
        (
            Round(bits, predicted, 1.3 * predicted),
            Round(bits, predicted, 1.12 * predicted, ("model.layers.3.mlp.down_proj", "model.layers.9.mlp.down_proj")),
        ),
        48.0,
    )
    results = [
        LayerResult(
            layer.name,
            layer.weight.name if layer.weight else None,
            layer.activation.name if layer.activation else None,
            layer.shape,
            layer.bits_per_weight,
            layer.nbytes,
            (20.0 if layer.weight.name == "nvfp4" else 31.5) + 0.05 * (i % 7) if layer.weight else None,
            0.1 * 2.0 ** (i % 7 - (0 if layer.weight.name == "nvfp4" else 4)) if layer.weight else None,
            layer.solver if layer.weight else None,
            layer.reason,
        )
        for i, layer in enumerate(plan.layers)
    ]
    receipts = tuple(
        LayerReceipt(layer.name, 1e-7 * (1 + i % 7), 0.0, 0.4 if i == 5 else 2e-8 * (1 + i % 3), None, i != 5)
        for i, layer in enumerate(plan.quantized)
    )
    audit = tuple(
        Audit(layer.name, f"{layer.weight} GEMM", "half GEMM" if i == 5 else f"{layer.weight} GEMM", i != 5)
        for i, layer in enumerate(plan.quantized)
    )
    return Report(
        "a synthetic model",
        results,
        sum(2 * layer.numel for layer in plan.layers if layer.tied_to is None),
        plan.nbytes,
        plan.effective_bits,
        Evaluation(20.31, 0.118, 0.831, 8176, 61.3, 18.683),
        plan.digest(),
        "quantize synthetic --bits 6.0",
        {"torch": "2.13.0"},
        {"sensitivity": 210.0, "allocate": 48.0},
        sensitivity=table,
        allocation=record,
        receipt=Receipt(receipts, audit, False),
        kv_cache=KVCache(30 * 2 * 192 * 8 * 32768, 32768, 8),
    )


@pytest.fixture(scope="session")
def rich_report() -> tuple[Report, Plan]:
    """A report with every section, and its plan."""
    return allocated()


def make(names: int = 24, formats: tuple[str, ...] = ("nvfp4", "mxfp8", "fp8_channel")) -> tuple[Report, Plan]:
    """A report over real quantizations of small random weights."""
    generator = torch.Generator().manual_seed(0)
    layers = [LayerPlan("model.embed_tokens", LayerKind.EMBEDDING, (64, 32), reason="embeddings are looked up")]
    for i in range(names):
        weight = get_format(formats[i % len(formats)]) if formats else None
        name = f"model.layers.{i // 2}.mlp.{'up' if i % 2 else 'down'}_proj" if i else EVIL
        layers.append(LayerPlan(name, LayerKind.LINEAR, (48, 64), weight, reason='it\'s <b>"cheap"</b>'))
        layers.append(LayerPlan(f"model.layers.{i}.norm", LayerKind.NORM, (64,), reason="norms have no matmul"))
    layers.append(LayerPlan("lm_head", LayerKind.HEAD, (64, 32), reason="tied", tied_to="model.embed_tokens"))
    plan = Plan(tuple(layers), provenance={"recipe": "mixed <i>", "seed": 0, "command": "quantize again"})
    results = []
    for layer in layers:
        weight = torch.randn(layer.shape, generator=generator)
        results.append(layer_result(layer, weight, quantize(weight, layer.weight) if layer.weight else None))
    report = Report(
        model="tiny <model>",
        layers=results,
        bytes_before=sum(2 * layer.numel for layer in layers if layer.tied_to is None),
        bytes_after=plan.nbytes,
        effective_bits=plan.effective_bits,
        evaluation=Evaluation(23.1516, 0.2206, 0.762, 8176, 61.3, 18.683),
        plan_digest=plan.digest(),
        command="quantize tiny --format nvfp4 --include '<b>*' && true",
        versions={"torch": "2.13.0"},
        seconds={"quantize": 3.2},
        peak_rss_bytes=1_466_000_000,
        files={"model-00001-of-00002.safetensors": "a3" * 32, "config<1>.json": "7b" * 32},
        warnings=["<u>mind</u> the gap"],
        notes=["folds <u>mind</u> scales"],
    )
    return report, plan


@pytest.fixture(scope="session")
def make_report() -> Callable[..., tuple[Report, Plan]]:
    """Makes a report over real quantizations, without an allocation, for numbers of layers and formats."""
    return make


@pytest.fixture(scope="module")
def golden() -> Plan:
    """The golden model in NVFP4."""
    model = open_model(BASE, meta=True).model
    assert model is not None
    return make_plan(model, "nvfp4")
