"""Draws sessions and checks each; also a program, for the backends of Keras.

KERAS_BACKEND=jax python session_check.py 40 [seed [steps [seconds]]]  many; seed 0 without one
python session_check.py "[call('build', form='functional', ...)]"    one
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from local_spark import Workers
from session import (
    ALONE,
    CHANGES,
    FORMS,
    LAYERS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    REFERS,
    Call,
    KerasFailed,
    Place,
    Session,
    call,
)

STEPS = 8
"""Rules of a session, the first of which builds a model; most make several calls."""
MOST_FAILURES = 5
SIMPLIFY_S = 60.0
ONE_IN = 25
"""In so many sessions a worker is killed once, or all are: it takes seconds to start."""


@dataclass
class Report:
    """What became of many sessions.

    Args:
        sessions: That were begun.
        calls: That were done and compared.
        refused: Errors before a job.
        without: Sessions that ended as Keras cannot do a call.
        failures: A text for each session that was another than Keras.
        ends_at: Time of the monotonic clock after which no call is begun.
    """

    sessions: int = 0
    calls: int = 0
    refused: list[str] = field(default_factory=list)
    without: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    ends_at: float = math.inf

    @property
    def is_over(self) -> bool:
        """Whether no more sessions are to begin."""
        return len(self.failures) >= MOST_FAILURES or time.monotonic() > self.ends_at

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


def check(calls: Sequence[Call], place: Place | Workers) -> list[str]:
    """What differs after the first call after which something does; nothing: all is as in Keras."""
    session = Session(Place(place) if isinstance(place, Workers) else place)
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
        self._session = Session(Place(self.workers))
        self._calls: list[Call] = []
        self._built: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self._fits: list[dict[str, Any]] = []
        self._ended = False
        self._functions = 0
        self._alone = self._quantized = self._killed = False
        self.report.sessions += not self.report.is_over

    def teardown(self) -> None:
        self.report.refused += self._session.refused
        self._session.close()
        if self.report.sessions % 10 == 0 and not self.report.is_over:
            print(f"{time.process_time():.0f} s: {self.report.head}", file=sys.stderr, flush=True)

    def do(self, name: str, /, **arguments: Any) -> None:
        if self._ended or self.report.is_over:
            return
        one = call(name, **arguments)
        self._calls.append(one)
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
        self._build(rng)

    @rule(rng=st.randoms(use_true_random=True))
    def build_again(self, rng: random.Random) -> None:
        self._build(rng)

    def _build(self, rng: random.Random) -> None:
        form = rng.choice(["functional", *FORMS])
        fitting = [n for n in LAYERS if n not in ALONE or not rng.randrange(3)]
        if form == "Network":
            fitting = [name for name in fitting if name not in ALONE]
        stack = tuple(rng.sample(fitting, rng.randint(0, 2)))
        self._alone = any(name in ALONE for name in stack)
        self._quantized = False
        activation = rng.choice(["", "", "sigmoid", "act"])
        self._settings = _settings(rng)
        self._built = {
            "form": form, "stack": stack, "activation": activation, **self._settings
        }  # fmt: skip
        self.do("build", **self._built)
        self._look(rng, 0.8)

    @rule(rng=st.randoms(use_true_random=True))
    def compile(self, rng: random.Random) -> None:
        new = _settings(rng)
        for name in rng.sample(sorted(self._settings), 3):
            new[name] = self._settings[name]
        self._settings = new
        self.do("compile", **{**new, "optimizer": rng.choice([None, new["optimizer"]])})
        self._look(rng, 0.5)

    @property
    def _names(self) -> list[str]:
        """The parts of the user's code in the model."""
        built = self._built
        return [built["form"], *built["stack"], built["activation"], self._settings["loss"],
                *self._settings["metrics"]]  # fmt: skip

    @rule(rng=st.randoms(use_true_random=True))
    def change(self, rng: random.Random) -> None:
        """What the model's code refers to, and the model is compiled again."""
        optimizer = rng.choice([None, None, self._settings["optimizer"], rng.choice([*OPTIMIZERS])])
        self.do("change", **self._changed(rng), optimizer=optimizer)
        self._look(rng, 0.7)

    @rule(rng=st.randoms(use_true_random=True))
    def change_and_build(self, rng: random.Random) -> None:
        """As a notebook does whose cells are run again: the same model, of other code."""
        self.do("change", **self._changed(rng))
        self.do("build", **self._built)
        self._quantized = False
        self._look(rng, 0.7)

    def _changed(self, rng: random.Random) -> dict[str, Any]:
        used = [w for name in self._names for w in REFERS.get(name, ())]
        what = rng.choice(used if used and rng.random() < 0.8 else CHANGES)
        return {"what": what, "value": rng.choice([1.0, 3.0, 0.5])}

    def _look(self, rng: random.Random, share: float) -> None:
        """Looks at what is visible at once, so that what a worker keeps of it is used later."""
        looks: list[Callable[[random.Random], None]] = [self._fit, self._evaluate, self._predict]
        for look in rng.sample(looks, rng.randint(1, 2)) if rng.random() < share else ():
            look(rng)

    @rule(
        how=st.sampled_from(["freeze", "freeze", "lora", "quantize"]),
        number=st.integers(0, 3),
        trainable=st.booleans(),
        rng=st.randoms(use_true_random=True),
    )
    def layers(self, how: str, number: int, trainable: bool, rng: random.Random) -> None:
        if how == "freeze":
            self.do("freeze", number=number, trainable=trainable)
        elif not self._quantized:
            self._quantized = how == "quantize"
            if how == "lora":
                self.do("lora")
            else:
                self.do("quantize", compiles=trainable)
                self._look(rng, 0.8)

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
        new: dict[str, Any] = {
            "mode": rng.choice(["synchronous", "allreduce", *(["asynchronous"] if one else [])]),
            "sizes": sizes, "batch": rng.choice([4, 4, 5]),
            **rng.choice([{}, {}, {"weighted": True}, {"classes": True}]),
            "held_out": rng.choice([0, 0, 5]), "shuffle": rng.random() < 0.3,
            "fresh": rng.random() < 0.4, "epochs": rng.choice([1, 1, 2]),
        }  # fmt: skip
        if self._fits and rng.random() < 0.6:  # nearly as before: what was compiled is used again
            before = rng.choice(self._fits)
            if not (self._alone and len(before["sizes"]) > 1):
                names = [n for n in new if n not in ("mode", "sizes")]
                new = {**before, **{n: new[n] for n in rng.sample(names, 1)}}
                if new.get("weighted") and new.get("classes"):
                    del new["classes"]
        self._fits.append(new)
        self.do("fit", **new)

    @rule(rng=st.randoms(use_true_random=True))
    def evaluate(self, rng: random.Random) -> None:
        self._evaluate(rng)

    def _evaluate(self, rng: random.Random) -> None:
        how = rng.choice(["workers", "workers", "arrays"])
        self.do("evaluate", how=how, batch=rng.choice([3, 4]), weighted=rng.random() < 0.4)

    @rule(rng=st.randoms(use_true_random=True))
    def predict(self, rng: random.Random) -> None:
        self._predict(rng)

    def _predict(self, rng: random.Random) -> None:
        how = rng.choice(["frame", "frame", "function", "arrays"])
        self.do("predict", how=how, batch=rng.choice([3, 4]))

    @rule(makes=st.booleans(), number=st.integers(0, 3))
    def function(self, makes: bool, number: int) -> None:
        if makes or not self._functions:
            self._functions += 1
            self.do("make_function")
        else:
            self.do("use_function", number=number)

    @rule()
    def save(self) -> None:
        if "lambda" not in self._names:  # Keras loads these without what they refer to
            self.do("save")

    @rule(
        one=st.sampled_from([
            call("set_weights", seed=1), call("set_weights", seed=2), call("rate", value=0.1),
            call("rate", value=0.02), call("seeded", seed=2), call("clear"),
            call("kill", number=0), call("kill", number=1), call("restart"),
        ])
    )  # fmt: skip
    def adjust(self, one: Call) -> None:
        if one.name in ("kill", "restart"):
            if self._killed or self.report.sessions % ONE_IN:
                return
            self._killed = True
        self.do(one.name, **one.arguments)

    @rule(
        setting=st.sampled_from([
            ("floatx", "float64"), ("floatx", "float32"), ("epsilon", 1e-2), ("epsilon", 1e-7),
            ("dtype_policy", "float64"), ("dtype_policy", "float32"),
        ])
    )  # fmt: skip
    def config(self, setting: tuple[str, Any]) -> None:
        self.do("config", name=setting[0], value=setting[1])


