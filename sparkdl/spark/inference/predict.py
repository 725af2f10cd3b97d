"""predict for a DataFrame: one narrow pass, a batch at a time, when the rows are asked for."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.launch.task import RankContext
from sparkdl.learner.prediction.model_source import LAYER
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature
from sparkdl.process import payload
from sparkdl.settings.values import require_name, shown
from sparkdl.spark.executor.stage import Shipped, content_of, run_task
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.rdds import rdd_features, stack_inputs
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.inference.forward import (
    HANDLE_INVALID,
    ForwardPass,
    HandleInvalid,
    Predicted,
    PredictorTask,
    warn_of_shared_gpus,
)
from sparkdl.spark.inference.function import append_results
from sparkdl.spark.inference.output_columns import Form, OutputColumn, require_new, with_nulls
from sparkdl.spark.runs.launcher import ship
from sparkdl.spark.session.running import require_running, with_this_interpreter

Names = str | Mapping[str, str] | None
"""A column for the model's only output, or output name -> column; None for no column."""


DTYPES = ("float32", "float64")
"""The dtypes that a user can ask for in place of the outputs' own."""


@dataclass(frozen=True)
class PredictionChoice:
    """Which columns a user wants; the arguments of :func:`sparkdl.predict` of the same names."""

    output_column: str = "prediction"
    outputs: Iterable[str] | Mapping[str, str] | None = None
    probability_column: Names = None
    class_column: Names = None
    layers: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    handle_invalid: str = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.output_column, str) or not self.output_column:
            raise ConfigError(
                "output_column must name the column of predictions", expected="a name",
                received=shown(self.output_column),
                hint="outputs=[] leaves the column out, beside layers or a class_column",
            )  # fmt: skip
        if isinstance(self.outputs, str):
            object.__setattr__(self, "outputs", (self.outputs,))
        elif self.outputs is not None and not isinstance(self.outputs, Iterable):
            raise ConfigError(
                "outputs must say which of the model's outputs become columns",
                expected="names of outputs, output name -> column, or None for all",
                received=shown(self.outputs),
            )
        elif self.outputs is not None and not isinstance(self.outputs, Mapping):
            object.__setattr__(self, "outputs", tuple(self.outputs))
        if not isinstance(self.layers, Mapping):
            raise ConfigError(
                "layers must say what to call the columns", expected="layer name -> column",
                received=shown(self.layers), hint="layers={'avg_pool': 'embedding'}",
            )  # fmt: skip
        if self.dtype is not None:
            require_name("dtype of predictions", self.dtype, DTYPES)
        require_name("handle_invalid", self.handle_invalid, HANDLE_INVALID)

    @property
    def invalid(self) -> HandleInvalid:
        """``handle_invalid``, which is one of the known names."""
        return cast(HandleInvalid, self.handle_invalid)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked but every output as it is, which RDDs and arrays can have."""
        return self == PredictionChoice(self.output_column)

    def outputs_of(self, model: Signature) -> list[str]:
        """The outputs that must be computed, in the model's order; layers are not among them.

        Raises:
            UnknownNameError: No such output.
            ConfigError: Nothing is asked for, or of which output is not said.
        """
        wanted = [output for output, _, _ in self._asked(model)]
        if not wanted and not self.layers:
            raise ConfigError(
                "predict is asked for no column",
                expected="outputs, layers, probability_column or class_column",
                received="outputs=[] and nothing else",
            )
        return [name for name in model.outputs if name in wanted]

    def columns(self, archive: PredictorArchive, model: Signature) -> list[OutputColumn]:
        """The columns, in the order: outputs, probabilities, classes, layers.

        Args:
            archive: The predictor, made with :meth:`outputs_of` and ``layers``.

        Raises:
            ConfigError: Classes or probabilities of an output that is not a classifier's.
        """
        columns = []
        for output, form, name in self._asked(model):
            if form != "values":
                self._require_scores(archive, output, form)
            dtype = "int32" if form == "class" else self.dtype
            columns.append(OutputColumn(name, output, form, dtype))
        layers = self.layers.items()
        return columns + [OutputColumn(str(n), LAYER + k, dtype=self.dtype) for k, n in layers]

    def _asked(self, model: Signature) -> list[tuple[str, Form, str]]:
        """Output, form and column name of all columns that are made of outputs."""
        single = len(model.outputs) == 1
        if isinstance(self.outputs, Mapping):
            values = {str(o): str(c) for o, c in self.outputs.items()}
        else:
            chosen = model.outputs if self.outputs is None else self.outputs
            prefix = self.output_column
            values = {str(o): prefix if single else f"{prefix}_{o}" for o in chosen}
        for output in values:
            _require_output(output, model)
        asked: list[tuple[str, Form, str]] = [(o, "values", c) for o, c in values.items()]
        only = next(iter(values)) if len(values) == 1 else None
        only = next(iter(model.outputs)) if single else only
        forms: list[tuple[Form, str, Names]] = [
            ("probability", "probability_column", self.probability_column),
            ("class", "class_column", self.class_column),
        ]
        for form, argument, names in forms:
            by_output = _by_output(names, argument, only, model)
            asked += [(output, form, column) for output, column in by_output.items()]
        return asked

    def _require_scores(self, archive: PredictorArchive, output: str, form: Form) -> None:
        scores = archive.scores.get(output)
        argument = f"{form}_column"
        if scores is None:
            raise ConfigError(
                f"{argument}: output {output!r} is not known to be a classifier's",
                expected="a cross-entropy as the loss that the model was compiled with, or a last "
                "layer with activation softmax or sigmoid",
                received="neither",
                hint="model.compile(loss='sparse_categorical_crossentropy'), or "
                "SparseCategoricalCrossentropy(from_logits=True) for a model that gives logits",
            )
        if form == "class" and scores.num_classes is None:
            raise ConfigError(
                f"{argument}: a row may be of several classes of output {output!r}, or of none",
                expected="softmax over the classes, or one unit with a sigmoid",
                received=f"{scores.units} units with a probability each",
                hint="probability_column has the probability of each; compare it with a threshold",
            )


def _by_output(names: Names, argument: str, only: str | None, model: Signature) -> dict[str, str]:
    if names is None:
        return {}
    if isinstance(names, Mapping):
        for output in names:
            _require_output(str(output), model)
        return {str(output): str(column) for output, column in names.items()}
    if not isinstance(names, str):
        raise ConfigError(
            f"{argument} must name a column", expected="a name, or output name -> column",
            received=shown(names),
        )  # fmt: skip
    if only is None:
        raise ConfigError(
            f"{argument}: the model has {len(model.outputs)} outputs, and one column is named",
            expected=f"output name -> column, for outputs among {sorted(model.outputs)}",
            received=repr(names), hint=f"{argument}={{{next(iter(model.outputs))!r}: {names!r}}}",
        )  # fmt: skip
    return {only: names}


def _require_output(output: str, model: Signature) -> None:
    if output not in model.outputs:
        raise UnknownNameError("output of the model", output, model.outputs)


@dataclass(frozen=True)
class PredictRowsTask(PredictorTask):
    """Predicts stacked inputs, one pickled dict of arrays per Arrow batch."""

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The outputs of each batch, in the same form."""
        with self.predictor(rank.resources) as predictor:
            for batch in batches:
                yield _pack(predictor.predict(_unpack(batch), self.batch_size))


