"""The server's process, as :class:`ServerProcess` starts it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
from typing import Any, TextIO

import numpy as np

from sparkdl.errors import BEATS, SparkDLError
from sparkdl.optimizers.blocks import use_threads
from sparkdl.ps.server.config import ServerConfig
from sparkdl.ps.server.process import LENGTH
from sparkdl.transport.address import Address, Listeners
from sparkdl.transport.server import Server
from sparkdl.weights import FloatArray
from sparkdl.wire.anonymous import map_file

_MOST_THREADS = 4  # for one update; more only wait for memory


def _read_part() -> bytes:
    stream = sys.stdin.buffer
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise SystemExit(0)  # the driver went away
    return stream.read(LENGTH.unpack(head)[0])


def main() -> None:
    """The server's process: setup from stdin, readiness to stdout, until stdin closes."""
    parent = os.getppid()
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a user's module prints when imported must not look like an answer
    setup = json.loads(_read_part())
    try:
        config: ServerConfig = pickle.loads(_read_part())  # from the driver's private pipe
        center = _map_center(setup["center"], setup["size"])
        listeners = Listeners.adopt(Address(**setup["address"]), setup["descriptors"])
        server = Server(
            config.service(center), config.token, listeners, config.num_workers, config.certificate
        )
    except SparkDLError as error:
        _say(output, {"refused": {name: getattr(error, name) for name in BEATS}})
        return
    use_threads(min(_MOST_THREADS, os.cpu_count() or 1))
    server.start()
    _say(output, {"ready": True})
    threading.Thread(target=_watch_input, args=(ended,), daemon=True).start()
    while not ended.wait(0.5):
        if os.getppid() != parent:
            break
    server.dispatcher.shutdown()  # whoever waits for a reply is told by a closed connection
    if setup["directory"]:  # the driver removes it too, but it may be gone
        shutil.rmtree(setup["directory"], ignore_errors=True)
    os._exit(0)  # the kernel closes the rest at once; there is nothing to save


def _say(output: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=output, flush=True)


def _map_center(descriptor: int, size: int) -> FloatArray:
    if size == 0:
        return np.empty(0, np.float32)
    center = map_file(descriptor, 4 * size).view(np.float32)
    os.close(descriptor)
    return center


def _watch_input(ended: threading.Event) -> None:
    with contextlib.suppress(OSError, ValueError):
        while os.read(0, 4096):
            pass
    ended.set()


if __name__ == "__main__":
    main()
