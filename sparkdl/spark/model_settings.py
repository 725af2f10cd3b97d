"""``ModelSettings``: what a ``SparkModel`` holds, as read-only attributes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Generic, NoReturn, TypeVar, overload

from sparkdl.config import FitConfig
from sparkdl.errors import ReadOnlyError, UnpicklableError, closest
from sparkdl.settings.values import shown
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.spark.fit.trained_model import TrainedModel
from sparkdl.spark.fit.trained_tables import TrainedTable, stored_tables
from sparkdl.spark.fit.training import StageSummary
from sparkdl.spark.forms.sources import Columns
from sparkdl.tracking.profile import Facts, Profile, profile_of

T = TypeVar("T")


class Setting(Generic[T]):
    """A read-only attribute of a :class:`SparkModel`: an argument that it was made with."""

    def __init__(self, read: Callable[[ModelSettings], T]) -> None:
        self._read = read

    def __set_name__(self, owner: type[ModelSettings], name: str) -> None:
        self._name = name
        self.__doc__ = f"The argument ``{name}``, or what was chosen for it; read-only."

    @overload
    def __get__(self, model: None, owner: type[ModelSettings]) -> Setting[T]: ...
    @overload
    def __get__(self, model: ModelSettings, owner: type[ModelSettings]) -> T: ...
    def __get__(self, model: ModelSettings | None, owner: type[ModelSettings]) -> T | Setting[T]:
        return self if model is None else self._read(model)

    def __set__(self, model: ModelSettings, value: T) -> None:
        raise ReadOnlyError(
            f"{self._name} of a SparkModel cannot be changed",
            expected=f"{self._name}={self._read(model)!r}, with which it was made",
            received=repr(value),
            hint=f"make another one: SparkModel(spark_model.model, ..., {self._name}={value!r})",
        )


class ModelSettings:
    """The settings, the model and what the last fit left; see ``SparkModel``.

    Args:
        config: What was asked for and chosen.
        exchange: What workers send each other and when.
        model: A compiled ``keras.Model``.
        custom_objects: Name -> class or function.
        decoder: Of binary and image values.
    """

    def __init__(
        self,
        config: FitConfig,
        exchange: ChosenExchange,
        model: Any,
        custom_objects: Mapping[str, Any],
        decoder: Callable[[Any], Any] | Mapping[str, Callable[[Any], Any]] | None,
    ) -> None:
        self._config = config
        self._exchange = exchange
        self._trained = TrainedModel(model)
        self._custom_objects = dict(custom_objects)
        self._decoder = decoder
        self._history: Any = None
        self._epochs_trained = 0
        self._summary: StageSummary | None = None
        self._facts: Facts | None = None
        self._ensemble: list[Any] = []
        self._columns = Columns()

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses a public name that has no effect; a class of the user's own may have more.

        Raises:
            ReadOnlyError: There is no such attribute, or it cannot be assigned to.
        """
        cls = type(self)
        known = getattr(cls, name, None)
        if isinstance(known, property) and known.fset is None:
            raise ReadOnlyError(
                f"{name} of a SparkModel cannot be changed",
                expected="what fit leaves there" if name != "model" else "the model of its making",
                received=shown(value),
                hint="make another one: SparkModel(model, ...)" if name == "model" else "",
            )
        own = cls.__module__.startswith("sparkdl.")
        if own and known is None and not name.startswith("_"):
            arguments = [n for n in dir(cls) if isinstance(getattr(cls, n), Setting)]
            meant = closest(name, arguments)
            raise ReadOnlyError(
                f"a SparkModel has no attribute {name!r}",
                expected="settings as arguments of SparkModel: " + ", ".join(arguments),
                received=f"{name} = {shown(value)}",
                hint=f"make another one: SparkModel(spark_model.model, ..., {meant}={value!r})"
                if meant
                else "",
            )
        super().__setattr__(name, value)

    @property
    def model(self) -> Any:
        """The Keras model, trained in place; after ``rule='ensemble'`` the mean of the members."""
        return self._trained.model

    @property
    def ensemble(self) -> list[Any]:
        """The models that ``rule='ensemble'`` trained, one per worker; empty for other rules."""
        return list(self._ensemble)

    @property
    def history(self) -> Any:
        """The History of the last ``fit``, or None."""
        return self._history

    @property
    def summary(self) -> StageSummary | None:
        """Seconds, transports, GPUs and processes of the last fit's workers; None before one."""
        return self._summary

    @property
    def profile(self) -> Profile | None:
        """The parts of the workers' time in the last fit; None before one. ``print`` draws them."""
        return None if self._facts is None else profile_of(self._facts)

    @property
    def tables(self) -> Mapping[str, TrainedTable]:
        """Table name -> its rows after a fit, of a model with ``sparkdl.layers.ServedEmbedding``.

        ``tables['ads'].pull(ids)`` gives rows, ``len(...)`` their number, ``.to_dataframe()`` all
        of them for Spark; ``.load(df)`` sets rows, ``.shrink(below=2)`` removes some. Nothing is
        loaded whole. Empty for other models.

        Raises:
            ResourceError: The files of the fit are gone, or not whole.
        """
        return stored_tables(self._trained)

    mode = Setting(lambda self: self._config.mode)
    frequency = Setting(lambda self: self._config.frequency)
    parameter_server_mode = Setting(lambda self: self._config.parameter_server_mode)
    num_workers = Setting(lambda self: self._config.num_workers)
    custom_objects = Setting(lambda self: dict(self._custom_objects))
    batch_size = Setting(lambda self: self._config.batch_size)
    port = Setting(lambda self: self._config.network.port)
    rule = Setting(lambda self: self._exchange.rule)
    communicator = Setting(lambda self: self._config.communicator)
    compression = Setting(lambda self: self._config.compression)
    use_gpu = Setting(lambda self: self._config.use_gpu)
    decoder = Setting(lambda self: self._decoder)
    repartition = Setting(lambda self: self._config.repartition)
    seed = Setting(lambda self: self._config.seed)
    pad = Setting(lambda self: copy(self._config.pad))
    on_nan = Setting(lambda self: self._config.on_nan)
    resources = Setting(lambda self: copy(self._config.resources))
    network = Setting(lambda self: self._config.network)
    limits = Setting(lambda self: self._config.limits)

    def get_config(self) -> dict[str, Any]:
        """The arguments as plain values (the model left out), to be saved or shown."""
        return self._config.to_dict()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses ``pickle``, ``copy`` and the closures of functions that go to executors.

        Raises:
            UnpicklableError: Always.
        """
        raise UnpicklableError(
            "a SparkModel stays on the driver: it is neither pickled nor copied",
            expected="its Keras model, spark_model.model, where a function of executors needs one",
            received=repr(self),
            hint="spark_model.save('model.keras') and sparkdl.load_spark_model('model.keras') make "
            "another one; within a function use spark_model.model, or values taken before",
        )

    def __repr__(self) -> str:
        return (
            f"SparkModel({self.model.name!r}, mode={self.mode!r}, frequency={self.frequency!r}, "
            f"rule={self.rule.name!r}, num_workers={self.num_workers})"
        )
