"""On a GPU, weights and inputs in training are rounded as the oracle rounds them, and so are their gradients."""

import pytest
import torch

from quant.formats.format import FORMATS
from quant.formats.tensor import quantize
from quant.kernels.training.fake_rounding import round_input, round_weight

pytestmark = pytest.mark.gpu
SHAPE = (160, 320)


def weight(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(SHAPE, generator=generator) * torch.randn(SHAPE[0], 1, generator=generator).exp()
    w[1, :64], w[2, 0] = 0, 1e-30
    return w.to(dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("given", [False, True], ids=["measured", "given"])
def test_weights_and_their_gradients(name: str, dtype: torch.dtype, given: bool) -> None:
    format, w = FORMATS[name], weight(dtype)
    second = quantize(w, format).global_scale
    scale = torch.rand(format.scale_shape(SHAPE), generator=torch.Generator().manual_seed(1)) + 0.01 if given else None
    if scale is not None and not format.scale.is_wide:
        scale = (2.0 ** (scale * 8).round()).float()
    dy = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = {}
    for device in ("cpu", "cuda"):
        leaf = w.to(device).detach().requires_grad_()
        learned = None if scale is None else scale.to(device).detach().requires_grad_()
        own = None if second is None else second.to(device)
        y = round_weight(leaf, format, torch.bfloat16, scale=learned, global_scale=own, stored=dtype)
        y.backward(dy.to(device))
        found[device] = [y.detach().cpu(), leaf.grad.cpu(), None if learned is None else learned.grad.cpu()]
    assert torch.equal(found["cuda"][0], found["cpu"][0])
    assert torch.equal(found["cuda"][1], found["cpu"][1])
    if found["cpu"][2] is not None:
        torch.testing.assert_close(found["cuda"][2], found["cpu"][2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp4", "fp8", "fp8_token", "fp8_group", "int8_token"])
@pytest.mark.parametrize("static", [False, True])
def test_inputs_and_their_gradients(name: str, static: bool) -> None:
    format = FORMATS[name]
    if static and not format.is_static:
        pytest.skip("the format measures each input")
    x = torch.randn(3, 40, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor(5e-4 if format.global_scale else 5e-3) if static else None
    found = {}
    for device in ("cpu", "cuda"):
        leaf = x.to(device).detach().requires_grad_()
        y = round_input(leaf, format, None if scale is None else scale.to(device))
        y.float().square().sum().backward()
        found[device] = [y.detach().cpu(), leaf.grad.cpu()]
    assert torch.equal(found["cuda"][0], found["cpu"][0])
    # Sums over a block are added up in another order.
    torch.testing.assert_close(found["cuda"][1], found["cpu"][1], rtol=2.0**-7, atol=1e-4)
