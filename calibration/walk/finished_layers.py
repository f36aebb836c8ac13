"""Finished layers are kept in files of a run's partial directory, mapped from there, and installed by the next run.

A solved layer is its codes, its scales and its run-time parts. Other tensors that a solver changed in the block (norms
that took up an input scale, biases) are kept too; unchanged tensors point to the model's files again.
"""

import time
from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from quant.calibration.layer_result import LayerResult
from quant.calibration.ranks import Exchange, from_first, gathered, number_of, own_batches, rank_and_world, wait_for_all
from quant.calibration.session import Session, Store, home_of_states
from quant.calibration.walk.walk import BlockStore, States
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.install import install_weight
from quant.kernels.linear.quant_linear import RunTimeParts
from quant.recipes.plan import LayerPlan

_BUFFERS = ("codes", "scale", "global_scale", "input_scale", "pre_scale", "lowrank_down", "lowrank_up", "channels")
_STATES_SHARE = 0.2  # of the memory, which hidden states may take
_SHARE = 10  # hidden states are written when that takes less than 1 / _SHARE of the time since the last write


def keep_layers(
    store: Store, step: str, model: nn.Module, layers: Sequence[LayerPlan], results: Mapping[str, LayerResult],
    changed: Mapping[str, Tensor] | None = None, *, alone: bool = False,
) -> None:  # fmt: skip
    """Keeps installed layers as one step; their buffers become maps of its file."""
    tensors = {f"model:{name}": tensor for name, tensor in (changed or {}).items()}
    modules = {layer.name: model.get_submodule(layer.name) for layer in layers if layer.weight is not None}
    for name, module in modules.items():
        for buffer in _BUFFERS:
            if (tensor := getattr(module, buffer, None)) is not None:
                tensors[f"{buffer}:{name}"] = tensor
    record = [
        {
            "layer": layer.to_dict(),
            "hadamard": getattr(modules.get(layer.name), "hadamard", 0),
            "result": results[layer.name].to_dict(),
        }
        for layer in layers
    ]

    # The tensors are swapped for maps of the written file, so that finished layers live in the page cache.
    def give_back(mapped: Mapping[str, Tensor]) -> None:
        for key, tensor in mapped.items():
            kind, _, name = key.partition(":")
            if kind == "model":
                attrgetter(name)(model).data = tensor
            else:
                setattr(modules[name], kind, tensor)

    store.put(step, tensors, record, give_back, alone=alone)


def put_back(store: Store, step: str, model: nn.Module) -> tuple[list[LayerPlan], dict[str, LayerResult]] | None:
    """Installs the layers of a finished step, and returns them as they were solved, with their results by name."""
    finished = store.get(step)
    if finished is None:
        return None
    layers: list[LayerPlan] = []
    results: dict[str, LayerResult] = {}
    with store.reading():
        for key, tensor in finished.tensors.items():
            kind, _, name = key.partition(":")
            if kind == "model":
                attrgetter(name)(model).data = tensor
        for entry in finished.record:
            layer = LayerPlan.from_dict(entry["layer"])
            layers.append(layer)
            results[layer.name] = LayerResult.from_dict(entry["result"])
            if layer.weight is None:
                continue
            # Both have the order of _BUFFERS: the keys in the file repeat it.
            codes, scale, second, input_scale, pre_scale, down, up, channels = (
                finished.tensors.get(f"{buffer}:{layer.name}") for buffer in _BUFFERS
            )
            assert codes is not None and scale is not None
            lowrank = None if down is None or up is None else (down, up)
            parts = RunTimeParts(pre_scale, entry["hadamard"], lowrank, channels)
            shape = (*layer.shape[:-1], layer.shape[-1] + parts.residual)
            weight = BlockScaledTensor(codes, scale, layer.weight, shape, second)
            install_weight(model, layer, weight, input_scale, parts)
    return layers, results


