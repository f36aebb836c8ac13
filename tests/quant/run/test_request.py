"""Options that contradict each other are refused once, in the words of the command or of Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quant.errors import UserError
from quant.recipes.plan import Plan
from quant.run.budget import AllocationRequest
from quant.run.request import Request

BUDGET = AllocationRequest(bits=5.0)
MODELS = {"--{}": "model", "{}=": nn.Linear(2, 2)}


@pytest.mark.parametrize("spelling", MODELS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "fp8", "kv_cache": "fp9"}, "<kv_cache> fp9: unknown format of a KV cache"),
        (
            {"recipe": Plan(()), "solver": "gptq"},
            "says everything already: edit it instead of using <solver>, <effort>",
        ),
        ({"recipe": Plan(()), "effort": 0}, "says everything already"),
        ({"budget": BUDGET, "lm_head": "fp8"}, "<lm_head> fp8: a budget counts the layers inside the model"),
        ({"budget": BUDGET, "guard": "0.1 keep"}, "<guard> would change what the allocation has measured"),
        ({"budget": BUDGET, "observer": "mse"}, "<observer> would change what the allocation has measured"),
        ({"budget": BUDGET, "recipe": "fp8"}, "fixes the formats that a budget would choose; name those that it may"),
        ({"budget": AllocationRequest(formats="fp8")}, "<formats> needs something to allocate for: <bits>"),
        ({"budget": AllocationRequest(bits=5.0, ctx="8k")}, "<ctx> means something to <fit> only"),
        ({"recipe": "fp8", "memory": "many"}, "<memory> 'many' is no size"),
    ],
)
def test_a_refusal_names_the_option_as_the_user_wrote_it(spelling: str, options: dict[str, Any], message: str) -> None:
    def spelled(part: str) -> str:
        name, bracket, text = part.partition(">")
        if not bracket:
            return part
        return spelling.format(name.replace("_", "-") if spelling.startswith("--") else name) + text

    expected = "".join(spelled(part) for part in message.split("<"))
    with pytest.raises(UserError) as refusal:
        Request(MODELS[spelling], **options).check()
    assert expected in str(refusal.value)


def test_a_recipe_is_named_exactly_once() -> None:
    for options in ({}, {"recipe": "fp8", "plan_file": "plan.json"}):
        with pytest.raises(UserError, match="exactly one of --format, --recipe and --plan"):
            Request("model", **options).check()


def test_data_that_are_no_rows_are_refused() -> None:
    with pytest.raises(UserError, match=r"data is \[4\]; expected token ids \[rows, seqlen\]"):
        Request(nn.Linear(2, 2), "fp8", data=torch.zeros(4, dtype=torch.int64)).check()
