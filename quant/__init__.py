"""Blockscale: from a trained PyTorch model to a deployed low-precision one.

The public names are resolved when first used, so that `import quant` costs nothing and pulls in neither torch nor
transformers. Editors and type checkers see them as the imports under `TYPE_CHECKING`, which a test compares with the
table.
"""

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"


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


if TYPE_CHECKING:
    from quant.adapters.from_diffusers import load_pipeline as load_pipeline
    from quant.adapters.from_pretrained import QuantConfig as QuantConfig
    from quant.adapters.lightning_callback import QATCallback as QATCallback
    from quant.adapters.lora import lora as lora
    from quant.adapters.lora import merge_lora as merge_lora
    from quant.base.errors import UserError as UserError
    from quant.base.listener import Listener as Listener
    from quant.calibration.allocation.allocate import allocate as allocate
    from quant.calibration.allocation.goal import Goal as Goal
    from quant.calibration.layer_result import Quantized as Quantized
    from quant.calibration.texts.rows import calibration_rows as calibration_rows
    from quant.calibration.texts.rows import token_rows as token_rows
    from quant.calibration.walk.solve_weights import apply_plan as apply_plan
    from quant.evaluation.evaluate import evaluate as evaluate
    from quant.evaluation.evaluation import Evaluation as Evaluation
    from quant.export.checkpoint.convert import convert as convert
    from quant.export.checkpoint.load import load as load
    from quant.export.checkpoint.save import save as save
    from quant.export.checkpoint.verify import Verification as Verification
    from quant.export.checkpoint.verify import verify as verify
    from quant.export.export_model import Exported as Exported
    from quant.export.export_model import export_model as export_model
    from quant.formats.format import FORMATS as FORMATS
    from quant.formats.format import Format as Format
    from quant.formats.tensor import BlockScaledTensor as BlockScaledTensor
    from quant.models.open_model import Source as Source
    from quant.models.open_model import open_model as open_model
    from quant.recipes.layers import LayerKind as LayerKind
    from quant.recipes.plan import LayerPlan as LayerPlan
    from quant.recipes.plan import Plan as Plan
    from quant.recipes.plan_make import make_plan as make_plan
    from quant.recipes.recipe import Recipe as Recipe
    from quant.recipes.recipe import Rule as Rule
    from quant.report.report import Report as Report
    from quant.run.api import quantize as quantize
    from quant.training.distill import distill as distill
    from quant.training.low_precision.conversion import to_low_precision_training as to_low_precision_training
    from quant.training.low_precision.conversion import training_report as training_report
    from quant.training.low_precision.training_recipe import TrainingRecipe as TrainingRecipe
    from quant.training.pack import pack as pack
    from quant.training.qat import prepare_qat as prepare_qat
    from quant.training.trainer import DistillTrainer as DistillTrainer

_check_links()

_PUBLIC = {
    "quant.adapters.from_diffusers": ("load_pipeline",),
    "quant.adapters.from_pretrained": ("QuantConfig",),
    "quant.adapters.lightning_callback": ("QATCallback",),
    "quant.adapters.lora": ("lora", "merge_lora"),
    "quant.base.errors": ("UserError",),
    "quant.base.listener": ("Listener",),
    "quant.calibration.allocation.allocate": ("allocate",),
    "quant.calibration.allocation.goal": ("Goal",),
    "quant.calibration.layer_result": ("Quantized",),
    "quant.calibration.texts.rows": ("calibration_rows", "token_rows"),
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
    "quant.models.open_model": ("Source", "open_model"),
    "quant.recipes.layers": ("LayerKind",),
    "quant.recipes.plan": ("LayerPlan", "Plan"),
    "quant.recipes.plan_make": ("make_plan",),
    "quant.recipes.recipe": ("Recipe", "Rule"),
    "quant.report.report": ("Report",),
    "quant.run.api": ("quantize",),
    "quant.training.distill": ("distill",),
    "quant.training.low_precision.conversion": ("to_low_precision_training", "training_report"),
    "quant.training.low_precision.training_recipe": ("TrainingRecipe",),
    "quant.training.pack": ("pack",),
    "quant.training.qat": ("prepare_qat",),
    "quant.training.trainer": ("DistillTrainer",),
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *_HOME]

# Attributes of `quant` up to 0.2, and what they are called since. One with a single new name still works, with a
# warning; the table goes with 0.4.
_RENAMED = {
    "Allocation": "quant.calibration.allocation.allocate.Allocation",
    "DistillMixin": "quant.training.trainer.DistillMixin",
    "DistillOptions": "keyword arguments of quant.distill",
    "LowPrecisionTraining": "quant.training.low_precision.conversion.LowPrecisionTraining",
    "QuantExperts": "quant.kernels.linear.experts.QuantExperts",
    "QuantLinear": "quant.kernels.linear.quant_linear.QuantLinear",
    "QuantizedKVCache": "quant.generate.quantized_kv_cache.QuantizedKVCache",
    "TaskScore": "quant.adapters.tasks.TaskScore",
    "cache_teacher": "quant.training.teacher_cache.cache_teacher",
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


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        new = _RENAMED[name]
        if new.startswith("quant.") and new.replace(".", "").isidentifier():
            warnings.warn(f"quant.{name} is {new} since 0.3", FutureWarning, stacklevel=2)
            module, _, attribute = new.rpartition(".")
            return getattr(importlib.import_module(module), attribute)
        raise AttributeError(f"quant.{name} is {new} since 0.3")
    if name not in _HOME:
        raise AttributeError(f"module 'quant' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value  # found there from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
