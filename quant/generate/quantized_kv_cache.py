"""`QuantizedKVCache` is a quantized, paged KV cache for transformers' `generate()`.

    cache = QuantizedKVCache(model, "nvfp4")
    with quantized_attention(model, attention="fp8", kv_cache="nvfp4"):
        model.generate(ids, cache=cache)  # past_key_values before transformers 5.24

Each layer keeps its pages (`quant.kernels.attention.paged_attention`). Under our attention
(`quant.generate.quantized_attention`), a layer passes the new keys and values on unchanged, marked with itself;
attention, which has the queries, lets the layer write them, and reads the pages. Under any other attention the layer
writes at once and returns the whole cache, dequantized, as other quantized caches of transformers do: slower, and
without the gain of turned keys (`quant.generate.key_rotation`).

Beam search and `num_return_sequences` fork sequences, so shared tokens are stored once.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from quant.base.errors import UserError, option
from quant.calibration.attention_names import text_config
from quant.formats.format import Format
from quant.generate.key_rotation import Turn, turning
from quant.generate.quantized_attention import FP8, IMPLEMENTATIONS, scales_of, turns
from quant.kernels.attention.kv_pages import KVPages, kv_formats
from quant.kernels.attention.paged_attention import PagedKVCache


class QuantizedKVLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's pages; `config`'s attention implementation decides whether `update` returns new or all keys.

    `module` is the attention module, which may have calibrated scales.
    """

    # Layers with a window keep all keys, too, and attention leaves out those beyond it: no page is used again for newer
    # tokens.
    is_sliding = False
    is_croppable = True
    # Pages need heads, dimension and device of the first keys, which transformers cannot name before the first forward
    # pass.
    supports_early_init = False

    def __init__(self, config: Any, module: nn.Module, format: Format, page_size: int) -> None:
        super().__init__()
        self._config = config
        self._module = module
        self._page_size = page_size
        self._pages: PagedKVCache | None = None
        self._sequences: list[int] = []
        self._waiting = False
        self._turns = False
        self.turn: Turn | None = None  # the matrices of queries and keys; None where they are not turned
        self.format = format
        self.length = 0

    @property
    def pages(self) -> PagedKVCache:
        """The pages; UserError before the first keys, which they are made for."""
        if self._pages is None:
            raise UserError("this KV cache holds no keys yet: run the model on the prompt first")
        return self._pages

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes if self._pages is not None else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, new, dim = key_states.shape
        if value_states.shape != key_states.shape:
            raise UserError(
                f"keys {list(key_states.shape)} and values {list(value_states.shape)} differ in shape; such a cache "
                f"stays in 16 bit ({option('kv_cache', '16bit')})"
            )
        name = self._config._attn_implementation
        self._turns = name in IMPLEMENTATIONS and turns(self._module, self.format, fp8=name == FP8)
        k_scale, v_scale = scales_of(self._module, self.format, kv_heads, self._turns)
        self._pages = PagedKVCache(
            1,
            kv_heads,
            dim,
            format=self.format,
            # Room for the prompt, and 4 pages for each sequence before the cache must grow.
            pages=batch * (new // self._page_size + 4),
            page_size=self._page_size,
            k_scale=None if k_scale is None else k_scale[None],
            v_scale=None if v_scale is None else v_scale[None],
            device=key_states.device,
        )
        self._sequences = [self._pages.add() for _ in range(batch)]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes the new keys and values; returns the keys and values that the model's attention needs."""
        if self._pages is None:
            self.lazy_initialization(key_states, value_states)
        # `update` sets the flag and `write` clears it. If it is still set, attention got keys without our mark: the
        # modeling code made new tensors of them on the way.
        if self._waiting:
            raise UserError(
                f"{type(self._module).__name__} changes keys between cache and attention, which then did not see the "
                f"cache; generate with {option('attention', '16bit')} {option('kv_cache', '16bit')}"
            )
        self.length += key_states.shape[2]
        if self._config._attn_implementation not in IMPLEMENTATIONS:
            keys = key_states if self.turn is None else self.turn.k(key_states)
            self.pages.append(0, self._sequences, keys, value_states)
            return self.read(key_states.dtype)
        self._waiting = True
        # A view that carries the layer through the modeling code; the keys themselves stay untouched.
        marked = key_states.view_as(key_states)
        marked.quant_layer = self  # type: ignore[attr-defined]
        return marked, value_states

    def write(self, q: Tensor, k: Tensor, v: Tensor, **options: float | None) -> Tensor:
        """Writes the new keys and values, turned as queries will be; returns the new queries, turned.

        `options` are the softmax scale and soft cap of the attention, as `turning` takes them.
        """
        self._waiting = False
        # The first tokens decide the matrices, and later tokens keep them: cached keys are turned already.
        if self._turns and self.turn is None:
            self.turn = turning(q, k, **options)
        if self.turn is not None:
            q, k = self.turn.q(q), self.turn.k(k)
        self.pages.append(0, self._sequences, k, v)
        return q

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        """The scales of K and V in FP8 with one a head; None for other formats."""
        if not self.format.per_tensor:
            return None
        pages = self.pages.layer(0)
        assert pages.k_scale is not None and pages.v_scale is not None
        return pages.k_scale, pages.v_scale

    def attend(self, q: Tensor, **options: Any) -> Tensor:
        """Returns the causal attention of the newest tokens over the pages."""
        return self.pages.attend(0, self._sequences, q, **options)

    def reserve(self, room: int) -> tuple[KVPages, Tensor]:
        """Returns the pages and the block table, with pages for `room` more tokens of each sequence."""
        self.pages.reserve(self._sequences, room)
        return self.pages.layer(0), self.pages.block_table(self._sequences)

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns everything that is cached, dequantized: `[batch, kv_heads, length, dim]`."""
        k, v = self.read_turned(dtype)
        return k if self.turn is None else self.turn.back(k), v

    def read_turned(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the same as `read`, with keys turned like the queries of `write`."""
        read = [self.pages.read(0, sequence) for sequence in self._sequences]
        return torch.stack([k for k, _ in read]).to(dtype), torch.stack([v for _, v in read]).to(dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._pages, self._sequences, self.length, self.turn = None, [], 0, None
        self.is_initialized = self._waiting = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; their number is negative, as transformers has it."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative one")
        if self._pages is not None:
            self.length = max(0, self.length + tokens_to_remove)
            for sequence in self._sequences:
                self._pages.crop(sequence, self.length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self._sequences), device="cpu")
        self._select(rows[indices.cpu()].tolist())

    def offload(self) -> None:
        raise UserError("a quantized KV cache stays on its device; generate without offloading")

    def _select(self, rows: list[int]) -> None:
        if self._pages is None:
            return
        # Forks first: dropping a sequence before could free pages that a later row continues.
        chosen = [self._pages.fork(self._sequences[row]) for row in rows]
        for sequence in self._sequences:
            self._pages.drop(sequence)
        self._sequences = chosen


