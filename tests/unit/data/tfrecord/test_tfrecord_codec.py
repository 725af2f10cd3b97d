"""Records and Arrow batches: every type, both kinds of loops, damaged files, bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.blocks import Block, block_of, codec_of, decompressed, read_blocks
from sparkdl.data.tfrecord.decoding import RecordType, check_schema, decode_block
from sparkdl.data.tfrecord.encoding import encode_batch
from sparkdl.data.tfrecord.framing import crc32c, frame, masked, read_frames
from sparkdl.data.tfrecord.inference import infer_schema
from sparkdl.errors import ConfigError, DataError, UnknownNameError

pytestmark = pytest.mark.long

EXAMPLES = pa.RecordBatch.from_pydict(
    {
        "integer": pa.array([1, -1, 2**63 - 1, -(2**63), None]),
        "float": pa.array([1.5, None, -0.0, 3.4e38, 1e-40], pa.float32()),
        "text": pa.array(["", "é✓", None, "x" * 300, "abc"]),
        "raw": pa.array([b"", b"\xff\x00", None, b"x" * 300, b"abc"]),
        "integers": pa.array([[], None, [1, 2, 3], [-5], list(range(300))]),
        "floats": pa.array([[], None, [1, 2, 3], [-5], list(range(300))], pa.list_(pa.float32())),
        "texts": pa.array([[], None, ["a", ""], ["ü"], ["x"] * 200]),
        "truth": pa.array([True, False, None, True, False]),
        "small": pa.array([1, 2, None, -4, 5], pa.int8()),
        "double": pa.array([1.5, 2, None, -4, 5]),
        "a feature whose name is longer than thirty-two bytes": pa.array([1, 2, 3, 4, 5]),
        "a feature whose name is longer than thirty-two bytes, too": pa.array([6, 7, 8, 9, 0]),
        "none": pa.array([None] * 5, pa.float32()),
    }
)
SEQUENCES = pa.RecordBatch.from_pydict(
    {
        "id": pa.array([1, 2, 3]),
        "frames": pa.array([[[1, 2], [], [3]], [], None]),
        "words": pa.array([[["a", "ü"]], [[], ["b"]], [[""]]]),
        "levels": pa.array([[[0.5]], None, [[], []]], pa.list_(pa.list_(pa.float32()))),
    }
)


@pytest.fixture(params=["compiled", "in lockstep"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both implementations of the loops."""
    if request.param == "compiled":
        pytest.importorskip("numba")
    limit = 0 if request.param == "compiled" else 1 << 62
    monkeypatch.setattr(loops, "COMPILED_FROM", limit)
    return str(request.param)


def blocks_of(content: bytes, **options: object) -> list[Block]:
    """All blocks, each in memory of its own."""
    stream = read_blocks(io.BytesIO(content), "f.tfrecord", **options)  # type: ignore[arg-type]
    return [replace(block, buffer=block.buffer.copy()) for block in stream]


def decoded(
    content: bytes, schema: pa.Schema, kind: RecordType = "Example", **options: object
) -> pa.Table:
    stream = read_blocks(io.BytesIO(content), "f.tfrecord", **options)  # type: ignore[arg-type]
    batches = [decode_block(block, schema, kind) for block in stream]
    for batch in batches:
        batch.validate(full=True)
    return pa.Table.from_batches(batches, schema)


# -- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Example", "SequenceExample"])
def test_every_type_comes_back(kind: RecordType) -> None:
    batch = EXAMPLES if kind == "Example" else SEQUENCES
    content = bytes(encode_batch(batch, kind))
    assert decoded(content, batch.schema, kind).equals(pa.Table.from_batches([batch]))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 99, 100, 101, 112, 120, 200])
def test_one_number_of_every_size_under_keys_of_every_length(length: int) -> None:
    integers = sorted({(1 << power) + more for power in range(63) for more in (-1, 0, 1)})
    integers = [*integers, *(-number for number in integers), 2**63 - 1, -(2**63)]
    floats = np.array(integers, np.float64).astype(np.float32)
    rows = pa.RecordBatch.from_pydict(
        {"i" * length: pa.array(integers), "f" * length: pa.array(floats)}
    )
    content = bytes(encode_batch(rows, "Example"))
    assert decoded(content, rows.schema).equals(pa.Table.from_batches([rows]))
    backwards = pa.schema(list(rows.schema)[::-1])
    assert decoded(content, backwards).column(1).to_pylist() == integers


