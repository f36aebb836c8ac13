"""Activations are quantized on a GPU in one pass: rows in BF16 or FP16 become codes and scales.

    x [tokens, in] ─▶ blocks ─▶ amax ─▶ scale (the format's rule, `max` for nearly all) ─▶ x / scale ─▶ codes, scales

The codes equal `formats/`' codes, rounded to nearest even against the decoded scale. This file checks the arguments
and chooses between two kernels: `nvfp4_rows_to_codes.py` for NVFP4, `rows_to_codes.py` for all others.

A block that holds NaN or infinity gets a scale that is NaN. Under a static scale, which is not the block's own, the
single code of E4M3 is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

from quant.formats.format import INPUT_FORMATS, Format
from quant.formats.scaling import global_scale_of, scale_of
from quant.formats.tensor import BlockScaledTensor
from quant.kernels.base import hardware
from quant.kernels.base.launch_cache import CachedLaunch
from quant.kernels.portable.nvfp4_rows_to_codes import BLOCK, nvfp4_rows_to_codes_kernel
from quant.kernels.portable.rows_to_codes import rows_to_codes_kernel
from quant.kernels.base.portable_small_floats import compilable

FORMATS_OUT = ("nvfp4", "nvfp4_four_over_six", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token")
"""Activation formats that can be written."""
MAX_COLUMNS = 32768


def quantize(
    x: torch.Tensor,
    format: Format,
    *,
    scale: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> BlockScaledTensor:
    """Returns `x` in `format`, block scales by its rule for inputs: the codes of the values of `fake_quantize`.

    Args:
        x: `[..., in]`, FP16 or BF16.
        format: one of `FORMATS_OUT`.
        scale: static scale of `fp8`, float32 scalar; measured where None.
        global_scale: static global scale of `nvfp4`, float32 scalar; measured where None.

    Returns:
        Codes and scales of `[tokens, in]`, leading axes flattened.

    Raises:
        ValueError: a format, dtype or width that the kernel does not take.
    """
    _check(x, format)
    check_scales(x, format, scale, global_scale)
    rows = _contiguous_rows(x)
    cast = prepare_cast(rows, format, contiguous=rows.is_contiguous())
    return cast(rows, scale, global_scale)


Cast = Callable[..., BlockScaledTensor]
"""From (rows `[tokens, in]`, scale, global scale) to the quantized rows."""


def prepare_cast(rows: torch.Tensor, format: Format, *, contiguous: bool = True) -> Cast:
    """Returns `quantize` for rows like these, checked, with everything decided that does not depend on their values."""
    (tokens, columns), device = rows.shape, rows.device
    codes_shape, codes_dtype = format.codes_shape(rows.shape), format.element.torch_dtype or torch.uint8
    scale_shape = format.scale_shape(rows.shape)
    scale_dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
    per_tensor, has_global, largest = format.per_tensor, format.global_scale, format.element.max
    kernel, width, in_bytes = None, 0, hardware.lacks_e4m3(rows)
    if tokens:
        launch = _launch(tokens, columns, format, contiguous)
        width = launch.width if launch.flat else 0
        kernel = CachedLaunch(_kernel_of(format), (launch.programs,), _constants(format, columns, launch))

    def run(
        rows: torch.Tensor, scale: torch.Tensor | None, global_scale: torch.Tensor | None = None
    ) -> BlockScaledTensor:
        if per_tensor and scale is None:
            amax = rows.abs().amax().float() if tokens else rows.new_zeros((), dtype=torch.float32)
            scale = scale_of(amax, largest)
        if has_global and global_scale is None:
            global_scale = global_scale_of(rows.abs().amax() if tokens else rows.new_zeros(()), format)
        # Allocated at each call: the caller may keep them while the next rows are quantized.
        codes = torch.empty(codes_shape, dtype=codes_dtype, device=device)
        if per_tensor:
            assert scale is not None
            scales = scale.reshape(1, 1).float()
        else:
            scales = torch.empty(scale_shape, dtype=scale_dtype, device=device)
        if kernel is not None:
            filled = (compilable(codes), compilable(scales)) if in_bytes else (codes, scales)
            second_level = filled[1] if global_scale is None else global_scale
            kernel(rows, *filled, second_level, width or rows.stride(0), width or columns)
        return BlockScaledTensor(codes, scales, format, (tokens, columns), global_scale)

    return run


def takes(format: Format, columns: int, dtype: torch.dtype) -> bool:
    """Returns whether a kernel quantizes rows of `columns` elements to an input format."""
    return _problem_of(format, columns, dtype) is None


def quantize_in_graph(rows: torch.Tensor, format: Format, static: torch.Tensor | None) -> BlockScaledTensor:
    """Returns `quantize` as ops and a launch that `torch.export` and AOTInductor see; the arguments have been checked.

    Args:
        rows: `[tokens, in]`, contiguous; the number of tokens may be symbolic.
        format: one that `takes` has confirmed.
        static: the scale of a tensor, or the global scale where the format has one; None measures it.
    """
    tokens, columns = rows.shape
    if static is None and format.per_tensor:
        static = scale_of(rows.abs().amax().float(), format.element.max)
    if static is None and format.global_scale:
        static = global_scale_of(rows.abs().amax(), format)
    codes = rows.new_empty(format.codes_shape(rows.shape), dtype=format.element.torch_dtype or torch.uint8)
    if format.per_tensor:
        assert static is not None
        scales = stored = second_level = static.reshape(1, 1).float()
    else:
        dtype = torch.float32 if format.scale.is_wide else format.scale.torch_dtype
        scales = rows.new_empty(tokens, format.scale_shape((1, columns))[1], dtype=dtype)
        stored = compilable(scales)
        second_level = stored if static is None else static
    # A row a program, whatever the number of rows: pieces of all elements need a number that is known.
    constants = _constants(format, columns, _launch(1, columns, format, contiguous=False))
    kernel = torch.library.wrap_triton(_kernel_of(format))
    kernel[tokens,](rows, compilable(codes), stored, second_level, columns, columns, **constants)
    return BlockScaledTensor(codes, scales, format, (tokens, columns), static if format.global_scale else None)


def _kernel_of(format: Format) -> Any:
    return nvfp4_rows_to_codes_kernel if format.is_nvfp4 else rows_to_codes_kernel


def _constants(format: Format, columns: int, launch: _Launch) -> dict[str, Any]:
    """Returns the compile-time constants and the options of the kernel that casts to a format."""
    constants = {
        "largest": format.element.max, "flat": launch.flat or columns == launch.width, "width": launch.width,
        "num_warps": launch.warps,
    }  # fmt: skip
    if format.is_nvfp4:
        return constants | {"whole": columns % BLOCK == 0, "four_or_six": format.input_rule == "four_over_six"}
    kind = "wide" if format.scale.is_wide else format.scale.name
    block = {"block": format.block[1], "static": format.per_tensor}
    return constants | {"element": format.element.name, "kind": kind, **block}


@dataclass(frozen=True)
class _Launch:
    """How rows are given to programs.

    Attributes:
        programs: how many.
        width: elements of one, a power of two.
        flat: whether pieces are cut from all elements as they lie in memory, and not one from each row.
        warps: the number of warps of a program.
    """

    programs: int
    width: int
    flat: bool
    warps: int


def _launch(tokens: int, columns: int, format: Format, contiguous: bool) -> _Launch:
    """Launches over blocks of all elements in memory where possible, so that short rows leave no lane idle."""
    # The largest power of two that divides the number of elements: pieces of it have no tail.
    width = min(tokens * columns & -(tokens * columns), 4096)
    flat = contiguous and format.block[1] > 0 and width >= 1024
    if flat:
        programs = tokens * columns // width
    else:
        # A block of NVFP4 for each thread of a warp, at the least.
        width, programs = max(triton.next_power_of_2(columns), 32 * BLOCK if format.is_nvfp4 else 64), tokens
    # At most 64 values a thread.
    warps = 4 if width <= 8192 and (flat or width <= 4096) else 8 if width <= 16384 else 16
    return _Launch(programs, width, flat, warps)


def _check(x: torch.Tensor, format: Format) -> None:
    if (problem := _problem_of(format, x.shape[-1], x.dtype)) is not None:
        raise ValueError(f"x {list(x.shape)} to {format}: {problem}")


def _problem_of(format: Format, columns: int, dtype: torch.dtype) -> str | None:
    """Returns why no kernel quantizes rows of `columns` elements to a format; None where one does."""
    if format.name not in FORMATS_OUT or format is not INPUT_FORMATS.get(format.name):
        return f"no such kernel; activation formats: {', '.join(FORMATS_OUT)}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"x is {dtype}, expected float16 or bfloat16"
    multiple = max(format.block[1], 2 if format.element.bits == 4 else 1, 1)
    if columns % multiple or not 0 < columns <= MAX_COLUMNS:
        return f"the last axis must be a multiple of {multiple}, at most {MAX_COLUMNS}"
    return None


def check_scales(
    x: torch.Tensor, format: Format, scale: torch.Tensor | None, global_scale: torch.Tensor | None
) -> None:
    """Raises ValueError for a static scale that does not fit x and its format."""
    task = f"x {list(x.shape)} to {format}"
    for name, tensor in (("scale", scale), ("global_scale", global_scale)):
        if tensor is None:
            continue
        if tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            raise ValueError(
                f"{task}: {name} is {list(tensor.shape)} {tensor.dtype}, expected one floating-point number"
            )
        if tensor.device != x.device:
            raise ValueError(f"{task}: {name} is on {tensor.device}, x on {x.device}")
    if scale is not None and not format.per_tensor:
        raise ValueError(f"{task}: a static scale is for formats of one scale a tensor; {format} measures its own")
    if global_scale is not None and not format.global_scale:
        raise ValueError(f"{task}: {format} has no global scale")


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns `[tokens, in]`, elements of a row side by side, and rows at multiples of four bytes.

    A copy only where needed.
    """
    rows = x.reshape(-1, x.shape[-1])
    aligned = rows.data_ptr() % 4 == 0 and (rows.stride(0) % 2 == 0 or rows.shape[0] == 1)
    return rows if rows.stride(1) == 1 and aligned else rows.clone(memory_format=torch.contiguous_format)
