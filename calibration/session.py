"""A `Session` is everything that the steps of one run share, as one object that they hand on.

    device     where blocks are worked on and models run
    memory     bytes that the run may use
    progress   the listener that is called as steps progress
    store      the finished steps of the run, kept for the next run of the same command
    seed       of everything that is drawn
    rank       this process, of `world` that share the work

Public functions take `device=` and `progress=` and make a session of them:

    session = Session.on("cuda", progress=print)

Below them a function takes the session. It runs models `placed(model, session.device)`, reports its progress with
`session.report("solve", done, total)`, and keeps a finished step with `session.store.put(...)`; a session without a
listener or a store ignores these calls. Functions that compute with tensors or move them take a device.

A finished step is some tensors and a JSON-ready record under a name: a solved block, the calibration text, an
evaluation. `quant.calibration.walk.step_store.DirectoryStore` keeps steps in a directory; the `Store` here keeps
nothing. Callers need not ask which one it is: a step that was put into a plain `Store` is never in it, and `get` gives
None, so the work is done.

`placed` lets a model run on another device than the one that holds its weights. Where the model fits there, all of it
is copied. Where it does not, its repeated blocks are copied one at a time, each for its own forward pass, and
everything outside of them once. The model's own tensors stay where they are, perhaps in a mapped file, and are put back
untouched: nothing is ever copied back.
"""

import ctypes
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from quant.base.listener import Progress
from quant.base.processor import in_memory, memory_left, memory_limit, populate, value_of
from quant.calibration.ranks import rank_and_world
from quant.recipes.blocks import block_names, reads_experts, removing, replaced

Tensors = Mapping[str, Tensor]
Mapped = Callable[[Tensors], None]
"""Called with the tensors of a step, mapped from their file, when they are written."""


@dataclass(frozen=True, eq=False)
class Step:
    """A finished step: its tensors, mapped from their file, and its record, JSON-ready."""

    tensors: Tensors
    record: Any


class Store:
    """Keeps nothing."""

    directory: Path | None = None  # where finished steps and large temporary files are kept; None keeps both in memory
    is_complete = False  # whether an earlier run wrote the whole checkpoint, though perhaps not yet under its name

    @property
    def keeps(self) -> bool:
        """Whether steps are kept, so that their tensors need not stay in memory, and other ranks can read them."""
        return self.directory is not None

    @property
    def is_moving(self) -> bool:
        """Whether some steps are only in the checkpoint's files, so that their tensors hold zeros here."""
        return False

    def progress(self) -> tuple[int, int]:
        """Returns the number of layers that an earlier run has solved, and the bytes of all that it has kept."""
        return 0, 0

    def __contains__(self, step: str) -> bool:
        """Returns whether a step was finished, though perhaps its file is damaged."""
        return False

    def get(self, step: str) -> Step | None:
        """Returns a finished step; None where there is none, or its file is damaged."""
        return None

    def put(self, step: str, tensors: Tensors, record: Any, then: Mapped | None = None, *, alone: bool = False) -> None:
        """Keeps a finished step; a step of this name that was kept before goes when the new one is written.

        A step that all ranks have is written by the first, one that only this rank has computed (`alone`) by this one.
        """

    def drop(self, step: str) -> None:
        """Deletes a step that is no longer needed."""

    def expect(self, name: str, value: Any) -> None:
        """Records something that the run depends on and that was not known when it began."""

    def flush(self) -> None:
        """Waits until everything is written, also by other ranks where this one uses their results."""

    def seconds_to_write(self, nbytes: int) -> float:
        """Returns the seconds that `nbytes` take to write at the speed that was last measured."""
        return 0.0

    def refresh(self) -> None:
        """Reads the steps that other ranks have written since."""

    def moving(self, made_of: Mapping[str, str]) -> Any:
        """Returns the log that moves steps into the checkpoint's files; `made_of` names the layer of each tensor."""
        return None

    def shards(self) -> list[str]:
        """Returns the checkpoint's files that were begun in `directory`."""
        return []

    def finish(self) -> None:
        """Puts a whole checkpoint under its name, if it is not there, and deletes the steps."""

    def solving(self) -> AbstractContextManager[None]:
        """Marks a ValueError as one that the same command would raise again, so that no step is worth keeping."""
        return nullcontext()

    def reading(self) -> AbstractContextManager[None]:
        """Reports an error in a step's contents as damage of the store, while open."""
        return nullcontext()


