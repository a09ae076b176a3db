"""Log lines for machines: one JSON object each, with the request and adapter that it is about.

Our own loggers only: how Ray logs is said in Serve's ``logging_config``.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import orjson

from deployments.telemetry.request_origin import current_origin
from deployments.telemetry.settings import LogFormat

LOGGERS = ("adapters", "deployments", "engine", "kernels", "resolvers")

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What a record has without anybody's ``extra``.
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Writes a record with everything that was given as ``extra``.

    ``request_id`` is that of the HTTP request in whose context the line is written, unless given.
    """

    def __init__(self, **constant: str) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        document: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._constant,
        }
        if request_id := current_origin().request_id:
            document["request_id"] = request_id
        # Ray marks records for itself.
        document |= {
            key: value
            for key, value in vars(record).items()
            if key not in _OWN and not key.startswith("_")
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(document, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def configure_logs(logs: LogFormat | None, **constant: str) -> None:
    """Send what our packages log to standard error; ``constant`` fields are in every JSON line."""
    if logs is None:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(**constant) if logs == "json" else logging.Formatter(_TEXT))
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
