"""``FTRLClassifier`` and ``FTRLClassificationModel``: a logistic regression of sparse vectors."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pyspark.ml.classification import ProbabilisticClassificationModel, ProbabilisticClassifier
from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.ml.param.shared import HasSeed, HasWeightCol
from pyspark.sql import types as T

from sparkdl.errors import ConfigError, DataError, ModelError, WorkerError, raised_of
from sparkdl.files.model_file import pack_arrays, unpack_arrays
from sparkdl.launch import interrupts
from sparkdl.launch.devices import DeviceRequest
from sparkdl.linear import rank_task
from sparkdl.linear.rank_task import (
    Ftrl,
    LinearModel,
    LinearPart,
    LinearScores,
    LinearSettings,
    LinearTask,
)
from sparkdl.linear.sparse_rows import SparseVectors
from sparkdl.settings.network import Network
from sparkdl.settings.values import FLAG, ValueKind, is_finite_number, or_none, shown, whole
from sparkdl.spark.forms.fields import field_of, is_number, wrong_type
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.inference.function import append_results
from sparkdl.spark.ml.files import Loaded, SavedStage, StageContent
from sparkdl.spark.ml.stage import ParamSpec, Stage, check_thresholds, has_params, param, taking
from sparkdl.spark.runs.function_stage import run_stage
from sparkdl.spark.session.frames import column_named, is_vector_column, require_frame
from sparkdl.spark.session.running import require_running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def _share(name: str, value: Any) -> float:
    if not is_finite_number(value) or not 0 <= value <= 1:
        raise ConfigError(
            f"{name} must be a number from 0 to 1", expected="a number from 0 to 1",
            received=shown(value),
        )  # fmt: skip
    return float(value)


_TRAINING_PARAMS = (
    *(param(Ftrl, name) for name in ("lambda1", "lambda2", "alpha", "beta")),
    ParamSpec("batchSize", "rows of a step, on all ranks together; see FTRLClassifier",
              taking(whole(1), "batchSize"), 10_000),
    ParamSpec("maxIter", "epochs: how often each rank goes over its rows",
              taking(whole(1), "maxIter"), 1),
    ParamSpec("numWorkers", "ranks, which run at the same time; None: as many as Spark has cores",
              taking(or_none(whole(1)), "numWorkers"), optional=True),
    ParamSpec("fitIntercept", "whether the model has an intercept, which is not regularized",
              taking(FLAG, "fitIntercept"), True),
)  # fmt: skip
_THRESHOLD = ParamSpec(
    "threshold", "a row whose probability of class 1 is greater is of class 1",
    taking(ValueKind(_share, float), "threshold"), 0.5,
)  # fmt: skip


@has_params(_THRESHOLD)
class FTRLClassificationModel(Stage, SavedStage, ProbabilisticClassificationModel):
    """A logistic regression of sparse vectors; :class:`FTRLClassifier` makes it.

    ``transform`` adds ``rawPredictionCol`` (a vector ``[-m, m]``, m the logarithm of the odds of
    class 1), ``probabilityCol`` (a vector ``[1 - p, p]``) and ``predictionCol`` (double: 1 where
    ``p > threshold``, else 0); a column whose name is ``''`` is left out. Vectors may have any
    size: an index that no row had in training counts nothing.
    """

    __module__ = "sparkdl.sparse"
    _model: LinearModel | None = None
    _losses: tuple[float, ...] = ()

    @property
    def weights(self) -> LinearModel:
        """The weights and the intercept, as arrays of NumPy.

        Raises:
            ModelError: The stage was made without a model.
        """
        if self._model is None:
            raise ModelError(
                f"{type(self).__name__} has no model",
                expected="a stage that FTRLClassifier's fit returned, or that was loaded",
                received="one that was made empty",
            )
        return self._model

    @property
    def numClasses(self) -> int:
        """Two: 0 and 1."""
        return 2

    @property
    def numFeatures(self) -> int:
        """The largest size of the vectors that the model was trained on."""
        return self.weights.size

    @property
    def coefficients(self) -> SparseVector:
        """The weights that are not 0, by index; of size :attr:`numFeatures`."""
        model = self.weights
        return SparseVector(model.size, model.ids.astype(np.int32), model.weights)

    @property
    def intercept(self) -> float:
        """The logarithm of the odds of a row without features."""
        return self.weights.intercept

    @property
    def nnz(self) -> int:
        """How many weights are not 0."""
        return len(self.weights.ids)

    @property
    def lossHistory(self) -> list[float]:
        """The mean log loss of each epoch, of rows that had not been in a step of it yet."""
        return list(self._losses)

    def _with(self, model: LinearModel, losses: tuple[float, ...]) -> FTRLClassificationModel:
        self._model, self._losses = model, losses
        return self

    def _cut(self) -> float:
        """The probability that class 1 must pass."""
        if not self.isDefined("thresholds"):
            return float(self.getOrDefault("threshold"))
        first, second = check_thresholds(self.getOrDefault("thresholds"), 2)
        return float(second / (first + second))

    def _outputs(self) -> dict[str, str]:
        """Kind of column -> its name, of those that are wanted."""
        kinds = ("rawPrediction", "probability", "prediction")
        named = {kind: self.getOrDefault(f"{kind}Col") for kind in kinds}
        return {kind: name for kind, name in named.items() if name}

    def transformSchema(self, schema: StructType) -> Any:
        """The schema of ``transform``'s result; raises what ``transform`` would."""
        require_vectors(schema, self.getOrDefault("featuresCol"))
        outputs = self._outputs()
        self.require_new(list(outputs.values()), schema)
        fields = [T.StructField(n, rank_task.column_type(k)) for k, n in outputs.items()]
        return T.StructType([*schema.fields, *fields])

    def _transform(self, dataset: DataFrame) -> Any:
        require_frame(f"{type(self).__name__}.transform", dataset)
        require_running(dataset.sparkSession)
        schema = self.transformSchema(dataset.schema)
        kinds = tuple(self._outputs())
        if not kinds:
            return dataset
        column, names = self.getOrDefault("featuresCol"), dataset.schema.names
        task = LinearScores(self.weights, self._cut(), kinds)
        appending = replace(task, kept=len(names), place=names.index(column))
        wire = dataset.toDF(*wire_names(len(names)))
        scored = append_results(
            wire, dataset.schema, task, task.result, [column], appending, "sparkdl_ftrl"
        )
        return scored.toDF(*schema.names)

    def predictRaw(self, value: object) -> DenseVector:
        """``[-m, m]`` for the features of one row."""
        margin = self._margin(value)
        return DenseVector([-margin, margin])

    def predictProbability(self, value: object) -> DenseVector:
        """The probabilities of classes 0 and 1 for the features of one row."""
        found = float(rank_task.probabilities(np.array([self._margin(value)]))[0])
        return DenseVector([1 - found, found])

    def predict(self, value: object) -> float:
        """The class of one row."""
        return float(self.predictProbability(value)[1] > self._cut())

    def _margin(self, value: object) -> float:
        if isinstance(value, SparseVector):
            indices, values = value.indices, value.values
        else:
            values = np.asarray(value.toArray() if hasattr(value, "toArray") else value, float)
            indices = np.arange(len(values), dtype=np.int32)
        starts = np.array([0, len(values)], np.int64)
        row = SparseVectors(starts, indices, np.array(values, np.float64), len(values))
        return float(self.weights.margins(row)[0])

    def content(self) -> StageContent:
        """The parts that are saved beside the Params."""
        model = self.weights
        plain = {"size": model.size, "intercept": model.intercept, "losses": list(self._losses)}
        data = pack_arrays({"ids": model.ids, "weights": model.weights})
        return StageContent(plain, data=data)

    def take(self, loaded: Loaded) -> None:
        """The counterpart of :meth:`content`."""
        if loaded.data is None:
            return
        arrays = unpack_arrays(loaded.data, f"the weights in {loaded.path!r}")
        plain = loaded.plain
        size, intercept = int(plain["size"]), float(plain["intercept"])
        model = LinearModel(size, arrays["ids"], arrays["weights"], intercept)
        self._with(model, tuple(plain["losses"]))


