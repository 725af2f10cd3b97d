"""Tables of rows: the rates of one processor, the bytes of a row, and files beside ``np.save``.

A batch has 106,496 ids (4,096 rows of 26), drawn by Zipf's law (1.05) over the table; sizes
alternate, medians are printed. "torch" is one ``EmbeddingBag(sparse=True)`` with torch's own
Adagrad on one thread, which takes slots and not ids. ``--files`` writes a table and the same
bytes by ``np.save`` in turn, and looks rows up in its mapped files.

    python benchmarks/tables.py [--rows 100000 1000000 10000000] [--repeats 5] [--dim 16] [--torch]
    python benchmarks/tables.py --files [--rows 1000000]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from sparkdl.tables.files import TableReader, load_rows, write_manifest, write_part
from sparkdl.tables.hashing import mix64
from sparkdl.tables.store import RowStore, merged

BATCH = 4096 * 26


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ids_of(numbers: np.ndarray) -> np.ndarray:
    """Ids over all 64-bit integers, as hashed features have."""
    return mix64(numbers.astype(np.int64)).view(np.int64)


def draw(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Numbers below ``rows`` by Zipf's law with exponent 1.05."""
    u, power = rng.random(BATCH), 1 - 1.05
    ranks = ((rows + 1.0) ** power - 1) * u + 1
    return np.minimum(ranks ** (1 / power) - 1, rows - 1).astype(np.int64)


def filled(rows: int, dim: int, rule: str) -> tuple[RowStore, float]:
    """A store with all rows, and the rows that it took in per second."""
    store, begun, spent = RowStore(dim, rule), 0, 0.0
    gradient = np.full((100_000, dim), 0.01, np.float32)
    while begun < rows:
        part = ids_of(np.arange(begun, min(begun + 100_000, rows)))
        start = time.perf_counter()
        store.push(part, gradient[: len(part)], 0.05)
        spent += time.perf_counter() - start
        begun += len(part)
    return store, rows / spent


