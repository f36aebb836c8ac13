"""This file puts quantized weights into a model: modules that replace the original ones, and scales as buffers.

Loading a checkpoint and quantizing a model both end here. Nothing is imported that decides or measures.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from quant.base.errors import UserError
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.linear.conv import QuantConv
from quant.kernels.linear.embedding import QuantEmbedding, embedding_refusal
from quant.kernels.linear.experts import QuantExperts, run_experts_one_by_one
from quant.kernels.linear.quant_linear import QuantLinear, RunTimeParts
from quant.recipes.blocks import replaced, take_over
from quant.recipes.layers import LayerKind, stacking_of
from quant.recipes.plan import LayerPlan, Plan

# In eval mode without gradients, `nn.TransformerEncoderLayer` hands the weights of its linear layers to one fused
# operation. Quantized layers, and layers in training, would round neither their inputs there nor, in training, their
# weights. A layer whose activation is not marked as ReLU or GELU calls its parts instead.
# By class, the attribute that only the condition of the fused operation reads: the activation, and whether padding is
# left out by nested tensors, which no other operation takes.
_ATTRIBUTES: dict[type[nn.Module], str] = {
    nn.TransformerEncoderLayer: "activation_relu_or_gelu",
    nn.TransformerEncoder: "use_nested_tensor",
}


def call_encoder_layers(model: nn.Module) -> None:
    """Turns off the fused operation of every encoder layer in a model."""
    for module, attribute in _fused(model):
        setattr(module, attribute, 0)


@contextmanager
def calling_encoder_layers(model: nn.Module) -> Iterator[None]:
    """Turns off the fused operation of every encoder layer while open."""
    with replaced((module, attribute, 0) for module, attribute in _fused(model)):
        yield


def _fused(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in model.modules():
        for kind, attribute in _ATTRIBUTES.items():
            if isinstance(module, kind) and hasattr(module, attribute):
                yield module, attribute


def install_weight(
    model: nn.Module,
    layer: LayerPlan,
    weight: BlockScaledTensor,
    input_scale: Tensor | None,
    parts: RunTimeParts | None = None,
) -> None:
    """Replaces the layer's weight by a quantized module. A bias stays as it is, as do hooks and users' attributes."""
    parent_name, _, last = layer.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    parts = parts or RunTimeParts()
    # Members of a fusion group were given one tensor, which `named_buffers` would list under the first name alone.
    input_scale, second, pre_scale, channels = (
        None if scale is None else scale.clone()
        for scale in (input_scale, weight.global_scale, parts.pre_scale, parts.channels)
    )
    weight, parts = replace(weight, global_scale=second), replace(parts, pre_scale=pre_scale, channels=channels)
    new: nn.Module
    if layer.kind == LayerKind.EXPERTS:
        dtype = parent.get_parameter(last).dtype
        new = QuantExperts(weight, layer.activation, input_scale, dtype, stacking_of(parent, last))
        delattr(parent, last)
    elif layer.kind == LayerKind.EMBEDDING:
        table = parent.get_submodule(last)
        if refusal := embedding_refusal(table):
            raise UserError(f"{layer.name}: cannot be in {layer.weight}: {refusal}; keep it in 16 bit")
        assert isinstance(table, nn.Embedding)
        new = QuantEmbedding(weight, table.weight.dtype, table.padding_idx)
    elif layer.kind == LayerKind.CONV:
        new = QuantConv(weight, parent.get_submodule(last), layer.activation, input_scale)
    else:
        linear = parent.get_submodule(last)
        assert isinstance(linear.weight, Tensor)
        bias = getattr(linear, "bias", None)
        new = QuantLinear(weight, bias, layer.activation, input_scale, dtype=linear.weight.dtype, **vars(parts))
    # Experts were a parameter, which had no mode of its own.
    old = None if layer.kind == LayerKind.EXPERTS else parent.get_submodule(last)
    take_over(new, old)
    new.train(parent.training if old is None else old.training)
    setattr(parent, last, new)


def install_kv_scales(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Registers KV-cache scales as buffers of their attention modules, under the names of the checkpoint layout."""
    for name, tensor in tensors.items():
        attention, _, operand = name.rpartition(".")
        try:
            module = model.get_submodule(attention)
        except AttributeError:
            raise UserError(f"{name}: a scale of the KV cache, and the model has no module {attention}") from None
        module.register_buffer(operand, tensor)


def use_expert_modules(model: nn.Module, plan: Plan) -> None:
    """Tells a transformers model to call its experts as modules, so that activation formats apply to them too."""
    if any(layer.kind == LayerKind.EXPERTS for layer in plan.quantized):
        run_experts_one_by_one(model)


def mark_quantized(model: nn.Module) -> None:
    """Tells modeling code to call layers whose weight it would otherwise multiply by directly."""
    # Falcon-Mamba of transformers does this with its dt_proj, and torch's encoder layers with theirs.
    call_encoder_layers(model)
    if hasattr(model, "save_pretrained"):
        model.config._is_quantized = True  # type: ignore[union-attr]
