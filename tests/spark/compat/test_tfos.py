"""TensorFlowOnSpark's names on ``sparkdl.run``: clusters that are fed, clusters that are not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import tfos_mnist
from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException

from sparkdl.compat.tfos import TFCluster, TFParallel, compat, dfutil, gpu_info
from sparkdl.compat.tfos.TFCluster import InputMode
from sparkdl.errors import ConfigError, ResourceError, WaitTimeoutError, WorkerError


@pytest.fixture
def sc(spark: Any) -> Any:
    return spark.sparkContext


def told(folder: Path) -> dict[str, Any]:
    """What nodes have written, by their names."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.iterdir())}


def train(args: Namespace, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    sizes, total = [], 0
    while not feed.should_stop():
        batch = feed.next_batch(16)
        sizes.append(len(batch))
        total += sum(number for number, _ in batch)
        assert all(text == str(number) for number, text in batch)
    name = f"{ctx.job_name}-{ctx.task_index}"
    seen = {"sizes": sizes, "total": total, "id": ctx.executor_id, "workers": ctx.num_workers}
    (args.folder / name).write_text(json.dumps(seen))


def test_a_cluster_is_fed_all_rows_in_every_epoch(sc: Any, tmp_path: Path) -> None:
    cluster = TFCluster.run(
        sc, train, Namespace(folder=tmp_path), 2, input_mode=InputMode.SPARK, master_node="chief"
    )
    cluster.train(sc.parallelize([(i, str(i)) for i in range(104)], 4), 3)
    cluster.shutdown()
    found = told(tmp_path)
    assert sorted(found) == ["chief-0", "worker-0"]
    assert [found[name]["id"] for name in sorted(found)] == [0, 1]
    assert all(node["sizes"] == [16, 16, 16, 4] * 3 for node in found.values())
    assert all(node["workers"] == 2 for node in found.values())
    assert sum(node["total"] for node in found.values()) == 3 * sum(range(104))
    with pytest.raises(ConfigError, match="another cluster"):
        cluster.train(sc.parallelize([(1, "1")]))
    assert sc.parallelize([1]).count() == 1, "the context goes on"


def train_with_roles(args: Namespace, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    total = 0
    while not feed.should_stop():
        total += sum(feed.next_batch(16))
    config = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    seen = {"total": total, "spec": sorted(ctx.cluster_spec), "config": config}
    (args.folder / f"{ctx.job_name}-{ctx.task_index}").write_text(json.dumps(seen))
    while ctx.job_name in ("ps", "evaluator"):  # they are ended with the others
        ctx_wait()
    deadline = time.monotonic() + 60
    while not all((args.folder / name).exists() for name in ("ps-0", "evaluator-0")):
        assert time.monotonic() < deadline, "a node of the driver has not begun"
        time.sleep(0.1)


@pytest.mark.parametrize("driver_ps_nodes", [False, True])
def test_servers_and_an_evaluator_beside_nodes_that_are_fed(
    sc: Any, tmp_path: Path, driver_ps_nodes: bool
) -> None:
    cluster = TFCluster.run(
        sc, train_with_roles, Namespace(folder=tmp_path), 4, num_ps=1, eval_node=True,
        master_node="master", input_mode=InputMode.SPARK, driver_ps_nodes=driver_ps_nodes,
    )  # fmt: skip
    cluster.train(sc.parallelize(range(100), 3), 2)
    cluster.shutdown()
    found = told(tmp_path)
    fed = {name: node.pop("total") for name, node in found.items()}
    assert fed == {"master-0": fed["master-0"], "worker-0": fed["worker-0"],
                   "ps-0": 0, "evaluator-0": 0}  # fmt: skip
    assert sum(fed.values()) == 2 * sum(range(100))
    assert min(fed["master-0"], fed["worker-0"]) > 0
    assert all(node["spec"] == ["master", "ps", "worker"] for node in found.values())
    assert found["master-0"]["config"] == "chief", "the name that TensorFlow knows"


def square(args: list[str], ctx: Any) -> None:
    assert sys.argv == args
    feed = ctx.get_data_feed(train_mode=False, input_mapping={"b": "second", "a": "first"})
    while not feed.should_stop():
        batch = feed.next_batch(10)
        pairs = zip(batch["first"], batch["second"], strict=True)
        feed.batch_results([first**2 + second for first, second in pairs])


def test_inference_gives_one_result_for_each_row_in_order(sc: Any) -> None:
    cluster = TFCluster.run(sc, square, ["main.py", "--x"], 2, input_mode=InputMode.SPARK)
    for rows, partitions in ((37, 3), (3, 5)):
        given = sc.parallelize([(i, 0.5) for i in range(rows)], partitions)
        results = cluster.inference(given)
        assert results.collect() == [i**2 + 0.5 for i in range(rows)]
        assert results.getNumPartitions() == partitions
        assert results.take(2) == [0.5, 1.5]
        assert results.zip(given).map(lambda two: two[0] - two[1][0] ** 2).sum() == 0.5 * rows
    cluster.shutdown()


FAILED_TASK = (PythonException, Py4JJavaError)  # the second before Spark 4


def note_and_fail(args: Path, ctx: Any) -> None:
    (args / f"{ctx.job_name}-{ctx.executor_id}-{ctx.num_workers}").touch()
    feed = ctx.get_data_feed(train_mode=False)
    feed.batch_results(feed.next_batch(5))
    if feed.next_batch(1) == [105]:
        raise ValueError("no way on")
    while not feed.should_stop():
        feed.next_batch(10)


def test_nothing_is_inferred_before_it_is_asked_for(sc: Any, tmp_path: Path) -> None:
    cluster = TFCluster.run(
        sc, note_and_fail, tmp_path, 2, input_mode=InputMode.SPARK, master_node="chief"
    )
    results = cluster.inference(sc.parallelize([*range(50), *range(100, 150)], 2))
    assert list(tmp_path.iterdir()) == []
    assert results.take(5) == [0, 1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == ["chief-0-1"]
    with pytest.raises(FAILED_TASK, match="another number of results"):
        cluster.inference(sc.parallelize(range(50), 1)).collect()
    other = cluster.inference(sc.parallelize(range(100, 150), 1))
    with pytest.raises(FAILED_TASK, match="no way on") as caught:
        other.collect()
    assert "in note_and_fail" in str(caught.value)


def fail_while_fed(args: str, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    feed.next_batch(1)
    if args == "at the end":
        while not feed.should_stop():
            feed.next_batch(10)
    raise ValueError(f"bad row {args}")


@pytest.mark.parametrize("when", ["while it is fed", "at the end"])
def test_a_failure_is_raised_by_train(sc: Any, when: str) -> None:
    cluster = TFCluster.run(sc, fail_while_fed, when, 2, input_mode=InputMode.SPARK)
    with pytest.raises(WorkerError, match=f"bad row {when}") as caught:
        cluster.train(sc.parallelize(range(100)), 1)
    assert "in fail_while_fed" in str(caught.value)
    cluster.shutdown()


def stall(args: None, ctx: Any) -> None:
    ctx.get_data_feed().next_batch(1)
    while True:
        ctx_wait()


def test_a_function_that_stalls_is_raised_by_train(sc: Any) -> None:
    cluster = TFCluster.run(sc, stall, None, 2, input_mode=InputMode.SPARK)
    with pytest.raises(WorkerError, match="takes no rows") as caught:
        cluster.train(sc.parallelize(range(100)), 1, feed_timeout=1)
    assert "in ctx_wait" in str(caught.value)


def describe(args: Path, ctx: Any) -> None:
    if ctx.job_name == "ps":
        while True:  # it is ended with the others
            sys.stdout.flush()
            ctx_wait()
    sizes = {name: len(found) for name, found in ctx.cluster_spec.items()}
    (args / f"{ctx.job_name}-{ctx.task_index}").write_text(json.dumps(sizes))
    if ctx.job_name != "evaluator":
        with pytest.raises(ConfigError, match="fed no rows"):
            ctx.get_data_feed()


def ctx_wait() -> None:
    import time

    time.sleep(1)


def test_a_cluster_with_roles_that_reads_by_itself(sc: Any, tmp_path: Path) -> None:
    cluster = TFCluster.run(sc, describe, tmp_path, 4, num_ps=1, eval_node=True)
    cluster.shutdown(timeout=60)
    sizes = {"worker": 2, "ps": 1}
    assert told(tmp_path) == {"evaluator-0": sizes, "worker-0": sizes, "worker-1": sizes}
    with pytest.raises(ConfigError, match=r"InputMode\.SPARK"):
        cluster.train(sc.parallelize([1]))


def test_servers_on_the_driver_take_no_slots(sc: Any, tmp_path: Path) -> None:
    slots = sc.defaultParallelism
    cluster = TFCluster.run(sc, tell, tmp_path, slots + 1, num_ps=1, driver_ps_nodes=True)
    cluster.shutdown(timeout=60)
    found = told(tmp_path)
    assert sorted(found) == ["ps-0", *(f"worker-{i}" for i in range(slots))]
    assert found["ps-0"]["id"] == slots
    assert found["ps-0"]["launcher"] == os.getpid(), "a process of the driver's"
    assert all(found[f"worker-{i}"]["launcher"] != os.getpid() for i in range(slots))


def tell(args: Path, ctx: Any) -> None:
    seen = {"id": ctx.executor_id, "launcher": os.getppid(), "ports": ctx.cluster_spec["ps"]}
    (args / f"{ctx.job_name}-{ctx.task_index}").write_text(json.dumps(seen))
    while ctx.job_name == "ps":
        ctx_wait()


def fail_on_the_driver(args: None, ctx: Any) -> None:
    if ctx.job_name == "ps":
        raise ValueError("the table is broken")
    while True:
        ctx_wait()


def test_a_failure_of_a_server_on_the_driver_is_raised(sc: Any) -> None:
    cluster = TFCluster.run(sc, fail_on_the_driver, None, 2, num_ps=1, driver_ps_nodes=True)
    with pytest.raises(WorkerError, match="the table is broken") as caught:
        cluster.shutdown(timeout=60)
    assert caught.value.rank == 1


def await_file(args: Path, ctx: Any) -> None:
    while not (args / "seen").exists():
        ctx_wait()


def test_tensorboard_runs_on_the_chief_while_the_function_does(sc: Any, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    cluster = TFCluster.run(
        sc, await_file, tmp_path, 2, master_node="chief", tensorboard=True, log_dir=str(logs)
    )
    url = cluster.tensorboard_url()
    assert url is not None
    with urllib.request.urlopen(f"{url}data/environment", timeout=60) as answer:
        assert json.load(answer)["data_location"] == str(logs)
    (tmp_path / "seen").touch()
    cluster.shutdown(timeout=60)
    assert cluster.tensorboard_url() is None
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=60)
    quiet = TFCluster.run(sc, fail_alone, None, 1)
    quiet.shutdown(timeout=60)
    assert quiet.tensorboard_url() is None


def fail_alone(args: None, ctx: Any) -> None:
    if ctx.task_index == 1:
        raise KeyError("no such file")


def test_a_failure_of_one_that_reads_by_itself_is_raised_by_shutdown(sc: Any) -> None:
    cluster = TFCluster.run(sc, fail_alone, None, 2)
    with pytest.raises(WorkerError, match="no such file"):
        cluster.shutdown(timeout=60)
    with pytest.raises(WorkerError, match="no such file"):
        TFParallel.run(sc, fail_alone, None, 2)


def test_parallel_nodes_have_numbers(sc: Any, tmp_path: Path) -> None:
    def note(args: Path, ctx: Any) -> None:
        (args / f"{ctx.executor_id}").write_text(json.dumps(ctx.absolute_path("/data")))

    TFParallel.run(sc, note, tmp_path, 3)
    assert told(tmp_path) == dict.fromkeys("012", "file:///data")


def test_frames_and_tfrecord_files(spark: Any, sc: Any, tmp_path: Path) -> None:
    rows = [(i, float(i), f"text {i}", bytearray([i, 255]), [i, i + 1]) for i in range(20)]
    schema = "number bigint, real float, text string, raw binary, several array<bigint>"
    df = spark.createDataFrame(rows, schema)
    path = str(tmp_path / "records")
    dfutil.saveAsTFRecords(df, path)
    loaded = dfutil.loadTFRecords(sc, path, binary_features=["raw"])
    assert dfutil.isLoadedDF(loaded)
    assert not dfutil.isLoadedDF(df)
    columns = df.columns
    assert sorted(loaded.select(columns).collect()) == sorted(df.collect())
    with pytest.raises(ResourceError, match="files at"):
        dfutil.saveAsTFRecords(df, path)
    assert dict(loaded.dtypes)["real"] == "double"


def test_rows_to_examples_and_back(spark: Any) -> None:
    """Bytes as TensorFlow makes them; what one Example says of its columns."""
    tf = pytest.importorskip("tensorflow")
    rows = [(i, i / 2, f"text {i}", bytearray([i, 255]), [i, i + 1]) for i in range(3)]
    schema = "number bigint, real double, text string, raw binary, several array<bigint>"
    df = spark.createDataFrame(rows, schema)
    made = df.rdd.mapPartitions(dfutil.toTFExample(df.dtypes)).collect()
    example = tf.train.Example.FromString(bytes(made[2][0]))
    feature = example.features.feature
    assert made[2][1] is None
    assert list(feature["several"].int64_list.value) == [2, 3]
    assert list(feature["raw"].bytes_list.value) == [bytes([2, 255])]
    assert dfutil.infer_schema(example, ["raw"]).simpleString() == (
        "struct<number:bigint,raw:binary,real:double,several:array<bigint>,text:string>"
    )
    examples = spark.sparkContext.parallelize(made)
    back = examples.mapPartitions(lambda found: dfutil.fromTFExample(found, ["raw"])).collect()
    assert [(r.number, r.real, r.text, bytearray(r.raw), r.several) for r in back] == rows
    assert dfutil.fromTFExample([]) == []


def test_the_port_of_a_node_is_free_for_its_own_server(sc: Any, tmp_path: Path) -> None:
    def bind(args: Path, ctx: Any) -> None:
        ctx.release_port()
        address = ctx.cluster_spec[ctx.job_name][ctx.task_index]
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            (args / f"{ctx.worker_num}").write_text(json.dumps(ctx.num_workers))

    cluster = TFCluster.run(sc, bind, tmp_path, 2, release_port=False)
    cluster.shutdown(timeout=60)
    assert told(tmp_path) == {"0": 2, "1": 2}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"driver_ps_nodes": True}, "num_ps=0"),
        ({"master_node": "boss"}, "boss"),
        ({"num_ps": 2}, "without workers"),
        ({"num_ps": 2, "input_mode": InputMode.SPARK}, "without workers"),
    ],
)
def test_what_is_refused(sc: Any, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        TFCluster.run(sc, train, None, 2, **arguments)


def test_dstreams_are_refused_with_what_to_use(sc: Any) -> None:
    class DStream:
        def foreachRDD(self, function: Any) -> None:
            raise AssertionError

    cluster = TFCluster.run(sc, train, None, 1, input_mode=InputMode.SPARK)
    with pytest.raises(ConfigError, match=r"train\(streaming_df\)"):
        cluster.train(DStream())
    with pytest.raises(ConfigError, match=r"train\(streaming_df\)"):
        cluster.shutdown(ssc=object())


def test_the_gpus_are_asked_for_by_the_module_compat() -> None:
    assert compat.is_gpu_available is gpu_info.is_gpu_available


def test_two_nodes_on_two_cores_while_a_job_feeds_them() -> None:
    script = Path(__file__).parents[1] / "scripts" / "two_cores.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "trained": {"worker-0": 780, "worker-1": 780},
        "squares": [i * i for i in range(40)],
    }


