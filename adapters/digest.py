"""Which files make an adapter, and the SHA-256 that identifies their content."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
WEIGHTS_INDEX_FILE = "adapter_model.safetensors.index.json"
PICKLE_WEIGHTS_FILE = "adapter_model.bin"

# Files beside config and weights that change how the adapter answers.
OPTIONAL_FILES = (
    "adapter.yaml",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of one adapter directory that affect what it serves, relative, sorted."""

    root: Path
    config: Path
    weights: tuple[Path, ...]
    extra: tuple[Path, ...]

    @property
    def all(self) -> tuple[Path, ...]:
        return tuple(sorted((self.config, *self.weights, *self.extra)))

    @property
    def size_bytes(self) -> int:
        return sum((self.root / path).stat().st_size for path in self.all)


def find_adapter_files(root: Path) -> AdapterFiles:
    """List the files of an adapter directory.

    Raises FileNotFoundError naming what is missing, PermissionError for a file that is a link
    leading out of ``root``.
    """
    config = _contained(root, Path(CONFIG_FILE))
    weights = _weight_files(root)
    extra = tuple(Path(name) for name in OPTIONAL_FILES if (root / name).is_file())
    for path in (*weights, *extra):
        _contained(root, path)
    return AdapterFiles(root=root, config=config, weights=weights, extra=extra)


def adapter_digest(files: AdapterFiles) -> str:
    """SHA-256, hex, over names, sizes and content of the adapter's files in sorted order."""
    digest = hashlib.sha256(b"lorafleet-adapter-v1\0")
    for path in files.all:
        full = files.root / path
        name = path.as_posix().encode()
        digest.update(len(name).to_bytes(4, "big") + name)
        digest.update(full.stat().st_size.to_bytes(8, "big"))
        with full.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _weight_files(root: Path) -> tuple[Path, ...]:
    if (root / WEIGHTS_FILE).is_file():
        return (Path(WEIGHTS_FILE),)
    if (root / WEIGHTS_INDEX_FILE).is_file():
        shards = sorted(path.name for path in root.glob("adapter_model-*-of-*.safetensors"))
        return (Path(WEIGHTS_INDEX_FILE), *map(Path, shards))
    if (root / PICKLE_WEIGHTS_FILE).is_file():
        return (Path(PICKLE_WEIGHTS_FILE),)
    raise FileNotFoundError(f"no {WEIGHTS_FILE} in {root}")


def _contained(root: Path, path: Path) -> Path:
    full = root / path
    if not full.is_file():
        raise FileNotFoundError(f"no {path} in {root}")
    if not full.resolve().is_relative_to(root.resolve()):
        raise PermissionError(f"{path} in {root} is a link that leaves the directory")
    return path
