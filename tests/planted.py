"""One-line faults, each with the file whose tests must fail: are the tests as watchful as before?

    python tests/planted.py [--only tables ps] [--jobs 2] [--list]

A tool to run by hand, before and after tests are made faster; ``make planted`` runs all of it. Each
fault is made in a copy of the tree, where the tests of its file then run. A fault that no test
notices, and one whose line is no longer there exactly once, are shown; the status is then 1.
The faults are comparisons that are off by one, conditions that are turned around and the like.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 120.0
FAST = "not slow and not long and not keras and not processes and not spark"
"""The marks of ``make check``: its tests alone notice each of these faults."""


@dataclass(frozen=True)
class Fault:
    """A line of a module of ``sparkdl/``, what stands there instead, and the file that notices.

    Args:
        path: The module, within ``sparkdl/``.
        line: The line without its indentation; it stands there once.
        fault: What takes its place.
        test: The file of tests, within ``tests/``.
    """

    path: str
    line: str
    fault: str
    test: str

    @property
    def room(self) -> str:
        """The folder at the top that the module is in."""
        return self.path.partition("/")[0]


FAULTS = [
    Fault(
        "codecs/codec.py",
        "np.add(self.residual, array, out=self.residual)",
        "np.subtract(self.residual, array, out=self.residual)",
        "unit/codecs/test_codecs_common.py",
    ),
    Fault(
        "codecs/quantized.py",
        "np.subtract(target, np.float32(self.levels), out=target)",
        "np.add(target, np.float32(self.levels), out=target)",
        "unit/codecs/test_codecs_common.py",
    ),
    Fault(
        "codecs/sparse.py",
        "return min(size, k if k is not None else max(1, round(ratio * size)))",
        "return min(size, k if k is not None else round(ratio * size))",
        "unit/codecs/test_codecs_common.py",
    ),
    Fault(
        "codecs/sparse.py",
        "return np.sort(np.argpartition(sizes, sizes.size - k)[sizes.size - k :])",
        "return np.argpartition(sizes, sizes.size - k)[sizes.size - k :]",
        "unit/codecs/test_codecs_common.py",
    ),
    Fault(
        "collective/arithmetic.py",
        "return [size * i // count for i in range(count + 1)]",
        "return [size * i // count for i in range(count)]",
        "unit/collective/test_collective_arithmetic.py",
    ),
    Fault(
        "collective/synchronizer.py",
        "if self._steps.stop_agreed and self._steps_done % MAX_STACK == 0:",
        "if self._steps.stop_agreed or self._steps_done % MAX_STACK == 0:",
        "unit/collective/test_collective_synchronizer.py",
    ),
    Fault(
        "coordinator/blobs.py",
        "return found[0] if len(found) == 1 else np.concatenate(found)",
        "return found[0] if len(found) != 1 else np.concatenate(found)",
        "unit/coordinator/test_blobs.py",
    ),
    Fault(
        "coordinator/telemetry.py",
        "if not whole or not all(_is_amount(number) for number in numbers):",
        "if whole or not all(_is_amount(number) for number in numbers):",
        "unit/coordinator/test_coordinator_reporting.py",
    ),
    Fault(
        "coordinator/telemetry.py",
        "return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63",
        "return isinstance(value, int) and 0 <= value < 2**63",
        "unit/coordinator/test_coordinator_reporting.py",
    ),
    Fault(
        "data/batches.py",
        'require_int("most_batches", most_batches, 1)',
        'require_int("most_batches", most_batches, 0)',
        "unit/data/test_data_batches.py",
    ),
    Fault(
        "data/batches.py",
        "if self.tail_rows and start_batch <= self.full_batches:",
        "if self.tail_rows and start_batch < self.full_batches:",
        "unit/data/test_data_batches.py",
    ),
    Fault(
        "data/feed.py",
        "return [min(counts)] * len(counts)",
        "return [max(counts)] * len(counts)",
        "unit/data/test_feed.py",
    ),
    Fault(
        "data/columns.py",
        "return 1 << (longest - 1).bit_length() if self.few_lengths else longest",
        "return 1 << longest.bit_length() if self.few_lengths else longest",
        "unit/data/test_data_ragged.py",
    ),
    Fault(
        "data/rows.py",
        "return max(0.0, (count * found - 1) / (count - 1))",
        "return max(0.0, (count * found) / (count - 1))",
        "unit/data/test_off_center.py",
    ),
    Fault(
        "files/storage.py",
        "if at_most is not None and len(content) > at_most:",
        "if at_most is not None and len(content) >= at_most:",
        "unit/files/test_storage.py",
    ),
    Fault(
        "launch/stream_feed.py",
        "if message.offset == 0:  # one of the same size as before is no repetition of it",
        "if message.offset != 0:  # one of the same size as before is no repetition of it",
        "unit/launch/test_stream_feed.py",
    ),
    Fault(
        "linear/sparse_rows.py",
        "if len(indices) == (~inside).sum():",
        "if len(indices) != (~inside).sum():",
        "unit/linear/test_sparse_rows.py",
    ),
    Fault(
        "optimizers/blocks.py",
        "np.add(center[part], step, out=out[part])",
        "np.add(center[part], step, out=center[part])",
        "unit/optimizers/test_blocks.py",
    ),
    Fault(
        "optimizers/blocks.py",
        "part = slice(i * BLOCK, min((i + 1) * BLOCK, size))",
        "part = slice(i * BLOCK, max((i + 1) * BLOCK, size))",
        "unit/optimizers/test_blocks.py",
    ),
    Fault(
        "process/host_load.py",
        "if self._now() < self._due:",
        "if self._now() > self._due:",
        "unit/test_host_load.py",
    ),
    Fault(
        "program/replay.py",
        "while len(nodes) and nodes[0] < self._leaves:",
        "while len(nodes) or nodes[0] < self._leaves:",
        "unit/program/test_replay.py",
    ),
    Fault(
        "progress/monitor.py",
        "elif self._since is None and workers:",
        "elif self._since is None or workers:",
        "unit/progress/test_monitor.py",
    ),
    Fault(
        "ps/store/stores.py",
        "again = message.sequence <= worker.applied  # its first reply was lost",
        "again = message.sequence < worker.applied  # its first reply was lost",
        "unit/ps/store/test_parameter_store.py",
    ),
    Fault(
        "ps/store/stores.py",
        "if message.sequence <= worker.applied:  # its first reply was lost",
        "if message.sequence < worker.applied:  # its first reply was lost",
        "unit/ps/store/test_parameter_store_rounds.py",
    ),
    Fault(
        "rules/bsp.py",
        "return self.staleness < 0 or clock - slowest_clock <= self.staleness",
        "return self.staleness < 0 or clock - slowest_clock < self.staleness",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/compensated.py",
        "return 1.0 / (max(commit.staleness, 0) + 1)",
        "return 1.0 / (max(commit.staleness, 0) + 2)",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/compensated.py",
        "return 1.0 / max(commit.staleness, 1)",
        "return 1.0 / max(commit.staleness, 2)",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/downpour.py",
        "return 1.0 / max(commit.batches, 1)",
        "return 1.0",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/elastic.py",
        "np.subtract(local, force, out=local)",
        "np.add(local, force, out=local)",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/elastic.py",
        "return self.rho * self.learning_rate",
        "return self.rho",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "rules/rule.py",
        "if not (math.isfinite(rate) and rate > 0):",
        "if (math.isfinite(rate) and rate > 0):",
        "unit/rules/test_rules_common.py",
    ),
    Fault(
        "rules/rule.py",
        "return self.clock - self.pulled_clock",
        "return self.clock - self.pulled_clock + 1",
        "unit/rules/test_rules_equations.py",
    ),
    Fault(
        "spark/forms/fed_files.py",
        "return total * rank // self.ranks, total * (rank + 1) // self.ranks",
        "return total * rank // self.ranks, total * (rank + 2) // self.ranks",
        "unit/spark/forms/test_fed_files.py",
    ),
    Fault(
        "spark/runs/capacity.py",
        "return self._waiting[0] is claim and (claim.slots <= free or not self._held)",
        "return self._waiting[0] is claim and (claim.slots < free or not self._held)",
        "unit/spark/runs/test_slots.py",
    ),
    Fault(
        "tables/checkpoints.py",
        "if beside and not _NAME.fullmatch(beside):",
        "if beside or not _NAME.fullmatch(beside):",
        "unit/tables/test_files.py",
    ),
    Fault(
        "tables/classes.py",
        "wrong = whole[(whole < 0) | (whole >= num_classes)][0]",
        "wrong = whole[(whole < 0) | (whole > num_classes)][0]",
        "unit/tables/test_classes.py",
    ),
    Fault(
        "tables/admission.py",
        "if name == CountFilter.name:",
        "if name != CountFilter.name:",
        "unit/tables/test_entry.py",
    ),
    Fault(
        "tables/admission.py",
        "if name == Probability.name:",
        "if name != Probability.name:",
        "unit/tables/test_entry.py",
    ),
    Fault(
        "tables/admission.py",
        "return counts >= self.count",
        "return counts > self.count",
        "unit/tables/test_store.py",
    ),
    Fault(
        "tables/admission.py",
        "return drawn < np.uint64(int(self.probability * 2**53))",
        "return drawn > np.uint64(int(self.probability * 2**53))",
        "unit/tables/test_store.py",
    ),
    Fault(
        "tables/files.py",
        'if not 0 <= self.clock <= _MAX_CLOCK or found["since"] is not None:',
        'if not 0 <= self.clock <= _MAX_CLOCK and found["since"] is not None:',
        "unit/tables/test_files.py",
    ),
    Fault(
        "tables/store.py",
        "leaves |= self.clock - clocks > unseen",
        "leaves |= self.clock - clocks >= unseen",
        "unit/tables/test_store.py",
    ),
    Fault(
        "tables/store.py",
        "weights = np.add.reduceat(np.asarray(counts, np.int64)[order], first)",
        "weights = np.add.reduceat(np.asarray(counts, np.int64), first)",
        "unit/tables/test_store.py",
    ),
    Fault(
        "tracking/notebook.py",
        "return max(there, key=lambda n: self._sign * there[n], default=None)",
        "return min(there, key=lambda n: self._sign * there[n], default=None)",
        "unit/tracking/test_notebook_curves.py",
    ),
    Fault(
        "training/parts.py",
        "return range(max(part.start, slot.offset), min(part.stop, slot.offset + slot.size))",
        "return range(max(part.start, slot.offset), part.stop)",
        "unit/test_gradient_parts.py",
    ),
    Fault(
        "training/phases.py",
        "return (ends - seconds)[kept], np.nonzero(kept)[1]",
        "return ends[kept], np.nonzero(kept)[1]",
        "unit/test_phases.py",
    ),
    Fault(
        "training/slices.py",
        "if data.size < head_offset(0):",
        "if data.size <= head_offset(0):",
        "unit/test_slices.py",
    ),
    Fault(
        "transport/frames.py",
        "if meta_size > self.max_meta_bytes:",
        "if meta_size >= self.max_meta_bytes:",
        "unit/transport/test_frames.py",
    ),
    Fault("transport/frames.py", "if not raw:", "if raw:", "unit/transport/test_frames.py"),
    Fault(
        "tune/study.py",
        "return max(0.0, 1 - (number - 1) / (number - len(present)) * within / total)",
        "return max(0.0, 1 - within / total)",
        "unit/tune/test_analysis.py",
    ),
    Fault(
        "tune/journal.py",
        "return isinstance(value, int) and not isinstance(value, bool) and value >= 0",
        "return isinstance(value, int) and not isinstance(value, bool) and value > 0",
        "unit/tune/test_journal.py",
    ),
    Fault(
        "tune/searchers/brackets.py",
        "return [max(int(max_epochs / divisor ** (number - 1 - r)), 1) for r in range(number)]",
        "return [max(int(max_epochs / divisor ** (number - r)), 1) for r in range(number)]",
        "unit/tune/searchers/test_searchers.py",
    ),
    Fault(
        "tune/searchers/brackets.py",
        "return max(1, min(max_rungs, int(room + 1e-9) + 1))",
        "return max(1, min(max_rungs, int(room + 1e-9)))",
        "unit/tune/searchers/test_searchers.py",
    ),
    Fault(
        "wire/greeting.py",
        "return len(heard) >= wanted",
        "return len(heard) > wanted",
        "unit/wire/test_proving.py",
    ),
    Fault(
        "wire/proving.py",
        "if not hear_bytes(self.connection, self._heard, self._hello_bytes + NONCE_BYTES):",
        "if hear_bytes(self.connection, self._heard, self._hello_bytes + NONCE_BYTES):",
        "unit/wire/test_proving.py",
    ),
    Fault(
        "wire/proving.py",
        "if whole and self._heard == BUSY:",
        "if whole or self._heard == BUSY:",
        "unit/wire/test_proving.py",
    ),
    Fault(
        "wire/proving.py",
        'return hmac.digest(token, role + opening + nonce, "sha256")',
        'return hmac.digest(token, opening + nonce, "sha256")',
        "unit/wire/test_proving.py",
    ),
    Fault(
        "worker.py",
        "return min(1, stacks)",
        "return max(1, stacks)",
        "unit/test_worker_loop.py",
    ),
]


class Tree:
    """A copy of the repository, in which one fault at a time is made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        )
        for name in listed.stdout.splitlines():
            if (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)

    def try_fault(self, fault: Fault) -> str:
        """``'noticed'``, or what is wrong."""
        path = self._folder / "sparkdl" / fault.path
        text = path.read_text() if path.exists() else ""
        found = [line for line in text.split("\n") if line.strip() == fault.line]
        if len(found) != 1:
            return f"the line is there {len(found)} times"
        path.write_text(text.replace(found[0], found[0].replace(fault.line, fault.fault)))
        try:
            return self._run(f"tests/{fault.test}")
        finally:
            path.write_text(text)

    def _run(self, test: str) -> str:
        options = ["-q", "-x", "-p", "no:cacheprovider", "-m", FAST]
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._folder),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, test], cwd=self._folder, env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        ) as running:  # fmt: skip
            try:
                status = running.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                return "noticed"  # a wait that never ends
        return {0: "NOT NOTICED", 1: "noticed"}.get(status, f"status {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", help="rooms, such as tables")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if not args.only or fault.room in args.only]
    if args.list:
        for fault in faults:
            print(f"| `{fault.path}` | `{fault.line}` | `{fault.fault}` | `{fault.test}` |")
        return 0
    with tempfile.TemporaryDirectory(prefix="sparkdl-planted-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(args.jobs):
            trees.put(Tree(Path(folder, str(number))))

        def outcome(fault: Fault) -> str:
            tree = trees.get()
            try:
                return tree.try_fault(fault)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = []
            for fault, told in zip(faults, pool.map(outcome, faults), strict=True):
                outcomes.append(told)
                print(f"| `{fault.path}` | `{fault.fault}` | `{fault.test}` | {told} |", flush=True)
    print(f"\n{outcomes.count('noticed')} of {len(outcomes)} noticed")
    return int(outcomes.count("noticed") < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
