"""A Trainer on two processes (DDP over gloo) resumes from its checkpoints to the bit: QAT, distillation and LoRA."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from children import free_port, run_ranks

import quant

pytest.importorskip("accelerate", reason="the extra hf")
pytestmark = pytest.mark.slow

ROWS = torch.randint(0, 64, (8, 24), generator=torch.Generator().manual_seed(7))


def trainer(kind: str, out: str) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        out, max_steps=4, save_steps=2, per_device_train_batch_size=1, learning_rate=1e-3, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no", lr_scheduler_type="constant", ddp_backend="gloo",
    )  # fmt: skip
    model, data = tiny_models.llama(gain=2.0).requires_grad_(True), [{"input_ids": r, "labels": r} for r in ROWS]
    if kind == "lora":
        import peft

        base = quant.quantize(model, "nvfp4a16", effort=0).model
        torch.manual_seed(1)
        model = peft.get_peft_model(base, quant.lora(peft.LoraConfig(r=4, target_modules="all-linear"), base))
    else:
        quant.prepare_qat(model, "nvfp4a16")
    if kind == "qad":
        teacher = tiny_models.llama(gain=2.0, seed=1)
        return quant.DistillTrainer(model=model, teacher=teacher, args=arguments, train_dataset=data)
    return Trainer(model, arguments, train_dataset=data)


def joined(rank: int, folder: str, kind: str, port: int) -> None:
    """One of two processes; the first writes the parameters of a run without a break, and of one that went on."""
    torch.set_num_threads(1)
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in here.items()} | {"ACCELERATE_USE_CPU": "true"}
    whole = trainer(kind, folder)
    start = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    again = trainer(kind, folder)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    if rank == 0:
        states = [{name: p.detach() for name, p in each.model.named_parameters()} for each in (whole, again)]
        torch.save([start, *states], f"{folder}/states")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["qat", "qad", "lora"])
def test_two_processes_resume(kind: str, tmp_path: Path) -> None:
    if kind == "lora":
        pytest.importorskip("peft", reason="the extra training")
    port = free_port()
    run_ranks(joined, (str(tmp_path), kind, port), 2)
    start, whole, again = torch.load(tmp_path / "states", weights_only=True)
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in whole.items())
