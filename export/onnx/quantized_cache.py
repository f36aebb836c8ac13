"""A serving graph whose KV cache is in FP8 or NVFP4: each attention is one node of our plugin `QuantCacheAttention`.

    past_key.N, past_value.N      FLOAT8E4M3FN [batch, kv_heads, capacity, dim], or [..., dim / 2], two codes a byte
    past_key_blocks.N and so on   FLOAT8E4M3FN [batch, kv_heads, capacity, dim / 16], NVFP4's block scales
    -> new_key.N, …               the same caches, with the new tokens: bind them to the addresses of the inputs

The node rounds the new keys and values into the caches and attends, so it takes no mask: a query at position p sees
the keys 0 … p. All columns of a step are written, padding too; these lie behind the row's last position, and
the row's next tokens replace them, as in `serving`.

ONNX and TensorRT write no other cache than one in 16 or 32 bit in place, so the node is for TensorRT with our plugin
alone. `quant.export.tensorrt.cache_plugin` describes its inputs and attributes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from quant.base.errors import option
from quant.calibration.attention_scales import AttentionScales
from quant.export.onnx.decoder_graph import GraphInput, Keys
from quant.export.onnx.serving import LENGTHS, CachedAttention, check_capacity_fits
from quant.formats.format import FORMATS, Format
from quant.kernels.attention.attention_operands import DIMS

CACHE_FORMATS = ("fp8", "nvfp4")
TOKENS = 32
"""The plugin reads keys in tiles of so many, and a cache's capacity is a multiple of it."""


@dataclass(eq=False)
class QuantizedCache(CachedAttention):
    """Attention over a KV cache in `format`, while a graph is traced."""

    format: Format = FORMATS["fp8"]  # one of `CACHE_FORMATS`
    measured: Mapping[str, AttentionScales] = field(default_factory=dict)  # where modules have no scales of their own
    # Scales of K and V of each attention by KV head: a graph that is being traced has no numbers, so they are read
    # before, from the modules that are noted while shapes are recorded.
    cache_scales: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)

    def attended(self, name: str, keys: Keys, window: int | None) -> Keys:
        """Returns the new keys and values alone: the node has the cached ones."""
        if window is not None:
            raise ValueError(
                f"{name}: its window slides over {window} tokens, and the plugin of a cache in {self.format} has no "
                f"windows; pass {option('kv_cache', '16bit')}"
            )
        return keys if self.past else super().attended(name, keys, window)

    def computed(self, module: nn.Module, name: str, query: torch.Tensor, keys: Keys, scale: float) -> torch.Tensor:
        if not self.past:
            self.modules[name] = module
            return super().computed(module, name, query, keys, scale)
        caches = list(self.past[len(self.new) : len(self.new) + len(self.parts(query.shape[3]))])
        op = torch.ops.quant.onnx_fp8_cache if self.format.name == "fp8" else torch.ops.quant.onnx_nvfp4_cache
        out, *new = op(query, keys.key, keys.value, caches, *self.cache_scales[name], self.inputs[LENGTHS], scale)
        self.new += new
        attended: torch.Tensor = out
        return attended.transpose(1, 2).contiguous()

    def parts(self, dim: int) -> list[tuple[str, int, torch.dtype]]:
        """Returns the tensors of a layer's cache: their names, values of a token in one head, and dtypes."""
        fp8 = torch.float8_e4m3fn
        if self.format.name == "fp8":
            return [("key", dim, fp8), ("value", dim, fp8)]
        codes = [(part, dim // 2, fp8) for part in ("key", "value")]  # bytes, see `cache_plugin`
        return codes + [(f"{part}_blocks", dim // 16, fp8) for part in ("key", "value")]

    def cache_inputs(self, shapes: Sequence[tuple[int, int, torch.dtype]], capacity: int) -> dict[str, GraphInput]:
        for (name, module), keys, values in zip(self.modules.items(), shapes[::2], shapes[1::2], strict=True):
            if keys != values:
                raise ValueError(f"{name}: keys and values of different shapes; pass {option('kv_cache', '16bit')}")
            check_cache(name, self.format, *keys[1:], capacity)
            self.cache_scales[name] = self.scales_of(module, name, keys[0])
        parts = [(heads, width, dtype) for heads, dim, _ in shapes[::2] for _, width, dtype in self.parts(dim)]
        check_capacity_fits(parts, capacity)
        return {
            f"past_{part}.{layer}": GraphInput(
                torch.zeros(2, heads, capacity, width, dtype=dtype), ("batch", heads, capacity, width)
            )
            for layer, (heads, dim, _) in enumerate(shapes[::2])
            for part, width, dtype in self.parts(dim)
        }

    def scales_of(self, module: nn.Module, name: str, heads: int) -> tuple[list[float], list[float]]:
        """Returns scales of K and V for each KV head: the checkpoint's own for FP8, or else measured ones."""
        measured = self.measured.get(name)
        own = [getattr(module, f"{part}_scale", None) if self.format.name == "fp8" else None for part in "kv"]
        pairs = own if None not in own else [None, None] if measured is None else [measured.k, measured.v]
        if any(scale is None for scale in pairs):
            raise ValueError(
                f"{name}: no scales of a KV cache in {self.format}; pass attention_scales of collect_attention_scales "
                "(the command measures them, --calib)"
            )
        numbers = [scale.float().flatten() for scale in pairs if scale is not None]
        if any(scale.numel() not in (1, heads) for scale in numbers):
            counts = " and ".join(str(scale.numel()) for scale in numbers)
            raise ValueError(
                f"{name}: {counts} scales of K and V for {heads} KV heads; quantize again, or pass "
                f"{option('kv_cache', '16bit')}"
            )
        k, v = (scale.expand(heads).tolist() for scale in numbers)
        return k, v


def holds_cache_scales(model: nn.Module, format: Format) -> bool:
    """Returns whether a checkpoint's model has scales of its own for a cache in `format`, as FP8 has."""
    own = (getattr(module, "k_scale", None) for module in model.modules())
    return format.name == "fp8" and any(isinstance(scale, torch.Tensor) for scale in own)


def check_cache(name: str, format: Format, dim: int, dtype: torch.dtype, capacity: int) -> None:
    """Raises ValueError for an attention that the plugin has no kernel for; the message names the way out."""
    way_out = f"pass {option('kv_cache', '16bit')}"
    if dim not in DIMS:
        listed = ", ".join(map(str, DIMS))
        raise ValueError(f"{name}: a cache in {format} takes heads of {listed}, these are of {dim}; {way_out}")
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f"{name}: a cache in {format} is for FP16 and BF16 models; pass {option('dtype', 'bf16')}, or {way_out}"
        )
    if capacity % TOKENS:
        raise ValueError(
            f"{option('capacity', capacity)}: a cache in {format} holds a multiple of {TOKENS} tokens; pass "
            f"{option('capacity', max(capacity // TOKENS, 1) * TOKENS)}"
        )
