"""`Checkpoint` opens a quantized checkpoint, and `fill` puts its tensors into a model. Every tensor is checked.

Of a checkpoint that came without plan.json, its config, the model's layers and the tensors determine the plan.
"""

import re
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, listed, require
from quant.export.checkpoint.files import modelopt
from quant.export.checkpoint.files.layout import MODELOPT
from quant.export.checkpoint.files.layouts import LAYOUTS, layout_of_config, plan_problems, scale_problem, value_problem
from quant.export.checkpoint.files.names import StoredNames, expert_names, in_model, matrix_names, stored_names
from quant.export.checkpoint.files.tensors import (
    FLAG,
    SECOND_LEVEL,
    TensorFiles,
    clear_flag,
    head_shapes,
    in_file,
    layer_tensor_names,
    read_layer,
    read_parts,
    untied_pairs,
)
from quant.formats.finite import is_wide_float
from quant.kernels.linear.install import install_kv_scales, install_weight, mark_quantized, use_expert_modules
from quant.models import huggingface, pipelines
from quant.models.files import check_elements, check_sizes, explained, read_fields, read_generation_config
from quant.models.prediction_heads import attach_head_layer, head_layers
from quant.models.stored_weights import keeps_float32
from quant.recipes.blocks import is_denoiser, stored_dtype
from quant.recipes.groups import group_experts, group_unseen
from quant.recipes.layers import Layer, LayerKind, find_layers, stacking_of
from quant.recipes.plan import PLAN_FILE, LayerPlan, Parts, Plan
from quant.recipes.plan_check import check_plan_fits


def plan_of_checkpoint(
    directory: Path,
    model_layers: Sequence[Layer],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    names: StoredNames | None = None,
) -> Plan:
    """Returns the plan of a checkpoint that came without one; ValueError if its config does not fit the tensors.

    `model_layers` are all layers, of which linear ones, the head and experts may be quantized. Layers that runtimes
    merge are in a fusion group if the checkpoint has one tensor scale for them.
    """
    names = names or StoredNames()
    layers = []
    try:
        layout = layout_of_config(config)
        formats_of, kv_cache = layout.read_config(config, names, tensors)
        rotation_of = layout.read_rotations(config, names)
        for layer in group_unseen(group_experts(model_layers)):
            # A config names the matrices of single experts; all of a projection are in one format.
            matrix = matrix_names(layer.name, 0)[0] if layer.kind == LayerKind.EXPERTS else layer.name
            # A target such as "Linear" may match any module, and other tools leave convolutions and stacked experts.
            may_be_quantized = layer.kind in (LayerKind.LINEAR, LayerKind.HEAD) or f"{matrix}.weight_scale" in tensors
            is_table = layer.kind == LayerKind.EMBEDDING
            formats = formats_of(matrix, "Embedding" if is_table else "Linear") if may_be_quantized else None
            weight, activation = formats or (None, None)
            activation = None if is_table else activation
            parts = Parts() if weight is None else Parts(hadamard=rotation_of(matrix))
            layers.append(
                LayerPlan(
                    layer.name, layer.kind, layer.shape, weight, activation, parts=parts, transposed=layer.transposed,
                    reason=f"as {directory.name} was written", group=layer.group if weight is not None else None,
                    tied_to=layer.tied_to if weight is None else None,
                )
            )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    plan = Plan(tuple(layers), kv_cache=kv_cache, provenance={"checkpoint": str(directory)})
    # `group_unseen` guesses groups by names; runtimes cannot merge layers whose formats or per-tensor scales differ.
    return plan.replace_layers(
        replace(member, group=None)
        for members in plan.groups().values()
        if len(members) == 1
        or len({(member.formats, member.parts) for member in members}) > 1
        or (members[0].kind == LayerKind.LINEAR and len({_tensor_scales(tensors, member) for member in members}) > 1)
        for member in members
    )


def _tensor_scales(tensors: Mapping[str, Tensor], layer: LayerPlan) -> tuple[float, ...]:
    names = [*SECOND_LEVEL, *(["weight_scale"] if layer.weight is not None and layer.weight.per_tensor else [])]
    scales = [tensors[f"{layer.name}.{name}"] for name in names if f"{layer.name}.{name}" in tensors]
    return tuple(float(scale) for scale in scales if scale.numel() == 1)


