"""Every update rule against plain Keras at equal epochs: MNIST (CNN) and a9a (two layers).

    python benchmarks/rules.py [--tasks mnist a9a] [--workers 2 4] [--seeds 3] [--only RULE ...]
                               [--limit-s 450] [--results FILE] [--table] [--summary] [--quick]

Workers are threads of this process with a real server, or with real all-reduce rules, and without
Spark (see ``support/worker_threads``). Finished runs are lines of a JSON file, and are not run
again; ``--limit-s`` ends the script early, ``--table`` only prints.

Each rule has its own default window. Rules that add up the workers' changes train Keras' batch on
each worker; rules that average them, or scale down stale ones, divide it (batch / workers each), so
that in both cases an epoch moves the model by as many steps as Keras' epoch. Rules that need an
optimizer of their own are compared with plain Keras with that optimizer.

    python benchmarks/rules.py --many --seeds 5 --workers 2 8 32 [--rows 400000]
                               [--optimizer adam|sgd]

What asynchronous training learns with many workers, with the automatic window and others: the
network of ``workload`` and its noisy teacher, one epoch, 20,000 rows held out, beside plain Keras.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, os.path.dirname(__file__))
import numpy as np
import workload
from support import worker_threads

from sparkdl.config import AUTO_WINDOW

RESULTS = Path(__file__).resolve().parent.parent / "build" / "rules.jsonl"
MARKS_PER_EPOCH = 8


@dataclass(frozen=True)
class Task:
    """A data set and its network; ``metric`` is ``'accuracy'`` or ``'auc'``."""

    load: Any
    make: Any
    metric: str
    rows: int
    epochs: int
    batch: int


TASKS = {
    "mnist": Task(workload.mnist, workload.mnist_model, "accuracy", 8_000, 5, 32),
    "a9a": Task(workload.a9a, workload.a9a_model, "auc", 26_000, 3, 64),
}
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("Adam", {"learning_rate": 1e-3}),
    "adamw": ("AdamW", {"learning_rate": 1e-3}),
    "rmsprop": ("RMSprop", {"learning_rate": 1e-3}),
    "adagrad": ("Adagrad", {"learning_rate": 0.05}),
    "sgd": ("SGD", {"learning_rate": 0.1}),
    "nesterov": ("SGD", {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True}),
}
OWN_OPTIMIZER = {
    **{name: name for name in ("sgd", "adagrad", "rmsprop", "adamw")},
    **dict.fromkeys(("dc_asgd", "gap_aware", "downpour_adagrad"), "sgd"),
    "eamsgd": "nesterov",
}
ADDING = {
    "downpour", "downpour_adagrad", "hogwild", "adag", "experimental", "dc_asgd",
    "sgd", "adagrad", "rmsprop", "adam", "adamw", "single", "ensemble",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    family: str
    rule: str
    window: str = "default"

    @property
    def optimizer(self) -> str:
        return OWN_OPTIMIZER.get(self.rule, "adam") if self.family == "server" else "adam"

    def make(self) -> Any:
        """The rule."""
        from sparkdl.collective.rules import make_rule as make_all_reduce
        from sparkdl.rules import make_rule as make_server

        return (make_server if self.family == "server" else make_all_reduce)(self.rule)

    @property
    def batches(self) -> int:
        """Between two exchanges; see ``LoopSettings``."""
        return self.make().default_window if self.window == "default" else int(self.window)

    @property
    def each_step(self) -> bool:
        """Whether it exchanges after each batch."""
        return self.window == "default" and self.make().default_window == 1

    @property
    def label(self) -> str:
        return self.rule + ("" if self.window == "default" else f" (every {self.window})")

    def batch(self, task: Task, workers: int) -> int:
        shares = not (self.family == "server" and self.rule in ADDING)
        return task.batch // workers if shares else task.batch


def all_cases() -> list[Case]:
    """Each rule with its defaults, and some rules with another window."""
    from sparkdl.collective.rules import rule_names as all_reduce_names
    from sparkdl.rules import rule_names as server_names

    cases = [Case("server", name) for name in server_names()]
    cases += [Case("allreduce", name) for name in all_reduce_names()]
    others = [
        ("server", "diloco", "25"), ("allreduce", "diloco", "25"), ("server", "downpour", "5"),
        ("server", "hogwild", "8"), ("server", "dynsgd", "5"), ("server", "ssp", "5"),
        ("server", "experimental", "5"), ("server", "async_diloco", "500"),
        ("server", "aeasgd", "64"), ("allreduce", "easgd", "32"),
    ]  # fmt: skip
    return cases + [Case(*other) for other in others]


class Bench:
    """One task: its data, its learners (compiled once) and how a model is judged."""

    def __init__(self, name: str, rows: int | None = None) -> None:
        self.name, self.task = name, TASKS[name]
        x, y, self.x_test, self.y_test = self.task.load()
        self.x, self.y = x[:rows], y[:rows]
        self._learners: dict[tuple[str, int], tuple[Any, list[np.ndarray]]] = {}
        self._starts: dict[int, list[np.ndarray]] = {}

    def learners(self, optimizer: str, count: int, seed: int, rule: Any = None) -> list[Any]:
        """Fresh learners with equal weights, drawn from ``seed``."""
        import keras

        from sparkdl.learner import make_learner
        from sparkdl.learner.checks.compiling import adopt_optimizer

        wanted = None if rule is None else rule.local_optimizer()
        key = optimizer if wanted is None else f"{optimizer} {wanted}"
        made = []
        for rank in range(count):
            if (key, rank) not in self._learners:
                model = self.task.make()
                compile_with(model, optimizer)
                adopt_optimizer(model, wanted)
                learner = make_learner(model)
                kept = [np.array(v.numpy()) for v in model.optimizer.variables]
                worker_threads.warm_up(learner, self.x, self.y)
                self._learners[key, rank] = learner, kept
            learner, kept = self._learners[key, rank]
            if seed not in self._starts:
                keras.utils.set_random_seed(seed)
                self._starts[seed] = keras.models.clone_model(learner.model).get_weights()
            learner.model.set_weights(self._starts[seed])
            for variable, value in zip(learner.model.optimizer.variables, kept, strict=True):
                variable.assign(value)
            learner.metrics.reset()
            learner.reload()
            made.append(learner)
        return made

    def judge(self, weights: list[np.ndarray]) -> tuple[float, float]:
        """Test metric and test loss of a model, or of the mean prediction of several."""
        from sparkdl.learner.prediction.predictor import make_predictor

        (learner,) = self.learners("adam", 1, 0)
        name = next(iter(names_of(learner)))
        outputs = []
        for flat in weights:
            learner.write_weights(flat)
            learner.sync_model()
            predicted = make_predictor(learner.model).predict({name: self.x_test}, len(self.x_test))
            outputs.append(next(iter(predicted.values())))
        p = np.clip(np.mean(outputs, axis=0), 1e-7, 1 - 1e-7)
        if self.task.metric == "auc":
            p = p.ravel()
            y = self.y_test
            return auc(p, y), float(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))
        right = float(np.mean(p.argmax(1) == self.y_test))
        return right, float(-np.mean(np.log(p[np.arange(len(p)), self.y_test])))

    def plain(self, optimizer: str, seed: int, epochs: int) -> dict[str, Any]:
        """``model.fit`` in one process."""
        import keras

        (learner,) = self.learners(optimizer, 1, seed)
        model, batch = learner.model, self.task.batch
        every = max(1, len(self.x) // batch // MARKS_PER_EPOCH)
        curve = []
        flat = np.empty(learner.layout.size, np.float32)

        class Keep(keras.callbacks.Callback):
            steps = 0

            def on_train_batch_end(self, index: int, logs: Any = None) -> None:
                self.steps += 1
                if self.steps % every == 0:
                    learner.reload()
                    learner.read_weights(flat)
                    curve.append((self.steps * batch, flat.copy()))

        keras.utils.set_random_seed(seed)
        order = np.random.default_rng(seed).permutation(len(self.x))
        started = time.perf_counter()
        model.fit(
            self.x[order], self.y[order], batch_size=batch, epochs=epochs, verbose=0,
            callbacks=[Keep()],
        )  # fmt: skip
        seconds = time.perf_counter() - started
        learner.reload()
        learner.read_weights(flat)
        return self._line([flat], curve, 0.0, seconds, epochs, batch)

    def run(self, case: Case, workers: int, seed: int, epochs: int) -> dict[str, Any]:
        """One run of a rule."""
        import keras

        server, rule = case.family == "server", case.make()
        batch = case.batch(self.task, workers)
        learners = self.learners(case.optimizer, workers, seed, rule if server else None)
        share = len(self.x) // workers
        order = np.random.default_rng(seed).permutation(len(self.x))
        parts = [(self.x[cut], self.y[cut]) for cut in np.split(order[: share * workers], workers)]
        options: dict[str, Any] = {
            "epochs": epochs, "batch_size": batch, "seed": seed,
            "mark": len(self.x) // MARKS_PER_EPOCH,
            "window": case.batches,
        }  # fmt: skip
        if server:
            outcome = worker_threads.run_with_server(learners, parts, rule, **options)
        else:
            config = keras.optimizers.serialize(learners[0].model.optimizer)
            outcome = worker_threads.run_with_all_reduce(learners, parts, rule, config, **options)
        return self._line(
            outcome.weights, outcome.curve, outcome.bytes_per_worker / epochs, outcome.seconds,
            epochs, batch,
        )  # fmt: skip

    def _line(
        self, weights: Any, curve: Any, moved: float, seconds: float, epochs: int, batch: int
    ) -> dict[str, Any]:
        metric, loss = self.judge(weights)
        losses = [(rows, round(self.judge([flat])[1], 4)) for rows, flat in curve]
        return {
            "metric": metric, "loss": loss, "curve": losses, "bytes_per_epoch": moved,
            "seconds": round(seconds, 2), "epochs": epochs, "batch": batch,
        }  # fmt: skip


def compile_with(model: Any, optimizer: str) -> None:
    """Compiles ``model`` anew with one of ``OPTIMIZERS``; its loss and metrics stay."""
    import keras

    name, options = OPTIMIZERS[optimizer]
    settings = dict(model._compile_config.config)
    settings["optimizer"] = getattr(keras.optimizers, name)(**options)
    if settings.get("metrics"):
        settings["metrics"] = None
    model.compile(**settings)


def names_of(learner: Any) -> list[str]:
    return [tensor.name for tensor in learner.model.inputs]


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve: the share of pairs in the right order, ties counted half.

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
    0.75
    """
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    positive = labels > 0.5
    n, p = int((~positive).sum()), int(positive.sum())
    return float((ranks[inverse][positive].sum() - p * (p + 1) / 2) / (n * p))


