"""The learner cases on tensorflow."""

from learner_process import run_learner_cases


def test_learner_cases() -> None:
    run_learner_cases("tensorflow")
