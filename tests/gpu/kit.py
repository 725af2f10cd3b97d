"""The GPU kit: is sparkdl right and fast on this machine's GPU?

``python tests/gpu/kit.py`` needs NumPy, pyarrow, Keras, and PyTorch or JAX; neither Spark nor a
network. It runs every check in a process of its own, prints a table, and exits with 1 if a figure
is not as wanted. ``--small`` uses small sizes, and the CPU where there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CHECK_LIMIT_S = 300.0
CHECKS = ("weights", "tables", "rates", "copies", "precision", "recompute")
Rows = list[dict[str, str]]


@dataclass
class Table:
    """The lines that were measured."""

    lines: list[str]
    failed: int = 0

    def add(self, backend: str, what: str, value: str, wanted: str, holds: bool) -> None:
        """Prints a line and keeps it."""
        self.failed += not holds
        verdict = ("yes" if holds else "**no**") if wanted else ""
        self.lines.append(f"| {backend} | {what} | {value} | {wanted} | {verdict} |")
        print(self.lines[-1], flush=True)


def device() -> tuple[str, str]:
    """``'gpu'`` or ``'cpu'``, and its name."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
    except FileNotFoundError:
        return "cpu", "no GPU"
    found = told.stdout.strip().splitlines()
    return ("gpu", found[0]) if told.returncode == 0 and found else ("cpu", "no GPU")


def run_check(check: str, backend: str, where: str, small: bool) -> Rows | str:
    """The rows of one check; a text says why there are none."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
        # Float32 is float32, here and in the reference: no matrix product of fewer bits.
        "NVIDIA_TF32_OVERRIDE": "0",
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    }
    if where == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    if check in ("float32", "mixed_bfloat16", "mixed_float16", "rates"):
        for name in ("NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION"):
            del environment[name]  # as users run
    command = [sys.executable, str(HERE / "gpu_checks.py"), check, backend, where]
    try:
        done = subprocess.run(
            [*command, "small" if small else "full"], env=environment, capture_output=True,
            text=True, check=False, timeout=CHECK_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done after {CHECK_LIMIT_S:.0f} s"
    if done.returncode != 0:
        return (done.stderr or done.stdout)[-3000:]
    rows: Rows = json.loads(done.stdout.strip().splitlines()[-1])
    return rows


def run_backend(
    backend: str, where: str, small: bool, table: Table, wanted: Sequence[str] = CHECKS
) -> None:
    """The checks of a backend that are wanted."""
    for check in [c for c in CHECKS[:4] if c in wanted]:
        began = time.monotonic()
        rows = run_check(check, backend, where, small)
        if isinstance(rows, str):
            table.add(backend, check, "failed", "a result", False)
            print(rows, file=sys.stderr, flush=True)
        else:
            for row in rows:
                table.add(backend, row["what"], row["value"], row["wanted"], bool(row["holds"]))
        print(f"  ({check}: {time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    if "precision" in wanted:
        compare_policies(backend, where, small, table)
    if "recompute" in wanted:
        compare_recompute(backend, where, small, table)


def figures(check: str, backend: str, where: str, small: bool) -> dict[str, float] | None:
    """The figures of one check by name; None, and why on standard error, if it failed."""
    rows = run_check(check, backend, where, small)
    if isinstance(rows, str):
        print(rows, file=sys.stderr, flush=True)
        return None
    return {row["what"]: float(row["value"]) for row in rows}


def compare_policies(backend: str, where: str, small: bool, table: Table) -> None:
    """Half precision beside float32."""
    plain = figures("float32", backend, where, small)
    for policy in ("mixed_bfloat16", "mixed_float16"):
        half = figures(policy, backend, where, small)
        if plain is None or half is None:
            table.add(backend, policy, "failed", "a result", False)
            continue
        apart = abs(half["loss"] / plain["loss"] - 1)
        table.add(
            backend, f"{policy}: loss of the last epoch beside float32", f"{100 * apart:.1f} %",
            "5 %", apart <= 0.05,
        )  # fmt: skip
        rate = half["rate"] / plain["rate"]
        told = f"{rate:.2f}, {half['rate']:,.0f} rows/s"
        table.add(backend, f"{policy}: rows/s beside float32", told, "", True)
        if plain["memory"]:
            memory = half["memory"] / plain["memory"]
            table.add(backend, f"{policy}: memory beside float32", f"{memory:.2f}", "", True)


def compare_recompute(backend: str, where: str, small: bool, table: Table) -> None:
    """A model made in a ``RematScope`` beside one that keeps all values."""
    kept = figures("all kept", backend, where, small)
    saved = figures("recompute", backend, where, small)
    if kept is None or saved is None:
        table.add(backend, "recompute", "failed", "a result", False)
        return
    apart = max(abs(saved[name] / kept[name] - 1) for name in ("norm", "sum"))
    table.add(
        backend, "recompute: gradient beside the one without", f"{apart:.1e}", "1e-5", apart <= 1e-5
    )
    if kept["memory"]:
        memory = saved["memory"] / kept["memory"]
        gigabytes = f"{saved['memory'] / 1e9:.2f} of {kept['memory'] / 1e9:.2f} GB"
        table.add(
            backend, "recompute: memory of a step", f"{memory:.2f} ({gigabytes})", "0.7",
            memory <= 0.7,
        )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes, for a test")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    parser.add_argument("--backends", default="torch,jax", help="which, default: %(default)s")
    parser.add_argument("--checks", default=",".join(CHECKS), help="which, default: %(default)s")
    arguments = parser.parse_args()
    checks = arguments.checks.split(",")
    if unknown := set(checks) - set(CHECKS):
        parser.error(f"unknown checks: {', '.join(sorted(unknown))}; known: {', '.join(CHECKS)}")
    where, name = ("cpu", "the CPU") if arguments.cpu else device()
    if where == "cpu" and not arguments.small:
        print("There is no GPU here. --small runs the checks with small sizes on the CPU.")
        return 2
    table = Table([])
    print(f"{name}\n\n| backend | what | measured | wanted | holds |\n|---|---|---|---|---|")
    for backend in arguments.backends.split(","):
        if importlib.util.find_spec(backend) is None:
            print(f"{backend} is not installed", file=sys.stderr)
            continue
        run_backend(backend, where, arguments.small, table, checks)
    if not table.lines:
        print("Neither PyTorch nor JAX is installed.", file=sys.stderr)
        return 2
    print(f"\n{len(table.lines)} figures, {table.failed} not as wanted")
    return 1 if table.failed else 0


if __name__ == "__main__":
    sys.exit(main())
