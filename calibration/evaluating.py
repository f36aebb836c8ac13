"""Prepares models for measuring: evaluation mode, no key-value cache, and arithmetic in a wide dtype.

Rounding of the arithmetic should not be mistaken for loss of the weights, so 16-bit parameters are widened while a
model is measured (quantized codes and scales are not touched), each one in place of its 16-bit form: never more than
one tensor exists in both. Afterwards they are narrowed again, which is exact. 16-bit inputs, such as images, are
widened when a model is called with them.
"""

import math
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quant.calibration.session import NARROW, Session, elsewhere, placed
from quant.recipes.blocks import replaced

# The 97.5 % points of Student's t distribution with 1, 2, … degrees of freedom. scipy belongs to the extra `allocate`,
# and `quantize --eval` prints intervals with only the core packages.
_STUDENT = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)
_NORMAL = 1.959963984540054  # the same of the normal distribution


def mean_interval(values: Sequence[float], *, least: float = -math.inf) -> tuple[float, float] | None:
    """Returns Student's interval of 95 % around the mean of `values`, one a row; None for a single row.

    Tokens of one row share a subject and are far from independent, so a row is one observation: m ± t · s / √n for n
    rows of mean m and standard deviation s. Rows cut one after the other from one document are not independent draws,
    and the interval is then too narrow.
    """
    if len(values) < 2:
        return None
    mean = statistics.fmean(values)
    half_width = student_point(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return max(mean - half_width, least), mean + half_width


def paired_interval(lost: int, gained: int, count: int) -> tuple[float, float]:
    """Returns Agresti and Min's interval of 95 % around (gained − lost) / count, for pairs that agree but in those.

    Wald's interval after half a pair is added to each of the four cells (Statistics in Medicine 24, 2005).
    """
    b, c, total = lost + 0.5, gained + 0.5, count + 2
    middle, half = (c - b) / total, _NORMAL * math.sqrt(b + c - (c - b) ** 2 / total) / total
    return max(middle - half, -1.0), min(middle + half, 1.0)


def student_point(freedom: int) -> float:
    """Returns the 97.5 % point of Student's distribution, to 4e-6 of itself."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    # Cornish-Fisher's expansion about the normal point z (Abramowitz and Stegun 26.7.5).
    z, n = _NORMAL, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third / n**3 + fourth / n**4


@contextmanager
def prepared(
    models: nn.Module | Sequence[nn.Module], dtype: torch.dtype | None, session: Session | None = None
) -> Iterator[None]:
    """Puts models in evaluation mode while open, without a key-value cache or weight gradients.

    Tensors that share memory (ties, layers that two models have in common) go on sharing it. 16-bit parameters and
    buffers are widened to `dtype`, if given, and models run where the session says, see `placed`.
    """
    models = [models] if isinstance(models, nn.Module) else models
    device = None if session is None else session.device
    away = [model for model in models if elsewhere(model, device)]
    tensors = {id(t): t for model in models for t in (*model.parameters(), *model.buffers())}
    learned = [t for t in tensors.values() if t.requires_grad]
    copied = {id(t) for model in away for t in (*model.parameters(), *model.buffers())}  # widened on their way
    configs: list[Any] = [getattr(model, "config", None) for model in models]
    shared: dict[Any, list[Tensor]] = {}
    for t in tensors.values():
        if dtype is not None and t.dtype in NARROW and id(t) not in copied:
            # Tied tensors are widened once, and stay one tensor.
            shared.setdefault((t.device, t.data_ptr(), t.dtype, t.shape, t.stride()), []).append(t)
    # The widened form takes the place of the 16-bit one, which must have no other reference.
    del tensors
    narrow = [(same, same[0].dtype) for same in shared.values()]
    try:
        for same, _ in narrow:
            _replace_data(same, dtype)
        for t in learned:
            t.requires_grad_(False)
        with ExitStack() as stack:
            stack.enter_context(without_cache(configs))
            for model in models:
                stack.enter_context(evaluating(model))
            if dtype is not None:
                for model in models:
                    stack.callback(model.register_forward_pre_hook(_widening(dtype), with_kwargs=True).remove)
            for model in away:
                stack.enter_context(placed(model, device, dtype))
            yield
    finally:
        for same, before in narrow:
            _replace_data(same, before)
        for t in learned:
            t.requires_grad_(True)


@contextmanager
def without_cache(configs: Iterable[Any]) -> Iterator[None]:
    """Keeps transformers models from caching keys and values of earlier tokens while open."""
    with replaced((config, "use_cache", False) for config in configs if getattr(config, "use_cache", None)):
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode; each module gets its mode back, one in another's place that of the other."""
    modes = {name: module.training for name, module in model.named_modules(remove_duplicate=False)}
    # Weak references, because replaced layers must be freed; one that a caller still holds gets its mode back.
    training = [weakref.ref(module) for module in model.modules() if module.training]
    if not training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        for reference in training:
            if (module := reference()) is not None:
                module.training = True
        for name, module in model.named_modules(remove_duplicate=False):
            if name not in modes:
                modes[name] = modes[name.rpartition(".")[0]]  # a parent comes before its children
            module.training = modes[name]


def _widening(dtype: torch.dtype) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a hook that widens the 16-bit tensors that a model is called with."""

    def widened(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in NARROW else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(widened, args)), {name: widened(value) for name, value in kwargs.items()}

    return hook


def _replace_data(same: Sequence[Tensor], dtype: torch.dtype | None) -> None:
    data = same[0].data.to(dtype)
    for t in same:
        t.data = data
