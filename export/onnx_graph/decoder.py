"""A transformers model becomes a graph with these inputs and outputs, and one op for each attention.

    prefill    input_ids [batch, sequence]                         -> logits [batch, sequence, vocabulary]
    decode     input_ids [batch, 1], past_key.N, past_value.N      -> logits [batch, 1, vocabulary],
                   [batch, kv_heads, past, dim] for each layer N      new_key.N, new_value.N [batch, kv_heads, 1, dim]
    encoder    input_ids, attention_mask [batch, sequence],        -> last_hidden_state and pooler_output, or logits
                   and token_type_ids if the model has several
    images     pixel_values [batch, channels, height, width]       -> likewise

A graph has no hidden state, so the caller keeps the KV cache: decoding takes the keys and values of all earlier tokens
and returns those of the new token, which the caller appends; nothing is copied. With `cache`, prefill returns the keys
and values of its tokens too. Keys are stored after RoPE. The cache is in the model's dtype, or in E4M3 with the scales
that the plan calibrated; a new token is rounded before it is attended to, so that all queries see the same key.

In transformers 5 every model looks its attention function up by name in `AttentionInterface`. While a graph is traced,
the name stands for our function, which puts one `quant::onnx_attention` op in place of masks and softmax. Without a
mask function of that name transformers builds no masks; causality is an attribute of the op, as fused kernels take it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quant.calibration.attention_names import implementations_kept, names_registered
from quant.calibration.kv_cache import AttentionScales, is_latent
from quant.export.onnx_graph.attention import attend
from quant.export.onnx_graph.limits import check_attention
from quant.formats.format import FORMATS

ATTENTIONS = ("native", "plugin", "none")
Dims = tuple[str | int, ...]
_TOKENS = 64  # in the example that a graph is traced with
_NAME = "quant_onnx"  # of our attention in transformers' registries


@dataclass(frozen=True)
class GraphInput:
    """An input of the graph: an example of it, and the names of its dynamic dimensions; a fixed one is a number."""

    example: torch.Tensor
    dims: Dims


@dataclass(eq=False)
class Attention:
    """The function that attention modules call while a graph is traced.

    Attributes:
        names: of the attention modules.
        kind: one of `ATTENTIONS`.
        scales: FP8 scales by module name; empty keeps attention in 16 bit.
        kv_scales: scales of k and v by module name; empty keeps the cache in the model's dtype.
        window: largest sequence that sliding windows need not cut.
        past: keys and values of earlier tokens, in order of the layers.
        new: keys and values of the current tokens, filled while the model runs.
        outputs: names of the model's outputs, likewise; torch.export would reset an attribute of `Graph`.
    """

    names: Mapping[nn.Module, str]
    kind: str = "native"
    scales: Mapping[str, Sequence[float]] = field(default_factory=dict)
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    window: int | None = None
    past: Sequence[torch.Tensor] = ()
    new: list[torch.Tensor] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers' attention functions."""
        name = self.names[module]
        self._refuse(name, options, sliding_window)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        key, value = self._cached(name, key, value)
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
        scales = self.scales.get(name, ())
        if scales:
            check_attention(name, self.kind, query, key, attention_mask is not None)
        # A single query, or one with a mask of its own, sees all keys that are left.
        causal = causal and attention_mask is None and not self.past
        out: torch.Tensor = attend(query, key, value, attention_mask, scale, causal, list(scales), self.kind)
        return out.transpose(1, 2), None

    def _cached(self, name: str, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens; the new tokens' are appended to `new`."""
        index, both = len(self.new), []
        for part, x in enumerate((key, value)):
            stored = x
            if name in self.kv_scales:
                scale = self.kv_scales[name][part]
                stored = torch.ops.quant.onnx_cache_write(x, scale)
                x = torch.ops.quant.onnx_cache_read(stored, scale, x)
            self.new.append(stored)
            # past_key.N and past_value.N are at 2N and 2N + 1, as the new ones are.
            if self.past:
                before = self.past[index + part]
                if name in self.kv_scales:
                    before = torch.ops.quant.onnx_cache_read(before, self.kv_scales[name][part], x)
                x = torch.cat([before, x], dim=2)
            both.append(x)
        return both[0], both[1]

    def _refuse(self, name: str, options: Mapping[str, Any], sliding_window: int | None) -> None:
        for option in ("softcap", "s_aux", "position_bias"):
            if options.get(option) is not None:
                raise ValueError(f"{name}: its attention has {option}, which exported attention cannot carry")
        if sliding_window is not None and (self.window is None or self.window > sliding_window):
            raise ValueError(
                f"{name}: its window slides over {sliding_window} tokens, which fused attention cannot; limit the "
                f"sequence to the window with --shapes sequence=1:{sliding_window}:{sliding_window}"
            )


@contextmanager
def attending(model: nn.Module, attention: Attention, *, masked: bool) -> Iterator[None]:
    """While open, every attention of a transformers `model` is `attention`."""
    masks = {_NAME: _key_mask} if masked else {}
    with implementations_kept(model), names_registered({_NAME: attention}, masks):
        config: Any = model.config
        config._attn_implementation = _NAME
        yield


def _key_mask(
    q_length: Any, kv_length: Any, attention_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor | None:
    """Which keys are real and which padding, `[batch, 1, queries, keys]`."""
    if attention_mask is None:
        return None
    return attention_mask[:, None, None, :].to(torch.bool).expand(-1, 1, q_length, -1)


class Graph(nn.Module):
    """A transformers model with tensors in and tensors out; with `cache`, keys and values are outputs too."""

    model: Any

    def __init__(self, model: nn.Module, attention: Attention, *, cache: bool = False) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.cache = cache

    def forward(self, inputs: dict[str, torch.Tensor], past: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The model's outputs, then new keys and values where they are asked for."""
        self.attention.past, self.attention.new = past, []
        options: dict[str, Any] = {"use_cache": False} if self.model.can_generate() else {}
        if past:
            ids = inputs["input_ids"]
            length = past[0].shape[2]
            options["position_ids"] = torch.arange(length, length + 1)[None].expand(ids.shape[0], 1)
        out = self.model(**inputs, **options)
        names = ("logits", "last_hidden_state", "pooler_output")
        outputs: dict[str, Any] = {name: getattr(out, name, None) for name in names}
        # A model with a head returns logits, and its hidden states are no output then.
        candidates = ["logits"] if outputs["logits"] is not None else ["last_hidden_state", "pooler_output"]
        self.attention.outputs = [name for name in candidates if outputs[name] is not None]
        new = self.attention.new if self.cache else []
        return (*(outputs[name] for name in self.attention.outputs), *new)


def is_decoder(model: nn.Module) -> bool:
    """Whether `model` is a causal language model of transformers."""
    can_generate: Any = getattr(model, "can_generate", None)
    config: Any = getattr(model, "config", None)
    return callable(can_generate) and can_generate() and not config.is_encoder_decoder


def model_inputs(model: Any, *, decode: bool) -> dict[str, GraphInput]:
    """The inputs of a transformers model without the KV cache; ValueError if they are not known."""
    longest = getattr(model.config, "max_position_embeddings", None) or _TOKENS
    tokens = torch.zeros(2, min(_TOKENS, longest), dtype=torch.long)
    dims: Dims = ("batch", "sequence")
    if model.main_input_name == "pixel_values":
        # A convolutional network takes images of any size, and its config names none: 224 is what they are trained on.
        size = getattr(model.config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        channels = model.config.num_channels
        example = torch.zeros(2, channels, height, width, dtype=model.dtype)
        return {"pixel_values": GraphInput(example, ("batch", channels, height, width))}
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} takes {model.main_input_name}; pass inputs= with an example of each input"
        )
    if decode:
        return {"input_ids": GraphInput(tokens[:, :1], ("batch", 1))}
    if is_decoder(model):
        return {"input_ids": GraphInput(tokens, dims)}
    inputs = {"input_ids": GraphInput(tokens, dims), "attention_mask": GraphInput(torch.ones_like(tokens), dims)}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = GraphInput(torch.zeros_like(tokens), dims)
    return inputs


def cache_inputs(graph: Graph, inputs: Mapping[str, GraphInput]) -> dict[str, GraphInput]:
    """The KV cache of a decode graph, found by running the model on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # No values are computed; attention modules append keys and values of the right shapes to `new`.
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        graph.attention.past, graph.attention.new = [], []
        graph.model(**{name: x.example for name, x in inputs.items()}, use_cache=False)
        seen = [(tuple(x.shape), x.dtype) for x in graph.attention.new]
    if not seen:
        raise ValueError(f"{type(graph.model).__name__}: no attention was seen, so it has no KV cache to decode with")
    return {
        name: GraphInput(torch.zeros(shape[0], shape[1], 8, shape[3]).to(dtype), ("batch", shape[1], "past", shape[3]))
        for name, (shape, dtype) in zip(cache_names("past", len(seen) // 2), seen, strict=True)
    }


def cache_names(prefix: str, layers: int) -> list[str]:
    """Names of keys and values, in the graph's order."""
    return [f"{prefix}_{part}.{layer}" for layer in range(layers) for part in ("key", "value")]


def operand_scales(scales: Mapping[str, AttentionScales]) -> dict[str, tuple[float, float, float, float]]:
    """FP8 scales of q, k, v and the probabilities by attention module, from those of `collect_attention_scales`.

    Raises ValueError for scales per head, or in another format than FP8.
    """
    by_module = {}
    for name, module in scales.items():
        operands = (module.q, module.k, module.v, module.p)
        if module.attention_format is not FORMATS["fp8"] or any(scale is None for scale in operands):
            raise ValueError(
                f"{name}: exported attention is in fp8, its scales are for {module.attention_format}; collect them "
                "with kv_format and attention_format fp8"
            )
        if any(scale is not None and scale.dim() for scale in operands):
            raise ValueError(f"{name}: exported attention has one scale a tensor; collect with granularity='tensor'")
        q, k, v, p = (float(scale) for scale in operands if scale is not None)
        by_module[name] = (q, k, v, p)
    return by_module


def kv_scales_of(model: nn.Module) -> dict[str, tuple[float, float]]:
    """Scales of an FP8 cache by attention module, from the buffers that `quantize` registered.

    Raises ValueError for scales per head; the graph has one per tensor.
    """
    scales = {}
    for name, module in model.named_modules():
        k, v = getattr(module, "k_scale", None), getattr(module, "v_scale", None)
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
            if k.numel() != 1 or v.numel() != 1:
                raise ValueError(f"{name}: the KV cache has a scale a head; exported graphs have one a tensor")
            if is_latent(module):
                raise ValueError(
                    f"{name}: its scales are of the latent vector, and exported graphs cache expanded keys and values; "
                    "quantize the model without --kv-cache"
                )
            scales[name] = (float(k), float(v))
    return scales
