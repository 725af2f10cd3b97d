"""The page's runs and its server: what it shows, to whom, and how much memory that takes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prefix_proxy import PREFIX, prefix_proxy
from tracking_cases import RUN, SEARCH_ID, Time, busy_fit, small_fit, small_search, usage

from sparkdl import cli
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.files.storage import read_start
from sparkdl.process.host_load import HostLoad
from sparkdl.progress.events import (
    EpochProgressed,
    LinesLogged,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
    WorkersProgressed,
    WorkerView,
)
from sparkdl.tracking import JsonLines
from sparkdl.tracking.page import book as book_module
from sparkdl.tracking.page.book import MOST_LINES, WORKER_FIELDS, RunBook
from sparkdl.tracking.page.dashboard import (
    MOST_STREAMS,
    REFUSAL,
    Dashboard,
    dashboard,
    make_app,
    page_html,
)
from sparkdl.tracking.sinks import sinks_of
from sparkdl.training.phases import memory_bytes

pytestmark = pytest.mark.long


def kinds(book: RunBook, run_id: str = RUN.run_id) -> list[str]:
    records = book.records(run_id)
    assert records is not None
    return [record["kind"] for record in json.loads(records)]


def told(events: list[Any], step: float = 1.0) -> RunBook:
    book = RunBook(clock=Time(step=step))
    sink = book.sink()
    for event in events:
        sink.handle(event)
    return book


# -- the runs


def test_a_search_is_a_run_with_trials(tmp_path: Path) -> None:
    book = told(small_search())
    (line,) = book.runs()
    assert (line["state"], line["metric"], line["trials"]) == ("done", "val_accuracy", 12)
    found = json.loads(book.records(SEARCH_ID) or "")
    assert [r["kind"] for r in found[:5]] == ["search", "trial", "point", "point", "rung"]
    last = [r for r in found if r["kind"] == "rung"][-2]
    assert (last["trial"], last["state"], last["importances"]["rate"]) == (10, "complete", 0.75)
    assert [r["error"] for r in found if r.get("state") == "failed"] == [
        "ValueError: no such network"
    ]
    assert found[-1]["best"] == 10
    # from its event file as well
    lines = JsonLines(str(tmp_path), clock=Time(step=1.0))
    for event in small_search():
        lines.handle(event)
    past = RunBook(str(tmp_path))
    assert [run["run"] for run in past.runs()] == [SEARCH_ID]
    again = json.loads(past.records(SEARCH_ID) or "")
    assert [{**r, "t": 0} for r in again] == [{**r, "t": 0} for r in found]


def test_a_search_of_ten_thousand_trials_is_bounded() -> None:
    book = RunBook(clock=Time(step=1.0))
    sink = book.sink()
    began, *events = small_search(3)
    sink.handle(began)
    for number in range(10_000):
        for event in events[:3]:
            sink.handle(replace(event, trial=number))
    found = json.loads(book.records(SEARCH_ID) or "")
    points = [r for r in found if r["kind"] == "point"]
    assert book_module.MOST_POINTS / 2 <= len(points) <= book_module.MOST_POINTS + 1
    assert points[-1]["trial"] == 9_999


def test_a_run_has_what_its_fit_told() -> None:
    book = told(small_fit())
    assert kinds(book) == [
        "begin", "workers", "step", "workers", "epoch", "workers", "step", "workers", "epoch",
        "end",
    ]  # fmt: skip
    found = json.loads(book.records(RUN.run_id) or "")
    assert (found[0]["epochs"], found[0]["workers"], found[0]["model"]) == (2, 2, "digits")
    worker = dict(zip(WORKER_FIELDS, found[3]["workers"][1], strict=True))
    assert (worker["rank"], worker["state"], worker["compute"]) == (1, "training", 1.75)
    (line,) = book.runs()
    assert (line["run"], line["state"], line["epoch"]) == (RUN.run_id, "done", 1)
    assert line["metrics"] == found[8]["metrics"]


def test_a_run_that_failed_says_so() -> None:
    book = told([TrainingBegan(0, 2, RUN), TrainingFailed("ValueError: bad rows")])
    assert book.runs()[0]["state"] == "failed"
    assert json.loads(book.records(RUN.run_id) or "")[-1]["error"] == "ValueError: bad rows"
    assert book.records("no such run") is None


def test_a_long_fit_of_64_workers_stays_small_and_has_its_beginning_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "MOST_RECORDS", 100)
    book = RunBook(clock=Time(step=0.25))
    sink = book.sink()
    sink.handle(TrainingBegan(0, 10, replace(RUN, num_workers=64)))
    looks = 700
    for look in range(looks):
        views = tuple(
            WorkerView(rank, "training", 0, f"node{rank}", rank, 0, look, looks, 100 * look + rank,
                       1.5, 4, usage(compute=float(look)))
            for rank in range(64)
        )  # fmt: skip
        sink.handle(WorkersProgressed(views, look, look))
        sink.handle(EpochProgressed(0, look, looks, {"loss": 1.0, "accuracy": 0.5}, 100.0))
    text = book.records(RUN.run_id) or ""
    assert len(text) < 100 * 64 * 100  # so 8 MB for 1200 records
    found = [r for r in json.loads(text) if r["kind"] == "step"]
    assert 50 <= len(found) <= 102
    assert [found[0]["batches"], found[-1]["batches"]] == [0, looks - 1]
    gaps = [b["batches"] - a["batches"] for a, b in itertools.pairwise(found[:-1])]
    assert set(gaps) == {8}  # evenly spread


def test_the_drivers_machine_is_shown_once_by_the_name_that_its_workers_have() -> None:
    book = RunBook()
    sink = book.sink()
    for event in busy_fit(3):
        changes = {"driver_host": "node1"} if isinstance(event, WorkersProgressed) else {}
        sink.handle(replace(event, **changes))
    looked = next(r for r in json.loads(book.records(RUN.run_id) or "") if r["kind"] == "workers")
    assert looked["hosts"] == [
        ["node1 (the driver's)", 41.0, 95.0, [93.0, 0.0], [50.0, 10.0]],
        ["node0", 41.0, 95.0, [93.0, 0.0], [50.0, 10.0]],
    ]


def test_a_run_has_the_load_of_its_machines_and_its_log_lines(tmp_path: Path) -> None:
    book = told(busy_fit(3))
    found = json.loads(book.records(RUN.run_id) or "")
    (looked, *_), said = ([r for r in found if r["kind"] == k] for k in ("workers", "log"))
    assert looked["hosts"] == [  # a host once, though two workers run on it
        ["the driver's host", 10.0, 20.0, [], []],
        ["node0", 41.0, 95.0, [93.0, 0.0], [50.0, 10.0]],
        ["node1", 41.0, 95.0, [93.0, 0.0], [50.0, 10.0]],
    ]
    assert [r["lines"] for r in said] == [[[n, f"WARNING reader: line {n}"]] for n in (1, 2, 3)]
    # from its event file as well
    lines = JsonLines(str(tmp_path), clock=Time(step=1.0))
    for event in busy_fit(3):
        lines.handle(event)
    lines.handle(TrainingEnded(1))
    past = RunBook(str(tmp_path))
    assert len(past.runs()) == 1
    again = json.loads(past.records(RUN.run_id) or "")
    assert [r["lines"] for r in again if r["kind"] == "log"] == [r["lines"] for r in said]
    assert next(r["hosts"] for r in again if r["kind"] == "workers") == looked["hosts"]


def test_the_latest_log_lines_are_kept() -> None:
    book = RunBook(clock=Time(step=1.0))
    sink = book.sink()
    sink.handle(TrainingBegan(0, 1, RUN))
    for number in range(10_000):
        sink.handle(LinesLogged(((number % 64, f"{number} {'x' * 490}"),)))
    text = book.records(RUN.run_id) or ""
    assert book_module.MOST_LOG_CHARS - 1000 < len(text) < book_module.MOST_LOG_CHARS + 10_000
    assert json.loads(text)[-1]["lines"][0][1].startswith("9999 ")
    sink.handle(LinesLogged(tuple((0, str(n)) for n in range(MOST_LINES + 5))))
    assert [int(text) for _, text in json.loads(book.records(RUN.run_id) or "")[-1]["lines"]] == (
        list(range(5, MOST_LINES + 5))
    )


@pytest.mark.slow
def test_64_workers_for_an_hour_stay_below_50_mb_at_the_page_and_100_mb_at_the_driver() -> None:
    # A look every 3 s is as many as are ever kept at once: with more, every second one is left out.
    before = memory_bytes()
    book = RunBook(clock=Time(step=1.0))
    sink = book.sink()
    sink.handle(TrainingBegan(0, 10, replace(RUN, num_workers=64)))
    for look in range(book_module.MOST_RECORDS):
        views = tuple(
            WorkerView(rank, "training", 0, f"executor-{rank}.cluster.local", rank, 0, look, 1200,
                       12_345 * look + rank, 31.25, 120,
                       usage(read=0.6 * look, compute=1.8 * look, exchange=0.6 * look),
                       HostLoad(87.5, 62.5, (93.0,) * 8, (50.0,) * 8))
            for rank in range(64)
        )  # fmt: skip
        sink.handle(WorkersProgressed(views, 10**9 * look, 10**9 * look))
        sink.handle(EpochProgressed(0, look, 1200, {"loss": 0.5, "auc": 0.5}, 1e6))
        sink.handle(LinesLogged(tuple((rank, "WARNING x: " + "y" * 90) for rank in range(8))))
    text = book.records(RUN.run_id) or ""
    assert 1e6 < len(text) < 50e6
    assert memory_bytes() - before < 100e6


def test_past_runs_come_from_their_files_and_new_files_are_found(tmp_path: Path) -> None:
    book = RunBook(str(tmp_path))
    assert book.runs() == []
    sink = JsonLines(str(tmp_path), clock=Time(step=1.0))
    for event in small_fit():
        sink.handle(event)
    (line,) = book.runs()
    assert (line["run"], line["state"], line["model"]) == (RUN.run_id, "done", "digits")
    assert kinds(book) == kinds(told(small_fit()))


def test_a_file_that_is_cut_or_foreign_does_not_hide_the_others(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path), clock=Time(step=1.0))
    for event in small_fit():
        sink.handle(event)
    whole = (tmp_path / f"{RUN.run_id}.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n[]\nnot json\n')
    book = RunBook(str(tmp_path))
    assert {line["run"]: line["state"] for line in book.runs()} == {
        RUN.run_id: "done", "cut": "running", "foreign": "running",
    }  # fmt: skip


def write_run(folder: Path, name: str, *, ended: bool = True) -> None:
    events: list[Any] = [TrainingBegan(0, 2, replace(RUN, run_id=name))]
    sink = JsonLines(str(folder), clock=Time(step=1.0))
    for event in [*events, TrainingEnded(2)] if ended else events:
        sink.handle(event)
    if not ended:
        sink._file.close()  # type: ignore[union-attr]


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the event files that are read from now on."""
    reads: list[str] = []

    def count(path: str, at_most: int) -> bytes:
        reads.append(Path(path).name)
        return read_start(path, at_most)

    monkeypatch.setattr(book_module, "read_start", count)
    return reads


