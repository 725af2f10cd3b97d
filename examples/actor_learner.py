"""Actors, a replay buffer and a learner: deep Q-learning of a pole on a cart, in NumPy alone.

The actors push carts about with the learner's latest network and put what happened into the replay
buffer; the learner draws from it. The same program runs on threads, on processes of this machine
and as tasks of Spark::

    python examples/actor_learner.py threads      # or processes, or spark

References:
    Barto, Sutton and Anderson, Neuronlike Adaptive Elements That Can Solve Difficult Learning
    Control Problems, 1983 (the cart and its pole). van Hasselt, Guez and Silver, Deep Reinforcement
    Learning with Double Q-learning, 2016.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkdl.program import CourierNode, Program, PyNode, ReplayNode, launch, stop, stop_event

Array = np.ndarray[Any, Any]
Parameters = list[Array]

MAX_STEPS = 200
TARGET = 180.0
"""Mean number of steps, of 200 at most, for which the greedy policy shall keep the pole up."""
DISCOUNT = 0.99
UNITS = 64


class Carts:
    """Carts with a pole each, all pushed at the same time.

    Args:
        count: How many.
        seed: Of the states in which they begin.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.states = self._fresh(count)
        """Position (m), speed (m/s), angle (rad) and angular speed (rad/s) of each: (count, 4)."""
        self.steps = np.zeros(count, np.int64)

    def _fresh(self, count: int) -> Array:
        return self._random.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def push(self, right: Array) -> tuple[Array, Array]:
        """Pushes all carts for 0.02 s; those whose pole falls or whose time is over begin again.

        Args:
            right: Whether each is pushed to the right, (count,).

        Returns:
            The states after the push, (count, 4), and whether each pole has fallen, (count,).
        """
        _, speed, angle, turning = self.states.T
        force = np.where(right, 10.0, -10.0)
        sine, cosine = np.sin(angle), np.cos(angle)
        push = (force + 0.05 * turning**2 * sine) / 1.1
        falling = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3.0 - 0.1 * cosine**2 / 1.1))
        gain = push - 0.05 * falling * cosine / 1.1
        change = np.stack([speed, gain, turning, falling], axis=1)
        after = (self.states + 0.02 * change).astype(np.float32)
        fallen = (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > np.radians(12.0))
        self.steps += 1
        ended = fallen | (self.steps >= MAX_STEPS)
        self.states = np.where(ended[:, None], self._fresh(len(after)), after)
        self.steps[ended] = 0
        return after, fallen


def make_parameters(seed: int) -> Parameters:
    """Weights and biases of a network 4 -> 64 -> 64 -> 2."""
    random = np.random.default_rng(seed)
    sizes = [(4, UNITS), (UNITS, UNITS), (UNITS, 2)]
    made: Parameters = []
    for inputs, outputs in sizes:
        made.append(random.standard_normal((inputs, outputs)) * (2 / inputs) ** 0.5)
        made.append(np.zeros(outputs))
    return [p.astype(np.float32) for p in made]


def values(parameters: Parameters, states: Array) -> tuple[Array, list[Array]]:
    """What is expected of a push to the left and to the right, (count, 2); and the layers."""
    layers = [states * np.array([0.5, 0.5, 5.0, 0.5], np.float32)]
    for index in (0, 2):
        layers.append(np.maximum(layers[-1] @ parameters[index] + parameters[index + 1], 0.0))
    return layers[-1] @ parameters[4] + parameters[5], layers


