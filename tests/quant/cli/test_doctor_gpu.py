"""`quant doctor` describes a machine with two GPUs, played by stand-ins for the driver."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from quant.calibration.sensitivity.costs import get_timing
from quant.cli import doctor_command
from quant.cli.main import main
from quant.export.tensorrt.gpu_targets import resolve_target
from quant.kernels.base import hardware


class NVMLError(Exception):
    """As pynvml calls its own."""


def refuse(*_: Any) -> Any:
    raise NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two H100s."""
    module = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: "580.1")
    monkeypatch.setitem(sys.modules, "pynvml", module)

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=9,
            minor=0,
            multi_processor_count=132,
            L2_cache_size=50 << 20,
            total_memory=79 << 30,
        )

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    hardware.current.cache_clear()
    return module


@pytest.fixture(autouse=True)
def _forget() -> Any:
    yield
    hardware.current.cache_clear()


def test_gpus_have_their_data_sheet(nvml: SimpleNamespace) -> None:
    first, _ = doctor_command.examine()["gpus"]
    assert first["native_formats"] == ["int8", "fp8"] and first["tflops"]["fp8"] == 1979
    assert first["tuned_shapes"] > 20 and first["memory_bandwidth"] == 3.35e12
    assert doctor_command.examine()["driver"] == "580.1"


def test_what_is_printed(nvml: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    doctor_command.print_findings(doctor_command.examine())
    printed = " ".join(capsys.readouterr().out.split())
    assert "driver 580.1" in printed
    assert "NVIDIA H100 80GB HBM3, sm_90, 132 SMs, 50 MiB L2, 79 GiB" in printed
    assert "3.35 TB/s; TFLOP/s bf16 989" in printed


def test_without_a_driver_the_rest_is_there(nvml: SimpleNamespace) -> None:
    nvml.nvmlInit = refuse
    findings = doctor_command.examine()
    assert findings["driver"] is None and findings["gpus"][0]["memory_bandwidth"] == 3.35e12


def test_every_command_takes_the_same_names() -> None:
    """A wrong name gets one message, whichever command is asked."""
    messages = []
    for ask in (resolve_target, get_timing):
        with pytest.raises(ValueError, match="unknown target 'rtx5900'") as refused:
            ask("rtx5900")
        messages.append(str(refused.value))
    doctor = CliRunner().invoke(main, ["doctor", "--target", "rtx5900"])
    assert doctor.exit_code == 2 and {*messages, doctor.stderr.removeprefix("error: ").strip()} == {messages[0]}
    assert messages[0].endswith("did you mean rtx5090?")


def test_doctor_shows_data_sheets_and_power_modes() -> None:
    shown = CliRunner().invoke(main, ["doctor", "--target", "orin", "--power", "50W", "--json"])
    assert json.loads(shown.stdout)["tflops"]["bf16"] == pytest.approx(42.5 * 816 / 1300)
    for args, message in (
        (["--target", "h100", "--power", "300W"], "--power 300W: no power mode of h100 is known here, but of orin"),
        (["--power", "30W"], "name it: --target orin"),
        (["--target", "orin", "--power", "30"], "'30' is not a power; write it like 30W"),
    ):
        refused = CliRunner().invoke(main, ["doctor", *args])
        assert refused.exit_code == 2 and message in refused.stderr
    assert "l40s, l4, rtx4090" in CliRunner().invoke(main, ["doctor", "--target", "sm89"]).stdout
    assert "vLLM" in CliRunner().invoke(main, ["doctor", "--target", "vllm"]).stdout
