"""``TrainedModel``: the driver's Keras model, and what the rule of its runs keeps beside it.

For a model whose layers have their rows in tables it says where the rows are after a fit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkdl.config import FitConfig
from sparkdl.errors import ConfigError, DataError, ModelError
from sparkdl.files import storage
from sparkdl.files.checkpoints import Checkpoint, Checkpoints
from sparkdl.files.model_file import pack_arrays, read_config
from sparkdl.files.run_state import RunState
from sparkdl.layers.local_rows import StoredRows
from sparkdl.learner.archives.archive import load_state, model_bytes
from sparkdl.learner.callback_sink import keeping_callbacks, restores_best
from sparkdl.learner.checks.compile_parts import check_metrics_add_up
from sparkdl.learner.description import config_difference, optimizer_classes
from sparkdl.learner.signature import model_signature
from sparkdl.learner.state import metric_state
from sparkdl.learner.state.carried_state import load_carried_state, untrusted_values
from sparkdl.learner.state.model_weights import constrained, model_layout, write_model
from sparkdl.learner.state.optimizer_state import (
    DriverSlots,
    ModelOptimizer,
    innermost_optimizer,
    learning_rate_of,
    learning_rate_set,
    load_optimizer_state,
)
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.spark.forms.sources import Source
from sparkdl.tables.checkpoints import TableCheckpoints, TableReference

_claimed: list[Any] = []
"""The Keras models that this process trains, or whose tables it changes, now."""
_claiming = threading.Lock()


@dataclass
class TrainedModel:
    """The driver's model; each part is as of the last state that was taken over.

    Args:
        rule_state: What the rule keeps that no Keras optimizer has room for (an outer momentum).
        keeps_rate: The driver's callbacks may set the learning rate: then the model's own holds,
            and not that of a state, which is a worker's of some time before.
        constrains: Weights come from several workers' steps, and need not hold the constraints that
            each of these held.
        has_optimizer: Whether a state with the optimizer's was taken over since that was unset.
        slots: The optimizer's, where the workers take its steps in slices.
        slots_kept: What these are made of, with which a lost stage begins again: the rule's state
            comes back from Keras' numbers rounded, as they are multiples of its own.
        tables_lock: Is held while the files of the model's tables must stay as they are.
    """

    model: Any
    rule_state: bytes = field(default=b"", repr=False)
    keeps_rate: bool = False
    constrains: bool = False
    has_optimizer: bool = False
    slots: DriverSlots | None = None
    slots_kept: bytes = field(default=b"", repr=False)
    tables_lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextlib.contextmanager
    def one_at_a_time(self, what: str) -> Iterator[None]:
        """Raises ConfigError if another fit of the Keras model, also by another ``SparkModel``, or
        a change of the tables, is under way."""
        model = self.model
        with _claiming:
            free = all(other is not model for other in _claimed)
            if free:
                _claimed.append(model)
        if not free:
            raise ConfigError(
                f"model {model.name!r} is being trained by another call of fit, or its tables "
                "are being changed",
                expected="one fit of a model at a time: it trains the model in place",
                received=f"{what} while an earlier call runs, in another thread or in a callback",
                hint="wait for the first, or train a copy: "
                "SparkModel(keras.models.clone_model(model), ...), compiled",
            )
        try:
            yield
        finally:
            with _claiming:
                _claimed[:] = [other for other in _claimed if other is not model]

    @property
    def stored_rows(self) -> StoredRows | None:
        """The rows that the model's layers look up in a fit's files; None without."""
        services = (layer.service for layer in ModelTables(self.model).layers)
        return next((s for s in services if isinstance(s, StoredRows)), None)

    @contextlib.contextmanager
    def changing_tables(self) -> Iterator[TableReference]:
        """The present tables, which no other change or fit replaces meanwhile; a second caller
        waits, and with a fit under way it is a ConfigError."""
        with self.tables_lock, self.one_at_a_time("a change of tables"):
            stored = self.stored_rows
            assert stored is not None
            yield TableReference.from_bytes(stored.reference.encode())

    def take(self, state: RunState) -> None:
        """Takes over variables, optimizer state and the rule's state, each if ``state`` has it."""
        load_carried_state(self.model, state.carried)
        if state.weights.size:
            layout, weights = model_layout(self.model), state.weights
            if self.constrains:
                weights = constrained(self.model.trainable_variables, layout, weights)
            write_model(self.model, layout, weights)
        if state.optimizer:
            self.has_optimizer = True
            if self.slots is None:
                load_optimizer_state(self.model, state.optimizer, keep_rate=self.keeps_rate)
            elif state.rule:
                self.slots.take_run(state.rule, state.optimizer)
        if state.rule and self.slots is None:
            self.rule_state = state.rule
            serve_trained(self.model, state.rule)

    def take_tables(self, reference: TableReference) -> None:
        """Takes over tables that were changed outside of a fit."""
        self.rule_state = reference.to_bytes()
        serve_trained(self.model, self.rule_state)

    def state_for_rule(self) -> bytes:
        """The state that the rule of the next run goes on from."""
        kept, self.slots_kept = self.slots_kept, b""
        return self.rule_state if self.slots is None else kept or self.slots.to_bytes()

    def save(self, checkpoints: Checkpoints, epoch: int, rate: float | None = None) -> None:
        """Writes a checkpoint after ``epoch`` epochs.

        Args:
            rate: Learning rate to be saved; None for the model's present one.
        """
        with learning_rate_set(self.model, rate):
            content = model_bytes(self.model, told=True)
            carried = pack_arrays(untrusted_values(self.model))
            beside = replace(self.beside(epoch), carried=carried)
        checkpoints.save(content, beside)

    def restore(self, checkpoints: Checkpoints) -> int:
        """Loads the newest checkpoint; returns its epochs done, 0 if there is none.

        Raises:
            ConfigError: It is of another model, or no checkpoint is whole.
        """
        checkpoint = checkpoints.restore()
        if checkpoint is None:
            self.rule_state = b""
            return 0
        self._require_own(checkpoint.model_file, checkpoints.folder)
        self.load(checkpoint, checkpoints.folder)
        return checkpoint.state.epoch

    def _require_own(self, content: bytes, folder: str) -> None:
        """Refuses a checkpoint whose network, or optimizer, is another one than the model's."""
        config = read_config(content)
        classes = optimizer_classes(config, self.model)
        if classes is not None and classes[0] != classes[1]:
            raise ConfigError(
                f"the checkpoint in {folder!r} was trained with another optimizer",
                expected=f"{classes[0]}, as in the checkpoint",
                received=f"{classes[1]}, which model {self.model.name!r} is compiled with",
                hint="another checkpoint_dir, or resume=False, which begins anew; "
                "keras.models.load_model and compile take over the weights alone",
            )
        different = config_difference(config, self.model)
        if different is not None:
            place, saved, own = different
            raise ConfigError(
                f"the checkpoint in {folder!r} is of another model",
                expected=f"{place} {saved}, as in the checkpoint",
                received=f"{own} in model {self.model.name!r}",
                hint="another checkpoint_dir, or resume=False, which begins anew",
            )

    def load(self, checkpoint: Checkpoint, folder: str, *, keep_rate: bool = False) -> None:
        """Loads one checkpoint.

        Args:
            checkpoint: Of an equal model.
            keep_rate: The model's learning rate stays as it is; Keras saves it with the optimizer.

        Raises:
            ConfigError: It is of another model.
        """
        rate = learning_rate_of(self.model) if keep_rate else None
        load_state(self.model, checkpoint.model_file, folder)
        load_carried_state(self.model, checkpoint.state.carried)
        if rate is not None:
            innermost_optimizer(self.model).learning_rate = rate
        self.rule_state = checkpoint.state.rule
        if self.rule_state and ModelTables(self.model).layers:
            reference = TableReference.from_bytes(self.rule_state)
            newest = TableCheckpoints.of(reference).newest()
            self.rule_state = replace(reference, seen=newest).to_bytes()
        serve_trained(self.model, self.rule_state)

    def beside(self, epoch: int) -> RunState:
        """The state that a ``.keras`` file of the model does not hold, after ``epoch`` epochs."""
        return RunState(epoch, rule=self.rule_state)


