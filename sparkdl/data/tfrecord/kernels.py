"""The loops of the codec, compiled by numba, which is an extra: `loops` alone imports this.

Every position is checked against the end of its message before a byte is read, whatever the bytes
say. Arrays of bytes are writable uint8 arrays of their own memory, positions are int64.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import binding, ir
from llvmlite.ir import IRBuilder, Value
from numba import njit, types
from numba.core import cgutils
from numba.core.types import Type
from numba.core.typing import Context, Signature
from numba.extending import intrinsic

from sparkdl.data.tfrecord.framing import MAX_RECORD_BYTES, slicing_tables

_TABLES = slicing_tables()
Values = Sequence[Value]
_MASK = 0xA282EAD8
_INSTRUCTIONS = {  # processor: (what it must have, per 8 bytes: name, bits of the sum; per byte)
    "x86_64": ("sse4.2", "llvm.x86.sse42.crc32.64.64", 64, "llvm.x86.sse42.crc32.32.8", 8),
    "aarch64": ("crc", "llvm.aarch64.crc32cx", 32, "llvm.aarch64.crc32cb", 32),
}
_FOUND = _INSTRUCTIONS.get(platform.machine().replace("arm64", "aarch64").replace("AMD", "x86_"))
HAS_INSTRUCTION = _FOUND is not None and bool(binding.get_host_cpu_features().get(_FOUND[0]))


@intrinsic
def load_word(context: Context, array: Type, position: Type) -> Any:
    """Eight bytes as a little-endian number, at any position."""

    def generate(context: Any, builder: IRBuilder, signature: Signature, arguments: Values) -> Any:
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        pointer = builder.gep(made.data, [arguments[1]])
        word = builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.int64), generate


@intrinsic
def _add_word(context: Context, crc: Type, word: Type) -> Any:
    """The CRC after eight more bytes, by the processor's instruction."""

    def generate(context: Any, builder: IRBuilder, signature: Signature, arguments: Values) -> Any:
        assert _FOUND is not None
        crc_type, word_type = ir.IntType(_FOUND[2]), ir.IntType(64)
        function = builder.module.declare_intrinsic(
            _FOUND[1], fnty=ir.FunctionType(crc_type, [crc_type, word_type])
        )
        crc = arguments[0] if _FOUND[2] == 64 else builder.trunc(arguments[0], crc_type)
        added = builder.call(function, [crc, arguments[1]])
        return added if _FOUND[2] == 64 else builder.zext(added, word_type)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _add_byte(context: Context, crc: Type, byte: Type) -> Any:
    """The CRC after one more byte, by the processor's instruction."""

    def generate(context: Any, builder: IRBuilder, signature: Signature, arguments: Values) -> Any:
        assert _FOUND is not None
        crc_type, byte_type = ir.IntType(32), ir.IntType(_FOUND[4])
        function = builder.module.declare_intrinsic(
            _FOUND[3], fnty=ir.FunctionType(crc_type, [crc_type, byte_type])
        )
        crc = builder.trunc(arguments[0], crc_type)
        byte = arguments[1] if _FOUND[4] == 8 else builder.zext(arguments[1], byte_type)
        return builder.zext(builder.call(function, [crc, byte]), ir.IntType(64))

    return types.uint64(types.uint64, types.uint8), generate


@intrinsic
def _copy(context: Context, source: Type, start: Type, target: Type, to: Type, length: Type) -> Any:
    def generate(context: Any, builder: IRBuilder, signature: Signature, arguments: Values) -> Any:
        first = context.make_array(signature.args[0])(context, builder, arguments[0])
        second = context.make_array(signature.args[2])(context, builder, arguments[2])
        cgutils.raw_memcpy(
            builder, builder.gep(second.data, [arguments[3]]),
            builder.gep(first.data, [arguments[1]]), arguments[4], 1,
        )  # fmt: skip
        return context.get_dummy_value()

    whole = types.int64
    return types.void(source, whole, target, whole, whole), generate


