"""Fused experts that a checkpoint stores one by one are read when they are needed, and not when the model is opened.

transformers joins the matrices of all experts to one parameter `[experts, out, in]` as it loads them, so that they can
be no views of the mapped files, and a model of many experts is in memory as a whole. Here such a parameter stays on the
meta device. Its module reads it for a forward pass and drops it behind; a solver that looks at weights alone reads one
expert at a time. Everything else of the model is mapped from the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.export.checkpoint_reader import TensorFiles
from quant.export.names import expert_names, stored_names


class StoredExperts:
    """A parameter `[experts, out, in]` whose matrices are read when asked for.

    Args:
        files: of the checkpoint.
        names: of the matrices, expert by expert, those of one expert in the order of its rows.
        shape: of the parameter.
    """

    is_meta = False
    device = torch.device("cpu")

    def __init__(self, files: TensorFiles, names: Sequence[str], shape: torch.Size) -> None:
        self.files, self.shape, self.parts = files, shape, len(names) // shape[0]
        self.names = names
        self.last: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def __getitem__(self, expert: int) -> torch.Tensor:
        """The matrix `[out, in]` of one expert; the last one that was read is kept."""
        if self.last is None or self.last[0] != expert:
            names = self.names[expert * self.parts : (expert + 1) * self.parts]
            self.last = (expert, torch.cat([self.files[name] for name in names]))
        return self.last[1]

    def tensor(self) -> torch.Tensor:
        """The whole parameter."""
        return torch.cat([self.files[name] for name in self.names]).view(self.shape)


def open_stored(model: nn.Module, directory: Path) -> bool:
    """Fills a model that is on the meta device, its experts left where they are stored.

    Returns:
        Whether that was possible: every tensor of the model must be in the files, in its dtype and shape, and nothing
        else, and some experts one by one. If not, the model is of no use any more.
    """
    names = stored_names(model)
    files = TensorFiles(directory, names.of_model)
    expected = dict(model.state_dict(keep_vars=True))
    mapped, experts, used = {}, {}, set()
    for name, tensor in expected.items():
        matrices = expert_names(name, len(tensor)) if tensor.dim() == 3 and name not in files else []
        if matrices and all(matrix in files for matrix in matrices):
            experts[name] = StoredExperts(files, matrices, tensor.shape)
            used.update(matrices)
        elif name in files:
            mapped[name] = files[name]
            used.add(name)
    fits = all(t.shape == expected[n].shape and t.dtype == expected[n].dtype for n, t in mapped.items())
    fits = fits and all(
        stored[0].dtype == expected[n].dtype and stored[0].shape == stored.shape[1:] for n, stored in experts.items()
    )
    if not experts or not fits or used != set(files):
        return False
    model.load_state_dict(mapped, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    left = [n for n, t in model.state_dict(keep_vars=True).items() if t.is_meta and n not in experts]
    if left:
        return False
    for name, stored in experts.items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        module.get_parameter(last).stored = stored  # type: ignore[attr-defined]
        module.register_forward_pre_hook(partial(_read, last), with_kwargs=True)
        module.register_forward_hook(partial(_drop, last), always_call=True)
    return True


def stored_in(model: nn.Module) -> dict[str, StoredExperts]:
    """The parameters of a model that are read when they are needed, by name."""
    return {name: p.stored for name, p in model.named_parameters() if hasattr(p, "stored")}


def _read(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a forward pass: the parameter itself in the place of the one without values."""
    empty = module._parameters.get(name)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if hasattr(empty, "stored") and not any(value.is_meta for value in values):
        read = nn.Parameter(empty.stored.tensor(), requires_grad=False)  # type: ignore[union-attr]
        read.empty = empty  # type: ignore[attr-defined]
        module._parameters[name] = read


def _drop(name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    """After a forward pass: the parameter without values again."""
    read = module._parameters.get(name)
    if hasattr(read, "empty"):
        module._parameters[name] = read.empty  # type: ignore[union-attr]
