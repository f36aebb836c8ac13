"""vLLM is left alone unless everything fits, and our classes are what vLLM's own base classes ask for.

The tests of classes run against the real vLLM where it is installed (its Python files are enough), and are skipped
elsewhere. What needs no vLLM is tested with a stand-in for the few names that `plugin_refusal` asks.
"""

import ast
import inspect
import logging
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.vllm_plugin import register


def stand_in(monkeypatch: pytest.MonkeyPatch, capability: Any = (9, 0), version: str = "0.26.0") -> None:
    """A vLLM that has a version and a platform and nothing else: whatever else is asked for fails."""
    platform = SimpleNamespace(
        is_cuda=lambda: capability is not None, device_name="cpu", get_device_capability=lambda: capability
    )
    envs = ModuleType("vllm.envs")
    envs.environment_variables = {}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version, "envs": envs}, "vllm.platforms": {"current_platform": platform},
        "vllm.envs": vars(envs),
    }  # fmt: skip
    for name, fields in modules.items():
        module = ModuleType(name)
        vars(module).update(fields)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capability": (10, 0)}, "compute capability of this one is 10.0"),
        ({"capability": None}, "this platform is cpu"),
    ],
)
def test_vllm_stays_as_it_is_where_our_kernels_do_not_fit(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, **options)
    register.register()  # installing would fail: the stand-in has no kernels
    assert [reason in record.message for record in caplog.records] == [True]


def test_without_triton_vllm_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(register, "has_triton", lambda: False)
    assert "Triton is not installed" in register.plugin_refusal()


def test_hopper_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(register, "has_triton", lambda: True)
    assert register.plugin_refusal() == ""


def test_a_variable_of_the_environment_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BLOCKSCALE_VLLM", "0")
    stand_in(monkeypatch)  # a Hopper GPU; installing would fail: the stand-in has no kernels
    with caplog.at_level(logging.INFO):
        register.register()
    assert [record.message for record in caplog.records] == ["Blockscale: BLOCKSCALE_VLLM=0 leaves vLLM as it is"]


@pytest.mark.parametrize(
    ("version", "untried"),
    [("0.33.0", False), ("0.33.2", False), ("0.33.0.post1", False), ("0.30.1", True), ("0.34.0rc1.dev3+g12ab", True)],
)
def test_a_release_that_never_ran_on_a_gpu_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, untried: bool
) -> None:
    stand_in(monkeypatch, version=version)
    monkeypatch.setattr(register, "has_triton", lambda: True)
    monkeypatch.setattr(register, "install", lambda: (["linear layers"], {}))
    with caplog.at_level(logging.INFO):
        register.register()
    line = f"Blockscale: not yet run in vLLM {version} on a GPU, only in 0.26, 0.29, 0.33"
    said = [record.message for record in caplog.records]
    assert said == ["Blockscale: linear layers may take our kernels", *[line] * untried]


def test_the_entry_point_of_the_package_is_this_function() -> None:
    import tomllib

    from samples import ROOT

    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert EntryPoint("blockscale", group["blockscale"], "vllm.general_plugins").load() is register.register


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("vllm", reason="make vllm-test unpacks the Python files of vLLM's releases")
    from vllm._custom_ops import reshape_and_cache_flash
    from vllm.v1.attention.backends import flash_attn

    from quant.vllm_plugin import fp8_experts, fused_experts, linear_kernels, mxfp4_experts

    # vLLM imports it where there is a GPU.
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", reshape_and_cache_flash, raising=False)
    return SimpleNamespace(linear=linear_kernels, experts=fused_experts, mxfp4=mxfp4_experts, fp8=fp8_experts)


def test_options_of_vllm_on_its_page_are_options_of_this_vllm(vllm: Any) -> None:
    from samples import ROOT
    from vllm.engine import arg_utils

    def words(*paths: Path) -> set[str]:
        return {word for path in paths for word in re.findall(r"--[a-z][a-z0-9-]+", path.read_text(encoding="utf-8"))}

    ours = words(*(ROOT / "quant/cli").glob("*.py"), *(ROOT / "benchmarks").glob("vllm_*.py"))
    named = words(ROOT / "docs/vllm.md", ROOT / "docs/vllm-speed.md") - ours
    source = inspect.getsource(arg_utils)
    assert named >= {"--kv-cache-dtype", "--linear-backend", "--moe-backend", "--attention-backend"}
    assert [option for option in sorted(named) if f'"{option}"' not in source] == []


