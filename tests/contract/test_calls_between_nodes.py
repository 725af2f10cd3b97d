"""Calls between nodes on threads and processes: every situation; a killed node of each role.

``tests/spark/program/test_program.py`` has the same situations on Spark.
"""

from __future__ import annotations

import time
from typing import Any

import call_situations
import program_cases
import pytest

from sparkdl.errors import WorkerError
from sparkdl.program import (
    CacherNode,
    CourierNode,
    Program,
    PyClassNode,
    PyNode,
    ReplayNode,
    launch,
    stop,
)


@pytest.fixture(scope="module", params=["threads", "processes"])
def told(request: pytest.FixtureRequest) -> dict[str, str]:
    with launch(call_situations.examination(), request.param) as launched:
        found: dict[str, str] = launched.results("examiner", 120)[0]
    return found


@pytest.mark.parametrize("situation", call_situations.SITUATIONS)
def test_situation(told: dict[str, str], situation: str) -> None:
    assert told[situation] == ""


def hold(*nodes: Any) -> None:
    time.sleep(60)


@pytest.mark.processes
@pytest.mark.parametrize("role", ["server", "replay", "cacher", "function", "class"])
def test_a_killed_node_of_each_role_is_named_within_15_s(role: str) -> None:
    program = Program("roles")
    server = program.add_node(CourierNode(program_cases.Counter), label="server")
    replay = program.add_node(ReplayNode(10), label="replay")
    cacher = program.add_node(CacherNode(server, 100), label="cacher")
    program.add_node(PyClassNode(program_cases.Loop), label="loop")
    served = {"server": server, "replay": replay, "cacher": cacher}
    if role in served:
        program.add_node(PyNode(call_situations.throw, served[role]), label="thrower")
    elif role == "function":
        program.add_node(PyNode(call_situations.die), label=role)
    else:
        program.add_node(PyClassNode(call_situations.die), label=role)
    program.add_node(PyNode(hold, server, replay, cacher), label="user")
    begun = time.monotonic()
    with pytest.raises(
        WorkerError, match=f"node {role}/0 failed: its process was ended by SIGKILL"
    ):
        launch(program, "processes").wait(60)
    assert time.monotonic() - begun < 15


class Link:
    """A node of a ring: it passes a number on until it has gone all round."""

    def __init__(self, following: Any) -> None:
        self._following = following

    def hand_on(self, hops: int) -> int:
        return 0 if hops == 0 else 1 + int(self._following.hand_on(hops - 1))


@pytest.mark.processes
def test_thirty_nodes_in_a_ring_call_twice_round() -> None:
    program = Program("ring")
    links = [CourierNode(Link) for _ in range(29)]
    with program.group("link"):
        handles = [program.add_node(link) for link in links]
    for number, link in enumerate(links):
        link.configure(handles[(number + 1) % len(links)])
    program.add_node(PyNode(_stop_after, handles[0]), label="starter")
    launched = launch(program, "threads")
    assert launched.results("starter", 120) == [60]


def _stop_after(first: Any) -> int:
    hops = int(first.hand_on(60))
    stop()
    return hops
