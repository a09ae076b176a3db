"""The block sizes of one class of GPU: what they are, where they are kept, and what is accepted.

A table is a JSON file under ``kernels/tuned``, named after its class. It is written by
``python -m kernels.tune`` and read once per process, whole or not at all: a table with a wrong or a
missing entry is refused by name. Knows nothing of kernels or of timing.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TUNED = Path(__file__).parent / "tuned"
# What a class without a table of its own uses: the least demanding GPU of its vendor.
_FALLBACKS = {"cuda": "sm_80", "hip": "gfx942"}
_MAX_WARPS = 16
_MAX_STAGES = 8
_MAX_BLOCK = 16384
# The matrix units' operands have at least this many rows.
_MIN_MATRIX_ROWS = 16
_HEAD_SIZES = ("16", "32", "64", "128", "256")


class TuningTableError(ValueError):
    """A table that cannot be used, with the entry that is wrong."""


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Elements that one program of an elementwise kernel holds."""

    block: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class LoRARowsConfig:
    """A LoRA kernel's program for one token: dot products on the vector units.

    `block_rank` x `block_features` weights are in flight at once.
    """

    block_rank: int
    block_features: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class LoRATilesConfig:
    """A LoRA kernel's program for up to `block_tokens` tokens of one segment: matrix units."""

    block_tokens: int
    block_rank: int
    block_features: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Query rows (token x head) and context positions that an attention program holds."""

    block_rows: int
    block_context: int
    num_warps: int
    num_stages: int


Config = BlockConfig | LoRARowsConfig | LoRATilesConfig | AttentionConfig

# Every family of kernels: the type of its rows, and their names. `kernels.tuning` chooses among
# the rows; attention's are the head size padded to a power of two. Over an fp8 cache it has rows of
# its own, since decoding takes registers.
FAMILIES: dict[str, tuple[type[Config], tuple[str, ...]]] = {
    "store_kv": (BlockConfig, ("all",)),
    "rms_norm": (BlockConfig, ("narrow", "wide", "widest")),
    "silu_and_mul": (BlockConfig, ("all",)),
    "sample_tokens": (BlockConfig, ("all",)),
    "shrink_rows": (LoRARowsConfig, ("few", "many")),
    "expand_rows": (LoRARowsConfig, ("few", "many")),
    "shrink_tiles": (LoRATilesConfig, ("short", "long")),
    "expand_tiles": (LoRATilesConfig, ("short", "long")),
    "decode": (AttentionConfig, _HEAD_SIZES),
    "prefill_short": (AttentionConfig, _HEAD_SIZES),
    "prefill_long": (AttentionConfig, _HEAD_SIZES),
    "decode_fp8": (AttentionConfig, _HEAD_SIZES),
    "prefill_fp8": (AttentionConfig, _HEAD_SIZES),
}


@dataclass(frozen=True, slots=True)
class TuningTable:
    """All rows of one device class; `source` says how they were found."""

    device_class: str
    source: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, Config]]

    def row(self, family: str, name: str) -> Any:
        """Return one row; its type is the family's."""
        return self.configs[family][name]

    def replaced(self, family: str, name: str, config: Config) -> "TuningTable":
        """Return the table with one other row."""
        rows = {**self.configs[family], name: config}
        return dataclasses.replace(self, configs={**self.configs, family: rows})

    def as_json(self) -> str:
        """Return what `parse_table` reads."""
        configs = {
            family: {name: dataclasses.asdict(config) for name, config in rows.items()}
            for family, rows in self.configs.items()
        }
        document = {
            "device_class": self.device_class,
            "source": dict(self.source),
            "configs": configs,
        }
        return json.dumps(document, indent=1) + "\n"


def known_classes() -> list[str]:
    """Return the device classes that have a table."""
    return sorted(path.stem for path in TUNED.glob("*.json"))


def table_path(device_class: str) -> Path:
    """Return where the class's table is kept."""
    return TUNED / f"{device_class}.json"


@functools.cache
def load_table(device_class: str) -> TuningTable:
    """Read the class's own table. Raises TuningTableError for one that cannot be used."""
    path = table_path(device_class)
    try:
        text = path.read_text()
    except OSError as error:
        raise TuningTableError(f"no tuning table for {device_class}: {error}") from error
    table = parse_table(text, path.name)
    if table.device_class != device_class:
        raise TuningTableError(f"{path.name} is the table of {table.device_class!r}")
    return table


def table_for(backend: str, arch: int | str) -> TuningTable:
    """Return the table for a target as Triton names it: its class's, else its vendor's fallback."""
    device_class = f"sm_{arch}" if backend == "cuda" else str(arch).partition(":")[0]
    if not table_path(device_class).is_file():
        device_class = _FALLBACKS[backend]
    return load_table(device_class)


def parse_table(text: str, name: str) -> TuningTable:
    """Read and check a table; `name` is what messages call it."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise TuningTableError(f"{name} is not JSON: {error}") from error
    _check_keys(document, {"device_class", "source", "configs"}, name)
    _check_keys(document["configs"], FAMILIES, f"{name}: configs")
    if not isinstance(document["device_class"], str) or not isinstance(document["source"], dict):
        raise TuningTableError(f"{name}: device_class must be a string and source an object")
    configs: dict[str, dict[str, Config]] = {}
    for family, (kind, names) in FAMILIES.items():
        rows = document["configs"][family]
        _check_keys(rows, names, f"{name}: {family}")
        configs[family] = {
            row: _config(kind, rows[row], f"{name}: {family}[{row}]") for row in names
        }
    return TuningTable(document["device_class"], document["source"], configs)


def _check_keys(found: Any, expected: Any, where: str) -> None:
    if not isinstance(found, dict):
        raise TuningTableError(f"{where} is not an object")
    missing, unknown = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing or unknown:
        raise TuningTableError(f"{where}: missing {missing}, unknown {unknown}")


def _config(kind: type[Config], values: Any, where: str) -> Config:
    fields = [field.name for field in dataclasses.fields(kind)]
    _check_keys(values, fields, where)
    for field in fields:
        least, most = _bounds(kind, field)
        value = values[field]
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:
            raise TuningTableError(f"{where}: {field} must be in {least}..{most}, got {value!r}")
        if field != "num_stages" and value & (value - 1):
            raise TuningTableError(f"{where}: {field} must be a power of two, got {value}")
    return kind(**values)


def _bounds(kind: type[Config], field: str) -> tuple[int, int]:
    if field == "num_warps":
        return 1, _MAX_WARPS
    if field == "num_stages":
        return 1, _MAX_STAGES
    on_matrix_units = kind in (LoRATilesConfig, AttentionConfig)
    return (_MIN_MATRIX_ROWS if on_matrix_units else 1), _MAX_BLOCK