def predict_rdd(rdd: Any, archive: PredictorArchive, *, batch_size: int, use_gpu: UseGpu) -> Any:
    """An RDD of predictions (NumPy arrays), one per element and in the same order.

    Elements are inputs ``x``; pairs ``(x, y)`` and ``LabeledPoint`` are taken without their label.
    """
    warn_of_shared_gpus(SparkSession.getActiveSession(), use_gpu)
    task = PredictRowsTask(archive, DataSpec(rdd_features(archive.signature)), batch_size, use_gpu)
    predicts = partial(predict_rows, shipped=ship(task, rdd.context))
    return with_this_interpreter(rdd.mapPartitions(predicts))


def predict_rows(rows: Iterable[Any], shipped: Shipped) -> Iterator[Any]:
    """On the executor: predictions for an iterator of examples, a batch at a time."""
    task: PredictRowsTask = payload.load(content_of(shipped))
    iterator = iter(rows)

    def batches() -> Iterator[pa.RecordBatch]:
        number = 0
        while chunk := list(islice(iterator, task.batch_size)):
            yield _pack(stack_inputs(chunk, task.archive.signature, number))
            number += len(chunk)

    for batch in run_task(batches(), shipped):
        outputs = _unpack(batch)
        if len(outputs) == 1:
            yield from next(iter(outputs.values()))
        else:
            for values in zip(*outputs.values(), strict=True):
                yield dict(zip(outputs, values, strict=True))


def _pack(arrays: dict[str, npt.NDArray[Any]]) -> pa.RecordBatch:
    content = pa.array([pickle.dumps(arrays, protocol=5)], pa.large_binary())
    return pa.RecordBatch.from_arrays([content], names=["arrays"])


def _unpack(batch: pa.RecordBatch) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = pickle.loads(batch.column(0)[0].as_py())
    return arrays


