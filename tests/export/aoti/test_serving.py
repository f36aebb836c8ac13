"""A model repository follows the server's own schema, keeps versions, and its runner serves the engine."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quant.export.packages import triton_model
from quant.export.packages.triton_decoder import END_TOKENS
from quant.export.packages.triton_server import Bundle, check_config, publish
from quant.export.packages.triton_server_guide import serving_text
from quant.formats.format import FORMATS
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Parts, Plan

onnx = pytest.importorskip("onnx", reason="needs the extra [onnx]")


def graph(folder: Path, *, kind: str = "FLOAT16", batch: int | str = "batch") -> Path:
    """Token numbers to logits."""
    types, helper = onnx.TensorProto, onnx.helper
    ids = helper.make_tensor_value_info("input_ids", types.INT64, [batch, "sequence"])
    logits = helper.make_tensor_value_info("logits", getattr(types, kind), [batch, "sequence", 96])
    node = helper.make_node("Cast", ["input_ids"], ["logits"], to=getattr(types, kind))
    onnx.save(helper.make_model(helper.make_graph([node], "g", [ids], [logits])), folder / "model.onnx")
    return folder / "model.onnx"


def receipt(backend: str = "tensorrt 11.2.0", profiles: tuple[str, ...] = ("input_ids=1x1:1x128:4x512",)) -> Any:
    return {"passed": True, "engine": {"backend": backend, "target": "sm120", "profiles": list(profiles)}}


def put(folder: Path, given: Any, **options: Any) -> Bundle:
    engine = folder / "engine"
    engine.write_bytes(b"engine")
    where = {"repository": folder / "repository", "name": "smol", "guide": lambda bundle: f"version {bundle.version}"}
    return publish(engine, given, graph(folder, **options.pop("graph", {})), **{**where, **options})


def parsed(path: Path) -> Any:
    """The file by the server's schema."""
    spec = importlib.util.find_spec("tritonclient")
    if spec is None:
        pytest.skip("needs the package tritonclient, which brings the schema")
    text_format = pytest.importorskip("google.protobuf.text_format")
    place = Path(next(iter(spec.submodule_search_locations or ())), "grpc", "model_config_pb2.py")
    schema = importlib.util.spec_from_file_location("_schema_of_the_test", place)
    assert schema is not None and schema.loader is not None
    module = sys.modules.get("_triton_model_config") or importlib.util.module_from_spec(schema)
    if "_triton_model_config" not in sys.modules:
        schema.loader.exec_module(module)
    return text_format.Parse(path.read_text(), module.ModelConfig())


@pytest.mark.parametrize(("backend", "file"), [("tensorrt 11.2.0", "model.plan"), ("tensorrt_rtx 1.7", "model.engine")])
def test_config_has_the_engines_tensors(tmp_path: Path, backend: str, file: str) -> None:
    bundle = put(tmp_path, receipt(backend, ("input_ids=1x1:1x128:4x512", "input_ids=1x1:1x1:8x1")))
    assert (bundle.name, bundle.version) == ("smol", 1)
    home = tmp_path / "repository" / "smol"
    assert (home / "1" / file).read_bytes() == b"engine"
    assert json.loads((home / "1" / "receipt.json").read_text())["engine"]["backend"] == backend
    config = parsed(home / "config.pbtxt")
    assert (config.name, config.max_batch_size) == ("smol", 8)
    (ids,), (logits,) = config.input, config.output
    names = type(ids).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    assert (ids.name, names[ids.data_type].name, list(ids.dims)) == ("input_ids", "TYPE_INT64", [-1])
    assert (logits.name, names[logits.data_type].name, list(logits.dims)) == ("logits", "TYPE_FP16", [-1, 96])
    assert config.version_policy.latest.num_versions == 2
    stated = {key: value.string_value for key, value in config.parameters.items()}
    assert stated["profile_1"] == "input_ids=1x1:1x1:8x1" and stated["target"] == "sm120"
    if file == "model.plan":
        assert config.platform == "tensorrt_plan" and config.default_model_filename == file
        assert list(config.instance_group[0].profile) == ["0", "1"] and config.HasField("dynamic_batching")
    else:
        assert config.backend == "python" and config.default_model_filename == "model.py"
        assert (home / "1" / "model.py").read_text() == Path(triton_model.__file__).read_text()
        assert not config.HasField("dynamic_batching")


