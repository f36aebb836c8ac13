"""The command `quant doctor` shows the software and GPUs of this machine, and how to install missing packages."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import click
from rich.console import Console

from quant.cli.command import JSON, Command, print_json
from quant.cli.console import page
from quant.cli.tables import print_table
from quant.base.extras import versions
from quant.formats.install_command import install_command
from quant.kernels.base.processor import cores, describe_processor, quota

# The purpose of each optional package, and the extra that installs it.
_EXTRAS = {
    "transformers": ("hf", "Hugging Face and GGUF models"),
    "gguf": ("hf", "GGUF files"),
    "accelerate": ("hf", "loading checkpoints without initialising them"),
    "datasets": ("data", "calibration text from data sets"),
    "onnx": ("onnx", "ONNX export"),
    "onnxscript": ("onnx", "ONNX export"),
    "tensorrt": ("tensorrt", "TensorRT engines for Hopper and B200, on a GPU"),
    "tensorrt_rtx": ("tensorrt-rtx", "TensorRT-RTX engines, also without a GPU"),
    "modelopt": ("modelopt", "comparisons with ModelOpt"),
    "triton": ("", "GPU kernels; comes with a CUDA build of torch"),
}


@click.command("doctor", cls=Command)
@JSON
def doctor_command(as_json: bool) -> None:
    """Show the software of this machine: torch, GPUs, and the optional packages or how to install them."""
    findings = examine()
    if as_json:
        print_json(findings)
    else:
        print_findings(findings)


def examine() -> dict[str, Any]:
    """Returns versions, CPU, GPUs, and each optional package with its extra, JSON-ready."""
    import torch

    from quant.cli.doctor_gpu import driver_version, examine_gpus, examine_links

    return {
        "versions": versions(),
        "cpu": {
            "name": describe_processor(),
            "cores": cores(),
            "quota": quota(),
            "torch_threads": torch.get_num_threads(),
        },
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
        "driver": driver_version(),
        "gpus": examine_gpus(),
        "links": examine_links(),
        # `find_spec` finds a package without importing it: importing TensorRT takes a second.
        "packages": {
            name: {"installed": find_spec(name) is not None, "extra": extra, "for": purpose}
            for name, (extra, purpose) in _EXTRAS.items()
        },
    }


def _nccl() -> str | None:
    import torch

    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return None
    # The NCCL that this torch was built with, which may differ from the system's.
    return ".".join(map(str, torch.cuda.nccl.version()))


def print_findings(findings: dict[str, Any]) -> None:
    """Prints `examine()`."""
    out = page()
    for name, version in findings["versions"].items():
        out.print(f"{name} {version}", highlight=False)
    cpu = findings["cpu"]
    allowed = "" if cpu["quota"] is None else f", of which this container may use {cpu['quota']:g}"
    out.print(f"CPU: {cpu['name']}; {cpu['cores']} cores{allowed}; torch uses {cpu['torch_threads']} threads")
    if findings["driver"] or findings["cuda"]:
        words = {"driver": findings["driver"], "CUDA": findings["cuda"], "NCCL": findings["nccl"]}
        out.print(", ".join(f"{name} {value or 'none'}" for name, value in words.items()), highlight=False)
    for gpu in findings["gpus"]:
        _print_gpu(out, gpu)
    for pair, link in findings["links"].items():
        out.print(f"GPUs {pair}: {link}")
    if not findings["gpus"]:
        out.print("GPU: none; quantizing, exporting and evaluating work, kernels run as their PyTorch reference")
    packages = findings["packages"].values()
    absent = [f"no: extra {entry['extra']}" if entry["extra"] else "no" for entry in packages]
    columns = {
        "!package": list(findings["packages"]),
        "for": [entry["for"] for entry in packages],
        "!here": ["yes" if entry["installed"] else how for entry, how in zip(packages, absent, strict=True)],
    }
    print_table(columns)
    missing = [e["extra"] for e in packages if e["extra"] and not e["installed"]]
    if missing:
        out.print(f"extras are installed by, for example: {install_command(missing[0])}", highlight=False, markup=False)


def _print_gpu(out: Console, gpu: dict[str, Any]) -> None:
    out.print(
        f"GPU: {gpu['name']}, sm_{gpu['compute_capability'].replace('.', '')}, {gpu['multiprocessors']} SMs, "
        f"{gpu['l2_bytes'] >> 20} MiB L2, {gpu['memory_bytes'] >> 30} GiB"
    )
    if gpu["tflops"]:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in gpu["tflops"].items())
        out.print(f"  by its data sheet: {gpu['memory_bandwidth'] / 1e12:.2f} TB/s; TFLOP/s {rates}")
    out.print(f"  multiplies as they are: {', '.join(gpu['native_formats'])}; {gpu['tuned_shapes']} tuned shapes")
    now = gpu["readings"]
    if now:
        out.print("  now: " + ", ".join(_reading(name, value) for name, value in now.items()))


def _reading(name: str, value: float) -> str:
    """Returns `power_watts` and 123.4 as "power 123 W"."""
    units = {"watts": "W", "celsius": "°C", "mhz": "MHz", "bytes": "GiB"}
    # The keys of `--json` carry their unit, such as `power_watts`.
    what, _, unit = name.rpartition("_")
    return f"{what.replace('_', ' ')} {value / 2**30 if unit == 'bytes' else value:.0f} {units[unit]}"
