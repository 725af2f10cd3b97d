"""Several parameter servers: the same model as with one, beside the driver or as tasks of Spark."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
from faulty import AtEpoch
from spark_models import make_mlp

from sparkdl import Network, SparkModel
from sparkdl.errors import ConfigError, ResourceError, TransportError
from sparkdl.rules import Rule


def servers_of() -> list[psutil.Process]:
    """All servers of this machine that this process, or an executor of it, has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "sparkdl.ps.server" in " ".join(process.cmdline()):
                found.append(process)
    return found


def require_none_left() -> None:
    deadline = time.monotonic() + 10
    while servers_of() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not servers_of()


def trained(data: Any, mode: str, workers: int, network: Network, **more: Any) -> np.ndarray:
    settings = {"seed": 3, "batch_size": 16, **more}
    spark_model = SparkModel(make_mlp(), mode, num_workers=workers, network=network, **settings)
    spark_model.fit(data, epochs=2, verbose=0)
    return np.concatenate([w.ravel() for w in spark_model.model.get_weights()])


@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
def test_the_same_weights_from_any_number_and_place_of_servers(digits_df: Any, mode: str) -> None:
    workers = 2 if mode == "synchronous" else 1
    expected = trained(digits_df, mode, workers, Network())
    places = [
        Network(num_servers=3), Network(num_servers=2, servers="executors"),
        Network(servers="executors"),
    ]  # fmt: skip
    for network in places:
        found = trained(digits_df, mode, workers, network)
        np.testing.assert_array_equal(found, expected)
    require_none_left()


def test_local_sgd_and_codecs_go_over_several_servers(digits_df: Any) -> None:
    for settings in ({"frequency": 4}, {"compression": "fp16"}):
        expected = trained(digits_df, "synchronous", 2, Network(), **settings)
        found = trained(digits_df, "synchronous", 2, Network(num_servers=2), **settings)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_what_goes_to_servers_on_executors_is_encrypted_where_it_is_asked_for(
    digits_df: Any,
) -> None:
    expected = trained(digits_df, "synchronous", 2, Network())
    network = Network(num_servers=2, servers="executors", encrypt=True)
    found = trained(
        digits_df, "synchronous", 2, network, parameter_server_mode="socket"
    )  # shared memory has no network to hide from
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("place", ["driver", "executors"])
def test_a_killed_server_of_several_ends_in_one_clear_error(digits_df: Any, place: str) -> None:
    killed: list[float] = []

    def kill() -> None:
        victims = [p for p in servers_of() if p.ppid() != os.getpid() or place == "driver"]
        os.kill(victims[-1].pid, signal.SIGKILL)
        killed.append(time.monotonic())

    network = Network(num_servers=2, servers=place)
    spark_model = SparkModel(make_mlp(), num_workers=2, batch_size=8, network=network)
    with pytest.raises(TransportError, match=r"parameter server(.|\n)*exit status -9"):
        spark_model.fit(digits_df, epochs=1000, verbose=0, callbacks=[AtEpoch(1, kill)])
    assert time.monotonic() - killed[0] < 10
    require_none_left()


class Norm(Rule):
    """Looks at the whole change."""

    name = "norm"

    def update(self, center: Any, delta: Any, state: Any, commit: Any, out: Any) -> None:
        np.add(center, delta / max(1.0, float(np.linalg.norm(delta))), out=out)


def test_what_cannot_go_over_several_servers_is_refused_before_a_job(digits_df: Any) -> None:
    several = Network(num_servers=2)
    with pytest.raises(ConfigError, match="may need all weights at once"):
        SparkModel(make_mlp(), rule=Norm(), network=several)
    with pytest.raises(ConfigError, match="several servers have no effect"):
        SparkModel(make_mlp(), rule="ensemble", network=several)
    with pytest.raises(ConfigError, match="num_servers has no effect in mode 'allreduce'"):
        SparkModel(make_mlp(), "allreduce", network=several)
    with pytest.raises(ConfigError, match="num_servers"):
        Network(num_servers=0)
    with pytest.raises(ConfigError, match="more servers than weights"):
        SparkModel(make_mlp(), network=Network(num_servers=10**6)).fit(digits_df, verbose=0)
    with pytest.raises(ResourceError, match="no task slot for a worker"):
        SparkModel(make_mlp(), network=Network(num_servers=4, servers="executors")).fit(
            digits_df, verbose=0
        )
    with pytest.raises(ResourceError, match="beside 3 for servers"):
        SparkModel(
            make_mlp(), "synchronous", num_workers=2,
            network=Network(num_servers=3, servers="executors"),
        ).fit(digits_df, verbose=0)  # fmt: skip


@pytest.mark.parametrize("place", ["driver", "executors"])
def test_after_a_killed_server_a_fit_goes_on_from_its_checkpoint(
    digits_df: Any, tmp_path: Any, place: str
) -> None:
    """One worker, in the order of the rows: what comes out is what comes out without the death."""
    killed: list[float] = []
    again: list[float] = []

    def kill() -> None:
        if not killed:
            os.kill(servers_of()[-1].pid, signal.SIGKILL)
            killed.append(time.monotonic())

    settings = {"num_workers": 1, "batch_size": 32, "seed": 3}
    whole = SparkModel(make_mlp(), **settings)
    whole.fit(digits_df, epochs=6, verbose=0, shuffle=False)
    network = Network(num_servers=2, servers=place)
    spark_model = SparkModel(make_mlp(), network=network, **settings)
    with pytest.warns(RuntimeWarning, match="a parameter server was lost.*goes on from epoch"):
        history = spark_model.fit(
            digits_df, epochs=6, verbose=0, shuffle=False, checkpoint_dir=str(tmp_path),
            callbacks=[
                AtEpoch(3, kill), AtEpoch(4, lambda: again.append(time.monotonic())),
            ],
        )  # fmt: skip
    assert again[0] - killed[0] < 30
    assert len(history.history["loss"]) == 6
    for mine, theirs in zip(spark_model.model.weights, whole.model.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    require_none_left()
