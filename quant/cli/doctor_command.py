"""The command `quant doctor` shows the software and GPUs of this machine, and how to install missing packages.

GPUs are described by PyTorch's figures and our hardware table; `nvidia-smi` shows their power, clocks and links.

`quant bench` and `tune` time the quantized matmuls of a model on this GPU, and make them fast.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from quant.base.errors import PACKAGES, UserError, counted, install_command, versions
from quant.base.processor import cores, describe_processor, quota
from quant.cli.command import JSON, QUIET, TRUST, Command, echo, print_json
from quant.cli.completion import TARGET_NAMES
from quant.cli.console import bar, page, print_table
from quant.export.tensorrt.gpu_targets import resolve_target
from quant.recipes.gpus import GPUS, Hardware
from quant.recipes.targets import TARGETS

if TYPE_CHECKING:
    from quant.formats.tensor import BlockScaledTensor

_OF_TORCH = {"triton": ("", "GPU kernels; comes with a CUDA build of torch")}


@click.command("doctor", cls=Command)
@click.option("--target", shell_complete=TARGET_NAMES, metavar="NAME", help="Show a GPU's data sheet, or a runtime, "
              "instead of this machine.")  # fmt: skip
@click.option("--power", metavar="WATTS", help="Power mode of the GPU of --target: 30W.")
@JSON
def doctor_command(target: str | None, power: str | None, as_json: bool) -> None:
    """Show the software of this machine: torch, GPUs, and the optional packages or how to install them."""
    if power is not None and target is None:
        raise UserError("--power is a mode of the GPU of --target; name it: --target orin")
    if target is not None:
        _show_target(target, power, as_json)
        return
    findings = examine()
    if as_json:
        print_json(findings)
    else:
        print_findings(findings)


def _show_target(name: str, power: str | None, as_json: bool) -> None:
    if (runtime := TARGETS.get(name.lower())) is not None and power is None:
        fields = {"name": runtime.name, "description": runtime.description, "source": runtime.source}
        if as_json:
            print_json(fields)
        else:
            page().print(f"{runtime.name}: {runtime.description}; `quant plan targets` lists its formats")
        return
    gpu = resolve_target(name)
    if power is not None:
        from quant.run.request import read_quantity

        gpu = gpu.at_power(read_quantity("--power", power, "power") or 0)
    if as_json:
        print_json(_data_sheet(gpu))
    elif not gpu.known:
        alike = ", ".join(each.name for each in GPUS.values() if each.capability == gpu.capability)
        page().print(
            f"{gpu}: {alike or 'no GPU with a data sheet here'}; multiplies {', '.join(gpu.native_formats)} as they are"
        )
    else:
        _print_gpu(page(), _data_sheet(gpu))


def _data_sheet(gpu: Hardware) -> dict[str, Any]:
    """Describes a GPU. Rates are the vendor's; null for a GPU that is not in our table."""
    return {
        "name": gpu.name, "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}", "multiprocessors": gpu.sms,
        "l2_bytes": gpu.l2 or None, "memory_bytes": gpu.memory,
        "memory_bandwidth": gpu.bandwidth if gpu.known else None, "tflops": gpu.tflops if gpu.known else None,
        "native_formats": list(gpu.native_formats),
    }  # fmt: skip


