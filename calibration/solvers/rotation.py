"""A rotation turns a layer's input together with its weight: W x = (W H)(H x), H orthonormal and symmetric.

A block Hadamard spreads an outlier over its block and makes weights nearly Gaussian, which a grid with one
scale for sixteen values rounds best. It costs log2(block) additions a value at run time where it stays online
(`QuantLinear.hadamard`), and nothing where the modules around take it over (`merge_rotations`):

**Residual stream.** Embeddings and output projections add into it, norms read it. With R orthonormal, every writer
gives y R instead of y. Once the weight of an RMS norm has moved into the layers that read it, the norm of x R is the
norm of x times R, and these layers get W R for W. The model's output is the same. With blocks of Hadamard matrices the
stream has no outlier channels (R1 of QuaRot, Ashkboos et al., 2024); `learned_rotation` finds a matrix for FP8.

**Within heads.** Attention mixes tokens, not the channels of a value. Rotating a value projection's rows, block by
block within each head, is undone by the columns of the output projection (R2).

Neither is looked up by names: writers and readers are found by watching one forward pass. Each norm's input is followed
back through additions, and through functions that pass values on or scale them, to the modules that wrote it; the
layers that receive a norm's output are its readers. A model in which this meets any other function is refused. After
the change the model runs again; if its output differs, all weights are restored.

Rotation suits second-order rounding of weights. It does not suit plain rounding in small blocks, nor inputs rounded
to 4 bits, whose few large channels it spreads over their neighbours: it is a choice per layer, never a default.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quant.calibration.attention_names import text_config
from quant.calibration.solvers.fold import modules_in_order
from quant.formats.tensor import moved
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.kernels.rounding.hadamard import hadamard_block, hadamard_transform
from quant.recipes.blocks import Call, all_arguments, capture, in_float64, output_of, removing

LARGEST_BLOCK = 128


def rotation_block(columns: int, largest: int = LARGEST_BLOCK) -> int:
    """Returns the largest power of two that divides `columns`, at most `largest`; 0 where nothing would turn."""
    block = min(hadamard_block(columns), largest)
    return block if block > 1 else 0


def rotate_weight(weight: Tensor, block: int) -> Tensor:
    """Returns W Hᵀ for a weight `[..., out, in]`, in blocks along its inputs; 0 leaves it. float64 stays float64."""
    return hadamard_transform(weight, block) if block else weight


def matrix_of(weight: Tensor, parts: RunTimeParts) -> Tensor:
    """Returns the matrix `[out, in]` by which a layer multiplies its input: its weight with the operations of run time.

    `weight` is dense, as it was rounded: scaled, rotated and without its branch.
    """
    if parts.lowrank is not None:
        down, up = (part.to(weight.dtype) for part in parts.lowrank)
        weight = weight + up @ down
    # H is its own inverse, so rotating the rounded weight again undoes the rotation.
    weight = rotate_weight(weight, parts.hadamard)
    return weight if parts.pre_scale is None else weight * parts.pre_scale.to(weight.dtype)


_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Functions that pass values on unchanged or multiplied by a number, and functions that add.
_PASSES = {"to", "clone", "contiguous", "float", "type_as", "detach", "dropout", "mul", "div", "__mul__", "__rmul__"}
_PASSES |= {"__getitem__", "view", "reshape", "truediv", "__truediv__"}
_ADDS = {"add", "__add__", "__radd__"}

Turn = Callable[[Tensor], Tensor]
"""Rotates vectors along the last dimension of a float64 tensor."""


@dataclass(frozen=True)
class Residual:
    """The residual stream as a forward pass shows it."""

    width: int  # the width of the stream
    writers: tuple[str, ...]  # modules that add into it, in order of execution
    readers: dict[str, tuple[str, ...]]  # linear layers that read each norm of it, by the norm's name
    tied: tuple[str, ...]  # readers whose weight is a writer's


def merge_rotations(model: nn.Module, rows: Tensor, blocks: Sequence[str], layers: Collection[str]) -> dict[str, str]:
    """Rotates the inputs of `layers` in place where that costs nothing at run time; returns a sentence on each."""
    notes, why = {}, "nothing before the layer can take it"
    readers: set[str] = set()
    try:
        residual = merge_residual_rotation(model, lambda m: m(rows))
        readers = {name for names in residual.readers.values() for name in names}
    except ValueError as error:
        why = f"the residual stream stays as it is, for {error}; and nothing in its block can take it"
    # After the residual rotation, whose weights the blocks have by now.
    calls = capture(model, blocks, lambda: model(rows)) if blocks else {}
    for name in layers:
        owner = next((b for b in calls if name.startswith(f"{b}.")), None)
        size = 0 if owner is None or name in readers else _merge_in_block(model, owner, calls[owner], name)
        if name in readers:
            notes[name] = "rotated with the residual stream, at no cost at run time"
        elif size:
            notes[name] = f"rotated in blocks of {size} together with what gives its input, at no cost at run time"
        else:
            notes[name] = f"rotation left out: {why}"
    return notes


def _merge_in_block(model: nn.Module, owner: str, call: Call, name: str) -> int:
    """Tries the linear layers before `name`, nearest first, in float64; gives the block size, 0 for none."""
    reader = name.removeprefix(f"{owner}.")
    # In float64 a change by the rotation is distinguished from rounding: 1e-6 against several percent.
    block = in_float64(model.get_submodule(owner))
    call = moved(call, dtype=torch.float64)
    try:
        order = modules_in_order(block, call)
    except Exception:  # the model's own code: XGLM fills a mask with a number of float64 that torch.full does not take
        return 0
    for producer in reversed(order[: order.index(reader)] if reader in order else []):
        if not isinstance(block.get_submodule(producer), nn.Linear):
            continue
        size = merge_head_rotation(block, call, producer, reader)
        if size:
            _rotate(model.get_submodule(f"{owner}.{producer}"), _hadamard(size), inputs=False)
            _rotate(model.get_submodule(name), _hadamard(size), inputs=True)
            return size
    return 0


def merge_residual_rotation(
    model: nn.Module, run: Callable[[nn.Module], Any], rotation: Tensor | None = None
) -> Residual:
    """Rotates the residual stream, which is returned, in place and at no cost at run time.

    With R, orthonormal, float64 `[width, width]`, a stream x becomes R x, and a head that shares the embedding's weight
    gets one of its own. Without, blocks are rotated by a Hadamard matrix, and such a head is refused. ValueError where
    the stream is written or read by something that a rotation cannot pass, or the output changed; weights are then
    restored.
    """
    with torch.no_grad():
        residual = find_residual(model, run)
        # Writer and reader of one weight would need R W and W Rᵀ at once.
        if residual.tied and rotation is None:
            raise ValueError(
                f"{residual.tied[0]} shares its weight with the embedding, and after a rotation the two differ"
            )
        turn = _hadamard(rotation_block(residual.width))
        if rotation is not None:
            # Where the matrix is, which may be a GPU that has no room for the model.
            turn = lambda x: (x.to(rotation.device) @ rotation.mT).to(x.device)  # noqa: E731
        before = output_of(run(model)).clone()
        # Norms too, whose weights become 1.
        touched = [*residual.writers, *residual.readers, *(n for names in residual.readers.values() for n in names)]
        with _restored_on_error(model, touched):
            for name in residual.tied:
                module: Any = model.get_submodule(name)
                module.weight = nn.Parameter(module.weight.detach().clone(), module.weight.requires_grad)
            for norm, readers in residual.readers.items():
                gain, neutral = gain_of(model.get_submodule(norm), norm)
                # The module then multiplies by exactly 1.
                model.get_parameter(f"{norm}.weight").fill_(neutral)
                for name in readers:
                    _rotate(model.get_submodule(name), turn, inputs=True, gain=gain)
            for name in residual.writers:
                _rotate(model.get_submodule(name), turn, inputs=False)
            _check_unchanged(before, output_of(run(model)), "rotating the residual stream")
    if residual.tied:
        _keep_untied(model, residual.tied)
    return residual


def _keep_untied(model: Any, names: Sequence[str]) -> None:
    """Tells a model of transformers that layers have weights of their own, or `tie_weights` would undo that."""
    for prefix, module in model.named_modules():
        own = {f"{name}.weight".removeprefix(f"{prefix}." if prefix else "") for name in names}
        if own & (ties := getattr(module, "all_tied_weights_keys", {})).keys():
            # A new dictionary: whoever restores the model after an error has the old one.
            module.all_tied_weights_keys = {name: source for name, source in ties.items() if name not in own}
    config = getattr(model, "config", None)
    for each in (config, text_config(config)):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False  # type: ignore[union-attr]


def _hadamard(block: int) -> Turn:
    return lambda x: hadamard_transform(x, block)


def find_residual(model: nn.Module, run: Callable[[nn.Module], Any]) -> Residual:
    """Finds the writers and readers of the residual stream; ValueError where it contains something else."""
    trace = _watch(model, run)
    width = next((m.embedding_dim for m in model.modules() if isinstance(m, nn.Embedding)), 0)
    weights = ((n, getattr(module, "weight", None)) for n, module in model.named_modules() if n in trace.inputs)
    norms = [name for name, weight in weights if isinstance(weight, nn.Parameter) and weight.shape == (width,)]
    readers: dict[str, tuple[str, ...]] = {}
    writers: dict[str, None] = {}
    for norm in norms:
        # The layers that read the norm's output, directly or through a view.
        behind = [
            name
            for name, x in trace.inputs.items()
            if isinstance(model.get_submodule(name), nn.Linear) and trace.source(x) == norm
        ]
        if not behind:
            raise ValueError(f"{norm}: no linear layer reads this norm directly, so its weight cannot move into one")
        readers[norm] = tuple(behind)
        for name in trace.writers(trace.inputs[norm], norm):
            writers[name] = None
    if not norms or not writers:
        raise ValueError("no residual stream found: no norm of the embedding's width whose input modules add up to")
    shared = {id(model.get_submodule(name).weight) for name in writers}
    tied = [n for names in readers.values() for n in names if id(model.get_submodule(n).weight) in shared]
    return Residual(width, tuple(writers), readers, tuple(tied))


class _Trace(TorchFunctionMode):
    """Records where each tensor of a forward pass came from. All are kept alive, so that no two share an id."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[str, list[Tensor]]] = {}
        self.outputs: dict[int, str] = {}
        self.inputs: dict[str, Tensor] = {}
        self.alive: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            operands = [a for a in args if isinstance(a, Tensor) and a.numel() > 1]
            # In-place functions return their operand, which would be its own origin and make the search endless.
            if not any(a is out for a in operands):
                self.alive.append((out, operands))
                self.made[id(out)] = (getattr(func, "__name__", ""), operands)
        return out

    def source(self, x: Tensor) -> str | None:
        """Returns the module that gave `x`, or a view of it."""
        while id(x) not in self.outputs:
            name, operands = self.made.get(id(x), ("", []))
            if name not in _PASSES or len(operands) != 1 or operands[0].shape[-1] != x.shape[-1]:
                return None
            x = operands[0]
        return self.outputs[id(x)]

    def writers(self, x: Tensor, norm: str) -> list[str]:
        """Returns the modules whose outputs add up to `x`."""
        if id(x) in self.outputs:
            return [self.outputs[id(x)]]
        name, operands = self.made.get(id(x), ("", []))
        # A residual connection: both summands write into the stream.
        if name in _ADDS and len(operands) == 2 and operands[0].shape == operands[1].shape:
            return [*self.writers(operands[0], norm), *self.writers(operands[1], norm)]
        if name in _PASSES and len(operands) == 1 and operands[0].shape[-1] == x.shape[-1]:
            return self.writers(operands[0], norm)
        raise ValueError(f"{norm}: its input comes from {name or 'outside'!r}, which a rotation cannot pass")


