"""`mixture_rows` mixes calibration text of many kinds: solvers that fit their text should not fit only one kind.

    part         share   source
    own text      1/2    the model writes it (`generate`)
    prose         1/8    sample_texts/prose.txt: articles, stories, letters, instructions, minutes, a scene, an abstract
    manual        1/8    sample_texts/manual.txt: documentation of software
    code          1/8    sample_texts/code.txt: programs in many languages, configuration, a terminal session
    dialogue      1/16   sample_texts/dialogue.txt: through the chat template where the tokenizer has one
    languages     1/16   sample_texts/languages.txt: 20 languages in 9 scripts

The model's own text follows the distribution of its training data but repeats the model's mistakes; the samples are
real text, but of kinds that somebody else chose. Half of each keeps either fault small. The shares were
chosen by this reasoning before anything was measured.

Own text begins in several ways, in turn: from just the start token, from the first words of a sample, and from a
question in the chat template; it is drawn at temperatures 1 and 0.7, because sampling at 1 leads small models astray
and applications mostly sample below 1.

Texts are cut into pieces of at most `PIECE` tokens, each closed by the end-of-text token. The pieces of all parts are
interleaved evenly, so that any number of the first rows has about the same shares, chained, and cut into rows that
begin with BOS where the tokenizer's texts do. Short pieces put more texts into few rows, and own text in pieces takes
fewer steps, each for more rows: one step reads every weight once.
"""

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quant.base.errors import UserError, megabytes
from quant.base.processor import memory_left
from quant.calibration.attention_names import text_config
from quant.calibration.outputs.logits import run_probe
from quant.calibration.ranks import from_first
from quant.calibration.session import Session, is_visited, placed
from quant.calibration.solvers.registry import get_pipeline
from quant.calibration.texts.rows import chat_ids, check_ids, cut_rows, start_token
from quant.calibration.texts.self_written import first_token, generate_rows
from quant.recipes.plan import LayerPlan, Plan
from quant.recipes.plan_make import without_data

PIECE = 256
OWN, CHAT = "own text", "dialogue"
SHARES = {OWN: 1 / 2, "prose": 1 / 8, "manual": 1 / 8, "code": 1 / 8, CHAT: 1 / 16, "languages": 1 / 16}
_TEMPERATURES = (1.0, 1.0, 0.7, 0.7)
_OPENING = 12  # tokens of a sample that own text goes on from
_SHORTEST = 16  # tokens of a piece of a sample

Record = dict[str, Any]
"""How rows came about, as plans keep it: shape, seed, hash, tokens of each part, why there is no own text if so."""


