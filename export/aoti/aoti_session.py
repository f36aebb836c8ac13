"""Runs a decoder's package of AOTInductor: compiled code, which writes into the KV cache that it is called with."""

from __future__ import annotations

import platform
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quant.base.errors import UserError, option
from quant.base.json_files import parse_json
from quant.base.processor import memory_left
from quant.calibration.placement import free_memory
from quant.export.aoti.package import METADATA, load_aoti
from quant.export.onnx.engine_session import check_memory, check_step
from quant.export.onnx.serving import IDS, LAST, LENGTHS

_FIELDS = {"capacity": int, "caches": list, "dtype": str, "plan": str, "torch": str}
_DTYPES = ("float32", "float16", "bfloat16")
_LONGEST = 1 << 20  # bytes of metadata
# Vector instructions of a processor, as Inductor names them, and whether this one has them.
_INSTRUCTIONS = {
    "AMX": torch.cpu._is_amx_tile_supported,
    "AVX512": torch.cpu._is_avx512_supported,
    "AVX2": torch.cpu._is_avx2_supported,
}


class AotiSession:
    """See `EngineSession`; any number of rows and any width run, within the limits of `--shapes`."""

    def __init__(self, path: Path, *, unsafe_load: bool = False) -> None:
        self._path = path
        entries = read_metadata(path)
        description = entries[METADATA]
        check_machine(path, entries)
        if not unsafe_load:
            raise UserError(
                f"{path} is compiled code, which runs when it is loaded; if you trust it, pass "
                f"{option('unsafe_load', True)}"
            )
        self._device = torch.device(entries["AOTI_DEVICE_KEY"])
        self._torch_dtype = getattr(torch, description["dtype"])
        # [heads, capacity, dim] of keys and values, in order of the layers
        self._shapes = [(heads, description["capacity"], dim) for heads, dim in description["caches"]]
        self._caches: list[torch.Tensor] = []
        self.capacity: int = description["capacity"]
        self.dtype: str = description["dtype"]
        self.plan: str = description["plan"]
        name = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        self.backend = f"AOTInductor of torch {torch.__version__}, {name}"
        try:
            self._run = load_aoti(path)
        except RuntimeError as error:
            raise UserError(f"{path}: torch cannot load it: {' '.join(str(error).split())[:300]}") from error

    def most_rows(self) -> int:
        return 1 << 16

    def begin(self, rows: int) -> None:
        self._caches = []
        values = sum(rows * int(np.prod(shape)) for shape in self._shapes)
        free = free_memory(self._device) if self._device.type == "cuda" else memory_left()
        check_memory(self._path, values * self._torch_dtype.itemsize, free, rows)
        self._caches = [
            torch.zeros(rows, *shape, dtype=self._torch_dtype, device=self._device) for shape in self._shapes
        ]

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        check_step(ids, lengths, last, self.capacity)
        inputs = {IDS: ids, LENGTHS: lengths, LAST: last}
        arguments = {name: torch.from_numpy(value).to(self._device) for name, value in inputs.items()}
        try:
            logits: torch.Tensor = self._run(arguments, self._caches)
        except RuntimeError as error:
            raise UserError(f"{self._path}: the package stopped: {' '.join(str(error).split())[:300]}") from error
        result: np.ndarray = logits.float().cpu().numpy()
        return result


def read_metadata(path: Path) -> dict[str, Any]:
    """Returns the metadata of a decoder's package, read without loading its code; UserError for any other file."""
    other = (
        f"{path}: no package of a decoder with a KV cache; export one with `quant export DIRECTORY --to aoti`, without "
        f"{option('capacity', 0)}"
    )
    try:
        with zipfile.ZipFile(path) as archive:
            name = next((name for name in archive.namelist() if name.endswith("wrapper_metadata.json")), None)
            if name is None or archive.getinfo(name).file_size > _LONGEST:
                raise UserError(other)
            entries = parse_json(archive.read(name))
            description = parse_json(entries.get(METADATA, "{}")) if isinstance(entries, dict) else {}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: no package of AOTInductor: {error}") from error
    # The package's own entry of its metadata has all fields, of the right types.
    are_fields = isinstance(description, dict) and all(isinstance(description.get(k), t) for k, t in _FIELDS.items())
    if not are_fields or description["dtype"] not in _DTYPES:
        raise UserError(other)
    for pair in description["caches"]:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(size, int) for size in pair)):
            raise UserError(other)
    return {**entries, METADATA: description}


def check_machine(path: Path, entries: Mapping[str, Any]) -> None:
    """Raises UserError for a package of another version of torch, another kind of processor, or another GPU."""
    version, installed = entries[METADATA]["torch"], torch.__version__.partition("+")[0]
    again = "export it again on a machine like this one"
    if version != installed:
        raise UserError(f"{path} was compiled by torch {version}, and torch {installed} is installed; export it again")
    system = (str(entries.get("AOTI_PLATFORM")), str(entries.get("AOTI_MACHINE")))
    if system != (sys.platform, platform.machine()):
        raise UserError(
            f"{path} was compiled for {' '.join(system)}, and this is {sys.platform} {platform.machine()}; {again}"
        )
    instructions = str(entries.get("AOTI_CPU_ISA"))
    missing = [name for name, supported in _INSTRUCTIONS.items() if name in instructions and not supported()]
    if entries.get("AOTI_DEVICE_KEY") == "cpu":
        if missing:
            raise UserError(f"{path} was compiled for a processor with {missing[0]}, which this one lacks; {again}")
        return
    if not torch.cuda.is_available():
        raise UserError(f"{path} was compiled for a GPU, and this machine has none; export it on a machine without one")
    compiled, local = str(entries.get("AOTI_COMPUTE_CAPABILITY")), "".join(map(str, torch.cuda.get_device_capability()))
    if compiled != local:
        raise UserError(f"{path} was compiled for a GPU of sm{compiled}, and this one is sm{local}; {again}")
