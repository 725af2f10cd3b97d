"""The checks of the kit, each run as a process: ``gpu_checks.py CHECK BACKEND gpu|cpu small|full``.

A check prints its rows as one line of JSON. The Keras backend is in the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROW_LIMIT_S = 240.0
BATCH = 64


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: What was measured.
        value: The figure, with its unit.
        wanted: What it must be; empty where nothing is promised.
        holds: Whether it is.
    """

    what: str
    value: str
    wanted: str = ""
    holds: bool = True


@dataclass(frozen=True)
class Setting:
    """Where a check runs.

    Args:
        backend: Of Keras.
        gpu: Whether on a GPU.
        small: Sizes for a test on a CPU.
    """

    backend: str
    gpu: bool
    small: bool

    def of(self, small: int, full: int) -> int:
        """A size."""
        return small if self.small else full


# -- models and rows -----------------------------------------------------------------------------


def mlp(width: int, depth: int = 2, inputs: int = 64, activation: str = "relu") -> Any:
    import keras

    keras.utils.set_random_seed(7)
    hidden = [keras.layers.Dense(width, activation=activation) for _ in range(depth)]
    model = keras.Sequential([keras.Input((inputs,)), *hidden, keras.layers.Dense(10)])
    return compiled(model)


def convolutions(side: int, channels: int, activation: str = "relu") -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((side, side, 3)),
            layers.Conv2D(channels, 3, padding="same", activation=activation),
            layers.Conv2D(channels, 3, 2, "same", activation=activation),
            layers.Conv2D(2 * channels, 3, padding="same", activation=activation),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    return compiled(model)