def _watch(model: nn.Module, run: Callable[[nn.Module], Any]) -> _Trace:
    trace = _Trace()

    def hook(name: str) -> Callable[..., None]:
        def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            if name in trace.inputs:
                raise ValueError(f"{name}: called twice in one pass, so a rotation would meet it twice")
            trace.inputs[name] = all_arguments(args, kwargs)[0]
            trace.outputs[id(result)] = name
            trace.alive.append(result)

        return seen

    leaves = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
    ]
    hooks = (module.register_forward_hook(hook(name), with_kwargs=True) for name, module in leaves)
    with removing(hooks), torch.no_grad(), trace:
        run(model)
    return trace


def gain_of(module: nn.Module, name: str) -> tuple[Tensor, float]:
    """Returns the factors of an RMS norm, float64 `[width]`, and the weight with which it would multiply by 1.

    ValueError where it does something else than divide by the root mean square and multiply by its weight, or by 1 +
    that.
    """
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    # Four random tokens distinguish an RMS norm from one that subtracts the mean or adds a bias.
    random = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x = random.to(weight)
    y = module(x).double()
    plain = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    near = max(1e-3, 4 * torch.finfo(weight.dtype).eps)
    for offset in (0, 1):
        # Gemma's norms multiply by 1 + weight.
        gain = weight.double() + offset
        if float((y - plain * gain).norm()) <= near * float(y.norm()):
            return gain, 1.0 - offset
    raise ValueError(f"{name}: not an RMS norm (it has a mean or a bias), so its input cannot be rotated")


