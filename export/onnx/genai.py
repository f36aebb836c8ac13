"""A decoder for onnxruntime-genai: its graph, and the directory that the library loads.

    input_ids, position_ids        [batch, sequence]
    attention_mask                 [batch, past + sequence]: 0 for padding
    past_key_values.N.key, .value  [batch, kv_heads, past, dim], of each layer N
    -> logits                      [batch, sequence, vocabulary]
    -> present.N.key, .value       [batch, kv_heads, past + sequence, dim]

The library brings the tokenizer, sampling, streaming, batches and bindings for C++, C#, Java and Python, and names
these inputs in `genai_config.json`. It appends to the cache, so the graph does too, and a query attends to the columns
up to its own that the mask does not hide. Its own column is never hidden: a padded query that sees no key at all would
give NaN, which later layers spread.
"""

import filecmp
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from quant.base.json_files import read_json, typed, write_json
from quant.calibration.attention_names import text_config
from quant.export.onnx.decoder_graph import GraphInput, attending
from quant.export.onnx.serving import IDS, LOGITS, CachedAttention, ServingGraph, cache_shapes, check_decoder
from quant.export.onnx.trace import MODEL_PREFIX, trace
from quant.export.onnx.translate import translate

CONFIG_FILE = "genai_config.json"
_MASK, _POSITIONS = "attention_mask", "position_ids"
_PAST, _PRESENT = "past_key_values.{}.{}", "present.{}.{}"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
"""Files of a checkpoint that its tokenizer is made of."""
_SAMPLING = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
"""Fields of a generation config that the library has too, and transformers' defaults."""


class GenaiAttention(CachedAttention):
    """Attention over a KV cache that grows."""

    refused: ClassVar[tuple[str, ...]] = ("softcap", "position_bias")

    def cached(self, past: Tensor, x: Tensor) -> Tensor:
        return torch.cat([past, x], dim=2)

    def visible(self, tokens: int, window: int | None) -> Tensor:
        past, mask = self.past[0].shape[2], self.inputs[_MASK]
        columns = torch.arange(tokens)
        rows = (torch.arange(self.inputs[IDS].shape[1]) + past)[:, None]
        seen = (columns < rows)[None] & mask[:, None].bool()
        if window is not None:
            # Padding lies between a row's prompt and its new tokens, so a window counts tokens and not columns.
            counts = mask.cumsum(1)
            seen = seen & (counts[:, None] > counts[:, past:, None] - window)
        return seen | (columns == rows)[None]


class GenaiGraph(ServingGraph):
    """A decoder as the library calls it."""

    def forward(self, inputs: dict[str, Tensor], past: list[Tensor]) -> tuple[Tensor, ...]:
        self.attention.begin(inputs, past)
        out = self.model(input_ids=inputs[IDS], position_ids=inputs[_POSITIONS], use_cache=False)
        return (out.logits, *self.attention.new)


def genai_program(model: nn.Module, *, kind: str, scales: Mapping[str, Sequence[float]], runtime: str) -> Any:
    """Returns the ONNX model of a decoder, as an `onnx_ir.Model`; arguments and errors as in `serving_program`."""
    check_decoder(model, None)
    names = {module: name for name, module in model.named_modules()}
    function = GenaiAttention(names, kind=kind, scales=scales)
    with attending(model, function, masked=False):
        caches = cache_shapes(model, function)
        # Example inputs of 5 tokens, and caches that hold 7 earlier tokens.
        inputs = {
            IDS: GraphInput(torch.zeros(2, 5, dtype=torch.long), ("batch", "sequence")),
            _MASK: GraphInput(torch.ones(2, 12, dtype=torch.long), ("batch", "past + sequence")),
            _POSITIONS: GraphInput(torch.arange(7, 12)[None].repeat(2, 1), ("batch", "sequence")),
        }
        past = {
            name: GraphInput(torch.zeros(2, heads, 7, dim, dtype=dtype), ("batch", heads, "past", dim))
            for name, (heads, dim, dtype) in zip(_cache_names(_PAST, len(caches) // 2), caches, strict=True)
        }
        arguments = ({name: x.example for name, x in inputs.items()}, [x.example for x in past.values()])
        graph = GenaiGraph(model, function)
        # The mask's length is the sum of two other dimensions, which torch finds by itself.
        exported = trace(graph, arguments, {**inputs, **past}, {}, split=len(inputs))
    outputs = [LOGITS, *_cache_names(_PRESENT, len(caches) // 2)]
    return translate(exported, {**inputs, **past}, outputs, MODEL_PREFIX, model, runtime=runtime)


def _cache_names(pattern: str, layers: int) -> list[str]:
    return [pattern.format(layer, part) for layer in range(layers) for part in ("key", "value")]


def write_genai_files(model: Any, source: Path, folder: Path) -> None:
    """Writes `genai_config.json` and copies the tokenizer's files next to `model.onnx`."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    write_json(folder / CONFIG_FILE, genai_config(model))


def other_genai_files(model: Any, source: Path, folder: Path) -> list[str]:
    """Returns the files beside a graph that are not those of `write_genai_files`, but for sampling and providers."""
    names = [name for name in TOKENIZER_FILES if (source / name).is_file() or (folder / name).is_file()]
    _, others, missing = filecmp.cmpfiles(source, folder, names, shallow=False)
    expected, found = genai_config(model)["model"], dict[str, Any]()
    if (path := folder / CONFIG_FILE).is_file():
        found = read_json(path, "a configuration", lambda x: typed(dict[str, Any], x, "it").get("model", {}))
    with suppress(KeyError, TypeError):
        expected["decoder"]["session_options"] = found["decoder"]["session_options"]
    return [*sorted(others + missing), *([] if found == expected else [CONFIG_FILE])]


def genai_config(model: Any) -> dict[str, Any]:
    """Returns the library's description of the model, with the sampling of its generation config."""
    config: Any = text_config(model.config)
    generation = model.generation_config
    ends = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    ends = ends if isinstance(ends, list) else [0 if ends is None else ends]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    begin = generation.bos_token_id if generation.bos_token_id is not None else config.bos_token_id
    pad = generation.pad_token_id if generation.pad_token_id is not None else config.pad_token_id
    length = config.max_position_embeddings
    sampling = {
        name: default if getattr(generation, name, None) is None else getattr(generation, name)
        for name, default in _SAMPLING.items()
    }
    return {
        "model": {
            "type": "decoder",
            "bos_token_id": ends[0] if begin is None else begin,
            "eos_token_id": ends,
            "pad_token_id": ends[0] if pad is None else pad,
            "context_length": length,
            "vocab_size": config.vocab_size,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
                "hidden_size": config.hidden_size,
                "num_attention_heads": heads,
                "num_hidden_layers": config.num_hidden_layers,
                "num_key_value_heads": kv_heads,
                "inputs": {
                    IDS: IDS,
                    _MASK: _MASK,
                    _POSITIONS: _POSITIONS,
                    "past_key_names": _PAST.format("%d", "key"),
                    "past_value_names": _PAST.format("%d", "value"),
                },
                "outputs": {
                    LOGITS: LOGITS,
                    "present_key_names": _PRESENT.format("%d", "key"),
                    "present_value_names": _PRESENT.format("%d", "value"),
                },
            },
        },
        "search": {
            "max_length": length,
            "min_length": 0,
            "num_beams": 1,
            "past_present_share_buffer": False,
            **sampling,
        },
    }
