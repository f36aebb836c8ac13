"""A transformers model attends with FP8 operands, over a quantized KV cache, or both.

    with quantized_attention(model, attention="fp8", kv_cache="nvfp4"):
        evaluate(model, rows)

    register(); AutoModelForCausalLM.from_pretrained(…, attn_implementation="quant_fp8")

transformers 5 looks the attention function up by name in `AttentionInterface` and calls it with q, k and v after RoPE.
Two names are ours:

    quant_fp8     q, k, v and the probabilities in E4M3
    quant_16bit   attention in 16 bit, over a quantized cache

Keys and values are first rounded to the format of the KV cache, if there is one: by the `QuantizedKVCache` that the
model was called with, or, in a forward pass without a cache, by the config's `quant_kv_cache`. So a forward pass over
a whole text sees the same keys and values as decoding token by token. The function depends on the call:

    a sequence from its start     `quant.kernels.attention.forward`: FP8 or 16 bit, causal, windows, soft cap
    new tokens over a cache       `quant.kernels.attention.paged_attention` on the pages, with queries in 16 bit
    padding, another mask, sinks  plain PyTorch on the rounded operands

Queries and keys are first multiplied by a pair of inverse matrices (`quant.generate.key_rotation`), which keeps their
scores and cuts the KL of rounding them to E4M3 by two thirds. Scales are one a KV head. The scale of the values comes
from the model's `v_scale`, which `quantize --kv-cache fp8` calibrates and a checkpoint keeps; scales of turned keys,
and of values without calibration, come from the first tokens. Where attention itself stays in 16 bit, a checkpoint
with calibrated FP8 scales is not turned and `k_scale` is used as well, as other runtimes will read it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from quant.base.errors import UserError, known_names, option, require
from quant.calibration.attention_names import implementations_kept, names_registered, text_config
from quant.calibration.attention_scales import check_attention, is_latent, latents_changed, rotary_key, with_rotary_key
from quant.formats.format import E4M3, Format, is_16bit
from quant.formats.rounding import encode
from quant.formats.scaling import scale_of
from quant.generate.key_rotation import turning
from quant.kernels.attention.attention_operands import DIMS, SCALE_BLOCK, quantize_blocks
from quant.kernels.attention.forward import attention, quantize_attention
from quant.kernels.attention.kv_pages import HEADROOM, first_scale, kv_format, kv_formats, round_kv
from quant.kernels.attention.reference import reference

FP8, SIXTEEN_BIT = "quant_fp8", "quant_16bit"
IMPLEMENTATIONS = (FP8, SIXTEEN_BIT)
"""Names under which transformers finds our attention."""
ATTENTIONS = ("fp8", "16bit")
"""Values of --attention."""

KVScales = tuple[Tensor, Tensor]


class AttentionCall(NamedTuple):
    """The keyword arguments with which transformers calls an attention function, None where it gave none."""

    is_causal: bool  # whether queries see only earlier keys; from the call, or else from the module
    scaling: float | None  # factor of the scores; None is 1/√dim
    sliding_window: int | None  # keys that a query sees, itself included
    softcap: float | None  # bound of the scores, by tanh
    s_aux: Tensor | None  # attention sinks, a score of each head `[heads]`

    @classmethod
    def of(cls, module: nn.Module, keywords: Mapping[str, Any]) -> Self:
        """Returns the options among all keywords of a call, which differ from model to model."""
        # The fields bear transformers' keywords as names. Models pass more keywords, such as `position_ids`, that
        # change no result here.
        options = [keywords.get(name) for name in cls._fields[1:]]
        is_causal = keywords.get("is_causal")
        return cls(bool(getattr(module, "is_causal", True) if is_causal is None else is_causal), *options)


def register() -> None:
    """Makes `attn_implementation="quant_fp8"` and `"quant_16bit"` known to transformers."""
    for interface, functions in _interfaces():
        for name, function in functions.items():
            interface.register(name, function)


def _interfaces() -> list[tuple[Any, dict[str, Callable[..., Any]]]]:
    """Returns registries of transformers, each with our functions by name."""
    modeling = require("transformers.modeling_utils", "hf")
    masking = require("transformers.masking_utils", "hf")
    attends: dict[str, Callable[..., Any]] = {FP8: partial(_attend, fp8=True), SIXTEEN_BIT: partial(_attend, fp8=False)}
    return [
        (modeling.AttentionInterface, attends),
        (masking.AttentionMaskInterface, dict.fromkeys(attends, mask_unless_causal)),
    ]


@contextmanager
def quantized_attention(
    model: nn.Module, *, attention: str | None = None, kv_cache: str | None = None
) -> Iterator[None]:
    """Makes `model` attend in FP8, or over keys and values rounded to a cache format, or both, while open.

    Args:
        model: a model of transformers.
        attention: one of `ATTENTIONS`; None is "16bit".
        kv_cache: "fp8", "nvfp4" or "16bit", or one for each layer with commas between them; None is "16bit".

    Raises:
        UserError: an unknown name, or a model whose attention cannot be replaced.
    """
    attention = "16bit" if is_16bit(attention) else str(attention)
    config = text_config(getattr(model, "config", None))
    if attention not in ATTENTIONS:
        raise UserError(f"{option('attention', attention)}: unknown; {known_names(attention, ATTENTIONS)}")
    formats = kv_formats(kv_cache, getattr(config, "num_hidden_layers", 1))
    if attention == "16bit" and not any(formats):
        yield
        return
    if len(set(formats)) > 1 and attention == "fp8":
        raise UserError(f"{option('kv_cache', kv_cache)}: formats by layer are for attention in 16 bit")
    check_attention(model, kv_cache=any(formats), attention=attention == "fp8")
    functions, masks = (own for _, own in _interfaces())
    name = FP8 if attention == "fp8" else SIXTEEN_BIT
    # Our names are registered only while the context is open: a model saved later does not refer to them.
    with implementations_kept(model), names_registered(functions, masks), _latents_rounded(model, any(formats)):
        try:
            model.set_attn_implementation(name)  # type: ignore[operator]
            if config._attn_implementation != name:
                kept = [option(*each) for each in (("attention", "16bit"), ("kv_cache", "16bit"))]
                raise UserError(
                    f"{type(model).__name__}: its attention is its own and cannot be replaced; take "
                    f"{' and '.join(kept[attention != 'fp8' : 1 + any(formats)])}"
                )
            # Read by `_rounded` in a forward pass without a cache; one with a cache carries its own format.
            config.quant_kv_cache = kv_cache if any(formats) else None
            yield
        finally:
            vars(config).pop("quant_kv_cache", None)


def turns(module: nn.Module, format: Format | None, fp8: bool) -> bool:
    """Returns whether queries and keys are turned before a cache in `format`; `fp8`: attention is in FP8."""
    return fp8 or (format is not None and not _is_calibrated(module, format))


def scales_of(module: nn.Module, format: Format, kv_heads: int, turned: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns the calibrated scales of K and V for a cache in `format`, float32 `[kv_heads]`; None without any.

    K was calibrated without turning, so its scale serves only unturned keys. Where keys are turned, values get the
    headroom of a measured scale: saturating values that calibration did not meet costs SmolLM2 0.2% of perplexity,
    and a power of two changes no code.
    """
    if not _is_calibrated(module, format):
        return None, None
    scales = []
    for name in ("k_scale", "v_scale"):
        scale = getattr(module, name)
        if scale.numel() not in (1, kv_heads):
            raise UserError(f"{name} {list(scale.shape)} of an attention with {kv_heads} KV heads: one, or one a head")
        scales.append(scale.float().flatten().expand(kv_heads))
    return (None, scales[1] * HEADROOM) if turned else (scales[0], scales[1])