KV_SCALES = (".k_scale", ".v_scale")
"""Suffixes of the scales of the KV cache."""
CONFIG_TABLES = {"config.json": "quantization_config", modelopt.CONFIG_FILE: "quantization"}
"""Config files of a checkpoint, and the table in each that describes its quantization."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The files of a checkpoint and the model that they are for; each part is read once.

    `model` is unquantized; its parameters may be on the meta device. With `meta`, tensors are on the meta device too,
    read only from the headers of the files.
    """

    directory: Path
    model: nn.Module
    meta: bool = False

    def __post_init__(self) -> None:
        # Layers of prediction heads, which the model's class lacks, become modules as in `quantize`.
        present = head_layers(self.model)
        for name, shape in self.heads.items():
            if name not in present:
                weight = torch.empty(shape, dtype=stored_dtype(self.model), device="meta")
                attach_head_layer(self.model, name, weight)

    @cached_property
    def heads(self) -> dict[str, tuple[int, int]]:
        """The shapes of the quantized layers of prediction heads, by name."""
        return head_shapes(self.directory)

    @cached_property
    def names(self) -> StoredNames:
        """The names on disk of the model's tensors, and of the tensors that its class ignores."""
        files = TensorFiles(self.directory, meta=True)
        shapes = {name: files.shape(name) for name in files if name in files.carried}
        others = [name for name in files if name not in shapes]
        names = stored_names(self.model).with_carried(shapes, others)
        return names.with_joined(set(others), self.model.state_dict(keep_vars=True))

    @cached_property
    def tensors(self) -> TensorFiles:
        """The tensors, read on access, under the names that the model's modules have."""
        # ModelOpt stores `self_attn.k_proj.k_scale` where modules hold `self_attn.k_scale`; these names are changed
        # first.
        names = replace(self.names, back=(modelopt.kv_name_of_module, *self.names.back))
        return TensorFiles(self.directory, names.of_model, meta=self.meta)

    @cached_property
    def plan(self) -> Plan:
        """The checkpoint's plan.json, or else the plan that its config describes."""
        layers, config = find_layers(self.model), quantization_config(self.directory)
        file = self.directory / PLAN_FILE
        if file.is_file():
            plan = Plan.load(file)
            check_plan_fits(plan, layers)
            if (self.directory / "config.json").is_file():
                # Servers read config.json, and this toolkit plan.json: a checkpoint in which the two differ would run
                # in two ways.
                for problem in plan_problems(plan, config, self.names, self.tensors):
                    raise UserError(
                        f"{file}: {problem}; both are written together, so restore the one that was changed, or "
                        "quantize the model again"
                    )
            return plan
        assert config is not None
        return plan_of_checkpoint(self.directory, layers, config, self.tensors, self.names)


def fill(opened: Checkpoint, *, built: bool) -> nn.Module:
    """Returns the model with the tensors of its files; if it was `built` for them, its own are on the meta device."""
    model, tensors, plan = opened.model, opened.tensors, opened.plan
    owned: set[str] = set()
    if built and not is_denoiser(model):
        # transformers keeps some in float32, also the tensors that layers are made of.
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.is_floating_point() and keeps_float32(model, name, tensor.dtype):
                tensor.data = tensor.data.float()
    for layer in plan.quantized:
        # This toolkit writes an empty tensor of this name, so that transformers stops there (`StoredNames.stopped`).
        if layer.kind == LayerKind.EXPERTS and layer.name in tensors and tensors[layer.name].numel():
            raise UserError(
                f"{in_file(tensors, layer.name)} is left over, because its experts are quantized one by one; quantize "
                "the model again, or download it again"
            )
        weight, input_scale = read_layer(tensors, layer)
        install_weight(model, layer, weight, input_scale, read_parts(tensors, layer))
        owned.update((layer.name, *layer_tensor_names(tensors, layer)))
    if plan.kv_cache is not None:
        refuse(kv_scale_problems(tensors))
        install_kv_scales(model, {name: tensors[name] for name in tensors if name.endswith(KV_SCALES)})
    unquantized = {name: tensors[name] for name in tensors if name not in owned and name not in tensors.carried}
    refuse(dtype_problems(model, unquantized, tensors))
    if built and not is_denoiser(model):
        unquantized = _in_dtypes_of(model, unquantized)
    _assign(model, unquantized, opened.directory, assign=built)
    use_expert_modules(model, plan)
    mark_quantized(model)
    for layer in plan.quantized:
        # A search for NaN among FP8 codes reads every byte. The module searches when a forward has the codes in memory
        # anyway, and names this file.
        model.get_submodule(layer.name).check_at_first_use(in_file(tensors, f"{layer.name}.weight"))  # type: ignore[operator]
    return model


