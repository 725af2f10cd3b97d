"""Cases that were once another than plain Keras, or of which a user asked: each with a sentence."""

from __future__ import annotations

from case import Case

EXAMPLES: dict[str, tuple[str, Case]] = {
    "second fit after loading": (
        "A fit after save and load has the row order of a second fit, not that of the first again.",
        Case(fits=("fit", "save", "again"), sizes=(13, 7), shuffle=True),
    ),
    "sum divided by the rows": (
        "A compute_loss that divides the sum of its loss by the rows took it as a sum.",
        Case(form="own mean", heads=("numbers:huber",), reduction="sum", sizes=(13, 7)),
    ),
    "sum divided by the rows, eagerly": (
        "The same where each step runs eagerly.",
        Case(form="own mean", reduction="sum", sizes=(13, 7), eager=True, weights=("rows",)),
    ),
    "weights of positions": (
        "A sample weight for each position of a sequence was refused.",
        Case(
            inputs=("sequence",),
            blocks=("conv1d",),
            heads=("sequences:mse",),
            weights=("positions",),
            sizes=(13, 7),
            held_out=4,
        ),
    ),
    "labels of a train_step": (
        "A train_step of the user's own got labels (n, 1) where Keras gives it (n,).",
        Case(form="own train", heads=("flat numbers:mse",), sizes=(13, 7)),
    ),
    "values of compute_metrics": (
        "What compute_metrics adds to the metrics was in no History, and what it leaves out was.",
        Case(form="own metrics", metrics=("mae", "rmse"), sizes=(13, 7), held_out=5),
    ),
    "several optimizers": (
        "A MultiOptimizer has no learning rate: the driver ended in an AttributeError.",
        Case(optimizer="multi", sizes=(13, 7), fits=("fit", "again")),
    ),
    "a worker without a batch counts every batch": (
        "In synchronous mode it evaluated, and began the next epoch, with a counter of its own.",
        Case(blocks=("counting",), sizes=(11, 0), held_out=9, batch=5, seed=31),
    ),
    "states of a layer": (
        "Keras lists the states of stateful layers among no variables: they did not travel.",
        Case(
            inputs=("sequence",),
            blocks=("stateful",),
            sizes=(16,),
            held_out=4,
            fits=("fit", "again"),
        ),
    ),
    "batches of one size, eagerly": (
        "Two rows were looked at of a model that takes batches of one size only.",
        Case(inputs=("sequence",), blocks=("stateful",), sizes=(16,), eager=True),
    ),
    "nadam in half precision": (
        "Keras lists one variable of Nadam in a LossScaleOptimizer nowhere: it did not travel.",
        Case(
            optimizer="nadam", policy="global mixed_float16", sizes=(13, 7), fits=("fit", "again")
        ),
    ),
    "last rows held out": (
        "validation_split took a random share of arrays, where Keras takes the last rows.",
        Case(sizes=(13,), held_out=4, split=True),
    ),
    "an output without a loss": (
        "A worker without rows let weight decay move a variable that has no gradient.",
        Case(
            heads=("numbers:mse", "classes:none"),
            options=("exclusion",),
            sizes=(11, 0),
            fits=("fit", "again"),
        ),
    ),
    "several optimizers and an output without a loss": (
        "A MultiOptimizer wants the variables without a gradient, too: training ended in an error.",
        Case(
            inputs=("sequence",),
            heads=("sequences:mse", "sequences:none"),
            optimizer="multi",
            sizes=(11, 4),
        ),
    ),
    "steps without a finite gradient": (
        "A schedule counted batches whose scaled loss had overflowed, which are no steps.",
        Case(
            inputs=("sequence",),
            blocks=("gru",),
            heads=("flat numbers:mse",),
            schedule="exponential",
            policy="global mixed_float16",
            sizes=(13,),
            seed=51,
        ),
    ),
    "a schedule and accumulated gradients": (
        "A schedule counts batches; asynchronous training asked for steps, and ended in an error.",
        Case(schedule="exponential", optimizer="adam", options=("accumulation",), sizes=(13,)),
    ),
    "argument of a loss": (
        "Keras writes no delta of Huber and no axis of CosineSimilarity into a configuration.",
        Case(heads=("numbers:huber",)),
    ),
    "segments with masks, metrics and frozen layers": (
        "A metric of a layer stood still, frozen layers thawed, a mask went that Keras keeps.",
        Case(
            inputs=("masked tokens",),
            blocks=("measuring", "frozen"),
            heads=("sequences:mse",),
            sizes=(13, 7),
            segments=2,
        ),
    ),
    "segments with states": (
        "Keras lists the states of stateful layers among no variables: a segment would lose them.",
        Case(
            inputs=("sequence",),
            blocks=("stateful", "conv1d"),
            sizes=(16,),
            fits=("fit", "again"),
            segments=2,
        ),
    ),
    "segments and what the optimizer was told": (
        "Variables excluded from weight decay, which no configuration has, were forgotten.",
        Case(
            inputs=("tokens",),
            blocks=("own loss", "average"),
            optimizer="lamb",
            options=("exclusion",),
            sizes=(11, 0),
            segments=2,
        ),
    ),
}
"""Name -> why it is here, and the case."""