def classes(vllm: Any) -> list[type]:
    names = ("NvFp4Linear", "MxFp4Linear", "Mxfp8Linear", "Int4Linear", "Fp8Linear")
    experts = [
        vllm.experts.BlockscaleNvFp4Experts,
        vllm.mxfp4.BlockscaleMxFp4Experts,
        vllm.fp8.BlockscaleFp8Experts,
        vllm.fp8.BlockscaleFp8BlockExperts,
    ]
    return [getattr(vllm.linear, f"Blockscale{name}Kernel") for name in names] + experts


def test_classes_leave_nothing_abstract(vllm: Any) -> None:
    assert {cls.__name__: cls.__abstractmethods__ for cls in classes(vllm) if cls.__abstractmethods__} == {}  # type: ignore[attr-defined]


def test_methods_take_the_arguments_of_vllms_own(vllm: Any) -> None:
    """Each method that vLLM's base class names can be called with the base class's own arguments."""
    checked = 0
    for cls in classes(vllm):
        for base in cls.__mro__[1:]:
            if not base.__module__.startswith("vllm."):
                continue
            for name, theirs in inspect.getmembers(base, inspect.isfunction):
                mine = inspect.getattr_static(cls, name)
                mine = getattr(mine, "__func__", mine)
                if name.startswith("__") or not inspect.isfunction(mine) or mine is theirs:
                    continue
                arguments = {p.name: None for p in inspect.signature(theirs).parameters.values() if p.kind.value == 1}
                inspect.signature(mine).bind(**arguments)
                checked += 1
    assert checked > 10


def test_our_classes_come_first_however_often_they_are_installed(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.kernels import linear as lists
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4
    from vllm.platforms import PlatformEnum
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash := lambda **named: None, "__signature__", flash_signature(), raising=False)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setenv("BLOCKSCALE_VLLM", "layers")
    assert register.install()[1] == {}
    assert "RMSNorm" not in op_registry_oot and "RotaryEmbedding" not in op_registry_oot
    monkeypatch.delenv("BLOCKSCALE_VLLM")
    first = nvfp4.select_nvfp4_moe_backend
    assert register.install()[1] == {}
    assert op_registry_oot["RMSNorm"].__name__ == "BlockscaleRMSNorm"
    assert op_registry_oot["SiluAndMul"].__name__ == "BlockscaleSiluAndMul"
    assert op_registry_oot["Llama3RotaryEmbedding"].__name__ == "BlockscaleLlama3RotaryEmbedding"
    assert nvfp4.select_nvfp4_moe_backend is first
    for by_platform in (lists._POSSIBLE_NVFP4_KERNELS, lists._POSSIBLE_MXFP4_KERNELS, lists._POSSIBLE_WFP8A16_KERNELS):
        names = [cls.__name__ for cls in by_platform[PlatformEnum.CUDA]]
        assert names[0].startswith("Blockscale") and len(set(names)) == len(names)
    names = [cls.__name__ for cls in lists._POSSIBLE_KERNELS[PlatformEnum.CUDA]]
    order = [names.index(f"{name}LinearKernel") for name in ("Machete", "BlockscaleInt4", "Marlin")]
    assert order == sorted(order) and names.count("BlockscaleInt4LinearKernel") == 1
    # The list that --linear-backend marlin goes by still has Marlin.
    assert "MarlinNvFp4LinearKernel" in {cls.__name__ for cls in lists._LINEAR_BACKEND_KERNEL_MAP["marlin"]}


