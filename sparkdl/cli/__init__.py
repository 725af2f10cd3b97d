"""The command ``sparkdl``: the public API from a shell, alone or under ``spark-submit``.

``parser``: the arguments, without any heavy import. ``session``: the Spark session and the data.
``models``, ``cluster``: what the commands do. ``packing``: the environment for executors.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence

from sparkdl.cli.parser import make_parser
from sparkdl.errors import ConfigError, SparkDLError

OK, FAILED, USAGE, DOCTOR = 0, 1, 2, 3
"""Exit codes: done; failed; wrong arguments; the doctor found an error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code and never exits the process.

    Args:
        arguments: Without the program's name; None: those of the process.
    """
    try:
        given = make_parser().parse_args(arguments)
    except SystemExit as end:  # argparse has printed help or what is wrong
        return int(end.code or 0)
    module, _, function = given.command.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(given))
    except SparkDLError as error:
        if given.json:
            kind = type(error).__name__
            parts = {"what": error.what, "expected": error.expected,
                     "received": error.received, "hint": error.hint}  # fmt: skip
            print(json.dumps({"error": {"type": kind, **parts}}))
        print(f"sparkdl: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        print("sparkdl: interrupted", file=sys.stderr)
        return FAILED
