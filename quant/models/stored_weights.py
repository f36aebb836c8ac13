"""Weights that cannot be views of the mapped files are read when they are needed, and not when the model is opened.

There are two kinds. transformers joins the matrices of all experts to one parameter `[experts, out, in]` where a
checkpoint stores them one by one. And the weights of a checkpoint that is released quantized have to be dequantized. In
memory as a whole, such a model would take its full size. Here these parameters stay on the meta device and have an
attribute `stored`. Their module reads them for a forward pass and drops them after it, or, where `experts_forward` can
run it, reads one expert after the other. A solver that looks only at weights reads one weight, or one expert, at a
time. Everything else of the model is mapped from the files.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quant.export.checkpoint.files.names import expert_names
from quant.kernels.linear.experts import can_run_experts_one_by_one, run_experts_one_by_one


class Files(Protocol):
    """The tensors of a checkpoint, read on access, under the names that they have in the model."""

    def __getitem__(self, name: str) -> Tensor: ...

    def __contains__(self, name: object) -> bool: ...

    def __iter__(self) -> Iterator[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, which is not read for that."""

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a tensor, which is not read for that."""

    def is_mapped(self, name: str) -> bool:
        """Returns whether reading a tensor takes no memory."""

    def matrix(self, name: str, index: int) -> Tensor:
        """Returns one matrix of a stack."""


class StoredWeight:
    """A parameter that is read on access."""

    is_meta = False
    device = torch.device("cpu")
    runs_alone = False
    """Whether its module runs one expert at a time, and reads it for that."""

    def __init__(self, files: Files, name: str) -> None:
        self.files, self.name, self.shape = files, name, torch.Size(files.shape(name))
        self.last: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def dim(self) -> int:
        """Returns the number of dimensions, as a tensor's `dim`."""
        return len(self.shape)

    def __getitem__(self, expert: int) -> Tensor:
        """Returns the matrix of one expert; the last one that was read is kept."""
        if self.last is None or self.last[0] != expert:
            self.last = (expert, self._matrix(expert))
        return self.last[1]

    def _matrix(self, expert: int) -> Tensor:
        return self.files.matrix(self.name, expert)

    def tensor(self) -> Tensor:
        """Returns the whole parameter."""
        return self.files[self.name]


class StoredExperts(StoredWeight):
    """A parameter `[experts, out, in]` whose matrices are stored one by one, by `names` in the order of its rows."""

    def __init__(self, files: Files, names: Sequence[str], shape: torch.Size) -> None:
        super().__init__(files, names[0])
        self.shape, self.parts, self.names = shape, len(names) // shape[0], names

    def _matrix(self, expert: int) -> Tensor:
        return torch.cat([self.files[name] for name in self.names[expert * self.parts : (expert + 1) * self.parts]])

    def tensor(self) -> Tensor:
        stack = torch.empty(self.shape, dtype=self.files.dtype(self.name))
        for expert in range(len(self)):
            stack[expert] = self._matrix(expert)
        return stack

    def fits(self) -> bool:
        """Returns whether the matrices have the shapes that the parameter needs, side by side."""
        shapes = [self.files.shape(name) for name in self.names]
        rows = sum(shape[0] for shape in shapes[: self.parts])
        same = shapes == shapes[: self.parts] * len(self)
        return same and rows == self.shape[1] and all(tuple(shape[1:]) == self.shape[2:] for shape in shapes)


