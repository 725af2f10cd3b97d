"""``sparkdl.doctor`` on a cluster of its own: healthy, then with faults planted on executors.

Executors start a shell script as their Python. It reads the faults of its executor from a file, so
that faults come and go while the session lives. Prints a JSON object: name -> report.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FAULTS = Path(tempfile.mkdtemp(prefix="faults-"))

PYTHON = f"""#!/bin/sh
plan={FAULTS}/$(basename "$PWD")
if [ -f "$plan" ]; then . "$plan"; fi
exec {sys.executable} "$@"
"""
OTHER_PYTHON = """
import sys
sys.version_info = (3, 9, 1, "final", 0)
"""
NO_SPARKDL = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "sparkdl":
            raise ModuleNotFoundError("No module named 'sparkdl'")
sys.meta_path.insert(0, Missing())
"""
OTHER_NUMPY = '__version__ = "1.21.0"\n'
SMALL_MACHINE = f"""
export TMPDIR={FAULTS}/disk
mkdir -p $TMPDIR
exec unshare --mount --net sh -c '
  mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t tmpfs -o size=64k tmpfs $TMPDIR &&
  exec "$0" "$@"' {sys.executable} "$@"
"""


def plant(executor: int, script: str, modules: dict[str, str]) -> None:
    """The executor's next Python runs ``script`` first, and finds ``modules`` before others."""
    folder = FAULTS / f"modules-{executor}"
    shutil.rmtree(folder, ignore_errors=True)  # with what was planted before
    for name, source in modules.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    paths = f'export PYTHONPATH="{folder}:$PYTHONPATH"\n'
    (FAULTS / str(executor)).write_text(paths + script)


def clear() -> None:
    for executor in (0, 1):
        (FAULTS / str(executor)).unlink(missing_ok=True)


def open_session() -> Any:
    python = FAULTS / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    os.environ["PYSPARK_PYTHON"] = str(python)
    from pyspark.sql import SparkSession

    return (
        SparkSession.builder.master("local-cluster[2,1,2048]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .getOrCreate()
    )


def main() -> None:
    spark = open_session()
    spark.sparkContext.setLogLevel("OFF")
    import sparkdl
    from sparkdl.spark.runs.capacity import wait_for_slots

    wait_for_slots(spark, 2, 120.0)  # executors start slowly on a busy machine
    reports: dict[str, Any] = {}

    def examine(name: str, **arguments: Any) -> None:
        began = time.monotonic()
        report = sparkdl.doctor(spark, timeout_s=60.0, **arguments)
        reports[name] = report.to_dict() | {"wall_s": time.monotonic() - began}
        print(report, file=sys.stderr)

    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as taken:
        examine("healthy", checkpoint_dir=folder)

        plant(0, "", {"sitecustomize.py": OTHER_PYTHON})
        plant(
            1, SMALL_MACHINE,
            {"sitecustomize.py": NO_SPARKDL, "numpy/__init__.py": OTHER_NUMPY},
        )  # fmt: skip
        spark.sparkContext._conf.set("spark.dynamicAllocation.enabled", "true")
        examine(
            "ten faults", mode="allreduce", num_workers=3,
            network=sparkdl.Network(taken.getsockname()[1]),
            checkpoint_dir="/proc/checkpoints",
        )  # fmt: skip
        spark.sparkContext._conf.set("spark.dynamicAllocation.enabled", "false")
        clear()

        plant(1, "", {"sparkdl/__init__.py": "import tensorframes"})
        examine("foreign package")
        clear()

        examine(
            "blocked", network=sparkdl.Network(server_bind="127.0.0.1", server_address="127.0.0.99")
        )
    spark.stop()
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
