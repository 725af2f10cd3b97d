"""The fault matrix: what happens to a fit when a part of it dies, stops or lies.

Each cell is a driver process of its own with two real executor processes, one fault in one fit
(``fault_cell.py``), and a look at what it left behind: processes, temporary files, shared memory.
A cell *holds* if it ends in the right model, or within 15 s in one error that names the cause, as
promised for its fault. Results are kept in a file, so that the matrix can be run in pieces. On a
busy machine ``--together`` runs several cells in one driver, where the faults leave it alive: then
a cell begins with workers that have imported Keras, and the table marks it.

    python benchmarks/faults.py --results faults.jsonl    # all cells, each with a driver of its own
    python benchmarks/faults.py --results faults.jsonl --only kill-server --mode asynchronous
    python benchmarks/faults.py --results faults.jsonl --shard 1/3 --limit-s 280
    python benchmarks/faults.py --results faults.jsonl --write docs/reliability.md
    python benchmarks/faults.py --results faults.jsonl --long connect stream link  # fault_long.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))
import fault_surroundings

MODES = ("asynchronous", "hogwild", "synchronous", "allreduce")
SERVED = MODES[:3]
MOMENTS = ("start", "exchange", "mid", "end")
PROGRAM = Path(__file__).parent / "support" / "fault_cell.py"
LONG = PROGRAM.parent / "fault_long.py"
ERROR_WITHIN_S = 15.0
GONE_WITHIN_S = 15.0
DRIVER_S = 280.0
SMALL_DISKS = {"full-spill": 2 << 20, "full-checkpoint": 160 << 10}
"""Bytes of the file system that fills up."""
SURROUNDINGS = ("clock-forward", "clock-back", "readonly-tmp")
"""Faults of what is around all processes of a driver."""
ALONE = {
    "kill-driver", "kill-jvm", "stopped-context", "count-third", "memory-executor", *SMALL_DISKS,
    *SURROUNDINGS,
}  # fmt: skip
"""Faults after which a driver has no session, or that need one of their own."""
CUT = "cut off"
SHARED = "°"
"""In the table: the workers had imported Keras before."""
MARK = "SPARKDL_FAULT_CELL"


@dataclass(frozen=True)
class Promise:
    """What is promised of a fault.

    Args:
        words: For the table.
        moments: When the fault comes.
        error: Pattern of the error that the fit ends in; None for the right model.
        late: Moments at which the right model will do as well.
        modes: In which the fault exists.
        epochs: Epochs in the History of the right model; None for those that the report names.
        within_s: Seconds after which the error counts as late.
        resumed: Of a driver that goes on: moment -> most epochs that are left to it.
    """

    words: str
    moments: tuple[str, ...] = ("any",)
    error: str | None = None
    late: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    epochs: int | None = 8
    within_s: float = ERROR_WITHIN_S
    resumed: dict[str, int] = field(default_factory=dict)


COUNTED = "Each row was trained 8 times, although a worker was killed amid an epoch"
STOPPED = "The right model: nobody takes 20 s of silence for a death"
STOPPED_LONG = "The right model, although the silence lasts for 30 s"
PROMISES = {
    "kill-worker": Promise(
        "The right model: Spark retries the task, or the stage begins again after the last whole "
        "epoch (`allreduce`)",
        MOMENTS,
    ),
    "kill-executor": Promise("The right model, as for a worker", MOMENTS),
    "kill-server": Promise(
        "An error that says that the parameter server ended, and how",
        MOMENTS, r"parameter server(.|\n)*exit status -9", ("end",), modes=SERVED,
    ),
    "kill-shard": Promise(
        "With two servers and `checkpoint_dir`: a warning, and the right model from the last "
        "checkpoint on",
        MOMENTS, modes=SERVED,
    ),
    "stop-shard": Promise(STOPPED, ("mid",), modes=SERVED),
    "kill-shard-tables": Promise(
        "Rows of tables on two servers: as without tables", ("mid",), modes=SERVED
    ),
    "kill-worker-tables": Promise(
        "Rows of tables, on two servers or over the workers: the right model", ("exchange", "mid"),
    ),
    "kill-driver": Promise(
        "Nothing stays behind; a new driver with `resume=True` gets the right model",
        MOMENTS, epochs=None, resumed={"start": 8, "exchange": 6, "mid": 5, "end": 1},
    ),
    "kill-jvm": Promise(
        "An error that says that the driver's JVM ended", MOMENTS, r"JVM.*(ended|died)", ("end",)
    ),
    "stop-worker": Promise(STOPPED, ("mid",)),
    "stop-executor": Promise(STOPPED, ("mid",)),
    "stop-server": Promise(STOPPED, ("mid",), modes=SERVED),
    "stop-driver": Promise(STOPPED, ("mid",)),
    "stop-jvm": Promise(STOPPED, ("mid",)),
    "full-spill": Promise(
        "An error that names the worker, the folder, and how far the rows came",
        error=r"cannot spill a .*\(worker \d\)(.|\n)*No space left on device after \d+ rows",
    ),
    "full-checkpoint": Promise(
        "An error that names the file; the checkpoint before it stays whole",
        error=r"epoch-0000\d\.keras' cannot be written",
    ),
    "interrupt": Promise(
        "`KeyboardInterrupt`; the session is as good as new", ("start", "mid", "end"),
        error="KeyboardInterrupt",
    ),
    "stopped-context": Promise(
        "An error that says that the session was stopped", ("mid",), r"session.*stopped"
    ),
    "nan": Promise(
        "An error that names epoch, batch and worker, and that the data have it",
        error=r"epoch 1 of 8, batch \d+: the data hold .*\(worker \d\)",
    ),
    "large-metrics": Promise("The right model, with an AUC of 20,000 thresholds"),
    "truncated-checkpoints": Promise(
        "A warning, and the right model from the checkpoint before", epochs=None
    ),
    "two-fits": Promise("Both models right: the fits share the slots, or take turns"),
    "kill-worker-defaults": Promise(
        "The right model of `SparkModel(model, mode)`, with all other arguments as they are",
        ("mid",),
    ),
    "kill-pair": Promise(
        "Worker and server at once: an error that says that the parameter server ended, and how",
        ("mid",), r"parameter server(.|\n)*exit status -9", modes=SERVED,
    ),
    "kill-pair-shard": Promise(
        "The same with two servers and `checkpoint_dir`: the right model from the last checkpoint "
        "on",
        ("mid",), modes=SERVED,
    ),
    "stop-worker-long": Promise(STOPPED_LONG, ("mid",)),
    "stop-server-long": Promise(STOPPED_LONG, ("mid",), modes=SERVED),
    "stop-pair-long": Promise(
        f"{STOPPED_LONG}, of a worker and the server (of both workers) at once", ("mid",)
    ),
    "memory-executor": Promise(
        "Rows that no executor has memory for: an error that says so, after Spark's four tries",
        error=r"Java memory was full", within_s=120.0,
    ),
    "readonly-tmp": Promise(
        "The right model where nobody can write to `TMPDIR`, `/tmp` and `/var/tmp`"
    ),
    "clock-forward": Promise(
        "The right model, if the clock of all processes jumps an hour ahead", ("mid",)
    ),
    "clock-back": Promise("The right model, if it jumps an hour back", ("mid",)),
    "count-worker": Promise(COUNTED, ("amid",)),
    "count-executor": Promise("the same, of an executor", ("amid",)),
    "count-twice": Promise("the same, of two workers one after the other", ("amid",)),
    "count-both": Promise("the same, of both workers at once", ("amid",)),
    "count-checkpoint": Promise("the same, while a checkpoint is written", ("checkpoint",)),
    "count-silent": Promise(
        "the same, if a worker is silent for longer than `worker_timeout_s`", ("amid",)
    ),
    "count-third": Promise("the same, of an executor while a third one is free", ("amid",)),
    "count-worker-shuffled": Promise(
        "the same, of a worker whose rows come out of a shuffle in another order each time",
        ("amid",),
    ),
    "count-executor-shuffled": Promise(
        "the same, of an executor that held a part of the shuffle", ("amid",)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One fault at one moment in one mode."""

    kind: str
    moment: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.moment}/{self.mode}"


