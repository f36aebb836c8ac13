"""This benchmark times matmuls by quantized weights and their quantizers on one GPU, and the library's BF16 matmul.

    python benchmarks/gemm.py                     every section
    python benchmarks/gemm.py --only nvfp4,casts  some of them
    python benchmarks/gemm.py --search            the fastest of all candidates, and not what a call takes
    python benchmarks/gemm.py --compile-only      fills Triton's cache and measures nothing

Method: each call is replayed from a CUDA graph over copies of the weight that together exceed the L2 cache, and is
the median of five replays. A launch is compared with float64 first. A search shows the fastest correct candidate, and
how many were wrong or refused. Rates of bytes count what a weight takes in its format. Sections run in
processes of their own, one at a time on the GPU, so that a fault in one leaves the others.

Peers are measured in the same run where they are installed: PyTorch's BF16 matmul (cuBLAS), `torch._scaled_mm`, and
humming's NVFP4 (`humming-kernels`), which its own heuristics launch.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from _copy_rate import copy_rate
from _gemm_peers import humming
from _plot import lines
from _table import Row, machine, show, versions, write_json

from quant.base.json_files import json_text
from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base.hardware import current
from quant.kernels.linear import dispatch, tiles, tuning
from quant.kernels.linear import tiles as launch_table
from quant.kernels.linear.rounded_products import prefill_linear
from quant.kernels.linear.tuning import graph_microseconds, warm_up

_search = "--search" in sys.argv
WIDE, TALL, SQUARE = (28672, 4096), (4096, 14336), (4096, 4096)
SHAPES = (WIDE, TALL, SQUARE)
# Between powers of two too: there, how tiles go into the SMs decides.
MIDDLE_TOKENS, PREFILL_TOKENS = (128, 256, 384, 512, 640, 768, 896), (1024, 1536, 4096)


def random_weight(format: Format, shape: tuple[int, int]) -> BlockScaledTensor:
    """Random codes and scales, finite, on the GPU."""
    dtype = format.element.torch_dtype or torch.uint8
    codes = torch.randint(0, 256, format.codes_shape(shape), dtype=torch.uint8, device="cuda")
    if dtype.is_floating_point:
        codes = torch.where((codes & 0x7F) > 0x77, codes & 0xF7, codes)  # no NaN, no infinity
    scale_shape = format.scale_shape(shape)
    if format.scale.is_wide:
        scale = torch.rand(scale_shape, device="cuda") + 0.5
    elif format.global_scale:
        scale = torch.randint(1, 0x7F, scale_shape, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    else:
        scale = torch.randint(120, 134, scale_shape, dtype=torch.uint8, device="cuda")
    second = torch.tensor(0.01, device="cuda") if format.global_scale else None
    return BlockScaledTensor(codes.view(dtype), scale, format, shape, second)


@contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    """Waits for the GPU; without a lock, does not."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def weights(
    name: str, cases: list[tuple[tuple[int, int], int]], prepacked: bool = False
) -> Callable[[bool], Iterator[Row]]:
    """A section that multiplies by weights in format `name`, for each (shape, tokens)."""

    def section(compile_only: bool) -> Iterator[Row]:
        from quant.kernels.base.weight_layout import prepack

        for shape, tokens in cases:
            weight = random_weight(FORMATS[name], shape)
            nbytes = weight.nbytes
            weight = prepack(weight) if prepacked else weight
            if compile_only:
                _run_once(weight, tokens)
                continue
            timings, dropped = tuning.search(weight, tokens, current(), choices=_choices(weight, tokens))
            row = {"what": f"{name}{' prepacked' if prepacked else ''}", "N": shape[0], "K": shape[1], "M": tokens}
            if not timings:
                yield {**row, "launch": "; ".join(f"{c}: {why}" for c, why in dropped.items())[:300]}
                continue
            best = timings[0]
            yield (
                {
                    **row,
                    "us": best.microseconds,
                    "TB/s": nbytes / best.microseconds * 1e-6,
                    "TFLOP/s": 2 * tokens * shape[0] * shape[1] / best.microseconds * 1e-6,
                    "error": best.error,
                    "launch": _words(best.choice),
                    "others": " ".join(f"{_words(t.choice)}={t.microseconds:.1f}" for t in timings[1:]),
                    "dropped": "; ".join(f"{_words(c)}: {why}" for c, why in dropped.items()),
                    "choice": tiles.to_dict(best.choice),
                    "key": launch_table.key(FORMATS[name], tokens, shape, prepacked),
                }
            )

    return section


