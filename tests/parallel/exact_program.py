"""One rank of the tests of exactness: trains its part of each case, and one process' answer too.

Run as a program: ``exact_program.py FOLDER RANK SIZE``, with the Keras backend in the environment.
The ranks meet through files in the folder, as they would through a barrier's ``allGather``; all
else is what the workers of ``mode='allreduce'`` run. Each leaves ``RANK.npz`` and ``RANK.json``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pyarrow as pa

BATCH = 8
EPOCHS = 2
STOP_AFTER = 64
LATER_RATE = 0.004
CLASS_WEIGHT = {0: 0.5, 2: 4.0}
MEETING_S = 600.0
"""Until the slowest rank has imported its framework, on a loaded machine too."""
OPERATION_S = 300.0
"""Limit of a collective operation: one that waits for another rank to compile takes seconds."""
TOKEN = b"0123456789abcdef0123456789abcdef"
Part = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One run of all ranks.

    Args:
        optimizer: See :func:`optimizers`.
        rows: Which of :data:`ROWS`.
        communicator: Its name.
        model: See :func:`models`.
        wire: What gradients travel as.
        parts: Least number of parts in which they travel.
        weighted: With sample weights.
        classes: With class weights.
        driver: What the last rank hears from the driver: ``'stop'`` or ``'rate'``.
    """

    optimizer: str
    rows: str
    communicator: str = "builtin"
    model: str = "mlp"
    wire: str | None = None
    parts: int = 1
    weighted: bool = False
    classes: bool = False
    driver: str = ""

    @property
    def name(self) -> str:
        """For test ids and the keys of the results."""
        words = [self.model, self.optimizer, self.rows, self.communicator]
        words += [self.wire or "", self.driver]
        words += [f"{self.parts} parts"] * (self.parts > 1) + ["weights"] * self.weighted
        words += ["class weights"] * self.classes
        return ", ".join(w for w in words if w)

    @property
    def is_repetition(self) -> bool:
        """Whether only the communicator is another one than in a case of the built-in one."""
        return self.communicator == "horovod" and (self.optimizer, self.model) != (
            "momentum",
            "mlp",
        )

    @property
    def question(self) -> tuple[Any, ...]:
        """What one process is asked: the way gradients travel has no part in it."""
        asked = self.model, self.optimizer, self.rows, self.weighted, self.classes, self.driver
        return (*asked, "summed") if self.sums_rows else asked

    @property
    def sums_rows(self) -> bool:
        """Whether rows of an embedding that come twice are summed first."""
        return self.communicator == "horovod" and self.model in ("words", "padded")


ROWS: dict[int, dict[str, list[int]]] = {
    2: {"even": [216, 216], "uneven": [216, 141], "empty": [0, 216], "long": [640, 421]},
    3: {"even": [216] * 3, "uneven": [141, 216, 3], "empty": [216, 0, 141]},
    4: {"even": [216] * 4, "uneven": [77, 216, 5, 136], "empty": [0, 141, 216, 0]},
}


