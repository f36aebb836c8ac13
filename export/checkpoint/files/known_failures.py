"""Warnings about a compressed-tensors checkpoint: features that its plan has and that other runtimes do not run.

The layout has no tensors for input scales and low-rank branches. vLLM, which the layout is for, stops at some formats,
and TensorRT-LLM takes INT8 for FP8. transformers has limits of its own, above all for experts and convolutions; loading
the checkpoint on trial (`quant.export.checkpoint.trial_load`) finds the failures that depend on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from quant.base.errors import option
from quant.export.checkpoint.files.names import StoredNames
from quant.formats.format import FP8_HEAD, Format
from quant.recipes.layers import LayerKind
from quant.recipes.plan import ODD_INPUTS, LayerPlan, Plan
from quant.recipes.targets import get_target

# Pairs of a checkpoint and a runtime that are known to fail, as data: what, where, since and until which release.
#
# `quantize` and `save` warn from this table, and docs/vllm.md shows it. An entry is measured on a GPU or read in the
# runtime's source; `Failure.source` says which. A release beyond `until` may have the fault still: it was not looked
# at.


@dataclass(frozen=True)
class Failure:
    """One fault of a runtime.

    Attributes:
        runtime: the name of the runtime in a sentence.
        since, until: first and last release that have it.
        subject: formats and kinds of layer, or the feature of the checkpoint.
        gpus: the GPUs on which the failure appears.
        effect: the consequence for a user.
        source: how it is known.
    """

    runtime: str
    since: str
    until: str
    subject: str
    effect: str
    gpus: str = "all"
    source: str = ""

    def row(self) -> str:
        """Returns the row of docs/vllm.md."""
        return f"| {self.subject} | {self.releases} | {self.gpus} | {self.effect} | {self.source} |"

    @property
    def releases(self) -> str:
        """In words: "vLLM 0.26" or "vLLM 0.26 to 0.33"."""
        return f"{self.runtime} {self.since}" + (f" to {self.until}" if self.until != self.since else "")


FAILURES: dict[str, Failure] = {
    "mxfp6": Failure(
        "vLLM", "0.26", "0.29", "weights in MXFP6",
        "stops: Only num_bits in (8) are supported (compressed-tensors 0.17, QuantizationArgs.pytorch_dtype)",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "narrow int4 experts": Failure(
        "vLLM", "0.26", "0.33", "experts in INT4 that are no wider than a group",
        "wrong output: the scales of gate and up are put into a wrong order (fused_moe/oracle/int_wna16.py, "
        "_process_weights_marlin)",
        source="run on an H200 in 0.26, read in 0.29 and 0.33",
    ),
    "rotation": Failure(
        "vLLM", "0.26", "0.26", "inputs that are rotated at run time",
        "wrong output: the first token is right, then one token repeats",
        source="run on an H100",
    ),
    "modelopt mxfp4": Failure(
        "vLLM", "0.26", "0.29", "MXFP4 and INT4 in ModelOpt's layout",
        "stops: no known algorithm (model_executor/layers/quantization/modelopt.py, QUANT_ALGOS)",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "fp8 weights": Failure(
        "vLLM", "0.26", "0.26", "weights in FP8 with inputs in 16 bit",
        "stops without the package humming, unless our plug-in takes the layers", source="run on an H200",
    ),
    "fp8 weights of experts": Failure(
        "vLLM", "0.26", "0.33", "experts in FP8 with inputs in 16 bit",
        "stops: Unsupported FusedMoe scheme, unless our plug-in takes the experts",
        source="read in 0.26 to 0.33 (compressed_tensors_moe.py)",
    ),
    "w4a4 on hopper": Failure(
        "vLLM", "0.26", "0.29", "NVFP4, MXFP4 and MXFP8 with rounded inputs",
        "runs with inputs in 16 bit: slower than FP8, and more precise than the report says", "before Blackwell",
        source="run on an H100 in 0.26 and 0.29",
    ),
    "nvfp4 experts": Failure(
        "transformers", "5.17", "5.24", "fused experts in NVFP4",
        "wrong output: their global scale is dropped", source="run on a CPU",
    ),
}  # fmt: skip


def runtime_warnings(
    plan: Plan,
    dtype: torch.dtype = torch.bfloat16,
    names: StoredNames | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Returns one sentence for each feature of a checkpoint of `plan` that other runtimes do not support.

    Arguments are as for `Layout.runtime_warnings`.
    """
    names = names or StoredNames()
    return [
        *_part_warnings(plan),
        *rotation_warnings(plan),
        *_rule_warnings(plan),
        *_format_warnings(plan),
        *unpacking_warnings(plan, dtype),
        *stopped_warnings(plan, names),
        *_expert_warnings(plan, names),
        *_input_warnings(plan),
        *_narrow_expert_warnings(plan),
        *_weight_only_expert_warnings(plan),
        *_head_scale_warnings(plan),
        *_kept_expert_warnings(plan, names),
        *_wide_scale_warnings(tensors or {}, dtype),
    ]


