"""`check_engine` runs an exported decoder next to the checkpoint that it was made from, and compares and times both.

    reference    quant.load of the checkpoint, in the engine's dtype: reads each prompt and adds the likeliest tokens
    engine       reads all prompts together, then is fed the reference's tokens and gives its own logits after each

Both see the same tokens at every step, so one early difference does not make all later steps differ. A step agrees if
both have the same likeliest token. Where inputs are quantized, sums that were added in another order round to other
codes now and then, and two tokens that are nearly as likely may change places: the check passes if such steps are few
and the mean KL divergence is small. An engine of other weights is off by nats.

With inputs in four bits a model may differ from itself by more than the usual limit: `quant.load` of a small model in
NVFP4 under two attention functions is 0.05 nats apart. A failing check therefore runs the reference once more, the
inputs of its linear layers moved by at most one rounding. Such a run is as right as the first, so the limits become a
multiple of the distance between the two. Where steps differ beyond the usual limit, they must be near ties: each
side's likeliest token is among the five likeliest of the other, as in vLLM's comparisons of log-probabilities.

The loop around an `EngineSession`: prompts of any lengths are read in chunks, then each step adds a token to a row.

A step feeds each row the tokens that its cache lacks. All rows have one width, so a short row is padded on its right;
a row that has no new token is fed its last one again, which writes the same key once more:

    cache of 8, width 4     row 0: 6 of 6 tokens are cached     feeds token 5        from position 5
                            row 1: 2 of 7                        feeds tokens 2 … 5   from position 2
    then                    row 1: 6 of 7, and 6 + 4 > 8         feeds tokens 4 … 6   from position 4

A step must end within the cache, so near its end the row starts further back.

A recurrent layer has a state without positions, which no token may change twice. Rows of a hybrid are read so that all
of them end in the same step, and a shorter one waits by feeding its first token from position 0, where its state is
reset. Steps of any width run in onnxruntime, so none starts further back.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.base.errors import UserError, check_installed, counted, option
from quant.calibration.session import Device, find_device
from quant.evaluation.evaluate import inputs_moved
from quant.export.aoti.package import AotiSession
from quant.export.checkpoint.load import check_checkpoint, describe, load
from quant.export.checkpoint.open_checkpoint import outline
from quant.export.onnx.engine_session import EngineSession, OnnxruntimeSession
from quant.export.onnx.export_onnx import EXPORT_KEY, PLAN_KEY, own_metadata, read_record
from quant.export.onnx.limits import load_graph, narrowest_dtype, onnxruntime_problem, provider_device
from quant.export.onnx.serving import CAPACITY_KEY
from quant.export.tensorrt.audit import UNPLANNED, AuditRow
from quant.export.tensorrt.engine_file import read_engine
from quant.export.tensorrt.tensorrt_session import TensorrtSession, receipt_of, runs_here
from quant.generate.generate import TextStream, cast_unquantized, end_tokens
from quant.models.huggingface import load_tokenizer
from quant.recipes.blocks import cache_argument, cache_of, position_argument
from quant.recipes.plan import PLAN_FILE


@dataclass(frozen=True)
class DecodingRun:
    """The tokens that a model wrote, or was fed, after some prompts."""

    logits: np.ndarray  # `[rows, steps, vocabulary]`, float32; step 0 follows the prompt
    prefill_seconds: float  # the time that reading the prompts took
    step_seconds: float  # the median time of a decoding step of all rows; of the reference, of one row

    @property
    def tokens(self) -> np.ndarray:
        """The likeliest token of each step, `[rows, steps]`."""
        return self.logits.argmax(-1)


def reference_run(
    model: Any, prompts: Sequence[Sequence[int]], new: int, tokens: np.ndarray | None = None
) -> DecodingRun:
    """Runs the model itself, one row after the other, on its own likeliest tokens or on `tokens` `[rows, steps]`."""
    device = next(model.parameters()).device
    rows, prefill, steps = [], 0.0, []
    with torch.no_grad():
        for row, prompt in enumerate(prompts):
            ids, cache, logits = torch.tensor([list(prompt)], device=device), None, []
            for index in range(new):
                positions = position_argument(model, ids, len(prompt) + index - ids.shape[1])
                started = time.perf_counter()
                seen = model(ids, use_cache=True, **positions, **cache_argument(model, cache))
                logits.append(seen.logits[0, -1].float().cpu())
                seconds = time.perf_counter() - started
                if cache is None:
                    prefill += seconds
                else:
                    steps.append(seconds)
                cache = cache_of(seen)
                token = logits[-1].argmax() if tokens is None else torch.tensor(tokens[row, index], device="cpu")
                ids = token.reshape(1, 1).to(device)
            rows.append(torch.stack(logits))
    return DecodingRun(torch.stack(rows).numpy(), prefill, float(np.median(steps)) if steps else 0.0)


def forced_run(
    session: EngineSession, prompts: Sequence[Sequence[int]], tokens: np.ndarray, *, chunk: int | None = None
) -> DecodingRun:
    """Runs the engine on prompts and then feeds it `tokens` `[rows, steps]`, and returns its logits."""
    rows = [list(prompt) for prompt in prompts]
    session.begin(len(rows))
    started = time.perf_counter()
    logits = [read(session, rows, chunk=chunk)]
    prefill, steps = time.perf_counter() - started, []
    for column in tokens.T[:-1]:
        for row, token in zip(rows, column, strict=True):
            row.append(int(token))
        started = time.perf_counter()
        logits.append(step(session, rows))
        steps.append(time.perf_counter() - started)
    return DecodingRun(np.stack(logits, 1), prefill, float(np.median(steps)) if steps else 0.0)


MOST_KL, LEAST_AGREEMENT = 0.02, 0.9
"""Limits of a check that passes: mean KL divergence in nats, and the share of steps that agree."""

NOISE_MULTIPLE, NOISIEST_KL, NOISIEST_AGREEMENT = 3.0, 0.5, 0.7
"""Limits where the reference's own noise is larger: this multiple of it, and never beyond these two.

