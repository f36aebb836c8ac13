"""`find_layers` lists the weights of a model and their kinds.

A layer is a module that owns a weight, a parameter with the matrices of all experts as Mixture-of-Experts models in
transformers 5 have them, or any other parameter of two or more dimensions: every such parameter is in the list.
Nothing here reads the data of a weight, so a model on the meta device will do. A module with a forward of its own is
tried on other values, see `quant.recipes.plain_layers`.

The purpose of a linear layer decides whether it may lose precision. A router is a linear layer in a block of experts
with one output for each expert. A head turns the last hidden states into the result: it is the module that
transformers knows as the output embeddings, or has a usual name of heads. The rule for names is the same for
modules and for bare state dicts.

A convolution, and the `Conv1D` of GPT-2, have the shape of the matrix that they multiply by: output channels first,
also where the parameter is stored with its input channels first (`transposed`).

Layers that read the same input are found by `quant.recipes.groups`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from quant.formats.format import Format
from quant.recipes import plain_layers
from quant.recipes.plain_layers import is_conv1d, patched_forward

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class Stacking:
    """How one parameter of a model holds the matrices of all experts.

        [experts, out, in]      most models
        [experts, in, out]      gpt-oss, Aria, Llama 4, which multiply with `x @ P[e]` or `bmm(x, P)`
        [experts * rows, cols]  DBRX, whose `w2` is [in, out] for each expert

    Rows of gate and up may alternate, as in gpt-oss. Everywhere in this package a matrix is `[out, in]` with gate above
    up, so that blocks lie along the axis of the dot product, and gate and up can be stored apart.
    """

    shape: tuple[int, ...]  # of the parameter
    experts: int
    transposed: bool = False  # each matrix is [in, out] there
    interleaved: bool = False  # rows of gate and up alternate there

    @property
    def is_plain(self) -> bool:
        """Whether the parameter is `[experts, out, in]`."""
        return len(self.shape) == 3 and not self.transposed and not self.interleaved

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """`[experts, out, in]`."""
        rows, columns = self.shape[-2] // (self.experts if len(self.shape) == 2 else 1), self.shape[-1]
        return (self.experts, columns, rows) if self.transposed else (self.experts, rows, columns)

    def read(self, stored: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Returns `matrices` for a parameter that is read from its file, one expert at a time."""
        return stored if self.is_plain else ReadMatrices(self, stored)

    def matrices(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the parameter as `[experts, out, in]`: a view, unless rows are interleaved."""
        stack = parameter.unflatten(0, (self.experts, -1)) if parameter.dim() == 2 else parameter
        stack = stack.transpose(1, 2) if self.transposed else stack
        return stack.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2) if self.interleaved else stack

    def parameter(self, matrices: torch.Tensor) -> torch.Tensor:
        """Undoes `matrices`."""
        import torch

        return torch.stack([self.hold(matrix) for matrix in matrices]).reshape(self.shape)

    def matrix(self, stored: torch.Tensor) -> torch.Tensor:
        """Returns the matrix `[out, in]` of one expert, from its part of the parameter."""
        rows = stored.t() if self.transposed else stored
        return rows.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1) if self.interleaved else rows

    def hold(self, matrix: torch.Tensor) -> torch.Tensor:
        """Undoes `matrix`."""
        rows = matrix.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) if self.interleaved else matrix
        return rows.t() if self.transposed else rows

    def outputs(self, y: torch.Tensor) -> torch.Tensor:
        """Returns the outputs `[..., out]` of a matrix in the order of the parameter's rows."""
        return y.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) if self.interleaved else y


class ReadMatrices(Sequence[Any]):
    """The matrices `[out, in]` of a parameter of which `stored` reads the part of one expert at a time."""

    is_meta = False

    def __init__(self, stacking: Stacking, stored: Sequence[torch.Tensor]) -> None:
        import torch

        self.stacking, self.stored, self.shape = stacking, stored, torch.Size(stacking.weight_shape)

    def __len__(self) -> int:
        return self.stacking.experts

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return self.stacking.matrix(self.stored[index])

    def dim(self) -> int:
        """Returns the number of dimensions, as a tensor's `dim`."""
        return len(self.shape)


EXPERT_NAMES = ("gate_up_proj", "down_proj", "gate_proj", "up_proj", "w1", "w2", "w3")


