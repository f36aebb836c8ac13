"""What llama.cpp has to know of a model besides its weights, and where the weights lie: `ARCHITECTURES`.

llama.cpp computes each architecture by code of its own, with numbers from the file's metadata and others that are
written in that code. `problems` of an architecture refuses a config with another value for one of the latter: the file
would load, and compute something else.

Tensors have llama.cpp's names, which the package gguf maps from those of transformers, and mostly the same values:

    permuted    rows of q and k: rotary embeddings turn pairs of neighbours there, and in transformers row i with row
                i + half, so the two halves of each head are interleaved
    shifted     weights of norms: Gemma's modules multiply by 1 + w, llama.cpp by w
"""

import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, require
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.recipes.layers import stacking_of

Fields = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes models of one `model_type`; `gguf_architectures.toml` explains the fields."""

    name: str
    coded: Mapping[str, Any] = field(default_factory=dict)
    checks: Sequence[str] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    computed: Sequence[str] = ()
    written: Fields = field(default_factory=dict)
    full_every: int = 0
    renamed: Mapping[str, str] = field(default_factory=dict)
    rope_types: Sequence[str] = ("default", "linear", "yarn", "llama3")
    permuted: bool = False
    shifted: bool = False
    scales: bool = False

    def shift(self, name: str) -> int:
        """Returns what llama.cpp's values of the parameter `name` are larger by."""
        return int(self.shifted and name.endswith("norm.weight"))

    def problems(self, config: Any) -> Iterator[str]:
        """Yields why llama.cpp would compute something else than a config says."""
        yield from _differs(config, **self.coded)
        for name in self.checks:
            yield from _CHECKS[name](config)
        yield from _windows(config, self.full_every) if self.full_every else ()

    def fields(self, config: Any) -> Fields:
        """Returns the metadata beyond those of every decoder."""
        copied = {key: getattr(config, name) for key, name in self.copied.items()}
        numbers = {key: value if isinstance(value, bool) else float(value) for key, value in copied.items()}
        return {
            **numbers,
            **self.written,
            **{k: v for name in self.computed for k, v in _COMPUTED[name](config).items()},
        }


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


def _gemma3_base(config: Any) -> Fields:
    return {"rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"])}


def _differs(config: Any, **coded: Any) -> Iterator[str]:
    """Yields the fields of a config that have another value than llama.cpp's code; one that is missing does not."""
    for name, value in coded.items():
        expected = None if value == "none" else value
        if (found := getattr(config, name, expected)) != expected:
            yield f"{name} is {found}, and {expected} in llama.cpp's code"


def _windows(config: Any, period: int) -> Iterator[str]:
    """Yields a problem unless every `period`-th block has full attention, and the others a sliding window."""
    types = list(getattr(config, "layer_types", None) or ())
    if types != ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(len(types))]:
        yield f"layer_types is not one full_attention in {period}, as in llama.cpp's code"


def _gemma(config: Any) -> Iterator[str]:
    # The 27B models divide by the width of the model over its heads; all others by that of a head.
    scale = {"gemma2": 46, "gemma3_text": 62}.get(config.model_type)
    usual = config.hidden_size // config.num_attention_heads if config.num_hidden_layers == scale else head_dim(config)
    yield from _differs(config, query_pre_attn_scalar=usual)


def _gemma3(config: Any) -> Iterator[str]:
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
        yield from _windows(config, 4)
        yield from _differs(config, sliding_window=4096)
    elif config.sliding_window:
        yield f"sliding_window is {config.sliding_window}, and llama.cpp's code has none with fewer than 64 blocks"


def _no_rope(config: Any) -> Iterator[str]:
    rotated = list(getattr(config, "no_rope_layers", None) or ())
    if rotated != [int((i + 1) % 4 != 0) for i in range(len(rotated))]:
        yield "no_rope_layers is not one block in 4, as in llama.cpp's code"


_COMPUTED = {"window": _window, "experts": _experts, "caps": _caps, "gemma3_base": _gemma3_base}
_CHECKS = {
    "gemma": _gemma, "gemma3": _gemma3, "qwen_window": _qwen_window, "all_sparse": _all_sparse,
    "whole_heads": _whole_heads, "exaone_window": _exaone_window, "no_rope": _no_rope,
}  # fmt: skip
ARCHITECTURES = {
    kind: Architecture(**entry)
    for kind, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}


