"""The live overview in a real browser, with a scripted scheduler behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, WebSocketRoute, expect

from .conftest import Faults, OpenPage, sign_in
from .site import DEVELOPER, Site, snapshot

pytestmark = pytest.mark.browser

AXE = next(Path(__file__).parent.glob("vendor/axe-core-*/axe.min.js"))
GPU = {"name": "NVIDIA H200", "utilisation": 0.81, "memory_used": 80e9, "memory_total": 150e9}


def figure(page: Page, key: str) -> Any:
    return page.locator(f'[data-figure="{key}"]')


def connection(page: Page) -> Any:
    return page.locator("#connection [data-word]")


def tier_rows(page: Page) -> Any:
    return page.locator("[data-tiers] tbody tr")


# --- what it shows --------------------------------------------------------------------------------------------------


def test_the_first_byte_carries_the_numbers(
    open_page: OpenPage, site: Site, operator_state: Any, console: Page
) -> None:
    page = open_page(storage_state=operator_state, java_script_enabled=False)
    page.goto(f"{site.url}/console/")
    expect(figure(page, "waiting")).to_have_text("13")
    expect(page.get_by_role("heading", level=1)).to_contain_text("all meet their targets")


def test_values_move_with_what_the_scheduler_reports(console: Page, site: Site) -> None:
    expect(figure(console, "running")).to_have_text("8")
    busier = {"gold": {"waiting": 40, "oldest_wait": 3.25, "running": 12, "tokens_per_s": 2400.0}}
    site.play(pool=snapshot(tiers=busier))
    expect(figure(console, "running")).to_have_text("12")
    expect(figure(console, "waiting")).to_have_text("40")
    expect(figure(console, "tokens_per_s")).to_have_text("2.4 k")
    expect(figure(console, "oldest_wait")).to_have_text("3.3 s")


def test_tiers_come_from_data_in_the_order_of_their_rank(console: Page, site: Site) -> None:
    expect(tier_rows(console).locator("th")).to_have_text(["gold", "silver", "bronze"])
    site.play(pool=snapshot(tiers={"gold": {}, "night-shift": {"waiting": 1}}))
    expect(tier_rows(console).locator("th")).to_have_text(["gold", "night-shift"])
    expect(console.locator('[data-chart="waiting"] .legendtext')).to_have_text(["gold", "night-shift"])


def test_a_missed_target_is_the_first_thing_said(console: Page, site: Site) -> None:
    site.play(pool=snapshot(tiers={"gold": {"judged": 50, "attained": 40}, "silver": {"judged": 50, "attained": 50}}))
    expect(console.get_by_role("heading", level=1)).to_have_text("1 of 2 tiers is missing its target: gold.")
    expect(tier_rows(console).first).to_contain_text("▼ 80 % / 99 % (40 / 50)")


def test_gpu_utilisation_appears_only_with_a_gpu(console: Page, site: Site) -> None:
    expect(figure(console, "gpu")).to_be_hidden()
    site.play(pool=snapshot(gpus=[GPU]))
    expect(figure(console, "gpu")).to_have_text("81 %")
    expect(console.locator("[data-engines]")).to_contain_text("NVIDIA H200")


def test_a_failed_engine_says_what_to_do(console: Page, site: Site) -> None:
    engine = {
        "model": "demo",
        "replica": 0,
        "state": "failed",
        "message": "Not enough memory.",
        "hint": "Lower kv_space.",
    }
    site.play(pool=snapshot(engines=[engine]))
    expect(console.get_by_role("heading", level=1)).to_have_text("1 of 1 engine failed: demo.")
    expect(console.locator("[data-engines]")).to_contain_text("Not enough memory. Lower kv_space.")


def test_every_chart_is_also_a_table(console: Page) -> None:
    panel = console.get_by_role("region", name="Queue depth by tier").first
    panel.get_by_role("button", name="Table").click()
    table = panel.locator("table")
    expect(table.locator("th")).to_have_text(["Time", "gold", "silver", "bronze"])
    expect(table.locator("tbody tr").first.locator("td").nth(3)).to_have_text("11")
    expect(panel.locator('[data-chart="waiting"]')).to_be_hidden()


# --- how fresh it is ------------------------------------------------------------------------------------------------


def test_a_dead_scheduler_is_said_and_its_numbers_are_shown_as_the_past(console: Page, site: Site) -> None:
    site.play(speaking=False, pool=snapshot())
    heading = console.get_by_role("heading", level=1)
    expect(heading).to_contain_text("The scheduler is not connected.")
    expect(console.locator("#overview")).to_have_attribute("data-fresh", "false")
    expect(console.locator("[data-age]")).to_contain_text("last data")
    expect(connection(console)).to_have_text("No scheduler")
    site.play(pool=snapshot())
    expect(connection(console)).to_have_text("Live")
    expect(heading).to_contain_text("all meet their targets")
    expect(console.locator("#overview")).to_have_attribute("data-fresh", "true")


def test_a_server_that_dies_is_said_and_found_again(console: Page, site: Site, faults: Faults) -> None:
    faults.expected += ["WebSocket connection to", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET"]
    site.stop()
    try:
        expect(connection(console)).to_have_text("Reconnecting")
        expect(connection(console)).to_have_text("Offline")
        expect(console.locator("#overview")).to_have_attribute("data-fresh", "false")
        expect(console.locator("[data-age]")).to_contain_text("last data")
    finally:
        site.start()
    expect(connection(console)).to_have_text("Live")
    expect(console.locator("#overview")).to_have_attribute("data-fresh", "true")


class Wire:
    """The page's sockets, in the hands of a test: can be cut, can lose a frame, can fall silent."""

    def __init__(self) -> None:
        self.sockets: list[WebSocketRoute] = []
        self.said: list[dict[str, Any]] = []
        self.heard: list[dict[str, Any]] = []
        self.lose = 0
        self.silent = False

    def open(self, socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        self.sockets.append(socket)
        socket.on_message(lambda text: (self.said.append(json.loads(text)), server.send(text)))
        server.on_message(lambda text: self.deliver(socket, text))

    def deliver(self, socket: WebSocketRoute, text: str | bytes) -> None:
        frame = json.loads(text)
        if frame["type"] == "delta" and self.lose:
            self.lose -= 1
        elif not self.silent:
            self.heard.append(frame)
            socket.send(text)

    def points(self) -> list[int]:
        return [point["seq"] for frame in self.heard for point in frame.get("points", [frame.get("point")])]


@pytest.fixture
def wired(open_page: OpenPage, site: Site, operator_state: Any) -> tuple[Page, Wire]:
    wire = Wire()
    page = open_page(storage_state=operator_state)
    page.route_web_socket("**/ws/console/", wire.open)
    page.goto(f"{site.url}/console/")
    expect(connection(page)).to_have_text("Live")
    return page, wire


def test_a_cut_socket_is_resumed_without_gap_or_duplicate(wired: tuple[Page, Wire]) -> None:
    page, wire = wired
    wire.sockets[0].close(code=1012)
    expect(connection(page)).to_have_text("Reconnecting")
    expect(connection(page)).to_have_text("Live")
    assert len(wire.sockets) == 2
    first, resumed = [frame for frame in wire.heard if frame["type"] == "snapshot"][-2:]
    assert resumed["resumed"] and resumed["stream"] == first["stream"]
    assert in_one_row(sorted(set(wire.points())))
    assert shown_once(page)


def shown_once(page: Page) -> bool:
    """Whether the chart's table holds each second once."""
    panel = page.get_by_role("region", name="Queue depth by tier").first
    panel.get_by_role("button", name="Table").click()
    expect(panel.locator("tbody tr").first).to_be_visible()
    times = panel.locator("tbody tr td:first-child").all_text_contents()
    return len(times) == len(set(times))


def in_one_row(numbers: list[int]) -> bool:
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True


def test_a_lost_frame_is_asked_for_again(wired: tuple[Page, Wire]) -> None:
    page, wire = wired
    wire.lose = 1
    wait_until(page, lambda: [frame["type"] for frame in wire.heard].count("snapshot") == 2)
    assert wire.said[-1]["seq"] is not None
    assert wire.heard[-1]["resumed"]
    assert in_one_row(sorted(set(wire.points())))
    assert shown_once(page)


def wait_until(page: Page, condition: Any, seconds: float = 15.0) -> None:
    """Let the browser's events run until the condition holds."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        page.wait_for_timeout(50)
    raise TimeoutError("the condition did not come true")


def test_a_socket_that_falls_silent_is_stale_before_it_is_given_up(wired: tuple[Page, Wire]) -> None:
    page, wire = wired
    wire.silent = True
    expect(connection(page)).to_have_text("Stale")
    expect(page.locator("#overview")).to_have_attribute("data-fresh", "false")
    wire.silent = False
    expect(connection(page)).to_have_text("Live")


def test_a_paused_page_stands_still_and_catches_up(console: Page, site: Site) -> None:
    console.get_by_role("button", name="Pause").click()
    expect(connection(console)).to_have_text("Paused")
    before = figure(console, "waiting").text_content()
    site.play(pool=snapshot(tiers={"gold": {"waiting": 77}}))
    console.wait_for_timeout(2500)  # two frames would have come
    assert figure(console, "waiting").text_content() == before
    console.get_by_role("button", name="Resume").click()
    expect(figure(console, "waiting")).to_have_text("77")


# --- who sees it ----------------------------------------------------------------------------------------------------


def test_signing_out_closes_the_other_tabs(open_page: OpenPage, site: Site) -> None:
    page = sign_in(open_page(), site)
    expect(connection(page)).to_have_text("Live")
    other = page.context.new_page()
    other.goto(f"{site.url}/accounts/logout/")
    other.locator("#main").get_by_role("button", name="Sign out").click()
    expect(connection(page)).to_have_text("Signed out")
    expect(page.locator("#overview")).to_have_attribute("data-fresh", "false")


def test_a_developer_is_told_which_role_is_missing(open_page: OpenPage, site: Site, faults: Faults) -> None:
    faults.expected.append("403")
    page = sign_in(open_page(), site, DEVELOPER)
    expect(page.get_by_role("heading", level=1)).to_have_text("The console needs the role “operator”")


def test_admin_and_api_documentation_work_under_their_own_policies(
    open_page: OpenPage, site: Site, operator_state: Any
) -> None:
    page = open_page(storage_state=operator_state)
    page.goto(f"{site.url}/admin/")
    expect(page.get_by_role("link", name="Tiers").first).to_be_visible()
    page.goto(f"{site.url}/api/docs/")
    expect(page.get_by_role("heading", name="Harness")).to_be_visible()


# --- how it feels ---------------------------------------------------------------------------------------------------


def test_the_theme_changes_in_place_and_is_in_the_next_first_byte(console: Page) -> None:
    console.get_by_role("button", name="olga").click()
    console.get_by_role("button", name="Dark").click()
    expect(console.locator("html")).to_have_attribute("data-theme", "dark")
    expect(console.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "true")
    answer = console.request.get(console.url)
    assert 'data-theme="dark"' in answer.text()[:200]


def test_without_a_choice_the_system_decides(open_console: OpenPage) -> None:
    shades = [
        open_console(color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert shades[0] != shades[1]


def test_the_keyboard_reaches_content_and_menu(console: Page) -> None:
    console.keyboard.press("Tab")
    expect(console.get_by_role("link", name="Skip to content")).to_be_focused()
    opener = console.get_by_role("button", name="olga")
    opener.focus()
    console.keyboard.press("Enter")
    expect(console.get_by_role("button", name="Light")).to_be_visible()
    console.keyboard.press("Escape")
    expect(console.get_by_role("button", name="Light")).to_be_hidden()
    expect(opener).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_stands_in_the_way_of_anybody(open_console: OpenPage, site: Site, scheme: str) -> None:
    page = open_console(color_scheme=scheme)
    for path in ("/console/", "/accounts/password/change/"):
        page.goto(f"{site.url}{path}")
        assert serious_findings(page) == []
    page.context.clear_cookies()
    for path in ("/", "/accounts/login/"):
        page.goto(f"{site.url}{path}")
        assert serious_findings(page) == []


def serious_findings(page: Page) -> list[str]:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    grave = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes'][:3]]}" for one in grave]


def test_a_phone_scrolls_in_one_direction_only(open_console: OpenPage) -> None:
    page = open_console(viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_times_are_the_readers_and_say_so(open_console: OpenPage) -> None:
    page = open_console(timezone_id="Asia/Kolkata")
    expect(page.locator("[data-zone]")).to_contain_text("(UTC+05:30)")


def test_the_console_speaks_chinese(open_console: OpenPage) -> None:
    page = open_console(locale="zh-CN")
    expect(connection(page)).to_have_text("实时")
    expect(page.get_by_role("heading", level=1)).to_contain_text("均达到目标")