def _rotate(module: nn.Module, turn: Turn, *, inputs: bool, gain: Tensor | None = None) -> None:
    """Rotates a module's inputs, or its outputs, in float64; `gain` multiplies its input channels before."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    # W diag(gain): the gain of the norm belongs to the channels of its readers' input.
    wide = weight.double() if gain is None else weight.double() * gain
    # y R for y = x Wᵀ is x (Rᵀ W)ᵀ: rows of W are rotated. An embedding's rows are y already, so its columns are.
    along_rows = not inputs and not isinstance(module, nn.Embedding)
    turned = turn(wide.mT).mT if along_rows else turn(wide)
    # A new tensor: whoever holds the old one, to restore it after an error, still has the original values. It keeps the
    # strides of the old one, because products round differently over another layout.
    weight.data = torch.empty_like(weight).copy_(turned)
    bias = getattr(module, "bias", None)
    if isinstance(bias, nn.Parameter) and not inputs:
        # A bias is added to the output, so it is rotated with it; rotating inputs does not change it.
        bias.copy_(turn(bias.double()))


@contextmanager
def _restored_on_error(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Restores the parameters of the modules `names` if an error is raised."""
    modules = [model.get_submodule(name) for name in dict.fromkeys(names)]
    originals = [(m, n, p, p.detach().clone()) for m in modules for n, p in m._parameters.items() if p is not None]
    try:
        yield
    except BaseException:
        for module, name, parameter, old in originals:
            # A head that got a weight of its own shares the embedding's again.
            setattr(module, name, parameter)
            parameter.copy_(old)
        raise


