"""``launch``: starts the nodes of a program, watches them, and ends them together."""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import cloudpickle

from sparkdl.errors import ConfigError, DataError, ResourceError, UnpicklableError, WaitTimeoutError
from sparkdl.failures import RankFailure, RanksLost
from sparkdl.launch.child import ProcessLauncher
from sparkdl.launch.devices import DeviceRequest, visible_gpus
from sparkdl.launch.task import Launcher, Result, of_kind
from sparkdl.launch.threads import ThreadLauncher
from sparkdl.process import payload
from sparkdl.program.nodes import Placed, Program
from sparkdl.program.running import RETURNED, NodeTask, ProgramControl
from sparkdl.program.serving import CallServer
from sparkdl.settings.network import NETWORK_OF_RANKS, THIS_HOST, Network, PortSpec, RankListening
from sparkdl.settings.values import refuse_changed, require_name
from sparkdl.transport.address import Endpoint
from sparkdl.wire.tls import Certificate

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
)  # fmt: skip


def environments_of(program: Program) -> list[dict[str, str]]:
    """The variables of each node's process: its threads, and its share of this machine's GPUs.

    Raises:
        ResourceError: The nodes ask for more GPUs than this process sees.
    """
    asked = sum(placed.needs.gpus for placed in program.placed)
    gpus = visible_gpus() if asked else []
    if asked > len(gpus):
        raise ResourceError(
            f"program {program.name!r} asks for GPUs that are not there",
            expected=f"{asked} GPUs on this machine",
            received=f"{len(gpus)}" + (f": {', '.join(gpus)}" if gpus else ""),
            hint="fewer nodes, gpus=0, or launch_type='spark' on a cluster that has them",
        )
    environments = []
    for placed in program.placed:
        cores, count = placed.needs.cores, placed.needs.gpus
        environment = dict.fromkeys(_THREAD_VARIABLES, str(cores)) if cores else {}
        if asked:
            mine, gpus = gpus[:count], gpus[count:]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine) or "-1"
        environments.append(environment)
    return environments


def task_resources(program: Program) -> dict[str, float] | None:
    """The request of each task of Spark's stage: the most that any group does; None: nothing."""
    cores = max(placed.needs.cores for placed in program.placed)
    gpus = max(placed.needs.gpus for placed in program.placed)
    resources: dict[str, float] = {}
    if cores or gpus:
        resources["cpus"] = max(cores, 1)
    if gpus:
        resources["gpu"] = gpus
    return resources or None


def refuse_restarts(program: Program) -> None:
    """Refuses groups with restarts."""
    for placed in program.placed:
        if placed.needs.restarts:
            raise ConfigError(
                f"a node of group {placed.label!r} cannot be started again with a launcher of your "
                "own",
                expected="restarts=0, or a launch_type without launcher",
                received=f"restarts={placed.needs.restarts}",
                hint="ThreadLauncher and ProcessLauncher take restarts themselves",
            )


@dataclass(frozen=True)
class Surroundings:
    """The place in which a program runs: it starts the nodes, and says how they are reached.

    Args:
        advertised: Address that nodes connect to; None: the one that is listened on.
        ports: Ports of the launching process, see :func:`sparkdl.settings.network.ports_of`.
        endpoint: Endpoint of the coordinator where the nodes meet; None: they meet by the launcher.
        look: Is called again and again while the nodes run, and once when they have ended.
    """

    launcher: Launcher
    bind: str = "127.0.0.1"
    advertised: str | None = None
    ports: PortSpec = 0
    listening: RankListening = THIS_HOST
    certificate: Certificate | None = None
    endpoint: Endpoint | None = None
    look: Callable[[], None] = lambda: None


LaunchType = Literal["threads", "processes", "spark"]
_LOOK_S = 0.05
_END_S, _END_NODE_S = 10.0, 1.0
"""Seconds that nodes have to end when the program stops, and more for each: cores may be few."""


def _packed(placed: Placed) -> bytes:
    try:
        return payload.dump(placed)
    except Exception as error:
        raise UnpicklableError(
            f"node {placed.name!r} cannot be sent to where it runs",
            expected="a function or constructor, and arguments, that cloudpickle can pickle",
            received=f"{type(error).__name__}: {str(error)[:500]}",
            hint="make models, sessions, locks and open files in the node's function or "
            "constructor, and give it what they are made of",
        ) from error


