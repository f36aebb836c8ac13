"""The mixes of formats that llama.cpp calls Q4_K_M and so on: which layers get more bits than the others.

Errors of some layers cost more than others: values, the down projections, and the output head. A mix gives them the
next format, in the first and last eighth of the blocks and in every third between (`_M`), or in the first few (`_S`),
by llama.cpp's own rules. K-quants need rows of whole superblocks of 256 weights; other widths get the format of about
the same bits in groups of 32, as in llama.cpp.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from quant.formats.format import GGUF_FORMATS, Format
from quant.recipes.groups import group_name
from quant.recipes.layers import Layer, LayerKind
from quant.recipes.plan import LayerPlan, groups_of
from quant.recipes.recipe import KEEP, MIXES, Rule

FALLBACKS = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_BLOCK = re.compile(r"\.(\d+)\.")


def mix_rules(name: str, layers: Sequence[Layer]) -> Iterator[Rule]:
    """Yields the exceptions of the mix called `name` for the layers of a model; none for another recipe."""
    if name not in MIXES:
        return
    base, count = MIXES[name], 1 + max((_block(layer.name) for layer in layers), default=0)
    for layer in layers:
        index, last = _block(layer.name), layer.name.rpartition(".")[2]
        more = index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2
        chosen = None
        if layer.kind == LayerKind.HEAD and layer.tied_to is None:
            chosen = "q8_0" if base == "q8_0" else "q6_k"
        elif name.endswith("_m") and last in ("down_proj", "v_proj") and more:
            chosen = "q6_k"
        elif last == "qkv_proj" and name.endswith("_m"):
            chosen = "q5_k" if base == "q4_k" else "q6_k"
        elif name == "q4_k_s" and ((last == "v_proj" and index < 4) or (last == "down_proj" and index < count // 8)):
            chosen = "q5_k"
        if chosen is not None and chosen != base:
            yield Rule(layer.name, chosen, KEEP, reason=f"{name} has {chosen} there")


def embedding_format(plan_formats: Sequence[Format | None], *, is_tied: bool, width: int) -> Format | None:
    """Returns the format of the embedding in a file whose layers have these; None for 16 bit.

    llama.cpp gives an embedding that is the output head too the head's format.
    """
    names = [format.name for format in plan_formats if format is not None and format.gguf]
    if not names:
        return None
    base = max(set(names), key=names.count)
    chosen = "q6_k" if is_tied and base != "q8_0" else "q8_0" if base == "q8_0" else base
    return fitting(GGUF_FORMATS[chosen], width)


def fitting(format: Format, width: int) -> Format:
    """Returns `format`, or the one that llama.cpp takes where rows of `width` are no whole superblocks."""
    return GGUF_FORMATS[FALLBACKS[format.name]] if format.superblock and width % format.superblock else format


def without_mixed_groups(layers: list[LayerPlan]) -> list[LayerPlan]:
    """Takes layers out of fusion groups whose members have other formats; llama.cpp merges none of them."""
    renamed = dict[str, str | None]()
    for members in groups_of(layers).values():
        if len({m.weight for m in members}) > 1 and any(m.weight is not None and m.weight.gguf for m in members):
            for weight in {m.weight for m in members}:
                alike = [m.name for m in members if m.weight is weight]
                renamed |= dict.fromkeys(alike, group_name(alike) if len(alike) > 1 else None)
    return [replace(layer, group=renamed[layer.name]) if layer.name in renamed else layer for layer in layers]


def _block(name: str) -> int:
    match = _BLOCK.search(name)
    return int(match[1]) if match else 0
