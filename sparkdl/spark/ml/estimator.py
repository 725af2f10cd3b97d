"""The stages of Keras models: classifier, regressor, estimator, their models, transformer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from pyspark.ml.base import Estimator, Model, Transformer
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import DenseVector
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasInputCol,
    HasLabelCol,
    HasOutputCol,
    HasPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)
from pyspark.ml.regression import RegressionModel, Regressor

from sparkdl.errors import ParamTypeError, UnknownNameError
from sparkdl.learner.prediction.class_scores import ClassScores, class_scores
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import model_signature
from sparkdl.settings.values import require_name, shown
from sparkdl.spark.inference.output_columns import Form, OutputColumn
from sparkdl.spark.ml.stage import LOGITS_PARAM, ParamSpec, check_thresholds, columns, has_params
from sparkdl.spark.ml.trained import FittedStage, Trained
from sparkdl.spark.ml.training import (
    TrainingStage,
    archive_of,
    check_labels,
    check_number,
    only_output,
    scores_of,
)

T = TypeVar("T", bound="KerasTransformer")
E = TypeVar("E", bound="KerasEstimator")


def _by_output(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in columns(value).values()):
        raise TypeError("a dict: output name -> column")
    return value


def _output_mode(value: object) -> str:
    return require_name("outputMode", value, ("array", "vector"))


_OUTPUT_COLS = ParamSpec(
    "outputCols", "in place of one name for all: the model's output name -> column; outputs that "
    "are not named are left out", _by_output, optional=True,
)  # fmt: skip
_OUTPUT_MODE = ParamSpec(
    "outputMode", "what columns of several numbers are: 'array' or 'vector'", _output_mode, "array"
)


@has_params(_OUTPUT_COLS, _OUTPUT_MODE)
class OutputsStage(FittedStage):
    """A fitted stage that adds the model's outputs as they are: of their dtypes, or arrays."""

    NAMING: ClassVar[str]
    """The Param with the column of the only output; of several, the beginning of their names."""

    def _columns(self) -> list[OutputColumn]:
        outputs = self.trained.signature.outputs
        chosen = self.getOrDefault("outputCols")
        if chosen is None:
            base = self.getOrDefault(self.NAMING)
            chosen = {name: f"{base}_{name}" if len(outputs) > 1 else base for name in outputs}
        for name in chosen:
            if name not in outputs:
                raise UnknownNameError("output of the model", name, outputs)
        vector = self.getOrDefault("outputMode") == "vector"
        return [
            OutputColumn(column, output, vector=vector)
            for output, column in chosen.items() if column
        ]  # fmt: skip


@has_params()
class KerasModel(OutputsStage, Model, HasFeaturesCol, HasLabelCol, HasPredictionCol):
    """A trained Keras model of any inputs and outputs; :class:`KerasEstimator` makes it.

    ``transform`` adds a column for each output, of its dtype or arrays; with
    ``outputMode='vector'`` an ML vector. The column of the only output is ``predictionCol``; of
    several outputs they are ``<predictionCol>_<output>``, unless ``outputCols`` names them.
    """

    __module__ = "sparkdl.ml"
    NAMING = "predictionCol"


@has_params(
    _OUTPUT_COLS,
    _OUTPUT_MODE,
    ParamSpec("labelCols", "in place of labelCol: several numeric columns, or the model's output "
              "name -> column or columns", columns, optional=True),
    ParamSpec("weightCols", "in place of weightCol: output name -> column of sample weights",
              _by_output, optional=True),
)  # fmt: skip
class KerasEstimator(
    TrainingStage, Estimator, HasFeaturesCol, HasLabelCol, HasPredictionCol, HasWeightCol,
    HasValidationIndicatorCol, HasSeed,
):  # fmt: skip
    """A Keras model with any inputs and outputs as an estimator of ``pyspark.ml``.

    ::

        estimator = KerasEstimator(
            model=model,
            featuresCol={'wide': ['age', 'income'], 'deep': 'text'},
            labelCol={'price': 'price', 'kind': 'kind'},
            outputCols={'price': 'predicted price'},
        )

    See :class:`KerasClassifier` for the arguments.
    """

    __module__ = "sparkdl.ml"
    MODEL = KerasModel

    def setLabelCol(self: E, value: object) -> E:
        """Sets :py:attr:`labelCol`, or with a list or dict :py:attr:`labelCols`."""
        return self._set_columns("labelCol", "labelCols", value)

    @property
    def labels(self) -> Any:
        """The column of labels, several, or output name -> either."""
        return self._columns_in("labelCol", "labelCols")

    @property
    def weights(self) -> Any:
        by_output = self.getOrDefault("weightCols")
        return super().weights if by_output is None else by_output

    def _check_model(self, model: object, schema: object) -> None:
        """Any model will do."""


