"""A GGUF file holds config, vocabulary and block-quantized weights; the model comes from it dequantized.

A file of `write_gguf`, which has the whole config, is read as it was written; transformers loads any other one. This
file alone touches private parts of the gguf package and of transformers' GGUF loader (tried with gguf 0.17 to 0.19 and
transformers 5.17 to 5.24, and by `tests/quant/models/test_open.py`). The loader parses the file for the config, the
weights and the tokenizer, in three to five seconds each for a vocabulary of 49,152 tokens, and makes the table of
tensor names for every submodule. `shared_parsing` replaces functions of the gguf package within a `with` block by
versions that do the same work once, and on all cores.
"""

import contextlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.errors import UserError, listed, option, require, warn
from quant.models import gguf_architectures as llama_cpp
from quant.models import huggingface
from quant.models.files import check_fields, explained, one_line
from quant.recipes.blocks import replaced
from quant.recipes.layers import stacking_of

# Rotary embeddings of a GGUF file: `set_rope` carries their scaling into the transformers config.
#
# transformers reads the base of the frequencies from a GGUF file and drops everything that changes them. llama.cpp
# stores it in two places. The metadata name a scaling (linear, YaRN, LongRoPE) with its numbers:
#
#     ARCH.rope.scaling.type, .factor, .original_context_length, .attn_factor, .yarn_beta_fast, …
#
# A tensor `rope_freqs.weight` divides each frequency by a number. Llama 3.1, 3.2 and 3.3 are stored so. Their divisor
# is 1 for waves much shorter than the context C of the first training, F for much longer ones, and interpolated
# between:
#
#     1 / divisor = (1 - s) / F + s        s = (C / wavelength - low) / (high - low), within [0, 1]
#
# The file has no F, C, low or high. s is a line over 1 / wavelength, so two divisors between 1 and F give it, up to a
# common multiple of C, low and high; `low` is 1 in all models. Numbers are accepted if they give all divisors back.

FREQUENCY_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors of a GGUF file that hold divisors of rotary frequencies, and no weights."""
_TOLERANCE = 1e-4  # relative; the divisors are float32, computed by different programs
_USUAL_CONTEXTS = (8192, 4096, 2048, 16384, 32768)  # where no divisor shows it; Llama 3 has the first
_EMPTY = (None, 0, 0.0, "none")


def set_rope(config: Any, file: Any) -> None:
    """Gives a config of transformers, whose `rope_parameters` change, the scaling that its GGUF file has."""
    prefix = f"{file.fields['general.architecture'].contents()}.rope."
    fields = {key.removeprefix(prefix): f.contents() for key, f in file.fields.items() if key.startswith(prefix)}
    tensors = {t.name: np.asarray(t.data, np.float64) for t in file.tensors if t.name in FREQUENCY_TENSORS}
    parameters = getattr(config, "rope_parameters", None)
    # Gemma 3 and 4 have parameters for each kind of layer; llama.cpp scales only full attention.
    if isinstance(parameters, dict) and "full_attention" in parameters:
        parameters = parameters["full_attention"]
    scaling = _of_metadata(fields, config.max_position_embeddings) if hasattr(config, "max_position_embeddings") else {}
    divisors = tensors.get("rope_freqs.weight")
    if divisors is not None and not _are_proportional(parameters, divisors):
        if scaling:
            raise UserError(
                f"rope_freqs.weight and rope.scaling.type {scaling['rope_type']} scale the same frequencies"
            )
        base = parameters.get("rope_theta") if isinstance(parameters, dict) else None
        scaling = _of_divisors(divisors, float(base or fields.get("freq_base") or 10000.0), config)
    if "rope_factors_long.weight" in tensors or scaling.get("rope_type") == "longrope":
        original, attention = fields.get("scaling.original_context_length"), fields.get("scaling.attn_factor")
        missing = [name for name in FREQUENCY_TENSORS[1:] if name not in tensors]
        if missing or not original:
            lacks = missing[0] if missing else "rope.scaling.original_context_length"
            raise UserError(f"LongRoPE without {lacks}; convert the file again from the original model")
        long, short = (tensors[name].tolist() for name in FREQUENCY_TENSORS[1:])
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "original_max_position_embeddings": int(original),
            **({"attention_factor": float(attention)} if attention else {}),
        }
    if not scaling:
        return
    if not isinstance(parameters, dict):
        key = next((f"rope.{key}" for key in fields if key.startswith("scal")), "rope_freqs.weight")
        raise UserError(
            f"its rotary frequencies are scaled ({key}), and transformers' {type(config).__name__} has no "
            "parameters for it; open the Hugging Face directory of the model"
        )
    parameters |= scaling
    # Phi 3 keeps this number next to its parameters too.
    if hasattr(config, "original_max_position_embeddings") and "original_max_position_embeddings" in scaling:
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]


def _of_metadata(fields: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Returns the scaling that metadata name, as `rope_parameters` has it; `context` is the longest position."""
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


