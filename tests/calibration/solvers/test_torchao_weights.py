"""`rtn` gives the weights of torchao bit for bit, where docs/other-toolkits.md says so."""

import pytest
import torch
from safetensors.torch import load_file
from samples import GOLDENS

from quant.calibration.solvers.registry import get_solver
from quant.formats.format import FORMATS

FORMATS_OF = {
    "float8_rows": "fp8_channel",
    "float8_tensor": "fp8",
    "nvfp4_weight_only": "nvfp4",
    "mxfp8": "mxfp8",
    "mxfp8_e5m2": "mxfp8_e5m2",
    "mxfp4": "mxfp4",
}


@pytest.mark.parametrize("config", FORMATS_OF)
def test_rtn_gives_torchaos_weights(config: str) -> None:
    tensors = load_file(GOLDENS / "torchao/weights.safetensors")
    for layer in ("q", "k", "o"):
        weight = get_solver("rtn")(
            tensors[f"weight.{layer}"], None, FORMATS[FORMATS_OF[config]], global_scale=None, name=layer
        )
        assert torch.equal(weight.dequantize(torch.bfloat16), tensors[f"{config}.{layer}"])
