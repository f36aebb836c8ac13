"""Checkpoints that were released quantized are dequantized while they are read, one tensor at a time.

`QuantizedTensors` has the names, shapes and dtype of the original checkpoint. Tensors without scales are returned
unchanged, so layers that the source left in 16 bit stay so. Scales of inputs and of the KV cache are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quant.base.errors import UserError
from quant.base.mapped import in_memory
from quant.models.files import safetensors_file
from quant.models.quantized.layouts import FIND, Packed
from quant.models.quantized_config import Quantization, QuantMethod, refuse_packed

# Tensors of a quantized layer for its inputs, its outputs and the KV cache; the values of its weight do not need them.
_RUN_TIME = (
    "input_scale", "input_scale_ub", "activation_scale", "input_global_scale", "input_zero_point", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale",
)  # fmt: skip


class QuantizedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a quantized checkpoint under the original's names, dequantized on access.

    Args:
        shards: the safetensors files.
        quantization: the quantization that the config describes.
        dtype: the dtype of dequantized tensors; others keep their own.

    Raises:
        UserError: codes without scales, or scales without codes; the message names the tensor and its file.
    """

    def __init__(self, shards: Sequence[Path], quantization: Quantization, dtype: torch.dtype) -> None:
        if wrong := [shard for shard in shards if shard.suffix != ".safetensors"]:
            raise UserError(f"{wrong[0]}: a quantized checkpoint as a pickle; get it as safetensors")
        self.dtype = dtype
        self._files = {shard: safetensors_file(shard, "pt") for shard in shards}
        self._home = {name: shard for shard, file in self._files.items() for name in file.keys()}  # noqa: SIM118
        self.packed: dict[str, Packed] = {}
        for name in self._home:
            if (tensor := FIND[QuantMethod(quantization.method)](name, self, quantization)) is not None:
                self.packed[tensor[0]] = tensor[1]
        used = {part for packed in self.packed.values() for part in packed.parts.values()}
        self._plain = [n for n in self._home if n not in used and n.rpartition(".")[2] not in _RUN_TIME]
        for shard, file in self._files.items():
            plain = {name: self.stored_dtype(name) for name in self._plain if self._home[name] is shard}
            refuse_packed(shard, plain, set(file.keys()), f", though the config says {quantization}")

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.packed:
            return self._read(name)
        shape = self.packed[name].shape
        if len(shape) == 2:
            return self.matrix(name)
        # Matrix by matrix: decoding goes through float32, of which only one expert's is in memory, not the whole
        # stack's.
        out = torch.empty(shape, dtype=self.dtype)
        for index in range(shape[0]):
            out[index] = self.matrix(name, index)
        return out

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading its values."""
        return self.packed[name].shape if name in self.packed else self.stored_shape(name)

    def matrix(self, name: str, index: int | None = None) -> torch.Tensor:
        """Returns a packed matrix, or one of a packed stack."""
        packed = self.packed[name]
        parts = {part: self._read(on_disk, index) for part, on_disk in packed.parts.items()}
        try:
            return packed.decode({part: in_memory(tensor) for part, tensor in parts.items()}, self.dtype)
        except (ValueError, RuntimeError, IndexError, KeyError) as error:
            file = self._home[next(iter(packed.parts.values()))]
            raise UserError(f"{file}: {name} cannot be dequantized: {error}; download the model again") from error

    def _read(self, name: str, index: int | None = None) -> torch.Tensor:
        file = self._files[self._home[name]]
        tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        return tensor

    def file_of(self, name: str) -> Path:
        """Returns the file that holds a tensor."""
        return self._home[name]

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor as it is on disk."""
        return tuple(self._files[self._home[name]].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Returns the dtype of a tensor on disk, as safetensors names it."""
        return str(self._files[self._home[name]].get_slice(name).get_dtype())

    def on_disk(self, name: str) -> bool:
        """Returns whether a tensor of this name is in the files."""
        return name in self._home

    def integers(self, name: str) -> list[int]:
        """Returns a small tensor of integers."""
        return [int(value) for value in self._read(name).tolist()]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._plain, *self.packed])

    def __len__(self) -> int:
        return len(self._plain) + len(self.packed)

    def deferred(self) -> dict[str, Any]:
        """Returns all tensors as transformers' loader takes them: each is read when it is indexed with `...`."""
        return {name: _Deferred(self, name) for name in self}


class Renamed:
    """The tensors of a quantized checkpoint under the names that they have in a model; see `stored_weights.Files`."""

    def __init__(self, tensors: QuantizedTensors, rename: Callable[[str], str]) -> None:
        self.tensors = tensors
        self.names = {rename(name): name for name in tensors}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[self.names[name]]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(self.names[name])

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype if not self.is_mapped(name) else self[name].dtype

    def is_mapped(self, name: str) -> bool:
        return self.names[name] not in self.tensors.packed

    def matrix(self, name: str, index: int) -> torch.Tensor:
        return self.tensors.matrix(self.names[name], index)


@dataclass(frozen=True)
class _Deferred:
    # transformers' loader takes lazy tensors of safetensors, of which it uses only indexing.
    tensors: QuantizedTensors
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.tensors[self.name][index]