def rotation_warnings(plan: Plan) -> list[str]:
    """Returns a sentence if inputs are rotated at run time: other runtimes fail at the `transform_config`."""
    rotated = [layer.name for layer in plan.quantized if layer.parts.hadamard]
    if not rotated:
        return []
    vllm = FAILURES["rotation"].releases
    return [
        f"{_counted(rotated)} a Hadamard rotation of the input at run time: load the checkpoint with quant.load; "
        f"transformers ignores transform_config, and {vllm} decodes wrongly with it (the first token is right, then "
        "one token repeats). The solver rotation:merge leaves nothing to do at run time: it rotates where the modules "
        "around absorb the rotation"
    ]


def _rule_warnings(plan: Plan) -> list[str]:
    """Returns a sentence if scales of inputs are chosen by a rule of our own kernels."""
    ruled = [layer for layer in plan.quantized if layer.activation and layer.activation.input_rule != "max"]
    if not ruled:
        return []
    return [
        f"inputs of {len(ruled)} layers are in {ruled[0].activation}, whose scales only Blockscale's kernels choose: "
        "load the checkpoint with quant.load; others stop at scale_rule in its config"
    ]


def stopped_warnings(plan: Plan, names: StoredNames) -> list[str]:
    """Returns a sentence if there are quantized experts that transformers has no parameters for, and stops at."""
    stopped = [layer.name for layer in plan.quantized if layer.name in names.stopped]
    if not stopped:
        return []
    return [
        f"{_counted(stopped)} quant.load or a server that reads experts one by one: transformers up to 5.24 takes the "
        "experts of this model only in 16 bit, and stops"
    ]


def _part_warnings(plan: Plan) -> Iterator[str]:
    """Yields a sentence for run-time parts that the layout has no tensors for."""
    layers_with = {
        "an input scale (pre_scale)": [layer.name for layer in plan.quantized if layer.parts.pre_scale],
        "a 16-bit low-rank branch": [layer.name for layer in plan.quantized if layer.parts.rank],
    }
    for part, layers in layers_with.items():
        if layers:
            yield (
                f"{_counted(layers)} {part} at run time: load the checkpoint with quant.load; other runtimes have no "
                "place for it, and would give wrong output"
            )


def _format_warnings(plan: Plan) -> Iterator[str]:
    """Yields a sentence on pairs of formats that vLLM stops at or TensorRT-LLM misreads, and on embeddings."""
    vllm, trtllm = get_target("vllm"), get_target("tensorrt-llm-compressed-tensors")
    by_formats: dict[str, list[LayerPlan]] = {}
    for layer in plan.quantized:
        # No runtime has quantized convolutions; `trial_load` says so.
        if layer.kind != LayerKind.CONV:
            by_formats.setdefault(layer.formats, []).append(layer)
    for formats, layers in by_formats.items():
        subject = _counted([layer.name for layer in layers])
        if refusal := vllm.why_not(layers[0]):
            # Targets are read in the oldest release; the table of failures knows how long one lasts.
            failure = FAILURES.get(str(layers[0].weight))
            releases = failure.releases if failure is not None else "vLLM 0.26"
            yield f"{subject} quant.load or transformers: {releases} does not load {formats}: {refusal}"
        if formats in trtllm.misread:
            yield (
                f"{subject} another runtime than TensorRT-LLM, which would give wrong output for {formats}: "
                f"{trtllm.misread[formats]}"
            )
    embeddings = [layer.name for layer in plan.quantized if layer.kind == LayerKind.EMBEDDING]
    if embeddings:
        yield f"{_counted(embeddings)} quant.load: other runtimes take embeddings in 16 bit only"


def unpacking_warnings(plan: Plan, dtype: torch.dtype) -> Iterator[str]:
    """Yields a sentence on formats that transformers unpacks to BF16, whatever the model's dtype."""
    unpacked = [layer.weight for layer in plan.quantized if layer.weight is not None and not layer.weight.scale.is_wide]
    if unpacked and dtype != torch.bfloat16:
        yield (
            f"transformers unpacks {unpacked[0]} to bfloat16 and then fails on a model in "
            f"{str(dtype).removeprefix('torch.')}: load it there with dtype=torch.bfloat16"
        )


