"""One graph serves a decoder: the same file computes prefill, in one piece or in chunks, and every decoding step.

    input_ids       [batch, sequence]    tokens of this step; rows with fewer are padded on their right
    lengths         [batch]              tokens that the row's cache holds already
    last            [batch]              index in `input_ids` of the row's last real token
    past_key.N      [batch, kv_heads, capacity, dim]      and past_value.N, of each layer N
    -> logits       [batch, vocabulary]  of the last real token alone
    -> new_key.N    [batch, kv_heads, capacity, dim]      and new_value.N: the same cache with the new tokens

A token of row b has the position p = lengths[b] + its index, and its key is written there. It attends to the cached
keys 0 … p, or to the last `window` of them:

    capacity     0 1 2 3 4 5 6 7 8
    lengths 3    k k k                 cached before this step
    token 4        ? ? ? ? .           p = 4 in a window of 4: keys 1 … 4; keys behind p are never seen

So padding needs no mask of its own: padded tokens write keys behind the row's last position, which no real token sees
before its own key has replaced them. A cache may hold any finite numbers behind the lengths.

The cache has a fixed capacity, so no shape changes from token to token, and a runtime that is given one buffer for
past_key.N and new_key.N writes only the new tokens. Keys are stored after RoPE, in the model's dtype. The mask is an
input of the `Attention` operator: the parser of TensorRT-RTX 1.7 drops the operator's own lengths (`nonpad_kv_seqlen`)
with a warning, and the engine then attends to the whole cache.
"""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.base.errors import option
from quant.base.processor import memory_left
from quant.calibration.attention_names import text_config
from quant.calibration.attention_scales import AttentionScales
from quant.calibration.session import free_memory
from quant.export.onnx.decoder_graph import Attention, GraphInput, Keys, attending, check_attends, is_decoder
from quant.export.onnx.dynamic_shapes import SEQUENCE, check_sequence, dimension_ranges
from quant.export.onnx.moving_rope import moving_type
from quant.export.onnx.opsets import SERVING_OPSET
from quant.export.onnx.trace import MODEL_PREFIX, trace
from quant.export.onnx.translate import translate
from quant.formats.format import FORMATS, Format
from quant.kernels.attention.attention_operands import DIMS
from quant.recipes.blocks import removing

CAPACITY_KEY = "blockscale.capacity"
"""Key in the file's metadata; its value is the capacity of the cache."""
LENGTHS, LAST, IDS, LOGITS = "lengths", "last", "input_ids", "logits"
KEYS = ("key", "value")
_KEPT_LAYERS = {"full_attention", "sliding_attention", "attention"}  # of a config's `layer_types`
_SMALLEST = 8
CACHE_FORMATS = ("fp8", "nvfp4")
_TILE = 32  # keys that our plugin reads at a time; a multiple of them is the capacity of its cache


