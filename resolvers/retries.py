"""Trying again what may pass by itself, with growing pauses that a cancelled caller cuts short."""

import logging
import threading
from collections.abc import Callable

from tenacity import (
    Retrying,
    before_sleep_log,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

logger = logging.getLogger(__name__)


def retrying(
    attempts: int, is_transient: Callable[[BaseException], bool], cancelled: threading.Event
) -> Retrying:
    """Call with a function and its arguments; the last attempt's error is raised as it is."""
    return Retrying(
        stop=stop_after_attempt(attempts),
        wait=wait_random_exponential(multiplier=0.25, max=5),
        retry=retry_if_exception(lambda error: not cancelled.is_set() and is_transient(error)),
        before_sleep=before_sleep_log(logger, logging.INFO),
        sleep=lambda seconds: _wait(cancelled, seconds),
        reraise=True,
    )


def _wait(cancelled: threading.Event, seconds: float) -> None:
    cancelled.wait(seconds)
