"""Tables whose rows are spread over the ranks: who owns a row, and how it travels.

In a step each rank pulls the rows of its batch from their owners, call by call of the layers, and
at the end all ranks send the gradients of these rows. An owner adds up what came for a row, in the
order of the ranks, and applies one row step. A message begins with what a rank is about to do, so
that a rank without a batch knows how to serve the others. A pull is two all-to-alls, of ids and of
rows; the second alone where a rank has told the ids of its next batch with the gradients.

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

import numpy as np
import numpy.typing as npt

from sparkdl.collective.arithmetic import Array
from sparkdl.collective.communicator import Communicator
from sparkdl.collective.gradient_synchronizer import AllReduceGradientSynchronizer, explained
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
_ANEW, _AS_TOLD = 1, 2
"""Flags of a pull: the step begins anew; the ids are those that the rank has told before."""
ByteArray = npt.NDArray[np.uint8]
_NO_IDS, _NO_BYTES = np.empty(0, np.int64), np.empty(0, np.uint8)


@dataclass
class _Told:
    """A message of one rank to another.

    Args:
        number: Flags of a pull; else the rows of the rank's batch.
        parts: Ids, or the bits of rows as integers.
    """

    doing: int
    table: int
    number: int
    parts: list[IdArray]

    @property
    def works(self) -> bool:
        """Whether the rank does not only serve, and is not done."""
        return self.doing > _DONE

    @property
    def last(self) -> IdArray:
        """The last part; an empty one of a rank that serves."""
        return self.parts[-1] if self.works else _NO_IDS


@dataclass
class _Pull:
    """One call of a layer in a step."""

    table: str
    ids: IdArray  # this rank's
    order: npt.NDArray[np.intp]  # the same, owner by owner
    edges: Sequence[slice]  # of each owner's within them
    asked: Sequence[IdArray]  # what each rank asks this one for
    gradients: FloatArray | None = None

    def part(self, rank: int, array: Array | None) -> IdArray:
        """The part of an array by id whose ids ``rank`` owns, as integers; empty of None."""
        if array is None:
            return _NO_IDS
        return _as_integers(array.take(self.order[self.edges[rank]], axis=0).reshape(-1))


class TableExchange:
    """One rank's part in the tables of a model; a :class:`sparkdl.tables.service.RowService`.

    Args:
        tables: All tables of the model, the same on all ranks.
        ignores_nan: Gradients that are not finite are taken; else they are an error.
    """

    def __init__(
        self, communicator: Communicator, tables: Iterable[TableSpec], *, ignores_nan: bool = False
    ) -> None:
        self._communicator, self._specs = communicator, {spec.name: spec for spec in tables}
        self._names = sorted(self._specs)
        self.stores = {
            name: self._specs[name].store(communicator.size, ignores_nan=ignores_nan)
            for name in self._names
        }
        """Table name -> the rows that this rank owns."""
        self._parts: dict[str, ClassPart] = {}
        self._measured: dict[str, Measured] = {}
        self._edges: dict[str, Sequence[slice]] = {}  # of each rank's rows among those measured
        self._measures, self.sent_bytes = 0, 0
        self._learned: set[str] = set()  # tables whose centers had their step
        self._weight, self._rate = 0, 0.0
        self._pulls: CallsOfStep[_Pull] = CallsOfStep()
        self._ahead: list[_Pull] = []  # the next calls, as far as the ranks have told them
        self._foretells = True  # as long as what is told is what is asked for

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        told = self._ahead[0] if training and self._ahead else None
        as_told = told is not None and told.table == table and np.array_equal(told.ids, ids)
        pull = told if told is not None and as_told else self._call(table, ids)
        self._foretells &= as_told or told is None or not len(told.ids)
        flags = _ANEW * self._pulls.have_gradients + _AS_TOLD * as_told
        ahead = enumerate(self._rows_ahead())
        parts = [[rows, _NO_IDS if as_told else pull.part(rank, ids)] for rank, rows in ahead]
        came = self._tell(_PULLS if training else _LOOKS_UP, table, flags, parts)
        replies, dim = self._serve(came, pull), self.stores[table].dim
        rows = np.empty((len(ids), dim), np.float32)
        for edge, reply in zip(pull.edges, replies, strict=True):
            places = pull.order[edge]
            rows[places] = reply[: places.size * dim].reshape(-1, dim)
        return rows, self._pulls.last

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """See :class:`sparkdl.tables.service.RowService`; :meth:`end_step` sends them."""
        pull = self._pulls.of(pulled)
        if self._width(pull.table) > gradients.shape[1]:  # counts are exact up to 2^24
            gradients = np.column_stack([gradients, counts.astype(np.float32)])
        pull.gradients = np.asarray(gradients, np.float32)

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        """See :class:`sparkdl.tables.service.RowService`; all other ranks measure, or serve."""
        doing, to_all = _MEASURES if training else _SCORES, [[labels]] * self._communicator.size
        softmax, edges = self._measure(self._tell(doing, table, 0, to_all), features)
        return softmax.of(edges[self._communicator.rank]), self._measures

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """See :class:`sparkdl.tables.service.RowService`; all other ranks learn, or serve."""
        of = find_measured(self._measured, measured)
        doing = _TRIES if trying else _LEARNS
        to_all = [[upstream.astype(np.float64).view(np.int64)]] * self._communicator.size
        return self._learn(self._tell(doing, of.table, self._weight, to_all))

    def _width(self, table: str) -> int:
        """Numbers that travel for a row; its owner may want to know how often its id was seen."""
        store = self.stores[table]
        return store.dim + (store.entry is not None or store.tracks)

    def begin_step(self, rows: int, learning_rate: float) -> None:
        """Says of the coming step what :meth:`end_step` is told after it."""
        self._weight, self._rate = rows, learning_rate

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
        calls = [self._call(table, ids) for table, ids in following if self._foretells]
        head = np.array([beside.size, *(self._names.index(call.table) for call in calls)])
        parts = [
            [head, _as_integers(beside)]
            + [pull.part(rank, pull.gradients) for pull in self._pulls]
            + [call.part(rank, call.ids) for call in calls]
            for rank in range(self._communicator.size)
        ]
        return self._step(self._tell(_ENDS_STEP, "", rows, parts), learning_rate, calls)

    def serve_step(self, learning_rate: float) -> list[ByteArray]:
        """Takes part in a step without a batch, until its end; see :meth:`end_step`."""
        self.begin_step(0, learning_rate)
        return self._step(self._serve_until(_ENDS_STEP, _SERVES), learning_rate, [])

    def serve_until_done(self) -> None:
        """Serves the other ranks until all have called this: each has evaluated its rows."""
        self._serve_until(_DONE, _DONE)
        self._forget()

    def _serve_until(self, end: int, doing: int) -> list[_Told]:
        while True:
            came = self._tell(doing, parts=[[rows] for rows in self._rows_ahead()])
            if self._doing(came)[0] == end:
                return came
            self._serve(came)

    def _tell(
        self, doing: int, table: str = "", number: int = 0,
        parts: Sequence[Sequence[IdArray]] | None = None,
    ) -> list[_Told]:  # fmt: skip
        place = self._names.index(table) if table else 0
        messages = []
        for own in parts or [[]] * self._communicator.size:
            head = [4 + len(own), doing, place, number, *map(len, own)]
            messages.append(np.concatenate([np.array(head), *own]))
        told = []
        for message in self._exchange(messages):
            head, doing, place, number, *sizes = message[: message[0]].tolist()
            edges = itertools.pairwise(itertools.accumulate([head, *sizes]))
            told.append(_Told(doing, place, number, [message[a:b] for a, b in edges]))
        return told

    def _call(self, table: str, ids: IdArray) -> _Pull:
        ranks = self._communicator.size
        return _Pull(table, ids, *by_owner(ids, ranks), [_NO_IDS] * ranks)

    def _rows_ahead(self) -> list[IdArray]:
        if not self._ahead:
            return [_NO_IDS] * self._communicator.size
        asked = self._ahead[0].asked
        rows = self.stores[self._ahead[0].table].pull(np.concatenate(asked))  # in one go
        edges = itertools.pairwise(itertools.accumulate(map(len, asked), initial=0))
        return [_as_integers(rows[a:b].reshape(-1)) for a, b in edges]

    def _exchange_rows(self, parts: Sequence[FloatArray]) -> list[FloatArray]:
        return [np.asarray(array, np.float32) for array in self._exchange(parts)]

    def _exchange(self, parts: Sequence[Array]) -> list[Array]:
        own, sent = self._communicator.rank, list(parts)
        sent[own] = sent[own][:0]  # small messages travel whole to all ranks
        self.sent_bytes += sum(part.nbytes for part in sent)
        found = self._communicator.all_to_all(sent)
        found[own] = parts[own]
        return found

    def _doing(self, came: Sequence[_Told]) -> tuple[int, str]:
        """The work of the ranks that do not only serve, and its table: the same for all."""
        doing = {(told.doing, told.table) for told in came if told.works}
        if len(doing) > 1 or (not doing and any(told.doing == _SERVES for told in came)):
            raise ProtocolError(
                "the ranks disagree about their tables",
                expected="the same layers in the same order on all ranks",
                received=", ".join(f"rank {r} {_WORDS[t.doing]}" for r, t in enumerate(came)),
                hint="does the model call other layers on some batches?",
            )
        work, number = doing.pop() if doing else (_DONE, 0)
        return work, self._names[number] if self._names else ""

    def _serve(self, came: Sequence[_Told], pull: _Pull | None = None) -> list[FloatArray]:
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
        ahead = self._ahead.pop(0) if training and self._ahead else self._call(table, _NO_IDS)
        asks = [t.last if t.works and not t.number & _AS_TOLD else None for t in came]
        replies = [told.parts[0].view(np.float32) for told in came if pull is ahead]
        if any(ids is not None for ids in asks):
            lacking = [_NO_IDS if ids is None else ids for ids in asks]
            found = [store.pull(ids, create=training).reshape(-1) for ids in lacking]
            fresh = self._exchange_rows(found)
            replies = replies or fresh
        if training:
            if any(told.works and told.number & _ANEW for told in came):
                self._forget()
            known = zip(ahead.asked, asks, strict=True)
            pull.asked = [told if ids is None else ids for told, ids in known]
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
        self, came: Sequence[_Told], features: FloatArray
    ) -> tuple[Softmax, Sequence[slice]]:
        """The softmax of the rows of all ranks, and where each rank's are."""
        doing, table = self._doing(came)
        of_ranks = [told.last for told in came]
        places = np.cumsum([0, *map(len, of_ranks)]).tolist()
        edges = [slice(a, b) for a, b in itertools.pairwise(places)]
        labels = np.concatenate(of_ranks)
        flat = self._exchange_rows([features.reshape(-1)] * self._communicator.size)
        together = np.concatenate(flat).reshape(len(labels), -1) if len(labels) else features
        part = self._part(table)
        measures = part.measure(together, labels, training=doing == _MEASURES).to_array()
        parts = self._exchange_rows([measures.reshape(-1)] * self._communicator.size)
        softmax = joined([Measures.from_array(found) for found in parts])
        if doing == _MEASURES:
            self._measures += 1
            self._measured[table] = Measured(self._measures, table, together, labels, softmax)
            self._edges[table] = edges
        return softmax, edges

    def _learn(self, came: Sequence[_Told]) -> FloatArray:
        """The step of this rank's centers; returns the gradient by this rank's features."""
        doing, table = self._doing(came)
        of, edges = self._measured.pop(table), self._edges.pop(table)
        if table in self._learned:
            raise trained_twice()
        if doing != _TRIES:
            self._learned.add(table)
        upstream = np.zeros(len(of.labels), np.float32)
        shares = np.zeros(len(of.labels), np.float32)
        total = sum(told.number for told in came)
        for edge, told in zip(edges, came, strict=True):
            if told.works:
                upstream[edge] = told.last.view(np.float64)
                shares[edge] = told.number / total
        own = self._specs[table].learning_rate
        rate = None if doing == _TRIES else self._rate if own is None else own
        onward = self._part(table).learn(of.features, of.labels, of.softmax, upstream, shares, rate)
        parts = self._exchange_rows([onward[edge].reshape(-1) for edge in edges])
        found = np.zeros(parts[0].shape, np.float32)
        for gradient in parts:
            found += gradient
        return found.reshape(-1, self.stores[table].dim)

    def _step(
        self, came: Sequence[_Told], learning_rate: float, following: list[_Pull]
    ) -> list[ByteArray]:
        self._doing(came)
        total = sum(told.number for told in came)
        names = (name for name in self._names if self._specs[name].classes is None)
        found = {n: [(_NO_IDS, np.empty((0, self._width(n)), np.float32))] for n in names}
        beside = [_NO_BYTES for _ in came]
        calls: list[list[tuple[int, IdArray]]] = [[] for _ in came]
        for rank, told in [(r, told) for r, told in enumerate(came) if told.works]:
            (size, *tables), sent, *parts = told.parts
            beside[rank] = sent.view(np.uint8)[:size]
            for pull, part in zip(self._pulls, parts, strict=False):
                asked, width = pull.asked[rank], self._width(pull.table)
                if len(part) and told.number > 0:
                    rows = part.view(np.float32)[: len(asked) * width].reshape(-1, width)
                    rows[:, : self.stores[pull.table].dim] *= np.float32(told.number / total)
                    found[pull.table].append((asked, rows))
            calls[rank] = list(zip(tables, parts[len(self._pulls) :], strict=True))
        for table, of_ranks in found.items() if total > 0 else ():
            ids, values = (np.concatenate(arrays) for arrays in zip(*of_ranks, strict=True))
            dim = self.stores[table].dim
            seen = values[:, dim].astype(np.int64) if self._width(table) > dim else None
            unique, summed, times = merged(ids, values[:, :dim], seen)
            own = self._specs[table].learning_rate
            # A step of no rows is one, too: the parts of all ranks have the same clock.
            self.stores[table].push(unique, summed, learning_rate if own is None else own, times)
        self._forget()
        longest = max(calls, key=len)  # a rank tells of all calls, or of none
        self._ahead = following or [self._call(self._names[n], _NO_IDS) for n, _ in longest]
        for place, pull in enumerate(self._ahead):
            pull.asked = [of[place][1] if of else _NO_IDS for of in calls]
        return beside

    def _forget(self) -> None:
        self._pulls.forget()
        self._learned.clear()


