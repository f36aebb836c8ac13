"""A model's attention over a group of processes, each of which has its share of the tokens.

transformers calls `attend_in_ring` with q, k and v of this process. Keys and values go around the ring of
`quant.kernels.attention.ring`; options that it does not compute are refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from quant.base.errors import UserError
from quant.formats.format import FORMATS, Format
from quant.kernels.attention.ring import ring_attention
from quant.runtime.attention_call import AttentionCall


def ring_format(attention: str, format: Format | None) -> Format | None:
    """Returns the format in which keys and values go around a ring."""
    kv_cache = "16bit" if format is None else format.name
    # FP8 attention multiplies codes, so they travel as codes. Attention in 16 bit dequantizes NVFP4 where it arrives,
    # which is under a third of the bytes.
    if attention == "fp8" and kv_cache in ("16bit", "fp8"):
        return FORMATS["fp8"]
    if attention == "16bit" and kv_cache in ("16bit", "nvfp4"):
        return format
    raise UserError(
        f"attention in {attention} over a group takes no KV cache in {kv_cache}: FP8 attention passes FP8 on, "
        "attention in 16 bit passes NVFP4 or 16 bit on"
    )


def refuse_padding(*, attention_mask: torch.Tensor | None = None, **_: Any) -> None:
    """Raises an error for a mask: a ring's attention is causal by the positions of the shares.

    Raises:
        UserError: some of the tokens are padding.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError("attention over a group takes no padding; give it texts of one length")


def attend_in_ring(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    format: Format | None,
    group: dist.ProcessGroup,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Attends where each process of a group has a share of the tokens; transformers calls this function.

    Args:
        module: the attention module.
        q, k, v: queries, keys and values of this process, `[batch, heads, tokens, dim]`.
        mask: None; a ring is causal.
        format: the format in which keys and values go around.
        group: the group of processes.
        keywords: see `AttentionCall`.

    Raises:
        UserError: an option that a ring does not compute.
    """
    call = AttentionCall.of(module, keywords)
    # A window as long as the whole sequence hides no key.
    has_window = call.sliding_window is not None and call.sliding_window < q.shape[2] * group.size()
    unsupported = {
        "a sliding window": has_window,
        "a soft cap": call.softcap is not None,
        "attention sinks": call.s_aux is not None,
        "a mask": mask is not None,
        "no causal mask": not call.is_causal,
    }
    if any(unsupported.values()):
        named = ", ".join(option for option, is_set in unsupported.items() if is_set)
        raise UserError(f"{type(module).__name__} has {named}, which attention over a group does not take")
    # The ranks compare shapes once a forward pass, in the first layer; the others have the same ones.
    is_first = getattr(module, "layer_idx", 0) == 0
    out = ring_attention(q, k, v, format=format, softmax_scale=call.scaling, group=group, check=is_first)
    # transformers expects `[batch, tokens, heads, dim]`, and None in the place of attention weights, which a ring never
    # has as a whole.
    return out.transpose(1, 2).contiguous(), None
