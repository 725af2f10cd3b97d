"""The compiled loop that finds the features of Examples, if they are as writers write them.

Only :mod:`sparkdl.data.tfrecord.loops` imports this; see :mod:`sparkdl.data.tfrecord.kernels`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sparkdl.data.tfrecord.kernels import load_word, varint


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

    Args:
        buffer, starts, ends: The records.
        names, name_starts: The names, one after the other.
        is_single: Per name, whether its list is to hold one number.
        kinds: Gets the kind of the list, per name and record; -1 before, which stays without the
            feature.
        begins, stops: Get where the packed numbers are, or the texts as fields, for names that are
            not single.
        values: Gets the number of single ones, of a float the bits.

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
