"""Starts the Chromium that is installed, silent towards the network."""

import shutil

from playwright.sync_api import Browser, Playwright

# Without these Chromium calls its maker's servers at every start.
_QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def launch(playwright: Playwright) -> Browser | None:
    """A headless browser, or None where there is no Chromium."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        return None
    return playwright.chromium.launch(executable_path=program, args=list(_QUIET))
