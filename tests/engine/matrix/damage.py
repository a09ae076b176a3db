"""What may happen to an adapter's files between PEFT and us: wrong edits, and flipped bits."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.lora.peft_fields import HARMLESS, HONOURED, OFF_ONLY
from tests.engine.matrix.edits import WEIGHTS

CONFIG = "adapter_config.json"
FIELDS = sorted(HONOURED) * 4 + sorted(HARMLESS | OFF_ONLY.keys())

Header = dict[str, dict[str, Any]]

_PLAIN: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 5, 0.5, 5.0, 16, "", "all", "none", "lora_only"),
    *("all-linear", "ALL-LINEAR", "gaussian", "pissa", "eva", "LORA", "CAUSAL_LM", "SEQ_CLS"),
    *([], {}, [0], [1], [0, 1], [5], [3, 4], [True], [None], ["layers"], ["layers", "h"], "layers"),
    *({"": 3}, ".*", "self_attn", ["self_attn"], ["mlp"], "0", ["0"], ["1.mlp"]),
)
# Other places and parts than a tensor's own.
_RENAMINGS = (
    *((".0.", ".1."), (".1.", ".0."), ("q_proj", "v_proj"), ("c_attn", "c_proj")),
    *(("lora_A", "lora_B"), ("lora_B", "lora_A"), ("base_model.model.", ""), (".weight", "")),
    *(("lora_A", "lora_A.default"), ("lora_B", "lora_B.other"), ("lora_", "lora_magnitude_")),
    *((".weight", ".bias"), ("lora_A.weight", "base_layer.weight"), ("self_attn", "mlp")),
)


class Damage:
    """Random damage to adapters for one base model, whose modules have these ``names``."""

    def __init__(self, names: list[str], chance: random.Random) -> None:
        self._names = names
        self._chance = chance

    def do(self, path: Path) -> list[str]:
        """Do something to the files; says what."""
        kinds: list[Callable[[Path], str]] = [self._edit_config] * 4
        kinds += [self._flip_config, self._flip_header, self._flip_weights, self._edit_header]
        return [self._chance.choice(kinds)(path) for _ in range(self._chance.choice((1, 1, 2)))]

    def _edit_config(self, path: Path) -> str:
        fields = json.loads((path / CONFIG).read_text())
        name = self._chance.choice(FIELDS)
        value = self._value(fields.get(name))
        (path / CONFIG).write_text(json.dumps({**fields, name: value}))
        return f"{name} = {value!r}"

    def _value(self, old: Any) -> Any:
        name = self._chance.choice(self._names)
        last = name.rpartition(".")[2]
        number = self._chance.choice((1, 2, 3, 7))
        near: list[Any] = [name, last, last[1:], name[6:], f".*{last}", rf".*\.1\..*{last}"]
        near += [[entry] for entry in near] + [{entry: number} for entry in near]
        if isinstance(old, list):
            near += [old[1:], old[:1], old[::-1], [*old, last]] * 4
        elif isinstance(old, dict):
            near += [{**old, last: number}, {last: number, **old}, dict(list(old.items())[1:])] * 4
        elif isinstance(old, int | float):
            near += [not old, old + 1, old * 2, float(old)] * 4
        return self._chance.choice([*near, *self._chance.sample(_PLAIN, 12)])

    def _flip_config(self, path: Path) -> str:
        return self._flip(path / CONFIG, 0, None)

    def _flip_header(self, path: Path) -> str:
        return self._flip(path / WEIGHTS, 0, _end_of_header(path))

    def _flip_weights(self, path: Path) -> str:
        return self._flip(path / WEIGHTS, _end_of_header(path), None)

    def _flip(self, file: Path, begin: int, end: int | None) -> str:
        data = bytearray(file.read_bytes())
        place, bit = self._chance.randrange(begin, end or len(data)), self._chance.randrange(8)
        data[place] ^= 1 << bit
        file.write_bytes(data)
        return f"bit {bit} of byte {place} of {file.name}"

    def _edit_header(self, path: Path) -> str:
        data, end = (path / WEIGHTS).read_bytes(), _end_of_header(path)
        # Damage that was done before may have left no header.
        header: Header = json.loads(data[8:end])
        key, other = self._chance.choices([key for key in header if key != "__metadata__"], k=2)
        old, new = self._chance.choice(_RENAMINGS)
        edit = self._chance.choice(("swap", "turn", "drop", "rename", "rename"))
        if edit == "swap":
            header[key], header[other] = header[other], header[key]
        elif edit == "turn":
            header[key]["shape"].reverse()
        else:
            entry = header.pop(key)
            if edit == "rename":
                header[key.replace(old, new, 1)] = entry
        text = json.dumps(header).encode()
        (path / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
        return f"{edit} {key} ({other}, {old} to {new})"


def _end_of_header(path: Path) -> int:
    with (path / WEIGHTS).open("rb") as file:
        length: int = struct.unpack("<Q", file.read(8))[0]
    return min(8 + length, (path / WEIGHTS).stat().st_size - 1)
