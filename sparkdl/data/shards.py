"""Files dealt to those who read them; several of them read ahead, block by block."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, tzinfo
from datetime import time as clock
from decimal import Decimal
from itertools import islice
from typing import Any, BinaryIO, Generic, TypeVar
from zoneinfo import ZoneInfo

import pyarrow as pa

from sparkdl.data.tfrecord.blocks import Block, Codec, decompressed, read_blocks
from sparkdl.errors import ConfigError
from sparkdl.files.listing import unescaped
from sparkdl.process.host_load import LoadMeter

T = TypeVar("T")
Pieces = Sequence[Callable[[], Iterator[T]]]
"""Pieces of an open file, in its order; each is a call that reads its items."""

MOST_READERS = 4
_WAIT_SHARE = 0.1
"""One reader is too few if its items are waited for longer than that, as a share of all time."""
_DECODING_SHARE = 0.5
"""A reader that computes for less of its time waits for the files, which takes no processor."""
_RECENT = 8
"""The items whose waits are compared."""
_KNOWN_S = 0.01
"""Seconds of reading after which it is known whether files are waited for."""
_FREE_KNOWN_S = 0.1
"""Seconds of reading after which it is known whether a processor is free."""
_LOOK_S = 0.1
_CLOSE_S = 10.0

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


_WHOLE = re.compile(r"[+-]?\d+")
_EXACT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?")
_DOUBLE = re.compile(
    r"[\0- ]*[+-]?(Infinity|NaN|((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|"
    r"0[xX]([\da-fA-F]+\.?|[\da-fA-F]*\.[\da-fA-F]+)[pP][+-]?\d+)[dDfF]?)[\0- ]*",
    re.ASCII,
)
_MOMENT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d)?", re.ASCII)
_CLOCK = re.compile(r"\d\d:\d\d:\d\d(\.\d{1,6})?", re.ASCII)


def _float(text: str) -> float:
    number = text.strip().rstrip("dDfF")
    return float.fromhex(number) if "x" in number.lower() else float(number)


_PARSERS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[str], Any]], ...] = (
    (pa.types.is_integer, int),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date, date.fromisoformat),
    (pa.types.is_time, lambda text: clock.fromisoformat(unescaped(text))),
    (pa.types.is_timestamp, lambda text: datetime.fromisoformat(unescaped(text))),
)
"""Kinds of Arrow's types, and how a folder's text becomes a value of them."""


@dataclass(frozen=True)
class FolderTypes:
    """How a session of Spark types the columns that folders give.

    Args:
        zone: Its time zone; empty: its times have none; None: not known, and such are texts.
        clock: Whether it knows times of the day, as Spark does from 4.1 on.
        infers: Whether all are texts otherwise.
    """

    zone: str | None = None
    clock: bool = False
    infers: bool = True

    def of(self, texts: Iterable[str]) -> pa.DataType:
        """The type of a column that folders ``name=text`` give, as Spark infers it.

        >>> FolderTypes().of(['1', '0.5']), FolderTypes().of(['1', 'a'])
        (DataType(double), DataType(string))
        """
        said = {text for text in texts if text != NO_VALUE}
        found = set(map(self._of_text, said)) if self.infers or not said else {pa.string()}
        if len(found) < 2:
            return found.pop() if found else pa.null()
        if found == {pa.int32(), pa.int64()}:
            return pa.int64()
        if found == {pa.int32(), pa.float64()}:
            return pa.float64()
        if len(found) == 2 and found - {pa.date32()} == {self._moment}:
            return self._moment
        exact = {kind.precision for kind in found if pa.types.is_decimal(kind)}
        wide = {20 if kind == pa.int64() else 10 for kind in found if pa.types.is_integer(kind)}
        if exact and all(pa.types.is_decimal(k) or pa.types.is_integer(k) for k in found):
            return pa.decimal128(max(exact | wide))
        return pa.string()

    @property
    def _moment(self) -> pa.DataType:
        return pa.timestamp("us", self.zone or None)

    def _of_text(self, text: str) -> pa.DataType:
        if _WHOLE.fullmatch(text):
            bits = (int(text) if int(text) >= 0 else ~int(text)).bit_length()
            if bits < 64:
                return pa.int32() if bits < 32 else pa.int64()
        number = Decimal(text) if _EXACT.fullmatch(text) else Decimal("NaN")
        if number.is_finite() and int(number.as_tuple().exponent) >= 0 and number.adjusted() < 38:
            return pa.decimal128(number.adjusted() + 1)
        if _DOUBLE.fullmatch(text):
            return pa.float64()
        whole = unescaped(text)
        with contextlib.suppress(ValueError):
            if self.clock and _CLOCK.fullmatch(whole):
                return pa.scalar(clock.fromisoformat(whole)).type
            if self.zone is not None and _MOMENT.fullmatch(whole) and datetime.fromisoformat(whole):
                return self._moment
            if date.fromisoformat(text).isoformat() == text:
                return pa.date32()
        return pa.string()


def folder_column(text: str, field: pa.Field, rows: int, zone: str | None = "") -> pa.Array:
    """The column that a folder ``name=text`` gives to the rows of its files; times in a ``zone``.

    Raises:
        ConfigError: The text is no value of the column's type.

    >>> folder_column('3', pa.field('day', pa.int64()), 2).to_pylist()
    [3, 3]
    """
    if text == NO_VALUE:
        return pa.nulls(rows, field.type)
    parse = next((parse for fits, parse in _PARSERS if fits(field.type)), unescaped)
    try:
        value = parse(text)
        if isinstance(value, datetime) and field.type.tz and value.tzinfo is None:
            value = value.replace(tzinfo=_zone(zone or "UTC"))
        return pa.repeat(pa.scalar(value).cast(field.type), rows)
    except (ValueError, ArithmeticError, LookupError, pa.ArrowException) as error:
        raise ConfigError(
            f"folder {field.name}={text}: not of the column's type",
            expected=f"a value of {field.type}", received=f"{text} ({error})",
        ) from error  # fmt: skip


def _zone(name: str) -> tzinfo | None:
    """The zone of a session, which may be called GMT+08:00."""
    offset = re.fullmatch(r"(?:UTC|GMT|UT)?([+-]\d\d:?\d\d)", name)
    return (
        datetime.fromisoformat(f"2000-01-01 00:00{offset[1]}").tzinfo if offset else ZoneInfo(name)
    )


def read_files(
    files: Sequence[Callable[[], Pieces[T]]], readers: int | None = None
) -> Generator[T]:
    """The items of files in order: file after file, and in each file piece after piece.

    Readers are threads. Each opens the first file, or reads the first piece, that no reader has
    begun. Items that wait to be taken, and those that are being read, are at most two for each
    reader, and at most two of a piece wait. Neither the items nor their order depend on the number
    of readers. The readers end with the generator, also when that is closed early; a reader that
    does not end within 10 s, because its file system hangs, is left behind.

    Args:
        files: Calls that open a file each, in the thread of a reader.
        readers: The number of readers. None: one at first; more, up to four, as soon as whoever
            takes the items waits for them for more than a tenth of its time. Readers that compute,
            and do not wait for files, are no more than one and the processors that have nothing to
            do; where no kernel tells that, one.

    Raises:
        Exception: The error of a file or piece, after all items that come before it.

    >>> list(read_files([lambda: [lambda: iter("ab"), lambda: iter("c")], lambda: []]))
    ['a', 'b', 'c']
    """
    reading = _Reading(files, grows=readers is None)
    try:
        reading.start(readers or 1)
        while (item := reading.take()) is not None:
            yield item[0]
    finally:
        reading.close()


@dataclass(frozen=True)
class ReadTime:
    """Seconds of all readers, by what they went into.

    Args:
        read_s: All seconds in which they opened and read files.
        computed_s: A processor worked for them.
        queued_s: They waited for a processor; 0 where the system does not tell.
    """

    read_s: float = 0.0
    computed_s: float = 0.0
    queued_s: float = 0.0

    def useful_readers(
        self, wait_share: float, free_processors: Callable[[], float], *, first: bool
    ) -> int:
        """The number of readers that are of use.

        Args:
            wait_share: The share of its time in which whoever takes the items waited.
            free_processors: Tells how many processors of this machine had nothing to do while one
                reader read; asked only if readers compute.
            first: Whether the wait is for the first item, which is waited for in any case.

        >>> far, decoded = ReadTime(2.0, 0.1), ReadTime(2.0, 1.9)
        >>> far.useful_readers(0.05, lambda: 8.0, first=False)
        1
        >>> far.useful_readers(0.5, lambda: 0.0, first=False)
        4
        >>> decoded.useful_readers(0.5, lambda: 0.9, first=False)
        2
        """
        if self.read_s < _KNOWN_S or wait_share < _WAIT_SHARE:
            return 1
        if self.computed_s + self.queued_s < _DECODING_SHARE * self.read_s:
            return MOST_READERS
        if first or self.read_s < _FREE_KNOWN_S:
            return 1
        return min(MOST_READERS, 1 + round(free_processors()))


class _Place(Generic[T]):
    """A file that is to be opened, or a piece of one, with those of its items that wait."""

    def __init__(
        self,
        open_file: Callable[[], Pieces[T]] = list,
        read: Callable[[], Iterator[T]] | None = None,
    ) -> None:
        self.open_file, self.read = open_file, read
        self.items: deque[T] = deque()
        self.begun = self.ended = False
        self.error: BaseException | None = None


class _Reading(Generic[T]):
    """The readers of :func:`read_files`, and the places that they fill."""

    def __init__(self, files: Sequence[Callable[[], Pieces[T]]], grows: bool) -> None:
        self._places: list[_Place[T]] = [_Place(open_file) for open_file in files]
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._held = 0  # items that wait, or are being read
        self._closed = False
        self._grows = grows
        self._spent = ReadTime()
        self._meter = LoadMeter(gpus=False)
        self._given = time.perf_counter()
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)  # waited, passed

    def start(self, readers: int) -> None:
        """Starts readers until there are that number."""
        with self._changed:
            while len(self._threads) < readers:
                thread = threading.Thread(target=self._work, name="sparkdl-reader", daemon=True)
                self._threads.append(thread)
                thread.start()

    def take(self) -> tuple[T] | None:
        """The next item; None after the last."""
        asked = time.perf_counter()
        with self._changed:
            while self._places:
                place = self._places[0]
                if place.items:
                    now = time.perf_counter()
                    self._recent.append((now - asked, now - self._given))
                    self._given = now
                    self._held -= 1
                    self._changed.notify_all()
                    return (place.items.popleft(),)
                if place.error is not None:
                    raise place.error
                if place.ended:
                    del self._places[0]
                    self._changed.notify_all()
                    continue
                self._changed.wait(_LOOK_S)
                if self._grows:
                    self._grow(time.perf_counter(), asked)
        return None

    def _grow(self, now: float, asked: float) -> None:
        waited_s = now - asked + sum(waited for waited, _ in self._recent)
        passed_s = now - self._given + sum(passed for _, passed in self._recent)
        share, first = waited_s / passed_s, not self._recent
        self.start(self._spent.useful_readers(share, self._free_processors, first=first))

    def _free_processors(self) -> float:
        load = self._meter.look()
        return 0.0 if load is None else (1 - load.cpu_percent / 100) * (os.cpu_count() or 1)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        until = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (place := self._next_place()) is not None:
            if place.read is None:
                self._open(place)
            else:
                self._fill(place, place.read)

    def _next_place(self) -> _Place[T] | None:
        """The first place that no reader has begun; None if there will be none any more."""
        with self._changed:
            while not self._closed:
                opened = True
                for place in self._places:
                    if place.error is not None:
                        return None
                    if not place.begun:
                        place.begun = True
                        return place
                    opened = opened and place.read is not None
                if opened:
                    return None
                self._changed.wait(_LOOK_S)
        return None

    def _open(self, place: _Place[T]) -> None:
        pieces: Pieces[T] = []
        error = None
        try:
            with self._measured():
                pieces = place.open_file()
        except BaseException as raised:
            error = raised
        with self._changed:
            at = self._places.index(place)
            if error is None:
                self._places[at : at + 1] = [_Place(read=read) for read in pieces]
            place.error = error
            self._changed.notify_all()

    def _fill(self, place: _Place[T], read: Callable[[], Iterator[T]]) -> None:
        items: Iterator[T] | None = None
        while not place.ended and self._may_read(place):
            found: list[T] = []
            error = None
            try:
                with self._measured():
                    items = items or read()
                    found = list(islice(items, 1))
            except BaseException as raised:
                error = raised
            with self._changed:
                place.items.extend(found)
                place.error, place.ended = error, not found
                self._held -= place.ended
                self._changed.notify_all()

    def _may_read(self, place: _Place[T]) -> bool:
        """Waits until there is room for an item; False if nobody wants it any more."""
        with self._changed:
            while not self._closed:
                # The room for the last one belongs to the place whose items are taken now: others
                # could fill it, and wait for that place for ever.
                room = 2 * len(self._threads)
                if place is not self._places[0] and len(self._threads) > 1:
                    room -= 1
                if self._held < room and len(place.items) < 2:
                    self._held += 1
                    return True
                self._changed.wait(_LOOK_S)
        return False

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        began, computed, queued = time.perf_counter(), time.thread_time(), _queued_s()
        try:
            yield
        finally:
            with self._changed:
                spent = self._spent
                self._spent = ReadTime(
                    spent.read_s + time.perf_counter() - began,
                    spent.computed_s + time.thread_time() - computed,
                    spent.queued_s + _queued_s() - queued,
                )


def _queued_s() -> float:
    """Seconds that this thread waited for a processor, as Linux tells; 0 where nobody does."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0
