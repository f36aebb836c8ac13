"""Weights take the layout of the fastest kernel where they arrive, and nothing outside of a module sees it.

What a Hopper GPU would do is done here on a CPU: `on_hopper` says that it is one. The kernels are then the oracle,
which takes either layout.
"""

from __future__ import annotations

import copy
import io
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from quant.formats import format as number
from quant.formats.format import FORMATS, Format
from quant.formats.tensor import BlockScaledTensor, _pair_table, quantize
from quant.kernels.base import hardware, weight_layout
from quant.kernels.base.hardware import current
from quant.kernels.base.weight_layout import as_computed, is_prepacked, prepack, prepack_refusal, restore
from quant.kernels.linear import dispatch, quantized_module, tiles
from quant.kernels.linear.embedding import QuantEmbedding
from quant.kernels.linear.experts import QuantExperts
from quant.kernels.linear.quant_linear import QuantLinear
from quant.recipes.gpus import GPUS

ARRANGED = ("nvfp4", "mxfp4", "mxfp6", "mxfp6_e3m2")
OUT, IN = 128, 192


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`hopper.here` says whether this machine's CPU is taken for a Hopper GPU."""
    where = SimpleNamespace(here=True)
    monkeypatch.setattr(quantized_module, "prefers_prepacked", lambda codes: where.here and codes.device.type == "cpu")
    return where


