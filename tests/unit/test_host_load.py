"""The load of a host, from files and answers that are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sparkdl.process.host_load import (
    GPU_INTERVAL_S,
    LOAD_INTERVAL_S,
    HostLoad,
    LoadMeter,
    gpu_loads,
)


class Host:
    """A host whose kernel's files and clock the test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.asked, self.gpus = folder, 100.0, 0, ""
        self.set(busy=1000, idle=1000)

    def set(self, *, busy: int, idle: int, available: int = 250) -> None:
        # user nice system idle iowait irq softirq steal guest: waiting for a disk is no work
        line = f"cpu  {busy} 0 0 {idle - 5} 5 0 0 0 7 0\ncpu0 1 2 3\n"
        (self.folder / "stat").write_text(line)
        (self.folder / "meminfo").write_text(
            f"MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: {available} kB\nHugePages_Total: 0\n"
        )

    def ask(self) -> str:
        self.asked += 1
        return self.gpus

    def meter(self, **options: Any) -> LoadMeter:
        return LoadMeter(proc=str(self.folder), now=lambda: self.now, ask=self.ask, **options)


def test_the_load_is_that_since_the_look_before(tmp_path: Path) -> None:
    host = Host(tmp_path)
    meter = host.meter()
    host.set(busy=1030, idle=1070)
    assert meter.look() == HostLoad(30.0, 75.0)
    host.set(busy=1130, idle=1070, available=900)
    host.now += LOAD_INTERVAL_S - 1
    assert meter.look() is None  # too soon
    host.now += 1
    assert meter.look() == HostLoad(100.0, 10.0)
    assert host.asked == 1  # it has no GPUs, so it is not asked again


def test_gpus_are_asked_seldom_and_their_last_answer_stays(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.gpus = "93, 71680, 143360\n0, 0, 143360\n"
    meter = host.meter()
    for look in range(1, 10):
        host.set(busy=1000 + look, idle=1000 + look)
        assert meter.look() == HostLoad(50.0, 75.0, (93.0, 0.0), (50.0, 0.0))
        host.now += LOAD_INTERVAL_S
    assert host.asked == 1 + math.floor(8 * LOAD_INTERVAL_S / GPU_INTERVAL_S)


def test_the_drivers_meter_asks_no_tool(tmp_path: Path) -> None:
    host = Host(tmp_path)
    meter = host.meter(gpus=False)
    host.set(busy=1001, idle=1001)
    assert meter.look() == HostLoad(50.0, 75.0)
    assert host.asked == 0


def test_a_host_without_the_kernels_files_has_no_load(tmp_path: Path) -> None:
    assert LoadMeter(proc=str(tmp_path / "none")).look() is None
    host = Host(tmp_path)
    meter = host.meter()
    (tmp_path / "meminfo").write_text("nothing known\n")
    assert meter.look() is None


@pytest.mark.parametrize("told", ["", "[N/A], [N/A], [N/A]", "1, 2", "1, 2, 0", "no devices"])
def test_what_the_tool_cannot_say_is_left_out(told: str) -> None:
    assert gpu_loads(told) == ((), ())


def test_numbers_come_back(tmp_path: Path) -> None:
    load = HostLoad(1.5, 2.5, (3.0, 4.0), (5.0, 6.0))
    assert HostLoad.of_numbers(load.numbers()) == load


@pytest.mark.parametrize("numbers", [None, "many", [], [1.0], [1.0] * 3, [-1.0, 0.0], [True, 1.0]])
def test_malformed_numbers_are_refused(numbers: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        HostLoad.of_numbers(numbers)
