"""`write_gguf` writes a quantized model as a GGUF file, which llama.cpp, Ollama and LM Studio run.

Codes and scales are written as they are, in the blocks of ggml; what is in 16 bit stays so, and norms,
biases and routers are in FP32, as llama.cpp's own converter has them. Tensors are written one after the other, so that
one of them is in memory next to the model.

    blk.0.attn_q.weight         blocks, or 16 bit; rows of q and k interleaved where llama.cpp turns neighbours
    blk.0.attn_q.scale          NVFP4's global scale: FP32, one number, or one for each expert
    blk.0.ffn_gate_exps.weight  the matrices of all experts, gate and up apart
    rope_freqs.weight           divisors of rotary frequencies (Llama 3.1 and later)

**Blocks.** A row of a weight is a row of blocks, each with its scales in front or behind. Two 4-bit codes share a byte,
but not as in checkpoints: byte j of a run of n codes holds code j in its low nibble and code j + n / 2 in its high one.

    Q4_0    32 weights in 18 bytes     FP16 scale, 16 bytes of codes q + 8                       INT4, groups of 32 n
    Q8_0    32 weights in 34 bytes     FP16 scale, 32 codes in INT8                              INT8
    MXFP4   32 weights in 17 bytes     E8M0 scale, 16 bytes of E2M1 codes                        MXFP4
    NVFP4   64 weights in 36 bytes     four E4M3 scales, four runs of 16 E2M1 codes              NVFP4

    Q5_0    32 weights in 22 bytes     FP16 scale, the fifth bits, 16 bytes of the others        q5_0
    Q5_1    32 weights in 24 bytes     FP16 scale and minimum, fifth bits, the others            q5_1
    Q4_K    256 weights in 144 bytes   scales (`formats/superblocks.py`), runs of 64 codes       q4_k
    Q5_K    256 weights in 176 bytes   scales, bit j of byte i the fifth of code 32 j + i        q5_k
    Q6_K    256 weights in 210 bytes   runs of 128 of the low four bits, the others, scales      q6_k

A scale over more than 32 weights is repeated. NVFP4's global scale, one a matrix, is a tensor of its own.

**Vocabulary.** A tokenizer of transformers becomes metadata, for llama.cpp's own tokenizers of the same kind:

    gpt2     byte-pair encoding over bytes: tokens, merges, and the name of the rule that splits a text before
    llama    SentencePiece's byte-pair encoding: tokens with scores; the pair of the highest score is merged first

llama.cpp knows each rule that splits texts by a name (`tokenizer.ggml.pre`). The rule is in `pre_tokenizer` of
tokenizer.json, from which the name follows; of a rule that is not in `_SPLITS` there is no name to write.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quant.base.atomic import put_file, temporary_directory
from quant.base.errors import UserError, require
from quant.base.json_files import json_text
from quant.formats.format import E2M1, E8M0, FP16, INT4, INT8, Format
from quant.formats.rounding import unpack
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.linear.quantized_module import QuantizedModule
from quant.models import gguf_architectures as llama_cpp
from quant.models.gguf import OWN_CONFIG, gguf_reader
from quant.models.gguf_architectures import Architecture
from quant.recipes.callers_model import refuse_adapters
from quant.recipes.plan import Plan
from quant.recipes.plan_make import embedding_format

# Rows of an embedding that are rounded together; a search keeps some twenty copies of them in FP32.
_EMBEDDING_ROWS = 8192
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # llama.cpp's types of tokens

_SPLITS = {
    tuple(steps): name
    for name, steps in tomllib.loads(Path(__file__).with_name("splits.toml").read_text(encoding="utf-8")).items()
}
_WITHOUT_TOKENIZER = "a copy of the model without the tokenizer's files becomes a file for token ids"


def vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, by their keys; ids up to `size`, the rows of the embedding, get a token.

    Raises:
        UserError: llama.cpp has no tokenizer of this kind, or no name for the rule by which it splits texts.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"{type(tokenizer).__name__}: no tokenizer.json, from which llama.cpp's vocabulary is made")
    described = json.loads(backend.to_str())
    model = described["model"]
    steps = _steps(described.get("pre_tokenizer"))
    over_bytes = any(step == "bytes" for step in steps) or "ByteLevel" in json_text(described.get("pre_tokenizer"))
    if model["type"] != "BPE" or not (over_bytes or model.get("byte_fallback")):
        kind = f"{model['type']} one ({type(tokenizer).__name__})"
        raise UserError(f"llama.cpp has no tokenizer like this {kind}; {_WITHOUT_TOKENIZER}")
    if over_bytes and not model["merges"]:
        raise UserError(f"llama.cpp opens no BPE tokenizer without merges; {_WITHOUT_TOKENIZER}")
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    fields: dict[str, Any] = {}
    tokens, types = _tokens(described, size, over_bytes=over_bytes)
    if over_bytes:
        name = _SPLITS.get(steps)
        if name is None:
            rule = f"the rule by which this tokenizer splits texts: {steps}"
            raise UserError(f"llama.cpp has no name for {rule}; {_WITHOUT_TOKENIZER}")
        fields |= {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types, "merges": merges}
    else:
        # SentencePiece merges the pair whose token has the highest score; merges are sorted by it.
        ranks: dict[str, int] = {}
        for rank, pair in enumerate(merges):
            ranks.setdefault(pair.replace(" ", ""), rank)
        unranked = {_NORMAL: 0.0}  # single characters; all other types are never merged
        scores = [-float(ranks.get(t, -unranked.get(k, -1000.0))) for t, k in zip(tokens, types, strict=True)]
        fields |= {"model": "llama", "pre": "default", "tokens": tokens, "token_type": types, "scores": scores}
        starts_with_space = tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False))[0] != "a"
        fields["add_space_prefix"] = starts_with_space
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    fields |= {f"{name}_token_id": number for name, number in ids.items() if number is not None}
    encoded = tokenizer.encode("a")
    fields["add_bos_token"] = ids["bos"] is not None and encoded[0] == ids["bos"]
    fields["add_eos_token"] = ids["eos"] is not None and encoded[-1] == ids["eos"]
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if tokenizer.chat_template:
        template = tokenizer.chat_template
        metadata["tokenizer.chat_template"] = template if isinstance(template, str) else template["default"]
    return metadata


def stored_vocabulary(path: Path) -> dict[str, Any]:
    """Returns the tokenizer's metadata of a GGUF file as they are.

    transformers reads some of them otherwise: of SmolLM2's file, not that digits are split.
    """
    require("gguf", "hf")
    fields = gguf_reader()(path).fields
    return {key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")}


def _tokens(described: Mapping[str, Any], size: int, *, over_bytes: bool) -> tuple[list[str], list[int]]:
    """Returns the token of each id and its type; rows of the embedding beyond the vocabulary are unused."""
    vocabulary, unknown = described["model"]["vocab"], described["model"].get("unk_token")
    added = {entry["id"]: entry for entry in described.get("added_tokens", ())}
    by_id = {number: token for token, number in vocabulary.items()} | {i: e["content"] for i, e in added.items()}
    last = max(by_id, default=-1)
    if last >= size:
        raise UserError(f"the tokenizer has a token {last}, {by_id[last]!r}, and the embedding {size} rows")
    tokens, types = [], []
    for number in range(size):
        token, kind = by_id.get(number, f"[PAD{number}]"), _NORMAL
        if number not in by_id:
            kind = _UNUSED
        elif number in added:
            kind = _CONTROL if added[number]["special"] else _USER_DEFINED
        elif not over_bytes and len(token) == 6 and token.startswith("<0x"):
            kind = _BYTE
        if token == unknown and not over_bytes:
            kind = _UNKNOWN
        tokens.append(token)
        types.append(kind)
    return tokens, types


def _steps(splitter: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Returns the steps of a pre-tokenizer: the pattern of each split, "digits", and "bytes" for GPT-2's pattern."""
    if splitter is None:
        return ()
    if splitter["type"] == "Sequence":
        return tuple(step for part in splitter["pretokenizers"] for step in _steps(part))
    if splitter["type"] == "Split":
        return (splitter["pattern"].get("Regex", str(splitter["pattern"])),)
    if splitter["type"] == "Digits":
        return ("digits" if splitter["individual_digits"] else "runs of digits",)
    if splitter["type"] == "ByteLevel":
        return ("bytes",) if splitter.get("use_regex", True) else ()
    return (splitter["type"],)


