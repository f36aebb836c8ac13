"""This benchmark times a prefill through decoder blocks of an 8B model: AOTInductor and eager, in FP8 and BF16.

    python benchmarks/aoti.py [--layers 4] [--tokens 4096] [--packages FOLDER] [--json FILE]
    python benchmarks/aoti.py --decoder CHECKPOINT [--device cuda]

The second command makes a package of a whole decoder with a cache of 512 tokens, in FP32 for a CPU, in BF16 for a GPU.
It prints the time and the processor time that it takes, compilers included and with no cache of Inductor's, the
package's size, and how long the package and the model itself read 256 tokens and write 64. The package does so for one
row and for eight, whose tokens a second are those of all rows. Both are fed the model's own greedy tokens: of 64 steps
it prints how many have the same likeliest token, at how many each side's likeliest token is among the other's five
likeliest ("near ties"), and the mean KL.

The blocks are Llama 3 8B's (hidden 4096, 32 heads over 8 KV heads of 128, MLP 14336), with random weights. FP8 is the
preset `fp8`: E4M3 weights and static input scales, one a tensor, calibrated on the input itself. "FP8 attention" also
rounds q, k and v to E4M3 and attends with our kernel, which lies in the package. Packages are made in processes of
their own, side by side; then everything is timed in one process in turns, by the median over CUDA events. A package
that is not there after `--deadline` seconds is left out, and said to be. Those in `--packages` are kept for next time;
they hold kernels and no weights, which the loaded package shares with the module.

Errors are norms of differences over the norm, against the same blocks in FP32 arithmetic on the same BF16 weights.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from _table import machine, show, versions
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

import quant
from quant.export.aoti.package import AotiSession, export_aoti, export_aoti_decoder
from quant.export.engines.check_engine import DecodingRun, compare, forced_run, reference_run
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.generate.fused_decoder import Decoder, decoder_refusal
from quant.kernels.attention.forward import fp8_attention
from quant.kernels.linear.quant_linear import QuantLinear
from quant.kernels.linear.rounded_products import round_to_e4m3
from quant.recipes.blocks import cache_of

HIDDEN, HEADS, KV_HEADS, DIM, MLP = 4096, 32, 8, 128, 14336
PROMPT, NEW = 256, 64  # tokens that a decoder reads and writes
BATCHES = 1, 8  # rows of a package
KINDS = ("BF16", "FP8", "FP8 attention")
TITLE = "Prefill of 8B-shaped blocks"
WITHOUT_WEIGHTS = {"aot_inductor.package_constants_in_so": False}


class Block(nn.Module):
    """One decoder block; `scales` `[3]` of q, k and v turns on FP8 attention."""

    scales: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (HEADS * DIM, HIDDEN), "k": (KV_HEADS * DIM, HIDDEN), "v": (KV_HEADS * DIM, HIDDEN)}
        sizes |= {"o": (HIDDEN, HEADS * DIM), "gate": (MLP, HIDDEN), "up": (MLP, HIDDEN), "down": (HIDDEN, MLP)}
        for name, (rows, columns) in sizes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))
        self.norms = nn.Parameter(torch.ones(2, HIDDEN))
        self.register_buffer("scales", torch.ones(3))
        self.fp8_attention = False
        self.measured: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        h = rms_norm(x, (HIDDEN,), self.norms[0], 1e-5)
        heads = [y.unflatten(-1, (-1, DIM)).transpose(1, 2) for y in (self.q(h), self.k(h), self.v(h))]
        q, k, v = rotate(heads[0], rotation), rotate(heads[1], rotation), heads[2]
        if self.measured is not None:
            self.measured.copy_(torch.stack([y.abs().amax().float() for y in (q, k, v)]))
        x = x + self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        h = rms_norm(x, (HIDDEN,), self.norms[1], 1e-5)
        return x + self.down(silu(self.gate(h)) * self.up(h))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not self.fp8_attention:
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        format = FORMATS["fp8"]
        q, k, v = (round_to_e4m3(y, format, scale)[0] for y, scale in zip((q, k, v), self.scales.unbind(), strict=True))
        return fp8_attention(q, k, v, self.scales, causal=True, dtype=torch.bfloat16)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """RoPE: `rotation` is [2, tokens, dim / 2], cosines and sines."""
    a, b = x.chunk(2, -1)
    cosine, sine = rotation.to(x.dtype).unbind()
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


class Stack(nn.Module):
    def __init__(self, layers: int, tokens: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        angles = torch.arange(tokens)[:, None] * 500000.0 ** (-torch.arange(0, DIM, 2) / DIM)
        self.register_buffer("rotation", torch.stack([angles.cos(), angles.sin()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.rotation)
        return x


def build(kind: str, layers: int, tokens: int) -> tuple[Stack, torch.Tensor]:
    """The model of one kind and its input, the same in every process."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        model = Stack(layers, tokens).to(torch.bfloat16).requires_grad_(False)
        for block in model.blocks:
            block.scales = torch.ones(3)
        x = torch.randn(1, tokens, HIDDEN, dtype=torch.bfloat16)
    if kind != "BF16":
        to_fp8(model, x)
    for block in model.blocks:
        block.fp8_attention = kind == "FP8 attention"
    return model, x


