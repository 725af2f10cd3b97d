"""The command line without Spark and Keras: help, exit codes, arguments, submit lines."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sparkdl import cli
from sparkdl.cli.models import _settings, exchange_costs
from sparkdl.cli.packing import submit_line
from sparkdl.cli.parser import make_parser
from sparkdl.cli.session import columns, pairs
from sparkdl.errors import ConfigError

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


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "--help"]) == cli.OK
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["fly"], ["train"], ["run", "-np", "two", "a.py"]])
def test_wrong_arguments_return_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.USAGE
    assert "usage:" in capsys.readouterr().err


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
    assert _settings(given) == {"mode": "allreduce", "frequency": 4, "port": "7000-7010"}


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


def test_environment_is_told_without_spark(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == cli.OK
    facts = json.loads(capsys.readouterr().out)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["packages"]["numpy"]


def _documented() -> list[str]:
    """The lines of the pages that call ``sparkdl``, without what the shell puts in."""
    found = []
    for page in ("README.md", "docs/clusters.md"):
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
