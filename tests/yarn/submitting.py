"""``spark-submit --master yarn --archives env.tar.gz#environment ...`` and what came of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mini_hadoop import MiniHadoop, spark_jars
from start.java_options import LIGHT

ROOT = Path(__file__).parents[2]
SUBMIT_S = 280.0
T = TypeVar("T")
_LOGGED = 12_000
"""Characters of a container's log that are shown."""


@dataclass(frozen=True)
class Submitted:
    """How a submitted application ended.

    Args:
        code: Exit status of ``spark-submit``.
        output: What it printed; in client mode the driver's lines too.
        result: What the script has written as JSON; empty if nothing.
        logs: What the application's containers have printed; in cluster mode the driver's too.
    """

    code: int
    output: str
    result: dict[str, Any]
    logs: str

    @property
    def told(self) -> str:
        """What anyone printed, without what is said of every application."""
        lines = (self.output + self.logs).splitlines()
        return "\n".join(line for line in lines if " INFO " not in line)


@dataclass
class Submission:
    """An application that was submitted and may still run.

    Args:
        hadoop: The cluster.
        process: ``spark-submit``.
        output: The file of what it prints.
        result: The file that the script writes.
        folder: Where scripts leave files for the test: the second argument of each.
    """

    hadoop: MiniHadoop
    process: subprocess.Popen[bytes]
    output: Path
    result: Path
    folder: Path
    _application: str = field(default="", init=False)

    @property
    def application(self) -> str:
        """The id that YARN gave it, as soon as it has one."""
        if not self._application:
            self._application = self.until(self._find_id, "an application id")
        return self._application

    def _find_id(self) -> str | None:
        found = re.search(r"\bapplication_\d+_\d+\b", self.output.read_text(errors="replace"))
        return found and found.group()

    def until(self, look: Callable[[], T | None], what: str, limit_s: float = SUBMIT_S) -> T:
        """What ``look`` returns, as soon as it is something."""
        deadline = time.monotonic() + limit_s
        while not (found := look()):
            ended = self.process.poll() is not None
            assert not ended, f"ended without {what}: {self.output.read_text()[-4000:]}{self.logs}"
            assert time.monotonic() < deadline, f"no {what}: {self.logs}"
            time.sleep(0.2)
        return found

    def until_file(self, name: str) -> str:
        """The text of a file that the script leaves in its folder, as soon as it is there."""
        file = self.folder / name
        self.until(lambda: file.exists() or None, name)
        return file.read_text()

    @property
    def logs(self) -> str:
        """The ends of what the containers printed, the first container first."""
        root = self.hadoop.folder
        names = {"stdout", "stderr", "prelaunch.err"}
        files = [  # the node manager may remove folders meanwhile, which os.walk leaves out
            Path(folder, name)
            for folder, _, there in os.walk(root)
            for name in names & set(there)
            if (self._application or "-") in Path(folder).parts
        ]
        shown = [(f, f.read_text(errors="replace")[-_LOGGED:]) for f in sorted(files)]
        return "\n".join(f"== {file.relative_to(root)}\n{text}" for file, text in shown if text)

    def wait(self) -> Submitted:
        """How it ended."""
        code = self.process.wait(SUBMIT_S)
        _ = self._application or (self._find_id() and self.application)
        found = json.loads(self.result.read_text()) if self.result.exists() else {}
        return Submitted(code, self.output.read_text(errors="replace"), found, self.logs)


@dataclass(frozen=True)
class Submitter:
    """Submits scripts of ``tests/yarn/scripts`` as ``SCRIPT RESULT FOLDER ARGUMENTS``.

    Args:
        hadoop: The cluster.
        archive: The environment.
        folder: For what they print and write.
    """

    hadoop: MiniHadoop
    archive: Path
    folder: Path

    def __call__(self, script: str, *arguments: str, **how: Any) -> Submitted:
        """How an application ended; the arguments are those of :meth:`start`."""
        with self.start(script, *arguments, **how) as submission:
            return submission.wait()

    @contextmanager
    def start(
        self,
        script: str,
        *arguments: str,
        deploy_mode: str = "cluster",
        conf: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Iterator[Submission]:
        """A submitted application; ``spark-submit`` does not outlive the ``with`` block.

        Args:
            script: Its file's name.
            arguments: Of the script.
            deploy_mode: Of the driver.
            conf: More settings; one of None is left out.
            environment: More variables for ``spark-submit``.
        """
        number = len(list(self.folder.glob("*.out")))
        output, result = self.folder / f"{number}.out", self.folder / f"{number}.json"
        settings = {
            "spark.yarn.jars": f"local:{spark_jars()}/*",
            "spark.yarn.maxAppAttempts": "1",
            "spark.executor.instances": "2",
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.memoryOverhead": "2g",
            "spark.driver.memory": "768m",
            "spark.driver.memoryOverhead": "2g",
            "spark.ui.enabled": "false",
            "spark.yarn.appMasterEnv.SPARK_LOCAL_IP": "127.0.0.1",
            "spark.executorEnv.SPARK_LOCAL_IP": "127.0.0.1",
            "spark.pyspark.python": "./environment/bin/python",
            "spark.driver.extraJavaOptions": LIGHT,
            "spark.executor.extraJavaOptions": LIGHT,
            **({"spark.pyspark.driver.python": sys.executable} if deploy_mode == "client" else {}),
            **(conf or {}),
        }
        command = [
            str(Path(sys.executable).parent / "spark-submit"), "--master", "yarn",
            "--deploy-mode", deploy_mode, "--archives", f"{self.archive}#environment",
            *(part for name, value in settings.items() for part in ("--conf", f"{name}={value}")),
            str(Path(__file__).parent / "scripts" / script), str(result), str(self.folder),
            *arguments,
        ]  # fmt: skip
        variables = self._environment(deploy_mode) | (environment or {})
        with output.open("wb") as log:
            process = subprocess.Popen(
                command, env=variables, cwd=self.folder, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        submission = Submission(self.hadoop, process, output, result, self.folder)
        try:
            yield submission
        finally:
            if process.poll() is None:  # the test failed: nothing of it runs beside the next one
                if submission._find_id():
                    self.hadoop.ask("end", submission.application)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)

    def _environment(self, deploy_mode: str) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYSPARK_")}
        inherited.pop("PYTHONPATH", None)  # the archive must bring everything
        programs = Path(sys.executable).parent  # where pyspark's spark-submit finds it
        return {
            **inherited,
            "PATH": f"{programs}{os.pathsep}{inherited['PATH']}",
            "HADOOP_USER_NAME": "anna",  # who may not do all, as the cluster's own user may
            "HADOOP_CONF_DIR": str(self.hadoop.conf),
            "YARN_CONF_DIR": str(self.hadoop.conf),
            **({"PYTHONPATH": str(ROOT)} if deploy_mode == "client" else {}),
        }


def result_of(ended: Submitted) -> dict[str, Any]:
    """What the script of an application that ended well has written."""
    assert ended.code == 0, ended.told
    return ended.result


def check_repetition(found: dict[str, Any], mode: str, epochs: int) -> None:
    """No epoch ended twice, so at most the one that was going on was trained again.

    Its rows are all there; in ``synchronous`` but for those of the lost worker, without whom the
    rounds go on until Spark has started the next one.
    """
    assert found["ended"] == list(range(epochs)), found["ended"]
    least = 256 if mode == "synchronous" else 512
    assert all(least <= rows <= 512 for rows in found["rows"]), found["rows"]
    restarts = [one for one in found["warnings"] if "workers were lost" in one]
    assert len(restarts) == (mode == "allreduce"), found["warnings"]
