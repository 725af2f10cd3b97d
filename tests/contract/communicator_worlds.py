"""Worlds of ranks for the communicators' contract tests: threads, and real processes.

:data:`WORLDS` are started once for all test modules that use the fixture ``world``. Run as a
program, this file is one rank: it reads pickled commands from its standard input and writes the
answers to its standard output.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

TOKEN = b"0123456789abcdef0123456789abcdef"
ANSWER_S = 240.0
"""Until a rank answers, on a loaded machine too; some import TensorFlow and Horovod first."""


def example(rank: int, size: int, dtype: str) -> np.ndarray:
    """A rank's array: the same in the test and in the rank."""
    values = np.random.default_rng([rank, size]).integers(-20, 20, size)
    return np.abs(values).astype(dtype) if dtype.startswith("u") else values.astype(dtype)


# -- what a rank is told to do: each is called with the communicator and plain arguments --------


def reduce(c: Any, size: int, dtype: str, op: str, weights: list[float], how: str) -> np.ndarray:
    array = example(c.rank, size, dtype)
    weight = weights[c.rank]
    if weight == 0 and op == "weighted":
        array = np.full_like(array, np.nan)
    kept = array.copy()
    if how == "in place":
        out = c.all_reduce(array, op, weight=weight, out=array)
        assert out is array
        return out
    if how == "async":
        return c.all_reduce_async(array, op, weight=weight).wait()
    out = c.all_reduce(array, op, weight=weight)
    assert np.array_equal(array, kept, equal_nan=True)
    return out


def in_order(c: Any, count: int, size: int) -> list[float]:
    handles = [c.all_reduce_async(np.full(size, i + c.rank, np.float32)) for i in range(count)]
    last = c.all_reduce(np.float32(1))
    return [float(h.wait()[-1]) for h in handles] + [float(last)]


def large_mean(c: Any, size: int, value: float) -> float:
    return float(c.all_reduce(np.full(size, value, np.float16), "mean").mean(dtype=np.float64))


def places(c: Any) -> tuple[int, int, int, int, bool]:
    from sparkdl.collective.communicator import Communicator

    return c.rank, c.size, c.local_rank, c.local_size, isinstance(c, Communicator)


def scatter(c: Any, size: int, op: str) -> np.ndarray:
    return c.reduce_scatter(example(c.rank, size, "float32"), op)


def gather(c: Any, sizes: list[int]) -> list[np.ndarray]:
    return c.all_gather(example(c.rank, 3 * sizes[c.rank], "float32").reshape(-1, 3))


def gather_kinds(c: Any) -> list[tuple[str, tuple[int, ...]]]:
    array = np.zeros((2,) * c.rank, ["float64", "int8", "uint16", "float16"][c.rank % 4])
    return [(str(a.dtype), a.shape) for a in c.all_gather(array)]


def deal(c: Any, sizes: list[list[int]], dtype: str) -> list[np.ndarray]:
    parts = [example(7 * c.rank + r, size, dtype) for r, size in enumerate(sizes[c.rank][: c.size])]
    return c.all_to_all(parts)


def deal_wrongly(c: Any) -> str:
    from sparkdl.errors import ConfigError

    try:
        c.all_to_all([np.zeros(2)] * (c.size + 1))
    except ConfigError as error:
        return str(error)
    return ""


def spread(c: Any, size: int, root: int, in_place: bool) -> np.ndarray:
    array = example(c.rank, size, "float32")
    return c.broadcast(array, root, out=array if in_place else None)


def meet(c: Any) -> tuple[float, float]:
    time.sleep(0.05 * c.rank)
    came = time.monotonic()
    c.barrier()
    return came, time.monotonic()


def parity(c: Any, size: int) -> tuple[float, int, float, float]:
    ranks = [r for r in range(c.size) if r % 2 == c.rank % 2]
    with c.group(ranks) as group:
        first = float(group.all_reduce(np.full(size, c.rank + 1, np.float64))[-1])
        again = c.group(ranks)
        second = float(again.all_reduce(np.float64(1)))
    return first, group.rank, second, float(c.all_reduce(np.float64(1)))


