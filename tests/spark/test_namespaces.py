"""A standalone cluster whose master, driver and workers have networks of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import namespaces
import numpy as np
import pyspark
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "spark" / "scripts" / "namespaces_fit.py")


@pytest.mark.parametrize("version", [4, 6])
def test_workers_on_other_machines(tmp_path: Path, version: int) -> None:
    """The driver binds all addresses and names one; the server is reached by another one."""
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
        driver, *workers = stack.enter_context(namespaces.machines(3, version))
        hosts = [one.address if version == 4 else f"[{one.address}]" for one in (driver, *workers)]
        master = f"spark://{hosts[0]}:7077"
        commands = [(driver, [f"{deploy}master.Master", "--host", hosts[0], "--port", "7077",
                              "--webui-port", "7343"])]  # fmt: skip
        commands += [
            (one, [f"{deploy}worker.Worker", "--host", host, "--webui-port", "7342",
                   "--port", "7341", "--cores", "2", "--memory", "1g", master])
            for one, host in zip(workers, hosts[1:], strict=True)
        ]  # fmt: skip
        for number, (machine, command) in enumerate(commands):
            log = stack.enter_context(open(tmp_path / f"{number}.log", "wb"))
            process = subprocess.Popen(
                machine.command(spark_class, *command), stdout=log, stderr=log,
                env={**environment, "SPARK_LOCAL_IP": machine.address},
            )  # fmt: skip
            stack.callback(process.wait)
            stack.callback(process.terminate)
        deadline = time.monotonic() + 120
        while (tmp_path / "0.log").read_text().count("Registering worker") < 2:
            assert time.monotonic() < deadline, (tmp_path / "0.log").read_text()[-2000:]
            time.sleep(0.2)
        result = tmp_path / "result.json"
        second = namespaces.second_address(version)
        ran = subprocess.run(
            driver.command(sys.executable, SCRIPT, master, hosts[0], second, str(result)),
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    found = json.loads(result.read_text())
    assert sorted(found["addresses"]) == [one.address for one in workers]
    for mode, losses in found["losses"].items():
        assert losses[-1] < losses[0], mode
    assert found["workers"] == 4, "of four cores, by resources={'cpus': 1} beside spark.task.cpus=2"
    pairs = zip(found["weights"]["synchronous"], found["weights"]["allreduce"], strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one, two, atol=1e-5)
    # a firewall that lets in one range lets in all of it, beside the master's own ports
    allowed = {6066, 7077, *range(7300, 7350)}
    assert set(found["driver ports"]) <= allowed, found["driver ports"]
    assert any(7300 <= port < 7310 for port in found["driver ports"]), "the server's port"
    for ports in found["worker ports"]:
        assert set(ports) <= allowed, found["worker ports"]
    errors = [c for c in found["doctor"]["checks"] if c["status"] != "ok"]
    assert errors == []
