"""Checks, with a forward pass over two tokens, whether a model can be evaluated on rows of token ids."""

from __future__ import annotations

import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.attention_names import text_config
from quant.calibration.inputs import Inputs
from quant.calibration.outputs.logits import logits_of
from quant.calibration.placement import device_of
from quant.calibration.texts.rows import check_positions


def check_evaluable(model: nn.Module, rows: torch.Tensor | Inputs) -> None:
    """Refuses a model that `evaluate` cannot measure on `rows`, before hours are spent on quantizing it.

    Inputs of other kinds are not tried: one call with them may take long.
    """
    if isinstance(rows, Inputs):
        return
    if not isinstance(rows, torch.Tensor):
        raise UserError(
            f"evaluate takes token ids [rows, tokens], and this is a {type(rows).__name__}: cut a text into rows with "
            "quant.token_rows(FILE, tokenizer, samples=16, seqlen=512)"
        )
    _check_rows(model, rows)
    # Two tokens, so that one position a row and one position a token differ.
    name, probe = type(model).__name__, rows[:1, :2]
    try:
        output = run_probe(model, probe)
    except ValueError as error:
        raise UserError(f"{name} cannot be evaluated on text: {error}") from error
    if output.dim() != 3 or output.shape[:2] != probe.shape:
        raise UserError(
            f"{name} cannot be evaluated on text: for 1 row of 2 tokens it gives {list(output.shape)}, and perplexity "
            "takes one prediction for each token"
        )


def run_probe(model: nn.Module, probe: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a model for token ids, int64 `[rows, tokens]`, or its first output where it has no logits."""
    try:
        with torch.no_grad():
            return logits_of(model, probe.to(device_of(model)))
    except Exception as error:  # the model's own code, which may fail in any way on inputs that it is not made for
        raise ValueError(f"it does not run on token ids ({' '.join(str(error).split())})") from error


def predicts_tokens(model: nn.Module, probe: torch.Tensor) -> bool:
    """Returns whether a model returns logits; a Hugging Face encoder without a head returns hidden states."""
    # A module outside of transformers is taken to return logits.
    find_head = getattr(model, "get_output_embeddings", None)
    if not callable(find_head) or find_head() is not None:
        return True
    return hasattr(model(probe.to(device_of(model))), "logits")


def _check_rows(model: nn.Module, rows: torch.Tensor) -> None:
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2 or rows.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} {rows.dtype}: expected int64 [rows, seqlen], seqlen at least 2")
    config = text_config(getattr(model, "config", None))
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__} is an encoder-decoder; perplexity here is for causal language models")
    check_positions(rows.shape[1], config, type(model).__name__)
    # An id outside the vocabulary is an index error on a CPU and an asynchronous device assert on a GPU.
    vocabulary = getattr(config, "vocab_size", None)
    low, high = (int(n) for n in torch.aminmax(rows))
    if low < 0 or (isinstance(vocabulary, int) and high >= vocabulary):
        raise ValueError(
            f"rows: token id {low if low < 0 else high} is outside the vocabulary of {type(model).__name__} "
            f"({vocabulary} tokens); the rows were made with another tokenizer"
        )
