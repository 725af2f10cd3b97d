"""How many modules of sparkdl a user's call passes through, on the driver, on executors and in the
server's process: the last column of "The four ways, walked as data" in docs/architecture.md.

Each way is one small job in fresh processes on a local cluster of two executors. A module counts
where any of its functions ran, other than while a module was being imported: helpers and error
classes included.

    python tests/ways.py [--list]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("fit, asynchronous", "fit, allreduce", "run", "predict")

TRACER = '''
"""Notes the modules of sparkdl whose functions run in this process; see tests/ways.py."""
import os, sys, threading

_FOLDER, _PACKAGE = os.environ["SPARKDL_WAYS"], os.environ["SPARKDL_WAYS_PACKAGE"]
_seen = {}

def _role():
    words = " ".join(sys.orig_argv)
    if "sparkdl.ps.server" in words:
        return "server"
    return "driver" if "ways.py" in words else "executor"

def _imports(frame):
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith(_PACKAGE):
            return True
        frame = frame.f_back
    return False

def _note(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(_PACKAGE) or not code.co_flags & 1:
        return
    key = os.getpid(), code.co_filename
    if key in _seen or _imports(frame):
        return
    _seen[key] = True
    with open(os.path.join(_FOLDER, f"{_role()}-{os.getpid()}"), "a") as file:
        file.write(os.path.relpath(code.co_filename, _PACKAGE) + "\\n")

threading.setprofile(_note)
sys.setprofile(_note)
'''


def double(rank_offset: int) -> float:
    """What ``run`` runs: one exchange among the ranks."""
    import sparkdl

    communicator = sparkdl.communicator()
    return float(communicator.all_reduce(np.float32([communicator.rank + rank_offset]))[0])


def walk(way: str) -> None:
    """One small job; its processes are traced."""
    import keras
    from pyspark.sql import SparkSession

    import sparkdl

    builder = SparkSession.builder.master("local-cluster[2,1,2048]")
    for name in ("PYTHONPATH", "SPARKDL_WAYS", "SPARKDL_WAYS_PACKAGE"):
        builder = builder.config(f"spark.executorEnv.{name}", os.environ[name])
    builder = builder.config("spark.driver.host", "127.0.0.1")
    spark = builder.config("spark.ui.enabled", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        x = np.random.default_rng(0).normal(size=(200, 4)).astype("float32")
        rows = [(row.tolist(), int(row[0] > 0)) for row in x]
        frame = spark.createDataFrame(rows, "features array<float>, label int")
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
        if way.startswith("fit"):
            mode: Any = way.partition(", ")[2]
            sparkdl.SparkModel(model, mode, num_workers=2).fit(frame, epochs=2, verbose=0)
        elif way == "run":
            print(sparkdl.run(double, (1,), num_workers=2))
        else:
            print(len(sparkdl.SparkModel(model).predict(frame).collect()))
    finally:
        spark.stop()


def count(way: str) -> dict[str, set[str]]:
    """Walks one way in a process of its own: role -> paths of modules."""
    package = Path(__file__).resolve().parents[1] / "sparkdl"
    with tempfile.TemporaryDirectory() as code, tempfile.TemporaryDirectory() as told:
        Path(code, "sitecustomize.py").write_text(TRACER)
        paths = [code, str(package.parent)]
        if "PYTHONPATH" in os.environ:
            paths.append(os.environ["PYTHONPATH"])
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(paths),
            "SPARKDL_WAYS": told,
            "SPARKDL_WAYS_PACKAGE": str(package) + os.sep,
        }
        subprocess.run([sys.executable, __file__, "--way", way], env=environment, check=True)
        found: dict[str, set[str]] = {"driver": set(), "executor": set(), "server": set()}
        for path in Path(told).iterdir():
            role = path.name.partition("-")[0]
            found[role] |= set(path.read_text().split())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="modules that each way passes through")
    parser.add_argument("--way", choices=WAYS, help="walk one, traced by its parent")
    parser.add_argument("--list", action="store_true", help="name the modules, too")
    options = parser.parse_args()
    if options.way:
        walk(options.way)
        return
    lines = ["| way | driver | executor | server process |", "|---|---|---|---|"]
    for way in WAYS:
        found = count(way)
        numbers = [len(modules) for modules in found.values()]
        lines.append(f"| {way} | " + " | ".join(str(n or "") for n in numbers) + " |")
        if options.list:
            for role, modules in found.items():
                print(f"{way}, {role}: {' '.join(sorted(modules))}", flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
