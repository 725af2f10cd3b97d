"""Draws sessions and checks each; also a program, for the backends of Keras.

KERAS_BACKEND=jax python session_check.py 40 [seed]                many; seed 0 without one
python session_check.py "[call('build', form='functional', ...)]"    one
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test
from local_spark import Workers
from session import (
    ALONE,
    CHANGES,
    FORMS,
    LAYERS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    Call,
    KerasFailed,
    Session,
    call,
)

CALLS = 10
"""Calls of a session, the first of which builds a model."""
MOST_FAILURES = 5
SIMPLIFY_S = 60.0
ONE_IN = 25
"""In so many sessions a worker is killed once: it takes seconds to start."""


@dataclass
class Report:
    """What became of many sessions.

    Args:
        sessions: That were begun.
        calls: That were done and compared.
        refused: Errors before a job.
        without: Sessions that ended as Keras cannot do a call.
        failures: A text for each session that was another than Keras.
    """

    sessions: int = 0
    calls: int = 0
    refused: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        """The counts."""
        return (
            f"{self.sessions} sessions, {self.calls} calls, {len(self.refused)} refused, "
            f"{len(self.without)} that Keras does not do, {len(self.failures)} failures"
        )

    def __str__(self) -> str:
        parts = self.failures, sorted({*self.refused}), sorted({*self.without})
        return "\n\n".join([self.head, *(text for part in parts for text in part)])


def check(calls: Sequence[Call], workers: Workers) -> list[str]:
    """What differs after the first call after which something does; nothing: all is as in Keras."""
    session = Session(workers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for one in calls:
                if found := _done(session, one):
                    return found
        except KerasFailed:
            return []
        finally:
            session.close()
    return []


def _done(session: Session, one: Call) -> list[str]:
    try:
        return [f"{one!r}: {line}" for line in session.do(one)]
    except KerasFailed:
        raise
    except Exception:
        return [f"{one!r}: {traceback.format_exc(limit=-4)[-1500:]}"]


def simplified(calls: list[Call], workers: Workers, give_up_at: float) -> list[Call]:
    """Fewer calls that still fail."""
    for place in reversed(range(1, len(calls))):
        if time.monotonic() > give_up_at:
            break
        fewer = calls[:place] + calls[place + 1 :]
        if check(fewer, workers):
            return simplified(fewer, workers, give_up_at)
    return calls


class Machine(RuleBasedStateMachine):
    """The rules of a session; :func:`check_many` gives its class workers and a report."""

    workers: Workers
    report: Report

    def __init__(self) -> None:
        super().__init__()
        self._session = Session(self.workers)
        self._calls: list[Call] = []
        self._built: Call | None = None
        self._ended = False
        self._functions = 0
        self._alone = self._quantized = self._killed = self._with_lambda = False
        self.report.sessions += 1

    def teardown(self) -> None:
        self.report.refused += self._session.refused
        self._session.close()
        if self.report.sessions % 10 == 0:
            print(f"{time.process_time():.0f} s: {self.report.head}", file=sys.stderr, flush=True)

    def do(self, name: str, /, **arguments: Any) -> None:
        if self._ended or len(self.report.failures) >= MOST_FAILURES:
            return
        one = call(name, **arguments)
        self._calls.append(one)
        self._built = one if name == "build" else self._built
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _done(self._session, one)
        except KerasFailed as error:
            self._ended = True
            self.report.without.append(f"{one!r}: {error}")
            return
        self.report.calls += 1
        if found:
            self._ended = True
            self.report.failures.append(_described(self._calls, found, self.workers))
            print(self.report.failures[-1], file=sys.stderr, flush=True)

    # -- the rules -------------------------------------------------------------------------------

    @initialize(rng=st.randoms(use_true_random=True))
    def first(self, rng: random.Random) -> None:
        self.build(rng)

    @rule(rng=st.randoms(use_true_random=True))
    def build_again(self, rng: random.Random) -> None:
        self.build(rng)

    def build(self, rng: random.Random) -> None:
        form = rng.choice(["functional", *FORMS])
        fitting = [n for n in LAYERS if n not in ALONE or (form != "Network" and not rng.randrange(3))]
        stack = tuple(rng.sample(fitting, rng.randint(0, 2)))
        self._alone = any(name in ALONE for name in stack)
        self._quantized, self._with_lambda = False, "lambda" in stack
        activation = rng.choice(["", "", "sigmoid", "act"])
        self.do("build", form=form, stack=stack, activation=activation, **_settings(rng, True))

    @rule(rng=st.randoms(use_true_random=True))
    def compile(self, rng: random.Random) -> None:
        self.do("compile", **_settings(rng, rng.random() < 0.5))

    @rule(
        what=st.sampled_from(CHANGES),
        value=st.sampled_from([1.0, 3.0, 0.5]),
        optimizer=st.sampled_from([None, *OPTIMIZERS]),
    )
    def change(self, what: str, value: float, optimizer: str | None) -> None:
        self.do("change", what=what, value=value, optimizer=optimizer)

    @rule(what=st.sampled_from(CHANGES), value=st.sampled_from([1.0, 3.0, 0.5]))
    def change_and_build(self, what: str, value: float) -> None:
        """As a notebook does whose cells are run again: the same model, of other code."""
        self.do("change", what=what, value=value)
        if self._built is not None:
            self.do(self._built.name, **self._built.arguments)
            self._quantized = False

    @rule(
        how=st.sampled_from(["freeze", "freeze", "lora", "quantize"]),
        number=st.integers(0, 3),
        trainable=st.booleans(),
    )
    def layers(self, how: str, number: int, trainable: bool) -> None:
        if how == "freeze":
            self.do("freeze", number=number, trainable=trainable)
        elif not self._quantized:
            self._quantized = how == "quantize"
            self.do(how)

    @rule(rng=st.randoms(use_true_random=True))
    def fit(self, rng: random.Random) -> None:
        self._fit(rng)

    @rule(rng=st.randoms(use_true_random=True))
    def fit_again(self, rng: random.Random) -> None:
        self._fit(rng)

    @rule(rng=st.randoms(use_true_random=True))
    def fit_once_more(self, rng: random.Random) -> None:
        self._fit(rng)

    def _fit(self, rng: random.Random) -> None:
        one = self._alone or rng.random() < 0.3
        sizes = rng.choice([(12,), (7,)] if one else [(8, 8), (9, 4), (8, 0)])
        mode = rng.choice(["synchronous", "allreduce", *(["asynchronous"] if one else [])])
        weights = rng.choice([{}, {}, {"weighted": True}, {"classes": True}])
        more = {
            "held_out": rng.choice([0, 0, 5]), "shuffle": rng.random() < 0.3,
            "fresh": rng.random() < 0.4, "epochs": rng.choice([1, 1, 2]),
        }  # fmt: skip
        self.do("fit", mode=mode, sizes=sizes, batch=rng.choice([4, 4, 5]), **weights, **more)

    @rule(
        how=st.sampled_from(["workers", "workers", "arrays"]),
        batch=st.sampled_from([3, 4]),
        weighted=st.booleans(),
    )
    def evaluate(self, how: str, batch: int, weighted: bool) -> None:
        self.do("evaluate", how=how, batch=batch, weighted=weighted)

    @rule(how=st.sampled_from(["frame", "function", "arrays"]), batch=st.sampled_from([3, 4]))
    def predict(self, how: str, batch: int) -> None:
        self.do("predict", how=how, batch=batch)

    @rule(makes=st.booleans(), number=st.integers(0, 3))
    def function(self, makes: bool, number: int) -> None:
        if makes or not self._functions:
            self._functions += 1
            self.do("make_function")
        else:
            self.do("use_function", number=number)

    @precondition(lambda self: not self._with_lambda)
    @rule()
    def save(self) -> None:
        self.do("save")

    @rule(
        one=st.sampled_from([
            call("set_weights", seed=1), call("set_weights", seed=2), call("rate", value=0.1),
            call("rate", value=0.02), call("seeded", seed=2), call("clear"),
        ])
    )  # fmt: skip
    def adjust(self, one: Call) -> None:
        self.do(one.name, **one.arguments)

    @rule(
        setting=st.sampled_from([
            ("floatx", "float64"), ("floatx", "float32"), ("epsilon", 1e-2), ("epsilon", 1e-7),
            ("dtype_policy", "float64"), ("dtype_policy", "float32"),
        ])
    )  # fmt: skip
    def config(self, setting: tuple[str, Any]) -> None:
        self.do("config", name=setting[0], value=setting[1])

    @precondition(lambda self: self.report.sessions % ONE_IN == 0 and not self._killed)
    @rule(number=st.integers(0, 1))
    def kill(self, number: int) -> None:
        self._killed = True
        self.do("kill", number=number)


def _settings(rng: random.Random, fresh: bool) -> dict[str, Any]:
    """Arguments of ``compile``."""
    loss = rng.choice(LOSSES)
    found: dict[str, Any] = {
        "loss": loss,
        "metrics": tuple(rng.sample(METRICS, rng.choice([0, 0, 1, 2]))),
        "reduction": rng.choice(["", "", "sum", "mean_with_sample_weight"]),
        "weighted": rng.random() < 0.3,
    }
    if loss == "closure":
        found["scale"] = rng.choice([1.0, 3.0, 0.5])
    if fresh:
        found["optimizer"] = rng.choice([*OPTIMIZERS])
    return found


def _described(calls: list[Call], found: list[str], workers: Workers) -> str:
    simple = simplified([*calls], workers, time.monotonic() + SIMPLIFY_S)
    lines = [f"KERAS_BACKEND={keras.backend.backend()}: [", *(f"    {one!r}," for one in simple), "]"]
    return "\n".join([*lines, *(f"  {text}" for text in found[:4])])


def check_many(count: int, workers: Workers, random_seed: int = 0) -> Report:
    """Draws sessions and checks each; the same ones for the same seed."""
    report = Report()
    kind = type("SessionMachine", (Machine,), {"workers": workers, "report": report})
    run_state_machine_as_test(
        seed(random_seed)(kind),
        settings=settings(
            max_examples=count, stateful_step_count=CALLS, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=[*HealthCheck],
        ),
    )  # fmt: skip
    return report


def main() -> int:
    with Workers() as workers:
        if sys.argv[1].startswith("["):
            found = check(eval(sys.argv[1]), workers)
            print("\n".join(found))
            return bool(found)
        given = int(sys.argv[2]) if len(sys.argv) > 2 else 0
        report = check_many(int(sys.argv[1]), workers, given)
    print(f"{sum(os.times()[:4]):.0f} s of CPU: {report}")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
