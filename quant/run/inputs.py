"""Commands name models and texts on the command line; this file opens and reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quant.calibration.inputs import Inputs, joined
from quant.calibration.placement import placed
from quant.calibration.progress import Progress, reporter
from quant.calibration.ranks import from_first
from quant.calibration.texts.decoder_text import lacks_decoder_text, write_decoder_text
from quant.calibration.texts.mixture import OWN, SHARES, Record, rows_hash
from quant.calibration.texts.named_inputs import read_inputs
from quant.calibration.texts.rows import calibration_rows, token_rows
from quant.checkpoints.load import can_run, load
from quant.cli.console import CONSOLE
from quant.errors import UserError
from quant.evaluation.evaluate import run_probe
from quant.execution.data import mixed_text
from quant.execution.store import tensor_hash
from quant.models.files import find_model
from quant.models.open import Source, open_model
from quant.models.state_dict import call_factory
from quant.plan.make import make_plan
from quant.recipes.plan import Plan

MIX, SELF = "mix", "self"
WRITTEN = (MIX, SELF)
"""Sources of --calib that are no files: the mixture of samples and own text, and own text alone."""


def open_runnable(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a model that can run: a quantized checkpoint, or any model that `quantize` takes.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    path = find_model(name)
    if can_run(path):
        model = load(path, call_factory(model_factory) if model_factory else None)
        dtype = next((p.dtype for p in model.parameters()), torch.float32)
        return Source(name=name, kind="huggingface", model=model, state_dict=None, path=path, dtype=dtype), model
    return open_original(name, model_factory=model_factory, unsafe_load=unsafe_load)


def open_original(
    name: str, *, model_factory: str | None = None, unsafe_load: bool = False
) -> tuple[Source, nn.Module]:
    """Opens a model that can run, a quantized one dequantized.

    Raises:
        UserError: it cannot be opened, or it is a bare state dict.
    """
    source = open_model(name, model_factory=model_factory, unsafe_load=unsafe_load)
    if source.model is None:
        raise UserError(f"{name}: a bare state dict cannot be run; pass --model-factory to build its module")
    return source, source.model


def tokenizer_if_any(source: Source) -> Any:
    """The model's tokenizer, or None."""
    try:
        return source.load_tokenizer()
    except UserError:
        return None


def read_texts(source: Source, texts: Iterable[Path], samples: int, seqlen: int) -> dict[str, torch.Tensor]:
    """Token rows `[samples, seqlen]` for a model by the name of each text; files of token ids need no tokenizer."""
    return {
        str(text): token_rows(text, _tokenizer_for(source, str(text)), samples=samples, seqlen=seqlen) for text in texts
    }


def sources_of(calib: Sequence[str]) -> tuple[str, ...]:
    """What --calib names, one by one: `mix+text.txt` is `mix` and `text.txt`. The mixture, where it names nothing."""
    found: list[str] = []
    for name in calib or (MIX,):
        while name.startswith((f"{MIX}+", f"{SELF}+")):
            first, _, name = name.partition("+")
            found.append(first)
        found.append(name)
    return tuple(dict.fromkeys(found))


def share_written(calib: Sequence[str], *, has_tokenizer: bool) -> float:
    """Share of the calibration text that the model writes."""
    names = sources_of(calib)
    mixed = SHARES[OWN] if has_tokenizer else 1.0
    return sum({MIX: mixed, SELF: 1.0}.get(name, 0.0) for name in names) / len(names)


def within_context(source: Source, seqlen: int) -> int:
    """Tokens of a row that a model writes: at most its context."""
    context = getattr(source.config, "max_position_embeddings", None)
    return min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen


