"""`Logits` computes the logits of a model for slices of positions, since the logits of whole rows do not fit in memory.

The logits of 512 positions of a vocabulary of 150k take 300 MB in FP32, and several such tensors are needed. So the
model runs on whole rows without its output head, and the head is applied to a slice of positions at a time. Some models
do more between the hidden states and the logits than apply a head and a soft cap. So the shortcut is compared with the
model's own forward on a few tokens, and if the two differ, the whole model computes the logits.
"""

import torch
from torch import Tensor, nn

from quant.base.errors import UserError
from quant.calibration.attention_names import text_config
from quant.calibration.evaluating import evaluating, without_cache
from quant.calibration.inputs import Inputs
from quant.calibration.session import device_of
from quant.calibration.texts.rows import check_positions, trial_rows
from quant.recipes.blocks import forwarding, output_of

# 32 MB of FP32 logits on a CPU; more on a GPU, so that fewer kernels are launched. Some six such tensors exist at once
# where a loss has a gradient.
_SLICE_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 25}
# Each slice reads the whole head, so that larger ones save time. Without a gradient fewer such tensors exist at once,
# and twice as large ones take no more memory.
_SLICE_WITHOUT_GRADIENT = {"cuda": 1 << 26}


class Logits:
    """Logits of next tokens: of every position of a row but the last; without a `head`, the whole model gives them."""

    def __init__(self, model: nn.Module, head: nn.Module | None) -> None:
        self.model, self.head = model, head
        self.split = None if head is not None else False
        self.vocabulary: int | None = None
        self.cap: float | None = getattr(text_config(getattr(model, "config", None)), "final_logit_softcapping", None)

    def hidden(self, rows: Tensor) -> Tensor:
        """Returns the inputs of the head `[positions, hidden]`, or logits `[positions, vocabulary]` otherwise."""
        self.decide(rows)
        return (self._before_head(rows) if self.split else logits_of(self.model, rows))[:, :-1].flatten(0, 1)

    def decide(self, rows: Tensor) -> None:
        """Tests on a few tokens of `rows`, unless a test was made before, whether the head can be split off."""
        if self.split is None:
            few = trial_rows(rows)
            with torch.no_grad():
                expected = logits_of(self.model, few).float()
                split = self._head(self._before_head(few)).float()
            # Rounding differs by far less than this even in BF16, a forgotten factor by more.
            is_same = expected.shape == split.shape
            self.split = is_same and bool((expected - split).abs().max() <= 0.01 * expected.abs().max())

    def parts(self, hidden: Tensor, *, with_gradient: bool = True) -> list[slice]:
        """Returns the slices of positions, each with about as many logits as suit the device."""
        if self.vocabulary is None:
            with torch.no_grad():
                self.vocabulary = self.logits(hidden[:1]).shape[-1]
        device = hidden.device.type
        elements = _SLICE_ELEMENTS.get(device, _SLICE_ELEMENTS["cpu"])
        if not with_gradient:
            elements = _SLICE_WITHOUT_GRADIENT.get(device, elements)
        step = max(elements // self.vocabulary, 1)
        return [slice(start, min(start + step, len(hidden))) for start in range(0, len(hidden), step)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits `[positions, vocabulary]` from the result of `hidden`."""
        return self._head(hidden) if self.split else hidden

    def logp(self, hidden: Tensor) -> Tensor:
        """Returns log-probabilities, float32."""
        return self.logits(hidden).float().log_softmax(dim=-1)

    def _head(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.capped(self.head(hidden))

    def capped(self, logits: Tensor) -> Tensor:
        """Returns the head's output after the model's soft cap, if it has one."""
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    def _before_head(self, rows: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def stand_in(hidden: Tensor) -> Tensor:
            seen.append(hidden)
            # One column: the model may still slice or scale its "logits" by position.
            return hidden[..., :1].detach()

        assert self.head is not None
        with forwarding(self.head, stand_in):
            self.model(rows)
        return seen[-1]


def logits_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Returns the logits of a model for token ids, or the first of its outputs if it has no logits."""
    result = model(rows)
    return result.logits if hasattr(result, "logits") else output_of(result)


def class_logits(logits: Tensor, model: nn.Module | None = None) -> Tensor:
    """Returns logits over two classes or more: a single one, as of a reward model, is the log-odds of the second.

    So is each logit of a multi-label classifier: `[rows, labels]` become `[rows, labels, 2]`.
    """
    logits = logits[..., None] if has_many_labels(model) else logits
    return torch.nn.functional.pad(logits, (1, 0)) if logits.shape[-1] == 1 else logits


def has_many_labels(model: nn.Module | None) -> bool:
    """Returns whether each logit of a model is a label by itself, as its config says."""
    return getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"


# Checks, with a forward pass over two tokens, whether a model can be evaluated on rows of token ids.


def check_evaluable(model: nn.Module, rows: Tensor | Inputs) -> None:
    """Refuses a model that `evaluate` cannot measure on `rows`, before hours are spent on quantizing it.

    Inputs of other kinds are not tried: one call with them may take long.
    """
    if isinstance(rows, Inputs):
        return
    if not isinstance(rows, Tensor):
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
            "takes one prediction for each token; give inputs by name, as .safetensors"
        )


def run_probe(model: nn.Module, probe: Tensor) -> Tensor:
    """Returns the logits of a model for token ids, int64 `[rows, tokens]`, or its first output if it has none."""
    try:
        # As the passes that follow run: dropout would also advance the caller's random generator.
        with torch.no_grad(), evaluating(model), without_cache([getattr(model, "config", None)]):
            return logits_of(model, probe.to(device_of(model)))
    except UserError:  # of quantized attention
        raise
    except Exception as error:  # the model's own code, which may fail in any way on inputs that it is not made for
        raise ValueError(f"it does not run on token ids ({' '.join(str(error).split())})") from error


def predicts_tokens(model: nn.Module, probe: Tensor) -> bool:
    """Returns whether a model returns logits; a Hugging Face encoder without a head returns hidden states."""
    # A module outside of transformers is taken to return logits.
    find_head = getattr(model, "get_output_embeddings", None)
    if not callable(find_head) or find_head() is not None:
        return True
    return hasattr(model(probe.to(device_of(model))), "logits")


def _check_rows(model: nn.Module, rows: Tensor) -> None:
    if rows.dim() != 2 or rows.shape[0] < 1 or rows.shape[1] < 2 or rows.dtype != torch.int64:
        raise ValueError(f"rows {list(rows.shape)} {rows.dtype}: expected int64 [rows, seqlen], seqlen at least 2")
    config = text_config(getattr(model, "config", None))
    if getattr(config, "is_encoder_decoder", False):
        named = "give inputs by name, with decoder_input_ids, as .safetensors"
        raise ValueError(f"{type(model).__name__} is an encoder-decoder, which reads more than one text; {named}")
    check_positions(rows.shape[1], config, type(model).__name__)
    # An id outside the vocabulary is an index error on a CPU and an asynchronous device assert on a GPU.
    vocabulary = getattr(config, "vocab_size", None)
    low, high = (int(n) for n in torch.aminmax(rows))
    if low < 0 or (isinstance(vocabulary, int) and high >= vocabulary):
        raise ValueError(
            f"rows: token id {low if low < 0 else high} is outside the vocabulary of {type(model).__name__} "
            f"({vocabulary} tokens); the rows were made with another tokenizer"
        )


def drawn(p: Tensor, generator: torch.Generator) -> Tensor:
    """Returns a token drawn from each distribution of `p` `[positions, vocabulary]`, int64 `[positions, 1]`."""
    # The first one whose cumulative probability exceeds a number from 0..1, which is drawn where the generator is.
    uniform = torch.rand(len(p), 1, generator=generator, dtype=torch.float32, device=generator.device).to(p.device)
    cumulative = p.cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=p.shape[-1] - 1)
