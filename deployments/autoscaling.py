"""How many replicas there are: by how many requests they have."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class AutoscalingSettings(BaseModel):
    """Between ``min_replicas`` and ``max_replicas``, so that each has ``target_requests``.

    Requests that run and requests that wait count alike. More replicas are started when there has
    been too much for ``upscale_delay_s``; one is drained, then ended, when there has been too
    little for ``downscale_delay_s``. Looked at is the mean of the last ``look_back_s``,
    which Serve wants to be longer than its reports are apart, ten seconds.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)
    target_requests: float = Field(default=16, gt=0)
    upscale_delay_s: float = Field(default=15, ge=0)
    downscale_delay_s: float = Field(default=300, ge=0)
    look_back_s: float = Field(default=30, gt=10)

    @model_validator(mode="after")
    def _ordered(self) -> "AutoscalingSettings":
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not be more than max_replicas")
        return self

    def build(self) -> dict[str, Any]:
        """Serve's own settings."""
        return {
            "min_replicas": self.min_replicas,
            "max_replicas": self.max_replicas,
            "target_ongoing_requests": self.target_requests,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
            "look_back_period_s": self.look_back_s,
        }
