"""`Layout` is the interface of a checkpoint layout; the modules `modelopt` and `compressed_tensors` implement it.

Codes, scales and plans are the same in every layout. A layout decides the names and forms of the tensors on disk, and
the words in which config files describe a plan. `layouts.LAYOUTS` is the registry. This file imports neither torch nor
a layout, so that help texts and checks of options can name layouts at once.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from quant.export.checkpoint.files.names import FormatsOf, StoredNames
    from quant.formats.format import Format
    from quant.formats.tensor import BlockScaledTensor
    from quant.recipes.plan import LayerPlan, Plan

MODELOPT, COMPRESSED_TENSORS = "modelopt", "compressed-tensors"
LAYOUT_NAMES = (MODELOPT, COMPRESSED_TENSORS)
"""Layouts that are read, and that `quant.convert` writes. Each is called as in `quant_method` of config.json."""


class ExpectedTensor(NamedTuple):
    """The shape and dtype that a tensor of a layer must have."""

    shape: tuple[int, ...] | None  # None for one number in a tensor of any rank
    dtypes: tuple[torch.dtype, ...] = ()  # any of these; without any, a float of 16 bits or more


class Layout(Protocol):
    """The functions of a layout; `names` translates the names of the model's tensors to those on disk."""

    def check_plan(self, plan: Plan) -> None:
        """Raises ValueError if the layout cannot express the plan; the message names the layer and the way out."""

    def expected_tensors(
        self, format: Format, activation: Format | None, shape: tuple[int, ...]
    ) -> dict[str, ExpectedTensor]:
        """Returns the tensors that are stored for a matrix `[out, in]`, by their names below the layer's."""

    def compress(
        self, weight: BlockScaledTensor, input_scale: torch.Tensor | None, dtype: torch.dtype, activation: Format | None
    ) -> dict[str, torch.Tensor]:
        """Returns the tensors of one linear layer, by their names below the layer's; the inverse of `decompress`.

        `weight` is `[out, in]`, and `input_scale` static, in the format `activation`, by default the weight's.
        """

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether a layer's tensors are named as only this layout does; with eight bits they may agree."""

    def decompress(
        self, tensors: Mapping[str, torch.Tensor], format: Format
    ) -> tuple[BlockScaledTensor, torch.Tensor | None]:
        """Returns the weight and static activation scale of a layer; KeyError if a tensor of the format is missing."""

    def stored_kv_scale(self, name: str, scale: torch.Tensor, dtype: torch.dtype) -> tuple[str, torch.Tensor]:
        """Returns the name and form on disk of a scale of the KV cache, `….self_attn.k_scale` or `….v_scale`."""

    def quantization_config(self, plan: Plan, names: StoredNames | None = None) -> dict[str, Any]:
        """Returns `quantization_config` for config.json, of a plan that `check_plan` has passed."""

    def own_files(self, plan: Plan, names: StoredNames | None = None) -> dict[str, dict[str, Any]]:
        """Returns the contents of the config files that the layout has besides config.json, by file name."""

    def read_config(
        self, config: Mapping[str, Any], names: StoredNames, tensors: Container[str] = ()
    ) -> tuple[FormatsOf, Format | None]:
        """Returns the formats that a config gives to matrices, and the format of the KV cache.

        `config` is the `quantization_config`, or the table of the layout's own file; `tensors`, by their names in the
        model, may show what is quantized. ValueError for a scheme that is not supported.
        """

    def read_rotations(self, config: Mapping[str, Any], names: StoredNames) -> Callable[[str], int]:
        """Returns a function from a matrix's name to the block of its input's Hadamard rotation, or 0; ValueError."""

    def agrees(self, layer: LayerPlan, weight: Format | None, activation: Format | None) -> bool:
        """Returns whether formats that `read_config` gave for a layer mean the formats of its plan."""


def same_values(a: Format | None, b: Format | None) -> bool:
    """Returns whether two formats round alike, whatever their names; None is 16 bit."""
    if a is None or b is None:
        return a is b
    return (a.element, a.scale, a.block, a.global_scale) == (b.element, b.scale, b.block, b.global_scale)
