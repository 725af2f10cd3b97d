"""Programs of nodes that call each other: on threads, on processes of one machine, on Spark.

::

    from sparkdl.program import CourierNode, Program, PyNode, launch, stop

    program = Program('sum')
    with program.group('counter'):
        counter = program.add_node(CourierNode(Counter))
    with program.group('worker'):
        for _ in range(4):
            program.add_node(PyNode(work, counter))  # work(counter): counter.add(1)
    with launch(program, 'processes') as launched:
        launched.wait()
"""

from sparkdl.program.batching import CacherNode, batched_handler
from sparkdl.program.calls import CallClient, RemoteTraceback, list_methods
from sparkdl.program.launching import LaunchedProgram, launch
from sparkdl.program.nodes import CourierNode, Handle, Program, PyClassNode, PyNode, make_program
from sparkdl.program.replay import ReplayBuffer, ReplayNode, ReverbNode
from sparkdl.program.running import register_stop_handler, stop, stop_event, wait_for_stop
from sparkdl.program.serving import CallServer

__all__ = [
    "CacherNode",
    "CallClient",
    "CallServer",
    "CourierNode",
    "Handle",
    "LaunchedProgram",
    "Program",
    "PyClassNode",
    "PyNode",
    "RemoteTraceback",
    "ReplayBuffer",
    "ReplayNode",
    "ReverbNode",
    "batched_handler",
    "launch",
    "list_methods",
    "make_program",
    "register_stop_handler",
    "stop",
    "stop_event",
    "wait_for_stop",
]
