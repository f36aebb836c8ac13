"""`denoising_html` makes the page of a pipeline: the error of predictions by timestep, and images side by side.

Each image lies over the original's of the same seed, and a slider moves the line between both; without JavaScript they
stand next to each other. The sensitivity by block and by timestep is measured for a budget, and shown where it was.
"""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quant.base.errors import megabytes
from quant.report.charts import Section, coloured, role_and_block
from quant.report.render import render_page
from quant.report.report import Report

_SHOWN = 6  # pairs of images; of a video its middle frame


def denoising_html(
    name: str, denoising: Mapping[str, Any], reports: Mapping[str, Report], *images: Sequence[np.ndarray]
) -> str:
    """Returns the page of a quantized pipeline.

    Args:
        name: of the pipeline.
        denoising: the contents of denoising.json.
        reports: of the quantized components, whose own pages are linked.
        images: before and after, each the pixels in [0, 1] of held-out prompts, `[batch, …, height, width, channels]`.
    """
    tiles = [
        (component, f"{each.ratio:.2f}× smaller", f"{megabytes(each.bytes_before)} → {megabytes(each.bytes_after)}")
        for component, each in reports.items()
    ]
    errors = denoising["components"]
    tiles += [(f"Error of {name}", f"{table['all']:.2%}", "of the predicted noise") for name, table in errors.items()]
    psnr, ssim = denoising["psnr"], denoising["ssim"]
    tiles.append(("PSNR", f"{np.mean(psnr):.1f} dB", "images of the same seeds, mean"))
    if ssim is not None:
        tiles.append(("SSIM", f"{np.mean(ssim):.3f}", "1 is equal, mean"))
    sections = [_by_timestep(errors)] if errors else []
    sections += [_sensitivity(name, table) for name, table in denoising.get("sensitivity", {}).items()]
    figures = [f"PSNR {p:.1f} dB" + ("" if ssim is None else f", SSIM {ssim[i]:.3f}") for i, p in enumerate(psnr)]
    pairs = [
        (prompt, figure, _png(a), _png(b))
        for prompt, figure, a, b in zip(denoising["prompts"]["held_out"], figures, *images, strict=True)
    ]
    return render_page(
        "sections.html.j2", kicker="Quantized pipeline", title=name, subtitle="Reports of components:", tiles=tiles,
        links=list(reports), pairs=pairs[:_SHOWN], sections=sections,
    )  # fmt: skip


def _by_timestep(errors: Mapping[str, Mapping[str, float]]) -> Section:
    found = [
        (f"E{i}-{j}", time, name, error)
        for i, (name, table) in enumerate(errors.items())
        for j, (time, error) in enumerate((time, error) for time, error in table.items() if time != "all")
    ]
    chart = {
        "kind": "dots", "x": "timestep", "y": "relative error in %, lower is better", "series": coloured(*errors),
        "points": [(float(time), 100 * error, name, row) for row, time, name, error in found],
    }  # fmt: skip
    rows = [(row, (time, name, f"{error:.2%}")) for row, time, name, error in found]
    text = "Relative error of the predicted noise on held-out prompts. Denoising goes from high timesteps to low ones."
    return Section("Error by timestep", text, None, chart, ("timestep", "component", "error"), rows, folded=True)


def _sensitivity(name: str, table: Mapping[str, Mapping[str, float]]) -> Section:
    """Draws a panel for each list of blocks, with a row for each timestep and a column for each block."""
    cells, rows = [], []
    for i, (block, errors) in enumerate(table.items()):
        role, number = role_and_block(block)
        rows.append((f"B-{name}-{i}", (block, *(f"{error:.2%}" for error in errors.values()))))
        cells += [(role, time, number, error, False, f"B-{name}-{i}") for time, error in errors.items()]
    times = list(next(iter(table.values())))
    panels = [(role, role.removesuffix(".*")) for role in dict.fromkeys(role for role, *_ in cells)]
    chart = {
        "kind": "heat", "x": "block", "panels": panels, "cells": cells,
        "roles": [(time, f"timestep {time}") for time in times],
    }  # fmt: skip
    text = "Relative error of the prediction where one block alone is rounded, to the format that loses most."
    head = ("block", *(f"timestep {time}" for time in times))
    return Section(f"Sensitivity of {name}", text, None, chart, head, rows)


def _png(pixels: np.ndarray) -> str:
    """Returns the first image of a batch, or the middle frame of its first video, as a data URL."""
    from PIL import Image

    image = pixels[0] if pixels.ndim == 4 else pixels[0, pixels.shape[1] // 2]
    stream = io.BytesIO()
    Image.fromarray((image.clip(0, 1) * 255).round().astype(np.uint8)).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