def named_inputs(source: Source, calib: Sequence[str], samples: int, seqlen: int) -> Inputs | None:
    """Inputs by name, images, sounds or pairs of texts; None where `calib` names rows of tokens, or nothing."""
    names = sources_of(calib)
    if source.model is None or any(name in WRITTEN for name in names):
        return None
    found = {}
    for place, name in enumerate(names):
        count = max(samples // len(names) + (place < samples % len(names)), 1)
        found[name] = read_inputs(name, source.model, source.load_processor, samples=count, seqlen=seqlen)
    inputs = [each for each in found.values() if each is not None]
    if 0 < len(inputs) < len(found):
        kinds = [next(name for name, each in found.items() if (each is None) is is_text) for is_text in (False, True)]
        raise UserError(f"--calib {kinds[0]} holds inputs of the model, and {kinds[1]} a text; give one of them")
    return joined(inputs) if inputs else None


def read_calibration(
    source: Source,
    calib: Sequence[str],
    *,
    samples: int,
    seqlen: int,
    seed: int,
    device: torch.device | None,
    progress: Progress,
    plan: Plan | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    quiet: bool = False,
    at_most: bool = False,
) -> tuple[torch.Tensor | Inputs, list[Record]]:
    """What --calib names, as many rows of each source, in turn, and a record of each source.

    `plan` needs them; None stands for one yet to be found. With `at_most`, a shorter text gives the rows that it has.
    """
    names = sources_of(calib)
    if samples < len(names):
        raise UserError(f"--calib-samples {samples}: --calib names {len(names)} sources, each of which gives a row")
    inputs = named_inputs(source, calib, samples, seqlen)
    if inputs is not None:
        assert source.model is not None
        inputs = with_decoder_text(source.model, inputs, device, progress)
        announce_inputs("calibrating on", inputs, "+".join(names), quiet)
        about = {"about": inputs.about} if inputs.about else {}
        return inputs, [{"source": "+".join(names), "rows": len(inputs), "sha256": digest_of(inputs), **about}]
    fits = within_context(source, seqlen)
    if fits < seqlen and any(name in WRITTEN for name in names) and not quiet:
        CONSOLE.print(f"rows have {fits} tokens, the context of this model, and not --seqlen {seqlen}", soft_wrap=True)
    found: list[tuple[float, torch.Tensor]] = []
    records: list[Record] = []
    for place, name in enumerate(sorted(names, key=lambda name: name not in WRITTEN)):
        count = samples // len(names) + (place < samples % len(names))
        if name in WRITTEN:
            assert source.model is not None
            made_for = plan or make_plan(source.model, "fp8", include=include, exclude=exclude)
            rows, record = mixed_text(
                source.model, made_for, tokenizer_if_any(source), samples=count, seqlen=seqlen, seed=seed,
                own_only=name == SELF, device=device, progress=progress,
            )  # fmt: skip
            seqlen = rows.shape[1]  # a short context cuts it
        else:
            tokenizer = _tokenizer_for(source, name)
            rows = calibration_rows(name, tokenizer, samples=None if at_most else count, seqlen=seqlen, seed=seed)
            rows = rows[:count]
            record = {"rows": len(rows), "seqlen": rows.shape[1], "sha256": rows_hash(rows)}
            _check_runs(source, name, rows)
        found += [((i + 0.5) / len(rows), row) for i, row in enumerate(rows)]
        records.append({"source": name, **record})
    return torch.stack([row for _, row in sorted(found, key=lambda pair: pair[0])]), records


def _check_runs(source: Source, name: str, rows: torch.Tensor) -> None:
    """Raises UserError where the model does not run on rows of tokens."""
    if source.model is None:
        return
    try:
        run_probe(source.model, rows[:1, :2])
    except ValueError as error:
        raise UserError(
            f"--calib {name}: {type(source.model).__name__} cannot be calibrated on text: {error}; give a "
            "folder of images or sounds, hf:NAME with a column of them, a .safetensors file of its inputs by name, "
            "or in Python data=, or choose a format that needs none, such as fp8_channel or mxfp8"
        ) from error


def read_evaluation(
    source: Source,
    data: Iterable[str | Path],
    samples: int,
    seqlen: int,
    *,
    writer: nn.Module | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
    quiet: bool = False,
) -> dict[str, torch.Tensor | Inputs]:
    """What each --data or --eval names, by its name: inputs of the model, or else rows of a text.

    Args:
        source: the model.
        data: as for --calib.
        samples: rows or calls of each.
        seqlen: tokens of a row.
        writer: the model that writes the text of decoders where none is known; by default that of `source`.
        device: where it runs.
        progress: of the writing.
        quiet: says nothing.
    """
    found: dict[str, torch.Tensor | Inputs] = {}
    for name in map(str, data):
        inputs = named_inputs(source, [name], samples, seqlen)
        if inputs is None:
            found |= read_texts(source, [Path(name)], samples, seqlen)
            continue
        assert source.model is not None
        found[name] = inputs = with_decoder_text(writer or source.model, inputs, device, progress)
        announce_inputs("evaluating on", inputs, name, quiet)
    return found


def with_decoder_text(
    model: nn.Module, inputs: Inputs, device: torch.device | None, progress: Progress | None
) -> Inputs:
    """The inputs, with text that the model writes itself for its decoder where none is known."""
    if not lacks_decoder_text(inputs):
        return inputs
    with placed(model, device):
        return from_first(lambda: write_decoder_text(model, inputs, reporter(progress, "generate")))


def as_rows(model: nn.Module, data: torch.Tensor | Inputs, option: str) -> torch.Tensor:
    """Calibration data as one tensor, for what measures on nothing else.

    Raises:
        UserError: the calls take several tensors, or tensors of several shapes.
    """
    found = data.as_tensor(model) if isinstance(data, Inputs) else data
    if found is None:
        raise UserError(
            f"{option} measures on one tensor, token ids or images of one size, and {type(model).__name__} takes "
            "several; quantize with --format, and measure with quant evaluate --data"
        )
    return found


def digest_of(rows: torch.Tensor | Inputs) -> str:
    """SHA-256 of the values of rows or calls."""
    if isinstance(rows, torch.Tensor):
        return tensor_hash(rows)
    return hashlib.sha256("".join(map(tensor_hash, rows.tensors())).encode()).hexdigest()


def announce_inputs(what: str, inputs: Inputs, name: str, quiet: bool) -> None:
    """Says in one line what inputs were made from."""
    if inputs.about and not quiet:
        CONSOLE.print(f"{what} {name}: {inputs.about}", soft_wrap=True)


def _tokenizer_for(source: Source, text: str) -> Any:
    is_ids = text.endswith(".safetensors") or ".safetensors:" in text
    return None if is_ids else source.load_tokenizer()
