"""The programs `quant` and `quantize` start here, and `python -m quant`, as which torchrun starts each rank.

Commands take some tenths of a second to import, and Ctrl-C ends them in one line from here on; while Python itself
starts, about a tenth of a second, it prints a traceback.
"""

import importlib
import os
import signal
import sys
from types import FrameType


def quant() -> None:
    """Runs the toolbox."""
    _run("quant.cli.main", "main", "quant")


def quantize() -> None:
    """Runs the command `quantize`."""
    _run("quant.cli.quantize", "quantize_command", "quantize")


def stop_early(number: int, frame: FrameType | None) -> None:
    """Ends a program that has not begun its work, so that there is nothing to clean up; a handler of SIGINT."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, b"error: stopped by SIGINT\n")
    os._exit(128 + number)


def _run(module: str, name: str, program: str) -> None:
    # A shell's background job ignores SIGINT, and stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop_early)
    sys.exit(getattr(importlib.import_module(module), name)(prog_name=program))


if __name__ == "__main__":
    importlib.import_module("quant.__main__").quant()