@dataclass(eq=False)
class CachedAttention(Attention):
    """Attention over a KV cache, while a graph is traced."""

    past: Sequence[Tensor] = ()  # keys and values, in order of the layers; none while shapes are recorded
    new: list[Tensor] = field(default_factory=list)  # keys and values that the graph returns
    kinds: list[str] = field(default_factory=list)  # of `new`: "key" or "value", or of a recurrent layer
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # the graph's other inputs
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by window; layers share them
    # A bias of positions would cover the new tokens alone.
    refused: ClassVar[tuple[str, ...]] = ("softcap", "s_aux", "position_bias")
    recurrent: bool = False  # whether it keeps the states of recurrent layers too

    def begin(self, inputs: Mapping[str, Tensor], past: Sequence[Tensor]) -> None:
        """Prepares for one pass of the model."""
        self.inputs, self.past, self.new, self.kinds, self.masks = inputs, past, [], [], {}

    def replacing(self, model: nn.Module) -> AbstractContextManager[None]:
        """Makes the layers of a model compute over this cache while open."""
        return attending(model, self, masked=False)

    def attended(self, name: str, keys: Keys, window: int | None) -> Keys:
        """Returns all keys in the cache, including the new ones, and which query sees which key."""
        if not keys.causal:
            raise ValueError(f"{name}: its attention is not causal, so it cannot decode over a cache")
        self.kinds += KEYS
        if not self.past:
            self.new += [keys.key, keys.value]
            return keys._replace(mask=None)
        # Layers are called in the order of the inputs.
        index = len(self.new)
        key, value = (self.cached(self.past[index + part], x) for part, x in enumerate((keys.key, keys.value)))
        self.new += [key, value]
        if window not in self.masks:
            self.masks[window] = self.visible(key.shape[2], window)[:, None]
        return Keys(key, value, self.masks[window], False)

    def cached(self, past: Tensor, x: Tensor) -> Tensor:
        """Returns the cache `[batch, kv_heads, tokens, dim]` with the new tokens in it."""
        return torch.ops.quant.onnx_scatter(past, x, self.inputs[LENGTHS])

    def cache_inputs(self, shapes: Sequence[tuple[int, int, torch.dtype]], capacity: int) -> dict[str, GraphInput]:
        """Returns the graph's inputs that hold the cache, from the heads, dimensions and dtypes of keys and values.

        Raises ValueError for a cache that the memory of torch's default device cannot hold.
        """
        check_capacity_fits(shapes, capacity)
        keys, counts, inputs = iter(shapes), Counter[str](), {}
        for kind, x in zip(self.kinds, self.new, strict=True):
            heads, dim, dtype = next(keys) if kind in KEYS else (0, 0, x.dtype)
            shape = (heads, capacity, dim) if kind in KEYS else tuple(x.shape[1:])
            inputs[f"past_{kind}.{counts[kind]}"] = GraphInput(torch.zeros(2, *shape, dtype=dtype), ("batch", *shape))
            counts[kind] += 1
        return inputs

    def check(self, model: nn.Module, past: Mapping[str, GraphInput]) -> None:
        """Raises ValueError for a model that keeps more from step to step than these caches."""

    def positions(self) -> Tensor:
        """Returns the positions of the new tokens, `[batch, sequence]`."""
        lengths = self.inputs[LENGTHS]
        return lengths[:, None] + torch.arange(self.inputs[IDS].shape[1], device=lengths.device)[None]

    def visible(self, tokens: int, window: int | None) -> Tensor:
        """Returns which of the cache's `tokens` each query sees, `[batch, sequence, tokens]`."""
        positions = self.positions()[:, :, None]
        columns = torch.arange(tokens, device=positions.device)[None, None]
        seen = columns <= positions
        return seen if window is None else seen & (columns > positions - window)


class GroupedAttention(CachedAttention):
    """Attention of onnxruntime, which writes into the cache itself and takes no mask."""

    refused: ClassVar[tuple[str, ...]] = ("softcap", "position_bias")

    def attended(self, name: str, keys: Keys, window: int | None) -> Keys:
        # Its node takes heads of a multiple of eight, and keys and values of one size.
        dim, v_dim = keys.key.shape[3], keys.value.shape[3]
        is_plain = type(keys.key) is Tensor  # of a pass with numbers, of which no graph is made
        if is_plain or not self.past or not keys.causal or dim % 8 or dim != v_dim:
            return super().attended(name, keys, window)
        return keys._replace(window=window or -1)

    def computed(self, module: nn.Module, name: str, query: Tensor, keys: Keys, scale: float) -> Tensor:
        if keys.window is None:
            return super().computed(module, name, query, keys, scale)
        past = self.past[len(self.new) : len(self.new) + 2]
        operands = query, keys.key, keys.value, *past, self.inputs[LENGTHS]
        out, *new = torch.ops.quant.onnx_grouped_attention(*operands, keys.sinks, scale, keys.window)
        self.new += new
        return out


