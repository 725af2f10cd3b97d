"""The codec's loops over bytes: compiled where numba is installed, in lockstep with NumPy else.

*In lockstep*: all messages (or records) of a block take one step together, so that a step is a few
NumPy calls however many messages there are. Both ways give the same results. Arrays of bytes end
with :data:`PADDING` bytes that belong to nobody, which the lockstep may read but never counts.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sparkdl.data.tfrecord.framing import MAX_RECORD_BYTES, crc32c_by_table, slicing_tables

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

PADDING = 16
COMPILED_FROM = 16 << 20
"""Bytes that a process decodes or encodes before it takes numba's loops: to import numba and to
load them takes a second, and five where they were never compiled on this machine."""

_seen_bytes = 0


class MalformedError(Exception):
    """A message that is no protocol buffer of its kind; ``index`` is its number in the call."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(what)
        self.index, self.what = index, what


def count_bytes(size: int) -> None:
    """Tells how many bytes are decoded or encoded now."""
    global _seen_bytes
    _seen_bytes += size


def compiled(module: str = "kernels") -> ModuleType | None:
    """A module of compiled loops, if they are worth while and numba is installed."""
    return _load(module) if _seen_bytes >= COMPILED_FROM else None


@cache
def _load(module: str) -> ModuleType | None:
    try:
        from numba import config

        if config.DISABLE_JIT:
            return None
        return importlib.import_module(f"sparkdl.data.tfrecord.{module}")
    except ModuleNotFoundError:
        return None
    except (ImportError, RuntimeError) as error:  # another NumPy; no folder for compiled loops
        logger.warning("numba cannot be used, TFRecords take longer: %s", error)
        return None


def masked_crcs(buffer: Bytes, starts: Positions, lengths: Positions) -> npt.NDArray[np.uint32]:
    """The masked CRC-32C of each span of bytes."""
    loops = compiled()
    if loops is not None:
        found: npt.NDArray[np.uint32] = loops.masked_crcs(buffer, starts, lengths)
        return found
    crcs = crcs_in_lockstep(buffer, starts, lengths).astype(np.uint64)
    turned = (crcs >> 15 | crcs << 17) & 0xFFFFFFFF
    masks: npt.NDArray[np.uint32] = (turned + np.uint64(0xA282EAD8)).astype(np.uint32)
    return masks


class Frames(NamedTuple):
    """The frames in a block of bytes."""

    starts: Positions
    lengths: Positions
    end: int
    fault: str


FAULTS = ("", "head", "length", "data")


def scan_frames(buffer: Bytes, stop: int, verify: bool) -> Frames:
    """The frames before ``stop``; CRCs of heads are always looked at, of data with ``verify``."""
    loops = compiled()
    if loops is None:
        return _scan_in_python(buffer, stop, verify)
    parts: list[tuple[Positions, Positions]] = []
    room, end, fault = 4096, 0, 0
    while True:
        starts, lengths = np.empty(room, np.int64), np.empty(room, np.int64)
        count, position, fault = loops.scan_frames(
            buffer[end:], stop - end, verify, starts, lengths
        )
        parts.append((starts[:count] + end, lengths[:count]))
        end += int(position)
        if count < room:
            break
        room *= 4
    found = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
    return Frames(found[0], found[1], end, FAULTS[fault])


def _scan_in_python(buffer: Bytes, stop: int, verify: bool) -> Frames:
    view, begins, lengths = memoryview(buffer.data), [], []
    position = 0
    while position + 12 <= stop:  # one frame more than there is, so that its head is checked, too
        length = int.from_bytes(view[position : position + 8], "little")
        begins.append(position)
        lengths.append(min(length, MAX_RECORD_BYTES))
        position += 16 + length
    at, sizes = np.array(begins, np.int64), np.array(lengths, np.int64)
    good, fault = len(at), ""
    bad = masked_crcs(buffer, at, np.full(len(at), 8)) != _words_at(buffer, at + 8)
    if bad.any():
        good, fault = int(np.argmax(bad)), "head"
    if good and sizes[:good].max() >= MAX_RECORD_BYTES:
        good, fault = int(np.argmax(sizes[:good] >= MAX_RECORD_BYTES)), "length"
    end = int(at[good]) if good < len(at) else position
    if good and at[good - 1] + sizes[good - 1] + 16 > stop:
        good, fault, end = good - 1, "", int(at[good - 1])
    if verify:
        bad = masked_crcs(buffer, at[:good] + 12, sizes[:good]) != _words_at(
            buffer, at[:good] + 12 + sizes[:good]
        )
        if bad.any():
            good, fault = int(np.argmax(bad)), "data"
            end = int(at[good])
    return Frames(at[:good] + 12, sizes[:good], end, fault)


