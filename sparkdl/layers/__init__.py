"""Keras layers for what is too large for one worker, in rows or in memory.

``served_embedding``: an embedding whose rows lie in tables outside of the model.
``sharded_classifier``: a softmax whose centers do. ``local_rows``: what both share, the tables of a
model that trains in one process, and those that a fit has written.
``conversion``: from ``keras.layers.Embedding`` and back. ``recompute``: segments that
the backward pass computes again. ``backends``: how a step
reaches rows and classes, and computes a segment again, one module for each backend.
"""

from sparkdl.layers.conversion import serve_embeddings, to_plain_model
from sparkdl.layers.recompute import RecomputedSegment, recompute_segments
from sparkdl.layers.served_embedding import ServedEmbedding
from sparkdl.layers.sharded_classifier import ArcFace, CosFace, ShardedClassifier, SphereFace
from sparkdl.tables.admission import CountFilter, Probability
from sparkdl.tables.classes import Margin
from sparkdl.tables.hashing import ids_of_texts

__all__ = [
    "ArcFace",
    "CosFace",
    "CountFilter",
    "Margin",
    "Probability",
    "RecomputedSegment",
    "ServedEmbedding",
    "ShardedClassifier",
    "SphereFace",
    "ids_of_texts",
    "recompute_segments",
    "serve_embeddings",
    "to_plain_model",
]