@njit(cache=True, nogil=True)
def _masked_crc_by_instruction(buffer, start, stop):
    crc = np.uint64(0xFFFFFFFF)
    while start + 8 <= stop:
        crc = _add_word(crc, load_word(buffer, start))
        start += 8
    while start < stop:
        crc = _add_byte(crc, buffer[start])
        start += 1
    crc = (crc ^ np.uint64(0xFFFFFFFF)) & np.uint64(0xFFFFFFFF)
    turned = (crc >> np.uint64(15)) | (crc << np.uint64(17))
    return np.uint32(((turned & np.uint64(0xFFFFFFFF)) + np.uint64(_MASK)) & np.uint64(0xFFFFFFFF))


@njit(cache=True, nogil=True)
def _masked_crc_by_tables(buffer, start, stop):
    crc = np.uint64(0xFFFFFFFF)
    low = np.uint64(0xFF)
    while start + 8 <= stop:
        word = load_word(buffer, start) ^ crc
        crc = np.uint64(0)
        for i in range(8):
            crc ^= np.uint64(_TABLES[7 - i, (word >> np.uint64(8 * i)) & low])
        start += 8
    while start < stop:
        crc = np.uint64(_TABLES[0, (crc ^ np.uint64(buffer[start])) & low]) ^ (crc >> np.uint64(8))
        start += 1
    crc ^= np.uint64(0xFFFFFFFF)
    turned = (crc >> np.uint64(15)) | (crc << np.uint64(17))
    return np.uint32(((turned & np.uint64(0xFFFFFFFF)) + np.uint64(_MASK)) & np.uint64(0xFFFFFFFF))


_masked_crc = _masked_crc_by_instruction if HAS_INSTRUCTION else _masked_crc_by_tables


@njit(cache=True, nogil=True)
def masked_crcs(buffer, starts, lengths):
    crcs = np.empty(len(starts), np.uint32)
    for i in range(len(starts)):
        crcs[i] = _masked_crc(buffer, starts[i], starts[i] + lengths[i])
    return crcs


@njit(cache=True, nogil=True)
def scan_frames(buffer, stop, verify, starts, lengths):
    """The whole frames before ``stop``: ``(number, where the next begins, what is wrong there)``.

    Wrong is: 0 nothing (cut off by ``stop``, or no room for more), 1 the head, 2 its length,
    3 the data.
    """
    position, number = np.int64(0), 0
    while number < len(starts) and position + 12 <= stop:
        crc = np.uint32(load_word(buffer, position + 4) >> np.uint64(32))
        if crc != _masked_crc(buffer, position, position + 8):
            return number, position, 1
        length = load_word(buffer, position)
        if length >= np.uint64(MAX_RECORD_BYTES):
            return number, position, 2
        start = position + 12
        end = start + np.int64(length)
        if end + 4 > stop:
            break
        if verify:
            crc = np.uint32(load_word(buffer, end - 4) >> np.uint64(32))
            if crc != _masked_crc(buffer, start, end):
                return number, position, 3
        starts[number] = start
        lengths[number] = np.int64(length)
        number += 1
        position = end + 4
    return number, position, 0


@njit(cache=True, nogil=True)
def varint(buffer, position, end):
    """``(value, position behind it)``; the position is -1 if it does not end in time."""
    value, shift = np.uint64(0), np.uint64(0)
    for _ in range(10):
        if position >= end:
            break
        byte = np.uint64(buffer[position])
        value |= (byte & np.uint64(0x7F)) << shift
        position += 1
        if byte < np.uint64(0x80):
            return value, position
        shift += np.uint64(7)
    return value, np.int64(-1)


@njit(cache=True, nogil=True)
def walk(buffer, starts, ends, out):
    """The fields of messages as rows of ``out``: message, number, wire type, start, end.

    Returns:
        ``(rows, messages done, whether the next message is malformed)``. Where ``out`` had too
        little room, not all messages are done, and none is malformed.
    """
    rows = 0
    for message in range(len(starts)):
        position, end, first = starts[message], ends[message], rows
        while position < end:
            if rows == len(out):
                return first, message, False
            tag, position = varint(buffer, position, end)
            if position < 0:
                return first, message, True
            wire = np.int64(tag & np.uint64(7))
            number = np.int64(tag >> np.uint64(3))
            if number < 1 or number > 0x1FFFFFFF:
                return first, message, True
            begin = position
            if wire == 2:
                length, position = varint(buffer, position, end)
                if position < 0 or length > np.uint64(end - position):
                    return first, message, True
                begin = position
                position += np.int64(length)
            elif wire == 0:
                _, position = varint(buffer, position, end)
                if position < 0:
                    return first, message, True
            elif wire == 5:
                position += 4
            elif wire == 1:
                position += 8
            else:
                return first, message, True
            if position > end:
                return first, message, True
            out[rows, 0] = message
            out[rows, 1] = number
            out[rows, 2] = wire
            out[rows, 3] = begin
            out[rows, 4] = position
            rows += 1
    return rows, len(starts), False


