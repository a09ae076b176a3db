"""Adapters in the body of a request, for trainers: streamed to disk, then an ordinary replace.

The body is ``multipart/form-data`` with two parts: ``config`` (adapter_config.json) and
``weights`` (adapter_model.safetensors). It is bounded in size and never in memory as a whole.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header
from starlette.requests import ClientDisconnect

from adapters import CONFIG_FILE, WEIGHTS_FILE, validate_adapter_name
from deployments.backend import PushAdapter
from deployments.openai.admin_guards import admin_guards
from deployments.openai.api import Api
from deployments.openai.auth import caller_of, peer_of
from deployments.openai.body import check_announced_size, too_large
from deployments.openai.failures import ApiError
from deployments.openai.management import version_answer
from deployments.openai.operations import operation_id

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_PARTS = {"config": CONFIG_FILE, "weights": WEIGHTS_FILE}
_MAX_HEADER_BYTES = 4096
# Written at once, in a thread.
_WRITE_BYTES = 1 << 20


class PushOptions(BaseModel):
    """Query parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pin: bool = False


def push_router(api: Api) -> APIRouter:
    """The route that takes an adapter's files."""
    router = APIRouter(dependencies=admin_guards(api))

    @router.put("/v1/adapters/{name:path}")
    async def push(request: Request, name: str) -> Response:
        op_id = operation_id(request)
        options = PushOptions.model_validate(dict(request.query_params))
        validate_adapter_name(name)
        with api.backend.receive_adapter() as directory:
            await _receive(request, directory, api.settings.max_push_bytes)
            asked = PushAdapter(
                name=name,
                directory=directory,
                pin=options.pin,
                requested_by=caller_of(request),
                requested_from=peer_of(request),
                op_id=op_id,
            )
            return version_answer(await api.backend.push_adapter(asked), op_id)

    return router


async def _receive(request: Request, directory: Path, max_bytes: int) -> None:
    check_announced_size(request, max_bytes)
    files = PartFiles(directory)
    try:
        parser = MultipartParser(_boundary(request), files.callbacks())
        size, pending = 0, bytearray()
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise too_large(max_bytes)
            pending += chunk
            if len(pending) >= _WRITE_BYTES:
                await asyncio.to_thread(parser.write, bytes(pending))
                pending.clear()
        await asyncio.to_thread(parser.write, bytes(pending))
        parser.finalize()
    except FormParserError as error:
        raise ApiError(f"The body is not valid multipart: {error}", param="body") from None
    except ClientDisconnect:
        raise ApiError("The client went away before the body was complete.") from None
    finally:
        files.close()
    files.check_complete()


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ApiError("Unsupported Media Type: Only 'multipart/form-data' is allowed")
    return options[b"boundary"]


class PartFiles:
    """Writes each part of a multipart body to its file."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: set[str] = set()
        self._file: BinaryIO | None = None
        self._field, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._is_ended = False

    def callbacks(self) -> "MultipartCallbacks":
        """For the parser."""
        return {
            "on_part_begin": self._begin_part,
            "on_header_field": self._take_field,
            "on_header_value": self._take_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._write,
            "on_part_end": self.close,
            "on_end": self._end,
        }

    def close(self) -> None:
        """End the part."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def check_complete(self) -> None:
        """Raise unless every part has arrived."""
        missing = sorted(_PARTS.keys() - self._written)
        if missing or not self._is_ended:
            what = f"the part {missing[0]!r}" if missing else "its end"
            raise ApiError(f"The body lacks {what}.", param="body")

    def _begin_part(self) -> None:
        self._headers = {}
        self._field, self._value = b"", b""

    def _take_field(self, data: bytes, start: int, end: int) -> None:
        self._field = self._bounded(self._field + data[start:end])

    def _take_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._bounded(self._value + data[start:end])

    def _end_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field, self._value = b"", b""

    def _open(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        part = options.get(b"name", b"").decode(errors="replace")
        if part not in _PARTS or part in self._written:
            raise ApiError(
                f"The body has one part 'config' and one part 'weights', not {part[:64]!r}.",
                param="body",
            )
        self._written.add(part)
        self._file = (self._directory / _PARTS[part]).open("xb")

    def _write(self, data: bytes, start: int, end: int) -> None:
        assert self._file is not None
        self._file.write(memoryview(data)[start:end])

    def _end(self) -> None:
        self._is_ended = True

    def _bounded(self, header: bytes) -> bytes:
        if len(header) > _MAX_HEADER_BYTES:
            raise ApiError("A part's header is too long.", param="body")
        return header
