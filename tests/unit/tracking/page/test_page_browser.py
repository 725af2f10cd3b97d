"""The page in a real browser; where Playwright and a Chromium are installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from prefix_proxy import PREFIX, prefix_proxy
from tracking_cases import RUN, Time, busy_fit, small_fit, small_search, usage

from sparkdl.process.host_load import HostLoad
from sparkdl.progress.events import (
    EpochEnded,
    EpochProgressed,
    Event,
    LinesLogged,
    TrainingBegan,
    TrainingEnded,
    WorkersProgressed,
    WorkerView,
)
from sparkdl.tracking.page import book as book_module
from sparkdl.tracking.page.book import RunBook
from sparkdl.tracking.page.dashboard import Dashboard

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed"),
]
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
        assert tab.page.locator("#curves canvas").count() == 2  # the loss, and f1 of two classes
        told = tab.page.locator("#curves [data-name=f1] .u-label").all_inner_texts()
        assert {"training, 0", "training, 1"} <= set(told)
        assert tab.page.locator("#workers tr").count() == 3
        assert tab.page.locator("#speed canvas").count() == 1
        sink.handle(EpochProgressed(1, 15, 20, {"loss": 0.125}, 7_777.0))
        tab.wait_for("#headline", "7,777")
        tab.wait_for("#headline", "all training")
        assert tab.page.locator("#link").inner_text() == "live"
        sink.handle(TrainingEnded(2))
        tab.wait_for("#headline", "Done")
        tab.wait_for("#headline", "all finished")
        assert tab.page.locator("#link").inner_text() == "ended"
        assert "training" not in " ".join(tab.page.locator("#workers td").all_inner_texts())
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


def test_curves_say_their_last_values_and_few_rows_do_not_stretch_their_axis(browser: Any) -> None:
    events: list[Event] = [TrainingBegan(0, 2, RUN)]
    for epoch, accuracy in enumerate((0.8, 0.9)):
        for batch in range(1, 11):
            early = epoch == 0 and batch == 1
            told = {"loss": 50.0 if early else 1.0, "accuracy": 0.01 if early else accuracy}
            events.append(EpochProgressed(epoch, batch, 10, told, 1e4))
        told = {"loss": 1.0, "accuracy": accuracy, "val_loss": 2.0, "val_accuracy": accuracy - 0.1}
        events.append(EpochEnded(epoch, 10, 10, 1000, told, 2e4))
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        for event in events:
            sink.handle(event)
        tab = Tab(browser.new_page(viewport={"width": 1000, "height": 900}))
        tab.page.goto(served.url)
        tab.wait_for("#headline", "Rows per second")
        # In one step: a card that the page replaced in between has no lines.
        shown = "[...document.querySelectorAll('#headline .card')].map(card => card.innerText)"
        cards = tab.page.evaluate(shown)
        assert [c.split("\n")[0].lower() for c in cards][1:3] == ["loss", "accuracy"]
        names = "document.querySelectorAll('#headline .what, #curves h2')"
        style = "getComputedStyle(e, '::first-letter').textTransform"
        styles = tab.page.evaluate(f"[...{names}].map(e => {style})")
        assert set(styles) == {"uppercase"}, "one style of names"
        assert "all workers, last epoch" in cards[3]
        accuracy = tab.page.locator("#curves .card").nth(1)
        values = ["2", "0.9", "0.9", "0.8"]
        assert accuracy.locator(".u-value").all_inner_texts() == values
        accuracy.locator(".u-over").hover(position={"x": 100, "y": 50})
        assert accuracy.locator(".u-value").all_inner_texts() != values
        tab.page.mouse.move(1, 1)
        assert accuracy.locator(".u-value").all_inner_texts() == values
        lowest, highest = tab.page.evaluate(
            "['min', 'max'].map(end => charts['curve accuracy'].plot.scales.y[end])"
        )
        assert 0.6 < lowest < 0.7
        assert 0.9 < highest < 1.0
        assert not tab.said
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
        shown = tab.page.locator("#servers tr").all_inner_texts()
        assert shown[2].split("\t")[0] == "1 · node1"
        assert shown[2].split("\t")[-1] == "3"
        assert [t for t in shown[2].split("\t") if not t.endswith("/s")][1:-1] == [
            "40.0 MB",
            "80.0 MB",
            "50.0 MB",
            "40.0 k",
            "1.3",
        ]
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
        tab.wait_for("#headline", " left")  # 22 of 24 epochs are done
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


def test_without_the_token_a_browser_sees_nothing(browser: Any) -> None:
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        for event in small_fit():
            sink.handle(event)
        base = served.url.partition("?")[0]
        for link in (base, f"{base}?token=wrong", f"{base}api/runs", f"{base}api/events"):
            tab = Tab(browser.new_page())
            assert tab.page.goto(link).status == 403
            shown = tab.page.inner_text("body")
            assert "token" in shown
            assert RUN.run_id not in tab.page.content()
            assert "digits" not in tab.page.content()
            tab.page.close()


def test_the_page_lives_behind_the_prefix_of_a_proxy(browser: Any) -> None:
    """Page, run and stream are asked below the prefix, and nothing beside it."""
    book = RunBook(clock=Time(step=0.5))
    with Dashboard(book, "127.0.0.1", 0) as served, prefix_proxy(served.url) as (url, asked):
        tab = Tab(browser.new_page())
        with closing(tab.page):  # while it is open, the proxy's end waits for its stream
            tab.page.goto(url)
            tab.wait_for("#empty", "No fit has begun yet")
            sink = book.sink()
            for event in small_fit():
                sink.handle(event)
            tab.wait_for("#headline", "Done")
            assert tab.page.locator("#curves canvas").count() == 2
            assert tab.said == []
        served.stop()
    paths = {path.partition("?")[0] for path in asked}
    assert {f"{PREFIX}/", f"{PREFIX}/api/runs", f"{PREFIX}/api/events"} <= paths
    assert all(path.startswith(f"{PREFIX}/") for path in paths)


def hour_of_64_workers(look: int) -> list[Any]:
    views = tuple(
        WorkerView(rank, "training", 0, f"executor-{rank}.cluster.local", rank, 0, look, 1200,
                   12_345 * look + rank, 31.25, 120,
                   usage(read=0.6 * look, compute=1.8 * look, exchange=0.6 * look),
                   HostLoad(87.5, 62.5, (93.0,) * 8, (50.0,) * 8))
        for rank in range(64)
    )  # fmt: skip
    return [
        WorkersProgressed(views, 10**9 * look, 10**9 * look),
        EpochProgressed(0, look, 1200, {"loss": 0.5 + 1 / (1 + look), "auc": 0.5}, 1e6),
        LinesLogged(tuple((rank, "WARNING x: " + "y" * 90) for rank in range(8))),
    ]


def test_a_tab_stays_below_50_mb_after_64_workers_and_an_hour(browser: Any) -> None:
    """A look each 3 s is as many as are ever kept at once; a sixth comes while the tab is open."""
    book = RunBook(clock=Time(step=1.0))
    looks = book_module.MOST_RECORDS
    with Dashboard(book, "127.0.0.1", 0) as served:
        sink = book.sink()
        sink.handle(TrainingBegan(0, 10, replace(RUN, num_workers=64)))
        for look in range(looks * 5 // 6):
            for event in hour_of_64_workers(look):
                sink.handle(event)
        tab = Tab(browser.new_page())
        tab.page.goto(served.url)
        tab.wait_for("#workers", "executor-63")
        for look in range(looks * 5 // 6, looks):
            for event in hour_of_64_workers(look):
                sink.handle(event)
        sink.handle(TrainingEnded(1))
        tab.wait_for("#headline", "Done")
        protocol = tab.page.context.new_cdp_session(tab.page)
        protocol.send("HeapProfiler.collectGarbage")
        heap = protocol.send("Runtime.getHeapUsage")
        assert heap["usedSize"] < 50e6, f"{heap['usedSize'] / 1e6:.0f} MB"
        assert tab.page.locator("#workers tr").count() == 65
        assert tab.said == []
        print(f"{heap['usedSize'] / 1e6:.1f} MB")
        tab.page.close()
