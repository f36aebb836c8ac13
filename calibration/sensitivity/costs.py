"""Costs of a choice of formats: bytes exactly, seconds from a table of kernel times or a roofline.

Bits and bytes come from `LayerPlan`, the one place that counts them: codes, block scales, global scales and pads.
Effective bits are bytes over weights, taken over all layers that an allocator may choose for, including layers
that it leaves in 16 bit; embeddings, norms and an output head that no format is offered for are outside.

A model that is served takes more memory than its weights:

    memory = weights that are allocated + weights that are not + key-value cache of batch × context tokens

Seconds are the time of one decoding step: every weight is read once for the whole batch, and so is the cache. They come
from a table of measured kernel times, or from the roofline of a named GPU,

    seconds = max(bytes / bandwidth, 2 · tokens · weights / peak of the format)

which is a bound that good kernels come close to and not a measurement; the plan records the source.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from quant.base.errors import listed
from quant.base.json_files import read_json, typed
from quant.calibration.attention_names import text_config
from quant.calibration.sensitivity.table import Candidate
from quant.formats.format import FORMATS, Format
from quant.kernels.base.hardware import current
from quant.recipes.gpus import GPUS, Hardware
from quant.recipes.layers import LayerKind
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.targets import get_gpu


def group_bytes(members: Sequence[LayerPlan], candidate: Candidate) -> int:
    """Returns the bytes of a fusion group's weights in a format, tied weights once."""
    return sum(candidate.applied(layer).nbytes for layer in members)


@dataclass(frozen=True)
class Memory:
    """Bytes of a served model by their use."""

    codes: int
    scales: int
    embeddings: int
    rest: int
    kv_cache: int = 0
    tokens: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return self.codes + self.scales + self.embeddings + self.rest + self.kv_cache


def memory_of(plan: Plan, *, unplanned: int = 0, kv_cache: int = 0, tokens: int = 0) -> Memory:
    """Returns the memory of a plan, of tensors that are in none (biases, position tables) and of a KV cache."""
    codes = scales = embeddings = 0
    other = unplanned
    for layer in plan.layers:
        if layer.weight is not None:
            # A tied layer shares the codes of another one, which counts them.
            part = math.prod(layer.weight.codes_shape(layer.shape)) if layer.tied_to is None else 0
            codes += part
            scales += layer.nbytes - part
        elif layer.kind in (LayerKind.EMBEDDING, LayerKind.HEAD):
            embeddings += layer.nbytes
        else:
            other += layer.nbytes
    return Memory(codes, scales, embeddings, other, kv_cache, tokens)


def kv_cache_bytes(config: Any, context: int, batch: int, format: Format | None = None) -> int:
    """Returns the bytes of the key-value cache of `batch` sequences of `context` tokens; a format of None is 16 bit."""
    return sum(kv_layer_bytes(config, context, batch, format))


def kv_layer_bytes(config: Any, context: int, batch: int, format: Format | None = None) -> list[int]:
    """Returns the bytes of the key-value cache of each layer.

    Layers with a sliding window hold at most the window's tokens; layers of linear attention, whose state does not
    grow, hold none, and so do layers that reuse the keys and values of another; latent attention (DeepSeek) holds one
    compressed vector a token for all heads. The shape of keys may differ by layer (Gemma 4). A model without attention
    heads (Mamba, RWKV, xLSTM) has a state of fixed size, and no cache that grows.
    """
    config = text_config(config)
    names = getattr(config, "architectures", None) or []
    # Only a model that generates token by token has a cache.
    generates = getattr(config, "is_decoder", False) or any("CausalLM" in n or "Conditional" in n for n in names)
    count = getattr(config, "num_hidden_layers", None)
    if not count or not generates:
        return []
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * count
    # Layers that reuse the keys and values of an earlier one (Gemma 3n, Gemma 4) cache none of their own.
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * count
    # Where layers differ (Gemma 4's head dimension), transformers 5.24 refuses to read the field of the whole config.
    layers = getattr(config, "per_layer_config", None) or [config] * count
    sizes = []
    for layer, kind, shared in zip(layers, kinds, sharing, strict=True):
        # transformers' names: linear_attention, mamba, conv (LFM2) have a state of fixed size, not a cache.
        has_state = any(name in kind for name in ("linear", "mamba", "conv"))
        if shared == "reuse" or has_state or not getattr(layer, "num_attention_heads", None):
            sizes.append(0)
            continue
        window = getattr(layer, "sliding_window", None)
        tokens = batch * (min(context, window) if "sliding" in kind and window else context)
        if getattr(layer, "kv_lora_rank", None) is not None:
            # One vector for keys and values: the compressed one, and the part of the key with the rotary positions.
            copies, heads, width = 1, 1, layer.kv_lora_rank + layer.qk_rope_head_dim
        else:
            copies, heads = 2, getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
            width = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        shape = (tokens * heads, width)
        sizes.append(copies * (format.nbytes(shape) if format else 2 * math.prod(shape)))
    return sizes


