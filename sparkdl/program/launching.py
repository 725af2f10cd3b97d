"""``launch``: starts the nodes of a program, watches them, and ends them together."""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack
from typing import Literal, get_args

from sparkdl import payload
from sparkdl.config import require_name
from sparkdl.errors import ConfigError, WaitTimeoutError
from sparkdl.launch.failures import RankFailure
from sparkdl.launch.processes import ProcessLauncher
from sparkdl.launch.task import Launcher
from sparkdl.launch.threads import ThreadLauncher
from sparkdl.program.calls import CallServer
from sparkdl.program.nodes import Program
from sparkdl.program.running import NodeTask, ProgramControl

LaunchType = Literal["threads", "processes"]
_LOOK_S = 0.05
_END_S = 10.0


class LaunchedProgram:
    """A program that runs.

    Args:
        program: The program.
        launcher: Starts its nodes.
    """

    def __init__(self, program: Program, launcher: Launcher) -> None:
        self._program, self._launcher = program, launcher
        self._control = ProgramControl()
        self._token = secrets.token_bytes(32)
        self._ended = threading.Event()
        self._error: BaseException | None = None
        nodes = tuple(payload.dump(placed) for placed in program.placed)
        self._server = CallServer(
            self._control, self._token, label=program.name, threads=2 * len(nodes) + 2
        )
        self._task = NodeTask(nodes, self._token, self._server.address)
        self._thread = threading.Thread(target=self._follow, name="sparkdl-program", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            with ExitStack() as stack:
                stack.callback(self._server.close)
                ranks = stack.enter_context(self._launcher.launch(self._task))
                stack.callback(self._control.stop)  # before the launch waits for its threads
                stopped_at = 0.0
                while not ranks.wait(_LOOK_S):
                    if not self._control.wait(0.0):
                        continue
                    stopped_at = stopped_at or time.monotonic()
                    if time.monotonic() - stopped_at > _END_S:
                        return  # nodes that do not end: processes are killed now
                ranks.results()
        except RankFailure as failure:
            placed = self._program.placed[failure.failure.rank]
            error = failure.failure.worker_error("")
            error.what = f"node {placed.name} failed: {failure.failure.error}"
            self._error = error
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
                expected=f"its end within {timeout_s:g} s",
                received="nodes that run",
                hint="stop() ends it",
            )
        self._thread.join()
        if self._error is not None:
            raise self._error

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
    program: Program, launch_type: LaunchType = "processes", *, launcher: Launcher | None = None
) -> LaunchedProgram:
    """Starts all nodes of a program.

    Args:
        program: The program.
        launch_type: ``'processes'`` of this machine, or ``'threads'`` of this process, which cannot
            be killed: nodes must look at :func:`~sparkdl.program.stop_event`.
        launcher: Starts the nodes instead; one rank for each, all at the same time.

    Returns:
        The program as it runs; ``with`` ends it at the block's end.

    Raises:
        ConfigError: A program without nodes.
    """
    require_name("launch_type", launch_type, get_args(LaunchType))
    count = len(program.placed)
    if not count:
        raise ConfigError(
            f"program {program.name!r} has no nodes", expected="add_node", received="none"
        )
    if launcher is None:
        make = ThreadLauncher if launch_type == "threads" else ProcessLauncher
        launcher = make(count)
    return LaunchedProgram(program, launcher)
