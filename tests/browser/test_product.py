"""The console of the real product: set up by the printed link, under load, through the death of its scheduler."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.journey.product import Product

from .conftest import OpenPage
from .load import load
from .site import PASSWORD

pytestmark = [pytest.mark.browser, pytest.mark.journey]


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    started = Product(["--engine", "simulated"])
    try:
        started.wait_for("ready ", 60)
        yield started
    finally:
        started.close()


@pytest.fixture
def console(open_page: OpenPage, product: Product) -> Page:
    """The overview, entered as the first operator does: by the link that the terminal shows."""
    link = re.search(r"http://\S+/setup/\S+", product.output)
    assert link, product.output
    page = open_page()
    page.goto(link.group())
    page.get_by_label("User name").fill("olga")
    page.get_by_label("Password", exact=True).fill(PASSWORD)
    page.get_by_label("Password again").fill(PASSWORD)
    page.get_by_role("button", name="Create operator").click()
    expect(page.locator("#connection")).to_have_attribute("data-connection", "live")
    return page


def test_load_of_three_tiers_is_seen_live_and_a_dead_scheduler_too(console: Page, product: Product) -> None:
    heading = console.get_by_role("heading", level=1)
    expect(heading).to_have_text("Ready, and no requests in the last minute.")
    expect(console.locator("[data-engines]")).to_contain_text("demo")
    with load(product):
        for key in ("running", "tokens_per_s", "kv", "busy"):
            expect(console.locator(f'[data-figure="{key}"]')).to_have_text(re.compile("[1-9]"))
        expect(console.locator("[data-tiers] tbody th")).to_have_text(["vip", "paid", "free"])
        for row in console.locator("[data-tiers] tbody tr").all():
            expect(row).to_contain_text(re.compile(r"\d+ / \d+\)"))  # judged against its target
        expect(console.locator('[data-chart="running"] .scatterlayer path.js-line')).to_have_count(3)

        scheduler = product.pid_of("scheduler")
        assert scheduler is not None
        os.kill(scheduler, signal.SIGSTOP)
        expect(heading).to_contain_text("The scheduler is not connected.")
        expect(console.locator("#overview")).to_have_attribute("data-fresh", "false")
        os.kill(scheduler, signal.SIGKILL)
        expect(console.locator("#overview")).to_have_attribute("data-fresh", "true")
        expect(console.locator('[data-figure="tokens_per_s"]')).to_have_text(re.compile("[1-9]"))
