"""The progress bar: a live line only where somebody watches, a line per epoch elsewhere."""

from __future__ import annotations

import io
import os
import pty
import sys
import types
from typing import Any

import pytest
from progress_cases import Clock, epoch, mean, report

from sparkdl.progress.bar import ProgressBar, is_live
from sparkdl.progress.events import (
    EpochBegan,
    EpochEnded,
    EpochProgressed,
    Event,
    Metrics,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
    WorkersAwaited,
    WorkersJoined,
)
from sparkdl.progress.monitor import FitMonitor


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def events(metrics: Metrics | None = None, epochs: int = 2) -> list[Event]:
    metrics = metrics or {"loss": 0.5}
    found: list[Event] = [TrainingBegan(0, epochs)]
    for number in range(epochs):
        found += [
            EpochBegan(number), WorkersJoined(number, 0), WorkersJoined(number, 2),
            EpochProgressed(number, 5, 20, metrics, 900.0, 1.5),
            EpochEnded(number, 20, 20, 200, metrics, 1234.5, 1.5),
        ]  # fmt: skip
    return [*found, TrainingEnded(epochs)]


def shown(stream: io.StringIO, told: list[Event], verbose: int = 1) -> str:
    bar = ProgressBar(verbose, stream)
    for event in told:
        bar.handle(event)
    return stream.getvalue()


@pytest.mark.parametrize("verbose", [1, 2])
def test_a_log_file_has_one_line_per_epoch_and_nothing_else(verbose: int) -> None:
    assert shown(io.StringIO(), events(), verbose) == (
        "Epoch 1/2 - loss: 0.5000 - 1,234 rows/s - staleness 1.5\n"
        "Epoch 2/2 - loss: 0.5000 - 1,234 rows/s - staleness 1.5\n"
    )


@pytest.mark.parametrize(
    ("rows_per_s", "said"), [(0.25, "0.25 rows/s"), (3.14, "3.1 rows/s"), (12.4, "12 rows/s")]
)
def test_slow_training_is_no_standstill(rows_per_s: float, said: str) -> None:
    told: list[Event] = [
        TrainingBegan(0, 1), EpochBegan(0), EpochEnded(0, 1, 1, 1, {"loss": 0.5}, rows_per_s, 0.0),
    ]  # fmt: skip
    assert shown(io.StringIO(), told) == f"Epoch 1/1 - loss: 0.5000 - {said}\n"


def test_verbose_0_is_silent() -> None:
    assert shown(Terminal(), events(), verbose=0) == ""


def test_a_terminal_sees_one_line_being_written_over() -> None:
    text = shown(Terminal(), events(epochs=1))
    lines = text.split("\n")
    assert lines[0] == "Epoch 1/1"
    states = lines[1].split("\r")
    assert [s.strip() for s in states[:2]] == ["0 workers joined", "2 workers joined"]
    assert states[2].startswith(" 5/20 ━━━━━━──────────────────")
    assert states[-1].startswith("20/20 ━━━━━━━━━━━━━━━━━━━━━━━━ loss: 0.5000 - 1,234 rows/s")
    assert lines[2] == ""


def test_array_valued_metrics_are_shown_in_short() -> None:
    metrics: Metrics = {
        "loss": 0.5, "f1": [0.25, 0.5], "recall": [0.0, 1.0, 2.0, 3.0, 4.0], "m": [[1.0], [2.0]],
    }  # fmt: skip
    text = shown(io.StringIO(), events(metrics, 1))
    assert "f1: [0.2500 0.5000] - recall: [0.0000 1.0000 .. 4.0000]" in text
    assert "m: [[1.0000] [2.0000]]" in text


def test_a_live_line_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps is not written over: each look would leave one behind."""
    monkeypatch.setenv("COLUMNS", "40")
    metrics: Metrics = {f"metric_{i}": 0.5 for i in range(9)}
    text = shown(Terminal(), events(metrics, 1))
    live = text.split("\n")[1].split("\r")[:-1]
    assert live
    assert all(len(state) < 40 for state in live)


def test_a_stream_without_lines_gets_ascii() -> None:
    """Before, LANG=C ended the fit with UnicodeEncodeError."""

    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    raw = io.BytesIO()
    bar = ProgressBar(1, Ascii(raw, encoding="ascii"))
    for event in events(epochs=1):
        bar.handle(event)
    assert b"20/20 ========" in raw.getvalue()


def test_an_error_begins_on_a_line_of_its_own() -> None:
    told = [*events(epochs=1)[:-2], TrainingFailed("ValueError: x")]
    assert shown(Terminal(), told).endswith("\n")
    assert shown(io.StringIO(), told) == ""


# -- where a live bar goes ----------------------------------------------------------------------


class ZMQInteractiveShell:
    """Stands for ipykernel's."""


