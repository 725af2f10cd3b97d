"""The schema that the records of a file ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from sparkdl.data.tfrecord.blocks import Block
from sparkdl.data.tfrecord.decoding import (
    BYTE_ARRAY_COLUMN,
    ByteSpans,
    Entries,
    FieldReader,
    ListKind,
    RecordType,
    are_texts,
)
from sparkdl.data.tfrecord.framing import broken
from sparkdl.errors import DataError


@dataclass
class _Found:
    """The kinds of values that were seen in a feature."""

    kind: ListKind
    depth: int
    first: str


class SchemaInference:
    """Looks at records and says what schema reads them.

    Int64List becomes ``int64``, FloatList ``float32``, BytesList ``string``, or ``binary`` where a
    value is no UTF-8; an array of it where any record has another number of values than one, an
    array of arrays in a feature list. Columns come in the order of their names. A feature that
    never has a value is left out.
    """

    def __init__(self, record_type: RecordType, binary_features: Collection[str] = ()) -> None:
        self.record_type, self._binary = record_type, set(binary_features)
        self._found: dict[str, _Found] = {}

    def add(self, block: Block) -> None:
        """Takes note of a block's records.

        Raises:
            DataError: A feature holds numbers of one kind here and of another kind there.
        """
        if self.record_type == "ByteArray":
            return
        reader = FieldReader(block)
        maps, _ = reader.children(reader.records(), 1)
        entries = reader.entries(maps)
        for name in _names(reader, entries):
            self._note(reader, name, reader.named(entries, name), 0)
        maps, _ = reader.children(reader.records(), 2)
        if self.record_type == "Example" and len(maps):
            raise DataError(
                f"{block.name}: records with feature lists, which no Example has",
                expected="recordType SequenceExample", received="recordType Example",
                hint="fit(sparkdl.read_tfrecords(spark, path, record_type='SequenceExample'))",
            )  # fmt: skip
        if self.record_type == "SequenceExample":
            entries = reader.entries(maps)
            for name in _names(reader, entries):
                features, _ = reader.children(reader.named(entries, name), 1)
                self._note(reader, name, features, 2)

    def look(self, blocks: Iterable[Block], rows: int) -> None:
        """Takes note of the first ``rows`` records, see :meth:`add`."""
        for block in blocks:
            self.add(block.slice(0, rows))
            rows -= len(block)
            if rows <= 0:
                return

    def schema(self) -> pa.Schema:
        """The schema of all records so far."""
        if self.record_type == "ByteArray":
            return pa.schema([(BYTE_ARRAY_COLUMN, pa.binary())])
        return pa.schema([(name, self._type(name)) for name in sorted(self._found)])

    def _type(self, name: str) -> pa.DataType:
        found = self._found[name]
        texts = pa.binary() if name in self._binary else pa.string()
        of = {ListKind.INT64: pa.int64(), ListKind.FLOAT: pa.float32(), ListKind.BYTES: texts}
        value: pa.DataType = of[found.kind]
        for _ in range(found.depth):
            value = pa.list_(value)
        return value

    def _note(self, reader: FieldReader, name: str, features: ByteSpans, depth: int) -> None:
        lists = reader.lists(features)
        filled = lists.kind != ListKind.NONE
        if not filled.any():
            return
        if depth == 0 and (reader.counts(lists) != 1)[filled].any():
            depth = 1
        first = int(np.argmax(filled))
        if lists.kind[first] == ListKind.BYTES and not are_texts(reader, lists.parts):
            self._binary.add(name)
        place = str(reader.block.place(int(lists.record[first])))
        found = self._found.setdefault(name, _Found(ListKind(int(lists.kind[first])), depth, place))
        wrong = filled & (lists.kind != found.kind)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise broken(
                reader.block.place(int(lists.record[row])),
                f"a list of {found.kind.name} in the feature {name!r}, as in {found.first}",
                f"a list of {ListKind(int(lists.kind[row])).name}",
                "give a schema without this feature",
            )
        if (found.depth == 2) != (depth == 2):
            raise DataError(
                f"{reader.block.name}: {name!r} is a feature as well as a feature list",
                expected="one or the other in all records", received="both",
                hint="give a schema without it",
            )  # fmt: skip
        found.depth = max(found.depth, depth)


def _names(reader: FieldReader, entries: Entries) -> list[str]:
    _, first = np.unique(entries.hashes, return_index=True)
    names = set()
    for row in first.tolist():
        start, end = int(entries.key.start[row]), int(entries.key.end[row])
        try:
            names.add(reader.buffer[start:end].tobytes().decode())
        except UnicodeDecodeError as error:
            record = int(entries.key.record[row])
            raise reader.malformed(record, f"a name that is no UTF-8: {error}") from error
    return sorted(names)


def infer_schema(
    blocks: Iterable[Block],
    record_type: RecordType = "Example",
    *,
    rows: int = 1000,
    binary_features: Collection[str] = (),
) -> pa.Schema:
    """The schema of the first ``rows`` records, see :class:`SchemaInference`."""
    inference = SchemaInference(record_type, binary_features)
    inference.look(blocks, rows)
    return inference.schema()