# -- results ------------------------------------------------------------------------------------


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[k] for k in ("task", "family", "rule", "window", "workers", "seed"))


def read_results(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """All runs in the file; a later line for the same run replaces an earlier one."""
    if not path.exists():
        return {}
    lines = [json.loads(text) for text in path.read_text().splitlines() if text.strip()]
    return {key_of(line): line for line in lines}


def wanted_runs(args: argparse.Namespace) -> Iterator[tuple[str, Case, int, int]]:
    """``(task, case, workers, seed)``: plain Keras first, exchanges in each step (slow) last."""
    cases = [c for c in all_cases() if not args.only or c.rule in args.only]
    for task in args.tasks:
        for optimizer in sorted({c.optimizer for c in cases}, key=list(OPTIMIZERS).index):
            for seed in range(args.seeds):
                yield task, Case("plain", optimizer), 1, seed
    for each_step in (False, True):
        for seed in range(args.seeds):
            for task in args.tasks:
                for workers in args.workers:
                    for case in cases:
                        if case.each_step != each_step:
                            continue
                        if case.rule != "single":
                            yield task, case, workers, seed
                        elif workers == args.workers[0]:
                            yield task, case, 1, seed


def run_missing(args: argparse.Namespace) -> None:
    done = read_results(args.results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    benches: dict[str, Bench] = {}
    for name, case, workers, seed in wanted_runs(args):
        line = {"task": name, **asdict(case), "workers": workers, "seed": seed}
        if key_of(line) in done:
            continue
        if time.monotonic() - began > args.limit_s:
            print("(the portion's time is over; run again for the rest)", flush=True)
            return
        bench = benches.setdefault(name, Bench(name, 640 if args.quick else None))
        epochs = 1 if args.quick else bench.task.epochs
        if case.family == "plain":
            line.update(bench.plain(case.rule, seed, epochs))
        else:
            line.update(bench.run(case, workers, seed, epochs))
        with args.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{name} {case.family} {case.label} x{workers} seed {seed}: {line['metric']:.4f} "
            f"loss {line['loss']:.4f} {line['seconds']:.1f} s",
            flush=True,
        )


def print_tables(args: argparse.Namespace) -> None:
    done = read_results(args.results)
    for task in args.tasks:
        lines = [line for line in done.values() if line["task"] == task]
        if not lines:
            continue
        settings = TASKS[task]
        print(f"\n{task}: {settings.epochs} epochs, batch {settings.batch}\n")
        references = {o: Group([x for x in lines if is_plain(x, o)]) for o in OPTIMIZERS}
        header = [
            "rule", "workers", "batch", f"test {settings.metric}", "points from Keras",
            "test loss", "steps to Keras' loss + 5 %", "MB per worker and epoch", "seconds",
        ]  # fmt: skip
        rows = [g.row(f"plain Keras, {o}", g) for o, g in references.items() if g.lines]
        for case in [c for c in all_cases() if not args.only or c.rule in args.only]:
            for workers in [1] if case.rule == "single" else args.workers:
                group = Group([x for x in lines if is_of(x, case, workers)])
                reference = references[case.optimizer]
                if group.lines and reference.lines:
                    suffix = "" if case.family == "server" else ", all-reduce"
                    rows.append(group.row(case.label + suffix, reference))
        print(workload.table(header, rows))


def print_summary(args: argparse.Namespace) -> None:
    """One row for each rule: points from plain Keras on all tasks, and the bytes exchanged."""
    done = list(read_results(args.results).values())
    header = ["rule", "batches between exchanges"]
    header += [f"{task}, {workers} workers" for task in args.tasks for workers in args.workers]
    header += [f"MB, {workers} workers" for workers in args.workers]
    rows = []
    for case in [c for c in all_cases() if not args.only or c.rule in args.only]:
        points, moved = [], []
        for task in args.tasks:
            reference = Group(
                [x for x in done if x["task"] == task and is_plain(x, case.optimizer)]
            )
            for workers in args.workers:
                count = 1 if case.rule == "single" else workers
                lines = [x for x in done if x["task"] == task and is_of(x, case, count)]
                group = Group(lines)
                points.append(group.points(reference) if lines and reference.lines else "")
                if task == args.tasks[0]:
                    moved.append(f"{group.mean('bytes_per_epoch') / 1e6:.1f}" if lines else "")
        suffix = "" if case.family == "server" else ", all-reduce"
        window = {-1: "automatic", 0: "epoch"}.get(case.batches, str(case.batches))
        rows.append([f"`{case.rule}`{suffix}", window, *points, *moved])
    print(workload.table(header, rows))


def is_plain(line: dict[str, Any], optimizer: str) -> bool:
    return line["family"] == "plain" and line["rule"] == optimizer


def is_of(line: dict[str, Any], case: Case, workers: int) -> bool:
    return line["workers"] == workers and all(line[k] == v for k, v in asdict(case).items())


class Group:
    """The runs of one row, over the seeds."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self.lines = lines

    def mean(self, key: str) -> float:
        return statistics.fmean(line[key] for line in self.lines)

    def spread(self, key: str) -> float:
        """The standard deviation over the seeds."""
        values = [line[key] for line in self.lines]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def shown(self, key: str) -> str:
        """Mean and spread."""
        told = f"{self.mean(key):.4f}"
        return told + (f" ± {self.spread(key):.4f}" if self.lines[1:] else "")

    def points(self, reference: Group) -> str:
        """Difference of the means to ``reference`` in points, and the seeds' spread."""
        points = 100 * (self.mean("metric") - reference.mean("metric"))
        return f"{points:+.2f}" + (
            f" ± {100 * self.spread('metric'):.2f}" if len(self.lines) > 1 else ""
        )

    def steps_to(self, loss: float) -> str:
        """Batches of Keras' size, over all workers, until the test loss is that low; mean over the
        seeds, a dash if one never is."""
        task = TASKS[self.lines[0]["task"]]
        firsts = []
        for line in self.lines:
            curve = [*line["curve"], (task.rows * line["epochs"], line["loss"])]
            reached = [rows for rows, value in curve if value <= loss]
            if not reached:
                return "–"
            firsts.append(reached[0] / task.batch)
        return f"{statistics.fmean(firsts):.0f}"

    def row(self, label: str, reference: Group) -> list[str]:
        line = self.lines[0]
        points = 100 * (self.mean("metric") - reference.mean("metric"))
        moved = self.mean("bytes_per_epoch") / 1e6
        return [
            label, str(line["workers"]), str(line["batch"]),
            self.shown("metric"), "" if self is reference else f"{points:+.2f}",
            self.shown("loss"), self.steps_to(1.05 * reference.mean("loss")),
            f"{moved:.2f}" if line["family"] != "plain" else "", f"{self.mean('seconds'):.1f}",
        ]  # fmt: skip


# -- many workers ----------------------------------------------------------------------------------

HELD_OUT = 20_000
MANY = [
    ("downpour", AUTO_WINDOW),
    ("downpour", 1),
    ("downpour", 16),
    ("staleness_aware", 16),
    ("dynsgd", 16),
    ("geo", 16),
]


@dataclass(frozen=True)
class FixedCase:
    """As :class:`Case`, with a window and an optimizer of its own."""

    rule: str
    batches: int
    optimizer: str
    family: str = "server"

    def make(self) -> Any:
        """The rule."""
        from sparkdl.rules import make_rule

        return make_rule(self.rule)

    def batch(self, task: Task, workers: int) -> int:
        """Keras' batch on every worker."""
        return task.batch


def many_workers(args: argparse.Namespace) -> None:
    """Prints what asynchronous training learns with 2 to 32 workers, by rule and window."""
    from sparkdl.worker import auto_window

    x, y = workload.make_data(args.rows + HELD_OUT)
    data = x[: args.rows], y[: args.rows], x[args.rows :], y[args.rows :]
    TASKS["teacher"] = Task(
        lambda: data, workload.make_model, "accuracy", args.rows, 1, workload.BATCH
    )
    bench = Bench("teacher")
    plain = [bench.plain(args.optimizer, seed, 1) for seed in range(args.seeds)]
    print(
        f"Plain Keras, {args.optimizer}, {args.seeds} seeds: accuracy {spread(plain, 'metric')}, "
        f"loss {spread(plain, 'loss')}\n"
    )
    print("| workers | rule | window | accuracy (lowest to highest) | points from Keras | loss |")
    print("|---|---|---|---|---|---|")
    for workers in args.workers:
        for rule, window in MANY:
            case = FixedCase(rule, window, args.optimizer)
            lines = [bench.run(case, workers, seed, 1) for seed in range(args.seeds)]
            chosen = auto_window(args.rows // workers // workload.BATCH, workers)
            shown = f"automatic: {chosen}" if window == AUTO_WINDOW else str(window)
            points = 100 * (mean(lines, "metric") - mean(plain, "metric"))
            print(
                f"| {workers} | {rule} | {shown} | {spread(lines, 'metric')} | {points:+.1f} | "
                f"{spread(lines, 'loss')} |",
                flush=True,
            )


def mean(lines: list[dict[str, Any]], name: str) -> float:
    """The mean of a figure over the seeds."""
    return statistics.mean(line[name] for line in lines)


def spread(lines: list[dict[str, Any]], name: str) -> str:
    """The mean of a figure over the seeds, with the lowest and the highest."""
    found = [line[name] for line in lines]
    return f"{mean(lines, name):.4f} ({min(found):.4f} to {max(found):.4f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--workers", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print what is there")
    parser.add_argument("--summary", action="store_true", help="that, a row for each rule")
    parser.add_argument("--quick", action="store_true", help="640 rows, one epoch: does it run?")
    parser.add_argument("--many", action="store_true", help="many workers; see above")
    parser.add_argument("--rows", type=int, default=400_000, help="with --many")
    parser.add_argument("--optimizer", default="adam", choices=("adam", "sgd"), help="with --many")
    args = parser.parse_args()
    if args.many:
        many_workers(args)
        return
    if workload.folder() is None:
        print("The data are not here; set SPARKDL_DATA.")
        return
    if args.summary:
        print_summary(args)
        return
    if not args.table:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        run_missing(args)
    print_tables(args)


if __name__ == "__main__":
    main()