def _is_calibrated(module: nn.Module, format: Format) -> bool:
    """Returns whether a module has scales for a cache in `format`; checkpoints keep scales only for FP8."""
    return format.is_fp8 and format.per_tensor and isinstance(getattr(module, "k_scale", None), Tensor)


def mask_unless_causal(
    *, kv_length: int, kv_offset: int = 0, mask_function: Any = None, attention_mask: Tensor | None = None,
    local_size: int | None = None, **arguments: Any,
) -> Tensor | None:  # fmt: skip
    """Returns None for a causal mask, which our functions apply (with a window, too); else bool, True where seen."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # A tensor of a mask costs batch · queries · keys; none is made where a kernel masks by position itself.
    plain = mask_function is None or mask_function is causal_mask_function
    # A graph can depend on no value: compiled models compute the mask of a window, and of given masks.
    if not torch.compiler.is_compiling():
        plain = plain or _is_window(mask_function, local_size)
        if attention_mask is not None and bool(attention_mask[:, :kv_length].all()):
            attention_mask = None
    if plain and kv_offset == 0 and attention_mask is None:
        return None
    arguments |= {"mask_function": mask_function or causal_mask_function, "allow_is_causal_skip": False}
    arguments |= {"kv_length": kv_length, "kv_offset": kv_offset, "attention_mask": attention_mask}
    return sdpa_mask(**arguments, local_size=local_size)


def _is_window(mask_function: Any, size: int | None) -> bool:
    """Returns whether this is the causal window of `size` keys, judged by the keys at both ends for two queries."""
    if size is None:
        return False
    # Two queries, because one could not distinguish a sliding window from a fixed block of keys.
    seen = [
        bool(mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), torch.tensor(key)))
        for query in (2 * size, 2 * size + 1)
        for key in (query - size, query - size + 1, query, query + 1)
    ]
    return seen == [False, True, True, False] * 2


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, fp8: bool, **keywords: Any
) -> tuple[Tensor, None]:
    """Attends, as the function that transformers calls with q `[batch, heads, new, dim]`.

    A k with `quant_layer` holds only new keys: its layer of a `QuantizedKVCache` has the others.
    """
    call = AttentionCall.of(module, keywords)
    options = {"softmax_scale": call.scaling, "softcap": call.softcap}
    layer = getattr(k, "quant_layer", None)
    if layer is not None:
        q = layer.write(q, k, v, **options)
        if layer.length > k.shape[2] and mask is None and call.s_aux is None:
            return layer.attend(q, window=call.sliding_window, **options).transpose(1, 2).contiguous(), None
        (k, v), scales = layer.read_turned(k.dtype), layer.scales
    else:
        q, k, v, scales = _rounded(module, q, k, v, fp8, **options)
    if call.s_aux is not None and mask is None:
        # Kernels have no sinks; `_masked` does.
        mask = mask_of(call, q.shape[2], k.shape[2], q.device)
    if mask is not None:
        out = _masked(q, k, v, mask[..., : k.shape[2]], fp8, sinks=call.s_aux, **options)
    else:
        # A window belongs to a causal mask; attention without one sees everything.
        window = call.sliding_window if call.is_causal else None
        out = _dense(q, k, v, scales if fp8 else None, fp8, causal=call.is_causal, window=window, **options)
    return out.transpose(1, 2).contiguous(), None


def mask_of(call: AttentionCall, queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns which keys each query sees, bool `[1, 1, queries, keys]`; the queries are the last tokens."""
    if not call.is_causal:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device)
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    seen = distance >= 0
    if call.sliding_window is not None:
        seen &= distance < call.sliding_window
    return seen[None, None]


