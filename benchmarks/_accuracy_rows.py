"""The settings that toolkits are compared under, and the rows of the tables in docs/benchmarks.md.

`accuracy.py` measures rows by these names, and `result_tables.py` finds them in what it wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quant.recipes.solver_names import rows_of, solver_of

TEXTS = ("WikiText-2", "Python", "reference")


@dataclass(frozen=True)
class Setting:
    """What rows are compared under: the formats of weights and activations, of ours and of every peer.

    `choice` names formats of which each layer gets one, so that all together take `BUDGET` bits a weight.
    """

    title: str
    weight: str
    activation: str = "keep"
    choice: str = ""


SETTINGS = {
    "nvfp4a16": Setting("NVFP4 weight-only", "nvfp4"),
    "nvfp4": Setting("NVFP4 W4A4", "nvfp4", "nvfp4"),
    "four_over_six": Setting("NVFP4 W4A4, inputs scaled to 4 or 6", "nvfp4", "nvfp4_four_over_six"),
    "fp8a16": Setting("FP8 weight-only", "fp8_channel"),
    "fp8": Setting("FP8 W8A8, static", "fp8", "fp8"),
    "fp8_channel": Setting("FP8 W8A8, per token", "fp8_channel", "fp8_token"),
    "mxfp8": Setting("MXFP8 W8A8", "mxfp8", "mxfp8"),
    "mxfp4a16": Setting("MXFP4 weight-only", "mxfp4"),
    "mxfp4": Setting("MXFP4 W4A4", "mxfp4", "mxfp4"),
    "int4a16_g64": Setting("INT4 weight-only, groups of 64", "int4_g64"),  # SmolLM2 is no multiple of 128 wide
    "mixed": Setting("4.8 bits, W4A4 and W8A8", "nvfp4", "nvfp4", "nvfp4,fp8"),
    "mixeda16": Setting("4.8 bits, weight-only", "nvfp4", choice="nvfp4a16,fp8a16"),
}
BUDGET = 4.8

# No default: a head that shares the embedding's weight, as SmolLM2's does, gets one of its own.
LEARNED_ROTATION = "awq:merge+rotation:learned+kfac"
# Our rows of the tables in docs/benchmarks.md: `--only bars` measures these and the rows of `PEER_BARS`.
BARS = (
    "nvfp4a16 Blockscale gptq", "nvfp4a16 Blockscale local_hessian", "nvfp4a16 Blockscale rotation:64+gptq",
    f"nvfp4a16 Blockscale {solver_of(3, 'keep')}", "nvfp4a16 Blockscale gptq, no text",
    "nvfp4a16 Blockscale local_hessian, no text", "nvfp4 Blockscale awq:merge+gptq", "nvfp4 Blockscale awq+gptq",
    f"nvfp4 Blockscale {solver_of(3, 'nvfp4')}", "nvfp4 Blockscale awq:merge+residual:64+gptq",
    "nvfp4 Blockscale awq:merge+residual:64+kfac", f"four_over_six Blockscale {solver_of(2, 'nvfp4')}",
    f"four_over_six Blockscale {solver_of(3, 'nvfp4')}", "nvfp4 Blockscale awq+lowrank:32+gptq",
    "nvfp4 Blockscale awq+lowrank:32+kfac", "fp8 Blockscale gptq", f"fp8 Blockscale {solver_of(3, 'fp8')}",
    f"fp8 Blockscale {LEARNED_ROTATION}", f"fp8_channel Blockscale {LEARNED_ROTATION}",
    "fp8_channel Blockscale gptq", f"fp8_channel Blockscale {solver_of(3, 'fp8_token')}", "mxfp8 Blockscale gptq",
    "mxfp8 Blockscale rtn", "fp8 Blockscale rtn", "fp8_channel Blockscale rtn", "int4a16_g64 Blockscale gptq",
    "mixed Blockscale awq:merge+gptq", f"mixed Blockscale {solver_of(3, 'nvfp4')}", "mixeda16 Blockscale gptq",
    f"mixeda16 Blockscale {solver_of(3, 'keep')}",
)  # fmt: skip
PEER_BARS = (
    "nvfp4* ModelOpt *", "nvfp4a16 llm-compressor NVFP4A16", "nvfp4* llm-compressor GPTQ",
    "nvfp4* llm-compressor GPTQ, rows*", "nvfp4* llm-compressor GPTQ, expanded_*", "nvfp4 llm-compressor NVFP4",
    "nvfp4a16 torchao *", "fp8* ModelOpt *",
    "fp8* llm-compressor *", "mxfp8 ModelOpt *", "int4a16_g64 ModelOpt *", "mixed* ModelOpt *",
)  # fmt: skip
# Rows of the mixture that methods get, and `kfac`, on a GPU: as `quantize` gives them to SmolLM2.
PARAMETERS = 134_515_008
ROWS, KFAC_ROWS = (rows_of(solver, on_gpu=True, parameters=PARAMETERS) for solver in ("gptq", "kfac"))
# Peers that are measured on as many rows as `kfac` gets too. Others would take several minutes; AWQ lite, SVDQuant and
# `auto_quantize` gained nothing from 128 rows instead of 32.
AS_KFAC = ", rows of kfac"
BEST_PEERS = (
    "nvfp4a16 ModelOpt local Hessian", "nvfp4a16 llm-compressor GPTQ", "nvfp4 ModelOpt local Hessian",
    "fp8 ModelOpt FP8_DEFAULT",
)  # fmt: skip
# About how long rows take that take long, in seconds on a GPU that others use: those begin first.
SECONDS = {
    "mixed": 100, "autoround": 90, "kfac": 110, "lowrank": 50, "no text": 60, "ModelOpt GPTQ": 120, "SVDQuant": 110,
    "int4": 40, "AWQ": 90, "awq": 20, "gptq": 20, "llm-compressor GPTQ": 25, "nvfp4 llm-compressor GPTQ": 100,
    "local Hessian": 10,
}  # fmt: skip


def expected_seconds(name: str) -> int:
    """About how long a row takes on a GPU that others use too."""
    bare = name.removesuffix(AS_KFAC)
    seconds = sum(seconds for part, seconds in SECONDS.items() if part in bare)
    return seconds if bare == name else seconds * KFAC_ROWS // ROWS


def chosen(only: Sequence[str], names: Iterable[str]) -> list[str]:
    """The names that globs choose, all without any; `bars` stands for the rows of docs/benchmarks.md."""
    globs = [glob for option in only for glob in ((*BARS, *PEER_BARS) if option == "bars" else (option,))]
    return [name for name in names if not globs or any(fnmatchcase(name, glob) for glob in globs)]
