"""Tasks of KerasHub travel as they are, and train, evaluate and predict as plain Keras does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("keras_hub", reason="pip install sparkdl[hub]")

import keras
from hub_tasks import TASKS, rows_of
from local_spark import LocalSession, LocalSparkModel, Workers, without_spark
from pyspark.sql import types as T

from sparkdl.errors import DataError
from sparkdl.learner.archives.archive import decode_model, encode_model
from sparkdl.learner.checks.compile_parts import require_loadable
from sparkdl.learner.prediction.predictor import make_predictor
from sparkdl.learner.signature import model_signature
from sparkdl.spark.forms.matching import make_spec

BATCH, ROWS, EPOCHS = 4, 16, 2


def _trained_once(name: str) -> Any:
    """A task that plain Keras has used: its preprocessor has made its layers, and its optimizer
    has a state."""
    keras.utils.set_random_seed(1)
    model = TASKS[name]()
    if name != "head on a backbone":
        model.fit(*rows_of(name, 4), verbose=0)
    return model


_ALIKE = ("masked", "causal", "lora in bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in _ALIKE else ()) for n in TASKS]
)
def test_a_task_travels(name: str) -> None:
    """A worker's task has the same variables, values, flags, and what ``compile`` was given."""
    model = _trained_once(name)
    require_loadable(model)
    archive = encode_model(model)
    copy = decode_model(archive)
    assert type(copy).__qualname__ == type(model).__qualname__  # a class of the user's is a copy
    for mine, its in zip(model.variables, copy.variables, strict=True):
        assert (mine.shape, mine.dtype, mine.trainable) == (its.shape, its.dtype, its.trainable)
        np.testing.assert_array_equal(keras.ops.equal(mine.value, its.value), True)
    for mine, its in zip(model.optimizer.variables, copy.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.equal(mine.value, its.value), True)
    frozen = [[part._trainable for part in m._flatten_layers()] for m in (model, copy)]
    if name == "images":
        assert frozen[0].count(False) == frozen[1].count(False)
    if name == "translator":  # whose configuration lacks them
        kept = copy.preprocessor.encoder_sequence_length, copy.preprocessor.decoder_sequence_length
        assert kept == (24, 16)
    if "lora" in name:
        assert type(copy.sampler) is type(model.sampler)
    assert model.jit_compile == copy.jit_compile
    assert encode_model(model).key == archive.key


def test_a_task_that_only_predicts_has_its_sampler_and_no_optimizer() -> None:
    model = _trained_once("causal")
    copy = decode_model(encode_model(model), compiled=False)
    assert type(copy.sampler) is type(model.sampler)
    assert copy.optimizer is None


def _cut(data: tuple[Any, ...], order: np.ndarray) -> tuple[Any, ...]:
    """Some rows of arrays, or of dicts of them."""
    return keras.tree.map_structure(lambda array: array[order], data)


def _as_one_process(workers: int) -> np.ndarray:
    """The rows in the order in which one process trains them in batches of all workers."""
    share = ROWS // workers
    steps = range(0, share, BATCH)
    return np.concatenate(
        [np.arange(k * share + s, k * share + s + BATCH) for s in steps for k in range(workers)]
    )


def _made(name: str) -> Any:
    keras.utils.set_random_seed(1)
    return TASKS[name]()


