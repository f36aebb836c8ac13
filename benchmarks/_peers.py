"""This file runs the quantization of other toolkits, each behind one function that `accuracy.py` can time.

A configuration quantizes a model in place and says what remains to be done at run time. Bits are counted by our
formats: NVFP4 takes 4.5 bits per weight, whichever toolkit chose the codes.

ModelOpt and torchao simulate: their modules round on the way through, and are evaluated as they are. llm-compressor
writes a compressed-tensors checkpoint, which is read back by `quant.load`, so what is measured is what is deployed.

ModelOpt's NVFP4 and MX roundings are Triton and CUDA kernels. `modelopt_on_cpu` puts our PyTorch roundings in their
place for a machine without a GPU, and leaves its calibration and its search unchanged; such a row says so.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.export.checkpoint.load import load
from quant.formats.format import E2M1, E4M3, FORMATS, Format
from quant.formats.rounding import round_to
from quant.formats.tensor import fake_quantize


@dataclass(frozen=True, eq=False)
class Outcome:
    """A quantized model, and what it costs beside its codes and scales.

    Attributes:
        model: what is evaluated.
        shapes: of the quantized weights.
        extra_bytes: of what a layer keeps beside codes and scales: input scales, low-rank branches.
        extra: the same in words; empty for nothing.
        prepare: run on `model` before it is evaluated, untimed.
        bits: of a weight, where layers differ in format; None counts them by one.
    """

    model: nn.Module
    shapes: list[tuple[int, ...]]
    extra_bytes: int = 0
    extra: str = ""
    prepare: Callable[[], None] = lambda: None
    bits: float | None = None

    def bits_per_weight(self, format: Format) -> float:
        """Bits of everything stored for a quantized weight, over all of them."""
        if self.bits is not None:
            return self.bits
        stored = sum(format.nbytes(shape) for shape in self.shapes) + self.extra_bytes
        return 8 * stored / sum(rows * columns for rows, columns in self.shapes)


Run = Callable[[nn.Module, torch.Tensor], Outcome]


# Preset of ModelOpt by row name; "-inputs" leaves activations in 16 bit, "+gptq" replaces the algorithm, "+g64" the
# size of INT4's groups.
_MODELOPT = {
    "nvfp4a16 ModelOpt W4A16_NVFP4": "W4A16_NVFP4_CFG",
    "nvfp4a16 ModelOpt four-over-six": "NVFP4_FOUR_OVER_SIX_CFG -inputs",
    "nvfp4a16 ModelOpt MSE FP8 sweep": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG -inputs",
    "nvfp4a16 ModelOpt local Hessian": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG -inputs",
    "nvfp4a16 ModelOpt AWQ lite": "NVFP4_AWQ_LITE_CFG -inputs",
    "nvfp4a16 ModelOpt GPTQ": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG -inputs +gptq",
    "nvfp4 ModelOpt NVFP4_DEFAULT": "NVFP4_DEFAULT_CFG",
    "nvfp4 ModelOpt four-over-six": "NVFP4_FOUR_OVER_SIX_CFG",
    "nvfp4 ModelOpt MSE FP8 sweep": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG",
    "nvfp4 ModelOpt local Hessian": "NVFP4_W4A4_WEIGHT_LOCAL_HESSIAN_CFG",
    "nvfp4 ModelOpt AWQ lite": "NVFP4_AWQ_LITE_CFG",
    "nvfp4 ModelOpt GPTQ": "NVFP4_W4A4_WEIGHT_MSE_FP8_SWEEP_CFG +gptq",
    "nvfp4 ModelOpt SVDQuant": "NVFP4_SVDQUANT_DEFAULT_CFG",
    "fp8 ModelOpt FP8_DEFAULT": "FP8_DEFAULT_CFG",
    "fp8_channel ModelOpt FP8_PER_CHANNEL_PER_TOKEN": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "mxfp8 ModelOpt MXFP8_DEFAULT": "MXFP8_DEFAULT_CFG",
    "mxfp4a16 ModelOpt MXFP4_DEFAULT, weights only": "MXFP4_DEFAULT_CFG -inputs",
    "mxfp4 ModelOpt MXFP4_DEFAULT": "MXFP4_DEFAULT_CFG",
    "int4a16_g64 ModelOpt INT4_AWQ": "INT4_AWQ_CFG +g64",
    "int4a16_g64 ModelOpt INT4_BLOCKWISE_WEIGHT_ONLY": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG +g64",
}


def modelopt_configurations() -> dict[str, Run]:
    """ModelOpt's rows; nothing is imported before one runs."""
    return {name: partial(_run_modelopt, preset=preset) for name, preset in _MODELOPT.items()}


def _modelopt_config(preset: str) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq

    name, *changes = preset.split()
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, name))
    if "-inputs" in changes:
        config["quant_cfg"] = [e for e in config["quant_cfg"] if e["quantizer_name"] != "*input_quantizer"]
    if "+g64" in changes:
        for entry in config["quant_cfg"]:
            if "block_sizes" in entry.get("cfg", {}):
                entry["cfg"]["block_sizes"][-1] = 64
    if "+gptq" in changes:
        # Layer by layer over static block scales, as in ModelOpt's recipe `nvfp4_default-kv_none-gptq`.
        config["algorithm"] = {"method": "gptq", "layerwise": {"enable": True}}
    return config