def weight_in(format: str, *shape: int, seed: int = 0) -> BlockScaledTensor:
    values = torch.randn(*(shape or (OUT, IN)), generator=torch.Generator().manual_seed(seed))
    return quantize(values.bfloat16(), FORMATS[format])


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """What is held, to compare: dtype, shape and bytes."""
    return {
        name: (t.dtype, list(t.shape), t.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, t in tensors.items()
    }


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_is_that_of_a_checkpoint(format: str, hopper: SimpleNamespace) -> None:
    """Saved, loaded, copied, pickled and moved back, bit for bit, for every format; and it computes the same."""
    module = QuantLinear(weight_in(format), torch.randn(OUT, dtype=torch.bfloat16))
    saved, x = bits(module.state_dict()), torch.randn(3, IN).bfloat16()
    hopper.here = False
    expected = module(x)
    held = bits(dict(module.named_buffers()))
    if format == "mxfp6_e3m2":  # int8 tells its codes from those of mxfp6
        held["codes"] = (torch.int8, *held["codes"][1:])
    assert all(saved[name] == value for name, value in held.items())
    hopper.here = True
    copies = [module, copy.deepcopy(module)]
    for each in copies:
        each.arrange()
        assert is_prepacked(each.stored_weight) == (format in ARRANGED)
    copies += [copy.deepcopy(module), unpickled(module)]
    for each in copies:
        assert is_prepacked(each.stored_weight) == (format in ARRANGED)
        assert torch.equal(each(x), expected)
        assert bits(each.state_dict()) == saved
    hopper.here = False
    for each in copies:
        each._arranged = None  # as after a move: this CPU is no GPU any more
        assert torch.equal(each(x), expected)
        assert not is_prepacked(each.stored_weight) and bits(each.state_dict()) == saved


def unpickled(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("format", FORMATS)
def test_a_checkpoint_is_loaded_into_an_arranged_module(format: str, hopper: SimpleNamespace) -> None:
    first, second = QuantLinear(weight_in(format)), QuantLinear(weight_in(format, seed=1))
    x = torch.randn(3, IN).bfloat16()
    expected = second(x)
    state = {name: value.clone() for name, value in second.state_dict().items()}
    assert not torch.equal(first(x), expected)
    address = first.codes.data_ptr()
    first.load_state_dict(state)
    # In place, for captured graphs read it, and arranged again.
    assert first.codes.data_ptr() == address and is_prepacked(first.stored_weight) == (format in ARRANGED)
    assert torch.equal(first(x), expected) and bits(first.state_dict()) == bits(state)
    third = QuantLinear(weight_in(format, seed=2))
    third.arrange()
    third.load_state_dict(state, assign=True)
    assert torch.equal(third(x), expected) and bits(third.state_dict()) == bits(state)
    broken = {**state, "codes": state["codes"][:64].contiguous()}
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        third.load_state_dict(broken)


@pytest.mark.parametrize("format", FORMATS)
def test_a_state_dict_is_written_through_or_refuses_to_be(format: str, hopper: SimpleNamespace) -> None:
    """Averages are put in by `state_dict()[name].copy_(…)`: of another layout these would be written into a copy."""
    first, second = QuantLinear(weight_in(format)), QuantLinear(weight_in(format, seed=1))
    x = torch.randn(3, IN).bfloat16()
    first(x), second(x)
    refused = 0
    for name, value in first.state_dict().items():
        if value.is_inference():
            with torch.no_grad(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                value.copy_(second.state_dict()[name])
            refused += 1
        else:
            value.copy_(second.state_dict()[name])
    assert bool(refused) == (format in ARRANGED)
    if refused:
        third = QuantLinear(weight_in(format, seed=2))
        third.load_state_dict(second.state_dict())
        assert torch.equal(third(x), second(x))
        third.load_state_dict(second.state_dict(), assign=True)
        assert torch.equal(third(x.requires_grad_()), second(x)) and not third.codes.is_inference()
        third(x).sum().backward()
    else:
        assert torch.equal(first(x), second(x))


def test_weights_in_16_bit_are_refused_also_where_keys_may_be_missing() -> None:
    """As a loop of reinforcement learning sends them: with strict=False the old codes would stay without a word."""
    net = nn.Sequential(QuantLinear(weight_in("int8")))
    with pytest.raises(RuntimeError, match=r"0\.weight is a weight in 16 bit, and the layer holds codes in int8"):
        net.load_state_dict({"0.weight": torch.zeros(OUT, IN)}, strict=False)
    net.load_state_dict({"0.codes": net[0].codes}, strict=False)


@pytest.mark.parametrize(
    ("other", "own"),
    [
        ("fp8_channel", "int8"),
        ("int8", "fp8_channel"),
        ("mxfp4", "int4_g32"),
        ("mxfp6", "mxfp6_e3m2"),
        ("mxfp6_e3m2", "mxfp6"),
    ],
)
def test_codes_of_another_format_are_refused(other: str, own: str) -> None:
    """Their shapes are the same: PyTorch cast the numbers of one into the codes of the other."""
    for assign in (False, True):
        net, source = (nn.Sequential(QuantLinear(weight_in(format, 64, 128))) for format in (own, other))
        with pytest.raises(RuntimeError, match=rf"and {own} has torch.*: load it into a model that was quantized by"):
            net.load_state_dict(source.state_dict(), assign=assign)
        by_same_plan = nn.Sequential(QuantLinear(weight_in(other, 64, 128, seed=2)))
        by_same_plan.load_state_dict(source.state_dict(), assign=assign)
        x = torch.randn(3, 128)
        assert torch.equal(by_same_plan(x), source(x))


def test_arrival_by_single_tensors(hopper: SimpleNamespace) -> None:
    """accelerate's way: `module._buffers[name] = tensor`, one after the other; the first forward arranges them."""
    model = nn.Sequential(QuantLinear(weight_in("nvfp4")), QuantLinear(weight_in("nvfp4", 64, OUT)))
    x = torch.randn(3, IN).bfloat16()
    hopper.here = False
    y = model(x)
    hopper.here = True
    for module in model:
        for name, buffer in list(module._buffers.items()):
            module._buffers[name] = None if buffer is None else buffer.clone()
        module._arranged = None
    assert torch.equal(model(x), y)
    assert all(is_prepacked(module.stored_weight) for module in model)


def test_offloaded_weights_stay_as_they_are_stored(hopper: SimpleNamespace) -> None:
    """accelerate copies them at every call, and compares their shapes with those before."""
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    model = nn.Sequential(QuantLinear(weight_in("nvfp4")))
    x, saved = torch.randn(3, IN).bfloat16(), bits(model.state_dict())
    hopper.here = False
    y = model(x)
    hopper.here = True
    plain = copy.deepcopy(model)
    plain[0]._arranged = None
    model = accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)
    model[0]._arranged = None
    for _ in range(2):
        assert torch.equal(model(x), y)
    assert model[0].codes.is_meta
    state = model[0]._hf_hook.weights_map
    assert bits({"0.codes": state["codes"]})["0.codes"] == saved["0.codes"]
    # By default it takes away parameters only, and codes are buffers.
    plain = accelerate.cpu_offload(plain, execution_device=torch.device("cpu"))
    assert torch.equal(plain(x), y) and is_prepacked(plain[0].stored_weight)


def test_dispatched_weights_are_arranged(hopper: SimpleNamespace) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    model = nn.Sequential(QuantLinear(weight_in("nvfp4")), QuantLinear(weight_in("mxfp4", 64, OUT)))
    x = torch.randn(3, IN).bfloat16()
    hopper.here = False
    y = model(x)
    hopper.here = True
    for module in model:
        module._arranged = None
    model = accelerate.dispatch_model(model, device_map={"0": "cpu", "1": "cpu"}, main_device="cpu", force_hooks=True)
    assert torch.equal(model(x), y)
    assert all(is_prepacked(module.stored_weight) for module in model)


def test_other_inputs_than_bf16_go_back_for_good(hopper: SimpleNamespace) -> None:
    """Hopper's kernels multiply in BF16; widened MXFP6 serves any dtype."""
    for format, arranged in (("nvfp4", False), ("mxfp6", True)):
        module = QuantLinear(weight_in(format))
        module.arrange()
        for dtype in (torch.float16, torch.bfloat16):
            x = torch.randn(3, IN).to(dtype)
            assert torch.equal(module(x), x @ module.dequantize(dtype).T)
            assert is_prepacked(module.stored_weight) is arranged


def test_autocast_is_not_taken_for_another_input(hopper: SimpleNamespace) -> None:
    """FP32 inputs are multiplied in BF16 there, for which the layout is."""
    module, x = QuantLinear(weight_in("nvfp4")), torch.randn(3, IN)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(x).dtype is torch.bfloat16 and is_prepacked(module.stored_weight)


def test_what_has_no_layout_stays(hopper: SimpleNamespace) -> None:
    odd = QuantLinear(weight_in("nvfp4", 32, 128))
    far = quantize(torch.randn(64, 128) * 2.0 ** torch.arange(64)[:, None], FORMATS["mxfp4"])
    table = QuantEmbedding(weight_in("nvfp4"), torch.bfloat16)
    for module in (odd, QuantLinear(far)):
        before = module.codes
        module(torch.randn(1, 128).bfloat16())
        assert module.codes is before
    table.arrange()
    assert not is_prepacked(table.stored_weight)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_experts(format: str, hopper: SimpleNamespace) -> None:
    weight = weight_in(format, 3, OUT, IN)
    x, offsets = torch.randn(7, IN).bfloat16(), torch.tensor([0, 2, 2, 7], dtype=torch.int32)
    module, plain = QuantExperts(weight), QuantExperts(weight_in("mxfp6", 3, OUT, IN))
    hopper.here = False
    saved, grouped, alone, third = bits(module.state_dict()), module.grouped(x, offsets), module(x, 1), module[2]
    hopper.here = True
    module._arranged = None
    assert torch.equal(module.grouped(x, offsets), grouped) and is_prepacked(module.stored_weight)
    assert torch.equal(module(x, 1), alone) and torch.equal(module[2], third)
    assert bits(module.state_dict()) == saved
    plain.grouped(x, offsets)
    assert not is_prepacked(plain.stored_weight)  # experts in MXFP6 have no such layout


@pytest.mark.parametrize("format", ["nvfp4", "mxfp6"])
def test_compiled_and_exported_modules_keep_their_layout(format: str, hopper: SimpleNamespace) -> None:
    module, x = QuantLinear(weight_in(format)), torch.randn(4, IN).bfloat16()
    program = torch.export.export(module, (x,), strict=False)
    assert not is_prepacked(module.stored_weight)
    y = module(x)
    assert is_prepacked(module.stored_weight) and torch.equal(program.module()(x), y)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(module, backend="aot_eager", fullgraph=True)(x), y)


def test_a_fake_forward_leaves_the_weight_alone(hopper: SimpleNamespace) -> None:
    module = QuantLinear(weight_in("nvfp4"))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert module(torch.randn(4, IN).bfloat16()).shape == (4, OUT)
    assert type(module.codes) is torch.Tensor and module.codes.dtype is torch.uint8


def test_a_first_forward_without_gradients_leaves_the_weight_trainable_through(hopper: SimpleNamespace) -> None:
    """Tensors made in inference mode cannot be saved for a backward pass; an arranged weight must not be one."""
    module, x = QuantLinear(weight_in("nvfp4")), torch.randn(3, IN).bfloat16()
    with torch.inference_mode():
        module(x)
    assert is_prepacked(module.stored_weight)
    x.requires_grad_()
    module(x).sum().backward()
    expected = module.dequantize(torch.bfloat16).sum(0)
    assert x.grad is not None and torch.allclose(x.grad, expected.expand(3, -1), rtol=2**-6, atol=2**-4)


def test_threads_see_a_whole_weight(hopper: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight first forwards at once: none reads codes of one layout with scales of the other."""
    module, x = QuantLinear(weight_in("nvfp4")), torch.randn(3, IN).bfloat16()
    hopper.here = False
    expected = module(x)
    hopper.here, module._arranged = True, None
    store = QuantLinear._store

    def slowly(self: QuantLinear, weight: BlockScaledTensor) -> None:
        self.codes = weight.codes
        time.sleep(0.05)
        store(self, weight)

    monkeypatch.setattr(QuantLinear, "_store", slowly)
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(y, expected) for y in pool.map(module, [x] * 8))


@pytest.mark.parametrize("format", ARRANGED)
def test_a_default_device_changes_nothing(format: str) -> None:
    """Tables of codes are on the CPU, wherever tensors are made by default when they are first used."""
    weight = weight_in(format)
    for table in (weight_layout._scale_table, weight_layout._e4m3_codes, number._values, _pair_table):
        table.cache_clear()
    with torch.device("meta"):
        arranged = prepack(weight)
        back = restore(arranged)
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.scale.view(torch.uint8), weight.scale.view(torch.uint8))
    assert torch.equal(restore(prepack(weight)).dequantize(), weight.dequantize())


# On a GPU

TOKENS = (1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 65, 100, 128, 256, 300, 512, 777, 1024, 2048, 3000, 4096)


def kernels_of(format: Format, tokens: int) -> set[str]:
    """Files of the kernels that may serve an arranged weight of 512 × 1024 on a Hopper GPU."""
    if format.name in ("nvfp4", "mxfp4"):
        few, many = {"sm90_nvfp4_gemm_few"}, {"sm90_codes_gemm_many"}
        return few if tokens <= tiles.PREPACKED_FEW else many if tokens <= tiles.FEW else few | many
    if tokens <= tiles.STORED_FEW:
        return {"portable_codes_gemm"}
    if format.name in tiles.STORED_FORMATS and (tokens <= tiles.STORED_MOST or not format.block[1]):
        return {"sm90_codes_gemm_many"}
    return {"portable_codes_gemm"} if tokens <= tiles.FEW else {"dispatch"}  # where the library multiplies


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_loaded_model_takes_the_fastest_kernel(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, for 1 to 4,096 tokens; the product is that of the dequantized weight in float64."""
    if not current().has_wgmma:
        pytest.skip("weights are arranged for Hopper only")
    model = nn.Sequential(QuantLinear(weight_in(format, 512, 1024))).cuda()
    assert is_prepacked(model[0].stored_weight) == (format in ARRANGED)
    dense, used = model[0].dequantize(torch.float64), []
    prepare = dispatch.prepare_launch

    def seen(x: torch.Tensor, weight: BlockScaledTensor, bias: Any, choice: Any) -> Any:
        launch = prepare(x, weight, bias, choice)
        used.append(launch.__module__.rpartition(".")[2])
        return launch

    monkeypatch.setattr(dispatch, "prepare_launch", seen)
    monkeypatch.setattr(dispatch, "_products", {})
    for tokens in TOKENS:
        used.clear()
        x = torch.randn(tokens, 1024, device="cuda").bfloat16()
        y = model(x)
        exact = x.double() @ dense.T
        assert float((y.double() - exact).norm() / exact.norm()) < 2**-8, tokens
        assert used[0] in kernels_of(as_computed(model[0].stored_weight).format, tokens), (tokens, used)
        assert not is_prepacked(model[0].quantized_weight)
    before = weight_in(format, 512, 1024)
    state = model.state_dict()
    assert torch.equal(state["0.codes"].cpu().view(torch.uint8), before.codes.view(torch.uint8))
    model.cpu()
    assert not is_prepacked(model[0].stored_weight)


@pytest.mark.parametrize("format", FORMATS)
def test_which_kernel_an_h100_takes(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on any machine: what is chosen for an arranged weight, without a launch."""
    monkeypatch.setattr(hardware, "current", lambda index=0: GPUS["h100"])
    files = {
        tiles.Tiles: "portable_codes_gemm",
        tiles.GluonTiles: "sm90_nvfp4_gemm_few",
        tiles.PrefillTiles: "sm90_codes_gemm_many",
    }
    weight = weight_in(format, 512, 1024)
    arranged = weight if prepack_refusal(weight) else as_computed(prepack(weight))
    for tokens in TOKENS:
        choice = dispatch.choose_launch(arranged, torch.empty(tokens, 1024, dtype=torch.bfloat16))
        assert files.get(type(choice), "dispatch") in kernels_of(arranged.format, tokens), (tokens, choice)
