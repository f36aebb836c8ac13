"""This harness runs every format in every runtime that is here, and writes the support tables of the docs from that.

A cell is a tiny decoder of random weights in one format, and one runtime:

    model -> quantize -> checkpoint -> transformers                          -> logits
                                    -> quant export -> onnxruntime, or genai -> logits, tokens, the operators that ran
                                                    -> a TensorRT-RTX engine -> the precision of each GEMM in its file
                                                    -> an AOTInductor package -> logits

    equal      the logits (of genai: the tokens) are those of `quant.load` on the same device, up to roundings
    differs by in 16 bit, the logits are further from FP32's than those of `quant.load`, by a few roundings
    built      the audit found every layer of the engine in the planned precision; its GPU is not here
    refused    by name, with a way out, before anything was written
    never run  written, with a warning that this runtime needs another machine
    DIFFERENT, TRACEBACK   what no table may hold

`runs in` says how a layer is multiplied: *native*, in its low precision, or *storage*, unpacked before.

    PYTHONPATH=. python tests/support_tables.py               all runtimes of this machine, and the pages
    PYTHONPATH=. python tests/support_tables.py onnxruntime   one of them
    PYTHONPATH=. python tests/support_tables.py --render      the pages alone
    PYTHONPATH=. python tests/support_tables.py onnxruntime-gpu --exports FOLDER
                                                              without a GPU it writes what a run with one reads,
                                                              and notes what is refused, as aoti-gpu does

A machine with a GPU runs `quant.load` and AOTInductor there. Cells lie in tests/data/support.json; runtimes that are
not here keep theirs. vLLM's column is from the runs that `benchmarks/vllm_presets.py` left in benchmarks/data, times of
engines are from those of `benchmarks/engine_formats.py` and `benchmarks/onnx_decoders.py`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import serving_samples
import tiny_models
import torch
from onnx_samples import onnxruntime_session, relative_error, round_head
from samples import BASE

import quant
from quant.export.engines.check_engine import forced_run, reference_run
from quant.export.tensorrt.audit import UNPLANNED
from quant.export.tensorrt.torch_tensorrt import _INPUTS as TORCH_TENSORRT
from quant.formats.format import WEIGHT_FORMATS
from quant.recipes.recipe import KEEP, get_recipe

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "tests" / "data" / "support.json"
VLLM = [ROOT / "benchmarks" / "data" / f"vllm_presets_{release}.json" for release in ("0.26", "0.29")]
SPEED = ROOT / "benchmarks" / "data" / "onnx_decoders.json"
README, FORMATS_PAGE, ENGINES_PAGE = (ROOT / name for name in ("README.md", "docs/formats.md", "docs/engines.md"))
PRESETS = (
    "nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4", "mxfp6a16", "mxfp8", "fp8", "fp8_channel", "fp8_block", "int8",
    "int8_static", "int4a16", "int4a16_g64", "int4a16_g32",
)  # fmt: skip
FORMATS = (*PRESETS, "fp8@16bit", "int8@16bit", "fp8_block@16bit", "mxfp8@16bit")
EXPERTS = tuple(f"experts in {format}" for format in ("int4a16_g32", "int8@16bit", "fp8@16bit", "nvfp4a16"))
CAPACITY, NEW = 64, 8
EXPORTS = Path(tempfile.gettempdir()) / "exports"
ROWS = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(1))
PROMPTS = [row.tolist()[: 9 + 7 * index] for index, row in enumerate(ROWS[:3])]
EQUAL, BUILT, REFUSED, NEVER_RUN = "equal", "built", "refused", "never run"
DIFFERS = "differs by "
NATIVE, STORAGE = "native", "storage"
_UP_TO_A_ROUNDING = 1e-3  # of logits, where inputs stay in 16 bit: sums in another order
_FEW_ROUNDINGS = 8 * 2.0**-11  # of FP16: kernels may keep sums of products in it
_CODES_OF_INPUTS_FLIP = 5e-2, 0.1  # where they are rounded, and half-way between two codes; in four bits


@dataclass(frozen=True)
class Cell:
    """What a runtime did with a format: a verdict, how it multiplies ("" if unknown), and a detail in words."""

    verdict: str
    runs_in: str = ""
    detail: str = ""


@cache
def checkpoint(format: str, dtype: torch.dtype = torch.float32) -> Path:
    """A directory with the tiny decoder in a format."""
    out = Path(tempfile.mkdtemp()) / "checkpoint"
    if format.startswith("experts in "):
        model = tiny_models.qwen3_moe(
            moe_intermediate_size=64, head_dim=32, gain=4.0, max_position_embeddings=512, dtype=dtype
        )
        recipe = format.removeprefix("experts in ")
    else:
        model = serving_samples.decoder("llama-128", dtype=dtype)
        recipe = format
    done = quant.quantize(model, recipe, ROWS, solver="rtn")
    assert done.plan.quantized, format
    quant.save(done.model, done.plan, out)
    shutil.copy(BASE / "tokenizer.json", out)  # genai wants one
    return out


def _rounds_inputs(format: str) -> bool:
    return "16" not in format  # as in nvfp4a16 and fp8@16bit


def _compared(logits: np.ndarray, expected: np.ndarray, format: str, runs_in: str = "") -> Cell:
    """The logits of a run in FP32 beside those of `quant.load` on the same tokens."""
    error = relative_error(torch.from_numpy(logits), torch.from_numpy(expected))
    most = _CODES_OF_INPUTS_FLIP["fp4" in format] if _rounds_inputs(format) else _UP_TO_A_ROUNDING
    return Cell(EQUAL if error < most else "DIFFERENT", runs_in, f"logits differ by {error:.1g} of their norm")


def _compared_in_16_bit(logits: np.ndarray, reference: Any, tokens: np.ndarray, runs_in: str = "") -> Cell:
    """The logits of a run in 16 bit are as near to those of FP32 as `reference`, the same model in 16 bit, is.

    A rounding to 16 bit moves an input over the boundary of two codes, so the logits of two right runs differ widely.
    """
    exact = torch.from_numpy(reference_run(copy.deepcopy(reference).float(), PROMPTS, NEW, tokens).logits)
    own = torch.from_numpy(reference_run(reference, PROMPTS, NEW, tokens).logits)
    error, usual = relative_error(torch.from_numpy(logits), exact), relative_error(own, exact)
    said = f"logits differ from FP32's by {error:.1g} of their norm, those of `quant.load` by {usual:.1g}"
    near = f"{DIFFERS}{error:.1g}" if error < _FEW_ROUNDINGS else "DIFFERENT"
    return Cell(EQUAL if error < 1.25 * usual else near, runs_in, said)


def in_transformers(format: str) -> Cell:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # In BF16: it unpacks to BF16 what a model in FP32 could not take.
    directory = checkpoint(format, torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    run = reference_run(loaded, PROMPTS, NEW)
    return _compared_in_16_bit(run.logits, quant.load(directory), run.tokens, STORAGE)


def in_onnxruntime(format: str, target: str = "onnxruntime") -> Cell:
    """The operators of the optimized graph say how it multiplies."""
    import onnx

    from quant.export.onnx import engine_session

    with tempfile.TemporaryDirectory() as folder:
        out, optimized = Path(folder) / "out", Path(folder) / "optimized.onnx"
        exported = quant.export_model(checkpoint(format), "onnx", out, capacity=CAPACITY, dtype="fp32", target=target)
        if any("does not load" in sentence for sentence in exported.warnings):
            return Cell(NEVER_RUN, "", "operators of TensorRT")
        usual = engine_session.loaded
        engine_session.loaded = lambda path, threads, gpu: onnxruntime_session(path, optimized)
        try:
            session = engine_session.OnnxruntimeSession(out / "model.onnx")
        finally:
            engine_session.loaded = usual
        reference = quant.load(checkpoint(format))
        if "int" in format and target == "onnxruntime":  # decoders in INT4 and INT8 get a head in INT8 by default
            round_head(reference)
        expected = reference_run(reference, PROMPTS, NEW)
        run = forced_run(session, PROMPTS, expected.tokens, chunk=7)
        operators = {node.op_type for node in onnx.load(optimized, load_external_data=False).graph.node}
    native = operators & {"MatMulIntegerToFloat", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul"}
    return _compared(run.logits, expected.logits, format, NATIVE if native else STORAGE)


def in_genai(format: str, dtype: str = "fp32") -> Cell:
    import onnxruntime_genai as genai

    on_gpu = dtype == "fp16"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        exported = quant.export_model(checkpoint(format), "onnx", out, dtype=dtype, genai=True)
        if said := [sentence for sentence in exported.warnings if "does not load" in sentence]:
            return Cell(NEVER_RUN, "", said[0])  # it is for the provider of RTX GPUs
        config = json.loads((out / "genai_config.json").read_text())
        options = config["model"]["decoder"]["session_options"]
        options["session.qdq_matmulnbits_accuracy_level"] = "1"
        options["provider_options"] = [{"cuda": {}}] if on_gpu else []
        (out / "genai_config.json").write_text(json.dumps(config))
        model, reference = genai.Model(str(out)), quant.load(checkpoint(format))
        same = total = 0
        for prompt in PROMPTS:
            parameters = genai.GeneratorParams(model)
            parameters.set_search_options(max_length=len(prompt) + NEW, do_sample=False)
            generator = genai.Generator(model, parameters)
            generator.append_tokens(np.array(prompt, np.int32))
            while not generator.is_done():
                generator.generate_next_token()
            written = np.array([generator.get_sequence(0)[len(prompt) :]])
            expected = reference_run(reference, [prompt], written.size, written)  # it may end early
            # The likeliest token of the model at each place of what genai wrote, or one as likely.
            chosen = np.take_along_axis(expected.logits[0], written[0][:, None], 1)[:, 0]
            margin = 0.3 if on_gpu and _rounds_inputs(format) else 0.05  # roundings to FP16 flip codes of inputs
            near = expected.logits[0].max(-1) - chosen <= margin * expected.logits[0].std(-1)
            same, total = same + int(near.sum()), total + near.size
        del generator, model
    return Cell(EQUAL if same == total else "DIFFERENT", "", f"{same} of {total} tokens")


def in_tensorrt_rtx(target: str) -> Callable[[str], Cell]:
    def build(format: str) -> Cell:
        with tempfile.TemporaryDirectory() as folder:
            exported = quant.export_model(
                checkpoint(format),
                "tensorrt",
                Path(folder) / "model.engine",
                capacity=CAPACITY,
                dtype="bf16",
                target=target,
            )
            rows = [row for row in exported.audit if row["planned"] not in (UNPLANNED, "16 bit")]
        assert rows and all(row["passed"] for row in rows), exported.audit
        found = sorted({row["found"] for row in rows if "attn_" not in row["name"].rpartition(".")[2]})
        runs_in = STORAGE if any("half" in word for word in found) else NATIVE
        return Cell(BUILT, runs_in, f"{len(rows)} layers in {', '.join(found)}")

    return build


def in_aoti(device: str) -> Callable[[str], Cell]:
    def compile_and_run(format: str) -> Cell:
        from quant.export.aoti.package import AotiSession

        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        is_here = device == "cpu" or torch.cuda.is_available()
        model = quant.load(checkpoint(format)).to(device if is_here else "cpu", dtype)
        with tempfile.TemporaryDirectory() as folder:
            path = quant.export_model(copy.deepcopy(model), "aoti", Path(folder) / "model.pt2", capacity=CAPACITY).path
            if not is_here:
                return Cell(NEVER_RUN, "", "compiled for the processor")
            session = AotiSession(path, unsafe_load=True)
            expected = reference_run(model, PROMPTS, NEW)
            run = forced_run(session, PROMPTS, expected.tokens, chunk=7)
        if device == "cpu":
            return _compared(run.logits, expected.logits, format)
        return _compared_in_16_bit(run.logits, model, expected.tokens)

    return compile_and_run


def on_a_gpu(format: str) -> Cell:
    """`quant.load` by our kernels next to the same checkpoint on the processor; the kernels that multiplied by name."""
    from torch.profiler import ProfilerActivity, profile

    model = quant.load(checkpoint(format, torch.bfloat16))
    run = reference_run(copy.deepcopy(model).cuda(), PROMPTS, NEW)
    cell = _compared_in_16_bit(run.logits, model, run.tokens)
    model.cuda()
    kernels = []
    for rows in (1, 8):  # of 32 tokens
        ids = ROWS[:1].repeat(rows, 1).cuda()
        with torch.no_grad(), profile(activities=[ProfilerActivity.CUDA]) as seen:
            model(ids)
        launched = [x for x in seen.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
        names = {x.key.partition("(")[0].removeprefix("void ") for x in launched}
        kernels.append(", ".join(sorted(name for name in names if name and "at::" not in name and "Mem" not in name)))
    # cuBLAS names the types of operands by letters, two of FP8 by "qq".
    few, many = (NATIVE if "qqtst" in names or "fp8_block_gemm" in names else STORAGE for names in kernels)
    runs_in = many if few == many else f"{many}, {few} below 64 tokens"
    return Cell(cell.verdict, runs_in, f"{cell.detail}; 32 tokens by {kernels[0]}; 256 tokens by {kernels[1]}")


def exported_in_fp16(format: str) -> Path:
    """A directory of `--exports` with the checkpoint, and the file that onnxruntime's CUDA provider takes."""
    folder = EXPORTS / format.replace(" ", "-")
    if not folder.exists():
        shutil.copytree(checkpoint(format), folder / "checkpoint")
        options = {"capacity": CAPACITY, "dtype": "fp16", "target": "onnxruntime"}
        try:
            quant.export_model(folder / "checkpoint", "onnx", folder / "onnx", **options)
        except Exception:
            shutil.rmtree(folder)
            raise
    return folder


