"""What an operator may set about the HTTP surface. Knows nothing of the cluster behind it."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from deployments.access.control import AccessControl
from deployments.access.key_holder import KeyHolder

DEFAULT_MAX_BODY_BYTES = 16 << 20
DEFAULT_MAX_PUSH_BYTES = 2 << 30
DEFAULT_MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpSettings:
    """Settings of the HTTP surface.

    ``api_key`` guards the user routes and ``admin_api_key`` load and unload; None leaves them open.
    Without an admin key the user key guards the admin routes as well. ``keys_file`` adds keys with
    adapters and limits of their own, which ``num_ingresses`` processes share.
    ``trust_request_chat_template`` lets a request bring its own Jinja template, which can burn a
    replica's CPU at will. ``max_choices`` bounds prompts times n of one request, ``max_push_bytes``
    an adapter in a request's body.
    """

    api_key: str | None = None
    admin_api_key: str | None = None
    keys_file: Path | None = None
    num_ingresses: int = 1
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_push_bytes: int = DEFAULT_MAX_PUSH_BYTES
    max_choices: int = DEFAULT_MAX_CHOICES
    trust_request_chat_template: bool = False

    def __post_init__(self) -> None:
        for name in ("api_key", "admin_api_key"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty; leave it out to need no key")
        for name in ("max_body_bytes", "max_push_bytes", "max_choices", "num_ingresses"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def access_control(self) -> AccessControl:
        """Read the keys; raises OSError or KeysError if their file cannot be used."""
        fixed = []
        if self.api_key is not None:
            fixed.append((self.api_key, KeyHolder(name="api-key")))
        if self.admin_api_key is not None:
            fixed.append((self.admin_api_key, KeyHolder(name="admin-key", is_admin=True)))
        return AccessControl(fixed, self.keys_file, num_ingresses=self.num_ingresses)


def lorafleet_version() -> str:
    """The installed version, or "0+source" when run from a checkout that is not installed."""
    try:
        return version("lorafleet")
    except PackageNotFoundError:
        return "0+source"