def outline(directory: Path, like: type[nn.Module] | None = None) -> nn.Module:
    """Returns the model that config.json describes: parameters on the meta device, computed buffers real.

    `like`, a known class, replaces the one that config.json names: one that comes with Python files of its own, and has
    been imported already, is not imported again from the directory.
    """
    if like is None and (denoiser := pipelines.denoiser_class(directory)) is not None:
        return pipelines.outline_of_denoiser(denoiser, directory)
    initialization = require("transformers.initialization", "hf")
    accelerate = require("accelerate", "hf")
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: no config.json; build the module and pass it: quant.load(directory, model), or "
            "--model-factory to `quant evaluate`, `export` and `check`"
        )
    with huggingface.quiet():
        if like is None:
            config = huggingface.read_config(directory)
        else:
            with explained(directory / "config.json"):
                config = like.config_class.from_pretrained(directory, local_files_only=True)  # type: ignore[attr-defined]
        # Otherwise transformers would look for a quantizer, and build its own modules for the layers.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        check_sizes(config, directory.glob("*.safetensors"), directory / "config.json")
        cls: Any = like or huggingface.model_class(config, str(directory))
        empty = accelerate.init_empty_weights(include_buffers=False)
        with explained(directory / "config.json"), empty, initialization.no_init_weights():
            model: Any = cls._from_config(config, dtype=config.dtype)
        check_elements(model, directory.glob("*.safetensors"), directory / "config.json")
        for module in model.modules():
            # init_weights computes buffers, and skips modules with this mark. Without it transformers 5 would draw all
            # weights on the meta device, which takes longer than reading a checkpoint.
            module._is_hf_initialized = not module._buffers
        with explained(directory / "config.json"):
            model.init_weights()
        read_generation_config(model, directory)
    return huggingface.patch_forward(model)


def config_in(file: Path, key: str) -> dict[str, Any] | None:
    """Returns a table in a config file, or None."""
    table = read_fields(file).get(key)
    return table if isinstance(table, dict) else None


def quantization_config(directory: Path) -> dict[str, Any] | None:
    """Returns the table about quantization of a known layout, or None.

    Older exports of ModelOpt have their own file.
    """
    for name, key in CONFIG_TABLES.items():
        file = directory / name
        if file.is_file() and (config := config_in(file, key)) is not None:
            has_layout = name == modelopt.CONFIG_FILE or config.get("quant_method") in LAYOUTS
            own = directory / modelopt.CONFIG_FILE
            if config.get("quant_method") == MODELOPT and "config_groups" not in config and own.is_file():
                # ModelOpt writes the group size of INT4 only into its own file.
                size = (config_in(own, CONFIG_TABLES[own.name]) or {}).get("group_size")
                return config if size is None else {**config, "group_size": size}
            return config if has_layout else None
    return None