An engine rounds in every operation, the repeated reference at linear layers only, so the engine may be further away."""

NEAREST = 5
"""Tokens among which the other's likeliest one has to be, so that a step counts as a near tie."""

_PROMPTS, _APART = (5, 150, 200), 400  # tokens


@dataclass(frozen=True)
class EngineCheck:
    """The comparison."""

    backend: str = ""  # library and device that ran the engine; empty if it could not be run here
    dtype: str = ""  # the dtype in which both ran
    prompts: list[int] = field(default_factory=list)  # tokens of each row's prompt
    steps: int = 0  # tokens that were compared in each row
    agreeing: int = 0  # steps of all rows whose likeliest tokens are the same
    near: int = 0  # steps at which each one's likeliest token is among the `NEAREST` likeliest of the other
    first_difference: tuple[int, int] | None = None  # row and step of the first that is not; None if all are
    kl: float = 0.0  # mean KL divergence from the reference, in nats
    error: float = 0.0  # relative difference of all logits, in the Frobenius norm
    engine_ms: tuple[float, float] = (0.0, 0.0)  # prefill of all rows, and a decoding step of all rows
    # prefill of all rows, one after the other, and a decoding step of one row
    reference_ms: tuple[float, float] = (0.0, 0.0)
    # mean KL divergence between two runs of the reference that round differently; None if the engine needed no wider
    # limits
    noise_kl: float | None = None
    noise_agreeing: int | None = None  # steps whose likeliest tokens are the same in both runs; None likewise
    # name and finding of everything that was checked without running it
    facts: list[tuple[str, str]] = field(default_factory=list)
    audit: list[AuditRow] = field(default_factory=list)  # of an engine: how each layer runs
    passed: bool | None = None  # None if it could not be run here

    def to_dict(self) -> dict[str, Any]:
        """Returns the result as JSON holds it."""
        return asdict(self)