def test_a_part_that_vllm_has_changed_stays_with_vllm(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A method with a new argument refuses its part alone, and nothing of the part is installed."""
    import vllm.model_executor.layers.fused_moe.modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4

    monkeypatch.setattr(nvfp4, "select_nvfp4_moe_backend", chosen := lambda config, weight_key, activation_key: None)
    # Other tests may have installed this part, which has no second look at what it has offered.
    monkeypatch.setattr(vllm.fp8.CompressedTensorsMoEMethod, "get_moe_method", staticmethod(lambda *args: None))
    monkeypatch.setattr(register, "plugin_refusal", lambda: "")

    def finalize_weight_and_reduce_impl(self: Any, scheme: Any) -> None: ...

    monkeypatch.setattr(mk.FusedMoEExpertsModular, "finalize_weight_and_reduce_impl", finalize_weight_and_reduce_impl)
    with caplog.at_level(logging.INFO):
        register.register()
    assert nvfp4.select_nvfp4_moe_backend is chosen
    lines = [record.message for record in caplog.records if record.name == "vllm.blockscale"]
    assert "linear layers in NVFP4" in lines[0] and "experts" not in lines[0]
    assert re.match(
        r"Blockscale: vLLM \S+ keeps its own experts: Block\w+.finalize_weight_and_reduce_impl: too", lines[1]
    )


def linear_kernel_of(vllm: Any, monkeypatch: pytest.MonkeyPatch, backend: str = "auto", **options: Any) -> str:
    """The class that vLLM takes for an NVFP4 layer on a Hopper GPU, under `--linear-backend`."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.kernels import linear as lists
    from vllm.platforms import PlatformEnum

    register.install()
    hopper = SimpleNamespace(_enum=PlatformEnum.CUDA, get_device_capability=lambda: None)
    monkeypatch.setattr(lists, "current_platform", hopper)
    for cls in lists._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]:
        if "Blockscale" not in cls.__name__:
            support = ("Marlin" in cls.__name__, "not for Hopper")
            monkeypatch.setattr(cls, "is_supported", classmethod(lambda cls, capability=None, support=support: support))
    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.kernel_config.linear_backend = backend
    with set_current_vllm_config(config):
        return type(lists.init_nvfp4_linear_kernel(**options)).__name__


