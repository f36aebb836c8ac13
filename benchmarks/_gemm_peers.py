"""This file calls other projects' kernels for BF16 × NVFP4, so that `gemm.py` can time those that are installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from quant.formats.tensor import BlockScaledTensor

Linear = Callable[[torch.Tensor], torch.Tensor]


def humming(weight: BlockScaledTensor) -> Linear | None:
    """The layer of humming over the same codes and scales, launched as its heuristics choose; None without the package.

    Args:
        weight: NVFP4, `[out, in]`, in the checkpoint's layout, on a GPU.
    """
    if find_spec("humming") is None:
        return None
    from humming.layer import HummingLayer

    with torch.device(weight.codes.device):
        layer = HummingLayer(
            shape_n=weight.shape[0],
            shape_k=weight.shape[1],
            weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
            torch_dtype=torch.bfloat16,
        )
    assert weight.global_scale is not None
    # Stored as ModelOpt does: `weight_scale_2` multiplies the block scales, as our global scale.
    layer.load_from_tensors(
        {"weight": weight.codes, "weight_scale": weight.scale, "weight_scale_2": weight.global_scale.reshape(1)}
    )
    layer.transform()
    return layer