def mixed(c: Any, seed: int, count: int) -> list[float]:
    """Random operations, the same on all ranks."""
    random = np.random.default_rng(seed)
    sums = []
    for _ in range(count):
        size = int(random.choice([0, 1, 100, 5000, 70000]))
        kind = random.integers(6)
        array = np.full(size, c.rank + 1.0, random.choice(["float32", "float64"]))
        if kind == 0:
            sums.append(float(c.all_reduce(array, out=array).sum()))
        elif kind == 1:
            sums.append(sum(float(a.sum()) for a in c.all_gather(array)))
        elif kind == 2:
            sums.append(float(c.broadcast(array, int(random.integers(c.size))).sum()))
        elif kind == 3:
            parts = c.all_gather(c.reduce_scatter(array))
            sums.append(sum(float(p.sum()) for p in parts))
        elif kind == 4:
            came = c.all_to_all([array[: size // (1 + (c.rank + r) % 3)] for r in range(c.size)])
            sums.append(float(c.all_reduce(np.float64(sum(float(a.sum()) for a in came)))))
        else:
            c.barrier()
    return sums


def disagree(c: Any) -> None:
    c.all_reduce(np.zeros(3 + (c.rank == 1), np.float32))


def reduce_until(c: Any, seconds: float, size: int) -> int:
    end = time.monotonic() + seconds
    count = 0
    array = np.ones(size, np.float32)
    while time.monotonic() < end:
        c.all_reduce(array, "mean", out=array)
        count += 1
    return count


def absent(c: Any, who: int, seconds: float) -> None:
    c.barrier()  # all were there
    if c.rank == who:
        time.sleep(seconds)
    else:
        c.barrier()


def absent_handle(c: Any, who: int) -> str:
    if c.rank == who:
        time.sleep(0.5)
    handle = c.all_reduce_async(np.float32(1))
    message = ""
    if c.rank != who:
        try:
            handle.wait(0.2)
        except Exception as error:
            message = str(error)
    assert float(handle.wait()) == c.size
    return message


def close_now(c: Any, who: int) -> None:
    if c.rank == who:
        c.close()
    else:
        c.barrier()


def descriptors(c: Any) -> tuple[int, int]:
    """Open files and threads of the process, after closing the communicator."""
    c.close()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def horovod_state(c: Any) -> dict[str, Any]:
    """What the process knows of Horovod while connected, and after."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    total = float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="mine"))
    inside = (hvd.is_initialized(), hvd.rank(), hvd.size(), total)
    c.close()
    left = sorted(k for k in os.environ if k.startswith("HOROVOD"))
    return {"inside": inside, "after": (bool(hvd.is_initialized()), left)}


def choice(c: Any) -> tuple[str, bool]:
    """Which communicator was chosen, and whether Horovod is up."""
    import horovod.tensorflow as hvd

    return c.name, bool(hvd.is_initialized())


def pretend_gpus(c: Any) -> None:
    """Horovod counts as one that reduces on GPUs, so that ``'auto'`` wants it in a fit, too."""
    from sparkdl.collective import horovod

    horovod.reduces_on_gpus = lambda: True


def occupy_horovod(c: Any) -> bool:
    """The last rank has a Horovod world of its own."""
    import horovod.tensorflow as hvd

    if c.rank == c.size - 1:
        hvd.init()
    return bool(hvd.is_initialized())


def exchange_by_rule(c: Any, rule: Any, steps: int, seconds: float) -> np.ndarray:
    """Weights after some steps of a rule; the last rank runs out of batches before the others.

    ``seconds`` is what the second rank's second batch takes longer.
    """
    from sparkdl.collective.rules import GradientExchange, OptimizerExchange
    from sparkdl.weights import Layout

    layout = Layout.of([("w", (40, 30), "float32"), ("b", (7,), "float32")], [("m", (3,), "f4")])
    exchange = rule.open(c, layout)
    x = np.ones(layout.size, np.float32)
    if not isinstance(exchange, GradientExchange | OptimizerExchange):
        exchange.start(x)

    def apply(flat: np.ndarray) -> None:
        np.subtract(x, np.float32(0.1) * flat, out=x)

    for step in range(steps):
        values = np.random.default_rng([step, c.rank]).normal(size=layout.size).astype("f4")
        rows = 0 if step > 2 and c.rank == c.size - 1 else 3 + c.rank

        def compute(out: np.ndarray, step: int = step, values: np.ndarray = values) -> None:
            time.sleep(seconds if (step, c.rank) == (1, 1) else 0.0)
            out[:] = values

        parts = [(compute, rows)] if rows else []
        if isinstance(exchange, GradientExchange):
            assert exchange.take_step(parts, apply)
        elif isinstance(exchange, OptimizerExchange):
            assert exchange.step(lambda p, x=x: [(p, x[p].copy())], exchange.fill(parts), 0.1)
            np.copyto(x, exchange.buffer)
        else:
            x -= np.float32(0.1 * bool(rows)) * values
            exchange.after_window(x, rows, 1.0, 0.1)
    if not isinstance(exchange, GradientExchange | OptimizerExchange):
        exchange.finish(x)
    c.barrier()
    exchange.close()
    return x


# -- worlds -----------------------------------------------------------------------------------


class ThreadWorld:
    """Ranks as threads of the test's own process."""

    def __init__(self, communicators: list[Any]) -> None:
        self.communicators = communicators
        self.size = len(communicators)

    def run(self, name: str, **arguments: Any) -> list[Any]:
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = globals()[name](self.communicators[rank], **arguments)
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(ANSWER_S)
            assert not thread.is_alive()
        return results

    def close(self) -> None:
        for communicator in self.communicators:
            communicator.close()


class ProcessWorld:
    """Ranks as processes; ``hosts`` are their host ids, ``None`` for the real one."""

    def __init__(
        self,
        hosts: list[str | None],
        *,
        name: str = "builtin",
        tokens: list[bytes] | None = None,
        **options: Any,
    ) -> None:
        self.size = len(hosts)
        command = [sys.executable, os.path.abspath(__file__)]
        self.processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""},
            )
            for _ in hosts
        ]
        self.hosts, self.name = hosts, name
        try:
            self.connect_again(tokens, **options)
        except BaseException:
            self.close()
            raise

    def connect_again(self, tokens: list[bytes] | None = None, **options: Any) -> None:
        """Closes the ranks' communicators and connects new ones, in the same processes."""
        for rank, host in enumerate(self.hosts):
            more = {} if host is None else {"host_id": host}
            if self.name != "solo":
                more["advertised_host"] = "127.0.0.1"
            self.tell(rank, ("prepare", self.name, rank, {**more, **options}))
        members = [self.hear(rank) for rank in range(self.size)]
        for rank in range(self.size):
            token = tokens[rank] if tokens else TOKEN
            self.tell(rank, ("connect", members, token))
        self.connected = [self.hear(rank) for rank in range(self.size)]

    def tell(self, rank: int, command: tuple[Any, ...]) -> None:
        stream = self.processes[rank].stdin
        data = pickle.dumps(command)
        stream.write(struct.pack("<Q", len(data)) + data)
        stream.flush()

    def hear(self, rank: int, timeout_s: float = ANSWER_S) -> Any:
        stream = self.processes[rank].stdout
        if not select.select([stream], [], [], timeout_s)[0]:
            raise TimeoutError(f"rank {rank} does not answer")
        head = stream.read(8)
        if len(head) < 8:
            raise EOFError(f"rank {rank} ended")
        return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))

    def run(self, name: str, **arguments: Any) -> list[Any]:
        for rank in range(self.size):
            self.tell(rank, ("run", name, arguments))
        return [self.hear(rank) for rank in range(self.size)]

    def close(self) -> None:
        for process in self.processes:
            if process.stdin and not process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def alone() -> ThreadWorld:
    from sparkdl.collective.current import SoloCommunicator

    return ThreadWorld([SoloCommunicator()])


