"""A `Guard` gives a layer whose quantized output strays too far from the original the next format in its list.

Recipes, plans and the command line write it as its limit and the formats to try: `0.1 fp8_channel keep`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.formats.format import Format, parse_format

if TYPE_CHECKING:
    from quant.recipes.plan import LayerPlan


@dataclass(frozen=True)
class Guard:
    """When a layer is promoted, and to which format.

    Attributes:
        limit: largest relative error of a layer's output on held-out calibration rows.
        formats: formats that follow the planned one, in this order; None is 16 bit.
    """

    limit: float
    formats: tuple[Format | None, ...] = (None,)

    @classmethod
    def parse(cls, text: str) -> Guard:
        """Returns a guard from `LIMIT [FORMAT …]`; without formats, a layer beyond the limit stays in 16 bit.

        Raises:
            ValueError: the limit is not a positive number, or a format is unknown.
        """
        first, *names = text.split() or [""]
        try:
            limit = float(first)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise ValueError(f"guard {text!r}: write a positive limit and the formats to try, as in '0.1 fp8 keep'")
        try:
            formats = tuple(map(parse_format, names))
        except ValueError as error:
            raise ValueError(f"guard {text!r}: {error}") from None
        return cls(limit, formats or (None,))

    def formats_for(self, layer: LayerPlan) -> tuple[Format | None, ...]:
        """Returns the list for one layer, its present format first where it is not in it."""
        # A layer may have been given a format further along the list, from which it is promoted.
        return self.formats if layer.weight in self.formats else (layer.weight, *self.formats)
