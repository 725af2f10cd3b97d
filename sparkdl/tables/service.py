"""The seam between a layer and the place of its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from sparkdl.tables.classes import ClassSpec, Softmax
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray

IdArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TableSpec:
    """All that a table's rows depend on, beside their gradients.

    Args:
        name: Name of the table; layers with the same name share its rows.
        settings: Settings of the store of its rows, see :meth:`RowStore.from_settings`.
        learning_rate: The table's own; None: that of the model's optimizer.
        classes: The softmax whose centers the rows are; None: rows that are looked up.
    """

    name: str
    settings: Mapping[str, object]
    learning_rate: float | None = None
    classes: ClassSpec | None = None

    def store(self, num_ranks: int = 1, *, ignores_nan: bool = False) -> RowStore:
        """An empty one, for the rows that one of the ranks owns.

        Args:
            ignores_nan: Gradients that are not finite are taken; else they are an error.
        """
        settings, eviction = dict(self.settings), self.settings["eviction"]
        if isinstance(eviction, Mapping) and eviction["max_rows"] is not None:
            most = -(-int(eviction["max_rows"]) // num_ranks)
            settings["eviction"] = {**eviction, "max_rows": most}
        return RowStore.from_settings(settings, "ignore" if ignores_nan else "raise")


class CallOfStep(Protocol):
    """A call of a layer for rows; the gradients of these are None while there are none."""

    gradients: FloatArray | None


C = TypeVar("C", bound=CallOfStep)


class CallsOfStep(list[C]):
    """The calls of layers in a step, each known by a number until its gradient comes.

    A call after a gradient begins the step anew: it computes its gradient once more, and the last
    one counts.
    """

    _first = 0

    @property
    def last(self) -> int:
        """The number of the last call."""
        return self._first + len(self) - 1

    def of(self, number: int) -> C:
        return self[number - self._first]

    @property
    def have_gradients(self) -> bool:
        return any(call.gradients is not None for call in self)

    def forget(self) -> None:
        """The next call begins a step."""
        self._first += len(self)
        self.clear()


class RowService(Protocol):
    """The rows of a model's tables, wherever they lie."""

    def pull(self, table: str, ids: IdArray, *, training: bool) -> tuple[FloatArray, int]:
        """The rows of some ids, and a number by which :meth:`push` knows this call.

        Args:
            ids: Each once.
            training: Whether a gradient may follow. If not, ids without a row give zeros.

        Returns:
            The rows, of shape ``(len(ids), dim)``, and the number.
        """

    def push(self, pulled: int, gradients: FloatArray, counts: IdArray) -> None:
        """Takes the gradient of the rows of an earlier call, in their order.

        Args:
            pulled: The number that the call returned.
            gradients: Gradients of shape ``(len(ids), dim)``.
            counts: How often the batch has each id.
        """

    def measure(
        self, table: str, classes: ClassSpec, features: FloatArray, labels: IdArray, *,
        training: bool,
    ) -> tuple[Softmax, int]:  # fmt: skip
        """The softmax of each row over the classes of a table.

        Args:
            classes: What the softmax depends on.
            features: Features of shape ``(rows, dim)``.
            labels: The own class of each row.
            training: Whether a gradient may follow.

        Returns:
            The softmax, and a number by which :meth:`learn` knows this call.

        Raises:
            DataError: A label is no class.
        """

    def learn(self, measured: int, upstream: FloatArray, *, trying: bool) -> FloatArray:
        """One step of the centers of an earlier call.

        Args:
            measured: The number that the call returned.
            upstream: Gradient of the whole loss by each row's loss.
            trying: The centers stay as they are.

        Returns:
            The gradient by the features, of shape ``(rows, dim)``.
        """


@runtime_checkable
class ServesRows(Protocol):
    """A layer whose rows lie in a table."""

    trying: bool
    """Whether the steps of the gradients that come now are not to be taken."""

    @property
    def table_name(self) -> str:
        """The table's name."""

    @property
    def service(self) -> RowService | None:
        """The place of the rows; None before the first call."""

    def table_spec(self, optimizer: object) -> TableSpec:
        """The table as it is trained with the model's ``optimizer``."""

    def require_trainable_in(self, model: object) -> None:
        """Raises ModelError if the ``keras.Model`` is compiled with what the layer cannot have."""

    def give_rows(self, store: RowStore, rank: int, num_ranks: int) -> None:
        """Puts the rows that the layer has itself into a store, if ``rank`` owns them."""

    def serve_from(self, service: RowService) -> None:
        """From now on the rows are those of ``service``."""


@runtime_checkable
class LooksUpRows(ServesRows, Protocol):
    """A layer that looks up the rows of ids."""

    def wanted_ids(self, ids: npt.NDArray[Any]) -> IdArray:
        """The ids that a call asks the service for: each once and in order.

        Args:
            ids: The ids that the layer is called with, of any shape.
        """