def kv_scale_problems(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields the scales of a KV cache that are not positive and finite, or that K has and V lacks."""
    scales = {name: tensors[name] for name in tensors if name.endswith(KV_SCALES)}
    for name, scale in scales.items():
        if problem := scale_problem(scale):
            yield f"{in_file(tensors, name)} {problem}; calibrate the KV cache again"
        attention, _, operand = name.rpartition(".")
        other = f"{attention}.{'v' if operand == 'k_scale' else 'k'}_scale"
        if other not in scales:
            yield f"{in_file(tensors, other)} is missing next to {name}; calibrate the KV cache again"


def untied_in(opened: Checkpoint, plan: Plan) -> dict[str, Any]:
    """Returns `untied_pairs` of a checkpoint, from its files; a head that `plan` quantizes is never its embedding."""
    codes = {layer.tensor_name: torch.empty(0) for layer in plan.quantized}
    return untied_pairs(opened.model, ChainMap(codes, opened.tensors))  # type: ignore[arg-type]


def flag_problems(opened: Checkpoint, plan: Plan) -> Iterator[str]:
    """Yields the output heads that config.json says are the embedding, and that have other values in the files."""
    file, untied = opened.directory / "config.json", untied_in(opened, plan)
    if untied and file.is_file() and clear_flag(read_fields(file), opened.model, untied.values()):
        yield (
            f"{file}: has {FLAG} true, and {listed(untied, 1)} is not the embedding: vLLM would take the embedding for "
            "it; write false there"
        )


def suspect_problems(model: nn.Module, tensors: TensorFiles, *, fp8: bool = True) -> Iterator[str]:
    """Yields the float tensors of the files that hold NaN or infinity; those in FP8 only if asked."""
    # A mask may hold -infinity, and is a buffer; a parameter with infinity is damaged.
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in tensors.items():
        # The NaN of E8M0 scales is found where these are read.
        is_float = tensor.dtype.is_floating_point and tensor.dtype != torch.float8_e8m0fnu
        if not is_float or (tensor.dtype.itemsize == 1 and not fp8):
            continue
        if problem := value_problem(tensor, is_buffer=name in buffers):
            yield f"{in_file(tensors, name)} {problem}; repair the model, or download it again"


def dtype_problems(model: nn.Module, tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields tensors, in files that `source` knows, of integers where the model has floats, or the other way round."""
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        current = state.get(name)
        # FP8 counts as integers: codes in the place of a 16-bit tensor have lost their scales.
        if current is not None and is_wide_float(current) != is_wide_float(tensor):
            yield (
                f"{in_file(source, name)} is {str(tensor.dtype).removeprefix('torch.')}, and the model holds "
                f"{str(current.dtype).removeprefix('torch.')}; quantize the model again, or download it again"
            )


def refuse(problems: Iterable[str]) -> None:
    """Raises UserError with the first of `problems`."""
    for problem in problems:
        raise UserError(problem)


def _in_dtypes_of(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in the dtype of the model's: a checkpoint keeps that of its source, such as a router's bias."""
    state = model.state_dict(keep_vars=True)
    cast = {}
    for name, tensor in tensors.items():
        own = state.get(name)
        is_wide = own is not None and own.dtype.is_floating_point and is_wide_float(tensor)
        cast[name] = tensor.to(own.dtype) if own is not None and is_wide else tensor
    return cast


def _assign(model: nn.Module, tensors: Mapping[str, Tensor], directory: Path, *, assign: bool) -> None:
    """Loads the tensors that are not quantized; UserError for other shapes, missing and unexpected tensors."""
    tensors = as_in_modules(model, tensors)
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if name in state and tensor.shape != state[name].shape:
            raise UserError(f"{directory}: {name} is {list(tensor.shape)}, and {list(state[name].shape)} in the model")
    untied = _untie(model, tensors)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=assign)
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        # transformers' tie_weights copies the source to the target. This checkpoint has the target only.
        if source in missing and target in tensors:
            owner, _, last = source.rpartition(".")
            setattr(model.get_submodule(owner), last, model.get_parameter(target))
    if callable(tie := getattr(model, "tie_weights", None)):
        tie(**({"recompute_mapping": False} if untied else {}))
    # Not missing: buffers of quantized layers, which are installed already, and other names of tied parameters.
    modules = model.named_modules(remove_duplicate=False)
    quantized = {f"{name}." for name, module in modules if hasattr(module, "quantized_weight")}
    held = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in tensors}
    lost = [n for n in missing if not n.startswith(tuple(quantized)) and id(attrgetter(n)(model)) not in held]
    # A tool that keeps what transformers ignores, such as heads for multi-token prediction, is right to do so.
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    unexpected = [name for name in unexpected if not any(re.search(pattern, name) for pattern in ignored)]
    if lost or unexpected:
        verb, names = ("lacks", lost) if lost else ("has, and the model has no use for,", unexpected)
        raise UserError(f"{directory}: the checkpoint {verb} {', '.join(names[:3])} ({len(names)} tensors)")


def _untie(model: nn.Module, tensors: Mapping[str, Tensor]) -> bool:
    """Gives tensors of their own to layers that config.json ties to others and whose tensors differ; returns if any.

    transformers does the same; servers take the embedding for the head (`flag_problems`).
    """
    untied = untied_pairs(model, tensors)
    for name in untied:
        getattr(model, "all_tied_weights_keys", {}).pop(name, None)
        if name in tensors:
            owner, _, last = name.rpartition(".")
            parameter = model.get_parameter(name)
            setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty_like(parameter), requires_grad=False))
    return bool(untied)


def as_in_modules(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns `tensors` in the form of the model: files hold experts in 16 bit one by one, and join others."""
    joined = in_model(model, tensors)
    for path, module in model.named_modules():
        for last, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{last}"
            stacking = stacking_of(module, last) if parameter.dim() == 3 and name not in joined else None
            one_by_one = [] if stacking is None else expert_names(name, stacking.experts)
            if stacking is not None and all(each in joined for each in one_by_one):
                matrices = torch.cat([joined.pop(each) for each in one_by_one])
                joined[name] = stacking.parameter(matrices.view(stacking.weight_shape))
    return joined
