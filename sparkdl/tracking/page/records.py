"""A fit's events as the page takes them: plain JSON, small enough for 64 workers and hours."""

from __future__ import annotations

from typing import Any

from sparkdl.phases import PHASES
from sparkdl.progress.events import Json

Record = dict[str, Json]
WORKER_FIELDS = (
    "rank", "state", "retries", "host", "epoch", "batch", "batches_per_epoch", "rows", "staleness",
    "cpu_s", "memory_bytes", *PHASES,
)  # fmt: skip
"""What the numbers of a worker are, in this order."""
MOST_LINES = 400
"""Log lines that the page shows; the latest."""


def _search_began(event: dict[str, Any], time_s: float) -> Record:
    return {
        "kind": "search", "t": time_s, "metric": event["metric"], "maximize": event["maximize"],
        "parameters": event["parameters"],
    }  # fmt: skip


def _trial_began(event: dict[str, Any], time_s: float) -> Record:
    return {
        "kind": "trial", "t": time_s, "trial": event["trial"], "params": event["params"],
        "begin": event["begin"], "end": event["end"],
    }  # fmt: skip


def _trial_epoch(event: dict[str, Any], time_s: float) -> Record:
    return {
        "kind": "point", "t": time_s, "trial": event["trial"], "epoch": event["epoch"],
        "metrics": event["metrics"],
    }  # fmt: skip


def _trial_ended(event: dict[str, Any], time_s: float) -> Record:
    return {
        "kind": "rung", "t": time_s, "trial": event["trial"], "epochs": event["epochs"],
        "state": event["state"], "metrics": event["metrics"], "error": event["error"],
        "importances": event["importances"],
    }  # fmt: skip


def _search_ended(event: dict[str, Any], time_s: float) -> Record:
    if event["error"]:
        return {"kind": "fail", "t": time_s, "error": event["error"]}
    return {
        "kind": "end", "t": time_s, "stopped": False, "best": event["best"],
        "value": event["value"],
    }  # fmt: skip


_OF_A_SEARCH = {
    "search_began": _search_began, "trial_began": _trial_began, "trial_ended": _trial_ended,
    "trial_epoch_ended": _trial_epoch, "search_ended": _search_ended,
}  # fmt: skip


def record_of(event: dict[str, Any], time_s: float) -> Record | None:
    """What the page needs of an event.

    Args:
        event: By :func:`sparkdl.progress.events.as_json`, or a line of an event file.
        time_s: When it was told, in seconds since 1970.

    Returns:
        The record; None for an event that the page does not show.
    """
    kind = event.get("event")
    time_s = round(time_s, 2)
    if kind == "training_began":
        run = event["run"]
        return {
            "kind": "begin", "t": time_s, "first_epoch": event["first_epoch"],
            "epochs": event["epochs"], "model": run["model"], "workers": run["num_workers"],
            "parameters": run["parameters"],
        }  # fmt: skip
    if kind in ("epoch_progressed", "epoch_ended"):
        return {
            "kind": "step" if kind == "epoch_progressed" else "epoch", "t": time_s,
            "epoch": event["epoch"], "batches": event["batches"],
            "of": event["batches_per_epoch"], "metrics": event["metrics"],
            "rows_per_s": event["rows_per_s"], "staleness": event["staleness"],
        }  # fmt: skip
    if kind == "workers_progressed":
        return {
            "kind": "workers", "t": time_s, "in": event["bytes_in"], "out": event["bytes_out"],
            "workers": [_worker(worker) for worker in event["workers"]], "hosts": _hosts(event),
        }  # fmt: skip
    if kind == "lines_logged":
        return {"kind": "log", "t": time_s, "lines": event["lines"][-MOST_LINES:]}
    if kind in _OF_A_SEARCH:
        return _OF_A_SEARCH[kind](event, time_s)
    if kind == "training_ended":
        return {"kind": "end", "t": time_s, "stopped": event["stopped"]}
    if kind == "training_failed":
        return {"kind": "fail", "t": time_s, "error": event["error"]}
    return None


def _hosts(event: dict[str, Any]) -> Json:
    """``[host, processors, memory, [GPU, ...], [GPU memory, ...]]`` in percent, the driver first.

    Of several workers on a host the first says it: they see the same. Event files of earlier
    versions have none.
    """
    loads = {w["host"]: w.get("load") for w in reversed(event["workers"]) if w.get("load")}
    told = [("the driver's host", event.get("driver_load")), *sorted(loads.items())]
    return [
        [host, load["cpu_percent"], load["memory_percent"], load["gpu_percents"],
         load["gpu_memory_percents"]]
        for host, load in told
        if load
    ]  # fmt: skip


def _worker(worker: dict[str, Any]) -> Json:
    usage = worker["usage"] or {}
    seconds = usage.get("seconds", {})
    known: dict[str, Json] = {
        **worker, "staleness": round(worker["staleness"], 2), "cpu_s": usage.get("cpu_s", 0.0),
        "memory_bytes": usage.get("memory_bytes", 0),
        **{phase: round(seconds.get(phase, 0.0), 3) for phase in PHASES},
    }  # fmt: skip
    return [known[name] for name in WORKER_FIELDS]
