"""This file runs parts of tests in processes of their own, which may be killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable


def in_child(action: Callable[[], object], kill_after: float | None = None) -> int:
    """Exit status of a forked process that does `action`: minus the signal that ended it, or 1 for an exception.

    Args:
        action: what it does.
        kill_after: seconds until it gets SIGKILL; None leaves it to its end.
    """
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
