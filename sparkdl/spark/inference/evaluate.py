"""evaluate: the metric state of every partition, added up on the driver."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.config import UseGpu
from sparkdl.data import Batches, DataSpec, decode, read_partition, rows_from_numpy
from sparkdl.data.batches import stack_of
from sparkdl.errors import DataError
from sparkdl.launch.devices import DeviceRequest, start_framework
from sparkdl.launch.task import RankContext, Result, ReturningTask, of_kind
from sparkdl.learner.archives.archive import ModelArchive
from sparkdl.learner.framework import debug_limits
from sparkdl.learner.signature import Signature
from sparkdl.spark.forms.arrays import arrays_of, wanted_spec
from sparkdl.spark.forms.sources import Source
from sparkdl.spark.forms.wire import named_batches
from sparkdl.spark.runs.capacity import default_parallelism
from sparkdl.spark.runs.launcher import run_on_partitions
from sparkdl.training.learning import BatchStack

if TYPE_CHECKING:
    from sparkdl.learner.steps.keras_learner import KerasLearner


@dataclass(frozen=True)
class EvaluateTask(ReturningTask):
    """Evaluates a partition; see :class:`sparkdl.launch.task.Task`.

    Args:
        most_steps: Batches of a partition that count, at most; None for all.
    """

    archive: ModelArchive
    spec: DataSpec
    batch_size: int
    use_gpu: UseGpu
    most_steps: int | None = None

    @property
    def devices(self) -> DeviceRequest:
        return DeviceRequest(self.archive.backend, self.use_gpu)

    def learner(self, rank: RankContext) -> KerasLearner:
        """The model in this process, on the rank's devices."""
        start_framework(self.devices.place(rank.resources))
        from sparkdl.learner.cache import cached_learner

        learner = cached_learner(self.archive, self.spec.form(self.archive.named))
        learner.take_stream(0, 1)  # it evaluates as one process does, whatever it trained in
        return learner

    def run(self, rank: RankContext, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The partition's metric state."""
        if self.spec.encodes:
            self.learner(rank)
        named = named_batches(batches, self.spec)
        cut = evaluation_stacks if self.spec.group is None else grouped_stacks
        stacks = cut(named, self.spec, self.batch_size, self.most_steps)
        first = next(stacks, None)  # rows that do not fit are found before the framework starts
        if first is None:
            return
        learner = self.learner(rank)
        from sparkdl.learner.cache import keras_settings

        with keras_settings(self.archive):
            state = learner.evaluate(prepared(chain([first], stacks), learner.prepare))
        if state.size:
            yield from Result(rank.rank, "metrics", json.dumps(state.tolist())).batches()


def evaluate_source(
    source: Source, archive: ModelArchive, *, batch_size: int, use_gpu: UseGpu
) -> npt.NDArray[np.float64]:
    """The metric state over all rows: the sum of the partitions' states.

    Raises:
        WorkerError: A task raised.
        DataError: The data do not fit, or there are none.
    """
    task = EvaluateTask(archive, source.spec, batch_size, use_gpu, debug_limits()[1])
    frame = source.frame
    if source.spec.group is not None:
        frame, _ = source.spread(default_parallelism(source.spark))
    told = of_kind(run_on_partitions(frame, task, "evaluate"), "metrics").values()
    if not told:
        raise _no_rows()
    state: npt.NDArray[np.float64] = np.sum([json.loads(r.text) for r in told], axis=0)
    return state


def prepared(
    stacks: Iterator[BatchStack], prepare: Callable[[BatchStack], BatchStack] | None
) -> Iterator[BatchStack]:
    """The stacks as the model takes them: batch by batch where a preprocessor makes them."""
    if prepare is None:
        yield from stacks
        return
    for stack in stacks:
        yield from map(prepare, stack.single_batches())


_ALONE, _TOGETHER = 128, 16
"""Batches that go one at a time, before it pays that a call of several is compiled, too."""
_MOST_BYTES = 32 << 20


def evaluation_stacks(
    batches: Iterator[pa.RecordBatch], spec: DataSpec, batch_size: int, most: int | None = None
) -> Iterator[BatchStack]:
    """Arrow batches as stacks; one stack at a time is decoded.

    A compiled call costs as much as a small network's forward pass. So after 128 batches a
    stack has 16 of them, if they are of one shape: the same batches in the same order, and equal
    bits. After ``most`` batches the rest of the rows is left out.
    """
    together = _TOGETHER if _is_stackable(spec, batch_size) else 1
    row = done = 0
    for record in batches:
        start = 0
        while start < record.num_rows and (most is None or done < most):
            left = record.num_rows - start
            count = together if done >= _ALONE and left >= together * batch_size else 1
            count = min(count, count if most is None else most - done)
            rows = min(count * batch_size, left)
            yield stack_of(decode(record.slice(start, rows), spec, row + start), count)
            start, done = start + rows, done + count
        row += record.num_rows


def grouped_stacks(
    batches: Iterator[pa.RecordBatch], spec: DataSpec, batch_size: int, most: int | None = None
) -> Iterator[BatchStack]:
    """The same with all rows of a group in one batch; all rows are read first."""
    with read_partition(batches, spec) as rows:
        yield from Batches(rows.train, batch_size, shuffle=False, steps=most).stacks(0, 1)


def _is_stackable(spec: DataSpec, batch_size: int) -> bool:
    """Whether all batches have one shape, and several fit in memory when they are decoded."""
    shapes = [entry.value_shape for entry in spec.entries]
    if any(entry.padding for entry in spec.entries) or any(None in shape for shape in shapes):
        return False
    row_bytes = 8 * sum(math.prod(d or 0 for d in shape) for shape in shapes)
    return _TOGETHER * batch_size * row_bytes <= _MOST_BYTES


def evaluate_arrays(
    model: object, data: Sequence[Any], signature: Signature, *, batch_size: int
) -> npt.NDArray[np.float64]:
    """Evaluates small NumPy data here, without Spark.

    Args:
        data: ``(x, y)`` or ``(x, y, sample_weight)``.

    Returns:
        The metric state.

    Raises:
        DataError: The data do not fit the model, or there are none.
    """
    from sparkdl.learner import make_learner

    x, y, weight = arrays_of(data)
    rows = rows_from_numpy(x, y, weight, wanted_spec(x, y, weight, signature))
    learner = make_learner(model)
    batches = Batches(
        rows, batch_size, shuffle=False, steps=debug_limits()[1], prepare=learner.prepare
    )
    with closing(batches.stacks(0, 8)) as stacks:
        state: npt.NDArray[np.float64] = np.asarray(learner.evaluate(stacks))
    if not state.size:
        raise _no_rows()
    return state


def _no_rows() -> DataError:
    return DataError(
        "there are no rows to evaluate", expected="at least one row", received="0 rows"
    )
