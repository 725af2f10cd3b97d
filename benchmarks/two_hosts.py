"""All-reduce between two hosts joined by a link of 1 Gbit/s and 1 ms: is the link full?

The hosts are network namespaces of this machine; see ``network.py``. For each number of ranks per
host the table shows the time of an all-reduce, the share of the link's bandwidth that it used
(``bytes of the array / time / rate``), and what crossed the link per byte of the array.

    python benchmarks/two_hosts.py [--rate 1e9] [--delay 0.0005] [--rounds 5]

The delay is each way: a round trip takes two. Two ranks send as many bytes as the array has, each
way; so do four, two on each host, if each byte crosses once per direction.
"""

from __future__ import annotations

import argparse
import multiprocessing.connection
import statistics

from all_reduce import Contender, be_rank, be_socket, has_horovod, join_ranks
from network import Host, enter, two_hosts

SIZES = (1_000, 100_000, 1_000_000, 10_000_000, 100_000_000)


def rank_in(pipe: multiprocessing.connection.Connection, host: Host, name: str, rank: int) -> None:
    """:func:`all_reduce.be_rank` on one of the two hosts."""
    enter(host.name)
    be_rank(pipe, name, rank, {"advertised_host": host.address})


def socket_in(
    pipe: multiprocessing.connection.Connection, host: Host, first: bool, server: str
) -> None:
    """:func:`all_reduce.be_socket` on one of the two hosts."""
    enter(host.name)
    be_socket(pipe, first, server)


def contenders(hosts: tuple[Host, Host]) -> list[Contender]:
    """All contenders that are compared."""
    one, two = hosts
    plain = Contender(
        "plain TCP, each way",
        [(socket_in, (one, True, one.address)), (socket_in, (two, False, one.address))],
    )
    plain.pipes[1].send(plain.pipes[0].recv())
    made = [plain]
    worlds = [("built-in, 2 x 1 ranks (ring)", "builtin", hosts)]
    worlds.append(("built-in, 2 x 2 ranks (hierarchical)", "builtin", (one, one, two, two)))
    if has_horovod():
        worlds.append(("Horovod, 2 x 1 ranks", "horovod", hosts))
    for label, name, places in worlds:
        ranks = [(rank_in, (host, name, rank)) for rank, host in enumerate(places)]
        made.append(join_ranks(Contender(label, ranks)))
    return made


def measure(hosts: tuple[Host, Host], options: argparse.Namespace) -> None:
    """Prints the table."""
    made = contenders(hosts)
    try:
        print("| array | contender | time | of the link | bytes sent per byte and host |")
        print("|---|---|---|---|---|")
        for size in options.sizes:
            repeats = max(1, min(50, 5_000_000 // size))
            sent: dict[str, list[float]] = {c.name: [] for c in made}
            for _ in range(options.rounds):
                for contender in made:
                    before = [host.sent_bytes() for host in hosts]
                    contender.measure(size, repeats)
                    after = [host.sent_bytes() for host in hosts]
                    # an operation more warms communicators up before the clock starts
                    done = repeats + (contender is not made[0])
                    most = max(b - a for a, b in zip(before, after, strict=True))
                    sent[contender.name].append(most / done / size)
            for contender in made:
                seconds = statistics.median(contender.times[size])
                share = size * 8 / options.rate / seconds
                ratio = statistics.median(sent[contender.name])
                print(
                    f"| {size:,} B | {contender.name} | {contender.cell(size)} "
                    f"| {share:.0%} | {ratio:.3f} |",
                    flush=True,
                )
    finally:
        for contender in made:
            contender.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e9, help="bits per second")
    parser.add_argument("--delay", type=float, default=0.0005, help="seconds, each way")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    options = parser.parse_args()
    try:
        with two_hosts(options.rate, options.delay) as (hosts, how):
            print(
                f"All-reduce over {options.rate / 1e9:g} Gbit/s, round trip "
                f"{2e3 * options.delay:g} ms ({how}); medians of {options.rounds}\n"
            )
            measure(hosts, options)
    except PermissionError as error:
        print(f"two hosts cannot be made here, so nothing was measured: {error}")


if __name__ == "__main__":
    main()
