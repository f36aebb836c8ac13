"""The ranks of a command share its work: one process for each GPU, started by torchrun or by `--devices`.

Every rank runs the whole command on the same files, at the same step of it. Slow work is dealt out: calibration rows,
blocks, experts, rows of a weight. The results are put together again *in the order in which one rank would have come to
them*, and never in the order of arrival. So sums of floating-point numbers are the same, to the bit, on any number of
ranks. The functions here do that; with one rank they pass their arguments on.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Part = TypeVar("Part", bound=Tensor | None)
"""The tensors of an entry that ranks exchange; where some may be missing, `torch.Tensor | None`."""
Outline = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor that another rank will send."""

# Ranks find each other within minutes. Later their launcher sees whether all live, and one of them may take
# long over a large file.
_GATHERING, _PATIENCE = timedelta(minutes=10), timedelta(days=7)

_SMALL = 1 << 22  # bytes of tensors that a rank sends in one message

_joined = False
_meeting: Future[None] | None = None
_sharing: ContextVar[bool] = ContextVar("sharing", default=False)


def rank_and_world() -> tuple[int, int]:
    """Returns this process's rank and the number of ranks: (0, 1) before `join`, also in a training script's group."""
    return (dist.get_rank(), dist.get_world_size()) if _joined else (0, 1)


def join() -> None:
    """Joins the ranks that environment variables name; tensors of GPUs go over NCCL, others over gloo."""
    global _joined
    if not dist.is_initialized():
        from torch._C._distributed_c10d import PrefixStore  # some builds of PyTorch have none of this
        from torch.distributed.rendezvous import rendezvous

        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast of NVLink hangs where GPUs are handed out singly
        # Ranks of `--devices` meet in a file, for which no port can be taken by others; those of torchrun in its store.
        meeting = os.environ.get("BLOCKSCALE_RANKS", "env://")
        if meeting.startswith("file:"):
            meeting += f"?rank={os.environ['RANK']}&world_size={os.environ['WORLD_SIZE']}"
        store, rank, world = next(rendezvous(meeting, timeout=_GATHERING))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        store = PrefixStore("quant", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_PATIENCE)
    _joined = True


def _met() -> None:
    """Waits for the connections of `Exchange.begin_connecting`: NCCL needs messages in one order on all ranks."""
    global _meeting
    if _meeting is not None:
        _meeting.result()
        _meeting = None


def leave() -> None:
    """Ends the common work when all ranks have come here; each does the following steps for itself.

    Other libraries share work among ranks as soon as they see some: compressed-tensors does when it loads a checkpoint,
    and would wait forever for ranks that do not load it.
    """
    global _joined
    if _joined:
        _met()
        wait_for_all()
        _joined = False
        dist.destroy_process_group()


def gathered(value: T) -> list[T]:
    """Returns the value of each rank, in their order; it is pickled on its way."""
    if rank_and_world()[1] == 1:
        return [value]
    values: list[Any] = [None] * rank_and_world()[1]
    dist.all_gather_object(values, value)
    return values


def from_first(make: Callable[[], T]) -> T:
    """Returns the value of `make()`, which only the first rank calls; it is pickled on its way to the others."""
    rank, world = rank_and_world()
    if world == 1:
        return make()
    box = [make() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]  # type: ignore[return-value]


def at_first(value: T) -> list[T] | None:
    """Returns the value of each rank, in their order, on the first rank; it is pickled on its way."""
    rank, world = rank_and_world()
    if world == 1:
        return [value]
    values: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(value, values, dst=0)
    return values


def wait_for_all() -> None:
    """Waits until every rank has come here."""
    gathered(None)


def own_batches(count: int) -> range:
    """Returns the batches of calibration or evaluation rows that this rank runs: every `world`-th."""
    rank, world = rank_and_world()
    return range(rank, count, world)


def number_of(batch: int) -> int:
    """Returns the number, among the batches of all ranks, of this rank's `batch`-th."""
    rank, world = rank_and_world()
    return rank + batch * world


def dealt(sizes: Sequence[int], world: int | None = None) -> list[int]:
    """Returns the rank that does each of several jobs: the largest first, each to the rank with the least to do."""
    world = rank_and_world()[1] if world is None else world
    load, owners = [0] * world, [0] * len(sizes)
    for job in sorted(range(len(sizes)), key=lambda job: -sizes[job]):
        owners[job] = min(range(world), key=load.__getitem__)
        load[owners[job]] += sizes[job]
    return owners


@contextmanager
def sharing() -> Iterator[None]:
    """Declares that all ranks solve the same weight while open, so that its rows may be dealt out (`shares_rows`)."""
    token = _sharing.set(rank_and_world()[1] > 1)
    try:
        yield
    finally:
        _sharing.reset(token)


def shares_rows() -> bool:
    """Returns whether `sharing` is open and there are several ranks."""
    return _sharing.get()


