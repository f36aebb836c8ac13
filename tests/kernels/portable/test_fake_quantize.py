"""NVFP4 rounding on a GPU agrees with `formats` and with autograd; on a CPU its kernels are interpreted."""

import pytest
import torch

from quant.calibration.solvers.autoround import _Rounded, _spread
from quant.formats.format import FORMATS
from quant.formats.rounding import round_to
from quant.formats.tensor import fake_quantize

pytest.importorskip("triton")

NVFP4 = FORMATS["nvfp4"]


def _check_inputs(device: str) -> None:
    from quant.kernels.portable.nvfp4_solvers import fake_quantize_nvfp4

    x = torch.randn(70, 96) * torch.logspace(-7, 3, 70)[:, None]
    x[3, 16:32] = 0
    for dtype in (torch.float32, torch.bfloat16):
        # The second scale is too small for the largest blocks: scales saturate.
        for second in (None, torch.tensor(0.002)):
            given = x.to(dtype)
            found = fake_quantize_nvfp4(given.to(device), None if second is None else second.to(device))
            assert torch.equal(found.cpu(), fake_quantize(given, NVFP4, global_scale=second))


def _check_weights(device: str) -> None:
    from quant.kernels.portable.nvfp4_solvers import learned_gradient, learned_values

    latent = torch.randn(40, 64) * 3
    first, step = torch.rand(40, 4) + 0.5, torch.rand(40, 4) + 0.5
    gradient = torch.randn(40, 64)
    # By autograd, as the definition says: rounding is passed through, saturation is not.
    free_latent, free_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    spread = _spread(free_step, latent.shape, NVFP4)
    wanted = (free_latent * _spread(first, latent.shape, NVFP4) / spread).clamp(-6, 6)
    values = (wanted + (round_to(wanted.detach(), NVFP4.element) - wanted).detach()) * spread
    values.backward(gradient)
    on = [t.to(device) for t in (latent, first, step)]
    torch.testing.assert_close(learned_values(*on).cpu(), values.detach())
    of_latent, of_step = learned_gradient(*on, gradient.to(device))
    torch.testing.assert_close(of_latent.cpu(), free_latent.grad)
    torch.testing.assert_close(of_step.cpu(), free_step.grad, rtol=1e-4, atol=1e-5)
    # The same without the kernel.
    ours, our_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    _Rounded.apply(ours, our_step, first, NVFP4).backward(gradient)
    torch.testing.assert_close(ours.grad, free_latent.grad)
    torch.testing.assert_close(our_step.grad, free_step.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("check", [_check_inputs, _check_weights])
def test_interpreted(check: object) -> None:
    from interpreter import interpreted

    with interpreted():
        check("cpu")  # type: ignore[operator]


@pytest.mark.gpu
@pytest.mark.parametrize("check", [_check_inputs, _check_weights])
def test_compiled(check: object) -> None:
    check("cuda")  # type: ignore[operator]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8", "fp8_channel", "fp8_block"])
def test_gradients_of_every_block_shape(name: str) -> None:
    format = FORMATS[name]
    latent = torch.randn(40, 70)
    step = torch.rand(format.scale_shape((40, 70))) + 0.5
    ours, our_step = latent.clone().requires_grad_(), step.clone().requires_grad_()
    gradient = torch.randn(40, 70)
    _Rounded.apply(ours, our_step, step, format).backward(gradient)
    spread = _spread(step, latent.shape, format)
    nearest = round_to(latent, format.element)
    free = latent.abs() <= format.element.max
    torch.testing.assert_close(ours.grad, gradient * spread * free)
    wanted = step.clone().requires_grad_()
    (_spread(wanted, latent.shape, format) * (gradient * (nearest - latent * free))).sum().backward()
    torch.testing.assert_close(our_step.grad, wanted.grad, rtol=1e-4, atol=1e-4)