def all_cells() -> list[Cell]:
    """The matrix, in the order of its table; without cells of a server that does not exist."""
    return [
        Cell(kind, moment, mode)
        for kind, promise in PROMISES.items()
        for moment in promise.moments
        for mode in MODES
        if mode in promise.modes
    ]


# -- one cell -------------------------------------------------------------------------------------


def processes_of(mark: str) -> dict[int, str]:
    """Process -> command line, of all processes that inherited a mark from a cell's driver."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command:  # neither a zombie nor the kernel's
                    found[int(folder.name)] = command
        except OSError:  # it has ended
            continue
    return found


def command_of(cells: list[Cell], folder: Path, resume: bool) -> list[str]:
    """The driver's command; with a small file system of its own where a disk is to fill up."""
    names = [cell.name for cell in cells]
    command = [sys.executable, str(PROGRAM), str(folder), *names]
    if resume:
        command.append("--resume")
    if cells[0].kind in SURROUNDINGS:
        return fault_surroundings.command(cells[0].kind, command)
    size = SMALL_DISKS.get(cells[0].kind)
    if size is not None:
        (folder / "small").mkdir(exist_ok=True)
        mount = f"mount -t tmpfs -o size={size} tmpfs {folder}/small"
        command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
    return command


def run_driver(
    cells: list[Cell], folder: Path, until: float, *, resume: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs one driver and waits until all of its processes are gone.

    Args:
        cells: What it does.
        folder: Of its files.
        until: By the monotonic clock; then it is cut off.
        resume: Whether it goes on for one that was killed.

    Returns:
        Cell -> its report, for those that were reported; and what is true of the driver: ``code``,
        ``left``, ``gone_s`` and the end of its output.
    """
    mark = uuid.uuid4().hex
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= fault_surroundings.environment(cells[0].kind, folder)
    report_file = folder / "report.json"
    report_file.unlink(missing_ok=True)
    seen: set[int] = set()
    left: dict[int, str] = {}
    with open(folder / "output", "ab") as output:
        driver = subprocess.Popen(
            command_of(cells, folder, resume), env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + DRIVER_S * len(cells)
            while driver.poll() is None and time.monotonic() < min(deadline, until):
                seen |= processes_of(mark).keys()
                time.sleep(0.5)
            hangs = driver.poll() is None
            ended = time.monotonic()
            while not hangs and (left := processes_of(mark)):
                if time.monotonic() > ended + GONE_WITHIN_S:
                    break
                time.sleep(0.2)
            gone_s = time.monotonic() - ended
        finally:
            for pid in processes_of(mark):  # for the next cell's sake, and if this process is ended
                os.kill(pid, signal.SIGKILL)
            driver.wait()
    reports = json.loads(report_file.read_text()) if report_file.exists() else {}
    return reports, {
        "code": driver.returncode if not hangs else CUT if ended < deadline else "hangs",
        "left": [
            *(f"process {pid}: {command[:150]}" for pid, command in left.items()),
            *([] if hangs else left_files(folder, seen)),
        ],
        "gone_s": round(gone_s, 1),
        "output": shortened((folder / "output").read_text(errors="replace")),
    }


def shortened(text: str) -> str:
    """Its beginning and its end."""
    return text if len(text) < 16_000 else f"{text[:4000]}\n...\n{text[-12_000:]}"


def left_files(folder: Path, pids: Iterable[int]) -> list[str]:
    """Files of sparkdl in the cell's folders, and shared memory of the cell's processes."""
    left = [f"file {path}" for path in folder.rglob("*sparkdl-*")]
    own = {str(pid) for pid in pids}
    shared = [path for path in Path("/dev/shm").glob("sparkdl*") if own & set(path.name.split("-"))]
    return left + [f"file {path}" for path in shared]


def run_cells(cells: list[Cell], until: float) -> list[dict[str, Any]]:
    """Runs cells in one driver; their reports with a verdict: ``'held'``, or what did not hold.

    Cells after one that ended the driver have no report, and those after ``until`` neither.
    """
    began = time.monotonic()
    place = fault_surroundings.place(cells[0].kind)
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=place))
    try:
        reports, driver = run_driver(cells, folder, until)
        if cells[0].kind == "kill-driver" and driver["code"] == -signal.SIGKILL:
            killed = driver
            reports, driver = run_driver(cells, folder, until, resume=True)
            driver["left"] = killed["left"] + driver["left"]
            for report in reports.values():
                report |= {"seconds": killed["gone_s"], "fired": True}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    taken_s = round((time.monotonic() - began) / len(cells), 1)
    results = []
    for number, cell in enumerate(cells):
        report = reports.get(cell.name, {})
        if not report and driver["code"] == CUT:
            break
        told = {**report, **driver, "left": [*report.get("left", []), *driver["left"]]}
        verdict = judge(cell, told)
        if verdict == "held":
            del told["output"]
        shared = {"shared": number > 0, "taken_s": taken_s}
        results.append({"cell": cell.name, "verdict": verdict, **shared, **told})
        if not report:
            break
    return results


def judge(cell: Cell, report: dict[str, Any]) -> str:
    """``'held'``, or what did not hold."""
    promise = PROMISES[cell.kind]
    if report["left"]:
        return f"left behind: {'; '.join(report['left'])}"[:500]
    if report["code"] == "hangs" or "outcome" not in report:
        return f"the driver ended with {report['code']}"
    error = report.get("error", "")
    if not report["fired"]:
        return "no fault came"
    if report["seconds"] < 0 and cell.moment not in promise.late:
        return "the fault came after the fit"
    if promise.error is not None and not (cell.moment in promise.late and not error):
        if not re.search(promise.error, error):
            return f"not the promised error: {error[:300] or 'a model'}"
        if report["seconds"] > promise.within_s:
            return f"the error came after {report['seconds']} s"
    else:
        if error:
            return f"not the promised model: {error[:300]}"
        counted = report.get("counts")
        if counted is not None and counted["rows_off"]:
            return (
                f"{counted['rows_off']} of {counted['rows']} rows were not trained 8 times, but "
                f"{counted['least']:g} to {counted['most']:g} times"
            )
        if counted is None and report["accuracy"] < 0.95:
            return f"not the right model: accuracy {report['accuracy']:.3f}"
        expected = promise.epochs or report.get("expected_epochs")
        if promise.resumed:
            expected = min(report["epochs"][0], promise.resumed[cell.moment])
        if {*report["epochs"]} != {expected}:
            return f"{report['epochs']} epochs in the History, expected {expected}"
    if cell.kind == "truncated-checkpoints" and "is not whole" not in str(report["warnings"]):
        return "no warning"
    if cell.kind == "full-checkpoint" and not report["restored_epoch"]:
        return "no whole checkpoint is left"
    if report.get("afterwards", "model") != "model":
        return f"the next fit: {report['afterwards'][:300]}"
    return "held"


# -- all cells ------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Cell -> its last result."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["cell"]: line for line in lines}


def table(results: dict[str, dict[str, Any]]) -> str:
    """The matrix in Markdown."""
    told = [
        "| fault | when | " + " | ".join(MODES) + " | promised |",
        "|---" * (len(MODES) + 3) + "|",
    ]
    for kind, promise in PROMISES.items():
        for moment in promise.moments:
            row = []
            for mode in MODES:
                cell = Cell(kind, moment, mode)
                if mode not in promise.modes:
                    row.append("no server" if mode == "allreduce" else "refused")
                else:
                    row.append(_told(kind, results.get(cell.name)))
            words = promise.words if moment == promise.moments[0] else "the same"
            told.append(f"| {kind} | {moment} | " + " | ".join(row) + f" | {words} |")
    held = sum(r["verdict"] == "held" for r in results.values())
    shared = sum(r.get("shared", False) for r in results.values())
    cells = len(all_cells())
    told.append(
        f"\n{len(results)} of {cells} cells were run; {held} of them hold. {shared} were run in a "
        f"driver that had run others before (`--together`), marked with {SHARED}."
    )
    return "\n".join(told)


def _told(kind: str, result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if result["verdict"] != "held":
        return "**does not hold**"
    shared = f" {SHARED}" if result.get("shared") else ""
    if result["outcome"] == "error":
        return f"error, {result['seconds']:.1f} s{shared}"
    return (
        f"resumed; gone in {result['seconds']:.0f} s"
        if kind == "kill-driver"
        else ("0 rows off" if "counts" in result else "model") + shared
    )


def write_into(page: Path, text: str) -> None:
    """Puts the table between the page's two marks."""
    begin, end = "<!-- faults: begin -->", "<!-- faults: end -->"
    content = page.read_text()
    before, _, rest = content.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page} has no marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, required=True, help="a file, one line a cell")
    parser.add_argument("--only", nargs="*", default=[], help="parts of cells' names")
    parser.add_argument("--mode", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th cell from the i-th")
    parser.add_argument("--again", action="store_true", help="also cells that did not hold")
    parser.add_argument("--together", type=int, default=1, help="cells in one driver, at most")
    parser.add_argument("--limit-s", type=float, default=1e9, help="then no cell is begun")
    parser.add_argument("--write", type=Path, help="put the table into this page, run nothing")
    parser.add_argument("--long", nargs="*", default=[], help="long runs, and nothing else")
    asked = parser.parse_args()
    if asked.long:
        ran = [
            subprocess.run([sys.executable, str(LONG), name], check=False) for name in asked.long
        ]
        return sum(done.returncode != 0 for done in ran)
    results = read_results(asked.results)
    if asked.write is not None:
        write_into(asked.write, table(results))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and no cell is left running
    index, count = map(int, asked.shard.split("/"))
    wanted = [
        cell
        for cell in all_cells()[index - 1 :: count]
        if cell.mode in asked.mode
        and (not asked.only or any(part in cell.name for part in asked.only))
        and (cell.name not in results or (asked.again and not _held(results[cell.name])))
    ]
    began, longest = time.monotonic(), 60.0
    for cells in grouped(wanted, asked.together):
        if time.monotonic() - began + longest > asked.limit_s:
            break
        begun = time.monotonic()
        for result in run_cells(cells, began + asked.limit_s):
            results[result["cell"]] = result
            with open(asked.results, "a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                f"{result['cell']:45} {result['taken_s']:6.1f} s  {result['verdict']}", flush=True
            )
        longest = max(longest, time.monotonic() - begun)
    print(table(results))
    return sum(not _held(result) for result in results.values())


def grouped(cells: list[Cell], at_most: int) -> list[list[Cell]]:
    """Cells that share a driver: of one mode, and only where the fault leaves the driver alive."""
    groups: list[list[Cell]] = []
    for cell in sorted(cells, key=lambda cell: MODES.index(cell.mode)):
        last = groups[-1] if groups else []
        alone = cell.kind in ALONE or any(c.kind in ALONE for c in last)
        if last and not alone and len(last) < at_most and last[0].mode == cell.mode:
            last.append(cell)
        else:
            groups.append([cell])
    return groups


def _held(result: dict[str, Any]) -> bool:
    return bool(result["verdict"] == "held")


if __name__ == "__main__":
    sys.exit(main())