def test_a_fixed_batch_is_part_of_the_shape(tmp_path: Path) -> None:
    put(tmp_path, receipt(profiles=("input_ids=2x1:2x128:2x512",)), graph={"batch": 2})
    config = parsed(tmp_path / "repository" / "smol" / "config.pbtxt")
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [2, -1])


def test_a_second_export_is_a_second_version(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        assert put(tmp_path, receipt()).version == version
        assert (tmp_path / "repository" / "serve.md").read_text() == f"version {version}"
        assert sorted(file.name for file in (tmp_path / "repository").iterdir()) == ["serve.md", "smol"]
    home = tmp_path / "repository" / "smol"
    assert sorted(file.name for file in home.iterdir()) == ["1", "2", "3", "config.pbtxt"]
    before = (home / "config.pbtxt").read_text()
    with pytest.raises(ValueError, match=r"version 3 there has other tensors.*pass --overwrite"):
        put(tmp_path, receipt(profiles=("input_ids=1x1:1x8:1x8",)))
    assert (home / "config.pbtxt").read_text() == before
    assert put(tmp_path, receipt(profiles=("input_ids=1x1:1x8:1x8",)), overwrite=True).version == 1
    assert sorted(file.name for file in home.iterdir()) == ["1", "config.pbtxt"]


def test_a_tensor_that_the_server_has_no_type_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"logits: .* no tensors of FLOAT8E4M3FN; it has FLOAT, .*Serve with vLLM"):
        put(tmp_path, receipt(), graph={"kind": "FLOAT8E4M3FN"})
    assert not (tmp_path / "repository").exists()


def test_the_schema_is_asked(tmp_path: Path) -> None:
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("needs the package tritonclient, which brings the schema")
    assert check_config('name: "a"\ninput { name: "x" data_type: TYPE_FP16 dims: [1] }\n')
    with pytest.raises(ValueError, match=r"does not follow the server's schema: .*colour"):
        check_config('name: "a"\ncolour: "red"\n')


def plan_of(weight: str, activation: str | None, **more: Any) -> Plan:
    inputs = FORMATS[activation] if activation else None
    return Plan(
        (LayerPlan("up", LayerKind.LINEAR, (64, 64), FORMATS[weight], inputs, **more),), kv_cache=FORMATS["fp8"]
    )


def test_the_commands_fit_the_checkpoint(tmp_path: Path) -> None:
    bundle = Bundle(tmp_path / "repository", "smol", 2, True)
    page = serving_text(Path("out/smol"), plan_of("nvfp4", "nvfp4"), bundle, receipt("tensorrt_rtx 1.7.1"), text=True)
    assert "vllm serve out/smol --served-model-name smol --kv-cache-dtype fp8" in page
    assert "trtllm-serve serve out/smol" in page
    assert "nvfp4@nvfp4: native, from SM100; on Hopper inputs stay in 16 bit (Marlin). From: vllm 0.26.0 and" in page
    assert "tensorrt-rtx==1.7.1" in page and "/v2/models/smol/versions/2/ready" in page
    page = serving_text(Path("out/smol"), plan_of("int4", None, parts=Parts(rank=8)), bundle, receipt(), text=True)
    assert "does not read this checkpoint. int4: a TypeError" in page and "trtllm-serve" not in page
    assert "low-rank branch" in page and "TensorRT must be 11.2.0" in page
    page = serving_text(Path("out/smol"), plan_of("mxfp6", None), bundle, receipt(), text=True)
    assert "sglang.launch_server" not in page and "## SGLang\n\nIt does not read this checkpoint. mxfp6" in page
    assert "does not read this checkpoint. mxfp6: Only num_bits in (8)" in page and "vllm serve" not in page
    assert "vllm" not in serving_text(Path("out/smol"), None, bundle, receipt(), text=False)