def _are_proportional(parameters: Any, divisors: np.ndarray[Any, Any]) -> bool:
    """Returns whether divisors only switch off the frequencies that Gemma 4, whose config says so, leaves out."""
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
            "rope_type": "llama3", "factor": float(f"{factor:.6g}"), "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }  # fmt: skip
        if np.allclose(llama_cpp.divisors_of(scaling, base, 2 * len(turns)), divisors, rtol=_TOLERANCE, atol=0):
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
            high = float(f"{1 - 1 / float(intercept):.6g}")
            candidates.append((1.0, high, round(float(slope) * (high - 1))))
    return candidates


# `check_tokens` compares a tokenizer that transformers made of a GGUF file with the metadata of that file.
#
# transformers builds such a tokenizer from parts, by rules that change from version to version. One that starts no text
# with its first token, or that has the vocabulary of another model, raises no error: calibration and evaluation then
# run on garbage. The file itself has the right values, of which a missing `add_bos_token` means llama.cpp's defaults.

_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6  # llama.cpp's types of tokens; the others are never matched
_BEGIN_BY_DEFAULT = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
)  # fmt: skip
"""Kinds of pre-tokenization with which llama.cpp puts BOS before a text if `add_bos_token` is missing."""
_TEXT = "Hello world, it is 1999:\n  def naïve(café):\n\treturn '日本語' + \"🙂\""


