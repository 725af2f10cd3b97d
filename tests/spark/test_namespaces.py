"""A standalone cluster whose master, driver and workers have networks of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import namespaces
import numpy as np
import pyspark
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "spark" / "scripts"
LET_IN = ("7300-7350", "7077")
"""What every machine's firewall lets in: one range, and the master's port."""
RELAYED = (7306, 7307)
"""A server listens on two: for framed messages, and for HTTP."""
NAME = "driver.cluster.test"


def _check_doctor(found: dict[str, Any]) -> None:
    """Nothing is wrong where all is right; each fault is the only error that is named."""

    def wrong(case: str) -> dict[str, dict[str, str]]:
        return {c["name"]: c for c in found[case]["checks"] if c["status"] != "ok"}

    assert wrong("healthy") == {}
    assert wrong("relay") == {}
    dropped = "timed out after 10 s, as where a firewall drops packets"
    for case, name, port in (
        ("relay left out", "driver port", RELAYED[0]),
        ("port outside of the range", "driver port", 7999),
        ("ranks outside of the range", "between ranks", 7400),
    ):
        assert wrong(case).keys() == {name}, (case, wrong(case))
        assert dropped in wrong(case)[name]["found"], case
        assert f":{port}:" in wrong(case)[name]["found"], case
        assert found[case]["seconds"] < 100, case
    loopback = wrong("loopback")
    assert loopback.keys() == {"addresses", "driver port"}
    assert f"{NAME!r} is a loopback address for" in loopback["addresses"]["found"]
    # no executor finds the driver by that name: Spark has none
    slots = wrong("loopback for Spark")["slots"]
    assert slots["status"] == "error"
    assert f"spark.driver.host={NAME}" in slots["hint"]


@pytest.mark.parametrize("version", [4, 6])
def test_workers_on_other_machines(tmp_path: Path, version: int) -> None:
    """The driver binds all addresses and names one; the server is reached by another one.

    All machines drop what comes to other ports than those of one range. A fourth machine passes two
    of them on to the driver, to which the workers have no way there.
    """
    problem = namespaces.missing()
    if problem is not None:
        pytest.skip(problem)
    spark_class = str(Path(pyspark.__file__).parent / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy."
    inherited = {k: v for k, v in os.environ.items() if k != "SPARK_LOCAL_IP"}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "SPARK_WORKER_DIR": str(tmp_path / "work")}
    if version == 6:  # as Spark's pages have it
        environment["SPARK_PREFER_IPV6"] = "true"
        environment["JDK_JAVA_OPTIONS"] = "-Djava.net.preferIPv6Addresses=true"
    with ExitStack() as stack:
        driver, *workers, relay = stack.enter_context(namespaces.machines(4, version))
        for one in (driver, *workers):
            one.let_in(LET_IN, version)
            loopback = "127.0.1.1" if version == 4 else "::1"
            stack.enter_context(one.hosts(**{NAME: driver.address if one is driver else loopback}))
        for one in workers:
            for port in RELAYED:
                driver.drop(one.address, port, version)
        hosts = [one.address if version == 4 else f"[{one.address}]" for one in (driver, *workers)]
        master = f"spark://{hosts[0]}:7077"
        commands = [(driver, [f"{deploy}master.Master", "--host", hosts[0], "--port", "7077",
                              "--webui-port", "7343"])]  # fmt: skip
        commands += [
            (one, [f"{deploy}worker.Worker", "--host", host, "--webui-port", "7342",
                   "--port", "7341", "--cores", "2", "--memory", "1g", master])
            for one, host in zip(workers, hosts[1:], strict=True)
        ]  # fmt: skip
        script = tmp_path / "gpus.sh"
        script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["4", "5"]}\'\n')
        script.chmod(0o755)
        environment["SPARK_WORKER_OPTS"] = (
            "-Dspark.worker.resource.gpu.amount=2 "
            f"-Dspark.worker.resource.gpu.discoveryScript={script}"
        )
        environment["SPARK_MASTER_OPTS"] = "-Dspark.deploy.maxExecutorRetries=-1"
        for number, (machine, command) in enumerate(commands):
            log = stack.enter_context(open(tmp_path / f"{number}.log", "wb"))
            process = subprocess.Popen(
                machine.command(spark_class, *command), stdout=log, stderr=log,
                env={**environment, "SPARK_LOCAL_IP": machine.address},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
        passing = subprocess.Popen(
            relay.command(sys.executable, str(SCRIPTS / "relay.py"), relay.address,
                          driver.address, *map(str, RELAYED)),
            stdout=subprocess.PIPE,
        )  # fmt: skip
        stack.callback(passing.wait)
        stack.callback(passing.terminate)
        assert passing.stdout is not None
        stack.enter_context(passing.stdout)
        assert passing.stdout.readline() == b"ready\n"
        deadline = time.monotonic() + 120
        while (tmp_path / "0.log").read_text().count("Registering worker") < 2:
            assert time.monotonic() < deadline, (tmp_path / "0.log").read_text()[-2000:]
            time.sleep(0.2)
        result = tmp_path / "result.json"
        second = namespaces.second_address(version)
        ran = subprocess.run(
            driver.command(
                sys.executable, str(SCRIPTS / "namespaces_fit.py"), master, hosts[0], second,
                relay.address, NAME, str(script), str(result),
            ),
            env=environment, capture_output=True, text=True, timeout=800,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    found = json.loads(result.read_text())
    assert sorted(found["addresses"]) == [one.address for one in workers]
    for mode, losses in found["losses"].items():
        assert losses[-1] < losses[0], mode
    assert found["workers"] == 4, "of four cores, by resources={'cpus': 1} beside spark.task.cpus=2"
    assert found["gpus"] == ["4", "4", "5", "5"], "one for each, which other stages leave alone"
    pairs = zip(found["weights"]["synchronous"], found["weights"]["allreduce"], strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one, two, atol=1e-5)
    # a firewall that lets in one range lets in all of it, beside the master's own ports
    allowed = {6066, 7077, *range(7300, 7350)}
    assert set(found["driver ports"]) <= allowed, found["driver ports"]
    assert any(7300 <= port < 7310 for port in found["driver ports"]), "the server's port"
    for ports in found["worker ports"]:
        assert set(ports) <= allowed, found["worker ports"]
    _check_doctor(found["doctor"])
