"""The command says which other package called sparkdl hides its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.processes
@pytest.mark.parametrize("hides", [True, False], ids=["in front", "behind"])
def test_the_command_beside_another_package(tmp_path: Path, hides: bool) -> None:
    (tmp_path / "sparkdl").mkdir()
    (tmp_path / "sparkdl" / "__init__.py").write_text("import tensorframes")
    paths = [str(tmp_path), str(ROOT)] if hides else [str(ROOT), str(tmp_path)]
    program = f"import sys; sys.path[:0] = {paths!r}; import sparkdl_keras as command; " + (
        "sys.argv = ['sparkdl', '--version']; sys.exit(command.main())"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if hides:
        assert ran.returncode == 1
        assert "another package called sparkdl hides this one" in ran.stderr
        assert f"received: {tmp_path}/sparkdl" in ran.stderr
        assert "Traceback" not in ran.stderr
    else:
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("sparkdl ")
