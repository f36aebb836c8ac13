"""Latent attention (MLA) caches one vector a token for all heads, instead of keys and values.

    hidden ── kv_a_proj_with_mqa ─┬─ latent [kv_lora_rank] ─ kv_a_layernorm ──┬─▶ cache   expanded to keys and values
                                  └─ rotary key [qk_rope_head_dim] ─ RoPE ────┘           when they are read

A server scales the whole row by one `k_scale` before it rounds it to FP8 (vLLM's `concat_and_cache_mla`). So the scale
that a checkpoint needs is that of the normed latent vector and of the rotary key, and no scale of expanded keys: for
random weights of DeepSeek-V3 these are ten times smaller, and two thirds of the latent values would saturate.

Every latent attention of transformers names its norm `kv_a_layernorm` and puts the rotary key at the end of each
head's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from quant.calibration.blocks import removing

_EXPANDED = ("minicpm3",)  # vLLM caches their expanded keys and values


def is_latent(module: nn.Module) -> bool:
    """Whether an attention module caches a latent vector."""
    config: Any = getattr(module, "config", None)
    names = ("kv_a_layernorm", "qk_nope_head_dim", "qk_rope_head_dim")
    return all(hasattr(module, name) for name in names) and getattr(config, "model_type", None) not in _EXPANDED


def latent_norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms whose outputs are cached, by the name of their attention module."""
    return {name: module.kv_a_layernorm for name, module in model.named_modules() if is_latent(module)}


def rotary_key(module: nn.Module, key: torch.Tensor) -> torch.Tensor:
    """The part of expanded keys `[batch, heads, tokens, dim]` that all heads share: `[batch, 1, tokens, rope]`."""
    return key[:, :1, :, module.qk_nope_head_dim :]


@contextmanager
def latents_changed(model: nn.Module, change: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """While open, latent attentions expand their keys and values from `change(attention, latent)`.

    Args:
        model: with latent attentions, or without any.
        change: takes an attention module and a latent vector `[batch, tokens, rank]`.
    """

    def hook(attention: nn.Module, norm: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return change(attention, output)

    norms = latent_norms(model)
    with removing(norm.register_forward_hook(partial(hook, model.get_submodule(name))) for name, norm in norms.items()):
        yield


def with_rotary_key(module: nn.Module, key: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Expanded keys with another rotary part, `[batch, 1, tokens, rope]`."""
    nope = key[..., : module.qk_nope_head_dim]
    return torch.cat([nope, rotary.expand(-1, key.shape[1], -1, -1)], dim=-1)
