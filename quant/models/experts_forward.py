"""transformers runs fused experts through a registry of forward functions; ours is registered under `quant`."""

from __future__ import annotations

from torch import nn

from quant.kernels.linear.expert_modules import experts_forward


def run_experts_one_by_one(model: nn.Module) -> None:
    """Makes a transformers model run its experts with `experts_forward`."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "_experts_implementation"):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        # transformers looks the function up by the config's string at each forward pass. Registering it again replaces
        # it by itself.
        ALL_EXPERTS_FUNCTIONS.register("quant", experts_forward)
        config._experts_implementation = "quant"