def check_tokens(tokenizer: Any, fields: Mapping[str, Any]) -> None:
    """Gives a tokenizer its file's flags for BOS and EOS; UserError where it still disagrees with the file's fields."""
    metadata = partial(_value, fields, "tokenizer.ggml.")
    model, tokens = metadata("model"), metadata("tokens", ())
    types = metadata("token_type") or [_NORMAL] * len(tokens)
    problems = [
        *_vocabulary_problems(tokenizer, tokens, types),
        *_merge_problems(tokenizer, metadata("merges") if model == "gpt2" else None),
    ]
    # transformers follows the reference of Gemma 4, whose chat template writes BOS, and not its file.
    if model != "gemma4":
        by_default = model == "llama" or metadata("pre") in _BEGIN_BY_DEFAULT
        for name, default in {"bos": by_default, "eos": False}.items():
            adds, token = bool(metadata(f"add_{name}_token", default)), metadata(f"{name}_token_id")
            problems += _edge_problems(tokenizer, name, token, adds=adds)
    # Where each byte has a token, in the byte alphabet or as <0x41>, a text is encoded and decoded.
    spelled = _alphabet() if model == "gpt2" else [f"<0x{byte:02X}>" for byte in range(256)]
    if model in ("gpt2", "llama", "gemma4") and set(tokens).issuperset(spelled):
        ids = tokenizer(_TEXT)["input_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if text.strip() != _TEXT:
            problems.append(f"{_TEXT!r} is {text!r} after it was encoded and decoded")
    if problems:
        raise UserError(problems[0])


def _value(fields: Mapping[str, Any], prefix: str, key: str, default: Any = None) -> Any:
    field = fields.get(f"{prefix}{key}")
    return default if field is None else field.contents()


def _vocabulary_problems(tokenizer: Any, tokens: Sequence[str], types: Sequence[int]) -> Iterator[str]:
    """Yields the first id with another token in the tokenizer than in the file; any of several ids of one will do."""
    matched = [i for i, kind in enumerate(types) if kind in (_NORMAL, _CONTROL, _USER_DEFINED, _BYTE)]
    read = tokenizer.convert_ids_to_tokens(list(range(len(tokens))))
    ids = Counter(map(_spelling, tokens))
    for i in matched:
        # T5's files call its sentinels, <extra_id_0> and so on, [PAD32000].
        if tokens[i].startswith("[PAD") or ids[_spelling(tokens[i])] > 1:
            continue
        if read[i] is None or _spelling(read[i]) != _spelling(tokens[i]):
            yield f"token {i} is {tokens[i]!r} in the file, and {read[i]!r} as it is read"
            return


def _merge_problems(tokenizer: Any, merges: Sequence[str] | None) -> Iterator[str]:
    """Yields the first pair that is merged in another order than the file says."""
    if not merges:
        return
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    read = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    if len(read) != len(merges):
        yield f"the file has {len(merges):,} merges, and {len(read):,} are read"
    elif read != list(merges):
        i = next(i for i, merge in enumerate(merges) if merge != read[i])
        yield f"merge {i} is {merges[i]!r} in the file, and {read[i]!r} as it is read"


def _edge_problems(tokenizer: Any, name: str, token: int | None, *, adds: bool) -> Iterator[str]:
    """Yields a problem if BOS or EOS is not added as the file says, after the tokenizer was set up for it."""
    if token is None or _adds(tokenizer, name, token) == adds:
        return
    if hasattr(tokenizer, f"add_{name}_token"):
        # A property of fast tokenizers, which changes what surrounds a text; it is saved with the tokenizer.
        setattr(tokenizer, f"add_{name}_token", adds)
    if _adds(tokenizer, name, token) != adds:
        verb = "adds no" if adds else "adds"
        yield f"it {verb} {name.upper()} (token {token}) to a text, against the file's add_{name}_token"


def _adds(tokenizer: Any, name: str, token: int) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and ids[0 if name == "bos" else -1] == token


def _spelling(token: str) -> bytes:
    """Returns the bytes that a token stands for: transformers spells some tokens in another alphabet than the file."""
    alphabet = _alphabet()
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.replace("\u2581", " ").encode("utf-8", "surrogateescape")


@cache
def _alphabet() -> dict[str, int]:
    """Returns the byte of each character of GPT-2's byte alphabet, which spells bytes by printable characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(unprintable)}


OWN_CONFIG = "blockscale.config"
"""The key under which `write_gguf` keeps the whole config.json of a model, of which llama.cpp's metadata are a part."""
_LOADER = "transformers.modeling_gguf_pytorch_utils"
_BLOCK = re.compile(r"blk\.(\d+)\.")
# Frequencies of rotary embeddings: `set_rope` reads the first kinds, and transformers computes the last.
_COMPUTED = re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$|\.attn_rot_embd\.")


def load(path: Path, dtype: torch.dtype | None, meta: bool) -> tuple[nn.Module, str | None]:
    """Returns the model in a GGUF file, dequantized, and the types of its blocks; `meta` reads the header alone."""
    transformers = require("transformers", "hf")
    require("accelerate", "hf")
    options: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(transformers, "GgufConfig"):  # transformers that can keep the blocks do it by default
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with huggingface.quiet(), shared_parsing():
        config = read_config(path)
        cls = huggingface.model_class(config, str(path))
        file = require("gguf", "hf").GGUFReader(path)
        stored = {tensor.name: tensor for tensor in file.tensors}
        own_dtype, types = _main_type(stored.values())
        dtype = dtype or own_dtype
        if meta:
            model = huggingface.outline(cls, config, dtype, path)
        elif OWN_CONFIG in file.fields:
            model = _read_own(cls, config, dtype, path, stored)
        else:
            # NVFP4's global scales, float32, by the names of the tensors that they multiply.
            scales = {n: stored.get(n.replace(".weight", ".scale")) for n in stored if n.endswith(".weight")}
            second = {name: np.array(scale.data, np.float32) for name, scale in scales.items() if scale is not None}
            with _dropped_tensors(second) as dropped:
                model, unused = huggingface.read_model(cls, config, dtype, path.parent, **options)
            _refuse_dropped(model, path, sorted({*dropped, *unused}))
            huggingface.patch_forward(model)
    # The config gets the original model's architecture, and loses every trace of the file.
    own: Any = model.config
    own.architectures, own._name_or_path = [type(model).__name__], ""
    if hasattr(own, "_model_name_or_path"):  # the file's `general.name`, which the loader files under this name
        del own._model_name_or_path
    return model, types


def _read_own(cls: Any, config: Any, dtype: torch.dtype, path: Path, stored: Mapping[str, Any]) -> nn.Module:
    """Returns the model of a file that `write_gguf` wrote: its tensors in the rows where they were taken from."""
    codecs, architecture = require("gguf.quants", "hf"), llama_cpp.architecture_of(config)
    huggingface.outline(cls, config, dtype, path)  # whose size is checked
    with explained(path), require("accelerate", "hf").init_empty_weights(include_buffers=False):
        model = cls._from_config(config, dtype=dtype).eval()
    model.tie_weights()  # which the context undoes
    stored_name, state, used = llama_cpp.tensor_names(model, architecture), dict[str, Tensor](), set[str]()
    for name, weight in cast(Any, llama_cpp.weights_of(model)):
        axis = weight.dim() - (1 if weight.dim() == 1 or name.endswith("_bias") else 2)  # experts' are [experts, out]
        rows = torch.arange(weight.shape[axis]).view([-1 if i == axis else 1 for i in range(weight.dim())])
        whole = torch.empty(weight.shape, dtype=weight.dtype)
        for part, places in cast(Any, llama_cpp.parts_of(name, rows, architecture, config)):
            tensor, scale = (stored.get(key := stored_name(part)), stored.get(key.replace(".weight", ".scale")))
            shape = [*weight.shape[:axis], places.numel(), *weight.shape[axis + 1 :]]
            if tensor is None or tensor.n_elements != math.prod(shape):
                raise UserError(f"{path}: {key} is missing or of another size than its config says; export it again")
            used |= {key, scale.name if scale is not None else key}
            values = torch.tensor(codecs.dequantize(tensor.data, tensor.tensor_type)).view(shape)
            if scale is not None and scale is not tensor:
                values = values * torch.tensor(scale.data).view(-1, *[1] * (values.dim() - 1))
            whole.index_copy_(axis, places.flatten(), (values - architecture.shift(name)).to(whole.dtype))
        module, _, last = name.rpartition(".")
        stacking = stacking_of(model.get_submodule(module), last) if weight.dim() == 3 else None
        state[name] = whole if stacking is None else stacking.parameter(whole)
    _refuse_dropped(model, path, sorted(stored.keys() - used))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    return model


def _main_type(tensors: Iterable[Any]) -> tuple[torch.dtype, str | None]:
    """Returns bfloat16, or the dtype of a file without blocks whose numbers that changes; and the types of blocks."""
    by_size = sorted((t for t in tensors if len(t.shape) > 1), key=lambda t: -int(t.n_elements))
    counts = Counter(tensor.tensor_type.name for tensor in by_size)
    blocks = [kind for kind, _ in counts.most_common() if kind not in ("F64", "F32", "F16", "BF16")]
    largest, dtype = next(iter(by_size), None), torch.bfloat16
    if not blocks and largest is not None and largest.tensor_type.name in ("F32", "F16"):
        numbers = torch.from_numpy(largest.data.reshape(-1)[: 2**20].copy())
        dtype = dtype if torch.equal(numbers.to(dtype).to(numbers.dtype), numbers) else numbers.dtype
    return dtype, listed(blocks, 4) or None


@contextlib.contextmanager
def _dropped_tensors(global_scales: Mapping[str, np.ndarray[Any, Any]]) -> Iterator[list[str]]:
    """Collects, while open, the tensors of a GGUF file that transformers has no name for and silently drops.

    NVFP4's global scales, of which it knows nothing, are multiplied with their weights.
    """
    dropped: list[str] = []

    def recording(process: Any) -> Any:
        """Returns a processor's method, called for each tensor, that also notes those without a name."""

        def process_and_record(self: Any, weights: Any, name: str, **options: Any) -> Any:
            if name.replace(".scale", ".weight") in global_scales and name not in global_scales:
                return require(_LOADER, "hf").GGUFTensor(weights, None, {})
            if name in global_scales:  # one number, or one for each expert
                weights = weights * global_scales[name].reshape(-1, *[1] * (weights.ndim - 1))
            result = process(self, weights=weights, name=name, **options)  # its name is None if it is in the model now
            if result.name is not None and result.name not in options["tensor_key_mapping"]:
                dropped.append(name)
            return result

        return process_and_record

    with contextlib.ExitStack() as stack:
        # Releases of transformers without this module report such tensors as they do for safetensors.
        if find_spec(_LOADER):
            loader = require(_LOADER, "hf")
            for processor in {loader.TensorProcessor, *loader.TENSOR_PROCESSORS.values()}:
                stack.enter_context(replaced([(processor, "process", recording(processor.process))]))
        yield dropped


def _refuse_dropped(model: Any, path: Path, names: list[str]) -> None:
    """Raises UserError for tensors that change the result; prediction heads, which do not, are a warning.

    A head for multi-token prediction is a block after the last one of the config, or named `nextn`.
    """
    gguf = require("gguf", "hf")
    blocks = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    heads, dropped = [], []

    def repeats_embedding() -> bool:
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        head, embedding = stored["output.weight"], stored.get("token_embd.weight")
        return embedding is not None and head.data.tobytes() == embedding.data.tobytes()

    for name in names:
        block = _BLOCK.match(name)
        if ".nextn." in name or (block is not None and blocks is not None and int(block[1]) >= blocks):
            heads.append(name)
        # Tied embeddings may be in the file twice.
        elif not _COMPUTED.search(name) and not (name == "output.weight" and repeats_embedding()):
            dropped.append(name)
    version = require("transformers", "hf").__version__
    if dropped:
        raise UserError(
            f"{path}: transformers {version} leaves out {listed(dropped, 3)}, and {type(model).__name__} would compute "
            "something else without them; open the Hugging Face directory of the model, or try another version"
        )
    if heads:
        warn(
            f"{path}: transformers {version} leaves out {listed(heads, 3)}, a head for multi-token prediction, which "
            "the result lacks"
        )


def load_tokenizer(path: Path) -> Any:
    """Returns the tokenizer whose vocabulary a GGUF file holds; UserError where this transformers misreads it."""
    gguf, transformers = require("gguf", "hf"), require("transformers", "hf")
    with shared_parsing():
        fields = gguf.GGUFReader(path).fields
        own = fields.get("general.architecture")
        if OWN_CONFIG in fields and own.contents() not in require(_LOADER, "hf").GGUF_SUPPORTED_ARCHITECTURES:
            # The loader refuses it, and makes the tokenizer from its kind and rule of splitting alone.
            own.parts[own.data[0]] = np.frombuffer(b"llama", np.uint8)
        tokenizer = huggingface.load_tokenizer(path.parent, gguf_file=path.name)
        try:
            check_tokens(tokenizer, fields)
        except UserError as problem:
            raise UserError(
                f"{path}: transformers {transformers.__version__} reads its tokenizer wrongly: {problem}; install "
                "another version of transformers, or open the Hugging Face directory of the model"
            ) from None
    return tokenizer


@cache
def gguf_reader() -> type[Any]:
    """Returns `gguf.GGUFReader` over a plain array: the same mapped bytes, read in a fifth of the time.

    Slicing `np.memmap` takes three times as long, and a vocabulary of 151,936 tokens makes 760,000 slices, two for each
    string and one for each number, of three calls each.
    """
    from gguf import GGUFReader, GGUFValueType

    # An enum's members are slow to find.
    array, string = int(GGUFValueType.ARRAY), int(GGUFValueType.STRING)
    numbers = {int(kind): np.dtype(number) for kind, number in GGUFReader.gguf_scalar_to_np.items()}

    class PlainReader(GGUFReader):  # type: ignore[misc]
        # The constructor assigns the memmap to this attribute; where a release does not, the reader is only slow.
        @property
        def data(self) -> np.ndarray[Any, Any]:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray[Any, Any]) -> None:
            self._data = mapped.view(np.ndarray)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != array:
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + 12
            kind = self._data[orig_offs : orig_offs + 4].view(np.uint32)
            count = self._data[end - 8 : end].view(np.uint64)
            parts, length = [kind, count], int(count[0])
            if kind[0] == string:
                for _ in range(length):
                    size = self._data[end : end + 8].view(np.uint64)
                    start, end = end + 8, end + 8 + int(size[0])
                    parts += (size, self._data[start:end])
                data = list(range(3, len(parts), 2))
            elif kind[0] in numbers:
                start, end = end, end + length * numbers[kind[0]].itemsize
                parts.extend(self._data[start:end].view(numbers[kind[0]]).reshape(length, 1))
                data = list(range(2, len(parts)))
            else:  # arrays of arrays, and a file in the other byte order
                return super()._get_field_parts(orig_offs, raw_type)
            types = [GGUFValueType.ARRAY, *([GGUFValueType(kind[0])] if length else [])]
            return end - orig_offs, parts, data, types

    return PlainReader


