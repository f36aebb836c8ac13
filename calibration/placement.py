"""`placed` lets a model run on another device than the one that holds its weights.

Where the model fits there, all of it is copied. Where it does not, its repeated blocks are copied one at a time, each
for its own forward pass, and everything outside of them once. The model's own tensors stay where they are, perhaps in a
mapped file, and are put back untouched: nothing is ever copied back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import block_names, removing

# Share of a GPU's free memory that a whole model may take; activations and logits need the rest.
_SHARE = 0.7
NARROW = (torch.float16, torch.bfloat16)

Device = torch.device | str | None
"""What `device=` takes. None stands for where the model is, "auto" for the GPU where there is one."""


def find_device(device: Device) -> torch.device | None:
    """The device with its index; None where the model stays where it is.

    Raises:
        ValueError: there is no such device; the message names those that are there.
    """
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return device
    name, count = str(device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else None
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device {name} is no device; expected auto, cpu, cuda or cuda:N")
    if not count:
        raise ValueError(f"device {name}: PyTorch sees no GPU here; leave it out, or pass cpu")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device()
    if index >= count:
        seen = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise ValueError(f"device {name}: PyTorch sees {seen} here; pass one of these, or cpu")
    return torch.device("cuda", index)


def describe(device: torch.device | None) -> str:
    """A device as the terminal and the report name it; None is the CPU."""
    if device is None or device.type != "cuda":
        return str(device or "cpu")
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {properties.total_memory / 1e9:.0f} GB)"


def device_of(model: nn.Module) -> torch.device:
    """Where the first tensor of a model is, and where its inputs must be."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def elsewhere(model: nn.Module, device: torch.device | None) -> bool:
    """Whether `model` has to be copied to run on `device`; None stands for where it is."""
    return device is not None and device_of(model) != device


@contextmanager
def placed(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> Iterator[torch.device]:
    """While open, `model` runs on `device` and takes its inputs there; gives that device.

    Args:
        model: its weights must not be changed meanwhile.
        device: with its index; None leaves the model where it is.
        dtype: what the copies of 16-bit tensors are widened to; None copies them as they are.
    """
    if device is None or not elsewhere(model, device):
        yield device_of(model)
        return

    def copied(t: torch.Tensor) -> torch.Tensor:
        return t.to(device, dtype if t.dtype in NARROW else None)

    names = [] if fits(model, device, dtype) else block_names(model)
    blocks = [model.get_submodule(name) for name in names]
    inside = {id(module) for block in blocks for module in block.modules()}
    borrowed = {id(model): _borrow([m for m in model.modules() if id(m) not in inside], copied)}

    def enter(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        borrowed[id(block)] = _borrow(list(block.modules()), copied)
        return tuple(_moved(a, device) for a in args), {name: _moved(a, device) for name, a in kwargs.items()}

    def leave(block: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        borrowed.pop(id(block))()

    handles = [block.register_forward_pre_hook(enter, prepend=True, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave, always_call=True) for block in blocks]
    try:
        with removing(handles):
            yield device
    finally:
        for give_back in reversed(borrowed.values()):
            give_back()


def fits(model: nn.Module, device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Whether all of `model` may be copied to `device`, its 16-bit tensors in `dtype`."""
    if device.type != "cuda":
        return True
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    wide = None if dtype is None else dtype.itemsize
    needed = sum(t.numel() * (wide or t.itemsize) if t.dtype in NARROW else t.nbytes for t in tensors)
    return needed <= _SHARE * free_memory(device)


def free_memory(device: torch.device) -> int:
    """Bytes of a GPU that are free, those included that PyTorch holds and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _borrow(modules: Sequence[nn.Module], copied: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Puts copies in the place of the tensors of `modules`, and gives the function that undoes it."""
    kept = []
    with torch.inference_mode(False), torch.no_grad():
        for module in modules:
            if not module._parameters and not module._buffers:
                continue
            parameters = {name: (p, p.data) for name, p in module._parameters.items() if p is not None}
            buffers = dict(module._buffers)
            module._apply(copied, recurse=False)  # quantized modules keep the dtype of codes, and take a GPU's layout
            kept.append((module, parameters, buffers, dict(module._buffers)))

    def give_back() -> None:
        for module, parameters, buffers, copies in reversed(kept):
            for name, (parameter, data) in parameters.items():
                parameter.data = data
                module._parameters[name] = parameter
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is copies[name] or now is None or buffer is None or hasattr(module, "quantized_weight"):
                    module._buffers[name] = buffer
                else:  # the module has put another tensor there, such as frequencies of longer texts
                    module._buffers[name] = now.to(buffer.device)

    return give_back


def _moved(value: Any, device: torch.device) -> Any:
    """A tensor, or the tensors of a tuple, on `device`; anything else, such as a cache, as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return tuple(_moved(v, device) for v in value) if type(value) is tuple else value
