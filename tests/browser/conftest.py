"""A real Chromium. Every page fails its test on a console error, a policy violation, a 5xx or a foreign request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

from .site import OPERATOR, PASSWORD, Site, running, snapshot

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
REPORT_VIOLATIONS = """
addEventListener("securitypolicyviolation", (event) =>
  console.error(`CSP ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""


expect.set_options(timeout=20_000)  # milliseconds: the machine may be busy with other tests


@dataclass
class Faults:
    """What went wrong in a page. `expected` are patterns that this test provokes on purpose."""

    found: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def unexpected(self) -> list[str]:
        return [fault for fault in self.found if not any(re.search(pattern, fault) for pattern in self.expected)]


@pytest.fixture(scope="package")
def browser(chromium: str) -> Iterator[Browser]:
    """Closed when the tests of this folder are: while Playwright's loop runs in this thread, no other can."""
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running(tmp_path_factory.mktemp("site")) as started:
        yield started


@pytest.fixture(autouse=True)
def calm(request: pytest.FixtureRequest) -> None:
    """Each test begins with one scheduler that reports a calm moment."""
    if "site" in request.fixturenames:
        request.getfixturevalue("site").play(pool=snapshot())


@pytest.fixture
def faults() -> Iterator[Faults]:
    collected = Faults()
    yield collected
    assert collected.unexpected() == []


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser, faults: Faults) -> Iterator[OpenPage]:
    """Make a page in a context of its own, watched; keyword arguments are the context's."""
    contexts: list[BrowserContext] = []

    def make(**options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        contexts.append(context)
        context.add_init_script(REPORT_VIOLATIONS)
        context.route("**/*", lambda route: only_loopback(route, faults))
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: message.type == "error" and faults.found.append(message.text))
        page.on("pageerror", lambda error: faults.found.append(str(error)))
        page.on(
            "response", lambda answer: answer.status >= 500 and faults.found.append(f"{answer.status} {answer.url}")
        )
        return page

    yield make
    for context in contexts:
        context.close()


def only_loopback(route: Route, faults: Faults) -> None:
    if urlsplit(route.request.url).hostname == "127.0.0.1":
        route.continue_()
    else:
        faults.found.append(f"foreign request {route.request.url}")
        route.abort()


def sign_in(page: Page, site: Site, name: str = OPERATOR, path: str = "/console/") -> Page:
    page.goto(f"{site.url}/accounts/login/?next={path}")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_load_state()
    return page


@pytest.fixture(scope="module")
def operator_state(browser: Browser, site: Site) -> Any:
    """Cookies of a signed-in operator."""
    context = browser.new_context()
    sign_in(context.new_page(), site)
    state = context.storage_state()
    context.close()
    return state


@pytest.fixture
def open_console(open_page: OpenPage, site: Site, operator_state: Any) -> OpenPage:
    """Make a page that shows the overview to an operator, live."""

    def make(**options: Any) -> Page:
        page = open_page(storage_state=operator_state, **options)
        page.goto(f"{site.url}/console/")
        expect(page.locator("#connection")).to_have_attribute("data-connection", "live")
        return page

    return make


@pytest.fixture
def console(open_console: OpenPage) -> Page:
    return open_console()
