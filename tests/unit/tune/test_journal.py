"""``study.json`` may come from anybody: what a search did not write ends in one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.tune.journal import Journal
from sparkdl.tune.searchers import RandomSearch
from sparkdl.tune.suggestions import Space

SETTINGS = {"metric": "val_loss", "seed": 0}


def written(folder: Path) -> Path:
    """The journal of a search of two trials, of which one has a score."""
    journal = Journal.at(str(folder), SETTINGS, resume=False)
    searcher = RandomSearch(2, 3)
    spaces = {"rate": Space("float", 0.1, 1.0), "kind": Space("categorical", choices=("a", None))}
    for trial in range(2):
        segment = searcher.ask()
        assert segment is not None
        journal.asked(segment)
        journal.built(trial, spaces, {"rate": 0.5, "kind": None})
        if not trial:
            journal.told(segment, -0.25, {"val_loss": 0.25})
    journal.write()
    return folder / "study.json"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    journal = Journal.at(str(tmp_path), SETTINGS, resume=True)
    assert [segment.trial for segment in journal.replay(RandomSearch(2, 3))] == [1]
    before = path.read_bytes()
    journal.write()
    assert path.read_bytes() == before


def set_at(*place: str | int, value: Any) -> Callable[[Any], None]:
    def change(told: Any) -> None:
        for name in place[:-1]:
            told = told[name]
        told[place[-1]] = value

    return change


MALFORMED = [
    *(set_at(name, value=value) for name in ("version", "settings", "calls", "trials")
      for value in ("x", {"no": 1}, [1], None, 1e300)),
    *(set_at("calls", 0, value=value) for value in ("x", {"no": 1}, [1], [0, 0, "x", None],
                                                    [0, 0, 3, "x"], [0, 0, -1, None])),
    *(set_at("calls", 2, value=value) for value in ([0, 3, "x"], [0, 3, None], [7, 3, 0.5],
                                                    [0, 2, 0.5], [None, 3, 0.5])),
    *(set_at("trials", 0, name, value=value)
      for name in ("number", "epochs", "kept_epoch", "state", "error", "kept", "spaces", "metrics",
                   "kept_metrics", "params")
      for value in ([1], {"no": [1]}, -1)),
    set_at("trials", 0, "spaces", "rate", value={"kind": "x"}),
    set_at("trials", 0, "spaces", "rate", "low", value="x"),
    set_at("trials", 0, "metrics", "3", value={"val_loss": "x"}),
    set_at("trials", 0, "metrics", value={"x": {"val_loss": 1.0}}),
    set_at("trials", 0, "strange", value=1),
]  # fmt: skip


@pytest.mark.parametrize("change", MALFORMED, ids=[str(n) for n in range(len(MALFORMED))])
def test_what_no_search_wrote_is_refused(tmp_path: Path, change: Callable[[Any], None]) -> None:
    path = written(tmp_path)
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"is no journal of a search|another search"):
        Journal.at(str(tmp_path), SETTINGS, resume=True).replay(RandomSearch(2, 3))
