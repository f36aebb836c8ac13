"""TensorRT Edge-LLM takes checkpoints of ModelOpt's layout; its exporter makes the ONNX file of its C++ runtime.

    checkpoint/    the same codes and scales in ModelOpt's layout
    onnx/          the graph of `tensorrt-edgellm-export`, where the package is installed; compared with the plan

Three mistakes end with exit code 0 in version 0.11, so they are refused here, by name:

- of a compressed-tensors directory it reads the tensors that it knows, and skips the others: it gets ModelOpt's layout;
- NVFP4 weights with 16-bit inputs become W4A4 with an input scale of 1; its --no-quantize-activations changes all
  layers but the merged q, k and v;
- sliding windows are ignored, and every token sees the whole cache.

Experts are tried for Qwen3-MoE alone. The exporter packs those in NVFP4 and INT4 for its plug-ins, and drops the input
scales of NVFP4 experts, which `expert_note` says.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from quant.calibration.attention_names import text_config
from quant.export.checkpoint.files.read_tensors import weight_files
from quant.export.onnx.decoder_graph import is_decoder
from quant.export.packages.edge_llm_experts import expert_problems, nvfp4_stacks
from quant.recipes.layers import LayerKind
from quant.recipes.plan import Plan

PACKAGE, MODULE = "tensorrt_edgellm", "tensorrt_edgellm.scripts.export"
_EXPERT_TYPES = ("qwen3_moe",)
_EXPERT_FORMATS = {("nvfp4", "nvfp4"), ("int4", None)}
_FORMATS = {("nvfp4", "nvfp4"), ("fp8", "fp8"), ("mxfp8", "mxfp8"), ("int4", None)}
# Nodes that round the inputs of a linear at run time, in the exporter's ONNX.
_ROUNDING = ("TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "QuantizeLinear")


def check_edge_llm(model: nn.Module, plan: Plan) -> None:
    """Raises ValueError for a plan that the exporter misreads or refuses; the message names the layer and the way out.

    Args:
        model: the checkpoint's, which may be on the meta device.
        plan: of the checkpoint.
    """
    if hasattr(model, "can_generate") and not is_decoder(model):
        raise ValueError(
            f"{type(model).__name__}: TensorRT Edge-LLM runs decoders, and this model is none; use --to onnx, tensorrt "
            "or aoti"
        )
    config: Any = text_config(getattr(model, "config", None))
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in types or (not types and window is not None and _uses_window(config))
    if slides:
        raise ValueError(
            f"{type(model).__name__}: its windows slide over {window} tokens, and TensorRT Edge-LLM 0.11 ignores that "
            "without a word; use --to tensorrt"
        )
    for layer in plan.quantized:
        pair = (str(layer.weight), layer.activation.name if layer.activation else None)
        if layer.weight and layer.weight.is_nvfp4 and layer.activation is None:
            raise ValueError(
                f"{layer.name}: its inputs are in 16 bit, and TensorRT Edge-LLM 0.11 rounds those of NVFP4 weights "
                "without a word; quantize with nvfp4, or use --to tensorrt"
            )
        is_stack = layer.kind == LayerKind.EXPERTS
        model_type = getattr(config, "model_type", "")
        if is_stack and model_type not in _EXPERT_TYPES:
            raise ValueError(
                f"{layer.name}: of the models with experts, {' and '.join(_EXPERT_TYPES)} is tried with TensorRT "
                f"Edge-LLM 0.11, and this is {model_type}; serve its checkpoint (vLLM, TensorRT-LLM)"
            )
        formats = _EXPERT_FORMATS if is_stack else _FORMATS
        if pair not in formats:
            supported = ", ".join(f"{weight}@{inputs or '16bit'}" for weight, inputs in sorted(formats, key=str))
            raise ValueError(
                f"{layer.name}: TensorRT Edge-LLM 0.11 has no {pair[0]}@{pair[1] or '16bit'}"
                f"{' for experts' if is_stack else ''}; it has {supported}"
            )


def _uses_window(config: Any) -> bool:
    # Qwen2 and others have a window in their config that no layer uses.
    return bool(getattr(config, "use_sliding_window", True))


def expert_note(plan: Plan) -> list[str]:
    """Returns a sentence on the input scales of NVFP4 experts, for a plan with such."""
    if not nvfp4_stacks(plan):
        return []
    return [
        "TensorRT Edge-LLM 0.11 drops the input scales of NVFP4 experts: their plug-in rounds inputs with block scales "
        "alone, so its numbers differ from those that were measured here"
    ]


def has_exporter() -> bool:
    """Returns whether the exporter is installed in this environment."""
    return importlib.util.find_spec(PACKAGE) is not None


def run_exporter(checkpoint: Path, out: Path) -> None:
    """Runs the exporter in a process of its own; ValueError with its last line if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", MODULE, str(checkpoint), str(out)], capture_output=True, text=True, check=False
    )
    if done.returncode or not list(out.rglob("*.onnx")):
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ValueError(f"tensorrt-edgellm-export failed: {lines[-1][:400] if lines else 'it said nothing'}")


