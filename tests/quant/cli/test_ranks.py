"""Several ranks write what one rank writes; one that is lost or fails is named, and the run goes on later.

Ranks are forks of the test process, so that they start at once; one test starts them as users do.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from children import free_port
from plan_samples import planned
from safetensors.torch import load_file, save_file
from torch import Tensor

from quant.calibration import fast_matmul, ranks, statistics
from quant.calibration.ranks import Exchange, gathered, number_of, own_batches
from quant.calibration.solvers import gptq, row_parallel
from quant.calibration.walk import step_store as store_module
from quant.calibration.walk.step_store import partial_path
from quant.cli import command
from quant.cli.evaluate_command import evaluate_command
from quant.cli.quantize import quantize_command
from quant.export.checkpoint.load import load
from quant.models.open_model import open_model

ROWS, SEQLEN = 16, 32  # four batches of the walk
_SECONDS = 120
# Codes of a rank that lost its connection to another, or was ended by the launcher.
ENDED = (1, -signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with calibration rows and tiny models."""
    home = tmp_path_factory.mktemp("ranks")
    ids = torch.randint(5, 60, (ROWS, SEQLEN), generator=torch.Generator().manual_seed(1))
    save_file({"input_ids": ids}, home / "rows.safetensors")
    for name, sizes in {
        "llama": {},
        "qwen3_moe": {},
        "mixtral": {},
        "wide": {"hidden_size": 128, "intermediate_size": 256},
    }.items():
        build = getattr(tiny_models, "llama" if name == "wide" else name)
        build(dtype=torch.bfloat16, gain=2.0, num_hidden_layers=2, **sizes).save_pretrained(home / name)
    # Imports the modules of a run here, or each of about fifty ranks would spend half of its time on importing them.
    evaluated = [f"--eval={home / 'rows.safetensors'}", "--eval-samples=1"]
    arguments = options(home, "llama", home / "imported", "--format=nvfp4a16", "--solver=gptq", *evaluated)
    quantize_command(arguments, standalone_mode=False)
    return home


def options(home: Path, model: str, out: Path, *more: str) -> list[str]:
    """Arguments of `quantize`."""
    row_parallel = f"--calib={home / 'rows.safetensors'}"
    return [
        str(home / model),
        row_parallel,
        f"--calib-samples={ROWS}",
        f"--seqlen={SEQLEN}",
        f"--out={out}",
        "--quiet",
        *more,
    ]


def in_ranks(work: Sequence[Callable[[], object]], log: Path) -> tuple[list[int], list[str]]:
    """Does each piece of work in a fork of this process, all of them ranks of one command; one that fails ends all.

    Returns:
        How they ended: minus the signal, or the exit code; and what each said on standard error.
    """
    port, children = free_port(), []
    for rank, function in enumerate(work):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.environ |= {
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(work)),
                    "LOCAL_WORLD_SIZE": str(len(work)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                }  # fmt: skip
                said = os.open(f"{log}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(said, 1)
                os.dup2(said, 2)
                sys.stdout, sys.stderr = (os.fdopen(os.dup(said), "w", buffering=1) for _ in range(2))
                torch.set_num_threads(1)
                signal.alarm(_SECONDS)  # ranks that wait for each other in vain
                function()
                code = 0
            except SystemExit as error:
                code = int(error.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:  # as torchrun's agent does
            for other in set(children) - codes.keys():
                os.kill(other, signal.SIGTERM)
    return [codes[child] for child in children], [Path(f"{log}.{rank}").read_text() for rank in range(len(work))]


def run(arguments: list[str], count: int, log: Path, command: Any = quantize_command) -> list[str]:
    """Runs a command on several ranks, which must end well; gives what they said."""
    codes, said = in_ranks([lambda: command(arguments)] * count, log)
    assert codes == [0] * count, said
    return said


def files(directory: Path) -> dict[str, bytes]:
    """What does not depend on the command line and the time."""
    plan = json.loads((directory / "plan.json").read_text())
    del plan["provenance"]["command"]
    weights = {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix == ".safetensors"}
    return {**weights, "config": (directory / "config.json").read_bytes(), "plan": json.dumps(plan).encode()}


CASES = [
    ("llama", "--format=nvfp4", "--solver=rtn", "--kv-cache=fp8"),
    ("llama", "--format=nvfp4", "--solver=awq+lowrank:8+gptq", "--observer=mse"),
    ("qwen3_moe", "--format=nvfp4", "--solver=gptq"),
]
MORE = [
    ("mixtral", "--format=nvfp4a16", "--solver=local_hessian"),
    ("llama", "--format=nvfp4a16", "--solver=gptq", "--guard=0.05 fp8 keep"),
    ("wide", "--format=int4a16", "--solver=rotation:64+lowrank:8+gptq"),
    ("llama", "--format=nvfp4a16", "--solver=gptq+autoround:4"),
    ("mixtral", "--format=fp8", "--solver=mse"),
]


def of_columns(x: Tensor, y: Tensor, total: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """`fast_matmul._of_columns` on a CPU."""
    product = factor * (x.float().mT @ y.float())
    return product if total is None else total.add_(product)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)])
