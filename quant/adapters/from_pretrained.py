"""`QuantConfig` has transformers quantize a model while it loads it, or run a quantized checkpoint on our kernels.

    AutoModelForCausalLM.from_pretrained(ID, quantization_config=quant.QuantConfig("nvfp4a16", solver="gptq"))
    AutoModelForCausalLM.from_pretrained(DIR, quantization_config=quant.QuantConfig(), device_map="auto")

Both go through transformers' registry of quantizers. A checkpoint in compressed-tensors belongs to transformers' own
quantizer, which knows neither our kernels nor all of our formats, and takes it where no `quantization_config` is given.
Given a `QuantConfig`, transformers merges it into the checkpoint's config by its "loading attributes", and one of them
is the name of our quantizer. ModelOpt's layout has no quantizer in transformers: this file registers one.

Quantized modules stand in the model, on the meta device, before transformers looks at the files, so that device maps
count their true sizes. transformers then reads the files, and `_ReadLayer` turns the tensors of each layer into the
buffers of its module, by the functions that `quant.load` uses.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import CompressedTensorsConfig

from quant.base.errors import UserError
from quant.export.checkpoint.files.names import EXPERT_PARTS
from quant.export.checkpoint.files.tensors import RUN_TIME_PARTS, read_buffers, read_layer, read_parts
from quant.export.checkpoint.open_checkpoint import KV_SCALES, Checkpoint, kv_scale_problems, refuse, suspect_problems
from quant.export.checkpoint.save import attach
from quant.kernels.linear.install import install_kv_scales, install_weight, mark_quantized, use_expert_modules
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan
from quant.recipes.recipe import Recipe
from quant.run.api import quantize

METHOD = "blockscale"
"""Name of our quantizer in transformers' registry."""
MODELOPT = "modelopt"

_PARTS = ("codes", r"weight_(packed|shape|scale\w*|global_scale)", r"input_\w*scale", *RUN_TIME_PARTS)


class QuantConfig(CompressedTensorsConfig):  # type: ignore[misc]
    """The `quantization_config` of `from_pretrained`.

    Args:
        recipe: a preset's name, a recipe or a plan; None is "nvfp4" for a model in 16 bit, and the only choice for a
            quantized checkpoint, which has its own plan.
        data: calibration inputs, as in `quant.quantize`.
        options: the other options of `quant.quantize`, such as `solver`, `exclude`, `bits` or `device`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "QuantConfig":
        return super().__new__(_Config)

    def __init__(self, recipe: str | Recipe | Plan | None = None, data: Any = None, **options: Any) -> None:
        self.quant_method = METHOD
        self.recipe, self.data, self.options = recipe, data, options
        # transformers reads these attributes of a CompressedTensorsConfig, which it believes this class to be.
        self.quantization_config = None
        self.dequantize = self.use_optimized_inference = False

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Returns a config without options: the checkpoint's own says everything."""
        return (cls(), kwargs) if return_unused_kwargs else cls()

    def get_loading_attributes(self) -> dict[str, Any]:
        options = [name for name, value in (("recipe", self.recipe), ("data", self.data)) if value is not None]
        return {"quant_method": METHOD, "asked": [*options, *self.options]}

    def to_dict(self) -> dict[str, Any]:
        recipe = "nvfp4" if self.recipe is None else self.recipe
        recipe = recipe if isinstance(recipe, str) else type(recipe).__name__.lower()
        named = {key: value for key, value in self.options.items() if isinstance(value, str | int | float | list)}
        return {"quant_method": METHOD, "recipe": recipe, **named}

    to_diff_dict = to_dict


class _Config(QuantConfig):
    """The class of every `QuantConfig`: transformers merges two configs if the names of their classes are equal."""


_Config.__name__ = CompressedTensorsConfig.__name__


