"""Example and SequenceExample: which bytes of a block are whose values.

::

    Example         { Features features = 1 }
    SequenceExample { Features context = 1; FeatureLists feature_lists = 2 }
    Features        { map<string, Feature> feature = 1 }
    FeatureLists    { map<string, FeatureList> feature_list = 1 }
    FeatureList     { repeated Feature feature = 1 }
    Feature         { oneof { BytesList = 1; FloatList = 2; Int64List = 3 } }
    BytesList, FloatList, Int64List { repeated value = 1 }

Unknown fields are skipped. Of a key that comes twice the last value counts, as in any map of a
protocol buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.blocks import Block
from sparkdl.data.tfrecord.framing import broken
from sparkdl.data.tfrecord.loops import Bytes, Fields, MalformedError, Positions
from sparkdl.errors import DataError


class ListKind(IntEnum):
    """The kind of a feature's list, as the number of its field."""

    NONE = 0
    BYTES = 1
    FLOAT = 2
    INT64 = 3


@dataclass(frozen=True)
class ByteSpans:
    """Messages of one kind: which record each is in, where it begins and ends."""

    record: Positions
    start: Positions
    end: Positions

    def __len__(self) -> int:
        return len(self.record)

    def where(self, chosen: npt.NDArray[np.bool_] | Positions) -> ByteSpans:
        """Some of them."""
        return ByteSpans(self.record[chosen], self.start[chosen], self.end[chosen])


@dataclass(frozen=True)
class Entries:
    """The entries of maps from names to messages.

    Args:
        key: Where each one's name is.
        value: Where its message is.
        hashes: A number for each name; equal for equal names.
    """

    key: ByteSpans
    value: ByteSpans
    hashes: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Lists:
    """The values of some features, in the order of their records.

    Args:
        record: Which record (or which feature list) each feature is in.
        kind: What its list holds.
        parts: Pieces of values: spans of bytes; their ``record`` is the number of the feature.
        wire: How each piece is written: 2 packed or a text, 0 and 5 a single number.
    """

    record: Positions
    kind: Positions
    parts: ByteSpans
    wire: Positions


@dataclass(frozen=True)
class Singles:
    """The one number that each record has in a feature.

    Args:
        kinds: The kind of its list; -1 or 0 where there is none.
        values: The numbers; of floats the bits.
    """

    kinds: npt.NDArray[np.int8]
    values: npt.NDArray[np.int64]


