"""Where Horovod is not tried, although it imports, and where it is of use."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from sparkdl.collective.communicator import Member
from sparkdl.collective.horovod import reduces_on_gpus, unreachable

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


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
@pytest.mark.parametrize("nccl", [False, True])
def test_horovod_reduces_on_gpus_where_both_are_there(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], nccl: bool
) -> None:
    tensorflow = SimpleNamespace(config=SimpleNamespace(list_logical_devices=lambda kind: gpus))
    adaptor = SimpleNamespace(
        nccl_built=lambda: nccl, gloo_built=lambda: True, is_initialized=lambda: False
    )
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", adaptor)
    monkeypatch.setitem(sys.modules, "horovod.runner.http.http_server", ModuleType("http_server"))
    assert reduces_on_gpus() == (bool(gpus) and nccl)
