"""`trace` turns a module into a graph of torch.export over named dimensions.

A quantized linear is one `quant::` op in the graph, attention another.

An error of torch.export becomes one line that names the model, the module and the way out (`explained`). torch.export
names neither: it tells of a size that the code fixes after the whole trace, as a guard over symbols. So every guard is
noted with the module that was running when it was added:

    s70 == 64     Mamba loops over its tokens: the graph would hold as many steps as the example has tokens
    s70 != 128    OpenAI's GPT cuts a mask of 128 positions, and torch.export takes a cut of nothing for another
    program

A guard of the second kind, which is about the ends of a range, is met by a shorter range; one of the first kind by a
graph of fixed size. The private parts of torch here were tried with torch 2.11 to 2.13.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from quant.base.errors import option, unlogged
from quant.calibration.attention_scales import AttentionScales
from quant.export.onnx import limits
from quant.export.onnx.decoder_graph import Attention, Graph, GraphInput, attending, check_attends, operand_scales
from quant.export.onnx.moving_rope import stateless_rope
from quant.formats.format import FORMATS
from quant.formats.tensor import fake_quantize
from quant.kernels.linear.quantized_module import restore_layout

Bodies = Mapping[str, Callable[..., Tensor]]
"""PyTorch functions by the names of the ops that they stand for."""
Examples = Mapping[str, tuple[Tensor, tuple[str | int, ...]]]
_FAKE_TENSORS = "torch._subclasses.fake_tensor"
_LONGEST = 400  # characters of a text of torch's
_UNLIMITED = 512  # sizes up to here are tried where a dimension has no limit


@contextmanager
def explained(model: nn.Module, examples: Examples, highest: Mapping[str, int]) -> Iterator[None]:
    """Raises ValueError in the place of an error of the trace of `model` that runs while this is open.

    `examples` are the example and dimensions of each input of the graph, and empty if they are no choice of the user's;
    `highest` is the largest size of each dimension that is limited.
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
            f"{_failing(name, error, names)} decides by values of its inputs, which a graph cannot: {text}"
        ) from error
    except Exception as error:  # code of models raises exceptions of every type
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        if frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).startswith("quant."):
            raise  # code of this package, whose message is for the user
        text = _one_line(str(error)) or type(error).__name__
        raise ValueError(f"{_failing(name, error, names)} does not export: {text}") from error
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


def _fixed_dimension(text: str, name: str, guards: _Guards, examples: Examples, highest: Mapping[str, int]) -> str:
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
    place = f"{name}: {module}" if module else name
    low, high = min(allowed, default=0), max(allowed, default=0)
    if len(allowed) > 1 and len(allowed) == high - low + 1 and size is not None:
        low = 1 if low == 2 else low  # torch.export tries no size below 2
        return (
            f"{place} takes a {dim} of {low} to {high}: pass "
            f"{option('shapes', f'{dim}={low}:{min(size, high)}:{high}')}"
        )
    line = f"{place} computes with one size of {dim}, and a graph would be right for that alone"
    if not examples:
        fixed = f"{option('capacity', 0)} and {option('input', 'input_ids:int64:1,16')}"
        return f"{line}; serve its checkpoint (vLLM), or fix the sizes of its input, as {fixed} does"
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


def _failing(name: str, error: BaseException, names: Mapping[nn.Module, str]) -> str:
    """Returns the name of a model, and of its innermost module that was running when an exception was raised."""
    module, trace = "", error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals.get("self")
        module = names.get(running, module) if isinstance(running, nn.Module) else module
        trace = trace.tb_next
    return f"{name}: {module}" if module else name


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


MODEL_PREFIX = "model."
"""Of the names of parameters in graphs that hold a transformers model as their attribute `model`."""


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by name, those of names such as `owner.key` in a dict by the owner's name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        owner, _, key = name.partition(".")
        if key:
            result.setdefault(owner, {})[key] = value
        else:
            result[name] = value
    return result