def _words_at(buffer: Bytes, positions: Positions) -> npt.NDArray[np.uint32]:
    found = np.ascontiguousarray(buffer[positions[:, None] + np.arange(4)])
    return found.view("<u4").reshape(-1)


class Fields(NamedTuple):
    """The fields of messages, one per element, ordered by message and then as they came."""

    message: Positions
    number: Positions
    wire: Positions
    start: Positions
    end: Positions

    def where(self, chosen: npt.NDArray[np.bool_] | Positions) -> Fields:
        return Fields(*(column[chosen] for column in self))


def walk(buffer: Bytes, starts: Positions, ends: Positions) -> Fields:
    """All fields of some messages."""
    loops = compiled()
    if loops is None:
        return _walk_in_lockstep(buffer, starts, ends)
    parts, done, room = [], 0, max(2 * len(starts), 64)
    while done < len(starts):
        out = np.empty((room, 5), np.int64)
        rows, messages, malformed = loops.walk(buffer, starts[done:], ends[done:], out)
        out = out[:rows]
        out[:, 0] += done
        parts.append(out)
        done += messages
        if malformed:
            raise MalformedError(done, "a message that ends in the middle of a field")
        room = max(room * 2, 64)
    table = parts[0] if len(parts) == 1 else np.concatenate([np.empty((0, 5), np.int64), *parts])
    return Fields(*np.ascontiguousarray(table.T))


def _walk_in_lockstep(buffer: Bytes, starts: Positions, ends: Positions) -> Fields:
    message = np.flatnonzero(starts < ends)
    position, found = starts[message], []
    while len(message):
        end = ends[message]
        tag, begin, bad = _varints_at(buffer, position, end)
        wire, number = (tag & 7).astype(np.int64), (tag >> 3).astype(np.int64)
        bad |= (number < 1) | (number > 0x1FFFFFFF) | (wire > 5) | (wire == 3) | (wire == 4)
        value, behind, cut = _varints_at(buffer, begin, end)
        bad |= cut & ((wire == 0) | (wire == 2))
        left = (end - behind).astype(np.uint64)
        too_long = (wire == 2) & ~cut & (value > left)
        bad |= too_long
        start = np.where(wire == 2, behind, begin)
        length = np.where(wire == 2, np.where(too_long, 0, value).astype(np.int64), 0)
        length += np.where(wire == 5, 4, np.where(wire == 1, 8, 0))
        position = np.where(wire == 0, behind, start + length)
        bad |= position > end
        if bad.any():
            index = int(message[bad].min())
            raise MalformedError(index, "a message that ends in the middle of a field")
        found.append(np.stack([message, number, wire, start, position]))
        more = position < end
        message, position = message[more], position[more]
    if not found:
        return Fields(*np.empty((5, 0), np.int64))
    table = np.concatenate(found, axis=1)
    return Fields(*table[:, np.argsort(table[0], kind="stable")])


def _varints_at(
    buffer: Bytes, position: Positions, end: Positions
) -> tuple[npt.NDArray[np.uint64], Positions, npt.NDArray[np.bool_]]:
    """One varint at each position: values, positions behind, whether it does not end in time."""
    last = len(buffer) - 1
    byte = buffer[np.minimum(position, last)].astype(np.uint64)
    value: npt.NDArray[np.uint64] = byte & np.uint64(0x7F)
    behind = position + 1
    going = byte >= 0x80
    for i in range(1, 10):
        if not going.any():
            break
        byte = buffer[np.minimum(behind, last)].astype(np.uint64)
        value |= np.where(going, (byte & 0x7F) << (7 * i), 0).astype(np.uint64)
        behind += going
        going &= byte >= 0x80
    return value, behind, going | (behind > end)


