"""A transformers model becomes a graph of one forward pass, with one op for each attention.

    decoder    input_ids [batch, sequence]                         -> logits [batch, sequence, vocabulary]
    encoder    input_ids, attention_mask [batch, sequence],        -> last_hidden_state and pooler_output, or logits
                   and token_type_ids if the model has several
    T5, BART   input_ids, attention_mask [batch, sequence],        -> logits [batch, target, vocabulary]
                   decoder_input_ids [batch, target]
    images     pixel_values [batch, channels, height, width]       -> likewise

These graphs have no KV cache; decoders that serve are exported by `serving`.

In transformers 5 every model looks its attention function up by name in `AttentionInterface`. While a graph is traced,
the name stands for our function, which puts one `quant::onnx_attention` op in place of masks and softmax. Without a
mask function of that name transformers builds no masks; causality is an attribute of the op, as fused kernels take it.
T5's bias for the distance of two tokens is added to the scores: such attention has a mask of numbers, with causality in
it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from quant.base.errors import option
from quant.calibration.attention_names import implementations_kept, model_configs, names_registered
from quant.calibration.attention_scales import AttentionScales
from quant.calibration.evaluating import without_cache
from quant.export.onnx.attention_nodes import attend
from quant.export.onnx.limits import check_attention
from quant.export.onnx.moving_rope import stateless_rope

ATTENTIONS = ("native", "plugin", "none")
Dims = tuple[str | int, ...]
_TOKENS = 64  # in the example that a graph is traced with
# Outputs that belong together; a model with a head returns logits, and its hidden states are then not an output.
_OUTPUTS = (("logits", "pred_boxes"), ("last_hidden_state", "pooler_output"))
_NAME = "quant_onnx"  # of our attention in transformers' registries


def check_attends(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Raises ValueError for a transformers model that asks for a mask which its graph would lose.

    A graph has one op for each attention, and no masks but those of padding. A model that does not call the attention
    function of its config, such as BLOOM and XGLM, would have no op. One whose module is not causal by itself, but gets
    a causal mask, such as BigBird-Pegasus, would have an op that sees every token. Both graphs would look at later
    tokens, without an error. The model is run twice without values, on examples of its inputs by name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers.masking_utils import causal_mask_function

    modules = {module: name for name, module in model.named_modules()}
    masks: list[tuple[Tensor, bool]] = []  # with whether it is the causal one
    attentions: list[str] = []
    masked: list[str] = []  # attentions that get the causal mask and are not causal by themselves

    def mask(q_length: int, kv_length: int, mask_function: Any, **_: Any) -> Tensor:
        # Masks that are put together, such as PaliGemma's, may let every token see every other one.
        masks.append((torch.ones(2, 1, q_length, kv_length, dtype=torch.bool), mask_function is causal_mask_function))
        return masks[-1][0]

    def watch(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> tuple[Tensor, None]:
        attentions.append(modules.get(module, ""))
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal and any(attention_mask is made for made, is_causal in masks if is_causal):
            masked.append(attentions[-1])
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    with (
        without_cache(model_configs(model)),
        stateless_rope(model),
        implementations_kept(model) as configs,
        names_registered({_NAME: watch}, {_NAME: mask}),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        for config, _ in configs:
            config._attn_implementation_internal = _NAME
        # A causal mask counts without padding, which has masks of its own that a graph keeps.
        for examples in (inputs, {name: x for name, x in inputs.items() if "attention_mask" not in name}):
            masked.clear()
            with suppress(Exception):  # a model that decides by values, for example, fails again in the trace
                model(**examples)
    way_out = (
        "whose masks a graph would lose; serve its checkpoint (vLLM), or name the inputs of a graph that keeps the "
        f"masks, as in {option('input', 'input_ids:int64:batch,sequence')}"
    )
    if masks and not attentions:
        raise ValueError(f"{type(model).__name__} computes attention in code of its own, {way_out}")
    if masked:
        raise ValueError(f"{type(model).__name__}: {masked[0]} is causal by its mask alone, {way_out}")


@dataclass(frozen=True)
class GraphInput:
    """An input of the graph: an example of it, and the names of its dynamic dimensions; a fixed one is a number."""

    example: Tensor
    dims: Dims


@dataclass(eq=False)
class Attention:
    """The function that attention modules call while a graph is traced."""

    names: Mapping[nn.Module, str]  # of the attention modules
    kind: str = "native"  # one of `ATTENTIONS`
    scales: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of FP8 by module; empty is 16 bit
    window: int | None = None  # largest sequence that sliding windows need not cut
    # the names of the model's outputs, filled while the model runs; torch.export would reset an attribute of `Graph`
    outputs: list[str] = field(default_factory=list)
    refused: ClassVar[tuple[str, ...]] = ("softcap",)  # options that the graph cannot hold

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
        scaling: float | None = None, is_causal: bool | None = None, sliding_window: int | None = None,
        position_bias: Tensor | None = None, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Attends, under the signature of transformers' attention functions."""
        name = self.names[module]
        present = {**options, "position_bias": position_bias}
        extra = next((option for option in self.refused if present.get(option) is not None), None)
        if extra is None and attention_mask is not None and attention_mask.dtype is not torch.bool:
            extra = "a mask of its own"
        if extra is not None:
            raise ValueError(
                f"{name}: its attention has {extra}, which exported attention cannot carry; run the model's "
                "checkpoint (quant.load), or serve it (vLLM)"
            )
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        keys = self.attended(name, Keys(key, value, attention_mask, causal), sliding_window)
        if position_bias is not None:
            keys = keys.biased(position_bias.to(query.dtype))
        sinks = options.get("s_aux")
        keys = keys._replace(sinks=None if sinks is None else sinks.to(query.dtype))
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
        return self.computed(module, name, query, keys, scale), None

    def computed(self, module: nn.Module, name: str, query: Tensor, keys: Keys, scale: float) -> Tensor:
        """Returns the attention of one module, `[batch, queries, heads, dim]`; `scale` multiplies q·k."""
        scales = self.scales.get(name, ())
        keys = keys if keys.sinks is None else keys.sunk(query, keys.sinks)
        if scales:
            check_attention(name, self.kind, query, keys.key, keys.mask)
        out: Tensor = attend(query, *keys[:3], scale, keys.causal, list(scales), self.kind)
        return out.transpose(1, 2).contiguous()

    def attended(self, name: str, keys: Keys, window: int | None) -> Keys:
        """Returns the keys that queries attend to, from the keys of this pass."""
        if window is not None and (self.window is None or self.window > window):
            raise ValueError(
                f"{name}: its window slides over {window} tokens, which fused attention cannot; limit the "
                f"sequence to the window with {option('shapes', f'sequence=1:{window}:{window}')}"
            )
        # A mask includes causality, and fused kernels take only one of the two.
        return keys._replace(causal=keys.causal and keys.mask is None)


