"""Files that several readers read ahead: one order, one error, a bounded number of items."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from sparkdl.data import shards
from sparkdl.data.shards import Pieces, ReadTime, read_files

READERS = [1, 2, 4, 9, None]
SIZES = [[3, 1], [], [0, 5, 0, 2], [1], [7], [0], [2, 2, 2, 2]]


class Source:
    """Files of pieces of items, which are ``(file, piece, number)``; it counts those not taken."""

    def __init__(
        self, sizes: list[list[int]], sleep_s: float = 0.0, broken: tuple[int, ...] = ()
    ) -> None:
        self._sizes, self._sleep_s, self._broken = sizes, sleep_s, broken
        self._lock = threading.Lock()
        self.begun = 0

    def files(self) -> list[Callable[[], Pieces[tuple[int, ...]]]]:
        return [self._file(number) for number in range(len(self._sizes))]

    def _file(self, file: int) -> Callable[[], Pieces[tuple[int, ...]]]:
        def open_file() -> Pieces[tuple[int, ...]]:
            self._raise((file,))
            return [self._piece(file, piece) for piece in range(len(self._sizes[file]))]

        return open_file

    def _piece(self, file: int, piece: int) -> Callable[[], Iterator[tuple[int, ...]]]:
        def read() -> Iterator[tuple[int, ...]]:
            for number in range(self._sizes[file][piece]):
                with self._lock:
                    self.begun += 1
                time.sleep(self._sleep_s * ((file + 2 * piece + number) % 3))
                self._raise((file, piece, number))
                yield file, piece, number

        return read

    def _raise(self, place: tuple[int, ...]) -> None:
        if self._broken == place:
            raise OSError(f"file {place[0]} is broken")

    def items(self) -> list[tuple[int, ...]]:
        return [
            (file, piece, number)
            for file, pieces in enumerate(self._sizes)
            for piece, size in enumerate(pieces)
            for number in range(size)
        ]


def readers_alive() -> int:
    return sum(thread.name == "sparkdl-reader" for thread in threading.enumerate())


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("sleep_s", [0.0, 0.004])
def test_items_come_in_the_order_of_the_files(readers: int | None, sleep_s: float) -> None:
    source = Source(SIZES, sleep_s)
    assert list(read_files(source.files(), readers)) == source.items()
    assert readers_alive() == 0


@pytest.mark.parametrize("readers", READERS)
def test_no_files_and_files_without_anything(readers: int | None) -> None:
    assert list(read_files([], readers)) == []
    assert list(read_files(Source([[], [0], [0, 0]]).files(), readers)) == []
    assert list(read_files(Source([[1]]).files(), readers)) == [(0, 0, 0)]


@pytest.mark.parametrize("readers", READERS)
@pytest.mark.parametrize("place", [(0, 0, 0), (2, 1, 3), (2,), (4, 0, 6), (6, 3, 1), (6,)])
def test_an_error_comes_after_all_items_before_it(
    readers: int | None, place: tuple[int, ...]
) -> None:
    source = Source(SIZES, 0.001, place)
    taken: list[tuple[int, ...]] = []
    with pytest.raises(OSError, match=f"^file {place[0]} is broken$"):
        taken.extend(read_files(source.files(), readers))
    assert taken == [item for item in source.items() if item < place]
    assert readers_alive() == 0


@pytest.mark.parametrize("readers", READERS)
def test_readers_end_with_the_generator(readers: int | None) -> None:
    source = Source([[50] * 3] * 3, 0.002)
    reading = read_files(source.files(), readers)
    assert readers_alive() == 0
    assert list(islice(reading, 20)) == source.items()[:20]
    assert readers_alive() > 0
    reading.close()
    assert readers_alive() == 0
    assert source.begun < 450


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("sizes", [[[1] * 40], [[9], [9], [1], [9] * 2], [[1], [20, 1]] * 3])
def test_readers_are_two_items_each_ahead(readers: int, sizes: list[list[int]]) -> None:
    source = Source(sizes)
    most = 0
    for taken, _ in enumerate(read_files(source.files(), readers), 1):
        for _ in range(10):
            time.sleep(0.001)
            most = max(most, source.begun - taken)
    assert readers <= most <= 2 * readers


def test_a_reader_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_CLOSE_S", 0.05)
    answered = threading.Event()

    def read() -> Iterator[int]:
        yield 1
        answered.wait(60)

    reading = read_files([lambda: [read]], 2)
    assert next(reading) == 1
    began = time.monotonic()
    reading.close()
    assert time.monotonic() - began < 10
    answered.set()


@pytest.mark.parametrize(
    ("spent", "wait_share", "free", "first", "readers"),
    [
        (ReadTime(), 1.0, 8.0, True, 1),  # nothing is read yet
        (ReadTime(1.0, 0.1), 0.09, 8.0, False, 1),  # the items are there when they are wanted
        (ReadTime(1.0, 0.1), 0.11, 0.0, False, 4),  # they are far away, so readers only wait
        (ReadTime(1.0, 0.1), 1.0, 0.0, True, 4),
        (ReadTime(1.0, 0.9), 0.5, 0.4, False, 1),  # they are decoded
        (ReadTime(1.0, 0.9), 0.5, 0.7, False, 2),
        (ReadTime(1.0, 0.9), 0.5, 13.2, False, 4),
        (ReadTime(1.0, 0.9), 1.0, 8.0, True, 1),  # whoever decodes, the first one is waited for
        (ReadTime(0.05, 0.045), 0.5, 8.0, False, 1),  # too early to know which processors are free
        (ReadTime(1.0, 0.4, 0.55), 0.5, 0.0, False, 1),  # others have the processors
    ],
)
def test_more_readers_come_where_they_are_of_use(
    spent: ReadTime, wait_share: float, free: float, first: bool, readers: int
) -> None:
    assert spent.useful_readers(wait_share, lambda: free, first=first) == readers


@pytest.mark.parametrize("free", [0.2, 1.8])
@pytest.mark.parametrize("far", [True, False])
def test_readers_that_are_waited_for_get_help(
    monkeypatch: pytest.MonkeyPatch, far: bool, free: float
) -> None:
    monkeypatch.setattr(shards, "_DECODING_SHARE", 9.0 if far else 0.0)  # whatever the load
    monkeypatch.setattr(shards._Reading, "_free_processors", lambda self: free)

    def read() -> Iterator[int]:
        time.sleep(0.02)
        yield 7

    most = 0
    for item in read_files([lambda: [read] * 12]):
        assert item == 7
        most = max(most, readers_alive())
    assert most == (4 if far else 1 + round(free))