class BlockKeeper(BlockStore):
    """Keeps the blocks of the sequential walk, and now and then the hidden states behind one.

    A resumed walk continues after the last block whose hidden states were kept. They are kept after each block if
    writing them costs little, and less often with many calibration rows. If they would take much of the memory, they
    are always kept, and the walk continues with maps of the file.
    """

    def __init__(
        self, session: Session, model: nn.Module, results: dict[str, LayerResult], noted: list[LayerPlan]
    ) -> None:
        self.store, self.model, self.results, self.noted = session.store, model, results, noted
        self.memory = session.usable_memory()
        self.before: dict[str, dict[str, Tensor]] = {}  # tensors of open blocks
        self.kept_layers = 0
        self.kept_states = time.perf_counter()

    def resume(self, chain: Sequence[str]) -> tuple[int, States | None]:
        finished = from_first(
            lambda: next((i for i, name in enumerate(chain) if self.store.get(_step(name)) is None), len(chain))
        )
        states = None
        if finished < len(chain):
            saved = self.store.get("states")
            with self.store.reading():
                # Layers are written after every block and hidden states less often: without states behind the last
                # finished block, the walk starts again at the last block that has them, and solves the blocks after it
                # again.
                block = None if saved is None else saved.record["block"]
                finished = chain.index(block) + 1 if block in chain[:finished] else 0
                states = _states(saved.tensors) if saved is not None and finished else None
        for name in chain[:finished]:
            layers, results = put_back(self.store, _step(name), self.model) or ([], {})
            self.noted += layers
            self.results |= results
        self.kept_layers = len(self.noted)
        return finished, states

    def begin(self, block: str) -> None:
        # Vectors may be changed in place; matrices never are.
        stored = _stored(self.model.get_submodule(block))
        self.before[block] = {name: t.detach().clone() if t.dim() < 2 else t.detach() for name, t in stored.items()}

    def end(self, block: str, states: States | None) -> States | None:
        changed = self._changed(block)
        layers = self.noted[self.kept_layers :]
        self.kept_layers = len(self.noted)
        keep_layers(self.store, _step(block), self.model, layers, self.results, changed)
        if states is None:
            return states
        kinds = {"quantized": states.quantized}
        # Without a solver that compares both, the two streams are one list, which is stored once.
        if states.original is not states.quantized:
            kinds["original"] = states.original
        # Bytes over all ranks: each holds its own batches, and the first rank writes them all.
        nbytes = sum(gathered(sum(state.nbytes for kind in kinds.values() for state in kind)))
        device = states.few.device
        large = self.memory is not None and nbytes > self.memory * _STATES_SHARE
        due = time.perf_counter() - self.kept_states > _SHARE * self.store.seconds_to_write(nbytes)
        # Clocks and free memory differ between ranks, and `_of_all_ranks` is collective: one rank decides for all.
        large, due, fit = from_first(lambda: (large, due, home_of_states(nbytes, device) == device))
        if large or due:
            tensors = _of_all_ranks(kinds, Exchange(device if fit else torch.device("cpu")))
            self.store.put("states", {**tensors, "few": states.few}, {"block": block})
            self.kept_states = time.perf_counter()
        if not large:
            return states
        # Drops the last references, so that the memory is free as soon as the writer is done.
        kinds.clear()
        self.store.flush()
        wait_for_all()
        self.store.refresh()
        saved = self.store.get("states")
        return states if saved is None else _states(saved.tensors)

    def _changed(self, block: str) -> dict[str, Tensor]:
        """Returns the tensors of the finished block that a solver changed.

        Unchanged ones point to their first memory again.
        """
        changed, before = {}, self.before.pop(block)
        for name, tensor in _stored(self.model.get_submodule(block)).items():
            if name not in before:
                continue
            value = before[name]
            # Matrices were not copied: the same address means that no solver replaced them. Vectors always differ here.
            if tensor.data_ptr() == value.data_ptr():
                continue
            if tensor.dtype != value.dtype or not torch.equal(tensor, value):
                changed[f"{block}.{name}".lstrip(".")] = tensor.detach()
            # Equal values in new memory: the map of the model's file costs no memory, the copy does.
            elif value.dim() > 1:
                tensor.data = value
        return changed


def _stored(block: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a block, without the buffers of quantized weights."""
    quantized = tuple(f"{name}." for name, module in block.named_modules() if hasattr(module, "quantized_weight"))
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return {name: t for name, t in tensors.items() if not name.startswith(quantized) or name.endswith(".bias")}


def _of_all_ranks(kinds: Mapping[str, Sequence[Tensor]], exchange: Exchange) -> dict[str, Tensor]:
    """Returns the hidden states of all batches by name, on the first rank; nothing on the others.

    States of several ranks are collected on its device; with one rank they stay where they are.
    """
    rank, world = rank_and_world()
    tensors = {}
    for kind, states in kinds.items():
        own = [(number_of(i), [state if world == 1 else state.to(exchange.device)]) for i, state in enumerate(states)]
        for number, (state,) in exchange.in_order(own):
            if rank == 0:
                tensors[f"{kind}:{number}"] = state
    return tensors


def _states(tensors: Mapping[str, Tensor]) -> States:
    def of(kind: str) -> list[Tensor]:
        numbers = sorted(int(name.removeprefix(f"{kind}:")) for name in tensors if name.startswith(f"{kind}:"))
        return [tensors[f"{kind}:{numbers[batch]}"] for batch in own_batches(len(numbers))]

    quantized = of("quantized")
    return States(quantized, of("original") or quantized, tensors["few"])


def _step(block: str) -> str:
    return f"block {block}"
