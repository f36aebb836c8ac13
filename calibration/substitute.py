"""A `Substitute` takes the place of a layer while the layer is measured or solved.

Modeling code reads more of a layer than its weight: its width (`self.proj.in_features`), or a mark that somebody set.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Substitute(nn.Module):
    """A module from which all attributes can be read that it lacks and that the layer in its place has."""

    def read_from(self, replaced: nn.Module) -> None:
        """Reads attributes from `replaced` from here on; PyTorch registers no parameter of a name that can be read."""
        # Past nn.Module.__setattr__: as a submodule the layer would appear in the state of the model.
        object.__setattr__(self, "_replaced", replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            replaced = vars(self).get("_replaced")
            if replaced is None:
                raise
            return getattr(replaced, name)
