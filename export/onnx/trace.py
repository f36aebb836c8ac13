"""`trace` turns a module into a graph of torch.export over named dimensions.

A quantized linear is one `quant::` op in the graph, attention another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from quant.base.errors import option
from quant.export.onnx import limits
from quant.export.onnx.decoder_graph import GraphInput
from quant.kernels.linear.quantized_module import restore_layout

# An error of torch.export becomes one line that names the model, the module and the way out.
#
# torch.export names neither: it tells of a size that the code fixes after the whole trace, as a guard over symbols.
# While `explained` is open, every guard is noted with the module that was running when it was added:
#
#     s70 == 64     Mamba loops over its tokens: the graph would hold as many steps as the example has tokens
#     s70 != 128    OpenAI's GPT cuts a mask of 128 positions, and torch.export takes a cut of nothing for another
#     program
#
# A guard of the second kind, which is about the ends of a range, is met by a shorter range; one of the first kind by a
# graph of fixed size.


_LONGEST = 400  # characters of a text of torch's
_UNLIMITED = 512  # sizes up to here are tried where a dimension has no limit


@contextmanager
def explained(
    model: nn.Module, examples: Mapping[str, tuple[torch.Tensor, tuple[str | int, ...]]], highest: Mapping[str, int]
) -> Iterator[None]:
    """Raises ValueError in the place of an error of the trace of `model` that runs while this is open.

    Args:
        model: the model, as the user knows it.
        examples: example and dimensions of each input of the graph; empty if they are no choice of the user's.
        highest: the largest size of each dimension that is limited.
    """
    names = {module: name for name, module in model.named_modules()}
    guards = _Guards(names, is_served=hasattr(model, "main_input_name"))
    handles = [
        register_module_forward_pre_hook(guards.enter),
        register_module_forward_hook(guards.leave, always_call=True),
    ]
    name = type(model).__name__
    try:
        yield
    except torch._dynamo.exc.UserError as error:
        raise ValueError(_fixed_dimension(str(error), name, guards, examples, highest)) from error
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        text = _one_line(str(error).splitlines()[0])
        raise ValueError(
            f"{_place(name, _failing(error, names))} decides by values of its inputs, which a graph cannot: {text}"
        ) from error
    except Exception as error:  # code of models raises exceptions of every type
        if _is_ours(error):
            raise
        text = _one_line(str(error)) or type(error).__name__
        raise ValueError(f"{_place(name, _failing(error, names))} does not export: {text}") from error
    finally:
        for handle in handles:
            handle.remove()


class _Guards:
    """The guards of a trace, each with the name of the module that was running."""

    def __init__(self, names: Mapping[nn.Module, str], *, is_served: bool) -> None:
        self.names, self.is_served = names, is_served
        self.running: list[str] = []
        self.seen: list[tuple[str, Any]] = []

    def enter(self, module: nn.Module, *_: Any) -> None:
        # A branch (`torch.cond`) is traced by Dynamo, which would trace this too.
        if torch.compiler.is_dynamo_compiling():
            return
        self._note()
        self.running.append(self.names.get(module, ""))

    def leave(self, *_: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        self._note()
        self.running.pop()

    def _note(self) -> None:
        mode = torch._guards.detect_fake_mode()
        if mode is not None and mode.shape_env is not None:
            module = self.running[-1] if self.running else ""
            self.seen += [(module, guard.expr) for guard in mode.shape_env.guards[len(self.seen) :]]


def _fixed_dimension(
    text: str,
    name: str,
    guards: _Guards,
    examples: Mapping[str, tuple[torch.Tensor, tuple[str | int, ...]]],
    highest: Mapping[str, int],
) -> str:
    """Returns the line on a dimension that the model fixes, or keeps within limits."""
    violated = re.search(r"Constraints violated \((\w+)", text)
    if limit := re.search(r"(\w+) = Dim\('\w+', max=(\d+)\)", text):
        dim, most = limit.groups()
        return f"{name} takes {most} at most of {dim}: pass {option('shapes', f'{dim}=1:{most}:{most}')}"
    if violated is None:
        return f"{name} fixes a dimension that is to be dynamic: {_one_line(text)}"
    dim = violated[1]
    size = next((x.shape[dims.index(dim)] for x, dims in examples.values() if dim in dims), None)
    module, allowed = "", set[int]()
    if size is not None:
        module, allowed = _allowed(guards, size, highest.get(dim, _UNLIMITED))
    place = _place(name, module)
    low, high = min(allowed, default=0), max(allowed, default=0)
    if len(allowed) > 1 and len(allowed) == high - low + 1 and size is not None:
        low = 1 if low == 2 else low  # torch.export tries no size below 2
        return (
            f"{place} takes a {dim} of {low} to {high}: pass "
            f"{option('shapes', f'{dim}={low}:{min(size, high)}:{high}')}"
        )
    line = f"{place} computes with one size of {dim}, and a graph would be right for that alone"
    if not examples:
        return f"{line}; serve its checkpoint (vLLM), or pass {option('capacity', 0)} with {option('input')}"
    # Of a transformers model a server runs the checkpoint.
    way_out = ", or serve its checkpoint (vLLM)" if guards.is_served else ""
    fixed = " ".join(
        option("input", f"{key}:{_DTYPES.get(x.dtype, 'fp32')}:{','.join(str(size if d == dim else d) for d in dims)}")
        for key, (x, dims) in examples.items()
    )
    return f"{line}; name its inputs with a fixed {dim}, as in {fixed}{way_out}"


_DTYPES = {torch.int64: "int64", torch.float16: "fp16", torch.bfloat16: "bf16"}


def _allowed(guards: _Guards, size: int, highest: int) -> tuple[str, set[int]]:
    """Returns the first module that does not take every size from 2 on, and the sizes that all modules take.

    The sizes are those that the guards `s != size` leave; any other guard that fails for a size leaves none.
    """
    import sympy

    first, allowed, is_range = "", set(range(2, highest + 1)), True
    for module, guard in guards.seen:
        symbols = list(guard.free_symbols)
        # A guard over another dimension may not hold at this one's size.
        if len(symbols) != 1 or guard.subs(symbols[0], size) != sympy.true:
            continue
        failing = {value for value in allowed if guard.subs(symbols[0], value) != sympy.true}
        if failing:
            first, allowed = first or module, allowed - failing
            is_range = is_range and isinstance(guard, sympy.Ne)
    return first, allowed if is_range else set()


def _failing(error: BaseException, names: Mapping[nn.Module, str]) -> str:
    """Returns the innermost module that was running when an exception was raised."""
    module, trace = "", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        module = names.get(running, module) if isinstance(running, nn.Module) else module
        trace = trace.tb_next
    return module


def _is_ours(error: BaseException) -> bool:
    """Returns whether code of this package raised an exception, which then is a line for the user."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("quant.")


