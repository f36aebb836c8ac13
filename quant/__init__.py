"""Blockscale: from a trained PyTorch model to a deployed low-precision one.

The public names are resolved when first used, so that `import quant` costs nothing and pulls in neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

__version__ = "0.2.0"


def _check_links() -> None:
    """Raises ImportError in a checkout where git or an archive has written text files in the place of the links."""
    home = os.path.dirname(__file__)
    links = [os.path.join(home, room) for room in ("formats", "kernels", "recipes", "calibration", "export")]
    if os.path.isdir(home) and (broken := [path for path in links if not os.path.isdir(path)]):
        paths = " ".join(f"quant/{os.path.basename(path)}" for path in links)
        raise ImportError(
            f"{broken[0]} is not the link to ../{os.path.basename(broken[0])} that it is in the repository: in a "
            f"clone, run `git config core.symlinks true` and `git checkout -- {paths}` (Windows makes links only in "
            "its developer mode); otherwise install Blockscale with `pip install .`, which needs no links"
        )


_check_links()

_PUBLIC = {
    "quant.adapters.from_pretrained": ("QuantConfig",),
    "quant.adapters.lightning_callback": ("QATCallback",),
    "quant.adapters.lora": ("lora", "merge_lora"),
    "quant.adapters.modelopt_names": ("modelopt_config",),
    "quant.adapters.tasks": ("TaskScore", "evaluate_tasks"),
    "quant.base.errors": ("UserError",),
    "quant.base.listener": ("Listener",),
    "quant.calibration.allocation.allocate": ("Allocation", "allocate"),
    "quant.calibration.allocation.goal": ("Goal",),
    "quant.calibration.layer_result": ("Quantized",),
    "quant.calibration.texts.rows": ("calibration_rows", "token_rows"),
    "quant.calibration.walk.input_scales": ("calibrate",),
    "quant.calibration.walk.solve_weights": ("apply_plan",),
    "quant.evaluation.evaluate": ("evaluate",),
    "quant.evaluation.evaluation": ("Evaluation",),
    "quant.export.checkpoint.convert": ("convert",),
    "quant.export.checkpoint.load": ("load",),
    "quant.export.checkpoint.save": ("save",),
    "quant.export.checkpoint.verify": ("Verification", "verify"),
    "quant.export.export_model": ("Exported", "export_model"),
    "quant.formats.format": ("FORMATS", "Format"),
    "quant.formats.tensor": ("BlockScaledTensor",),
    "quant.generate.quantized_attention": ("quantized_attention",),
    "quant.generate.quantized_kv_cache": ("QuantizedKVCache",),
    "quant.integrations.from_modelopt": ("from_modelopt",),
    "quant.integrations.from_torchao": ("from_torchao",),
    "quant.kernels.linear.expert_modules": ("QuantExperts",),
    "quant.kernels.linear.oracle": ("set_weight_cache",),
    "quant.kernels.linear.quant_linear": ("QuantLinear",),
    "quant.models.open_model": ("Source", "open_model"),
    "quant.recipes.layers": ("LayerKind",),
    "quant.recipes.plan": ("LayerPlan", "Plan"),
    "quant.recipes.plan_edit": ("edit_plan",),
    "quant.recipes.plan_make": ("make_plan",),
    "quant.recipes.recipe": ("Recipe", "Rule"),
    "quant.report.render": ("render_html",),
    "quant.report.report": ("Report",),
    "quant.run.quantize": ("quantize",),
    "quant.training.distill": ("DistillMixin", "distill"),
    "quant.training.distill_checkpoint": ("distill_checkpoint",),
    "quant.training.distill_options": ("DistillOptions",),
    "quant.training.low_precision.conversion": (
        "LowPrecisionTraining",
        "convert_trained",
        "from_low_precision_training",
        "to_low_precision_training",
    ),
    "quant.training.low_precision.training_recipe": ("TrainingRecipe",),
    "quant.training.qat": ("convert_qat", "prepare_qat"),
    "quant.training.teacher_cache": ("cache_teacher",),
    "quant.training.trainer": ("DistillTrainer",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]


def _edit_plan(plan: Any, setting: str, whole_groups: bool) -> Any:
    """Carries out `Plan.set`, whose room may not import the editing of plans."""
    return importlib.import_module("quant.recipes.plan_edit").set_in_python(plan, setting, whole_groups)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    if inspect.isfunction(value):
        # Commands import the function from its module, and its messages name their options.
        value = importlib.import_module("quant.base.errors").naming_parameters(value)
    globals()[name] = value  # found there from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