@has_params()
class KerasTransformer(OutputsStage, Transformer, HasInputCol, HasOutputCol):
    """Scores with a Keras model that was trained elsewhere; it need not be compiled.

    ::

        KerasTransformer(model=model, inputCol='features', outputCol='embedding').transform(df)

    Args:
        model: A built Keras model.
        modelFile: In place of ``model``: the path of a ``.keras`` file. What runs code when it is
            loaded is refused, unless inside of ``sparkdl.ml.trusted()``.
        decoder: Makes the model's input from a binary or image value.
        customObjects: Name -> class or function, beside those found in the model itself.
        inputCol: A column; several numeric ones; or input name -> either. Default: ``'features'``.
        outputCol: Column of the output, or the beginning of their names. Default: ``'prediction'``.
        **Params: ``explainParams()`` lists them.
    """

    __module__ = "sparkdl.ml"
    PARTS = ("customObjects", "decoder", "model", "modelFile")
    NAMING = "outputCol"

    def _prepare(self) -> None:
        super()._prepare()
        self._setDefault(inputCol="features", outputCol="prediction")
        self._objects: dict[str, Any] = {}
        self._decoder: Any = None

    def setCustomObjects(self: T, objects: Any) -> T:
        """Sets name -> class or function, for the model that is set next."""
        self._objects = dict(objects or {})
        return self

    def setDecoder(self: T, decoder: object) -> T:
        """Sets what makes the input of the model that is set next from a binary or image value."""
        self._decoder = decoder
        return self

    def setModel(self: T, model: object) -> T:
        """Sets the Keras model, as it is now; None takes it away."""
        if model is None:
            self._trained = self._local = None
            return self
        archive = archive_of(model, self._objects)
        return self._with(Trained.of(model, archive, decoder=self._decoder))

    def setModelFile(self: T, path: str | None) -> T:
        """Sets the Keras model to the one in a file, which is read now; None changes nothing."""
        if path is None:
            return self
        if not isinstance(path, str):
            raise ParamTypeError(
                "modelFile names the file of a Keras model", expected="the path of a .keras file",
                received=shown(path), hint="model=... takes a Keras model",
            )  # fmt: skip
        from sparkdl.files.model_file import read_model
        from sparkdl.learner.archives.archive import model_from_bytes
        from sparkdl.spark.ml.files import is_trusted

        content = read_model(path).content
        model = model_from_bytes(content, self._objects, safe_mode=not is_trusted(), path=path)
        return self.setModel(model)

    def setInputCol(self: T, value: object) -> T:
        """Sets :py:attr:`inputCol`, or with a list or dict :py:attr:`featuresCols`."""
        return self._set_columns("inputCol", "featuresCols", value)

    @property
    def features(self) -> Any:
        return self._columns_in("inputCol", "featuresCols")


@has_params(LOGITS_PARAM)
class KerasClassificationModel(FittedStage, ProbabilisticClassificationModel):
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
        predictor = self.trained.predictor
        name = only_output(predictor.signature, type(self).__name__)
        shape = predictor.signature.outputs[name].shape
        logits = self.getOrDefault("fromLogits")
        return name, *scores_of(predictor.scores.get(name), shape, logits, type(self).__name__)

    def _scorer(self) -> PredictorArchive:
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

    def predictRaw(self, value: object) -> DenseVector:
        """The numbers of ``rawPrediction`` for the features of one row."""
        return DenseVector(self._meaning()[1].raw(self._numbers(value))[0])

    def predictProbability(self, value: object) -> DenseVector:
        """The probability of each class for the features of one row."""
        return DenseVector(self._meaning()[1].probability(self._numbers(value))[0])

    def predict(self, value: object) -> float:
        """The class of one row, given its features (a vector, list or array)."""
        return float(self._meaning()[1].classes(self._numbers(value), self._thresholds())[0])

    def _numbers(self, value: object) -> Any:
        return self._row(value).astype(np.float64).reshape(1, -1)


@has_params(LOGITS_PARAM)
class KerasClassifier(
    TrainingStage, ProbabilisticClassifier, HasWeightCol, HasValidationIndicatorCol, HasSeed,
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
    MODEL = KerasClassificationModel

    def _check_model(self, model: object, schema: object) -> None:
        name = type(self).__name__
        signature = model_signature(model)
        output = only_output(signature, name)
        known = class_scores(model, signature.outputs).get(output)
        logits = self.getOrDefault("fromLogits")
        _, classes = scores_of(known, signature.outputs[output].shape, logits, name)
        check_labels(schema, self.labels, classes)
        if self.isDefined("thresholds"):
            check_thresholds(self.getOrDefault("thresholds"), classes)


@has_params()
class KerasRegressionModel(FittedStage, RegressionModel):
    """A trained Keras model that gives each row a number; :class:`KerasRegressor` makes it.

    ``transform`` adds ``predictionCol``, a double.
    """

    __module__ = "sparkdl.ml"

    def _columns(self) -> list[OutputColumn]:
        name = only_output(self.trained.signature, type(self).__name__)
        check_number(self.trained.signature.outputs[name].shape, type(self).__name__)
        column = self.getOrDefault("predictionCol")
        return [OutputColumn(column, name, "values", "float64")] if column else []

    def predict(self, value: object) -> float:
        """The number for one row, given its features (a vector, list or array)."""
        return float(self._row(value).reshape(-1)[0])


@has_params()
class KerasRegressor(
    TrainingStage, Regressor, HasWeightCol, HasValidationIndicatorCol, HasSeed,
):  # fmt: skip
    """A Keras model as a regressor of ``pyspark.ml``.

    ::

        model = KerasRegressor(model=model, epochs=5, labelCol='price').fit(df)

    The model has one output with one unit. See :class:`KerasClassifier` for the arguments.
    """

    __module__ = "sparkdl.ml"
    MODEL = KerasRegressionModel

    def _check_model(self, model: object, schema: object) -> None:
        signature = model_signature(model)
        name = only_output(signature, type(self).__name__)
        check_number(signature.outputs[name].shape, type(self).__name__)
