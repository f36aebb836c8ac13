"""`Watch` ends all ranks of a command when one fails or is lost, and says which.

Every rank holds a connection to the first one for as long as it lives. When a process dies in whatever way, the system
closes its connections. So the first rank learns within moments which rank was lost, says so in one line and ends, and
the others end because it has; nobody waits in vain for a sum to which a dead rank would have added. A rank that fails
with an error sends its message along the same way.

torchrun's agent watches only the processes of its own machine. Other machines learn of a lost one by a timeout of
minutes, and nobody learns which error came first. So every command watches its ranks itself, under torchrun too.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from quant.base.errors import printable
from quant.base.json_files import json_text

# Errors of several ranks come together. The most informative one is printed after this many seconds.
_TOGETHER = 1.0
# A rank that sent its error waits this many seconds for the first one to end.
_FAREWELL = 10.0


class Watch:
    """The connections between the first rank and the others, and the thread that watches them.

    A message is one line of JSON: that a rank `ends`, or its `error`, which perhaps only `follows` from another's. A
        connection that closes without a message belongs to a rank that was lost.

    Args:
        way_out: advice to the user when a rank is lost.
    """

    def __init__(self, way_out: str) -> None:
        from quant.calibration.ranks import from_first, gathered, rank_and_world

        self.rank, world = rank_and_world()
        self.names = gathered(f"rank {self.rank} (process {os.getpid()} on {socket.gethostname()})")
        self.way_out, self.over, self.lock = way_out, threading.Event(), threading.Lock()
        self.others: dict[int, socket.socket] = {}
        local = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        host = "127.0.0.1" if local else os.environ["MASTER_ADDR"]
        server = socket.create_server(("127.0.0.1" if local else "", 0), backlog=world) if self.rank == 0 else None
        # Port 0 lets the system choose a free one, which the others learn by the process group that exists already.
        port = from_first(lambda: server.getsockname()[1] if server else 0)
        if server is None:
            self.others[0] = _kept_alive(socket.create_connection((host, port), timeout=60))
            _send(self.others[0], rank=self.rank)
        else:
            with server:
                server.settimeout(60)
                while len(self.others) < world - 1:
                    other = _kept_alive(server.accept()[0])
                    # Connections arrive in any order; each begins with the number of its rank.
                    self.others[_word(other)["rank"]] = other
        threading.Thread(target=self._watch, daemon=True, name="watch").start()

    def _watch(self) -> None:
        """Ends this process when another rank fails or is lost."""
        heard: dict[int, dict[str, Any]] = {}
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank, other in self.others.items():
                selector.register(other, selectors.EVENT_READ, rank)
            while selector.get_map() and not self.over.is_set():
                for key, _ in selector.select(0.1):
                    word = _word(self.others[key.data])
                    # One message a connection: after it, a closed connection is always readable and would spin the
                    # loop.
                    selector.unregister(key.fileobj)
                    if not word.get("ends"):
                        heard[key.data] = word
                        deadline = deadline or time.monotonic() + (_TOGETHER if self.rank == 0 else 0)
                if deadline is not None and time.monotonic() >= deadline:
                    break
        with self.lock:
            if heard and not self.over.is_set():
                self._tell(heard)
                os._exit(2)

    def _tell(self, heard: dict[int, dict[str, Any]]) -> None:
        """Prints the most informative line: a rank's own error, else a lost rank, else an error that followed."""
        rank, word = min(heard.items(), key=lambda item: (_weight(item[1]), item[0]))
        lost = f"was lost: it ended without a message, as a killed process does; {self.way_out}"
        if self.rank == 0 or (self.rank == 1 and not word):
            text = f"{self.names[rank]} {lost}" if not word else f"{self.names[rank]}: {word['error']}"
            sys.stderr.write(f"error: {printable(' '.join(text.split()))}\n")
            sys.stderr.flush()
        if self.rank == 0:
            self._dismiss()

    def _dismiss(self) -> None:
        for other in self.others.values():
            _send(other, error="the first rank has said it", follows=True)

    def fails(self, message: str, *, follows: bool = False) -> None:
        """Records an error of this rank; returns only on the first rank to fail, which is to print it.

        Args:
            message: the error.
            follows: whether it may only follow from another rank's: a broken connection, a signal.
        """
        if self.rank:
            _send(self.others[0], error=message, follows=follows)
            time.sleep(_FAREWELL)  # ends with the first rank
            os._exit(2)
        if follows:
            time.sleep(3 * _TOGETHER)  # the watching thread knows more, and ends this process
        self.over.set()
        with self.lock:
            self._dismiss()

    def ends(self) -> None:
        """Announces that this rank has finished the common work."""
        from quant.calibration.ranks import leave

        leave()
        self.over.set()
        for other in self.others.values():
            _send(other, ends=True)


def _weight(word: dict[str, Any]) -> int:
    """Orders messages by what they explain: an error of its own 0, a lost rank 1, an error that followed 2."""
    if not word:
        return 1
    return 2 if word["follows"] else 0


def _kept_alive(connection: socket.socket) -> socket.socket:
    """Returns a connection that notices within half a minute that the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _send(connection: socket.socket, **word: Any) -> None:
    with suppress(OSError):  # the other one is gone already
        connection.sendall(json_text(word).encode() + b"\n")


def _word(connection: socket.socket) -> dict[str, Any]:
    """Returns the word of another rank; empty where the rank is lost."""
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n") and (part := connection.recv(1 << 16)):
            line += part
    return dict(json.loads(line)) if line.endswith(b"\n") else {}
