"""This file finds the device that `device=` and `--device` name: `auto`, `cpu`, `cuda` or `cuda:N`."""

from __future__ import annotations

import re

import torch

from quant.errors import UserError, megabytes

Device = torch.device | str | None
"""What `device=` takes. None stands for where the model is, "auto" for the GPU where there is one."""


def find_device(device: Device) -> torch.device | None:
    """The device with its index; None where the model stays where it is.

    Raises:
        UserError: there is no such device; the message names those that are there.
    """
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return device
    name, count = str(device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else None
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise UserError(f"device {name} is no device; expected auto, cpu, cuda or cuda:N")
    if not count:
        raise UserError(f"device {name}: PyTorch sees no GPU here; leave it out, or pass cpu")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device()
    if index >= count:
        seen = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise UserError(f"device {name}: PyTorch sees {seen} here; pass one of these, or cpu")
    return torch.device("cuda", index)


def describe(device: torch.device | None) -> str:
    """A device as the terminal and the report name it; None is the CPU."""
    if device is None or device.type != "cuda":
        return str(device or "cpu")
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {megabytes(properties.total_memory)})"
