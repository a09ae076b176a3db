"""One ingress' control of access: whose key it is, which models it may use, and how much.

Ties keys and limits together. Knows neither HTTP nor what a model is beyond its name.
"""

from collections.abc import Sequence
from pathlib import Path

from deployments.access.key_holder import ANONYMOUS, KeyHolder
from deployments.access.keyring import Keyring
from deployments.access.limiter import Limiter, Quota
from deployments.clock import Clock, SystemClock


class AccessControl:
    """Shared by all requests of one app.

    ``fixed`` are keys of the settings. With a file of keys nobody is anonymous, and administering
    always takes an administrator's key.
    """

    def __init__(
        self,
        fixed: Sequence[tuple[str, KeyHolder]],
        keys_file: Path | None = None,
        *,
        num_ingresses: int = 1,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.keyring = Keyring(dict(fixed), keys_file, num_ingresses=num_ingresses, clock=clock)
        self.limiter = Limiter(clock)
        has_user_keys = any(not holder.is_admin for _, holder in fixed)
        self._has_file = keys_file is not None
        self._needs_key = self._has_file or has_user_keys

    def user(self, secret: bytes | None) -> KeyHolder | None:
        """Return who calls with this key; None turns the caller away."""
        if not self._needs_key:
            return ANONYMOUS
        return None if secret is None else self.keyring.find(secret)

    def administrator(self, secret: bytes | None) -> KeyHolder | None:
        """The same where adapters are administered; whether the holder may is still to be seen."""
        if self.needs_admin:
            return None if secret is None else self.keyring.find(secret)
        return self.user(secret)

    @property
    def needs_admin(self) -> bool:
        """Whether administering takes an administrator's key; without one, users do it."""
        return self._has_file or self.keyring.has_admins

    def quotas(self, holder: KeyHolder, model: str) -> list[Quota]:
        """The limits under which a holder uses a model."""
        quotas = [Quota(f"key {holder.name}", holder.limits)]
        for patterns, limits in self.keyring.keys.adapter_limits:
            if patterns.match(model):
                quotas.append(Quota(f"model {model}", limits))
                break
        return quotas
