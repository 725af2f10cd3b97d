"""config: settings are checked when they are made, and stay as they are."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from sparkdl.config import (
    NETWORK_SETTINGS,
    FitConfig,
    LoopSettings,
    arguments_from_file,
    check_use_gpu,
    columns_from_file,
    parse_frequency,
)
from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.network import ports_of


@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "often", None])
def test_frequencies_that_make_no_sense_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError):
        parse_frequency(bad)


def test_loop_settings_are_checked_when_made() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        LoopSettings(epochs=1, batch_size=0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mode": "async"}, "did you mean 'asynchronous'"),
        ({"parameter_server_mode": "tcp"}, "'socket'"),
        ({"communicator": "mpi", "mode": "allreduce"}, "'horovod'"),
        ({"frequency": 0}, "frequency"),
        ({"num_workers": 0}, "num_workers"),
        ({"batch_size": True}, "batch_size"),
        ({"port": "9-5"}, "port"),
        ({"use_gpu": "yes"}, "use_gpu"),
        ({"memory_budget_mb": 0}, "memory_budget_mb"),
        ({"seed": -1}, "seed"),
        ({"start_timeout_s": 0}, "start_timeout_s"),
        ({"worker_timeout_s": float("nan")}, "worker_timeout_s"),
        ({"worker_timeout_s": True}, "worker_timeout_s"),
        ({"max_restarts": -1, "mode": "allreduce"}, "max_restarts"),
        ({"max_restarts": 1}, "max_restarts has no effect"),
        ({"communicator": "builtin"}, "communicator has no effect"),
        ({"on_nan": "drop"}, "on_nan"),
        ({"on_nan": "skip", "mode": "allreduce", "communicator": "horovod"}, "Horovod sends"),
        ({"parameter_server_mode": "shm", "mode": "allreduce"}, "has no effect"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        FitConfig(**arguments)
    assert caught.value.expected
    assert caught.value.received


def test_updates_that_are_not_finite_are_refused_by_all_but_horovod() -> None:
    for communicator in ("builtin", "auto"):
        FitConfig(mode="allreduce", on_nan="skip", communicator=communicator)
    for on_nan in ("raise", "ignore"):
        FitConfig(mode="allreduce", on_nan=on_nan, communicator="horovod")


def test_a_config_is_frozen_and_travels() -> None:
    config = FitConfig(mode="allreduce", num_workers=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.mode = "hogwild"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config


def test_restarts() -> None:
    assert FitConfig().restarts == 0
    assert FitConfig(mode="allreduce").restarts == 3
    assert FitConfig(mode="allreduce", max_restarts=0).restarts == 0


def test_what_is_saved_makes_the_same_config() -> None:
    config = FitConfig(
        mode="synchronous", frequency=3, num_workers=2, port="7000-7010", seed=4,
        rule={"name": "bsp", "payload": "delta"}, server_bind="127.0.0.1", use_gpu=False,
    )  # fmt: skip
    saved = json.loads(json.dumps(config.to_file()))
    again = FitConfig(**arguments_from_file(saved, "a file"))
    assert again == dataclasses.replace(config, port=0, server_bind=None)
    old = json.loads(json.dumps(config.to_dict()))  # earlier versions wrote all of it
    assert set(old) - set(saved) == set(NETWORK_SETTINGS)
    assert FitConfig(**arguments_from_file(old, "a file")) == again


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(ModelError, match=r"(?s)'m.keras'.*another version.*later"):
        arguments_from_file({"mode": "hogwild", "later": 1}, "m.keras")


def test_ports() -> None:
    assert list(ports_of("7000-7002")) == list(ports_of((7000, 7002))) == [7000, 7001, 7002]
    for bad in (-1, 70000, "a", "9-5", (1,), None):
        with pytest.raises(ConfigError, match="port"):
            ports_of(bad)  # type: ignore[arg-type]


def test_encryption_and_where_workers_listen() -> None:
    network = FitConfig(mode="allreduce", worker_port="7000-7003", worker_bind="10.0.0.0/8").network
    assert (network.worker_port, network.worker_bind) == ("7000-7003", "10.0.0.0/8")
    for bad in ({"encrypt": "yes"}, {"encrypt": 1}, {"encrypt": None}, {"worker_bind": "eth0"}):
        with pytest.raises(ConfigError, match=r"encrypt must|worker_bind must"):
            FitConfig(mode="allreduce", **bad)  # type: ignore[arg-type]
    for unused in ({"worker_port": 7000}, {"worker_bind": "10.0.0.1"}):
        with pytest.raises(ConfigError, match="no effect in a mode with a server"):
            FitConfig(**unused)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Horovod's connections cannot be encrypted"):
        FitConfig(mode="allreduce", communicator="horovod", encrypt=True)


def test_names_are_compared_not_guessed() -> None:
    assert check_use_gpu("auto") == "auto"
    with pytest.raises(UnknownNameError):
        FitConfig(mode=None)  # type: ignore[arg-type]


def test_the_columns_of_a_file() -> None:
    columns = {"features": {"wide": ["a", "b"], "deep": "v"}, "label": "y"}
    assert columns_from_file({"mode": "hogwild", "columns": columns}, "m.keras") == columns
    assert arguments_from_file({"mode": "hogwild", "columns": columns}, "m.keras") == {
        "mode": "hogwild"
    }
    assert columns_from_file({"mode": "hogwild"}, "m.keras") == {}
    without = {"features": "v", "label": None}  # of a model that was compiled without a loss
    assert columns_from_file({"columns": without}, "m.keras") == without
    for bad in (
        "x", {"decoder": "os.system"}, {"label": 3}, {"features": [["a"]]}, {"features": None},
        {"label": {"out": None}},
    ):  # fmt: skip
        with pytest.raises(ModelError, match="which columns"):
            columns_from_file({"columns": bad}, "m.keras")


@pytest.mark.parametrize("resources", [{}, 2, {"cpus": 0}, {"cpus": "2"}, {1: 2}, {"gpu": True}])
def test_resources_of_a_stage(resources: Any) -> None:
    assert FitConfig(resources={"cpus": 2, "gpu": 0.5}).to_dict()["resources"]["cpus"] == 2
    with pytest.raises(ConfigError, match=r"\{'cpus': 4, 'gpu': 1\}"):
        FitConfig(resources=resources)