def _as_integers(numbers: Array) -> IdArray:
    missing = np.zeros(-numbers.nbytes % 8 // numbers.itemsize, numbers.dtype)
    return (np.append(numbers, missing) if missing.size else numbers).view(np.int64)


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
        self._exchange = TableExchange(
            self._communicator, learner.tables.specs, ignores_nan=self._ignores_nan
        )
        stores = self._exchange.stores
        rank, ranks = self._communicator.rank, self._communicator.size
        if self._state:
            reference = TableReference.from_bytes(self._state)
            self._steps = self._saved_at = reference.step
            for name, store in stores.items():
                reference.load(name, store, rank, ranks)
        else:
            learner.tables.give_rows(stores, rank, ranks)
        learner.tables.serve_from(self._exchange)
        if ranks > 1:
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
            return self._exchange.end_step(rows, rate, scale or 1.0, next(following, ()), beside)

        self._exchange.begin_step(rows, rate)
        with self._orders(), explained(self._communicator.explain):
            self._dense.train(learner, stack, end_step if together else None)
            if not together:
                taken = scale is None or optimizer.step > before  # all ranks know the same
                end_step(_NO_BYTES, rows if taken else 0)

    def _together(self, learner: SharedLearner) -> bool:
        """Whether rows travel with the variables, inside the call for a stack; the same on all
        ranks. A rate, or a scale of the loss, that changes within the stack is read between."""
        optimizer = learner.optimizer
        return not (optimizer.has_schedule or optimizer.scales_loss or self._dense.in_graph)

    def _following(self, stack: BatchStack) -> list[list[tuple[str, IdArray]]]:
        """Tables and ids of the calls of each batch but the first, as far as they are known."""
        try:
            return [self._ids_of(stack.part(n)) for n in range(1, stack.num_batches)]
        except Exception:  # the layers before the ids cannot be computed by themselves
            return []

    def skip(self, learner: SharedLearner) -> None:
        """Takes part in one step of the other ranks, and serves their pulls meanwhile."""
        with self._orders(), ThreadPoolExecutor(1, "sparkdl-tables") as threads:
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
        with explained(self._communicator.explain):
            yield
            self._exchange.serve_until_done()

    @contextlib.contextmanager
    def _orders(self) -> Iterator[None]:
        """Within, the steps of the variables tell the driver's orders."""
        self._dense.stop_wanted = self.stop_wanted
        yield
        self.stop_agreed = self.stop_agreed or self._dense.stop_agreed
        self._dense.stop_agreed = False

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

    def close(self) -> None:
        self._communicator.close()
