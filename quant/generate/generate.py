"""`generate` continues a prompt with a model, quantized or not, by greedy decoding with a key-value cache.

The same machine always gives the same tokens. Two machines do while the two likeliest tokens lie further apart than
rounding moves their logits. On SmolLM2 that is, on average:

    float32                              0       sums differ only in their last bits
    BF16                                 0.1
    FP8 attention and an FP8 cache       0.1     in either dtype
    FP8 attention and an NVFP4 cache     0.3     a key that rounds the other way changes the keys of later layers
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, known_names, option
from quant.calibration.evaluating import evaluating
from quant.calibration.session import Device, device_of, find_device
from quant.export.checkpoint.files.layouts import value_problem
from quant.formats.format import is_16bit
from quant.generate.fused_decoder import Decoder, decoder_refusal
from quant.generate.quantized_attention import quantized_attention
from quant.kernels.base.hardware import has_triton
from quant.kernels.linear.oracle import weights_stay
from quant.recipes.blocks import cache_argument, cache_of
from quant.recipes.callers_model import unwrapped
from quant.recipes.layers import output_head

_UNFINISHED = "\ufffd"
_EVERY = 256  # from this number of tokens on, several are decoded at once, because each time all tokens are decoded
_HEAD_ROWS = 1 << 13  # of an output head, widened at a time on a CPU
DTYPES = ("bfloat16", "float16", "float32")
"""Values of --dtype."""
GRAPH = "a CUDA graph a token"


class TextStream:
    """The text of one sequence, in pieces that `tell` is called with; also a streamer of transformers' `generate`.

    Tokens hold parts of characters, and a tokenizer may remove a space once it sees the next word. So all tokens are
    decoded together, and only the text that later tokens cannot change is given: it ends before an unfinished
    character, and before the last word where the tokenizer cleans up spaces. The pieces, joined, are the decoded text.
    """

    def __init__(self, tokenizer: Any, tell: Callable[[str], object] | None) -> None:
        self.tokens: list[int] = []
        self._tokenizer, self._tell = tokenizer, tell
        self._told = ""
        self._decoded = 0
        self._is_prompt = True

    @property
    def text(self) -> str:
        """The text of all tokens."""
        return str(self._tokenizer.decode(self.tokens, skip_special_tokens=True))

    def add(self, tokens: Sequence[int]) -> None:
        """Takes the next tokens."""
        self.tokens += tokens
        if self._tell is None or len(self.tokens) - self._decoded <= len(self.tokens) // _EVERY:
            return
        # A character cut in two decodes to U+FFFD at the end, until its last token comes.
        self._decoded, text = len(self.tokens), self.text.rstrip(_UNFINISHED)
        if getattr(self._tokenizer, "clean_up_tokenization_spaces", False):
            text = re.sub(r"\s*\S*$", "", text)
        self._give(text)

    def finish(self) -> str:
        """Gives the remaining text to the listener, and returns the whole text."""
        text = self.text
        self._give(text)
        return text

    def put(self, value: Tensor) -> None:
        """Adds tokens for transformers, which begins with the prompt."""
        if not self._is_prompt:
            self.add(value.flatten().tolist())
        self._is_prompt = False

    def end(self) -> None:
        """Does nothing; transformers calls it after the last token."""

    def _give(self, text: str) -> None:
        if self._tell is not None and len(text) > len(self._told) and text.startswith(self._told):
            piece, self._told = text[len(self._told) :], text
            self._tell(piece)


@dataclass(frozen=True)
class Generation:
    """The text that a model wrote, and how."""

    prompt: str
    text: str  # that was added
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]  # that were added, an end-of-text token included
    seconds: float  # of generating, loading excluded
    device: str
    kernels: str  # that multiplied by the quantized weights
    attention: str = "16bit"  # or "fp8"
    kv_cache: str = "16bit"  # or "fp8", "nvfp4"
    kv_cache_bytes: int | None = None  # of the pages of a quantized cache
    decoder: str = "transformers"  # or `GRAPH`; on a GPU with the reason why not

    @property
    def tokens_per_second(self) -> float:
        """Tokens added a second, the prompt's own pass included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    *,
    device: Device = "auto",
    dtype: str | None = None,
    attention: str | None = None,
    kv_cache: str | None = None,
    on_text: Callable[[str], object] | None = None,
) -> Generation:
    """Continues `prompt` with the likeliest tokens, until one that ends the text or `max_new_tokens`.

    Args:
        model: a causal language model of transformers; it is moved to `device`, and on a GPU its weights are put in
            the layout of the kernels.
        tokenizer: a tokenizer of transformers.
        prompt, max_new_tokens: the text, and at least 1.
        device: "cpu", "cuda", "cuda:1", …, "auto" for the GPU where there is one, or None for where the model is.
        dtype: one of `DTYPES`, for all that is not quantized; None keeps the model's.
        attention, kv_cache: "fp8" or "16bit"; "fp8", "nvfp4" or "16bit", by scales that were calibrated for the model.
        on_text: a function that is called with each piece of the text as soon as no later token can change it.

    Raises:
        UserError: an empty prompt, too many tokens for the model, a device that is not there, or NaN in the logits,
            with the tensor named that it comes from.
    """
    model = unwrapped(model, "generate")
    target = find_device(device) or device_of(model)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]], device="cpu")
    _check(model, ids, max_new_tokens)
    if dtype is not None:
        cast_unquantized(model, dtype)
    # After the cast, so that a float32 model never takes its full size on the GPU.
    model.to(target)
    ids = ids.to(target)
    kernels = "PyTorch reference"
    if ids.is_cuda:
        kernels = "Triton" if has_triton() else "PyTorch reference (Triton is not installed)"
    cache = _cache(model, kv_cache)
    stream = TextStream(tokenizer, on_text)
    started = time.perf_counter()
    formats = quantized_attention(model, attention=attention, kv_cache=kv_cache)
    with torch.no_grad(), evaluating(model), _wide_logits(model), formats, weights_stay():
        reason = "its attention is in FP8 over a KV cache in 16 bit"
        if cache is not None and cache.is_mixed:
            reason = "the formats of its KV cache differ by layer"
        elif is_16bit(attention) or cache is not None:
            reason = _decode(model, ids, max_new_tokens, stream.add, cache)
            # The decoder may have written the prompt into its cache before it refused: transformers starts with an
            # empty one.
            cache = cache if not reason else _cache(model, kv_cache)
        if reason:
            # transformers requires a token for padding, although a single row is never padded.
            pad = tokenizer.pad_token_id
            if pad is None:
                end = getattr(model.config, "eos_token_id", None)
                pad = end[0] if isinstance(end, list) else end
            # A mask of ones, and None for the options of sampling, or transformers warns: of a missing mask, and of
            # options from the generation config that greedy decoding ignores.
            model.generate(  # type: ignore[operator]
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                pad_token_id=pad,
                do_sample=False,
                num_beams=1,
                **dict.fromkeys(("temperature", "top_p", "top_k")),
                logits_processor=[partial(_check_logits, model)],
                streamer=stream,
                **cache_argument(model, cache),
            )
    seconds = time.perf_counter() - started
    # Only a GPU has a decoder of our own, so on a CPU the reason says nothing.
    decoder = GRAPH
    if reason:
        decoder = f"transformers: {reason}" if target.type == "cuda" else "transformers"
    return Generation(
        prompt=prompt, text=stream.finish(), prompt_tokens=tuple(ids[0].tolist()), tokens=tuple(stream.tokens),
        seconds=seconds, device=str(target), kernels=kernels,
        attention="16bit" if is_16bit(attention) else str(attention),
        kv_cache="16bit" if is_16bit(kv_cache) else str(kv_cache),
        kv_cache_bytes=None if cache is None else cache.nbytes, decoder=decoder,
    )  # fmt: skip


