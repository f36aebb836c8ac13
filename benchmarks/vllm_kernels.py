"""This benchmark times our linear kernels beside those that vLLM chooses by itself, through vLLM's own classes.

    python benchmarks/vllm_kernels.py
    python benchmarks/vllm_kernels.py --formats nvfp4 --shapes 4096,4096 --tokens 1 16

Each class gets the parameters that vLLM would have loaded, prepares them, and is timed by replays of a CUDA graph over
copies of the layer that together exceed the L2 cache. The error is that of the product against float64, relative to
its norm. Shapes are [out, in]; by default those of an 8B Llama.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _table import machine, show, versions

from quant.base.json_files import json_text
from quant.export.checkpoint.files.compressed_tensors import compress
from quant.formats.format import FORMATS
from quant.formats.tensor import BlockScaledTensor, quantize
from quant.kernels.base.hardware import current
from quant.kernels.linear.tuning import graph_microseconds

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = (1, 16, 64, 256, 1024, 4096)


def layer_of(weight: BlockScaledTensor) -> torch.nn.Module:
    """The layer that vLLM has loaded, as far as kernels look at it."""
    layer = torch.nn.Module()
    layer.output_size_per_partition, layer.input_size_per_partition = weight.shape
    layer.params_dtype = layer.orig_dtype = torch.bfloat16
    layer.weight_block_size = [128, 128] if weight.format.name == "fp8_block" else None
    for name, tensor in compress(weight, None, torch.bfloat16).items():
        if name == "weight_global_scale":
            tensor = 1 / tensor.reshape(())
        if name == "weight_packed" and weight.format.name != "int4":
            name = "weight"
        if name == "weight_scale" and weight.format.name.startswith("fp8"):
            tensor, name = tensor.float(), "weight_scale_inv" if weight.format.name == "fp8_block" else name
        if name == "weight" and weight.format.name == "fp8_channel":
            tensor = tensor.t()
        if weight.format.name == "int4" and name != "weight_shape":
            tensor = packed_parameter(tensor, packed=name == "weight_packed")
            layer.register_parameter(name, tensor)
        else:
            setattr(layer, name, torch.nn.Parameter(tensor.cuda(), requires_grad=False))
    return layer


def packed_parameter(tensor: torch.Tensor, packed: bool) -> Any:
    """A parameter of vLLM's class for words of codes, or for scales of groups."""
    from vllm.model_executor import parameter

    options = {"data": tensor.cuda(), "input_dim": 1, "output_dim": 0, "weight_loader": lambda *args: None}
    ranks = {"get_tensor_model_parallel_rank": lambda: 0, "get_tensor_model_parallel_world_size": lambda: 1}
    with patch.multiple(parameter, **ranks):
        if packed:
            return parameter.PackedvLLMParameter(packed_factor=8, packed_dim=1, **options)
        return parameter.GroupQuantScaleParameter(**options)


def kernels(format: str, shape: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """Name and instance of each class for a format: ours, then vLLM's."""
    from vllm.model_executor.kernels import linear as theirs
    from vllm.model_executor.layers.quantization.utils import quant_utils
    from vllm.scalar_type import scalar_types

    from quant.vllm_plugin import linear_kernels as ours

    if format == "int4":
        config = theirs.MPLinearLayerConfig(
            shape[::-1], shape[::-1], scalar_types.uint4b8, torch.bfloat16, 128, False, False
        )
        for cls in (ours.BlockscaleInt4LinearKernel, theirs.MacheteLinearKernel, theirs.MarlinLinearKernel):
            if cls.can_implement(config)[0]:
                yield cls.__name__, cls(config, "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    elif format.startswith("fp8"):
        key = quant_utils.kFp8Static128BlockSym if format == "fp8_block" else quant_utils.kFp8StaticChannelSym
        config = theirs.FP8ScaledMMLinearLayerConfig(
            key, quant_utils.kFp8DynamicTokenSym, shape, torch.bfloat16, torch.bfloat16
        )
        names = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
        yield "BlockscaleFp8LinearKernel", ours.BlockscaleFp8LinearKernel(config, names)
        with patch.object(theirs.MarlinFP8ScaledMMLinearKernel, "is_supported", lambda *_: (True, None)):
            yield "MarlinFP8ScaledMMLinearKernel", theirs.MarlinFP8ScaledMMLinearKernel(config, names)
    else:
        pairs = {
            "nvfp4": (ours.BlockscaleNvFp4LinearKernel, theirs.NvFp4LinearLayerConfig),
            "mxfp4": (ours.BlockscaleMxFp4LinearKernel, theirs.MxFp4LinearLayerConfig),
            "mxfp8": (ours.BlockscaleMxfp8LinearKernel, theirs.Mxfp8LinearLayerConfig),
        }
        cls, config_class = pairs[format]
        for each in (cls, cls.__mro__[2]):  # its next base but one is Marlin's
            yield each.__name__, each(config_class())


def error(y: torch.Tensor, x: torch.Tensor, weight: BlockScaledTensor) -> float:
    exact = x[:16].double() @ weight.dequantize(torch.float64).T
    return float((y[:16].double() - exact).norm() / exact.norm())


def rows_of(format: str, shape: tuple[int, int], tokens: tuple[int, ...]) -> Iterator[dict[str, object]]:
    weight = quantize(torch.randn(shape, device="cuda") * 0.02, FORMATS[format])
    count = max(2, -(-3 * current().l2 // weight.codes.nbytes))
    times: dict[str, dict[int, float]] = {}
    for name, kernel in kernels(format, shape):
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = []
        for _ in range(count):
            layer, each = layer_of(weight), copy.copy(kernel)
            each.process_weights_after_loading(layer)
            calls.append(lambda x, layer=layer, each=each: each.apply_weights(layer, x, None))
        for m in tokens:
            x = torch.randn(m, shape[1], device="cuda", dtype=torch.bfloat16)
            times.setdefault(name, {})[m] = graph_microseconds([lambda c=c, x=x: c(x) for c in calls])
        relative_error = error(calls[0](x), x, weight)
        yield {"format": format, "shape": "×".join(map(str, shape)), "class": name,
               **{f"{m}": round(us, 1) for m, us in times[name].items()}, "error": f"{relative_error:.1e}"}  # fmt: skip
        del calls
    ours, *vllms = times.values()
    yield {"format": format, "shape": "×".join(map(str, shape)), "class": "speed-up over the fastest of vLLM",
           **{f"{m}": round(min(each[m] for each in vllms) / ours[m], 2) for m in tokens}, "error": ""}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "mxfp8", "int4", "fp8_channel", "fp8_block"])
    parser.add_argument("--shapes", nargs="+", default=[",".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config

    rows = []
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        for format in args.formats:
            for shape in args.shapes:
                try:
                    rows += rows_of(format, tuple(map(int, shape.split(","))), tuple(args.tokens))
                except Exception as problem:  # the table still has the other formats
                    rows.append(
                        {"format": format, "shape": shape, "class": f"{type(problem).__name__}: {problem}"[:90]}
                    )
    show("Linear kernels in vLLM, µs", {**machine(), **versions("vllm", "triton")}, rows)
    if args.json:
        args.json.write_text(json_text(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
