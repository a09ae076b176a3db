"""What the controller decides by."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Limits and permissions of one deployment. Times in seconds.

    ``deployed_at`` (seconds since the epoch) orders the settings of successive deployments.
    """

    base_model: str
    allow_runtime_updating: bool = False
    lease_s: float = 10.0
    poll_s: float = 2.0
    prepare_timeout_s: float = 120.0
    operation_timeout_s: float = 180.0
    negative_ttl_s: float = 3.0
    max_lookups_per_s: float = 100.0
    max_warm: int = 32
    max_versions_kept: int = 2
    deployed_at: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.poll_s * 2 < self.lease_s:
            raise ValueError(f"need lease_s > 2 * poll_s > 0, got {self}")
