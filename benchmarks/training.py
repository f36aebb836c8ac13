"""This benchmark trains quantized models, by distillation from the original, and measures what it gains and takes.

Each row starts from a quantized SmolLM2-135M, trains it for the same steps on the same rows with the same loss and the
same loop, and compares it with the original on WikiText-2's test text, on Python source and on prose about Python,
which nothing was trained on. Training rows are WikiText-2's validation text, and with --own rows that the model wrote
itself; `--text mix` trains and calibrates on the package's mixture instead.

    PTQ    the start: post-training quantization by SOLVER
    QAD    distillation from that start
    ModelOpt, torchao    their fake quantization, trained by the same loop; rows of packages that are not installed are
                         left out

`ms/step` is the median without the first three steps; `replayed` says whether the loop could record a step in a CUDA
graph and replay it, which it tries of every row. On a GPU the models compute in BF16 by autocast, in training, but
torchao's: it refuses to, and computes in FP32, so its `ms/step` is no comparison.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from _peers import _modelopt_config
from _table import machine, show, versions
from _texts import SEQLEN, python_rows, reference_rows, wikitext_rows
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.calibration.session import Session
from quant.calibration.texts.mixture import mixed_text
from quant.calibration.texts.self_written import generate_rows
from quant.evaluation.evaluate import evaluate
from quant.training.train_loop import Hyperparameters, Trained, train, train_only_rounded, usual_rate

TITLE = "Training under the deployed rounding"


def modelopt(model: nn.Module, preset: str, rows: torch.Tensor) -> None:
    """ModelOpt's fake quantization; the preset's weights, and inputs unless `preset` is weight-only."""
    import modelopt.torch.quantization as mtq

    config = _modelopt_config("NVFP4_DEFAULT_CFG" if preset == "nvfp4" else "NVFP4_DEFAULT_CFG -inputs")
    mtq.quantize(model, config, lambda m: [m(input_ids=row[None].to(m.device)) for row in rows])


def torchao(model: nn.Module, preset: str, rows: torch.Tensor) -> None:
    """torchao's fake quantization of NVFP4, of linear layers but the head.

    Its product needs FP4 units; without them the same rounded operands are multiplied in their own dtype.
    """
    import torchao.prototype.qat.nvfp4 as implementation
    from torchao.prototype.qat import NVFP4FakeQuantizeConfig
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig

    def product(x: Any, weight: Any, _: Any, bias: torch.Tensor | None) -> torch.Tensor:
        y = x.dequantize(x.orig_dtype) @ weight.dequantize(weight.orig_dtype)
        return y if bias is None else y + bias

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0):
        implementation._addmm_nvfp4_dispatch = product
    fake = NVFP4FakeQuantizeConfig(use_per_tensor_scale=True)
    config = QATConfig(activation_config=fake, weight_config=fake, step="prepare")
    quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and not name.endswith("lm_head"))


def written(teacher: nn.Module, tokenizer: Any, count: int, path: Path | None) -> torch.Tensor:
    """`[count, SEQLEN]` token ids that the model wrote, from `path` if it is there; else they are kept there."""
    if path is not None and path.exists():
        return load_file(path)["own"][:count].long()
    rows = generate_rows(teacher, tokenizer, samples=count, seqlen=SEQLEN)
    if path is not None:
        save_file({"own": rows.int().contiguous()}, path.with_suffix(".partial"))
        path.with_suffix(".partial").replace(path)
    return rows


PEERS: dict[str, Callable[[nn.Module, str, torch.Tensor], None]] = {"modelopt": modelopt, "torchao": torchao}


@click.command(help=__doc__)
@click.option("--model", default="smollm2-135m", show_default=True)
@click.option("--preset", default="nvfp4", show_default=True, type=click.Choice(["nvfp4", "nvfp4a16"]))
@click.option("--solver", "solvers", default="gptq", show_default=True, help="Starts, separated by commas.")
@click.option("--scales", default="auto", show_default=True, help="recomputed, frozen, learned or auto.")
@click.option("--steps", default=300, show_default=True)
@click.option("--batch", default=8, show_default=True, help="Rows a step.")
@click.option("--seqlen", default=SEQLEN, show_default=True)
@click.option(
    "--rate", "rates", default="auto", show_default=True, help="Learning rates, or auto, separated by commas."
)
@click.option("--calibration-rows", default=8, show_default=True)
@click.option("--calibration-own", default=0, show_default=True, help="Own rows to calibrate on beside those.")
@click.option("--text", default="wikitext", show_default=True, type=click.Choice(["wikitext", "mix"]))
@click.option("--text-rows", default=98, show_default=True, help="Rows of that text to train on.")
@click.option("--text-times", default=1, show_default=True, help="Copies of each of them.")
@click.option("--own", default=0, show_default=True, help="Training rows that the model writes itself.")
@click.option("--own-rows", type=click.Path(path_type=Path), help="Keep those rows here, and read them in later runs.")
@click.option("--rows", default=8, show_default=True, help="Rows to evaluate on, of each text.")
@click.option("--record/--no-record", default=True, help="Let the loop record a step in a CUDA graph and replay it.")
@click.option("--compile", "compiled", is_flag=True, help="Compile the decoder's layers, the teacher's too.")
@click.option("--peers/--no-peers", default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
def main(
    model: str, preset: str, solvers: str, scales: str, steps: int, batch: int, seqlen: int, rates: str,
    calibration_rows: int, calibration_own: int, text: str, text_rows: int, text_times: int, own: int,
    own_rows: Path | None, rows: int, record: bool, compiled: bool, peers: bool, json_path: Path | None,
) -> None:  # fmt: skip
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = quant.open_model(model)
    tokenizer, teacher = source.load_tokenizer(), source.model.to(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    teacher = teacher.to(dtype).requires_grad_(False)
    for layer in teacher.model.layers if compiled else ():  # type: ignore[union-attr]
        layer.compile()

    def drawn(count: int) -> torch.Tensor:
        if text == "wikitext":
            return wikitext_rows("calibration", model, tokenizer, count)
        plan = quant.make_plan(teacher, preset, solver="gptq")
        return mixed_text(teacher, plan, tokenizer, Session.on(device), samples=count, seqlen=SEQLEN)[0]

    calibration, material = drawn(calibration_rows), drawn(text_rows).repeat(text_times, 1)
    if own:
        own_text = written(teacher, tokenizer, own, own_rows)
        material = torch.cat([material, own_text])
        calibration = torch.cat([calibration, own_text[:calibration_own]])
    material = material.unflatten(1, (-1, seqlen)).flatten(0, 1)
    texts = {
        "WikiText-2": wikitext_rows("eval", model, tokenizer, rows),
        "Python source": python_rows(tokenizer, rows, "report"),
        "prose on Python": reference_rows(tokenizer, rows, "report"),
    }
    table: list[dict[str, Any]] = []
    notes: list[str] = []

    def student() -> Any:
        return quant.open_model(model).model.to(device=device, dtype=dtype).requires_grad_(True)

    def learn(module: nn.Module, rate: float | None, in_autocast: bool = True) -> Trained:
        for layer in module.model.layers if compiled else ():  # type: ignore[union-attr]
            layer.compile()
        rate = usual_rate(module, rounds_inputs=preset == "nvfp4") if rate is None else rate

        def loss(ids: torch.Tensor) -> torch.Tensor:
            with nullcontext() if in_autocast else torch.autocast(device, enabled=False):
                return quant.distill(module, teacher, ids)

        return train(
            module, loss, material, Hyperparameters(steps, batch, rate), record=record,
            progress=lambda done, _, loss: click.echo(f"{done} {loss:.4f}", err=True) if done % 5 == 0 else None,
        )  # fmt: skip

    def add(name: str, module: nn.Module, seconds: float, trained: Trained | None) -> None:
        losses = {f"KL {text}": evaluate(module, ids, teacher).kl for text, ids in texts.items()}
        step = None if trained is None else 1e3 * statistics.median(trained.seconds[3:] or trained.seconds)
        loss = None if trained is None else statistics.mean(trained.losses[-10:])
        table.append({"configuration": name, **losses, "s": seconds, "ms/step": step, "loss": loss})
        table[-1]["replayed"] = "" if trained is None else "yes" if trained.replayed else "no"
        click.echo(str(table[-1]), err=True)

    learning_rates = [(rate, None if rate == "auto" else float(rate)) for rate in rates.split(",")]
    for solver in solvers.split(","):
        module = student()
        started = time.perf_counter()
        quant.quantize(module, preset, calibration, solver=solver, device=device)
        add(f"{preset} PTQ {solver}", module, time.perf_counter() - started, None)
        for name, rate in learning_rates:
            module = student()
            started = time.perf_counter()
            chosen = None if scales == "auto" else scales
            quant.prepare_qat(module, preset, calibration, solver=solver, scales=chosen, device=device)
            train_only_rounded(module)
            trained = learn(module, rate)
            quant.pack(module)
            add(f"{preset} QAD {solver}, {scales} scales, {name}", module, time.perf_counter() - started, trained)
    for name, prepare in PEERS.items() if peers else ():
        if find_spec(name) is None or (name == "torchao" and preset != "nvfp4"):
            continue  # torchao has no weight-only training
        try:
            for title, rate in learning_rates:
                module = student().float()
                started = time.perf_counter()
                prepare(module, preset, calibration)
                add(f"{preset} {name} PTQ", module, time.perf_counter() - started, None)
                for key, parameter in module.named_parameters():
                    parameter.requires_grad_(key.endswith("_proj.weight"))
                trained = learn(module, rate, in_autocast=name != "torchao")
                add(f"{preset} {name} QAD, {title}", module, time.perf_counter() - started, trained)
        except Exception as error:  # a peer's own code may fail in any way; our rows are still worth showing
            traceback.print_exc()
            notes.append(f"{name} failed: {type(error).__name__} {' '.join(str(error).split())[:200]}")
    notes.insert(0, f"{steps} steps of {batch} x {seqlen} tokens; {len(material)} rows of text, {own} the model's own.")
    header = machine() | versions("transformers", "nvidia-modelopt", "torchao")
    show(TITLE, header, table, notes, json_path=json_path)


if __name__ == "__main__":
    main()