_FAST = [
    ("classifier", "synchronous", 2), ("causal", "allreduce", 2), ("images", "allreduce", 1),
    ("embedder", "allreduce", 2), ("translator", "synchronous", 2),
]  # fmt: skip
_EVERY = [
    (name, mode, workers)
    for name in TASKS if name != "head on a backbone"
    for mode in ("synchronous", "allreduce")
    for workers in (1, 2) if name != "retrieval" or workers == 1
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode", "count"),
    [
        pytest.param(
            *case, marks=() if case in _FAST else pytest.mark.slow, id="-".join(map(str, case))
        )
        for case in _EVERY
    ],
)
def test_a_task_trains_as_in_keras(name: str, mode: str, count: int, workers: Workers) -> None:
    """Weights, history and evaluation are those of ``task.fit`` on the same texts."""
    data, tolerance = rows_of(name, ROWS), 5e-3 if "bfloat16" in name else 1e-5
    referee, order = _made(name), _as_one_process(count)
    wanted = referee.fit(
        *_cut(data, order), batch_size=BATCH * count, epochs=EPOCHS, verbose=0, shuffle=False
    )
    session = LocalSession(workers, [ROWS // count] * count, [])
    spark_model = LocalSparkModel.of(session)(
        _made(name), mode=mode, num_workers=count, batch_size=BATCH, frequency="batch"
    )
    found = spark_model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False)
    for mine, its in zip(spark_model.model.weights, referee.weights, strict=True):
        values = [keras.ops.convert_to_numpy(keras.ops.cast(v, "float32")) for v in (mine, its)]
        np.testing.assert_allclose(*values, rtol=0, atol=tolerance, err_msg=mine.path)
    assert found.history["loss"] == pytest.approx(wanted.history["loss"], abs=10 * tolerance)
    with without_spark(session):
        evaluated = spark_model.evaluate(data)
    told = referee.evaluate(*data, batch_size=BATCH, verbose=0, return_dict=True)
    assert evaluated == pytest.approx(told, abs=10 * tolerance)


def test_a_task_learns_with_workers_that_do_not_wait(workers: Workers) -> None:
    """Plain Keras is at .27 after 4 epochs, and at .003 after 12. The steps of two
    workers add up, each a little late, so the loss may rise again on the way."""
    rows = rows_of("classifier", 64)
    session = LocalSession(workers, [32, 32], [])
    spark_model = LocalSparkModel.of(session)(
        _made("classifier"), mode="asynchronous", num_workers=2, batch_size=BATCH
    )
    with without_spark(session):
        assert spark_model.evaluate(rows)["loss"] == pytest.approx(np.log(2), rel=0.2)
    loss = spark_model.fit(rows, epochs=24, verbose=0).history["loss"]
    # A worker that comes late begins with what the other has trained.
    assert loss[0] < 1.2 * np.log(2)
    assert min(loss) < 0.25


@pytest.mark.parametrize("name", ["classifier", "causal", "images"])
def test_a_task_predicts_as_in_keras(name: str) -> None:
    model, (rows, *_) = _made(name), rows_of(name, 6)
    given = rows if name == "images" else np.array([t.encode() for t in rows], object)
    predictor = make_predictor(model)
    parts = [predictor.predict({"features": given[i : i + 4]}, 4) for i in (0, 4)]
    found = np.concatenate([next(iter(part.values())) for part in parts])
    np.testing.assert_allclose(found, model.predict(rows, verbose=0), atol=1e-5)


_SCHEMA = T.StructType([
    T.StructField("text", T.StringType()), T.StructField("other", T.StringType()),
    T.StructField("number", T.DoubleType()), T.StructField("label", T.LongType()),
])  # fmt: skip


def test_a_language_model_makes_its_labels_of_the_text() -> None:
    signature = model_signature(_made("causal"))
    spec = make_spec(_SCHEMA, signature, "text", "label")
    assert (spec.columns, spec.labels) == (("text",), {})
    with pytest.raises(DataError, match="would not be used"):
        make_spec(_SCHEMA, signature, "text", "number")


def test_texts_of_a_row_go_to_the_preprocessor_in_their_order() -> None:
    model = _made("classifier")
    spec = make_spec(_SCHEMA, model_signature(model), ["text", "other"], "label")
    assert spec.columns == ("text", "other", "label")
    first, second = np.array(["a dog", "good"]), np.array(["fun", "the cat"])
    rows = {"segment 0": first.astype(object), "segment 1": second.astype(object)}
    preprocessing = model_signature(model).preprocessing
    assert preprocessing is not None
    wanted = model.preprocess_samples((first.tolist(), second.tolist()))
    for name, array in preprocessing.rows(rows).items():
        np.testing.assert_array_equal(array, wanted[name])


@pytest.mark.parametrize(
    ("name", "features"), [("classifier", "number"), ("causal", "number"), ("images", "text")]
)
def test_a_column_of_the_wrong_kind_is_refused_before_a_job(name: str, features: str) -> None:
    with pytest.raises(DataError, match="cannot take these columns"):
        make_spec(_SCHEMA, model_signature(_made(name)), features, "label")


def test_labels_that_a_task_does_not_make_are_asked_for() -> None:
    rows, _ = rows_of("classifier", 4)
    spark_model = LocalSparkModel.of(LocalSession(None, [4], []))(_made("classifier"))
    with pytest.raises(DataError, match="label names no column"):
        spark_model.fit((rows,), verbose=0)
