"""Reads a JSON body into a model: bounded in size, strict about what JSON is.

Knows HTTP and JSON; what the fields mean is the models' and ``unsupported.py``'s business.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from deployments.openai.failures import ApiError
from deployments.openai.unsupported import refuse_unsupported

# Only a body with so long a number can have one beyond 64 bits.
_MANY_DIGITS = re.compile(rb"[0-9]{19}")


class Body(BaseModel):
    """Base of all request bodies: exact types, finite numbers, unknown fields ignored.

    A field given as null counts as not given, as OpenAI's clients expect, unless it is listed in
    ``null_means_something``. ``refused`` names known fields that are not honoured, each with the
    values that ask for nothing.
    """

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)

    null_means_something: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}


BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, model: type[BodyT], max_bytes: int) -> BodyT:
    """Read, parse and validate a body; ApiError or ValidationError if it is not what it must be."""
    return parse_body(await read_json(request, max_bytes), model)


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read a body that must be a JSON object of bounded size."""
    _check_content_type(request)
    raw = await _read_bytes(request, max_bytes)
    try:
        # Refuses NaN, lone surrogates, bad UTF-8, and nesting deeper than 200 levels.
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"The body is not valid JSON: {error}", param="body") from None
    if not isinstance(data, dict):
        raise ApiError("The body must be a JSON object.", param="body")
    if _MANY_DIGITS.search(raw):
        for name, value in data.items():
            _refuse_huge_integers(value, name)
    return data


def parse_body(data: dict[str, Any], model: type[BodyT]) -> BodyT:
    """Make a model of a JSON object."""
    refuse_unsupported(data, model.refused)
    return model.model_validate(_without_nulls(data, model.null_means_something))


def _without_nulls(data: dict[str, Any], keep: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if value is not None or name in keep}


def _refuse_huge_integers(value: object, field: str, *, is_free: bool = False) -> None:
    """Objects of any shape (schemas, tools, metadata) are written as JSON, which ends at 64 bits.

    Other integers are judged by their fields, which name them better.
    """
    if isinstance(value, dict):
        for item in value.values():
            _refuse_huge_integers(item, field, is_free=True)
    elif isinstance(value, list):
        for item in value:
            _refuse_huge_integers(item, field, is_free=is_free)
    elif is_free and isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ApiError(f"{field} contains an integer beyond 64 bits.", param=field)


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError("Unsupported Media Type: Only 'application/json' is allowed")


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    check_announced_size(request, max_bytes)
    chunks = bytearray()
    try:
        async for chunk in request.stream():
            chunks += chunk
            if len(chunks) > max_bytes:
                raise too_large(max_bytes)
    except ClientDisconnect:
        raise ApiError("The client went away before the body was complete.") from None
    return bytes(chunks)


def check_announced_size(request: Request, max_bytes: int) -> None:
    """Raise if the body is said to be larger than this."""
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise too_large(max_bytes)


def too_large(max_bytes: int) -> ApiError:
    """The refusal of a body of more than so many bytes."""
    # The rest of the body is not read, so the connection cannot carry another request.
    return ApiError(
        f"The body is larger than {max_bytes} bytes.",
        status=413,
        type="RequestTooLargeError",
        param="body",
        headers={"connection": "close"},
        reason="body_too_large",
    )