def _run_modelopt(model: nn.Module, rows: torch.Tensor, *, preset: str) -> Outcome:
    import modelopt.torch.quantization as mtq

    device = next(model.parameters()).device

    # An encoder has no logits.
    options = {"use_cache": False, "logits_to_keep": 1} if model.get_output_embeddings() is not None else {}

    def forward_loop(model: nn.Module) -> None:
        for batch in rows.split(8):
            model(input_ids=batch.to(device), **options)

    with torch.no_grad():
        mtq.quantize(model, _modelopt_config(preset), forward_loop)
    shapes, scaled, branches, extra_bytes = [], 0, [], 0
    for module in model.modules():
        weights = getattr(module, "weight_quantizer", None)
        if weights is None or not weights.is_enabled:
            continue
        shapes.append(tuple(module.weight.shape))
        scale = getattr(module.input_quantizer, "pre_quant_scale", None)
        branch = [getattr(weights, f"svdquant_lora_{side}", None) for side in "ab"]
        if scale is not None:
            scaled += 1
            extra_bytes += 2 * scale.numel()
        if branch[0] is not None:
            branches.append(branch[0].shape[0])
            extra_bytes += 2 * sum(part.numel() for part in branch)
    extra = [f"input scale on {scaled} of {len(shapes)} layers"] if scaled else []
    extra += [f"16-bit branch of rank {max(branches)} on {len(branches)} layers"] if branches else []
    return Outcome(model, shapes, extra_bytes, "; ".join(extra))


def exact_bits(model: nn.Module) -> float:
    """Exact bits a weight over all linears but the head, whatever format each is in.

    Input scales, low-rank branches and the repeated columns of residual channels count; the numbers of these do too.
    """
    from quant.kernels.linear.quant_linear import QuantLinear

    head = model.get_output_embeddings()
    nbytes = numel = 0
    for module in model.modules():
        if isinstance(module, QuantLinear):
            nbytes += module.weight_format.nbytes(module.weight_shape)
            parts = (module.pre_scale, module.lowrank_down, module.lowrank_up, module.parts.channels)
            nbytes += sum(part.nbytes for part in parts if part is not None)
            numel += module.out_features * module.in_features
        elif isinstance(module, nn.Linear) and module is not head:
            nbytes += 2 * module.weight.numel()
            numel += module.weight.numel()
    return 8 * nbytes / numel


