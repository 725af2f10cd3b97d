"""A case: a few choices, of which a model, its compile settings, its rows and its fits are made."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import keras
import numpy as np
from keras import layers
from keras.src.backend.common import global_state
from own_parts import CALLBACKS, OwnMean, OwnMetrics, OwnStep, OwnSum, OwnTrain, Subclassed
from parts import (
    BLOCKS,
    CLASSES,
    FEATURES,
    HEADS,
    INPUTS,
    LENGTH,
    OPTIMIZERS,
    OPTIONS,
    SCHEDULES,
    VOCABULARY,
    Head,
)

OWN_FORMS = {
    "own step": OwnStep,
    "own mean": OwnMean,
    "own sum": OwnSum,
    "own metrics": OwnMetrics,
    "own train": OwnTrain,
}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, repr=False)
class Case:
    """What is trained, on what, and how. Its text is the line that makes it again.

    Args:
        inputs: Names of inputs, of ``parts.INPUTS``; several are joined after their blocks.
        blocks: Names of layers, of ``parts.BLOCKS``, in order; each goes to the first input that
            can take it, and after the join to the whole.
        form: ``'functional'``, ``'named'`` (with dicts of inputs and outputs), ``'sequential'``,
            ``'subclassed'``, or one of ``OWN_FORMS``.
        heads: ``'<head>:<loss>'`` for each output; ``'<head>:none'`` has no loss and no labels.
        reduction: Of the losses; empty for Keras' default.
        weights: Which there are: ``'rows'``, ``'positions'``, ``'classes'``, ``'losses'``.
        metrics: Names of metrics of the heads; those that a head does not have are left out.
        weighted: Whether they are compiled as ``weighted_metrics``.
        optimizer: Name of an optimizer, of ``parts.OPTIMIZERS``.
        options: Names of its options, of ``parts.OPTIONS``.
        schedule: Of its learning rate, of ``parts.SCHEDULES``.
        policy: Dtype policy of the layers; empty for float32. ``'global '`` in front sets it for
            the process while the model is made and compiled.
        callbacks: Names of callbacks, of ``parts.CALLBACKS``.
        fits: What is done: ``'fit'`` (two epochs), ``'on'`` (one more, by ``initial_epoch``),
            ``'again'`` (a second fit of one epoch), ``'save'`` (saved and loaded).
        sizes: Rows of each worker.
        held_out: Rows to validate on, of all workers together.
        split: Whether they are the last of the rows, given as ``validation_split``.
        batch: Rows of a batch.
        shuffle: Whether each epoch has an order of its own.
        steps: ``steps_per_execution`` that the model is compiled with.
        eager: Whether the model is compiled to run eagerly.
        segments: Into which sparkdl's model is cut, where it can be; Keras has it whole. 0: none.
        servers: That hold the weights, in the modes with a server.
        seed: Of weights and rows.
    """

    inputs: tuple[str, ...] = ("vector",)
    blocks: tuple[str, ...] = ("dense",)
    form: str = "functional"
    heads: tuple[str, ...] = ("numbers:mse",)
    reduction: str = ""
    weights: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    weighted: bool = False
    optimizer: str = "sgd"
    options: tuple[str, ...] = ()
    schedule: str = ""
    policy: str = ""
    callbacks: tuple[str, ...] = ()
    fits: tuple[str, ...] = ("fit",)
    sizes: tuple[int, ...] = (20,)
    held_out: int = 0
    split: bool = False
    batch: int = 4
    shuffle: bool = False
    steps: int = 1
    eager: bool = False
    segments: int = 0
    servers: int = 1
    seed: int = 0

    def __repr__(self) -> str:
        chosen = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        )
        return f"Case({', '.join(chosen)})"

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of sparkdl that are to do as one process does.

        In ``'asynchronous'`` a worker does not wait for the driver's callbacks.
        """
        exact = ("synchronous", "allreduce")
        alone = len(self.sizes) == 1 and not self.callbacks
        return (*exact, "asynchronous") if alone else exact

    @property
    def held_out_sizes(self) -> tuple[int, ...]:
        """Rows to validate on of each worker."""
        even = self.held_out // len(self.sizes)
        return (*[even] * (len(self.sizes) - 1), self.held_out - even * (len(self.sizes) - 1))

    @property
    def fixed(self) -> bool:
        """Whether the model takes batches of one size only."""
        return "stateful" in self.blocks

    @property
    def loss_depends_on_batches(self) -> bool:
        """Whether the loss of rows is another one in other batches: it is no mean over rows."""
        takes = {name.split()[0] for name in self.inputs}
        heads = any("ignored" in head for head in self.heads)
        return bool(self.reduction or heads or "masking" in self.blocks or "masked" in takes)

    @cached_property
    def parts_of_heads(self) -> list[tuple[Head, str]]:
        """The heads, and the names of their losses."""
        named = (text.split(":") for text in self.heads)
        return [(HEADS[head], loss) for head, loss in named]

    def output_names(self) -> list[str]:
        return [f"out{i}" for i in range(len(self.heads))]


