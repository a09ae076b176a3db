"""One S3 server for all tests of this directory, and a fresh bucket and proxy for each."""

import itertools
from collections.abc import Iterator

import pytest

from tests.resolvers.s3_server import CREDENTIALS, Bucket, FaultyProxy, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def bucket(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    bucket = Bucket(s3_port, f"adapters-{next(_numbers)}")
    bucket.create()
    return bucket


@pytest.fixture
def proxy(s3_port: int) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3_port).running() as proxy:
        yield proxy