def check_exported(checkpoint: Path, out: Path, plan: Plan) -> dict[str, int]:
    """Compares the exporter's ONNX files with a checkpoint: how many layers' codes are in it, byte for byte.

    Raises:
        ValueError: codes are missing, or inputs are rounded where the plan keeps them in 16 bit, or the reverse.
    """
    import onnx

    payloads: dict[bytes, bytes] = {}
    rounding: set[str] = set()
    for path in out.rglob("*.onnx"):
        graph = onnx.load(path).graph
        payloads |= {_digest(tensor.raw_data): tensor.raw_data for tensor in graph.initializer}
        rounding |= {node.op_type for node in graph.node} & set(_ROUNDING)
    planned = [layer.name for layer in plan.quantized if layer.activation is not None]
    if bool(planned) != bool(rounding):
        raise ValueError(
            f"{out}: the exported graph {'rounds' if rounding else 'does not round'} inputs, and the plan rounds those "
            f"of {len(planned)} layers; this is a defect of the exporter"
        )
    experts, problems = expert_problems(checkpoint, plan, lambda payload: _digest(payload) in payloads)
    if problems:
        raise ValueError(
            f"{out}: the exported graph lacks {_first_of(problems)}, as the checkpoint has them; this is a defect of "
            "the exporter"
        )
    count, missing = _missing(checkpoint, {f"{layer.name}.weight" for layer in plan.quantized}, payloads)
    # Its plug-ins for weights alone take 4-bit codes in a layout of their own: then none of them is found.
    if missing and len(missing) < count:
        raise ValueError(f"{out}: the exported graph lacks {_first_of(missing)}; this is a defect of the exporter")
    return {"codes_found": count - len(missing) + experts, "codes_in_another_layout": len(missing)}


def _first_of(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _missing(checkpoint: Path, names: Collection[str], payloads: dict[bytes, bytes]) -> tuple[int, list[str]]:
    """Returns how many layers were looked up in the initializers of a graph, and the weights that are not there."""
    codes = dict(_codes(checkpoint, names))
    single = {name for name, payload in codes.items() if _digest(payload) in payloads}
    # The exporter merges the rows of q, k and v: their codes lie one after the other in the merged weight.
    alone = {_digest(codes[name]) for name in single}
    merged = [payload for digest, payload in payloads.items() if digest not in alone]
    missing = [
        name
        for name, payload in codes.items()
        if name not in single and not any(payload in other for other in merged if len(other) > len(payload))
    ]
    return len(codes), sorted(missing)


def _codes(checkpoint: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yields the name and codes of each quantized layer."""
    for file in weight_files(checkpoint):
        with safe_open(file, "pt") as tensors:
            for name in set(tensors.keys()) & set(names):
                yield name, tensors.get_tensor(name).contiguous().view(torch.uint8).numpy().tobytes()


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()
