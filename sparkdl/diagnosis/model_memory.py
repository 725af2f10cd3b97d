"""Findings about a model: whether its weights, its optimizer's state and its tables fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparkdl.config import FitConfig
from sparkdl.diagnosis.executors import Facts
from sparkdl.diagnosis.host_checks import FRAMEWORK_BYTES, hosts_of, room_of, size_text
from sparkdl.diagnosis.report import Check, Status
from sparkdl.learner.prediction.shared_weights import LEAST_BYTES
from sparkdl.learner.state.model_weights import model_layout
from sparkdl.learner.state.optimizer_state import slots_of
from sparkdl.learner.state.served_rows import ModelTables
from sparkdl.tables.service import TableSpec

if TYPE_CHECKING:
    import keras

_INDEX_BYTES = 18.5
"""Bytes of the table that finds a row by its id, between two of its growths."""
_SERVER_BYTES = 200 << 20
"""A server's process without weights."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a model takes in a run; what the framework computes with a batch is not known.

    Args:
        weights: Weights of the model, in float32.
        slots: Copies of the trained weights that the optimizer keeps.
        workers: Workers of the run.
        servers: The servers that share the weights; 0 in all-reduce.
    """

    weights: int
    slots: int
    workers: int
    servers: int

    @property
    def worker(self) -> int:
        """Those of a worker: weights, gradients and slots, and the buffers that travel."""
        return FRAMEWORK_BYTES + self.weights * (2 + self.slots + (3 if self.servers else 1))

    def predicting(self, workers: int) -> int:
        """Those of the workers of one executor that predict: large weights lie there once."""
        copies = 1 if self.weights >= LEAST_BYTES else workers
        return workers * FRAMEWORK_BYTES + copies * self.weights

    @property
    def server(self) -> int:
        """Those of a server: its range, the range that is sent, and a buffer for each worker."""
        share = -(-self.weights // max(1, self.servers))
        return _SERVER_BYTES + share * (2 + self.workers)

    @property
    def driver(self) -> int:
        """Those of the driver: the model with its slots, and its flat copy."""
        return FRAMEWORK_BYTES + self.weights * (2 + self.slots)


def needs_of(model: keras.Model, config: FitConfig) -> MemoryNeeds:
    """The memory that a fit of ``model`` takes."""
    servers = 0
    if config.mode != "allreduce":
        asked = config.network.num_servers
        servers = asked if isinstance(asked, int) else 1
    workers = config.num_workers or 1
    return MemoryNeeds(model_layout(model).size_bytes, slots_of(model.optimizer), workers, servers)


def check_model(
    model: keras.Model, config: FitConfig, driver: Facts, executors: Mapping[str, Facts]
) -> list[Check]:
    """Whether the machines have memory for a model, and for how many rows of its tables."""
    needs = needs_of(model, config)
    beside = config.network.servers == "driver"
    at_driver = needs.driver + (needs.servers * needs.server if beside else 0)
    spaces = [(room_of(facts), count) for _, count, facts in hosts_of(executors)]
    rooms = [room // count for room, count in spaces if room is not None]
    own, least = room_of(driver), min(rooms, default=None)
    said = f"{size_text(needs.worker)} for each worker, {size_text(at_driver)} at the driver"
    if needs.servers and beside:
        said += f" with {needs.servers} server{'s' * (needs.servers > 1)}"
    said += f"; to predict, {size_text(needs.predicting(4))} for four workers of an executor"
    short = []
    if own is not None and own < at_driver:
        short.append(f"{size_text(own)} at the driver")
    if least is not None and least < needs.worker:
        short.append(f"{size_text(least)} at an executor")
    checks = [Check("model memory", "ok", said)]
    if short:
        hint = (
            "larger containers, servers on executors (Network(servers='executors')), "
            "rule='sliced', or rows in tables (sparkdl.layers.ServedEmbedding)"
        )
        checks = [Check("model memory", "error", "; ".join(short), said, hint)]
    specs = ModelTables(model).specs
    if specs:
        if needs.servers and beside:
            places, free = needs.servers, None if own is None else own - at_driver
        else:
            places = needs.servers or needs.workers
            base = needs.server if needs.servers else needs.worker
            free = None if least is None else places * (least - base)
        checks.append(_check_tables(specs, places, needs, free))
    return checks


def row_bytes(spec: TableSpec) -> float:
    """Bytes of memory that a row of a table takes, with its state and its place in the index."""
    store = spec.store()
    numbers = store.dim + store.rule.width(store.dim)
    return 4 * numbers + 8 + _INDEX_BYTES + (8 if store.tracks else 0)


def _check_tables(
    specs: list[TableSpec], places: int, needs: MemoryNeeds, free: int | None
) -> Check:
    each = {spec.name: row_bytes(spec) for spec in specs}
    said = ", ".join(f"{name!r} {size:.0f} bytes a row" for name, size in each.items())
    bounds = {s.name: s.store(1).eviction.max_rows for s in specs}
    known = sum(each[name] * (rows or 0) for name, rows in bounds.items())
    where = f"{places} {'server' if needs.servers else 'worker'}{'s' * (places > 1)}"
    if free is None:
        return Check("tables", "ok", f"{said}; how much memory {where} have is not known here")
    left = max(0.0, free - known)
    open_ended = [each[name] for name, rows in bounds.items() if rows is None]
    status: Status = "ok" if free > known else "error"
    if open_ended:
        said += f"; room for {left / np.mean(open_ended):,.0f} rows in {where}"
    else:
        said += f"; {size_text(int(known))} of {size_text(max(0, free))} in {where}"
    if status == "ok":
        return Check("tables", "ok", said)
    return Check(
        "tables", "error", said, f"{size_text(int(known))} for max_rows of all tables",
        "more servers or workers, fewer rows (max_rows=...), a smaller dim, optimizer='sgd'",
    )  # fmt: skip
