"""The learner cases on torch."""

import pytest
from learner_process import run_learner_cases


@pytest.mark.timeout(600)
def test_learner_cases() -> None:
    run_learner_cases("torch")