def require_vectors(schema: StructType, name: str) -> None:
    """Returns if a column holds vectors.

    Raises:
        DataError: It does not, or is not there.
    """
    found = field_of(schema, name, "featuresCol")
    if not is_vector_column(found.dataType):
        raise wrong_type(
            found, "featuresCol", "vectors of pyspark.ml, sparse ones or dense ones",
            "pyspark.ml.feature.FeatureHasher, HashingTF and VectorAssembler make vectors; "
            "pyspark.ml.functions.array_to_vector makes them of arrays",
        )  # fmt: skip


@has_params(*_TRAINING_PARAMS, _THRESHOLD)
class FTRLClassifier(Stage, SavedStage, ProbabilisticClassifier, HasWeightCol, HasSeed):
    """Logistic regression of sparse vectors of any dimension, trained by FTRL-Proximal.

    ::

        classifier = FTRLClassifier(lambda1=1.0, batchSize=1000, maxIter=5)
        model = Pipeline(stages=[hasher, classifier]).fit(df)
        model.stages[-1].nnz, model.stages[-1].coefficients

    Nothing has the size of the dimension: a weight comes to be when a row has its index, and the
    ranks share the weights out among them. Training is with NumPy; no deep-learning framework is
    imported. Each rank reads its rows once, and keeps them in memory: 12 bytes for each entry of a
    vector that is 1, 20 for another, and up to 16 for each index of each batch.

    A step takes ``batchSize`` rows, of all ranks together, and each rank the same share of its own:
    a rank with few rows or none takes part with what it has. The gradient of a step is the **sum**
    over its rows (times ``weightCol``), so that a row of weight 2 counts as two rows, and
    ``batchSize=1`` is the paper's algorithm and Vowpal Wabbit's ``--ftrl``. A mean would make
    larger batches learn less from each row: ``beta`` and the regularization would outweigh it. A
    step changes a weight by about ``alpha`` at most, however many rows it has, so small data want
    smaller batches: on a9a (26,000 rows, one epoch) the log loss of other rows is 0.332 with
    ``batchSize=1`` (also Vowpal Wabbit's), 0.335 with 100, 0.354 with 1000, 0.454 with 10,000.

    The weights are equal to those of one rank on the same batches, to 1e-6. The order of the rows
    follows from their content and ``seed``: a fit of the same rows on as many ranks repeats.

    Args:
        featuresCol: Vectors of ``pyspark.ml``, sparse or dense, also of different sizes.
        labelCol: Numbers 0 and 1, or booleans.
        weightCol: Weights of the rows, at least 0; unset or ``''``: all are 1.
        lambda1: L1: a weight is exactly 0 until the sum of its gradients passes it.
        lambda2: L2, of the sum of the losses, not of the mean.
        alpha, beta: The learning rate of a weight is ``alpha / (beta + √Σg²)``.
        batchSize: Rows of a step.
        maxIter: Epochs.
        numWorkers: Ranks, the tasks of a barrier stage; None: as many as Spark has cores.
        fitIntercept: Whether there is an intercept, which is not regularized.
        seed: Seed of the order of the rows.
        threshold: Class 1 is what has a greater probability.
        **Params: ``explainParams()`` lists them.

    Raises:
        UnknownArgumentError: An argument that is not among these.
        ParamTypeError: A value of another type.
        DataError: From ``fit``: a column is missing or of another type (no job has started), or a
            row has another label, no features, or NaN.
        ResourceError: From ``fit``: too few slots for ``numWorkers``.

    References:
        McMahan et al., 2013: Ad Click Prediction: a View from the Trenches.
    """

    __module__ = "sparkdl.sparse"
    REFUSED: ClassVar[Mapping[str, str]] = {
        "epochs": "maxIter is the number of epochs, as Spark's own estimators have it",
        "regParam": "lambda1 and lambda2 are the strengths of L1 and L2",
        "elasticNetParam": "lambda1 and lambda2 are the strengths of L1 and L2",
        "learningRate": "alpha is the learning rate",
    }

    def _prepare(self) -> None:
        self._setDefault(seed=0)

    @interrupts.heard()
    def _fit(self, dataset: DataFrame) -> FTRLClassificationModel:
        require_frame(f"{type(self).__name__}.fit", dataset)
        require_running(dataset.sparkSession)
        model = FTRLClassificationModel()
        model._resetUid(self.uid)
        self._copyValues(model)
        model._cut()  # what is wrong with thresholds is said before the fit
        parts = self._train(self._columns(dataset))
        if not parts[0].rows:
            raise DataError(
                f"{type(self).__name__} has no rows to train on", expected="a DataFrame with rows",
                received="one without any",
            )  # fmt: skip
        ids = np.concatenate([part.ids for part in parts])
        order = np.argsort(ids)
        weights = np.concatenate([part.weights for part in parts])[order]
        linear = LinearModel(parts[0].size, ids[order], weights, parts[0].intercept)
        return model._with(linear, parts[0].losses)

    def _columns(self, dataset: DataFrame) -> Any:
        """The columns that are read: vectors, labels, and weights if there are any."""
        schema = dataset.schema
        require_vectors(schema, self.getOrDefault("featuresCol"))
        names = {"featuresCol": self.getOrDefault("featuresCol")}
        weighted = self.isDefined("weightCol") and self.getOrDefault("weightCol")
        for argument in ("labelCol", "weightCol") if weighted else ("labelCol",):
            names[argument] = name = self.getOrDefault(argument)
            found = field_of(schema, name, argument)
            if not is_number(found.dataType):
                raise wrong_type(found, argument, "numbers")
        columns = []
        for wire, (argument, name) in zip(wire_names(len(names)), names.items(), strict=True):
            column = column_named(name)
            column = column if argument == "featuresCol" else column.cast("double")
            columns.append(column.alias(wire))
        return dataset.select(*columns)

    def _train(self, rows: Any) -> list[LinearPart]:
        rule = Ftrl(**{n: self.getOrDefault(n) for n in ("lambda1", "lambda2", "alpha", "beta")})
        training = LinearSettings(
            rule, self.getOrDefault("batchSize"), self.getOrDefault("maxIter"),
            self.getOrDefault("fitIntercept"), int(self.getOrDefault("seed")),
        )  # fmt: skip
        task = LinearTask(
            b"", secrets.token_bytes(32), DeviceRequest(None, unscheduled=True), "builtin",
            training=training,
        )  # fmt: skip
        try:
            workers = self.getOrDefault("numWorkers")
            found = run_stage(task, workers, rows.sparkSession, Network(), rows)
        except WorkerError as error:
            raised = None if error.beats is None else raised_of(error.beats, error.rank)
            if raised is None:
                raise
            raise raised from error
        return [found.load(rank) for rank in found.results]

    def content(self) -> StageContent:
        """Nothing: an estimator has its Params alone."""
        return StageContent()

    def take(self, loaded: Loaded) -> None:
        """The counterpart of :meth:`content`."""