def _settings(rng: random.Random) -> dict[str, Any]:
    """Arguments of ``compile``."""
    return {
        "loss": rng.choice(LOSSES),
        "metrics": tuple(rng.sample(METRICS, rng.choice([0, 0, 1, 2]))),
        "reduction": rng.choice(["", "", "sum", "mean_with_sample_weight"]),
        "weighted": rng.random() < 0.3,
        "scale": rng.choice([1.0, 3.0, 0.5]),
        "optimizer": rng.choice([*OPTIMIZERS]),
    }


def _described(calls: list[Call], found: list[str], workers: Workers) -> str:
    alone = check(calls, workers)
    simple = simplified([*calls], workers, time.monotonic() + SIMPLIFY_S) if alone else calls
    lines = [
        f"KERAS_BACKEND={keras.backend.backend()}: [",
        *(f"    {one!r}," for one in simple),
        "]",
    ]
    return "\n".join([*lines, *(f"  {text}" for text in found[:4])])


def check_many(
    count: int,
    workers: Workers,
    random_seed: int = 0,
    seconds: float = math.inf,
    steps: int = STEPS,
) -> Report:
    """Draws sessions and checks each, for some seconds at most; the same ones for the same seed."""
    report = Report(ends_at=time.monotonic() + seconds)
    kind = type("SessionMachine", (Machine,), {"workers": workers, "report": report})
    run_state_machine_as_test(
        seed(random_seed)(kind),
        settings=settings(
            max_examples=count, stateful_step_count=steps, deadline=None, database=None,
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
        count, given, steps, seconds = [
            *sys.argv[1:],
            *("", "0", STEPS, "inf")[len(sys.argv) - 1 :],
        ]
        report = check_many(int(count), workers, int(given), float(seconds), int(steps))
    print(f"{sum(os.times()[:4]):.0f} s of CPU: {report}")
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
