"""This benchmark times blocks of Flux and Wan on one GPU, and quantizes a Flux transformer of 12 B parameters.

    python benchmarks/diffusion_speed.py                        every section
    python benchmarks/diffusion_speed.py --only flux,wan        flux, wan, branch or quantize
    python benchmarks/diffusion_speed.py --profile fp8_channel  also lists the kernels of a method

    flux        a block of two streams, and one of one stream, run twice (19 and 38 in Flux.1), width 3,072, 512 tokens
                of text
    wan         1 block of Wan 2.1 14B, width 5,120, 512 tokens of text
    branch      what the parts of a layer in fp8_channel with a branch of rank 32 take, apart and as columns
    quantize    `quantize PIPELINE --solver gptq` on the whole Flux.1, from disk to disk

Method: random weights in BF16; every block is compiled by torch.compile with its default settings, for the shape that
is timed (torchao's own settings, which search tiles, are off). A time is the median of replays of a CUDA graph of the
blocks alone, so that no launch waits for Python. Attention in BF16 is PyTorch's by cuDNN, the fastest that it has on
Hopper. torchao's and Transformer Engine's rows quantize the same layers. A few processes compile rows at once, the
first methods of the list first; a row that is ready is timed twice, of which the lesser time counts, while the other
processes are stopped. Rows are printed as they come. A peer that does not run is a row too. Errors are relative, of the
outputs of the blocks against BF16.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from _table import Row, machine, show, versions
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import quant
from quant.base.json_files import json_text
from quant.kernels.linear.tuning import graph_microseconds

TEXT = 512
SIZES = {"flux": ((64, 64), (182, 180)), "wan": ((4, 32, 32), (21, 30, 52))}
"""Patches of an image or a video: 4,096 and 32,760 tokens."""


def flux(grid: tuple[int, ...]) -> tuple[nn.Module, dict[str, Any]]:
    """A block of Flux.1 of either kind, with the call of its transformer."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
    ids = torch.zeros(math.prod(grid), 3)
    ids[:, 1:] = torch.cartesian_prod(*(torch.arange(size) for size in grid))
    call = {
        "hidden_states": torch.randn(1, math.prod(grid), 64), "encoder_hidden_states": torch.randn(1, TEXT, 4096),
        "pooled_projections": torch.randn(1, 768), "timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5]),
        "img_ids": ids, "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip
    return model, call


def wan(grid: tuple[int, ...]) -> tuple[nn.Module, dict[str, Any]]:
    """A block of Wan 2.1 14B with the call of its transformer, whose patches are 1 × 2 × 2 latents."""
    import diffusers

    model = diffusers.WanTransformer3DModel(num_layers=1)
    latents = torch.randn(1, 16, grid[0], 2 * grid[1], 2 * grid[2])
    return model, {
        "hidden_states": latents, "encoder_hidden_states": torch.randn(1, TEXT, 4096), "timestep": torch.tensor([500]),
    }  # fmt: skip


@torch.no_grad()
def draw(model: nn.Module) -> nn.Module:
    """Gives a model random weights under which every block counts, in the dtypes of `from_pretrained`."""
    wide = set(model._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if wide & set(name.split(".")):
            parameter.data = parameter.data.float()
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        elif not name.endswith("weight"):
            nn.init.normal_(parameter, std=0.1)
    return model


def calls_of_blocks(model: nn.Module, call: dict[str, Any]) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Returns the blocks of a transformer with the arguments that a call of it gives them."""
    seen: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    hooks = [
        block.register_forward_pre_hook(lambda *each: seen.append(each), with_kwargs=True)
        for blocks in lists
        for block in blocks
    ]
    with torch.no_grad():
        model(**call, return_dict=False)
    for hook in hooks:
        hook.remove()
    return seen


def quantized_layers(model: nn.Module) -> list[str]:
    """Returns the names of the layers that we quantize."""
    return [layer.name for layer in quant.quantize(copy.deepcopy(model), "fp8_channel", solver="rtn").plan.quantized]


def torchao(granularity: str) -> Callable[[nn.Module], None]:
    """torchao's FP8 with dynamic inputs on the layers that we quantize."""

    def run(model: nn.Module) -> None:
        from torchao import quantization

        names = quantized_layers(model)
        config = quantization.Float8DynamicActivationFloat8WeightConfig(
            granularity=getattr(quantization, granularity)(),
            set_inductor_config=False,  # it turns on a search of tiles, for all that is compiled afterwards too
        )
        quantization.quantize_(model, config, filter_fn=lambda _, name: name in names)

    return run


def transformer_engine(recipe: str) -> Callable[[nn.Module], None]:
    """Transformer Engine's linear layers with weights in FP8; torch.compile leaves them as they are."""

    def run(model: nn.Module) -> None:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes

        chosen = getattr(recipes, recipe)()

        class Linear(nn.Module):
            def __init__(self, linear: nn.Linear) -> None:
                super().__init__()
                has_bias = linear.bias is not None
                with te.quantized_model_init(enabled=True, recipe=chosen):
                    self.inner = te.Linear(
                        linear.in_features,
                        linear.out_features,
                        bias=has_bias,
                        params_dtype=torch.bfloat16,
                        device="cuda",
                    )
                with torch.no_grad():
                    self.inner.weight.copy_(linear.weight)
                    if has_bias:
                        self.inner.bias.copy_(linear.bias)

            @torch.compiler.disable
            def forward(self, x: Tensor) -> Tensor:
                with te.autocast(enabled=True, recipe=chosen):
                    return self.inner(x)  # type: ignore[no-any-return]

        for name in quantized_layers(model):
            model.set_submodule(name, Linear(model.get_submodule(name)))  # type: ignore[arg-type]

    return run


def ours(name: str, attention: bool = False, rank: int = 0) -> Callable[[nn.Module], None]:
    """Ours, with attention in FP8 too, and with low-rank branches, which hold a part of each weight."""

    def run(model: nn.Module) -> None:
        branches = {}
        for layer in quantized_layers(model) if rank else ():
            weight = model.get_submodule(layer).weight
            u, s, v = torch.svd_lowrank(weight.float(), rank)  # type: ignore[arg-type]
            branches[layer] = down, up = (v * s.sqrt()).t().contiguous().bfloat16(), (u * s.sqrt()).bfloat16()
            weight.data -= up @ down  # type: ignore[operator]
        quant.quantize(model, name, solver="rtn")
        for layer, (down, up) in branches.items():
            module = model.get_submodule(layer)
            module.lowrank_down, module.lowrank_up = down, up
            module.arrange()  # type: ignore[operator]
        if attention:
            model.set_attention_backend("blockscale_fp8")

    return run


def branches_apart(run: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """The same with low-rank branches as two matmuls in 16 bit, never as columns of the product."""

    def run_apart(model: nn.Module) -> None:
        from quant.kernels.linear import quant_linear

        with mock.patch.object(quant_linear, "takes_branch", return_value=False):
            run(model)

    return run_apart


def methods() -> dict[str, Callable[[nn.Module], None]]:
    """What is timed, by name, in this order; the first is the measure of the others."""
    branch = "ours, fp8_channel+lowrank:32"
    rows: dict[str, Callable[[nn.Module], None]] = {
        "BF16": lambda model: None,
        "ours, fp8_channel": ours("fp8_channel"),
        "ours, fp8_channel and FP8 attention": ours("fp8_channel", attention=True),
    }
    if find_spec("torchao"):
        rows["torchao, FP8 per row"] = torchao("PerRow")
    rows[branch] = ours("fp8_channel", rank=32)
    rows[f"{branch} and FP8 attention"] = ours("fp8_channel", attention=True, rank=32)
    if find_spec("transformer_engine"):
        rows["Transformer Engine, FP8 current scaling"] = transformer_engine("Float8CurrentScaling")
    rows[f"{branch}, branches in 16 bit"] = branches_apart(ours("fp8_channel", rank=32))
    if find_spec("torchao"):
        rows["torchao, FP8 per tensor"] = torchao("PerTensor")
    if find_spec("transformer_engine"):
        rows["Transformer Engine, FP8 delayed scaling"] = transformer_engine("DelayedScaling")
    return rows


def serve() -> None:
    """Times the rows that standard input names, one a line of JSON, each as `time_blocks` says."""
    for line in sys.stdin:
        try:
            time_blocks(*json.loads(line))
        except Exception:
            traceback.print_exc()
            print("failed", flush=True)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        print("done", flush=True)


def time_blocks(family: str, grid: Sequence[int], name: str, outputs: str, profile: bool) -> None:
    """Compiles blocks with one method, prints "ready", and their microseconds for each of two lines of standard input.

    Their outputs are written before that.
    """
    from quant.adapters import from_diffusers  # noqa: F401 -- registers attention in FP8

    started = time.time()
    seconds: dict[str, float] = {}
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model, call = {"flux": flux, "wan": wan}[family](tuple(grid))
    finally:
        torch.set_default_dtype(torch.float32)
    draw(model.eval().requires_grad_(False))
    model.set_attention_backend("native")  # diffusers sets it for the whole process, so also what a row before chose
    methods()[name](model)
    seconds["model"] = time.time() - started
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with torch.no_grad(), sdpa_kernel(backends, set_priority=True):
        calls = calls_of_blocks(model, call)
        seconds["eager"] = time.time() - started
        compiled = [(torch.compile(block, dynamic=False), args, kwargs) for block, args, kwargs in calls]
        compiled += compiled[1:]  # Flux.1 has two blocks of one stream for each of two

        def run() -> list[Tensor]:
            return [each for block, args, kwargs in compiled for each in _tensors(block(*args, **kwargs))]

        torch.save([each.flatten()[::8].cpu() for each in run()], outputs)  # a sample for the error
        run()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # for the rows that compile beside this one
        seconds["compiled"] = time.time() - started
        stages = ", ".join(f"{stage} {value:.1f} s" for stage, value in seconds.items())
        click.echo(f"{family} {math.prod(grid)} {name}: {stages}", err=True)
        print("ready", flush=True)
        for _ in range(2):
            sys.stdin.readline()
            print(graph_microseconds([run]), flush=True)
        if profile:
            with torch.profiler.profile() as kernels:
                run()
                torch.cuda.synchronize()
            table = kernels.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=90)
            print(family, grid, name, table, sep="\n", file=sys.stderr)


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]


class Worker:
    """A process that compiles one row after the other (`serve`), so that imports are paid once."""

    def __init__(self, jobs: int) -> None:
        threads = str(max((os.cpu_count() or 1) // jobs, 1))
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, __file__, "--worker"], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def answer(self, line: str) -> str:
        """Returns the line that the process prints for a line; "" of one that has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


class Workers:
    """Workers that compile at once, and of which one alone runs while it is timed."""

    def __init__(self, jobs: int, seconds: float) -> None:
        self.jobs, self.alone = jobs, threading.Lock()
        self.all: list[Worker] = []
        self.idle: list[Worker] = []
        self.is_over = False
        self.timer = threading.Timer(seconds, self.end)
        self.timer.daemon = True
        self.timer.start()

    def end(self) -> None:
        """Ends all processes, after a row that is being timed; the rows that they compile have no time."""
        self.timer.cancel()
        with self.alone:
            self.is_over = True
            for worker in self.all:
                worker.process.kill()

    def time(self, case: Sequence[Any]) -> float | None:
        """Returns the microseconds of a row, None of one that failed; its worker is not used again then."""
        with self.alone:
            if self.is_over:
                return None
            worker = self.idle.pop() if self.idle else Worker(self.jobs)
            self.all += [worker] * (worker not in self.all)
        times: list[float] = []
        if worker.answer(json_text(case)) == "ready":
            with self.alone:
                others = [each.process for each in self.all if each is not worker and each.process.poll() is None]
                for process in others:
                    process.send_signal(signal.SIGSTOP)
                try:
                    times = [float(worker.answer("")) for _ in range(2)]
                    if worker.read() == "done":  # its memory is free
                        self.idle.append(worker)
                except ValueError:
                    times = []
                for process in others:
                    process.send_signal(signal.SIGCONT)
        if worker not in self.idle:
            worker.process.kill()
        return min(times, default=None)


def speed(
    sizes: Sequence[tuple[str, tuple[int, ...]]], names: Sequence[str], workers: Workers, profile: str
) -> list[Row]:
    """Milliseconds and errors of methods, BF16 first, of blocks of families at sizes."""
    cases = [(name, *size) for name in names for size in sizes]
    times: dict[tuple[str, str, int], float | None] = {}

    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(workers.jobs) as pool:

        def file(name: str, family: str, tokens: int) -> Path:
            return Path(home) / f"{names.index(name)}-{family}-{tokens}.pt"

        def row(name: str, family: str, tokens: int) -> Row:
            figures: dict[str, float | None] = {"ms": None, "× BF16": None, "error %": None}
            took, base = (times.get((each, family, tokens)) for each in (name, names[0]))
            if took is not None:
                figures["ms"] = took / 1000
            if took is not None and base is not None:
                mine, exact = (torch.load(file(each, family, tokens)) for each in (name, names[0]))
                figures |= {"× BF16": base / took, "error %": 100 * _error(mine, exact)}
            rounded = {key: None if value is None else round(value, 3) for key, value in figures.items()}
            return {"blocks": family, "tokens": tokens, "method": name, **rounded}

        def timed(case: tuple[str, str, tuple[int, ...]]) -> None:
            name, family, grid = case
            key = (name, family, math.prod(grid))
            is_profiled = bool(profile and re.search(profile, f"{family} {key[2]} {name}"))
            times[key] = workers.time([family, grid, name, str(file(*key)), is_profiled])
            if times[key] is not None or not workers.is_over:
                click.echo(row(*key), err=True)

        list(pool.map(timed, cases))
        return [row(name, family, math.prod(grid)) for family, grid in sizes for name in names]


def _error(results: list[Tensor], exact: list[Tensor]) -> float:
    wrong, whole = (
        sum(float(each.float().square().sum()) for each in parts)
        for parts in ([a.float() - b.float() for a, b in zip(results, exact, strict=True)], exact)
    )
    return math.sqrt(wrong / whole)


def branch_parts() -> list[Row]:
    """Microseconds of the parts of layers of Flux and Wan with a low-rank branch, and errors of their outputs."""
    from quant.formats.format import FORMATS, INPUT_FORMATS
    from quant.formats.tensor import BlockScaledTensor, quantize
    from quant.kernels.linear.branch_columns import branch_linear, widened
    from quant.kernels.rounding import portable_casts

    rows: list[Row] = []
    shapes = ((4096, 3072, 3072), (512, 3072, 3072), (4608, 3072, 12288), (4096, 12288, 3072), (32760, 5120, 5120))
    for tokens, columns, out in shapes:
        torch.manual_seed(0)
        x, down, up, w = (
            torch.randn(shape, device="cuda").bfloat16()
            for shape in ((tokens, columns), (32, columns), (out, 32), (out, columns))
        )
        down, w = down / math.sqrt(columns), w / math.sqrt(columns)
        weight = quantize(w.float(), FORMATS["fp8_channel"])
        wide, unit = widened(weight, up)
        h = x @ down.t()
        cast = portable_casts.quantize(x, INPUT_FORMATS["fp8_token"])
        codes, scale = torch.ops.quant.branch_columns(x, h, unit)

        def product(left: Tensor, sx: Tensor, weight: BlockScaledTensor) -> Tensor:
            sw = weight.scale.view(1, -1)
            return torch._scaled_mm(left, weight.codes.t(), sx, sw, out_dtype=torch.bfloat16, use_fast_accum=True)

        y, b = product(cast.codes, cast.scale, weight), h @ up.t()
        exact = cast.dequantize(torch.float64)[:256] @ weight.dequantize(torch.float64).t()
        exact += (x[:256].double() @ down.double().t()) @ up.double().t()
        wholes = {"apart": y + b, "as columns": branch_linear(x, wide, None, down, unit)}
        errors = {name: 100 * float((each[:256] - exact).norm() / exact.norm()) for name, each in wholes.items()}
        parts: dict[str, Callable[[], Any]] = {
            "x · down": lambda x=x, down=down: x @ down.t(),
            "round x": lambda x=x: portable_casts.quantize(x, INPUT_FORMATS["fp8_token"]),
            "product": lambda c=cast, w=weight: product(c.codes, c.scale, w),
            "h · up": lambda h=h, up=up: h @ up.t(),
            "add": lambda y=y, b=b: y + b,
            "round x, h": lambda x=x, h=h, unit=unit: torch.ops.quant.branch_columns(x, h, unit),
            "wide product": lambda c=codes, s=scale, w=wide: product(c, s, w),
            "BF16": lambda x=x, w=w: x @ w.t(),
        }
        figures = {f"{name}, µs": round(graph_microseconds([part]), 1) for name, part in parts.items()}
        sizes = {"tokens": tokens, "in": columns, "out": out}
        rows.append({**sizes, **figures, **{f"error {name}, %": round(value, 3) for name, value in errors.items()}})
    return rows


def write_pipeline(directory: Path) -> None:
    """Writes a pipeline of Flux.1's transformer with random weights, and tiny text encoders and VAE."""
    import diffusers
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, "a": 3, "of": 4}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizers = [
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, **names)
        for length in (77, 512)
    ]
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        vae = diffusers.AutoencoderKL(
            block_out_channels=(8, 8, 8, 8), norm_num_groups=4, latent_channels=16, shift_factor=0.0,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
        clip = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=16, hidden_size=768, intermediate_size=64, num_hidden_layers=1, num_attention_heads=12,
                bos_token_id=2, eos_token_id=1,
            )
        )  # fmt: skip
        t5 = transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=16, d_model=4096, d_ff=64, num_layers=1, num_heads=64)
        )
    torch.set_default_dtype(torch.float32)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipe = diffusers.FluxPipeline(scheduler, vae, clip, tokenizers[0], t5, tokenizers[1], draw(transformer))
    pipe.save_pretrained(directory)


