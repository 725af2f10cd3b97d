"""Hadoop's own mini cluster: HDFS with two DataNodes, a ResourceManager and two NodeManagers.

All of it is one Java process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

VERSION_OF = "hadoop-client-api-"
MAIN = Path(__file__).parent / "MiniHadoopMain.java"
START_S = 200.0
_DEPENDENCIES = (
    ("org.apache.hadoop", "hadoop-client-minicluster", None),
    # what its classes for tests name, and its list of dependencies leaves out
    ("org.junit.jupiter", "junit-jupiter-api", "5.13.4"),
    ("junit", "junit", "4.13.2"),
    ("org.mockito", "mockito-core", "4.11.0"),
    ("org.assertj", "assertj-core", "3.27.3"),
    # the ResourceManager wants log4j itself, which the shaded clients leave to the user
    ("org.slf4j", "slf4j-reload4j", "1.7.36"),
    ("org.bouncycastle", "bcpkix-jdk18on", "1.78.1"),
)
"""Group, name and version; None for the version of Spark's Hadoop."""
_SHUFFLE = (
    "spark-network-", "spark-common-utils", "spark-tags", "log4j-api-", "netty-", "jackson-",
    "guava-", "failureaccess-", "commons-lang3-", "metrics-core-", "leveldbjni-", "rocksdbjni-",
    "RoaringBitmap-", "scala-library-", "lz4-java-", "zstd-jni-", "snappy-java-",
)  # fmt: skip
"""How the names of jars begin that Spark's external shuffle service needs."""
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>sparkdl</groupId><artifactId>mini</artifactId><version>1</version>
<dependencies>{dependencies}</dependencies></project>
"""
_DEPENDENCY = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)


_LOG4J = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{ISO8601} %p %c{2}: %m%n
"""


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
    if shutil.which("javac") is None:
        raise Unavailable("Hadoop's mini cluster needs a JDK: Java alone compiles nothing")
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
        try:
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
        except subprocess.TimeoutExpired as slow:
            raise Unavailable("Maven did not get Hadoop's mini cluster within 400 s") from slow
        if ran.returncode:
            raise Unavailable(f"Maven could not get Hadoop's mini cluster: {ran.stdout[-500:]}")
        done.write_text(pom)
    return sorted(jars.glob("*.jar"))


def shuffle_jars() -> list[Path]:
    """Spark's jars that its external shuffle service needs."""
    return sorted(jar for jar in spark_jars().glob("*.jar") if jar.name.startswith(_SHUFFLE))


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
            "yarn.nodemanager.resource.memory.enforced": "false",  # true leaves it to cgroups
            "yarn.minicluster.control-resource-monitoring": "true",  # else both are false
            "yarn.nodemanager.container-monitor.interval-ms": "500",
            "yarn.minicluster.yarn.nodemanager.resource.memory-mb": "8192",
            "yarn.nodemanager.resource.cpu-vcores": "8",
            "yarn.scheduler.minimum-allocation-mb": "256",
            "yarn.scheduler.maximum-allocation-mb": "8192",
            "yarn.nodemanager.disk-health-checker.enable": "false",
            "yarn.log-aggregation-enable": "false",
            "yarn.nodemanager.delete.debug-delay-sec": "600",
            "yarn.scheduler.capacity.maximum-am-resource-percent": "0.9",
            "yarn.scheduler.capacity.root.queues": "default,second",
            **{
                f"yarn.scheduler.capacity.root.{queue}.{name}": value
                for queue in ("default", "second")
                for name, value in (
                    ("capacity", "50"),
                    ("maximum-capacity", "100"),
                    ("user-limit-factor", "4"),
                )
            },
            # containers above a queue's share are taken for those that another queue waits for
            "yarn.resourcemanager.scheduler.monitor.enable": "true",
            **{
                f"yarn.resourcemanager.monitor.capacity.preemption.{name}": value
                for name, value in (
                    ("monitoring_interval", "500"),
                    ("max_wait_before_kill", "2000"),
                    ("total_preemption_per_round", "1.0"),
                    ("natural_termination_factor", "1.0"),
                )
            },
            "yarn.nodemanager.aux-services": "spark_shuffle",
            "yarn.nodemanager.aux-services.spark_shuffle.class": f"{MAIN.stem}$SparkShuffle",
            "dfs.replication": "2",
            "fs.permissions.umask-mode": "022",
            **(settings or {}),
        }
        self._process: subprocess.Popen[str] | None = None

    @property
    def log(self) -> Path:
        return self.folder / "hadoop.log"

    def __enter__(self) -> MiniHadoop:
        jars = [*hadoop_jars(), *shuffle_jars()]
        self.conf.mkdir(parents=True)
        written, logging = self.folder / "written.xml", self.folder / "log4j.properties"
        logging.write_text(_LOG4J)
        classes = self.folder / "classes"
        classpath = os.pathsep.join(str(place) for place in (classes, *jars))
        java = Path(shutil.which("java") or "java").resolve()
        compiling = [str(java.parent / "javac"), "-cp", classpath, "-d", str(classes), str(MAIN)]
        compiled = subprocess.run(compiling, capture_output=True, text=True, timeout=START_S)
        if compiled.returncode:
            raise RuntimeError(f"{MAIN.name} does not compile: {compiled.stderr}")
        command = [
            str(java), "-Xmx768m", "-cp", classpath, f"-Dtest.build.data={self.folder}/data",
            f"-Dhadoop.log.dir={self.folder}/logs", f"-Dhadoop.tmp.dir={self.folder}/tmp",
            f"-Dlog4j.configuration=file:{logging}",
            "--add-opens=java.base/java.lang=ALL-UNNAMED", MAIN.stem, str(self.folder),
            str(written), *(f"{name}={value}" for name, value in self._settings.items()),
        ]  # fmt: skip
        # containers start $JAVA_HOME/bin/java
        environment = {**os.environ, "JAVA_HOME": str(java.parents[1])}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
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

    def ask(self, *command: str) -> list[str]:
        """The words of the answer to a command, of which ``MiniHadoopMain.java`` has a list.

        Raises:
            RuntimeError: The command failed.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(" ".join(command) + "\n")
        process.stdin.flush()
        outcome, *words = process.stdout.readline().split()
        if outcome != "ok":
            raise RuntimeError(f"{command}: {' '.join(words)}")
        return words

    def __exit__(self, *_: object) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            return
        process.stdin.close()  # the cluster ends with its input, and its containers with it
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        process.stdout.close()