def in_cuda_provider(format: str) -> Cell:
    """The profiler says which provider multiplied: what the CUDA provider lacks runs on the processor."""
    import onnxruntime

    from quant.export.onnx.engine_session import OnnxruntimeSession

    folder = exported_in_fp16(format)
    if not torch.cuda.is_available():
        return Cell(NEVER_RUN, "", f"written to {folder}")
    reference = quant.load(folder / "checkpoint").half()
    if "int" in format:
        round_head(reference)
    expected = reference_run(reference, PROMPTS, NEW)
    usual = onnxruntime.SessionOptions
    with tempfile.TemporaryDirectory() as profile:

        def profiled() -> Any:
            options = usual()
            options.enable_profiling, options.profile_file_prefix = True, f"{profile}/of"
            options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")  # on the processor
            return options

        onnxruntime.SessionOptions = profiled
        try:
            session = OnnxruntimeSession(folder / "onnx" / "model.onnx", gpu=torch.device("cuda", 0))
        finally:
            onnxruntime.SessionOptions = usual
        run = forced_run(session, PROMPTS, expected.tokens)
        events = json.loads(Path(session._session.end_profiling()).read_text())
    nodes = {(e["args"]["op_name"], e["args"]["provider"]) for e in events if e.get("args", {}).get("provider")}
    products = [(op, "CUDA" in provider) for op, provider in nodes if "MatMul" in op or "MoE" in op]
    kind = NATIVE if any("Integer" in op for op, _ in products) else STORAGE
    kind += "" if all(on_gpu for _, on_gpu in products) else ", products on the processor"
    return _compared_in_16_bit(run.logits, reference, expected.tokens, kind)


