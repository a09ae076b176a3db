"""Shows a change's way through the replicas while its answer is waited for."""

import threading
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from deployments.cli.admin_client import AdminClient, Json

_LOOK_S = 0.25
_READY_PHASES = ("prepared", "committed")


def follow(client: AdminClient, op_id: str, change: Callable[[], Json]) -> Json:
    """Make a change and return its answer; on a terminal, draw how far the replicas are."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return change()
    work = _Work(change)
    try:
        with Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("replicas"),
            console=console,
            transient=True,
        ) as progress:
            task = progress.add_task("sent", total=None)
            while not work.wait(_LOOK_S):
                operation = client.find_operation(op_id)
                if operation is not None:
                    description, ready, total = describe(operation)
                    progress.update(
                        task, description=description, completed=ready, total=total or None
                    )
    except KeyboardInterrupt:
        console.print(f"the operation goes on: lorafleet adapters operations {op_id}")
        raise
    return work.result()


def describe(operation: Json) -> tuple[str, int, int]:
    """An operation in one line, and how many of its replicas are through."""
    replicas = operation["replicas"]
    ready = sum(replica["phase"] in _READY_PHASES for replica in replicas)
    return f"{operation['kind']} {operation['name']}: {operation['phase']}", ready, len(replicas)


class _Work:
    """A call in a thread that does not keep the process from ending."""

    def __init__(self, call: Callable[[], Json]) -> None:
        self._call = call
        self._answer: Json = {}
        self._error: Exception | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        return self._is_over.wait(timeout_s)

    def result(self) -> Json:
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._call()
        except Exception as error:  # noqa: BLE001 -- raised where the result is asked for
            self._error = error
        finally:
            self._is_over.set()
