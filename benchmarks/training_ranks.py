"""This benchmark trains a Llama in fp8_block on several GPUs under FSDP2, whose all-gathers carry BF16 or FP8.

It counts the bytes that a rank gives to all-gathers in a step, times the steps, and compares the losses: with each
other, and with those of one process that takes all rows. A second run with BF16 shows how far two runs of the same
arithmetic differ, for PyTorch adds gradients of embeddings in any order on a GPU. Without a GPU, processes meet through
gloo, in a smaller model.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing
from _llama import random_llama
from _table import machine, show, versions

import quant

_ROWS, _LENGTH = 4, 1024  # of a step, on all ranks together
_WAYS = ("BF16", "BF16, again", "FP8", "one process")


@click.command(help=__doc__)
@click.option("--ranks", default=2, show_default=True, help="A divisor of four.")
@click.option("--steps", default=8, show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(ranks: int, steps: int, json_path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, steps, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        runs = {way: torch.load(f"{folder}/{way}") for way in _WAYS}
    one, bf16 = runs["one process"], runs["BF16"]
    rows = [_row(way, run, one, bf16) for way, run in runs.items()]
    same = bf16["losses"] == runs["FP8"]["losses"]
    notes = [
        f"{ranks} ranks, {steps} steps of {_ROWS * _LENGTH} tokens, two Llama layers of width {one['hidden']}; "
        "bytes that a rank sends in a step.",
        f"Losses with FP8 and BF16 gathers are {'the same bits' if same else 'different'}.",
    ]
    show("FP8 all-gather under FSDP2", machine() | versions("triton"), rows, notes, json_path=json_path)


def _row(way: str, run: dict[str, Any], one: dict[str, Any], bf16: dict[str, Any]) -> dict[str, Any]:
    """A row of the table: a run, beside that of one process and that with gathers in BF16."""
    differences = [abs(a - b) / b for a, b in zip(run["losses"], one["losses"], strict=True)]
    return {
        "all-gather": way,
        "ms": run["ms"],
        "MB sent": run["bytes"] / 1e6,
        "× BF16": run["bytes"] / bf16["bytes"],
        "last loss": f"{run['losses'][-1]:.5f}",
        "largest difference from one process": f"{max(differences):.1e}",
    }


def _rank(rank: int, ranks: int, steps: int, folder: str) -> None:
    """One of the processes: trains with both gathers; then the first trains alone."""
    on_gpu = torch.cuda.device_count() >= ranks
    if on_gpu:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("nccl" if on_gpu else "gloo", f"file://{folder}/meet", rank=rank, world_size=ranks)
    for way in _WAYS:
        if way == "one process" and rank:
            continue
        run = _trained(way, rank, ranks, steps)
        if rank == 0:
            torch.save(run, f"{folder}/{way}")
    dist.barrier()
    dist.destroy_process_group()


def _trained(way: str, rank: int, ranks: int, steps: int) -> dict[str, Any]:
    """Losses of all rows, milliseconds and bytes of a step; AdamW on FP32 masters, whose BF16 copies are trained."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    hidden = 4096 if torch.cuda.is_available() else 512
    model = random_llama(2, hidden=hidden, vocabulary=1024, positions=_LENGTH).float().requires_grad_(True).train()
    device = next(model.parameters()).device
    tokens = torch.randint(0, 1024, (steps, _ROWS, _LENGTH), generator=torch.Generator().manual_seed(0)).to(device)
    quant.to_low_precision_training(model, "fp8_block", all_gather_fp8=way == "FP8")
    sent = [0]
    run: Any = model
    if way == "one process":
        # As FSDP2 shows layers their weights: copies in BF16.
        run = _InBF16(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = dist.device_mesh.init_device_mesh(device.type, (ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        tokens = tokens.chunk(ranks, dim=1)[rank]
        sent = _counted_gathers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    losses, times = [], []
    for rows in tokens:
        begun = time.perf_counter()
        loss = run(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if way != "one process":
            dist.all_reduce(mean)
            mean /= ranks
        losses.append(mean.item())
        times.append(1e3 * (time.perf_counter() - begun))
    return {"losses": losses, "ms": statistics.median(times), "bytes": sent[0] / steps, "hidden": hidden}


class _InBF16:
    """Calls a model by BF16 copies of its parameters, whose gradients come back in FP32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, **inputs: Any) -> Any:
        copies = {name: parameter.to(torch.bfloat16) for name, parameter in self.model.named_parameters()}
        return torch.func.functional_call(self.model, copies, kwargs=inputs)


def _counted_gathers() -> list[int]:
    """The number of bytes that this rank gives to all-gathers from now on, as the only item of a list."""
    sent = [0]
    # PyTorch 2.13 has renamed the collective.
    for name in ("all_gather_single", "all_gather_into_tensor"):
        gather = getattr(dist, name, None)
        gather = getattr(gather, "counts", gather)  # of the run before

        def counted(*args: Any, gather: Any = gather, **kwargs: Any) -> Any:
            tensor = kwargs.get("input_tensor", kwargs.get("input", args[1] if len(args) > 1 else None))
            sent[0] += tensor.numel() * tensor.element_size()
            return gather(*args, **kwargs)

        if gather is not None:
            counted.counts = gather  # type: ignore[attr-defined]
            setattr(dist, name, counted)
    return sent


if __name__ == "__main__":
    main()
