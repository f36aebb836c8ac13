"""What llama.cpp has to know of a model besides its weights: `ARCHITECTURES`, by the `model_type` of transformers.

llama.cpp computes each architecture by code of its own, with numbers from the file's metadata and others that are
written in that code. `check` of an architecture refuses a config with another value for one of the latter: the file
would load, and compute something else.

Tensors have llama.cpp's names, which the package gguf maps from those of transformers, and mostly the same values:

    permuted    rows of q and k: rotary embeddings turn pairs of neighbours there, and in transformers row i with row
                i + half, so the two halves of each head are interleaved
    shifted     weights of norms: Gemma's modules multiply by 1 + w, llama.cpp by w
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quant.base.errors import UserError

Fields = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes models of one `model_type`.

    Attributes:
        name: of llama.cpp, in front of the metadata.
        fields: the metadata beyond those of every decoder, from the config.
        check: yields why llama.cpp would compute something else than a config says.
        permuted: whether rows of q and k are interleaved.
        shifted: whether weights of norms grow by one.
        renamed: parts of transformers' names, and those that gguf maps to llama.cpp's.
        rope_types: scalings of rotary frequencies that its code knows.
        scales: whether its code multiplies by NVFP4's global scales. Others load such a file, and ignore the scales.
    """

    name: str
    fields: Callable[[Any], Fields] = lambda config: {}
    check: Callable[[Any], Iterator[str]] = lambda config: iter(())
    permuted: bool = False
    shifted: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default", "linear", "yarn", "llama3")
    scales: bool = False


def head_dim(config: Any) -> int:
    """Returns the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _window(config: Any) -> Fields:
    return {"attention.sliding_window": int(config.sliding_window)} if getattr(config, "sliding_window", None) else {}


def _experts(config: Any) -> Fields:
    own_width = config.model_type not in ("mixtral", "gpt_oss", "olmoe")
    width = config.moe_intermediate_size if own_width else config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None)
    count = getattr(config, "num_experts", None) or config.num_local_experts
    return {
        "expert_count": count,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": width,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def _caps(config: Any) -> Fields:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {name: float(value) for name in caps if (value := getattr(config, name, None)) is not None}


def _granite(config: Any) -> Fields:
    return {
        "attention.scale": float(config.attention_multiplier), "embedding_scale": float(config.embedding_multiplier),
        "residual_scale": float(config.residual_multiplier), "logit_scale": float(config.logits_scaling),
    }  # fmt: skip


def _differs(config: Any, **coded: Any) -> Iterator[str]:
    """Yields the fields of a config that have another value than llama.cpp's code; one that is missing does not."""
    for name, expected in coded.items():
        if (value := getattr(config, name, expected)) != expected:
            yield f"{name} is {value}, and {expected} in llama.cpp's code"


def _full_every(period: int) -> Callable[[Any], Iterator[str]]:
    """Returns a check that every `period`-th block has full attention, and the others a sliding window."""

    def check(config: Any) -> Iterator[str]:
        types = list(getattr(config, "layer_types", None) or ())
        coded = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(len(types))]
        if types != coded:
            yield f"layer_types is not one full_attention in {period}, as in llama.cpp's code"

    return check


def _activation(name: str) -> Callable[[Any], Iterator[str]]:
    return lambda config: _differs(
        config, **{"hidden_act" if hasattr(config, "hidden_act") else "hidden_activation": name}
    )


def _all(*checks: Callable[[Any], Iterator[str]]) -> Callable[[Any], Iterator[str]]:
    return lambda config: (problem for check in checks for problem in check(config))


def _gemma(config: Any) -> Iterator[str]:
    # The 27B models divide by the width of the model over its heads; all others by that of a head.
    scale = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    usual = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == scale else head_dim(config)
    yield from _differs(config, query_pre_attn_scalar=usual)


def _gemma3_fields(config: Any) -> Fields:
    base = config.rope_parameters["sliding_attention"]["rope_theta"]
    return _window(config) | _caps(config) | {"rope.freq_base_swa": float(base)}


