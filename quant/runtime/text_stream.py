"""`TextStream` gives the text of tokens while a model still writes them.

Tokens hold parts of characters, and a tokenizer may remove a space once it sees the next word. So all tokens are
decoded together, and only the text that later tokens cannot change is given: it ends before an unfinished character,
and before the last word where the tokenizer cleans up spaces. The pieces, joined, are the decoded text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

_UNFINISHED = "\ufffd"
_EVERY = 256  # from this number of tokens on, several are decoded at once, because each time all tokens are decoded


class TextStream:
    """The text of one sequence, in pieces; also a streamer of transformers' `generate`.

    Args:
        tokenizer: a tokenizer of transformers.
        tell: a function that is called with each piece; None for no listener.
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

    def put(self, value: torch.Tensor) -> None:
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
