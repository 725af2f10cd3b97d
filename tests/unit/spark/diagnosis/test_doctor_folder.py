"""The doctor's probe of a folder for checkpoints, and the limits of probes that hang."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl.diagnosis import examination, executors, host_facts
from sparkdl.diagnosis.examination import ProbedFolder, check_checkpoints, probed
from sparkdl.diagnosis.executors import own_facts


def test_marker_is_there_while_executors_look_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with probed(str(folder), 60.0) as probe:
        assert probe is not None
        assert probe.problem == ""
        (file,) = folder.iterdir()
        assert probe.marker == str(file)
        asked = {"marker": probe.marker}
        assert host_facts.collect(asked)["found"] is True
    assert list(folder.iterdir()) == []
    assert host_facts.collect(asked)["found"] is False
    assert host_facts.collect({})["found"] is None


def test_folder_that_cannot_be_written_is_an_error() -> None:
    with probed("/proc/checkpoints", 60.0) as probe:
        assert probe is not None
        check = check_checkpoints(probe, {}, in_cluster=False)
    assert check.status == "error"
    assert "'/proc/checkpoints': " in check.found


def test_no_folder() -> None:
    with probed(None, 60.0) as probe:
        assert probe is None


def test_disk_of_a_driver_in_the_cluster_is_a_warning() -> None:
    """YARN may start the driver's next attempt elsewhere, which then finds no checkpoint."""
    probe = ProbedFolder("/data/runs", marker="/data/runs/.marker")
    seen, unseen = {"found": True}, {"found": False}
    check = check_checkpoints(probe, {"7@node1": seen, "8@node2": unseen}, in_cluster=True)
    assert check.status == "warning"
    assert "on the driver's disk: 8@node2 does not see it" in check.found
    assert "hdfs:///" in check.hint
    assert check_checkpoints(probe, {"7@node1": seen}, in_cluster=True).status == "ok"
    check = check_checkpoints(probe, {"8@node2": unseen}, in_cluster=False)
    assert (check.status, check.found) == ("ok", "'/data/runs' is writable, on the driver's disk")
    common = ProbedFolder("hdfs:///runs")
    assert check_checkpoints(common, {"8@node2": {"found": None}}, in_cluster=True).status == "ok"


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """What a probe waits for; it comes at the end of the test."""
    end = threading.Event()
    yield end
    end.set()


def test_file_system_that_hangs_costs_the_limit(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "check_writable", lambda path: hanging.wait())
    monkeypatch.setattr(examination, "path_on_disk", lambda path: None)
    began = time.monotonic()
    with probed("hdfs:///runs", 0.2) as probe:
        assert probe == ProbedFolder("hdfs:///runs", "no answer within 0.2 s")
    assert time.monotonic() - began < 20


def test_file_that_is_written_after_the_limit_is_deleted_too(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(examination, "check_writable", lambda path: hanging.wait())
    deleted = threading.Event()
    unlink = os.unlink

    def unlinked(path: str) -> None:
        unlink(path)
        deleted.set()

    monkeypatch.setattr("sparkdl.diagnosis.examination.os.unlink", unlinked)
    with probed(str(tmp_path), 0.2) as probe:
        assert probe is not None
        assert probe.marker is None
    hanging.set()
    assert deleted.wait(20)
    assert list(tmp_path.iterdir()) == []


def test_name_server_that_hangs_costs_the_limit(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def collect(options: dict[str, object]) -> dict[str, object]:
        hanging.wait()
        return {}

    monkeypatch.setattr(executors.host_facts, "collect", collect)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"within 0\.2 s"):
        own_facts("driver", 0.2)
    assert time.monotonic() - began < 20
