"""`Inputs` are calibration inputs of any kind: the arguments of a model, call by call, instead of token rows.

A row of tokens is one positional tensor. A speech model takes sounds and the tokens written so far, CLIP images and
texts, an encoder-decoder two texts. Here each row is one call with arguments of its own:

    pixel_values [8, 3, 224, 224]           one tensor: rows along its first dimension
    {"input_ids": …, "pixel_values": …}     named tensors: the same, each row with a part of each
    a DataLoader, a list, any iterable      its items: a tensor, a tuple of positional or a dict of keyword arguments
    a function of the model                 the calls that it makes

Padded batches are taken apart into their rows, without the padding. Attention hides it, but the layers around it
compute on padding like on any token, and it would count in second moments and scales, although no output depends on it.
The values of each token (positions, types, labels) are cut with it; a decoder without a mask ends where labels do:

    input_ids [2, 5]    attention_mask [2, 5]        input_ids [1, 3]    input_ids [1, 5]
    7 4 9 0 0           1 1 1 0 0                    7 4 9               8 3 5 1 2
    8 3 5 1 2           1 1 1 1 1

Everything that walks over token rows slices them, splits them into batches and calls `model(batch)`. `Inputs` slice
and split alike, and while `taking_inputs` is open the model takes a batch of them for the arguments that it holds.
"""

import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from quant.base.errors import warn
from quant.calibration.evaluating import evaluating
from quant.calibration.session import device_of
from quant.formats.tensor import moved
from quant.recipes.blocks import Call, is_cache, is_denoiser, removing, stored_dtype

# Prefixes of the names of tokens and of their mask: an encoder-decoder has both of each side.
_SIDES, _DECODER_IDS = ("", "decoder_"), "decoder_input_ids"
_TOKENS, _MASK = ("input_ids", "inputs_embeds", "input_values", "input_features"), "attention_mask"


def unpadded(call: Mapping[str, Any], takes: Collection[str]) -> list[dict[str, Any]] | None:
    """Returns a padded call without its padding: one call for each row that shows a token; None where it stays.

    A batch whose tensors do not all have a part for each row (images, of which a text may have several) cannot be taken
    apart. It stays as it is, with a warning.
    """
    masks = {side: mask for side in _SIDES if (mask := _shown_tokens(call, side, takes)) is not None}
    if all(bool(mask.all()) for mask in masks.values()):
        return None
    rows = len(next(iter(masks.values())))
    tensors = [value for value in tree_flatten(dict(call))[0] if isinstance(value, Tensor)]
    if rows > 1 and any(not tensor.dim() or len(tensor) != rows for tensor in tensors):
        warn(
            "calibration data: a batch of padded texts has tensors without a part for each text "
            f"({', '.join(call)}), so its padding counts as tokens; give one text a call"
        )
        return None
    shown_calls = []
    for row in range(rows):
        shown = {side: mask[row] for side, mask in masks.items()}
        if all(bool(tokens.any()) for tokens in shown.values()):
            own = dict(call)
            if rows > 1:
                own = tree_map(lambda v, row=row: v[row : row + 1] if isinstance(v, Tensor) else v, own)
            shown_calls.append(_cut(own, shown, takes))
    return shown_calls


def _shown_tokens(call: Mapping[str, Any], side: str, takes: Collection[str]) -> Tensor | None:
    """Returns which tokens of a call are not padding, bool `[rows, tokens]`; None where nothing says so."""
    tokens, mask, labels = (call.get(name) for name in (f"{side}{_tokens_of(call, side)}", f"{side}{_MASK}", "labels"))
    if side and mask is None and _DECODER_IDS in takes and isinstance(labels, Tensor) and labels.dim() == 2:
        # Collators pad labels by -100, and give the decoder no mask: its causal attention sees no token behind.
        return (labels != -100).flip(1).cumsum(1).flip(1) > 0
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor):
        return None
    if mask.dim() != 2 or mask.shape != tokens.shape[:2]:
        return None
    # A mask of packed texts numbers them from 1: no number is above the number of tokens.
    low, high = (float(value) for value in mask.float().aminmax()) if mask.numel() else (0.0, 0.0)
    if not 0 <= low <= high <= mask.shape[1]:
        raise ValueError(
            f"{side}{_MASK} holds values from {low:g} to {high:g} and not 0 or 1; of pairs (x, y) of a loader pass "
            "only x, as in data=(x for x, y in loader)"
        )
    return mask.bool()