def _place(name: str, module: str) -> str:
    return f"{name}: {module}" if module else name


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


MODEL_PREFIX = "model."
"""Of the names of parameters in graphs that hold a transformers model as their attribute `model`."""


def trace(
    module: nn.Module,
    arguments: tuple[Any, ...] | dict[str, torch.Tensor],
    inputs: Mapping[str, GraphInput],
    ranges: Mapping[str, tuple[int, int]],
    split: int | None = None,
) -> torch.export.ExportedProgram:
    """Returns the module as a graph over named dimensions.

    Args:
        module: the module to be traced.
        arguments: examples of its positional arguments, or of its keyword arguments by name.
        inputs: the inputs of the graph, for the names of dimensions.
        ranges: smallest and largest size of the dimensions that are limited, as `dimension_ranges` gives them.
        split: how many inputs the module takes as a dict; the others, its KV cache, are a list.

    Raises ValueError for a module that does not export, and for a graph that no file can hold.
    """
    names = {dim for x in inputs.values() for dim in x.dims if isinstance(dim, str)}
    # torch.export takes sizes of 0 and 1 for constants, so examples have at least two of everything.
    sizes = {
        dim: size
        for x in inputs.values()
        for dim, size in zip(x.dims, x.example.shape, strict=True)
        if isinstance(dim, str)
    }
    # torch.export finds by itself that a dimension such as "past + sequence" is a sum of others.
    dims = {
        name: _dimension(name, sizes[name], *ranges.get(name, (0, None)))
        if name.isidentifier()
        else torch.export.Dim.AUTO
        for name in sorted(names)
    }
    axes = {
        name: {axis: dims[dim] for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in inputs.items()
    }
    dynamic: Any = axes if isinstance(arguments, dict) else tuple(axes.values())
    if split is not None:
        dynamic = (dict(list(axes.items())[:split]), list(axes.values())[split:])[: len(arguments)]
    restore_layout(module)
    # A KV cache has the sizes that the graph needs; all other inputs can be named by the user.
    is_choice = split is None or split == len(inputs)
    examples = {name: (x.example, x.dims) for name, x in inputs.items()} if is_choice else {}
    model, prefix = (module, "") if split is None else (module.get_submodule(MODEL_PREFIX.rstrip(".")), MODEL_PREFIX)
    positional, keywords = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    with explained(model, examples, {dim: high for dim, (_, high) in ranges.items()}), torch.no_grad():
        exported = torch.export.export(module, positional, keywords, dynamic_shapes=dynamic, strict=False)
    _drop_unused(exported.graph_module)
    limits.check_graph(exported, model, prefix)
    return exported


def _dimension(name: str, example: int, low: int, high: int | None) -> Any:
    """Returns a named dimension; `low` and `high` are limits, which its example widens."""
    # torch.export gives no other program to sizes of 0 and 1, and refuses a limit of 1.
    return torch.export.Dim(
        name, min=min(low, example) if low > 2 else None, max=None if high is None else max(high, example)
    )


def _drop_unused(graph: torch.fx.GraphModule) -> None:
    """Removes nodes whose values nothing uses, such as the weight that T5 dequantizes to read its dtype."""
    # torch.export asserts the dtype of each tensor that is cast, which would keep its values in use.
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
