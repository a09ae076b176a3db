"""A headless browser on the admin page of a cluster that is not there."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from deployments.http_app import create_http_app
from tests.deployments.admin_page.busy_fleet import BusyFleet
from tests.deployments.admin_page.chromium import launch
from tests.deployments.http_client import serving


@pytest.fixture(scope="module")  # while it is open an event loop runs in this thread
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = launch(playwright)
        if browser is None:
            pytest.skip("there is no Chromium: apt install chromium")
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
        # What is broken off, the page broke off itself, or left.
        page.on(
            "requestfailed",
            lambda request: (
                request.failure == "net::ERR_ABORTED"
                or problems.append(f"{request.url}: {request.failure}")
            ),
        )
        page.set_default_timeout(10_000)
        page.goto(f"{url}/admin")
        yield page
        page.close()
        assert problems == []
