"""sparkdl against PySpark's TorchDistributor and Ray Train, two processes each.

    python benchmarks/torch_peers.py [--rounds 3] [--part speed kill] [--keep runs.json]

The same network, rows (a cached DataFrame of two partitions), batches and optimizer. Ray has a
virtual environment of its own, which sees the packages of this one, so that all train with the
same PyTorch. Each case has a session of its own in each round: the first and the second call are
timed from the DataFrame to the trained model on the driver. "Loop" counts from the first step to
the last of the second call. All are medians. Lines of code are those of the functions that a user
writes, without the network. The part "kill" kills one of two workers once, after half of ten
epochs of a warm session. With ``--keep`` rounds are added to those of an earlier call.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RAY = ROOT / ".venv-ray"
RAY_VERSION = "2.60.0"
sys.path.insert(0, str(HERE))
import workload  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One way to train: a script, its case, and the functions that a user would write."""

    script: str
    case: str
    user_code: tuple[str, ...]
    backend: str = ""
    kills: tuple[str, ...] = ()


def _sparkdl(case: str, backend: str, kills: tuple[str, ...] = ()) -> Case:
    return Case("peer_sparkdl.py", case, ("peer_sparkdl.fit",), backend, kills)


CASES = {
    "TorchDistributor, DataLoader": Case(
        "peer_torch_distributor.py", "loader",
        ("peer_torch.train_with_loader", "peer_torch_distributor.fit"),
    ),
    "TorchDistributor, tensors": Case(
        "peer_torch_distributor.py", "tensors",
        ("peer_torch.train_tensors", "peer_torch_distributor.fit"), kills=("default",),
    ),
    "Ray Train, Ray Data": Case(
        "peer_ray.py", "data",
        ("peer_ray.train_with_ray_data", "peer_ray.datasets_of", "peer_ray.fit"),
    ),
    "Ray Train, tensors": Case(
        "peer_ray.py", "tensors",
        ("peer_torch.train_tensors", "peer_ray.train_tensors", "peer_ray.fit"),
        kills=("once", "again"),
    ),
    "sparkdl, allreduce, PyTorch": _sparkdl("allreduce", "torch"),
    "sparkdl, allreduce, TensorFlow": _sparkdl("allreduce", "tensorflow", ("default",)),
    "sparkdl, asynchronous, TensorFlow": _sparkdl("asynchronous", "tensorflow", ("default",)),
}  # fmt: skip
WAYS = {
    "default": "", "once": ", as it is", "again": ", max_failures=1",
}  # fmt: skip


def user_lines(names: tuple[str, ...]) -> int:
    """Lines of code in the bodies of these functions: without docstrings, comments, empty lines,
    and lines for the benchmark alone."""
    count = 0
    for name in names:
        module, _, function = name.partition(".")
        text = (HERE / "support" / f"{module}.py").read_text()
        (found,) = (
            node for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name == function
        )  # fmt: skip
        body = found.body[ast.get_docstring(found) is not None :]
        lines = text.splitlines()[body[0].lineno - 1 : found.end_lineno]
        code = [line.strip() for line in lines if not line.strip().startswith("#")]
        count += sum(bool(line) and not line.endswith("# benchmark") for line in code)
    return count


def install_ray() -> Path:
    """Makes Ray's virtual environment if there is none."""
    python = RAY / "bin" / "python"
    if not (RAY / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", RAY], check=True)
        own = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        Path(own, "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
        wanted = f"ray[train]=={RAY_VERSION}"
        subprocess.run([python, "-m", "pip", "install", "--quiet", wanted], check=True)
        (RAY / ".installed").touch()
    return python


def run(case: Case, *arguments: str) -> dict[str, Any]:
    python = install_ray() if case.script == "peer_ray.py" else Path(sys.executable)
    environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_PYTHON"}
    environment |= {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE, HERE / "support"))),
        "TF_CPP_MIN_LOG_LEVEL": "3", "SPARK_LOCAL_IP": "127.0.0.1",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "0",
    }  # fmt: skip
    if case.backend:
        environment["KERAS_BACKEND"] = case.backend
    done = subprocess.run(
        [python, HERE / "support" / case.script, case.case, *arguments],
        env=environment, capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return dict(json.loads(line[7:]))
    raise RuntimeError(done.stdout[-2000:] + done.stderr[-4000:])


def speed_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each case that was run."""
    rows = []
    for name in (name for name in CASES if name in runs):
        results = runs[name]
        epochs = results[0].get("epochs", workload.EPOCHS)
        total = workload.ROWS * epochs
        first = workload.median([r["calls_s"][0] for r in results])
        second = workload.median([r["calls_s"][1] for r in results])
        loop = workload.median([r["loops_s"][1] for r in results])
        loss = workload.median([r["losses"][1] for r in results])
        start = workload.median([r["start_s"] for r in results])
        rows.append([
            name, f"{total / loop:,.0f}", f"{total / second:,.0f}",
            f"{first:.1f}", f"{second:.1f}", f"{start:.1f}" if start > 0.1 else "",
            f"{loss:.3f}" if epochs == workload.EPOCHS else f"{loss:.3f} ({epochs} epoch)",
            str(user_lines(CASES[name].user_code)),
        ])  # fmt: skip
    header = [
        "", "loop rows/s", "whole second call rows/s", "first call, s", "second call, s",
        "start beside Spark, s", "loss after", "lines of code",
    ]  # fmt: skip
    return workload.table(header, rows)


def kill_table(runs: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for name, results in runs.items():
        last = results[-1]
        losses = f"{last['loss']:.3f} ({last['even_loss']:.3f})" if last["loss"] else ""
        rows.append([
            name, last["outcome"], f"{last['even_s']:.1f}", f"{last['kill_s']:.1f}",
            str(last["epochs"]), losses,
        ])  # fmt: skip
    header = [
        "", "ends", "undisturbed, s", "with a killed worker, s", "epochs done for 10",
        "loss after (undisturbed)",
    ]  # fmt: skip
    return workload.table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", nargs="*", default=["speed", "kill"])
    parser.add_argument("--only", help="cases whose name has this", default="")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    kept: dict[str, dict[str, list[dict[str, Any]]]] = {"speed": {}, "kill": {}}
    if args.keep and args.keep.exists():
        kept = json.loads(args.keep.read_text())
    for number in range(args.rounds if "speed" in args.part else 0):
        for name, case in CASES.items():
            if args.only in name:
                seed = len(kept["speed"].get(name, [])) + 1
                kept["speed"].setdefault(name, []).append(run(case, str(seed)))
                note(args.keep, kept, f"{number + 1}: {name} {kept['speed'][name][-1]}")
    for name, case in CASES.items() if "kill" in args.part else ():
        for way in case.kills if args.only in name else ():
            found = run(case, "1", way)
            kept["kill"].setdefault(name + WAYS[way], []).append(found)
            note(args.keep, kept, f"{name}: {found}")
    for part, table in (("speed", speed_table), ("kill", kill_table)):
        if part in args.part:
            print("\n" + table(kept[part]), flush=True)


def note(keep: Path | None, runs: Any, text: str) -> None:
    print(text, file=sys.stderr, flush=True)
    if keep:
        keep.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
