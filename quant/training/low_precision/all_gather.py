"""FSDP2 gathers weights in FP8: each rank rounds its shard, and half as many bytes go over the network as in BF16.

    shard ─▶ param_dtype ─▶ codes, scales of squares ─▶ all-gather ─▶ element · scale, in param_dtype ─▶ the layer

It changes no number. Square blocks with scales that are powers of two are the same wherever they are measured, provided
that no block lies on two ranks; element · scale is exact in BF16; and rounding such values again gives the same values.
So a layer computes the same as after a gather in BF16. A weight whose shards would cut blocks is gathered whole.

`ShardInFP8` is the tensor that FSDP2 calls before and after a gather (its protocol for tensor subclasses). Everything
else sees the tensor that it holds: optimizers, checkpoints and tensors that are made from it are plain.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map_only

from quant.base.errors import UserError
from quant.kernels.training.fp8_block_layout import BLOCK
from quant.recipes.callers_model import optimizers_of
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.native import scale_rule
from quant.training.low_precision.training_recipe import TrainingRecipe

_aten = torch.ops.aten
_KEEPS_CLASS = {
    _aten.as_strided.default, _aten.clone.default, _aten.copy_.default, _aten.detach.default, _aten.empty_like.default,
    _aten.new_zeros.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default, _aten._pin_memory.default,
    _aten._to_copy.default,
}  # fmt: skip
"""Operations by which FSDP2 shards, pads and moves parameters."""


class ShardInFP8(Tensor):
    """A weight `[out, in]`, or a shard of one, that FSDP2 gathers as E4M3 codes and scales of 128×128 squares."""

    @staticmethod
    def __new__(cls, tensor: Tensor) -> "ShardInFP8":
        return Tensor._make_wrapper_subclass(
            cls, tensor.size(), strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=tensor.dtype,
            device=tensor.device, layout=tensor.layout, requires_grad=tensor.requires_grad,
        )  # fmt: skip

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain_args, plain_kwargs = tree_map_only(ShardInFP8, lambda x: x.tensor, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        # An operation in place returns its own operand.
        if args and isinstance(args[0], ShardInFP8) and result is plain_args[0]:
            return args[0]
        if func not in _KEEPS_CLASS:
            return result
        return tree_map_only(Tensor, lambda x: x if isinstance(x, ShardInFP8) else ShardInFP8(x), result)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["tensor"], None

    @staticmethod
    def __tensor_unflatten__(tensors: dict[str, Tensor], context: None, size: Any, stride: Any) -> "ShardInFP8":
        return ShardInFP8(tensors["tensor"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor.__reduce_ex__(protocol)  # a file holds the plain tensor

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Returns the tensors that this rank sends; the size of the whole decides, so that all ranks send alike."""
        shard = self.tensor.to(policy.param_dtype or self.dtype)
        if outer_size[0] % (mesh.size() * BLOCK) or outer_size[1] % BLOCK:
            missing = -(-outer_size[0] // mesh.size()) - len(shard)
            return (nn.functional.pad(shard, (0, 0, 0, missing)) if missing else shard,), None
        # Of a layer that trains in another format by now, or in none, nothing is rounded; one rank sends nothing.
        if not isinstance(module, LowPrecisionLinear) or mesh.size() == 1:
            return (shard,), None
        rule = scale_rule(module.low_precision.recipe)
        codes, scale, *_ = torch.ops.quant.fp8_block_operands(shard, rule, True, True, False)
        # Without the padding of products, and as bytes: gloo has no FP8.
        rows, columns = shard.shape
        codes, scale = codes[:rows, :columns], scale[: rows // BLOCK, : columns // BLOCK]
        return (codes.contiguous().view(torch.uint8), scale.contiguous()), None

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Returns the whole weight in `dtype`; with `out`, a weight that was gathered before, in its memory."""
        if len(gathered) == 1:
            whole = gathered[0]
        else:
            # Each element times the scale of its square: exact in BF16, for both are short.
            codes, scale = gathered[0].view(torch.float8_e4m3fn), gathered[1]
            squares = codes.to(dtype).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
            whole = (squares * scale[:, None, :, None].to(dtype)).view(codes.shape)
        if out is None:
            return whole, (whole,)
        # Gathered in 16 bit, into memory of the gather before: `out` is a view of it, without the padding of ranks.
        if out.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            return None
        # No operation on the weight: a gather gives the values that the pass before had.
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def check_gather_in_fp8(model: nn.Module, recipe: TrainingRecipe) -> None:
    """Raises UserError where FP8 codes do not determine a recipe's weights, or an optimizer holds these already."""
    weight = recipe.weight
    if weight is None or not weight.has_square_blocks or weight.global_scale or not recipe.power_of_two_scales:
        raise UserError(
            f"{recipe.name}: weights can be gathered in FP8 where square blocks have scales that are powers of two, as "
            "in fp8_block; others are measured from the whole weight or along both axes; leave out all_gather_fp8"
        )
    for optimizer in optimizers_of({id(parameter) for parameter in model.parameters()}):
        raise UserError(
            f"an optimizer ({type(optimizer).__name__}) holds parameters that all_gather_fp8 replaces, and would train "
            "none of them; make it after fully_shard"
        )


def set_gather(model: nn.Module, *, in_fp8: bool) -> None:
    """Has FSDP2, when it shards the model, gather the weights of low-precision layers in FP8, or as they are again.

    Layers get new parameters for their weights, one for each that was: tied weights stay tied.
    """
    parameters: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, LowPrecisionLinear):
            held, data = module.weight, module.weight.data
            if held not in parameters and (in_fp8 or isinstance(data, ShardInFP8)):
                new = data.tensor if isinstance(data, ShardInFP8) else ShardInFP8(data)
                parameters[held] = nn.Parameter(new, requires_grad=held.requires_grad)
            module.weight = parameters.get(held, held)
