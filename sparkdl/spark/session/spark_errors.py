"""The words of Spark and the JVM about a job that failed: the one place that reads their texts.

Spark passes an error of a job on as a text. These functions find in it what Spark itself has to
say, and return it as a value. What this library or the user's code raised on a rank comes as an
envelope: see :mod:`sparkdl.failures`.
"""

from __future__ import annotations

import re
from typing import Literal

BarrierRefusal = Literal["slots", "dynamic allocation", "partitions"]
_CANCELLED = re.compile(r"\[(SPARK_JOB_CANCELLED|OPERATION_CANCELED)\]")
_DATA_EXCEPTION = re.compile(r"\[[A-Z0-9_]+(?:\.[A-Z0-9_]+)*\] [^\n]*? SQLSTATE: 22\w{3}")
"""SQL's class 22: a cast, a division or an index that a row's values do not allow."""
_OF_FILES = re.compile(
    r"Encountered error while reading file [^\n]*|Parquet column cannot be [^\n]*"
    r"|^sparkdl\.errors\.DataError: .*?(?=\n\s*at |\n\n|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""Files that Spark's reader, or a task of ours that reads for a frame, cannot read."""
_PYTHON = "An exception was thrown from the Python worker"
_OURS = re.compile(r'File "[^"\n]*sparkdl[/\\](spark|launch|worker|learner|data)\b')
_LAST_LINE = re.compile(r"^(?!Traceback|During|The above)[A-Za-z_][\w.]*(?:: .*)?$")
_MISSING_MODULE = (
    re.compile(r"No module named '?([\w.]+)'?"),
    re.compile(r"(PyArrow|Pandas|NumPy|numpy|pandas|pyarrow)\b[^\n]{0,40} must be installed"),
)
_NO_PROGRAM = re.compile(r'Cannot run program "([^"]+)"')
_OVER_THE_LIMIT = re.compile(
    r"exceeding (?:physical|virtual) memory limits|[Ee]xceeded memory|OOMKilled"
    r"|possible container OOM|beyond the '(?:PHYSICAL|VIRTUAL)' memory limit"
)
_HEAP_FULL = re.compile(r"failed \d+ times.*(exited with code 52\b|java.lang.OutOfMemoryError)")
_USED = re.compile(r"[\d.]+ [KMGT]?B of [\d.]+ [KMGT]?B (?:physical|virtual) memory used")
_LOST_TASK = re.compile(r"barrier task ResultTask\(\d+, (\d+)\)")


def barrier_refused(error: BaseException) -> BarrierRefusal | None:
    """Why Spark runs no barrier stage; None if the error is another."""
    text = str(error)
    if "SPARK-24819" in text or "BARRIER_STAGE_WITH_INSUFFICIENT_SLOTS" in text.upper():
        return "slots"
    if "SPARK-24942" in text:
        return "dynamic allocation"
    return "partitions" if "SPARK-24820" in text else None


def was_cancelled(error: BaseException) -> bool:
    """Whether somebody cancelled the job."""
    return _CANCELLED.search(str(error)) is not None


def rows_refused(error: BaseException) -> str | None:
    """The failure of one of the DataFrame's own expressions; None if the error is another."""
    text = str(error)
    found = _DATA_EXCEPTION.search(text) or _OF_FILES.search(text)
    return found[0].strip() if found else _raised_by_a_function(text)


def _raised_by_a_function(text: str) -> str | None:
    """The last line of the traceback of a function that is the user's, such as a UDF."""
    _, at, traceback = text.partition(_PYTHON)
    if not at or _OURS.search(traceback):
        return None
    lines = traceback.split("\n\tat ")[0].splitlines()
    return next((line for line in reversed(lines) if _LAST_LINE.match(line)), None)


def missing_program(error: BaseException) -> str | None:
    """The program that the JVM could not start; None if the error is another."""
    found = _NO_PROGRAM.search(str(error))
    return None if found is None else found[1]


def has_other_python(error: BaseException) -> bool:
    """Whether the tasks ran another version of Python than the driver."""
    text = str(error)
    return "PYTHON_VERSION_MISMATCH" in text or "different minor version" in text


def missing_module(error: BaseException) -> str | None:
    """The module that the Python of the tasks has not; None if the error is another."""
    text = str(error)
    found = next(filter(None, (pattern.search(text) for pattern in _MISSING_MODULE)), None)
    return None if found is None else found[1]


def memory_exceeded(reason: str) -> str | None:
    """How much memory a container used that was killed for it, or an empty text; else None."""
    if not _OVER_THE_LIMIT.search(reason):
        return None
    used = _USED.search(reason)
    return used.group() if used else ""


def heap_full(reason: str) -> bool:
    """Whether Spark gave up a task as executors had no Java memory left, which is the code 52."""
    return bool(_HEAP_FULL.search(reason))


def lost_rank(error: BaseException) -> int:
    """The rank that a barrier stage lost; -1 where Spark does not name one."""
    found = _LOST_TASK.search(str(error))
    return int(found[1]) if found else -1


def reason_of(error: BaseException) -> str:
    """The first line of Spark's message that tells of the job."""
    told = (line.strip(": ") for line in str(error).splitlines())
    lines = (
        line for line in told if line and not line.startswith("An error occurred while calling")
    )
    return next(lines, type(error).__name__)


def java_message(error: BaseException) -> str:
    """The message of the first Java exception in the text; all of the text where it has none."""
    lines = [line for line in str(error).splitlines() if "Exception: " in line]
    return lines[0].split("Exception: ", 1)[1] if lines else str(error)