def stacking_of_experts(module: nn.Module, name: str) -> Stacking:
    """Returns how the parameter `name` holds the matrices of experts; ValueError where it holds something else."""
    if (stacking := stacking_of(module, name)) is None:
        raise ValueError(f"{type(module).__name__}.{name}: holds no matrices of experts")
    return stacking


def stacking_of(module: nn.Module, name: str) -> Stacking | None:
    """Returns how the parameter `name` of a module holds the matrices of experts; None where it holds something else.

    Two parameters together show whether matrices are transposed:

        gate_up_proj [experts, 2 * width, in], down_proj [experts, in, width]     plain
        gate_up_proj [experts, in, 2 * width], down_proj [experts, width, in]     transposed

    Where one is missing, an attribute that transformers sets on the module shows it. JetMoE calls each parameter
    `weight`; DBRX has its matrices in two dimensions, and multiplies by `w2` without transposing it.
    """
    parameter: Any = getattr(module, name)
    shape = tuple(parameter.shape)
    count = getattr(module, "moe_num_experts", None)
    # DBRX: [experts · ffn, hidden] in two dimensions. `v1` is its name for the up projection.
    if len(shape) == 2 and name in ("w1", "v1", "w2") and count and shape[0] == count * module.ffn_hidden_size:
        return Stacking(shape, count, transposed=name == "w2")
    # JetMoE: only sizes that the module repeats distinguish its experts from any other three-dimensional parameter.
    if name == "weight" and len(shape) == 3:
        sizes = tuple(getattr(module, size, None) for size in ("num_experts", "output_size", "input_size"))
        return Stacking(shape, shape[0]) if shape == sizes else None
    if len(shape) != 3 or name not in EXPERT_NAMES:
        return None
    pair = [
        tuple(getattr(module, part).shape) if hasattr(module, part) else () for part in ("gate_up_proj", "down_proj")
    ]
    transposed = are_transposed(*pair) if all(pair) else bool(getattr(module, "is_transposed", False))
    # GPT-OSS has the rows of gate and up alternate; elsewhere all of gate come before all of up.
    interleaved = name == "gate_up_proj" and not getattr(module, "is_concatenated", True)
    return Stacking(shape, shape[0], transposed, interleaved)


def expert_matrices(model: nn.Module, name: str, held: Any = None) -> Any:
    """Returns the matrices `[experts, out, in]` of a parameter, or a sequence that reads them one by one from its file.

    `held` has the parameter's values where they are elsewhere, on another device for example.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    stacking = stacking_of_experts(module, last)
    if held is None:
        parameter = module.get_parameter(last)
        if (stored := getattr(parameter, "stored", None)) is not None:
            return stacking.read(stored)
        held = parameter.detach()
    return stacking.matrices(held)


def are_transposed(fused: Sequence[int], down: Sequence[int]) -> bool:
    """Returns whether `gate_up_proj` and `down_proj` of these shapes are `[experts, in, out]`."""
    # gate_up [experts, a, b] and down [experts, c, d]: transposed where a = d (hidden) and b = 2 c (twice the width).
    return len(fused) == len(down) == 3 and tuple(fused[1:]) == (down[2], 2 * down[1])


class LayerKind(StrEnum):
    """The use that a layer makes of its weight.

    A member equals its value, so `"linear"` may stand for `LayerKind.LINEAR` wherever users write plans.
    """

    LINEAR = "linear"  # y = x Wᵀ + b
    EXPERTS = "experts"  # the matrices of all experts in one parameter [experts, out, in]
    EMBEDDING = "embedding"  # a table whose rows are looked up
    HEAD = "head"  # a linear layer that turns the last hidden states into the result
    NORM = "norm"  # one dimension
    CONV = "conv"
    PARAMETER = "parameter"  # two dimensions or more, in a module of an unknown kind
    OTHER = "other"  # the weight of a module of an unknown class

    @property
    def is_named_by_parameter(self) -> bool:
        """Whether a layer is named by the path of its parameter, and not by the path of the owner of `weight`."""
        return self in (LayerKind.EXPERTS, LayerKind.PARAMETER)

    def matrix(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape `[..., out, in]` that formats divide: a convolution has a row for each output channel."""
        return (shape[0], math.prod(shape[1:])) if self is LayerKind.CONV else shape


QUANTIZABLE = (LayerKind.LINEAR, LayerKind.EXPERTS, LayerKind.CONV)
_CONV1D_NAMES = ("c_attn", "q_attn", "c_fc", "c_proj")