def _rounded(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, fp8: bool, **options: float | None
) -> tuple[Tensor, Tensor, Tensor, KVScales | None]:
    """Returns q, k and v as a cache in the config's format would return them, and the scales of K and V in FP8."""
    format = _format_of(module)
    if format is not None and is_latent(module):
        # The cache holds no expanded keys: `_latents_rounded` has rounded the vector that they come from.
        k = with_rotary_key(module, k, _through_latent_cache(module, rotary_key(module, k), format))
        format = None
    turned = turns(module, format, fp8)
    if turned:
        turn = turning(q, k, **options)
        q, k = turn.q(q), turn.k(k)
    if format is None:
        return q, k, v, None
    if format.global_scale and k.shape[-1] % 16:
        raise UserError(f"heads of {k.shape[-1]} values: not in NVFP4; take {option('kv_cache', 'fp8')} or 16bit")
    # A scale that was not calibrated comes from these tokens, as it would from the first tokens of a cache.
    k_scale, v_scale = scales_of(module, format, k.shape[1], turned)
    k_scale = first_scale(k, format) if k_scale is None else k_scale
    v_scale = first_scale(v, format) if v_scale is None else v_scale
    k, v = round_kv(k, format, k_scale), round_kv(v, format, v_scale)
    if not format.per_tensor or k_scale is None or v_scale is None:
        return q, k, v, None
    return q, k, v, (k_scale, v_scale)


def _format_of(module: nn.Module) -> Format | None:
    """Returns the format of the KV cache of an attention module, from the config, which may have one a layer."""
    name = getattr(getattr(module, "config", None), "quant_kv_cache", None)
    return kv_format(name.split(",")[module.layer_idx] if name and "," in name else name)


