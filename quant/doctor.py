"""`quant doctor`: what this machine has, and how to get what it lacks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from rich.console import Console
from rich.table import Table

from quant.extras import versions

# What each optional package is for, and the extra that installs it.
_EXTRAS = {
    "transformers": ("hf", "Hugging Face and GGUF models"),
    "gguf": ("hf", "GGUF files"),
    "accelerate": ("hf", "loading checkpoints without initialising them"),
    "datasets": ("data", "calibration text from data sets"),
    "onnx": ("onnx", "ONNX export"),
    "onnxscript": ("onnx", "ONNX export"),
    "tensorrt": ("tensorrt", "TensorRT engines for Hopper and B200, on a GPU"),
    "tensorrt_rtx": ("tensorrt-rtx", "TensorRT-RTX engines, also without a GPU"),
    "transformer_engine": ("te", "FP8 training"),
    "modelopt": ("modelopt", "comparisons with ModelOpt"),
    "triton": ("", "GPU kernels; comes with a CUDA build of torch"),
}


def examine() -> dict[str, Any]:
    """What is here, JSON-ready: versions, CPU, GPUs, and each optional package with its extra."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        gpus.append({"name": p.name, "compute_capability": f"{p.major}.{p.minor}", "memory_bytes": p.total_memory})
    return {
        "versions": versions(),
        "cpu": {"cores": os.cpu_count(), "torch_threads": torch.get_num_threads()},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "packages": {
            name: {"installed": find_spec(name) is not None, "extra": extra, "for": purpose}
            for name, (extra, purpose) in _EXTRAS.items()
        },
    }


def print_findings(findings: dict[str, Any]) -> None:
    """Prints `examine()`."""
    out = Console(markup=False)
    for name, version in findings["versions"].items():
        out.print(f"{name} {version}", highlight=False)
    cpu = findings["cpu"]
    out.print(f"CPU: {cpu['cores']} cores, torch uses {cpu['torch_threads']} threads")
    for gpu in findings["gpus"]:
        out.print(
            f"GPU: {gpu['name']}, sm_{gpu['compute_capability'].replace('.', '')}, {gpu['memory_bytes'] >> 30} GiB"
        )
    if not findings["gpus"]:
        out.print("GPU: none; quantizing, exporting and evaluating work, kernels run as their PyTorch reference")
    table = Table("package", "for", "here")
    for name, entry in findings["packages"].items():
        how = f"pip install 'blockscale[{entry['extra']}]'" if entry["extra"] else "no"
        table.add_row(name, entry["for"], "yes" if entry["installed"] else how)
    out.print(table)
