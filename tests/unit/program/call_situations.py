"""What a call between nodes must do, as checks that run inside of a node: see ``SITUATIONS``."""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparkdl.errors import TransportError, UnknownNameError, WaitTimeoutError
from sparkdl.program import (
    CallClient,
    CourierNode,
    Program,
    PyNode,
    RemoteTraceback,
    list_methods,
    stop,
)
from sparkdl.program.calls import CallAddress

_UP_AFTER_S = 0.5


class OwnError(Exception):
    """Of two arguments, so that it does not survive pickling by itself."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


class Examined:
    """The node that is called; it takes a while to come up."""

    limit = 7

    def __init__(self) -> None:
        time.sleep(_UP_AFTER_S)
        self.started = 0
        self._gate = threading.Event()
        self._lock = threading.Lock()

    def add(self, a: int, b: int = 1, *more: int, **named: int) -> int:
        return a + b + sum(more) + sum(named.values())

    def echo(self, thing: Any) -> Any:
        return thing

    def apply(self, function: Callable[[int], int], number: int) -> Callable[[], int]:
        result = function(number)
        return lambda: result

    @classmethod
    def kind(cls) -> str:
        return cls.__name__

    @staticmethod
    def fixed() -> int:
        return 3

    def rebind(self) -> None:
        self.add = lambda *numbers: -sum(numbers)  # type: ignore[method-assign]

    def unbind(self) -> None:
        del self.add

    def bind_extra(self) -> None:
        self.extra = lambda: "bound"

    def unbind_extra(self) -> None:
        del self.extra

    def fail(self, text: str) -> None:
        raise KeyError(text)

    def fail_own(self) -> None:
        raise OwnError(1, 2)

    def exit(self) -> None:
        raise SystemExit(3)

    def time_out(self) -> None:
        raise TimeoutError("my own")

    def wait(self) -> bool:
        with self._lock:
            self.started += 1
        return self._gate.wait(30)

    def count(self) -> int:
        return self.started

    def open_gate(self, is_open: bool) -> None:
        if is_open:
            self._gate.set()
        else:
            self._gate.clear()
            self.started = 0

    def call_back(self, client: Any) -> int:
        return int(client.add(20, 22))

    def unpicklable(self) -> Any:
        return threading.Lock()

    def _hidden(self) -> None:
        raise AssertionError

    def __call__(self, text: str) -> str:
        return text.upper()


def comes_up_late(node: Any, hasty: Any) -> None:
    assert node.futures.fixed().result(30) == 3  # the first call of all: the node is not up yet


def positional_and_default(node: Any, hasty: Any) -> None:
    assert (node.add(1), node.add(1, 2), node.add(1, 2, 3, 4)) == (2, 3, 10)


def keywords(node: Any, hasty: Any) -> None:
    assert node.add(a=1, b=5, c=10) == 16


def functions_as_arguments_and_results(node: Any, hasty: Any) -> None:
    six = 6
    assert node.apply(lambda x: x * six, 7)() == 42


def class_and_static_methods(node: Any, hasty: Any) -> None:
    assert (node.kind(), node.fixed()) == ("Examined", 3)


def rebound_method(node: Any, hasty: Any) -> None:
    node.rebind()
    assert node.add(1, 2) == -3
    node.unbind()
    assert node.add(1, 2) == 3


def method_that_is_unbound(node: Any, hasty: Any) -> None:
    with pytest.raises(UnknownNameError, match="'extra'"):
        node.extra()
    node.bind_extra()
    assert node.extra() == "bound"
    assert "extra" in list_methods(node)
    node.unbind_extra()
    with pytest.raises(UnknownNameError, match="'extra'"):
        node.extra()


def methods_listed(node: Any, hasty: Any) -> None:
    names = list_methods(node)
    assert {"add", "echo", "kind", "fixed", "__call__"} <= set(names)
    assert not {"limit", "_hidden", "extra"} & set(names)
    with pytest.raises(UnknownNameError):
        node.__getattr__("_methods")()


def the_object_itself(node: Any, hasty: Any) -> None:
    assert node("abc") == "ABC"
    assert node.futures("abc").result(10) == "ABC"


def texts_of_all_alphabets(node: Any, hasty: Any) -> None:
    text = "grüße 你好 \U0001f40d \x00 é"
    assert node.echo(text) == text
    assert node.echo({text: text.encode()}) == {text: text.encode()}
    assert node.echo(None) is None


def error_with_remote_traceback(node: Any, hasty: Any) -> None:
    with pytest.raises(KeyError, match="missing") as caught:
        node.fail("missing")
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)


def error_that_cannot_be_pickled(node: Any, hasty: Any) -> None:
    with pytest.raises(RuntimeError, match="OwnError: 1 is not 2"):
        node.fail_own()


def exit_in_a_method(node: Any, hasty: Any) -> None:
    with pytest.raises(SystemExit):
        node.exit()
    assert node.fixed() == 3


def result_that_cannot_be_pickled(node: Any, hasty: Any) -> None:
    with pytest.raises(TypeError, match="pickle"):
        node.unpicklable()


def argument_that_cannot_be_pickled(node: Any, hasty: Any) -> None:
    with pytest.raises(TypeError, match="pickle"):
        node.echo(threading.Lock())
    assert node.fixed() == 3


def future(node: Any, hasty: Any) -> None:
    assert [f.result(10) for f in [node.futures.add(i) for i in range(50)]] == list(range(1, 51))


def future_error(node: Any, hasty: Any) -> None:
    failed = node.futures.fail("later")
    assert isinstance(failed.exception(10), KeyError)


def calls_at_the_same_time(node: Any, hasty: Any) -> None:
    waiting = [node.futures.wait() for _ in range(4)]
    while node.count() < 4:
        time.sleep(0.01)
    node.open_gate(True)
    assert all(f.result(10) for f in waiting)
    node.open_gate(False)


def cancel(node: Any, hasty: Any) -> None:
    waiting = [node.futures.wait() for _ in range(3)]
    while node.count() < 3:
        time.sleep(0.01)
    assert waiting[0].cancel()
    assert waiting[0].cancelled()
    node.open_gate(True)
    assert all(f.result(10) for f in waiting[1:])
    node.open_gate(False)


def unknown_method(node: Any, hasty: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"'add', 'apply'.*'echo'"):  # names all methods
        node.ad(1)


def private_method(node: Any, hasty: Any) -> None:
    with pytest.raises(UnknownNameError):
        node._hidden()


def attribute_that_is_no_method(node: Any, hasty: Any) -> None:
    with pytest.raises(UnknownNameError):
        node.limit()


def time_limit_of_a_call(node: Any, hasty: Any) -> None:
    with pytest.raises(WaitTimeoutError, match="wait of node 'hasty' takes too long"):
        hasty.wait()
    assert hasty.fixed() == 3  # the connection is as good as before


def time_limit_of_a_future(node: Any, hasty: Any) -> None:
    pending = node.futures.wait()
    with pytest.raises(TimeoutError):
        pending.result(0.2)
    node.open_gate(True)
    assert pending.result(10)
    node.open_gate(False)


def deadline_of_a_future(node: Any, hasty: Any) -> None:
    late = hasty.futures.wait()
    error = late.exception(30)
    assert isinstance(error, WaitTimeoutError)
    assert "wait of node 'hasty' takes too long" in str(error)
    assert hasty.futures.fixed().result(30) == 3


def unknown_address_under_a_deadline(node: Any, hasty: Any) -> None:
    client = CallClient(nowhere(node), node._token, timeout_s=1.0)
    begun = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="no connection to"):
        client.add(1)
    assert time.monotonic() - begun < 20  # and not 60 s, which a node has to come up
    client.close()


def future_of_an_unknown_address_under_a_deadline(node: Any, hasty: Any) -> None:
    client = CallClient(nowhere(node), node._token, timeout_s=1.0)
    pending = client.futures.add(1)
    assert not pending.done()  # it does not wait for the connection
    assert isinstance(pending.exception(20), WaitTimeoutError)
    client.close()


def future_of_an_unknown_address(node: Any, hasty: Any) -> None:
    client = CallClient(nowhere(node), node._token, connect_s=0.2)
    error = client.futures.add(1).exception(30)
    assert isinstance(error, TransportError)
    assert "cannot be called" in str(error)


def no_waiting_for_a_node(node: Any, hasty: Any) -> None:
    client = CallClient(nowhere(node), node._token, wait_for_ready=False)
    begun = time.monotonic()
    with pytest.raises(TransportError, match="cannot be called"):
        client.add(1)
    assert isinstance(client.futures.add(1).exception(30), TransportError)
    assert time.monotonic() - begun < 20
    certificate = node._certificate
    there = CallClient(node._address, node._token, certificate=certificate, wait_for_ready=False)
    assert there.fixed() == 3
    there.close()


def future_of_an_unknown_method(node: Any, hasty: Any) -> None:
    assert isinstance(node.futures.ad(1).exception(30), UnknownNameError)


def cancel_before_there_is_a_connection(node: Any, hasty: Any) -> None:
    client = CallClient(nowhere(node), node._token)
    pending = client.futures.add(1)
    assert pending.cancel()
    client.close()


def arguments_are_those_of_the_call(node: Any, hasty: Any) -> None:
    """What happens to an array while the connection is made does not change the call."""
    client = pickle.loads(pickle.dumps(node))
    array = np.zeros(200_000)
    pending = client.futures.echo(array)
    array[:] = 1
    assert not pending.result(30).any()
    client.close()


def timeout_error_of_the_method(node: Any, hasty: Any) -> None:
    with pytest.raises(TimeoutError, match="my own") as caught:
        hasty.time_out()
    assert not isinstance(caught.value, WaitTimeoutError)


def nowhere(node: Any) -> CallAddress:
    return replace(node._address, port=1, local_port=0)


def nobody_at_the_address(node: Any, hasty: Any) -> None:
    with pytest.raises(TransportError, match="cannot be called"):
        CallClient(nowhere(node), node._token, connect_s=0.2).add(1)


def clients_travel(node: Any, hasty: Any) -> None:
    assert hasty.futures.call_back(node).result(30) == 42
    other = pickle.loads(pickle.dumps(node))
    assert other.add(1) == 2
    other.close()


def arrays(node: Any, hasty: Any) -> None:
    array = np.arange(300_000, dtype=np.float32).reshape(300, -1)
    back = node.echo({"a": array, "empty": array[:0], "turned": array[:5].T})
    np.testing.assert_array_equal(back["a"], array)
    np.testing.assert_array_equal(back["turned"], array[:5].T)
    assert back["empty"].shape == (0, 1000)


SITUATIONS: dict[str, Callable[[Any, Any], None]] = {
    check.__name__: check
    for check in (
        comes_up_late, positional_and_default, keywords, functions_as_arguments_and_results,
        class_and_static_methods, rebound_method, method_that_is_unbound, methods_listed,
        the_object_itself, texts_of_all_alphabets,
        error_with_remote_traceback, error_that_cannot_be_pickled, exit_in_a_method,
        result_that_cannot_be_pickled, argument_that_cannot_be_pickled, future, future_error,
        calls_at_the_same_time, cancel, unknown_method, private_method,
        attribute_that_is_no_method, time_limit_of_a_call, time_limit_of_a_future,
        deadline_of_a_future, unknown_address_under_a_deadline,
        future_of_an_unknown_address_under_a_deadline, future_of_an_unknown_address,
        no_waiting_for_a_node, future_of_an_unknown_method, cancel_before_there_is_a_connection,
        arguments_are_those_of_the_call, timeout_error_of_the_method, nobody_at_the_address,
        clients_travel, arrays,
    )
}  # fmt: skip


def examine(node: Any, hasty: Any) -> dict[str, str]:
    """What went wrong in each situation; empty texts where nothing did."""
    told = {}
    for name, check in SITUATIONS.items():
        try:
            check(node, hasty)
            told[name] = ""
        except BaseException:
            told[name] = traceback.format_exc()
            node.open_gate(False)
    stop()
    return told


def examination() -> Program:
    """Three nodes: one that is called, one with a limit of a second, and one that calls them."""
    program = Program("examination")
    node = program.add_node(CourierNode(Examined), label="node")
    hasty = program.add_node(CourierNode(Examined, client_timeout_s=1.0), label="hasty")
    program.add_node(PyNode(examine, node, hasty), label="examiner")
    return program


class Bomb:
    """Kills the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


def throw(node: Any) -> None:
    node.futures.sample(Bomb())
    time.sleep(60)


def die() -> None:
    os.kill(os.getpid(), 9)