def check_engine(
    path: str | Path, directory: str | Path, *, new: int = 64, device: Device = "auto", rebuild: bool | None = None,
    unsafe_load: bool = False,
) -> EngineCheck:  # fmt: skip
    """Checks an exported file against the checkpoint that it was made from, as far as this machine can.

    An engine that cannot run here is built again (`audit_with_checkpoint`), unless `rebuild` says otherwise.
    """
    path, directory = Path(path), Path(directory)
    facts: list[tuple[str, str]] = []
    findings: list[AuditRow] = []
    reason: str | None = None
    if is_engine(path):
        reason = runs_here(path)
        if rebuild is None and reason is None:
            rebuild = False  # running it says more
        facts, findings = engine_facts(path, directory, rebuild)
    elif path.suffix != PACKAGE_ENDING:
        reason, findings = onnx_findings(path / ONNX_FILE if path.is_dir() else path, directory, device)
    wrong = next((finding.name for finding in findings if not finding.passed), None)
    problems = f"{wrong} differs from the plan or the checkpoint" if wrong is not None else ""
    if reason is not None or problems:
        facts = [*facts, ("run", f"not run: {reason or problems}")]
        return EngineCheck(facts=facts, audit=findings, passed=False if problems else None)
    session = open_session(path, unsafe_load=unsafe_load, device=device)
    check_plan(session.plan, directory)
    new = min(new, session.capacity // 2)
    model = load(directory, device=find_device(device))
    cast_unquantized(model, session.dtype)
    prompts = sample_prompts(directory, model, session, new)
    return replace(compare(model, session, prompts, new), facts=facts, audit=findings)


def onnx_findings(path: Path, directory: Path, device: Device) -> tuple[str | None, list[AuditRow]]:
    """Returns why no session runs an ONNX file, and how its graph compares with what the checkpoint is exported as."""
    try:
        check_installed(("onnx", "onnxscript"), "it")
    except UserError as error:
        return None, [AuditRow("the graph", UNPLANNED, f"not compared: {error}", True)]
    from quant.export.onnx.genai import CONFIG_FILE, other_genai_files
    from quant.export.tensorrt.rebuild import AS_EXPORTED, audit_onnx

    metadata = own_metadata(load_graph(path))
    check_plan(metadata.get(PLAN_KEY, ""), directory)
    model: Any = load(directory)
    plan = describe(directory)[0] if (directory / PLAN_FILE).is_file() else None
    findings = audit_onnx(path, model, plan)  # puts the model in the file's dtype
    options = read_record(f"{path}: its metadata", metadata[EXPORT_KEY])[1] if metadata else {}
    words = {True: "another file", False: "not in the directory"}
    if options.get("genai") or (path.parent / CONFIG_FILE).is_file():
        others = other_genai_files(model, directory, path.parent)
        findings += [AuditRow(name, AS_EXPORTED, words[(path.parent / name).is_file()], False) for name in others]
    if CAPACITY_KEY not in metadata:
        return "it is no serving graph of a decoder", findings
    if narrowest_dtype(model) == torch.bfloat16 and provider_device(device) is not None:
        return None, findings
    fp8_attention = bool(options["attention_scales"])
    return onnxruntime_problem(model, fp8_attention=fp8_attention, kv_cache=options["kv_cache"]), findings


def engine_facts(path: Path, directory: Path, rebuild: bool | None) -> tuple[list[tuple[str, str]], list[AuditRow]]:
    """Returns the facts that an engine's file shows without running it, and its audit."""
    from quant.export.tensorrt.rebuild import audit_with_checkpoint  # needs onnx, which packages of AOTInductor do not

    receipt = receipt_of(path)
    record, plan = receipt["engine"], describe(directory)[0]
    if receipt.get("plan") not in (None, plan.digest()):
        raise UserError(f"{path} was built from another plan than that of {directory}: their digests differ")
    own = read_engine(path).record
    if (own.get("target"), own.get("builder")) not in ((None, None), (record["target"], record["backend"])):
        built = f"{own['target']} by {own['builder']}"
        raise UserError(f"{path} was built for {built}, and its receipt says otherwise; export it again")
    findings = audit_with_checkpoint(path, load(directory), plan, rebuild=rebuild)
    planned = [finding.passed for finding in findings if finding.planned != UNPLANNED]
    facts = [
        ("engine", f"{record['backend']} for {record['target']}, {path.stat().st_size / 1e6:.1f} MB, whole"),
        # Of a profile the part about token ids: `input_ids=1x1:8x1:32x1`.
        ("profiles", "; ".join(profile.partition(",")[0] for profile in record.get("profiles", ()))),
        ("audit", f"{sum(planned)} of {len(planned)} as planned and as in the checkpoint"),
    ]
    return facts, findings


def sample_prompts(directory: Path, model: Any, session: EngineSession, new: int) -> list[list[int]]:
    """Returns rows of prose of different lengths that fit into the cache; random tokens if no tokenizer makes any."""
    lengths = [min(length, session.capacity - new) for length in _PROMPTS[: session.most_rows()]]
    # Each row begins elsewhere.
    starts = [_APART * row for row in range(len(lengths))]
    try:
        text = (resources.files("quant.calibration.texts") / "sample_texts" / "prose.txt").read_text("utf-8")
        ids = load_tokenizer(directory)(text[:20_000])["input_ids"]
    except UserError:
        ids = []
    if len(ids) < starts[-1] + lengths[-1]:
        vocabulary = model.get_input_embeddings().num_embeddings
        ids = torch.randint(0, vocabulary, (1000,), generator=torch.Generator().manual_seed(0), device="cpu").tolist()
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def compare(model: nn.Module, session: EngineSession, prompts: Sequence[Sequence[int]], new: int = 64) -> EngineCheck:
    """Runs the reference, in the session's dtype, and the engine on prompts, and on `new` tokens after each."""
    check_lengths(session, prompts, new)
    expected = reference_run(model, prompts, new)
    run = forced_run(session, prompts, expected.tokens)
    same = run.tokens == expected.tokens
    differing = np.argwhere(~same)
    kl, agreement = _mean_kl(expected.logits, run.logits), float(same.mean())
    near = _among_likeliest(run.tokens, expected.logits) & _among_likeliest(expected.tokens, run.logits)
    # NaN fails: no comparison with it is true.
    passed, noise_kl, noise_agreeing = kl <= MOST_KL and agreement >= LEAST_AGREEMENT, None, None
    # No noise widens the limits beyond these, so only an engine within them is worth another run of the reference.
    if not passed and kl <= NOISIEST_KL and agreement >= NOISIEST_AGREEMENT:
        with inputs_moved(model, getattr(torch, session.dtype)):
            repeated = reference_run(model, prompts, new, expected.tokens)
        noise_kl = _mean_kl(expected.logits, repeated.logits)
        noise_agreeing = int((repeated.tokens == expected.tokens).sum())
        most_kl, least_agreement = noise_limits(noise_kl, noise_agreeing / same.size)
        passed = kl <= most_kl and agreement >= least_agreement and float(near.mean()) >= LEAST_AGREEMENT
    difference = np.linalg.norm((run.logits - expected.logits).astype(np.float64))
    return EngineCheck(
        backend=session.backend, dtype=session.dtype, prompts=[len(prompt) for prompt in prompts], steps=new,
        agreeing=int(same.sum()), near=int(near.sum()),
        first_difference=(int(differing[0][0]), int(differing[0][1])) if len(differing) else None,
        kl=kl, error=float(difference / np.linalg.norm(expected.logits.astype(np.float64))),
        engine_ms=(1e3 * run.prefill_seconds, 1e3 * run.step_seconds),
        reference_ms=(1e3 * expected.prefill_seconds, 1e3 * expected.step_seconds),
        noise_kl=noise_kl, noise_agreeing=noise_agreeing, passed=bool(passed),
    )  # fmt: skip


def noise_limits(noise_kl: float, noise_agreement: float) -> tuple[float, float]:
    """Returns the largest mean KL divergence and the smallest share of agreeing steps of a check that passes."""
    most_kl = min(max(MOST_KL, NOISE_MULTIPLE * noise_kl), NOISIEST_KL)
    least_agreement = max(min(LEAST_AGREEMENT, 1 - NOISE_MULTIPLE * (1 - noise_agreement)), NOISIEST_AGREEMENT)
    return most_kl, least_agreement


def _among_likeliest(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    own = np.take_along_axis(logits, tokens[..., None], -1)
    return ((logits > own).sum(-1) < NEAREST) & np.isfinite(own[..., 0])


def _mean_kl(expected: np.ndarray, computed: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, computed))
    return float((p.exp() * (p - q)).sum(-1).mean())


ONNX_FILE, PACKAGE_ENDING = "model.onnx", ".pt2"


def open_session(path: str | Path, *, unsafe_load: bool = False, device: Device = "auto") -> EngineSession:
    """Opens a session of an ONNX file, a directory with `model.onnx`, an engine, or a package of AOTInductor.

    `device` is for ONNX files alone: the others are made for one kind of machine. A package is compiled code, which
    runs when it is loaded: only `unsafe_load` loads one. Raises UserError for a file that cannot be loaded here, or is
    no serving graph.
    """
    path = Path(path)
    if path.suffix == PACKAGE_ENDING and path.is_file():
        return AotiSession(path, unsafe_load=unsafe_load)
    if is_engine(path):
        return TensorrtSession(path)
    return OnnxruntimeSession(path / ONNX_FILE if path.is_dir() else path, gpu=provider_device(device))


def is_engine(path: Path) -> bool:
    """Returns whether a file is an engine of TensorRT; UserError if there is no such file."""
    if (path / ONNX_FILE).is_file():
        return False
    if not path.is_file():
        raise UserError(f"{path}: no such file; name an ONNX file, engine or package that `quant export` wrote")
    return path.suffix not in (".onnx", PACKAGE_ENDING)


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = 0.0  # divides the logits; 0 takes the likeliest token
    top_k: int = 0  # draws among so many of the likeliest tokens; 0 is all
    top_p: float = 1.0  # draws among the likeliest tokens that together have this probability
    seed: int = 0  # the seed of the draws

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not valid:
                raise UserError(f"{option(name)} is {getattr(self, name)}; expected {expected}")


GREEDY = Sampling()


def generate_tokens(
    session: EngineSession, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int], *,
    sampling: Sampling | Sequence[Sampling] = GREEDY, stops: Collection[int] = (), chunk: int | None = None,
    on_token: Callable[[int, int], object] | None = None,
) -> list[list[int]]:  # fmt: skip
    """Generates the tokens that follow each prompt, until one of `stops`, which is included, or `max_new_tokens`.

    `sampling` draws for all rows from one stream of random numbers, or for each row from its own. `chunk` tokens of a
    row are read at once, or as many as the session takes. A row ends where `on_token`, which gets the row and each
    token as soon as it is chosen, returns False.
    """
    limits = check_lengths(session, prompts, max_new_tokens)
    rows, open_rows = [list(prompt) for prompt in prompts], set(range(len(prompts)))
    each = [sampling] * len(rows) if isinstance(sampling, Sampling) else list(sampling)
    streams = [np.random.default_rng(one.seed) for one in each]
    streams = [streams[0]] * len(rows) if isinstance(sampling, Sampling) else streams
    session.begin(len(rows))
    logits = read(session, rows, chunk=chunk)
    while True:
        for row in sorted(open_rows):
            if each[row].temperature == 0:
                token = int(logits[row].argmax())
            else:
                p = probabilities(logits[row], each[row])
                token = int(streams[row].choice(len(p), p=p))
            rows[row].append(token)
            goes_on = on_token is None or on_token(row, token) is not False
            if not goes_on or token in stops or len(rows[row]) == len(prompts[row]) + limits[row]:
                open_rows.discard(row)
        if not open_rows:
            return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
        logits = step(session, rows)


