"""``ServedEmbedding``: an embedding whose rows lie in a table outside of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from sparkdl.errors import DataError, ModelError
from sparkdl.layers.backends import Ids, Places, lookup
from sparkdl.layers.local_rows import LocalRows, TableLayer
from sparkdl.learner.framework import jax_takes_64_bits
from sparkdl.settings.values import require_flag, require_int, require_name
from sparkdl.tables.admission import EntryFilter, Eviction, make_entry_filter
from sparkdl.tables.hashing import signed
from sparkdl.tables.rules import RowStart
from sparkdl.tables.service import IdArray, RowService, TableSpec
from sparkdl.tables.store import RowStore
from sparkdl.weights import FloatArray, is_finite

COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="sparkdl")
class ServedEmbedding(TableLayer):
    """An embedding of any number of ids, whose rows lie in a table outside of the model.

    A row is made when its id is first trained; any 64-bit integer is an id. The model itself holds
    one number of the layer. ``model.fit`` in one process keeps the table in that process;
    ``SparkModel(model, mode='allreduce').fit`` spreads it over the workers, each of which applies
    the gradients of the rows that it owns. The gradient of a row is the sum over all places of the
    batch where its id stands, on every backend (Keras' ``Embedding`` on TensorFlow gives these to
    the optimizer one by one).

    ::

        ids = keras.Input((26,), dtype='int64')
        rows = sparkdl.layers.ServedEmbedding(16, optimizer='adagrad')(ids)
        model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))

    Args:
        dim: Numbers in a row.
        table: Name of the table; layers of a model with one name share its rows. None: the layer's.
        combiner: ``'sum'``, ``'mean'`` or ``'sqrtn'`` (the sum divided by the root of the number)
            of the rows along the last axis of the ids; None: all rows.
        initializer: The start value of rows: ``'uniform'`` (-.05 to .05, as Keras' ``Embedding``),
            ``'normal'`` (deviation .05), ``'zeros'``, or a dict with the name and its constants.
            It depends on the seed, the table's name and the id only.
        optimizer: The table's: a Keras optimizer or its name. SGD without momentum, Adagrad, Adam
            (each row has its own steps: a row that a batch does not touch stands still) and FTRL
            work. None: the class, constants and learning rate that the model is compiled with.
        entry: Which ids get a row: ``CountFilter(10)``, those that were seen ten times, or
            ``Probability(0.1)``, a tenth of all ids, always the same. Others have zeros, and their
            gradients are dropped. None: all.
        max_rows: Rows of the table at most: of more, those that were seen least leave. None: no
            limit.
        expire_after: Steps without a gradient after which a row leaves. None: it stays.
        pad_id: An id that stands for no row: zeros, and not counted by the combiner.
        tracks: Whether each row knows how often and when its id was seen (8 bytes a row):
            ``spark_model.tables[...]`` then shrinks, and tells the rows that changed since a step.
            With ``max_rows`` and ``expire_after`` it always does.
        seed: Seed of the start values; None: drawn when the layer is made
            (``keras.utils.set_random_seed`` fixes it).
        **kwargs: Arguments of ``keras.layers.Layer``.

    Input shape:
        Integers of any shape; ``(batch, n)`` at least with a combiner.

    Output shape:
        The shape of the ids, without its last axis if there is a combiner, and ``dim``.

    Raises:
        ConfigError: An argument is not as described.
        ModelError: The layer is made in a ``keras.RematScope``. When called: the ids are no
            integers, or wider than the backend takes.
    """

    def __init__(
        self,
        dim: int,
        *,
        table: str | None = None,
        combiner: str | None = None,
        initializer: str | Mapping[str, Any] = "uniform",
        optimizer: keras.Optimizer | str | None = None,
        entry: EntryFilter | Mapping[str, Any] | None = None,
        max_rows: int | None = None,
        expire_after: int | None = None,
        pad_id: int | None = None,
        tracks: bool = False,
        seed: int | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(table=table, optimizer=optimizer, seed=seed, **kwargs)
        self.dim = require_int("dim", dim, least=1)
        if combiner is not None:
            require_name("combiner", combiner, COMBINERS)
        self.combiner = combiner
        self.initializer = initializer
        self.entry = make_entry_filter(entry)
        self.eviction = Eviction(max_rows, expire_after)
        self.pad_id = pad_id
        self.tracks = require_flag("tracks", tracks)
        self._start = RowStart(self.table, dim, initializer, self.seed)

    def table_spec(self, optimizer: object) -> TableSpec:
        rule, rate = self.rule_and_rate(optimizer)
        store = RowStore(
            self.dim, rule, self._start.settings, name=self.table, seed=self.seed, entry=self.entry,
            eviction=self.eviction, tracks=self.tracks,
        )  # fmt: skip
        return TableSpec(self.table, store.settings, rate)

    def rows(self, ids: object) -> FloatArray:
        """The rows of some ids; start values where an id has none, zeros for the padding.

        Args:
            ids: Integers, of shape ``(n,)``.

        Returns:
            Of shape ``(n, dim)``.

        Raises:
            ModelError: The rows lie on other workers.
        """
        wanted = np.asarray(ids, np.int64)
        found = super().rows(wanted)
        if self.pad_id is not None:
            found[wanted == self.pad_id] = 0
        return found

    def load(self, ids: object, rows: object) -> None:
        """Sets rows, for a warm start: a fit goes on from them, with or without Spark.

        Args:
            ids: Integers of shape ``(n,)``, each once.
            rows: Rows of shape ``(n, dim)``.

        Raises:
            DataError: Shapes are others, an id is there twice or too large, or a number not finite.
            ModelError: The rows lie in files that a fit has written.
        """
        given, values = np.asarray(ids), np.asarray(rows, np.float32)
        shaped = given.ndim == 1 and values.shape == (len(given), self.dim)
        if not shaped or given.dtype.kind not in "iu" or not np.isfinite(values).all():
            raise DataError(
                f"these rows cannot be those of table {self.table!r}",
                expected=f"ids (n,) (integers), rows (n, {self.dim}) of finite numbers",
                received=f"{given.dtype} {given.shape}, {values.dtype} {values.shape}",
            )
        if self.service is None:
            self.service = LocalRows()
        if not isinstance(self.service, LocalRows):
            raise ModelError(
                f"the rows of layer {self.name!r} lie in files that a fit has written",
                expected=f"spark_model.tables[{self.table!r}].load(ids, rows)",
                received="layer.load(ids, rows)",
            )
        self.service.put(self, signed(given), values)

    def start_rows(self, ids: IdArray) -> FloatArray:
        return self._start.rows(ids)

    def wanted_ids(self, ids: npt.NDArray[Any]) -> IdArray:
        return _unique(ids, self.pad_id)[0]

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        shape = tuple(input_shape)
        return (*(shape if self.combiner is None else shape[:-1]), self.dim)

    def compute_output_spec(self, ids: Any, training: object = None) -> Any:
        """The output's shape and dtype, without a lookup."""
        return keras.KerasTensor(self.compute_output_shape(ids.shape), dtype=self.compute_dtype)

    def __call__(self, ids: object, *args: object, **kwargs: object) -> Any:
        """See the class; Keras would hide an error of ``call`` in one of its own."""
        if hasattr(ids, "dtype"):
            kind = keras.backend.standardize_dtype(ids.dtype)
            if "float" in kind and keras.src.backend.common.symbolic_scope.in_symbolic_scope():
                ids = ops.cast(ids, "int32")  # so Keras builds a subclassed model from a file
            self._check(ids)
        return super().__call__(ids, *args, **kwargs)

    def call(self, ids: object, training: object = None) -> Any:
        self.find_service()
        call = _Call(self, bool(training))
        anchor = ops.convert_to_tensor(self._anchor)
        rows = ops.cast(lookup(call, ids, anchor, self.dim), self.compute_dtype)
        if self.combiner is None:
            return rows
        total = ops.sum(rows, axis=-2)
        if self.combiner == "sum":
            return total
        if self.pad_id is None:
            count = ops.cast(ops.shape(ids)[-1], rows.dtype)
        else:
            present = ops.cast(ops.not_equal(ids, self.pad_id), rows.dtype)
            count = ops.maximum(ops.sum(present, axis=-1, keepdims=True), 1.0)
        return total / (ops.sqrt(count) if self.combiner == "sqrtn" else count)

    def _check(self, ids: Any) -> None:
        kind = keras.backend.standardize_dtype(ids.dtype)
        narrow = keras.backend.backend() == "jax" and not jax_takes_64_bits()
        wide = narrow and kind in ("int64", "uint64")
        if "int" not in kind or wide:
            raise ModelError(
                f"layer {self.name!r} cannot look up these ids",
                expected="integers" + (" of at most 32 bits with JAX" if wide else ""),
                received=kind,
                hint="jax.config.update('jax_enable_x64', True) lets JAX take 64 bits"
                if wide
                else "keras.Input(..., dtype='int64'): floats lose ids above 2**24",
            )

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "dim": self.dim,
            "combiner": self.combiner,
            "initializer": self.initializer,
            "entry": None if self.entry is None else self.entry.settings,
            "max_rows": self.eviction.max_rows,
            "expire_after": self.eviction.expire_after,
            "pad_id": self.pad_id,
            "tracks": self.tracks,
        }