def _decode(
    model: nn.Module, ids: Tensor, max_new_tokens: int, tell: Callable[[list[int]], object], cache: Any = None
) -> str:
    """Decodes the tokens after `ids` `[1, tokens]` by `Decoder`, or returns why transformers has to give them.

    `cache` is an empty `QuantizedKVCache`; None keeps keys and values in 16 bit.
    """
    if reason := decoder_refusal(model):
        return reason
    count = ids.shape[1]
    is_quantized = cache is not None
    seen = model(ids, use_cache=True, logits_to_keep=1, **cache_argument(model, cache))
    cache = cache_of(seen)
    # The prompt's own logits choose the first token; the decoder computes from the second one on.
    first = int(_check_logits(model, ids, seen.logits[:, -1]).argmax())
    stops = end_tokens(model)
    if max_new_tokens == 1 or first in stops:
        tell([first])
        return ""
    decoder = Decoder(model, count + max_new_tokens, has_quantized_cache=is_quantized)
    decoder.begin(cache, first)
    # The same token both ways: models that this decoder misunderstands show it here, before any text is shown.
    expected = model(ids.new_tensor([[first]]), **cache_argument(model, cache)).logits[:, -1]
    if not decoder.agrees(decoder.step(), expected):
        return "the logits of its first token would be others"
    # The prompt and the step above have made two tokens; with more, the steps are replays.
    if max_new_tokens > 2:
        decoder.capture()
    for tokens in decoder.run(count, count + max_new_tokens, stops, steps_done=1):
        if not decoder.finite:
            _refuse_logits(model, count)
        tell(tokens)
    return ""