def compiled(model: Any) -> Any:
    import keras

    model.compile(
        keras.optimizers.SGD(0.02, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def rows_for(model: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(count, *model.input_shape[1:])).astype("float32")
    return x, (np.abs(x.reshape(count, -1)[:, :8].sum(1)) * 2).astype("int32") % 10


def own_copy(model: Any) -> Any:
    """The model as a worker makes it of what the driver sends."""
    from sparkdl.learner.archives.archive import decode_model, encode_model

    return decode_model(encode_model(model))


def flat_weights(model: Any) -> np.ndarray:
    from sparkdl.learner.state.model_weights import model_layout, read_model

    return read_model(model, model_layout(model))


# -- right weights, devices, memory --------------------------------------------------------------


def weights(at: Setting) -> Iterator[Row]:
    """One rank and two ranks of ``mode='allreduce'``, beside plain Keras on the same rows.

    The networks are smooth. With ReLU one more rounding (XLA measures which product is the fastest,
    and two of them add in another order) puts a unit on its other side now and then, and the
    weights 3.3e-04 apart.
    """
    epochs, total = 2, at.of(256, 8192)
    for name, worlds, make in (
        ("dense", (1, 2), lambda: mlp(at.of(16, 1024), activation="tanh")),
        ("convolutions", (2,), lambda: convolutions(at.of(8, 32), at.of(4, 32), "tanh")),
    ):
        x, y = rows_for(make(), total)
        for ranks in worlds:
            order = _global_order(total, ranks)
            reference = make()
            start = flat_weights(reference)
            reference.fit(
                x[order], y[order], batch_size=ranks * BATCH, epochs=epochs, shuffle=False,
                verbose=0,
            )  # fmt: skip
            moved = float(np.abs(flat_weights(reference) - start).max())
            parts = [np.arange(total).reshape(ranks, -1)[r] for r in range(ranks)]
            found, seen = _trained(at, make(), [(x[p], y[p]) for p in parts], epochs)
            apart = max(float(np.abs(w - flat_weights(reference)).max()) for w in found)
            yield Row(
                f"{name}, {ranks} rank(s): weights beside plain Keras",
                f"{apart:.1e} apart, moved {moved:.2f}", "1e-4 of what moved",
                apart <= 1e-4 * max(moved, 1.0),
            )  # fmt: skip
            wanted = int(at.gpu)
            held = [len(s["devices"]) for s in seen]
            yield Row(
                f"{name}, {ranks} rank(s): GPUs that a rank sees", str(held), str(wanted),
                all(h == wanted for h in held),
            )  # fmt: skip
            if at.gpu:
                most = max(s["card"] for s in seen)
                yield Row(
                    f"{name}, {ranks} rank(s): GPU memory of all processes", f"{most} MiB",
                    "10,000 MiB (a rank takes what it needs)", most <= 10_000,
                )  # fmt: skip


def _global_order(total: int, ranks: int) -> np.ndarray:
    """Rows in the order in which one process meets the ranks' batches."""
    parts = np.arange(total).reshape(ranks, -1, BATCH)
    return parts.transpose(1, 0, 2).reshape(-1)


def _trained(
    at: Setting, model: Any, parts: list[tuple[np.ndarray, np.ndarray]], epochs: int
) -> tuple[list[np.ndarray], list[dict[str, Any]]]:
    """Each rank's weights, and what it has seen."""
    from gpu_task import GpuTask

    from sparkdl.collective.strategy import AllReduceStrategy, BarrierStrategy
    from sparkdl.config import LoopSettings
    from sparkdl.data import ColumnSpec, DataSpec
    from sparkdl.launch.child import ProcessLauncher
    from sparkdl.learner.archives.archive import encode_model
    from sparkdl.learner.state.model_weights import model_layout
    from sparkdl.spark.executor.trainer import TrainedRank, TrainTask

    shape = parts[0][0].shape[1:]
    spec = DataSpec(
        {"features": ColumnSpec(("x",), shape, "float32")},
        {"label": ColumnSpec(("y",), (), "int32", "scalars", classes=10)},
    )
    strategy = AllReduceStrategy(
        secrets.token_bytes(32), model_layout(model), "builtin", {"timeout_s": ROW_LIMIT_S}
    )
    inner = TrainTask(
        encode_model(model), spec,
        LoopSettings(epochs=epochs, batch_size=BATCH, shuffle=False),
        BarrierStrategy(strategy, None), len(parts),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, card_memory(at.gpu) as card:
        files = []
        for rank, (x, y) in enumerate(parts):
            files.append(str(Path(folder, f"rows{rank}.npz")))
            np.savez(files[-1], x=x, y=y)
        task = GpuTask(inner, tuple(files), ("0",) if at.gpu else (), folder)
        deadline = time.monotonic() + ROW_LIMIT_S
        with ProcessLauncher(len(parts)).launch(task) as ranks:
            while not ranks.wait(0.2):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks have not ended after {ROW_LIMIT_S:.0f} s")
            results = ranks.results()
        seen = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(len(parts))]
    trained = TrainedRank.all_of(results)
    found = [t.state.weights for t in trained.values() if t.state is not None]
    return found, [{**s, "card": card[0]} for s in seen]


@contextlib.contextmanager
def card_memory(gpu: bool) -> Iterator[list[int]]:
    """Within, the most memory of the card in use, in MiB, is kept in the list's one place."""
    import subprocess
    import threading

    most, ended = [0], threading.Event()

    def watch() -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not ended.wait(0.3):
            told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
            if told.returncode == 0:
                most[0] = max(most[0], int(told.stdout.splitlines()[0]))

    thread = threading.Thread(target=watch, daemon=True)
    if gpu:
        thread.start()
    try:
        yield most
    finally:
        ended.set()
        if gpu:
            thread.join(30)


# -- speed ---------------------------------------------------------------------------------------


def rates(at: Setting) -> Iterator[Row]:
    """Rows a second of a worker's loop beside ``model.fit``, in turns."""
    for name, make, count, batch in (
        ("dense, batch 64", lambda: mlp(at.of(16, 256)), at.of(1024, 65536), 64),
        ("dense, batch 1024", lambda: mlp(at.of(16, 2048)), at.of(4096, 262144), 1024),
        ("convolutions, batch 256", lambda: convolutions(at.of(8, 32), at.of(4, 64)),
         at.of(512, 32768), 256),
    ):  # fmt: skip
        ratio, rate = _ratio(make, count, batch, turns=at.of(2, 5))
        yield Row(
            f"{name}: rows/s of the loop beside model.fit", f"{ratio:.2f} ({rate:,.0f} rows/s)",
            "0.95" if at.gpu else "", ratio >= 0.95 or not at.gpu,
        )  # fmt: skip


def _ratio(make: Callable[[], Any], count: int, batch: int, turns: int) -> tuple[float, float]:
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    plain, model = make(), make()
    learner = make_learner(model)
    x, y = rows_for(plain, count)
    batches = Batches(rows_from_numpy(x, y), batch, shuffle=True)
    room = np.empty(learner.layout.size, np.float32)

    def ours(epoch: int) -> None:
        for stack in batches.stacks(epoch, 16):
            learner.train(stack)
        learner.read_weights(room)  # waits until all is computed

    def theirs() -> None:
        plain.fit(x, y, batch_size=batch, epochs=1, verbose=0)
        flat_weights(plain)

    ours(0)
    theirs()
    pairs = []
    for turn in range(turns):
        pairs.append((_seconds(lambda e=turn + 1: ours(e)), _seconds(theirs)))  # type: ignore[misc]
    ratio = statistics.median(b / a for a, b in pairs)
    return ratio, count / statistics.median(a for a, _ in pairs)


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# -- half precision and recompute ----------------------------------------------------------------


def precision(at: Setting, policy: str) -> Iterator[Row]:
    """Speed, memory and loss of a policy; the kit sets them beside those of float32."""
    import keras
    from gpu_task import peak_bytes

    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    keras.mixed_precision.set_dtype_policy(policy)
    model = own_copy(mlp(at.of(16, 4096), depth=4, inputs=at.of(64, 1024)))
    x, y = rows_for(model, at.of(1024, 65536))
    learner = make_learner(model)
    batches = Batches(rows_from_numpy(x, y), at.of(64, 2048), shuffle=True)
    room = np.empty(learner.layout.size, np.float32)
    times = []
    for epoch in range(4):
        learner.metrics.reset()
        began = time.perf_counter()
        for stack in batches.stacks(epoch, 16):
            learner.train(stack)
        learner.read_weights(room)
        times.append(time.perf_counter() - began)
    total, count = learner.metrics.state()[:2]
    yield Row("loss", f"{total / count:.5f}")
    yield Row("rate", f"{len(x) / statistics.median(times[1:]):.1f}")
    yield Row("memory", str(peak_bytes()))
    finite = bool(np.isfinite(room).all())
    yield Row("finite", str(int(finite)), "1", finite)


def recompute(at: Setting, scope: str) -> Iterator[Row]:
    """Memory of one step of a deep network, and a number made of its gradient."""
    import keras
    from gpu_task import peak_bytes
    from keras import layers

    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner

    keras.utils.set_random_seed(7)
    held = keras.RematScope(mode="full") if scope == "recompute" else contextlib.nullcontext()
    with held:
        given = keras.Input((at.of(16, 512),))
        value = given
        for _ in range(at.of(3, 24)):
            inner = layers.Dense(at.of(32, 4096), activation="gelu")(value)
            value = layers.Add()([value, layers.Dense(at.of(16, 512))(inner)])
        model = compiled(keras.Model(given, layers.Dense(10)(value)))
    learner = make_learner(own_copy(model))
    x, y = rows_for(model, at.of(32, 16384))
    stack = next(Batches(rows_from_numpy(x, y), len(x), shuffle=False).stacks(0, 1))
    flat = np.empty(learner.layout.size, np.float32)
    learner.gradients(stack, flat)
    yield Row("memory", str(peak_bytes()))
    yield Row("norm", f"{float(np.linalg.norm(flat)):.8e}")
    yield Row("sum", f"{float(np.abs(flat).sum()):.8e}")


# -- rows and classes outside of the model -------------------------------------------------------


def tables(at: Setting) -> Iterator[Row]:
    """A model on the GPU whose rows and classes are in tables, beside Keras' own layers."""
    import keras

    from sparkdl.layers import CosFace, ServedEmbedding, ShardedClassifier

    ids, classes, dim = at.of(50, 2000), at.of(30, 5000), at.of(4, 64)
    rng = np.random.default_rng(0)
    x = rng.integers(0, ids, (at.of(64, 4096), 3)).astype("int32")
    y = (x.sum(1) % classes).astype("int32")

    def sgd() -> Any:
        return keras.optimizers.SGD(0.2)

    def network(embed: Any, head: Any) -> Any:
        keras.utils.set_random_seed(5)
        given = keras.Input((3,), dtype="int32")
        hidden = keras.layers.Dense(dim, "tanh")(keras.layers.Flatten()(embed(given)))
        return keras.Model(given, head(hidden))

    start = {"name": "normal", "stddev": 0.5}
    rows = ServedEmbedding(dim, table="rows", seed=1, optimizer=sgd(), initializer=start)
    for margin in (None, CosFace(0.2, 16.0)):
        head = ShardedClassifier(
            classes, margin=margin, table="classes", seed=2, optimizer=sgd(), initializer=start
        )
        served = network(ServedEmbedding.from_config(rows.get_config()), head)
        served.compile(sgd(), head.loss, metrics=[head.accuracy])
        plain = network(keras.layers.Embedding(ids, dim), _cosines(classes, margin))
        plain.layers[1].set_weights([rows.rows(np.arange(ids))])
        plain.layers[-1].set_weights([head.centers(np.arange(classes)).T])
        plain.compile(sgd(), _cross_entropy(classes, margin))
        for model in (served, plain):
            model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        wanted = plain.layers[-1].get_weights()[0].T
        apart = float(np.abs(head.centers(np.arange(classes)) - wanted).max())
        found = served.layers[1].rows(np.arange(ids))
        apart = max(apart, float(np.abs(found - plain.layers[1].get_weights()[0]).max()))
        moved = float(np.abs(wanted - head.start_rows(np.arange(classes))).max())
        name = "products" if margin is None else "cosines with a margin"
        yield Row(
            f"rows and classes in tables, {name}", f"{apart:.1e} apart, moved {moved:.2f}",
            "1e-4 of what moved", apart <= 1e-4 * moved,
        )  # fmt: skip


def _cosines(classes: int, margin: Any) -> Any:
    """The logits of a large softmax as a layer of Keras'."""
    import keras

    class Cosines(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], classes))

        def call(self, features: Any) -> Any:
            if margin is None:
                return keras.ops.matmul(features, self.kernel)
            towards = keras.ops.normalize(self.kernel, axis=0)
            return keras.ops.matmul(keras.ops.normalize(features), towards)

    return Cosines()


