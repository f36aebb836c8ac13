"""The files of `write_tensor_file` are those of safetensors' own writer, byte for byte."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quant.export.checkpoint.files import tensor_file
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES, DeferredTensor, write_tensor_file

WIDTHS = (1, 3, 8, 130)


def every_dtype() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for place, dtype in enumerate(DTYPE_NAMES):
        size = WIDTHS[place % 4] * dtype.itemsize
        data = torch.randint(0, 2, (2, size), dtype=torch.uint8, generator=generator)
        tensors[f"{place % 5} ä\n{place}"] = data.view(dtype)
    # Axes of one value count as contiguous, whatever their stride.
    odd = {"a column": torch.empty_strided((5, 1), (1, 9)), "one value": torch.empty_strided((1,), (9,))}
    odd = {name: tensor.normal_(generator=generator) for name, tensor in odd.items()}
    return {
        **tensors,
        **odd,
        "empty": torch.zeros(0, 4),
        "a scalar": torch.tensor(3.0),
        "turned": torch.randn(5, 7).t(),
    }


@pytest.mark.parametrize(("piece", "small"), [(1, 1), (7, 4), (64, 1 << 18), (1 << 24, 64), (1 << 24, 1 << 18)])
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_safetensors(
    metadata: dict[str, str] | None, piece: int, small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", piece)
    monkeypatch.setattr(tensor_file, "_SMALL", small)
    monkeypatch.setattr(tensor_file, "_UNSYNCED", 50)
    tensors = every_dtype()
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "wanted", metadata=metadata)
    found = write_tensor_file(tmp_path / "found", tensors, metadata, durable=True)
    wanted = (tmp_path / "wanted").read_bytes()
    assert (tmp_path / "found").read_bytes() == wanted
    assert found == hashlib.sha256(wanted).hexdigest()


def test_tensors_are_made_when_their_turn_comes(tmp_path: Path) -> None:
    wanted = {f"t{i}": torch.full((4, 3), i, dtype=torch.int16) for i in range(3)}
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return wanted[name]

    write_tensor_file(
        tmp_path / "f", {n: DeferredTensor(t.shape, t.dtype, lambda n=n: make(n)) for n, t in wanted.items()}
    )
    assert made == sorted(wanted)
    assert all(torch.equal(t, wanted[name]) for name, t in load_file(tmp_path / "f").items())


def test_a_file_can_be_replaced_by_its_own_tensors(tmp_path: Path) -> None:
    write_tensor_file(tmp_path / "f", {"a": torch.arange(9), "b": torch.ones(5)})
    before = (tmp_path / "f").read_bytes()
    write_tensor_file(tmp_path / "f", load_file(tmp_path / "f"))
    assert (tmp_path / "f").read_bytes() == before


@pytest.mark.gpu
@pytest.mark.parametrize("small", [1, 1 << 18])
def test_from_a_gpu(small: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "_SMALL", small)
    tensors = {"large": torch.randn(77, 33), "codes": torch.randint(0, 255, (1024,), dtype=torch.uint8)}
    here = write_tensor_file(tmp_path / "here", tensors)
    assert write_tensor_file(tmp_path / "there", {name: t.cuda() for name, t in tensors.items()}) == here
