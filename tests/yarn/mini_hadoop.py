"""Hadoop's own mini cluster: HDFS, a ResourceManager and two NodeManagers, in one Java process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

VERSION_OF = "hadoop-client-api-"
MAIN = "org.apache.hadoop.mapreduce.MiniHadoopClusterManager"
START_S = 200.0
_DEPENDENCIES = (
    ("org.apache.hadoop", "hadoop-client-minicluster", None),
    # what its classes for tests name, and its list of dependencies leaves out
    ("org.junit.jupiter", "junit-jupiter-api", "5.13.4"),
    ("junit", "junit", "4.13.2"),
    ("org.mockito", "mockito-core", "4.11.0"),
    ("org.assertj", "assertj-core", "3.27.3"),
)
"""Group, name and version; None for the version of Spark's Hadoop."""
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>sparkdl</groupId><artifactId>mini</artifactId><version>1</version>
<dependencies>{dependencies}</dependencies></project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)


class Unavailable(Exception):
    """What the mini cluster needs is not on this machine; the text says what."""


def spark_jars() -> Path:
    """The folder of Spark's jars."""
    import pyspark

    return Path(pyspark.__file__).parent / "jars"


def hadoop_jars() -> list[Path]:
    """The mini cluster's jars, of the Hadoop version that Spark has; from Maven, once.

    Raises:
        Unavailable: There is no Maven, or it finds nothing.
    """
    version = next(spark_jars().glob(f"{VERSION_OF}*.jar")).stem.removeprefix(VERSION_OF)
    folder = Path.home() / ".cache" / "sparkdl" / f"hadoop-{version}"
    jars, done = folder / "jars", folder / "complete"
    listed = [_DEPENDENCY.format(group, name, v or version) for group, name, v in _DEPENDENCIES]
    pom = _POM.format(dependencies="\n".join(listed))
    if not done.exists() or done.read_text() != pom:
        if shutil.which("mvn") is None:
            raise Unavailable("Hadoop's mini cluster needs Maven (mvn) for its first download")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pom.xml").write_text(pom)
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime",
                   f"-DoutputDirectory={jars}"]  # fmt: skip
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
        if ran.returncode:
            raise Unavailable(f"Maven could not get Hadoop's mini cluster: {ran.stdout[-500:]}")
        done.write_text(pom)
    return sorted(jars.glob("*.jar"))


class MiniHadoop:
    """The running cluster; ends with the ``with`` block.

    Args:
        folder: For its data, logs and configuration.
        settings: More settings of Hadoop.

    ``conf`` is the folder for ``HADOOP_CONF_DIR``.
    """

    def __init__(self, folder: Path, settings: dict[str, str] | None = None) -> None:
        self.folder, self.conf = folder, folder / "conf"
        self._settings = {
            "yarn.nodemanager.vmem-check-enabled": "false",
            "yarn.nodemanager.pmem-check-enabled": "true",
            "yarn.nodemanager.resource.memory-mb": "8192",
            "yarn.nodemanager.resource.cpu-vcores": "8",
            "yarn.scheduler.minimum-allocation-mb": "256",
            "yarn.scheduler.maximum-allocation-mb": "8192",
            "yarn.nodemanager.disk-health-checker.enable": "false",
            "yarn.log-aggregation-enable": "false",
            "yarn.nodemanager.delete.debug-delay-sec": "600",
            "yarn.scheduler.capacity.maximum-am-resource-percent": "0.9",
            "dfs.replication": "1",
            "fs.permissions.umask-mode": "022",
            **(settings or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "hadoop.log"

    def __enter__(self) -> MiniHadoop:
        jars = hadoop_jars()
        self.conf.mkdir(parents=True)
        written = self.folder / "written.xml"
        logging = sorted(spark_jars().glob("slf4j-api-*.jar"))
        classpath = os.pathsep.join(str(jar) for jar in [*jars, *logging])
        options = [
            part for name, value in self._settings.items() for part in ("-D", f"{name}={value}")
        ]
        command = [
            "java", "-Xmx768m", "-cp", classpath, f"-Dtest.build.data={self.folder}/data",
            f"-Dhadoop.log.dir={self.folder}/logs", f"-Dhadoop.tmp.dir={self.folder}/tmp",
            "--add-opens=java.base/java.lang=ALL-UNNAMED",
            MAIN, "-nodemanagers", "2", "-datanodes", "1", "-format",
            "-writeConfig", str(written), *options,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.PIPE, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_for(written)
        except BaseException:
            self.__exit__()
            raise
        for name in ("core-site.xml", "hdfs-site.xml", "yarn-site.xml", "mapred-site.xml"):
            shutil.copy(written, self.conf / name)
        return self

    def _wait_for(self, written: Path) -> None:
        deadline = time.monotonic() + START_S
        while not (written.exists() and b"</configuration>" in written.read_bytes()):
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"the mini cluster ended: {self.log.read_text()[-3000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"no mini cluster: {self.log.read_text()[-3000:]}")
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(20)
