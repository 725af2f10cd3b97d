"""On the executor: the arguments of a SQL function -> predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

import pyarrow as pa
from pyspark.ml.linalg import VectorUDT
from pyspark.sql import types as T

from sparkdl.config import UseGpu
from sparkdl.data import DataSpec
from sparkdl.data.vectors import is_vector
from sparkdl.errors import DataError
from sparkdl.launch.task import RankContext
from sparkdl.learner.predictor_archive import PredictorArchive
from sparkdl.spark.columns.decoders import Decoder
from sparkdl.spark.columns.matching import InputColumns, make_spec
from sparkdl.spark.columns.sequences import Pad, few_lengths, mask_inputs
from sparkdl.spark.inference.forward import ForwardPass, HandleInvalid
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predictor_task import ForwardTask, PredictorTask
from sparkdl.spark.session.versions import spark_type_of


@dataclass(frozen=True)
class UdfTask(ForwardTask):
    """Predictions for Arrow batches of arguments; see :class:`sparkdl.launch.task.Task`.

    Their types are known when the first rows come: a function has no schema.

    Args:
        archive: The model.
        output: What to return.
        batch_size: Rows per forward pass.
        use_gpu: See :class:`sparkdl.SparkModel`.
        handle_invalid: What becomes of rows that no model can take; never ``'skip'``.
        decoder: See :class:`sparkdl.SparkModel`.
        pad: See there.
    """

    archive: PredictorArchive
    output: OutputColumn
    batch_size: int
    use_gpu: UseGpu
    handle_invalid: HandleInvalid = "error"
    decoder: Decoder | Mapping[str, Decoder] | None = None
    pad: Pad | None = None

    @property
    def result(self) -> T.DataType:
        """What the function returns."""
        return self.output.field(self.archive).dataType

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """One column: a prediction for each row."""
        first = next(batches, None)
        if first is None:
            return
        task = PredictorTask(self.archive, self._spec(first.schema), self.batch_size, self.use_gpu)
        with ForwardPass(
            task.spec, self.batch_size, [self.output], self.archive, self.handle_invalid,
            lambda: task.predictor(rank.resources),
        ) as forward:  # fmt: skip
            for predicted in forward.over(chain([first], batches)):
                yield pa.RecordBatch.from_arrays(predicted.columns, names=["prediction"])

    def _spec(self, schema: pa.Schema) -> DataSpec:
        """How to read the arguments."""
        fields = [T.StructField(f.name, _spark_type(f.type)) for f in schema]
        signature = self.archive.signature
        masks = mask_inputs(self.pad, None, signature.inputs)  # are made of other inputs
        features = _features(schema.names, [n for n in signature.inputs if n not in masks])
        spec = make_spec(
            T.StructType(fields), signature, features, None, decoder=self.decoder, pad=self.pad
        )
        return few_lengths(spec) if self.archive.archive.backend == "jax" else spec


def _features(names: list[str], inputs: list[str]) -> InputColumns:
    """Which argument is which input: one for each, or all for the only one."""
    if len(inputs) == 1:
        return names if len(names) > 1 else names[0]
    if len(names) != len(inputs):
        raise DataError(
            "a SQL function was called with the wrong number of arguments",
            expected=f"{len(inputs)} columns, for {inputs}",
            received=f"{len(names)}",
        )
    return dict(zip(inputs, names, strict=True))


def _spark_type(kind: pa.DataType) -> T.DataType:
    spark: T.DataType = VectorUDT() if is_vector(kind) else spark_type_of(kind)
    return spark
