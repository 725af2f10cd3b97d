"""Horovod as a communicator: how ranks agree on it; its TensorFlow operations move the arrays.

Horovod itself has no token, no limit on a wait, and does not say which rank is missing. So a
Horovod communicator contains a built-in one. Before each operation the ranks tell each other
through that what they are about to do (which takes some ten microseconds). Groups are built-in
communicators, because Horovod's own process sets must be made by all ranks together. Horovod is
imported when first used.

A process can have one Horovod communicator at a time: close it before you connect another. While it
is connected, ``horovod.tensorflow`` is initialised and the user's own calls of it work. Its
environment variables are set until ``close`` and then restored. Its rendezvous server, on rank 0,
has no password, as in ``horovodrun``; it listens on 127.0.0.1 where all ranks are on one host, else
on the address that the other ranks connect to.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from sparkdl.collective.arithmetic import (
    KINDS,
    OPS,
    Array,
    dtype_name,
    put_scaled,
    reduction_factors,
    shard_edges,
)
from sparkdl.collective.communicator import (
    DEFAULT_TIMEOUT_S,
    BuiltinOptions,
    Communicator,
    Connector,
    HorovodOptions,
    Member,
    make_communicator,
    name_ranks,
    refuse_others,
)
from sparkdl.errors import ConfigError, ProtocolError, ResourceError, SparkDLError, TransportError
from sparkdl.process.closing import environment
from sparkdl.wire.hosts import interface_addresses

_LOG = logging.getLogger(__name__)
_ANY_ADDRESS = ""


def start_on(server: Any, http_server: Any, host: str) -> int:
    """Starts a rendezvous server on one address, as its own ``start()`` does on all.

    Where ``host`` is no address of this machine (ranks connect through a NAT), it listens on all.

    Args:
        server: A ``RendezvousServer`` that has not started.
        http_server: The module that has it, ``horovod.runner.http.http_server``.
        host: The address that ranks connect to.

    Returns:
        The port, any free one.

    Raises:
        OSError: No port is free.
    """

    class OnOneAddress(http_server.RendezvousHTTPServer):  # type: ignore[misc]
        def server_bind(self) -> None:
            """Without looking up the address' name, which may take seconds, and no one needs."""
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = self.server_address[:2]

    address = host if _is_of_this_machine(host) else _ANY_ADDRESS
    server._httpd = OnOneAddress((address, 0), http_server.RendezvousHandler, 0)
    server._listen_thread = threading.Thread(target=server._httpd.serve_forever, daemon=True)
    server._listen_thread.start()
    return int(server._httpd.server_address[1])


