"""Rows of tables in windows: skip-gram over a slow link, exchanged at each step and every so many.

    python benchmarks/geo_rows.py [--data text8-head.txt.gz] [--times 20] [--window 100]
                                  [--words 5000] [--batch 8192] [--steps 100] [--repeats 3]

Two workers and a server are processes on hosts of their own: network namespaces whose links a token
bucket limits (root is needed). The model is word2vec's skip-gram with negative samples: two tables
of rows, in Keras, trained by the library's own loop with ``rule='geo'``. The rate of the links is
such that an exchange takes ``times`` as long as the computing of a step, c. Printed are c, the
exchange m, the time of a step with an exchange at each one and with windows by turns, what the
limit ``(c + m) / (c + m / k)`` allows, and the loss on held-out pairs after as many steps. A window
touches more rows than a step: what its bytes alone allow is printed as well.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, os.path.dirname(__file__))
import numpy as np
from limited_hosts import _read_line, _read_object, _send_object
from several_servers import Hosts, _Rank, be_server

DIM, NEGATIVES, AROUND = 32, 3, 2
HERE = os.path.abspath(__file__)


@dataclass(frozen=True)
class Job:
    """What a worker trains.

    Args:
        strategy: How it reaches the server.
        archive: The model.
        rank: Which worker it is.
        window: Steps between two exchanges.
        epochs: How often it goes over its pairs; the first is not timed.
        batch: Pairs of a step.
        x, y: Centers and contexts, and whether they are neighbours.
        held_x, held_y: For the loss.
    """

    strategy: Any
    archive: bytes
    rank: int
    window: int
    epochs: int
    batch: int
    x: np.ndarray
    y: np.ndarray
    held_x: np.ndarray
    held_y: np.ndarray


def pairs_of(path: str, words: int, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs of (center, context) of the commonest words, shuffled, with negative samples."""
    with gzip.open(path, "rt") as file:
        text = file.read().split()
    known, numbers, counts = np.unique(text, return_inverse=True, return_counts=True)
    common = np.argsort(-counts)[:words]
    place = np.full(len(known), -1)
    place[common] = np.arange(len(common))
    ids = place[numbers]
    ids = ids[ids >= 0]
    found = [
        np.stack([ids[:-step], ids[step:]], 1)[:, ::order]
        for step in range(1, AROUND + 1)
        for order in (1, -1)
    ]
    rng = np.random.default_rng(seed)
    real = rng.permutation(np.concatenate(found))[: count // (1 + NEGATIVES)]
    weights = np.sort(counts)[::-1][: len(common)] ** 0.75
    edges = np.cumsum(weights / weights.sum())
    made = np.repeat(real, NEGATIVES, axis=0)
    made[:, 1] = np.searchsorted(edges, rng.random(len(made)))
    x = np.concatenate([real, made]).astype(np.int32)
    y = np.concatenate([np.ones(len(real)), np.zeros(len(made))]).astype(np.float32)
    order = rng.permutation(len(x))
    return x[order], y[order]


def make_model() -> Any:
    import keras

    import sparkdl

    keras.utils.set_random_seed(0)
    x = keras.Input((2,), dtype="int32")
    tables = [
        sparkdl.layers.ServedEmbedding(DIM, table=name, optimizer=keras.optimizers.Adagrad(0.3))
        for name in ("centers", "contexts")
    ]
    rows = [table(x[:, i]) for i, table in enumerate(tables)]
    near = keras.layers.Dot(1)(rows)
    model = keras.Model(x, keras.layers.Dense(1, "sigmoid")(near))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def be_worker() -> None:
    """Trains as each job says; prints c, the seconds of a step, the bytes of a step, the loss."""
    from sparkdl.config import LoopSettings
    from sparkdl.data import Batches, rows_from_numpy
    from sparkdl.learner import make_learner
    from sparkdl.learner.archives.archive import decode_model
    from sparkdl.learner.state.model_weights import model_layout
    from sparkdl.worker import train

    while (job := _read_object()) is not None:
        learner = make_learner(decode_model(job.archive))
        batches = Batches(rows_from_numpy(job.x, job.y), job.batch, rank=job.rank)
        alone = make_learner(decode_model(job.archive))
        computing = []
        for stack in batches.stacks(0, 1):
            began = time.perf_counter()
            alone.train(stack)
            computing.append(time.perf_counter() - began)
        held = Batches(rows_from_numpy(job.held_x, job.held_y), job.batch, shuffle=False)
        ends: list[float] = []
        losses: list[float] = []
        with job.strategy.open(_Rank(job.rank), model_layout(learner.model)) as synchronizer:
            tells = synchronizer.end_epoch

            def end_epoch(
                learner: Any, epoch: int, metrics: Any, held_out: Any, wait: bool,
                tell: Any = tells, losses: list[float] = losses, ends: list[float] = ends,
            ) -> None:  # fmt: skip
                losses.append(float(held_out[0] / held_out[1]))
                tell(learner, epoch, metrics, held_out, wait)
                ends.append(time.perf_counter())

            synchronizer.end_epoch = end_epoch
            moved = synchronizer._client.session
            looks: list[tuple[float, int]] = []
            synchronizer.train = noting(synchronizer.train, moved, looks)
            synchronizer.train_on = noting(synchronizer.train_on, moved, looks)
            settings = LoopSettings(job.epochs, batch_size=job.batch, window=job.window)
            train(
                learner, synchronizer, batches, settings, validation=held,
                num_rows=len(job.x), num_workers=2,
            )  # fmt: skip
        steps = batches.steps_per_epoch
        epoch = [look for look in looks if look[0] > ends[-2]]
        seconds, size = (epoch[-1][i] - epoch[0][i] for i in range(2))
        told = [statistics.median(computing[2:]), seconds / steps, size / steps, losses[-1]]
        print(json.dumps(told), flush=True)


def noting(call: Any, session: Any, looks: list[tuple[float, int]]) -> Any:
    """``call``, before and after which the time and the bytes so far are noted."""

    def noted(*given: Any) -> None:
        looks.append((time.perf_counter(), sum(session.bytes_beside())))
        call(*given)
        looks.append((time.perf_counter(), sum(session.bytes_beside())))

    return noted


class Machines(Hosts):
    """Two workers, a server and its coordinator."""

    def _spawn(self, role: str, host: int) -> subprocess.Popen[bytes]:
        from limited_hosts import _end

        process = subprocess.Popen(
            [*self.network.command(host), sys.executable, HERE, role],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(_end, process)
        return process

    def train(self, window: int, args: argparse.Namespace, epochs: int, steps: int) -> list[float]:
        """The medians of c, a step and its bytes over the workers; the mean of their losses."""
        from sparkdl.coordinator.settings import Settings
        from sparkdl.learner.archives.archive import encode_model
        from sparkdl.learner.state.model_weights import model_layout, read_model
        from sparkdl.learner.state.served_rows import ModelTables
        from sparkdl.ps.server import ServerConfig
        from sparkdl.ps.server.config import TablesOfRun, shards_of
        from sparkdl.ps.strategy import ServerStrategy
        from sparkdl.rules import make_rule

        model = make_model()
        layout = model_layout(model)
        rule = make_rule("geo").bind(2)
        settings = Settings(2, gather=2)
        config = ServerConfig(layout, rule, 2, mode="socket", settings=settings)
        x, y = pairs_of(args.data, args.words, 2 * steps * args.batch + args.held, 0)
        share = steps * args.batch
        held = x[2 * share :], y[2 * share :]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tables = TablesOfRun(tuple(ModelTables(model).specs), folder)
            (only,) = shards_of(config, 1, tables)
            shard, _ = stack.enter_context(self.server(only, read_model(model, layout), 0))
            decides = replace(config, sharded=True)
            first, _ = stack.enter_context(self.server(decides, np.empty(0, np.float32), 1))
            strategy = ServerStrategy(
                first, layout, rule, overlap=False, shards=(shard,), with_tables=True
            )
            for rank, worker in enumerate(self._workers):
                own = slice(rank * share, (rank + 1) * share)
                job = Job(
                    strategy, encode_model(model), rank, window, epochs, args.batch,
                    x[own], y[own], *held,
                )  # fmt: skip
                _send_object(worker, job)
            found = [json.loads(_read_line(worker)) for worker in self._workers]
        *times, losses = zip(*found, strict=True)
        return [*(statistics.median(t) for t in times), statistics.mean(losses)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="../shared/data/text8-head.txt.gz")
    parser.add_argument("--times", type=float, default=20.0)
    parser.add_argument("--window", type=int, default=100)
    parser.add_argument("--words", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--held", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    trial = 400.0
    with Machines(2, 2, trial) as machines:
        c, step, *_ = machines.train(1, args, 2, 20)
    rate = trial * (step - c) / (args.times * c)
    print(f"c {1e3 * c:.1f} ms; at {trial:g} Mbit/s an exchange takes {1e3 * (step - c):.0f} ms")
    found: dict[int, list[list[float]]] = {1: [], args.window: []}
    with Machines(2, 2, rate) as machines:
        for _ in range(args.repeats):
            for window, runs in found.items():
                runs.append(machines.train(window, args, args.epochs, args.steps))
    c = statistics.median(run[0] for runs in found.values() for run in runs)
    each, some = ([statistics.median(column) for column in zip(*found[k], strict=True)]
                  for k in found)  # fmt: skip
    m, k = each[1] - c, args.window
    limit = (c + m) / (c + m / k)
    by_bytes = (c + m) / (c + m * some[2] / each[2])
    print(
        f"load {os.getloadavg()[0]:.1f}; {rate:.1f} Mbit/s; c {1e3 * c:.1f} ms, m {1e3 * m:.0f} ms "
        f"({m / c:.1f} c); medians of {args.repeats} runs by turns"
    )
    print("| exchange | step, ms | bytes a step | faster | of the limit | of the bytes | loss |")
    print("|---|---|---|---|---|---|---|")
    print(f"| each step | {1e3 * each[1]:.1f} | {each[2]:,.0f} | 1 | | | {each[3]:.4f} |")
    gain = each[1] / some[1]
    print(
        f"| every {k} | {1e3 * some[1]:.1f} | {some[2]:,.0f} | {gain:.1f} | "
        f"{gain / limit:.2f} of {limit:.1f} | {gain / by_bytes:.2f} of {by_bytes:.1f} "
        f"| {some[3]:.4f} ({100 * (some[3] / each[3] - 1):+.1f} %) |"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["server"]:
        be_server()
    elif sys.argv[1:] == ["worker"]:
        be_worker()
    else:
        main()
