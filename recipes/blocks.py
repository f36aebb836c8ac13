"""The repeated blocks of a model, and the arguments that each one is called with.

Layer-by-layer calibration needs to run one block at a time. Blocks are found by structure: the children of a
`ModuleList` or `Sequential` that are all of one class and hold linear layers (decoder layers, encoder layers), and the
outermost such list wins. The arguments of a block are captured while the model runs: positional embeddings, masks and
whatever else a model passes along are kept as they came, and only the hidden state is replaced.

Consecutive blocks form a chain where the output of one *is* the input of the next, the same tensor object. A chain
can be walked without the model around it; where it breaks (between encoder and decoder, around a downsampling),
the model is run again up to the next block. A model with no such blocks is one block.

Blocks with joint attention hand two streams on, image and text of one width, as in Flux and Stable Diffusion 3. They
are found by the same identity, and stand for one hidden state: their tokens one after the other.

A module that takes the place of a model's own, for good or while it runs, takes over its hooks: steering, recording,
devices, adapters. The dictionaries of hooks are shared, not copied: a handle that the caller holds removes its hook
from the module that has replaced the original by then, and the hooks keep their order. A module that stays in the model
also takes over everything else that users or libraries have put on the original: attributes (`_is_hf_initialized`, a
mark for an optimizer's groups), buffers, parameters, submodules.
"""

import copy
import functools
import inspect
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from quant.base.processor import value_of
from quant.recipes.plain_layers import is_conv1d


class Stop(Exception):  # noqa: N818 -- no error
    """Ends a forward pass whose further results are not needed."""


@dataclass(frozen=True)
class Stream:
    """A tensor that a block hands on to the next one, which takes it as an argument."""

    slot: int | str  # the index or keyword among the arguments
    result: int  # the index among the results
    tokens: int = 0  # its second dimension


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str  # the index or keyword of the hidden state among the arguments
    streams: tuple[Stream, ...] = ()  # of a block that hands on several tensors, or another one than its first

    @property
    def hidden(self) -> Tensor:
        """The hidden state; the tokens `[batch, tokens, features]` of all streams, one after the other."""
        if self.streams:
            return torch.cat(
                [self.args[s.slot] if isinstance(s.slot, int) else self.kwargs[s.slot] for s in self.streams], 1
            )
        return self.args[self.slot] if isinstance(self.slot, int) else self.kwargs[self.slot]

    def with_hidden(self, hidden: Tensor) -> Self:
        """Returns the same call on another hidden state; without tokens, where it is empty."""
        if not self.streams:
            return self.with_arguments({self.slot: hidden})
        sizes = [stream.tokens for stream in self.streams]
        parts = hidden.split(sizes, 1) if hidden.numel() else [hidden] * len(sizes)
        return self.with_arguments({stream.slot: part for stream, part in zip(self.streams, parts, strict=True)})

    def output(self, result: Any) -> Tensor:
        """Returns the hidden state in the result of this call."""
        if not self.streams:
            return output_of(result)
        parts = _tensors_of(result)
        # The last block of Stable Diffusion 3 gives no text, which nobody reads behind it.
        return torch.cat([parts[s.result] for s in self.streams if isinstance(parts[s.result], Tensor)], 1)

    def with_arguments(self, values: Mapping[int | str, Any]) -> Self:
        """Returns the same call with other arguments at some positions or under some keywords."""
        args = tuple(values.get(slot, value) for slot, value in enumerate(self.args))
        return replace(self, args=args, kwargs={name: values.get(name, value) for name, value in self.kwargs.items()})


