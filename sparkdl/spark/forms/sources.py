"""``Form``: the rows that a user gives, in one of the forms that they may have. ``Source``: the
same once they are opened, as a DataFrame and how to read it.

Runs on the driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from pyspark.sql import Column

from sparkdl.data import DataSpec
from sparkdl.errors import ConfigError, DataError
from sparkdl.learner.signature import Signature
from sparkdl.process.user_warnings import warn_user
from sparkdl.spark.forms.files import FileInput, FileSet
from sparkdl.spark.forms.matching import Decoder, InputColumns
from sparkdl.spark.forms.sequences import Pad
from sparkdl.spark.forms.shared_rows import HeldOutRows, SharedRows
from sparkdl.spark.forms.shipped import PLACE, places_in
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.session.frames import is_frame, is_rdd
from sparkdl.spark.session.running import is_connect

ROLE = "__sparkdl_role"
"""A column beside the user's: 0 in rows to train on, 1 in rows to validate on."""
_SPARK_ML = "org.apache.spark.ml."
_TO = "__sparkdl_to"
_SORTS = "spark.sql.execution.sortBeforeRepartition"


@dataclass(frozen=True)
class Columns:
    """Which columns mean what, as the user said it in ``fit`` or ``evaluate``.

    Several names become a list, in whatever form they came, and names by input a dict of these:
    they are read more than once, and written to model files.

    Raises:
        DataError: Names of columns in a set.
    """

    features: InputColumns = "features"
    label: InputColumns | None = "label"
    sample_weight: str | Mapping[str, str] | None = None
    decoder: Decoder | Mapping[str, Decoder] | None = None
    pad: Pad | None = None
    group: Any = None
    """A column whose rows of one value go to one batch; of arrays, one, or an input's name."""

    def __post_init__(self) -> None:
        for argument in ("features", "label"):
            object.__setattr__(self, argument, _listed(getattr(self, argument), argument))


def _listed(names: Any, argument: str) -> Any:
    """Several names as a list, also by input; what is no such thing is left to ``make_spec``."""
    if isinstance(names, Mapping):
        return {key: _listed(value, argument) for key, value in names.items()}
    if isinstance(names, (set, frozenset)):
        raise DataError(
            f"{argument} names columns in no order",
            expected="a name, or several in the order in which the model takes them",
            received=f"a {type(names).__name__}", hint=f"{argument}={sorted(map(str, names))}",
        )  # fmt: skip
    if isinstance(names, (str, Column)) or not isinstance(names, Iterable):
        return names
    return [str(name) if isinstance(name, str) else name for name in names]  # np.str_ is a str


@dataclass(frozen=True)
class Source:
    """Selected columns of the user's data under their wire names, and how to read them.

    Args:
        origin: The user's own frame, if ``frame`` has its partitions.
        files: From which the workers read the rows by themselves; then nobody reads ``frame``.
        split: Share of the files' rows to validate on.
        seed: Seed of the choice of these rows.
        shared: The rows for several fits with one worker each, which then do not read ``frame``.
        validates: Whether there must be rows to validate on (of ``validation_data``, or of the
            ``validation_split``), or may be (where a column chooses them); None without.
        apart: The rows to train on and those to validate on, where ``frame`` is both.
    """

    frame: Any
    spec: DataSpec
    origin: Any = None
    files: tuple[FileSet, ...] = ()
    split: float = 0.0
    seed: int = 0
    shared: SharedRows | None = None
    validates: Literal["must", "split", "may"] | None = None
    apart: tuple[Source, Source] | None = None

    @property
    def spark(self) -> Any:
        """The session."""
        return self.frame.sparkSession

    @property
    def group_column(self) -> str | None:
        """The column of the frame with each row's group."""
        names = wire_names(len(self.spec.columns))
        found = None if self.spec.group is None else self.spec.group.columns[0]
        return None if found is None else names[self.spec.columns.index(found)]

    def dealt(self, num_workers: int) -> FileInput | None:
        """The parts of the files that each worker reads; None for rows that come from Spark."""
        if not self.files:
            return None
        return FileInput.dealt(self.files, num_workers, self.split, self.seed)

    def spread(self, num_workers: int, *, in_order: bool = False) -> tuple[Any, SharedRows | None]:
        """The rows in ``num_workers`` partitions; as they are where a cached frame has as many.

        Looking at the partitions of a frame that is not cached could run Spark jobs. Workers that
        read files or shared rows by themselves get a partition each that says nothing. A shuffle
        takes most of a short fit's time, so few rows to validate on do not move the others.

        Args:
            in_order: See :func:`dealt`.

        Returns:
            A frame, and the rows that travel by broadcast; see
            :class:`sparkdl.spark.runs.launcher.SparkLauncher`.
        """
        if self.files or self.shared is not None:
            return self.spark.range(0, num_workers, 1, num_workers), self.shared
        if self.spec.group is not None:
            return dealt(self.frame, num_workers, in_order=True, group=self.group_column), None
        if self._cached_parts() == num_workers:
            return self.frame, None
        if self.apart is not None and self.collects(num_workers):
            training, validation = self.apart
            parts = validation._cached_parts()
            # Spark gives both frames' rows the wider type of the two.
            if parts and training.frame.dtypes == validation.frame.dtypes:
                held_out = HeldOutRows.collect(validation.frame, parts, validation.origin)
                if held_out is not None:
                    return training.frame, held_out
        return dealt(self.frame, num_workers, in_order=in_order), None

    def collects(self, num_workers: int) -> bool:
        """Whether :meth:`spread` may take rows to validate on to the driver."""
        return self.apart is not None and self.apart[0]._cached_parts() == num_workers

    def _cached_parts(self) -> int:
        """The partitions of the user's frame where that is cached, else 0."""
        if self.origin is None or is_connect(self.spark) or not _is_kept(self.origin):
            return 0
        return int(self.origin.rdd.getNumPartitions())

    def warn_of_chance(self, *, repartition: bool) -> None:
        """Warns where the frame has other rows, or deals them otherwise, each time it is computed.

        Spark Connect does not say.

        Args:
            repartition: Whether they are to be dealt to the workers.
        """
        if self.files or self.origin is None or is_connect(self.spark):
            return
        kept = _is_kept(self.origin)  # its plan may be from before
        frame = self.frame.drop(ROLE) if self.validates == "split" else self.frame
        chance = [] if kept else drawn_in(frame)
        if chance:
            warn_user(
                f"the rows are computed by chance ({', '.join(chance)}): another fit, and a worker "
                "that is started again, may see other rows. Write them to files first, or cache "
                "them: df.cache()"
            )
        elif repartition and self.spark.conf.get(_SORTS, "true").lower() == "false":
            warn_user(
                f"{_SORTS} is false: Spark deals the rows to the workers by the order in which "
                "they arrive, so another fit, and a worker that is started again, may see other "
                "rows"
            )