def _gemma3_window(config: Any) -> Iterator[str]:
    local = config.rope_parameters.get("sliding_attention", {})
    yield from _differs(config, use_bidirectional_attention=False)
    if local.get("rope_type", "default") != "default":
        yield "rotary frequencies of sliding windows are scaled, and not in llama.cpp's code"


def _qwen_window(config: Any) -> Iterator[str]:
    if getattr(config, "use_sliding_window", False):
        yield "use_sliding_window is true, and llama.cpp has full attention for it"


def _all_sparse(config: Any) -> Iterator[str]:
    if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
        yield "some blocks have no experts, and llama.cpp has them in all"


def _whole_heads(config: Any) -> Iterator[str]:
    if (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor is not 1, and llama.cpp turns whole heads"


def _exaone_window(config: Any) -> Iterator[str]:
    # The code has windows for the 32B model, which it knows by its blocks, and rotates only within windows there.
    if config.num_hidden_layers == 64:
        yield from _full_every(4)(config)
        yield from _differs(config, sliding_window=4096)
    elif config.sliding_window:
        yield f"sliding_window is {config.sliding_window}, and llama.cpp's code has none with fewer than 64 blocks"


def _no_rope(config: Any) -> Iterator[str]:
    rotated = list(getattr(config, "no_rope_layers", None) or ())
    if rotated != [int((i + 1) % 4 != 0) for i in range(len(rotated))]:
        yield "no_rope_layers is not one block in 4, as in llama.cpp's code"


_SILU = _activation("silu")
_LLAMA = _all(_SILU, _whole_heads)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", check=_LLAMA, permuted=True, scales=True),
    "mistral": Architecture("llama", check=_LLAMA, permuted=True, scales=True),
    "mixtral": Architecture("llama", _experts, _LLAMA, permuted=True, scales=True),
    "arcee": Architecture("arcee", check=_activation("relu2"), permuted=True),
    "smollm3": Architecture("smollm3", check=_all(_SILU, _qwen_window, _no_rope), permuted=True),
    "granite": Architecture("granite", _granite, _LLAMA, permuted=True),
    "qwen2": Architecture("qwen2", check=_all(_SILU, _qwen_window)),
    "qwen3": Architecture("qwen3", check=_all(_SILU, _qwen_window), scales=True),
    "qwen2_moe": Architecture(
        "qwen2moe",
        _experts,
        _all(_SILU, _qwen_window, _all_sparse, lambda c: _differs(c, norm_topk_prob=False)),
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        _experts,
        _all(_SILU, _qwen_window, _all_sparse, lambda c: _differs(c, norm_topk_prob=True)),
        scales=True,
    ),
    "olmo2": Architecture("olmo2", check=_SILU),
    "olmoe": Architecture("olmoe", _experts, _all(_SILU, lambda c: _differs(c, norm_topk_prob=False, clip_qkv=None))),
    "seed_oss": Architecture("seed_oss", check=_SILU),
    "ernie4_5": Architecture("ernie4_5", check=_SILU),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", check=_SILU),
    "exaone4": Architecture("exaone4", check=_all(_SILU, _exaone_window)),
    "glm4": Architecture("glm4", check=_SILU),
    "starcoder2": Architecture("starcoder2", check=_activation("gelu_pytorch_tanh")),
    "stablelm": Architecture(
        "stablelm", lambda c: {"use_parallel_residual": c.use_parallel_residual}, check=_SILU
    ),
    "phi": Architecture("phi2", check=lambda c: _differs(c, hidden_act="gelu_new", qk_layernorm=False)),
    "phi3": Architecture(
        "phi3",
        lambda c: {"attention.sliding_window": int(c.sliding_window or 0)},
        _SILU,
        rope_types=("default", "longrope"),
    ),
    "gemma": Architecture("gemma", check=_whole_heads, shifted=True),
    "gemma2": Architecture(
        "gemma2", lambda c: _window(c) | _caps(c), _all(_gemma, _full_every(2)), shifted=True
    ),
    "gemma3_text": Architecture(
        "gemma3", _gemma3_fields, _all(_gemma, _gemma3_window, _full_every(6)), shifted=True
    ),
    "gpt_oss": Architecture(
        "gpt-oss", lambda c: _window(c) | _experts(c), _full_every(2),
        renamed={"self_attn.sinks": "self_attn.sinks.weight"}, rope_types=("default", "yarn"),
    ),
    "cohere": Architecture(
        "command-r", lambda c: {"logit_scale": float(c.logit_scale), "rope.scaling.type": "none"}, _SILU
    ),
    "cohere2": Architecture(
        "cohere2", lambda c: _window(c) | {"logit_scale": float(c.logit_scale), "rope.scaling.type": "none"},
        _all(_SILU, _full_every(4)), scales=True,
    ),
}  # fmt: skip
"""Architectures that were run in llama.cpp and compared with PyTorch (`benchmarks/gguf_architectures.py`)."""


