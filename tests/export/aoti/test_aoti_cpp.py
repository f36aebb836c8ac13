"""A package runs without Python: the program of export/aoti/cpp, compiled here, gives Python's outputs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import torch
from samples import ROOT
from torch import nn

from quant.export.aoti.package import load_aoti
from quant.export.export_model import export_model
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize as quantize_tensor
from quant.kernels.linear.quant_linear import QuantLinear
from quant.run.api import quantize

pytestmark = pytest.mark.slow

SOURCE = ROOT / "export" / "aoti" / "cpp"


def built(source: Path, build: Path) -> Path:
    """The program of a folder, whose name is the project's."""
    if not (shutil.which("cmake") and (shutil.which("c++") or shutil.which("g++"))):
        pytest.skip("needs cmake and a C++ compiler")
    if torch.version.cuda is not None and not shutil.which("nvcc"):
        pytest.skip("CMake finds a CUDA torch only with the CUDA toolkit")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", str(source), "-B", str(build), prefix], ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(SOURCE, tmp_path_factory.mktemp("build")) / "run_package"


def test_the_example_decodes_over_the_cache(tmp_path: Path) -> None:
    program = built(ROOT / "examples" / "cpp", tmp_path / "build") / "decode_package"
    rows = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(0))
    done = quantize(tiny_models.llama(), "int4a16_g32", rows, solver="rtn")
    export_model(done, "aoti", tmp_path / "model.pt2", capacity=64)
    prompt = [3, 4, 5, 6, 7]
    sizes = [2, 2, 64, 16, 20]  # layers, KV heads, capacity, dimension of a head, new tokens
    command = [program, tmp_path / "model.pt2", *map(str, [*sizes, *prompt])]
    written = subprocess.run(command, capture_output=True, text=True, check=False)
    assert written.returncode == 0, written.stderr
    expected = done.model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 5:]
    assert [int(token) for token in written.stdout.split()] == expected.tolist()
    refused = subprocess.run([*command, *["1"] * 60], capture_output=True, text=True, check=False)
    assert refused.returncode == 1 and "exceed the capacity" in refused.stderr


class Mlp(nn.Module):
    """FP8 with static input scales, then NVFP4 weights; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = (torch.randn(*shape, dtype=torch.bfloat16) / 8 for shape in ((128, 64), (64, 128)))
        self.up = QuantLinear(quantize_tensor(up, FORMATS["fp8"]), None, FORMATS["fp8"], torch.tensor(0.01))
        self.down = QuantLinear(quantize_tensor(down, FORMATS["nvfp4"]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = nn.functional.gelu(self.up(x))
        return self.down(h), h + y


def test_the_program_computes_the_package(program: Path, package: Callable[..., Path], tmp_path: Path) -> None:
    inputs = {"x": torch.randn(5, 64, dtype=torch.bfloat16), "y": torch.randn(128, dtype=torch.bfloat16)}
    made = package(Mlp(), tmp_path / "model.pt2", inputs, dims={"x": {0: "tokens"}}, device="cpu")
    given = [torch.randn(9, 80, dtype=torch.bfloat16)[:, :64], inputs["y"]]
    torch.save(given, tmp_path / "in.pt")
    files = [str(made), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
    done = subprocess.run([program, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    expected = load_aoti(made)(x=given[0], y=given[1])
    assert len(found) == 2
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_program_says_what_is_wrong(program: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pt2")
    done = subprocess.run([program, missing, missing, missing], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"{missing}: ") and "frame #" not in done.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage:" in done.stderr
