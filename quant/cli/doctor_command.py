"""The command `quant doctor` shows the software and GPUs of this machine, and how to install missing packages.

GPUs are described by PyTorch's figures, our hardware table, and NVML: driver, power, clocks, links. NVML comes with the
driver, and its Python binding `pynvml` with many packages; without them only NVML's figures are missing.

`quant bench` and `tune` time the quantized matmuls of a model on this GPU, and make them fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import combinations
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from quant.base.errors import PACKAGES, UserError, install_command, versions
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
    """Prints the data sheet of a GPU, in a power mode if one is given, or the description of a runtime."""
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
        "name": gpu.name,
        "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
        "multiprocessors": gpu.sms,
        "l2_bytes": gpu.l2 or None,
        "memory_bytes": gpu.memory,
        "memory_bandwidth": gpu.bandwidth if gpu.known else None,
        "tflops": gpu.tflops if gpu.known else None,
        "native_formats": list(gpu.native_formats),
    }


def examine() -> dict[str, Any]:
    """Returns versions, CPU, GPUs, and each optional package with its extra, JSON-ready."""
    import torch

    count, has_nccl = torch.cuda.device_count(), torch.cuda.is_available() and torch.distributed.is_nccl_available()
    with _nvml() as nvml:
        gpus = [_gpu(nvml, index) for index in range(count)]
        pairs = combinations(range(count), 2) if nvml is not None else ()
        links = {f"{a}-{b}": _link(nvml, a, b) for a, b in pairs}
        driver = None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())
    return {
        "versions": versions(),
        "cpu": {
            "name": describe_processor(),
            "cores": cores(),
            "quota": quota(),
            "torch_threads": torch.get_num_threads(),
        },
        "cuda": torch.version.cuda,
        # The NCCL that this torch was built with, which may differ from the system's.
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        "driver": driver,
        "gpus": gpus,
        "links": links,
        # `find_spec` finds a package without importing it: importing TensorRT takes a second.
        "packages": {
            name: {"installed": find_spec(name) is not None, "extra": extra, "for": purpose}
            for name, (extra, purpose) in {**PACKAGES, **_OF_TORCH}.items()
        },
    }


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    """Describes a GPU of this machine."""
    import torch

    from quant.kernels.base.hardware import current
    from quant.kernels.linear import tiles

    gpu = current(index)
    return {
        **_data_sheet(gpu),
        "name": torch.cuda.get_device_properties(index).name,
        "tuned_shapes": tiles.count_entries(gpu),
        "readings": _readings(nvml, index),
    }


@contextmanager
def _nvml() -> Iterator[Any]:
    """Gives the initialised module, or None where it or the driver's library is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or the binding's own error for a machine without a driver
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, index: int) -> Any:
    """Returns NVML's handle of a GPU of PyTorch, found by its UUID, because NVML numbers GPUs in its own order."""
    import torch

    # torch prints the UUID without the prefix "GPU-" that NVML expects.
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return nvml.nvmlDeviceGetHandleByUUID((uuid if uuid.startswith("GPU-") else f"GPU-{uuid}").encode())


def _readings(nvml: Any, index: int) -> dict[str, float]:
    """Returns power and clocks now and at most; a reading that a machine refuses is left out."""
    if nvml is None:
        return {}
    queries: dict[str, Callable[[Any], float]] = {
        # NVML gives milliwatts.
        "power_watts": lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000,
        "power_limit_watts": lambda h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000,
        "temperature_celsius": lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM),
        "memory_used_bytes": lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used,
    }
    readings = {}
    for name, query in queries.items():
        try:
            readings[name] = query(_handle(nvml, index))
        except nvml.NVMLError:
            continue
    return readings


def _link(nvml: Any, a: int, b: int) -> str:
    first, second = _handle(nvml, a), _handle(nvml, b)
    try:
        # NVLink first: the topology below names only the PCIe path, which such pairs have too.
        if nvml.nvmlDeviceGetP2PStatus(first, second, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    except nvml.NVMLError as error:
        return f"unknown ({error})"
    names = {
        nvml.NVML_TOPOLOGY_INTERNAL: "same board",
        nvml.NVML_TOPOLOGY_SINGLE: "PCIe, one switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PCIe, several switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe, host bridge",
        nvml.NVML_TOPOLOGY_NODE: "PCIe, one NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "PCIe, across NUMA nodes",
    }
    return names.get(level, f"topology level {level}")


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
    units, readings = {"watts": "W", "celsius": "°C", "mhz": "MHz", "bytes": "GiB"}, []
    for name, value in gpu.get("readings", {}).items():
        # The keys of `--json` carry their unit: `power_watts` and 123.4 are shown as "power 123 W".
        what, _, unit = name.rpartition("_")
        readings.append(f"{what.replace('_', ' ')} {value / 2**30 if unit == 'bytes' else value:.0f} {units[unit]}")
    if readings:
        out.print(f"  now: {', '.join(readings)}")


@click.command("bench", cls=Command)
@click.argument("model")
@click.option("--tokens", default="1,16,256", show_default=True, help="Numbers of rows to time MODEL's matmuls with.")
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
@click.option("--tokens", default="1,16,64,256", show_default=True, help="Numbers of rows to tune for.")
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
    """Returns one weight for each shape and format in a quantized model."""
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
