"""The rows of ``run(fn, data=...)`` on the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from sparkdl.config import Limits
from sparkdl.data.feed import Uneven
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.launch.feeding import FeedSettings
from sparkdl.launch.stream_feed import StreamSettings
from sparkdl.settings.values import (
    PATH,
    UserSettings,
    checked,
    one_of,
    or_none,
    require_flag,
    require_int,
    setting,
    whole,
)
from sparkdl.spark.forms.opening import form_of
from sparkdl.spark.forms.shipped import places_in
from sparkdl.spark.forms.wire import wire_names
from sparkdl.spark.runs.capacity import check_barrier, default_parallelism, wait_for_slots
from sparkdl.spark.session.frames import column_named, is_vector_column
from sparkdl.spark.session.running import is_connect


def check_trigger(trigger: object) -> Mapping[str, Any]:
    """Returns arguments of Spark's trigger; raises ConfigError."""
    if isinstance(trigger, Mapping) and trigger:
        return trigger
    raise ConfigError(
        "trigger must be arguments of Spark's trigger",
        expected="{'availableNow': True} or {'processingTime': '10 seconds'}",
        received=repr(trigger)[:200],
    )


@dataclass(frozen=True)
class Feeding(UserSettings):
    """How ``run(fn, data=...)`` gives the rows to the functions, beside ``epochs`` and ``shuffle``.

    Args:
        seed: Seed of the order that ``shuffle`` makes.
        uneven: What happens where ranks have different numbers of rows. ``'drop'``: each epoch has
            as many as the rank with fewest, so all take equal steps; ``'pad'``: as many as the rank
            with most, others begin again; ``'join'``: as many batches as the rank with most; a rank
            whose rows are used up gets arrays of no rows (``len`` 0), with which its function
            takes part in what the ranks do together; ``'keep'``: each its own, for functions in
            which the ranks do not wait for each other. A stream's micro-batches are treated as
            epochs, without ``'join'``. None: ``'drop'``, and ``'keep'`` for a stream, of which no
            row is lost.
        checkpoint_dir: Folder in which Spark keeps its place in a stream: another run with the same
            folder goes on there. A micro-batch that was not taken to its end comes again, with the
            same ``batch_id``. None: each run begins anew.
        trigger: When a stream's micro-batch begins, as arguments of Spark's
            ``DataStreamWriter.trigger``, such as ``{'processingTime': '10 seconds'}``;
            ``{'availableNow': True}`` ends with the rows that are there. None: as soon as there are
            rows.

    Raises:
        ConfigError: A value that is not of its kind.
    """

    seed: int = setting(0, whole(0))
    uneven: Uneven | None = setting(None, or_none(one_of(get_args(Uneven))))
    checkpoint_dir: str | None = setting(None, or_none(PATH))
    trigger: Mapping[str, Any] | None = setting(None, or_none(checked(check_trigger)))


