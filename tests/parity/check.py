"""Checks cases, one or many; also a program, for the backends of Keras that need a process each.

KERAS_BACKEND=jax python check.py 40 [seed]      many; seed 0 without one
python check.py "Case(optimizer='adam')"         one
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace

import generate
from case import Case
from hypothesis import HealthCheck, Phase, given, seed, settings
from local_spark import Workers
from referee import Refused, differences, train_with_keras, train_with_sparkdl

MOST_FAILURES = 5
"""After so many a run of many cases ends: they take time to make simple."""
SIMPLIFY_S = 60.0


@dataclass
class Report:
    """What became of many cases.

    Args:
        cases: That Keras has trained.
        runs: Of sparkdl: each case in each of its modes.
        refused: Of these, those that ended in one error before a job.
        failures: A text for each case that was another than Keras.
    """

    cases: int = 0
    runs: int = 0
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.cases} cases, {self.runs} runs, {len(self.refused)} refused"
        return "\n\n".join([head, *self.failures, *self.refused])


def check(case: Case, workers: Workers, report: Report | None = None) -> dict[str, list[str]]:
    """Mode -> what differs from Keras, for the modes in which something does."""
    report = Report() if report is None else report
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = train_with_keras(case)
        report.cases += 1
        found: dict[str, list[str]] = {}
        for mode in case.modes:
            report.runs += 1
            try:
                outcome = train_with_sparkdl(case, mode, workers)
            except Exception:
                found[mode] = [traceback.format_exc(limit=-3)]
                continue
            if isinstance(outcome, Refused):
                report.refused.append(f"{case!r}\n  {mode}: {outcome.error}")
            elif lines := differences(case, expected, outcome):
                found[mode] = lines
    return found


def check_many(count: int, workers: Workers, random_seed: int = 0) -> Report:
    """Draws cases and checks them, the same ones for the same seed."""
    report = Report()
    seen: set[Case] = set()
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    @seed(random_seed)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=quiet,
    )  # fmt: skip
    @given(generate.cases())
    def each(case: Case) -> None:
        if case not in seen and len(report.failures) < MOST_FAILURES:
            seen.add(case)
            found = check(case, workers, report)
            if found:
                report.failures.append(_described(case, found, workers))

    each()
    return report


def _described(case: Case, found: dict[str, list[str]], workers: Workers) -> str:
    simple = simplified(case, sorted(found), workers)
    lines = [f"{simple!r}", *([] if simple == case else [f"  (drawn as {case!r})"])]
    for mode, texts in found.items():
        lines += [f"  {mode}: {text}" for text in texts[:4]]
    return "\n".join(lines)


def simplified(
    case: Case, modes: Sequence[str], workers: Workers, give_up_at: float | None = None
) -> Case:
    """A case with fewer choices that still fails in one of the modes."""
    give_up_at = give_up_at or time.monotonic() + SIMPLIFY_S
    for simpler in _simpler(case):
        if time.monotonic() > give_up_at:
            break
        try:
            if {*check(simpler, workers)} & {*modes}:
                return simplified(simpler, modes, workers, give_up_at)
        except Exception:  # Keras itself does not train it
            continue
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """The case with one choice less, for each choice."""
    for choice in fields(case):
        value = getattr(case, choice.name)
        if value == choice.default or choice.name in ("inputs", "heads"):
            continue
        if isinstance(value, tuple) and len(value) > 1 and choice.name != "sizes":
            for i in range(len(value)):
                yield replace(case, **{choice.name: value[:i] + value[i + 1 :]})
        elif choice.name not in ("blocks", "fits"):
            yield replace(case, **{choice.name: choice.default})


@contextmanager
def workers_of() -> Iterator[Workers]:
    """Two workers' processes."""
    with Workers() as workers:
        yield workers


def main() -> int:
    if sys.argv[1].startswith("Case("):
        with workers_of() as workers:
            found = check(eval(sys.argv[1]), workers)
        print(found)
        return bool(found)
    given_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with workers_of() as workers:
        report = check_many(int(sys.argv[1]), workers, given_seed)
    print(report)
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
