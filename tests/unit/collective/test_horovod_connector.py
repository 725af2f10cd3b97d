"""Where Horovod is not tried, although it imports, and where it is taken unmeasured."""

from __future__ import annotations

import sys
import time
from types import ModuleType

import numpy as np
import pytest

from sparkdl.collective.horovod_connector import _measure, unreachable
from sparkdl.collective.member import Member
from sparkdl.collective.solo import SoloCommunicator

IPV4 = (Member("10.0.0.5", 1, "a"), Member("10.0.0.6", 2, "b"))
IPV6 = (Member("fd77::5", 1, "a"), Member("fd77::6", 2, "b"))


@pytest.fixture(autouse=True)
def our_build(monkeypatch: pytest.MonkeyPatch) -> None:
    horovod = ModuleType("horovod")
    horovod.__version__ = "0.28.1+sparkdl"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", horovod)


def test_horovod_is_not_tried_between_hosts_over_ipv6() -> None:
    assert unreachable(IPV4) == ""
    assert unreachable(IPV6).endswith(
        "over IPv4 only, the ranks' addresses: ['fd77::5', 'fd77::6']"
    )
    assert "['fd77::6']" in unreachable((IPV4[0], IPV6[1]))


def test_ranks_of_one_host_meet_on_its_loopback() -> None:
    assert unreachable((IPV6[0], IPV6[0])) == ""


class Delayed:
    """Horovod, as far as it is measured: a reduction takes so long."""

    def __init__(self, seconds: float, on_gpus: bool) -> None:
        self._seconds, self.reduces_on_gpus = seconds, on_gpus

    def reduce_plainly(self, buffer: np.ndarray) -> None:
        time.sleep(self._seconds)


@pytest.mark.parametrize("on_gpus", [False, True])
def test_what_reduces_on_gpus_is_taken_however_slow_and_else_the_faster(on_gpus: bool) -> None:
    found = _measure(SoloCommunicator(), Delayed(0.02, on_gpus), 4096)  # type: ignore[arg-type]
    assert found.seconds["horovod"] >= 0.02
    assert found.builtin_wins is not on_gpus
    assert (found.seconds["builtin"] == np.inf) is on_gpus
