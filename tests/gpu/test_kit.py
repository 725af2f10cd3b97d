"""The GPU kit on this machine's CPU, with small sizes: ready wherever a GPU is."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from keras_backends import environment_of

KIT = Path(__file__).with_name("kit.py")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(KIT), "--cpu", *arguments], capture_output=True, text=True,
        check=False, timeout=800, env=environment_of("jax"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "checks"),
    [
        ("jax", "weights,tables,copies,recompute"),
        pytest.param("jax", "rates,precision", marks=pytest.mark.slow),
        pytest.param(
            "torch", "weights,tables,rates,copies,precision,recompute", marks=pytest.mark.slow
        ),
    ],
)
def test_every_check_runs_and_holds_on_a_cpu(backend: str, checks: str) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    done = _run("--small", "--backends", backend, "--checks", checks)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"| {backend} | " in done.stdout
    assert ", 0 not as wanted" in done.stdout


def test_without_a_gpu_the_full_sizes_are_refused() -> None:
    done = _run()
    assert done.returncode == 2
    assert "--small" in done.stdout


def test_an_unknown_check_is_named() -> None:
    done = _run("--small", "--checks", "no-such")
    assert done.returncode == 2
    assert "no-such" in done.stderr


def test_a_figure_that_is_not_as_wanted_fails_the_kit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(KIT.parent))
    import kit

    told = {"all kept": {"memory": 0.0, "norm": 1.0, "sum": 2.0}}
    told["recompute"] = {"memory": 0.0, "norm": 1.001, "sum": 2.0}
    monkeypatch.setattr(kit, "figures", lambda check, *_: told[check])
    table = kit.Table([])
    kit.compare_recompute("jax", "cpu", True, table)
    assert table.failed == 1
    assert "**no**" in capsys.readouterr().out