def _cross_entropy(classes: int, margin: Any) -> Callable[[Any, Any], Any]:
    import keras

    def loss(labels: Any, logits: Any) -> Any:
        labels = keras.ops.cast(keras.ops.reshape(labels, (-1,)), "int32")
        if margin is not None:
            own = keras.ops.one_hot(labels, classes)
            logits = margin.scale * (logits - margin.m3 * own)
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)

    return loss


# -- copies between GPU and host -----------------------------------------------------------------


def copies(at: Setting) -> Iterator[Row]:
    """How often a step of ``mode='allreduce'`` moves the gradient between GPU and host."""
    from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner
    from sparkdl.testing.inproc import connect_threads

    model = mlp(at.of(16, 2048), depth=3)
    learner = make_learner(model)
    x, y = rows_for(model, 16 * BATCH)
    stack = next(Batches(rows_from_numpy(x, y), BATCH, shuffle=False).stacks(0, 16))
    (communicator,) = connect_threads(1)
    with contextlib.closing(communicator):
        steps = AllReduceGradientSynchronizer(communicator, learner.layout)
        steps.start(learner)
        steps.train(learner, stack)
        seconds = statistics.median(
            _seconds(lambda: steps.train(learner, stack)) / stack.num_batches for _ in range(5)
        )
        flat = np.empty(learner.layout.size, np.float32)
        plain = statistics.median(
            _seconds(lambda: (learner.train(stack), learner.read_weights(flat)))  # type: ignore
            / stack.num_batches
            for _ in range(5)
        )
        size = learner.layout.size_bytes
        yield Row(
            f"a step with its gradient ({size / 1e6:.1f} MB) through the host",
            f"{1e3 * seconds:.2f} ms; without {1e3 * plain:.2f} ms",
        )
        if at.backend == "torch" and at.gpu:
            yield from _counted(lambda: steps.train(learner, stack), stack.num_batches, size)