def test_versions_of_a_decoder_are_asked_for_text(tmp_path: Path) -> None:
    """Triton refuses `infer` over HTTP for decoupled models, which answer in a stream."""
    bundle = Bundle(tmp_path / "repository", "smol", 2, True)
    page = serving_text(Path("out/smol"), None, bundle, {**receipt("tensorrt_rtx 1.7.1"), END_TOKENS: [2]}, text=True)
    assert "/v2/models/smol/versions/N/generate`" in page and "/infer" not in page
    assert f"quant export out/smol --to triton-server --out {bundle.repository}`" in page
    page = serving_text(Path("out/smol"), None, bundle, receipt(), text=False)
    assert "/v2/models/smol/versions/N/infer`" in page and "/generate" not in page


class Context:
    """An engine that doubles, reading and writing the memory that it is given the addresses of."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profiles: list[int] = []

    def set_optimization_profile_async(self, index: int, stream: int) -> None:
        self.profiles.append(index)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes["x"]

    def execute_async_v3(self, stream: int) -> bool:
        count = torch.Size(self.shapes["x"]).numel()
        x, y = ((ctypes.c_float * count).from_address(self.addresses[name]) for name in "xy")
        for index in range(count):
            y[index] = 2 * x[index]
        return True


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> triton_model.TritonPythonModel:
    """The runner over that engine, on the CPU; the server's module hands tensors through."""
    context = Context()
    ranges = [((1, 4), (1, 4), (1, 4)), ((2, 1), (4, 4), (8, 4))]
    engine = SimpleNamespace(
        create_execution_context=lambda: context,
        num_optimization_profiles=2,
        get_tensor_profile_shape=lambda name, index: ranges[index],
        get_tensor_dtype=lambda name: "float",
    )
    kinds = SimpleNamespace(FLOAT="float", HALF=1, BF16=2, INT64=3, INT32=4, INT8=5, UINT8=6, BOOL=7)
    trt = ModuleType("tensorrt_rtx")
    trt.Logger = type("Logger", (), {"WARNING": 0, "__init__": lambda self, level: None})
    trt.DataType = kinds
    load = lambda blob: engine if blob == b"engine" else None  # noqa: E731
    trt.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=load)

    class Tensor(SimpleNamespace):
        @staticmethod
        def from_dlpack(name: str, capsule: Any) -> Tensor:
            return Tensor(name=name, value=torch.from_dlpack(capsule))

    server = ModuleType("triton_python_backend_utils")
    server.Tensor = Tensor
    server.TritonError = str
    server.get_input_tensor_by_name = lambda request, name: request[name]
    server.InferenceResponse = lambda output_tensors, error=None: (output_tensors, error)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", trt)
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    monkeypatch.setattr(triton_model, "DEVICE", "cpu")
    stream = SimpleNamespace(cuda_stream=0, wait_stream=lambda other: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.engine").write_bytes(b"engine")
    model = triton_model.TritonPythonModel()
    config = json.dumps({"input": [{"name": "x"}], "output": [{"name": "y"}]})
    args = {"model_config": config, "model_repository": str(tmp_path), "model_version": "1"}
    model.initialize({**args, "model_instance_device_id": "0"})
    return model


def request(x: torch.Tensor) -> dict[str, Any]:
    return {"x": SimpleNamespace(to_dlpack=lambda: torch.to_dlpack(x))}


def test_the_runner_answers_each_request(runner: triton_model.TritonPythonModel) -> None:
    small, large, odd = torch.randn(1, 4), torch.randn(4, 3).T[:3].repeat(2, 1), torch.randn(9, 4)
    answers = runner.execute([request(small), request(large[:, :4].contiguous()), request(odd)])
    for x, (tensors, error) in zip((small, large), answers[:2], strict=True):
        assert error is None
        (y,) = tensors
        torch.testing.assert_close(y.value, 2 * x, rtol=0, atol=0)
    assert runner.context.profiles == [0, 1]
    assert answers[2][0] == []
    assert (
        answers[2][1] == "the engine does not take x (9, 4); it takes x from (1, 4) to (1, 4); x from (2, 1) to (8, 4)"
    )


def test_an_engine_of_another_gpu(runner: triton_model.TritonPythonModel, tmp_path: Path) -> None:
    (tmp_path / "1" / "model.engine").write_bytes(b"other")
    args = {"model_config": '{"input": [], "output": []}', "model_repository": str(tmp_path), "model_version": "1"}
    with pytest.raises(RuntimeError, match="does not load: it was built for another GPU"):
        triton_model.TritonPythonModel().initialize({**args, "model_instance_device_id": "0"})
