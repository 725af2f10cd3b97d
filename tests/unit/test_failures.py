"""The envelope of a failure: what of it arrives, and that its cause is never told by its text."""

from __future__ import annotations

import base64
import os
import pickle
import traceback
import zlib

import pytest

import sparkdl
from sparkdl.errors import (
    Cause,
    ConfigError,
    ResourceError,
    TransportError,
    WaitTimeoutError,
    WorkerError,
    fold,
)
from sparkdl.failures import (
    ChildTraceback,
    Failure,
    RankFailure,
    RanksLost,
    carried,
    cause_of,
    failure_in,
    folded,
)
from sparkdl.launch.function import DriverUnreachableError
from sparkdl.launch.task import QueryTask, RankContext
from sparkdl.transport.frames import error_from_meta, error_to_meta
from sparkdl.weights import NotFiniteError

GONE = TransportError(
    "rank 1 is gone; rank 0 cannot go on", expected='all "ranks"', received="a\\b", hint="é\n"
)


@pytest.mark.parametrize(
    "text",
    [
        "TransportError: my own service is down",
        "the customer is gone; rank them lower",
        "WaitTimeoutError: of the user's own",
        "DriverUnreachableError",
    ],
)
def test_a_users_error_is_their_own_whatever_its_text_says(text: str) -> None:
    failure = Failure.of(0, ValueError(text))
    assert failure.cause is Cause.OWN
    assert not failure.secondary


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (GONE, Cause.LOST),
        (WaitTimeoutError("missing rank 1"), Cause.TIMEOUT),
        (DriverUnreachableError("no way"), Cause.UNREACHED),
        (NotFiniteError(3, joined=True), Cause.JOINED),
        (NotFiniteError(3), Cause.OWN),
        (ResourceError("no GPU"), Cause.OWN),
        (WorkerError(1, "x", cause=Cause.LOST), Cause.LOST),
        (RuntimeError("[Rank 1] Horovod has been shut down"), Cause.LOST),
    ],
)
def test_each_class_has_its_cause(error: BaseException, cause: Cause) -> None:
    assert cause_of(error) is cause
    wrapped = ValueError("in the user's own")
    wrapped.__cause__ = error
    assert cause_of(wrapped) is cause
    assert Failure.from_json(Failure.of(2, error).to_json()).cause is cause


@pytest.mark.parametrize(
    "passed_on",
    [
        str,
        repr,
        lambda text: str(text).replace("\n", "\n\tat "),
        lambda text: f"Job aborted: {{{text!r}}}\nDriver stacktrace:",
        lambda text: repr(repr(text)),
    ],
)
def test_the_envelope_survives_whoever_quotes_or_indents_the_text(passed_on) -> None:
    failure = Failure.of(4, GONE)
    found = failure_in(RuntimeError(passed_on(str(RankFailure(failure)))))
    assert found == failure
    raised = found.library_error()
    assert type(raised) is TransportError
    assert (raised.expected, raised.received, raised.hint) == ('all "ranks"', "a\\b", "é\n")


def test_a_rank_failure_says_why_in_its_first_line_and_survives_pickling() -> None:
    failure = RankFailure(Failure.of(3, ValueError("bad row")))
    assert str(failure).splitlines()[0] == "rank 3 failed: ValueError: bad row"
    again = pickle.loads(pickle.dumps(failure))
    assert failure_in(again) == failure.failure == again.failure


def test_what_is_no_whole_envelope_is_none() -> None:
    whole = str(RankFailure(Failure.of(3, ValueError("bad row"))))
    start, end = whole.index("--sparkdl-failure--") + 19, whole.index("--end--")
    assert failure_in(RuntimeError(whole)) is not None
    for packed in (
        "",
        "not base64!",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(b"[1]")).decode(),
        base64.b64encode(zlib.compress(b"{")).decode(),
        base64.b64encode(zlib.compress(b"\xff")).decode(),
        base64.b64encode(zlib.compress(bytes(50_000_000))).decode(),  # is not unpacked whole
        "A" * 1_200_000,
    ):
        assert failure_in(RuntimeError(whole[:start] + packed + whole[end:])) is None
    assert failure_in(RuntimeError(whole[:end])) is None


def test_fields_from_the_network_are_bounded_and_typed() -> None:
    failure = Failure.from_wire(
        {
            "rank": "x",
            "error": 30_000 * "e",
            "traceback": 300_000 * "t",
            "cause": "__import__",
            "beats": {"type": "ConfigError", "what": 30_000 * "w", "__init__": "x", 3: 4},
            "lines": 30_000 * "l",
            "another": 1,
        }
    )
    assert (failure.rank, failure.cause) == (-1, Cause.OWN)
    assert (len(failure.error), len(failure.traceback)) == (10_000, 100_000)
    assert failure.beats == {"type": "ConfigError", "what": 10_000 * "w"}
    assert len(failure.lines) == 10_000
    assert isinstance(failure.library_error(), ConfigError)
    assert Failure.from_wire({"rank": 7}, rank=2).rank == 2
    assert Failure.from_wire({"beats": [1]}).beats is None


def test_an_envelope_of_the_longest_texts_is_read() -> None:
    beats = {"type": "ConfigError", **dict.fromkeys(("what", "hint"), 10000 * "\u2028")}
    failure = Failure(1, 2000 * "x", 8000 * "y", beats=beats, lines=10_000 * "z")
    assert failure_in(RankFailure(failure)) == failure
    assert failure_in(RuntimeError(str(RankFailure(failure)))) == failure