@contextmanager
def removing(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes hooks when the block ends."""
    hooks = list(hooks)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def all_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the arguments of a call, keyword arguments last: a linear layer may be called as `layer(input=x)`."""
    return (*args, *kwargs.values())


def output_of(result: Any) -> Tensor:
    """Returns the hidden state of a block's result: the tensor, or the first of a tuple or of a model output."""
    if isinstance(result, Mapping):
        result = tuple(result.values())
    return result[0] if isinstance(result, tuple | list) else result


def _tensors_of(result: Any) -> list[Any]:
    if isinstance(result, Mapping):
        result = tuple(result.values())
    return list(result) if isinstance(result, tuple | list) else [result]


def _streams(result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Stream, ...]:
    """Returns which results of a block the call of the next one takes, among tensors of one rank, width and batch.

    None where the hidden state of the call is not among them: a refiner of the prompt gives no image.
    """
    results = _tensors_of(result)
    like = next((each for each in results if isinstance(each, Tensor)), None)
    if like is None or like.dim() < 2:
        return ()
    streams = tuple(
        Stream(slot, index, value.shape[1])
        for slot, value in _by_slot(args, kwargs).items()
        for index, each in enumerate(results)
        if each is value
        and isinstance(value, Tensor)
        and value.dim() == like.dim()
        # Not the bias of positions of T5, nor keys and values.
        and (value.shape[0], value.shape[2:], value.dtype) == (like.shape[0], like.shape[2:], like.dtype)
    )
    return streams if _slot_of_hidden(args, kwargs) in [stream.slot for stream in streams] else ()


def _slot_of_hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Returns where the hidden state is among a block's arguments: the first floating-point tensor, positional first.

    Every known block takes it there.
    """
    values = _by_slot(args, kwargs).items()
    return next((slot for slot, v in values if isinstance(v, Tensor) and v.is_floating_point()), None)


def _by_slot(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    by_slot: dict[int | str, Any] = dict(enumerate(args))
    by_slot.update(kwargs)
    return by_slot


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """Returns `cache` as a keyword argument, whose name changed in transformers 5.24, of a model or its `generate`."""
    return {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}


def position_argument(model: Any, ids: Tensor, begin: int) -> dict[str, Any]:
    """Returns the positions of ids `[batch, tokens]` from `begin` on as a keyword argument, if a model takes them.

    Bamba begins at 0 in every step over its cache, unless it is told.
    """
    positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None]
    return {"position_ids": positions} if "position_ids" in inspect.signature(model.forward).parameters else {}


def is_cache(value: Any) -> bool:
    """Returns whether an argument of a model is a key-value cache of transformers."""
    return hasattr(value, "get_seq_length")


def cache_of(output: Any) -> Any:
    """Returns the key-value cache that a model of transformers returned; None where it keeps none."""
    return output.cache if hasattr(output, "cache") else getattr(output, "past_key_values", None)


def is_denoiser(model: nn.Module) -> bool:
    """Returns whether a model is of diffusers, whose configs are its own: a transformer or UNet that denoises."""
    return hasattr(model, "register_to_config")


def stored_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype of the model's 16-bit or 32-bit weights, to which a checkpoint's scales are rounded."""
    # Wan's first parameter is a table that diffusers keeps in float32.
    wide = (getattr(model, "_keep_in_fp32_modules", None) or ()) if is_denoiser(model) else ()
    named = ((n, p) for n, p in model.named_parameters() if p.is_floating_point())
    return next((p.dtype for n, p in named if not any(part in n for part in wide)), torch.float32)


def in_float64(block: nn.Module) -> nn.Module:
    """Returns a copy of a block in float64, to trace on a few tokens how its modules depend on each other."""
    block = copy.deepcopy(block).double()
    for module in block.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # grouped matmuls take no float64
    return block


def block_names(model: nn.Module) -> list[str]:
    """Returns the names of the repeated blocks, outermost lists only, in model order."""
    names: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(name.startswith(f"{f}.") for f in names):
            continue
        children = list(module.named_children())
        # Heads of several classes, or a list of norms, are not repeated blocks.
        alike = len({type(child) for _, child in children}) == 1
        holds_linear = (not _is_linear(child) and any(map(_is_linear, child.modules())) for _, child in children)
        if alike and all(holds_linear):
            names.extend(f"{name}.{child_name}".lstrip(".") for child_name, _ in children)
    return names


def _is_linear(module: nn.Module) -> bool:
    # A quantized layer is no `nn.Linear`: without it, a model whose layers are all quantized would have no blocks.
    return isinstance(module, nn.Linear) or (
        hasattr(type(module), "quantized_weight") and hasattr(module, "in_features")
    )


@contextmanager
def without_experts(model: nn.Module, blocks: Iterable[str]) -> Iterator[None]:
    """Lets modules that read experts from their files (60 GB for Qwen3-30B-A3B) return zeros while open."""

    def zeros(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)

    with ExitStack() as stack:
        for module in (module for name in blocks for module in model.get_submodule(name).modules()):
            if any(reads_experts(parameter) for parameter in module.parameters(recurse=False)):
                stack.enter_context(forwarding(module, zeros))
        yield


def reads_experts(parameter: nn.Parameter) -> bool:
    """Returns whether a module reads the experts of a parameter from its files, one at a time."""
    return bool(getattr(getattr(parameter, "stored", None), "runs_alone", False))


def _run_watched(
    model: nn.Module,
    names: Sequence[str],
    run: Callable[[], Any],
    called: Callable[[str, tuple[Any, ...], dict[str, Any], tuple[Stream, ...]], None],
) -> None:
    """Runs the model, and says of each call of a block what it takes from the block that ran before."""
    # The result of the block before. It is kept alive, or a new tensor could take its address and pass for it.
    last: Any = None

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called(name, args, kwargs, _streams(last, args, kwargs))

    def after(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        nonlocal last
        last = result

    blocks = [(name, model.get_submodule(name)) for name in names]
    handles = [block.register_forward_pre_hook(partial(before, name), with_kwargs=True) for name, block in blocks]
    handles += [block.register_forward_hook(after) for _, block in blocks]
    with removing(handles), torch.no_grad():
        run()


def find_chains(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> list[list[str]]:
    """Returns the blocks `names` in order of execution, grouped into chains; `run` calls the model on a small input."""
    order: list[str] = []
    linked: set[str] = set()

    def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], streams: tuple[Stream, ...]) -> None:
        order.append(name)
        if streams:
            linked.add(name)

    _run_watched(model, names, run, called)
    # ALBERT calls one block for every layer: then a name is no call, and the whole model must be taken as one block.
    if len(set(order)) != len(order):
        return []
    chains: list[list[str]] = []
    for name in order:
        if name not in linked or not chains:
            chains.append([])
        chains[-1].append(name)
    return chains


def capture(model: nn.Module, names: Sequence[str], run: Callable[[], Any]) -> dict[str, Call]:
    """Records the calls of the blocks `names` in one pass, which ends when the last of them is reached."""
    calls: dict[str, Call] = {}
    streams: tuple[Stream, ...] = ()  # between the last two blocks that ran

    def called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[Stream, ...]) -> None:
        nonlocal streams
        calls[name] = _as_called(args, kwargs)
        streams = found or streams
        # The last block need not run: only its arguments are needed.
        if len(calls) == len(names):
            raise Stop

    with suppress(Stop):
        _run_watched(model, names, run, called)
    # One tensor that is the first result is the rule, and needs no list.
    if len(streams) > 1 or (streams and streams[0].result):
        return {name: _joint(call, streams) for name, call in calls.items()}
    return calls


