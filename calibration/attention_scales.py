"""`collect_attention_scales` finds the scales of the KV cache and of attention's operands by watching a model attend.

Attention modules are found by their calls. In transformers 5 every model asks `AttentionInterface` for the function
that attends and hands it q, k and v as they are used: normalised, rotated by position (RoPE), k and v as they enter the
cache. While the scales are collected, the function that the model gets records them first and then calls the requested
one with the same arguments: the model's own masks, soft caps and sinks stay in force, and no list of model names is
needed.

    operand   watched                    scale of FP8     scale of NVFP4
    q, k, v   the largest magnitude      amax / 448       amax / 2688, under block scales found at run time
    p         nothing, it is in [0, 1]   1 / 448          1 / 2688

p, the softmax probabilities, needs no data. A probability is at most 1, and so is the exp(s - max) that
flash-attention kernels hold instead before they normalise; some row nearly reaches it (the first token sees only
itself), so a smaller scale would saturate and a larger one would waste codes.

Scales are one a tensor, or one a KV head. A per-head scale of q is shared by the query heads of a KV head, because
decode kernels stack these as the rows of one tile.

Latent attention (MLA) caches one vector a token for all heads, instead of keys and values.

    hidden ── kv_a_proj_with_mqa ─┬─ latent [kv_lora_rank] ─ kv_a_layernorm ──┬─▶ cache   expanded to keys and values
                                  └─ rotary key [qk_rope_head_dim] ─ RoPE ────┘           when they are read

A server scales the whole row by one `k_scale` before it rounds it to FP8 (vLLM's `concat_and_cache_mla`). So a
checkpoint needs the scale of the normed latent vector and of the rotary key, and no scale of expanded keys: for
random weights of DeepSeek-V3 these are ten times smaller, and two thirds of the latent values would saturate.

Every latent attention of transformers names its norm `kv_a_layernorm` and puts the rotary key at the end of each
head's key.

Of a cache alone, k and v both have the scale of that row; where attention is quantized too, its operands are the
expanded q, k and v.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, known_names, option, quoted
from quant.calibration.attention_names import watching_attention
from quant.calibration.observers import AbsMax
from quant.calibration.ranks import gathered, own_batches
from quant.calibration.session import Session, device_of, placed
from quant.formats.format import FORMATS, Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.recipes.blocks import removing

CACHE_GRANULARITIES = ("tensor", "head")
_EXPANDED = ("minicpm3",)  # vLLM caches their expanded keys and values


@dataclass(frozen=True, eq=False)
class AttentionScales:
    """Scales of one attention module: float32, [] per tensor or [kv_heads] per head."""

    # scale of the cached keys in `kv_format`, or of a latent vector; None where the cache keeps 16 bit
    k: Tensor | None
    v: Tensor | None
    q: Tensor | None  # scale of the queries in `attention_format`; None where attention keeps 16 bit
    p: Tensor | None
    amax: Mapping[str, Tensor]
    kv_format: Format | None  # the format of the cache, or None
    attention_format: Format | None  # the format of attention's operands, or None


def attention_scale(amax: Tensor, format: Format) -> Tensor:
    """Returns the static scale that maps `amax` to the largest value of `format`, float32; 1 where `amax` is 0."""
    return global_scale_of(amax, format) if format.global_scale else scale_of(amax, format.element.max)


def collect_attention_scales(
    model: nn.Module,
    rows: Tensor,
    *,
    kv_format: Format | None,
    attention_format: Format | None,
    granularity: str = "tensor",
    session: Session | None = None,
) -> dict[str, AttentionScales]:
    """Returns KV-cache and attention scales of every attention module that `rows` reach, by module name.

    Formats of None keep the cache, or q, k, v and p inside attention, in 16 bit. k and v are observed for `kv_format`
    where both are given.
    """
    session = session or Session()
    # k and v are rounded once, on their way into the cache: its format decides their range.
    operands = {"q": attention_format, "k": kv_format or attention_format, "v": kv_format or attention_format}
    if moving := next((format for format in operands.values() if format is not None and not format.is_static), None):
        raise ValueError(
            f"{moving} finds its scales at run time, so there is none to calibrate for the KV cache or attention; "
            "use fp8"
        )
    if granularity not in CACHE_GRANULARITIES:
        raise ValueError(f"unknown granularity {granularity!r}; {known_names(granularity, CACHE_GRANULARITIES)}")
    # Latent attention caches one vector, which is watched for a cache alone.
    latent = kv_format if attention_format is None else None
    watched = _Watched(model, operands, latent, by_head=granularity == "head")
    home = device_of(model)
    watching = watching_attention(model, watched.operands_of)
    with torch.no_grad(), placed(model, session.device) as device, watched.latents(), watching:
        rows = rows.to(device)
        for index in own_batches(len(rows)):
            model(rows[index : index + 1])
            session.report("calibrate", index + 1, len(rows))
    ranges = {
        name: {operand: torch.stack([each.amax() for each in heads]).cpu() for operand, heads in by_operand.items()}
        for name, by_operand in watched.observers.items()
    }
    if granularity != "head":
        ranges = {name: {operand: amax.squeeze(0) for operand, amax in each.items()} for name, each in ranges.items()}
    everywhere, ranges = gathered(ranges), {}
    for name, by_operand in ((name, each) for of_rank in everywhere for name, each in of_rank.items()):
        module = ranges.setdefault(name, {})
        module |= {o: torch.maximum(module.get(o, amax), amax) for o, amax in by_operand.items()}
    if not ranges:
        raise ValueError(
            f"{type(model).__name__}: no attention was seen on {len(rows)} calibration row(s); KV-cache and attention "
            "scales need a transformers model whose attention goes through its AttentionInterface"
        )
    return {
        name: _scales({operand: amax.to(home) for operand, amax in by_operand.items()}, kv_format, attention_format)
        for name, by_operand in ranges.items()
    }


def check_attention(model: nn.Module, *, kv_cache: bool, attention: bool, plan: Path | None = None) -> None:
    """Raises UserError where a model has no KV cache, or no attention, that a format could round.

    A given plan names the format of the cache in place of an option.
    """
    name = type(model).__name__
    cache = option("kv_cache", "16bit")
    if plan is not None:
        cache = f"`quant plan edit {quoted(plan)} --kv-cache 16bit --out FILE`"
    given = [cache] * kv_cache + [option("attention", "16bit")] * attention
    if given and not (hasattr(model, "config") and hasattr(model, "set_attn_implementation")):
        raise UserError(
            f"{name} is not a transformers model, and only attention that goes through their AttentionInterface can be "
            f"quantized; take {' and '.join(given)}"
        )
    # Encoders attend to all tokens at once. The flag of an attention module is that of a generator's decoder, too.
    causal = [each.is_causal for each in model.modules() if isinstance(getattr(each, "is_causal", None), bool)]
    if kv_cache and causal and not any(causal) and not model.can_generate():  # type: ignore[operator]
        raise UserError(f"{name} is an encoder, which keeps no keys and values from token to token; take {cache}")


class _Watched:
    """Shows the operands of every attention to observers, which it makes as modules come up."""

    def __init__(
        self, model: nn.Module, operands: Mapping[str, Format | None], latent: Format | None, *, by_head: bool
    ) -> None:
        self.operands, self.latent, self.by_head = operands, latent, by_head
        self.observers: dict[str, dict[str, list[AbsMax]]] = {}  # of each KV head, by module and operand
        # Attention functions are handed the module and not its name.
        self.names = {module: name for name, module in model.named_modules()}
        self.norms = latent_norms(model) if latent is not None else {}

    def operands_of(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> None:
        name = self.names[module]
        by_operand = self.observers.setdefault(name, {})
        if "latent" in by_operand:  # its norm has run before
            by_operand["latent"][0].update(rotary_key(module, k))
            return
        heads = k.shape[1] if self.by_head else 1
        for operand, x in (("q", q), ("k", k), ("v", v)):
            if (format := self.operands[operand]) is None:
                continue
            if operand not in by_operand:
                labels = [f"{name} {operand}" + (f" head {head}" if heads > 1 else "") for head in range(heads)]
                by_operand[operand] = [AbsMax(format, name=label) for label in labels]
            # [batch, heads, tokens, head_dim]: for q, the query heads of a KV head lie side by side.
            for observer, part in zip(by_operand[operand], x.tensor_split(heads, dim=1), strict=True):
                observer.update(part)

    @contextmanager
    def latents(self) -> Iterator[None]:
        """Shows the vectors that latent attention caches while open."""

        def hook(name: str, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            by_operand = self.observers.setdefault(name, {})
            if "latent" not in by_operand and self.latent is not None:
                by_operand["latent"] = [AbsMax(self.latent, name=f"{name} latent vector")]
            by_operand["latent"][0].update(output)

        with removing(norm.register_forward_hook(partial(hook, name)) for name, norm in self.norms.items()):
            yield


def _scales(amax: dict[str, Tensor], kv_format: Format | None, attention_format: Format | None) -> AttentionScales:
    k = v = q = p = None
    if kv_format is not None:
        k, v = (attention_scale(_cached(amax, operand), kv_format) for operand in ("k", "v"))
    if attention_format is not None:
        q = attention_scale(amax["q"], attention_format)
        # Probabilities are at most 1; see the module docstring.
        p = attention_scale(amax["q"].new_ones(()), attention_format)
    return AttentionScales(k, v, q, p, amax, kv_format, attention_format)


def kv_scale_tensors(scales: Mapping[str, AttentionScales], dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors in which checkpoints keep the scales of the KV cache, by name, in `dtype`, the model's.

    `….self_attn.k_scale` and `….v_scale` are [1], or [kv_heads, 1, 1] (compressed-tensors' strategy "attn_head").
    """
    tensors, info = {}, torch.finfo(dtype)
    for name, module in scales.items():
        if module.kv_format is None or not (module.kv_format.is_fp8 and module.kv_format.per_tensor):
            raise ValueError(
                f"{name}: checkpoints hold scales of a KV cache in fp8, not {module.kv_format or '16 bit'}; use fp8"
            )
        for operand in ("k", "v"):
            scale = attention_scale(_cached(module.amax, operand), FORMATS["fp8"])
            # [1], or [kv_heads, 1, 1], as compressed-tensors registers these parameters.
            scale = scale.view(-1, 1, 1) if scale.dim() else scale.view(1)
            # tiny · eps is the smallest subnormal number of the dtype: FP16 ends at 2^-24, and no scale may be zero.
            tensors[f"{name}.{operand}_scale"] = scale.clamp(min=info.tiny * info.eps).to(dtype)
    return tensors