def cases(backend: str, size: int, light: bool = False) -> list[Case]:
    """What a world of ``size`` ranks trains, in this order.

    Args:
        backend: Of Keras.
        size: Ranks.
        light: Without repetitions.
    """
    if light:
        return [c for c in cases(backend, size) if not c.is_repetition]
    found = [
        Case(optimizer, rows, communicator)
        for optimizer in ("momentum", "adam", "adamw")
        for communicator in (("builtin", "horovod") if backend == "tensorflow" else ("builtin",))
        for rows in ("empty", "even", "uneven")  # empty first: that rank has compiled nothing yet
    ]
    if size != 2:
        return found
    found += [
        Case("sgd", "uneven", model="norm"),
        Case("momentum", "uneven", parts=3),
        Case("adam", "uneven", wire="float16"),
        Case("schedule", "uneven", weighted=True),
        Case("momentum", "long", driver="stop"),
        Case("adam", "empty", driver="rate"),
        Case("momentum", "uneven", model="padded", classes=True),
        Case("momentum", "empty", model="masked"),
        Case("momentum", "uneven", model="masked"),
        Case("slow", "uneven", model="sums"),
    ]
    if backend == "tensorflow":
        found += [
            Case("adam", "uneven", wire="bfloat16"),
            Case("adam", "uneven", wire="float16", parts=3),
            Case("slow", "empty", model="synchronized"),
            Case("slow", "uneven", model="synchronized"),
            Case("slow", "empty", model="synchronized masked"),
            Case("scaled", "even", model="synchronized half"),
            Case("adamw", "empty", model="idle"),
            Case("adamw", "empty", "horovod", model="idle"),
            Case("momentum", "uneven", model="words"),
            Case("adam", "uneven", model="words"),
            Case("adam", "uneven", "horovod", model="words"),
            Case("momentum", "uneven", "horovod", model="padded", classes=True),
            Case("momentum", "empty", "horovod", model="masked"),
            Case("momentum", "uneven", "horovod", model="masked"),
            Case("slow", "uneven", "horovod", model="sums"),
            Case("scaled", "uneven", model="half"),
            Case("scaled", "uneven", "horovod", model="half"),
            Case("scaled", "uneven", model="half", wire="float16"),
            Case("sgd", "uneven", "horovod", model="norm"),
            Case("momentum", "uneven", "horovod", parts=3),
            Case("adam", "uneven", "horovod", wire="float16"),
            Case("schedule", "uneven", "horovod", weighted=True),
            Case("momentum", "long", "horovod", driver="stop"),
            Case("adam", "empty", "horovod", driver="rate"),
        ]
    return found


# -- models and data ---------------------------------------------------------------------------


def optimizers() -> dict[str, Any]:
    from keras import optimizers as o

    schedule = o.schedules.ExponentialDecay(0.1, 10, 0.9)
    return {
        "sgd": lambda: o.SGD(0.05),
        "slow": lambda: o.SGD(0.005, momentum=0.9),
        "momentum": lambda: o.SGD(0.05, momentum=0.9, nesterov=True),
        "adam": lambda: o.Adam(0.01),
        "adamw": lambda: o.AdamW(0.01, weight_decay=0.05, global_clipnorm=0.5),
        "schedule": lambda: o.SGD(schedule, momentum=0.9),
        "scaled": lambda: o.LossScaleOptimizer(o.SGD(0.05, momentum=0.9), initial_scale=256.0),
    }


