"""`quantize PIPELINE --format nvfp4 --out DIR`: quantizes the denoisers of a pipeline of diffusers.

    plan       of each component, from its config alone          wrong options end here, before weights are read
    denoise    the original pipeline makes an image of each prompt; calls of its components are kept, some per prompt,
               drawn so that all prompts together cover the whole trajectory
    choose     formats within --bits or --max-error, where one is given: the squared error of the prediction with one
               group alone rounded to nearest is its score, and the joint error of a choice is measured
    solve      each component by `run`, as a module in memory
    measure    relative error of what the denoiser predicts, by timestep, on prompts that calibrated nothing; then
               images of the same seeds, compared by PSNR and SSIM
    write      the pipeline again, whole or not at all, with a page that shows images side by side

Everything is computed on calls of the original, so that no step depends on an image that has drifted.
"""

import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, listed, read_utf8
from quant.base.json_files import write_json
from quant.base.listener import SILENT, Listener
from quant.calibration.allocation.allocate import make_loop, make_space
from quant.calibration.allocation.goal import Options
from quant.calibration.allocation.measure_choices import Counts, HeldOut
from quant.calibration.evaluating import evaluating
from quant.calibration.inputs import Arguments, Inputs, call_on_first_row, recorded, taking_inputs
from quant.calibration.sensitivity.divergence import prediction_of
from quant.calibration.session import Session, device_of, find_device, placed
from quant.calibration.texts.mixture import lacks_data
from quant.export.checkpoint.files.directory import DENOISING, new_directory
from quant.formats.tensor import moved
from quant.models import pipelines
from quant.models.files import explained, find_model
from quant.models.open_model import open_model
from quant.recipes.blocks import is_denoiser
from quant.recipes.plan import Plan
from quant.report.charts import short_name
from quant.report.denoising import denoising_html
from quant.report.report import Report
from quant.run.compile_layers import compiling, recorded_layers
from quant.run.job import Outcome
from quant.run.request import AllocationRequest, Request
from quant.run.run import compile_solver, run

_OWN = "prompts of Blockscale"
_PROMPTS = 16  # of the list that ships, where the user gives no number
_CALLS = 4  # of each component that are kept of each prompt
_ROOM = 3  # times the bytes of a pipeline that a GPU has free where all of it is moved there
_HELD_OUT_CALLS = 10  # of each held-out prompt
_FORMATS = ("nvfp4", "fp8_channel")  # of a budget, where the user names none
_TIMESTEPS = 3  # at which it measures
_OWN_ARGUMENTS = ("generator", "output_type", "return_dict")  # of pipelines, which a run gives itself
_WHOLE = (".safetensors", ".ckpt", ".gguf")  # beside model_index.json: the original model in one file
Prompt = tuple[int, dict[str, Any]]
"""A prompt's number, which changes the seed, and the arguments of the pipeline for it, `prompt` among them."""


@dataclass(frozen=True)
class PipelineOutcome:
    """The result of a run on a pipeline."""

    plans: dict[str, Plan]  # by component
    reports: dict[str, Report] = field(default_factory=dict)
    denoising: dict[str, Any] = field(default_factory=dict)  # the contents of denoising.json


def run_any(request: Request, listener: Listener = SILENT) -> Outcome | PipelineOutcome:
    """Executes a request on a model or on a pipeline of diffusers."""
    return _run_pipeline(request, listener) if request.is_pipeline else run(request, listener)


