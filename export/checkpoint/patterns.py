"""Patterns of other tools' checkpoints (`re:…` in compressed-tensors' `targets` and `ignore`) are matched here.

Python's `re` tries the ways in which a pattern may match one after the other, and `(a+)+b` has exponentially many. A
checkpoint may come from anybody, so a pattern with more than a few choices is matched by the sets of positions that its
parts can reach. Each part is worked out once for each position of the name, which takes polynomial time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

LONGEST = 1000
"""Characters of a pattern."""
_SINGLE = (op.ANY, op.LITERAL, op.NOT_LITERAL, op.IN)
_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d",
    op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s",
    op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w",
    op.CATEGORY_NOT_WORD: r"\W",
}


def matches(pattern: str, name: str) -> bool:
    """Whether a regular expression matches at the start of `name`, as `re.match` says.

    Raises:
        ValueError: too long, no regular expression, or with parts that take more than the positions (back references,
            look-behinds, flags).
    """
    tree, few_choices = _parsed(pattern)
    if few_choices:
        return re.match(pattern, name) is not None
    try:
        return bool(_Matcher(name).ends(tree, 0))
    except RecursionError:
        raise ValueError(f"the pattern {pattern[:50]!r}… is nested too deeply; write it flat") from None


@lru_cache
def _parsed(pattern: str) -> tuple[Any, bool]:
    """The parts of a pattern, and whether `re` is quick with it: at most three choices, none in a repetition."""
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern[:50]!r}… has {len(pattern):,} characters; at most {LONGEST:,} are read")
    try:
        tree = parser.parse(pattern)
        choices = _choices(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression ({error})") from None
    if tree.state.flags != re.UNICODE:
        raise ValueError(f"the pattern {pattern!r} sets flags, which are not read; write it without")
    return tree, choices <= 3


def _choices(parts: Iterable[Any], repeated: bool = False) -> float:
    """Repetitions and branches among the parts; infinite where one is in a repetition, or a part is unusual."""
    count = 0.0
    for kind, value in parts:
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            count += math.inf if repeated else 1 + _choices(value[2], True)
        elif kind is op.BRANCH:
            count += math.inf if repeated else 1 + sum(map(_choices, value[1]))
        elif kind is op.SUBPATTERN:
            count += _choices(value[3], repeated)
        elif kind not in (*_SINGLE, op.AT):
            count += math.inf
    return count


class _Matcher:
    """Where the parts of a pattern, matched from a position of `text`, can end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.known: dict[tuple[int, int], frozenset[int]] = {}

    def ends(self, parts: Iterable[Any], start: int) -> frozenset[int]:
        """Ends of a sequence of parts."""
        key = id(parts), start
        if key not in self.known:
            found = frozenset({start})
            for kind, value in parts:
                found = frozenset(end for place in found for end in self._part(kind, value, place))
            self.known[key] = found
        return self.known[key]

    def _part(self, kind: Any, value: Any, start: int) -> Iterable[int]:
        if kind is op.BRANCH:
            return {end for branch in value[1] for end in self.ends(branch, start)}
        if kind is op.SUBPATTERN:
            return self.ends(value[3], start)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeated(value[0], value[1], value[2], start)
        if kind in (op.ASSERT, op.ASSERT_NOT) and value[0] == 1:
            return {start} if bool(self.ends(value[1], start)) == (kind is op.ASSERT) else ()
        if kind is op.AT:
            here = re.compile({op.AT_BEGINNING: r"^", op.AT_BEGINNING_STRING: r"\A", op.AT_END: "$"}.get(value, r"\Z"))
            if value in (op.AT_BOUNDARY, op.AT_NON_BOUNDARY):
                here = re.compile(r"\b" if value is op.AT_BOUNDARY else r"\B")
            return {start} if here.match(self.text, start) else ()
        if kind not in _SINGLE:
            raise ValueError(f"a pattern has a part that is not read ({kind}); write it without")
        return {start + 1} if start < len(self.text) and _is(kind, value, self.text[start]) else ()

    def _repeated(self, least: int, most: int, parts: Any, start: int) -> set[int]:
        reached = {start} if not least else set()
        level, count = {start}, 0
        while level and count < most:
            following = {end for place in level for end in self.ends(parts, place)}
            count += 1
            if count > least:
                following -= reached
            elif following == level:  # the part matches nothing, as often as is asked for
                count = max(count, least)
            if count >= least:
                reached |= following
            level = following
        return reached


def _is(kind: Any, value: Any, char: str) -> bool:
    """Whether one character is what a part of a pattern asks for."""
    if kind is op.ANY:
        return char != "\n"
    if kind is op.LITERAL:
        return bool(ord(char) == value)
    if kind is op.NOT_LITERAL:
        return bool(ord(char) != value)
    if kind is op.RANGE:
        return bool(value[0] <= ord(char) <= value[1])
    if kind is op.CATEGORY:
        return re.match(_CATEGORIES[value], char) is not None
    negated = value[0][0] is op.NEGATE  # of a set of characters
    return any(_is(part, of, char) for part, of in value[negated:]) != negated
