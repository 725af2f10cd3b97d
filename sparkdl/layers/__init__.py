"""Keras layers for what is too large for one worker.

``served_embedding``: an embedding whose rows lie in tables outside of the model. ``lookups``: how a
step of a backend reaches the rows, one module for each backend. ``local_rows``: the tables of a
model that trains in one process. ``stored_rows``: those that a fit has written. ``conversion``:
from ``keras.layers.Embedding`` and back.
"""

from sparkdl.layers.conversion import serve_embeddings, to_plain_model
from sparkdl.layers.served_embedding import ServedEmbedding
from sparkdl.tables.entry import CountFilter, Probability
from sparkdl.tables.hashing import ids_of_texts

__all__ = [
    "CountFilter",
    "Probability",
    "ServedEmbedding",
    "ids_of_texts",
    "serve_embeddings",
    "to_plain_model",
]
