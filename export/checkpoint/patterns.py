r"""Matches patterns of other tools' checkpoints, `re:…` in compressed-tensors' `targets` and `ignore`, in bounded time.

Python's `re` tries the ways in which a pattern may match one after the other, and `(a+)+b` has exponentially many. A
checkpoint may come from anybody, so a pattern is matched here by the *set* of positions that each part can reach, an
integer with one bit a position. Single characters and runs of them take a few operations on whole sets; groups that
repeat, and look-aheads, are worked out once for each position. That takes polynomial time in pattern and name.

    x        (S & where(x)) << 1                        where(x): positions of the name at which x stands
    x*       ((((S & W) + W) ^ W) | S), W = where(x)    the carry runs through neighbouring bits
    (?=A)    S & {p : A matches from p}

(`x*` is MatchStar of Cameron et al., "Bitwise data parallelism in regular expression matching", PACT 2014.)

google-re2 has the same guarantee, but no look-ahead, and published checkpoints have them: `re:^(?!.*experts).*$` keeps
everything but the experts in 16 bit. With re2, such checkpoints would no longer load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

LONGEST = 1000
"""Characters of a pattern."""
_TOKENS = re.compile(
    r"""
    (?P<comment> \(\?\#[^)]*\) )
  | (?P<group>   \( (?: \?: | \?= | \?! | \?P<\w+> | (?!\?) ) )
  | (?P<close>   \) )
  | (?P<either>  \| )
  | (?P<repeat>  (?: [*+?] | \{ (?: (?P<least>\d+) (?P<range>,(?P<most>\d*))? | ,(?P<at_most>\d*) ) \} )
                 (?P<mode>[?+]?) )
  | (?P<anchor>  \^ | \$ | \\[AZzbB] )
  | (?P<char>    \[ \^? \]? (?: \\. | [^\]\\] )* \]
               | \\ (?: x[0-9a-fA-F]{2} | u[0-9a-fA-F]{4} | U[0-9a-fA-F]{8} | N\{[^}]*\} | 0[0-7]{0,2} | [0-7]{3} | \D )
               | [^\\(] )
    """,
    re.DOTALL | re.VERBOSE,
)
Part = Callable[[str, int], int]
"""From a name and a set of positions to the set of positions at which the part can end."""


def matches(pattern: str, name: str) -> bool:
    """Returns whether a regular expression matches at the start of `name`, as `re.match` says.

    Raises:
        ValueError: too long, no regular expression, or with parts that take more than the positions (back references,
            look-behinds, flags, possessive repetitions).
    """
    try:
        return _compiled(pattern)(name, 1) != 0
    except RecursionError:
        raise ValueError(f"the pattern {pattern[:50]!r}… is nested too deeply; write it flat") from None


@lru_cache
def _compiled(pattern: str) -> Part:
    if len(pattern) > LONGEST:
        raise ValueError(f"the pattern {pattern[:50]!r}… has {len(pattern):,} characters; at most {LONGEST:,} are read")
    # The parser below may rely on a pattern that is well formed: groups are closed, repetitions follow something.
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern!r} is not a regular expression ({error})") from None
    return _branches(_tokens(pattern), pattern)


def _tokens(pattern: str) -> Iterator[re.Match[str]]:
    """Yields the tokens of a pattern that `re` accepts, without comments."""
    end = 0
    while end < len(pattern):
        token = _TOKENS.match(pattern, end)
        if token is None or token["mode"] == "+":
            raise ValueError(
                f"the pattern {pattern!r} has a part that is not read, {pattern[end:][:10]!r}; write it without"
            )
        end = token.end()
        if token["comment"] is None:
            yield token


def _branches(tokens: Iterator[re.Match[str]], pattern: str) -> Part:
    """Returns the part up to the end of its group: the branches between `|`."""
    # a(b|c)*d   is the sequence of a, the repetition of the branches b and c, and d
    branches: list[list[Part]] = [[]]
    char = ""  # the last token, if it is a character that a repetition may follow
    for token in tokens:
        if token["close"]:
            break
        parts = branches[-1]
        if token["either"]:
            branches.append([])
        elif token["repeat"]:
            least, most = _bounds(token)
            parts[-1] = _star(char) if char and (least, most) == (0, None) else _repeated(parts[-1], least, most)
        elif token["group"]:
            inside = _branches(tokens, pattern)
            parts.append(_ahead(inside, token["group"] == "(?=") if token["group"] in ("(?=", "(?!") else inside)
        elif token["anchor"]:
            parts.append(_anchor(token["anchor"]))
        else:
            parts.append(_char(token["char"]))
        char = token["char"] or ""
    return _either([_sequence(parts) for parts in branches])


def _bounds(token: re.Match[str]) -> tuple[int, int | None]:
    """Returns the least and greatest count of a repetition; None is without limit."""
    if token["repeat"][0] in "*+?":
        return int(token["repeat"][0] == "+"), 1 if token["repeat"][0] == "?" else None
    if token["least"] is None:
        return 0, int(token["at_most"]) if token["at_most"] else None
    if token["range"] is None:
        return int(token["least"]), int(token["least"])
    return int(token["least"]), int(token["most"]) if token["most"] else None


@lru_cache(4096)
def _where(token: str, name: str) -> int:
    """Returns the positions of a name at which a character, a set of characters or an anchor stands."""
    return sum(1 << match.start() for match in re.finditer(token, name))


def _char(token: str) -> Part:
    return lambda name, starts: (starts & _where(token, name)) << 1


def _star(token: str) -> Part:
    # name  a a a b a      where = 1 1 1 0 1      (lowest bit first)
    # starts at position 0          S = 1 0 0 0 0
    # where + (S & where)             = 0 0 0 1 1      the carry leaves the run of ones at its end, position 3
    # ^ where                         = 1 1 1 1 0      positions 0 to 3 can be reached
    def ends(name: str, starts: int) -> int:
        where = _where(token, name)
        return (((starts & where) + where) ^ where) | starts

    return ends


def _anchor(token: str) -> Part:
    return lambda name, starts: starts & _where(token, name)


def _sequence(parts: list[Part]) -> Part:
    def ends(name: str, starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = part(name, starts)
        return starts

    return ends


def _either(branches: list[Part]) -> Part:
    if len(branches) == 1:
        return branches[0]

    def ends(name: str, starts: int) -> int:
        reached = 0
        for branch in branches:
            reached |= branch(name, starts)
        return reached

    return ends


def _ahead(part: Part, expected: bool) -> Part:
    """Returns a look-ahead: the positions from which `part` matches, or does not."""

    @lru_cache(4096)
    def holds(name: str, position: int) -> bool:
        return (part(name, position) != 0) is expected

    return lambda name, starts: sum(position for position in _bits(starts) if holds(name, position))


def _repeated(part: Part, least: int, most: int | None) -> Part:
    # From each position once, and not from each set: nested repetitions would take exponentially many sets.
    @lru_cache(4096)
    def from_one(name: str, position: int) -> int:
        reached = position if not least else 0
        level, count = position, 0
        while level and (most is None or count < most):
            following = part(name, level)
            count += 1
            if count > least:
                following &= ~reached  # positions that were reached before lead nowhere new
            elif following == level:  # the part can stay where it is, and so any number of times
                count = max(count, least)
            if count >= least:
                reached |= following
            level = following
        return reached

    def ends(name: str, starts: int) -> int:
        reached = 0
        for position in _bits(starts):
            reached |= from_one(name, position)
        return reached

    return ends


def _bits(positions: int) -> Iterator[int]:
    """Yields each position of a set, as a set of its own."""
    while positions:
        yield positions & -positions
        positions &= positions - 1
