"""Tables that a fit has written: looked up where they lie, never loaded whole."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from sparkdl.errors import ModelError
from sparkdl.tables.checkpoints import TableReference
from sparkdl.tables.classes import ClassSpec, Softmax, joined, measure
from sparkdl.tables.reading import TableReader
from sparkdl.tables.service import IdArray
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray


class StoredRows:
    """The tables of a trained model, in the folder to which the workers have written them.

    Args:
        reference: What the run's state says of them, see :class:`TableReference`.

    Raises:
        ProtocolError: It is no reference.
    """

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self._found = TableReference.from_bytes(reference.encode())

    @cached_property
    def tables(self) -> Mapping[str, TableReader]:
        """Name -> table.

        Raises:
            ResourceError: The folder is gone, or its files are not whole.
        """
        return {name: TableReader(self._found.folder_of(name)) for name in self._found.tables}

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        return self.tables[table].pull(ids), list(self._found.tables).index(table)

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """Refuses to train."""
        raise self._untrainable(list(self._found.tables)[pulled])

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        if training:
            raise self._untrainable(table)
        chunks = self.tables[table].chunks(classes.chunk)
        return joined([measure(chunks, features, labels, classes.margin)]), -1

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """Never called: :meth:`measure` refuses to train."""
        raise NotImplementedError

    def give(self, table: str, store: RowStore, rank: int, num_ranks: int) -> None:
        """Puts the rows that ``rank`` owns into a store."""
        self._found.load(table, store, rank, num_ranks)

    @staticmethod
    def _untrainable(table: str) -> ModelError:
        return ModelError(
            f"table {table!r} lies in files that a fit has written, and cannot be trained here",
            expected="SparkModel(model, mode='allreduce').fit(..., checkpoint_dir=...)",
            received="model.fit in one process",
        )
