"""A file of records, read in blocks: many records in one piece of memory."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BufferedReader, RawIOBase
from typing import Any, BinaryIO, Literal, cast

import numpy as np

from sparkdl.data.tfrecord import loops
from sparkdl.data.tfrecord.framing import MAX_RECORD_BYTES, RecordPlace, broken, crc32c, masked
from sparkdl.data.tfrecord.loops import PADDING, Bytes, Positions
from sparkdl.errors import UnknownNameError

Codec = Literal["none", "gzip", "zlib"]
BLOCK_BYTES = 4 << 20
_MEGABYTE = 1 << 20
_EXPECTED = {
    "head": "the head of a frame, whose length fits its CRC",
    "length": f"a record of fewer than {MAX_RECORD_BYTES} bytes",
    "data": "data that fit their CRC",
}
_NAMES: dict[str, Codec] = {
    "": "none",
    "none": "none",
    "uncompressed": "none",
    "gzip": "gzip",
    "org.apache.hadoop.io.compress.gzipcodec": "gzip",
    "zlib": "zlib",
    "deflate": "zlib",
    "org.apache.hadoop.io.compress.defaultcodec": "zlib",
    "org.apache.hadoop.io.compress.deflatecodec": "zlib",
}
ENDINGS: dict[Codec, str] = {"none": "", "gzip": ".gz", "zlib": ".deflate"}


def codec_of(name: str | None) -> Codec:
    """The compression that an option names: ``gzip``, ``zlib``, or the class of a Hadoop codec.

    Raises:
        UnknownNameError: There is no such compression.
    """
    found = _NAMES.get((name or "").lower())
    if found is None:
        raise UnknownNameError("compression", name, ["none", "gzip", "zlib"])
    return found


@dataclass(frozen=True)
class Block:
    """Records in one piece of memory.

    Args:
        starts: Where each record begins in it.
        first: Number of the first record in the file.
        offset: Where ``buffer[0]`` stands in the file (once it is decompressed).
    """

    buffer: Bytes
    starts: Positions
    lengths: Positions
    name: str
    first: int = 0
    offset: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def slice(self, start: int, stop: int) -> Block:
        starts, lengths = self.starts[start:stop], self.lengths[start:stop]
        return replace(self, starts=starts, lengths=lengths, first=self.first + start)

    def place(self, record: int) -> RecordPlace:
        """The place in the file of the record with this number in the block."""
        return RecordPlace(
            self.name, self.first + record, self.offset + int(self.starts[record]) - 12
        )


def decompressed(stream: BinaryIO, codec: Codec | None = None) -> BinaryIO:
    """The bytes of a file, decompressed where they are compressed.

    Args:
        codec: How it is compressed; None looks at its first bytes.
    """
    head = stream.read(12)
    found = _codec_by_head(head) if codec is None else codec
    if found == "none" and stream.seekable():
        stream.seek(0)
        return stream
    again = BufferedReader(_Replayed(head, stream), _MEGABYTE)
    if found == "gzip":
        return cast(BinaryIO, gzip.GzipFile(fileobj=again, mode="rb"))
    if found == "zlib":
        return cast(BinaryIO, BufferedReader(_Inflated(again), _MEGABYTE))
    return cast(BinaryIO, again)


def _codec_by_head(head: bytes) -> Codec:
    if len(head) < 12 or head[8:] == masked(crc32c(head[:8])).to_bytes(4, "little"):
        return "gzip" if head[:2] == b"\x1f\x8b" else "none"
    if head[:2] == b"\x1f\x8b":
        return "gzip"
    is_zlib = head[0] & 0x0F == 8 and int.from_bytes(head[:2], "big") % 31 == 0
    return "zlib" if is_zlib else "none"


class _Replayed(RawIOBase):
    """A stream of which the first bytes were read already."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        found = self._head[: len(buffer)] or self._stream.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(found)] = found
        return len(found)


class _Inflated(RawIOBase):
    def __init__(self, stream: BufferedReader[Any]) -> None:
        self._stream, self._inflater = stream, zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self._inflater.eof:
            fresh = self._inflater.unconsumed_tail or self._stream.read1(_MEGABYTE)
            if not fresh:
                raise EOFError("the compressed stream ended before its end marker")
            found = self._inflater.decompress(fresh, len(buffer))
            if found:
                buffer[: len(found)] = found
                return len(found)
        return 0


def read_blocks(
    stream: BinaryIO, name: str, *, verify: bool = True, block_bytes: int = BLOCK_BYTES
) -> Iterator[Block]:
    """The records of a file, some megabytes at a time.

    The memory of a block is used again for the next one. Two blocks, or twice the largest record.

    Args:
        verify: Whether the data of each record are held against their CRC. The CRC of a record's
            length is looked at in any case.

    Raises:
        DataError: A frame is cut off or broken; it names the file, the record and the byte.
    """
    buffer = np.empty(block_bytes + PADDING, np.uint8)
    rest, offset, record = np.empty(0, np.uint8), 0, 0
    while True:
        wanted = len(rest) + max(block_bytes // 2, _missing(rest), 64) + PADDING
        if wanted > len(buffer):
            buffer = np.empty(wanted, np.uint8)
        buffer[: len(rest)] = rest
        at = RecordPlace(name, record, offset)
        filled = len(rest) + _fill(stream, buffer[len(rest) : -PADDING], at)
        buffer[filled : filled + PADDING] = 0
        loops.count_bytes(filled - len(rest))
        frames = loops.scan_frames(buffer, filled, verify)
        if len(frames.starts):
            yield Block(buffer, frames.starts, frames.lengths, name, record, offset)
        record += len(frames.starts)
        at = RecordPlace(name, record, offset + frames.end)
        if frames.fault:
            raise broken(at, _EXPECTED[frames.fault], "other bytes")
        rest = buffer[frames.end : filled].copy()
        offset += frames.end
        if filled < len(buffer) - PADDING:
            if len(rest):
                raise broken(at, f"{max(_missing(rest), 16)} bytes more", "the end of the file")
            return


def _missing(rest: Bytes) -> int:
    """Bytes that the frame which ``rest`` begins with goes on for."""
    if len(rest) < 12:
        return 0
    return max(0, int.from_bytes(rest[:8].tobytes(), "little") + 16 - len(rest))


def _fill(stream: BinaryIO, target: Bytes, at: RecordPlace) -> int:
    view, done = memoryview(target.data), 0
    try:
        while done < len(view):
            count = stream.readinto(view[done:])  # type: ignore[attr-defined]  # any open file
            if not count:
                break
            done += count
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise broken(at, "a sound compressed file", f"{type(error).__name__}: {error}") from error
    return done


def block_of(records: list[bytes]) -> Block:
    """Records that are in memory, as one block."""
    lengths = np.array([len(record) for record in records], np.int64)
    joined = b"".join(records)
    buffer = np.zeros(len(joined) + PADDING, np.uint8)
    buffer[: len(joined)] = np.frombuffer(joined, np.uint8)
    loops.count_bytes(len(joined))
    return Block(buffer, np.cumsum(lengths) - lengths, lengths, "records")
