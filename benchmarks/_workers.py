"""Processes that measure the rows of a table, side by side over all GPUs, and take them from one queue.

    queue, longest row first ──┬── worker 0, GPU 0 ──┐
                               ├── worker 1, GPU 1 ──┼── results, in the order in which they come
                               └── worker 2, GPU 0 ──┘

A worker reads one name a line from its standard input and answers with one line of JSON. It keeps its process from row
to row, so that packages are imported and the model is read once. It takes rows of its own toolkit first, and starts
anew for another one, because toolkits patch torch and transformers. A row that fails ends its process too, for after an
error of CUDA nothing works in it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Lock
from typing import IO, Any

from quant.base.json_files import json_text

Result = dict[str, Any]


def serve(measure: Callable[[str], Result]) -> None:
    """Measures the rows that come on standard input, in this process, until there are no more."""
    # Toolkits print on standard output: only answers may go there.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            result = measure(line.strip())
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"}
        print(json_text(result), file=answers, flush=True)


class Worker:
    """One process after another, on one GPU.

    Args:
        command: starts a process that calls `serve`.
        gpu: as CUDA_VISIBLE_DEVICES names it; None for a CPU.
    """

    def __init__(self, command: Sequence[str], gpu: str | None) -> None:
        self.command = list(command)
        self.environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        self.toolkit = ""
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def measure(self, name: str, toolkit: str) -> Result:
        """Returns the result of a row, or {"error": why there is none}."""
        if toolkit != self.toolkit:
            self.end()
        process = self.process or self._start()
        self.toolkit = toolkit
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(name, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        result: Result = json.loads(answer) if answer else {"error": self._last_words()}
        if "error" in result:
            self.end()
        return result

    def end(self) -> None:
        """Ends the process; the next row starts another one."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait()
        self.process = None

    def _start(self) -> subprocess.Popen[str]:
        # A file, not a pipe: nobody reads it before the end, and a full pipe would stop the worker.
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 -- it lives on
        self.process = subprocess.Popen(
            self.command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True,
        )  # fmt: skip
        return self.process

    def _last_words(self) -> str:
        """Returns the last line that a process wrote before it died."""
        assert self.process is not None
        assert self.errors is not None
        status = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1] if lines else f"exit status {status}"


class RowQueue:
    """The names of the rows that nobody has taken yet, the longest first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.lock = Lock()

    def take(self, toolkit: str) -> str | None:
        """Takes the longest row of a toolkit, of another toolkit where it has none left; None at the end."""
        with self.lock:
            if not self.names:
                return None
            name = next((name for name in self.names if toolkit_of(name) == toolkit), self.names[0])
            self.names.remove(name)
            return name


def toolkit_of(name: str) -> str:
    """Returns the second word of a row's name."""
    return name.split()[1]


def visible_gpus() -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    import torch  # not above: a worker reads its script's other imports first

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def measure_all(
    names: Sequence[str], command: Sequence[str], *, jobs: int, gpus: Sequence[str], one_row: bool
) -> Iterator[tuple[str, Result]]:
    """Measures rows in `jobs` processes, which share the GPUs evenly.

    Args:
        names: the longest row first.
        command: starts a worker.
        jobs: how many processes run at a time.
        gpus: names of GPUs; none for a CPU.
        one_row: gives every row a process of its own.

    Yields:
        The name and the result of each row, as soon as it is measured.
    """
    queue = RowQueue(names)
    results: Queue[tuple[str, Result]] = Queue()

    def work(index: int) -> None:
        worker = Worker(command, gpus[index % len(gpus)] if gpus else None)
        while (name := queue.take(worker.toolkit)) is not None:
            try:
                result = worker.measure(name, toolkit_of(name))
            except Exception as error:
                result = {"error": repr(error)}
            results.put((name, result))
            if one_row:
                worker.end()
        worker.end()

    with ThreadPoolExecutor(jobs) as pool:
        for index in range(min(jobs, len(names))):
            pool.submit(work, index)
        for _ in names:
            yield results.get()
