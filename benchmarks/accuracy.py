"""This benchmark measures what quantization costs a language model, in Blockscale and in three other toolkits.

The others are ModelOpt, llm-compressor and torchao, measured in the same run.

Each configuration loads the model, quantizes it (timed; peak memory taken right after), then compares it with the
unquantized model on text that no method has seen, both in FP32. Times and memory are those of one configuration,
without imports, loading and evaluation. On a CPU every row has a process of its own. On a GPU a process measures
several rows (`_workers`), and `--jobs` processes share all GPUs: the first compilation of a kernel is part of one row's
time, except for ModelOpt's CUDA extensions, which are built before.

    KL(base‖quantized), nats  on each of three texts, with half the width of its interval of 95 % (Student's over rows):
                              `eval` of the tokens file (WikiText-2), Python source, and prose about Python (`_texts`);
                              of an encoder 1 − cosine similarity of its embeddings
    perplexity, top-1         on the first text, means over all next-token predictions
    bits    of a quantized weight, with every scale, input scale and low-rank branch; the head stays in 16 bit
    MB      on a CPU the process's peak resident memory up to the end of quantization, on a GPU what torch allocated

All methods that need data get the same calibration rows: by default the package's own mixture, `--calib tokens` takes
those of the tokens file. There are as many rows of the mixture as `quantize` gives `gptq` for this model and device,
and for `kfac` as many as it gives `kfac` (128 and 512 for SmolLM2 on a GPU), unless `--calibration-rows` says how many;
rows of peers that end in `, rows of kfac` get the same. `--texts FILE` keeps the rows of all texts in a file, and takes
them from it where it exists; with that file, `--resume` goes on where a run was cut short. The rows of the tables in
docs/benchmarks.md are in data/accuracy_texts.safetensors. No method was chosen by the last two texts.

Rows are named `SETTING TOOLKIT CONFIGURATION`; `--list` shows those that this machine has packages for. `--only GLOB`
chooses among them, and `--only bars` takes those of the tables in docs/benchmarks.md. Solvers come from the registry,
so a new one appears by itself; `--solver` adds a composition. llm-compressor can also run elsewhere, and the checkpoint
that it wrote is a row with `--checkpoint NAME=DIR`.

    python benchmarks/accuracy.py --only bars --jobs 16 --json benchmarks/data/accuracy_h100.json      on four GPUs
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import torch
from _accuracy_rows import AS_KFAC, BEST_PEERS, BUDGET, LEARNED_ROTATION, SETTINGS, TEXTS, chosen, expected_seconds
from _peers import (
    Outcome,
    Run,
    auto_quantize,
    llmcompressor_configurations,
    modelopt_configurations,
    modelopt_on_cpu,
    ours,
    torchao_configurations,
)
from _table import machine, show, versions, write_json
from _texts import TOKENS, page_rows, python_rows, reference_rows, wikitext_rows
from _workers import measure_all, serve, visible_gpus
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quant
from quant.base.errors import UserError
from quant.calibration.allocation.allocate import allocate
from quant.calibration.allocation.goal import Goal
from quant.calibration.session import Session
from quant.calibration.solvers.registry import SOLVERS, TRANSFORMS, get_solver
from quant.calibration.texts.mixture import mixed_text
from quant.calibration.texts.self_written import generate_rows
from quant.evaluation.evaluate import evaluate_texts
from quant.evaluation.evaluation import Evaluation
from quant.formats.format import FORMATS
from quant.models.open_model import open_model
from quant.recipes.recipe import Recipe
from quant.recipes.solver_names import rows_of, solver_of

TITLE = "Accuracy after quantization"
MODEL = "smollm2-135m"


# The compositions worth a row at four bits, of which those appear that the registry knows.
COMPOSITIONS = (
    "awq+local_hessian", "awq+gptq", "awq:merge+gptq", "smoothquant+gptq", "rotation:64+gptq", "rotation:merge+gptq",
    "awq+rotation+gptq", "lowrank+gptq", "awq+lowrank:32+gptq", "awq+lowrank:32+kfac", "gptq+autoround",
    "awq:merge+residual:64+gptq", "awq:merge+residual:64+kfac", "awq+gptq+autoround",
    "rotation:merge+gptq+autoround", "rotation:merge+kfac", solver_of(3, "nvfp4"),
)  # fmt: skip
SIMPLE = ("rtn", "mse", "gptq")
# Without a text: the rows that the model writes itself, as many and as long as `quantize --calib self` has them.
OWN_TEXT = (32, 512)
# Not for deployment: runtimes fuse q, k and v into one GEMM with one global scale.
UNSHARED = "a global scale per layer"
# They reproduce another toolkit's arithmetic, or are scale rules for MX formats.
NO_ROW = ("modelopt", "compressed_tensors", "ocp", "even")
PACKAGES = {
    "modelopt": ("ModelOpt", modelopt_configurations),
    "llmcompressor": ("llm-compressor", llmcompressor_configurations),
    "torchao": ("torchao", torchao_configurations),
}


@dataclass(frozen=True)
class Settings:
    """The options that every process of a run shares.

    Attributes:
        model: what `quant.open_model` takes.
        texts: safetensors of token ids `[rows, seqlen]`: `calibration`, `calibration by kfac` if that differs, and the
            texts to evaluate on.
        device: cpu or cuda.
        modelopt_cpu: whether ModelOpt's kernels give way to our roundings on a CPU.
    """

    model: str
    texts: Path
    device: str
    modelopt_cpu: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the texts to evaluate on, in order."""
        with safe_open(self.texts, framework="pt") as file:
            return (*TEXTS, *sorted(set(file.keys()) - {"calibration", "calibration by kfac", *TEXTS}))

    def read(self, row: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Rows that the method of a table row is calibrated with, and rows of each text to evaluate on."""
        rows = {name: ids.long() for name, ids in load_file(self.texts).items()}
        own = rows.get("calibration by kfac") if "kfac" in row else None
        return rows["calibration"] if own is None else own, {name: rows[name] for name in self.names}


def write_texts(
    settings: Settings, tokens: Path, calib: str, rows: int, calibration_rows: int | None, more: Mapping[str, Path]
) -> None:
    """Cuts the rows of all processes of a run into the file that they share.

    Args:
        settings: name the model, whose tokenizer cuts them and which writes half of the mixture.
        tokens: safetensors with `calibration` and `eval`.
        calib: `mix`, or `tokens`.
        rows, calibration_rows: how many of each; None for as many as `quantize` takes.
        more: files of further texts by name; a short one gives fewer rows.
    """
    source = open_model(settings.model)
    tokenizer = source.load_tokenizer()
    seqlen = _seqlen(tokens)

    def wikitext(part: str, samples: int) -> torch.Tensor:
        if tokens == TOKENS:
            return wikitext_rows(part, settings.model, tokenizer, samples, seqlen)
        return quant.token_rows(f"{tokens}:{part}", None, samples=samples, seqlen=seqlen)

    evaluated = wikitext("eval", rows)
    by_kfac = {}
    size = None if source.model is None else sum(parameter.numel() for parameter in source.model.parameters())
    on_gpu = settings.device == "cuda"
    counts = [rows_of(solver, on_gpu=on_gpu, parameters=size) for solver in ("gptq", "kfac")]
    calibration_rows, more_rows = (calibration_rows, calibration_rows) if calibration_rows else counts
    if calib == "tokens":
        calibration = wikitext("calibration", calibration_rows)
        made_of = f"{tokens.name}:calibration"
    else:
        assert source.model is not None
        plan = quant.make_plan(source.model, "nvfp4a16", solver="gptq")
        session = Session.on(settings.device)
        calibration, record = mixed_text(
            source.model, plan, tokenizer, session, samples=calibration_rows, seqlen=seqlen
        )
        if more_rows != calibration_rows:
            text, _ = mixed_text(source.model, plan, tokenizer, session, samples=more_rows, seqlen=seqlen)
            by_kfac = {"calibration by kfac": text}
        made_of = f"the mixture ({', '.join(f'{count} tokens of {part}' for part, count in record['tokens'].items())})"
    documents = (make(tokenizer, rows, "report", seqlen) for make in (python_rows, reference_rows))
    texts = dict(zip(TEXTS, (evaluated, *documents), strict=True))
    texts |= {name: page_rows(path, tokenizer, rows, seqlen) for name, path in more.items()}
    made_of = f"{calibration_rows} rows of {made_of}" + (f", and kfac {more_rows} rows of such text" if by_kfac else "")
    every = {"calibration": calibration, **by_kfac, **texts}
    save_file({name: ids.int() for name, ids in every.items()}, settings.texts, {"made of": made_of})


def _seqlen(tokens: Path) -> int:
    with safe_open(tokens, framework="pt") as file:
        return int(file.get_slice("eval").get_shape()[1])


def our_solvers() -> list[str]:
    """Every rounding solver of the registry alone, then the known compositions, then new transforms before GPTQ."""
    alone = [name for name in SOLVERS if name not in NO_ROW]
    composed = [name for name in COMPOSITIONS if _is_known(name)]
    covered = {part for name in composed for part in name.split("+")}
    return alone + composed + [f"{name}+gptq" for name in TRANSFORMS if name not in covered]


def _is_known(solver: str) -> bool:
    try:
        get_solver(solver)
    except ValueError:
        return False
    return True


def all_configurations(
    solvers: Sequence[str], checkpoints: Mapping[str, Path], settings: Settings
) -> tuple[dict[str, Run], list[str]]:
    """Rows by name, and notes on the peers that are not installed."""
    runs: dict[str, Run] = {}
    for key, setting in SETTINGS.items():
        if setting.choice:
            for solver in ("rtn", solver_of(2, setting.activation), solver_of(3, setting.activation)):
                runs[f"{key} Blockscale {solver}"] = partial(
                    run_mixed, setting=key, solver=solver, device=settings.device
                )
            continue
        wide = [*our_solvers(), *solvers] if key.startswith("nvfp4") else [*SIMPLE, solver_of(3, setting.activation)]
        if key in ("fp8", "fp8_channel"):
            wide = (*SIMPLE, solver_of(3, setting.activation), LEARNED_ROTATION, *solvers)
        if setting.activation == "nvfp4_four_over_six":
            wide = (solver_of(2, "nvfp4"), solver_of(3, "nvfp4"), "awq+lowrank:32+kfac", *solvers)
        for solver in dict.fromkeys(wide):
            runs[f"{key} Blockscale {solver}"] = partial(run_ours, setting=key, solver=solver, device=settings.device)
        if key == "nvfp4a16":
            for solver in ("local_hessian", "gptq"):
                runs[f"{key} Blockscale {solver}, no text"] = partial(
                    run_ours, setting=key, solver=solver, device=settings.device, own_text=True
                )
        if FORMATS[SETTINGS[key].weight].global_scale:
            runs[f"{key} Blockscale rtn, {UNSHARED}"] = partial(
                run_ours, setting=key, solver="rtn", device=settings.device, shared=False
            )
    notes = []
    for package, (toolkit, configurations) in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            notes.append(f"{toolkit} is not installed here, so it has no rows.")
        else:
            runs |= configurations()
    if importlib.util.find_spec("modelopt") is not None:
        for key, setting in SETTINGS.items():
            if setting.choice:
                runs[f"{key} ModelOpt auto_quantize"] = partial(run_auto_quantize, setting=key)
    if settings.device == "cuda":
        runs |= {f"{name}{AS_KFAC}": runs[name] for name in BEST_PEERS if name in runs}
    for name, directory in checkpoints.items():
        runs[name] = partial(run_checkpoint, directory=directory)
    return dict(sorted(runs.items(), key=lambda item: list(SETTINGS).index(item[0].split()[0]))), notes


def run_ours(
    model: nn.Module,
    rows: torch.Tensor,
    *,
    setting: str,
    solver: str,
    device: str,
    shared: bool = True,
    own_text: bool = False,
) -> Outcome:
    """Our own row, on the device that the model is on.

    Args:
        model: to quantize, in place.
        rows: of calibration.
        setting: key of `SETTINGS`.
        solver: as `--solver` takes it.
        device: cpu or cuda.
        shared: one global scale per fusion group.
        own_text: calibrates on text that the model writes itself instead of `rows`; the writing is timed too.
    """
    formats = SETTINGS[setting]
    if own_text:
        rows = generate_rows(model, samples=OWN_TEXT[0], seqlen=OWN_TEXT[1])
    plan = quant.make_plan(model, Recipe(setting, formats.weight, formats.activation), solver=solver)
    head = model.get_output_embeddings()
    for layer in plan.layers:
        module = model.get_submodule(layer.name)
        if layer.weight is None and isinstance(module, nn.Linear) and module is not head:
            raise UserError(f"{setting} would not be comparable: {layer.name} stays in 16 bit: {layer.reason}")
    if not shared:
        plan = plan.replace_layers(replace(layer, group=None) for layer in plan.quantized)
    quant.quantize(model, plan, rows.to(next(model.parameters()).device), device=device)
    return ours(model)


def run_mixed(model: nn.Module, rows: torch.Tensor, *, setting: str, solver: str, device: str) -> Outcome:
    """Our own row where each layer gets one of several formats, as `quantize --bits` chooses them."""
    allocation = allocate(
        model, rows, Goal(bits=BUDGET), formats=SETTINGS[setting].choice, solver=solver, device=device
    )
    quantized = allocation.quantized or quant.quantize(model, allocation.plan, rows, device=device)
    return ours(quantized.model)


def run_auto_quantize(model: nn.Module, rows: torch.Tensor, *, setting: str) -> Outcome:
    """The same choice by ModelOpt, which rounds to nearest."""
    weights_only = SETTINGS[setting].activation == "keep"
    return Outcome(model, [], bits=auto_quantize(model, rows, BUDGET, weights_only=weights_only))


def run_checkpoint(model: nn.Module, rows: torch.Tensor, *, directory: Path) -> Outcome:
    """What another toolkit wrote, read back; the time is that of reading."""
    return ours(quant.load(directory))


def measure(run: Run, name: str, settings: Settings) -> dict[str, Any]:
    """One row, measured in this process."""
    rows, texts = settings.read(name)
    model = _open(settings)
    if settings.device == "cuda":
        if "ModelOpt" in name:
            _build_modelopt_extensions(name)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    elif settings.modelopt_cpu and "ModelOpt" in name:
        modelopt_on_cpu()
    start = time.perf_counter()
    outcome = run(model, rows)
    if settings.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if settings.device == "cuda" else peak_rss()
    del model
    gc.collect()
    outcome.prepare()
    quantized = outcome.model.to(settings.device)
    evaluation = evaluate_texts(quantized, texts, _open(settings), batch_size=4)
    measured = {
        "perplexity": evaluation.perplexity,
        **{column: value for each in evaluation.texts for column, value in losses(each).items()},
        "top-1": evaluation.top1,
        "s": seconds,
        "MB": peak / 1e6,
        "bits": outcome.bits_per_weight(FORMATS[SETTINGS[name.split()[0]].weight]),
        "extra at run time": outcome.extra or "nothing",
        "base perplexity": evaluation.baseline_perplexity,
    }
    # The next row of this process begins with an empty GPU.
    del outcome, quantized, run
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return measured


def losses(evaluation: Evaluation) -> dict[str, float | None]:
    """The columns of one text: KL, for an encoder 1 − cosine similarity, and half the width of its interval."""
    name = "" if evaluation.text == TEXTS[0] else f" {evaluation.text}"
    column, loss = ("KL", evaluation.kl) if evaluation.cosine is None else ("1-cos", evaluation.cosine)
    half = None if evaluation.interval is None or loss is None else evaluation.interval[1] - loss
    return {f"{column}{name}": loss, f"±{name}": half}


def _open(settings: Settings) -> nn.Module:
    # On a CPU every row has a process of its own, and a copy would be part of its peak memory.
    if settings.device == "cpu":
        return _read(settings.model)
    return copy.deepcopy(_original(settings.model)).to(settings.device)


def _read(name: str) -> nn.Module:
    model = open_model(name).model
    if model is None:
        raise UserError(f"{name}: a bare state dict cannot be run; give a model with its config")
    return model


_original = cache(_read)


def _build_modelopt_extensions(name: str) -> None:
    """Compiles or loads the CUDA extensions of ModelOpt that a row needs, or its first quantization would do that."""
    from modelopt.torch.quantization import extensions

    # NVFP4 is a Triton kernel there; its scales in FP8 are not.
    if name.startswith("mx"):
        extensions.get_cuda_ext_mx()
    else:
        extensions.get_cuda_ext_fp8()
    if name.startswith("int4"):
        extensions.get_cuda_ext()


def peak_rss() -> int:
    """Peak resident bytes of this process; the kernel's other counter begins at the parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def table_row(name: str, result: Mapping[str, Any], settings: Settings) -> dict[str, object]:
    """The columns of one row; an error stands in the last one."""
    setting, configuration = name.split(maxsplit=1)
    loss = "1-cos" if "1-cos" in result else "KL"
    of_texts = (f"{what}{'' if text == TEXTS[0] else f' {text}'}" for text in settings.names for what in (loss, "±"))
    columns = ("perplexity", *of_texts, "top-1", "s", "MB", "bits", "extra at run time")
    row = {"setting": SETTINGS[setting].title, "configuration": configuration}
    row |= {column: result.get(column) for column in columns}
    if "ModelOpt" in configuration and settings.device == "cpu" and not setting.startswith(("fp8", "int4")):
        if settings.modelopt_cpu:
            row["configuration"] = f"{configuration} (our rounding for its kernels)"
        elif "error" in result:
            row["extra at run time"] = f"not on a CPU: {result['error']}"
            return row
    if "error" in result:
        row["extra at run time"] = f"failed: {result['error']}"
    return row


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By setting, then by loss on the first text; rows without one come last."""
    titles = [setting.title for setting in SETTINGS.values()]

    return sorted(rows, key=lambda row: (titles.index(row["setting"]), loss_of(row) or math.inf))


def loss_of(row: Mapping[str, Any]) -> float | None:
    """The loss on the first text; None for a row that failed."""
    return row.get("1-cos", row.get("KL"))


def plot(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One panel a setting: KL of each configuration on a logarithmic axis, ours in another colour."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = [
        (title, [row for row in rows if row["setting"] == title and loss_of(row)])
        for title in dict.fromkeys(row["setting"] for row in rows)
    ]
    settings = [(title, measured) for title, measured in settings if measured]
    heights = [len(measured) + 1 for _, measured in settings]
    figure = Figure(figsize=(9, 0.28 * sum(heights) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(settings), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (title, measured) in zip(panels[:, 0], settings, strict=True):
        labels = [f"{row['configuration']}, {row['bits']:.3g} bits" for row in measured]
        colours = ["C0" if row["configuration"].startswith("Blockscale") else "0.7" for row in measured]
        values = [loss_of(row) or math.nan for row in measured]
        axes.scatter(values, range(len(measured)), c=colours, zorder=2)
        for place, value in enumerate(values):
            axes.annotate(f"{value:.3g}", (value, place), (8, -3), textcoords="offset points", fontsize=8)
        axes.grid(axis="y", color="0.9")
        axes.set_yticks(range(len(measured)), labels, fontsize=8)
        axes.set(xscale="log", title=title)
        axes.set_ylim(len(measured) - 0.5, -0.5)
        axes.margins(x=0.1)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("KL(base‖quantized), nats; lower is better")
    figure.savefig(path)


def _parse_texts(options: Sequence[str]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for option in options:
        name, _, file = option.partition("=")
        if not name or not Path(file).is_file():
            raise click.BadParameter(f"{option!r}: expected NAME=FILE, such as 'Finnish=fin.html'")
        # One file has the rows of all texts by name.
        if name in ("calibration", "calibration by kfac", *TEXTS, *files):
            raise click.BadParameter(f"{option!r}: there is a text of this name already; give it another one")
        files[name] = Path(file)
    return files


def _parse_checkpoints(options: Sequence[str]) -> dict[str, Path]:
    checkpoints = {}
    for text in options:
        name, separator, directory = text.partition("=")
        if not separator or name.split(maxsplit=1)[:1] == [name] or name.split()[0] not in SETTINGS:
            raise click.BadParameter(
                f"{text!r}: expected 'SETTING NAME=DIR', such as 'nvfp4a16 llm-compressor GPTQ=out/dir'; "
                f"settings: {', '.join(SETTINGS)}"
            )
        checkpoints[name] = Path(directory)
    return checkpoints


@click.command(help=__doc__)
@click.option("--model", default=MODEL, show_default=True, help="Alias, directory or file of a causal LM.")
@click.option("--tokens", default=TOKENS, type=click.Path(path_type=Path, exists=True),
              help="Safetensors of token ids, `calibration` and `eval`; WikiText-2 by default.")  # fmt: skip
@click.option("--calib", type=click.Choice(["mix", "tokens"]), default="mix", show_default=True,
              help="Calibration text: the package's mixture, or that of --tokens.")  # fmt: skip
@click.option("--text", "more", multiple=True, metavar="NAME=FILE",
              help="One more text to evaluate on, plain or HTML; may be repeated.")  # fmt: skip
@click.option("--rows", default=16, show_default=True, help="Rows of each text to evaluate on.")
@click.option("--calibration-rows", type=click.IntRange(1), help="Rows that methods with data get.  [default: 32, "
              "more of the mixture on a GPU]")  # fmt: skip
@click.option("--texts", type=click.Path(path_type=Path, dir_okay=False),
              help="Keep the rows of all texts in this file; one that exists replaces the options above.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="By default cuda where there is one.")
@click.option("--threads", type=int, help="CPU threads of torch.")
@click.option("--jobs", default=1, show_default=True, help="Rows to measure at a time, over all GPUs; their seconds "
              "grow with it.")  # fmt: skip
@click.option("--only", multiple=True, metavar="GLOB", help="Only rows whose name matches, or `bars`; may be repeated.")
@click.option("--solver", "solvers", multiple=True, help="One more composition for the NVFP4 settings.")
@click.option("--checkpoint", "checkpoints", multiple=True, metavar="'SETTING NAME=DIR'",
              help="A compressed-tensors checkpoint of the model, as one more row.")  # fmt: skip
@click.option("--modelopt-cpu", is_flag=True, help="On a CPU, replace ModelOpt's GPU kernels by our roundings.")
@click.option("--list", "list_only", is_flag=True, help="Print the names of the rows and stop.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the table here.")
@click.option("--resume", is_flag=True, help="Keep the rows that --json has from the same --texts, and measure the "
              "others.")  # fmt: skip
@click.option("--plot", "plot_path", type=click.Path(path_type=Path), help="Also draw it here: .png or .svg.")
@click.option("--worker", is_flag=True, hidden=True, help="Measure the rows that standard input names.")
def main(
    model: str, tokens: Path, calib: str, more: tuple[str, ...], rows: int, calibration_rows: int | None,
    texts: Path | None, device: str | None, threads: int | None, jobs: int, only: tuple[str, ...],
    solvers: tuple[str, ...], checkpoints: tuple[str, ...], modelopt_cpu: bool, list_only: bool,
    json_path: Path | None, resume: bool, plot_path: Path | None, worker: bool,
) -> None:  # fmt: skip
    if threads:
        torch.set_num_threads(threads)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    folder = click.get_current_context().with_resource(tempfile.TemporaryDirectory())
    files = _parse_texts(more)
    settings = Settings(model, texts or Path(folder, "texts.safetensors"), device, modelopt_cpu)
    configurations, notes = all_configurations(solvers, _parse_checkpoints(checkpoints), settings)
    if worker:
        serve(lambda name: measure(configurations[name], name, settings))
        return
    names = chosen(only, configurations)
    if list_only or not names:
        click.echo("\n".join(names or [f"no row matches; there are: {', '.join(configurations)}"]))
        return
    if plot_path and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot needs matplotlib: pip install matplotlib")
    command = [
        sys.executable, "-W", "ignore", __file__, "--worker", f"--model={model}", f"--texts={settings.texts}",
        f"--device={device}",
        *([f"--threads={threads}"] if threads else []), *(f"--solver={s}" for s in solvers),
        *(f"--checkpoint={c}" for c in checkpoints), *(["--modelopt-cpu"] if modelopt_cpu else []),
    ]  # fmt: skip
    header = machine(threads) | versions("transformers", "nvidia-modelopt", "llmcompressor", "torchao")
    if not settings.texts.exists():
        write_texts(settings, tokens, calib, rows, calibration_rows, files)
    made_of = _made_of(settings.texts)
    about = f"methods that need data got {made_of}."
    if jobs > 1:
        about += f" {jobs} rows were measured at a time, so their seconds are too long."
    table = measured_rows(json_path, texts, made_of) if resume else []
    done = {(row["setting"], row["configuration"]) for row in table}
    names = [name for name in names if (SETTINGS[name.split()[0]].title, name.split(maxsplit=1)[1]) not in done]
    if not names:
        click.echo(f"{json_path} has every row already")
        return
    base: float | None = None
    gpus = visible_gpus() if device == "cuda" else []
    longest_first = sorted(names, key=expected_seconds, reverse=True)
    for name, result in measure_all(longest_first, command, jobs=jobs, gpus=gpus, one_row=device == "cpu"):
        losses_text = " / ".join(f"{result[column]:.4f}" for column in result if column.startswith(("KL", "1-cos")))
        outcome = f"loss {losses_text} in {result['s']:.1f} s" if "s" in result else result["error"]
        click.echo(f"{name}: {outcome}", err=True)
        base = result.get("base perplexity", base)
        table = in_order([*table, table_row(name, result, settings)])
        protocol = f"{model} on {device}: perplexity {'unknown' if base is None else f'{base:.2f}'} before; {about}"
        if json_path:
            # After every row, so that a run that is cut short leaves what it has measured.
            write_json(json_path, TITLE, header, table, [protocol, *notes])
    show(TITLE, header, table, [protocol, *notes])
    if plot_path:
        plot(plot_path, table)


def measured_rows(json_path: Path | None, texts: Path | None, made_of: str) -> list[dict[str, Any]]:
    """The rows that an earlier run with the same rows of text wrote, without those that failed.

    Raises:
        click.UsageError: the options do not name both files, or the table is of other text.
    """
    if json_path is None or texts is None:
        raise click.UsageError("--resume needs --json, for the rows of the earlier run, and --texts, for its text")
    if not json_path.exists():
        return []
    written = json.loads(json_path.read_text(encoding="utf-8"))
    if not any(f" {made_of}." in note for note in written["notes"]):
        raise click.UsageError(f"{json_path}: its rows are of other text than {texts}; leave out --resume")
    return [row for row in written["rows"] if loss_of(row) is not None]


def _made_of(texts: Path) -> str:
    """What the calibration rows of a file are, in words."""
    with safe_open(texts, framework="pt") as file:
        return (file.metadata() or {}).get("made of", f"the rows of {texts.name}")


if __name__ == "__main__":
    main()