def test_a_pipe_in_the_folder_does_not_hide_the_others(tmp_path: Path) -> None:
    write_run(tmp_path, "run")
    os.mkfifo(tmp_path / "zzz.jsonl")
    assert [line["run"] for line in RunBook(str(tmp_path)).runs()] == ["run"]


def test_of_many_past_runs_the_newest_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all were kept; and after a live run, all were read again at each look."""
    monkeypatch.setattr(book_module, "MOST_RUNS", 10)
    for number in range(25):
        write_run(tmp_path, f"20260101-{number:06}-a", ended=number != 20)
    reads = counted_reads(monkeypatch)
    book = RunBook(str(tmp_path))
    newest = [f"20260101-{number:06}-a" for number in range(24, 14, -1)]
    assert [line["run"] for line in book.runs()] == newest
    assert len(reads) == 10
    live = book.sink()
    live.handle(TrainingBegan(0, 2, replace(RUN, run_id="20260102-000000-a")))
    for _ in range(3):
        assert [line["run"] for line in book.runs()] == ["20260102-000000-a", *newest[:-1]]
    assert len(reads) == 10
    write_run(tmp_path, "20260103-000000-a")
    with (tmp_path / "20260101-000020-a.jsonl").open("ab") as file:
        file.write((tmp_path / f"{newest[0]}.jsonl").read_bytes().splitlines()[-1])
    lines = book.runs()
    expected = ["20260103-000000-a", "20260102-000000-a", *newest[:-2]]
    assert [line["run"] for line in lines] == expected
    assert {line["run"]: line["state"] for line in lines}["20260101-000020-a"] == "done"
    assert reads[10:] == ["20260103-000000-a.jsonl", "20260101-000020-a.jsonl"]


def test_of_a_large_file_the_beginning_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "MOST_FILE_BYTES", 1000)
    write_run(tmp_path, "large", ended=False)
    reads, book = counted_reads(monkeypatch), RunBook(str(tmp_path))
    for _ in range(3):
        with (tmp_path / "large.jsonl").open("ab") as file:
            file.write(b"x" * 1000)
        assert [line["model"] for line in book.runs()] == ["digits"]
    assert len(reads) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"time": 1e999, "event": "training_ended", "stopped": false}',
        '{"time": 1, "event": "training_ended", "stopped": NaN}',
        '{"time": 1, "event": "training_ended", "stopped": [{"a": -1e999}]}',
        '{"time": 1%s, "event": "training_ended", "stopped": false}' % ("0" * 400),
        '{"time": 1, "event": "training_ended", "stopped": %s}' % ("[" * 100_000 + "]" * 100_000),
        "[" * 100_000,
    ],
)  # fmt: skip
def test_a_line_that_json_or_the_page_cannot_take_is_left_out(tmp_path: Path, line: str) -> None:
    """Before, the list of runs raised RecursionError, or had an Infinity."""
    write_run(tmp_path, RUN.run_id, ended=False)
    path = tmp_path / f"{RUN.run_id}.jsonl"
    path.write_text(path.read_text() + line + "\n" + path.read_text())
    book = RunBook(str(tmp_path))
    (told,) = book.runs()
    assert (told["state"], told["model"]) == ("running", "digits")
    assert kinds(book) == ["begin", "begin"]
    json.dumps([told, json.loads(book.records(RUN.run_id) or "")], allow_nan=False)


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path, name)

    def read(path: str, at_most: int) -> bytes:
        if path.endswith("b.jsonl"):
            raise ResourceError("no", expected="a file", received="none")
        return read_start(path, at_most)

    book = RunBook(str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(book_module, "read_start", read)
        assert [line["run"] for line in book.runs()] == ["a"]
    assert [line["run"] for line in book.runs()] == ["b", "a"]


def test_a_folder_that_the_first_fit_will_make_is_empty_until_then(tmp_path: Path) -> None:
    book = RunBook(str(tmp_path / "runs"))
    assert book.runs() == []
    sink = JsonLines(str(tmp_path / "runs"))
    sink.handle(TrainingBegan(0, 2, RUN))
    assert [line["state"] for line in book.runs()] == ["running"]
    sink.handle(TrainingEnded(2))
    assert [line["state"] for line in book.runs()] == ["done"]


def test_a_listener_that_is_too_slow_is_ended_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(book_module, "MOST_WAITING", 10)
    book = RunBook()
    slow, quick = book.listen(5), book.listen(5)
    heard = []
    for number in range(20):
        book.add("run", {"kind": "step", "t": number})
        heard.append(quick.get(1.0))
    assert json.loads(heard[-1] or "") == {"run": "run", "record": {"kind": "step", "t": 19}}
    taken = [slow.get(0.0) for _ in range(12)]
    assert None in taken
    book.end_listeners()
    assert quick.get(1.0) is None


def test_the_oldest_listener_makes_room_for_one_too_many() -> None:
    book = RunBook()
    first = book.listen(2)
    others = [book.listen(2), book.listen(2)]
    assert first.get(0.0) is None
    book.add("run", {"kind": "step", "t": 1})
    assert all(other.get(1.0) for other in others)


# -- the server


@pytest.fixture
def page() -> Iterator[Dashboard]:
    with Dashboard(RunBook(), "127.0.0.1", 0) as served:
        yield served


def get(page: Dashboard, path: str, token: str | None = None) -> tuple[int, str, dict[str, str]]:
    base, _, own = page.url.partition("?token=")
    query = own if token is None else token
    try:
        with urllib.request.urlopen(f"{base}{path}?token={query}", timeout=30) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


@pytest.mark.parametrize("path", ["", "api/runs", "api/run/x", "api/events", "nowhere"])
def test_without_the_token_there_is_nothing(page: Dashboard, path: str) -> None:
    for token in ("", "wrong"):
        status, text, _ = get(page, path, token)
        assert status == 403
        assert "token" in text
        assert len(text) < 200


@pytest.mark.parametrize("path", ["/", "/api/runs", "/api/run/x", "/api/events", "/nowhere"])
def test_the_application_wants_the_token_of_each_request(path: str) -> None:
    """A connection that has shown the token once stays open: its later requests are looked at."""
    closing = threading.Event()
    closing.set()  # a stream of events ends at once
    browser = make_app(RunBook(), "the-token", closing).test_client()
    for query in ("", "?token=", "?token=wrong"):
        refused = browser.get(path + query)
        assert refused.status_code == 403
        assert refused.text == REFUSAL
    wanted = 404 if path in ("/nowhere", "/api/run/x") else 200
    assert browser.get(f"{path}?token=the-token").status_code == wanted


def test_the_page_is_one_file_that_loads_nothing_and_may_talk_to_its_server_only(
    page: Dashboard,
) -> None:
    status, text, headers = get(page, "")
    assert status == 200
    assert len(text) < 200_000
    assert "{{" not in text.replace("{{}}", "")
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=[\"'](?!data:)", text)
    assert not re.search(r"(fetch|import|EventSource|url)\s*\(\s*[\"'`](https?:)?//", text)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert re.search(r"script-src 'nonce-[\w-]{20,}'", policy)
    assert headers["Referrer-Policy"] == "no-referrer"


def test_nothing_can_be_written(page: Dashboard) -> None:
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(page.url, method=method, data=b"x")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        assert caught.value.code == 405


def visit(page: Dashboard) -> socket.socket:
    """A connection to the page's server."""
    address = urlsplit(page.url)
    return socket.create_connection((address.hostname or "", address.port or 0), 30)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "head",
    [
        "GET /{} HTTP/1.1\r\nX: ",
        "POST /{} HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        "GET /{}&x=",
    ],
)
def test_a_request_of_endless_size_is_ended(page: Dashboard, head: str, known: bool) -> None:
    query = urlsplit(page.url).query if known else "token=wrong"
    with visit(page) as stranger:
        stranger.sendall(head.replace("{}", f"?{query}").encode())
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            stranger.sendall(b"x" * (32 << 20))
    assert get(page, "")[0] == 200


