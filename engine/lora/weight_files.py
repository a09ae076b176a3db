"""Reads the tensors of an adapter's weight files from memory, trusting nothing in them.

Knows file formats: safetensors, its shard index, and torch's zip pickles. Knows nothing of LoRA.
"""

import io
import json
import math
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeGuard

import torch

from adapters import PICKLE_WEIGHTS_FILE, WEIGHTS_INDEX_FILE
from engine.errors import InvalidAdapterError, UnsupportedAdapterError

# 2000 tensors need about 250 kB; the rest is room for more of them and for long names.
MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 1 << 16

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a file: its shape is known, its values are read by ``load``."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]


def read_weight_files(
    files: Mapping[str, bytearray], *, allow_pickle: bool
) -> dict[str, StoredTensor]:
    """All tensors of an adapter's weight files, by key."""
    if PICKLE_WEIGHTS_FILE in files:
        if not allow_pickle:
            raise UnsupportedAdapterError(
                f"{PICKLE_WEIGHTS_FILE} is a pickle; convert it to adapter_model.safetensors, or "
                "set allow_pickle"
            )
        return _read_pickle(files[PICKLE_WEIGHTS_FILE])
    tensors: dict[str, StoredTensor] = {}
    for name, data in files.items():
        if name == WEIGHTS_INDEX_FILE:
            continue
        for key, tensor in read_safetensors(name, data).items():
            if key in tensors:
                _invalid(name, f"tensor {_shown(key)} is also in {tensors[key].file}")
            tensors[key] = tensor
    if WEIGHTS_INDEX_FILE in files:
        _check_index(files[WEIGHTS_INDEX_FILE], tensors, files.keys() - {WEIGHTS_INDEX_FILE})
    return tensors


def stored_keys(path: Path) -> tuple[str, ...]:
    """The keys of a safetensors file by its header alone, () when that cannot be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= MAX_HEADER_BYTES else b""
    try:
        entries = _parse_json(path.name, header)
    except InvalidAdapterError:
        return ()
    return tuple(entries) if isinstance(entries, dict) else ()


def read_safetensors(file: str, data: bytearray) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file held in ``data``, sharing its memory."""
    header, start = _read_header(file, data)
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int]] = []
    for key, entry in header.items():
        dtype, shape, begin, end = _parse_entry(file, key, entry)
        spans.append((begin, end))
        tensors[key] = StoredTensor(
            file, shape, dtype, _safetensors_loader(data, start + begin, start + end, dtype, shape)
        )
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            _invalid(file, "its tensors overlap or leave gaps")
        position = end
    if start + position != len(data):
        _invalid(
            file,
            f"is {len(data)} bytes long where its header describes {start + position}: truncated "
            "or damaged",
        )
    return tensors


def _read_header(file: str, data: bytearray) -> tuple[dict[str, object], int]:
    if len(data) < 8:
        _invalid(file, f"is {len(data)} bytes long, too short for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        _invalid(file, f"claims a header of {length} bytes, more than {MAX_HEADER_BYTES}")
    if length > len(data) - 8:
        _invalid(file, f"claims a header of {length} bytes in {len(data)}: truncated or damaged")
    header = _parse_json(file, bytes(data[8 : 8 + length]))
    if not isinstance(header, dict):
        _invalid(file, "has a header that is not a JSON object")
    if len(header) > MAX_TENSORS:
        _invalid(file, f"describes {len(header)} tensors, more than {MAX_TENSORS}")
    return header, 8 + length


def _parse_entry(
    file: str, key: str, entry: object
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    if not isinstance(entry, dict):
        _invalid(file, f"describes tensor {_shown(key)} by something that is not an object")
    name, shape, offsets = (entry.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(name, str) or name not in _DTYPES:
        raise UnsupportedAdapterError(
            f"{file}: tensor {_shown(key)} has dtype {_shown(name)}; served are "
            f"{', '.join(_DTYPES)}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        _invalid(file, f"describes tensor {_shown(key)} with a damaged shape or offsets")
    begin, end = offsets
    dtype = _DTYPES[name]
    if end - begin != math.prod(shape) * dtype.itemsize:
        _invalid(file, f"gives tensor {_shown(key)} {end - begin} bytes for shape {shape}")
    return dtype, tuple(shape), begin, end


def _safetensors_loader(
    data: bytearray, begin: int, end: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    def load() -> torch.Tensor:
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if begin % dtype.itemsize:
            return torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).view(shape)
        count = (end - begin) // dtype.itemsize
        return torch.frombuffer(data, dtype=dtype, count=count, offset=begin).view(shape)

    return load


def _check_index(data: bytearray, tensors: Mapping[str, StoredTensor], shards: set[str]) -> None:
    """The index must place every tensor in the shard that holds it, and use every shard."""
    index = _parse_json(WEIGHTS_INDEX_FILE, bytes(data))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        _invalid(WEIGHTS_INDEX_FILE, "has no weight_map object")
    for key, shard in weight_map.items():
        if key not in tensors or tensors[key].file != shard:
            _invalid(
                WEIGHTS_INDEX_FILE, f"places {_shown(key)} in {_shown(shard)}, not found there"
            )
    for key in tensors:
        if key not in weight_map:
            _invalid(WEIGHTS_INDEX_FILE, f"does not list {_shown(key)} of {tensors[key].file}")
    if unused := shards - set(weight_map.values()):
        _invalid(WEIGHTS_INDEX_FILE, f"does not use the shard {min(unused)}")


def _read_pickle(data: bytearray) -> dict[str, StoredTensor]:
    _check_zip(data)
    try:
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    # Damaged pickles raise nearly every exception there is, and none of them is documented.
    except Exception as error:  # noqa: BLE001
        _invalid(PICKLE_WEIGHTS_FILE, f"cannot be loaded: {_shown(str(error))}")
    if not isinstance(state, dict):
        _invalid(PICKLE_WEIGHTS_FILE, "does not hold a dictionary of tensors")
    return {key: _pickled_tensor(key, value) for key, value in state.items()}


def _check_zip(data: bytearray) -> None:
    """Refuse what could unpack to more memory than the file itself takes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        _invalid(PICKLE_WEIGHTS_FILE, f"is not a file that torch.save writes today: {error}")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        _invalid(PICKLE_WEIGHTS_FILE, "holds compressed members, which torch.save never writes")
    if sum(member.file_size for member in members) > len(data):
        _invalid(PICKLE_WEIGHTS_FILE, "unpacks to more bytes than it has")


def _pickled_tensor(key: object, value: object) -> StoredTensor:
    if not isinstance(key, str) or type(value) is not torch.Tensor:
        _invalid(PICKLE_WEIGHTS_FILE, f"holds {_shown(key)}, which is not a named plain tensor")
    if value.layout is not torch.strided or value.dtype not in _DTYPES.values() or value.is_meta:
        raise UnsupportedAdapterError(
            f"{PICKLE_WEIGHTS_FILE}: tensor {_shown(key)} is {value.dtype}, {value.layout}; served "
            f"are dense {', '.join(_DTYPES)}"
        )
    return StoredTensor(PICKLE_WEIGHTS_FILE, tuple(value.shape), value.dtype, lambda: value)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _parse_json(file: str, data: bytes) -> object:
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(f"{file}: damaged JSON: {_shown(str(error))}") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _invalid(file: str, what: str) -> NoReturn:
    raise InvalidAdapterError(f"{file}: {what}")
