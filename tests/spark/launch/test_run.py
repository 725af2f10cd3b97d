"""``sparkdl.run`` on a real cluster: results, lines, failures, and nothing left behind."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import sparkdl
from sparkdl import Network
from sparkdl.errors import (
    ConfigError,
    ResourceError,
    UnknownArgumentError,
    UnknownNameError,
    WorkerError,
)
from sparkdl.launch.task import CHUNK_BYTES as ROW_BYTES
from sparkdl.spark.runs import capacity, function_stage


def who(scale: float = 1.0) -> tuple[int, int, float, str]:
    communicator = sparkdl.communicator()
    total = communicator.all_reduce(np.full(3, scale), "sum")
    return communicator.rank, communicator.size, float(total[0]), type(communicator).__name__


def test_every_rank_returns_its_result_in_rank_order(spark: Any):
    for _ in range(2):  # again in the same reused workers
        told = sparkdl.run(who, (2.0,), num_workers=2, communicator="builtin")
        assert told == [(r, 2, 4.0, "BuiltinCommunicator") for r in range(2)]
    told = sparkdl.run(who, kwargs={"scale": 3.0}, num_workers=3, communicator="builtin")
    assert [t[:3] for t in told] == [(r, 3, 9.0) for r in range(3)]


def test_horovod_is_initialised_and_again_in_the_same_workers(spark: Any):
    pytest.importorskip("horovod")

    def work() -> Any:
        import horovod.tensorflow as hvd
        import tensorflow as tf

        hvd.init()  # as in any script for Horovod: it finds itself initialised
        total = hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum)
        return hvd.rank(), hvd.size(), float(total[0]), os.getpid()

    first = sparkdl.run(work, num_workers=2, communicator="horovod")
    again = sparkdl.run(work, num_workers=2, communicator="horovod")
    assert [t[:3] for t in first] == [t[:3] for t in again] == [(0, 2, 3.0), (1, 2, 3.0)]

    def after() -> Any:
        import horovod.tensorflow as hvd

        left = sorted(k for k in os.environ if k.startswith("HOROVOD"))
        return left, hvd.is_initialized()

    assert sparkdl.run(after, num_workers=2, communicator="builtin") == [([], False)] * 2


def test_large_results_come_in_rows_of_bounded_size(spark: Any):
    def work() -> Any:
        rank = sparkdl.communicator().rank
        return np.full(3_000_000 + rank, rank, np.float32)

    told = sparkdl.run(work, num_workers=2, communicator="builtin")
    assert ROW_BYTES < 4 << 20
    for rank, array in enumerate(told):
        assert array.shape == (3_000_000 + rank,)
        assert (array == rank).all()


def test_what_ranks_print_reaches_the_driver_while_they_run(
    spark: Any, capfd: pytest.CaptureFixture[str]
):
    seen: list[float] = []

    def work() -> None:
        rank = sparkdl.communicator().rank
        print(f"early {rank}")
        os.system("echo by a shell >&2")
        sparkdl.log_to_driver(f"logged {rank}\nin two lines")
        time.sleep(4)
        print("x" * 9000)

    original = function_stage.show

    def show(rank: int, line: str) -> None:
        if line.startswith("early"):
            seen.append(time.monotonic())
        original(rank, line)

    function_stage.show = show
    try:
        sparkdl.run(work, num_workers=2, communicator="builtin")
    finally:
        function_stage.show = original
    assert time.monotonic() - max(seen) > 3, "lines must come while the ranks run"
    lines = capfd.readouterr().out.splitlines()
    for rank in range(2):
        for text in (f"early {rank}", "by a shell", f"logged {rank}", "in two lines"):
            assert f"[rank {rank}] {text}" in lines, lines
    longest = max(len(line) for line in lines if line.startswith("[rank"))
    assert longest == 4000 + len("[rank 0] ")


def test_log_callback_only(spark: Any, capfd: pytest.CaptureFixture[str]):
    def work() -> None:
        print("printed")
        sparkdl.log_to_driver("logged")

    sparkdl.run(
        work, num_workers=2, communicator="builtin", driver_log_verbosity="log_callback_only"
    )
    out = capfd.readouterr().out
    assert "[rank 1] logged" in out
    assert "printed" not in out


def test_the_root_cause_is_raised_while_others_wait_for_the_rank(spark: Any):
    def work() -> None:
        communicator = sparkdl.communicator()
        if communicator.rank == 1:
            raise ValueError("bad row 17")
        communicator.barrier()

    began = time.monotonic()
    with pytest.raises(WorkerError, match="bad row 17") as caught:
        sparkdl.run(work, num_workers=2, communicator="builtin")
    assert time.monotonic() - began < 10
    assert caught.value.rank == 1
    assert 'raise ValueError("bad row 17")' in str(caught.value)


def test_a_rank_that_computes_is_ended_too(spark: Any, tmp_path: Any):
    alive = str(tmp_path / "alive")

    def work() -> None:
        if sparkdl.communicator().rank == 0:
            while not os.path.exists(alive):
                time.sleep(0.05)
            raise SystemExit("enough")
        while True:
            with open(alive, "w") as file:
                file.write(str(time.time()))
            time.sleep(0.1)

    with pytest.raises(WorkerError, match="enough") as caught:
        sparkdl.run(work, num_workers=2, communicator="builtin")
    assert caught.value.rank == 0
    deadline, stopped = time.monotonic() + 30, 0.0
    while stopped != (stopped := os.stat(alive).st_mtime):
        assert time.monotonic() < deadline, "rank 1 still runs"
        time.sleep(1.5)


def test_a_killed_rank_is_named(spark: Any):
    def work() -> None:
        communicator = sparkdl.communicator()
        if communicator.rank == 1:
            os.kill(os.getpid(), 9)
        communicator.barrier()

    with pytest.raises(WorkerError, match="Spark gave the barrier stage up") as caught:
        sparkdl.run(work, num_workers=2, communicator="builtin")
    assert caught.value.rank == 1


class Unreadable:
    """Cannot be unpickled where ``rank`` runs."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        if sparkdl_task_rank() == state["rank"]:
            raise ImportError("no such module here")


