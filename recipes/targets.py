"""A `Target` lists the formats that a runtime can run, as data.

A target is a table of pairs: weight format and input format that its loader accepts together, and how they run then.

    native     the matmul itself runs in the low precision
    storage    weights are unpacked to 16 bit (or to 8) on the way; memory is saved, arithmetic is not

Everything that is not in the table is refused: a pair that nobody has seen work is worth less than an error. The
tables are read off the runtimes' own loaders, or off engines that were built and inspected; `Target.source` says
which, and `Pair.source` where in it. Our presets also ran in vLLM 0.26 and 0.29 on an H100, those of linear layers in
0.33 on an H200. Where a pair depends on the GPU, the note names the first architecture that runs it natively.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quant.formats.format import Format
from quant.recipes.gpus import GENERATIONS, GPUS, Hardware, like
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan

NATIVE, STORAGE = "native", "storage"


@dataclass(frozen=True)
class Pair:
    """A weight format and an input format, by name, that a runtime accepts together."""

    weight: str
    activation: str | None  # None for 16 bit
    runs: str = NATIVE  # or STORAGE
    note: str = ""  # the hardware it needs, or its purpose
    kinds: tuple[LayerKind, ...] = (LayerKind.LINEAR, LayerKind.EXPERTS)
    merged_rows: int = 1  # where matrices are merged into one, `out` of each but the last must be a multiple of this
    rows: int = 1  # `out` of every matrix must be a multiple of this
    mixes: bool = True  # other layers may have other formats
    source: str = ""  # file or function of the runtime that accepts it; empty for the target's own

    def __str__(self) -> str:
        return _name(self.weight, self.activation)


def _name(weight: object, activation: object) -> str:
    return f"{weight}@{activation or '16bit'}"


@dataclass(frozen=True)
class Target:
    """A runtime, and the pairs of formats that it accepts."""

    name: str  # key in `TARGETS`
    description: str
    pairs: tuple[Pair, ...]
    kv_cache: tuple[str, ...] = ()  # formats of the KV cache by name, besides 16 bit
    fused: tuple[tuple[str, ...], ...] = ()  # siblings that it merges into one matmul, whose formats must agree
    parts: tuple[str, ...] = ()  # run-time parts that it can execute, of "pre_scale", "hadamard", "rank"
    source: str = ""  # the origin of the table
    refused: Mapping[str, str] = field(default_factory=dict)  # why it stops at a pair or a weight format, by name
    misread: Mapping[str, str] = field(default_factory=dict)  # the wrong reading that it silently gives a pair, by name

    def pair(self, weight: Format, activation: Format | None) -> Pair | None:
        """Returns the entry for two formats, if the runtime accepts them together."""
        names = (weight.name, activation.name if activation else None)
        return next((pair for pair in self.pairs if (pair.weight, pair.activation) == names), None)

    def why_not(self, layer: LayerPlan) -> str | None:
        """Returns why the runtime is known to stop at a layer's formats, or to take them for others."""
        # A pair is more specific than its weight format, so it is looked up first.
        reasons = {**self.refused, **self.misread}
        return reasons.get(_name(layer.weight, layer.activation)) or reasons.get(str(layer.weight))

    def problems(self, layer: LayerPlan, *, merged: bool = False, mixed: bool = False) -> list[str]:
        """Returns why the runtime cannot run `layer` as planned, one clause each; none if it can.

        `merged` says whether the rows of another weight follow its own in one matrix, `mixed` whether other layers have
        other formats.
        """
        if layer.weight is None:
            return []
        pair = self.pair(layer.weight, layer.activation)
        if pair is None:
            return [self._no_pair(layer)]
        clauses, rows = [], layer.matrix[-2]
        if mixed and not pair.mixes:
            clauses.append(
                f"{self.name} does not know {pair} where other layers have other formats, and silently takes it for 16 "
                f"bit ({self.source})"
            )
        if rows % pair.rows:
            clauses.append(f"out = {rows} is not a multiple of {pair.rows}, which {self.name} requires of {pair}")
        if merged and rows % pair.merged_rows:
            clauses.append(f"out = {rows} is not a multiple of {pair.merged_rows}, which {self.name} merges {pair} by")
        if layer.kind not in pair.kinds:
            kinds = " and ".join(pair.kinds)
            clauses.append(f"{self.name} runs {pair} for {kinds} layers, not for kind '{layer.kind}'")
        beyond = layer.parts.to_dict().keys() - set(self.parts)
        return clauses + [f"{self.name} has nothing to run {_PARTS[part]} with" for part in _PARTS if part in beyond]

    def _no_pair(self, layer: LayerPlan) -> str:
        if refusal := self.why_not(layer):
            return f"{self.name} cannot run {_name(layer.weight, layer.activation)}: {refusal}"
        inputs = [pair.activation or "16bit" for pair in self.pairs if pair.weight == str(layer.weight)]
        if inputs:
            planned = layer.activation.name if layer.activation else "16bit"
            return f"{self.name} takes {layer.weight} weights with inputs in {' or '.join(inputs)}, not in {planned}"
        weights = dict.fromkeys(pair.weight for pair in self.pairs)
        return f"{self.name} has no {layer.weight}; it has {', '.join(weights)}"


