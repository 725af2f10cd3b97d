"""config: settings are checked when they are made, and stay as they are."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from sparkdl.config import (
    FitConfig,
    Limits,
    LoopSettings,
    arguments_from_file,
    check_use_gpu,
    columns_from_file,
    parse_frequency,
)
from sparkdl.errors import ConfigError, ModelError, UnknownNameError
from sparkdl.settings.network import Network, at_port, ports_of
from sparkdl.settings.values import UserSettings, declared


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
        ({"network": {"port": 5}}, r"(?s)must be a sparkdl.Network.*network=Network\(port=5\)"),
        ({"use_gpu": "yes"}, "use_gpu"),
        ({"limits": Network()}, "limits must be a sparkdl.Limits"),
        ({"limits": Limits(stall_timeout_s=5)}, "stall_timeout_s has no effect in SparkModel"),
        ({"seed": -1}, "seed"),
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_budget_mb": 0}, {"start_timeout_s": 0}, {"worker_timeout_s": float("nan")},
        {"worker_timeout_s": True}, {"max_restarts": -1}, {"collective_timeout_s": "60"},
    ],
    ids=str,
)  # fmt: skip
def test_limits_are_checked_when_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


@pytest.mark.parametrize("cls", [FitConfig, Limits, Network])
def test_each_setting_has_a_default_of_its_kind_and_a_sentence(cls: type[UserSettings]) -> None:
    for setting in declared(cls).values():
        assert setting.sentence.endswith((".", ")")), setting.name
        if setting.default is not None:
            assert setting.kind.check(setting.name, setting.default) == setting.default
        else:
            assert setting.kind.optional


def test_a_port_beside_a_network() -> None:
    assert at_port(Network(encrypt=True), 7000) == Network(7000, encrypt=True)
    assert at_port(Network(7000), 0) == at_port(Network(7000), 7000) == Network(7000)
    with pytest.raises(ConfigError, match="named twice"):
        at_port(Network(7001), 7000)


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
    assert FitConfig().restarts == 3
    assert FitConfig(mode="allreduce").restarts == 3
    assert FitConfig(mode="allreduce", limits=Limits(max_restarts=0)).restarts == 0


def test_what_is_saved_makes_the_same_config() -> None:
    config = FitConfig(
        mode="synchronous", frequency=3, num_workers=2, seed=4, use_gpu=False,
        rule={"name": "bsp", "payload": "delta"}, limits=Limits(memory_budget_mb=64),
        network=Network("7000-7010", "127.0.0.1"),
    )  # fmt: skip
    saved = json.loads(json.dumps(config.to_file()))
    again = FitConfig(**arguments_from_file(saved, "a file"))
    assert again == dataclasses.replace(config, network=Network())
    other = json.loads(json.dumps(config.to_dict()))  # as an attacker would write it
    assert set(other) - set(saved) == {"network"}
    assert FitConfig(**arguments_from_file(other, "a file")) == again


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(ModelError, match=r"(?s)'m.keras'.*another version.*later"):
        arguments_from_file({"mode": "hogwild", "later": 1}, "m.keras")
    for flat in ("memory_budget_mb", "server_bind"):
        with pytest.raises(ModelError, match=rf"another version(?s:.*){flat}"):
            arguments_from_file({"mode": "hogwild", flat: 1}, "m.keras")
    for limits in ({"memory": 1}, {"stall_timeout_s": 1}, 5):
        with pytest.raises(ModelError, match="another version"):
            arguments_from_file({"mode": "hogwild", "limits": limits}, "m.keras")
    with pytest.raises(ModelError, match="malformed settings: memory_budget_mb"):
        arguments_from_file({"mode": "hogwild", "limits": {"memory_budget_mb": "x"}}, "m.keras")


def test_ports() -> None:
    assert list(ports_of("7000-7002")) == list(ports_of((7000, 7002))) == [7000, 7001, 7002]
    for bad in (-1, 70000, "a", "9-5", (1,), None):
        with pytest.raises(ConfigError, match="port"):
            ports_of(bad)  # type: ignore[arg-type]


def test_encryption_and_where_workers_listen() -> None:
    network = Network(worker_port="7000-7003", worker_bind="10.0.0.0/8")
    assert FitConfig(mode="allreduce", network=network).network == network
    for bad in ({"encrypt": "yes"}, {"encrypt": 1}, {"encrypt": None}, {"worker_bind": "eth0"}):
        with pytest.raises(ConfigError, match=r"encrypt must|worker_bind must"):
            Network(**bad)  # type: ignore[arg-type]
    for unused in ({"worker_port": 7000}, {"worker_bind": "10.0.0.1"}):
        with pytest.raises(ConfigError, match="no effect in a mode with a server"):
            FitConfig(network=Network(**unused))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Horovod's connections cannot be encrypted"):
        FitConfig(mode="allreduce", communicator="horovod", network=Network(encrypt=True))


def test_names_are_compared_not_guessed() -> None:
    assert check_use_gpu("auto") == "auto"
    with pytest.raises(UnknownNameError):
        FitConfig(mode=None)  # type: ignore[arg-type]


def test_the_columns_of_a_file() -> None:
    columns = {"features": {"wide": ["a", "b"], "deep": "v"}, "label": "y"}
    assert columns_from_file({"mode": "hogwild", "columns": columns}, "m.keras") == columns
    assert arguments_from_file({"mode": "hogwild", "columns": columns}, "m.keras") == {
        "mode": "hogwild", "limits": Limits(),
    }  # fmt: skip
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