def _choices(weight: BlockScaledTensor, tokens: int) -> list[tiles.Choice]:
    shape = (weight.shape[0], weight.shape[1])
    if _search:
        return tiles.candidates(weight.format, tokens, shape, current(), weight.codes.dtype is torch.int32)
    return [dispatch.choose_launch(weight, torch.empty(tokens, shape[1], device="cuda", dtype=torch.bfloat16))]


def _run_once(weight: BlockScaledTensor, tokens: int) -> None:
    x = torch.randn(tokens, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    dispatch.dequantize(weight, torch.bfloat16)
    for choice in _choices(weight, tokens):
        try:
            dispatch.multiply_with(x, weight, None, choice)
        except Exception as error:
            print(f"{weight.format} {list(weight.shape)} {tokens} {choice}: {error}", file=sys.stderr)


def _words(choice: tiles.Choice) -> str:
    if isinstance(choice, tiles.GluonTiles):
        c = choice
        return f"gluon {c.block_m}/{c.programs} w{c.warps}r{c.resident}d{c.depth}s{c.stages}"
    if isinstance(choice, tiles.Tiles):
        c = choice
        swap = "ᵀ" if c.swap else ""
        return f"{c.block_m}x{c.block_n}x{c.block_k}{swap}/{c.splits} w{c.warps}s{c.stages}"
    if isinstance(choice, tiles.PrefillTiles):
        return f"tall {choice.block_m}x{128 * choice.halves}/{choice.groups} d{choice.depth}s{choice.stages}"
    return "dense"


def library(compile_only: bool) -> Iterator[Row]:
    """PyTorch's own: BF16 matmul, FP8 matmul, copy."""
    if compile_only:
        return
    yield {"what": "copy", "TB/s": copy_rate() * 1e-12}
    for shape in SHAPES:
        copies = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        for tokens in (1, 16, 64, *MIDDLE_TOKENS, *PREFILL_TOKENS):
            x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
            us = graph_microseconds([lambda w=w, x=x: x @ w.T for w in copies])
            yield _library_row("bf16", shape, tokens, us, 2)
    shape, tokens = WIDE, 4096
    x8 = torch.randn(tokens, shape[1], device="cuda").to(torch.float8_e4m3fn)
    w8 = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
    for name, sizes in (("tensor", ((), ())), ("row", ((tokens, 1), (1, shape[0])))):
        a, b = (torch.ones(size, device="cuda") for size in sizes)
        us = graph_microseconds(
            [lambda a=a, b=b: torch._scaled_mm(x8, w8.T, scale_a=a, scale_b=b, out_dtype=torch.bfloat16)]
        )
        yield _library_row(f"_scaled_mm {name}", shape, tokens, us, 1)


def _library_row(name: str, shape: tuple[int, int], tokens: int, us: float, itemsize: int) -> Row:
    work = shape[0] * shape[1]
    rates = {"TB/s": itemsize * work / us * 1e-6, "TFLOP/s": 2 * tokens * work / us * 1e-6}
    return {"what": name, "N": shape[0], "K": shape[1], "M": tokens, "us": us, **rates}


def peers(compile_only: bool) -> Iterator[Row]:
    """Other projects' NVFP4 by BF16, over copies of the weight as ours."""
    for shape in SHAPES:
        weight = random_weight(FORMATS["nvfp4"], shape)
        layers = [linear for w in tuning.copies(weight, current().l2) if (linear := humming(w)) is not None]
        for tokens in (1, 16, 64, 256, 512, 768, 1024, 4096) if layers else ():
            x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
            y = layers[0](x)
            if compile_only:
                continue
            exact = x.double() @ weight.dequantize(torch.float64).T
            us = graph_microseconds([lambda layer=layer, x=x: layer(x) for layer in layers])
            row = {"what": "humming nvfp4", "N": shape[0], "K": shape[1], "M": tokens, "us": us}
            rates = {"TB/s": weight.nbytes / us * 1e-6, "TFLOP/s": 2 * tokens * shape[0] * shape[1] / us * 1e-6}
            yield {**row, **rates, "error": float((y.double() - exact).norm() / exact.norm())}


def prefill(compile_only: bool) -> Iterator[Row]:
    """NVFP4 weights by FP8 activations: x to E4M3, the weight to E4M3, the library's product, as one time."""
    from quant.kernels.base.weight_layout import prepack
    from quant.kernels.linear import sm90_decode

    if not current().has_wgmma:
        return
    for shape, tokens in ((WIDE, 1024), (WIDE, 4096), (TALL, 4096)):
        weight = prepack(random_weight(FORMATS["nvfp4"], shape))
        x = torch.randn(tokens, shape[1], device="cuda", dtype=torch.bfloat16)
        y = prefill_linear(x, weight, None, None, activation=FORMATS["fp8_token"])
        sm90_decode.dequantize_prepacked(weight)
        if compile_only:
            continue
        exact = x.double() @ dispatch.dequantize(weight, torch.bfloat16).double().T
        copies = list(tuning.copies(weight, current().l2))
        us = graph_microseconds(
            [lambda w=w, x=x: prefill_linear(x, w, None, None, activation=FORMATS["fp8_token"]) for w in copies]
        )
        row = _library_row("nvfp4 × fp8_token", shape, tokens, us, 1)
        yield {**row, "TB/s": None, "error": float((y.double() - exact).norm() / exact.norm())}
        if tokens == 4096:
            elements = shape[0] * shape[1]
            for name, call, nbytes in (
                ("nvfp4 to bf16", sm90_decode.dequantize_prepacked, 2 + 9 / 16),
                ("nvfp4 to e4m3", sm90_decode.prepacked_to_e4m3, 1 + 9 / 16),
            ):
                us = graph_microseconds([lambda w=w, c=call: c(w) for w in copies])
                yield {"what": name, "N": shape[0], "K": shape[1], "us": us, "TB/s": nbytes * elements / us * 1e-6}


def casts(compile_only: bool) -> Iterator[Row]:
    """Quantizers: bytes read and written a second."""
    from quant.kernels.rounding import portable_casts

    tokens, columns = 16384, 4096
    inputs = [torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    one = torch.tensor(0.01, device="cuda")
    for name in ("nvfp4", "mxfp8", "fp8_token"):
        form = FORMATS[name]
        second = one if form.global_scale else None

        def call(x: torch.Tensor, f: Format = form, g: torch.Tensor | None = second) -> Any:
            return portable_casts.quantize(x, f, global_scale=g)

        try:
            call(inputs[0])
            if compile_only:
                continue
            us = graph_microseconds([lambda x=x, c=call: c(x) for x in inputs])
            moved = 2 * tokens * columns + form.nbytes((tokens, columns))
            yield {"what": f"quantize {name}", "N": columns, "M": tokens, "us": us, "TB/s": moved / us * 1e-6}
        except Exception as error:
            yield {"what": f"quantize {name}", "launch": f"{type(error).__name__}: {error}"[:300]}


DECODE = [(shape, tokens) for shape in SHAPES for tokens in (1, 16, 64)]
MIDDLE = [(shape, tokens) for shape in SHAPES for tokens in MIDDLE_TOKENS]
PREFILL = [(shape, tokens) for shape in SHAPES for tokens in PREFILL_TOKENS]
SOME = [(WIDE, tokens) for tokens in (64, 256, 1024, 4096)]
SECTIONS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "library": library,
    "nvfp4": weights("nvfp4", [*DECODE, *MIDDLE, *PREFILL], prepacked=True),
    "mxfp4": weights("mxfp4", [(shape, 16) for shape in SHAPES], prepacked=True),
    "peers": peers,
    "prefill": prefill,
    "nvfp4-checkpoint": weights("nvfp4", [(WIDE, 1), (WIDE, 16), (TALL, 16), (SQUARE, 16), (WIDE, 64), (WIDE, 256)]),
    "mxfp8": weights("mxfp8", [(WIDE, 1), (WIDE, 16), (TALL, 16), (SQUARE, 16), *SOME]),
    "fp8_channel": weights("fp8_channel", [(WIDE, 1), (WIDE, 16), (TALL, 16), *SOME]),
    "fp8_block": weights("fp8_block", [(WIDE, 16), *SOME]),
    "int8": weights("int8", [(WIDE, 16), *SOME]),
    "4bit": lambda compile_only: chain(
        weights("int4", [(WIDE, 16), *SOME])(compile_only), weights("mxfp4", [(WIDE, 16)])(compile_only)
    ),
    "casts": casts,
}


def in_process(name: str, lock: Path | None, compile_only: bool, out: Path) -> None:
    """Runs one section and writes its rows, each as soon as it is known."""
    torch.cuda.init()
    rows: list[dict[str, Any]] = []
    with turn(lock):
        try:
            if not compile_only:
                warm_up()
            for row in SECTIONS[name](compile_only):
                rows.append(dict(row))
                out.write_text(json_text(rows))
        except Exception:
            rows.append({"what": name, "launch": traceback.format_exc()[-400:].replace("\n", " ")})
    out.write_text(json_text(rows))


def run_sections(names: list[str], compile_only: bool, limit: float | None) -> list[dict[str, Any]]:
    """All sections, each in a process; they compile and wait side by side and measure one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder, "gpu")
        outs = {name: Path(folder, f"{name}.json") for name in names}
        running = []
        for name, out in outs.items():
            command = [sys.executable, __file__, "--section", name, "--out", str(out)]
            command += ["--compile-only"] if compile_only else ["--lock", str(lock)]
            command += ["--search"] if _search else []
            running.append(subprocess.Popen(command))
        end = None if limit is None else time.monotonic() + limit
        for process in running:
            try:
                process.wait(None if end is None else max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        rows: list[dict[str, Any]] = []
        for name, out in outs.items():
            rows += json.loads(out.read_text()) if out.exists() else [{"what": name, "launch": "the process died"}]
        return rows


def main() -> None:
    """Parses the options, runs the sections, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="sections, separated by commas: " + ", ".join(SECTIONS))
    parser.add_argument("--compile-only", action="store_true", help="compile every kernel and stop")
    parser.add_argument("--search", action="store_true", help="measure all candidates, not only what a call takes")
    parser.add_argument("--json", type=Path, help="also write the rows, every candidate with its time, to this file")
    parser.add_argument("--table", type=Path, help="write what --search found as a table for kernels/linear/tuned/")
    parser.add_argument("--plot", type=Path, help="also draw NVFP4 over cuBLAS by tokens here: .png or .svg")
    parser.add_argument("--limit", type=float, help="seconds, after which the table shows what is there")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table and not options.search:
        parser.error("--table is for what --search finds")
    if not torch.cuda.is_available():
        parser.exit(message="this benchmark needs a CUDA device; none is here\n")
    if options.section:
        in_process(options.section, options.lock, options.compile_only, options.out)
        return
    rows = run_sections(
        options.only.split(",") if options.only else list(SECTIONS), options.compile_only, options.limit
    )
    if options.compile_only:
        return
    dense = {(r["N"], r["K"], r["M"]): r["us"] for r in rows if r["what"] == "bf16"}
    columns = ("what", "N", "K", "M", "us", "TB/s", "TFLOP/s", "x bf16", "error", "launch")
    for row in rows:
        base = dense.get((row.get("N"), row.get("K"), row.get("M")))
        row["x bf16"] = base / row["us"] if base and "us" in row else None
    header = {**machine(), **versions("triton")}
    title = "Multiplying by quantized weights"
    if options.json:
        write_json(options.json, title, header, rows)
    if options.plot:
        names = {"nvfp4 prepacked": "Blockscale NVFP4", "humming nvfp4": "humming NVFP4"}
        drawn = [
            {"what": name, "N × K": f"{row['N']} × {row['K']}", "tokens": row["M"], "× cuBLAS BF16": row["x bf16"]}
            for row in rows
            if (name := names.get(row["what"]))
        ]
        lines(options.plot, drawn, x="tokens", y="× cuBLAS BF16", line="what", panel="N × K")
    if options.table:
        entries = {r["key"]: {"choice": r["choice"], "microseconds": round(r["us"], 2)} for r in rows if "key" in r}
        text = json_text({"gpu": current().name, "entries": entries}, indent=1, sort_keys=True)
        options.table.write_text(text + "\n")
    dropped = [f"{r['what']} {r['N']}x{r['K']} M={r['M']} dropped {r['dropped']}" for r in rows if r.get("dropped")]
    show(title, header, [{c: row.get(c) for c in columns} for row in rows], dropped)


if __name__ == "__main__":
    main()