# -- models ----------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    """The compiled model; equal weights at each call."""
    keras.utils.set_random_seed(1000 + case.seed)
    global_state.set_global_attribute("object_name_uids", None)  # names begin with dense again
    before = keras.config.dtype_policy()
    name = case.policy.removeprefix("global ")
    keras.config.set_dtype_policy(name or "float32")
    try:
        make = _listed if case.form in ("sequential", "subclassed") else _functional
        with_layers = make(case)
        if not case.policy.startswith("global "):
            keras.config.set_dtype_policy(before)
        model = with_layers()
        _compile(model, case)
    finally:
        keras.config.set_dtype_policy(before)
    return model


def _functional(case: Case) -> Callable[[], Any]:
    """Makes the layers; what is returned makes the model of them."""
    inputs: list[Any] = []
    tensors: list[tuple[Any, str]] = []
    for name in case.inputs:
        shape, dtype, kind = INPUTS[name]
        given = keras.Input(
            shape, batch_size=case.batch if case.fixed else None, dtype=dtype,
            name=f"in_{name.replace(' ', '_')}",
        )  # fmt: skip
        inputs.append(given)
        tensor = given
        if "tokens" in name:
            tensor = layers.Embedding(VOCABULARY, 4, mask_zero=name.startswith("masked"))(given)
        elif name == "bytes":
            tensor = layers.Rescaling(0.25)(given)
        tensors.append((tensor, kind))
    for name in case.blocks:
        block = BLOCKS[name]
        if block.takes == "features":
            place = case.inputs.index("vector")
        else:
            place = next((i for i, (_, k) in enumerate(tensors) if k in block.takes.split()), -1)
        assert place >= 0, f"no tensor for {name!r}"
        tensor, kind = tensors[place]
        tensors[place] = block.make()(tensor), block.gives or kind
    wanted = {head.takes for head, _ in case.parts_of_heads}
    assert len(wanted) == 1
    joined = [_as_kind(tensor, kind, *wanted) for tensor, kind in tensors]
    whole = joined[0] if len(joined) == 1 else layers.Concatenate()(joined)
    outputs = [
        layers.Dense(head.units, activation=head.activation, name=name)(whole)
        for name, (head, _) in zip(case.output_names(), case.parts_of_heads, strict=True)
    ]
    kind = OWN_FORMS.get(case.form, keras.Model)
    if case.form == "named":
        by_name = dict(zip(case.output_names(), outputs, strict=True))
        return lambda: keras.Model({tensor.name: tensor for tensor in inputs}, by_name)
    given = inputs[0] if len(inputs) == 1 else inputs
    return lambda: kind(given, outputs[0] if len(outputs) == 1 else outputs)


def _as_kind(tensor: Any, kind: str, wanted: str) -> Any:
    if kind == wanted:
        return tensor
    assert wanted == "vector", f"{kind} cannot be {wanted}"
    pooling = layers.GlobalAveragePooling2D if kind == "image" else layers.GlobalAveragePooling1D
    return pooling()(tensor)


def _listed(case: Case) -> Callable[[], Any]:
    """Makes the layers; what is returned makes the model of them."""
    (name,) = case.inputs
    shape, dtype, kind = INPUTS[name]
    stack: list[Any] = []
    if "tokens" in name:
        stack.append(layers.Embedding(VOCABULARY, 4, mask_zero=name.startswith("masked")))
    elif name == "bytes":
        stack.append(layers.Rescaling(0.25))
    for block in (BLOCKS[b] for b in case.blocks):
        assert block.simple
        stack.append(block.make())
        kind = block.gives or kind
    (head, _) = case.parts_of_heads[0]
    if kind != head.takes:
        pooling = (
            layers.GlobalAveragePooling2D if kind == "image" else layers.GlobalAveragePooling1D
        )
        stack.append(pooling())
    stack.append(layers.Dense(head.units, activation=head.activation))
    if case.form == "sequential":
        return lambda: keras.Sequential([keras.Input(shape, dtype=dtype), *stack])

    def subclassed() -> Any:
        model = Subclassed(stack)
        model(np.zeros((1, *shape), dtype))
        return model

    return subclassed


