"""`check_attends` refuses transformers models that compute attention in code of their own.

A graph has one op for each attention, in place of masks and softmax (`decoder`). A model that does not call the
attention function of its config, such as BLOOM and XGLM, would get no mask from transformers and have no op: its graph
would look at later tokens and at padding, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from quant.calibration.attention_names import implementations_kept, model_configs, names_registered
from quant.calibration.evaluating import without_cache

_NAME = "quant_attention_use"


def check_attends(model: nn.Module, inputs: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError for a transformers model that asks for a mask, and does not attend by its config's function.

    Args:
        model: run once without values.
        inputs: examples of its inputs, by name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls: dict[str, int] = {"mask": 0, "attention": 0}

    def mask(*_: Any, **__: Any) -> None:
        calls["mask"] += 1

    def attend(module: nn.Module, query: torch.Tensor, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        calls["attention"] += 1
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

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
            return  # decisions by values, for example: this comes again where the graph is traced
    if calls["mask"] and not calls["attention"]:
        raise ValueError(
            f"{type(model).__name__} computes attention in code of its own, whose masks a graph would lose; serve its "
            "checkpoint (vLLM), or name the inputs of a graph that keeps the masks, as in --input "
            "input_ids:int64:batch,sequence"
        )