def _cached(amax: Mapping[str, Tensor], operand: str) -> Tensor:
    """Returns the magnitude of the values that the cache holds for k or v; in latent attention one vector is both."""
    return amax["latent"] if "latent" in amax else amax[operand]


def is_latent(module: nn.Module) -> bool:
    """Returns whether an attention module caches a latent vector."""
    config: Any = getattr(module, "config", None)
    names = ("kv_a_layernorm", "qk_nope_head_dim", "qk_rope_head_dim")
    return all(hasattr(module, name) for name in names) and getattr(config, "model_type", None) not in _EXPANDED


def latent_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the norms whose outputs are cached, by the name of their attention module."""
    return {name: module.kv_a_layernorm for name, module in model.named_modules() if is_latent(module)}


def rotary_key(module: nn.Module, key: Tensor) -> Tensor:
    """Returns the part of expanded keys that all heads share: `[batch, 1, tokens, rope]`."""
    return key[:, :1, :, module.qk_nope_head_dim :]


@contextmanager
def latents_changed(model: nn.Module, change: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
    """Makes latent attentions expand `change(attention, latent [batch, tokens, rank])` to keys and values."""

    def hook(attention: nn.Module, norm: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return change(attention, output)

    norms = latent_norms(model)
    with removing(norm.register_forward_hook(partial(hook, model.get_submodule(name))) for name, norm in norms.items()):
        yield


def with_rotary_key(module: nn.Module, key: Tensor, rotary: Tensor) -> Tensor:
    """Returns expanded keys with another rotary part, `[batch, 1, tokens, rope]`."""
    nope = key[..., : module.qk_nope_head_dim]
    return torch.cat([nope, rotary.expand(-1, key.shape[1], -1, -1)], dim=-1)
