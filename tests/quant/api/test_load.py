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
        "quant.export.checkpoint.carry_over",
        "quant.export.checkpoint.convert",
        "quant.export.checkpoint.other_runtimes",
        "quant.models.huggingface",
        "quant.models.pipelines",
        "quant.models.prediction_heads",
        "quant.models.state_dict",
        "quant.export.checkpoint.open_checkpoint",
        "quant.export.checkpoint.save",
        "quant.export.checkpoint.load",
        "quant.base.listener",
        "quant.calibration.session",
        "quant.calibration.ranks",
        "quant.export.checkpoint.files.compressed_tensors",
        "quant.export.checkpoint.files.names",
        "quant.export.checkpoint.files.layout",
        "quant.export.checkpoint.files.layouts",
        "quant.export.checkpoint.files.modelopt",
        "quant.base.atomic",
        "quant.base.errors",
        "quant.base.json_files",
        "quant.base.parallel",
        "quant.base.processor",
        "quant.base.torch_modes",
        "quant.models.gguf",
        "quant.models.gguf_architectures",
        "quant.models.open_model",
        "quant.export.checkpoint.files.tensors",
        "quant.export.checkpoint.files.tensor_file",
        "quant.export.checkpoint.files.directory",
        "quant.models.files",
        "quant.models.quantized_tensors",
        "quant.models.stored_weights",
    }
