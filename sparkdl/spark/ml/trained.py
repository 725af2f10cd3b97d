"""``Trained``: what a fitted stage has beside its Params, and ``FittedStage``, which scores."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
from pyspark.sql import types as T

from sparkdl.errors import DataError, ModelError, ResourceError
from sparkdl.launch import interrupts
from sparkdl.learner.archives.archive import ModelArchive, decode_model, making_models
from sparkdl.learner.prediction.model_source import KerasSource, ModelSource
from sparkdl.learner.prediction.predictor_archive import PredictorArchive
from sparkdl.learner.signature import Signature
from sparkdl.settings.values import shown
from sparkdl.spark.forms.matching import make_spec
from sparkdl.spark.forms.sources import Columns
from sparkdl.spark.inference.output_columns import OutputColumn
from sparkdl.spark.inference.predict import predict_columns
from sparkdl.spark.ml.files import Loaded, SavedStage, StageContent, load_source
from sparkdl.spark.ml.stage import ColumnsStage
from sparkdl.spark.session.frames import require_frame


@dataclass(frozen=True)
class TrainingSummary:
    """How a fit went; a model keeps it when it is saved.

    Args:
        history: Metric -> its value after each epoch, over the rows of all workers.
        rows: Rows trained per epoch.
        seconds: From the first step to the last, on the slowest worker.
        num_workers: Workers that trained.
        transports: How workers reached the server or each other.
    """

    history: dict[str, list[Any]]
    rows: int
    seconds: float
    num_workers: int
    transports: tuple[str, ...]

    @property
    def totalIterations(self) -> int:
        return len(self.history.get("loss", ()))

    @property
    def objectiveHistory(self) -> list[float]:
        """The loss after each epoch."""
        return list(self.history.get("loss", ()))

    def plot(self) -> Any:
        """Draws each metric over the epochs, beside it the same metric of the validation rows.

        Returns:
            A Matplotlib figure, which notebooks show.

        Raises:
            ResourceError: Matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ResourceError(
                "a plot needs Matplotlib", expected="matplotlib on the driver", received=str(error),
                hint="pip install matplotlib",
            ) from error  # fmt: skip
        names = [name for name in self.history if not name.startswith("val_")]
        names = [n for n in names if all(isinstance(v, (int, float)) for v in self.history[n])]

        class ShownFigure(Figure):
            """Notebooks show it, also before pyplot has chosen a backend."""

            def _repr_png_(self) -> bytes:
                picture = io.BytesIO()
                self.savefig(picture, format="png", dpi=100)
                return picture.getvalue()

        figure = ShownFigure(figsize=(4 * max(len(names), 1), 3), layout="constrained")
        for axes, name in zip(figure.subplots(1, max(len(names), 1), squeeze=False)[0], names,
                              strict=False):  # fmt: skip
            for key, label in ((name, "training"), (f"val_{name}", "validation")):
                values = self.history.get(key)
                if values:
                    axes.plot(range(1, len(values) + 1), values, marker=".", label=label)
            axes.set_xlabel("epoch")
            axes.set_title(name)
            axes.legend()
        return figure

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "transports": list(self.transports)}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> TrainingSummary:
        return cls(**{**saved, "transports": tuple(saved["transports"])})


F = TypeVar("F", bound="FittedStage")


class Trained:
    """A trained model; copies of a stage share it, as nothing in it ever changes.

    Args:
        archive: The model with its optimizer state: what is saved.
        source: The same model, which nobody else has or changes; let go once it is encoded.
        decoder: See :class:`sparkdl.SparkModel`.
        summary: How the training went; None if it was not trained by a stage.
    """

    def __init__(
        self,
        archive: ModelArchive,
        source: ModelSource,
        decoder: Any = None,
        summary: TrainingSummary | None = None,
    ) -> None:
        self.archive, self.decoder, self.summary = archive, decoder, summary
        self.signature: Signature = source.signature
        """The model's inputs and outputs."""
        self._source: ModelSource | None = source
        self._predictor: PredictorArchive | None = None

    @classmethod
    def of(
        cls,
        model: object,
        archive: ModelArchive,
        *,
        decoder: Any = None,
        summary: TrainingSummary | None = None,
    ) -> Trained:
        """From a Keras model, as it is now, and its archive."""
        objects = archive.own_code()
        with making_models, interrupts.held():
            trained = cls(archive, KerasSource(model, objects, decoder=decoder), decoder, summary)
        trained.predictor  # noqa: B018 - encoded now: the model may change
        return trained

    @property
    def predictor(self) -> PredictorArchive:
        """The archive that executors score with; encoded when it is first asked for."""
        with making_models, interrupts.held():
            if self._source is not None:
                self._predictor = self._source.encode(list(self.signature.outputs))
                self._source = None
            assert self._predictor is not None
            return self._predictor


