"""Who may call what: bearer keys, compared in constant time."""

import hashlib
import hmac
from collections.abc import Awaitable, Callable

from fastapi import Request

from deployments.openai.failures import ApiError
from deployments.openai.settings import HttpSettings

Guard = Callable[[Request], Awaitable[None]]


def user_guard(settings: HttpSettings) -> Guard:
    """Let through who has the user key or the admin key; anyone when no user key is set."""
    keys = {
        name: key
        for name, key in (("api-key", settings.api_key), ("admin-key", settings.admin_api_key))
        if key is not None
    }

    async def guard(request: Request) -> None:
        if settings.api_key is not None:
            request.state.caller = _caller(request, keys)

    return guard


def admin_guard(settings: HttpSettings) -> Guard:
    """Let through who has the admin key; without one, whoever passes as a user."""
    if settings.admin_api_key is None:
        return _audited(user_guard(settings))
    keys = {"admin-key": settings.admin_api_key}
    if settings.api_key is not None:
        keys["api-key"] = settings.api_key

    async def guard(request: Request) -> None:
        caller = _caller(request, keys)
        if caller != "admin-key":
            raise ApiError(
                "This key may not change adapters; the admin key is needed.",
                status=403,
                type="PermissionDeniedError",
            )
        request.state.caller = caller

    return _audited(guard)


def _audited(guard: Guard) -> Guard:
    """Have refusals logged from here on, beginning with the guard's own."""

    async def audited(request: Request) -> None:
        request.state.is_audited = True
        await guard(request)

    return audited


def caller_of(request: Request) -> str:
    """The kind of key that the request came with, for the journal."""
    return str(getattr(request.state, "caller", "anonymous"))


def peer_of(request: Request) -> str:
    """Where the request came from, for the journal."""
    return request.client.host if request.client else ""


def _caller(request: Request, keys: dict[str, str]) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        given = _digest(token.strip())
        # Every key is compared, so the time says nothing about which one matched.
        matches = [name for name, key in keys.items() if hmac.compare_digest(given, _digest(key))]
        if matches:
            return matches[-1]
    raise ApiError(
        "Missing or invalid API key. Send it as 'Authorization: Bearer KEY'.",
        status=401,
        type="AuthenticationError",
        headers={"www-authenticate": "Bearer"},
    )


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
