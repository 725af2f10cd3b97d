"""Keras layers for what is too large for one worker.

* :class:`ServedEmbedding`: an embedding whose rows lie in tables outside of the model.
* ``lookups``: how a backend's compiled step reaches the rows, one module for each backend.
* ``local_rows``: the tables of a model that trains in one process.
"""

from sparkdl.layers.served_embedding import ServedEmbedding

__all__ = ["ServedEmbedding"]