def sparkdl_task_rank() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return -1 if context is None else int(context.partitionId())


@pytest.mark.parametrize("moment", ["unpickling", "at once", "while another is done"])
def test_a_failure_leaves_the_executors_alive(spark: Any, moment: str):
    """Spark ends the executor of a task that waits in ``allGather`` when its stage is ended."""

    def work(broken: Any) -> int:
        if sparkdl.communicator().rank == 1:
            time.sleep(2.0 if moment == "while another is done" else 0.0)
            raise RuntimeError("enough")
        return 0

    def lost() -> int:
        executors = spark.sparkContext._jsc.sc().statusStore().executorList(False)
        return sum(not executors.apply(i).isActive() for i in range(executors.size()))

    before = lost()
    broken = Unreadable(1) if moment == "unpickling" else None
    expected = "no such module here" if moment == "unpickling" else "enough"
    with pytest.raises(WorkerError, match=expected) as caught:
        sparkdl.run(work, args=(broken,), num_workers=2, communicator="builtin")
    assert caught.value.rank == 1
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        assert lost() == before
        time.sleep(0.2)


def test_a_result_that_cannot_be_pickled(spark: Any):
    def work() -> Any:
        rank = sparkdl.communicator().rank
        return threading.Lock() if rank == 1 else rank

    with pytest.raises(WorkerError, match="the result of rank 1 cannot be sent") as caught:
        sparkdl.run(work, num_workers=2, communicator="builtin")
    assert caught.value.rank == 1


def test_the_environment_of_a_reused_worker_is_as_before(spark: Any):
    def change() -> int:
        os.environ["MINE"] = "1"
        os.environ.pop("PYTHONHASHSEED", None)
        return os.getpid()

    def look() -> Any:
        return os.getpid(), os.environ.get("MINE"), sorted(os.environ)

    before = sparkdl.run(look, num_workers=2, communicator="builtin")
    sparkdl.run(change, num_workers=2, communicator="builtin")
    after = sparkdl.run(look, num_workers=2, communicator="builtin")
    known = {pid: names for pid, _, names in before}
    for pid, mine, names in after:
        assert mine is None
        assert names == known.get(pid, names)


def test_another_backend_runs_in_a_child_and_its_lines_come_too(
    spark: Any, capfd: pytest.CaptureFixture[str]
):
    pytest.importorskip("jax")

    def work() -> Any:
        import keras

        print("backend", keras.backend.backend())
        sparkdl.log_to_driver("from the child")
        rank = sparkdl.communicator().rank
        if rank > 1:
            raise ValueError("too many")
        return keras.backend.backend(), rank

    here = sparkdl.run(work, num_workers=2, communicator="builtin", backend="tensorflow")
    other = sparkdl.run(work, num_workers=2, communicator="builtin", backend="jax")
    assert here == [("tensorflow", 0), ("tensorflow", 1)]
    assert other == [("jax", 0), ("jax", 1)]
    out = capfd.readouterr().out
    assert "[rank 1] backend jax" in out
    assert "[rank 1] from the child" in out
    with pytest.raises(WorkerError, match="too many"):
        sparkdl.run(work, num_workers=3, communicator="builtin", backend="jax")


def test_too_few_slots_and_dynamic_allocation(spark: Any, monkeypatch: pytest.MonkeyPatch):
    tracker = spark.sparkContext.statusTracker()
    before = max([*tracker.getJobIdsForGroup(None), -1])
    with pytest.raises(ResourceError, match="5 workers must run at the same time"):
        capacity.check_barrier(spark, 5, timeout_s=0.5)
    spark.conf.set("spark.sql.shuffle.partitions", "2")

    class Dynamic:
        """The session's configuration, with dynamic allocation on."""

        def get(self, name: str, default: Any = None) -> Any:
            told = {"spark.dynamicAllocation.enabled": "true"}
            return told.get(name) or spark.conf.get(name, default)

    class Session:
        conf = Dynamic()
        sparkContext = spark.sparkContext

    with pytest.raises(ResourceError, match="SPARK-24942"):
        capacity.check_barrier(Session(), 2)
    assert max([*tracker.getJobIdsForGroup(None), -1]) == before, "no job may start"


