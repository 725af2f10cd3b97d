"""What a fit does after a failure is decided without Spark, from numbers alone."""

from __future__ import annotations

import pytest

from sparkdl.spark.fit.plan import Recovery, RecoveryPolicy, StageFailure

pytestmark = pytest.mark.keras
POLICY = RecoveryPolicy(most=2, shrinks=True)


@pytest.mark.parametrize(
    ("failure", "decided"),
    [
        # Workers of a barrier stage were lost: what they left with the driver, or the beginning.
        (StageFailure(3), ("begun", 3)),
        (StageFailure(3, kept=5), ("kept", 5)),
        (StageFailure(0, kept=0), ("kept", 0)),
        (StageFailure(3, kept=5, saved=4), ("kept", 5)),
        # The weights were lost with the server: a checkpoint, if one was written in this stage.
        (StageFailure(3, of_server=True), None),
        (StageFailure(3, of_server=True, saved=5), ("saved", 5)),
        (StageFailure(3, of_server=True, saved=3), ("begun", 3)),
        (StageFailure(3, of_server=True, saved=0), ("begun", 3)),
        (StageFailure(3, of_server=True, kept=5, saved=4), ("saved", 4)),
    ],
)
def test_where_training_goes_on(failure: StageFailure, decided: tuple | None) -> None:
    assert POLICY.decide(failure) == (None if decided is None else Recovery(*decided, True))


def test_it_begins_again_as_often_as_allowed_and_the_state_comes_back_all_the_same() -> None:
    again = [POLICY.decide(StageFailure(1, tries, kept=2)) for tries in (0, 1, 2, 3)]
    assert again == [Recovery("kept", 2, tries < 2) for tries in (0, 1, 2, 3)]
    assert RecoveryPolicy(0, True).decide(StageFailure(0)) == Recovery("begun", 0, False)


def test_fewer_workers_go_on_where_slots_were_lost_and_never_more() -> None:
    assert [POLICY.workers(4, slots) for slots in (0, 1, 3, 4, 9, None)] == [1, 1, 3, 4, 4, 4]
    fixed = RecoveryPolicy(2, shrinks=False)  # a worker for each partition
    assert [fixed.workers(4, slots) for slots in (1, 9, None)] == [4, 4, 4]