class Keys(NamedTuple):
    """The keys that queries attend to."""

    key: Tensor  # `[batch, kv_heads, tokens, dim]`
    value: Tensor  # likewise
    # bool `[batch, 1, queries, tokens]`, true where a query sees a key; or numbers `[batch, heads, queries, tokens]`,
    # which are added to the scores; None for no mask
    mask: Tensor | None
    causal: bool  # whether a query sees no later token; False where the mask says so
    window: int | None = None  # tokens that a query sees, its own too, where the op has them without a mask
    sinks: Tensor | None = None  # `[heads]`: a score of each head that takes part in the softmax, and has no value

    def biased(self, bias: Tensor) -> Keys:
        """Returns the keys with a mask of numbers, from a bias of the scores `[1 or batch, heads, queries, tokens]`."""
        if self.causal:
            queries, tokens = (torch.arange(size, device=bias.device) for size in bias.shape[2:])
            bias = bias.masked_fill(tokens > queries[:, None], -math.inf)
        mask = bias if self.mask is None else bias.masked_fill(~self.mask, -math.inf)
        return self._replace(mask=mask, causal=False)

    def sunk(self, query: Tensor, sinks: Tensor) -> Keys:
        """Returns keys and values behind one of zeros, of which a mask of numbers makes the sinks' score."""
        key, value = (nn.functional.pad(x, (0, 0, 1, 0)) for x in (self.key, self.value))
        mask: Any = self.biased(query.new_zeros(1, *query.shape[1:3], self.key.shape[2])).mask
        return Keys(key, value, torch.cat([sinks[:, None, None].expand(*mask.shape[:3], 1), mask], -1), False)


@contextmanager
def attending(model: nn.Module, attention: Attention, *, masked: bool) -> Iterator[None]:
    """Replaces every attention of a transformers `model` by `attention` while open, and keeps no cache."""
    masks = {_NAME: _key_mask} if masked else {}
    with (
        without_cache(model_configs(model)),
        implementations_kept(model) as configs,
        names_registered({_NAME: attention}, masks),
    ):
        # Encoder and decoder of one model may have configs of their own.
        for config, _ in configs:
            config._attn_implementation_internal = _NAME
        yield


