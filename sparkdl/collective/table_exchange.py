"""Tables whose rows are spread over the ranks: who owns a row, and how it travels.

In a step each rank pulls the rows of its batch from their owners, call by call of the layers, and
at the end all ranks send the gradients of these rows. An owner adds up what came for a row, in the
order of the ranks, and applies one row step. Each message of an all-to-all begins with what a rank
is about to do, so that a rank without a batch knows how to serve the others.

A pull is two all-to-alls, ids and rows. With its gradients a rank tells the ids of its next batch,
if it knows them: then the owners begin the next pull with these rows, and it is one all-to-all. A
rank that asks for other ids after all gets them in a second one.

Of a softmax each rank gets the features of all, and tells of its own classes; with the gradient by
the losses of all it takes the steps of its centers, and sends each rank its part of the gradient by
the features.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import Array
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer
from sparkdl.errors import ProtocolError
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference
from sparkdl.tables.classes import (
    ClassPart,
    ClassSpec,
    Measured,
    Measures,
    Softmax,
    find_measured,
    joined,
    trained_twice,
)
from sparkdl.tables.index import by_owner
from sparkdl.tables.service import CallsOfStep, IdArray, TableSpec
from sparkdl.tables.store import RowStore, merged
from sparkdl.training.changes import VariableChanges
from sparkdl.training.learning import BatchStack, SharedLearner
from sparkdl.training.syncing import StepSynchronizer
from sparkdl.weights import FloatArray

_SERVES, _DONE, _PULLS, _LOOKS_UP, _ENDS_STEP, _MEASURES, _SCORES, _LEARNS, _TRIES = range(9)
_WORDS = (
    "serves others", "is done", "pulls rows", "looks rows up", "ends a step",
    "measures classes", "scores classes", "trains classes", "tries a step",
)  # fmt: skip
_HEAD = 3
"""Numbers before the ids of a message: what the rank does, the number of the table, and flags of a
pull; of the end of a step and of classes in training the weight of the rank instead."""
_ANEW, _AS_TOLD = 1, 2
"""Flags: the step begins anew; the ids are those that the rank has told in the step before."""
ByteArray = npt.NDArray[np.uint8]
_NO_IDS, _NO_ROWS = np.empty(0, np.int64), np.empty(0, np.float32)
_NO_BYTES = np.empty(0, np.uint8)


@dataclass
class _Pull:
    """One call of a layer in a step."""

    table: str
    ids: IdArray  # this rank's
    order: npt.NDArray[np.intp]  # the same, owner by owner
    edges: Sequence[slice]  # of each owner's within them
    asked: Sequence[IdArray] = ()  # what each rank asks this one for
    gradients: FloatArray | None = None

    def ids_for(self, rank: int) -> IdArray:
        """Those that ``rank`` owns."""
        return self.ids[self.order[self.edges[rank]]]

    def gradients_for(self, rank: int) -> FloatArray:
        """Those of the rows that ``rank`` owns, flat; empty if there are none."""
        if self.gradients is None:
            return _NO_ROWS
        return self.gradients[self.order[self.edges[rank]]].reshape(-1)


class TableExchange:
    """One rank's part in the tables of a model; a :class:`sparkdl.tables.service.RowService`.

    Args:
        tables: All tables of the model, the same on all ranks.
    """

    def __init__(self, communicator: Communicator, tables: Iterable[TableSpec]) -> None:
        self._communicator = communicator
        specs = {spec.name: spec for spec in tables}
        self._names = sorted(specs)
        self._specs = specs
        ranks = communicator.size
        self.stores = {name: specs[name].store(ranks) for name in self._names}
        """Table name -> the rows that this rank owns."""
        self._parts: dict[str, ClassPart] = {}
        self._measured: dict[str, Measured] = {}
        self._edges: dict[str, Sequence[slice]] = {}  # of each rank's rows among those measured
        self._measures = 0
        self._learned: set[str] = set()  # tables whose centers had their step
        self._weight, self._rate = 0.0, 0.0
        self._pulls: CallsOfStep[_Pull] = CallsOfStep()
        self._ahead: list[_Pull] = []  # the next calls, as far as the ranks have told them
        self._foretells = True  # as long as what is told is what is asked for
        self.sent_bytes = 0

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        """See :class:`sparkdl.tables.service.RowService`; all other ranks pull, too, or serve."""
        told = self._ahead[0] if training and self._ahead else None
        as_told = told is not None and told.table == table and np.array_equal(told.ids, ids)
        pull = told if told is not None and as_told else self._call(table, ids)
        self._foretells &= as_told or told is None or not len(told.ids)
        flags = _ANEW * self._pulls.have_gradients + _AS_TOLD * as_told
        ranks = range(self._communicator.size)
        came = self._tell(
            [_PULLS if training else _LOOKS_UP, self._names.index(table), flags],
            self._rows_ahead() if training else (),
            () if as_told else [pull.ids_for(rank) for rank in ranks],
        )
        replies = self._serve(came, pull)
        dim = self.stores[table].dim
        rows = np.empty((len(ids), dim), np.float32)
        for edge, reply in zip(pull.edges, replies, strict=True):
            rows[pull.order[edge]] = reply.reshape(-1, dim)
        return rows, self._pulls.last

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """See :class:`sparkdl.tables.service.RowService`; :meth:`end_step` sends them."""
        pull = self._pulls.of(pulled)
        if (
            self._width(pull.table) > gradients.shape[1]
        ):  # as numbers beside the gradient: exact up to 2^24
            gradients = np.column_stack([gradients, counts.astype(np.float32)])
        pull.gradients = np.asarray(gradients, np.float32)

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        """See :class:`sparkdl.tables.service.RowService`; all other ranks measure, or serve."""
        head = [_MEASURES if training else _SCORES, self._names.index(table), 0]
        came = self._tell(head, [labels] * self._communicator.size)
        softmax, edges = self._measure(came, features)
        return softmax.of(edges[self._communicator.rank]), self._measures

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """See :class:`sparkdl.tables.service.RowService`; all other ranks learn, or serve."""
        of = find_measured(self._measured, measured)
        doing = _TRIES if trying else _LEARNS
        head = [doing, self._names.index(of.table), _to_bits(self._weight)]
        numbers = upstream.astype(np.float64).view(np.int64)
        return self._learn(self._tell(head, [numbers] * self._communicator.size))

    def _width(self, table: str) -> int:
        """Numbers that travel for a row; its owner may want to know how often its id was seen."""
        store = self.stores[table]
        return store.dim + (store.entry is not None or store.tracks)

    def begin_step(self, rows: int, learning_rate: float) -> None:
        """Says of the coming step what :meth:`end_step` is told after it."""
        self._weight, self._rate = float(rows), learning_rate

    def end_step(
        self,
        rows: int,
        learning_rate: float,
        loss_scale: float = 1.0,
        following: Sequence[tuple[str, IdArray]] = (),
        beside: ByteArray = _NO_BYTES,
    ) -> list[ByteArray]:
        """One step of all tables with the mean of the ranks' gradients, weighed by their rows.

        Args:
            rows: Rows of this rank's batch. 0 on all ranks: no step, a scaled loss has overflowed.
            learning_rate: The rate of the model's optimizer in this step, the same on all ranks.
            loss_scale: The factor that the loss had, by which gradients are divided.
            following: Table and ids of each call of the next step, as far as they are known.
            beside: What travels to all ranks with the gradients.

        Returns:
            What came beside from each rank; nothing from one without a batch.
        """
        for pull in self._pulls if loss_scale != 1.0 else ():
            if pull.gradients is not None:
                dim = self.stores[pull.table].dim  # the number behind it counts the id
                pull.gradients[:, :dim] /= np.float32(loss_scale)
        present = [int(pull.gradients is not None) for pull in self._pulls]
        calls = [self._call(table, ids) for table, ids in following if self._foretells]
        parts = []
        for rank in range(self._communicator.size):
            part = [np.array([beside.size]), _as_integers(beside)]
            part += [_as_integers(pull.gradients_for(rank)) for pull in self._pulls]
            for call in calls:
                ids = call.ids_for(rank)
                part += [np.array([self._names.index(call.table), len(ids)]), ids]
            parts.append(np.concatenate(part))
        came = self._tell([_ENDS_STEP, 0, _to_bits(rows), *present], parts)
        return self._step(came, learning_rate, calls)

    def serve_step(self, learning_rate: float) -> list[ByteArray]:
        """Takes part in a step without a batch, until its end; see :meth:`end_step`."""
        self.begin_step(0, learning_rate)
        while True:
            came = self._tell([_SERVES, 0, 0], self._rows_ahead())
            if self._doing(came)[0] == _ENDS_STEP:
                return self._step(came, learning_rate, [])
            self._serve(came)

    def serve_until_done(self) -> None:
        """Serves the other ranks until all have called this: each has evaluated its rows."""
        while True:
            came = self._tell([_DONE, 0, 0])
            if self._doing(came)[0] == _DONE:
                self._forget()
                return
            self._serve(came)

    def _tell(self, head: Sequence[int], *parts: Sequence[IdArray]) -> list[IdArray]:
        """Tells all ranks what this one does, and each its own of ``parts``."""
        heads = [np.array(head, np.int64)] * self._communicator.size
        given = [part for part in parts if part]
        messages = [np.concatenate(each) for each in zip(heads, *given, strict=True)]
        return [np.asarray(array, np.int64) for array in self._exchange(messages)]

    def _call(self, table: str, ids: IdArray) -> _Pull:
        return _Pull(table, ids, *by_owner(ids, self._communicator.size))

    def _rows_ahead(self) -> list[IdArray]:
        """What the ranks have told that they ask for next; rows, as integers with the same bits."""
        return [
            _as_integers(self.stores[pull.table].pull(ids).reshape(-1))
            for pull in self._ahead[:1]
            for ids in pull.asked
        ]

    def _exchange_rows(self, parts: Sequence[FloatArray]) -> list[FloatArray]:
        return [np.asarray(array, np.float32) for array in self._exchange(parts)]

    def _exchange(self, parts: Sequence[Array]) -> list[Array]:
        own, sent = self._communicator.rank, list(parts)
        sent[own] = sent[own][:0]  # small messages travel whole to all ranks
        self.sent_bytes += sum(part.nbytes for part in sent)
        found = self._communicator.all_to_all(sent)
        found[own] = parts[own]
        return found

    def _doing(self, came: Sequence[IdArray]) -> tuple[int, str]:
        """The work of the ranks that do not only serve, and its table: all the same, or all are
        done."""
        doing = {(int(array[0]), int(array[1])) for array in came if array[0] > _DONE}
        if len(doing) > 1 or (not doing and any(array[0] == _SERVES for array in came)):
            raise ProtocolError(
                "the ranks disagree about their tables",
                expected="the same layers in the same order on all ranks",
                received=", ".join(
                    f"rank {r} {_WORDS[int(array[0])]}" for r, array in enumerate(came)
                ),
                hint="does the model call other layers on some batches?",
            )
        work, number = doing.pop() if doing else (_DONE, 0)
        return work, self._names[number] if self._names else ""

    def _serve(self, came: Sequence[IdArray], pull: _Pull | None = None) -> list[FloatArray]:
        """Sends the rows that the ranks ask for; returns those that this rank asked for.

        Args:
            pull: This rank's call; None: it only serves.
        """
        doing, table = self._doing(came)
        store = self.stores[table]
        if doing in (_MEASURES, _SCORES):
            self._measure(came, np.empty((0, store.dim), np.float32))
            return []
        if doing in (_LEARNS, _TRIES):
            self._learn(came)
            return []
        training, pull = doing == _PULLS, pull or self._call(table, _NO_IDS)
        told = self._ahead.pop(0) if training and self._ahead else self._call(table, _NO_IDS)
        replies, asked, lacking = [], [], [_NO_IDS] * len(came)
        for rank, (array, edge) in enumerate(zip(came, told.edges, strict=True)):
            message = _Message(array[_HEAD:])
            size = told.order[edge].size * self.stores[told.table].dim
            replies.append(message.take(size, np.float32))
            as_told = training and array[0] > _DONE and array[_HEAD - 1] & _AS_TOLD
            if array[0] > _DONE and not as_told:
                lacking[rank] = message.rest
            asked.append(told.asked[rank] if as_told else lacking[rank])
        if any(ids is not _NO_IDS for ids in lacking):
            fresh = self._exchange_rows(
                [store.pull(ids, create=training).reshape(-1) for ids in lacking]
            )
            replies = replies if pull is told else fresh
        if training:
            if any(array[0] == _PULLS and array[_HEAD - 1] & _ANEW for array in came):
                self._forget()
            pull.asked = asked
            self._pulls.append(pull)
        return replies

    def _part(self, table: str) -> ClassPart:
        if table not in self._parts:
            rank, ranks = self._communicator.rank, self._communicator.size
            classes = self._specs[table].classes
            assert classes is not None
            self._parts[table] = ClassPart(self.stores[table], classes, rank, ranks)
        return self._parts[table]

    def _measure(
        self, came: Sequence[IdArray], features: FloatArray
    ) -> tuple[Softmax, Sequence[slice]]:
        """The softmax of the rows of all ranks, and where each rank's are."""
        doing, table = self._doing(came)
        training = doing == _MEASURES
        of_ranks = [array[_HEAD:] if array[0] > _DONE else array[:0] for array in came]
        places = np.cumsum([0, *map(len, of_ranks)]).tolist()
        edges = [slice(a, b) for a, b in itertools.pairwise(places)]
        labels = np.concatenate(of_ranks)
        flat = self._exchange_rows([features.reshape(-1)] * self._communicator.size)
        together = np.concatenate(flat).reshape(len(labels), -1) if len(labels) else features
        measures = self._part(table).measure(together, labels, training=training).to_array()
        parts = self._exchange_rows([measures.reshape(-1)] * self._communicator.size)
        softmax = joined([Measures.from_array(part) for part in parts])
        if training:
            self._measures += 1
            self._measured[table] = Measured(self._measures, table, together, labels, softmax)
            self._edges[table] = edges
        return softmax, edges

    def _learn(self, came: Sequence[IdArray]) -> FloatArray:
        """The step of this rank's centers; returns the gradient by this rank's features."""
        doing, table = self._doing(came)
        trying = doing == _TRIES
        of, edges = self._measured.pop(table), self._edges.pop(table)
        if table in self._learned:
            raise trained_twice()
        if not trying:
            self._learned.add(table)
        upstream = np.zeros(len(of.labels), np.float32)
        shares = np.zeros(len(of.labels), np.float32)
        weights = [_from_bits(array[2]) if array[0] > _DONE else 0.0 for array in came]
        total = sum(weights)
        for edge, array, weight in zip(edges, came, weights, strict=True):
            if array[0] > _DONE:
                upstream[edge] = array[_HEAD:].view(np.float64)
                shares[edge] = weight / total
        own = self._specs[table].learning_rate
        rate = None if trying else self._rate if own is None else own
        onward = self._part(table).learn(
            of.features, of.labels, of.softmax, upstream, shares, rate
        )  # fmt: skip
        parts = self._exchange_rows([onward[edge].reshape(-1) for edge in edges])
        found = np.zeros(parts[0].shape, np.float32)
        for part in parts:
            found += part
        return found.reshape(-1, self.stores[table].dim)

    def _step(
        self, came: Sequence[IdArray], learning_rate: float, following: list[_Pull]
    ) -> list[ByteArray]:
        self._doing(came)
        ends = [array[0] == _ENDS_STEP for array in came]
        weights = [_from_bits(a[_HEAD - 1]) if e else 0.0 for a, e in zip(came, ends, strict=True)]
        total = sum(weights)
        looked_up = [name for name in self._names if self._specs[name].classes is None]
        ids = {name: [_NO_IDS] for name in looked_up}
        parts = {name: [np.empty((0, self._width(name)), np.float32)] for name in looked_up}
        told: list[list[tuple[str, IdArray]]] = [[] for _ in came]
        beside = [_NO_BYTES for _ in came]
        for rank in np.flatnonzero(ends).tolist():
            message = _Message(came[rank][_HEAD + len(self._pulls) :])
            beside[rank] = message.take(int(message.take(1)[0]), np.uint8)
            for number, pull in enumerate(self._pulls):
                if came[rank][_HEAD + number]:
                    shape = len(pull.asked[rank]), self._width(pull.table)
                    part = message.take(shape[0] * shape[1], np.float32).reshape(shape)
                    if weights[rank] > 0:
                        share = np.float32(weights[rank] / total)
                        part[:, : self.stores[pull.table].dim] *= share
                        ids[pull.table].append(pull.asked[rank])
                        parts[pull.table].append(part)
            while len(message.rest):
                number, count = message.take(2).tolist()
                told[rank].append((self._names[number], message.take(count)))
        for table in looked_up if total > 0 else ():
            values, dim = np.concatenate(parts[table]), self.stores[table].dim
            seen = values[:, dim].astype(np.int64) if self._width(table) > dim else None
            unique, summed, times = merged(np.concatenate(ids[table]), values[:, :dim], seen)
            own = self._specs[table].learning_rate
            # A step of no rows is one, too: the parts of all ranks have the same clock.
            rate = learning_rate if own is None else own
            self.stores[table].push(unique, summed, rate, times)
        self._forget()
        longest = max(told, key=len)  # a rank tells of all calls, or of none
        self._ahead = following or [self._call(table, _NO_IDS) for table, _ in longest]
        for place, pull in enumerate(self._ahead):
            pull.asked = [calls[place][1] if calls else _NO_IDS for calls in told]
        return beside

    def _forget(self) -> None:
        self._pulls.forget()
        self._learned.clear()


