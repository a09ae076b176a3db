"""What a change costs in a journal of many names, on a disk and in S3.

    python -m benchmarks.journal --names 10000 --json benchmarks/results/journal.json

Without ``--s3`` an S3 server runs on this machine, so that the figure is what the journal itself
costs: packing and sending the whole state. A real store adds its own time for each write.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from adapters import AdapterVersion
from deployments.journal import Journal, StoredState
from deployments.journal_object import JournalObject
from deployments.operations import Operation, OperationKind
from deployments.s3_state_store import S3StateStore
from deployments.state_store import SqliteStateStore, StateStore
from tests.resolvers.s3_server import CREDENTIALS, Bucket, s3_server

_PARALLEL = 50


def make_version(index: int) -> AdapterVersion:
    """A version as a large fleet has them."""
    name = f"team-{index % 40}/adapter-{index}"
    return AdapterVersion(
        name=name,
        generation=index + 1,
        digest=sha256(name.encode()).hexdigest(),
        source_uri=f"s3://models/adapters/{name}",
        base_model="base",
        rank=16,
        size_bytes=1 << 24,
        pinned=False,
        created_at=1.7e9 + index,
        created_by="somebody",
    )


def fill(journal: Journal, num_names: int) -> None:
    """Register names."""
    versions = [make_version(index) for index in range(num_names)]
    state = StoredState(
        journal_id="",
        table_version=num_names,
        adapters={version.name: version for version in versions},
    )
    journal.restore(state, generation=num_names)


async def load(store: StateStore, index: int, round_: int) -> float:
    """What a load writes; returns how long its caller waits for the journal."""
    version = make_version(index)
    operation = Operation(
        op_id=f"{index}-{round_}", kind=OperationKind.LOAD, name=version.name, digest=version.digest
    )
    began = time.perf_counter()
    begun = await store.begin(operation)
    version = replace(version, generation=begun.generation)
    await store.commit(operation.op_id, version, forget=False, now=0.0)
    took = time.perf_counter() - began
    store.finish(operation.op_id, now=0.0)
    return took


async def measure(store: StateStore, num_names: int, rounds: int) -> dict[str, Any]:
    """Loads alone and many at once."""
    await store.write(lambda: fill(store.journal, num_names))
    alone = [await load(store, index, 0) for index in range(rounds)]
    began = time.perf_counter()
    await asyncio.gather(*(load(store, index, 1) for index in range(_PARALLEL)))
    together = time.perf_counter() - began
    image = store.journal.image() if isinstance(store, S3StateStore) else b""
    await store.close()
    return {
        "load_ms": {
            "p50": round(1e3 * statistics.median(alone), 1),
            "max": round(1e3 * max(alone), 1),
        },
        "loads_per_s_at_once": round(_PARALLEL / together, 1),
        **({"state_bytes": len(image)} if image else {}),
    }


async def measure_all(names: int, rounds: int, uri: str | None) -> dict[str, Any]:
    """Both places."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        disk = await measure(SqliteStateStore(directory / "journal.sqlite3"), names, rounds)
        endpoint_url = None
        if uri is None:
            stack.enter_context(patch.dict(os.environ, CREDENTIALS))
            port = stack.enter_context(s3_server())
            Bucket(port, "journals").create()
            uri, endpoint_url = "s3://journals/bench.journal", f"http://127.0.0.1:{port}"
        place = JournalObject(uri, endpoint_url=endpoint_url)
        store = await S3StateStore.open(place)
        s3 = await measure(store, names, rounds)
        found = place.read()
        return {"disk": disk, "s3": {**s3, "object_bytes": len(found[1]) if found else 0}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--s3", help="s3://bucket/key of a real store")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure_all(arguments.names, arguments.rounds, arguments.s3))
    document = {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "names": arguments.names,
        **results,
    }
    text = json.dumps(document, indent=2) + "\n"
    print(text, end="")
    if arguments.json is not None:
        arguments.json.write_text(text)


if __name__ == "__main__":
    main()