class FittedStage(ColumnsStage, SavedStage):
    """A transformer with a trained model."""

    _trained: Trained | None = None
    _local: Any = None  # the Keras model in this process, made when it is asked for

    def _with(self: F, trained: Trained) -> F:
        self._trained, self._local = trained, None
        return self

    def copy(self: F, extra: object = None) -> F:
        """A copy with a Keras model of its own."""
        copied: F = super().copy(extra)
        copied._local = None
        return copied

    @property
    def trained(self) -> Trained:
        """The model that the stage scores with.

        Raises:
            ModelError: The stage was made without a model.
        """
        if self._trained is None:
            raise ModelError(
                f"{type(self).__name__} has no model",
                expected="a stage that an estimator's fit returned, or that was loaded",
                received="one that was made empty",
            )
        return self._trained

    @property
    def model(self) -> Any:
        """A Keras model with the stage's weights and optimizer state; changes stay in it."""
        if self._local is None:
            with making_models, interrupts.held():
                self._local = decode_model(self.trained.archive, own_code=True)
        return self._local

    @property
    def history(self) -> dict[str, list[Any]]:
        """Metric -> its value after each epoch; empty if the model was not trained by a stage."""
        return dict(self.summary.history) if self.hasSummary else {}

    @property
    def hasSummary(self) -> bool:
        return self.trained.summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """How the training went.

        Raises:
            ModelError: The model was not trained by a stage.
        """
        if self.trained.summary is None:
            raise ModelError(
                f"{type(self).__name__} has no summary of its training",
                expected="a model that an estimator of sparkdl.ml has trained",
                received="another one",
            )
        return self.trained.summary

    @property
    def numFeatures(self) -> int:
        """Values per row that the model takes; -1 if unknown."""
        inputs = list(self.trained.signature.inputs.values())
        if any(spec.shape is None or None in spec.shape for spec in inputs):
            return -1
        return sum(math.prod(d or 1 for d in spec.shape or ()) for spec in inputs)

    def _row(self, value: object) -> Any:
        """The output for one row of a model with one input, as a batch of one row."""
        (spec,) = self.trained.signature.inputs.values()
        array = np.asarray(value.toArray() if hasattr(value, "toArray") else value)
        array = array.astype(spec.dtype_for(array.dtype.name))
        if spec.shape is not None and None not in spec.shape:
            if array.size != self.numFeatures:
                raise DataError(
                    "the features do not fit the model", expected=f"{self.numFeatures} values",
                    received=shown(value),
                )  # fmt: skip
            array = array.reshape([d or 1 for d in spec.shape])
        outputs = self.model.predict_on_batch(array[None])
        if isinstance(outputs, Mapping):
            (outputs,) = outputs.values()
        elif isinstance(outputs, (list, tuple)):
            (outputs,) = outputs
        return np.asarray(outputs)

    def _columns(self) -> list[OutputColumn]:
        """The columns that ``transform`` adds."""
        raise NotImplementedError

    def _scorer(self) -> PredictorArchive:
        return self.trained.predictor

    def transformSchema(self, schema: Any) -> Any:
        """The schema of ``transform``'s result.

        Raises:
            DataError: A column is missing, does not fit the model, or has the name of a new one.
        """
        predictor = self._scorer()
        spec = make_spec(
            schema, predictor.signature, self.features, None, None, self.trained.decoder,
            pad=self.getOrDefault("pad"),
        )  # fmt: skip
        outputs = self._columns()
        self.require_new([output.name for output in outputs], schema)
        fields = [output.typed(predictor, spec.features).field(predictor) for output in outputs]
        return T.StructType([*schema.fields, *fields])

    def _transform(self, dataset: Any) -> Any:
        """The frame with the new columns; rows keep their order, and nothing runs yet."""
        require_frame(f"{type(self).__name__}.transform", dataset)
        self.transformSchema(dataset.schema)
        outputs = self._columns()
        if not outputs:
            return dataset
        inputs = Columns(self.features, decoder=self.trained.decoder, pad=self.getOrDefault("pad"))
        return predict_columns(
            dataset, self._scorer(), inputs, outputs,
            batch_size=self.getOrDefault("inferenceBatchSize"), use_gpu=self.getOrDefault("useGpu"),
            handle_invalid=self.getOrDefault("handleInvalid"),
        )  # fmt: skip

    def content(self) -> StageContent:
        trained = self.trained
        plain = {} if trained.summary is None else {"summary": trained.summary.to_json()}
        code = {} if trained.decoder is None else {"decoder": trained.decoder}
        return StageContent(plain, trained.archive, code)

    def take(self, loaded: Loaded) -> None:
        found = load_source(loaded)
        if found is None:
            return
        source, archive = found
        saved = loaded.plain.get("summary")
        summary = None if saved is None else TrainingSummary.from_json(saved)
        self._with(Trained(archive, source, loaded.code.get("decoder"), summary))
