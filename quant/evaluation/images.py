"""Figures of images next to the originals of the same seeds: PSNR, and SSIM where scikit-image is.

LPIPS and scores by CLIP load models from the network, which a run of this toolkit never does.
"""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np


def image_figures(images: Sequence[np.ndarray], originals: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns `psnr` and `ssim`, a number for each pair of pixels in [0, 1], `[…, height, width, channels]`.

    `ssim` is None without scikit-image.
    """
    pairs = list(zip(images, originals, strict=True))
    errors = [float(np.mean(np.square(image.astype(np.float64) - original))) for image, original in pairs]
    return {
        "psnr": [99.0 if error == 0 else min(-10 * math.log10(error), 99.0) for error in errors],  # 99 of equal images
        "ssim": [_ssim(image, original) for image, original in pairs] if find_spec("skimage") else None,
    }


def _ssim(image: np.ndarray, original: np.ndarray) -> float:
    """Returns the mean structural similarity over images and frames, in windows of 7 × 7."""
    from skimage.metrics import structural_similarity

    frames = [each.reshape(-1, *each.shape[-3:]).astype(np.float64) for each in (image, original)]
    return float(
        np.mean([structural_similarity(*pair, data_range=1.0, channel_axis=-1) for pair in zip(*frames, strict=True)])
    )
