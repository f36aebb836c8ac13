"""Rotary embeddings of a GGUF file: `set_rope` carries their scaling into the transformers config.

transformers reads the base of the frequencies from a GGUF file and drops everything that changes them. llama.cpp stores
it in two places. The metadata name a scaling (linear, YaRN, LongRoPE) with its numbers:

    ARCH.rope.scaling.type, .factor, .original_context_length, .attn_factor, .yarn_beta_fast, …

A tensor `rope_freqs.weight` divides each frequency by a number. Llama 3.1, 3.2 and 3.3 are stored so. Their divisor is
1 for waves much shorter than the context C of the first training, F for much longer ones, and interpolated between:

    1 / divisor = (1 - s) / F + s        s = (C / wavelength - low) / (high - low), within [0, 1]

The file has no F, C, low or high. s is a line over 1 / wavelength, so two divisors between 1 and F give it, up to a
common multiple of C, low and high; `low` is 1 in all models. Numbers are accepted if they give all divisors back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant.base.errors import UserError

FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a GGUF file that hold divisors of rotary frequencies, and no weights."""
_TOLERANCE = 1e-4  # relative; the divisors are float32, computed by different programs
_USUAL_CONTEXTS = (8192, 4096, 2048, 16384, 32768)  # where no divisor shows it; Llama 3 has the first
_EMPTY = (None, 0, 0.0, "none")


def set_rope(config: Any, file: Any) -> None:
    """Gives a config the scaling of rotary frequencies that its GGUF file has.

    Args:
        config: a config of transformers, as it reads it from the file; `rope_parameters` is changed in place.
        file: a `gguf.GGUFReader`.

    Raises:
        UserError: a scaling that transformers has no name for; the message names the key or tensor.
    """
    architecture = file.fields["general.architecture"].contents()
    fields = {
        key.removeprefix(f"{architecture}.rope."): field.contents()
        for key, field in file.fields.items()
        if key.startswith(f"{architecture}.rope.")
    }
    tensors = {t.name: np.asarray(t.data, np.float64) for t in file.tensors if t.name in FREQUENCY_TENSORS}
    parameters = getattr(config, "rope_parameters", None)
    # Gemma 3 and 4 have parameters for each kind of layer; llama.cpp scales only full attention.
    if isinstance(parameters, dict) and "full_attention" in parameters:
        parameters = parameters["full_attention"]
    scaling = _of_metadata(fields, config.max_position_embeddings) if hasattr(config, "max_position_embeddings") else {}
    if "rope_freqs.weight" in tensors and not _are_proportional(parameters, tensors["rope_freqs.weight"]):
        if scaling:
            raise UserError(
                f"rope_freqs.weight and rope.scaling.type {scaling['rope_type']} scale the same frequencies"
            )
        scaling = _of_divisors(tensors["rope_freqs.weight"], _base(parameters, fields), config)
    if "rope_factors_long.weight" in tensors or scaling.get("rope_type") == "longrope":
        scaling = _longrope(fields, tensors)
    if not scaling:
        return
    if not isinstance(parameters, dict):
        raise UserError(
            f"its rotary frequencies are scaled ({_key(fields)}), and transformers' {type(config).__name__} has no "
            "parameters for it; open the Hugging Face directory of the model"
        )
    parameters |= scaling
    # Phi 3 keeps this number next to its parameters too.
    if hasattr(config, "original_max_position_embeddings") and "original_max_position_embeddings" in scaling:
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]


def _key(fields: Mapping[str, Any]) -> str:
    return next((f"rope.{key}" for key in fields if key.startswith("scal")), "rope_freqs.weight")


def _base(parameters: Any, fields: Mapping[str, Any]) -> float:
    base = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(base or fields.get("freq_base") or 10000.0)


