"""A `GradientWatch` looks at gradients before an optimizer's step, and stops training or skips the step.

It watches models in low-precision training and in QAT. Low precision makes NaN and infinity likelier, and one step with
them loses a model. The gradients of all optimizers of a model are read together before each of them makes its step, so
that a step is made by all of them or by none: Muon does not train the matrices of a batch that AdamW leaves out. It
does not matter where gradients came from: eager or compiled passes, DDP, FSDP2, micro-batches that accumulate. A
closure, by which L-BFGS and Lightning compute gradients within the step, is followed by the same look.

Clipping spreads NaN to every gradient, so gradients alone would not tell where it came from. Three facts do, and the
first that applies is told: a layer whose weight is not finite; the first layer, in the order of the forward pass, whose
input was not; the layer nearest to the loss whose output gradient was not, because the backward pass starts there.
Layers note their inputs and output gradients as they run, with the emulated and the native backend and outside compiled
graphs.

A loss scaler looks for infinity itself: it finds its scale by steps that overflow, and skips these. So its steps are
left to it, also where a fused optimizer is called and skips them on the GPU; another optimizer of the model, whose
gradients are finite, leaves out that step, too. `report.nonfinite()` tells the layer.

The watch is an attribute of its model, so that a copy of the model, and one that is read from a pickle, has its own.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quant.base.errors import UserError, known_names, warn
from quant.recipes.callers_model import optimizers_of
from quant.training.low_precision.fused_experts_training import LowPrecisionStack, trained_layers
from quant.training.low_precision.low_precision_linear import LowPrecisionLinear
from quant.training.low_precision.state import agree_on_histories, agree_on_input_scales, find_replicas, shard_groups
from quant.training.qat_layers import RoundedWeight

ACTIONS = ("stop", "skip")
_ATTRIBUTE = "_gradient_watch"  # of a model
_Layers = Mapping[str, LowPrecisionLinear | LowPrecisionStack]


class GradientWatch:
    """Watches the gradients of one model in low-precision training; UserError for an action of another name."""

    _watches: ClassVar["weakref.WeakKeyDictionary[nn.Module, GradientWatch]"] = weakref.WeakKeyDictionary()
    _hook: ClassVar[Any] = None

    def __init__(self, action: str) -> None:
        if action not in ACTIONS:
            raise UserError(f"on_nonfinite={action!r}: unknown; {known_names(action, ACTIONS)}")
        self.action = action
        self._warns_of_resuming = self._warns_of_eval_mode = self._warns_of_bypassed = True
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_engine: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._replicas: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        warns = self._warns_of_resuming, self._warns_of_eval_mode, self._warns_of_bypassed
        return {"action": self.action, "warns": warns, "model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.action = state["action"]
        self._warns_of_resuming, self._warns_of_eval_mode, self._warns_of_bypassed = state["warns"]
        self._optimizers, self._replicas = weakref.WeakSet(), weakref.WeakSet()
        self._in_engine = weakref.WeakKeyDictionary()
        # The copy of the model, which is still without its layers: they are looked up at each step.
        self.start(state["model"])

    def start(self, model: nn.Module) -> None:
        """Looks at the gradients of `model` before every step of any optimizer that trains it."""
        vars(model)[_ATTRIBUTE] = self
        self._model = weakref.ref(model)
        self._watches[model] = self
        # One hook for all models and optimizers: nothing leads from a parameter to the optimizers that hold it.
        if GradientWatch._hook is None:
            GradientWatch._hook = register_optimizer_step_pre_hook(_before_step)

    @classmethod
    def end(cls, model: nn.Module) -> None:
        """Undoes `start` for a model, or for the models within a wrapper."""
        for module in model.modules():
            if vars(module).pop(_ATTRIBUTE, None) is not None:
                cls._watches.pop(module, None)
        if not cls._watches and cls._hook is not None:
            cls._hook.remove()
            cls._hook = None

    @classmethod
    def resumed(cls, model: nn.Module) -> None:
        """Says that the histories of a model come from its checkpoint."""
        if (watch := cls._watches.get(model)) is not None:
            watch._warns_of_resuming = False

    def check(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Stops, by a UserError, or skips where gradients of any optimizer of `model` are not finite."""
        own = {id(parameter) for parameter in model.parameters()}
        identities = own if self._is_in_engine(model, optimizer) else {id(p) for p in _held(optimizer)}
        trained = trained_layers(model)
        layers = {name: layer for name, layer in trained.items() if id(layer.held) in identities}
        if self._warns_of_resuming and layers:
            self._warns_of_resuming = False
            _warn_of_resuming(optimizer, layers)
        if self._warns_of_eval_mode and layers and not any(layer.trains for layer in layers.values()):
            self._warns_of_eval_mode = False
            warn(
                f"{next(iter(layers))}: the model trains in eval mode, in which it computes each product twice, and "
                "records no input for the deployed model; call model.train()"
            )
        if own.isdisjoint(identities):
            return
        if optimizer not in self._optimizers:
            self._optimizers.update([optimizer, *optimizers_of(own)])
            self._replicas.update(find_replicas(model))
            if trained and not all(getattr(each, "_use_orig_params", True) for each in self._replicas):
                name = next(iter(trained))
                raise UserError(f"{name}: FullyShardedDataParallel hides its weight; pass it use_orig_params=True")
        if self._warns_of_bypassed:
            self._warns_of_bypassed = False
            _warn_of_bypassed_layers(model)
        agree_on_histories(trained.values(), self._replicas)
        agree_on_input_scales(model, self._replicas)
        all_held = [parameter for each in list(self._optimizers) for parameter in _held(each)]
        # GradScaler puts this on fused optimizers, whose kernels skip the step where it is not zero.
        is_fused = getattr(optimizer, "found_inf", None) is not None
        others = {id(parameter) for parameter in all_held} - (identities if is_fused else set())
        line = nonfinite_line(model, trained, others, shard_groups(model, self._replicas))
        has_scaler = is_fused or (line is not None and _is_called_by_scaler())
        for layer in (trained if line is not None and not has_scaler else layers).values():
            layer.low_precision.forget_notes()
        if line is None:
            return
        if self.action == "stop" and not has_scaler:
            way_out = 'leave such steps out with on_nonfinite="skip"'
            if ": its gradient " in line:
                way_out = f"lower the learning rate, keep the layer in 16 bit with exclude=, or {way_out}"
            elif ": its weight " in line:
                way_out = "load the weights of an earlier step"
            raise UserError(f"{line}; no weight was changed by this step of {type(optimizer).__name__}: {way_out}")
        # An optimizer passes over parameters without a gradient. A scaler looks for infinity in each optimizer's own.
        for parameter in _held(optimizer) if has_scaler else [*_held(optimizer), *all_held]:
            parameter.grad = None
        if not has_scaler:
            warn(f"{line}; this step is skipped")

    def _is_in_engine(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether DeepSpeed trains a model by an optimizer, which may hold flat copies of its parameters."""
        if "deepspeed" in sys.modules and optimizer not in self._in_engine:
            engines = (getattr(each, "basic_optimizer", None) for each in find_replicas(model))
            self._in_engine[optimizer] = any(each is optimizer for each in engines)
        return self._in_engine.get(optimizer, False)


def _held(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_called_by_scaler() -> bool:
    """Returns whether a GradScaler makes this step, of which a plain optimizer is not told."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if isinstance(frame.f_locals.get("self"), torch.amp.GradScaler):
            return True
    return False


def _warn_of_resuming(optimizer: torch.optim.Optimizer, layers: _Layers) -> None:
    """Warns at the first step of a model whose optimizer has made steps: histories of these steps are missing."""
    name, layer = next(iter(layers.items()))
    recipe = layer.low_precision.recipe
    needs_history = recipe.history or (recipe.input is not None and recipe.input.is_static)
    if needs_history and optimizer.state.get(layer.held):
        warn(
            f"{name}: its optimizer has made steps, and the largest magnitudes that {recipe.name} remembers begin now; "
            "to resume a checkpoint, load the state of the report that to_low_precision_training returned: "
            "report.load_state_dict, accelerator.register_for_checkpointing(report) or "
            "Trainer(callbacks=[report.trainer_callback()])"
        )


def _warn_of_bypassed_layers(model: nn.Module) -> None:
    """Warns of layers that have a gradient and were never called: some code multiplies by their weight itself."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, LowPrecisionLinear):
            # An expert that no token has reached on this rank may have a gradient of the other ranks.
            state = module.low_precision
            was_called = state.weight_dtype is not None or not module.training or len(state.siblings) > 1
        else:
            was_called = not isinstance(module, RoundedWeight) or module.inputs.is_called or ".experts." in name
        if not was_called and module.weight.grad is not None:
            names.append(name)
    if names:
        others = f" (and {len(names) - 1} more)" if names[1:] else ""
        warn(
            f"{names[0]}: its weight has a gradient, and the layer was never called{others}; code that multiplies by "
            "the weight itself trains it unrounded, and the packed model differs from the trained one: call the layer "
            "there, or start again with it in exclude="
        )


def nonfinite_line(
    model: nn.Module, layers: _Layers, identities: set[int] | None = None, groups: Sequence[Any] = ()
) -> str | None:
    """Returns where NaN or infinity came into the gradients of a model; None where all are finite.

    `layers` are its layers in low precision, `identities` those of the parameters whose gradients count, or None for
    all, and `groups` those of ranks that have shards of plain gradients: none of a parameter in another's shard.
    """
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if (groups or parameter.grad is not None) and (identities is None or id(parameter) in identities)
    }
    broken = _not_finite({n: p.new_zeros(()) if p.grad is None else p.grad for n, p in parameters.items()}, groups)
    if not broken:
        return None
    # Every rank of FSDP2 reads the weights, whose largest magnitudes are common; notes are each rank's own.
    held = {name: layer.held.detach() for name, layer in layers.items()}
    held |= {n: module.weight.detach() for n, module in model.named_modules() if isinstance(module, RoundedWeight)}
    if weights := _not_finite(held, groups):
        return f"{weights[0]}: its weight holds NaN or infinity"
    notes = {name: layer.low_precision for name, layer in layers.items()}
    if inputs := [name for name, state in notes.items() if _overflowed(state.largest_input)]:
        return f"{inputs[0]}: its input held NaN or infinity in the forward pass"
    ids = {id(parameters[name]) for name in broken}
    origins = [name for name, state in notes.items() if _overflowed(state.largest_gradient)]
    # Layers of a compiled graph leave no note; then the gradients have to do.
    origins = origins or [name for name, layer in layers.items() if id(layer.held) in ids]
    if origins:
        return f"{origins[-1]}: its gradient holds NaN or infinity in {notes[origins[-1]].recipe.name}"
    return f"{broken[-1]}: its gradient holds NaN or infinity"


def _overflowed(largest: Tensor | None) -> bool:
    """Returns whether a largest magnitude is NaN or infinity; False where nobody looked."""
    return largest is not None and not bool(largest.isfinite())


def _not_finite(tensors: Mapping[str, Any], groups: Sequence[Any] = ()) -> list[str]:
    # The names of those that hold NaN or infinity, in the shard of any rank; of plain tensors, of ranks in `groups`.
    if not tensors:
        return []
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors.values()]
    # Sparse gradients of embeddings have a norm of their values alone, and a rank without rows of a weight has none.
    values = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in local]
    # The largest magnitude is finite if and only if all numbers are. One read serves all tensors.
    norms = [torch.linalg.vector_norm(each, torch.inf) if each.numel() else each.new_zeros(()) for each in values]
    broken = torch.stack([~norm.isfinite().to(norms[0].device) for norm in norms]).int()
    # Flags and not norms: to gloo, the largest of a first rank's number and a second rank's NaN is the number.
    for mesh in dict.fromkeys(each.device_mesh for each in tensors.values() if hasattr(each, "to_local")):
        broken = broken.to(mesh.device_type)
        for group in mesh.get_all_groups():
            dist.all_reduce(broken, dist.ReduceOp.MAX, group=group)
    for group in groups:
        dist.all_reduce(broken, dist.ReduceOp.MAX, group=group)
    return [name for name, is_broken in zip(tensors, broken.tolist(), strict=True) if is_broken]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    closure = kwargs.get("closure") or next(iter(args[1:]), None)
    if not callable(closure):
        return _check_all(optimizer)

    def checked() -> Any:
        loss = closure()
        _check_all(optimizer)
        return loss

    # Gradients come about within the step: the look has to follow them.
    return (args, {**kwargs, "closure": checked}) if "closure" in kwargs else ((args[0], checked, *args[2:]), kwargs)


def _check_all(optimizer: torch.optim.Optimizer) -> None:
    for model, watch in list(GradientWatch._watches.items()):
        watch.check(model, optimizer)
