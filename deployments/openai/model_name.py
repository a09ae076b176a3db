"""What the ``model`` field means: the base model or one adapter.

""  or  "base"                  the base model
"adapter"  or  "base:adapter"   an adapter, whatever version is in service
"adapter@7"                     an adapter, but only its generation 7
"""

from adapters import InvalidAdapterNameError, validate_adapter_name
from deployments.errors import AdapterNotFoundError

_MAX_SHOWN_CHARS = 128
_MAX_GENERATION_DIGITS = 18


def parse_model(model: str, base_id: str) -> str | None:
    """Return the adapter asked for, as ``name`` or ``name@generation``; None is the base model.

    Raises AdapterNotFoundError for what cannot be an adapter's name: such a model does not exist.
    """
    if model in ("", base_id):
        return None
    adapter = model.removeprefix(f"{base_id}:")
    name, at, generation = adapter.partition("@")
    if at and not _is_generation(generation):
        raise _no_such_model(model)
    try:
        validate_adapter_name(name)
    except InvalidAdapterNameError:
        raise _no_such_model(model) from None
    return f"{name}@{int(generation)}" if at else name


def _is_generation(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_GENERATION_DIGITS


def _no_such_model(model: str) -> AdapterNotFoundError:
    shown = model if len(model) <= _MAX_SHOWN_CHARS else model[:_MAX_SHOWN_CHARS] + "..."
    return AdapterNotFoundError(shown, param="model")