def _run_pipeline(request: Request, listener: Listener) -> PipelineOutcome:
    """Executes a request on a pipeline of diffusers; after an error nothing has been written."""
    request.check()
    request.check_destination()
    path = find_model(str(request.model))
    if (file := pipelines.quantized_by(path)) is not None:
        raise UserError(f"{path}: is quantized already ({file.relative_to(path)}); give the original pipeline")
    names = pipelines.models_to_quantize(path, request.components)
    device = find_device(request.device)
    compile_solver(request, device)  # while diffusers is imported
    for name in names if request.goal else ():
        if pipelines.denoiser_class(path / name) is None:
            raise UserError(f"{name} predicts no noise by which formats are chosen; leave it out of --components")
    plans = {} if request.goal else {name: _plan(request, path / name) for name in names}
    if request.dry_run:
        return PipelineOutcome(plans)
    prompts = _Prompts.of(request)
    with listener.step(f"loading {path}"):
        pipe = pipelines.open_pipeline(path)
    options = _options(request, pipe)
    prompts.check(pipe, options)
    needed = [name for name in names if name not in plans or lacks_data(plans[name])]
    make = partial(_image, pipe, options, request.seed)
    count = len(prompts.held_out) + len(prompts.used) * bool(needed)
    with listener.step(f"denoising {counted(count, 'prompt')}"), _running_on(pipe, device):
        data = _calls(pipe, needed, prompts.used, make)
        held_out, images = _held_out(pipe, names, prompts, make)
    sensitivity: dict[str, Any] = {}
    for name in names if request.goal else ():
        with listener.step(f"measuring what each layer of {name} loses"):
            plans[name], sensitivity[name] = choose_formats(getattr(pipe, name), data[name], request, device, name)
    assert request.out is not None
    with new_directory(request.out, overwrite=request.overwrite) as temporary:
        left = (*names, ".git", ".cache")
        for entry in [each for each in path.iterdir() if each.name not in left and each.suffix not in _WHOLE]:
            (shutil.copytree if entry.is_dir() else shutil.copy2)(entry, temporary / entry.name)
        reports, tables = {}, {}
        for name in names:
            model = getattr(pipe, name)
            limit = None if request.goal is None else request.goal.max_kl
            with recorded_layers(model, plans[name]) as calls:
                measured = _NoiseError(model, held_out.get(name, []), device, limit)
            own = _in_memory(request, model)
            component = replace(own, out=temporary / name, data=data.get(name), overwrite=False, noise=measured.notes)
            if request.goal is not None:  # its plan says everything
                component = replace(component, recipe=plans[name], solver=None, effort=None, include=(), exclude=())
            # Where the whole pipeline has room on the GPU, so has a process beside it.
            with compiling(calls, device_of(model)):
                outcome = run(component, listener)
            assert outcome.report is not None
            plans[name], reports[name], tables[name] = outcome.plan, outcome.report, measured.table
        with _running_on(pipe, device), listener.step(f"denoising {counted(len(images), 'prompt')} again"):
            again = [make(*held, output_type="np") for held in prompts.held_out]
        denoising = {
            "prompts": {
                "calibration": len(prompts.used) * bool(needed),
                "source": prompts.source,
                "held_out": [each["prompt"] for _, each in prompts.held_out],
            },
            "options": options,
            "seed": request.seed,
            **image_figures(again, images),
            "components": {name: table for name, table in tables.items() if table},  # text encoders predict no noise
            **({"sensitivity": sensitivity} if sensitivity else {}),
        }
        write_json(temporary / DENOISING, denoising, ensure_ascii=False)
        page = denoising_html(short_name(str(path)), denoising, reports, images, again)
        (temporary / "report.html").write_text(page, encoding="utf-8")
    return PipelineOutcome(plans, reports, denoising)


def _in_memory(request: Request, model: nn.Module) -> Request:
    without: dict[str, Any] = {"components": None, "call": (), "calib": (), "eval_texts": (), "restart": False}
    return replace(request, model=model, budget=AllocationRequest(), **without)


def _plan(request: Request, directory: Path) -> Plan:
    cls = pipelines.denoiser_class(directory)
    model = (
        open_model(str(directory), meta=True).module if cls is None else pipelines.outline_of_denoiser(cls, directory)
    )
    return run(replace(_in_memory(request, model), dry_run=True)).plan


