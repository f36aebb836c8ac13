"""A transformers model in training attends in FP8: `to_low_precision_training(model, recipe, attention="fp8")`.

transformers looks the attention function up by the name in the model's config, and this file registers one,
`quant_fp8_training`. A module in training mode computes

    a causal mask, a window, none    Q, K, V and P in E4M3 by the kernel, gradients in 16 bit (`fp8_attention.py`)
    padding, packed rows             the same rounding of Q, K and V, products in 16 bit by SDPA

A module in eval mode attends in 16 bit by SDPA, as the packed model does by default. Layers, parameters and state-dict
keys stay as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, known_names, require
from quant.calibration.attention_names import configs_of, implementations_kept, text_config
from quant.generate.quantized_attention import AttentionCall, mask_of, mask_unless_causal
from quant.kernels.attention.attention_operands import DIMS, quantize_blocks, scale_of_rows
from quant.kernels.attention.forward import has_attention_kernel
from quant.kernels.training.fp8_attention import fp8_training_attention
from quant.training.low_precision.low_precision_linear import ValueOf

IMPLEMENTATION = "quant_fp8_training"
ATTENTIONS = ("16bit", "fp8")
"""Values of `attention`."""
_REGISTRATION = "_fp8_attention_in_training"  # attribute of a model


class _Registration:
    """Makes our attention known to transformers; in a pickled model, also in the process that reads it."""

    def __init__(self, before: Sequence[tuple[Any, str]]) -> None:
        self.before = before  # configs that name our attention, and the names that they had; a config would save them
        modeling = require("transformers.modeling_utils", "hf")
        masking = require("transformers.masking_utils", "hf")
        modeling.AttentionInterface.register(IMPLEMENTATION, _attend)
        masking.AttentionMaskInterface.register(IMPLEMENTATION, mask_unless_causal)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Registration, (self.before,)


def check_attention(model: nn.Module, attention: str) -> None:
    """Raises UserError for an unknown name, or a model whose attention cannot train in FP8; it names the cause."""
    if attention not in ATTENTIONS:
        raise UserError(f"unknown attention {attention!r} in training; {known_names(attention, ATTENTIONS)}")
    if attention == "16bit":
        return
    if getattr(model, "config", None) is None or not hasattr(model, "set_attn_implementation"):
        raise UserError(
            f'{type(model).__name__} is not a transformers model, and attention="fp8" acts on transformers\' attention '
            "interface; leave it out, and attention trains in 16 bit"
        )
    way_out = 'leave out attention="fp8", and attention trains in 16 bit'
    for config in configs_of(model.config):
        for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
            if dropout := getattr(config, name, 0.0):
                raise UserError(
                    f"{name} {dropout} in the config: FP8 attention has no dropout; load the model with {name}=0, "
                    f"which its modules read, or {way_out}"
                )
        if cap := getattr(config, "attn_logit_softcapping", None):
            raise UserError(f"attn_logit_softcapping {cap} in the config: FP8 attention trains no soft cap; {way_out}")
    for name, module in model.named_modules():
        if getattr(module, "sinks", None) is not None:
            raise UserError(f"{name}: it has attention sinks, which FP8 attention does not take; {way_out}")
        dim = getattr(module, "head_dim", 0)
        if isinstance(dim, int) and dim > DIMS[-1]:
            raise UserError(f"{name}: head dimension {dim}, and FP8 attention takes at most {DIMS[-1]}; {way_out}")


def attend_in_fp8(model: Any) -> str:
    """Has a model attend in FP8 in training; returns how this machine computes it, for the log."""
    _Registration([])
    with implementations_kept(model) as before:
        model.set_attn_implementation(IMPLEMENTATION)
        changed = [(config, name) for config, name in before if config._attn_implementation == IMPLEMENTATION]
        if text_config(model.config)._attn_implementation != IMPLEMENTATION:
            raise UserError(
                f"{type(model).__name__}: its attention is its own and cannot be replaced; leave out "
                'attention="fp8", and attention trains in 16 bit'
            )
    for config, _ in changed:
        config._attn_implementation_internal = IMPLEMENTATION
    vars(model)[_REGISTRATION] = _Registration(changed)
    has_kernel = has_attention_kernel(next(model.parameters()), torch.float8_e4m3fn)
    by = "by the kernel of this GPU" if has_kernel else "with products in FP32"
    return f"forward in FP8 {by}, backward in 16 bit; in eval mode 16 bit"


def attend_in_16bit(model: nn.Module) -> None:
    """Undoes `attend_in_fp8`."""
    # A wrapper, such as PEFT's, has the model among its modules.
    for module in model.modules():
        registration = vars(module).pop(_REGISTRATION, None)
        for config, name in () if registration is None else registration.before:
            config._attn_implementation_internal = name


def _attend(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **keywords: Any
) -> tuple[Tensor, None]:
    """Attends, as the function that transformers calls with q `[batch, heads, new, dim]`."""
    call = AttentionCall.of(module, keywords)
    dropout = (keywords.get("dropout") or None) if module.training else None
    for name, option in (("sinks", call.s_aux), ("a soft cap", call.softcap), ("dropout", dropout)):
        if option is not None:
            raise UserError(f'{type(module).__name__}: its attention has {name}; leave out attention="fp8"')
    if mask is None and module.training:
        scale = q.shape[3] ** -0.5 if call.scaling is None else call.scaling
        window = call.sliding_window if call.is_causal else None
        out = fp8_training_attention(q, k, v, causal=call.is_causal, window=window, softmax_scale=scale)
        return out.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if module.training:
        # To E4M3 and back, a scale for 128 tokens; gradients pass through.
        q, k, v = (
            ValueOf.apply(x, (codes.float() * scale_of_rows(scale, x.shape, None)).to(x.dtype))  # type: ignore[no-untyped-call]
            for x, (codes, scale) in ((x, quantize_blocks(x.detach())) for x in (q, k, v))
        )
    # SDPA applies a causal mask without a window by itself, where queries are all tokens or the last one.
    has_window = call.sliding_window is not None and call.sliding_window < k.shape[2]
    if mask is None and call.is_causal and (has_window or q.shape[2] not in (1, k.shape[2])):
        mask = mask_of(call, q.shape[2], k.shape[2], q.device)
    out, _ = sdpa_attention_forward(module, q, k, v, mask, scaling=call.scaling, is_causal=call.is_causal)
    return out, None