class Quantizer(HfQuantizer):  # type: ignore[misc]
    """Quantizes a model that transformers has loaded, or gives it the layers of a quantized checkpoint."""

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._checkpoint: Checkpoint | None = None

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if not self.pre_quantized:
            return
        if asked := getattr(self.quantization_config, "asked", None):
            raise UserError(
                f"QuantConfig({', '.join(f'{name}=…' for name in asked)}): the checkpoint is quantized, and its plan "
                "says everything; pass QuantConfig() without options, or give from_pretrained the original model"
            )
        if not checkpoint_files or not checkpoint_files[0].endswith(".safetensors"):
            raise UserError("a quantized checkpoint is read from its directory of safetensors; give from_pretrained it")
        directory = Path(checkpoint_files[0]).parent
        self._checkpoint = checkpoint = Checkpoint(directory, model)
        plan, meta = checkpoint.plan, Checkpoint(directory, model, meta=True).tensors
        # Modules are installed on the meta device; `_ReadLayer` fills each when transformers comes to its scale.
        names = [re.escape(layer.tensor_name) for layer in plan.quantized]
        for layer in plan.quantized:
            weight, input_scale = read_layer(meta, layer)
            with torch.device("meta"):
                install_weight(model, layer, weight, input_scale, read_parts(meta, layer))
        # The names on disk of quantized tensors: transformers would warn that the model has no use for them.
        kv_scales = r"|\.[kv]_scale$" if plan.kv_cache else ""
        ignored = rf"\.({'|'.join(_PARTS)})$|^({'|'.join(names)})(_\w+)?$" + kv_scales
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), ignored}
        use_expert_modules(model, plan)

    def update_weight_conversions(self, weight_conversions: list[Any], *unused: Any) -> list[Any]:
        if self._checkpoint is None:
            return weight_conversions
        # By these rules the scale of each quantized matrix stands for its layer.
        rules, reads = [], [_ReadLayer(self)]
        quantized = self._checkpoint.plan.quantized
        experts = {layer.name.rpartition(".")[2] for layer in quantized if layer.kind == LayerKind.EXPERTS}
        theirs = self._checkpoint.names.experts
        for last in sorted(experts):
            for part in EXPERT_PARTS.get(last, (last,)):
                inside = rf"{theirs.get(part, part)}\." if part else ""
                rules.append(WeightConverter([rf"\.\d+\.{inside}weight_scale$"], [f".{last}.codes"], reads))
        # A static scale of inputs has one name in the files and in our modules, but not always one shape.
        rules.append(WeightConverter([r"\.weight_scale$", r"\.input_scale$"], [".codes"], reads))
        return [*rules, *weight_conversions]

    def layer_tensors(self, name: str) -> dict[str, Tensor]:
        """Returns the buffers of a quantized module by their full names."""
        assert self._checkpoint is not None
        return read_buffers(self._checkpoint.tensors, self._checkpoint.plan.by_name[name], self._checkpoint.model)

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if self._checkpoint is None:
            config = self.quantization_config
            quantize(model, "nvfp4" if config.recipe is None else config.recipe, config.data, **config.options)
            return model
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint.plan.kv_cache is not None:
            refuse(kv_scale_problems(checkpoint.tensors))
            scales = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name.endswith(KV_SCALES)}
            device = next(model.parameters()).device
            install_kv_scales(model, {name: scale.to(device) for name, scale in scales.items()})
        refuse(suspect_problems(model, checkpoint.tensors))
        mark_quantized(model)
        attach(model, checkpoint.plan)
        return model

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _ReadLayer(ConversionOps):  # type: ignore[misc]
    """Reads a layer when transformers comes to its scales, onto the device where it puts them."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.hf_quantizer = quantizer  # by this name transformers knows not to cast the operation's input

    def __deepcopy__(self, memo: Any) -> "_ReadLayer":
        return self

    def convert(self, input_dict: dict[str, Any], *, full_layer_name: str, **kwargs: Any) -> dict[str, Tensor]:
        source = next(iter(input_dict.values()))
        device = (source[0] if isinstance(source, list) else source).device
        tensors = self.hf_quantizer.layer_tensors(full_layer_name.removesuffix(".codes"))
        return {name: tensor.to(device) for name, tensor in tensors.items()}


# Registering a name twice raises ValueError in transformers 5, as a reload of this module would.
for _name in (METHOD, MODELOPT):
    if _name not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        register_quantization_config(_name)(QuantConfig)
        register_quantizer(_name)(Quantizer)