def _check_unchanged(before: Tensor, after: Tensor, what: str) -> None:
    limit = _TOLERANCE[before.dtype]
    error = float((after.double() - before.double()).norm() / before.double().norm())
    if not error <= limit:
        raise ValueError(f"{what} changes the output by {error:.2g} of its size, more than {limit:.0e}: not done")


def merge_head_rotation(block: nn.Module, call: Call, producer: str, reader: str) -> int:
    """Rotates rows of `producer` and columns of `reader` in equal blocks, if the path between lets them pass.

    They are a value projection and its output projection, by name within the block. Returns the block size, from 128
    down to 16; 0 where none leaves the block's output as it was, and nothing is changed.
    """
    first, second = block.get_submodule(producer), block.get_submodule(reader)
    rows, columns = first.weight.shape[0], second.weight.shape[1]  # type: ignore[index]
    size = min(rotation_block(int(rows)), rotation_block(int(columns)))
    with torch.no_grad():
        before = output_of(block(*call.args, **call.kwargs)).clone()
        while size >= 16:
            try:
                with _restored_on_error(block, [producer, reader]):
                    _rotate(first, _hadamard(size), inputs=False)
                    _rotate(second, _hadamard(size), inputs=True)
                    after = output_of(block(*call.args, **call.kwargs))
                    _check_unchanged(before, after, f"rotating {producer} and {reader}")
                return size
            except ValueError:
                # Heads narrower than the block mix with their neighbours; half the block may fit in one.
                size //= 2
    return 0
