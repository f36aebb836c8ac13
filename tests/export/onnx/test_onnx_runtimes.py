"""What is said of onnxruntime is what onnxruntime does with the file."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import serving_samples
import tiny_models
import torch
from onnx_samples import onnxruntime_session, relative_error
from slow_cases import quick_cases
from torch import nn

import quant
from quant.base.errors import UserError
from quant.formats.format import parse_format

pytest.importorskip("onnxscript", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", minversion="1.32", reason="needs the extra onnx")

from quant.export.engines.check_engine import forced_run, reference_run
from quant.export.onnx.decoder_graph import GraphInput
from quant.export.onnx.engine_session import OnnxruntimeSession
from quant.export.onnx.export_onnx import write_onnx
from quant.export.onnx.limits import loaded, onnxruntime_problem, provider_device

FORMATS = [
    ("16bit", "16bit"),
    ("int4", "16bit"),
    ("fp8", "fp8"),
    ("fp8_channel", "fp8_token"),
    ("int8", "16bit"),
    ("nvfp4", "16bit"),
]


@pytest.mark.parametrize(
    ("weight", "inputs", "dtype"),
    quick_cases(
        [(*formats, dtype) for formats in FORMATS for dtype in (torch.float32, torch.float16, torch.bfloat16)],
        lambda weight, inputs, dtype: dtype is torch.float32 or weight in ("16bit", "nvfp4"),
    ),
)
def test_a_file_that_onnxruntime_does_not_load_is_told(
    weight: str, inputs: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU()).to(dtype)
    x = torch.randn(2, 4, 128, dtype=dtype)
    if weight != "16bit":
        plan = quant.make_plan(model, "fp8_channel", run=lambda module: module(x))
        formats = {"weight": parse_format(weight), "activation": parse_format(inputs)}
        quant.quantize(model, plan.replace_layers([replace(layer, **formats) for layer in plan.layers]), x)
    problem = onnxruntime_problem(model)
    write_onnx(model, tmp_path / "m.onnx", inputs={"x": GraphInput(x[0], ("batch", 128))})
    try:
        loaded(tmp_path / "m.onnx")
        loads = True
    except ValueError:
        loads = False
    assert loads == (problem is None), problem
    if problem is not None:
        assert 'to="tensorrt"' in problem


def test_an_older_onnxruntime_is_told_as_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx

    node = onnx.helper.make_node("NoSuchOperator", ["x"], ["y"])
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "graph", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"files are for TensorRT$"):
        loaded(tmp_path / "m.onnx")
    monkeypatch.setattr("onnxruntime.__version__", "1.30.0")
    with pytest.raises(ValueError, match=r"onnxruntime 1\.30\.0 .* 1\.32 is the first that loads these files: pip "):
        loaded(tmp_path / "m.onnx")


def test_an_older_onnxruntime_gets_the_file_without_the_input_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.31, the newest with a CUDA provider, has no `query_seqlens`; weights may be in a file of their own."""
    model = serving_samples.decoder("llama-64")
    monkeypatch.setattr("quant.export.onnx.export_onnx.EXTERNAL_BYTES", 0)
    path = write_onnx(model, tmp_path / "m.onnx", capacity=32, runtime="onnxruntime")
    assert (tmp_path / "m.onnx.data").is_file()
    prompts = [[3, 1, 4, 1, 5], [2, 7], [9]]
    expected = reference_run(model, prompts, 4)
    runs = [forced_run(OnnxruntimeSession(path), prompts, expected.tokens).logits]
    monkeypatch.setattr("onnxruntime.__version__", "1.31.1")
    older = OnnxruntimeSession(path)
    runs.append(forced_run(older, prompts, expected.tokens).logits)
    assert np.array_equal(*runs)
    assert relative_error(torch.from_numpy(runs[0]), torch.from_numpy(expected.logits)) < 1e-5
    older._gpu = torch.device("cuda", 0)  # whose provider reads no chunks of several rows
    with pytest.raises(UserError, match="prompts of several rows whole, and not in chunks"):
        older.step(np.zeros((2, 3), np.int64), np.array([4, 0]), np.array([2, 2]))


