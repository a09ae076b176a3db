"""A headless browser on the admin page of a cluster that is not there."""

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deployments.http_app import create_http_app
from tests.deployments.admin_page.busy_fleet import BusyFleet
from tests.deployments.http_client import serving

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


@pytest.fixture(scope="module")  # while it is open an event loop runs in this thread
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(_QUIET))
        yield browser
        browser.close()


@pytest.fixture
def fleet() -> BusyFleet:
    return BusyFleet()


@pytest.fixture
def url(fleet: BusyFleet) -> Iterator[str]:
    with serving(create_http_app(fleet)) as url:
        yield url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("requestfailed", lambda request: problems.append(f"{request.url} failed"))
        page.set_default_timeout(10_000)
        page.goto(f"{url}/admin")
        yield page
        page.close()
        assert [problem for problem in problems if "/admin/events" not in problem] == []
