"""The command ``sparkdl``: the public API from a shell, alone or under ``spark-submit``.

``parser``: the arguments, without any heavy import. ``session``: the Spark session and the data.
``models``, ``cluster``: what the commands do.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from argparse import Namespace
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
    parser = make_parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return USAGE
    try:
        given = parser.parse_args(arguments)
    except SystemExit as end:  # argparse has printed help or what is wrong
        return int(end.code or 0)
    module, _, function = given.command.partition(":")
    try:
        return int(getattr(importlib.import_module(module), function)(given))
    except SparkDLError as error:
        parts = {"what": error.what, "expected": error.expected,
                 "received": error.received, "hint": error.hint}  # fmt: skip
        _tell(given, error, str(error), parts)
        return USAGE if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        of_spark = type(error).__module__.startswith("pyspark")  # its message says enough
        text = str(error) if of_spark else "".join(traceback.format_exception(error))
        _tell(given, error, text, {"what": str(error)})
        return FAILED
    except KeyboardInterrupt:
        print("sparkdl: interrupted", file=sys.stderr)
        return FAILED


def _tell(given: Namespace, error: Exception, text: str, parts: dict[str, str]) -> None:
    if given.json:
        print(json.dumps({"error": {"type": type(error).__name__, **parts}}))
    print(f"sparkdl: {text}", file=sys.stderr)
