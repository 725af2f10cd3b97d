"""``print(spark_model.summary)``: a line for the fit and one for each worker."""

from __future__ import annotations

import pytest

from sparkdl.spark.fit.training import StageSummary
from sparkdl.training.phases import ServerUsage, Usage

pytestmark = pytest.mark.keras


def test_what_is_printed() -> None:
    summary = StageSummary(
        rows=45_016, seconds=9.07, read_s=0.47, transports=frozenset({"shm"}),
        gpus={0: (), 1: ("1",)}, pids={0: 7, 1: 8}, rank_rows={0: 22_507, 1: 22_509},
        usage={1: Usage({}, memory_bytes=815_697_920), 0: Usage({}, memory_bytes=806_690_816)},
    )  # fmt: skip
    assert str(summary).splitlines() == [
        "45,016 rows per epoch, 2 workers by shm: 9.1 s of training; 0.5 s to read the rows",
        "rank   0      22,507 rows  807 MB",
        "rank   1      22,509 rows  816 MB  GPU 1",
    ]


def test_several_servers_are_told() -> None:
    summary = StageSummary(
        1, 0.1, 0.0, frozenset({"socket"}), {}, {}, rank_rows={0: 1},
        servers=(
            ServerUsage("10.0.0.7", 90_400_000, 12_000_000, 8_000_000),
            ServerUsage("10.0.0.8", 91_000_000, 13_000_000, 9_000_000, table_rows=4321),
        ),
    )  # fmt: skip
    assert str(summary).splitlines()[1:] == [
        "server 0  10.0.0.7  12 MB in, 8 MB out  90 MB",
        "server 1  10.0.0.8  13 MB in, 9 MB out  91 MB  4,321 rows of tables",
    ]


@pytest.mark.parametrize(("exchange", "said"), [(7.0, True), (1.0, False)])
def test_workers_that_one_process_would_outrun_are_told(exchange: float, said: bool) -> None:
    usage = Usage({"start": 9.0, "compute": 3.0, "exchange": exchange})
    summary = StageSummary(
        2, 0.1, 0.0, frozenset({"builtin"}), {}, {}, rank_rows={0: 1, 1: 1, 2: 0},
        usage={0: usage, 1: usage, 2: Usage({})},
    )  # fmt: skip
    assert ("2 workers are at 0.6 of one process here" in str(summary)) == said


def test_refused_updates_are_told() -> None:
    summary = StageSummary(1, 0.1, 0.0, frozenset({"builtin"}), {}, {}, refused=3, rank_rows={0: 1})
    assert str(summary).splitlines() == [
        "1 rows per epoch, 1 worker by builtin: 0.1 s of training; 0.0 s to read the rows",
        "3 updates were refused: they were not finite",
    ]