def _latents_rounded(model: nn.Module, is_rounded: bool) -> AbstractContextManager[None]:
    """Makes latent attention expand keys and values from a vector as its cache returns it, while open."""
    if not is_rounded:
        return nullcontext()

    def change(module: nn.Module, x: Tensor) -> Tensor:
        format = _format_of(module)
        return x if format is None else _through_latent_cache(module, x[:, None], format)[:, 0]

    return latents_changed(model, change)


def _through_latent_cache(module: nn.Module, x: Tensor, format: Format) -> Tensor:
    """Returns a part of the cached vector, `[batch, 1, tokens, dim]`, as a cache in `format` returns it."""
    k_scale, _ = scales_of(module, format, 1, turned=False)
    return round_kv(x, format, first_scale(x, format) if k_scale is None else k_scale)


def _dense(q: Tensor, k: Tensor, v: Tensor, scales: KVScales | None, fp8: bool, **options: Any) -> Tensor:
    """Returns attention by our kernels, or by their oracle on a CPU and for FP32 without FP8.

    `scales` belong to k and v that are values of E4M3 already: the same codes come out, so nothing is rounded twice.
    A GPU's quantizer takes 16 bit, so the operands of a float32 model are rounded as on a CPU.
    """
    dtype, value_dim = q.dtype, v.shape[3]
    # 1/√dim of the head itself: the padded operands below have a larger dimension.
    if options["softmax_scale"] is None:
        options["softmax_scale"] = q.shape[3] ** -0.5
    dim = max(q.shape[3], value_dim)  # keys of latent attention are wider than its values
    room = next((size for size in DIMS if size >= dim), None)
    if room is None:
        raise UserError(
            f"it has heads of {dim}, and quantized attention and KV caches take at most {DIMS[-1]}; take "
            f"{option('attention', '16bit')} and {option('kv_cache', '16bit')}"
        )
    on_gpu = q.is_cuda and (fp8 or dtype is not torch.float32)
    # Zeros in added channels change no score, and their outputs are cut off.
    width = room if on_gpu else dim
    q, k, v = (x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in (q, k, v))
    out: Tensor
    if on_gpu and fp8 and dtype is not torch.float32:
        qkv_scales = None if scales is None else _scales_of_heads(q, *scales)
        return quantize_attention(q, k, v, scales=qkv_scales).attend(**options, dtype=dtype)[..., :value_dim]
    if fp8 and scales is not None:
        qkv_scales = _scales_of_heads(q, *scales)
        q, k, v = (encode(x.float() / s[..., None, None], E4M3) for x, s in zip((q, k, v), qkv_scales, strict=True))
        options |= zip(("q_scale", "k_scale", "v_scale"), qkv_scales, strict=True)
    elif fp8:
        (q, options["q_scale"]), (k, options["k_scale"]), (v, options["v_scale"]) = map(quantize_blocks, (q, k, v))
    if on_gpu:
        return attention(q, k, v, **options, dtype=dtype)[..., :value_dim]
    out, _ = reference(q, k, v, **options, dtype=dtype, round_p=fp8)
    return out[..., :value_dim]


def _scales_of_heads(q: Tensor, k_scale: Tensor, v_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the scales `[batch, heads]`: of q measured, of k and v as given."""
    q_scale = scale_of(q.abs().amax((2, 3)), E4M3.max)
    return q_scale, k_scale.expand(len(q), -1).contiguous(), v_scale.expand(len(q), -1).contiguous()


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, fp8: bool, *, softmax_scale: float | None, softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Returns attention under any mask, in PyTorch: operands rounded to FP8 where asked, probabilities unrounded.

    Sinks `[heads]` are the score of a key for each head that has no value, as in GPT-OSS.
    """
    dtype = q.dtype
    if fp8:
        # A scale for each block of 128 tokens, repeated for its tokens.
        q, k, v = (
            codes.float() * scale.repeat_interleave(SCALE_BLOCK, 2)[:, :, : codes.shape[2], None]
            for codes, scale in map(quantize_blocks, (q, k, v))
        )
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    # Query heads of a KV head are one group: [batch, kv_heads, group, queries, keys].
    scores = grouped @ k.float()[:, :, None].mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.bool()[:, :, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float().unflatten(0, (k.shape[1], -1))[None, :, :, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
    probabilities = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    out: Tensor = probabilities @ v.float()[:, :, None]
    return out.flatten(1, 2).to(dtype)
