"""``spark-submit`` to Hadoop's mini cluster, with the environment as an archive."""

from __future__ import annotations

import time
from importlib.util import find_spec

import numpy as np
import pytest
from submitting import Submitted, Submitter

pytestmark = pytest.mark.timeout(900)
HOROVOD = ("allreduce:horovod",) if find_spec("horovod") else ()
MODES = ("asynchronous", "hogwild", "synchronous", "allreduce:builtin", *HOROVOD)


def check_modes(ended: Submitted, deploy_mode: str) -> None:
    """Every mode has learned, the exact ones alike, and all ran where they should."""
    assert ended.code == 0, ended.told
    found = ended.result
    assert (found["master"], found["deploy_mode"]) == ("yarn", deploy_mode)
    assert found["application"].startswith("application_")

    # the interpreter of the executors is the one in the archive, in the container's own folder
    assert len(found["ranks"]) == 2
    for python, folder, _ in found["ranks"]:
        assert found["application"] in folder
        assert "environment/bin/python" in python
    if deploy_mode == "cluster":
        assert "environment/bin/python" in found["driver_python"]

    for mode, losses in found["losses"].items():
        assert losses[-1] < losses[0], mode
    # the exact modes agree with plain Keras in one process to the last digits
    exact = [w for mode, w in found["weights"].items() if mode.startswith(("sync", "allreduce"))]
    assert len(exact) >= 2
    for weights in exact:
        for one, two in zip(found["plain"], weights, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)

    checks = {check["name"]: check for check in found["doctor"]["checks"]}
    assert checks["memory overhead"]["status"] == "ok"
    assert [n for n, c in checks.items() if c["status"] == "error"] == []
    assert found["files"] == {"model": True, "checkpoints": True, "scored": 256}


def test_fit(submit: Submitter) -> None:
    """The short one, part of ``make test``: the exact mode of each family, all in the cluster."""
    check_modes(submit("yarn_fit.py", "synchronous", "allreduce:builtin"), "cluster")


@pytest.mark.slow
def test_fit_in_every_mode(submit: Submitter) -> None:
    ended = submit("yarn_fit.py", *MODES, "logs")
    check_modes(ended, "cluster")
    # logs on HDFS, named with a scheme and without one
    assert ended.result["logs"] == {"epochs in lines": [2, 2], "boards": [True, True]}


@pytest.mark.slow
def test_driver_on_this_machine(submit: Submitter) -> None:
    check_modes(submit("yarn_fit.py", *MODES, deploy_mode="client"), "client")


@pytest.mark.slow
def test_time_to_the_first_step(submit: Submitter) -> None:
    """Beside a job of plain PySpark that imports Keras: at most 5 s more.

    The smaller one of two times each, as other processes only ever add to them.
    """
    seconds: dict[str, list[float]] = {"bare": [], "fit": []}
    for kind in ("bare", "fit", "fit", "bare"):
        began = time.time()
        ended = submit("yarn_start.py", kind)
        assert ended.code == 0, ended.told
        seconds[kind].append(ended.result["done"] - began)
    print(f"seconds from submit: {seconds}")
    assert min(seconds["fit"]) < min(seconds["bare"]) + 5, seconds
