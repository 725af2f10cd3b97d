"""Files dealt to those who read them, and read block by block as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO, TypeVar

import pyarrow as pa

from sparkdl.data.tfrecord.blocks import Block, Codec, decompressed, read_blocks
from sparkdl.errors import ConfigError

T = TypeVar("T")
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose value is null."""


def deal(shards: Sequence[T], sizes: Sequence[int], hands: int) -> list[list[T]]:
    """Shards dealt so that each hand gets about as many bytes.

    The largest shard goes first, each to the hand that has least; no hand gets more than the mean
    and one shard. Within a hand the shards keep their order.

    >>> deal(['a', 'b', 'c', 'd'], [5, 9, 3, 2], 2)
    [['b'], ['a', 'c', 'd']]
    """
    load = [0] * hands
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for number in sorted(range(len(shards)), key=lambda i: (-sizes[i], i)):
        hand = min(range(hands), key=lambda h: (load[h], h))
        dealt[hand].append(number)
        load[hand] += sizes[number]
    return [[shards[i] for i in sorted(numbers)] for numbers in dealt]


def file_blocks(
    stream: BinaryIO, name: str, codec: Codec | None = None, verify: bool = True
) -> Iterator[Block]:
    """The records of an open TFRecord file, decompressed, in blocks."""
    return read_blocks(decompressed(stream, codec), name, verify=verify)


def folder_column(text: str, field: pa.Field, rows: int) -> pa.Array:
    """The column that a folder ``name=text`` gives to the rows of its files.

    Raises:
        ConfigError: The text is no value of the column's type.

    >>> folder_column('3', pa.field('day', pa.int64()), 2).to_pylist()
    [3, 3]
    """
    if text == NO_VALUE:
        return pa.nulls(rows, field.type)
    try:
        return pa.repeat(pa.scalar(text).cast(field.type), rows)
    except pa.ArrowInvalid as error:
        raise ConfigError(
            f"folder {field.name}={text}: not of the column's type",
            expected=f"a value of {field.type}",
            received=text,
        ) from error