def open_stored(model: nn.Module, files: Files) -> bool:
    """Fills a model that is on the meta device, its weights left where they are stored as far as they are not mapped.

    Returns whether that was possible; if not, the model cannot be used any more. Every tensor of the model must be in
    the files, in its dtype and shape; their other tensors must be ones that the class ignores; some must not be mapped.
    """
    expected = dict(model.state_dict(keep_vars=True))
    mapped, left, used = _divided(model, files, expected)
    fits = all(t.shape == expected[n].shape and t.dtype == expected[n].dtype for n, t in mapped.items())
    fits = fits and all(
        stored.files.dtype(stored.name) == expected[n].dtype
        and stored.shape == expected[n].shape
        and (not isinstance(stored, StoredExperts) or stored.fits())
        for n, stored in left.items()
    )
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    extra = [name for name in files if name not in used and not any(re.search(p, name) for p in ignored)]
    first = next(iter(model.named_parameters()))[0]  # says on which device and in which dtype the model is
    if not left or not fits or extra or first in left:
        return False
    model.load_state_dict(mapped, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    if any(t.is_meta and n not in left for n, t in model.state_dict(keep_vars=True).items()):
        return False
    for name, stored in left.items():
        _read_when_needed(model, name, stored)
    return True


def keeps_float32(model: nn.Module, name: str, dtype: torch.dtype) -> bool:
    """Returns whether transformers keeps a tensor in float32 in a model of `dtype`: by patterns to find in its name."""
    # Modules of the strict list always, those of the other one in float16 alone, where they overflow: T5's `wo`.
    patterns = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype is torch.float16:
        patterns |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    return any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)


def _divided(
    model: nn.Module, files: Files, expected: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, StoredWeight], set[str]]:
    """Returns the tensors of a model that are mapped, those that stay in their files, and the names of both in files.

    Those that transformers keeps in float32 become float32, in `expected` too.
    """
    mapped, left, used = dict[str, Tensor](), dict[str, StoredWeight](), set[str]()
    for name, tensor in expected.items():
        matrices = expert_names(name, len(tensor)) if tensor.dim() == 3 and name not in files else []
        if matrices and all(matrix in files for matrix in matrices):
            left[name] = StoredExperts(files, matrices, tensor.shape)
            used.update(matrices)
        elif name in files:
            used.add(name)
            if keeps_float32(model, name, tensor.dtype):
                mapped[name], expected[name] = files[name].float(), tensor.float()
            elif not files.is_mapped(name):
                left[name] = StoredWeight(files, name)
            else:
                mapped[name] = files[name]
    return mapped, left, used


def _read_when_needed(model: nn.Module, name: str, stored: StoredWeight) -> None:
    """Has the module of a parameter read it from its file before each forward, and drop it afterwards."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    module.get_parameter(last).stored = stored  # type: ignore[attr-defined]
    # Such a module indexes the weight by expert and reads one matrix at a time; hooks would read the whole stack.
    if len(stored.shape) > 2 and can_run_experts_one_by_one(module):
        stored.runs_alone = True
        run_experts_one_by_one(model)
        return
    module.register_forward_pre_hook(partial(_read, last), with_kwargs=True)
    module.register_forward_hook(partial(_drop, last), always_call=True)


def stored_in(model: nn.Module) -> dict[str, StoredWeight]:
    """Returns the parameters of a model that are read when they are needed, by name."""
    return {name: p.stored for name, p in model.named_parameters() if hasattr(p, "stored")}


def read_stored(model: nn.Module, names: Iterable[str]) -> None:
    """Replaces parameters that are read when they are needed by parameters in memory."""
    for name in names:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        stored: StoredWeight = module.get_parameter(last).stored  # type: ignore[attr-defined]
        module._parameters[last] = nn.Parameter(stored.tensor(), requires_grad=False)


def _read(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Puts the parameter with its values into the module before a forward pass."""
    empty = module._parameters.get(name)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if hasattr(empty, "stored") and not any(value.is_meta for value in values):
        # `empty` rides on the parameter that replaces it, so that the hook after the forward pass can put it back.
        read = nn.Parameter(empty.stored.tensor(), requires_grad=False)  # type: ignore[union-attr]
        read.empty = empty  # type: ignore[attr-defined]
        module._parameters[name] = read


def _drop(name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    """Puts the parameter without values back after a forward pass."""
    read = module._parameters.get(name)
    if hasattr(read, "empty"):
        module._parameters[name] = read.empty  # type: ignore[union-attr]
