"""A run that is killed goes on behind what it had finished and ends with the same bytes; what changed is refused."""

from __future__ import annotations

import errno
import gc
import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import children
import pytest
import tiny_models
import torch
from safetensors.torch import save_file
from samples import BASE

import quant
from quant.calibration.texts.mixture import lacks_data, rows_hash, with_calibration
from quant.calibration.texts.sources import tokenizer_if_any
from quant.calibration.walk import step_store, walk
from quant.calibration.walk.block import Block
from quant.calibration.walk.finished_layers import BlockKeeper
from quant.calibration.walk.step_store import DirectoryStore, StepFile, partial_path
from quant.calibration.walk.walk import States
from quant.models.open_model import open_model
from quant.run import decide as deciding
from quant.run import run as measuring
from quant.run import run as pipeline
from quant.run import run as solving
from quant.run.decide import plan_for
from quant.run.request import AllocationRequest, Request

SMALL = {"calib_samples": 8, "seqlen": 32, "command": "quantize"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Calibration rows of token ids that every tiny model knows."""
    file = tmp_path_factory.mktemp("text") / "rows.safetensors"
    ids = torch.randint(5, 60, (8, 32), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, file)
    return str(file)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny models; `NAME/sharded` has several weight files, `NAME/wide` rows of 128."""
    home = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if name == "base":
            return BASE
        directory = home / name.replace("/", "-")
        if not directory.exists():
            kind, _, how = name.partition("/")
            sizes = {"hidden_size": 128, "intermediate_size": 256} if how == "wide" else {}
            model = getattr(tiny_models, kind)(dtype=torch.bfloat16, gain=2.0, num_hidden_layers=3, **sizes)
            model.save_pretrained(directory, **({"max_shard_size": "60KB"} if how == "sharded" else {}))
        return directory

    return get


def weights(directory: Path) -> dict[str, bytes]:
    """The files that a run with the same options writes the same."""
    names = ("plan.json", "config.json")
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.name in names or "safetensors" in p.name}


def job(model: Path, out: Path, text: str, **options: Any) -> Request:
    return Request(str(model), out=out, **{**SMALL, "calib": (text,), **options})


CASES = [
    ("base", "nvfp4", "rtn"),
    ("llama/sharded", "nvfp4", "awq+gptq"),
    ("llama/wide", "int4a16", "lowrank:8+gptq"),
    ("llama", "fp8_channel", "rotation:merge+mse"),
    ("llama", "fp8", "rotation:learned+gptq"),
    ("qwen3_moe", "nvfp4", "gptq"),
    ("qwen3_moe/sharded", "nvfp4", "mse"),
    ("mixtral", "fp8", "rtn"),
    ("opt", "nvfp4a16", "gptq"),
]
# The same models and solvers in other pairs.
SLOW_CASES = [
    ("base", "nvfp4a16", "gptq"),
    ("llama/sharded", "mxfp8", "rtn"),
    ("qwen3_moe", "nvfp4a16", "rtn"),
    ("mixtral", "nvfp4a16", "mse"),
    ("mixtral", "fp8_channel", "rtn"),
]


