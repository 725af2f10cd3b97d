"""The arguments of every command. Imports nothing heavy: ``--help`` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sparkdl import __version__
from sparkdl.config import COMMUNICATORS, LIMITS_OF_FIT, FitConfig, Limits
from sparkdl.settings.network import Network
from sparkdl.settings.values import UserSettings, declared

_MODELS, _CLUSTER = "sparkdl.cli.models", "sparkdl.cli.cluster"
if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class _Help(argparse.HelpFormatter):
    """Help that tells the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.help or ""
        if action.default in (None, False, [], argparse.SUPPRESS) or "default" in shown:
            return action.help
        return f"{shown} (default: %(default)s)"


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command line. ``command`` in what it returns is ``'module:function'``."""
    parser = argparse.ArgumentParser(
        prog="sparkdl",
        description="Distributed deep learning in Apache Spark: Keras models from the shell.",
        epilog="exit codes: 0 done, 1 failed, 2 wrong arguments, 3 the doctor found an error",
    )
    parser.add_argument("--version", action="version", version=f"sparkdl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_predict(commands)
    evaluate = _command(commands, "evaluate", f"{_MODELS}:evaluate", "loss and metrics of all rows")
    _add_model(evaluate)
    _add_data(evaluate, label=True)
    text = "what a model takes, and what of it travels"
    _add_model(_command(commands, "inspect", f"{_MODELS}:inspect", text), functions=True)
    _add_estimate(commands)
    _add_run(commands)
    _add_doctor(commands)
    text = "versions and limits of this process, to be pasted into an issue"
    _command(commands, "env", f"{_CLUSTER}:env", text, session=False)
    _add_package(commands)
    text = "the file for: spark-submit ... $(sparkdl path) train ..."
    _command(commands, "path", f"{_CLUSTER}:path", text, session=False)
    _add_dashboard(commands)
    return parser


def _command(
    commands: Commands, name: str, function: str, help: str, *, session: bool = True
) -> argparse.ArgumentParser:
    """A command with the options that all commands have, and (``session``) those of Spark."""
    parser = commands.add_parser(name, help=help, description=help, formatter_class=_Help)
    parser.set_defaults(command=function)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    if session:
        spark = parser.add_argument_group("Spark; under spark-submit its own settings hold")
        spark.add_argument("--master", help="e.g. local[2], spark://host:7077, yarn")
        spark.add_argument("--remote", help="a Spark Connect server: sc://host:15002")
        spark.add_argument("--conf", action="append", default=[], metavar="NAME=VALUE",
                           help="a setting of Spark; may be repeated")  # fmt: skip
    return parser


def _add_model(
    parser: argparse.ArgumentParser, *, functions: bool = False, others: bool = False
) -> None:
    what = "a .keras file, on any file system"
    if others:
        what = "a .keras or .h5 file or the folder of a SavedModel, on any file system"
    if functions:
        what += "; or module:function (file.py:function) that returns a compiled model"
    parser.add_argument("model", metavar="MODEL", help=what)
    parser.add_argument("--unsafe", action="store_true",
                        help="also load files that run code (Lambda layers)")  # fmt: skip


def _add_data(parser: argparse.ArgumentParser, *, label: bool) -> None:
    add = parser.add_argument
    add("--data", required=True, metavar="PATH|TABLE",
        help="files on any file system, or a table of Spark's")  # fmt: skip
    add("--format", help="parquet, csv, json, orc, arrow, tfrecord, ...; default: "
        "by the path's ending or its files")  # fmt: skip
    add("--option", action="append", default=[], metavar="NAME=VALUE",
        help="an option of Spark's reader; may be repeated")  # fmt: skip
    add("--features", help="a column, or several numeric ones with commas between "
        f"({_of_the_fit('features')})")  # fmt: skip
    if label:
        add("--label", help=f"the label's column ({_of_the_fit('label')})")
        add("--sample-weight", help="the column of row weights")
    add("--batch-size", type=int, help="rows per step and worker (default: "
        f"{FitConfig.batch_size}, or the saved model's)")  # fmt: skip


def _of_the_fit(name: str) -> str:
    return f"default: {name}, or that of the saved model's last fit"


def _add_settings(
    group: argparse._ActionsContainer, cls: type[UserSettings], names: Iterable[str] = ()
) -> None:
    """Options made from declarations: without one the saved model's value or the default counts, so
    that the parser's own default is None.
    """
    settings = declared(cls)
    for name in names or settings:
        setting, kind = settings[name], settings[name].kind
        default = "none" if setting.default is None else setting.default
        text = setting.sentence.replace("``", "").replace("%", "%%").rstrip(".")
        group.add_argument(
            f"--{name.replace('_', '-')}", type=kind.parse, choices=kind.choices or None,
            metavar=None if kind.choices else name.rpartition("_")[2].upper(),
            help=f"{text} (default: {default})",
        )  # fmt: skip


def given_settings(
    given: argparse.Namespace, cls: type[UserSettings], names: Iterable[str] = ()
) -> dict[str, Any]:
    """The values that the user gave to options of :func:`_add_settings`."""
    values = {name: getattr(given, name) for name in names or declared(cls)}
    return {name: value for name, value in values.items() if value is not None}


MODEL_SETTINGS = (
    "mode", "frequency", "rule", "compression", "communicator", "num_workers", "batch_size", "seed",
)  # fmt: skip
"""Arguments of ``SparkModel`` that are options of ``train``, beside those of its objects."""


def _add_train(commands: Commands) -> None:
    parser = _command(commands, "train", f"{_MODELS}:train", "trains a model and saves it")
    add = parser.add_argument
    _add_model(parser, functions=True)
    _add_data(parser, label=True)
    add("--output", required=True, help="the .keras file to write")
    add("--epochs", type=int, default=1, help="passes over the rows")
    settings = parser.add_argument_group(
        "settings of SparkModel; for a file that its save wrote the file's are the defaults"
    )
    _add_settings(settings, FitConfig, [n for n in MODEL_SETTINGS if n != "batch_size"])
    _add_settings(settings, Network)
    _add_settings(settings, Limits, LIMITS_OF_FIT)
    add("--validation-split", type=float, default=0.0,
        help="share of the rows to validate on (default: 0.0)")  # fmt: skip
    add("--checkpoint-dir", help="a folder for a checkpoint after each epoch")
    add("--resume", action="store_true", help="go on from the last checkpoint")


def _add_predict(commands: Commands) -> None:
    parser = _command(commands, "predict", f"{_MODELS}:predict", "adds a column of predictions")
    add = parser.add_argument
    _add_model(parser, others=True)
    _add_data(parser, label=False)
    add("--output", help="where Spark writes the rows; without it some are shown")
    add("--output-format", default="parquet", help="of --output")
    add("--output-column", default="prediction", help="the new column")
    add("--overwrite", action="store_true", help="replace what is at --output")
    add("--limit", type=int, default=20, help="rows to show without --output")


def _add_estimate(commands: Commands) -> None:
    text = "bytes and seconds of an exchange, by calculation"
    parser = _command(commands, "estimate", f"{_MODELS}:estimate", text)
    _add_model(parser, functions=True)
    workers = parser.add_mutually_exclusive_group(required=True)
    workers.add_argument("--num-workers", type=int, help="of the run")
    workers.add_argument("--workers", dest="num_workers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--gbit", type=float, default=10.0, help="of each machine's network")
    parser.add_argument("--latency-ms", type=float, default=0.1, help="of one message")


def _add_run(commands: Commands) -> None:
    text = "runs a script once per rank, all at the same time"
    parser = _command(commands, "run", f"{_CLUSTER}:run", text)
    add = parser.add_argument
    add("-np", "--num-proc", type=int, required=True, metavar="N", help="ranks")
    add("--local", action="store_true", help="processes of this machine, without Spark")
    add("--communicator", choices=COMMUNICATORS, default="auto", help="what the ranks call")
    add("--backend", help="the Keras backend: tensorflow, jax or torch")
    add("--quiet", action="store_true", help="show only what sparkdl.log_to_driver sends")
    add("script", metavar="SCRIPT.py", help="what each rank runs")
    add("arguments", nargs=argparse.REMAINDER, help="of the script")


def _add_doctor(commands: Commands) -> None:
    text = "looks for what is wrong with a cluster; exit code 3 for an error"
    parser = _command(commands, "doctor", f"{_CLUSTER}:doctor", text)
    _add_settings(parser, FitConfig, ("mode", "num_workers"))
    _add_settings(parser, Network)
    _add_settings(parser, Limits, LIMITS_OF_FIT)
    parser.add_argument("--checkpoint-dir", help="a folder that must be writable")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds for one probe")


def _add_package(commands: Commands) -> None:
    text = "packs this Python environment, and prints the line that submits with it"
    parser = _command(commands, "package", f"{_CLUSTER}:package", text, session=False)
    add = parser.add_argument
    add("--output", help="the archive to write (env.tar.gz); for Kubernetes the "
        "folder of pod templates and a service (kubernetes)")  # fmt: skip
    targets = ("yarn", "standalone", "kubernetes")
    add("--for", dest="target", default="yarn", choices=targets, help="where it runs")
    add("--kubernetes", dest="target", action="store_const", const="kubernetes",
        help="the same as --for kubernetes")  # fmt: skip
    add("--image", help="for Kubernetes: that of docker/Dockerfile, or your own")
    add("--namespace", default="default", help="for Kubernetes")
    add("--deploy-mode", default="client", choices=("client", "cluster"),
        help="where the driver runs")  # fmt: skip
    add("--num-executors", type=int, default=2, help="of the line that submits")
    add("--executor-cores", type=int, default=1, help="task slots of an executor")
    add("--memory-budget-mb", type=int, default=Limits.memory_budget_mb, help="of each worker")
    add("--dry-run", action="store_true", help="print the line, pack nothing")


def _add_dashboard(commands: Commands) -> None:
    text = "the page of past runs, until it is interrupted"
    parser = _command(commands, "dashboard", f"{_MODELS}:dashboard", text)
    add = parser.add_argument
    add("runs", help="a folder that sparkdl.tracking.JsonLines wrote, or one file, "
        "on any file system")  # fmt: skip
    add("--host", default="127.0.0.1", help="the address to listen on")
    add("--port", type=int, default=0, help="0 for any free one")