def _tokens_of(call: Mapping[str, Any], side: str) -> str | None:
    """Returns the name, without its side, of the argument that holds the tokens; None where there is none."""
    return next((name for name in _TOKENS if call.get(f"{side}{name}") is not None), None)


def _cut(call: Mapping[str, Any], shown: Mapping[str, Tensor], takes: Collection[str]) -> dict[str, Any]:
    """Returns a call of one row, without the values of tokens that are not in `shown`, bool `[tokens]` of each side."""
    shortened = dict(call)
    for name, value in call.items():
        # The labels of an encoder-decoder are the text of its decoder.
        is_decoder = name.startswith(_SIDES[1]) or (name == "labels" and _DECODER_IDS in takes)
        side = _SIDES[is_decoder]
        if side not in shown or not isinstance(value, Tensor) or value.shape[:2] != (1, len(shown[side])):
            continue
        # Images and sounds beside a text may have as many channels as it has tokens.
        is_tokens = name.removeprefix(side) in (_MASK, _tokens_of(call, side))
        if is_tokens or not value.is_floating_point():
            shortened[name] = value[:, shown[side].to(value.device)]
    return shortened


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a model is called with: positional and keyword arguments, their tensors with a batch dimension."""


class Inputs:
    """Calls of a model, with as much of a tensor's interface as walks over rows use.

    Attributes:
        about: their sources, in a few words; empty where the sources are not known.
        own_text: whether the model wrote texts of them itself, whose likelihood then means nothing.
        labels: the class of each row, int64 `[rows]`, where they are known and the model takes none.
        alone: whether each call runs by itself, as denoisers take them: tables of positions have no batch dimension.
    """

    def __init__(
        self, calls: Sequence[Arguments], *, about: str = "", own_text: bool = False,
        labels: Tensor | None = None, alone: bool = False,
    ) -> None:  # fmt: skip
        self.calls, self.about, self.own_text, self.labels = list(calls), about, own_text, labels
        self.alone = alone

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, rows: slice) -> "Inputs":
        return Inputs(self.calls[rows], alone=self.alone)

    @property
    def shape(self) -> torch.Size:
        """`[rows, tokens]`, as the second dimensions of the tensors have them."""
        sizes = [tensor.shape[1] for call in self.calls for tensor in _tensors(call) if tensor.dim() > 1]
        return torch.Size((len(self.calls), max(sizes, default=1)))

    @property
    def device(self) -> torch.device:
        """Where the tensors of the first call are."""
        return _tensors(self.calls[0])[0].device

    def tensors(self) -> list[Tensor]:
        """Returns all tensors, in the order of the calls."""
        return [tensor for call in self.calls for tensor in _tensors(call)]

    def is_floating_point(self) -> bool:
        """True: these are not rows of token ids."""
        return True

    def numel(self) -> int:
        """Returns the number of values in all tensors."""
        return sum(tensor.numel() for tensor in self.tensors())

    def dim(self) -> int:
        """Returns 4, the dimensions of a tensor of images: each row is a whole input."""
        # Code that distinguishes token ids [rows, seqlen] from other inputs expects two dimensions.
        return 4

    def to(self, device: Any) -> "Inputs":
        """Returns the same calls on another device."""
        return Inputs(moved(self.calls, device), alone=self.alone)

    def split(self, rows: int) -> "list[Inputs]":
        """Returns batches of at most `rows` consecutive calls whose arguments have one shape and can be joined."""
        batches: list[list[Arguments]] = []
        for call in self.calls:
            last = batches[-1] if batches else []
            # Tensors of different shapes cannot be joined without padding, which would count as tokens.
            if last and len(last) < rows and not self.alone and _outline(last[0]) == _outline(call):
                last.append(call)
            else:
                batches.append([call])
        return [Inputs(batch, alone=self.alone) for batch in batches]

    def as_tensor(self, model: nn.Module) -> Tensor | None:
        """Returns the rows as one tensor, where all have one shape and each is the model's only argument. Else None."""
        first = next(iter(inspect.signature(model.forward).parameters), None)
        values = [[*args, *(kwargs[name] for name in kwargs if name == first)] for args, kwargs in self.calls]
        tensors = [value[0] for value in values if len(value) == 1 and isinstance(value[0], Tensor)]
        # Any further argument would be lost in one tensor.
        alone = len(tensors) == len(self.calls) == sum(len(args) + len(kwargs) for args, kwargs in self.calls)
        return torch.cat(tensors) if alone and len({tensor.shape[1:] for tensor in tensors}) == 1 else None

    def named_arguments(self, model: nn.Module) -> dict[str, Any]:
        """Returns the calls joined into one, every argument by its name."""
        return _by_name(self.arguments(), list(inspect.signature(model.forward).parameters))

    def arguments(self) -> Arguments:
        """Returns the calls joined into one: their tensors are concatenated along the first dimension."""
        if len(self.calls) == 1:
            return self.calls[0]
        # Nested arguments, such as a list of image sizes, are joined leaf by leaf; calls of one outline have one tree.
        flat, spec = zip(*(tree_flatten(call) for call in self.calls), strict=True)
        by_place = zip(*flat, strict=True)
        joined = [torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in by_place]
        return tree_unflatten(joined, spec[0])


