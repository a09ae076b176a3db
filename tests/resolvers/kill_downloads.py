"""Kills downloads at random moments and looks at what they leave behind.

    python -m tests.resolvers.kill_downloads STORE ENDPOINT BUCKET DIGEST ROUNDS

Every round forks a process that downloads the same adapter into an emptied store and kills it with
SIGKILL. One process with everything imported does all rounds, so a round takes as long as a
download.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from resolvers.s3 import S3Resolver
from resolvers.store import AdapterStore
from tests.resolvers.adapter_files import assert_whole, digest_of

PART = 64 << 10


def download(root: Path, endpoint: str, bucket: str) -> None:
    resolver = S3Resolver(
        AdapterStore(root),
        f"s3://{bucket}/team",
        endpoint_url=endpoint,
        region_name="us-east-1",
        download={"part_bytes": PART, "concurrency": 2},
    )
    assert asyncio.run(resolver.resolve_lora("base", "sql")) is not None


def fork_download(root: Path, endpoint: str, bucket: str) -> int:
    pid = os.fork()
    if pid == 0:
        download(root, endpoint, bucket)
        os._exit(0)
    return pid


def main(root: Path, endpoint: str, bucket: str, digest: str, rounds: int) -> int:
    """Return how many downloads were killed before they were complete."""
    started = time.monotonic()
    os.waitpid(fork_download(root, endpoint, bucket), 0)
    whole_s = time.monotonic() - started
    killed = 0
    for turn in range(rounds):
        shutil.rmtree(root / "adapters" / digest, ignore_errors=True)
        pid = fork_download(root, endpoint, bucket)
        # Evenly spread over the whole download, each time somewhere else.
        time.sleep(whole_s * (turn + random.random()) / rounds)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for path in (root / "adapters").iterdir():
            assert digest_of(path) == path.name == digest, "a half adapter is offered"
        killed += not (root / "adapters" / digest).exists()
        AdapterStore(root)
        assert_whole(root)
    started = time.monotonic()
    os.waitpid(fork_download(root, endpoint, bucket), 0)
    assert time.monotonic() - started < 5 * whole_s + 5, "something was stuck"
    assert digest_of(root / "adapters" / digest) == digest
    assert_whole(root)
    return killed


if __name__ == "__main__":
    store, endpoint_url, bucket_name, expected, num_rounds = sys.argv[1:]
    killed_early = main(Path(store), endpoint_url, bucket_name, expected, int(num_rounds))
    sys.stdout.write(str(killed_early))
