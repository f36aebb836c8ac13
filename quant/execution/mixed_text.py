"""`mixed_text` has a model write calibration text for itself, for a plan that needs data where the user named none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quant.calibration.attention_names import text_config
from quant.calibration.placement import is_visited, placed
from quant.calibration.ranks import from_first
from quant.calibration.session import Session
from quant.calibration.texts.mixture import Record, TextWriter, mixture_rows
from quant.base.errors import megabytes
from quant.calibration.texts.row_checks import run_probe
from quant.kernels.base.processor import memory_left
from quant.calibration.texts.data_needs import NoTextError
from quant.recipes.plan import Plan


def mixed_text(
    model: nn.Module,
    plan: Plan,
    tokenizer: Any = None,
    session: Session | None = None,
    *,
    samples: int = 32,
    seqlen: int = 512,
    own_only: bool = False,
) -> tuple[torch.Tensor, Record]:
    """Returns calibration rows for a plan that needs data and has none: see `quant.calibration.texts.mixture`.

    Args:
        model: a causal language model, which writes half of it; for other models of text, only the samples.
        plan: the plan that the error message names.
        tokenizer: a tokenizer; without one, all text is the model's own.
        session: the session. A model that does not fit its device writes nothing, because every token would read every
            weight from elsewhere. Its seed chooses and draws the text, and its listener is called for "generate" with
            tokens.
        samples: rows.
        seqlen: tokens a row; cut to the model's context.
        own_only: leaves out the samples.

    Returns:
        int64 `[samples, seqlen]`, and the record of their sources.

    Raises:
        NoTextError: no text suits this model; the message names the layer that needs some.
    """
    context = getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None)
    seqlen = min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen
    session = session or Session()

    def write() -> tuple[torch.Tensor, Record]:
        why_not = _too_large(model, session)
        shape: dict[str, Any] = {"samples": samples, "seqlen": seqlen, "own_only": own_only}
        # Only samples, without the half that the model would write.
        if why_not is not None and tokenizer is not None and not own_only:
            return mixture_rows(TextWriter(model, why_not=why_not), tokenizer, session, **shape)
        with placed(model, session.device):
            rows, record = mixture_rows(TextWriter(model), tokenizer, session, **shape)
            # The model has not run yet in this case, and samples that it cannot read would fail later inside a solver.
            if "no_own_text" in record:
                run_probe(model, rows[:1, :2])
        return rows, record

    try:
        # Sampling differs between GPUs in the last bits of the logits, so ranks that each wrote would calibrate on
        # different text.
        return from_first(write)
    # An OutOfMemoryError is a RuntimeError, and no lack of text.
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError, IndexError) as error:
        raise NoTextError(plan, str(error)) from error


def _too_large(model: nn.Module, session: Session) -> str | None:
    """Returns why `model` should not write text on a device where each token would read its weights again."""
    device = session.device
    if is_visited(model, device):
        return f"the model does not fit on {device}"
    size, free = sum(parameter.nbytes for parameter in model.parameters()), memory_left()
    # Mapped files that do not stay in the page cache are read from disk again for every token, which takes hours.
    if (device is None or device.type == "cpu") and free is not None and 2 * size > free:
        return f"the model takes {megabytes(size)} of memory, and {megabytes(free)} are free"
    return None
