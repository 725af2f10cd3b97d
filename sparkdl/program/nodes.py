"""``Program``: nodes that run at the same time, and handles by which they call each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.program.serving import CALL_THREADS
from sparkdl.settings.values import require_flag, require_int, require_seconds


class Handle:
    """A node as another node's argument: there it becomes a client that calls the node."""

    def __init__(
        self, number: int, label: str, timeout_s: float | None = None, wait_for_ready: bool = True
    ) -> None:
        self._number, self._label, self._timeout_s = number, label, timeout_s
        self._wait_for_ready = wait_for_ready

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ConfigError(
            f"node {self._label!r} cannot be called here",
            expected="a call inside of a node that got this handle as an argument",
            received=f"{name!r} of a handle, while the program is still put together",
            hint="give the handle to another node: PyNode(function, handle)",
        )

    def __repr__(self) -> str:
        return f"Handle({self._label!r})"


class Node:
    """A part of a program: it serves calls, or runs once."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    serves = False
    """Whether other nodes may call it."""
    client_timeout_s: float | None = None
    """The longest time that a call of it may take."""
    wait_for_ready = True
    """Whether a call of it waits until it can be reached."""
    threads = 0
    """How many calls of it run at the same time."""

    def start(self, replace: Callable[[Any], Any]) -> Callable[[], object]:
        """The call that the node makes: it returns the object to serve, or runs once.

        Args:
            replace: Makes clients of the handles in an argument.
        """
        args, kwargs = replace(self.args), replace(self.kwargs)
        return lambda: self.function(*args, **kwargs)


class PyNode(Node):
    """A node that calls a function once and ends with it.

    Args:
        function: Called as ``function(*args, **kwargs)``; handles among the arguments, also in
            lists, tuples and dicts, arrive as clients.
    """

    def __init__(self, function: Callable[..., object], *args: object, **kwargs: object) -> None:
        _check_callable("PyNode", function)
        self.function, self.args, self.kwargs = function, args, kwargs


class PyClassNode(PyNode):
    """A node that makes an object and calls its ``run()``."""

    def start(self, replace: Callable[[Any], Any]) -> Callable[[], object]:
        made: Any = super().start(replace)()
        _check_callable("PyClassNode: run()", getattr(made, "run", None))
        run: Callable[[], object] = made.run
        return run


class CourierNode(Node):
    """A node whose object's public methods other nodes call.

    It is made where the node runs. If it has a method ``run``, that is called and the node ends
    with it; else the node serves until the program stops. Several calls run at the same time.

    Args:
        constructor: Called as ``constructor(*args, **kwargs)``.
        client_timeout_s: How long a call may take, the time for connecting included; a call and a
            future that take longer raise WaitTimeoutError. None for ever.
        threads: Calls that run at the same time; others wait.
        wait_for_ready: Whether a call waits until the node can be reached (up to 60 s); False: it
            raises TransportError at once.
    """

    serves = True

    def __init__(
        self,
        constructor: Callable[..., object],
        *args: object,
        client_timeout_s: float | None = None,
        threads: int = CALL_THREADS,
        wait_for_ready: bool = True,
        **kwargs: object,
    ) -> None:
        _check_callable("CourierNode", constructor)
        self.function, self.args, self.kwargs = constructor, args, kwargs
        if client_timeout_s is not None:
            client_timeout_s = require_seconds("client_timeout_s", client_timeout_s)
        self.client_timeout_s = client_timeout_s
        self.threads = require_int("threads", threads, 1)
        self.wait_for_ready = require_flag("wait_for_ready", wait_for_ready)

    def configure(self, *args: object, **kwargs: object) -> None:
        """Sets the arguments later, for nodes that hold handles of each other."""
        self.args, self.kwargs = args, kwargs


def _check_callable(what: str, thing: object) -> None:
    if not callable(thing):
        raise ConfigError(
            f"{what} is no function", expected="something to call", received=repr(thing)[:200]
        )


def _check_label(label: object) -> None:
    if not isinstance(label, str) or not label.strip():
        raise ConfigError(
            "a group of nodes needs a name", expected="a text that is not empty",
            received=repr(label)[:200], hint="with program.group('actor'): ...",
        )  # fmt: skip


@dataclass(frozen=True)
class NodeNeeds:
    """The needs of each node of a group.

    Args:
        restarts: How often it may be started again after it failed.
        cores: CPU cores; 0: as many as there are.
        gpus: GPUs; 0: none if another group asks for some, else those that the process sees.
    """

    restarts: int = 0
    cores: int = 0
    gpus: int = 0

    def __post_init__(self) -> None:
        for name in ("restarts", "cores", "gpus"):
            require_int(name, getattr(self, name), 0)


@dataclass(frozen=True)
class Placed:
    """A node in a program."""

    node: Node
    label: str
    index: int
    needs: NodeNeeds = NodeNeeds()

    @property
    def name(self) -> str:
        """For messages: ``'actor/2'``."""
        return f"{self.label}/{self.index}"


@dataclass
class Program:
    """Nodes in groups; a group is nodes of one role.

    >>> program = Program('ping')
    >>> with program.group('server'):
    ...     server = program.add_node(CourierNode(dict))
    >>> server
    Handle('server')
    """

    name: str
    placed: list[Placed] = field(default_factory=list)
    _group: str | None = None
    _needs: dict[str, NodeNeeds] = field(default_factory=dict)

    @contextmanager
    def group(
        self, label: str, *, restarts: int = 0, cores: int = 0, gpus: int = 0
    ) -> Iterator[None]:
        """Nodes that are added inside belong to this group.

        Args:
            restarts: How often each of its nodes may be started again, after it has raised or its
                process was killed. It starts from its constructor or function, with the same
                arguments, under its old address; on Spark it runs in a process beside its task, on
                the executor, and a lost executor or task ends the program. A call of it that was on
                its way raises TransportError in the caller; the next call waits for it.
            cores: CPU cores of each node; 0: as many as there are. On processes they are told to
                the numerical libraries by their environment variables, on Spark they are cores of
                the node's task; threads share those of their process.
            gpus: GPUs of each node, so on processes and on Spark; the nodes of a program share
                none, and where a group asks for some the nodes of others see none.

        Raises:
            ConfigError: Inside of another group, a group of that name exists, or a negative number.
        """
        needs = NodeNeeds(restarts, cores, gpus)
        _check_label(label)
        if self._group is not None or any(node.label == label for node in self.placed):
            raise ConfigError(
                f"group {label!r} cannot begin here",
                expected="groups one after the other, each with a name of its own",
                received=f"inside of group {self._group!r}" if self._group else "a known name",
            )
        self._group, self._needs[label] = label, needs
        try:
            yield
        finally:
            self._group = None

    def add_node(self, node: Node, label: str | None = None) -> Handle:
        """Adds a node.

        Args:
            label: Its group, outside of ``with program.group(...)``.

        Returns:
            A handle for other nodes' arguments; only nodes that serve can be called by it.

        Raises:
            ConfigError: No group, or two.
        """
        group = self._group if label is None else label
        if group is None or (self._group is not None and label not in (None, self._group)):
            raise ConfigError(
                "a node belongs to one group",
                expected="with program.group('label'): ..., or add_node(node, label='label')",
                received="none" if group is None else f"{self._group!r} and {label!r}",
            )
        _check_label(group)
        index = sum(other.label == group for other in self.placed)
        self.placed.append(Placed(node, group, index, self._needs.get(group, NodeNeeds())))
        return Handle(len(self.placed) - 1, group, node.client_timeout_s, node.wait_for_ready)


def replaced(thing: object, replace: Callable[[Handle], Any]) -> Any:
    """``thing`` with every handle in its lists, tuples and dicts replaced."""
    if isinstance(thing, Handle):
        return replace(thing)
    if isinstance(thing, dict):
        return {key: replaced(value, replace) for key, value in thing.items()}
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return type(thing)(*(replaced(value, replace) for value in thing))
    if isinstance(thing, (list, tuple)):
        return type(thing)(replaced(value, replace) for value in thing)
    return thing


def make_program(*nodes: Node, name: str = "program") -> Program:
    """A program of these nodes, each in a group of its own: ``'node-0'``, ``'node-1'``, ...

    >>> [node.label for node in make_program(PyNode(print), PyNode(print)).placed]
    ['node-0', 'node-1']
    """
    program = Program(name)
    for number, node in enumerate(nodes):
        program.add_node(node, label=f"node-{number}")
    return program
