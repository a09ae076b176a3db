"""Parses adapter_config.json into the facts the engine honours, and refuses the rest by name.

Knows PEFT's fields and their types. Knows neither the base model nor the weights.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, get_args

from engine.errors import InvalidAdapterError, UnsupportedAdapterError
from engine.lora.peft_fields import (
    HARMLESS,
    HONOURED,
    INITS_ON_UNCHANGED_BASE,
    OFF_ONLY,
    is_off,
)

MAX_CONFIG_BYTES = 4 << 20

ALL_LINEAR = "all-linear"

# Which of the base model's biases an adapter replaces.
Bias = Literal["none", "all", "lora_only"]

_PLAIN_NAME = re.compile(r"[\w-]+(\.[\w-]+)*", re.ASCII)

_SHOWN = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftLoRAConfig:
    """The part of PEFT's LoraConfig that changes what an adapter computes.

    ``target_modules`` and ``exclude_modules`` are a regular expression when a string and name
    suffixes when a tuple. Patterns keep the file's order, because the first match wins. An empty
    ``layers_to_transform`` means every layer, as None does. ``trained_tokens`` gives the token ids
    of each module, where None stands for the input embedding. The adapter is applied from the last
    ``invocation`` in the prompt on, from the first token if that is empty. ``base_model`` is what
    its author called the base model, None if the file does not say.
    """

    rank: int
    alpha: float
    target_modules: str | tuple[str, ...]
    exclude_modules: str | tuple[str, ...] = ()
    use_rslora: bool = False
    rank_pattern: tuple[tuple[str, int], ...] = ()
    alpha_pattern: tuple[tuple[str, float], ...] = ()
    layers_to_transform: frozenset[int] | None = None
    layers_pattern: tuple[str, ...] = ()
    bias: Bias = "none"
    lora_bias: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    trained_tokens: tuple[tuple[str | None, tuple[int, ...]], ...] = ()
    invocation: tuple[int, ...] = ()
    base_model: str | None = None

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the fields beyond rank, alpha and targets that this adapter uses."""
        used = {
            "use_rslora": self.use_rslora,
            "rank_pattern": bool(self.rank_pattern),
            "alpha_pattern": bool(self.alpha_pattern),
            "exclude_modules": bool(self.exclude_modules),
            "layers_to_transform": bool(self.layers_to_transform),
            "bias": self.bias != "none",
            "lora_bias": self.lora_bias,
            "use_dora": self.use_dora,
            "modules_to_save": bool(self.modules_to_save),
            "trainable_token_indices": bool(self.trained_tokens),
            "alora_invocation_tokens": bool(self.invocation),
        }
        return tuple(name for name, is_used in used.items() if is_used)

    def scaling(self, rank: int, alpha: float) -> float:
        """What PEFT multiplies B @ A with."""
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_peft_config(data: bytes) -> PeftLoRAConfig:
    """Parse the bytes of an adapter_config.json."""
    if len(data) > MAX_CONFIG_BYTES:
        _invalid(f"{len(data)} bytes long, more than the limit of {MAX_CONFIG_BYTES}")
    try:
        fields = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidAdapterError(f"adapter_config.json is not valid JSON: {error}") from error
    return parse_peft_config(fields)


def parse_peft_config(fields: object) -> PeftLoRAConfig:
    """Parse the object of an adapter_config.json.

    Raises InvalidAdapterError for a value that PEFT could not have meant, UnsupportedAdapterError
    for a feature that is not served exactly.
    """
    if not isinstance(fields, Mapping):
        _invalid(f"must hold a JSON object, not {_type_name(fields)}")
    _check_method(fields)
    _refuse_unsupported(fields)
    target_modules = _module_names(fields, "target_modules")
    if not target_modules:
        _invalid('target_modules must name modules or be "all-linear", but is missing or empty')
    layers_to_transform = _layer_indices(fields)
    layers_pattern = _layers_pattern(fields)
    _check_layers(target_modules, layers_to_transform, layers_pattern)
    return PeftLoRAConfig(
        rank=_rank("r", _required(fields, "r")),
        alpha=_alpha("lora_alpha", _required(fields, "lora_alpha")),
        target_modules=target_modules,
        exclude_modules=_module_names(fields, "exclude_modules"),
        use_rslora=_boolean(fields, "use_rslora"),
        rank_pattern=tuple(
            (key, _rank(f"rank_pattern[{_show(key)}]", value))
            for key, value in _pattern(fields, "rank_pattern").items()
        ),
        alpha_pattern=tuple(
            (key, _alpha(f"alpha_pattern[{_show(key)}]", value))
            for key, value in _pattern(fields, "alpha_pattern").items()
        ),
        layers_to_transform=layers_to_transform,
        layers_pattern=layers_pattern,
        bias=_bias(fields),
        lora_bias=_boolean(fields, "lora_bias"),
        use_dora=_boolean(fields, "use_dora"),
        modules_to_save=_modules_to_save(fields),
        trained_tokens=_trained_tokens(fields),
        invocation=_invocation(fields),
        base_model=_base_model(fields),
    )


def _check_method(fields: Mapping[str, object]) -> None:
    peft_type = _required(fields, "peft_type")
    if not isinstance(peft_type, str):
        _invalid(f"peft_type must be a string, not {_type_name(peft_type)}")
    if peft_type != "LORA":
        _unsupported(f"peft_type {_show(peft_type)} is not served; only LORA is")
    task_type = fields.get("task_type")
    if task_type not in (None, "CAUSAL_LM"):
        _unsupported(f"task_type {_show(task_type)} is not served; only CAUSAL_LM is")