def copy_spans(
    source: Bytes, starts: Positions, lengths: Positions, target: Bytes, target_starts: Positions
) -> None:
    """Copies spans of bytes to their places in ``target``."""
    loops = compiled()
    if loops is not None:
        loops.copy_spans(source, starts, lengths, target, target_starts)
        return
    if len(starts) and lengths.mean() >= 48:
        for start, length, to in zip(
            starts.tolist(), lengths.tolist(), target_starts.tolist(), strict=True
        ):
            target[to : to + length] = source[start : start + length]
        return
    for part in range(0, len(starts), 65536):
        counts = lengths[part : part + 65536]
        inner = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        target[np.repeat(target_starts[part : part + 65536], counts) + inner] = source[
            np.repeat(starts[part : part + 65536], counts) + inner
        ]


def gather_spans(source: Bytes, starts: Positions, lengths: Positions) -> Bytes:
    """The spans one after the other, in new memory.

    Arrow's allocator keeps what was freed, so that the memory of the block before serves again;
    fresh pages would take as long as the copy.
    """
    ends = np.cumsum(lengths)
    size = int(ends[-1]) if len(ends) else 0
    out = np.frombuffer(pa.allocate_buffer(size), np.uint8) if size else np.empty(0, np.uint8)
    copy_spans(source, starts, lengths, out, ends - lengths)
    return out


class Index(NamedTuple):
    """The places of the values of features in Examples: an array of names and records each.

    Args:
        kinds: The kind of the list; -1 where a record has no such feature.
        begins: Where packed numbers begin, or texts as fields; nothing for single numbers.
        stops: Where they end.
        values: The single numbers; of floats the bits.
    """

    kinds: npt.NDArray[np.int8]
    begins: Positions
    stops: Positions
    values: npt.NDArray[np.int64]


def index_examples(
    buffer: Bytes,
    starts: Positions,
    ends: Positions,
    names: Sequence[bytes],
    is_single: Sequence[bool],
) -> Index | None:
    """Finds some features of Examples in one pass.

    Returns:
        None if a record is not of the form that writers write, or without numba.
    """
    loops = compiled("kernels")
    if loops is None:
        return None
    name_starts = np.cumsum([0, *(len(name) for name in names)], dtype=np.int64)
    text = np.frombuffer(b"".join(names) + bytes(PADDING), np.uint8).copy()
    shape = (len(names), len(starts))
    found = Index(
        np.full(shape, -1, np.int8), *(np.empty(shape, np.int64) for _ in Index._fields[1:])
    )
    single = np.array(is_single, np.bool_)
    good = loops.index_examples(buffer, starts, ends, text, name_starts, single, *found)
    return found if good else None


def read_varints(
    buffer: Bytes, starts: Positions, lengths: Positions
) -> tuple[npt.NDArray[np.int64], Positions]:
    """The varints in each span: all values, and how many each span has."""
    loops = compiled()
    if loops is None:
        return _read_in_lockstep(buffer, starts, lengths)
    values, counts = np.empty(int(lengths.sum()), np.int64), np.empty(len(starts), np.int64)
    bad = loops.read_varints(buffer, starts, lengths, values, counts)
    if bad >= 0:
        raise MalformedError(int(bad), "an integer that does not end")
    return values[: int(counts.sum())], counts


def _read_in_lockstep(
    buffer: Bytes, starts: Positions, lengths: Positions
) -> tuple[npt.NDArray[np.int64], Positions]:
    data = gather_spans(buffer, starts, lengths)
    last = data < 0x80
    ends = np.flatnonzero(last)
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1] + 1])[: len(ends)]
    stops = np.cumsum(lengths)
    counts = np.diff(np.concatenate([[0], np.cumsum(last)])[np.concatenate([[0], stops])])
    unfinished = (lengths > 0) & ~last[np.maximum(stops - 1, 0)] if len(data) else lengths > 0
    sizes = ends - begins + 1
    if (sizes > 10).any() or unfinished.any():
        long = begins[sizes > 10][:1]
        spans = [*np.searchsorted(stops, long, side="right"), *np.flatnonzero(unfinished)[:1]]
        raise MalformedError(int(min(spans)), "an integer that does not end")
    values = np.zeros(len(ends), np.uint64)
    for i in range(int(sizes.max()) if len(sizes) else 0):
        rows = np.flatnonzero(sizes > i)
        values[rows] |= (data[begins[rows] + i] & np.uint8(0x7F)).astype(np.uint64) << (7 * i)
    return values.view(np.int64), counts


