"""Checks cases, one or many; also a program, for the backends of Keras that need a process each.

KERAS_BACKEND=jax python check.py 40 [seed]      many; seed 0 without one
python check.py "Case(optimizer='adam')"         one
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import generate
import keras
from case import Case
from hypothesis import HealthCheck, Phase, given, seed, settings
from local_spark import Workers
from parts import BLOCKS
from referee import Outcome, Refused, differences, train_with_keras, train_with_sparkdl

MOST_FAILURES = 5
"""After so many a run of many cases ends: they take time to make simple."""
SIMPLIFY_S = 60.0
NUDGES = {"bfloat16": 1e-3, "float16": 1.2e-4, "": 2e-7}
"""By policy: an eighth of a half's last digit; that of a float32 is 1.2e-7 of it at most."""


@dataclass
class Report:
    """What became of many cases.

    Args:
        cases: That Keras has trained.
        runs: Of sparkdl: each case in each of its modes.
        without: Cases that Keras cannot train, or trains to NaN: nothing to compare with.
        unstable: Cases that Keras, too, trains to something else if the first weights are changed
            in their last digit, or the rows of a batch come in another order.
        refused: Runs that ended in one error before a job.
        failures: A text for each case that was another than Keras.
    """

    cases: int = 0
    runs: int = 0
    without: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The counts."""
        return (
            f"{self.cases} cases, {self.runs} runs, {len(self.refused)} refused, "
            f"{len(self.without)} that Keras does not train, {len(self.unstable)} unstable"
        )

    def __str__(self) -> str:
        parts = self.failures, self.refused, self.without, self.unstable
        return "\n\n".join([self.head, *(text for part in parts for text in part)])


def check(
    case: Case,
    workers: Workers,
    report: Report | None = None,
    modes: Sequence[str] | None = None,
) -> dict[str, list[str]]:
    """Mode -> what differs from Keras, for the modes in which something does.

    Args:
        case: What is trained.
        workers: That train it.
        report: To be filled in.
        modes: Some of the case's; None for all.
    """
    report = Report() if report is None else report
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = train_with_keras(case)
        except Exception as error:
            report.without.append(f"{case!r}: {type(error).__name__}: {str(error)[:200]}")
            return {}
        if not expected.is_finite:
            report.without.append(f"{case!r}: NaN")
            return {}
        report.cases += 1
        found: dict[str, list[str]] = {}
        for mode in modes or case.modes:
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
        if found and not _is_stable(case, expected):
            report.unstable.append(f"{case!r}: {sorted(found)}")
            return {}
    return found


def _is_stable(case: Case, expected: Outcome) -> bool:
    """Whether Keras trains the same if nothing but its rounding is another.

    A gradient that is zero but for rounding moves a weight by a whole step of Adam. Sums in another
    order round otherwise; where no row's result depends on its place, rows in another order do.
    """
    nudge = next(nudge for name, nudge in NUDGES.items() if name in case.policy)
    others: list[dict[str, Any]] = [{"nudge": nudge}]
    if not any(BLOCKS[block].by in ("order", "random") for block in case.blocks):
        others += [{"stirred": number} for number in (1, 2, 3)]
    return not any(differences(case, expected, train_with_keras(case, **o)) for o in others)


def check_many(count: int, workers: Workers, random_seed: int = 0) -> Report:
    """Draws cases and checks each in one of its modes; the same ones for the same seed."""
    report = Report()
    seen: set[Case] = set()
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

    @seed(random_seed)
    @settings(  # hypothesis draws some of them again
        max_examples=4 * count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=quiet,
    )  # fmt: skip
    @given(generate.cases())
    def each(case: Case) -> None:
        if case in seen or report.cases == count or len(report.failures) == MOST_FAILURES:
            return
        seen.add(case)
        found = check(case, workers, report, [mode_of(case)])
        print(f"{time.process_time():.0f} s: {report.head}", file=sys.stderr, flush=True)
        if found:
            report.failures.append(_described(case, found, workers))
            print(report.failures[-1], file=sys.stderr, flush=True)

    each()
    return report


def mode_of(case: Case) -> str:
    """One of the case's modes, always the same."""
    return case.modes[zlib.crc32(repr(case).encode()) % len(case.modes)]


def _described(case: Case, found: dict[str, list[str]], workers: Workers) -> str:
    simple = simplified(case, sorted(found), workers)
    backend = keras.backend.backend()
    lines = [f'KERAS_BACKEND={backend} python tests/parity/check.py "{simple!r}"']
    if simple != case:
        lines.append(f"  (drawn as {case!r})")
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
            if check(simpler, workers, modes=modes):
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
    return bool(report.failures) or report.cases < int(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