def quantize(shared: Path, options: list[str]) -> Row:
    """Seconds from disk to disk, of the whole command and of its stages."""
    source, out = shared / "flux", shared / "out"
    if not source.is_dir():
        write_pipeline(source)
        torch.cuda.empty_cache()
    started = time.time()
    command = [sys.executable, __file__, "--timed", json_text([started, str(source), "--out", str(out), *options])]
    subprocess.run(command, check=True, stdout=sys.stderr)
    seconds = time.time() - started
    report = quant.Report.load(out / "transformer/report.json")
    stages = {name: round(value, 1) for name, value in report.seconds.items()}
    denoising = json.loads((out / "denoising.json").read_text())
    error = denoising["components"]["transformer"]["all"]
    shutil.rmtree(out)
    return {"command": " ".join(["quantize flux", *options]), "s": round(seconds, 1), **stages, "noise error": error}


def run_timed(started: float, arguments: list[str]) -> None:
    """Runs `quantize`, prints what took how long, and the table of `solve_stages.py` about the blocks."""
    import solve_stages

    from quant.cli import console
    from quant.export.checkpoint import save
    from quant.run import pipeline
    from quant.run import run as stages

    def said(text: str, since: float) -> None:
        click.echo(f"{time.time() - started:6.1f} s: {text}, {time.time() - since:.1f} s", err=True)

    @contextmanager
    def step(_: Any, text: str) -> Any:
        since = time.time()
        yield
        said(text, since)

    def timed(module: Any, name: str) -> None:
        function = getattr(module, name)

        def run(*args: Any, **keywords: Any) -> Any:
            since = time.time()
            result = function(*args, **keywords)
            torch.cuda.synchronize()
            said(name, since)
            return result

        setattr(module, name, run)

    said("imports", started)
    console.Printer.step = step  # type: ignore[method-assign]
    for name in ("_plan", "_calls", "_held_out", "_image", "_NoiseError", "run", "denoising_html"):
        timed(pipeline, name)
    for module, name in ((stages, "measure"), (save, "checkpoint_tensors"), (save, "write_tensors")):
        timed(module, name)
    solve_stages.main(arguments)
    said("all", started)


