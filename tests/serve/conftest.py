"""One running demo server for all tests of this directory."""

import shutil
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from scripts.prepare_demo import MODEL_NAME, models_directory
from tests.serve.demo_server import CHECKOUT, free_port, serve_run, write_config

EXAMPLES = CHECKOUT / "examples" / "adapters"


@dataclass(frozen=True)
class DemoServer:
    """A running server, a directory whose adapters it may load, and how long it took to start."""

    url: str
    adapters: Path
    seconds_to_start: float

    def copy_adapter(self, source: str, directory: str) -> Path:
        """Put a copy of a demo adapter where the server may load it from."""
        target = self.adapters / directory
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(EXAMPLES / source, target)
        return target


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    if not (models_directory() / MODEL_NAME).is_dir():
        pytest.skip("no demo model: run make setup")
    root = tmp_path_factory.mktemp("serve")
    adapters = root / "adapters"
    adapters.mkdir()
    port = free_port()
    write_config(root / "config.yaml", port=port, state_dir=root / "state", adapters=adapters)
    began = time.monotonic()
    with serve_run(root / "config.yaml", root / "serve.log", port=port) as url:
        yield DemoServer(url, adapters, time.monotonic() - began)


@pytest.fixture
def client(demo_server: DemoServer) -> Iterator[openai.OpenAI]:
    """The official client, which reports the first failure instead of trying again."""
    with openai.OpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(demo_server: DemoServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The same for asyncio."""
    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client