def trace(
    module: nn.Module,
    arguments: tuple[Any, ...] | dict[str, Any],
    inputs: Mapping[str, GraphInput],
    ranges: Mapping[str, tuple[int, int]],
    split: int | None = None,
) -> torch.export.ExportedProgram:
    """Returns the module as a graph over named dimensions; ValueError for a graph that no file can hold.

    `arguments` are examples of its positional arguments, or of its keyword arguments by name; with `split` so many
    inputs are a dict, and the others, its KV cache, a list. `ranges` limit dimensions (`dimension_ranges`).
    """
    # torch.export takes sizes of 0 and 1 for constants, so examples have at least two of everything. It gives no other
    # program to these sizes, and refuses a limit of 1.
    sizes = {dim: size for x in inputs.values() for dim, size in zip(x.dims, x.example.shape, strict=True)}
    dims: dict[str, Any] = {}
    for name in sorted(dim for dim in sizes if isinstance(dim, str)):
        low, high = ranges.get(name, (0, None))
        smallest = min(low, sizes[name]) if low > 2 else None
        largest = None if high is None else max(high, sizes[name])
        # torch.export finds by itself that a dimension such as "past + sequence" is a sum of others.
        is_name = name.isidentifier()
        dims[name] = torch.export.Dim(name, min=smallest, max=largest) if is_name else torch.export.Dim.AUTO
    axes = {
        name: {axis: dims[dim] for axis, dim in enumerate(x.dims) if isinstance(dim, str)} for name, x in inputs.items()
    }
    dynamic: Any = nested(axes) if isinstance(arguments, dict) else tuple(axes.values())
    if split is not None:
        dynamic = (dict(list(axes.items())[:split]), list(axes.values())[split:])[: len(arguments)]
    restore_layout(module)
    # A KV cache has the sizes that the graph needs; all other inputs can be named by the user.
    is_choice = split is None or split == len(inputs)
    examples = {name: (x.example, x.dims) for name, x in inputs.items()} if is_choice else {}
    model, prefix = (module, "") if split is None else (module.get_submodule(MODEL_PREFIX.rstrip(".")), MODEL_PREFIX)
    positional, keywords = ((), arguments) if isinstance(arguments, dict) else (arguments, {})
    highest = {dim: high for dim, (_, high) in ranges.items()}
    # It logs the traceback of what becomes one line here.
    with unlogged(_FAKE_TENSORS), stateless_rope(model), torch.no_grad():
        try:
            with explained(model, examples, highest):
                exported = torch.export.export(module, positional, keywords, dynamic_shapes=dynamic, strict=False)
        except ValueError:
            divided = _divided(module, inputs, isinstance(arguments, dict), ranges) if split is None else None
            if divided is None:
                raise
            exported = divided
    # torch.export asserts the dtype of each tensor that is cast, which would keep in use a value that nothing else
    # uses, such as the weight that T5 dequantizes to read its dtype.
    graph = exported.graph_module.graph
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)
    # Falcon has one key head for all query heads and leaves it to broadcasting, which ONNX has under another name.
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default):
        (_, heads, *_), (_, kv_heads, *_) = (node.args[index].meta["val"].shape for index in (0, 1))
        if kv_heads == 1 < heads:
            node.kwargs = {**node.kwargs, "enable_gqa": True}
    # PyTorch joins tensors of two dtypes in the wider one, and ONNX refuses them; a UNet joins its text with its sizes.
    cats = (torch.ops.aten.cat.default, torch.ops.aten.concat.default)
    for node in (each for cat in cats for each in graph.find_nodes(op="call_function", target=cat)):
        dtype, parts = node.meta["val"].dtype, list(node.args[0])
        for index, part in enumerate(parts):
            if part.meta["val"].dtype is not dtype:
                with graph.inserting_before(node):
                    parts[index] = graph.call_function(torch.ops.aten._to_copy.default, (part,), {"dtype": dtype})
                parts[index].meta = {**node.meta, "val": part.meta["val"].to(dtype)}
        node.args = (parts, *node.args[1:])
    graph.eliminate_dead_code()
    limits.check_graph(exported, model, prefix)
    return exported


def _divided(
    module: nn.Module, inputs: Mapping[str, GraphInput], by_name: bool, ranges: Mapping[str, tuple[int, int]]
) -> torch.export.ExportedProgram | None:
    """Returns a graph that need not take every size, such as odd ones; None where it does not reach over a range.

    The patches of an image divide its sides, and torch.export refuses a named dimension that is to be even.
    """
    if not all(isinstance(dim, int) or dim in ranges for x in inputs.values() for dim in x.dims):
        return None
    axes = {
        name: {axis: torch.export.Dim.AUTO for axis, dim in enumerate(x.dims) if isinstance(dim, str)}
        for name, x in inputs.items()
    }
    dynamic: Any = nested(axes) if by_name else tuple(axes.values())
    exported = None
    for at in (1, 0):  # the largest sizes, and the smallest for a model that takes no such large ones
        # Different ones where there are, because torch.export takes dimensions of equal size for one.
        sizes: dict[str, int] = {}
        for dim, limits_of_dim in ranges.items():
            other = limits_of_dim[1 - at]
            sizes[dim] = other if limits_of_dim[at] in sizes.values() else limits_of_dim[at]
        shapes = {name: [d if isinstance(d, int) else sizes[d] for d in x.dims] for name, x in inputs.items()}
        examples = {name: x.example.new_zeros(shapes[name]) for name, x in inputs.items()}
        positional, keywords = ((), nested(examples)) if by_name else (tuple(examples.values()), {})
        with suppress(Exception):  # code of models raises exceptions of every type; the trace before has explained it
            exported = torch.export.export(module, positional, keywords, dynamic_shapes=dynamic, strict=False)
            break
    if exported is None:
        return None
    own = exported.graph_signature.user_inputs
    nodes = [node for node in exported.graph.find_nodes(op="placeholder") if node.name in own]
    for node, x in zip(nodes, inputs.values(), strict=True):
        for name, size in zip(x.dims, node.meta["val"].shape, strict=True):
            if not isinstance(name, str):
                continue
            limit = None if isinstance(size, int) else exported.range_constraints.get(size.node.expr)
            if limit is None:
                return None
            low, high = ranges[name]
            if limit.lower > max(low, 2) or limit.upper < high:
                low, high = max(low, int(limit.lower)), int(min(high, limit.upper))
                raise ValueError(
                    f"{type(module).__name__} takes a {name} of {low} to {high}: pass "
                    f"{option('shapes', f'{name}={low}:{high}:{high}')}"
                )
    return exported