class FieldReader:
    """Finds messages in a block; malformed ones are raised with the place of their record."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.buffer: Bytes = block.buffer

    def records(self) -> ByteSpans:
        """The block's records as messages."""
        block = self.block
        return ByteSpans(np.arange(len(block)), block.starts, block.starts + block.lengths)

    def walk(self, messages: ByteSpans) -> Fields:
        """All fields of some messages."""
        try:
            return loops.walk(self.buffer, messages.start, messages.end)
        except MalformedError as error:
            raise self.malformed(int(messages.record[error.index]), error.what) from error

    def children(self, messages: ByteSpans, number: int) -> tuple[ByteSpans, Positions]:
        """Messages in field ``number`` of some messages, and in which of them each one is."""
        fields = self.walk(messages)
        found = fields.where((fields.number == number) & (fields.wire == 2))
        return ByteSpans(messages.record[found.message], found.start, found.end), found.message

    def entries(self, maps: ByteSpans) -> Entries:
        """The entries in field 1 of some messages."""
        entries, _ = self.children(maps, 1)
        fields = self.walk(entries)
        if _alternate(fields, len(entries)):
            key, value = fields.where(slice(0, None, 2)), fields.where(slice(1, None, 2))  # type: ignore[arg-type]
            key_start, key_end = key.start, key.end
            start, end = value.start, value.end
        else:
            key_start, key_end = _last(fields, 1, entries)
            start, end = _last(fields, 2, entries)
            values_of = np.bincount(fields.message[fields.number == 2], minlength=1)
            if values_of.max() > 1:
                row = int(entries.record[np.argmax(values_of > 1)])
                raise self.malformed(row, "a feature whose message is in two parts")
        keys = ByteSpans(entries.record, key_start, key_end)
        values = ByteSpans(entries.record, start, end)
        return Entries(keys, values, hash_spans(self.buffer, key_start, key_end))

    def named(self, entries: Entries, name: str) -> ByteSpans:
        """The message under a name in each map that has it, the last one where there are two."""
        key = name.encode()
        text = np.frombuffer(key + bytes(loops.PADDING), np.uint8)
        wanted = hash_spans(text, np.zeros(1, np.int64), np.full(1, len(key)))[0]
        rows = np.flatnonzero(entries.hashes == wanted)
        start, end = entries.key.start[rows], entries.key.end[rows]
        rows = rows[end - start == len(key)]
        shape = (len(self.buffer) - len(key) + 1, len(key))
        texts = np.ndarray(shape, np.uint8, self.buffer, 0, (1, 1))[entries.key.start[rows]]
        same = (texts == text[: len(key)]).all(axis=1)
        found = entries.value.where(rows if same.all() else rows[same])
        record = found.record
        return found.where(np.append(record[1:] != record[:-1], True)) if len(record) else found

    def lists(self, features: ByteSpans) -> Lists:
        """The content of the lists of features."""
        fields = self.walk(features)
        fields = fields.where((fields.number <= 3) & (fields.wire == 2))
        kind = np.zeros(len(features), np.int64)
        kind[fields.message] = fields.number  # of several kinds the last one counts
        before = np.full(len(features), -1)
        inside = fields.message[1:] == fields.message[:-1]
        changed = np.flatnonzero(inside & (fields.number[1:] != fields.number[:-1]))
        before[fields.message[changed]] = changed
        fields = fields.where(np.arange(len(fields.number)) > before[fields.message])
        parts = self.walk(ByteSpans(features.record[fields.message], fields.start, fields.end))
        parts = parts._replace(message=fields.message[parts.message])
        of = kind[parts.message]
        fits = (parts.wire == 2) | ((of == ListKind.INT64) & (parts.wire == 0))
        fits |= (of == ListKind.FLOAT) & (parts.wire == 5)
        fits &= parts.number == 1
        if not fits.all():
            parts = parts.where(fits)
        spans = ByteSpans(parts.message, parts.start, parts.end)
        return Lists(features.record, kind, spans, parts.wire)

    def indexed(self, single: Mapping[str, bool]) -> dict[str, Lists | Singles] | None:
        """Some features of Examples, found in one pass; None if that cannot be."""
        order = sorted(single)
        records = self.records()
        keys = [name.encode() for name in order]
        are_single = [single[name] for name in order]
        found = loops.index_examples(self.buffer, records.start, records.end, keys, are_single)
        if found is None:
            return None
        return {
            name: Singles(kinds, values)
            if single[name]
            else self._indexed(kinds.astype(np.int64), begins, stops)
            for name, kinds, begins, stops, values in zip(order, *found, strict=True)
        }

    def _indexed(self, kinds: Positions, starts: Positions, ends: Positions) -> Lists:
        record = np.arange(len(kinds))
        if kinds.min(initial=0) < 0:
            record = np.flatnonzero(kinds >= 0)
            kinds, starts, ends = kinds[record], starts[record], ends[record]
        of_texts = kinds == ListKind.BYTES
        if not of_texts.any():
            parts = ByteSpans(np.arange(len(record)), starts, ends)
            return Lists(record, kinds, parts, np.full(len(record), 2))
        if not of_texts.all():
            ends = np.where(of_texts, ends, starts)
        fields = self.walk(ByteSpans(record, starts, ends))
        fields = fields.where((fields.number == 1) & (fields.wire == 2))
        parts = ByteSpans(fields.message, fields.start, fields.end)
        return Lists(record, kinds, parts, fields.wire)

    def counts(self, lists: Lists) -> Positions:
        """How many values each feature has."""
        parts = lists.parts
        lengths = parts.end - parts.start
        counts = np.where(lists.kind[parts.record] == ListKind.FLOAT, lengths // 4, 1)
        packed = np.flatnonzero((lists.kind[parts.record] == ListKind.INT64) & (lists.wire == 2))
        try:
            found = loops.read_varints(self.buffer, parts.start[packed], lengths[packed])
        except MalformedError as error:
            row = int(lists.record[parts.record[packed[error.index]]])
            raise self.malformed(row, error.what) from error
        counts[packed] = found[1]
        return np.bincount(parts.record, counts, len(lists.record)).astype(np.int64)

    def malformed(self, record: int, what: str) -> DataError:
        """The error for a record that is no message of its kind."""
        return broken(
            self.block.place(record), "a protocol buffer of the kind asked for", what,
            "is this the recordType of the file: Example, SequenceExample or ByteArray?",
        )  # fmt: skip


def _alternate(fields: Fields, entries: int) -> bool:
    """Whether each entry has just a key and then a value, as every writer writes them."""
    if len(fields.number) != 2 * entries:
        return False
    return bool(
        (fields.wire == 2).all()
        and (fields.number[0::2] == 1).all()
        and (fields.number[1::2] == 2).all()
        and (fields.message[0::2] == fields.message[1::2]).all()
    )


def _last(fields: Fields, number: int, messages: ByteSpans) -> tuple[Positions, Positions]:
    """The last value of a field in each message; an empty one where there is none."""
    start, end = messages.start.copy(), messages.start.copy()
    found = fields.where((fields.number == number) & (fields.wire == 2))
    start[found.message], end[found.message] = found.start, found.end
    return start, end


def hash_spans(buffer: Bytes, starts: Positions, ends: Positions) -> npt.NDArray[np.uint64]:
    """A number for the bytes of each span; their length and up to 32 bytes, 8 at a time."""
    lengths = ends - starts
    hashes = lengths.astype(np.uint64)
    longest = int(lengths.max()) if len(lengths) else 0
    at_every_byte = np.ndarray((len(buffer) - 7,), "<u8", buffer, 0, (1,))
    for at in range(0, min(longest, 32), 8):
        words = at_every_byte[np.minimum(starts + at, len(at_every_byte) - 1)]
        left = np.clip(lengths - at, 0, 8).astype(np.uint64)
        words &= np.where(left == 8, ~np.uint64(0), (np.uint64(1) << (8 * left)) - np.uint64(1))
        mixed = (hashes ^ words) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        hashes = np.where(left > 0, mixed, hashes)  # however long the longest name is
    return hashes
