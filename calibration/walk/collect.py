"""This file watches a model run, collects the range of every layer's input, and makes static scales of it."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, counted, option, warn
from quant.base.listener import Progress
from quant.base.processor import value_of
from quant.base.torch_modes import in_own_modes
from quant.calibration.evaluating import evaluating
from quant.calibration.fast_matmul import fast_matmul
from quant.calibration.inputs import Inputs, inputs_of, taking_inputs
from quant.calibration.observers import Observer, get_observer
from quant.calibration.ranks import gathered, own_batches
from quant.calibration.session import Device, Session, device_of, placed
from quant.calibration.statistics import LayerStats, MomentSum, static_input_scale
from quant.calibration.texts.mixture import lacks_data
from quant.calibration.texts.rows import check_ids
from quant.formats.finite import is_finite
from quant.kernels.linear.conv import round_samples
from quant.kernels.linear.experts import ExpertStack, can_run_experts_one_by_one, experts_forward
from quant.recipes.blocks import Stop, all_arguments, forwarding, removing, stored_dtype
from quant.recipes.layers import Stacking, expert_matrices, output_head, stacking_of_experts
from quant.recipes.plan import LayerPlan, Plan, groups_by_input

_EXPERT = re.compile(r"(experts?[._])\d+")
_WINDOWS = 2048  # of a convolution that one call counts


class InputNotFiniteError(ValueError):
    """The input of a layer holds NaN or infinity."""

    def __init__(self, name: str, where: str) -> None:
        super().__init__(f"{name}: the input holds NaN or infinity {where}")
        self.name = name


class NeverCalledError(ValueError):
    """Calibration data reaches none of these layers, so that their static input scales are unknown."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"{names[0]}: never called on the calibration data ({len(names)} such layers), so its input is unknown: "
            f"keep such layers in 16 bit ({option('exclude')}, or keep in a plan), or give data that reaches them"
        )


@contextmanager
def reporting_bad_tensor(model: nn.Module) -> Iterator[None]:
    """Makes an `InputNotFiniteError` name the tensor that holds NaN or infinity, or say that none does.

    NaN spreads: one in a projection reaches every later input. The layer that is first seen to get it is therefore not
    the cause, and neither is the calibration row, unless every weight of the model is finite.
    """
    try:
        yield
    except InputNotFiniteError as error:
        inside = re.match(r".*\.\d+\.", error.name)
        bad_tensor = _first_bad_tensor(model, inside.group() if inside else "")
        if bad_tensor is not None:
            seen = f"first seen in the input of {error.name}"
            raise ValueError(f"{bad_tensor}; repair the model, or download it again ({seen})") from None
        raise ValueError(
            f"{error}, and no weight does: leave out the data that cause it, or load the model in a wider dtype if it "
            "overflows"
        ) from None


def _first_bad_tensor(model: nn.Module, block: str) -> str | None:
    """Returns the first tensor of a model that holds NaN or infinity, with its shape and how many values do."""
    for is_buffer, tensors in ((False, model.named_parameters()), (True, model.named_buffers())):
        for name, tensor in tensors:
            # Reading every other block from its files would take minutes; their layers were seen before this one.
            if hasattr(tensor, "stored") and not name.startswith(block):
                continue
            value = value_of(tensor)
            if not is_finite(value, is_mask=is_buffer):
                bad = int((~value.float().isfinite()).sum())
                return f"{name} {list(value.shape)} holds {bad:,} value(s) that are NaN or infinite"
    return None