def test_other_ranks_hear_of_the_class_and_the_cause() -> None:
    told = Failure.of(2, WaitTimeoutError("missing rank 1", expected="all", hint="wait"))
    heard = error_from_meta(error_to_meta(told.worker_error()))
    assert isinstance(heard, WorkerError)
    again = Failure.of(5, heard)
    assert (again.rank, again.error, again.cause) == (2, told.error, Cause.TIMEOUT)
    assert type(again.library_error()) is WaitTimeoutError
    assert again.library_error().hint == "wait"


def test_what_a_framework_wraps_is_told_as_itself() -> None:
    @carried
    def reduce(array: int) -> int:
        raise GONE

    @carried
    def broken(array: int) -> int:
        raise ValueError("the user's own")

    with pytest.raises(RankFailure) as caught:
        reduce(1)
    assert str(caught.value).startswith("sparkdl.errors.TransportError: rank 1 is gone")
    wrapped = RuntimeError(f"INTERNAL: callback failed: {caught.value}\n\t [[node]]")
    failure = Failure.of(6, wrapped)
    assert (failure.rank, failure.cause) == (6, Cause.LOST)
    assert failure.error.startswith("sparkdl.errors.TransportError: rank 1 is gone")
    assert "INTERNAL: callback failed" in failure.traceback
    assert "--sparkdl-failure--" not in failure.traceback
    with pytest.raises(ValueError, match="own"):
        broken(1)


def test_the_childs_failure_is_told_as_it_was() -> None:
    told = Failure.of(1, GONE)
    lost = RanksLost(1, "its process was ended by SIGKILL")
    assert Failure.of(1, lost).cause is Cause.OWN
    error = RuntimeError("TransportError: a text")
    error.__cause__ = ChildTraceback(told)
    assert Failure.of(3, error) == told


TRACE = """Traceback (most recent call last):
  File "{lib}/pyspark.zip/pyspark/worker.py", line 4207, in main
    process()
    ^^^^^^^^^
  File "{own}/worker.py", line 66, in train
    run()
  File "{lib}/site-packages/keras/src/models/functional.py", line 184, in call
    outputs = f()
  File "/home/me/layers.py", line 7, in call
    return table[x]
           ~~~~~^^^
{last}KeyError: 'no such key'
"""
OWN = os.path.dirname(sparkdl.__file__)


def test_frames_of_libraries_are_a_line_and_those_of_the_user_and_of_the_fault_stay() -> None:
    lib = "/env/lib/python3.11"
    last = f'  File "{lib}/site-packages/numpy/core.py", line 3, in take\n    raise KeyError(x)\n'
    text = folded(TRACE.format(lib=lib, own=OWN, last=last))
    assert text.splitlines() == [
        "Traceback (most recent call last):",
        "  ... 3 frames of pyspark, sparkdl, keras",
        '  File "/home/me/layers.py", line 7, in call',
        "    return table[x]",
        "           ~~~~~^^^",
        *last.splitlines(),
        "KeyError: 'no such key'",
    ]
    assert folded("no traceback\n  at all") == "no traceback\n  at all"
    own = "".join(f'  File "{OWN}/a.py", line {n}, in f\n    g()\n' for n in range(9))
    fault = folded(f"Traceback (most recent call last):\n{own}TypeError: x\n")
    assert fault.count("File") == 6, "a fault of ours shows where it came from"
    assert "  ... 3 frames of sparkdl\n" in fault


def test_the_first_line_has_what_a_compiled_call_keeps_for_its_end() -> None:
    lib = "/env/lib/python3.11"
    graph = (
        "tensorflow.UnknownError: Graph execution error:\n\nDetected at node while/odd_1/PyFunc "
        "defined at (most recent call last):\n"
        f'  File "{lib}/site-packages/keras/src/layers/layer.py", line 2, in __call__\n\n'
        '  File "/home/me/layers.py", line 7, in call\n\n'
        "KeyError: 'no such key'\nTraceback (most recent call last):\n\n"
        '  File "/home/me/layers.py", line 5, in f\n    raise KeyError(key)\n\n'
        "KeyError: 'no such key'\n\n\n\t [[{{node while/odd_1/PyFunc}}]] [Op:__inference_1]"
    )
    failure = Failure.of(3, RuntimeError(graph))
    assert failure.error == (
        "RuntimeError: tensorflow.UnknownError: Graph execution error: KeyError: 'no such key' "
        "(at node while/odd_1/PyFunc)"
    )
    shown = str(failure.worker_error("look into the table"))
    assert shown.splitlines()[0].startswith("worker 3 failed: RuntimeError: tensorflow.Unknown")
    assert shown.splitlines()[1] == "  hint: look into the table" == shown.splitlines()[-1]
    assert shown.count("KeyError: 'no such key'") == 3


def test_a_folded_error_and_its_causes_keep_the_frames_of_the_user() -> None:
    def decoder(value: str) -> int:
        return int(value)

    try:
        try:
            Failure.from_json("no json")
        except ValueError as error:
            decoder("x" if error else "")
    except ValueError as error:
        found = fold(error)
    frames = [frame.name for frame in traceback.extract_tb(found.__traceback__)]
    here = test_a_folded_error_and_its_causes_keep_the_frames_of_the_user.__name__
    assert frames == [here, "decoder"]
    assert found.__context__ is not None
    assert [f.name for f in traceback.extract_tb(found.__context__.__traceback__)] == [here]


def test_a_query_shows_the_error_of_a_users_code_in_its_first_line() -> None:
    task, rank = QueryTask(), RankContext(2)
    with pytest.raises(WorkerError) as caught:
        list(task.failed(rank, KeyError("no such key")) or ())
    assert str(caught.value).startswith("worker 2 failed: KeyError: 'no such key'\n")
    assert caught.value.__suppress_context__
    with pytest.raises(TransportError) as kept:
        list(task.failed(rank, GONE) or ())
    assert kept.value is GONE
