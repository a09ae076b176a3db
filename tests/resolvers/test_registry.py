"""Resolvers are found by name, installed or built in, and built as configured."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from adapters import LoRARequest
from resolvers.base import ResolverConfigError
from resolvers.chain import ResolverChain
from resolvers.filesystem import FilesystemResolver
from resolvers.registry import build_link, check_entry, order_entries
from resolvers.s3 import S3Resolver
from resolvers.store import AdapterStore
from tests.resolvers.adapter_files import digest_of, write_adapter

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "http_resolver"


class Custom:
    def __init__(self, answer: str = "") -> None:
        self.answer = answer

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        return None


class Picky(Custom):
    def __init__(self, port: int) -> None:
        raise ValueError(f"port {port} is taken")


@pytest.fixture
def store(tmp_path: Path) -> AdapterStore:
    return AdapterStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("entry", "kind", "timeout_s"),
    [
        ({"name": "filesystem", "directories": ["/a"]}, FilesystemResolver, 30),
        ({"name": "lora_filesystem_resolver", "directories": ["/a"]}, FilesystemResolver, 30),
        ({"name": "s3", "uri": "s3://bucket/p"}, S3Resolver, 120),
        ({"name": "s3", "uri": "s3://bucket/p", "timeout_s": 5}, S3Resolver, 5),
    ],
)
def test_built_in_resolvers_have_a_name(
    store: AdapterStore, entry: dict[str, Any], kind: type, timeout_s: float
) -> None:
    check_entry(entry)
    link = build_link(entry, store)
    assert isinstance(link.resolver, kind)
    assert link.timeout_s == timeout_s


@pytest.mark.parametrize("separator", [".", ":"])
def test_dotted_path_names_a_class(store: AdapterStore, separator: str) -> None:
    name = f"{__name__}{separator}Custom"
    sys.modules.setdefault(__name__, sys.modules[Custom.__module__])
    link = build_link({"name": name, "answer": "yes"}, store)
    assert getattr(link.resolver, "answer", None) == "yes"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "needs a name"),
        ({"name": 3}, "needs a name"),
        ({"name": "ftp"}, "no resolver is called 'ftp'; there are filesystem, s3"),
        ({"name": "no.such.module"}, "cannot be imported"),
        ({"name": "resolvers.s3.NoSuchClass"}, "cannot be imported"),
        ({"name": "resolvers.s3.NAME_FIELD"}, "is not a class"),
        ({"name": "s3"}, "missing a required argument: 'uri'"),
        ({"name": "s3", "uri": "s3://b/p", "bucket": "b"}, "unexpected keyword argument 'bucket'"),
        ({"name": "s3", "uri": "s3://b/p", "store": "mine"}, "'store' cannot be configured"),
        ({"name": "s3", "uri": "s3://b/p", "timeout_s": 0}, "timeout_s must be positive"),
        ({"name": "s3", "uri": "s3://b/p", "timeout_s": "long"}, "timeout_s must be positive"),
    ],
)
def test_nonsense_is_refused_before_anything_is_built(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ResolverConfigError, match=message):
        check_entry(entry)


def test_what_a_constructor_says_names_the_resolver(store: AdapterStore) -> None:
    sys.modules.setdefault(__name__, sys.modules[Custom.__module__])
    with pytest.raises(ResolverConfigError, match=r"Picky': port 1 is taken"):
        build_link({"name": f"{__name__}.Picky", "port": 1}, store)


def test_order_selects_and_sorts() -> None:
    entries: list[dict[str, Any]] = [{"name": "filesystem"}, {"name": "s3", "uri": "a"}]
    assert order_entries(entries, None) == entries
    assert order_entries(entries, ["lora_s3_resolver", "filesystem"]) == entries[::-1]
    assert order_entries(entries, ["other"]) == order_entries(entries, []) == []


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web_server(tmp_path: Path) -> Iterator[str]:
    handler = partial(QuietHandler, directory=str(tmp_path / "www"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def test_example_plugin_is_found_once_it_is_installed(
    tmp_path: Path, web_server: str, store: AdapterStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"name": "http", "base_url": web_server}
    with pytest.raises(ResolverConfigError, match="no resolver is called 'http'"):
        check_entry(entry)
    install(EXAMPLE, tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    check_entry(entry)
    chain = ResolverChain([build_link(entry, store)])
    digest = write_adapter(tmp_path / "www" / "team" / "sql")
    found = await chain.resolve_lora("base", "team/sql")
    assert found is not None and digest_of(Path(found.lora_path)) == digest
    assert await chain.resolve_lora("base", "team") is None


def install(project: Path, target: Path) -> None:
    """As pip does it, without a network: the build leaves nothing in the checkout."""
    source = shutil.copytree(project, target.parent / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(pip, check=True, capture_output=True, text=True)