class DatabricksShell(ZMQInteractiveShell):
    pass


class TerminalInteractiveShell:
    """Stands for IPython's."""


def notebook(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))


class _Cell(io.StringIO):
    pass


_Cell.__module__ = "ipykernel.iostream"


def test_ipykernel_in_a_process_is_no_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in (None, TerminalInteractiveShell()):
        notebook(monkeypatch, shell)
        assert not is_live(io.StringIO())
        assert not is_live(_Cell())
        assert shown(io.StringIO(), events(epochs=1)).count("\n") == 1
    monkeypatch.delitem(sys.modules, "IPython")
    assert not is_live(io.StringIO())


def test_a_cell_of_a_notebook_is_live_unless_its_output_goes_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for shell in (ZMQInteractiveShell(), DatabricksShell()):
        notebook(monkeypatch, shell)
        assert is_live(_Cell())
        assert not is_live(io.StringIO())


def test_a_terminal_is_live_unless_it_is_dumb(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = pty.openpty()
    try:
        monkeypatch.setenv("TERM", "xterm")
        with os.fdopen(slave, "w") as stream:
            assert is_live(stream)
            monkeypatch.setenv("TERM", "dumb")
            assert not is_live(stream)
    finally:
        os.close(master)


def test_a_quiet_run_writes_nothing_into_a_log_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: "no workers yet" again and again wherever ipykernel was imported."""

    class NoCallbacks:
        has_callbacks = stop_wanted = wants_progress = False
        learning_rate = None

        def handle(self, event: Event) -> None: ...

        def take_changes(self) -> None: ...

    monitor = FitMonitor(
        NoCallbacks(), [ProgressBar(1)], mean, epochs=1, first_epoch=0, clock=Clock()
    )
    monitor.begin()
    for _ in range(500):
        monitor.update(report(joined=0))
    monitor.update(report(epoch(500, missing=1)))
    assert capsys.readouterr().out == ""
    monitor.update(report(epoch(1000)))
    assert capsys.readouterr().out == "Epoch 1/1 - loss: 1.0000\n"


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_lost_workers_are_told(stream: type[io.StringIO]) -> None:
    told: list[Event] = [
        TrainingBegan(0, 1), EpochBegan(0), WorkersAwaited(0, (1,)), WorkersAwaited(0, ()),
        WorkersAwaited(0, (0, 2)),
    ]  # fmt: skip
    text = shown(stream(), told)
    assert "worker 1 was lost; the others wait until it is started again\n" in text
    assert "workers 0, 2 were lost; the others wait until they are started again\n" in text
    assert text.count("lost") == 2


FOUR = {"loss": 0.1234, "accuracy": 0.9, "val_loss": 0.2345, "val_accuracy": 0.8}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (200, f"1600/1600 {'━' * 24} loss: 0.1234 - accuracy: 0.9000 - val_loss: 0.2345 - "
              "val_accuracy: 0.8000 - 123,456 rows/s - staleness 1.5"),
        (110, "1600/1600 loss: 0.1234 - accuracy: 0.9000 - val_loss: 0.2345 - "
              "val_accuracy: 0.8000 - 123,456 rows/s"),
        (100, "1600/1600 loss: 0.1234 - accuracy: 0.9000 - val_loss: 0.2345 - "
              "val_accuracy: 0.8000"),
        (80, "loss: 0.1234 - accuracy: 0.9000 - val_loss: 0.2345 - val_accuracy: 0.8000"),
        (70, "loss: 0.1234 - val_loss: 0.2345 - val_accuracy: 0.8000 - .."),
        (12, "loss: 0.123"),
    ],
)  # fmt: skip
def test_the_line_fits_the_screen(monkeypatch: Any, columns: int, line: str) -> None:
    """What is least needed goes first, and no line wraps, nor the one that an epoch ends with."""
    monkeypatch.setenv("COLUMNS", str(columns))
    told = [
        TrainingBegan(0, 1), EpochBegan(0),
        EpochProgressed(0, 1600, 1600, FOUR, 123456.0, 1.5),
        EpochEnded(0, 1600, 1600, 99, FOUR, 123456.0, 1.5),
    ]  # fmt: skip
    _, *written = shown(Terminal(), told).replace("\r", "\n").splitlines()
    assert [each.strip() for each in written] == [line] * 2
    assert all(len(each) < columns for each in written)
