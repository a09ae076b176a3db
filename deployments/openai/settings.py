"""What an operator may set about the HTTP surface. Knows nothing of the cluster behind it."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

DEFAULT_MAX_BODY_BYTES = 16 << 20
DEFAULT_MAX_PUSH_BYTES = 2 << 30
DEFAULT_MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP surface.

    ``api_key`` guards the user routes and ``admin_api_key`` load and unload; None leaves them open.
    Without an admin key the user key guards the admin routes as well.
    ``trust_request_chat_template`` lets a request bring its own Jinja template, which can burn a
    replica's CPU at will. ``max_choices`` bounds prompts times n of one request, ``max_push_bytes``
    an adapter in a request's body.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_push_bytes: int = DEFAULT_MAX_PUSH_BYTES
    max_choices: int = DEFAULT_MAX_CHOICES
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty; leave it out to need no key")
        for name in ("max_body_bytes", "max_push_bytes", "max_choices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def lorafleet_version() -> str:
    """The installed version, or "0+source" when run from a checkout that is not installed."""
    try:
        return version("lorafleet")
    except PackageNotFoundError:
        return "0+source"