_PARTS = {
    "pre_scale": "an input scale (pre_scale)",
    "hadamard": "a rotation of the input (hadamard)",
    "rank": "a low-rank branch (rank)",
    "residual": "residual channels of the input (residual)",
}

# Projections that the model files of vLLM and SGLang merge (`packed_modules_mapping`), and TensorRT-LLM's likewise.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("gate_proj", "up_proj"), ("w1", "w3"))

_LINEAR = (LayerKind.LINEAR,)
_BUILT = (LayerKind.LINEAR, LayerKind.CONV)
_EXPERTS = (LayerKind.EXPERTS,)
_SERVED = (LayerKind.LINEAR, LayerKind.EXPERTS, LayerKind.HEAD)
_VLLM = "_POSSIBLE_{}_KERNELS".format  # lists of kernel classes by format
_FP8 = (
    Pair("fp8", "fp8", note="from SM89", source=_VLLM("FP8")),
    Pair("fp8", "fp8_token", note="from SM89", source=_VLLM("FP8")),
    Pair("fp8_channel", "fp8_token", note="from SM89", source=_VLLM("FP8")),
    Pair("fp8_channel", "fp8", note="from SM89", source=_VLLM("FP8")),
    Pair("fp8_block", "fp8_group", note="from SM89", merged_rows=128, source=_VLLM("FP8_BLOCK")),
)
_INT4 = ("int4", "int4_g64", "int4_g32")
_HOPPER = "from SM100; on Hopper inputs stay in 16 bit (Marlin)"
_HUMMING = "stops without the package humming, or our plug-in on Hopper"
_MODELOPT = "model_executor/layers/quantization/modelopt.py"
_QUANT_ALGOS, _MIXED, _BLOCKS = "QUANT_ALGOS", "ModelOptMixedPrecisionConfig", "ModelOptFp8PbWoLinearMethod"
_SGLANG = "srt/layers/quantization/compressed_tensors/compressed_tensors.py, _get_scheme_from_parts"
_SGLANG_LINEAR = ("fp8@fp8_token", "fp8_channel@fp8")
_TRTLLM = "tensorrt_llm/models/quant_config_utils.py"
_ROW_SCALES = "scales of outputs or tokens are one more Mul a layer"
_RTX = (
    Pair("fp8", "fp8", kinds=_BUILT),
    *(
        Pair(*pair, note=_ROW_SCALES, kinds=_BUILT)
        for pair in (("fp8", "fp8_token"), ("fp8_channel", "fp8"), ("fp8_channel", "fp8_token"))
    ),
    *(Pair("int8", inputs, note="from SM75", kinds=_BUILT) for inputs in ("int8_token", "int8_tensor")),
    *(Pair(weight, None, STORAGE, "dequantized in the GEMM", _BUILT) for weight in ("fp8", "fp8_channel", "int8")),
    Pair("fp8_block", None, STORAGE, "TRT_BlockDequantize, multiplied in 16 bit", _LINEAR),
    Pair("mxfp8", "mxfp8", STORAGE, "multiplied in 16 bit", _LINEAR),
    Pair("mxfp8", None, STORAGE, "multiplied in 16 bit", _LINEAR),
    *(Pair(weight, None, STORAGE, "dequantized in the GEMM", _LINEAR) for weight in _INT4),
)
_PLUGIN_CACHES = ("fp8", "nvfp4")  # by our plugin, in C++ programs: `quant export --kv-cache`
_RTX_SOURCE = (
    "engines built with tensorrt_rtx 1.7.1 and read back; a KV cache in fp8 or nvfp4 by our plugin (--kv-cache), for "
    "programs in C++"
)
_FP32 = "dequantized at load, multiplied in FP32"
_ONNXRUNTIME = (
    *(Pair("int8", inputs, note="MatMulInteger", kinds=_BUILT) for inputs in ("int8_token", "int8_tensor")),
    *(Pair(weight, None, STORAGE, "MatMulNBits, which rounds inputs to INT8", (*_LINEAR, *_EXPERTS))
      for weight in _INT4),
    *(Pair(weight, inputs, STORAGE, _FP32, _BUILT) for weight in ("fp8", "fp8_channel")
      for inputs in ("fp8", "fp8_token")),
    # Experts are nodes of their own, which round no inputs.
    *(Pair(weight, None, STORAGE, _FP32, (*_BUILT, *_EXPERTS)) for weight in ("fp8", "fp8_channel")),
    Pair("int8", None, STORAGE, "linear layers in FP32, experts over their codes", (*_BUILT, *_EXPERTS)),
)  # fmt: skip
# Fused experts are unpacked by none of transformers' loaders; the output head is.
_UNPACKED = (LayerKind.LINEAR, LayerKind.HEAD)
_ROUNDED = "inputs are rounded as planned"

