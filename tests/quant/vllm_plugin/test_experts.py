"""Experts in MXFP4 and FP8 go through vLLM's own methods: made, loaded, processed and called, against float64."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="make vllm-test unpacks the Python files of vLLM's releases")
pytest.importorskip("triton", reason="comes with a CUDA build of torch, or: pip install triton")

from interpreter import interpreted
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.model_loader import reload
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.vllm_plugin import fp8_experts, fused_experts, mxfp4_experts, releases

COUNT, HIDDEN, INNER, TOKENS = 4, 64, 128, 5
LIMIT = 0.75
"""Of the activation of MiniMax-M3 here: many values lie beyond it."""


class Fields(SimpleNamespace):
    """Other fields are those of some releases, and unset."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def parallel(**changes: Any) -> Any:
    """The fields of vLLM's `FusedMoEParallelConfig`, likewise."""
    fields = {
        "use_ep": False, "use_all2all_kernels": False, "use_batched_activation_format": False,
        "use_passthrough_all2all": False, "enable_eplb": False, "is_sequence_parallel": False, "tp_size": 1,
        "dp_size": 1, "ep_size": 1, "all2all_backend": "allgather_reducescatter",
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def moe_config(**changes: Any) -> Any:
    """The fields of vLLM's `FusedMoEConfig` that the releases read, for one GPU without expert parallelism."""
    fields = {
        "moe_backend": "auto", "moe_parallel_config": parallel(), "hidden_dim": HIDDEN, "in_dtype": torch.bfloat16,
        "intermediate_size_per_partition": INNER, "has_bias": False, "swiglu_limit": None, "is_act_and_mul": True,
        "activation": MoEActivation.SILU, "routing_method": None, "router_logits_dtype": None, "is_lora_enabled": False,
        "w13_num_shards": 2, "swiglu_alpha": None, "swiglu_beta": None, "activation_situ_beta": None,
        "activation_situ_linear_beta": None, "num_experts": COUNT, "num_local_experts": COUNT, "experts_per_token": 2,
        "max_capture_size": 0, "disable_inplace": True, "max_num_tokens": 64,
    }  # fmt: skip
    return Fields(**fields | changes)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_experts.BlockscaleExperts, "_supports_current_device", staticmethod(lambda: True))


def layer_of(method: Any) -> torch.nn.Module:
    """A layer with the parameters that the method creates; loading is a copy."""
    layer = torch.nn.Module()
    layer._expert_routing_tables = lambda: None
    method.create_weights(layer, COUNT, HIDDEN, INNER, torch.bfloat16)
    return layer


def stacks(format: str) -> dict[str, BlockScaledTensor]:
    shapes = {"w13": (COUNT, 2 * INNER, HIDDEN), "w2": (COUNT, HIDDEN, INNER)}
    # Experts of different sizes: one taken for another cannot go unseen.
    sizes = torch.tensor([0.05, 0.1, 0.2, 0.4])[:, None, None]
    return {name: quantize(torch.randn(shape) * sizes, FORMATS[format]) for name, shape in shapes.items()}


def gated(activation: MoEActivation, both: torch.Tensor) -> torch.Tensor:
    if activation is MoEActivation.SWIGLUOAI:
        gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = both.chunk(2, -1)
    if activation.name == "SWIGLUOAI_UNINTERLEAVE":
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up


