"""`Hardware` describes a GPU by its data sheet: sizes, rates and units. `GPUS` has those that a plan may be made for.

Rates are the vendor's for dense matrices at boost clock, sums in FP32; programs reach less (`quant bench` measures it).
Capabilities follow from the compute capability: FP8 tensor cores from 8.9 on, block-scaled FP4 and FP8 from 10.0 on,
wgmma on 9.0 only. This file is read without torch; `kernels/base/hardware.py` finds the GPU of the machine.

Sources, NVIDIA's: data sheets of T4, A10, L4, A100, L40S, H100 SXM, H200 SXM, B200 and B300 (HGX, per GPU), GB200
NVL72, GB300 NVL72 and Vera Rubin NVL72 (per GPU), DGX Spark, Jetson AGX Orin 64 GB and Jetson T5000; white papers of
GA102, Ada, RTX Blackwell and RTX PRO Blackwell for the RTX cards. A B200 of an HGX board has 180 GB at 7.7 TB/s; the
8 TB/s that are often quoted are a GB200's. Rubin's 50 PFLOP/s of FP4 are those of inference. DGX Spark's sheet has FP4
alone; its other rates are those that NVIDIA's aiconfigurator measured. Where a sheet has a sparse rate alone, half of
it is the dense one. An L2 that is not published is 0 here. SM counts and L2 sizes of GPUs on the machine are read from
the driver.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quant.base.errors import UserError, option


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

    def at_power(self, watts: float) -> Hardware:
        """Returns the GPU in its power mode of `watts`; UserError where no such mode of it is known."""
        mode = next((mode for mode in self.modes if mode.watts == watts), None)
        if mode is None:
            has = ", ".join(f"{mode.watts} W" for mode in self.modes)
            able = ", ".join(gpu.name for gpu in GPUS.values() if gpu.modes)
            # Thor has modes too, whose clocks are not known here.
            unknown = f"no power mode of {self.name} is known here, but of {able}"
            why = f"{self.name} has modes of {has}" if has else unknown
            raise UserError(f"{option('power', f'{watts:g}W')}: {why}")
        # Tensor cores work in proportion to the multiprocessors that are on, and to their clock.
        share = mode.sms * mode.clock / (self.sms * self.clock)
        rates = {dtype: rate * share for dtype, rate in self.tflops.items()}
        name = f"{self.name} at {mode.watts} W"
        return replace(self, name=name, sms=mode.sms, bandwidth=mode.bandwidth, tflops=rates, clock=mode.clock)


_GB, _MIB, _GIB = 10**9, 1 << 20, 1 << 30
# AGX Orin's modes, from nvpmodel_p3701_0000.conf of Jetson Linux: 3, 4 and 8 of 8 TPCs (two SMs each), the clock's cap,
# and memory at 2133 of 3200 MHz in the first.
_ORIN = (
    PowerMode(15, 6, 408, 136.5 * _GB), PowerMode(30, 8, 612, 204.8 * _GB), PowerMode(50, 16, 816, 204.8 * _GB),
)  # fmt: skip


def _gpu(
    name: str, capability: tuple[int, int], sms: int, l2: int, memory: int, bandwidth: float, *rates: float
) -> Hardware:
    names = ("bf16", "int8", "fp8", "fp4")[: len(rates)]
    return Hardware(
        name, capability, sms, l2 * _MIB, memory * _GIB, bandwidth * _GB, dict(zip(names, rates, strict=True))
    )


GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        _gpu("t4", (7, 5), 40, 4, 16, 320, 65, 130),  # FP16: Turing has no BF16
        _gpu("a100", (8, 0), 108, 40, 80, 2039, 312, 624),
        _gpu("a10", (8, 6), 72, 6, 24, 600, 125, 250),
        _gpu("rtx3090", (8, 6), 82, 6, 24, 936, 71, 284),
        replace(_gpu("orin", (8, 7), 16, 4, 64, 204.8, 42.5, 85), clock=1300, modes=_ORIN),
        _gpu("l40s", (8, 9), 142, 96, 48, 864, 362, 733, 733),
        _gpu("l4", (8, 9), 58, 48, 24, 300, 121, 242, 242),
        _gpu("rtx4090", (8, 9), 128, 72, 24, 1008, 165.2, 660.6, 330.3),
        _gpu("h100", (9, 0), 132, 50, 80, 3350, 989, 1979, 1979),
        _gpu("h200", (9, 0), 132, 60, 141, 4800, 989, 1979, 1979),
        _gpu("b200", (10, 0), 148, 126, 180, 7700, 2250, 4500, 4500, 9000),
        _gpu("gb200", (10, 0), 152, 126, 186, 8000, 2500, 5000, 5000, 10000),
        # Blackwell Ultra and Rubin gave their INT8 units to FP4.
        _gpu("b300", (10, 3), 148, 126, 270, 7700, 2250, 150, 4500, 13500),
        _gpu("gb300", (10, 3), 152, 126, 279, 8000, 2500, 165, 5000, 15000),
        _gpu("rubin", (10, 7), 224, 0, 288, 22000, 4000, 250, 17500, 50000),
        _gpu("thor", (11, 0), 20, 0, 128, 273, 258.5, 517, 517, 1035),
        _gpu("rtx5090", (12, 0), 170, 96, 32, 1792, 210, 838, 419, 1676),
        _gpu("rtx5080", (12, 0), 84, 64, 16, 960, 112.6, 450.2, 225.1, 900.4),
        _gpu("rtx5070", (12, 0), 48, 48, 12, 672, 61.7, 246.9, 123.5, 493.9),
        # Workstation cards sum in FP32 at the full rate, GeForce cards at half of it.
        _gpu("rtxpro6000", (12, 0), 188, 128, 96, 1792, 503.8, 1007.6, 1007.6, 2015),
        _gpu("dgx-spark", (12, 1), 48, 24, 128, 273, 213, 214, 214, 500),
    )
}
"""GPUs that a plan, an engine or a table of measured times may name."""

GENERATIONS = tuple(f"sm{arch}" for arch in sorted({gpu.arch for gpu in GPUS.values()}))
"""GPUs by their compute capability alone: enough to build an engine."""


def like(name: str, capability: tuple[int, int]) -> Hardware:
    """Returns a GPU of which no more is known: figures of the nearest one that is not newer, marked as a likeness."""
    older = [gpu for gpu in GPUS.values() if gpu.capability <= capability] or [GPUS["a100"]]
    nearest = max(older, key=lambda gpu: gpu.capability)
    return replace(nearest, name=name, capability=capability, known=False, modes=())