@contextlib.contextmanager
def shared_parsing() -> Iterator[None]:
    """Makes `gguf.GGUFReader` parse a file once while open, and transformers' GGUF progress bar obey its switch."""
    gguf = require("gguf", "hf")
    logging = require("transformers.utils.logging", "hf")
    read = cache(gguf_reader())

    def reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
        # One key for all spellings of a path: config, weights and tokenizer share the parsed file.
        return read(os.path.realpath(path), mode)

    with contextlib.ExitStack() as stack:
        names = cache(gguf.get_tensor_name_map)
        pool = stack.enter_context(ThreadPoolExecutor())
        codecs = require("gguf.quants", "hf")
        by_rows = partial(_on_all_cores, pool)
        stack.enter_context(replaced([(gguf, "GGUFReader", reader), (gguf, "get_tensor_name_map", names)]))
        stack.enter_context(replaced([(codecs, "_apply_over_grouped_rows", by_rows)]))
        # Releases of transformers without this module keep their progress bar.
        if find_spec(_LOADER):
            loader = require(_LOADER, "hf")
            # transformers makes a list of a string's bytes, for each string of a vocabulary.
            parse = partial(
                lambda own, x, kind: x.tobytes().decode() if kind == [9, 8] else own(x, kind), loader._gguf_parse_value
            )
            stack.enter_context(replaced([(loader, "tqdm", logging.tqdm), (loader, "_gguf_parse_value", parse)]))
        yield


