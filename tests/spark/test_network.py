"""Where ranks and driver of a cluster listen, whether they encrypt, and ranks that are cut off."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from spark_models import make_mlp

import sparkdl
from sparkdl import SparkModel
from sparkdl.errors import ConfigError, ResourceError
from sparkdl.program import PyNode, launch, make_program
from sparkdl.settings.network import Network, RankListening
from sparkdl.spark.runs.resources import is_encrypted, listening_address, rank_listening


def session(master: str, **settings: str) -> Any:
    """What the choice looks at: a master, and the settings of its session."""
    running = SimpleNamespace(isStopped=lambda: False)
    return SimpleNamespace(
        sparkContext=SimpleNamespace(master=master, _jsc=SimpleNamespace(sc=lambda: running)),
        conf=SimpleNamespace(get=lambda name, default=None: settings.get(name, default)),
    )


CRYPTO = {"spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize(
    ("master", "settings", "encrypt", "expected"),
    [
        ("yarn", {}, "auto", False),
        ("yarn", CRYPTO, "auto", True),
        ("k8s://https://host", {"spark.ssl.rpc.enabled": "True"}, "auto", True),
        ("local[4]", CRYPTO, "auto", False),
        ("local-cluster[2,1,1024]", CRYPTO, "auto", False),
        ("yarn", CRYPTO, False, False),
        ("local[2]", {}, True, True),
    ],
)
def test_auto_encrypts_what_spark_encrypts(
    master: str, settings: dict[str, str], encrypt: Any, expected: bool
) -> None:
    assert is_encrypted(session(master, **settings), Network(encrypt=encrypt)) is expected


class _ConnectSession:
    """A Spark Connect client, as its module says."""

    __module__ = "pyspark.sql.connect.session"

    def __init__(self, **settings: str) -> None:
        self.conf = SimpleNamespace(get=lambda name, default=None: settings.get(name, default))


def test_connect_client_that_executors_do_not_reach_says_what_to_use() -> None:
    """Spark's driver is another machine, whose address this one cannot listen on."""
    far: Any = _ConnectSession(**{"spark.driver.host": "192.0.2.1"})
    for network in (Network(), Network(server_address="10.0.0.5")):  # which says no bind address
        with pytest.raises(ResourceError) as caught:
            listening_address(far, network)
    error = caught.value
    assert error.expected.endswith("or a Network with server_bind and server_address")
    assert error.received == "a Spark Connect client; Spark's driver is 192.0.2.1"
    assert "mode='allreduce' works from here" in error.hint
    assert "server_address=<an address of this machine that executors reach>" in error.hint
    named = Network(server_bind="0.0.0.0", server_address="10.0.0.5")
    assert listening_address(far, named) == ("0.0.0.0", "10.0.0.5")
    near: Any = _ConnectSession(**{"spark.driver.host": "127.0.0.1"})
    assert listening_address(near, Network()) == ("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("master", "encrypt", "expected"),
    [
        ("yarn", "auto", True),
        ("spark://host:7077", "auto", True),
        ("yarn", False, False),
        ("local[4]", "auto", False),
        ("local-cluster[2,1,1024]", "auto", False),
    ],
)
def test_calls_of_programs_are_encrypted_between_hosts(
    master: str, encrypt: Any, expected: bool
) -> None:
    asked = session(master), Network(encrypt=encrypt)
    assert is_encrypted(*asked, pickles=True) is expected


