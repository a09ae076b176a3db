"""What a deployment may be told to tell of its requests."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

LogFormat = Literal["json", "text"]


class TelemetrySettings(BaseModel):
    """Both are off by default.

    ``otlp_traces_endpoint`` is where spans go, as in ``http://collector:4318/v1/traces``; of the
    traces that no client began, ``sample_ratio`` are kept. Everything else about spans is said by
    OpenTelemetry's own variables (``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_HEADERS``).
    ``logs`` writes a line for each request, and all other lines, to standard error.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    otlp_traces_endpoint: str | None = Field(default=None, pattern=r"^https?://")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    logs: LogFormat | None = None