def _on_all_cores(
    pool: ThreadPoolExecutor, func: Any, arr: np.ndarray[Any, Any], otype: Any, oshape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """As `gguf.quants._apply_over_grouped_rows`, which takes 16 rows at a time, on one core."""
    rows = arr.reshape(-1, arr.shape[-1])
    out: np.ndarray[Any, Any] = np.empty((len(rows), math.prod(oshape) // len(rows)), otype)
    step = max(1, 2**17 // out.shape[1])  # whose intermediates stay in a cache

    def fill(start: int) -> None:
        out[start : start + step] = func(rows[start : start + step])

    list(pool.map(fill, range(0, len(rows), step)))
    return out.reshape(oshape)


def _refuse_without_model(path: Path, file: Any) -> None:
    """Raises UserError for an adapter, a projector, an importance matrix of llama.cpp, or a part of a split file."""
    kind, architecture = (_value(file.fields, "general.", key) for key in ("type", "architecture"))
    if (count := int(_value(file.fields, "split.", "count", 1))) > 1:
        raise UserError(
            f"{path}: one of {count} files of a model; join them by llama.cpp's `llama-gguf-split --merge FIRST JOINED`"
        )
    what = {
        "adapter": "an adapter (LoRA), which is no model by itself; merge it with PEFT where it was trained "
        "(merge_and_unload), save that by save_pretrained, and pass its directory",
        "imatrix": "an importance matrix of llama.cpp, which is no model; pass the model, and the text that the matrix "
        f"was made of by {option('calib')}",
        "mmproj": "the projector of a vision or audio model (mmproj), which is no model by itself; pass the GGUF file "
        "of its language model, or for both the Hugging Face directory",
    }.get("mmproj" if architecture == "clip" else kind)
    if what is not None:
        raise UserError(f"{path}: {what}")


def read_config(path: Path) -> Any:
    """Returns the transformers config that the file's metadata describe; the first parse, so damage shows here."""
    gguf, transformers = require("gguf", "hf"), require("transformers", "hf")
    try:
        file = gguf.GGUFReader(path)
        blocks = {tensor.tensor_type for tensor in file.tensors if tensor.tensor_type.name.startswith("Q")}
        if unread := blocks - require("gguf.quants", "hf")._type_traits.keys():
            raise ValueError(repr(unread))
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        with path.open("rb") as stream:
            version = int.from_bytes(stream.read(8)[4:], "little")
        if version == 1:
            raise UserError(
                f"{path}: GGUF of version 1, of 2023, which no reader takes; use a later conversion"
            ) from None
        if "GGMLQuantizationType" in str(error):
            raise UserError(
                f"{path}: blocks of a type that this package gguf does not read ({one_line(error)}); have llama.cpp "
                f"write it in 16 bit: `llama-quantize --allow-requantize {path} {path.with_suffix('')}-f16.gguf F16`"
            ) from None
        raise UserError(f"{path}: a truncated or damaged GGUF file ({one_line(error)}); download it again") from error
    _refuse_without_model(path, file)
    if (own := _value(file.fields, "", OWN_CONFIG)) is not None:
        try:
            config = transformers.AutoConfig.for_model(**check_fields(json.loads(own)))
            architecture = llama_cpp.architecture_of(config)
            for name, value in llama_cpp.metadata_of(config, architecture)[0].items():
                stored = _value(file.fields, "", key := f"{architecture.name}.{name}")
                if stored != (float(np.float32(value)) if isinstance(value, float) else value):
                    raise ValueError(f"{key} is {stored}, and {value} in {OWN_CONFIG}; export it again")
        except Exception as error:  # classes of configs raise what they like
            raise UserError(f"{path}: {one_line(error)}") from error
        return config
    try:
        config = transformers.AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, **huggingface.local_options()
        )
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, OSError) as error:
        raise UserError(f"{path}: transformers cannot load this GGUF file: {one_line(error)}") from error
    try:
        set_rope(config, file)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    # transformers leaves the widths of experts, and the scale of attention of Gemma's 27B, at its configs' defaults.
    prefix = f"{_value(file.fields, 'general.', 'architecture')}.expert_"
    for key, name in (("", "moe_intermediate_size"), ("shared_", "shared_expert_intermediate_size")):
        if hasattr(config, name) and (width := _value(file.fields, prefix, f"{key}feed_forward_length")):
            setattr(config, name, int(width))
    if (config.model_type, getattr(config, "num_hidden_layers", 0)) in {("gemma2", 46), ("gemma3_text", 62)}:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    return config