def collect_input_amax(
    model: nn.Module,
    names: Collection[str],
    rows: Tensor,
    session: Session | None = None,
    observers: Mapping[str, Observer] | None = None,
) -> dict[str, Tensor]:
    """Returns the largest magnitude of the input of each named layer over `rows`, one forward pass a row.

    Names are of linear modules, or of fused-expert projections (`….experts.down_proj`), whose input is the largest over
    all experts that a token reached. Results are float32 scalars where the model is; observers of the inputs may give
    others. Ranks share the rows, unless there are observers, whose counts depend on the order of the rows.

    ValueError where an input holds NaN or infinity (the weight that does is named, or else the layer and the row), and
    where a layer was never called.
    """
    session = session or Session()
    check_ids(rows, model)
    amax: dict[str, Tensor] = {}
    row_index = 0

    def observe(name: str, x: Tensor) -> None:
        end.layer_after |= end.at_head
        if not x.numel():  # a router sent this expert no token
            return
        # NaN passes through amax, so one test of the maximum covers all values.
        largest = x.detach().abs().amax().float()
        if not bool(torch.isfinite(largest)):
            raise InputNotFiniteError(name, f"on calibration row {row_index}")
        amax[name] = torch.maximum(amax.get(name, largest), largest)
        if observers:
            observers[name].update(x)

    home, end, head = device_of(model), _EndAtHead(model), output_head(model)
    with torch.no_grad(), placed(model, session.device) as device, reporting_bad_tensor(model), ExitStack() as hooks:
        hooks.enter_context(watch_inputs(model, names, observe))
        if head is not None:  # after the hooks of layers: an input of the head that is watched has been seen by then
            hooks.callback(head.register_forward_pre_hook(end.reach).remove)
        rows = rows.to(device)
        # One row a pass: the message on NaN then names its row.
        for row_index in range(len(rows)) if observers else own_batches(len(rows)):
            end.run(rows[row_index : row_index + 1])
            session.report("calibrate", row_index + 1, len(rows))
    if not observers:
        own, amax = {name: value.cpu() for name, value in amax.items()}, {}
        for part in gathered(own):
            amax |= {name: torch.maximum(amax.get(name, value), value) for name, value in part.items()}
    ranges = {name: observers[name].amax() for name in amax} if observers else amax
    silent = sorted(set(names) - set(ranges))
    pattern, siblings = partial(_EXPERT.sub, r"\1#"), dict[str, list[Tensor]]()
    for name, value in ranges.items():
        siblings.setdefault(pattern(name), []).append(value)
    if unknown := [name for name in silent if pattern(name) not in siblings]:
        raise NeverCalledError(unknown)
    if silent:
        warn(
            f"{silent[0]}: no calibration token reached it ({counted(len(silent), 'such layer')}), so its static input "
            "scale is that of the largest input of its sibling experts; more text would do better"
        )
    ranges |= {name: torch.stack(siblings[pattern(name)]).amax() for name in silent}
    return {name: value.to(home) for name, value in ranges.items()}


def window_stats(
    model: nn.Module, layers: Sequence[LayerPlan], rows: Tensor, session: Session, input_scales: Mapping[str, Tensor]
) -> dict[str, LayerStats]:
    """Returns statistics of the windows `[in · kernel]` that convolutions multiply, rounded as they will be.

    Of large images only some windows count, which overlap.
    """
    by_name = {layer.name: layer for layer in layers}
    sums = {name: MomentSum() for name in by_name}

    def observe(name: str, x: Tensor) -> None:
        conv, layer = model.get_submodule(name), by_name[name]
        assert isinstance(conv, nn.Conv2d)
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = torch.nn.functional.pad(x, conv._reversed_padding_repeated_twice, mode=mode).float()
        if layer.activation is not None:
            scale = input_scales.get(name)
            x = round_samples(x, layer.activation, None if scale is None else scale.to(x.device))
        windows = torch.nn.functional.unfold(x, conv.kernel_size, conv.dilation, stride=conv.stride).mT
        # An odd step meets every column of an image of even width.
        windows = windows[:, :: windows.shape[1] // _WINDOWS | 1]
        sums[name].add(windows.flatten(0, 1), rows=len(x))

    with torch.no_grad(), placed(model, session.device) as device, watch_inputs(model, by_name, observe), fast_matmul():
        for row in range(len(rows)):
            model(rows[row : row + 1].to(device))
    stats = {name: each.stats() for name, each in sums.items()}
    return {name: each for name, each in stats.items() if each is not None}


class _EndAtHead:
    """Runs a model, from the second row on without its output head where no watched layer comes after that.

    Logits of a large vocabulary take more time and memory than all layers of a small model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.at_head = self.layer_after = self.ends = False

    def reach(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A hook before the head."""
        self.at_head = True
        if self.ends:
            raise Stop

    def run(self, row: Tensor) -> None:
        """Runs one row."""
        self.at_head = False
        with suppress(Stop):
            self.model(row)
        self.ends = self.at_head and not self.layer_after


Observe = Callable[[str, Tensor], None]
"""Takes the name of a layer and its input."""


@contextmanager
def watch_inputs(model: nn.Module, names: Collection[str], observe: Observe) -> Iterator[None]:
    """Calls `observe(name, input)` for every call of a named layer while the block runs.

    A linear is watched by a hook. The projections of fused experts are parameters, not modules. Where the library can
    be configured to run them, the module's forward is replaced by `experts_forward`, which sees every expert's input;
    elsewhere a `WatchedExperts` replaces each parameter.
    """
    experts: dict[nn.Module, str] = {}
    watched: dict[nn.Module, dict[str, nn.Parameter]] = {}
    handles = []
    for name in names:
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        # A parameter under this name is a projection of fused experts.
        if isinstance(getattr(owner, last), nn.Module):

            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = name) -> None:
                observe(name, all_arguments(args, kwargs)[0])

            handles.append(owner.get_submodule(last).register_forward_pre_hook(hook, with_kwargs=True))
        elif can_run_experts_one_by_one(owner):
            experts[owner] = parent
        else:
            seen = partial(lambda name, expert, x: observe(name, x), name)
            watched.setdefault(owner, {})[last] = watch_experts(model, name, seen)

    def show_projection(path: str, projection: str, expert: int, x: Tensor) -> None:
        # The other projection of the module may be in 16 bit.
        if f"{path}.{projection}" in names:
            observe(f"{path}.{projection}", x)

    try:
        with removing(handles), ExitStack() as stack:
            for module, path in experts.items():
                forward = partial(experts_forward, module, observe=partial(show_projection, path))
                stack.enter_context(forwarding(module, forward))
            yield
    finally:
        for module, parameters in watched.items():
            put_back(module, parameters)


