"""Horovod in real processes: initialised, repeatable, and nothing left of it afterwards."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from communicator_worlds import ProcessWorld

from sparkdl.errors import TransportError

needs_horovod = pytest.mark.skipif(
    not importlib.util.find_spec("horovod"), reason="horovod is not installed: make horovod"
)


@needs_horovod
def test_connecting_again_in_the_same_process_and_the_environment_restored():
    world = ProcessWorld([None] * 2, name="horovod")
    try:
        for _ in range(2):
            answers = world.run("horovod_state")
            assert [a["inside"] for a in answers] == [(True, r, 2, 2.0) for r in range(2)], answers
            assert all(a["after"] == (False, []) for a in answers), answers
            world.connect_again()
            assert world.connected == [(0, 2), (1, 2)]
        world.run("in_order", count=3, size=1000)
        for rank in range(2):
            world.tell(rank, ("run", "reduce_until", {"seconds": 60.0, "size": 1000}))
        time.sleep(0.3)
        world.processes[1].send_signal(signal.SIGKILL)
        assert isinstance(world.hear(0), TransportError)
    finally:
        world.close()


@needs_horovod
def test_auto_takes_horovod_for_functions_and_the_builtin_one_without_gpus():
    world = ProcessWorld([None] * 2, name="auto", calls_horovod=False)
    try:
        assert world.run("choice") == [("builtin", False)] * 2
        assert world.run("large_mean", size=1000, value=3.0) == [3.0] * 2
        world.connect_again()
        assert world.run("choice") == [("horovod", True)] * 2
        assert world.run("large_mean", size=1000, value=3.0) == [3.0] * 2
    finally:
        world.close()


@needs_horovod
def test_auto_goes_on_without_horovod_where_a_rank_cannot_start_it():
    world = ProcessWorld([None] * 2, name="auto")
    try:
        assert [a["after"] for a in world.run("horovod_state")] == [(False, [])] * 2  # closed
        assert world.run("occupy_horovod") == [False, True]
        world.run("pretend_gpus")
        world.connect_again(calls_horovod=False)
        assert world.run("choice") == [("builtin", False), ("builtin", True)]
        assert world.run("large_mean", size=1000, value=3.0) == [3.0] * 2
    finally:
        world.close()


def test_importing_the_adaptor_imports_no_framework():
    code = (
        "import sys, sparkdl.collective.horovod, sparkdl.collective.strategy;"
        "bad = {'tensorflow', 'horovod', 'keras', 'pyspark'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
