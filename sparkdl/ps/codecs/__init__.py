"""Codecs: float32 vectors to fewer bytes and back, for any exchange.

:func:`make_codec` makes one from a name; ``codec.compressor(size)`` is a worker's sending end, with
error feedback where the codec loses something worth keeping.
"""

from sparkdl.ps.codecs.codec import Codec, Compressor, ErrorFeedback, Memoryless
from sparkdl.ps.codecs.compression import Compression, Segments
from sparkdl.ps.codecs.dgc import DGC, DGCCompressor
from sparkdl.ps.codecs.halves import BF16, FP16, Raw
from sparkdl.ps.codecs.onebit import OneBit
from sparkdl.ps.codecs.quantized import Dithering, Int4, Int8
from sparkdl.ps.codecs.registry import codec_names, make_codec
from sparkdl.ps.codecs.sparse import RandomK, TopK

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "Codec",
    "Compression",
    "Compressor",
    "DGCCompressor",
    "Dithering",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "Memoryless",
    "OneBit",
    "RandomK",
    "Raw",
    "Segments",
    "TopK",
    "codec_names",
    "make_codec",
]
