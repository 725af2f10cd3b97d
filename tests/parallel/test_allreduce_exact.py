"""``mode='allreduce'`` is exact: ranks in processes of their own, and one process on all rows.

After 54 steps (64 where a run is stopped) the weights of all ranks are equal to the bit, and those
of one process with plain Keras to the last digits, whatever the optimizer, the partitions, the
communicator and the backend. Each world of processes is started once and runs all of its cases.

A world takes one to two minutes on an idle machine. Its limits are ten times that, so that a loaded
machine fails no case; a world ends at once when one of its processes has failed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import exact_program
import numpy as np
import pytest
from exact_program import Case
from keras_backends import environment_of

WORLDS = [("tensorflow", 2), ("jax", 2), ("tensorflow", 3), ("tensorflow", 4), ("torch", 2)]
HEAVIER = WORLDS[1:]
CASES = [
    pytest.param(
        b,
        s,
        c,
        id=f"{b}, {s} ranks: {c.name}",
        marks=[pytest.mark.slow] * ((b, s) in HEAVIER or c.is_repetition),
    )
    for b, s in WORLDS
    for c in exact_program.cases(b, s)
]
BOUNDS = {None: 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
WORLD_TIMEOUT_S = 1200.0
_results: dict[tuple[str, int], dict[str, list[Any]] | None] = {}
pytestmark = pytest.mark.timeout(WORLD_TIMEOUT_S + 60)


def run_world(backend: str, size: int, folder: Path, light: bool) -> dict[str, list[Any]]:
    """Case (or question) -> what each rank that knows it tells, its weights among them."""
    environment = environment_of(backend, TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
    logs = [folder / f"log.{rank}" for rank in range(size)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [
                sys.executable, exact_program.__file__, str(folder), str(rank), str(size),
                "light" if light else "all",
            ]  # fmt: skip
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                )
        wait_for(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found: dict[str, list[Any]] = {}
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        code = process.returncode
        assert code == 0, f"rank {rank} ended with {code}:\n{log.read_text()[-5000:]}"
        told = json.loads((folder / f"{rank}.json").read_text())
        with np.load(folder / f"{rank}.npz") as arrays:
            for name, known in told.items():
                weights = {"weights": arrays[name]} if name in arrays else {}
                found.setdefault(name, []).append({**known, **weights})
    return found


def wait_for(processes: list[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended, one has failed, or the time is over."""
    deadline = time.monotonic() + WORLD_TIMEOUT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return
        time.sleep(0.1)


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the results of a world, which it starts when first asked."""
    chosen = [item for item in request.session.items if item.path == Path(__file__)]
    light = not any(item.get_closest_marker("slow") for item in chosen)

    def results(backend: str, size: int) -> dict[str, list[Any]]:
        if importlib.util.find_spec(backend) is None:
            pytest.skip(f"{backend} is not installed")
        key = backend, size
        if key not in _results:
            _results[key] = None  # a world that failed is not tried for every case
            _results[key] = run_world(backend, size, tmp_path_factory.mktemp("world"), light)
        found = _results[key]
        assert found is not None, "the world has failed"
        return found

    return results


@pytest.mark.parametrize(("backend", "size", "case"), CASES)
def test_all_ranks_have_the_weights_of_one_process(
    worlds: Any, backend: str, size: int, case: Case
) -> None:
    found = worlds(backend, size)
    if case.name not in found and case.communicator == "horovod":
        pytest.skip("Horovod is not installed: make horovod")
    ranks, (alone,) = found[case.name], found[repr(case.question)]
    errors = [told["error"] for told in ranks if "error" in told]
    assert not errors, errors[0]
    assert len(ranks) == size
    steps = alone["steps"]
    assert [told["steps"] for told in ranks] == [steps] * size
    assert steps >= 50
    for told in ranks[1:]:
        np.testing.assert_array_equal(told["weights"], ranks[0]["weights"])
    # in half precision a mean over the ranks' means is rounded otherwise than one over all rows
    bound = 2e-2 if case.model.endswith("half") else BOUNDS[case.wire]
    assert np.isfinite(alone["weights"]).all()
    np.testing.assert_allclose(ranks[0]["weights"], alone["weights"], rtol=0, atol=bound)


def test_what_the_cases_are_meant_to_show(worlds: Any) -> None:
    found = worlds("tensorflow", 2)
    half = Case("scaled", "uneven", model="half")
    assert found[half.name][0]["steps"] == 54 - exact_program.EPOCHS  # one batch is infinite
    stopped = Case("momentum", "long", driver="stop")
    assert found[stopped.name][0]["steps"] == exact_program.STOP_AFTER
    exact, rounded = (Case("adam", "uneven", wire=wire) for wire in (None, "float16"))
    apart = np.abs(found[exact.name][0]["weights"] - found[rounded.name][0]["weights"]).max()
    assert apart > 1e-5  # it did travel in half precision
    assert found[half.name][0]["weights"].std() > 0.1
