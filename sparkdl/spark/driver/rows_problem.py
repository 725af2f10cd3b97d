"""What Spark's exception says of rows that the user's own DataFrame cannot compute."""

from __future__ import annotations

import re

from sparkdl.errors import DataError

_DATA_EXCEPTION = re.compile(r"\[[A-Z0-9_]+(?:\.[A-Z0-9_]+)*\] [^\n]*? SQLSTATE: 22\w{3}")
"""SQL's class 22: a cast, a division or an index that a row's values do not allow."""
_PYTHON = "An exception was thrown from the Python worker"
_OURS = re.compile(r'File "[^"\n]*sparkdl[/\\](spark|launch|worker|learner|data)\b')
_LAST_LINE = re.compile(r"^(?!Traceback|During|The above)[A-Za-z_][\w.]*(?:: .*)?$")


def rows_problem(error: BaseException) -> DataError | None:
    """The error to raise where the expressions of the DataFrame itself failed; None for others.

    Args:
        error: Of a job.
    """
    text = str(error)
    found = _DATA_EXCEPTION.search(text)
    received = found[0] if found else _raised_by_a_function(text)
    if received is None:
        return None
    return DataError(
        "the DataFrame's own expressions fail on some rows",
        expected="rows that Spark can compute",
        received=received,
        hint="df.write.format('noop').mode('overwrite').save() computes all of them, without "
        "training; Spark's error follows from there",
    )


def _raised_by_a_function(text: str) -> str | None:
    """The last line of the traceback of a function that is the user's, such as a UDF."""
    _, at, traceback = text.partition(_PYTHON)
    if not at or _OURS.search(traceback):
        return None
    lines = traceback.split("\n\tat ")[0].splitlines()
    return next((line for line in reversed(lines) if _LAST_LINE.match(line)), None)
