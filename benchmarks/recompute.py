"""Memory and time of a deep network whose segments are computed again in the backward pass.

36 residual blocks (two products, GELU, layer normalization), in six segments. Beside: the same
network with all activations kept, in a ``keras.RematScope``, and written by hand in the framework
with ``jax.checkpoint`` or ``torch.utils.checkpoint``. Each contender is a process of its own; steps
of all contenders of a backend alternate. Memory is what the largest resident size of the process
grows by in its first step of gradients, less what a step of one row grows it by; for JAX also the
temporary bytes that the compiler tells. On TensorFlow layers of a ``keras.RematScope`` cannot be
trained in a graph (Keras 3.15 hands keywords to ``tf.recompute_grad``).

    python benchmarks/recompute.py [--backends jax torch tensorflow] [--rows 1024] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import workload
from all_reduce import Contender

BLOCKS, SEGMENTS, WIDTH, INSIDE = 36, 6, 256, 1024


def resident() -> int:
    """The largest resident bytes so far, since it was last cleared."""
    with open("/proc/self/status", encoding="ascii") as status:
        [line] = [line for line in status if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def clear_resident() -> int:
    """Forgets the largest size so far; returns the size of now."""
    with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
        clear.write("5")
    return resident()


def be_contender(pipe: Any, backend: str, kind: str, rows: int) -> None:
    """Sends the bytes of a step, then seconds when told to."""
    os.environ["KERAS_BACKEND"] = backend
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, WIDTH)).astype(np.float32)
    by_hand = {"jax": jax_step, "torch": torch_step}
    step, told = (by_hand[backend] if kind in HAND else keras_step)(kind, x)
    few, _ = (step, told) if told else (step, 0)
    few(1)
    before = clear_resident()
    few(rows)
    pipe.send((resident() - before, told, float(step(rows))))
    while pipe.recv():
        start = time.perf_counter()
        step(rows)
        pipe.send(time.perf_counter() - start)


HAND = ("by hand, all kept", "by hand, six segments")
KINDS = ("all kept", "keras.RematScope", "recompute_segments", *HAND)

Step = Callable[[int], float]


def keras_step(kind: str, x: np.ndarray) -> tuple[Step, int]:
    """One step of Keras' own training, on the first rows."""
    import contextlib

    import keras
    from keras import layers

    from sparkdl.layers import recompute_segments

    keras.utils.set_random_seed(1)
    scope = keras.RematScope(mode="full") if "Remat" in kind else contextlib.nullcontext()
    with scope:
        given = keras.Input((WIDTH,))
        value = given
        for _ in range(BLOCKS):
            inner = layers.Dense(INSIDE, activation="gelu")(value)
            inner = layers.Dense(WIDTH)(inner)
            value = layers.LayerNormalization()(layers.Add()([value, inner]))
        model = keras.Model(given, value)
    if kind == "recompute_segments":
        model = recompute_segments(model, SEGMENTS)
    model.compile(keras.optimizers.SGD(1e-3), "mse")

    def step(rows: int) -> float:
        return float(model.train_on_batch(x[:rows], x[:rows]))

    if keras.backend.backend() != "jax":
        return step, 0
    import jax

    trained = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]

    def loss(trained: Any, x: Any) -> Any:
        outputs, _ = model.stateless_call(trained, state, x, training=True)
        return ((outputs - x) ** 2).mean()

    compiled = jax.jit(jax.value_and_grad(loss)).lower(trained, x).compile()
    return step, int(compiled.memory_analysis().temp_size_in_bytes)


def jax_step(kind: str, x: np.ndarray) -> tuple[Step, int]:
    """The same network in JAX alone."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(1)

    def dense(one: int, other: int) -> Any:
        limit = np.sqrt(6 / (one + other))
        return jnp.asarray(rng.uniform(-limit, limit, (one, other)), jnp.float32)

    weights = [
        (dense(WIDTH, INSIDE), jnp.zeros(INSIDE), dense(INSIDE, WIDTH), jnp.zeros(WIDTH),
         jnp.ones(WIDTH), jnp.zeros(WIDTH))
        for _ in range(BLOCKS)
    ]  # fmt: skip

    def blocks(weights: Any, value: Any) -> Any:
        for w1, b1, w2, b2, scale, offset in weights:
            value = value + jax.nn.gelu(value @ w1 + b1, approximate=False) @ w2 + b2
            centered = value - value.mean(-1, keepdims=True)
            deviation = jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-3)
            value = centered / deviation * scale + offset
        return value

    again = jax.checkpoint(blocks) if "segments" in kind else blocks
    length = BLOCKS // SEGMENTS

    def loss(weights: Any, x: Any) -> Any:
        value = x
        for first in range(0, BLOCKS, length):
            value = again(weights[first : first + length], value)
        return ((value - x) ** 2).mean()

    def train(weights: Any, x: Any) -> Any:
        found, gradients = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, gradients), found

    trained = jax.jit(train, donate_argnums=0)

    def step(rows: int) -> float:
        nonlocal weights
        weights, found = trained(weights, x[:rows])
        return float(found)

    compiled = jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile()
    return step, int(compiled.memory_analysis().temp_size_in_bytes)


def torch_step(kind: str, x: np.ndarray) -> tuple[Step, int]:
    """The same network in PyTorch alone."""
    import torch
    from torch.utils.checkpoint import checkpoint_sequential

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(WIDTH, INSIDE)
            self.outer = torch.nn.Linear(INSIDE, WIDTH)
            self.norm = torch.nn.LayerNorm(WIDTH, eps=1e-3)

        def forward(self, value: Any) -> Any:
            inner = torch.nn.functional.gelu(self.inner(value))
            return self.norm(value + self.outer(inner))

    torch.manual_seed(1)
    network = torch.nn.Sequential(*[Block() for _ in range(BLOCKS)])
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)

    def step(rows: int) -> float:
        given = torch.from_numpy(x[:rows])
        optimizer.zero_grad()
        if "segments" in kind:
            value = checkpoint_sequential(network, SEGMENTS, given, use_reentrant=False)
        else:
            value = network(given)
        loss = ((value - given) ** 2).mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, 0


def compare(backend: str, rows: int, rounds: int) -> list[list[str]]:
    """The lines of a backend."""
    kinds = KINDS if backend != "tensorflow" else ("all kept", "recompute_segments")
    groups, grown, told = {}, {}, {}
    for kind in kinds:  # one after the other: memory is measured first
        groups[kind] = Contender(kind, [(be_contender, (backend, kind, rows))])
        grown[kind], told[kind], _ = groups[kind].pipes[0].recv()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, group in groups.items():
            group.pipes[0].send(True)
            times[kind].append(group.pipes[0].recv())
    for group in groups.values():
        group.pipes[0].send(False)
        group.processes[0].join()
    base = statistics.median(times["all kept"])
    lines = []
    for kind in kinds:
        kept = HAND[0] if kind in HAND else "all kept"
        saved = grown[kept] - grown[kind]
        by_compiler = f"{told[kind] / 1e6:,.0f}" if told[kind] else "–"
        seconds = statistics.median(times[kind])
        lines.append([backend, kind, f"{grown[kind] / 1e6:,.0f}", by_compiler,
                      f"{saved / 1e6:,.0f}", f"{seconds / base:.2f}"])  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["jax", "torch", "tensorflow"])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lines = []
    for backend in options.backends:
        lines += compare(backend, options.rows, options.rounds)
    header = ["backend", "network", "MB of a step", "told by XLA", "MB saved", "seconds / all kept"]
    print(workload.table(header, lines))


if __name__ == "__main__":
    main()