@pytest.mark.slow
@pytest.mark.parametrize("roles", [{}, {"num_ps": 1}])
def test_a_cluster_is_fed_by_a_stream(
    spark: Any, sc: Any, tmp_path: Path, roles: dict[str, int]
) -> None:
    """Files of 40 and 24 rows; ``shutdown`` waits, and a stop from outside ends it."""
    told_at, rows_at = tmp_path / "told", tmp_path / "rows"
    told_at.mkdir()
    rows_at.mkdir()
    for number, ids in enumerate([range(40), range(40, 64)]):
        (rows_at / f"{number}.csv").write_text("".join(f"{i},{i}\n" for i in ids))
    stream = spark.readStream.schema("number long, text string").option("maxFilesPerTrigger", 1)
    nodes = 2 + sum(roles.values())
    given = Namespace(folder=told_at)
    cluster = TFCluster.run(sc, train, given, nodes, **roles, input_mode=InputMode.SPARK)
    run = cluster.train(stream.csv(str(rows_at)))
    assert run is not None
    with pytest.raises(WaitTimeoutError, match="still runs"):
        cluster.shutdown(timeout=0.1)
    deadline = time.monotonic() + 240
    while run.batches_done < 2:
        assert time.monotonic() < deadline
        assert run.exception is None
        time.sleep(0.1)
    run.stop(240)
    cluster.shutdown()
    found = told(told_at)
    assert {"worker-0", "worker-1"} <= set(found)
    assert sum(node["total"] for node in found.values()) == sum(range(64))
    with pytest.raises(ConfigError, match="another cluster"):
        cluster.train(stream.csv(str(rows_at)))


def test_the_example_recognizes_digits(sc: Any, tmp_path: Path) -> None:
    arguments = tfos_mnist.parse(["--epochs", "6", "--model_dir", str(tmp_path)])
    assert tfos_mnist.train_and_recognize(sc, arguments) > 0.9