def test_both_ways_of_the_loops_say_the_same_of_damaged_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each byte of a record of single numbers, changed in eleven ways."""
    pytest.importorskip("numba")
    rows = pa.RecordBatch.from_pydict(
        {"a": pa.array([5]), "bc": pa.array([2**40]), "d": pa.array([1.5], pa.float32())}
    )
    (record,) = read_frames(io.BytesIO(bytes(encode_batch(rows, "Example"))))
    answers: dict[int, list[str]] = {}
    for limit in (0, 1 << 62):
        monkeypatch.setattr(loops, "COMPILED_FROM", limit)
        answers[limit] = []
        for at in range(len(record)):
            for byte in (0, 1, 0x7F, 0x80, 0xFF, *(record[at] ^ (1 << bit) for bit in range(6))):
                damaged = frame(record[:at] + bytes([byte]) + record[at + 1 :])
                try:
                    answers[limit].append(str(decoded(damaged, rows.schema).to_pylist()))
                except DataError:
                    answers[limit].append("")
    compiled, lockstep = answers.values()
    assert compiled == lockstep
    assert any(compiled)
    assert not all(compiled)


def test_slices_of_batches_and_an_empty_one() -> None:
    part = EXAMPLES.slice(2, 2)
    assert decoded(bytes(encode_batch(part, "Example")), part.schema).to_batches()[0].equals(part)
    assert bytes(encode_batch(EXAMPLES.slice(0, 0), "Example")) == b""


def test_records_as_they_are() -> None:
    batch = pa.RecordBatch.from_pydict({"byteArray": pa.array([b"", b"a", b"\x00" * 1000])})
    content = bytes(encode_batch(batch, "ByteArray"))
    assert content == b"".join(frame(value) for value in [b"", b"a", b"\x00" * 1000])
    assert decoded(content, batch.schema, "ByteArray").to_batches()[0].equals(batch)


def test_the_same_frames_as_one_at_a_time() -> None:
    content = bytes(encode_batch(EXAMPLES, "Example"))
    assert b"".join(map(frame, read_frames(io.BytesIO(content)))) == content


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 15, 16, 17, 1023, 1024, 1025, 5000])
def test_checksums_of_any_length(size: int) -> None:
    random = np.random.default_rng(size)
    buffer = random.integers(0, 256, 3 * size + loops.PADDING).astype(np.uint8)
    starts, lengths = np.array([0, size, 2 * size]), np.full(3, size)
    expected = [masked(crc32c(buffer[s : s + size].tobytes())) for s in starts]
    assert loops.masked_crcs(buffer, starts, lengths).tolist() == expected


def test_rows_do_not_inherit_features_of_rows_before() -> None:
    batch = pa.RecordBatch.from_pydict(
        {"a": pa.array([1, None, 3]), "b": pa.array([None, "x", None])}
    )
    assert decoded(bytes(encode_batch(batch, "Example")), batch.schema).to_pylist() == [
        {"a": 1, "b": None},
        {"a": None, "b": "x"},
        {"a": 3, "b": None},
    ]


def test_a_schema_takes_some_columns_in_its_own_order() -> None:
    schema = pa.schema([("texts", pa.list_(pa.string())), ("absent", pa.int64()),
                        ("integer", pa.int64())])  # fmt: skip
    table = decoded(bytes(encode_batch(EXAMPLES, "Example")), schema)
    assert table.schema == schema
    assert table["integer"].to_pylist() == EXAMPLES["integer"].to_pylist()
    assert table["absent"].null_count == 5


def test_a_feature_list_of_single_values_as_a_plain_array() -> None:
    batch = pa.RecordBatch.from_pydict({"steps": pa.array([[[1], [2]], []])})
    schema = pa.schema([("steps", pa.list_(pa.int64()))])
    content = bytes(encode_batch(batch, "SequenceExample"))
    assert decoded(content, schema, "SequenceExample")["steps"].to_pylist() == [[1, 2], []]


def test_numbers_that_are_not_packed_and_unknown_fields() -> None:
    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    int64s = b"\x08\x05" + field(1, b"\x06\x07") + b"\x08" + b"\xff" * 9 + b"\x01"
    floats = b"\x0d" + np.float32(1.5).tobytes() + field(1, np.float32(2.5).tobytes())
    unknown = field(9, b"xyz") + b"\x50\x01" + b"\x5d1234" + b"\x5912345678"
    entry_a = field(2, field(3, int64s) + unknown) + field(1, b"a")  # value before key
    entry_b = field(1, b"b") + field(2, field(2, floats))
    record = unknown + field(1, field(1, entry_a) + unknown) + field(1, field(1, entry_b))
    schema = pa.schema([("a", pa.list_(pa.int64())), ("b", pa.list_(pa.float32()))])
    batch = decode_block(block_of([record]), schema, "Example")
    assert batch.to_pylist() == [{"a": [5, 6, 7, -1], "b": [1.5, 2.5]}]
    assert infer_schema([block_of([record])]) == schema


def test_of_a_key_that_comes_twice_the_last_value_counts() -> None:
    one = pa.RecordBatch.from_pydict({"a": pa.array([1])})
    two = pa.RecordBatch.from_pydict({"a": pa.array([2])})
    records = [next(read_frames(io.BytesIO(encode_batch(b, "Example")))) for b in (one, two)]
    both = records[0] + records[1]  # messages one after the other are merged
    assert decode_block(block_of([both]), one.schema, "Example").to_pylist() == [{"a": 2}]


def field(number: int, *content: bytes) -> bytes:
    whole = b"".join(content)
    return bytes([number << 3 | 2, len(whole)]) + whole


def floats(*values: float) -> bytes:
    return field(2, field(1, np.array(values, np.float32).tobytes()))


@pytest.mark.parametrize(
    "value",
    [
        floats(1.0, 2.0),
        floats(1.0) + floats(2.0),  # one list in two parts: they are joined
        floats(9.0) + field(3, field(1, b"\x05")) + floats(1.0, 2.0),  # of another kind: replaced
        floats(1.0) + floats() + floats(2.0),
    ],
)
def test_the_parts_of_a_feature_are_joined(value: bytes) -> None:
    """As ``tf.train.Example.FromString`` reads them; see the test with TensorFlow."""
    record = field(1, field(1, field(1, b"x"), field(2, value)))
    more = field(1, field(1, field(1, b"x"), field(2, floats(7.0))))
    schema = pa.schema([("x", pa.list_(pa.float32()))])
    block = block_of([record, more])
    assert infer_schema([block]) == schema
    assert decode_block(block, schema, "Example").to_pylist() == [{"x": [1.0, 2.0]}, {"x": [7.0]}]


def test_an_entry_with_two_messages_is_no_record() -> None:
    entry = field(1, field(1, b"x"), field(2, floats(1.0)), field(2, floats(2.0)))
    with pytest.raises(DataError, match="in two parts"):
        infer_schema([block_of([field(1, entry)])])


def test_texts_that_are_no_texts_are_bytes_and_feature_lists_name_the_option() -> None:
    rows = pa.RecordBatch.from_pydict({"a": [b"ok", b"\xff\xd8"], "b": [b"x", b"y"]})
    found = infer_schema(blocks_of(bytes(encode_batch(rows, "Example"))))
    assert found == pa.schema([("a", pa.binary()), ("b", pa.string())])
    with pytest.raises(DataError, match="recordType SequenceExample"):
        infer_schema(blocks_of(bytes(encode_batch(SEQUENCES, "SequenceExample"))))


# -- schema --------------------------------------------------------------------------------------


def test_the_inferred_schema() -> None:
    blocks = blocks_of(bytes(encode_batch(EXAMPLES, "Example")))
    found = infer_schema(blocks, binary_features=["raw"])
    assert {field.name: str(field.type) for field in found if "long" not in field.name} == {
        "double": "float",
        "float": "float",
        "floats": "list<item: float>",
        "integer": "int64",
        "integers": "list<item: int64>",
        "raw": "binary",
        "small": "int64",
        "text": "string",
        "texts": "list<item: string>",
        "truth": "int64",
    }
    blocks = blocks_of(bytes(encode_batch(SEQUENCES, "SequenceExample")))
    found = infer_schema(blocks, "SequenceExample")
    assert str(found.field("frames").type) == "list<item: list<item: int64>>"
    assert str(found.field("id").type) == "int64"
    assert infer_schema(blocks, "ByteArray") == pa.schema([("byteArray", pa.binary())])


def test_a_feature_of_two_kinds_is_refused() -> None:
    batches = [pa.RecordBatch.from_pydict({"a": pa.array(v)}) for v in ([1], ["x"])]
    content = b"".join(bytes(encode_batch(batch, "Example")) for batch in batches)
    with pytest.raises(DataError, match=r"record 1 of f\.tfrecord, at byte"):
        infer_schema(blocks_of(content))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (pa.float32(), "list of FLOAT"),
        (pa.int64(), "one value"),
        (pa.list_(pa.string()), "list of BYTES"),
    ],
)
def test_a_schema_that_does_not_fit_names_the_record(kind: pa.DataType, expected: str) -> None:
    batch = pa.RecordBatch.from_pydict({"a": pa.array([None, [1, 2]])})
    with pytest.raises(DataError, match=r"record 1 of f.tfrecord, at byte 18(.|\n)*" + expected):
        decoded(bytes(encode_batch(batch, "Example")), pa.schema([("a", kind)]))


def test_values_that_do_not_fit_are_refused() -> None:
    content = bytes(encode_batch(pa.RecordBatch.from_pydict({"a": pa.array([300])}), "Example"))
    with pytest.raises(DataError, match="'a' do not fit"):
        decoded(content, pa.schema([("a", pa.int8())]))
    content = bytes(encode_batch(pa.RecordBatch.from_pydict({"a": pa.array([b"\xff"])}), "Example"))
    with pytest.raises(DataError, match=r"record 0 of f\.tfrecord(.|\n)*UTF-8"):
        decoded(content, pa.schema([("a", pa.string())]))
    with pytest.raises(DataError, match="never null"):
        decoded(content, pa.schema([pa.field("b", pa.int64(), nullable=False)]))
    with pytest.raises(DataError, match="a null that no record can hold"):
        encode_batch(pa.RecordBatch.from_pydict({"a": pa.array([[1, None]])}), "Example")
    with pytest.raises(DataError, match="too large for the float32"):
        encode_batch(pa.RecordBatch.from_pydict({"a": pa.array([1e39])}), "Example")


def test_columns_that_no_record_can_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a'(.|\n)*timestamp"):
        check_schema(pa.schema([("a", pa.timestamp("us"))]), "Example")
    with pytest.raises(ConfigError, match="SequenceExample has arrays of arrays"):
        check_schema(SEQUENCES.schema, "Example")
    check_schema(SEQUENCES.schema, "SequenceExample")
    with pytest.raises(ConfigError, match="one column"):
        check_schema(SEQUENCES.schema, "ByteArray")


# -- files ---------------------------------------------------------------------------------------


def test_compressed_files_are_known_by_their_first_bytes() -> None:
    content = bytes(encode_batch(EXAMPLES, "Example"))
    for packed in (content, gzip.compress(content), zlib.compress(content)):
        stream = decompressed(io.BytesIO(packed))
        found = next(read_blocks(stream, "f"))
        assert decode_block(found, EXAMPLES.schema, "Example").equals(EXAMPLES)
    assert codec_of("org.apache.hadoop.io.compress.GzipCodec") == "gzip"
    with pytest.raises(UnknownNameError):
        codec_of("lzma")


def test_small_blocks_give_the_same_rows() -> None:
    content = bytes(encode_batch(EXAMPLES, "Example"))
    for size in (1, 50, 333, 4096):
        table = decoded(content, EXAMPLES.schema, block_bytes=size)
        assert table.combine_chunks().equals(pa.table(EXAMPLES))


def test_a_flipped_bit_names_file_and_byte() -> None:
    content = bytearray(encode_batch(EXAMPLES, "Example"))
    length = int.from_bytes(content[:8], "little")
    second = length + 16
    content[second + 20] ^= 4
    with pytest.raises(DataError, match=f"record 1 of f.tfrecord, at byte {second}: broken"):
        blocks_of(bytes(content))
    with pytest.raises(DataError, match=f"record 1 of f.tfrecord, at byte {second}: broken"):
        blocks_of(bytes(content), block_bytes=64)
    assert len(blocks_of(bytes(content), verify=False)[0]) == 5
    content[second + 3] ^= 4  # in the length: that is looked at in any case
    with pytest.raises(DataError, match=f"at byte {second}: broken"):
        blocks_of(bytes(content), verify=False)


def test_every_cut_is_found() -> None:
    content = bytes(encode_batch(EXAMPLES.slice(0, 3), "Example"))
    ends = np.cumsum([len(r) + 16 for r in read_frames(io.BytesIO(content))]).tolist()
    for size in range(len(content)):
        if size in (0, *ends):
            blocks_of(content[:size])
            continue
        with pytest.raises(DataError, match=r"f.tfrecord, at byte \d+: broken"):
            blocks_of(content[:size])
    packed = gzip.compress(content)
    with pytest.raises(DataError, match="sound compressed file"):
        list(read_blocks(decompressed(io.BytesIO(packed[:-9])), "f"))


def mutate(content: bytes, random: np.random.Generator) -> bytes:
    """A file with a few bytes changed, cut, doubled or inserted; with right CRCs half of the time,
    so that the damage gets through to the messages."""
    data = bytearray(content)
    for _ in range(random.integers(1, 5)):
        at = int(random.integers(0, len(data)))
        match int(random.integers(0, 5)):
            case 0:
                data[at] ^= 1 << int(random.integers(0, 8))
            case 1:
                data[at] = int(random.choice([0, 1, 0x7F, 0x80, 0xFF]))
            case 2:
                del data[at : at + int(random.integers(1, 9))]
            case 3:
                data[at:at] = data[at : at + int(random.integers(1, 9))]
            case 4:
                data[at:at] = bytes(random.integers(0, 256, 3).astype(np.uint8))
        if not data:
            return b""
    return bytes(data)


def survives(content: bytes, schema: pa.Schema, kind: RecordType, verify: bool) -> bool:
    """Whether mutated bytes are read; DataError is the only other thing that may happen."""
    try:
        found = blocks_of(content, verify=verify)
        infer_schema(found, kind)
        for block in found:
            decode_block(block, schema, kind).validate(full=True)
    except DataError:
        return False
    return True


def try_mutations(number: int, seed: int = 0) -> int:
    random = np.random.default_rng(seed)
    read = 0
    for i in range(number):
        kind: RecordType = "SequenceExample" if i % 3 == 0 else "Example"
        batch = SEQUENCES if i % 3 == 0 else EXAMPLES.slice(i % 3, 2)
        content = bytes(encode_batch(batch, kind))
        if i % 2:
            content = mutate(content, random)
        else:
            content = b"".join(
                frame(mutate(record, random)) for record in read_frames(io.BytesIO(content))
            )
        read += survives(content, batch.schema, kind, verify=bool(i % 4))
    return read


def test_mutated_files_never_crash() -> None:
    assert 0 < try_mutations(600) < 600


@pytest.mark.slow
def test_a_hundred_thousand_mutated_files(way: str) -> None:
    """50,000 by each way of the loops, none of which the other has seen."""
    assert try_mutations(50_000, seed=1 + len(way)) > 0


def test_memory_is_bounded_by_the_block(way: str) -> None:
    rows = pa.RecordBatch.from_pydict({"x": pa.array([[0.5] * 1000] * 500, pa.list_(pa.float32()))})
    part = bytes(encode_batch(rows, "Example"))

    class Endless(io.RawIOBase):
        """A file of 40 such parts, which nobody has in memory."""

        position = 0

        def readinto(self, target: memoryview) -> int:  # type: ignore[override]
            left = 40 * len(part) - self.position
            at = self.position % len(part)
            count = min(len(target), left, len(part) - at)
            target[:count] = part[at : at + count]
            self.position += count
            return count

    largest, total = 0, 0
    stream = Endless()
    for block in read_blocks(stream, "f", block_bytes=1 << 18):  # type: ignore[arg-type]
        largest = max(largest, block.buffer.nbytes)
        total += decode_block(block, rows.schema, "Example").num_rows
    assert total == 40 * 500
    assert largest < 1 << 20