def _joint(call: Call, streams: Sequence[Stream]) -> Call:
    """Returns a call with the streams that the blocks around it have, where it takes all of them."""
    arguments = _by_slot(call.args, call.kwargs)
    if not all(isinstance(arguments.get(stream.slot), Tensor) for stream in streams):
        return call
    return replace(call, streams=tuple(replace(s, tokens=arguments[s.slot].shape[1]) for s in streams))


def _as_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Returns the call as it is before the block runs.

    A key-value cache is left out, because each pass would find the keys of earlier passes in it. Mappings that blocks
    add to are copied.
    """

    def at_the_time(value: Any) -> Any:
        if isinstance(value, UserDict) or type(value) is dict:
            return copy.copy(value)
        return None if is_cache(value) else value

    if (slot := _slot_of_hidden(args, kwargs)) is None:
        raise ValueError("a block was called without a floating-point tensor")
    return Call(tuple(map(at_the_time, args)), {k: at_the_time(v) for k, v in kwargs.items()}, slot)


def calls_of_chain(model: nn.Module, chain: Sequence[str], runs: Sequence[Callable[[], Any]]) -> list[dict[str, Call]]:
    """Records the calls of a chain's blocks on each batch; only the first block's hidden states are kept.

    The first batch runs through the whole chain. The others stop at its first block, and where that is called with
    equal arguments (the same positions, the same mask), the later blocks are taken to be too. Where it is not, but they
    got its own arguments in the first pass (the embedding of the time), they are taken to do so again; any other batch
    runs through.
    """
    calls: list[dict[str, Call]] = []
    shared: dict[str, dict[int | str, int | str]] | None = None
    for run in runs:
        # Rows of one length share positions and masks: one short pass then stands for a whole one.
        if calls:
            lead = calls[0][chain[0]]
            lead_call = _joint(capture(model, chain[:1], run)[chain[0]], lead.streams)
            if equal_but_hidden(lead_call, lead):
                calls.append({**calls[0], chain[0]: lead.with_hidden(lead_call.hidden)})
                continue
            if shared is not None and (lead_call.hidden.shape, lead_call.streams) == (lead.hidden.shape, lead.streams):
                own = _by_slot(lead_call.args, lead_call.kwargs)
                slots = {name: {slot: own[of_lead] for slot, of_lead in shared[name].items()} for name in shared}
                later = {name: calls[0][name].with_arguments(values) for name, values in slots.items()}
                calls.append({chain[0]: lead_call, **later})
                continue
        whole = capture(model, chain, run)
        shared = shared if calls else _shared_arguments(whole)
        calls.append({**without_hidden(whole), chain[0]: whole[chain[0]]})
    return calls


def _shared_arguments(calls: Mapping[str, Call]) -> dict[str, dict[int | str, int | str]] | None:
    """Returns where the first block has each argument of a later one, by slots; None where it lacks one."""
    lead, *_ = (_by_slot(call.args, call.kwargs) for call in calls.values())
    shared: dict[str, dict[int | str, int | str]] = {}
    for name, call in list(calls.items())[1:]:
        hidden, shared[name] = {call.slot, *(stream.slot for stream in call.streams)}, {}
        for slot, value in _by_slot(call.args, call.kwargs).items():
            if slot in hidden:
                continue
            plain = value is None or isinstance(value, bool | int | float | str) or (type(value) is dict and not value)
            same = [slot] if plain else [each for each in lead if lead[each] is value]
            if not same or same[0] not in lead or (plain and lead[slot] != value):
                return None
            shared[name][slot] = same[0]
    return shared


def without_hidden(calls: Mapping[str, Call]) -> dict[str, Call]:
    """Returns the calls of blocks without their hidden states."""
    return {name: call.with_hidden(torch.empty(0)) for name, call in calls.items()}


def equal_but_hidden(a: Call, b: Call) -> bool:
    """Returns whether two calls of a block are equal but for the values of their hidden states."""
    if a.hidden.shape != b.hidden.shape:
        return False
    empty = torch.empty(0)
    flat_a, tree_a = torch.utils._pytree.tree_flatten((a.with_hidden(empty).args, a.with_hidden(empty).kwargs))
    flat_b, tree_b = torch.utils._pytree.tree_flatten((b.with_hidden(empty).args, b.with_hidden(empty).kwargs))
    return tree_a == tree_b and all(are_equal(x, y) for x, y in zip(flat_a, flat_b, strict=True))


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two arguments of a call are equal, tensors by device, dtype and values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (a.device == b.device and a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, UserDict) and isinstance(b, UserDict):
        return not a and not b  # filled ones hold tensors of their own batch
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b))


class Substitute(nn.Module):
    """A module in the place of a layer that is measured or solved; it has the attributes of that layer, too.

    Modeling code reads more of a layer than its weight: its width (`self.proj.in_features`), or a mark.
    """

    def read_from(self, replaced: nn.Module) -> None:
        """Reads attributes from `replaced` from here on; PyTorch registers no parameter of a name that can be read."""
        # Past nn.Module.__setattr__: as a submodule the layer would appear in the state of the model.
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if (replaced := vars(self).get("_replaced")) is None:
                raise
            return getattr(replaced, name)


def other_tensors(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """Returns `change(tensor)` for the parameters and buffers of a model, by name, where that is not None.

    A tensor of several modules is changed once, and has a name in each of them. A module that is held in several places
    (two blocks with one MLP) has one name, the first: PyTorch's `functional_call` exchanges a tensor once for each of
    its names, takes the new one for the original the second time, and leaves it in the module (torch 2.11 to 2.15).
    """
    changed: dict[int, Tensor | None] = {}
    named = {}
    for path, module in model.named_modules():  # each module once
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            if (other := changed[id(tensor)]) is not None:
                named[f"{path}.{name}".lstrip(".")] = other
    return named


def run_with(module: nn.Module, tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `module` with `tensors` of `other_tensors` in place of its own."""
    return functional_call(module, dict(tensors), args, kwargs, tie_weights=False)


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_pre_hooks", "_backward_hooks", "_is_full_backward_hook",
)  # fmt: skip
_STATE_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def has_hooks(module: nn.Module) -> bool:
    """Returns whether anything happens to the inputs or outputs of a module around its forward."""
    return bool(module._forward_pre_hooks or module._forward_hooks or "_hf_hook" in vars(module))