@njit(cache=True, nogil=True)
def copy_spans(source, starts, lengths, target, target_starts):
    for i in range(len(starts)):
        _copy(source, starts[i], target, target_starts[i], lengths[i])


@njit(cache=True, nogil=True)
def read_varints(buffer, starts, lengths, values, counts):
    """Decodes spans of varints into ``values``, and counts those of each span.

    Returns:
        The span that ends in the middle of a varint, or -1.
    """
    number = 0
    for i in range(len(starts)):
        position, end, first = starts[i], starts[i] + lengths[i], number
        while position < end:
            value, shift, going = np.uint64(0), np.uint64(0), np.uint8(1)
            stop = min(end, position + 10)
            while going != 0 and position < stop:
                byte = np.uint64(buffer[position])
                value |= (byte & np.uint64(0x7F)) << shift
                shift += np.uint64(7)
                position += 1
                going = np.uint8(byte >> np.uint64(7))
            if going != 0:
                return i
            values[number] = np.int64(value)
            number += 1
        counts[i] = number - first
    return -1


@njit(cache=True, nogil=True)
def write_varints(values, target, starts):
    for i in range(len(values)):
        value, to = values[i], starts[i]
        while value >= np.uint64(0x80):
            target[to] = np.uint8(value & np.uint64(0x7F)) | np.uint8(0x80)
            value >>= np.uint64(7)
            to += 1
        target[to] = np.uint8(value)


@njit(cache=True, nogil=True)
def _take(buffer, position, end, tag):
    """``(start, end)`` of the field that begins here, if it has this tag; else -1 for both."""
    if position + 1 >= end or buffer[position] != tag:
        return np.int64(-1), np.int64(-1)
    short = np.int64(buffer[position + 1])
    if short < 0x80:
        stop = position + 2 + short
        return (position + 2, stop) if stop <= end else (np.int64(-1), np.int64(-1))
    length, start = varint(buffer, position + 1, end)
    if start < 0 or length > np.uint64(end - start):
        return np.int64(-1), np.int64(-1)
    return start, start + np.int64(length)


@njit(cache=True, nogil=True)
def _same(buffer, at, names, name, length):
    """Whether two texts of one length are equal; at least 8 bytes may be read behind each."""
    while length >= 8:
        if load_word(buffer, at) != load_word(names, name):
            return False
        at, name, length = at + 8, name + 8, length - 8
    mask = (np.uint64(1) << np.uint64(8 * length)) - np.uint64(1)
    return (load_word(buffer, at) ^ load_word(names, name)) & mask == np.uint64(0)


