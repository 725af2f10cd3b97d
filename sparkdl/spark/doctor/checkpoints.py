"""The folder for checkpoints: whether the driver can write to it, and who else sees what is there.

The driver alone writes and reads checkpoints. But YARN and Kubernetes may start a driver that was
lost on another machine, where ``resume=True`` finds nothing that was on the first one's disk.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sparkdl.errors import SparkDLError
from sparkdl.files.storage import check_writable, path_on_disk
from sparkdl.spark.doctor.executors import Facts
from sparkdl.spark.doctor.report import Check


@dataclass(frozen=True)
class ProbedFolder:
    """What the driver found.

    Args:
        folder: Of the checkpoints.
        problem: Why it cannot be written; empty if it can.
        marker: A file in it, where it is on this machine's disks; None elsewhere.
    """

    folder: str
    problem: str = ""
    marker: str | None = None


@contextlib.contextmanager
def probed(folder: str | None, timeout_s: float) -> Iterator[ProbedFolder | None]:
    """Writes a file to a folder, and deletes it; one on this machine's disks stays until the end.

    Args:
        folder: Of the checkpoints, on any file system; None: there is none.
        timeout_s: Limit.
    """
    if folder is None:
        yield None
        return
    found: list[ProbedFolder] = []
    written, given_up = threading.Event(), threading.Event()

    def write() -> None:
        try:
            found.append(_write(folder))
        except (SparkDLError, OSError) as error:
            said = error.received or error.what if isinstance(error, SparkDLError) else str(error)
            found.append(ProbedFolder(folder, said))
        written.set()
        if given_up.is_set():  # what is written later than anyone waits for is deleted here
            _clear(found)

    threading.Thread(target=write, name="sparkdl-doctor", daemon=True).start()
    in_time = written.wait(timeout_s)
    probe = found[0] if in_time else ProbedFolder(folder, f"no answer within {timeout_s:g} s")
    try:
        yield probe
    finally:
        given_up.set()
        _clear(found)


def _clear(found: list[ProbedFolder]) -> None:
    """Deletes the markers."""
    for probe in found:
        if probe.marker is not None:
            with contextlib.suppress(OSError):
                os.unlink(probe.marker)


def _write(folder: str) -> ProbedFolder:
    place = folder.rstrip("/")
    check_writable(f"{place}/probe")
    here = path_on_disk(folder)
    if here is None:
        return ProbedFolder(folder)
    marker = os.path.join(here, f".sparkdl-doctor-{secrets.token_hex(8)}")
    with open(marker, "x"):
        pass
    return ProbedFolder(folder, marker=marker)


def check_checkpoints(
    probe: ProbedFolder, executors: Mapping[str, Facts], in_cluster: bool
) -> Check:
    """Whether checkpoints can be written, and found again by another driver.

    Args:
        probe: What the driver found.
        executors: Facts of the executors, which were asked for the marker.
        in_cluster: Whether the driver runs on a machine that the cluster has chosen.
    """
    if probe.problem:
        return Check(
            "checkpoints", "error", f"{probe.folder!r}: {probe.problem}",
            "a folder that the driver can write to",
            "another checkpoint_dir, or its permissions and quota",
        )  # fmt: skip
    blind = [name for name, facts in executors.items() if facts.get("found") is False]
    if blind and in_cluster:
        return Check(
            "checkpoints", "warning",
            f"{probe.folder!r} is on the driver's disk: {blind[0]} does not see it",
            "a folder that every machine sees: the driver's next attempt may be on another one",
            "checkpoint_dir='hdfs:///...' or another common file system",
        )  # fmt: skip
    where = ", on the driver's disk" if blind else ""
    return Check("checkpoints", "ok", f"{probe.folder!r} is writable{where}")
