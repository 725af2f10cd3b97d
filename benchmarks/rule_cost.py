"""What one server update and one encoding cost, against one ``np.add`` over the same memory.

    python benchmarks/rule_cost.py [--megabytes 100] [--repeats 7] [--threads 2]

Rules are timed alternately with ``np.add(center, delta, out=center)``, so that a busy machine slows
both; medians are printed as Markdown tables. A rule is timed in one thread and in as many as a
server takes (up to 4, one per core), np.add always in one. "memory alone" is the least that the
rule can cost by the memory that it moves: np.add reads two vectors and writes one; every vector
that a rule keeps and changes adds a read and a write. Goals: at most 2.5 times ``np.add``; fp16,
int8 and onebit at least 1 GB/s, topk at least 0.3 GB/s of float32 input per core. Rules of mode
'allreduce' are timed with a communicator of one rank: what they compute, without the network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from sparkdl.codecs import codec_names, make_codec
from sparkdl.collective.current import SoloCommunicator
from sparkdl.collective.rules import (
    Exchange,
    GradientExchange,
    OptimizerExchange,
    WeightsExchange,
)
from sparkdl.collective.rules import make_rule as make_exchange_rule
from sparkdl.collective.rules import rule_names as exchange_names
from sparkdl.optimizers.blocks import use_threads
from sparkdl.rules import Commit, Rule, make_rule, rule_names
from sparkdl.weights import FloatArray, Layout

COMMIT = Commit(
    worker=0, num_workers=1, clock=9, pulled_clock=6, batches=5, rows=320, learning_rate=0.1
)


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def variants() -> list[tuple[str, Rule]]:
    """All rules, and those whose options change the cost."""
    rules = [(name, make_rule(name)) for name in rule_names()]
    rules += [
        ("bsp (delta)", make_rule("bsp", payload="delta")),
        ("dc_asgd (adaptive)", make_rule("dc_asgd", adaptive=True)),
        ("sgd (momentum)", make_rule("sgd", momentum=0.9)),
        ("sgd (Nesterov)", make_rule("sgd", momentum=0.9, nesterov=True)),
    ]
    return rules


def print_rules(size: int, repeats: int, threads: int) -> None:
    rng = np.random.default_rng(0)
    center = rng.standard_normal(size, np.float32)
    delta = rng.standard_normal(size, np.float32) * np.float32(1e-3)
    print(f"| rule | ms | × np.add | × np.add, {threads} threads | memory alone |")
    print("|---|---|---|---|---|")
    for name, rule in variants():
        state = rule.init(center)

        def update(rule: Rule = rule, state: dict[str, object] = state) -> None:
            rule.update(center, delta, state, COMMIT, center)

        def add() -> None:
            np.add(center, delta, out=center)

        update()
        times: list[tuple[float, ...]] = []
        for _ in range(repeats):
            use_threads(1)
            times.append((seconds(add), seconds(update)))
            use_threads(threads)
            times[-1] += (seconds(update),)
        use_threads(1)
        plain, own, shared = (statistics.median(column) for column in zip(*times, strict=True))
        # The initial center of the rules with backups is read only before a worker's first commit.
        kept = sum(isinstance(v, np.ndarray) for k, v in state.items() if k != "initial")
        print(
            f"| {name} | {own * 1e3:.1f} | {own / plain:.2f} | {shared / plain:.2f} | "
            f"{(3 + 2 * kept) / 3:.2f} |"
        )
    print(f"\nnp.add: {plain * 1e3:.1f} ms for {4 * size / 1e6:.0f} MB\n")


def print_exchanges(size: int, repeats: int) -> None:
    side = int(size**0.5)
    layout = Layout.of([("w", (side, side), "float32")])
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(layout.size, np.float32)
    change = rng.standard_normal(layout.size, np.float32) * np.float32(1e-3)
    print("| rule of mode 'allreduce' | ms | × np.add |\n|---|---|---|")
    for name in exchange_names():
        rule = make_exchange_rule(name)
        if name == "streaming_diloco":
            rule = make_exchange_rule(name, fragments=1, period=1, delay=0)
        elif name == "onebit_adam":
            rule = make_exchange_rule(name, freeze_step=1)
        rule = rule.bind(1, {"class_name": "Adam", "config": {"learning_rate": 0.001}})
        with SoloCommunicator() as alone:
            exchange = rule.open(alone, layout)
            call = one_exchange(exchange, weights, change)
            for _ in range(2):
                call()
            times = [
                (seconds(lambda: np.add(weights, change, out=weights)), seconds(call))
                for _ in range(repeats)
            ]
            exchange.close()
        plain = statistics.median(t for t, _ in times)
        own = statistics.median(t for _, t in times)
        print(f"| {name} | {own * 1e3:.1f} | {own / plain:.2f} |")
    print()


def one_exchange(exchange: Exchange, weights: FloatArray, change: FloatArray) -> Callable[[], None]:
    """What a rule does with a gradient, or with the weights after a window."""
    if isinstance(exchange, GradientExchange):
        np.copyto(exchange.buffer, change)
        return lambda: exchange.take_step([(lambda out: None, 1)], lambda buffer: None) and None
    if isinstance(exchange, OptimizerExchange):
        exchange.start(weights)
        np.copyto(exchange.buffer, change)
        return lambda: exchange.step(weights, 1, 1e-6) and None
    assert isinstance(exchange, WeightsExchange)
    exchange.start(weights)
    return lambda: exchange.after_window(weights, 1, 1.0, 0.1) and None


def print_codecs(size: int, repeats: int) -> None:
    values = np.random.default_rng(0).standard_normal(size, np.float32)
    out = np.empty_like(values)
    print("| codec | bytes / float32 | encode GB/s | decode GB/s | compressor GB/s |")
    print("|---|---|---|---|---|")
    for name in codec_names():
        codec = make_codec(name)
        compressor = codec.compressor(size, seed=0)
        payload = codec.encode(values)
        codec.decode(payload, out)
        compressor.encode(values)
        calls = (
            lambda: codec.encode(values),  # noqa: B023
            lambda: codec.decode(payload, out),  # noqa: B023
            lambda: compressor.encode(values),  # noqa: B023
        )
        rates = [
            4 * size / 1e9 / statistics.median(seconds(call) for _ in range(repeats))  # type: ignore[arg-type]
            for call in calls
        ]
        share = payload.size / (4 * size)
        print(f"| {name} | {share:.4f} | " + " | ".join(f"{rate:.2f}" for rate in rates) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args()
    size = options.megabytes * 1_000_000 // 4
    print_rules(size, options.repeats, options.threads)
    print_exchanges(size, options.repeats)
    print_codecs(size, options.repeats)


if __name__ == "__main__":
    main()