def _counted(call: Callable[[], None], num_steps: int, size: int) -> Iterator[Row]:
    import torch

    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    for way, wanted in (("DtoH", 1.0), ("HtoD", 1.0)):
        names = [e.name for e in profile.events() if f"Memcpy {way}" in e.name]
        moved = [
            e.device_time_total for e in profile.events() if f"Memcpy {way}" in e.name
        ]  # microseconds
        large = [t for t in moved if t > size / 100e3]  # at less than 100 GB/s: as large as this
        per_step = len(large) / num_steps
        yield Row(
            f"copies of the gradient, {way}, a step (copies of any size: {len(names)})",
            f"{per_step:.2f}", f"{wanted:.0f}", per_step <= wanted + 0.2,
        )  # fmt: skip


CHECKS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "weights": weights,
    "tables": tables,
    "rates": rates,
    "copies": copies,
    **{
        name: (lambda at, name=name: precision(at, name))  # type: ignore[misc]
        for name in ("float32", "mixed_bfloat16", "mixed_float16")
    },
    **{
        name: (lambda at, name=name: recompute(at, name))  # type: ignore[misc]
        for name in ("all kept", "recompute")
    },
}


def start_framework(at: Setting) -> None:
    """Starts the framework of the reference so that it leaves room on the card for the ranks.

    The environment of the ranks is as before: that they share the card is the library's part.
    """
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if at.backend == "jax":
        import jax

        jax.devices()
    del os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"]


def main() -> None:
    check, backend, device, sizes = sys.argv[1:]
    at = Setting(backend, device == "gpu", sizes == "small")
    start_framework(at)
    print(json.dumps([asdict(row) for row in CHECKS[check](at)]))


if __name__ == "__main__":
    main()
