"""What names, commands, options and kinds of export are called since; each goes two releases later, 0.2's with 0.4."""

import importlib
import warnings
from typing import Any

# An attribute of `quant` with a single new name still works, with a warning.
ATTRIBUTES = {
    "Allocation": "quant.calibration.allocation.allocate.Allocation",
    "DistillMixin": "quant.training.trainer.DistillMixin",
    "DistillOptions": "keyword arguments of quant.distill",
    "Exported": "quant.export.export_model.Exported",
    "LowPrecisionTraining": "quant.training.low_precision.conversion.LowPrecisionTraining",
    "QuantExperts": "quant.kernels.linear.experts.QuantExperts",
    "QuantLinear": "quant.kernels.linear.quant_linear.QuantLinear",
    "QuantizedKVCache": "quant.generate.quantized_kv_cache.QuantizedKVCache",
    "TaskScore": "quant.adapters.tasks.TaskScore",
    "Verification": "quant.export.checkpoint.verify.Verification",
    "cache_teacher": "quant.training.distillation_loss.cache_teacher",
    "calibrate": "quant.calibration.walk.collect.calibrate",
    "convert_qat": "quant.pack",
    "convert_trained": "quant.pack",
    "distill_checkpoint": "quant.distill(directory, teacher, out=...)",
    "edit_plan": "Plan.set",
    "evaluate_tasks": "quant.adapters.tasks.evaluate_tasks",
    "from_low_precision_training": "undo() of the object that quant.to_low_precision_training returns",
    "from_modelopt": "quant.load, of the directory that ModelOpt's export_hf_checkpoint writes,",
    "from_torchao": "quant.quantize of the original model with solver='rtn', which has torchao's rounding,",
    "modelopt_config": "quant.adapters.modelopt_names.modelopt_config",
    "quantized_attention": "quant.generate.quantized_attention.quantized_attention",
    "render_html": "Report.to_html",
    "set_weight_cache": "quant.kernels.linear.oracle.set_weight_cache",
}
COMMANDS = {"verify": "check DIRECTORY", "audit": "check ENGINE", "check-engine": "check FILE --source DIRECTORY"}
# Of `quantize`; it had the first sixteen before 0.3.
OF_PLANS = dict.fromkeys(
    ("--fit", "--ctx", "--batch", "--latency", "--max-kl", "--max-ppl-increase", "--target", "--method", "--pin",
     "--forbid", "--at-least", "--search", "--sensitivity", "--attention", "--guard", "--observer", "--kv-bits",
     "--min-task", "--power"),
    "an option of `quant plan make MODEL … --out plan.json`; run its plan with `quantize MODEL --plan plan.json`",
)  # fmt: skip
OPTIONS = {
    "--revision": "part of MODEL since 0.3: org/name@REV",
    "--help-all": "--help since 0.3",
    "--resume": "no option: the same command by itself continues after what an unfinished run has kept",
}
# Options that still work under their old names, with a warning.
RENAMED = {"--recipe": "--format", "--formats": "--format", "--unsafe-load": "--trust-remote-code"}
KINDS = {
    "triton-server": "examples/triton_server/model.py serves in its Python backend what onnx and tensorrt write",
    "edge-llm": "the kind modelopt is what tensorrt-edgellm-export reads; docs/engines.md has the three traps",
}


def attribute(name: str) -> Any:
    """Returns what took the place of `quant.name`; AttributeError says what does, or that there never was one."""
    if name not in ATTRIBUTES:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    new = ATTRIBUTES[name]
    if not (new.startswith("quant.") and new.replace(".", "").isidentifier()):
        raise AttributeError(f"quant.{name} is {new} since 0.3")
    warnings.warn(f"quant.{name} is {new} since 0.3", FutureWarning, stacklevel=3)
    module, _, last = new.rpartition(".")
    return getattr(importlib.import_module(module), last)