@click.command()
@click.option("--only", default="flux,wan,branch,quantize", show_default=True, help="Sections, separated by commas.")
@click.option("--method", default="", help="Only methods in whose name this expression is found, and BF16.")
@click.option("--tokens", default=0, help="Only one of the two sizes, 4096 or 32760.")
@click.option("--jobs", default=3, show_default=True, help="Processes that compile at once.")
@click.option("--seconds", default=1e6, help="Seconds after which blocks that are not timed yet are left out.")
@click.option("--profile", default="", help="Also list the kernels of rows like this, such as 'flux 4096 .*channel$'.")
@click.option("--write-only", is_flag=True, help="Only write the pipeline of the section quantize.")
@click.option("--shared", type=click.Path(path_type=Path), help="Directory for 36 GB; /dev/shm without it.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="File for the same facts.")
@click.option("--worker", is_flag=True, hidden=True)
@click.option("--timed", hidden=True)
def main(
    only: str, method: str, tokens: int, jobs: int, seconds: float, profile: str, write_only: bool,
    shared: Path | None, json_path: Path | None, worker: bool, timed: str | None,
) -> None:  # fmt: skip
    """Runs the sections and prints their tables."""
    if worker:
        return serve()
    if timed is not None:
        started, *arguments = json.loads(timed)
        return run_timed(started, arguments)
    header = {**machine(), **versions("diffusers", "torchao", "transformer-engine", "triton")}
    sizes = [(name, grid) for name in ("flux", "wan") if name in only.split(",") for grid in SIZES[name]]
    sizes = [(name, grid) for name, grid in sizes if not tokens or math.prod(grid) == tokens]
    if sizes:
        names = [name for name in methods() if name == "BF16" or re.search(method, name)]
        workers = Workers(jobs, seconds)
        rows = speed(sizes, names, workers, profile)
        workers.end()
        show("Blocks of diffusion transformers", header, rows, (), json_path)
    if "branch" in only.split(","):
        show("Parts of a layer with a low-rank branch", header, branch_parts(), (), None)
    if "quantize" in only.split(","):
        home = shared or Path(tempfile.mkdtemp(dir="/dev/shm"))
        if write_only:
            write_pipeline(home / "flux")
            return
        options = ["--format", "nvfp4", "--solver", "gptq", "--call", "num_inference_steps=4", "--calib-samples", "8"]
        line = quantize(home, options)
        show("A transformer of 12 B parameters, from disk to disk", header, [line], (), None)
        if shared is None:
            shutil.rmtree(home)


if __name__ == "__main__":
    main()