_MOST_ROWS = 65_535
TRACED = "traced.model."
"""Where a transformers model that `trace_for_torch` has traced has its modules."""
Dims = Mapping[str, Mapping[int, str]]


def trace_for_torch(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    dims: Dims | None = None,
    ranges: Mapping[str, tuple[int, int]] | None = None,
    attention_scales: Mapping[str, AttentionScales] | None = None,
) -> torch.export.ExportedProgram:
    """Returns a model as a graph of one pass for a compiler of PyTorch, with an op for each layer and attention.

    Inputs keep their names, and outputs their nests. Arguments are as for `export_aoti`. Raises ValueError for a model
    that does not export with these dimensions.
    """
    dims, ranges = dims or {}, ranges or {}

    def within(name: str, x: Tensor) -> Tensor:
        axes = (
            (size, *ranges.get(dims.get(name, {}).get(axis, ""), (size, size))) for axis, size in enumerate(x.shape)
        )
        shape = [min(max(size, low), high) for size, low, high in axes]
        return x if list(x.shape) == shape else x.new_ones(shape)

    inputs = {name: within(name, x) for name, x in inputs.items()}
    names = {name for axes in dims.values() for name in axes.values()}
    # ranges give min and max of a dimension; without a range torch.export finds limits itself. It refuses those of
    # cuDNN's norms, which take batches of up to 65,535.
    batches = {axes[0] for axes in dims.values() if 0 in axes}
    limits = {name: {"max": _MOST_ROWS} if name in batches else {} for name in names}
    limits |= {name: dict(zip(("min", "max"), ranges[name], strict=True)) for name in names & ranges.keys()}
    sizes = {name: torch.export.Dim(name, **limits[name]) for name in names}
    dynamic = {name: {axis: sizes[dim] for axis, dim in dims.get(name, {}).items()} for name in inputs}
    restore_layout(model)
    examples = {
        name: (x, tuple(dims.get(name, {}).get(axis, size) for axis, size in enumerate(x.shape)))
        for name, x in inputs.items()
    }
    highest = {name: high for name, (_, high) in ranges.items()}
    scales = attention_scales or {}
    with unlogged(_FAKE_TENSORS), torch.no_grad(), explained(model, examples, highest), stateless_rope(model):
        if hasattr(model, "main_input_name"):
            check_attends(model, inputs)
            modules = {module: name for name, module in model.named_modules()}
            window = ranges["sequence"][1] if "sequence" in ranges else None
            function = Attention(modules, kind="plugin", scales=operand_scales(scales), window=window)
            with attending(model, function, masked="attention_mask" in inputs):
                graph: nn.Module = _Named(Graph(model, function), inputs)
                return torch.export.export(graph, (), dict(inputs), dynamic_shapes=dynamic, strict=False)
        if scales:
            raise ValueError(f"{type(model).__name__} is no transformers model; its own code calls fp8_attention")
        return torch.export.export(model, (), dict(inputs), dynamic_shapes=dynamic, strict=False)


class _Named(nn.Module):
    """A transformers graph whose inputs have their names: `forward(input_ids, …)`."""

    def __init__(self, graph: Graph, names: Iterable[str]) -> None:
        super().__init__()
        self.traced = graph
        parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        signature = inspect.Signature(parameters)

        def forward(*args: Tensor, **kwargs: Tensor) -> Any:
            outputs = graph(dict(signature.bind(*args, **kwargs).arguments))
            return outputs[0] if len(outputs) == 1 else outputs

        # torch.export reads the names of the inputs from the signature.
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward


def decomposed(program: torch.export.ExportedProgram, bodies: Bodies) -> torch.export.ExportedProgram:
    """Returns a graph in PyTorch's own ops: each op named in `bodies` becomes the ops of its body."""
    with replaced_ops(bodies):
        result: torch.export.ExportedProgram = program.run_decompositions({})
    return result


@contextmanager
def replaced_ops(bodies: Bodies) -> Iterator[None]:
    """Makes tracing replace each op of these names by the ops of its body while open.

    A rule for `FunctionalTensorMode` runs before the op is recorded, and Inductor compiles the ops of the body.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def rule(body: Callable[..., Tensor]) -> Callable[..., Any]:
        def inside(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            with mode:
                return body(*args, **(kwargs or {}))

        return inside

    # The tables that `formats` caches would become part of the graph if they were filled in a trace.
    for format in FORMATS.values():
        fake_quantize(torch.ones(1, 128), format)
    with torch.library._scoped_library("quant", "FRAGMENT") as library:
        for name, body in bodies.items():
            torch.library.register_torch_dispatch(name, FunctionalTensorMode, rule(body), lib=library)
        yield