def inputs_of(data: Any, model: nn.Module) -> Inputs:
    """Returns calibration data other than one tensor as `Inputs`, with floating-point tensors in the model's dtype."""
    if callable(data) and not isinstance(data, Iterable | nn.Module):
        return recorded(model, data)
    if isinstance(data, str | bytes) or not isinstance(data, Iterable):
        raise ValueError(
            f"data is a {type(data).__name__}; give a tensor, named tensors, an iterable of calls of the model, or a "
            "function that calls it (forward_loop)"
        )
    # A mapping is one data set by name; in an iterable, each mapping is one call.
    calls = _without_empty(_rows_of(data) if isinstance(data, Mapping) else [_arguments(item) for item in data])
    if not calls:
        raise ValueError("the calibration data is empty")
    _check_arguments(calls[0], model)
    return cast_for(model, Inputs(_without_padding(calls, model)))


def _check_arguments(call: Arguments, model: nn.Module) -> None:
    """Raises ValueError where the model does not take the arguments, such as labels of a data loader."""
    args, kwargs = call
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        way_out = (
            "name tensors by these arguments"
            if kwargs
            else ("from a loader of inputs and labels take only the inputs: [inputs for inputs, labels in loader]")
        )
        raise ValueError(
            f"calibration data: {type(model).__name__} takes ({', '.join(signature.parameters)}), and the first item "
            f"does not fit ({error}); {way_out}"
        ) from None
    ids = _by_name(call, list(signature.parameters)).get("input_ids")
    if isinstance(ids, Tensor) and ids.dim() == 1:
        raise ValueError(
            f"calibration data holds {len(ids)} token ids without an axis of rows; give [row[None] for row in rows], "
            "or one tensor [rows, seqlen]"
        )


def cast_for(model: nn.Module, inputs: Inputs) -> Inputs:
    """Returns the same calls with floating-point tensors in the dtype of the model.

    A denoiser's calls stay as they are: the timestep 999 would be 1000 in bfloat16.
    """
    if is_denoiser(model):
        return Inputs(inputs.calls, alone=True)
    dtype = stored_dtype(model)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return Inputs([tree_map(cast, call) for call in inputs.calls])


def joined(parts: Sequence[Inputs]) -> Inputs:
    """Returns the calls of all parts, one part after the other."""
    about = "; ".join(part.about for part in parts if part.about)
    own_text = any(part.own_text for part in parts)
    known = [part.labels for part in parts if part.labels is not None]
    labels = torch.cat(known) if len(known) == len(parts) else None
    calls, alone = [call for part in parts for call in part.calls], any(part.alone for part in parts)
    return Inputs(calls, about=about, own_text=own_text, labels=labels, alone=alone)


def recorded(model: nn.Module, forward_loop: Callable[[nn.Module], Any], name: str = "forward_loop") -> Inputs:
    """Records the calls that `forward_loop(model)` makes; it runs once, with the model in evaluation mode."""
    calls: list[Arguments] = []

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(is_cache(value) for value in (*args, *kwargs.values())):
            raise ValueError(
                "forward_loop calls the model with a KV cache, as model.generate does, and a later pass has no such "
                "cache: call the model itself on whole texts, model(input_ids)"
            )
        calls.append((args, kwargs))

    # A pre-hook sees the arguments as the loop gives them, before the model moves or changes any.
    with removing([model.register_forward_pre_hook(record, with_kwargs=True)]), evaluating(model), torch.no_grad():
        forward_loop(model)
    calls = _without_empty(calls)
    if not calls:
        raise ValueError(f"{name} never called the model, or only on empty tensors")
    return Inputs(_without_padding(calls, model), alone=is_denoiser(model))


