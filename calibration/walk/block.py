"""A `Block` is one block of the model while it is quantized: its calls, its groups, and the layers solved so far.

The stages of the walk read and fill it; `walk` says in which order. Until the block is finished, a `StandIn`
takes the place of each solved layer, so that the groups after it get the inputs that the quantized layers before them
give.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibration.fast_matmul import fast_matmul, paired_linears
from quant.calibration.outputs.stream import Stream
from quant.calibration.ranks import Exchange, gathered
from quant.calibration.session import DeviceCopies
from quant.calibration.walk.group import CurrentBatch, FusedExperts, Group, Settings, Solved, StandIn, weight_of
from quant.formats.tensor import moved
from quant.recipes.blocks import Call, Stop, all_arguments, removing
from quant.recipes.plan import LayerPlan


@dataclass(frozen=True, eq=False)
class BlockCalls:
    """The calls of a block, with their hidden states."""

    # Calls with the hidden states that the quantized blocks before give, one for each of this rank's batches.
    quantized: Sequence[Call]
    original: Sequence[Call]  # the same with the original hidden states
    few: Call  # a call on a few tokens
    # The number of the batch that runs, which the experts of the block read, too.
    batch: CurrentBatch = field(default_factory=CurrentBatch)


class Block:
    """One block from original to quantized."""

    def __init__(
        self, module: nn.Module, copies: DeviceCopies, groups: list[Group], experts: list[FusedExperts],
        calls: BlockCalls, settings: Settings, stored: torch.dtype,
    ) -> None:  # fmt: skip
        self.module, self.copies, self.groups, self.experts = module, copies, groups, experts
        self.calls, self.batch, self.settings, self.stored = calls, calls.batch, settings, stored
        # Fused experts may still be in their files, on the meta device.
        self.device = next(p.device for p in module.parameters() if not p.is_meta)
        self.exchange = Exchange(self.device)  # with the other ranks that work on the block
        # Hidden states are [..., tokens, features], token ids [..., tokens].
        hidden = [call.hidden for call in calls.original]
        own = len(hidden), sum(h.numel() // (h.shape[-1] if h.is_floating_point() else 1) for h in hidden)
        self.batches, self.tokens = (sum(counts) for counts in zip(*gathered(own), strict=True))  # of all ranks
        # Float32 weights [out, in] still to be rounded, by name within the block; transforms change them.
        self.targets = {n: weight_of(module, n).detach().float() for g in groups for n in g.names}
        self.stand_ins: dict[str, StandIn] = {}
        # Each solved layer as planned, or as the guard promoted it; None for one kept in 16 bit.
        self.solutions: dict[str, tuple[LayerPlan, Solved | None]] = {}
        self.learned: dict[str, Tensor] = {}  # [out, in] before rounding, of layers that reconstruction refines
        self.original_biases: dict[str, Tensor] = {}  # of layers whose bias was corrected
        self.module_calls: Counter[str] = Counter()  # of the parents of layers, in the reference pass
        self.remembered: list[nn.Module] = []
        self.stream = Stream()

    def run(self, calls: Sequence[Call]) -> list[Tensor]:
        """Runs the block on some calls; returns the hidden states after it, each where the state before it is."""
        outputs = []
        with fast_matmul(), paired_linears(self.device):
            for self.batch.index, call in enumerate(calls):
                on_device = moved(call, self.device)
                result = self.module(*on_device.args, **on_device.kwargs)
                outputs.append(call.output(result).to(call.hidden.device))
        return outputs

    def run_until_stopped(self, calls: Sequence[Call]) -> None:
        """Runs the block on some calls, each until a hook raises `Stop`."""
        with fast_matmul(), paired_linears(self.device):
            for self.batch.index, call in enumerate(calls):
                on_device = moved(call, self.device)
                with suppress(Stop):
                    self.module(*on_device.args, **on_device.kwargs)

    @contextmanager
    def hooked(self, hooks: Mapping[str, Callable[..., None]]) -> Iterator[None]:
        """Calls `hooks` with the arguments of the modules of these names, before they run, while open."""

        def before(hook: Callable[..., None]) -> Callable[..., None]:
            return lambda module, args, kwargs: hook(module, all_arguments(args, kwargs))

        modules = {name: self.module.get_submodule(name) for name in hooks}
        handles = (
            module.register_forward_pre_hook(before(hooks[name]), with_kwargs=True) for name, module in modules.items()
        )
        with removing(handles):
            yield

    def remember_finished(self) -> None:
        """Lets modules whose layers are all solved return their outputs of the next pass from then on."""
        unfinished = [experts.module for experts in self.experts if not experts.solved]
        for name, calls in self.module_calls.items():
            module = self.module.get_submodule(name)
            inside = [group for group in self.groups if any(n.startswith(f"{name}.") for n in group.names)]
            solved = not any(target.startswith(f"{name}.") for target in self.targets)
            once = calls == self.batches and all(group.calls == 1 for group in inside)
            # A module that is called twice a pass would need two memories; one with a forward of its own is watched.
            if not solved or not once or "forward" in vars(module) or any(m in unfinished for m in module.modules()):
                continue
            module.forward = self._once_a_batch(module.forward)
            self.remembered.append(module)
            for member in (member for group in inside for member in group.names):
                if member in self.stand_ins:
                    # The module remembers from here on, so its layers need not.
                    self.stand_ins[member].keeps = False

    def _once_a_batch(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        outputs: dict[int, Any] = {}

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if self.batch.index not in outputs:
                outputs[self.batch.index] = forward(*args, **kwargs)
            return outputs[self.batch.index]

        return remembered

    def forget(self) -> None:
        """Restores the original `forward` methods of modules that return their remembered outputs."""
        for module in self.remembered:
            del module.forward
        self.remembered.clear()

    def results(self) -> list[tuple[LayerPlan, Solved | None]]:
        """Returns each layer as planned, or as the guard promoted it, with its solution; None for a 16-bit layer.

        Puts the original modules back into the block.
        """
        self.forget()
        for name, stand_in in self.stand_ins.items():
            self.module.set_submodule(name, stand_in.original)
        linear = [self.solutions[name] for group in self.groups for name in group.names]
        return linear + [result for experts in self.experts for result in experts.results()]