@dataclass(frozen=True)
class PredictTask(PredictorTask):
    """Predictions for Arrow batches of the model's columns; see :class:`PredictorTask`."""

    outputs: tuple[OutputColumn, ...]
    handle_invalid: HandleInvalid = "error"

    @property
    def result(self) -> T.StructType:
        """The columns of predictions, in order, under wire names."""
        kinds = [column.field(self.archive).dataType for column in self.outputs]
        return T.StructType(list(map(T.StructField, wire_names(len(kinds)), kinds)))

    def forward(self, rank: RankContext) -> ForwardPass:
        """The model over the rows of one task of Spark."""
        return ForwardPass(
            self.spec, self.batch_size, self.outputs, self.archive, self.handle_invalid,
            lambda: self.predictor(rank.resources),
        )  # fmt: skip

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One column of structs, one for each row; null for a row that is to be left out."""
        names = list(self.spec.columns)
        sent = (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)
        with self.forward(rank) as forward:
            for predicted in forward.over(sent):
                yield pa.RecordBatch.from_arrays([_structs(predicted)], names=["predictions"])


@dataclass(frozen=True)
class AppendTask(PredictTask):
    """Appends predictions to Arrow batches, for a PySpark without functions on Arrow arrays.

    Args:
        kept: The number of columns, from the first on, that come back as they are.
        positions: Where each of ``spec.columns`` is among the columns sent.
    """

    kept: int = 0
    positions: tuple[int, ...] = ()

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows with their predictions; the next are read when these have been taken."""
        rows: list[pa.RecordBatch] = []

        def sent() -> Iterator[pa.RecordBatch]:
            for batch in batches:
                rows.append(batch)
                columns = [batch.column(i) for i in self.positions]
                yield pa.RecordBatch.from_arrays(columns, names=list(self.spec.columns))

        with self.forward(rank) as forward:
            for predicted in forward.over(sent()):
                taken = _take(rows, predicted.num_rows)
                if predicted.valid is not None:
                    taken = taken.filter(pa.array(predicted.valid))
                every = [*taken.columns[: self.kept], *predicted.columns]
                yield pa.RecordBatch.from_arrays(every, names=wire_names(len(every)))


def _take(rows: list[pa.RecordBatch], count: int) -> pa.RecordBatch:
    """The first ``count`` rows, which are no longer in ``rows`` then."""
    taken = []
    while count:
        first = rows.pop(0)
        if len(first) > count:
            rows.insert(0, first.slice(count))
        taken.append(first.slice(0, count))
        count -= len(taken[-1])
    if len(taken) == 1:
        return taken[0]
    # pa.concat_batches came with pyarrow 19.
    (joined,) = pa.Table.from_batches(taken).combine_chunks().to_batches()
    return joined


def _structs(predicted: Predicted) -> pa.Array:
    names = wire_names(len(predicted.columns))
    structs = pa.StructArray.from_arrays(predicted.columns, names=names)
    return structs if predicted.valid is None else with_nulls(structs, predicted.valid)


def predict_columns(
    frame: Any,
    archive: PredictorArchive,
    inputs: Columns,
    outputs: Sequence[OutputColumn],
    *,
    batch_size: int = 32,
    use_gpu: UseGpu = "auto",
    handle_invalid: HandleInvalid = "error",
) -> Any:
    """The frame with columns of predictions, all made in one pass over the rows.

    Rows keep their order and all their columns, and nothing runs yet. The frame may be a stream.

    Args:
        inputs: Which columns the model reads (``features``, ``decoder``).
        handle_invalid: See :func:`sparkdl.predict`.

    Raises:
        DataError: The columns do not fit, or one of ``outputs`` exists already.
    """
    require_running(frame.sparkSession)
    schema = frame.schema
    spec = make_spec(
        schema, archive.signature, inputs.features, None, None, inputs.decoder, pad=inputs.pad
    )
    names = [column.name for column in outputs]
    hint = "predict(..., output_column='another name')"
    require_new(names, frame.columns, "each column of predictions", hint)
    # Spark takes no dot nor backtick in some places, nor one name twice.
    wire = frame.toDF(*wire_names(len(frame.columns)))
    typed = tuple(column.typed(archive, spec.features) for column in outputs)
    task = PredictTask(archive, spec, batch_size, use_gpu, typed, handle_invalid)
    positions = tuple(map(schema.names.index, spec.columns))
    appending = AppendTask(**vars(task), kept=len(schema), positions=positions)
    predicted = append_results(
        wire, schema, task, task.result, spec.columns, appending, "sparkdl_predict",
        left_out=handle_invalid == "skip",
    )  # fmt: skip
    return predicted.toDF(*frame.columns, *names)