def examine() -> dict[str, Any]:
    """Returns versions, CPU, GPUs, and each optional package with its extra, JSON-ready."""
    import torch

    threads = torch.get_num_threads()
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    return {
        "versions": versions(),
        "cpu": {"name": describe_processor(), "cores": cores(), "quota": quota(), "torch_threads": threads},
        "cuda": torch.version.cuda,
        # The NCCL that this torch was built with, which may differ from the system's.
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "driver": _driver(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        # `find_spec` finds a package without importing it: importing TensorRT takes a second.
        "packages": {
            name: {"installed": find_spec(name) is not None, "extra": extra, "for": purpose}
            for name, (extra, purpose) in {**PACKAGES, **_OF_TORCH}.items()
        },
    }


def _gpu(index: int) -> dict[str, Any]:
    import torch

    from quant.kernels.base.hardware import current
    from quant.kernels.linear import tiles

    gpu = current(index)
    name = torch.cuda.get_device_properties(index).name
    return {**_data_sheet(gpu), "name": name, "tuned_shapes": tiles.count_entries(gpu)}


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver by its own library, whose binding comes with many packages."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # ImportError, or the binding's own error for a machine without a driver
        return None


def print_findings(findings: dict[str, Any]) -> None:
    """Prints `examine()`."""
    out = page()
    for name, version in findings["versions"].items():
        out.print(f"{name} {version}", highlight=False)
    cpu = findings["cpu"]
    allowed = "" if cpu["quota"] is None else f", of which this container may use {cpu['quota']:g}"
    threads = counted(cpu["torch_threads"], "thread")
    out.print(f"CPU: {cpu['name']}; {cpu['cores']} cores{allowed}; torch uses {threads}")
    if findings["driver"] or findings["cuda"]:
        words = {"driver": findings["driver"], "CUDA": findings["cuda"], "NCCL": findings["nccl"]}
        out.print(", ".join(f"{name} {value or 'none'}" for name, value in words.items()), highlight=False)
    for gpu in findings["gpus"]:
        _print_gpu(out, gpu)
    if not findings["gpus"]:
        out.print("GPU: none; quantizing, exporting and evaluating work, kernels run as their PyTorch reference")
    packages = findings["packages"].values()
    absent = [f"no: extra {entry['extra']}" if entry["extra"] else "no" for entry in packages]
    here = ["yes" if entry["installed"] else how for entry, how in zip(packages, absent, strict=True)]
    print_table({"!package": list(findings["packages"]), "for": [each["for"] for each in packages], "!here": here})
    missing = [e["extra"] for e in packages if e["extra"] and not e["installed"]]
    if missing:
        how = install_command(missing[0])
        out.print(f"extras are installed by, for example: {how}", highlight=False, markup=False, soft_wrap=True)


def _print_gpu(out: Console, gpu: dict[str, Any]) -> None:
    l2 = f"{gpu['l2_bytes'] >> 20} MiB L2, " if gpu["l2_bytes"] else ""
    out.print(
        f"GPU: {gpu['name']}, sm_{gpu['compute_capability'].replace('.', '')}, {gpu['multiprocessors']} SMs, "
        f"{l2}{gpu['memory_bytes'] >> 30} GiB"
    )
    if gpu["tflops"]:
        rates = ", ".join(f"{name} {rate:g}" for name, rate in gpu["tflops"].items())
        out.print(f"  by its data sheet: {gpu['memory_bandwidth'] / 1e12:.2f} TB/s; TFLOP/s {rates}")
    tuned = f"; {gpu['tuned_shapes']} tuned shapes" if "tuned_shapes" in gpu else ""
    out.print(f"  multiplies as they are: {', '.join(gpu['native_formats'])}{tuned}")


@click.command("bench", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,256", help="Numbers of rows to time MODEL's matmuls with.")
@TRUST
@QUIET
@JSON
def bench_command(model: str, tokens: str, quiet: bool, as_json: bool) -> None:
    """Time the quantized matmuls of MODEL on this GPU, each next to the 16-bit one.

    Byte rates count the weight as it is stored. Nothing is searched: the timed launches are the ones that a call uses
        (`quant tune` searches).
    """
    from quant.kernels.base.hardware import current
    from quant.kernels.linear.tuning import time_as_called

    sizes = _read_numbers(tokens)
    gpu = current()
    weights = _weights(model, "bench")
    with bar("bench", quiet or as_json) as advance:
        record: dict[str, Any] = {"gpu": gpu.name, "matmuls": time_as_called(weights, sizes, progress=advance)}
    if as_json:
        print_json(record)
        return
    echo(record["gpu"])
    for row in record["matmuls"]:
        echo(
            f"  {row['format']} [{row['out']}, {row['in']}], {row['tokens']} tokens: {row['microseconds']:.1f} µs, "
            f"{row['bytes_per_second'] / 1e12:.2f} TB/s, {row['flops'] / 1e12:.1f} TFLOP/s, "
            f"{row['times_16_bit']:.2f} × 16 bit ({row['choice']})"
        )


@click.command("tune", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,64,256", help="Numbers of rows to tune for.")
@TRUST
@QUIET
@JSON
def tune_command(model: str, tokens: str, quiet: bool, as_json: bool) -> None:
    """Measure launches of every quantized matmul of MODEL on this GPU, and keep the fastest.

    The table is kept in ~/.cache/blockscale ($BLOCKSCALE_CACHE) and used by later runs. Launches whose results differ
    from float64 are dropped and named.
    """
    from quant.kernels.base.hardware import current
    from quant.kernels.linear.tuning import tune_shapes

    gpu = current()
    sizes = _read_numbers(tokens)
    weights = _weights(model, "tune")
    with bar("tune", quiet or as_json) as advance:
        entries, dropped, path = tune_shapes(weights, sizes, gpu, progress=advance)
    if as_json:
        print_json({"file": str(path), "entries": entries, "dropped": dropped})
        return
    for name, entry in entries.items():
        echo(f"{name}: {entry['microseconds']:.1f} µs, {entry['choice']}")
    for name, reason in dropped.items():
        echo(f"dropped {name}: {reason}", err=True)
    if not quiet:
        echo(f"written to {path}", err=True)


def _weights(model: str, what: str) -> list[BlockScaledTensor]:
    from quant.export.checkpoint.load import open_runnable
    from quant.kernels.linear.tuning import shapes_of

    weights = shapes_of(open_runnable(model, has_factory=False)[1])
    if not weights:
        raise UserError(f"{model} has no quantized linear; {what} a checkpoint that `quantize` wrote")
    return weights


def _read_numbers(text: str) -> list[int]:
    """Returns positive numbers from "1,16,64", sorted; UserError names the option."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise UserError(f"--tokens {text}: expected numbers of 1 or more, separated by commas, such as 1,16,64")
    return numbers