@pytest.mark.parametrize(
    ("name", "format", "solver"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_a_run_writes_what_quantize_and_save_write(
    name: str, format: str, solver: str, models: Callable[[str], Path], text: str, tmp_path: Path
) -> None:
    ours = job(models(name), tmp_path / "ours", text, recipe=format, solver=solver)
    pipeline.run(ours)
    source = open_model(models(name))
    assert source.model is not None
    rows = quant.calibration_rows(text, None, samples=8, seqlen=32)
    plan = plan_for(ours, source)
    if lacks_data(plan):
        plan = with_calibration(plan, [{"source": text, "rows": 8, "seqlen": 32, "sha256": rows_hash(rows)}])
    quantized = quant.quantize(source.model, plan, rows)
    quant.save(quantized.model, quantized.plan, tmp_path / "theirs", tokenizer=tokenizer_if_any(source))
    assert weights(tmp_path / "ours") == weights(tmp_path / "theirs")
    assert not partial_path(tmp_path / "ours").exists()


def test_hidden_states_in_a_file_give_the_same_bytes(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0, num_hidden_layers=4).save_pretrained(model)
    seen: list[bool] = []
    end = BlockKeeper.end

    def watch(keeper: BlockKeeper, block: str, states: States | None) -> States | None:
        found = end(keeper, block, states)
        if states is not None and found is not None:
            seen.append(found is not states)
            assert all(torch.equal(a, b) for a, b in zip(found.original, states.original, strict=True))
        return found

    monkeypatch.setattr(BlockKeeper, "end", watch)
    for name, share in (("memory", 1.0), ("file", 0.0)):
        monkeypatch.setattr("quant.calibration.walk.finished_layers._STATES_SHARE", share)
        pipeline.run(job(model, tmp_path / name, text, recipe="nvfp4a16", solver="gptq"))
    assert seen == 3 * [False] + 3 * [True]
    assert weights(tmp_path / "file") == weights(tmp_path / "memory")


def test_a_block_is_closed_while_the_next_one_runs(
    models: Callable[[str], Path], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose streams are left out; the run is stopped in the third block, and goes on."""

    def write(out: str) -> Path:
        pipeline.run(job(models("llama"), tmp_path / out, text, recipe="nvfp4a16", solver="gptq"))
        return tmp_path / out

    plain, order = write("plain"), list[str]()
    stream = MagicMock()
    monkeypatch.setattr(walk.ModelWalk, "_has_room_for_two", lambda *_: True)
    for name, stands_in in (("Stream", stream), ("current_stream", stream), ("stream", lambda _: nullcontext())):
        monkeypatch.setattr(torch.cuda, name, stands_in)
    opens, closes, solves = walk.ModelWalk.open_block, walk.ModelWalk.close_block, walk.solve_block

    def opened(self: walk.ModelWalk, chain: walk.Chain, name: str, *rest: Any) -> Block:
        order.append(f"open {name[-1]}")
        return opens(self, chain, name, *rest)

    def closed(self: walk.ModelWalk, name: str, *rest: Any) -> States | None:
        order.append(f"close {name[-1]}")
        return closes(self, name, *rest)

    def stopped(*blocks: Block, **options: Any) -> States | None:
        if len(order) == 4:
            raise KeyboardInterrupt
        return solves(*blocks, **options)

    monkeypatch.setattr(walk.ModelWalk, "open_block", opened)
    monkeypatch.setattr(walk.ModelWalk, "close_block", closed)
    with monkeypatch.context() as patched:
        patched.setattr(walk, "solve_block", stopped)
        with pytest.raises(KeyboardInterrupt):
            write("beside")
    assert order == ["open 0", "open 1", "close 0", "open 2"]
    assert weights(write("beside")) == weights(plain)
    assert order[4:] == ["open 1", "open 2", "close 1", "close 2"]


def test_a_block_that_does_not_fit_is_named(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.run.run.memory_taken", lambda: 0)
    ours = job(BASE, tmp_path / "out", text, recipe="nvfp4a16", solver="gptq", memory="1MB")
    message = (
        r"model\.layers\.0: solving this block takes about [\d.]+ MB of memory, and 1\.00 MB may be used: give fewer"
    )
    with pytest.raises(ValueError, match=message):
        pipeline.run(ours)
    pipeline.run(job(BASE, tmp_path / "out", text, recipe="nvfp4a16", memory="1MB"))


def test_a_block_that_a_device_has_no_room_for_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solve, seen = walk.solve_block, []

    def solve_first(block: Block, **options: Any) -> Any:
        seen.append(block)
        if len(seen) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return solve(block, **options)

    monkeypatch.setattr(walk, "solve_block", solve_first)
    ours = job(BASE, tmp_path / "out", text, recipe="nvfp4a16", solver="gptq")
    with pytest.raises(
        ValueError, match=r"^model\.layers\.1: its device ran out of memory while it was solved: give fewer"
    ):
        pipeline.run(ours)
    assert not (tmp_path / "out").exists()


def test_more_memory_than_the_container_has_is_not_used(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quant.calibration.session.memory_limit", lambda: 2_000_000)
    ours = job(BASE, tmp_path / "out", text, recipe="nvfp4a16", solver="gptq", memory="8GB")
    with pytest.raises(ValueError, match=r"and 2\.00 MB may be used: .* or more to this container$"):
        pipeline.run(ours)


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """As `children.in_child`, with one thread, for a fork has none of the others."""
    return children.in_child(lambda: (torch.set_num_threads(1), work()), kill_after)


def killed_at(number: int, work: Callable[[], None]) -> int:
    """Does `work` in a child that kills itself when it is about to do its `number`-th thing to its directories."""
    seen = [0]

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            seen[0] += 1
            if seen[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return counted

    def watched() -> None:
        gc.collect()  # what earlier tests left behind deletes files of its own
        step_store.write_tensor_file = counting(step_store.write_tensor_file)  # type: ignore[attr-defined]
        step_store.write_atomically = counting(step_store.write_atomically)  # type: ignore[attr-defined]
        Path.rename = counting(Path.rename)  # type: ignore[method-assign]
        Path.unlink = counting(Path.unlink)  # type: ignore[method-assign]
        work()

    return in_child(watched)


@pytest.mark.parametrize(
    ("name", "solver", "overwrite", "steps"),
    [
        pytest.param("llama", "rtn", False, 6, marks=pytest.mark.slow),
        ("base", "awq+gptq", True, 5),
        pytest.param("qwen3_moe", "gptq", False, 3, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_step_it_ends_with_the_same_bytes(
    name: str, solver: str, overwrite: bool, steps: int, models: Callable[[str], Path], text: str, tmp_path: Path
) -> None:
    def work(out: Path) -> None:
        pipeline.run(job(models(name), out, text, recipe="nvfp4a16", solver=solver, overwrite=overwrite))

    assert in_child(lambda: work(tmp_path / "whole")) == 0
    if overwrite:
        assert in_child(lambda: work(tmp_path / "out")) == 0
        (tmp_path / "out" / "model.safetensors").write_bytes(b"what an earlier run wrote")
    # Each run is killed a little later than the one before, and resumes it.
    number = 1
    while killed_at(number, lambda: work(tmp_path / "out")) != 0:
        number += steps
        assert number < 100
    assert number > 2 * steps
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


# Threads empty files in any order, and of a small one the file system frees no page.
LARGE = 3 * 4096


def is_emptied(part: os.stat_result) -> bool:
    return part.st_size > LARGE and part.st_blocks * 512 + 4096 < part.st_size


@pytest.mark.parametrize(
    ("name", "solver", "damaged"),
    [
        ("llama/wide", "awq+gptq", False),
        pytest.param("llama/wide", "rtn", True, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "rtn", False, marks=pytest.mark.slow),
    ],
)
def test_killed_while_its_parts_move_it_ends_with_the_same_bytes(
    name: str,
    solver: str,
    damaged: bool,
    models: Callable[[str], Path],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quant.export.checkpoint.files.tensors.SHARD_BYTES", 60_000)
    format_name = "int4a16" if name == "llama/wide" else "nvfp4a16"
    options: dict[str, Any] = {"recipe": format_name, "solver": solver, "kv_cache": "fp8", "eval_samples": 4}
    options["eval_texts"] = (text,)
    pipeline.run(job(models(name), tmp_path / "whole", text, **options))
    monkeypatch.setattr("quant.export.checkpoint.files.tensor_file._LOG_BYTES", 4096)

    def work() -> None:
        give, given = step_store._release_space, []

        def dies(part: Path) -> None:
            if name == "qwen3_moe" or part.stat().st_size > LARGE:
                given.append(part)
            if len(given) == 2:  # a note says that its room is given up
                os.kill(os.getpid(), signal.SIGKILL)
            give(part)

        step_store._release_space = dies
        pipeline.run(job(models(name), tmp_path / "out", text, **options))

    assert in_child(work) == -signal.SIGKILL
    left = partial_path(tmp_path / "out")
    parts = [part.stat() for part in left.glob("*.safetensors")]
    notes = [file for path in left.glob("*.safetensors") if (file := StepFile.read(path)) and file.step[:5] == "shard"]
    assert any(note.record()["moved"] for note in notes)
    assert name == "qwen3_moe" or sum(map(is_emptied, parts)) == 1
    with pytest.raises(ValueError, match="--eval was another"):
        pipeline.run(job(models(name), tmp_path / "out", text, **{**options, "eval_samples": 3}))
    if damaged:  # its parts are worked on again
        shard = max((left / "new").glob("*.safetensors"), key=lambda file: file.stat().st_size)
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        monkeypatch.setattr(measuring, "evaluate_texts", None)  # what was measured is kept, as are solutions
        monkeypatch.setattr(walk, "solve_block", None)
    pipeline.run(job(models(name), tmp_path / "out", text, **options))
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    reports = [json.loads((tmp_path / out / "report.json").read_text()) for out in ("out", "whole")]
    for report in reports:
        report["evaluation"]["seconds"] = 0
    assert reports[0]["evaluation"] == reports[1]["evaluation"]
    assert reports[0]["fingerprint"] == reports[1]["fingerprint"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def begun(directory: Path, text: str, **options: Any) -> Path:
    """A partial directory in which some steps are finished; `directory` gets a model, and a run that stopped."""
    model = directory / "model"
    tiny_models.llama(dtype=torch.bfloat16, gain=2.0).save_pretrained(model)
    ours = job(model, directory / "out", text, recipe="nvfp4a16", **options)
    assert killed_at(11, lambda: pipeline.run(ours)) == -signal.SIGKILL
    assert any(partial_path(directory / "out").glob("*.safetensors"))
    return model


def test_what_changed_is_named_and_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = begun(tmp_path, text, solver="gptq")
    rows = tmp_path / "rows.safetensors"
    save_file({"input_ids": torch.randint(5, 60, (8, 32), generator=torch.Generator().manual_seed(2))}, rows)
    same: dict[str, Any] = {"recipe": "nvfp4a16", "solver": "gptq"}

    def refused(message: str, text: str = text, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            pipeline.run(job(model, tmp_path / "out", text, **{**same, **options}))

    refused("the plan digest was another; .* --restart", solver="rtn")
    refused("the plan guard was None, and is 0.1 keep now; .* --restart", guard="0.1 keep")
    refused("no input has a static scale to choose; leave it out", observer="mse")
    refused("the seed was 0, and is 7 now", seed=7)
    with monkeypatch.context() as patched:
        other = {"the kind of device": "cuda"}
        opened = lambda out, depends, *rest, **options: DirectoryStore(out, {**depends, **other}, *rest, **options)  # noqa: E731
        patched.setattr("quant.run.run.DirectoryStore", opened)
        refused("the kind of device was cpu, and is cuda now")
    refused("another calibration text; .* --restart", text=str(rows))
    with monkeypatch.context() as patched:
        patched.setattr("quant.run.run.versions", lambda: {"torch": "1.0"})
        refused("the version of python was .*, and is None now|the version of torch was .*, and is 1.0 now")
    weights_file = model / "model.safetensors"
    before = weights_file.stat()
    os.utime(weights_file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    refused("the model's file model.safetensors was another")
    os.utime(weights_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    pipeline.run(job(model, tmp_path / "out", text, **same))
    begun_again = job(model, tmp_path / "anew", text, **same)
    pipeline.run(begun_again)
    assert weights(tmp_path / "out") == weights(tmp_path / "anew")


def test_restart_removes_what_an_abandoned_run_left(text: str, tmp_path: Path) -> None:
    model = begun(tmp_path, text, solver="gptq")
    pipeline.run(job(model, tmp_path / "out", text, recipe="mxfp8", restart=True))
    pipeline.run(job(model, tmp_path / "direct", text, recipe="mxfp8"))
    assert weights(tmp_path / "out") == weights(tmp_path / "direct")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["direct", "model", "out"]


def test_a_damaged_part_is_made_again(text: str, tmp_path: Path) -> None:
    model = begun(tmp_path, text, solver="rtn")
    part = min(partial_path(tmp_path / "out").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    for out in ("out", "direct"):
        pipeline.run(job(model, tmp_path / out, text, recipe="nvfp4a16", solver="rtn"))
    assert weights(tmp_path / "out") == weights(tmp_path / "direct")


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_weight_file_that_changes_during_the_run(
    vanishes: bool, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16).save_pretrained(model)
    write = StepFile.write

    def meddle(*args: Any, **options: Any) -> StepFile:
        shard = model / "model.safetensors"
        if shard.exists():
            shard.unlink() if vanishes else os.utime(shard, ns=(0, 0))
        return write(*args, **options)

    monkeypatch.setattr(StepFile, "write", meddle)
    what = "disappeared" if vanishes else "changed"
    with pytest.raises(ValueError, match=rf"model\.safetensors: this file of the model {what} while it was read"):
        pipeline.run(job(model, tmp_path / "out", text, recipe="nvfp4a16"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("solver", ["rtn", "gptq"])
def test_a_weight_file_that_becomes_shorter(solver: str, text: str, tmp_path: Path) -> None:
    """Touching a page beyond the end of a mapped file would kill the process without a word."""
    model = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16, hidden_size=128, intermediate_size=256).save_pretrained(model)
    shard, said = model / "model.safetensors", tmp_path / "said"
    real = solving.solve_plan

    def cut(*args: Any, **options: Any) -> Any:
        os.truncate(shard, 1 << 16)
        return real(*args, **options)

    def work() -> None:
        solving.solve_plan = cut  # type: ignore[attr-defined]
        try:
            pipeline.run(job(model, tmp_path / "out", text, recipe="nvfp4a16", solver=solver))
        except ValueError as error:
            said.write_text(str(error))

    assert in_child(work) == 0
    assert said.read_text().startswith(f"{shard}: this file of the model changed while it was read; put it back")


@pytest.mark.parametrize("kind", ["state dict", "allocation"])
def test_a_weight_file_that_changes_before_anything_is_kept(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    tiny_models.llama(dtype=torch.bfloat16).save_pretrained(model)
    shard = model / "model.safetensors"
    room, step = (deciding, "allocate") if kind == "allocation" else (solving, "solve_state_dict")
    real = getattr(room, step)

    def meddle(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        shard.unlink()
        return found

    monkeypatch.setattr(room, step, meddle)
    if kind == "allocation":
        ours = job(model, tmp_path / "out", text, budget=AllocationRequest(bits=8.0, formats="nvfp4,fp8"))
    else:
        ours = job(shard, tmp_path / "out", text, recipe="nvfp4a16", calib=())
    with pytest.raises(ValueError, match=r"model\.safetensors: this file of the model disappeared while it was read"):
        pipeline.run(ours)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["rtn", "gptq"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_fifty_kills_at_random_moments(
    solver: str, overwrite: bool, models: Callable[[str], Path], text: str, tmp_path: Path
) -> None:
    def work(out: Path) -> None:
        pipeline.run(job(models("base"), out, text, recipe="nvfp4", solver=solver, overwrite=overwrite))

    started = time.perf_counter()
    assert in_child(lambda: work(tmp_path / "whole")) == 0
    whole = time.perf_counter() - started
    moments = random.Random(0)
    results = 0
    for run in range(13):
        out = tmp_path / f"out{run}"
        if overwrite:
            assert in_child(lambda out=out: work(out)) == 0
        for _ in range(moments.randrange(1, 4)):
            in_child(lambda out=out: work(out), moments.uniform(0, whole))
        if overwrite or not out.exists() or partial_path(out).exists():
            assert in_child(lambda out=out: work(out)) == 0
        assert weights(out) == weights(tmp_path / "whole")
        results += 1
    assert results == 13


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (None, "expected an object"),
        ({"bytes": "7", "sha256": "", "moved": []}, "bytes"),
        ({"bytes": 7, "sha256": "", "moved": ["../model/00001.safetensors"]}, "not a file of a step"),
    ],
)
def test_a_forged_note_about_a_file_of_the_checkpoint_is_refused(record: Any, problem: str, tmp_path: Path) -> None:
    with DirectoryStore(tmp_path / "out", {}) as store:
        store.note("shard model.safetensors", record)
    with (
        DirectoryStore(tmp_path / "out", {}) as store,
        pytest.raises(ValueError, match=rf"{problem}.*pass --restart to begin anew"),
    ):
        store.is_moving  # noqa: B018


def test_a_step_that_the_disk_did_not_take_whole_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any, **options: Any) -> str:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensors = {"x": torch.arange(5)}
    with DirectoryStore(tmp_path / "out", {}) as store:
        store.put("a", tensors, 1)
        store.flush()
        monkeypatch.setattr(step_store, "write_tensor_file", full)
        store.put("b", tensors, 2)
        with pytest.raises(OSError, match=r"No space left .* make room"):
            store.flush()
    monkeypatch.undo()
    assert len([*partial_path(tmp_path / "out").iterdir()]) == 2  # run.json and the first step
    with DirectoryStore(tmp_path / "out", {}) as store:
        assert "b" not in store
        store.put("b", tensors, 3)
        store.flush()
        first, second = store.get("a"), store.get("b")
        assert first is not None and second is not None
        assert (first.record, second.record) == (1, 3) and torch.equal(first.tensors["x"], tensors["x"])


def test_the_newest_file_of_a_step_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        # As if the run was stopped between the rename of the new file and the removal of the old one.
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with DirectoryStore(tmp_path / "out", {"version": 1}) as store:
            for record in range(11):
                store.put("a", {"x": torch.full((3,), record)}, record)
            store.flush()
    with DirectoryStore(tmp_path / "out", {"version": 1}) as store:
        step = store.get("a")
        assert step is not None and step.record == 10 and step.tensors["x"].tolist() == [10] * 3


def test_a_file_that_refresh_sees_before_its_writer_is_done_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StepFile.write

    def seen_at_once(*args: Any, **options: Any) -> StepFile:
        file = write(*args, **options)
        store.refresh()  # as the main thread may do meanwhile, which waits for other ranks
        return file

    monkeypatch.setattr(StepFile, "write", seen_at_once)
    with DirectoryStore(tmp_path / "out", {}) as store:
        store.put("a", {"x": torch.arange(3)}, 1)
        store.flush()
        step = store.get("a")
        assert step is not None and step.tensors["x"].tolist() == [0, 1, 2]
