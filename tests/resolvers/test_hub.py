"""Adapters come from the Hub only if they are allowed, of one commit, and as they are listed."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resolvers.base import (
    AdapterSourceInvalidError,
    ResolverConfigError,
    ResolverError,
    SourceForbiddenError,
    SourceUnavailableError,
)
from resolvers.hub import HubResolver
from resolvers.registry import build_link, check_entry, places
from resolvers.store import AdapterStore
from tests.resolvers.adapter_files import assert_whole, digest_of, write_adapter
from tests.resolvers.hub_server import Hub, hub_server

ONE, TWO = "1" * 40, "2" * 40
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
OTHERS = {**FILES, "adapter_model.safetensors": b"others!"}
INFO, CONTENT = "/api/models/", "/cdn/"

Make = Callable[..., HubResolver]


@pytest.fixture(scope="module")
def running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with hub_server(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads this when it is imported, maybe by a run of the tests without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(running_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setenv("HF_ENDPOINT", running_hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_hunter2")
    for name in ("requests", "faults"):
        (running_hub.root / name).unlink(missing_ok=True)
    return running_hub


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make(root: Path) -> Make:
    def make(*allowed: str, max_adapter_bytes: int = 1 << 20, **options: Any) -> HubResolver:
        store = AdapterStore(root, max_adapter_bytes=max_adapter_bytes)
        return HubResolver(store, allowed or ("acme",), attempts=2, **options)

    return make


@pytest.fixture
def digests(tmp_path: Path) -> tuple[str, str]:
    one = write_adapter(tmp_path / "one", FILES["adapter_model.safetensors"])
    return one, write_adapter(tmp_path / "two", OTHERS["adapter_model.safetensors"])


async def test_adapter_is_found_by_its_repository(
    hub: Hub, make: Make, root: Path, digests: tuple[str, str]
) -> None:
    hub.put("acme/sql", ONE, {**FILES, "README.md": b"r", "optimizer.pt": b"o"}, "main")
    found = await make().resolve_lora("base", "acme/sql")
    assert found is not None
    assert found.digest == digests[0] == digest_of(Path(found.lora_path))
    assert found.source_uri == f"hf://acme/sql@{ONE}"
    assert not any("README" in line or "optimizer" in line for line in hub.requests)
    assert_whole(root)


async def test_folder_of_a_repository_is_an_adapter(hub: Hub, make: Make) -> None:
    hub.put("acme/many", ONE, {f"v2/sql/{name}": data for name, data in FILES.items()}, "main")
    found = await make().resolve_lora("base", "acme/many/v2/sql")
    assert found is not None and found.source_uri == f"hf://acme/many/v2/sql@{ONE}"
    assert await make().resolve_lora("base", "acme/many") is None
    assert await make().resolve_lora("base", "acme/many/v2") is None


@pytest.mark.parametrize("name", ["evil/sql", "acme", "acme-corp/sql", "sql", "ACME/sql"])
async def test_hub_never_hears_of_names_that_are_not_allowed(
    hub: Hub, make: Make, name: str
) -> None:
    resolver = make("acme", "other/adapters")
    assert await resolver.resolve_lora("base", name) is None
    with pytest.raises(FileNotFoundError, match="not on the list"):
        await resolver.fetch(f"hf://{name}@{ONE}", "sql", None)
    assert hub.requests == []


async def test_single_repository_may_be_allowed(hub: Hub, make: Make) -> None:
    for name in ("one", "two"):
        hub.put(f"solo/{name}", ONE, FILES, "main")
    resolver = make("solo/one")
    assert await resolver.resolve_lora("base", "solo/one") is not None
    assert await resolver.resolve_lora("base", "solo/two") is None


async def test_repository_that_moved_to_another_owner_is_refused(hub: Hub, make: Make) -> None:
    hub.put("evil/moved", ONE, FILES, "main")
    hub.put("acme/moved", ONE, {"moved": b""}, "main")
    (hub.root / "acme" / "moved" / "moved").write_text("evil/moved")
    with pytest.raises(AdapterSourceInvalidError, match="has moved to evil/moved"):
        await make().resolve_lora("base", "acme/moved")


async def test_revision_is_pinned(hub: Hub, make: Make, digests: tuple[str, str]) -> None:
    hub.put("acme/pins", ONE, FILES, "v1", "main")
    hub.put("acme/pins", TWO, OTHERS, "main", "refs/pr/7")

    async def digest(name: str = "acme/pins", **options: Any) -> str | None:
        found = await make(**options).resolve_lora("base", name)
        return None if found is None else found.digest

    assert await digest() == digests[1]
    assert await digest(revision="v1") == digests[0]
    assert await digest(revision="v1", revisions={"acme/pins": "refs/pr/7"}) == digests[1]
    assert await digest(revisions={"acme/pins": ONE}) == digests[0]
    found = await make(revision="v1").fetch("hf://acme/pins@main", "sql", None)
    assert found.digest == digests[1]
    with pytest.raises(AdapterSourceInvalidError, match="no such revision"):
        await digest(revision="v9")


async def test_registered_bytes_or_none(hub: Hub, make: Make, digests: tuple[str, str]) -> None:
    hub.put("acme/fixed", ONE, FILES, "main")
    assert (await make().fetch("hf://acme/fixed", "sql", digests[0])).digest == digests[0]
    hub.put("acme/fixed", TWO, OTHERS, "main")
    assert (await make().fetch(f"hf://acme/fixed@{ONE}", "sql", digests[0])).digest == digests[0]
    with pytest.raises(AdapterSourceInvalidError, match="changed: its content is sha256"):
        await make().fetch("hf://acme/fixed", "sql", digests[0])


async def test_concurrent_downloads_are_one(hub: Hub, make: Make, root: Path) -> None:
    hub.put("acme/burst", ONE, FILES, "main")
    await asyncio.gather(*(make().resolve_lora("base", "acme/burst") for _ in range(5)))
    assert len([line for line in hub.requests if CONTENT in line]) == len(FILES)
    assert_whole(root)


async def test_token_goes_to_the_hub_alone(hub: Hub, make: Make) -> None:
    hub.put("acme/token", ONE, FILES, "main")
    assert await make().resolve_lora("base", "acme/token") is not None
    for line in hub.requests:
        assert line.endswith("anonymous" if CONTENT in line else "Bearer hf_hunter2")
    (hub.root / "requests").unlink()
    hub.put("acme/token", TWO, FILES, "main")
    assert await make(anonymous=True).resolve_lora("base", "acme/token") is not None
    assert hub.requests and all(line.endswith("anonymous") for line in hub.requests)


PASSING: dict[str, dict[str, Any]] = {
    "500": {"match": INFO, "status": 500},
    "503 for a file": {"match": CONTENT, "status": 503},
    "429": {"match": INFO, "status": 429},
    "listing truncated": {"match": INFO, "keep": 20},
    "file truncated": {"match": CONTENT, "keep": 1},
    "bit flipped": {"match": "safetensors", "flip": True},
    "bit of a small file flipped": {"match": "/cdn/acme/faults/" + ONE + "/adapter_c", "flip": 1},
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
async def test_what_passes_by_itself_is_not_noticed(
    hub: Hub, make: Make, root: Path, digests: tuple[str, str], fault: dict[str, Any]
) -> None:
    hub.put("acme/faults", ONE, FILES, "main")
    hub.fail(**fault)
    found = await make().resolve_lora("base", "acme/faults")
    assert (hub.root / "faults").read_text() == ""
    assert found is not None and found.digest == digests[0]
    assert_whole(root)


LASTING: dict[str, tuple[dict[str, Any], type[ResolverError], str]] = {
    "401": ({"match": INFO, "status": 403}, SourceForbiddenError, "refused the request: 403"),
    "403 for a file": ({"match": "/resolve/", "status": 403}, SourceForbiddenError, "403"),
    "gated": (
        {"match": INFO, "status": 403, "headers": {"X-Error-Code": "GatedRepo"}},
        SourceForbiddenError,
        "is gated or disabled",
    ),
    "500": ({"match": INFO, "status": 500}, SourceUnavailableError, "cannot be reached: 500"),
    "truncated": ({"match": CONTENT, "keep": 1}, SourceUnavailableError, "cannot be reached"),
    "always other bytes": (
        {"match": "safetensors", "flip": True},
        SourceUnavailableError,
        "keeps arriving damaged: adapter_model.safetensors is not what is listed",
    ),
}


@pytest.mark.parametrize(("fault", "error", "message"), LASTING.values(), ids=LASTING.keys())
async def test_what_lasts_is_told_without_secrets_and_leaves_the_store_whole(
    hub: Hub,
    make: Make,
    root: Path,
    fault: dict[str, Any],
    error: type[ResolverError],
    message: str,
) -> None:
    hub.put("acme/broken", ONE, FILES, "main")
    hub.fail(**fault, times=9)
    with pytest.raises(error, match=message) as caught:
        await make().resolve_lora("base", "acme/broken")
    assert str(caught.value).startswith("hf://acme/broken@main")
    for secret in ("secret", "hunter2", "http://"):
        assert secret not in str(caught.value)
    assert_whole(root)
    assert list((root / "adapters").iterdir()) == []
    (hub.root / "faults").unlink()
    assert await make().resolve_lora("base", "acme/broken") is not None


async def test_hub_says_when_to_come_back(hub: Hub, make: Make) -> None:
    hub.put("acme/busy", ONE, FILES, "main")
    hub.fail(INFO, times=9, status=429, headers={"Retry-After": "17"})
    with pytest.raises(SourceUnavailableError) as caught:
        await make().resolve_lora("base", "acme/busy")
    assert caught.value.retry_after_s == 17


async def test_hub_that_is_not_there_is_unavailable(make: Make) -> None:
    with pytest.raises(SourceUnavailableError, match="cannot be reached: ConnectError"):
        await make(endpoint="http://127.0.0.1:9").resolve_lora("base", "acme/sql")


async def test_unknown_names_and_incomplete_adapters_are_told_apart(hub: Hub, make: Make) -> None:
    assert await make().resolve_lora("base", "acme/nothing") is None
    assert await make().resolve_lora("base", "acme/no--such") is None
    hub.put("acme/model", ONE, {"model.safetensors": b"m"}, "main")
    assert await make().resolve_lora("base", "acme/model") is None
    hub.put("acme/half", ONE, {"adapter_config.json": b"{}"}, "main")
    with pytest.raises(AdapterSourceInvalidError, match=r"no adapter_model\.safetensors"):
        await make().resolve_lora("base", "acme/half")


async def test_sizes_are_bounded_before_anything_is_downloaded(hub: Hub, make: Make) -> None:
    hub.put("acme/huge", ONE, {**FILES, "adapter_model.safetensors": b"w" * 2000}, "main")
    with pytest.raises(AdapterSourceInvalidError, match="more than an adapter may take: 1000"):
        await make(max_adapter_bytes=1000).resolve_lora("base", "acme/huge")
    assert not any("resolve" in line for line in hub.requests)


@pytest.mark.parametrize("allowed", ["acme", ["../x"], ["a/b/c"], ["acme/*"], [""]])
def test_nonsense_is_refused_at_start(root: Path, allowed: Any) -> None:
    with pytest.raises(ResolverConfigError, match="allowed must list organisations"):
        HubResolver(AdapterStore(root), allowed)


def test_hub_is_a_built_in_resolver_that_must_be_asked_for(root: Path) -> None:
    entry = {"name": "lora_hf_hub_resolver", "allowed": ["acme", "other/sql"]}
    check_entry(entry)
    link = build_link(entry, AdapterStore(root))
    assert (link.name, type(link.resolver), link.timeout_s) == ("hub", HubResolver, 120)
    assert places(entry) == ["hf://acme", "hf://other/sql"]
    with pytest.raises(ResolverConfigError, match="missing a required argument: 'allowed'"):
        check_entry({"name": "hub"})
