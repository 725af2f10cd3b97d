"""``KerasRegressor`` and ``KerasRegressionModel``: one number per row."""

from __future__ import annotations

from typing import Any

from pyspark.ml.param.shared import HasSeed, HasValidationIndicatorCol, HasWeightCol
from pyspark.ml.regression import RegressionModel, Regressor
from pyspark.ml.util import MLReadable, MLWritable

from sparkdl.learner.signature import model_signature
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.ml.checks import check_number, only_output
from sparkdl.spark.ml.stage import has_params
from sparkdl.spark.ml.trained import FittedStage, Trained, append_outputs, appended
from sparkdl.spark.ml.training import TrainingStage


@has_params()
class KerasRegressionModel(FittedStage, RegressionModel, MLReadable, MLWritable):
    """A trained Keras model that gives each row a number; :class:`KerasRegressor` makes it.

    ``transform`` adds ``predictionCol``, a double.
    """

    __module__ = "sparkdl.ml"

    def _columns(self) -> list[OutputColumn]:
        name = only_output(self.trained.signature, type(self).__name__)
        check_number(self.trained.signature.outputs[name].shape, type(self).__name__)
        column = self.getOrDefault("predictionCol")
        return [OutputColumn(column, name, "values", "float64")] if column else []

    def transformSchema(self, schema: Any) -> Any:
        return appended(self, schema, self.trained.predictor, self._columns())

    def _transform(self, dataset: Any) -> Any:
        return append_outputs(self, dataset, self.trained.predictor, self._columns())

    def predict(self, value: Any) -> float:
        """The number for one row, given its features (a vector, list or array)."""
        return float(self._row(value).reshape(-1)[0])


@has_params()
class KerasRegressor(
    TrainingStage, Regressor, HasWeightCol, HasValidationIndicatorCol, HasSeed, MLReadable,
    MLWritable,
):  # fmt: skip
    """A Keras model as a regressor of ``pyspark.ml``.

    ::

        model = KerasRegressor(model=model, epochs=5, labelCol='price').fit(df)

    The model has one output with one unit. See :class:`KerasClassifier` for the arguments.
    """

    __module__ = "sparkdl.ml"

    def _check_model(self, model: Any, schema: Any) -> None:
        signature = model_signature(model)
        name = only_output(signature, type(self).__name__)
        check_number(signature.outputs[name].shape, type(self).__name__)

    def _make_model(self, trained: Trained) -> KerasRegressionModel:
        return KerasRegressionModel()._with(trained)