def to_fp8(model: Stack, x: torch.Tensor) -> None:
    """Measures inputs in one forward pass, then replaces every linear."""
    format, amax, hooks = FORMATS["fp8"], {}, []
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        note = lambda _, args, name=name: amax.__setitem__(name, args[0].abs().amax().float())  # noqa: E731
        hooks.append(module.register_forward_pre_hook(note))
    for block in model.blocks:
        block.measured = torch.empty(3, device="cuda")
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    for block in model.blocks:
        block.scales, block.measured = block.measured / format.element.max, None
    for name, module in linears.items():
        owner, _, last = name.rpartition(".")
        weight = quantize(module.weight, format, name=name)
        setattr(model.get_submodule(owner), last, QuantLinear(weight, None, format, amax[name] / format.element.max))


def milliseconds(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of each function; they take turns, so that the clock's drift hits all of them."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 3):
        for name, function in functions.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                samples[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in samples.items()}


def flops(layers: int, tokens: int) -> float:
    weights = HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * MLP
    return layers * (2.0 * tokens * weights + 2.0 * tokens * tokens * HEADS * DIM)


@click.command()
@click.option("--layers", default=4, show_default=True)
@click.option("--tokens", default=4096, show_default=True)
@click.option("--repeats", default=20, show_default=True)
@click.option("--deadline", default=600.0, show_default=True, help="Seconds that making the packages may take.")
@click.option("--packages", type=click.Path(path_type=Path), help="Keep the packages there, and use those of before.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the table there as well.")
@click.option("--decoder", type=click.Path(path_type=Path), help="Make a package of this checkpoint instead.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="Of the decoder.", show_default=True)
@click.option("--make", nargs=2, type=(click.Choice(KINDS), click.Path(path_type=Path)), hidden=True)
def main(
    layers: int,
    tokens: int,
    repeats: int,
    deadline: float,
    packages: Path | None,
    json_file: Path | None,
    decoder: Path | None,
    device: str,
    make: tuple[str, Path] | None,
) -> None:
    if decoder is not None:
        time_decoder(decoder, device, json_file)
        return
    if not torch.cuda.is_available():
        raise click.ClickException("this benchmark needs an NVIDIA GPU with FP8 tensor cores")
    if make is not None:
        model, x = build(make[0], layers, tokens)
        export_aoti(model, make[1], {"x": x}, options=WITHOUT_WEIGHTS)
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = packages or Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        size = ["--layers", str(layers), "--tokens", str(tokens)]
        paths = {kind: directory / f"{kind.lower().replace(' ', '-')}-{layers}x{tokens}.pt2" for kind in KINDS}
        missing = {kind: path for kind, path in paths.items() if not path.is_file()}
        failed, seconds = make_packages(missing, size, deadline)
        rows = measure({kind: path for kind, path in paths.items() if kind not in failed}, layers, tokens, repeats)
    for kind, text in failed.items():
        print(f"-- no package for {kind}:\n{text[-2500:]}\n")
    header = {**machine(), **versions("triton"), "layers": str(layers), "tokens": str(tokens)}
    made = ", ".join(f"{kind} {time_:.0f} s" for kind, time_ in seconds.items())
    notes = [f"Packages, made side by side: {made}." if made else "The packages were there already."]
    show(TITLE, header, rows, notes, json_path=json_file)
    if failed:
        sys.exit(1)


def time_decoder(directory: Path, device: str, json_file: Path | None) -> None:
    model = quant.load(directory, device=device).to(torch.bfloat16 if device == "cuda" else torch.float32)
    prompt = [[token % model.config.vocab_size for token in range(100, 100 + PROMPT)]]
    for _ in range(2):  # the first run warms up
        reference = reference_run(model, prompt, NEW)
    rows = [{"run": "quant.load, by transformers", **speed(reference)}]
    # The package comes last, because making it takes minutes: a run that is cut short has printed the other rows.
    print(rows[-1], flush=True)
    if not decoder_refusal(model):
        tokens, per_second = generated(model, prompt[0])
        equal = sum(a == b for a, b in zip(tokens, reference.tokens[0].tolist(), strict=True))
        rows.append({"run": "quant generate, a CUDA graph a token", "tokens/s": per_second, "equal tokens": equal})
        print(rows[-1], flush=True)
    rows = [*packaged(model, prompt, reference), *rows]
    header = {**machine(), **versions("triton"), "checkpoint": directory.name, "device": device}
    notes = [f"A prompt of {PROMPT} tokens, then {NEW} greedy tokens of quant.load."]
    show("Package of a decoder", header, rows, notes, json_path=json_file)


def packaged(model: nn.Module, prompt: list[list[int]], reference: DecodingRun) -> list[dict[str, object]]:
    """The rows of a package: what making it takes, how fast it is, and how many of its tokens are the model's."""
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        started, before = time.perf_counter(), processor_seconds()
        path = export_aoti_decoder(model, Path(folder, "decoder.pt2"), 512)
        made: dict[str, object] = {"seconds to make": time.perf_counter() - started}
        made |= {"CPU seconds": processor_seconds() - before, "MB": path.stat().st_size / 1e6}
        session = AotiSession(path, unsafe_load=True)
        for count in BATCHES:
            tokens = reference.tokens.repeat(count, 0)
            for _ in range(2):  # the first run warms up
                run = forced_run(session, prompt * count, tokens)
            equal = int((run.tokens == tokens).all(0).sum())
            rows.append({"run": f"package, rows: {count}", **made, **speed(run), "equal tokens": equal})
            if count == 1:
                check = compare(model, session, prompt, NEW)
                rows[-1] |= {"near ties": check.near, "KL": check.kl}
            print(rows[-1], flush=True)
            made = {}
    return rows


def speed(run: DecodingRun) -> dict[str, object]:
    return {"ms to read": run.prefill_seconds * 1e3, "tokens/s": len(run.tokens) / run.step_seconds}


@torch.no_grad()
def generated(model: nn.Module, prompt: list[int]) -> tuple[list[int], float]:
    """The tokens that `quant generate` adds on a GPU, and how many a second: reading and capturing left out."""
    seen = model(torch.tensor([prompt], device="cuda"), use_cache=True)
    decoder, tokens, end = Decoder(model, PROMPT + NEW), [], PROMPT + NEW
    decoder.begin(cache_of(seen), int(seen.logits[0, -1].argmax()))
    decoder.step()
    decoder.capture()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for some in decoder.run(PROMPT, end, (), steps_done=1):
        tokens += some
    # The prompt gave the first token, and the step before the capture the second.
    return tokens, (NEW - 2) / (time.perf_counter() - started)


def processor_seconds() -> float:
    """Seconds of processor time of this process and of the compilers that it ran."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def make_packages(paths: dict[str, Path], size: list[str], deadline: float) -> tuple[dict[str, str], dict[str, float]]:
    """Makes every package in a process of its own: the last output of those that failed, and seconds of the others."""
    started, failed, seconds = time.perf_counter(), {}, {}
    logs = {kind: path.with_suffix(".log").open("w+") for kind, path in paths.items()}
    makers = {
        kind: subprocess.Popen(
            [sys.executable, __file__, *size, "--make", kind, str(path)], stdout=logs[kind], stderr=subprocess.STDOUT
        )
        for kind, path in paths.items()
    }
    while makers:
        time.sleep(0.2)
        now = time.perf_counter() - started
        for kind, maker in list(makers.items()):
            if maker.poll() is None and now < deadline:
                continue
            late = maker.poll() is None
            if late:
                maker.kill()
            if late or maker.returncode:
                text = Path(logs[kind].name).read_text(errors="replace")[-2500:]
                failed[kind] = f"{text}\n(not done after {now:.0f} s)" if late else text
            else:
                seconds[kind] = now
            print(f"-- {kind}: {'failed' if kind in failed else 'made'} after {now:.0f} s", flush=True)
            makers.pop(kind).wait()
    return failed, seconds


def load_with_weights(path: Path, model: Stack) -> Callable[..., torch.Tensor]:
    """A package over the weights of the module that it was made from; its input scales are matrices."""
    package = torch._inductor.aoti_load_package(str(path))
    tensors = {name: x.data for name, x in (*model.named_parameters(), *model.named_buffers())}
    constants = {name: tensors[name] for name in package.get_constant_fqns()}
    shaped = {
        name: x.reshape(1, 1) if name.endswith(("input_scale", "global_scale")) else x for name, x in constants.items()
    }
    package.load_constants(shaped, check_full_update=True, user_managed=True)
    return package


@torch.no_grad()
def measure(paths: dict[str, Path], layers: int, tokens: int, repeats: int) -> list[dict[str, object]]:
    models = {}
    for kind in KINDS:
        models[kind], x = build(kind, layers, tokens)
    exact, _ = build("BF16", layers, tokens)
    right = exact.float()(x.float()).double()
    del exact
    runs: dict[str, Callable[[], torch.Tensor]] = {}
    for kind in KINDS:
        runs[f"{kind}, eager"] = lambda model=models[kind]: model(x)
    for kind, path in paths.items():
        package = load_with_weights(path, models[kind])
        runs[f"{kind}, package"] = lambda package=package: package(x=x)
    errors = {name: float((run().double() - right).norm() / right.norm()) for name, run in runs.items()}
    times = milliseconds(runs, repeats)
    eager, packaged = times["BF16, eager"], times.get("BF16, package")
    return [
        {
            "run": name,
            "ms": time_,
            "TFLOP/s": flops(layers, tokens) / time_ / 1e9,
            "× BF16 eager": eager / time_,
            "× BF16 package": packaged / time_ if packaged else None,
            "error": errors[name],
        }
        for name, time_ in times.items()
    ]


if __name__ == "__main__":
    main()