RUNTIMES: dict[str, tuple[Callable[[str], Cell], tuple[str, ...]]] = {
    "transformers": (in_transformers, ("transformers", "compressed-tensors")),
    "onnxruntime": (in_onnxruntime, ("onnxruntime",)),
    "onnxruntime-tensorrt": (partial(in_onnxruntime, target="tensorrt"), ("onnxruntime",)),
    "onnxruntime-gpu": (in_cuda_provider, ("onnxruntime-gpu", "torch")),
    "onnxruntime-genai": (in_genai, ("onnxruntime-genai", "onnxruntime")),
    "onnxruntime-genai-gpu": (partial(in_genai, dtype="fp16"), ("onnxruntime-genai-cuda", "onnxruntime-gpu")),
    "tensorrt-rtx-sm89": (in_tensorrt_rtx("sm89"), ("tensorrt-rtx",)),
    "tensorrt-rtx-sm120": (in_tensorrt_rtx("sm120"), ("tensorrt-rtx",)),
    "aoti-cpu": (in_aoti("cpu"), ("torch",)),
    "gpu": (on_a_gpu, ("torch", "triton")),
    "aoti-gpu": (in_aoti("cuda"), ("torch", "triton")),
}
"""By name: what runs a cell, and the packages whose versions are written beside it."""