def varint_sizes(values: npt.NDArray[np.uint64]) -> Positions:
    """Bytes of each value as a varint.

    >>> varint_sizes(np.array([0, 127, 128, 2**64 - 1], np.uint64)).tolist()
    [1, 1, 2, 10]
    """
    limits = np.array([1 << 7 * i for i in range(1, 10)], np.uint64)
    return np.searchsorted(limits, values, side="right") + 1


def write_varints(values: npt.NDArray[np.uint64], target: Bytes, starts: Positions) -> None:
    """Writes each value as a varint to its place."""
    loops = compiled()
    if loops is not None:
        loops.write_varints(values, target, starts)
        return
    while len(values):
        more = values >= 0x80
        target[starts] = (values & 0x7F).astype(np.uint8) | (more.astype(np.uint8) << 7)
        values, starts = values[more] >> np.uint64(7), starts[more] + 1


def crcs_in_lockstep(
    buffer: Bytes, starts: Positions, lengths: Positions
) -> npt.NDArray[np.uint32]:
    """Each span is cut into pieces of one size, the first filled up with zeros in front.

    Zeros do not change a CRC that begins with 0; that it begins with all ones is the same as
    turning the bits of the span's first four bytes.
    """
    if not len(starts):
        return np.empty(0, np.uint32)
    size = int(np.clip(1 << int(np.mean(lengths)).bit_length(), 16, 1024))
    while size > len(buffer):
        size //= 2
    windows = np.ndarray((len(buffer) - size + 1, size), np.uint8, buffer, 0, (1, 1))
    crcs = np.zeros(len(starts), np.uint32)
    pieces = np.maximum(-(-lengths // size), 1)
    for number in range(int(pieces.max())):  # a long span has many: then there are few spans
        rows = np.flatnonzero(pieces > number)
        first = lengths[rows] - (pieces[rows] - number) * size  # below 0 where it is filled up
        at = starts[rows] + first
        data = windows[np.maximum(at, 0)]
        for row in np.flatnonzero(at < 0):
            data[row, -at[row] :] = buffer[: size + at[row]]
        if number == 0:
            data[np.arange(size) < -first[:, None]] = 0
        if number <= 1:  # the first four bytes may begin in the first piece and end in the second
            for byte in range(4):
                inside = np.flatnonzero((first <= byte) & (byte - first < size))
                data[inside, byte - first[inside]] ^= 0xFF
        crcs[rows] = _shifted(crcs[rows], size) ^ _crcs_of_rows(data)
    crcs ^= np.uint32(0xFFFFFFFF)
    for row in np.flatnonzero(lengths < 4):
        crcs[row] = crc32c_by_table(buffer[starts[row] : starts[row] + lengths[row]].tobytes())
    return crcs


def _crcs_of_rows(data: Bytes) -> npt.NDArray[np.uint32]:
    tables = slicing_tables()
    words = np.ascontiguousarray(data).view("<u8")
    crcs = np.zeros(len(data), np.uint64)
    for column in range(words.shape[1]):
        word = words[:, column] ^ crcs
        new = tables[0][word >> 56]
        for i in range(7):
            new ^= tables[7 - i][(word >> (8 * i)) & 0xFF]
        crcs = new.astype(np.uint64)
    return crcs.astype(np.uint32)


@cache
def _shift_tables(size: int) -> npt.NDArray[np.uint32]:
    """The effect of ``size`` zero bytes on each byte of a CRC; shape (4, 256)."""
    crcs = (np.arange(256, dtype=np.uint32) << (8 * np.arange(4, dtype=np.uint32))[:, None]).ravel()
    table = slicing_tables()[0]
    for _ in range(size):
        crcs = table[crcs & 0xFF] ^ crcs >> 8
    return crcs.reshape(4, 256)


def _shifted(crcs: npt.NDArray[np.uint32], size: int) -> npt.NDArray[np.uint32]:
    tables = _shift_tables(size)
    found: npt.NDArray[np.uint32] = tables[3][crcs >> 24]
    for i in range(3):
        found ^= tables[i][crcs >> (8 * i) & 0xFF]
    return found