def check(method: Any, layer: torch.nn.Module, weights: dict[str, BlockScaledTensor], monkeypatch: Any) -> None:
    """The method's kernel agrees with float64; plain SwiGLU is our kernel, other activations are vLLM's."""
    kernel, config = method.moe_kernel.fused_experts, method.moe
    activated = []

    def activate(activation: MoEActivation, output: torch.Tensor, both: torch.Tensor, **named: Any) -> None:
        activated.append(activation)
        output.copy_(gated(activation, both.float()))

    monkeypatch.setattr(kernel, "activation", activate)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    routing, index = torch.rand(TOKENS, COUNT).topk(2)
    out = torch.empty_like(x)
    # Under expert parallelism: numbers among all experts, of which every second one is here, in another order.
    elsewhere = config.moe_parallel_config.use_ep
    numbers = torch.tensor([6, 1, 4, 3]) if elsewhere else torch.arange(COUNT)
    local = torch.full((8,), -1, dtype=torch.int32)
    local[numbers] = torch.arange(COUNT, dtype=torch.int32)
    chosen, here = numbers[index].int(), torch.ones(TOKENS, 2, dtype=torch.bool)
    if elsewhere:
        here = torch.rand(TOKENS, 2) < 0.5
        chosen[~here] = torch.tensor([0, 2, 5, 7], dtype=torch.int32)[index[~here]]
    arguments = layer.w13_weight, layer.w2_weight, routing, chosen, config.activation
    with interpreted():
        kernel.apply(out, x, *arguments, global_num_experts=8, expert_map=local if elsewhere else None)
        # With data parallelism vLLM gives no memory for the sum, which goes on to the other GPUs.
        given = None if elsewhere else out
        out = kernel.finalize_weight_and_reduce_impl().apply(given, out, routing, chosen, False)
    dense = {name: weight.dequantize(torch.float64) for name, weight in weights.items()}
    bias = {name: getattr(layer, f"{name}_bias", torch.zeros(COUNT, 1)).double() for name in weights}
    expected = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token in range(TOKENS):
        for slot, expert in enumerate(index[token].tolist()):
            if not here[token, slot]:
                continue
            middle = gated(config.activation, dense["w13"][expert] @ x[token].double() + bias["w13"][expert])
            down = dense["w2"][expert] @ middle + bias["w2"][expert]
            expected[token] += routing[token, slot].double() * down
    assert float((out.double() - expected).norm() / expected.norm()) < 2**-7
    is_plain = config.activation is MoEActivation.SILU and config.swiglu_limit is None
    assert activated == ([] if is_plain else [config.activation])