@dataclass(eq=False)
class QuantizedCache(CachedAttention):
    """Attention over a KV cache in FP8 or NVFP4, while a graph is traced: one node of our plugin `QuantCacheAttention`.

        past_key.N, past_value.N      FLOAT8E4M3FN [batch, kv_heads, capacity, dim], or [..., dim / 2], two codes a byte
        past_key_blocks.N and so on   FLOAT8E4M3FN [batch, kv_heads, capacity, dim / 16], NVFP4's block scales
        -> new_key.N, …               the same caches, with the new tokens: bind them to the addresses of the inputs

    The node rounds the new keys and values into the caches and attends, so it takes no mask: a query at position p sees
    the keys 0 … p. All columns of a step are written, as without it. ONNX and TensorRT write no other cache than one in
    16 or 32 bit in place, so the node is for TensorRT with our plugin alone (`quant.export.tensorrt.cache_plugin`).
    """

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

    def computed(self, module: nn.Module, name: str, query: Tensor, keys: Keys, scale: float) -> Tensor:
        if not self.past:
            self.modules[name] = module
            return super().computed(module, name, query, keys, scale)
        caches = list(self.past[len(self.new) : len(self.new) + len(self.parts(query.shape[3]))])
        op = torch.ops.quant.onnx_fp8_cache if self.format.name == "fp8" else torch.ops.quant.onnx_nvfp4_cache
        out, *new = op(query, keys.key, keys.value, caches, *self.cache_scales[name], self.inputs[LENGTHS], scale)
        self.new += new
        attended: Tensor = out
        return attended.transpose(1, 2).contiguous()

    def parts(self, dim: int) -> list[tuple[str, int, torch.dtype]]:
        """Returns the tensors of a layer's cache: their names, values of a token in one head, and dtypes."""
        fp8 = torch.float8_e4m3fn
        if self.format.name == "fp8":
            return [("key", dim, fp8), ("value", dim, fp8)]
        codes = [(part, dim // 2, fp8) for part in KEYS]  # bytes, see `cache_plugin`
        return codes + [(f"{part}_blocks", dim // 16, fp8) for part in KEYS]

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
    return format.name == "fp8" and any(isinstance(scale, Tensor) for scale in own)


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
    if capacity % _TILE:
        raise ValueError(
            f"{option('capacity', capacity)}: a cache in {format} holds a multiple of {_TILE} tokens; pass "
            f"{option('capacity', max(capacity // _TILE, 1) * _TILE)}"
        )


class ServingGraph(nn.Module):
    """A decoder over a KV cache, with tensors in and tensors out."""

    model: Any

    def __init__(self, model: nn.Module, attention: CachedAttention) -> None:
        super().__init__()
        self.model = model
        self.attention = attention

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        """Returns logits `[batch, vocabulary]`, then the cache."""
        self.attention.begin(inputs, past)
        with last_token_only(self.model, inputs[LAST]):
            # Models of recurrent layers alone take no positions.
            given = {"position_ids": self.attention.positions()} if _takes_positions(self.model) else {}
            logits = self.model(input_ids=inputs[IDS], use_cache=False, **given).logits
        return (logits[:, 0], *self.attention.new)


def serving_program(
    model: nn.Module, capacity: int, shapes: str | Sequence[str] | None, function: CachedAttention, runtime: str
) -> Any:
    """Returns the ONNX model of a decoder's serving graph for a runtime, as an `onnx_ir.Model`."""
    check_decoder(model, capacity, recurrent=function.recurrent)
    with function.replacing(model):
        # A first pass without values tells the shapes of the cache, which is an input of the pass that is traced.
        past = function.cache_inputs(cache_shapes(model, function), capacity)
    function.check(model, past)
    with function.replacing(model):
        exported, inputs = trace_serving(ServingGraph(model, function), past, shapes, capacity)
    outputs = [LOGITS, *map(new_name, past)]
    program = translate(exported, inputs, outputs, MODEL_PREFIX, model, opset=SERVING_OPSET, runtime=runtime)
    program.metadata_props[CAPACITY_KEY] = str(capacity)
    return program


def trace_serving(
    graph: nn.Module, past: Mapping[str, GraphInput], shapes: str | Sequence[str] | None, capacity: int
) -> tuple[torch.export.ExportedProgram, dict[str, GraphInput]]:
    """Traces a module with the arguments of `ServingGraph` over any rows and steps of up to `capacity` tokens.

    Returns the graph and its inputs, on the device of the cache.
    """
    device = next(iter(past.values())).example.device
    inputs = {
        IDS: GraphInput(torch.zeros(2, 5, dtype=torch.long, device=device), ("batch", "sequence")),
        LENGTHS: GraphInput(torch.tensor([3, 2], device=device), ("batch",)),
        LAST: GraphInput(torch.tensor([4, 3], device=device), ("batch",)),
    }
    ranges = dimension_ranges(inputs, shapes, longest=capacity)
    check_sequence(ranges[SEQUENCE][1], capacity)
    arguments = ({name: x.example for name, x in inputs.items()}, [x.example for x in past.values()])
    every = {**inputs, **past}
    return trace(graph, arguments, every, ranges, split=len(inputs)), every


def check_decoder(model: nn.Module, capacity: int | None, *, recurrent: bool = False) -> None:
    """Raises ValueError for a model that a graph with a KV cache cannot hold; the message names the way out.

    `capacity` is None for a cache that grows; `recurrent` is whether the graph holds the states of recurrent layers.
    """
    name = type(model).__name__
    if not is_decoder(model):
        config: Any = getattr(model, "config", None)
        reason = "does not generate text, so it has no KV cache to export"
        if getattr(config, "is_encoder_decoder", False):
            reason = "is an encoder with a decoder, whose KV cache no export holds"
        raise ValueError(
            f"{name} {reason}; without {option('capacity')} and {option('genai', True)} it exports as one pass"
        )
    config = text_config(model.config)
    limit = getattr(config, "max_position_embeddings", None)
    if capacity is not None and limit is not None and capacity > limit:
        raise ValueError(f"{option('capacity', capacity)}: {name} has positions for {limit} tokens; lower it")
    if capacity is not None and capacity < _SMALLEST:
        raise ValueError(
            f"{option('capacity', capacity)}: a cache holds {_SMALLEST} tokens or more; 0 exports without one"
        )
    without = (
        f"{name} cannot be exported with a KV cache: %s; serve its checkpoint (vLLM), or pass {option('capacity', 0)}"
    )
    states = set(getattr(config, "layer_types", None) or ()) - _KEPT_LAYERS
    if states and not recurrent:
        raise ValueError(without % f"its layers of type {', '.join(sorted(states))} keep another state")
    scaling = getattr(config, "rope_parameters", None) or {}
    each = scaling.values() if all(isinstance(entry, dict) for entry in scaling.values()) else [scaling]
    moving = next((entry["rope_type"] for entry in each if moving_type(entry.get("rope_type"))), None)
    if moving is not None:
        raise ValueError(without % f"its RoPE ({moving}) depends on the longest position of a batch")
    check_attends(model, {IDS: torch.zeros(2, 5, dtype=torch.long, device=next(model.parameters()).device)})
    if not _takes_positions(model) and not recurrent:
        raise ValueError(without % "its positions are not an input of its forward method")


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def check_capacity_fits(shapes: Sequence[tuple[int, int, torch.dtype]], capacity: int) -> None:
    """Raises ValueError if two rows of a KV cache, which a graph is traced with, do not fit into free memory."""
    device = torch.get_default_device()
    free = free_memory(device) if device.type == "cuda" else memory_left()
    nbytes = sum(2 * heads * capacity * dim * dtype.itemsize for heads, dim, dtype in shapes)
    if free is not None and nbytes > free:
        raise ValueError(
            f"{option('capacity', capacity)}: two rows of the KV cache, which the graph is traced with, take "
            f"{nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; lower it"
        )


def cache_shapes(model: nn.Module, function: CachedAttention) -> list[tuple[int, int, torch.dtype]]:
    """Returns KV heads, dimension and dtype of keys and values of each layer, from a run without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), next(model.parameters()).device:
        rows = torch.zeros(2, dtype=torch.long)
        function.begin({LENGTHS: rows, LAST: rows}, [])
        model(input_ids=torch.zeros(2, 5, dtype=torch.long), use_cache=False)
    pairs = [x for x, kind in zip(function.new, function.kinds, strict=True) if kind in KEYS]
    shapes = [(x.shape[1], x.shape[3], x.dtype) for x in pairs]
    if len(pairs) < len(function.new):
        return shapes  # `check` runs a model that keeps more than keys and values
    config: Any = text_config(model.config)
    blocks = getattr(config, "num_hidden_layers", None)
    if not shapes or (blocks is not None and len(shapes) != 2 * blocks):
        raise ValueError(
            f"{type(model).__name__}: {len(shapes) // 2} of its {blocks} blocks attend over keys and values, so a KV "
            f"cache is not all that it keeps; serve its checkpoint (vLLM), or pass {option('capacity', 0)}"
        )
    return shapes


@contextmanager
def last_token_only(model: Any, last: Tensor) -> Iterator[None]:
    """Gives the output head the hidden states of one token a row, while open: logits are `[batch, 1, vocabulary]`.

    The head is the largest matrix of a small model, and all other tokens' logits would be thrown away.
    """

    def chosen(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (hidden,) = args  # [batch, sequence, width]
        rows = torch.arange(hidden.shape[0], device=last.device) * hidden.shape[1] + last
        return (hidden.flatten(0, 1).index_select(0, rows)[:, None],)

    with removing([model.get_output_embeddings().register_forward_pre_hook(chosen)]):
        yield


def new_name(past: str) -> str:
    """Returns the name of the output that continues a cache: `new_key.0` of `past_key.0`."""
    return past.replace("past_", "new_", 1)
