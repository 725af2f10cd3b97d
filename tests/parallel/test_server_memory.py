"""Memory of the server's process: two copies of the model and a buffer per connection, no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import psutil
import pytest

from sparkdl.coordinator.driver_client import open_driver
from sparkdl.ps.client import Progress, connect, pull_center
from sparkdl.ps.kinds import limits_of
from sparkdl.ps.server import ServerConfig, ServerProcess
from sparkdl.rules import make_rule
from sparkdl.weights import Layout

VALUES = 12_500_000
MODEL_BYTES = 4 * VALUES
WORKERS = 2
SLACK_BYTES = 24 << 20
"""Threads, allocator, and Flask where the transport needs it."""


@contextmanager
def peak_of(pid: int) -> Iterator[list[int]]:
    """Samples a process' resident memory; the list ends with the highest."""
    process, peak, done = psutil.Process(pid), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def resident_without_a_model() -> int:
    layout = Layout.of([("w", (10,), "float32")])
    config = ServerConfig(layout, make_rule("downpour").bind(1), 1)
    with ServerProcess(config, np.zeros(10, np.float32)) as server:
        time.sleep(0.2)
        rss: int = psutil.Process(server.pid).memory_info().rss
        return rss


@pytest.mark.timeout(60)
@pytest.mark.parametrize("transport", ["socket", "shm", "http"])
@pytest.mark.parametrize("rule", ["downpour", "bsp"])
def test_two_models_and_a_buffer_per_connection(transport: str, rule: str) -> None:
    layout = Layout.of([("w", (VALUES,), "float32")])
    base = resident_without_a_model()
    config = ServerConfig(layout, make_rule(rule).bind(WORKERS), WORKERS)
    with (
        ServerProcess(config, np.zeros(VALUES, np.float32)) as server,
        peak_of(server.pid) as peak,
        ExitStack() as stack,
    ):
        clients = [
            stack.enter_context(connect(server.endpoint, transport, rank=rank, layout=layout))
            for rank in range(WORKERS)
        ]
        driver = open_driver(server.endpoint, limits_of(layout))
        stack.callback(driver.close)
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            client = clients[rank]
            try:
                client.join(rows=64, batches_per_epoch=3)
                client.pull()
                for batch in range(3):
                    client.buffer.fill(1e-3)
                    client.push_pull(Progress(epoch=0, batch=batch + 1, batches=1, rows=64))
                client.session.finish()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
        assert not errors
        assert not any(thread.is_alive() for thread in threads)
        training = peak[0] - base
        pull_center(driver)  # the workers are still connected, as when callbacks want the weights
    reading = peak[0] - base
    print(f"{transport}, {rule}: {training / MODEL_BYTES:.2f} models for {WORKERS} workers,"
          f" {reading / MODEL_BYTES:.2f} while the driver reads too")  # fmt: skip
    assert training <= (2 + WORKERS) * MODEL_BYTES + SLACK_BYTES
    assert reading <= (2 + WORKERS + 1) * MODEL_BYTES + SLACK_BYTES
