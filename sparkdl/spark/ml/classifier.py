"""``KerasClassifier`` and ``KerasClassificationModel``: one class per row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import DenseVector
from pyspark.ml.param.shared import HasSeed, HasValidationIndicatorCol, HasWeightCol
from pyspark.ml.util import MLReadable, MLWritable

from sparkdl.learner.prediction.class_scores import ClassScores, class_scores
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import model_signature
from sparkdl.spark.inference.output_columns import Form, OutputColumn
from sparkdl.spark.ml.checks import check_labels, check_thresholds, only_output, scores_of
from sparkdl.spark.ml.params import LOGITS_PARAM
from sparkdl.spark.ml.stage import has_params
from sparkdl.spark.ml.trained import FittedStage, Trained, append_outputs, appended
from sparkdl.spark.ml.training import TrainingStage


@has_params(LOGITS_PARAM)
class KerasClassificationModel(
    FittedStage, ProbabilisticClassificationModel, MLReadable, MLWritable
):
    """A trained Keras model that gives each row a class; :class:`KerasClassifier` makes it.

    ``transform`` adds, in one pass over the rows, ``predictionCol`` (double), ``probabilityCol``
    and ``rawPredictionCol`` (vectors with an entry per class); a column whose name is ``''`` is
    left out. ``rawPrediction`` is the logarithm of the probabilities; of two classes with one
    unit ``[-z, z]`` with the logit z. ``prediction`` is the class with the
    greatest ``p / t``, where ``thresholds`` has a t for each class, else with the greatest p.
    """

    __module__ = "sparkdl.ml"

    @property
    def numClasses(self) -> int:
        """Classes, which are numbered from 0."""
        return self._meaning()[2]

    def _meaning(self) -> tuple[str, ClassScores, int]:
        """The output, what its numbers mean, and how many classes there are."""
        predictor = self.trained.predictor
        name = only_output(predictor.signature, type(self).__name__)
        shape = predictor.signature.outputs[name].shape
        logits = self.getOrDefault("fromLogits")
        scores = predictor.scores.get(name)
        return name, *scores_of(scores, shape, logits, type(self).__name__)

    def _predictor(self) -> PredictorArchive:
        name, scores, _ = self._meaning()
        return replace(self.trained.predictor, scores={name: scores})

    def _thresholds(self) -> tuple[float, ...]:
        thresholds = self.getOrDefault("thresholds") if self.isDefined("thresholds") else None
        return check_thresholds(thresholds, self.numClasses)

    def _columns(self) -> list[OutputColumn]:
        name = self._meaning()[0]
        columns = [
            OutputColumn(
                self.getOrDefault("predictionCol"), name, "class", "float64", self._thresholds()
            ),
            self._vector("probabilityCol", name, "probability"),
            self._vector("rawPredictionCol", name, "raw"),
        ]
        return [column for column in columns if column.name]

    def _vector(self, param: str, output: str, form: Form) -> OutputColumn:
        return OutputColumn(self.getOrDefault(param), output, form, "float64", vector=True)

    def transformSchema(self, schema: Any) -> Any:
        return appended(self, schema, self._predictor(), self._columns())

    def _transform(self, dataset: Any) -> Any:
        return append_outputs(self, dataset, self._predictor(), self._columns())

    def predictRaw(self, value: Any) -> DenseVector:
        """The numbers of ``rawPrediction`` for the features of one row."""
        return DenseVector(self._meaning()[1].raw(self._numbers(value))[0])

    def predictProbability(self, value: Any) -> DenseVector:
        """The probability of each class for the features of one row."""
        return DenseVector(self._meaning()[1].probability(self._numbers(value))[0])

    def predict(self, value: Any) -> float:
        """The class of one row, given its features (a vector, list or array)."""
        return float(self._meaning()[1].classes(self._numbers(value), self._thresholds())[0])

    def _numbers(self, value: Any) -> Any:
        return self._row(value).astype(np.float64).reshape(1, -1)


@has_params(LOGITS_PARAM)
class KerasClassifier(
    TrainingStage, ProbabilisticClassifier, HasWeightCol, HasValidationIndicatorCol, HasSeed,
    MLReadable, MLWritable,
):  # fmt: skip
    """A Keras model as a classifier of ``pyspark.ml``.

    ::

        classifier = KerasClassifier(model=model, epochs=5, mode='allreduce')
        pipeline_model = Pipeline(stages=[assembler, classifier]).fit(df)
        pipeline_model.write().overwrite().save('models/churn')

    The model has one output: a unit per class, or one unit for two classes. Labels are the
    numbers 0, 1, ..., as ``StringIndexer`` makes them.

    Args:
        model: A built Keras model; compiled, unless ``loss`` is given. Each fit trains a copy.
        modelBuilder: In place of ``model``: a function that makes it from ``builderArgs``, so that
            a grid can vary the architecture.
        optimizer: With ``loss``: what the model is compiled with; so are ``loss`` and ``metrics``.
        callbacks: Keras callbacks, run on the driver.
        decoder: Makes the model's input from a binary or image value.
        customObjects: Name -> class or function, beside those found in the model itself.
        network: Where the driver and the workers listen, a :class:`sparkdl.Network`: no Param, and
            no file holds it.
        featuresCol: A column; a list or dict sets ``featuresCols``.
        **Params: ``explainParams()`` lists them: Spark's columns, ``thresholds``, ``weightCol``,
            ``validationIndicatorCol`` (booleans), and the arguments of :class:`sparkdl.SparkModel`
            and of its ``fit`` in camelCase.

    Raises:
        UnknownArgumentError: An argument that is not among these.
        ParamTypeError: A value of another type.
    """

    __module__ = "sparkdl.ml"

    def _check_model(self, model: Any, schema: Any) -> None:
        name = type(self).__name__
        signature = model_signature(model)
        output = only_output(signature, name)
        known = class_scores(model, signature.outputs).get(output)
        logits = self.getOrDefault("fromLogits")
        _, classes = scores_of(known, signature.outputs[output].shape, logits, name)
        check_labels(schema, self.labels, classes)
        if self.isDefined("thresholds"):
            check_thresholds(self.getOrDefault("thresholds"), classes)

    def _make_model(self, trained: Trained) -> KerasClassificationModel:
        return KerasClassificationModel()._with(trained)