@dataclass(frozen=True, eq=False)
class Session:
    """Device, memory, listener, store and seed that the steps of one run share."""

    # the device where blocks are worked on, with its index; None is where the model is
    device: torch.device | None = None
    # bytes that the user allows the run, the page cache not counted; None allows all that is left
    memory: int | None = None
    progress: Progress | None = None  # a function that is called as `progress(stage, done, total)`, if given
    store: Store = field(default_factory=Store)
    seed: int = 0

    @classmethod
    def on(
        cls, device: "Device", *, progress: Progress | None = None, memory: int | None = None, seed: int = 0
    ) -> Self:
        """Returns a session on "auto", "cpu", "cuda", "cuda:N", or a device; None is where the model is."""
        return cls(find_device(device), memory, progress, seed=seed)

    @property
    def rank(self) -> int:
        """The number of this process among the processes that share the work."""
        return rank_and_world()[0]

    @property
    def world(self) -> int:
        """How many processes share the work."""
        return rank_and_world()[1]

    def for_model(self, model: nn.Module) -> Self:
        """Returns the same session, with device None where the model need not be copied because it is on the device."""
        # `device=None` lets every step take the model's own tensors instead of copies.
        return self if elsewhere(model, self.device) else replace(self, device=None)

    def usable_memory(self) -> int | None:
        """Returns the bytes that the run may use, at most a container's limit; None where the system is silent."""
        if self.memory is None:
            return memory_left()
        limit = memory_limit()
        return self.memory if limit is None else min(self.memory, limit)

    def report(self, stage: str, done: int, total: int) -> None:
        """Tells the listener that `done` of `total` parts of a stage are done."""
        if self.progress is not None:
            self.progress(stage, done, total)


Item = TypeVar("Item")

_BUFFERS, _BUFFER_BYTES = 4, 1 << 25
_BEING_FILLED = 2  # buffers at a time
_READERS = 8  # threads that fill a buffer: one brings about 3 GB/s from the page cache, a GPU takes 40