def auto_quantize(model: nn.Module, rows: torch.Tensor, bits: float, *, weights_only: bool) -> float:
    """ModelOpt's choice of formats by gradient, the head left out of search and cost; gives the exact bits.

    All rows are scored, in eight batches. On a CPU, which needs `modelopt_on_cpu` before, it gets 4 rows one by one,
    since its passes take several times as long as ours.
    """
    import modelopt.torch.quantization as mtq

    device, change = next(model.parameters()).device, " -inputs" if weights_only else ""
    batches = list(rows[:4].split(1) if device.type == "cpu" else rows.split(max(1, len(rows) // 8)))
    formats = [_modelopt_config(preset + change) for preset in ("NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG")]
    model.float()
    with torch.enable_grad():
        model, _ = mtq.auto_quantize(
            model,
            constraints={"effective_bits": bits, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
            quantization_formats=formats,
            data_loader=[batch.to(device) for batch in batches],
            forward_step=lambda model, batch: model(input_ids=batch, labels=batch, use_cache=False),
            loss_func=lambda output, batch: output.loss,
            disabled_layers=["*lm_head*"],
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            method="gradient",
        )
    nbytes = numel = 0
    for name, module in model.named_modules():
        weights = getattr(module, "weight_quantizer", None)
        if weights is None or "lm_head" in name or not isinstance(module, nn.Linear):
            continue
        shape = tuple(module.weight.shape)
        numel += shape[0] * shape[1]
        if not weights.is_enabled:
            nbytes += 2 * shape[0] * shape[1]
        else:
            nbytes += FORMATS["fp8" if weights.num_bits == (4, 3) else "nvfp4"].nbytes(shape)
    return 8 * nbytes / numel


def modelopt_on_cpu() -> None:
    """Replaces the two fake quantizations that ModelOpt has no CPU code for by ours."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    tensor_quantizer.dynamic_block_quant = _dynamic_block_quant
    tensor_quantizer.static_blockwise_fp4_fake_quant = _static_fp4


def _dynamic_block_quant(
    x: torch.Tensor,
    block_size: int,
    amax: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_bits: tuple[int, int],
    scale_bits: tuple[int, int],
    *ignored: object,
) -> torch.Tensor:
    """`x` rounded to NVFP4 or an MX format whose block scales are found here."""
    known = {(f.element.exponent, f.element.mantissa, f.scale.exponent, f.block): f for f in FORMATS.values()}
    format = known[*num_bits, scale_bits[0], (1, block_size)]
    global_scale = None if amax is None else amax.amax().float() / (format.element.max * format.scale.max)
    return fake_quantize(x, format, global_scale=global_scale)


def _static_fp4(
    x: torch.Tensor,
    amax: torch.Tensor,
    global_amax: torch.Tensor,
    quantize_block_scales: bool,
    fp8_max: float,
    out_dtype: torch.dtype,
    *ignored: object,
) -> torch.Tensor:
    """`x` rounded to E2M1 in blocks whose amax is given; `fp8_max` is 256 where four-over-six needs headroom."""
    step = amax.float() / E2M1.max
    if quantize_block_scales:
        second = global_amax.float() / (E2M1.max * fp8_max)
        step = round_to(step / second, E4M3) * second
    step = step.reshape(-1, 1)
    blocks = x.float().reshape(len(step), -1)
    rounded = round_to(blocks / torch.where(step > 0, step, torch.ones_like(step)), E2M1) * step
    return rounded.reshape(x.shape).to(out_dtype)


def torchao_configurations() -> dict[str, Run]:
    """torchao's weight-only rows."""
    return {
        "nvfp4a16 torchao NVFP4WeightOnly": partial(_run_torchao, config="NVFP4WeightOnlyConfig"),
        "fp8a16 torchao Float8WeightOnly": partial(_run_torchao, config="Float8WeightOnlyConfig"),
    }


def _run_torchao(model: nn.Module, rows: torch.Tensor, *, config: str) -> Outcome:
    from torchao import quantization
    from torchao.prototype import mx_formats

    make = getattr(quantization, config, None) or getattr(mx_formats, config)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not fnmatch(n, "*lm_head")}
    quantization.quantize_(model, make(), filter_fn=lambda module, name: name in linears)

    def dequantize() -> None:
        # Weight-only, so the dequantized weights are the whole effect; in FP32 they are exact.
        for linear in linears.values():
            linear.weight = nn.Parameter(linear.weight.dequantize(torch.float32), requires_grad=False)
        model.float()

    return Outcome(model, [tuple(linear.weight.shape) for linear in linears.values()], prepare=dequantize)


def llmcompressor_configurations() -> dict[str, Run]:
    """llm-compressor's schemes, those in NVFP4 with each of its observers of weights too."""
    observed = [("", None), *((f", {name}", f"nvfp4_{name}") for name in ("expanded_mse", "expanded_imatrix"))]
    configurations = {
        f"{setting} llm-compressor {name}{suffix}": partial(
            _run_llmcompressor, scheme=scheme, gptq=gptq, observer=observer
        )
        for setting, scheme in (("nvfp4a16", "NVFP4A16"), ("nvfp4", "NVFP4"))
        for name, gptq in ((scheme, False), ("GPTQ", True))
        for suffix, observer in observed
    }
    dynamic = partial(_run_llmcompressor, scheme="FP8_DYNAMIC", gptq=False, observer=None)
    return {**configurations, "fp8_channel llm-compressor FP8_DYNAMIC": dynamic}


def _run_llmcompressor(
    model: nn.Module, rows: torch.Tensor, *, scheme: str, gptq: bool, observer: str | None
) -> Outcome:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models
    from torch.utils.data import DataLoader
    from transformers import PreTrainedTokenizerFast

    modifier = GPTQModifier if gptq else QuantizationModifier
    batches = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in rows]
    with tempfile.TemporaryDirectory() as directory:
        # It reads the config of the model again, from where the model came from: a GGUF has none there.
        model.config.save_pretrained(directory)
        model.config.name_or_path = directory
        oneshot(
            model=model,
            dataset=DataLoader(batches, batch_size=None),
            # It wants a tokenizer even for tokens, and does not use it.
            processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())),
            recipe=modifier(targets="Linear", scheme=scheme, ignore=["lm_head"], weight_observer=observer),
            max_seq_length=rows.shape[1],
            num_calibration_samples=len(rows),
        )
        written = f"{directory}/quantized"
        model.save_pretrained(written, save_compressed=True)
        return ours(load(written))


def ours(model: nn.Module) -> Outcome:
    """What a model of `QuantLinear`s costs."""
    from quant.kernels.linear.quant_linear import QuantLinear

    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    scales = sum(layer.pre_scale is not None for layer in layers)
    blocks = [layer.hadamard for layer in layers if layer.hadamard]
    ranks = [layer.lowrank_down.shape[0] for layer in layers if layer.lowrank_down is not None]
    channels = [layer.parts.residual for layer in layers if layer.parts.residual]
    extra = [f"input scale on {scales} of {len(layers)} layers"] if scales else []
    extra += [f"Hadamard of block {_span(blocks)} on {len(blocks)} of {len(layers)} layers"] if blocks else []
    extra += [f"16-bit branch of rank {_span(ranks)} on {len(ranks)} of {len(layers)} layers"] if ranks else []
    extra += [f"{_span(channels)} residual channels on {len(channels)} of {len(layers)} layers"] if channels else []
    return Outcome(model, [], extra="; ".join(extra), bits=exact_bits(model))


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}–{high}"