def _refuse_unsupported(fields: Mapping[str, object]) -> None:
    for name, feature in OFF_ONLY.items():
        value = fields.get(name)
        if not is_off(value):
            _unsupported(f"{name}={_show(value)} asks for {feature}, which is not served")
    if fields.get("use_dora") is True and fields.get("lora_bias") is True:
        _unsupported("lora_bias with use_dora is not served; PEFT does not allow it either")
    init = fields.get("init_lora_weights", True)
    if not any(init is known or init == known for known in INITS_ON_UNCHANGED_BASE):
        _unsupported(
            f"init_lora_weights={_show(init)} trains against changed base weights; convert the "
            "adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name in sorted(fields.keys() - HONOURED - HARMLESS - OFF_ONLY.keys()):
        if not is_off(fields[name]):
            _unsupported(
                f"field {_show(name)} with value {_show(fields[name])} is unknown, so it cannot "
                "be served exactly"
            )


def _check_layers(
    target_modules: str | tuple[str, ...],
    layers_to_transform: frozenset[int] | None,
    layers_pattern: tuple[str, ...],
) -> None:
    """The combinations that PEFT itself rejects."""
    if isinstance(target_modules, str):
        if layers_to_transform is not None or layers_pattern:
            _invalid("layers_to_transform and layers_pattern need target_modules to be a list")
    elif layers_pattern and layers_to_transform is None:
        _invalid("layers_pattern needs layers_to_transform")


def _module_names(fields: Mapping[str, object], name: str) -> str | tuple[str, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    _invalid(f"{name} must be a string or a list of non-empty strings, got {_show(value)}")


def _layer_indices(fields: Mapping[str, object]) -> frozenset[int] | None:
    value = fields.get("layers_to_transform")
    if value is None:
        return None
    indices = value if isinstance(value, list) else [value]
    if not all(type(index) is int and index >= 0 for index in indices):
        _invalid(f"layers_to_transform must be layer indices from 0, got {_show(value)}")
    return frozenset(indices)


def _layers_pattern(fields: Mapping[str, object]) -> tuple[str, ...]:
    value = fields.get("layers_pattern")
    patterns = [value] if isinstance(value, str) else value or []
    if not isinstance(patterns, list) or not all(isinstance(item, str) for item in patterns):
        _invalid(f"layers_pattern must be a string or a list of strings, got {_show(value)}")
    return tuple(pattern for pattern in patterns if pattern)


def _bias(fields: Mapping[str, object]) -> Bias:
    value = fields.get("bias", "none")
    for known in get_args(Bias):
        if value == known:
            return known  # type: ignore[no-any-return]
    _unsupported(f"bias={_show(value)} is not served; known are {', '.join(get_args(Bias))}")


def _modules_to_save(fields: Mapping[str, object]) -> tuple[str, ...]:
    value = fields.get("modules_to_save")
    if is_off(value):
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        _invalid(f"modules_to_save must be a list of strings, got {_show(value)}")
    for item in value:
        # PEFT takes them as suffixes here and as regular expressions there.
        if not _PLAIN_NAME.fullmatch(item):
            _unsupported(f"modules_to_save entry {_show(item)} is not a plain module name")
    return tuple(value)


def _trained_tokens(
    fields: Mapping[str, object],
) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    value = fields.get("trainable_token_indices")
    if is_off(value):
        return ()
    entries: dict[str | None, object] = value if isinstance(value, dict) else {None: value}
    trained: list[tuple[str | None, tuple[int, ...]]] = []
    for name, ids in entries.items():
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            _invalid(f"trainable_token_indices must hold lists of token ids, got {_show(value)}")
        if len(set(ids)) != len(ids):
            _invalid("trainable_token_indices names a token twice")
        trained.append((name, tuple(ids)))
    return tuple(trained)


def _invocation(fields: Mapping[str, object]) -> tuple[int, ...]:
    value = fields.get("alora_invocation_tokens")
    if is_off(value):
        return ()
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        _invalid(f"alora_invocation_tokens must be a list of token ids, got {_show(value)}")
    for name in ("use_dora", "modules_to_save", "trainable_token_indices"):
        if not is_off(fields.get(name)):
            _unsupported(f"alora_invocation_tokens with {name} is not served")
    if fields.get("bias", "none") != "none":
        _unsupported("alora_invocation_tokens with bias is not served")
    return tuple(value)


def _base_model(fields: Mapping[str, object]) -> str | None:
    value = fields.get("base_model_name_or_path")
    return value if isinstance(value, str) else None


def _pattern(fields: Mapping[str, object], name: str) -> dict[str, object]:
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        _invalid(f"{name} must be an object of pattern and value, got {_show(value)}")
    return value


def _boolean(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        _invalid(f"{name} must be true or false, got {_show(value)}")
    return value


def _rank(where: str, value: object) -> int:
    if type(value) is not int or value < 1:
        _invalid(f"{where} must be a positive integer, got {_show(value)}")
    return value


def _alpha(where: str, value: object) -> float:
    if type(value) not in (int, float):
        _invalid(f"{where} must be a positive number, got {_show(value)}")
    try:
        alpha = float(value)  # type: ignore[arg-type]
    except OverflowError:
        alpha = math.inf
    if not (math.isfinite(alpha) and alpha > 0):
        _invalid(f"{where} must be a positive number, got {_show(value)}")
    return alpha


def _required(fields: Mapping[str, object], name: str) -> object:
    if fields.get(name) is None:
        _invalid(f"{name} is missing")
    return fields[name]


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")


def _show(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _invalid(what: str) -> NoReturn:
    raise InvalidAdapterError(f"adapter_config.json: {what}")


def _unsupported(what: str) -> NoReturn:
    raise UnsupportedAdapterError(f"adapter_config.json: {what}")