def architecture_of(config: Any) -> Architecture:
    """Returns how llama.cpp computes a model of transformers; UserError, which names the reason, where it cannot."""
    kind = getattr(config, "model_type", None)
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{kind or 'a module without a config of transformers'}: no architecture that this exporter writes for "
            f"llama.cpp; it has {', '.join(sorted(ARCHITECTURES))}"
        )
    architecture = ARCHITECTURES[kind]
    for problem in architecture.problems(config):
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
        return fields, {"rope_freqs.weight": divisors_of(parameters, base, turned)}
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


def divisors_of(parameters: Mapping[str, Any], base: float, width: int) -> Tensor:
    """Returns what each rotary frequency of Llama 3.1 and later is divided by, float32 `[width / 2]`."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width) / (2 * math.pi)  # 1 / wavelength
    share = ((parameters["original_max_position_embeddings"] * turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - share) / parameters["factor"] + share)
    return divisors.float()


def tensor_names(model: nn.Module, architecture: Architecture) -> Callable[[str], str]:
    """Returns the function from the name of a part of a weight to llama.cpp's; UserError where it has none."""
    gguf, config = require("gguf", "hf"), cast(Any, model.config)
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)

    def stored_name(part: str) -> str:
        mapped = part
        for own, other in architecture.renamed.items():
            mapped = mapped.replace(own, other)
        stored: str | None = names.get_name(mapped, try_suffixes=(".weight", ".bias"))
        if stored is None:
            raise UserError(f"{part}: llama.cpp's {architecture.name} has no tensor for it")
        return stored

    return stored_name


def weights_of(model: nn.Module) -> Iterator[tuple[str, BlockScaledTensor | Tensor]]:
    """Yields the weights of a model by the names of their tensors; matrices of experts are `[experts, out, in]`."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    seen = dict(model.named_parameters(remove_duplicate=False))
    for path, module in model.named_modules():
        quantized = module.quantized_weight if isinstance(module, QuantizedModule) else None
        if quantized is not None:
            # Experts are a parameter of their module, and have no suffix.
            yield path if len(quantized.shape) == 3 else f"{path}.weight", quantized
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{last}"
            # A tied head is its embedding, unless that was quantized and it was not.
            if name in tied and seen.get(tied[name]) is parameter:
                continue
            stacking = stacking_of(module, last) if parameter.dim() == 3 else None
            yield name, parameter.detach() if stacking is None else stacking.matrices(parameter.detach())


def parts_of(
    name: str, weight: BlockScaledTensor | Tensor, architecture: Architecture, config: Any
) -> Iterator[tuple[str, BlockScaledTensor | Tensor]]:
    """Yields the tensors that llama.cpp has of one weight, by names that gguf maps, with its order of rows."""
    if architecture.permuted and (match := re.search(r"\.(q|k)_proj\.(?:weight|bias)$", name)):
        heads = (match[1] == "k" and config.num_key_value_heads) or config.num_attention_heads
        order = torch.arange(weight.shape[0], device="cpu").view(heads, 2, -1).transpose(1, 2).flatten()
        weight = take(weight, order)
    if ".experts." not in name:
        yield name, weight
        return
    experts, _, last = name.rpartition(".")
    projection, suffix = (last.removesuffix("_bias"), ".bias") if last.endswith("_bias") else (last, ".weight")
    if projection != "gate_up_proj":
        yield f"{experts}.{projection}{suffix}", weight
        return
    # Matrices have gate above up here; gpt-oss keeps its biases alternating.
    size = weight.shape[1 if suffix == ".bias" else -2]
    alternates = suffix == ".bias" and architecture.name == "gpt-oss"
    for index, half in enumerate(("gate_proj", "up_proj")):
        part = slice(index, None, 2) if alternates else slice(index * size // 2, (index + 1) * size // 2)
        own = weight[:, part] if suffix == ".bias" and isinstance(weight, Tensor) else take(weight, part)
        yield f"{experts}.{half}{suffix}", own


def take(weight: BlockScaledTensor | Tensor, rows: Tensor | slice) -> BlockScaledTensor | Tensor:
    """Returns rows `[..., out, in]` of the last but one dimension; of a vector, its elements."""
    if isinstance(weight, Tensor):
        return weight[rows] if weight.dim() == 1 else weight[..., rows, :]
    codes, scale = weight.codes[..., rows, :], weight.scale[..., rows, :]
    shape = (*weight.shape[:-2], *codes.shape[-2:-1], weight.shape[-1])
    return replace(weight, codes=codes, scale=scale, shape=shape)
