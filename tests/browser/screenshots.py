"""Takes the pictures of docs/screenshots from a running product under load: `python -m tests.browser.screenshots`.

Takes five minutes, because the charts show five.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.journey.product import Product

from .conftest import FLAGS
from .load import load, waves
from .site import PASSWORD, Site

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "screenshots"
WARM_UP = 280.0  # seconds
PATIENCE = 120_000.0  # milliseconds
TOKENS = 120
DESKTOP = {"width": 1440, "height": 900}
PHONE = {"width": 390, "height": 844}
# The demo's free tier allows 20 requests a minute: too few to see it wait.
MORE_FREE = "version: 1\ntiers: [{name: free, limits: {rpm: 6000}}]\n"


def first_operator(browser: Browser, product: Product) -> Page:
    link = re.search(r"http://\S+/setup/\S+", product.output)
    assert link, product.output
    page = browser.new_page(viewport=DESKTOP)
    page.goto(link.group())
    page.screenshot(path=FOLDER / "setup.png", timeout=PATIENCE)
    page.get_by_label("User name").fill("operator")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password again").fill(PASSWORD)
    page.get_by_role("button", name="Create operator").click()
    expect(page.locator("#connection")).to_have_attribute("data-connection", "live")
    return page


def shoot(browser: Browser, signed_in: Page, product: Product) -> None:
    state = signed_in.context.storage_state()
    for size_name, size in (("1440", DESKTOP), ("390", PHONE)):
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=size, color_scheme=scheme, storage_state=state, device_scale_factor=2)
            page.goto(f"{product.url}/console/")
            expect(page.locator("#connection")).to_have_attribute("data-connection", "live")
            whole = page.evaluate("document.documentElement.scrollHeight")
            page.set_viewport_size({**size, "height": min(whole, 2 * size["height"])})  # charts draw when in view
            expect(page.locator(".main-svg").first).to_be_visible()
            page.wait_for_timeout(2500)
            page.screenshot(path=FOLDER / f"console-{size_name}-{scheme}.png", timeout=PATIENCE)
            page.close()
    page = browser.new_page(viewport=DESKTOP)
    page.goto(product.url)
    page.screenshot(path=FOLDER / "start.png", timeout=PATIENCE)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    product = Product(["--engine", "simulated"])
    try:
        product.wait_for("ready ", 60)
        apply(product)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            page = first_operator(browser, product)
            with load(product, waves, TOKENS):
                time.sleep(WARM_UP)
                shoot(browser, page, product)
            browser.close()
    finally:
        product.close()


def apply(product: Product) -> None:
    document = product.data_dir / "more.yaml"
    document.write_text(MORE_FREE)
    Site(product.data_dir).manage("apply", str(document))


if __name__ == "__main__":
    main()