def models() -> dict[str, Any]:
    import keras
    from keras import layers

    class Idle(keras.Model):
        """Has a variable that gets no gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.used = [layers.Dense(16, activation="tanh"), layers.Dense(3)]
            self.idle = layers.Dense(3)
            self.build((None, 12))

        def build(self, shape: Any) -> None:
            self.used[0].build(shape)
            self.used[1].build((None, 16))
            self.idle.build(shape)
            self.built = True

        def call(self, x: Any) -> Any:
            return self.used[1](self.used[0](x))

    def mlp() -> Any:
        return keras.Sequential(
            [
                keras.Input((12,)),
                layers.Dense(16, activation="relu", kernel_regularizer="l2"),
                layers.Dense(8, activation="tanh"),
                layers.Dense(3),
            ]
        )

    def norm() -> Any:
        middle = [layers.BatchNormalization(momentum=0.9), layers.Activation("relu")]
        return keras.Sequential([keras.Input((12,)), layers.Dense(16), *middle, layers.Dense(3)])

    def synchronized(policy: str = "float32") -> Any:
        """Layers that normalise by the rows of all ranks, one within a model of its own."""
        first, second = (layers.BatchNormalization(synchronized=True, momentum=0.5, dtype=policy)
                         for _ in range(2))  # fmt: skip
        hidden = [layers.Dense(n, use_bias=False, dtype=policy) for n in (16, 8)]
        inner = keras.Sequential([keras.Input((16,)), hidden[1], second])
        top = [layers.Dense(3), layers.Activation("linear", dtype="float32")]
        return keras.Sequential([keras.Input((12,)), hidden[0], first, inner, *top])

    def synchronized_masked() -> Any:
        """Positions without a word have no part in the moments, nor in the loss."""
        return keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.BatchNormalization(synchronized=True, momentum=0.5),
                layers.Dense(3),
            ]
        )

    def words() -> Any:
        return keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                layers.Embedding(20, 4),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )

    def padded() -> Any:
        return keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.GlobalAveragePooling1D(),
                layers.Dense(3),
            ]
        )

    def masked() -> Any:
        """A label for each position; positions without a word count nothing."""
        return keras.Sequential(
            [
                keras.Input((12,), dtype="int32"),
                layers.Embedding(20, 4, mask_zero=True),
                layers.Dense(3),
            ]
        )

    def half() -> Any:
        policy = "mixed_float16"
        return keras.Sequential(
            [
                keras.Input((12,)),
                layers.Dense(16, activation="relu", dtype=policy),
                layers.Dense(3, dtype=policy),
                layers.Activation("linear", dtype="float32"),
            ]
        )

    return {
        "mlp": mlp, "norm": norm, "words": words, "padded": padded, "half": half, "idle": Idle,
        "masked": masked, "sums": mlp, "synchronized": synchronized,
        "synchronized masked": synchronized_masked,
        "synchronized half": lambda: synchronized("mixed_float16"),
    }  # fmt: skip


def parts_of(case: Case, size: int) -> list[Part]:
    """Features, labels and weights of each rank."""
    sizes = ROWS[size][case.rows]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), 12)).astype("float32")
    y = (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype("int32") + (x[:, 3] > 1)
    weights = rng.uniform(0.2, 2.0, len(x)).astype("float32")
    edges = np.cumsum([0, *sizes])
    x += np.repeat(np.arange(size) * 0.5, sizes)[:, None].astype("float32")  # ranks differ
    if case.model == "half":
        x[edges[-2] + 3 * BATCH] = 1e30  # infinite in half precision, on the last rank alone
    if case.model == "words":
        x = np.abs(x * 6).astype("int32") % 20  # many a word comes twice in a batch
    if case.model.endswith("masked"):  # short rows on the first rank with rows, long on the last
        x = np.abs(x * 6).astype("int32") % 19 + 1
        short = np.arange(len(x)) < edges[-1] // 2
        lengths = np.where(short, rng.integers(1, 4, len(x)), rng.integers(8, 13, len(x)))
        x *= np.arange(12) < lengths[:, None]
        y = rng.integers(0, 3, x.shape).astype("int32")
    if case.model == "padded":  # rows of 1 to 12 words; 0 is no word
        x = np.abs(x * 6).astype("int32") % 19 + 1
        x *= np.arange(12) < rng.integers(1, 13, len(x))[:, None]
    return [(x[a:b], y[a:b], weights[a:b]) for a, b in itertools.pairwise(edges)]


def rows_of(case: Case, part: Part) -> Any:
    """A rank's rows as a worker has them: those of different length are not padded yet."""
    from sparkdl.data import ColumnSpec, DataSpec, read_partition, rows_from_numpy
    from sparkdl.data.columns import Padding

    x, y, weights = part
    if case.model != "padded":
        return rows_from_numpy(x, y, weights if case.weighted else None)
    table = pa.table({"x": [row[row > 0].tolist() for row in x], "y": y})
    words = ColumnSpec(("x",), (None,), "int32", padding=Padding(0, _backend() == "jax"))
    spec = DataSpec({"x": words}, {"y": ColumnSpec(("y",), (), "int32", "scalars", classes=3)})
    return read_partition(table.to_batches(), spec).train


