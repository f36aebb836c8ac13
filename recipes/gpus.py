"""`Hardware` describes a GPU by its data sheet: sizes, rates and units. `GPUS` has those that a plan may be made for.

Figures and their sources are in `tables/gpus.toml`. Rates are the vendor's for dense matrices at boost clock, sums in
FP32; programs reach less (`quant bench` measures it).
Capabilities follow from the compute capability: FP8 tensor cores from 8.9 on, block-scaled FP4 and FP8 from 10.0 on,
wgmma on 9.0 only. This file is read without torch; `kernels/base/hardware.py` finds the GPU of the machine.
"""

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from quant.base.errors import UserError, option


def read_table(name: str) -> dict[str, Any]:
    """Returns a TOML file of `recipes/tables`, without its ending, as tomllib reads it."""
    return tomllib.loads((resources.files("quant.recipes") / "tables" / f"{name}.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PowerMode:
    """What remains of a GPU in a mode of its vendor's power tool."""

    watts: int
    sms: int
    clock: float  # MHz
    bandwidth: float  # bytes per second


@dataclass(frozen=True)
class Hardware:
    """Facts about a GPU."""

    name: str  # key in `GPUS`, a generation such as sm120, or the driver's name of a GPU that is not in it
    capability: tuple[int, int]  # compute capability
    sms: int  # streaming multiprocessors
    l2: int  # bytes of the L2 cache
    memory: int  # bytes of device memory
    bandwidth: float  # bytes per second of device memory
    # Dense tensor-core rate by dtype, TFLOP/s; a dtype that is absent has no tensor-core instruction.
    tflops: dict[str, float]
    # Whether `bandwidth` and `tflops` are known for this part and not taken from one that is like it.
    known: bool = True
    clock: float = 0.0  # MHz that the rates belong to, where there are modes
    modes: tuple[PowerMode, ...] = ()

    def __str__(self) -> str:
        return self.sm if self.name == self.sm else f"{self.name} ({self.sm})"

    @property
    def arch(self) -> int:
        """Compute capability as one number, such as 90."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def sm(self) -> str:
        """The generation as compilers call it, such as `sm120`."""
        return f"sm{self.arch}"

    @property
    def has_fp8(self) -> bool:
        """FP8 tensor cores."""
        return self.capability >= (8, 9)

    @property
    def has_block_scales(self) -> bool:
        """Tensor cores that take block scales: NVFP4, MXFP4, MXFP6 and MXFP8 without dequantizing."""
        return self.capability >= (10, 0)

    @property
    def has_wgmma(self) -> bool:
        """Hopper's matrix instructions, whose left operand may be in registers."""
        return self.capability == (9, 0)

    @property
    def native_formats(self) -> tuple[str, ...]:
        """Formats that a tensor core multiplies as they are."""
        plain = ("int8",) + (("fp8",) if self.has_fp8 else ())
        return plain + (("mxfp8", "mxfp6", "mxfp4", "nvfp4") if self.has_block_scales else ())

    def at_power(self, watts: float) -> "Hardware":
        """Returns the GPU in its power mode of `watts`; UserError where no such mode of it is known."""
        mode = next((mode for mode in self.modes if mode.watts == watts), None)
        if mode is None:
            has = ", ".join(f"{mode.watts} W" for mode in self.modes)
            able = ", ".join(gpu.name for gpu in GPUS.values() if gpu.modes)
            # Thor has modes too, whose clocks are not known here.
            unknown = f"no power mode of {self.name} is known here, but of {able}; leave it out"
            why = f"{self.name} has modes of {has}" if has else unknown
            raise UserError(f"{option('power', f'{watts:g}W')}: {why}")
        # Tensor cores work in proportion to the multiprocessors that are on, and to their clock.
        share = mode.sms * mode.clock / (self.sms * self.clock)
        rates = {dtype: rate * share for dtype, rate in self.tflops.items()}
        name = f"{self.name} at {mode.watts} W"
        return replace(self, name=name, sms=mode.sms, bandwidth=mode.bandwidth, tflops=rates, clock=mode.clock)


def _read(name: str, sheet: dict[str, Any]) -> Hardware:
    """Returns a GPU from its row of the table, whose sizes are in MiB, GiB and GB/s."""
    rates: dict[str, float] = {dtype: sheet[dtype] for dtype in ("bf16", "int8", "fp8", "fp4") if dtype in sheet}
    modes = tuple(PowerMode(w, sms, clock, gb * 10**9) for w, sms, clock, gb in sheet.get("modes", ()))
    l2, memory, bandwidth = sheet["l2"] << 20, sheet["memory"] << 30, sheet["bandwidth"] * 10**9
    clock, capability = sheet.get("clock", 0.0), (sheet["capability"][0], sheet["capability"][1])
    return Hardware(name, capability, sheet["sms"], l2, memory, bandwidth, rates, clock=clock, modes=modes)


GPUS: dict[str, Hardware] = {name: _read(name, sheet) for name, sheet in read_table("gpus").items()}
"""GPUs that a plan, an engine or a table of measured times may name."""

GENERATIONS = tuple(f"sm{arch}" for arch in sorted({gpu.arch for gpu in GPUS.values()}))
"""GPUs by their compute capability alone: enough to build an engine."""


def like(name: str, capability: tuple[int, int]) -> Hardware:
    """Returns a GPU of which no more is known: figures of the nearest one that is not newer, marked as a likeness."""
    older = [gpu for gpu in GPUS.values() if gpu.capability <= capability] or [GPUS["a100"]]
    nearest = max(older, key=lambda gpu: gpu.capability)
    return replace(nearest, name=name, capability=capability, known=False, modes=())