class _Call:
    """One call of the layer in a step: its ids, each once, and their rows."""

    def __init__(self, layer: ServedEmbedding, training: bool) -> None:
        self._table, self._dim, self._pad = layer.table_name, layer.dim, layer.pad_id
        self._layer, self._training = layer, training
        self._pulled: tuple[int, Places, int] | None = None

    @property
    def _service(self) -> RowService:
        """That of the layer now, which may be another than when the step was compiled."""
        assert self._layer.service is not None
        return self._layer.service

    def pull(self, ids: Ids, differentiated: bool) -> tuple[FloatArray, Places]:
        unique, places = _unique(np.asarray(ids), self._pad)
        training = self._layer.may_learn(self._training, differentiated)
        rows, number = self._service.pull(self._table, unique, training=training)
        self._pulled = number, places, len(rows)
        if self._pad is not None:
            rows = np.concatenate([rows, np.zeros((1, self._dim), np.float32)])
        return rows, places.reshape(np.shape(ids))

    def push(self, sums: FloatArray) -> np.float32:
        assert self._pulled is not None
        number, places, count = self._pulled
        sums = sums[:count].copy()  # the framework lends them for this call
        self._service.push(number, sums, np.bincount(places, minlength=count)[:count])
        return np.float32(np.inf if self._layer.scaled and not is_finite(sums) else 0.0)


def _unique(ids: npt.NDArray[Any], pad: int | None) -> tuple[IdArray, Places]:
    """The sorted unique ids without the padding, and the place of each id among them, flat; that
    of the padding is after the last."""
    flat = ids.reshape(-1).astype(np.int64)
    present = slice(None) if pad is None else flat != pad
    unique, inverse = np.unique(flat[present], return_inverse=True)
    places = np.full(flat.size, len(unique), np.int32)
    places[present] = inverse
    return unique, places
