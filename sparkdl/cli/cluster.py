"""Commands about machines: run, doctor, env, package, path."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any

from sparkdl.cli.packing import kubernetes_line, pack, submit_line, write_manifests
from sparkdl.cli.parser import given_settings
from sparkdl.cli.session import spark_session
from sparkdl.config import LIMITS_OF_FIT, FitConfig, Limits
from sparkdl.errors import ConfigError
from sparkdl.settings.network import Network


def run(given: Namespace) -> int:
    """``sparkdl run -np N script.py``: the counterpart of ``sparkdl.run``."""
    import sparkdl

    if given.num_proc < 1:
        raise ConfigError("-np is the number of ranks", expected="1 or more",
                          received=str(given.num_proc))  # fmt: skip
    try:
        with open(given.script, "rb") as file:
            source = file.read()
    except OSError as error:
        raise ConfigError("there is no script to run", expected="a Python file",
                          received=f"{given.script!r}: {error}") from error  # fmt: skip
    call = (source, os.path.basename(given.script), list(given.arguments))
    verbosity = "log_callback_only" if given.quiet or given.json else "all"
    if given.local:
        runner: Any = sparkdl.HorovodRunner  # its signature is that of Databricks, untyped
        ranks = runner(np=-given.num_proc, driver_log_verbosity=verbosity)
        ranks.run(run_script, source=call[0], name=call[1], arguments=call[2])
    else:
        with spark_session(given) as spark:
            sparkdl.run(
                run_script, args=call, num_workers=given.num_proc, spark=spark,
                communicator=given.communicator, backend=given.backend,
                driver_log_verbosity=verbosity,
            )  # fmt: skip
    if given.json:
        print(json.dumps({"script": given.script, "ranks": given.num_proc, "status": "done"}))
    return 0


def run_script(source: bytes, name: str, arguments: list[str]) -> None:
    """Runs a script on a rank, as ``python script.py arguments`` would.

    Raises:
        RuntimeError: The script ended with an exit status other than 0.
    """
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": name})
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"{name} ended with exit status {end.code}") from end
    finally:
        sys.argv = before


def doctor(given: Namespace) -> int:
    """``sparkdl doctor``: the counterpart of ``sparkdl.doctor``."""
    import sparkdl

    with spark_session(given) as spark:
        report = sparkdl.doctor(
            spark,
            **given_settings(given, FitConfig, ("mode", "num_workers")),
            network=Network(**given_settings(given, Network)),
            limits=Limits(**given_settings(given, Limits, LIMITS_OF_FIT)),
            checkpoint_dir=given.checkpoint_dir,
            timeout_s=given.timeout,
        )
    print(json.dumps(report.to_dict()) if given.json else report)
    return 3 if report.status == "error" else 0


def env(given: Namespace) -> int:
    """``sparkdl env``: what this process knows of its Python, its packages and its machine."""
    import sparkdl

    facts = sparkdl.environment()
    if given.json:
        print(json.dumps(facts))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if v is not None) or "none"
        print(f"{name:<12} {'none' if value is None else value}")
    return 0


def package(given: Namespace) -> int:
    """``sparkdl package``: the environment as an archive, and the line that submits with it."""
    if given.target == "kubernetes":  # there the environment is in the image
        given.output = given.output or "kubernetes"
        line = kubernetes_line(given)
        files = [] if given.dry_run else write_manifests(given.output, given.namespace)
        archive = None
    else:
        given.output = given.output or "env.tar.gz"
        line, files = submit_line(given), []
        if not given.dry_run:
            pack(given.output)
        archive = None if given.dry_run else given.output
    if given.json:
        print(json.dumps({"archive": archive, "files": files, "submit": line}))
    else:
        print(line)
    return 0


def path(given: Namespace) -> int:
    """``sparkdl path``: the file that spark-submit runs."""
    import sparkdl

    file = os.path.join(os.path.dirname(os.path.abspath(sparkdl.__file__)), "__main__.py")
    print(json.dumps({"path": file}) if given.json else file)
    return 0
