"""`learned_rotation` finds the rotation of the residual stream behind which rounding in FP8 costs least.

FP8 rounds every value with an error that is a share of the value. So the error behind a layer that reads the stream,
in the metric A of its outputs, is to first order the same share of

    Σ_i M_ii H_ii        M = mean of x xᵀ of its inputs x,   H = Wᵀ A W

whether inputs or weights are rounded: it is large where loud channels meet large weights. A rotation R changes x to
R x and W to W Rᵀ, which leaves W x as it is, and the sum over all layers that read the stream becomes

    L(R) = Σ_layers Σ_i (R M Rᵀ)_ii (R H Rᵀ)_ii.

L is minimized over the orthonormal matrices, as SpinQuant (Liu et al., arXiv 2405.16406) minimizes the loss of the
model, here by Adam in the tangent space. The gradient with respect to a skew-symmetric Ω, which takes R to exp(Ω) R, is
the skew part of G Rᵀ with

    G = dL/dR = 2 Σ_layers [diag(h) R M + diag(m) R H],   m_i = (R M Rᵀ)_ii,   h_i = (R H Rᵀ)_ii.

The start is the identity: Hadamard matrices, which spread loud channels over small weights, make L larger.
"""

from __future__ import annotations

import math

import torch

STEPS = 250
# Radians by which the first steps turn each pair of channels; they fall to 0 along half a cosine.
_RATE = 0.006
_DECAYS = (0.9, 0.999)  # of Adam's averages of the gradient and of its square
# Bytes of the products R M that exist at once.
_PRODUCTS = 1 << 28


def learned_rotation(inputs: torch.Tensor, readers: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """Returns the rotation R `[width, width]`, float64, with which the stream x becomes R x.

    Args:
        inputs: M of each layer, or of each group of layers with one input, float32 `[layers, width, width]`.
        readers: H of each, float32 `[layers, width, width]`.
        steps: steps of Adam.

    Raises:
        ValueError: the moments are zero, or hold NaN or infinity.
    """
    rotation = torch.eye(inputs.shape[-1], dtype=torch.float32, device=inputs.device)
    start, gradient = loss_and_gradient(rotation, inputs, readers)
    if not 0 < start < math.inf:
        raise ValueError(f"the second moments of its inputs and gradients give a loss of {start}")
    first, second = torch.zeros_like(rotation), torch.zeros_like(rotation)
    best, least = rotation, start
    for step in range(1, steps + 1):
        skew = (gradient @ rotation.mT) / start
        skew = skew - skew.mT
        first.lerp_(skew, 1 - _DECAYS[0])
        second.lerp_(skew.square(), 1 - _DECAYS[1])
        mean, power = first / (1 - _DECAYS[0] ** step), second / (1 - _DECAYS[1] ** step)
        rate = _RATE * (1 + math.cos(math.pi * step / steps)) / 2
        turn = mean / power.sqrt().clamp(min=torch.finfo(power.dtype).tiny)
        rotation = torch.linalg.matrix_exp(-rate * turn) @ rotation
        loss, gradient = loss_and_gradient(rotation, inputs, readers)
        if loss < least:
            best, least = rotation, loss
    return _orthonormal(best.double())


def loss_and_gradient(
    rotation: torch.Tensor, inputs: torch.Tensor, readers: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """Returns L(R) and G = dL/dR `[width, width]`; see the module docstring."""
    loss, gradient = rotation.new_zeros(()), torch.zeros_like(rotation)
    together = max(_PRODUCTS // rotation.nbytes, 1)
    for moment, reader in zip(inputs.split(together), readers.split(together), strict=True):
        turned_moment, turned_reader = rotation @ moment, rotation @ reader
        m, h = (turned_moment * rotation).sum(-1), (turned_reader * rotation).sum(-1)
        loss += (m * h).sum()
        gradient += 2 * torch.einsum("ni,nij->ij", h, turned_moment)
        gradient += 2 * torch.einsum("ni,nij->ij", m, turned_reader)
    return float(loss), gradient


def _orthonormal(rotation: torch.Tensor) -> torch.Tensor:
    """Returns the orthonormal matrix next to a product of float32 rotations, by the iteration of Newton and Schulz."""
    for _ in range(3):
        rotation = 1.5 * rotation - 0.5 * rotation @ rotation.mT @ rotation
    return rotation