class _Message:
    """Reads the arrays that a message has one after another, each from a new integer on."""

    def __init__(self, rest: IdArray) -> None:
        self.rest = rest

    def take(self, count: int, kind: type[np.generic] = np.int64) -> npt.NDArray[Any]:
        """The next array, of so many numbers."""
        words = -(-count * np.dtype(kind).itemsize // 8)
        found, self.rest = self.rest[:words].view(kind)[:count], self.rest[words:]
        return found


def _as_integers(numbers: Array) -> IdArray:
    """The bits of a flat array as integers, filled up by zeros."""
    missing = np.zeros(-numbers.nbytes % 8 // numbers.itemsize, numbers.dtype)
    return (np.append(numbers, missing) if missing.size else numbers).view(np.int64)


def _to_bits(weight: float) -> int:
    """A number of 64 bits as the integer with the same bits."""
    return int(np.float64(weight).view(np.int64))


def _from_bits(bits: np.int64) -> float:
    return float(bits.view(np.float64))


class TableSteps(StepSynchronizer):
    """The steps of a model with tables.

    Args:
        dense: The steps of the model's variables.
        communicator: The communicator of ``dense``; the tables use a group of their own.
        checkpoints: Where the rows are kept from epoch to epoch.
        state: What :meth:`save_state` returned in an earlier run; empty for none.
        ignores_nan: Gradients of rows that are not finite are taken; else they are an error.
    """

    def __init__(
        self,
        dense: AllReduceGradientSynchronizer,
        communicator: Communicator,
        checkpoints: TableCheckpoints,
        state: bytes = b"",
        *,
        ignores_nan: bool = False,
    ) -> None:
        self._ignores_nan = ignores_nan
        self._dense, self._checkpoints, self._state = dense, checkpoints, state
        self._communicator = communicator.group(range(communicator.size))
        self._exchange = TableExchange(self._communicator, ())
        self._steps = self._saved_at = 0
        self.stop_wanted = self.stop_agreed = False
        self._ids_of: Callable[[BatchStack], list[tuple[str, IdArray]]] = lambda _: []

    @property
    def stores(self) -> Mapping[str, RowStore]:
        """Table name -> the rows that this rank owns."""
        return self._exchange.stores

    def start(
        self, learner: SharedLearner, root: int = 0, scale: float = 1.0, steps: int = 0
    ) -> None:
        """Makes or loads the rows that this rank owns, and gives all ranks the root's variables."""
        self._exchange = TableExchange(self._communicator, learner.tables.specs)
        stores = self._exchange.stores
        for store in stores.values():
            store.on_nan = "ignore" if self._ignores_nan else "raise"
        rank, ranks = self._communicator.rank, self._communicator.size
        if self._state:
            reference = TableReference.from_bytes(self._state)
            self._steps = self._saved_at = reference.step
            for name, store in stores.items():
                reference.load(name, store, rank, ranks)
        else:
            learner.tables.give_rows(stores, rank, ranks)
        learner.tables.serve_from(self._exchange)
        self._ids_of = learner.tables.id_reader()
        self._dense.start(learner, root, scale, steps)

    def train(self, learner: SharedLearner, stack: BatchStack) -> None:
        together = self._together(learner)
        for part in [stack] if together else stack.single_batches():
            self._train(learner, part, together)
            self._steps += part.num_batches

    def _train(self, learner: SharedLearner, stack: BatchStack, together: bool) -> None:
        optimizer, rows = learner.optimizer, stack.num_rows // stack.num_batches
        rate, scale = optimizer.learning_rate, None if together else optimizer.loss_scale
        before = optimizer.step if scale else 0
        following = iter(self._following(stack))

        def end_step(beside: ByteArray, rows: int = rows) -> list[ByteArray]:
            told = next(following, ())
            return self._exchange.end_step(rows, rate, scale or 1.0, told, beside)

        self._exchange.begin_step(rows, rate)
        with self._explained():
            self._dense.train(learner, stack, end_step if together else None)
            if not together:
                taken = scale is None or optimizer.step > before  # all ranks know the same
                end_step(_NO_BYTES, rows if taken else 0)

    def _together(self, learner: SharedLearner) -> bool:
        """Whether rows and variables travel together, in all steps of a stack: nothing that rows
        depend on changes within it. Alike on all ranks."""
        optimizer = learner.optimizer
        return not (optimizer.has_schedule or optimizer.scales_loss or self._dense.in_graph)

    def _following(self, stack: BatchStack) -> list[list[tuple[str, IdArray]]]:
        """Tables and ids of the calls of each batch but the first, as far as they are known."""
        try:
            batches = itertools.islice(stack.single_batches(), 1, None)
            return [self._ids_of(batch) for batch in batches]
        except Exception:  # the layers before the ids cannot be computed by themselves
            return []

    def skip(self, learner: SharedLearner) -> None:
        """Takes part in one step of the other ranks, and serves their pulls meanwhile."""
        with self._explained(), ThreadPoolExecutor(1, "sparkdl-tables") as threads:
            served = threads.submit(self._exchange.serve_step, learner.optimizer.learning_rate)
            try:
                together = self._together(learner)
                self._dense.skip(learner, (lambda _: served.result()) if together else None)
            except BaseException:
                self._communicator.close()  # ends the wait of the thread
                raise
            served.result()
        self._steps += 1

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within, the learner evaluates; leaving, it serves the ranks that are not done yet."""
        with self._explained():
            yield
            self._exchange.serve_until_done()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        self._dense.stop_wanted = self.stop_wanted
        try:
            yield
            self.stop_agreed = self.stop_agreed or self._dense.stop_agreed
            self._dense.stop_agreed = False
        except Exception as error:
            cause = self._communicator.explain(error)
            if cause is error:
                raise
            raise cause from error

    def end_epoch(self, learner: SharedLearner) -> None:
        self._dense.end_epoch(learner)

    def save_state(self, learner: SharedLearner) -> bytes:
        """Writes the rows of all ranks, each its own; returns where they are."""
        if not self._state or self._saved_at != self._steps:
            rank, ranks = self._communicator.rank, self._communicator.size
            names = tuple(sorted(self.stores))
            mine = b""
            if rank == 0:
                mine = self._checkpoints.after(self._state, self._steps, names).to_bytes()
            state = self._communicator.all_gather(np.frombuffer(mine, np.uint8))[0].tobytes()
            reference = TableReference.from_bytes(state)
            self._checkpoints.write(reference, self.stores, rank, ranks)
            self._communicator.barrier()
            if rank == 0:
                self._checkpoints.finish(reference, ranks, self._state)
            self._communicator.barrier()  # no rank tells of tables that are not whole
            self._state, self._saved_at = state, self._steps
        return self._state

    def take_changes(self, learner: SharedLearner, changes: VariableChanges) -> None:
        self._dense.take_changes(learner, changes)

    def end_run(self, learner: SharedLearner) -> bool:
        return self._dense.end_run(learner)

    def close(self) -> None:
        """Ends the tables' communicator."""
        self._dense.close()
        self._communicator.close()
