"""docs/way-of-a-weight.md names the functions that a weight passes; here the command runs under a tracer to compare."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tiny_models
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from samples import BASE, ROOT

import quant
from quant.cli.main import main
from quant.cli.quantize import quantize_command

Stop = tuple[str, str]
SOLVER = ("calibration/solvers/gptq.py", "Gptq.__call__")


def section_of_page(section: str) -> str:
    page = (ROOT / "docs" / "way-of-a-weight.md").read_text()
    return page.partition(f"## {section}\n")[2].partition("\n## ")[0]


def stops(section: str) -> list[Stop]:
    """File and function of each numbered stop in a section of the page."""
    return re.findall(r"^\d+\. `([\w/]+\.py):([\w.]+)`", section_of_page(section), re.MULTILINE)


def functions(section: str) -> list[Stop]:
    """File and function of each place that a section names, but classes."""
    return re.findall(r"`([\w/]+\.py):((?:\w+\.)?[a-z_]+)`", section_of_page(section))


@cache
def file_of(name: str) -> str | None:
    """A source file relative to the root; None outside of the project. `quant/formats` is a link to `formats`."""
    path = Path(name)
    if not path.is_absolute() or not (path := path.resolve()).is_relative_to(ROOT) or ".venv" in path.parts:
        return None
    return path.relative_to(ROOT).as_posix()


class Tracer:
    """Records the first call of every function of the project, and the stack at the first call of the solver."""

    def __init__(self) -> None:
        self.first_calls: dict[Stop, int] = {}
        self.stack: list[Stop] = []

    def run(self, work: Callable[[], Any]) -> Any:
        sys.setprofile(self._note)
        try:
            return work()
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        file = file_of(frame.f_code.co_filename) if event == "call" else None
        if file is None:
            return
        stop = (file, frame.f_code.co_qualname)
        self.first_calls.setdefault(stop, len(self.first_calls))
        if stop == SOLVER and not self.stack:
            caller: FrameType | None = frame
            while caller is not None:
                if (file := file_of(caller.f_code.co_filename)) is not None and not file.startswith("tests/"):
                    self.stack.insert(0, (file, caller.f_code.co_qualname))
                caller = caller.f_back


@pytest.fixture(scope="module")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> Tracer:
    home = tmp_path_factory.mktemp("way")
    tiny_models.llama(dtype=torch.bfloat16).save_pretrained(home / "model")
    save_file({"input_ids": torch.arange(5, 25)[None]}, home / "rows.safetensors")
    options = ("--calib", home / "rows.safetensors", "--calib-samples", 1, "--seqlen", 16, "--out", home / "out")
    arguments = [str(home / "model"), "--format", "nvfp4a16", "--solver", "gptq", "--quiet", *map(str, options)]
    traced = Tracer()
    done = traced.run(lambda: CliRunner().invoke(quantize_command, arguments))
    assert done.exit_code == 0, done.output
    traced.run(lambda: quant.load(home / "out")(torch.arange(5, 15)[None]))
    return traced


def test_the_stack_at_the_solver_is_the_one_on_the_page(tracer: Tracer) -> None:
    down = stops("Down to the solver")
    assert down[-1] == SOLVER
    assert [frame for frame in tracer.stack if frame in down] == down, tracer.stack


def test_the_other_stops_follow_in_the_order_of_the_page(tracer: Tracer) -> None:
    way = [*stops("Down to the solver"), *stops("Up to the checkpoint"), *stops("Back to the product")]
    assert [stop for stop in way if stop not in tracer.first_calls] == []
    assert sorted(way, key=tracer.first_calls.__getitem__) == way


def test_few_frames_lie_between_the_command_and_the_solver(tracer: Tracer) -> None:
    assert len(tracer.stack) <= 20, tracer.stack


@pytest.mark.slow
def test_an_export_passes_the_functions_of_the_page(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason="needs the extra onnx")
    traced, done = Tracer(), quant.quantize(tiny_models.llama(), "nvfp4a16", solver="rtn")
    traced.run(lambda: quant.export_model(done, "onnx", tmp_path / "graph", capacity=0))
    way = functions("A graph of it")
    assert_in_order([stop for stop in way if "tensorrt" not in stop[0]], traced)


def test_a_token_passes_the_functions_of_the_page() -> None:
    traced = Tracer()
    arguments = ["generate", str(BASE), "--prompt", "One", "--max-new-tokens", "2", "--device", "cpu"]
    done = traced.run(lambda: CliRunner().invoke(main, arguments))
    assert done.exit_code == 0, done.output
    assert_in_order(functions("A token"), traced)


def test_a_step_of_training_passes_the_functions_of_the_page() -> None:
    traced, model = Tracer(), tiny_models.llama().train()

    def step() -> None:
        quant.to_low_precision_training(model, "fp8_rowwise", backend="emulated")
        model(torch.arange(5, 21)[None]).logits.square().mean().backward()

    traced.run(step)
    assert_in_order(functions("A step of training"), traced)


def assert_in_order(way: list[Stop], traced: Tracer) -> None:
    assert len(way) >= 3 and [stop for stop in way if stop not in traced.first_calls] == []
    assert sorted(way, key=traced.first_calls.__getitem__) == way
