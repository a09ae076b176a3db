"""Draws the pictures of the admin page in the documentation.

python -m tests.deployments.admin_page.screenshots docs/images
"""

import sys
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

from deployments.http_app import create_http_app
from tests.deployments.admin_page.busy_fleet import BusyFleet
from tests.deployments.admin_page.chromium import launch
from tests.deployments.http_client import serving

# Until the plots have something to show.
_TRAFFIC_MS = 30_000
_CHOSEN = "support/extract-0003"


def draw(browser: Browser, url: str, directory: Path) -> None:
    """Save each picture, a laptop's in light colours and a phone's in dark ones."""
    laptop = browser.new_page(viewport={"width": 1360, "height": 820})
    phone = browser.new_page(
        viewport={"width": 390, "height": 780},
        device_scale_factor=2,
        is_mobile=True,
        color_scheme="dark",
    )
    for page in (laptop, phone):
        page.goto(f"{url}/admin")
        expect(page.locator("#live")).to_have_text("live")
    laptop.wait_for_timeout(_TRAFFIC_MS)
    for page in (laptop, phone):
        page.select_option("#order", "traffic")
    laptop.screenshot(path=directory / "admin-adapters.png")
    phone.screenshot(path=directory / "admin-phone.png")
    laptop.get_by_text(_CHOSEN).click()
    expect(laptop.locator("#details h2")).to_have_text(_CHOSEN)
    laptop.screenshot(path=directory / "admin-details.png")


def main(directory: Path) -> None:
    fleet = BusyFleet(num_adapters=400)
    fleet.kept[_CHOSEN] = [replace(fleet.adapters[_CHOSEN], generation=3)]
    with serving(create_http_app(fleet)) as url, sync_playwright() as playwright:
        browser = launch(playwright)
        assert browser is not None, "there is no Chromium"
        draw(browser, url, directory)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
