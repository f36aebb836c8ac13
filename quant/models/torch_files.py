"""`torch.save` checkpoints and exported programs are opened here, without running code that they hold.

A pickle is a program, and `torch.load(weights_only=True)` runs only the few instructions that tensors need. Files are
read only that way unless the user asks for the unsafe one. `torch.export.load` has no such mode: it unpickles sample
inputs and constants, evaluates the expressions of dynamic shapes as Python, and generates code from the graph. An
exported program is therefore opened only where the user trusts it.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from quant.base.errors import UserError
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES
from quant.models.exported_linears import restore_linears
from quant.models.quantized_config import refuse_packed
from quant.models.state_dict import LazyStateDict

_WRAPPERS = ("state_dict", "model_state_dict", "model")


def load(
    path: Path, dtype: torch.dtype | None, unsafe: bool, meta: bool
) -> tuple[nn.Module | None, LazyStateDict | None]:
    """Returns the module or the state dict in a `torch.save` file; exactly one of the two.

    Args:
        path: the file.
        dtype: the dtype that floating-point weights are cast to; None keeps theirs.
        unsafe: unpickles whatever the file holds.
        meta: whether tensors are on the meta device.

    Raises:
        UserError: it is damaged, holds more than tensors or no state dict, or holds codes and scales.
    """
    content = _unwrap(_read(path, unsafe))
    if isinstance(content, nn.Module):
        return (content.to("meta") if meta else content).to(dtype).eval(), None
    tensors = _state_dict_of(content, path)
    refuse_packed(path, {name: DTYPE_NAMES.get(tensor.dtype, "") for name, tensor in tensors.items()})
    if meta:
        tensors = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return None, LazyStateDict(tensors, tensors.__getitem__, dtype)


def _read(path: Path, unsafe: bool) -> Any:
    # Only the zip layout can be mapped; the layout before torch 1.6 is one stream of pickles. torch.load would open a
    # path that ends in .safetensors as such a file.
    mapped = zipfile.is_zipfile(path) and path.suffix != ".safetensors"
    try:
        with path.open("rb") as file:
            return torch.load(path if mapped else file, map_location="cpu", mmap=mapped, weights_only=not unsafe)
    except pickle.UnpicklingError:
        if unsafe:
            raise UserError(f"{path}: a damaged pickle; copy or download it again") from None
        raise UserError(
            f"{path}: holds more than tensors, and unpickling it would run its code; save model.state_dict() instead, "
            "or, if you trust its author, pass --unsafe-load"
        ) from None
    except (AttributeError, ImportError) as error:
        raise UserError(f"{path}: its classes cannot be imported ({error}); save model.state_dict() instead") from None
    except Exception as error:  # a damaged pickle can make the unpickler raise anything
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: truncated or damaged ({reason}); copy or download it again") from None


def _unwrap(content: Any) -> Any:
    """Returns the state dict or module inside a training checkpoint `{"model": …, "optimizer": …}`."""
    while isinstance(content, Mapping):
        inner = next((content[k] for k in _WRAPPERS if isinstance(content.get(k), Mapping | nn.Module)), None)
        if inner is None:
            break
        content = inner
    return content


def _state_dict_of(content: Any, path: Path) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise UserError(f"{path}: holds a {type(content).__name__}; expected a state dict or an nn.Module")
    not_tensors = [str(name) for name, value in content.items() if not isinstance(value, torch.Tensor)]
    if not_tensors or not content:
        fault = f"{', '.join(not_tensors[:3])} is not a tensor" if not_tensors else "it is empty"
        raise UserError(f"{path}: not a state dict ({fault}); save model.state_dict(), or wrap it as {_WRAPPERS[0]!r}")
    return {str(name): tensor.detach() for name, tensor in content.items()}


def load_exported(path: Path, dtype: torch.dtype | None, unsafe: bool) -> nn.Module:
    """Returns the module of a `torch.export.save` archive, with its linear layers as modules again.

    Args:
        path: the file.
        dtype: None, or the dtype that it has: the graph of an exported program has its casts built in.
        unsafe: whether its code may run.

    Raises:
        UserError: the file is not trusted, is damaged, or has another dtype.
    """
    if not unsafe:
        raise UserError(
            f"{path}: opening an exported program runs code that it holds; if you trust its author, pass "
            "--unsafe-load, or save model.state_dict() as safetensors and pass that with --model-factory"
        )
    try:
        model = torch.export.load(path).module()
    except Exception as error:  # a damaged archive can make the deserializer raise anything
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{path}: not a readable exported program ({reason}); export it again with this torch"
        ) from error
    if dtype is not None and any(p.dtype != dtype for p in model.parameters() if p.is_floating_point()):
        raise UserError(f"{path}: an exported program cannot be cast to {dtype}; export the model in that dtype")
    restore_linears(model)
    # Its graph computes as it was exported; torch raises an error even if its mode would not change.
    model.eval = MethodType(_return_unchanged, model)  # type: ignore[method-assign]
    return model


def _return_unchanged(model: nn.Module) -> nn.Module:
    return model
