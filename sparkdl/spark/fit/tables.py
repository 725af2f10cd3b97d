"""A fit of a model whose layers have their rows in tables: what it needs, and where rows end up."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sparkdl.collective.rules import Mean
from sparkdl.config import FitConfig
from sparkdl.errors import ConfigError, ModelError
from sparkdl.files import storage
from sparkdl.files.checkpoints import Checkpoints
from sparkdl.layers.local_rows import StoredRows
from sparkdl.learner.callback_sink import keeping_callbacks, restores_best
from sparkdl.learner.state.optimizer_state import ModelOptimizer
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.ps.choice import ServerExchange
from sparkdl.ps.server.config import TablesOfRun
from sparkdl.spark.fit.choice import ChosenExchange
from sparkdl.tables.checkpoints import TableCheckpoints


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
        served = type(exchange.rule) is Mean and exchange.window == 1
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