@pytest.mark.parametrize("options", [{}, {"use_a16": True}], ids=["w4a4", "w4a16"])
def test_layers_take_our_kernel_unless_the_user_named_one_or_its_self_test_failed(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from quant.vllm_plugin.self_test import SelfTest

    ours, marlin = "BlockscaleNvFp4LinearKernel", "MarlinNvFp4LinearKernel"
    assert linear_kernel_of(vllm, monkeypatch, **options) == ours
    assert linear_kernel_of(vllm, monkeypatch, "marlin", **options) == marlin
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", ours)
    assert linear_kernel_of(vllm, monkeypatch, **options) == marlin
    monkeypatch.delenv("VLLM_DISABLED_KERNELS")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(SelfTest, "product_failure", lambda self, format: f"{format} is wrong on {self.device}")
    assert linear_kernel_of(vllm, monkeypatch, **options) == marlin


def test_compiled_graphs_are_kept_apart(vllm: Any) -> None:
    from vllm import envs

    from quant.vllm_plugin import switches

    envs.environment_variables.pop("BLOCKSCALE_VLLM", None)
    without = envs.compile_factors()
    switches.install_graph_key()
    assert envs.compile_factors() != without


def test_workers_on_other_machines_get_the_variable(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray copies the variables that vLLM knows; with `0` here and nothing there, two machines would differ."""
    from vllm import envs
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.delitem(envs.environment_variables, "BLOCKSCALE_VLLM", raising=False)
    monkeypatch.setenv("BLOCKSCALE_VLLM", "0")
    assert "BLOCKSCALE_VLLM" not in get_env_vars_to_copy()
    register.register()
    assert "BLOCKSCALE_VLLM" in get_env_vars_to_copy()


def made(cls: type, layer: torch.nn.Module) -> Any:
    """An instance of a class, past the questions about the GPU."""
    kernel = cls.__new__(cls)
    layer.params_dtype = torch.bfloat16
    return kernel


def test_a_linear_layer_gives_the_oracles_product(vllm: Any) -> None:
    torch.manual_seed(0)
    weight = quantize(torch.randn(128, 64), FORMATS["nvfp4"])
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight.scale, requires_grad=False)
    layer.weight_global_scale = torch.nn.Parameter(weight.global_scale, requires_grad=False)
    kernel = made(vllm.linear.BlockscaleNvFp4LinearKernel, layer)
    kernel.process_weights_after_loading(layer)
    assert layer.weight.dtype is torch.int32 and layer.blockscale_format == "nvfp4"
    x, bias = torch.randn(5, 64).bfloat16(), torch.randn(128).bfloat16()
    y = kernel.apply_weights(layer, x, bias)
    assert torch.equal(y, torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16), bias))


def test_packed_int4_gives_the_oracles_product(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters are of vLLM's own classes, whose axes `permute_param_layout_` goes by."""
    from vllm.model_executor import parameter

    from quant.export.checkpoint.files.compressed_tensors import compress

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    torch.manual_seed(0)
    weight, layer = quantize(torch.randn(96, 256), FORMATS["int4"]), torch.nn.Module()
    stored = compress(weight, None, torch.bfloat16)
    options = {"input_dim": 1, "output_dim": 0, "weight_loader": lambda *args: None}
    layer.weight_packed = parameter.PackedvLLMParameter(
        data=stored["weight_packed"], packed_factor=8, packed_dim=1, **options
    )
    layer.weight_scale = parameter.GroupQuantScaleParameter(data=stored["weight_scale"], **options)
    kernel = made(vllm.linear.BlockscaleInt4LinearKernel, layer)
    kernel.w_q_name, kernel.w_s_name = "weight_packed", "weight_scale"
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 256).bfloat16()
    expected = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
    assert torch.equal(kernel.apply_weights(layer, x), expected)


@pytest.mark.parametrize("format", ["fp8_channel", "fp8_block"])
def test_fp8_weights_give_the_oracles_product(vllm: Any, format: str) -> None:
    torch.manual_seed(0)
    weight, layer = quantize(torch.randn(256, 128), FORMATS[format]), torch.nn.Module()
    blocks = format == "fp8_block"
    layer.weight_block_size = [128, 128] if blocks else None
    layer.weight = torch.nn.Parameter(weight.codes if blocks else weight.codes.t(), requires_grad=False)
    scale = torch.nn.Parameter(weight.scale, requires_grad=False)
    setattr(layer, "weight_scale_inv" if blocks else "weight_scale", scale)
    kernel = made(vllm.linear.BlockscaleFp8LinearKernel, layer)
    kernel.process_weights_after_loading(layer)
    x = torch.randn(3, 128).bfloat16()
    expected = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
    assert torch.equal(kernel.apply_weights(layer, x), expected)


class Reloaded:
    """A layer of vLLM that is loaded, and loaded anew with other weights, as vLLM does it."""

    def __init__(self, vllm: Any, first: BlockScaledTensor) -> None:
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.model_loader import reload

        names = {"nvfp4": "NvFp4", "mxfp4": "MxFp4", "mxfp8": "Mxfp8"}
        self.format = first.format.name
        kernel = getattr(vllm.linear, f"Blockscale{names.get(self.format, 'Fp8')}LinearKernel")
        outer = self

        class Method(QuantizeMethodBase):
            def create_weights(self, *arguments: Any, **named: Any) -> None: ...

            def apply(self, *arguments: Any, **named: Any) -> None: ...

            def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
                if outer.format == "fp8_channel":
                    layer.weight = torch.nn.Parameter(layer.weight.data.t(), requires_grad=False)
                outer.kernel = made(kernel, layer)
                outer.kernel.process_weights_after_loading(layer)

        self.layer = torch.nn.Module()
        self.layer.prefix = "model.layers.0.mlp.down_proj"
        self.layer.weight_block_size = [128, 128] if self.format == "fp8_block" else None
        self.layer.quant_method = Method()
        for name, tensor in self.tensors(first).items():
            self.layer.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        reload.record_metadata_for_reloading(self.layer)
        self.layer.quant_method.process_weights_after_loading(self.layer)

    def tensors(self, weight: BlockScaledTensor) -> dict[str, torch.Tensor]:
        scale = "weight_scale_inv" if self.format == "fp8_block" else "weight_scale"
        both = {"weight": weight.codes, scale: weight.scale}
        return both if weight.global_scale is None else {**both, "weight_global_scale": weight.global_scale}

    def load(self, weight: BlockScaledTensor) -> None:
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(self.layer)
        for name, tensor in self.tensors(weight).items():
            parameter = getattr(self.layer, name)
            parameter.weight_loader(parameter, tensor)
        reload.finalize_layerwise_reload(self.layer, None)

    def addresses(self) -> dict[str, int]:
        return {name: parameter.data_ptr() for name, parameter in self.layer.named_parameters()}

    def multiplies_by(self, weight: BlockScaledTensor) -> bool:
        x = torch.randn(3, weight.shape[1]).bfloat16()
        expected = torch.nn.functional.linear(x, weight.dequantize(torch.bfloat16))
        return torch.equal(self.kernel.apply_weights(self.layer, x), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "fp8_channel", "fp8_block"])
