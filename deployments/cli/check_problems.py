"""Finds what else is wrong with an adapter that is refused.

A server stops at the first problem; who wants to mend an adapter needs all of them. What is wrong
with the first part is taken away, and the rest is looked at as if it were right. Knows nothing of
how problems are shown.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from adapters import CONFIG_FILE, LoRARequest, find_adapter_files, read_adapter
from deployments.model_profile import read_profile
from engine.adapter_check import check_adapter
from engine.config import LoRAConfig
from engine.errors import AdapterError, EngineError
from engine.lora.peft_config import parse_peft_config
from engine.lora.weight_files import read_weight_files

_PLAIN: dict[str, object] = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 8,
    "target_modules": ["q_proj"],
}
_MAX_RANK = 512


def find_problems(
    request: LoRARequest, model: Path, limits: LoRAConfig, first: str
) -> tuple[str, ...]:
    """Every problem of an adapter that is refused with the message ``first``, each once."""
    label = f"adapter {request.lora_name!r}"
    others = (
        *_config_problems(Path(request.lora_path)),
        *_weight_problems(Path(request.lora_path), limits),
        *_problems_at_any_rank(request, model, limits),
        *_profile_problems(Path(request.lora_path)),
    )
    problems = (first, *others)
    return tuple(dict.fromkeys(p if p.startswith(label) else f"{label}: {p}" for p in problems))


def _config_problems(adapter: Path) -> Iterator[str]:
    try:
        fields = json.loads((adapter / CONFIG_FILE).read_bytes())
    except (OSError, ValueError):
        return
    while isinstance(fields, dict) and (problem := _config_problem(fields)) is not None:
        yield problem
        # What the message names is the likeliest to be at fault.
        names = sorted(fields.keys() | _PLAIN.keys(), key=lambda name: name not in problem)
        mended = (_without(fields, name) for name in names)
        fields = next((other for other in mended if _config_problem(other) != problem), None)


def _config_problem(fields: Mapping[str, object]) -> str | None:
    try:
        parse_peft_config(fields)
    except AdapterError as error:
        return str(error)
    return None


def _without(fields: Mapping[str, object], name: str) -> dict[str, object]:
    others = {key: value for key, value in fields.items() if key != name}
    return others | {name: _PLAIN[name]} if name in _PLAIN else others


def _weight_problems(adapter: Path, limits: LoRAConfig) -> Iterator[str]:
    """Whether the weights can be read at all, whatever the configuration says of them."""
    try:
        content = read_adapter(find_adapter_files(adapter))
        read_weight_files(content.weights, allow_pickle=limits.allow_pickle)
    except AdapterError as error:
        yield str(error)
    except OSError:
        return


def _profile_problems(adapter: Path) -> Iterator[str]:
    try:
        read_profile(adapter)
    except AdapterError as error:
        yield str(error)


def _problems_at_any_rank(request: LoRARequest, model: Path, limits: LoRAConfig) -> Iterator[str]:
    try:
        check_adapter(request, model, replace(limits, max_lora_rank=_MAX_RANK))
    except EngineError as error:
        yield str(error)
