"""This benchmark trains a small diffusion model on drawn shapes and quantizes it by every format and solver.

The model is diffusers' `DiTTransformer2DModel`, or with `--model unet` its `UNet2DConditionModel`, conditional on one
of eight classes (a disc, square, ring or cross, small or large, at a random place), trained by flow matching: at a time
t between 0 and 1 it sees `(1 - t) x + t noise` and predicts `noise - x`. Images come from 20 steps of Euler.

    noise error    ‖v - v₀‖ / ‖v₀‖ of the predicted velocity, on calls of trajectories that calibrated nothing
    PSNR           of images of the same seeds, against the original's, in dB

Calibration calls are those of the original's own trajectories. ModelOpt and torchao are measured in the same job where
they are installed. ModelOpt's NVFP4 has no code for a CPU and rounds by ours there (`_peers.modelopt_on_cpu`).
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from _peers import _modelopt_config, modelopt_on_cpu
from _table import machine, show, versions
from torch import Tensor, nn

import quant

SIDE, CLASSES, STEPS = 16, 8, 20
OURS = [
    *(("nvfp4", solver) for solver in ("rtn", "gptq", "awq+gptq", "lowrank:32", "kfac", "lowrank:32+kfac")),
    *((name, solver) for name in ("mxfp8", "fp8", "fp8_channel", "int8") for solver in ("rtn", "gptq", "kfac")),
    ("fp8_channel", "lowrank:32+gptq"),
]
MODELOPT = {
    "nvfp4": ("NVFP4_DEFAULT_CFG", "NVFP4_AWQ_LITE_CFG", "NVFP4_SVDQUANT_DEFAULT_CFG"),
    "fp8": ("FP8_DEFAULT_CFG",),
    "fp8_channel": ("FP8_PER_CHANNEL_PER_TOKEN_CFG",),
}
Call = dict[str, Any]


def shapes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images `[count, 1, 16, 16]` in [-1, 1] with soft edges, and their classes."""
    classes = torch.randint(CLASSES, (count,), generator=generator)
    kind, radius = classes % 4, torch.where(classes < 4, 2.5, 5.0)
    centre = torch.rand(count, 2, generator=generator) * 6 + 4.5
    grid = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")).float()
    offset = (grid[None] - centre[:, :, None, None]).abs()
    disc, square = offset.square().sum(1).sqrt(), offset.amax(1)
    r = radius[:, None, None]
    inside = torch.stack([disc - r, square - r, (disc - r).abs() - 1, torch.maximum(square - r, offset.amin(1) - 1)], 1)
    chosen = inside[torch.arange(count), kind]
    return (-2 * chosen).tanh()[:, None], classes


def dit(width: int, layers: int) -> nn.Module:
    """An untrained transformer."""
    import diffusers

    return diffusers.DiTTransformer2DModel(
        num_attention_heads=width // 32, attention_head_dim=32, in_channels=1, out_channels=1, num_layers=layers,
        sample_size=SIDE, patch_size=2, num_embeds_ada_norm=CLASSES, norm_num_groups=1,
    )  # fmt: skip