@pytest.mark.filterwarnings("ignore")
def test_experts_in_low_bits_stay_on_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA provider of 1.31 refuses their scales in FP32, and computes something else with scales in FP16."""
    done = quant.quantize(tiny_models.qwen3_moe(), "int4a16_g32", torch.randint(0, 64, (4, 24)), solver="rtn")
    path = write_onnx(done.model, tmp_path / "m.onnx", capacity=32, runtime="onnxruntime", plan=done.plan)
    monkeypatch.setattr("onnxruntime.__version__", "1.31.1")
    with pytest.raises(UserError) as refused:
        loaded(path, gpu=torch.device("cuda", 0))
    assert str(refused.value) == (
        "m.onnx: the CUDA provider of onnxruntime before 1.32 does not run experts in INT4 or INT8; pass "
        'device="cpu", or quantize them in fp8@16bit'
    )
    assert loaded(path).get_providers() == ["CPUExecutionProvider"]


@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_gpu_that_onnxruntime_cannot_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime-gpu is installed")
    assert provider_device("auto") is None and provider_device("cpu") is None
    monkeypatch.setattr("quant.export.onnx.limits.find_device", lambda device: torch.device("cuda", 0))
    assert provider_device("auto") is None
    with pytest.raises(UserError, match=r"^device=\"cuda\": onnxruntime .* install onnxruntime-gpu in its place"):
        provider_device("cuda")
    path = write_onnx(nn.Linear(8, 8), tmp_path / "m.onnx", inputs={"x": GraphInput(torch.zeros(2, 8), ("batch", 8))})
    with pytest.raises(ValueError, match=r"does not find the CUDA libraries .* device=\"cpu\" runs it on"):
        loaded(path, gpu=torch.device("cuda", 0))


def test_norms_and_rope_in_fp16_are_single_operators(tmp_path: Path) -> None:
    import onnx

    model = serving_samples.decoder("llama-64", dtype=torch.float16)
    path = write_onnx(model, tmp_path / "m.onnx", capacity=32, runtime="onnxruntime")
    operators = Counter(node.op_type for node in onnx.load(path).graph.node)
    layers = model.config.num_hidden_layers
    assert operators["RotaryEmbedding"] == 2 * layers and not operators["Pow"] and not operators["Neg"]
    assert operators["SkipSimplifiedLayerNormalization"] == 2 * layers and operators["RMSNormalization"] == 1
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    own = reference_run(model, prompts, 4)
    run = forced_run(OnnxruntimeSession(path), prompts, own.tokens)
    exact = torch.from_numpy(reference_run(model.float(), prompts, 4, own.tokens).logits)
    errors = [relative_error(torch.from_numpy(x.logits), exact) for x in (run, own)]
    assert 0 < errors[0] < 1.25 * errors[1], errors


def test_small_layers_with_equal_scales(tmp_path: Path) -> None:
    """The exporter's optimizer keeps equal numbers of up to 1,024 elements once."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight * (torch.arange(64) % 2 * 2 - 1)[:, None])
    x = torch.randn(4, 64)
    done = quant.quantize(model, "int4a16_g32", x, run=lambda model: model(x), solver="rtn")
    assert torch.equal(*(done.model[index].quantized_weight.scale for index in (0, 1)))
    inputs = {"x": GraphInput(x, ("batch", 64))}
    path = write_onnx(done.model, tmp_path / "m.onnx", inputs=inputs, runtime="onnxruntime", plan=done.plan)
    (found,) = onnxruntime_session(path, tmp_path / "run.onnx").run(None, {"x": x.numpy()})
    assert relative_error(torch.from_numpy(found), done.model(x).detach()) < 1e-5


@pytest.mark.filterwarnings("ignore:onnxruntime multiplies")
def test_a_model_in_fp64_is_exported_in_fp32(tmp_path: Path) -> None:
    model = serving_samples.decoder("llama-64", dtype=torch.float64, num_hidden_layers=1)
    done = quant.quantize(model, "int4a16_g32", torch.randint(0, 64, (4, 24)), solver="rtn")
    with pytest.warns(UserWarning, match="^the model is in FP64, which no exported file has: what is not quantized is"):
        path = quant.export_model(done, "onnx", tmp_path / "out", capacity=32, lm_head="16bit").path
    prompts = [[3, 1, 4, 1, 5], [2, 7]]
    own = reference_run(done.model, prompts, 4)
    run = forced_run(OnnxruntimeSession(path / "model.onnx"), prompts, own.tokens)
    assert relative_error(torch.from_numpy(run.logits), torch.from_numpy(own.logits)) < 5e-2