class WatchedExperts(ExpertStack):
    """The experts `[experts, out, in]` of a parameter in 16 bit, which show their inputs `[tokens, in]`."""

    def __init__(self, matrices: Sequence[Tensor], stacking: Stacking, observe: Callable[[int, Tensor], None]) -> None:
        super().__init__()
        self.matrices, self.stacking, self.observe = matrices, stacking, observe

    def dense(self, index: int) -> Tensor:
        return self.matrices[index]

    def product(self, x: Tensor, index: int) -> Tensor:
        """Shows the input, and multiplies by the weight."""
        rows = x.reshape(-1, x.shape[-1])
        # Models pad an expert's tokens with rows of zeros, which reached no expert.
        if len(rows := rows[rows.any(-1)]):
            self.observe(index, rows)
        return nn.functional.linear(x, self.matrices[index].to(x.device, x.dtype))


def watch_experts(model: nn.Module, name: str, observe: Callable[[int, Tensor], None]) -> nn.Parameter:
    """Replaces a parameter of `model` by a `WatchedExperts`, and returns the parameter."""
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    watched = WatchedExperts(expert_matrices(model, name), stacking_of_experts(module, last), observe)
    parameter = module.get_parameter(last)
    delattr(module, last)
    setattr(module, last, watched)
    return parameter


def put_back(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Registers the parameters of experts instead of the modules that stand for them."""
    for name, parameter in parameters.items():
        delattr(module, name)
        module.register_parameter(name, parameter)


@in_own_modes
def calibrate(
    model: nn.Module, plan: Plan, data: Any, *, device: Device = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Returns static activation scales by layer name, float32 scalars; one for all members of a fusion group.

    The model runs in evaluation mode on `device`, one block at a time if it does not fit there; by default where it is.

    Args:
        model: the model that the plan was made for.
        plan: the plan, whose observer chooses the scales.
        data: calibration rows or calls, as `quant.quantize` takes them; None where the plan needs none.
        device: where the model runs; by default where it is.
        progress: a function that is called as `progress(stage, done, total)`.

    Raises:
        UserError: the plan needs data and there is none.
    """
    data = data if data is None or isinstance(data, Tensor | Inputs) else inputs_of(data, model)
    with evaluating(model), taking_inputs(model):
        return _measured_scales(model, plan, data, Session.on(device, progress=progress))


def input_scales_of(
    model: nn.Module, plan: Plan, data: Tensor | None, session: Session, step: str = "input scales"
) -> dict[str, Tensor]:
    """Returns scales as `calibrate` does, measured in a session, whose store keeps them as the step `step`."""
    finished = session.store.get(step)
    if finished is not None:
        return {name: scale.clone() for name, scale in finished.tensors.items()}
    scales = _measured_scales(model, plan, data, session)
    if scales:
        session.store.put(step, scales, None)
    return scales


def _measured_scales(model: nn.Module, plan: Plan, data: Tensor | None, session: Session) -> dict[str, Tensor]:
    static = [layer for layer in plan.quantized if layer.has_static_scale]
    if not static:
        return {}
    if data is None:
        raise UserError(lacks_data(plan) or "no calibration data")
    observers = None
    if (observer := observer_of(plan)) != "absmax":
        watch = get_observer(observer)
        observers = {layer.name: watch(layer.activation, name=layer.name) for layer in static if layer.activation}
    amax = collect_input_amax(model, [layer.name for layer in static], data, session, observers)
    scales = {}
    # A runtime quantizes the shared input of a fusion group once, so its members need one scale: the largest amax.
    for members in groups_by_input(static):
        shared = torch.stack([amax[member.name] for member in members]).amax()
        for member in members:
            assert member.activation is not None
            # One warning for the group, not one for each member.
            warned = member.name if member is members[0] else None
            scale = static_input_scale(shared, member.activation, stored_dtype(model), warned)
            assert scale is not None
            scales[member.name] = scale
    return scales


def observer_of(plan: Plan) -> str:
    """Returns the key of `OBSERVERS` that the plan names: how its static activation scales are chosen."""
    get_observer(plan.observer)
    return plan.observer