@dataclass(frozen=True)
class Exchange:
    """Exchanges tensors with the other ranks. With one rank it passes them on."""

    # the device of this rank's tensors, to which the tensors of other ranks are copied; None is the CPU
    device: torch.device | None = None

    def begin_connecting(self) -> None:
        """Begins to connect all GPUs: NCCL takes seconds, in which weights are read. All ranks come here together."""
        global _meeting
        _met()
        if rank_and_world()[1] > 1 and self.device is not None and self.device.type == "cuda":

            def connect() -> None:
                with torch.cuda.device(self.device):
                    dist.broadcast(torch.zeros(1, device=self.device), src=0)

            thread = ThreadPoolExecutor(1, thread_name_prefix="meeting")
            _meeting = thread.submit(connect)
            thread.shutdown(wait=False)

    def in_order(self, own: Sequence[tuple[int, Sequence[Part]]]) -> Iterator[tuple[int, tuple[Part, ...]]]:
        """Yields the entries of all ranks, in order; every rank must go through all of them.

        Each entry has its number in the order in which one rank would have come to it, and tensors, of which some may
        be None. Entries of one number keep their order.
        """
        rank, world = rank_and_world()
        if world == 1:
            yield from ((number, tuple(tensors)) for number, tensors in sorted(own, key=lambda entry: entry[0]))
            return
        outlines = [
            (number, [None if t is None else (tuple(t.shape), t.dtype) for t in tensors]) for number, tensors in own
        ]
        everywhere = gathered(outlines)
        schedule = sorted(
            (
                (number, owner, index, outline)
                for owner, outlines_of_rank in enumerate(everywhere)
                for index, (number, outline) in enumerate(outlines_of_rank)
            ),
            key=lambda item: item[:3],
        )
        sizes = [
            sum(_padded_bytes(o) for _, outline in outlines_of_rank for o in outline if o is not None)
            for outlines_of_rank in everywhere
        ]
        # Small tensors travel together in one message: their cost is latency, not bandwidth.
        if max(sizes) <= _SMALL:
            packed = self._packed([t for _, tensors in own for t in tensors if t is not None], max(sizes))
            whole = [_unpacked(packed[owner], everywhere[owner]) for owner in range(world)]
            yield from ((number, whole[owner][index]) for number, owner, index, _ in schedule)  # type: ignore[misc]
            return
        turns = [(owner, outline, own[index][1] if owner == rank else ()) for _, owner, index, outline in schedule]
        # All ranks send entries of one kind: if this rank has no None among its tensors, no other rank has one.
        yield from zip((number for number, *_ in schedule), self.in_turn(turns), strict=True)

    def in_turn(
        self, turns: Sequence[tuple[int, Sequence[Outline | None], Sequence[Tensor | None]]]
    ) -> Iterator[tuple[Tensor | None, ...]]:
        """Yields the tensors of entries, of which all ranks know the owner and the outlines, and the owner the tensors.

        Neighbours of one outline, one of each rank, are sent at once: a GPU sends while it receives.
        """
        rank, world = rank_and_world()
        first = 0
        while first < len(turns):
            owners, outlines, sent = zip(*turns[first : first + world], strict=True)
            if sorted(owners) == list(range(world)) and all(outline == outlines[0] for outline in outlines):
                own = sent[owners.index(rank)]
                parts = [None if t is None else self._of_all(t) for t in own]
                yield from (tuple(None if part is None else part[owner] for part in parts) for owner in owners)
                first += world
                continue
            tensors = sent[0] if owners[0] == rank else [None] * len(outlines[0])
            pairs = zip(tensors, outlines[0], strict=True)
            yield tuple(None if o is None else self.broadcast(t, o[0], o[1], owners[0]) for t, o in pairs)
            first += 1

    def _of_all(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, of one shape and dtype, by rank."""
        whole = tensor.new_empty(rank_and_world()[1], *tensor.shape)
        if tensor.numel():
            _met()
            flat = tensor.contiguous().view(-1).view(torch.uint8)
            dist.all_gather_into_tensor(whole.view(-1).view(torch.uint8), flat)
        return whole

    def _packed(self, tensors: Sequence[Tensor], size: int) -> list[Tensor]:
        """Returns the tensors of each rank, one behind the other, as `size` bytes."""
        _met()
        own, offset = torch.zeros(size, dtype=torch.uint8, device=self.device), 0
        for tensor in tensors:
            own[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
            offset += _padded_bytes((tuple(tensor.shape), tensor.dtype))
        packed = [torch.empty_like(own) for _ in range(rank_and_world()[1])]
        if size:
            dist.all_gather(packed, own)
        return packed

    def broadcast(self, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, owner: int) -> Tensor:
        """Returns the tensor of a rank, of a shape and dtype, on all ranks."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device) if tensor is None else tensor.contiguous()
        if tensor.numel():
            _met()
            dist.broadcast(tensor.view(-1).view(torch.uint8), src=owner)
        return tensor


def _padded_bytes(outline: Outline) -> int:
    """Returns the bytes that a tensor takes in a packed message, in which every tensor begins at a multiple of 16."""
    shape, dtype = outline
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16


def _unpacked(
    packed: Tensor, outlines: Sequence[tuple[int, Sequence[Outline | None]]]
) -> list[tuple[Tensor | None, ...]]:
    entries, offset = [], 0
    for _, outline in outlines:
        tensors: list[Tensor | None] = []
        for each in outline:
            if each is None:
                tensors.append(None)
                continue
            shape, dtype = each
            part = packed[offset : offset + math.prod(shape) * dtype.itemsize]
            tensors.append(part.view(dtype).view(shape).clone())
            offset += _padded_bytes(each)
        entries.append(tuple(tensors))
    return entries