def fed_frame(
    data: object, spark: object, *, streams: bool = False, deals: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """The rows as a frame that ``mapInArrow`` takes, and the names of its columns.

    Args:
        spark: The session; None: the active one.
        streams: Whether the rows may have no end.
        deals: Whether the rows are dealt to ranks; rows of the driver then have numbers.

    Raises:
        ConfigError: It is no DataFrame.
        ResourceError: Its session has been stopped.
    """
    from pyspark.ml.functions import vector_to_array

    form = form_of(data)
    endless = form.endless and not streams
    frame = form.numbered(spark) if deals else form.frame(spark)
    if frame is None or endless or len(set(frame.columns)) < len(frame.columns):
        raise ConfigError(
            "data cannot be fed to the ranks",
            expected="a DataFrame whose rows end and whose columns have different names",
            received="a stream" if endless else type(form.data).__name__,
            hint="arrays: data=pandas.DataFrame({'x': list(x), 'y': list(y)}); what is too large "
            "for the driver: the path of Parquet or TFRecord files",
        )
    columns, places = [], places_in(frame)
    fields = [field for field in frame.schema.fields if field.name not in places]
    for name, field in zip(wire_names(len(fields)), fields, strict=True):
        column = column_named(field.name)
        if is_vector_column(field.dataType):
            column = vector_to_array(column)
        columns.append(column.alias(name))
    return frame.select(*places, *columns), tuple(field.name for field in fields)


def feed_settings(
    data: object,
    epochs: int | None,
    shuffle: bool,
    feeding: Feeding,
    limits: Limits,
    uneven: Uneven,
) -> FeedSettings | None:
    """The checked settings of a feed, whose columns are not known yet; None without data.

    Raises:
        ConfigError: An argument that cannot be used, or that has no effect without data.
    """
    if epochs is not None:
        epochs = require_int("epochs", epochs, 1)
    shuffle = require_flag("shuffle", shuffle)
    of_data = {"memory_budget_mb", "stall_timeout_s"}
    told = [*feeding.changed(), *(name for name in limits.changed() if name in of_data)]
    if data is None and (told or epochs != 1 or shuffle):
        raise ConfigError(
            "run is told how to give rows to the function, and has none",
            expected="data=..., or none of epochs, shuffle, feeding=Feeding(...), memory_budget_mb "
            "and stall_timeout_s",
            received="data=None, " + ", ".join(told or ["epochs or shuffle"]),
        )
    if data is None:
        return None
    return FeedSettings(
        (), epochs, shuffle, feeding.seed, uneven, limits.memory_budget_mb << 20,
        limits.stall_timeout_s,
    )  # fmt: skip


def stream_settings(settings: FeedSettings, fed: int | None = None) -> StreamSettings:
    """The same settings for rows without an end.

    Args:
        fed: How many ranks get rows, the first ones; None: all.

    Raises:
        ConfigError: The rows are to be given several times, or ranks are to join others.
    """
    if settings.uneven == "join":
        raise ConfigError(
            "the micro-batches of a stream give no batches without rows",
            expected="uneven='keep' (the default), 'drop' or 'pad' with a streaming DataFrame",
            received="uneven='join'",
            hint="a micro-batch may have no rows for a rank at all, which then knows no shapes",
        )
    if settings.epochs != 1:
        raise ConfigError(
            "the rows of a stream are given once",
            expected="epochs=1 (the default) with a streaming DataFrame",
            received=f"epochs={settings.epochs}",
            hint="the feed goes on for as long as the stream does",
        )
    return StreamSettings(
        settings.shuffle, settings.seed, settings.memory_budget_bytes,
        math.inf if settings.stall_timeout_s is None else settings.stall_timeout_s, fed,
    )  # fmt: skip


def check_streaming(data: object, feeding: Feeding) -> None:
    """Refuses a stream that cannot feed functions, and arguments about one where there is none.

    Raises:
        ConfigError: No stream, or a Spark Connect session.
        ResourceError: The session of the data has been stopped.
    """
    form = form_of(data)
    if not form.endless:
        if feeding.checkpoint_dir is None and feeding.trigger is None:
            return
        raise ConfigError(
            "run is told how to read a stream, and has none",
            expected="data=<a streaming DataFrame> for checkpoint_dir and trigger",
            received=f"data={type(form.data).__name__}",
            hint="spark.readStream makes a streaming DataFrame",
        )
    if is_connect(form.data.sparkSession):
        raise ConfigError(
            "a stream cannot feed functions over Spark Connect",
            expected="a session on the driver, which tells the ranks what comes",
            received="a Spark Connect client: Spark would run that on its server",
            hint="run this on the driver",
        )


def stream_workers(spark: object, num_workers: int | None) -> int:
    """Ranks that a stream feeds: those asked for, or one less than there are slots.

    Raises:
        ResourceError: There is no slot beside the ranks, or barrier stages cannot run.
    """
    count = num_workers or max(1, default_parallelism(spark) - 1)
    slots = wait_for_slots(spark, count + 1)
    if slots is not None and slots == count:
        raise ResourceError(
            f"{count} ranks hold all slots, and the tasks that bring a stream's rows find none",
            expected=f"at least {count + 1} slots: the ranks' and one more",
            received=f"{slots} slots",
            hint="one worker less, or one more core (one more GPU, where tasks ask for them)",
        )
    check_barrier(spark, count)
    return count