@dataclass(frozen=True)
class _ArrayLike:
    """Shape and dtype of a batch, for Keras' symbolic build."""

    shape: tuple[int | None, ...]
    dtype: str


def prepare_metrics(model: Any, source: Source, batch_size: int) -> None:
    """Makes the model's metric variables here, to put the workers' numbers into them.

    Args:
        batch_size: Rows of a batch: that metrics cannot take labels and outputs of different
            sizes shows only where the sizes are known.

    Raises:
        DataError: The model cannot take these columns.
        ModelError: The loss or a metric cannot be computed, or a metric's variables must not be
            summed.
    """
    spec, signature = source.spec, model_signature(model)
    x, y, weights = (
        {name: _ArrayLike((batch_size, *s.shape), s.dtype) for name, s in part.items()}
        for part in (spec.features, spec.labels, spec.weights)
    )
    if signature.preprocessing is not None:
        made = signature.preprocessing.example(spec, batch_size)
        x, y, weights = (
            {name: _ArrayLike(a.shape[1:], a.dtype.name) for name, a in part.items()}
            for part in (made.x, made.y, made.sample_weight or {})
        )
    try:
        try:
            metric_state.build_metrics(model, x, y, weights or None)  # type: ignore[arg-type]
        except Exception:
            shapes = {name: output.shape for name, output in signature.outputs.items()}
            sized = {name: _sized(array, shapes.get(name)) for name, array in y.items()}
            if sized == y:
                raise
            metric_state.build_metrics(model, x, sized, weights or None)  # type: ignore[arg-type]
    except ModelError:
        raise
    except Exception as error:
        raise DataError(
            f"model {model.name!r} cannot take these columns",
            expected=f"inputs {_shapes(signature.inputs)}, outputs {_shapes(signature.outputs)}",
            received=f"{type(error).__name__}: {str(error)[:600]}",
            hint="try model.fit on a few rows as NumPy arrays",
        ) from error
    check_metrics_add_up(model, x, spec.labels)