# Names of heads: any part of a path, and the first part only, because deeper in a model these words mean other things.
_HEADS = {"lm_head", "score", "classifier", "classification_head", "qa_outputs", "class_labels_classifier"} | {
    "bbox_predictor", "box_predictor", "class_predictor", "class_embed", "bbox_embed", "distillation_classifier"
}  # fmt: skip
_TOP_HEADS = {"cls", "head", "fc", "proj_out", "embed_out", "lm_loss", "logits_proj", "generator_lm_head"}

ROUTER = "router: a rounding error sends tokens to the wrong expert"
_PACKED = "packed projections of nn.MultiheadAttention, which multiplies by them itself"
COMPUTED = "its module computes its weight from this parameter (a parametrization, a norm of weights, pruning)"
PERMANENT = "with remove_parametrizations, remove_weight_norm or prune.remove"
_TRANSPOSED = "experts are stored [experts, in, out], which takes the model's directory to quantize"
_SHARED = "the model holds this module in several places, and would keep it in the others"
_UNCALLED = "nn.MultiheadAttention multiplies by it without calling the layer"
_UNKNOWN_CONV = "convolution: shapes do not show whether it is transposed; quantize the module, not its tensors"


@dataclass(frozen=True)
class Layer:
    """A weight and the facts about it that need no data."""

    name: str  # module path, or parameter path for fused experts
    kind: LayerKind
    shape: tuple[int, ...]  # [..., out, in] however the model holds it; of a convolution [out, in / groups, kernel...]
    group: str | None = None  # name of its fusion group
    tied_to: str | None = None  # name of the layer whose parameter it shares
    obstacle: str | None = None  # why it cannot be quantized at all, if so
    kept: str | None = None  # why it stays in 16 bit unless a rule names it, where its kind does not say so
    input_dims: int | None = None  # dimensions of its input, where it was seen: 3 for [batch, tokens, in]
    transposed: bool = False  # the parameter is stored with its input axis first
    is_named: bool = False  # the group comes from names, because no run has called the layer
    is_bypassed: bool = False  # a run has called its siblings and not it: modeling code multiplies by its weight

    @property
    def matrix(self) -> tuple[int, ...]:
        """Shape `[..., out, in]` that formats divide into blocks, see `LayerKind.matrix`."""
        return self.kind.matrix(self.shape)


def find_layers(model: nn.Module) -> list[Layer]:
    """Lists every layer of `model` that owns a weight, in model order; `watching` finds their fusion groups."""
    from torch import nn

    head, routers, held_again = output_head(model), _routers(model), _held_again(model)
    tried: dict[Any, bool] = {}
    owner: dict[int, str] = {}
    layers = []
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter_name != "weight" and not (parameter.dim() > 1 and parameter.is_floating_point()):
                continue
            kind = _kind(module, parameter_name, parameter)
            # JetMoE calls the parameter of its experts `weight`, too; experts are named by their parameter.
            is_own = parameter_name == "weight" and kind != LayerKind.EXPERTS
            path = name if is_own else f"{name}.{parameter_name}".lstrip(".")
            if is_own and (module is head or (kind == LayerKind.LINEAR and _is_head(name))):
                kind = LayerKind.HEAD
            # The first path in model order owns a shared parameter.
            tied_to = owner.setdefault(id(parameter), path)
            # A transposed convolution, a Conv1D, and the linear layer that stands for one have their input axis first.
            input_first = isinstance(module, nn.modules.conv._ConvNd) and module.transposed
            input_first = input_first or is_conv1d(module) or hasattr(module, "stands_for")
            transposed = parameter_name == "weight" and input_first
            shape = _shape(module, parameter_name, parameter, transposed)
            shared = _SHARED if is_own and id(module) in held_again else None
            kept = ROUTER if name in routers else _PACKED if parameter_name == "in_proj_weight" else None
            kept = kept or (
                f"{COMPUTED}: to quantize it, make the weight permanent before, {PERMANENT}"
                if is_computed_from(path)
                else None
            )
            layers.append(
                Layer(
                    path, kind, shape, tied_to=None if tied_to == path else tied_to, kept=kept, transposed=transposed,
                    obstacle=_obstacle(module, kind, tried) or shared,
                )
            )  # fmt: skip
    return layers