def block_type(format: Format) -> str | None:
    """Returns the name that ggml has for blocks that hold the numbers of `format`, or None."""
    if format.gguf:
        return format.gguf
    if format.is_nvfp4:
        return "NVFP4"
    if format.element is E2M1 and format.scale is E8M0 and format.block == (1, 32):
        return "MXFP4"
    rows, columns = format.block
    if rows == 1 and columns % 32 == 0 and format.scale.is_wide and format.element in (INT4, INT8):
        return "Q4_0" if format.element is INT4 else "Q8_0"
    return None


def block_width(kind: str) -> int:
    """Returns how many weights of a row a block holds."""
    return 256 if kind.endswith("_K") else 64 if kind == "NVFP4" else 32


def to_blocks(weight: BlockScaledTensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Returns the bytes of a weight `[..., out, in]`, uint8 `[..., out, bytes]`; its global scale is left out.

    Raises:
        ValueError: ggml has no blocks for its format, its rows are no whole blocks, or FP16 does not hold a scale.
    """
    kind = block_type(weight.format)
    if kind is None:
        raise ValueError(f"llama.cpp has no {weight.format}")
    columns, width = weight.shape[-1], block_width(kind)
    if columns % width:
        raise ValueError(f"in = {columns} is no multiple of {width}, the weights of a block of {kind}")
    return _PACKERS[kind](weight).contiguous().numpy()


def _nibbles(codes: Tensor, run: int) -> Tensor:
    """Returns 4-bit codes `[..., in]` by runs, two to a byte: `[..., in / run, run / 2]`."""
    low, high = codes.unflatten(-1, (-1, run)).chunk(2, dim=-1)
    return torch.bitwise_or(low, high << 4)


def _q4_0(weight: BlockScaledTensor) -> Tensor:
    # Two's complement plus 8 is the same bits with the highest one flipped.
    codes = unpack(weight.codes, 4, weight.shape[-1]) ^ 8
    return torch.cat([_half_scales(weight), _nibbles(codes, 32)], dim=-1).flatten(-2)


def _q8_0(weight: BlockScaledTensor) -> Tensor:
    codes = weight.codes.view(torch.uint8).unflatten(-1, (-1, 32))
    return torch.cat([_half_scales(weight), codes], dim=-1).flatten(-2)


def _half_scales(weight: BlockScaledTensor) -> Tensor:
    """Returns the bytes of the FP16 scale of every 32 weights, `[..., in / 32, 2]`."""
    half = weight.scale.to(torch.float16)
    if not torch.equal(half.float(), weight.scale.float()):
        wrong = int((half.float() != weight.scale.float()).sum())
        low, high = float(weight.scale.min()), float(weight.scale.max())
        name = "q8_0" if weight.format.element.name == "int8" else "q4_0"
        raise ValueError(
            f"{wrong:,} of its scales, which are between {low:.2g} and {high:.2g}, are no numbers of {FP16.name}, in "
            f"which llama.cpp has them; quantize with --format {name}"
        )
    blocks = weight.shape[-1] // 32
    half = half.repeat_interleave(blocks // half.shape[-1], dim=-1)
    return half.contiguous().view(torch.uint8).unflatten(-1, (-1, 2))


def _bits(bits: Tensor) -> Tensor:
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def _q5(weight: BlockScaledTensor) -> Tensor:
    codes = (weight.codes + 16).view(torch.uint8)
    scales = weight.scale.unflatten(-1, (-1, 4)) if weight.format.minimum else _half_scales(weight)
    fifth = _bits((codes >> 4).unflatten(-1, (-1, 4, 8)))
    return torch.cat([scales, fifth, _nibbles(codes & 15, 32)], dim=-1).flatten(-2)


def _q4_k(weight: BlockScaledTensor) -> Tensor:
    codes = _nibbles(unpack(weight.codes, 4, weight.shape[-1]) ^ 8, 64)
    return torch.cat([weight.scale.unflatten(-1, (-1, 16)), codes.unflatten(-2, (-1, 4)).flatten(-2)], -1).flatten(-2)


def _q5_k(weight: BlockScaledTensor) -> Tensor:
    codes = (weight.codes + 16).view(torch.uint8)
    low = _nibbles(codes & 15, 64).unflatten(-2, (-1, 4)).flatten(-2)
    fifth = _bits((codes >> 4).unflatten(-1, (-1, 8, 32)).transpose(-1, -2))
    return torch.cat([weight.scale.unflatten(-1, (-1, 16)), fifth, low], dim=-1).flatten(-2)


def _q6_k(weight: BlockScaledTensor) -> Tensor:
    codes = (weight.codes + 32).view(torch.uint8)
    low = _nibbles(codes & 15, 128).unflatten(-2, (-1, 2)).flatten(-2)
    # Two bits each of codes i, i + 32, i + 64 and i + 96 of a run of 128.
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)[:, None]
    high = ((codes >> 4).unflatten(-1, (-1, 2, 4, 32)) << places).sum(-2, dtype=torch.uint8).flatten(-2)
    return torch.cat([low, high, weight.scale.unflatten(-1, (-1, 18))], dim=-1).flatten(-2)


def _mxfp4(weight: BlockScaledTensor) -> Tensor:
    codes = unpack(weight.codes, 4, weight.shape[-1])
    return torch.cat([weight.scale[..., None], _nibbles(codes, 32)], dim=-1).flatten(-2)


def _nvfp4(weight: BlockScaledTensor) -> Tensor:
    codes = _nibbles(unpack(weight.codes, 4, weight.shape[-1]), 16)
    scales = weight.scale.view(torch.uint8).unflatten(-1, (-1, 4))
    return torch.cat([scales, codes.unflatten(-2, (-1, 4)).flatten(-2)], dim=-1).flatten(-2)


_PACKERS: dict[str, Callable[[BlockScaledTensor], Tensor]] = {
    "Q4_0": _q4_0, "Q5_0": _q5, "Q5_1": _q5, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
    "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip

_TYPES = {torch.float64: "F32", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# 16-bit tensors that llama.cpp wants in FP32: norms and biases, which have one dimension, and routers.
_ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    kind: str  # ggml's type
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray[Any, Any]]  # its values, or the bytes of its blocks


def write_gguf(
    model: nn.Module, path: Path, plan: Plan | None = None, *, words: Mapping[str, Any] | None = None,
    device: torch.device | None = None, progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> dict[str, Any]:  # fmt: skip
    """Writes a model of transformers, with quantized layers, as the GGUF file `path`.

    Args:
        model: as `quant.load` returns it.
        path: appears when the whole file is written; one that is there is replaced.
        plan: what is refused in it: work for run time that llama.cpp does not have.
        words: the metadata of the tokenizer, as `vocabulary` makes them; None writes a file for token ids.
        device: where the embedding, which the model has in 16 bit, is rounded; None is the model's own.

    Returns:
        `files`: the size by name; `types`: how many tensors have each type of ggml.

    Raises:
        UserError: an architecture, tokenizer or format that llama.cpp does not have; the message names it.
    """
    gguf = require("gguf", "hf")
    config: Any = getattr(model, "config", None)
    architecture = check_gguf(model, plan)
    fields, factors = llama_cpp.metadata_of(config, architecture)
    entries = [*tensors_of(model, architecture, device), *(_dense(key, value) for key, value in factors.items())]
    types = [entry.kind for entry in entries]
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_directory(path) as folder:
        file = folder / path.name
        writer = gguf.GGUFWriter(file, architecture.name)
        _add(writer, {"general.name": path.stem, "general.quantization_version": 2})
        _add(writer, {f"{architecture.name}.{key}": value for key, value in fields.items()})
        unkept = ("quantization_config", "_name_or_path", "transformers_version")
        own = {key: value for key, value in config.to_diff_dict().items() if key not in unkept}
        own["architectures"] = [type(model).__name__]
        _add(writer, {OWN_CONFIG: json_text(own), **(words or {"tokenizer.ggml.model": "no_vocab"})})
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            width, size = gguf.GGML_QUANT_SIZES[kind]
            nbytes = math.prod(entry.shape) // width * size
            # Of the dtype it only looks whether the shape counts bytes, which that of uint8 would.
            writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, entry in enumerate(entries):
            progress("write", done, len(entries))
            try:
                writer.write_tensor_data(entry.make())
            except ValueError as error:
                raise UserError(f"{entry.name}: {error}") from None
        writer.close()
        put_file(file, path)
    return {
        "files": {path.name: path.stat().st_size},
        "types": {kind: types.count(kind) for kind in dict.fromkeys(types)},
    }


def compare_gguf(path: Path, other: Path) -> tuple[int, list[str]]:
    """Returns how many fields and tensors the GGUF file `other` has, and a line on each that `path` has otherwise."""
    contents = []
    for file in (path, other):
        try:
            reader = gguf_reader()(file)
            fields = {name: field.contents() for name, field in reader.fields.items() if name != "general.name"}
            kinds = {f"tensor {t.name}": f"{t.tensor_type.name} {t.shape.tolist()}" for t in reader.tensors}
            sums = {f"tensor {t.name}": hashlib.sha256(t.data).hexdigest()[:16] for t in reader.tensors}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError, MemoryError) as error:
            raise UserError(f"{file}: a damaged or truncated GGUF file ({error}); export it again") from None
        contents.append({**fields, **{name: f"{kinds[name]}, sha256 {sums[name]}" for name in kinds}})
    found, expected = contents
    lines = [f"{name}: not in the file" for name in expected.keys() - found.keys()]
    lines += [f"{name}: not of the checkpoint" for name in found.keys() - expected.keys()]
    both = [name for name in expected.keys() & found.keys() if found[name] != expected[name]]
    lines += [f"{name}: {found[name]!s:.60} in place of {expected[name]!s:.60}" for name in both]
    return len(expected), sorted(lines)


def _add(writer: Any, fields: Mapping[str, Any]) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        add.get(type(value), writer.add_array)(key, value)


def check_gguf(model: nn.Module, plan: Plan | None) -> Architecture:
    """Returns how llama.cpp computes a model; UserError where it has no such model, format, or work for run time."""
    architecture = llama_cpp.architecture_of(getattr(model, "config", None))
    refuse_adapters(model, "a GGUF file", "merge them first with quant.merge_lora")
    for layer in plan.quantized if plan is not None else ():
        if parts := layer.parts.to_dict():
            raise UserError(
                f"{layer.name}: its input goes through {', '.join(parts)} at run time, which llama.cpp does not have; "
                "quantize with a solver that leaves nothing for run time, such as gptq"
            )
        _check_format(layer.name, layer.weight_format, layer.matrix[-1], architecture)
    return architecture


def _check_format(name: str, format: Format, columns: int, architecture: Architecture) -> None:
    kind = block_type(format)
    if kind is None:
        raise UserError(
            f"{name}: llama.cpp has no {format}; it has nvfp4, mxfp4, int4, int8, its own such as q4_k, and 16 bit, so "
            "quantize again with one of --format nvfp4a16, mxfp4a16, int4a16_g32 and q4_k_m"
        )
    if columns % block_width(kind):
        raise UserError(
            f"{name}: in = {columns} is no multiple of {block_width(kind)}, the weights of a block of {kind}; "
            f"keep it in 16 bit with --exclude {name.removesuffix('.weight')}, or quantize with --format q8_0"
        )
    if format.global_scale and not architecture.scales:
        raise UserError(
            f"{name}: llama.cpp's {architecture.name} ignores the global scale that {format} has, and would compute "
            "something else; quantize again with --format mxfp4a16, int4a16_g32 or q4_k_m"
        )


def gguf_notes(model: nn.Module, plan: Plan | None) -> list[str]:
    """Returns sentences on what llama.cpp does otherwise than a model or its plan says."""
    config: Any = model.config
    notes = list[str]()
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3") and window and window < config.max_position_embeddings:
        notes.append(
            f"llama.cpp has full attention in place of the sliding window of {window}: longer texts are computed "
            "otherwise"
        )
    if inputs := sorted({str(layer.activation) for layer in plan.quantized if layer.activation} if plan else ()):
        notes.append(
            f"the plan rounds inputs to {', '.join(inputs)}, and llama.cpp rounds them in its own way, to eight "
            "bits on a CPU"
        )
    if plan is not None and any(layer.weight is not None and layer.weight.gguf for layer in plan.quantized):
        notes.append(
            "the embedding, in 16 bit above, is rounded while the file is written, which no loss of this run counts: "
            "`quant evaluate` of the file does"
        )
    if plan is not None and (plan.kv_text or plan.attention is not None):
        notes.append("the plan has a KV cache or attention in low precision, which llama.cpp chooses when it starts")
    return notes


def tensors_of(model: nn.Module, architecture: Architecture, device: torch.device | None = None) -> Iterator[Entry]:
    """Yields the tensors of the file; UserError for one that llama.cpp has no name or no type for."""
    formats = [module.weight_format for module in model.modules() if isinstance(module, QuantizedModule)]
    weights, stored_name = list(llama_cpp.weights_of(model)), llama_cpp.tensor_names(model, architecture)
    is_tied = all(name != "lm_head.weight" for name, _ in weights)
    for name, weight in weights:
        if isinstance(weight, Tensor) and weight.dim() == 2 and name.endswith("embed_tokens.weight"):
            format = embedding_format(formats, is_tied=is_tied, width=weight.shape[1])
            if format is not None:
                yield Entry(
                    stored_name(name), format.gguf, tuple(weight.shape), partial(_rounded, weight, format, device)
                )
                continue
        if isinstance(weight, BlockScaledTensor):
            _check_format(name, weight.format, weight.shape[-1], architecture)
        for part, rows in llama_cpp.parts_of(name, weight, architecture, model.config):
            shift = architecture.shift(name)
            yield from _entries(stored_name(part), rows.float() + shift if shift and isinstance(rows, Tensor) else rows)


def _rounded(weight: Tensor, format: Format, device: torch.device | None) -> np.ndarray[Any, Any]:
    """Returns the blocks of a matrix that the model has in 16 bit; rows are rounded by themselves, some at a time."""
    parts = weight.split(_EMBEDDING_ROWS)
    return np.concatenate([to_blocks(quantize(p.to(device or p.device), format, rule="mse").to("cpu")) for p in parts])


def _entries(stored: str, weight: BlockScaledTensor | Tensor) -> Iterator[Entry]:
    if isinstance(weight, Tensor):
        yield _dense(stored, weight)
        return
    yield Entry(stored, str(block_type(weight.format)), weight.shape, lambda: to_blocks(weight))
    if weight.global_scale is not None:
        scale = weight.global_scale.float().reshape(-1)
        yield Entry(stored.replace(".weight", ".scale"), "F32", tuple(scale.shape), scale.numpy)


def _dense(name: str, weight: Tensor) -> Entry:
    is_wide = weight.dim() < 2 or name.endswith((*_ROUTERS, ".bias"))
    # A gate of one row is a vector in llama.cpp.
    tensor = weight.reshape(-1) if name.endswith("_shexp.weight") and weight.shape[0] == 1 else weight
    kind = "F32" if is_wide else _TYPES[tensor.dtype]

    def make() -> np.ndarray[Any, Any]:
        if kind == "BF16":
            return tensor.contiguous().view(torch.uint8).numpy()
        return tensor.to(torch.float32 if kind == "F32" else torch.float16).contiguous().numpy()

    return Entry(name, kind, tuple(tensor.shape), make)