class QuantizedKVCache(Cache):  # type: ignore[misc]
    """The cache of a causal language model in FP8 or NVFP4, by the model's calibrated scales where it has any.

    Args:
        kv_cache: "fp8" or "nvfp4"; "fp8_token" has a scale for each token and head. With commas, one for each layer,
            of which some may be "16bit".
        page_size: tokens of a page: 16, 32 or 64.

    Raises:
        UserError: an unknown format, or a model whose layers keep more than keys and values.
    """

    def __init__(self, model: nn.Module, kv_cache: str, *, page_size: int = 64) -> None:
        config = text_config(model.config)
        formats = kv_formats(kv_cache, config.num_hidden_layers)
        if not any(formats):
            raise UserError(f"{option('kv_cache', kv_cache)}: no quantized cache; take fp8 or nvfp4")
        modules = _attention_modules(model)
        super().__init__(
            layers=[
                DynamicLayer() if format is None else QuantizedKVLayer(config, module, format, page_size)
                for module, format in zip(modules, formats, strict=True)
            ]
        )

    @property
    def is_mixed(self) -> bool:
        """Whether some layers keep 16 bit, or have another format than others."""
        return len({getattr(layer, "format", None) for layer in self.layers}) > 1

    @property
    def nbytes(self) -> int:
        quantized = (layer.nbytes for layer in self.layers if isinstance(layer, QuantizedKVLayer))
        plain = [layer for layer in self.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
        return sum(quantized) + sum(int(x.nbytes) for layer in plain for x in (layer.keys, layer.values))


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    text = text_config(model.config)
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    shared = getattr(text, "kv_sharing_modes", None) or getattr(text, "num_kv_shared_layers", None)
    if getattr(model.config, "is_encoder_decoder", False) or shared or kinds - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"{type(model).__name__}: layers that share or keep something other than keys and values "
            f"({', '.join(sorted(kinds))}) have no quantized cache; generate with {option('kv_cache', '16bit')}"
        )
    attention: dict[int, nn.Module] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        # Some models set `layer_idx` on decoder layers and other mixers as well; only attention has `is_causal`.
        if isinstance(index, int) and hasattr(module, "is_causal"):
            attention[index] = module
    layers = range(text.num_hidden_layers)
    if sorted(attention) != list(layers):
        found = f"found attention of {len(attention)} of {len(layers)} layers"
        raise UserError(f"{type(model).__name__}: {found}; generate with {option('kv_cache', '16bit')}")
    return [attention[index] for index in layers]
