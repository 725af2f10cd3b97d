"""``spark-submit`` to Hadoop's mini cluster, with the environment as an archive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mini_hadoop import MiniHadoop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
SCRIPT = str(Path(__file__).parent / "scripts" / "yarn_fit.py")


@pytest.mark.parametrize("deploy_mode", ["cluster", "client"])
def test_fit_in_every_mode(hadoop: MiniHadoop, submit, deploy_mode: str) -> None:  # type: ignore[no-untyped-def]
    modes = ["asynchronous", "hogwild", "synchronous", "allreduce:builtin"]
    ended = submit(SCRIPT, *modes, deploy_mode=deploy_mode)
    assert ended.code == 0, ended.output[-3000:] + ended.logs
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
    # the exact modes agree with each other to the last digits
    for one, two in zip(
        found["weights"]["synchronous"], found["weights"]["allreduce:builtin"], strict=True
    ):
        np.testing.assert_allclose(one, two, atol=1e-5)

    checks = {check["name"]: check for check in found["doctor"]["checks"]}
    assert checks["memory overhead"]["status"] == "ok"
    assert [n for n, c in checks.items() if c["status"] == "error"] == []
