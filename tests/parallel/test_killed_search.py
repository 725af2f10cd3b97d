"""A search whose process is killed goes on as if it had not been: the same trials, none twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkdl.files.temporary import remove_left_folders

pytest.importorskip("optuna")
PROGRAM = """
import json, sys, time
from pathlib import Path
from sparkdl import tune
from sparkdl.tune.journal import Journal
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.runner import SearchRun

folder, stop_at, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
log = folder / "log"


class Formula:
    def prepare(self, trial, segment, on_epoch):
        x, units = trial.suggest_float("x", 0, 1), trial.suggest_int("units", 1, 64, log=True)

        def train():
            done = len(log.read_text().splitlines()) if log.exists() else 0
            if done == stop_at:
                print("here", flush=True)
                time.sleep(600)
            with log.open("a") as file:
                print(segment.trial, segment.begin, segment.end, file=file)
            return {"loss": (x - 0.3) ** 2 + 1 / (units * segment.end)}

        return train

    def cancel(self):
        pass

    def delete(self, trial):
        pass

    def keep(self, trial, epochs):
        pass


journal = Journal.at(str(folder / "study"), {"seed": 7}, resume=resume)
SearchRun(
    tune.AdaptiveAsha(24, 9, 3), Formula(), journal, Goal("loss", False), seed=7, max_concurrent=1,
    timeout_s=None, on_score=lambda trial, score: None, sampler=tune.OptunaSampler(),
).run()
print(json.dumps({n: [r.params, r.metrics, r.epochs] for n, r in journal.trials.items()}))
"""


def start(folder: Path, stop_at: int, *, resume: bool = False) -> Any:
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder), str(stop_at), str(resume)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_killed_twice(tmp_path: Path) -> None:
    expected = json.loads(start(tmp_path / "whole", -1).communicate(timeout=100)[0])
    segments = (tmp_path / "whole" / "log").read_text().splitlines()
    assert len(expected) == 24
    for stop_at, resume in ((5, False), (17, True)):
        killed = start(tmp_path / "killed", stop_at, resume=resume)
        assert killed.stdout.readline() == "here\n"
        killed.kill()
        killed.communicate(timeout=20)
    found = start(tmp_path / "killed", -1, resume=True).communicate(timeout=100)[0]
    assert json.loads(found) == expected
    assert (tmp_path / "killed" / "log").read_text().splitlines() == segments
    assert len({*segments}) == len(segments)


STUDY = """
import sys, tempfile, time
tempfile.tempdir = sys.argv[1]
from sparkdl.files.temporary import TemporaryFolder
from sparkdl.tune.searchers.searcher import Goal
from sparkdl.tune.journal import Journal
from sparkdl.tune.study import Study

folder = TemporaryFolder()
journal = Journal.at(folder.path, {}, resume=False)
study = Study(journal, Goal("loss", False), lambda record: None, lambda *a: None, temporary=folder)
journal.write()
del folder
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_folder_of_a_killed_search_goes_with_the_next_process(
    tmp_path: Path, end: signal.Signals
) -> None:
    command = [sys.executable, "-c", STUDY, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        remove_left_folders(str(tmp_path))
        assert len(list(tmp_path.glob("*/study.json"))) == 1  # it is in use
        process.send_signal(end)
    remove_left_folders(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
