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
"""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from quant.base.errors import UserError
from quant.calibration.session import Device, find_device
from quant.evaluation.evaluate import inputs_moved
from quant.export.checkpoint.load import describe, load
from quant.export.engines.decode_loop import check_lengths, check_plan, is_engine, open_session, read, step
from quant.export.onnx.engine_session import EngineSession
from quant.export.tensorrt.audit import UNPLANNED, AuditRow
from quant.export.tensorrt.tensorrt_session import read_receipt, runs_here
from quant.generate.generate import cast_unquantized
from quant.models.huggingface import load_tokenizer
from quant.recipes.blocks import cache_argument, cache_of, position_argument


@dataclass(frozen=True)
class DecodingRun:
    """The tokens that a model wrote, or was fed, after some prompts."""

    logits: np.ndarray  # `[rows, steps, vocabulary]`, float32; step 0 follows the prompt
    prefill_seconds: float  # the time that reading the prompts took
    step_seconds: float  # the median time of a decoding step of all rows; of the reference, of one row

    @property
    def tokens(self) -> np.ndarray:
        """The likeliest token of each step, `[rows, steps]`."""
        likeliest: np.ndarray = self.logits.argmax(-1)
        return likeliest


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
    path: str | Path,
    directory: str | Path,
    *,
    new: int = 64,
    device: Device = "auto",
    rebuild: bool | None = None,
    unsafe_load: bool = False,
) -> EngineCheck:
    """Checks an exported file against the checkpoint that it was made from, as far as this machine can.

    An engine that cannot run here is built again (`audit_with_checkpoint`), unless `rebuild` says otherwise.
    """
    path, directory = Path(path), Path(directory)
    facts: list[tuple[str, str]] = []
    findings: list[AuditRow] = []
    if is_engine(path):
        reason = runs_here(path)
        if rebuild is None and reason is None:
            rebuild = False  # running it says more
        facts, findings = engine_facts(path, directory, rebuild)
        wrong = next((finding.name for finding in findings if not finding.passed), None)
        problems = f"{wrong} differs from the plan or the checkpoint" if wrong is not None else ""
        if reason is not None or problems:
            return EngineCheck(
                facts=[*facts, ("run", f"not run: {reason or problems}")], audit=findings,
                passed=False if problems else None,
            )  # fmt: skip
    session = open_session(path, unsafe_load=unsafe_load)
    check_plan(session, directory)
    new = min(new, session.capacity // 2)
    model = load(directory, device=find_device(device))
    cast_unquantized(model, session.dtype)
    prompts = sample_prompts(directory, model, session, new)
    return replace(compare(model, session, prompts, new), facts=facts, audit=findings)


def engine_facts(path: Path, directory: Path, rebuild: bool | None) -> tuple[list[tuple[str, str]], list[AuditRow]]:
    """Returns the facts that an engine's file shows without running it, and its audit."""
    from quant.export.tensorrt.rebuild import audit_with_checkpoint  # needs onnx, which packages of AOTInductor do not

    receipt = read_receipt(path)
    record, plan = receipt["engine"], describe(directory)[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != record.get("sha256"):
        raise UserError(f"{path} is not the file that its receipt describes: their SHA-256 differ")
    if receipt.get("plan") not in (None, plan.digest()):
        raise UserError(f"{path} was built from another plan than that of {directory}: their digests differ")
    findings = audit_with_checkpoint(path, load(directory), plan, rebuild=rebuild)
    planned = [finding.passed for finding in findings if finding.planned != UNPLANNED]
    facts = [
        ("engine", f"{record.get('backend')} for {record.get('target')}, {path.stat().st_size / 1e6:.1f} MB, whole"),
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
        backend=session.backend,
        dtype=session.dtype,
        prompts=[len(prompt) for prompt in prompts],
        steps=new,
        agreeing=int(same.sum()),
        near=int(near.sum()),
        first_difference=(int(differing[0][0]), int(differing[0][1])) if len(differing) else None,
        kl=kl,
        error=float(difference / np.linalg.norm(expected.logits.astype(np.float64))),
        engine_ms=(1e3 * run.prefill_seconds, 1e3 * run.step_seconds),
        reference_ms=(1e3 * expected.prefill_seconds, 1e3 * expected.step_seconds),
        noise_kl=noise_kl,
        noise_agreeing=noise_agreeing,
        passed=bool(passed),
    )


def noise_limits(noise_kl: float, noise_agreement: float) -> tuple[float, float]:
    """Returns the largest mean KL divergence and the smallest share of agreeing steps of a check that passes."""
    most_kl = min(max(MOST_KL, NOISE_MULTIPLE * noise_kl), NOISIEST_KL)
    least_agreement = max(min(LEAST_AGREEMENT, 1 - NOISE_MULTIPLE * (1 - noise_agreement)), NOISIEST_AGREEMENT)
    return most_kl, least_agreement


def _among_likeliest(tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns whether each of the tokens `[rows, steps]` is among the `NEAREST` likeliest of the logits."""
    own = np.take_along_axis(logits, tokens[..., None], -1)
    among: np.ndarray = ((logits > own).sum(-1) < NEAREST) & np.isfinite(own[..., 0])
    return among


def _mean_kl(expected: np.ndarray, computed: np.ndarray) -> float:
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, computed))
    return float((p.exp() * (p - q)).sum(-1).mean())