@contextmanager
def taking_inputs(model: nn.Module) -> Iterator[None]:
    """Makes `model(batch)` with a batch of `Inputs` call the model with the arguments in it, while open."""

    def expand(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        return args[0].arguments() if args and isinstance(args[0], Inputs) else None

    with removing([model.register_forward_pre_hook(expand, with_kwargs=True)]):
        yield


def call_on_first_row(rows: Tensor | Inputs) -> Callable[[nn.Module], Any]:
    """Calls a model on the first of the rows, wherever the model is."""

    def run(model: nn.Module) -> Any:
        batch = rows[:1].to(device_of(model))
        with taking_inputs(model):
            try:
                return model(batch)
            except Exception as error:  # the model's own code, on arguments that it may not be meant for
                args = batch.arguments()[0] if isinstance(batch, Inputs) else (batch,)
                named = zip(inspect.signature(model.forward).parameters, args, strict=False)
                passed = [f"{name} {list(arg.shape)}" for name, arg in named if isinstance(arg, Tensor)]
                if len(passed) < 2:
                    raise
                # Batches of a loader are often pairs of an input and a label, and the label is an argument then.
                raise ValueError(
                    f"{error}; the data calls it with {' and '.join(passed)}: of pairs (x, y) pass only x, as in "
                    "data=(x for x, y in loader)"
                ) from error

    return run


def call_of(batch: Tensor | Inputs) -> Call:
    """Returns the call of a model on a batch of rows, whose first tensor stands for the hidden state."""
    if not isinstance(batch, Inputs):
        return Call((batch,), {}, 0)
    args, kwargs = batch.arguments()
    # Positional arguments are named by their index, keyword arguments by their name.
    slots: list[int | str] = [slot for slot, value in enumerate(args) if isinstance(value, Tensor)]
    slots += [name for name, value in kwargs.items() if isinstance(value, Tensor)]
    return Call(args, dict(kwargs), slots[0])


def _without_empty(calls: Sequence[Arguments]) -> list[Arguments]:
    """Returns the calls that have rows; the last batch of a filtered data set may have none."""
    return [call for call in calls if any(tensor.numel() for tensor in _tensors(call))]


def _without_padding(calls: Sequence[Arguments], model: nn.Module) -> list[Arguments]:
    """Returns the calls, with each padded one split into a call for each row, all arguments by name."""
    takes = list(inspect.signature(model.forward).parameters)
    rows: list[Arguments] = []
    for call in calls:
        parts = unpadded(_by_name(call, takes), takes)
        rows += [call] if parts is None else [((), part) for part in parts]
    if not rows:
        raise ValueError("the attention_mask hides every token of the calibration data; it is 1 where a token counts")
    return rows


def _by_name(call: Arguments, takes: Sequence[str]) -> dict[str, Any]:
    args, kwargs = call
    return {**dict(zip(takes, args, strict=False)), **kwargs}


def _rows_of(data: Mapping[str, Any]) -> list[Arguments]:
    wrong = [name for name, value in data.items() if not isinstance(value, Tensor) or not value.dim()]
    if wrong or not data:
        raise ValueError(f"calibration data by name holds tensors with a row for each call; {wrong or 'it'} does not")
    counts = {name: len(value) for name, value in data.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"the named tensors have different numbers of rows ({listed}); give each as many")
    rows = range(next(iter(counts.values())))
    return [((), {name: value[row : row + 1] for name, value in data.items()}) for row in rows]


def _arguments(item: Any) -> Arguments:
    if isinstance(item, Mapping):
        arguments: Arguments = (), dict(item)
    else:
        arguments = (tuple(item) if isinstance(item, tuple | list) else (item,)), {}
    if not _tensors(arguments):
        raise ValueError(
            f"calibration data holds a {type(item).__name__} without tensors; for texts, "
            "quant.calibration_rows(data, tokenizer, samples=32, seqlen=512) makes rows of token ids"
        )
    return arguments


def _tensors(call: Arguments) -> list[Tensor]:
    return [value for value in tree_flatten(call)[0] if isinstance(value, Tensor)]


def _outline(call: Arguments) -> Any:
    """Returns a key that is equal for calls that can be joined: their tree, shapes and dtypes."""
    (values, spec), tensors = tree_flatten(call), _tensors(call)
    if any(not t.dim() or len(t) == 1 < len(tensors[0]) for t in tensors):
        return object()  # a number, or one row for all of the call's, as positions may be
    values = [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in values]
    return spec, [v if isinstance(v, Hashable) else id(v) for v in values]
