"""`quant doctor` describes GPUs by PyTorch's figures, our hardware table, and NVML: driver, power, clocks, links.

NVML comes with the driver, and its Python binding `pynvml` with many packages. Without them only NVML's figures are
missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from quant.kernels import launch_table
from quant.kernels.base.hardware import current


def examine_gpus() -> list[dict[str, Any]]:
    """Describes every GPU that PyTorch sees, JSON-ready.

    Rates are the vendor's; null for a GPU that is not in our table.
    """
    gpus = []
    with _nvml() as nvml:
        for index in range(torch.cuda.device_count()):
            gpu = current(index)
            gpus.append(
                {
                    "name": torch.cuda.get_device_properties(index).name,
                    "compute_capability": f"{gpu.capability[0]}.{gpu.capability[1]}",
                    "multiprocessors": gpu.sms,
                    "l2_bytes": gpu.l2,
                    "memory_bytes": gpu.memory,
                    "memory_bandwidth": gpu.bandwidth if gpu.known else None,
                    "tflops": gpu.tflops if gpu.known else None,
                    "native_formats": list(gpu.native_formats),
                    "tuned_shapes": launch_table.count_entries(gpu),
                    "readings": _readings(nvml, index),
                }
            )
    return gpus


def examine_links() -> dict[str, str]:
    """Returns how each pair of GPUs is connected: NVLink, or the PCIe path between them.

    Empty where NVML cannot say.
    """
    count = torch.cuda.device_count()
    links = {}
    with _nvml() as nvml:
        if nvml is not None:
            for a in range(count):
                for b in range(a + 1, count):
                    links[f"{a}-{b}"] = _link(nvml, a, b)
    return links


def driver_version() -> str | None:
    """Returns the driver's version, or None without NVML."""
    with _nvml() as nvml:
        return None if nvml is None else str(nvml.nvmlSystemGetDriverVersion())


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
