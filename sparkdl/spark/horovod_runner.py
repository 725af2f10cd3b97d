"""``HorovodRunner``: Databricks' way to start a function on every rank."""

from __future__ import annotations

import secrets

from sparkdl.errors import ConfigError
from sparkdl.launch import interrupts
from sparkdl.launch.devices import DeviceRequest
from sparkdl.launch.function import FunctionTask, call_here
from sparkdl.launch.processes import ProcessLauncher
from sparkdl.settings.call_arguments import lists_its_arguments
from sparkdl.settings.network import Network
from sparkdl.settings.values import require_name
from sparkdl.spark.run import VERBOSITIES
from sparkdl.spark.runs.function_stage import (
    check_backend,
    check_callable,
    dump_function,
    returned,
    run_stage,
)


class HorovodRunner:
    """Databricks' ``HorovodRunner``: a training function on ``np`` processes at the same time.

    The ranks are connected by Horovod if it imports on all of them, else by the built-in
    communicator (the logger ``sparkdl`` says which); with Horovod ``hvd.init()`` inside the
    function finds it initialised.

    Args:
        np: Above 0: the tasks of a barrier stage. Below -1: ``-np`` processes on the driver, whose
            output is shown whatever the verbosity. -1: in this process.
        driver_log_verbosity: ``'all'``: all output of the ranks reaches the driver;
            ``'log_callback_only'``: only ``sparkdl.log_to_driver(message)``.

    Raises:
        ConfigError: ``np`` is 0 or no whole number, or the verbosity is unknown.
    """

    @lists_its_arguments
    def __init__(self, *, np, driver_log_verbosity="log_callback_only"):  # type: ignore[no-untyped-def]
        if isinstance(np, bool) or not isinstance(np, int) or np == 0:
            raise ConfigError(
                "HorovodRunner cannot run with this np",
                expected="a whole number: above 0 for tasks of Spark, -1 for this process, "
                "below -1 for -np processes on the driver",
                received=f"np={np!r}",
            )
        require_name("driver_log_verbosity", driver_log_verbosity, VERBOSITIES)
        self._np, self._verbosity = np, driver_log_verbosity

    def run(self, main, **kwargs):  # type: ignore[no-untyped-def]
        """Runs ``main(**kwargs)`` on every rank and returns rank 0's result.

        Args:
            main: The training function; pickled by value, except for ``np=-1``.
            **kwargs: Its arguments.

        Raises:
            WorkerError: A rank raised; with its traceback.
            ResourceError: Too few slots, or dynamic allocation; no job was started.
        """
        check_callable(main)
        task = FunctionTask(
            b"" if self._np == -1 else dump_function(main, (), kwargs),
            secrets.token_bytes(32),
            DeviceRequest(check_backend(None), unscheduled=True),
            all_results=False,
            capture=self._np > 0 and self._verbosity == "all",
        )
        if self._np == -1:
            return call_here(task, lambda: main(**kwargs))
        if self._np > 0:
            return run_stage(task, self._np, None, Network()).load(0)
        with interrupts.heard(), interrupts.CleanStack() as stack:
            ranks = stack.begin(ProcessLauncher(-self._np).launch(task))
            while not ranks.wait(0.1):
                interrupts.check()
            return returned(ranks, -self._np).load(0)