def gradient(parameters: Parameters, layers: list[Array], error: Array) -> Parameters:
    """Of the squared error, whose derivative by the network's values is ``error``: (count, 2)."""
    found: Parameters = []
    for index in (4, 2, 0):
        layer = layers[index // 2]
        found[:0] = [layer.T @ error, error.sum(0)]
        error = (error @ parameters[index].T) * (layer > 0)
    return found


@dataclass(frozen=True)
class CurvePoint:
    """What the learner has reached.

    Args:
        updates: Of the network so far.
        seconds: Since it began.
        mean_return: Steps for which the greedy policy kept 20 poles up, on average.
    """

    updates: int
    seconds: float
    mean_return: float


def evaluate(parameters: Parameters, count: int = 20) -> float:
    """Steps for which the greedy policy keeps poles up, on average."""
    carts, alive, total = Carts(count, seed=1), np.ones(count, bool), 0
    for _ in range(MAX_STEPS):
        total += int(alive.sum())
        guessed, _ = values(parameters, carts.states)
        _, fallen = carts.push(guessed[:, 1] > guessed[:, 0])
        alive &= ~fallen
    return total / count


class DoubleQLearner:
    """Learns from what it draws, tells actors its network, and ends the program at the target.

    Args:
        replay: The buffer.
        max_updates: It ends after so many, whatever it has reached.
        seed: Of the first network.
    """

    def __init__(self, replay: Any, max_updates: int = 20_000, seed: int = 0) -> None:
        self._replay, self._max_updates = replay, max_updates
        self._parameters = make_parameters(seed)

    def parameters(self) -> Parameters:
        """The latest network."""
        return self._parameters

    def run(self) -> list[CurvePoint]:
        """Learns; returns its curve."""
        begun, curve = time.monotonic(), [CurvePoint(0, 0.0, evaluate(self._parameters))]
        delayed = self._parameters
        means = [np.zeros_like(p) for p in delayed]
        squares = [np.zeros_like(p) for p in delayed]
        upcoming = self._replay.futures.sample(4)
        for update in range(1, self._max_updates + 1):
            batch, upcoming = upcoming.result(60), self._replay.futures.sample(4)
            states, right, after, fallen = (
                np.concatenate(parts) for parts in zip(*batch.items, strict=True)
            )
            chosen = values(self._parameters, after)[0].argmax(1)
            rows = np.arange(len(states))
            expected = values(delayed, after)[0][rows, chosen]
            wanted = 1.0 + DISCOUNT * np.where(fallen, 0.0, expected)
            guessed, layers = values(self._parameters, states)
            error = np.zeros_like(guessed)
            error[rows, right] = np.clip(guessed[rows, right] - wanted, -1.0, 1.0) / len(rows)
            slopes = gradient(self._parameters, layers, error)
            parameters = []
            for index, slope in enumerate(slopes):  # Adam
                means[index] = 0.9 * means[index] + 0.1 * slope
                squares[index] = 0.999 * squares[index] + 0.001 * slope**2
                mean = means[index] / (1 - 0.9**update)
                square = squares[index] / (1 - 0.999**update)
                change = 0.001 * mean / (np.sqrt(square) + 1e-8)
                parameters.append((self._parameters[index] - change).astype(np.float32))
            self._parameters = parameters
            delayed = [0.99 * d + 0.01 * p for d, p in zip(delayed, parameters, strict=True)]
            if update % 200 == 0:
                reached = evaluate(parameters)
                curve.append(CurvePoint(update, time.monotonic() - begun, reached))
                if reached >= TARGET:
                    break
        stop()
        return curve


def act(learner: Any, replay: Any, number: int, count: int) -> None:
    """Pushes carts until the program stops.

    Args:
        learner: Has the network.
        replay: Takes what happened.
        number: This actor's, from 0; each has another share of pushes by chance.
        count: Actors.
    """
    random = np.random.default_rng(1000 + number)
    carts = Carts(8, seed=2000 + number)
    chance = 0.4 ** (1.0 + 3.0 * number / max(1, count - 1))
    while not stop_event().is_set():
        parameters = learner.parameters()
        seen: list[tuple[Array, ...]] = []
        for _ in range(4):
            states = carts.states
            guessed, _ = values(parameters, states)
            right = guessed.argmax(1)
            by_chance = random.random(len(right)) < chance
            right = np.where(by_chance, random.integers(0, 2, len(right)), right)
            after, fallen = carts.push(right == 1)
            seen.append((states, right, after, fallen))
        replay.insert(tuple(np.concatenate(parts) for parts in zip(*seen, strict=True)))


def build(num_actors: int = 4, max_updates: int = 20_000) -> Program:
    """The program: one replay buffer, one learner, and the actors.

    Args:
        num_actors: How many.
        max_updates: The learner's last one.
    """
    program = Program("actor-learner")
    with program.group("replay"):
        replay = program.add_node(ReplayNode(2000, min_size=30, samples_per_insert=8.0))
    with program.group("learner"):
        learner = program.add_node(CourierNode(DoubleQLearner, replay, max_updates))
    with program.group("actor"):
        for number in range(num_actors):
            program.add_node(PyNode(act, learner, replay, number, num_actors))
    return program


def main(launch_type: Any) -> int:
    """Runs it and prints the curve; 1 if the target was not reached."""
    if launch_type == "spark":
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        from pyspark.sql import SparkSession

        master = os.environ.get("SPARK_MASTER", "local[6]")
        SparkSession.builder.master(master).config("spark.ui.enabled", "false").getOrCreate()
    with launch(build(), launch_type) as launched:
        (curve,) = launched.results("learner", timeout_s=300)
    for point in curve:
        print(f"{point.updates:6d} updates {point.seconds:6.1f} s {point.mean_return:6.1f} steps")
    return 0 if curve[-1].mean_return >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "threads"))
