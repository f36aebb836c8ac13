"""A `Quantization` is how a released checkpoint is quantized, as its config says.

    quant_method         codes and scales of a tensor X
    fp8, fbgemm_fp8      X, X_scale_inv or X_scale
    mxfp4                X_blocks, X_scales (stacked experts of gpt-oss)
    gptq                 qweight, qzeros, scales, g_idx
    awq                  qweight, qzeros, scales
    compressed-tensors   X or X_packed, X_scale, X_global_scale, …
    modelopt             X, X_scale, X_scale_2

Codes are never cast to numbers: where scales stand in a file and no config says how to apply them, and where FP8
weights have no scales, the file is refused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from quant.base.errors import UserError
from quant.base.json_files import typed
from quant.export.checkpoint.files import modelopt
from quant.models.configs import read_fields
from quant.recipes.plan import PLAN_FILE

_FP8 = ("F8_E4M3", "F8_E5M2")
CODES = (*_FP8, "U8", "I8", "I32")
"""Dtypes of codes, as safetensors call them."""
_SCALES = ("_scale_inv", "_scale", "_scales", "_blocks", "_scale_2", "_global_scale", "_zero_point", "_packed")
_INTEGER_PARTS = ("qweight", "qzeros", "weight_packed", "weight_scale", "weight_scale_2", "SCB")
_LAYOUTS = (
    "float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip
# Where a config says which of its method's layouts it is, besides "format".
_LAYOUT_KEYS = {"gptq": "checkpoint_format", "awq": "version"}
_FIELDS: dict[str, Any] = {
    "bits": int | None, "config_groups": dict[str, dict[str, Any]] | None, "group_size": int | None,
    "sparsity_config": dict[str, Any] | None, "weight_block_size": list[int] | None,
}  # fmt: skip
WAY_OUT = "quantize the original model"


class QuantMethod(StrEnum):
    """The `quant_method`s whose codes can be decoded."""

    FP8 = "fp8"
    FBGEMM_FP8 = "fbgemm_fp8"
    MXFP4 = "mxfp4"
    GPTQ = "gptq"
    AWQ = "awq"
    COMPRESSED_TENSORS = "compressed-tensors"
    MODELOPT = "modelopt"


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint is quantized, as its config says."""

    path: Path  # the directory of the model
    method: str  # `quant_method`
    config: Mapping[str, Any]  # the `quantization_config`

    def __str__(self) -> str:
        """Returns the format, for plans and the terminal."""
        config = self.config
        group = config.get("group_size")
        if self.method in (QuantMethod.GPTQ, QuantMethod.AWQ):
            groups = f"groups of {group}" if group and group > 0 else "one group"
            return f"{self.method.upper()} INT{config.get('bits', 4)} in {groups}"
        if self.method in (QuantMethod.FP8, QuantMethod.FBGEMM_FP8):
            block = config.get("weight_block_size")
            return f"FP8 in blocks of {block[0]}x{block[1]}" if block else "FP8"
        if self.method == QuantMethod.COMPRESSED_TENSORS:
            return f"compressed-tensors {config.get('format', '')}".strip()
        return f"ModelOpt {config.get('quant_algo')}" if self.method == QuantMethod.MODELOPT else self.method.upper()

    @property
    def groups(self) -> list[Mapping[str, Any]]:
        """The `weights` of compressed-tensors' groups."""
        return [group.get("weights") or {} for group in (self.config.get("config_groups") or {}).values()]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Blocks of weights that share a scale, as far as the config names some."""
        blocks = [self.config.get("weight_block_size") or (128, 128)]
        for weights in self.groups:
            if weights.get("block_structure"):
                blocks.append(weights["block_structure"])
            elif weights.get("group_size"):
                blocks.append((1, weights["group_size"]))
        return [(int(rows), int(columns)) for rows, columns in blocks]


AFTER_TRAINING = (
    "it holds the weights of a model in training, and no quantized ones: prepare the original model as it was then, "
    "load these weights into it (a Trainer resumes from them; safetensors.torch.load_model reads a file of them), and "
    "pack it with quant.pack"
)
_IN_TRAINING = "blockscale-qat: "
IN_TRAINING = {"quant_method": "fp8", "activation_scheme": _IN_TRAINING + AFTER_TRAINING}
"""The `quantization_config` of a directory that a model in training was saved to.

