"""Run by test_sessions_on_spark.py in a process of its own: sessions of Spark that end."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["PYSPARK_PYTHON"] = sys.executable
os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
ROOT = Path(__file__).parents[3]
os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests/start"
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("spark", "parity"))]

from session import call  # noqa: E402
from session_check import check  # noqa: E402
from session_examples import BUILD  # noqa: E402
from test_sessions_on_spark import SparkPlace  # noqa: E402

FIT = call("fit", mode="synchronous", sizes=(8, 8), form="frame")
LOOKS = (FIT, call("evaluate", how="workers"), call("predict", how="frame"))
RESTARTED = [
    call("build", **BUILD, loss="by_global", metrics=("own_metric",)), *LOOKS,
    call("restart"), FIT, call("make_function"), call("use_function", number=0),
    call("change", what="ALPHA", value=3.0), call("fit", **{**FIT.arguments, "mode": "allreduce"}),
    call("predict", how="frame"),
]  # fmt: skip


class EndingPlace(SparkPlace):
    """Sessions of Spark, of which another one begins when it is told."""

    def __init__(self, start: Callable[[], Any], folder: Path) -> None:
        super().__init__(start(), folder)
        self._start = start

    def restart(self) -> None:
        self._spark.stop()
        self._spark = self._start()


def start(where: str) -> Any:
    from connect_port import own_port
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
    if where == "connect":
        builder = builder.remote("local[2]").config("spark.connect.grpc.binding.port", own_port())
    else:
        builder = builder.master("local[2]")
    return builder.getOrCreate()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        place = EndingPlace(lambda: start(sys.argv[1]), Path(folder))
        found = check(RESTARTED, place)
        assert not found, found
        print("as plain Keras")
