"""Decides which modules an adapter changes, and with which rank and scaling, by PEFT's rules.

Knows PEFT's name matching. Knows nothing of tensors or files.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora import regex_worker
from engine.lora.peft_config import ALL_LINEAR, PeftLoRAConfig
from engine.lora.regex_worker import How
from engine.lora.targets import ModelTargets, TargetKind

# PEFT takes the first numbered segment that has two segments before it and one after it.
_ANY_LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")

# Without groups, alternatives and quantifiers an expression matches in linear time.
_LINEAR_TIME = re.compile(r"[\w.^$\\-]*", re.ASCII)

# More of them take a while, which a process can be stopped in.
_MAX_PATTERNS_AT_HAND = 1000

# Starting the process takes about 30 ms; a sane expression needs microseconds.
_REGEX_TIMEOUT_S = 10.0

_ALL_LINEAR_KINDS = (TargetKind.LINEAR, TargetKind.CONV1D)

_Value = TypeVar("_Value", int, float)


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """What the configuration says about one module that it targets."""

    rank: int
    scaling: float


def plan_modules(config: PeftLoRAConfig, targets: ModelTargets) -> dict[str, ModulePlan]:
    """Every module of the base model that the adapter targets, in the model's order."""
    names = _targeted_names(config, targets)
    if not names:
        raise InvalidAdapterError(
            f"target_modules {_shown(config.target_modules)} match no module of the base model "
            f"{targets.base_model}, which has {_shown(_last_segments(targets))}"
        )
    for name in names:
        if targets[name].kind in (TargetKind.NORM, TargetKind.OTHER):
            raise UnsupportedAdapterError(
                f"target_modules name {name!r}, {targets[name].kind.value}, which is not served"
            )
    ranks = _pattern_values("rank_pattern", config.rank_pattern, names, config.rank)
    alphas = _pattern_values("alpha_pattern", config.alpha_pattern, names, config.alpha)
    return {
        name: ModulePlan(rank=rank, scaling=config.scaling(rank, alpha))
        for name, rank, alpha in zip(names, ranks, alphas, strict=True)
    }


def unmatched_targets(config: PeftLoRAConfig, targets: ModelTargets) -> tuple[str, ...]:
    """Entries of a target_modules list that fit no module; PEFT ignores them."""
    if isinstance(config.target_modules, str):
        return ()
    suffixes = {suffix for name in targets for suffix in _suffixes(name)}
    return tuple(entry for entry in config.target_modules if entry not in suffixes)


def _targeted_names(config: PeftLoRAConfig, targets: ModelTargets) -> list[str]:
    names = list(targets)
    excluded = _matching(config.exclude_modules, names, "exclude_modules")
    if isinstance(config.target_modules, tuple):
        chosen = _listed(config, names)
    elif config.target_modules.lower() == ALL_LINEAR:
        chosen = {name for name in names if targets[name].kind in _ALL_LINEAR_KINDS}
    else:
        chosen = _matching(config.target_modules, names, "target_modules")
    saved = tuple(config.modules_to_save)
    return [
        name
        for name in names
        if name in chosen and name not in excluded and not _is_saved(name, saved)
    ]


def _is_saved(name: str, saved: tuple[str, ...]) -> bool:
    """Whether PEFT trains the module, or one that contains it, as a whole."""
    segments = name.split(".")
    above = [".".join(segments[:end]) for end in range(1, len(segments) + 1)]
    return any(path == entry or path.endswith("." + entry) for path in above for entry in saved)


def _listed(config: PeftLoRAConfig, names: list[str]) -> set[str]:
    """Names that a target_modules list chooses; a full name in it overrules layers_to_transform."""
    entries = set(config.target_modules)
    matched = _matching(tuple(entries), names, "target_modules")
    if not config.layers_to_transform:
        return matched
    indices = _layer_indices(config.layers_pattern, names)
    return {
        name
        for name, index in zip(names, indices, strict=True)
        if name in matched and (name in entries or index in config.layers_to_transform)
    }


def _matching(rule: str | tuple[str, ...], names: list[str], field: str) -> set[str]:
    if not rule:
        return set()
    if isinstance(rule, tuple):
        entries = set(rule)
        return {name for name in names if not entries.isdisjoint(_suffixes(name))}
    (found,) = _match(field, "fullmatch", "{}", [rule], names)
    return {name for name, match in zip(names, found, strict=True) if match is not None}


def _layer_indices(patterns: tuple[str, ...], names: list[str]) -> list[int | None]:
    if not patterns:
        matches = (_ANY_LAYER.match(name) for name in names)
        return [int(match["idx"]) if match else None for match in matches]
    template = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
    found = _match("layers_pattern", "match", template, list(patterns), names)
    first = (next(filter(None, indices), None) for indices in zip(*found, strict=True))
    return [None if index is None else int(index) for index in first]


def _pattern_values(
    field: str, pattern: tuple[tuple[str, _Value], ...], names: list[str], default: _Value
) -> list[_Value]:
    """The value of the first pattern that ends each name, or the default."""
    keys = [key for key, _ in pattern]
    found = _match(field, "match", r"(.*\.)?({})$", keys, names)
    values = [default] * len(names)
    for (_, value), matches in reversed(list(zip(pattern, found, strict=True))):
        values = [
            old if match is None else value for old, match in zip(values, matches, strict=True)
        ]
    return values


def _match(
    field: str, how: How, template: str, patterns: list[str], names: list[str]
) -> list[list[str | None]]:
    regexes = [(how, template.replace("{}", pattern)) for pattern in patterns]
    is_quick = len(patterns) <= _MAX_PATTERNS_AT_HAND
    if is_quick and all(_LINEAR_TIME.fullmatch(pattern) for pattern in patterns):
        try:
            return regex_worker.match_names(regexes, names)
        except re.error as error:
            raise _bad_regex(field, str(error)) from error
    return _match_in_process(field, regexes, names)


def _match_in_process(
    field: str, regexes: list[tuple[How, str]], names: list[str]
) -> list[list[str | None]]:
    command = [sys.executable, "-I", "-S", str(Path(regex_worker.__file__))]
    try:
        done = subprocess.run(
            command,
            input=json.dumps([regexes, names]).encode(),
            capture_output=True,
            timeout=_REGEX_TIMEOUT_S,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise _bad_regex(field, f"takes longer than {_REGEX_TIMEOUT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise _bad_regex(field, "cannot be evaluated") from error
    answer = json.loads(done.stdout)
    if isinstance(answer, dict):
        raise _bad_regex(field, answer["error"])
    matches: list[list[str | None]] = answer
    return matches


def _bad_regex(field: str, reason: str) -> InvalidAdapterError:
    return InvalidAdapterError(
        f"adapter_config.json: {field} holds a regular expression that is not usable: {reason}"
    )


def _suffixes(name: str) -> set[str]:
    segments = name.split(".")
    return {".".join(segments[start:]) for start in range(len(segments))}


def _last_segments(targets: ModelTargets) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in targets))


def _shown(names: str | tuple[str, ...]) -> str:
    text = ascii(names) if isinstance(names, str) else ", ".join(map(ascii, names))
    return text if len(text) <= 200 else text[:197] + "..."