def _sized(labels: _ArrayLike, output: tuple[int | None, ...] | None) -> _ArrayLike:
    """Labels of free sizes (a loss of the user's takes any) with those of an output of their rank.

    Where sizes are free, TensorFlow knows not even the rank of ``labels == outputs``.
    """
    if output is None or len(labels.shape) != 1 + len(output):
        return labels
    sizes = zip(labels.shape[1:], output, strict=True)
    return _ArrayLike(
        (labels.shape[0], *(theirs if mine is None else mine for mine, theirs in sizes)),
        labels.dtype,
    )


def _shapes(specs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {spec.shape}" for name, spec in specs.items())


def tables_folder(model: object, checkpoints: Checkpoints | None) -> str | None:
    """The folder that keeps the rows of the model's tables; None for a model without tables."""
    if checkpoints is None or not ModelTables(model).layers:
        return None
    here = storage.path_on_disk(checkpoints.folder)  # workers have working folders of their own
    return f"{checkpoints.folder if here is None else os.path.abspath(here)}/tables"


def rows_on_servers(model: object, exchange: ChosenExchange) -> bool:
    """Whether servers hold rows of tables: in rounds all workers wait while they are written."""
    return isinstance(exchange, ServerExchange) and bool(ModelTables(model).layers)


def check_tables(
    model: object,
    config: FitConfig,
    exchange: ChosenExchange,
    checkpoints: Checkpoints | None,
    callbacks: Sequence[Any],
) -> None:
    """Raises ConfigError, or ModelError, if the tables of a model cannot be trained by this fit."""
    tables = ModelTables(model)
    if not tables.layers:
        return
    tables.require_trainable()
    names = ", ".join(repr(spec.name) for spec in tables.specs)
    what = f"the model has rows in tables ({names}), which this fit cannot train"
    if isinstance(exchange, ServerExchange):
        rounds = exchange.rule.replies_mean and not ModelOptimizer(model, []).scales_loss
        served = rounds if exchange.in_step else exchange.rule.payload == "delta"
        served = served and exchange.rule.splits and not exchange.independent
        served = served and all(spec.classes is None for spec in tables.specs)
    else:
        served = exchange.joins_gradients and exchange.window == 1
    if not served:
        raise ConfigError(
            what,
            expected="mode='allreduce' with the mean of the gradients at each step, or, without a "
            "ShardedClassifier, 'synchronous' with it and an unscaled loss, 'asynchronous' or "
            "'hogwild' with a rule on weight changes",
            received=f"mode={config.mode!r}, rule={exchange.rule.name!r}",
        )
    if isinstance(exchange, ServerExchange) and exchange.rule.rows_in_windows:
        for spec in tables.specs:
            store = spec.store()
            if store.entry is not None or store.eviction.on:
                raise ConfigError(
                    f"table {spec.name!r} cannot be trained in windows",
                    expected="a layer without entry, max_rows and expire_after: workers train "
                    "copies of rows, and do not know which ids have none",
                    received=f"rule={exchange.rule.name!r}",
                    hint="another rule exchanges rows at each batch",
                )
    if checkpoints is None:
        raise ConfigError(
            what,
            expected="checkpoint_dir=..., a folder that driver and workers share: each worker "
            "writes its rows there",
            received="checkpoint_dir=None",
        )
    if config.on_nan == "skip":
        raise ConfigError(what, expected="on_nan='raise' or 'ignore'", received="on_nan='skip'")
    for callback in callbacks:
        if isinstance(callback, keeping_callbacks()):
            raise ConfigError(
                what, expected="checkpoint_dir=..., which keeps the rows with the model",
                received=f"{type(callback).__name__}, which would keep the model without its rows",
            )  # fmt: skip
        if restores_best(callback):
            raise ConfigError(
                what, expected="EarlyStopping(restore_best_weights=False)",
                received="restore_best_weights=True, which would restore the dense weights alone",
            )  # fmt: skip


def tables_of_run(
    model: object, folder: str | None, reference: bytes, on_nan: str
) -> TablesOfRun | None:
    """The model's tables for a run with servers; None for a model without.

    Rows that the model's layers have themselves are written to files, from which servers load them.

    Args:
        reference: Reference of what an earlier fit has written; empty: none has.
    """
    if folder is None:
        return None
    tables = ModelTables(model)
    specs = tuple(tables.specs)
    stores = {spec.name: spec.store() for spec in specs}
    if not reference:
        tables.give_rows(stores, 0, 1)
    if any(len(store) for store in stores.values()):
        files = TableCheckpoints(folder)
        written = files.after(b"", 0, tuple(sorted(stores)))
        files.write(written, stores, 0, 1)
        files.finish(written, 1)
        reference = written.to_bytes()
    return TablesOfRun(specs, folder, reference, on_nan == "ignore")


def serve_trained(model: object, state: bytes) -> None:
    """Lets the layers of the driver's model read the rows that the workers have written."""
    tables = ModelTables(model)
    if tables.layers and state:
        tables.serve_from(StoredRows(state.decode()))


def refuse_export(model: Any) -> None:
    """Raises ModelError if a model has rows in tables, which no other runtime looks up."""
    if ModelTables(model).layers:
        raise ModelError(
            f"model {model.name!r} cannot be exported: its rows lie in tables outside of it",
            expected="a model whose weights hold all that it computes with",
            received=", ".join(repr(layer.table_name) for layer in ModelTables(model).layers),
            hint="sparkdl.layers.to_plain_model(model, ids) makes a model that can be exported",
        )