def _of_metadata(fields: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Returns the scaling that metadata name, as `rope_parameters` has it; empty without one.

    Args:
        fields: the fields of the file, by their names below `ARCH.rope.`.
        context: the longest position of the model.
    """
    factor = float(fields.get("scaling.factor") or fields.get("scale_linear") or 1.0)
    # llama.cpp treats a factor without a type as linear.
    kind = fields.get("scaling.type", "linear")
    if kind == "longrope":
        return {"rope_type": "longrope"}
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UserError(f"rope.scaling.type is {kind!r}; known: none, linear, yarn, longrope")
    for key, usual in {"scaling.yarn_ext_factor": (1.0, -1.0), "scaling.alpha": ()}.items():
        if fields.get(key) not in (*_EMPTY, *usual):
            raise UserError(f"rope.{key} is {fields[key]}, which transformers' YaRN has no parameter for")
    original = int(fields.get("scaling.original_context_length") or context)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for key, ours in {"scaling.yarn_beta_fast": "beta_fast", "scaling.yarn_beta_slow": "beta_slow"}.items():
        if fields.get(key) not in (*_EMPTY, -1.0):
            scaling[ours] = float(fields[key])
    attention = fields.get("scaling.yarn_attn_factor") or fields.get("scaling.attn_factor")
    if attention not in (*_EMPTY, 1.0, -1.0):
        # llama.cpp multiplies it by the factor of the YaRN paper; in transformers it replaces that factor.
        scaling["attention_factor"] = float(attention) * (0.1 * math.log(factor) + 1.0)
    if fields.get("scaling.yarn_log_multiplier") not in _EMPTY:
        raise UserError("rope.scaling.yarn_log_multiplier: no architecture that transformers reads from GGUF has it")
    return scaling


def _longrope(fields: Mapping[str, Any], tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Returns LongRoPE's divisors: for texts within the context of the first training, and for longer ones."""
    original = fields.get("scaling.original_context_length")
    missing = [name for name in FREQUENCY_TENSORS[1:] if name not in tensors]
    if missing or not original:
        raise UserError(
            f"LongRoPE without {missing[0] if missing else 'rope.scaling.original_context_length'}; convert the file "
            "again from the original model"
        )
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": tensors["rope_factors_long.weight"].tolist(),
        "short_factor": tensors["rope_factors_short.weight"].tolist(),
        "original_max_position_embeddings": int(original),
    }
    if attention := fields.get("scaling.attn_factor"):
        scaling["attention_factor"] = float(attention)
    return scaling


def _are_proportional(parameters: Any, divisors: np.ndarray[Any, Any]) -> bool:
    """Returns whether divisors only switch off the frequencies that Gemma 4 leaves out.

    Its config says how many rotate.
    """
    if not isinstance(parameters, dict) or parameters.get("rope_type") != "proportional":
        return False
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * len(divisors))
    return bool((divisors[:rotated] == 1).all() and (divisors[rotated:] > 1e20).all())


def _of_divisors(divisors: np.ndarray[Any, Any], base: float, config: Any) -> dict[str, Any]:
    """Returns the `llama3` scaling whose divisors of frequencies these are; empty where all are 1."""
    if (divisors == 1).all():
        return {}
    turns = base ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)  # 1 / wavelength, in tokens
    factor = float(divisors.max())
    for low, high, context in _candidates(divisors, turns, factor):
        scaling: dict[str, Any] = {
            "rope_type": "llama3", "factor": _rounded(factor), "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }  # fmt: skip
        share = np.clip((context * turns - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - share) / scaling["factor"] + share), divisors, rtol=_TOLERANCE, atol=0):
            return scaling
    raise UserError(
        f"rope_freqs.weight: its {len(divisors)} divisors of the rotary frequencies are not those of Llama 3 with any "
        f"context, and {type(config).__name__} has no other name for them; open the Hugging Face directory of the model"
    )


def _candidates(
    divisors: np.ndarray[Any, Any], turns: np.ndarray[Any, Any], factor: float
) -> Sequence[tuple[float, float, int]]:
    """Returns the values of low, high and the context that may have given the divisors, the most likely first."""
    if factor <= 1:
        return []
    between = np.flatnonzero((divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE)))
    share = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    contexts = list(_USUAL_CONTEXTS)
    if len(between):
        # Low is 1 and high is 4 in all models: one divisor gives the context.
        contexts.insert(0, round(float((share[0] * 3 + 1) / turns[between[0]])))
    else:
        # Any context will do that lies between the longest wave that stays and the shortest that is divided.
        undivided, divided = turns[divisors <= 1 + _TOLERANCE], turns[divisors > 1 + _TOLERANCE]
        contexts.append(round(1 / float(divided.max())))
        contexts += [math.ceil(4 / float(undivided.min()))] if len(undivided) else []
    candidates = [(1.0, 4.0, context) for context in contexts]
    if len(between) > 1:
        slope, intercept = np.polyfit(turns[between], share, 1)
        if intercept < 0:  # else `low` would not be positive
            high = _rounded(1 - 1 / float(intercept))
            candidates.append((1.0, high, round(float(slope) * (high - 1))))
    return candidates


def _rounded(number: float) -> float:
    """Returns a float32 number as a person would have written it."""
    return float(f"{number:.6g}")
