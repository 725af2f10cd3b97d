"""``form_of``: which class a form of data has, and what each of them answers."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature, TensorSpec
from sparkdl.spark.forms.arrays import ArraysForm
from sparkdl.spark.forms.frames import FrameForm, PathForm, StreamForm, TableForm
from sparkdl.spark.forms.opening import RowChoice, form_of, open_fit_source, settled
from sparkdl.spark.forms.rdds import RddForm
from sparkdl.spark.forms.sources import Columns, Form

pytestmark = pytest.mark.keras

SIGNATURE = Signature(
    {"x": TensorSpec("x", (3,), "float32")}, {"y": TensorSpec("y", (1,), "float32")},
    {}, named_inputs=True,
)  # fmt: skip
X, Y = np.zeros((10, 3), np.float32), np.arange(10.0)
TABLE = pa.table({"a": [1.0], "b": [2.0]})


class Frame:
    """A DataFrame of Spark, as far as its form asks it."""

    __module__ = "pyspark.sql.fake"

    def __init__(self, *names: str, streaming: bool = False) -> None:
        self.isStreaming, self.schema = streaming, SimpleNamespace(names=list(names))
        java_context = SimpleNamespace(sc=lambda: SimpleNamespace(isStopped=lambda: False))
        self.sparkSession = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=java_context))

    def mapInArrow(self) -> None: ...


class Rdd:
    """An RDD, as far as its form asks it."""

    __module__ = "pyspark.fake"

    def mapPartitions(self) -> None: ...


@pytest.mark.parametrize(
    ("data", "kind", "columns", "endless"),
    [
        (Frame(), FrameForm, True, False),
        (Frame(streaming=True), StreamForm, True, True),
        (Rdd(), RddForm, False, False),
        ("/data/rows.parquet", PathForm, True, False),
        (pathlib.Path("/data/rows.parquet"), PathForm, True, False),
        (TABLE, TableForm, True, False),
        (TABLE.to_batches()[0], TableForm, True, False),
        (pd.DataFrame({"a": [1]}), TableForm, True, False),
        (pl.DataFrame({"a": [1]}), TableForm, True, False),
        (pl.LazyFrame({"a": [1]}), TableForm, True, False),
        ((X, Y), ArraysForm, False, False),
        ([X.tolist(), Y.tolist()], ArraysForm, False, False),
        (X, ArraysForm, False, False),
        (None, ArraysForm, False, False),
        (3, ArraysForm, False, False),
    ],
)
def test_each_form_is_a_class(data: Any, kind: type[Form], columns: bool, endless: bool) -> None:
    form = form_of(data)
    assert type(form) is kind
    assert (form.has_columns, form.endless) == (columns, endless)
    assert form_of(form) is form


def test_arrays_are_cut_as_keras_cuts_them() -> None:
    parts = form_of((X, Y)).cut(0.25, SIGNATURE)
    assert parts is not None
    training, held_out = (part.arrays(SIGNATURE) for part in parts)
    assert training is not None
    assert held_out is not None
    assert (len(training[0]), len(held_out[0])) == (7, 3)  # floor(10 * 0.75) rows are trained on
    assert held_out[1].tolist() == [7, 8, 9]
    assert form_of(Frame("x", "y")).cut(0.25, SIGNATURE) is None  # Spark chooses at random


def test_rows_that_are_no_arrays_of_numbers() -> None:
    assert form_of((["a", "b"], [0, 1])).arrays(SIGNATURE) is None  # texts
    assert form_of(([[1], [1, 2]], [0, 1])).arrays(SIGNATURE) is None  # of different length
    assert form_of(3).arrays(SIGNATURE) is None
    with pytest.raises(ConfigError, match="this kind of data is not known"):
        form_of(3).open(SIGNATURE, Columns())


def test_forms_in_words() -> None:
    found = [form_of(data).words for data in (Frame(), Rdd(), "x", TABLE, (X, Y))]
    assert found == ["a DataFrame", "an RDD", "a DataFrame", "a DataFrame", "arrays"]


def test_labels_of_arrays_get_the_shape_of_those_to_train_on() -> None:
    held_out = form_of((X, Y)).like(form_of((X, Y[:, None])), SIGNATURE, Columns())
    arrays = held_out.arrays(SIGNATURE)
    assert arrays is not None
    assert arrays[1].shape == (10, 1)


def test_a_text_means_a_column_where_there_is_one() -> None:
    assert form_of(Frame("held out")).has_column("held out")
    assert form_of(Frame("held out")).has_column("no such column")  # which the error then says
    assert not form_of(Frame("held out")).has_column("/data/rows.parquet")
    assert not form_of((X, Y)).has_column("held out")


def test_a_stream_is_refused_where_rows_must_end() -> None:
    with pytest.raises(DataError, match="fit_stream"):
        form_of(Frame(streaming=True)).open(SIGNATURE, Columns())


def test_frames_in_a_tuple() -> None:
    for data, validation in (((Frame(), Frame()), None), (Rdd(), (Frame(), Frame()))):
        with pytest.raises(ConfigError, match="without a tuple"):
            open_fit_source(data, RowChoice(SIGNATURE, Columns(), validation, 0.0, 0))


def test_data_for_several_calls() -> None:
    frame = Frame()
    assert settled(None) is None
    assert settled(frame) is frame
    assert settled(pathlib.Path("/data")) == "/data"


def test_several_paths_are_no_arrays_of_texts() -> None:
    for paths in (["a.parquet", "b.parquet"], ("a.arrow", pathlib.Path("b.arrow"))):
        with pytest.raises(ConfigError, match="several paths"):
            form_of(paths)
    assert isinstance(form_of(["a good film", "a bad one"]), ArraysForm)
