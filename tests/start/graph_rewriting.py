"""TensorFlow without what rewrites a graph before its first run ("Grappler").

That takes longer than graphs of tests ever run. Where a test is about what a graph does, and not
about what plain Keras and sparkdl make of the same rows, graphs are rewritten as users have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def rewrite_graphs(wanted: bool) -> None:
    """Whether graphs that are traced from now on are rewritten; starts nothing of TensorFlow's."""
    import tensorflow

    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": not wanted})


@contextmanager
def without_rewriting() -> Iterator[None]:
    """Within, graphs run as they are traced."""
    rewrite_graphs(False)
    try:
        yield
    finally:
        rewrite_graphs(True)
