"""Figures of images next to the originals of the same seeds: PSNR, and SSIM where scikit-image or torchmetrics is.

LPIPS and scores by CLIP load models from the network, which a run of this toolkit never does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np


def image_figures(images: Sequence[np.ndarray], originals: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns `psnr` and `ssim`, a number for each pair of pixels in [0, 1], `[…, height, width, channels]`.

    `ssim` is None where no package computes it.
    """
    pairs = list(zip(images, originals, strict=True))
    has_ssim = find_spec("skimage") or find_spec("torchmetrics")
    return {
        "psnr": [_psnr(image, original) for image, original in pairs],
        "ssim": [_ssim(image, original) for image, original in pairs] if has_ssim else None,
    }


def _psnr(image: np.ndarray, original: np.ndarray) -> float:
    """Returns the peak signal-to-noise ratio in dB of pixels in [0, 1]; 99 of equal images."""
    error = float(np.mean(np.square(image.astype(np.float64) - original)))
    return 99.0 if error == 0 else min(-10 * math.log10(error), 99.0)


def _ssim(image: np.ndarray, original: np.ndarray) -> float:
    """Returns the mean structural similarity over images and frames, in windows of 7 × 7."""
    frames = [each.reshape(-1, *each.shape[-3:]).astype(np.float64) for each in (image, original)]
    if find_spec("skimage"):
        from skimage.metrics import structural_similarity

        values = [structural_similarity(a, b, data_range=1.0, channel_axis=-1) for a, b in zip(*frames, strict=True)]
        return float(np.mean(values))
    import torch
    from torchmetrics.functional.image import structural_similarity_index_measure

    a, b = (torch.from_numpy(each).permute(0, 3, 1, 2) for each in frames)
    return float(structural_similarity_index_measure(a, b, data_range=1.0, gaussian_kernel=False, kernel_size=7))