def check_lengths(session: EngineSession, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> list[int]:
    """Returns the new tokens of each row; UserError for prompts that are empty, too many, or too long for the cache."""
    limits = [new] * len(prompts) if isinstance(new, int) else list(new)
    if not prompts or len(prompts) > session.most_rows():
        raise UserError(f"{len(prompts)} prompts, and this file takes 1 to {session.most_rows()} rows")
    for prompt, limit in zip(prompts, limits, strict=True):
        if limit < 1:
            raise UserError(f"{option('max_new_tokens')} is {limit}; expected 1 or more")
        if not prompt:
            raise UserError(f"a prompt holds no token; give some text with {option('prompt')}")
        if len(prompt) + limit > session.capacity:
            way_out = f"shorten it, lower {option('max_new_tokens')}, or export with a larger {option('capacity')}"
            raise UserError(
                f"a prompt has {counted(len(prompt), 'token')} and {limit} more are wanted, but the cache holds "
                f"{session.capacity}; {way_out}"
            )
    return limits


def read(session: EngineSession, rows: Sequence[Sequence[int]], *, chunk: int | None = None) -> np.ndarray:
    """Reads whole prompts into an empty cache, and returns the logits of each row's last token."""
    cached = np.zeros(len(rows), np.int64)
    ends = np.array([len(row) for row in rows])
    logits: np.ndarray | None = None
    while (cached < ends).any():
        remaining = int((ends - cached).max())
        before, width = cached, session.width(min(remaining, chunk or remaining))
        # Rows with states end together: short ones wait, which the step that begins them undoes.
        until = np.maximum(ends - remaining + width, 0) if session.recurrent else ends
        cached, computed = _feed(session, rows, cached, np.minimum(until, ends), width)
        # A row keeps the logits of the step that read its last token.
        logits = computed if logits is None else np.where((before < ends)[:, None], computed, logits)
    assert logits is not None
    return logits


def step(session: EngineSession, rows: Sequence[Sequence[int]]) -> np.ndarray:
    """Feeds the last token of each row, and returns its logits."""
    ends = np.array([len(row) for row in rows])
    return _feed(session, rows, ends - 1, ends, session.width(1))[1]


def _feed(
    session: EngineSession, rows: Sequence[Sequence[int]], cached: np.ndarray, ends: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs one step up to token `ends` of each row; returns how many are cached after it, and the last ones' logits."""
    waiting = ends == 0
    starts = np.maximum(np.minimum(np.minimum(cached, ends - 1), session.capacity - width), 0)
    counts = np.minimum(np.maximum(ends, 1) - starts, width)
    ids = np.zeros((len(rows), width), np.int64)
    for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
        ids[index, :count] = row[start : start + count]
    return np.where(waiting, 0, starts + counts), session.step(ids, starts, counts - 1)


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Returns the probabilities `[vocabulary]` that tokens are drawn with, float64."""
    scaled = logits.astype(np.float64) / sampling.temperature
    order = np.argsort(-scaled, kind="stable")
    p = np.exp(scaled - scaled.max())
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
    p /= p.sum()
    # The smallest set of the likeliest tokens whose sum reaches top_p: a token is out if those before it reach it.
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= sampling.top_p]] = 0
    return p / p.sum()


@dataclass(frozen=True)
class EngineGeneration:
    """The texts that an exported model wrote."""

    prompts: tuple[str, ...]
    texts: tuple[str, ...]  # that were added
    prompt_tokens: tuple[tuple[int, ...], ...]  # ids of each prompt
    tokens: tuple[tuple[int, ...], ...]  # ids that were added, an end-of-text token included
    seconds: float  # the time of generating, loading excluded
    backend: str  # library and device

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows added a second, reading the prompts included."""
        return sum(map(len, self.tokens)) / self.seconds if self.seconds else 0.0


def generate_text(
    session: EngineSession, directory: Path, prompts: Sequence[str], max_new_tokens: int, *,
    sampling: Sampling = GREEDY, on_text: Callable[[str], object] | None = None,
) -> EngineGeneration:  # fmt: skip
    """Continues each prompt, all of them together, until a token that ends the text or `max_new_tokens`.

    `directory` is the checkpoint that the model was exported from. `on_text` gets each piece of the first text, as soon
    as no later token can change it.
    """
    check_plan(session.plan, directory)
    tokenizer = load_tokenizer(directory)
    ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    streams = [TextStream(tokenizer, None if row else on_text) for row in range(len(ids))]
    started = time.perf_counter()
    tokens = generate_tokens(
        session, ids, max_new_tokens, sampling=sampling, stops=end_tokens(outline(directory)),
        on_token=lambda row, token: streams[row].add([token]),
    )  # fmt: skip
    return EngineGeneration(
        tuple(prompts), tuple(stream.finish() for stream in streams), tuple(map(tuple, ids)), tuple(map(tuple, tokens)),
        time.perf_counter() - started, session.backend,
    )  # fmt: skip


def check_plan(plan: str, directory: Path) -> None:
    """Raises UserError for a checkpoint that a file with this digest of a plan was not exported from."""
    check_checkpoint(directory)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json; name the checkpoint that the file was exported from")
    if plan and plan != describe(directory)[0].digest():
        raise UserError(f"the file was exported from another plan than that of {directory}; name its own checkpoint")
