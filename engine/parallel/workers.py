"""The processes of the ranks other than the first: started, spoken to, watched, ended.

Knows processes and sockets. Knows nothing of models. A process that ends before it is told to is
noticed at once, whatever rank 0 is doing.
"""

import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from engine.errors import EngineDeadError
from engine.parallel.wire import Message, Start, send

# How long an error in rank 0 waits to be explained by the end of another rank, and how long a
# process may take to end when told to.
_EXPLANATION_S = 5.0
_END_S = 10.0


class _Fate:
    """What the watching threads know. It outlives `Workers`, which must not wait for them."""

    def __init__(self) -> None:
        self.death: str | None = None
        self.died = threading.Event()
        self.is_closing = threading.Event()
        self.on_death: Callable[[], None] = lambda: None

    def watch(self, tp_rank: int, process: "subprocess.Popen[bytes]") -> None:
        """Wait for the end of a process and note it, if nobody asked for it."""
        code = process.wait()
        if not self.is_closing.is_set():
            self.death = f"tensor-parallel rank {tp_rank} ended unexpectedly (exit status {code})"
            self.died.set()
            self.on_death()


class Workers:
    """Ranks 1 and up of one model, each a process on this machine."""

    def __init__(self, starts: Sequence[Start]) -> None:
        self._fate = _Fate()
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        # Also when forgotten, and at the interpreter's exit.
        self._end = weakref.finalize(
            self, _end_processes, self._fate, self._connections, self._processes
        )
        for start in starts:
            self._start(start)

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call this, on a thread of its own, when a process ends that should not."""
        self._fate.on_death = callback

    def wait_until_ready(self) -> None:
        """Wait until every process has started. Raises EngineDeadError when one ends."""
        for connection in self._connections:
            try:
                connection.recv_bytes()
            except (EOFError, OSError) as error:
                raise self.explained(error) from error

    def tell(self, messages: Sequence[Message]) -> None:
        """Send each rank its message. Raises EngineDeadError when one is gone."""
        self.check()
        try:
            for connection, message in zip(self._connections, messages, strict=True):
                send(connection, message)
        except OSError as error:
            raise self.explained(error) from error

    def tell_all(self, message: Message) -> None:
        """Send every rank the same message."""
        self.tell([message] * len(self._connections))

    def check(self) -> None:
        """Raise EngineDeadError when a process has ended."""
        if self._fate.death is not None:
            raise EngineDeadError(self._fate.death)

    def explained(self, error: Exception) -> Exception:
        """The end of a process, if one ends about now: the likely cause of a failed exchange."""
        if self._fate.died.wait(_EXPLANATION_S):
            return EngineDeadError(self._fate.death)
        return error

    def close(self) -> None:
        """End all processes and wait for them."""
        self._end()
        for watcher in self._watchers:
            watcher.join()

    def _start(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Modules are found where this process finds them, whatever was put into its path.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            process = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=os.environ | {"PYTHONPATH": path},
                # A terminal's interrupt is for rank 0 alone, which ends the others.
                start_new_session=True,
            )
        self._processes.append(process)
        connection = Connection(ours.detach())
        self._connections.append(connection)
        watcher = threading.Thread(
            target=self._fate.watch, args=(start.tp_rank, process), daemon=True
        )
        watcher.start()
        self._watchers.append(watcher)
        send(connection, start)


def _end_processes(
    fate: _Fate, connections: Sequence[Connection], processes: Sequence["subprocess.Popen[bytes]"]
) -> None:
    fate.is_closing.set()
    for connection in connections:
        connection.close()
    for process in processes:
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