@contextmanager
def learned_biases(model: nn.Module) -> Iterator[None]:
    """Computes attention over learned position biases (T5) by plain products: torch.onnx fails on its fused one."""
    with implementations_kept(model) as configs:
        for config, _ in configs:
            if hasattr(config, "relative_attention_num_buckets"):
                config._attn_implementation_internal = "eager"
        yield


def _key_mask(
    q_length: int, kv_length: int, mask_function: Callable[..., Tensor], attention_mask: Tensor | None = None, **_: Any
) -> Tensor | None:
    """Returns a mask that is true for the keys that a query sees and that are not padding, `[batch, 1, queries, keys]`.

    `mask_function` is transformers' rule for the positions of a query and a key: causal, bidirectional, or a window.
    Without padding there is no mask: causality is left to the op.
    """
    from transformers.masking_utils import bidirectional_mask_function

    if attention_mask is None:
        return None
    keys = attention_mask[:, None, None, :].to(torch.bool).expand(-1, 1, q_length, -1)
    if mask_function is bidirectional_mask_function:
        return keys
    rows = torch.arange(attention_mask.shape[0], device=keys.device)[:, None, None, None]
    head, queries = rows.new_zeros(1), torch.arange(q_length, device=keys.device)[:, None]
    return keys & mask_function(rows, head, queries, torch.arange(kv_length, device=keys.device))


class Graph(nn.Module):
    """A transformers model with tensors in and tensors out."""

    model: Any

    def __init__(self, model: nn.Module, attention: Attention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention

    def forward(self, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Returns the model's outputs."""
        options: dict[str, Any] = {"use_cache": False} if self.model.can_generate() else {}
        out = self.model(**inputs, **options)
        tensors = {name: value for name, value in out.items() if isinstance(value, Tensor)}
        self.attention.outputs = next(
            (present for names in _OUTPUTS if (present := [name for name in names if name in tensors])), list(tensors)
        )
        return tuple(tensors[name] for name in self.attention.outputs)


def is_decoder(model: nn.Module) -> bool:
    """Returns whether `model` is a causal language model of transformers."""
    can_generate: Any = getattr(model, "can_generate", None)
    config: Any = getattr(model, "config", None)
    return callable(can_generate) and can_generate() and not config.is_encoder_decoder


def model_inputs(model: Any) -> dict[str, GraphInput]:
    """Returns the inputs of a transformers model without a KV cache; ValueError if they are not known."""
    longest = getattr(model.config, "max_position_embeddings", None) or _TOKENS
    tokens = torch.zeros(2, min(_TOKENS, longest), dtype=torch.long)
    dims: Dims = ("batch", "sequence")
    parameters = inspect.signature(model.forward).parameters
    # CLIP and SigLIP, and BLIP, which writes texts about images.
    takes_both = {"input_ids", "pixel_values"} <= parameters.keys() and (
        model.main_input_name == "pixel_values" or not model.can_generate()
    )
    if model.main_input_name == "pixel_values" and not takes_both:
        # A convolutional network takes images of any size, and its config names none: 224 is what they are trained on.
        config = getattr(model.config, "vision_config", model.config)  # a classifier over CLIP's encoder of images
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        example = torch.zeros(2, channels, height, width, dtype=model.dtype)
        return {"pixel_values": GraphInput(example, ("batch", channels, height, width))}
    if model.main_input_name != "input_ids" or takes_both:
        raise ValueError(
            f"{type(model).__name__} takes {'input_ids and pixel_values' if takes_both else model.main_input_name}: "
            f"name each of its inputs, as in {option('input', 'input_ids:int64:batch,sequence')}"
        )
    if is_decoder(model):
        return {"input_ids": GraphInput(tokens, dims)}
    inputs = {"input_ids": GraphInput(tokens, dims), "attention_mask": GraphInput(torch.ones_like(tokens), dims)}
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = GraphInput(torch.zeros(2, _TOKENS // 2, dtype=torch.long), ("batch", "target"))
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = GraphInput(torch.zeros_like(tokens), dims)
    return inputs


def operand_scales(scales: Mapping[str, AttentionScales]) -> dict[str, tuple[float, float, float, float]]:
    """Returns FP8 scales of q, k, v and p by attention module, from the result of `collect_attention_scales`."""
    by_module = {}
    for name, module in scales.items():
        q, k, v, p = (float(scale) for scale in (module.q, module.k, module.v, module.p) if scale is not None)
        by_module[name] = (q, k, v, p)
    return by_module