def threads(size: int) -> ThreadWorld:
    from sparkdl.testing.inproc import connect_threads

    return ThreadWorld(list(connect_threads(size)))


WORLDS: dict[str, Callable[[], ThreadWorld | ProcessWorld]] = {
    "shared-2": lambda: ProcessWorld([None] * 2),
    "ring-2": lambda: ProcessWorld(["a", "b"]),
    "hosts-2x2": lambda: ProcessWorld(["a", "b", "a", "b"]),
    "horovod-2": lambda: ProcessWorld([None] * 2, name="horovod"),
    "solo": alone,
    "builtin-alone": lambda: ProcessWorld([None]),
    "threads-2": lambda: threads(2),
    "threads-3": lambda: threads(3),
    "threads-4": lambda: threads(4),
    "shared-3": lambda: ProcessWorld([None] * 3),
    "shared-4": lambda: ProcessWorld(["a"] * 4),
    "ring-3": lambda: ProcessWorld(["a", "b", "c"]),
    "hosts-3+1": lambda: ProcessWorld(["a", "a", "b", "a"]),
}
"""Those in which the rules are tried as well come first: pytest shares them between the modules."""
RULE_WORLDS = ("shared-2", "ring-2", "hosts-2x2", "horovod-2")
if not importlib.util.find_spec("horovod"):
    del WORLDS["horovod-2"]
    RULE_WORLDS = RULE_WORLDS[:3]


def be_a_rank() -> None:
    """Answers commands until the standard input ends."""
    from sparkdl.collective.communicator import Member, make_communicator

    source = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to the standard error
    connector = communicator = None
    while len(head := source.read(8)) == 8:
        kind, *rest = pickle.loads(source.read(struct.unpack("<Q", head)[0]))
        try:
            if kind == "prepare":
                if communicator is not None:
                    communicator.close()
                    communicator = None
                connector = make_communicator(rest[0], rank=rest[1], **rest[2])
                answer = connector.prepare().to_json()
            elif kind == "connect":
                members = [Member.from_json(text) for text in rest[0]]
                communicator = connector.connect(members, rest[1])
                answer = (communicator.local_rank, communicator.local_size)
            else:
                answer = globals()[rest[0]](communicator, **rest[1])
        except Exception as error:
            error.add_note(traceback.format_exc())
            answer = error
        data = pickle.dumps(answer)
        answers.write(struct.pack("<Q", len(data)) + data)
        answers.flush()
    if communicator is not None:
        communicator.close()


if __name__ == "__main__":
    be_a_rank()