def is_computed_from(path: str) -> bool:
    """Returns whether a module computes its weight from the parameter at `path`."""
    # torch's parametrizations put the parameter into a submodule; the older functions rename it.
    return ".parametrizations." in f".{path}" or path.endswith(("weight_orig", "weight_g", "weight_v"))


def _held_again(model: nn.Module) -> set[int]:
    """Returns the ids of modules that a model holds in several places, of which only one would get a quantized layer.

    These are the children of several modules, and the submodules of a module of several blocks: a block is quantized
    after the previous ones, and would find layers that are quantized already. In a block or a model that itself has two
    names (`llm` and `wrapper.llm`), layers are replaced for both.
    """
    held = Counter(id(child) for module in model.modules() for child in module._modules.values())
    paths = dict(model.named_modules(remove_duplicate=False))
    blocks: dict[int, set[tuple[int, ...]]] = {}
    for name, module in paths.items():
        parts = name.split(".")
        numbered = [".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdecimal()]
        blocks.setdefault(id(module), set()).add(tuple(id(paths[block]) for block in numbered))
    return {each for each, found in blocks.items() if held[each] > 1 or len(found) > 1}


def layers_of_state_dict(shapes: Mapping[str, Sequence[int]]) -> list[Layer]:
    """Returns layers guessed from the tensor names and shapes of a bare state dict, without a module."""
    # GPT-2's c_attn joins q, k and v: [in, 3 · in] as Conv1D stores it, [3 · in, in] as a linear layer would.
    transposed = any(
        name.endswith("c_attn.weight") and len(shape) == 2 and shape[1] == 3 * shape[0]
        for name, shape in shapes.items()
    )
    layers = []
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".")
        if last == "weight":
            kind = _kind_by_name(stem, shape)
            input_first = transposed and len(shape) == 2 and stem.rpartition(".")[2] in _CONV1D_NAMES
            obstacle = _UNKNOWN_CONV if kind == LayerKind.CONV else None
            parent, _, module = stem.rpartition(".")
            inside = f"{parent}." if parent else ""
            if module == "out_proj" and (f"{inside}in_proj_weight" in shapes or f"{inside}q_proj_weight" in shapes):
                obstacle = _UNCALLED
            outputs_first = tuple(shape[::-1] if input_first else shape)
            layers.append(Layer(stem, kind, outputs_first, obstacle=obstacle, transposed=input_first))
        elif len(shape) == 3 and last in EXPERT_NAMES:
            pair = [shapes.get(f"{stem}.{part}", ()) for part in ("gate_up_proj", "down_proj")]
            obstacle = _TRANSPOSED if are_transposed(*pair) else None
            layers.append(Layer(name, LayerKind.EXPERTS, tuple(shape), obstacle=obstacle))
        elif len(shape) > 1:
            layers.append(Layer(name, LayerKind.PARAMETER, tuple(shape)))
    return layers


def _kind(module: nn.Module, name: str, weight: torch.Tensor) -> LayerKind:
    from torch import nn

    if stacking_of(module, name) is not None:
        return LayerKind.EXPERTS
    if name != "weight":
        return LayerKind.PARAMETER
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return LayerKind.LINEAR
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return LayerKind.EMBEDDING
    if weight.dim() == 1:
        return LayerKind.NORM
    return LayerKind.CONV if isinstance(module, nn.modules.conv._ConvNd) else LayerKind.OTHER


def _obstacle(module: nn.Module, kind: LayerKind, tried: dict[Any, bool]) -> str | None:
    """Returns why the weight of `module` cannot be quantized, judging only by the module; None if it can."""
    from torch import nn

    if kind == LayerKind.CONV:
        return plain_layers.conv_obstacle(module)
    if kind in (LayerKind.EXPERTS, LayerKind.EMBEDDING):
        return plain_layers.hook_obstacle(module) if patched_forward(module) is None else plain_layers.PATCHED
    if kind not in (LayerKind.LINEAR, LayerKind.HEAD) or not (isinstance(module, nn.Linear) or is_conv1d(module)):
        return None
    # torch's class for out_proj of nn.MultiheadAttention, whose weight goes to F.multi_head_attention_forward.
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return _UNCALLED
    return plain_layers.linear_obstacle(module, tried)


