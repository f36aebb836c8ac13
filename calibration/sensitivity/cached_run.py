"""`CachedRun` caches a run of the model in one choice of formats, so that similar choices are cheap to measure.

Measuring the loss of one group runs the model once for every format. All these runs share two things with the first:

    the blocks before the group that differs      they are skipped; the last of them returns its cached output
    most of every activation after it             only the differences are multiplied (`fast_matmul`)

The only approximation is the rounding of *differences* to BF16. A choice that differs everywhere is measured as well,
but no faster than without a baseline.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from quant.calibration.placement import free_memory
from quant.calibration.sensitivity.divergence import Divergence, Later
from quant.calibration.sensitivity.switchable_model import CallCache, SwitchableModel
from quant.calibration.texts.rows import trial_rows
from quant.recipes.blocks import find_chains, removing
from quant.recipes.module_replacement import forwarding

# Rows run together up to this many tokens.
_BATCH_TOKENS = 4096
# Bytes of activations and of distributions that are cached, by type of device. Logits of a GPU take another share of
# the memory above a reserve: 4.3 GB for 4096 tokens of a vocabulary of 262,144, in which a search measures 500 times.
_ACTIVATIONS = {"cpu": 2 << 30, "cuda": 2 << 30}
_DISTRIBUTIONS = {"cpu": 1 << 30}
_LOGITS_SHARE, _RESERVE = 0.25, 16 << 30


class CachedRun:
    """Measures the mean divergence of choices on one text, int64 `[rows, seqlen]`; `by_row` runs rows one by one."""

    def __init__(
        self, switchable: SwitchableModel, divergence: Divergence, rows: torch.Tensor, *, by_row: bool = False
    ) -> None:
        self.switchable, self.divergence, self.rows = switchable, divergence, rows
        self.by_row = by_row
        self.batch_rows = 1 if by_row else max(_BATCH_TOKENS // rows.shape[1], 1)
        self.batches = rows.split(self.batch_rows)
        # The names of the model's blocks if they form a single chain, else none.
        self.chain: list[str] = []
        if switchable.blocks:
            few = trial_rows(rows)
            chains = find_chains(switchable.model, switchable.blocks, lambda: switchable.model(few))
            self.chain = chains[0] if len(chains) == 1 else []
        # Number of the block of each group; groups outside the chain count as the first block, so no block is skipped.
        self.block_index = {
            group: next((i for i, block in enumerate(self.chain) if group.startswith(f"{block}.")), 0)
            for group in switchable.groups
        }
        self.choice: dict[str, str] | None = None
        self.outputs: list[list[Any]] = []  # of each block of the chain, by batch
        self.caches: list[CallCache] = []
        self.references: list[Any] = []

    def start(self, choice: Mapping[str, str]) -> float:
        """Measures `choice` with a whole run, and caches that run."""
        self._remember_references()
        self.choice, self.outputs, self.caches = dict(choice), [], []
        self.switchable.formats.set(choice)
        budget = _ACTIVATIONS.get(self.rows.device.type, _ACTIVATIONS["cpu"])
        total = 0.0
        for i in range(len(self.batches)):
            # An equal share for each batch, so that the first ones do not use up the budget.
            cache = CallCache(budget // len(self.batches))
            with self.switchable.formats.caching(cache), self._collected() as outputs:
                total += self._start(i)()
            cache.writing = False
            self.outputs.append(outputs)
            self.caches.append(cache)
        return self._mean(total)

    @property
    def is_queued(self) -> bool:
        """Whether the device works on its own, so that `start_loss` returns before the loss is known."""
        return self.rows.device.type == "cuda"

    def loss(self, choice: Mapping[str, str]) -> float:
        """Measures `choice` from the first block that differs from the cached run; without one, with a whole run."""
        return self.start_loss(choice)()

    def start_loss(self, choice: Mapping[str, str]) -> Later:
        """Starts `loss`; the function that is returned waits for it. Another choice can be started before."""
        self._remember_references()
        self.switchable.formats.set(choice)
        if self.choice is None:
            return self._start_mean([self._start(i) for i in range(len(self.batches))])
        changed = [g for g in self.block_index if choice.get(g) != self.choice.get(g)]
        # Everything before the first changed block is exactly as in the cached run.
        first = min((self.block_index[g] for g in changed), default=0)
        sums = []
        for i in range(len(self.batches)):
            with self.switchable.formats.caching(self.caches[i]), self._skipped(first, self.outputs[i]):
                sums.append(self._start(i))
        return self._start_mean(sums)

    def loss_of(self, divergence: Divergence) -> float:
        """Returns the mean divergence of another model, which `divergence` runs, from the original of this one."""
        return self._mean(sum(self._start(i, divergence)() for i in range(len(self.batches))))

    def losses(self, choice: Mapping[str, str]) -> list[float]:
        """Returns the mean divergence of each batch in `choice`, with a whole run."""
        self._remember_references()
        self.switchable.formats.set(choice)
        losses = self.losses_of(self.divergence)
        self.switchable.formats.forget_inputs()
        return losses

    def losses_of(self, divergence: Divergence) -> list[float]:
        """Returns the mean divergence on each batch of another model, which `divergence` runs."""
        sums = [self._start(i, divergence)() for i in range(len(self.batches))]
        return [max(s, 0.0) / self.divergence.count(batch) for s, batch in zip(sums, self.batches, strict=True)]

    def _start(self, i: int, divergence: Divergence | None = None) -> Later:
        divergence = divergence or self.divergence
        return divergence.measure(self.batches[i], self.references[i], i * self.batch_rows)

    def _mean(self, total: float) -> float:
        self.switchable.formats.forget_inputs()
        # Rounding may make a distance of zero slightly negative.
        return max(total, 0.0) / self.divergence.count(self.rows)

    def _start_mean(self, sums: Sequence[Later]) -> Later:
        """Returns a function that waits for the sums of all batches, and returns their mean."""
        self.switchable.formats.forget_inputs()
        return lambda: self._mean(sum(wait() for wait in sums))

    def _remember_references(self) -> None:
        if self.references:
            return
        # Distributions of all positions in FP32, computed once if they fit, else again in every measurement.
        vocabulary = getattr(getattr(self.switchable.model, "config", None), "vocab_size", 0)
        room = _DISTRIBUTIONS.get(self.rows.device.type, _DISTRIBUTIONS["cpu"])
        if self.is_queued:
            # Rows that run one by one are measured once or twice.
            room = 0 if self.by_row else int(_LOGITS_SHARE * (free_memory(self.rows.device) - _RESERVE))
        keep = 4 * self.rows.numel() * vocabulary <= room
        self.switchable.formats.set({})
        self.references = [self.divergence.reference(batch, keep=keep) for batch in self.batches]

    @contextmanager
    def _collected(self) -> Iterator[list[Any]]:
        """Collects the outputs of the chain's blocks, in their order."""
        outputs: list[Any] = []
        blocks = [self.switchable.model.get_submodule(name) for name in self.chain]
        with removing(block.register_forward_hook(lambda module, args, out: outputs.append(out)) for block in blocks):
            yield outputs

    @contextmanager
    def _skipped(self, first: int, outputs: list[Any]) -> Iterator[None]:
        """Makes blocks of the chain before number `first` return `outputs` instead of computing them, while open."""
        with ExitStack() as stack:
            for name, output in zip(self.chain[:first], outputs, strict=False):
                constant = partial(lambda result, *args, **kwargs: result, output)
                stack.enter_context(forwarding(self.switchable.model.get_submodule(name), constant))
            yield
