"""The public names of `quant`, each with the file that defines it; `__init__.py` reads this list, too."""

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
from quant.calibration.walk.solve import apply_plan as apply_plan
from quant.evaluation.evaluate import evaluate as evaluate
from quant.evaluation.evaluation import Evaluation as Evaluation
from quant.export.checkpoint.convert import convert as convert
from quant.export.checkpoint.load import load as load
from quant.export.checkpoint.save import save as save
from quant.export.checkpoint.verify import verify as verify
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
from quant.training.qat import pack as pack
from quant.training.qat import prepare_qat as prepare_qat
from quant.training.trainer import DistillTrainer as DistillTrainer

__version__: str