def mixed_cache_bytes(config: Any, context: int, batch: int, plan: Plan) -> int:
    """Returns the bytes of the key-value cache of a plan, whose layers may have formats of their own."""
    if not plan.kv_layers:
        return kv_cache_bytes(config, context, batch, plan.kv_cache)
    sizes = {name: kv_layer_bytes(config, context, batch, FORMATS.get(name)) for name in set(plan.kv_layers)}
    return sum(sizes[name][layer] for layer, name in enumerate(plan.kv_layers) if sizes[name])


@dataclass(frozen=True)
class Roofline:
    """Bounds on kernel times from a GPU's data sheet."""

    gpu: Hardware
    measured = False

    @property
    def name(self) -> str:
        """The GPU's name."""
        return self.gpu.name

    def linear(self, layer: LayerPlan, tokens: int) -> float:
        """Returns the seconds of a matmul that is bound by memory or by arithmetic, whichever is slower."""
        return max(self.read(layer.nbytes), 2 * tokens * layer.numel / self._peak(layer.weight, layer.activation))

    def read(self, nbytes: int) -> float:
        """Returns seconds to read `nbytes`."""
        return nbytes / self.gpu.bandwidth

    def _peak(self, *formats: Format | None) -> float:
        """Returns the operations/s of the narrowest dtype that holds both operands and that tensor cores multiply."""
        # Integers multiply integers only: a weight in INT8 with 16-bit inputs runs as a 16-bit product.
        if all(format is not None and format.element.is_integer for format in formats):
            return 1e12 * self.gpu.tflops["int8"]
        widest = max(16 if format is None else format.element.bits for format in formats)
        # A GPU without FP4 units runs FP4 at the rate of FP8, and one without these at the rate of BF16.
        able = [name for name, bits in _FLOAT_BITS.items() if bits >= widest and name in self.gpu.tflops]
        return 1e12 * self.gpu.tflops[able[0]]


_FLOAT_BITS = {"fp4": 4, "fp8": 8, "bf16": 16}

# Fields of a row of a latency table, with their types.
_ROW: dict[str, Any] = {
    "weight": str | None, "activation": str | None, "out": int, "in": int, "tokens": int, "seconds": float,
}  # fmt: skip


