"""The pages of a KV cache have a layout and a format, and this file rounds keys and values into them.

A page holds 16, 32 or 64 tokens of one KV head of one layer:

    format       bytes of a token in a head                              scales
    None         dim · 2, BF16 or FP16                                   none
    fp8          dim, E4M3                                               one a KV head, calibrated or from first tokens
    fp8_token    dim + 4, E4M3                                           one a token and head, measured on writing
    nvfp4        dim / 2 + dim / 16, E2M1 and E4M3 block scales          one a KV head, as for fp8

Codes and the scales of FP8 equal the results of `quant.formats`, bit for bit. NVFP4 picks each block's scale among
eight neighbours by squared error (`block_scales`). NaN and infinity are kept as in `quant.formats.scaling`. Where no
scale was calibrated, the first tokens set it, with room for values sixteen times as large: E4M3, of elements or of
block scales, spans 17 binades, so that costs little.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.base.errors import UserError, known_names, option
from quant.formats.format import E2M1, E4M3, FORMATS, Format, is_16bit
from quant.formats.rounding import decode, encode, pack, round_to
from quant.formats.scaling import finite_or_nan, global_scale_of, max_rule, scale_of
from quant.formats.tensor import BlockScaledTensor

KV_FORMATS = ("fp8", "fp8_token", "nvfp4")  # formats of a quantized cache
PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = range(16, 257, 16)  # widths of a head
HEADROOM = 16.0  # factor by which later tokens may exceed the first ones under a scale that was not calibrated
CANDIDATES = (-2, 5)
"""The first and the last block scale that NVFP4 tries, as offsets in E4M3 codes from that of the `max` rule."""


@dataclass(frozen=True, eq=False)
class KVPages:
    """The pages of one layer. Plain data. A page's part of a tensor is contiguous; pages may lie further apart."""

    # In 16 bit, tokens and heads of a page may lie further apart too, alike in keys and values.

    # k, v: codes `[pages, kv_heads, page_size, ·]`: E4M3 or 16 bit `[…, dim]`, E2M1 in uint8 `[…, dim / 2]`.
    k: Tensor
    v: Tensor
    format: Format | None  # one of `KV_FORMATS`; None for 16 bit
    dim: int  # head dimension
    # k_scale, v_scale: float32 `[kv_heads]`, or `[pages, kv_heads, page_size]` for `fp8_token`; None for 16 bit.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    # k_blocks, v_blocks: NVFP4's block scales, E4M3 `[pages, kv_heads, page_size, dim / 16]`; None for others.
    k_blocks: Tensor | None = None
    v_blocks: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[2]

    @property
    def kind(self) -> str:
        """The kernels' name of the layout: "16bit", "fp8" or "nvfp4"."""
        if self.format is None:
            return "16bit"
        return "nvfp4" if self.format.global_scale else "fp8"

    @property
    def per_token(self) -> bool:
        """Whether every token of a head has its own scale."""
        return self.k_scale is not None and self.k_scale.dim() == 3

    def read(self, pages: Sequence[int] | Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns K and V of the first `length` tokens in `pages`, dequantized: float32 `[kv_heads, length, dim]`."""
        index = torch.as_tensor(pages, dtype=torch.int64, device=self.k.device)

        def gather(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index].transpose(0, 1).flatten(1, 2)[:, :length]

        def values(codes: Tensor, scale: Tensor | None, blocks: Tensor | None) -> Tensor:
            codes, blocks = gather(codes), gather(blocks)  # type: ignore[assignment]
            return decode_kv(codes, self.format, scale if scale is None or scale.dim() == 1 else gather(scale), blocks)

        return values(self.k, self.k_scale, self.k_blocks), values(self.v, self.v_scale, self.v_blocks)


def token_bytes(format: Format | None, dim: int) -> int:
    """Returns the bytes of one token's key or value in one head."""
    if format is None:
        return 2 * dim
    codes = dim * format.element.bits // 8
    if format.global_scale:
        return codes + dim // 16  # block scales in E4M3
    return codes + (4 if format.per_row else 0)


def check_kv_format(format: Format | None, dim: int) -> None:
    """Raises ValueError for a `format` or a head dimension that no cache has."""
    if format is not None and format.name not in KV_FORMATS:
        raise ValueError(f"KV cache: no format {format}; known: {', '.join(KV_FORMATS)}, or None for 16 bit")
    if dim not in HEAD_DIMS:
        takes = f"it must be a multiple of 16, at most {HEAD_DIMS[-1]}"
        raise ValueError(f"KV cache: head dimension {dim}; {takes}; take {option('kv_cache', '16bit')}")


def encode_kv(x: Tensor, format: Format, scale: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the codes, scales (of `fp8_token`) and block scales (of `nvfp4`) that a cache stores for `x`."""
    # x is `[…, kv_heads, tokens, dim]`; the scale is float32 `[kv_heads]`, and None for `fp8_token`.
    x = x.float()
    if format.global_scale:
        assert scale is not None
        second = scale[:, None, None, None, None]
        # As `quant.formats` sees a matrix of one row: [rows, 1, blocks, 16].
        blocks = x.unflatten(-1, (-1, 16)).unsqueeze(-3)  # […, tokens, 1, dim / 16, 16]
        stored = block_scales(blocks, second)
        codes = pack(encode(blocks / (stored * second), E2M1).flatten(-3), 4)
        return codes, None, encode(stored.flatten(-3), E4M3)
    if scale is None:
        scale = scale_of(x.abs().amax(-1), E4M3.max)
        return encode(x / scale[..., None], E4M3), scale, None
    return encode(finite_or_nan(x) / scale[:, None, None], E4M3), None, None


def block_scales(blocks: Tensor, scale: Tensor) -> Tensor:
    """Returns NVFP4's block scales for a cache: of `CANDIDATES`, the one with the smallest squared error."""
    # On normal values its error is 0.6% above the minimum over all codes; the error of the `max` rule is 37% above it.
    # Errors are integers, in units of 2⁻⁸ of the power of two below the scale of the `max` rule: their sums do not
    # depend on the order, so the kernel makes the same choice. Every product before a difference is exact or followed
    # by a minimum, so fusing it changes nothing.
    # From float32 blocks `[…, 1, blocks, 16]` and a head's scale to `[…, 1, blocks, 1]`, representable in E4M3.
    first = max_rule(blocks, FORMATS["nvfp4"], scale)
    power = (first.view(torch.int32) & 0x7F800000).view(torch.float32)
    # Beyond 32 times the step every candidate saturates alike; the minimum keeps the error an int32.
    magnitude = torch.minimum(blocks.abs() * (torch.ones_like(scale) / scale), 32 * power)
    code = encode(first, E4M3).view(torch.uint8).int()
    best: Tensor = first
    least: Tensor | None = None
    for offset in range(CANDIDATES[0], CANDIDATES[1] + 1):
        stored = decode((code + offset).clamp_(1, E4M3.max_code).to(torch.uint8).view(torch.float8_e4m3fn), E4M3)
        rounded = round_to(magnitude * (1 / stored), E2M1) * stored
        error = ((magnitude - rounded) * (256 / power)).round_().int().square_().sum((-3, -1), keepdim=True)
        best = stored if least is None else torch.where(error < least, stored, best)
        least = error if least is None else torch.minimum(error, least)
    return torch.where(first.isnan(), first, best)


def decode_kv(codes: Tensor, format: Format | None, scale: Tensor | None, blocks: Tensor | None) -> Tensor:
    """Returns the values, float32 `[…, kv_heads, tokens, dim]`; `scale` is per head or per token."""
    if format is None:
        return codes.float()
    assert scale is not None
    if blocks is None:
        return codes.float() * (scale[:, None, None] if scale.dim() == 1 else scale[..., None])
    dim = codes.shape[-1] * 2
    elements = BlockScaledTensor(codes, blocks, format, (*codes.shape[:-1], dim)).element_values()
    steps = decode(blocks, E4M3) * scale[:, None, None]
    values: Tensor = elements.unflatten(-1, (-1, 16)) * steps[..., None]
    return values.flatten(-2)


def round_kv(x: Tensor, format: Format | None, scale: Tensor | None) -> Tensor:
    """Returns `x` `[…, kv_heads, tokens, dim]` as it comes back from a cache, in its own dtype."""
    if format is None:
        return x
    codes, token_scale, blocks = encode_kv(x, format, scale)
    return decode_kv(codes, format, scale if token_scale is None else token_scale, blocks).to(x.dtype)


def first_scale(x: Tensor, format: Format | None) -> Tensor | None:
    """Returns scales `[kv_heads]` from the first tokens `[batch, kv_heads, tokens, dim]` of a cache, with headroom."""
    if format is None or format.per_row:
        return None
    amax = x.abs().amax(dim=(0, 2, 3)).float() * HEADROOM
    return global_scale_of(amax, format) if format.global_scale else scale_of(amax, format.element.max)


def kv_format(name: str | None) -> Format | None:
    """Returns the cache format called `name`; None, `keep` and `16bit` mean no quantization."""
    if is_16bit(name):
        return None
    if name not in KV_FORMATS:
        raise UserError(f"{option('kv_cache', name)}: unknown; {known_names(name, [*KV_FORMATS, '16bit'])}")
    return FORMATS[str(name)]


def kv_formats(name: str | None, layers: int) -> list[Format | None]:
    """Returns the cache format of each layer of a model: of all by one name, or of each by as many with commas."""
    names = [None] if name is None else name.split(",")
    if len(names) not in (1, layers):
        raise UserError(f"{option('kv_cache', name)}: {len(names)} formats for {layers} layers; give one for each")
    return [kv_format(each) for each in names] * (layers // len(names))


def write_reference(pages: KVPages, table: Tensor, first: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k and v `[batch, kv_heads, new, dim]` at the positions from `first` `[batch]` on: the oracle."""
    position = first[:, None].long() + torch.arange(k.shape[2], device=k.device)
    page = table.long().gather(1, position // pages.page_size)
    at = (page[:, :, None], torch.arange(pages.kv_heads, device=k.device), position[:, :, None] % pages.page_size)
    for x, codes, scale, blocks in (
        (k, pages.k, pages.k_scale, pages.k_blocks),
        (v, pages.v, pages.v_scale, pages.v_blocks),
    ):
        if pages.format is None:
            codes[at] = x.transpose(1, 2).to(codes.dtype)
            continue
        per_token = scale is not None and scale.dim() == 3
        encoded = encode_kv(x, pages.format, None if per_token else scale)
        for target, part in zip((codes, scale if per_token else None, blocks), encoded, strict=True):
            if part is not None:
                assert target is not None
                _bytes(target)[at] = _bytes(part).transpose(1, 2)


def _bytes(x: Tensor) -> Tensor:
    """Returns FP8 as bytes, since not every indexing function takes FP8."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