def run_cell(runtime: str, format: str) -> Cell:
    """One cell; what is refused is one, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return RUNTIMES[runtime][0](format)
    except (quant.UserError, ValueError) as error:
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
        if ROOT not in raised_in.parents or ".venv" in raised_in.parts:
            return Cell("TRACEBACK", "", f"{type(error).__name__}: {error} ({raised_in.name})")
        return Cell(REFUSED, "", " ".join(str(error).replace(str(ROOT), ".").split()))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return Cell("TRACEBACK", "", f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})")


def here(runtime: str) -> bool:
    if runtime.endswith("gpu") != torch.cuda.is_available():
        return False
    try:
        return all(version(package) for package in RUNTIMES[runtime][1])
    except ImportError:
        return False


# What the pages say, from cells alone.

WORDS = {
    "nvfp4a16": "NVFP4, 16 bit", "nvfp4": "NVFP4, NVFP4", "mxfp4a16": "MXFP4, 16 bit", "mxfp4": "MXFP4, MXFP4",
    "mxfp6a16": "MXFP6, 16 bit", "mxfp8": "MXFP8, MXFP8", "fp8": "FP8, one static scale each ¹",
    "fp8_channel": "FP8 per row, per token", "fp8_block": "FP8 in 128×128, 1×128", "int8": "INT8 per row, per token",
    "int8_static": "INT8 per row, one static scale", "int4a16": "INT4 in groups of 128, 16 bit",
    "int4a16_g64": "INT4 in groups of 64, 16 bit", "int4a16_g32": "INT4 in groups of 32, 16 bit",
}  # fmt: skip


def formats_table(found: Mapping[str, Any], presets: tuple[str, ...] = PRESETS) -> list[str]:
    """How each runtime multiplies each preset; `–` where it is refused."""
    vllm = [json.loads(path.read_text(encoding="utf-8")) for path in VLLM]
    lines = [
        "| `--format` | weights, inputs | bits | our kernels, H200 | vLLM, H100 and H200 "
        "| TensorRT-RTX, Ada / Blackwell | onnxruntime, CPU | transformers |",
        "|---|---|---:|---|---|---|---|---|",
    ]
    for preset in presets:
        bits = 8 * WEIGHT_FORMATS[get_recipe(preset).weight].nbytes((4096, 4096)) / 4096**2
        engines = [_runs_in(found, f"tensorrt-rtx-{target}", preset) for target in ("sm89", "sm120")]
        cells = (
            _runs_in(found, "gpu", preset),
            in_vllm(vllm, preset),
            " / ".join(engines),
            _runs_in(found, "onnxruntime", preset),
            _runs_in(found, "transformers", preset),
        )
        lines.append(f"| `{preset}` | {WORDS[preset]} | {round(8 * bits) / 8:g} | {' | '.join(cells)} |")
    return lines


def _runs_in(found: Mapping[str, Any], runtime: str, format: str) -> str:
    cell = Cell(**found[runtime]["cells"][format])
    if cell.verdict == REFUSED:
        return "–"
    assert cell.verdict in (EQUAL, BUILT), (runtime, format, cell)
    is_told = cell.runs_in == STORAGE and _rounds_inputs(format) and runtime in ("gpu", "transformers")
    return f"{STORAGE}, inputs rounded" if is_told else cell.runs_in


def in_vllm(runs: list[Any], preset: str) -> str:
    """How the kernels that vLLM itself chose multiply, in every release that was run."""
    said = set()
    for run in runs:
        for row in run["rows"]:
            if (row["of"], row["preset"], row["layout"]) == ("dense", preset, "compressed-tensors"):
                wide = row["kernel"].startswith(("Marlin", "Machete", "Humming"))
                storage = f"{STORAGE}, inputs in 16 bit" if _rounds_inputs(preset) else STORAGE
                said.add((storage if wide else NATIVE) if row["loads"] == "yes" else "–")
    assert len(said) <= 1, (preset, said)
    return said.pop() if said else "not run"


def engines_table(found: Mapping[str, Any]) -> list[str]:
    """What every exported format did in every runtime, and how fast it was there."""
    columns: dict[str, tuple[Callable[[str], str], ...]] = {
        "onnxruntime, CPU": (partial(_verdict, found, "onnxruntime"),),
        "`--target tensorrt` there": (partial(_verdict, found, "onnxruntime-tensorrt"),),
        "onnxruntime, CUDA": (partial(_verdict, found, "onnxruntime-gpu"),),
        "genai, CPU": (partial(_verdict, found, "onnxruntime-genai"),),
        "genai, CUDA": (partial(_verdict, found, "onnxruntime-genai-gpu"),),
        "TensorRT-RTX, Ada / Blackwell": tuple(
            partial(_verdict, found, f"tensorrt-rtx-{name}") for name in ("sm89", "sm120")
        ),
        "TensorRT (`local`) / torch-tensorrt": (partial(_like, found, "tensorrt-rtx-sm120"), _in_torch_tensorrt),
        "AOTInductor, CPU": (partial(_verdict, found, "aoti-cpu"),),
        "AOTInductor, H200": (partial(_verdict, found, "aoti-gpu"),),
    }
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for format in (*FORMATS, *EXPERTS):
        cells = [" / ".join(said(format) for said in column) for column in columns.values()]
        name = format.replace("experts in ", "experts in `") if format in EXPERTS else f"`{format}"
        lines.append(f"| {name}` | {' | '.join(cells)} |")
    return lines


def _verdict(found: Mapping[str, Any], runtime: str, format: str) -> str:
    cell = Cell(**found.get(runtime, {}).get("cells", {}).get(format, {"verdict": NEVER_RUN}))
    is_near = cell.verdict.startswith(DIFFERS)
    assert cell.verdict in (EQUAL, BUILT, REFUSED, NEVER_RUN) or is_near, (runtime, format, cell)
    if cell.verdict == REFUSED:
        return "–"
    times = _times(runtime).get(format)
    return ", ".join(filter(None, (cell.verdict, cell.runs_in, times and f"{times:.2f}×")))


def _like(found: Mapping[str, Any], runtime: str, format: str) -> str:
    """A runtime that nobody ran and that takes the formats of another."""
    return "–" if found[runtime]["cells"][format]["verdict"] == REFUSED else NEVER_RUN


def _in_torch_tensorrt(format: str) -> str:
    recipe = get_recipe(format.removeprefix("experts in "))
    takes = recipe.activation in (None, KEEP) or recipe.activation in TORCH_TENSORRT.get(recipe.weight, ())
    return NEVER_RUN if recipe.weight in TORCH_TENSORRT and takes and format not in EXPERTS else "–"


@cache
def _times(runtime: str) -> dict[str, float]:
    """How many tokens a second a decoder writes for each one of the same decoder unquantized, by format."""
    path = ROOT / "benchmarks" / "data" / f"engine_formats_{runtime}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    return {row["format"]: row["times"] for row in rows if row["times"]}


def _timed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(SPEED.read_text(encoding="utf-8"))["rows"]
    return rows


_TIMED = {"INT4 head": "int4a16_g64", "INT8 head": "int8", "INT8 static": "int8_static", "FP8": "fp8"}
"""The files that `quant export` writes by default, but for the head of the static one, which was in 16 bit."""


def speed_table(found: Mapping[str, Any]) -> list[str]:
    """SmolLM2 in onnxruntime on a processor, beside the file in FP32."""
    del found
    names = {name: f"`{format}`" for name, format in _TIMED.items()}
    wide = {"INT4": "int4a16_g64", "INT8": "int8", "INT8 static": "int8_static"}
    names |= {name: f"`{format}`, `--lm-head 16bit`" for name, format in wide.items()}
    names |= {"FP32": "FP32, exported likewise", "quant.load of INT4": "`quant.load` of `int4a16_g64`, FP32"}
    lines = [
        "| | MB | prefill of 256 tokens | of FP32 | a token | of FP32 | KL from `quant.load` |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in _timed():
        size = "–" if row["MB"] is None else f"{row['MB']:.0f}"
        loss = "" if row["KL"] is None else f"{row['KL']:.2g} nats"
        times = (
            f"{row['prefill ms']:.0f} ms | {row['of FP32']:.2f} | {row['ms a token']:.1f} ms | {row['times FP32']:.2f}"
        )
        lines.append(f"| {names[row['file']]} | {size} | {times} | {loss} |")
    return lines


def versions_line(found: Mapping[str, Any]) -> list[str]:
    """The versions and the machine of each runtime's cells."""
    machines: dict[str, dict[str, str]] = {}
    for entry in found.values():
        packages = {name: number.partition("+")[0] for name, number in entry["versions"].items()}
        machines.setdefault(entry["machine"], {}).update(packages)
    return [
        f"On {machine}: "
        + ", ".join(f"{name} {number.split('+')[0]}" for name, number in sorted(packages.items()))
        + "."
        for machine, packages in machines.items()
    ]


