"""What ``make check`` collects imports no framework and starts no JVM, so that it stays quick.

PySpark itself is Python, and takes half a second: tests of ``sparkdl/spark`` import it, no others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_COLLECT = """
import json, sys
import pytest

class Watch:
    def __init__(self):
        self.first, self.collected = {}, 0

    def pytest_collectreport(self, report):
        for name in ("keras", "tensorflow", "jax", "torch", "pyspark"):
            if name in sys.modules:
                self.first.setdefault(name, report.nodeid)

    def pytest_collection_finish(self, session):
        self.collected = len(session.items)

watch = Watch()
arguments = ["tests", "-q", "--collect-only", "-p", "no:xdist", "-m", sys.argv[1]]
code = pytest.main(arguments, plugins=[watch])
print()
pyspark = sys.modules.get("pyspark")
jvm = pyspark is not None and pyspark.SparkContext._gateway is not None
told = {"code": int(code), "first": watch.first, "collected": watch.collected, "jvm": jvm}
print(json.dumps(told))
"""


@pytest.mark.processes
def test_what_make_check_collects_imports_no_framework_and_starts_no_jvm() -> None:
    repository = Path(__file__).parents[2]
    recipe = (repository / "Makefile").read_text().split("\ncheck:")[1].split("\n\n")[0]
    [selected] = re.findall(r'-m "([^"]+)"', recipe)
    ran = subprocess.run(
        [sys.executable, "-c", _COLLECT, selected],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["code"] == 0, ran.stdout[-3000:]
    of_spark = told["first"].pop("pyspark", "tests/unit/spark/")
    assert of_spark.startswith("tests/unit/spark/")
    assert not told["jvm"]
    assert told["first"] == {}, "a file that make check collects imports them: no pytestmark"
    assert told["collected"] > 1000