def _shape(module: nn.Module, name: str, parameter: torch.Tensor, transposed: bool) -> tuple[int, ...]:
    """Returns the shape of a weight with output channels first, in whichever order the parameter is stored."""
    if (stacking := stacking_of(module, name)) is not None:
        return stacking.weight_shape
    if not transposed or hasattr(module, "stands_for"):
        return tuple(parameter.shape)
    inputs, outputs, *kernel = parameter.shape
    groups = getattr(module, "groups", 1)
    # ConvTranspose stores [in, out / groups, kernel...], Conv1D [in, out] without groups.
    return (outputs * groups, inputs // groups, *kernel)


def _routers(model: nn.Module) -> set[str]:
    """Returns the names of routers: linear layers in a block of experts with one output for each expert."""
    from torch import nn

    experts: dict[str, int] = {}
    for name, module in model.named_modules():
        fused = [p for n, p in module.named_parameters(recurse=False) if p.dim() == 3 and stacking_of(module, n)]
        listed = isinstance(module, nn.ModuleList) and name.endswith("experts")
        if fused or listed:
            experts[name] = len(fused[0]) if fused else len(module)
    routers = set()
    for name, module in model.named_modules():
        # Linear layers inside experts may by chance have as many outputs as there are experts.
        if isinstance(module, nn.Linear) and not any(name.startswith(f"{inside}.") for inside in experts):
            blocks = ((path[: path.rfind(".") + 1], count) for path, count in experts.items())
            if any(name.startswith(block) and module.out_features == count for block, count in blocks):
                routers.add(name)
    return routers


def _kind_by_name(stem: str, shape: Sequence[int]) -> LayerKind:
    if len(shape) == 1:
        return LayerKind.NORM
    last = stem.rpartition(".")[2]
    # GPT-2's names: wte for tokens, wpe for positions.
    if ("embed" in last and last not in _HEADS) or last in ("wte", "wpe"):
        return LayerKind.EMBEDDING
    if len(shape) == 2 and (_is_head(stem) or last == "output"):
        return LayerKind.HEAD
    kinds = {2: LayerKind.LINEAR, 3: LayerKind.CONV, 4: LayerKind.CONV, 5: LayerKind.CONV}
    return kinds.get(len(shape), LayerKind.OTHER)


def _is_head(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in _TOP_HEADS or not _HEADS.isdisjoint(parts)


def output_head(model: nn.Module) -> nn.Module | None:
    """Returns the module that turns hidden states into logits, as transformers knows it; None where there is none."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def obstacle(layer: Layer, weight: Format, activation: Format | None) -> str | None:
    """Returns why `layer` cannot take `weight` with inputs in `activation`, one clause; None if it can."""
    if layer.kind not in (*QUANTIZABLE, LayerKind.HEAD, LayerKind.EMBEDDING):
        return f"{weight} is for linear layers; this is a layer of kind '{layer.kind}'"
    if layer.kind == LayerKind.CONV:
        # Kernels take one scale a channel, and one a tensor or image.
        takes_of_input = "fp8, fp8_token, int8_token or int8_tensor"
        for format, takes in ((weight, "fp8, fp8_channel or int8"), (activation, takes_of_input)):
            if format is not None and not ((format.per_row or format.per_tensor) and format.scale.is_wide):
                return f"convolution: no runtime convolves in blocks, as {format} has them; it takes {takes}"
    if layer.kind == LayerKind.EMBEDDING and activation is not None:
        return f"the input of an embedding is a number of a row, which {activation} cannot round"
    # A head gets codes of its own, and the embedding stays as it is.
    if layer.tied_to is not None and layer.kind != LayerKind.HEAD:
        return f"tied to {layer.tied_to}, which is stored once and in 16 bit"
    if layer.obstacle is not None:
        return layer.obstacle
    if layer.is_bypassed and activation is not None and activation.is_static:
        # Mamba and Jamba: `self.dt_proj.weight @ time_step`.
        return f"its module multiplies by the weight itself, so that no scale of inputs in {activation} can be measured"
    # Checkpoints store gate and up of an expert as two matrices, each half of the fused rows.
    half = layer.shape[-2] // 2
    gates = layer.kind == LayerKind.EXPERTS and layer.name.endswith("gate_up_proj")
    if gates and weight.block[0] and half % weight.block[0]:
        return f"gate and up are stored apart, and {half} rows each are not a multiple of {weight}'s {weight.block[0]}"
    for format in (weight, activation):
        if format is None or format.divides(layer.matrix) or format.takes_short_blocks:
            continue
        block = format.superblock or format.block[1]
        return f"in = {layer.matrix[-1]} is not a multiple of {format}'s block of {block}"
    return None