def test_ranks_write_the_bytes_of_one(
    case: tuple[str, ...], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, *arguments = case
    if any(argument.startswith(("--guard", "--observer")) for argument in arguments):
        arguments = [f"--plan={planned(home / model, tmp_path / 'plan.json', *arguments)}"]
    # Rows of these small weights, and columns of their factors, are shared as those of large ones are.
    for name in ("_SLAB", "_LEAF", "_WHOLE"):
        monkeypatch.setattr(gptq, name, 16)
    monkeypatch.setattr(statistics, "_STRIP", 16)
    monkeypatch.setattr(row_parallel, "search_threads", lambda *_: 2)
    # And second moments are added up as on a GPU; the tests below add them up as a CPU does.
    monkeypatch.setattr(fast_matmul, "_of_columns", of_columns)
    for module in (fast_matmul, statistics, gptq):
        monkeypatch.setattr(module, "has_pairs", lambda x: True)
    for count in (1, 3):  # of four batches, one rank has two
        run(options(home, model, tmp_path / str(count), *arguments), count, tmp_path / "log")
    assert files(tmp_path / "3") == files(tmp_path / "1")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["1", "3"]


def test_ranks_measure_gradients_together(home: Path, tmp_path: Path) -> None:
    """The third of three ranks has a batch of its own, and none falls back to GPTQ."""
    run(options(home, "llama", tmp_path / "out", "--format=nvfp4a16", "--solver=kfac"), 3, tmp_path / "log")
    layers = json.loads((tmp_path / "out" / "plan.json").read_text())["layers"]
    reasons = [layer["reason"] for layer in layers if layer["weight"]]
    assert reasons and not any("as by gptq" in reason for reason in reasons)


def test_ranks_rotate_by_one_matrix(home: Path, tmp_path: Path) -> None:
    """The fifth of five ranks has no rows to learn from. Blocks that were rotated otherwise would not fit together."""
    run(options(home, "llama", tmp_path / "out", "--format=fp8", "--solver=rotation:learned+gptq"), 5, tmp_path / "log")
    layers = json.loads((tmp_path / "out" / "plan.json").read_text())["layers"]
    rotated = [layer["name"] for layer in layers if "rotated with the residual stream, as learned" in layer["reason"]]
    assert len(rotated) == 2 * 7
    row_parallel = load_file(home / "rows.safetensors")["input_ids"]
    original = open_model(home / "llama").model
    assert original is not None
    with torch.no_grad():
        expected, ours = (model(row_parallel).logits.float() for model in (original, load(tmp_path / "out")))
    assert float((ours - expected).norm() / expected.norm()) < 0.1


def test_ranks_without_rows_and_evaluation(home: Path, tmp_path: Path) -> None:
    """Five ranks for four batches; and the figures of an evaluation, to the last digit."""
    text = str(home / "rows.safetensors")
    for count in (1, 5):
        more = ["--format=nvfp4a16", "--solver=gptq", f"--eval={text}", "--eval-samples=5"]
        run(options(home, "llama", tmp_path / str(count), *more), count, tmp_path / "log")
    assert files(tmp_path / "5") == files(tmp_path / "1")
    reports = [json.loads((tmp_path / count / "report.json").read_text())["evaluation"] for count in "15"]
    arguments = [str(tmp_path / "1"), f"--text={text}", f"--baseline={home / 'llama'}", "--samples=5"]
    said = run([*arguments, f"--seqlen={SEQLEN}", "--json"], 2, tmp_path / "log", evaluate_command)
    assert said[1] == ""
    one, five, two = (
        {name: value for name, value in figures.items() if name != "seconds"}
        for figures in (*reports, json.loads(said[0]))
    )
    assert one == five == two and one["kl"] > 0


def killed(rank: int, at: int, log: Path, arguments: list[str], count: int) -> tuple[list[int], list[str]]:
    """Runs a command whose rank kills itself when it begins its `at`-th step, or when it has given so many hashes."""

    def dies() -> None:
        seen = [0]

        def counting(method: Callable[..., None]) -> Callable[..., None]:
            def counted(store: store_module.DirectoryStore, *given: Any, **more: Any) -> None:
                seen[0] += 1
                if seen[0] == at:
                    # Threads of the first rank write steps: without this, they may have finished none yet.
                    store.flush()
                    os.kill(os.getpid(), signal.SIGKILL)
                method(store, *given, **more)

            return counted

        for name in ("put", "expect"):
            setattr(store_module.DirectoryStore, name, counting(getattr(store_module.DirectoryStore, name)))
        quantize_command(arguments)

    work = [dies if each == rank else lambda: quantize_command(arguments) for each in range(count)]
    return in_ranks(work, log)


@pytest.mark.parametrize(
    ("solver", "rank", "at"), [("rtn", 1, 3), ("gptq", 0, 4), pytest.param("gptq", 1, 4, marks=pytest.mark.slow)]
)
def test_a_lost_rank_is_named_and_another_number_of_ranks_goes_on(
    solver: str, rank: int, at: int, home: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = options(home, "llama", out, "--format=nvfp4a16", f"--solver={solver}")
    codes, said = killed(rank, at, tmp_path / "log", arguments, 3)
    # None of the others waits for the lost one until its alarm.
    assert codes[rank] == -signal.SIGKILL and not {0, -signal.SIGALRM} & set(codes), (codes, said)
    # The first rank says that it goes on later, whether the lost connection or the launcher's signal came first.
    if rank:
        assert re.fullmatch(
            r"error: (another rank ended|stopped by SIGTERM).*; finished layers are kept, .*\n", said[0]
        )
    assert all(said[each] == "" for each in range(1, 3)), said
    assert not out.exists()
    assert any(partial_path(out).glob("*.safetensors"))
    run(arguments, 2, tmp_path / "log")
    assert not partial_path(out).exists()
    run(options(home, "llama", tmp_path / "whole", "--format=nvfp4a16", f"--solver={solver}"), 1, tmp_path / "log")
    assert files(out) == files(tmp_path / "whole")


def test_ranks_with_other_files_are_named(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "llama"
    tiny_models.llama(dtype=torch.bfloat16, gain=1.0, num_hidden_layers=2).save_pretrained(other)
    save_file({"input_ids": torch.full((ROWS, SEQLEN), 7)}, tmp_path / "rows.safetensors")
    for changed, what in (
        ({str(home / "llama"): str(other)}, r"the file model\.safetensors"),
        ({f"--calib={home / 'rows.safetensors'}": f"--calib={tmp_path / 'rows.safetensors'}"}, "the calibration text"),
        ({"--solver=gptq": "--solver=rtn"}, "the plan"),
    ):
        same = options(home, "llama", tmp_path / "out", "--format=nvfp4a16", "--solver=gptq")
        work = [lambda given=given: quantize_command(given) for given in (same, [changed.get(o, o) for o in same])]
        codes, said = in_ranks(work, tmp_path / "log")
        assert codes[0] == 2 and codes[1] in ENDED
        assert re.match(rf"error: rank 1 on \S+ differs from rank 0 in {what}", said[0]), said
        assert said[0].count("\n") == 1 and said[1] == ""
    assert not (tmp_path / "out").exists()
    work = [
        lambda text=text: evaluate_command([str(home / "llama"), f"--text={text}", "--samples=2", f"--seqlen={SEQLEN}"])
        for text in (home / "rows.safetensors", tmp_path / "rows.safetensors")
    ]
    codes, said = in_ranks(work, tmp_path / "log")
    assert (
        codes[0] == 2
        and codes[1] in ENDED
        and "error: rank 1 on " in said[0]
        and "differs from rank 0 in the text" in said[0]
    ), said


def test_the_error_of_one_rank_is_said_once_with_its_name(home: Path, tmp_path: Path) -> None:
    def fails() -> None:
        from quant.calibration.walk import walk

        def refuse(*_: Any) -> None:
            raise ValueError("model.layers.1: the input holds NaN")

        walk.rotate = refuse  # type: ignore[assignment, attr-defined]
        quantize_command(arguments)

    arguments = options(home, "llama", tmp_path / "out", "--format=nvfp4a16", "--solver=gptq")
    codes, said = in_ranks([lambda: quantize_command(arguments), fails], tmp_path / "log")
    assert codes[1] == 2 and codes[0] in ENDED
    assert re.fullmatch(r"error: rank 1 \(process \d+ on \S+\): model\.layers\.1: the input holds NaN\n", said[1]), said


def test_the_first_rank_looks_for_nan_in_what_stays(home: Path, tmp_path: Path) -> None:
    model = tiny_models.llama(dtype=torch.bfloat16, num_hidden_layers=1)
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "llama")
    arguments = options(home, "llama", tmp_path / "out", "--format=nvfp4a16", "--solver=rtn")
    arguments[0] = str(tmp_path / "llama")
    codes, said = in_ranks([lambda: quantize_command(arguments)] * 2, tmp_path / "log")
    assert codes[0] == 2 and codes[1] in ENDED
    assert re.search(r"error: .*model\.norm\.weight \[64\] holds 1 values that are NaN", said[0]), said
    assert said[0].count("\n") == 1 and said[1] == ""
    assert not (tmp_path / "out").exists()


def test_entries_of_all_ranks_come_in_order(tmp_path: Path) -> None:
    matrices = [torch.randn(7, 5, generator=torch.Generator().manual_seed(i)) * 10 ** (i % 5) for i in range(8)]

    def work() -> None:
        # As a training script does, which may quantize on one rank alone; its ranks meet elsewhere than those below.
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        meeting = f"file://{tmp_path}/meeting.{world}"
        torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
        assert ranks.rank_and_world() == (0, 1)
        torch.distributed.barrier()  # one that leaves earlier closes connections that others are still making
        torch.distributed.destroy_process_group()
        ranks.join()
        assert gathered("rank" * 1000 * rank) == ["rank" * 1000 * each for each in range(world)]  # many messages long
        own = list(own_batches(len(matrices)))
        assert own == [number_of(i) for i in range(len(own))]
        entries = [(number, [matrices[number][: number % 3], None, matrices[number].bool()]) for number in own]
        for small in (1 << 20, 0):  # bytes that go in one message
            ranks._SMALL = small  # type: ignore[misc]
            everything = list(Exchange().in_order(entries))
            assert [number for number, _ in everything] == list(range(8))
            for number, (values, nothing, signs) in everything:
                assert nothing is None and values is not None and torch.equal(values, matrices[number][: number % 3])
                assert signs is not None and torch.equal(signs, matrices[number].bool())
        ranks.leave()  # a rank that exits before closes connections over which others still receive

    for count in (1, 3, 5):
        codes, said = in_ranks([work] * count, tmp_path / "log")
        assert codes == [0] * count, said


@pytest.mark.parametrize(
    ("asked", "gpus", "found"),
    [
        ("auto", 0, "auto"),
        ("cpu", 1, "cpu"),
        ("auto", 1, "4 ranks on a machine where PyTorch sees 1 GPU: pass --device cpu"),
        ("cuda", 2, "4 ranks on a machine where PyTorch sees 2 GPUs: pass --devices 2, or --device cpu"),
        ("cuda:1", 4, "--device cuda:1 is one GPU, and there are several ranks; pass cuda, and each takes its own"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(asked: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if found in ("auto", "cpu"):
        assert command.local_device(asked) == found
    else:
        with pytest.raises(ValueError, match=re.escape(found)):
            command.local_device(asked)


def test_the_launcher_gives_the_exit_code_of_the_rank_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program, spoken = tmp_path / "python", tmp_path / "spoken"
    # The second rank ends once the first has spoken: a rank that failed has the launcher end the others at once.
    program.write_text(
        f'#!/bin/sh\nif [ $RANK = 0 ]; then echo "$RANK of $WORLD_SIZE: $*"; touch "{spoken}"; fi\n'
        f'until [ -e "{spoken}" ]; do sleep 0.01; done\n'
        "[ $OMP_NUM_THREADS = 3 ] || exit 3\n"
        'case "$4 $RANK" in "fail 0") sleep 9;; "fail 1") exit 2;; esac\n'
        'case "$4 $RANK" in "die 1") kill -9 $$;; "die 0") sleep 9;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for argument, code, error in (
        ("well", 0, ""),
        ("fail", 2, ""),
        ("die", 128 + signal.SIGKILL, "error: rank 1 was killed by signal 9; run the same command again\n"),
    ):
        spoken.unlink(missing_ok=True)
        monkeypatch.setenv("OMP_NUM_THREADS", "6")
        assert command.launch(["quantize", argument], 2) == code
        assert capfd.readouterr() == (f"0 of 2: -m quant quantize {argument}\n", error)


def test_ctrl_c_ends_the_launcher_after_its_ranks(tmp_path: Path) -> None:
    """A terminal sends it to all of them, and another program to the launcher alone; both remove what is unfinished."""
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\ntrap 'sleep 0.3; echo $RANK cleaned >> {tmp_path}/log; exit 1' TERM\n"
        f"echo $RANK >> {tmp_path}/started\nwhile true; do sleep 0.1; done\n"
    )
    program.chmod(0o755)
    code = f"import signal, sys; sys.executable = {str(program)!r}\nfrom quant.cli import command\n"
    code += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
    code += "with command.terminable(): sys.exit(command.launch(['quantize'], 2))"
    for number in (signal.SIGTERM, signal.SIGINT):
        (tmp_path / "started").write_text("")
        (tmp_path / "log").write_text("")
        launcher = subprocess.Popen([sys.executable, "-c", code])
        while len((tmp_path / "started").read_text()) < len("0\n1\n"):
            time.sleep(0.02)
        launcher.send_signal(number)
        assert launcher.wait(timeout=60) == 128 + number
        assert sorted((tmp_path / "log").read_text().split()) == ["0", "1", "cleaned", "cleaned"]


def test_ranks_of_one_machine_meet_without_a_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """github.com/kohya-ss/sd-scripts/pull/1686: PyTorch's store wants libuv, which PyTorch for Windows lacks."""

    def store(*_: object, **__: object) -> None:
        raise RuntimeError("use_libuv was requested but PyTorch was built without libuv support")

    def work() -> None:
        ranks.join()
        assert gathered(ranks.rank_and_world()) == [(0, 2), (1, 2)]
        ranks.leave()

    # `torch.distributed.rendezvous` is a function, too.
    monkeypatch.setattr(importlib.import_module("torch.distributed.rendezvous"), "TCPStore", store)
    monkeypatch.setenv("BLOCKSCALE_RANKS", (tmp_path / "meeting").as_uri())
    codes, said = in_ranks([work] * 2, tmp_path / "log")
    assert codes == [0, 0], said


@pytest.mark.slow
def test_devices_starts_the_ranks(home: Path, tmp_path: Path) -> None:
    given = options(home, "llama", tmp_path / "two", "--format=nvfp4a16", "--effort=0")
    given.remove("--quiet")
    command = [sys.executable, "-m", "quant", "quantize", *given, "--devices=2", "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # At 80 columns a long path is on a line of its own.
    assert " ".join(done.stderr.split()).count(f"written to {tmp_path / 'two'}") == 1, done.stderr
    run(options(home, "llama", tmp_path / "one", "--format=nvfp4a16", "--effort=0"), 1, tmp_path / "log")
    assert files(tmp_path / "two") == files(tmp_path / "one")