def test_a_program_on_a_cluster_gets_a_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the certificate, as ``launch`` goes; no executor is needed."""
    asked: list[bool] = []

    def note(spark: Any, network: Network, *, pickles: bool = False) -> None:
        asked.append(is_encrypted(spark, network, pickles=pickles))
        raise ConnectionAbortedError

    monkeypatch.setattr("sparkdl.program.spark_stage.certificate_of", note)
    for network in (None, Network(encrypt=False)):
        program = make_program(PyNode(print))
        with pytest.raises(ConnectionAbortedError):
            launch(program, "spark", spark=session("yarn"), network=network)
    assert asked == [True, False]


def test_ranks_listen_as_narrowly_as_works() -> None:
    driver = {"spark.driver.host": "driver.example.org"}
    assert rank_listening(session("local[2]"), Network()) == RankListening(
        "127.0.0.1", 0, "127.0.0.1"
    )
    assert rank_listening(session("yarn", **driver), Network(worker_port="7-9")) == RankListening(
        None, "7-9", "driver.example.org"
    )
    asked = Network(worker_bind="10.0.0.0/8")
    assert rank_listening(session("yarn", **driver), asked) == RankListening("10.0.0.0/8")


ENCRYPTED = Network(encrypt=True)


def listening() -> tuple[int, set[tuple[str, int]], float]:
    """This rank, where its process listens, and a sum over the ranks."""
    communicator = sparkdl.communicator()
    found = psutil.Process(os.getpid()).net_connections("tcp")
    ends = {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}
    total = float(communicator.all_reduce(np.full(100_000, 1.0, np.float32))[-1])
    return communicator.rank, ends, total


def test_ranks_of_one_host_listen_on_loopback_in_the_range_that_was_asked_for(spark: Any) -> None:
    told = sparkdl.run(
        listening, num_workers=2, communicator="builtin",
        network=Network("18450-18479", worker_port="18400-18449", encrypt=True),
    )  # fmt: skip
    assert [(rank, total) for rank, _, total in told] == [(0, 2.0), (1, 2.0)]
    for _, ends, _ in told:
        own = {port for address, port in ends if 18400 <= port < 18450 and address == "127.0.0.1"}
        assert len(own) >= 2
        assert all(address.startswith(("127.", "::ffff:127.")) for address, _ in ends)


def test_horovod_is_refused_in_an_encrypted_run_before_a_job(spark: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be encrypted"):
        sparkdl.run(listening, num_workers=2, communicator="horovod", network=ENCRYPTED)


@pytest.mark.parametrize("ways", [{"distributed": "torch"}, {"roles": {"worker": 2}}])
def test_what_a_framework_sends_is_refused_in_an_encrypted_run(spark: Any, ways: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be encrypted"):
        sparkdl.run(listening, num_workers=2, network=ENCRYPTED, **ways)


@pytest.mark.parametrize(
    "way",
    [
        {"mode": "asynchronous", "parameter_server_mode": "socket"},
        {"mode": "synchronous", "parameter_server_mode": "http"},
        {"mode": "allreduce"},
    ],
    ids=lambda way: way["mode"],
)
def test_an_encrypted_fit_learns(spark: Any, digits_df: Any, way: dict[str, Any]) -> None:
    spark_model = SparkModel(make_mlp(), num_workers=2, batch_size=64, network=ENCRYPTED, **way)
    history = spark_model.fit(digits_df, epochs=2, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
    assert spark_model.summary.transports == {way.get("parameter_server_mode", "builtin")}


class OneOnly:
    """Forwards the first connection to a server, and refuses all others."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.2", port), backlog=1)
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:
            return
        self._listener.close()
        far = socket.create_connection(("127.0.0.1", self._port))
        self._ends = [near, far]
        for source, target in ((near, far), (far, near)):
            thread = threading.Thread(target=self._forward, args=(source, target), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        for end in (self._listener, *self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("reached_by", ["one rank", "no rank"])
def test_run_goes_on_where_ranks_cannot_reach_the_driver(
    spark: Any, tmp_path: Any, reached_by: str
) -> None:
    port = free_port()

    def work() -> tuple[int, float]:
        communicator = sparkdl.communicator()
        with open(tmp_path / f"{communicator.rank}", "a") as file:
            file.write("called\n")
        return communicator.rank, float(communicator.all_reduce(1.0))

    proxy = OneOnly(port) if reached_by == "one rank" else None
    try:
        with pytest.warns(
            RuntimeWarning, match=rf"(?s)rank \d on .* cannot reach .*127.0.0.2:{port}"
        ):
            told = sparkdl.run(
                work, num_workers=2, communicator="builtin",
                network=Network(port, "127.0.0.1", "127.0.0.2"),
            )  # fmt: skip
    finally:
        if proxy is not None:
            proxy.close()
    assert told == [(0, 2.0), (1, 2.0)]
    assert [(tmp_path / f"{rank}").read_text() for rank in (0, 1)] == ["called\n"] * 2