def unet(width: int, layers: int) -> nn.Module:
    """An untrained UNet as SDXL's, whose text is one token: the class."""
    import diffusers

    return diffusers.UNet2DConditionModel(
        sample_size=SIDE, in_channels=1, out_channels=1, block_out_channels=(width, 2 * width), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(width // 32, width // 16), transformer_layers_per_block=layers, norm_num_groups=8,
        use_linear_projection=True, cross_attention_dim=CLASSES,
    )  # fmt: skip


def call_of(model: nn.Module, x: Tensor, t: Tensor, classes: Tensor) -> Call:
    """The arguments of a call of either model."""
    if hasattr(model, "pos_embed"):
        return {"hidden_states": x, "timestep": t, "class_labels": classes}
    token = nn.functional.one_hot(classes, CLASSES)[:, None].to(x.dtype)
    return {"sample": x, "timestep": t, "encoder_hidden_states": token}


def train(model: nn.Module, width: int, seconds: float, batch: int, device: str) -> float:
    """Trains for a time; returns the mean loss of the last hundred steps."""
    generator = torch.Generator().manual_seed(0)
    # A wider model diverges under the rate of a narrow one.
    rate = 2e-3 * min(1.0, 128 / width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0, fused=device != "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    losses: list[float] = []
    started = time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (len(losses) + 1) / 50) * math.cos(math.pi / 2 * spent / seconds)
        image, classes = shapes(batch, generator)
        noise, t = torch.randn(image.shape, generator=generator), torch.rand(batch, generator=generator)
        noisy = torch.lerp(image, noise, t[:, None, None, None])
        velocity = model(**call_of(model, noisy.to(device), 1000 * t.to(device), classes.to(device))).sample
        loss = (velocity - (noise - image).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    torch.set_float32_matmul_precision("highest")
    click.echo(f"trained {len(losses)} steps of {batch} images", err=True)
    return sum(losses[-100:]) / len(losses[-100:])


def denoise(model: nn.Module, count: int, seed: int, device: str, record: list[Call] | None = None) -> Tensor:
    """Returns images of seeds; adds the calls of the model to `record`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, SIDE, SIDE, generator=generator).to(device)
    classes = (torch.arange(count) % CLASSES).to(device)
    with torch.no_grad():
        for step in range(STEPS):
            t = torch.full((count,), 1000 * (1 - step / STEPS), device=device)
            call = call_of(model, x, t, classes)
            if record is not None:
                record.append(call)
            x = x - model(**call).sample / STEPS
    return x


def measure(
    model: nn.Module, calls: Iterable[Call], truth: list[Tensor], images: Tensor, device: str
) -> dict[str, float]:
    """The noise error over all calls, the worst at a single step, and the PSNR of images."""
    with torch.no_grad():
        wrong = [
            (float((model(**call).sample - v).square().sum()), float(v.square().sum()))
            for call, v in zip(calls, truth, strict=True)
        ]
    mse = float((denoise(model, len(images), 3, device).clamp(-1, 1) - images.clamp(-1, 1)).square().mean())
    return {
        "noise error %": round(100 * math.sqrt(sum(w for w, _ in wrong) / sum(v for _, v in wrong)), 3),
        "worst step %": round(100 * max(math.sqrt(w / v) for w, v in wrong), 3),
        "PSNR dB": round(10 * math.log10(4 / mse), 2),
    }


def modelopt(name: str, preset: str) -> Callable[[nn.Module, list[Call]], None]:
    """A preset of ModelOpt on the layers that we quantize in the same format."""

    def run(model: nn.Module, calls: list[Call]) -> None:
        import modelopt.torch.quantization as mtq

        names, config = _quantized(model, name, calls), _modelopt_config(preset)
        # Presets leave layers out by the names of other models' heads, such as proj_out.
        config["quant_cfg"] = [entry for entry in config["quant_cfg"] if not _leaves_out(entry, names)]
        # It would round the inputs of norms, too.
        others = [path for path, layer in model.named_modules() if not list(layer.children()) and path not in names]
        config["quant_cfg"] += [{"quantizer_name": f"{path}.*", "enable": False} for path in others]
        with torch.no_grad():
            mtq.quantize(model, config, lambda model: [model(**call) for call in calls])

    return run


def _leaves_out(entry: dict[str, Any], names: set[str]) -> bool:
    pattern = entry.get("quantizer_name", "*")
    is_off = entry.get("enable") is False and "parent_class" not in entry and pattern.strip("*") != ""
    return is_off and any(fnmatch(f"{name}.weight_quantizer", pattern) for name in names)


def torchao(config: str, name: str, **options: str) -> Callable[[nn.Module, list[Call]], None]:
    """A configuration of torchao on the linear layers that we quantize; options name its classes."""

    def run(model: nn.Module, calls: list[Call]) -> None:
        from torchao import quantization

        names = _quantized(model, name, calls)
        given = {key: getattr(quantization, value)() for key, value in options.items()}

        def filter_fn(layer: nn.Module, path: str) -> bool:
            return isinstance(layer, nn.Linear) and path in names

        quantization.quantize_(model, getattr(quantization, config)(**given), filter_fn=filter_fn)

    return run


def _quantized(model: nn.Module, name: str, calls: list[Call]) -> set[str]:
    """Returns the names of the layers that we quantize in a format."""
    return {layer.name for layer in quant.quantize(copy.deepcopy(model), name, calls[:1], solver="rtn").plan.quantized}


@click.command()
@click.option("--model", "kind", type=click.Choice(["dit", "unet"]), default="dit", show_default=True)
@click.option("--seconds", default=150.0, show_default=True, help="Time for training.")
@click.option("--width", default=128, show_default=True)
@click.option("--layers", default=3, show_default=True)
@click.option("--batch", default=64, show_default=True, help="Images of a step of training.")
@click.option("--images", "images_each", default=0, help="For calibration, error and PSNR; 16, 32 and 64 without.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--weights", type=click.Path(path_type=Path), help="File of trained weights: read, or else written.")
@click.option("--only", default="", help="Only rows of which this is a part, such as nvfp4 or ModelOpt.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the same facts.")
def main(
    kind: str, seconds: float, width: int, layers: int, batch: int, images_each: int, device: str,
    weights: Path | None, only: str, json_path: Path | None,
) -> None:  # fmt: skip
    """Trains the model, quantizes it by each format and solver, and prints the table."""
    torch.manual_seed(0)
    model = (dit if kind == "dit" else unet)(width, layers).to(device)
    trained = f"trained for {seconds:g} s"
    if weights is not None and weights.is_file():
        model.load_state_dict(torch.load(weights))
    else:
        trained += f" to a loss of {train(model, width, seconds, batch, device):.3f}"
        if weights is not None:
            torch.save(model.state_dict(), weights)
    model.eval().requires_grad_(False)
    calibration: list[Call] = []
    held_out: list[Call] = []
    denoise(model, images_each or 16, 1, device, calibration)
    denoise(model, images_each or 32, 2, device, held_out)
    with torch.no_grad():
        truth = [model(**call).sample for call in held_out]
    images = denoise(model, images_each or 64, 3, device)

    runs: list[tuple[str, str, Callable[[nn.Module, list[Call]], Any]]] = [
        (name, f"ours, {solver}", lambda each, calls, n=name, s=solver: quant.quantize(each, n, calls, solver=s))
        for name, solver in OURS
    ]
    if find_spec("modelopt"):
        if device == "cpu":
            modelopt_on_cpu()
        runs += [
            (name, f"ModelOpt, {preset}", modelopt(name, preset))
            for name, presets in MODELOPT.items()
            for preset in presets
        ]
    if find_spec("torchao"):
        fp8, int8 = (f"{kind}DynamicActivation{kind}WeightConfig" for kind in ("Float8", "Int8"))
        runs += [
            ("int8", "torchao, Int8DynamicActivationInt8Weight", torchao(int8, "int8")),
            ("fp8_channel", "torchao, per row", torchao(fp8, "fp8_channel", granularity="PerRow")),
        ]
    rows = []
    for name, how, run in runs:
        if only not in f"{name} {how}":
            continue
        changed, started = copy.deepcopy(model), time.perf_counter()
        try:
            run(changed, calibration)
            spent = time.perf_counter() - started
            figures = measure(changed, held_out, truth, images, device)
        except Exception as error:  # a peer that does not run here is a row too
            rows.append(
                {"format": name, "method": how, "noise error %": None, "worst step %": None, "PSNR dB": None, "s": None}
            )
            click.echo(f"{name} {how}: {type(error).__name__}: {error}", err=True)
            continue
        rows.append({"format": name, "method": how, **figures, "s": round(spent, 1)})
        click.echo(rows[-1], err=True)
    if not rows:  # only trained
        return
    parameters = sum(parameter.numel() for parameter in model.parameters())
    header = {**machine(), **versions("diffusers", "nvidia-modelopt", "torchao")}
    notes = [f"{parameters / 1e6:.2f} M parameters, {trained}."]
    show(f"A diffusion model ({kind}), quantized", header, rows, notes, json_path)


if __name__ == "__main__":
    main()
