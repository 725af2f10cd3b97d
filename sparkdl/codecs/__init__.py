"""Codecs: they encode float32 vectors in fewer bytes, for any exchange with a server.

:func:`make_codec` makes one from a name. ``codec.compressor(size)`` encodes the vectors of one
worker; where the codec loses something, it adds that to the next vector (error feedback).
"""

from sparkdl.codecs.codec import Codec, Compression, Compressor, ErrorFeedback, Memoryless, Sections
from sparkdl.codecs.quantized import BF16, FP16, Dithering, Int4, Int8, OneBit, Raw
from sparkdl.codecs.sparse import DGC, DGCCompressor, RandomK, TopK
from sparkdl.settings.registry import Registry

__all__ = [
    "BF16",
    "DGC",
    "FP16",
    "SUM_DTYPES",
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
    "Sections",
    "TopK",
    "codec_names",
    "make_codec",
    "register",
]

CODECS: Registry[Codec] = Registry(
    "codec", Codec, (Raw, FP16, BF16, Int8, Int4, OneBit, TopK, DGC, RandomK, Dithering)
)
"""Every codec. A new one is a new module here, imported above and named in this list."""

register = CODECS.register
"""Gives a :class:`Codec` of one\'s own a name, as those of this list have."""

SUM_DTYPES = {codec.name: codec.sum_dtype for codec in CODECS.classes() if codec.sum_dtype}
"""Codecs whose messages an all-reduce can add up, and the dtype as which it does."""


def codec_names() -> list[str]:
    """The names that ``compression=`` takes, sorted."""
    return CODECS.names()


def make_codec(codec: object = None, **options: object) -> Codec:
    """The codec that ``codec`` and ``options`` stand for.

    Args:
        codec: None (no compression), a name, a dict ``{'name': ..., **options}``, a
            :class:`Codec` (kept as it is) or a class of them.
        **options: Constructor arguments, for a name or a class.

    Raises:
        UnknownNameError: No codec has that name; lists those known.
        ConfigError: An option that the codec does not have, or a value it cannot take.

    Example:
        >>> make_codec('topk', ratio=0.1)
        TopK(ratio=0.1, k=None)
    """
    return CODECS.make(Raw.name if codec is None else codec, options)