def test_a_layer_is_reloaded_into_the_memory_that_graphs_know(vllm: Any, format: str) -> None:
    """As vLLM reloads weights for reinforcement learning, and after a sleep of level 2."""
    first, second = (quantize(torch.randn(256, 128), FORMATS[format]) for _ in range(2))
    layer = Reloaded(vllm, first)
    before = layer.addresses()
    layer.load(second)
    assert layer.addresses() == before and layer.multiplies_by(second)


def out_of_layout(weight: BlockScaledTensor) -> BlockScaledTensor:
    """The weight with a block scale that the layout of Hopper's kernels does not hold."""
    scale = weight.scale.clone()
    scale.view(torch.uint8)[0, 0] = 0xB8 if weight.format.name == "nvfp4" else 0  # -1, and 2^-127
    return replace(weight, scale=scale)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_real_weights_take_the_place_of_made_up_ones(vllm: Any, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--load-format dummy`, as servers of reinforcement learning start: the scales that vLLM draws have both signs."""
    weight = quantize(torch.randn(128, 64), FORMATS[format])
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    layer = Reloaded(vllm, out_of_layout(weight))
    before = layer.addresses()
    assert layer.layer.blockscale_format == format
    layer.load(weight)
    assert layer.addresses() == before and layer.multiplies_by(weight)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_reload_keeps_the_kernel_of_the_first_weights(
    vllm: Any, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs call it. Ours cannot take what its layout does not hold, and Marlin's parameters have other shapes."""
    from vllm import envs

    from quant.vllm_plugin import switches

    monkeypatch.setattr(switches, "_kernels", {})
    switches.install_graph_key()
    keys = {str(envs.compile_factors()["BLOCKSCALE_VLLM"])}
    marlin = {"nvfp4": vllm.linear.MarlinNvFp4LinearKernel, "mxfp4": vllm.linear.MarlinMxFp4LinearKernel}[format]
    monkeypatch.setattr(marlin, "process_weights_after_loading", lambda self, layer: None)
    fits = quantize(torch.randn(128, 64), FORMATS[format])
    layer = Reloaded(vllm, fits)
    keys.add(str(envs.compile_factors()["BLOCKSCALE_VLLM"]))
    with pytest.raises(
        ValueError, match=r"^model\.layers\.0\.mlp\.down_proj: .* scale.*; start vLLM with these weights"
    ):
        layer.load(out_of_layout(fits))
    kept = Reloaded(vllm, out_of_layout(fits))
    assert kept.layer.blockscale_format == "" and torch.equal(kept.layer.weight, fits.codes)
    kept.load(fits)
    assert kept.layer.blockscale_format == "" and torch.equal(kept.layer.weight, fits.codes)
    # Compiled graphs call the kernel, too: another choice is another key.
    keys.add(str(envs.compile_factors()["BLOCKSCALE_VLLM"]))
    assert len(keys) == 3


def test_a_layer_in_float16_stays_with_marlin(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, seen = torch.nn.Module(), []
    weight = quantize(torch.randn(128, 64), FORMATS["mxfp4"])
    layer.weight = torch.nn.Parameter(weight.codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(weight.scale, requires_grad=False)
    cls = vllm.linear.BlockscaleMxFp4LinearKernel
    kernel = made(cls, layer)
    layer.params_dtype = torch.float16
    monkeypatch.setattr(cls.__mro__[2], "process_weights_after_loading", lambda self, layer: seen.append(layer))
    kernel.process_weights_after_loading(layer)
    assert seen == [layer] and layer.weight.dtype is torch.uint8


def test_experts_add_up_to_the_oracles_sum(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")
    from interpreter import interpreted
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    torch.manual_seed(0)
    count, hidden, inner, tokens = 4, 64, 64, 5
    stacks = {"w13": torch.randn(count, 2 * inner, hidden), "w2": torch.randn(count, hidden, inner)}
    layer, dense = torch.nn.Module(), {}
    kernel = vllm.experts.BlockscaleNvFp4Experts.__new__(vllm.experts.BlockscaleNvFp4Experts)
    kernel.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    kernel.moe_config = SimpleNamespace(experts_per_token=2, moe_parallel_config=SimpleNamespace(dp_size=1))
    for name, alphas in (("w13", "g1_alphas"), ("w2", "g2_alphas")):
        weight = quantize(stacks[name] * 0.1, FORMATS["nvfp4"])
        dense[name] = weight.dequantize(torch.float64)
        setattr(kernel.quant_config, alphas, weight.global_scale)
        for part, tensor in (("weight", weight.codes), ("weight_scale", weight.scale)):
            layer.register_parameter(f"{name}_{part}", torch.nn.Parameter(tensor, requires_grad=False))
    kernel.process_weights_after_loading(layer)
    assert layer.w13_weight.dtype is torch.int32 and layer.w13_weight.shape[:2] == (count, 2 * inner)

    def silu_and_mul(activation: object, out: torch.Tensor, both: torch.Tensor) -> None:
        gate, up = both.float().chunk(2, -1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    monkeypatch.setattr(kernel, "activation", silu_and_mul)
    x = torch.randn(tokens, hidden).bfloat16()
    weights, index = torch.rand(tokens, count).topk(2)
    out = torch.empty_like(x)
    with interpreted():
        kernel.apply(out, x, layer.w13_weight, layer.w2_weight, weights, index.int(), MoEActivation.SILU, count, None)
        kernel.finalize_weight_and_reduce_impl().apply(out, out, weights, index, False)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for slot, expert in enumerate(index[token].tolist()):
            gate, up = (dense["w13"][expert] @ x[token].double()).chunk(2)
            middle = torch.nn.functional.silu(gate) * up
            expected[token] += weights[token, slot].double() * (dense["w2"][expert] @ middle)
    assert float((out.double() - expected).norm() / expected.norm()) < 2**-7


def test_norms_and_swiglu_between_our_layers_equal_vllms(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from interpreter import interpreted
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    from quant.vllm_plugin import between_layers

    assert between_layers.op_registry_oot is custom_op.op_registry_oot
    monkeypatch.setitem(custom_op.op_registry_oot, "RMSNorm", between_layers.BlockscaleRMSNorm)
    monkeypatch.setitem(custom_op.op_registry_oot, "SiluAndMul", between_layers.BlockscaleSiluAndMul)
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        norm, gate = RMSNorm(64, dtype=torch.bfloat16), SiluAndMul()
    assert type(norm) is between_layers.BlockscaleRMSNorm and type(gate) is between_layers.BlockscaleSiluAndMul
    torch.manual_seed(0)
    norm.weight.data.uniform_(0.5, 2)
    x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    h = (x + residual).float()
    normed = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).bfloat16() * norm.weight
    calls: list[str] = []
    monkeypatch.setattr(vllm.linear, "_formats_installed", {"nvfp4"})
    monkeypatch.setattr(between_layers, "takes_rows", lambda rows: calls.append("asked") or rows.is_contiguous())
    with interpreted(), torch.no_grad():
        y, hidden = norm(x, residual)
        assert torch.equal(hidden, x + residual)
        torch.testing.assert_close(y, normed, rtol=2**-7, atol=0)
        torch.testing.assert_close(norm(x + residual), normed, rtol=2**-7, atol=0)
        both = torch.randn(3, 64).bfloat16()
        expected = torch.nn.functional.silu(both[:, :32].float()).bfloat16() * both[:, 32:]
        torch.testing.assert_close(gate(both), expected, rtol=2**-7, atol=1e-6)
    assert calls


def test_rotations_between_our_layers_equal_vllms(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with its own angles rotates in our kernel; q and k of a norm, and classes that rotate otherwise, stay."""
    from interpreter import interpreted
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    from quant.vllm_plugin import between_layers

    monkeypatch.setattr(between_layers, "op_registry_oot", registry := {})
    between_layers.install_rotations()
    assert {"RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"} <= set(registry)
    assert "MRotaryEmbedding" not in registry and "Gemma4RotaryEmbedding" in registry
    monkeypatch.setattr(vllm.linear, "_formats_installed", {"nvfp4"})
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        cls = rotary_embedding.Llama3RotaryEmbedding
        arguments = 64, 64, 128, 10000.0, True, torch.bfloat16, 8.0, 1.0, 4.0, 64
        theirs, ours = cls(*arguments), registry["Llama3RotaryEmbedding"](*arguments)
    torch.manual_seed(0)
    q, k, _ = torch.randn(5, 5 * 64).bfloat16().split([3 * 64, 64, 64], dim=-1)
    positions = torch.tensor([0, 1, 17, 127, 3])
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(ours, "_forward_method", lambda *arguments: calls.append(arguments))
    with interpreted():
        turned = ours(positions, q, k)
    assert not calls
    cos, sin = theirs.cos_sin_cache.float()[positions, None].chunk(2, -1)
    for x, y in zip((q, k), turned, strict=True):
        low, high = x.float().view(5, -1, 64).chunk(2, -1)
        expected = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).view(x.shape)
        torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-6)
    for arguments in (
        (positions, q.contiguous(), k.contiguous()),
        (positions, q, None),
        (positions, q.float(), k.float()),
    ):
        ours(*arguments)
    assert len(calls) == 3


def test_keys_and_values_go_to_the_cache_by_our_kernel_where_it_can(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from interpreter import interpreted

    from quant.vllm_plugin import between_layers

    calls: list[str] = []

    def write(
        key: Any, value: Any, key_cache: Any, value_cache: Any, slot_mapping: Any, kv_cache_dtype: str, *scales: Any
    ) -> None:
        calls.append(kv_cache_dtype)

    monkeypatch.setattr(between_layers, "op_registry_oot", {})
    monkeypatch.setattr(between_layers.flash_attn, "reshape_and_cache_flash", write)
    monkeypatch.setattr(vllm.linear, "_formats_installed", {"nvfp4"})
    between_layers.install_rotations()
    store = between_layers.flash_attn.reshape_and_cache_flash
    between_layers.install_rotations()
    assert between_layers.flash_attn.reshape_and_cache_flash is store
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 2, 32).bfloat16()
    pages = torch.zeros(2, 2, 4, 64).bfloat16()
    k_cache, v_cache = pages.transpose(1, 2).split(32, dim=-1)
    with interpreted():
        store(k, v, k_cache, v_cache, torch.tensor([6, -1, 0]), "auto", None, None)
    assert not calls and torch.equal(k_cache[1, 2], k[0]) and torch.equal(v_cache[0, 0], v[2])
    assert int((pages != 0).any(-1).sum()) == 4
    store(k, v, k_cache, v_cache, torch.tensor([6, -1, 0]), "fp8", None, None)
    store(k.half(), v.half(), k_cache, v_cache, torch.tensor([6, -1, 0]), "auto", None, None)
    monkeypatch.setattr(vllm.linear, "_formats_installed", set())
    store(k, v, k_cache, v_cache, torch.tensor([6, -1, 0]), "auto", None, None)
    assert calls == ["fp8", "auto", "auto"]


def flash_signature() -> inspect.Signature:
    """The arguments of FlashAttention's function in vLLM, by its source: it is imported only where there is a GPU."""
    import vllm

    source = (Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py").read_text()
    [function] = [node for node in ast.parse(source).body if getattr(node, "name", "") == "flash_attn_varlen_func"]
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names])


def test_steps_in_graphs_attend_by_our_kernel_where_it_can(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against FlashAttention's meaning in float64; prompts, sinks and steps outside of a graph stay with vLLM."""
    from interpreter import interpreted

    from quant.vllm_plugin import between_layers

    calls: list[str] = []

    def flash(*arguments: Any, **named: Any) -> None:
        calls.append(f"{named['max_seqlen_q']}")

    monkeypatch.setattr(flash, "__signature__", flash_signature(), raising=False)
    monkeypatch.setattr(between_layers.flash_attn, "flash_attn_varlen_func", flash, raising=False)
    monkeypatch.setattr(between_layers, "_prepared", {})
    monkeypatch.setattr(vllm.linear, "_formats_installed", {"nvfp4"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    between_layers.install_decode_attention()
    attend = between_layers.flash_attn.flash_attn_varlen_func
    between_layers.install_decode_attention()
    assert between_layers.flash_attn.flash_attn_varlen_func is attend
    torch.manual_seed(0)
    cache = torch.randn(5, 16, 2, 2 * 64).bfloat16()  # [blocks, tokens, heads, key and value]
    k, v = cache.split(64, dim=-1)
    q, out = torch.randn(3, 4, 64).bfloat16(), torch.full((3, 4, 64), 9.0).bfloat16()
    table, lengths = torch.tensor([[2, 0], [4, 1], [3, 3]]).int(), torch.tensor([19, 16, 0]).int()
    step = {
        "q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": torch.arange(4).int(), "max_seqlen_q": 1,
        "seqused_k": lengths, "max_seqlen_k": 32, "softmax_scale": 0.125, "causal": True, "window_size": [-1, -1],
        "block_table": table, "softcap": 0, "s_aux": None,
    }  # fmt: skip

    def expected(window: int) -> torch.Tensor:
        y = torch.zeros(3, 4, 64).double()
        for i in range(2):
            keys, values = (x[table[i].long()].flatten(0, 1)[: lengths[i]][-window:].double() for x in (k, v))
            for head in range(4):
                scores = keys[:, head // 2] @ q[i, head].double() * 0.125
                y[i, head] = scores.softmax(0) @ values[:, head // 2]
        return y

    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    with interpreted():
        attend(**step)
        assert calls == ["1"]  # vLLM's kernel has the last word outside of a graph
        capturing.append(True)
        assert attend(**step) is out and calls == ["1"]
        assert float((out.double() - expected(99)).norm() / expected(99).norm()) < 2**-8
        assert torch.equal(out[2], torch.zeros(4, 64).bfloat16())  # a row that pads the batch
        for other in ({"max_seqlen_q": 2}, {"s_aux": q}, {"q": q.float()}, {"causal": False}, {"q": q[:2]}):
            attend(**{**step, **other})
        assert calls == ["1", "2", "1", "1", "1", "1"]
        monkeypatch.setattr(vllm.linear, "_attention_of_user", {"FLASH_ATTN"})
        attend(**step)
        assert calls == ["1", "2", "1", "1", "1", "1", "1"]
        between_layers.attend({**step, "window_size": [6, 0]})
        assert float((out.double() - expected(7)).norm() / expected(7).norm()) < 2**-8


def test_an_attention_backend_that_the_user_named_stays(vllm: Any) -> None:
    from vllm.config import AttentionConfig, DeviceConfig, VllmConfig, set_current_vllm_config

    from quant.vllm_plugin import releases

    assert releases.user_attention_backends() == set()
    for named in (set(), {"FLASH_ATTN"}):
        attention = AttentionConfig(backend=next(iter(named), None))
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"), attention_config=attention)):
            assert releases.user_attention_backends() == named


@pytest.mark.parametrize(("of_layer", "of_model", "ours"), [(1, 1, True), (1, 2, False), (2, 2, False)])
def test_norms_and_attention_stay_with_vllm_on_several_gpus(
    vllm: Any, of_layer: int, of_model: int, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers of latent attention are whole on every GPU, and say that they are on one."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=of_model))
    monkeypatch.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
    monkeypatch.setattr(vllm.linear, "_formats_installed", set())
    layer = torch.nn.Module()
    layer.tp_size = of_layer
    vllm.linear.install_weight(layer, quantize(torch.randn(128, 64), FORMATS["nvfp4"]))
    assert vllm.linear.has_our_layers() == ours and layer.blockscale_format == "nvfp4"


def test_a_model_without_our_layers_keeps_vllms_norms(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from quant.vllm_plugin import between_layers

    x = torch.randn(3, 64).bfloat16()
    monkeypatch.setattr(vllm.linear, "_formats_installed", set())
    assert not between_layers.takes_rows(x)
    monkeypatch.setattr(vllm.linear, "_formats_installed", {"nvfp4"})
    assert (
        between_layers.takes_rows(x)
        and not between_layers.takes_rows(x.float())
        and not between_layers.takes_rows(x[:, ::2])
    )


def test_a_function_whose_calls_ours_would_not_take_is_left_as_it_is() -> None:
    """vLLM 0.33 began to name an argument that our function called otherwise, and no model was loaded."""
    from types import SimpleNamespace

    from quant.vllm_plugin.releases import replace_function

    def theirs(model: str, device: int = 0, *, size: int = 1) -> tuple[str, int, int]:
        return model, device, size

    owner = SimpleNamespace(choose=theirs)
    for ours in (
        lambda model, capability, **named: None,
        lambda model, device: None,
        lambda **named: None,
        lambda model, *arguments: None,
    ):
        with pytest.raises(TypeError, match=r"cannot be replaced"):
            replace_function(owner, "choose", lambda _, ours=ours: ours)
        assert owner.choose is theirs
    replace_function(owner, "choose", lambda theirs: lambda *arguments, **named: theirs(*arguments, **named))
    assert owner.choose(model="m", device=2, size=3) == owner.choose("m", 2, size=3) == ("m", 2, 3)