def test_idle_connections_of_strangers_hold_up_nobody(page: Dashboard) -> None:
    idle = [visit(page) for _ in range(300)]  # the server has 24 threads
    began = time.monotonic()
    assert get(page, "")[0] == 200
    assert time.monotonic() - began < 4
    assert closed(idle[0])  # each newcomer beyond 256 ends the oldest
    for stranger in idle:
        stranger.close()


def test_a_stranger_has_a_few_seconds_in_all(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparkdl.wire.greeting.FIRST_WORDS_S", 0.5)
    with visit(page) as stranger:
        began = time.monotonic()
        stranger.settimeout(0.2)
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /?token=" + b"x" * 40:
                stranger.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    assert stranger.recv(100) == b""
                    break
        assert time.monotonic() - began < 6  # all bytes take ten


def closed(connection: socket.socket) -> bool:
    """Whether the server closes, within half a minute, and says nothing."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def stream(page: Dashboard, lines: list[str], began: threading.Event) -> None:
    base, _, token = page.url.partition("?token=")
    with urllib.request.urlopen(f"{base}api/events?token={token}", timeout=30) as answer:
        for line in answer:
            lines.append(line.decode().strip())
            began.set()


def test_a_fit_is_streamed_to_every_tab_and_stop_ends_them(page: Dashboard) -> None:
    tabs: list[tuple[list[str], threading.Event]] = [([], threading.Event()) for _ in range(5)]
    threads = [threading.Thread(target=stream, args=(page, *tab)) for tab in tabs]
    for thread in threads:
        thread.start()
    for _, began in tabs:
        assert began.wait(30)
    (sink,) = sinks_of([], lambda: None)
    for event in small_fit():
        sink.handle(event)
    _, text, _ = get(page, "api/run/" + RUN.run_id)
    page.stop()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for lines, _ in tabs:
        streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        assert [told["record"] for told in streamed] == json.loads(text)
        assert {told["run"] for told in streamed} == {RUN.run_id}
    assert sinks_of([], lambda: None) == []


def test_a_point_is_at_the_page_within_a_second_of_its_report(page: Dashboard) -> None:
    base, _, token = page.url.partition("?token=")
    (sink,) = sinks_of([], lambda: None)
    with urllib.request.urlopen(f"{base}api/events?token={token}", timeout=30) as answer:
        while answer.readline() != b": here\n":
            pass
        sink.handle(small_fit()[0])
        reports = {
            b'"kind":"workers"': small_fit()[3],
            b'"kind":"step"': EpochProgressed(0, 10, 20, {"loss": 0.5}, 100.0),
        }
        for kind, event in reports.items():
            took = []
            while not took or min(took) >= 1.0:  # a loaded machine may stand still meanwhile
                assert len(took) < 5, took
                began = time.monotonic()
                sink.handle(event)
                while kind not in answer.readline():
                    pass
                took.append(time.monotonic() - began)


def test_the_page_works_behind_the_prefix_of_a_proxy(page: Dashboard) -> None:
    (sink,) = sinks_of([], lambda: None)
    events = small_fit()
    sink.handle(events[0])
    with prefix_proxy(page.url) as (url, asked):
        text = urllib.request.urlopen(url, timeout=30).read().decode()
        assert text.lower().startswith("<!doctype html>")
        # every address in its scripts is relative to the page
        addresses = re.findall(r"""(?:fetch|EventSource|url|ask)\(\s*[`"']([^`"']*)""", text)
        assert addresses
        assert not [address for address in addresses if address.startswith(("/", "http"))]
        base, _, query = url.partition("?")
        with urllib.request.urlopen(f"{base}api/events?{query}", timeout=30) as answer:
            while answer.readline() != b": here\n":
                pass
            for event in events[1:4]:
                sink.handle(event)
            assert b'"kind":"workers"' in _first_data(answer)
            page.stop()
        assert [path.partition("?")[0] for path in asked] == [f"{PREFIX}/", f"{PREFIX}/api/events"]


def _first_data(answer: Any) -> bytes:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    found: bytes = line
    return found


def test_a_tab_that_comes_back_while_the_page_stops_does_not_hold_it(page: Dashboard) -> None:
    book = page._book
    ended, lines, began = book.end_listeners, [], threading.Event()
    tab = threading.Thread(target=stream, args=(page, lines, began))

    def end_and_come_back() -> None:
        book.end_listeners = ended  # type: ignore[method-assign]
        ended()
        tab.start()
        assert began.wait(30)

    book.end_listeners = end_and_come_back  # type: ignore[method-assign]
    stopping = threading.Thread(target=page.stop)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()
    tab.join(30)
    assert not tab.is_alive()


def test_more_tabs_than_there_is_room_for_leave_the_server_able_to_answer(page: Dashboard) -> None:
    threads = []
    for _ in range(MOST_STREAMS + 4):
        began = threading.Event()
        threads.append(threading.Thread(target=stream, args=(page, [], began)))
        threads[-1].start()
        assert began.wait(30)
    assert get(page, "api/runs")[0] == 200
    page.stop()
    for thread in threads:
        thread.join(30)


def test_dashboard_prints_its_link_and_says_what_is_wrong(capsys: Any) -> None:
    with dashboard() as page:
        assert page.url in capsys.readouterr().out
        assert "token=" in page._repr_html_()
        port = int(re.findall(r":(\d+)/", page.url)[0])
        with pytest.raises(ResourceError, match="cannot be served"):
            dashboard(port=port)
    with pytest.raises(ConfigError, match="port"):
        dashboard(port=-1)


def test_the_page_has_the_licence_of_what_it_bundles() -> None:
    static = Path(book_module.__file__).parent / "static"
    assert "MIT License" in (static / "uPlot.LICENSE").read_text()
    assert "uPlot" in page_html()


def test_a_fit_that_ends_is_told_to_the_page() -> None:
    book = told([TrainingBegan(0, 2, RUN), TrainingEnded(1, stopped=True)])
    assert json.loads(book.records(RUN.run_id) or "")[-1]["stopped"] is True


@pytest.mark.processes
def test_the_command_shows_past_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    sink = JsonLines(str(tmp_path), clock=Time(step=1.0))
    for event in small_fit():
        sink.handle(event)
    command = [sys.executable, "-m", "sparkdl", "dashboard", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            base, _, query = url.partition("?")
            with urllib.request.urlopen(f"{base}api/runs?{query}", timeout=60) as answer:
                assert [run["run"] for run in json.load(answer)] == [RUN.run_id]
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert cli.main(["dashboard", str(tmp_path / "nowhere")]) == 1
