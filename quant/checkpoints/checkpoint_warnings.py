"""`checkpoint_warnings` collects the warnings about a checkpoint, whichever function writes it.

The command `quantize` prints these sentences and puts them into its report; `quant.save` and a model's
`save_pretrained` raise them as Python warnings. All three write through `write_model`, which asks here.
"""

from __future__ import annotations

import torch

from quant.export.checkpoint.files.known_failures import runtime_warnings
from quant.export.checkpoint.files.names import StoredNames
from quant.plan.plan_warnings import coverage_warnings, fusion_warnings
from quant.recipes.plan import Plan


def checkpoint_warnings(plan: Plan, dtype: torch.dtype, names: StoredNames) -> list[str]:
    """Returns warnings on features that other runtimes lack, fusion groups, and weights that stay in 16 bit.

    Args:
        plan: the plan of the checkpoint, with the run-time parts that its layers have.
        dtype: the dtype of the model; bfloat16 where transformers does not load it, because only transformers has
            trouble with other dtypes.
        names: the names of the model's tensors on disk.
    """
    return [*runtime_warnings(plan, dtype, names), *fusion_warnings(plan), *coverage_warnings(plan)]
