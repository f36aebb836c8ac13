"""Tiny decoders of the kinds that one serving graph has to hold, and the tokens that each writes by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch

CAPACITY, LENGTHS, NEW = 256, (5, 150, 200), 32
_SIZES = {"hidden_size": 128, "intermediate_size": 128, "max_position_embeddings": 512}


def gemma3(**options: Any) -> Any:
    """A block with a sliding window and one without, heads of 256, norms of queries and keys."""
    sizes = {**tiny_models.DECODER, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 32}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"]}
    return tiny_models.build("Gemma3", "ForCausalLM", sizes, config_family="Gemma3Text", **options)


def gpt_oss(**options: Any) -> Any:
    """With biases and sinks that matter, and gates beyond the limit, which initial weights do not have."""
    model = tiny_models.gpt_oss(**options)
    generator = torch.Generator().manual_seed(5)
    for name, x in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            x.data = torch.randn(x.shape, generator=generator).to(x.dtype)
        elif name.endswith("gate_up_proj"):
            x.data *= 16
    return model


DECODERS: dict[str, Callable[..., Any]] = {
    "llama-64": lambda **options: tiny_models.llama(head_dim=64, **options),
    "llama-128": lambda **options: tiny_models.llama(head_dim=128, **options),
    "llama-256": lambda **options: tiny_models.llama(head_dim=256, **options),
    "qwen3": lambda **options: tiny_models.qwen3(**{"head_dim": 64, **options}),
    "gemma3": gemma3,
    "mistral": lambda **options: tiny_models.mistral(sliding_window=64, **options),
}


def decoder(kind: str, **options: Any) -> Any:
    """One of `DECODERS`, whose logits depend on all that is rounded, and whose tokens do not repeat."""
    return DECODERS[kind](**{**_SIZES, "gain": 4.0, **options})


def prompts() -> list[list[int]]:
    """Token ids of three rows of different lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 64, (length,), generator=generator).tolist() for length in LENGTHS]


def greedy_tokens(model: Any, rows: Sequence[Sequence[int]], new: int = NEW) -> list[list[int]]:
    """The likeliest tokens after each row, one row at a time and without a cache."""
    written = []
    for row in rows:
        tokens = list(row)
        with torch.no_grad():
            for _ in range(new):
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                tokens.append(int(logits.float().argmax()))
        written.append(tokens[len(row) :])
    return written


class EvaluatorSession:
    """A session of a serving graph that runs every operator in numpy; `operators` are those of our plugins.

    An empty cache holds codes of NaN where it is in FP8, and random numbers otherwise.
    """

    backend, plan, capacity, recurrent = "onnx.reference", "", CAPACITY, False

    def __init__(self, path: Path, operators: Sequence[type] = ()) -> None:
        import onnx
        from onnx.helper import tensor_dtype_to_np_dtype

        from quant.export.onnx.compare_with_torch import evaluator

        model = onnx.load(path)
        self._evaluator = evaluator(model, operators)
        self._outputs = [value.name for value in model.graph.output]
        self._inputs = {
            value.name: ([dim.dim_value for dim in value.type.tensor_type.shape.dim[1:]],
                         tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            for value in model.graph.input
            if value.name.startswith("past_")
        }  # fmt: skip
        logits = next(value for value in model.graph.output if value.name == "logits")
        self.dtype = str(tensor_dtype_to_np_dtype(logits.type.tensor_type.elem_type))
        self.caches: dict[str, np.ndarray] = {}

    def most_rows(self) -> int:
        return 8

    def begin(self, rows: int) -> None:
        random = np.random.default_rng(3)
        for name, (shape, dtype) in self._inputs.items():
            values = random.normal(size=(rows, *shape)).astype(np.float32)
            codes = np.full(values.shape, 0x7F, np.uint8)  # NaN in FP8
            self.caches[name] = codes.view(dtype) if dtype.itemsize == 1 else values.astype(dtype)

    def width(self, tokens: int) -> int:
        return min(tokens, self.capacity)

    def step(self, ids: np.ndarray, lengths: np.ndarray, last: np.ndarray) -> np.ndarray:
        inputs = {"input_ids": ids, "lengths": lengths, "last": last, **self.caches}
        outputs = dict(zip(self._outputs, self._evaluator.run(None, inputs), strict=True))
        self.caches = {name: outputs[name.replace("past_", "new_")] for name in self.caches}
        logits: np.ndarray = outputs["logits"].astype(np.float32)
        return logits