def _expert_warnings(plan: Plan, names: StoredNames) -> Iterator[str]:
    """Yields a sentence on fused experts, whose global scale and input rounding transformers drops."""
    fused = [] if names.apart else [layer for layer in plan.quantized if layer.kind == LayerKind.EXPERTS]
    fused = [layer for layer in fused if layer.name not in names.stopped]
    misread = [layer.name for layer in fused if f"{layer.weight}" in ("nvfp4", "mxfp8", "int8")]
    if misread:
        yield (
            f"{_counted(misread)} quant.load or a server such as vLLM: transformers up to 5.24 loads fused experts in "
            "NVFP4 without their global scale, and would give wrong output; in MXFP8 and INT8 it stops"
        )
    rounded = [layer.name for layer in fused if layer.activation is not None]
    if rounded:
        yield (
            f"{_counted(rounded)} quant.load or a server such as vLLM for their inputs to be rounded: "
            "transformers up to 5.24 multiplies experts in 16 bit, and gives slightly other logits"
        )


def _input_warnings(plan: Plan) -> Iterator[str]:
    """Yields a sentence on inputs that are not `[batch, tokens, in]`, as `plan.provenance` lists them."""
    if layers := plan.provenance.get(ODD_INPUTS):
        yield (
            f"{_counted(layers)} quant.load or a server such as vLLM for a scale for each token: transformers with "
            "compressed-tensors up to 0.20 shares scales otherwise where an input is no [batch, tokens, in], and gives "
            "slightly other logits"
        )


def _narrow_expert_warnings(plan: Plan) -> Iterator[str]:
    narrow = [layer.name for layer in plan.quantized if _is_one_int4_group(layer)]
    if narrow:
        yield (
            f"{_counted(narrow)} another runtime than {FAILURES['narrow int4 experts'].releases}: where experts are no "
            "wider than a group of INT4, it puts the scales of their gate and up projections in a wrong order, and "
            "gives wrong output; keep the experts in another format"
        )


def _weight_only_expert_warnings(plan: Plan) -> Iterator[str]:
    layers = [
        layer.name
        for layer in plan.quantized
        if layer.kind == LayerKind.EXPERTS
        and layer.activation is None
        and layer.weight is not None
        and layer.weight.is_fp8
    ]
    if layers:
        yield (
            f"{_counted(layers)} quant.load, or vLLM with Blockscale's plug-in on Hopper: "
            f"{FAILURES['fp8 weights of experts'].releases} stops at experts in FP8 whose inputs stay in 16 bit"
        )


def _head_scale_warnings(plan: Plan) -> Iterator[str]:
    if plan.kv_cache is FP8_HEAD:
        yield (
            "the KV cache has a scale for each KV head: vLLM reads these with FlashAttention 3 (on Hopper) and in our "
            f"NVFP4 cache, and stops elsewhere; {option('kv_cache', 'fp8')} writes one a tensor"
        )


def _kept_expert_warnings(plan: Plan, names: StoredNames) -> Iterator[str]:
    """Yields a sentence on experts in 16 bit next to packed layers, which transformers takes for quantized ones."""
    cut = () if names.apart else names.cut
    in_16_bit = [
        layer.name
        for layer in plan.layers
        if layer.kind == LayerKind.EXPERTS and layer.weight is None and layer.name.rpartition(".")[2] in cut
    ]
    packed = [layer.weight for layer in plan.quantized if layer.weight is not None and not _is_float8(layer.weight)]
    if in_16_bit and packed:
        yield (
            f"{_counted(in_16_bit)} quant.load or a server such as vLLM: transformers up to 5.24 takes experts in 16 "
            f"bit for quantized ones where other layers are in {packed[0]}, and stops"
        )


def _wide_scale_warnings(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> Iterator[str]:
    """Yields a sentence on another toolkit's scales in float32, which the model's 16-bit dtype does not hold."""
    wide = [name for name, t in tensors.items() if name.endswith(".weight_scale") and t.dtype is torch.float32]
    if wide and dtype in (torch.bfloat16, torch.float16):
        count = f"{len(wide):,} weight scale{'' if len(wide) == 1 else 's'}"
        yield (
            f"{count}, {wide[0]} first, in float32, for {str(dtype).removeprefix('torch.')} would round them: "
            "transformers does that unless it loads the checkpoint with dtype=torch.float32; vLLM does not"
        )


def _is_one_int4_group(layer: LayerPlan) -> bool:
    """Returns whether it is a down projection of experts with one INT4 group a row.

    vLLM's `_process_weights_marlin` orders the scales of gate and up by `intermediate_size_per_partition`,
    which is the width of the other projection (vllm 0.26.0, fused_moe/oracle/int_wna16.py).
    """
    format = layer.weight
    if layer.kind != LayerKind.EXPERTS or format is None or not format.element.is_integer or format.element.bits != 4:
        return False
    return layer.name.endswith(("down_proj", "w2")) and layer.shape[-1] <= format.block[1]


def _is_float8(format: Format) -> bool:
    """Returns whether a weight in `format` is stored as a tensor of its shape in a float dtype."""
    return format.element.bits == 8 and not format.element.is_integer


def _counted(names: Sequence[str]) -> str:
    return f"{names[0]} needs" if len(names) == 1 else f"{len(names)} layers, {names[0]} first, need"
