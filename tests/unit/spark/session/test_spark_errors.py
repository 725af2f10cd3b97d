"""What Spark says of files that it, or a task that reads for a frame, cannot read."""

from __future__ import annotations

import re

import pytest

from sparkdl.spark.runs.launcher import rows_problem
from sparkdl.spark.session.spark_errors import rows_refused

MISMATCH = (
    "An error occurred while calling o7165.collectToPython.\n: org.apache.spark.SparkException: "
    "[FAILED_READ_FILE.PARQUET_COLUMN_DATA_TYPE_MISMATCH] Encountered error while reading file "
    "file:///rows/p1.parquet. Data type mismatches when reading Parquet column [x]. Expected Spark "
    "type int, actual Parquet type INT64. SQLSTATE: KD001\n\tat org.apache.spark.sql.errors.Query"
)
OLDER = (
    "Job aborted: org.apache.spark.SparkException: Parquet column cannot be converted in file "
    "file:///rows/p1.parquet. Column: [x], Expected: int, Found: INT64.\n\tat org.apache.spark"
)
OURS = (
    "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
    '  File "/x/sparkdl/spark/forms/files.py", line 426, in __call__\n'
    "sparkdl.errors.DataError: /rows/p1.arrow has other columns than the files before\n"
    "  expected: the column 'x'\n  received: the columns ['y']\n\n\tat org.apache.spark.api.python"
)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MISMATCH, r"p1\.parquet\. Data type mismatches .* actual Parquet type INT64"),
        (OLDER, r"p1\.parquet\. Column: \[x\], Expected: int, Found: INT64"),
        (OURS, r"p1\.arrow has other columns[^\0]*received: the columns \['y'\]$"),
    ],
)
def test_a_file_that_cannot_be_read_is_the_cause(text: str, told: str) -> None:
    problem = rows_problem(RuntimeError(text))
    assert problem is not None
    assert "org.apache" not in problem.received
    assert re.search(told, problem.received), problem.received


def test_a_killed_process_is_none() -> None:
    assert rows_refused(RuntimeError("ExecutorLostFailure (executor 1 exited): OOMKilled")) is None
