"""Loading a checkpoint stays light: it imports neither a solver nor an observer, a report or an allocation."""

from __future__ import annotations

import json
import subprocess
import sys

from samples import GOLDENS


def test_loading_imports_nothing_that_decides_or_measures() -> None:
    code = (
        f"import json, sys, quant; quant.load({str(GOLDENS / 'compressed_tensors' / 'NVFP4')!r})\n"
        "ours = {name: module for name, module in sys.modules.items() if name.startswith('quant.')}\n"
        "print(json.dumps([name for name, module in ours.items() if module.__file__]))"  # folders have none
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    rooms = {name for name in loaded if name.split(".")[1] in ("formats", "kernels", "recipes")}
    assert {name.rpartition(".")[0] for name in rooms} >= {"quant.formats", "quant.kernels.linear", "quant.recipes"}
    assert loaded - rooms == {
        "quant.checkpoints.carry_over",
        "quant.checkpoints.model_card",
        "quant.export.checkpoint.configs.known_failures",
        "quant.plan.prediction_heads",
        "quant.models.torch_files",
        "quant.models.exported_linears",
        "quant.checkpoints.open",
        "quant.checkpoints.checkpoint_warnings",
        "quant.plan.plan_warnings",
        "quant.checkpoints.load",
        "quant.checkpoints.pretrained",
        "quant.checkpoints.trial_load",
        "quant.checkpoints.save",
        "quant.calibration.blocks",
        "quant.calibration.listener",
        "quant.calibration.placement",
        "quant.calibration.prefetch",
        "quant.calibration.ranks",
        "quant.calibration.session",
        "quant.export.checkpoint.configs.compressed_tensors_config",
        "quant.export.checkpoint.configs.compressed_tensors_warnings",
        "quant.export.checkpoint.configs.config_file",
        "quant.export.checkpoint.configs.config_plan",
        "quant.export.checkpoint.conversion_rules",
        "quant.export.checkpoint.layout",
        "quant.export.checkpoint.layouts",
        "quant.export.checkpoint.configs.modelopt_config",
        "quant.plan.callers_model",
        "quant.models.experts_forward",
        "quant.errors",
        "quant.evaluation.loss_text",
        "quant.export.checkpoint.write",
        "quant.export.checkpoint.check",
        "quant.export.checkpoint.checksums",
        "quant.export.checkpoint.read",
        "quant.export.checkpoint.scan",
        "quant.export.checkpoint.compressed_tensors",
        "quant.export.checkpoint.directory",
        "quant.export.checkpoint.modelopt",
        "quant.export.checkpoint.joined",
        "quant.export.checkpoint.names",
        "quant.export.checkpoint.patterns",
        "quant.export.checkpoint.tensor_file",
        "quant.export.checkpoint.tied",
        "quant.extras",
        "quant.execution.encoder_layers",
        "quant.execution.install",
        "quant.models.configs",
        "quant.models.files",
        "quant.models.hub",
        "quant.models.origin",
        "quant.models.huggingface",
        "quant.models.quantized.layouts",
        "quant.models.quantized.quantization",
        "quant.models.quantized.tensors",
        "quant.models.state_dict",
        "quant.models.quantized.unpacking",
        "quant.report.saved_report",
        "quant.plan.check",
        "quant.models.stored_weights",
    }
