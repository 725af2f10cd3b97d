"""Sinks of a fit on executors: what they are told is what happened."""

from __future__ import annotations

import json
import logging
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import keras
import pytest
from spark_models import make_mlp

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import ConfigError, DataError
from sparkdl.progress.events import (
    EpochEnded,
    Event,
    TrainingBegan,
    TrainingEnded,
    TrainingFailed,
    WorkersProgressed,
)
from sparkdl.tracking import JsonLines, TensorBoard
from sparkdl.tracking.page.book import RunBook
from sparkdl.tracking.page.dashboard import process_dashboard
from sparkdl.training.phases import PHASES


@pytest.mark.parametrize(
    "mode",
    ["asynchronous", pytest.param("synchronous", marks=pytest.mark.slow), "allreduce"],
)
def test_sinks_hear_of_metrics_and_workers_and_the_timeline_has_all_of_their_time(
    digits_df: Any, mode: str, tmp_path: Path
) -> None:
    events: list[Event] = []
    timeline = tmp_path / "timeline.json"
    # Horovod's exchanges inside the compiled step would count as training.
    options = {"communicator": "builtin"} if mode == "allreduce" else {}
    spark_model = SparkModel(make_mlp(), mode=mode, num_workers=2, **options)
    called = time.monotonic()
    history = spark_model.fit(
        digits_df, epochs=3, verbose=0, validation_split=0.2, timeline=str(timeline),
        sinks=[events.append, JsonLines(str(tmp_path / "runs")), TensorBoard(str(tmp_path / "tb"))],
    )  # fmt: skip
    wall_s = time.monotonic() - called
    # events
    began, ended = events[0], [e for e in events if isinstance(e, EpochEnded)]
    assert isinstance(began, TrainingBegan)
    assert began.run.num_workers == 2
    assert began.run.parameters["mode"] == mode
    assert began.run.parameters["optimizer"] == "Adam"
    assert [e.metrics["loss"] for e in ended] == history.history["loss"]
    assert isinstance(events[-1], TrainingEnded)
    told = [e for e in events if isinstance(e, WorkersProgressed)]
    assert [w.state for w in told[-1].workers] == ["finished", "finished"]
    assert sum(w.rows for w in told[-1].workers) == 3 * ended[0].rows
    for worker in told[-1].workers:
        assert worker.usage is not None
        assert worker.usage.seconds["compute"] > 0
        assert worker.usage.seconds["evaluate"] > 0
        assert worker.usage.memory_bytes > 100 << 20
    # files
    (path,) = (tmp_path / "runs").glob("*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (lines[0]["event"], lines[-1]["event"]) == ("training_began", "training_ended")
    assert {p.name for p in (tmp_path / "tb").iterdir()} >= {"train", "validation"}
    # timeline
    trace = json.loads(timeline.read_text())["traceEvents"]
    exchange = "ALLREDUCE" if mode == "allreduce" else "PUSH_PULL"
    summary = spark_model.summary
    assert summary is not None
    for rank in range(2):
        spans = [e for e in trace if e["ph"] == "X" and e["pid"] == rank]
        assert {e["name"] for e in spans} >= {
            "START", "READ", "STEP", exchange, "EVALUATE", "WAIT",
        }  # fmt: skip
        first, last = spans[0], spans[-1]
        whole = last["ts"] + last["dur"] - first["ts"]
        assert sum(e["dur"] for e in spans) >= 0.999 * whole
        assert whole / 1e6 >= 0.95 * summary.usage[rank].total_s
        assert list(summary.usage[rank].seconds) == list(PHASES)
    driver = [e for e in trace if e["ph"] == "X" and e["pid"] not in (0, 1)]
    assert [e["name"] for e in driver] == ["PREPARE", "EPOCH 1", "EPOCH 2", "EPOCH 3", "FINISH"]
    assert sum(e["dur"] for e in driver) / 1e6 >= 0.95 * wall_s


@pytest.mark.parametrize(
    "mode",
    ["asynchronous", pytest.param("synchronous", marks=pytest.mark.slow), "allreduce"],
)
def test_a_fits_page_has_the_load_of_its_machines_and_the_lines_of_its_ranks(
    digits_df: Any, mode: str
) -> None:
    class Chatty(keras.layers.Layer):  # pickled by value: says a line where it is built
        def call(self, inputs: Any) -> Any:
            sparkdl.log_to_driver(f"shape {inputs.shape[-1]}")
            logging.getLogger("chatty").warning("built")
            time.sleep(1.5)  # longer than until the first heartbeat
            return inputs

    model = keras.Sequential(
        [keras.Input((64,)), Chatty(), keras.layers.Dense(10, activation="softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
    book = RunBook()
    options = {"communicator": "builtin"} if mode == "allreduce" else {}
    spark_model = SparkModel(
        model, mode=mode, num_workers=2, custom_objects={"Chatty": Chatty}, **options
    )
    spark_model.fit(digits_df, epochs=2, verbose=0, sinks=[book.sink()])
    (run,) = book.runs()
    found = json.loads(book.records(str(run["run"])) or "")
    said = [tuple(line) for r in found if r["kind"] == "log" for line in r["lines"]]
    assert {(0, "shape 64"), (1, "shape 64")} <= set(said)
    assert {(0, "WARNING chatty: built"), (1, "WARNING chatty: built")} <= set(said)
    hosts = [r for r in found if r["kind"] == "workers"][-1]["hosts"]
    assert [name for name, *_ in hosts] == [f"{socket.gethostname()} (the driver's)"], (
        "a machine once"
    )
    assert all(0 <= share <= 100 for _, cpu, memory, *_ in hosts for share in (cpu, memory))


def test_a_sink_that_raises_does_not_end_the_fit_and_a_failed_fit_is_told(
    digits_df: Any, tmp_path: Path
) -> None:
    events: list[Event] = []

    def breaks(event: Event) -> None:
        if isinstance(event, EpochEnded):
            raise OSError("disk full")

    spark_model = SparkModel(make_mlp(), num_workers=2)
    with pytest.warns(RuntimeWarning, match="disk full"):
        history = spark_model.fit(digits_df, epochs=2, verbose=0, sinks=[breaks, events.append])
    assert len(history.history["loss"]) == 2
    assert isinstance(events[-1], TrainingEnded)
    with pytest.raises(ConfigError, match="sinks has something that is no sink"):
        spark_model.fit(digits_df, verbose=0, sinks=["logs"])

    holes = digits_df.selectExpr("transform(features, v -> float('NaN')) as features", "label")
    with pytest.raises(DataError):
        spark_model.fit(holes, verbose=0, check_data=True, sinks=[events.append])
    assert isinstance(events[-1], TrainingFailed)


def test_a_configuration_key_opens_the_page_once(digits_df: Any, capsys: Any) -> None:
    conf = digits_df.sparkSession.conf
    conf.set("spark.sparkdl.dashboard", "true")
    try:
        spark_model = SparkModel(make_mlp(), num_workers=2)
        for _ in range(2):
            spark_model.fit(digits_df, verbose=0)
        assert capsys.readouterr().out.count("the page is at http://127.0.0.1") == 1
        page = process_dashboard()
        base, _, query = page.url.partition("?")
        with urllib.request.urlopen(f"{base}api/runs?{query}", timeout=30) as answer:
            assert [run["state"] for run in json.load(answer)] == ["done", "done"]
        page.stop()
    finally:
        conf.unset("spark.sparkdl.dashboard")