def _is_kept(frame: Any) -> bool:
    level = frame.storageLevel
    return bool(level.useMemory or level.useDisk)


def drawn_in(frame: Any) -> list[str]:
    """The expressions in a frame's columns that are computed by chance, as Spark writes them.

    Functions of Spark ML (of a ``StringIndexerModel``) only say that they are, so that Spark runs
    them once: they give the same value for the same row. So do the name of a row's file, and its
    place where nothing has dealt the rows anew.

    Args:
        frame: A DataFrame, not of Spark Connect.
    """
    plans = frame._jdf.queryExecution()
    # without the columns that nobody reads, which takes longer
    return [] if plans.withCachedData().deterministic() else _drawn_in(plans.optimizedPlan())


def _drawn_in(plan: Any) -> list[str]:
    if plan.deterministic():
        return []
    own = [e for e in _items(plan.expressions()) if not e.deterministic()]
    below = [p for p in _items(plan.children()) if not p.deterministic()]
    placed = all(map(_keeps_places, _items(plan.children())))
    found = [name for e in own for name in _drawn_by(e, placed)]
    found += [name for p in below for name in _drawn_in(p)]
    return list(dict.fromkeys(found if own or below else [str(plan.nodeName())]))


def _keeps_places(plan: Any) -> bool:
    children = _items(plan.children())
    kept = not children or plan.nodeName() in ("Project", "Filter", "Sample", "Generate")
    return bool(kept) and all(map(_keeps_places, children))


def _drawn_by(expression: Any, placed: bool) -> list[str]:
    inner = [e for e in _items(expression.children()) if not e.deterministic()]
    found = [name for e in inner for name in _drawn_by(e, placed)]
    kind = str(expression.getClass().getSimpleName())
    if inner and not (kind in ("ScalaUDF", "PythonUDF") and not expression.udfDeterministic()):
        return found
    function = expression.function().getClass().getName() if kind == "ScalaUDF" else ""
    if function.startswith(_SPARK_ML) or kind.startswith("InputFile"):
        return found
    if placed and kind in ("MonotonicallyIncreasingID", "SparkPartitionID"):
        return found
    return [*found, str(expression)[:80]]


def _items(found: Any) -> list[Any]:
    return [found.apply(place) for place in range(found.size())]


