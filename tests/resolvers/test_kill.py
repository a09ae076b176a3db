"""kill -9 at any moment of a download leaves no half adapter and no stuck lock."""

import os
import random
import subprocess
import sys
from pathlib import Path

from tests.resolvers.adapter_files import write_adapter
from tests.resolvers.s3_server import CREDENTIALS, Bucket, FaultyProxy

ROUNDS = int(os.environ.get("LORAFLEET_TEST_KILLS", "8"))
CHECKOUT = Path(__file__).resolve().parents[2]


def test_killed_downloads_leave_nothing_behind(
    bucket: Bucket, proxy: FaultyProxy, tmp_path: Path
) -> None:
    weights = random.Random(0).randbytes(512 << 10)
    digest = write_adapter(tmp_path / "sql", weights)
    bucket.put_adapter("team/sql", weights)
    proxy.chunk_delay_s = 0.005
    command = [sys.executable, "-m", "tests.resolvers.kill_downloads"]
    arguments = [str(tmp_path / "store"), proxy.url, bucket.name, digest, str(ROUNDS)]
    result = subprocess.run(
        command + arguments,
        cwd=CHECKOUT,
        env=os.environ | CREDENTIALS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= ROUNDS // 2, "hardly a download was interrupted"
