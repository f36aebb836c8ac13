"""Triton kernels run on a CPU here, on CPU tensors, with the numbers a GPU would give.

    with interpreted():
        kernel[grid](x, y, …)

Triton has an interpreter, in NumPy, for which a variable of the environment must be set before anything imports a
kernel; from then on, nothing can be compiled in that process. Here the switch is a context: inside it, a launch is
interpreted, outside it kernels compile as ever.

NumPy has neither BF16 nor FP8, and the interpreter computes with their bits as if these were integers: arithmetic and
dots in BF16 come out as nonsense, and casts to FP8 lose carries and subnormals, without a word. So its casts,
arithmetic, comparisons and dots are replaced by ones that go through float32 and round as the hardware does: to
nearest even, FP8 saturating. Its FMA rounds twice, and is replaced too. Inline assembly and Gluon have no interpreter.

Sums, differences and products of integers wrap, as a GPU's do. The interpreter computes each a second time in 64 bits
to find those that do, which takes a third of its time; an index that wrapped gives wrong numbers anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

_ARITHMETIC = (
    "create_fadd",
    "create_fsub",
    "create_fmul",
    "create_fdiv",
    "create_minimumf",
    "create_minnumf",
    "create_maximumf",
    "create_maxnumf",
)


@contextmanager
def interpreted() -> Iterator[None]:
    """Inside, `kernel[grid](…)` is interpreted on the CPU."""
    # First: what Gluon took over from a language that is replaced, it would keep for good.
    import triton.experimental.gluon.language  # noqa: F401
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    from quant.kernels.base.portable_small_floats import larger

    # A kernel calls its device functions thousands of times, and each would inspect its signature again.
    function_of = cache(interpreter.InterpretedFunction)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        function_of(self.fn).run(*args, grid=grid, warmup=warmup, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function_of(self.fn)(*args, **kwargs)

    plain_reduce = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, given: Any) -> Any:
        # A function of ours is called once for each pair of elements there, in Python.
        if self.combine_fn == larger:
            return self.min_max(given[0], val_reduce_op=np.max)
        return plain_reduce(self, given)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # A scalar is an array of one element there, which NumPy 2 does not take for an index.
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))

    # Each operation asks for NumPy's dtype, and would build the table of all dtypes anew.
    of_scalar = cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else of_scalar(element)

    # Stands for a kernel; only the modules that it sees matter.
    sees_language = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    with ExitStack() as stack:
        stack.enter_context(patch.object(interpreter, "_patch_lang_tensor", patch_tensor_with_index))
        stack.enter_context(patch.object(interpreter, "_get_np_dtype", numpy_dtype))
        builder = interpreter.interpreter_builder
        wrapping = replace(builder.options, sanitize_overflow=False)
        stack.enter_context(patch.object(builder, "options", wrapping))
        for name, function in _faithful(interpreter).items():
            stack.enter_context(patch.object(interpreter.InterpreterBuilder, name, function))
        stack.enter_context(patch.object(interpreter.ReduceOps, "apply_impl", reduce))
        stack.enter_context(patch.object(JITFunction, "run", run))
        stack.enter_context(patch.object(JITFunction, "__call__", call))
        # The interpreter would replace the language's functions anew in each call of a device function, which takes
        # half its time, and restore them only after a launch. Replacing and restoring them once leaves nothing behind.
        stack.callback(interpreter._patch_lang(sees_language).restore)
        stack.enter_context(patch.object(interpreter, "_patch_lang", lambda fn: interpreter._LangPatchScope()))
        yield


def _faithful(interpreter: Any) -> dict[str, Callable[..., Any]]:
    """Methods of the interpreter's builder, by name, that compute BF16 and FP8 right."""
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    # Dtype in torch, dtype of the bits in NumPy, and the largest magnitude where casts saturate.
    narrow = {
        tl.bfloat16: (torch.bfloat16, np.uint16, None),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, 448.0),
        tl.float8e5: (torch.float8_e5m2, np.uint8, 57344.0),
    }

    def values(x: Any) -> np.ndarray:
        entry = narrow.get(x.dtype.scalar)
        if entry is None:
            return np.asarray(x.data)
        bits = torch.from_numpy(np.ascontiguousarray(x.data).view(np.int16 if entry[1] is np.uint16 else np.uint8))
        return bits.view(entry[0]).float().numpy()

    def bits(x: np.ndarray, dtype: Any) -> np.ndarray:
        target, storage, largest = narrow[dtype]
        rounded = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
        if largest is not None:
            rounded = rounded.clamp(-largest, largest)  # NaN stays NaN
        integer = torch.int16 if storage is np.uint16 else torch.uint8
        return rounded.to(target).view(integer).numpy().view(storage)

    plain_cast, plain_load, plain_store = builder.cast_impl, builder.create_masked_load, builder.create_masked_store

    def mask_of(x: Any) -> Any:
        # Of comparisons of int64 scalars the interpreter makes integers, and that of Triton 3.9 takes only booleans.
        return handle(x.data.astype(bool), tl.int1)

    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        return plain_load(self, pointers, mask_of(mask), *rest)

    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return plain_store(self, pointers, value, mask_of(mask), *rest)

    def cast(self: Any, source: Any, target: Any, *_: Any) -> Any:
        if target.scalar in narrow:
            return handle(bits(values(source), target.scalar), target.scalar)
        if source.dtype.scalar in narrow:
            return plain_cast(self, handle(values(source), tl.float32), target)
        return plain_cast(self, source, target)

    def dot(self: Any, a: Any, b: Any, c: Any, *_: Any) -> Any:
        return handle(np.matmul(values(a), values(b), dtype=c.data.dtype) + c.data, c.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        # float64 holds a product of float32s; the sum is then rounded once more, which shows once in 2^29 times.
        with np.errstate(invalid="ignore"):  # infinity times zero is NaN
            exact = x.data.astype(np.float64) * y.data + z.data
        return handle(exact.astype(x.data.dtype), x.dtype.scalar)

    def through_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, a: Any, b: Any) -> Any:
            dtype = a.dtype.scalar
            if dtype not in narrow:
                return operation(self, a, b)
            result = operation(self, handle(values(a), tl.float32), handle(values(b), tl.float32))
            return result if result.data.dtype == bool else handle(bits(result.data, dtype), dtype)

        return wrapped

    comparisons = [name for name in dir(builder) if name.startswith("create_fcmp")]
    replaced: dict[str, Callable[..., Any]] = {
        name: through_float32(getattr(builder, name)) for name in (*_ARITHMETIC, *comparisons)
    }
    memory = {"create_masked_load": load, "create_masked_store": store}
    return {**replaced, **memory, "cast_impl": cast, "create_fp_to_fp": cast, "create_dot": dot, "create_fma": fma}