@dataclass(frozen=True)
class LatencyTable:
    """Measured times, from a JSON file.

        {"name": "h100", "bandwidth": 3.0e12,
         "times": [{"weight": "nvfp4", "activation": null, "out": 4096, "in": 4096, "tokens": 8, "seconds": 9e-6}, …]}

    `weight` and `activation` are formats by name, null for 16 bit. Between two numbers of tokens times are
    interpolated, beyond the last they grow with the tokens. A low-rank branch adds the time of reading it.
    """

    name: str
    bandwidth: float
    times: Mapping[tuple[str | None, str | None, int, int], Sequence[tuple[int, float]]]
    measured: bool = True

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a table."""
        return read_json(path, "a table of kernel times", cls._of_fields)

    @classmethod
    def _of_fields(cls, document: Any) -> Self:
        fields = typed(dict[str, Any], document, "table")
        times: dict[tuple[str | None, str | None, int, int], list[tuple[int, float]]] = {}
        for index, row in enumerate(typed(list[dict[str, Any]], fields.get("times"), "times")):
            weight, activation, out, inside, tokens, seconds = (
                typed(kind, row.get(key), f"times[{index}].{key}") for key, kind in _ROW.items()
            )
            times.setdefault((weight, activation, out, inside), []).append((tokens, float(seconds)))
        bandwidth = float(typed(float, fields.get("bandwidth"), "bandwidth"))
        points = [point for listed in times.values() for point in listed]
        if not all(0 < x < math.inf for x in (bandwidth, *(x for point in points for x in point))):
            raise ValueError("bandwidth, tokens and seconds must be finite and above zero")
        name = typed(str, fields.get("name"), "name")
        return cls(name, bandwidth, {key: sorted(listed) for key, listed in times.items()})

    def linear(self, layer: LayerPlan, tokens: int) -> float:
        """Returns the seconds of a matmul."""
        names = [f.name if f is not None else None for f in (layer.weight, layer.activation)]
        count = math.prod(layer.shape[:-2])  # experts; 1 for a plain linear
        branch = self.read(layer.parts.nbytes(layer.shape))
        points = self.times.get((names[0], names[1], layer.shape[-2], layer.shape[-1]))
        if points is None:
            pair = " with inputs in ".join(name or "16 bit" for name in names)
            raise ValueError(f"{layer.name} {list(layer.shape[-2:])}: table {self.name!r} has no time for {pair}")
        # Beyond the table a kernel is bound by arithmetic, so its time is proportional to the tokens.
        if tokens > points[-1][0]:
            return branch + count * points[-1][1] * tokens / points[-1][0]
        return branch + count * float(np.interp(tokens, [t for t, _ in points], [s for _, s in points]))

    def read(self, nbytes: int) -> float:
        """Returns seconds to read `nbytes`."""
        return nbytes / self.bandwidth


Timing = Roofline | LatencyTable
"""Seconds of kernels on one GPU."""


def get_timing(name: str, power: float | None = None) -> Timing:
    """Returns a GPU by name, in its mode of `power` watts, or a table by the path of its file."""
    if Path(name).suffix == ".json":
        return LatencyTable.load(name)
    gpu = current() if name == "local" else get_gpu(name)
    if not gpu.known:
        able = [each.name for each in GPUS.values() if each.capability == gpu.capability]
        raise ValueError(f"target {name}: the rates of {gpu} are not known; name a GPU ({listed(able or GPUS, 30)})")
    return Roofline(gpu if power is None else gpu.at_power(power))


# Sizes in powers of 1000 as disks and GPUs are sold, or of 1024 with an i; counts in powers of 1024 as contexts are.
_UNITS: dict[str, dict[str, float]] = {
    "size": {"": 1, "b": 1}
    | {f"{letter}{b}": 1000**n for n, letter in enumerate("kmgt", 1) for b in ("", "b")}
    | {f"{letter}i{b}": 1024**n for n, letter in enumerate("kmgt", 1) for b in ("", "b")},
    "count": {"": 1, "k": 1024, "m": 1024**2},
    "time": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6},
    "ratio": {"": 1, "%": 0.01},
    "power": {"w": 1, "kw": 1000},
}
_EXAMPLES = {
    "size": "24GB or 500MiB",
    "count": "32k or 4096",
    "time": "12ms or 0.5s",
    "ratio": "1% or 0.01",
    "power": "30W",
}


def parse_quantity(text: str, kind: str) -> float:
    """Returns a number with a unit of a kind: `24GB`, `32k` (1,024 each, as contexts are counted), `12ms`, `1%`."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)\s*([^0-9.]*?)\s*", text, re.IGNORECASE)
    units = _UNITS[kind]
    if match is None or match[2].lower() not in units or not 0 < float(match[1]) < math.inf:
        raise ValueError(f"{text!r} is not a {kind}; write it like {_EXAMPLES[kind]}")
    return float(match[1]) * units[match[2].lower()]
