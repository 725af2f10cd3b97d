"""Draws cases from the product of what Keras offers, and says which are left out, and why."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import keras
from case import OWN_FORMS, Case
from hypothesis import strategies as st
from own_parts import CALLBACKS
from parts import BLOCKS, HEADS, INPUTS, OPTIMIZERS, SCHEDULES

BATCH = [name for name, block in BLOCKS.items() if block.by == "batch"]
RANDOM = [name for name, block in BLOCKS.items() if block.by == "random"]
POLICIES = ("mixed_float16", "mixed_bfloat16", "float64", "global mixed_float16")
MORE_FITS = (("fit", "on"), ("fit", "again"), ("fit", "save", "on"), ("fit", "save", "again"))


def _several(case: Case) -> bool:
    return len(case.sizes) > 1


BY_DESIGN: dict[str, Callable[[Case], bool]] = {
    "statistics of a batch are a worker's": lambda c: _several(c) and _uses(c, BATCH),
    "each worker draws its own random numbers": lambda c: _several(c) and _uses(c, RANDOM),
    "a Dropout without a seed draws from PyTorch's own generator": lambda c: (
        keras.backend.backend() == "torch" and _uses(c, ["dropout"])
    ),
    "losses of a whole batch compare its rows with each other": lambda c: (
        _several(c) and any(h.split(":")[1] in ("dice", "tversky") for h in c.heads)
    ),
    "Lion takes the sign of what is left where rows cancel each other": lambda c: (
        _several(c)
        and c.optimizer == "lion"
        and any(kind in h for h in c.heads for kind in ("mae", "mape", "huber", "hinge"))
    ),
    "states of stateful layers are of one worker": lambda c: _several(c) and _uses(c, ["stateful"]),
}
"""What is another by design, each with a line in docs/keras.md; a case that meets
one is not drawn."""


def _uses(case: Case, names: list[str]) -> bool:
    return not {*names}.isdisjoint(case.blocks)


def _sequences(case: Case) -> bool:
    return any(HEADS[h.split(":")[0]].takes == "sequence" for h in case.heads)


def met(case: Case, table: dict[str, Callable[[Case], bool]]) -> list[str]:
    """Names of the entries that a case meets."""
    return [name for name, meets in table.items() if meets(case)]


def drawn(case: Case) -> bool:
    return not met(case, BY_DESIGN)


def cases() -> st.SearchStrategy[Case]:
    """Cases that Keras itself can train."""
    return _cases().filter(drawn)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    # One number for all choices: hypothesis would else draw most cases as variants of those before.
    rng = draw(st.randoms(use_true_random=True))

    def one(*values: Any) -> Any:
        return rng.choice(values)

    def rarely(value: Any, otherwise: Any, part: int = 4) -> Any:
        return value if rng.randrange(part) == 0 else otherwise

    takes = one("vector", "vector", "vector", "sequence")
    many = takes == "vector" and rarely(True, False)
    names = [n for n, (_, _, kind) in INPUTS.items() if takes == "vector" or kind == takes]
    count = 2 if many else 1
    inputs = tuple(rng.sample(names, count))
    form = "functional" if many else one("functional", "functional", "sequential", "subclassed")
    if form == "subclassed" and INPUTS[inputs[0]][1] != "float32":
        form = "sequential"  # a subclassed model has inputs of float32
    blocks = _blocks(rng, inputs, takes, simple=form in ("sequential", "subclassed"))
    if "stateful" in blocks and (many or blocks.count("stateful") > 1):
        blocks = tuple("gru" if block == "stateful" else block for block in blocks)
    heads = _heads(rng, takes, 2 if form == "functional" and rarely(True, False) else 1)
    if form == "functional":
        own = (
            one(*(form for form in OWN_FORMS if form != "own sum")) if len(heads) == 1 else "named"
        )
        form = rarely(own, rarely("named", form, 8), 6)
    reduction = rarely(one("sum", "mean_with_sample_weight"), "")
    if form == "own mean":
        reduction = "sum"
    metrics = _metrics(rng, heads)
    if len(heads) == 2 and not metrics and rarely(True, False, 2):
        heads = (heads[0], heads[1].split(":")[0] + ":none")
    workers = one(1, 2)
    options = _options(rng)
    optimizer = one(*OPTIMIZERS)
    if optimizer == "adafactor":
        options = tuple(o for o in options if "clip" not in o)
    policy = rarely(one(*POLICIES), "", 6)
    if optimizer == "muon" and "16" in policy:  # divides gradients by their norm: also what is
        optimizer = "adam"  # nothing but rounding
    if "16" in policy:
        metrics = ()  # most have thresholds: what is rounded to the other side counts as another
    if optimizer == "multi":  # has no options and no learning rate of its own
        options = ()
    schedule = rarely(one(*SCHEDULES), "")
    has_rate = not schedule and optimizer != "multi"
    callbacks = _callbacks(rng, has_rate, options) if rarely(True, False, 3) else ()
    sizes = one((13,), (20,), (3,)) if workers == 1 else one((8, 8), (13, 7), (11, 0), (2, 17))
    batch, held_out = one(4, 4, 5), rarely(one(4, 9), 0, 2)
    if "stateful" in blocks:
        sizes, held_out = (4 * batch,), batch if held_out else 0
    return Case(
        inputs=inputs,
        blocks=blocks,
        form=form,
        heads=heads,
        reduction=reduction,
        weights=_weights(rng, form, heads, takes),
        metrics=metrics,
        weighted=one(False, False, True),
        optimizer=optimizer,
        options=options,
        schedule=schedule,
        policy=policy,
        callbacks=callbacks,
        fits=one(("fit",), one(*MORE_FITS)),
        sizes=sizes,
        held_out=held_out,
        split=bool(held_out) and rarely(True, False, 3),
        batch=batch,
        shuffle=one(False, True),
        steps=1 if keras.backend.backend() == "torch" else rarely(2, 1, 8),
        # What is compiled is the same code, and takes twice as long: a third of the cases.
        eager=one(True, True, False) and keras.backend.backend() != "jax",
        seed=rng.randrange(100),
        segments=one(0, 0, 0, 2),
        servers=one(1, 1, 1, 2, 3),
    )


def _blocks(rng: Random, inputs: tuple[str, ...], takes: str, *, simple: bool) -> tuple[str, ...]:
    kinds = [INPUTS[name][2] for name in inputs]
    found: list[str] = []
    if "vector" in inputs and not simple and rng.randrange(6) == 0:
        found.append("normalization")
    for _ in range(rng.randint(1, 3)):
        fitting = []
        for name, block in BLOCKS.items():
            place = next((i for i, k in enumerate(kinds) if k in block.takes.split()), -1)
            if place < 0 or (simple and not block.simple):
                continue
            if takes == "sequence" and block.gives not in ("", "sequence"):
                continue
            fitting.append((name, place))
        name, place = rng.choice(fitting)
        found.append(name)
        kinds[place] = BLOCKS[name].gives or kinds[place]
    return tuple(found)


def _heads(rng: Random, takes: str, count: int) -> tuple[str, ...]:
    fitting = [name for name, head in HEADS.items() if head.takes == takes]
    names = [rng.choice(fitting) for _ in range(count)]
    return tuple(f"{name}:{rng.choice([*HEADS[name].loss])}" for name in names)


def _weights(rng: Random, form: str, heads: tuple[str, ...], takes: str) -> tuple[str, ...]:
    kind = HEADS[heads[0].split(":")[0]].labels
    choices: list[tuple[str, ...]] = [(), (), ("rows",), ("losses",), ("rows", "losses")]
    if takes == "sequence":  # of which Keras weighs positions, and no rows
        choices = [(), ("losses",), ("positions",), ("positions", "losses")]
    if len(heads) == 1 and form != "named" and kind in ("classes", "one-hot", "bits"):
        choices += [("classes",), ("classes",)]  # Keras has none for labels by name
    return rng.choice(choices)


def _metrics(rng: Random, heads: tuple[str, ...]) -> tuple[str, ...]:
    known = sorted({m for head in heads for m in HEADS[head.split(":")[0]].metrics})
    if not known:
        return ()
    return tuple(sorted(rng.sample(known, min(len(known), rng.randrange(3)))))


def _options(rng: Random) -> tuple[str, ...]:
    if rng.random() < 0.5:
        return ()
    groups = [
        ("clipnorm", "clipvalue", "global clipnorm"), ("decay", "exclusion"),
        ("ema", "ema overwrite"), ("accumulation",), ("loss scale",),
    ]  # fmt: skip
    chosen = rng.sample(groups, rng.randint(1, 2))
    return tuple(sorted(rng.choice(group) for group in chosen))


def _callbacks(rng: Random, has_rate: bool, options: tuple[str, ...]) -> tuple[str, ...]:
    fitting = [*CALLBACKS]
    if not has_rate:
        fitting = [name for name in fitting if name not in ("rates", "plateau")]
    if not any("ema" in option for option in options):
        fitting.remove("swaps")
    return tuple(sorted(rng.sample(fitting, rng.randint(1, 2))))
