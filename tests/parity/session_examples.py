"""Sessions in which a call was once another than plain Keras: each with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from session import Call, call

BUILD: dict[str, Any] = {"form": "functional", "stack": (), "optimizer": "sgd"}
FIT = call("fit", mode="synchronous", sizes=(8, 8), fresh=True)
LOOKS = (FIT, call("evaluate", how="workers"), call("predict", how="frame"))


def _changed(what: str, **part: Any) -> list[Call]:
    """Looks at a model, changes the code that it refers to, and looks at it built again."""
    build = call("build", **{**BUILD, **part})
    return [build, *LOOKS, call("change", what=what, value=3.0), build, *LOOKS]


def _weights(first: bool) -> Iterator[Call]:
    for weighted in (first, not first, first):
        yield call("build", **BUILD, reduction="mean_with_sample_weight")
        yield call("fit", mode="synchronous", sizes=(8, 8), fresh=True, weighted=weighted)
        yield call("fit", mode="allreduce", sizes=(8, 8), fresh=True, weighted=weighted)


EXAMPLES: dict[str, tuple[str, list[Call]]] = {
    "a global of a loss": (
        "A worker trained with the value that the global had when the loss came first.",
        _changed("ALPHA", loss="by_global"),
    ),
    "a helper of a helper": (
        "The same where a function is defined anew that a function of the loss calls.",
        _changed("innermost", loss="by_helpers"),
    ),
    "an attribute of a class": (
        "The same where an attribute of a layer's class is set.",
        _changed("Scaled.factor", stack=("Scaled",)),
    ),
    "an attribute of a base class": (
        "The same where it is set in the class from which the layer's class is derived.",
        _changed("Scaled.factor", stack=("Derived",)),
    ),
    "a global of an activation, a Lambda and a metric": (
        "The same where these read it.",
        _changed("ALPHA", stack=("lambda",), activation="act", metrics=("own_metric",)),
    ),
    "a global of a model's compute_loss": (
        "The same where a method of the model reads it.",
        _changed("ALPHA", form="Weighing"),
    ),
    "a dict that is changed in place": (
        "The same where the global is the same object with another content.",
        _changed("TABLE", stack=("ByHelper",), loss="by_table"),
    ),
    "a method that is replaced": (
        "The same where a class gets another method.",
        _changed("method", stack=("ByGlobal",)),
    ),
    "a module that is edited and loaded again": (
        "The same in a module beside the notebook, which no worker has.",
        _changed("module", stack=("ByModule",), loss="by_module"),
    ),
    "a constant that is set in a module": (
        "The same where an attribute of such a module is set.",
        _changed("module constant", stack=("ByModule",), loss="by_module"),
    ),
    "weights after none": (
        "A kept learner had the terms of the loss that tracing had found without weights.",
        [*_weights(False)],
    ),
    "none after weights": (
        "And the other way round.",
        [*_weights(True)],
    ),
    "nothing to train": (
        "A model whose layers are all frozen ended in a framework's error within the job.",
        [
            call("build", **{**BUILD, "stack": ("dense",)}),
            call("freeze", number=1, trainable=False),
            call("freeze", number=2, trainable=False),
            *LOOKS,
            call("fit", mode="asynchronous", sizes=(12,)),
            call("freeze", number=2, trainable=True),
            *LOOKS,
        ],
    ),
    "quantized, and not compiled again": (
        "A worker had the optimizer's variables of before, and the job ended with them.",
        [
            call("build", **{**BUILD, "stack": ("dense",), "optimizer": "momentum"}),
            *LOOKS,
            call("quantize", compiles=False),
            *LOOKS,
        ],
    ),
    "another session of Spark": (
        "What the workers of the session before had kept is gone, and the driver goes on.",
        [
            call("build", **BUILD, loss="by_global"),
            *LOOKS,
            call("restart"),
            call("change", what="ALPHA", value=3.0),
            call("fit", mode="synchronous", sizes=(8, 8)),
            *LOOKS,
        ],
    ),
}
"""Name -> why it is here, and the calls."""
