"""How a loss is written on the screen, in reports and in model cards."""

from __future__ import annotations


def loss_text(value: float) -> str:
    """Returns a loss in nats with four decimals, or with three significant digits where these would hide it."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.01 else f"{value:.3g}"