_ALL = (
    Target(
        "vllm",
        "vLLM 0.26 to 0.33, from the compressed-tensors checkpoint",
        (
            Pair("nvfp4", "nvfp4", note=_HOPPER, source=_VLLM("NVFP4")),
            Pair("nvfp4", None, STORAGE, kinds=_SERVED, source=_VLLM("NVFP4")),
            Pair("mxfp4", "mxfp4", note=_HOPPER, source=_VLLM("MXFP4")),
            Pair("mxfp4", None, STORAGE, "on Blackwell some releases round inputs too", source=_VLLM("MXFP4")),
            Pair("mxfp8", "mxfp8", note=_HOPPER, source=_VLLM("MXFP8")),
            *_FP8,
            Pair("fp8", None, STORAGE, _HUMMING, _LINEAR, source=_VLLM("WFP8A16")),
            Pair("fp8_channel", None, STORAGE, _HUMMING, _UNPACKED, source=_VLLM("WFP8A16")),
            Pair("fp8_block", None, STORAGE, _HUMMING, _LINEAR, 128, source=_VLLM("WFP8A16")),
            Pair("int8", "int8_token", note="from SM75", source="_POSSIBLE_KERNELS"),
            Pair("int8", "int8_tensor", NATIVE, "from SM75; read, not run", _LINEAR, source="_is_static_tensor_w8a8"),
            *(Pair(w, None, STORAGE, source="_POSSIBLE_KERNELS") for w in _INT4),
        ),
        kv_cache=("fp8", "fp8_head"),
        fused=_FUSED,
        source="model_executor/kernels/linear/__init__.py of vllm 0.26.0, 0.29.0 and 0.33.0; our presets ran in the "
        "first two on an H100, those of linear layers in 0.33 on an H200, the rest is read",
        refused={
            "mxfp6": "Only num_bits in (8) are supported (compressed-tensors 0.17, QuantizationArgs.pytorch_dtype)"
        },
    ),
    Target(
        "vllm-modelopt",
        "vLLM 0.26 to 0.33, from the ModelOpt checkpoint",
        (
            Pair("nvfp4", "nvfp4", note=_HOPPER, source=_QUANT_ALGOS),
            Pair("nvfp4", None, STORAGE, source=_QUANT_ALGOS),
            Pair("mxfp8", "mxfp8", note=_HOPPER, source=_QUANT_ALGOS),
            Pair("fp8", "fp8", note="from SM89", source=_QUANT_ALGOS),
            Pair("fp8_channel", "fp8_token", note="from SM89", kinds=_LINEAR, mixes=False, source=_MIXED),
            Pair("fp8_block", "fp8_group", note="read, not run", kinds=_LINEAR, rows=128, mixes=False, source=_BLOCKS),
        ),
        kv_cache=("fp8",),
        fused=_FUSED,
        source=f"{_MODELOPT} of vllm 0.26.0, 0.29.0 and 0.33.0; presets ran in the first two, the rest is read",
        refused={"mxfp4": f"mxfp4 is not a known algorithm ({_MODELOPT}, QUANT_ALGOS)"},
    ),
    Target(
        "sglang",
        "SGLang 0.5.23, from the compressed-tensors checkpoint",
        (
            Pair("nvfp4", "nvfp4", note=_HOPPER),
            Pair("nvfp4", None, STORAGE),
            # Its class for experts takes FP8 with scales a tensor on both sides, a channel and a token, or squares.
            *(replace(pair, source="", kinds=_LINEAR if str(pair) in _SGLANG_LINEAR else pair.kinds) for pair in _FP8),
            Pair("fp8", None, STORAGE, kinds=_LINEAR),
            Pair("fp8_channel", None, STORAGE, kinds=_LINEAR),
            Pair("int8", "int8_token", note="from SM75", kinds=_LINEAR),
            Pair("int8", "int8_tensor", note="from SM75", kinds=_LINEAR),
            *(Pair(w, None, STORAGE) for w in _INT4),
        ),
        kv_cache=("fp8",),
        fused=_FUSED,
        source=f"sglang 0.5.23, {_SGLANG} and get_moe_scheme, asked for each pair on a CPU; no model was run",
        refused={
            "mxfp4": f"it has no scheme for linear layers ({_SGLANG}), and looks for the codes of experts under names "
            "that the layout does not have, except in DeepSeek and Kimi K3 (srt/layers/quantization/mxfp4.py)",
            "mxfp8": f"it has no scheme for it ({_SGLANG})",
        },
    ),
    Target(
        "tensorrt-llm",
        "TensorRT-LLM, PyTorch backend, from the ModelOpt checkpoint",
        (
            Pair("nvfp4", "nvfp4", note="NVFP4, from SM100"),
            Pair("fp8", "fp8", note="FP8, from SM89"),
            Pair("fp8_channel", "fp8_token", note="FP8_PER_CHANNEL_PER_TOKEN"),
            Pair("fp8_block", "fp8_group", note="FP8_BLOCK_SCALES"),
            Pair("mxfp8", "mxfp8", note="MXFP8, from SM100"),
            Pair("mxfp4", "mxfp8", note="W4A8_MXFP4_MXFP8, from SM100", kinds=_EXPERTS),
            Pair("mxfp4", "fp8", note="W4A8_MXFP4_FP8, from SM100", kinds=_EXPERTS),
            Pair("mxfp4", None, STORAGE, "W4A16_MXFP4", _EXPERTS),
            *(Pair(w, None, STORAGE, "W4A16_AWQ") for w in _INT4),
        ),
        kv_cache=("fp8", "nvfp4"),
        fused=_FUSED,
        parts=("pre_scale",),
        source="TensorRT-LLM, tensorrt_llm/quantization/mode.py (QuantAlgo) and features/quantization.html; not run",
    ),
    Target(
        "tensorrt-llm-compressed-tensors",
        "TensorRT-LLM, PyTorch backend, from the compressed-tensors checkpoint",
        (
            Pair("nvfp4", "nvfp4", note="NVFP4, from SM100"),
            Pair("fp8_channel", "fp8_token", note="FP8_PER_CHANNEL_PER_TOKEN"),
            Pair("fp8_block", "fp8_group", note="FP8_BLOCK_SCALES"),
            Pair("mxfp4", "mxfp4", STORAGE, "read as W4A16_MXFP4: inputs stay in 16 bit"),
            Pair("mxfp4", None, STORAGE, "W4A16_MXFP4"),
        ),
        kv_cache=("fp8",),
        fused=_FUSED,
        source=f"TensorRT-LLM of August 2026, {_TRTLLM}; read, not run",
        refused={
            "fp8@fp8": f"Unsupported weights_quant_strategy: tensor ({_TRTLLM})",
            "mxfp8": f"Unsupported weights_quant_strategy: group ({_TRTLLM})",
            **dict.fromkeys(
                ("nvfp4@16bit", *_INT4),
                f"a TypeError, for it asks input_activations for a strategy, and they are null ({_TRTLLM})",
            ),
        },
        misread={"int8@int8_token": f"it looks at num_bits and not at type, and takes the codes for FP8 ({_TRTLLM})"},
    ),
    Target(
        "transformers",
        "transformers with compressed-tensors, which unpacks the weights",
        (
            *(Pair(w, w, STORAGE, _ROUNDED, _UNPACKED) for w in ("nvfp4", "mxfp4", "mxfp6", "mxfp8")),
            *(Pair(pair.weight, pair.activation, STORAGE, _ROUNDED, _UNPACKED) for pair in _FP8),
            Pair("int8", "int8_token", STORAGE, _ROUNDED, _UNPACKED),
            Pair("int8", "int8_tensor", STORAGE, _ROUNDED, _UNPACKED),
            *(
                Pair(w, None, STORAGE, kinds=_UNPACKED)
                for w in ("nvfp4", "mxfp4", "mxfp6", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8", *_INT4)
            ),
        ),
        kv_cache=("fp8",),
        source="compressed-tensors 0.20 under transformers 5.24",
    ),
    Target(
        "tensorrt-rtx-sm120",
        "TensorRT-RTX engine for consumer Blackwell, built without a GPU",
        (
            Pair("nvfp4", "nvfp4", note="FP4 GEMM", kinds=_LINEAR),
            Pair("nvfp4", None, STORAGE, "multiplied in 16 bit", _LINEAR),
            *_RTX,
        ),
        kv_cache=_PLUGIN_CACHES,
        source=_RTX_SOURCE,
    ),
    Target(
        "tensorrt-rtx-sm89",
        "TensorRT-RTX engine for Ada, built without a GPU",
        _RTX,
        _PLUGIN_CACHES,
        source=_RTX_SOURCE,
    ),
    Target(
        "onnxruntime",
        "onnxruntime 1.32 on a processor, from `quant export --to onnx`",
        _ONNXRUNTIME,
        source="onnxruntime 1.32 on a CPU: its outputs were those of `quant.load` (docs/engines.md)",
    ),
    Target(
        "onnxruntime-genai",
        "onnxruntime-genai 0.18, from `quant export --to onnx --genai`",
        (
            *(replace(pair, kinds=tuple({*pair.kinds} - {LayerKind.CONV})) for pair in _ONNXRUNTIME),
            Pair("nvfp4", "nvfp4", note="by the provider of TensorRT-RTX; read, not run", kinds=_LINEAR),
        ),
        source="onnxruntime-genai 0.18 with onnxruntime 1.32 on a CPU: its tokens were those of `quant.load`",
    ),
    Target(
        "edge-llm",
        "TensorRT Edge-LLM 0.11, from `quant export --to modelopt`",
        (
            Pair("nvfp4", "nvfp4", note="from SM100"),
            Pair("fp8", "fp8", note="from SM89", kinds=_LINEAR),
            Pair("mxfp8", "mxfp8", note="from SM100", kinds=_LINEAR),
            Pair("int4", None, STORAGE, kinds=_LINEAR),
        ),
        kv_cache=("fp8",),
        source="tensorrt-edgellm 0.11, its exporter on a CPU; no engine of it was run",
        misread={
            "nvfp4@16bit": "it rounds the inputs of merged q, k and v to NVFP4, with a scale of 1 "
            "(tensorrt_edgellm/models/linear.py)"
        },
    ),
)

TARGETS: dict[str, Target] = {target.name: target for target in _ALL}

RTX = "tensorrt-rtx-"
"""Runtimes that are named with the GPU's generation."""


def get_gpu(name: str) -> Hardware:
    """Returns the GPU called `name`, or the one of a runtime for one kind; ValueError for any other name.

    A GPU of a generation, such as sm120, has no rates of its own.
    """
    short = name.lower().removeprefix(RTX)
    if short in GENERATIONS:
        return like(short, (int(short[2:-1]), int(short[-1])))
    if short in TARGETS:
        raise ValueError(f"target {name} is a runtime; name a GPU: {', '.join((*GPUS, *GENERATIONS))} or local")
    if short not in GPUS:
        near = difflib.get_close_matches(short, [*TARGETS, *GPUS, *GENERATIONS], 3, 0.7)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(
            f"unknown target {short!r}; known targets: {', '.join((*TARGETS, *GPUS, *GENERATIONS))}, and local, this "
            f"machine's GPU{meant}"
        )
    return GPUS[short]
