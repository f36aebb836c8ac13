"""`check_attends` refuses transformers models whose graph would lose the masks of attention.

A graph has one op for each attention, in place of masks and softmax (`decoder`), and no masks but those of padding. A
model that does not call the attention function of its config, such as BLOOM and XGLM, would have no op. One whose
module is not causal by itself, but gets a causal mask, such as BigBird-Pegasus, would have an op that sees every token.
Both graphs would look at later tokens, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quant.base.errors import option
from quant.calibration.attention_names import implementations_kept, model_configs, names_registered
from quant.calibration.evaluating import without_cache

_NAME = "quant_attention_use"


def check_attends(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a transformers model that asks for a mask which its graph would lose.

    Args:
        model: run twice without values.
        inputs: examples of its inputs, by name.
    """
    calls: dict[str, int] = {"mask": 0, "attention": 0}
    way_out = (
        "whose masks a graph would lose; serve its checkpoint (vLLM), or name the inputs of a graph that keeps the "
        f"masks, as in {option('input', 'input_ids:int64:batch,sequence')}"
    )

    def mask(*_: Any, **__: Any) -> None:
        calls["mask"] += 1

    def attend(module: nn.Module, query: torch.Tensor, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        calls["attention"] += 1
        return _output(query, value)

    if not _run(model, inputs, attend, mask):
        return
    if calls["mask"] and not calls["attention"]:
        raise ValueError(f"{type(model).__name__} computes attention in code of its own, {way_out}")
    module = _needs_its_mask(model, inputs) if calls["mask"] else None
    if module is not None:
        raise ValueError(f"{type(model).__name__}: {module} is causal by its mask alone, {way_out}")


def _needs_its_mask(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> str | None:
    """Returns the first module that gets a causal mask and is not causal by itself; None if there is none."""
    from transformers.masking_utils import causal_mask_function

    causal_masks: list[torch.Tensor] = []
    names: list[str] = []
    modules = {module: name for name, module in model.named_modules()}

    def mask(q_length: int, kv_length: int, mask_function: Any, **_: Any) -> torch.Tensor:
        made = torch.ones(2, 1, q_length, kv_length, dtype=torch.bool)
        # Masks that are put together, such as PaliGemma's, may let every token see every other one.
        if mask_function is causal_mask_function:
            causal_masks.append(made)
        return made

    def attend(
        module: nn.Module, query: torch.Tensor, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        if not causal and any(attention_mask is made for made in causal_masks):
            names.append(modules.get(module, ""))
        return _output(query, value)

    # Padding has masks of its own, which a graph keeps.
    kept = {name: x for name, x in inputs.items() if "attention_mask" not in name}
    _run(model, kept, attend, mask)
    return names[0] if names else None


def _output(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, None]:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _run(
    model: nn.Module, inputs: Mapping[str, torch.Tensor], attend: Callable[..., Any], mask: Callable[..., Any]
) -> bool:
    """Runs a model without values, with these functions in the place of its attention and its masks.

    Returns False if it decides by values, for example, which comes again where the graph is traced.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        without_cache(model_configs(model)),
        implementations_kept(model) as configs,
        names_registered({_NAME: attend}, {_NAME: mask}),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        for config, _ in configs:
            config._attn_implementation_internal = _NAME
        try:
            model(**inputs)
        except (TypeError, AttributeError):
            pass  # code of its own that computes with its mask, which is None
        except Exception:
            return False
    return True
