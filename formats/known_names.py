"""`known_names` ends the message of an error about an unknown name: the known ones, and the nearest of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def known_names(name: object, choices: Iterable[str], nouns: str = "", *, more: str = "") -> str:
    """Returns `known formats: nvfp4, mxfp4, fp8; did you mean nvfp4?`.

    Args:
        name: the unknown name; no suggestion is made for one that is not a string.
        choices: the known names.
        nouns: their noun in the plural; without one the list begins with `known:`.
        more: text directly behind the list, such as `, or None for 16 bit`.
    """
    choices = list(choices)
    suggestion = did_you_mean(name, choices) if isinstance(name, str) else ""
    return f"{f'known {nouns}' if nouns else 'known'}: {', '.join(choices)}{more}{suggestion}"


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Returns the end of a message that suggests a name: one that begins with `name`, or else the nearest one."""
    choices, name = list(choices), name.lower()
    longer = [each for each in choices if name and each.startswith(name)]
    # The shortest one first: "nvfp4" means the preset of that name, and not nvfp4a16.
    near = sorted(longer, key=len) or difflib.get_close_matches(name, choices, 1)
    return f"; did you mean {near[0]}?" if near else ""