def set_variables(model: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    model.set_weights(
        [
            np.ones(v.shape, v.dtype) if "variance" in v.path
            else np.asarray(0.3 * rng.normal(size=v.shape), v.dtype)
            for v in model.weights
        ]
    )  # fmt: skip


class Trainee:
    """A compiled model that can be set back to the start."""

    def __init__(self, model: str, optimizer: str) -> None:
        self.model = models()[model]()
        loss = _loss("sum" if model == "sums" else "sum_over_batch_size")
        self.model.compile(optimizers()[optimizer](), loss, jit_compile=_backend() == "jax")
        self.model.optimizer.build(self.model.trainable_variables)
        self._fresh = [np.array(v.numpy()) for v in self.model.optimizer.variables]

    def reset(self, seed: int) -> Any:
        """The model with new weights and the optimizer's first state."""
        set_variables(self.model, seed)
        for variable, value in zip(self.model.optimizer.variables, self._fresh, strict=True):
            variable.assign(value)
        self.model.reset_metrics()
        return self.model

    def result(self) -> np.ndarray:
        """Trained variables, then running statistics."""
        from sparkdl.learner.state.model_weights import model_layout, read_model

        return read_model(self.model, model_layout(self.model))


def _backend() -> str:
    import keras

    return str(keras.backend.backend())


def _loss(reduction: str = "sum_over_batch_size") -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


# -- all ranks together --------------------------------------------------------------------------


class Meeting:
    """Which rank this is, and the launcher's exchange, through files."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self.folder, self.rank, self.size, self._round = folder, rank, size, 0

    def all_gather(self, text: str) -> list[str]:
        self._round += 1
        places = [self.folder / f"{self._round}.{rank}" for rank in range(self.size)]
        mine = places[self.rank].with_suffix(f".{self.rank}.new")
        mine.write_text(text)
        os.replace(mine, places[self.rank])
        deadline = time.monotonic() + MEETING_S
        while not all(p.exists() for p in places):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} met nobody in round {self._round}")
            time.sleep(0.002)
        return [p.read_text() for p in places]


def make_driver(kind: str) -> Any:
    """What a rank hears from the driver."""
    from sparkdl.collective.synchronizer import NoControl

    class Driver(NoControl):
        learning_rate = LATER_RATE if kind == "rate" else None
        asked = 0

        @property
        def stopped(self) -> bool:  # type: ignore[override]
            self.asked += 1
            return kind == "stop" and self.asked >= 3

    return Driver()


class Ranks:
    """This rank's side of all cases."""

    learners: ClassVar[dict[tuple[str, str], tuple[Trainee, Any]]] = {}

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting

    def train(self, case: Case) -> tuple[np.ndarray, int]:
        """This rank's weights after the run, and the optimizer's steps."""
        from sparkdl.collective.strategy import AllReduceStrategy
        from sparkdl.config import LoopSettings
        from sparkdl.data import Batches
        from sparkdl.learner import make_learner
        from sparkdl.worker import train

        rank, size = self.meeting.rank, self.meeting.size
        key = case.model, case.optimizer
        if key not in self.learners:
            trainee = Trainee(*key)
            self.learners[key] = trainee, make_learner(trainee.model)
        trainee, learner = self.learners[key]
        sizes = ROWS[size][case.rows]
        root = sizes.index(max(sizes))
        trainee.reset(seed=0 if rank == root else rank + 1)  # all begin apart, and take the root's
        learner.reload()
        layout = learner.layout
        strategy = AllReduceStrategy(
            TOKEN, layout, case.communicator, {"timeout_s": OPERATION_S}, case.wire
        )
        rows = rows_of(case, parts_of(case, size)[rank])
        class_weight = CLASS_WEIGHT if case.classes else None
        batches = Batches(rows, BATCH, shuffle=False, rank=rank, class_weight=class_weight)
        settings = LoopSettings(
            epochs=EPOCHS, batch_size=BATCH, shuffle=False, follow_schedule=False
        )
        driver = make_driver(case.driver if rank == size - 1 else "")
        with cut(layout, case.parts), strategy.open(self.meeting, layout, driver) as synchronizer:
            assert synchronizer.outcome(learner, 0).transport == case.communicator
            assert len(synchronizer._steps.parts) >= case.parts, synchronizer._steps.parts
            train(learner, synchronizer, batches, settings, num_rows=len(rows), num_workers=size)
        flat = np.empty(layout.size, np.float32)
        learner.read_weights(flat)
        return flat, learner.optimizer.step


@contextlib.contextmanager
def cut(layout: Any, parts: int) -> Iterator[None]:
    """Within, gradients travel in at least so many parts."""
    from sparkdl.collective import strategy

    kind = strategy.AllReduceGradientSynchronizer
    made = kind if parts == 1 else functools.partial(kind, part_bytes=layout.size_bytes // 10)
    with mock.patch.object(strategy, "AllReduceGradientSynchronizer", made):
        yield


# -- one process ---------------------------------------------------------------------------------


def global_steps(parts: list[Part]) -> Iterator[list[Part]]:
    """Step t has every rank's t-th batch; a rank that has none left is left out."""
    for t in range(max(-(-len(x) // BATCH) for x, _, _ in parts)):
        cut = slice(t * BATCH, (t + 1) * BATCH)
        yield [(x[cut], y[cut], w[cut]) for x, y, w in parts if len(x[cut])]


def answer(case: Case, size: int) -> tuple[np.ndarray, int]:
    """What one process gets from plain Keras, and its steps."""
    if case.model == "norm":
        return by_hand(case, size)
    trainee = Trainee(case.model, case.optimizer)
    if case.sums_rows:
        summed_first(trainee.model.optimizer)
    model = trainee.reset(seed=0)
    taken = 0
    for epoch in range(EPOCHS):
        if epoch and case.driver == "rate":
            model.optimizer.learning_rate = LATER_RATE
        for step in global_steps(parts_of(case, size)):
            x, y, w = (np.concatenate(arrays) for arrays in zip(*step, strict=True))
            model.train_on_batch(
                x, y, sample_weight=w if case.weighted else None,
                class_weight=CLASS_WEIGHT if case.classes else None,
            )  # fmt: skip
            taken += 1
            if case.driver == "stop" and taken == STOP_AFTER:
                return trainee.result(), taken
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return trainee.result(), int(np.asarray(optimizer.iterations.numpy()))


def summed_first(optimizer: Any) -> None:
    """Horovod's operations join dense gradients; Keras' own are rows, which it never sums."""
    import tensorflow as tf

    apply = optimizer.apply
    optimizer.apply = lambda grads, variables=None: apply(
        [tf.convert_to_tensor(g) for g in grads], variables
    )


def by_hand(case: Case, size: int) -> tuple[np.ndarray, int]:
    """SGD where a rank's normalisation sees its own batch: mean of gradients and statistics.

    A step of SGD(1) tells the gradient: weights before less weights after.
    """
    from keras import optimizers as o

    assert case.optimizer == "sgd"
    trainee = Trainee(case.model, "sgd")
    model = trainee.reset(seed=0)
    model.compile(o.SGD(1.0), _loss(), jit_compile=_backend() == "jax")
    trained = {v.path for v in model.trainable_variables}
    values = [np.asarray(w, np.float64) for w in model.get_weights()]
    taken = 0
    for _ in range(EPOCHS):
        for step in global_steps(parts_of(case, size)):
            rows = sum(len(x) for x, _, _ in step)
            means = [np.zeros_like(v) for v in values]
            for x, y, _ in step:
                model.set_weights([v.astype("float32") for v in values])
                before = model.get_weights()
                model.train_on_batch(x, y)
                after = model.get_weights()
                for mean, a, b, v in zip(means, before, after, model.weights, strict=True):
                    told = a.astype("float64") - b if v.path in trained else b.astype("float64")
                    mean += told * (len(x) / rows)
            for i, v in enumerate(model.weights):
                values[i] = values[i] - 0.05 * means[i] if v.path in trained else means[i]
            taken += 1
    model.set_weights([v.astype("float32") for v in values])
    return trainee.result(), taken


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ranks = Ranks(Meeting(folder, rank, size))
    arrays: dict[str, np.ndarray] = {}
    told: dict[str, Any] = {}
    listed = cases(_backend(), size, light="light" in sys.argv)
    has_horovod = False
    if _backend() == "tensorflow":
        from sparkdl.collective.horovod import unavailable

        has_horovod = not unavailable()
    for case in listed:
        if case.communicator == "horovod" and not has_horovod:
            continue
        began = time.perf_counter()
        try:
            arrays[case.name], steps = ranks.train(case)
            told[case.name] = {"steps": steps}
        except Exception:
            told[case.name] = {"error": traceback.format_exc()}
        told[case.name]["seconds"] = time.perf_counter() - began
    questions = {case.question: case for case in listed}
    for number, (question, case) in enumerate(questions.items()):
        if number % size == rank:
            began = time.perf_counter()
            arrays[repr(question)], steps = answer(case, size)
            told[repr(question)] = {"steps": steps, "seconds": time.perf_counter() - began}
    np.savez(folder / f"{rank}.npz", **{_key(name): a for name, a in arrays.items()})
    (folder / f"{rank}.json").write_text(json.dumps(told))


def _key(name: str) -> str:
    return name.replace("/", "|")


if __name__ == "__main__":
    main()
