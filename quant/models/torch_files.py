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
from torch.fx import GraphModule, Node

from quant.base.errors import UserError
from quant.export.checkpoint.files.tensor_file import DTYPE_NAMES
from quant.models.quantized_config import refuse_packed
from quant.models.state_dict import LazyStateDict

# `restore_linears` puts the linear layers of an exported program back as modules.
#
# An exported program has no layers: its graph reads parameters and calls functions on them.
#
#     f_weight = get_attr[f.weight];  f_bias = get_attr[f.bias];  y = aten.linear(x, f_weight, f_bias)
#
# Quantization replaces modules, so each such call becomes a call of an `nn.Linear` with the same parameters under the
# same names, `y = call_module[f](x)`. The graph computes the same as before.


def restore_linears(model: nn.Module) -> None:
    """Makes modules of the calls of `aten.linear` that are the only readers of their weight and bias.

    A weight with other readers stays as it is, because these would go on reading it in 16 bit.
    """
    if not isinstance(model, GraphModule):
        return
    calls: dict[str, list[Node]] = {}
    for node in model.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default:
            calls.setdefault(_module_path(node), []).append(node)
    for path, nodes in calls.items():
        if path and all(_are_only_readers(node, nodes) for node in nodes):
            _restore(model, path, nodes)
    model.graph.lint()
    model.recompile()


def _module_path(call: Node) -> str:
    """Returns the path of the module with a call's parameters: `a` for `a.weight` and `a.bias`.

    Empty where there is none.
    """
    weight, bias = call.args[1], call.args[2] if len(call.args) > 2 else None
    if not isinstance(weight, Node) or weight.op != "get_attr" or call.kwargs:
        return ""
    path, _, last = str(weight.target).rpartition(".")
    if last != "weight" or (bias is not None and (not isinstance(bias, Node) or bias.target != f"{path}.bias")):
        return ""
    return path


def _are_only_readers(call: Node, calls: list[Node]) -> bool:
    """Returns whether only `calls`, which share their parameters, read them."""
    parameters = [node for node in call.args[1:] if isinstance(node, Node)]
    targets = [node.target for node in parameters]
    reads = [node for node in call.graph.nodes if node.op == "get_attr" and node.target in targets]
    same = all([n.target for n in other.args[1:] if isinstance(n, Node)] == targets for other in calls)
    return same and all(user in calls for node in reads for user in node.users)


def _restore(model: GraphModule, path: str, calls: list[Node]) -> None:
    held = model.get_submodule(path)
    weight, bias = held.weight, getattr(held, "bias", None)
    assert isinstance(weight, nn.Parameter)
    # The constructor would fill a matrix with random numbers, only for the next line to replace it.
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight, linear.bias = weight, bias  # type: ignore[assignment]
    linear.train(model.training)
    model.set_submodule(path, linear)
    for call in calls:
        with model.graph.inserting_before(call):
            new = model.graph.call_module(path, (call.args[0],))
        # `meta` holds the call's fake tensor and stack trace, which later passes over the graph rely on.
        new.meta = call.meta
        call.replace_all_uses_with(new)
        read = [node for node in call.args[1:] if isinstance(node, Node)]
        model.graph.erase_node(call)
        # A get_attr that nobody reads still names the 16-bit parameter, which goes when the module is quantized: `lint`
        # and every forward pass would fail on it.
        for node in read:
            if not node.users:
                model.graph.erase_node(node)


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
