"""The learner cases on torch."""

from learner_process import run_learner_cases


def test_learner_cases() -> None:
    run_learner_cases("torch")
