"""The command line without Spark and Keras: help, exit codes, arguments, submit lines."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl import cli
from sparkdl.cli.cluster import submit_line
from sparkdl.cli.models import _settings, exchange_costs
from sparkdl.cli.parser import make_parser
from sparkdl.cli.session import columns, format_of, pairs, read_data, session_of_path
from sparkdl.config import Limits
from sparkdl.errors import ConfigError
from sparkdl.settings.network import Network

ROOT = Path(__file__).parents[3]
COMMANDS = ("train", "predict", "evaluate", "inspect", "estimate", "run", "doctor", "env",
            "package", "path", "dashboard")  # fmt: skip


def _run(*arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, cwd=cwd,
    )  # fmt: skip


@pytest.mark.processes
def test_help_imports_nothing_heavy() -> None:
    """What takes time is imports: with these left out, help takes 0.1 s of processor time."""
    program = (
        "import sys, sparkdl.cli\ncode = sparkdl.cli.main(['train', '--help'])\n"
        "heavy = {'pyspark', 'keras', 'tensorflow', 'numpy', 'pandas', 'pyarrow', 'torch', 'jax'}\n"
        "print(code, sorted(heavy & set(sys.modules)))"
    )
    ran = _run("-c", program)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "0 []"


@pytest.mark.processes
def test_help_takes_less_than_a_third_of_a_second() -> None:
    """Of processor time, as others use this machine, too; the median of five takes 0.07 s."""
    taken = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert _run("-m", "sparkdl", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert sorted(taken)[2] < 0.3, taken


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == cli.OK
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_help_with_its_default(command: str) -> None:
    """None and False are no defaults to tell; what is left to ``SparkModel`` says so in words."""
    (commands,) = make_parser()._subparsers._group_actions  # type: ignore[union-attr]
    parser = commands.choices[command]  # type: ignore[index, call-overload]
    shown = " ".join(parser.format_help().split())
    for action in parser._actions:
        assert action.help, action.option_strings
        if action.default not in (None, False, [], argparse.SUPPRESS):
            assert f"(default: {action.default})" in shown or "default" in action.help
    if command == "train":
        assert "How workers train together (default: asynchronous)" in shown
        assert "rows per step and worker (default: 32, or the saved model's)" in shown


def test_the_number_of_workers_has_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["estimate", "--help"])
    shown = capsys.readouterr().out
    assert "--num-workers" in shown
    assert " --workers" not in shown
    parse = make_parser().parse_args
    for option in ("--num-workers", "--workers"):
        assert parse(["estimate", "m.keras", option, "3"]).num_workers == 3


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["run", "-np", "two", "a.py"]])
def test_wrong_arguments_return_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.USAGE
    assert "usage:" in capsys.readouterr().err


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == cli.USAGE
    shown = capsys.readouterr().err
    assert "sparkdl: error" not in shown
    assert all(command in shown for command in ("train", "predict", "doctor"))


def test_what_is_refused_later_returns_2_with_the_four_beats(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["run", "-np", "2", "--json", "/no/such/script.py"]) == cli.USAGE
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["type"] == "ConfigError"
    assert "expected: a Python file" in shown.err


@pytest.mark.processes
def test_file_of_the_command_runs_under_spark_submit(tmp_path: Path) -> None:
    """Spark starts that file by its path; its folder must not hide the user's modules."""
    found = _run("-m", "sparkdl", "path")
    path = found.stdout.strip()
    assert os.path.basename(path) == "__main__.py"
    (tmp_path / "config.py").write_text("print('the own module')")
    program = f"import sys, runpy; sys.argv = ['x', '--version']\nrunpy.run_path({path!r})"
    assert _run("-c", program, cwd=str(tmp_path)).returncode == 0
    ran = _run(path, "--version", cwd=str(tmp_path))
    assert (ran.returncode, ran.stdout.split()[0]) == (0, "sparkdl")


def test_settings_that_were_not_given_are_left_to_the_model() -> None:
    parse = make_parser().parse_args
    base = ["train", "m.keras", "--data", "d", "--output", "o.keras"]
    assert _settings(parse(base)) == {}
    given = parse([*base, "--mode", "allreduce", "--frequency", "4", "--port", "7000-7010"])
    assert _settings(given) == {
        "mode": "allreduce",
        "frequency": 4,
        "network": Network("7000-7010"),
    }
    told = ["--worker-port", "7000", "--encrypt", "True", "--memory-budget-mb", "64"]
    assert _settings(parse([*base, *told])) == {
        "network": Network(worker_port=7000, encrypt=True), "limits": Limits(memory_budget_mb=64),
    }  # fmt: skip


def test_names_and_pairs() -> None:
    assert columns(None) is None
    assert columns("x") == "x"
    assert columns("a,b") == ["a", "b"]
    assert pairs("--conf", ["a=b=c", "d="]) == {"a": "b=c", "d": ""}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        pairs("--conf", ["a"])


def test_costs_of_an_exchange_by_hand() -> None:
    """1 GB, 4 workers, 8 Gbit/s = 1 GB/s, 1 ms."""
    costs = exchange_costs(1_000_000_000, 4, 8.0, 1.0)
    assert costs["server_seconds_one_worker"] == pytest.approx(2.002)
    assert costs["server_seconds_all_workers"] == pytest.approx(4.002)
    assert costs["allreduce_bytes_per_worker"] == 1_500_000_000
    assert costs["allreduce_seconds"] == pytest.approx(1.506)
    assert exchange_costs(1_000, 1, 8.0, 0.0)["allreduce_seconds"] == 0


