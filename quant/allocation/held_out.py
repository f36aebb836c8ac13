"""`HeldOut` holds the text on which a limit on the loss is kept: one part chooses the formats, the other verifies them.

The loss of the smallest choice that keeps a limit lies just below it on the text that it was chosen on, partly by luck.
So the loss there is biased, and the rows that verify take no part in choosing. With several texts the worst one counts.

    texts of their own    the first half of the rows of each text chooses, the second half verifies
    calibration rows      a quarter chooses and a quarter verifies, drawn once; the solver works with the other half
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quant.base.errors import UserError

_CALIBRATION = "calibration text"


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows of token ids by the name of their text, int64 `[rows, seqlen]`.

    Attributes:
        check: rows for the joint loss while formats are chosen.
        verify: rows for the loss of the final choice; empty where nothing is verified.
    """

    check: Mapping[str, torch.Tensor]
    verify: Mapping[str, torch.Tensor]

    @classmethod
    def halves(cls, texts: Mapping[str, torch.Tensor]) -> HeldOut:
        """Returns both parts of texts that are held out.

        Raises:
            UserError: a text has a single row.
        """
        for name, rows in texts.items():
            if len(rows) < 2:
                raise UserError(
                    f"{name}: {len(rows)} row to evaluate on; a limit on the loss is kept on one half of the rows and "
                    "verified on the other: give --eval-samples 2 or more"
                )
        # The first half, in the order of the text: neighbouring rows of one document stay on one side.
        check = {name: rows[: len(rows) // 2] for name, rows in texts.items()}
        return cls(check, {name: rows[len(rows) // 2 :] for name, rows in texts.items()})

    @classmethod
    def from_calibration(cls, rows: torch.Tensor) -> tuple[torch.Tensor, HeldOut]:
        """Returns the rows that are left to calibrate with, and both parts taken out of them.

        Raises:
            UserError: there are fewer than 3 rows.
        """
        if len(rows) < 3:
            raise UserError(
                f"{len(rows)} calibration rows: a limit on the loss needs one to calibrate with, one to choose on and "
                "one to verify on; give 3 or more, or a text of its own with --eval"
            )
        quarter = max(len(rows) // 4, 1)
        # The seed is fixed, and not the run's: the same rows verify every allocation on this text.
        # At random, since rows of a mixture follow each other by kind of text.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0), device="cpu")
        check, verify, calibration = (
            rows[part.sort()[0]] for part in order.split([quarter, quarter, len(rows) - 2 * quarter])
        )
        return calibration, cls({_CALIBRATION: check}, {_CALIBRATION: verify})

    @classmethod
    def without_verification(cls, check: torch.Tensor) -> HeldOut:
        """Returns the calibration rows that a budget is checked on."""
        return cls({_CALIBRATION: check}, {})
