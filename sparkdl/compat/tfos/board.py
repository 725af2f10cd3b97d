"""TensorBoard beside the function of a cluster's chief."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import IO

from sparkdl.collective.current import current
from sparkdl.errors import ResourceError
from sparkdl.launch.child import end_with
from sparkdl.launch.threads import ThreadCall
from sparkdl.program.calls import CallAddress, CallClient
from sparkdl.program.serving import CallServer
from sparkdl.settings.network import Network, RankListening
from sparkdl.spark.runs.resources import certificate_of, listening_address, rank_listening
from sparkdl.wire.hosts import rank_addresses
from sparkdl.wire.tls import Certificate

_START_S = 120.0
_MARK = "sparkdl-board: "


@dataclass(frozen=True)
class BoardRequest:
    """The settings of TensorBoard that the chief is told.

    Args:
        log_dir: The folder that it shows; None: ``tensorboard_<executor_id>`` below the node's
            working directory.
        address: Where the driver waits for the URL.
        token: The secret for that.
        listening: Where the chief's host listens.
        certificate: For TLS with the driver; None for no encryption.
    """

    log_dir: str | None
    address: CallAddress
    token: bytes = field(repr=False)
    listening: RankListening
    certificate: Certificate | None = field(repr=False)


class BoardUrl:
    """The URL on the driver, when the chief has told it."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._url: str | None = None

    def tell(self, url: str | None) -> None:
        """Ends all waits; None: there is no TensorBoard any more."""
        self._url = url
        self._told.set()

    def wait(self, timeout_s: float) -> str | None:
        """The URL; None if it has not come, or TensorBoard has ended."""
        self._told.wait(timeout_s)
        return self._url

    @contextmanager
    def requested(self, spark: object, log_dir: str | None) -> Iterator[BoardRequest]:
        """The request for the chief; within, the chief can tell the URL."""
        token, network = os.urandom(32), Network()
        certificate = certificate_of(spark, network, pickles=True)
        bind, advertised = listening_address(spark, network)
        self._told.clear()
        try:
            with CallServer(
                self, token, bind=bind, advertised=advertised, label="TensorBoard", threads=1,
                certificate=certificate,
            ) as server:  # fmt: skip
                listening = rank_listening(spark, network)
                yield BoardRequest(log_dir, server.address, token, listening, certificate)
        finally:
            self.tell(None)


@contextmanager
def board_of(request: BoardRequest) -> Iterator[None]:
    """TensorBoard runs within, in a process of its own, and the driver knows its URL."""
    bind, _ = rank_addresses(request.listening.bind, towards=request.listening.towards)
    folder = request.log_dir or f"tensorboard_{current().rank}"
    process = subprocess.Popen(
        [sys.executable, "-m", "sparkdl.compat.tfos.board", str(os.getpid()), folder, bind],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
    )  # fmt: skip
    with ExitStack() as stack:
        stack.callback(process.wait)
        stack.callback(process.kill)
        client = CallClient(
            request.address, request.token, timeout_s=_START_S, certificate=request.certificate
        )
        stack.callback(client.close)
        client.tell(_url_of(process))
        yield


def _url_of(process: subprocess.Popen[str]) -> str:
    output, printed = process.stdout, list[str]()
    assert output is not None

    def find(lines: IO[str]) -> str | None:
        for line in lines:
            if line.startswith(_MARK):
                ThreadCall(lambda: sum(len(rest) for rest in lines), "sparkdl-board-output")
                return line.removeprefix(_MARK).strip()
            printed.append(line)
        return None

    reading = ThreadCall(lambda: find(output), "sparkdl-board-output")
    try:
        url: str | None = reading.outcome.result(_START_S)
    except TimeoutError:
        url = None
    if url is None:
        raise ResourceError(
            "TensorBoard does not start on the chief's host",
            expected=f"its address within {_START_S:g} s",
            received="".join(printed[-20:]).strip() or "nothing",
            hint="pip install tensorboard on the executors, or tensorboard=False",
        )
    return url


def serve(parent: int, folder: str, host: str) -> None:
    """Serves TensorBoard on a free port, says where, and ends with its parent."""
    end_with(parent)
    from tensorboard import program

    board = program.TensorBoard()
    board.configure(argv=[None, "--logdir", folder, "--host", host, "--port", "0"])
    print(f"{_MARK}{board.launch()}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2], sys.argv[3])
