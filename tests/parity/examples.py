"""Cases that were once another than plain Keras, or of which a user asked: each with a sentence."""

from __future__ import annotations

from case import Case

EXAMPLES: dict[str, tuple[str, Case]] = {
    "second fit after loading": (
        "A fit after save and load has the row order of a second fit, not that of the first again.",
        Case(fits=("fit", "save", "again"), sizes=(13, 7), shuffle=True),
    ),
    "argument of a loss": (
        "Keras writes no delta of Huber and no axis of CosineSimilarity into a configuration.",
        Case(heads=("numbers:huber",)),
    ),
}
"""Name -> why it is here, and the case."""
