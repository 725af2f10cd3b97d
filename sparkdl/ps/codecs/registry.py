"""From what a user writes as ``compression=`` to a codec."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from sparkdl.errors import ConfigError, UnknownNameError
from sparkdl.ps.codecs.codec import Codec
from sparkdl.ps.codecs.dgc import DGC
from sparkdl.ps.codecs.halves import BF16, FP16, Raw
from sparkdl.ps.codecs.onebit import OneBit
from sparkdl.ps.codecs.quantized import Dithering, Int4, Int8
from sparkdl.ps.codecs.sparse import RandomK, TopK

_CODECS: dict[str, type[Codec]] = {
    codec.name: codec
    for codec in (Raw, FP16, BF16, Int8, Int4, OneBit, TopK, DGC, RandomK, Dithering)
}


def codec_names() -> list[str]:
    """The names that ``compression=`` takes, sorted."""
    return sorted(_CODECS)


def make_codec(codec: Any = None, **options: Any) -> Codec:
    """The codec that ``codec`` and ``options`` stand for.

    Args:
        codec: None (no compression), a name, a :class:`Codec`, a class of codecs, or a dict
            ``{'name': ..., **options}``.
        **options: Constructor arguments, for a name or a class.

    Raises:
        UnknownNameError: No codec has that name; lists those known.
        ConfigError: An option that the codec does not have, or a value it cannot take.

    Example:
        >>> make_codec('topk', ratio=0.1)
        TopK(ratio=0.1, k=None)
    """
    if codec is None:
        codec = Raw.name
    if isinstance(codec, Mapping) and isinstance(codec.get("name"), str):
        options = {**{key: value for key, value in codec.items() if key != "name"}, **options}
        codec = codec["name"]
    if isinstance(codec, str):
        name = codec.strip().lower().replace("-", "").replace("_", "")
        if name not in _CODECS:
            raise UnknownNameError("codec", codec, codec_names())
        return _construct(_CODECS[name], options)
    if inspect.isclass(codec) and issubclass(codec, Codec):
        return _construct(codec, options)
    if isinstance(codec, Codec) and not options:
        return codec
    raise ConfigError(
        "cannot make a codec",
        expected="None, a name, a Codec without further options, or a dict with a 'name'",
        received=f"{codec!r}" + (f" with options {sorted(options)}" if options else ""),
        hint="known names: " + ", ".join(codec_names()),
    )


def _construct(make: type[Codec], options: Mapping[str, Any]) -> Codec:
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        known = list(inspect.signature(make).parameters)
        raise ConfigError(
            f"codec {make.name or make.__name__!r}: {error}",
            expected="options " + ", ".join(known) if known else "no options",
            received=", ".join(f"{k}={v!r}" for k, v in options.items()) or "none",
            hint="see the docstring of the codec",
        ) from error
    return make(**options)