transformers ignores a `quant_method` that it does not know and loads the weights as a model in 16 bit, although they
may be rotated or scaled. It knows this method, as vLLM does. Both refuse the unknown activation scheme with a message
that shows it, and the scheme's name says what to do.
"""


def is_in_training(fields: Mapping[str, Any]) -> bool:
    """Returns whether a `quantization_config` describes a model in training."""
    return str(fields.get("activation_scheme")).startswith(_IN_TRAINING)


def quantization_of(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Returns how the checkpoint in a directory is quantized; UserError for one that cannot be decoded."""
    # Multimodal models may have the table in the config of a part, such as `text_config`.
    sections = (config, *(part for part in config.values() if isinstance(part, dict)))
    keys = ("quantization_config", "compression_config")
    fields = next((section[key] for section in sections for key in keys if isinstance(section.get(key), dict)), None)
    if fields is None and (path / modelopt.CONFIG_FILE).is_file():
        inside = read_fields(path / modelopt.CONFIG_FILE).get("quantization")
        fields = {"quant_method": QuantMethod.MODELOPT.value, **(inside if isinstance(inside, dict) else {})}
    if fields is None:
        return None
    try:
        for key, kind in _FIELDS.items():
            typed(kind, fields.get(key), key)
        for name, group in (fields.get("config_groups") or {}).items():
            weights = typed(dict[str, Any] | None, group.get("weights"), f"{name}.weights") or {}
            for key, kind in (("group_size", int | None), ("block_structure", list[int] | None)):
                typed(kind, weights.get(key), f"{name}.{key}")
            _check_block(weights.get("block_structure"), weights.get("group_size"), name)
        _check_block(fields.get("weight_block_size"), None, "weight_block_size")
    except ValueError as error:
        raise UserError(f"{path}: its quantization_config says {error}; download the model again") from None
    # Exports of ModelOpt may name a `quant_algo` and no `quant_method`.
    method = str(fields.get("quant_method") or QuantMethod.MODELOPT).lower()
    if (path / PLAN_FILE).is_file():
        raise UserError(f"{path}: already quantized by this toolkit, as its {PLAN_FILE} says; {WAY_OUT}")
    quantization = Quantization(path, method, fields)
    if refusal := _why_not(quantization):
        raise UserError(f"{path}: already quantized, {refusal}")
    return quantization


def _check_block(block: list[int] | None, size: int | None, name: str) -> None:
    if (block is not None and (len(block) != 2 or min(block) < 1)) or (size is not None and size < -1):
        raise ValueError(f"{name}: {block or size} is not the size of a block")


def _why_not(quantization: Quantization) -> str | None:
    """Returns why nothing here decodes a checkpoint, and the way out."""
    config, method = quantization.config, quantization.method
    if method == "bitsandbytes" or config.get("load_in_4bit") or config.get("load_in_8bit"):
        return (
            f"by bitsandbytes, whose codes only that package decodes; {WAY_OUT}, or load this one with transformers, "
            "then model.dequantize() and model.save_pretrained(DIR), and pass DIR"
        )
    if is_in_training(config):
        return f"by a recipe that is still in training; {AFTER_TRAINING}"
    if method not in list(QuantMethod):
        return f"by {method}, which cannot be read here; {WAY_OUT}, or one in {', '.join(QuantMethod)}"
    layout = str(config.get(_LAYOUT_KEYS.get(method, "")) or config.get("format") or "").lower()
    if method == QuantMethod.GPTQ and layout not in ("", "gptq", "gptq_v2"):
        return f"by GPTQ in the layout {layout!r}; the layouts gptq and gptq_v2 can be read: {WAY_OUT}"
    if method == QuantMethod.AWQ and (layout not in ("", "gemm") or config.get("bits", 4) != 4):
        return f"by AWQ in {config.get('bits')} bits and the layout {layout!r}; 4 bits in gemm can be read: {WAY_OUT}"
    if method != QuantMethod.COMPRESSED_TENSORS:
        return None
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense" or layout not in ("", *_LAYOUTS):
        return f"in the compressed-tensors layout {layout}, which cannot be read here; {WAY_OUT}"
    if config.get("transform_config"):
        # An original in 16 bit cannot hold the transform of the inputs.
        return f"and its weights are rotated or scaled (transform_config), which their inputs must be, too; {WAY_OUT}"
    return None


def refuse_packed(
    file: Path,
    dtypes: Mapping[str, str],
    names: Iterable[str] | None = None,
    clause: str = ", and no quantization_config says how",
) -> None:
    """Raises UserError for a tensor that is codes or scales, where no config says how to decode it.

    `dtypes` are those of the tensors to look at, as safetensors call them, and `names` those of all in the file.
    """
    names = dtypes if names is None else names
    advice = f"give the model's directory with its config.json, or {WAY_OUT}"
    for name in dtypes:
        # A name proves little by itself: models have parameters called `…_scale` and `…_blocks` that are not quantized.
        # A suffix counts where the tensor that it belongs to is in the file too.
        suffix = next((s for s in _SCALES if name.endswith(s) and name.removesuffix(s) in names), None)
        blocks = name.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in names
        if suffix or blocks or name.endswith("_scale_inv") or name.rpartition(".")[2] in _INTEGER_PARTS:
            raise UserError(f"{file}: {name} belongs to a quantized weight{clause}; {advice}")
    for name, dtype in dtypes.items():
        if dtype in _FP8:
            raise UserError(f"{file}: {name} is in FP8 and has no scale{clause}; {advice}")
        if dtype in CODES and name.endswith(".weight"):
            raise UserError(f"{file}: {name} holds integers ({dtype}){clause}; {advice}")