def _compile(model: Any, case: Case) -> None:
    options: dict[str, Any] = {}
    for name in case.options:
        options |= OPTIONS[name]
    rate = SCHEDULES[case.schedule](0.05)
    optimizer = OPTIMIZERS[case.optimizer](rate, options)
    if "exclusion" in case.options:
        optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "scale"])
    more = {"reduction": case.reduction} if case.reduction else {}
    losses = [
        None if loss == "none" else head.loss[loss](more) for head, loss in case.parts_of_heads
    ]
    metrics = [
        [head.metrics[m]() for m in case.metrics if m in head.metrics]
        for head, _ in case.parts_of_heads
    ]
    several = len(losses) > 1 or case.form == "named"
    names = case.output_names()
    settings: dict[str, Any] = {"loss": losses[0]}
    if None in losses and case.form != "named":
        settings["loss"] = losses
    elif several:
        by_output = zip(names, losses, strict=True)
        settings["loss"] = {name: loss for name, loss in by_output if loss is not None}
    if any(metrics):
        settings["weighted_metrics" if case.weighted else "metrics"] = (
            dict(zip(names, metrics, strict=True)) if several else metrics[0]
        )
    if "losses" in case.weights:
        settings["loss_weights"] = [0.7]
        if isinstance(settings["loss"], dict):
            weights = zip(settings["loss"], (0.7, 2.0), strict=False)
            settings["loss_weights"] = dict(weights)
        elif several:
            settings["loss_weights"] = [0.7, 2.0]
    if case.steps > 1:
        settings["steps_per_execution"] = case.steps
    model.compile(optimizer, run_eagerly=case.eager, **settings)


# -- rows ------------------------------------------------------------------------------------------


def rows(case: Case, count: int, salt: int = 0) -> tuple[Arrays, Arrays, Arrays]:
    """Rows by input, by output, and their weights by output (empty without)."""
    rng = np.random.default_rng([case.seed, salt])
    x: Arrays = {}
    for name in case.inputs:
        shape, dtype, _ = INPUTS[name]
        if dtype == "uint8":
            x[name] = rng.integers(0, 4, (count, *shape)).astype("uint8")
        elif dtype == "int32":
            length = rng.integers(1, LENGTH + 1, (count, 1))
            real = np.arange(LENGTH) < length
            x[name] = (rng.integers(1, VOCABULARY, (count, LENGTH)) * real).astype("int32")
        else:
            values = rng.normal(0, 0.7, (count, *shape))
            if name == "sequence":  # some end in steps that Masking leaves out
                values *= np.arange(LENGTH)[None, :, None] < rng.integers(
                    2, LENGTH + 1, (count, 1, 1)
                )
            x[name] = values.astype("float32")
    y = {
        name: _labels(rng, head.labels, count)
        for name, (head, loss) in zip(case.output_names(), case.parts_of_heads, strict=True)
        if loss != "none"
    }
    w: Arrays = {}
    if "rows" in case.weights:
        w = {name: rng.uniform(0, 2, count).astype("float32") for name in y}
    elif "positions" in case.weights:
        w = {name: rng.integers(0, 3, (count, LENGTH)).astype("float32") for name in y}
    return x, y, w


def _labels(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    if kind == "numbers":
        return rng.normal(0, 1, (count, 2)).astype("float32")
    if kind == "number sequences":
        return rng.normal(0, 1, (count, LENGTH, 2)).astype("float32")
    if kind == "shares":
        shares: np.ndarray = rng.dirichlet(np.ones(3), count).astype("float32")
        return shares
    if kind == "flat numbers":
        return rng.normal(0, 1, count).astype("float32")
    if kind == "flat bits":
        return rng.integers(0, 2, count).astype("int64")
    if kind == "signs":
        return (2 * rng.integers(0, 2, (count, 1)) - 1).astype("float32")
    if kind == "bits":
        return rng.integers(0, 2, (count, 1)).astype("float32")
    if kind == "several bits":
        return rng.integers(0, 2, (count, 2)).astype("float32")
    if kind == "one-hot":
        return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, count)]
    shape = (count, LENGTH) if "positions" in kind else (count,)
    lowest = -1 if "ignored" in kind else 0
    classes: np.ndarray = rng.integers(lowest, CLASSES, shape).astype("int32")
    return classes


def cut(sizes: tuple[int, ...]) -> list[slice]:
    """The rows of each worker: consecutive ones."""
    edges = [0, *itertools.accumulate(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def callbacks_of(case: Case) -> list[Any]:
    return [CALLBACKS[name]() for name in case.callbacks]


def class_weight(case: Case) -> dict[int, float] | None:
    return {0: 0.5, 1: 2.0, 2: 1.25} if "classes" in case.weights else None


assert FEATURES