def seconds(call: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def torch_bag(rows: int, dim: int) -> Callable[[np.ndarray, np.ndarray], None]:
    """One step of torch: the gradient of each of the unique slots, by sparse Adagrad."""
    import torch

    torch.set_num_threads(1)
    bag = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = torch.optim.Adagrad(bag.parameters(), 0.05, initial_accumulator_value=0.1)

    def step(slots: np.ndarray, gradients: np.ndarray) -> None:
        optimizer.zero_grad()
        found = bag(torch.from_numpy(slots), torch.arange(len(slots)))
        found.backward(torch.from_numpy(gradients))
        optimizer.step()

    return step


def rates(sizes: list[int], dim: int, repeats: int, with_torch: bool) -> None:
    rng, before = np.random.default_rng(0), resident_bytes()
    heads = "rows|new rows/s|bytes per row|× (values + state + 8)|ids found/s|rows pulled/s"
    heads += "|Adagrad rows/s|torch, Adagrad rows/s|ms of a batch: unique, pull, merge, push"
    print("| " + heads.replace("|", " | ") + " |")
    print("|---" * 9 + "|")
    stores = {}
    for rows in sizes:
        store, new = filled(rows, dim, "adagrad")
        resident = resident_bytes() - before
        before = resident_bytes()
        stores[rows] = store, new, resident / rows
    bags = {rows: torch_bag(rows, dim) for rows in sizes} if with_torch else {}
    times: dict[int, dict[str, list[float]]] = {rows: {} for rows in sizes}
    for repeat in range(repeats + 1):
        for rows in sizes:
            store, numbers = stores[rows][0], draw(rng, rows)
            batch = ids_of(numbers)
            spread = rng.permutation(rows)[:BATCH] if rows <= 10**6 else np.unique(
                rng.integers(0, rows, BATCH))  # fmt: skip
            every = ids_of(spread)
            g = rng.normal(size=(len(every), dim)).astype(np.float32)
            own = {
                "find": seconds(store.known, every) / len(every),
                "pull": seconds(store.pull, every) / len(every),
                "push": seconds(store.push, every, g, 0.05) / len(every),
            }
            if bags:
                own["torch"] = seconds(bags[rows], spread, g) / len(every)
            start = time.perf_counter()
            unique, _ = np.unique(batch, return_inverse=True)
            looked = time.perf_counter()
            store.pull(unique)
            pulled = time.perf_counter()
            summed = merged(batch, np.ones((BATCH, dim), np.float32))
            joined = time.perf_counter()
            store.push(summed[0], summed[1], 0.05)
            ended = time.perf_counter()
            own |= {"b0": looked - start, "b1": pulled - looked, "b2": joined - pulled,
                    "b3": ended - joined}  # fmt: skip
            if repeat:
                for name, value in own.items():
                    times[rows].setdefault(name, []).append(value)
    for rows in sizes:
        _, new, resident = stores[rows]
        middle = {name: statistics.median(values) for name, values in times[rows].items()}
        torch_rate = f"{1 / middle['torch']:,.0f}" if "torch" in middle else ""
        batch_ms = ", ".join(f"{middle[f'b{i}'] * 1e3:.1f}" for i in range(4))
        found, pulled, pushed = (f"{1 / middle[name]:,.0f}" for name in ("find", "pull", "push"))
        print(f"| {rows:,} | {new:,.0f} | {resident:.0f} | {resident / (8 * dim + 8):.2f} "
              f"| {found} | {pulled} | {pushed} "
              f"| {torch_rate} | {batch_ms} |")  # fmt: skip


def files(rows: int, dim: int, repeats: int) -> None:
    store, _ = filled(rows, dim, "adagrad")
    folder = tempfile.mkdtemp()
    found: dict[str, list[float]] = {"part": [], "np.save": [], "load": []}
    plain = np.empty((rows, 2 * dim + 2), np.float32)
    plain[:] = 1
    try:
        for repeat in range(repeats):
            table, path = os.path.join(folder, str(repeat)), os.path.join(folder, "plain.npy")

            def save(path: str = path) -> None:
                with open(path, "wb") as file:
                    np.save(file, plain)
                    file.flush()
                    os.fsync(file.fileno())

            def write(table: str = table) -> None:
                write_part(store, table, 0, 1)
                write_manifest(table, 1)

            def load(table: str = table) -> None:
                load_rows(RowStore(dim, "adagrad"), table, 0, 1)

            for name, call in (("part", write), ("np.save", save), ("load", load)):
                found[name].append(plain.nbytes / seconds(call) / 1e6)
            if repeat < repeats - 1:
                shutil.rmtree(table)
        before = resident_bytes()
        opened = seconds(lambda: TableReader(table))
        reader = TableReader(table)
        ids = ids_of(draw(np.random.default_rng(0), rows))
        unique = np.unique(ids)
        first = seconds(lambda: reader.pull(unique))
        again = seconds(lambda: reader.pull(unique))
        touched = resident_bytes() - before
    finally:
        shutil.rmtree(folder)
    middle = {name: statistics.median(values) for name, values in found.items()}
    print("| rows | MB | part, MB/s | np.save, MB/s | part / np.save | load, MB/s |")
    print("|---|---|---|---|---|---|")
    print(f"| {rows:,} | {plain.nbytes / 1e6:,.0f} | {middle['part']:,.0f} "
          f"| {middle['np.save']:,.0f} | {middle['part'] / middle['np.save']:.2f} "
          f"| {middle['load']:,.0f} |")  # fmt: skip
    looked = (
        f"{len(unique):,} rows looked up in {first * 1e3:.0f} ms, again in {again * 1e3:.0f} ms"
    )
    print(f"\nopening {opened * 1e3:.0f} ms; {looked}; {touched / 1e6:,.0f} MB more resident")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10**5, 10**6, 10**7])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--files", action="store_true")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, NumPy {np.__version__}, dim {options.dim}\n")
    if options.files:
        for rows in options.rows:
            files(rows, options.dim, options.repeats)
    else:
        rates(options.rows, options.dim, options.repeats, options.torch)


if __name__ == "__main__":
    main()
