"""PSNR by its definition, and SSIM by scikit-image where it is installed."""

import math

import numpy as np
import pytest

from quant.run.pipeline import image_figures


def test_psnr_is_that_of_its_definition() -> None:
    a, b = (np.random.default_rng(seed).random((1, 16, 16, 3)).astype(np.float32) for seed in (0, 1))
    figures = image_figures([a, a], [b, a])
    assert figures["psnr"] == pytest.approx([10 * math.log10(1 / np.mean((a - b).astype(np.float64) ** 2)), 99.0])
    # A video is the mean over its frames.
    video = np.stack([a, b], 1)
    assert image_figures([video], [np.stack([b, b], 1)])["psnr"][0] == pytest.approx(figures["psnr"][0] + 3.0103, 1e-4)


def test_ssim_is_one_of_equal_images() -> None:
    pytest.importorskip("skimage")
    a, b = (np.random.default_rng(seed).random((1, 16, 16, 3)) for seed in (0, 1))
    same, different = image_figures([a, a], [a, b])["ssim"]
    assert same == pytest.approx(1) and different < 0.2


def test_no_package_no_ssim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.run.pipeline.find_spec", lambda name: None)
    assert image_figures([np.zeros((1, 8, 8, 3))], [np.zeros((1, 8, 8, 3))])["ssim"] is None