def mixture_rows(
    model: nn.Module | None, tokenizer: Any | None, session: Session, *, samples: int, seqlen: int,
    own_only: bool = False, why_not: str | None = None,
) -> tuple[Tensor, Record]:  # fmt: skip
    """Returns the rows of calibration text, int64 `[rows, seqlen]` on the CPU, and how they came about.

    Without a model that writes, or with a reason `why_not`, all text is samples; without a tokenizer, all is the
    model's.
    """
    start = start_token(tokenizer) if tokenizer is not None or model is None else first_token(model, None)
    end = getattr(tokenizer, "eos_token_id", None)
    needed = samples * (seqlen - (start is not None))
    length = max(2, min(PIECE, needed // samples))
    generator = random.Random(session.seed)
    stock: dict[str, list[Tensor]] = {}  # pieces of each file of samples, in a random order
    if tokenizer is not None and not own_only:
        stock = {name: _pieces(name, tokenizer, length, start, end) for name in SHARES if name != OWN}
        for pieces in stock.values():
            generator.shuffle(pieces)
            if model is not None and pieces:
                check_ids(torch.cat(pieces), model)  # of another tokenizer: a GPU would end the process
    # Samples first: the model then writes as many tokens as they leave open.
    parts = _first_pieces(stock, _apportioned(-(-needed // length), SHARES), length)
    why_not = "no model that writes" if model is None else why_not
    if model is not None and (why_not is None or not stock):
        openings = _openings(stock, tokenizer, length, start, generator) if stock else [[]]
        try:
            parts[OWN] = _own_pieces(model, tokenizer, needed - _tokens(parts), length, openings, end, session)
        except torch.OutOfMemoryError:
            raise
        # A model that is not a causal language model fails in its own way; the samples then take over all shares.
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if not stock:
                raise
            why_not = " ".join(str(error).split())
    if OWN not in parts:
        if not stock:
            raise ValueError("no calibration text: it takes a model that writes, or a tokenizer for the samples")
        # The first pieces of every part by its share, until they hold `needed` tokens or are used up.
        count, shares = -(-needed // length), {name: SHARES[name] for name in stock}
        parts = {name: [] for name in stock}
        while _tokens(parts) < needed and any(len(parts[name]) < len(pieces) for name, pieces in stock.items()):
            parts = _first_pieces(stock, _apportioned(count, shares), length)
            count += 1
    # Each part is spread evenly over the whole: piece i of n is placed at (i + ½) / n of it.
    placed_pieces = [((i + 0.5) / len(pieces), piece) for pieces in parts.values() for i, piece in enumerate(pieces)]
    chain = torch.cat([piece for _, piece in sorted(placed_pieces, key=lambda pair: pair[0])])[:needed]
    rows = cut_rows(chain[None], seqlen, start)
    tokens = {name: _tokens({name: pieces}) for name, pieces in parts.items() if pieces}
    record: Record = {"rows": len(rows), "seqlen": seqlen, "seed": session.seed, "tokens": tokens}
    record["sha256"] = rows_hash(rows)
    return rows, record if OWN in parts else {**record, "no_own_text": why_not}


def rows_hash(rows: Tensor) -> str:
    """Returns SHA-256 of token ids, int64 `[rows, seqlen]`."""
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()


def sample_texts(name: str) -> list[str]:
    """Returns the documents of a file of samples, separated by lines with a single %."""
    file = resources.files("quant.calibration.texts") / "sample_texts" / f"{name}.txt"
    return [document.strip("\n") for document in file.read_text(encoding="utf-8").split("\n%\n")]


def turns(document: str) -> list[dict[str, str]]:
    """Returns the messages of a sample of dialogue, whose turns begin with `user: ` and `assistant: `."""
    parts = re.split(r"^(user|assistant): ", document, flags=re.MULTILINE)[1:]
    return [{"role": r, "content": c.strip()} for r, c in zip(parts[::2], parts[1::2], strict=True)]


def _pieces(name: str, tokenizer: Any, length: int, start: int | None, end: int | None) -> list[Tensor]:
    """Returns a file of samples as pieces of at most `length` tokens, the end-of-text token included."""
    pieces = []
    for document in sample_texts(name):
        ids = _chat(turns(document), tokenizer, start) if name == CHAT else _text(document, tokenizer, start)
        for piece in ids.split(length - (end is not None)):
            # The last piece of a document may be a few tokens, which would be mostly end-of-text.
            if len(piece) >= min(_SHORTEST, length - 1):
                pieces.append(piece if end is None else torch.cat([piece, torch.tensor([end], device="cpu")]))
    return pieces


def _text(text: str, tokenizer: Any, start: int | None) -> Tensor:
    """Returns the token ids of a text without its start token."""
    return _bare(torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64, device="cpu"), start)


def _chat(messages: list[dict[str, str]], tokenizer: Any, start: int | None, *, ask: bool = False) -> Tensor:
    """Returns a chat's ids without start token, by the template or joined by roles; `ask` ends before the answer."""
    try:
        return _bare(chat_ids(messages, tokenizer, "samples", ask=ask), start)
    except ValueError:  # no template, or one that does not take these roles
        lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        return _text("\n\n".join([*lines, *(["Assistant:"] if ask else [])]), tokenizer, start)


def _bare(ids: Tensor, start: int | None) -> Tensor:
    return ids[1:] if start is not None and len(ids) and int(ids[0]) == start else ids


def _openings(
    stock: Mapping[str, Sequence[Tensor]], tokenizer: Any, length: int, start: int | None, generator: random.Random
) -> list[list[int]]:
    """Returns openings of the model's own text, four in turn: none, the first words of a sample, none, a question.

    Temperatures alternate half as often, so each opening comes with both.
    """
    texts = [piece[:_OPENING] for name, pieces in stock.items() if name != CHAT for piece in pieces]
    chats = [turns(document)[:1] for document in sample_texts(CHAT)]
    questions = [_chat(messages, tokenizer, start, ask=True) for messages in chats]
    # A question must leave at least half of the piece to the answer.
    questions = [ids for ids in questions if 2 * len(ids) <= length]
    generator.shuffle(texts)
    generator.shuffle(questions)
    openings: list[list[int]] = []
    for i in range(8 * max(len(texts), len(questions), 1)):
        kind = ([], texts, [], questions)[i % 4]
        openings.append(kind[i // 4 % len(kind)][: length // 2].tolist() if kind else [])
    return openings


def _own_pieces(
    model: nn.Module, tokenizer: Any, needed: int, length: int, openings: Sequence[Sequence[int]], end: int | None,
    session: Session,
) -> list[Tensor]:  # fmt: skip
    """Returns at least `needed` tokens of the model's own text in pieces of at most `length`, without start tokens."""
    start = first_token(model, tokenizer)
    samples = max(1, -(-needed // (length - (start is not None) + (end is not None))))
    rows = generate_rows(
        model, tokenizer, samples=samples, seqlen=length, openings=openings, temperatures=_TEMPERATURES, session=session
    )
    ended = rows if end is None else torch.cat([rows, rows.new_full((len(rows), 1), end)], dim=1)
    return list(ended[:, 1:] if start is not None else ended)


def _apportioned(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Returns `count` pieces divided by shares into whole numbers by largest remainders; of a tie the first."""
    total = sum(shares.values())
    exact = {name: count * share / total for name, share in shares.items()}
    counts = {name: int(number) for name, number in exact.items()}
    by_remainder = sorted(exact, key=lambda name: counts[name] - exact[name])
    for name in by_remainder[: count - sum(counts.values())]:
        counts[name] += 1
    return counts


def _first_pieces(stock: Mapping[str, list[Tensor]], counts: Mapping[str, int], length: int) -> dict[str, list[Tensor]]:
    """Returns the first pieces of every part, until they hold about as many tokens as `counts` pieces of `length`."""
    parts: dict[str, list[Tensor]] = {name: [] for name in stock}
    for name, pieces in stock.items():
        # Half a piece less, so that parts end above their share as often as below it.
        tokens_left = (counts[name] - 0.5) * length
        while tokens_left > 0 and len(parts[name]) < len(pieces):
            parts[name].append(pieces[len(parts[name])])
            tokens_left -= len(parts[name][-1])
    return parts


def _tokens(parts: Mapping[str, Sequence[Tensor]]) -> int:
    return sum(len(piece) for pieces in parts.values() for piece in pieces)


T = TypeVar("T")

_DYNAMIC = "a format whose inputs are scaled as they come, such as fp8_channel or mxfp8"


class NoTextError(UserError):
    """A plan needs calibration text, and there is none."""

    def __init__(self, plan: Plan, reason: str) -> None:
        super().__init__(f"{lacks_data(plan)} ({reason})")
        self.reason = reason


def solver_needs_data(layer: LayerPlan) -> bool:
    """Returns whether the layer's solver looks at its inputs."""
    return get_pipeline(layer.solver).needs_data


def lacks_data(plan: Plan) -> str | None:
    """Returns the error message for a plan that needs calibration text and has none; None where it needs no text."""
    # The most specific reason comes first: a solver or a static scale names a layer, guard and KV cache the whole plan.
    way_out = "pass calibration data: --calib SOURCE, or data= in Python"
    for layer in plan.quantized:
        if solver_needs_data(layer):
            return f"{layer.name}: solver {layer.solver} looks at inputs; {way_out}"
        if layer.has_static_scale:
            return f"{layer.name}: {layer.activation} inputs have a static scale; {way_out}, or choose {_DYNAMIC}"
    if plan.guard is not None:
        return f"a guard compares layers on held-out text; {way_out}"
    return f"a KV cache in {plan.kv_cache} has static scales; {way_out}" if plan.kv_cache else None


def with_data(plan: Plan, find: Callable[[], tuple[T, list[Record]]]) -> tuple[Plan, T | None]:
    """Returns the data that `find` gives for a plan, and the plan with their records.

    Where it finds none, and an effort chose the solver that needs some, the plan of effort 1 and no data.
    """
    try:
        data, records = find()
    except UserError as error:
        lower = without_data(plan, str(error))
        # Static scales need text at effort 1 too: the message then names a layer that the user cannot choose away by
        # effort.
        if lower is not None and lacks_data(lower) and isinstance(error, NoTextError):
            raise NoTextError(lower, error.reason) from error
        if lower is None or lacks_data(lower):
            raise
        return lower, None
    return with_calibration(plan, records), data


def with_calibration(plan: Plan, records: Sequence[Mapping[str, Any]]) -> Plan:
    """Returns `plan` with a record of the calibration text in its provenance, one for each source."""
    return replace(plan, provenance={**plan.provenance, "calibration": list(records)})


def mixed_text(
    model: nn.Module, plan: Plan, tokenizer: Any = None, session: Session | None = None, *, samples: int = 32,
    seqlen: int = 512, own_only: bool = False,
) -> tuple[Tensor, Record]:  # fmt: skip
    """Returns a mixture, int64 `[samples, seqlen]`, and its record, for a plan that needs data and has none."""
    context = getattr(text_config(getattr(model, "config", None)), "max_position_embeddings", None)
    seqlen = min(seqlen, context) if isinstance(context, int) and context > 0 else seqlen
    session = session or Session()

    def write() -> tuple[Tensor, Record]:
        why_not = _too_large(model, session)
        shape: dict[str, Any] = {"samples": samples, "seqlen": seqlen, "own_only": own_only}
        # Only samples, without the half that the model would write.
        if why_not is not None and tokenizer is not None and not own_only:
            return mixture_rows(model, tokenizer, session, why_not=why_not, **shape)
        with placed(model, session.device):
            rows, record = mixture_rows(model, tokenizer, session, **shape)
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
