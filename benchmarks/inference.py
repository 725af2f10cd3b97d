"""Rows per second of predict, and what it is compared with; all cases of a part in one run.

    python benchmarks/inference.py [--part rows images pictures memory] [--rows 1000000]
                                   [--images 1000] [--repeats 3] [--peers] [--mlflow]
                                   [--arrow-batch-mib 4]

``rows``: a network 100-64-64-10 over rows of 100 floats. ``images``: a small CNN over images of
224x224x3 floats. ``pictures``: the same CNN over rows as ``spark.read.format("image")`` gives them,
224x224x3 bytes; the batch udf makes arrays of the bytes as Spark's guide to it does. Every case
reads the same cached frame and drops its result (Spark's ``noop`` sink); the cases alternate, in
another order each time, medians are printed. ``--arrow-batch-mib`` is the session's
``spark.sql.execution.arrow.maxBytesPerBatch`` (Spark's own: 64). "limit" is what can be had at all:
an empty ``mapInArrow`` over the same rows, plus the forward passes of bare Keras over arrays in as
many processes. "transform" is that of ``sparkdl.ml.KerasTransformer``, "classifier" that of a
fitted ``KerasClassificationModel`` (three columns: a double and two vectors), "batch udf" is
``pyspark.ml.functions.predict_batch_udf`` around Keras' ``predict`` (as its documentation has it;
with ``--peers``, on a twentieth of the rows) or ``predict_on_batch``. With ``--peers`` also
Elephas' ``SparkModel.predict`` on an RDD of arrays, in a session of its own (the second call of
it), and sparkdl's on the same. With ``--mlflow`` also MLflow's ``pyfunc.spark_udf`` of the same
model, in the executors' own environment; it calls Keras' ``predict``, 32 rows at a time.
``memory``: how much the peak memory of the Python workers grows from a partition of few rows to one
of all rows, and from 64 images to all of them (``--images``: 4,000 are 2.3 GiB of floats).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import numpy as np
from workload import make_frame, median, start_spark, table

PROCESSES = 2
SIDE = 224


def make_network() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(64, activation="relu", name=name) for name in ("first", "second")]
    return keras.Sequential(
        [keras.Input((100,)), *layers, keras.layers.Dense(10, activation="softmax")]
    )


def make_cnn() -> Any:
    import keras

    keras.utils.set_random_seed(0)
    convolutions = [
        keras.layers.Conv2D(width, 3, strides=2, activation="relu") for width in (8, 16, 32)
    ]
    pool = keras.layers.GlobalAveragePooling2D(name="second")
    head = keras.layers.Dense(10, activation="softmax")
    return keras.Sequential([keras.Input((SIDE, SIDE, 3)), *convolutions, pool, head])


def bare(part: str, rows: int, batch_size: int) -> float:
    """Seconds of the forward passes alone, in as many processes as there are workers."""
    processes = [
        subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--bare", part, "--rows",
             str(rows // PROCESSES), "--batch-size", str(batch_size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        for _ in range(PROCESSES)
    ]  # fmt: skip
    for process in processes:
        process.stdout.readline()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    seconds = max(float(process.stdout.readline()) for process in processes)
    for process in processes:
        process.wait()
    return seconds


def run_bare(part: str, rows: int, batch_size: int) -> None:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    model = make_network() if part == "rows" else make_cnn()
    x = np.zeros((rows, *model.input_shape[1:]), "float32")
    call = tf.function(lambda batch: model(batch, training=False))
    call(tf.convert_to_tensor(x[:batch_size]))
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    for begin in range(0, rows - batch_size + 1, batch_size):
        call(tf.convert_to_tensor(x[begin : begin + batch_size])).numpy()
    print(time.perf_counter() - started, flush=True)


def elephas(part: str, rows: int) -> float:
    """Seconds of Elephas' predict, in its own virtual environment."""
    from peers import PEERS, install

    install()
    here = os.path.dirname(os.path.abspath(__file__))
    environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_PYTHON"}
    done = subprocess.run(
        [os.path.join(PEERS, "bin", "python"), os.path.join(here, "support", "peer_elephas.py"),
         "predict", part, str(rows)],
        env=environment, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return float(json.loads(line[7:])["seconds"])
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


def predict_rdd(spark: Any, spark_model: Any, rows: int, batch_size: int) -> float:
    """Seconds of the second predict of an RDD of arrays, made and collected as for Elephas."""
    shape = spark_model.model.input_shape[1:]
    count = rows // PROCESSES

    def make(number: int) -> list[np.ndarray]:
        rng = np.random.default_rng(number)
        return list(rng.normal(size=(count, *shape)).astype("float32"))

    rdd = spark.sparkContext.parallelize(range(PROCESSES), PROCESSES).flatMap(make).cache()
    rdd.count()
    for _ in range(2):
        started = time.perf_counter()
        predicted = spark_model.predict(rdd, batch_size=batch_size).collect()
        seconds = time.perf_counter() - started
    assert len(predicted) == count * PROCESSES
    return seconds


def drop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def time_cases(cases: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each case; in every round all cases run once, in another order."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():  # imports, traces, the JVM's compiler
        case()
    order = random.Random(0)
    for _ in range(repeats):
        for name in order.sample(list(cases), len(cases)):
            started = time.perf_counter()
            cases[name]()
            seconds[name].append(time.perf_counter() - started)
            print(f"{name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    return {name: median(values) for name, values in seconds.items()}


def mlflow_udf(spark: Any, model: Any, folder: str) -> Any:
    """The function of a column that ``mlflow.pyfunc`` makes of a model."""
    import mlflow
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec
    from pyspark.sql import types as T

    given = TensorSpec(np.dtype("float32"), (-1, *model.input_shape[1:]))
    signature = ModelSignature(inputs=Schema([given]))
    mlflow.keras.save_model(model, f"{folder}/mlflow", signature=signature)
    return mlflow.pyfunc.spark_udf(
        spark, f"{folder}/mlflow", T.ArrayType(T.FloatType()), env_manager="local"
    )


def start(arrow_batch_mib: int) -> Any:
    """A session of two executors whose Arrow batches have at most so many MiB; 0: Spark's own."""
    spark = start_spark(PROCESSES)
    if arrow_batch_mib:
        spark.conf.set("spark.sql.execution.arrow.maxBytesPerBatch", arrow_batch_mib << 20)
    return spark


def compare(
    part: str, rows: int, batch_size: int, repeats: int, peer_too: bool, mlflow_too: bool,
    arrow_batch_mib: int,
) -> None:  # fmt: skip
    import pyarrow as pa
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql import types as T

    import sparkdl
    from sparkdl.ml import KerasClassifier, KerasTransformer

    spark = start(arrow_batch_mib)
    model = make_network() if part == "rows" else make_cnn()
    width = int(np.prod(model.input_shape[1:]))
    x = np.random.default_rng(0).normal(size=(rows, width)).astype("float32")
    frame = make_frame(spark, x, np.zeros(rows, "int32"), PROCESSES)
    shape = list(model.input_shape[1:])
    del x
    sparkdl.register_udf(spark, "scored", model, batch_size=batch_size)
    frame.createOrReplaceTempView("given")
    weights, config = model.get_weights(), model.to_json()

    def peer(method: str) -> Any:
        def make() -> Callable[[Any], Any]:
            import keras

            loaded = keras.models.model_from_json(config)
            loaded.set_weights(weights)
            if method == "predict":
                return lambda inputs: loaded.predict(inputs, verbose=0, batch_size=len(inputs))
            return loaded.predict_on_batch

        return predict_batch_udf(
            make, return_type=T.ArrayType(T.FloatType()), batch_size=batch_size,
            input_tensor_shapes=[shape],
        )  # fmt: skip

    transformer = KerasTransformer(
        model=model, inputCol="features", outputCol="p", inferenceBatchSize=batch_size
    )

    compiled = make_network() if part == "rows" else make_cnn()
    compiled.compile("sgd", "sparse_categorical_crossentropy")
    classifier = KerasClassifier(
        model=compiled, numWorkers=1, mode="allreduce", inferenceBatchSize=batch_size
    ).fit(frame.limit(64))  # fmt: skip
    class_alone = classifier.copy().setProbabilityCol("").setRawPredictionCol("")
    vector_alone = classifier.copy().setPredictionCol("").setRawPredictionCol("")
    spark_model = sparkdl.SparkModel(compiled)

    def empty(batches: Any) -> Any:
        for batch in batches:
            zeros = pa.array(np.zeros(batch.num_rows, "float32"))
            yield pa.RecordBatch.from_arrays([*batch.columns, zeros], [*batch.schema.names, "p"])

    passed = T.StructType([*frame.schema.fields, T.StructField("p", T.FloatType())])
    one = {"batch_size": batch_size}
    three = {**one, "class_column": "c", "probability_column": "q"}
    layer = {**one, "class_column": "c", "layers": {"second": "e"}}
    folder = tempfile.mkdtemp(prefix="sparkdl-bench-")
    if part == "rows":
        frame.write.mode("overwrite").parquet(f"{folder}/in")
    schema = frame.schema

    def stream() -> None:
        rows_of = spark.readStream.schema(schema).parquet(f"{folder}/in")
        query = (
            sparkdl.predict(model, rows_of, **one).writeStream.format("noop")
            .option("checkpointLocation", tempfile.mkdtemp(dir=folder)).trigger(availableNow=True)
            .start()
        )  # fmt: skip
        query.awaitTermination()

    cases: dict[str, Callable[[], None]] = {
        "empty mapInArrow": lambda: drop(frame.mapInArrow(empty, passed)),
        "predict, one column": lambda: drop(sparkdl.predict(model, frame, **one)),
        "predict, three columns": lambda: drop(sparkdl.predict(model, frame, **three)),
        "predict, two and a layer's": lambda: drop(sparkdl.predict(model, frame, **layer)),
        "transform": lambda: drop(transformer.transform(frame)),
        "SparkModel.predict": lambda: drop(spark_model.predict(frame, **one)),
        "classifier, prediction alone": lambda: drop(class_alone.transform(frame)),
        "classifier, probability alone": lambda: drop(vector_alone.transform(frame)),
        "classifier, three columns": lambda: drop(classifier.transform(frame)),
        "SQL function": lambda: drop(spark.sql("SELECT *, scored(features) AS p FROM given")),
        "batch udf, predict_on_batch": lambda: drop(
            frame.withColumn("p", peer("predict_on_batch")("features"))
        ),
    }
    if part == "rows":
        cases["predict, files"] = lambda: drop(
            sparkdl.predict(model, spark.read.schema(schema).parquet(f"{folder}/in"), **one)
        )
        cases["predict, stream of the files"] = stream
    if mlflow_too:
        other = mlflow_udf(spark, model, folder)
        cases["mlflow, spark_udf"] = lambda: drop(frame.withColumn("p", other("features")))
    seconds = time_cases(cases, repeats)
    forward = median([bare(part, rows, batch_size) for _ in range(repeats)])
    limit = seconds["empty mapInArrow"] + forward
    spent = {"bare Keras, forward passes": forward, "limit": limit, **seconds}
    lines = [
        [name, f"{s:.2f}", f"{rows / s:,.0f}", f"{s / limit:.2f}"] for name, s in spent.items()
    ]
    print(f"\n{part}: {rows:,} rows, {batch_size} per forward pass, {PROCESSES} workers\n")
    print(table(["case", "seconds", "rows/s", "time / limit"], lines), flush=True)
    several = spent["classifier, three columns"]
    number, vector = spent["classifier, prediction alone"], spent["classifier, probability alone"]
    plain = spent["SparkModel.predict"]
    print(f"\nclassifier, three columns: {several / vector:.2f} x the time of one vector, "
          f"{several / number:.2f} x that of the number alone, {several / plain:.2f} x "
          f"SparkModel.predict's; transform: {spent['transform'] / plain:.2f} x",
          flush=True)  # fmt: skip
    if peer_too:
        few = max(64, rows // 20)  # it is slow
        started = time.perf_counter()
        drop(frame.limit(few).repartition(PROCESSES).withColumn("p", peer("predict")("features")))
        own = few / (time.perf_counter() - started)
        print(f"\nbatch udf around predict, {few:,} rows: {own:,.0f} rows/s", flush=True)
    frame.unpersist()
    if peer_too:
        own = rows / predict_rdd(spark, spark_model, rows, batch_size)
    spark.stop()
    shutil.rmtree(folder, ignore_errors=True)
    if peer_too:
        peer_rate = rows / elephas(part, rows)
        print(f"an RDD of arrays: {own:,.0f} rows/s; Elephas: {peer_rate:,.0f} rows/s", flush=True)


def compare_pictures(images: int, batch_size: int, repeats: int, arrow_batch_mib: int) -> None:
    """Images as Spark reads them: bytes, blue before green before red, which become floats here."""
    import pyarrow as pa
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.ml.image import ImageSchema
    from pyspark.sql import types as T

    import sparkdl

    spark = start(arrow_batch_mib)
    model = make_cnn()
    size = SIDE * SIDE * 3

    def draw(batches: Any) -> Any:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                pixels = np.random.default_rng(number).integers(0, 256, size, np.uint8).tobytes()
                image = {"origin": str(number), "height": SIDE, "width": SIDE, "nChannels": 3,
                         "mode": 16, "data": pixels}  # fmt: skip
                yield pa.RecordBatch.from_pydict({"image": pa.array([image], kind)})

    schema = ImageSchema.imageSchema
    fields = [("origin", pa.string()), ("height", pa.int32()), ("width", pa.int32()),
              ("nChannels", pa.int32()), ("mode", pa.int32()), ("data", pa.binary())]  # fmt: skip
    kind = pa.struct(fields)
    frame = spark.range(0, images, 1, PROCESSES).mapInArrow(draw, schema).cache()
    frame.count()
    sparkdl.register_udf(spark, "scored", model, batch_size=batch_size)
    frame.createOrReplaceTempView("given")
    weights, config = model.get_weights(), model.to_json()

    def peer() -> Callable[[Any], Any]:
        import keras

        loaded = keras.models.model_from_json(config)
        loaded.set_weights(weights)

        def score(images: Any) -> Any:
            pixels = np.stack([np.frombuffer(image, np.uint8) for image in images])
            pixels = pixels.reshape(-1, SIDE, SIDE, 3)[..., ::-1]
            return loaded.predict_on_batch(pixels.astype(np.float32))

        return score

    batch_udf = predict_batch_udf(
        peer, return_type=T.ArrayType(T.FloatType()), batch_size=batch_size
    )
    cases: dict[str, Callable[[], None]] = {
        "empty mapInArrow": lambda: drop(frame.mapInArrow(lambda batches: batches, schema)),
        "predict": lambda: drop(
            sparkdl.predict(model, frame, features="image", batch_size=batch_size)
        ),
        "SQL function": lambda: drop(spark.sql("SELECT *, scored(image) AS p FROM given")),
        "batch udf, predict_on_batch": lambda: drop(frame.withColumn("p", batch_udf("image.data"))),
    }
    seconds = time_cases(cases, repeats)
    few = min(images, 1000)  # arrays that exist before, which are made of bytes in the others
    forward = median([bare("images", few, batch_size) for _ in range(repeats)]) * images / few
    limit = seconds["empty mapInArrow"] + forward
    spent = {"bare Keras, forward passes": forward, "limit": limit, **seconds}
    lines = [[n, f"{s:.2f}", f"{images / s:,.0f}", f"{s / limit:.2f}"] for n, s in spent.items()]
    print(f"\npictures: {images:,} images of bytes, {batch_size} per forward pass, {PROCESSES} "
          "workers\n")  # fmt: skip
    print(table(["case", "seconds", "images/s", "time / limit"], lines), flush=True)
    spark.stop()


def measure_memory(part: str, few: int, many: int) -> None:
    """Peak memory of the Python workers, after a partition of few rows and after one of many."""
    from pyspark.sql import functions as F

    import sparkdl

    spark = start_spark(PROCESSES)
    model = make_network() if part == "rows" else make_cnn()
    width = int(np.prod(model.input_shape[1:]))
    number = F.rand(0).cast("float")
    row = F.array(*[F.rand(i).cast("float") for i in range(width)]) if part == "rows" else (
        F.array_repeat(number, width)
    )  # fmt: skip

    def score(count: int) -> float:
        rows = spark.range(0, count, 1, 1).select(row.alias("features"))
        drop(sparkdl.predict(model, rows))
        return peak_of_workers()

    small, large = score(few), score(many)
    print(f"\nmemory, {part}: {small:,.0f} MiB after {few:,} in a partition, {large:,.0f} MiB "
          f"after {many:,} ({many * width >> 18:,} MiB of floats)", flush=True)  # fmt: skip
    spark.stop()


def peak_of_workers() -> float:
    """MiB: the largest peak among the Python workers below this process, idle ones too."""
    parents, peaks = {}, {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/status") as status, open(f"/proc/{name}/cmdline") as command:
                fields = dict(line.split(":", 1) for line in status)
                parents[int(name)] = int(fields["PPid"])
                if "pyspark.daemon" in command.read() and "VmHWM" in fields:
                    peaks[int(name)] = int(fields["VmHWM"].split()[0]) / 1024
        except OSError:  # it has ended
            continue

    def is_below(process: int) -> bool:
        parent = parents.get(process, 0)
        return parent == os.getpid() or (parent > 1 and is_below(parent))

    return max(peak for process, peak in peaks.items() if is_below(process))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs="+", default=["rows", "images", "pictures", "memory"])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--mlflow", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--arrow-batch-mib", type=int, default=0)
    parser.add_argument("--bare", default="")
    given = parser.parse_args()
    if given.bare:
        run_bare(given.bare, given.rows, given.batch_size)
        return
    mib, peers = given.arrow_batch_mib, (given.peers, given.mlflow)
    if "rows" in given.part:
        compare("rows", given.rows, given.batch_size, given.repeats, *peers, mib)
    if "images" in given.part:
        compare("images", given.images, 32, given.repeats, *peers, mib)
    if "pictures" in given.part:
        compare_pictures(given.images, 32, given.repeats, mib)
    if "memory" in given.part:
        measure_memory("rows", 10_000, given.rows)
        measure_memory("images", 64, given.images)


if __name__ == "__main__":
    main()
