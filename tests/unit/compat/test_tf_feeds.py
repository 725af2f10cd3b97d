"""TensorFlowOnSpark's feeds without Spark: queues that are filled by hand, and partitions."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.compat.tfos import TFManager, TFNode
from sparkdl.compat.tfos.nodes import PartitionFeed
from sparkdl.compat.tfos.TFManager import EndPartition
from sparkdl.compat.tfos.TFNode import hdfs_path
from sparkdl.errors import ConfigError, DataError, WaitTimeoutError


def filled(*elements: Any) -> TFManager.TFManager:
    mgr = TFManager.start(b"secret", ["input", "output"], "local")
    queue = mgr.get_queue("input")
    assert queue is not None
    for element in elements:
        queue.put(element)
    return mgr


def test_batches_of_a_queue_to_its_end() -> None:
    feed = TFNode.DataFeed(filled(*range(10), None))
    assert feed.next_batch(2) == [0, 1]
    assert not feed.done_feeding
    assert feed.next_batch(7) == [2, 3, 4, 5, 6, 7, 8]
    assert feed.next_batch(2) == [9]
    assert feed.done_feeding
    assert feed.next_batch(2) == []


@pytest.mark.parametrize(
    ("train_mode", "batches"), [(True, [[0, 1, 2], [3, 4]]), (False, [[0, 1], [2, 3, 4], []])]
)
def test_a_batch_for_inference_does_not_reach_into_the_next_partition(
    train_mode: bool, batches: list[list[int]]
) -> None:
    end = EndPartition()
    feed = TFNode.DataFeed(filled(0, 1, end, 2, 3, 4, end, None), train_mode)
    found = []
    while not feed.should_stop():
        found.append(feed.next_batch(3))
    assert found == batches


def test_columns_become_tensors_and_results_go_into_the_other_queue() -> None:
    mgr = filled((1, "a"), (2, "b"), None)
    feed = TFNode.DataFeed(mgr, False, input_mapping={"second": "text", "first": "number"})
    assert feed.next_batch(5) == {"number": [1, 2], "text": ["a", "b"]}
    feed.batch_results([3, 4])
    output = mgr.get_queue("output")
    assert output is not None
    assert [output.get(timeout=1), output.get(timeout=1)] == [3, 4]


def test_terminate_empties_the_queue_and_says_so() -> None:
    mgr = filled(*range(10))
    feed = TFNode.DataFeed(mgr)
    assert mgr.get("state") == "running"
    feed.next_batch(1)
    feed.terminate()
    assert feed.should_stop()
    assert mgr.get("state") == "terminating"
    queue = mgr.get_queue("input")
    assert queue is not None
    queue.join()


def test_a_manager_has_values_and_nobody_connects() -> None:
    mgr = TFNode.TFNodeContext().mgr
    mgr.set("weights", [1, 2])
    assert mgr.get("weights") == [1, 2]
    assert mgr.get("other") is None
    assert mgr.get_queue("input") is None
    with pytest.raises(ConfigError, match="fed no rows"):
        TFNode.TFNodeContext().get_data_feed()
    with pytest.raises(ConfigError, match="CourierNode"):
        TFManager.connect(("host", 1), b"secret")
    with pytest.raises(ConfigError, match="'remote'"):
        TFManager.start(b"secret", [], "remote")
    with pytest.raises(ConfigError, match="train_mode=False"):
        TFNode.DataFeed(filled()).batch_results([1])


def results(elements: Iterator[Any], work: Any, timeout_s: float = 30.0) -> list[Any]:
    feed = PartitionFeed(elements, timeout_s)
    mgr = TFManager.TFManager(elements=feed)
    return list(feed.results(lambda: work(TFNode.DataFeed(mgr, train_mode=False))))


def double(feed: TFNode.DataFeed) -> None:
    while not feed.should_stop():
        feed.batch_results([2 * number for number in feed.next_batch(4)])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 103])
def test_a_partition_has_one_result_for_each_element_in_order(count: int) -> None:
    assert results(iter(range(count)), double) == [2 * number for number in range(count)]


def test_a_function_is_not_called_for_an_empty_partition() -> None:
    def fail(feed: TFNode.DataFeed) -> None:
        raise AssertionError

    assert results(iter(()), fail) == []


def test_no_more_elements_are_taken_than_are_asked_for() -> None:
    taken: list[int] = []

    def count() -> Iterator[int]:
        for number in range(10**9):
            taken.append(number)
            yield number

    feed = PartitionFeed(count(), 30.0)
    mgr = TFManager.TFManager(elements=feed)
    threads = {*threading.enumerate()}
    found = feed.results(lambda: double(TFNode.DataFeed(mgr, False)))
    assert [next(found) for _ in range(5)] == [0, 2, 4, 6, 8]
    found.close()  # type: ignore[attr-defined]
    assert len(taken) <= 13, "three batches of four, and one that tells whether there are more"
    assert {*threading.enumerate()} <= threads, "the function has ended"


def give_less(feed: TFNode.DataFeed) -> None:
    feed.batch_results(feed.next_batch(4)[1:])
    while not feed.should_stop():
        feed.next_batch(4)


def give_more(feed: TFNode.DataFeed) -> None:
    feed.batch_results([*feed.next_batch(4), 1])


def leave(feed: TFNode.DataFeed) -> None:
    feed.batch_results(feed.next_batch(4))


@pytest.mark.parametrize("work", [give_less, give_more, leave])
def test_another_number_of_results_is_an_error(work: Any) -> None:
    with pytest.raises(DataError, match="another number of results"):
        results(iter(range(9)), work)


def test_what_the_function_raises_is_raised() -> None:
    def fail(feed: TFNode.DataFeed) -> None:
        feed.batch_results(feed.next_batch(4))
        raise ValueError("no way on")

    with pytest.raises(ValueError, match="no way on"):
        results(iter(range(9)), fail)


def test_a_function_that_stalls_is_given_up() -> None:
    goes_on = threading.Event()

    def stall(feed: TFNode.DataFeed) -> None:
        feed.next_batch(1)
        goes_on.wait(1)

    with pytest.raises(WaitTimeoutError, match="in stall"):
        results(iter(range(9)), stall, timeout_s=0.2)
    goes_on.set()


@pytest.mark.parametrize("default", ["file://", "file:///", "file:/"])
@pytest.mark.parametrize(
    ("path", "whole"),
    [("/data", "file:///data"), ("data", "file:///w/data"), ("file:/data", "file:/data"),
     ("abfss://c@a/data", "abfss://c@a/data")],
)  # fmt: skip
def test_paths_of_a_local_default_file_system(default: str, path: str, whole: str) -> None:
    context = SimpleNamespace(defaultFS=default, working_dir="/w")
    assert hdfs_path(context, path) == whole