@dataclass(frozen=True)
class _Prompts:
    """Prompts that calibrate, and others on which the loss is measured."""

    used: list[Prompt]
    held_out: list[Prompt]
    source: str

    @classmethod
    def of(cls, request: Request) -> "_Prompts":
        """Returns the prompts of the file that a request names, one a line, or of the list that ships.

        A line that is a JSON object holds arguments of the pipeline, such as a prompt, a size and a number of frames.
        """
        if request.calib:
            if len(request.calib) > 1 or not Path(request.calib[0]).is_file():
                raise UserError(
                    f"--calib {' '.join(request.calib)}: a pipeline takes one file with a prompt in each line"
                )
            source = request.calib[0]
            text = read_utf8(Path(source))
            if source.lower().endswith((".csv", ".tsv")) or re.match(r'\s*\[\s*["{]', text):
                raise UserError(
                    f'{source}: a table or list; give a prompt in each line, or {{"prompt": "…", "height": 512}}'
                )
        else:
            source, text = _OWN, files("quant.run").joinpath("prompts.txt").read_text("utf-8")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        count = request.calib_samples or (len(lines) if request.calib else _PROMPTS)
        if min(count, len(lines)) < 2:
            raise UserError(
                f"{source}: {counted(min(count, len(lines)), 'prompt')}; give two or more, one a line: the last "
                "eighth, and one at least, calibrates nothing, and the loss is measured on it"
            )
        prompts = [(i, _arguments(source, i, line)) for i, line in enumerate(lines[:count])]
        held_out = max(len(prompts) // 8, 1)
        return cls(prompts[:-held_out], prompts[-held_out:], source)

    def check(self, pipe: Any, options: Mapping[str, Any]) -> None:
        """Raises UserError for an argument that the pipeline does not take, or a prompt that every tokenizer cuts."""
        taken = inspect.signature(pipe.__call__).parameters
        parameter = taken.get("max_sequence_length")
        default = math.inf if parameter is None or not isinstance(parameter.default, int) else parameter.default
        # Flux.2 has a processor, whose tokenizer takes text alone.
        named = [each for name, each in pipe.components.items() if name.startswith("tokenizer")]
        tokenizers = [getattr(each, "tokenizer", each) for each in named if each is not None]
        for number, arguments in (*self.used, *self.held_out):
            where, text = f"{self.source}: prompt {number + 1}", arguments["prompt"]
            if unknown := arguments.keys() - (taken.keys() - {*_OWN_ARGUMENTS}):
                raise UserError(
                    f"{where} gives {min(unknown)}, which {type(pipe).__name__} does not take; it takes "
                    f"{listed(list(taken), 8)}"
                )
            _check_values(pipe, arguments, f"{where}: ")
            given = {"max_sequence_length": default, **options, **arguments}["max_sequence_length"]
            lengths = [
                # CLIP's tokenizer, which takes fewer tokens than that argument's default, is not cut by it.
                (len(each(text, truncation=False, verbose=False).input_ids), own if own < default else min(own, given))
                for each, own in ((each, each.model_max_length) for each in tokenizers)
            ]
            if lengths and all(length > limit for length, limit in lengths):
                length, limit = max(lengths, key=lambda pair: pair[1])
                cut = f"{where} has {length} tokens, and the tokenizer cuts it after {limit}: {text[:40]!r} …"
                own = "give shorter ones with --calib" if self.source == _OWN else "shorten it"
                raise UserError(f"{cut}; {own}")


def _arguments(source: str, number: int, line: str) -> dict[str, Any]:
    if not line.startswith("{"):
        return {"prompt": line}
    try:
        arguments = json.loads(line)
    except ValueError as error:
        raise UserError(f"{source}: prompt {number + 1} is no JSON object ({error}): {line[:60]}") from None
    if not isinstance(arguments.get("prompt"), str):
        raise UserError(f'{source}: prompt {number + 1} has no text; write {{"prompt": "…", "height": 512}}')
    return arguments


def _options(request: Request, pipe: Any) -> dict[str, Any]:
    taken, options = inspect.signature(pipe.__call__).parameters, dict[str, Any]()
    for text in request.call:
        name, sign, value = text.partition("=")
        if not sign or name not in taken or name in ("prompt", *_OWN_ARGUMENTS):
            raise UserError(
                f"--call {text}: write NAME=VALUE, of an argument that {type(pipe).__name__} takes: "
                f"{listed([each for each in taken if each != 'prompt'], 8)}"
            )
        if name in options:
            raise UserError(f"--call {name} is given twice; leave one out")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    _check_values(pipe, options, "--call ")
    return options


def _check_values(pipe: Any, options: Mapping[str, Any], where: str) -> None:
    """Raises UserError for steps that the scheduler does not have, or text such as 3,5 in the place of a number."""
    steps = options.get("num_inference_steps")
    trained = None if steps is None else pipe.scheduler.config.get("num_train_timesteps")
    if steps is not None and not (type(steps) is int and 1 <= steps <= (trained or steps)):
        has = f"has {trained} timesteps; give a whole number from 1 to {trained}" if trained else "takes one or more"
        raise UserError(f"{where}num_inference_steps={steps}: {type(pipe.scheduler).__name__} {has}")
    taken = inspect.signature(pipe.__call__).parameters
    for name, value in options.items():
        kind = inspect.formatannotation(taken[name].annotation)
        if isinstance(value, str) and re.search(r"\b(int|float)\b", kind) and "str" not in kind:
            raise UserError(f"{where}{name}={value}: {type(pipe).__name__} takes {kind} there, and no text")


@contextmanager
def _running_on(pipe: Any, device: torch.device | None) -> Any:
    """Runs a pipeline on a device while open: on a GPU with all of it where solving has room beside it, where it stays.

    Elsewhere one component after the other is moved there for each image.
    """
    pipe.set_progress_bar_config(disable=True)
    if device is None or device.type == "cpu":
        yield
        return
    models = [each for each in pipe.components.values() if isinstance(each, nn.Module)]
    waiting = sum(x.nbytes for each in models for x in each.parameters() if x.device.type == "cpu")
    if _ROOM * waiting < torch.cuda.mem_get_info(device)[0]:
        pipe.to(device)
        yield
        return
    pipe.enable_model_cpu_offload(device=device)
    try:
        yield
    finally:
        pipe.remove_all_hooks()
        pipe.to("cpu")


def _image(
    pipe: Any, options: Mapping[str, Any], seed: int, number: int, arguments: Mapping[str, Any], *, output_type: str
) -> Any:
    """Returns what the pipeline makes of a prompt: latents, or an array of pixels in [0, 1]."""
    call = {"generator": torch.Generator().manual_seed(seed + number), "return_dict": False, **options, **arguments}
    try:
        with explained(type(pipe).__name__), torch.no_grad():
            made = pipe(output_type=output_type, **call)[0]
    except UserError as error:
        if "image" not in inspect.signature(pipe.__call__).parameters or "image" in call:
            raise
        way_out = "diffusers.AutoPipelineForText2Image.from_pipe(pipe).save_pretrained(DIR)"
        raise UserError(f"{error}; if it is for want of an image, give the pipeline of text alone: {way_out}") from None
    return np.asarray(made) if output_type == "np" else made


def _record(pipe: Any, names: Sequence[str], make: Callable[[], Any]) -> dict[str, Inputs]:
    """Returns the calls of each component while `make` runs the pipeline once."""
    if not names:
        make()
        return {}
    inner: dict[str, Inputs] = {}
    loop = f"leave {names[0]} out of --components: denoising"
    first = recorded(getattr(pipe, names[0]), lambda _: inner.update(_record(pipe, names[1:], make)), loop)
    return {names[0]: first.to("cpu"), **inner}


def _calls(pipe: Any, names: Sequence[str], prompts: Sequence[Prompt], make: Any) -> dict[str, Inputs]:
    """Returns calibration calls of components: a few of each prompt, over the whole trajectory together."""
    kept: dict[str, list[Arguments]] = {name: [] for name in names}
    for number, prompt in prompts if names else ():
        for name, inputs in _record(pipe, names, partial(make, number, prompt, output_type="latent")).items():
            stride = max(len(inputs) // _CALLS, 1)
            kept[name] += inputs.calls[number % stride :: stride]
    return {name: Inputs(calls, alone=is_denoiser(getattr(pipe, name))) for name, calls in kept.items()}


def _held_out(
    pipe: Any, names: Sequence[str], prompts: _Prompts, make: Any
) -> tuple[dict[str, list[Arguments]], list[Any]]:
    """Returns calls of the denoisers on held-out prompts, and the images of these."""
    images: list[Any] = []
    calls: dict[str, list[Arguments]] = {name: [] for name in names if is_denoiser(getattr(pipe, name))}
    for held in prompts.held_out:
        draw = partial(lambda *each: images.append(make(*each, output_type="np")), *held)
        for name, inputs in _record(pipe, list(calls), draw).items():
            calls[name] += inputs.calls[:: -(-len(inputs) // _HELD_OUT_CALLS)]
    return calls, images


class _NoiseError:
    """Measures a denoiser against what it predicted before it was quantized.

    `table` has the relative error of its predictions at each timestep, from noise to image, and of `all` of them.
    """

    def __init__(
        self, model: nn.Module, calls: Sequence[Arguments], device: torch.device | None, limit: float | None
    ) -> None:
        self.calls, self.device, self.limit = calls, device, limit
        self.before = self._predictions(model)
        self.table: dict[str, float] = {}

    def _predictions(self, model: nn.Module) -> list[Tensor]:
        if not self.calls:
            return []
        with evaluating(model), torch.no_grad(), placed(model, self.device) as device, taking_inputs(model):
            return [prediction_of(model(Inputs([moved(call, device)], alone=True))).cpu() for call in self.calls]

    def notes(self, model: nn.Module) -> list[str]:
        """Returns a line about the error, for the report; fills the table."""
        sums: dict[str, list[float]] = {}
        for call, before, after in zip(self.calls, self.before, self._predictions(model), strict=True):
            for key in (timestep_of(model, call), "all"):
                wrong, whole = sums.setdefault(key, [0.0, 0.0])
                sums[key] = [wrong + float((after - before).square().sum()), whole + float(before.square().sum())]
        if not sums:
            return []
        sums["all"] = sums.pop("all")  # last
        self.table = {key: math.sqrt(wrong / whole) if whole else 0.0 for key, (wrong, whole) in sums.items()}
        worst = max((key for key in self.table if key != "all"), key=self.table.__getitem__)
        each = ", ".join(f"{key}: {error:.2%}" for key, error in self.table.items() if key != "all")
        notes = [
            f"relative error of the predicted noise on held-out prompts: {self.table['all']:.2%}, at most "
            f"{self.table[worst]:.2%} at timestep {worst}; by timestep {each}"
        ]
        if self.limit is not None and self.table["all"] > self.limit:
            notes.append(
                f"--max-error {self.limit:g} holds on the calls that chose formats, and not on held-out prompts: "
                f"{self.table['all']:.4g}; give a lower limit, or more prompts"
            )
        return notes


def choose_formats(
    model: nn.Module, data: Inputs, request: Request, device: torch.device | None, name: str
) -> tuple[Plan, dict[str, dict[str, float]]]:
    """Returns the plan of a denoiser for the goal of a request, by its calls `data`, and errors for the report.

    Errors are those of the prediction where a block alone is in the format that loses most, by block and timestep.
    Infeasible, which names the smallest goal, where no choice keeps it; UserError for a component without timesteps.
    """
    calls, goal, session = _spread(model, data.calls), request.goal, Session.on(device)
    assert goal is not None
    if not calls:
        raise UserError(f"{name} predicts no noise by which formats are chosen; leave it out of --components")
    options = Options(
        formats=request.budget.formats or _FORMATS, solver=request.solver or "gptq", include=request.include,
        exclude=request.exclude, constraints=request.budget.options()["constraints"], run=call_on_first_row(data),
        method="kl", dtype=None,
    )  # fmt: skip
    space = make_space(model, goal, options)
    space.explain(goal, space.problem())
    rows: Any = Inputs(calls, alone=True).to(session.device or device_of(model))
    held_out, rounded = HeldOut.without_verification(rows), replace(options, solver="rtn")
    with evaluating(model), taking_inputs(model):
        loop, _, _ = make_loop(model, space, rows, held_out, goal, Counts(), rounded, session)
        with loop.bench.switchable.ready():
            plan = loop.plan(loop.run(searches=False).choice)
            run, blocks = next(iter(loop.bench.checked.values())), dict[str, dict[str, str]]()
            for group, members in space.groups.items():
                block = next((b for b in loop.bench.switchable.blocks if group.startswith(f"{b}.")), members[0].name)
                scores = loop.scores.by_name[group].scores
                blocks.setdefault(block, {})[group] = max(scores, key=scores.__getitem__)
            errors = {block: [loss**0.5 for loss in run.losses(choice)] for block, choice in blocks.items()}
    times = [timestep_of(model, call) for call in calls]
    return plan, {block: dict(zip(times, each, strict=True)) for block, each in errors.items()}


def _spread(model: nn.Module, calls: Sequence[Arguments]) -> list[Arguments]:
    """Returns a call at each of a few timesteps, over the whole trajectory; none of a model without timesteps."""
    by_time = {time: call for call in calls if (time := timestep_of(model, call))}
    times = sorted(by_time, key=float)
    picked = {times[round(i * (len(times) - 1) / (_TIMESTEPS - 1))] for i in range(_TIMESTEPS)} if times else set()
    return [by_time[time] for time in sorted(picked, key=float, reverse=True)]


def timestep_of(model: nn.Module, call: Arguments) -> str:
    """Returns the timestep of a call of a denoiser; empty where it has none."""
    args, kwargs = call
    named = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    time = named.get("timestep", named.get("t"))
    if isinstance(time, Tensor):
        time = float(time.flatten()[0])
    return "" if time is None else f"{float(time):.4g}"


def image_figures(images: Sequence[np.ndarray], originals: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns `psnr` and `ssim`, a number for each pair of pixels in [0, 1], `[…, height, width, channels]`.

    `ssim` is None without scikit-image.
    """
    pairs = list(zip(images, originals, strict=True))
    errors = [float(np.mean(np.square(image.astype(np.float64) - original))) for image, original in pairs]
    return {
        "psnr": [99.0 if error == 0 else min(-10 * math.log10(error), 99.0) for error in errors],  # 99 of equal images
        "ssim": [_ssim(image, original) for image, original in pairs] if find_spec("skimage") else None,
    }


def _ssim(image: np.ndarray, original: np.ndarray) -> float:
    """Returns the mean structural similarity over images and frames, in windows of 7 × 7."""
    from skimage.metrics import structural_similarity

    frames = [each.reshape(-1, *each.shape[-3:]).astype(np.float64) for each in (image, original)]
    return float(
        np.mean([structural_similarity(*pair, data_range=1.0, channel_axis=-1) for pair in zip(*frames, strict=True)])
    )