@dataclass(eq=False)
class Prefetcher:
    """Copies tensors to a device in a thread, until it is closed.

    On the way to a GPU the bytes pass through pinned buffers and a stream of their own, so that the work on the present
    tensors waits for neither the disk, nor the page cache, nor the bus:

        reader threads    file -> buffer 0    file -> buffer 1    file -> buffer 2   …   wait for its last copy
        stream                                buffer 0 -> GPU     buffer 1 -> GPU     …

    Readers begin with a buffer before the one before it is full: they are never idle while Python hands out work. Where
    tensors are worked on where they are, the thread reads the pages of mapped files into memory.
    """

    device: torch.device | None  # the device with its index; None leaves each tensor on its device
    whole: bool = True

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._copying: _CopyStream | None = None

    def in_turn(
        self, items: Sequence[Item], tensors_of: Callable[[Item], Sequence[Tensor]]
    ) -> Iterator[tuple[Item, list[Tensor]]]:
        """Yields each item with its tensors on the device, while the next item's tensors are copied; then closes."""
        try:
            waiting = [self.fetch(tensors_of(item)) for item in items[:1]]
            for following, item in enumerate(items, 1):
                tensors = waiting.pop()()
                waiting += [self.fetch(tensors_of(next_item)) for next_item in items[following : following + 1]]
                yield item, tensors
                tensors.clear()  # the caller's name for it lives until the next item, whose tensors have come by then
        finally:
            self.close()

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Begins to copy tensors; returns a function for the thread that uses them, which waits for the copies.

        A tensor that is on the device already is returned as it is, and so is a parameter that stays in its file.
        """
        if self.device is not None and self.device.type == "cuda":
            copies = self._thread.submit(self._to_gpu, tensors)
            return lambda: _for_current_stream(*copies.result())
        values = self._thread.submit(lambda: [in_memory(value_of(tensor, whole=self.whole)) for tensor in tensors])
        return lambda: [t if t.is_meta else t.to(self.device) for t in values.result()]

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._copying is not None:
            self._copying.readers.shutdown()

    def _to_gpu(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event]:
        assert self.device is not None
        with torch.cuda.device(self.device):
            self._copying = copying = self._copying or _CopyStream(self.device)
            with torch.cuda.stream(copying.stream):
                values = (value_of(tensor, whole=self.whole) for tensor in tensors)
                copies = [t if t.is_meta else copying.copy(t) for t in values]
                copying.flush()
                return copies, copying.stream.record_event()


@dataclass(eq=False)
class _CopyStream:
    """A stream to a GPU and pinned buffers: some are filled while others are read."""

    device: torch.device

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.buffers = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu") for _ in range(_BUFFERS)
        ]
        self.read = [torch.cuda.Event() for _ in range(_BUFFERS)]
        self.readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self.next_buffer = 0  # the index of the buffer that is filled next
        # Of each buffer that is being filled: its index, its place on the GPU, and the work of the readers.
        self.filling: deque[tuple[int, Tensor, list[Future[None]]]] = deque()

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the GPU, for work on `stream` after `flush`."""
        if tensor.device.type != "cpu":
            return tensor.to(self.device)

        def read(source: Tensor, target: Tensor) -> None:
            populate(source)
            ctypes.memmove(target.data_ptr(), source.data_ptr(), len(source))  # only on this thread

        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        source, target = (t.contiguous().flatten().view(torch.uint8) for t in (tensor, copy))
        for start in range(0, len(source), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            index, self.next_buffer = self.next_buffer, (self.next_buffer + 1) % _BUFFERS
            # The copy that last read this buffer must be over before it is filled again.
            self.read[index].synchronize()
            share = max(-(-len(part) // _READERS), 1 << 20)
            pieces = zip(part.split(share), self.buffers[index][: len(part)].split(share), strict=True)
            work = [self.readers.submit(read, *pair) for pair in pieces]
            self.filling.append((index, target[start : start + len(part)], work))
            if len(self.filling) >= _BEING_FILLED:
                self._send()
        return copy

    def flush(self) -> None:
        """Queues the copies of all buffers that are still being filled."""
        while self.filling:
            self._send()

    def _send(self) -> None:
        """Waits until the first of the buffers is full, and queues its copy."""
        index, target, work = self.filling.popleft()
        for piece in work:
            piece.result()
        target.copy_(self.buffers[index][: len(target)], non_blocking=True)
        self.read[index].record(self.stream)


def _for_current_stream(copies: list[Tensor], copied: torch.cuda.Event) -> list[Tensor]:
    """Returns the copies, for work on the current stream, which waits for `copied` first."""
    for copy in (copy for copy in copies if copy.is_cuda):
        stream = torch.cuda.current_stream(copy.device)
        stream.wait_event(copied)
        copy.record_stream(stream)  # or the allocator would reuse its memory as soon as the copying stream is done
    return copies


# Share of a GPU's free memory that a whole model may take; activations and logits need the rest.
_SHARE = 0.7
_STATES_SHARE = 0.08  # for one of the four sets of hidden states that exist while a block is solved
_EXPERTS_SHARE = 0.15  # for the experts of a block
NARROW = (torch.float16, torch.bfloat16)

Device = torch.device | str | None
"""Values of `device=`. None means the device that the model is on, "auto" the GPU where there is one."""


def find_device(device: Device) -> torch.device | None:
    """Returns the device with its index; None where the model stays where it is."""
    if device is None or (isinstance(device, torch.device) and device.type != "cuda"):
        return device
    name, count = str(device), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if count else None
    if name == "cpu":
        return torch.device("cpu")
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise ValueError(f"device {name} is not a device; expected auto, cpu, cuda or cuda:N")
    if not count:
        raise ValueError(f"device {name}: PyTorch sees no GPU here; leave it out, or pass cpu")
    index = int(name[5:]) if ":" in name else torch.cuda.current_device()
    if index >= count:
        seen = ", ".join(f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(count))
        raise ValueError(f"device {name}: PyTorch sees {seen} here; pass one of these, or cpu")
    return torch.device("cuda", index)


def describe(device: torch.device | None) -> str:
    """Returns a device as the terminal and the report name it; None is the CPU."""
    if device is None or device.type != "cuda":
        return str(device or "cpu")
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {properties.total_memory / 1e9:.0f} GB)"


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of a model's first tensor, which is where its inputs must be."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def elsewhere(model: nn.Module, device: torch.device | None) -> bool:
    """Returns whether `model` has to be copied to run on `device`; None means the device that it is on."""
    return device is not None and device_of(model) != device


def is_visited(model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None) -> bool:
    """Returns whether `placed` copies the blocks of `model` to `device` one at a time, because all do not fit."""
    return device is not None and elsewhere(model, device) and not fits(model, device, dtype)


@contextmanager
def placed(
    model: nn.Module, device: torch.device | None, dtype: torch.dtype | None = None, *, filler: Tensor | None = None
) -> Iterator[torch.device]:
    """Makes `model` run on `device` while open, with its inputs there; yields that device.

    Copies of 16-bit tensors are widened to `dtype`, if given. A filler is a number `[]` on the device, for passes in
    which no value of a block matters: the linear layers of the blocks, whose weights are most of a model, get it as
    every element of their weight, and nothing is copied.
    """
    if device is None or not elsewhere(model, device):
        yield device_of(model)
        return
    blocks = [model.get_submodule(name) for name in block_names(model)]
    inside = {id(module) for block in blocks for module in block.modules()}
    parts = [[module for module in model.modules() if id(module) not in inside], *(list(b.modules()) for b in blocks)]
    # A pass without values needs no copy of these. Experts in files stay there: `without_experts` gives their outputs.
    linears = (module for block in blocks for module in block.modules() if type(module) is nn.Linear)
    filled = {id(linear.weight) for linear in linears if filler is not None and linear.weight.dtype is filler.dtype}
    filled |= {id(p) for block in blocks for p in block.parameters() if filler is not None and reads_experts(p)}

    def tensors_to_copy(modules: Iterable[nn.Module]) -> list[Tensor]:
        # Every element of an expanded tensor is the filler itself.
        return [filler.expand(t.shape) if filler is not None and id(t) in filled else t for t in tensors_of(modules)]

    whole = fits(model, device, dtype, filled)
    borrowed: dict[int, DeviceCopies] = {}
    prefetcher = Prefetcher(device, whole=whole and filler is None)
    try:
        steps = Prefetcher(device, whole=prefetcher.whole).in_turn(parts if whole else parts[:1], tensors_to_copy)
        for index, (part, copies) in enumerate(steps):
            borrowed[index] = DeviceCopies(part, copies, device, dtype)
        visited = {} if whole else dict(enumerate(blocks, 1))
        with _visiting(visited, parts, borrowed, prefetcher, dtype, tensors_to_copy):
            yield device
    finally:
        prefetcher.close()
        for copies_of_part in reversed(borrowed.values()):
            copies_of_part.restore()


@contextmanager
def _visiting(
    blocks: Mapping[int, nn.Module], parts: Sequence[list[nn.Module]], borrowed: "dict[int, DeviceCopies]",
    prefetcher: Prefetcher, dtype: torch.dtype | None, tensors_to_copy: Callable[[Iterable[nn.Module]], list[Tensor]],
) -> Iterator[None]:  # fmt: skip
    """Brings each of `blocks` to the device for its own forward pass while open, with the next one on its way."""
    device, waiting = prefetcher.device, dict[int, Callable[[], list[Tensor]]]()

    def enter(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert device is not None
        moved = tuple(_moved(a, device) for a in args), {name: _moved(a, device) for name, a in kwargs.items()}
        if "forward" in vars(block) or all(t.device == device for t in tensors_of(parts[index])):
            return moved  # it needs no weights, or has them there
        copies = (waiting.pop(index, None) or prefetcher.fetch(tensors_to_copy(parts[index])))()
        # After the last block the next pass begins with the first.
        following = index + 1 if index + 1 in blocks else 1
        if following not in (index, *waiting):
            waiting[following] = prefetcher.fetch(tensors_to_copy(parts[following]))
        borrowed[index] = DeviceCopies(parts[index], copies, device, dtype)
        return moved

    def leave(index: int, block: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if index in borrowed:
            borrowed.pop(index).restore()

    handles = []
    for index, block in blocks.items():
        handles.append(block.register_forward_pre_hook(partial(enter, index), prepend=True, with_kwargs=True))
        handles.append(block.register_forward_hook(partial(leave, index), always_call=True))
    with removing(handles):
        yield


def fits(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None = None, left_out: Collection[int] = ()
) -> bool:
    """Returns whether all of `model` but the tensors `left_out` may be copied to `device`, 16-bit ones in `dtype`."""
    if device.type != "cuda":
        return True
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if id(t) not in left_out}.values()
    wide = None if dtype is None else dtype.itemsize
    # Tied tensors count once: they are copied once.
    needed = sum(t.numel() * (wide or t.itemsize) if t.dtype in NARROW else t.nbytes for t in tensors)
    return needed <= _SHARE * free_memory(device)


def home_of_states(nbytes: int, device: torch.device | None) -> torch.device | None:
    """Returns the device for hidden states of `nbytes`: a GPU only if they leave most of its memory to the blocks."""
    if device is None or device.type != "cuda" or nbytes < _STATES_SHARE * free_memory(device):
        return device
    return torch.device("cpu")


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU, including bytes that PyTorch holds and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the parameters and buffers that `modules` themselves hold, each once, in the order of `DeviceCopies`."""
    tensors = (t for module in modules for t in (*module._parameters.values(), *module._buffers.values()))
    return list({id(t): t for t in tensors if t is not None}.values())


class DeviceCopies:
    """Copies on a device that replace the tensors of some modules, until the originals are restored.

    Copies in `narrow` dtypes are widened to `dtype`, if given; a device of None is that of the tensors.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        copies: Sequence[Tensor],
        device: torch.device | None,
        dtype: torch.dtype | None,
        narrow: Sequence[torch.dtype] = NARROW,
    ) -> None:
        self.copies = {id(t): copy for t, copy in zip(tensors_of(modules), copies, strict=True)}

        def copy_of(t: Tensor) -> Tensor:
            # A tensor of two modules is on the device when it is met again.
            copy = self.copies.get(id(t), t) if t.device != device else t
            if t.is_meta and copy.is_meta:  # experts that are still in their files
                return t
            return copy.to(device, dtype if t.dtype in narrow else None)

        self.originals = []
        with torch.inference_mode(False), torch.no_grad():
            for module in modules:
                if not module._parameters and not module._buffers:
                    continue
                parameters = {name: (p, p.data) for name, p in module._parameters.items() if p is not None}
                buffers = dict(module._buffers)
                # Quantized modules override this: they keep the dtype of codes, and take the layout of a GPU.
                module._apply(copy_of, recurse=False)
                self.originals.append((module, parameters, buffers, dict(module._buffers)))

    def restore_dtypes(self) -> None:
        """Rounds the copies of parameters to the dtypes of the originals."""
        for live, _, data in self._parameters():
            live.data = live.data.to(data.dtype)

    def keep_changes(self) -> None:
        """Restores the originals; a parameter whose copy was changed gets the new values."""
        changed = []
        for live, parameter, data in self._parameters():
            value, copy = live.data.to(data.dtype), self.copies[id(parameter)]
            if value.shape != copy.shape or not torch.equal(value, copy):
                # Norms that took up a scale, corrected biases, weights that a transform scaled.
                changed.append((parameter, value.to(data.device)))
        self.restore()
        for parameter, value in changed:
            parameter.data = value

    def _parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter, Tensor]]:
        """Yields each parameter as its module has it now (some devices take a new one), the original, and its data."""
        seen = set()
        for module, parameters, _, _ in self.originals:
            for name, (parameter, data) in parameters.items():
                live = module._parameters[name]
                if id(parameter) not in seen and live is not None and not live.is_meta:
                    yield live, parameter, data
                seen.add(id(parameter))

    def restore(self) -> None:
        """Puts the original tensors back."""
        for module, parameters, buffers, copies in reversed(self.originals):
            for name, (parameter, data) in parameters.items():
                parameter.data = data
                module._parameters[name] = parameter
            for name, buffer in buffers.items():
                now = module._buffers.get(name)
                if now is copies[name] or now is None or buffer is None or hasattr(type(module), "quantized_weight"):
                    module._buffers[name] = buffer
                else:  # the module has put another tensor there, such as frequencies of longer texts
                    module._buffers[name] = now.to(buffer.device)
        self.originals.clear()
        self.copies.clear()


