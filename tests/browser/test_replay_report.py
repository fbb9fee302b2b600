"""The page of charts of `harness replay --html` in a browser: wide and narrow, light and dark, without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from scheduler.simulator.charts import write_charts
from scheduler.simulator.workload import DEFAULT_TIERS
from tests.core.replays import replayed

pytestmark = pytest.mark.browser

HOSTILE = "</script><b>x</b>"
NAMES = (HOSTILE, "paid", "2026")
POLICIES = ("continuous", "priority", "edf")

# Of every text in the charts: how it stands out from the page (WCAG's contrast ratio), and whether its chart cuts it.
TEXTS = """() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const luminance = (colour) => {
    const [r, g, b] = numbers(colour).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = luminance(getComputedStyle(document.body).backgroundColor);
  return [...document.querySelectorAll(".chart")].flatMap((chart) => {
    const frame = chart.getBoundingClientRect();
    return [...chart.querySelectorAll("svg text")].filter((text) => text.textContent.trim()).map((text) => {
      const box = text.getBoundingClientRect();
      const ink = luminance(getComputedStyle(text).fill);
      return {
        chart: chart.getAttribute("aria-label"),
        text: text.textContent,
        contrast: (Math.max(page, ink) + 0.05) / (Math.min(page, ink) + 0.05),
        cut: box.left < frame.left - 1 || box.right > frame.right + 1
          || box.top < frame.top - 1 || box.bottom > frame.bottom + 1,
      };
    });
  });
}"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiers = {name: replace(tier, name=name) for name, tier in zip(NAMES, DEFAULT_TIERS.values(), strict=True)}
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_charts(path, *replayed(POLICIES, count=300, tiers=tiers))
    return path


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest, report: Path) -> Iterator[Page]:
    """The report, opened without a network; whatever it asks for or complains of fails the test."""
    context = browser.new_context(offline=True, **request.param)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("console", lambda message: message.type == "error" and faults.append(message.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda asked: asked.url == report.as_uri() or faults.append(asked.url))
    opened.goto(report.as_uri())
    yield opened
    context.close()
    assert faults == []


def scroll_through(page: Page) -> None:
    """Charts are drawn when they come near the screen."""
    for chart in page.locator(".chart").all():
        chart.scroll_into_view_if_needed()
        expect(chart.locator(".subplot.xy")).to_have_count(1)


def seen(scheme: str, width: int) -> dict[str, Any]:
    return {"color_scheme": scheme, "viewport": {"width": width, "height": 900}}


EVERYWHERE = [
    pytest.param(seen(scheme, width), id=f"{scheme}-{width}") for scheme in ("light", "dark") for width in (1440, 390)
]


@pytest.mark.parametrize("page", EVERYWHERE, indirect=True)
def test_every_chart_is_drawn_whole_and_legible(page: Page) -> None:
    charts = page.locator(".chart")
    scroll_through(page)
    texts = page.evaluate(TEXTS)
    assert {text["chart"] for text in texts} == {chart.get_attribute("aria-label") for chart in charts.all()}
    assert [text for text in texts if text["contrast"] < 4.5] == []
    assert [text for text in texts if text["cut"]] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]  # type: ignore[index]


@pytest.mark.parametrize("page", [pytest.param(seen("light", 1440), id="light-1440")], indirect=True)
def test_bars_and_lines_are_there_and_names_are_shown_as_they_are(page: Page) -> None:
    scroll_through(page)
    first = page.locator("#chart-0")
    assert first.locator(".bars .point").count() == len(POLICIES) * len(DEFAULT_TIERS)
    assert first.locator(".xtick text").all_text_contents() == list(NAMES)
    assert page.get_by_role("heading", name=f"TTFT of {HOSTILE}").count() == 1
    assert page.locator("#chart-1 .scatterlayer .js-line").count() == len(POLICIES) + 1, "and what is promised"


@pytest.mark.parametrize("page", [pytest.param(seen("light", 1440), id="light-1440")], indirect=True)
def test_charts_follow_a_change_of_the_colour_scheme(page: Page) -> None:
    scroll_through(page)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("#chart-0 .xtick text").first).to_have_css("fill", "rgb(163, 173, 184)")
    assert [text for text in page.evaluate(TEXTS) if text["contrast"] < 4.5] == []