# A limit of 1e6 changes no value: only vLLM applies it.
@pytest.mark.parametrize("limit", [None, 1e6] if releases.limits_activations() else [None])
def test_mxfp4_of_compressed_tensors(limit: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_mxfp4(moe_config(swiglu_limit=limit), monkeypatch)


def check_mxfp4(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Checks experts as compressed-tensors writes them, and returns their kernel."""
    torch.manual_seed(0)
    method = mxfp4_experts.BlockscaleMxFp4MoEMethod(config)
    assert method.experts_cls is mxfp4_experts.BlockscaleMxFp4Experts
    layer, weights = layer_of(method), stacks("mxfp4")
    for name, weight in weights.items():
        getattr(layer, f"{name}_weight_packed").data.copy_(weight.codes)
        getattr(layer, f"{name}_weight_scale").data.copy_(weight.scale.view(torch.uint8))
    method.process_weights_after_loading(layer)
    assert layer.w13_weight.dtype is torch.int32 and layer.w13_weight.shape[:2] == (COUNT, 2 * INNER)
    check(method, layer, weights, monkeypatch)
    return method.moe_kernel.fused_experts


@pytest.mark.skipif(not releases.limits_activations(), reason="vLLM applies no limit by itself")
def test_swiglu_of_minimax_m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up are halves, and vLLM's activation gets the limit and the factors of the model."""
    factors = {"swiglu_limit": LIMIT, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}
    kernel = check_mxfp4(moe_config(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, **factors), monkeypatch)
    told = kernel.activation_config
    assert (told.clamp_limit, told.alpha, told.beta) == tuple(factors.values())


def test_mxfp4_under_expert_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the slots belong to experts of other GPUs."""
    monkeypatch.setattr(f"{__name__}.moe_config", partial(moe_config, moe_parallel_config=parallel(use_ep=True)))
    test_mxfp4_of_compressed_tensors(None, monkeypatch)


def test_a_gpu_without_tokens_has_nothing_to_add_up() -> None:
    """vLLM does not call `apply` then."""
    none, out = torch.empty(0, 2, dtype=torch.int32), torch.empty(0, HIDDEN)
    add_up = fused_experts.BlockscaleExperts.finalize_weight_and_reduce_impl(SimpleNamespace())
    assert add_up.apply(None, out, none, none, False) is out


def test_mxfp4_of_gpt_oss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up alternate, and both projections have a bias; vLLM's own choice is made first, and overruled."""
    torch.manual_seed(0)
    vllms = mxfp4_experts.mxfp4
    monkeypatch.setattr(vllms, "select_mxfp4_moe_backend", lambda moe: (vllms.Mxfp4MoeBackend.MARLIN, object))
    config = moe_config(has_bias=True, activation=MoEActivation.SWIGLUOAI)
    method = mxfp4_experts.BlockscaleGptOssMoEMethod(config)
    assert method.experts_cls is mxfp4_experts.BlockscaleMxFp4Experts
    layer, weights = layer_of(method), stacks("mxfp4")
    for name, weight in weights.items():
        getattr(layer, f"{name}_weight").data.copy_(weight.codes)
        getattr(layer, f"{name}_weight_scale").data.copy_(weight.scale.view(torch.uint8))
        getattr(layer, f"{name}_bias").data.normal_()
    method.process_weights_after_loading(layer)
    assert layer.w13_weight.dtype is torch.int32
    check(method, layer, weights, monkeypatch)


def nvfp4_method(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's method for checkpoints of compressed-tensors, which asks for a backend and gets our class."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4 as vllms,
    )

    ours = fused_experts.nvfp4.NvFp4MoeBackend.EMULATION, fused_experts.BlockscaleNvFp4Experts
    monkeypatch.setattr(vllms, "select_nvfp4_moe_backend", lambda config, weight_key, activation_key: ours)
    return vllms.CompressedTensorsW4A4Nvfp4MoEMethod(moe_config())


def stored(format: str, weights: dict[str, BlockScaledTensor]) -> dict[str, torch.Tensor]:
    """The tensors that vLLM loads, by the names of the parameters."""
    tensors = {}
    for name, weight in weights.items():
        tensors[f"{name}_weight" if format == "fp8_channel" else f"{name}_weight_packed"] = weight.codes
        tensors[f"{name}_weight_scale"] = weight.scale.view(torch.uint8) if format == "mxfp4" else weight.scale
        if weight.global_scale is not None:
            # The layout stores reciprocals, and gate and up have one each.
            reciprocal = 1 / weight.global_scale
            tensors[f"{name}_weight_global_scale"] = reciprocal[:, None].expand(-1, 2) if name == "w13" else reciprocal
            tensors[f"{name}_input_global_scale"] = torch.ones_like(tensors[f"{name}_weight_global_scale"])
    return tensors


class Loaded:
    """Experts that are loaded, and loaded anew with other weights, as vLLM does it."""

    def __init__(self, format: str, weights: dict[str, BlockScaledTensor], monkeypatch: pytest.MonkeyPatch) -> None:
        from compressed_tensors.quantization import QuantizationArgs

        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
        self.format = format
        if format == "nvfp4":
            self.method = nvfp4_method(monkeypatch)
        elif format == "mxfp4":
            self.method = mxfp4_experts.BlockscaleMxFp4MoEMethod(moe_config())
        else:
            scheme = QuantizationArgs(num_bits=8, type="float", strategy="channel")
            self.method = fp8_experts.BlockscaleFp8MoEMethod(scheme, moe_config())
        self.layer = layer_of(self.method)
        self.layer.quant_method = self.method
        reload.record_metadata_for_reloading(self.layer)
        for name, tensor in stored(format, weights).items():
            default_weight_loader(getattr(self.layer, name), tensor)
        self.method.process_weights_after_loading(self.layer)

    def load(self, weights: dict[str, BlockScaledTensor]) -> None:
        reload.initialize_layerwise_reload(self.layer)
        for name, tensor in stored(self.format, weights).items():
            parameter = getattr(self.layer, name)
            parameter.weight_loader(parameter, tensor)
        reload.finalize_layerwise_reload(self.layer, None)

    def addresses(self) -> list[list[int]]:
        held = [self.method.moe_kernel.fused_experts.stack(name) for name in ("w13", "w2")]
        return [[x.data_ptr() for x in (w.codes, w.scale, w.global_scale) if x is not None] for w in held]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8_channel"])
def test_a_reload_fills_the_memory_that_graphs_know(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM reloads weights for reinforcement learning, and after a sleep of level 2."""
    loaded = Loaded(format, stacks(format), monkeypatch)
    before = loaded.addresses()
    torch.manual_seed(1)
    weights = stacks(format)
    loaded.load(weights)
    assert loaded.addresses() == before
    check(loaded.method, loaded.layer, weights, monkeypatch)


def out_of_layout(weights: dict[str, BlockScaledTensor]) -> dict[str, BlockScaledTensor]:
    """The weights with a block scale of the last expert that the layout of Hopper's kernels does not hold."""
    changed = {}
    for name, weight in weights.items():
        scale = weight.scale.clone()
        scale.view(torch.uint8)[-1, 0, 0] = 0xB8 if weight.format.name == "nvfp4" else 0  # -1, and 2^-127
        changed[name] = replace(weight, scale=scale)
    return changed


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_real_experts_take_the_place_of_made_up_ones(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--load-format dummy`, as servers of reinforcement learning start: the scales that vLLM draws have both signs."""
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="dummy"))
    weights = stacks(format)
    with monkeypatch.context() as patched:
        patched.setattr("vllm.config.get_current_vllm_config_or_none", lambda: config)
        loaded = Loaded(format, out_of_layout(weights), monkeypatch)
        before = loaded.addresses()
        loaded.load(weights)
    assert loaded.addresses() == before
    check(loaded.method, loaded.layer, weights, monkeypatch)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_a_reload_keeps_the_layout_of_the_first_experts(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = stacks(format)
    with pytest.raises(ValueError, match=r"\.w13: .* scale.*; start vLLM with these weights"):
        Loaded(format, fits, monkeypatch).load(out_of_layout(fits))
    # Those that the layout does not hold run by the portable kernel, from parameters of the checkpoint's shapes.
    kept = Loaded(format, out_of_layout(fits), monkeypatch)
    before = kept.addresses()
    kept.load(fits)
    assert kept.addresses() == before and kept.layer.w13_weight.dtype is torch.uint8
    check(kept.method, kept.layer, fits, monkeypatch)


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8_weights(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    torch.manual_seed(0)
    monkeypatch.setattr(f"{__name__}.HIDDEN", 128)
    structure = {"block_structure": [128, 128]} if strategy == "block" else {}
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=strategy, **structure)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1, rank_in_group=0))
    method = fp8_experts.BlockscaleFp8MoEMethod(scheme, moe_config(hidden_dim=HIDDEN))
    layer, weights = layer_of(method), stacks("fp8_block" if strategy == "block" else "fp8_channel")
    if strategy == "tensor":
        # Gate and up have a scale each.
        halves = quantize(torch.randn(COUNT * 2, INNER, HIDDEN) * 0.2, FORMATS["fp8"])
        weights["w2"] = quantize(torch.randn(COUNT, HIDDEN, INNER) * 0.2, FORMATS["fp8"])
        rows = halves.scale.reshape(COUNT, 2).repeat_interleave(INNER, 1)[..., None]
        codes = halves.codes.view(COUNT, 2 * INNER, HIDDEN)
        weights["w13"] = BlockScaledTensor(codes, rows, FORMATS["fp8_channel"], tuple(codes.shape))
        layer.w13_weight_scale.data.copy_(halves.scale.view(COUNT, 2))
        layer.w2_weight_scale.data.copy_(weights["w2"].scale.view(COUNT))
    for name, weight in weights.items():
        getattr(layer, f"{name}_weight").data.copy_(weight.codes)
        if strategy != "tensor":
            getattr(layer, f"{name}_weight_scale").data.copy_(weight.scale)
    method.process_weights_after_loading(layer)
    check(method, layer, weights, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_backend": "triton"}, "--moe-backend is given"),
        ({"in_dtype": torch.float16}, "inputs in torch.float16"),
        ({"has_bias": True}, "experts with a bias"),
        ({"intermediate_size_per_partition": 96}, "which are not multiples of 64"),
        (
            {"moe_parallel_config": parallel(use_ep=True, enable_eplb=True)},
            r"experts that move between GPUs \(--enable-eplb\)",
        ),
        (
            {"moe_parallel_config": parallel(use_ep=True, use_all2all_kernels=True, all2all_backend="mori")},
            "experts that get their tokens by --all2all-backend mori",
        ),
    ],
)
def test_experts_that_only_we_could_run_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    scheme = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    with pytest.raises(ValueError, match=f"no kernel for experts with FP8 weights .*{reason}.*--format fp8_channel"):
        fp8_experts.BlockscaleFp8MoEMethod(scheme, moe_config(**changes))
    if "has_bias" not in changes:
        assert mxfp4_experts.BlockscaleMxFp4MoEMethod(moe_config(**changes)).experts_cls.__name__ == "MarlinExperts"


class Scheme:
    """What `get_moe_method` asks of vLLM's `CompressedTensorsConfig`."""

    def __init__(self, weights: Any, inputs: Any = None) -> None:
        self.scheme = {"weights": weights, "input_activations": inputs, "format": "float-quantized"}

    def _add_fused_moe_to_target_scheme_map(self) -> None: ...

    def get_scheme_dict(self, layer: Any, name: str) -> Any:
        return self.scheme


def test_only_weight_only_fp8_has_our_method() -> None:
    from compressed_tensors.quantization import QuantizationArgs

    layer = SimpleNamespace(ckpt_gate_proj_name="w1", ckpt_up_proj_name="w3", ckpt_down_proj_name="w2")
    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    rows = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)
    mxfp8 = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=32)
    int8 = QuantizationArgs(num_bits=8, type="int", strategy="channel")
    assert fp8_experts.weight_only(Scheme(fp8), layer, "experts") is fp8
    for scheme in (Scheme(fp8, rows), Scheme(mxfp8), Scheme(int8), Scheme(None)):
        assert fp8_experts.weight_only(scheme, layer, "experts") is None


def test_our_methods_take_the_places_of_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, oss = mxfp4_experts.compressed_tensors_mxfp4, mxfp4_experts.mxfp4
    for module, name in ((tensors, "CompressedTensorsW4A4Mxfp4MoEMethod"), (oss, "GptOssMxfp4MoEMethod")):
        monkeypatch.setattr(module, name, getattr(module, name))
    of = fp8_experts.CompressedTensorsMoEMethod
    monkeypatch.setattr(of, "get_moe_method", staticmethod(of.get_moe_method))
    for _ in range(2):
        assert (
            mxfp4_experts.install_mxfp4_experts() == "experts in MXFP4"
            and fp8_experts.install_fp8_experts() == "experts with FP8 weights"
        )
    layer = SimpleNamespace(moe_config=moe_config(), ckpt_gate_proj_name="gate_proj", ckpt_up_proj_name="up_proj")
    layer.ckpt_down_proj_name = "down_proj"
    from compressed_tensors.quantization import QuantizationArgs

    fp8 = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    assert type(of.get_moe_method(Scheme(fp8), layer, "experts")) is fp8_experts.BlockscaleFp8MoEMethod
    fp4 = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32)
    real = Scheme(fp4)
    real._is_mxfp4 = lambda weights: True  # type: ignore[attr-defined]
    real._is_mxfp4_w4a8_fp8 = lambda weights, inputs: False  # type: ignore[attr-defined]
    assert type(of.get_moe_method(real, layer, "experts")) is mxfp4_experts.BlockscaleMxFp4MoEMethod
    assert oss.GptOssMxfp4MoEMethod is mxfp4_experts.BlockscaleGptOssMoEMethod