def dealt(
    frame: Any,
    num_workers: int,
    *,
    in_order: bool = False,
    fed: int | None = None,
    group: str | None = None,
) -> Any:
    """The rows dealt in turn to ``num_workers`` partitions.

    Rows that the driver has are dealt by their numbers (``PLACE``), and arrive in their order. Of
    others the partition is decided by what they hold (Spark sorts them by their hash before it
    deals them) and by the partitions of the frame; in which order they arrive there, by chance.

    Args:
        in_order: Whether the rows of each partition have the order that they have in the frame.
        fed: How many partitions get rows, the first ones; None: all.
        group: A column; the rows in which it is equal go to one partition, in the frame's order.
    """
    from pyspark.sql import functions as F

    places = places_in(frame)
    if group is not None or (fed is None and not places):
        if not in_order and group is None:
            return frame.repartition(num_workers)
        placed = frame if places else frame.withColumn(PLACE, F.monotonically_increasing_id())
        spread = placed.repartition(num_workers, *([] if group is None else [group]))
        return spread.sortWithinPartitions(PLACE).drop(PLACE)
    fed = num_workers if fed is None else fed
    # the low bits are a row's number in its partition; each partition begins at another worker
    in_part = F.monotonically_increasing_id().bitwiseAND(F.lit((1 << 33) - 1))
    number = F.col(PLACE) if places else in_part + F.spark_partition_id()
    keys = F.array(*map(F.lit, partition_keys(num_workers)[:fed]))
    to = keys[F.pmod(number, F.lit(fed)).cast("int")]
    parts = frame.withColumn(_TO, to).repartition(num_workers, _TO).drop(_TO)
    by = [*places, *(name for name in frame.schema.names if name == ROLE)]
    return parts.sortWithinPartitions(*by).drop(PLACE) if places else parts


def partition_keys(count: int) -> list[int]:
    """For each of ``count`` partitions an int whose hash in Spark, modulo ``count``, is its number.

    That is Murmur3 (x86, 32 bits) with the seed 42.
    """
    keys = np.arange(64 * count, dtype=np.uint32)
    h: Any = keys * np.uint32(0xCC9E2D51)
    h = (h << 15 | h >> 17) * np.uint32(0x1B873593) ^ np.uint32(42)
    h = (h << 13 | h >> 19) * np.uint32(5) + np.uint32(0xE6546B64) ^ np.uint32(4)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> shift) * np.uint32(factor)
    found = dict(zip((((h ^ h >> 16).view(np.int32)) % count).tolist(), keys.tolist(), strict=True))
    return [found[number] for number in range(count)]


class Form(ABC):
    """Rows in one form; :func:`sparkdl.spark.forms.opening.form_of` makes it. On the driver.

    A method that a form does not override says that the form has no such thing.
    """

    words: ClassVar[str]
    """The form, for messages."""
    has_columns: ClassVar[bool] = False
    """Whether the rows have columns with names, so that the user says which one means what."""
    endless: ClassVar[bool] = False
    """Whether the rows have no end."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @abstractmethod
    def open(self, signature: Signature, columns: Columns) -> Source:
        """Checks the rows against the model and selects what it needs of them.

        Args:
            columns: Which columns mean what, for rows that have columns.

        Raises:
            DataError: The rows do not fit the model.
            ConfigError: Not a form of data that is known.
        """

    def frame(self, spark: Any = None) -> Any | None:
        """The rows as a DataFrame of Spark; None for rows without columns.

        Args:
            spark: The session for rows that belong to none; None: the active one.

        Raises:
            ResourceError: The session has been stopped.
        """
        return None

    def numbered(self, spark: object = None) -> Any:
        """:meth:`frame`, with a column ``PLACE`` beside those of rows that the driver has."""
        return self.frame(spark)

    def settled(self) -> Any:
        """The data as ``fit`` takes them, for several calls: tables of this process are shipped."""
        return self.data

    def arrays(
        self, signature: Signature, columns: Columns | None = None
    ) -> tuple[Any, ...] | None:
        """Arrays of numbers of this process, with the names of the model's inputs and outputs."""
        return None

    def has_column(self, name: str) -> bool:
        """Whether a text means a column of these rows, and not a path."""
        return False

    def cut(self, share: float, signature: Signature) -> tuple[Form, Form] | None:
        """The rows but the last ones, and these; None where Spark must choose them."""
        return None

    def like(self, training: Form, signature: Signature, columns: Columns) -> Form:
        """These rows in the form of others, if that can be made of them.

        Args:
            training: The others, which the model trains on.
            columns: Which columns of the others mean what.
        """
        return self

    def weights_apart(self, columns: Columns) -> tuple[Form, Columns]:
        """The rows with weights in columns that are no feature or label, too."""
        return self, columns

    def refuse_frames(self, argument: str) -> None:
        """Refuses DataFrames in a tuple, as arrays are passed.

        Raises:
            ConfigError: The data are such a tuple.
        """
        parts = self.data if isinstance(self.data, (tuple, list)) else ()
        if any(is_frame(part) or is_rdd(part) for part in parts):
            raise ConfigError(
                f"{argument} must be one DataFrame, without a tuple",
                expected="one DataFrame (or RDD) that has both features and labels",
                received=f"a tuple of {', '.join(type(part).__name__ for part in parts)}",
                hint=f"{argument}=df; features='column' and label='column' name the columns",
            )