def _is_of_this_machine(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except socket.gaierror:
        return False
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return False
    return True


_WIRE = {
    "bfloat16": "float32",
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
    "uint64": "int64",
}
"""The dtype that is sent for one that Horovod does not reduce; the way back changes no result."""
_ANSWER_S = 5.0
"""Seconds within which ranks that still run answer after a failure inside a compiled step."""


def unavailable() -> str:
    """The reason why Horovod cannot be used here; empty if it can. Imports TensorFlow."""
    try:
        hvd = importlib.import_module("horovod.tensorflow")
        importlib.import_module("horovod.runner.http.http_server")
    except Exception as error:  # a missing package, or a library built for another TensorFlow
        return f"{type(error).__name__}: {error}"
    if hvd.is_initialized():
        return (
            "Horovod is initialised already in this process: close the former communicator, "
            "or call hvd.shutdown()"
        )
    return "" if hvd.gloo_built() else "Horovod is built without Gloo"


def reduces_on_gpus() -> bool:
    """Whether Horovod reduces on this process' GPUs, by NCCL. Imports TensorFlow."""
    gpus = importlib.import_module("tensorflow").config.list_logical_devices("GPU")
    if not gpus or unavailable():
        return False
    return bool(importlib.import_module("horovod.tensorflow").nccl_built())


class CannotStartError(ResourceError):
    """Horovod imports on all ranks and starts on some of them only; raised on all."""


def gather_reasons(builtin: Communicator, reason: str) -> dict[int, str]:
    """Rank -> why it cannot go on; all ranks call it. Empty if every rank's ``reason`` is."""
    mine = np.frombuffer(reason[:500].encode(), np.uint8)
    reasons = [array.tobytes().decode(errors="replace") for array in builtin.all_gather(mine)]
    return {rank: why for rank, why in enumerate(reasons) if why}


class HorovodCommunicator(Communicator):
    """One rank of a Horovod world; made by :class:`HorovodConnector`."""

    name = "horovod"
    in_graph = True

    def __init__(
        self,
        builtin: Communicator,
        members: Sequence[Member],
        interface: str | None,
        timeout_s: float,
    ) -> None:
        super().__init__(
            builtin.rank,
            builtin.size,
            local_rank=builtin.local_rank,
            local_size=builtin.local_size,
            timeout_s=timeout_s,
        )
        self._builtin = builtin
        self._started = contextlib.ExitStack()
        self._server: Any = None
        self._tf = importlib.import_module("tensorflow")
        self._hvd = importlib.import_module("horovod.tensorflow")
        try:
            self._start(members, interface)
        except BaseException:
            self._stop()
            raise

    def _start(self, members: Sequence[Member], interface: str | None) -> None:
        slots = _slots([m.host_id for m in members])
        together = len({m.host_id for m in members}) == 1
        reason, port = "", 0
        own = "127.0.0.1" if together else members[self.rank].host
        if self.rank == 0:
            try:
                server = importlib.import_module("horovod.runner.http.http_server")
                hosts = importlib.import_module("horovod.runner.common.util.hosts")
                self._server = server.RendezvousServer(verbose=0)
                listening = start_on(self._server, server, own)
                self._server.init([hosts.SlotInfo(*slot) for slot in slots])
                port = listening
            except Exception as error:  # the other ranks wait for the port
                reason = f"{type(error).__name__}: {error}"
        port = int(self._builtin.broadcast(np.array([port], np.int64))[0])
        names = ("HOSTNAME", "RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
        settings = {f"HOROVOD_{n}": str(v) for n, v in zip(names, slots[self.rank], strict=True)}
        settings["HOROVOD_CONTROLLER"] = settings["HOROVOD_CPU_OPERATIONS"] = "gloo"
        settings["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = "127.0.0.1" if together else members[0].host
        settings["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
        settings["HOROVOD_GLOO_IFACE"] = interface or interface_of(own)
        # Limits for operations inside a compiled step, which the built-in communicator cannot see.
        limit = max(1, round(self._timeout_s))
        settings["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(limit)
        settings["HOROVOD_STALL_CHECK_TIME_SECONDS"] = str(min(60, -(-limit // 2)))
        settings["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(min(30, limit))
        self._started.enter_context(environment(**settings))
        if port:
            try:
                self._hvd.init()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
        failed = gather_reasons(self._builtin, reason)
        if failed:
            raise CannotStartError(
                f"Horovod did not start on {name_ranks(sorted(failed))}",
                expected="horovod.tensorflow.init() on all ranks",
                received="; ".join(f"rank {r}: {why}" for r, why in sorted(failed.items())),
                hint="communicator='builtin' needs no Horovod",
            )

    def _stop(self) -> None:
        with contextlib.suppress(Exception):
            self._hvd.shutdown()
        self._started.close()
        if self._server is not None:
            self._server.stop()
            self._server._httpd.server_close()  # Horovod does not close the listening socket
            self._server = None

    def _release(self) -> None:
        self._stop()
        self._builtin.close()

    def _abort(self) -> None:
        self._builtin.close()

    def _missing(self) -> list[int]:
        return self._builtin._missing()

    def explain(self, error: BaseException) -> BaseException:
        known = super().explain(error)
        if known is not error or "horovod" not in f"{type(error).__name__}: {error}".lower():
            return known
        try:
            self._builtin.all_reduce_async(np.zeros(1)).wait(_ANSWER_S)
        except SparkDLError as cause:
            return cause
        return _failed(self.rank, error)

    def _all_reduce(self, source: Array, target: Array, op: str, weight: float) -> None:
        self._reduce("all_reduce", source, target, op, weight)

    def _reduce(self, kind: str, source: Array, target: Array, op: str, weight: float) -> None:
        factors = reduction_factors(op, self._agree(kind, source, OPS.index(op), weight))
        if not any(factors):
            target.fill(0)
        if not any(factors) or not source.size:
            return
        dtype = dtype_name(source.dtype)
        if dtype == "uint64" and op in ("max", "min"):
            raise ConfigError(
                f"Horovod cannot all_reduce uint64 with op={op!r}",
                expected="a dtype that it can order", received="uint64",
                hint="communicator='builtin' can",
            )  # fmt: skip
        factor = factors[self.rank]
        scaled = source
        if factor != 1.0:
            scaled = np.empty_like(source)
            put_scaled(source, factor, scaled)
        if dtype in _WIRE:
            scaled = scaled.astype(_WIRE[dtype])
        joined = {"max": self._hvd.Max, "min": self._hvd.Min}.get(op, self._hvd.Sum)
        result = self._do(
            lambda: self._hvd.allreduce(
                self._tf.constant(scaled),
                op=joined,
                name=f"sparkdl.reduce.{op}.{dtype}.{source.size}",
            ).numpy()
        )
        np.copyto(target, result, casting="unsafe")

    def _reduce_scatter(self, source: Array, target: Array, op: str, weight: float) -> None:
        # Horovod over Gloo has no reduce-scatter
        whole = np.empty_like(source)
        self._reduce("reduce_scatter", source, whole, op, weight)
        edges = shard_edges(source.size, self.size)
        np.copyto(target, whole[edges[self.rank] : edges[self.rank + 1]])

    def _all_gather(self, source: Array) -> list[Array]:
        self._agree("all_gather", source, 0, 1.0, same=False)
        kinds = self._builtin.all_gather(
            np.frombuffer(f"{dtype_name(source.dtype)} {source.shape}".encode(), np.uint8)
        )
        data = source.reshape(-1).view(np.uint8) if source.size else np.empty(0, np.uint8)
        joined = self._do(
            lambda: self._hvd.allgather(self._tf.constant(data), name="sparkdl.gather").numpy()
        )
        results, at = [], 0
        for text in kinds:
            name, _, shape_text = text.tobytes().decode().partition(" ")
            shape = tuple(int(d) for d in shape_text.strip("()").split(",") if d.strip())
            dtype = source.dtype if name == dtype_name(source.dtype) else np.dtype(name)
            end = at + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            results.append(joined[at:end].copy().view(dtype).reshape(shape))
            at = end
        return results

    def _all_to_all(self, parts: list[Array]) -> list[Array]:
        dtype = parts[0].dtype
        self._agree("all_to_all", parts[0][:0], 0, 1.0)
        data = np.concatenate([part.view(np.uint8) for part in parts])
        splits = np.array([part.nbytes for part in parts], np.int32)

        def exchange() -> tuple[Array, Array]:
            joined, sizes = self._hvd.alltoall(
                self._tf.constant(data), splits=self._tf.constant(splits), name="sparkdl.all_to_all"
            )
            return joined.numpy(), sizes.numpy()

        joined, sizes = self._do(exchange)
        edges = np.cumsum([0, *sizes]).tolist()
        return [joined[a:b].copy().view(dtype) for a, b in itertools.pairwise(edges)]

    def _broadcast(self, target: Array, root: int) -> None:
        self._agree("broadcast", target, root, 1.0)
        if not target.size:
            return
        data = target.view(np.uint8)
        result = self._do(
            lambda: self._hvd.broadcast(
                self._tf.constant(data), root, name=f"sparkdl.broadcast.{root}.{data.size}"
            ).numpy()
        )
        np.copyto(data, result)

    def _barrier(self) -> None:
        self._builtin.barrier()

    def _group(self, ranks: list[int]) -> Communicator:
        return self._builtin.group(ranks)

    def _agree(
        self, kind: str, array: Array, detail: int, weight: float, *, same: bool = True
    ) -> list[float]:
        """Checks that all ranks call the same operation; returns every rank's weight."""
        told = [detail, array.nbytes, array.dtype.num] if same else []
        mine = [float(number) for number in (KINDS.index(kind), *told)]
        answers = self._builtin.all_gather(np.array([*mine, weight]))
        for rank, other in enumerate(answers):
            if len(other) != len(mine) + 1 or other[:-1].tolist() != mine:
                raise ProtocolError(
                    f"the ranks disagree about the operation on rank {self.rank}",
                    expected=f"{kind} of {array.nbytes} bytes of {array.dtype} on all ranks",
                    received=f"another operation on rank {rank}",
                    hint="all ranks must call the same operations in the same order",
                )
        return [float(other[-1]) for other in answers]

    def _do(self, operation: Callable[[], Any]) -> Any:
        try:
            with self._tf.device("/cpu:0"):
                return operation()
        except Exception as error:
            raise _failed(self.rank, error) from error


def _failed(rank: int, error: BaseException) -> TransportError:
    return TransportError(
        f"Horovod's operation failed on rank {rank}",
        expected="all ranks to stay until the operation is done",
        received=f"{type(error).__name__}: {error}",
        hint="the cause is most likely on another rank",
    )


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address.

    Raises:
        ResourceError: None has it.
    """
    addresses = interface_addresses()
    for name, found in addresses.items():
        if found == address or (found == "127.0.0.1" and address.startswith("127.")):
            return name
    raise ResourceError(
        f"no network interface has the address {address!r}",
        expected="the advertised address on an interface of this machine",
        received=f"interfaces {', '.join(addresses)}",
        hint="pass interface='eth0', or whichever reaches the other hosts",
    )


def _slots(host_ids: Sequence[str]) -> list[tuple[str, int, int, int, int, int, int]]:
    """Horovod's slots, rank by rank: host; rank, local and cross rank; the three sizes.

    >>> _slots(['a', 'b', 'a'])[2]
    ('host-0', 2, 1, 0, 3, 2, 1)
    """
    hosts = {h: f"host-{i}" for i, h in enumerate(dict.fromkeys(host_ids))}
    ranks = {h: [r for r, other in enumerate(host_ids) if other == h] for h in hosts}
    slots = []
    for rank, host in enumerate(host_ids):
        local = ranks[host].index(rank)
        across = [h for h in hosts if len(ranks[h]) > local]
        sizes = len(host_ids), len(ranks[host]), len(across)
        slots.append((hosts[host], rank, local, across.index(host), *sizes))
    return slots


class HorovodConnector:
    """Makes the Horovod communicator of one rank.

    Args:
        rank: This rank, from 0.
        interface: Network interface for Gloo; None: the one that has the advertised address.
        **options: Options of :class:`sparkdl.collective.builtin.BuiltinConnector`.
    """

    name = HorovodCommunicator.name

    def __init__(
        self,
        rank: int,
        *,
        interface: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **options: Unpack[BuiltinOptions],
    ) -> None:
        self._rank, self._interface, self._timeout_s = rank, interface, timeout_s
        self._builtin: Connector = make_communicator(
            "builtin", rank=rank, timeout_s=timeout_s, **options
        )

    def prepare(self) -> Member:
        """Opens the sockets of the built-in communicator; imports no framework."""
        return replace(self._builtin.prepare(), communicator=self.name)

    def connect(self, members: Sequence[Member], token: bytes) -> Communicator:
        """Connects all ranks with the built-in communicator, and then with Horovod.

        Raises:
            ResourceError: Horovod cannot be used on some ranks; they are named.
        """
        refuse_others(members, self.name)
        known = [replace(member, communicator="builtin") for member in members]
        builtin = self._builtin.connect(known, token)
        try:
            return self._connected(builtin, members)
        except BaseException:
            builtin.close()
            raise

    def _connected(self, builtin: Communicator, members: Sequence[Member]) -> Communicator:
        lacking = _lacking(builtin, members)
        if lacking:
            raise ResourceError(
                f"Horovod cannot be used on {name_ranks(sorted(lacking))}",
                expected="horovod.tensorflow to import on all ranks",
                received="; ".join(f"rank {r}: {why}" for r, why in sorted(lacking.items())),
                hint="docker/build_horovod.sh builds and installs it; "
                "communicator='builtin' needs no installation",
            )
        return HorovodCommunicator(builtin, members, self._interface, self._timeout_s)

    def close(self) -> None:
        self._builtin.close()


class AutoConnector(HorovodConnector):
    """Horovod where it reduces on GPUs (NCCL) on all ranks, else the built-in communicator.

    The choice follows from what is installed and never from the clock, so that two runs of one
    fit round alike. The built-in communicator is also taken where a rank lacks Horovod or cannot
    start it, and in encrypted runs.

    Args:
        rank: This rank, from 0.
        calls_horovod: The ranks run functions that may call Horovod by themselves: Horovod is
            taken wherever it imports on all ranks.
        **options: Options of :class:`HorovodConnector`.
    """

    name = "auto"

    def __init__(
        self, rank: int, *, calls_horovod: bool = True, **options: Unpack[HorovodOptions]
    ) -> None:
        super().__init__(rank, **options)
        self._calls_horovod = calls_horovod
        self._encrypted = options.get("certificate") is not None

    def _connected(self, builtin: Communicator, members: Sequence[Member]) -> Communicator:
        if self._encrypted or not (self._calls_horovod or self._all_reduce_on_gpus(builtin)):
            return builtin
        if _lacking(builtin, members):
            return builtin
        try:
            return HorovodCommunicator(builtin, members, self._interface, self._timeout_s)
        except CannotStartError as error:
            if self._calls_horovod:
                raise
            _LOG.warning("%s; the built-in communicator reduces in its place", error)
            return builtin

    @staticmethod
    def _all_reduce_on_gpus(builtin: Communicator) -> bool:
        """Whether Horovod would reduce on every rank's GPUs; the same on all ranks."""
        return float(builtin.all_reduce(np.float64(reduces_on_gpus()), "min")) > 0


def _lacking(builtin: Communicator, members: Sequence[Member]) -> dict[int, str]:
    """Rank -> the reason why Horovod cannot be used there; empty if it can on all ranks."""
    return gather_reasons(builtin, unavailable() or unreachable(members))


def unreachable(members: Sequence[Member]) -> str:
    """The reason why other hosts cannot reach Horovod here; empty if they can.

    Horovod 0.28.1 listens on the address that the host's name resolves to, and ignores the
    interface that it is given; where others cannot connect, it ends the process. The build of
    docker/build_horovod.sh listens on the interface. Neither connects over IPv6.
    """
    if len({m.host_id for m in members}) == 1:
        return ""
    version = str(importlib.import_module("horovod").__version__)
    of_ipv6 = sorted({m.host for m in members if ":" in m.host})
    if of_ipv6:
        return f"horovod {version} connects over IPv4 only, the ranks' addresses: {of_ipv6}"
    if "sparkdl" in version:
        return ""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        address = f"nothing ({error})"
    if address.startswith(("127.", "nothing")):
        return f"horovod {version} would listen where this host's name resolves to: {address}"
    return ""