def _check_logits(model: nn.Module, ids: Tensor, logits: Tensor) -> Tensor:
    """Returns the logits unchanged, after a check for NaN.

    Transformers calls this before it chooses a token, and would choose one of NaN, too.
    """
    # NaN compares as false, so one comparison finds both NaN and infinity.
    if bool((logits < torch.inf).all()):  # a token that must not come has -infinity
        return logits
    return _refuse_logits(model, ids.shape[1])


def _refuse_logits(model: nn.Module, count: int) -> NoReturn:
    """Raises UserError for NaN in the logits behind `count` tokens or more."""
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            if problem := value_problem(tensor.detach(), is_buffer=is_buffer):
                raise UserError(f"{name} {list(tensor.shape)} {problem}; repair the model, or download it again")
    raise UserError(
        f"{type(model).__name__} gives NaN or infinite logits behind token {count}, and its weights hold neither: what "
        f"it computes overflows; generate in another {option('dtype')}, or with 16-bit attention and KV cache"
    )


def _cache(model: nn.Module, kv_cache: str | None) -> Any:
    if is_16bit(kv_cache):
        return None
    from quant.generate.quantized_kv_cache import QuantizedKVCache

    return QuantizedKVCache(model, str(kv_cache))


@contextmanager
def _wide_logits(model: nn.Module) -> Iterator[None]:
    """Makes a 16-bit head give the logits of one position in float32, as its sums are, while open.

    Rounded to BF16, the two largest logits of SmolLM2 are equal at 1 position in 20, and order decides.
    """
    head = output_head(model)
    if type(head) is not nn.Linear or head.weight.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    narrow = head.forward

    def forward(x: Tensor) -> Tensor:
        if x.shape[:-1].numel() > 1:
            return narrow(x)
        row = x.flatten(0, -2)
        if row.is_cuda:
            logits = torch.mm(row, head.weight.T, out_dtype=torch.float32)
        else:
            logits = torch.cat([row.float() @ part.float().T for part in head.weight.split(_HEAD_ROWS)], 1)
        if head.bias is not None:
            logits = logits + head.bias.float()
        return logits.unflatten(0, x.shape[:-1])

    # An instance attribute hides the method of the class; deleting it brings the method back.
    head.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del head.forward


def _check(model: nn.Module, ids: Tensor, max_new_tokens: int) -> None:
    if not ids.numel():
        raise UserError(f"the prompt holds no token; give some text with {option('prompt')}")
    if max_new_tokens < 1:
        raise UserError(f"{option('max_new_tokens')} is {max_new_tokens}; expected 1 or more")
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise UserError(
            f"the prompt has {ids.shape[1]} tokens and {max_new_tokens} more are wanted, but the model takes {limit}; "
            f"shorten the prompt or lower {option('max_new_tokens')}"
        )


def cast_unquantized(model: nn.Module, dtype: str) -> None:
    """Puts all that is not quantized in a dtype; buffers in float32, such as the frequencies of positions, stay."""
    if dtype not in DTYPES:
        raise UserError(f"{option('dtype', dtype)}: unknown; {known_names(dtype, DTYPES)}")
    # `.to(dtype)` casts all floating-point buffers, also frequencies that models keep in float32 on purpose.
    wide = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.dtype is torch.float32 and buffer.numel()
    ]
    if dtype == "float16":
        for name, parameter in model.named_parameters():
            largest = float(parameter.detach().abs().amax()) if parameter.numel() and not parameter.is_meta else 0.0
            if torch.finfo(torch.float16).max < largest < math.inf:
                raise UserError(
                    f"{name} {list(parameter.shape)} has values of up to {largest:.3g}, which are infinite in FP16; "
                    f"take BF16 or FP32 for {option('dtype')}"
                )
    model.to(getattr(torch, dtype))
    for module, name, buffer in wide:
        setattr(module, name, buffer)


def end_tokens(model: Any) -> tuple[int, ...]:
    """Returns the ids of the tokens that end a text of a transformers model."""
    stops = model.generation_config.eos_token_id
    return () if stops is None else tuple(stops) if isinstance(stops, list | tuple) else (int(stops),)