def architecture_of(config: Any) -> Architecture:
    """Returns how llama.cpp computes a model of transformers; UserError, which names the reason, where it cannot."""
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{kind or 'a module without a config of transformers'}: no architecture that this exporter writes for "
            f"llama.cpp; it has {', '.join(sorted(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[kind]
    for problem in architecture.check(config):
        raise UserError(f"{kind}: {problem}: the file would compute something else, so it is not written")
    parameters = getattr(config, "rope_parameters", None) or {}
    scaling = parameters.get("full_attention", parameters).get("rope_type", "default")
    if scaling not in architecture.rope_types:
        raise UserError(
            f"{kind}: its rotary frequencies are scaled by {scaling}, which llama.cpp's {architecture.name} does not "
            f"know; it has {', '.join(architecture.rope_types)}"
        )
    return architecture


def metadata_of(config: Any, architecture: Architecture) -> tuple[Fields, dict[str, Tensor]]:
    """Returns the metadata of a config, without the architecture's name in front, and tensors of frequencies."""
    width = head_dim(config)
    norm = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"} if hasattr(config, "rms_norm_eps") else {}
    for name in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if not norm and hasattr(config, name):
            norm = {"attention.layer_norm_epsilon": name}
    fields: Fields = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        **{key: float(getattr(config, name)) for key, name in norm.items()},
    }
    rope, factors = _rope(config, architecture, width)
    return fields | rope | architecture.fields(config), factors


def _rope(config: Any, architecture: Architecture, width: int) -> tuple[Fields, dict[str, Tensor]]:
    """Returns metadata and tensors of rotary embeddings, in one of the architecture's `rope_types`."""
    parameters = config.rope_parameters or {}
    parameters = parameters.get("full_attention", parameters)
    kind, base = parameters.get("rope_type", "default"), float(parameters["rope_theta"])
    turned = int(width * parameters.get("partial_rotary_factor", 1.0))
    fields: Fields = {"rope.dimension_count": turned, "rope.freq_base": base}
    factor = float(parameters.get("factor") or 1.0)
    original = int(parameters.get("original_max_position_embeddings") or config.max_position_embeddings)
    if kind == "llama3":
        return fields, {"rope_freqs.weight": _divisors(parameters, base, turned)}
    if kind == "linear":
        return fields | {"rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
    if kind == "yarn":
        fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        fields |= {"rope.scaling.original_context_length": original}
        usual = 0.1 * math.log(factor) + 1.0
        if (attention := parameters.get("attention_factor")) is not None:
            # llama.cpp multiplies the factor of the YaRN paper by it; in transformers it replaces that factor.
            fields["rope.scaling.attn_factor"] = float(attention) / usual
        for ours, key in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
            if parameters.get(ours) is not None:
                fields[f"rope.scaling.{key}"] = float(parameters[ours])
    if kind == "longrope":
        factor = config.max_position_embeddings / original
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        fields["rope.scaling.original_context_length"] = original
        fields["rope.scaling.attn_factor"] = float(parameters.get("attention_factor") or usual)
        return fields, {
            f"rope_factors_{length}.weight": torch.tensor(parameters[f"{length}_factor"], dtype=torch.float32)
            for length in ("long", "short")
        }
    return fields, {}


def _divisors(parameters: Mapping[str, Any], base: float, width: int) -> Tensor:
    """Returns what each rotary frequency of Llama 3.1 and later is divided by, float32 `[width / 2]`."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)  # 1 / wavelength
    share = ((parameters["original_max_position_embeddings"] * turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors.float()
