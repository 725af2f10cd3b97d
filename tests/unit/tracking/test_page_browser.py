"""The page in a real browser; where Playwright and a Chromium are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tracking_cases import RUN, Time, busy_fit, small_fit, small_search

from sparkdl.progress.events import EpochEnded, EpochProgressed, TrainingEnded
from sparkdl.tracking.page.book import RunBook
from sparkdl.tracking.page.dashboard import Dashboard

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
_WAIT_MS = 60_000


class Tab:
    """A tab, with what its console said and what it asked for."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.said: list[str] = []
        self.asked: list[str] = []
        page.set_default_timeout(_WAIT_MS)
        page.on("console", lambda m: self.said.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def wait_for(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_a_fit_while_it_runs_and_after_its_driver_is_gone(
    browser: Any, scheme: str
) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        tab = Tab(browser.new_page(color_scheme=scheme))
        tab.page.goto(served.url)
        tab.wait_for("#empty", "No fit has begun yet")
        sink, events = book.sink(), small_fit()
        for event in events:
            if isinstance(event, EpochEnded) and event.epoch == 1:
                break
            sink.handle(event)
        tab.wait_for("#headline", "Epoch 2 of 2")
        tab.wait_for("#headline", "2 of 2")
        assert tab.page.locator("#curves canvas").count() == 1  # the loss: f1 has several values
        assert tab.page.locator("#workers tr").count() == 3
        assert tab.page.locator("#speed canvas").count() == 1
        sink.handle(EpochProgressed(1, 15, 20, {"loss": 0.125}, 7_777.0))
        tab.wait_for("#headline", "7,777")
        sink.handle(TrainingEnded(2))
        tab.wait_for("#headline", "Done")
        assert RUN.run_id in tab.page.locator("#runs option").first.get_attribute("value")
        assert tab.said == []
    tab.wait_for("#link", "does not answer")
    tab.wait_for("#headline", "Done")  # what was drawn stays
    origin = served.url.partition("?")[0]
    assert all(url.startswith((origin, "data:")) for url in tab.asked)
    tab.page.close()


def test_keys_switch_runs_and_colours(browser: Any) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        for number, last in ((1, 1), (2, 2)):
            sink = book.sink()
            for event in small_fit():
                if hasattr(event, "run"):
                    event = type(event)(0, last, type(RUN)(f"run-{number}", "m", 2, {}))
                if getattr(event, "epoch", 0) < last:
                    sink.handle(event)
        tab = Tab(browser.new_page())
        tab.page.goto(served.url)
        tab.wait_for("#headline", "Epoch 2 of 2")  # the newest
        tab.page.keyboard.press("j")
        tab.wait_for("#headline", "Epoch 1 of 1")
        tab.page.keyboard.press("k")
        tab.wait_for("#headline", "Epoch 2 of 2")
        before = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.page.keyboard.press("d")
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") != before
        assert tab.said == []
        tab.page.close()


def test_a_narrow_screen_does_not_scroll_sideways(browser: Any) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        for event in small_fit():
            sink.handle(event)
        tab = Tab(browser.new_page(viewport={"width": 390, "height": 800}))
        tab.page.goto(served.url)
        tab.wait_for("#headline", "Done")
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        tab.page.close()


def test_load_of_machines_and_log_lines_of_one_rank(browser: Any) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        for event in busy_fit(40):
            sink.handle(event)
        tab = Tab(browser.new_page())
        tab.page.goto(served.url)
        tab.wait_for("#hosts", "node1")
        assert tab.page.locator("#hosts tr").count() == 1 + 3, "the driver's host and two nodes"
        assert tab.page.locator("#hosts td.slow").count() == 2, "memory above 90 %"
        tab.wait_for("#log-note", "the last 40")
        tab.page.fill("#log-filter", "3")
        tab.wait_for("#log-note", "10 of the last 40")
        assert "rank 2" not in tab.page.inner_text("#log")
        tab.page.fill("#log-filter", "line 40")
        tab.wait_for("#log-note", "1 of the last 40")
        assert tab.said == []
        tab.page.close()


def test_a_search_has_four_charts_and_a_table(browser: Any) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        *events, last = small_search()
        for event in events:
            sink.handle(event)
        tab = Tab(browser.new_page(viewport={"width": 390, "height": 800}))
        tab.page.goto(served.url)
        tab.wait_for("#headline", "12 trials")
        tab.wait_for("#headline", "Searching")
        sink.handle(last)
        tab.wait_for("#headline", "Done")
        assert tab.page.locator("#learning path.trial").count() == 11
        assert tab.page.locator("#importance .share").count() == 2
        assert tab.page.locator("#scatter circle.trial").count() == 2 * 11
        assert tab.page.locator("#parallel path.trial").count() == 11
        assert tab.page.locator("#trials tr").count() == 13
        tab.wait_for("#trials", "no such network")
        assert not tab.page.locator("#curves").is_visible()
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert tab.said == []
        tab.page.close()
