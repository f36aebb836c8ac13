"""Quantized pipelines of diffusers: `quant.load_pipeline`, and a quantizer for `DiffusionPipeline.from_pretrained`.

Importing this file, as `quant.load_pipeline` does, registers the quantizer, since diffusers has none for
compressed-tensors, and attention in FP8, `pipe.transformer.set_attention_backend("blockscale_fp8")`.
Quantized modules stand in the model, on the meta device, before diffusers looks at the files; it loads the tensors that
are not quantized, in the dtype that it is asked for, and `read_buffers` gives the others, as in transformers.
"""

import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, quoted, require
from quant.base.torch_modes import in_own_modes
from quant.calibration.session import find_device
from quant.export.checkpoint.files.tensors import read_buffers, read_layer, read_parts
from quant.export.checkpoint.load import load
from quant.export.checkpoint.open_checkpoint import Checkpoint, refuse, suspect_problems
from quant.export.checkpoint.save import attach
from quant.kernels.attention.forward import attend_in_fp8
from quant.kernels.linear.install import install_weight, mark_quantized
from quant.models import pipelines
from quant.models.files import find_model
from quant.recipes.plan import PLAN_FILE

require("diffusers", "diffusion")

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry  # noqa: E402
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING  # noqa: E402
from diffusers.quantizers.base import DiffusersQuantizer  # noqa: E402
from diffusers.quantizers.quantization_config import QuantizationConfigMixin  # noqa: E402


class _Method(StrEnum):
    """The name in `quantization_config`; diffusers reads the `.value` of an enum."""

    COMPRESSED_TENSORS = "compressed-tensors"


@in_own_modes
def load_pipeline(directory: str | Path, *, device: torch.device | str | None = None) -> Any:
    """Reads a pipeline that `quantize PIPELINE --out DIR` wrote; returns the pipeline of diffusers.

    Each component has the dtype of its files. Quantized ones are read by `quant.load`, and run on its kernels.

    Args:
        directory: the pipeline, or its name on the Hugging Face hub.
        device: where the pipeline runs, such as "cuda"; None is the CPU.

    Raises:
        UserError: no pipeline, or no component is quantized; otherwise as `quant.load`.
    """
    if "cuda" in str(device):
        find_device(device)  # a GPU that is not there is refused before weights are read
    path = find_model(str(directory))
    if not pipelines.is_pipeline(path):
        raise UserError(f"{path}: no pipeline of diffusers (no {pipelines.INDEX}); quant.load reads a single model")
    quantized = [name for name in pipelines.components_of(path) if (path / name / PLAN_FILE).is_file()]
    if not quantized:
        raise UserError(
            f"{path}: no component is quantized; make such a pipeline with `quantize {quoted(path)} --format "
            "nvfp4 --out DIR`"
        )
    pipe = pipelines.open_pipeline(path, **{name: load(path / name) for name in quantized})
    if device is not None:
        pipe.to(device)
        for module in (each for name in quantized for each in getattr(pipe, name).modules()):
            # Qwen-Image's tables of positions are no buffers, and no CUDA graph copies them from the CPU.
            for key in [key for key, value in vars(module).items() if isinstance(value, Tensor)]:
                setattr(module, key, getattr(module, key).to(device))
    return pipe


class _Config(QuantizationConfigMixin):
    """The `quantization_config` of a component; its plan.json says everything."""

    def __init__(self, **fields: Any) -> None:
        self.quant_method: Any = _Method.COMPRESSED_TENSORS
        self.fields = fields

    def to_dict(self) -> dict[str, Any]:
        return {**self.fields, "quant_method": self.quant_method.value}

    to_diff_dict = to_dict


class _Quantizer(DiffusersQuantizer):
    """Gives a model of diffusers the layers of a quantized checkpoint."""

    use_keep_in_fp32_modules = True

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        self.directory = Path(checkpoint_files[0]).parent
        return loaded_keys

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        meta = Checkpoint(self.directory, model, meta=True)
        self.checkpoint = Checkpoint(self.directory, model)
        self.plan = self.checkpoint.plan  # read while the model has its own layers
        for layer in self.plan.quantized:
            weight, input_scale = read_layer(meta.tensors, layer)
            with torch.device("meta"):
                install_weight(model, layer, weight, input_scale, read_parts(meta.tensors, layer))
        # What the files hold of quantized layers: diffusers would say that the model has no use for it.
        names = "|".join(re.escape(layer.name) for layer in self.plan.quantized)
        self.ignored = model._keys_to_ignore_on_load_unexpected
        # diffusers 0.42 asks the class; `_process_model_after_weight_loading` gives it back its own.
        type(model)._keys_to_ignore_on_load_unexpected = [*(self.ignored or ()), rf"^({names})\."]  # type: ignore

    def update_missing_keys(self, model: nn.Module, missing_keys: list[str], prefix: str) -> list[str]:
        own = tuple(f"{layer.name}." for layer in self.plan.quantized)
        return [key for key in missing_keys if not key.startswith(own)]

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        type(model)._keys_to_ignore_on_load_unexpected = self.ignored  # type: ignore[attr-defined]
        tensors = self.checkpoint.tensors
        refuse(suspect_problems(model, tensors, fp8=False))
        devices = {parameter.device for parameter in model.parameters() if not parameter.is_meta}
        if len(devices) != 1:
            raise UserError(f"{self.directory}: is on {len(devices)} devices; give from_pretrained no device_map")
        device = devices.pop()
        for layer in self.plan.quantized:
            for name, tensor in read_buffers(tensors, layer, model).items():
                owner, _, last = name.rpartition(".")
                model.get_submodule(owner)._buffers[last] = tensor.to(device)
        mark_quantized(model)
        attach(model, self.plan)

    @property
    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


FP8_ATTENTION = "blockscale_fp8"
"""The name of our attention among diffusers' backends."""


def _fp8_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attends with operands in FP8, `[batch, tokens, heads, dim]`; calls with a mask stay in 16 bit."""
    if attn_mask is not None or is_causal:
        native = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        return native(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend_in_fp8(q, k, v, scale).transpose(1, 2)


if FP8_ATTENTION not in AttentionBackendName._value2member_map_:
    # The names of backends are an enum (diffusers 0.42), which takes members by its maps.
    member = str.__new__(AttentionBackendName, FP8_ATTENTION)
    member._name_, member._value_ = FP8_ATTENTION.upper(), FP8_ATTENTION
    AttentionBackendName._member_map_[member._name_] = member
    AttentionBackendName._value2member_map_[member._value_] = member
    _AttentionBackendRegistry.register(member)(_fp8_attention)
AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(_Method.COMPRESSED_TENSORS.value, _Config)
AUTO_QUANTIZER_MAPPING.setdefault(_Method.COMPRESSED_TENSORS.value, _Quantizer)