class LaunchedProgram:
    """A program that runs."""

    def __init__(
        self, program: Program, surroundings: AbstractContextManager[Surroundings]
    ) -> None:
        self._program = program
        self._control = ProgramControl()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._returned: dict[int, Result] = {}
        token = secrets.token_bytes(32)
        nodes = tuple(map(_packed, program.placed))
        with ExitStack() as stack:
            where = stack.enter_context(surroundings)
            server = CallServer(
                self._control, token, bind=where.bind, advertised=where.advertised,
                ports=where.ports, label=program.name, threads=len(nodes) + 2,
                certificate=where.certificate,
            )  # fmt: skip
            stack.callback(server.close)
            self._surroundings = where
            self._stack = stack.pop_all()
        # A task of Spark has as many GPUs as the group that asks for most. Where no group asks, a
        # node sees those of its task, or those that its process sees.
        gpus = tuple(placed.needs.gpus for placed in program.placed)
        devices = DeviceRequest(None, unscheduled=True, gpus_of_ranks=gpus if any(gpus) else ())
        self._task = NodeTask(
            nodes, token, server.address, devices=devices,
            listening=where.listening, certificate=where.certificate, endpoint=where.endpoint,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._follow, name="sparkdl-program", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            with self._stack as stack:
                where = self._surroundings
                ranks = stack.enter_context(where.launcher.launch(self._task))
                stack.callback(self._control.stop)  # before the launch waits for its threads
                stack.callback(where.look)
                stopped_at, limit_s = 0.0, _END_S + _END_NODE_S * len(self._program.placed)
                while not ranks.wait(_LOOK_S):
                    where.look()
                    if not self._control.is_stopping():
                        continue
                    stopped_at = stopped_at or time.monotonic()
                    if time.monotonic() - stopped_at > limit_s:  # processes are killed now
                        self._returned = of_kind(ranks.results_so_far(), RETURNED)
                        return
                self._returned = of_kind(ranks.results(), RETURNED)
        except RankFailure as failure:
            placed = self._program.placed[failure.failure.rank]
            error = failure.failure.worker_error("")
            error.what = f"node {placed.name} failed: {failure.failure.error}"
            self._error = error
        except RanksLost as lost:
            if lost.rank >= 0:
                lost.what = f"node {self._program.placed[lost.rank].name} failed: {lost.error}"
            self._error = lost
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until all nodes have ended.

        Raises:
            WorkerError: A node raised; with its name and traceback. All others were ended.
            WaitTimeoutError: They still run; nothing happens to them.
        """
        if not self._ended.wait(timeout_s):
            raise WaitTimeoutError(
                f"program {self._program.name!r} still runs",
                expected=f"its end within {timeout_s:g} s", received="nodes that run",
                hint="stop() ends it",
            )  # fmt: skip
        self._thread.join()
        if self._error is not None:
            raise self._error

    def results(self, label: str, timeout_s: float | None = None) -> list[Any]:
        """The results of the functions of a group's nodes, and of ``run()`` of the objects.

        Waits until all nodes have ended. Nodes must be trusted: what they returned is unpickled.

        Args:
            label: The group's name.
            timeout_s: The longest wait; None for ever.

        Returns:
            One result for each node of the group, in their order; None from nodes that only served
            and from those that were killed as they did not stop (on Spark from all, if one was).

        Raises:
            UnknownNameError: There is no such group.
            DataError: What a node returned could not be pickled.
            WorkerError, WaitTimeoutError: As :meth:`wait`.
        """
        placed = self._program.placed
        require_name("group", label, sorted({node.label for node in placed}))
        self.wait(timeout_s)
        ranks = [rank for rank, node in enumerate(placed) if node.label == label]
        return [self._load(rank) for rank in ranks]

    def _load(self, rank: int) -> Any:
        result = self._returned.get(rank)
        if result is None:
            return None
        if result.text:
            raise DataError(
                f"what node {self._program.placed[rank].name} returned cannot be sent",
                expected="what cloudpickle can pickle", received=result.text,
                hint="return plain objects: numbers, lists, NumPy arrays",
            )  # fmt: skip
        return cloudpickle.loads(result.content)

    def stop(self) -> None:
        """Ends all nodes and waits for them; those that do not end by themselves are killed."""
        self._control.stop()
        self.wait()

    def __enter__(self) -> LaunchedProgram:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._control.stop()
        self._ended.wait()
        if error is None:
            self.wait()


def launch(
    program: Program,
    launch_type: LaunchType = "processes",
    *,
    launcher: Launcher | None = None,
    spark: object = None,
    network: Network | None = None,
) -> LaunchedProgram:
    """Starts all nodes of a program.

    Args:
        launch_type: ``'processes'`` of this machine; ``'threads'`` of this process, which cannot
            be killed: nodes must look at :func:`~sparkdl.program.stop_event`; or ``'spark'``: each
            node is a task of one barrier stage, so there must be a slot for each. What the nodes
            print appears on the driver with their number in front.
        launcher: Starts the nodes instead; one rank for each, all at the same time.
        spark: The session, for ``'spark'``; None: the active one.
        network: Where driver and nodes listen and whether calls between hosts are encrypted, for
            ``'spark'``; a range of ports for the driver has two, one for each node of a host (two
            if calls are encrypted). None: any free ports. Calls between hosts are encrypted, which
            needs the package cryptography on the driver; ``Network(encrypt=False)`` sends pickles
            in the clear.

    Returns:
        The program as it runs; ``with`` ends it at the block's end.

    Raises:
        ConfigError: No nodes, arguments for Spark without it, or restarts with your own launcher.
        ResourceError: Too few slots of Spark or GPUs, or dynamic allocation; nothing was started.
    """
    require_name("launch_type", launch_type, get_args(LaunchType))
    count = len(program.placed)
    if not count:
        raise ConfigError(
            f"program {program.name!r} has no nodes", expected="add_node", received="none"
        )
    if launch_type == "spark" and launcher is None:
        refuse_changed(network or Network(), "launch", NETWORK_OF_RANKS)
        stage = importlib.import_module("sparkdl.program.spark_stage")  # which needs Spark
        return LaunchedProgram(program, stage.surroundings(program, spark, network or Network()))
    if spark is not None or network is not None:
        raise ConfigError(
            "spark and network are for programs on Spark", expected="launch_type='spark' with them",
            received=f"launch_type={launch_type!r}",
        )  # fmt: skip
    if launcher is None:
        restarts = [placed.needs.restarts for placed in program.placed]
        if launch_type == "threads":
            launcher = ThreadLauncher(count, restarts)
        else:
            launcher = ProcessLauncher(count, restarts, environments_of(program))
    else:
        refuse_restarts(program)
    return LaunchedProgram(program, nullcontext(Surroundings(launcher)))
