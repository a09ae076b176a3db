"""Small adapters on disk; what their weights mean is of no interest here."""

from pathlib import Path

from adapters import adapter_digest, find_adapter_files


def write_adapter(path: Path, weights: bytes = b"weights", config: bytes = b"{}") -> str:
    """Write an adapter's directory and return its digest."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_bytes(config)
    (path / "adapter_model.safetensors").write_bytes(weights)
    return digest_of(path)


def digest_of(path: Path) -> str:
    return adapter_digest(find_adapter_files(path))


def assert_whole(store: Path) -> None:
    """Everything that the store offers is complete, and nothing else is left."""
    for path in (store / "adapters").iterdir():
        assert digest_of(path) == path.name
    assert list((store / "staging").iterdir()) == []
    assert list((store / "locks").iterdir()) == []