def test_submit_line_of_a_cluster() -> None:
    given = make_parser().parse_args(
        [
            "package",
            "--output",
            "env.tar.gz",
            "--deploy-mode",
            "cluster",
            "--executor-cores",
            "2",
            "--num-executors",
            "3",
        ]
    )
    line = submit_line(given)
    assert "--conf spark.pyspark.python=./environment/bin/python" in line
    assert "spark.pyspark.driver.python" not in line
    assert "--master yarn --deploy-mode cluster" in line
    assert "--archives env.tar.gz#environment" in line
    assert "--num-executors 3 --executor-cores 2" in line
    assert "spark.executor.memoryOverhead=7168m" in line  # 2 * (1536 + 2048)


def test_driver_on_a_standalone_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SparkSubmit: "Cluster deploy mode is currently not supported for python applications"."""
    monkeypatch.chdir(tmp_path)
    asked = ["package", "--for", "standalone", "--deploy-mode", "cluster"]
    assert cli.main(asked) == cli.USAGE
    assert "--deploy-mode client on a machine that the workers reach" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [], "nothing is packed"
    assert cli.main([*asked[:3], "--dry-run"]) == cli.OK
    assert "spark://MASTER:7077 --deploy-mode client" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/x.tfrecord", "tfrecord"),
        ("/x/part-*.tfrecord.gz", "tfrecord"),
        ("hdfs:///x.parquet/", "parquet"),
        ("/x.parquet/*", "parquet"),
        ("rows.pq", "parquet"),
        ("/x.CSV", "csv"),
        ("/x/*.json.gz", "json"),
        ("/x.jsonl", "json"),
        ("/x.arrow", "arrow"),
        ("/x.feather", "arrow"),
        ("/x.orc", "orc"),
        ("/x/day=1", None),
        ("database.table", None),
    ],
)
def test_ending_of_a_path_tells_the_format(path: str, expected: str | None) -> None:
    assert format_of(path) == expected


class _Spark:
    """Notes how its reader was asked."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    @property
    def read(self) -> _Spark:
        return self

    def format(self, name: str) -> _Spark:
        self.asked.append(name)
        return self

    def options(self, **options: str) -> _Spark:
        self.asked.append(options)
        return self

    def load(self, path: str) -> list[object]:
        return [*self.asked, path]

    def table(self, name: str) -> list[object]:
        return ["table", name]


def _read(*arguments: str) -> object:
    base = ["evaluate", "m.keras", "--data"]
    return read_data(_Spark(), make_parser().parse_args([*base, *arguments]))


def test_data_are_read_as_their_format_is() -> None:
    assert _read("/x.tfrecord") == "/x.tfrecord", "by sparkdl itself"
    assert _read("/x.arrow") == "/x.arrow"
    assert _read("/x.parquet") == "/x.parquet"
    assert _read("/x/day=1") == "/x/day=1"
    assert _read("/x", "--format", "parquet") == ["parquet", {}, "/x"]
    merged = _read("/x.parquet", "--option", "mergeSchema=true")
    assert merged == ["parquet", {"mergeSchema": "true"}, "/x.parquet"]
    assert _read("/x", "--option", "a=b") == ["parquet", {"a": "b"}, "/x"]
    assert _read("/x", "--format", "orc") == ["orc", {}, "/x"]
    header = {"header": "true", "inferSchema": "true", "sep": ";"}
    assert _read("/x.csv.gz", "--option", "sep=;") == ["csv", header, "/x.csv.gz"]
    assert _read("db.rows") == ["table", "db.rows"]
    with pytest.raises(ConfigError, match="without Spark's reader"):
        _read("/x.arrow", "--option", "a=b")


@pytest.mark.parametrize(
    ("path", "options", "variables", "expected"),
    [
        ("/m.keras", [], {}, False),
        ("m.keras", [], {}, False),
        ("file:/m.keras", ["--master", "yarn"], {}, False),
        ("https://host/m.keras", [], {}, False),
        ("hdfs:///m.keras", [], {}, True),
        ("s3a://bucket/m.keras", [], {}, True),
        ("/m.keras", ["--master", "yarn"], {}, True),
        ("/m.keras", ["--remote", "sc://host"], {}, True),
        ("/m.keras", [], {"HADOOP_CONF_DIR": "/etc/hadoop"}, True),
        ("/m.keras", [], {"PYSPARK_GATEWAY_PORT": "4711"}, True),
    ],
)
def test_paths_that_may_be_sparks_are_looked_at_in_a_session(
    path: str,
    options: list[str],
    variables: dict[str, str],
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []

    @contextlib.contextmanager
    def session(given: object) -> Iterator[None]:
        started.append(given)
        yield

    for name in ("HADOOP_CONF_DIR", "PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sparkdl.cli.session.spark_session", session)
    given = make_parser().parse_args(["inspect", path, *options])
    with session_of_path(given, path):
        assert bool(started) == expected


def test_environment_is_told_without_spark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == cli.OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["packages"]["numpy"]


def _documented() -> list[str]:
    """The lines of the pages that call ``sparkdl``, without what the shell puts in."""
    found = []
    for page in ("README.md", "docs/shell.md", "docs/clusters.md"):
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                _, _, command = line.partition('"$(sparkdl path)" ')
                if not command and re.match(r"(env/bin/)?sparkdl ", line):
                    command = line.split(" ", 1)[1]
                if command:
                    found.append(command.replace("$", "").replace("...", "").strip())
    return found


@pytest.mark.parametrize("line", _documented())
def test_every_line_of_the_pages_is_understood(line: str) -> None:
    assert make_parser().parse_args(shlex.split(line, comments=True)).command


def test_pages_have_lines() -> None:
    assert len(_documented()) >= 9