class _ExpertsOnDevice:
    """Takes the place of a parameter in its files; each expert is copied to a device once, when it is first read."""

    is_meta, runs_alone = False, True

    def __init__(self, stored: Any, device: torch.device) -> None:
        self.stored, self.device, self.shape = stored, device, stored.shape
        self.copies: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.stored)

    def dim(self) -> int:
        return len(self.shape)

    def __getitem__(self, expert: int) -> Tensor:
        if expert not in self.copies:
            self.copies[expert] = self.stored[expert].to(self.device)
        return self.copies[expert]

    def tensor(self) -> Tensor:
        return self.stored.tensor()


@contextmanager
def experts_on_device(block: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Keeps experts of a block in files on a GPU with room for them while open: solving reads each a dozen times."""
    parameters = {id(p): p for p in block.parameters() if reads_experts(p)}
    size = sum(p.stored.shape.numel() * p.dtype.itemsize for p in parameters.values())  # type: ignore[attr-defined]
    if not size or device is None or device.type != "cuda" or size > _EXPERTS_SHARE * free_memory(device):
        yield
        return
    with replaced(
        (p, "stored", _ExpertsOnDevice(p.stored, device))  # type: ignore[attr-defined]
        for p in parameters.values()
    ):
        yield


def _moved(value: Any, device: torch.device) -> Any:
    """Returns a tensor, or the tensors of a tuple, on `device`; other values, such as a cache, are unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    return tuple(_moved(v, device) for v in value) if type(value) is tuple else value
