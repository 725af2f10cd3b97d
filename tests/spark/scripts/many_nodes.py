"""A ring of 30 nodes, and an actor-learner of four actors, on one JVM with 30 slots.

It ends in a line of JSON: what the nodes returned, and how long the actor-learner took; see
test_program.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
_ROOT = Path(__file__).parents[3]
sys.path += [str(_ROOT / "examples"), str(_ROOT / "tests" / "unit" / "program")]


def main() -> None:
    import actor_learner
    import program_cases
    from pyspark.sql import SparkSession

    from sparkdl.program import launch

    spark = (
        SparkSession.builder.master("local[30]").config("spark.ui.enabled", "false").getOrCreate()
    )
    ring = launch(program_cases.ring(30), "spark", spark=spark).results("link", 300)
    begun = time.monotonic()
    program = actor_learner.build(num_actors=4)
    curve = launch(program, "spark", spark=spark).results("learner", 240)[0]
    learner_s = time.monotonic() - begun
    spark.stop()
    print(json.dumps({"ring": ring, "return": curve[-1].mean_return, "learner_s": learner_s}))


if __name__ == "__main__":
    main()
