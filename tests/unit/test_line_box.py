"""Lines that wait for a heartbeat: what goes into the box, and how much of it is kept."""

from __future__ import annotations

import logging
from typing import Any

from sparkdl.process.log_lines import (
    BOXED_CHARS,
    MOST_BOXED,
    LineBox,
    boxed_lines,
    current_box,
    log_to_driver,
)


def test_messages_and_warnings_of_a_fit_wait_in_its_box(capsys: Any) -> None:
    handlers = list(logging.root.handlers)
    with boxed_lines() as box:
        assert current_box() is box
        log_to_driver("two\nlines")
        logging.getLogger("reader").warning("%d rows are late", 3)
        logging.getLogger("reader").info("nobody wants this")
        assert len(box) == 3
        assert box.take() == ["two", "lines", "WARNING reader: 3 rows are late"]
        assert box.take() == []
    log_to_driver("after the fit")
    assert box.take() == []
    assert current_box() is not box
    assert logging.root.handlers == handlers
    assert capsys.readouterr().out == "two\nlines\nafter the fit\n"  # printed as before


def test_the_latest_lines_are_kept_and_the_others_counted() -> None:
    box = LineBox()
    for number in range(MOST_BOXED + 7):
        box.put(f"line {number}")
    taken = box.take()
    assert taken[:2] == ["[7 lines dropped: too many at once]", "line 7"]
    assert (len(taken), taken[-1]) == (MOST_BOXED + 1, f"line {MOST_BOXED + 6}")
    box.put("x" * 10_000)
    assert box.take() == ["x" * BOXED_CHARS + "..."]
