"""A frame with a stage's prediction columns, made in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import types as T

from sparkdl.errors import DataError
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import predict_columns
from sparkdl.spark.ml.trained import FittedStage
from sparkdl.spark.session.frames import require_frame


def append_outputs(
    stage: FittedStage, frame: Any, predictor: PredictorArchive, outputs: Sequence[OutputColumn]
) -> Any:
    """The frame with the columns of ``outputs``; rows keep their order, and nothing runs yet.

    Args:
        stage: Says what the model reads, and where and in which batches it runs.
        frame: A DataFrame.
        predictor: The model.
        outputs: The columns to add.

    Raises:
        DataError: A column is missing, does not fit the model, or has the name of a new one.
    """
    require_frame(f"{type(stage).__name__}.transform", frame)
    appended(stage, frame.schema, predictor, outputs)
    if not outputs:
        return frame
    inputs = Columns(
        stage.features, decoder=stage.trained.decoder, pad=stage.getOrDefault("pad")
    )  # fmt: skip
    return predict_columns(
        frame, predictor, inputs, outputs,
        batch_size=stage.getOrDefault("inferenceBatchSize"), use_gpu=stage.getOrDefault("useGpu"),
        handle_invalid=stage.getOrDefault("handleInvalid"),
    )  # fmt: skip


def appended(
    stage: FittedStage, schema: Any, predictor: PredictorArchive, outputs: Sequence[OutputColumn]
) -> Any:
    """The schema of :func:`append_outputs`' result.

    Raises:
        DataError: A column is missing, does not fit the model, or has the name of a new one.
    """
    make_spec(
        schema, predictor.signature, stage.features, None, None, stage.trained.decoder,
        pad=stage.getOrDefault("pad"),
    )  # fmt: skip
    fields = []
    taken = {field.name.lower() for field in schema.fields}
    for output in outputs:
        if output.name.lower() in taken:
            raise DataError(
                f"the data already have a column {output.name!r}",
                expected=f"a new name for a column of {type(stage).__name__}",
                received=str(schema.names),
                hint="another name, or '' to leave the column out",
            )
        taken.add(output.name.lower())
        fields.append(output.field(predictor))
    return T.StructType([*schema.fields, *fields])
