"""SGLang is left alone unless that is asked for; a layer that takes our kernels multiplies as its checkpoint says.

Its hooks are applied by SGLang's own registry where it is installed, and by a stand-in of a few lines elsewhere.
"""

from __future__ import annotations

import functools
import logging
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from samples import ROOT
from torch import nn

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.sglang_plugin import linear, register

OUT, IN = 128, 192


class Scheme:
    """Stands for SGLang's scheme: says that it was asked, and multiplies by ones."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.asked.append("process")

    def apply_weights(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.asked.append("apply")
        return x.new_ones(*x.shape[:-1], OUT)


class Registry:
    """What SGLang's registry does with functions around a method."""

    def __init__(self, scheme: type) -> None:
        self.scheme = scheme

    def register(self, target: str, hook: Callable[..., Any], hook_type: str) -> None:
        owner, _, name = target.rpartition(".")
        assert (owner, hook_type) == (register.SCHEME, "around")
        setattr(self.scheme, name, functools.partialmethod(self._around, hook, getattr(self.scheme, name)))

    @staticmethod
    def _around(scheme: Any, hook: Any, original: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(original, scheme, *args, **kwargs)


@pytest.fixture
def scheme(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instance of a scheme around which `install` has put our functions."""
    hooked = type("Hooked", (Scheme,), {})
    module = ModuleType("sglang.srt.plugins.hook_registry")
    vars(module).update(HookRegistry=Registry(hooked), HookType=SimpleNamespace(AROUND="around"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    register.install()
    return hooked()


def layer(weight: BlockScaledTensor, dtype: torch.dtype = torch.bfloat16, members: int = 2) -> Any:
    """A layer of merged members as SGLang's loader leaves it."""
    module: Any = nn.Module()
    module.params_dtype = dtype
    assert weight.global_scale is not None
    tensors = {
        "weight_packed": weight.codes, "weight_scale": weight.scale,
        "weight_global_scale": (1 / weight.global_scale).repeat(members), "input_global_scale": torch.ones(members),
    }  # fmt: skip
    for name, tensor in tensors.items():
        module.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
    return module


def nvfp4(out: int = OUT) -> BlockScaledTensor:
    return quantize(torch.randn(out, IN, generator=torch.Generator().manual_seed(0)), FORMATS["nvfp4"])


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_that_takes_our_kernels_multiplies_by_its_checkpoint(
    bias: bool, scheme: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "refuses", lambda layer: "")  # as on a Hopper GPU
    weight = nvfp4()
    module = layer(weight)
    scheme.process_weights_after_loading(module)
    assert set(dict(module.named_parameters())) == {"weight", "weight_scale", "weight_global_scale"}
    assert module.weight.dtype is torch.int32  # in the layout of the kernels
    x = torch.randn(2, 5, IN).bfloat16()
    added = torch.randn(OUT).bfloat16() if bias else None
    y = scheme.apply_weights(module, x, bias=added)
    exact = x.double() @ weight.dequantize(torch.float64).T
    exact = exact if added is None else exact + added.double()
    assert y.shape == (2, 5, OUT) and float((y.double() - exact).norm() / exact.norm()) < 0.004
    assert scheme.asked == []


@pytest.mark.parametrize(
    ("weight", "dtype", "said"),
    [
        (nvfp4(), torch.float16, "our kernels take inputs in bfloat16, not in torch.float16"),
        (nvfp4(), torch.bfloat16, "our kernels are for Hopper GPUs, and it is on cpu"),
    ],
)
def test_other_layers_stay_with_sglang_which_is_said_once(
    weight: BlockScaledTensor, dtype: torch.dtype, said: str, scheme: Any, caplog: pytest.LogCaptureFixture
) -> None:
    linear._say.cache_clear()
    for _ in range(2):
        module = layer(weight, dtype)
        scheme.process_weights_after_loading(module)
        assert set(dict(module.named_parameters())) >= {"weight_packed", "input_global_scale"}
    assert torch.equal(scheme.apply_weights(module, torch.zeros(3, IN)), torch.ones(3, OUT))
    assert scheme.asked == ["process", "process", "apply"]
    assert [said in record.message for record in caplog.records] == [True]


def test_a_matrix_that_has_no_layout_stays_with_sglang(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "refuses", lambda layer: "")
    module = layer(nvfp4(out=96))
    scheme.process_weights_after_loading(module)
    assert scheme.asked == ["process"] and module.weight_packed.shape == (96, IN // 2)


def test_members_of_different_scales_are_sglangs_error(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "refuses", lambda layer: "")
    module = layer(nvfp4())
    module.weight_global_scale.data[1] *= 2
    scheme.process_weights_after_loading(module)
    assert scheme.asked == ["process"]


@pytest.mark.parametrize(
    ("asked", "version", "triton", "said"),
    [
        ("", "0.5.23", True, "BLOCKSCALE_SGLANG=1 gives NVFP4 linear layers its kernels"),
        ("1", "0.5.24", True, "SGLang 0.5.24 was never looked at by this blockscale, only 0.5.23"),
        ("1", "0.5.23", False, "Triton is not installed"),
        ("1", "0.5.23", True, "may take our kernels"),
    ],
)
def test_sglang_is_left_alone_unless_all_fits_and_it_was_asked_for(
    asked: str, version: str, triton: bool, said: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    done: list[int] = []
    monkeypatch.setenv("BLOCKSCALE_SGLANG", asked)
    monkeypatch.setattr(register.metadata, "version", lambda name: version)
    monkeypatch.setattr(register, "has_triton", lambda: triton)
    monkeypatch.setattr(register, "install", lambda: done.append(1))
    with caplog.at_level(logging.INFO):
        register.register()
    assert [said in record.message for record in caplog.records] == [True]
    assert bool(done) == ("may take" in said)


def test_the_entry_point_of_the_package_is_this_function() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["sglang.srt.plugins"]
    assert EntryPoint("blockscale", group["blockscale"], "sglang.srt.plugins").load() is register.register


def test_the_registry_of_sglang_takes_our_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = pytest.importorskip("sglang.srt.plugins.hook_registry", reason="pip install sglang==0.5.23")
    module = ModuleType("stands_for_a_module_of_sglang")
    hooked = type("Hooked", (Scheme,), {})
    module.Scheme = hooked  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(register, "SCHEME", f"{module.__name__}.Scheme")
    monkeypatch.setattr(linear, "refuses", lambda layer: "")
    register.install()
    registry.HookRegistry.apply_hooks()
    one, loaded = hooked(), layer(nvfp4())
    one.process_weights_after_loading(loaded)
    assert one.apply_weights(loaded, torch.zeros(1, IN).bfloat16(), bias=None).shape == (1, OUT) and not one.asked
