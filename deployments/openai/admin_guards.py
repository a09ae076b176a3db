"""What every route passes that changes adapters."""

from typing import Any

from fastapi import Depends

from deployments.errors import RuntimeUpdatingDisabledError
from deployments.openai.api import Api
from deployments.openai.auth import admin_guard
from deployments.openai.failures import NOT_FOUND, ApiError


def admin_guards(api: Api) -> list[Any]:
    """The admin key, then the permission to change adapters at run time.

    While that is off the routes answer 404, saying how to turn it on.
    """

    async def check_enabled() -> None:
        if not api.backend.allow_runtime_updating:
            raise ApiError(str(RuntimeUpdatingDisabledError()), status=404, type=NOT_FOUND)

    return [Depends(admin_guard(api)), Depends(check_enabled)]
