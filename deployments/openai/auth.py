"""Which key a request came with, and which routes that opens."""

from collections.abc import Awaitable, Callable

from fastapi import Request

from deployments.openai.api import Api
from deployments.openai.failures import ApiError
from deployments.openai.visit import Visit

Guard = Callable[[Request], Awaitable[None]]


def user_guard(api: Api) -> Guard:
    """Let through who has any key; anyone where users need none."""

    async def guard(request: Request) -> None:
        holder = api.access.user(_secret(request))
        if holder is None:
            raise _no_key()
        request.state.visit = Visit(api, holder)

    return guard


def admin_guard(api: Api) -> Guard:
    """Let through who has an administrator's key; if there is none, whoever passes as a user.

    Refusals are logged, beginning with the guard's own.
    """

    async def guard(request: Request) -> None:
        request.state.is_audited = True
        holder = api.access.administrator(_secret(request))
        if holder is None:
            raise _no_key()
        request.state.visit = Visit(api, holder)
        if api.access.needs_admin and not holder.is_admin:
            raise ApiError(
                "This key may not change adapters; the admin key is needed.",
                status=403,
                type="PermissionDeniedError",
                reason="not_admin",
            )

    return guard


def caller_of(request: Request) -> str:
    """The name of the key that the request came with, for the journal."""
    visit = getattr(request.state, "visit", None)
    return visit.holder.name if isinstance(visit, Visit) else "anonymous"


def peer_of(request: Request) -> str:
    """Where the request came from, for the journal."""
    return request.client.host if request.client else ""


def _secret(request: Request) -> bytes | None:
    """The bearer's key as the bytes that were sent."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip(" ").encode("latin-1") if scheme.lower() == "bearer" else None


def _no_key() -> ApiError:
    return ApiError(
        "Missing or invalid API key. Send it as 'Authorization: Bearer KEY'.",
        status=401,
        type="AuthenticationError",
        headers={"www-authenticate": "Bearer"},
        reason="no_key",
    )
