"""Where the command ``sparkdl`` begins: outside of the package, which another one may hide.

Other libraries had the name ``sparkdl`` before, and older runtimes of Databricks bring one.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def main() -> int:
    """Runs the command, or says which package hides its own; returns the exit code."""
    foreign = foreign_package()
    if foreign is not None:
        print(
            "sparkdl: another package called sparkdl hides this one\n"
            f"  expected: the package of sparkdl-keras, such as {os.path.join(_HERE, 'sparkdl')}\n"
            f"  received: {foreign}\n"
            "  hint: pip uninstall sparkdl spark-deep-learning, or an environment without them; "
            "PYTHONPATH says what is found first",
            file=sys.stderr,
        )
        return 1
    from sparkdl.cli import main as run

    return run()


def foreign_package() -> str | None:
    """The folder of the package that is found as ``sparkdl``, if it is not this library's."""
    spec = importlib.util.find_spec("sparkdl")
    if spec is None or spec.origin is None:
        return None
    folder = os.path.dirname(spec.origin)
    beside = os.path.isfile(os.path.join(folder, "__init__.py"))  # not one inside a zip file
    ours = os.path.isfile(os.path.join(folder, "spark", "spark_model.py"))
    return folder if beside and not ours else None