@njit(cache=True, nogil=True)
def _short_number(buffer, position, end, names, name, length):
    """``(kind, bits, position behind it)`` of a feature that has this key and one number.

    Only of a feature whose lengths take a byte each, as nearly all do: tags and lengths are then
    known from the key's length and the number's, and are compared all at once. The position is -1
    for any other feature.
    """
    other = (np.int64(0), np.int64(0), np.int64(-1))
    at = position + 4 + length  # behind the key
    if length > 100 or at + 7 > end:
        return other
    word = load_word(buffer, at)  # value: tag, length; list: tag, length; numbers: tag, length
    kind = (word >> np.uint64(19)) & np.uint64(0x1F)
    size = (word >> np.uint64(40)) & np.uint64(0xFF)
    behind = at + 6 + np.int64(size)
    if size == np.uint64(0) or size > np.uint64(8) or behind > end:
        return other
    value = np.uint64(0x12) | ((size + np.uint64(4)) << np.uint64(8))
    listed = np.uint64(2) | (kind << np.uint64(3)) | ((size + np.uint64(2)) << np.uint64(8))
    packed = np.uint64(0x0A) | (size << np.uint64(8))
    if word & np.uint64(0xFFFFFFFFFFFF) != (
        value | (listed << np.uint64(16)) | (packed << np.uint64(32))
    ):
        return other
    entry = np.uint64(0x0A) | ((size + np.uint64(length) + np.uint64(8)) << np.uint64(8))
    key = np.uint64(0x0A) | (np.uint64(length) << np.uint64(8))
    if load_word(buffer, position) & np.uint64(0xFFFFFFFF) != entry | (key << np.uint64(16)):
        return other
    if not _same(buffer, position + 4, names, name, length):
        return other
    unused = np.uint64(8) * (np.uint64(8) - size)
    bits = load_word(buffer, at + 6) << unused >> unused
    if kind == np.uint64(2):
        return (np.int64(2), np.int64(bits), behind) if size == np.uint64(4) else other
    # Of a varint all bytes but the last have the highest bit; the others are seven bits each.
    going = np.uint64(0x0080808080808080) & (
        (np.uint64(1) << (np.uint64(8) * size - np.uint64(8))) - np.uint64(1)
    )
    if kind != np.uint64(3) or bits & np.uint64(0x8080808080808080) != going:
        return other
    bits = (bits & np.uint64(0x007F007F007F007F)) | (
        (bits & np.uint64(0x7F007F007F007F00)) >> np.uint64(1)
    )
    bits = (bits & np.uint64(0x00003FFF00003FFF)) | (
        (bits & np.uint64(0x3FFF00003FFF0000)) >> np.uint64(2)
    )
    bits = (bits & np.uint64(0x000000000FFFFFFF)) | (
        (bits & np.uint64(0x0FFFFFFF00000000)) >> np.uint64(4)
    )
    return np.int64(3), np.int64(bits), behind


@njit(cache=True, nogil=True)
def index_examples(
    buffer, starts, ends, names, name_starts, is_single, kinds, begins, stops, values
):
    """Finds the lists of the named features in Examples as writers write them.

    Returns:
        Whether all records were of that form: one Features, in each entry a key and then a value,
        numbers packed in one piece, one where one is to be. If not, nothing is known.
    """
    columns, guess = len(name_starts) - 1, 0
    for record in range(len(starts)):
        if starts[record] == ends[record]:
            continue
        position, features_end = _take(buffer, starts[record], ends[record], 0x0A)
        if position < 0 or features_end != ends[record]:
            return False
        while position < features_end:
            if columns > 0 and is_single[guess]:
                length = name_starts[guess + 1] - name_starts[guess]
                short, bits, behind = _short_number(
                    buffer, position, features_end, names, name_starts[guess], length
                )
                if behind >= 0:
                    kinds[guess, record] = short
                    values[guess, record] = bits
                    position = behind
                    guess = guess + 1 if guess + 1 < columns else 0
                    continue
            entry, entry_end = _take(buffer, position, features_end, 0x0A)
            if entry < 0:
                return False
            key, key_end = _take(buffer, entry, entry_end, 0x0A)
            if key < 0:
                return False
            value, value_end = _take(buffer, key_end, entry_end, 0x12)
            if value < 0 or value_end != entry_end:
                return False
            position = entry_end
            column = -1
            for i in range(columns):
                tried = guess + i if guess + i < columns else guess + i - columns
                length = name_starts[tried + 1] - name_starts[tried]
                if length == key_end - key and _same(
                    buffer, key, names, name_starts[tried], length
                ):
                    column = tried
                    break
            if column < 0:
                continue
            guess = column + 1 if column + 1 < columns else 0
            begin, stop, kind = value, value, np.int64(0)
            if value < value_end:
                tag = np.int64(buffer[value])
                begin, stop = _take(buffer, value, value_end, tag)
                kind = tag >> 3
                if begin < 0 or stop != value_end or tag & 7 != 2 or kind < 1 or kind > 3:
                    return False
                if kind > 1 and begin < stop:
                    begin, stop = _take(buffer, begin, stop, 0x0A)
                    if begin < 0 or stop != value_end:
                        return False
            kinds[column, record] = kind
            if not is_single[column] or kind == 0:
                begins[column, record] = begin
                stops[column, record] = stop
            elif kind == 3:
                number, behind = varint(buffer, begin, stop)
                if behind != stop:
                    return False
                values[column, record] = np.int64(number)
            else:
                if kind != 2 or stop - begin != 4:
                    return False
                bits = load_word(buffer, begin) & np.uint64(0xFFFFFFFF)
                values[column, record] = np.int64(bits)
    return True
