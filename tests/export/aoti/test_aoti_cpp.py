"""A package runs without Python: the program of export/cpp, compiled against this torch, gives what Python gives."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import ROOT
from torch import nn

from quant.export.aoti.package import load_aoti
from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.linear.quant_linear import QuantLinear

pytestmark = pytest.mark.slow

SOURCE = ROOT / "export" / "cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (shutil.which("cmake") and (shutil.which("c++") or shutil.which("g++"))):
        pytest.skip("needs cmake and a C++ compiler")
    if torch.version.cuda is not None and not shutil.which("nvcc"):
        pytest.skip("CMake finds a CUDA torch only with the CUDA toolkit")
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", str(SOURCE), "-B", str(build), prefix], ["cmake", "--build", str(build)]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return build / "run_package"


class Mlp(nn.Module):
    """FP8 with static input scales, then NVFP4 weights; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        up, down = (torch.randn(*shape, dtype=torch.bfloat16) / 8 for shape in ((128, 64), (64, 128)))
        self.up = QuantLinear(quantize(up, FORMATS["fp8"]), None, FORMATS["fp8"], torch.tensor(0.01))
        self.down = QuantLinear(quantize(down, FORMATS["nvfp4"]))

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