@pytest.mark.parametrize(
    ("arguments", "error", "word"),
    [
        ({"fn": 3}, ConfigError, "a function"),
        ({"fn": who, "args": 3}, ConfigError, "args: a tuple"),
        ({"fn": who, "kwargs": [1]}, ConfigError, "kwargs"),
        ({"fn": who, "num_workers": 0}, ConfigError, "at least 1"),
        ({"fn": who, "num_workers": 2.0}, ConfigError, "at least 1"),
        ({"fn": who, "communicator": "mpi"}, UnknownNameError, "builtin"),
        ({"fn": who, "driver_log_verbosity": "loud"}, UnknownNameError, "log_callback_only"),
        ({"fn": who, "use_gpu": 2}, ConfigError, "use_gpu"),
        ({"fn": who, "backend": "mxnet"}, UnknownNameError, "tensorflow"),
        ({"fn": who, "timeout_s": 0}, ConfigError, "collective_timeout_s"),
        ({"fn": who, "args": (threading.Lock(),)}, ConfigError, "cannot be sent"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], word: str):
    with pytest.raises(error, match=word):
        sparkdl.run(**arguments)


def descended(steps: int) -> np.ndarray:
    """The weights of that test after gradient descent on all rows in one process."""
    import tensorflow as tf

    rows = tf.random.stateless_normal([8, 2], seed=[1, 2]).numpy()
    weight = np.zeros(2, np.float32)
    for _ in range(steps):
        missed = rows @ weight - rows @ np.array([3.0, -1.0], np.float32)
        weight -= 0.1 * 2 * rows.T @ missed / len(rows)
    return weight


def test_tensorflow_finds_all_ranks_by_tf_config(spark: Any):
    def work() -> Any:
        import tensorflow as tf

        config = json.loads(os.environ["TF_CONFIG"])
        strategy = tf.distribute.MultiWorkerMirroredStrategy()

        @tf.function
        def total():  # type: ignore[no-untyped-def]  # AutoGraph runs it without this module
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", tf.constant(1.0 + sparkdl.communicator().rank))

        with strategy.scope():
            mean = tf.VariableAggregation.MEAN
            weight = tf.Variable([0.0, 0.0], aggregation=mean)
        rows = tf.random.stateless_normal([8, 2], seed=[1, 2])
        rows = rows[4 * sparkdl.communicator().rank :][:4]  # each has its own half

        @tf.function
        def learn():  # type: ignore[no-untyped-def]
            context = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                missed = tf.linalg.matvec(rows, weight) - tf.linalg.matvec(rows, [3.0, -1.0])
                loss = tf.reduce_mean(missed**2)
            weight.assign_sub(0.1 * context.all_reduce("mean", tape.gradient(loss, weight)))

        for _ in range(30):
            strategy.run(learn)
        learned = [float(number) for number in weight.numpy()]
        replicas = strategy.num_replicas_in_sync
        return config, replicas, float(strategy.run(total)), os.getpid(), learned

    first = 20000 + os.getpid() % 1000 * 10
    os.environ["TF_CONFIG"] = "the driver's own"
    try:
        told = sparkdl.run(
            work, num_workers=2, communicator="builtin", distributed="tensorflow",
            network=Network(worker_port=(first, first + 9)),
        )  # fmt: skip
        assert os.environ["TF_CONFIG"] == "the driver's own"
    finally:
        del os.environ["TF_CONFIG"]
    configs, replicas, totals, processes, learned = zip(*told, strict=True)
    assert learned[0] == learned[1]
    np.testing.assert_allclose(learned[0], descended(30), rtol=1e-4)
    assert replicas == (2, 2)
    assert totals == (3.0, 3.0)
    assert [c["task"] for c in configs] == [
        {"type": "chief", "index": 0}, {"type": "worker", "index": 0},
    ]  # fmt: skip
    assert configs[0]["cluster"] == configs[1]["cluster"]
    addresses = {*configs[0]["cluster"]["chief"], *configs[0]["cluster"]["worker"]}
    assert len(addresses) == 2
    assert all(first <= int(a.rpartition(":")[2]) <= first + 9 for a in addresses), addresses

    def after() -> Any:
        return os.environ.get("TF_CONFIG"), os.getpid()

    left = sparkdl.run(after, num_workers=2, communicator="builtin")
    assert [told for told, _ in left] == [None, None]
    assert not set(processes) & {pid for _, pid in left}
    with pytest.raises(UnknownArgumentError, match="hint: distributed='tensorflow'"):
        sparkdl.run(after, tf_config=True)  # type: ignore[call-arg]