def take_hooks(new: Any, old: nn.Module) -> None:
    """Gives `new` the hooks of `old`: torch's, and the one that accelerate wraps around a forward."""
    for name in _HOOKS:
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))
    hook: Any = vars(old).get("_hf_hook")
    wrapper = vars(old).get("forward")
    # Without accelerate the forward is the class's own, and the hooks above are all.
    if hook is None or not isinstance(wrapper, functools.partial):
        return
    # accelerate binds a function of the module, and reads hook and forward from the module's attributes. Its own
    # `add_hook_to_module` would move the weights, which are where they should be.
    new._hf_hook, new._old_forward = hook, new.forward
    new.forward = functools.update_wrapper(functools.partial(wrapper.func, new), new.forward)


_OWN = "_names_of_its_class"  # attribute of a replacement: the names that its constructor gave it
# `stands_for` belongs to a linear layer that represents a `Conv1D` while its weight is solved.
_NEVER = {"forward", "_hf_hook", "_old_forward", "_compiled_call_impl", "stands_for"}


def take_over(new: Any, old: nn.Module | None) -> None:
    """Gives `new`, just made to replace `old`, its hooks and all that was put on it; parameters stay the same objects.

    Names that `new` has of its own are not overwritten, for its class gives them a meaning.
    """
    own = {*vars(new), *new._parameters, *new._buffers, *new._modules, "weight", "bias"}
    setattr(new, _OWN, frozenset({*own, _OWN}))
    if old is None:
        return
    take_hooks(new, old)
    for name in _STATE_HOOKS:  # that run when the state is written or loaded
        if getattr(old, name, None):
            setattr(new, name, getattr(old, name))
    # Hooks before loading hold the module that they were registered on, by a weak reference.
    for hook in new._load_state_dict_pre_hooks.values():
        if getattr(hook, "module", None) is not None:
            hook.module = weakref.ref(new)
    before = vars(old).get(_OWN, ())
    if not before and type(old).__module__.startswith("quant."):
        return  # a stand-in during calibration: all its attributes are its own

    of_torch = {*vars(nn.Module()), *_NEVER}

    def added_names(names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in before and name not in own and not hasattr(type(new), name)]

    for name in added_names(vars(old)):
        if name not in of_torch:
            setattr(new, name, vars(old)[name])
    for name in added_names(old._parameters):
        new.register_parameter(name, old._parameters[name])
    for name in added_names(old._buffers):
        new.register_buffer(name, old._buffers[name], name not in old._non_persistent_buffers_set)
    for name in added_names(old._modules):
        new.add_module(name, old._modules[name])


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Gives objects other attributes, each an object, a name and a value, while open."""
    changes = list(changes)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Makes `module` run `forward` while open, then restores its own, from its class or set on the instance."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            # A generator that an error left open may end after its model is whole again.
            vars(module).pop("forward", None)
        else:
            module.forward = before


@contextmanager
def as_linears(model: nn.Module) -> Iterator[None]:
    """Replaces the `Conv1D` modules of `model` by linear layers while open, then restores the remaining ones.

    GPT-2 stores the weight `[in, out]`. The weight of the linear layer is a view of the same memory, so nothing is
    copied, and a change of one is a change of both.
    """
    for path, module in list(model.named_modules()):
        if is_conv1d(module):
            assert isinstance(module.weight, nn.Parameter)
            weight, trained = value_of(module.weight), module.weight.requires_grad
            module.weight = nn.Parameter(weight, requires_grad=trained)
            # The constructor would fill a matrix with random numbers, which takes seconds for a large layer.
            with torch.device("meta"):
                linear = nn.Linear(*weight.shape)
            linear.weight, linear.bias = nn.Parameter(weight.t(), requires_grad=trained), module.bias
            linear.stands_for = (module,)  # type: ignore[assignment]  # in a tuple, or it would be a submodule
            take_hooks(linear, module)
            model.set_submodule(path, linear.train(module.training))
    try:
        yield
    finally:
        for path, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and hasattr(module, "stands_for"):
                original: Any = module.stands_for[0]  # type: ignore[index]
                # A solver may have replaced the weight by one in new memory, so the view of the start no longer holds.
                original.weight.data, original.bias = module.weight.data.t(), module.bias
                model.set_submodule(path, original)