def readme_table(found: Mapping[str, Any]) -> list[str]:
    lines = formats_table(found, ("nvfp4", "nvfp4a16", "mxfp8", "fp8", "int8", "int4a16"))
    return [line.replace(" ¹", "") for line in lines]


TABLES = {(FORMATS_PAGE, "formats"): formats_table, (ENGINES_PAGE, "engines"): engines_table,
          (ENGINES_PAGE, "speed"): speed_table, (README, "formats"): readme_table}  # fmt: skip


def rendered(page: Path, name: str, found: Mapping[str, Any]) -> str:
    """The text of a page with its table written anew."""
    text = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name}: written by tests/support_tables.py -->\n", f"<!-- {name}: end -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    lines = TABLES[page, name](found)
    if page != README and name != "speed":
        lines += ["", *versions_line(found)]
    return before + start + "\n" + "\n".join(lines) + "\n\n" + end + after


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runtimes", nargs="*", help="of those that are here; all by default")
    parser.add_argument("--formats", nargs="*", default=[*FORMATS, *EXPERTS])
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--found", type=Path, default=FOUND)
    parser.add_argument("--exports", type=Path, default=EXPORTS, help="for onnxruntime-gpu: written without a GPU")
    options = parser.parse_args(arguments)
    globals()["EXPORTS"] = options.exports
    found = json.loads(options.found.read_text(encoding="utf-8")) if options.found.is_file() else {}
    for runtime in [] if options.render else options.runtimes or [name for name in RUNTIMES if here(name)]:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"an {platform.machine()} processor"
        entry = found.setdefault(runtime, {})
        only_writes = runtime in ("onnxruntime-gpu", "aoti-gpu") and not torch.cuda.is_available()
        if not only_writes:
            entry |= {"machine": machine, "versions": {package: version(package) for package in RUNTIMES[runtime][1]}}
        for format in options.formats:
            if runtime == "transformers" and format in EXPERTS:
                continue  # docs/architectures.md has them, model by model
            cell = run_cell(runtime, format)
            print(runtime, format, *asdict(cell).values(), flush=True)
            if only_writes and cell.verdict != REFUSED:
                continue
            entry.setdefault("cells", {})[format] = asdict(cell)
            options.found.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.found == FOUND:
        for page, name in TABLES:
            page.write_text(rendered(page, name, found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
