"""What the fleet looks like, as a first document and then as changes, to every page that is open.

The cluster is asked once for all pages, and only while one is open. The more there is to ask for,
the less often it is asked, so that pages cannot keep the controller busy.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

import orjson

from deployments.backend import AdapterStatus, Backend
from deployments.errors import ClusterError
from deployments.metrics.snapshot import Snapshots
from deployments.openai.aliases import alias_document
from deployments.openai.operations import operation_document
from deployments.operations import OperationQuery

logger = logging.getLogger(__name__)

Json = dict[str, Any]

PERIOD_S = 1.0
# Of the time at most.
_SHARE = 0.1
_MAX_OPERATIONS = 30
# Changes that a page may be late by before it gets everything anew.
_MAX_LATE = 30

# In the order in which the page reads them.
_TRAFFIC = (
    "lorafleet_adapter_requests_total",
    "lorafleet_adapter_failures_total",
    "lorafleet_adapter_generation_tokens_total",
    "lorafleet_adapter_request_seconds_sum",
    "lorafleet_adapter_request_seconds_count",
    "lorafleet_adapter_first_token_seconds_sum",
    "lorafleet_adapter_first_token_seconds_count",
)


class FleetFeed:
    """Looks at the cluster for all readers together."""

    def __init__(self, backend: Backend, *, period_s: float = PERIOD_S) -> None:
        self._backend = backend
        self._period_s = period_s
        self._readers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._rows: dict[str, Json] = {}
        self._latest: Json | None = None

    async def events(self, base_model: str) -> AsyncGenerator[bytes, None]:
        """The whole fleet, then changes, until closed. None of them is ever lost or repeated."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._readers.add(queue)
        if self._task is None or self._task.done():
            self._rows, self._latest = {}, None
            self._task = asyncio.create_task(self._look_forever())
        try:
            head = {"base_model": base_model, "may_update": self._backend.allow_runtime_updating}
            yield self._everything(head)
            while True:
                event = await queue.get()
                yield self._everything(head) if event is None else event
        finally:
            self._readers.discard(queue)
            if not self._readers and self._task is not None:
                self._task.cancel()
                self._task = None

    def _everything(self, head: Json) -> bytes:
        if self._latest is None:
            return orjson.dumps(head)
        rows = list(self._rows.values())
        return orjson.dumps({**head, **self._latest, "full": True, "adapters": rows})

    async def _look_forever(self) -> None:
        while True:
            began = time.monotonic()
            try:
                document = await self._look()
            except (ClusterError, TimeoutError) as error:
                document = {"error": str(error)}
            except Exception:
                logger.exception("cannot look at the cluster")
                document = {"error": "the cluster cannot be looked at; see the ingress' log"}
            self._send(orjson.dumps(document))
            spent = time.monotonic() - began
            await asyncio.sleep(max(self._period_s, spent / _SHARE))

    def _send(self, event: bytes) -> None:
        for queue in self._readers:
            if queue.qsize() < _MAX_LATE:
                queue.put_nowait(event)
                continue
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _look(self) -> Json:
        """What changed; what is short is told whole each time."""
        rows = {row["name"]: row for row in map(_row, await self._backend.list_adapters())}
        metrics = await self._backend.metrics()
        operations = await self._backend.list_operations(OperationQuery(limit=_MAX_OPERATIONS))
        latest: Json = {
            "at": time.time(),
            "replicas": [asdict(each) for each in await self._backend.list_replicas()],
            "aliases": [alias_document(each) for each in await self._backend.list_aliases()],
            "operations": [operation_document(each) for each in operations],
            "traffic": _traffic(Snapshots((metrics.controller, *metrics.replicas))),
        }
        changed = [row for name, row in rows.items() if self._rows.get(name) != row]
        removed = [name for name in self._rows if name not in rows]
        is_first = self._latest is None
        self._rows, self._latest = rows, latest
        return {**latest, "full": is_first, "adapters": changed, "removed": removed}


def _row(status: AdapterStatus) -> Json:
    version = status.version
    return {
        "name": version.name,
        "generation": version.generation,
        "state": status.state,
        "pinned": version.pinned,
        "rank": version.rank,
        "size": version.size_bytes,
        "source": version.source_uri,
        "digest": version.digest,
        "created_at": version.created_at,
        "created_by": version.created_by,
        "kept": [[kept.generation, kept.digest, kept.created_at] for kept in status.kept],
        # Where it is not resident goes without saying.
        "held": {
            held.replica_id: [held.host, held.slot, held.num_running]
            for held in status.replicas
            if held.host or held.slot is not None
        },
    }


def _traffic(metrics: Snapshots) -> dict[str, list[float]]:
    """Totals by adapter, over all replicas."""
    totals: dict[str, list[float]] = {}
    for position, name in enumerate(_TRAFFIC):
        for labels, value in metrics.values(name):
            row = totals.setdefault(labels["adapter"], [0.0] * len(_TRAFFIC))
            row[position] += value
    return totals
